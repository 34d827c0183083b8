# SPDX-License-Identifier: Apache-2.0
"""`jit(..., branches_ahead=True)`: the programs that decisions on numbers lead to are made before a call needs them.

See docs/internals/numbers.md.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import dis
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from concurrent.futures.thread import ThreadPoolExecutor  # imported later, it cannot be at Python's end
from typing import TYPE_CHECKING, Any

import jax

from graftax import _core
from graftax._capture.numbers.branch_numbers import other_answers
from graftax._capture.retrace_signals import NewReads
from graftax._capture.traces_ahead import NotAhead, computing_only
from graftax._explain import Variant, compile_events
from graftax._graph.structure import RootPath
from graftax._jit import program_store
from graftax._jit.call_plan import RecordedCall
from graftax._jit.number_policy import NotSymbolic, Number, SymbolicNumbers, same
from graftax._jit.running_trace import running_traces

if TYPE_CHECKING:
    from graftax._jit.jitted import Jitted

_RAISE = dis.opmap["RAISE_VARARGS"]
_MOST_PROGRAMS = 8  # that are made behind one call
# A trace may take ten times as long as those of calls have taken, and a second: code may run far longer for values that
# no call has.
_LEAST_SECONDS, _LONGEST = 1, 10

_Assumed = Mapping[RootPath, Number]


class ProgramsAhead:
    """Entries of one table whose programs were made ahead, until a call uses them."""

    def __init__(self) -> None:
        self._compilations: weakref.WeakKeyDictionary[_core.Entry, Future[None]] = weakref.WeakKeyDictionary()

    def add(self, entry: _core.Entry, compilation: Future[None]) -> None:
        self._compilations[entry] = compilation

    def use(self, caller: object, entry: _core.Entry) -> None:
        """A call is about to run an entry: waits for its program, and tells the cache on disk of it."""
        compilation = self._compilations.pop(entry, None) if self._compilations else None
        if compilation is None:
            return
        compilation.exception()  # of an error the call learns by compiling itself
        if (store := program_store.current()) is not None:
            store.keep(caller, entry)

    @property
    def compiling(self) -> int:
        """How many programs are being compiled."""
        return sum(not compilation.done() for compilation in list(self._compilations.values()))


def trace_branches(caller: Jitted[..., Any], args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Makes the programs that a function may need for other numbers than those of the call that has just ended.

    This thread traces, since JAX's settings are the thread's own, and another one compiles. A trace that raises, or is
    about to do more than to compute values, is given up: the call that comes to it will be traced.
    """
    if running_traces() or caller._table.frozen:
        return
    waiting = collections.deque[_Assumed]([{}])  # the call itself, once more: its numbers may have changed
    pool = ThreadPoolExecutor(1, f"graftax compiles {caller._plan.name}")
    program_count, seconds = 0, _LEAST_SECONDS + _LONGEST * caller._table.history.longest("traced")
    while waiting and program_count < _MOST_PROGRAMS:
        branch = _Branch(caller, pool, waiting.popleft())
        try:
            with compile_events.expected(), computing_only(seconds), _no_collections():
                caller._retry_with_new_roots(functools.partial(branch.trace, args, kwargs))
        except BaseException as error:  # code that no call has reached yet may raise anything
            if isinstance(error, KeyboardInterrupt) and not _is_raised_by_code(error):
                raise  # the user has interrupted
            continue
        finally:
            caller._table.restarting.discard(threading.get_ident())  # the next call is counted
        program_count += branch.is_new
        waiting += branch.alternatives
    # The call returns now. One that needs a program waits for it in `ProgramsAhead.use`.
    pool.shutdown(wait=False)


@contextlib.contextmanager
def _no_collections() -> Generator[None]:
    """While entered, the garbage collector is off: a finalizer that runs in the trace would seem to be a part of it."""
    # The trace hears all calls of its thread, and the collector runs in whichever thread allocates.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _is_raised_by_code(error: BaseException) -> bool:
    """Has a `raise` statement raised it?"""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and traceback.tb_frame.f_code.co_code[traceback.tb_lasti] == _RAISE


class _Branch:
    """A trace with other values assumed for some numbers of a call."""

    def __init__(self, caller: Jitted[..., Any], pool: ThreadPoolExecutor, assumed: _Assumed) -> None:
        self._caller, self._pool, self._assumed = caller, pool, assumed
        self.is_new = self._has_begun = False
        self.alternatives: list[_Assumed] = []  # values for which the function takes other decisions

    def trace(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Traces and compiles the program, if no call has done so. Finds `alternatives`."""
        caller, table = self._caller, self._caller._table
        call = caller._with_symbols(caller._record_arguments(args, kwargs), _core.Opened(), shapes=True)
        numbers = call.numbers
        # A retry, with new roots, finds the table without entries: they have been dropped.
        is_retry, self._has_begun = self._has_begun, True
        if numbers is None or not (is_retry or (call.recording.graphdef, call.context) in table.entries):
            return  # the call has left another structure, which may change again before the next one
        call = _assuming(call, numbers, self._assumed)
        entry = table.find(call.recording, call.context)[0] or caller._find_or_build_entry(call)
        if not entry.outcomes:
            self._compile(call, entry, numbers.family.forgetting())
            self.is_new = True
        # Ask for other values only once for each program: when it is new, or for the call itself.
        if entry.host is not None and (self.is_new or not self._assumed):
            values = [call.recording.leaves[leaf] for leaf in numbers.leaves]
            for changed in other_answers(entry.host, values, numbers.directions):
                self.alternatives.append(dict(zip(numbers.paths, changed, strict=True)))

    def _compile(self, call: RecordedCall, entry: _core.Entry, forget: Callable[[], None]) -> None:
        """Compiles an entry. If it cannot be traced, that says nothing about the numbers of real calls."""
        table = self._caller._table
        try:
            lowered = self._caller._run_stage(call, entry, entry.compiled.lower)
        except BaseException as error:
            table.sharing.forget(entry)
            if type(error) is not NewReads:  # else it is traced again, with what it was found to read
                forget()
            if isinstance(error, NotSymbolic):
                raise NotAhead from None
            raise
        variant = table.history.latest_variant(entry)
        if variant is not None:
            variant.is_compiling = variant.is_ahead = True
        try:
            table.ahead.add(entry, self._pool.submit(_compile, lowered, variant))
        except RuntimeError:  # there are no more threads, as at Python's end: a call compiles it
            if variant is not None:
                variant.is_compiling = False


def _assuming(call: RecordedCall, numbers: SymbolicNumbers, assumed: _Assumed) -> RecordedCall:
    """The call with symbols, with these values assumed for its numbers."""
    replaced = {
        i: (leaf, assumed[path])
        for i, (leaf, path) in enumerate(zip(numbers.leaves, numbers.paths, strict=True))
        if path in assumed and not same(assumed[path], call.recording.leaves[leaf])
    }
    numbers.assumed = frozenset(replaced)
    return dataclasses.replace(call, recording=call.recording.with_numbers(list(replaced.values())))


def _compile(lowered: jax.stages.Lowered, variant: Variant | None) -> None:
    try:
        with compile_events.compiling(variant):
            lowered.compile()
    finally:
        if variant is not None:
            variant.is_compiling = False
