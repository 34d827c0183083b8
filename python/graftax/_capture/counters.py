# SPDX-License-Identifier: Apache-2.0
"""Counters: numbers that code computes anew from themselves, as `self.steps += 1` does, so that each call has another.

They are symbolic from the first call on. A trace with symbols may have to begin anew, for code that reads a number in C
or catches an exception. If no code that the function can reach does that, the first trace has symbols already.
Otherwise the first trace has the numbers as they are, and once it has run, another one with symbols follows.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from graftax._capture.builtin_overrides import asks_numbers
from graftax._capture.bytecode import instructions_of, names_of
from graftax._capture.number_flow import Name, Variable, numbers_computed_anew
from graftax._capture.reachable_code import ReachableCode

_MOST_CODES = 256  # objects of code that are looked at before the first trace
_TALLY = frozenset(("update", "subtract"))  # methods of a `collections.Counter`


def find_counters(
    names: set[Name], function: types.FunctionType, callees: Iterable[object], tallied: set[Name]
) -> tuple[set[Name], bool]:
    """The numbers that code computes anew, and whether a first call with symbols in their places surely runs the body
    once. Where it may not, these are only the parameters that the function returns computed anew: what it does to
    objects is seen after the trace.

    Args:
        names: of the numbers among the call's arguments.
        callees: functions among the objects that the call gets, and the classes of the other objects.
        tallied: the names in a `collections.Counter`, which computes its numbers anew by itself.
    """
    codes, is_plain = _reachable([function, *callees]) if names else ((), True)
    if not is_plain:
        parameters: set[Name] = {name for name in names if isinstance(name, Variable)}
        return numbers_computed_anew(function.__code__, function.__globals__, parameters, hands_back=True), False
    counters = set[Name]()
    for code, scope in codes:
        # Only the results of the traced function itself can be arguments of its next call.
        counters |= numbers_computed_anew(code, scope, names, hands_back=code is function.__code__)
        counters |= set() if _TALLY.isdisjoint(names_of(code).attributes) else tallied
    return counters, True


def _reachable(functions_and_classes: Iterable[object]) -> tuple[list[tuple[types.CodeType, dict[str, Any]]], bool]:
    """The code that these can reach, with its globals, and whether it is plain.

    It is not plain where there may be more of it, or where some of it asks a number in C, catches exceptions or imports
    modules: then a trace with symbols may have to begin anew.
    """
    reachable, codes = ReachableCode(), list[tuple[types.CodeType, dict[str, Any]]]()
    for value in functions_and_classes:
        reachable.add(value)
    for code, scope in reachable.codes():
        codes.append((code, scope))
        # Each time, since `is_known` may change with each code object.
        if not reachable.is_known or len(codes) > _MOST_CODES or not _is_plain(code, scope):
            return codes, False
    return codes, reachable.is_known


def _is_plain(code: types.CodeType, scope: dict[str, Any]) -> bool:
    if names_of(code).imports or asks_numbers(code, scope):
        return False
    # PUSH_EXC_INFO begins a handler, or the end of a `with`. Generators and comprehensions have a table without it.
    handles = (instruction.opname == "PUSH_EXC_INFO" for instruction in instructions_of(code))
    return not (code.co_exceptiontable and any(handles))


def name_of(key: Any) -> str | int | None:
    """The name of an attribute, or the key or index of an item."""
    if isinstance(key, SequenceKey):
        return key.idx
    name = key.name if isinstance(key, GetAttrKey) else key.key if isinstance(key, DictKey) else None
    return name if type(name) is str or type(name) is int else None
