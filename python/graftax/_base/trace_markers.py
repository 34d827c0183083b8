# SPDX-License-Identifier: Apache-2.0
"""`Static` and `Dynamic`: say of one value, wherever it stands, whether it is traced."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Static(Generic[T]):
    """Makes a value static: all of it, arrays included, is part of the cache key.

    NumPy arrays in it are compared by value, JAX arrays by identity. The function receives the `Static` itself, and
    reads `value`.

    Args:
        value: any value that may be an argument of a compiled function.

    Example:
        >>> @graftax.jit
        ... def f(x, table):
        ...     return x * table.value.max()  # a number when f is traced
        >>> f(jnp.ones(2), graftax.Static(np.arange(3.0)))
        Array([2., 2.], dtype=float32)
    """

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Static({self.value!r})"


class Dynamic(Generic[T]):
    """Traces the Python numbers in a value, so that another number does not compile again.

    The function receives the `Dynamic` itself, and reads `value`. As in plain Python, it may assign `value`.

    Args:
        value: a Python number, or an object or container with numbers.

    Example:
        >>> @graftax.jit
        ... def f(x, rate):
        ...     return x * rate.value
        >>> for rate in (0.5, 2.0):
        ...     y = f(jnp.ones(2), graftax.Dynamic(rate))
        >>> y, f.cache_info().traces
        (Array([2., 2.], dtype=float32), 1)
    """

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Dynamic({self.value!r})"
