# SPDX-License-Identifier: Apache-2.0
"""What `in_shardings` and `out_shardings` say of each leaf: one for all, an object of them, patterns, filters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
from jax.sharding import PartitionSpec, Sharding
from jax.tree_util import DictKey, SequenceKey

from graftax import interop
from graftax._base.errors import some
from graftax._base.key_path import keystr
from graftax._graph.filters import Filter, filter_of
from graftax._graph.path import Graph, Path, open_node
from graftax._graph.patterns import Pattern, Root, nearest, of_arguments, root_entries
from graftax._graph.prefix_tree import ABSENT, part_of
from graftax._graph.select import Shown
from graftax._graph.structure import path_text, plain_key
from graftax._sharding.frozen_specs import Held
from graftax._sharding.rules import UNUSED as NO_USE
from graftax._sharding.rules import Rules, refuse

NO_SHARDING = (
    "{name}: {option}={spec!r} has no entry for {path}. Give one sharding for everything, or a tree with an "
    "entry for each part: None leaves a part to JAX."
)
SHARDING_TOO_DEEP = "{name}: {option} has {spec!r} for {path}, which is an array. Give one sharding, or None, there."
UNUSED = (
    "{name}: the pattern {pattern!r} of {option} decides about no array: it covers none, or patterns before it cover "
    "them all (the first that covers a path counts). There is: {paths}. .w is an attribute, [w] a key."
)
NO_PART = "{name}: {option} has an entry for {keys}, and there is no such part: {path} has {there}."
TOO_MANY = "{name}: {option} is given for {given} arguments, and there {are}: one each that is not static."

_SHARDINGS = (Sharding, PartitionSpec, jax.ShapeDtypeStruct)


def has_parts(spec: Any) -> bool:
    """Is it something with an entry for each part, rather than one for everything?"""
    spec = spec.held if isinstance(spec, Held) else spec
    if spec is None or type(spec).__module__.partition(".")[0] in ("jax", "jaxlib"):
        return False
    if isinstance(spec, (tuple, list, dict, Rules)) or interop.choices(spec) is not None:
        return True
    if not jax.tree_util.all_leaves([spec]):  # a module that can be called, too
        return True
    return not callable(spec) and hasattr(spec, "__dict__")


class Shardings:
    """Shardings, brought to the leaves of a graph.

    Args:
        name, option: of the call and the option, for messages.
        spec: as it was given.
        of: what it is for, in words.
        part: what stands at a path, in which filters and `Rules` are asked.
        by_argument: does a path begin with the number of an argument? Each is an object by itself for `Rules` then, and
            the name of one stands for it in a dict.
    """

    def __init__(
        self,
        name: str,
        option: str,
        spec: Any,
        of: str,
        *,
        part: Callable[[Sequence[Any]], Any],
        by_argument: bool = False,
    ) -> None:
        self._name, self._option, self._spec, self._of = name, option, spec, of
        self._about = {"name": name, "option": option}
        self._chosen: dict[tuple[int, Path], tuple[Graph, set[int]]] = {}
        self._entered: dict[tuple[int, Path], tuple[Any, str]] = {}  # specs with parts, and where they are
        self._texts: dict[str, bool] = {}  # patterns: has one decided about a leaf?
        self._paths: list[str] = []
        self._part, self._by_argument = part, by_argument
        self._ruled: dict[tuple[int, Path], tuple[Graph, dict[int, Any]]] = {}
        self._unused: dict[int, set[str]] = {}  # of each `Rules`

    def of_leaf(self, path: Sequence[Any], named: Sequence[Any], silent: bool = False) -> Any:
        """The entry of a leaf.

        Args:
            path: where it stands in the specification.
            named: the same, from the name of an argument on.
            silent: gives ABSENT where there is none.

        Raises:
            ValueError: where there is none, or one for parts that it does not have.
        """
        spec, whole, inside = self._spec, tuple(path), False
        self._paths.append(keystr(whole))
        for i, key in enumerate(whole):
            spec = spec.held if isinstance(spec, Held) else spec
            if isinstance(spec, Rules):
                return self._by_rules(spec, whole, i)
            if not has_parts(spec):
                return _plain(spec)
            part = part_of(spec, key) if interop.choices(spec) is None else ABSENT
            if part is ABSENT and (choices := _choices(spec)) is not None:
                which, part = self._decided(choices, whole, i, named)
                an_argument = (
                    i == 0 and self._by_argument and isinstance(which, str) and root_entries(which)[:1] == named[:1]
                )
                if part is not ABSENT and not (an_argument and which.isidentifier()):
                    if isinstance(part, Rules):
                        return self._by_rules(part, whole, i)
                    return self._one(part, named)
            elif part is not ABSENT and isinstance(plain_key(key), str):
                self._texts[plain_key(key)] = True  # the name of a part is its pattern, too
            if not inside and i >= int(self._by_argument) and part is not ABSENT:
                inside = True
                self._enter(spec, whole[:i], named[: len(named) - len(whole) + i])
            if part is ABSENT:
                if silent:
                    return ABSENT
                shown = self._shown(named[: len(named) - len(whole) + i + 1])
                raise ValueError(NO_SHARDING.format(spec=self._spec, path=shown, **self._about))
            spec = part
        spec = spec.held if isinstance(spec, Held) else spec
        if isinstance(spec, Rules):
            return self._by_rules(spec, whole, len(whole))
        return self._one(spec, named)

    def _enter(self, spec: Any, path: tuple[Any, ...], named: Sequence[Any]) -> None:
        at = id(spec), Path(path)
        if at not in self._entered:
            self._entered[at] = spec, self._shown(named)

    def _one(self, spec: Any, named: Sequence[Any]) -> Any:
        if has_parts(spec):
            raise ValueError(SHARDING_TOO_DEEP.format(spec=spec, path=self._shown(named), **self._about))
        return _plain(spec)

    def _shown(self, named: Sequence[Any]) -> str:
        if named and isinstance(named[0], Root):
            return named[0].name + path_text(named[1:])
        return self._of + path_text(named)

    def _by_rules(self, rules: Rules, path: tuple[Any, ...], depth: int) -> Any:
        """What rules say of the leaf at a path; they are given for what stands at its first `depth` entries."""
        above = Path(path[: max(depth, int(self._by_argument))])
        found = self._ruled.get((id(rules), above))
        if found is None:
            graph = Graph(self._part(above))
            assigned = rules.assign(graph)
            refuse(f"this {assigned.cls}", [f"  {a.path!r}: {a.problem}" for a in assigned.arrays if a.problem])
            unused = self._unused.setdefault(id(rules), set(assigned.unused))
            unused.intersection_update(assigned.unused)
            found = graph, {id(array.leaf): sharding for array, sharding in assigned.shardings()}
            self._ruled[id(rules), above] = found
        graph, shardings = found
        value = graph.rows[graph.number(path[len(above) :])].value
        return shardings.get(id(value))

    def _decided(
        self, choices: list[tuple[Any, Any]], path: tuple[Any, ...], depth: int, named: Sequence[Any]
    ) -> tuple[Any, Any]:
        """(the pattern or filter that decides about a leaf, its entry); all are given for its first `depth` entries."""
        for key, value in choices:
            wanted = filter_of(key)
            if wanted is not None:
                if self._is_meant(key, wanted, path):
                    return key, value
                continue
            pattern: Pattern = of_arguments(key, self._name, self._option)
            self._texts.setdefault(key, False)
            if pattern.covers(path[depth:]) or pattern.covers(named):
                self._texts[key] = True
                return key, value
        return None, ABSENT

    def _is_meant(self, key: Any, wanted: Filter, path: tuple[Any, ...]) -> bool:
        above = Path(path[: int(self._by_argument)])
        found = self._chosen.get((id(key), above))
        if found is None:
            graph = Graph(self._part(above))
            found = self._chosen[id(key), above] = graph, graph.below(wanted.means(Shown(graph)))
        graph, chosen = found
        return graph.rows[graph.number(path[len(above) :])].target in chosen

    def check_arguments(self, names: Sequence[str]) -> None:
        """Raises ValueError where more arguments are spoken of than there are, or parts that one does not have."""
        spec: Any = self._spec
        if type(spec) not in (tuple, list):
            return
        if len(spec) > len(names):
            are = f"is {len(names)}" if len(names) == 1 else f"are {len(names)}"
            raise ValueError(TOO_MANY.format(given=len(spec), are=are, **self._about))
        for i, (part, name) in enumerate(zip(spec, names, strict=False)):
            self._enter(part, (SequenceKey(i),), (Root(name),))

    def check(self) -> None:
        """Raises ValueError for a pattern that decides about no array: spelt wrong, it would have no effect."""
        for text, used in self._texts.items():
            if not used:
                there = nearest(text, self._paths) or "no array"
                raise ValueError(UNUSED.format(name=self._name, pattern=text, option=self._option, paths=there))
        for (_, path), (spec, place) in self._entered.items():
            self._refuse_strange(spec, self._part(path), place, set())
        for unused in self._unused.values():
            refuse(f"{self._of} of {self._name}", [f"  the rule {rule} {NO_USE}" for rule in sorted(unused)])

    def _refuse_strange(self, spec: Any, there: Any, place: str, seen: set[tuple[int, int]]) -> None:
        """Raises ValueError where a specification speaks of a part that is not there."""
        spec = spec.held if isinstance(spec, Held) else spec
        at = id(spec), id(there)
        if at in seen or isinstance(spec, Rules) or not has_parts(spec) or interop.choices(spec) is not None:
            return
        seen.add(at)
        pairs = [(entry, value, part_of(there, entry)) for entry, value in _entries(spec)]
        strange = [entry for entry, value, part in pairs if part is ABSENT and self._speaks(spec, entry, value)]
        if strange:
            names = [text for entry, _ in _entries(there) if not (text := path_text((entry,))).startswith("._")]
            shown = some([f"{place}{path_text((entry,))}" for entry in strange])
            raise ValueError(NO_PART.format(keys=shown, path=place, there=some(names) or "no parts", **self._about))
        for entry, value, part in pairs:
            if part is not ABSENT:
                self._refuse_strange(value, part, f"{place}{path_text((entry,))}", seen)

    def _speaks(self, spec: Any, entry: Any, value: Any) -> bool:
        """Is this entry, of a part that is not there, more than nothing, and no pattern or filter that decided?"""
        if isinstance(spec, dict) and (self._texts.get(entry.key) or filter_of(entry.key) is not None):
            return False
        return any(isinstance(row.value, _SHARDINGS) for row in Graph(value).rows)


def _entries(node: Any) -> list[tuple[Any, Any]]:
    """(key entry, child) of what is in a specification, or in what it is for."""
    if isinstance(node, Mapping):
        return [(DictKey(key), value) for key, value in cast("Mapping[Any, Any]", node).items()]
    return open_node(node)


def _choices(spec: Any) -> list[tuple[Any, Any]] | None:
    """The patterns and filters of a specification, and their entries; None where it has none."""
    if isinstance(spec, dict):
        items = list(cast("dict[Any, Any]", spec).items())
        return items if items and all(isinstance(k, str) or filter_of(k) is not None for k, _ in items) else None
    return interop.choices(spec)


def _plain(spec: Any) -> Any:
    spec = spec.held if isinstance(spec, Held) else spec
    return spec.sharding if isinstance(spec, jax.ShapeDtypeStruct) else spec
