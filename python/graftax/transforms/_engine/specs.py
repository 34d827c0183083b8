# SPDX-License-Identifier: Apache-2.0
"""Specs such as `in_axes` and `in_specs`, which say something of each array by prefix trees, patterns or functions."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

from graftax import interop
from graftax._base.errors import StructureError
from graftax._graph.filters import Filter, as_filter
from graftax._graph.patterns import Pattern, Positions, argument_pattern, root_entries
from graftax._graph.prefix_tree import ABSENT, child_spec

NOT_AN_ENTRY = "{name}: {option} gives {entry!r} for {path}. Give {what} there, or a tree of them like the argument."
NO_ENTRY = (
    "{name}: {option} has no entry for {path}. Add one; the last of several patterns can be '**', which "
    "covers what no other does."
)
NO_TEXT = (
    "{name}: a dict for {option} as a whole has patterns of key paths, types or filters as its keys, such as 'x' or "
    "'**.w', and {actual!r} is not one. For one entry per argument, give a tuple."
)
ENTRY_TOO_DEEP = "{name}: {option} has {entry!r} for {path}, which is an array. Give {what} there."
OTHER_PARTS = (
    "{name}: {option} has {entry!r} for {path}: that {problem}, and {path} does not. Give {what} for all of it, or one "
    "for each of its parts."
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
            raise TypeError(self.text(NO_TEXT, actual=key))
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
        # For one argument, a dict may also be a prefix tree: `Prefix.open_node` decides when it knows the argument.
        if names and isinstance(value, dict):
            return Patterns.from_pairs(self, cast("dict[Any, Any]", value).items())
        if (choices := interop.choices(value)) is not None:
            return Patterns.from_pairs(self, choices)
        # A class is callable, but creates an instance.
        if isinstance(value, type):
            self.check(value, "all")
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            return ByLeaf(self, cast("Callable[[Any], Any]", value))
        return Prefix(self, value)


class Spec:
    """The part of a spec that applies to a node and everything below it."""

    # `memo` is equal for parts that assign the same specs, so that a node is visited once for each of them.
    def __init__(self, option: SpecOption, memo: object) -> None:
        self.option, self.memo = option, memo

    def child(self, key: object) -> Spec:
        return self

    def enter(self, root: str) -> Spec:
        """The spec for the argument of this name."""
        return self

    def leaf_spec(self, leaf: object, context: LeafContext) -> Any:
        """The axis or sharding of a leaf; UNKNOWN if the spec does not say, which is an error for an array."""
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
        """The spec to apply at a node of class `cls` whose children have these plain keys."""
        tree = self.tree
        # A dict is a prefix tree if the node has all of its keys, and otherwise patterns or filters.
        if isinstance(tree, dict):
            mapping = cast("dict[Any, Any]", tree)
            strange = [key for key in mapping if key not in children]
            if strange and _are_choices(mapping):
                return Patterns.from_pairs(self.option, mapping.items(), context)
            if strange:
                raise self._misfit(OTHER_PARTS, context, f"has {', '.join(map(repr, strange))}")
        # A sequence needs a part for each of the node's; a namedtuple has to be of the node's own class.
        elif isinstance(tree, (tuple, list)):
            parts = len(cast("Sequence[Any]", tree))
            if hasattr(cast("Any", tree), "_fields"):
                if cls is not type(cast("Any", tree)):
                    raise self._misfit(OTHER_PARTS, context, f"is a {type(cast('Any', tree)).__qualname__}")
            elif parts != len([key for key in children if isinstance(key, int)]):
                raise self._misfit(OTHER_PARTS, context, f"has {parts} parts")
        # An object of another class than the node's can only be a callable.
        elif cls is not type(tree):
            return ByLeaf(self.option, self._function(context))
        return self

    def child(self, key: object) -> Spec:
        part = child_spec(self.tree, key)
        # A class is no function of the leaf. It is refused when it reaches one, with the path.
        if isinstance(part, type):
            return Constant(self.option, part)
        return Spec(self.option, "absent") if part is ABSENT else self.option.read(part)

    def leaf_spec(self, leaf: object, context: LeafContext) -> Any:
        # A leaf has no parts, so a dict at one is patterns or filters, and any other object a callable.
        if isinstance(self.tree, dict) and _are_choices(cast("dict[Any, Any]", self.tree)):
            patterns = Patterns.from_pairs(self.option, cast("dict[Any, Any]", self.tree).items(), context)
            return patterns.leaf_spec(leaf, context)
        if isinstance(self.tree, (tuple, list, dict)):
            raise self._misfit(ENTRY_TOO_DEEP, context)
        return self.option.check(self._function(context)(leaf), context.text())

    def _function(self, context: LeafContext) -> Callable[[Any], Any]:
        if not callable(self.tree):
            self.option.check(self.tree, context.text())
        return self.tree

    def _misfit(self, message: str, context: LeafContext, problem: str = "") -> StructureError:
        return StructureError(self.option.text(message, entry=self.tree, path=context.text(), problem=problem))


NOWHERE = Pattern("")  # takes the place of the pattern in a choice by a filter


def _are_choices(mapping: dict[Any, Any]) -> bool:
    return all(isinstance(key, str) or as_filter(key) is not None for key in mapping)


class Choice(NamedTuple):
    """One pattern or filter of several, and the spec of the leaves that it covers."""

    pattern: Pattern
    leaf_filter: Filter | None
    spec: Spec


class _Use:
    """How the patterns of a spec were used, by index. The spec shares it with those of the nodes below."""

    def __init__(self) -> None:
        # Patterns that decided about an array, that cover an array, and that cover something else.
        self.decided, self.arrays, self.non_arrays = set[int](), set[int](), set[int]()


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
        # Both readings at once: the patterns as they begin here, and as they have matched the key path up to here.
        from_root = functools.reduce(Patterns.child, context.key_entries(), spec)
        positions = (start | reached for start, reached in zip(spec._positions, from_root._positions, strict=True))
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
            covers_statics_only = i in self.use.non_arrays and i not in self.use.arrays
            if leaf_filter is None and i not in self.use.decided and not covers_statics_only:
                return pattern.text
        return None
