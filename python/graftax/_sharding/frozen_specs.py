# SPDX-License-Identifier: Apache-2.0
"""Hashable twins of sharding prefixes, so that the options of a jitted function can be compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from graftax import interop


def freeze(value: Any) -> Any:
    """A hashable twin of a sharding prefix: lists become tuples, dicts become `FrozenDict`s; others are `Held`."""
    value = value if (whole := interop.prefix(value)) is None else whole
    if isinstance(value, dict):
        return FrozenDict((k, freeze(v)) for k, v in value.items())
    if isinstance(value, list):
        return tuple(freeze(v) for v in value)
    if type(value) is tuple:
        return tuple(freeze(v) for v in value)
    try:
        hash(value)
    except TypeError:
        return Held(value)
    return value


class Held:
    """An object of shardings that does not hash, as a part of the options of a jitted function."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __repr__(self) -> str:
        return repr(self.held)


class FrozenDict(dict[Any, Any]):
    """A dict that is not written to, and hashes."""

    def __init__(self, items: Iterable[tuple[Any, Any]]) -> None:
        super().__init__(items)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))
