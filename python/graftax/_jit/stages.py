# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time stages: `trace`, `lower` and `compile`. A compiled stage checks the structure of its arguments."""

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
    "any arguments."
)
OTHER_ORDER = "  a set with the same elements iterates in a different order, or would after a change"
NOT_PICKLABLE = (
    "a {what} belongs to this process and cannot be pickled or copied. graftax.export(f)(*args).serialize() makes "
    "bytes that another process can call; a copy of the jitted function can be lowered again."
)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Staging:
    """What a stage needs to check later arguments and to build the result."""

    caller: Any  # the Jitted
    plan: Plan  # of that time: the caller's plan may have more roots by now
    graphdef: _core.GraphDef
    layout: tuple[Any, ...]
    names: tuple[str, ...]  # of the roots
    entry: _core.Entry  # the one that a call would run
    bound_count: int = 0  # how many roots the bound method provides


class _Stage(Generic[P, R]):
    """Wraps a stage of JAX, whose attributes are available here.

    Those about arguments and result (`args_info`, `out_info`, `in_tree`, `output_shardings`) have the structures of the
    user function instead of the flat ones.
    """

    def __init__(self, staging: Staging, stage: Any) -> None:
        self._staging, self._stage = staging, stage

    def __getattr__(self, name: str) -> Any:
        if name in ("_stage", "_staging"):  # during copy or unpickle, before __init__
            raise AttributeError(name)
        return info(self._staging, self._stage, name) if name in NAMES else getattr(self._stage, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._stage)})

    def __repr__(self) -> str:
        return f"<graftax {type(self).__name__} of {self._staging.plan.name}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnpicklableError(NOT_PICKLABLE.format(what=f"{type(self).__name__} function"))


class Traced(_Stage[P, R]):
    """A traced function. Its `jaxpr` takes and returns flat leaves."""

    @boundary
    def lower(self, **options: Any) -> Lowered[P, R]:
        """Lowers it; the options are those of JAX's `Traced.lower`."""
        return Lowered(self._staging, self._stage.lower(**options))


class Lowered(_Stage[P, R]):
    """A lowered function."""

    @property
    def lowered(self) -> Any:
        """JAX's own stage, under the name that Equinox uses."""
        return self._stage

    @boundary
    def compile(self, *args: Any, **options: Any) -> Compiled[P, R]:
        """Compiles it for the backend; the arguments are those of JAX's `Lowered.compile`."""
        with compiling(self._staging.entry, self._staging.caller._table.history):
            return Compiled(self._staging, self._stage.compile(*args, **options))


