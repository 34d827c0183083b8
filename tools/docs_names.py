# SPDX-License-Identifier: Apache-2.0
"""An extension of griffe, which reads the docstrings for the site.

An `Example:` is code, not text; parameters that share one line (`reverse, axis: as in ...`) are listed one by one. A
class whose `__new__` has the signatures shows those.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# A line of names, and the lines below it that are indented further.
SHARED = re.compile(r"^( +)(\*{0,2}\w+(?:, \*{0,2}\w+)+)(:.*\n(?:\1 +.*\n)*)", re.MULTILINE)


def _apart(match: re.Match[str]) -> str:
    return "".join(f"{match[1]}{name}{match[3]}" for name in match[2].split(", "))


class Names(griffe.Extension):
    """Spells docstrings as griffe reads them."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = SHARED.sub(_apart, text)
        if obj.is_class and "__init__" not in obj.members:
            of = "__call__" if obj.name == "_Show" else "__new__"  # graftax.show is an object that is called
            if of in obj.members:
                obj.members["__init__"] = obj.members[of]
