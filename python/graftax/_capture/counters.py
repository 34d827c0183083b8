# SPDX-License-Identifier: Apache-2.0
"""Counters: numbers that code computes anew from themselves, as `self.steps += 1` does, so that each call has another.

They are symbolic from the first call on, where its trace runs the body of the function once all the same. A trace with
symbols may have to begin anew, for code that reads a number in C or catches an exception. So all code that the function
can reach is looked at before, and where that says nothing of some of it, the first call takes the numbers as they are.
"""

from __future__ import annotations

import dis
import itertools
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from graftax._capture.builtin_overrides import asks_numbers
from graftax._capture.bytecode import names_of
from graftax._capture.reachable_code import ReachableCode

_MOST_CODES = 256  # that are looked at


class Variable(NamedTuple):
    """The name of a variable that a function shares with the one around it."""

    name: str


Name = str | int | Variable  # of an attribute or an item of a dict; the index of an item of a list; of a variable


def counters(names: set[Name], function: types.FunctionType, given: Iterable[object]) -> set[Name]:
    """Those of these numbers that are symbolic in the first call of a function; none where that may trace it twice.

    Args:
        names: of numbers.
        given: functions among the objects that the call is given, and the classes of the others.
    """
    codes = _plain_codes([function, *given]) if names else []
    return {name for name in names if any(_updates(code, name) for code in codes)}


def _plain_codes(functions_and_classes: Iterable[object]) -> list[types.CodeType]:
    """All code that these can reach; none if any of it asks a number in C, catches exceptions or imports modules."""
    reachable, codes = ReachableCode(), list[types.CodeType]()
    for value in functions_and_classes:
        reachable.add(value)
    for code, scope in reachable.codes():
        codes.append(code)
        if not reachable.is_known or len(codes) > _MOST_CODES or not _is_plain(code, scope):
            return []
    return codes if reachable.is_known else []


def _is_plain(code: types.CodeType, scope: dict[str, Any]) -> bool:
    if names_of(code).imports or asks_numbers(code, scope):
        return False
    # Handlers, and `with`.
    return not (code.co_exceptiontable and any(part.opname == "PUSH_EXC_INFO" for part in dis.get_instructions(code)))


def name_of(key: Any) -> str | int | None:
    """The name of an attribute, or of an item of a dict; the index of an item of a list."""
    if isinstance(key, SequenceKey):
        return key.idx
    name = key.name if isinstance(key, GetAttrKey) else key.key if isinstance(key, DictKey) else None
    return name if type(name) is str else None


def _updates(code: types.CodeType, name: Name) -> bool:
    """Is there a line that reads what has this name, computes, and stores the result under the same name?"""
    if isinstance(name, str) and name not in code.co_names and name not in code.co_consts:
        return False
    if isinstance(name, Variable) and name.name not in code.co_freevars:
        return False
    lines = itertools.groupby(dis.get_instructions(code), lambda part: part.positions and part.positions.lineno)
    return any(_updates_in_line(list(parts), name) for _, parts in lines)


def _updates_in_line(parts: list[dis.Instruction], name: Name) -> bool:
    operations = [(part.opname, part.argval) for part in parts]
    if not any(part.opname == "BINARY_OP" and part.argrepr != "[]" for part in parts):
        return False
    if isinstance(name, Variable):
        return ("LOAD_DEREF", name.name) in operations and ("STORE_DEREF", name.name) in operations
    stores = ("STORE_ATTR", name) in operations or {("LOAD_GLOBAL", "setattr"), ("LOAD_CONST", name)} <= {*operations}
    if ("LOAD_ATTR", name) in operations and stores:
        return True
    # A key lies on top of the stack where its item is stored. `d[key] += 1` copies it before, to read the item, too.
    keys = ("LOAD_CONST", name), ("LOAD_SMALL_INT", name)
    after_key = [following[0] for key, following in itertools.pairwise(operations) if key in keys]
    stores = any(operation == "STORE_SUBSCR" for operation, _ in operations)
    return ("COPY" in after_key and stores) or ("STORE_SUBSCR" in after_key and len(after_key) > 1)
