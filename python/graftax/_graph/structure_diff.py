# SPDX-License-Identifier: Apache-2.0
"""Differences between two structures: a walk over both in lockstep, and the comparison of two GraphDefs."""

from __future__ import annotations

import itertools
import os
import types
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._base.handles import HandleLayout
from graftax._base.key_path import keystr
from graftax._graph.structure import KeyEntry, Op, Row, Structure, place_name, plain_key
from graftax._graph.types.static_values import PLAIN, dtype_text
from graftax._jax.equations import is_jaxpr

A = TypeVar("A")
B = TypeVar("B")
D = TypeVar("D")
P = TypeVar("P")

_NUMBERS = {bool, int, float, complex}
_CLASSES_OF_KIND = {"number": {int, float, complex}, "bool": {bool}, "text": {str, bytes}}
_VALUE_LENGTH = 80  # characters of a value that a message shows
_KEYS_SHOWN = 8  # keys in a list that a message shows
_PATH_LENGTH = 1000  # characters; a longer path is cut in the middle


class Difference(NamedTuple, Generic[P]):
    """One place where two graphs differ."""

    path: P  # a text where roots have names; it may name two paths
    one: str  # what the first graph has there
    other: str
    kind: str = "content"  # such as value, type, added, order, sharing: recompile advice depends on it

    def __str__(self) -> str:
        return f"{self.path!r}: {self.one} and {self.other}"

    def line(self) -> str:
        """The line of a message: `one` was expected, `other` was given."""
        path = str(self.path)
        path = path if len(path) <= _PATH_LENGTH else f"{path[: _PATH_LENGTH // 4]} ... {path[-_PATH_LENGTH // 4 :]}"
        return f"{path}: expected {self.one}, given {self.other}"


# A key path as a linked list: the parent's path and the last key entry. Siblings share their prefix, so that a walk
# over a deep graph takes linear memory.
LinkedPath = tuple["LinkedPath", KeyEntry] | None


def linked_entries(path: LinkedPath, max_entries: int | None = None) -> tuple[KeyEntry, ...]:
    """The key entries of a linked path, from the root on; of a path with more than `max_entries`, the last ones."""
    entries: list[KeyEntry] = []
    while path is not None and len(entries) != max_entries:
        path, entry = path
        entries.append(entry)
    return tuple(reversed(entries))


def lockstep(
    compare_pair: Callable[[A, B, LinkedPath], Generator[D, None, Sequence[tuple[A, B, KeyEntry]]]],
    x: A,
    y: B,
    path: LinkedPath = None,
) -> Iterator[D]:
    """Walks two structures side by side, in the order of the first, and yields their differences.

    Args:
        compare_pair: yields the differences of two nodes; returns the pairs to compare next, each with its key entry.
        x, y: the roots.
        path: the path of the roots.
    """
    # An explicit stack, not recursion: graphs may be deeper than Python's stack.
    stack = [(x, y, path)]
    while stack:
        x, y, path = stack.pop()
        pairs = yield from compare_pair(x, y, path)
        stack.extend((a, b, (path, entry)) for a, b, entry in reversed(pairs))


def differences(
    expected: _core.GraphDef, actual: _core.GraphDef, names: Sequence[str] | None = None
) -> Iterator[Difference[str]]:
    """Yields the differences in the order of the walk; below a difference, nothing more is compared.

    Args:
        expected, actual: the structures.
        names: a name for each root; by default a root is called `obj`.
    """
    comparison = Comparison(expected, actual, names)
    roots = itertools.zip_longest(comparison.expected.roots, comparison.actual.roots)
    for number, (expected_root, actual_root) in enumerate(roots):
        yield from lockstep(comparison.compare_pair, expected_root, actual_root, (None, number))


