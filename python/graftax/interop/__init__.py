# SPDX-License-Identifier: Apache-2.0
"""What graftax knows of other libraries: one module a library, imported only once that library is."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .._description import Description, TreeDescription

ADAPTERS = {"equinox": ".equinox", "flarejax": ".flarejax", "flax.nnx": ".nnx"}


def describe(cls: type) -> Description | None:
    """How the core is to treat a class that an imported library made; None where no adapter knows it.

    An adapter imports the names that it needs. Where a version of the library lacks one, its classes are what they are
    to JAX: registered nodes.
    """
    for module in _adapters():
        description = module.describe(cls)
        if description is not None:
            return description
    return None


def tree_fields(cls: type, flatten: Any, unflatten: Any) -> TreeDescription | None:
    """How to read and write a class that is registered with JAX by name, where that does what its functions do."""
    for module in _adapters():
        ask = getattr(module, "tree_fields", None)
        description = ask and ask(cls, flatten, unflatten)
        if description is not None:
            return description
    return None


def _adapters() -> Iterator[ModuleType]:
    for library, adapter in ADAPTERS.items():
        if library not in sys.modules:
            continue
        try:
            yield importlib.import_module(adapter, __name__)
        except ImportError:
            continue
