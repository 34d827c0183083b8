# SPDX-License-Identifier: Apache-2.0
"""The function that JAX traces for an entry: from flat arrays to flat arrays, and to the number of an Outcome."""

from __future__ import annotations

import contextlib
import inspect
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._base.given_warnings import count_warnings
from graftax._capture.retrace_signals import NewReads
from graftax._explain import compile_events, frozen
from graftax._jit import program_store
from graftax._jit.call_plan import Layout, Plan, TracedCall
from graftax._jit.finite_check import FiniteCheck
from graftax._jit.number_policy import SymbolicNumbers
from graftax._jit.restarts import Restartable
from graftax._jit.running_trace import running_traces
from graftax._jit.symbolic_call import check_of_counters
from graftax._jit.trace import trace_call
from graftax._jit.trace_growth import Growth, take_finished

_OUTCOME_LOCK = threading.Lock()

Flat = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]


def flat_function(
    plan: Plan,
    layout: Layout,
    donated: Sequence[bool],
    outcomes: list[_core.Outcome],
    by_value: bool,
    shapes: bool = False,
    numbers: SymbolicNumbers | None = None,
    grows: bool = True,
) -> Callable[..., Flat]:
    """The function that JAX traces: arrays to (result leaves, write-back leaves, number of the Outcome).

    With `Options.finite` a scalar follows the number: are these results finite?

    Args:
        plan, layout: of the function and of its calls.
        donated: one flag for each leaf; empty if nothing is donated.
        outcomes: the list of the entry. Each trace appends one.
        by_value: the caller's objects stay as they are, so changes are not outputs.
        shapes: nothing will run, and the roots may hold `jax.ShapeDtypeStruct` instead of arrays.
        numbers: the symbolic numbers. Two vectors that the host has computed then follow the leaves.
        grows: a running trace may take in the globals and captures that it finds. Otherwise it begins anew with them.
    """

    def flat(*leaves: object) -> Flat:
        # JAX keeps this function in its caches, so it must not hold objects of the user's. They come from the call that
        # this thread is in.
        active = _core.active_call(outcomes)
        if active is None:
            raise GraftaxError(f"{plan.name} was traced outside of a call")
        caller, roots, recording, computed = active
        # A hit whose leaves have other shapes or dtypes than before gets here without a recording.
        recording = recording or plan.record(roots, layout, shapes, symbolic=numbers.places.keys() if numbers else ())
        # The disk may have the program for such leaves. The call begins anew, and finds it in its entry.
        store = None if shapes or numbers else program_store.current()
        if store is not None and store.add_program(caller, recording, outcomes):
            raise NewReads
        if caller._table.frozen and not shapes:
            frozen.refuse(caller._table, plan.name, recording)
        # Made before the trace, because it reads the Refs before the function writes to them.
        check = FiniteCheck(plan, recording, leaves) if plan.options.finite is not None and not shapes else None
        warnings_before = count_warnings()
        with Restartable(caller._table):
            call = TracedCall(plan, caller, roots, recording, layout, leaves, donated, by_value)
            outcome, outputs = _trace(call, outcomes, shapes, numbers, computed, grows)
        caller._table.has_warned |= count_warnings() != warnings_before
        repeated = [] if shapes else caller._table.findings[outcome].repeated
        # From now on another thread that traces this entry takes the findings out (`note_traced`).
        number = add_outcome(outcomes, outcome)
        if not shapes:
            changed = [] if numbers is None else numbers.family.take_changed()
            compile_events.record_trace(caller._table, plan.name, recording, outcomes, repeated, changed)
        # The host computes the symbolic numbers among the results: they are not outputs of the program.
        n = outcome.result_leaves - sum(leaf < outcome.result_leaves for leaf, _ in outcome.numbers)
        are_finite = () if check is None else check.result(outcome, outputs)
        return tuple(outputs[:n]), tuple(outputs[n:]), (*encode(number), *are_finite)

    flat.__name__ = flat.__qualname__ = plan.name
    flat.__wrapped__ = plan.definition  # type: ignore[attr-defined]  # JAX shows the file and line of this one
    return flat


def _trace(
    call: TracedCall,
    outcomes: list[_core.Outcome],
    shapes: bool,
    numbers: SymbolicNumbers | None,
    computed: tuple[Any, ...] | None,
    grows: bool,
) -> tuple[_core.Outcome, list[Any]]:
    """Traces a call, with the arguments of its flat function. `computed`: what the host has computed of the numbers."""
    plan, table = call.plan, call.caller._table
    # The trace before this one may have taken in more roots. Its equations then stand for the body, which must not run
    # a second time.
    finished = take_finished(table, call.recording, call.leaves)
    if finished is not None:
        return finished.outcome, finished.repeat(call.leaves)
    # A counter that this trace changes would make the next call trace again. So the trace begins anew with symbols,
    # unless it runs within another one, or must not run twice.
    if not (shapes or plan.options.check or running_traces()):
        call = call._replace(on_outcome=check_of_counters(call, outcomes, numbers))
    if numbers is not None:
        return numbers.run(
            table.reads,
            call.recording,
            call.leaves,
            computed,
            lambda values: trace_call(call._replace(leaves=values, has_symbols=True)),
        )
    if grows and not running_traces() and Growth.is_possible(plan, table):
        call = call._replace(growth=Growth(call, table, shapes))
    return trace_call(call)


def add_outcome(outcomes: list[_core.Outcome], outcome: _core.Outcome) -> int:
    """Adds an Outcome to those of an entry. Returns its number."""
    # Two threads may trace one entry at once, and each has to return the number of its own Outcome.
    with _OUTCOME_LOCK:
        outcomes.append(outcome)
        return len(outcomes) - 1


def encode(number: int) -> tuple[tuple[()] | None, ...]:
    """An Outcome's number as an array-free pytree of tuples and None; `_core.decode` reads it."""
    return tuple(() if bit == "1" else None for bit in reversed(f"{number:b}")) if number else ()


def definition_of(function: types.FunctionType, tupled: bool = False) -> types.FunctionType:
    """An empty function of leaves with the name, file and line of `function`, which JAX shows in its messages.

    It refers to no object of the user's. As in JAX, a wrapper counts as the function that it wraps.
    """

    def nothing(*leaves: object) -> None:
        del leaves

    def nothing_tupled(leaves: object) -> None:
        del leaves

    # JAX takes the file and the line of the innermost function, so a decorator does not hide them.
    with contextlib.suppress(ValueError):  # a cycle of __wrapped__
        inner = inspect.unwrap(function)
        function = inner if isinstance(inner, types.FunctionType) else function
    return in_place_of(function, nothing_tupled if tupled else nothing)


def in_place_of(function: types.FunctionType, stub: types.FunctionType) -> types.FunctionType:
    """A function with the code of `stub`, and the name, file and line of `function`."""
    code = function.__code__
    located_code = stub.__code__.replace(
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
        co_name=code.co_name,
        co_qualname=code.co_qualname,
    )
    return types.FunctionType(located_code, {}, code.co_name)
