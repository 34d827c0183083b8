# SPDX-License-Identifier: Apache-2.0
"""The options of a function, resolved once for the roots of its calls."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from graftax import _core
from graftax._base.errors import StructureError
from graftax._base.handles import is_donated
from graftax._capture.signature import Signature
from graftax._graph.patterns import CoverFinder, Pattern, argument_pattern, coverage_test, nearest
from graftax._graph.structure import RootPath, Structure, place_name
from graftax._graph.types.ignored import IgnoreOption, IgnoreTest, argument_coverage_test
from graftax._jit.number_policy import SymbolicNumbers
from graftax._jit.options import Options, split_patterns

if TYPE_CHECKING:
    from graftax._jit.trace_growth import Growth

PATTERN_UNMATCHED = (
    "{name}: the pattern {pattern!r} of {option} matches nothing that is there. Available: {paths}. Name one of "
    "these or a part that contains one, or remove the pattern. .w is an attribute, [w] a key."
)

_NUMBERS = (bool, int, float, complex)
_MAX_LAYOUTS = 64  # each is as long as the argument list of a call

Layout = tuple[Any, ...]


class Plan:
    """Everything a trace needs besides the live objects of a call. Of the user's objects it holds only options."""

    def __init__(
        self,
        name: str,
        definition: types.FunctionType,
        signature: Signature,
        options: Options,
        on_trace: Callable[[Any, list[str]], None],
    ) -> None:
        self.name = name
        self.definition = definition
        self.signature = signature
        self.options = options
        self.on_trace = on_trace
        self.donate, patterns = split_patterns(options.donate)
        self.donate_patterns = [argument_pattern(text, name, "donate=") for text in patterns]
        self.dynamic, patterns = split_patterns(options.dynamic)
        self.dynamic_patterns = [argument_pattern(text, name, "dynamic=") for text in patterns]
        self.number_rules = [
            (argument_pattern(text, name, "numbers="), policy == "symbolic") for text, policy in options.number_patterns
        ]
        self.finite_patterns = [argument_pattern(text, name, "nonfinite=") for text in options.finite or ()]
        self.ignoring = IgnoreOption(options.ignore, name)
        # (names, flags) of the roots, by layout and by the roots that have their default.
        self._layouts: dict[tuple[Layout, frozenset[int]], tuple[tuple[str, ...], list[int]]] = {}
        self._defaults: frozenset[int] | None = None  # fixed for all calls: see `without_objects`

    def without_objects(self, roots: tuple[object, ...], layout: Layout) -> Plan:
        """The plan for a program that other functions run too: it does not hold what this one captures."""
        # Without the defaults it cannot tell which roots have their default. Those of `roots` that have it now count as
        # defaults in each of its calls.
        signature = dataclasses.replace(self.signature, binding=Signature.nothing().binding, defaults=(), code=None)
        return self.with_signature(signature, self.defaults_among(roots, layout))

    def with_signature(self, signature: Signature, defaults: frozenset[int] | None = None) -> Plan:
        plan = Plan(self.name, self.definition, signature, self.options, self.on_trace)
        plan._defaults = self._defaults if defaults is None else defaults
        return plan

    def defaults_among(self, roots: tuple[object, ...], layout: Layout) -> frozenset[int]:
        """The roots that are defaults: the caller gave nothing, or the very same object."""
        return self.signature.defaults_among(roots, layout) if self._defaults is None else self._defaults

    def record(
        self,
        roots: tuple[object, ...],
        layout: Layout,
        shapes: bool = False,
        opened: _core.Opened | None = None,
        symbolic: Collection[RootPath] = (),
    ) -> _core.Recording:
        """The roots of a call, as `Binding.bind` returns them, recorded.

        Args:
            shapes: `jax.ShapeDtypeStruct` counts as an array.
            opened: what the registered classes were flattened to earlier in this call: they are not called again.
            symbolic: paths of Python numbers to record as leaves although no option asks for it.
        """
        # The test of numbers records, too. What one recording has opened, the other one does not flatten again.
        opened = opened or _core.Opened()
        names, flags = self._names_and_flags(roots, layout)
        ignored = self.ignoring.test(names)
        dynamic = number_test(self.dynamic_patterns, roots, names, flags, shapes, opened, ignored)
        donates = self.donates(roots, layout)  # then one array at two paths is one leaf: it can be given away only once
        symbols = symbolic or None
        return _core.Recording(roots, names, flags, layout, donates, shapes, dynamic, opened, ignored, symbols, True)

    def _names_and_flags(self, roots: tuple[object, ...], layout: Layout) -> tuple[tuple[str, ...], list[int]]:
        """(names, flags) of the roots of a call, from `RootFlag`."""
        # Only these options treat a default otherwise than the same value from the caller.
        needs_defaults = self.signature.numpy_is_constant or self.options.as_jax
        defaults = self.defaults_among(roots, layout) if needs_defaults else frozenset[int]()
        names_and_flags = self._layouts.get((layout, defaults))
        if names_and_flags is None:
            flags = self.signature.root_flags(layout, self.options.static, self.dynamic, defaults)
            if self.options.as_jax:  # `jax.jit` traces the numbers that a caller passes, and not those of defaults
                for i in range(self.signature.skip, self.signature.arguments(layout)):
                    if i not in defaults and not flags[i] & _core.RootFlag.static:
                        flags[i] |= _core.RootFlag.dynamic
            if not self.options.captured:  # functions are compared by identity, also those in a callable object
                for i in range(self.signature.skip):
                    flags[i] |= _core.RootFlag.target
            names_and_flags = self.signature.root_names(layout), flags
            # A function of `*args` has a layout for each number of arguments.
            if len(self._layouts) < _MAX_LAYOUTS:
                self._layouts[layout, defaults] = names_and_flags
        return names_and_flags

    def static_arguments(
        self, args: tuple[object, ...], kwargs: dict[str, object], bound_count: int, layout: Layout
    ) -> dict[int | str, object]:
        """The arguments of a call that are declared static, by position, or by name if they were passed by name."""
        static = {self.signature.root_index(layout, argument) for argument in self.options.static}
        names = self.signature.root_names(layout)
        by_position = {i: value for i, value in enumerate(args) if i + bound_count in static}
        return {**by_position, **{name: value for name, value in kwargs.items() if names.index(name) in static}}

    def handles(self, roots: tuple[object, ...], layout: Layout) -> list[bool]:
        """One flag for each root: is it a handle whose memory the call may reuse?"""
        arguments = self.signature.arguments(layout) if self.options.mutation == "propagate" else 0
        return [i < arguments and is_donated(root) for i, root in enumerate(roots)]

    def donates(self, roots: tuple[object, ...], layout: Layout) -> bool:
        return self.options.donates or any(self.handles(roots, layout))


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """A call whose roots have been recorded: its entry is found by it, or made for it. It lives as long as the call."""

    plan: Plan
    roots: tuple[object, ...]
    layout: Layout
    recording: _core.Recording
    context: object  # the settings of JAX that are part of the cache key
    numbers: SymbolicNumbers | None = None  # the Python numbers that are symbolic

    @property
    def arguments(self) -> int:
        """How many roots are arguments; the others are captured."""
        return self.plan.signature.arguments(self.layout)

    @functools.cached_property
    def handles(self) -> list[bool]:
        return self.plan.handles(self.roots, self.layout)

    @property
    def donates(self) -> bool:
        return self.plan.options.donates or any(self.handles)


