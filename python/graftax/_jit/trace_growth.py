# SPDX-License-Identifier: Apache-2.0
"""A trace that takes in, while it runs, what its code turns out to read: the body of the function runs once.

The new roots are recorded behind the others, so what is recorded already keeps its place. Their arrays become further
arguments of JAX's trace, which JAX itself did not ask for: so the trace is not handed to JAX when it ends. The call
begins anew with all roots (`TraceFinished`), and its trace repeats the equations of this one in place of the body.
"""

from __future__ import annotations

import contextvars
import dataclasses
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._base.missing import MISSING
from graftax._capture.locks import LOCKS
from graftax._capture.namespaces import Rebuilt
from graftax._capture.origin import Origin
from graftax._capture.retrace_signals import NewReads
from graftax._graph.array_aliases import AliasRecorder
from graftax._jax.tracers import has_tracer
from graftax._jax.traces import add_argument, can_grow, current_trace, is_of_trace, jaxpr_of, within_trace
from graftax._jit.cache import FunctionTable
from graftax._jit.call_plan import Plan, TracedCall
from graftax._jit.requested_donation import donated_leaves
from graftax._jit.running_trace import RunningTrace, running_traces

_MOST_ROUNDS = 20  # each finds classes of which the one before knew nothing
_FINISHED = threading.local()  # .trace: a FinishedTrace that the next trace of this thread may repeat


class TraceFinished(NewReads):
    """The body has run to its end, with more roots than the call has. args[0] is the FinishedTrace."""

    def __init__(self, finished: FinishedTrace) -> None:
        super().__init__(finished)
        self.if_discarded = finished.if_discarded


@dataclasses.dataclass
class FinishedTrace:
    """The result of a trace that has taken in more roots, for the trace that repeats it.

    Attributes:
        table, graphdef, types: of the call, and the types of its leaves: what the next trace has to have, too.
        outcome: of the trace.
        outputs: its output leaves; None for each one that `jaxpr` computes.
        jaxpr: the equations of the trace, from the leaves of all roots.
        if_discarded: called if no trace repeats it.
    """

    table: weakref.ref[FunctionTable]
    graphdef: _core.GraphDef
    types: list[object]
    outcome: _core.Outcome
    outputs: list[Any]
    jaxpr: Any
    if_discarded: list[Callable[[], None]] = dataclasses.field(default_factory=list[Callable[[], None]])

    def serves(self, table: FunctionTable, recording: _core.Recording, leaves: Sequence[object]) -> bool:
        is_same = self.table() is table and self.types == [jax.typeof(leaf) for leaf in leaves]
        return is_same and self.graphdef == recording.graphdef

    def repeat(self, leaves: Sequence[object]) -> list[Any]:
        """The outputs of the trace, computed from these leaves."""
        computed = iter(jax.extend.core.jaxpr_as_fun(self.jaxpr)(*leaves))
        return [next(computed) if output is None else output for output in self.outputs]


def keep(finished: FinishedTrace) -> None:
    """Keeps a finished trace for the next trace of this thread, which may repeat it."""
    _FINISHED.trace = finished


def is_kept(table: FunctionTable) -> bool:
    """Is a finished trace of this table kept for the next trace of this thread?"""
    finished = getattr(_FINISHED, "trace", None)
    return finished is not None and finished.table() is table


def take_finished(table: FunctionTable, recording: _core.Recording, leaves: Sequence[object]) -> FinishedTrace | None:
    """The finished trace that is kept in this thread, if it is of this call. None is kept any longer."""
    finished, _FINISHED.trace = getattr(_FINISHED, "trace", None), None
    if finished is None or finished.serves(table, recording, leaves):
        return finished
    for discard in finished.if_discarded:
        discard()
    return None


