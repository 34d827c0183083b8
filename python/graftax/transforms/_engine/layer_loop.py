# SPDX-License-Identifier: Apache-2.0
"""A loop over objects, such as the layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import jax.numpy as jnp

from graftax import _core, interop
from graftax._base.errors import StructureError, type_name
from graftax._base.key_path import entry_text, keystr
from graftax._graph.edit import update
from graftax._graph.stack import Each, Flat, is_layer, mismatch, stacked, stacked_flat
from graftax._graph.structure import Structure
from graftax._graph.structure_diff import differences_text
from graftax._jax.compat import ref_types
from graftax._jax.tracers import read_in_trace
from graftax.transforms._engine.program import Program
from graftax.transforms._engine.slices import as_pair

OTHER_LENGTH = (
    "{name}: there are {count} objects, and length={length}. (What should be sliced as in JAX goes in a tuple.)"
)
OTHER_LAYER = (
    "{name}: a step may change arrays of the object that it is given, and changed its structure:\n{lines}\n"
    "Make what differs a jax.Array."
)
SHARED = (
    "{name}: obj{path} is changed, and numbers {numbers} of the list are one object there. In a loop written out each "
    "step goes on with what the one before has left; here all are stacked beforehand. Give each an object of its own "
    "(graftax.copy), or write the loop out: for obj in objects."
)
CHANGED_BESIDES = (
    "{name}: a step changes obj{path} of number {number} through what it captures or carries. The objects were stacked "
    "before, so the step of that one has not seen it. Change the object that the step is given, or write the loop out: "
    "for obj in objects."
)
READ_BESIDES = (
    "{name}: a step reads {path}: obj{own} of number {number} of the list, which the steps change, through something "
    "else than the object that it is given. The objects were stacked before, so the step would read the old array. "
    "Carry what the steps read of one another, or write the loop out: for obj in objects."
)
SLICED = (
    "{mismatch}\n(So this list is sliced as in JAX: each step is given all of it, with rows in place of arrays. For a "
    "step with each of the {count} objects make them alike, as graftax.each requires, or write the loop out: "
    "for obj in xs.)"
)

ONE = (
    "{name}: xs is a list of one {cls}, which is sliced as in JAX: each step is given the list, with rows in place of "
    "arrays. For a step with the object, however many there are: graftax.each(xs)."
)
LISTED = (
    "{name}: argument {number} is a list of {count} {cls}, which is sliced as in JAX: the function is given a list, "
    "with rows in place of arrays. For a call with each of the objects, pass graftax.each(...) of the list."
)


class Spec(NamedTuple):
    """What a loop has to know of the objects that it goes over. Static: part of what it is compiled for."""

    # For each leaf that several of the objects reach through one mutable node: the numbers of those that do.
    shared: tuple[tuple[int, tuple[int, ...]], ...]

    def require_unshared(self, name: str, graphdef: _core.GraphDef, before: list[Any], after: list[Any]) -> None:
        """Raises a StructureError where an array that is shared is another one now."""
        for i, numbers in self.shared:
            if after[i] is not before[i]:
                path = keystr(graphdef.leaf_places()[i][1])
                raise StructureError(SHARED.format(name=name, path=path, numbers=" and ".join(map(str, numbers))))


class Layers:
    """Objects of one structure as one, stacked; what is changed of it is written back to each."""

    def __init__(self, name: str, objects: list[Any], flat: list[Flat] | None = None) -> None:
        self._name, self.objects = name, objects
        self.stacked = stacked(name, objects) if flat is None else stacked_flat(flat)
        self._flat = flat or [_core.flatten(obj) for obj in objects]
        self._before, self._structure = _core.flatten(self.stacked)
        self._spec = self._shared()
        self._changed: set[int] = set()  # leaves, by the step that was traced last
        self._watched: tuple[Program, dict[int, tuple[int, int]]]

    @property
    def count(self) -> int:
        return len(self.objects)

    def step(self, f: Callable[..., Any], carry: Any, obj: Any) -> tuple[Any, Any]:
        """One step of a loop over the objects.

        Raises:
            StructureError: where it changes more than arrays of its object, or what others share.
        """
        leaves, structure = _core.flatten(obj)
        pair = as_pair(self._name, f(carry, obj))
        after, other = _core.flatten(obj)
        require_structure(self._name, structure, other)
        self._spec.require_unshared(self._name, structure, leaves, after)
        self._changed = {i for i, (a, b) in enumerate(zip(leaves, after, strict=True)) if a is not b}
        return pair

    def watch(self, program: Program) -> None:
        """Looks which leaves of a loop's program are those of the objects, so that `require_unread` can tell."""
        self._watched = program, self._held_by(program)
        own = {id(leaf) for leaves, _ in self._flat for leaf in leaves}
        for i, leaf in enumerate(program.leaves):
            if id(leaf) in own and i not in self._watched[1] and not isinstance(leaf, ref_types):
                program.leaves[i] = jnp.copy(leaf)  # it stands by itself, and stays the old one there

    def require_unread(self, given: Sequence[Any]) -> None:
        """Raises a StructureError where the step that was traced reads, besides its slice, what the steps change.

        Args:
            given: the leaves of the loop's program in this trace.
        """
        program, watched = self._watched
        read = read_in_trace() if self._changed else set[int]()
        for i, (number, own) in watched.items():
            if own in self._changed and id(given[i]) in read:
                self._refuse_read(program.places[i].name, number, own)
        for number, (leaves, _) in enumerate(self._flat):  # by a way that the loop does not know, as helpers have
            for own in self._changed:
                if id(leaves[own]) in read:
                    self._refuse_read("what a helper reads", number, own)

    def _refuse_read(self, path: str, number: int, own: int) -> NoReturn:
        text = keystr(self._flat[number][1].leaf_places()[own][1])
        raise StructureError(READ_BESIDES.format(name=self._name, path=path, own=text, number=number))

    def _held_by(self, program: Program) -> dict[int, tuple[int, int]]:
        """For each leaf of a program that is one of the objects': (number of the object, leaf of it)."""
        of: dict[tuple[int, Any], tuple[int, int]] = {}
        for number, (_, graphdef) in enumerate(self._flat):
            for leaf, where in _holders(graphdef, (self.objects[number],)):
                of.setdefault(where, (number, leaf))
        return {leaf: of[where] for leaf, where in _holders(program.graphdef, program.roots) if where in of}

    def _shared(self) -> Spec:
        """What of them is shared."""
        reached: dict[tuple[int, int], list[int]] = {}
        for number, (_, graphdef) in enumerate(self._flat):
            walked = _core.walk(graphdef, (self.objects[number],))
            for track, node in enumerate(walked[1] if walked else ()):
                reached.setdefault((track, id(node)), []).append(number)
        several = {track: tuple(numbers) for (track, _), numbers in reached.items() if len(numbers) > 1}
        if not several:
            return Spec(())
        rows = Structure(self._structure).rows
        found: list[tuple[int, tuple[int, ...]]] = []
        for row in rows:
            up = row
            while up.parent >= 0 and (up is row or up.track < 0):
                up = rows[up.parent]
            if row.leaf >= 0 and up.track in several:
                found.append((row.leaf, several[up.track]))
        return Spec(tuple(found))

    def write_back(self) -> None:
        """Writes the rows of the arrays that are other ones now.

        Raises:
            StructureError: where more than arrays has changed, or an object has been changed besides.
        """
        after, structure = _core.flatten(self.stacked)
        require_structure(self._name, self._structure, structure)
        new = {i: b for i, (a, b) in enumerate(zip(self._before, after, strict=True)) if a is not b}
        if new:
            self._spec.require_unshared(self._name, self._structure, self._before, after)
        for number, obj in enumerate(self.objects):
            leaves, structure = _core.flatten(obj)
            self._require_unchanged(number, leaves)
            if new:
                rows = [new[i][number] if i in new else None for i in range(len(leaves))]
                update(obj, _core.unflatten(structure, rows))

    def _require_unchanged(self, number: int, leaves: list[Any]) -> None:
        before, graphdef = self._flat[number]
        for i, (old, leaf) in enumerate(zip(before, leaves, strict=False)):
            if old is not leaf:
                path = keystr(graphdef.leaf_places()[i][1])
                raise StructureError(CHANGED_BESIDES.format(name=self._name, path=path, number=number))


