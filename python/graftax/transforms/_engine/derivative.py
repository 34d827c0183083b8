# SPDX-License-Identifier: Apache-2.0
"""A function with its derivative by the arrays of all its positional arguments, and what derivatives share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, cast

from jax.tree_util import register_pytree_node

from graftax import _core
from graftax._graph.structure import path_text
from graftax._jax.compat import is_of_reverse_loop
from graftax.transforms._engine.lift import Make, Output, named
from graftax.transforms._engine.program import Program
from graftax.transforms._engine.tangents import TangentType, is_nothing, matched
from graftax.transforms._engine.wrt import Chosen, choose, program_by

TANGENT_COUNT = (
    "{name}: there are {count} primals and {given} tangents. Give one graph of tangents for each; None stands for zero."
)
NOT_WITH_AUX = (
    "{name}: with has_aux=True the function returns a pair (value, aux); it returned {found}. Write return value, aux."
)
NO_REVERSE = (
    "A graftax.while_loop(..., max_steps=n), which makes at most n steps, can be differentiated in reverse mode, and "
    "so can a graftax.fori_loop with Python numbers as bounds."
)
FIRST_BY_POSITION = (
    "{name}: the first argument is the one that is differentiated; pass it, and by position. (Functions wrapped with "
    "filter_grad and the like have no other way to know it.)"
)


def split_aux(result: Any, name: str) -> tuple[Any, Any]:
    """The two parts of what a function with `has_aux` returned."""
    if not isinstance(result, (tuple, list)) or len(cast("Sequence[Any]", result)) != 2:
        raise TypeError(NOT_WITH_AUX.format(name=name, found=type(result).__qualname__))
    value, aux = cast("Sequence[Any]", result)
    return value, aux


def traced_output(program: Program, leaves: Sequence[Any], has_aux: bool) -> tuple[Output, list[Any]]:
    """(what the program's function returned, flat and by value; the output leaves of the Outcome)."""
    found: list[Output] = []

    def body(functions: list[Callable[..., Any]], operands: list[Any]) -> Any:
        result = functions[0](*operands)
        if has_aux:
            result = split_aux(result, program.name)
        found.append(Output(*_core.flatten(result[0] if has_aux else result)))
        return result

    _, out = program.trace(leaves, body)
    return found[0], out


class Once:
    """A function that is called once, and let go of then."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._functions = [function]

    def __call__(self, out: Sequence[Any]) -> Any:
        return self._functions.pop()(list(out))


class Arriving:
    """Output leaves that `then` is called with when JAX has their values: between the forward and the backward pass.

    What `then` returns stands in their place from there on. A rule of `custom_vjp` runs in the backward pass, and finds
    the caller's objects as the function left them.
    """

    def __init__(self, out: Sequence[Any], then: Callable[[list[Any]], Any]) -> None:
        self.out, self.then = tuple(out), Once(then)


def _arrive(then: Any, out: Any) -> Any:
    return then(out)


register_pytree_node(Arriving, lambda given: (given.out, given.then), _arrive)


@contextlib.contextmanager
def in_reverse() -> Generator[None]:
    try:
        yield
    except ValueError as error:
        if is_of_reverse_loop(error):
            error.add_note(NO_REVERSE)
        raise


def _counted(name: str, tangents: Sequence[Any], count: int) -> tuple[Any, ...]:
    """The tangents, one for each primal."""
    if len(tangents) != count:
        raise TypeError(TANGENT_COUNT.format(name=name, count=count, given=len(tangents)))
    return tuple(tangents)


class LinearMap(NamedTuple):
    """What a derivative that is asked for later needs. Holds nothing of the caller's objects."""

    name: str
    chosen: Chosen
    inputs: tuple[TangentType, ...]
    output: _core.GraphDef
    outputs: tuple[TangentType, ...]

    def tangents(self, given: Sequence[Any]) -> tuple[Any, ...]:
        return matched(self.name, "tangent", self.inputs, _counted(self.name, given, len(self.chosen.roots)))

    def cotangents(self, given: Any) -> tuple[Any, ...]:
        return matched(self.name, "cotangent", self.outputs, (given,))

    def rate(self, rates: Sequence[Any]) -> Any:
        return _core.unflatten(self.output, [None if is_nothing(x) else x for x in rates])


class Differentiated:
    """A function, differentiated by the inexact arrays of all its positional arguments."""

    def __init__(self, make: Make, fun: Callable[..., Any], title: str, primals: Sequence[Any], has_aux: bool) -> None:
        numbers = range(len(primals))
        self._program = program_by(make, fun, title, primals, {}, numbers)
        self._chosen = choose(self._program, numbers, None, False, make is not Program)
        self._has_aux = has_aux
        self.primals = tuple(self._program.leaves[i] for i in self._chosen.leaves)
        places = self._program.places
        self._inputs = tuple(TangentType.of(self._program.leaves[i], *places[i]) for i in self._chosen.leaves)
        self._output: Output | None = None

        def flat(by: tuple[Any, ...]) -> tuple[Any, list[Any]]:
            leaves = self._program.with_leaves(self._chosen.leaves, by)
            self._output, out = traced_output(self._program, leaves, has_aux)
            return tuple(self._output.leaves), out

        self.flat = named(flat, self._program)

    def tangents(self, given: Sequence[Any]) -> tuple[Any, ...]:
        name = self._program.name
        return matched(name, "tangent", self._inputs, _counted(name, given, len(self._chosen.roots)))

    def rate(self, rates: Sequence[Any]) -> Any:
        return self.later().rate(rates)

    def later(self) -> LinearMap:
        assert self._output is not None
        paths = self._output.graphdef.leaf_paths()
        shapes = tuple(
            TangentType.of(leaf, 0, path, f"value{path_text(path)}")
            for leaf, path in zip(self._output.leaves, paths, strict=True)
        )
        return LinearMap(self._program.name, self._chosen, self._inputs, self._output.graphdef, shapes)

    def results(self, second: Any, out: Sequence[Any]) -> tuple[Any, ...]:
        result = self._program.finish(out, untouched=self._program.untouched)
        return (result[0], second, result[1]) if self._has_aux else (result, second)


def first_given(fun: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    if not args:
        raise TypeError(FIRST_BY_POSITION.format(name=getattr(fun, "__name__", type(fun).__name__)))
    return args


def arrays_only(tree: Any) -> Any:
    """The tree with None for every leaf that is no array: what Equinox gives for derivatives."""
    leaves, graphdef = _core.flatten(tree)
    return _core.unflatten(graphdef, leaves, True)
