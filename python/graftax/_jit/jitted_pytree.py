# SPDX-License-Identifier: Apache-2.0
"""What `filter_jit` makes of a callable that JAX knows as a tree: a compiled function that is a tree, as in Equinox."""

from __future__ import annotations

from typing import Any, ParamSpec, Self, TypeVar

import jax
from jax.tree_util import GetAttrKey

from graftax._jit.jitted import Jitted
from graftax._jit.options import Options

P = ParamSpec("P")
R = TypeVar("R")


@jax.tree_util.register_pytree_with_keys_class
class JittedTree(Jitted[P, R]):
    """Its leaves are those of the callable, so that a compiled layer is trained, saved and moved as the layer is.

    JAX opens it and makes it again of other leaves, which may be no arrays. What then is no function is not called.
    """

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else jax.tree_util.Partial(self, instance)

    def tree_flatten(self) -> tuple[tuple[Any], Options]:
        return (self.__wrapped__,), self._options

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], Options]:
        return ((GetAttrKey("__wrapped__"), self.__wrapped__),), self._options

    @classmethod
    def tree_unflatten(cls, options: Options, parts: tuple[Any]) -> Self:
        if callable(*parts):
            return cls(*parts, options)
        made = cls.__new__(cls)
        made.__wrapped__, made._options = *parts, options
        return made


@jax.tree_util.register_pytree_with_keys_class
class MethodOfATree(Jitted[P, R]):
    """A compiled method of an object that JAX knows as a tree: its leaves are the object's."""

    def tree_flatten(self) -> tuple[tuple[Any], Jitted[Any, R]]:
        return (self.__self__,), self._method_of

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], Jitted[Any, R]]:
        return ((GetAttrKey("__self__"), self.__self__),), self._method_of

    @classmethod
    def tree_unflatten(cls, method: Jitted[Any, R], parts: tuple[Any]) -> Self:
        made = cls.__new__(cls)
        method.bind(made, *parts)
        return made


Jitted._method_of_a_tree = MethodOfATree  # pyright: ignore[reportPrivateUsage]
