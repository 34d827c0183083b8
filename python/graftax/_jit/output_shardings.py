# SPDX-License-Identifier: Apache-2.0
"""Shardings of outputs: `out_shardings` for a result with parts, and the previous shardings of written arrays."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import jax
import jax.core
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import SequenceKey

from graftax import _core
from graftax._base.errors import rename_leaves, some
from graftax._graph.path import Path
from graftax._graph.patterns import root_entries
from graftax._graph.prefix_tree import ABSENT
from graftax._graph.structure import RootPath, Structure, path_text, place_name, written_path
from graftax._jax.arrays import array_class, is_in_default_memory, kinds_of_shardings
from graftax._jax.compilation import own_jit
from graftax._jax.error_texts import is_output_error
from graftax._jax.tracebacks import hide
from graftax._jit.call_plan import Layout, Plan
from graftax._jit.leaf_names import output_places
from graftax._sharding.frozen_specs import FrozenDict, unwrapped
from graftax._sharding.leaf_shardings import Shardings, has_parts

RETURN = "return"
NO_ROOT = (
    "{name}: out_shardings has an entry for {keys}, and {name} is given {arguments}. The entry 'return' is for the "
    "result; entries for written arrays are names of arguments or patterns of key paths."
)


def by_argument_spec(spec: object) -> dict[Any, Any] | None:
    """The dict `{"m": …, "return": …}` with one entry for each argument and for the result; None for any other spec."""
    return cast("dict[Any, Any]", spec) if isinstance(spec, dict) and RETURN in spec else None


class OutputPlacement:
    """Replaces an entry's `jax.jit` object: picks one whose `out_shardings` are resolved for the leaves of the call.

    Which outputs there are is known only after a trace. So the function is traced once for the shapes, and JAX reuses
    that trace for the call. An array that replaces one of the same shape on a mesh gets its sharding, or the one in
    `in_shardings`. Otherwise XLA would choose one, and the next call would compile again or be refused.

    Args:
        flat: the flat function, which takes leaves or, if `tupled`, one tuple of them.
        options: keyword arguments of `jax.jit`, without `out_shardings`.
        symbols: the leaves that are symbolic numbers.
    """

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        graphdef: _core.GraphDef,
        flat: Callable[..., object],
        options: dict[str, Any],
        outcomes: list[_core.Outcome],
        tupled: bool,
        symbols: Collection[int],
    ) -> None:
        self._plan, self._layout, self._graphdef, self._symbols = plan, layout, graphdef, symbols
        self._flat, self._options, self._outcomes, self._tupled = flat, options, outcomes, tupled
        self._spec = plan.options.out_shardings
        self._spec_has_parts = by_argument_spec(self._spec) is not None or has_parts(self._spec)
        self._begin()
        self._jits: dict[Any, Any] = {}  # by the shardings of the inputs and what JAX compiles for
        self._requested: dict[Any, tuple[Any, ...]] = {}  # by the `jax.jit` object, for each output

    def _begin(self) -> None:
        """Starts over with a copy of the flat function."""
        # JAX caches traces by function. After a trace that raised it would trace the same function twice.
        self._flat = _copy_function(self._flat)
        out_shardings: dict[str, Any] = (
            {} if self._spec is None or self._spec_has_parts else {"out_shardings": (self._spec, None, None)}
        )
        # For calls without a mesh whose spec is one sharding for all: JAX resolves that itself.
        self._plain: Any = own_jit(self._flat, **self._options, **out_shardings)

    def __call__(self, *arguments: object) -> Any:
        try:
            run, arguments = self._select(arguments)
            return self._run_and_recheck(run, arguments, run)
        except Exception as error:
            self._name_outputs(error)
            hide(error)  # nothing of JAX is above this frame
            raise

    def lower(self, *arguments: object) -> Any:
        run, arguments = self._select(arguments)
        try:
            return self._run_and_recheck(run, arguments, run.lower)
        except ValueError as error:
            self._name_outputs(error)
            raise

    def trace(self, *arguments: object) -> Any:
        run, arguments = self._select(arguments)
        return self._run_and_recheck(run, arguments, run.trace)

    def eval_shape(self, *arguments: object) -> Any:
        run, arguments = self._select(arguments)
        return self._run_and_recheck(run, arguments, run.eval_shape)

    def out_shardings(self, *arguments: Any) -> tuple[Any, ...] | None:
        """The sharding of each output of the call, with None for those that XLA chooses; None if it chooses all."""
        run, _ = self._select(arguments)
        return self._requested.get(run)

    def _run_and_recheck(self, run: object, arguments: tuple[object, ...], use: Callable[..., object]) -> Any:
        """Calls or stages with `use`. If JAX had dropped its trace, the new Outcome's shardings are resolved again."""
        count = len(self._outcomes)
        result = use(*arguments)
        if len(self._outcomes) > count and run is not self._plain:
            self._jits.clear()
            self._requested.clear()
            self._select(arguments)
        return result

    def _name_outputs(self, error: Exception) -> None:
        """Puts the key paths of outputs into JAX's error about a sharding, which names outputs of the flat function."""
        if not self._outcomes or not isinstance(error, ValueError) or not is_output_error(error):
            return
        paths = output_places(self._outcomes[-1])
        results = [f"result{path_text(path)}" for root, path in paths if root == 0]
        names = self._plan.signature.root_names(self._layout)
        written = [place_name(path, names) for path in self._root_paths(self._outcomes[-1], paths[len(results) :])]
        rename_leaves(error, results, "result[0]")
        rename_leaves(error, written, "result[1]")

    def _select(self, arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """(the `jax.jit` object for these leaves, its arguments)."""
        leaves = arguments[0] if self._tupled else arguments
        shardings = self._input_shardings(leaves)
        # With one input on a mesh, scalars without a device are put there too: see _replicate_scalar.
        mesh = next((sharding.mesh for sharding in shardings if sharding is not None), None)
        if mesh is not None:
            pairs = zip(leaves, self._requested_inputs(leaves), strict=True)
            leaves = tuple(_replicate_scalar(leaf, mesh) if requested is None else leaf for leaf, requested in pairs)
            arguments = (leaves,) if self._tupled else leaves
            shardings = self._input_shardings(leaves)
        elif not self._spec_has_parts:
            return self._plain, arguments
        key = shardings, tuple(map(_aval_key, leaves))
        run = self._jits.get(key)
        if run is None:
            run = self._jits[key] = self._build(arguments, leaves, shardings)
        return run, arguments

    def _input_shardings(self, leaves: Sequence[object]) -> tuple[Any, ...]:
        """The sharding of each input leaf that is on a mesh; None for the others."""
        pairs = zip(leaves, self._requested_inputs(leaves), strict=True)
        return tuple(
            _mesh_sharding(leaf) if requested is None else _if_on_auto_mesh(requested) for leaf, requested in pairs
        )

    def _requested_inputs(self, leaves: Sequence[object]) -> tuple[Any, ...]:
        return self._options.get("in_shardings") or (None,) * len(leaves)

    def _build(self, arguments: tuple[object, ...], leaves: Sequence[object], shardings: tuple[object, ...]) -> Any:
        # The trace that tells which outputs there are. JAX caches it by the flat function, so the call has the same
        # one.
        try:
            traced = own_jit(self._flat, **self._options) if self._spec_has_parts else self._plain
            result, written, code = traced.eval_shape(*arguments)
        except BaseException:
            self._begin()
            raise
        outcome = self._outcomes[_core.decode(code)]
        paths = output_places(outcome)
        assert len(paths) == len(result) + len(written)
        state: _StateAfterCall | None = None
        if self._spec_has_parts:
            state = _StateAfterCall(self._graphdef, outcome, (*result, *written), self._as_given(leaves))
        graph = Structure(self._graphdef)
        previous = {graph.root_path(row): shardings[row.leaf] for row in graph.leaves}
        of_writes = self._shardings_of_writes(outcome, paths[len(result) :], written, previous, state)
        # One spec for the whole result, or none.
        if state is None:
            of_shared = self._shardings_of_shared_results
            requested = of_shared(outcome, result, previous) if self._spec is None else self._spec
            if not any(of_writes) and requested is self._spec:
                return self._plain
            return self._jit_with_out_shardings(outcome, requested, of_writes, (*result, *written))
        # A spec with a part for each output of the result.
        named = by_argument_spec(self._spec)
        spec = self._spec if named is None else named[RETURN]
        if has_parts(spec):
            result_paths = [path for _, path in paths[: len(result)]]
            resolver = Shardings(self._plan.name, "out_shardings", spec, "the result", part=state.result)
            spec = tuple(resolver.of_leaf(path, path) for path in result_paths)
            resolver.check()
            self._refuse_misfits(result_paths, spec, result)
        return self._jit_with_out_shardings(outcome, unwrapped(spec), of_writes, (*result, *written))

    def _as_given(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves with Python numbers in the places of symbolic ones, which the graph holds."""
        are_numbers = (i in self._symbols and isinstance(leaf, np.generic) for i, leaf in enumerate(leaves))
        return [leaf.item() if is_number else leaf for leaf, is_number in zip(leaves, are_numbers, strict=True)]

    def _jit_with_out_shardings(
        self, outcome: _core.Outcome, spec: object, of_writes: list[Any], arrays: tuple[object, ...]
    ) -> Any:
        """The `jax.jit` object with these `out_shardings`."""
        # An array under several paths stays one array if all of them request one sharding or none; otherwise the paths
        # get separate arrays.
        if outcome.ties:
            count = len(arrays) - len(of_writes)
            requested = [*(spec if isinstance(spec, tuple) else [spec] * count), *of_writes]
            outcome.ties = _ties_with_one_sharding(outcome, requested, arrays)
            spec, of_writes = tuple(requested[:count]), requested[count:]
        run: Any = own_jit(self._flat, **self._options, out_shardings=(spec, tuple(of_writes), None))
        if not isinstance(spec, tuple):
            spec = (spec,) * (len(arrays) - len(of_writes))
        self._requested[run] = (*cast("tuple[Any, ...]", spec), *of_writes)
        return run

    def _refuse_misfits(self, paths: list[tuple[Any, ...]], requested: tuple[Any, ...], arrays: Sequence[Any]) -> None:
        """Raises for a sharding that does not divide its array: some versions of JAX do not name the output."""
        for path, sharding, array in zip(paths, requested, arrays, strict=True):
            if isinstance(sharding, NamedSharding):
                try:
                    sharding.shard_shape(tuple(array.shape))
                except ValueError as error:
                    location = f"{self._plan.name}: out_shardings of key path result{path_text(path)}"
                    error.args = (f"{location}: {error}",)
                    raise

    def _root_paths(self, outcome: _core.Outcome, paths: list[RootPath]) -> list[RootPath]:
        """The paths of written arrays, from the roots of the call."""
        nodes = outcome.inputs()[2]
        return [written_path(self._graphdef, nodes, place) for place in paths]

    def _shardings_of_writes(
        self,
        outcome: _core.Outcome,
        paths: list[RootPath],
        written: Sequence[object],
        previous: dict[RootPath, Any],
        state: _StateAfterCall | None,
    ) -> list[Any]:
        """The sharding of each written array: as requested, or as the array had that it replaces, or None."""
        root_paths = self._root_paths(outcome, paths)
        rows = zip(root_paths, written, self._requested_for_writes(root_paths, state), strict=True)
        return [
            _if_it_divides(previous.get(path), array) if sharding is None else sharding
            for path, array, sharding in rows
        ]

    def _shardings_of_shared_results(
        self, outcome: _core.Outcome, result: Sequence[object], previous: dict[RootPath, Any]
    ) -> tuple[Any, ...] | None:
        """The shardings of result arrays that are written to the caller's objects, too; None if there are none."""
        structure = Structure(outcome)
        output_of = {leaf: i for leaf, i in _output_of_leaf(outcome).items() if i < len(result)}
        shardings: list[Any] = [None] * len(result)
        for row in structure.leaves:
            if row.root > 0 and row.leaf in output_of:
                (path,) = self._root_paths(outcome, [structure.root_path(row)])
                i = output_of[row.leaf]
                shardings[i] = _if_it_divides(previous.get(path), result[i]) or shardings[i]
        return tuple(shardings) if any(shardings) else None

    def _requested_for_writes(self, paths: list[RootPath], state: _StateAfterCall | None) -> list[Any]:
        """The entries of `out_shardings={"m": …, "return": …}` for the written arrays; None for each without one."""
        named = by_argument_spec(self._spec)
        if named is None or state is None:
            return [None] * len(paths)
        names = self._plan.signature.root_names(self._layout)
        parts = {key: value for key, value in named.items() if key != RETURN}
        argument_names = {entry.name for name in names for entry in root_entries(name)[:1]}
        if unknown := [
            key for key in parts if isinstance(key, str) and key.isidentifier() and key not in argument_names
        ]:
            raise ValueError(
                NO_ROOT.format(name=self._plan.name, keys=some(unknown), arguments=some(sorted(argument_names)))
            )
        description = self._plan.name, "out_shardings", FrozenDict(parts.items()), "what is written"
        resolver = Shardings(*description, part=state.root, by_argument=True)
        # Silent: patterns need not cover each written array. What they leave out keeps its sharding.
        resolved = [
            resolver.of_leaf((SequenceKey(root), *path), (*root_entries(names[root]), *path), silent=True)
            for root, path in paths
        ]
        resolver.check()
        return [None if sharding is ABSENT else sharding for sharding in resolved]


class _StateAfterCall:
    """The roots of a call and its result as they will be after it, with shapes instead of new arrays."""

    def __init__(
        self, graphdef: _core.GraphDef, outcome: _core.Outcome, outputs: tuple[object, ...], leaves: Sequence[object]
    ) -> None:
        self._graphdef, self._outcome = graphdef, outcome
        self._leaves = leaves[: graphdef.num_leaves]  # without the two vectors that the host computes
        numbers, arrays = {leaf for leaf, _ in outcome.numbers}, iter(outputs)
        self._outputs_of_call = [0 if i in numbers else next(arrays) for i in range(len(outputs) + len(numbers))]

    @functools.cached_property
    def _roots_and_result(self) -> tuple[tuple[Any, ...], Any]:
        # The Outcome writes to a copy of the arguments, so the caller's objects stay as they are until the call has
        # run.
        roots = _core.unflatten_roots(self._graphdef, list(self._leaves))
        walked = _core.walk(self._graphdef, roots)
        assert walked is not None
        avals = [_abstract(leaf) for leaf in self._leaves]
        return roots, self._outcome.apply(self._outputs_of_call, avals, walked[1])

    def result(self, path: Sequence[object]) -> Any:
        return Path(path).get(self._roots_and_result[1])

    def root(self, path: Sequence[Any]) -> Any:
        return Path(path[1:]).get(self._roots_and_result[0][path[0].idx])


def _copy_function(function: Any) -> Any:
    twin = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, function.__closure__)
    twin.__qualname__ = function.__qualname__  # JAX names it in errors; a new function has that of its code
    vars(twin).update(vars(function))
    return twin


def _output_of_leaf(outcome: _core.Outcome) -> dict[int, int]:
    """The output number of each leaf of an Outcome. Symbolic numbers are not outputs."""
    numbers = {leaf for leaf, _ in outcome.numbers}
    return {leaf: i for i, leaf in enumerate(i for i in range(outcome.num_leaves) if i not in numbers)}


def _ties_with_one_sharding(
    outcome: _core.Outcome, requested: list[Any], arrays: Sequence[Any]
) -> list[tuple[int, int]]:
    """The ties of an Outcome whose paths request compatible shardings. Completes `requested`, one for each output."""
    output_of, groups = _output_of_leaf(outcome), dict[int, list[int]]()
    for leaf, source in outcome.ties:
        groups.setdefault(source, [source]).append(leaf)
    # The paths of one array fall into sets with compatible requests. Each set stays one array, under its first path.
    ties: list[tuple[int, int]] = []
    for group in groups.values():
        first_leaves: list[int] = []
        for leaf in group:
            sharding, ndim = requested[output_of[leaf]], arrays[output_of[leaf]].ndim
            fitting = (first for first in first_leaves if _compatible(requested[output_of[first]], sharding, ndim))
            first = next(fitting, None)
            if first is None:
                first_leaves.append(leaf)
                continue
            ties.append((leaf, first))
            if requested[output_of[first]] is None:
                requested[output_of[first]] = sharding
    return sorted(ties)


def _compatible(first: object, second: object, ndim: int) -> bool:
    if first is None or second is None or first == second:
        return True
    return isinstance(first, Sharding) and isinstance(second, Sharding) and first.is_equivalent_to(second, ndim)


def _aval_key(leaf: object) -> tuple[Any, ...]:
    """The properties of a leaf that JAX compiles for; for a traced Python number, its type."""
    return np.shape(leaf), getattr(leaf, "dtype", type(leaf)), getattr(leaf, "weak_type", True)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.numpy.result_type(leaf)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype)


