# SPDX-License-Identifier: Apache-2.0
"""What a transform is told of each array, by prefix trees, patterns or functions: `in_axes`, `in_specs`."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

from jax.tree_util import DictKey, GetAttrKey

from graftax import _core, interop
from graftax._base.errors import StructureError
from graftax._graph.filters import Filter, Recorded, filter_of
from graftax._graph.patterns import Pattern, Positions, nearest, of_arguments, root_entries
from graftax._graph.prefix_tree import ABSENT, part_of
from graftax._graph.structure import Chain, Op, Row, Structure, place_name, plain_key, walk

NOT_AN_ENTRY = "{name}: {option} gives {entry!r} for {path}. Give {what} there, or a tree of them like the argument."
NO_ENTRY = (
    "{name}: {option} says nothing of {path}. Add an entry for it; the last of several patterns can be '**', which "
    "covers what no other does."
)
NO_TEXT = (
    "{name}: a dict for {option} as a whole has patterns of key paths, types or filters as its keys, such as 'x' or "
    "'**.w', and {given!r} is none. For one entry an argument, give a tuple."
)
ENTRY_TOO_DEEP = "{name}: {option} has {entry!r} for {path}, which is an array. Give {what} there."
OTHER_PARTS = (
    "{name}: {option} has {entry!r} for {path}: that {found}, and {path} does not. Give {what} for all of it, or one "
    "for each of its parts."
)
PATTERN_UNUSED = (
    "{name}: the pattern {pattern!r} of {option} decides about no array: it covers none, or patterns before it cover "
    "them all (the first that covers a path counts). There is: {paths}. .w is an attribute, [w] a key."
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


def _none_of_it(wanted: Filter) -> bool:
    del wanted
    return False


class Here(NamedTuple):
    """A place, spelled where somebody asks."""

    text: Callable[[], str]  # as messages print it
    key_entries: Callable[[], Sequence[Any]]  # the key entries from the name of an argument on
    meant: Callable[[Filter], bool] = _none_of_it  # does a filter mean the leaf that is here?


class SpecOption(NamedTuple):
    """An option that takes a spec, and what it holds for a leaf: an axis, or a sharding."""

    name: str  # of the transform's call, for messages
    keyword: str  # "in_axes"
    what: str  # "an axis (int or None)"
    nothing: Any  # the spec of a leaf that is not mapped
    is_leaf_spec: Callable[[Any], bool]
    canonical: Callable[[Any, Any], Any]  # (spec, leaf): equal for those that mean the same

    def choice(self, key: Any, value: Any) -> Choice:
        """What a key of a specification of all arguments means: a pattern or a filter."""
        wanted = filter_of(key)
        if wanted is None and not isinstance(key, str):
            raise TypeError(NO_TEXT.format(name=self.name, option=self.keyword, given=key))
        pattern = NOWHERE if wanted is not None else of_arguments(key, self.name, self.keyword)
        return Choice(pattern, wanted, self.read(value))

    def check(self, leaf_spec: Any, path: str) -> Any:
        if not self.is_leaf_spec(leaf_spec):
            raise TypeError(
                NOT_AN_ENTRY.format(name=self.name, option=self.keyword, entry=leaf_spec, path=path, what=self.what)
            )
        return leaf_spec

    def read(self, given: Any, names: bool = False) -> Spec:
        """The spec that was given; with `names`, that of all arguments together."""
        given = given if (whole := interop.prefix(given)) is None else whole
        if given is None or self.is_leaf_spec(given):
            return Constant(self, given)
        if names and isinstance(given, dict):
            return Patterns.of(self, cast("dict[Any, Any]", given).items())
        if (choices := interop.choices(given)) is not None:
            return Patterns.of(self, choices)
        if isinstance(given, type):  # as a function it would make an instance
            self.check(given, "all")
        if isinstance(given, (types.FunctionType, types.MethodType, functools.partial)):
            return ByLeaf(self, cast("Callable[[Any], Any]", given))
        return Prefix(self, given)


class Spec:
    """Says what the leaves below a node are given."""

    def __init__(self, option: SpecOption, memo: Any) -> None:
        self.option, self.memo = option, memo

    def step(self, key: Any) -> Spec:
        """The spec for the child at `key`."""
        return self

    def enter(self, root: str) -> Spec:
        """The spec for the argument of this name."""
        return self

    def leaf_spec(self, leaf: Any, here: Here) -> Any:
        """The spec of a leaf; UNKNOWN where there is none."""
        raise NotImplementedError


class Silent(Spec):
    """Says nothing: there may be no arrays below."""

    def leaf_spec(self, leaf: Any, here: Here) -> Any:
        return UNKNOWN


class Constant(Spec):
    """One spec for everything."""

    def __init__(self, option: SpecOption, value: Any) -> None:
        super().__init__(option, ("constant", value))
        self.value = value

    def leaf_spec(self, leaf: Any, here: Here) -> Any:
        return self.value if self.option.is_leaf_spec(self.value) else self.option.check(self.value, here.text())


class ByLeaf(Spec):
    """A function of the leaf."""

    def __init__(self, option: SpecOption, function: Callable[[Any], Any]) -> None:
        super().__init__(option, ("function", id(function)))
        self.function = function

    def leaf_spec(self, leaf: Any, here: Here) -> Any:
        return self.option.check(self.function(leaf), here.text())


class Prefix(Spec):
    """A container with a spec, or a container, for each part of a node; or a callable object."""

    def __init__(self, option: SpecOption, given: Any) -> None:
        super().__init__(option, ("prefix", id(given)))
        self.given = given

    def opened(self, children: Sequence[Any], cls: type | None, here: Here) -> Spec:
        """What this spec becomes at a node of a class, whose children have these plain keys."""
        given = self.given
        if isinstance(given, dict):
            mapping = cast("dict[Any, Any]", given)
            strange = [key for key in mapping if key not in children]
            if strange and _are_choices(mapping):
                return Patterns.of(self.option, mapping.items(), here)
            if strange:
                raise self._misfit(OTHER_PARTS, here, f"has {', '.join(map(repr, strange))}")
        elif isinstance(given, (tuple, list)):
            parts = len(cast("Sequence[Any]", given))
            if hasattr(cast("Any", given), "_fields"):
                if cls is not type(cast("Any", given)):
                    raise self._misfit(OTHER_PARTS, here, f"is a {type(cast('Any', given)).__qualname__}")
            elif parts != len([key for key in children if isinstance(key, int)]):
                raise self._misfit(OTHER_PARTS, here, f"has {parts} parts")
        elif cls is not type(given):
            return ByLeaf(self.option, self._function(here))
        return self

    def step(self, key: Any) -> Spec:
        part = part_of(self.given, key)
        if isinstance(part, type):  # an attribute of an object that is a prefix, or an entry that no array can have
            return Constant(self.option, part)
        return Silent(self.option, "silent") if part is ABSENT else self.option.read(part)

    def leaf_spec(self, leaf: Any, here: Here) -> Any:
        if isinstance(self.given, dict) and _are_choices(cast("dict[Any, Any]", self.given)):
            return Patterns.of(self.option, cast("dict[Any, Any]", self.given).items(), here).leaf_spec(leaf, here)
        if isinstance(self.given, (tuple, list, dict)):
            raise self._misfit(ENTRY_TOO_DEEP, here)
        return self.option.check(self._function(here)(leaf), here.text())

    def _function(self, here: Here) -> Callable[[Any], Any]:
        if not callable(self.given):
            self.option.check(self.given, here.text())
        return self.given

    def _misfit(self, message: str, here: Here, found: str = "") -> StructureError:
        name, option, what = self.option.name, self.option.keyword, self.option.what
        return StructureError(
            message.format(name=name, option=option, what=what, entry=self.given, path=here.text(), found=found)
        )


NOWHERE = Pattern("")  # the pattern of a filter


def _are_choices(mapping: dict[Any, Any]) -> bool:
    return all(isinstance(key, str) or filter_of(key) is not None for key in mapping)


class Choice(NamedTuple):
    """One pattern or filter of several, and what is so where it means a leaf."""

    pattern: Pattern
    wanted: Filter | None
    spec: Spec


class _Use:
    """What became of several patterns, by number."""

    def __init__(self) -> None:
        self.decided: set[int] = set()  # of some array
        self.arrays: set[int] = set()  # it covers an array
        self.others: set[int] = set()  # it covers a place that holds no array


class Patterns(Spec):
    """Patterns of key paths, and filters: the first that covers a leaf decides."""

    def __init__(
        self, option: SpecOption, choices: tuple[Choice, ...], use: _Use, positions: tuple[Positions, ...]
    ) -> None:
        super().__init__(option, ("patterns", id(use), positions))
        self.choices, self.use = choices, use
        self._positions = positions  # where in each of the patterns one is here

    @staticmethod
    def of(option: SpecOption, patterns: Iterable[tuple[Any, Any]], here: Here | None = None) -> Patterns:
        """The spec at a node, below which the patterns begin, if not with the name of an argument."""
        choices = [option.choice(key, value) for key, value in patterns]
        starts = (c.pattern.start if c.wanted is None else frozenset[int]() for c in choices)
        spec = Patterns(option, tuple(choices), _Use(), tuple(starts))
        if here is None:
            return spec
        whole = functools.reduce(Patterns.step, here.key_entries(), spec)
        both = (below | above for below, above in zip(spec._positions, whole._positions, strict=True))
        return Patterns(option, spec.choices, spec.use, tuple(both))

    def step(self, key: Any) -> Patterns:
        pairs = zip(self.choices, self._positions, strict=True)
        below = (choice.pattern.below(positions, key) if positions else positions for choice, positions in pairs)
        return Patterns(self.option, self.choices, self.use, tuple(below))

    def enter(self, root: str) -> Patterns:
        return functools.reduce(Patterns.step, root_entries(root), self)

    def _covering(self, meant: Callable[[Filter], bool] = _none_of_it) -> list[int]:
        """The patterns and filters that cover this place, by number."""
        pairs = zip(self.choices, self._positions, strict=True)
        return [
            i
            for i, (choice, positions) in enumerate(pairs)
            if (choice.pattern.ends(positions) if choice.wanted is None else meant(choice.wanted))
        ]

    def leaf_spec(self, leaf: Any, here: Here) -> Any:
        covering = self._covering(here.meant)
        self.use.arrays.update(covering)
        if not covering:
            return UNKNOWN
        self.use.decided.add(covering[0])
        return self.choices[covering[0]].spec.leaf_spec(leaf, here)

    def note(self) -> None:
        """Notes that there is something here that is no array."""
        self.use.others.update(self._covering())

    def unused(self) -> str | None:
        """A pattern that covers nothing, or only arrays that others decide about."""
        for i, (pattern, wanted, _) in enumerate(self.choices):
            if wanted is None and i not in self.use.decided and (i in self.use.arrays or i not in self.use.others):
                return pattern.text
        return None


class Broadcast:
    """A spec, brought to the leaves of a graph.

    Args:
        graphdef: the graph.
        names: one name a root.
        specs: one a root.
        leaves: the graph's leaves.

    Raises:
        StructureError: where the spec does not fit, or a node that is reached twice is given two.
    """

    def __init__(
        self, graphdef: _core.GraphDef, names: tuple[str, ...], specs: Sequence[Spec], leaves: Sequence[Any]
    ) -> None:
        self.graphdef, self.leaves, self._names = graphdef, leaves, names
        self._structure = Structure(graphdef)
        self._rows = self._structure.rows
        self._found: dict[int, tuple[Any, Chain]] = {}
        self._visits: dict[int, list[tuple[Spec, Chain]]] = {}
        self._patterns: dict[int, Patterns] = {}
        self._chosen: dict[int, set[int]] = {}  # the leaves that filters mean, by the filter's id
        self._met: set[Any] = set()
        self.asked: set[int] = set()  # the leaves of which a function of the leaf was asked
        self._parts: dict[int, dict[tuple[Any, Any], Row]] = {}
        self._nothing = specs[0].option.nothing if specs else None
        self.keyword = specs[0].option.keyword if specs else ""
        roots = zip(self._structure.roots, specs, strict=True)
        starts = [(row.number, spec.enter(names[row.root])) for row, spec in roots]
        walk(starts, self._visit, self._structure.key_entries, lambda spec, key: spec.step(key))
        self._check_patterns()
        self.leaf_specs: list[Any] = [self._found[i][0] for i in range(len(leaves))]

    def _visit(self, chain: Chain, spec: Spec) -> tuple[int, Spec] | None:
        row = self._rows[chain[1]]
        if isinstance(spec, Patterns):
            self._patterns[id(spec.use)] = spec
            if row.op is not Op.leaf:
                spec.note()
        if row.op is Op.leaf:
            self._give(row.leaf, spec, chain)
            return None
        if row.op is Op.ref:
            row = self._structure.target(row)
        if row.op is not Op.node or (row.number, spec.memo) in self._met:
            return None
        self._met.add((row.number, spec.memo))
        if isinstance(spec, Prefix):
            keys = [plain_key(child.key_entry) for child in self._structure.children(row)]
            spec = spec.opened(keys, row.type, self._here(chain))
            if isinstance(spec, Patterns):
                self._patterns[id(spec.use)] = spec
                spec.note()
        if row.track >= 0:
            self._visits.setdefault(row.track, []).append((spec, chain))
        return row.number, spec

    def _give(self, leaf: int, spec: Spec, chain: Chain) -> None:
        value = spec.leaf_spec(self.leaves[leaf], self._here(chain, leaf))
        option = spec.option
        if value is UNKNOWN:
            raise StructureError(NO_ENTRY.format(name=option.name, option=option.keyword, path=self.name(chain)))
        if isinstance(spec, ByLeaf):
            self.asked.add(leaf)
        known, place = self._found.setdefault(leaf, (value, chain))
        same = option.canonical
        if same(known, self.leaves[leaf]) != same(value, self.leaves[leaf]):
            one, other = self.name(place), self.name(chain)
            raise StructureError(
                TWO_ENTRIES.format(name=option.name, option=option.keyword, one=one, other=other, a=known, b=value)
            )

    def _check_patterns(self) -> None:
        for spec in self._patterns.values():
            unused = spec.unused()
            if unused is not None:
                option = spec.option
                there = nearest(unused, (self.name(chain) for _, chain in self._found.values())) or "no array"
                raise ValueError(
                    PATTERN_UNUSED.format(name=option.name, option=option.keyword, pattern=unused, paths=there)
                )

    def _here(self, chain: Chain, leaf: int | None = None) -> Here:
        def meant(wanted: Filter) -> bool:
            found = self._chosen.get(id(wanted))
            if found is None:
                found = self._chosen[id(wanted)] = Recorded(self.graphdef, self.leaves).chosen(wanted)
            return leaf in found

        def key_entries() -> Sequence[Any]:
            root, keys = self._spelled(chain)
            return (*root_entries(self._names[root]), *keys)

        return Here(lambda: self.name(chain), key_entries, meant)

    def _spelled(self, chain: Chain) -> tuple[int, list[Any]]:
        """(the root, the key entries below it) of a place."""
        steps: list[int] = []
        at: Chain | None = chain
        while at is not None:
            steps.append(at[1])
            at = at[0]
        return self._rows[steps.pop()].root, [self._rows[number].key_entry for number in reversed(steps)]

    def name(self, chain: Chain) -> str:
        """The text of a place."""
        root, keys = self._spelled(chain)
        return place_name((root, tuple(keys)), self._names)

    def path(self, leaf: int) -> str:
        """The text of a leaf's place, the first where there are several."""
        return self.name(self._found[leaf][1])

    def inside(self, cls: type) -> list[int]:
        """The leaves below nodes of a class."""
        return [leaf for row in self._rows if row.type is cls for leaf in self._leaves(row)]

    def _leaves(self, row: Row) -> list[int]:
        return [below.leaf for below in self._structure.below(row) if below.op is Op.leaf]

    def leaf_at(self, track: int, path: tuple[Any, ...]) -> int | None:
        """The leaf at this path in a tracked node; None where there is none."""
        node = self._structure.tracked[track]
        return self._leaf_at(node, self._as_attributes(node, path))

    @staticmethod
    def _as_attributes(node: Row, path: tuple[Any, ...]) -> tuple[Any, ...]:
        """The path with an attribute of a registered object as such."""
        if isinstance(node.type, type) and not issubclass(node.type, dict) and path and isinstance(path[0], DictKey):
            return (GetAttrKey(path[0].key), *path[1:])
        return path

    def at(self, path: tuple[Any, ...]) -> Any:
        """The spec of the leaf at this path, in a graph of one root."""
        leaf = self._leaf_at(self._rows[0], path)
        assert leaf is not None
        return self.leaf_specs[leaf]

    # ---- leaves that were not there when the spec was brought to the graph

    @property
    def has_filters(self) -> bool:
        """Are there filters that a leaf has to be asked about?"""
        return any(choice.wanted is not None for spec in self._patterns.values() for choice in spec.choices)

    def written(self, track: int, path: tuple[Any, ...], leaf: Any, after: Recorded | None = None) -> tuple[str, Any]:
        """(the path, the spec) of a leaf that a function left in one of the graph's nodes.

        `after` is the graph as it left it, for filters.

        Where there was a leaf before it is that leaf's; elsewhere what the spec as a whole says of the place, or
        what the other leaves of the node have.

        Raises:
            StructureError: where they have several.
        """
        visits = self._visits.get(track)
        if visits is None:  # below a key of a dict there are no arrays to map
            return place_name((0, path), ("a dict's key",)), self._nothing
        node = self._structure.tracked[track]
        path = self._as_attributes(node, path)
        name = place_name((0, path), (self.name(visits[0][1]),))
        before = self._leaf_at(node, path)
        if before is not None:
            return name, self._found[before][0]
        candidates: list[Any] = []
        for spec, chain in visits:
            value = self._resolve(spec, chain, path, leaf, after)
            values = self._around(chain) if value is UNKNOWN else [value]
            candidates += [v for v in values if v not in candidates]
        option = visits[0][0].option
        if len(candidates) > 1:
            text = " and ".join(repr(c) for c in candidates)
            raise StructureError(
                AMBIGUOUS_ENTRY.format(name=option.name, option=option.keyword, path=name, entries=text)
            )
        return name, candidates[0]

    def _leaf_at(self, row: Row, path: tuple[Any, ...]) -> int | None:
        for key in path:
            parts = self._parts.get(row.number)
            if parts is None:
                parts = self._parts[row.number] = {}
                for child in self._structure.children(row):
                    entry = child.key_entry  # JAX's entries cannot be compared with those of other types
                    parts[type(entry), plain_key(entry)] = child
                    parts.setdefault((None, plain_key(entry)), child)
            plain = plain_key(key)
            found = parts.get((type(key), plain), parts.get((None, plain)))
            if found is None:
                return None
            row = self._structure.target(found) if found.op is Op.ref else found
        return row.leaf if row.op is Op.leaf else None

    def _resolve(self, spec: Spec, chain: Chain, path: tuple[Any, ...], leaf: Any, after: Recorded | None) -> Any:
        for key in path:
            spec = spec.step(key)
        if isinstance(spec, Prefix):
            return UNKNOWN

        def meant(wanted: Filter) -> bool:
            return after is not None and any(after.leaves[i] is leaf for i in after.chosen(wanted))

        here = Here(
            lambda: place_name((0, path), (self.name(chain),)),
            lambda: (*self._here(chain).key_entries(), *path),
            meant,
        )
        return spec.leaf_spec(leaf, here)

    def _around(self, chain: Chain | None) -> list[Any]:
        """The specs of the leaves of the nearest node around that has any: those that are mapped, if some are."""
        unique: list[Any] = []
        while chain is not None and not unique:
            row = self._rows[chain[1]]
            for leaf in self._leaves(self._structure.target(row) if row.op is Op.ref else row):
                if (value := self._found[leaf][0]) not in unique:
                    unique.append(value)
            chain = chain[0]
        return [value for value in unique if value != self._nothing] or [self._nothing]
