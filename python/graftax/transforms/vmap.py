# SPDX-License-Identifier: Apache-2.0
"""Functions of any objects along an axis of their arrays: `vmap`, and Equinox's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_batching import custom_vmap

from graftax import interop
from graftax._base.errors import MutationError
from graftax._capture.numbers.symbols import NUMBERS
from graftax._graph.stack import Each
from graftax._jax.arrays import ref_types
from graftax._jax.tracebacks import boundary
from graftax._jit.pytree_callable import preserves_pytree
from graftax.transforms._engine.argument_specs import Call, OutputLeaf, as_positional, broadcast_of, trace_outputs
from graftax.transforms._engine.layer_loop import add_list_notes, call_with_stacked, with_lists_as_each
from graftax.transforms._engine.lift import (
    ARRAYS,
    MISSING,
    by_value,
    call_first,
    decorator,
    memoize_wrapper,
    name_of,
    named,
    wraps,
)
from graftax.transforms._engine.opaque_leaves import leaves_in_functions, leaves_in_values
from graftax.transforms._engine.program import NO_SUCH_OPERAND, Program
from graftax.transforms._engine.spec_broadcast import Broadcast
from graftax.transforms._engine.specs import SpecOption

P = ParamSpec("P")
R = TypeVar("R")

NO_SUCH_DIMENSION = (
    "{name}: {option} maps {path} along axis {axis}, and its shape is {shape}. Give None for what is not mapped."
)
OTHER_SIZE = (
    "{name}: all mapped axes need the same size. {path} has {size} along axis {axis}, but {other}. Map axes of one "
    "size, and give None for what is not mapped."
)
NOTHING_MAPPED = (
    "{name}: {option} maps no array of the arguments. Map one, or say how often to run the function with axis_size=."
)
DEPENDS_ON_AXIS = (
    "{name} changes {path} to something that depends on the mapped axis, but {path} is not mapped: it can"
    " hold one value, not one for each row. Return the value as part of the result, or map the object "
    "with in_axes."
)
RESULT_DEPENDS = (
    "{name}: out_axes is None for {path}, which depends on the mapped axis. Give it an axis, or reduce it (with "
    "axis_name= and jax.lax.pmean, for example)."
)
NO_ROOM_FOR_AXIS = (
    "{name}: {option} puts the mapped axis of {path} at {axis}, but the shape without it is {shape}, which has no "
    "room for an axis there."
)


class FilterVmapOptions(TypedDict, total=False):
    """The keyword arguments of `filter_vmap`, for type checkers."""

    in_axes: Any
    out_axes: Any
    axis_name: Hashable | None
    axis_size: int | None


class VmapOptions(FilterVmapOptions, total=False):
    """The keyword arguments of `vmap`."""

    spmd_axis_name: Hashable | None
    transform_metadata: Any


@overload
def vmap(
    fun: Callable[P, R],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Hashable | None = None,
    axis_size: int | None = None,
    spmd_axis_name: Hashable | None = None,
    *,
    transform_metadata: Any = None,
) -> Callable[P, R]: ...
@overload
def vmap(**options: Unpack[VmapOptions]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@boundary
@decorator
def vmap(
    fun: Callable[..., Any] = MISSING,
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Hashable | None = None,
    axis_size: int | None = None,
    spmd_axis_name: Hashable | None = None,
    *,
    transform_metadata: Any = None,
) -> Callable[..., Any]:
    """Maps a function of any objects over an axis of the arrays in its arguments.

    Arrays are mapped, everything else is passed as it is, and static parts of the result are returned as they are.
    Captured variables are not mapped. A change to a mapped object keeps the axis of that object's arrays; a change to
    an object that is not mapped must not depend on the mapped axis.

    Args:
        fun: the function. If an argument is `graftax.each(objects)`, a list of models, the function receives one of
            them. A plain list of layers, as `scan` defines them, is treated the same way if there is no axis to map:
            if the arrays of its modules differ in length, or, for objects that JAX does not flatten, if their length is
            not that of the other arguments.
        in_axes: the axis for each array of the arguments, None where it is not mapped. One axis for all positional
            arguments, or a tuple with an entry for each: an axis; a container, or an object of the argument's class,
            with an axis for each part; a function of the array; or a dict of patterns of key paths, of which the first
            that covers a path decides (`{"**.bias": None, "**": 0}`). Its keys may also be types or filters of Flax
            NNX, as in `nnx.StateAxes` (`{nnx.BatchStat: None, ...: 0}`). A function, or a dict of patterns that begin
            with the names of arguments, can also be given for all arguments together. Keyword arguments are mapped
            over axis 0, as in JAX, unless patterns or a function say otherwise.
        out_axes: the axis for each array of the result, in the same ways. If it is None, the array must not depend on
            the mapped axis.
        axis_name, axis_size, spmd_axis_name: as in `jax.vmap`.
        transform_metadata: as in `nnx.vmap`: `{nnx.PARTITION_NAME: "layers"}` names the mapped axis in the sharding of
            each Variable.

    Returns:
        a function of the same arguments, whose mapped arrays have an additional axis.

    Raises:
        StructureError: if an entry is missing or does not fit, or one object is reached in two places that are given
            different axes.
        ValueError: if sizes disagree, or there is no such axis; both name the key path.
        MutationError: if an object that is not mapped is changed by something that depends on the mapped axis.

    Example:
        >>> ensemble = {"w": jnp.arange(6.0).reshape(3, 2), "name": "net"}
        >>> graftax.vmap(lambda model, x: model["w"] @ x, in_axes=(0, None))(ensemble, jnp.ones(2))
        Array([1., 5., 9.], dtype=float32)
    """
    if transform_metadata:
        fun = interop.with_axis_names(fun, in_axes, out_axes, transform_metadata)
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
    ignore_opaque: bool = False,
    call: Call = call_first,
    ignore_new_opaque: bool = False,
) -> Callable[..., Any]:
    """`vmap` with its programs made by `make`, for `vmap` and `filter_vmap`.

    Args:
        ignore_opaque: arrays that functions capture are not mapped; nor are those within other opaque values, if
            `in_axes` is a function of the leaf.
        call: calls the function with the operands.
        ignore_new_opaque: arrays within new opaque values in the result are mapped only if they depend on the axis.
    """

    @wraps(fun, title)
    def mapped(*args: object, **kwargs: object) -> Any:
        args, kwargs = as_positional(fun, in_axes, args, kwargs)
        # `filter_vmap` slices a list of layers, as Equinox does.
        if not ignore_opaque:
            args = with_lists_as_each(args, in_axes, axis_size)
        if any(isinstance(arg, Each) for arg in args):
            return call_with_stacked(name_of(fun, title), mapped, args, kwargs)
        # Made in the call, since what `mapped` captures is compared in each call if it is jitted.
        axis_names = {"axis_name": axis_name, "spmd_axis_name": spmd_axis_name}
        try:
            program = make(name_of(fun, title), [fun], args, kwargs)
            return _run(program, in_axes, out_axes, axis_size, axis_names, ignore_opaque, call, ignore_new_opaque)
        # On a list, a function of one object raises an AttributeError or a TypeError; sizes that differ, a ValueError.
        except (ValueError, TypeError, AttributeError) as error:
            add_list_notes(name_of(fun, title), args, error)
            raise

    return mapped


def _run(
    program: Program,
    in_axes: object,
    out_axes: object,
    axis_size: int | None,
    axis_names: dict[str, Any],
    ignore_opaque: bool,
    call: Call,
    ignore_new_opaque: bool,
) -> Any:
    """Maps a program, writes its changes back and returns its result. `axis_names` are options of `jax.vmap`."""
    # The axis of each leaf of the program; JAX gets the leaves that have one.
    inputs = SpecOption(program.name, "in_axes", "an axis (int or None)", None, _is_axis, canonical_axis)
    broadcast = broadcast_of(program, inputs, in_axes, _axis_0 if ignore_opaque else 0)
    if ignore_opaque:
        of_values = leaves_in_values(program.graphdef) & broadcast.from_function
        for i in leaves_in_functions(program.graphdef) | of_values:
            broadcast.leaf_specs[i] = None
    axes = list(broadcast.leaf_specs)
    mapped_leaves = [i for i, axis in enumerate(axes) if axis is not None]
    # As in Equinox, the function runs once if nothing is mapped: along an axis of one row, which no output has.
    unmapped_call = ignore_opaque and not mapped_leaves and axis_size is None
    size = 1 if unmapped_call else size_of(program, broadcast, axis_size)
    mapped_arrays = [program.leaves[i] for i in mapped_leaves]
    in_axes_flat = [axes[i] for i in mapped_leaves]
    # `_depend` needs an array that is certainly mapped, to ask JAX which outputs depend on the axis.
    probe = next((k for k, x in enumerate(mapped_arrays) if not isinstance(x, ref_types)), None)
    if probe is None:
        probe = len(mapped_arrays)
        mapped_arrays.append(np.zeros(size, np.bool_))
        in_axes_flat.append(0)
    flat_out_axes: list[Any] = []  # jax.vmap reads this list after `flat` has filled it
    outputs: list[OutputLeaf] = []

    def flat(*values: Any) -> list[Any]:
        leaves = program.with_leaves(mapped_leaves, values[: len(mapped_leaves)])
        # In `flat` an output has one dimension less than `out_axes` counts.
        results = inputs._replace(keyword="out_axes", canonical=functools.partial(canonical_axis, extra_dims=1))
        outputs[:] = trace_outputs(program, broadcast, results, leaves, out_axes, ignore_opaque, call)
        outputs[:] = _unmap_opaque(outputs, values[probe]) if ignore_new_opaque else outputs
        if unmapped_call and any(o.spec is not None for o in outputs):
            raise ValueError(NOTHING_MAPPED.format(name=program.name, option="in_axes"))
        _refuse_misfits(program.name, outputs, values[probe])
        flat_out_axes[:] = [o.spec for o in outputs]
        return [o.leaf for o in outputs]

    run = jax.vmap(
        named(flat, program),
        in_axes=tuple(in_axes_flat),
        out_axes=flat_out_axes,
        axis_size=size,
        **axis_names,
    )
    return _finish(program, outputs, axes, run(*mapped_arrays), ignore_opaque)


def _finish(
    program: Program, outputs: Sequence[OutputLeaf], axes: Sequence[Any], results: Sequence[Any], ignore_opaque: bool
) -> Any:
    """Writes the changes back, and returns the result. `axes` are those of the program's leaves."""
    # Arrays that were computed alike are one array only if they are mapped along the same axes, too.
    recipes = {
        i: ((source.operation, outputs[i].spec, *(axes[leaf] for leaf in source.inputs)), source.inputs)
        for i, source in enumerate(program.sources)
        if source is not None
    }
    # By value, a mapped NumPy array comes back as a jax.Array, as in Equinox.
    returned_untouched = [axis is None or not ignore_opaque for axis in axes]
    untouched = {
        i: o.input_leaf for i, o in enumerate(outputs) if o.input_leaf is not None and returned_untouched[o.input_leaf]
    }
    return program.finish(program.with_ties(results, recipes), untouched=untouched)


