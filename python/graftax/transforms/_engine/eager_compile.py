# SPDX-License-Identifier: Apache-2.0
"""Loops and branches outside of any trace: compiled once for each structure, by the machinery of `graftax.jit`."""

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
from graftax._capture.host_callbacks import calls_host
from graftax._capture.leaked_tracers import is_of_steps
from graftax._capture.origin import Origin
from graftax._capture.retrace_signals import NewReads
from graftax._capture.signature import Signature, global_names, resolve
from graftax._jax.compat import equations, outside_of_traces
from graftax._jit.cache import FunctionTable
from graftax._jit.call_plan import Plan
from graftax._jit.jitted import Jitted
from graftax._jit.number_policy import SymbolicNumbers
from graftax._jit.options import Options
from graftax._jit.trace import Flat, definition_of, flat_function

Run = Callable[[Sequence[Callable[..., Any]], Sequence[Any], Sequence[Any]], Any]

_OPTIONS = Options(cache_size=32)  # so many structures is one function kept compiled for
_FUNCTIONS = 128  # of so many functions
_CALLS = threading.local()
_COMPILED: collections.OrderedDict[tuple[int, Run], _Compiled] = collections.OrderedDict()  # the last used at the end
_LOCK = threading.Lock()


def once(title: str, functions: Sequence[Any], operands: Sequence[Any], rest: Sequence[Any], run: Run) -> Any:
    """`run(functions, operands, rest)`, compiled where that makes no difference but in time.

    It depends on what `graftax.jit` of it would depend on: what it is given, what the functions capture, and what the
    code that they call reads. Inside of a trace it runs as it is. So it does where it cannot be compiled, or raises: an
    error is that of a plain run.

    Args:
        title: of the transform.
        functions: any callables that are called with the operands.
        operands: of the functions.
        rest: what else `run` is given.
        run: depends on its arguments alone.
    """
    if outside_of_traces() and not jax.config.jax_disable_jit and not _core.running_traces():
        compiled = _compiled_for(title, functions[0], run)
        if compiled is not None:
            _CALLS.told = False
            try:
                return compiled(tuple(functions), tuple(operands), tuple(rest))
            except Exception as error:
                if _CALLS.told:  # a host function, which must not be told twice
                    raise
                if is_of_steps(error):  # what a helper keeps is a value only where the steps run one by one
                    with jax.disable_jit():
                        return run(functions, operands, rest)
                if isinstance(error, MutationError | ConcurrentChangeError):  # a plain run would leave tracers behind
                    raise
    return run(functions, operands, rest)


class _Compiled(Jitted[Any, Any]):
    """What is compiled for the calls whose first function has one code.

    The functions are arguments: made anew with the same code and equal variables, they are the same. A jaxpr remembers
    where its equations come from, and so keeps the code alive: the number of these is bounded.
    """

    def __init__(self, title: str, first: types.FunctionType, run: Run) -> None:
        self.code = first.__code__  # held, so that no other code has its id
        plain, table = resolve(run)[0], FunctionTable(_OPTIONS)
        signature = self._signature(plain, 0, _OPTIONS, table)
        self._set_up(f"{title} of {first.__name__}", plain, (), table, _OPTIONS, definition_of(first), signature)

    @staticmethod
    def _signature(plain: types.FunctionType, skip: int, options: Options, table: FunctionTable) -> Signature:
        hidden = frozenset(table.reads.hidden if table.reads else ())
        signature = Signature.of(plain, skip, False, table.origins, hidden)
        signature.binding.generation = table.generation
        return signature

    def _advise(self, recording: _core.Recording, arguments: int) -> None:
        """A loop has no options that advice could name."""

    def _build(
        self,
        plan: Plan,
        roots: tuple[Any, ...],
        layout: tuple[Any, ...],
        recording: _core.Recording,
        context: Any,
        numbers: SymbolicNumbers | None,
    ) -> _core.Entry:
        assert numbers is None  # they are static in a loop: an array carries what changes
        outcomes: list[_core.Outcome] = []
        flat = flat_function(plan, layout, (), outcomes, by_value=False)
        graphdef, origins = _core.weaken(recording.graphdef), plan.signature.origins

        @functools.wraps(flat)
        def noting(*leaves: Any) -> Flat:
            since, active = len(equations()), _core.active_call(outcomes)
            out = flat(*leaves)
            assert active is not None  # else `flat` has raised
            table: Any = active[0]._table
            counters = _counters(outcomes[_core.decode(out[2])], graphdef, origins, active[1])
            if counters and table.reads.leave_out(counters):
                raise NewReads
            if calls_host(since):  # with objects of this call: the next one calls its own
                _CALLS.told = True
                for key, entry in list(table.entries.items()):
                    if entry.outcomes is outcomes:
                        table.drop(key)
            return out

        noting.__name__ = noting.__qualname__ = plan.definition.__name__
        # Not the jit object itself, which would be run directly after some calls: a loop takes longer than that saves.
        compiled = functools.partial(jax.jit(noting))
        return _core.Entry(graphdef, context, compiled, outcomes, len(roots), False)


def _counters(
    outcome: _core.Outcome, graphdef: _core.GraphDef, origins: Sequence[Origin], roots: tuple[Any, ...]
) -> list[Origin]:
    """The origins where a trace has changed what is no array: what they count are traces. None that a function of the
    loop itself names: these are part of its state."""
    with_arrays = {root - 1 for root, _ in outcome.leaf_places() if root > 0}
    written = [track for i, track in enumerate(outcome.inputs()[2]) if i not in with_arrays]
    found = {graphdef._node_place(track)[0] - len(roots) + len(origins) for track in written}  # pyright: ignore[reportPrivateUsage]
    own = {(id(plain.__globals__), name) for plain, _, _ in map(resolve, roots[0]) for name in global_names(plain)[0]}
    return [origins[i] for i in sorted(found) if i >= 0 and (id(origins[i].holder), origins[i].name) not in own]


def _compiled_for(title: str, function: Any, run: Run) -> _Compiled | None:
    """None where the function is none."""
    try:
        first, _, _ = resolve(function)
    except TypeError:
        return None
    key = id(first.__code__), run
    with _LOCK:
        found = _COMPILED.get(key)
        if found is None:
            found = _COMPILED[key] = _Compiled(title, first, run)
            while len(_COMPILED) > _FUNCTIONS:
                _COMPILED.popitem(last=False)
        _COMPILED.move_to_end(key)
        return found
