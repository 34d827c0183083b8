# SPDX-License-Identifier: Apache-2.0
"""Equinox's `filter_closure_convert`, which turns captured arrays into leaves of the function."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from graftax import _core
from graftax._base.errors import StructureError
from graftax._graph.structure_diff import differences_text
from graftax._graph.types.register import register_static
from graftax._jax.equations import without_constants
from graftax._jax.jaxprs import canonical_jaxpr, run_jaxpr
from graftax._jax.tracebacks import boundary
from graftax.transforms._engine.lift import Output, by_value, call_first, name_of, named
from graftax.transforms._engine.program import Program
from graftax.transforms.staging import filter_eval_shape

R = TypeVar("R")

CONVERTED_FOR_OTHERS = (
    "{name}: the function was converted for other arguments:\n{differences}\nConvert it again, with arguments like "
    "these."
)


@boundary
def filter_closure_convert(fn: Callable[..., R], *args: Any, **kwargs: Any) -> Callable[..., R]:
    """As `equinox.filter_closure_convert`: turns the arrays that a function captures into leaves of the function.

    Args:
        fn: any callable. It is traced, not run. A plain function without a closure is not even traced: each call
            runs it.
        *args, **kwargs: arguments like those of later calls: arrays or `jax.ShapeDtypeStruct`s, and static values.

    Returns:
        a callable for such arguments. It is a pytree: its leaves are the jaxpr of `fn` and the captured arrays, in
        `consts`. For a function without a closure, the leaf is the function itself.

    Raises:
        UnsupportedValueError: if an argument contains a value with hidden state; names its path.
        StructureError: by the callable, if it is called with arguments of another structure, shape or dtype.

    Example:
        >>> scale = jnp.asarray(3.0)
        >>> scaled = graftax.filter_closure_convert(lambda x: x * scale, jnp.ones(2))
        >>> scaled(jnp.ones(2))
        Array([3., 3.], dtype=float32)
    """
    program = by_value(name_of(fn, "filter_closure_convert"), [fn], args, kwargs, shapes=True)
    # Leaves below the operands are arguments of the converted function; all others are captured.
    shapes = [_struct(x) for x in program.leaves]
    operand_leaves = program.leaves_below(range(program.operands))
    names = program.names[: program.operands]
    arguments = _Arguments(
        _core.record(program.roots[: program.operands], names, shapes=True)[1],
        names,
        tuple(kwargs),
        tuple((x.shape, str(x.dtype)) for i, x in enumerate(shapes) if i in operand_leaves),
        program.name,
    )
    if isinstance(fn, types.FunctionType) and fn.__closure__ is None:
        return _TrivialClosureConvert(fn, arguments)
    # `consts` has the constants of the trace, followed by the captured arrays, which are inputs of the jaxpr.
    closed, output = _traced(program, shapes)
    captured = tuple(i for i in range(len(shapes)) if i not in operand_leaves)
    consts = [*closed.consts, *(program.leaves[i] for i in captured)]
    conversion = _Conversion(arguments, captured, output, len(closed.consts))
    return Converted(canonical_jaxpr(without_constants(closed)), consts, conversion)


def _traced(program: Program, shapes: Sequence[jax.ShapeDtypeStruct]) -> tuple[Any, _core.GraphDef]:
    """(Jaxpr with constants, structure of the result)."""
    # By value, so that an argument that is returned is an output of the jaxpr as well.
    outputs: list[Output] = []

    def flat(*leaves: Any) -> tuple[Any, ...]:
        # The body returns nothing: as a result of the trace, a lock that the function makes would be refused.
        def body(functions: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> None:
            outputs.append(Output(*_core.flatten(call_first(functions, operands))))

        program.trace(leaves, body)
        return tuple(outputs[-1].leaves)

    closed: Any = jax.make_jaxpr(named(flat, program))(*shapes)
    return closed, outputs[-1].graphdef


def _struct(x: object) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array as the function sees it, including the weak type."""
    return jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x), weak_type=getattr(x, "weak_type", False))


def _in_order_of(expected: Any, value: Any) -> Any:
    """The value with its dicts, within tuples and lists, in the order of those in `expected`."""
    cls = type(value)
    if cls is dict and type(expected) is dict and expected.keys() == value.keys():
        return {key: _in_order_of(part, value[key]) for key, part in expected.items()}
    if cls in (tuple, list) and type(expected) is cls and len(expected) == len(value):
        return cls(_in_order_of(part, x) for part, x in zip(expected, value, strict=True))
    return value