class TracedCall(NamedTuple):
    """A call that is traced.

    Attributes:
        leaves: the tracers, around which the objects of `recording` are rebuilt.
        donated: one flag for each leaf.
        by_value: the caller's objects stay as they are, so changes are not written back.
        has_symbols: some numbers among the leaves are symbolic.
        growth: takes in the globals and captures that the trace turns out to read, if it can.
        on_outcome: receives this call with the Outcome and the outputs of a trace that may be repeated. Raises NewReads
            if it has to be.
    """

    plan: Plan
    caller: _core.Caller
    roots: tuple[object, ...]
    recording: _core.Recording
    layout: Layout
    leaves: Sequence[object]
    donated: Sequence[bool]
    by_value: bool
    has_symbols: bool = False
    growth: Growth | None = None
    on_outcome: Callable[[TracedCall, _core.Outcome, list[Any]], None] | None = None

    @property
    def arguments(self) -> int:
        """How many roots are arguments; the others are captured."""
        return self.plan.signature.arguments(self.layout)

    def grown(self) -> TracedCall:
        """The same call, with the roots that its trace has taken in so far."""
        growth = self.growth
        if growth is None:
            return self
        return self._replace(plan=growth.plan, recording=growth.recording, leaves=growth.leaves)


def number_test(
    patterns: Sequence[Pattern],
    roots: tuple[object, ...],
    names: tuple[str, ...],
    flags: Sequence[int],
    shapes: bool,
    opened: _core.Opened | None = None,
    ignored: IgnoreTest | None = None,
) -> Callable[[RootPath], bool] | None:
    """A predicate of paths: do the patterns cover the Python number there? None if they cannot cover any."""
    # A recording tests a number under the first path that leads to it. In a graph with shared objects a pattern may
    # name another path to the same number, so all of its paths are expanded beforehand.
    test = coverage_test(patterns, names)
    if test is None:
        return None
    # A first recording tells whether any object is shared. If none is, each number has one path: `test` is enough.
    graphdef = _core.Recording(roots, names, flags, None, False, shapes, test, opened, ignored, stand_ins=True).graphdef
    if not graphdef._shares:  # pyright: ignore[reportPrivateUsage]
        return test
    finder = CoverFinder(graphdef, names)
    structure = finder.structure
    covered = {structure.rows[index] for pattern in patterns for index in finder.cover(pattern).statics}
    other_paths = {place_name(structure.root_path(row), names) for row in covered if type(row.value) in _NUMBERS}
    return (lambda path: test(path) or place_name(path, names) in other_paths) if other_paths else test


