# SPDX-License-Identifier: Apache-2.0
"""Key paths: tuples of JAX's own key entries, that print, compare and hash."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, cast

from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

__all__ = ["DictKey", "FlattenedIndexKey", "GetAttrKey", "Path", "Ref", "SequenceKey"]


class Path(tuple[Any, ...]):
    """A place in an object graph: a tuple of `SequenceKey`, `DictKey`, `GetAttrKey` and `FlattenedIndexKey`.

    Example:
        >>> from jax.tree_util import DictKey, GetAttrKey, SequenceKey
        >>> str(graftax.Path([DictKey("a"), SequenceKey(0), GetAttrKey("w")]))
        '[a][0].w'
    """

    __slots__ = ()

    def __str__(self) -> str:
        return "".join(f"[{k.key}]" if isinstance(k, DictKey) else str(k) for k in self)

    def __repr__(self) -> str:
        return f"obj{self}"

    def __eq__(self, other: object) -> bool:
        # 1, True and 1.0 name one entry of a dict, yet they are different keys.
        return isinstance(other, Path) and tuple.__eq__(self, other) and self._types() == other._types()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return tuple.__hash__(self)

    def __add__(self, other: Any) -> Path:  # type: ignore[override]
        return Path((*self, *other))

    def _types(self) -> list[tuple[type, type]]:
        return [(type(k), type(getattr(k, "key", None))) for k in self]


_STEP = re.compile(r"\*\*|\*|[^*]+")


def matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """A test of key paths as messages print them (`state.layers[0].w`, `params['w']`).

    A pattern covers a path and everything below it. `*` stands for one name, key or index, `**` for any number of
    steps: `model.layers[*].bias`, `**.bias`. Quotes around keys may be left out.
    """
    parts: list[str] = []
    for pattern in patterns:
        wild: dict[str, str] = {"**": r".*", "*": r"[^.\[\]]*"}
        text = pattern.replace("'", "").replace('"', "")
        parts.append("".join(wild[p] if p in wild else re.escape(p) for p in cast("list[str]", _STEP.findall(text))))
    if not parts:
        return lambda path: False
    compiled = re.compile(rf"(?:{'|'.join(parts)})(?:[.\[].*)?", re.DOTALL)
    return lambda path: compiled.fullmatch(path.replace("'", "").replace('"', "")) is not None


class Ref:
    """Stands, in the flat form of `to_dict`, for the node that is found at `path`."""

    __slots__ = ("path",)

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"Ref({self.path!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and self.path == other.path

    def __hash__(self) -> int:
        return hash((Ref, self.path))
