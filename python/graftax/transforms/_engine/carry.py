# SPDX-License-Identifier: Apache-2.0
"""The state of a loop: its carry and everything that its functions capture, from one step to the next."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from graftax import _core
from graftax._base.errors import MutationError, StructureError, rename_leaves
from graftax._graph.array_aliases import Source
from graftax._graph.structure_diff import differences, differences_text
from graftax._jax.arrays import ref_types
from graftax._jit.flat_function import in_place_of
from graftax.transforms._engine.loop_state import (
    StateAfter,
    elements,
    node_name,
    numbers_in,
    refuse_hidden_leaves,
    same_type,
    state_after,
    type_text,
    with_arrays,
    with_copies,
)
from graftax.transforms._engine.program import Program, Recipe
from graftax.transforms._engine.retrace import Fixpoint
from graftax.transforms._engine.slices import Slices

LOOP_STRUCTURE = (
    "{name}: a step must not change the structure of its state, and changes it:\n"
    "{differences}\n"
    "(expected is the state before a step, given the state after it.) The state is the carry and "
    "everything that the functions capture. All steps run one compiled program, so only arrays can "
    "change. Turn a number that changes into an array (jnp.asarray), return what is to be collected as "
    "the second result of a scan instead of appending it, and change an object that is held in two places"
    " instead of replacing it."
)
LOOP_TYPE = (
    "{name}: {path} is {expected} before a step and {actual} after it. An array of the state keeps its shape and dtype "
    "in every step: convert it inside of the function (x.astype), or begin with {actual}."
)
TRACED_NUMBERS = "{name}: the Python numbers at {paths} are traced here, because the steps change them."
MOVED = (
    "{name}: a step puts the object at {source} in the place of {path}. Which object is where would depend on the "
    "number of steps: put a copy there (copy.copy), or move the arrays instead of the objects."
)
CHANGED_AND_REPLACED = (
    "{name}: a step changes the object at {path} in place, and then replaces it. The second step would "
    "change that one instead, so only the first change would be kept. Change the object and keep it, or "
    "leave it as it is and put a new one there."
)
NO_CHANGES = (
    "{name}: {what} must not change anything, and changed {paths}. Return what is new instead, or change it elsewhere."
)
NOT_A_TEST = (
    "{name}: cond_fun has to return a scalar boolean array, and returned {actual}. Compare (x > 0), and make one of "
    "several with .any() or .all()."
)
RETURNS_NONE = (
    "{name}: the function returns None, which would be the next step's {carry}. Return what the next step"
    " is to receive, even if it is the object that was changed in place."
)


Body = Callable[[list[Callable[..., Any]], list[Any]], Any]


# Their signatures name the flat arguments of a step in JAX's error messages. They are never called.
def carry_signature(carried: object) -> None: ...


def rows_signature(carried: object, rows: object) -> None: ...


def index_signature(index: object, carried: object) -> None: ...


class Loop:
    """One call of a loop, and what its traces have shown so far about its state.

    Every attempt at tracing the loop builds a new program from these facts. `carry` is the index of the operand that is
    carried; None if there is none.
    """

    def __init__(
        self,
        name: str,
        functions: Sequence[Callable[..., object]],
        operands: Sequence[object],
        carry: int | None = 0,
        slices: Slices | None = None,
    ) -> None:
        self.name, self.functions, self.operands, self.carry = name, functions, operands, carry
        self.slices = slices
        self.differing = ""  # what else differed while the numbers that are traced were static
        self.fixpoint = Fixpoint.for_call(name, functions)

    def run(self, attempt: Callable[[LoopAttempt], object]) -> tuple[Any, Any]:
        """Runs the loop, tracing it until the facts about its state no longer change, and writes changes back.

        Returns:
            (the final carry, the result of the successful attempt).
        """
        attempted, value = self.fixpoint.run(lambda: LoopAttempt(self), attempt, self._explain)
        return attempted.finish(), value

    def _explain(self, attempted: LoopAttempt, error: Exception) -> None:
        rename_leaves(error, [attempted.paths[i] for i in attempted.carried_leaves], "carried")
        # JAX names the leaves after `rows_signature`, and `scan_rows` passes (rows, index) for `rows`.
        rename_leaves(error, self.slices.names if self.slices is not None else [], "rows[0]")
        if numbers := self.fixpoint.facts.numbers:
            error.add_note(TRACED_NUMBERS.format(name=self.name, paths=", ".join(sorted(numbers))))


class LoopAttempt:
    """One attempt at tracing a loop: which leaves JAX carries, and what the last trace of a step did to the state."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._facts = facts = loop.fixpoint.facts
        # No number is traced, or none is any longer: the next comparison shows all differences.
        if not facts.numbers:
            loop.differing = ""
        dynamic = facts.numbers.__contains__ if facts.numbers else None
        self.program = Program(loop.name, loop.functions, loop.operands, dynamic=dynamic)
        key_paths = self.program.key_paths
        self.paths = [key_path.name for key_path in key_paths]
        # A captured leaf that no step changes is a constant of the loop. If it were carried, differentiation would save
        # a captured weight once per step. A `jax.Ref` is a constant as well, because it is mutated in place.
        self.carried_leaves = [
            i
            for i, (leaf, key_path) in enumerate(zip(self.program.leaves, key_paths, strict=True))
            if key_path.name in facts.carried or (key_path.root == loop.carry and not isinstance(leaf, ref_types))
        ]
        self.init = [self.program.leaves[i] for i in self.carried_leaves]
        self._final: Sequence[Any] = self.init
        # The recipe of each carried leaf: two leaves with the same recipe and the same inputs are one array. JAX cannot
        # know that, and returns an array for each.
        self._recipes: dict[int, Recipe] = {}
        self._representatives: list[int] = []  # for each carried leaf, the first one that is the same array
        # The leaf of the state that each output leaf becomes, and the Outcome.
        self._last_trace: tuple[list[int], _core.Outcome] | None = None

    def with_signature(self, flat: Callable[..., object], signature: types.FunctionType) -> Callable[..., Any]:
        """Gives `flat` the user's function name and source location, and the parameters of `signature`."""
        # JAX's error messages show these. It reads the signature through __wrapped__, so a stub with the user's source
        # location takes its place.
        stub = in_place_of(self.program.definition, signature)
        flat.__name__ = flat.__qualname__ = stub.__name__
        flat.__wrapped__ = stub  # type: ignore[attr-defined]
        return flat

    def _leaves(self, carry: Sequence[object]) -> list[Any]:
        return self.program.with_leaves(self.carried_leaves, carry)

    def trace_step(
        self, carry: Sequence[object], body: Body, on_trace: Callable[[Sequence[Any]], None] | None = None
    ) -> list[Any]:
        """Traces one step of the loop, as JAX sees it: from the values of the carried leaves to those after the step.

        Args:
            body: calls the user's function with (functions, operands), and returns the next carry.
            on_trace: is called with all leaves of the program once the step has run.

        Raises:
            Retrace: if the step shows that more leaves have to be carried, traced or copied.
            StructureError: if the structure of the state differs after the step.
        """
        loop, program = self.loop, self.program

        def run(functions: list[Callable[..., Any]], operands: list[Any]) -> Any:
            result = body(functions, operands)
            # A step that changes its carry in place often returns nothing.
            if result is None and loop.carry is not None and loop.operands[loop.carry] is not None:
                raise StructureError(RETURNS_NONE.format(name=loop.name, carry=program.names[loop.carry] or "carry"))
            return with_copies(with_arrays(result), self._facts.copied)

        # After a step, the result takes the place of the carry.
        def roots_after(roots: tuple[object, ...], result: object) -> tuple[tuple[Any, ...], int]:
            i = loop.carry
            return roots if i is None else (*roots[:i], result, *roots[i + 1 :]), 0

        # The state after the step must have the structure of the state before it, because JAX carries flat leaves.
        leaves = self._leaves(carry)
        with loop.fixpoint.tracing():
            outcome, outputs = program.trace(leaves, run, arrays=True)
        view = state_after(program, leaves, outcome, outputs, roots_after)
        state = view.aligned(view.initial)
        if state is None:
            self._handle_structure(view.initial.graphdef, view.final.graphdef)
        self._check_state(state, leaves)
        self._last_trace = state.output_leaves, state.outcome
        if on_trace is not None:
            on_trace(leaves)
        # JAX gives each carried leaf an array of its own. Leaves that hold one tracer now hold one array afterwards.
        values = [state.values[i] for i in self.carried_leaves]
        number: dict[int, int] = {}
        self._representatives = [number.setdefault(id(value), i) for i, value in enumerate(values)]
        sources = dict(zip(map(id, outputs), program.sources, strict=True))
        self._recipes = {
            i: recipe
            for i, leaf in enumerate(self.carried_leaves)
            if (recipe := _recipe_of(leaf, sources, state, leaves))
        }
        return values

    def set_final(self, final: Sequence[object], ran: bool) -> None:
        """Stores the carried leaves after the last step. `ran`: whether at least one step is known to have run."""
        # Where a step puts one array into several places, the final state has one array there, too. Without any step
        # that is true only of places that held one array from the start.
        init, recipes = self.init, {i: recipe for i, recipe in self._recipes.items() if self._representatives[i] == i}
        # If no step has run, each final array is the initial one: as a further input, that has to be the same one, too.
        if not ran:
            recipes = {
                i: (description, (self.carried_leaves[i], *inputs)) for i, (description, inputs) in recipes.items()
            }
        final = self.program.with_ties(final, recipes)
        self._final = [
            final[representative if ran or init[i] is init[representative] else i]
            for i, representative in enumerate(self._representatives)
        ]

    def _check_state(self, state: StateAfter, leaves: list[Any]) -> None:
        loop, program = self.loop, self.program
        # In an aligned state a node that stays where it was has its own number.
        moved = [(t, o) for t, o in enumerate(state.final.origins) if o is not None and o != t]
        if moved:
            self._handle_moves(state, moved)
        # The Outcome changes a node in place and then removes it; a second step would start from the new node instead.
        replaced = [t for t in state.changed if state.final.origins[t] != t]
        if replaced:
            path = node_name(program, state, replaced[0])
            raise StructureError(CHANGED_AND_REPLACED.format(name=loop.name, path=path))
        refuse_hidden_leaves(state)
        # A leaf was assumed to be constant, and the step has put another array at its path.
        carried_leaves = set(self.carried_leaves)
        newly_carried = {
            self.paths[i] for i, leaf in enumerate(leaves) if i not in carried_leaves and state.values[i] is not leaf
        }
        if newly_carried:
            loop.fixpoint.restart(carried=newly_carried)
        for i in self.carried_leaves:
            if not same_type(leaves[i], state.values[i], promote_weak=True):
                expected, actual = type_text(leaves[i]), type_text(state.values[i])
                raise StructureError(
                    LOOP_TYPE.format(name=loop.name, path=self.paths[i], expected=expected, actual=actual)
                )

    def _handle_structure(self, expected: _core.GraphDef, actual: _core.GraphDef) -> NoReturn:
        """Handles a step that changed the structure of the state.

        Raises:
            Retrace: if Python numbers of the carry changed; from now on they are traced.
            StructureError: in every other case.
        """
        loop, program = self.loop, self.program
        # Only numbers of the carry can be traced; a step that changes a captured number is an error.
        if loop.carry is not None:
            differing = {d.path for d in differences(expected, actual, program.names) if d.kind != "order"}
            changed = differing & numbers_in(program, loop.carry)
            if changed - self._facts.numbers:
                # The message shows numbers. Once they are traced, it would show arrays that the user has not made.
                if not loop.differing and differing - changed:
                    loop.differing = differences_text(
                        expected, actual, program.names, orders=False, ignored_paths=changed
                    )
                loop.fixpoint.restart(numbers=changed)
        text = loop.differing or differences_text(expected, actual, program.names, orders=False)
        raise StructureError(LOOP_STRUCTURE.format(name=loop.name, differences=text))

    def _handle_moves(self, state: StateAfter, moved: list[tuple[int, int]]) -> None:
        """Handles objects that a step moved to another place.

        Raises:
            Retrace: if they are objects of the carry that only change places; from now on they are copied.
            StructureError: if a moved object was changed or captured.
        """
        loop, program = self.loop, self.program
        # Copies of the elements that reach a moved object help, unless a step has made them already.
        if loop.carry is not None and not self._facts.copied:
            origins = {source_node for _, source_node in moved}
            # An object that is changed in place must not be copied: the caller's own has to get the change.
            changed_in_place = {t for t in state.changed if state.final.origins[t] == t}
            reached = [state.reached(part) for part in elements(state.result)]
            copied_elements = [i for i, nodes in enumerate(reached) if origins & nodes]
            if copied_elements and not any(changed_in_place & reached[i] for i in copied_elements):
                loop.fixpoint.restart(copied=set(copied_elements))
        target, source_node = moved[0]
        path, source_path = (node_name(program, state, node) for node in (target, source_node))
        raise StructureError(MOVED.format(name=loop.name, path=path, source=source_path))

    def trace_condition(self, carry: Sequence[object], body: Body) -> Any:
        """Traces the condition of a `while_loop`: a scalar boolean array. The condition must not change anything."""
        with self.loop.fixpoint.tracing(1):
            result = call_pure(self.program, self._leaves(carry), body, "cond_fun")
        if isinstance(result, bool):
            return jnp.asarray(result)
        if np.shape(result) != () or getattr(result, "dtype", None) != np.dtype(bool):
            raise TypeError(NOT_A_TEST.format(name=self.loop.name, actual=type_text(result)))
        return result

    def finish(self) -> Any:
        assert self._last_trace is not None
        numbers, outcome = self._last_trace
        if self.loop.slices is not None:
            self.loop.slices.check(self.program, outcome)
        leaves = self._leaves(self._final)
        return self.program.finish([leaves[number] for number in numbers], outcome)


