# SPDX-License-Identifier: Apache-2.0
"""Flax's `TrainState`: its count of steps is data, which begins as a Python number."""

from __future__ import annotations

from typing import Any

from flax.training.train_state import TrainState

from graftax._base.type_record import Description


def describe(cls: type[Any]) -> Description | None:
    """Describes a state by its dataclass fields. None for other classes."""
    if not issubclass(cls, TrainState):
        return None
    fields: dict[str, Any] = cls.__dataclass_fields__
    static = frozenset(name for name, field in fields.items() if not field.metadata.get("pytree_node", True))
    return Description("node", static_fields=static, order=tuple(fields), dynamic_fields=frozenset({"step"}))
