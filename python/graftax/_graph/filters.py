# SPDX-License-Identifier: Apache-2.0
"""Filters select parts of a graph by what they are: types, filters of other libraries, `...` for everything."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from graftax import _core, interop
from graftax._graph.structure import Op, Structure, plain_key
from graftax.interop import LibraryFilter

if TYPE_CHECKING:
    from graftax._graph.select import ObjectView


class Filter(NamedTuple):
    """Selects the parts that are instances of the types, with all below them, or that a library's filter accepts."""

    types: tuple[Any, ...]
    library_filters: tuple[LibraryFilter, ...]
    matches_all: bool
    spec: Any  # as the user wrote it

    def select(self, view: ObjectView | RecordedView) -> list[int]:
        """The parts that the filter selects, in order: numbered rows of the view, without references."""
        if self.matches_all:
            return list(view.parts())
        if not self.library_filters:
            return view.instances(self.types)
        # To a library, an object that its filter takes (a Variable of NNX) is one value: its parts are not tested.
        parts_of_values = [set[int]() for _ in self.library_filters]
        selected: list[int] = []
        for number in view.parts():
            is_selected = bool(self.types) and view.is_a(number, self.types)
            for in_value, library in zip(parts_of_values, self.library_filters, strict=True):
                if view.parent(number) in in_value:  # parts are in walk order: the parent was visited before
                    in_value.add(number)
                    continue
                is_value = view.is_a(number, library.value_types)
                if is_value:
                    in_value.add(number)
                if is_value or view.is_leaf(number):
                    is_selected = is_selected or bool(library.accepts(view.path(number), view.value(number)))
            if is_selected:
                selected.append(number)
        return selected


def as_filter(spec: Any, allow_path_functions: bool = False) -> Filter | None:
    """The filter for a type, a union, a library's filter, `...`, or a tuple or list of these; None for other values.

    Args:
        spec: any value.
        allow_path_functions: a function `f(path, value)` is a filter too, as in Flax NNX.

    Raises:
        TypeError: for an annotation that `isinstance` does not take, such as `list[int]`.
    """
    if spec is ...:
        return Filter((), (), True, spec)
    if type(spec) in (tuple, list):
        parts = [as_filter(part, allow_path_functions) for part in cast("Sequence[Any]", spec)]
        filters = [part for part in parts if part is not None]
        # A mixed list is not a filter: it may be a list of places or a tree.
        if not filters or len(filters) != len(parts):
            return None
        classes = tuple(cls for part in filters for cls in part.types)
        library_filters = tuple(library for part in filters for library in part.library_filters)
        return Filter(classes, library_filters, any(part.matches_all for part in filters), spec)
    if is_type(spec):
        return Filter((spec,), (), False, spec)
    # A library's own filter objects first: they are callable too.
    library_filter = interop.library_filter(spec)
    if library_filter is None and allow_path_functions and takes_two_arguments(spec):
        library_filter = interop.path_filter(_except_roots(spec)) or LibraryFilter((), _except_roots(spec))
    return None if library_filter is None else Filter((), (library_filter,), False, spec)


def _except_roots(spec: Callable[[tuple[Any, ...], Any], Any]) -> Callable[[tuple[Any, ...], Any], Any]:
    """A function that says False for roots: an argument as a whole, or a captured array, has no path to be tested."""
    return lambda path, value: bool(path) and spec(path, value)


def takes_two_arguments(spec: object) -> bool:
    """Is it a function with two required positional arguments?"""
    if not isinstance(spec, (types.FunctionType, types.MethodType, functools.partial)):
        return False
    parameters = inspect.signature(cast("Callable[..., Any]", spec)).parameters.values()
    # Optional arguments do not count: a predicate may have options.
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(required) == 2


def is_type(spec: object) -> bool:
    """Is it a type or a union of types?

    Raises:
        TypeError: if it is an annotation that `isinstance` does not take, such as `list[int]`.
    """
    origin = typing.get_origin(spec)
    # `isinstance` takes classes and unions, but not parametrized generics.
    if origin is not None and origin not in (typing.Union, types.UnionType):
        name = getattr(origin, "__name__", origin)
        raise TypeError(f"isinstance does not accept {spec!r}: give the class, {name}, or a function of a leaf.")
    return origin is not None or isinstance(spec, type)


class RecordedView:
    """A recorded structure with its leaves, for filters. Nodes are built only if a filter needs their values."""

    def __init__(self, graphdef: _core.GraphDef, leaves: Sequence[Any]) -> None:
        self.graphdef, self.leaves = graphdef, leaves
        self.structure = Structure(graphdef)
        self.rows = self.structure.rows

    def parts(self) -> Iterable[int]:
        return (row.number for row in self.rows if row.op is not Op.ref and row.target == row.number)

    def parent(self, number: int) -> int:
        return self.rows[number].parent

    def is_a(self, number: int, types: Any) -> bool:
        row = self.rows[number]
        if row.op is Op.leaf:
            return isinstance(self.leaves[row.leaf], types)
        return row.op is Op.node and isinstance(row.type, type) and issubclass(row.type, types)

    def instances(self, types: Any) -> list[int]:
        return [number for number in self.parts() if self.is_a(number, types)]

    def is_leaf(self, number: int) -> bool:
        return self.rows[number].op is Op.leaf

    def path(self, number: int) -> tuple[Any, ...]:
        return tuple(plain_key(entry) for entry in self.structure.root_path(self.rows[number])[1])

    def value(self, number: int) -> Any:
        row = self.rows[number]
        return self.leaves[row.leaf] if row.op is Op.leaf else self._nodes[row.track]

    @functools.cached_property
    def _nodes(self) -> list[Any]:
        # The nodes are rebuilt around the leaves, since a recorded structure has no live objects. A walk of what was
        # built lists them by the numbers of their identities.
        built = _core.unflatten(self.graphdef, list(self.leaves))
        walk = _core.walk(self.graphdef, (built,) if len(self.structure.roots) == 1 else built)
        assert walk is not None
        return walk[1]

    def selected_leaves(self, leaf_filter: Filter) -> set[int]:
        """The leaves that a filter selects, and those below the nodes that it selects, by number."""
        return self.structure.reachable_leaves(self.rows[number] for number in leaf_filter.select(self))
