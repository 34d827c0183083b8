# SPDX-License-Identifier: Apache-2.0
"""What the core asks of Python functions."""

from __future__ import annotations

import dis
import sys
import types
import weakref
from typing import Any

from . import _core


def named_function(function: types.FunctionType) -> types.FunctionType | None:
    """The function of the same code that the module and the qualified name of `function` lead to."""
    found: Any = sys.modules.get(function.__module__ or "")
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    found = getattr(found, "_function", found) if isinstance(found, _core.Caller) else found
    same = isinstance(found, types.FunctionType) and found.__code__ == function.__code__
    return found if same and found.__globals__ is function.__globals__ else None


_WRITERS: weakref.WeakKeyDictionary[types.CodeType, bool] = weakref.WeakKeyDictionary()


def writes_its_cells(function: types.FunctionType) -> bool:
    """Does the function's code, or code nested in it, assign a variable of an enclosing function (`nonlocal`)?"""
    code = function.__code__
    found = _WRITERS.get(code)
    if found is None:
        found = _WRITERS[code] = _writes(code, set(code.co_freevars))
    return found


def _writes(code: types.CodeType, names: set[str]) -> bool:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in names:
            return True
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return any(_writes(c, names & set(c.co_freevars)) for c in inner)
