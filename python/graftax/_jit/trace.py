# SPDX-License-Identifier: Apache-2.0
"""One trace: runs the function on its objects rebuilt around tracers, and records the effects as an Outcome.

`trace_call` traces the function of a call. `run_trace` is what it has in common with transforms and repeated parts: it
rebuilds the objects, runs a function on them, and compares them with what was built.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np

from graftax import _core
from graftax._base.errors import ConcurrentChangeError, MutationError, rename_leaves
from graftax._base.given_warnings import count_warnings
from graftax._capture.caches_after_traces import clear_caches, keeping_cached, refuse_cached
from graftax._capture.caught_errors import tell_of_caught
from graftax._capture.host_callbacks import codes as host_codes
from graftax._capture.host_callbacks import give_own, host_functions, rule_codes, warn_of_changes
from graftax._capture.leaked_classes import refuse_tracers_in_classes
from graftax._capture.leaked_tracers import ended_among, is_unexpected, refuse_ended, refuse_text
from graftax._capture.left_out_fields import refuse_left_out
from graftax._capture.locks import LOCKS, Locks
from graftax._capture.namespaces import Rebuilt
from graftax._capture.numpy_in_place import read_only, watching_numpy
from graftax._capture.read_set import ReadSet
from graftax._capture.retrace_signals import NewReads
from graftax._capture.signature import GlobalAssigned
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
from graftax._jit.cache import Findings
from graftax._jit.call_plan import Plan, TracedCall
from graftax._jit.jax_results import as_jax_returns
from graftax._jit.leaf_names import output_path
from graftax._jit.lost_sharing import warn_of_lost_sharing
from graftax._jit.raised_objects import give_own_objects
from graftax._jit.repeated_parts import RepeatedParts
from graftax._jit.running_trace import RunningTrace
from graftax._jit.trace_effects import refuse_trace_effects
from graftax._jit.trace_growth import Growth, TraceFinished, keep
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


def trace_call(call: TracedCall) -> tuple[_core.Outcome, list[Any]]:
    """Runs the caller's function on its objects rebuilt around the leaves. Returns the Outcome and its output leaves.

    Raises:
        NewReads: the function reads a global or capture that is not a root yet. It is raised even if the function's
            own code has caught it.
        TraceFinished: the same, but the trace has taken in these roots and run to its end. The next trace of the call
            repeats what it did.
    """
    cast("Any", call.caller)._begin_trace()
    reads, recording = call.caller._table.reads, call.recording
    if reads is not None and not call.plan.signature.has_roots_of(reads):
        raise NewReads  # a trace of this entry that failed found more roots; it does not report again what it met
    locks = Locks(recording.instances(LOCKS))
    # The body runs only here, so a write to an array that is a constant of the program would happen once.
    has_constants = call.plan.signature.numpy_is_constant or call.plan.options.static
    constants = recording.instances((np.ndarray,)) if has_constants else ()
    try:
        if reads is not None and call.plan.options.captured and recording.holds_own_ids:
            reads.builtins.give_ids_to_packages()
        with read_only(constants), contextlib.nullcontext() if reads is None else reads.begun(locks):
            traced = _trace_once(call)
        _tell_of_locks(call, locks)
        return traced
    except TraceFinished as ending:
        _tell_of_locks(call, locks)
        keep(ending.args[0])
        raise
    except BaseException as error:
        # The trace will be repeated, and would wait for ever for a lock that this one holds.
        if call.has_symbols or isinstance(error, NewReads):
            locks.give_back()
        raise


def _tell_of_locks(call: TracedCall, locks: Locks) -> None:
    plan, table = call.plan, cast("Any", call.caller)._table
    if plan.options.warns_impure and (changed_locks := locks.changed()):
        (table.reads or table.impure_calls_only).impure.tell_of_locks(plan.name, call.caller._function, changed_locks)


@keeping_cached
def _trace_once(call: TracedCall) -> tuple[_core.Outcome, list[Any]]:
    table, options, growth = call.caller._table, call.plan.options, call.growth
    # A trace that has warned is not repeated, since the user would read the warning twice.
    warnings_before, equations_before = count_warnings(), len(equations())
    graph = growth.rebuilt if growth is not None else Rebuilt(call.has_symbols)
    parts = _repeated_parts(call, graph)
    body = _Body(call, graph)
    # A forwarded input would keep its sharding whatever the options say, and each output may request another one.
    share = options.out_shardings is None
    forward = share and options.in_shardings is None
    impure = (table.reads or table.impure_calls_only).impure
    packages = impure.keeping_packages(call.plan.name, options.warns_impure)
    # It ends after the trace: only when the objects are put back does it see what else was changed, in packages.
    with packages, recording_aliases(call.recording.leaves, call.leaves) as aliases:
        if growth is not None:
            growth.aliases = aliases
        outcome, outputs, changed, lost = run_trace(
            call.plan.name,
            call.recording,
            call.roots,
            call.leaves,
            body.run,
            options.mutation,
            by_value=call.by_value,
            forward=forward,
            share=share,
            donated=() if options.as_jax else call.donated,  # under `jax.jit` the caller's objects hold deleted arrays
            arrays=not options.captured,
            numbers=call.has_symbols,
            graph=graph,
            keeps=not options.captured,
            growth=growth,
        )
        # Code of a package has kept the id of a copy, as an optimizer does that is built in the trace.
        builtins = table.reads.builtins if table.reads is not None and options.captured else None
        if builtins is not None and graph.leaves_ids and builtins.give_ids_to_packages():
            raise NewReads
        if share:
            outcome.alike = alias_groups(aliases.sources(outputs))
    table.findings[outcome] = Findings(aliases.alike, parts.end() if parts is not None else [])
    call = call.grown()
    # Raises NewReads if a counter has changed. So it comes before anything is noted or warned of, as that would happen
    # twice; a trace that has warned already is not repeated.
    if call.on_outcome is not None and body.may_repeat and count_warnings() == warnings_before:
        call.on_outcome(call, outcome, outputs)
    if options.replaces:
        refuse_trace_effects(call, outcome, outputs)
    _note_trace(call, graph, equations_before, outcome, outputs)
    if not (call.by_value or table.warned_of_lost_sharing):
        table.warned_of_lost_sharing = warn_of_lost_sharing(call, outcome, outputs)
    call.plan.on_trace(table, changed if lost else [])
    if growth is not None and growth.is_used:
        raise TraceFinished(growth.finished(outcome, outputs))
    return outcome, outputs


def _repeated_parts(call: TracedCall, graph: Rebuilt) -> RepeatedParts | None:
    """What answers calls that repeat within the trace; None if the options, or JAX's, forbid that."""
    options, table = call.plan.options, call.caller._table
    # Parts hold tracers until the trace ends: JAX would call that a leak.
    is_leak_checked = options.repeated == "auto" and jax.config.jax_check_tracer_leaks
    if not options.repeated or table.reads is None or is_leak_checked:
        return None
    return RepeatedParts(options.repeated, table, graph, lambda: call.grown().recording, run_trace)


