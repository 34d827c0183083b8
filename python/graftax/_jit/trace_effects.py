# SPDX-License-Identifier: Apache-2.0
"""What code that was written for another `jit` expects to happen once for each trace: changes of captured objects."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from graftax import _core
from graftax._base.errors import MutationError
from graftax._graph.structure import place_name
from graftax._jit.call_plan import TracedCall

CHANGES_ON_TRACE = (
    "{name} changes {paths}, which it captures: the jit that it was written for makes such a change once per trace, "
    "graftax.jit on each call"
)


def refuse_trace_effects(call: TracedCall, outcome: _core.Outcome, outputs: Sequence[object]) -> None:
    """Refuses a change of captured Python values, such as a list by which a program counts traces.

    Raises:
        MutationError: with the paths of the changes.
    """
    recording = call.recording
    tracks = outcome.inputs()[2]
    places = [recording.graphdef._node_place(track) for track in tracks]  # pyright: ignore[reportPrivateUsage]
    captured = [number for number, (root, _) in enumerate(places, 1) if root >= call.arguments]
    if not captured:
        return
    # If an array is written as well, the change is let through: under the other `jit` it would leave a tracer behind,
    # so the code cannot count on it.
    inputs = set(map(id, call.leaves))
    for output, (write, _) in zip(outputs, outcome.leaf_places(), strict=True):
        if write in captured and isinstance(output, jax.Array) and id(output) not in inputs:
            return
    paths = ", ".join(place_name(places[number - 1], recording.names) for number in captured)
    raise MutationError(CHANGES_ON_TRACE.format(name=call.plan.name, paths=paths))
