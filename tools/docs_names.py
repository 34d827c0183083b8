# SPDX-License-Identifier: Apache-2.0
"""An extension of griffe, which reads the docstrings for the site: an `Example:` is code, not text."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Names(griffe.Extension):
    """Spells the heading of examples as griffe does."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
