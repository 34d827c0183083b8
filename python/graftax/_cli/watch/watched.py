# SPDX-License-Identifier: Apache-2.0
"""Functions that run with their own `jit`, and are observed while they are called and traced."""

from __future__ import annotations

import functools
import math
import threading
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from graftax import _core
from graftax._cli.watch.record import Compilation, Record
from graftax._cli.watch.signature import CallSignature, CompiledCall, Parameters, cause
from graftax._cli.watch.snapshot import Snapshot, captured
from graftax._jax.compilation import compile_stage, on_compile_stages
from graftax._jax.tracers import has_tracer
from graftax.replace import Request, StandsForCompiled, patch_names, restore_names

_KEPT_PROGRAMS = 64  # programs of one function whose snapshots are kept
_WALKED_CALL = 3  # the call whose arguments graftax walks, to measure the time
_WALKS = 5


class _Thread(threading.local):
    """The calls that this thread is in, and how many of them are being traced."""

    def __init__(self) -> None:
        self.running: list[Call] = []
        self.traces = 0


class Watch:
    """All functions that are watched from `start` to `stop`."""

    def __init__(self) -> None:
        self.records: dict[Any, Record] = {}
        self._probes: dict[int, tuple[Any, Any]] = {}  # by the id of a function, which is kept
        self.thread = _Thread()
        self._is_running = False

    def start(self) -> None:
        """Puts watched names in place of `jit` and its likes."""
        self._is_running = True
        on_compile_stages(self._on_stage)
        patch_names(lambda function, request: Watched(self, function, request))

    def stop(self) -> None:
        """Restores the names."""
        self._is_running = False
        restore_names()

    def record(self, function: Any, jit: str) -> Record:
        """The record of a function, shared by all function objects with the same code."""
        code = getattr(function, "__code__", None)
        name = getattr(function, "__name__", type(function).__name__)
        location = f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code is not None else "no code"
        record = self.records.setdefault((jit, code or id(function)), Record(name, location, jit))
        record.functions += 1
        return record

    def probe(self, function: types.FunctionType, record: Record, jit: str) -> Any:
        """The function, wrapped to observe what it changes. One wrapper for each: JAX caches by function object."""
        if id(function) not in self._probes:
            self._probes[id(function)] = function, _probe(self, function, record, jit)
        return self._probes[id(function)][1]

    def _on_stage(self, event: str, seconds: float, **metadata: Any) -> None:
        stage = compile_stage(event, metadata)
        # A stage during a trace is of a function that the traced one calls, and part of its time.
        if self._is_running and stage is not None and self.thread.running and not self.thread.traces:
            stages = self.thread.running[-1].stages
            stages[stage[0]] = stages.get(stage[0], 0.0) + seconds


class Call:
    """One call: its arguments, and the stages of its compilation."""

    def __init__(self, named: dict[str, Any], signature: CallSignature, described: CompiledCall | None) -> None:
        self.named, self.signature, self.described = named, signature, described
        self.stages: dict[str, float] = {}


