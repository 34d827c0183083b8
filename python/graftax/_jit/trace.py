# SPDX-License-Identifier: Apache-2.0
"""One trace: runs the function on its objects rebuilt around tracers, and records the effects as an Outcome."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from graftax import _core
from graftax._base.errors import ConcurrentChangeError, GraftaxError, MutationError, rename_leaves
from graftax._base.given_warnings import count_warnings
from graftax._capture.caches_in_traces import clear_caches, keeping_cached, refuse_cached
from graftax._capture.caught_errors import tell_of_caught
from graftax._capture.constant_arrays import read_only
from graftax._capture.host_callbacks import codes as host_codes
from graftax._capture.host_callbacks import give_own, host_functions, rule_codes, warn_of_changes
from graftax._capture.leaked_classes import refuse_tracers_in_classes
from graftax._capture.leaked_tracers import ended_among, is_unexpected, refuse_ended, refuse_text
from graftax._capture.left_out_fields import refuse_left_out
from graftax._capture.locks import LOCKS, Locks
from graftax._capture.namespaces import Rebuilt
from graftax._capture.numpy_in_place import watching_numpy
from graftax._capture.retrace_signals import NewReads
from graftax._capture.signature import GlobalAssigned
from graftax._explain import compile_events, frozen
from graftax._graph.array_aliases import alias_groups, recording_aliases
from graftax._graph.types.ignored import refusing_uses
from graftax._graph.types.opaque_values import allow_new_objects
from graftax._jax.arrays import ref_types
from graftax._jax.error_notes import clarify
from graftax._jax.error_texts import asks_for_a_value, is_concretization_error, silence_callback_logging
from graftax._jax.inner_frames import inner_frames
from graftax._jax.nested_jit import caches_of, private_caches
from graftax._jax.traces import equations
from graftax._jit import program_store
from graftax._jit.call_plan import Layout, Plan
from graftax._jit.finite_check import FiniteCheck
from graftax._jit.jax_results import as_jax_returns
from graftax._jit.leaf_names import output_path
from graftax._jit.lost_sharing import warn_of_lost_sharing
from graftax._jit.number_policy import SymbolicNumbers
from graftax._jit.raised_objects import give_own_objects
from graftax._jit.repeated_parts import RepeatedParts
from graftax._jit.restarts import Restartable
from graftax._jit.running_trace import enter_trace, leave_trace, running_traces
from graftax._jit.symbolic_call import check_of_counters
from graftax._jit.trace_effects import refuse_trace_effects
from graftax._jit.trace_growth import Growth, TraceFinished, keep, take_finished
from graftax.interop import have_errors, raises_its_own

MUTATION_FORBIDDEN = (
    "{name} changed {paths}, and mutation='error' forbids that. Return the new value instead, or use "
    "mutation='propagate' (the caller's objects are changed, too) or 'discard'."
)
GLOBAL_ASSIGNED = (
    "{name} assigns the global {names}. A compiled call cannot repeat an assignment to a module's globals: keep the "
    "value in a list, a dict or an object and change that, or return it."
)
ATTRIBUTE_SET = (
    "{name} sets attributes of the jitted function itself. A compiled call cannot repeat that: keep the value in a "
    "list, a dict or an object that the function captures or is given."
)
CHANGED_OUTSIDE = (
    "{name} was traced, and meanwhile {path} was changed from outside the traced copy, most likely by a helper that "
    "reaches it through its own globals or closure. Pass it to the function as an argument. (Or a registered class "
    "flattens differently each time: to other aux data, another structure, or other numbers.)"
)

REF_KEPT = (
    "{name} leaves the jax.Ref that it was given at {path}. With in_shardings or out_shardings JAX would have to "
    "return the Ref, which it cannot do: leave it where it was."
)

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

    The arguments of the call are not parameters here: they come from the active call of this thread, so that the
    function, which JAX keeps, holds no object of the user's.

    Args:
        plan, layout: of the function and of its calls.
        donated: one flag a leaf.
        outcomes: of the entry. Each trace appends one.
        by_value: changes are not written back.
        shapes: nothing will run, and the roots may hold `jax.ShapeDtypeStruct` instead of arrays.
        numbers: symbolic ones. Two vectors that the host has computed then follow the leaves.
        grows: a trace takes in what it turns out to read, where it can. Otherwise it begins anew.
    """

    def flat(*leaves: object) -> Flat:
        active = _core.active_call(outcomes)
        if active is None:
            raise GraftaxError(f"{plan.name} was traced outside of a call")
        caller, roots, recording, computed = active
        recording = recording or plan.record(roots, layout, shapes, symbolic=numbers.places.keys() if numbers else ())
        store = None if shapes or numbers else program_store.current()
        if store is not None and store.add_program(caller, recording, outcomes):
            raise NewReads
        if caller._table.frozen and not shapes:
            frozen.refuse(caller._table, plan.name, recording)
        check = FiniteCheck(plan, recording, leaves) if plan.options.finite is not None and not shapes else None
        warnings_before = count_warnings()
        with Restartable(caller._table):
            # The trace before this one took in roots that JAX had not asked for: its equations stand for the body.
            finished = take_finished(caller._table, recording, leaves)
            if finished is not None:
                outcome, outputs = finished.outcome, finished.repeat(leaves)
            else:
                traced = _TracedCall(plan, caller, roots, recording, layout, leaves, donated, by_value)
                if not (shapes or plan.options.check or running_traces()):
                    traced = traced._replace(on_outcome=check_of_counters(plan, caller, recording, outcomes, numbers))
                if numbers is not None:
                    outcome, outputs = numbers.run(
                        caller._table.reads,
                        recording,
                        leaves,
                        computed,
                        lambda values: _trace(traced._replace(leaves=values, has_symbols=True)),
                    )
                else:
                    if grows and not running_traces() and Growth.is_possible(plan, caller._table):
                        growth = Growth(plan, caller._table, roots, recording, layout, leaves, donated, shapes)
                        traced = traced._replace(growth=growth)
                    outcome, outputs = _trace(traced)
        caller._table.has_warned |= count_warnings() != warnings_before
        number = add_outcome(outcomes, outcome)
        if not shapes:
            repeated = caller._table.repeated_parts.pop(id(outcome), [])
            changed = [] if numbers is None else numbers.family.take_changed()
            compile_events.record_trace(caller._table, plan.name, recording, outcomes, repeated, changed)
        # Symbolic numbers of the result are computed by the host: they are not outputs of the program.
        n = outcome.result_leaves - sum(leaf < outcome.result_leaves for leaf, _ in outcome.numbers)
        are_finite = () if check is None else check.result(outcome, outputs)
        return tuple(outputs[:n]), tuple(outputs[n:]), (*encode(number), *are_finite)

    flat.__name__ = flat.__qualname__ = plan.name
    flat.__wrapped__ = plan.definition  # type: ignore[attr-defined]
    return flat


