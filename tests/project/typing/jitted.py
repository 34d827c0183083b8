# SPDX-License-Identifier: Apache-2.0
"""What a type checker knows of jitted functions and methods. Read by pyright, never run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, assert_type

import jax

import graftax


@graftax.jit
def plain(x: jax.Array, n: int = 1) -> list[jax.Array]:
    return [x] * n


@graftax.jit(donate="all", mutation="error")
def with_options(x: jax.Array) -> str:
    return str(x.shape)


@graftax.filter_jit
def by_value(x: jax.Array, *rest: int, key: str) -> dict[str, int]:
    return {key: len(rest)}


@graftax.filter_jit(donate="none")
def by_value_with_options(x: jax.Array) -> int:
    return x.ndim


@functools.partial(graftax.jit, static_argnames="n")
def through_partial(x: jax.Array, n: int) -> jax.Array:
    return x * n


class Base:
    @graftax.jit
    def inherited(self, x: jax.Array) -> jax.Array:
        return x

    @classmethod
    @graftax.jit
    def inherited_make(cls, n: int) -> str:
        return str(n)


class Model(Base):
    @graftax.jit
    def step(self, x: jax.Array, rate: float = 0.1) -> jax.Array:
        return x * rate

    @graftax.jit(check=True)
    def checked(self, x: jax.Array) -> tuple[jax.Array, str]:
        return x, "a"

    @classmethod
    @graftax.jit
    def make(cls, n: int) -> list[int]:
        return [n]

    @staticmethod
    @graftax.jit
    def helper(x: int) -> str:
        return str(x)

    @staticmethod
    @graftax.jit(mutation="discard")
    def helper_with_options(x: int) -> str:
        return str(x)


def calls(x: jax.Array, model: Model) -> None:
    assert_type(plain(x), list[jax.Array])
    assert_type(plain(x, n=2), list[jax.Array])
    assert_type(with_options(x), str)
    assert_type(by_value(x, 1, 2, key="k"), dict[str, int])
    assert_type(by_value_with_options(x), int)
    assert_type(through_partial(x, n=2), jax.Array)  # not mypy
    assert_type(model.step(x), jax.Array)
    assert_type(model.step(x, rate=0.5), jax.Array)
    assert_type(model.inherited(x), jax.Array)
    assert_type(Model.inherited_make(1), str)
    assert_type(model.inherited_make(1), str)
    assert_type(Model.step(model, x), jax.Array)  # not mypy
    assert_type(model.checked(x), tuple[jax.Array, str])
    assert_type(Model.make(3), list[int])
    assert_type(model.make(n=3), list[int])
    assert_type(Model.helper(3), str)  # not mypy
    assert_type(model.helper_with_options(3), str)  # not mypy


def ahead_of_time(x: jax.Array, model: Model) -> None:
    assert_type(plain.lower(x).compile()(x, 2), list[jax.Array])
    assert_type(plain.trace(x).lower().compile()(x), list[jax.Array])
    assert_type(model.step.lower(x).compile()(x), jax.Array)
    assert_type(plain.cache_info(), graftax.CacheInfo)
    assert_type(plain.__wrapped__(x, 2), list[jax.Array])
    exported = graftax.export(plain)(x, 2)
    assert_type(exported(x), list[jax.Array])
    assert_type(exported.call(x), list[jax.Array])
    assert_type(exported.serialize(), bytearray)
    assert_type(graftax.export(model.step, platforms=["cpu"])(x)(x), jax.Array)


def functions_made_by_hand(f: Callable[[int], str], g: Callable[..., Any]) -> None:
    assert_type(graftax.jit(f)(1), str)
    assert_type(graftax.jit(f, cache_size=3)(1), str)
    assert_type(graftax.jit(g)(1, 2, a=3), Any)
    assert_type(graftax.jit(lambda x: x)(3), Any)
    assert_type(graftax.jit(graftax.jit(f))(1), str)


def wrong_calls(x: jax.Array, model: Model) -> None:
    plain()  # expect: Argument missing for parameter "x"
    plain(x, m=2)  # expect: No parameter named "m"
    plain(x, n="2")  # expect: cannot be assigned to parameter "n"
    model.step()  # expect: Argument missing for parameter "x"
    model.step(x, rate="fast")  # expect: cannot be assigned to parameter "rate"
    model.step.lower(1)  # expect: cannot be assigned to parameter "x"
    plain.lower(x).compile()(x, n="2")  # expect: cannot be assigned to parameter "n"
    plain.eval_shape(1)  # expect: cannot be assigned to parameter "x"
    Model.make("n")  # expect: cannot be assigned to parameter "n"
    Model.helper("n")  # not mypy, expect: cannot be assigned to parameter "x"
    graftax.export(plain)(1)  # expect: cannot be assigned to parameter "x"
    graftax.jit(plain, mutation="sometimes")  # expect: cannot be assigned to parameter "mutation"
    graftax.jit(plain, no_such_option=1)  # expect: No overloads for "jit"
    graftax.filter_jit(plain, mutation="error")  # expect: No overloads for "filter_jit"


def explained(x: jax.Array) -> None:
    assert_type(graftax.explain(plain), graftax.Explanation)
    assert_type(graftax.explain(plain, x, n=2), graftax.CallExplanation)
    graftax.explain(plain, "x")  # expect: is not assignable to "Array"
