# SPDX-License-Identifier: Apache-2.0
"""Loops over a list of objects, such as the layers of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from graftax import _core, interop
from graftax._base.errors import StructureError, type_name
from graftax._base.key_path import entry_text, keystr
from graftax._graph.edit import update
from graftax._graph.stack import Each, Flat, is_layer, mismatch_text, stack_flat, stack_named
from graftax._graph.structure import Row, Structure
from graftax._graph.structure_diff import differences_text
from graftax._jax.arrays import ref_types
from graftax._jax.tracers import read_in_trace
from graftax._jax.tree_registry import tree_functions
from graftax.transforms._engine.program import Program
from graftax.transforms._engine.slices import as_pair

OTHER_LAYER = (
    "{name}: a step may change arrays of the object that it is given, and changed its structure:\n{lines}\n"
    "Make what differs a jax.Array."
)
SHARED = (
    "{name}: obj{path} is changed, and items {numbers} of the list are one object there. In a plain for loop, each "
    "step continues with what the one before has left; here all are stacked beforehand. Give each an object of its "
    "own (graftax.copy), or write the loop out: for obj in objects."
)
CHANGED_BESIDES = (
    "{name}: a step changes obj{path} of number {number} through what it captures or carries. The objects were stacked "
    "before, so the step of that one has not seen it. Change the object that the step is given, or write the loop out: "
    "for obj in objects."
)
READ_BESIDES = (
    "{name}: a step reads {path}: obj{own} of number {number} of the list, which the steps change, through something "
    "other than the object that it is given. The objects were stacked before, so the step would read the old array. "
    "Carry what the steps read of one another, or write the loop out: for obj in objects."
)
SLICED = (
    "{mismatch}\n(So this list is sliced as in JAX: each step is given all of it, with rows in place of arrays. For "
    "one step per object, make the {count} objects alike, as graftax.each requires, or write the loop out: for obj in "
    "xs.)"
)

ONE_OBJECT = (
    "{name}: xs is a list of one {cls}, whose arrays all have {rows} rows, so it is sliced as in JAX: each step is "
    "given the list, with rows in place of arrays. For one step per object: graftax.each(xs)."
)
LISTED = (
    "{name}: argument {number} is a list of {count} {cls}, which is sliced as in JAX: the function is given a list, "
    "with rows in place of arrays. For one call per object, pass graftax.each(...) of the list."
)


class Layers:
    """Objects of one structure, stacked into one object. Changes to that object are written back to each of them."""

    def __init__(self, name: str, objects: list[Any], flat: list[Flat] | None = None) -> None:
        self._name, self.objects = name, objects
        # `layers_in` has compared the flat objects already; `stack_named` raises an error if they differ.
        self.stacked = stack_named(name, objects) if flat is None else stack_flat(flat)
        self._flat = flat or [_core.flatten(obj) for obj in objects]  # before the loop
        self._initial_leaves, self._structure = _core.flatten(self.stacked)
        self._shared = self._find_shared()
        self._changed: set[int] = set()  # leaves that the last traced step changed
        self._watched: tuple[Program, dict[int, tuple[int, int]]]

    def call_step(self, f: Callable[..., object], carry: object, obj: object) -> tuple[Any, Any]:
        """Calls `f(carry, obj)`, one step of a loop over the objects.

        Raises:
            StructureError: if it changes more than arrays of its object, or an array that objects share.
        """
        leaves, structure = _core.flatten(obj)
        pair = as_pair(self._name, f(carry, obj))
        current, final_structure = _core.flatten(obj)
        self._require_structure(structure, final_structure)
        self._require_unshared(leaves, current)
        self._changed = {i for i, leaf in enumerate(leaves) if current[i] is not leaf}
        return pair

    def _require_structure(self, expected: _core.GraphDef, actual: _core.GraphDef) -> None:
        if actual != expected:
            raise StructureError(OTHER_LAYER.format(name=self._name, lines=differences_text(expected, actual)))

    def watch(self, program: Program) -> None:
        """Notes which leaves of the loop's program belong to the objects, for `require_unread`."""
        self._watched = program, self._owned_leaves(program)
        object_leaves = {id(leaf) for leaves, _ in self._flat for leaf in leaves}
        for i, leaf in enumerate(program.leaves):
            if id(leaf) in object_leaves and i not in self._watched[1] and not isinstance(leaf, ref_types):
                # Another object holds this array too, and keeps the old value: to read it there is not to read a layer.
                program.leaves[i] = jnp.copy(leaf)

    def require_unread(self, leaves: Sequence[object]) -> None:
        """Raises StructureError if the traced step reads, other than from its slice, an array that the steps change.

        `leaves` are those of the loop's program in this trace.
        """
        # First the leaves of the program: arrays that the loop's functions reach by a path other than the slice.
        program, watched = self._watched
        read = read_in_trace() if self._changed else set[int]()
        for i, (number, leaf) in watched.items():
            if leaf in self._changed and id(leaves[i]) in read:
                self._refuse_read(program.key_paths[i].name, number, leaf)
        # Then the layers' own arrays, which code outside of the program reads as constants.
        for number, (object_leaves, _) in enumerate(self._flat):
            for leaf in self._changed:
                if id(object_leaves[leaf]) in read:
                    self._refuse_read("what a helper reads", number, leaf)

    def _refuse_read(self, path: str, number: int, leaf: int) -> NoReturn:
        text = self._leaf_text(number, leaf)
        raise StructureError(READ_BESIDES.format(name=self._name, path=path, own=text, number=number))

    def _leaf_text(self, number: int, leaf: int) -> str:
        return keystr(self._flat[number][1].leaf_places()[leaf][1])

    def _owned_leaves(self, program: Program) -> dict[int, tuple[int, int]]:
        """Maps each leaf of a program that belongs to an object to (index of the object, leaf of the object)."""
        owners: dict[tuple[int, Any], tuple[int, int]] = {}
        for number, (_, graphdef) in enumerate(self._flat):
            for leaf, holder in _holders(graphdef, (self.objects[number],)):
                owners.setdefault(holder, (number, leaf))
        return {leaf: owners[holder] for leaf, holder in _holders(program.graphdef, program.roots) if holder in owners}

    def _find_shared(self) -> list[tuple[int, tuple[int, ...]]]:
        """The leaves that several objects reach through one mutable node: (leaf, indices of these objects)."""
        reached: dict[tuple[int, int], list[int]] = {}
        for number, (_, graphdef) in enumerate(self._flat):
            walked = _core.walk(graphdef, (self.objects[number],))
            for track, node in enumerate(walked[1] if walked else ()):
                reached.setdefault((track, id(node)), []).append(number)
        # Nodes by their index in the structure and their identity: one node under several objects is shared.
        shared_nodes = {track: tuple(numbers) for (track, _), numbers in reached.items() if len(numbers) > 1}
        if not shared_nodes:
            return []
        rows = Structure(self._structure).rows
        holders = ((row.leaf, _holder(rows, row)[0].track) for row in rows if row.leaf >= 0)
        return [(leaf, shared_nodes[track]) for leaf, track in holders if track in shared_nodes]

    def _require_unshared(self, initial: list[Any], current: list[Any]) -> None:
        """Raises StructureError if a step replaced an array that several objects share."""
        for i, numbers in self._shared:
            if current[i] is not initial[i]:
                path = keystr(self._structure.leaf_places()[i][1])
                raise StructureError(SHARED.format(name=self._name, path=path, numbers=" and ".join(map(str, numbers))))

    def write_back(self) -> None:
        """Writes the rows of the changed arrays into the objects.

        Raises:
            StructureError: if more than arrays changed, or if an object was changed other than through its slice.
        """
        current, structure = _core.flatten(self.stacked)
        self._require_structure(self._structure, structure)
        changed = {i: current[i] for i, leaf in enumerate(self._initial_leaves) if current[i] is not leaf}
        if changed:
            self._require_unshared(self._initial_leaves, current)
        for number, obj in enumerate(self.objects):
            leaves, structure = _core.flatten(obj)
            for i, (initial, leaf) in enumerate(zip(self._flat[number][0], leaves, strict=False)):
                if initial is not leaf:
                    path = self._leaf_text(number, i)
                    raise StructureError(CHANGED_BESIDES.format(name=self._name, path=path, number=number))
            # Where a row is None, `update` leaves the array as it is.
            if changed:
                rows = [changed[i][number] if i in changed else None for i in range(len(leaves))]
                update(obj, _core.unflatten(structure, rows))


