# SPDX-License-Identifier: Apache-2.0
"""Functions of any objects along an axis of their arrays, or over the shards of a mesh: `vmap`, `shard_map`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, PartitionSpec
from jax.tree_util import keystr

from .. import _core
from .._compat import inferred_specs, ref_types, varying_axes
from .._errors import (
    DEPENDS_ON_AXIS,
    DIFFERS_BY_SHARD,
    ENTRIES_COUNT,
    NO_MESH_AXIS,
    NO_ROOM_FOR_AXIS,
    NO_SUCH_DIMENSION,
    NOT_INFERRED,
    NOTHING_MAPPED,
    OTHER_SIZE,
    PACK_MAPPED,
    PARTS_INFERRED,
    RESULT_DEPENDS,
    RESULT_DIFFERS,
    RETURNED_OTHERWISE,
    MutationError,
    StructureError,
    rename_leaves,
)
from ..packed import Packed
from ._program import Program, name_of, wraps
from ._specs import UNKNOWN, Constant, Entries, Here, Rule, Spread
from .autodiff import named

_RESULT = "result"


def vmap(
    fun: Callable[..., Any],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Hashable | None = None,
    axis_size: int | None = None,
    spmd_axis_name: Hashable | None = None,
) -> Callable[..., Any]:
    """Maps a function of any objects over an axis of the arrays in its arguments.

    Arrays are mapped, everything else is passed as it is, and static parts of the result come back as they are. What
    the function captures is not mapped. What it changes comes back: in a mapped object with the axis that the arrays
    of that object have; an object that is not mapped may be changed by what does not depend on the mapped axis.

    Args:
        fun: the function.
        in_axes: the axis for each array of the arguments, None where it is not mapped. One axis for all positional
            arguments, or a tuple with an entry for each: an axis; a container, or an object of the argument's class,
            with an axis for each part; a dict of patterns of key paths (`{"**.bias": None, "**": 0}`, the first that
            covers a path counts); or a function of the array. A dict of patterns that begin with the names of
            arguments, or a function, can also stand for all arguments. Keyword arguments are mapped over axis 0, as in
            JAX, where patterns or a function do not say otherwise.
        out_axes: the axis for each array of the result, in the same ways. Where it is None, the array may not depend
            on the mapped axis.
        axis_name, axis_size, spmd_axis_name: as in `jax.vmap`.

    Returns:
        a function of the same arguments with an axis more.

    Raises:
        StructureError: where an entry is missing or does not fit, or one object is reached in two places that are given
            different axes.
        ValueError: where sizes disagree, or there is no such axis; both name the key path.
        MutationError: where an object that is not mapped is changed by something that depends on the mapped axis.

    Example:
        >>> ensemble = {"w": jnp.arange(6.0).reshape(3, 2), "name": "net"}
        >>> graftax.vmap(lambda model, x: model["w"] @ x, in_axes=(0, None))(ensemble, jnp.ones(2))
        Array([1., 5., 9.], dtype=float32)
    """

    return vmap_by(Program, "vmap", fun, in_axes, out_axes, axis_name, axis_size, spmd_axis_name)


def vmap_by(
    make: Callable[..., Program],
    title: str,
    fun: Callable[..., Any],
    in_axes: Any,
    out_axes: Any,
    axis_name: Hashable | None,
    axis_size: int | None,
    spmd_axis_name: Hashable | None,
) -> Callable[..., Any]:
    """`vmap` under another title, with programs that `make` makes."""

    @wraps(fun, title)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        program = make(name_of(fun, title), [fun], args, kwargs)
        inputs = Entries(program.name, "in_axes", _AXIS, None, _is_axis, _canonical_axis)
        spread = _spread(program, inputs, in_axes, 0)
        size = _size(program, spread, axis_size)
        axes = list(spread.entries)
        at = [i for i, axis in enumerate(axes) if axis is not None]
        given = [program.leaves[i] for i in at]
        in_axes_flat = [axes[i] for i in at]
        probe = next((k for k, x in enumerate(given) if not isinstance(x, ref_types)), None)
        if probe is None:  # something that is mapped in any case
            probe = len(given)
            given.append(np.zeros(size, np.bool_))
            in_axes_flat.append(0)
        out: list[Any] = []  # jax.vmap reads it when the function has run
        outputs: list[_Output] = []

        def flat(*values: Any) -> list[Any]:
            leaves = list(program.leaves)
            for i, value in zip(at, values, strict=False):
                leaves[i] = value
            results = inputs._replace(option="out_axes", canonical=functools.partial(_canonical_axis, more=1))
            outputs[:] = _Outputs(program, spread, results, leaves).trace(out_axes)
            _refuse_misfits(program.name, outputs, values[probe])
            out[:] = [o.entry for o in outputs]
            return [o.leaf for o in outputs]

        run = jax.vmap(
            named(flat, program),
            in_axes=tuple(in_axes_flat),
            out_axes=out,
            axis_name=axis_name,
            axis_size=size,
            spmd_axis_name=spmd_axis_name,
        )
        found = run(*given)
        return program.finish(found, untouched={i: o.of for i, o in enumerate(outputs) if o.of is not None})

    return mapped


_AXIS = "an axis (int or None)"
_SHARDING = "a jax.sharding.PartitionSpec"


def _is_axis(entry: Any) -> bool:
    return entry is None or type(entry) is int


def _canonical_axis(entry: Any, leaf: Any, more: int = 0) -> Any:
    return entry + np.ndim(leaf) + more if entry is not None and entry < 0 else entry


def _spread(program: Program, entries: Entries, spec: Any, keyword: Any) -> Spread:
    """A specification of the arguments, brought to the leaves of a program."""
    spread = Spread(program.graphdef, program.names, _rules(program, entries, spec, keyword), program.leaves)
    for i in spread.inside(Packed):
        if spread.entries[i] != entries.nothing:
            raise StructureError(
                PACK_MAPPED.format(name=entries.name, option=entries.option, path=spread.path(i), entry=entries.nothing)
            )
    return spread


def _rules(program: Program, entries: Entries, spec: Any, keyword: Any) -> list[Rule]:
    """One rule a root: what is captured is not mapped; keyword arguments have the entry `keyword`."""
    count = program.positional
    keywords = program.operands - count
    captured = [Constant(entries, entries.nothing)] * (len(program.roots) - program.operands)
    if isinstance(spec, (tuple, list)) and not entries.is_entry(spec):
        each = cast("Sequence[Any]", spec)
        if len(each) != count or (keywords and keyword is UNKNOWN):
            text = "; keyword arguments are not counted" if keyword is not UNKNOWN else ", and no keyword arguments"
            raise ValueError(
                ENTRIES_COUNT.format(
                    name=entries.name, option=entries.option, count=len(each), given=count, keywords=text
                )
            )
        return [*map(entries.rule, each), *[Constant(entries, keyword)] * keywords, *captured]
    rule = spec if isinstance(spec, Rule) else entries.rule(spec, names=True)
    rest = Constant(entries, keyword) if isinstance(rule, Constant) and keyword is not UNKNOWN else rule
    return [*[rule] * count, *[rest] * keywords, *captured]


def _size(program: Program, spread: Spread, axis_size: int | None) -> int:
    """How often the function is mapped."""
    first: tuple[int, int] | None = None  # a leaf, and its size
    for i, (leaf, axis) in enumerate(zip(program.leaves, spread.entries, strict=True)):
        if axis is None:
            continue
        shape: tuple[int, ...] = np.shape(leaf)
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                NO_SUCH_DIMENSION.format(
                    name=program.name, option="in_axes", path=spread.path(i), axis=axis, shape=shape
                )
            )
        expected = first[1] if first else shape[axis] if axis_size is None else axis_size
        if shape[axis] != expected:
            text = f"{spread.path(first[0])} has {expected} along axis {spread.entries[first[0]]}" if first else None
            raise ValueError(
                OTHER_SIZE.format(
                    name=program.name,
                    path=spread.path(i),
                    size=shape[axis],
                    axis=axis,
                    other=text or f"axis_size is {axis_size}",
                )
            )
        first = first or (i, shape[axis])
    if first is None and axis_size is None:
        raise ValueError(NOTHING_MAPPED.format(name=program.name, option="in_axes"))
    return first[1] if first else axis_size  # type: ignore[return-value]


class _Output(NamedTuple):
    """An output leaf of a traced function: of the result, or of what it changed."""

    path: str
    leaf: Any
    entry: Any
    written: bool
    of: int | None  # the leaf of the program that it is, untouched


class _Outputs:
    """Gives each output leaf of a program its entry.

    Args:
        program: the program.
        spread: the entries of its leaves.
        entries: those of its result.
        leaves: what the transform gives in their place.
    """

    def __init__(self, program: Program, spread: Spread, entries: Entries, leaves: Sequence[Any]) -> None:
        self._program, self._spread, self._entries, self._leaves = program, spread, entries, leaves

    def trace(self, spec: Any) -> list[_Output]:
        """Runs the program, whose result has the entries of `spec`."""
        results: list[Any] = []

        def body(functions: list[Callable[..., Any]], operands: list[Any]) -> Any:
            result = functions[0](*operands)
            results.append(result)
            return result

        outcome, out = self._program.trace(self._leaves, body, arrays=True)
        nodes, _, tracks = outcome.inputs()
        split = [(path[0], path[1:]) if tracks else (0, path) for path in outcome.leaf_paths()]
        rule = self._entries.rule(spec)
        whole = None
        if nodes or not isinstance(rule, Constant):  # else it is the same for all
            values, graphdef = _core.flatten(results[0])
            whole = Spread(graphdef, (_RESULT,), [rule], values)
        found: list[_Output] = []
        for i, ((root, path), leaf) in enumerate(zip(split, out, strict=True)):
            if root > 0:
                name, entry = self._spread.written(tracks[root - 1], path, leaf)
            else:
                name = _RESULT + keystr(path)
                entry = whole.at(path) if whole is not None else rule.entry(leaf, Here(lambda: _RESULT, tuple))
            of = self._program.untouched.get(i)
            if of is not None and not self._same(entry, self._spread.entries[of], leaf):
                of = None
            found.append(_Output(name, leaf, entry, root > 0, of))
        if whole is not None and nodes:
            self._check_returned(whole, {path for root, path in split if root == 0}, found)
        return found

    def _check_returned(self, whole: Spread, own: AbstractSet[tuple[Any, ...]], found: Sequence[_Output]) -> None:
        """An object that the function was given, and returns, comes back as it is: is that what was asked for?"""
        entries = self._entries
        has: dict[int, list[Any]] = {}
        for leaf, entry in [*zip(self._leaves, self._spread.entries, strict=True), *((o.leaf, o.entry) for o in found)]:
            has.setdefault(id(leaf), []).append(entry)
        for path, leaf, asked in zip(whole.graphdef.leaf_paths(), whole.leaves, whole.entries, strict=True):
            if path in own or id(leaf) not in has:
                continue
            entry = has[id(leaf)][0]
            if not any(self._same(asked, e, leaf) for e in has[id(leaf)]):
                raise StructureError(
                    RETURNED_OTHERWISE.format(
                        name=entries.name,
                        path=_RESULT + keystr(path),
                        option=entries.option,
                        entry=entry,
                        asked=asked,
                        inputs=self._spread.option,
                    )
                )

    def _same(self, entry: Any, other: Any, leaf: Any) -> bool:
        return self._entries.canonical(entry, leaf) == self._entries.canonical(other, leaf)


def _refuse_misfits(name: str, found: Sequence[_Output], mapped: Any) -> None:
    """An axis has to be one that an output can have, and None may not stand for what depends on the mapped axis.

    `mapped` is an array that does.
    """
    for output in found:
        rank = np.ndim(output.leaf)
        if output.entry is not None and not -rank - 1 <= output.entry <= rank:
            raise ValueError(
                NO_ROOM_FOR_AXIS.format(
                    name=name,
                    option="in_axes" if output.written else "out_axes",
                    path=output.path,
                    axis=output.entry,
                    shape=np.shape(output.leaf),
                )
            )
    asked = [o for o in found if o.entry is None and isinstance(o.leaf, Tracer)]
    depends: list[bool] = []

    @custom_vmap
    def ask(mapped: Any, leaves: Any) -> Any:
        del leaves
        return mapped

    @ask.def_vmap
    def rule(size: int, batched: Any, mapped: Any, leaves: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
        del size, leaves
        depends.extend(batched[1])
        return mapped, True

    if asked:
        ask(mapped, [o.leaf for o in asked])
    for output, bad in zip(asked, depends, strict=True):
        if bad and output.written:
            raise MutationError(DEPENDS_ON_AXIS.format(name=name, path=output.path))
        if bad:
            raise ValueError(RESULT_DEPENDS.format(name=name, path=output.path))


# ---- shards


def shard_map(
    f: Callable[..., Any] | None = None,
    /,
    *,
    out_specs: Any,
    in_specs: Any = inferred_specs,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    axis_names: AbstractSet[Hashable] = frozenset(),
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Maps a function of any objects over the shards of the arrays in its arguments.

    Arrays are sharded, everything else is passed as it is. What the function captures is replicated. What it changes
    comes back, sharded as the argument is; a change to a replicated object has to be the same on every shard, which JAX
    checks.

    Args:
        f: the function; without it, a decorator is returned.
        in_specs: a `PartitionSpec` for each array of the arguments, in the ways of `vmap`'s in_axes. Without it, along
            explicit mesh axes, each array has the one of its own type, as in `jax.shard_map`.
        out_specs: one for each array of the result.
        mesh, axis_names, check_vma: as in `jax.shard_map`.

    Returns:
        a function of the same arguments, of whole arrays.

    Raises:
        StructureError: where a spec is missing or does not fit, or one object is reached in two places that are given
            different specs.

    Example:
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> data = jax.sharding.PartitionSpec("data")
        >>> double = graftax.shard_map(lambda batch: batch["x"] * 2, mesh=mesh, in_specs=data, out_specs=data)
        >>> double({"x": jnp.arange(2.0), "name": "first"})
        Array([0., 2.], dtype=float32)
    """
    if f is None:
        return functools.partial(
            shard_map, out_specs=out_specs, in_specs=in_specs, mesh=mesh, axis_names=axis_names, check_vma=check_vma
        )

    @wraps(f, "shard_map")
    def mapped(*args: Any, **kwargs: Any) -> Any:
        program = Program(name_of(f, "shard_map"), [f], args, kwargs)
        inputs = Entries(program.name, "in_specs", _SHARDING, PartitionSpec(), _is_sharding, _canonical_sharding)
        around = jax.sharding.get_abstract_mesh() if mesh is None else mesh
        known = frozenset(axis_names or around.axis_names)
        specs = _OwnSharding(inputs, around, known, program.leaves) if in_specs is inferred_specs else in_specs
        spread = _spread(program, inputs, specs, UNKNOWN)
        out: list[Any] = []  # jax.shard_map reads it when the function has run
        outputs: list[_Output] = []

        def flat(*leaves: Any) -> list[Any]:
            outputs[:] = _Outputs(program, spread, inputs._replace(option="out_specs"), leaves).trace(out_specs)
            out[:] = [o.entry for o in outputs]
            for output in outputs:
                _check_shards(program.name, output, known, check_vma)
            return [o.leaf for o in outputs]

        run = jax.shard_map(
            named(flat, program),
            mesh=mesh,
            in_specs=tuple(spread.entries),
            out_specs=out,
            axis_names=axis_names,
            check_vma=check_vma,
        )
        try:
            results = run(*program.leaves)
        except ValueError as error:
            paths = [spread.path(i) for i in range(len(program.leaves))]
            rename_leaves(error, paths)
            rename_leaves(error, paths, "in_specs")
            _name_argument(error, program, spread)
            rename_leaves(error, [o.path for o in outputs], "out_specs")
            raise
        # A result is placed on the mesh; what the function left as it was is left so.
        untouched = {i: o.of for i, o in enumerate(outputs) if o.of is not None and o.written}
        return program.finish(results, untouched=untouched)

    return mapped