def differences_by_name(
    expected: _core.GraphDef, actual: _core.GraphDef, names: Sequence[str], actual_names: Sequence[str]
) -> tuple[list[Difference[str]], list[tuple[int, int, str]]]:
    """Differences between structures whose roots are matched by name; either may have roots that the other lacks.

    Returns:
        (the differences, the arrays that both have: leaf in `expected`, leaf in `actual`, path).
    """
    # Roots that only one side has are compared with nothing, which reports them.
    all_names = [*names, *(name for name in actual_names if name not in names)]
    comparison = Comparison(expected, actual, all_names)
    expected_roots = dict(zip(names, comparison.expected.roots, strict=False))
    actual_roots = dict(zip(actual_names, comparison.actual.roots, strict=False))
    root_differences: list[Difference[str]] = []
    for number, name in enumerate(all_names):
        roots = expected_roots.get(name), actual_roots.get(name)
        root_differences += lockstep(comparison.compare_pair, *roots, (None, number))
    arrays = [(i, j, comparison.path_text(path)) for i, (j, path) in comparison.paired_leaves[0].items()]
    return root_differences, arrays


def differences_text(
    expected: _core.GraphDef,
    actual: _core.GraphDef,
    names: Sequence[str] | None = None,
    limit: int = 4,
    orders: bool = True,
    ignored_paths: Collection[str] = (),
) -> str:
    """At most `limit` differences as lines of text.

    Args:
        expected, actual: the structures.
        names: a name for each root.
        limit: the most lines.
        orders: False leaves out differences in the order of keys alone.
        ignored_paths: paths whose differences are left out.
    """
    reported = (d for d in differences(expected, actual, names) if d.path not in ignored_paths)
    counted = (d for d in reported if orders or d.kind != "order")
    # One more than is shown, to know whether there are more.
    shown = list(itertools.islice(counted, limit + 1))
    lines = [f"  {d.line()}" for d in shown[:limit]]
    if len(shown) > limit:
        lines.append("  ... and more")
    if not lines:  # identity statics have no row that shows which object they are
        lines.append("  an object that is compared by identity, such as a sentinel, is not the one from before")
    return "\n".join(lines)


def differ_only_in_jaxprs(expected: _core.GraphDef, actual: _core.GraphDef) -> bool:
    """Do two structures differ only in jaxprs? Each trace of the same function makes new ones."""
    if expected == actual:
        return True

    def jaxprs(graphdef: _core.GraphDef) -> set[str]:
        structure = Structure(graphdef)
        return {place_name(structure.root_path(row), ("",)) for row, value in structure.statics() if is_jaxpr(value)}

    # Both sides have to have a jaxpr at the path of a difference.
    jaxpr_paths = jaxprs(expected) & jaxprs(actual)
    return (
        expected.num_leaves == actual.num_leaves
        and {d.path for d in differences(expected, actual, ("",))} <= jaxpr_paths
    )


def differ_only_in_order(expected: _core.GraphDef, actual: _core.GraphDef) -> bool:
    """Do two structures differ only in the order of keys and attributes?"""
    if expected == actual:
        return True
    difference = None
    for difference in differences(expected, actual):
        if difference.kind != "order":
            return False
    return difference is not None


class _DeadStatic:
    """Stands for a static that has been garbage-collected: a weak structure does not keep its statics alive."""

    def __repr__(self) -> str:
        return "a value that is gone"


_DEAD_STATIC = _DeadStatic()


def _static_value(row: Row) -> object:
    try:
        value = row.value
    except ReferenceError:
        return _DEAD_STATIC
    if type(value) is np.ndarray and row.plain_value is not None and not value.dtype.hasobject:
        dtype, shape, content = row.plain_value  # as it was recorded: it may have been changed in place since
        if dtype == dtype_text(value.dtype) and value.dtype.itemsize:
            return np.frombuffer(content, value.dtype).reshape(shape)
    return value


_Pairs = list[tuple[Row | None, Row | None, KeyEntry]]


