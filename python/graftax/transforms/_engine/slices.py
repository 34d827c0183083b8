# SPDX-License-Identifier: Apache-2.0
"""The rows that a loop iterates over, and the loop in plain Python."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from graftax import _core
from graftax._base.errors import StructureError
from graftax._graph.stack import is_layer
from graftax._graph.structure import RootPath, place_name
from graftax._graph.structure_diff import differences, differences_text
from graftax._jax.arrays import is_dimension
from graftax.transforms._engine.loop_state import type_text, with_arrays
from graftax.transforms._engine.program import Program

NOT_A_PAIR = (
    "{name}: the function has to return a pair (carry, y), and returned {actual}. Return (carry, None) for no y."
)
NOT_SLICED = (
    "{name}: {path} is a scalar and has no rows to go over. What is the same in each step belongs in the carry or "
    "the closure; a Python number in xs is the same in each step."
)
OTHER_LENGTH = (
    "{name}: {path} has {count} rows and {first} means {length}. All arrays of xs need the same number of rows."
)
OF_OBJECTS = " (For one step per object in this list: graftax.each(xs).)"
NO_LENGTH = (
    "{name}: xs holds no array, so the number of steps is not known: pass length=, or arrays with a row for each step "
    "(jnp.arange(n) for a range)."
)
CHANGED_TWICE = (
    "{name}: a step changes {path} through what it captures or carries, and {other} through the slice of "
    "it that it is given. One of the two would be lost. Change it in one way."
)
WRONG_LENGTH = "{name}: length={actual!r}: expected a whole number of steps, 0 or more."
OTHER_ELEMENTS = "{name}: the function has to return the same structure each time, and does not:\n{differences}"

R = TypeVar("R")


class Slices:
    """The `xs` of a loop: each step receives a new graph of rows, and its changes to that graph are written back."""

    # The graph of rows has the structure of `xs`. So the Outcome of tracing one step can be applied to the caller's
    # objects after the loop, with the stacked rows of all steps.
    def __init__(self, name: str, xs: object, length: int | None) -> None:
        if length is not None and not isinstance(length, Tracer) and type(length) is not int:
            length = _whole_number(name, length)
        if isinstance(length, int) and length < 0:
            raise ValueError(WRONG_LENGTH.format(name=name, actual=length))
        self._program = Program(name, [_rows], [xs])
        self.leaves, self.names = self._program.leaves, [key_path.name for key_path in self._program.key_paths]
        # JAX reports other sizes without their paths, so they are compared here.
        hint = OF_OBJECTS if _is_list_of_objects(xs) else ""
        first_path = ""
        for leaf, path in zip(self.leaves, self.names, strict=True):
            shape = np.shape(leaf)
            if not shape:
                raise ValueError(NOT_SLICED.format(name=name, path=path) + hint)
            if length is None:
                length, first_path = shape[0], path
            elif shape[0] != length:
                source = first_path or f"length={length}"
                text = OTHER_LENGTH.format(name=name, path=path, count=shape[0], first=source, length=length)
                raise ValueError(text + hint)
            first_path = first_path or path
        if length is None:
            raise ValueError(NO_LENGTH.format(name=name))
        self.length: Any = length  # an int, or a symbolic dimension

    def trace_step(self, rows: Sequence[object], function: Callable[[Any], R]) -> tuple[R, list[Any]]:
        """Traces `function` on the graph with these rows: (its result, the arrays that it put into the graph)."""
        results: list[R] = []

        def body(functions: object, operands: list[Any]) -> None:
            del functions
            results.append(function(operands[0]))

        _, outputs = self._program.trace(rows, body, arrays=True)
        untouched = self._program.untouched
        return results[-1], [leaf for i, leaf in enumerate(outputs) if i not in untouched]

    def check(self, program: Program, outcome: _core.Outcome) -> None:
        """Raises StructureError if a step changes an object both in its slice and in the state of the loop."""
        outcome_of_slice = self._program.outcome
        if not outcome.num_writes or outcome_of_slice is None or not outcome_of_slice.num_writes:
            return
        slice_walk, state_walk = (_core.walk(p.graphdef, p.roots) for p in (self._program, program))
        # An object that was changed meanwhile has another structure: `finish` raises the error for that.
        if slice_walk is None or state_walk is None:
            return
        slice_index = {id(node): i for i, node in enumerate(slice_walk[1])}
        for i in outcome.inputs()[2]:
            node = slice_index.get(id(state_walk[1][i]))
            if node is not None:
                path, slice_path = self._name(node), self._name(outcome_of_slice.inputs()[2][0])
                raise StructureError(CHANGED_TWICE.format(name=program.name, path=path, other=slice_path))

    def _name(self, node: int) -> str:
        program = self._program
        return place_name(program.graphdef._node_place(node), program.names)  # pyright: ignore[reportPrivateUsage]

    def finish(self, changed: Sequence[object]) -> None:
        """Applies the Outcome of the last traced step to the caller's objects, with the rows of all steps."""
        program, changed_leaves = self._program, iter(changed)
        if self.length == 0 or program.outcome is None or not program.outcome.num_writes:
            return
        # A row that a step put somewhere as it was: all rows are the array of `xs` itself.
        untouched = program.untouched
        count = len(changed) + len(untouched)
        outputs = [program.leaves[untouched[i]] if i in untouched else next(changed_leaves) for i in range(count)]
        program.finish(outputs, untouched=untouched)


