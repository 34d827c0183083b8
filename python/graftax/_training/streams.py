# SPDX-License-Identifier: Apache-2.0
"""`Streams`: random keys by name, each from a key that stays and a count that comes back."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from graftax._base.errors import some
from graftax._graph.patterns import nearest

NO_STREAMS = (
    "graftax.Streams takes names: graftax.Streams(0, 'params', 'dropout'), or graftax.Streams(params=0, dropout=1)."
)
NO_SEED = (
    "graftax.Streams: {names} {have} no seed. Give one for all, graftax.Streams(0, ...), or each its own, {first}=0."
)
NOT_A_SEED = "graftax.Streams: a seed is an int or a random key (jax.random.key), and {name} is {actual}."
UNKNOWN = "Streams: there is no stream {name!r}. {near}Name every stream at creation: drawing only changes the counts."


class Streams:
    """Random keys by name. Each name has its own counter, so that more dropout does not change the initializers.

    A draw is `jax.random.fold_in(key of the name, count)`, and increments the count, an array. `jit`, `scan`, `cond`,
    `grad` and `vmap` of this package update it like any other array. All layers share one `Streams` object.

    Args:
        seed: an int or a random key. The key of each name is derived from it, independently of other names.
        *names: the names of streams.
        **seeds: names with their own seeds or keys. They draw the same keys as `nnx.Rngs` with these seeds.

    Raises:
        TypeError: if there is no name, or if a name has no seed or something else as its seed.

    Example:
        >>> streams = graftax.Streams(0, "params", "dropout")
        >>> @graftax.jit
        ... def noise(streams):
        ...     return jax.random.normal(streams("dropout"))
        >>> bool(noise(streams) == noise(streams)), streams
        (False, Streams(params: 0, dropout: 2))
    """

    def __init__(self, seed: Any = None, /, *names: str, **seeds: Any) -> None:
        if not (names or seeds):
            raise TypeError(NO_STREAMS)
        if names and seed is None:
            verb = "has" if len(names) == 1 else "have"
            raise TypeError(NO_SEED.format(names=some(list(names)), have=verb, first=names[0]))
        keys = {}
        if names:
            base = _key("the first argument", seed)
            # crc32 is the same in every process, and another name changes nothing.
            keys = {name: jax.random.fold_in(base, zlib.crc32(name.encode())) for name in names}
        self.keys: dict[str, Any] = {**keys, **{name: _key(name, seed) for name, seed in seeds.items()}}
        # Split keys have a count for each row, so that `vmap` maps both.
        self.counts: dict[str, Any] = {name: jnp.zeros(_shape(key), jnp.uint32) for name, key in self.keys.items()}

    def __call__(self, name: str) -> jax.Array:
        """The next key of a stream.

        Args:
            name: the name of the stream.

        Raises:
            KeyError: if there is no such stream.
        """
        if name not in self.keys:
            near = nearest(name, iter(self.keys))
            raise KeyError(UNKNOWN.format(name=name, near=f"It has {near}. " if near else ""))
        key = jax.random.fold_in(self.keys[name], self.counts[name])
        self.counts[name] = self.counts[name] + 1
        return key

    def fork(self, *names: str) -> Streams:
        """New streams, each from the next key of its name, for a part that draws independently.

        Args:
            *names: the streams to fork; by default all.
        """
        return Streams(**{name: self(name) for name in names or tuple(self.keys)})

    def split(self, count: int | tuple[int, ...], *names: str) -> Streams:
        """As `fork`, with a row for each member of a `vmap`: `graftax.vmap(Model)(streams.split(5))`.

        Args:
            count: the number of rows, or a tuple of numbers for a `vmap` in a `vmap`.
            *names: the streams to split; by default all.
        """
        return Streams(**{name: jax.random.split(self(name), count) for name in names or tuple(self.keys)})

    def __repr__(self) -> str:
        counts = [f"{name}: {_counted(count)}" for name, count in self.counts.items()]
        return f"Streams({', '.join(counts)})"


def _key(name: str, seed: Any) -> Any:
    # A bool is an int in Python, and most likely a mistake here.
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool):
        return jax.random.key(seed)
    # JAX's old form of a key is an array of uint32, as `jax.random.PRNGKey` makes it.
    if isinstance(seed, jax.Array) and (jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) or seed.dtype == jnp.uint32):
        return seed
    seed_text = f"of dtype {seed.dtype}" if isinstance(seed, jax.Array) else type(seed).__qualname__
    raise TypeError(NOT_A_SEED.format(name=name, actual=seed_text))


def _shape(key: Any) -> tuple[int, ...]:
    """The shape of an array of keys, which in JAX's old form have one more axis."""
    return key.shape if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key.shape[:-1]


def _counted(count: Any) -> str:
    if isinstance(count, Tracer):
        return "traced"
    return str(int(count)) if np.ndim(count) == 0 else f"{np.shape(count)[0]} rows"
