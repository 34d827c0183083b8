# SPDX-License-Identifier: Apache-2.0
"""Branches over any objects: `cond` and `switch`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar, TypeVarTuple

import jax
import numpy as np
from jax.core import Tracer

from graftax import _core
from graftax._base.errors import StructureError, rename_leaves
from graftax._graph.structure import place_name
from graftax._graph.structure_diff import differ_only_in_order, differences, differences_text
from graftax._jax.tracebacks import boundary
from graftax._jit.running_trace import note_copy
from graftax.transforms._engine.eager_compile import run_compiled
from graftax.transforms._engine.lift import name_of, named
from graftax.transforms._engine.loop_state import (
    EndedTracer,
    StateAfter,
    elements,
    node_name,
    numbers_in,
    refuse_hidden_leaves,
    same_type,
    state_after,
    type_of,
    type_text,
    with_arrays,
    with_copies,
)
from graftax.transforms._engine.merge_objects import BranchObjects, BranchWriter
from graftax.transforms._engine.program import Program, Recipe, result_names
from graftax.transforms._engine.retrace import Fixpoint
from graftax.transforms._engine.snapshot import Snapshot

BRANCH_STRUCTURE = (
    "{name}: {one} and {other} leave different structures behind:\n{differences}\n(expected is what {one} leaves, "
    "given what {other} does.) Which branch runs is known on the device only, so only arrays can depend on it: make "
    "what differs a jax.Array, do in both branches what changes the structure, and change an object that is held in "
    "two places instead of replacing it."
)
BRANCH_RESULTS = (
    "{name}: {one} and {other} return different structures:\n{differences}\n(expected is what {one} returns, given "
    "what {other} does.) Only arrays can depend on the branch: return the same structure from each, and an array "
    "(jnp.asarray) for a number that differs."
)
BRANCH_TYPES = (
    "{name}: {path} is {expected} after {one} and {actual} after {other}. Arrays of all branches have the same shape "
    "and dtype: convert one (x.astype)."
)
BRANCH_OBJECTS = (
    "{name}: {path} stays the object that it is in one of {one} and {other}, and is replaced or moved in "
    "the other. Which object is where cannot depend on an array: change the object's content, or put a "
    "new object in its place instead of one that is also elsewhere."
)
BRANCH_REPLACED = (
    "{name}: {one} changes the object at {path} in place, and then removes or replaces it: the change would be unknown "
    "after the other branches. Change the object and keep it, or leave it as it is."
)
COPY_CHANGED = (
    "{name}: the branches return different objects, so that the result is a copy, and the function has changed it:\n"
    "{differences}\nWhich object would have changed is not known. Change it inside of the branches, or return arrays."
)
NOT_BRANCHES = "switch: the second argument is a list of functions, and was given {actual!r}."
NO_BRANCHES = "switch: there is no branch to choose: pass at least one function."

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


@boundary
def cond(pred: Any, true_fun: Callable[[*Ts], R], false_fun: Callable[[*Ts], R], *operands: *Ts) -> R:
    """`jax.lax.cond` for functions of any objects: `true_fun(*operands) if pred else false_fun(*operands)`.

    Both functions are traced. They may change their operands and whatever they capture. If only one of them changes an
    array, the other leaves it as it is. The structure of the objects must be the same after either branch: neither
    static values nor which object is where may depend on `pred`. One branch may replace an object that nothing else
    refers to by a new one; the place then holds a new object, with the contents of the branch that ran.

    Args:
        pred: a scalar boolean, or a number.
        true_fun, false_fun: functions of the operands. They return the same structure: a number by itself or in a tuple
            counts as an array.
        operands: any objects.

    Returns:
        what the function returned. If both functions return the same object, it is that object; if they return
        different ones, it is a new object with the contents of the chosen one.

    Raises:
        StructureError: if the branches differ in what cannot depend on an array, with the places.

    Example:
        >>> def clip(model):
        ...     model["w"] = model["w"] / model["w"].max()
        >>> model = {"w": jnp.array([3.0, 4.0]), "name": "net"}
        >>> graftax.cond(model["w"].max() > 1, clip, lambda model: None, model)
        >>> model["w"]
        Array([0.75, 1.  ], dtype=float32)
    """
    branches = [true_fun, false_fun]
    # As an array, since a Python number is static: the compiled program would be that of one branch.
    predicate = np.bool_(pred) if isinstance(pred, (bool, int, float)) else pred
    return run_compiled("cond", branches, operands, [predicate], _cond)


@boundary
def switch(index: Any, branches: Sequence[Callable[[*Ts], R]], *operands: *Ts) -> R:
    """`jax.lax.switch` for functions of any objects: `branches[index](*operands)`, with the index clamped.

    Args:
        index: a scalar integer.
        branches: functions of the operands, as those of `cond`.
        operands: any objects.

    Returns:
        what the branch returned, as for `cond`.

    Raises:
        StructureError: if the branches differ in what cannot depend on an array, with the places.
        ValueError: if there is no branch.
        TypeError: if the index is not an integer.

    Example:
        >>> graftax.switch(1, [lambda d: d["x"], lambda d: -d["x"]], {"x": jnp.ones(2), "name": "net"})
        Array([-1., -1.], dtype=float32)
    """
    if callable(branches):
        raise TypeError(NOT_BRANCHES.format(actual=branches))
    branches = list(branches)
    if not branches:
        raise ValueError(NO_BRANCHES)
    # A Python index would be static as well. One that int32 cannot hold is left to JAX.
    branch_index = np.int32(index) if type(index) is int and abs(index) < 2**31 else index
    return run_compiled("switch", branches, operands, [branch_index], _switch)


def _cond(functions: Sequence[Callable[..., object]], operands: Sequence[object], extra: Sequence[object]) -> Any:
    # In plain Python, unless the predicate is a tracer, which has no value yet.
    if jax.config.jax_disable_jit and not isinstance(extra[0], Tracer):
        return functions[0 if extra[0] else 1](*operands)

    def choose(flats: list[Callable[..., Any]], leaves: list[Any]) -> Any:
        return jax.lax.cond(extra[0], *flats, *leaves)

    return Branches(name_of(functions[0], "cond"), ("true_fun", "false_fun"), functions, operands).run(choose)


def _switch(functions: Sequence[Callable[..., Any]], operands: Sequence[Any], extra: Sequence[Any]) -> Any:
    if jax.config.jax_disable_jit and not isinstance(extra[0], Tracer):
        return functions[min(max(int(extra[0]), 0), len(functions) - 1)](*operands)

    def choose(flats: list[Callable[..., Any]], leaves: list[Any]) -> Any:
        return jax.lax.switch(extra[0], flats, *leaves)

    titles = tuple(f"branches[{i}]" for i in range(len(functions)))
    return Branches(name_of(functions[0], "switch"), titles, functions, operands).run(choose)


class Branches:
    """One call of `cond` or `switch`, and what its traces have shown about the branches."""

    def __init__(
        self, name: str, titles: tuple[str, ...], branches: Sequence[Callable[..., object]], operands: Sequence[object]
    ) -> None:
        self.name, self.titles, self.branches = name, titles, branches
        self.operands = operands
        self.program = Program(name, branches, operands)
        self.traced: frozenset[str] = frozenset()  # key paths of Python numbers that `program` traces
        self.fixpoint = Fixpoint.for_call(name, branches)
        self.error: StructureError | None = None  # how the branches differed while those numbers were static
        self.states: dict[int, StateAfter] = {}  # the state after each branch that has been traced
        self.objects: BranchObjects

    def run(self, choose: Callable[[list[Callable[..., Any]], list[Any]], Any]) -> Any:
        def attempt(program: Program) -> Any:
            return choose([self._flat(program, i) for i in range(len(self.branches))], program.leaves)

        return self._finish(self.fixpoint.run(self._begin, attempt, self._explain)[1])

    def _begin(self) -> Program:
        numbers = self.fixpoint.facts.numbers
        # Here, since within the trace of a branch it would record that trace's tracers.
        if numbers != self.traced:
            self.traced = numbers
            self.program = Program(self.name, self.branches, self.operands, dynamic=numbers.__contains__)
        # `Fixpoint.run` may have dropped the facts: the numbers are static again.
        if not numbers:
            self.error = None
        self.states.clear()
        return self.program

    def _explain(self, program: Program, error: Exception) -> None:
        # With traced numbers, the branches fail otherwise: how they differed before says what the user has to change.
        if self.error is not None and error is not self.error:
            raise self.error from error
        rename_leaves(error, [key_path.name for key_path in program.key_paths])

    def _flat(self, program: Program, number: int) -> Callable[..., Any]:
        def flat(*leaves: Any) -> tuple[Any, ...]:
            def body(functions: list[Callable[..., Any]], operands: list[Any]) -> Any:
                return with_copies(with_arrays(functions[number](*operands)), self.fixpoint.facts.copied)

            def roots_after(roots: tuple[Any, ...], result: object) -> tuple[tuple[Any, ...], int]:
                parts = elements(result)
                return (*roots, *parts), len(parts)

            with self.fixpoint.tracing(number):
                outcome, outputs = program.trace(leaves, body, arrays=True)
            state = state_after(program, leaves, outcome, outputs, roots_after)
            reference = self.states.get(0, state)  # JAX traces the branches in order
            state = state.aligned(reference.final) or state
            # The tracers end with the trace of this branch: a summary of each is kept for the comparison.
            input_index, values = {id(leaf): i for i, leaf in enumerate(leaves)}, state.values
            first_index: dict[int, int] = {}
            sources = dict(zip(map(id, outputs), program.sources, strict=True))
            summaries = [
                EndedTracer(type_of(x), input_index.get(id(x)), first_index.setdefault(id(x), i), sources.get(id(x)))
                for i, x in enumerate(values)
            ]
            self.states[number] = state._replace(values=summaries)
            if len(self.states) == len(self.branches):
                self._compare()
            # A branch may have fewer leaves than the first one. `_compare` says so after the last branch, and JAX
            # compares the branches only then.
            return tuple(values[i] for i in self._chosen(self.states[0]) if i < len(values))

        return named(flat, program)

    def _chosen(self, reference: StateAfter) -> list[int]:
        """The leaves that the branches return to JAX: the carried arrays of the state, and the arrays of the result."""
        state_count, facts = self._state_leaves(reference), self.fixpoint.facts
        carried = [i for i, name in enumerate(self._leaf_names(reference)[:state_count]) if name in facts.carried]
        return [*carried, *range(state_count, len(reference.values))]

    def _leaf_names(self, reference: StateAfter) -> list[str]:
        names = self._names()
        return [place_name(key_path, names) for key_path in reference.final.graphdef.leaf_places()]

    def _state_leaves(self, state: StateAfter) -> int:
        return sum(root < len(self.program.roots) for root, _ in state.final.graphdef.leaf_places())

    # ---- what the branches agree on

    def _compare(self) -> None:
        """Raises StructureError if a branch differs from the first one, or Retrace if another trace may remove that."""
        for number, title in enumerate(self.titles):
            self._same_structure(self.states[0], self.states[number], title)
        self._same_objects()
        reference = self.states[0]
        # An element that is another object in another branch can only be returned as a copy.
        copied = {i for state in self.states.values() for i in self._other_elements(reference, state)}
        if copied - self.fixpoint.facts.copied:
            self.fixpoint.restart(copied=copied)
        # With the same objects and copies everywhere, the structures have to be equal, and their arrays of one type.
        for number, title in enumerate(self.titles):
            state = self.states[number]
            if state.final.graphdef != reference.final.graphdef:
                self._differ(BRANCH_RESULTS, reference.final.graphdef, state.final.graphdef, title)
            refuse_hidden_leaves(state)
            self._same_types(reference, state, title)
        # Branches return the arrays of the state only if some branch changes them: a captured weight is a constant.
        names = self._leaf_names(reference)
        changed = {names[i] for i in range(self._state_leaves(reference)) if self._source(i) is None}
        if changed - self.fixpoint.facts.carried:
            self.fixpoint.restart(carried=changed)

    def _same_structure(self, reference: StateAfter, state: StateAfter, title: str) -> None:
        """Raises StructureError or Retrace if the state or the result has another structure than the first branch's."""
        expected, actual = (x.graph(x.roots).graphdef for x in (reference, state))
        if not differ_only_in_order(expected, actual):
            self._differ(BRANCH_STRUCTURE, expected, actual, title)
        expected, actual = (_core.record((x.result,), ("result",))[1] for x in (reference, state))
        if not differ_only_in_order(expected, actual):
            self._differ(BRANCH_RESULTS, expected, actual, title, ("result",))

    def _differ(
        self,
        message: str,
        expected: _core.GraphDef,
        actual: _core.GraphDef,
        title: str,
        names: Sequence[str] | None = None,
    ) -> NoReturn:
        """Handles branches whose structures differ.

        Raises:
            Retrace: if there are numbers left to trace.
            StructureError: in every other case.
        """
        # Tracing Python numbers of the operands may remove the difference. First only the numbers that differ are
        # traced, because another one may be used as a shape. Then all are, because what differs may be computed from
        # another one.
        names = names or self._names()
        numbers = set[str]().union(*(numbers_in(self.program, root) for root in range(self.program.operands)))
        paths = {d.path for d in differences(expected, actual, names)}
        differing_numbers = paths & numbers if self.error is None else set[str]()
        if self.error is None:
            text = differences_text(expected, actual, names, orders=False)
            text = message.format(name=self.name, one=self.titles[0], other=title, differences=text)
            self.error = StructureError(text)
        # There may be no difference that can be seen: two symbols with one value.
        if not numbers or not paths:
            raise self.error
        self.fixpoint.restart(numbers=differing_numbers or numbers)

    def _names(self) -> tuple[str, ...]:
        return (*self.program.names, *result_names(len(elements(self.states[0].result))))

    def _same_objects(self) -> None:
        """Raises StructureError if a path of the state holds different old objects after different branches."""
        self.objects = BranchObjects([self.states[i].graph(self.states[i].roots) for i in range(len(self.branches))])
        differing = self.objects.differing()
        if differing is not None:
            number, node = differing
            path, title = node_name(self.program, self.states[0], node), self.titles[number]
            raise StructureError(BRANCH_OBJECTS.format(name=self.name, one=self.titles[0], other=title, path=path))
        # A branch that changes an object, and then drops it, would lose the change, unless every branch still reaches
        # the object, if only from its result.
        in_result = set.intersection(*(set(state.final.origins) for state in self.states.values()))
        for number, title in enumerate(self.titles):
            state = self.states[number]
            replaced = set(state.changed) - set(self.objects.origins[number]) - in_result
            if replaced:
                path = node_name(self.program, state, min(replaced))
                raise StructureError(BRANCH_REPLACED.format(name=self.name, one=title, path=path))
        if self.objects.replaced:
            for number, state in self.states.items():
                self.states[number] = self.objects.without_replaced(state)

    def _other_elements(self, reference: StateAfter, state: StateAfter) -> set[int]:
        """The indices of the result's elements that are, or share, other objects than after the first branch."""
        differing: set[int] = set()
        for i, (expected, actual) in enumerate(zip(elements(reference.result), elements(state.result), strict=True)):
            reference_graph = reference.graph((*reference.roots, expected), 1)
            graph = state.graph((*state.roots, actual), 1)
            if graph.origins_along(reference_graph) != reference_graph.origins:
                differing.add(i)
        return differing

    def _same_types(self, reference: StateAfter, state: StateAfter, title: str) -> None:
        leaf_places = reference.final.graphdef.leaf_places()
        for key_path, expected, actual in zip(leaf_places, reference.values, state.values, strict=True):
            if not same_type(expected, actual):
                path = place_name(key_path, self._names())
                details = {"path": path, "expected": type_text(expected), "actual": type_text(actual)}
                raise StructureError(BRANCH_TYPES.format(name=self.name, one=self.titles[0], other=title, **details))

    def _source(self, leaf: int) -> int | None:
        """The input leaf that this leaf of the state is after every branch; None if the branches differ."""
        sources = {state.values[leaf].source for state in self.states.values()}
        return sources.pop() if len(sources) == 1 else None

    # ---- writing back

    def _finish(self, outputs: Sequence[object]) -> Any:
        """Applies the Outcomes of all branches, with the arrays of the chosen branch, and returns the result."""
        # JAX returns one array per chosen leaf, the one of the branch that ran.
        reference = self.states[0]
        chosen = dict(zip(self._chosen(reference), outputs, strict=True))
        shared: dict[tuple[int, ...], Any] = {}  # leaves that are one array in every branch get one array
        for leaf, value in chosen.items():
            chosen[leaf] = shared.setdefault(
                tuple(state.values[leaf].first_leaf for state in self.states.values()), value
            )
        chosen = dict(zip(chosen, self.program.with_ties(chosen.values(), self._recipes(chosen)), strict=True))
        pairs: list[tuple[list[Any], _core.Outcome]] = []
        untouched: list[dict[int, int]] = []
        # The first branch is applied last. A new object is at the same paths after every branch, so the first branch's
        # new objects end up in all of them. If one branch replaces an object that another one keeps, the writes of the
        # other one go into the new object.
        order = list(reversed(range(len(self.branches))))
        for number in order:
            state = self.states[number]
            # A leaf that JAX did not return is an input leaf in every branch: the caller's own array comes back.
            sources = {i: self._source(leaf) for i, leaf in enumerate(state.output_leaves) if leaf not in chosen}
            untouched.append({i: source for i, source in sources.items() if source is not None})
            pairs.append(([chosen.get(leaf) for leaf in state.output_leaves], state.outcome))
        result = self.program.finish_all(pairs, self._writing(order), untouched)[-1]
        if self.fixpoint.facts.copied:
            self._note_copies(result)
        return result

    def _recipes(self, chosen: Iterable[int]) -> dict[int, Recipe]:
        """The recipes of the leaves that may be one array: (descriptions of all branches, input leaves)."""
        recipes: dict[int, Recipe] = {}
        for i, leaf in enumerate(chosen):
            values = [state.values[leaf] for state in self.states.values()]
            if any(value.source_op or value.source is not None for value in values):
                descriptions, inputs = zip(*(value.recipe for value in values), strict=True)
                recipes[i] = descriptions, tuple(index for part in inputs for index in part)
        return recipes

    def _writing(self, order: list[int]) -> Callable[[int, list[Any]], list[Any]] | None:
        """The `nodes` argument of `Program.finish_all`; None if no branch replaces objects that others keep."""
        objects = self.objects
        if not objects.replaced:
            return None
        writing: list[BranchWriter] = []

        def nodes(position: int, initial_nodes: list[Any]) -> list[Any]:
            if writing:
                writing[0].note_written(order[position - 1])
            else:
                writing.append(BranchWriter(objects, self.program, initial_nodes))
            return writing[0].nodes(order[position])

        return nodes

    def _note_copies(self, result: object) -> None:
        """Makes it an error if the enclosing trace changes copies in the result: of which objects is not known."""
        parts = elements(result)
        copied = sorted(i for i in self.fixpoint.facts.copied if i < len(parts))
        names = result_names(len(parts))
        copies = Snapshot.take(tuple(parts[i] for i in copied), tuple(names[i] for i in copied))
        # The trace keeps the function longer than this call, and not the branches with it.
        name = self.name

        def changes() -> str:
            text = copies.changes()
            return COPY_CHANGED.format(name=name, differences=text) if text else ""

        note_copy(changes)
