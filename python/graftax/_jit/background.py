# SPDX-License-Identifier: Apache-2.0
"""`jit(..., background=True)`: a first call does not wait for XLA. Its trace is evaluated while a thread compiles.

See docs/internals/decisions/0012-compiling-in-the-background.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core

from graftax import _core
from graftax._explain import ArraySignature, array_signatures, compile_events
from graftax._jax.arrays import as_weak, is_in_default_memory
from graftax._jax.equations import run_equation
from graftax._jax.part_programs import runs_foreign_code
from graftax._jax.settings import settings_of_traces
from graftax._jax.tracebacks import boundary
from graftax._jax.tracers import is_literal
from graftax._jit import program_store
from graftax._jit.compile_progress import hand_over_report, take_report

_SECONDS_TO_WAIT = 0.02  # for a program that is compiled in no time, or that JAX's own cache has

_DEBUGS = ("jax_debug_nans", "jax_debug_infs", "jax_check_tracer_leaks", "jax_no_execution")


class _Compilation:
    """One program that a thread compiles, the leaves and settings of JAX that it is for, and how the compiler ended."""

    def __init__(self, signatures: tuple[ArraySignature, ...], settings: dict[str, object]) -> None:
        self.signatures, self.settings = signatures, settings
        self.has_ended = threading.Event()
        self.error: BaseException | None = None
        # A call has learnt how it ended: it has used the program, or has raised the compiler's error.
        self.is_used = self.has_raised = False

    def start(self, name: str, lowered: jax.stages.Lowered) -> None:
        """Starts the thread, for which Python waits at its end."""
        # These belong to the thread of the call: events of JAX in the other thread are to count for this call.
        variant, report = compile_events.take_pending(), take_report(name)

        def run() -> None:
            try:
                with compile_events.compiling(variant):
                    hand_over_report(report)
                    lowered.compile()
            except BaseException as error:
                # The next call raises it, with a traceback of its own: that of this thread would keep its frames alive.
                self.error = error.with_traceback(None)
            finally:
                if variant is not None:
                    variant.is_compiling = False
                self.has_ended.set()

        try:
            threading.Thread(target=run, name=f"graftax compiles {name}").start()
        except RuntimeError:  # Python is ending already, and starts no more threads: the call compiles
            run()


class Background:
    """The `jax.jit` object of an entry, which evaluates the equations of a trace until they are compiled."""

    def __init__(self, name: str, compiled: jax.stages.Wrapped, tupled: bool) -> None:
        self._name, self._compiled, self._tupled = name, compiled, tupled
        self._compilations: list[_Compilation] = []
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if name == "_compiled":  # in a copy, before __init__: this would call itself without end
            raise AttributeError(name)
        return getattr(self._compiled, name)

    @boundary
    def __call__(self, *arguments: Any) -> Any:
        leaves = arguments[0] if self._tupled else arguments
        # Under JAX's debug flags a program does more than its equations.
        if not _are_on_one_device(leaves) or any(getattr(jax.config, debug, False) for debug in _DEBUGS):
            return self._compiled(*arguments)
        compilation = self._find(leaves)
        if compilation is not None and compilation.is_used:
            return self._compiled(*arguments)
        traced = self._compiled.trace(*arguments)  # the compiled call uses this trace, too
        if compilation is None or compilation.has_raised:
            compilation = self._start(leaves, traced)
        # The program, if it comes soon; the equations until then.
        if compilation.has_ended.wait(_SECONDS_TO_WAIT):
            return self._end(compilation, arguments)
        outputs = evaluate(traced.jaxpr, leaves, compilation.has_ended.is_set)
        if outputs is None:
            return self._end(compilation, arguments)
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), outputs)

    def _find(self, leaves: Sequence[object]) -> _Compilation | None:
        signatures, settings = array_signatures(leaves), settings_of_traces()
        running = list(self._compilations)
        return next((c for c in running if c.signatures == signatures and c.settings == settings), None)

    def _start(self, leaves: Sequence[object], traced: jax.stages.Traced) -> _Compilation:
        """The compilation of a trace, started here or by another thread. If it `is_used`, the call itself compiles."""
        is_foreign = runs_foreign_code(traced.jaxpr)  # evaluated in part and then run, it would do things twice
        lowered = None if is_foreign else traced.lower()
        with self._lock:
            compilation = self._find(leaves)
            if compilation is not None and compilation.has_raised:
                self._compilations.remove(compilation)
                compilation = None
            if compilation is None:
                compilation = _Compilation(array_signatures(leaves), settings_of_traces())
                self._compilations.append(compilation)
                if lowered is None:
                    compilation.is_used = True
                    compilation.has_ended.set()
                else:
                    compilation.start(self._name, lowered)
        return compilation

    def _end(self, compilation: _Compilation, arguments: tuple[object, ...]) -> Any:
        """Runs the program. Raises the compiler's error if there is one; the call after that compiles again."""
        if compilation.error is not None:
            compilation.has_raised = True
            raise compilation.error
        if not compilation.is_used:
            compilation.is_used = True
            _keep_on_disk()
        return self._compiled(*arguments)

    # ---- what others ask

    @property
    def compiling(self) -> int:
        """How many programs are being compiled."""
        return sum(not compilation.has_ended.is_set() for compilation in list(self._compilations))

    def is_compiling(self, leaves: Sequence[object]) -> bool:
        """Is the program for leaves like these being compiled, or has no call used it yet?"""
        compilation = self._find(leaves)
        return compilation is not None and not compilation.is_used

    def wait_until_compiled(self) -> None:
        """Waits until nothing is being compiled."""
        for compilation in list(self._compilations):
            compilation.has_ended.wait()