class Comparison:
    """Compares two GraphDefs pair by pair, for `lockstep`."""

    def __init__(self, expected: _core.GraphDef, actual: _core.GraphDef, names: Sequence[str] | None) -> None:
        self.expected, self.actual = Structure(expected), Structure(actual)
        roots = max(len(self.expected.roots), len(self.actual.roots))
        self.names = (*(names or ()), *["obj"] * roots)
        self.paired_nodes: dict[int, int] = {}  # expected node -> the actual node that it was paired with
        # For each side: leaf -> the other side's leaf and the path where the two were paired first. An array that is
        # one leaf at two paths has to be one on the other side as well.
        self.paired_leaves: tuple[dict[int, tuple[int, LinkedPath]], dict[int, tuple[int, LinkedPath]]] = ({}, {})

    def compare_pair(
        self, expected: Row | None, actual: Row | None, path: LinkedPath
    ) -> Generator[Difference[str], None, _Pairs]:
        expected, actual = _resolve_repeat(self.expected, expected), _resolve_repeat(self.actual, actual)
        # From the coarse to the fine: presence, sharing, type, then the content.
        if expected is None or actual is None:
            yield self._type_difference(expected, actual, path)
        # A reference on one side only means that an object is shared on that side alone.
        elif Op.ref in (expected.op, actual.op):
            yield from self._sharing_differences(expected, actual, path)
        elif (
            expected.op is not actual.op
            or expected.type is not actual.type
            or expected.is_number is not actual.is_number
        ):
            yield self._type_difference(expected, actual, path)
        elif expected.op is Op.leaf and not expected.is_number:
            yield from self._array_sharing(expected.leaf, actual.leaf, path)
        elif expected.op is Op.static:
            expected_value, actual_value = _static_value(expected), _static_value(actual)
            if not _same_value(expected_value, actual_value):
                texts, kind = _value_texts(expected_value, actual_value), _difference_kind(expected_value, actual_value)
                yield Difference(self.path_text(path), *texts, kind)
        elif expected.op is Op.node:
            self.paired_nodes[expected.number] = actual.number
            pairs = _pair_children(list(self.expected.children(expected)), list(self.actual.children(actual)))
            yield from self._content_differences(expected, actual, pairs, path)
            return pairs
        return []

    def _type_difference(self, expected: Row | None, actual: Row | None, path: LinkedPath) -> Difference[str]:
        """A difference in what the two are; classes of the same name are told apart by their modules."""
        expected_text, actual_text = self._describe(self.expected, expected), self._describe(self.actual, actual)
        if (
            expected is not None
            and actual is not None
            and expected_text == actual_text
            and expected.type is not None
            and actual.type is not None
        ):
            expected_text = f"{expected.type.__module__}.{expected_text}"
            actual_text = f"another class named {actual.type.__module__}.{actual_text}"
            return Difference(self.path_text(path), expected_text, actual_text, "class")
        kind_of_difference = "added" if expected is None else "removed" if actual is None else "type"
        return Difference(self.path_text(path), expected_text, actual_text, kind_of_difference)

    def _sharing_differences(self, expected: Row, actual: Row, path: LinkedPath) -> Iterator[Difference[str]]:
        path_text = self.path_text(path)
        sides = [(self.expected, expected), (self.actual, actual)]
        # Both are references: do they refer to nodes that were paired?
        if expected.op is actual.op:
            if self.paired_nodes.get(expected.target, actual.target) != actual.target:
                texts = [f"the object at {self._target_text(*side)}" for side in sides]
                yield Difference(path_text, *texts, kind="sharing")
            return
        # Only one is: there both paths lead to one object, which is named by its first path.
        is_shared_in_expected = expected.op is Op.ref
        (shared, reference), (separate, row) = sides if is_shared_in_expected else sides[::-1]
        paths = f"{self._target_text(shared, reference)} and {path_text}"
        text = "two objects" if row.op is Op.node else f"{self._describe(separate, row)} for the second"
        texts = ["one object", text] if is_shared_in_expected else [text, "one object"]
        yield Difference(paths, *texts, kind="sharing")

    def _array_sharing(self, expected: int, actual: int, path: LinkedPath) -> Iterator[Difference[str]]:
        # Both sides are noted before either is compared: later pairs depend on them.
        paired_actual, expected_path = self.paired_leaves[0].setdefault(expected, (actual, path))
        paired_expected, actual_path = self.paired_leaves[1].setdefault(actual, (expected, path))
        if paired_actual != actual:
            paths = f"{self.path_text(expected_path)} and {self.path_text(path)}"
            yield Difference(paths, "one array", "two arrays", "sharing")
        elif paired_expected != expected:
            paths = f"{self.path_text(actual_path)} and {self.path_text(path)}"
            yield Difference(paths, "two arrays", "one array", "sharing")

    def _content_differences(
        self, expected: Row, actual: Row, pairs: _Pairs, path: LinkedPath
    ) -> Iterator[Difference[str]]:
        """Compares what nodes hold besides their children, and the order of their keys."""
        expected_value, actual_value = _static_value(expected), _static_value(actual)
        if isinstance(expected_value, list) and isinstance(actual_value, list):  # the elements of a set
            # Elements of a set have no order and no rows of their own.
            removed = [x for x in expected_value if not any(_same_value(x, y) for y in actual_value)]
            added = [y for y in actual_value if not any(_same_value(x, y) for x in expected_value)]
            if removed or added:
                texts = [f"a set with {_list_text(x)}" if x else "a set without" for x in (removed, added)]
                yield Difference(self.path_text(path), *texts)
        elif isinstance(expected_value, bytes) and expected_value != actual_value:
            yield Difference(self.path_text(path), *_value_texts(expected_value, actual_value))
        elif hasattr(expected.type, "maxlen") and expected_value != actual_value:
            yield Difference(self.path_text(path), f"maxlen={expected_value}", f"maxlen={actual_value}")
        elif isinstance(expected_value, types.FunctionType) and isinstance(actual_value, types.FunctionType):
            if expected_value.__code__ != actual_value.__code__:
                texts = function_text(expected_value), function_text(actual_value)
                yield Difference(self.path_text(path), *texts, kind="code")
        elif expected.type is np.ndarray and expected_value != actual_value:  # an array of texts
            payloads: Any = (expected_value, actual_value)
            texts = [f"an array of {dtype}, shape {shape}" for dtype, shape, _ in payloads]
            yield Difference(self.path_text(path), *texts)
        # Pairs are in the order of the expected children: the numbers of the actual ones ascend if it is theirs too.
        numbers = [b.number for a, b, _ in pairs if a and b]
        if len(numbers) == len(pairs) and numbers != sorted(numbers):
            orders = [
                _list_text([plain_key(c.key_entry) for c in s.children(n)])
                for s, n in ((self.expected, expected), (self.actual, actual))
            ]
            yield Difference(self.path_text(path), f"the order {orders[0]}", f"the order {orders[1]}", "order")

    def _describe(self, structure: Structure, row: Row | None) -> str:
        if row is None:
            return "nothing"
        if row.op is Op.leaf:
            return "a traced number" if row.is_number else "an array"
        if row.op is Op.static:
            return short_text(_static_value(row))
        if row.op is Op.ref:
            return f"the object at {self._target_text(structure, row)}"
        return row.type.__qualname__ if row.type is not None else "None"

    def _target_text(self, structure: Structure, row: Row) -> str:
        return place_name(structure.root_path(structure.target(row)), self.names)

    def path_text(self, linked_path: LinkedPath) -> str:
        root, *key_path = linked_entries(linked_path)
        return place_name((root, tuple(key_path)), self.names)


