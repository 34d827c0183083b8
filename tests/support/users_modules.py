# SPDX-License-Identifier: Apache-2.0
"""Programs that read names of modules, each with and without `jit`."""

from __future__ import annotations

import functools
import textwrap
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import graftax

Wrap = Callable[[Any], Any]


def plain(function: Any) -> Any:
    return function


def both(program: Callable[[Wrap], Any], wrap: Wrap = graftax.jit) -> None:
    """Asserts that a program gives the same with and without `jit`."""
    expected, given = program(plain), program(wrap)
    assert jax.tree.map(_listed, given) == jax.tree.map(_listed, expected)


def _listed(x: Any) -> Any:
    assert not isinstance(x, jax.core.Tracer), "a tracer was left"
    return x.tolist() if isinstance(x, jax.Array) else x


def module(source: str, **names: Any) -> types.SimpleNamespace:
    """A user's module, with what it defines as attributes that can be set."""
    made = types.ModuleType("users")
    vars(made).update(jnp=jnp, jax=jax, graftax=graftax, functools=functools, **names)
    exec(compile(textwrap.dedent(source), "users.py", "exec"), vars(made))
    return made  # type: ignore[return-value]


ONE = jnp.ones(2)