@register_static
@dataclasses.dataclass(frozen=True)
class _Arguments:
    """The structure and types of the arguments that a function was converted for."""

    graphdef: _core.GraphDef
    names: tuple[str, ...]
    keywords: tuple[str, ...]
    shapes: tuple[Any, ...]
    # For messages only: functions of other names may be converted to one structure.
    name: str = dataclasses.field(compare=False)

    @property
    def struct(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in self.shapes]
        built = _core.unflatten(self.graphdef, shapes)
        # A structure of one root is built as that root, and not as a tuple.
        operands = (built,) if len(self.names) == 1 else tuple(built)
        count = len(operands) - len(self.keywords)
        return operands[:count], dict(zip(self.keywords, operands[count:], strict=True))

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arrays of a call.

        Raises:
            StructureError: if the arguments have another structure or type; names the path.
        """
        operands = (*args, *(kwargs[name] for name in self.keywords if name in kwargs))
        leaves, graphdef = _core.record(operands)
        # They may differ in the order of dicts only, which makes no difference to Equinox, whose trees are JAX's.
        if graphdef != self.graphdef:
            struct_args, struct_kwargs = self.struct
            leaves, graphdef = _core.record(_in_order_of((*struct_args, *struct_kwargs.values()), operands))
        text = "" if graphdef == self.graphdef else differences_text(self.graphdef, graphdef, self.names)
        shapes = tuple((np.shape(x), str(jnp.result_type(x))) for x in leaves)
        if not text and shapes != self.shapes:
            text = f"  arrays of {self.shapes} are expected, and {shapes} given"
        if text or set(kwargs) != set(self.keywords):
            text = text or f"  keyword arguments {self.keywords} are expected, and {tuple(kwargs)} given"
            raise StructureError(CONVERTED_FOR_OTHERS.format(name=self.name, differences=text))
        return leaves


@register_static
@dataclasses.dataclass(frozen=True)
class _Conversion:
    """The static part of a converted function: everything but its jaxpr and arrays."""

    arguments: _Arguments
    captured: tuple[int, ...]  # the inputs of the jaxpr that are captured arrays
    output: _core.GraphDef
    consts: int  # how many of `Converted.consts` are constants of the jaxpr, and not captured arrays


@jax.tree_util.register_pytree_node_class
class Converted:
    """A function whose captured arrays are its leaves: the result of `filter_closure_convert`.

    As in Equinox, its jaxpr is a leaf as well, so two conversions of one function have the same structure.
    """

    def __init__(self, jaxpr: Any, consts: Sequence[object], conversion: _Conversion) -> None:
        self.jaxpr, self.consts, self._conversion = jaxpr, list(consts), conversion

    def tree_flatten(self) -> tuple[tuple[Any, ...], _Conversion]:
        return (self.jaxpr, *self.consts), self._conversion

    @classmethod
    def tree_unflatten(cls, conversion: _Conversion, children: Sequence[Any]) -> Converted:
        jaxpr, *consts = children
        return cls(jaxpr, consts, conversion)

    @property
    def in_struct(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of the arguments that it is for, with `jax.ShapeDtypeStruct`s in place of arrays."""
        return self._conversion.arguments.struct

    @property
    def out_struct(self) -> Any:
        """What it returns, with `jax.ShapeDtypeStruct`s in place of arrays."""
        return _core.unflatten(self._conversion.output, [_struct(x.aval) for x in self.jaxpr.outvars])

    @boundary
    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        """Runs it.

        Raises:
            StructureError: if the arguments differ from those that it was converted for; names the path.
        """
        conversion = self._conversion
        leaves = conversion.arguments.leaves(args, kwargs)
        # The inputs of the jaxpr are the leaves of the program: arguments and captured arrays in the order of its walk.
        argument_leaves, captured_leaves = iter(leaves), iter(self.consts[conversion.consts :])
        count = len(leaves) + len(conversion.captured)
        inputs = [next(captured_leaves) if i in conversion.captured else next(argument_leaves) for i in range(count)]
        return _core.unflatten(conversion.output, run_jaxpr(self.jaxpr, self.consts[: conversion.consts], inputs))


@jax.tree_util.register_pytree_node_class
class _TrivialClosureConvert:
    """What `filter_closure_convert` returns of a function that has no closure, under the name that Equinox gives it.

    The function is its leaf: each call runs it.
    """

    def __init__(self, fn: Callable[..., object], arguments: _Arguments) -> None:
        self.fn, self._arguments = fn, arguments

    def tree_flatten(self) -> tuple[tuple[Any, ...], _Arguments]:
        return (self.fn,), self._arguments

    @classmethod
    def tree_unflatten(cls, arguments: _Arguments, children: Sequence[Any]) -> _TrivialClosureConvert:
        (fn,) = children
        return cls(fn, arguments)

    @property
    def in_struct(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of the arguments that it is for, with `jax.ShapeDtypeStruct`s in place of arrays."""
        return self._arguments.struct

    @property
    def out_struct(self) -> Any:
        """What it returns, with `jax.ShapeDtypeStruct`s in place of arrays."""
        args, kwargs = self.in_struct
        return filter_eval_shape(self.fn, *args, **kwargs)

    @boundary
    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        """Calls the function.

        Raises:
            StructureError: if the arguments differ from those that it was converted for; names the path.
        """
        self._arguments.leaves(args, kwargs)
        return self.fn(*args, **kwargs)
