# SPDX-License-Identifier: Apache-2.0
"""What `in_shardings` and `out_shardings` say of each leaf: one for all, an object of them, patterns, filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax
from jax.tree_util import keystr

from . import _core, interop
from ._filters import Filter, Recorded, filter_of
from ._options import Held
from ._patterns import Pattern, nearest, of_arguments
from ._prefix import ABSENT, part_of
from ._structure import plain_key

NO_SHARDING = (
    "the sharding prefix {spec!r} has no entry for {path} of {of}. Give one sharding for everything, or a tree with an "
    "entry for each part: None leaves a part to JAX."
)
SHARDING_TOO_DEEP = (
    "the sharding prefix has {spec!r} for {path} of {of}, which is an array. Give one sharding, or None, there."
)
UNUSED = (
    "{name}: the pattern {pattern!r} of {option} decides about no array: it covers none, or patterns before it cover "
    "them all (the first that covers a path counts). There is: {paths}. .w is an attribute, [w] a key."
)


def has_parts(spec: Any) -> bool:
    """Is it something with an entry for each part, rather than one for everything?"""
    spec = spec.held if isinstance(spec, Held) else spec
    if spec is None or type(spec).__module__.partition(".")[0] in ("jax", "jaxlib"):
        return False
    if isinstance(spec, (tuple, list, dict)) or interop.choices(spec) is not None:
        return True
    return not callable(spec) and (hasattr(spec, "__dict__") or not jax.tree_util.all_leaves([spec]))


class Shardings:
    """Shardings, brought to the leaves of a graph.

    Args:
        name, option: of the call and the option, for messages.
        spec: as it was given.
        of: what it is for, in words.
        graphdef, leaves: the graph, in which filters are asked.
    """

    def __init__(
        self, name: str, option: str, spec: Any, of: str, graphdef: _core.GraphDef | None, leaves: Sequence[Any]
    ) -> None:
        self._name, self._option, self._spec, self._of = name, option, spec, of
        self._graphdef, self._leaves = graphdef, leaves
        self._chosen: dict[Any, set[int]] = {}
        self._texts: dict[str, bool] = {}  # patterns: has one decided about a leaf?
        self._paths: list[str] = []

    def of_leaf(self, leaf: int, path: Sequence[Any], named: Sequence[Any]) -> Any:
        """The entry of a leaf.

        Args:
            leaf: its number.
            path: where it stands in the specification.
            named: the same, from the name of an argument on.

        Raises:
            ValueError: where there is none, or one for parts that it does not have.
        """
        spec = self._spec
        self._paths.append(keystr(tuple(path)))
        for i, key in enumerate(path):
            spec = spec.held if isinstance(spec, Held) else spec
            if not has_parts(spec):
                return _plain(spec)
            part = part_of(spec, key) if interop.choices(spec) is None else ABSENT
            if part is ABSENT and (choices := _choices(spec)) is not None:
                part = self._decided(choices, leaf, path[i:], named)
                if part is not ABSENT:
                    return _plain(part)
            elif part is not ABSENT and isinstance(plain_key(key), str):
                self._texts[plain_key(key)] = True  # the name of a part is its pattern, too
            if part is ABSENT:
                shown = keystr(tuple(path[: i + 1]))
                raise ValueError(NO_SHARDING.format(spec=self._spec, of=self._of, path=shown))
            spec = part
        spec = spec.held if isinstance(spec, Held) else spec
        if has_parts(spec):
            raise ValueError(SHARDING_TOO_DEEP.format(spec=spec, of=self._of, path=keystr(tuple(path))))
        return _plain(spec)

    def _decided(self, choices: list[tuple[Any, Any]], leaf: int, below: Sequence[Any], named: Sequence[Any]) -> Any:
        for key, value in choices:
            wanted = filter_of(key)
            if wanted is not None:
                if leaf in self._meant(key, wanted):
                    return value
                continue
            pattern: Pattern = of_arguments(key, self._name, self._option)
            self._texts.setdefault(key, False)
            if pattern.covers(below) or pattern.covers(named):
                self._texts[key] = True
                return value
        return ABSENT

    def _meant(self, key: Any, wanted: Filter) -> set[int]:
        if self._graphdef is None:
            return set()
        found = self._chosen.get(id(key))
        if found is None:
            found = self._chosen[id(key)] = Recorded(self._graphdef, self._leaves).chosen(wanted)
        return found

    def check(self) -> None:
        """Raises ValueError for a pattern that decides about no array: spelt wrong, it would have no effect."""
        for text, used in self._texts.items():
            if not used:
                there = nearest(text, self._paths) or "no array"
                raise ValueError(UNUSED.format(name=self._name, pattern=text, option=self._option, paths=there))


def _choices(spec: Any) -> list[tuple[Any, Any]] | None:
    """The patterns and filters of a specification, and their entries; None where it has none."""
    if isinstance(spec, dict):
        items = list(cast("dict[Any, Any]", spec).items())
        return items if items and all(isinstance(k, str) or filter_of(k) is not None for k, _ in items) else None
    return interop.choices(spec)


def _plain(spec: Any) -> Any:
    spec = spec.held if isinstance(spec, Held) else spec
    return spec.sharding if isinstance(spec, jax.ShapeDtypeStruct) else spec