def layers_in(name: str, xs: Any) -> Layers | str | None:
    """The objects that a list means: two or more modules, or objects of a class that is unknown to JAX, all alike.

    Returns:
        why not, where it is one object, or they differ; None where the list holds something else.
    """
    objects: Any = xs if type(xs) is list else interop.items(xs)
    if not objects or not all(map(is_layer, objects)):
        return None
    if len(objects) < 2:
        return ONE.format(name=name, cls=type_name(objects[0]))
    flat = [_core.flatten(obj) for obj in cast("list[Any]", objects)]
    text = mismatch(name, flat)
    return Layers(name, list(objects), flat) if text is None else SLICED.format(mismatch=text, count=len(flat))


def note_lists(name: str, args: Sequence[Any], error: Exception) -> None:
    """Adds to an error of a `vmap` that lists of layers among its arguments are sliced."""
    for number, arg in enumerate(args):
        objects: Any = arg if type(arg) is list else interop.items(arg)
        if objects and all(map(is_layer, objects)):
            text = LISTED.format(name=name, number=number, count=len(objects), cls=type_name(objects[0]))
            error.add_note(text)


def require_structure(name: str, before: _core.GraphDef, after: _core.GraphDef) -> None:
    """Raises a StructureError where an object has another structure than before a step."""
    if after != before:
        raise StructureError(OTHER_LAYER.format(name=name, lines=differences_text(before, after)))


def _holders(graphdef: _core.GraphDef, roots: tuple[Any, ...]) -> Iterator[tuple[int, tuple[int, Any]]]:
    """(leaf, (id of the object that holds it, where in that)) for each leaf in an object that has an identity."""
    walked = _core.walk(graphdef, roots)
    rows = Structure(graphdef).rows
    for row in rows if walked else ():
        up, path = row, list[str]()
        while row.leaf >= 0 and up.parent >= 0 and (up is row or up.track < 0):
            path.append(entry_text(up.key_entry))
            up = rows[up.parent]
        if row.leaf >= 0 and up.track >= 0 and walked is not None:
            yield row.leaf, (id(walked[1][up.track]), tuple(path))


def require_length(name: str, count: int, length: Any) -> None:
    """Raises a ValueError where a loop over objects is asked for another number of steps."""
    if length is not None and length != count:
        raise ValueError(OTHER_LENGTH.format(name=name, count=count, length=length))


def with_objects(name: str, call: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    """Calls with each `graftax.each(objects)` among the arguments as one object, stacked."""
    given = {i: Layers(name, arg.objects) for i, arg in enumerate(args) if isinstance(arg, Each)}
    result = call(*(given[i].stacked if i in given else arg for i, arg in enumerate(args)), **kwargs)
    for layers in given.values():
        layers.write_back()
    return result