class _TracedCall(NamedTuple):
    """What one trace runs, and on what.

    Attributes:
        leaves: what the objects of `recording` are rebuilt around.
        donated: one flag a leaf.
        by_value: changes are not written back.
        has_symbols: some numbers among the leaves are symbolic.
        growth: takes in what the trace turns out to read, if it can.
        on_outcome: is told of the Outcome of a trace that may be repeated, and raises NewReads where it has to be.
    """

    plan: Plan
    caller: _core.Caller
    roots: tuple[object, ...]
    recording: _core.Recording
    layout: Layout
    leaves: Sequence[object]
    donated: Sequence[bool]
    by_value: bool
    has_symbols: bool = False
    growth: Growth | None = None
    on_outcome: Callable[..., None] | None = None

    @property
    def recording_now(self) -> _core.Recording:
        """The recording with what the trace has taken in."""
        return self.growth.recording if self.growth else self.recording


def add_outcome(outcomes: list[_core.Outcome], outcome: _core.Outcome) -> int:
    """Adds an Outcome to those of an entry. Returns its number."""
    with _OUTCOME_LOCK:  # two threads may trace one entry at once
        outcomes.append(outcome)
        return len(outcomes) - 1


def _trace(call: _TracedCall) -> tuple[_core.Outcome, list[Any]]:
    """Runs the caller's function on its objects rebuilt around the leaves. Returns the Outcome and its output leaves.

    Raises:
        NewReads: the function reads a global or capture that is not a root yet. It is raised even if the function's
            own code has caught it.
        TraceFinished: it does, and has run to its end all the same. The next trace of the call repeats what it did.
    """
    cast("Any", call.caller)._begin_trace()
    reads, recording = call.caller._table.reads, call.recording
    if reads is not None and not call.plan.signature.has_roots_of(reads):
        raise NewReads  # a trace of this entry that failed found them; what it met is not heard of again
    locks = Locks(recording.instances(LOCKS))
    has_constants = call.plan.signature.numpy_is_constant or call.plan.options.static
    constants = recording.instances((np.ndarray,)) if has_constants else ()
    try:
        with read_only(constants), contextlib.nullcontext() if reads is None else reads.begun(locks):
            traced = _trace_once(call)
        _tell_of_locks(call, locks)
        return traced
    except TraceFinished as ending:
        _tell_of_locks(call, locks)
        keep(ending.args[0])
        raise
    except BaseException as error:
        if call.has_symbols or isinstance(error, NewReads):  # this trace will be repeated
            locks.give_back()
        raise


