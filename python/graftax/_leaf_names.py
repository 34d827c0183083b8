# SPDX-License-Identifier: Apache-2.0
"""Flat leaves under their key paths: what JAX calls them in programs, profiles, logs and errors."""

from __future__ import annotations

import inspect
from typing import Any

from . import _core
from ._plan import leaf_names


class LeafNames(inspect.Signature):
    """The signature of a flat function, as JAX asks it which argument a leaf is: while it traces, and never in a call.

    A name such as `model.enc['w']` is none that a parameter may have, so it is the binding that names the leaves. JAX
    keeps it as long as the function, so it holds texts alone: a structure leads to the caller's classes.
    """

    def __init__(self, graphdef: _core.GraphDef, names: tuple[str, ...], tupled: bool) -> None:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if tupled else inspect.Parameter.VAR_POSITIONAL
        super().__init__([inspect.Parameter("leaves", kind)])
        found, self._tupled = leaf_names(graphdef, names), tupled
        # An array that is a leaf again under another donated name would else take its place.
        self.names = found if len(set(found)) == len(found) else [f"{name} ({i})" for i, name in enumerate(found)]

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        (leaves,) = args if self._tupled and len(args) == 1 else (args,)
        bound = super().bind(*args, **kwargs)
        names = self.names
        if isinstance(leaves, tuple) and len(leaves) == len(names) + 2:  # what the host computes of symbolic numbers
            names = [*names, "whole numbers", "floating numbers"]
        if isinstance(leaves, tuple) and len(leaves) == len(names):
            bound.arguments = dict(zip(names, leaves, strict=True))
        return bound