def _recipe_of(leaf: int, sources: dict[int, Source | None], state: StateAfter, leaves: list[Any]) -> Recipe | None:
    """How the steps compute a leaf, and from which leaves: (description, input leaves)."""
    # Two leaves with equal descriptions and identical inputs are one array after every step. An input may itself be the
    # result of an earlier step, so the description follows inputs through all leaves that they depend on.
    first_seen: dict[int, int] = {}

    def describe(index: int) -> Hashable:
        value = state.values[index]
        if index in first_seen:
            return "again", first_seen[index]
        first_seen[index] = len(first_seen)
        return "same" if value is leaves[index] else describe_source(value) or ("to", id(value))

    def describe_source(value: object) -> Hashable:
        source = sources.get(id(value))
        return None if source is None else (source.operation, *map(describe, source.inputs))

    description = describe_source(state.values[leaf])
    return None if description is None else (description, tuple(first_seen))


def call_pure(program: Program, leaves: Sequence[object], body: Body, role: str) -> Any:
    """Traces `body`, which must not change its operands or what it captures, and returns its result.

    Raises:
        MutationError: if it changes something; `role` says in the message what was called.
    """
    results: list[Any] = []

    def run(functions: list[Callable[..., Any]], operands: list[Any]) -> None:
        results.append(body(functions, operands))

    outcome, outputs = program.trace(leaves, run, arrays=True)
    if outcome.num_writes:
        state = state_after(program, leaves, outcome, outputs, lambda roots, _: (roots, 0))
        paths = ", ".join(node_name(program, state, i) for i in state.changed)
        raise MutationError(NO_CHANGES.format(name=program.name, what=role, paths=paths))
    return results[-1]
