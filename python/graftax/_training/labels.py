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

NO_LABEL = "graftax.labels: no rule matches {paths}. Add a last rule '**' for everything else."
ONLY_PATTERNS = (
    "graftax.labels: the rule {rule!r} works only in a graftax.optimizer; for a plain dict of parameters, use patterns."
)

# While a transformation runs: the model whose parameters it works on, and the rows of each parameter.
_labelled: contextvars.ContextVar[tuple[Graph, dict[str, list[int]]] | None] = contextvars.ContextVar("graftax_labels")


@contextlib.contextmanager
def use_for_labels(graph: Graph, rows: dict[str, list[int]]) -> Generator[None]:
    """Sets the model that labels are computed for while a transformation runs."""
    token = _labelled.set((graph, rows))
    try:
        yield
    finally:
        _labelled.reset(token)


class Labels:
    """What `labels` returns: a function of a dict of parameters."""

    def __init__(self, rules: Mapping[Any, Any]) -> None:
        self.rules = tuple(dict(rules).items())
        if not self.rules:
            raise ValueError("graftax.labels takes at least one rule: {'**': label}")

    def __call__(self, params: Mapping[str, Any]) -> dict[str, Any]:
        label_of: dict[str, Any] = {}
        # Optax calls it with the dict of parameters alone, within `init` and `update` of the optimizer.
        labelled = _labelled.get(None)
        for rule, label in self.rules:
            covered = self._covered(params, rule, labelled)
            label_of.update((name, label) for name in params if name in covered and name not in label_of)
        unlabelled = [name for name in params if name not in label_of]
        if unlabelled:
            raise StructureError(NO_LABEL.format(paths=some(unlabelled)))
        return {name: label_of[name] for name in params}

    def _covered(
        self, params: Mapping[str, Any], rule: Any, labelled: tuple[Graph, dict[str, list[int]]] | None
    ) -> set[str]:
        # Outside of an optimizer there is no model, and the names of the parameters are taken for their key paths.
        if labelled is None:
            if not isinstance(rule, str):
                raise TypeError(ONLY_PATTERNS.format(rule=rule))
            pattern = Pattern(rule)
            return {name for name in params if pattern.covers(Path.parse(name))}
        graph, rows_of = labelled
        chosen = selection(graph, rule, (row for name in params for row in rows_of.get(name, ())))
        return {name for name in params if not chosen.isdisjoint(rows_of.get(name, ()))}

    def __repr__(self) -> str:
        return f"graftax.labels({dict(self.rules)!r})"


def labels(rules: Mapping[Any, Any]) -> Labels:
    """Labels or masks of parameters by rules, for transformations that a `graftax.optimizer` runs.

    Args:
        rules: a dict from a pattern of key paths (`"**.bias"`, `"encoder"`), a type (`nnx.BatchNorm`) or a predicate of
            arrays to a label. A pattern covers everything below its matches. The first rule that matches decides.

    Returns:
        a function that Optax accepts as `mask=` (with True and False as labels), and as the labels of
        `optax.multi_transform`.

    Raises:
        ValueError: if there is no rule.
        StructureError: when it is used, if a pattern matches nothing or a parameter has no rule.

    Example:
        >>> import optax
        >>> no_decay = graftax.labels({"**[b]": False, "**": True})
        >>> opt = graftax.optimizer(optax.adamw(1e-3, mask=no_decay), {"w": jnp.ones(2), "b": jnp.zeros(2)})
        >>> no_decay({"[w]": 1, "[b]": 2})
        {'[w]': True, '[b]': False}
    """
    return Labels(rules)
