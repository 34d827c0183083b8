# SPDX-License-Identifier: Apache-2.0
"""The flat, path-keyed form of an object graph (FlareJax's), and back."""

from __future__ import annotations

from typing import Any, cast

from jax.tree_util import DictKey, GetAttrKey

from . import _core, _describe
from ._core import How
from ._errors import StructureError
from ._jax_nodes import NoneKey, one_level_treedef
from ._structure import Op, Row, Structure
from ._tracebacks import boundary
from .path import Path, Ref

_CLASS = GetAttrKey("__class__")
_EXTRA = GetAttrKey("__graftax__")
_MOST_REPEATED = 1_000  # entries that one repeated value may be written out to


@boundary
def to_dict(obj: object) -> dict[Path, Any]:
    """The flat, path-keyed form of an object graph.

    Every node has an entry `<path>.__class__` with its type, so that empty containers survive. A node met again is a
    `Ref` to the path where it was met first. What a node needs beside its children (the `maxlen` of a deque, the
    elements of a set, the treedef of a registered node) is at `<path>.__graftax__`. Leaves, arrays and statics, stand
    at their paths; a leaf that happens to be a `Ref` or a `Path` is kept as `Leaf(value)`.

    Returns:
        a dict in walk order, the same in every process.

    Example:
        >>> x = [1, 2]
        >>> graftax.to_dict({"a": x, "b": x})
        {obj.__class__: <class 'dict'>, obj[a].__class__: <class 'list'>, obj[a][0]: 1, obj[a][1]: 2,
         obj[b]: Ref(obj[a])}
    """
    leaves, graphdef = _core.flatten(obj)
    out: dict[Path, Any] = {}
    structure = Structure(graphdef)
    # Rows to write, and where; the list counts the entries that a repeated value was written out to.
    todo: list[tuple[Row, Path, list[int] | None]] = [(structure.rows[0], Path(), None)]
    while todo:
        row, at, written = todo.pop()
        if written is not None:
            written[0] += 1
        if row.op is Op.leaf:
            out[at] = leaves[row.leaf]
        elif row.op is Op.static:
            value = row.value
            out[at] = Leaf(value) if isinstance(value, (Ref, Leaf)) else value
        elif row.op is Op.node:
            out[Path((*at, _CLASS))] = row.type
            if (value := row.value) is not None:
                out[Path((*at, _EXTRA))] = value
            below = [(child, Path((*at, child.key_entry)), written) for child in structure.children(row)]
            todo += reversed(below)
        elif row.op is Op.same and (written is None or written[0] < _MOST_REPEATED):
            # An equal immutable value met before: written out again, it has no identity.
            todo.append((structure.target(row), at, written or [0]))
        else:
            out[at] = Ref(Path(structure.place(structure.target(row))[1]))
    return out


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

    Raises:
        StructureError: for a reference to a path that is not there, a gap in a sequence, or a missing class entry.
    """
    return _Assembly(flat).build()


def _parts(cls: type, base: str, detail: Any) -> tuple[str, ...]:
    """The names of the items of a node whose items have names."""
    if base == "registered":
        return _describe.names_of_children(cls) or ()
    if base == "tuple":
        return _describe.item_names(cls)
    if base == "function":
        return ("__defaults__", "__kwdefaults__", *(f"__closure__[{n!r}]" for n in detail.__code__.co_freevars))
    return {
        "method": ("__func__", "__self__"),
        "partial": ("func", "args", "keywords"),
        "weakref": ("referent", "__callback__"),
        "proxy": ("mapping",),
        "cell": ("cell_contents",),
    }.get(base, ())


class _Assembly:
    """Writes the flat form as the program of a GraphDef, whose leaves are all its values."""

    def __init__(self, flat: dict[Path, Any]) -> None:
        self.flat = flat
        self.classes = {Path(p[:-1]): c for p, c in flat.items() if p and p[-1] == _CLASS}
        self.children: dict[Path, list[Any]] = {p: [] for p in self.classes}
        for place in dict.fromkeys(self._place(p) for p in flat):
            if not place:
                continue
            parent = Path(place[:-1])
            if parent not in self.children:
                raise StructureError(
                    f"{place!r} is there, but no entry {parent!r}.__class__ that names its parent's type"
                )
            self.children[parent].append(place[-1])
        self.referenced = {v.path for v in flat.values() if isinstance(v, Ref)}
        self.code: list[dict[str, Any]] = []
        self.statics: list[tuple[Any, ...]] = []
        self.elements: list[int] = []
        self.keys: list[int] = []
        self.leaves: list[Any] = []
        self.tracks: dict[Path, int] = {}

    def _place(self, path: Path) -> Path:
        above = Path(path[:-1])
        return above if path and path[-1] in (_CLASS, _EXTRA) and above in self.classes else path

    def build(self) -> Any:
        pending: list[tuple[Path, int | None]] = [(Path(), None)]
        while pending:
            path, close = pending.pop()
            if close is not None:
                self.code[close]["next"] = len(self.code)
            else:
                pending += self._visit(path)
        code = tuple(tuple(instruction.values()) for instruction in self.code)
        state = (1, 1, len(self.leaves), None, code, tuple(self.statics))
        graphdef = _core.GraphDef._from_state((*state, tuple(self.keys), tuple(self.elements)))
        return _core.unflatten(graphdef, self.leaves)

    def _visit(self, path: Path) -> list[tuple[Path, int | None]]:
        """Writes what stands at `path`; returns what is to be written after it, last first."""
        value = self.flat.get(path, self)
        if isinstance(value, Ref):
            if value.path not in self.classes:
                raise StructureError(f"{path!r} refers to {value.path!r}, where there is no node")
            path = value.path
        if path in self.tracks:
            self._emit(Op.ref, arg=self.tracks[path])
            return []
        if path not in self.classes:
            if value is self:
                raise StructureError(f"there is no entry for {path!r}")
            self._emit(Op.leaf, arg=len(self.leaves))
            self.leaves.append(value.value if isinstance(value, Leaf) else value)
            return []
        return self._node(path)

    def _emit(self, op: Op, **fields: Any) -> None:
        """Writes an instruction; fields that are not given are those of an empty one."""
        given = {name: value for name, value in fields.items() if value is not None}
        self.code.append(_core.GraphDef._instruction() | {"op": op, "next": len(self.code) + 1} | given)

    def _node(self, path: Path) -> list[tuple[Path, int | None]]:
        cls: type = self.classes[path]
        detail: Any = self.flat.get(path + (_EXTRA,))
        base, tracked, slot_names = _core.kind_info(cls)
        extra, items, attributes = self._sorted_children(path, cls, base)
        slots = [s for s in slot_names if s in attributes]
        fields = [a for a in attributes if a not in slot_names]
        first_key = len(self.keys)
        elements = payload = treedef = None
        if base == "set":
            ids = [self._key(e) for e in detail or ()]
            elements = len(ids)
        else:
            ids = [self._key(k.key) for k in items if isinstance(k, (DictKey, NoneKey))]
        if base in ("deque", "buffer", "value") and detail is not None:
            payload = self._key(detail)
        if base == "function":
            payload = len(self.statics)
            self.statics.append((How.function, detail, 0, 0))
        if base == "registered":
            _, aux = cast(Any, detail).node_data()
            treedef = one_level_treedef(cls, aux, len(items))
        ids += [self._key(n) for n in (*fields, *slots)]
        self.keys += ids
        if tracked or path in self.referenced:
            self.tracks[path] = len(self.tracks)
        pc = len(self.code)
        self._emit(
            Op.node,
            arg=elements,
            track=self.tracks.get(path),
            items=len(items),
            fields=len(fields),
            slots=len(slots),
            has_extra=len(extra),
            keys=first_key if ids else None,
            payload=payload,
            type=cls,
            treedef=treedef,
        )
        steps = [*extra, *items, *map(GetAttrKey, fields), *map(GetAttrKey, slots)]
        return [(path, pc), *((path + (step,), None) for step in reversed(steps))]

    def _sorted_children(self, path: Path, cls: type, base: str) -> tuple[list[Any], list[Any], list[str]]:
        """The children of one node as (extra child, items, attribute names)."""
        parts = _parts(cls, base, self.flat.get(path + (_EXTRA,)))
        extra_name = {"registered": "aux_data", "defaultdict": "default_factory"}.get(base)
        extra: list[Any] = []
        items: list[Any] = []
        attributes: list[str] = []
        for step in self.children[path]:
            if not isinstance(step, GetAttrKey) or step.name in parts:
                items.append(step)
            elif step.name == extra_name:
                extra.append(step)
            else:
                attributes.append(step.name)
        unnamed = any(not isinstance(step, GetAttrKey) for step in items)
        if parts and not unnamed:
            items.sort(key=lambda s: parts.index(s.name))
        elif not parts and base in ("list", "tuple", "deque"):
            items.sort(key=lambda s: s.idx)
            if [s.idx for s in items] != list(range(len(items))):
                raise StructureError(f"the items of {path!r} are not numbered from 0 without a gap: {items}")
        if parts and (unnamed or (len(items) != len(parts) and base not in ("weakref", "cell"))):
            raise StructureError(f"{path!r} is a {base} node and needs the entries {', '.join(parts)}")
        if extra_name and not extra:
            raise StructureError(f"{path!r} is a {base} node without its entry {path!r}.{extra_name}")
        return extra, items, attributes

    def _key(self, value: Any) -> int:
        if type(value) is tuple:
            ids = [self._key(v) for v in value]
            self.statics.append((How.tuple, value, len(self.elements), len(ids)))
            self.elements += ids
        else:
            self.statics.append((How.identity, value, 0, 0))
        return len(self.statics) - 1