def _resolve_repeat(structure: Structure, row: Row | None) -> Row | None:
    return structure.target(row) if row is not None and row.op is Op.same else row


def _pair_children(expected: Sequence[Row], actual: Sequence[Row]) -> _Pairs:
    """The children of two nodes, matched by key: those of `expected` first, then those that only `actual` has."""
    by_token: dict[Any, Row] = {}
    unhashed: list[Row] = []
    # Plain keys are matched by a hash table. Other keys may have no usable hash, so they are compared one by one.
    for child in actual:
        token = _plain_token(child.key_entry)
        if token is None:
            unhashed.append(child)
        else:
            by_token[token] = child
    pairs: _Pairs = []
    for child in expected:
        token = _plain_token(child.key_entry)
        if token is not None:
            pairs.append((child, by_token.pop(token, None), child.key_entry))
            continue
        match = next((c for c in unhashed if _same_value(plain_key(child.key_entry), plain_key(c.key_entry))), None)
        if match is not None:
            unhashed.remove(match)
        pairs.append((child, match, child.key_entry))
    # A child of `actual` that was matched has left its table.
    unmatched = {c.number for c in (*by_token.values(), *unhashed)}
    return [*pairs, *((None, c, c.key_entry) for c in actual if c.number in unmatched)]


def _plain_token(entry: object) -> tuple[object, ...] | None:
    """A hashable token for a key that is a plain value, such that 1 and True differ; None for other keys."""
    key = plain_key(entry)
    return (type(entry), type(key), repr(key)) if type(key) in PLAIN else None


