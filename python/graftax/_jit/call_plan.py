# SPDX-License-Identifier: Apache-2.0
"""The options of a function, worked out once for the roots of its calls."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

from graftax import _core
from graftax._base.errors import StructureError
from graftax._base.handles import is_donated
from graftax._capture.signature import Signature
from graftax._graph.patterns import Covering, Pattern, nearest, of_arguments, tester
from graftax._graph.structure import Place, Structure, place_name
from graftax._graph.types.ignored import Ignoring, Test, covering
from graftax._jit.options import Options, split_patterns

NOWHERE = (
    "{name}: the pattern {pattern!r} of {option} matches nothing that is there. There is: {paths}. Name one of these, "
    "or what they are in, or leave the pattern out. .w is an attribute, [w] a key."
)

_NUMBERS = (bool, int, float, complex)
_MOST_LAYOUTS = 64  # each as long as a call has arguments

Layout = tuple[Any, ...]


class Plan:
    """Everything a trace needs besides the live objects of a call. Holds nothing of the user's but options."""

    def __init__(
        self,
        name: str,
        definition: types.FunctionType,
        signature: Signature,
        options: Options,
        on_trace: Callable[[list[str]], None],
    ) -> None:
        self.name = name
        self.definition = definition
        self.signature = signature
        self.options = options
        self.on_trace = on_trace
        self.donate, patterns = split_patterns(options.donate)
        self.donate_patterns = [of_arguments(text, name, "donate=") for text in patterns]
        self.dynamic, patterns = split_patterns(options.dynamic)
        self.dynamic_patterns = [of_arguments(text, name, "dynamic=") for text in patterns]
        self.ignoring = Ignoring(options.ignore, name)
        self._layouts: dict[Layout, tuple[tuple[str, ...], list[int]]] = {}

    def record(
        self,
        roots: tuple[Any, ...],
        layout: Layout,
        shapes: bool = False,
        opened: _core.Opened | None = None,
        symbolic: Collection[Place] = (),
    ) -> _core.Recording:
        """The roots of a call, recorded.

        Args:
            opened: what the call has asked registered classes before.
            symbolic: places of Python numbers that are leaves, though no option says so.
        """
        opened = opened or _core.Opened()
        names, flags = self._spelled(layout)
        ignored = self.ignoring.test(names)
        named = dynamic_in(self.dynamic_patterns, roots, names, flags, shapes, opened, ignored)

        donates = self.donates(roots, layout)
        return _core.Recording(roots, names, flags, layout, donates, shapes, named, opened, ignored, symbolic or None)

    def _spelled(self, layout: Layout) -> tuple[tuple[str, ...], list[int]]:
        """(names, flags) of the roots of calls with this layout."""
        known = self._layouts.get(layout)
        if known is None:
            flags = self.signature.root_flags(layout, self.options.static, self.dynamic)
            if not self.options.captured:  # a function counts by identity, and so do those that a callable object holds
                for i in range(self.signature.skip):
                    flags[i] |= _core.RootFlag.target
            known = self.signature.root_names(layout), flags
            if len(self._layouts) < _MOST_LAYOUTS:
                self._layouts[layout] = known
        return known

    def handles(self, roots: tuple[Any, ...], layout: Layout) -> list[bool]:
        """One flag a root: is it a handle whose memory a call may use?"""
        arguments = self.signature.arguments(layout) if self.options.mutation == "propagate" else 0
        return [i < arguments and is_donated(root) for i, root in enumerate(roots)]

    def donates(self, roots: tuple[Any, ...], layout: Layout) -> bool:
        return self.options.donates or any(self.handles(roots, layout))


def dynamic_in(
    patterns: Sequence[Pattern],
    roots: tuple[Any, ...],
    names: tuple[str, ...],
    flags: Sequence[int],
    shapes: bool,
    opened: _core.Opened | None = None,
    ignored: Test | None = None,
) -> Callable[[Place], bool] | None:
    """A test of places: do patterns cover the Python number there?

    A recording asks with the first path of a number. Where its object is reached again, a pattern may mean another.
    """
    test = tester(patterns, names)
    if test is None:
        return None
    graphdef = _core.Recording(roots, names, flags, None, False, shapes, test, opened, ignored).graphdef
    if not graphdef._shares:  # pyright: ignore[reportPrivateUsage]
        return test
    covering = Covering(graphdef, names)
    structure = covering.structure
    covered = {structure.rows[at] for pattern in patterns for at in covering.of(pattern).statics}
    again = {place_name(structure.place(row), names) for row in covered if type(row.value) in _NUMBERS}
    return (lambda place: test(place) or place_name(place, names) in again) if again else test


def covered_places(plan: Plan, graphdef: _core.GraphDef, names: tuple[str, ...], option: str) -> list[bool]:
    """One flag a place of a leaf: do the patterns of `donate=` or `dynamic=` cover it?

    Raises:
        StructureError: where a pattern matches nothing. Spelt wrong, it would have no effect.
    """
    patterns = plan.donate_patterns if option == "donate=" else plan.dynamic_patterns
    covering = Covering(graphdef, names)
    covered: set[int] = set()
    for pattern in patterns:
        cover = covering.of(pattern)
        if not cover.anything:
            structure = covering.structure
            if option == "donate=":
                there, what = structure.leaves, "no array"
            else:
                there = [row for row, value in structure.statics() if type(value) in _NUMBERS]
                what = "no static number"
            paths = nearest(pattern.text, (place_name(structure.place(row), names) for row in there)) or what
            raise StructureError(NOWHERE.format(name=plan.name, option=option, pattern=pattern.text, paths=paths))
        covered |= cover.leaves
    return [pc in covered for pc in covering.leaves]


def refuse_vain_patterns(plan: Plan, graphdef: _core.GraphDef, names: tuple[str, ...]) -> None:
    """Raises where a pattern of `ignore=` names an argument and matches nothing, not even a None.

    What helpers read is not known yet, so that any other pattern may mean something in the next trace.
    """
    wanted = [pattern for pattern in plan.ignoring.patterns if pattern.root in names]
    rows = Structure(graphdef) if wanted else None
    places = [rows.place(row) for row in rows.rows] if rows else []
    for pattern in wanted:
        covers = covering([pattern], names)
        if covers is None or not any(map(covers, places)):
            paths = nearest(pattern.text, (place_name(place, names) for place in places)) or "nothing"
            raise StructureError(NOWHERE.format(name=plan.name, option="ignore=", pattern=pattern.text, paths=paths))
