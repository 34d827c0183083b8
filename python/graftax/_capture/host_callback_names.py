# SPDX-License-Identifier: Apache-2.0
"""Which names of a function only its host functions read: these run after the trace, and take what they find then."""

from __future__ import annotations

import dis
import types
import weakref
from collections.abc import Iterator
from typing import Any

from graftax._base.missing import MISSING
from graftax._capture.bytecode import (
    CHANGES,
    LOADS,
    loads_method,
    names_of,
    nested_codes,
    operations_of,
    pushes_null,
)
from graftax._capture.constant_values import content, is_empty


def only_in(code: types.CodeType, hosts: set[types.CodeType]) -> set[str]:
    """The variables and globals that only the code of `hosts`, among all code inside a function, reads or assigns."""
    outside_hosts: set[str] = set()
    in_hosts: set[str] = set()
    todo = [(code, False)]
    while todo:
        nested, is_in_host = todo.pop()
        # What is defined inside a host function runs on the host, too.
        is_in_host |= nested in hosts
        (in_hosts if is_in_host else outside_hosts).update(names_of(nested).variables)
        todo += [(constant, is_in_host) for constant in nested.co_consts if isinstance(constant, types.CodeType)]
    return in_hosts - outside_hosts


def passed_hosts(function: types.FunctionType, hosts: set[types.CodeType]) -> Iterator[tuple[types.CellType, str]]:
    """The variables of a function that hold a host function, which it names only to pass it on."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    filled = {name: cell for name, cell in cells if not is_empty(cell)}
    used_otherwise = set[str]()
    # An attribute of it, or another value under its name, is more than passing it on.
    for code in nested_codes(function.__code__):
        names = names_of(code)
        used_otherwise |= {chain[0] for chain in names.chains if len(chain) > 1} | names.assigned
    for name, cell in filled.items():
        host = cell.cell_contents
        # A host function with attributes may be asked for them.
        if (
            isinstance(host, types.FunctionType)
            and host.__code__ in hosts
            and not vars(host)
            and name not in used_otherwise
        ):
            captured_ids = {id(inner.cell_contents) for inner in host.__closure__ or () if not is_empty(inner)}
            # The function may use what the host function captures, where another of its variables holds that, too.
            other_cells = [other_cell for other_cell in filled.values() if other_cell is not cell]
            if not any(id(other_cell.cell_contents) in captured_ids for other_cell in other_cells):
                yield cell, name


# ---- a method that is given to a callback: `jax.debug.callback(losses.append, x)`

_CALLBACKS = frozenset({"callback", "debug_callback", "io_callback", "pure_callback"})
_OURS = __name__.partition(".")[0]
_BY_NAME = frozenset({"LOAD_GLOBAL", "LOAD_DEREF"})
_OF_VARIABLES = LOADS | CHANGES
_METHODS: weakref.WeakKeyDictionary[types.CodeType, dict[str, list[tuple[str, ...]]]] = weakref.WeakKeyDictionary()


def receivers(function: types.FunctionType) -> Iterator[tuple[types.CellType | None, str, Any]]:
    """(cell or None for a global, name, value) of what a function names only to give its methods to callbacks."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    scope = function.__globals__

    def value_of(name: str) -> Any:
        cell = cells.get(name)
        return scope.get(name, MISSING) if cell is None else content(cell)

    for name, called in _given_methods(function.__code__).items():
        value = value_of(name)
        # Functions of a module and methods of a class have no object that would change.
        is_object = value is not MISSING and not isinstance(value, types.ModuleType | types.FunctionType | type)
        if is_object and all(_is_callback(value_of(chain[0]), chain[1:]) for chain in called):
            yield cells.get(name), name, value


def _given_methods(code: types.CodeType) -> dict[str, list[tuple[str, ...]]]:
    """name -> chains of names of the callbacks that get `name.method`. Only for names without other uses."""
    chains_by_name = _METHODS.get(code)
    if chains_by_name is None:
        calls_by_name: dict[str, list[tuple[str, ...]]] = {}
        used_otherwise = set[str]()
        for nested in nested_codes(code):
            operations = operations_of(nested)
            for i, instruction in enumerate(operations):
                if instruction.opname not in _OF_VARIABLES:
                    continue
                called = _called_with(operations, i) if instruction.opname in _BY_NAME else ()
                if called:
                    calls_by_name.setdefault(instruction.argval, []).append(called)
                else:
                    used_otherwise.add(instruction.argval)
        chains_by_name = _METHODS[code] = {
            name: chains for name, chains in calls_by_name.items() if name not in used_otherwise
        }
    return chains_by_name


def _called_with(operations: list[dis.Instruction], i: int) -> tuple[str, ...]:
    """The names of a callback (`jax`, `debug`, `callback`) whose first argument is an attribute of what operation `i`
    loads. Empty where it is not so."""
    if operations[i + 1].opname != "LOAD_ATTR" or loads_method(operations[i + 1]):
        return ()
    # What is loaded before the first argument is the function: attributes back to a global or a variable.
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
    # Each Python marks in another way that the function is loaded for a call: by a null that is pushed before or behind
    # it, by the lowest bit of LOAD_GLOBAL, or by the load of a method.
    is_called |= index > 0 and operations[index - 1].opname == "PUSH_NULL"
    is_called |= pushes_null(operations[index]) or loads_method(operations[callee])
    return tuple(reversed(names)) if is_called and names[0] in _CALLBACKS else ()


def _is_callback(value: object, attributes: tuple[str, ...]) -> bool:
    """Do these attributes lead from a module to a callback of JAX or graftax?"""
    for name in attributes:
        if not isinstance(value, types.ModuleType):
            return False
        value = vars(value).get(name, MISSING)
    module = (getattr(value, "__module__", None) or "").partition(".")[0]
    return isinstance(value, types.FunctionType) and module in ("jax", _OURS) and value.__name__ in _CALLBACKS
