# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: the names that `GRAFTAX_NAMES` says are graftax's before a test is imported."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import graftax


def of_equinox(only: str | None = None) -> None:
    import equinox

    for name in dir(graftax):
        if name.startswith("filter_") and hasattr(equinox, name) and only in (None, name):
            setattr(equinox, name, getattr(graftax, name))


_OF_NNX_ALONE = ("graph", "graph_updates", "device", "backend", "_split_transpose")


def _spelled(transform: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    """A transform of graftax that is called as NNX's is: its modes fall away."""

    @functools.wraps(transform)
    def called(*args: Any, **options: Any) -> Any:
        options = {**more, **{name: value for name, value in options.items() if name not in _OF_NNX_ALONE}}
        if not args and transform is graftax.custom_vjp:  # a class: without a function and options it is no decorator
            return functools.partial(called, **options)
        return transform(*args, **options)

    return called


def _gradient(transform: Callable[..., Any]) -> Callable[..., Any]:
    """NNX gives the state of its Params alone as the gradient of a module; graftax a module, of all floats."""
    from flax import nnx

    def as_state(gradient: Any, argument: Any) -> Any:
        wanted = argument.filter if isinstance(argument, nnx.DiffState) else nnx.Param
        return nnx.state(gradient, wanted) if isinstance(gradient, nnx.Module) else gradient

    def called(function: Any = None, *, argnums: Any = 0, has_aux: bool = False, **options: Any) -> Any:
        as_tree = options.get("graph") is False or options.get("graph_updates") is False
        if function is None:
            return functools.partial(called, argnums=argnums, has_aux=has_aux, **options)
        options = {name: value for name, value in options.items() if name not in _OF_NNX_ALONE}
        several = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
        by_filter = any(isinstance(argument, nnx.DiffState) for argument in several)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            modules = all(isinstance(args[a], nnx.Module) for a in several) if not (by_filter or as_tree) else False
            wrt = {"wrt": nnx.Param} if modules else {}
            found = transform(function, argnums=argnums, has_aux=has_aux, **wrt, **options)(*args, **kwargs)
            if as_tree:
                return found
            first = transform is graftax.grad and has_aux
            gradients = found if transform is graftax.grad and not has_aux else found[0 if first else 1]
            pairs = zip(gradients, several, strict=True) if gradients.__class__ is tuple else None
            states = tuple(as_state(*pair) for pair in pairs) if pairs else as_state(gradients, several[0])
            if transform is graftax.grad:
                return (states, found[1]) if has_aux else states
            return found[0], states

        return run

    return called


def of_nnx() -> None:
    from flax import nnx

    plain = "vmap scan cond switch eval_shape while_loop fori_loop custom_vjp jvp vjp shard_map"
    for name in plain.split():
        setattr(nnx, name, _spelled(getattr(graftax, name)))
    nnx.jit = _spelled(graftax.jit, warn_impure=False)
    nnx.remat = _spelled(graftax.checkpoint)
    nnx.grad, nnx.value_and_grad = _gradient(graftax.grad), _gradient(graftax.value_and_grad)


if names := os.environ.get("GRAFTAX_NAMES"):
    of_nnx() if names == "nnx" else of_equinox(None if names == "equinox" else names)
