# SPDX-License-Identifier: Apache-2.0
"""Compiles loops and branches that are called outside of any trace, once per structure, as `graftax.jit` would."""

from __future__ import annotations

import collections
import functools
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax

from graftax import _core
from graftax._base.errors import ConcurrentChangeError, MutationError
from graftax._capture.caches_after_traces import keeping_cached
from graftax._capture.host_callbacks import calls_host
from graftax._capture.leaked_tracers import is_of_steps
from graftax._capture.origin import Origin
from graftax._capture.retrace_signals import NewReads
from graftax._capture.signature import Signature, global_names, resolve
from graftax._jax.compilation import own_jit
from graftax._jax.traces import equations, outside_of_traces
from graftax._jit.cache import FunctionTable
from graftax._jit.call_plan import RecordedCall
from graftax._jit.flat_function import Flat, definition_of, flat_function
from graftax._jit.jitted import Jitted
from graftax._jit.options import Options

Run = Callable[[Sequence[Callable[..., Any]], Sequence[Any], Sequence[Any]], Any]

_OPTIONS = Options(cache_size=32)  # structures per function
# Functions whose programs are kept. A jaxpr keeps the code that it was traced from alive, so weak references would not
# do.
_MAX_FUNCTIONS = 128
_THREAD = threading.local()
_COMPILED: collections.OrderedDict[tuple[int, Run], _Compiled] = collections.OrderedDict()  # least recently used first
_LOCK = threading.Lock()


def run_compiled(title: str, functions: Sequence[Any], operands: Sequence[Any], extra: Sequence[Any], run: Run) -> Any:
    """Returns `run(functions, operands, extra)`, from a compiled program if only the time that it takes can differ.

    The program is compiled again whenever `graftax.jit` would do so: for other arguments, other captured variables, or
    other globals that the called code reads. Within a trace `run` is called directly. So it is if it cannot be compiled
    or if the compiled program raises: then the user sees the error of a plain run. `run` must depend on its arguments
    only.
    """
    if outside_of_traces() and not jax.config.jax_disable_jit and not _core.running_traces():
        compiled = _compiled_for(title, functions[0], run)
        if compiled is not None:
            # `checked_flat` sets it, within the call.
            _THREAD.host_was_called = False
            try:
                return compiled(tuple(functions), tuple(operands), tuple(extra))
            except Exception as error:
                # Running again would repeat the side effects of a host function.
                if _THREAD.host_was_called:
                    raise
                # A helper kept a tracer: it needs the values of separate steps.
                if is_of_steps(error):
                    with jax.disable_jit():
                        return run(functions, operands, extra)
                # After these errors, a plain run would leak tracers.
                if isinstance(error, MutationError | ConcurrentChangeError):
                    raise
    return run(functions, operands, extra)


class _Compiled(Jitted[Any, Any]):
    """The compiled programs of one transform for all functions with the same code."""

    # The functions are arguments of the program, so a new closure with the same code and equal variables is a cache
    # hit.

    def __init__(self, title: str, function: types.FunctionType, run: Run) -> None:
        # Kept alive, because its id is the key in `_COMPILED`.
        self.code = function.__code__
        # What is jitted is `run`: the user's functions are its arguments.
        plain, table = resolve(run)[0], FunctionTable(_OPTIONS)
        signature = self._signature(plain, 0, _OPTIONS, table)
        self._set_up(f"{title} of {function.__name__}", plain, (), table, _OPTIONS, definition_of(function), signature)

    @staticmethod
    def _signature(plain: types.FunctionType, skip: int, options: Options, table: FunctionTable) -> Signature:
        hidden = frozenset(table.reads.names.hidden if table.reads else ())
        signature = Signature.of(plain, skip, False, table.origins, hidden)
        signature.binding.generation = table.generation
        return signature

    def _advise(self, call: RecordedCall) -> None:
        """Gives no advice: a loop has none of the options that `graftax.jit` would recommend."""

    def _build(self, call: RecordedCall) -> _core.Entry:
        # In a loop numbers are static, and arrays carry what changes.
        assert call.numbers is None
        outcomes: list[_core.Outcome] = []
        plan = call.plan
        flat = flat_function(plan, call.layout, (), outcomes, by_value=False, grows=False)
        graphdef, origins = _core.weaken(call.recording.graphdef), plan.signature.origins

        @keeping_cached
        @functools.wraps(flat)
        def checked_flat(*leaves: object) -> Flat:
            equations_before, active = len(equations()), _core.active_call(outcomes)
            outputs = flat(*leaves)
            assert active is not None  # else `flat` has raised
            table: Any = active[0]._table
            # A variable that counts traces differs at every call, so it must not be part of the cache key.
            counters = _trace_counters(outcomes[_core.decode(outputs[2])], graphdef, origins, active[1])
            if counters and table.reads.names.leave_out(counters):
                raise NewReads
            # The program calls functions of this call's objects, so it is never used again.
            if calls_host(equations_before):
                _THREAD.host_was_called = True
                for key, entry in list(table.entries.items()):
                    if entry.outcomes is outcomes:
                        table.drop(key)
            return outputs

        checked_flat.__name__ = checked_flat.__qualname__ = plan.definition.__name__
        # A partial is never dispatched directly by the core: a loop takes far longer than that would save.
        compiled = functools.partial(own_jit(checked_flat))
        return _core.Entry(graphdef, call.context, compiled, outcomes, len(call.roots), False)


def _trace_counters(
    outcome: _core.Outcome, graphdef: _core.GraphDef, origins: Sequence[Origin], roots: tuple[Any, ...]
) -> list[Origin]:
    """The origins of variables that count traces: the trace changed them, and they hold no arrays."""
    # A changed node without arrays in it, such as a list or a cell with a number, differs after every trace. Among the
    # roots of a call, those of the origins come last.
    with_arrays = {root - 1 for root, _ in outcome.leaf_places() if root > 0}
    written = [track for i, track in enumerate(outcome.inputs()[2]) if i not in with_arrays]
    changed = {graphdef._node_place(track)[0] - len(roots) + len(origins) for track in written}  # pyright: ignore[reportPrivateUsage]
    # Variables that the loop's own functions name are excluded, because they are part of the loop's state.
    named_by_loop = {
        (id(plain.__globals__), name) for plain, _, _ in map(resolve, roots[0]) for name in global_names(plain)[0]
    }
    return [
        origins[i] for i in sorted(changed) if i >= 0 and (id(origins[i].holder), origins[i].name) not in named_by_loop
    ]


def _compiled_for(title: str, function: object, run: Run) -> _Compiled | None:
    """The programs for this function's code, from the cache or new; None if `function` is not callable."""
    try:
        resolved, _, _ = resolve(function)
    except TypeError:
        return None
    key = id(resolved.__code__), run
    with _LOCK:
        compiled = _COMPILED.get(key)
        if compiled is None:
            compiled = _COMPILED[key] = _Compiled(title, resolved, run)
            while len(_COMPILED) > _MAX_FUNCTIONS:
                _COMPILED.popitem(last=False)
        _COMPILED.move_to_end(key)
        return compiled
