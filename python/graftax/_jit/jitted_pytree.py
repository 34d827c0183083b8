# SPDX-License-Identifier: Apache-2.0
"""`filter_jit` of a callable pytree: a compiled function that is a pytree itself, as in Equinox."""

from __future__ import annotations

from typing import Any, ParamSpec, Self, TypeVar

import jax
from jax.tree_util import GetAttrKey

from graftax._jit.jitted import Jitted
from graftax._jit.options import Options

P = ParamSpec("P")
R = TypeVar("R")


@jax.tree_util.register_pytree_with_keys_class
class JittedPytree(Jitted[P, R]):
    """Its leaves are those of the callable, so that a compiled layer is trained, saved and moved as the layer is.

    JAX may unflatten it with leaves that are not arrays, and so with a part that is not callable. Such an instance
    only carries its part.
    """

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else jax.tree_util.Partial(self, instance)

    def tree_flatten(self) -> tuple[tuple[object], Options]:
        return (self.__wrapped__,), self._options

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, object]], Options]:
        return ((GetAttrKey("__wrapped__"), self.__wrapped__),), self._options

    @classmethod
    def tree_unflatten(cls, options: Options, parts: tuple[Any]) -> Self:
        if callable(*parts):
            return cls(*parts, options)
        jitted = cls.__new__(cls)
        jitted.__wrapped__, jitted._options = *parts, options
        return jitted
