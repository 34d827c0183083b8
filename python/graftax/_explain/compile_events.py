# SPDX-License-Identifier: Apache-2.0
"""Attributes JAX's compilation events to the call that this thread is in."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Generator, Sequence
from typing import Any, Protocol

from graftax import _core
from graftax._capture.read_set import ReadSet
from graftax._explain import frozen
from graftax._explain.history import History
from graftax._explain.variant import Variant
from graftax._jax.cache_of_jax import note_keys
from graftax._jax.compilation import compile_stage, is_cache_retrieval, listen_to_compile_stages


class Entries(Protocol):
    """What is used of a `FunctionTable`, which is defined in a higher package."""

    history: History
    reads: ReadSet | None

    @property
    def calls(self) -> int: ...
    @property
    def frozen(self) -> bool: ...
    def entry_of(self, outcomes: list[_core.Outcome]) -> _core.Entry | None: ...


@dataclasses.dataclass
class _Pending:
    """A call whose program is being compiled."""

    table: Entries | None
    variant: Variant
    is_new: bool = True  # False: an earlier variant, to which only seconds are added


class _Thread(threading.local):
    pending: _Pending | None = None
    expected: bool = False  # compilations are intended, as in `warm`
    was_retrieved: bool = False  # JAX has read an executable from its own cache, and not told yet for which function


_thread = _Thread()


def listen() -> None:
    """Registers for JAX's compilation events, once for the process."""
    note_keys()
    listen_to_compile_stages(_on_stage)


def record_trace(
    table: Entries,
    name: str,
    recording: _core.Recording,
    outcomes: list[_core.Outcome],
    repeated: Sequence[str],
    changed: Sequence[str],
) -> None:
    """Records that the function was traced for the call that this thread is in.

    `repeated` says which parts of it were shared, `changed` for which numbers it was traced again.
    """
    entry = table.entry_of(outcomes)
    if entry is not None:
        variant = Variant.from_call(name, recording.graphdef, recording.names, recording.leaves, table.reads, entry)
        variant.repeated, variant.changed = tuple(repeated), tuple(changed)
        _thread.pending = _Pending(table, variant)


def record_ready(table: Entries, entry: _core.Entry, name: str, recording: _core.Recording, cause: str) -> None:
    """Records that the program of a call was there: `loaded` from a file, `shared` with an equal function, `disk`."""
    variant = Variant.from_call(name, recording.graphdef, recording.names, recording.leaves, table.reads, entry)
    table.history.add_ready(variant, cause)


def note_reused() -> None:
    """The trace of the call that this thread is in came to a program that is compiled already."""
    if _thread.pending is not None:
        _thread.pending.variant.is_reused = True


def finish_trace(table: Entries) -> None:
    """Records a trace that JAX has not compiled, because it is a part of an outer trace. Gives pending warnings."""
    pending = _thread.pending
    if pending is not None and pending.table is table:
        _add(pending)
    table.history.warn()


def take_pending() -> Variant | None:
    """Records the trace of the call that this thread is in. Another thread compiles it."""
    pending = _thread.pending
    if pending is None:
        return None
    pending.variant.is_compiling = True
    _add(pending)
    return pending.variant


@contextlib.contextmanager
def compiling(variant: Variant | None) -> Generator[None]:
    """In the block, a compilation outside of a call counts for this variant."""
    outer = _thread.pending
    if variant is not None and "compiled" not in variant.seconds:
        _thread.pending = _Pending(None, variant, False)
    try:
        yield
    finally:
        _thread.pending = outer


@contextlib.contextmanager
def expected() -> Generator[None]:
    """In the block, compilations are intended and do not count toward `RecompileWarning`."""
    _thread.expected = True
    try:
        yield
    finally:
        _thread.expected = False


def _add(pending: _Pending) -> None:
    _thread.pending = None
    if pending.is_new and pending.table is not None:
        pending.table.history.add(pending.variant, pending.table.calls, _thread.expected)


def _on_stage(event: str, seconds: float, **metadata: Any) -> None:
    """JAX calls this at the end of each stage of every compilation in the process."""
    _thread.was_retrieved |= is_cache_retrieval(event)
    stage_and_name = compile_stage(event, metadata)
    if stage_and_name is None:
        return
    stage, name = stage_and_name
    was_retrieved = stage == "compiled" and _thread.was_retrieved
    if stage == "compiled":
        _thread.was_retrieved = False
    # No trace of ours is pending, so JAX traces something else, or compiles what was traced in an earlier call.
    pending = _thread.pending
    if pending is None or pending.variant.name != name:
        pending = None if stage == "traced" else _recompiled_call(name)
        if pending is None:
            return
        _thread.pending = pending
    seconds_of = pending.variant.seconds
    seconds_of[stage] = seconds_of.get(stage, 0.0) + seconds
    # The last stage: the variant is complete. Before it, a frozen function refuses the program.
    if stage == "compiled":
        pending.variant.was_retrieved = was_retrieved
        _add(pending)
        # After a trace the core calls `_reads`, and with it `finish_trace`, which warns at the end of the trace.
        if "traced" not in seconds_of and pending.table is not None:
            pending.table.history.warn()
    # A call of a frozen function may have got past its table: JAX has the trace, and compiles it for other shardings.
    elif pending.is_new and pending.table is not None and pending.table.frozen:
        _thread.pending = None
        frozen.refuse_variant(pending.table.history, pending.variant)


def _recompiled_call(name: str) -> _Pending | None:
    """The running call, if JAX compiles its cached trace again: for other shardings, or after `lower()`."""
    call = _core.running_call()
    if call is None:
        return None
    caller, roots, outcomes = call
    table: Any = caller._table
    plan = getattr(caller, "_plan", None)  # a loop that is compiled eagerly has none
    # During a call JAX also compiles other programs, such as single operations.
    if plan is None or plan.name != name:
        return None
    entry = table.entry_of(outcomes)
    variants = table.history.variants_of(entry)
    latest = variants[0] if variants else None
    walked = _core.walk(latest.graphdef, roots) if latest is not None else None
    if latest is None or walked is None:
        return None
    variant = Variant.from_call(name, latest.graphdef, latest.names, walked[0], table.reads)
    variant.entry = latest.entry
    is_compiled_twice = entry is not None and entry.donor is not None  # with donation and without
    # After `lower()`, or with donation, this compiles a program that has a variant already: only seconds are added.
    for existing in variants:
        is_lowered = "compiled" not in existing.seconds
        if (is_lowered or is_compiled_twice) and not existing.differences_to(variant):
            return _Pending(table, existing, False)
    return _Pending(table, variant)
