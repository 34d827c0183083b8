# SPDX-License-Identifier: Apache-2.0
"""`at`, `find` and `shared`: reading, replacing and finding parts of an object graph."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar, cast, overload

import jax
import numpy as np

from graftax import interop
from graftax._base.errors import StructureError, a_type, at_path, some
from graftax._graph.array_aliases import record_alias_sources
from graftax._graph.filters import Filter, as_filter
from graftax._graph.path import Graph, Path
from graftax._graph.patterns import is_pattern, nearest
from graftax._graph.structure import plain_key
from graftax._jax.tracebacks import boundary

AMBIGUOUS_FAILED = (
    "the function given to at() returned the value at {paths}, which is in several places. To find out which one is "
    "meant, at() called it again with different objects there, and it failed: {error}. Give it the path instead: "
    "at(obj)['layers[0].w']"
)
NOT_A_PART = (
    "the function given to at() must return parts of the object it is called with, nothing computed from them. It "
    "returned {found} that is not part of it. Give a path instead: at(obj)['layers[0].w']"
)

T = TypeVar("T")
V = TypeVar("V")
_Selector = str | Path | type | types.UnionType | Callable[[T], Any]


@boundary
def at(obj: T) -> At[T]:
    """Places in a graph, to read them, or to get a copy with other values there.

    In `at(obj)[where]`, `where` is a path or a pattern (`layers[0].w`, `layers[*].w`, `**.bias`), a `Path`, or a tuple
    of those. It may also be a function of the object that returns a part of it or several (`lambda m: m.layers[0].w`).
    The result has `get()`, `set(value)`, `apply(function)`, `update(value)` and `paths`.

    Args:
        obj: the root.

    Returns:
        an object whose brackets select places: `at(obj)[where]`.

    Raises:
        StructureError: if a path or a pattern matches nothing; names what is there instead.

    Example:
        >>> model = {"layers": [{"w": 4}, {"w": 6}], "head": 1}
        >>> graftax.at(model)["layers[*][w]"].apply(lambda w: w / 2)  # a copy; `model` stays as it is
        {'layers': [{'w': 2.0}, {'w': 3.0}], 'head': 1}
        >>> graftax.at(model)[lambda m: m["head"]].set(None)
        {'layers': [{'w': 4}, {'w': 6}], 'head': None}
    """
    return At(obj)


# What is written into a Variable of Flax NNX. Any other value takes the place of the Variable itself.
_VALUES = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, bool, int, float, complex)


class At(Generic[T]):
    """What `at` returns: `at(obj)[where]` are the places."""

    __slots__ = ("_obj",)

    def __init__(self, obj: T) -> None:
        self._obj = obj

    @boundary
    def __getitem__(self, where: _Selector[T] | tuple[_Selector[T], ...]) -> Places[T]:
        return Places(self._obj, where)


class Places(Generic[T]):
    """Some places of a graph."""

    def __init__(self, obj: T, selector: Any) -> None:
        self._graph = Graph(obj)
        self._is_list, self._groups = _locate(self._graph, selector)
        self._selector = selector

    @property
    @boundary
    def paths(self) -> list[Path]:
        """The paths of the places. An object that a function returned may stand at several paths: all are listed."""
        return [self._graph.path(number) for number in self._numbers]

    @boundary
    def get(self) -> Any:
        """The value, or a list of them for a pattern or several places."""
        values = [self._graph.rows[group[0]].value for group in self._groups]
        return values if self._is_list else values[0]

    @boundary
    def set(self, value: object) -> T:
        """A copy with another value there. Only objects that contain one of the places are copied, the rest is shared.

        Args:
            value: for several places named one by one, a sequence of their values; for a pattern, one value for all.
        """
        return self._graph.core.build(self._changes(value))

    @boundary
    def apply(self, function: Callable[[Any], Any]) -> T:
        """A copy with `function(value)` in each of the places. The function is called once for each object."""
        return self._graph.core.build(self._apply_to_rows(function))

    @boundary
    def update(self, value: object) -> None:
        """As `set`, in place. Immutable objects on the path are rebuilt inside the mutable object that holds them."""
        self._graph.write(self._changes(value))

    @property
    def _numbers(self) -> list[int]:
        return list(dict.fromkeys(number for group in self._groups for number in group))

    @property
    def _written_groups(self) -> list[list[int]]:
        """The groups that are written. A trailing `**` matches nodes and all below them: then only arrays are."""
        if isinstance(self._selector, str) and self._selector.endswith("**"):
            rows = self._graph.rows
            arrays = [g for g in self._groups if rows[g[0]].category == "array" and not rows[g[0]].aux]
            return arrays or self._groups
        return self._groups

    def _changes(self, value: object) -> dict[int, Any]:
        """The new value of each row, for `set` and `update`."""
        groups = self._written_groups
        if not self._is_list or isinstance(self._selector, (str, Path)) or _as_filter(self._selector) is not None:
            values = [value] * len(groups)
        else:
            # Only ordered sequences, and not the rows of an array or the characters of a text.
            values = list(cast("Iterable[Any]", value)) if isinstance(value, (list, tuple, Iterator)) else None
            received = a_type(value) if values is None else f"{len(values)} values"
            if values is None or len(values) != len(groups):
                raise ValueError(
                    f"set() takes a list or tuple with one value for each of the {len(groups)} places, got {received}."
                )
        changes: dict[int, Any] = {}
        for group, new_value in zip(groups, values, strict=True):
            for number in group:
                # A place may be selected twice with the same value, but not with two.
                if changes.setdefault(number, new_value) is not new_value:
                    raise ValueError(
                        f"{self._graph.path(number)!r} is given two values: it is one place, named twice or reached "
                        "through a shared object. Name it once."
                    )
        changes = self._into_variables(changes)
        self._graph.refuse_nested(changes)
        return changes

    def _apply_to_rows(self, function: Callable[[Any], Any]) -> dict[int, Any]:
        """The new value of each row, for `apply`."""
        rows = self._graph.rows
        numbers = list(dict.fromkeys(number for group in self._written_groups for number in group))
        # Before the function runs: it should not be called in vain.
        self._graph.refuse_nested(dict.fromkeys(numbers))
        results: dict[int, tuple[tuple[Any, ...], Any]] = {}
        changes: dict[int, Any] = {}
        for number in numbers:
            # Arrays have no identity as nodes, so one that stands at several paths is recognized by its id.
            target = id(rows[number].value) if rows[number].category == "array" else rows[number].target
            if target not in results:
                try:
                    results[target] = (rows[number].value,), function(rows[number].value)
                except Exception as error:
                    raise at_path(error, repr(self._graph.path(number)))  # noqa: B904 - it is the same one
            changes[number] = results[target][1]
        # In a trace, one array may be several tracers. A later call then knows that their results are one array.
        record_alias_sources(results.values())
        return self._into_variables(changes)

    def _into_variables(self, changes: dict[int, Any]) -> dict[int, Any]:
        """Redirects arrays that replace an object which holds one, such as a Variable of NNX, into that object."""
        graph, placed_changes = self._graph, dict[int, Any]()
        for number, value in changes.items():
            node = graph.rows[number].target
            field = interop.value_field(graph.rows[node].value) if isinstance(value, _VALUES) else None
            value_rows = (child for entry, child in graph.key_entries(node) if plain_key(entry) == field)
            placed_changes[number if field is None else next(value_rows, number)] = value
        return placed_changes

    def __repr__(self) -> str:
        return f"<places {some([repr(path) for path in self.paths], 8)}>"


def _locate(graph: Graph, selector: object) -> tuple[bool, list[list[int]]]:
    """The rows that `selector` selects.

    Returns:
        (is a list of values expected, a group of rows for each value: an object may stand at several paths).
    """
    if isinstance(selector, Path):
        return False, [[graph.number(selector)]]
    if isinstance(selector, str):
        return is_pattern(selector), [[number] for number in matching(graph, selector)]
    leaf_filter = _as_filter(selector)
    if leaf_filter is not None:
        # A filter selects objects, not paths: an object is written at all its paths.
        references, numbers = graph.references(), leaf_filter.select(ObjectView(graph))
        if not numbers:
            cls = type(graph.rows[0].value).__qualname__
            raise StructureError(f"nothing in this {cls} is an instance of {selector!r}.")
        return True, [[number, *references.get(number, ())] for number in numbers]
    if type(selector) in (tuple, list) and selector:
        return True, [group for part in cast("list[Any]", selector) for group in _locate(graph, part)[1]]
    if callable(selector):
        return _locate_returned(graph, selector)
    raise TypeError(f"at() takes a path, a pattern, a type, a function, or several of those, got {selector!r}")


def _as_filter(selector: object) -> Filter | None:
    return None if isinstance(selector, list) else as_filter(selector)  # a list names several places one by one


def matching(graph: Graph, pattern: str | Path) -> list[int]:
    """The numbers of the rows that a pattern matches, each once.

    Raises:
        StructureError: if nothing matches; suggests similar paths.
    """
    if isinstance(pattern, Path):
        return [graph.number(pattern)]
    if not is_pattern(pattern):
        return [graph.number_from_text(pattern)]
    numbers = graph.matching(pattern)
    if not numbers:
        # The root itself has no text, so that names begin with the first child.
        names = nearest(pattern, (str(graph.path(number)) for number in range(1, len(graph.rows))))
        text = f"It has {names}." if names else "It has no parts."
        cls = type(graph.rows[0].value).__qualname__
        raise StructureError(f"nothing in this {cls} matches {pattern!r}. {text}")
    return numbers


def _locate_returned(graph: Graph, selector: Callable[[Any], Any]) -> tuple[bool, list[list[int]]]:
    """The rows of the objects that `selector` returns, by identity.

    An immutable value (a small number, None, an array) may stand at several paths. To tell these apart, `selector` is
    called again with a copy of the graph that has a different object at each of them.
    """
    result = selector(graph.rows[0].value)
    is_list, parts = _returned_parts(graph, result)
    # The rows of each returned object, by its id: the graph keeps all of them alive.
    # References are left out: a node has a single row, and its references are added at the end.
    rows_of_id: dict[int, list[int]] = {}
    for number, row in enumerate(graph.rows):
        if row.category != "ref":
            rows_of_id.setdefault(id(row.value), []).append(number)
    groups = [rows_of_id.get(id(part), []) for part in parts]
    if not all(groups):
        raise StructureError(NOT_A_PART.format(found=a_type(parts[groups.index([])])))
    # Only values at several rows are replaced by marks, so that the function can compute with all others as before.
    ambiguous = {number: object() for group in groups if len(group) > 1 for number in group}
    if ambiguous:
        paths = ", ".join(repr(graph.path(number)) for number in list(ambiguous)[:4])
        # A node cannot be a mark, since the function looks inside. The copy has new nodes anyway, one for each row.
        nodes = {number for number in ambiguous if graph.children(number)}
        marks = {number: mark for number, mark in ambiguous.items() if number not in nodes}
        root, built = graph.core.twin(marks)
        numbers = {id(built[number] if number in nodes else marks[number]): number for number in ambiguous}
        try:
            result_again = selector(root)
        except Exception as error:
            raise StructureError(
                AMBIGUOUS_FAILED.format(paths=paths, error=f"{type(error).__name__}: {error}")
            ) from error
        # The second call has to take the same way as the first one.
        parts_again = list(result_again) if is_list else [result_again]
        if len(parts_again) != len(parts):
            raise StructureError(AMBIGUOUS_FAILED.format(paths=paths, error=f"it returned {len(parts_again)} parts"))
        for i, part in enumerate(parts_again):
            if len(groups[i]) > 1:
                if id(part) not in numbers:
                    raise StructureError(NOT_A_PART.format(found=a_type(parts[i])))
                groups[i] = [numbers[id(part)]]
    references = graph.references()
    return is_list, [[group[0], *references.get(group[0], ())] for group in groups]


def _returned_parts(graph: Graph, result: object) -> tuple[bool, list[Any]]:
    """(are there several, the parts): a tuple or list that is not itself a part of the graph lists several parts."""
    # By identity: a list that only equals a part of the graph was made by the function.
    if isinstance(result, (tuple, list)) and result and not any(row.value is result for row in graph.rows):
        return True, list(cast("list[Any]", result))
    return False, [result]


class Found(NamedTuple, Generic[V]):
    """A part of a graph, and its path."""

    path: Path
    value: V


@overload
def find(obj: object, what: type[V] | tuple[type[V], ...]) -> list[Found[V]]: ...
@overload
def find(obj: object, what: str | Path | types.UnionType | Callable[[Any], object]) -> list[Found[Any]]: ...
@boundary
def find(obj: object, what: object) -> list[Found[Any]]:
    """Every part of a graph that is an instance of a type, or for which a function says True.

    Args:
        obj: the root, which may itself be found.
        what: a type or several; a key-path pattern; a filter of Flax NNX (`nnx.PathContains`, `nnx.All`), which
            selects Variables; or a function of any part, object or leaf.

    Returns:
        (path, value) pairs in the order of the walk, each object once.

    Raises:
        ValueError: if a string is not a pattern.

    Example:
        >>> [str(path) for path, value in graftax.find({"layers": [2, "x", 3]}, int)]
        ['[layers][0]', '[layers][2]']
    """
    graph = Graph(obj)
    if isinstance(what, (str, Path)):
        try:
            numbers = list(dict.fromkeys(graph.rows[number].target for number in matching(graph, what)))
        except StructureError:
            return []
    else:
        part_filter, view = as_filter(what, allow_path_functions=True), ObjectView(graph)
        if part_filter is not None:
            numbers = part_filter.select(view)
        elif callable(what):
            numbers = [number for number in view.parts() if predicate_holds(what, graph, number)]
        else:
            raise TypeError(f"find() takes a type or several, a pattern, or a function of a part, got {what!r}")
    return [Found(graph.path(number), graph.rows[number].value) for number in numbers]


class Shared(NamedTuple):
    """An object that stands at several paths of a graph."""

    value: Any
    paths: list[Path]


@boundary
def shared(obj: object) -> list[Shared]:
    """The mutable objects and arrays that are reached by more than one path, those of cycles included.

    Args:
        obj: the root.

    Returns:
        (value, paths) pairs in the order of the walk.

    Example:
        >>> layer = ["shared"]
        >>> [[str(p) for p in paths] for value, paths in graftax.shared({"a": layer, "b": layer})]
        [['[a]', '[b]']]
    """
    graph = Graph(obj)
    numbers: dict[int, list[int]] = {}
    for number, row in enumerate(graph.rows):
        # The first occurrence of a node is not a reference: it is added with the first reference.
        if row.category == "ref":
            numbers.setdefault(id(row.value), [row.target]).append(number)
        elif row.category == "array":
            numbers.setdefault(id(row.value), []).append(number)
    groups = [group for group in numbers.values() if len(group) > 1]
    return [Shared(graph.rows[group[0]].value, [graph.path(number) for number in group]) for group in sorted(groups)]


class ObjectView:
    """A graph of live objects, for filters, with the methods of a `RecordedView`."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def parts(self) -> Iterable[int]:
        return (number for number, row in enumerate(self.graph.rows) if row.category != "ref")

    def parent(self, number: int) -> int:
        return self.graph.rows[number].parent

    def is_a(self, number: int, types: Any) -> bool:
        return isinstance(self.graph.rows[number].value, types)

    def instances(self, types: Any) -> list[int]:
        return self.graph.core.instances(types)

    def is_leaf(self, number: int) -> bool:
        return self.graph.rows[number].is_leaf and not self.graph.rows[number].aux

    def path(self, number: int) -> tuple[Any, ...]:
        return tuple(map(plain_key, self.graph.path(number)))

    def value(self, number: int) -> Any:
        return self.graph.rows[number].value


def predicate_holds(function: Callable[[Any], Any], graph: Graph, number: int) -> bool:
    """The answer of a user's predicate for a part, as a bool; an error that it raises gets the path of the part."""
    try:
        return bool(function(graph.rows[number].value))
    except Exception as error:
        raise at_path(error, repr(graph.path(number)))  # noqa: B904 - it is the same one
