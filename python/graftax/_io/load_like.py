# SPDX-License-Identifier: Apache-2.0
"""Loads what is like given objects, or into them.

First all differences are found, then all values built, and then everything is written.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from graftax import _core
from graftax._base.errors import a_type, some
from graftax._base.handles import HandleLayout
from graftax._graph.edit import selection
from graftax._graph.path import Graph, Path
from graftax._graph.structure import KeyEntry, Op, Structure
from graftax._graph.structure_diff import LinkedPath, lockstep, short_text
from graftax._io.aux_data import AuxData
from graftax._io.build import ObjectBuilder, unknown_names
from graftax._io.decode_graph import FileRow
from graftax._io.importable_names import MISSING, NameResolver, full_name, has_name, names_in
from graftax._io.json_values import packed_state_lines, refuse_collisions
from graftax._io.mismatches import LazyPath, Mismatches
from graftax._io.opaque_keys import OpaqueKey, match_opaque_keys
from graftax._io.placement import Placement
from graftax._io.reader import Source
from graftax._io.same_value import (
    PLAIN_VALUES,
    REFILL,
    can_refill,
    committed_sharding,
    is_array,
    is_same,
    packed_state_difference,
    typed_values,
    without_nan,
)
from graftax._io.tensor import LOGICAL, Leaf
from graftax._io.tensor_names import Renaming, tensor_path
from graftax._jax.arrays import ref_types

N = TypeVar("N")

_CONTAINERS = ("list", "tuple", "dict", "odict", "defaultdict", "deque", "set", "buffer", "value")
OTHER_ORDER = (
    "an OrderedDict with the keys {file} in the file, {like} in like. Give one whose keys are in the "
    "order of the file (move_to_end)"
)
NOT_MUTABLE = (
    "nothing can be written in place here: what is to change is immutable, and no list, dict or mutable object "
    "holds it. Put it into one, as in {'model': model}, or use the result of load without into=True"
)


class LoadInto:
    """Loads the values of a file for the objects of `like`.

    Rows of `like` and rows of the file are numbered separately: `like_number`, `file_number`.

    Args:
        source: the file.
        placement: places arrays on devices.
        like: the objects.
        selector: which leaves of `like` are loaded; None for all.
        strict: are missing and extra parts errors?
        cast: may dtypes and kinds of numbers be converted?
        classes: as in `load`.
    """

    def __init__(
        self,
        source: Source,
        placement: Placement,
        like: Any,
        selector: object = None,
        strict: bool = True,
        cast: bool = False,
        classes: Any = (),
    ) -> None:
        self._source, self._placement, self._like = source, placement, like
        self._strict, self._cast = strict, cast
        self._graph = Graph(like)
        self._selected = None if selector is None else selection(self._graph, selector)
        self._resolver = NameResolver(names_in(self._graph), classes)
        # For a checkpoint: reads arrays that are not in the file, by key, each with its sharding or None.
        self.fetch: Callable[[dict[str, tuple[Leaf, Any]]], dict[str, Any]] | None = None
        # By row of `like`: the array in the file, the value in `like` that it replaces, and the path.
        self._arrays: dict[int, tuple[Leaf, Any, LazyPath]] = {}
        self._changes: dict[int, Any] = {}
        self._mismatches = Mismatches()
        self._aux: AuxData | None = None  # None if rows are matched by name
        self._objects: dict[int, Any] = {}  # opaque objects of `like`, by their number in the file
        # Dicts with opaque keys, which are matched once `_objects` is complete; then None.
        self._postponed: list[tuple[int, Any, int, FileRow, LazyPath]] | None = []

    @property
    def external_keys(self) -> list[str]:
        """For a checkpoint: the keys of all arrays that are not in the file."""
        return [leaf.outside.key for leaf in self._file.arrays if leaf.outside is not None]

    def load(self, renames: dict[str, str], into: bool) -> Any:
        """The result of `load`."""
        if self._source.graph is None or renames:
            self._match_by_name(Renaming(renames))
        else:
            self._open_graph()
            self._pairs: dict[int, int] = {}  # node of `like` -> node of the file
            self._pairs_from_file: dict[int, int] = {}  # and back
            self._aux = AuxData(self._graph, self._file, self._decoder)
            # The walk yields nothing: it fills `_arrays`, `_changes` and `_mismatches`.
            for _ in lockstep(self._match_rows, 0, 0):
                pass
            self._match_postponed()
            # Last, because it needs all changed values: aux data may name the children.
            for number in self._aux.compare(lambda number: number in self._changes, self._mismatches):
                self._changes.pop(number, None)
        # Nothing has been changed so far, neither in `like` nor on a device.
        self._refuse()
        if self._placement.needs_graph:
            self._placement.apply_rules(self._like)
        # Arrays may be large: none is read before everything is known to fit.
        self._fetch()
        for number, array in self._arrays.items():
            self._changes[number] = self._array(*array)
        if self._aux is not None:
            self._aux.write(self._changes, self._mismatches)
            self._refuse()
        if not into:
            return self._graph.core.build(self._changes_at_all_paths(), all=True)
        # Replaced containers of `like` stay the same objects and get the new content.
        refilled = [
            number
            for number in self._changes
            if can_refill(self._graph.rows[number].value, self._changes[number])
            and (self._aux is None or number not in self._aux.replaced)  # aux data may be new objects in each flatten
        ]
        contents = [(self._graph.rows[number].value, self._changes.pop(number)) for number in refilled]
        changes = self._changes_at_all_paths()
        if changes and (0 in changes or not self._graph.core.write(changes)):
            raise TypeError(NOT_MUTABLE)
        for value, content in contents:  # cannot fail
            REFILL[type(value)](value, content)
        return self._like

    def _open_graph(self) -> None:
        self._file, self._decoder = self._source.file_graph(self._resolver, self._placement.mesh)
        # Only what holds no arrays is built from the file: an array in it makes the whole part MISSING.
        self._build = ObjectBuilder(self._file, self._decoder, lambda number: MISSING)

    # ---- matching the rows of the file with those of `like`

    def _match_rows(
        self, like_number: int, file_number: int, linked_path: LinkedPath
    ) -> Generator[None, None, list[tuple[int, int, KeyEntry]]]:
        yield from ()  # `lockstep` takes a generator: differences are collected in `_mismatches`
        path = LazyPath(linked_path)
        like_row = self._graph.rows[like_number]
        # References are followed on both sides: `_check_sharing` compares what is shared.
        if like_row.category == "ref":
            like_number, like_row = like_row.target, self._graph.rows[like_row.target]
        file_number = self._file.target(file_number)
        file_row = self._file.rows[file_number]
        if like_row.is_leaf:
            if file_row.op == "a" and self._aux is not None:  # it may be a part of aux data
                self._aux.add_array(like_number, file_number)
            self._match_leaf(like_number, like_row.value, file_number, file_row, path)
            return []
        if file_row.op != "n":
            self._match_value_to_node(like_number, like_row.value, file_row, path)
            return []
        # A shared node, or a cycle: these two were matched before.
        if self._pairs.get(like_number) == file_number:
            return []
        self._check_sharing(like_number, file_number, path)
        return self._match_nodes(like_number, like_row.value, file_number, file_row, path)

    def _match_postponed(self) -> None:
        """Matches the dicts with opaque keys, now that other paths have told which objects of `like` these are."""
        postponed, self._postponed = self._postponed or [], None
        for like_number, value, file_number, row, path in postponed:
            for number, file_row, entry in self._match_nodes(like_number, value, file_number, row, path):
                for _ in lockstep(self._match_rows, number, file_row, (path.linked, entry)):
                    pass

    def _check_sharing(self, like_number: int, file_number: int, path: LazyPath) -> None:
        """Notes where an object is shared on one side only. Sharing of immutable objects does not count."""
        if not _core.kind_info(type(self._graph.rows[like_number].value))[1]:
            return
        if self._pairs.setdefault(like_number, file_number) != file_number and self._strict:
            first_path = self._graph.path(like_number)
            self._mismatches.differ(path, f"tied in like to {first_path!r}, and another object in the file")
        if self._pairs_from_file.setdefault(file_number, like_number) != like_number and self._strict:
            first_path = self._file.path(file_number)
            self._mismatches.differ(path, f"tied in the file to {first_path!r}, and another object in like")

    def _match_nodes(
        self, like_number: int, value: object, file_number: int, file_row: FileRow, path: LazyPath
    ) -> list[tuple[int, int, KeyEntry]]:
        cls = type(value)
        base = _core.kind_info(cls)[0]
        is_same_class = full_name(cls) == file_row.arg
        # The class may have moved to another package: only the last part of its name has to be the same.
        if not is_same_class and (base in _CONTAINERS or full_name(cls).split(".")[-1] != file_row.arg.split(".")[-1]):
            if self._without_arrays(like_number, file_number):
                self._take_from_file(like_number, file_number)
            elif self._is_selected(like_number):
                file_class = file_row.arg.partition(":")[2]
                self._mismatches.differ(path, f"a {file_class} in the file, {a_type(value)} in like")
            return []
        like_children = [(without_nan(entry), child) for entry, child in self._graph.key_entries(like_number)]
        # Such keys can be matched only when other paths have told which objects they are.
        if any(isinstance(getattr(entry, "key", None), OpaqueKey) for entry, _ in file_row.children):
            if self._postponed is not None:
                self._postponed.append((like_number, value, file_number, file_row, path))
                return []
            like_children = match_opaque_keys(like_children, file_row.children, self._objects)
        file_children = {without_nan(entry): child for entry, child in file_row.children}
        if base == "registered" and self._aux is not None:
            self._aux.add_pair(like_number, file_number, path)
        like_entries = dict(like_children)
        # The order of an OrderedDict is part of its value, and values that are written to its keys do not change it.
        if base == "odict":
            common = [entry for entry, _ in like_children if entry in file_children]
            if common != [entry for entry in file_children if entry in like_entries]:
                keys = {"file": _keys(file_children), "like": _keys(like_entries)}
                self._mismatches.differ(path, OTHER_ORDER.format(**keys))
        if not self._has_content(value, base, file_row.detail):
            self._take_from_file(like_number, file_number)
            return []
        # Where arrays are involved, another length or other keys are mismatches, which are listed one by one below.
        if (
            base in _CONTAINERS
            and (len(like_children) != len(file_children) or like_entries.keys() != file_children.keys())
            and self._without_arrays(like_number, file_number)
        ):
            self._take_from_file(like_number, file_number)
            return []
        pairs: list[tuple[int, int, KeyEntry]] = []
        for entry, child in like_children:
            if entry in file_children:
                pairs.append((child, file_children[entry], entry))
            else:
                self._note_missing(child, path + (entry,))
        for entry, child in file_row.children:
            if without_nan(entry) not in like_entries:
                self._note_extra(child, path + (entry,))
        return pairs

    def _without_arrays(self, like_number: int, file_number: int) -> bool:
        """Are two nodes without arrays? Then the file's is taken as a whole where they differ."""
        return not self._file.holds_arrays(file_number) and not self._holds_arrays(like_number)

    def _has_content(self, value: Any, base: str, detail: Any) -> bool:
        """Is the content of a node of `like`, apart from its children, the same in the file?"""
        if base == "set":
            content = self._decoder.parts(detail, 0)
            if content is MISSING:
                return False
            refuse_collisions(content)  # before they are put into a set here
            return typed_values(content) == typed_values(value)
        if base == "deque":
            return value.maxlen == detail
        if base == "value":
            plain = next((plain_type for plain_type in PLAIN_VALUES if isinstance(value, plain_type)), None)
            content = self._decoder.value(detail)
            return type(content) is plain and plain is not None and content == PLAIN_VALUES[plain](value)
        if base == "buffer":
            return isinstance(value, bytearray) and bytes(value) == self._decoder.value(detail)
        return True

    def _match_leaf(self, like_number: int, value: object, file_number: int, file_row: FileRow, path: LazyPath) -> None:
        if not self._is_selected(like_number):
            return
        # The array was not saved: that of `like` stays, unless it is abstract.
        if file_row.op == "-":
            if isinstance(value, jax.ShapeDtypeStruct):
                self._mismatches.missing.append((path, self._text(value)))
        elif file_row.op == "n":
            if self._file.holds_arrays(file_number):
                self._note_extra(file_number, path)
            elif is_array(value):
                self._mismatches.missing.append((path, self._text(value)))
            else:
                self._take_from_file(like_number, file_number)
        elif file_row.op == "a":
            self._match_array(like_number, value, self._file.arrays[file_row.arg], path)
        elif is_array(value):
            self._number_for_array(like_number, value, file_row, path)
        else:
            self._match_static(like_number, value, file_row, path)

    def _match_value_to_node(self, like_number: int, value: object, file_row: FileRow, path: LazyPath) -> None:
        """Matches a node of `like` with a value of the file."""
        if file_row.op == "a":
            self._mismatches.differ(path, f"an array in the file, {a_type(value)} in like")
        elif file_row.op == "-" or isinstance(value, types.FunctionType):
            return  # a function without a name stays that of `like`
        elif self._holds_arrays(like_number):
            self._note_missing(like_number, path)
        else:
            self._match_static(like_number, value, file_row, path)

    def _match_static(self, like_number: int, value: object, file_row: FileRow, path: LazyPath) -> None:
        """Matches values. An opaque value stays that of `like`."""
        form: Any = file_row.arg
        if type(form) is dict and form.get("!") in ("opaque", "one_device"):
            # The object is also a dict key somewhere.
            if type(form.get("at")) is int:
                self._objects[form["at"]] = value
            if isinstance(value, HandleLayout) and type(form.get("holds")) is list:
                problem = packed_state_difference(form["holds"], packed_state_lines(value))
                if problem is not None:
                    self._mismatches.differ(path, problem)
            return
        is_named = type(form) is dict and form.get("!") == "name" and has_name(value)
        # An object of the same name stays as it is: no lookup, which `classes=` would have to allow.
        if is_named and full_name(value) == self._decoder.name(form.get("of")):
            return
        value_in_file = self._decoder.value(form)
        if value_in_file is not MISSING and (
            type(value_in_file) is not type(value) or not is_same(value_in_file, value)
        ):
            self._changes[like_number] = value_in_file

    def _take_from_file(self, like_number: int, file_number: int) -> None:
        """Replaces a part without arrays by that of the file."""
        if self._is_selected(like_number):
            value = self._build.value(file_number)
            if value is not MISSING:
                self._changes[like_number] = value

    def _match_array(self, like_number: int, value: object, leaf: Leaf, path: LazyPath) -> None:
        if not is_array(value):
            # A number in `like` may take the value of a scalar array.
            is_number = isinstance(value, (bool, int, float, complex)) and self._source.shape(leaf) == ()
            # Last what takes a flatten of the parent.
            fits = is_number and leaf.key is None and self._may_convert(like_number)
            value_text = short_text(value)
        else:
            fits, value_text = self._array_fits(value, leaf), self._text(value)
        if fits:
            self._arrays[like_number] = leaf, value, path
        else:
            self._mismatches.differ(path, f"{self._array_text(leaf)} in the file, {value_text} in like")

    def _may_convert(self, like_number: int) -> bool:
        """May a number come from an array? With `cast`, or if its class declares it as data: the `step` of Flax."""
        like_row = self._graph.rows[like_number]
        if self._cast or like_row.aux or like_row.parent < 0:
            return self._cast
        # The graph of `like` calls all numbers values. A flatten of the parent alone tells which of them are leaves.
        entry = next(entry for entry, child in self._graph.key_entries(like_row.parent) if child == like_number)
        structure = Structure(_core.flatten(self._graph.rows[like_row.parent].value)[1])
        children = structure.children(structure.rows[0])
        return any(child.op is Op.leaf and child.key_entry == entry for child in children)

    def _array_fits(self, value: Any, leaf: Leaf) -> bool:
        shape = self._source.shape(leaf)
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        if not is_key and leaf.key is None:
            return tuple(value.shape) == shape and (self._cast or np.dtype(value.dtype) == self._source.dtype(leaf))
        # Key data have further dimensions, which the implementation determines; an abstract key does not name it.
        return (
            is_key
            and leaf.key is not None
            and shape[: len(value.shape)] == value.shape
            and (isinstance(value, jax.ShapeDtypeStruct) or str(jax.random.key_impl(value)) == leaf.key)
        )

    def _number_for_array(self, like_number: int, value: Any, file_row: FileRow, path: LazyPath) -> None:
        # The inverse case of `_match_array`: an array in `like`, a number in the file.
        # Numbers outside of JSON's range are written as a form.
        form = file_row.arg
        number = form if type(form) in (bool, int, float) else None
        if type(form) is dict and form.get("!") in ("int", "float", "complex", "numpy"):
            number = self._decoder.value(form)
        if isinstance(number, np.generic) and type(number) is type(value):  # a NumPy scalar, saved as a value
            self._changes[like_number] = number
        elif number is None:
            self._mismatches.missing.append((path, self._text(value)))
        elif (
            value.shape != () or jnp.issubdtype(value.dtype, jax.dtypes.prng_key) or not self._may_convert(like_number)
        ):
            self._mismatches.differ(path, f"the number {number!r} in the file, {self._text(value)} in like")
        elif isinstance(value, (np.ndarray, np.generic)):
            self._changes[like_number] = (
                value.dtype.type(number) if isinstance(value, np.generic) else np.asarray(number, value.dtype)
            )
        else:
            self._changes[like_number] = jnp.asarray(number, value.dtype)

    # ---- matching the names of tensors with the paths of `like`

    def _match_by_name(self, renaming: Renaming) -> None:
        """Matches each leaf of `like` by its own path with the name in the file."""
        if self._source.graph is None:
            tensors = renaming.tensors_by_path(self._source.tensors)
            for name in self._match_names(
                tensors, lambda a, value, name, path: self._match_array(a, value, Leaf(name), path)
            ):
                self._mismatches.extra.append((Path((GetAttrKey(name),)), self._array_text(Leaf(name))))
            return
        self._open_graph()
        file_graph = self._file

        def match_row(a: int, value: object, b: int, path: LazyPath) -> None:
            self._match_leaf(a, value, b, file_graph.rows[b], path)

        for number in self._match_names(renaming.rows_by_path(file_graph), match_row):
            if file_graph.rows[number].op == "a":
                self._mismatches.extra.append(
                    (file_graph.path(number), self._array_text(file_graph.arrays[file_graph.rows[number].arg]))
                )

    def _match_names(
        self, file_parts: dict[tuple[str, ...], N], match: Callable[[int, Any, N, LazyPath], None]
    ) -> list[N]:
        """Calls `match` for each leaf of `like` with the part of the file at its path; returns the other parts."""
        used: set[N] = set()
        for number, like_row in enumerate(self._graph.rows):
            if not like_row.is_leaf or not self._is_selected(number):
                continue
            like_path = self._graph.path(number)
            file_part, path = file_parts.get(tensor_path(like_path)), LazyPath(None) + tuple(like_path)
            if file_part is not None:
                used.add(file_part)
                match(number, like_row.value, file_part, path)
            elif is_array(like_row.value):
                self._mismatches.missing.append((path, self._text(like_row.value)))
        # With a selection, `like` takes less than the file has on purpose.
        if self._selected is not None:
            return []
        return [file_part for file_part in dict.fromkeys(file_parts.values()) if file_part not in used]

    # ---- differences

    def _note_missing(self, like_number: int, path: LazyPath) -> None:
        """Notes a part of `like` that is missing in the file, with a line for each array in it."""
        if not self._is_selected(like_number):
            return
        leaves = self._leaves_of(like_number)
        target = self._graph.rows[like_number].target
        if not leaves:
            self._mismatches.missing.append((path, a_type(self._graph.rows[target].value)))
        for leaf in leaves:
            # The graph knows a shared part by its first path; `path` is the one at which it is missing.
            path_below = self._graph.path(leaf)[len(self._graph.path(target)) :]
            self._mismatches.missing.append((path + path_below, self._text(self._graph.rows[leaf].value)))

    def _note_extra(self, file_number: int, path: LazyPath) -> None:
        """Notes a part of the file that `like` does not have, with a line for each array in it."""
        # With a selection, `like` has less than the file on purpose.
        if self._selected is not None:
            return
        file_number = self._file.target(file_number)
        todo, visited = [(file_number, path)], {file_number}
        arrays: list[tuple[LazyPath | Path, str]] = []
        while todo:
            number, number_path = todo.pop()
            row = self._file.rows[number]
            if row.op == "a":
                arrays.append((number_path, self._array_text(self._file.arrays[row.arg])))
            for entry, child in reversed(row.children):
                if (child := self._file.target(child)) not in visited:
                    visited.add(child)
                    todo.append((child, number_path + (entry,)))
        # A part without arrays has one line, so that it is not ignored.
        self._mismatches.extra += arrays or [
            (path, "a value" if self._file.rows[file_number].op == "s" else "a part without arrays")
        ]

    def _refuse(self) -> None:
        if self._resolver.unknown:
            raise unknown_names(self._resolver.unknown, self._source.path)
        self._mismatches.refuse(self._source.path, self._strict)

    def _is_selected(self, like_number: int) -> bool:
        if self._selected is None:
            return True
        like_row = self._graph.rows[like_number]
        leaves = [like_number] if like_row.is_leaf else self._leaves_of(like_number, True)
        return any(leaf in self._selected for leaf in leaves)

    def _leaves_of(self, like_number: int, values: bool = False) -> list[int]:
        """The arrays below a row of `like`; with `values`, all leaves."""
        rows = sorted(self._graph.descendants([like_number]))
        return [n for n in rows if self._graph.rows[n].is_leaf and (values or is_array(self._graph.rows[n].value))]

    def _holds_arrays(self, like_number: int) -> bool:
        return bool(self._leaves_of(like_number))

    def _text(self, value: Any) -> str:
        name = type(value).__name__ if isinstance(value, (np.generic, jax.ShapeDtypeStruct)) else "an array"
        return f"{name} of {value.dtype}{list(value.shape)}"

    def _array_text(self, leaf: Leaf) -> str:
        if leaf.key is not None:
            return f"an array of key<{leaf.key}>{list(self._source.shape(leaf)[:-1])}"
        return f"an array of {self._source.dtype(leaf)}{list(self._source.shape(leaf))}"

    # ---- values

    def _fetch(self) -> None:
        """Reads all arrays that are not in the file, in a single request."""
        if self.fetch is None:
            return
        requests: dict[str, tuple[Leaf, Any]] = {}
        for leaf, value, path in self._arrays.values():
            if leaf.outside is not None and leaf.outside.key not in requests:
                sharding = None
                if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
                    shape = jax.ShapeDtypeStruct(leaf.outside.shape, LOGICAL[leaf.outside.dtype])
                    sharding = committed_sharding(value) or self._placement.sharding(path, shape)
                requests[leaf.outside.key] = leaf, sharding
        if requests:
            self._source.external_arrays.update(self.fetch(requests))

    def _array(self, leaf: Leaf, value: Any, path: LazyPath) -> object:
        """The value for a row of `like`, of the kind and dtype that it has there."""
        # A number in `like` stays a number of its type.
        if not is_array(value):
            return type(value)(self._source.array(leaf)[()])
        # `like` decides what the array becomes, whatever it was when it was saved.
        array_kind = "scalar" if isinstance(value, np.generic) else "numpy" if isinstance(value, np.ndarray) else "jax"
        array_kind = "ref" if isinstance(value, ref_types) else array_kind
        dtype = np.dtype(value.dtype) if leaf.key is None else None
        dtype = None if dtype is None or dtype == self._source.dtype(leaf) else dtype
        return self._placement.value(leaf._replace(kind=array_kind), path, committed_sharding(value), dtype)

    def _changes_at_all_paths(self) -> dict[int, Any]:
        """The changes; a node that is replaced as a whole is replaced at all its paths."""
        # A leaf has no identity, so each of its paths is a change of its own.
        nodes = {number for number in self._changes if not self._graph.rows[number].is_leaf}
        changes = dict(self._changes)
        if nodes:
            references = self._graph.references()
            for number in nodes:
                for reference in references.get(number, ()):
                    changes[reference] = self._changes[number]
        return changes


def _keys(entries: Iterable[object]) -> str:
    return some([repr(getattr(entry, "key", entry)) for entry in entries])
