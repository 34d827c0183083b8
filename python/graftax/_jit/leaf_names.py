# SPDX-License-Identifier: Apache-2.0
"""Key paths as the names of flat leaves in JAX's programs, profiles, logs and errors."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

from graftax import _core


def leaf_names(graphdef: _core.GraphDef, root_names: tuple[str, ...]) -> list[str]:
    """One name a leaf: `params['w']`, `model.layers[0].bias`."""
    return graphdef._leaf_names(root_names)  # pyright: ignore[reportPrivateUsage]


_TUPLED = [inspect.Parameter("leaves", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
_SEPARATE = [inspect.Parameter("leaves", inspect.Parameter.VAR_POSITIONAL)]


class LeafNames(inspect.Signature):
    """The signature of a flat function: JAX binds it, once a trace, to find the name of each leaf.

    A parameter cannot be called `model.enc['w']`, so `bind` puts such names into the bound arguments instead. JAX keeps
    the signature as long as the function. It refers to the GraphDef weakly, because that leads to the user's classes.
    """

    def __init__(self, graphdef: _core.GraphDef, roots: tuple[str, ...], tupled: bool) -> None:
        super().__init__(_TUPLED if tupled else _SEPARATE)
        self._tupled, self._roots = tupled, roots
        self._graphdef = weakref.ref(graphdef)

    @property
    def names(self) -> list[str]:
        """One distinct name a leaf; empty once the entry is gone."""
        graphdef = self._graphdef()
        names = [] if graphdef is None else leaf_names(graphdef, self._roots)
        # One array may be two leaves of the same name. `bind` makes a dict, which would lose one of them.
        has_duplicates = len(set(names)) < len(names)
        return [f"{name} ({i})" for i, name in enumerate(names)] if has_duplicates else names

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        (leaves,) = args if self._tupled and len(args) == 1 else (args,)
        bound = super().bind(*args, **kwargs)
        names = self.names
        if (
            isinstance(leaves, tuple) and len(leaves) == len(names) + 2
        ):  # two vectors that the host computes from symbolic numbers
            names = [*names, "whole numbers", "floating numbers"]
        if isinstance(leaves, tuple) and len(leaves) == len(names):
            bound.arguments = dict(zip(names, leaves, strict=True))
        return bound
