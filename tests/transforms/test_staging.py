# SPDX-License-Identifier: Apache-2.0
"""`eval_shape` and `make_jaxpr` say what a call would do, and change nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import graftax
import oracle
import zoo
from graftax import _core, eval_shape, make_jaxpr


def shapes_of(obj):
    leaves, graphdef = _core.record((obj,), ("obj",), shapes=True)
    return [(x.shape, jnp.result_type(x)) for x in leaves], graphdef


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_eval_shape_keeps_the_graph(build):
    obj = build()
    result = eval_shape(lambda obj: obj, obj)
    assert shapes_of(result) == shapes_of(obj)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in _core.record((result,), shapes=True)[0])
    assert oracle.difference(obj, build()) is None


def step(state, x, *, rate=0.5):
    state["n"] += 1
    state["w"] = state["w"] - rate * x
    return {"loss": (state["w"] @ x).sum(), "state": state, "note": "ok"}


def state():
    return {"w": jnp.ones((3, 2)), "n": 0}


X = jnp.ones(2)


def test_eval_shape_gives_what_the_function_does_and_does_it_not():
    argument = state()
    result = eval_shape(step, argument, X)
    assert result["loss"].shape == ()
    assert result["state"]["w"].shape == (3, 2)
    assert (result["state"]["n"], result["note"]) == (1, "ok")
    assert oracle.difference(argument, state()) is None


def test_eval_shape_takes_shapes():
    argument = {"w": jax.ShapeDtypeStruct((3, 2), jnp.float32), "n": 4}
    result = eval_shape(step, argument, jax.ShapeDtypeStruct((2,), jnp.float32))
    assert result["state"]["n"] == 5
    assert argument["n"] == 4


def test_eval_shape_of_a_jitted_function_is_its_own():
    jitted = graftax.jit(step)
    argument = state()
    assert shapes_of(eval_shape(jitted, argument, X)) == shapes_of(jitted.eval_shape(argument, X))
    assert argument["n"] == 0


def test_eval_shape_takes_a_keyword_called_fun():
    assert eval_shape(lambda fun: fun, fun=jnp.ones(3)).shape == (3,)


def test_a_jaxpr_has_the_arrays_in_and_out():
    argument = state()
    jaxpr = make_jaxpr(step)(argument, X)
    expected = jax.make_jaxpr(lambda w, x: (((w - 0.5 * x) @ x).sum(), w - 0.5 * x))(argument["w"], X)
    assert [v.aval for v in jaxpr.jaxpr.invars] == [v.aval for v in expected.jaxpr.invars]
    assert [v.aval.shape for v in jaxpr.jaxpr.outvars] == [(), (3, 2)]
    assert oracle.difference(argument, state()) is None


def test_a_jaxpr_equals_jax_own_of_the_same_arrays():
    shown = str(make_jaxpr(lambda m, x: {"y": jnp.sin(m["w"] @ x) * m["k"]})({"w": jnp.ones((3, 2)), "k": 2}, X))
    assert shown == str(jax.make_jaxpr(lambda w, x: jnp.sin(w @ x) * 2)(jnp.ones((3, 2)), X))


def test_a_jaxpr_has_captured_arrays_as_inputs():
    scale = [jnp.ones(4)]
    jaxpr = make_jaxpr(lambda x: x * scale[0])(jnp.ones(4))
    assert len(jaxpr.jaxpr.invars) == 2


def test_make_jaxpr_returns_the_shape_of_the_result():
    argument = {"w": jax.ShapeDtypeStruct((3, 2), jnp.float32), "n": 0}
    jaxpr, shape = make_jaxpr(step, return_shape=True)(argument, X)
    assert len(jaxpr.jaxpr.outvars) == 2
    assert shape["loss"].shape == ()
    assert (shape["note"], argument["n"]) == ("ok", 0)


def test_a_static_argument_of_make_jaxpr_is_no_input():
    show = make_jaxpr(lambda x, n: x * n, static_argnums=(1,))
    assert len(show(jnp.ones(2), 3).jaxpr.invars) == 1
    assert len(show(jnp.ones(2), jnp.ones(2)).jaxpr.invars) == 1


def test_axis_names_are_known_to_make_jaxpr():
    show = make_jaxpr(lambda x: jax.lax.psum(x["a"], "i"), axis_env=[("i", 4)])
    assert "psum" in str(show({"a": jnp.ones(2)}))


def test_a_captured_shape_is_itself():
    spec = jax.ShapeDtypeStruct((2,), jnp.float32)

    def f(x, like):
        assert type(spec) is jax.ShapeDtypeStruct and isinstance(like, jax.core.Tracer)
        return x + jnp.ones(spec.shape, spec.dtype)

    assert len(make_jaxpr(f)(jnp.ones(2), spec).jaxpr.invars) == 2
    assert eval_shape(f, jnp.ones(2), spec).shape == (2,)
    assert graftax.jit(f).eval_shape(jnp.ones(2), spec).shape == (2,)