def _tell_of_locks(call: _TracedCall, locks: Locks) -> None:
    plan, table = call.plan, cast("Any", call.caller)._table
    if plan.options.warns_impure and (left := locks.left()):
        (table.reads or table.impure_calls_only).impure.tell_of_locks(plan.name, call.caller._function, left)


@keeping_cached
def _trace_once(traced: _TracedCall) -> tuple[_core.Outcome, list[Any]]:
    plan, caller, roots, recording, layout, leaves, donated, by_value, has_symbols, growth, on_outcome = traced
    signature, options = plan.signature, plan.options
    warnings_before = count_warnings()
    attributes = dict(vars(caller))  # what the code sets on its own jitted function is put back, and refused
    uses_up = options.mutation == "propagate"
    graph = growth.rebuilt if growth is not None else Rebuilt(has_symbols)
    equations_before, defaults = len(equations()), plan.defaults_among(roots, layout)
    # What the caller gave: of the other NumPy arrays, code may ask for values, which are constants then.
    given = {*range(signature.skip, signature.arguments(layout))} - defaults
    parts, may_repeat = None, False
    # Parts hold tracers until the trace ends: JAX would call that a leak.
    is_searched = options.repeated == "auto" and jax.config.jax_check_tracer_leaks
    if options.repeated and caller._table.reads is not None and not is_searched:
        parts = RepeatedParts(options.repeated, caller._table, graph, lambda: traced.recording_now, run_trace)

    def call(values: list[Any]) -> Any:
        nonlocal may_repeat
        reads, start, impure_calls = caller._table.reads, len(equations()), caller._table.impure_calls_only
        signals_before = 0 if reads is None else reads.signals.count
        if reads is not None:
            reads.builtins.now.symbolic = has_symbols
        call_arguments = caller._function, roots, values, layout, plan.name, uses_up, reads, graph
        if reads is None or reads.has_inner_jit or program_store.current() is None:
            caches = private_caches(reads is not None and reads.has_inner_jit)
        else:  # a program outlives the process: what functions read that JAX has traced before this has to be heard of
            caches = caches_of(reads.heard_since())

        def make_numpy_constant() -> bool:
            if caller._table.make_numpy_constant(traced.recording_now, given):
                return True
            current: Plan = cast("Any", caller)._plan
            return caller._table.make_defaults_constant(recording, current.defaults_among(roots, layout) - defaults)

        try:
            heard = (reads or impure_calls).impure.named(
                plan.name, not options.check, recording, options.warns_impure, on_outcome is not None
            )
            with caches, heard:
                # Without a read set nobody watches the frames yet: watch them for impure calls alone.
                if reads is not None or _core.is_watched() or not options.warns_impure:
                    result = signature.call(*call_arguments)
                    if reads is not None:
                        reads.impure.tell_of_copies(reads.cached.lost())
                        may_repeat = reads.impure.may_repeat()
                        graph.note_keys(reads.cached.in_keys())
                else:
                    run = functools.partial(signature.call, *call_arguments)
                    result = _core.run_watched(
                        run, impure_calls.enter, impure_calls.known, [], [], inner_frames(), quiet=True
                    )
        except Exception as error:
            graph.give_globals()
            if asks_for_a_value(error) and make_numpy_constant():
                raise NewReads from None
            raise
        hosts = host_codes(start) if reads is not None or graph.made else set[types.CodeType]()
        graph.give_globals(hosts | rule_codes(start) if graph.made else ())
        # An array was asked for its value, and the code caught the error: captured NumPy arrays have one.
        if graph.raised and make_numpy_constant():
            raise NewReads
        if reads is not None and (
            reads.signals.count != signals_before  # the code has caught NewReads: what it did to caches is undone
            or reads.see_hosts(caller._function, hosts)
            or not (growth.plan.signature if growth else signature).has_roots_of(reads)
        ):
            raise NewReads  # found in host callbacks of this trace, or meanwhile by a trace in another thread
        if options.warns_impure:
            tell_of_caught(plan.name, graph.raised)
        if uses_up and not by_value:
            refuse_left_out(plan.name, graph.left_out(), None if reads is None else reads.attributes.reads)
        if options.captured and restore_attributes(caller, attributes):
            raise MutationError(ATTRIBUTE_SET.format(name=plan.name))
        return as_jax_returns(result, growth.leaves if growth else leaves) if options.as_jax else result

    # A forwarded input would keep its sharding whatever the options say, and each output may request another one.
    share = options.out_shardings is None
    forward = share and options.in_shardings is None
    packages = (caller._table.reads or caller._table.impure_calls_only).impure.keeping_packages(
        plan.name, options.warns_impure and not options.check
    )
    with packages, recording_aliases(recording.leaves, leaves) as aliases:
        if growth is not None:
            growth.aliases = aliases
        outcome, outputs, changed, lost = run_trace(
            plan.name,
            recording,
            roots,
            leaves,
            call,
            options.mutation,
            by_value=by_value,
            forward=forward,
            share=share,
            donated=() if options.as_jax else donated,  # under `jax.jit` the caller's objects hold deleted arrays
            arrays=not options.captured,
            numbers=has_symbols,
            graph=graph,
            keeps=not options.captured,
            growth=growth,
        )
        if share:
            outcome.alike = alias_groups(aliases.sources(outputs))
    if parts is not None:
        caller._table.repeated_parts[id(outcome)] = parts.end()
    if aliases.alike:
        caller._table.alike[id(outcome)] = aliases.alike
    if growth is not None:
        plan, recording, leaves = growth.plan, growth.recording, growth.leaves
    if on_outcome is not None and may_repeat and count_warnings() == warnings_before:
        on_outcome(plan, layout, recording, outcome, outputs)
    if options.replaces:
        refuse_trace_effects(plan.name, recording, outcome, signature.arguments(layout), leaves, outputs)
    _note_trace(plan, caller, recording, graph, equations_before, outcome, leaves, outputs)
    if not (by_value or caller._table.warned_of_lost_sharing):
        caller._table.warned_of_lost_sharing = warn_of_lost_sharing(plan.name, recording, outcome, leaves, outputs)
    plan.on_trace(caller._table, changed if lost else [])
    if growth is not None and growth.is_used:
        raise TraceFinished(growth.finished(outcome, outputs))
    return outcome, outputs


