# SPDX-License-Identifier: Apache-2.0
"""Hashable forms of sharding prefixes, so that the options of a jitted function can be compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from graftax import interop


def freeze(value: Any) -> Any:
    """A hashable form of a sharding prefix.

    Lists become tuples, dicts become `FrozenDict`s, and other unhashable objects are wrapped in `UnhashableSpec`.
    """
    value = value if (adapted := interop.prefix(value)) is None else adapted
    if isinstance(value, dict):
        return FrozenDict((k, freeze(v)) for k, v in value.items())
    # A namedtuple keeps its class, with which it is a prefix of an object of that class.
    if isinstance(value, list) or type(value) is tuple:
        return tuple(freeze(v) for v in value)
    # JAX's shardings are hashable. An object of the user's class that has shardings in it need not be.
    try:
        hash(value)
    except TypeError:
        return UnhashableSpec(value)
    return value


class UnhashableSpec:
    """An unhashable object with shardings, compared by identity as part of the options of a jitted function."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


def unwrapped(spec: Any) -> Any:
    return spec.value if isinstance(spec, UnhashableSpec) else spec


class FrozenDict(dict[Any, Any]):
    """A hashable dict, which nobody may write to."""

    def __init__(self, items: Iterable[tuple[Any, Any]]) -> None:
        super().__init__(items)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))
