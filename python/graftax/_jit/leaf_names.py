# SPDX-License-Identifier: Apache-2.0
"""Flat leaves under their key paths: what JAX calls them in programs, profiles, logs and errors."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

from graftax import _core


def leaf_names(graphdef: _core.GraphDef, root_names: tuple[str, ...]) -> list[str]:
    """One name a leaf: `params['w']`, `model.layers[0].bias`."""
    return graphdef._leaf_names(root_names)  # pyright: ignore[reportPrivateUsage]


_TUPLED = [inspect.Parameter("leaves", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
_APART = [inspect.Parameter("leaves", inspect.Parameter.VAR_POSITIONAL)]


class LeafNames(inspect.Signature):
    """The signature of a flat function, as JAX asks it which argument a leaf is: while it traces, and never in a call.

    A name such as `model.enc['w']` is none that a parameter may have, so it is the binding that names the leaves. JAX
    keeps it as long as the function, so it refers to the structure of the entry weakly: that leads to the caller's
    classes. The names are spelled when they are asked for, once a trace; JAX keeps texts of its own.
    """

    def __init__(self, graphdef: _core.GraphDef, roots: tuple[str, ...], tupled: bool) -> None:
        super().__init__(_TUPLED if tupled else _APART)
        self._tupled, self._roots = tupled, roots
        self._graphdef = weakref.ref(graphdef)

    @property
    def names(self) -> list[str]:
        """One a leaf, all different; none once the entry is gone."""
        graphdef = self._graphdef()
        found = [] if graphdef is None else leaf_names(graphdef, self._roots)
        # An array that is a leaf again under another donated name would else take its place.
        same = len(set(found)) < len(found)
        return [f"{name} ({i})" for i, name in enumerate(found)] if same else found

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        (leaves,) = args if self._tupled and len(args) == 1 else (args,)
        bound = super().bind(*args, **kwargs)
        names = self.names
        if isinstance(leaves, tuple) and len(leaves) == len(names) + 2:  # what the host computes of symbolic numbers
            names = [*names, "whole numbers", "floating numbers"]
        if isinstance(leaves, tuple) and len(leaves) == len(names):
            bound.arguments = dict(zip(names, leaves, strict=True))
        return bound
