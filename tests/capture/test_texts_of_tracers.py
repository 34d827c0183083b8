# SPDX-License-Identifier: Apache-2.0
"""A text that traced code makes of an array names a tracer: it does not reach the caller."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import graftax

TEXTS = {
    "f-string": lambda x: f"loss {x}",
    "str": str,
    "repr": repr,
    "percent": lambda x: "%s" % (x,),  # noqa: UP031
    "format": lambda x: "loss: {}".format(x),  # noqa: UP032
    "of a list": lambda x: str([x, 1]),
    "joined": lambda x: ", ".join(map(str, [x])),
}


@pytest.mark.parametrize("make", TEXTS.values(), ids=TEXTS)
def test_a_text_of_a_traced_array_is_refused_where_it_is_kept(make: Any):
    @graftax.jit
    def step(model: Any) -> Any:
        model.log.append(make(model.w.sum()))
        return model.w + 1

    model = SimpleNamespace(w=jnp.ones(2), log=["start"])
    with pytest.raises(graftax.LeakedTracerError, match=r"model\.log\[1\] is .*make the string after the call"):
        step(model)
    assert model.log == ["start"]


def test_one_that_is_returned_or_a_key_is_refused_too():
    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"result\['a'\]\[0\] is 'JitTracer"):
        graftax.jit(lambda x: {"a": [f"{x}"]})(jnp.ones(2))
    with pytest.raises(graftax.LeakedTracerError, match="a key of a dict is"):
        graftax.jit(lambda x: {f"{x}": x})(jnp.ones(2))


def test_a_transform_refuses_it():
    kept: list[str] = []

    def loss(w: Any) -> Any:
        kept.append(f"{w}")
        return w.sum()

    with pytest.raises(graftax.LeakedTracerError, match="GradTracer"):
        graftax.grad(loss)(jnp.ones(2))
    assert kept == []


def test_what_the_caller_has_given_may_look_as_it_likes():
    text = "the text of a DynamicJaxprTracer(float32[])"
    model = SimpleNamespace(note="", text=text)

    @graftax.jit
    def keep(model: Any, x: Any) -> Any:
        model.note = model.text
        return x, model.text

    assert keep(model, jnp.ones(2))[1] == text == model.note


def test_a_text_that_is_only_printed_is_printed(capsys: pytest.CaptureFixture[str]):
    with pytest.warns(graftax.ImpureCallWarning):
        graftax.jit(lambda x: print(f"{x}"))(jnp.ones(2))
    assert "Tracer(float32[2])" in capsys.readouterr().out


def test_numbers_have_a_text():
    @graftax.jit
    def step(log: list[str], n: int, x: Any) -> Any:
        log[0] = f"step {n}"
        return x + n

    for n in range(4):
        log = [""]
        step(log, n, jnp.ones(2))
        assert log == [f"step {n}"]
