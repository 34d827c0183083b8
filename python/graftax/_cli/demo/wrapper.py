# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""The smallest `jit` that takes any leaf: one pytree node whose aux data hides what is not an array.

It splits once on each side of the call, as graftax does. It pays JAX's own flatten on top, looks its
statics up in a linear search, and knows nothing of references or mutation.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax


@jax.tree_util.register_pytree_node_class
class Hidden:
    """A tree of which JAX sees the arrays only."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def tree_flatten(self) -> tuple[list[Any], Any]:
        leaves, treedef = jax.tree.flatten(self.tree)
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        statics = tuple(None if isinstance(leaf, jax.Array) else (leaf,) for leaf in leaves)
        return arrays, (treedef, statics)

    @classmethod
    def tree_unflatten(cls, aux: Any, arrays: Any) -> "Hidden":
        treedef, statics = aux
        arrays_left = iter(arrays)
        return cls(treedef.unflatten(next(arrays_left) if static is None else static[0] for static in statics))


def wrapper_jit(fun: Callable[..., Any], node: type[Hidden] = Hidden) -> Callable[..., Any]:
    """Compile `fun`, tracing the arrays among its arguments; everything else is static."""

    @jax.jit
    def hidden(inputs: Hidden) -> Hidden:
        args, kwargs = inputs.tree
        return node(fun(*args, **kwargs))

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        return hidden(node((args, kwargs))).tree

    return call
