# SPDX-License-Identifier: Apache-2.0
"""Counters: numbers that code computes anew from themselves, as `self.steps += 1` does, so that each call has another.

They are symbolic from the first call on, where its trace runs the body of the function once all the same. A trace with
symbols may have to begin anew, for code that reads a number in C or catches an exception. So all code that the function
can reach is looked at before, and where that says nothing of some of it, the first call takes the numbers as they are.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable
from typing import Any

from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from graftax._capture.builtin_overrides import asks_numbers
from graftax._capture.bytecode import names_of
from graftax._capture.number_flow import Name, numbers_computed_anew
from graftax._capture.reachable_code import ReachableCode

_MOST_CODES = 256  # that are looked at
_TALLY = frozenset(("update", "subtract"))  # methods of a `collections.Counter`


def counters(names: set[Name], function: types.FunctionType, given: Iterable[object], tallied: set[Name]) -> set[Name]:
    """Those of these numbers that are symbolic in the first call of a function; none where that may trace it twice.

    Args:
        names: of numbers.
        given: functions among the objects that the call is given, and the classes of the others.
        tallied: those in a `collections.Counter`, which computes them anew by itself.
    """
    found = set[Name]()
    for code, scope in _plain_codes([function, *given]) if names else ():
        found |= numbers_computed_anew(code, scope, names, hands_back=code is function.__code__)
        found |= set() if _TALLY.isdisjoint(names_of(code).attributes) else tallied
    return found


def _plain_codes(functions_and_classes: Iterable[object]) -> list[tuple[types.CodeType, dict[str, Any]]]:
    """All code that these can reach, with its globals.

    None if any of it asks a number in C, catches exceptions or imports modules.
    """
    reachable, codes = ReachableCode(), list[tuple[types.CodeType, dict[str, Any]]]()
    for value in functions_and_classes:
        reachable.add(value)
    for code, scope in reachable.codes():
        codes.append((code, scope))
        if not reachable.is_known or len(codes) > _MOST_CODES or not _is_plain(code, scope):
            return []
    return codes if reachable.is_known else []


def _is_plain(code: types.CodeType, scope: dict[str, Any]) -> bool:
    if names_of(code).imports or asks_numbers(code, scope):
        return False
    # Handlers, and `with`.
    return not (code.co_exceptiontable and any(part.opname == "PUSH_EXC_INFO" for part in dis.get_instructions(code)))


def name_of(key: Any) -> str | int | None:
    """The name of an attribute, or the key or index of an item."""
    if isinstance(key, SequenceKey):
        return key.idx
    name = key.name if isinstance(key, GetAttrKey) else key.key if isinstance(key, DictKey) else None
    return name if type(name) is str or type(name) is int else None
