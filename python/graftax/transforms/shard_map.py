# SPDX-License-Identifier: Apache-2.0
"""Functions of any objects over the shards of a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax
from jax.sharding import AxisType, PartitionSpec

from graftax._base.errors import MutationError, rename_leaves
from graftax._jax.arrays import inferred_specs, varying_axes
from graftax._jax.error_texts import is_of_specs, name_argument_of_specs
from graftax._jax.tracebacks import boundary
from graftax.transforms._engine.argument_specs import OutputLeaf, broadcast_of, trace_outputs
from graftax.transforms._engine.lift import name_of, named, wraps
from graftax.transforms._engine.program import Program
from graftax.transforms._engine.spec_broadcast import Broadcast
from graftax.transforms._engine.specs import UNKNOWN, LeafContext, Spec, SpecOption

P = ParamSpec("P")
R = TypeVar("R")

NO_MESH_AXIS = "{name}: out_specs names the axis {axis!r} for {path}, and the mesh has {names}."
NOT_INFERRED = (
    "{name}: in_specs can be inferred along explicit mesh axes only, and {axis!r} is of type {type}. Give in_specs, or "
    "make the mesh with axis_types=(jax.sharding.AxisType.Explicit, ...)."
)
PARTS_INFERRED = (
    "{name}: {path} is sharded as {spec}, and the part along {names} cannot be inferred by itself: give in_specs, or "
    "reshard it (jax.sharding.reshard)."
)
DIFFERS_BY_SHARD = (
    "{name} changes {path} to something that differs along the mesh axis {axis!r}, over which {path} is replicated. "
    "Reduce it (jax.lax.pmean, psum), return it as part of the result, or shard the object with in_specs."
)
RESULT_DIFFERS = (
    "{name}: out_specs has {entry!r} for {path}, which differs along the mesh axis {axis!r}. Name that axis there, or "
    "reduce the value (jax.lax.pmean, psum)."
)


class ShardMapOptions(TypedDict, total=False):
    """The keyword arguments of `shard_map` that may be left out, for type checkers."""

    in_specs: Any
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None
    axis_names: AbstractSet[Hashable]
    check_vma: bool


@overload
def shard_map(f: Callable[P, R], /, *, out_specs: Any, **options: Unpack[ShardMapOptions]) -> Callable[P, R]: ...
@overload
def shard_map(*, out_specs: Any, **options: Unpack[ShardMapOptions]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@boundary
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

    Arrays are sharded, everything else is passed as it is. Captured variables are replicated. A change keeps
    the sharding of the argument; a change to a replicated object has to be the same on every shard, which JAX checks.

    Args:
        f: the function; without it, a decorator is returned.
        in_specs: a `PartitionSpec` for each array of the arguments, in the ways of `vmap`'s in_axes. Without it, along
            explicit mesh axes, each array has the one of its own type, as in `jax.shard_map`.
        out_specs: one for each array of the result.
        mesh, axis_names, check_vma: as in `jax.shard_map`.

    Returns:
        a function of the same arguments, of whole arrays.

    Raises:
        StructureError: if a spec is missing or does not fit, or one object is reached in two places that are given
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
    def mapped(*args: object, **kwargs: object) -> Any:
        program = Program(name_of(f, "shard_map"), [f], args, kwargs)
        return _run(program, in_specs, out_specs, mesh, axis_names, check_vma)

    return mapped


def _run(
    program: Program,
    in_specs: Any,
    out_specs: Any,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None,
    axis_names: AbstractSet[Hashable],
    check_vma: bool,
) -> Any:
    """Runs a program on each shard, writes its changes back and returns its result."""
    expected = "a jax.sharding.PartitionSpec"
    inputs = SpecOption(program.name, "in_specs", expected, PartitionSpec(), _is_sharding, _canonical_sharding)
    current_mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    manual_axes = frozenset(axis_names or current_mesh.axis_names)
    is_inferred = in_specs is inferred_specs
    specs = _OwnSharding(inputs, current_mesh, manual_axes, program.leaves) if is_inferred else in_specs
    broadcast = broadcast_of(program, inputs, specs, UNKNOWN)
    flat_out_specs: list[Any] = []  # jax.shard_map reads this list after `flat` has filled it
    outputs: list[OutputLeaf] = []

    def flat(*leaves: Any) -> list[Any]:
        outputs[:] = trace_outputs(program, broadcast, inputs._replace(keyword="out_specs"), leaves, out_specs)
        flat_out_specs[:] = [o.spec for o in outputs]
        for output in outputs:
            _check_shards(program.name, output, manual_axes, check_vma)
        return [o.leaf for o in outputs]

    run = jax.shard_map(
        named(flat, program),
        mesh=mesh,
        in_specs=tuple(broadcast.leaf_specs),
        out_specs=flat_out_specs,
        axis_names=axis_names,
        check_vma=check_vma,
    )
    try:
        results = run(*program.leaves)
    # JAX names the arguments of `flat`: its messages get the key paths of the user's objects.
    except ValueError as error:
        paths = [broadcast.path(i) for i in range(len(program.leaves))]
        rename_leaves(error, paths)
        rename_leaves(error, paths, "in_specs")
        _name_argument(error, program, broadcast)
        rename_leaves(error, [o.path for o in outputs], "out_specs")
        raise
    # As in JAX, a returned array is placed on the mesh, but an unchanged array in an object stays the caller's.
    untouched = {i: o.input_leaf for i, o in enumerate(outputs) if o.input_leaf is not None and o.is_write}
    return program.finish(results, untouched=untouched)


class _OwnSharding(Spec):
    """The spec for inferred `in_specs`: each leaf keeps the sharding of its type along the manual mesh axes."""

    def __init__(
        self,
        option: SpecOption,
        mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
        manual: AbstractSet[Hashable],
        leaves: Sequence[object],
    ) -> None:
        super().__init__(option, "own sharding")
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        for axis in sorted(manual & types.keys(), key=str):
            if types[axis] not in (AxisType.Explicit, AxisType.Manual):
                raise TypeError(NOT_INFERRED.format(name=option.name, axis=axis, type=types[axis]))
        self._manual = manual
        self._leaf_ids = {id(leaf) for leaf in leaves}

    def leaf_spec(self, leaf: Any, context: LeafContext) -> Any:
        # A leaf that the function adds gets the spec of the node's other leaves.
        if id(leaf) not in self._leaf_ids:
            return UNKNOWN
        spec = jax.typeof(leaf).sharding.spec
        parts: list[Any] = []
        for part in spec:
            axes = part if isinstance(part, tuple) else () if part is None else (part,)
            # Of axes that split one dimension together, those outside have to be the manual ones.
            manual_axes = tuple(axis for axis in axes if axis in self._manual)
            if manual_axes != axes[: len(manual_axes)]:
                text = ", ".join(map(repr, sorted(self._manual, key=str)))
                raise ValueError(
                    PARTS_INFERRED.format(name=self.option.name, path=context.text(), spec=spec, names=text)
                )
            parts.append(
                manual_axes if isinstance(part, tuple) and manual_axes else manual_axes[0] if manual_axes else None
            )
        return spec if tuple(parts) == tuple(spec) else PartitionSpec(*parts)


def _check_shards(name: str, output: OutputLeaf, manual_axes: AbstractSet[Hashable], check_vma: bool) -> None:
    """Raises the errors that JAX would raise for a result, but with its key path."""
    # An array may differ only along axes that its spec mentions; JAX knows along which it varies.
    mentioned = {axis for part in output.spec for axis in (part if isinstance(part, tuple) else (part,)) if part}
    if mentioned - manual_axes:
        unknown, names = mentioned - manual_axes, ", ".join(map(repr, sorted(manual_axes, key=str)))
        raise ValueError(NO_MESH_AXIS.format(name=name, path=output.path, axis=unknown.pop(), names=names))
    # Sorted, so that the message is the same in each process: sets of strings have no fixed order.
    differs = sorted((varying_axes(output.leaf) & manual_axes) - mentioned, key=str) if check_vma else []
    if not differs:
        return
    if output.is_write:
        raise MutationError(DIFFERS_BY_SHARD.format(name=name, path=output.path, axis=differs[0]))
    raise ValueError(RESULT_DIFFERS.format(name=name, path=output.path, axis=differs[0], entry=output.spec))


def _name_argument(error: ValueError, program: Program, broadcast: Broadcast) -> None:
    """Adds the key path to JAX's error about a spec that differs from an array's sharding along explicit axes."""
    if not is_of_specs(error):
        return
    for i, (leaf, spec) in enumerate(zip(program.leaves, broadcast.leaf_specs, strict=True)):
        if _canonical_sharding(jax.typeof(leaf).sharding.spec, leaf) != _canonical_sharding(spec, leaf):
            return name_argument_of_specs(error, broadcast.path(i))


def _is_sharding(spec: object) -> bool:
    return isinstance(spec, PartitionSpec)


def _canonical_sharding(spec: Any, leaf: object) -> tuple[Any, ...]:
    """The parts of a spec without trailing None, which makes no difference."""
    del leaf
    parts = tuple(spec)
    while parts and parts[-1] is None:
        parts = parts[:-1]
    return parts