def may_use_mesh(recording: _core.Recording) -> bool:
    """Can a leaf be on a mesh, now or in a later call with this entry?"""
    if jax.device_count() > 1:  # an array of a later call may be on several
        return True
    kinds = recording.kinds_of_shardings()
    return NamedSharding in (kinds_of_shardings(recording.leaves) if kinds is None else kinds)


def _mesh_sharding(leaf: object) -> Any:
    """The sharding of a leaf on a mesh; None if a new array in its place may go to any device."""
    return None if isinstance(leaf, jax.core.Tracer) else _if_on_auto_mesh(getattr(leaf, "sharding", None))


def _if_on_auto_mesh(sharding: object) -> Any:
    """The sharding if it is on a mesh with automatic axes and the default memory; None otherwise."""
    if type(sharding) is not NamedSharding:
        return None
    if not isinstance(sharding.mesh, Mesh):
        return None
    # With explicit axes the sharding is part of an array's type, so JAX gives results theirs.
    has_explicit_axes = AxisType.Explicit in sharding.mesh.axis_types
    return sharding if is_in_default_memory(sharding) and not has_explicit_axes else None


def _replicate_scalar(leaf: Any, mesh: Mesh) -> Any:
    """Replicates an uncommitted scalar, such as an optimizer's count, over the mesh; returns other leaves unchanged."""
    # The call would replicate it anyway. Its new value is on the mesh, so without this the next call would compile
    # again. Larger arrays are left alone, because XLA may shard them.
    if type(leaf) is not array_class() or leaf.shape != () or leaf.committed:
        return leaf
    sharding = NamedSharding(mesh, PartitionSpec())
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    number = np.asarray(leaf)
    return jax.make_array_from_callback((), sharding, lambda part: number[part])


def _if_it_divides(sharding: Any, array: Any) -> Any:
    """The sharding, if there is one and arrays of this shape can have it; otherwise None."""
    with contextlib.suppress(ValueError):
        if sharding is not None:
            sharding.shard_shape(tuple(array.shape))
            return sharding
    return None
