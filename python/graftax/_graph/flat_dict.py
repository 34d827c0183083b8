# SPDX-License-Identifier: Apache-2.0
"""`to_dict` and `from_dict`: an object graph as a flat dict by path, in the format of FlareJax."""

from __future__ import annotations

import functools
import weakref
from typing import Any, cast

from jax.tree_util import GetAttrKey

from graftax import _core
from graftax._base.errors import StructureError
from graftax._graph.build import GraphBuilder, Node
from graftax._graph.path import Path, Ref
from graftax._graph.structure import KeyEntry, Op, Row, Structure
from graftax._jax.tracebacks import boundary

_CLASS = GetAttrKey("__class__")
_EXTRA = GetAttrKey("__graftax__")
# Entries to which one repeated value may be expanded. A tuple that holds the one before twice doubles their number:
# forty of them would have 2**40.
_MAX_REPEATED = 1_000


@boundary
def to_dict(obj: object) -> dict[Path, Any]:
    """The flat form of an object graph: a dict from key path to value.

    Every node has an entry `<path>.__class__` with its type, so that empty containers survive. A further reference to
    a node is a `Ref` to the first path of the node. What a node needs besides its children is at
    `<path>.__graftax__`: the `maxlen` of a deque, the elements of a set, the treedef of a registered node. Leaves,
    arrays and statics, are at their paths; a leaf that happens to be a `Ref` or a `Path` is kept as `Leaf(value)`.

    Args:
        obj: the root.

    Returns:
        a dict in walk order, which is the same in every process.

    Raises:
        UnsupportedValueError: for a value that hides state; names its path.

    Example:
        >>> x = [1, 2]
        >>> graftax.to_dict({"a": x, "b": x})
        {obj.__class__: <class 'dict'>, obj[a].__class__: <class 'list'>, obj[a][0]: 1, obj[a][1]: 2,
         obj[b]: Ref(obj[a])}
    """
    leaves, graphdef = _core.flatten(obj)
    layout = _layout_of(graphdef)
    # Only leaves and the elements of sets differ between objects of one structure.
    flat = layout.fixed.copy()
    flat.update((path, elements.copy()) for path, elements in layout.lists)
    flat.update(zip(layout.paths, map(leaves.__getitem__, layout.numbers), strict=True))
    return flat


class _Layout:
    """The flat form of a structure, with None in place of its arrays: all paths, in walk order."""

    def __init__(self, graphdef: _core.GraphDef) -> None:
        self.fixed: dict[Path, Any] = {}
        self.paths: list[Path] = []  # of the arrays
        self.numbers: list[int] = []  # the leaf at each of these paths
        self.lists: list[tuple[Path, list[Any]]] = []  # the elements of sets: each flat form gets its own copies
        structure = Structure(graphdef)
        # (row, path, count): within an expanded repeated value, the count of its entries so far.
        todo: list[tuple[Row, Path, list[int] | None]] = [(structure.rows[0], Path(), None)]
        node_paths: dict[int, Path] = {}  # by the number of the node
        while todo:
            row, path, repeat_count = todo.pop()
            if repeat_count is not None:
                repeat_count[0] += 1
            if row.op is Op.leaf:
                self.fixed[path] = None
                self.paths.append(path)
                self.numbers.append(row.leaf)
            elif row.op is Op.static:
                value = row.value
                self.fixed[path] = Leaf(value) if isinstance(value, (Ref, Leaf)) else value
            elif row.op is Op.node:
                node_paths[row.number] = path
                self._node(row, path)
                todo += reversed(
                    [(child, path + (child.key_entry,), repeat_count) for child in structure.children(row)]
                )
            elif row.op is Op.same and (repeat_count is None or repeat_count[0] < _MAX_REPEATED):
                # An immutable value equal to an earlier one, without an identity: expanded, not referred to.
                todo.append((structure.target(row), path, repeat_count or [0]))
            else:
                target_path = node_paths.get(row.target)
                self.fixed[path] = Ref(
                    Path(structure.root_path(structure.target(row))[1]) if target_path is None else target_path
                )

    def _node(self, row: Row, path: Path) -> None:
        self.fixed[path + (_CLASS,)] = row.type
        if (value := row.value) is None:
            return
        self.fixed[path + (_EXTRA,)] = value
        if isinstance(value, list):
            self.lists.append((path + (_EXTRA,), cast("list[Any]", value)))