class _Body:
    """The run of the user's function in one trace, and what has to hold when it returns."""

    def __init__(self, call: TracedCall, graph: Rebuilt) -> None:
        self.may_repeat = False  # may what the function did be done again?
        self._call, self._graph = call, graph
        # Code may set attributes of its own jitted function, which is not part of the graph.
        self._attributes = dict(vars(call.caller))
        self._defaults = call.plan.defaults_among(call.roots, call.layout)

    def run(self, values: list[Any]) -> Any:
        """Calls the function with these rebuilt roots. Raises NewReads if the trace has to be repeated."""
        call, graph, options = self._call, self._graph, self._call.plan.options
        reads, equations_before = call.caller._table.reads, len(equations())
        signals_before = 0 if reads is None else reads.signals.count
        try:
            result = self._run_observed(values, reads)
        except Exception as error:
            graph.give_globals()
            # The code may have caught the error about a tracer, and raised another one for it.
            if (asks_for_a_value(error) or graph.raised) and self._make_numpy_constant():
                raise NewReads from None
            raise
        # Functions that the trace has made, and that outlive it, get their own globals back. Those that JAX runs later
        # are left to `_see_to_hosts`, which also gives them the caller's captures.
        hosts = host_codes(equations_before) if reads is not None or graph.made_functions else set[types.CodeType]()
        graph.give_globals(hosts | rule_codes(equations_before) if graph.made_functions else ())
        # An array was asked for its value, and the code caught the error: captured NumPy arrays have one.
        if graph.raised and self._make_numpy_constant():
            raise NewReads
        if reads is not None and self._has_stale_roots(reads, hosts, signals_before):
            raise NewReads
        if options.warns_impure:
            tell_of_caught(call.plan.name, graph.raised)
        if options.mutation == "propagate" and not call.by_value:
            read_attributes = None if reads is None else reads.attributes.reads
            refuse_left_out(call.plan.name, graph.left_out(), read_attributes)
        if options.captured and restore_attributes(call.caller, self._attributes):
            raise MutationError(ATTRIBUTE_SET.format(name=call.plan.name))
        return as_jax_returns(result, call.grown().leaves) if options.as_jax else result

    def _run_observed(self, values: list[Any], reads: ReadSet | None) -> Any:
        """Calls the function while its frames, and the calls that a program cannot repeat, are observed."""
        call, options, graph = self._call, self._call.plan.options, self._graph
        caller, name, uses_up = call.caller, call.plan.name, options.mutation == "propagate"
        impure_calls = caller._table.impure_calls_only
        call_arguments = caller._function, call.roots, values, call.layout, name, uses_up, reads, graph
        if reads is not None:
            reads.builtins.thread.symbolic = call.has_symbols
        if reads is None or reads.has_inner_jit or program_store.current() is None:
            caches = private_caches(reads is not None and reads.has_inner_jit)
        else:  # a program outlives the process: what functions read that JAX has traced before this has to be heard of
            caches = caches_of(reads.heard_since())
        with (
            caches,
            (reads or impure_calls).impure.named(
                name, not options.check, call.recording, options.warns_impure, call.on_outcome is not None
            ),
        ):
            # Without a read set nobody watches the frames yet: watch them for impure calls alone.
            if reads is None and not _core.is_watched() and options.warns_impure:
                run = functools.partial(call.plan.signature.call, *call_arguments)
                return _core.run_watched(
                    run, impure_calls.enter, impure_calls.known, [], [], inner_frames(), quiet=True
                )
            result = call.plan.signature.call(*call_arguments)
            if reads is not None:
                reads.impure.tell_of_copies(reads.cached.lost())
                self.may_repeat = reads.impure.may_repeat()
                graph.note_keys(reads.cached.in_keys())
            return result

    def _make_numpy_constant(self) -> bool:
        """Makes NumPy arrays that the caller did not pass constants of the program. False if there are none left."""
        # Code may ask these for values, as those of a captured table. The arguments of a call change, so they are
        # traced.
        call, defaults = self._call, self._defaults
        table, signature = call.caller._table, call.plan.signature
        passed = {*range(signature.skip, signature.arguments(call.layout))} - defaults
        if table.make_numpy_constant(call.grown().recording, passed):
            return True
        # The entry was made for a call that passed an array where this one has the default.
        current: Plan = cast("Any", call.caller)._plan
        defaults_now = current.defaults_among(call.roots, call.layout)
        return table.make_defaults_constant(call.recording, defaults_now - defaults)

    def _has_stale_roots(self, reads: ReadSet, hosts: set[types.CodeType], signals_before: int) -> bool:
        """Does the trace lack roots that its code turned out to read?"""
        growth, signature = self._call.growth, self._call.plan.signature
        return (
            reads.signals.count != signals_before  # the code has caught NewReads: what it did to caches is undone
            or reads.see_hosts(self._call.caller._function, hosts)
            # Found in host callbacks of this trace, or meanwhile by a trace in another thread.
            or not (growth.plan.signature if growth else signature).has_roots_of(reads)
        )


