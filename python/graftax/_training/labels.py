# SPDX-License-Identifier: Apache-2.0
"""`labels`: masks and labels of parameters, by patterns of key paths and by types."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Generator, Mapping
from typing import Any

from graftax._base.errors import StructureError, some
from graftax._graph.edit import selection
from graftax._graph.path import Graph, Path
from graftax._graph.patterns import Pattern

NO_LABEL = "graftax.labels: no rule says anything of {paths}. A last rule '**' is for all that is left."
ONLY_PATTERNS = (
    "graftax.labels: {rule!r} can be asked where a graftax.optimizer calls for labels; of a plain dict of parameters "
    "only patterns can."
)

# The model whose parameters a transformation is asked for, and where they stand.
_seen: contextvars.ContextVar[tuple[Graph, dict[str, list[int]]] | None] = contextvars.ContextVar("graftax_labels")


@contextlib.contextmanager
def seen_by_labels(graph: Graph, places: dict[str, list[int]]) -> Generator[None]:
    """While a transformation runs: the model that its labels are of."""
    token = _seen.set((graph, places))
    try:
        yield
    finally:
        _seen.reset(token)


class Labels:
    """What `labels` returns: a function of a dict of parameters."""

    def __init__(self, rules: Mapping[Any, Any]) -> None:
        self.rules = tuple(dict(rules).items())
        if not self.rules:
            raise ValueError("graftax.labels takes at least one rule: {'**': label}")

    def __call__(self, params: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        seen = _seen.get(None)
        for rule, label in self.rules:
            means = self._covered(params, rule, seen)
            found.update((name, label) for name in params if name in means and name not in found)
        left = [name for name in params if name not in found]
        if left:
            raise StructureError(NO_LABEL.format(paths=some(left)))
        return {name: found[name] for name in params}

    def _covered(
        self, params: Mapping[str, Any], rule: Any, seen: tuple[Graph, dict[str, list[int]]] | None
    ) -> set[str]:
        if seen is None:
            if not isinstance(rule, str):
                raise TypeError(ONLY_PATTERNS.format(rule=rule))
            pattern = Pattern(rule)
            return {name for name in params if pattern.covers(Path.parse(name))}
        graph, places = seen
        chosen = selection(graph, rule, (place for name in params for place in places.get(name, ())))
        return {name for name in params if not chosen.isdisjoint(places.get(name, ()))}

    def __repr__(self) -> str:
        return f"graftax.labels({dict(self.rules)!r})"


def labels(rules: Mapping[Any, Any]) -> Labels:
    """Labels of parameters, or a mask of them, by rules: for the transformations that a `graftax.optimizer` runs.

    Args:
        rules: from a pattern of key paths (`"**.bias"`, `"encoder"`), a type (`nnx.BatchNorm`) or a predicate of
            arrays to a label. A pattern covers all that is below what it means. The first rule that fits counts.

    Returns:
        what Optax takes for `mask=` (with True and False as labels) and for the labels of `multi_transform`.

    Raises:
        StructureError: when it is used, where a pattern matches nothing, and where no rule fits.

    Example:
        >>> import optax
        >>> no_decay = graftax.labels({"**[b]": False, "**": True})
        >>> opt = graftax.optimizer(optax.adamw(1e-3, mask=no_decay), {"w": jnp.ones(2), "b": jnp.zeros(2)})
        >>> no_decay({"[w]": 1, "[b]": 2})
        {'[w]': True, '[b]': False}
    """
    return Labels(rules)
