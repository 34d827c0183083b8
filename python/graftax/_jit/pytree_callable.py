# SPDX-License-Identifier: Apache-2.0
"""A transformed callable that is itself a tree of JAX, as Equinox's wrappers are: what a layer of a model may be."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
from jax.tree_util import GetAttrKey

F = TypeVar("F", bound=Callable[..., Any])

_NAMES = frozenset(("__signature__", "__annotations__", *functools.WRAPPER_ASSIGNMENTS))


class MadeBy:
    """A transform and its options: what is static of a `TreeFunction`. Equality is exact, the hash weak."""

    def __init__(self, transform: Any, options: dict[str, Any]) -> None:
        self.transform, self.options = transform, options

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MadeBy):
            return NotImplemented
        return self.transform == other.transform and self.options == other.options

    def __hash__(self) -> int:
        return hash(self.transform)

    def __reduce__(self) -> Any:
        return type(self), (self.transform, self.options)


@jax.tree_util.register_pytree_with_keys_class
class TreeFunction:
    """What a `filter_*` transform makes of a callable that JAX knows as a tree: a tree with the same leaves.

    So `filter_vmap(linear)` is trained, saved and moved as `linear` is. JAX opens it and makes it again of other
    leaves, which may be no arrays: what then is no function is not transformed.
    """

    __slots__ = ("__weakref__", "_applied", "_made_by", "_part")

    def __init__(self, part: Any, made_by: MadeBy) -> None:
        self._part, self._made_by = part, made_by
        self._applied = made_by.transform.__wrapped__(part, **made_by.options) if callable(part) else part

    @property
    def __wrapped__(self) -> Any:
        return self._part

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._applied(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """In the body of a class it is a method, as Equinox's wrappers are."""
        return self if instance is None else jax.tree_util.Partial(self, instance)

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("_") and name not in _NAMES) or not callable(self._part):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self._applied, name)

    def __repr__(self) -> str:
        return f"<graftax.{self._made_by.transform.__name__} of {self._part!r}>"

    def __reduce__(self) -> Any:
        return type(self), (self._part, self._made_by)

    def tree_flatten(self) -> tuple[tuple[Any], MadeBy]:
        return (self._part,), self._made_by

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], MadeBy]:
        return ((GetAttrKey("__wrapped__"), self._part),), self._made_by

    @classmethod
    def tree_unflatten(cls, made_by: MadeBy, parts: tuple[Any]) -> TreeFunction:
        return cls(*parts, made_by)


def is_tree(function: Any) -> bool:
    """Does JAX open this callable?"""
    return type(function) is not types.FunctionType and not jax.tree_util.all_leaves([function])


def of_trees(transform: F) -> F:
    """A transform whose result for a tree is a tree."""

    @functools.wraps(transform)
    def given(fun: Any = None, /, *args: Any, **options: Any) -> Any:
        if fun is None:  # a decorator, which comes back here
            return transform(*args, **options)
        if args or not is_tree(fun):
            return transform(fun, *args, **options)
        return TreeFunction(fun, MadeBy(given, options))

    return cast("F", given)