@overload
def filter_vmap(fun: Callable[P, R], **options: Unpack[FilterVmapOptions]) -> Callable[P, R]: ...
@overload
def filter_vmap(**options: Unpack[FilterVmapOptions]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@preserves_pytree
@boundary
def filter_vmap(
    fun: Callable[..., Any] | None = None,
    *,
    in_axes: Any = ARRAYS,
    out_axes: Any = ARRAYS,
    axis_name: Hashable | None = None,
    axis_size: int | None = None,
) -> Any:
    """As `equinox.filter_vmap`: maps over axis 0 of every array, or over what `in_axes` says.

    As in Equinox, functions and objects of plain classes among the arguments and in the result are left alone together
    with the arrays in them, because JAX does not know them as trees. An axis that is given for such an object (an int
    in `in_axes`) maps its arrays. If nothing is mapped and there is no `axis_size`, the function runs once.

    Args:
        fun: the function. Without it, a decorator is returned.
        in_axes, out_axes: as in `graftax.vmap`: axes, containers of them, or a function of the array such as
            `equinox.if_array(1)`. A dict from argument names gives `in_axes` for these; other arguments have axis 0.
            If `out_axes` gives an axis for a Python number in the result, it becomes an array; otherwise it is left
            alone.
        axis_name, axis_size: as in `jax.vmap`.

    Returns:
        a function of the same arguments, whose mapped arrays have an additional axis. It never changes the caller's
        objects.

    Raises:
        ValueError: if sizes disagree, or if there is no such axis; both name the key path.
        StructureError: if `in_axes` or `out_axes` lacks an entry; names the path.

    Example:
        >>> graftax.filter_vmap(lambda model, x: model["w"] * x)({"w": jnp.ones(2), "name": "net"}, jnp.arange(2.0))
        Array([0., 1.], dtype=float32)
    """
    if fun is None:
        return functools.partial(
            filter_vmap, in_axes=in_axes, out_axes=out_axes, axis_name=axis_name, axis_size=axis_size
        )
    options = in_axes, out_axes, axis_name, axis_size
    # An axis that the user gives applies to numbers and opaque values, too; the defaults apply to arrays only.
    call = call_first if out_axes is ARRAYS else functools.partial(_with_arrays, out_axes)
    ignore_new_opaque = out_axes is ARRAYS or callable(out_axes)
    in_axes, out_axes = _axis_0 if in_axes is ARRAYS else in_axes, 0 if out_axes is ARRAYS else out_axes
    if isinstance(in_axes, dict) and all(map(_is_name, cast("dict[Any, Any]", in_axes))):
        named_axes = cast("dict[str, Any]", in_axes)

        # Which position a name has is known when the arguments are bound.
        @wraps(fun, "filter_vmap")
        def by_name(*args: object, **kwargs: object) -> Any:
            bound = inspect.signature(fun).bind(*args, **kwargs)
            axes = _axes_by_name(fun, named_axes, bound)
            run = vmap_by(
                by_value, "filter_vmap", fun, axes, out_axes, axis_name, axis_size, None, True, call, ignore_new_opaque
            )
            return run(*bound.args, **bound.kwargs)

        return by_name
    vmap_options = in_axes, out_axes, axis_name, axis_size, None, True, call, ignore_new_opaque
    mapped = vmap_by(by_value, "filter_vmap", fun, *vmap_options)
    return memoize_wrapper(mapped, fun, "filter_vmap", *options)


def _with_arrays(out_axes: object, functions: Sequence[Callable[..., object]], operands: Sequence[object]) -> Any:
    """Calls the function, and converts Python numbers in its result to arrays if `out_axes` gives them an axis."""
    result = call_first(functions, operands)

    def as_array(x: object) -> Any:
        return jnp.asarray(x) if type(x) in NUMBERS else x

    def with_axis(axis: object, part: object) -> Any:
        return jax.tree.map(as_array, part) if type(axis) is int else part

    if not any(type(x) in NUMBERS for x in jax.tree.leaves(result)):
        return result
    try:
        return jax.tree.map(with_axis, out_axes, result, is_leaf=lambda axis: axis is None)
    # Where `out_axes` does not fit the result, the error with the path is raised later.
    except ValueError:
        return result


def _is_name(key: object) -> bool:
    return isinstance(key, str) and key.isidentifier()


def _axes_by_name(fun: Callable[..., object], axes: dict[str, Any], bound: inspect.BoundArguments) -> tuple[Any, ...]:
    """One entry per positional argument: the one under its name, or the default."""
    parameters = list(bound.signature.parameters)
    # Positional arguments beyond the parameters are those of `*args`, which have no names.
    names = [*parameters, *[""] * len(bound.args)][: len(bound.args)]
    for name in axes:
        if name not in names:
            operands = ", ".join(filter(None, names))
            raise ValueError(NO_SUCH_OPERAND.format(name=name_of(fun, "filter_vmap"), which=name, operands=operands))
    return tuple(axes.get(name, _axis_0) for name in names)


def _axis_0(leaf: object) -> int:
    """The default of `filter_vmap`: axis 0 of every array. It is a function so that opaque values are ignored."""
    del leaf
    return 0


def _is_axis(axis: object) -> bool:
    return axis is None or type(axis) is int


def canonical_axis(axis: Any, leaf: Any, extra_dims: int = 0) -> Any:
    return axis + np.ndim(leaf) + extra_dims if axis is not None and axis < 0 else axis


def size_of(program: Program, broadcast: Broadcast, axis_size: int | None) -> int:
    """The size of the mapped axis.

    Raises:
        ValueError: if an array does not have its axis, if sizes differ, or if nothing is mapped.
    """
    reference: tuple[int, int] | None = None  # (leaf, its size)
    for i, (leaf, axis) in enumerate(zip(program.leaves, broadcast.leaf_specs, strict=True)):
        if axis is None:
            continue
        shape: tuple[int, ...] = np.shape(leaf)
        if not -len(shape) <= axis < len(shape):
            details = {"option": "in_axes", "path": broadcast.path(i), "axis": axis, "shape": shape}
            raise ValueError(NO_SUCH_DIMENSION.format(name=program.name, **details))
        expected = reference[1] if reference else shape[axis] if axis_size is None else axis_size
        if shape[axis] != expected:
            text = f"axis_size is {axis_size}"
            if reference:
                reference_axis = broadcast.leaf_specs[reference[0]]
                text = f"{broadcast.path(reference[0])} has {expected} along axis {reference_axis}"
            details = {"path": broadcast.path(i), "size": shape[axis], "axis": axis, "other": text}
            raise ValueError(OTHER_SIZE.format(name=program.name, **details))
        reference = reference or (i, shape[axis])
    if reference is None and axis_size is None:
        raise ValueError(NOTHING_MAPPED.format(name=program.name, option="in_axes"))
    return reference[1] if reference else axis_size  # type: ignore[return-value]


def _refuse_misfits(name: str, outputs: Sequence[OutputLeaf], mapped: object) -> None:
    """Raises for an axis that an output cannot have, and for an output that depends on the mapped axis but has none."""
    for output in outputs:
        rank = np.ndim(output.leaf)
        if output.spec is not None and not -rank - 1 <= output.spec <= rank:
            # What is written into an object keeps the axis that `in_axes` gives that object.
            details = {"option": "in_axes" if output.is_write else "out_axes", "path": output.path}
            shape = np.shape(output.leaf)
            raise ValueError(NO_ROOM_FOR_AXIS.format(name=name, axis=output.spec, shape=shape, **details))
    unmapped = [o for o in outputs if o.spec is None]
    for output, depends in zip(unmapped, _depend([o.leaf for o in unmapped], mapped), strict=True):
        if depends and output.is_write:
            raise MutationError(DEPENDS_ON_AXIS.format(name=name, path=output.path))
        if depends:
            raise ValueError(RESULT_DEPENDS.format(name=name, path=output.path))


def _unmap_opaque(outputs: Sequence[OutputLeaf], mapped: object) -> list[OutputLeaf]:
    """The output leaves, of which those in opaque values of the result lose their axis if they do not depend on it."""
    opaque = [i for i, o in enumerate(outputs) if o.in_value and o.spec is not None]
    answers = _depend([outputs[i].leaf for i in opaque], mapped)
    independent = {i for i, depends in zip(opaque, answers, strict=True) if not depends}
    return [o._replace(spec=None) if i in independent else o for i, o in enumerate(outputs)]


def _depend(leaves: Sequence[object], mapped: object) -> list[bool]:
    """Whether each array depends on the mapped axis; `mapped` is an array that does."""
    # There is no public way to ask a tracer. But JAX tells the rule of a `custom_vmap` function which of its arguments
    # are batched, and runs that rule at once if one of them is: this is what `mapped` is for.
    tracers = [x for x in leaves if isinstance(x, Tracer)]
    depends: list[bool] = []

    @custom_vmap
    def probe(mapped: object, leaves: object) -> Any:
        del leaves
        return mapped

    @probe.def_vmap
    def rule(size: int, batched: Any, mapped: Any, leaves: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
        del size, leaves
        depends.extend(batched[1])
        return mapped, True

    # Anything but a tracer is a constant, which depends on nothing.
    if tracers:
        probe(mapped, tracers)
    answers = iter(depends)
    return [isinstance(x, Tracer) and next(answers) for x in leaves]
