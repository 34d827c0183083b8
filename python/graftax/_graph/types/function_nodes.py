# SPDX-License-Identifier: Apache-2.0
"""What the core asks of Python functions."""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
import sys
import types
import weakref
from typing import Any

from graftax import _core


class CodeByPlace:
    """Stands in a pickle for a function of which only the code is left: it is made anew of that."""

    def __init__(self, module: str, top: str, qualname: str, which: int) -> None:
        self.place = module, top, qualname, which

    def __reduce__(self) -> tuple[Any, ...]:
        return (_function_at, self.place)

    @classmethod
    def of(cls, code: types.CodeType) -> CodeByPlace | None:
        top = code.co_qualname.partition(".<locals>")[0]
        for name, module in list(sys.modules.items()):
            if getattr(module, "__file__", None) == code.co_filename:
                found = _codes(module, top, code.co_qualname)
                if code in found:
                    return cls(name, top, code.co_qualname, found.index(code))
        return None


def _codes(module: Any, top: str, qualname: str) -> list[types.CodeType]:
    """All code of this name within what the module has under another."""
    named = [functools.reduce(lambda at, part: getattr(at, part, None), top.split("."), module)]
    if top == "<lambda>":  # one that has a name in the module, or is the default of what has
        values = list(vars(module).values())
        functions = [value for value in values if isinstance(value, types.FunctionType)]
        named = [*functions, *(default for f in functions for default in f.__defaults__ or ())]
    bare = [inspect.unwrap(function) for function in named if callable(function)]
    bare = [getattr(function, "_function", function) for function in bare]
    waiting = [function.__code__ for function in bare if isinstance(function, types.FunctionType)]
    out = list[types.CodeType]()
    while waiting:
        code = waiting.pop(0)
        out += [code] if code.co_qualname == qualname else []
        waiting += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return out


def _function_at(module: str, top: str, qualname: str, which: int) -> types.FunctionType:
    scope = importlib.import_module(module)
    code = _codes(scope, top, qualname)[which]
    return types.FunctionType(code, vars(scope), code.co_name, None, tuple(types.CellType() for _ in code.co_freevars))


def named_function(function: types.FunctionType | types.CodeType) -> Any:
    """The function of the same code that the module and the qualified name of `function` lead to."""
    if isinstance(function, types.CodeType):
        return CodeByPlace.of(function)
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
