# SPDX-License-Identifier: Apache-2.0
"""Ahead of time: `trace`, `lower` and `compile`, with the structure and the statics of every call checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar, cast

import jax
import numpy as np

from graftax import _core
from graftax._base.errors import GraftaxError, StructureError, UnpicklableError, rename_leaves
from graftax._capture.retrace_signals import MOST_RESTARTS, NewReads
from graftax._capture.signature import Signature, give_back
from graftax._explain.compile_events import compiling
from graftax._graph.structure_diff import Difference, differences_text
from graftax._jax.tracebacks import boundary
from graftax._jit.build_entry import leaf_options
from graftax._jit.call_plan import Plan
from graftax._jit.leaf_names import leaf_names
from graftax._jit.stage_info import NAMES, info
from graftax._jit.trace import context_of, flat_function
from graftax._jit.warm import warm

COMPILED_FOR_OTHERS = (
    "{name} was {done} for other arguments:\n{differences}\n{again}, or call the jitted function, which compiles for "
    "what it is given."
)
OTHER_ORDER = "  a set with the same elements iterates in another order, or would after a change"
NOT_KEPT = (
    "a {what} belongs to this process and cannot be pickled or copied. graftax.export(f)(*args).serialize() makes "
    "bytes that another process can call; a copy of the jitted function can be lowered again."
)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Staging:
    """What later arguments of a staged function are checked against, and what its result is built with."""

    caller: Any  # the Jitted
    plan: Plan  # as it was then: the caller's may have more roots by now
    graphdef: _core.GraphDef
    layout: tuple[Any, ...]
    names: tuple[str, ...]  # of the roots
    entry: _core.Entry  # that of the call
    before: int = 0  # how many of the roots a bound method has given


class _Stage(Generic[P, R]):
    """JAX's own stage, with what graftax adds. All that JAX's offers is reachable by attribute.

    What it says of arguments and result (`args_info`, `out_info`, `in_tree`, `output_shardings`) has their structures.
    """

    def __init__(self, staging: Staging, stage: Any) -> None:
        self._staging, self._stage = staging, stage

    def __getattr__(self, name: str) -> Any:
        if name in ("_stage", "_staging"):  # an instance that was never set up
            raise AttributeError(name)
        return info(self._staging, self._stage, name) if name in NAMES else getattr(self._stage, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._stage)})

    def __repr__(self) -> str:
        return f"<graftax {type(self).__name__} of {self._staging.plan.name}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnpicklableError(NOT_KEPT.format(what=f"{type(self).__name__} function"))


class Traced(_Stage[P, R]):
    """A traced function. Its `jaxpr`, like all of JAX's `Traced`, speaks of the flat leaves."""

    @boundary
    def lower(self, **options: Any) -> Lowered[P, R]:
        """Lowers it; the options are those of JAX's `Traced.lower`."""
        return Lowered(self._staging, self._stage.lower(**options))


class Lowered(_Stage[P, R]):
    """A lowered function."""

    @property
    def lowered(self) -> Any:
        """JAX's own stage, under the name that it has in Equinox."""
        return self._stage

    @boundary
    def compile(self, *args: Any, **options: Any) -> Compiled[P, R]:
        """Compiles it for the backend; the arguments are those of JAX's `Lowered.compile`."""
        with compiling(self._staging.entry, self._staging.caller._table.history):
            return Compiled(self._staging, self._stage.compile(*args, **options))


