# SPDX-License-Identifier: Apache-2.0
"""A loop that is told of each argument and result what it is: a carry, rows of an axis, or always the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from graftax import _core, interop
from graftax._base.errors import StructureError
from graftax._graph.structure_diff import differences_text, only_order
from graftax.transforms._engine.carry import LOOP_STRUCTURE, MOVED
from graftax.transforms._engine.graph_after import StateAfter, node_name, state_after, type_text, with_arrays
from graftax.transforms._engine.leaf_specs import OutputLeaf, Outputs, as_positional, broadcast_of
from graftax.transforms._engine.lift import call_first, name_of, named, wraps
from graftax.transforms._engine.program import Program
from graftax.transforms._engine.specs import SpecOption
from graftax.transforms.vmap import size_of

ONE_CARRY = (
    "{name}: {option} has {count} times Carry as a whole entry, and may have it once. Put what is carried into one "
    "argument, such as a tuple."
)
CARRY_IN_ONE = (
    "{name}: Carry stands in {one} and not in {other}. What is carried comes as an argument, and goes as a result."
)
NOT_A_TUPLE = "{name}: out_axes is a tuple of {count}, and the function returned {found}."
NO_LENGTH = "{name}: in_axes gives no array an axis, so the number of steps is not known: pass length=."
OTHER_CARRY = "{name}: a step has to return a carry of the structure that it was given, and does not:\n{differences}"
NEW_PLACE = (
    "{name}: a step puts an array at {path}, where there was none before it, in an object without rows. The next step "
    "would begin with another structure: make the place beforehand, or return the array."
)


class Carry:
    """Stands in `in_axes` and `out_axes` of `graftax.scan` for what goes from one step to the next."""


_ENTRY = "an axis (int or None) or Carry"


def is_carry(spec: Any) -> bool:
    return spec is Carry or interop.is_carry(spec)


def _is_entry(spec: Any) -> bool:
    return spec is None or type(spec) is int or is_carry(spec)


def _canonical(axis: Any, leaf: Any, more: int = 0) -> Any:
    if axis is None or is_carry(axis):  # both are the same for all rows
        return None
    return axis + np.ndim(leaf) + more if axis < 0 else axis


class _Later(Exception):
    """More of what the function is given goes from step to step than was known."""


def scan_by_axes(
    f: Callable[..., Any], in_axes: Any, out_axes: Any, length: int | None, reverse: bool, unroll: int | bool
) -> Callable[..., Any]:
    """What `graftax.scan` is without a first carry: a function of the carry, rows and constants, in any order."""
    name = name_of(f, "scan")
    carry_in, carry_out = _position(name, "in_axes", in_axes), _position(name, "out_axes", out_axes)
    if (carry_in is None) != (carry_out is None):
        one, other = ("in_axes", "out_axes") if carry_out is None else ("out_axes", "in_axes")
        raise ValueError(CARRY_IN_ONE.format(name=name, one=one, other=other))

    @wraps(f, "scan")
    def scanned(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = as_positional(f, in_axes, args, kwargs)
        if carry_in is not None and carry_in < len(args):
            args = (*args[:carry_in], with_arrays(args[carry_in]), *args[carry_in + 1 :])
        program = Program(name, [f], args, kwargs)
        steps = _Steps(program, in_axes, carry_in, out_axes)
        return steps.run(steps.size(length), reverse, unroll)

    return scanned


class _Steps:
    """One call: the function as a step of `jax.lax.scan`.

    Rows go in and come out by the axes. What is the same for all steps is a constant until a step is seen to change it.
    Then it is carried, and the loop is traced again.

    Args:
        program: the function and its arguments.
        in_axes, out_axes: what they and its result are.
        carry: the argument that is carried.
    """

    def __init__(self, program: Program, in_axes: Any, carry: int | None, out_axes: Any) -> None:
        self._program, self._carry, self._out_axes = program, carry, out_axes
        self._option = SpecOption(program.name, "in_axes", _ENTRY, None, _is_entry, _canonical)
        self._broadcast = broadcast_of(program, self._option, in_axes, None)
        given = self._broadcast.leaf_specs
        self._carried = {i for i, axis in enumerate(given) if is_carry(axis)}
        given[:] = [None if is_carry(axis) else axis for axis in given]
        self._rows = [i for i, axis in enumerate(given) if axis is not None]
        self._same = _always_the_same(program, in_axes)
        self._outputs: list[OutputLeaf] = []
        self._of: list[int | None] = []  # for each output leaf the leaf whose place it takes, where it is carried

    def size(self, length: int | None) -> int:
        if not self._rows and length is None:
            raise ValueError(NO_LENGTH.format(name=self._program.name))
        return size_of(self._program, self._broadcast, length)

    def run(self, length: int, reverse: bool, unroll: int | bool) -> Any:
        program, axes = self._program, self._broadcast.leaf_specs
        rows = [jnp.moveaxis(program.leaves[i], axes[i], 0) for i in self._rows]
        while True:
            carried = sorted(self._carried)
            step = named(functools.partial(self._step, carried), program)
            try:
                last, out = jax.lax.scan(
                    step, [program.leaves[i] for i in carried], rows, length=length, reverse=reverse, unroll=unroll
                )
                break
            except _Later:
                continue
        final, stacked = dict(zip(carried, last, strict=True)), iter(out)
        results: list[Any] = []
        for output, of in zip(self._outputs, self._of, strict=True):
            if of is not None:
                results.append(final[of])
            else:  # the same for all steps is what the last one gave
                axis, of_all = output.spec, next(stacked)
                results.append(of_all[0 if reverse else -1] if axis is None else jnp.moveaxis(of_all, 0, axis))
        untouched = {i: o.of for i, o in enumerate(self._outputs) if o.of is not None and self._of[i] is None}
        return program.finish(results, untouched=untouched)

    def _step(self, carried: list[int], carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        program = self._program
        leaves = program.with_leaves([*carried, *self._rows], [*carry, *rows])
        own: dict[Any, int] = {}  # path in the carry: leaf of the program

        def call(functions: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
            if self._carry is None:
                return call_first(functions, operands)
            found, graphdef = _core.flatten(operands[self._carry])
            at = {id(leaf): i for i, leaf in enumerate(leaves)}
            own.update({path: at[id(x)] for path, x in zip(graphdef.leaf_paths(), found, strict=True)})
            result, carry = self._with_arrays(call_first(functions, operands))
            after = _core.flatten(carry)[1]
            if after != graphdef:
                text = differences_text(graphdef, after, ("carry",))
                raise StructureError(OTHER_CARRY.format(name=program.name, differences=text))
            return result

        results = self._option._replace(keyword="out_axes", canonical=functools.partial(_canonical, more=1))
        outputs = Outputs(program, self._broadcast, results, leaves)
        self._outputs = outputs.trace(self._out_axes, call=call)
        self._of = self._places(own)
        self._check_same(leaves)
        new = dict(zip(carried, carry, strict=True))
        more = {of for of in self._of if of is not None} - self._carried
        if more:
            self._carried |= more
            raise _Later
        new.update((of, output.leaf) for output, of in zip(self._outputs, self._of, strict=True) if of is not None)
        return [new[i] for i in carried], [o.leaf for o, of in zip(self._outputs, self._of, strict=True) if of is None]

    def _check_same(self, leaves: Sequence[Any]) -> None:
        """Raises where a step changes other than arrays in what has no rows: the next one would find it as it was."""
        program, outcome = self._program, self._program.outcome
        assert outcome is not None
        if not outcome.num_writes or not self._same:
            return
        names = tuple(program.names[i] for i in self._same)
        after = state_after(program, leaves, outcome, [o.leaf for o in self._outputs], lambda roots, _: (roots, 0))
        roots = program.rebuilt([np.zeros(()) for _ in leaves])
        one, other = (_core.record(tuple(graph[i] for i in self._same), names)[1] for graph in (roots, after.roots))
        if not only_order(one, other):
            text = differences_text(one, other, names, orders=False)
            raise StructureError(LOOP_STRUCTURE.format(name=program.name, differences=text))
        self._check_places(after)

    def _check_places(self, after: StateAfter) -> None:
        """Raises where a step moves objects that the next one would find where they were."""
        for node, origin in enumerate(after.after.origins):
            place = after.after.place(node)
            if origin is not None and place[0] in self._same and place != after.before.place(origin):
                path, source = (node_name(self._program, after, at) for at in (node, origin))
                raise StructureError(MOVED.format(name=self._program.name, path=path, source=source))

    def _with_arrays(self, result: Any) -> tuple[Any, Any]:
        """The result with arrays for the numbers of its carry, and the carry."""
        axes = self._out_axes
        if is_carry(axes):
            result = with_arrays(result)
            return result, result
        if not isinstance(result, (tuple, list)) or len(cast("Sequence[Any]", result)) != len(axes):
            count = f" of {len(cast('Sequence[Any]', result))}" if isinstance(result, (tuple, list)) else ""
            found = type_text(result) + count
            raise ValueError(NOT_A_TUPLE.format(name=self._program.name, count=len(axes), found=found))
        at = next(i for i, axis in enumerate(axes) if is_carry(axis))
        several = enumerate(cast("Sequence[Any]", result))
        parts: list[Any] = [with_arrays(x) if i == at else _copied(x) for i, x in several]
        return type(cast("Any", result))(parts), parts[at]

    def _places(self, own: dict[Any, int]) -> list[int | None]:
        """For each output leaf the leaf of the program in whose place it stands in the next step."""
        outcome = self._program.outcome
        assert outcome is not None
        tracks = outcome.inputs()[2]
        found: list[int | None] = []
        for (root, path), output in zip(outcome.leaf_places(), self._outputs, strict=True):
            of = None
            if root == 0 and is_carry(output.spec):
                of = own[path if is_carry(self._out_axes) else path[1:]]
            elif root > 0 and (output.spec is None or is_carry(output.spec)):
                of = self._broadcast.leaf_at(tracks[root - 1], path)
                if of is None:
                    raise StructureError(NEW_PLACE.format(name=self._program.name, path=output.path))
            found.append(of)
        return found


def _always_the_same(program: Program, in_axes: Any) -> list[int]:
    """The roots that no entry gives rows or carries: arguments with None, and what is captured."""
    each = cast("Sequence[Any]", in_axes) if isinstance(in_axes, (tuple, list)) else [in_axes] * program.positional
    return [i for i in range(len(program.roots)) if i >= len(each) or each[i] is None]


def _position(name: str, option: str, axes: Any) -> int | None:
    """Which argument, or part of the result, is the carry; 0 where it is all."""
    if is_carry(axes):
        return 0
    if not isinstance(axes, (tuple, list)):
        return None
    found = [i for i, axis in enumerate(cast("Sequence[Any]", axes)) if is_carry(axis)]
    if len(found) > 1:
        raise ValueError(ONE_CARRY.format(name=name, option=option, count=len(found)))
    return found[0] if found else None


def _copied(part: Any) -> Any:
    """A part of the result that may be the carry too: its rows are another object than what the last step left."""
    leaves, graphdef = _core.flatten(part)
    return _core.unflatten(graphdef, leaves)
