# SPDX-License-Identifier: Apache-2.0
"""Functions as nodes: how their code is found again by name, and which functions assign enclosing variables."""

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


class CodeByName:
    """Pickles a code object by the position of its function in a module, from which a function is built again."""

    def __init__(self, module: str, top: str, qualname: str, index: int) -> None:
        self.location = module, top, qualname, index

    def __reduce__(self) -> tuple[object, ...]:
        return (_function_at, self.location)

    @classmethod
    def from_code(cls, code: types.CodeType) -> CodeByName | None:
        # A code object knows its file, not its module. All lambdas of a function have one qualified name, so the place
        # among them is part of the location.
        top = code.co_qualname.partition(".<locals>")[0]
        for name, module in list(sys.modules.items()):
            if getattr(module, "__file__", None) == code.co_filename:
                codes = _codes_named(module, top, code.co_qualname)
                if code in codes:
                    return cls(name, top, code.co_qualname, codes.index(code))
        return None


def _codes_named(module: object, top: str, qualname: str) -> list[types.CodeType]:
    """All code objects with a qualified name, within the module's variable `top`."""
    candidates = [functools.reduce(lambda scope, part: getattr(scope, part, None), top.split("."), module)]
    if top == "<lambda>":  # any function of the module, or a default of one
        values = list(vars(module).values())
        functions = [value for value in values if isinstance(value, types.FunctionType)]
        candidates = [*functions, *(default for f in functions for default in f.__defaults__ or ())]
    # Decorators and graftax's own functions wrap the function that was written.
    functions_inside = [inspect.unwrap(function) for function in candidates if callable(function)]
    functions_inside = [getattr(function, "_function", function) for function in functions_inside]
    todo = [function.__code__ for function in functions_inside if isinstance(function, types.FunctionType)]
    codes = list[types.CodeType]()
    while todo:
        code = todo.pop(0)
        codes += [code] if code.co_qualname == qualname else []
        todo += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return codes


def _function_at(module: str, top: str, qualname: str, index: int) -> types.FunctionType:
    scope = importlib.import_module(module)
    code = _codes_named(scope, top, qualname)[index]
    return types.FunctionType(code, vars(scope), code.co_name, None, tuple(types.CellType() for _ in code.co_freevars))


def named_function(function: types.FunctionType | types.CodeType) -> types.FunctionType | CodeByName | None:
    """The function that is imported by the module and qualified name of `function`, if it has the same code."""
    if isinstance(function, types.CodeType):
        return CodeByName.from_code(function)
    candidate: Any = sys.modules.get(function.__module__ or "")
    for part in function.__qualname__.split("."):
        candidate = getattr(candidate, part, None)
    # A function that graftax has jitted stands for the one that it wraps.
    candidate = getattr(candidate, "_function", candidate) if isinstance(candidate, _core.Caller) else candidate
    is_same_code = isinstance(candidate, types.FunctionType) and candidate.__code__ == function.__code__
    return candidate if is_same_code and candidate.__globals__ is function.__globals__ else None


_WRITERS: weakref.WeakKeyDictionary[types.CodeType, bool] = weakref.WeakKeyDictionary()


def writes_its_cells(function: types.FunctionType) -> bool:
    """Does the function's code, or code nested in it, assign a variable of an enclosing function (`nonlocal`)?"""
    code = function.__code__
    # Disassembling takes time: the answer is cached for each code object.
    writes = _WRITERS.get(code)
    if writes is None:
        writes = _WRITERS[code] = _writes(code, set(code.co_freevars))
    return writes


def _writes(code: types.CodeType, names: set[str]) -> bool:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in names:
            return True
    # A nested function assigns a variable of the outer ones only if it has it as a free variable.
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return any(_writes(c, names & set(c.co_freevars)) for c in inner)
