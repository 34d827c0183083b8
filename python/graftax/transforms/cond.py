# SPDX-License-Identifier: Apache-2.0
"""Branches over any objects: `cond` and `switch`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar, TypeVarTuple

import jax
import numpy as np
from jax.core import Tracer

from graftax import _core
from graftax._base.errors import StructureError, rename_leaves
from graftax._graph.structure import place_name
from graftax._graph.structure_diff import differences, differences_text, only_order
from graftax._jax.tracebacks import boundary
from graftax._jit.trace import note_copy
from graftax.transforms._engine.eager_compile import once
from graftax.transforms._engine.graph_after import (
    EndedTracer,
    Provenance,
    StateAfter,
    elements,
    node_name,
    numbers_in,
    refuse_unseen,
    same_type,
    state_after,
    type_of,
    type_text,
    with_arrays,
    with_copies,
)
from graftax.transforms._engine.lift import name_of, named
from graftax.transforms._engine.merge_objects import Objects, Writing
from graftax.transforms._engine.program import Program
from graftax.transforms._engine.retrace import Fixpoint, Retrace
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
    "{name}: {path} is {expected} after {one} and {given} after {other}. Arrays of all branches have the same shape "
    "and dtype: convert one (x.astype)."
)
BRANCH_OBJECTS = (
    "{name}: {path} stays the object that it is in one of {one} and {other}, and is replaced or moved in the other. "
    "Which object is where cannot depend on an array: change the object's content, or put a new object in its place "
    "instead of one that stands elsewhere."
)
BRANCH_REPLACED = (
    "{name}: {one} changes the object at {path} in place, and then removes or replaces it: the change would be unknown "
    "after the other branches. Change the object and keep it, or leave it as it is."
)
NOT_BRANCHES = "switch: the second argument is a list of functions, and was given {given!r}."
NO_BRANCHES = "switch: there is no branch to choose: pass at least one function."

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


@boundary
def cond(pred: Any, true_fun: Callable[[*Ts], R], false_fun: Callable[[*Ts], R], *operands: *Ts) -> R:
    """`jax.lax.cond` for functions of any objects: `true_fun(*operands) if pred else false_fun(*operands)`.

    Both are traced. They may change arrays, and other things, in the operands and in what they capture; where only one
    does, the other's value of an array is the unchanged one. Afterwards the objects have to have the same structure
    whichever was run: static values must not depend on `pred`, nor which object is where. One
    branch may put a new object in the place of one that nothing else holds. The place then has a new object, with the
    contents of the branch that ran.

    Args:
        pred: a scalar boolean, or a number.
        true_fun, false_fun: functions of the operands. They return the same structure: a number that stands by itself
            or in a tuple counts as an array.
        operands: any objects.

    Returns:
        what the function returned. An object that both return, the same one, is that object; where they return
        different ones, it is a new one with the contents of the chosen one.

    Raises:
        StructureError: where the branches differ in what cannot depend on an array, with the places.

    Example:
        >>> def clip(model):
        ...     model["w"] = model["w"] / model["w"].max()
        >>> model = {"w": jnp.array([3.0, 4.0]), "name": "net"}
        >>> graftax.cond(model["w"].max() > 1, clip, lambda model: None, model)
        >>> model["w"]
        Array([0.75, 1.  ], dtype=float32)
    """
    branches = [true_fun, false_fun]
    known = np.bool_(pred) if isinstance(pred, (bool, int, float)) else pred
    return once("cond", branches, operands, [known], _cond)


@boundary
def switch(index: Any, branches: Sequence[Callable[[*Ts], R]], *operands: *Ts) -> R:
    """`jax.lax.switch` for functions of any objects: `branches[index](*operands)`, with the index clamped.

    Args:
        index: a scalar integer.
        branches: functions of the operands, as those of `cond`.
        operands: any objects.

    Example:
        >>> graftax.switch(1, [lambda d: d["x"], lambda d: -d["x"]], {"x": jnp.ones(2), "name": "net"})
        Array([-1., -1.], dtype=float32)
    """
    if callable(branches):
        raise TypeError(NOT_BRANCHES.format(given=branches))
    branches = list(branches)
    if not branches:
        raise ValueError(NO_BRANCHES)
    known = np.int32(index) if type(index) is int and abs(index) < 2**31 else index
    return once("switch", branches, operands, [known], _switch)


def _cond(functions: Sequence[Callable[..., Any]], operands: Sequence[Any], rest: Sequence[Any]) -> Any:
    if jax.config.jax_disable_jit and not isinstance(rest[0], Tracer):
        return functions[0 if rest[0] else 1](*operands)

    def choose(flats: list[Callable[..., Any]], leaves: list[Any]) -> Any:
        return jax.lax.cond(rest[0], *flats, *leaves)

    return Branches(name_of(functions[0], "cond"), ("true_fun", "false_fun"), functions, operands).run(choose)


def _switch(functions: Sequence[Callable[..., Any]], operands: Sequence[Any], rest: Sequence[Any]) -> Any:
    if jax.config.jax_disable_jit and not isinstance(rest[0], Tracer):
        return functions[min(max(int(rest[0]), 0), len(functions) - 1)](*operands)

    def choose(flats: list[Callable[..., Any]], leaves: list[Any]) -> Any:
        return jax.lax.switch(rest[0], flats, *leaves)

    titles = tuple(f"branches[{i}]" for i in range(len(functions)))
    return Branches(name_of(functions[0], "switch"), titles, functions, operands).run(choose)


COPY_CHANGED = (
    "{name}: the branches return different objects, so that the result is a copy, and the function has changed it:\n"
    "{differences}\nWhich object would have changed is not known. Change it inside of the branches, or return arrays."
)


class Branches:
    """What one call has found out about its branches."""

    def __init__(
        self,
        name: str,
        titles: tuple[str, ...],
        branches: Sequence[Callable[..., Any]],
        operands: Sequence[Any],
        fixpoint: Fixpoint[tuple[frozenset[str], frozenset[int], frozenset[str]]] | None = None,
    ) -> None:
        self.name, self.titles, self.branches = name, titles, branches
        self.operands = operands
        self.program = Program(name, branches, operands)
        self.fixpoint = fixpoint or Fixpoint.of(name, branches)
        self.traced: frozenset[str] = frozenset()  # Python numbers of the operands that are traced
        self.error: StructureError | None = None  # how they differed before Python numbers were traced
        self.carried: frozenset[str] = frozenset()  # arrays of the state that some branch changes
        self.copied: frozenset[int] = frozenset()  # elements of the result that are other objects in other branches
        self.seen: dict[int, StateAfter] = {}
        self.objects: Objects

    def run(self, choose: Callable[[list[Callable[..., Any]], list[Any]], Any]) -> Any:
        fixpoint = self.fixpoint
        guessed = fixpoint.found is not None
        if fixpoint.found is not None:
            self.carried, self.copied, self.traced = fixpoint.found
        traced: frozenset[str] = frozenset()
        while True:
            if self.traced != traced:  # here, not in the trace of a branch: its tracers end with it
                traced = self.traced
                self.program = Program(self.name, self.branches, self.operands, dynamic=traced.__contains__)
            program = self.program
            self.seen.clear()
            flats = [self._flat(i) for i in range(len(self.branches))]
            try:
                out = choose(flats, program.leaves)
            except Retrace:
                fixpoint.found = (self.carried, self.copied, self.traced)
                continue
            except Exception as error:
                if guessed and (self.copied or self.traced):  # what was guessed may be of other code
                    fixpoint.forget()
                    return Branches(self.name, self.titles, self.branches, self.operands, fixpoint).run(choose)
                if not isinstance(error, (jax.errors.JAXTypeError, TypeError, ValueError)):
                    raise
                if self.error is not None and error is not self.error:
                    raise self.error from error
                rename_leaves(error, [place.name for place in program.places])
                raise
            return self._finish(out)

    def _flat(self, number: int) -> Callable[..., Any]:
        program = self.program

        def flat(*leaves: Any) -> tuple[Any, ...]:
            def body(functions: list[Callable[..., Any]], operands: list[Any]) -> Any:
                return with_copies(with_arrays(functions[number](*operands)), self.copied)

            def roots_after(roots: tuple[Any, ...], result: Any) -> tuple[tuple[Any, ...], int]:
                parts = elements(result)
                return (*roots, *parts), len(parts)

            with self.fixpoint.tracing(number):
                outcome, out = program.trace(leaves, body, arrays=True)
            after = state_after(program, leaves, outcome, out, roots_after)
            first = self.seen.get(0, after)  # JAX traces the branches in order
            after = after.aligned(first.after) or after
            own, values = {id(leaf): i for i, leaf in enumerate(leaves)}, after.values
            place: dict[int, int] = {}
            made = dict(zip(map(id, out), program.sources, strict=True))
            ended = [
                EndedTracer(type_of(x), own.get(id(x)), place.setdefault(id(x), i), made.get(id(x)))
                for i, x in enumerate(values)
            ]
            self.seen[number] = after._replace(values=ended)
            if len(self.seen) == len(self.branches):
                self._compare()
            # One with fewer is told after the last branch: JAX compares them when all are traced.
            return tuple(values[i] for i in self._chosen(self.seen[0]) if i < len(values))

        return named(flat, program)

    def _chosen(self, first: StateAfter) -> list[int]:
        """The leaves that the branches give JAX, by number: arrays of the state that are carried, and the result's."""
        state = self._state_leaves(first)
        carried = [i for i, name in enumerate(self._leaf_names(first)[:state]) if name in self.carried]
        return [*carried, *range(state, len(first.values))]

    def _leaf_names(self, first: StateAfter) -> list[str]:
        names = self._names()
        return [place_name(place, names) for place in first.after.graphdef.leaf_places()]

    def _state_leaves(self, after: StateAfter) -> int:
        return sum(root < len(self.program.roots) for root, _ in after.after.graphdef.leaf_places())

    # ---- what the branches agree on

    def _compare(self) -> None:
        for number, title in enumerate(self.titles):
            self._same_structure(self.seen[0], self.seen[number], title)
        self._same_objects()
        first = self.seen[0]
        copied = {i for after in self.seen.values() for i in self._other_elements(first, after)}
        if copied - self.copied:
            self.copied |= copied
            raise Retrace
        for number, title in enumerate(self.titles):
            after = self.seen[number]
            if after.after.graphdef != first.after.graphdef:
                self._differ(BRANCH_RESULTS, first.after.graphdef, after.after.graphdef, title)
            refuse_unseen(after)
            self._same_types(first, after, title)
        names = self._leaf_names(first)
        changed = {names[i] for i in range(self._state_leaves(first)) if self._source(i) is None}
        if changed - self.carried:
            self.carried |= changed
            raise Retrace

    def _same_structure(self, first: StateAfter, after: StateAfter, title: str) -> None:
        """Of the state and of the result, each by itself."""
        one, other = (x.graph(x.roots).graphdef for x in (first, after))
        if not only_order(one, other):
            self._differ(BRANCH_STRUCTURE, one, other, title)
        one, other = (_core.record((x.result,), ("result",))[1] for x in (first, after))
        if not only_order(one, other):
            self._differ(BRANCH_RESULTS, one, other, title, ("result",))

    def _differ(
        self, message: str, one: _core.GraphDef, other: _core.GraphDef, title: str, names: Sequence[str] | None = None
    ) -> NoReturn:
        """An error, unless it may be mended by tracing Python numbers in the operands: what differs, then all of them.

        Another number may be a shape, and what differs may be computed of another number.
        """
        names = names or self._names()
        numbers = set[str]().union(*(numbers_in(self.program, root) for root in range(self.program.operands)))
        paths = {d.path for d in differences(one, other, names)}
        found = paths & numbers if self.error is None else set[str]()
        if self.error is None:
            text = differences_text(one, other, names, orders=False)
            text = message.format(name=self.name, one=self.titles[0], other=title, differences=text)
            self.error = StructureError(text)
        if not numbers or not paths:  # what differs in nothing that is seen are two symbols of one value
            raise self.error
        self.traced |= found or numbers
        raise Retrace

    def _names(self) -> tuple[str, ...]:
        count = len(elements(self.seen[0].result))
        return (*self.program.names, *(f"result[{i}]" if count > 1 else "result" for i in range(count)))

    def _same_objects(self) -> None:
        """Raises unless each place of the state holds the same object, or one that is new, after every branch."""
        self.objects = Objects([self.seen[i].graph(self.seen[i].roots) for i in range(len(self.branches))])
        differing = self.objects.differing()
        if differing is not None:
            number, at = differing
            path, title = node_name(self.program, self.seen[0], at), self.titles[number]
            raise StructureError(BRANCH_OBJECTS.format(name=self.name, one=self.titles[0], other=title, path=path))
        for number, title in enumerate(self.titles):
            after = self.seen[number]
            gone = set(after.changed) - set(self.objects.origins[number]) - self._in_result()
            if gone:
                path = node_name(self.program, after, min(gone))
                raise StructureError(BRANCH_REPLACED.format(name=self.name, one=title, path=path))
        if self.objects.replaced:
            for number, after in self.seen.items():
                self.seen[number] = self.objects.without_replaced(after)

    def _in_result(self) -> set[int | None]:
        """The input nodes that every branch returns: these may be missing in the state."""
        return set.intersection(*(set(after.after.origins) for after in self.seen.values()))

    def _other_elements(self, first: StateAfter, after: StateAfter) -> set[int]:
        """The elements of the result that are another object, or share other objects, than the first branch's."""
        found: set[int] = set()
        for i, (one, other) in enumerate(zip(elements(first.result), elements(after.result), strict=True)):
            here, there = first.graph((*first.roots, one), 1), after.graph((*after.roots, other), 1)
            if _origins(there, here) != here.origins:
                found.add(i)
        return found

    def _same_types(self, first: StateAfter, after: StateAfter, title: str) -> None:
        places = first.after.graphdef.leaf_places()
        names = self._names()
        for place, one, other in zip(places, first.values, after.values, strict=True):
            if not same_type(one, other):
                raise StructureError(
                    BRANCH_TYPES.format(
                        name=self.name,
                        path=place_name(place, names),
                        one=self.titles[0],
                        expected=type_text(one),
                        other=title,
                        given=type_text(other),
                    )
                )

    def _source(self, leaf: int) -> int | None:
        """The input leaf that stands here after every branch, if it is one and the same."""
        found = {after.values[leaf].source for after in self.seen.values()}
        return found.pop() if len(found) == 1 else None

    # ---- together again

    def _finish(self, out: Sequence[Any]) -> Any:
        """Writes what every branch would write, with the chosen branch's arrays; the first one's objects last.

        A new object stands in the same places after every branch. All of these are written with the first branch's,
        and what only other branches write are arrays and objects that were there. Where a branch replaces what another
        leaves, the other one writes into the new object.
        """
        first = self.seen[0]
        chosen = dict(zip(self._chosen(first), out, strict=True))
        one: dict[tuple[int, ...], Any] = {}  # what every branch makes one array is one
        for leaf, value in chosen.items():
            chosen[leaf] = one.setdefault(tuple(after.values[leaf].one for after in self.seen.values()), value)
        chosen = dict(zip(chosen, self.program.with_ties(chosen.values(), self._ways(chosen)), strict=True))
        pairs: list[tuple[list[Any], _core.Outcome]] = []
        untouched: list[dict[int, int]] = []
        order = list(reversed(range(len(self.branches))))
        for number in order:
            after = self.seen[number]
            sources = {i: self._source(leaf) for i, leaf in enumerate(after.out) if leaf not in chosen}
            untouched.append({i: source for i, source in sources.items() if source is not None})
            pairs.append(([chosen.get(leaf) for leaf in after.out], after.outcome))
        result = self.program.finish_all(pairs, self._writing(order), untouched)[-1]
        if self.copied:
            self._note_copies(result)
        return result

    def _ways(self, chosen: Iterable[int]) -> dict[int, tuple[Hashable, tuple[int, ...]]]:
        """Of leaves that a branch makes so that they may be one: how the branches make them, and of which leaves."""
        found: dict[int, tuple[Hashable, tuple[int, ...]]] = {}
        for i, leaf in enumerate(chosen):
            values = [after.values[leaf] for after in self.seen.values()]
            if any(value.made for value in values):
                ways, inputs = zip(*(value.way for value in values), strict=True)
                found[i] = ways, tuple(at for part in inputs for at in part)
        return found

    def _writing(self, order: list[int]) -> Callable[[int, list[Any]], list[Any]] | None:
        """Which objects each Outcome is given; None where all are given those that were there."""
        objects = self.objects
        if not objects.replaced:
            return None
        writing: list[Writing] = []

        def nodes(at: int, before: list[Any]) -> list[Any]:
            if writing:
                writing[0].written(order[at - 1])
            else:
                writing.append(Writing(objects, self.program, before))
            return writing[0].nodes(order[at])

        return nodes

    def _note_copies(self, result: Any) -> None:
        """Which object a copy stands for is not known in a trace: nothing may change it there."""
        parts = elements(result)
        which = sorted(i for i in self.copied if i < len(parts))
        names = tuple(f"result[{i}]" if len(parts) > 1 else "result" for i in which)
        copies, name = Snapshot.of(tuple(parts[i] for i in which), names), self.name

        def changes() -> str:
            text = copies.changes()
            return COPY_CHANGED.format(name=name, differences=text) if text else ""

        note_copy(changes)


def _origins(other: Provenance, like: Provenance) -> list[int | None] | None:
    """The origins of the nodes, in the order of another graph of that structure."""
    found = other.like(like)
    return None if found is None else [other.origins[i] for i in found[1]]