def _note_trace(
    call: TracedCall, graph: Rebuilt, equations_before: int, outcome: _core.Outcome, outputs: list[Any]
) -> None:
    """Records what a trace that succeeded found, besides its Outcome, and replaces new Refs in `outputs`."""
    findings, recording = call.caller._table.findings[outcome], call.recording
    # The computation may raise a library's error, such as equinox.error_if: the call has to wait for the result, so
    # that the error is raised here and not at a later use.
    if have_errors() and any(map(raises_its_own, host_functions(equations_before, pure=True))):
        findings.is_blocking = True
        silence_callback_logging()
    _read_new_refs(call, outcome, outputs)
    if call.plan.options.out_shardings is not None:
        outcome.ties = _ties(outcome, outputs)
    # `x += 1` changes a NumPy array, and makes a new JAX array. So the entry will not serve a call that has a NumPy
    # array where this call has none (`LeafGuards`).
    if graph.changes_in_place:
        findings.numpy_leaves = [isinstance(leaf, (np.ndarray, np.generic)) for leaf in recording.leaves]
    # Most ids that code reads serve one walk of a graph. They matter later only if an argument or a result holds them.
    requested_ids = graph.requested_ids if recording.holds_ids or outcome.holds_ids else {}
    findings.requested_ids = requested_ids | graph.in_keys


