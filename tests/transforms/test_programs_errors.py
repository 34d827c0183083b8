# SPDX-License-Identifier: Apache-2.0
"""The slips of a first day with the transforms: each is an error that names the place and what to write instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import graftax
from plain import Net
from zoo import Box

X = jnp.ones(2)


def model() -> Box:
    return Box(w=jnp.ones(2), steps=jnp.asarray(0), name="net")


def run(model: Box, x: Any) -> Any:
    return (model.w * x).sum()


def outputs(model: Box) -> Any:
    return {"y": model.w * 2, "z": model.w.sum()}


def pulled(cotangent: Any) -> Any:
    return graftax.vjp(outputs, model())[1](cotangent)


def forever(s: Any) -> Any:
    return graftax.while_loop(lambda s: s["a"] < 20, lambda s: {"a": s["a"] * 2}, s)["a"]


def ruled(bwd: Callable[..., Any], fwd: Callable[..., Any] | None = None) -> Any:
    @graftax.custom_vjp
    def f(m: Box) -> Any:
        return m.w.sum()

    f.defvjp(fwd or (lambda m: (f(m), None)), bwd)
    return graftax.grad(f)(model())


SLIPS: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "a pattern that is spelt wrong": (
        lambda: graftax.grad(run, wrt="model.head")(model(), X),
        ValueError,
        ["'model.head'", "Available: model.w, x."],
    ),
    "one of two patterns is spelt wrong": (
        lambda: graftax.grad(run, wrt=["model.w", "model.bais"])(model(), X),
        ValueError,
        ["'model.bais'", "model.w"],
    ),
    "a pattern of a captured object": (
        lambda: graftax.grad(functools.partial(lambda m, x: run(m, x), model()), wrt="**.w")(X),
        ValueError,
        ["'**.w'", "args[0]"],
    ),
    "both argnums and wrt": (
        lambda: graftax.grad(run, argnums=1, wrt="model")(model(), X),
        ValueError,
        ["argnums=1", "wrt='model'"],
    ),
    "the cotangent without its dict": (
        lambda: pulled(X),
        ValueError,
        ["cotangent at value,", "value['y'], value['z']"],
    ),
    "a cotangent under another key": (
        lambda: pulled({"y": X, "z": jnp.ones(()), "u": X}),
        ValueError,
        ["value['u']", "value['y']"],
    ),
    "a cotangent that is missing": (lambda: pulled({"y": X}), ValueError, ["no cotangent for value['z']", "None"]),
    "primals without a tuple": (
        lambda: graftax.jvp(outputs, model(), model()),
        TypeError,
        ["primals is a Box", "(x, y)"],
    ),
    "too few tangents": (lambda: graftax.jvp(run, (model(), X), (model(),)), TypeError, ["tangents is a tuple of 1"]),
    "a tangent that is an array": (lambda: graftax.jvp(outputs, (model(),), (X,)), ValueError, ["model.w", "tangent"]),
    "a loop that returns nothing": (
        lambda: graftax.fori_loop(0, 3, lambda i, m: setattr(m, "w", m.w * i), model()),
        ValueError,
        ["returns None", "next step's", "changed in place"],
    ),
    "a step without a carry": (
        lambda: graftax.scan(lambda m, x: (None, x), model(), X),
        ValueError,
        ["returns None", "next step's"],
    ),
    "a range to go over": (
        lambda: graftax.scan(lambda c, i: (c, i), X, range(3)),
        ValueError,
        ["xs holds no array", "length=", "jnp.arange"],
    ),
    "a generator to go over": (lambda: graftax.map(lambda x: x, (i for i in range(3))), TypeError, ["xs: generator"]),
    "a loop of unknown length": (
        lambda: graftax.grad(forever)({"a": jnp.ones(())}),
        ValueError,
        ["max_steps=", "fori_loop"],
    ),
    "a loop of unknown length, pulled back": (
        lambda: graftax.vjp(forever, {"a": jnp.ones(())})[1](jnp.ones(())),
        ValueError,
        ["max_steps=", "fori_loop"],
    ),
    "a loop of unknown length, by rows": (
        lambda: graftax.jit(graftax.jacrev(forever))({"a": jnp.ones(())}),
        ValueError,
        ["max_steps=", "fori_loop"],
    ),
    "a branch instead of a list": (lambda: graftax.switch(0, lambda: X), TypeError, ["list of functions", "lambda"]),
    "a forward rule that returns the value": (
        lambda: ruled(lambda residuals, g: (g,), lambda m: m.w.sum()),
        TypeError,
        ["fwd", "(value, residuals)", "float32[]"],
    ),
    "a backward rule that returns no tuple": (lambda: ruled(lambda residuals, g: g), TypeError, ["bwd", "float32[]"]),
    "a cotangent that is an array, and no graph": (
        lambda: ruled(lambda residuals, g: (X,)),
        ValueError,
        ["cotangent at m,", "here at m.w"],
    ),
}


def text_of(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize("slip", SLIPS)
def test_the_error_names_the_place_and_the_way_out(slip: str):
    program, kind, words = SLIPS[slip]
    with pytest.raises(kind) as caught:
        program()
    text = text_of(caught.value)
    assert [word for word in words if word not in text] == [], text


def test_none_is_no_tangent_of_all_below():
    (gradient,) = pulled({"y": None, "z": jnp.ones(())})
    assert gradient.w.tolist() == [1, 1]
    value, rate = graftax.jvp(lambda m, x: run(m["model"], x), ({"model": model()}, X), (None, X))
    assert (value, rate) == (2, 2)


def test_all_patterns_may_cover_one_array():
    (gradient,) = graftax.grad(run, wrt=["model.w", "**.w", "model"])(model(), X)
    assert gradient.w.tolist() == [1, 1]


@pytest.mark.parametrize("transform", [graftax.grad, graftax.jacfwd, graftax.checkpoint, lambda f: f])
def test_a_value_that_is_not_known_is_told_of_the_users_function(transform: Callable[..., Any]):
    def decide(net: Net, x: Any) -> Any:
        return net(x).sum() if x.sum() > 0 else x.sum()

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        graftax.jit(transform(decide))(Net(0, 2, 2), jnp.ones((2, 2)))
    assert "decide at " in str(caught.value)
    assert "test_programs_errors.py" in str(caught.value)