def covered_leaves(plan: Plan, graphdef: _core.GraphDef, names: tuple[str, ...], option: str) -> list[bool]:
    """One flag for each path to a leaf: do the patterns of `donate=` or `dynamic=` cover it?

    Raises:
        StructureError: if a pattern matches nothing. A misspelled one would silently have no effect.
    """
    patterns = plan.donate_patterns if option == "donate=" else plan.dynamic_patterns
    finder = CoverFinder(graphdef, names)
    covered: set[int] = set()
    for pattern in patterns:
        cover = finder.cover(pattern)
        if not cover.matches_any:
            structure = finder.structure
            if option == "donate=":
                rows, nothing = structure.leaves, "no array"
            else:
                rows = [row for row, value in structure.statics() if type(value) in _NUMBERS]
                nothing = "no static number"
            paths = nearest(pattern.text, (place_name(structure.root_path(row), names) for row in rows)) or nothing
            raise StructureError(
                PATTERN_UNMATCHED.format(name=plan.name, option=option, pattern=pattern.text, paths=paths)
            )
        covered |= cover.leaves
    return [row in covered for row in finder.leaves]


def refuse_unmatched_patterns(plan: Plan, graphdef: _core.GraphDef, names: tuple[str, ...]) -> None:
    """Raises where a pattern of `ignore=` or `numbers=` names an argument and matches nothing, not even a None."""
    # Other patterns are not checked: they may match a capture that is found only when a helper is traced.
    options = [("ignore=", pattern) for pattern in plan.ignoring.patterns]
    options += [("numbers=", pattern) for pattern, _ in plan.number_rules]
    options = [(option, pattern) for option, pattern in options if pattern.root in names]
    structure = Structure(graphdef) if options else None
    paths = [structure.root_path(row) for row in structure.rows] if structure else []
    for option, pattern in options:
        covers = argument_coverage_test([pattern], names)
        if covers is None or not any(map(covers, paths)):
            nearby = nearest(pattern.text, (place_name(path, names) for path in paths)) or "nothing"
            raise StructureError(
                PATTERN_UNMATCHED.format(name=plan.name, option=option, pattern=pattern.text, paths=nearby)
            )