class _OwnSharding(Rule):
    """For each leaf the sharding of its own type, along the mesh axes that become manual."""

    def __init__(
        self,
        entries: Entries,
        mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
        manual: AbstractSet[Hashable],
        leaves: Sequence[Any],
    ) -> None:
        super().__init__(entries, "own sharding")
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        for axis in sorted(manual & types.keys(), key=str):
            if types[axis] not in (AxisType.Explicit, AxisType.Manual):
                raise TypeError(NOT_INFERRED.format(name=entries.name, axis=axis, type=types[axis]))
        self._manual = manual
        self._known = {id(leaf) for leaf in leaves}

    def entry(self, leaf: Any, here: Here) -> Any:
        if id(leaf) not in self._known:  # new: it has the spec of what is around it
            return UNKNOWN
        spec = jax.typeof(leaf).sharding.spec
        parts: list[Any] = []
        for part in spec:
            axes = part if isinstance(part, tuple) else () if part is None else (part,)
            kept = tuple(axis for axis in axes if axis in self._manual)
            if kept != axes[: len(kept)]:
                text = ", ".join(map(repr, sorted(self._manual, key=str)))
                raise ValueError(PARTS_INFERRED.format(name=self.entries.name, path=here.text(), spec=spec, names=text))
            parts.append(kept if isinstance(part, tuple) and kept else kept[0] if kept else None)
        return spec if tuple(parts) == tuple(spec) else PartitionSpec(*parts)


