# SPDX-License-Identifier: Apache-2.0
"""Builds an object graph from a description: numbered nodes with their classes, children and payloads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from graftax import _core
from graftax._base.errors import StructureError
from graftax._core import How
from graftax._graph.structure import KeyEntry, Op
from graftax._graph.types import describe
from graftax._graph.types.pytree_nodes import NoneKey, one_level_treedef


class Node(NamedTuple):
    """The description of a node. A number that occurs as a child more than once is one shared object."""

    cls: type
    children: list[tuple[KeyEntry, int]]  # (key entry, number)
    # The payload besides its children: a deque's maxlen, the elements of a set, the content of a buffer, the value of
    # a subclass of str, a function, the aux data of a registered class as a tuple of one.
    detail: Any = None


class GraphBuilder:
    """Builds described objects: writes them as the instructions of a GraphDef, which the core then unflattens.

    Args:
        nodes: the nodes by number.
        values: the values of all other numbers; to the GraphDef they are leaves.
        name: the path of a number, for messages.
    """

    def __init__(self, nodes: Mapping[int, Node], values: Mapping[int, Any], name: Callable[[int], str]) -> None:
        self._nodes, self._values, self._name = nodes, values, name
        # Of each number as a child: a node that several refer to needs an identity, even if its type has none.
        self._reference_counts = Counter(number for node in nodes.values() for _, number in node.children)
        # The parts of the state that `GraphDef._from_state` reads, as `program_state` in the core writes it.
        self._code: list[tuple[Any, ...]] = []
        self._empty = _core.GraphDef._instruction()
        self._index_of_next = list(self._empty).index("next")
        self._statics: list[tuple[Any, ...]] = []
        self._elements: list[int] = []
        self._keys: list[int] = []
        self._leaves: list[Any] = []
        self._tracks: dict[int, int] = {}

    def build(self, root: int) -> Any:
        """Builds the object of a number, and everything below it.

        Raises:
            StructureError: if it cannot be built.
        """
        self._reference_counts[root] += 1  # the caller's reference: a root in a cycle has another
        # Instructions in pre-order. A node's instruction says where its subtree ends, which is known once the subtree
        # is written: the second element of a pending pair is the instruction to be completed.
        pending: list[tuple[int, int | None]] = [(root, None)]
        while pending:
            number, close = pending.pop()
            if close is not None:
                instruction = self._code[close]
                self._code[close] = (
                    *instruction[: self._index_of_next],
                    len(self._code),
                    *instruction[self._index_of_next + 1 :],
                )
            else:
                pending += self._visit(number)
        # The version of the state, one root, and no layout of arguments.
        state = (1, 1, len(self._leaves), None, tuple(self._code), tuple(self._statics))
        graphdef = _core.GraphDef._from_state((*state, tuple(self._keys), tuple(self._elements)))
        return _core.unflatten(graphdef, self._leaves)

    def _visit(self, number: int) -> list[tuple[int, int | None]]:
        """Writes the instruction of a number; returns what is to be written after it, in reverse order."""
        if number in self._tracks:
            self._emit(Op.ref, arg=self._tracks[number])
            return []
        if number not in self._nodes:
            self._emit(Op.leaf, arg=len(self._leaves))
            self._leaves.append(self._values[number])
            return []
        return self._node(number)

    def _emit(self, op: Op, **fields: object) -> None:
        """Writes an instruction; fields that are left out or None have the values of an empty instruction."""
        values = {name: value for name, value in fields.items() if value is not None}
        instruction = self._empty | {"op": op, "next": len(self._code) + 1} | values
        self._code.append(tuple(instruction.values()))  # a tuple: dicts would double the memory

    def _node(self, number: int) -> list[tuple[int, int | None]]:
        cls, _, detail = self._nodes[number]
        base, tracked, slot_names = _core.kind_info(cls)
        extra, items, attributes = self._sort_children(number, base)
        slots = [s for s in slot_names if s in attributes]
        fields = [a for a in attributes if a not in slot_names]
        first_key = len(self._keys)
        elements = payload = treedef = None
        # The elements of a set are keys of the instruction, not children.
        if base == "set":
            ids = [self._key(e) for e in detail or ()]
            elements = len(ids)
        else:
            ids = [self._key(k.key) for k, _ in items if isinstance(k, (DictKey, NoneKey))]
        if base in ("deque", "buffer", "value") and detail is not None:
            payload = self._key(detail)
        if base == "function":
            payload = len(self._statics)
            self._statics.append((How.function, detail, 0, 0))
        if base == "registered":
            treedef = one_level_treedef(cls, cast("tuple[Any]", detail)[0], len(items))
        ids += [self._key(n) for n in (*fields, *slots)]
        self._keys += ids
        # A node without an identity becomes tracked if it is referred to more than once.
        if tracked or self._reference_counts[number] > 1:
            self._tracks[number] = len(self._tracks)
        pc = len(self._code)
        # Keys are in the order of items, fields and slots, as the core reads them.
        self._emit(
            Op.node,
            arg=elements,
            track=self._tracks.get(number),
            items=len(items),
            fields=len(fields),
            slots=len(slots),
            has_extra=len(extra),
            keys=first_key if ids else None,
            payload=payload,
            type=cls,
            treedef=treedef,
        )
        numbers = [*(n for _, n in extra), *(n for _, n in items), *(attributes[name] for name in (*fields, *slots))]
        return [(number, pc), *((child, None) for child in reversed(numbers))]

    def _sort_children(
        self, number: int, base: str
    ) -> tuple[list[tuple[KeyEntry, int]], list[tuple[KeyEntry, int]], dict[str, int]]:
        """The children of a node as (extra child, items, attributes), in the order that its class needs.

        Raises:
            StructureError: if children are missing or do not fit the class.
        """
        cls, children, detail = self._nodes[number]
        parts = _item_names(cls, base, detail)
        # The child that the core expects before all others. A class may have a child of the same name.
        extra_name = {"registered": "aux_data", "defaultdict": "default_factory"}.get(base)
        extra: list[tuple[KeyEntry, int]] = []
        items: list[tuple[KeyEntry, int]] = []
        attributes: dict[str, int] = {}
        for entry, child in children:
            if isinstance(entry, GetAttrKey) and entry.name == extra_name and entry.name not in parts:
                extra.append((entry, child))
            elif not isinstance(entry, GetAttrKey) or entry.name in parts or base == "registered":
                items.append((entry, child))
            else:
                attributes[entry.name] = child
        unnamed = any(not isinstance(entry, GetAttrKey) for entry, _ in items)
        # Entries may be in any order after the user edited them.
        if parts and not unnamed:
            items.sort(key=lambda item: parts.index(item[0].name))
        elif not parts and base in ("list", "tuple", "deque"):
            if not all(isinstance(entry, SequenceKey) for entry, _ in items):
                raise StructureError(f"the items of {self._name(number)} have keys that are not numbers")
            items.sort(key=lambda item: item[0].idx)
            if [entry.idx for entry, _ in items] != list(range(len(items))):
                entries = [entry for entry, _ in items]
                name = self._name(number)
                raise StructureError(f"the items of {name} are not numbered from 0 without a gap: {entries}")
        # A dead weak reference and an empty cell have no items.
        if parts and (unnamed or (len(items) != len(parts) and base not in ("weakref", "cell"))):
            raise StructureError(f"{self._name(number)} is a {base} node and needs the entries {', '.join(parts)}")
        if extra_name and not extra:
            name = self._name(number)
            raise StructureError(f"{name} is a {base} node without its entry {name}.{extra_name}")
        return extra, items, attributes

    def _key(self, value: object) -> int:
        # The parts of a tuple are statics of their own, as in a recorded structure. Any other value is compared as its
        # type says, which the core finds out: identity is for a type that says nothing.
        if type(value) is tuple:
            ids = [self._key(v) for v in value]
            self._statics.append((How.tuple, value, len(self._elements), len(ids)))
            self._elements += ids
        else:
            self._statics.append((How.identity, value, 0, 0))
        return len(self._statics) - 1


def _item_names(cls: type, base: str, detail: Any) -> tuple[str, ...]:
    """The names of a node's items; empty if they have indices or keys."""
    if base == "registered":
        return describe.names_of_children(cls) or ()
    if base == "tuple":
        return describe.item_names(cls)
    if base == "function":
        return ("__defaults__", "__kwdefaults__", *(f"__closure__[{n!r}]" for n in detail.__code__.co_freevars))
    for builtin, fields in describe.EXCEPTIONS.items():
        if base == ("exception" if builtin is BaseException else builtin.__name__):
            return ("args", "__cause__", "__context__", *fields)
    return {
        "method": ("__func__", "__self__"),
        "partial": ("func", "args", "keywords"),
        "weakref": ("referent", "__callback__"),
        "proxy": ("mapping",),
        "cell": ("cell_contents",),
    }.get(base, ())
