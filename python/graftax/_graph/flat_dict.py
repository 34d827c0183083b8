# SPDX-License-Identifier: Apache-2.0
"""The flat, path-keyed form of an object graph (FlareJax's), and back."""

from __future__ import annotations

import functools
import weakref
from typing import Any, cast

from jax.tree_util import GetAttrKey

from graftax import _core
from graftax._base.errors import StructureError
from graftax._graph.build import Assembly, Node
from graftax._graph.path import Path, Ref
from graftax._graph.structure import Op, Row, Structure
from graftax._jax.tracebacks import boundary

_CLASS = GetAttrKey("__class__")
_EXTRA = GetAttrKey("__graftax__")
_MOST_REPEATED = 1_000  # entries that one repeated value may be written out to


@boundary
def to_dict(obj: object) -> dict[Path, Any]:
    """The flat, path-keyed form of an object graph.

    Every node has an entry `<path>.__class__` with its type, so that empty containers survive. A node met again is a
    `Ref` to the path where it was met first. What a node needs besides its children is at
    `<path>.__graftax__`: the `maxlen` of a deque, the elements of a set, the treedef of a registered node. Leaves,
    arrays and statics, stand at their paths; a leaf that happens to be a `Ref` or a `Path` is kept as `Leaf(value)`.

    Args:
        obj: the root.

    Returns:
        a dict in walk order, the same in every process.

    Raises:
        UnsupportedValueError: for a value that hides state, at its path.

    Example:
        >>> x = [1, 2]
        >>> graftax.to_dict({"a": x, "b": x})
        {obj.__class__: <class 'dict'>, obj[a].__class__: <class 'list'>, obj[a][0]: 1, obj[a][1]: 2,
         obj[b]: Ref(obj[a])}
    """
    leaves, graphdef = _core.flatten(obj)
    layout = _layout_of(graphdef)
    out = layout.fixed.copy()
    out.update((path, elements.copy()) for path, elements in layout.lists)
    out.update(zip(layout.paths, map(leaves.__getitem__, layout.numbers), strict=True))
    return out


class _Layout:
    """The flat form of a structure without its arrays, for which None stands: every path, in walk order."""

    def __init__(self, graphdef: _core.GraphDef) -> None:
        self.fixed: dict[Path, Any] = {}
        self.paths: list[Path] = []  # of the arrays
        self.numbers: list[int] = []  # which leaf stands at each of them
        self.lists: list[tuple[Path, list[Any]]] = []  # the elements of sets: each flat form has lists of its own
        structure = Structure(graphdef)
        # Rows to write, and where; the list counts the entries that a repeated value was written out to.
        todo: list[tuple[Row, Path, list[int] | None]] = [(structure.rows[0], Path(), None)]
        places: dict[int, Path] = {}  # of the nodes, by their numbers
        while todo:
            row, at, written = todo.pop()
            if written is not None:
                written[0] += 1
            if row.op is Op.leaf:
                self.fixed[at] = None
                self.paths.append(at)
                self.numbers.append(row.leaf)
            elif row.op is Op.static:
                value = row.value
                self.fixed[at] = Leaf(value) if isinstance(value, (Ref, Leaf)) else value
            elif row.op is Op.node:
                places[row.number] = at
                self._node(row, at)
                todo += reversed([(child, at + (child.key_entry,), written) for child in structure.children(row)])
            elif row.op is Op.same and (written is None or written[0] < _MOST_REPEATED):
                # An equal immutable value met before: written out again, it has no identity.
                todo.append((structure.target(row), at, written or [0]))
            else:
                place = places.get(row.target)
                self.fixed[at] = Ref(Path(structure.place(structure.target(row))[1]) if place is None else place)

    def _node(self, row: Row, at: Path) -> None:
        self.fixed[at + (_CLASS,)] = row.type
        if (value := row.value) is None:
            return
        self.fixed[at + (_EXTRA,)] = value
        if isinstance(value, list):
            self.lists.append((at + (_EXTRA,), cast("list[Any]", value)))


# By the address of the structure, and gone when it is: a structure that is met again is one object.
_LAYOUTS: dict[int, tuple[weakref.ref[_core.GraphDef], _Layout]] = {}


def _layout_of(graphdef: _core.GraphDef) -> _Layout:
    key = id(graphdef)
    found = _LAYOUTS.get(key)
    if found is not None and found[0]() is graphdef:
        return found[1]
    layout = _Layout(graphdef)
    _LAYOUTS[key] = weakref.ref(graphdef, functools.partial(_forget, key)), layout
    return layout


def _forget(key: int, gone: weakref.ref[_core.GraphDef]) -> None:
    if (found := _LAYOUTS.get(key)) is not None and found[0] is gone:
        del _LAYOUTS[key]


class Leaf:
    """Keeps a user's value that looks like part of the flat form (a `Ref`) from being taken for one."""

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
    """Builds the object graph that `to_dict` described, with its shared and cyclic references.

    Entries may be edited, added and removed: the children of a node are the entries one step below it, in order.

    Args:
        flat: what `to_dict` returned.

    Raises:
        StructureError: for a reference to a path that is not there, a gap in a sequence, or a missing class entry.

    Example:
        >>> flat = graftax.to_dict({"w": 1, "name": "net"})
        >>> graftax.from_dict(flat)
        {'w': 1, 'name': 'net'}
    """
    return _Assembly(flat).build()


class _Assembly:
    """Numbers the entries of a flat form: what a `Ref` means has the number of the path where it was met first."""

    def __init__(self, flat: dict[Path, Any]) -> None:
        self.flat = flat
        self.classes = {p.parent: c for p, c in flat.items() if p and p[-1] == _CLASS}
        self.children: dict[Path, list[Any]] = {p: [] for p in self.classes}
        for place in dict.fromkeys(self._place(p) for p in flat):
            if not place:
                continue
            parent = place.parent
            if parent not in self.children:
                raise StructureError(
                    f"{place!r} is there, but no entry {parent!r}.__class__ that names its parent's type"
                )
            self.children[parent].append(place[-1])
        self.numbers: dict[Path, int] = {path: number for number, path in enumerate(self.classes)}
        self.values: dict[int, Any] = {}
        self.paths: dict[int, Path] = {number: path for path, number in self.numbers.items()}

    def _place(self, path: Path) -> Path:
        above = path.parent
        return above if path and path[-1] in (_CLASS, _EXTRA) and above in self.classes else path

    def build(self) -> Any:
        root = self._number(Path())
        nodes = {number: self._node(path) for path, number in list(self.numbers.items()) if path in self.classes}
        return Assembly(nodes, self.values, lambda number: repr(self.paths[number])).build(root)

    def _number(self, path: Path) -> int:
        """The number of what stands at `path`."""
        value = self.flat.get(path, self)
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
        if _core.kind_info(cls)[0] == "registered":
            detail = (cast(Any, detail).node_data()[1],)
        return Node(cls, [(step, self._number(path + (step,))) for step in self.children[path]], detail)
