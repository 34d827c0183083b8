# SPDX-License-Identifier: Apache-2.0
"""Dict keys that no file can hold, such as a bare `object()`: the file numbers them, and `like` provides them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.tree_util import DictKey

from graftax._graph.structure import KeyEntry
from graftax._graph.types.pytree_nodes import dict_key
from graftax._io.importable_names import full_name


class UnknownKey:
    """A dict key whose class is not known; equal only to itself."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


class OpaqueKey(UnknownKey):
    """A dict key that only `like` can provide.

    Args:
        cls: the full name of its class.
        number: the number of the object among all such keys of the file.
    """

    def __init__(self, cls: str, number: int) -> None:
        super().__init__(f"<{cls.rpartition(':')[2]} {number}>")
        self.cls, self.number = cls, number


def match_opaque_keys(
    like_children: Sequence[tuple[KeyEntry, int]],
    file_children: Sequence[tuple[KeyEntry, int]],
    objects: Mapping[int, Any],
) -> list[tuple[KeyEntry, int]]:
    """The children of a dict of `like`, with each key that no file can hold replaced by its `OpaqueKey` in the file.

    Args:
        like_children, file_children: the children in `like` and in the file, with their key entries.
        objects: objects of `like` by their number in the file, known from other paths. All other keys are matched in
            order within their class, if both sides have the same number of them.
    """
    file_entries = {entry for entry, _ in file_children}
    like_keys = [entry for entry, _ in like_children if isinstance(entry, DictKey)]
    unmatched = {id(entry.key): entry.key for entry in like_keys if entry not in file_entries}
    keys_in_file = (getattr(entry, "key", None) for entry, _ in file_children)
    file_keys_left = {key.number: key for key in keys_in_file if isinstance(key, OpaqueKey)}
    matches: dict[int, OpaqueKey] = {}
    # First the objects that another path has told apart: there the same object was a value, and had its number.
    for number in [number for number in file_keys_left if number in objects]:
        if unmatched.pop(id(objects[number]), None) is not None:
            matches[id(objects[number])] = file_keys_left.pop(number)
    # Then the others in order, where nothing but their order tells them apart.
    for cls in {key.cls for key in file_keys_left.values()}:
        ids = [key_id for key_id, key in unmatched.items() if full_name(type(key)) == cls]
        file_keys = [key for key in file_keys_left.values() if key.cls == cls]
        if len(ids) == len(file_keys):
            matches.update(zip(ids, file_keys, strict=True))
    return [
        (dict_key(matches.get(id(entry.key), entry.key)), child) if isinstance(entry, DictKey) else (entry, child)
        for entry, child in like_children
    ]
