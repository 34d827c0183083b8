# SPDX-License-Identifier: Apache-2.0
"""The mechanism of every transform: splits functions and operands into arrays and structure, and rebuilds them."""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from graftax import _core
from graftax._base.errors import CHANGE_LOST, ConcurrentChangeError, GraftaxError, LostChangeWarning
from graftax._base.given_warnings import note_warning
from graftax._capture.namespaces import seen
from graftax._capture.numbers.symbols import NUMBERS
from graftax._capture.signature import Signature, call_opaque, refuse_generators, resolve
from graftax._graph.array_aliases import Source, merge_aliases, recording_aliases
from graftax._graph.structure import Structure, place_name
from graftax._graph.structure_diff import differences
from graftax._jax.tracebacks import caller_level
from graftax._jit.call_plan import Layout
from graftax._jit.flat_function import definition_of
from graftax._jit.trace import run_trace
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
NOT_CALLABLE = "{name} expects a callable, and was given {actual!r}."


Recipe = tuple[Hashable, tuple[int, ...]]  # how an array was computed, and from which leaves


class _BoundFunction(NamedTuple):
    """One function of a program, bound to the roots of the program that it uses."""

    function: Any  # a FunctionType, which type checkers would take for a method here
    signature: Signature
    layout: Layout
    roots: tuple[object, ...]
    numbers: tuple[int, ...]  # for each root of the function, its index among the program's roots


class NamedKeyPath(NamedTuple):
    """The key path of a leaf from the roots of a program on."""

    root: int  # the index of the root; the operands come first
    path: tuple[Any, ...]  # JAX's key entries below the root
    name: str  # as messages show it


