# SPDX-License-Identifier: Apache-2.0
"""The state of a loop: the carry and what the functions capture, from one step to the next."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from graftax import _core
from graftax._base.errors import MutationError, StructureError, rename_leaves
from graftax._graph.array_aliases import Source
from graftax._graph.structure_diff import differences, differences_text
from graftax._jax.compat import ref_types
from graftax.transforms._engine.graph_after import (
    StateAfter,
    elements,
    node_name,
    numbers_in,
    refuse_unseen,
    same_type,
    state_after,
    type_text,
    with_arrays,
    with_copies,
)
from graftax.transforms._engine.program import Program
from graftax.transforms._engine.retrace import Fixpoint, Retrace
from graftax.transforms._engine.slices import Slices

LOOP_STRUCTURE = (
    "{name}: a step has to leave the structure of its state as it found it, and does not:\n{differences}\n(expected "
    "is the state before a step, given the one after it.) The state is the carry and everything that the functions "
    "capture. One compiled step serves for all, so only arrays can change. Make a number that changes an array "
    "(jnp.asarray), return what is to be collected as the second result of a scan instead of appending it, and change "
    "an object that is held in two places instead of replacing it."
)
LOOP_TYPE = (
    "{name}: {path} is {expected} before a step and {given} after it. An array of the state keeps its shape and dtype "
    "in every step: convert it inside of the function (x.astype), or begin with {given}."
)
TRACED_NUMBERS = "{name}: the Python numbers at {paths} are traced here, because the steps change them."
MOVED = (
    "{name}: a step puts the object at {source} in the place of {path}. Which object is where would depend on the "
    "number of steps: put a copy there (copy.copy), or move the arrays instead of the objects."
)
CHANGED_AND_REPLACED = (
    "{name}: a step changes the object at {path} in place, and then replaces it. The second step would change "
    "that one instead, so only the first change would come back. Change the object and keep it, or leave it as it is "
    "and put a new one there."
)
NO_CHANGES = (
    "{name}: {what} must not change anything, and changed {paths}. Return what is new instead, or change it elsewhere."
)
NOT_A_TEST = (
    "{name}: cond_fun has to return a scalar boolean array, and returned {found}. Compare (x > 0), and make one of "
    "several with .any() or .all()."
)
RETURNS_NONE = (
    "{name}: the function returns None, which would be the next step's {carry}. Return what the next step is to be "
    "given, also where it is the object that was changed in place."
)


Body = Callable[[list[Callable[..., Any]], list[Any]], Any]


# The parameters of what runs a step: they are bound, and nobody calls these.
def of_carried(carried: Any) -> None: ...


def of_rows(carried: Any, rows: Any) -> None: ...


def of_index(index: Any, carried: Any) -> None: ...


class Loop:
    """What one call of a loop has found out about its state; each attempt makes a program for it."""

    def __init__(
        self,
        name: str,
        functions: Sequence[Callable[..., Any]],
        operands: Sequence[Any],
        carry: int | None = 0,
        slices: Slices | None = None,
    ) -> None:
        """`carry` is the operand that is carried, `slices` what the loop goes over."""
        self.name, self.functions, self.operands, self.carry = name, functions, operands, carry
        self.slices = slices
        self.carried: set[str] = set()  # captured arrays that a step changes
        self.dynamic: set[str] = set()  # Python numbers of the carry that a step changes
        self.differing = ""  # what else it changed before they were traced
        self.copied: frozenset[int] = frozenset()  # elements of the carry whose objects change places
        self.fixpoint: Fixpoint[tuple[frozenset[str], frozenset[str], frozenset[int]]] = Fixpoint()

    def run(self, attempt: Callable[[Steps], Any]) -> tuple[Any, Any]:
        """(the carry, built, with what changed written back; what the attempt that went through returned)."""
        fixpoint = self.fixpoint = Fixpoint.of(self.name, self.functions)
        guessed = fixpoint.found is not None
        while True:
            if fixpoint.found is not None:
                self.carried, self.dynamic, self.copied = (
                    set(fixpoint.found[0]),
                    set(fixpoint.found[1]),
                    fixpoint.found[2],
                )
            steps = Steps(self)
            try:
                value = attempt(steps)
            except Retrace:
                fixpoint.found = (frozenset(self.carried), frozenset(self.dynamic), self.copied)
                continue
            except Exception as error:
                if guessed and (self.dynamic or self.copied):  # it may be no trace of the same code
                    guessed = False
                    fixpoint.forget()
                    self.carried, self.dynamic, self.copied = set(), set(), frozenset()
                    continue
                if not isinstance(error, (jax.errors.JAXTypeError, TypeError, ValueError)):
                    raise
                rename_leaves(error, [steps.paths[i] for i in steps.at], "carried")
                rows = self.slices.names if self.slices is not None else []
                rename_leaves(error, rows, "rows[0]")
                rename_leaves(error, rows, "rows")
                if self.dynamic:
                    error.add_note(TRACED_NUMBERS.format(name=self.name, paths=", ".join(sorted(self.dynamic))))
                raise
            return steps.finish(), value


class Steps:
    """One attempt at a loop: which leaves JAX carries from step to step, and what the last trace of a step did.

    Captured leaves that no step changes are constants: a weight is not kept once for each step where the loop is
    differentiated. So is a `jax.Ref`, which is changed where it is.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        dynamic = set(loop.dynamic)
        self.program = Program(
            loop.name, loop.functions, loop.operands, dynamic=dynamic.__contains__ if dynamic else None
        )
        places = self.program.places
        self.paths = [place.name for place in places]
        self.at = [
            i
            for i, (leaf, place) in enumerate(zip(self.program.leaves, places, strict=True))
            if place.name in loop.carried or (place.root == loop.carry and not isinstance(leaf, ref_types))
        ]
        self.first = [self.program.leaves[i] for i in self.at]
        self._last: Sequence[Any] = self.first
        # Of the last trace: leaves carried that are one where others are, how they are made, and of which leaves.
        self._made: dict[int, tuple[Hashable, tuple[int, ...]]] = {}
        self._one: list[int] = []  # of the last trace: the first leaf carried that a step makes one with this
        # Of the last trace: for each output leaf the number of the leaf that it is, and the Outcome.
        self._left: tuple[list[int], _core.Outcome] | None = None

    def named(self, flat: Callable[..., Any], like: types.FunctionType) -> Callable[..., Any]:
        """`flat` under the user's name and place, with the parameters of `like`: what JAX's messages name."""
        code = self.program.definition.__code__
        where = like.__code__.replace(
            co_filename=code.co_filename,
            co_firstlineno=code.co_firstlineno,
            co_name=code.co_name,
            co_qualname=code.co_qualname,
        )
        flat.__name__ = flat.__qualname__ = code.co_name
        flat.__wrapped__ = types.FunctionType(where, {}, code.co_name)  # type: ignore[attr-defined]
        return flat

    def _leaves(self, carry: Sequence[Any]) -> list[Any]:
        return self.program.with_leaves(self.at, carry)

    def step(self, carry: Sequence[Any], body: Body, look: Callable[[Sequence[Any]], None] | None = None) -> list[Any]:
        """One step of the loop, as JAX sees it: from the leaves that are carried to those of the next step.

        `look` is called with all leaves when the step has run.
        """
        loop, program = self.loop, self.program

        def run(functions: list[Callable[..., Any]], operands: list[Any]) -> Any:
            result = body(functions, operands)
            if result is None and loop.carry is not None and loop.operands[loop.carry] is not None:
                raise StructureError(RETURNS_NONE.format(name=loop.name, carry=program.names[loop.carry] or "carry"))
            return with_copies(with_arrays(result), loop.copied)

        def roots_after(roots: tuple[Any, ...], result: Any) -> tuple[tuple[Any, ...], int]:
            at = loop.carry
            return (roots if at is None else (*roots[:at], result, *roots[at + 1 :])), 0

        leaves = self._leaves(carry)
        with loop.fixpoint.tracing():
            outcome, out = program.trace(leaves, run, arrays=True)
        looked = state_after(program, leaves, outcome, out, roots_after)
        after = looked.aligned(looked.before)
        if after is None:
            self._structure(looked.before.graphdef, looked.after.graphdef)
        self._check(after, leaves)
        self._left = after.out, after.outcome
        if look is not None:
            look(leaves)
        values = [after.values[i] for i in self.at]
        number: dict[int, int] = {}
        self._one = [number.setdefault(id(value), i) for i, value in enumerate(values)]
        made = dict(zip(map(id, out), program.sources, strict=True))
        self._made = {i: found for i, at in enumerate(self.at) if (found := _made_of(at, made, after, leaves))}
        return values

    def end(self, last: Sequence[Any], ran: bool) -> None:
        """Notes the leaves after the last step.

        Where a step puts one array into several places, it is one afterwards: if there was a step (`ran`), or if it was
        one before.
        """
        first, made = self.first, {i: found for i, found in self._made.items() if self._one[i] == i}
        if not ran:
            made = {i: (way, (self.at[i], *inputs)) for i, (way, inputs) in made.items()}
        last = self.program.with_ties(last, made)
        self._last = [last[one if ran or first[i] is first[one] else i] for i, one in enumerate(self._one)]

    def _check(self, after: StateAfter, leaves: list[Any]) -> None:
        loop, program = self.loop, self.program
        moved = [(t, o) for t, o in enumerate(after.after.origins) if o is not None and o != t]
        if moved:
            self._moved(after, moved)
        gone = [t for t in after.changed if after.after.origins[t] != t]
        if gone:
            path = node_name(program, after, gone[0])
            raise StructureError(CHANGED_AND_REPLACED.format(name=loop.name, path=path))
        refuse_unseen(after)
        at = set(self.at)
        late = {self.paths[i] for i, leaf in enumerate(leaves) if i not in at and after.values[i] is not leaf}
        if late:
            loop.carried |= late
            raise Retrace
        for i in self.at:
            if not same_type(leaves[i], after.values[i], weak=True):
                one, other = type_text(leaves[i]), type_text(after.values[i])
                raise StructureError(LOOP_TYPE.format(name=loop.name, path=self.paths[i], expected=one, given=other))

    def _structure(self, before: _core.GraphDef, after: _core.GraphDef) -> NoReturn:
        """Numbers of the carry that have changed are traced from now on; without such, it is an error."""
        loop, program = self.loop, self.program
        if loop.carry is not None:
            found = {d.path for d in differences(before, after, program.names) if d.kind != "order"}
            changed = found & numbers_in(program, loop.carry)
            if changed - loop.dynamic:
                loop.dynamic |= changed
                if not loop.differing and found - changed:  # a key made of a traced number says little
                    loop.differing = differences_text(before, after, program.names, orders=False, known=changed)
                raise Retrace
        text = loop.differing or differences_text(before, after, program.names, orders=False)
        raise StructureError(LOOP_STRUCTURE.format(name=loop.name, differences=text))

    def _moved(self, after: StateAfter, moved: list[tuple[int, int]]) -> None:
        """Objects of the carry that only change places are copied; a changed or captured one is an error."""
        loop, program = self.loop, self.program
        if loop.carry is not None and not loop.copied:
            origins = {origin for _, origin in moved}
            stay = {t for t in after.changed if after.after.origins[t] == t}  # a copy would not be the changed object
            reached = [after.reached(part) for part in elements(after.result)]
            which = [i for i, nodes in enumerate(reached) if origins & nodes]
            if which and not any(stay & reached[i] for i in which):
                loop.copied = frozenset(which)
                raise Retrace
        to, origin = moved[0]
        path, source = (node_name(program, after, node) for node in (to, origin))
        raise StructureError(MOVED.format(name=loop.name, path=path, source=source))

    def test(self, carry: Sequence[Any], body: Body) -> Any:
        """What the condition returns; it must not change anything."""
        with self.loop.fixpoint.tracing(1):
            found = call_pure(self.program, self._leaves(carry), body, "cond_fun")
        if isinstance(found, bool):
            return jnp.asarray(found)
        if np.shape(found) != () or getattr(found, "dtype", None) != np.dtype(bool):
            raise TypeError(NOT_A_TEST.format(name=self.loop.name, found=type_text(found)))
        return found

    def finish(self) -> Any:
        assert self._left is not None
        numbers, outcome = self._left
        if self.loop.slices is not None:
            self.loop.slices.check(self.program, outcome)
        leaves = self._leaves(self._last)
        return self.program.finish([leaves[number] for number in numbers], outcome)


