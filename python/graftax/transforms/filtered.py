# SPDX-License-Identifier: Apache-2.0
"""Equinox's filtered transforms, with its signatures: by value, the caller's objects are never touched."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.sharding import SingleDeviceSharding

from .. import _core
from .._compat import of_one_trace
from .._difference import describe
from .._dispatch import is_prefix
from .._errors import CONVERTED_FOR_OTHERS, FIRST_BY_POSITION, NO_SUCH_OPERAND, OTHER_TREE, StructureError
from .._jitted import Jitted
from .._options import Options
from ._program import by_value, first, name_of, wraps
from ._tangents import is_inexact
from .autodiff import (
    Output,
    jacobian_by,
    named,
    pulled_back,
    replaced,
    with_gradient,
)
from .callbacks import pure_callback
from .mapping import vmap_by
from .remat import checkpointed
from .staging import flat_of


def filter_value_and_grad(fun: Callable[..., Any] | None = None, *, has_aux: bool = False, **options: Any) -> Any:
    """As `equinox.filter_value_and_grad`: the value, and the gradient by the floating arrays of the first argument.

    The gradient is a tree like the argument, with None for every other leaf. The caller's objects are not changed: a
    change that is lost earns a `LostChangeWarning`. `graftax.value_and_grad` brings changes back.

    Args:
        fun: returns a scalar, or (scalar, aux) with `has_aux`. Without it, a decorator is returned.
        has_aux: the function returns a pair.
        **options: `holomorphic`, `allow_int`, as in `jax.value_and_grad`.
    """
    if fun is None:
        return functools.partial(filter_value_and_grad, has_aux=has_aux, **options)
    return _filtered_gradient("filter_value_and_grad", fun, has_aux, options)


def _filtered_gradient(title: str, fun: Callable[..., Any], has_aux: bool, options: dict[str, Any]) -> Any:
    if "argnums" in options:
        raise ValueError(
            f"{title} differentiates by the first argument: put several objects into a tuple and pass that first, or "
            "use graftax.value_and_grad(argnums=...)"
        )
    run = with_gradient(by_value, fun, title, 0, has_aux, None, options)

    @wraps(fun, title)
    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        value, gradient = run(*_first_given(fun, args), **kwargs)
        return value, arrays_only(gradient)

    return value_and_gradient


def filter_grad(fun: Callable[..., Any] | None = None, *, has_aux: bool = False, **options: Any) -> Any:
    """As `equinox.filter_grad`: `filter_value_and_grad` without the value; with `has_aux`, (gradient, aux)."""
    if fun is None:
        return functools.partial(filter_grad, has_aux=has_aux, **options)
    both = _filtered_gradient("filter_grad", fun, has_aux, options)

    @wraps(fun, "filter_grad")
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradient


def filter_jvp(fn: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], **kwargs: Any) -> Any:
    """As `equinox.filter_jvp`: (value, tangent of the value), which has None where it does not depend on a tangent.

    Args:
        fn: any callable.
        primals: its positional arguments. Python floats that have a tangent are traced.
        tangents: a tree like `primals`, with None for what is not differentiated.
        **kwargs: keyword arguments, which are not differentiated.
    """
    name = name_of(fn, "filter_jvp")
    structures = [jax.tree.structure(tuple(x), is_leaf=_is_none) for x in (primals, tangents)]
    if structures[0] != structures[1]:
        raise ValueError(OTHER_TREE.format(name=name, expected=structures[0], given=structures[1]))

    def as_array(tangent: Any, primal: Any) -> Any:
        return primal if tangent is None or not isinstance(primal, (float, complex)) else jnp.asarray(primal)

    operands: tuple[Any, ...] = jax.tree.map(as_array, tuple(tangents), tuple(primals), is_leaf=_is_none)
    program = by_value(name, [fn], operands, kwargs)
    graphdef = _core.record(operands, None, [0] * len(operands), None)[1]
    rates: tuple[Any, ...] = jax.tree.map(jnp.asarray, tuple(tangents))
    given, of_tangents = _core.record(rates, None, [0] * len(operands), None)
    at = {path: i for i, path in enumerate(graphdef.leaf_paths())}
    chosen = [at[path] for path in of_tangents.leaf_paths()]
    depends: list[bool] = []
    outputs: list[Output] = []

    def flat(by: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any]]:
        def body(functions: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
            result = first(functions, operands)
            outputs.append(Output(*_core.flatten(result)))
            return result

        _, out = program.trace(replaced(program, chosen, by), body)
        found = outputs[-1].leaves
        depends[:] = [bool(by) and of_one_trace(x, by[0]) and is_inexact(x) for x in found]
        return tuple(x for x, d in zip(found, depends, strict=True) if d), out

    by = tuple(program.leaves[i] for i in chosen)
    moved = tuple(jnp.asarray(t, jnp.result_type(x)) for t, x in zip(given, by, strict=True))
    _, moves, out = jax.jvp(named(flat, program), (by,), (moved,), has_aux=True)
    rest = iter(moves)
    tangent = outputs[-1].rebuilt([next(rest) if d else None for d in depends])
    return program.finish(out), arrays_only(tangent)


def filter_vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """As `equinox.filter_vjp`: (value, pull back), and with `has_aux` the second part of what `fun` returned.

    `pull back` takes a tree like the value, with a cotangent for each floating array and None for all else, and
    returns a tuple of trees like the primals.
    """
    value, pull, *aux = pulled_back(by_value, fun, primals, has_aux, {})

    def pull_back(cotangent: Any) -> tuple[Any, ...]:
        return tuple(arrays_only(x) for x in pull(cotangent))

    return (value, pull_back, *aux)


def filter_vmap(
    fun: Callable[..., Any] | None = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Hashable | None = None,
    axis_size: int | None = None,
) -> Any:
    """As `equinox.filter_vmap`: maps over axis 0 of every array, or over what `in_axes` says.

    Args:
        fun: the function; without one, a decorator is returned.
        in_axes, out_axes: as in `graftax.vmap`: axes, containers of them, or a function of the array such as
            `equinox.if_array(1)`. A dict of argument names gives `in_axes` of these; other arguments have axis 0.
        axis_name, axis_size: as in `jax.vmap`.
    """
    if fun is None:
        return functools.partial(
            filter_vmap, in_axes=in_axes, out_axes=out_axes, axis_name=axis_name, axis_size=axis_size
        )
    if isinstance(in_axes, dict) and all(map(_is_name, cast("dict[Any, Any]", in_axes))):
        given = cast("dict[str, Any]", in_axes)

        @wraps(fun, "filter_vmap")
        def mapped(*args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(fun).bind(*args, **kwargs)
            axes = _axes_by_name(fun, given, bound)
            run = vmap_by(by_value, "filter_vmap", fun, axes, out_axes, axis_name, axis_size, None)
            return run(*bound.args, **bound.kwargs)

        return mapped
    return vmap_by(by_value, "filter_vmap", fun, in_axes, out_axes, axis_name, axis_size, None)


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and key.isidentifier()


def _axes_by_name(fun: Callable[..., Any], given: dict[str, Any], bound: inspect.BoundArguments) -> tuple[Any, ...]:
    """An entry for each positional argument; the default for one that is not named."""
    known = list(bound.signature.parameters)
    names = [*known, *[""] * len(bound.args)][: len(bound.args)]
    for name in given:
        if name not in names:
            operands = ", ".join(filter(None, names))
            raise ValueError(NO_SUCH_OPERAND.format(name=name_of(fun, "filter_vmap"), which=name, operands=operands))
    return tuple(given.get(name, 0) for name in names)


def filter_jacfwd(fun: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """As `equinox.filter_jacfwd`: the Jacobian by the floating arrays of the first argument, in forward mode."""
    return _filtered_jacobian(jax.jacfwd, "filter_jacfwd", fun, has_aux)


def filter_jacrev(fun: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """As `equinox.filter_jacrev`: the Jacobian by the floating arrays of the first argument, in reverse mode."""
    return _filtered_jacobian(jax.jacrev, "filter_jacrev", fun, has_aux)


def filter_hessian(fun: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """As `equinox.filter_hessian`: the Hessian by the floating arrays of the first argument."""
    return _filtered_jacobian(jax.hessian, "filter_hessian", fun, has_aux, 2)


def _filtered_jacobian(
    transform: Callable[..., Any], title: str, fun: Callable[..., Any], has_aux: bool, order: int = 1
) -> Callable[..., Any]:
    run = jacobian_by(by_value, transform, title, fun, 0, has_aux, None, {}, order)

    @wraps(fun, title)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        out = run(*_first_given(fun, args), **kwargs)
        return (arrays_only(out[0]), out[1]) if has_aux else arrays_only(out)

    return jacobian


def filter_checkpoint(
    fun: Callable[..., Any] | None = None,
    *,
    prevent_cse: bool = True,
    policy: Callable[..., bool] | None = None,
) -> Any:
    """As `equinox.filter_checkpoint`: `graftax.checkpoint` by value. Without `fun`, a decorator is returned."""
    if fun is None:
        return functools.partial(filter_checkpoint, prevent_cse=prevent_cse, policy=policy)
    return checkpointed(by_value, fun, {"prevent_cse": prevent_cse, "policy": policy})


def filter_eval_shape(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As `equinox.filter_eval_shape`: the result, with `jax.ShapeDtypeStruct` in place of arrays."""
    return Jitted(fun, Options(mutation="discard", warn_lost=True, captured=False)).eval_shape(*args, **kwargs)