def layers_in(name: str, xs: object, length: int | None = None) -> Layers | str | None:
    """Decides whether a list is one of layers: modules, or objects that JAX does not open, all of one structure.

    Returns:
        the stacked layers. Or a message for a list that is sliced as in JAX: if its objects differ, or if it is a
        single object with rows, either because JAX opens it, or because it has `length` of them. None for other lists.
    """
    objects = _layers(xs)
    if objects is None:
        return None
    if len(objects) == 1:
        # Without arrays, nothing tells how many steps there are.
        if not (lengths := _rows(objects)):
            return None
        rows = length if lengths == {length} else _rows_for_jax(objects)
        if rows not in (None, 1):
            return ONE_OBJECT.format(name=name, cls=type_name(objects[0]), rows=rows)
    flat = [_core.flatten(obj) for obj in objects]
    text = mismatch_text(name, flat)
    return Layers(name, objects, flat) if text is None else SLICED.format(mismatch=text, count=len(flat))


@contextlib.contextmanager
def noting_layers(note: str | None) -> Generator[None]:
    """Adds what `layers_in` says of a list of objects to the error with which slicing it fails."""
    try:
        yield
    except Exception as error:
        if note is not None:
            error.add_note(note)
        raise


def with_lists_as_each(args: Sequence[object], in_axes: object, axis_size: int | None) -> tuple[Any, ...]:
    """The arguments of `vmap`, with `Each` in place of the lists of layers that have no rows to be mapped."""
    axes = in_axes if isinstance(in_axes, (tuple, list)) and len(in_axes) == len(args) else [in_axes] * len(args)
    # Whoever gives another axis than the default, or a tree of axes, speaks of the list's own structure.
    along_0 = [i for i in range(len(args)) if type(axes[i]) is int and axes[i] == 0]
    lists = {i: objects for i in along_0 if (objects := _layers(args[i]))}
    if not lists:
        return tuple(args)
    sizes = {size for i in along_0 if i not in lists for size in _rows(args[i])} | ({axis_size} - {None})
    # The sizes that the other arguments and `axis_size` ask for decide about a list whose objects have rows.
    by_object = {i for i, objects in lists.items() if _goes_by_object(objects, sizes)}
    return tuple(Each(lists[i]) if i in by_object else arg for i, arg in enumerate(args))


