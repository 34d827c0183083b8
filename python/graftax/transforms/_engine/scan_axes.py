# SPDX-License-Identifier: Apache-2.0
"""`scan` by axes: each argument and result is a carry, rows along an axis, or the same in every step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from graftax import _core, interop
from graftax._base.errors import StructureError
from graftax._graph.structure_diff import differ_only_in_order, differences_text
from graftax.transforms._engine.argument_specs import OutputLeaf, as_positional, broadcast_of, trace_outputs
from graftax.transforms._engine.carry import LOOP_STRUCTURE, MOVED
from graftax.transforms._engine.lift import call_first, name_of, named, wraps
from graftax.transforms._engine.loop_state import StateAfter, node_name, state_after, type_text, with_arrays
from graftax.transforms._engine.program import Program
from graftax.transforms._engine.retrace import Retrace
from graftax.transforms._engine.specs import SpecOption
from graftax.transforms.vmap import canonical_axis, size_of

ONE_CARRY = (
    "{name}: {option} has Carry as a whole entry {count} times, and may have it only once. Put what is carried"
    " into one argument, such as a tuple."
)
CARRY_IN_ONE = "{name}: Carry is in {one} and not in {other}. What is carried is both an argument and a result."
NOT_A_TUPLE = "{name}: out_axes is a tuple of {count}, and the function returned {actual}."
NO_LENGTH = "{name}: in_axes gives no array an axis, so the number of steps is not known: pass length=."
OTHER_CARRY = "{name}: a step has to return a carry of the structure that it was given, and does not:\n{differences}"
NEW_PLACE = (
    "{name}: a step puts an array at {path}, where there was none before it, in an object without rows. The next step "
    "would begin with another structure: make the place beforehand, or return the array."
)


class Carry:
    """Marks what is carried from one step to the next, in `in_axes` and `out_axes` of `graftax.scan`.

    Example:
        >>> total = graftax.scan(lambda s, x: s + x, in_axes=(graftax.Carry, 0), out_axes=graftax.Carry)
        >>> total(jnp.zeros(()), jnp.ones(3)).item()
        3.0
    """


def is_carry(spec: object) -> bool:
    return spec is Carry or interop.is_carry(spec)


def _is_entry(spec: object) -> bool:
    return spec is None or type(spec) is int or is_carry(spec)


def _canonical(axis: Any, leaf: Any, extra_dims: int = 0) -> Any:
    # What is carried has no axis of rows.
    return None if is_carry(axis) else canonical_axis(axis, leaf, extra_dims)


def scan_by_axes(
    f: Callable[..., object], in_axes: object, out_axes: object, length: int | None, reverse: bool, unroll: int | bool
) -> Callable[..., Any]:
    """`graftax.scan` without an initial carry: returns a function of the carry, rows and constants, in any order."""
    name = name_of(f, "scan")
    carry_in, carry_out = _carry_position(name, "in_axes", in_axes), _carry_position(name, "out_axes", out_axes)
    if (carry_in is None) != (carry_out is None):
        present, absent = ("in_axes", "out_axes") if carry_out is None else ("out_axes", "in_axes")
        raise ValueError(CARRY_IN_ONE.format(name=name, one=present, other=absent))

    @wraps(f, "scan")
    def scanned(*args: object, **kwargs: object) -> Any:
        args, kwargs = as_positional(f, in_axes, args, kwargs)
        # A number that the steps change would be an array after the first one.
        if carry_in is not None and carry_in < len(args):
            args = (*args[:carry_in], with_arrays(args[carry_in]), *args[carry_in + 1 :])
        program = Program(name, [f], args, kwargs)
        return _AxesScan(program, in_axes, carry_in, out_axes).run(length, reverse, unroll)

    return scanned


class _AxesScan:
    """One call of a scan by axes. `carry` is the position of the argument that is carried."""

    def __init__(self, program: Program, in_axes: object, carry: int | None, out_axes: Any) -> None:
        self._program, self._carry, self._out_axes = program, carry, out_axes
        expected = "an axis (int or None) or Carry"
        self._option = SpecOption(program.name, "in_axes", expected, None, _is_entry, _canonical)
        self._broadcast = broadcast_of(program, self._option, in_axes, None)
        leaf_specs = self._broadcast.leaf_specs
        # From here on a carried leaf is one without an axis. Others of these are constants until a step is seen to
        # change them. Then they are carried, and the loop is traced again.
        self._carried = {i for i, axis in enumerate(leaf_specs) if is_carry(axis)}
        leaf_specs[:] = [None if is_carry(axis) else axis for axis in leaf_specs]
        self._rows = [i for i, axis in enumerate(leaf_specs) if axis is not None]
        self._constant_roots = _constant_roots(program, in_axes)
        self._outputs: list[OutputLeaf] = []
        # For each output leaf the leaf that it replaces in the next step, if it is carried.
        self._carry_targets: list[int | None] = []

    def run(self, length: int | None, reverse: bool, unroll: int | bool) -> Any:
        program, axes = self._program, self._broadcast.leaf_specs
        if not self._rows and length is None:
            raise ValueError(NO_LENGTH.format(name=program.name))
        length = size_of(program, self._broadcast, length)
        # jax.lax.scan iterates over axis 0 only.
        rows = [jnp.moveaxis(program.leaves[i], axes[i], 0) for i in self._rows]
        while True:
            carried = sorted(self._carried)
            body = named(functools.partial(self._scan_body, carried), program)
            try:
                final_carry, stacked_outputs = jax.lax.scan(
                    body, [program.leaves[i] for i in carried], rows, length=length, reverse=reverse, unroll=unroll
                )
                break
            except Retrace:
                continue
        # Each output leaf is carried, and has its value after the last step, or was stacked by JAX.
        final, stacked = dict(zip(carried, final_carry, strict=True)), iter(stacked_outputs)
        results: list[Any] = []
        for output, carry_leaf in zip(self._outputs, self._carry_targets, strict=True):
            if carry_leaf is not None:
                results.append(final[carry_leaf])
                continue
            # Without an axis, the result is that of the last step.
            axis, rows_of_output = output.spec, next(stacked)
            last_row = 0 if reverse else -1
            results.append(rows_of_output[last_row] if axis is None else jnp.moveaxis(rows_of_output, 0, axis))
        untouched = {
            i: o.input_leaf
            for i, o in enumerate(self._outputs)
            if o.input_leaf is not None and self._carry_targets[i] is None
        }
        return program.finish(results, untouched=untouched)

    def _scan_body(self, carried: list[int], carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        program = self._program
        leaves = program.with_leaves([*carried, *self._rows], [*carry, *rows])
        carry_paths: dict[Any, int] = {}  # from key paths in the carry to leaves of the program

        def call(functions: Sequence[Callable[..., object]], operands: Sequence[object]) -> Any:
            if self._carry is None:
                return call_first(functions, operands)
            # Before the call, which may change the carry in place. A tracer tells which leaf of the program it is.
            carry_leaves, graphdef = _core.flatten(operands[self._carry])
            leaf_index = {id(leaf): i for i, leaf in enumerate(leaves)}
            carry_paths.update(
                {path: leaf_index[id(x)] for path, x in zip(graphdef.leaf_paths(), carry_leaves, strict=True)}
            )
            result, carry = self._with_arrays(call_first(functions, operands))
            final_graphdef = _core.flatten(carry)[1]
            if final_graphdef != graphdef:
                text = differences_text(graphdef, final_graphdef, ("carry",))
                raise StructureError(OTHER_CARRY.format(name=program.name, differences=text))
            return result

        # As in `vmap`: a step's output has one dimension less than `out_axes` counts.
        results = self._option._replace(keyword="out_axes", canonical=functools.partial(_canonical, extra_dims=1))
        self._outputs = trace_outputs(program, self._broadcast, results, leaves, self._out_axes, call=call)
        self._carry_targets = self._find_carry_targets(carry_paths)
        self._check_constants(leaves)
        # A constant that the step has written to must be carried: the next step has to see the new value.
        next_carry = dict(zip(carried, carry, strict=True))
        newly_carried = {carry_leaf for carry_leaf in self._carry_targets if carry_leaf is not None} - self._carried
        if newly_carried:
            self._carried |= newly_carried
            raise Retrace
        next_carry.update(
            (carry_leaf, output.leaf)
            for output, carry_leaf in zip(self._outputs, self._carry_targets, strict=True)
            if carry_leaf is not None
        )
        return [next_carry[i] for i in carried], [
            o.leaf for o, carry_leaf in zip(self._outputs, self._carry_targets, strict=True) if carry_leaf is None
        ]

    def _check_constants(self, leaves: Sequence[object]) -> None:
        """Raises StructureError if a step changes more than arrays in a constant root: the next would not see it."""
        program, outcome = self._program, self._program.outcome
        assert outcome is not None
        if not outcome.num_writes or not self._constant_roots:
            return
        names = tuple(program.names[i] for i in self._constant_roots)
        state = state_after(program, leaves, outcome, [o.leaf for o in self._outputs], lambda roots, _: (roots, 0))
        # Any arrays do: only the structures are compared.
        roots = program.rebuilt([np.zeros(()) for _ in leaves])
        expected, actual = (
            _core.record(tuple(graph[i] for i in self._constant_roots), names)[1] for graph in (roots, state.roots)
        )
        if not differ_only_in_order(expected, actual):
            text = differences_text(expected, actual, names, orders=False)
            raise StructureError(LOOP_STRUCTURE.format(name=program.name, differences=text))
        self._check_places(state)

    def _check_places(self, state: StateAfter) -> None:
        """Raises StructureError if a step moves an object of a constant root: the next step would not see the move."""
        for node, origin in enumerate(state.final.origins):
            key_path = state.final.node_path(node)
            if (
                origin is not None
                and key_path[0] in self._constant_roots
                and key_path != state.initial.node_path(origin)
            ):
                path, source = (node_name(self._program, state, moved_node) for moved_node in (node, origin))
                raise StructureError(MOVED.format(name=self._program.name, path=path, source=source))

    def _with_arrays(self, result: Any) -> tuple[Any, Any]:
        """(the result, in which numbers of the carry are arrays; its carry)."""
        axes = self._out_axes
        if is_carry(axes):
            result = with_arrays(result)
            return result, result
        if not isinstance(result, (tuple, list)) or len(cast("Sequence[Any]", result)) != len(axes):
            count = f" of {len(cast('Sequence[Any]', result))}" if isinstance(result, (tuple, list)) else ""
            returned = type_text(result) + count
            raise ValueError(NOT_A_TUPLE.format(name=self._program.name, count=len(axes), actual=returned))
        carry_position = next(i for i, axis in enumerate(axes) if is_carry(axis))
        enumerated = enumerate(cast("Sequence[Any]", result))
        parts: list[Any] = [with_arrays(x) if i == carry_position else _copied(x) for i, x in enumerated]
        return type(cast("Any", result))(parts), parts[carry_position]

    def _find_carry_targets(self, carry_paths: dict[Any, int]) -> list[int | None]:
        """For each output leaf the leaf of the program that it replaces in the next step, if it is carried."""
        outcome = self._program.outcome
        assert outcome is not None
        tracks = outcome.inputs()[2]
        carry_leaves: list[int | None] = []
        for (root, path), output in zip(outcome.leaf_places(), self._outputs, strict=True):
            carry_leaf = None
            # The carry is the result as a whole, or the element of a tuple, whose index begins the path.
            if root == 0 and is_carry(output.spec):
                carry_leaf = carry_paths[path if is_carry(self._out_axes) else path[1:]]
            elif root > 0 and (output.spec is None or is_carry(output.spec)):
                carry_leaf = self._broadcast.leaf_at(tracks[root - 1], path)
                if carry_leaf is None:
                    raise StructureError(NEW_PLACE.format(name=self._program.name, path=output.path))
            carry_leaves.append(carry_leaf)
        return carry_leaves


def _constant_roots(program: Program, in_axes: object) -> list[int]:
    """The roots that are the same in every step: arguments whose entry is None, and captured variables."""
    # Keyword arguments are among them: `broadcast_of` is told to give them no axis.
    entries = cast("Sequence[Any]", in_axes) if isinstance(in_axes, (tuple, list)) else [in_axes] * program.positional
    return [i for i in range(len(program.roots)) if i >= len(entries) or entries[i] is None]


def _carry_position(name: str, option: str, axes: object) -> int | None:
    """The position of the carry among the arguments, or in the result; 0 if `axes` is Carry as a whole."""
    if is_carry(axes):
        return 0
    if not isinstance(axes, (tuple, list)):
        return None
    positions = [i for i, axis in enumerate(cast("Sequence[Any]", axes)) if is_carry(axis)]
    if len(positions) > 1:
        raise ValueError(ONE_CARRY.format(name=name, option=option, count=len(positions)))
    return positions[0] if positions else None


def _copied(part: object) -> Any:
    """A copy of a part of the result. If it is the carry as well, its stacked rows must be a separate object."""
    leaves, graphdef = _core.flatten(part)
    return _core.unflatten(graphdef, leaves)