class Program:
    """The functions and operands of one call of a transform, as one graph: the arguments and everything captured.

    A transform reads `leaves`, runs JAX's own transform on a flat function that calls `trace`, and passes the results
    to `finish`. A program is made for one call of a transform, and keeps the caller's objects alive for that long.

    Args:
        name: what messages call it, such as "vmap of f".
        functions: any callables. What they capture is part of the graph, as in `graftax.jit`.
        operands: the positional arguments of each function.
        keywords: the keyword arguments of each function.
        mutation: "propagate", "error" or "discard", as in `graftax.jit`.
        captured: False for transforms by value, where closures and globals are constants, as in JAX.
        dynamic: from the key path of a Python number, as messages show it, to whether the number is traced.
        static: positions of operands that must not hold arrays.
        shapes: the program is only traced, so `jax.ShapeDtypeStruct`s may take the place of arrays.
    """

    def __init__(
        self,
        name: str,
        functions: Sequence[Callable[..., object]],
        operands: Sequence[object],
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
        # The operands come first; `_part` adds what each function captures.
        self.roots: tuple[Any, ...] = (*operands, *keywords.values())
        self.operands, self.positional = len(self.roots), len(operands)
        self.names = ("",) * self.operands
        # `keeps` is an option of `run_trace`: by value, the result is what Equinox returns.
        self._keywords, self._traced, self._keeps = tuple(keywords), dynamic, not captured
        declared = {i % self.positional for i in static if -self.positional <= i < self.positional}
        self._flags: list[int] = [_core.RootFlag.static if i in declared else 0 for i in range(self.operands)]
        self._parts = [self._part(function, captured) for function in functions]
        leaves, self.graphdef = self._record()
        # Each leaf becomes a jax.Array: JAX may read a NumPy array after the call has returned, when the caller may
        # already have written to it.
        self.leaves = [_as_leaf(x) for x in leaves]
        self.outcome: _core.Outcome | None = None
        self.changed: list[str] = []  # key paths that the last trace changed
        self.untouched: dict[int, int] = {}  # of the last trace: which output leaves are which input leaves
        self.sources: list[Source | None] = []  # of the last trace: how each output leaf was computed
        self._recording: _core.Recording | None = None  # of the last trace
        # `finish_all` compares: if a derivative rule has run since, it may have changed the caller's objects.
        self._rules_run = rules_run()

    def private(self) -> Program:
        """This program on a copy of its current graph, without leaves, for traces that outlive the call."""
        twin = copy.copy(self)
        # Scalars: a NumPy array could be changed in place, and the watch for that takes it for the caller's own.
        twin.roots = _core.unflatten_roots(self.graphdef, [np.float32() for _ in self.leaves])
        twin.leaves, twin._recording = [], None
        # New objects as roots: the signature takes all captured values as replaced and puts copies into the function.
        twin._parts = [part._replace(roots=tuple(object() for _ in part.roots)) for part in self._parts]
        return twin

    def _part(self, function: Callable[..., object], captured: bool) -> _BoundFunction:
        # A jitted function stays compiled: it is one opaque callable here.
        if isinstance(function, _core.Caller):
            plain, prefix = call_opaque, (function,)
        else:
            if not callable(function):
                raise TypeError(NOT_CALLABLE.format(name=self.name.partition(" of ")[0], actual=function))
            plain, prefix, _ = resolve(function)
            # In an enclosing trace, the function has the globals and cells that this trace has rebuilt.
            plain = seen(plain)
        refuse_generators(plain)
        signature, placeholders, bound = self._bind(plain, prefix, captured)
        # Where the arguments do not fit, calling the function raises its own TypeError.
        if bound is None:
            args, kwargs = self._call_arguments(self.roots[: self.operands])
            plain(*prefix, *args, **kwargs)
            raise GraftaxError(f"the arguments of {self.name} could not be bound")
        roots, layout = bound
        names, flags = signature.root_names(layout), signature.root_flags(layout, ())
        operand_index = {id(placeholder): i for i, placeholder in enumerate(placeholders)}
        # By value the functions are constants, also those that a callable object holds.
        if not captured:
            flags[: len(prefix)] = [flag | _core.RootFlag.target for flag in flags[: len(prefix)]]
        # A captured root is added to the program. An operand takes the name of the first parameter that it fills.
        numbers: list[int] = []
        for root, name, flag in zip(roots, names, flags, strict=True):
            number = operand_index.get(id(root))
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
        function_roots = tuple(self.roots[number] for number in numbers)
        return _BoundFunction(plain, signature, layout, function_roots, tuple(numbers))

    def _bind(
        self, plain: types.FunctionType, prefix: tuple[object, ...], captured: bool
    ) -> tuple[Signature, list[_Placeholder], tuple[Sequence[Any], Layout] | None]:
        """(the signature, a placeholder for each operand, the roots with their layout if the arguments fit)."""
        signature = Signature.of(plain, len(prefix), captured)
        # Placeholders show which root of the signature each operand fills; all other roots are captured values.
        placeholders = [_Placeholder() for _ in range(self.operands)]
        return signature, placeholders, signature.binding.bind(*self._call_arguments(placeholders), prefix)

    def _call_arguments(self, operands: Sequence[object]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Splits operands into the positional and keyword arguments that the transform received."""
        keywords = dict(zip(self._keywords, operands[self.positional :], strict=True))
        return tuple(operands[: self.positional]), keywords

    def _name_operands(self, jitted: _core.Caller) -> None:
        """Names the operands after the parameters of a jitted function, which is called as `call_opaque(f, *args)`."""
        plain, prefix, _ = resolve(jitted)
        signature, placeholders, bound = self._bind(plain, prefix, False)
        # Where the arguments do not fit, the call itself raises.
        if bound is not None:
            named = {id(root): name for root, name in zip(bound[0], signature.root_names(bound[1]), strict=True)}
            names = [named.get(id(x), name) for x, name in zip(placeholders, self.names, strict=False)]
            self.names = (*names, *self.names[self.operands :])

    @property
    def _dynamic(self) -> Callable[[tuple[int, tuple[Any, ...]]], bool] | None:
        traced, names = self._traced, self.names
        return None if traced is None else lambda place: traced(place_name(place, names))

    def _record(self) -> tuple[list[Any], _core.GraphDef]:
        return _core.record(self.roots, self.names, self._flags, shapes=self._shapes, dynamic=self._dynamic)

    @property
    def key_paths(self) -> list[NamedKeyPath]:
        """The key path of each leaf: the first one if several lead to it."""
        return [NamedKeyPath(*key_path, place_name(key_path, self.names)) for key_path in self.graphdef.leaf_places()]

    def trace(
        self,
        leaves: Iterable[object],
        body: Callable[..., object],
        *,
        mutation: str | None = None,
        arrays: bool = False,
    ) -> tuple[_core.Outcome, list[Any]]:
        """Runs `body(functions, operands)` on the graph, rebuilt around `leaves`.

        Args:
            leaves: the values of the program's leaves, usually tracers.
            body: calls the functions, which run with rebuilt closures and globals.
            mutation: overrides the program's own.
            arrays: NumPy arrays that the functions create are output leaves, and not constants.

        Returns:
            (the Outcome, its output leaves). The attributes `outcome`, `changed`, `untouched` and `sources` describe
            the last trace.
        """
        input_leaves = list(leaves)
        recording = _core.Recording(self.roots, self.names, self._flags, None, False, self._shapes, self._dynamic)

        def call(values: list[Any]) -> Any:
            functions = [self._function(part, values) for part in self._parts]
            return body(functions, values[: self.operands])

        mutation = mutation or self.mutation
        run = functools.partial(
            run_trace, by_value=mutation == "discard", forward=False, arrays=arrays, keeps=self._keeps
        )
        trace_args = (self.name, recording, self.roots, input_leaves, call, mutation)
        # An active call, as in `graftax.jit`: a jitted function that the body calls must not change what it captures,
        # because that is not rebuilt.
        with recording_aliases(self.leaves, input_leaves) as aliases:
            outcome, outputs, changed, lost = _core.run_active(None, self.roots, [], None, run, *trace_args)
            self.sources = aliases.sources(outputs)
        if lost:
            paths = ", ".join(changed)
            # A program from the disk would not warn: one whose trace has warned is not kept there.
            note_warning()
            warnings.warn(CHANGE_LOST.format(name=self.name, paths=paths), LostChangeWarning, caller_level())
        self.outcome, self.changed, self._recording = outcome, changed, recording
        # An output that is one of the input tracers has not been computed: `finish` can give the caller's own array.
        numbers = {id(leaf): i for i, leaf in enumerate(input_leaves)}
        self.untouched = {k: numbers[id(leaf)] for k, leaf in enumerate(outputs) if id(leaf) in numbers}
        return outcome, outputs

    def _function(self, part: _BoundFunction, values: list[Any]) -> Callable[..., Any]:
        def run(*operands: object) -> Any:
            # The body may pass other operands than the rebuilt ones, such as a row in place of `xs`; what the function
            # captures is always the rebuilt one. One operand may fill several parameters of the signature.
            arguments = [operands[i] if i < self.operands else values[i] for i in part.numbers]
            return part.signature.call(part.function, part.roots, arguments, part.layout, self.name, False)

        return run

    def finish(
        self,
        outputs: Sequence[object],
        outcome: _core.Outcome | None = None,
        untouched: Mapping[int, int] | None = None,
    ) -> Any:
        """Builds the result around the output leaves of an Outcome, and writes changes into the caller's objects.

        Args:
            outputs: the values of the output leaves.
            outcome: that of the last trace, unless another one is passed.
            untouched: maps output leaves to the input leaves that they are; these come back as the caller's own arrays.
        """
        outcome = outcome or self.outcome
        assert outcome is not None
        return self.finish_all([(outputs, outcome)], untouched=[untouched or {}])[0]

    def finish_all(
        self,
        pairs: Sequence[tuple[Sequence[object], _core.Outcome]],
        nodes: Callable[[int, list[Any]], list[Any]] | None = None,
        untouched: Sequence[Mapping[int, int]] = (),
    ) -> list[Any]:
        """Applies several Outcomes of this graph in order, and returns their results.

        Args:
            pairs: (values of the output leaves, Outcome).
            nodes: from the position of an Outcome and the caller's nodes to the objects to apply it to.
            untouched: for each Outcome, as in `finish`.
        """
        # The caller's objects must still be as recorded: an Outcome says what to write in terms of that structure.
        walked = _core.walk(self.graphdef, self.roots) or self._leaves_before_rules([outcome for _, outcome in pairs])
        results: list[Any] = []
        for position, (outputs, outcome) in enumerate(pairs):
            values = list(outputs)
            # The walk gives the caller's own arrays, where `leaves` has copies of those that are NumPy's.
            for output, leaf in (untouched[position] if untouched else {}).items():
                values[output] = walked[0][leaf]
            results.append(outcome.apply(values, self.leaves, nodes(position, walked[1]) if nodes else walked[1]))
        return results

    def with_ties(self, values: Iterable[object], recipes: Mapping[int, Recipe]) -> list[Any]:
        """The values, with one array in place of those that have equal recipes: (description, input leaves)."""
        values = list(values)
        rows = [
            (description, tuple(self.leaves[index] for index in inputs), values[i])
            for i, (description, inputs) in recipes.items()
        ]
        return replaced(values, recipes, merge_aliases(rows))

    def tied(self, outputs: Iterable[object]) -> list[Any]:
        """The output leaves of the last trace, with one array in place of those that were computed alike."""
        return self.with_ties(
            outputs, {i: (source.operation, source.inputs) for i, source in enumerate(self.sources) if source}
        )

    def _leaves_before_rules(self, outcomes: Sequence[_core.Outcome]) -> tuple[Sequence[Any], list[Any]]:
        """The leaves and nodes from before derivative rules of this thread changed the caller's objects.

        Raises:
            ConcurrentChangeError: if anything else changed them, or if the Outcomes write to the same objects.
        """
        # JAX runs the rules of a part of a program after it has traced that part. What a rule changes then is kept,
        # provided that the Outcomes do not write to the same objects.
        current = self._record()[1]
        changed_paths = [d.path for d in differences(self.graphdef, current, self.names)]
        paths = ", ".join(changed_paths[:4]) or "an argument"
        if self._recording is None or rules_run() == self._rules_run or not changed_paths:
            raise ConcurrentChangeError(CHANGED_WHILE.format(name=self.name, paths=paths))
        nodes = {track for outcome in outcomes for track in outcome.inputs()[2]}
        written = [place_name(self.graphdef._node_place(track), self.names) for track in nodes]  # pyright: ignore[reportPrivateUsage]
        if any(path.startswith(node) for path in changed_paths for node in written):
            raise ConcurrentChangeError(CHANGED_BY_RULE.format(name=self.name, paths=paths))
        return self._recording.leaves, self._recording.nodes

    def with_leaves(self, indices: Sequence[int], values: Iterable[object]) -> list[Any]:
        """The leaves, with the values in place of those at the indices."""
        return replaced(self.leaves, indices, values)

    def rebuilt(self, leaves: Sequence[object]) -> tuple[Any, ...]:
        """Builds copies of the roots around other leaves, outside of any trace."""
        return _core.unflatten_roots(self.graphdef, list(leaves))

    def recorded(self, roots: tuple[object, ...], result_parts: int = 0) -> tuple[list[Any], _core.GraphDef, list[Any]]:
        """Records roots like this program's, followed by parts of the result: (leaves, GraphDef, tracked nodes)."""
        names = (*self.names, *result_names(result_parts))
        leaves, graphdef = _core.record(roots, names, self._flags)
        walked = _core.walk(graphdef, roots)
        assert walked is not None
        return leaves, graphdef, walked[1]

    def operand(self, selector: int | str) -> int:
        """The index of the operand that a position or a name selects. Raises ValueError if there is none."""
        if isinstance(selector, str):
            if selector in self.names[: self.operands]:
                return self.names.index(selector)
        elif -self.positional <= selector < self.positional:
            return selector % self.positional
        named = ", ".join(self.names[: self.operands]) or "none"
        raise ValueError(NO_SUCH_OPERAND.format(name=self.name, which=selector, operands=named))

    def leaves_below(self, roots: Sequence[int]) -> set[int]:
        """The leaves that can be reached from these roots, including those that other roots reach first."""
        if not roots:
            return set()
        # These roots are flattened by themselves: in the recording, a shared leaf is below the root that came first.
        placeholders = [np.zeros(()) for _ in range(self.graphdef.num_leaves)]
        built = self.rebuilt(placeholders)
        numbers = {id(placeholder): i for i, placeholder in enumerate(placeholders)}
        reached = [numbers.get(id(leaf)) for leaf in _core.flatten([built[root] for root in roots])[0]]
        # Where a registered class has computed other arrays from the placeholders, the recorded structure has to do.
        if None in reached:
            structure = Structure(self.graphdef)
            return structure.reachable_leaves([structure.roots[root] for root in roots])
        return {leaf for leaf in reached if leaf is not None}

    @property
    def functions(self) -> list[types.FunctionType]:
        """The plain functions of the program."""
        return [part.function for part in self._parts]

    @property
    def definition(self) -> Any:
        """The user's function that JAX's messages name in place of the flat function."""
        return definition_of(self._parts[0].function)


def result_names(count: int) -> tuple[str, ...]:
    """What messages call the parts of a result."""
    return ("result",) if count == 1 else tuple(f"result[{i}]" for i in range(count))


def replaced(leaves: Iterable[object], indices: Iterable[int], values: Iterable[object]) -> list[Any]:
    """A list of the leaves, with the values in place of those at the indices."""
    result = list(leaves)
    for i, value in zip(indices, values, strict=True):
        result[i] = value
    return result


def _as_leaf(x: object) -> Any:
    if isinstance(x, (np.ndarray, np.generic)):
        return jnp.array(x, copy=True)
    # As in JAX, a traced number is an array in the function.
    return jnp.asarray(x) if type(x) in NUMBERS else x


class _Placeholder:
    """Takes the place of an operand while the signature is bound."""
