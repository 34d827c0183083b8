# SPDX-License-Identifier: Apache-2.0
"""What became of a program's graph: the state of a loop after a step, or after a branch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from graftax import _core
from graftax._base.errors import StructureError
from graftax._base.key_path import keystr
from graftax._capture.numbers.symbols import NUMBERS
from graftax._graph.array_aliases import Source
from graftax._graph.structure import Place, Structure, place_name
from graftax._graph.structure_diff import only_order
from graftax.transforms._engine.program import Program

UNSEEN = (
    "{name}: the function puts an array at {path}, in an attribute that the class's flatten leaves out, so that its "
    "value cannot be followed. Make it one of the children, or keep it elsewhere."
)

MADE_ANEW = (
    "{name}: {path} is an array that the flatten of a registered class makes of others, so that its value cannot be "
    "followed from one step or branch to the next. Let the flatten give the arrays that the object holds."
)

R = TypeVar("R")


class Provenance(NamedTuple):
    """The structure of a graph, and for each tracked node which input node it is."""

    graphdef: _core.GraphDef
    origins: list[int | None]  # the input node that it is, None for a new one

    def place(self, node: int) -> Place:
        """Made when it is asked for: those of all nodes are together as long as the square of the depth."""
        return self.graphdef._node_place(node)  # pyright: ignore[reportPrivateUsage]

    @property
    def places(self) -> list[Place]:
        return [self.place(node) for node in range(len(self.origins))]

    def like(self, other: Provenance) -> tuple[list[int], list[int]] | None:
        """For each leaf and node of `other` the number of the one here in the same place; None where they differ.

        The order of keys and attributes makes no difference: `jax.tree.map` sorts the keys of a dict.
        """
        if self.graphdef == other.graphdef:
            return list(range(self.graphdef.num_leaves)), list(range(len(self.origins)))
        if not only_order(other.graphdef, self.graphdef):
            return None
        out: list[list[int]] = []
        for one, two in (
            (self.graphdef.leaf_places(), other.graphdef.leaf_places()),
            (self.places, other.places),
        ):
            number = {place: i for i, place in enumerate(one)}
            if len(number) != len(one) or number.keys() != set(two):
                return None
            out.append([number[place] for place in two])
        return out[0], out[1]


class StateAfter(NamedTuple):
    """The graph after a trace. Leaves are counted as in a recording of all roots and the parts of the result."""

    program: Program
    before: Provenance
    after: Provenance
    values: list[Any]  # the leaves, or what is left of them
    changed: list[int]  # the input nodes that were changed in place
    out: list[int]  # for each output leaf of the Outcome, its number; -1 where the structure does not show it
    outcome: _core.Outcome
    roots: tuple[Any, ...]  # after the trace, with placeholders for arrays
    result: Any  # likewise
    number: dict[int, int]  # of an input node, by its `id`; the result and these nodes live as long as this
    nodes: list[Any]

    def graph(self, roots: tuple[Any, ...], more: int = 0) -> Provenance:
        """The graph of roots and parts of the result."""
        _, graphdef, nodes = self.program.recorded(roots, more)
        return Provenance(graphdef, [self.number.get(id(node)) for node in nodes])

    def reached(self, part: Any) -> set[int]:
        """The input nodes that a part of the result reaches."""
        _, graphdef = _core.record((part,))
        walked = _core.walk(graphdef, (part,))
        assert walked is not None
        return {self.number[id(node)] for node in walked[1] if id(node) in self.number}

    def aligned(self, other: Provenance) -> StateAfter | None:
        """The same, counted as in that graph; None where the structures differ."""
        found = self.after.like(other)
        if found is None or self.after.graphdef == other.graphdef:
            return found and self
        leaves, nodes = found
        number = {here: i for i, here in enumerate(leaves)}
        return self._replace(
            after=Provenance(other.graphdef, [self.after.origins[i] for i in nodes]),
            values=[self.values[i] for i in leaves],
            out=[number.get(i, -1) for i in self.out],
        )


def state_after(
    program: Program,
    leaves: Sequence[Any],
    outcome: _core.Outcome,
    out: Sequence[Any],
    roots_of: Callable[[tuple[Any, ...], Any], tuple[tuple[Any, ...], int]],
) -> StateAfter:
    """Finds out what a trace on `leaves` did, by applying its Outcome to a copy of the graph that holds placeholders.

    An array has no identity, so one tracer may stand in several places, which another step or branch fills with several
    arrays. A placeholder stands in one place only.

    Args:
        program, leaves: what was traced.
        outcome, out: what `program.trace` returned.
        roots_of: from (the roots, the result) to the roots of the graph that is looked at, and how many of these are
            more than the program's.
    """
    placeholders = [_placeholder(leaf) for leaf in leaves]
    roots = program.rebuilt(placeholders)
    _, before, nodes = program.recorded(roots)
    number = {id(node): i for i, node in enumerate(nodes) if node is not None}
    new = [_placeholder(leaf) for leaf in out]
    result = outcome.apply(new, placeholders, nodes)
    value = {id(placeholder): leaf for placeholder, leaf in zip([*placeholders, *new], [*leaves, *out], strict=True)}
    looked_at, more = roots_of(roots, result)
    found, graphdef, after = program.recorded(looked_at, more)
    leaf_number = {id(placeholder): i for i, placeholder in enumerate(found)}
    _refuse_made(program, found, value.keys(), graphdef)
    return StateAfter(
        program,
        Provenance(before, list(range(len(nodes)))),
        Provenance(graphdef, [number.get(id(node)) for node in after]),
        [value[id(placeholder)] for placeholder in found],
        outcome.inputs()[2],
        [leaf_number.get(id(placeholder), -1) for placeholder in new],
        outcome,
        roots,
        result,
        number,
        nodes,
    )


def _refuse_made(program: Program, found: Sequence[Any], known: Collection[int], graphdef: _core.GraphDef) -> None:
    made = next((i for i, placeholder in enumerate(found) if id(placeholder) not in known), None)
    if made is not None:
        root, path = graphdef.leaf_places()[made]
        names = (*program.names, *("the result" for _ in range(root)))
        raise StructureError(MADE_ANEW.format(name=program.name, path=place_name((root, path), names)))


def _placeholder(leaf: Any) -> Any:
    """An array like no other, of the leaf's shape, with 1 for a symbolic dimension."""
    shape = tuple(n if isinstance(n, int) else 1 for n in np.shape(leaf))
    dtype = getattr(leaf, "dtype", None)
    if not isinstance(dtype, np.dtype):
        return np.zeros(shape)
    return np.broadcast_to(np.zeros((), cast("np.dtype[Any]", dtype)), shape)


