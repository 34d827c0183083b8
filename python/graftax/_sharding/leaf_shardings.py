# SPDX-License-Identifier: Apache-2.0
"""Resolves `in_shardings` and `out_shardings` for each leaf: one sharding, an object of them, patterns, filters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
from jax.sharding import PartitionSpec, Sharding
from jax.tree_util import DictKey, SequenceKey

from graftax import interop
from graftax._base.errors import some
from graftax._base.key_path import keystr
from graftax._graph.filters import Filter, as_filter
from graftax._graph.path import Graph, Path, open_node
from graftax._graph.patterns import Pattern, Root, argument_pattern, refuse_unused, root_entries
from graftax._graph.prefix_tree import ABSENT, child_spec
from graftax._graph.select import ObjectView
from graftax._graph.structure import path_text, plain_key
from graftax._sharding.frozen_specs import unwrapped
from graftax._sharding.rules import UNUSED, Rules, refuse

NO_SHARDING = (
    "{name}: {option}={spec!r} has no entry for {path}. Give one sharding for everything, or a tree with an "
    "entry for each part: None leaves a part to JAX."
)
SHARDING_TOO_DEEP = "{name}: {option} has {spec!r} for {path}, which is an array. Give one sharding, or None, there."
NO_PART = "{name}: {option} has an entry for {keys}, and there is no such part: {path} has {there}."
TOO_MANY = "{name}: {option} is given for {actual} arguments, and there {are}: one each that is not static."

_SHARDINGS = (Sharding, PartitionSpec, jax.ShapeDtypeStruct)


def has_parts(spec: object) -> bool:
    """Whether a spec has entries for the parts of what it applies to, and is not one sharding for everything."""
    spec = unwrapped(spec)
    if spec is None or type(spec).__module__.partition(".")[0] in ("jax", "jaxlib"):
        return False
    if isinstance(spec, (tuple, list, dict, Rules)) or interop.choices(spec) is not None:
        return True
    # A pytree of shardings has parts, also if it is a module that can be called.
    if not jax.tree_util.all_leaves([spec]):
        return True
    return not callable(spec) and hasattr(spec, "__dict__")


class Shardings:
    """Shardings of the leaves of a graph.

    Args:
        subject: what the spec is for, such as "the arguments", for messages.
        part: from a key path to the object at it, to which filters and `Rules` are applied.
        by_argument: whether a path begins with the index of an argument. Then `Rules` apply to each argument by itself,
            and a dict may have the names of arguments as keys.
    """

    def __init__(
        self,
        name: str,
        option: str,
        spec: object,
        subject: str,
        *,
        part: Callable[[Sequence[Any]], object],
        by_argument: bool = False,
    ) -> None:
        self._name, self._option, self._spec, self._subject = name, option, spec, subject
        self._message_fields = {"name": name, "option": option}
        self._selected: dict[tuple[int, Path], tuple[Graph, set[int]]] = {}
        # Specs with parts, and their key paths as text: by their ids, for which the specs are kept.
        self._containers: dict[tuple[int, Path], tuple[Any, str]] = {}
        # NNX makes new filters on each access. The first ones are kept, since `_selected` has selections by their ids.
        self._choices: dict[int, tuple[Any, list[tuple[Any, Any]] | None]] = {}
        self._pattern_used: dict[str, bool] = {}  # whether each pattern has decided about a leaf
        self._paths: list[str] = []
        self._graph_part, self._by_argument = part, by_argument
        self._by_graph: dict[tuple[int, Path], tuple[Graph, dict[int, Any]]] = {}
        self._unused: dict[int, set[str]] = {}  # rules of each `Rules` that have decided about no leaf

    def of_leaf(self, path: Sequence[object], named: Sequence[object], silent: bool = False) -> Any:
        """The sharding of a leaf.

        Args:
            path: the key path of the leaf in the spec.
            named: the same key path, beginning with the name of an argument.
            silent: return ABSENT if the spec has no entry for the leaf.

        Raises:
            ValueError: if the spec has no entry for the leaf, or one with parts.
        """
        # Descend along the path. At each node the spec may be one sharding for everything below, rules, a container
        # with an entry for each child, or a dict of patterns and filters.
        spec, full_path, is_entered = self._spec, tuple(path), False
        self._paths.append(keystr(full_path))
        for i, key in enumerate(full_path):
            spec = unwrapped(spec)
            if isinstance(spec, Rules):
                return self._by_rules(spec, full_path, i)
            if not has_parts(spec):
                return _plain(spec)
            # An entry under the key itself comes before a pattern or filter that covers the path.
            part = child_spec(spec, key) if interop.choices(spec) is None else ABSENT
            if part is ABSENT and (choices := self._choices_of(spec)) is not None:
                choice, part = self._deciding_choice(choices, full_path, i, named)
                an_argument = (
                    i == 0 and self._by_argument and isinstance(choice, str) and root_entries(choice)[:1] == named[:1]
                )
                # What a pattern covers has this entry as a whole. The name of an argument is a key of the container
                # instead: its entry may be a container for the argument's parts.
                if part is not ABSENT and not (an_argument and choice.isidentifier()):
                    if isinstance(part, Rules):
                        return self._by_rules(part, full_path, i)
                    return self._leaf_entry(part, named)
            elif part is not ABSENT and isinstance(plain_key(key), str):
                self._pattern_used[plain_key(key)] = True  # the name of a part is its pattern, too
            # The outermost container of each argument or result: `check` looks for entries without a part.
            if not is_entered and i >= int(self._by_argument) and part is not ABSENT:
                is_entered = True
                self._enter(spec, full_path[:i], named[: len(named) - len(full_path) + i])
            if part is ABSENT:
                if silent:
                    return ABSENT
                shown = self._path_text(named[: len(named) - len(full_path) + i + 1])
                raise ValueError(NO_SHARDING.format(spec=self._spec, path=shown, **self._message_fields))
            spec = part
        spec = unwrapped(spec)
        if isinstance(spec, Rules):
            return self._by_rules(spec, full_path, len(full_path))
        return self._leaf_entry(spec, named)

    def _choices_of(self, spec: object) -> list[tuple[Any, Any]] | None:
        """The patterns and filters of a spec, and their entries; None if it is not a dict of these."""
        if id(spec) not in self._choices:
            if isinstance(spec, dict):
                choices = list(cast("dict[Any, Any]", spec).items())
                if not choices or not all(isinstance(k, str) or as_filter(k) is not None for k, _ in choices):
                    choices = None
            else:
                choices = interop.choices(spec)
            self._choices[id(spec)] = spec, choices
        return self._choices[id(spec)][1]

    def _enter(self, spec: object, path: tuple[object, ...], named: Sequence[object]) -> None:
        """Notes a container, to be checked against the object at its path."""
        key = id(spec), Path(path)
        if key not in self._containers:
            self._containers[key] = spec, self._path_text(named)

    def _leaf_entry(self, spec: object, named: Sequence[object]) -> Any:
        if has_parts(spec):
            raise ValueError(SHARDING_TOO_DEEP.format(spec=spec, path=self._path_text(named), **self._message_fields))
        return _plain(spec)

    def _path_text(self, named: Sequence[object]) -> str:
        if named and isinstance(named[0], Root):
            return named[0].name + path_text(named[1:])
        return self._subject + path_text(named)

    def _by_rules(self, rules: Rules, path: tuple[object, ...], depth: int) -> Any:
        """The sharding that rules assign to a leaf; they apply to the object at `depth` entries of its path."""
        # Once for each object, at its first leaf.
        path_of_graph = Path(path[: max(depth, int(self._by_argument))])
        ruled = self._by_graph.get((id(rules), path_of_graph))
        if ruled is None:
            graph = Graph(self._graph_part(path_of_graph))
            assigned = rules.assign(graph)
            refuse(f"this {assigned.cls}", [f"  {a.path!r}: {a.problem}" for a in assigned.arrays if a.problem])
            # Of several objects under the same rules, one that uses a rule is enough.
            unused = self._unused.setdefault(id(rules), set(assigned.unused))
            unused.intersection_update(assigned.unused)
            ruled = graph, {id(array.leaf): sharding for array, sharding in assigned.shardings()}
            self._by_graph[id(rules), path_of_graph] = ruled
        graph, shardings = ruled
        value = graph.rows[graph.number(path[len(path_of_graph) :])].value
        return shardings.get(id(value))

    def _deciding_choice(
        self, choices: list[tuple[Any, Any]], path: tuple[object, ...], depth: int, named: Sequence[object]
    ) -> tuple[Any, Any]:
        """(the pattern or filter that decides about a leaf, its entry); they apply below its first `depth` entries."""
        for key, value in choices:
            leaf_filter = as_filter(key)
            if leaf_filter is not None:
                if self._is_selected(key, leaf_filter, path):
                    return key, value
                continue
            pattern: Pattern = argument_pattern(key, self._name, self._option)
            self._pattern_used.setdefault(key, False)
            if pattern.covers(path[depth:]) or pattern.covers(named):
                self._pattern_used[key] = True
                return key, value
        return None, ABSENT

    def _is_selected(self, key: object, leaf_filter: Filter, path: tuple[object, ...]) -> bool:
        path_of_graph = Path(path[: int(self._by_argument)])
        selection = self._selected.get((id(key), path_of_graph))
        if selection is None:
            graph = Graph(self._graph_part(path_of_graph))
            selection = self._selected[id(key), path_of_graph] = (
                graph,
                graph.descendants(leaf_filter.select(ObjectView(graph))),
            )
        graph, chosen = selection
        return graph.rows[graph.number(path[len(path_of_graph) :])].target in chosen

    def check_arguments(self, names: Sequence[str]) -> None:
        """Raises ValueError if the spec has entries for more arguments than there are."""
        spec: Any = self._spec
        if type(spec) not in (tuple, list):
            return
        if len(spec) > len(names):
            count_text = f"is {len(names)}" if len(names) == 1 else f"are {len(names)}"
            raise ValueError(TOO_MANY.format(actual=len(spec), are=count_text, **self._message_fields))
        # There may be fewer entries than arguments: an argument with arrays and no entry is an error of its own.
        for i, (part, name) in enumerate(zip(spec, names, strict=False)):
            self._enter(part, (SequenceKey(i),), (Root(name),))

    def check(self) -> None:
        """Raises ValueError for a pattern, a rule or an entry without effect: most likely it is misspelled."""
        for text, used in self._pattern_used.items():
            if not used:
                refuse_unused(text, self._name, self._option, self._paths)
        for (_, path), (spec, shown_path) in self._containers.items():
            self._refuse_unknown_parts(spec, self._graph_part(path), shown_path, set())
        for unused in self._unused.values():
            refuse(f"{self._subject} of {self._name}", [f"  the rule {rule} {UNUSED}" for rule in sorted(unused)])

    def _refuse_unknown_parts(self, spec: object, target: object, path: str, visited: set[tuple[int, int]]) -> None:
        """Raises ValueError if a spec has an entry for a part that `target` does not have."""
        spec = unwrapped(spec)
        key = id(spec), id(target)
        # Patterns, filters and rules are no entries for parts: that they have an effect is checked by itself.
        if key in visited or isinstance(spec, Rules) or not has_parts(spec) or interop.choices(spec) is not None:
            return
        visited.add(key)
        pairs = [(entry, value, child_spec(target, entry)) for entry, value in _entries(spec)]
        unknown_entries = [
            entry for entry, value, part in pairs if part is ABSENT and self._is_effective(spec, entry, value)
        ]
        if unknown_entries:
            names = [text for entry, _ in _entries(target) if not (text := path_text((entry,))).startswith("._")]
            shown = some([f"{path}{path_text((entry,))}" for entry in unknown_entries])
            raise ValueError(
                NO_PART.format(keys=shown, path=path, there=some(names) or "no parts", **self._message_fields)
            )
        for entry, value, part in pairs:
            if part is not ABSENT:
                self._refuse_unknown_parts(value, part, f"{path}{path_text((entry,))}", visited)

    def _is_effective(self, spec: Any, entry: Any, value: Any) -> bool:
        """Whether an entry for a missing part holds a sharding, and is not a pattern or filter that has decided."""
        if isinstance(spec, dict) and (self._pattern_used.get(entry.key) or as_filter(entry.key) is not None):
            return False
        return any(isinstance(row.value, _SHARDINGS) for row in Graph(value).rows)


def _entries(node: object) -> list[tuple[Any, Any]]:
    """The (key entry, child) pairs of a spec, or of the object that it is for."""
    if isinstance(node, Mapping):
        return [(DictKey(key), value) for key, value in cast("Mapping[Any, Any]", node).items()]
    return open_node(node)


def _plain(spec: object) -> Any:
    """The sharding that a spec without parts stands for: as in JAX, that of a `jax.ShapeDtypeStruct`."""
    spec = unwrapped(spec)
    return spec.sharding if isinstance(spec, jax.ShapeDtypeStruct) else spec