def _same_value(a: object, b: object) -> bool:
    """Are two statics or keys equal, as the core compares them?"""
    if a is b or a is _DEAD_STATIC or b is _DEAD_STATIC:
        return a is b
    if type(a) is np.ndarray and type(b) is np.ndarray:
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    # The repr tells 0.0 from -0.0, and finds a NaN equal to itself.
    if type(a) in PLAIN or type(b) in PLAIN:
        return type(a) is type(b) and repr(a) == repr(b)
    try:  # compared as keys, by value where possible; an array compared by identity cannot be a key
        return _core.flatten({(a,): None})[1] == _core.flatten({(b,): None})[1]
    except (GraftaxError, TypeError):
        return _core.flatten(a)[1] == _core.flatten(b)[1] and not hasattr(a, "dtype")


def _difference_kind(expected: object, actual: object) -> str:
    """The kind of change between two static values, on which recompile advice depends."""
    classes = {type(expected), type(actual)}
    if _DeadStatic in classes:
        return "identity"  # only statics compared by identity are held weakly
    if len(classes) > 1:
        # Classes with a common base below `object` are variants of one type.
        alike = type(expected).__mro__[-2] is type(actual).__mro__[-2]  # two dtypes, two paths
        return "number type" if classes <= _NUMBERS else "value" if alike else "type"
    if classes == {types.FunctionType}:
        return "code"
    for name, members in _CLASSES_OF_KIND.items():
        if classes <= members:
            return name
    is_compared_by_value = type(actual).__eq__ is not object.__eq__ and not isinstance(actual, type)
    return "value" if is_compared_by_value else "identity"


def _value_texts(expected: object, actual: object) -> tuple[str, str]:
    if isinstance(expected, types.FunctionType) and isinstance(actual, types.FunctionType):
        return function_text(expected), function_text(actual)
    if isinstance(expected, HandleLayout) and isinstance(actual, HandleLayout):
        return _packed_texts(expected, actual)
    expected_text, actual_text = short_text(expected), short_text(actual)
    # Equal texts, or values of different classes, would leave the reader puzzled: classes are added.
    if expected is not _DEAD_STATIC and (expected_text == actual_text or type(expected) is not type(actual)):
        return f"{expected_text} ({type(expected).__qualname__})", f"{actual_text} ({type(actual).__qualname__})"
    return expected_text, actual_text


def _packed_texts(expected: HandleLayout, actual: HandleLayout) -> tuple[str, str]:
    """The first difference between the contents of two handles."""
    # The structure inside differs, or else the shapes of arrays in the buffers do.
    for d in differences(expected.graphdef, actual.graphdef, ("",)):
        return f"{d.one} inside at {d.path}", d.other
    shapes = actual.shapes
    for path, shape in expected.shapes.items():
        if shapes.get(path, shape) != shape:
            return f"{shape} inside at {keystr(path)}", shapes[path]
    return "packed state", "packed state with another layout of its buffers"


def short_text(value: object) -> str:
    """The repr of a value, cut to a line; the repr of `object` where the class's own raises."""
    # A user's `__repr__` may raise, and this text is part of another error.
    try:
        text = repr(_truncated(value))
    except Exception:
        text = object.__repr__(value)
    return text if len(text) <= _VALUE_LENGTH else text[: _VALUE_LENGTH - 3] + "..."


def _truncated(value: Any) -> Any:
    """The part of a container or text that is shown: the repr of a long one would cost more than the explained call."""
    cls: Any = type(value)
    if cls not in (str, bytes, tuple, list, dict, set, frozenset) or len(value) <= _VALUE_LENGTH:
        return value
    if cls is dict:
        return dict(itertools.islice(value.items(), _VALUE_LENGTH))
    return cls(itertools.islice(value, _VALUE_LENGTH)) if cls in (set, frozenset) else value[:_VALUE_LENGTH]


def function_text(function: types.FunctionType) -> str:
    """A function's name with its file and line, which tell two functions of the same name apart."""
    code = function.__code__
    return f"function {function.__qualname__} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def _list_text(values: Sequence[object]) -> str:
    return ", ".join([*map(short_text, values[:_KEYS_SHOWN]), *(["..."] if len(values) > _KEYS_SHOWN else [])])