class Compiled(_Stage[P, R]):
    """A compiled function: takes arguments with the structure and the static values that it was lowered for."""

    @property
    def compiled(self) -> Any:
        """JAX's own stage, under the name that Equinox uses."""
        return self._stage

    @boundary
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs it.

        Raises:
            StructureError: if the structure or a static value differs; it names the key paths.
            TypeError: if an array has a different shape or dtype; it names its path.
        """
        staging, plan = self._staging, self._staging.plan
        roots, layout = staging.caller._bind_arguments(args, kwargs, plan)  # pyright: ignore[reportPrivateUsage]
        names, layout_expected, captures = staging.names, staging.layout, plan.signature.held(roots)
        leaves, nodes = match_structure(
            plan.name, staging.graphdef, layout_expected, names, roots, layout, plan.record, in_order=True
        )
        try:
            arguments = copy_numpy_leaves(leaves)
            result, written, code = self._stage(tuple(arguments)) if staging.entry.tupled else self._stage(*arguments)
        except (TypeError, ValueError) as error:
            rename_leaves(error, leaf_names(staging.graphdef, staging.names))
            raise
        except RuntimeError as error:
            raise staging.caller._explain(error, roots, layout) from error.__cause__  # pyright: ignore[reportPrivateUsage]
        outcome = staging.entry.outcomes[_core.decode(code)]
        value = outcome.apply([*result, *written], leaves, nodes)
        give_back(captures)
        return cast(R, value)


class Stageable(_core.Caller, Generic[P, R]):
    """A callable that can be traced and lowered without being run."""

    _plan: Plan

    def _rebind(self) -> None:
        """Reads the function's signature again."""
        raise NotImplementedError

    def _restart_if_reads_changed(self, recording: _core.Recording, plan: Plan) -> None:
        """Raises NewReads if the set of what the function reads has changed since its signature was read."""
        raise NotImplementedError

    def _find_or_build_entry(
        self, plan: Plan, roots: tuple[Any, ...], layout: tuple[Any, ...], recording: _core.Recording, context: Any
    ) -> _core.Entry:
        """The cache entry that a call with these roots runs. Builds and stores one if there is none."""
        raise NotImplementedError

    def _reads(self, entry: _core.Entry) -> _core.Reads | None:
        """The reads that an entry which was just traced depends on."""
        raise NotImplementedError

    def _bind_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan | None = None
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """(roots, layout) of these arguments, with the current roots or those of a `plan`.

        Raises the function's own TypeError if it does not take these arguments.
        """
        if not plan and self._has_changed():
            self._rebind()
        binding = plan.signature.binding if plan else self._binding
        if plan and not binding.was_read_from(self._function):
            origins = plan.signature.origins
            hidden, assigned = plan.signature.hidden, plan.signature.assigned
            signature_options = plan.signature.skip, plan.options.captured, origins, hidden, assigned
            binding = Signature.of(self._function, *signature_options).binding
        bound = binding.bind(args, kwargs, self._prefix)
        if bound is None:
            self._function(*self._prefix, *args, **kwargs)
            raise GraftaxError(f"the arguments of {self._plan.name} could not be bound")
        return bound

    def _retry_with_new_roots(self, run: Callable[[], T]) -> T:
        """Calls `run`, and retries with more roots each time that a trace finds another global or capture."""
        for _ in range(MOST_RESTARTS):
            try:
                return run()
            except NewReads:
                self._rebind()
        return run()

    def _record_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], _core.Recording]:
        roots, layout = self._bind_arguments(args, kwargs)
        plan = self._plan
        if plan.signature.binding is not self._binding:
            raise NewReads  # another thread is about to read the signature again
        recording = plan.record(roots, layout, shapes=True)
        self._restart_if_reads_changed(recording, plan)
        return roots, layout, recording

    def _record_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _core.Recording:
        """Records the arguments of a call without making it."""
        return self._retry_with_new_roots(lambda: self._record_arguments(args, kwargs))[2]

    @boundary
    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered[P, R]:
        """Lowers the function for these arguments without running it."""
        return Lowered(*self._retry_with_new_roots(lambda: self._staged("lower", args, kwargs)))

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
        """Traces the function for these arguments without running it: its `jaxpr` takes and returns flat leaves."""
        return Traced(*self._retry_with_new_roots(lambda: self._staged("trace", args, kwargs)))

    def _staged(self, stage: str, args: Any, kwargs: Any) -> tuple[Staging, Any]:
        plan = self._plan
        roots, layout, recording = self._record_arguments(args, kwargs)
        entry = self._find_or_build_entry(self._plan, roots, layout, recording, _core.settings_now()[0])
        run, leaves = getattr(entry.compiled, stage), recording.leaves
        flat_arguments = (tuple(leaves),) if entry.tupled else leaves
        staged = _core.run_active(self, roots, entry.outcomes, recording, run, *flat_arguments)
        if entry.untold:
            entry.tell(self._reads(entry))
        bound_count = len(self._prefix)
        return Staging(self, plan, recording.graphdef, layout, recording.names, entry, bound_count), staged

    @boundary
    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The result with `jax.ShapeDtypeStruct` in place of every array. Changes nothing."""
        return self._retry_with_new_roots(lambda: self._shapes(args, kwargs))

    def _shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        roots, layout, recording = self._record_arguments(args, kwargs)
        shared = self._shapes_from_entry(roots, layout, recording)
        return shared[0] if shared else self._shapes_from_own_trace(roots, layout, recording)

    def _shapes_from_entry(
        self, roots: tuple[Any, ...], layout: tuple[Any, ...], recording: _core.Recording
    ) -> tuple[Any] | None:
        """(the result,) from the trace that a call uses, applied to a copy of the graph.

        None if the function may not be traced now (frozen), or changes an object that cannot be copied.
        """
        if self._table.frozen:
            return None
        entry = self._find_or_build_entry(self._plan, roots, layout, recording, _core.settings_now()[0])
        run = getattr(entry.compiled, "eval_shape", None)
        if run is None:
            return None
        leaves, outcomes = recording.leaves, entry.outcomes
        flat_arguments = (tuple(leaves),) if entry.tupled else leaves
        result, written, code = _core.run_active(self, roots, outcomes, recording, run, *flat_arguments)
        if entry.untold:
            entry.tell(self._reads(entry))
        outcome, avals = outcomes[_core.decode(code)], [jax.eval_shape(jax.numpy.asarray, leaf) for leaf in leaves]
        _core.record(tuple(avals))  # a walk can handle only types that a recording has seen
        rebuilt, walked = _core.Trace(recording), _core.walk(recording.graphdef, roots)
        copied = context_of(recording)(lambda: _core.walk(recording.graphdef, tuple(rebuilt.rebuild(avals))))
        rebuilt.close()
        if walked is None or copied is None or any(walked[1][i] is copied[1][i] for i in outcome.inputs()[2]):
            return None
        return (outcome.apply([*result, *written], avals, copied[1]),)

    def _shapes_from_own_trace(
        self, roots: tuple[Any, ...], layout: tuple[Any, ...], recording: _core.Recording
    ) -> Any:
        leaves, graphdef = recording.leaves, recording.graphdef
        outcomes: list[_core.Outcome] = []
        donated, _ = leaf_options(self._plan, roots, layout, graphdef, recording.leaves)
        flat = flat_function(self._plan, layout, donated, outcomes, by_value=True, shapes=True)
        shapes, _, code = _core.run_active(self, roots, outcomes, recording, jax.eval_shape, flat, *leaves)
        walked = _core.walk(graphdef, roots)
        if walked is None:
            raise GraftaxError("the arguments changed during eval_shape")
        avals = [jax.eval_shape(jax.numpy.asarray, leaf) for leaf in leaves]
        return outcomes[_core.decode(code)].apply(shapes, avals, walked[1])


def copy_numpy_leaves(leaves: list[Any]) -> list[Any]:
    """The leaves with copies of NumPy arrays, which the executable may still read after the call has returned."""
    return [x.copy() if isinstance(x, (np.ndarray, np.generic)) else x for x in leaves]


def match_structure(
    name: str,
    graphdef: _core.GraphDef,
    layout: tuple[Any, ...],
    names: tuple[str, ...],
    roots: tuple[Any, ...],
    layout_given: tuple[Any, ...],
    record: Callable[[tuple[Any, ...], tuple[Any, ...]], _core.Recording],
    verb: str = "compiled",
    remedy: str = "Lower it again for these",
    in_order: bool = False,
) -> tuple[list[Any], list[Any]]:
    """(leaves, nodes) of these roots. Raises if their structure is not `graphdef` or their layout is not `layout`.

    Args:
        name: of the function, for messages; so are `names`, `verb` and `remedy`.
        graphdef, layout: what is expected.
        roots, layout_given: the arguments.
        record: `record(roots, layout)` records as `graphdef` was recorded.
        in_order: sets have to iterate in the same order, too.
    """
    walked = _core.walk(graphdef, roots, in_order=in_order) if layout_given == layout else None
    if walked is not None:
        return walked
    if layout_given != layout:
        extra = [layout[0] if layout else 0, layout_given[0] if layout_given else 0]
        named = [", ".join(map(repr, names[1:])) or "none" for names in (layout, layout_given)]
        differing = [
            Difference("extra positional arguments", str(extra[0]), str(extra[1])),
            Difference("extra keyword arguments", named[0], named[1]),
        ]
        text = "\n".join("  " + difference.line() for difference in differing if difference.one != difference.other)
    else:
        recorded = record(roots, layout).graphdef
        walked = _core.walk(
            graphdef, roots, in_order=in_order
        )  # the recording has described classes that the walk did not know
        if walked is not None:
            return walked
        text = OTHER_ORDER if in_order and graphdef == recorded else differences_text(graphdef, recorded, names)
    raise StructureError(COMPILED_FOR_OTHERS.format(name=name, done=verb, differences=text, again=remedy))
