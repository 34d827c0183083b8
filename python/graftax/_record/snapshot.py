# SPDX-License-Identifier: Apache-2.0
"""What one call was given and what it gave back, as structures and leaves: nothing of it changes later."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from graftax import _core
from graftax._jax.arrays import array_class, new_ref, ref_types
from graftax._jit.call_plan import Plan
from graftax._jit.options import Options
from graftax._record.script_module import statement_line

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


def is_same_random_state(first: Random, second: Random) -> bool:
    (name_1, keys_1, *position_1), (name_2, keys_2, *position_2) = first[1], second[1]
    is_same_numpy = name_1 == name_2 and position_1 == position_2 and np.array_equal(keys_1, keys_2)
    return is_same_numpy and first[0] == second[0]


@dataclasses.dataclass(frozen=True)
class Target:
    """What is called.

    Attributes:
        function: the Python function.
        form: how it came to `jit`: "function", "bound" to an object by a class, "method", callable "object", "partial".
        prefix: how many of the first roots it brings along.
        options: of `jit`.
    """

    function: Any  # a types.FunctionType
    form: str
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
        draws: the random states that the call (`call`) or its trace (`trace`) began with, if one of them draws numbers.
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


def snapshots_of(calls: Sequence[_core.KeptCall]) -> list[Snapshot]:
    """What these calls were given and gave."""
    inputs: dict[int, list[Any]] = {}
    return [_snapshot(call, _leaves_of(call, inputs)) for call in calls]


def _snapshot(call: _core.KeptCall, leaves: list[Any]) -> Snapshot:
    names = call.plan.signature.root_names(call.layout)
    snapshot = Snapshot(call.target, call.plan, call.layout, names, call.graphdef, leaves)
    snapshot.raised, snapshot.line = call.raised or "", statement_line(call.statement)
    snapshot.draws = dict(call.draws or {})
    outputs = call.outputs
    if outputs is not None:
        # The Outcome writes into rebuilt objects, and the snapshot's leaves stay what the call was given.
        inputs = [kept_leaf(leaf) for leaf in leaves]
        for leaf, ref in call.refs:
            inputs[leaf] = ref
        # Donated arrays are deleted afterwards, as the caller's are.
        for leaf in call.entry.donated:
            inputs[leaf] = jnp.copy(inputs[leaf])
            inputs[leaf].delete()
        roots = _core.unflatten_roots(call.graphdef, inputs)
        walked = _core.walk(call.graphdef, roots)
        # Otherwise an object that was held weakly is gone, and a replay compares nothing.
        if walked is not None:
            result = call.entry.outcomes[call.outcome].apply(outputs, *walked)
            snapshot.after_leaves, snapshot.after, snapshot.after_names = graph_after(call.plan, names, roots, result)
    return snapshot


def _leaves_of(call: _core.KeptCall, leaves_of: dict[int, list[Any]]) -> list[Any]:
    """The input leaves of a call. Outputs of the previous call that were donated to it are computed again.

    Args:
        leaves_of: the leaves of other calls, by the id of the call; those of this call are added.
    """
    # Back to a call whose inputs are all there, and forward again from that one.
    chain = [call]
    while (previous := chain[-1].before) is not None:
        chain.append(previous)
    for link in reversed(chain):
        if id(link) in leaves_of:
            continue
        leaves_of[id(link)] = leaves = link.leaves
        if link.before is not None:
            outputs = _outputs_again(link.before, leaves_of[id(link.before)])
            for leaf, output in link.given:
                leaves[leaf] = outputs[output]
    return leaves_of[id(call)]


def _outputs_again(call: _core.KeptCall, leaves: list[Any]) -> list[Any]:
    donated = set(call.entry.donated)
    # The program donates once more: copies, since the leaves themselves are written to the file.
    copied = [jnp.copy(leaf) if i in donated else leaf for i, leaf in enumerate(leaves)]
    result, written, _ = call.entry.compiled(*call.arguments(copied))
    return [*result, *written]


@jax.jit
def _copied(arrays: list[Any]) -> list[Any]:
    return [jnp.copy(array) for array in arrays]


def copies_of(leaves: list[Any]) -> list[Any]:
    """Copies of leaves that a call may change or delete."""
    arrays = [leaf for leaf in leaves if type(leaf) is _ARRAY]
    # One dispatch for all of them.
    try:
        copied = iter(_copied(arrays) if len(arrays) > 1 else map(jnp.copy, arrays))
    # One program cannot take arrays that lie on different devices.
    except ValueError:
        copied = map(jnp.copy, arrays)
    return [next(copied) if type(leaf) is _ARRAY else kept_leaf(leaf, True) for leaf in leaves]


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
    # A call by value changes none of its inputs.
    roots, names = ((), ()) if plan.options.by_value else (tuple(roots), names)
    names = ("result", *names)
    ignored = plan.ignoring.test(names)
    leaves, graphdef = _core.record((result, *roots), names, ignored=ignored, stand_ins=True)
    return leaves, graphdef, names


def copy_to_host(scalar: jax.Array) -> None:
    """Begins the copy that `is_true` reads some calls later, so that it need not wait for the device."""
    # What the computation raises is told where the scalar is read.
    with contextlib.suppress(Exception), jax.transfer_guard("allow"):
        scalar.copy_to_host_async()


def is_true(scalar: jax.Array) -> bool:
    """Waits for a scalar. Raises what the computation has raised."""
    with jax.transfer_guard("allow"):
        return bool(scalar)