# By the id of the structure, which the core keeps one object while it recurs; dropped when the structure dies.
_LAYOUTS: dict[int, tuple[weakref.ref[_core.GraphDef], _Layout]] = {}


def _layout_of(graphdef: _core.GraphDef) -> _Layout:
    key = id(graphdef)
    cached = _LAYOUTS.get(key)
    # An id may be reused after its structure died: the weak reference tells.
    if cached is not None and cached[0]() is graphdef:
        return cached[1]
    layout = _Layout(graphdef)
    _LAYOUTS[key] = weakref.ref(graphdef, functools.partial(_drop_layout, key)), layout
    return layout


def _drop_layout(key: int, dead: weakref.ref[_core.GraphDef]) -> None:
    # The entry may already belong to another structure with the same id.
    if (cached := _LAYOUTS.get(key)) is not None and cached[0] is dead:
        del _LAYOUTS[key]


class Leaf:
    """Wraps a user's value that would otherwise be taken for a part of the flat form (a `Ref`)."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Leaf({self.value!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Leaf) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash((Leaf, self.value))


@boundary
def from_dict(flat: dict[Path, Any]) -> Any:
    """The inverse of `to_dict`: builds an object graph with its shared and cyclic references.

    Entries may be edited, added and removed: the children of a node are the entries one level below it, in order.

    Args:
        flat: what `to_dict` returned.

    Returns:
        the new object graph.

    Raises:
        StructureError: for a reference to a path that is not there, a gap in a sequence, or a missing class entry.

    Example:
        >>> flat = graftax.to_dict({"w": 1, "name": "net"})
        >>> graftax.from_dict(flat)
        {'w': 1, 'name': 'net'}
    """
    return _FlatReader(flat).build()


class _FlatReader:
    """Reads a flat form: numbers its entries, with the same number for a `Ref` and the path that it refers to."""

    def __init__(self, flat: dict[Path, Any]) -> None:
        self.flat = flat
        self.classes = {p.parent: c for p, c in flat.items() if p and p[-1] == _CLASS}
        self.children: dict[Path, list[KeyEntry]] = {p: [] for p in self.classes}
        for path in dict.fromkeys(self._node_path(p) for p in flat):
            if not path:
                continue
            parent = path.parent
            if parent not in self.children:
                raise StructureError(
                    f"{path!r} is there, but no entry {parent!r}.__class__ that names its parent's type"
                )
            self.children[parent].append(path[-1])
        self.numbers: dict[Path, int] = {path: number for number, path in enumerate(self.classes)}
        self.values: dict[int, Any] = {}
        self.paths: dict[int, Path] = {number: path for path, number in self.numbers.items()}

    def _node_path(self, path: Path) -> Path:
        parent = path.parent
        return parent if path and path[-1] in (_CLASS, _EXTRA) and parent in self.classes else path

    def build(self) -> Any:
        root = self._number(Path())
        nodes = {number: self._node(path) for path, number in list(self.numbers.items()) if path in self.classes}
        return GraphBuilder(nodes, self.values, lambda number: repr(self.paths[number])).build(root)

    def _number(self, path: Path) -> int:
        value = self.flat.get(path, self)  # any value may be in the flat form, but not this reader
        # A reference has the number of its node, which makes them one object.
        if isinstance(value, Ref):
            if value.path not in self.classes:
                raise StructureError(f"{path!r} refers to {value.path!r}, where there is no node")
            path = value.path
        number = self.numbers.setdefault(path, len(self.numbers))
        if path not in self.classes:
            if value is self:
                raise StructureError(f"there is no entry for {path!r}")
            self.paths[number] = path
            self.values[number] = value.value if isinstance(value, Leaf) else value
        return number

    def _node(self, path: Path) -> Node:
        cls, detail = self.classes[path], self.flat.get(path + (_EXTRA,))
        # The flat form holds the treedef, which contains the aux data.
        if _core.kind_info(cls)[0] == "registered":
            detail = (cast(Any, detail).node_data()[1],)
        return Node(cls, [(entry, self._number(path + (entry,))) for entry in self.children[path]], detail)
