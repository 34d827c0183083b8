# SPDX-License-Identifier: Apache-2.0
"""`jax.jit`'s own options."""

import functools

import jax
import jax.numpy as jnp
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


def test_a_static_argument_with_arrays_below_is_a_clear_error():
    f = graftax.jit(lambda x, table: x, static_argnums=1)
    with pytest.raises(graftax.GraftaxError, match="table"):
        f(f32(1), {"deep": [f32(1)]})


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
