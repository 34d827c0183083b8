# SPDX-License-Identifier: Apache-2.0
"""What was shared and comes back as several: a tree function copies a shared object for each of its places.

From then on the copies are trained apart, and nothing fails. A trace is looked at once: the arrays that the caller
shares are compared with what the function leaves in the same places of a new container.
"""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from graftax import _core
from graftax._base.errors import UntiedWarning
from graftax._base.key_path import keystr
from graftax._graph.structure import Op, Place, Row, Structure, place_name
from graftax._jax.equation_match import same_step
from graftax._jax.tracebacks import caller_level

UNTIED = (
    "{name}: {first} and {second} are {what}, and the call makes two of it: {one} and {other}, which then change "
    "apart. jax.tree.map, optax.apply_updates and their like make a tree, where what is shared is there several times. "
    "{remedy} (Where it is not meant to be one, make it two before the call: jnp.array(x, copy=True).)"
)
OF_AN_ARRAY = "graftax.optimizer, made before the call, keeps it one; so does an object that holds it for both."
OF_AN_OBJECT = "graftax.optimizer and graftax.map_leaves keep it one."

_MOST = 64  # shared arrays that are looked at


class Tie(NamedTuple):
    """Two places of one array."""

    leaves: tuple[int, int]
    places: tuple[Place, Place]
    is_object: bool  # what holds the array is shared, and not the array alone


def tell_untied(
    name: str,
    recording: _core.Recording,
    outcome: _core.Outcome,
    leaves: Sequence[Any],
    out: Sequence[Any],
) -> bool:
    """Warns where a trace leaves unshared copies of what the caller shares, all of them made in the same way.

    Args:
        name: of the function.
        recording: what the caller gave.
        outcome: what the trace found.
        leaves: those that the function was given.
        out: the output leaves.

    Returns:
        Whether it has warned: once for a function is enough.
    """
    ties = list(itertools.islice(_ties(recording), _MOST))
    if not ties:
        return False
    together = _kept(outcome, recording.leaves)
    places = outcome.leaf_places()
    ending: dict[Any, list[int]] = defaultdict(list)
    at: dict[tuple[int, tuple[Any, ...]], int] = {}
    for i, (write, path) in enumerate(places):
        at[write, path] = i
        if path:
            ending[path[-1]].append(i)
    for tie in ties:
        first, second = _apart(tie)
        for one in ending[first[-1]] if first else ():
            write, path = places[one]
            above = path[: len(path) - len(first)]
            if path[len(above) :] != first or (write and not above):  # an object that is written stays itself
                continue
            other = at.get((write, (*above, *second)))
            if other is None or out[one] is out[other] or (one in together and together[one] == together.get(other)):
                continue
            if same_step(out[one], out[other], leaves[tie.leaves[0]], leaves[tie.leaves[1]]):
                _warn(name, recording, outcome, tie, (places[one], places[other]))
                return True
    return False


def _kept(outcome: _core.Outcome, leaves: Sequence[Any]) -> dict[int, Any]:
    """Output leaves that the call makes one array of, by what tells them apart from others."""
    groups = enumerate(outcome.alike)
    return {out: (i, *(id(leaves[at]) for at in inputs)) for i, group in groups for out, inputs in group}


def _warn(name: str, recording: _core.Recording, outcome: _core.Outcome, tie: Tie, new: Sequence[Place]) -> None:
    first, second = (place_name(place, recording.names) for place in tie.places)
    one, other = (output_path(recording, outcome, place) for place in new)
    what, remedy = ("of one object", OF_AN_OBJECT) if tie.is_object else ("one array", OF_AN_ARRAY)
    text = UNTIED.format(name=name, first=first, second=second, what=what, one=one, other=other, remedy=remedy)
    warnings.warn(text, UntiedWarning, caller_level())


def output_path(recording: _core.Recording, outcome: _core.Outcome, place: Place) -> str:
    """The text of a place of an Outcome, of its result or of a write."""
    write, path = place
    if write == 0:
        return f"result{keystr(path)}"
    root, before = recording.graphdef._node_place(outcome.inputs()[2][write - 1])  # pyright: ignore[reportPrivateUsage]
    return place_name((root, (*before, *path)), recording.names)


def _apart(tie: Tie) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The two paths below the last node that the places have in common."""
    (_, one), (_, other) = tie.places
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    return one[common:], other[common:]


def _ties(recording: _core.Recording) -> Iterator[Tie]:
    """Each two places, below one root, of a floating array: of the array itself, or of an object that holds it."""
    leaves, graphdef = recording.leaves, recording.graphdef
    ids = [id(leaf) for leaf in leaves]
    if len(set(ids)) < len(ids):
        places = graphdef.leaf_places()
        shared: dict[int, list[int]] = defaultdict(list)
        for i, which in enumerate(ids):
            if _is_parameter(leaves[i]):
                shared[which].append(i)
        for same in shared.values():
            for one, other in itertools.combinations(same, 2):
                if places[one][0] == places[other][0]:
                    yield Tie((one, other), (places[one], places[other]), False)
    if graphdef._shares:  # pyright: ignore[reportPrivateUsage]
        for leaf, same in _shared_objects(leaves, Structure(graphdef)):
            for two in itertools.combinations(same, 2):
                yield Tie((leaf, leaf), two, True)


def _shared_objects(leaves: Sequence[Any], structure: Structure) -> Iterator[tuple[int, list[Place]]]:
    """The first floating array of each object that stands in several places, and the places of that array."""
    again: dict[int, list[Row]] = defaultdict(list)
    for row in structure.rows:
        if row.op is not Op.ref:
            continue
        node = structure.target(row)
        if node.root == row.root and not node.number < row.number < node.end:  # within itself it is a cycle
            again[node.number].append(row)
    for number, refs in again.items():
        node = structure.rows[number]
        leaf = next((r for r in structure.below(node) if r.op is Op.leaf and _is_parameter(leaves[r.leaf])), None)
        if leaf is not None:
            root, path = structure.place(leaf)
            inside = path[len(structure.place(node)[1]) :]
            yield leaf.leaf, [(root, path), *((root, (*structure.place(ref)[1], *inside)) for ref in refs)]


def _is_parameter(leaf: Any) -> bool:
    """Scalars are shared for no reason: one zero for all counters."""
    return isinstance(leaf, jax.Array) and leaf.ndim > 0 and jnp.issubdtype(leaf.dtype, jnp.inexact)
