# SPDX-License-Identifier: Apache-2.0
"""One mechanism for every transform: functions and operands split into arrays and structure, and put together again."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from graftax import _core
from graftax._base.errors import CHANGE_LOST, ConcurrentChangeError, GraftaxError, LostChangeWarning
from graftax._capture.namespaces import seen
from graftax._capture.numbers.symbols import NUMBERS
from graftax._capture.signature import Signature, call_opaque, refuse_generators, resolve
from graftax._graph.array_aliases import Source, noting, together
from graftax._graph.structure import Structure, place_name
from graftax._graph.structure_diff import differences
from graftax._jax.tracebacks import caller_level
from graftax._jit.trace import definition_of, run_trace
from graftax.transforms._engine.deferred_rules import rules_run

CHANGED_WHILE = (
    "{name} ran, and meanwhile {paths} was changed from outside of the copy that the function is given: by another "
    "thread, by a host function, or by a derivative rule that reaches it through its own closure. Pass it to the "
    "function as an argument; let only the host function name what the host function changes."
)
CHANGED_BY_RULE = (
    "{name}: a derivative rule, which runs when the trace of {name} has ended, has changed {paths}, and {name} changes "
    "what that is in as well. Let the rule keep what it counts in an object of its own, which nothing else changes."
)
NO_SUCH_OPERAND = (
    "{name} is given no argument {which!r}; it is given {operands}. A number counts positional arguments; wrt= takes "
    "the names of all that are given."
)
NOT_CALLABLE = "{name} expects a callable, and was given {given!r}."


class _Part(NamedTuple):
    """One function of a program, and where its roots are among those of the program."""

    function: Any
    signature: Signature
    layout: tuple[Any, ...]
    roots: tuple[Any, ...]
    numbers: tuple[int, ...]  # for each root of the function, its number among the program's


class NamedPlace(NamedTuple):
    """Where a leaf stands."""

    root: int  # which root; the operands come first
    path: tuple[Any, ...]  # below it, of JAX's key entries
    name: str  # as messages print it


class Program:
    """Functions and their operands, under a transform: what they are given and what they capture is one graph.

    A transform reads `leaves`, runs JAX's own transform on a flat function that calls `trace`, and gives what comes
    back to `finish`. A program is made for one call of a transform, and holds the caller's objects for that long.

    Args:
        name: for messages: what the user called.
        functions: any callables. What they capture is part of the graph, as in `graftax.jit`.
        operands: positional arguments of each of the functions.
        keywords: keyword arguments of each of them.
        mutation: "propagate", "error" or "discard", as in `graftax.jit`.
        captured: False for transforms by value, where closures and globals are as in JAX.
        dynamic: by key path, as messages print it, which Python numbers are traced.
        static: positions of operands that must hold no array.
        shapes: nothing will run: `jax.ShapeDtypeStruct` may stand in place of arrays.
    """

    def __init__(
        self,
        name: str,
        functions: Sequence[Callable[..., Any]],
        operands: Sequence[Any],
        keywords: dict[str, Any] | None = None,
        *,
        mutation: str = "propagate",
        captured: bool = True,
        dynamic: Callable[[str], bool] | None = None,
        static: Sequence[int] = (),
        shapes: bool = False,
    ) -> None:
        keywords = keywords or {}
        self.name, self.mutation, self._shapes = name, mutation, shapes
        self.roots: tuple[Any, ...] = (*operands, *keywords.values())
        self.operands, self.positional = len(self.roots), len(operands)
        self.names = ("",) * self.operands
        self._keywords, self._traced, self._keeps = tuple(keywords), dynamic, not captured
        declared = {i % self.positional for i in static if -self.positional <= i < self.positional}
        self._flags = [int(i in declared) for i in range(self.operands)]
        self._parts = [self._part(function, captured) for function in functions]
        self.leaves, self.graphdef = self._record()
        self.outcome: _core.Outcome | None = None
        self.changed: list[str] = []  # the paths that the last trace has changed
        self.untouched: dict[int, int] = {}
        self.sources: list[Source | None] = []  # of the last trace: what its output leaves were made of
        self._recording: _core.Recording | None = None  # of the last trace
        self._rules_run = rules_run()

    def private(self) -> Program:
        """The same program on a copy of its graph as it is now, for traces that outlive the call. It has no leaves."""
        twin = copy.copy(self)
        twin.roots = _core.unflatten_roots(self.graphdef, [np.zeros(()) for _ in self.leaves])
        twin.leaves, twin._recording = [], None
        # Each captured value counts as another one than the function would find, so that all are put into a copy of it.
        twin._parts = [part._replace(roots=tuple(object() for _ in part.roots)) for part in self._parts]
        return twin

    def _part(self, function: Callable[..., Any], captured: bool) -> _Part:
        if isinstance(function, _core.Caller):  # stays compiled
            plain, prefix = call_opaque, (function,)
        else:
            if not callable(function):
                raise TypeError(NOT_CALLABLE.format(name=self.name.partition(" of ")[0], given=function))
            plain, prefix, _ = resolve(function)
            plain = seen(plain)
        refuse_generators(plain)  # type: ignore[arg-type]
        signature = Signature.of(plain, len(prefix), captured)  # type: ignore[arg-type]
        placeholders = [_Placeholder() for _ in range(self.operands)]
        bound = signature.binding.bind(*self._as_given(placeholders), prefix)
        if bound is None:  # the function's own TypeError
            args, kwargs = self._as_given(self.roots[: self.operands])
            plain(*prefix, *args, **kwargs)
            raise GraftaxError(f"the arguments of {self.name} could not be bound")
        roots, layout = bound
        names, flags = signature.root_names(layout), signature.root_flags(layout, ())
        if not captured:  # a function is as in JAX, and so are those that a callable object holds
            flags[: len(prefix)] = [flag | _core.RootFlag.target for flag in flags[: len(prefix)]]
        known = {id(placeholder): i for i, placeholder in enumerate(placeholders)}
        numbers: list[int] = []
        for root, name, flag in zip(roots, names, flags, strict=True):
            number = known.get(id(root))
            if number is None:
                number = len(self.roots)
                self.roots += (root,)
                self.names += (name,)
                self._flags.append(flag)
            elif not self.names[number]:
                self.names = (*self.names[:number], name, *self.names[number + 1 :])
            numbers.append(number)
        if isinstance(function, _core.Caller):
            self._name_operands(function)
        own = tuple(self.roots[number] for number in numbers)
        return _Part(plain, signature, layout, own, tuple(numbers))

    def _as_given(self, operands: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, as the transform was given them, of these operands."""
        keywords = dict(zip(self._keywords, operands[self.positional :], strict=True))
        return tuple(operands[: self.positional]), keywords

    def _name_operands(self, jitted: _core.Caller) -> None:
        """Operands are called what the jitted function calls them."""
        plain, prefix, _ = resolve(jitted)
        signature = Signature.of(plain, len(prefix), False)
        placeholders = [_Placeholder() for _ in range(self.operands)]
        bound = signature.binding.bind(*self._as_given(placeholders), prefix)
        if bound is not None:  # else the call itself says what is wrong
            named = {id(root): name for root, name in zip(bound[0], signature.root_names(bound[1]), strict=True)}
            count = len(placeholders)
            operands = (named.get(id(x), old) for x, old in zip(placeholders, self.names[:count], strict=True))
            self.names = (*operands, *self.names[count:])

    @property
    def _dynamic(self) -> Callable[[tuple[int, tuple[Any, ...]]], bool] | None:
        traced, names = self._traced, self.names
        return None if traced is None else lambda place: traced(place_name(place, names))

    def _record(self) -> tuple[list[Any], _core.GraphDef]:
        leaves, graphdef = _core.record(self.roots, self.names, self._flags, shapes=self._shapes, dynamic=self._dynamic)
        # JAX may read a NumPy array after the call has returned; and the function would change a copy of it in place.
        return [_as_leaf(x) for x in leaves], graphdef

    @property
    def places(self) -> list[NamedPlace]:
        """Where each leaf stands: the first place, for one in a node that is reached twice."""
        return [NamedPlace(*place, place_name(place, self.names)) for place in self.graphdef.leaf_places()]

    def trace(
        self, leaves: Iterable[Any], body: Callable[..., Any], *, mutation: str | None = None, arrays: bool = False
    ) -> tuple[_core.Outcome, list[Any]]:
        """Runs `body(functions, operands)` on the graph rebuilt around `leaves`.

        The functions take the operands, or what stands for them, and run with what they capture rebuilt too. With
        `arrays`, NumPy arrays that they make are output leaves too, and not constants.

        Returns:
            (the Outcome, its output leaves). `outcome` is that of the last trace, and `untouched` says which of the
            output leaves are which of `leaves`.
        """
        before = list(leaves)
        recording = _core.Recording(self.roots, self.names, self._flags, None, False, self._shapes, self._dynamic)

        def call(values: list[Any]) -> Any:
            functions = [self._function(part, values) for part in self._parts]
            return body(functions, values[: self.operands])

        mutation = mutation or self.mutation
        run = functools.partial(
            run_trace, by_value=mutation == "discard", forward=False, arrays=arrays, keeps=self._keeps
        )
        given = (self.name, recording, self.roots, before, call, mutation)
        # As in a call: a jitted function inside of it must not change what it captures, which is not rebuilt.
        with noting(self.leaves, before) as ties:
            outcome, out, changed, lost = _core.run_active(None, self.roots, [], None, run, *given)
            self.sources = ties.sources(out)
        if lost:
            paths = ", ".join(changed)
            warnings.warn(CHANGE_LOST.format(name=self.name, paths=paths), LostChangeWarning, caller_level())
        self.outcome, self.changed, self._recording = outcome, changed, recording
        numbers = {id(leaf): i for i, leaf in enumerate(before)}
        self.untouched = {k: numbers[id(leaf)] for k, leaf in enumerate(out) if id(leaf) in numbers}
        return outcome, out

    def _function(self, part: _Part, values: list[Any]) -> Callable[..., Any]:
        def run(*operands: Any) -> Any:
            # An operand that stands in two places of the signature is given to both.
            given = [operands[i] if i < self.operands else values[i] for i in part.numbers]
            return part.signature.call(part.function, part.roots, given, part.layout, self.name, False)

        return run

    def finish(
        self, out: Sequence[Any], outcome: _core.Outcome | None = None, untouched: Mapping[int, int] | None = None
    ) -> Any:
        """The result, built around these output leaves of the Outcome; what changed is written back.

        `untouched` says which output leaves have the value of which of `leaves`: they come back as the caller's arrays.
        """
        outcome = outcome or self.outcome
        assert outcome is not None
        return self.finish_all([(out, outcome)], untouched=[untouched or {}])[0]

    def finish_all(
        self,
        pairs: Sequence[tuple[Sequence[Any], _core.Outcome]],
        nodes: Callable[[int, list[Any]], list[Any]] | None = None,
        untouched: Sequence[Mapping[int, int]] = (),
    ) -> list[Any]:
        """The results of several Outcomes of this graph; their changes are written back in this order.

        `nodes` says of each Outcome, by its number, which objects its input nodes are by then; `untouched` is as in
        `finish`, for each of them.
        """
        walked = _core.walk(self.graphdef, self.roots) or self._changed([outcome for _, outcome in pairs])
        results: list[Any] = []
        for at, (out, outcome) in enumerate(pairs):
            values = list(out)
            for output, leaf in (untouched[at] if untouched else {}).items():
                values[output] = walked[0][leaf]
            results.append(outcome.apply(values, self.leaves, nodes(at, walked[1]) if nodes else walked[1]))
        return results

    def with_ties(self, values: Iterable[Any], made: Mapping[int, tuple[Hashable, tuple[int, ...]]]) -> list[Any]:
        """The values, with one array for those that are made (in which way, of which leaves) of the same arrays."""
        values = list(values)
        rows = [(way, tuple(self.leaves[at] for at in inputs), values[i]) for i, (way, inputs) in made.items()]
        for i, value in zip(made, together(rows), strict=True):
            values[i] = value
        return values

    def tied(self, out: Iterable[Any]) -> list[Any]:
        """The output leaves of the last trace, where all places of an array were given the same."""
        return self.with_ties(out, {i: (made.way, made.inputs) for i, made in enumerate(self.sources) if made})

    def _changed(self, outcomes: Sequence[_core.Outcome]) -> tuple[Sequence[Any], list[Any]]:
        """The leaves and nodes as they were, where a derivative rule of this thread has changed some of them since.

        JAX takes the derivative of a part of a program after the trace of the part. What a rule does then stays, and
        must not be where something is written.

        Raises:
            ConcurrentChangeError: where it is, and where anything else has changed them.
        """
        now = _core.record(self.roots, self.names, self._flags, shapes=self._shapes, dynamic=self._dynamic)[1]
        found = [d.path for d in differences(self.graphdef, now, self.names)]
        paths = ", ".join(found[:4]) or "an argument"
        if self._recording is None or rules_run() == self._rules_run or not found:
            raise ConcurrentChangeError(CHANGED_WHILE.format(name=self.name, paths=paths))
        nodes = {track for outcome in outcomes for track in outcome.inputs()[2]}
        written = [place_name(self.graphdef._node_place(track), self.names) for track in nodes]  # pyright: ignore[reportPrivateUsage]
        if any(path.startswith(node) for path in found for node in written):
            raise ConcurrentChangeError(CHANGED_BY_RULE.format(name=self.name, paths=paths))
        return self._recording.leaves, self._recording.nodes

    def with_leaves(self, at: Sequence[int], values: Iterable[Any]) -> list[Any]:
        """The leaves, with others in these places."""
        leaves = list(self.leaves)
        for i, value in zip(at, values, strict=True):
            leaves[i] = value
        return leaves

    def rebuilt(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The roots, rebuilt around other leaves outside of any trace."""
        return _core.unflatten_roots(self.graphdef, list(leaves))

    def recorded(self, roots: tuple[Any, ...], more: int = 0) -> tuple[list[Any], _core.GraphDef, list[Any]]:
        """(leaves, GraphDef, tracked nodes) of roots in the place of this program's, and `more` after them."""
        names = (*self.names, *(f"result[{i}]" if more > 1 else "result" for i in range(more)))
        leaves, graphdef = _core.record(roots, names, self._flags)
        walked = _core.walk(graphdef, roots)
        assert walked is not None
        return leaves, graphdef, walked[1]

    def operand(self, which: int | str) -> int:
        """The number of the operand that a position or a name means."""
        if isinstance(which, str):
            if which in self.names[: self.operands]:
                return self.names.index(which)
        elif -self.positional <= which < self.positional:
            return which % self.positional
        named = ", ".join(self.names[: self.operands]) or "none"
        raise ValueError(NO_SUCH_OPERAND.format(name=self.name, which=which, operands=named))

    def below(self, roots: Sequence[int]) -> set[int]:
        """The leaves that are reached from these roots, also those that other roots reach first."""
        if not roots:
            return set()
        placeholders = [np.zeros(()) for _ in range(self.graphdef.num_leaves)]
        built = self.rebuilt(placeholders)
        numbers = {id(placeholder): i for i, placeholder in enumerate(placeholders)}
        found = [numbers.get(id(leaf)) for leaf in _core.flatten([built[root] for root in roots])[0]]
        if None in found:  # a registered class has made arrays of its own of them
            structure = Structure(self.graphdef)
            return structure.leaves_reached([structure.roots[root] for root in roots])
        return {leaf for leaf in found if leaf is not None}

    @property
    def definition(self) -> Any:
        """What JAX's messages name in place of a flat function: the first function and where it is written."""
        return definition_of(self._parts[0].function)


def _as_leaf(x: Any) -> Any:
    if isinstance(x, (np.ndarray, np.generic)):
        return jnp.array(x, copy=True)
    return jnp.asarray(x) if type(x) in NUMBERS else x  # the function sees an array, also where JAX is given none


class _Placeholder:
    """Stands for an operand while the signature is bound."""