def _rows(xs: object) -> None:
    """Its parameter gives `xs` its name in messages."""


def _whole_number(name: str, length: Any) -> Any:
    """A number of steps as JAX takes it: 3.0 becomes 3, and a symbolic dimension stays as it is."""
    if is_dimension(type(length)):
        return length
    with contextlib.suppress(TypeError, ValueError):
        if int(length) == length:
            return int(length)
    raise ValueError(WRONG_LENGTH.format(name=name, actual=length))


def as_pair(name: str, result: Any) -> tuple[Any, Any]:
    """The result of a step as (carry, y). Raises TypeError if it is not a pair."""
    is_sequence = type(result) in (tuple, list)
    if not is_sequence or len(result) != 2:
        raise TypeError(NOT_A_PAIR.format(name=name, actual=type_text(result) + f" of {len(result)}" * is_sequence))
    return cast("tuple[Any, Any]", result)


def plain_scan(name: str, f: Callable[..., object], carry: object, slices: Slices, reverse: bool) -> tuple[Any, Any]:
    """The loop in plain Python, on the caller's own objects, for `jax.disable_jit`."""
    changed: list[list[Any]] = []

    def step(carry: object, i: int) -> Any:
        result, updated_rows = slices.trace_step([leaf[i] for leaf in slices.leaves], functools.partial(f, carry))
        changed.append(updated_rows)
        return result

    carry, y = plain_loop(name, step, carry, range(slices.length), reverse)
    slices.finish(_columns(changed[::-1] if reverse else changed))
    return carry, y


def plain_loop(name: str, step: Callable[..., Any], carry: object, xs: Sequence[Any], reverse: bool) -> tuple[Any, Any]:
    """The loop in plain Python: each step receives an element of `xs`, such as one of a list of objects."""
    ys: list[tuple[list[Any], _core.GraphDef]] = []
    for x in reversed(xs) if reverse else xs:
        carry, y = as_pair(name, step(carry, x))
        # Flattened at once: a later step may change an object that this one has returned.
        ys.append(_core.flatten(with_arrays(y)))
    return carry, _stacked_results(name, ys[::-1] if reverse else ys)


def _stacked_results(name: str, ys: list[tuple[list[Any], _core.GraphDef]]) -> Any:
    # Numbers that differ between steps become arrays, because a compiled loop would trace them.
    changing = {d.path for _, graphdef in ys for d in differences(ys[0][1], graphdef, ("y",))}
    if changing:

        def changes(key_path: RootPath) -> bool:
            return place_name(key_path, ("y",)) in changing

        ys = [_core.record((_core.unflatten(g, y),), ("y",), dynamic=changes) for y, g in ys]
    for _, graphdef in ys:
        if graphdef != ys[0][1]:
            text = differences_text(ys[0][1], graphdef, ("y",))
            raise StructureError(OTHER_ELEMENTS.format(name=name, differences=text))
    return _core.unflatten(ys[0][1], _columns([leaves for leaves, _ in ys]))


def _columns(rows: list[list[Any]]) -> list[Any]:
    return [jnp.stack([jnp.asarray(x) for x in column]) for column in zip(*rows, strict=True)]


def _is_list_of_objects(xs: object) -> bool:
    objects = cast("list[Any]", xs) if type(xs) in (list, tuple) else []
    if not objects or hasattr(objects[0], "shape") or len(set(map(type, objects))) > 1:
        return False
    return type(xs) is tuple or not is_layer(objects[0])  # for a list of layers, a note says more
