# SPDX-License-Identifier: Apache-2.0
"""The spec of an option, broadcast over a graph: one for each of its leaves, and for those that a function adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.tree_util import DictKey, GetAttrKey

from graftax import _core
from graftax._base.errors import StructureError
from graftax._graph.filters import Filter, RecordedView
from graftax._graph.patterns import refuse_unused, root_entries
from graftax._graph.structure import Chain, Op, Row, Structure, place_name, plain_key, walk
from graftax.transforms._engine.specs import NO_ENTRY, UNKNOWN, ByLeaf, LeafContext, Patterns, Prefix, Spec

TWO_ENTRIES = (
    "{name}: {one} and {other} are one array, in an object that is reached twice, and {option} gives {a} for the first "
    "place and {b} for the second. Give both places the same, or pass a copy of the object in one of them."
)
AMBIGUOUS_ENTRY = (
    "{name} puts a new array at {path}, where {option} could mean {entries}. Say which with an entry for that place, "
    "or return the array as part of the result."
)


class Broadcast:
    """Broadcasts specs to the leaves of a graph; there is a name and a spec for each root.

    Raises:
        StructureError: if a spec does not fit the graph, or assigns two different values to one leaf.
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
        # The leaves that each filter selects, by the filter's id: a filter is called once for all leaves.
        self._chosen: dict[int, set[int]] = {}
        self._visited: set[Any] = set()
        self.from_function: set[int] = set()  # the leaves whose spec a function of the leaf returned
        # The children of a row by (type of key entry, key), made for the rows that a function has written to.
        self._children: dict[int, dict[tuple[type | None, Any], Row]] = {}
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
        """(the key path as text, the spec) of a leaf that a function wrote at a path below a tracked node.

        A leaf that replaces another one has the spec of that one. A new leaf has the spec that the option assigns to
        its path, or else the spec of the other leaves in the node. Filters see the graph after the call.

        Raises:
            StructureError: if the candidates for a new leaf differ.
        """
        visits = self._visits.get(track)
        # A node that is part of a dict's key is not visited: it holds no arrays to map.
        if visits is None:
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
            children = self._children.get(row.number)
            if children is None:
                children = self._children[row.number] = {}
                # JAX's key entries cannot be compared with those of other types: what they hold is.
                for child in self._structure.children(row):
                    entry = child.key_entry
                    children[type(entry), plain_key(entry)] = child
                    children.setdefault((None, plain_key(entry)), child)
            # An entry of the same type comes first: a subclass of dict may have a key and an attribute of one name.
            plain = plain_key(key)
            child_row = children.get((type(key), plain), children.get((None, plain)))
            if child_row is None:
                return None
            row = self._structure.target(child_row) if child_row.op is Op.ref else child_row
        return row.leaf if row.op is Op.leaf else None

    def _resolve(
        self, spec: Spec, chain: Chain, path: tuple[object, ...], leaf: object, graph_after: RecordedView | None
    ) -> Any:
        for key in path:
            spec = spec.child(key)
        # A container or a callable object has no entry for a single array.
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