def _goes_by_object(objects: list[Any], sizes: set[Any]) -> bool:
    """Are the layers alike, and is there no axis of theirs that JAX would map?

    JAX finds no axis in objects of a class that it does not know. If all their arrays have as many rows as the other
    arguments, they are mapped along these rows all the same, unless there are as many rows as objects. Objects without
    arrays have nothing to be mapped.
    """
    if mismatch_text("vmap", [_core.flatten(obj) for obj in objects]) is not None or _rows_for_jax(objects) is not None:
        return False
    rows = _rows(objects)
    return bool(rows) and (rows != sizes or rows == {len(objects)} or None in rows)


def _rows_for_jax(objects: list[Any]) -> int | None:
    """How many rows JAX finds in a list of modules that it opens; None if there is no common axis."""
    rows = _rows(objects)
    return rows.pop() if len(rows) == 1 and tree_functions(type(objects[0])) is not None else None


def _rows(arg: object) -> set[int | None]:
    """The lengths of the arrays' first axes; None for an array without axes."""
    return {np.shape(leaf)[0] if np.shape(leaf) else None for leaf in _core.flatten(arg)[0]}


def _layers(arg: object) -> list[Any] | None:
    """The objects of a list of layers; None for anything else."""
    objects: Any = arg if type(arg) is list else interop.items(arg)
    return list(objects) if objects and all(map(is_layer, objects)) else None


def add_list_notes(name: str, args: Sequence[object], error: Exception) -> None:
    """Adds a note to an error of `vmap` for each argument that is a list of layers: such a list is sliced."""
    for number, arg in enumerate(args):
        if (objects := _layers(arg)) is not None:
            text = LISTED.format(name=name, number=number, count=len(objects), cls=type_name(objects[0]))
            error.add_note(text)


def _holders(graphdef: _core.GraphDef, roots: tuple[object, ...]) -> Iterator[tuple[int, tuple[int, Any]]]:
    """Yields (leaf, (id of the nearest mutable object above it, key path below that object))."""
    walked = _core.walk(graphdef, roots)
    if walked is None:
        return
    rows = Structure(graphdef).rows
    for row in rows:
        if row.leaf >= 0:
            holder, path = _holder(rows, row)
            if holder.track >= 0:
                yield row.leaf, (id(walked[1][holder.track]), path)


def _holder(rows: Sequence[Row], leaf_row: Row) -> tuple[Row, tuple[str, ...]]:
    """(the row of the nearest tracked node above a leaf, or of the root; the keys from the leaf up to it)."""
    row, path = leaf_row, list[str]()
    while row.parent >= 0 and (row is leaf_row or row.track < 0):
        path.append(entry_text(row.key_entry))
        row = rows[row.parent]
    return row, tuple(path)


def call_with_stacked(name: str, call: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    """Calls `call` with the objects of each `graftax.each(objects)` argument stacked into one object."""
    stacked = {i: Layers(name, arg.objects) for i, arg in enumerate(args) if isinstance(arg, Each)}
    result = call(*(stacked[i].stacked if i in stacked else arg for i, arg in enumerate(args)), **kwargs)
    for layers in stacked.values():
        layers.write_back()
    return result