class Compiled(_Stage[P, R]):
    """A compiled function: takes arguments of the structure and the statics that it was lowered for."""

    @property
    def compiled(self) -> Any:
        """JAX's own stage, under the name that it has in Equinox."""
        return self._stage

    @boundary
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs it.

        Raises:
            StructureError: where the arguments differ from those it was compiled for, naming the places.
            TypeError: where an array has another shape or dtype, naming its path.
        """
        staging, plan = self._staging, self._staging.plan
        roots, layout = staging.caller._bound(args, kwargs, plan)  # pyright: ignore[reportPrivateUsage]
        names, wanted, held = staging.names, staging.layout, plan.signature.held(roots)
        leaves, nodes = matched(plan.name, staging.graphdef, wanted, names, roots, layout, plan.record, in_order=True)
        try:
            given = own_copies(leaves)
            result, written, code = self._stage(tuple(given)) if staging.entry.tupled else self._stage(*given)
        except (TypeError, ValueError) as error:
            rename_leaves(error, leaf_names(staging.graphdef, staging.names))
            raise
        except RuntimeError as error:
            raise staging.caller._explain(error, roots, layout) from error.__cause__  # pyright: ignore[reportPrivateUsage]
        outcome = staging.entry.outcomes[_core.decode(code)]
        out = outcome.apply([*result, *written], leaves, nodes)
        give_back(held)
        return cast(R, out)


class Stageable(_core.Caller, Generic[P, R]):
    """A callable that can be traced and lowered without being run."""

    _plan: Plan

    def _rebind(self) -> None:
        """Reads the function's signature anew: its `__defaults__` were replaced."""
        raise NotImplementedError

    def _look_at(self, recording: _core.Recording, plan: Plan) -> None:
        """Raises NewReads where what the function reads has changed since its signature was read."""
        raise NotImplementedError

    def _shared_entry(
        self, plan: Plan, roots: tuple[Any, ...], layout: tuple[Any, ...], recording: _core.Recording, context: Any
    ) -> _core.Entry:
        """The entry that a call with these roots runs, made where there is none."""
        raise NotImplementedError

    def _reads(self, entry: _core.Entry) -> _core.Reads | None:
        """What an entry that was traced just now depends on."""
        raise NotImplementedError

    def _bound(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan | None = None
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """(roots, layout) of these arguments, with the roots of now or those of a plan.

        Raises the function's own TypeError where it does not take them.
        """
        if not plan and self._has_changed():
            self._rebind()
        binding = plan.signature.binding if plan else self._binding
        if plan and not binding.was_read_from(self._function):
            places = plan.signature.origins
            hidden, assigned = plan.signature.hidden, plan.signature.assigned
            given = plan.signature.skip, plan.options.captured, places, hidden, assigned
            binding = Signature.of(self._function, *given).binding
        bound = binding.bind(args, kwargs, self._prefix)
        if bound is None:
            self._function(*self._prefix, *args, **kwargs)
            raise GraftaxError(f"the arguments of {self._plan.name} could not be bound")
        return bound

    def _anew(self, run: Callable[[], T]) -> T:
        """Runs it, anew with more roots where a trace meets code that reads what is no root yet."""
        for _ in range(MOST_RESTARTS):
            try:
                return run()
            except NewReads:
                self._rebind()
        return run()

    def _prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], _core.Recording]:
        roots, layout = self._bound(args, kwargs)
        plan = self._plan
        if plan.signature.binding is not self._binding:
            raise NewReads  # another thread is about to read the signature anew
        recording = plan.record(roots, layout, shapes=True)
        self._look_at(recording, plan)
        return roots, layout, recording

    def _recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _core.Recording:
        """The roots of a call that is not made, recorded."""
        return self._anew(lambda: self._prepare(args, kwargs))[2]

    @boundary
    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered[P, R]:
        """Lowers the function for these arguments without running it."""
        return Lowered(*self._anew(lambda: self._staged("lower", args, kwargs)))

    @boundary
    def warm(
        self,
        calls: Iterable[tuple[Any, ...] | dict[str, Any]],
        *,
        threads: int = 8,
        progress: Callable[[int, int, float], Any] | None = None,
    ) -> None:
        """Compiles beforehand what calls will need: then they trace and compile nothing.

        Args:
            calls: one a program, each a tuple of positional or a dict of keyword arguments. A
                `jax.ShapeDtypeStruct` may stand for an array. Nothing is run and nothing changes.
            threads: that compile at once. Tracing is done by the thread of the call, one after the other.
            progress: is told of each program that is done: how many are, of how many, seconds. Without it a terminal
                shows a line.

        >>> f = graftax.jit(lambda x, mode: x * 2)
        >>> shapes = [jax.ShapeDtypeStruct((n,), "float32") for n in (8, 16)]
        >>> f.warm([(x, mode) for x in shapes for mode in ("train", "test")])
        >>> f.cache_info().traces
        4
        """
        warm(self.lower, self._plan.name, calls, threads, progress)

    @boundary
    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced[P, R]:
        """Traces the function for these arguments without running it: its `jaxpr` speaks of the flat leaves."""
        return Traced(*self._anew(lambda: self._staged("trace", args, kwargs)))

    def _staged(self, stage: str, args: Any, kwargs: Any) -> tuple[Staging, Any]:
        plan = self._plan
        roots, layout, recording = self._prepare(args, kwargs)
        entry = self._shared_entry(self._plan, roots, layout, recording, _core.settings_now()[0])
        run, leaves = getattr(entry.compiled, stage), recording.leaves
        given = (tuple(leaves),) if entry.tupled else leaves
        staged = _core.run_active(self, roots, entry.outcomes, recording, run, *given)
        if entry.untold:
            entry.tell(self._reads(entry))
        before = len(self._prefix)
        return Staging(self, plan, recording.graphdef, layout, recording.names, entry, before), staged

    @boundary
    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The result with `jax.ShapeDtypeStruct` in place of every array. Changes nothing."""
        return self._anew(lambda: self._shapes(args, kwargs))

    def _shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        roots, layout, recording = self._prepare(args, kwargs)
        shared = self._shared_shapes(roots, layout, recording)
        return shared[0] if shared else self._own_shapes(roots, layout, recording)

    def _shared_shapes(
        self, roots: tuple[Any, ...], layout: tuple[Any, ...], recording: _core.Recording
    ) -> tuple[Any] | None:
        """(the result,) by the trace that a call uses, applied to a copy of the graph. None where it is written to what
        is handed over as itself, or there may be no such trace."""
        if self._table.frozen:
            return None
        entry = self._shared_entry(self._plan, roots, layout, recording, _core.settings_now()[0])
        run = getattr(entry.compiled, "eval_shape", None)
        if run is None:
            return None
        leaves, outcomes = recording.leaves, entry.outcomes
        given = (tuple(leaves),) if entry.tupled else leaves
        result, written, code = _core.run_active(self, roots, outcomes, recording, run, *given)
        if entry.untold:
            entry.tell(self._reads(entry))
        outcome, known = outcomes[_core.decode(code)], [jax.eval_shape(jax.numpy.asarray, leaf) for leaf in leaves]
        _core.record(tuple(known))  # a walk knows the types that a recording has met
        rebuilt, walked = _core.Trace(recording), _core.walk(recording.graphdef, roots)
        copied = context_of(recording)(lambda: _core.walk(recording.graphdef, tuple(rebuilt.rebuild(known))))
        rebuilt.close()
        if walked is None or copied is None or any(walked[1][i] is copied[1][i] for i in outcome.inputs()[2]):
            return None
        return (outcome.apply([*result, *written], known, copied[1]),)

    def _own_shapes(self, roots: tuple[Any, ...], layout: tuple[Any, ...], recording: _core.Recording) -> Any:
        leaves, graphdef = recording.leaves, recording.graphdef
        outcomes: list[_core.Outcome] = []
        donated, _ = leaf_options(self._plan, roots, layout, graphdef, recording.leaves)
        flat = flat_function(self._plan, layout, donated, outcomes, by_value=True, shapes=True)
        shapes, _, code = _core.run_active(self, roots, outcomes, recording, jax.eval_shape, flat, *leaves)
        walked = _core.walk(graphdef, roots)
        if walked is None:
            raise GraftaxError("the arguments changed during eval_shape")
        known = [jax.eval_shape(jax.numpy.asarray, leaf) for leaf in leaves]
        return outcomes[_core.decode(code)].apply(shapes, known, walked[1])


def own_copies(leaves: list[Any]) -> list[Any]:
    """The leaves with private copies of NumPy's: the executable may read them after the call has returned."""
    return [x.copy() if isinstance(x, (np.ndarray, np.generic)) else x for x in leaves]