def _see_to_hosts(
    name: str,
    graph: Rebuilt | None,
    recording: _core.Recording,
    outcome: _core.Outcome,
    trace: tuple[tuple[Any, ...], list[Any]],
    start: int,
) -> None:
    """Gives host functions the caller's objects as captures again. Warns of those that change what the trace reads."""
    # They outlive the trace, and run in each call.
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
        graph, growth: learn which trace `call` runs in. `growth` gives it more roots meanwhile.
        keeps: as in Equinox. An `object()` that `call` makes is one object as long as the trace is used, a NumPy leaf
            of the result is a `jax.Array`, and a function in the result owns its captures.

    Returns:
        (the Outcome, its output leaves, the paths of changes, whether the Outcome drops these changes).
    """
    tracing, in_context = _core.Trace(recording), context_of(recording)
    running = RunningTrace(tracing, recording, roots, leaves)
    if growth is not None:
        growth.running = running
    try:
        values = in_context(tracing.rebuild, leaves)
        if graph is not None:
            graph.begin(tracing)
        equations_before = len(equations())
        try:
            result = _run_rebuilt(name, call, in_context, values, recording, running, graph, mutation)
            # Compare the objects with what was built: that is the Outcome.
            with allow_new_objects(keeps):
                finish_options = by_value, forward, donated, arrays, numbers, share, not keeps
                outcome, outputs, changed, lost = in_context(tracing.finish, result, *finish_options)
            if graph is not None:
                graph.leaves_ids = tracing.leaves_ids_of_copies(outcome)
            _refuse_kept_tracers(name, running.recording or recording, outcome, outputs, running)
            _see_to_hosts(name, graph, running.recording or recording, outcome, (roots, values), equations_before)
        except Exception as error:
            _explain_error(error, name, tracing, running, values, recording.names)
            raise
        finally:
            # Nodes that were handed over as themselves were changed in place: undo that, on success as well.
            tracing.restore()
        if mutation == "error" and changed:
            raise MutationError(MUTATION_FORBIDDEN.format(name=name, paths=", ".join(changed)))
        _verify(name, tracing, running.roots)
        return outcome, outputs, changed, lost
    finally:
        _end(tracing, running, graph)


def _end(tracing: _core.Trace, running: RunningTrace, graph: Rebuilt | None) -> None:
    clear_caches()
    running.end()
    if graph is not None:
        graph.end()
    tracing.close()


def _verify(name: str, tracing: _core.Trace, roots: tuple[object, ...]) -> None:
    """Raises if the caller's objects are not as recorded: a helper reached them by a path that is not a root."""
    # Below a registered class values are compared, and its flatten may compute. Neither belongs to the program.
    with jax.ensure_compile_time_eval():
        is_unchanged = tracing.verify(roots)
    if not is_unchanged:
        path = "one of its arguments or captured objects"
        raise ConcurrentChangeError(CHANGED_OUTSIDE.format(name=name, path=path))


def _run_rebuilt(
    name: str,
    call: Callable[[list[Any]], object],
    in_context: Callable[..., Any],
    values: list[Any],
    recording: _core.Recording,
    running: RunningTrace,
    graph: Rebuilt | None,
    mutation: str,
) -> object:
    """Runs `call`, and refuses what the function must not do to the rebuilt objects in `values`."""
    tracing = running.trace
    assert tracing is not None
    with refusing_uses(), watching_numpy(name, tracing.leaf_names, recording.leaves, running.leaves) as running.numpy:
        try:
            result = in_context(_core.run_rebuilt, call, values)
        except GlobalAssigned as error:
            assigned = ", ".join(error.args[0])
            raise MutationError(GLOBAL_ASSIGNED.format(name=name, names=assigned)) from None
        running.numpy.end(values, recording.names, result)
        if graph is not None:
            graph.changes_in_place = running.numpy.has_changes
        elif mutation == "propagate":  # a transform, which hears of no reads: what is only set goes back
            refuse_left_out(name, tracing.left_out(), lambda field: False)
    # A transform within this trace made copies, which it does not write back.
    for changes in running.copies:
        if text := changes():
            raise MutationError(text)
    return result


