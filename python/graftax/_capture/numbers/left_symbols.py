# SPDX-License-Identifier: Apache-2.0
"""Symbols that something still holds when their trace has ended: the numbers are put in their places."""

from __future__ import annotations

import collections
import gc
import types
from collections.abc import Sequence
from typing import Any, cast

from graftax._base.class_lookup import in_mro

_DEPTH = 4  # immutable values within each other


def put_in_place(symbols: list[Any], numbers: Sequence[object]) -> None:
    """Puts each number in the place of its symbol, in all that the collector knows to hold it and that can be changed.

    A tuple or a slice is made anew, and is put in the place of the old one in the same way.
    """
    swap = _Swap(symbols, numbers)
    level, holders = symbols, list[Any]()
    for _ in range(_DEPTH):
        values = tuple(level)
        ours = {id(symbols), id(level), id(values), id(holders), id(swap.immutable)}
        referrers = [holder for holder in gc.get_referrers(*values) if id(holder) not in ours]
        level = [holder for holder in referrers if _is_immutable(holder) and id(holder) not in swap.immutable]
        swap.immutable.update((id(holder), holder) for holder in level)
        holders += [holder for holder in referrers if not _is_immutable(holder)]
        del referrers, values
        if not level:
            break
    swap.make_anew()
    for holder in holders:
        swap.within(holder)


def _is_immutable(holder: object) -> bool:
    of_fields = issubclass(type(holder), tuple) and in_mro(type(holder), "_fields") is not None
    return type(holder) in (tuple, slice) or (of_fields and not hasattr(holder, "__dict__"))


class _Swap:
    """One value for another, by identity. No code of the user's runs for it, but what hashes a key."""

    def __init__(self, symbols: Sequence[object], numbers: Sequence[object]) -> None:
        self.pairs = {id(symbol): number for symbol, number in zip(symbols, numbers, strict=True)}
        self.immutable: dict[int, Any] = {}  # by id: what is to be made anew

    def _of(self, value: object) -> Any:
        return self.pairs.get(id(value), value)

    def make_anew(self) -> None:
        for holder in list(self.immutable.values()):
            self._anew(holder)

    def _anew(self, value: Any) -> Any:
        if id(value) in self.immutable and id(value) not in self.pairs:
            if type(value) is slice:
                self.pairs[id(value)] = slice(*map(self._anew, (value.start, value.stop, value.step)))
            else:
                self.pairs[id(value)] = tuple.__new__(type(value), map(self._anew, value))
        return self._of(value)

    def within(self, holder: object) -> None:
        """Changes what it holds."""
        if isinstance(holder, list | collections.deque):
            items = cast("list[Any]", holder)
            for i, item in enumerate(items):
                if id(item) in self.pairs:
                    items[i] = self._of(item)
        elif isinstance(holder, set):
            self._in_set(cast("set[Any]", holder))
        elif isinstance(holder, dict):
            self._in_dict(cast("dict[Any, Any]", holder))
        elif isinstance(holder, types.CellType):
            holder.cell_contents = self._of(holder.cell_contents)
        elif isinstance(holder, types.FunctionType) and holder.__defaults__ is not None:
            holder.__defaults__ = self._of(holder.__defaults__)
        if not isinstance(holder, type):
            self._in_attributes(holder)

    def _in_set(self, items: set[Any]) -> None:
        for item in [item for item in items if id(item) in self.pairs]:
            items.discard(item)
            items.add(self._of(item))

    def _in_dict(self, mapping: dict[Any, Any]) -> None:
        owner = _class_with(mapping)
        for key, value in list(mapping.items()):
            if id(value) in self.pairs:
                if owner is not None:
                    type.__setattr__(owner, key, self._of(value))
                else:
                    dict.__setitem__(mapping, key, self._of(value))
        if any(id(key) in self.pairs for key in mapping):
            items = [(self._of(key), value) for key, value in mapping.items()]
            dict.clear(mapping)
            dict.update(mapping, items)

    def _in_attributes(self, holder: object) -> None:
        try:
            attributes = object.__getattribute__(holder, "__dict__")
        except AttributeError:
            attributes = None
        if type(attributes) is dict:
            self._in_dict(cast("dict[Any, Any]", attributes))
        for cls in type(holder).__mro__:
            for member in vars(cls).values():
                if type(member) is types.MemberDescriptorType:
                    self._in_slot(holder, member)

    def _in_slot(self, holder: Any, slot: Any) -> None:
        try:
            value = slot.__get__(holder)
            if id(value) in self.pairs:
                slot.__set__(holder, self._of(value))
        except (AttributeError, TypeError):  # empty, or one of C that cannot be set
            pass


def _class_with(attributes: dict[Any, Any]) -> type | None:
    """The class of which these are the attributes: its caches have to hear of a change."""
    if "__module__" not in attributes:
        return None
    classes = [holder for holder in gc.get_referrers(attributes) if isinstance(holder, type)]
    return next((cls for cls in classes if any(gc_held is attributes for gc_held in gc.get_referents(cls))), None)
