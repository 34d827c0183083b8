# SPDX-License-Identifier: Apache-2.0
"""What a function by value reads outside of its arguments: constants of its programs, which are compared by content."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._capture.constant_values import OF_KEYS, OF_NAMES
from graftax._capture.origin import Origin
from graftax._capture.read_set import ReadSet
from graftax._capture.trace_local import synchronized
from graftax._export.holder_names import Holder, resolve, value_at
from graftax._export.read_set_data import as_data, difference
from graftax._export.structure_digest import Nameless, sentinels
from graftax._export.value_token import content_token
from graftax._graph.structure import Structure

OF_CACHE = "its code calls {name}, which has a cache: pass its result to the function as an argument"
NO_CONTENT = "{text} is a constant of its program, and cannot be compared in another process: pass it as an argument"
IDENTITY = (
    "an argument is an object of class {cls}, which is compared by identity, and so is a constant of its program. "
    "graftax.jit(f, mutation='discard') takes both as arguments"
)
WAS_SET = "{text} was changed while the function was traced, which each process has to do again"


class _Noted(NamedTuple):
    """What a name had when it was noted."""

    text: str  # how messages call it
    current: Callable[[], Any]
    value: Any
    is_same: Callable[[Any, Any], bool]


class ConstantReads(ReadSet):
    """Notes what the traces of a function by value read, with its values during the trace. None of it is a root."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: dict[tuple[int, str | None], _Noted] = {}  # by holder and name
        self._looked_at: dict[str, tuple[list[Any], int]] = {}  # the lists of names, and how much of them is noted

    @synchronized
    def begin_trace(self) -> None:
        """Takes the present values of all names that are known from earlier traces."""
        # What an earlier trace has read may have changed since: only a change during this one forbids to save.
        self._noted.clear()
        self._looked_at.clear()
        self._note_values()

    @synchronized
    def add(self, code: types.CodeType, scope: dict[str, Any], function: object, stays: bool = True) -> None:
        super().add(code, scope, function, stays)
        self.known.add(code, scope)
        self._note_values()

    @synchronized
    def see(self, value: type | types.ModuleType) -> None:
        if isinstance(value, type):
            self._add_class(value)
        else:
            self.attributes.add_module(value)
        self._note_values()

    @synchronized
    def look_up(self) -> None:
        self._look_up()
        self._note_values()

    def _new(self, kind: str, items: list[Any]) -> list[Any]:
        """The items that were added to a list since it was asked for last."""
        previous, count = self._looked_at.get(kind, (None, 0))
        self._looked_at[kind] = items, len(items)
        # Items are appended to a list, or it is replaced as a whole. In a new one, what was noted may be anywhere.
        return items[count:] if items is previous else items

    def _note_values(self) -> None:
        for origin in self._new("origins", self.names.origins):
            if origin.key not in self._noted:
                content = functools.partial(_content_of, origin)
                self._noted[origin.key] = _Noted(origin.text(), content, content(), operator.eq)
        for holder, name in self._new("bindings", self.names.bindings):
            if isinstance(holder, dict | type) and (id(holder), name) not in self._noted:
                # Lists of names are made anew at each look, so they are compared by their items.
                is_same = operator.eq if name in (OF_KEYS, OF_NAMES) else operator.is_
                current = functools.partial(_bound, holder, name)
                self._noted[id(holder), name] = _Noted(f"the binding of {name}", current, current(), is_same)

    def bound(self) -> list[Any]:
        """The constants that names are bound to."""
        return [value_at(holder, name) for holder, name in self.names.bindings if isinstance(holder, dict | type)]

    def leave_to(self, parts: set[int]) -> None:
        """Drops what the functions with these ids hold: it is compared as content of the traced function."""
        names = self.names
        names.origins = [o for o in names.origins if o.name is not None or id(o.holder) not in parts]
        names.functions = {i: function for i, function in names.functions.items() if i not in parts}
        names.cells = {i: (cell, function) for i, (cell, function) in names.cells.items() if id(function) not in parts}

    def changed(self) -> str | None:
        """What the trace has changed of what it reads."""
        noted = list(self._noted.values())
        return next((read.text for read in noted if not read.is_same(read.current(), read.value)), None)


def _bound(holder: Any, name: str) -> Any:
    return list(holder) if name == OF_KEYS else value_at(holder, name)


def _content_of(origin: Origin) -> str | None:
    return _token_or_none(origin.value())


def constants_data(
    reads: ConstantReads, name: str, function: types.FunctionType, graphdef: _core.GraphDef
) -> dict[str, Any]:
    """What a function by value of this name reads, as `as_data` gives it, and the content of what can change.

    Args:
        graphdef: the structure of the call.

    Raises:
        GraftaxError: if part of it has no name or no content in another process, or was changed by the trace.
    """
    for text in reads.cached.names():
        raise GraftaxError(OF_CACHE.format(name=text))
    if (text := next((o.text() for o in reads.names.origins if o.assigned), None) or reads.changed()) is not None:
        raise GraftaxError(WAS_SET.format(text=text))
    # The function itself with all that it holds, and then each name that it reads besides.
    itself, parts = _content(function, f"something that {name} captures")
    reads.leave_to(set(map(id, parts)))
    data = as_data(reads, name, function)
    values: list[tuple[Holder, str | None, str]] = []
    for (holder, key, _), origin in zip(data["origins"], reads.names.origins, strict=True):
        token, of_value = _content(origin.value(), origin.text())
        values.append((holder, key, token))
        parts += of_value
    _refuse_identities(graphdef, [*parts, *reads.bound()])
    return data | {"origins": [], "values": values, "itself": itself}


def _refuse_identities(graphdef: _core.GraphDef, constants: list[Any]) -> None:
    """An argument that is compared by identity could be one of the constants, which no key shows."""
    structure = Structure(graphdef)
    unnamed = {type(structure.rows[row].own) for row, name in sentinels(structure).items() if name is None}
    if found := unnamed & set(map(type, constants)):
        raise GraftaxError(IDENTITY.format(cls=found.pop().__qualname__))


def constants_difference(data: dict[str, Any], function: types.FunctionType) -> str | None:
    """The first difference of what a function by value reads here from saved data, or None."""
    if (text := difference(data)) is not None:
        return text
    if _token_or_none(function) != data["itself"]:
        return "a variable that the function captures is different, or a default"
    for holder, key, saved in data["values"]:
        value = value_at(resolve(holder), key) if key else resolve(holder)
        if _token_or_none(value) != saved:
            return f"{key or holder[1]} has another content"
    return None


def _content(value: object, text: str) -> tuple[str, list[Any]]:
    try:
        return content_token(value)
    except Nameless:
        raise GraftaxError(NO_CONTENT.format(text=text)) from None


def _token_or_none(value: object) -> str | None:
    try:
        return content_token(value)[0]
    except Nameless:
        return None
