# SPDX-License-Identifier: Apache-2.0
"""Symbols that something still holds when their trace has ended: they are replaced by the numbers."""

from __future__ import annotations

import collections
import gc
import types
from collections.abc import Sequence
from typing import Any, cast

from graftax._base.class_lookup import in_mro

_DEPTH = 4  # levels of immutable values


def put_in_place(symbols: list[Any], numbers: Sequence[object]) -> None:
    """Replaces each symbol by its number, in all that the garbage collector knows to hold it and that can be changed.

    A tuple or a slice with a symbol is made again, and the old one is replaced in the same way.
    """
    swap = _Swap(symbols, numbers)
    # Holders level by level: those of the symbols, then those of the tuples and slices that hold them.
    level, holders = symbols, list[Any]()
    for _ in range(_DEPTH):
        values = tuple(level)
        # The containers of this search hold the symbols as well, and must not be changed.
        ours = {id(symbols), id(level), id(values), id(holders), id(swap.immutable)}
        referrers = [holder for holder in gc.get_referrers(*values) if id(holder) not in ours]
        level = [holder for holder in referrers if _is_immutable(holder) and id(holder) not in swap.immutable]
        swap.immutable.update((id(holder), holder) for holder in level)
        holders += [holder for holder in referrers if not _is_immutable(holder)]
        # The next level would find these lists as holders.
        del referrers, values
        if not level:
            break
    for holder in list(swap.immutable.values()):
        swap.rebuilt(holder)
    for holder in holders:
        swap.replace_in(holder)


def _is_immutable(holder: object) -> bool:
    """Is it a tuple, a slice, or a named tuple without attributes of its own?"""
    of_fields = issubclass(type(holder), tuple) and in_mro(type(holder), "_fields") is not None
    return type(holder) in (tuple, slice) or (of_fields and not hasattr(holder, "__dict__"))


class _Swap:
    """Replaces values by others, by identity. It runs no code of the user's, except what hashes a key."""

    def __init__(self, symbols: Sequence[object], numbers: Sequence[object]) -> None:
        # By the id of what is replaced: at first the symbols, then also tuples and slices that hold them.
        self.replacements = {id(symbol): number for symbol, number in zip(symbols, numbers, strict=True)}
        self.immutable: dict[int, Any] = {}  # by id: tuples and slices that are to be rebuilt

    def _replacement(self, value: object) -> Any:
        return self.replacements.get(id(value), value)

    def rebuilt(self, value: Any) -> Any:
        """The replacement of a value, which is rebuilt if it is a tuple or slice to be rebuilt."""
        if id(value) in self.immutable and id(value) not in self.replacements:
            if type(value) is slice:
                self.replacements[id(value)] = slice(*map(self.rebuilt, (value.start, value.stop, value.step)))
            else:
                self.replacements[id(value)] = tuple.__new__(type(value), map(self.rebuilt, value))
        return self._replacement(value)

    def replace_in(self, holder: object) -> None:
        """Replaces what an object holds."""
        if isinstance(holder, list | collections.deque):
            items = cast("list[Any]", holder)
            for i, item in enumerate(items):
                if id(item) in self.replacements:
                    items[i] = self._replacement(item)
        elif isinstance(holder, set):
            self._in_set(cast("set[Any]", holder))
        elif isinstance(holder, dict):
            self._in_dict(cast("dict[Any, Any]", holder))
        elif isinstance(holder, types.CellType):
            holder.cell_contents = self._replacement(holder.cell_contents)
        elif isinstance(holder, types.FunctionType) and holder.__defaults__ is not None:
            holder.__defaults__ = self._replacement(holder.__defaults__)
        if not isinstance(holder, type):
            self._in_attributes(holder)

    def _in_set(self, items: set[Any]) -> None:
        for item in [item for item in items if id(item) in self.replacements]:
            items.discard(item)
            items.add(self._replacement(item))

    def _in_dict(self, mapping: dict[Any, Any]) -> None:
        # Keys are replaced by filling the dict again, so that its order stays.
        owner = _class_with(mapping)
        for key, value in list(mapping.items()):
            if id(value) in self.replacements:
                if owner is not None:
                    type.__setattr__(owner, key, self._replacement(value))
                else:
                    dict.__setitem__(mapping, key, self._replacement(value))
        if any(id(key) in self.replacements for key in mapping):
            items = [(self._replacement(key), value) for key, value in mapping.items()]
            dict.clear(mapping)
            dict.update(mapping, items)

    def _in_attributes(self, holder: object) -> None:
        # Past whatever the class of the holder says of attributes.
        try:
            attributes = object.__getattribute__(holder, "__dict__")
        except AttributeError:
            attributes = None
        if type(attributes) is dict:
            self._in_dict(cast("dict[Any, Any]", attributes))
        # Attributes in slots are in no dict; the classes have a descriptor for each.
        for cls in type(holder).__mro__:
            for member in vars(cls).values():
                if type(member) is types.MemberDescriptorType:
                    self._in_slot(holder, member)

    def _in_slot(self, holder: Any, slot: Any) -> None:
        try:
            value = slot.__get__(holder)
            if id(value) in self.replacements:
                slot.__set__(holder, self._replacement(value))
        except (AttributeError, TypeError):  # empty, or one of C that cannot be set
            pass


def _class_with(attributes: dict[Any, Any]) -> type | None:
    """The class whose attributes these are: the interpreter's caches have to be told when one changes."""
    if "__module__" not in attributes:
        return None
    classes = [holder for holder in gc.get_referrers(attributes) if isinstance(holder, type)]
    return next((cls for cls in classes if any(gc_held is attributes for gc_held in gc.get_referents(cls))), None)
