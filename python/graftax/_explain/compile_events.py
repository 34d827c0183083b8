# SPDX-License-Identifier: Apache-2.0
"""For which call JAX is compiling: what it tells of each part, joined with the call that this thread is in."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Generator
from typing import Any, Protocol

from graftax import _core
from graftax._capture.read_set import ReadSet
from graftax._explain import frozen
from graftax._explain.history import History
from graftax._explain.variant import Variant
from graftax._jax import compat


class Entries(Protocol):
    """The table of a function."""

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
    is_new: bool = True  # false: it was traced before, and only its seconds are added here


class _Thread(threading.local):
    pending: _Pending | None = None
    expected: bool = False  # what is compiled was asked for


_thread = _Thread()
_listening = threading.Lock()
_listens = False


def listen() -> None:
    """Hears of each compilation from now on."""
    global _listens
    with _listening:
        if not _listens:
            compat.on_compile_stages(_stage)
            _listens = True


def traced(table: Entries, name: str, recording: _core.Recording, outcomes: list[_core.Outcome]) -> None:
    """The function ran in the trace of the call that this thread is in."""
    entry = table.entry_of(outcomes)
    variant = Variant.of(name, recording.graphdef, recording.names, recording.leaves, table.reads, entry)
    if entry is not None:
        variant.belongs_to(entry)
        _thread.pending = _Pending(table, variant)


def loaded(table: Entries, entry: _core.Entry, name: str, recording: _core.Recording) -> None:
    """The program of a call comes from a file."""
    variant = Variant.of(name, recording.graphdef, recording.names, recording.leaves, table.reads, entry)
    variant.belongs_to(entry)
    table.history.loaded(variant)


def finished(table: Entries) -> None:
    """The call's trace is over; where another one is around it, JAX compiles nothing by itself."""
    pending = _thread.pending
    if pending is not None and pending.table is table:
        _add(pending)
    table.history.warn()


@contextlib.contextmanager
def compiling(entry: _core.Entry, history: History) -> Generator[None]:
    """What was lowered of this entry is compiled here, outside of a call."""
    variant, before = history.of(entry), _thread.pending
    if variant is not None and "compiled" not in variant.seconds:
        _thread.pending = _Pending(None, variant, False)
    try:
        yield
    finally:
        _thread.pending = before


@contextlib.contextmanager
def expected() -> Generator[None]:
    """What is compiled here is no sign of a function that keeps compiling."""
    _thread.expected = True
    try:
        yield
    finally:
        _thread.expected = False


def _add(pending: _Pending) -> None:
    _thread.pending = None
    if pending.is_new and pending.table is not None:
        pending.table.history.add(pending.variant, pending.table.calls, _thread.expected)


def _stage(event: str, seconds: float, **about: Any) -> None:
    """Called by JAX at the end of each part of each compilation, of whatever function."""
    found = compat.compile_stage(event, about)
    if found is None:
        return
    stage, name = found
    pending = _thread.pending
    if pending is None or pending.variant.name != name:
        pending = None if stage == "traced" else _compiled_again(name)
        if pending is None:
            return
        _thread.pending = pending
    seconds_of = pending.variant.seconds
    seconds_of[stage] = seconds_of.get(stage, 0.0) + seconds
    if stage == "compiled":
        _add(pending)
        if "traced" not in seconds_of and pending.table is not None:
            pending.table.history.warn()
    elif pending.is_new and pending.table is not None and pending.table.frozen:
        _thread.pending = None
        frozen.refuse_variant(pending.table.history, pending.variant)


def _compiled_again(name: str) -> _Pending | None:
    """A call whose trace JAX has, and whose arrays lie in another place than before."""
    call = _core.running_call()
    if call is None:
        return None
    caller, roots, outcomes = call
    table: Any = caller._table
    plan = getattr(caller, "_plan", None)  # a loop that is compiled by itself has none
    if plan is None or plan.name != name:
        return None
    before = table.history.of(table.entry_of(outcomes))
    walked = _core.walk(before.graphdef, roots) if before is not None else None
    if before is None or walked is None:
        return None
    variant = Variant.of(name, before.graphdef, before.names, walked[0], table.reads)
    variant.entry = before.entry
    if "compiled" not in before.seconds and not before.differences_to(variant):  # it was lowered by itself
        return _Pending(table, before, False)
    return _Pending(table, variant)