def filter_make_jaxpr(fun: Callable[..., Any]) -> Callable[..., tuple[Any, Any, Any]]:
    """As `equinox.filter_make_jaxpr`: (jaxpr of the arrays, shapes of the result, the rest of the result)."""

    @wraps(fun, "filter_make_jaxpr")
    def show(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        program = by_value(name_of(fun, "filter_make_jaxpr"), [fun], args, kwargs, shapes=True)
        jaxpr, shapes = jax.make_jaxpr(flat_of(program), return_shape=True)(*program.leaves)
        result = program.finish(shapes)
        found, graphdef = _core.record((result,), None, [0], None, False, True)
        return jaxpr, _core.unflatten(graphdef, found, True), _core.unflatten(graphdef, [None] * len(found))

    return show


def filter_pure_callback(
    callback: Callable[..., Any],
    *args: Any,
    result_shape_dtypes: Any,
    sharding: Any = None,
    vmap_method: str | None = None,
    vectorized: bool | None = None,
    **kwargs: Any,
) -> Any:
    """As `equinox.filter_pure_callback`: `graftax.pure_callback` with the shapes as a keyword.

    `vectorized` is what JAX called `vmap_method` before: True is "legacy_vectorized", False "sequential".
    """
    if vectorized is not None and vmap_method is None:
        vmap_method = "legacy_vectorized" if vectorized else "sequential"
    return pure_callback(callback, result_shape_dtypes, *args, sharding=sharding, vmap_method=vmap_method, **kwargs)


def filter_shard(x: Any, device_or_shardings: Any) -> Any:
    """As `equinox.filter_shard`: a copy of `x` whose arrays are on a device, or have shardings.

    Args:
        x: any graph.
        device_or_shardings: a device; a sharding for all arrays; or a tree of shardings, of which `x` is an extension.
    """
    spec = device_or_shardings
    if isinstance(spec, jax.Device):
        spec = SingleDeviceSharding(spec)
    leaves, graphdef = _core.flatten(x)
    if is_prefix(spec) or not jax.tree_util.all_leaves([spec]):
        full = jax.tree.map(_everywhere, spec, x, is_leaf=_is_none)
        at = {path: value for path, op, _, value in _core.flatten(full)[1].instructions() if op == "static"}
        spec = [at[path] for path in graphdef.leaf_paths()]
    return _core.unflatten(graphdef, jax.lax.with_sharding_constraint(leaves, spec))


def filter_closure_convert(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """As `equinox.filter_closure_convert`: the function with the arrays that it closes over as its own, `consts`.

    Args:
        fn: any callable. It is traced, not run.
        *args, **kwargs: arguments as later ones will be: arrays or `jax.ShapeDtypeStruct`, and statics.

    Returns:
        a callable, which is a pytree of the arrays that `fn` captures.
    """
    program = by_value(name_of(fn, "filter_closure_convert"), [fn], args, kwargs, shapes=True)
    own = program.below(range(program.operands))
    outputs: list[Output] = []

    def flat(*leaves: Any) -> tuple[Any, ...]:
        def body(functions: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> None:
            outputs.append(Output(*_core.flatten(first(functions, operands))))

        program.trace(leaves, body)
        return tuple(outputs[-1].leaves)

    # Every array counts as one of a type of its own, as in Equinox.
    shapes = [jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)) for x in program.leaves]
    closed: Any = jax.make_jaxpr(named(flat, program))(*shapes)
    roots = program.roots[: program.operands]
    graphdef = _core.record(roots, program.names[: program.operands], [0] * len(roots), None, False, True)[1]
    captured = tuple(i for i in range(len(shapes)) if i not in own)
    signature = _Conversion(
        program.name,
        getattr(closed, "jaxpr", closed),
        graphdef,
        program.names[: program.operands],
        tuple(kwargs),
        tuple((x.shape, str(x.dtype)) for i, x in enumerate(shapes) if i in own),
        captured,
        outputs[-1].graphdef,
        len(closed.consts),
    )
    return Converted([*closed.consts, *(program.leaves[i] for i in captured)], signature)


class _Conversion:
    """What a converted function is besides arrays. Equal to itself alone."""

    def __init__(
        self,
        name: str,
        jaxpr: Any,
        graphdef: _core.GraphDef,
        names: tuple[str, ...],
        keywords: tuple[str, ...],
        shapes: tuple[Any, ...],
        captured: tuple[int, ...],
        output: _core.GraphDef,
        consts: int,
    ) -> None:
        self.name, self.jaxpr, self.graphdef, self.names, self.keywords = name, jaxpr, graphdef, names, keywords
        self.shapes, self.captured, self.output, self.consts = shapes, captured, output, consts


@jax.tree_util.register_pytree_node_class
class Converted:
    """A function without closure: what `filter_closure_convert` returns."""

    def __init__(self, consts: Sequence[Any], conversion: _Conversion) -> None:
        self.consts, self._conversion = list(consts), conversion

    def tree_flatten(self) -> tuple[tuple[Any, ...], _Conversion]:
        return tuple(self.consts), self._conversion

    @classmethod
    def tree_unflatten(cls, conversion: _Conversion, consts: Sequence[Any]) -> Converted:
        return cls(consts, conversion)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it.

        Raises:
            StructureError: where the arguments differ from those that it was converted for, naming the path.
        """
        to = self._conversion
        operands = (*args, *(kwargs[name] for name in to.keywords if name in kwargs))
        leaves, graphdef = _core.record(operands, None, [0] * len(operands), None)
        text = "" if graphdef == to.graphdef else describe(to.graphdef, graphdef, to.names)
        shapes = tuple((np.shape(x), str(jnp.result_type(x))) for x in leaves)
        if not text and shapes != to.shapes:
            text = f"  arrays of {to.shapes} are expected, and {shapes} given"
        if text or set(kwargs) != set(to.keywords):
            text = text or f"  keyword arguments {to.keywords} are expected, and {tuple(kwargs)} given"
            raise StructureError(CONVERTED_FOR_OTHERS.format(name=to.name, differences=text))
        own, rest = iter(leaves), iter(self.consts[to.consts :])
        count = len(leaves) + len(to.captured)
        given = [next(rest) if i in to.captured else next(own) for i in range(count)]
        return _core.unflatten(to.output, eval_jaxpr(to.jaxpr, self.consts[: to.consts], *given))


# ---- trees


def _first_given(fun: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    if not args:
        raise TypeError(FIRST_BY_POSITION.format(name=getattr(fun, "__name__", type(fun).__name__)))
    return args


def _is_none(x: Any) -> bool:
    return x is None


def arrays_only(tree: Any) -> Any:
    """The tree with None for every leaf that is no array: what Equinox gives for derivatives."""
    leaves, graphdef = _core.flatten(tree)
    return _core.unflatten(graphdef, leaves, True)


def _everywhere(value: Any, tree: Any) -> Any:
    """The tree with `value` for every leaf."""
    return jax.tree.unflatten(jax.tree.structure(tree), [value] * len(jax.tree.leaves(tree)))
