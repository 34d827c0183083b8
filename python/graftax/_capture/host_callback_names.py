# SPDX-License-Identifier: Apache-2.0
"""Which names of a function only its host functions read: these run after the trace, and take what they find then."""

from __future__ import annotations

import dis
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

from graftax._base.missing import MISSING
from graftax._capture.bytecode import instructions_of, names_of, nested_codes
from graftax._capture.constant_values import is_empty


def only_in(code: types.CodeType, hosts: set[types.CodeType]) -> set[str]:
    """The variables and globals of a function that are read or assigned by these functions in it alone."""
    outside_hosts: set[str] = set()
    theirs: set[str] = set()
    todo = [(code, False)]
    while todo:
        part, in_host = todo.pop()
        in_host |= part in hosts
        (theirs if in_host else outside_hosts).update(names_of(part).variables)
        todo += [(constant, in_host) for constant in part.co_consts if isinstance(constant, types.CodeType)]
    return theirs - outside_hosts


def passed_hosts(function: types.FunctionType, hosts: set[types.CodeType]) -> Iterator[tuple[types.CellType, str]]:
    """The variables of a function that hold one of these functions, which it names only to pass it on."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    filled = {name: cell for name, cell in cells if not is_empty(cell)}
    used_otherwise = set[str]()
    for code in nested_codes(function.__code__):
        names = names_of(code)
        used_otherwise |= {chain[0] for chain in names.chains if len(chain) > 1} | names.assigned
    for name, cell in filled.items():
        host = cell.cell_contents
        if (
            isinstance(host, types.FunctionType)
            and host.__code__ in hosts
            and not vars(host)
            and name not in used_otherwise
        ):
            theirs = {id(inner.cell_contents) for inner in host.__closure__ or () if not is_empty(inner)}
            if not any(
                id(other_cell.cell_contents) in theirs for other_cell in filled.values() if other_cell is not cell
            ):
                yield cell, name


# ---- a method that is given to a callback: `jax.debug.callback(losses.append, x)`

_CALLBACKS = frozenset({"callback", "debug_callback", "io_callback", "pure_callback"})
_OURS = __name__.partition(".")[0]
_NO_OPERATION = frozenset({"PRECALL", "EXTENDED_ARG", "NOP", "COPY_FREE_VARS"})
_BY_NAME = frozenset({"LOAD_GLOBAL", "LOAD_DEREF"})
_OF_VARIABLES = _BY_NAME | {
    f"{what}_{where}" for what in ("LOAD", "STORE", "DELETE") for where in ("NAME", "GLOBAL", "DEREF", "CLASSDEREF")
}
_GIVEN: weakref.WeakKeyDictionary[types.CodeType, dict[str, list[tuple[str, ...]]]] = weakref.WeakKeyDictionary()


def receivers(function: types.FunctionType) -> Iterator[tuple[types.CellType | None, str, Any]]:
    """(cell or None for a global, name, value) of what a function names only to give its methods to JAX's callbacks."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    scope = function.__globals__

    def value_of(name: str) -> Any:
        cell = cells.get(name)
        return scope.get(name, MISSING) if cell is None else MISSING if is_empty(cell) else cell.cell_contents

    for name, called in _given_methods(function.__code__).items():
        value = value_of(name)
        is_one = value is not MISSING and not isinstance(value, types.ModuleType | types.FunctionType | type)
        if is_one and all(_is_callback(value_of(chain[0]), chain[1:]) for chain in called):
            yield cells.get(name), name, value


def _given_methods(code: types.CodeType) -> dict[str, list[tuple[str, ...]]]:
    """name -> what is called with `name.method` as its first argument, where the code does no more with the name."""
    chains_by_name = _GIVEN.get(code)
    if chains_by_name is None:
        calls_by_name: dict[str, list[tuple[str, ...]]] = {}
        used_otherwise = set[str]()
        for part in nested_codes(code):
            operations = [
                instruction for instruction in instructions_of(part) if instruction.opname not in _NO_OPERATION
            ]
            for i, instruction in enumerate(operations):
                if instruction.opname not in _OF_VARIABLES:
                    continue
                called = _called_with(operations, i) if instruction.opname in _BY_NAME else ()
                if called:
                    calls_by_name.setdefault(instruction.argval, []).append(called)
                else:
                    used_otherwise.add(instruction.argval)
        chains_by_name = _GIVEN[code] = {
            name: chains for name, chains in calls_by_name.items() if name not in used_otherwise
        }
    return chains_by_name


def _called_with(operations: list[dis.Instruction], i: int) -> tuple[str, ...]:
    """The names of a function (`jax`, `debug`, `callback`) that is given a method of the `i`-th operation's first."""
    if not _is_loaded_attribute(operations[i + 1]):
        return ()
    callee = i - 1
    is_called = operations[callee].opname == "PUSH_NULL"
    callee -= is_called
    index, names = callee, list[str]()
    while operations[index].opname in ("LOAD_ATTR", "LOAD_METHOD"):
        names.append(operations[index].argval)
        index -= 1
    if operations[index].opname not in _BY_NAME:
        return ()
    names.append(operations[index].argval)
    is_called |= index > 0 and operations[index - 1].opname == "PUSH_NULL"
    is_called |= operations[index].opname == "LOAD_GLOBAL" and bool((operations[index].arg or 0) & 1)
    is_called |= operations[callee].opname == "LOAD_METHOD" or _is_method_call(operations[callee])
    return tuple(reversed(names)) if is_called and names[0] in _CALLBACKS else ()


def _is_loaded_attribute(instruction: dis.Instruction) -> bool:
    return instruction.opname == "LOAD_ATTR" and not _is_method_call(instruction)


def _is_method_call(instruction: dis.Instruction) -> bool:
    return sys.version_info >= (3, 12) and instruction.opname == "LOAD_ATTR" and bool((instruction.arg or 0) & 1)


def _is_callback(value: object, attributes: tuple[str, ...]) -> bool:
    for name in attributes:
        if not isinstance(value, types.ModuleType):
            return False
        value = vars(value).get(name, MISSING)
    module = (getattr(value, "__module__", None) or "").partition(".")[0]
    return isinstance(value, types.FunctionType) and module in ("jax", _OURS) and value.__name__ in _CALLBACKS
