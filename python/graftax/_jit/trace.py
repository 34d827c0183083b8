# SPDX-License-Identifier: Apache-2.0
"""One trace: the function runs on the graph rebuilt around tracers, and what it did becomes an Outcome."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from graftax import _core
from graftax._base.errors import ConcurrentChangeError, GraftaxError, MutationError, rename_leaves
from graftax._capture.caught_errors import tell_of_caught
from graftax._capture.constant_arrays import read_only
from graftax._capture.host_callbacks import codes as host_codes
from graftax._capture.host_callbacks import give_own, host_functions, warn_of_copies
from graftax._capture.leaked_classes import refuse_tracers_in_classes
from graftax._capture.leaked_tracers import ended_among, is_unexpected, refuse_ended
from graftax._capture.locks import LOCKS, Locks
from graftax._capture.namespaces import Rebuilt
from graftax._capture.retrace_signals import NewReads
from graftax._capture.signature import GlobalAssigned
from graftax._capture.user_caches import clear_caches, keeping_cached, refuse_cached
from graftax._explain import compile_events, frozen
from graftax._graph.array_aliases import groups, noting
from graftax._graph.types.opaque_values import keeping_made
from graftax._jax.compat import (
    current_trace,
    equations,
    hush_failed_callbacks,
    inner_frames,
    is_of_a_traced_value,
    ref_types,
)
from graftax._jax.nested_jit import own_caches
from graftax._jax.tracebacks import name_operands
from graftax._jit.call_plan import Layout, Plan
from graftax._jit.lost_sharing import output_path, tell_untied
from graftax._jit.number_policy import SymbolicNumbers
from graftax.interop import have_errors, raises_its_own

MUTATION_FORBIDDEN = (
    "{name} changed {paths}, and mutation='error' forbids that. Return the new value instead, or use "
    "mutation='propagate' (the change comes back to the caller) or 'discard'."
)
GLOBAL_ASSIGNED = (
    "{name} assigns the global {names}. A compiled call cannot repeat an assignment to a module's globals: keep the "
    "value in a list, a dict or an object and change that, or return it."
)
ATTRIBUTE_SET = (
    "{name} sets attributes of the jitted function itself. A compiled call cannot repeat that: keep the value in a "
    "list, a dict or an object that the function captures or is given."
)
CHANGED_BEHIND = (
    "{name} was traced, and meanwhile {path} was changed from outside the traced copy, most likely by a helper that "
    "reaches it through its own globals or closure. Pass it to the function as an argument. (Or a registered class "
    "flattens to something else each time it is asked: other aux data, another structure, or other numbers.)"
)

GIVEN_REF = (
    "{name} leaves the jax.Ref that it was given at {path}. Under in_shardings or out_shardings JAX would have to give "
    "it out anew, which it cannot: leave it where it was."
)

_NUMBERING = threading.Lock()
_INNER = threading.local()  # .traces: the Running of each trace that runs, the outermost first

Flat = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]


def flat_function(
    plan: Plan,
    layout: Layout,
    donated: Sequence[bool],
    outcomes: list[_core.Outcome],
    by_value: bool,
    shapes: bool = False,
    numbers: SymbolicNumbers | None = None,
) -> Callable[..., Flat]:
    """The function that JAX sees: arrays to (result leaves, write-back leaves, number of the Outcome).

    With `shapes` nothing will run, and the roots may hold `jax.ShapeDtypeStruct` in place of arrays. With `numbers` two
    vectors of what the host has computed come after the leaves.
    """

    def flat(*leaves: Any) -> Flat:
        active = _core.active_call(outcomes)
        if active is None:
            raise GraftaxError(f"{plan.name} was traced outside of a call")
        caller, roots, recording, computed = active
        recording = recording or plan.record(roots, layout, shapes, symbolic=numbers.places.keys() if numbers else ())
        if caller._table.frozen and not shapes:
            frozen.refuse(caller._table, plan.name, recording)
        if numbers is None:
            outcome, out = trace(plan, caller, roots, recording, layout, leaves, donated, by_value)
        else:
            around = (plan, caller, roots, recording, layout)
            outcome, out = numbers.run(
                caller._table.reads,
                recording,
                leaves,
                computed,
                lambda given: trace(*around, given, donated, by_value, True),
            )
        with _NUMBERING:  # two threads may trace one entry at once
            number = len(outcomes)
            outcomes.append(outcome)
        if not shapes:
            compile_events.traced(caller._table, plan.name, recording, outcomes)
        n = outcome.result_leaves - sum(leaf < outcome.result_leaves for leaf, _ in outcome.numbers)
        return tuple(out[:n]), tuple(out[n:]), encode(number)

    flat.__name__ = flat.__qualname__ = plan.name
    flat.__wrapped__ = plan.definition  # type: ignore[attr-defined]
    return flat


def trace(
    plan: Plan,
    caller: _core.Caller,
    roots: tuple[Any, ...],
    recording: _core.Recording,
    layout: Layout,
    leaves: Sequence[Any],
    donated: Sequence[bool],
    by_value: bool,
    numbers: bool = False,
) -> tuple[_core.Outcome, list[Any]]:
    """Runs the caller's function on the graph rebuilt around `leaves`. Returns the Outcome and its output leaves.

    Raises:
        NewReads: where it was told to begin anew, whatever its code has done with that.
    """
    reads = caller._table.reads
    locks = Locks(recording.instances(LOCKS))
    has_constants = plan.signature.numpy_is_constant or plan.options.static
    constants = recording.instances((np.ndarray,)) if has_constants else ()
    try:
        with read_only(constants), contextlib.nullcontext() if reads is None else reads.begun(locks):
            return _trace_once(plan, caller, roots, recording, layout, leaves, donated, by_value, numbers)
    except BaseException as error:
        if numbers or isinstance(error, NewReads):  # it begins anew
            locks.give_back()
        raise


def _trace_once(
    plan: Plan,
    caller: _core.Caller,
    roots: tuple[Any, ...],
    recording: _core.Recording,
    layout: Layout,
    leaves: Sequence[Any],
    donated: Sequence[bool],
    by_value: bool,
    numbers: bool,
) -> tuple[_core.Outcome, list[Any]]:
    signature, options = plan.signature, plan.options
    attributes = dict(vars(caller))
    uses_up = options.mutation == "propagate"
    graph, before, arguments = Rebuilt(numbers), len(equations()), signature.arguments(layout)

    def call(values: list[Any]) -> Any:
        reads, since, heard = caller._table.reads, len(equations()), caller._table.heard
        if reads is not None:
            reads.builtins.now.symbolic = numbers
        given = caller._function, roots, values, layout, plan.name, uses_up, reads, graph
        alone = own_caches(reads is not None and reads.has_inner_jit)
        try:
            with alone, (reads or heard).impure.named(plan.name, options.warns_impure):
                if reads is not None or _core.is_watched() or not options.warns_impure:
                    result = signature.call(*given)
                else:
                    run = functools.partial(signature.call, *given)
                    result = _core.run_watched(run, heard.enter, heard.known, [], [], inner_frames(), quiet=True)
        except Exception as error:
            if is_of_a_traced_value(error) and caller._table.make_numpy_constant(recording, arguments):
                raise NewReads from None
            raise
        # An array was asked for its value, and the code caught the error: captured NumPy arrays have one.
        if graph.raised and caller._table.make_numpy_constant(recording, arguments):
            raise NewReads
        if reads is not None and (
            reads.see_hosts(caller._function, host_codes(since)) or not signature.has_roots_of(reads)
        ):
            raise NewReads  # a thread beside this one may have met what this trace took for known
        if options.warns_impure:
            tell_of_caught(plan.name, graph.raised)
        if options.captured and keep_attributes(caller, attributes):
            raise MutationError(ATTRIBUTE_SET.format(name=plan.name))
        return result

    # A forwarded input would keep its own sharding, whatever the options say; each place may have one of its own.
    share = options.out_shardings is None
    forward = share and options.in_shardings is None
    with noting(recording.leaves, leaves) as ties:
        outcome, out, changed, lost = run_trace(
            plan.name,
            recording,
            roots,
            leaves,
            call,
            options.mutation,
            by_value=by_value,
            forward=forward,
            share=share,
            donated=donated,
            arrays=not options.captured,
            numbers=numbers,
            graph=graph,
            keeps=not options.captured,
        )
        if share:
            outcome.alike = groups(ties.sources(out))
    if have_errors() and any(map(raises_its_own, host_functions(before, pure=True))):
        caller._table.waiting.add(id(outcome))
        hush_failed_callbacks()
    if graph.cells or graph.scopes:
        written = {recording.graphdef._node_place(track)[0] for track in outcome.inputs()[2]}  # pyright: ignore[reportPrivateUsage]
        give_own(before, graph, written)
    _read_new_refs(plan.name, recording, outcome, leaves, out)
    if not share:
        outcome.ties = _ties(outcome, out)
    # Ids that only tell the objects of one trace apart, as in a walk, are nothing to keep.
    if graph.asked and (recording.holds_ids or outcome.holds_ids):
        caller._table.asked[id(outcome)] = graph.asked
    if not (by_value or caller._table.untied):
        caller._table.untied = tell_untied(plan.name, recording, outcome, leaves, out)
    plan.on_trace(changed if lost else [])
    return outcome, out


@keeping_cached
def run_trace(
    name: str,
    recording: _core.Recording,
    roots: tuple[Any, ...],
    leaves: Sequence[Any],
    call: Callable[[list[Any]], Any],
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
) -> tuple[_core.Outcome, list[Any], list[str], bool]:
    """Runs `call` on the roots, as they were recorded, rebuilt around `leaves`.

    Whatever happens leaves the caller's objects as they were.

    With `arrays`, NumPy arrays that `call` makes are output leaves, and not constants; with `numbers`, symbols are.
    `graph` is told of the trace that `call` runs in.
    With `keeps`, an `object()` that `call` makes is one object for as long as the trace is used, a NumPy leaf that
    it returns is an array of JAX, and what a function in the result captures is its own, as in Equinox.

    Returns:
        (the Outcome, its output leaves, the paths of changes, whether these are lost with it).
    """
    tracing, within = _core.Trace(recording), context_of(recording)
    running = _enter_trace(tracing)
    try:
        values = within(tracing.rebuild, leaves)
        if graph is not None:
            graph.begin(tracing)
        since = len(equations())
        try:
            result = within(_core.run_rebuilt, call, values)
            for changes in running.copies:
                text = changes()
                if text:
                    raise MutationError(text)
            with keeping_made(keeps):
                given = by_value, forward, donated, arrays, numbers, share, not keeps
                outcome, out, changed, lost = within(tracing.finish, result, *given)
            refuse_ended(name, outcome, out, functools.partial(_path_of_output, recording, outcome), running.inner)
            refuse_tracers_in_classes(name, outcome)
            refuse_cached(name)
            warn_of_copies(name, [*_core.running_traces(), (roots, values)], since)
        except (jax.errors.JAXTypeError, TypeError, ValueError, IndexError) as error:
            if is_unexpected(error):
                told = ended_among(name, values, recording.names)
                if told is not None:
                    raise told from error
            if is_of_a_traced_value(error):
                rename_leaves(error, tracing.leaf_names())
            else:
                name_operands(error, leaves, tracing.leaf_names)
            raise
        except GlobalAssigned as error:
            assigned = ", ".join(error.args[0])
            raise MutationError(GLOBAL_ASSIGNED.format(name=name, names=assigned)) from None
        finally:
            tracing.restore()
        if mutation == "error" and changed:
            raise MutationError(MUTATION_FORBIDDEN.format(name=name, paths=", ".join(changed)))
        with jax.ensure_compile_time_eval():
            same = tracing.verify(roots)
        if not same:
            raise ConcurrentChangeError(
                CHANGED_BEHIND.format(name=name, path="one of its arguments or captured objects")
            )
        return outcome, out, changed, lost
    finally:
        clear_caches()
        _INNER.traces, running.trace = _INNER.traces[:-1], None
        if graph is not None:
            graph.end()
        tracing.close()


def context_of(recording: _core.Recording) -> Callable[..., Any]:
    """Calls a function in a context of the trace: there its context variables are set, and the caller's stay."""
    if contextvars.ContextVar in recording.named:
        return contextvars.copy_context().run
    return _call


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class Running:
    """A trace, as long as it runs; the traces that began inside of it, and what says how its copies have changed."""

    def __init__(self, trace: _core.Trace) -> None:
        self.trace: _core.Trace | None = trace
        self.inner: list[weakref.ref[Any]] = []
        self.copies: list[Callable[[], str]] = []


