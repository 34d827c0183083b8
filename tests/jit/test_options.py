# SPDX-License-Identifier: Apache-2.0
"""`jax.jit`'s own options."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from zoo import f32


def test_static_argnums_and_argnames():
    @functools.partial(graftax.jit, static_argnums=(1,), static_argnames=("mode",))
    def f(x, n, *, mode="a"):
        assert type(n) is int
        return x * n if mode == "a" else x

    assert f(f32(2), 3).tolist() == [6.0]
    assert f(f32(2), n=3).tolist() == [6.0]
    assert f(f32(2), 3, mode="b").tolist() == [2.0]


class Strategy:
    """Declared static as a whole, as methods under `jax.jit` often are."""

    def __init__(self, weights, options=None):
        self.weights, self.options, self.calls = weights, options, 0

    @functools.partial(graftax.jit, static_argnames="self")
    def ask(self, x):
        return x * float(np.asarray(jax.tree.leaves(self.weights)[0]).reshape(-1)[0])

    @functools.partial(graftax.jit, static_argnums=0)
    def tell(self, x):
        self.calls += 1
        self.weights = self.weights + x
        return self.calls


@pytest.mark.parametrize("array", [f32, np.asarray, lambda x: {"deep": [f32(x)]}], ids=["array", "numpy", "deep"])
def test_arrays_of_a_static_argument_are_constants_of_the_program(array):
    strategy, before = Strategy(array(2.0)), Strategy.ask.cache_info().traces
    assert strategy.ask(f32(3)).tolist() == [6.0] == strategy.ask(f32(3)).tolist()
    assert Strategy.ask.cache_info().traces == before + 1
    strategy.weights = array(5.0)
    assert strategy.ask(f32(3)).tolist() == [15.0]
    strategy.options = {"mode": "other"}
    assert strategy.ask(f32(3)).tolist() == [15.0]
    assert Strategy.ask.cache_info().traces == before + 3


def test_a_numpy_array_of_a_static_argument_counts_by_its_content():
    strategy = Strategy(np.asarray([2.0]))
    assert strategy.ask(f32(3)).tolist() == [6.0]
    strategy.weights[0] = 4.0
    assert strategy.ask(f32(3)).tolist() == [12.0]
    before, same = Strategy.ask.cache_info().traces, Strategy(np.asarray([4.0]))
    assert same.ask(f32(3)).tolist() == [12.0] and Strategy.ask.cache_info().traces == before


def test_what_a_function_changes_in_a_static_argument_comes_back():
    strategy = Strategy(f32(2.0))
    assert [strategy.tell(f32(1)) for _ in range(3)] == [1, 2, 3]
    assert strategy.weights.tolist() == [5.0] and not isinstance(strategy.weights, jax.core.Tracer)


def test_a_random_key_may_be_static():
    f = graftax.jit(lambda key, x: jax.random.normal(key) + x, static_argnums=0)
    for key in (jax.random.key(0), jax.random.key(1)):
        np.testing.assert_allclose(f(key, 1.0), jax.random.normal(key) + 1.0, rtol=1e-6)


def test_a_static_argument_with_an_array_that_is_traced_is_a_clear_error():
    f = graftax.jit(lambda x, table: x * table["deep"][0], static_argnums=1)
    with pytest.raises(graftax.GraftaxError, match=r"table\['deep'\]\[0\].*traced"):
        jax.grad(lambda w: f(1.0, {"deep": [w]}))(2.0)


@pytest.mark.parametrize(
    "options", [dict(donate_argnums=0), dict(donate_argnames="state"), dict(donate_argnums=(0,))], ids=str
)
def test_donation(options):
    f = graftax.jit(lambda state, x: {"w": state["w"] + x}, **options)
    for _ in range(2):
        w, x = jnp.ones(64), jnp.ones(64)
        out = f({"w": w}, x)
        assert out["w"].tolist() == [2.0] * 64
        assert w.is_deleted() and not x.is_deleted()


def test_donation_does_not_touch_what_is_not_donated_after_a_failed_trace():
    def fail(w):
        raise ValueError("no")

    w = jnp.ones(4)
    with pytest.raises(ValueError, match="no"):
        graftax.jit(fail, donate_argnums=0)(w)
    assert not w.is_deleted()


def test_shardings_of_a_leaf_and_of_a_prefix():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    f = graftax.jit(lambda x: {"y": x["w"] + 1, "n": 3}, in_shardings=device, out_shardings=device)
    for _ in range(2):
        out = f({"w": f32(1), "n": 2})
        assert out["y"].tolist() == [2.0] and out["n"] == 3
        assert out["y"].sharding == device
    g = graftax.jit(
        lambda x, y: (x["w"], {"y": y + 1}),
        in_shardings=(device, None),
        out_shardings=(device, {"y": device}),
    )
    for _ in range(2):
        assert g({"w": f32(1)}, f32(1))[1]["y"].tolist() == [2.0]


@pytest.mark.parametrize(
    "options",
    [
        dict(keep_unused=True),
        dict(inline=True),
        dict(compiler_options={"xla_cpu_enable_fast_math": False}),
    ],
    ids=str,
)
def test_options_pass_through(options):
    f = graftax.jit(lambda x, unused: x["w"] + 1, **options)
    for _ in range(2):
        assert f({"w": f32(1)}, f32(2)).tolist() == [2.0]


@pytest.mark.skipif(not hasattr(jax, "Inline"), reason="this JAX knows True and False alone")
def test_a_way_of_inlining_is_passed_on():
    for way in jax.Inline:
        texts = (str(jax.make_jaxpr(jit(lambda x: x * 2, inline=way))(f32(1))) for jit in (jax.jit, graftax.jit))
        assert len(set(texts)) == 1


def test_a_bad_compiler_option_is_xlas_error():
    f = graftax.jit(lambda x: x + 1, compiler_options={"no_such_option": True})
    with pytest.raises(Exception, match="no_such_option"):
        f(f32(1))


def test_unused_arguments_are_dropped_unless_kept():
    def f(x, unused):
        return x + 1

    def parameters(jitted):
        return jitted.lower(f32(1), f32(1, 2)).as_text().split("@main(")[1].split(")")[0].count("%arg")

    assert parameters(graftax.jit(f, keep_unused=True)) > parameters(graftax.jit(f))