class Watched(StandsForCompiled):
    """A function compiled by its own `jit`."""

    def __init__(self, watch: Watch, function: Any, request: Request) -> None:
        functools.update_wrapper(self, function)
        self._watch, self._jit = watch, request.name
        self._record = watch.record(function, request.name)
        self._is_anew = self._record.functions > 1
        self._parameters = Parameters(function, request.options)
        plain = type(function) is types.FunctionType
        self._compiled = request.original(watch.probe(function, self._record, request.name) if plain else function)
        self._programs: dict[CallSignature, Snapshot] = {}
        self._replaceable: list[tuple[Any, Any]] = []  # arguments of the last call that a result could have taken over

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        thread = self._watch.thread
        # Within another function's trace this call is a part of that program, and no program of its own.
        if thread.traces or has_tracer(jax.tree_util.tree_leaves((args, kwargs))):
            return self._compiled(*args, **kwargs)
        self._count_dead()
        named = self._parameters.named(args, kwargs)
        signature = self._parameters.call(named, self._jit == "jax.jit")
        # Before the call, which may change the arguments.
        described = None if signature in self._programs else self._parameters.described(named, signature)
        call = Call(named, signature, described)
        thread.running.append(call)
        start = time.perf_counter_ns()
        try:
            result = self._compiled(*args, **kwargs)
        finally:
            elapsed = time.perf_counter_ns() - start
            thread.running.pop()
        self._note(call, elapsed, args, kwargs)
        self._note_result(named, result)
        return result

    def __repr__(self) -> str:
        return repr(self._compiled)

    def _read(self, named: dict[str, Any]) -> dict[str, Any]:
        """The values that a call reads and that its own `jit` compares by identity or not at all."""
        static = {name: value for name, value in named.items() if name in self._parameters.static}
        return {**captured(self.__wrapped__), **static}

    def _note(self, call: Call, elapsed: int, args: Any, kwargs: Any) -> None:
        record, read = self._record, self._read(call.named)
        record.calls += 1
        if call.stages:
            text = cause(call.described, record.compiled_calls, self._is_anew and not self._programs)
            record.compilations.append(Compilation(text, call.stages))
            if call.described is not None:
                record.compiled_calls.append(call.described)
        else:
            record.nanoseconds.append(elapsed)
        # What a program reads is compared with what was there when it was traced.
        if call.stages or call.signature not in self._programs:
            snapshot = Snapshot(read)
            if len(self._programs) < _KEPT_PROGRAMS:
                self._programs[call.signature] = snapshot
            record.constants.update({path: array.nbytes for path, array in snapshot.arrays()})
        else:
            record.count(record.stale, self._programs[call.signature].differences(read))
        if record.calls == _WALKED_CALL:
            record.walk_nanoseconds = _walk((args, kwargs))

    def _note_result(self, named: dict[str, Any], result: Any) -> None:
        """Compares the arrays of a result with those of the arguments."""
        # A step most often returns a tuple of what it was given, each part of which has the structure of an argument.
        named_parts = {f"result[{i}]": x for i, x in enumerate(result)} if type(result) is tuple else {"result": result}
        parts = {name: jax.tree_util.tree_flatten(part) for name, part in named_parts.items()}
        # A result can take over an argument of the same shape and dtype, if nobody holds that by the next call.
        free_results = Counter(
            _aval(leaf) for leaves, _ in parts.values() for leaf in leaves if isinstance(leaf, jax.Array)
        )
        for name, value in named.items():
            if name in self._parameters.static:
                continue
            leaves, structure = jax.tree_util.tree_flatten(value)
            # One array in several places: is it still one array in a result of the same structure?
            if len(set(map(id, leaves))) < len(leaves):
                for path, (result_leaves, result_structure) in parts.items():
                    if result_structure == structure:
                        self._note_ties(path, value, result_leaves)
            for leaf in leaves:
                if isinstance(leaf, jax.Array) and free_results[aval := _aval(leaf)] > 0 and not leaf.is_deleted():
                    free_results[aval] -= 1
                    self._replaceable.append((weakref.ref(leaf), aval))

    def _note_ties(self, name: str, argument: Any, result_leaves: list[Any]) -> None:
        first_index: dict[int, int] = {}
        argument_leaves = jax.tree_util.tree_flatten_with_path(argument)[0]
        for i, (path, leaf) in enumerate(argument_leaves):
            if not isinstance(leaf, jax.Array) or leaf.ndim == 0:
                continue
            j = first_index.setdefault(id(leaf), i)
            if j != i and result_leaves[i] is not result_leaves[j]:
                paths = f"{name}{jax.tree_util.keystr(argument_leaves[j][0])} and {name}{jax.tree_util.keystr(path)}"
                self._record.lost_ties[paths] = leaf.nbytes

    def _count_dead(self) -> None:
        """Arguments of the last call that nobody holds any more could have been donated to it."""
        dead = sum(math.prod(s) * d.itemsize for reference, (s, d) in self._replaceable if reference() is None)
        self._replaceable.clear()
        if dead:
            self._record.missed_donations += 1
            self._record.missed_donation = max(self._record.missed_donation, dead)


def _aval(array: jax.Array) -> tuple[Any, Any]:
    return array.shape, array.dtype


def _walk(value: Any) -> int:
    """The nanoseconds that graftax takes to walk these arguments, as on every call. 0 if it refuses them."""
    try:
        graphdef = _core.flatten(value)[1]
        times: list[int] = []
        for _ in range(_WALKS):
            start = time.perf_counter_ns()
            _core.walk(graphdef, (value,))
            times.append(time.perf_counter_ns() - start)
    except Exception:
        return 0
    # The others were disturbed by whatever else runs.
    return min(times)


def _probe(watch: Watch, function: Callable[..., Any], record: Record, jit: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        # What a trace changes is changed once, and not by later calls. nnx.jit gives changes of its arguments back.
        arguments = {} if jit == "flax.nnx.jit" else Parameters(function, {}).named(args, kwargs)
        read = {**captured(function), **arguments}
        snapshot = Snapshot(read)
        watch.thread.traces += 1
        try:
            result = function(*args, **kwargs)
        finally:
            watch.thread.traces -= 1
        # What the function captures may be bound to other objects now; the others are the ones from before the call.
        record.count(record.lost_changes, snapshot.differences({**read, **captured(function)}))
        return result

    return traced