def _note_trace(
    plan: Plan,
    caller: _core.Caller,
    recording: _core.Recording,
    graph: Rebuilt,
    equations_before: int,
    outcome: _core.Outcome,
    leaves: Sequence[object],
    outputs: list[Any],
) -> None:
    """Records what a trace that succeeded found, besides its Outcome, and replaces new Refs in `outputs`."""
    table = caller._table
    # The computation may raise a library's error, such as equinox.error_if: the call has to wait for the result, so
    # that the error is raised here and not at a later use.
    if have_errors() and any(map(raises_its_own, host_functions(equations_before, pure=True))):
        table.blocking_outcomes.add(id(outcome))
        silence_callback_logging()
    _read_new_refs(plan.name, recording, outcome, leaves, outputs)
    if plan.options.out_shardings is not None:
        outcome.ties = _ties(outcome, outputs)
    if graph.changes_in_place:
        table.numpy_leaves[id(outcome)] = [isinstance(leaf, (np.ndarray, np.generic)) for leaf in recording.leaves]
    # Most ids that code reads serve one walk of a graph. They matter later only if an argument or a result holds them.
    asked = graph.asked if recording.holds_ids or outcome.holds_ids else {}
    if asked or graph.in_keys:
        table.requested_ids[id(outcome)] = asked | graph.in_keys


