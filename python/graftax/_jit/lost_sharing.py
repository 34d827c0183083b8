# SPDX-License-Identifier: Apache-2.0
"""Warns when shared arrays come back as separate copies: tree functions copy a shared object once for each path to it.

The copies then diverge in training, and nothing fails. Each trace is checked once: where the caller has one array at
two key paths, the new container that the function returns should have one array there, too.
"""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from graftax import _core
from graftax._base.errors import UntiedWarning
from graftax._base.given_warnings import note_warning
from graftax._graph.structure import Op, RootPath, Row, Structure, place_name
from graftax._jax.equation_match import same_step
from graftax._jax.tracebacks import caller_level
from graftax._jit.call_plan import TracedCall
from graftax._jit.leaf_names import output_path

UNTIED = (
    "{name}: {first} and {second} are {what}, and the call makes two of it: {one} and {other}, which then change "
    "independently. jax.tree.map, optax.apply_updates and the like build a tree, which has one copy of a shared array "
    "for each path to it. {remedy} (If it is not meant to be shared, copy it before the call: jnp.array(x, "
    "copy=True).)"
)
OF_AN_ARRAY = "graftax.optimizer, made before the call, keeps it shared; so does an object that holds it for both."
OF_AN_OBJECT = "graftax.optimizer and graftax.map_leaves keep it shared."

_MAX_PAIRS = 64  # how many aliases are checked


class AliasPair(NamedTuple):
    """Two key paths to one array."""

    leaves: tuple[int, int]
    paths: tuple[RootPath, RootPath]
    is_object: bool  # the object that holds the array is shared, not only the array


def warn_of_lost_sharing(call: TracedCall, outcome: _core.Outcome, output_leaves: Sequence[object]) -> bool:
    """Warns if a trace returns separate copies of an array that the caller shares, both computed in the same way.

    Returns:
        Whether it has warned. One warning for each function is enough, so the caller does not ask again.
    """
    recording, leaves = call.recording, call.leaves
    pairs = list(itertools.islice(_alias_pairs(recording), _MAX_PAIRS))
    if not pairs:
        return False
    alias_groups = _alias_groups(outcome, recording.leaves)
    output_paths = outcome.leaf_places()
    # Candidates are found by the last key of the first path: comparing all pairs of outputs would be quadratic.
    by_last_key: dict[object, list[int]] = defaultdict(list)
    index_of: dict[RootPath, int] = {}
    for i, (write, path) in enumerate(output_paths):
        index_of[write, path] = i
        if path:
            by_last_key[path[-1]].append(i)
    for pair in pairs:
        first_tail, second_tail = _tails(pair)
        for index in by_last_key[first_tail[-1]] if first_tail else ():
            write, path = output_paths[index]
            prefix = path[: len(path) - len(first_tail)]
            if path[len(prefix) :] != first_tail or (write and not prefix):  # a mutated object keeps its identity
                continue
            # The output that stands at the second path of the same container, unless it is one array with the first.
            twin = index_of.get((write, (*prefix, *second_tail)))
            if (
                twin is None
                or output_leaves[index] is output_leaves[twin]
                or (index in alias_groups and alias_groups[index] == alias_groups.get(twin))
            ):
                continue
            # Two arrays that were meant to become different are computed in different ways.
            if same_step(output_leaves[index], output_leaves[twin], leaves[pair.leaves[0]], leaves[pair.leaves[1]]):
                _warn(call, outcome, pair, (output_paths[index], output_paths[twin]))
                return True
    return False


def has_alias_pairs(recording: _core.Recording) -> bool:
    """Does the recording share arrays, so that a trace may lose that?"""
    return next(_alias_pairs(recording), None) is not None


def _alias_groups(outcome: _core.Outcome, leaves: Sequence[object]) -> dict[int, tuple[int, ...]]:
    """For output leaves that the call returns as one array, a value that is equal for the leaves of one array."""
    groups = enumerate(outcome.alike)
    return {output: (number, *(id(leaves[i]) for i in inputs)) for number, group in groups for output, inputs in group}


def _warn(call: TracedCall, outcome: _core.Outcome, pair: AliasPair, new_paths: Sequence[RootPath]) -> None:
    recording = call.recording
    first_path, second_path = (place_name(path, recording.names) for path in pair.paths)
    first_output, second_output = (output_path(recording, outcome.inputs()[2], path) for path in new_paths)
    description, remedy = ("of one object", OF_AN_OBJECT) if pair.is_object else ("one array", OF_AN_ARRAY)
    text = UNTIED.format(
        name=call.plan.name,
        first=first_path,
        second=second_path,
        what=description,
        one=first_output,
        other=second_output,
        remedy=remedy,
    )
    note_warning()
    warnings.warn(text, UntiedWarning, caller_level())


def _tails(pair: AliasPair) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """The two paths of a pair without their common prefix."""
    (_, first), (_, second) = pair.paths
    common = sum(1 for _ in itertools.takewhile(lambda keys: keys[0] == keys[1], zip(first, second, strict=False)))
    return first[common:], second[common:]


def _alias_pairs(recording: _core.Recording) -> Iterator[AliasPair]:
    """All pairs of key paths below one root that lead to one floating array or to one object that holds it."""
    leaves, graphdef = recording.leaves, recording.graphdef
    ids = [id(leaf) for leaf in leaves]
    # One array at two paths. Below different arguments, it is passed twice by the caller and not shared by an object.
    if len(set(ids)) < len(ids):
        paths = graphdef.leaf_places()
        shared: dict[int, list[int]] = defaultdict(list)
        for i, leaf_id in enumerate(ids):
            if _is_parameter(leaves[i]):
                shared[leaf_id].append(i)
        for aliases in shared.values():
            for i, j in itertools.combinations(aliases, 2):
                if paths[i][0] == paths[j][0]:
                    yield AliasPair((i, j), (paths[i], paths[j]), False)
    # One object at two paths.
    if graphdef._shares:  # pyright: ignore[reportPrivateUsage]
        # Their arrays have one leaf each: it is the object that is reached by several paths.
        for leaf, aliases in _shared_objects(leaves, Structure(graphdef)):
            for pair in itertools.combinations(aliases, 2):
                yield AliasPair((leaf, leaf), pair, True)


def _shared_objects(leaves: Sequence[object], structure: Structure) -> Iterator[tuple[int, list[RootPath]]]:
    """For each object with several paths: the leaf number of its first floating array, and the paths to that array."""
    refs_to: dict[int, list[Row]] = defaultdict(list)
    for row in structure.rows:
        if row.op is not Op.ref:
            continue
        node = structure.target(row)
        is_cycle = node.number < row.number < node.end  # a reference from inside the object
        if node.root == row.root and not is_cycle:
            refs_to[node.number].append(row)
    for number, refs in refs_to.items():
        node = structure.rows[number]
        leaf = next((r for r in structure.subtree(node) if r.op is Op.leaf and _is_parameter(leaves[r.leaf])), None)
        if leaf is not None:
            root, path = structure.root_path(leaf)
            tail = path[len(structure.root_path(node)[1]) :]
            yield leaf.leaf, [(root, path), *((root, (*structure.root_path(ref)[1], *tail)) for ref in refs)]


def _is_parameter(leaf: object) -> bool:
    """Is it a floating array with axes? Scalars do not count: code shares one zero among counters by accident."""
    return isinstance(leaf, jax.Array) and leaf.ndim > 0 and jnp.issubdtype(leaf.dtype, jnp.inexact)
