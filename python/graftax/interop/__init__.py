# SPDX-License-Identifier: Apache-2.0
"""What graftax knows of other libraries: one module a library, imported only once that library is."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..registry import Description

ADAPTERS = {"equinox": ".equinox", "flarejax": ".flarejax", "flax.nnx": ".nnx"}


def describe(cls: type) -> Description | None:
    """How the core is to treat a class that an imported library made; None where no adapter knows it.

    An adapter imports the names that it needs. Where a version of the library lacks one, its classes are what they are
    to JAX: registered nodes.
    """
    for library, adapter in ADAPTERS.items():
        if library not in sys.modules:
            continue
        try:
            module = importlib.import_module(adapter, __name__)
        except ImportError:
            continue
        description = module.describe(cls)
        if description is not None:
            return description
    return None
