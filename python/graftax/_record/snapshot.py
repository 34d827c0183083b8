# SPDX-License-Identifier: Apache-2.0
"""What one call was given and what it gave back, as structures and leaves: nothing of it changes later."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from graftax import _core
from graftax._graph.patterns import Pattern, coverage_test
from graftax._jax.arrays import array_class, new_ref, ref_types
from graftax._jit.call_plan import Plan, RecordedCall
from graftax._jit.options import Options
from graftax._jit.requested_donation import donated_leaves
from graftax._record.marks import is_floating, is_floating_dtype

_ARRAY = array_class()

Random = tuple[Any, Any]  # the states of Python's and of NumPy's generators


def error_text(error: BaseException) -> str:
    """The class and a line of an exception; of one that quotes a traceback, the last line."""
    text = str(error).strip()
    lines = text.splitlines() or [""]
    return f"{type(error).__qualname__}: {lines[-1] if 'Traceback (most recent' in lines[0] else lines[0]}"


def random_state() -> Random:
    return random.getstate(), np.random.get_state()


def set_random_state(state: Random) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])


def is_same_random_state(one: Random, other: Random) -> bool:
    (name, keys, *rest), (other_name, other_keys, *other_rest) = one[1], other[1]
    same_numpy = name == other_name and rest == other_rest and np.array_equal(keys, other_keys)
    return same_numpy and one[0] == other[0]


@dataclasses.dataclass(frozen=True)
class Target:
    """What is called.

    Attributes:
        function: the Python function.
        way: how it came to `jit`: "function", "bound" to an object by a class, "method", callable "object", "partial".
        prefix: how many of the first roots it brings along.
        options: of `jit`.
    """

    function: Any  # a types.FunctionType
    way: str
    prefix: int
    options: Options


@dataclasses.dataclass(eq=False)
class Snapshot:
    """A call: the structure and the leaves of all that it takes as input, and later of its results.

    Attributes:
        target: what was called.
        plan, layout, names: of the function, and how the arguments were passed.
        graphdef, leaves: the inputs before the call. Leaves that the call may change or delete are copies.
        after, after_names, after_leaves: the result, and the inputs as the call left them.
        raised: the class and a line of what the call raised.
        line: of the script's statement that made the call.
        draws: the random states that the call or its trace began with, where one of them draws from these.
        pending: whether the results are finite, not yet read.
    """

    target: Target
    plan: Plan
    layout: tuple[Any, ...]
    names: tuple[str, ...]
    graphdef: _core.GraphDef
    leaves: list[Any]
    after: _core.GraphDef | None = None
    after_names: tuple[str, ...] = ()
    after_leaves: list[Any] = dataclasses.field(default_factory=list[Any])
    raised: str = ""
    line: int | None = None
    draws: dict[str, Random] = dataclasses.field(default_factory=dict[str, Random])
    pending: list[Any] = dataclasses.field(default_factory=list[Any])


def snapshot_of(
    target: Target, plan: Plan, roots: tuple[Any, ...], layout: tuple[Any, ...], context: Any
) -> tuple[Snapshot, list[Any]]:
    """(a snapshot of a call that is about to be made, the leaves of its roots)."""
    recording = plan.record(roots, layout)
    given = list(recording.leaves)
    donated = _donated(RecordedCall(plan, roots, layout, recording, context))
    leaves = [kept_leaf(leaf, is_donated) for leaf, is_donated in zip(given, donated, strict=True)]
    return Snapshot(target, plan, layout, recording.names, recording.graphdef, leaves), given


def _donated(call: RecordedCall) -> list[bool]:
    """One flag a leaf: does the call delete it? Those of `donate="auto"` are not, since the recorder holds them."""
    if call.donates:
        try:
            return donated_leaves(call.plan, call.roots, call.layout, call.recording.graphdef)
        except ValueError:  # the call itself raises it
            pass
    return [False] * len(call.recording.leaves)


def kept_leaf(leaf: Any, is_donated: bool = False) -> Any:
    """The leaf, or a copy where it may change or be deleted."""
    if type(leaf) is _ARRAY:  # most are, and the other tests take longer
        return jnp.copy(leaf) if is_donated else leaf
    if isinstance(leaf, ref_types):
        return new_ref(leaf[...])
    if isinstance(leaf, np.ndarray):
        return cast("np.ndarray[Any, Any]", leaf).copy()
    return jnp.copy(leaf) if is_donated and isinstance(leaf, jax.Array) else leaf  # typed keys


def graph_after(
    plan: Plan, names: tuple[str, ...], roots: Sequence[Any], result: Any
) -> tuple[list[Any], _core.GraphDef, tuple[str, ...]]:
    """(leaves, structure, names of the roots) of a result, and of the inputs as the call left them."""
    roots, names = ((), ()) if plan.options.by_value else (tuple(roots), names)
    names = ("return", *names)
    ignored = plan.ignoring.test(names)
    leaves, graphdef = _core.record((result, *roots), names, ignored=ignored, stand_ins=True)
    return leaves, graphdef, names


def note_results(
    snapshot: Snapshot, roots: tuple[Any, ...], given: list[Any], result: Any, checked: Sequence[Pattern] | None
) -> None:
    """Adds the results to the snapshot, and begins to compute whether those that `checked` covers are finite.

    Args:
        given: the leaves of the inputs. An array that is one of them is no result.
        checked: patterns of key paths; an empty list checks all, and None nothing.
    """
    plan = snapshot.plan
    plan.signature.look_again(roots)
    leaves, snapshot.after, snapshot.after_names = graph_after(plan, snapshot.names, roots, result)
    snapshot.after_leaves = [kept_leaf(leaf) for leaf in leaves]
    if checked is None:
        return
    before = {id(leaf): kept for leaf, kept in zip(given, snapshot.leaves, strict=True)}
    is_covered = coverage_test(checked, snapshot.after_names)
    places = snapshot.after.leaf_places() if is_covered is not None else ()
    new: list[Any] = []
    for i, leaf in enumerate(leaves):
        if is_covered is not None and not is_covered(places[i]):
            continue
        if id(leaf) not in before:
            new.append(leaf)
        elif type(leaf) is not _ARRAY and isinstance(leaf, (np.ndarray, *ref_types)):
            new.append(_made_since(before[id(leaf)], leaf))
    snapshot.pending = start_finite_test(new)


def _made_since(before: Any, after: Any) -> Any:
    """The elements of an array that a call may change in place; 0 for those that were not finite before it."""
    if not is_floating(after[...]):
        return None
    if isinstance(after, np.ndarray):
        return np.where(np.isfinite(before), after, 0)
    return jnp.where(jnp.isfinite(before[...]), after[...], 0)


@jax.jit
def _are_finite(arrays: list[Any]) -> Any:
    return jnp.stack([jnp.isfinite(x).all() for x in arrays]).all()


def start_finite_test(leaves: Sequence[Any]) -> list[Any]:
    """Scalars that are true if all floating arrays among the leaves are finite. Nothing waits for them."""
    arrays = [leaf if type(leaf) is _ARRAY or not isinstance(leaf, ref_types) else leaf[...] for leaf in leaves]
    arrays = [array for array in arrays if is_floating_dtype(getattr(array, "dtype", None))]
    if not arrays:
        return []
    try:
        return [_are_finite(arrays)]
    except ValueError:  # they lie on different devices
        by_devices: dict[frozenset[Any], list[Any]] = {}
        for array in arrays:
            sharding = getattr(array, "sharding", None)
            by_devices.setdefault(frozenset(sharding.device_set if sharding else ()), []).append(array)
        return [_are_finite(group) for group in by_devices.values()]


def is_ready(snapshot: Snapshot) -> bool:
    return all(scalar.is_ready() for scalar in snapshot.pending)


def has_finite_results(snapshot: Snapshot) -> bool:
    """Waits for the results. Raises what the computation has raised."""
    with jax.transfer_guard("allow"):
        return all(bool(scalar) for scalar in snapshot.pending)
