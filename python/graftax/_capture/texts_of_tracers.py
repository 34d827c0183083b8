# SPDX-License-Identifier: Apache-2.0
"""Refuses strings that are made of tracers, as `f"{x}"` makes them: they name the tracer, and not the value."""

from __future__ import annotations

from collections.abc import Callable

from graftax import _core
from graftax._capture.leaked_tracers import LeakedTracerError
from graftax._graph.structure import Op, RootPath, Structure

TEXT_OF_TRACER = (
    "{name}: {path} is {text!r}, a string made from a traced array, which has no value yet. Return the array and "
    "make the string after the call, or print it during the call with jax.debug.print."
)


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