def node_name(program: Program, after: StateAfter, node: int) -> str:
    """The key path of an input node, as messages print it."""
    place = after.before.place(node)
    return place_name(place, program.names) if place[0] < len(program.names) else "a part of the state"


def refuse_unseen(after: StateAfter) -> None:
    """Raises for an array in an attribute that a registered class's flatten leaves out."""
    for number, (_, path) in zip(after.out, after.outcome.leaf_places(), strict=True):
        if number < 0:
            raise StructureError(UNSEEN.format(name=after.program.name, path=keystr(path)))


def with_arrays(value: Any) -> Any:
    """`value` with an array in place of a Python number that stands by itself, or in a tuple: so does JAX."""
    if type(value) in NUMBERS:
        return jnp.asarray(value)
    if type(value) is tuple and any(type(x) in (*NUMBERS, tuple) for x in cast("tuple[Any, ...]", value)):
        return tuple(with_arrays(x) for x in cast("tuple[Any, ...]", value))
    return value


def numbers_in(program: Program, root: int) -> set[str]:
    """The key paths of the static Python numbers that are recorded below a root."""
    structure = Structure(program.graphdef)
    found = (row for row, value in structure.statics() if row.root == root and type(value) in NUMBERS)
    return {place_name(structure.place(row), program.names) for row in found}


class EndedTracer(NamedTuple):
    """What is known of a tracer when its trace has ended. JAX's leak checker takes offence at the tracer itself."""

    aval: Any
    source: int | None  # the input leaf that it is
    one: int  # the first place that it stands in
    made: Source | None  # what it was made of

    @property
    def way(self) -> tuple[Hashable, tuple[int, ...]]:
        """How it was made, and of which input leaves: those of one way are one where these are."""
        if self.made is not None:
            return self.made.way, self.made.inputs
        return (self.one, ()) if self.source is None else ("input", (self.source,))


def type_of(leaf: Any) -> Any:
    return leaf.aval if isinstance(leaf, EndedTracer) else jax.typeof(leaf)


def same_type(one: Any, other: Any, weak: bool = False) -> bool:
    """Have two arrays the same shape and dtype? With `weak`, a weak type of the first is promoted."""
    one, other = type_of(one), type_of(other)
    return one.shape == other.shape and (one.dtype == other.dtype or (weak and getattr(one, "weak_type", False)))


def type_text(leaf: Any) -> str:
    if not hasattr(leaf, "dtype") and not isinstance(leaf, EndedTracer):
        return type(leaf).__qualname__
    aval = type_of(leaf)
    return f"{aval.dtype}{list(aval.shape)}"


def elements(result: Any) -> tuple[Any, ...]:
    """The parts of a result that are looked at one by one: the elements of a tuple, or the one object."""
    return cast("tuple[Any, ...]", result) if type(result) is tuple else (result,)


def with_copies(result: Any, which: frozenset[int]) -> Any:
    """The result, with these elements copied: together, so that what they share stays shared."""
    if not which:
        return result
    parts = list(elements(result))
    chosen = sorted(i for i in which if i < len(parts))
    leaves, graphdef = _core.flatten(tuple(parts[i] for i in chosen))
    copies = _core.unflatten(graphdef, leaves)
    for i, copy in zip(chosen, copies, strict=True):
        parts[i] = copy
    return tuple(parts) if type(result) is tuple else parts[0]
