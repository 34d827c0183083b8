# SPDX-License-Identifier: Apache-2.0
"""Derivatives with respect to the arrays of all positional arguments, and helpers that all derivatives share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypedDict, TypeVar, cast

from jax.tree_util import register_pytree_node

from graftax import _core
from graftax._base.errors import UnsupportedValueError
from graftax._graph.edit import copy
from graftax._graph.structure import path_text
from graftax._jax.error_texts import is_of_reverse_loop
from graftax.transforms._engine.lift import Make, Output, named, traced_output
from graftax.transforms._engine.program import Program
from graftax.transforms._engine.tangents import TangentType, is_float0, match_tangents
from graftax.transforms._engine.wrt import Chosen, differentiated_program

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
N = TypeVar("N")
W = TypeVar("W")

First = Callable[Concatenate[T, P], R]  # a function of a first argument, by which derivatives are taken, and of others


class DerivativeOptions(TypedDict, Generic[N, W], total=False):
    """The keyword arguments of `jacfwd` and `hessian`, for type checkers."""

    argnums: N
    wrt: W
    holomorphic: bool


class ReverseOptions(DerivativeOptions[N, W], total=False):
    """The keyword arguments of `jacrev`."""

    allow_int: bool


TANGENT_COUNT = (
    "{name}: there are {count} primals and {actual} tangents. Give one graph of tangents for each; None stands for "
    "zero."
)
NOT_WITH_AUX = (
    "{name}: with has_aux=True the function returns a pair (value, aux); it returned {actual}. Write return value, aux."
)
NO_REVERSE = (
    "A graftax.while_loop(..., max_steps=n), which makes at most n steps, can be differentiated in reverse mode, and "
    "so can a graftax.fori_loop with Python numbers as bounds."
)
FIRST_BY_POSITION = (
    "{name}: the first argument is the one that is differentiated; pass it, and by position. (Functions wrapped with "
    "filter_grad and the like have no other way to know it.)"
)


def split_aux(result: object, name: str) -> tuple[Any, Any]:
    """The value and the auxiliary part of the result of a function with `has_aux`."""
    if not isinstance(result, (tuple, list)) or len(cast("Sequence[Any]", result)) != 2:
        raise TypeError(NOT_WITH_AUX.format(name=name, actual=type(result).__qualname__))
    value, aux = cast("Sequence[Any]", result)
    return value, aux


def traced_value(program: Program, leaves: Sequence[object], has_aux: bool) -> tuple[Output, list[Any]]:
    """Traces the program: (the function's value, flattened by value; the output leaves of the Outcome)."""
    value, _, outputs = traced_output(
        program, leaves, lambda result: split_aux(result, program.name)[0] if has_aux else result
    )
    return value, outputs


class OneShot:
    """A function that is called at most once, and released by the call."""

    # The function refers to the caller's objects, and is part of a treedef, which JAX may keep longer.
    def __init__(self, function: Callable[[list[Any]], object]) -> None:
        self._functions = [function]

    def __call__(self, outputs: Sequence[object]) -> Any:
        return self._functions.pop()(list(outputs))


class ForwardHook:
    """Output leaves, and a callback for their values between the forward and the backward pass.

    It is a pytree node that JAX unflattens when the forward pass has ended: unflattening calls `callback(outputs)` and
    returns its result. So a rule of `custom_vjp`, which runs in the backward pass, finds the caller's objects already
    updated.
    """

    def __init__(self, outputs: Sequence[object], callback: Callable[[list[Any]], object]) -> None:
        self.outputs, self.callback = tuple(outputs), OneShot(callback)


register_pytree_node(ForwardHook, lambda hook: (hook.outputs, hook.callback), lambda callback, out: callback(out))


@contextlib.contextmanager
def explaining_reverse_errors() -> Generator[None]:
    """Adds advice to JAX's error about a loop that cannot be differentiated in reverse mode."""
    try:
        yield
    except ValueError as error:
        if is_of_reverse_loop(error):
            error.add_note(NO_REVERSE)
        raise


def _input_tangents(
    name: str, chosen: Chosen, types: Sequence[TangentType], graphs: Sequence[object]
) -> tuple[Any, ...]:
    """One tangent for each differentiated leaf. Raises TypeError if there is not one graph for each primal."""
    if len(graphs) != len(chosen.roots):
        raise TypeError(TANGENT_COUNT.format(name=name, count=len(chosen.roots), actual=len(graphs)))
    return match_tangents(name, "tangent", types, tuple(graphs))


class LinearMap(NamedTuple):
    """The structure that `linearize` and `vjp` need after the call. It holds none of the caller's objects."""

    name: str
    chosen: Chosen
    inputs: tuple[TangentType, ...]
    output: _core.GraphDef
    outputs: tuple[TangentType, ...]

    def tangents(self, graphs: Sequence[object]) -> tuple[Any, ...]:
        return _input_tangents(self.name, self.chosen, self.inputs, graphs)

    def cotangents(self, graph: object) -> tuple[Any, ...]:
        return match_tangents(self.name, "cotangent", self.outputs, (graph,))

    def output_graph(self, leaves: Sequence[object]) -> Any:
        return _core.unflatten(self.output, [None if is_float0(x) else x for x in leaves])


class Differentiated:
    """A function that is differentiated with respect to the inexact arrays of all its positional arguments."""

    def __init__(
        self, make: Make, fun: Callable[..., object], title: str, primals: Sequence[object], has_aux: bool
    ) -> None:
        self._program, self._chosen = differentiated_program(make, fun, title, primals, {}, range(len(primals)))
        self._has_aux = has_aux
        self.primals = tuple(self._program.leaves[i] for i in self._chosen.leaves)
        key_paths = self._program.key_paths
        self._inputs = tuple(TangentType.from_leaf(self._program.leaves[i], *key_paths[i]) for i in self._chosen.leaves)
        self._output: Output | None = None

        def flat(primals: tuple[object, ...]) -> tuple[Any, list[Any]]:
            leaves = self._program.with_leaves(self._chosen.leaves, primals)
            self._output, outputs = traced_value(self._program, leaves, has_aux)
            return tuple(self._output.leaves), outputs

        self.flat = named(flat, self._program)

    def tangents(self, graphs: Sequence[object]) -> tuple[Any, ...]:
        return _input_tangents(self._program.name, self._chosen, self._inputs, graphs)

    def linear_map(self) -> LinearMap:
        assert self._output is not None
        paths = self._output.graphdef.leaf_paths()
        shapes = tuple(
            TangentType.from_leaf(leaf, 0, path, f"value{path_text(path)}")
            for leaf, path in zip(self._output.leaves, paths, strict=True)
        )
        return LinearMap(self._program.name, self._chosen, self._inputs, self._output.graphdef, shapes)

    def results(self, second: object, outputs: Sequence[object]) -> tuple[Any, ...]:
        """Writes the changes back: (the value, `second`), followed by the auxiliary part with `has_aux`."""
        result = self._program.finish(outputs, untouched=self._program.untouched)
        return (result[0], second, result[1]) if self._has_aux else (result, second)


def with_own_first(fun: Callable[..., object], args: tuple[object, ...]) -> tuple[Any, ...]:
    """The arguments, with the first one in new objects: other uses of its objects are constants, as in Equinox."""
    if not args:
        raise TypeError(FIRST_BY_POSITION.format(name=getattr(fun, "__name__", type(fun).__name__)))
    first, *other_args = args
    # An object of the first argument that is reached elsewhere as well is another one there from now on.
    # What hides state cannot be copied, and has no arrays that are differentiated.
    with contextlib.suppress(UnsupportedValueError):
        first = copy(first)
    return (first, *other_args)


def arrays_only(tree: object) -> Any:
    """The tree with None in place of every leaf that is not an array, as Equinox returns derivatives."""
    leaves, graphdef = _core.flatten(tree)
    # The last argument puts None in place of statics.
    return _core.unflatten(graphdef, leaves, True)