def _check_shards(name: str, output: _Output, known: AbstractSet[Hashable], check_vma: bool) -> None:
    """Names the place of what JAX would refuse of a result, where it can be told."""
    mentioned = {axis for part in output.entry for axis in (part if isinstance(part, tuple) else (part,)) if part}
    if mentioned - known:
        unknown, names = mentioned - known, ", ".join(map(repr, sorted(known, key=str)))
        raise ValueError(NO_MESH_AXIS.format(name=name, path=output.path, axis=unknown.pop(), names=names))
    differs = sorted((varying_axes(output.leaf) & known) - mentioned, key=str) if check_vma else []
    if not differs:
        return
    if output.written:
        raise MutationError(DIFFERS_BY_SHARD.format(name=name, path=output.path, axis=differs[0]))
    raise ValueError(RESULT_DIFFERS.format(name=name, path=output.path, axis=differs[0], entry=output.entry))


def _name_argument(error: ValueError, program: Program, spread: Spread) -> None:
    """JAX names no path where a spec is not the sharding that an array has along explicit axes."""
    for i, (leaf, entry) in enumerate(zip(program.leaves, spread.entries, strict=True)):
        own = jax.typeof(leaf).sharding.spec
        if "does not match the specs of the input" in str(error) and _canonical_sharding(own, leaf) != (
            _canonical_sharding(entry, leaf)
        ):
            error.args = (str(error).replace("for arg:", f"for {spread.path(i)}:"),)
            return


def _is_sharding(entry: Any) -> bool:
    return isinstance(entry, PartitionSpec)


def _canonical_sharding(entry: Any, leaf: Any) -> Any:
    del leaf
    parts = tuple(entry)
    while parts and parts[-1] is None:
        parts = parts[:-1]
    return parts