def evaluate(jaxpr: Any, leaves: Sequence[Any], is_compiled: Callable[[], bool]) -> list[Any] | None:
    """The outputs of a closed Jaxpr, equation by equation as JAX runs it outside of `jit`; None once it is compiled."""
    outputs = _evaluate(jaxpr.jaxpr, jaxpr.consts, leaves, is_compiled)
    if outputs is None:
        return None
    # The next call has to find the signature that the program's results would have given it: the device, the dtype and
    # the weak type. Nor may it donate an array that is also an input of this one.
    place = next((leaf.sharding for leaf in leaves if getattr(leaf, "committed", False)), None)
    owned, results = {id(leaf) for leaf in leaves}, list[Any]()
    for output, aval in zip(outputs, jaxpr.out_avals, strict=True):
        array = jax.numpy.copy(output) if id(output) in owned else jax.numpy.asarray(output)
        owned.add(id(output))
        if array.dtype != aval.dtype:
            array = array.astype(aval.dtype)
        if aval.weak_type:
            array = as_weak(array)
        results.append(jax.device_put(array, place) if place is not None and not array.committed else array)
    return results


def _evaluate(
    jaxpr: Any, constants: Sequence[object], inputs: Sequence[object], is_compiled: Callable[[], bool]
) -> list[Any] | None:
    values: dict[Any, Any] = {
        **dict(zip(jaxpr.invars, inputs, strict=True)),
        **dict(zip(jaxpr.constvars, constants, strict=True)),
    }
    # A value is dropped after its last use, or a deep model would hold all of its activations.
    outputs_of_jaxpr = {v for v in jaxpr.outvars if not is_literal(v)}
    last_use = {v: i for i, equation in enumerate(jaxpr.eqns) for v in equation.invars if not is_literal(v)}
    for i, equation in enumerate(jaxpr.eqns):
        if is_compiled():
            return None
        # An inner `jit` is gone over as well: JAX would compile it as a whole, which may take as long as the program.
        operands = [v.val if is_literal(v) else values[v] for v in equation.invars]
        inner = equation.params.get("jaxpr") if equation.primitive.name in ("jit", "pjit") else None
        outputs = (
            run_equation(equation, operands)
            if inner is None
            else _evaluate(getattr(inner, "jaxpr", inner), inner.consts, operands, is_compiled)
        )
        if outputs is None:
            return None
        values.update(zip(equation.outvars, outputs, strict=True))
        for v in equation.invars:
            if not is_literal(v) and last_use[v] == i and v not in outputs_of_jaxpr:
                values.pop(v, None)
    return [v.val if is_literal(v) else values[v] for v in jaxpr.outvars]


def _are_on_one_device(leaves: Sequence[object]) -> bool:
    """Are all arrays on one device, in the memory that computations use, and none of them tracers or on a mesh?"""
    # Shardings are obeyed by a program alone: equations that run one by one leave their results where they are.
    devices = set[Any]()
    for leaf in leaves:
        if isinstance(leaf, jax.core.Tracer):
            return False
        if isinstance(leaf, jax.Array):
            if type(leaf.sharding) is not jax.sharding.SingleDeviceSharding:
                return False
            if not is_in_default_memory(leaf.sharding):
                return False
            devices |= leaf.sharding.device_set
    return len(devices) <= 1 and jax.sharding.get_abstract_mesh().empty


def _keep_on_disk() -> None:
    """Tells the cache on disk, if there is one, of the program that this call is about to run."""
    store, call = program_store.current(), _core.running_call()
    if store is None or call is None:
        return
    caller, _, outcomes = call
    table: Any = caller._table
    entry = table.entry_of(outcomes)
    if entry is not None:
        store.keep(caller, entry)
