# SPDX-License-Identifier: Apache-2.0
"""Where outputs go: what `out_shardings` says of a result with parts, and the shardings that written arrays had."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
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
from graftax._graph.structure import Place, Structure, path_text, place_name
from graftax._jax import fast_dispatch
from graftax._jax.compat import array_class, is_of_an_output
from graftax._jax.tracebacks import hide
from graftax._jit.call_plan import Layout, Plan
from graftax._sharding.frozen_specs import FrozenDict, UnhashableSpec
from graftax._sharding.leaf_shardings import Shardings, has_parts

RETURN = "return"
NO_ROOT = (
    "{name}: out_shardings has an entry for {keys}, and {name} is given {known}. The result has the entry 'return', "
    "and what is written has those of arguments, or patterns of key paths."
)


def by_place(spec: Any) -> dict[Any, Any] | None:
    """`{"m": …, "return": …}`: what is said of written arrays, by the places of arguments, and of the result."""
    return cast("dict[Any, Any]", spec) if isinstance(spec, dict) and RETURN in spec else None


def of_result(spec: Any) -> Any:
    named = by_place(spec)
    return spec if named is None else named[RETURN]


class Placing:
    """Stands in the place of an entry's `jax.jit` object. Each call has one whose `out_shardings` are spelled out.

    Which output is what is known after a trace: it is made once for the shapes, and JAX takes the same for the call. An
    array that is written where one was that a mesh has, of the same shape, gets the sharding of that one, or what
    `in_shardings` says: XLA would put it anywhere, and the next call compile again, or be refused.

    Args:
        plan: of the function.
        layout, graphdef: of the call.
        flat: the function that JAX sees, of leaves or, `tupled`, of one tuple of them.
        options: of `jax.jit`, without `out_shardings`.
        outcomes: of the entry.
    """

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        graphdef: _core.GraphDef,
        flat: Callable[..., Any],
        options: dict[str, Any],
        outcomes: list[_core.Outcome],
        tupled: bool,
    ) -> None:
        self._plan, self._layout, self._graphdef = plan, layout, graphdef
        self._flat, self._options, self._outcomes, self._tupled = flat, options, outcomes, tupled
        self._spec = plan.options.out_shardings
        self._parts = by_place(self._spec) is not None or has_parts(self._spec)
        self._begin()
        self._known: dict[Any, Any] = {}

    def _begin(self) -> None:
        """With a function new to JAX: of one whose first trace has raised it keeps no trace, and makes two."""
        self._flat = _copied(self._flat)
        one: dict[str, Any] = {} if self._spec is None or self._parts else {"out_shardings": (self._spec, None, None)}
        self._plain: Any = jax.jit(self._flat, **self._options, **one)

    def __call__(self, *given: Any) -> Any:
        try:
            run, given = self._run(given)
            return self._settled(run, given, run)
        except Exception as error:
            self._name_outputs(error)
            hide(error)  # nothing of JAX is above this frame
            raise

    def lower(self, *given: Any) -> Any:
        run, given = self._run(given)
        try:
            return self._settled(run, given, run.lower)
        except ValueError as error:
            self._name_outputs(error)
            raise

    def trace(self, *given: Any) -> Any:
        run, given = self._run(given)
        return self._settled(run, given, run.trace)

    def _settled(self, run: Any, given: tuple[Any, ...], use: Callable[..., Any]) -> Any:
        """Uses a `jax.jit` object. Where JAX has forgotten its trace, what the new one found is looked at as well."""
        count = len(self._outcomes)
        out = use(*given)
        if len(self._outcomes) > count and run is not self._plain:
            self._known.clear()
            self._run(given)
        return out

    def _name_outputs(self, error: Exception) -> None:
        """The key paths of outputs in JAX's error about a sharding: the flat function returns results and writes."""
        if not self._outcomes or not isinstance(error, ValueError) or not is_of_an_output(error):
            return
        places = self._places(self._outcomes[-1])
        results = [f"result{path_text(path)}" for root, path in places if root == 0]
        names = self._plan.signature.root_names(self._layout)
        written = [place_name(place, names) for place in self._full(self._outcomes[-1], places[len(results) :])]
        rename_leaves(error, results, "result[0]")
        rename_leaves(error, written, "result[1]")

    def _run(self, given: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The `jax.jit` object for these leaves, and what it is given."""
        leaves = given[0] if self._tupled else given
        shardings = self._before(leaves)
        mesh = next((sharding.mesh for sharding in shardings if sharding is not None), None)
        if mesh is not None:
            pairs = zip(leaves, self._wanted(leaves), strict=True)
            leaves = tuple(_on_mesh(leaf, mesh) if wanted is None else leaf for leaf, wanted in pairs)
            given = (leaves,) if self._tupled else leaves
            shardings = self._before(leaves)
        elif not self._parts:
            return self._plain, given
        key = shardings, tuple(map(_shape, leaves))
        run = self._known.get(key)
        if run is None:
            run = self._known[key] = self._made(given, leaves, shardings)
        return run, given

    def _before(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The sharding of each leaf when the function begins, as far as a mesh has it."""
        pairs = zip(leaves, self._wanted(leaves), strict=True)
        return tuple(_kept(leaf) if wanted is None else _usual(wanted) for leaf, wanted in pairs)

    def _wanted(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        return self._options.get("in_shardings") or (None,) * len(leaves)

    def _made(self, given: tuple[Any, ...], leaves: Sequence[Any], shardings: tuple[Any, ...]) -> Any:
        try:
            looked_at = jax.jit(self._flat, **self._options) if self._parts else self._plain
            result, written, code = looked_at.eval_shape(*given)
        except BaseException:
            self._begin()
            raise
        outcome = self._outcomes[_core.decode(code)]
        places = self._places(outcome)
        assert len(places) == len(result) + len(written)
        after = _After(self._graphdef, outcome, (*result, *written), leaves) if self._parts else None
        of_written = self._of_written(outcome, places[len(result) :], written, shardings, after)
        if after is None:
            wanted = self._spec if self._spec is not None else self._of_shared(outcome, result, shardings)
            if not any(of_written) and wanted is self._spec:
                return self._plain
            return self._placed(outcome, wanted, of_written, (*result, *written))
        spec = of_result(self._spec)
        if has_parts(spec):
            paths = [path for _, path in places[: len(result)]]
            read = Shardings(self._plan.name, "out_shardings", spec, "the result", part=after.result)
            spec = tuple(read.of_leaf(path, path) for path in paths)
            read.check()
            self._refuse_misfits(paths, spec, result)
        elif isinstance(spec, UnhashableSpec):
            spec = spec.value
        return self._placed(outcome, spec, of_written, (*result, *written))

    def _placed(self, outcome: _core.Outcome, spec: Any, of_written: list[Any], out: tuple[Any, ...]) -> Any:
        """The `jax.jit` object whose outputs go where they are asked to be.

        An array in several places is one where all ask for the same, or for nothing. Of other places each has its own.
        """
        if outcome.ties:
            count = len(out) - len(of_written)
            asked = [*(spec if isinstance(spec, tuple) else [spec] * count), *of_written]
            outcome.ties = _kept_ties(outcome, asked, out)
            spec, of_written = tuple(asked[:count]), asked[count:]
        return jax.jit(self._flat, **self._options, out_shardings=(spec, tuple(of_written), None))

    def _refuse_misfits(self, paths: list[tuple[Any, ...]], wanted: tuple[Any, ...], arrays: Sequence[Any]) -> None:
        """Raises for a sharding that does not divide its array: not every version of JAX says which."""
        for path, sharding, array in zip(paths, wanted, arrays, strict=True):
            if isinstance(sharding, NamedSharding):
                try:
                    sharding.shard_shape(tuple(array.shape))
                except ValueError as error:
                    place = f"{self._plan.name}: out_shardings of key path result{path_text(path)}"
                    error.args = (f"{place}: {error}",)
                    raise

    @staticmethod
    def _places(outcome: _core.Outcome) -> list[Place]:
        numbers = {leaf for leaf, _ in outcome.numbers}  # symbols are no outputs
        return [place for i, place in enumerate(outcome.leaf_places()) if i not in numbers]

    def _full(self, outcome: _core.Outcome, places: list[Place]) -> list[Place]:
        """The places of what is written, from the roots of the call on."""
        nodes, full = outcome.inputs()[2], list[Place]()
        for write, path in places:
            root, above = self._graphdef._node_place(nodes[write - 1])  # pyright: ignore[reportPrivateUsage]
            full.append((root, (*above, *path)))
        return full

    def _of_written(
        self,
        outcome: _core.Outcome,
        places: list[tuple[int, tuple[Any, ...]]],
        written: Sequence[Any],
        shardings: tuple[Any, ...],
        after: _After | None,
    ) -> list[Any]:
        structure, full = Structure(self._graphdef), self._full(outcome, places)
        before = {structure.place(row): row.leaf for row in structure.leaves}
        said = self._said(full, after)
        out: list[Any] = []
        for place, array, wanted in zip(full, written, said, strict=True):
            at = before.get(place)
            kept = shardings[at] if at is not None else None
            out.append(wanted if wanted is not None else kept if kept is not None and _fits(kept, array) else None)
        return out

    def _of_shared(
        self, outcome: _core.Outcome, result: Sequence[Any], shardings: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """What arrays of the result have to keep where they are written as well; None where there are none."""
        structure, before = Structure(outcome), Structure(self._graphdef)
        at = {leaf: i for leaf, i in _outputs(outcome).items() if i < len(result)}
        known = {before.place(row): row.leaf for row in before.leaves}
        out: list[Any] = [None] * len(result)
        for row in structure.leaves:
            if row.root == 0 or row.leaf not in at:
                continue
            leaf = known.get(self._full(outcome, [structure.place(row)])[0])
            kept = shardings[leaf] if leaf is not None else None
            if kept is not None and _fits(kept, result[at[row.leaf]]):
                out[at[row.leaf]] = kept
        return tuple(out) if any(out) else None

    def _said(self, places: list[Place], after: _After | None) -> list[Any]:
        """What `out_shardings={"m": …, "return": …}` says of the written arrays."""
        named = by_place(self._spec)
        if named is None or after is None:
            return [None] * len(places)
        names = self._plan.signature.root_names(self._layout)
        parts = {key: value for key, value in named.items() if key != RETURN}
        known = {entry.name for name in names for entry in root_entries(name)[:1]}
        if strange := [key for key in parts if isinstance(key, str) and key.isidentifier() and key not in known]:
            raise ValueError(NO_ROOT.format(name=self._plan.name, keys=some(strange), known=some(sorted(known))))
        about = self._plan.name, "out_shardings", FrozenDict(parts.items()), "what is written"
        read = Shardings(*about, part=after.root, by_argument=True)
        out = [
            read.of_leaf((SequenceKey(root), *path), (*root_entries(names[root]), *path), silent=True)
            for root, path in places
        ]
        read.check()
        return [None if wanted is ABSENT else wanted for wanted in out]


class _After:
    """The roots of a call and its result as they are after it, with shapes in place of new arrays."""

    def __init__(
        self, graphdef: _core.GraphDef, outcome: _core.Outcome, out: tuple[Any, ...], leaves: Sequence[Any]
    ) -> None:
        self._graphdef, self._outcome = graphdef, outcome
        self._leaves = leaves[: graphdef.num_leaves]  # without what the host computes
        numbers, arrays = {leaf for leaf, _ in outcome.numbers}, iter(out)
        self._out = [0 if i in numbers else next(arrays) for i in range(len(out) + len(numbers))]

    @functools.cached_property
    def _both(self) -> tuple[tuple[Any, ...], Any]:
        roots = _core.unflatten_roots(self._graphdef, list(self._leaves))
        walked = _core.walk(self._graphdef, roots)
        assert walked is not None
        known = [_abstract(leaf) for leaf in self._leaves]
        return roots, self._outcome.apply(self._out, known, walked[1])

    def result(self, path: Sequence[Any]) -> Any:
        return Path(path).get(self._both[1])

    def root(self, path: Sequence[Any]) -> Any:
        return Path(path[1:]).get(self._both[0][path[0].idx])


def _copied(function: Any) -> Any:
    out = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, function.__closure__)
    vars(out).update(vars(function))
    return out


def _outputs(outcome: _core.Outcome) -> dict[int, int]:
    """Which output each leaf of an Outcome is. Symbols are none."""
    numbers = {leaf for leaf, _ in outcome.numbers}
    return {leaf: i for i, leaf in enumerate(i for i in range(outcome.num_leaves) if i not in numbers)}


def _kept_ties(outcome: _core.Outcome, asked: list[Any], out: Sequence[Any]) -> list[tuple[int, int]]:
    """The ties of an Outcome whose places ask for one sharding. `asked`, of each output, is told for which."""
    at, groups = _outputs(outcome), dict[int, list[int]]()
    for leaf, first in outcome.ties:
        groups.setdefault(first, [first]).append(leaf)
    kept: list[tuple[int, int]] = []
    for group in groups.values():
        leaders: list[int] = []
        for leaf in group:
            wanted, ndim = asked[at[leaf]], out[at[leaf]].ndim
            lead = next((one for one in leaders if _agree(asked[at[one]], wanted, ndim)), None)
            if lead is None:
                leaders.append(leaf)
                continue
            kept.append((leaf, lead))
            asked[at[lead]] = wanted if asked[at[lead]] is None else asked[at[lead]]
    return sorted(kept)


def _agree(one: Any, other: Any, ndim: int) -> bool:
    if one is None or other is None or one == other:
        return True
    return isinstance(one, Sharding) and isinstance(other, Sharding) and one.is_equivalent_to(other, ndim)


def _shape(leaf: Any) -> tuple[Any, ...]:
    """What of a leaf JAX compiles for; of a Python number that is traced, its type."""
    return np.shape(leaf), getattr(leaf, "dtype", type(leaf)), getattr(leaf, "weak_type", True)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.numpy.result_type(leaf)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype)


def spread(recording: _core.Recording) -> bool:
    """Can one of its leaves be on a mesh, or become so?"""
    if jax.device_count() > 1:
        return True
    kinds = recording.kinds_of_shardings()
    return NamedSharding in (fast_dispatch.kinds_of_shardings(recording.leaves) if kinds is None else kinds)


def _kept(leaf: Any) -> Any:
    """The sharding of a leaf that a mesh has; None where what is written in its place may go anywhere."""
    return None if isinstance(leaf, jax.core.Tracer) else _usual(getattr(leaf, "sharding", None))


def _usual(sharding: Any) -> Any:
    """The sharding, where it is one of a mesh that JAX assigns by itself; None for others."""
    if type(sharding) is not NamedSharding:
        return None
    if not isinstance(sharding.mesh, Mesh):
        return None
    usual = sharding.memory_kind in (None, sharding.mesh.devices.flat[0].default_memory().kind)
    return sharding if usual and AxisType.Explicit not in sharding.mesh.axis_types else None


def _on_mesh(leaf: Any, mesh: Mesh) -> Any:
    """A leaf; a scalar that was put nowhere (the count of an optimizer) as the copies of it that the call makes anyway.

    What replaces it is on the mesh: without this the next call would compile again. Of larger arrays XLA may split one.
    """
    if type(leaf) is not array_class() or leaf.shape != () or leaf.committed:
        return leaf
    sharding = NamedSharding(mesh, PartitionSpec())
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    number = np.asarray(leaf)
    return jax.make_array_from_callback((), sharding, lambda part: number[part])


def _fits(sharding: Any, array: Any) -> bool:
    try:
        sharding.shard_shape(tuple(array.shape))
    except ValueError:
        return False
    return True
