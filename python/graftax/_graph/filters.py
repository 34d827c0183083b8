# SPDX-License-Identifier: Apache-2.0
"""Filters that say what something is, not where: types, the filters of other libraries, `...` for everything."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

from graftax import _core, interop
from graftax._graph.structure import Op, Row, Structure, plain_key
from graftax.interop import LibraryFilter

NO_TYPE = "{spec!r} cannot be asked with isinstance: give the class, {origin}, or a function of a leaf."


class Filter(NamedTuple):
    """Means all that is an instance of one of the types, with all below it, or that a library's filter means."""

    types: tuple[Any, ...]
    asked: tuple[LibraryFilter, ...]
    everything: bool
    spec: Any  # as it was given

    def means(self, seen: Seen) -> list[int]:
        """The parts that it means, in order."""
        if self.everything:
            return list(seen.parts())
        if not self.asked:
            return seen.instances(self.types)
        inside = [set[int]() for _ in self.asked]  # what a library asks of is one value for it
        found: list[int] = []
        for number in seen.parts():
            chosen = bool(self.types) and seen.is_a(number, self.types)
            for below, library in zip(inside, self.asked, strict=True):
                if seen.parent(number) in below:
                    below.add(number)
                    continue
                held = seen.is_a(number, library.value_types)
                if held:
                    below.add(number)
                if held or seen.is_leaf(number):
                    chosen = chosen or bool(library.accepts(seen.path(number), seen.value(number)))
            if chosen:
                found.append(number)
        return found


def filter_of(spec: Any, of_path: bool = False) -> Filter | None:
    """The filter that a type, a union, a library's filter, `...`, or a tuple or list of them is; None for others.

    Args:
        spec: what is given.
        of_path: a function of two arguments is one too, as in Flax NNX: of the names on the way, and the value there.

    Raises:
        TypeError: for an annotation that `isinstance` does not take, such as `list[int]`.
    """
    if spec is ...:
        return Filter((), (), True, spec)
    if type(spec) in (tuple, list):
        parts = [filter_of(part, of_path) for part in cast("Sequence[Any]", spec)]
        found = [part for part in parts if part is not None]
        if not found or len(found) != len(parts):
            return None
        kinds = tuple(kind for part in found for kind in part.types)
        asked = tuple(library for part in found for library in part.asked)
        return Filter(kinds, asked, any(part.everything for part in found), spec)
    if is_type(spec):
        return Filter((spec,), (), False, spec)
    asked = interop.library_filter(spec)
    if asked is None and of_path and takes_two(spec):
        asked = interop.path_filter(_below_a_root(spec)) or LibraryFilter((), _below_a_root(spec))
    return None if asked is None else Filter((), (asked,), False, spec)


def _below_a_root(spec: Callable[[tuple[Any, ...], Any], Any]) -> Callable[[tuple[Any, ...], Any], Any]:
    """It is not asked about an argument as a whole, or a captured array: they have no path."""
    return lambda path, value: bool(path) and spec(path, value)


def takes_two(spec: Any) -> bool:
    """Is it a function that has to be given two arguments?"""
    if not isinstance(spec, (types.FunctionType, types.MethodType, functools.partial)):
        return False
    given = inspect.signature(cast("Callable[..., Any]", spec)).parameters.values()
    needed = [p for p in given if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) == 2


def is_type(spec: Any) -> bool:
    """Is it a type or a union of types?

    Raises:
        TypeError: where it is an annotation that `isinstance` does not take, such as `list[int]`.
    """
    origin = typing.get_origin(spec)
    if origin is not None and origin not in (typing.Union, types.UnionType):
        raise TypeError(NO_TYPE.format(spec=spec, origin=getattr(origin, "__name__", origin)))
    return origin is not None or isinstance(spec, type)


class Seen(ABC):
    """A graph, as a filter sees it: parts with numbers, references left out."""

    @abstractmethod
    def parts(self) -> Iterable[int]: ...

    @abstractmethod
    def parent(self, number: int) -> int: ...

    @abstractmethod
    def is_a(self, number: int, kinds: Any) -> bool: ...

    def instances(self, kinds: Any) -> list[int]:
        """The parts that are instances, in order."""
        return [number for number in self.parts() if self.is_a(number, kinds)]

    @abstractmethod
    def is_leaf(self, number: int) -> bool: ...

    @abstractmethod
    def path(self, number: int) -> tuple[Any, ...]:
        """Of names, indices and keys, from the root on."""

    @abstractmethod
    def value(self, number: int) -> Any: ...


class Recorded(Seen):
    """A recorded structure with these leaves."""

    def __init__(self, graphdef: _core.GraphDef, leaves: Sequence[Any]) -> None:
        self.graphdef, self.leaves = graphdef, leaves
        self.structure = Structure(graphdef)
        self.rows = self.structure.rows

    def parts(self) -> Iterable[int]:
        return (row.number for row in self.rows if row.op is not Op.ref and row.target == row.number)

    def parent(self, number: int) -> int:
        return self.rows[number].parent

    def is_a(self, number: int, kinds: Any) -> bool:
        row = self.rows[number]
        if row.op is Op.leaf:
            return isinstance(self.leaves[row.leaf], kinds)
        return row.op is Op.node and isinstance(row.type, type) and issubclass(row.type, kinds)

    def is_leaf(self, number: int) -> bool:
        return self.rows[number].op is Op.leaf

    def path(self, number: int) -> tuple[Any, ...]:
        return tuple(plain_key(entry) for entry in self.structure.place(self.rows[number])[1])

    def value(self, number: int) -> Any:
        row = self.rows[number]
        return self.leaves[row.leaf] if row.op is Op.leaf else self._nodes[row.track]

    @functools.cached_property
    def _nodes(self) -> list[Any]:
        built = _core.unflatten(self.graphdef, list(self.leaves))
        walked = _core.walk(self.graphdef, (built,) if len(self.structure.roots) == 1 else built)
        assert walked is not None
        return walked[1]

    def chosen(self, wanted: Filter) -> set[int]:
        """The leaves that a filter means, by number."""
        reached: set[int] = set()
        stack: list[Row] = [self.rows[number] for number in wanted.means(self)]
        while stack:
            row = self.structure.target(stack.pop())
            if row.number not in reached:
                reached.add(row.number)
                stack += self.structure.children(row)
        return {row.leaf for row in self.structure.leaves if row.number in reached}
