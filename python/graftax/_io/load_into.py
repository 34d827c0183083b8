# SPDX-License-Identifier: Apache-2.0
"""A file beside the objects that it is loaded like: every difference first, then all values, then one write."""

from __future__ import annotations

import types
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from graftax import _core
from graftax._base.errors import a_type, some
from graftax._base.handles import HandleLayout
from graftax._graph.edit import selection
from graftax._graph.path import Graph, Path
from graftax._graph.structure import Op, Structure
from graftax._graph.structure_diff import Way, lockstep, short_text
from graftax._io.aux_data import AuxData
from graftax._io.build import Build, unknown_names
from graftax._io.decode_graph import FileRow
from graftax._io.importable_names import MISSING, Known, full_name, has_name, names_in
from graftax._io.json_values import held_in, refuse_collisions
from graftax._io.lazy_path import Where
from graftax._io.mismatches import Differences
from graftax._io.opaque_keys import OpaqueKey, paired
from graftax._io.packed_state import difference
from graftax._io.placement import Placing
from graftax._io.reader import Source
from graftax._io.same_value import PLAIN_VALUES, REFILL, can_refill, is_array, is_same, place_of, typed, without_nan
from graftax._io.tensor import LOGICAL, Leaf
from graftax._io.tensor_names import Renaming, tensor_path
from graftax._jax.compat import ref_types

N = TypeVar("N")

_CONTAINERS = ("list", "tuple", "dict", "odict", "defaultdict", "deque", "set", "buffer", "value")
NOT_MUTABLE = (
    "nothing can be written in place here: what is to change is immutable, and no list, dict or mutable object "
    "holds it. Put it into one, as in {'model': model}, or use the result of load without into=True"
)

ORDER = (
    "an OrderedDict with the keys {theirs} in the file, {mine} in like. Give one whose keys stand in the order of the "
    "file (move_to_end)"
)


class _Wanted(NamedTuple):
    """An array of the file that goes into a row of `like`."""

    leaf: Leaf
    value: Any  # what is there


