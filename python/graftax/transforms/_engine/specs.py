# SPDX-License-Identifier: Apache-2.0
"""Specs such as `in_axes` and `in_specs`, which say something of each array by prefix trees, patterns or functions."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

from jax.tree_util import DictKey, GetAttrKey

from graftax import _core, interop
from graftax._base.errors import StructureError
from graftax._graph.filters import Filter, RecordedView, as_filter
from graftax._graph.patterns import Pattern, Positions, argument_pattern, refuse_unused, root_entries
from graftax._graph.prefix_tree import ABSENT, child_spec
from graftax._graph.structure import Chain, Op, Row, Structure, place_name, plain_key, walk

NOT_AN_ENTRY = "{name}: {option} gives {entry!r} for {path}. Give {what} there, or a tree of them like the argument."
NO_ENTRY = (
    "{name}: {option} has no entry for {path}. Add one; the last of several patterns can be '**', which "
    "covers what no other does."
)
NO_TEXT = (
    "{name}: a dict for {option} as a whole has patterns of key paths, types or filters as its keys, such as 'x' or "
    "'**.w', and {given!r} is not one. For one entry per argument, give a tuple."
)
ENTRY_TOO_DEEP = "{name}: {option} has {entry!r} for {path}, which is an array. Give {what} there."
OTHER_PARTS = (
    "{name}: {option} has {entry!r} for {path}: that {found}, and {path} does not. Give {what} for all of it, or one "
    "for each of its parts."
)
TWO_ENTRIES = (
    "{name}: {one} and {other} are one array, in an object that is reached twice, and {option} gives {a} for the first "
    "place and {b} for the second. Give both places the same, or pass a copy of the object in one of them."
)
AMBIGUOUS_ENTRY = (
    "{name} puts a new array at {path}, where {option} could mean {entries}. Say which with an entry for that place, "
    "or return the array as part of the result."
)

UNKNOWN = object()


def _select_nothing(leaf_filter: Filter) -> bool:
    del leaf_filter
    return False


class LeafContext(NamedTuple):
    """Where a leaf is. Its texts and key entries are computed on demand, because most leaves never need them."""

    text: Callable[[], str]  # the key path as messages show it
    key_entries: Callable[[], Sequence[Any]]  # the key path, beginning with the name of an argument
    is_selected: Callable[[Filter], bool] = _select_nothing  # whether a filter selects the leaf


class SpecOption(NamedTuple):
    """An option that takes a spec, and which values it may have for a leaf: axes or shardings."""

    name: str  # what messages call the transformed function
    keyword: str  # such as "in_axes"
    expected: str  # a phrase such as "an axis (int or None)"
    nothing: Any  # the spec of a leaf that is not mapped
    is_leaf_spec: Callable[[Any], bool]
    canonical: Callable[[Any, Any], Any]  # from (spec, leaf) to equal values for equivalent specs

    def choice(self, key: object, value: object) -> Choice:
        """Reads one item of a dict of patterns and filters."""
        leaf_filter = as_filter(key)
        if leaf_filter is None and not isinstance(key, str):
            raise TypeError(self.text(NO_TEXT, given=key))
        pattern = NOWHERE if leaf_filter is not None else argument_pattern(key, self.name, self.keyword)
        return Choice(pattern, leaf_filter, self.read(value))

    def text(self, message: str, **fields: object) -> str:
        return message.format(name=self.name, option=self.keyword, what=self.expected, **fields)

    def check(self, leaf_spec: object, path: str) -> Any:
        if not self.is_leaf_spec(leaf_spec):
            raise TypeError(self.text(NOT_AN_ENTRY, entry=leaf_spec, path=path))
        return leaf_spec

    def read(self, value: object, names: bool = False) -> Spec:
        """Reads what the user passed. With `names` it is for all arguments together, whose names start its patterns."""
        value = value if (adapted := interop.prefix(value)) is None else adapted
        if value is None or self.is_leaf_spec(value):
            return Constant(self, value)
        if names and isinstance(value, dict):
            return Patterns.from_pairs(self, cast("dict[Any, Any]", value).items())
        if (choices := interop.choices(value)) is not None:
            return Patterns.from_pairs(self, choices)
        if isinstance(value, type):  # called as a function, it would create an instance
            self.check(value, "all")
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            return ByLeaf(self, cast("Callable[[Any], Any]", value))
        return Prefix(self, value)


class Spec:
    """The part of a spec that applies to a node and everything below it.

    `memo` is equal for parts that assign the same specs, so that a node is visited once for each of them.
    """

    def __init__(self, option: SpecOption, memo: object) -> None:
        self.option, self.memo = option, memo

    def child(self, key: object) -> Spec:
        return self

    def enter(self, root: str) -> Spec:
        """The spec for the argument of this name."""
        return self

    def leaf_spec(self, leaf: object, context: LeafContext) -> Any:
        """The axis or sharding of a leaf; UNKNOWN if the spec does not say."""
        raise NotImplementedError


class Silent(Spec):
    """A missing part of a spec, which is an error if there are arrays below."""

    def leaf_spec(self, leaf: object, context: LeafContext) -> Any:
        return UNKNOWN


class Constant(Spec):
    """One axis or sharding for all leaves."""

    def __init__(self, option: SpecOption, value: object) -> None:
        super().__init__(option, ("constant", value))
        self.value = value

    def leaf_spec(self, leaf: object, context: LeafContext) -> Any:
        return self.value if self.option.is_leaf_spec(self.value) else self.option.check(self.value, context.text())


class ByLeaf(Spec):
    """A function from the leaf to its axis or sharding."""

    def __init__(self, option: SpecOption, function: Callable[[Any], object]) -> None:
        super().__init__(option, ("function", id(function)))
        self.function = function

    def leaf_spec(self, leaf: object, context: LeafContext) -> Any:
        return self.option.check(self.function(leaf), context.text())


class Prefix(Spec):
    """A prefix tree with a spec or a subtree for each child of a node; or a callable object."""

    def __init__(self, option: SpecOption, tree: Any) -> None:
        super().__init__(option, ("prefix", id(tree)))
        self.tree = tree

    def open_node(self, children: Sequence[object], cls: type | None, context: LeafContext) -> Spec:
        """The spec to apply at a node of class `cls` whose children have these plain keys.

        Raises:
            StructureError: if the prefix tree has parts that the node does not have.
        """
        tree = self.tree
        if isinstance(tree, dict):
            mapping = cast("dict[Any, Any]", tree)
            strange = [key for key in mapping if key not in children]
            if strange and _are_choices(mapping):
                return Patterns.from_pairs(self.option, mapping.items(), context)
            if strange:
                raise self._misfit(OTHER_PARTS, context, f"has {', '.join(map(repr, strange))}")
        elif isinstance(tree, (tuple, list)):
            parts = len(cast("Sequence[Any]", tree))
            if hasattr(cast("Any", tree), "_fields"):
                if cls is not type(cast("Any", tree)):
                    raise self._misfit(OTHER_PARTS, context, f"is a {type(cast('Any', tree)).__qualname__}")
            elif parts != len([key for key in children if isinstance(key, int)]):
                raise self._misfit(OTHER_PARTS, context, f"has {parts} parts")
        elif cls is not type(tree):
            return ByLeaf(self.option, self._function(context))
        return self

    def child(self, key: object) -> Spec:
        part = child_spec(self.tree, key)
        if isinstance(part, type):  # never a function of the leaf; checked when it reaches a leaf
            return Constant(self.option, part)
        return Silent(self.option, "silent") if part is ABSENT else self.option.read(part)

    def leaf_spec(self, leaf: object, context: LeafContext) -> Any:
        if isinstance(self.tree, dict) and _are_choices(cast("dict[Any, Any]", self.tree)):
            return Patterns.from_pairs(self.option, cast("dict[Any, Any]", self.tree).items(), context).leaf_spec(
                leaf, context
            )
        if isinstance(self.tree, (tuple, list, dict)):
            raise self._misfit(ENTRY_TOO_DEEP, context)
        return self.option.check(self._function(context)(leaf), context.text())

    def _function(self, context: LeafContext) -> Callable[[Any], Any]:
        if not callable(self.tree):
            self.option.check(self.tree, context.text())
        return self.tree

    def _misfit(self, message: str, context: LeafContext, problem: str = "") -> StructureError:
        return StructureError(self.option.text(message, entry=self.tree, path=context.text(), found=problem))


NOWHERE = Pattern("")  # takes the place of the pattern in a choice by a filter


def _are_choices(mapping: dict[Any, Any]) -> bool:
    return all(isinstance(key, str) or as_filter(key) is not None for key in mapping)


class Choice(NamedTuple):
    """One pattern or filter of several, and the spec of the leaves that it covers."""

    pattern: Pattern
    leaf_filter: Filter | None
    spec: Spec


class _Use:
    """How the patterns of a spec were used, by index. All positions of the spec share it."""

    def __init__(self) -> None:
        self.decided: set[int] = set()  # patterns that decided about an array
        self.arrays: set[int] = set()  # patterns that cover an array
        self.non_arrays: set[int] = set()  # patterns that cover something other than an array


class Patterns(Spec):
    """Patterns of key paths and filters, of which the first one that covers a leaf decides."""

    def __init__(
        self, option: SpecOption, choices: tuple[Choice, ...], use: _Use, positions: tuple[Positions, ...]
    ) -> None:
        super().__init__(option, ("patterns", id(use), positions))
        self.choices, self.use = choices, use
        self._positions = positions  # for each pattern, how far the key path so far has matched it

    @staticmethod
    def from_pairs(
        option: SpecOption, patterns: Iterable[tuple[object, object]], context: LeafContext | None = None
    ) -> Patterns:
        """The spec of a dict of patterns.

        With a context, the dict is an entry of a prefix tree. Its patterns may start at that entry, or with the name of
        an argument.
        """
        choices = [option.choice(key, value) for key, value in patterns]
        starts = (c.pattern.start if c.leaf_filter is None else frozenset[int]() for c in choices)
        spec = Patterns(option, tuple(choices), _Use(), tuple(starts))
        if context is None:
            return spec
        from_root = functools.reduce(Patterns.child, context.key_entries(), spec)
        positions = (own | inherited for own, inherited in zip(spec._positions, from_root._positions, strict=True))
        return Patterns(option, spec.choices, spec.use, tuple(positions))

    def child(self, key: object) -> Patterns:
        pairs = zip(self.choices, self._positions, strict=True)
        positions_below = (
            choice.pattern.advance_covering(positions, key) if positions else positions for choice, positions in pairs
        )
        return Patterns(self.option, self.choices, self.use, tuple(positions_below))

    def enter(self, root: str) -> Patterns:
        return functools.reduce(Patterns.child, root_entries(root), self)

    def _covering(self, is_selected: Callable[[Filter], bool] = _select_nothing) -> list[int]:
        """The indices of the patterns and filters that cover this node or leaf."""
        pairs = zip(self.choices, self._positions, strict=True)
        return [
            i
            for i, (choice, positions) in enumerate(pairs)
            if (choice.pattern.is_match(positions) if choice.leaf_filter is None else is_selected(choice.leaf_filter))
        ]

    def leaf_spec(self, leaf: object, context: LeafContext) -> Any:
        covering = self._covering(context.is_selected)
        self.use.arrays.update(covering)
        if not covering:
            return UNKNOWN
        self.use.decided.add(covering[0])
        return self.choices[covering[0]].spec.leaf_spec(leaf, context)

    def note_non_array(self) -> None:
        """Records that the patterns here cover something other than an array, so that they do not count as unused."""
        self.use.non_arrays.update(self._covering())

    def unused(self) -> str | None:
        """The text of a pattern that covers nothing, or only arrays that earlier patterns decided about."""
        for i, (pattern, leaf_filter, _) in enumerate(self.choices):
            if (
                leaf_filter is None
                and i not in self.use.decided
                and (i in self.use.arrays or i not in self.use.non_arrays)
            ):
                return pattern.text
        return None


class Broadcast:
    """Broadcasts a spec to the leaves of a graph.

    Args:
        graphdef: the structure of the graph.
        names: one name per root.
        specs: one spec per root.
        leaves: the leaves of the graph.

    Raises:
        StructureError: if the spec does not fit the graph, or assigns two different values to one leaf.
    """

    def __init__(
        self, graphdef: _core.GraphDef, names: tuple[str, ...], specs: Sequence[Spec], leaves: Sequence[object]
    ) -> None:
        self.graphdef, self.leaves, self._names = graphdef, leaves, names
        self._structure = Structure(graphdef)
        self._rows = self._structure.rows
        self._assigned: dict[int, tuple[Any, Chain]] = {}
        self._visits: dict[int, list[tuple[Spec, Chain]]] = {}
        self._patterns: dict[int, Patterns] = {}
        self._chosen: dict[int, set[int]] = {}  # the leaves that each filter selects, by the filter's id
        self._visited: set[Any] = set()
        self.from_function: set[int] = set()  # the leaves whose spec a function of the leaf returned
        self._parts: dict[int, dict[tuple[Any, Any], Row]] = {}
        self._nothing = specs[0].option.nothing if specs else None
        self.keyword = specs[0].option.keyword if specs else ""
        roots = zip(self._structure.roots, specs, strict=True)
        # References are followed, so a node with two paths is visited for each: its leaves may be given two specs.
        starts = [(row.number, spec.enter(names[row.root])) for row, spec in roots]
        walk(starts, self._visit, self._structure.key_entries, lambda spec, key: spec.child(key))
        self._check_patterns()
        self.leaf_specs: list[Any] = [self._assigned[i][0] for i in range(len(leaves))]

    def _visit(self, chain: Chain, spec: Spec) -> tuple[int, Spec] | None:
        row = self._rows[chain[1]]
        if isinstance(spec, Patterns):
            self._patterns[id(spec.use)] = spec
            if row.op is not Op.leaf:
                spec.note_non_array()
        if row.op is Op.leaf:
            self._assign(row.leaf, spec, chain)
            return None
        if row.op is Op.ref:
            row = self._structure.target(row)
        # Without the memo, a node on n paths would be walked n times, and a cycle for ever.
        if row.op is not Op.node or (row.number, spec.memo) in self._visited:
            return None
        self._visited.add((row.number, spec.memo))
        if isinstance(spec, Prefix):
            keys = [plain_key(child.key_entry) for child in self._structure.children(row)]
            spec = spec.open_node(keys, row.type, self._context(chain))
            if isinstance(spec, Patterns):
                self._patterns[id(spec.use)] = spec
                spec.note_non_array()
        if row.track >= 0:
            self._visits.setdefault(row.track, []).append((spec, chain))
        return row.number, spec

    def _assign(self, leaf: int, spec: Spec, chain: Chain) -> None:
        value = spec.leaf_spec(self.leaves[leaf], self._context(chain, leaf))
        option = spec.option
        if value is UNKNOWN:
            raise StructureError(option.text(NO_ENTRY, path=self.name(chain)))
        if isinstance(spec, ByLeaf):
            self.from_function.add(leaf)
        assigned, assigned_at = self._assigned.setdefault(leaf, (value, chain))
        canonical = option.canonical
        if canonical(assigned, self.leaves[leaf]) != canonical(value, self.leaves[leaf]):
            paths = {"one": self.name(assigned_at), "other": self.name(chain)}
            raise StructureError(option.text(TWO_ENTRIES, **paths, a=assigned, b=value))

    def _check_patterns(self) -> None:
        for spec in self._patterns.values():
            unused = spec.unused()
            if unused is not None:
                paths = (self.name(chain) for _, chain in self._assigned.values())
                refuse_unused(unused, spec.option.name, spec.option.keyword, paths)

    def _context(self, chain: Chain, leaf: int | None = None) -> LeafContext:
        def is_selected(leaf_filter: Filter) -> bool:
            leaves = self._chosen.get(id(leaf_filter))
            if leaves is None:
                leaves = self._chosen[id(leaf_filter)] = RecordedView(self.graphdef, self.leaves).selected_leaves(
                    leaf_filter
                )
            return leaf in leaves

        def key_entries() -> Sequence[Any]:
            root, keys = self._key_path(chain)
            return (*root_entries(self._names[root]), *keys)

        return LeafContext(lambda: self.name(chain), key_entries, is_selected)

    def _key_path(self, chain: Chain) -> tuple[int, list[Any]]:
        """(the index of the root, the key entries below it) of the last row of a chain."""
        rows: list[int] = []
        link: Chain | None = chain
        while link is not None:
            rows.append(link[1])
            link = link[0]
        return self._rows[rows.pop()].root, [self._rows[number].key_entry for number in reversed(rows)]

    def name(self, chain: Chain) -> str:
        """The key path of a chain, as messages show it."""
        root, keys = self._key_path(chain)
        return place_name((root, tuple(keys)), self._names)

    def path(self, leaf: int) -> str:
        """The key path of a leaf, as messages show it; the first one if several lead to it."""
        return self.name(self._assigned[leaf][1])

    def leaves_in_type(self, cls: type) -> list[int]:
        """The leaves below nodes of the type `cls`."""
        return [leaf for row in self._rows if row.type is cls for leaf in self._leaves(row)]

    def _leaves(self, row: Row) -> list[int]:
        return [descendant.leaf for descendant in self._structure.subtree(row) if descendant.op is Op.leaf]

    def leaf_at(self, track: int, path: tuple[object, ...]) -> int | None:
        """The leaf at a key path below a tracked node; None if there is none."""
        node = self._structure.tracked[track]
        return self._leaf_at(node, self._as_attributes(node, path))

    @staticmethod
    def _as_attributes(node: Row, path: tuple[Any, ...]) -> tuple[Any, ...]:
        """The path with an attribute as its first entry if the node is an object whose class names it by a dict key."""
        if isinstance(node.type, type) and not issubclass(node.type, dict) and path and isinstance(path[0], DictKey):
            return (GetAttrKey(path[0].key), *path[1:])
        return path

    def spec_at(self, path: tuple[object, ...]) -> Any:
        """The spec of the leaf at a key path, in a graph with one root."""
        leaf = self._leaf_at(self._rows[0], path)
        assert leaf is not None
        return self.leaf_specs[leaf]

    # ---- leaves that the function added to the graph

    @property
    def has_filters(self) -> bool:
        """Whether the spec has filters, which need the leaf itself."""
        return any(choice.leaf_filter is not None for spec in self._patterns.values() for choice in spec.choices)

    def spec_of_written(
        self, track: int, path: tuple[object, ...], leaf: object, graph_after: RecordedView | None = None
    ) -> tuple[str, Any]:
        """(the key path as text, the spec) of a leaf that a function wrote into a node of the graph.

        A leaf that replaces another one has the spec of that one. A new leaf has the spec that the option assigns to
        its path, or else the spec of the other leaves in the node.

        Args:
            track: the index of the tracked node.
            path: the key path below the node.
            leaf: the array that was written.
            graph_after: the graph after the call, for filters.

        Raises:
            StructureError: if the candidates for a new leaf differ.
        """
        visits = self._visits.get(track)
        if visits is None:  # the node is part of a dict's key, which holds no arrays to map
            return place_name((0, path), ("a dict's key",)), self._nothing
        node = self._structure.tracked[track]
        path = self._as_attributes(node, path)
        name = place_name((0, path), (self.name(visits[0][1]),))
        initial_leaf = self._leaf_at(node, path)
        if initial_leaf is not None:
            return name, self._assigned[initial_leaf][0]
        # The leaf is new: it is at one path per visit of its node, and all of these must agree.
        candidates: list[Any] = []
        for spec, chain in visits:
            value = self._resolve(spec, chain, path, leaf, graph_after)
            values = self._nearest_specs(chain) if value is UNKNOWN else [value]
            candidates += [v for v in values if v not in candidates]
        option = visits[0][0].option
        if len(candidates) > 1:
            text = " and ".join(repr(c) for c in candidates)
            raise StructureError(option.text(AMBIGUOUS_ENTRY, path=name, entries=text))
        return name, candidates[0]

    def _leaf_at(self, row: Row, path: tuple[object, ...]) -> int | None:
        for key in path:
            parts = self._parts.get(row.number)
            if parts is None:
                parts = self._parts[row.number] = {}
                for child in self._structure.children(row):
                    entry = child.key_entry  # JAX's entries cannot be compared with those of other types
                    parts[type(entry), plain_key(entry)] = child
                    parts.setdefault((None, plain_key(entry)), child)
            plain = plain_key(key)
            child_row = parts.get((type(key), plain), parts.get((None, plain)))
            if child_row is None:
                return None
            row = self._structure.target(child_row) if child_row.op is Op.ref else child_row
        return row.leaf if row.op is Op.leaf else None

    def _resolve(
        self, spec: Spec, chain: Chain, path: tuple[object, ...], leaf: object, graph_after: RecordedView | None
    ) -> Any:
        for key in path:
            spec = spec.child(key)
        if isinstance(spec, Prefix):
            return UNKNOWN

        def is_selected(leaf_filter: Filter) -> bool:
            return graph_after is not None and any(
                graph_after.leaves[i] is leaf for i in graph_after.selected_leaves(leaf_filter)
            )

        context = LeafContext(
            lambda: place_name((0, path), (self.name(chain),)),
            lambda: (*self._context(chain).key_entries(), *path),
            is_selected,
        )
        return spec.leaf_spec(leaf, context)

    def _nearest_specs(self, chain: Chain | None) -> list[Any]:
        """The distinct specs in the nearest enclosing node with leaves; those of mapped leaves, if there are any."""
        unique: list[Any] = []
        while chain is not None and not unique:
            row = self._rows[chain[1]]
            for leaf in self._leaves(self._structure.target(row) if row.op is Op.ref else row):
                if (value := self._assigned[leaf][0]) not in unique:
                    unique.append(value)
            chain = chain[0]
        return [value for value in unique if value != self._nothing] or [self._nothing]