def matched(
    name: str,
    graphdef: _core.GraphDef,
    layout: tuple[Any, ...],
    names: tuple[str, ...],
    roots: tuple[Any, ...],
    given: tuple[Any, ...],
    record: Callable[[tuple[Any, ...], tuple[Any, ...]], _core.Recording],
    done: str = "compiled",
    again: str = "Lower it again for these",
    in_order: bool = False,
) -> tuple[list[Any], list[Any]]:
    """The leaves and nodes of these roots. Raises where they, or their layout `given`, are not those of `graphdef`.

    `record(roots, layout)` records as `graphdef` was recorded. With `in_order` sets have to iterate in the same order.
    """
    walked = _core.walk(graphdef, roots, in_order=in_order) if given == layout else None
    if walked is not None:
        return walked
    if given != layout:
        extra = [layout[0] if layout else 0, given[0] if given else 0]
        named = [", ".join(map(repr, names[1:])) or "none" for names in (layout, given)]
        found = [
            Difference("extra positional arguments", str(extra[0]), str(extra[1])),
            Difference("extra keyword arguments", named[0], named[1]),
        ]
        text = "\n".join("  " + d.line() for d in found if d.one != d.other)
    else:
        recorded = record(roots, layout).graphdef
        walked = _core.walk(graphdef, roots, in_order=in_order)  # the recording has met classes that no walk knew
        if walked is not None:
            return walked
        text = OTHER_ORDER if in_order and graphdef == recorded else differences_text(graphdef, recorded, names)
    raise StructureError(COMPILED_FOR_OTHERS.format(name=name, done=done, differences=text, again=again))