def _refuse_kept_tracers(
    name: str, recording: _core.Recording, outcome: _core.Outcome, outputs: list[Any], running: RunningTrace
) -> None:
    """Raises if a tracer would outlive the trace: in the Outcome, in a class, in a text, in a cache."""
    path = functools.partial(output_path, recording, outcome.inputs()[2])
    refuse_ended(name, outcome, outputs, path, running.inner)
    refuse_tracers_in_classes(name, outcome)
    refuse_text(name, recording, outcome, path)
    refuse_cached(name)


def _explain_error(
    error: Exception,
    name: str,
    tracing: _core.Trace,
    running: RunningTrace,
    values: list[Any],
    names: tuple[str, ...],
) -> None:
    """Puts the caller's objects and key paths into an error, in place of copies and of JAX's names of arguments."""
    give_own_objects(error, tracing.original)
    # An ended transform left a tracer in the arguments: JAX's error does not say where.
    if is_unexpected(error) and (leak_error := ended_among(name, values, names)) is not None:
        raise leak_error from error
    # JAX's errors are of these classes. The text of any other one is made by the user's code.
    if isinstance(error, TypeError | ValueError | IndexError) and is_concretization_error(error):
        rename_leaves(error, tracing.leaf_names())
    clarify(error, running.leaves, tracing.leaf_names)


def context_of(recording: _core.Recording) -> Callable[..., Any]:
    """`run(function, *args)` in a context of the trace: what it sets in context variables does not reach the caller."""
    if contextvars.ContextVar in recording.named:
        return contextvars.copy_context().run
    return _call


def _call(function: Callable[..., object], *args: object) -> Any:
    return function(*args)


def _read_new_refs(call: TracedCall, outcome: _core.Outcome, outputs: list[Any]) -> None:
    """Replaces each new `jax.Ref` in the outputs by its content: each call makes a new Ref of it."""
    # JAX cannot return a Ref from a compiled function.
    one_of_each = {(type(leaf), type(getattr(leaf, "aval", None))): leaf for leaf in outputs}  # outputs are many
    if not any(isinstance(leaf, ref_types) for leaf in one_of_each.values()):
        return
    first_output: dict[int, int] = {}
    refs: list[tuple[int, int]] = []
    for i, leaf in enumerate(outputs):
        if isinstance(leaf, ref_types):
            if any(leaf is argument for argument in call.leaves):
                path = output_path(call.recording, outcome.inputs()[2], outcome.leaf_places()[i])
                raise ValueError(REF_KEPT.format(name=call.plan.name, path=path))
            refs.append((i, first_output.setdefault(id(leaf), i)))
    outcome.refs = refs
    for i, _ in refs:
        outputs[i] = outputs[i][...]


def _ties(outcome: _core.Outcome, outputs: Sequence[object]) -> list[tuple[int, int]]:
    """(output leaf, the first output leaf that is the same array), for each repetition."""
    first_output: dict[int, int] = {}
    numbers = {leaf for leaf, _ in outcome.numbers}
    arrays = [i for i, leaf in enumerate(outputs) if isinstance(leaf, jax.Array) and i not in numbers]
    return [(i, first_output[id(outputs[i])]) for i in arrays if first_output.setdefault(id(outputs[i]), i) != i]


def restore_attributes(caller: _core.Caller, attributes: dict[str, Any]) -> bool:
    """Resets the attributes of a jitted function to those before its trace. Did the function change them?"""
    # `_plan` is excepted: a call in another thread may have replaced it.
    current = vars(caller)
    if current.keys() == attributes.keys() and all(current[k] is v for k, v in attributes.items() if k != "_plan"):
        return False
    attributes = {k: current[k] if k == "_plan" and k in current else v for k, v in attributes.items()}
    current.clear()
    current.update(attributes)
    return True