def _enter_trace(tracing: _core.Trace) -> Running:
    """Begins a trace, and tells the one around it."""
    around, running, trace = getattr(_INNER, "traces", ()), Running(tracing), current_trace()
    if around and trace is not None:
        around[-1].inner.append(weakref.ref(trace))
    _INNER.traces = (*around, running)
    return running


def owners(rebuilt: Any) -> list[tuple[Running, Any]]:
    """Whom an object stands for: what each running trace that has rebuilt it was given, of the innermost first."""
    out: list[tuple[Running, Any]] = []
    for running in reversed(getattr(_INNER, "traces", ())):
        own = running.trace.original(rebuilt) if running.trace is not None else None
        if own is not None:
            out.append((running, own))
            rebuilt = own
    return out


def _read_new_refs(
    name: str, recording: _core.Recording, outcome: _core.Outcome, leaves: Sequence[Any], out: list[Any]
) -> None:
    """JAX gives none out of a compiled function: what is in one goes out, and each call makes a new one of it."""
    made: dict[int, int] = {}
    refs: list[tuple[int, int]] = []
    for i, leaf in enumerate(out):
        if isinstance(leaf, ref_types):
            if any(leaf is given for given in leaves):
                raise ValueError(GIVEN_REF.format(name=name, path=_path_of_output(recording, outcome, i)))
            refs.append((i, made.setdefault(id(leaf), i)))
    if refs:
        outcome.refs = refs
        for i, _ in refs:
            out[i] = out[i][...]


