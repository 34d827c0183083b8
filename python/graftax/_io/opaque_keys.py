# SPDX-License-Identifier: Apache-2.0
"""Keys of a dict that no file can hold, such as a bare `object()`: the file counts them, and `like` has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.tree_util import DictKey

from graftax._graph.types.pytree_nodes import dict_key
from graftax._io.importable_names import full_name


class UnknownKey:
    """A key of a dict whose class is not known; equal to nothing else."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


class OpaqueKey(UnknownKey):
    """A key that only `like` can give.

    Args:
        cls: the full name of its class.
        number: of the object, among all such keys of the file.
    """

    def __init__(self, cls: str, number: int) -> None:
        super().__init__(f"<{cls.rpartition(':')[2]} {number}>")
        self.cls, self.number = cls, number


def paired(
    mine: Sequence[tuple[Any, int]], theirs: Sequence[tuple[Any, int]], objects: Mapping[int, Any]
) -> list[tuple[Any, int]]:
    """The children of a dict of `like`, where a key that no file holds is the one of the file that it is.

    Args:
        mine, theirs: the children, with their key entries.
        objects: of `like`, by number: those that both sides have in another place, too. The other keys go by their
            place among the keys of their class, where both sides have as many.
    """
    known = {entry for entry, _ in theirs}
    left = {id(entry.key): entry.key for entry, _ in mine if isinstance(entry, DictKey) and entry not in known}
    keys = {key.number: key for entry, _ in theirs if isinstance(key := getattr(entry, "key", None), OpaqueKey)}
    found: dict[int, OpaqueKey] = {}
    for number in [number for number in keys if number in objects]:
        if left.pop(id(objects[number]), None) is not None:
            found[id(objects[number])] = keys.pop(number)
    for cls in {key.cls for key in keys.values()}:
        here = [at for at, key in left.items() if full_name(type(key)) == cls]
        there = [key for key in keys.values() if key.cls == cls]
        if len(here) == len(there):
            found.update(zip(here, there, strict=True))
    return [
        (dict_key(found.get(id(entry.key), entry.key)), child) if isinstance(entry, DictKey) else (entry, child)
        for entry, child in mine
    ]
