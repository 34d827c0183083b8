# SPDX-License-Identifier: Apache-2.0
"""A transformed callable that is a pytree itself, as Equinox's wrappers are, and so can be a layer of a model."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
from jax.tree_util import GetAttrKey

F = TypeVar("F", bound=Callable[..., Any])

_NAMES = frozenset(("__signature__", "__annotations__", *functools.WRAPPER_ASSIGNMENTS))


class TransformCall:
    """A transform and its options: the aux data of a `PytreeFunction`.

    The options may be unhashable, so the hash covers the transform only.
    """

    def __init__(self, transform: Any, options: dict[str, Any]) -> None:
        self.transform, self.options = transform, options

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TransformCall):
            return NotImplemented
        return self.transform == other.transform and self.options == other.options

    def __hash__(self) -> int:
        return hash(self.transform)

    def __reduce__(self) -> Any:
        return type(self), (self.transform, self.options)


@jax.tree_util.register_pytree_with_keys_class
class PytreeFunction:
    """A `filter_*` transform of a callable pytree: a pytree with the same leaves.

    So `filter_vmap(linear)` is trained, saved and moved as `linear` is. JAX may unflatten it with leaves that are not
    arrays, and so with a part that is not callable, which is then not transformed.
    """

    __slots__ = ("__weakref__", "_applied", "_part", "_transform_call")

    def __init__(self, part: Any, transform_call: TransformCall) -> None:
        # `__wrapped__` of the transform is the one without this wrapping: `preserves_pytree` has put itself in front.
        self._part, self._transform_call = part, transform_call
        self._applied = transform_call.transform.__wrapped__(part, **transform_call.options) if callable(part) else part

    @property
    def __wrapped__(self) -> Any:
        return self._part

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._applied(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """In a class body it becomes a method, as Equinox's wrappers do."""
        return self if instance is None else jax.tree_util.Partial(self, instance)

    def __getattr__(self, name: str) -> Any:
        # Attributes of the transformed function, such as `lower`. Its private ones are not those of this object.
        if (name.startswith("_") and name not in _NAMES) or not callable(self._part):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self._applied, name)

    def __repr__(self) -> str:
        return f"<graftax.{self._transform_call.transform.__name__} of {self._part!r}>"

    def __reduce__(self) -> Any:
        return type(self), (self._part, self._transform_call)

    def tree_flatten(self) -> tuple[tuple[object], TransformCall]:
        return (self._part,), self._transform_call

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, object]], TransformCall]:
        return ((GetAttrKey("__wrapped__"), self._part),), self._transform_call

    @classmethod
    def tree_unflatten(cls, transform_call: TransformCall, parts: tuple[object]) -> PytreeFunction:
        return cls(*parts, transform_call)


def is_pytree(function: object) -> bool:
    """Is this callable a pytree with children?"""
    return type(function) is not types.FunctionType and not jax.tree_util.all_leaves([function])


def preserves_pytree(transform: F) -> F:
    """Decorates a transform: its result for a callable pytree is a pytree, too."""

    @functools.wraps(transform)
    def wrapper(fun: object = None, /, *args: object, **options: object) -> Any:
        if fun is None:  # a decorator, which calls this again with the function
            return transform(*args, **options)
        if args or not is_pytree(fun):
            return transform(fun, *args, **options)
        return PytreeFunction(fun, TransformCall(wrapper, options))

    return cast("F", wrapper)