def _see_to_hosts(
    name: str,
    graph: Rebuilt | None,
    recording: _core.Recording,
    outcome: _core.Outcome,
    trace: tuple[tuple[Any, ...], list[Any]],
    start: int,
) -> None:
    """Host functions outlive the trace: their captures become the caller's objects again. A warning names those that
    seem to change what the trace reads."""
    roots = set[tuple[int, str | None]]()
    if graph is not None and (graph.cells or graph.scopes):
        written = {recording.graphdef._node_place(track)[0] for track in outcome.inputs()[2]}  # pyright: ignore[reportPrivateUsage]
        give_own(start, graph, written)
        roots = graph.views.root_keys() if graph.views is not None else roots
    warn_of_changes(name, [*_core.running_traces(), trace], start, roots)


@keeping_cached
def run_trace(
    name: str,
    recording: _core.Recording,
    roots: tuple[object, ...],
    leaves: Sequence[object],
    call: Callable[[list[Any]], object],
    mutation: str,
    *,
    by_value: bool,
    forward: bool,
    share: bool = False,
    donated: Sequence[bool] = (),
    arrays: bool = False,
    numbers: bool = False,
    graph: Rebuilt | None = None,
    keeps: bool = False,
    growth: Growth | None = None,
) -> tuple[_core.Outcome, list[Any], list[str], bool]:
    """Runs `call` on the recorded roots, rebuilt around `leaves`. The caller's objects stay as they are in any case.

    Args:
        mutation: the option of `jit`: "error" raises for a change.
        by_value, forward, share, donated: how `Trace.finish` builds the Outcome.
        arrays: NumPy arrays that `call` makes are output leaves, not constants; with `numbers` symbols are, too.
        graph: learns which trace `call` runs in.
        keeps: as in Equinox. An `object()` that `call` makes is one object as long as the trace is used, a NumPy leaf
            of the result is a `jax.Array`, and a function in the result owns its captures.
        growth: gives the trace more roots while it runs.

    Returns:
        (the Outcome, its output leaves, the paths of changes, whether the Outcome drops these changes).
    """
    tracing, within = _core.Trace(recording), context_of(recording)
    running = enter_trace(tracing, recording, roots, leaves)
    if growth is not None:
        growth.running = running
    try:
        values = within(tracing.rebuild, leaves)
        if graph is not None:
            graph.begin(tracing)
        start = len(equations())
        try:
            with refusing_uses(), watching_numpy(name, tracing.leaf_names, recording.leaves, leaves) as running.numpy:
                result = within(_core.run_rebuilt, call, values)
                running.numpy.end(values, recording.names, result)
                if graph is not None:
                    graph.changes_in_place = running.numpy.has_changes
                elif mutation == "propagate":  # a transform, which hears of no reads: what is only set goes back
                    refuse_left_out(name, tracing.left_out(), lambda field: False)
            for changes in running.copies:
                text = changes()
                if text:
                    raise MutationError(text)
            with allow_new_objects(keeps):
                finish_options = by_value, forward, donated, arrays, numbers, share, not keeps
                outcome, outputs, changed, lost = within(tracing.finish, result, *finish_options)
            path = functools.partial(output_path, running.recording or recording, outcome.inputs()[2])
            refuse_ended(name, outcome, outputs, path, running.inner)
            refuse_tracers_in_classes(name, outcome)
            refuse_text(name, running.recording or recording, outcome, path)
            refuse_cached(name)
            _see_to_hosts(name, graph, running.recording or recording, outcome, (roots, values), start)
        except (jax.errors.JAXTypeError, TypeError, ValueError, IndexError) as error:
            give_own_objects(error, tracing.original)
            if is_unexpected(error):  # an ended transform left a tracer in the arguments
                leak_error = ended_among(name, values, recording.names)
                if leak_error is not None:
                    raise leak_error from error
            if is_concretization_error(error):
                rename_leaves(error, tracing.leaf_names())
            clarify(error, running.leaves, tracing.leaf_names)
            raise
        except GlobalAssigned as error:
            assigned = ", ".join(error.args[0])
            raise MutationError(GLOBAL_ASSIGNED.format(name=name, names=assigned)) from None
        except Exception as error:
            give_own_objects(error, tracing.original)
            clarify(error, running.leaves, tracing.leaf_names)
            raise
        finally:
            # Nodes that were handed over as themselves were changed in place: undo that, on success as well.
            tracing.restore()
        if mutation == "error" and changed:
            raise MutationError(MUTATION_FORBIDDEN.format(name=name, paths=", ".join(changed)))
        # Now the caller's objects have to be as recorded. If not, a helper reached them by a path that is not a root.
        with jax.ensure_compile_time_eval():
            is_unchanged = tracing.verify(running.roots)
        if not is_unchanged:
            raise ConcurrentChangeError(
                CHANGED_OUTSIDE.format(name=name, path="one of its arguments or captured objects")
            )
        return outcome, outputs, changed, lost
    finally:
        clear_caches()
        leave_trace(running)
        if graph is not None:
            graph.end()
        tracing.close()


