# SPDX-License-Identifier: Apache-2.0
"""Errors for tracers that a trace leaves somewhere: those of a transform that has ended, and strings made of tracers.

They say where the tracer is, from which transform, and what to write instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from graftax import _core
from graftax._base.errors import MutationError
from graftax._graph.structure import Op, RootPath, Structure, place_name
from graftax._jax.tracers import is_ended, live_traces, trace_of, transform_of

CHANGED_INSIDE = (
    "{name}: {path} was given a value of an inner transform (a loop, a branch, a derivative) that has ended. A "
    "function called by the transformed function changes an object that it captures or finds in a global, and the "
    "transform cannot see that. Pass that object to the transformed function as an argument, or name it there."
)
HOLDS_TRACER = (
    "{name}: {path} holds a tracer of {transform}, which has ended: a function that it transforms changes"
    " an object, and JAX does not apply the change. {remedy}"
)
REMEDY = "Use graftax.{ours} in its place, or return the new value from that function."
UNKNOWN_REMEDY = "Return the new value from that function, and assign it outside of the transform."
TEXT_OF_TRACER = (
    "{name}: {path} is {text!r}, a string made from a traced array, which has no value yet. Return the array and "
    "make the string after the call, or print it during the call with jax.debug.print."
)


class LeakedTracerError(MutationError, jax.errors.UnexpectedTracerError):
    """An object holds a tracer of a transform that has ended.

    It is also JAX's `UnexpectedTracerError`, and names the key path and the transform.
    """


def is_of_steps(error: BaseException) -> bool:
    """Is it about a value of one step, which a function unknown to the transform has kept, as a memo does?"""
    return isinstance(error, jax.errors.UnexpectedTracerError) or getattr(error, "of_steps", False)


def ended_error(name: str, path: str, leaf: object, inner: Sequence[weakref.ref[Any]] = ()) -> MutationError:
    """The error for a leaf that is a tracer of a trace that has ended.

    Args:
        inner: the traces of graftax's own transforms, for which there is better advice.
    """
    trace = trace_of(leaf)
    if any(reference() is trace for reference in inner):
        error = MutationError(CHANGED_INSIDE.format(name=name, path=path))
        error.of_steps = True  # type: ignore[attr-defined]
        return error
    transform, ours = transform_of(leaf)
    remedy = REMEDY.format(ours=ours) if ours else UNKNOWN_REMEDY
    transform = transform or "a transform of JAX's"
    return LeakedTracerError(HOLDS_TRACER.format(name=name, path=path, transform=transform, remedy=remedy))


def refuse_ended(
    name: str,
    outcome: _core.Outcome,
    leaves: Sequence[object],
    path: Callable[[RootPath], str],
    inner: Sequence[weakref.ref[Any]],
) -> None:
    """Raises MutationError for a leaf of an outcome that is a tracer of a trace that has ended."""
    live, results = live_traces(), outcome.result_leaves
    # One leaf for each trace: leaves are many, and almost always none is from a trace that has ended.
    leaf_of_trace = {id(trace): leaf for leaf in leaves if (trace := trace_of(leaf)) is not None}
    if not any(is_ended(leaf, live) for leaf in leaf_of_trace.values()):
        return
    # Changed objects first, since the result often holds the same leaf, and its path says less.
    for i in (*range(results, len(leaves)), *range(results)):
        if is_ended(leaves[i], live):
            raise ended_error(name, path(outcome.leaf_places()[i]), leaves[i], inner)


def ended_among(name: str, roots: Sequence[object], names: tuple[str, ...]) -> MutationError | None:
    """The error for such a tracer among the roots. JAX has met one, and does not say where it is."""
    live = live_traces()
    leaves, graphdef = _core.record(tuple(roots), names)
    for leaf, position in zip(leaves, graphdef.leaf_places(), strict=True):
        if is_ended(leaf, live):
            return ended_error(name, place_name(position, names), leaf)
    return None


def is_unexpected(error: BaseException) -> bool:
    """Is it JAX's error for a tracer that has outlived its transform?"""
    return isinstance(error, jax.errors.UnexpectedTracerError)


def refuse_text(name: str, recording: _core.Recording, outcome: _core.Outcome, path: Callable[[RootPath], str]) -> None:
    """Raises LeakedTracerError for a string that the function has made of a tracer, as `f"{x}"` does."""
    texts = outcome.texts_of_tracers
    if not texts:
        return
    # An argument may be a text that looks like it.
    argument_texts = set(recording.instances((str,)))
    text = next((text for text in texts if text not in argument_texts), None)
    if text is None:
        return
    structure = Structure(outcome)
    row = next((row for row in structure.rows if row.op is Op.static and row.value is text), None)
    place = "a key of a dict" if row is None else path(structure.root_path(row))
    raise LeakedTracerError(TEXT_OF_TRACER.format(name=name, path=place, text=text))
