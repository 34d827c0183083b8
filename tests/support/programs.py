# SPDX-License-Identifier: Apache-2.0
"""Small programs as texts of modules, each run plainly and compiled: at first, on a hit, and after a change."""

from __future__ import annotations

import functools
import operator
import textwrap
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import graftax

ONE = jnp.ones(2)
ABSENT = "not there"


def module(source: str, **names: Any) -> Any:
    """A user's module, with what it defines as attributes that can be set."""
    made = types.ModuleType("users")
    vars(made).update(jnp=jnp, jax=jax, np=np, graftax=graftax, functools=functools, **names)
    exec(compile(textwrap.dedent(source), "users.py", "exec", dont_inherit=True), vars(made))
    return made


class Program(NamedTuple):
    """A module that defines `f`."""

    source: str
    change: Callable[[Any], Any] = lambda m: None
    names: tuple[str, ...] = ()  # what is compared besides the results: names in the module, dotted
    given: Callable[[Any], tuple[Any, ...]] = lambda m: (ONE,)


def run(program: Program, wrap: Callable[[Any], Any]) -> list[Any]:
    """Results, errors and what the names hold: of two calls, and two after a change."""
    m = module(program.source)
    f, given, out = wrap(m.f), program.given(m), list[Any]()
    for change in (lambda _: None, program.change):
        change(m)
        for _ in range(2):
            try:
                out.append(values(f(*given)))
            except Exception as error:
                out.append(type(error))
            out.append([values(_at(m, name)) for name in program.names])
    return out


def _at(m: Any, name: str) -> Any:
    try:
        return operator.attrgetter(name)(m)
    except AttributeError:
        return ABSENT


def values(x: Any) -> Any:
    """Arrays as lists, so that `==` compares everything."""
    assert not isinstance(x, jax.core.Tracer), "a tracer was left"
    if isinstance(x, (jax.Array, np.ndarray, np.generic)):
        return np.asarray(x).tolist()
    if isinstance(x, dict):
        return {key: values(value) for key, value in x.items()}
    return [values(value) for value in x] if isinstance(x, (list, tuple)) else x


def beside(program: Program, wrap: Callable[[Any], Any] = graftax.jit) -> None:
    """Asserts that a program does the same with and without `jit`."""
    expected, given = run(program, lambda f: f), run(program, wrap)
    assert given == expected