def context_of(recording: _core.Recording) -> Callable[..., Any]:
    """Calls a function in a context of the trace: there its context variables are set, and the caller's stay."""
    if contextvars.ContextVar in recording.named:
        return contextvars.copy_context().run
    return _call


def _call(function: Callable[..., object], *args: object) -> Any:
    return function(*args)


def _read_new_refs(
    name: str, recording: _core.Recording, outcome: _core.Outcome, leaves: Sequence[object], outputs: list[Any]
) -> None:
    """Replaces each new `jax.Ref` in the outputs by its content: each call makes a new Ref of it.

    JAX cannot return a Ref from a compiled function.
    """
    one_of_each = {(type(leaf), type(getattr(leaf, "aval", None))): leaf for leaf in outputs}  # outputs are many
    if not any(isinstance(leaf, ref_types) for leaf in one_of_each.values()):
        return
    first_output: dict[int, int] = {}
    refs: list[tuple[int, int]] = []
    for i, leaf in enumerate(outputs):
        if isinstance(leaf, ref_types):
            if any(leaf is argument for argument in leaves):
                raise ValueError(REF_KEPT.format(name=name, path=_path_of_output(recording, outcome, i)))
            refs.append((i, first_output.setdefault(id(leaf), i)))
    if refs:
        outcome.refs = refs
        for i, _ in refs:
            outputs[i] = outputs[i][...]


def _ties(outcome: _core.Outcome, outputs: Sequence[object]) -> list[tuple[int, int]]:
    """(output leaf, the first output leaf that is the same array), for each repetition."""
    first_output: dict[int, int] = {}
    numbers = {leaf for leaf, _ in outcome.numbers}
    arrays = [i for i, leaf in enumerate(outputs) if isinstance(leaf, jax.Array) and i not in numbers]
    return [(i, first_output[id(outputs[i])]) for i in arrays if first_output.setdefault(id(outputs[i]), i) != i]


def _path_of_output(recording: _core.Recording, outcome: _core.Outcome, leaf: int) -> str:
    return output_path(recording, outcome.inputs()[2], outcome.leaf_places()[leaf])


def restore_attributes(caller: _core.Caller, attributes: dict[str, Any]) -> bool:
    """Resets the attributes of a jitted function to those before its trace. Did the function change them?

    `_plan` is excepted: a call in another thread may have replaced it.
    """
    current = vars(caller)
    if current.keys() == attributes.keys() and all(current[k] is v for k, v in attributes.items() if k != "_plan"):
        return False
    attributes = {k: current[k] if k == "_plan" and k in current else v for k, v in attributes.items()}
    current.clear()
    current.update(attributes)
    return True


def definition_of(function: types.FunctionType, tupled: bool = False) -> types.FunctionType:
    """An empty function of leaves with the name, file and line of `function`, which JAX shows in its messages.

    It refers to no object of the user's. As in JAX, a wrapper counts as the function that it wraps.
    """

    def nothing(*leaves: object) -> None:
        del leaves

    def nothing_tupled(leaves: object) -> None:
        del leaves

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


def encode(number: int) -> tuple[Any, ...]:
    """An Outcome's number as an array-free pytree of tuples and None; `_core.decode` reads it."""
    return tuple(() if bit == "1" else None for bit in reversed(f"{number:b}")) if number else ()
