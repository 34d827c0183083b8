# SPDX-License-Identifier: Apache-2.0
"""The signature of a call for which the `jit` of another library compiles, and how two of them differ."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from graftax._jit.options import one_or_more

MADE_ANEW = "the function was created again, and each new function object is compiled"
NOTHING = "nothing in the arguments: a setting, a device or a cleared cache"
_LONGEST = 60  # characters of a value


class CallSignature(NamedTuple):
    """What is compared of a call: the structure of the arguments, their leaves, and the texts of those that are static.

    It is made on each call, so it holds no text of what a leaf or its path is.
    """

    structure: Any
    leaves: tuple[Any, ...]
    static: tuple[tuple[str, str], ...]


class CompiledCall(NamedTuple):
    """A call that may compile, described for people: by path, what is compared of each leaf."""

    signature: CallSignature
    texts: dict[str, str]


class Parameters:
    """Which arguments of a function are declared static."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        try:
            self._signature: inspect.Signature | None = inspect.signature(function)
            names = list(self._signature.parameters)
        except (TypeError, ValueError):
            self._signature, names = None, []
        numbers = one_or_more(options.get("static_argnums"))
        self.static = {*one_or_more(options.get("static_argnames"))}
        self.static |= {names[number] for number in numbers if -len(names) <= number < len(names)}

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by their names."""
        if self._signature is not None:
            try:
                return dict(self._signature.bind(*args, **kwargs).arguments)
            # The call itself will raise the error.
            except TypeError:
                pass
        return {**{f"args[{i}]": arg for i, arg in enumerate(args)}, **kwargs}

    def call(self, named: dict[str, Any], numbers_are_traced: bool) -> CallSignature:
        """The signature of a call."""
        leaves, structure = jax.tree_util.tree_flatten(self._traced(named))
        # This runs on each call, and a list comprehension is faster than a generator.
        facts = tuple([_facts(leaf, numbers_are_traced) for leaf in leaves])
        static = tuple([(name, f"static {_short(named[name])}") for name in named if name in self.static])
        return CallSignature(structure, facts, static)

    def described(self, named: dict[str, Any], signature: CallSignature) -> CompiledCall:
        """The signature of a call, with the text of each leaf by its path."""
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(self._traced(named))[0]]
        texts = {_path(path): _text(facts) for path, facts in zip(paths, signature.leaves, strict=True)}
        return CompiledCall(signature, {**texts, **dict(signature.static)})

    def _traced(self, named: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in named.items() if name not in self.static}


def cause(call: CompiledCall | None, previous: Sequence[CompiledCall], made_anew: bool) -> str:
    """Why a call was compiled: how it differs from the nearest previous call. None: a call equal to one of these."""
    if not previous:
        return "the first call"
    if call is None or any(call.signature == known_call.signature for known_call in previous):
        return MADE_ANEW if made_anew else NOTHING
    nearest = max(previous, key=lambda candidate: len(call.texts.items() & candidate.texts.items()))
    changed = [
        f"{path} was {nearest.texts[path]}, is {text}"
        for path, text in call.texts.items()
        if nearest.texts.get(path, text) != text
    ]
    if not changed or call.signature.structure != nearest.signature.structure:
        changed.append("the structure of the arguments")
    return "; ".join(changed[:3])


def _path(path: Sequence[Any]) -> str:
    return f"{getattr(path[0], 'key', path[0])}{jax.tree_util.keystr(tuple(path[1:]))}"


def _facts(leaf: object, numbers_are_traced: bool) -> Any:
    """What is compared of a leaf: the dtype, the shape and the weak type of an array, or a text."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return leaf.dtype, leaf.shape, getattr(leaf, "weak_type", False)
    if numbers_are_traced and isinstance(leaf, (bool, int, float, complex)):
        return type(leaf).__name__
    return _short(leaf)


def _text(facts: Any) -> str:
    if isinstance(facts, str):
        return facts
    dtype, shape, is_weak = facts
    return f"{dtype}{list(shape)}{' weak' if is_weak else ''}"


def _short(value: object) -> str:
    # A `__repr__` of the user's may raise.
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