class Like:
    """The values of a file for the objects of `like`.

    Args:
        only: which leaves of `like` are loaded.
        strict: is something missing or left over an error?
        cast: do dtypes and kinds of numbers give way?
    """

    def __init__(
        self, source: Source, placing: Placing, like: Any, only: Any, strict: bool, cast: bool, classes: Any, mesh: Any
    ) -> None:
        self._source, self._placing, self._like = source, placing, like
        self._strict, self._cast = strict, cast
        self._graph = Graph(like)
        self._wanted = None if only is None else selection(self._graph, only)
        self._known = Known(names_in(self._graph), classes)
        self._mesh = mesh
        # Of a checkpoint: what reads arrays that lie beside the file, by place, each with its sharding or None.
        self.fetch: Callable[[dict[str, tuple[Leaf, Any]]], dict[str, Any]] | None = None
        self._arrays: dict[int, tuple[_Wanted, Where]] = {}
        self._changes: dict[int, Any] = {}
        self._found = Differences()
        self._aux: AuxData | None = None  # where nodes meet nodes
        self._objects: dict[int, Any] = {}  # of `like`, that the file has by number
        self._later: list[tuple[int, Any, int, FileRow, Where]] | None = []  # dicts with such keys

    @property
    def places(self) -> list[str]:
        """Of a checkpoint: the places of all arrays that lie beside the file."""
        return [leaf.outside.place for leaf in self._rows.arrays if leaf.outside is not None]

    def loaded(self, renames: dict[str, str], into: bool) -> Any:
        """The result of `load`."""
        if self._source.graph is None or renames:
            self._by_name(Renaming(renames))
        else:
            self._rows, self._decoder = self._source.rows(self._known, self._mesh)
            self._build = Build(self._rows, self._decoder, lambda number: MISSING)
            self._pairs: dict[int, int] = {}  # the node of the file for each one of `like`, and the other way round
            self._backs: dict[int, int] = {}
            self._aux = AuxData(self._graph, self._rows, self._decoder)
            for _ in lockstep(self._meet, 0, 0):
                pass
            self._meet_opaque()
            for number in self._aux.compare(lambda number: number in self._changes, self._found):
                self._changes.pop(number, None)
        self._refuse()
        if self._placing.wants_objects:
            self._placing.look_at(self._like)
        self._fetch()
        for number, (wanted, path) in self._arrays.items():
            self._changes[number] = self._array(wanted, path)
        if self._aux is not None:
            self._aux.write(self._changes, self._found)
            self._refuse()
        if not into:
            return self._graph.core.build(self._everywhere(), all=True)
        refilled = [
            number
            for number in self._changes
            if can_refill(self._graph.rows[number].value, self._changes[number])
            and (self._aux is None or number not in self._aux.replaced)  # which a class may make for each look at it
        ]
        contents = [(self._graph.rows[number].value, self._changes.pop(number)) for number in refilled]
        changes = self._everywhere()
        if changes and (0 in changes or not self._graph.core.write(changes)):
            raise TypeError(NOT_MUTABLE)
        for value, new in contents:  # cannot fail
            REFILL[type(value)](value, new)
        return self._like

    # ---- the structure of the file beside that of `like`

    def _meet(self, a: int, b: int, way: Way) -> Generator[None, None, list[tuple[int, int, Any]]]:
        yield from ()
        path = Where(way)
        there = self._graph.rows[a]
        if there.what == "ref":
            a, there = there.target, self._graph.rows[there.target]
        b = self._rows.target(b)
        row = self._rows.all[b]
        if there.is_leaf:
            if row.op == "a" and self._aux is not None:
                self._aux.meet_array(a, b)
            self._leaf(a, there.value, b, row, path)
            return []
        if row.op != "n":
            self._not_a_node(a, there.value, b, row, path)
            return []
        if self._pairs.get(a) == b:
            return []
        self._tie(a, b, path)
        return self._nodes(a, there.value, b, row, path)

    def _meet_opaque(self) -> None:
        """Dicts with keys that no file holds: when it is known which objects of `like` stand for those elsewhere."""
        later, self._later = self._later or [], None
        for a, value, b, row, path in later:
            for one, other, entry in self._nodes(a, value, b, row, path):
                for _ in lockstep(self._meet, one, other, (path.way, entry)):
                    pass

    def _tie(self, a: int, b: int, path: Where) -> None:
        """The same object on both sides, or on neither. What cannot change has no identity that counts."""
        if not _core.kind_info(type(self._graph.rows[a].value))[1]:
            return
        if self._pairs.setdefault(a, b) != b and self._strict:
            self._found.others.append(
                f"{path!r}: tied in like to {self._graph.path(a)!r}, and another object in the file"
            )
        if self._backs.setdefault(b, a) != a and self._strict:
            self._found.others.append(
                f"{path!r}: tied in the file to {self._rows.path(b)!r}, and another object in like"
            )

    def _nodes(self, a: int, value: Any, b: int, row: FileRow, path: Where) -> list[tuple[int, int, Any]]:
        cls = type(value)
        base = _core.kind_info(cls)[0]
        bare = not self._rows.holds_arrays(b) and not self._holds_arrays(a)
        same = full_name(cls) == row.arg
        if not same and (base in _CONTAINERS or full_name(cls).split(".")[-1] != row.arg.split(".")[-1]):
            if bare:
                self._take(a, b, path)
            elif self._is_wanted(a):
                self._found.others.append(
                    f"{path!r}: a {row.arg.partition(':')[2]} in the file, {a_type(value)} in like"
                )
            return []
        mine = [(without_nan(entry), child) for entry, child in self._graph.key_entries(a)]
        if any(isinstance(getattr(entry, "key", None), OpaqueKey) for entry, _ in row.children):
            if self._later is not None:
                self._later.append((a, value, b, row, path))
                return []
            mine = paired(mine, row.children, self._objects)
        given = {without_nan(entry): child for entry, child in row.children}
        if base == "registered" and self._aux is not None:
            self._aux.meet(a, b, path)
        if base == "odict" and [entry for entry, _ in mine if entry in given] != [
            entry for entry in given if entry in dict(mine)
        ]:
            self._found.differ(path, ORDER.format(theirs=_keys(given), mine=_keys(dict(mine))))
        if not self._has_content(value, base, row.detail):
            self._take(a, b, path)
            return []
        names = {entry for entry, _ in mine}
        if base in _CONTAINERS and bare and (len(mine) != len(given) or names != given.keys()):
            self._take(a, b, path)
            return []
        pairs: list[tuple[int, int, Any]] = []
        for entry, child in mine:
            if entry in given:
                pairs.append((child, given[entry], entry))
            else:
                self._is_missing(child, path + (entry,))
        for entry, child in row.children:
            if without_nan(entry) not in names:
                self._is_extra(child, path + (entry,))
        return pairs

    def _has_content(self, value: Any, base: str, detail: Any) -> bool:
        """Is a node of `like`, apart from its children, what the file has?"""
        if base == "set":
            found = self._decoder.parts(detail, 0)
            if found is MISSING:
                return False
            refuse_collisions(found)
            return typed(found) == typed(value)
        if base == "deque":
            return value.maxlen == detail
        if base == "value":
            plain = next((kind for kind in PLAIN_VALUES if isinstance(value, kind)), None)
            found = self._decoder.value(detail)
            return type(found) is plain and plain is not None and found == PLAIN_VALUES[plain](value)
        if base == "buffer":
            return isinstance(value, bytearray) and bytes(value) == self._decoder.value(detail)
        return True

    def _leaf(self, a: int, value: Any, b: int, row: FileRow, path: Where) -> None:
        if not self._is_wanted(a):
            return
        if row.op == "-":
            if isinstance(value, jax.ShapeDtypeStruct):
                self._found.missing.append((path, self._text(value)))
        elif row.op == "n":
            if self._rows.holds_arrays(b):
                self._is_extra(b, path)
            elif is_array(value):
                self._found.missing.append((path, self._text(value)))
            else:
                self._take(a, b, path)
        elif row.op == "a":
            self._meet_array(a, value, self._rows.arrays[row.arg], path)
        elif is_array(value):
            self._number_for_array(a, value, row, path)
        else:
            self._static(a, value, row, path)

    def _not_a_node(self, a: int, value: Any, b: int, row: FileRow, path: Where) -> None:
        """A node in `like`, and a value in the file."""
        if row.op == "a":
            self._found.differ(path, f"an array in the file, {a_type(value)} in like")
        elif row.op == "-" or isinstance(value, types.FunctionType):
            return  # a function without a name comes from `like`
        elif self._holds_arrays(a):
            self._is_missing(a, path)
        else:
            self._static(a, value, row, path)

    def _static(self, a: int, value: Any, row: FileRow, path: Where) -> None:
        """A value of the file; what no file can hold stays as it is in `like`."""
        held: Any = row.arg
        if type(held) is dict and held.get("!") in ("opaque", "one_device"):
            if type(held.get("at")) is int:
                self._objects[held["at"]] = value
            if isinstance(value, HandleLayout) and type(held.get("holds")) is list:
                other = difference(held["holds"], held_in(value))
                if other is not None:
                    self._found.differ(path, other)
            return
        if type(held) is dict and held.get("!") == "name" and _name_of(value) == self._decoder.name(held.get("of")):
            return
        new = self._decoder.value(held)
        if new is not MISSING and (type(new) is not type(value) or not is_same(new, value)):
            self._changes[a] = new

    def _take(self, a: int, b: int, path: Where) -> None:
        """What holds no array comes from the file as a whole."""
        if self._is_wanted(a):
            new = self._build.value(b)
            if new is not MISSING:
                self._changes[a] = new

    def _meet_array(self, a: int, value: Any, leaf: Leaf, path: Where) -> None:
        if not is_array(value):
            is_number = isinstance(value, (bool, int, float, complex)) and self._source.shape(leaf) == ()
            if self._gives_way(a) and is_number and leaf.key is None:
                self._arrays[a] = _Wanted(leaf, value), path
            else:
                self._found.others.append(
                    f"{path!r}: {self._array_text(leaf)} in the file, {short_text(value)} in like"
                )
            return
        problem = self._differs(value, leaf)
        if problem is None:
            self._arrays[a] = _Wanted(leaf, value), path
        else:
            self._found.differ(path, f"{problem}")

    def _gives_way(self, a: int) -> bool:
        """May a number be an array? Where that is asked for, and where its class calls it data: the `step` of Flax."""
        row = self._graph.rows[a]
        if self._cast or row.aux or row.parent < 0:
            return self._cast
        entry = next(entry for entry, child in self._graph.key_entries(row.parent) if child == a)
        structure = Structure(_core.flatten(self._graph.rows[row.parent].value)[1])
        children = structure.children(structure.rows[0])
        return any(child.op is Op.leaf and child.key_entry == entry for child in children)

    def _differs(self, value: Any, leaf: Leaf) -> str | None:
        shape, dtype = self._source.shape(leaf), self._source.dtype(leaf)
        wanted = value.dtype
        texts = f"{self._array_text(leaf)} in the file, {self._text(value)} in like"
        is_key = jnp.issubdtype(wanted, jax.dtypes.prng_key)
        if is_key or leaf.key is not None:
            if not is_key or leaf.key is None:
                return texts
            size = len(value.shape)
            fits = shape[:size] == value.shape and (
                isinstance(value, jax.ShapeDtypeStruct) or str(jax.random.key_impl(value)) == leaf.key
            )
            return None if fits else texts
        if tuple(value.shape) != shape or (not self._cast and np.dtype(wanted) != dtype):
            return texts
        return None

    def _number_for_array(self, a: int, value: Any, row: FileRow, path: Where) -> None:
        new = row.arg if type(row.arg) in (bool, int, float) else None
        if new is None and type(row.arg) is dict and row.arg.get("!") in ("int", "float", "complex", "numpy"):
            new = self._decoder.value(row.arg)
        if isinstance(new, np.generic) and type(new) is type(value):  # a scalar that counts as a number
            self._changes[a] = new
        elif new is None:
            self._found.missing.append((path, self._text(value)))
        elif value.shape != () or jnp.issubdtype(value.dtype, jax.dtypes.prng_key) or not self._gives_way(a):
            self._found.differ(path, f"the number {new!r} in the file, {self._text(value)} in like")
        elif isinstance(value, (np.ndarray, np.generic)):
            self._changes[a] = value.dtype.type(new) if isinstance(value, np.generic) else np.asarray(new, value.dtype)
        else:
            self._changes[a] = jnp.asarray(new, value.dtype)

    # ---- names of tensors beside the paths of `like`

    def _by_name(self, renaming: Renaming) -> None:
        """Each leaf of `like` by its own path, as it is called in the file."""
        if self._source.graph is None:
            found = renaming.of_tensors(self._source.tensors)
            for name in self._meet_names(
                found, lambda a, value, name, path: self._meet_array(a, value, Leaf(name), path)
            ):
                self._found.extra.append((Path((GetAttrKey(name),)), self._array_text(Leaf(name))))
            return
        rows, self._decoder = self._source.rows(self._known, self._mesh)
        self._rows = rows
        self._build = Build(rows, self._decoder, lambda number: MISSING)

        def meet(a: int, value: Any, b: int, path: Where) -> None:
            self._leaf(a, value, b, rows.all[b], path)

        for number in self._meet_names(renaming.of_rows(rows), meet):
            if rows.all[number].op == "a":
                self._found.extra.append((rows.path(number), self._array_text(rows.arrays[rows.all[number].arg])))

    def _meet_names(self, found: dict[tuple[str, ...], N], meet: Callable[[int, Any, N, Where], None]) -> list[N]:
        """Lets each leaf of `like` meet what has its path; returns what no leaf has met."""
        used: set[N] = set()
        for number, there in enumerate(self._graph.rows):
            if not there.is_leaf or not self._is_wanted(number):
                continue
            place = self._graph.path(number)
            at, path = found.get(tensor_path(place)), Where(None) + tuple(place)
            if at is not None:
                used.add(at)
                meet(number, there.value, at, path)
            elif is_array(there.value):
                self._found.missing.append((path, self._text(there.value)))
        return [] if self._wanted is not None else [at for at in dict.fromkeys(found.values()) if at not in used]

    # ---- what differs

    def _is_missing(self, a: int, path: Where) -> None:
        """A part of `like` that the file does not have."""
        if not self._is_wanted(a):
            return
        leaves = self._leaves_below(a)
        if not leaves:
            self._found.missing.append((path, a_type(self._graph.rows[self._graph.rows[a].target].value)))
        for leaf in leaves:
            rest = self._graph.path(leaf)[len(self._graph.path(self._graph.rows[a].target)) :]
            self._found.missing.append((path + rest, self._text(self._graph.rows[leaf].value)))

    def _is_extra(self, b: int, path: Where) -> None:
        """A part of the file that `like` does not have."""
        if self._wanted is not None:
            return
        b = self._rows.target(b)
        todo, seen = [(b, path)], {b}
        arrays: list[tuple[Where | Path, str]] = []
        while todo:
            at, where = todo.pop()
            row = self._rows.all[at]
            if row.op == "a":
                arrays.append((where, self._array_text(self._rows.arrays[row.arg])))
            for entry, child in reversed(row.children):
                if (child := self._rows.target(child)) not in seen:
                    seen.add(child)
                    todo.append((child, where + (entry,)))
        self._found.extra += arrays or [(path, "a value" if self._rows.all[b].op == "s" else "a part without arrays")]

    def _refuse(self) -> None:
        if self._known.unknown:
            raise unknown_names(self._known.unknown, self._source.path)
        self._found.refuse(self._source.path, self._strict)

    def _is_wanted(self, a: int) -> bool:
        if self._wanted is None:
            return True
        row = self._graph.rows[a]
        return a in self._wanted if row.is_leaf else any(leaf in self._wanted for leaf in self._leaves_below(a, True))

    def _leaves_below(self, a: int, values: bool = False) -> list[int]:
        """The arrays below a row of `like`; with `values` all leaves."""
        below = sorted(self._graph.below([a]))
        return [n for n in below if self._graph.rows[n].is_leaf and (values or is_array(self._graph.rows[n].value))]

    def _holds_arrays(self, a: int) -> bool:
        return bool(self._leaves_below(a))

    def _text(self, value: Any) -> str:
        name = type(value).__name__ if isinstance(value, (np.generic, jax.ShapeDtypeStruct)) else "an array"
        return f"{name} of {value.dtype}{list(value.shape)}"

    def _array_text(self, leaf: Leaf) -> str:
        if leaf.key is not None:
            return f"an array of key<{leaf.key}>{list(self._source.shape(leaf)[:-1])}"
        return f"an array of {self._source.dtype(leaf)}{list(self._source.shape(leaf))}"

    # ---- values

    def _fetch(self) -> None:
        """Asks for what lies beside the file, all at once."""
        if self.fetch is None:
            return
        asked: dict[str, tuple[Leaf, Any]] = {}
        for wanted, path in self._arrays.values():
            leaf = wanted.leaf
            if leaf.outside is not None and leaf.outside.place not in asked:
                is_jax = isinstance(wanted.value, (jax.Array, jax.ShapeDtypeStruct))
                shape = jax.ShapeDtypeStruct(leaf.outside.shape, LOGICAL[leaf.outside.dtype])
                place = place_of(wanted.value) or self._placing.sharding(path, shape) if is_jax else None
                asked[leaf.outside.place] = leaf, place
        if asked:
            self._source.beside.update(self.fetch(asked))

    def _array(self, wanted: _Wanted, path: Where) -> Any:
        """The value for a row of `like`: of the kind that is there."""
        value, leaf = wanted.value, wanted.leaf
        if not is_array(value):
            return type(value)(self._source.array(leaf)[()])
        kind = "scalar" if isinstance(value, np.generic) else "numpy" if isinstance(value, np.ndarray) else "jax"
        kind = "ref" if isinstance(value, ref_types) else kind
        dtype = np.dtype(value.dtype) if leaf.key is None else None
        dtype = None if dtype is None or dtype == self._source.dtype(leaf) else dtype
        return self._placing.value(leaf._replace(kind=kind), path, place_of(value), dtype)

    def _everywhere(self) -> dict[int, Any]:
        """The changes, and the same for every other place of a node that is replaced as a whole."""
        nodes = {number for number in self._changes if not self._graph.rows[number].is_leaf}
        changes = dict(self._changes)
        if nodes:
            refers = self._graph.refers()
            for number in nodes:
                for place in refers.get(number, ()):
                    changes[place] = self._changes[number]
        return changes


def _keys(entries: Iterable[Any]) -> str:
    return some([repr(getattr(entry, "key", entry)) for entry in entries])


def _name_of(value: Any) -> str | None:
    return full_name(value) if has_name(value) else None