def _made_of(
    leaf: int, made: dict[int, Source | None], after: StateAfter, leaves: list[Any]
) -> tuple[Hashable, tuple[int, ...]] | None:
    """How the steps make a leaf, and of which leaves: two that are made in one way are one in each step, if these are.

    What a step makes it of another step has made before. So all of that belongs to the way.
    """
    met: dict[int, int] = {}

    def way(at: int) -> Hashable:
        value = after.values[at]
        if at in met:
            return "again", met[at]
        met[at] = len(met)
        return "same" if value is leaves[at] else made_of(value) or ("to", id(value))

    def made_of(value: Any) -> Hashable:
        source = made.get(id(value))
        return None if source is None else (source.way, *map(way, source.inputs))

    found = made_of(after.values[leaf])
    return None if found is None else (found, tuple(met))


def call_pure(program: Program, leaves: Sequence[Any], body: Body, what: str) -> Any:
    """What `body` returns, which must not change anything that it is given or captures."""
    found: list[Any] = []

    def run(functions: list[Callable[..., Any]], operands: list[Any]) -> None:
        found.append(body(functions, operands))

    outcome, out = program.trace(leaves, run, arrays=True)
    if outcome.num_writes:
        after = state_after(program, leaves, outcome, out, lambda roots, _: (roots, 0))
        paths = ", ".join(node_name(program, after, i) for i in after.changed)
        raise MutationError(NO_CHANGES.format(name=program.name, what=what, paths=paths))
    return found[-1]