class Growth:
    """The roots of a running trace: those that it began with, and those that it has taken in.

    Attributes:
        plan, roots, recording, leaves: of the trace, with all of its roots.
        rebuilt: what the code under the trace may ask about the rebuilt graph.
        is_used: has it taken in anything?
        aliases, running: of the trace, once it runs.
    """

    def __init__(self, call: TracedCall, table: FunctionTable, shapes: bool) -> None:
        self.plan, self.roots, self.recording, self.leaves = call.plan, call.roots, call.recording, call.leaves
        self.is_used = False
        self.aliases: AliasRecorder | None = None
        self.running: RunningTrace | None = None
        self.rebuilt = Rebuilt()
        self.rebuilt.take_in = self.take_in
        self._table, self._layout, self._donated, self._shapes = table, call.layout, list(call.donated), shapes
        self._jax_trace = current_trace()

    @staticmethod
    def is_possible(plan: Plan, table: FunctionTable) -> bool:
        """Can a trace that begins now take in more roots? Otherwise it begins anew."""
        options, signature = plan.options, plan.signature
        is_plain = options.in_shardings is None and options.out_shardings is None and not signature.numpy_is_constant
        return is_plain and table.reads is not None and not table.frozen and can_grow(current_trace())

    def take_in(self) -> bool:
        """Takes in the origins that the read set has by now. False if the trace has to begin anew with them."""
        reads, views, running = self._table.reads, self.rebuilt.views, self.running
        if reads is None or views is None or running is None or running.trace is None:
            return False
        # Record all roots as they were when the trace began: the old ones have to have the instructions that they had.
        try:
            with views.with_own_classes():
                new = running.trace.as_begun(self._record)
        except GraftaxError:  # the call that begins anew raises it, where it is expected
            return False
        if new is None or not running.trace.begins(new[2]) or self._is_held_inside(*new):
            return False
        # What cannot be added to a trace that runs.
        plan, roots, recording = new
        if contextvars.ContextVar in recording.named - self.recording.named:  # the trace needs a context of its own
            return False
        origins = plan.signature.origins[len(self.plan.signature.origins) :]
        if any(map(reads.thread.has_set, origins)) or not views.can_extend():
            return False
        if recording.holds_own_ids and reads.builtins.give_ids_to_packages():
            return False
        added = recording.leaves[len(self.leaves) :]
        if has_tracer(added):  # the function has put it there before it was read
            return False
        # Add the arrays as arguments of JAX's trace, and rebuild the new roots around them.
        with within_trace(self._jax_trace):
            leaves = [*self.leaves, *(add_argument(self._jax_trace, leaf) for leaf in added)]
            values = running.trace.extend(recording, leaves)
        # Tell all that know the roots.
        first = len(self.roots)
        for lock in recording.instances(LOCKS):
            reads.thread.locks.note(lock)
        self.plan, self.roots, self.recording, self.leaves, self.is_used = plan, roots, recording, leaves, True
        running.recording, running.roots, running.leaves = recording, roots, leaves
        if self.aliases is not None:
            self.aliases.extend(recording.leaves, leaves)
        if running.numpy is not None:
            running.numpy.add(added, leaves[len(leaves) - len(added) :])
        self.rebuilt.begin(running.trace)
        views.extend(reads, list(zip(origins, values, roots[first:], strict=True)), first)
        return True

    def _is_held_inside(self, plan: Plan, roots: tuple[object, ...], recording: _core.Recording) -> bool:
        """Has a transform that runs in the trace taken some of the new roots as they are? It would go on with that."""
        inner = running_traces()[1:]
        if not inner:
            return False
        if any(origin.assigned for origin in plan.signature.origins[len(self.plan.signature.origins) :]):
            return True
        nodes, leaves = recording.nodes[len(self.recording.nodes) :], recording.leaves[len(self.leaves) :]
        added = {*map(id, nodes), *map(id, leaves), *map(id, roots[len(self.roots) :])}
        held = [(*r.recording.nodes, *r.recording.leaves) for r in inner if r.recording is not None]
        return any(id(value) in added for values in held for value in values)

    def _record(self) -> tuple[Plan, tuple[object, ...], _core.Recording] | None:
        """(plan, roots, recording) with all roots that are known by now; None where they do not continue the others."""
        reads, plan = self._table.reads, self.plan
        assert reads is not None
        before = plan.signature
        # The classes and functions in the new roots may lead to more: until a round finds nothing.
        for _ in range(_MOST_ROUNDS):
            origins = tuple(reads.names.origins)
            count = len(before.origins)
            continues = [origin.what for origin in origins[:count]] == [origin.what for origin in before.origins]
            if not continues or before.hidden != reads.names.hidden or before.assigned != reads.names.assigned_own:
                return None
            signature = dataclasses.replace(before, origins=origins)
            plan = plan.with_signature(signature)
            roots = *self.roots, *map(_root, origins[count:])
            recording = plan.record(roots, self._layout, self._shapes)
            reads.note_root_functions(recording.functions)
            grown = reads.see_named(recording.named)
            if not grown and len(reads.names.origins) == len(origins):
                return (plan, roots, recording) if self._donates_no_more(plan, roots, recording) else None
        return None

    def _donates_no_more(self, plan: Plan, roots: tuple[object, ...], recording: _core.Recording) -> bool:
        """Do the old leaves keep their donation flags, and are no new ones donated?"""
        if not self._donated:
            return True
        flags = donated_leaves(plan, roots, self._layout, recording.graphdef)
        return flags[: len(self._donated)] == self._donated and not any(flags[len(self._donated) :])

    def finished(self, outcome: _core.Outcome, outputs: list[Any]) -> FinishedTrace:
        """The trace as the next one repeats it, which cannot use its tracers."""
        trace = self._jax_trace
        traced = [output for output in outputs if is_of_trace(output, trace)]
        # What is no tracer of this trace is a constant, or a tracer of a trace around it, which the next one can
        # return.
        fixed_outputs = [None if is_of_trace(output, trace) else output for output in outputs]
        types = [jax.typeof(leaf) for leaf in self.leaves]
        table, graphdef = weakref.ref(self._table), self.recording.graphdef
        return FinishedTrace(table, graphdef, types, outcome, fixed_outputs, jaxpr_of(trace, traced))


def _root(origin: Origin) -> object:
    """The root that the binding of a call makes of an origin: its value, or a cell with it if the code assigns it."""
    value = origin.value()
    if not origin.assigned:
        return value
    return types.CellType() if value is MISSING else types.CellType(value)