def _ties(outcome: _core.Outcome, out: Sequence[Any]) -> list[tuple[int, int]]:
    """Output leaves that are one array, each with the first of them."""
    first: dict[int, int] = {}
    numbers = {leaf for leaf, _ in outcome.numbers}
    arrays = [i for i, leaf in enumerate(out) if isinstance(leaf, jax.Array) and i not in numbers]
    return [(i, first[id(out[i])]) for i in arrays if first.setdefault(id(out[i]), i) != i]


def note_copy(changes: Callable[[], str]) -> None:
    """`changes()` says what was changed since in a copy that a part of the running trace has made; that is an error."""
    if getattr(_INNER, "traces", ()):
        _INNER.traces[-1].copies.append(changes)


def _path_of_output(recording: _core.Recording, outcome: _core.Outcome, leaf: int) -> str:
    return output_path(recording, outcome, outcome.leaf_places()[leaf])


def keep_attributes(caller: _core.Caller, attributes: dict[str, Any]) -> bool:
    """Puts the attributes of a jitted function back to what they were. True where the function has changed them.

    Its plan is our own: a call in another thread may have made a new one.
    """
    now = vars(caller)
    if now.keys() == attributes.keys() and all(now[k] is v for k, v in attributes.items() if k != "_plan"):
        return False
    attributes = {k: now[k] if k == "_plan" and k in now else v for k, v in attributes.items()}
    now.clear()
    now.update(attributes)
    return True


def definition_of(function: types.FunctionType, tupled: bool = False) -> types.FunctionType:
    """A function of leaves that does nothing, with `function`'s name and place in its source: what JAX's messages name.

    It holds nothing of the user's but those three facts. As for JAX, a wrapper's are those of the function in it.
    """

    def nothing(*leaves: Any) -> None:
        del leaves

    def nothing_tupled(leaves: Any) -> None:
        del leaves

    with contextlib.suppress(ValueError):  # a circle
        inner = inspect.unwrap(function)
        function = inner if isinstance(inner, types.FunctionType) else function
    code = function.__code__
    where = (nothing_tupled if tupled else nothing).__code__.replace(
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
        co_name=code.co_name,
        co_qualname=code.co_qualname,
    )
    return types.FunctionType(where, {}, code.co_name)


def encode(number: int) -> tuple[Any, ...]:
    """An Outcome's number as an array-free pytree of tuples and None; `_core.decode` reads it."""
    return tuple(() if bit == "1" else None for bit in reversed(f"{number:b}")) if number else ()
