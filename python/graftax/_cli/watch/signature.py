# SPDX-License-Identifier: Apache-2.0
"""The signature of a call for which the `jit` of another library compiles, and how two of them differ."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

MADE_ANEW = "the function was created again, and each new function object is compiled"
NOTHING = "nothing in the arguments: a setting, a device or a cleared cache"
_LONGEST = 60  # characters of a value


class CallSignature(NamedTuple):
    """The structure of the arguments, and for each leaf its path and what is compared of it."""

    structure: Any
    leaves: tuple[tuple[str, str], ...]


class Parameters:
    """Which arguments of a function are declared static."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        try:
            self._signature: inspect.Signature | None = inspect.signature(function)
            names = list(self._signature.parameters)
        except (TypeError, ValueError):
            self._signature, names = None, []
        numbers = _several(options.get("static_argnums"))
        self.static = {*_several(options.get("static_argnames"))}
        self.static |= {names[number] for number in numbers if -len(names) <= number < len(names)}

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by their names."""
        if self._signature is not None:
            try:
                return dict(self._signature.bind(*args, **kwargs).arguments)
            except TypeError:  # the call will say so
                pass
        return {**{f"args[{i}]": arg for i, arg in enumerate(args)}, **kwargs}

    def call(self, named: dict[str, Any], numbers_are_traced: bool) -> CallSignature:
        """The signature of a call."""
        traced = {name: value for name, value in named.items() if name not in self.static}
        leaves, structure = jax.tree_util.tree_flatten_with_path(traced)
        described = [(_path(path), _described(leaf, numbers_are_traced)) for path, leaf in leaves]
        described += [(name, f"static {_short(named[name])}") for name in named if name in self.static]
        return CallSignature(structure, tuple(described))


def cause(call: CallSignature, earlier: Sequence[CallSignature], made_anew: bool) -> str:
    """Why a call was compiled: the differences to the most similar earlier call."""
    if not earlier:
        return "the first call"
    if call in earlier:
        return MADE_ANEW if made_anew else NOTHING
    nearest = max(earlier, key=lambda signature: len({*call.leaves} & {*signature.leaves}))
    earlier_leaves = dict(nearest.leaves)
    changed = [
        f"{path} was {earlier_leaves[path]}, is {leaf_text}"
        for path, leaf_text in call.leaves
        if earlier_leaves.get(path, leaf_text) != leaf_text
    ]
    if not changed or call.structure != nearest.structure:
        changed.append("the structure of the arguments")
    return "; ".join(changed[:3])


def _several(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, (int, str)) else tuple(value)


def _path(path: Sequence[Any]) -> str:
    return f"{getattr(path[0], 'key', path[0])}{jax.tree_util.keystr(tuple(path[1:]))}"


def _described(leaf: Any, numbers_are_traced: bool) -> str:
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        weak = " weak" if getattr(leaf, "weak_type", False) else ""
        return f"{leaf.dtype}{list(leaf.shape)}{weak}"
    if numbers_are_traced and isinstance(leaf, (bool, int, float, complex)):
        return type(leaf).__name__
    return _short(leaf)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # a `__repr__` of the user's
        text = f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
