# SPDX-License-Identifier: Apache-2.0
"""What code that was written for another `jit` expects to happen once for each trace: changes of captured objects."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from graftax import _core
from graftax._base.errors import MutationError
from graftax._graph.structure import place_name

CHANGES_ON_TRACE = (
    "{name} changes {paths}, which it captures: the jit that it was written for makes such a change once per trace, "
    "graftax.jit on each call"
)


def refuse_trace_effects(
    name: str,
    recording: _core.Recording,
    outcome: _core.Outcome,
    arguments: int,
    leaves: Sequence[object],
    outputs: Sequence[object],
) -> None:
    """Refuses a change of captured Python values, such as a list by which a program counts traces.

    If an array is written as well, the change is let through: under the other `jit` it would leave a tracer behind, so
    the code cannot count on it.

    Args:
        name: of the function.
        recording, outcome: of the trace.
        arguments: how many of the roots are arguments. The others are captured.
        leaves, outputs: of the trace.

    Raises:
        MutationError: with the paths of the changes.
    """
    tracks = outcome.inputs()[2]
    places = [recording.graphdef._node_place(track) for track in tracks]  # pyright: ignore[reportPrivateUsage]
    captured = [number for number, (root, _) in enumerate(places, 1) if root >= arguments]
    if not captured:
        return
    inputs = set(map(id, leaves))
    for output, (write, _) in zip(outputs, outcome.leaf_places(), strict=True):
        if write in captured and isinstance(output, jax.Array) and id(output) not in inputs:
            return
    paths = ", ".join(place_name(places[number - 1], recording.names) for number in captured)
    raise MutationError(CHANGES_ON_TRACE.format(name=name, paths=paths))
