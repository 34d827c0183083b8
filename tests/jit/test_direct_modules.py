# SPDX-License-Identifier: Apache-2.0
"""Modules of Equinox, FlareJax and NNX in direct calls: as plain Python, whatever changes from call to call."""

import importlib.util
import random
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import graftax

pytestmark = pytest.mark.quick(1)


class OfEquinox(eqx.Module):
    w: jax.Array
    b: jax.Array


class OfNNX(nnx.Module):
    def __init__(self, w, b):
        self.w, self.b = nnx.Param(w), nnx.Param(b)


def of_flarejax(w, b):
    import flarejax

    module = flarejax.Module()
    module.w, module.b = w, b
    return module


installed = pytest.mark.skipif(importlib.util.find_spec("flarejax") is None, reason="flarejax is not installed")
FLAREJAX = pytest.param(of_flarejax, marks=installed, id="flarejax")
makers = pytest.mark.parametrize("make", [OfEquinox, OfNNX, FLAREJAX])
modes = pytest.mark.parametrize("jit", [graftax.jit, graftax.filter_jit], ids=["jit", "filter_jit"])


def f32(*values):
    return jnp.array(values, jnp.float32)


def value(parameter):
    return parameter[...] if isinstance(parameter, nnx.Variable) else parameter


def affine(module, x):
    return value(module.w) * 2 + value(module.b) * x


reference = jax.jit(lambda w, b, x: w * 2 + b * x)


def agree(ours, theirs):
    ours, theirs = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert a.aval == b.aval
        assert a.weak_type == b.weak_type
        assert a.sharding == b.sharding
        assert a.committed == b.committed
        np.testing.assert_array_equal(a, b)


KINDS = [
    lambda: f32(1, 2),
    lambda: f32(3, 4),
    lambda: jnp.array([1, 2]),
    lambda: jnp.asarray(2.0),
    lambda: jnp.broadcast_to(jnp.asarray(2.0), (2,)),
    lambda: jnp.array([1, 2], jnp.float16),
    lambda: jnp.array([True, False]),
    lambda: jnp.ones((2, 2)),
    lambda: jnp.ones((0, 1, 2)),
    lambda: jax.device_put(f32(5, 6), jax.devices()[0]),
    lambda: np.array([1, 2], np.float32),
    lambda: np.array([1.0, 2.0]),
]


@makers
@pytest.mark.quick(0)
def test_dtype_shape_weak_type_and_placement_may_change_at_any_call(make):
    f, choose = graftax.jit(affine), random.Random(0)
    for _ in range(25):
        kinds = choose.choices(KINDS, k=3)
        for _ in range(choose.choice([1, 4])):
            w, b, x = [kind() for kind in kinds]
            agree(f(make(w, b), x), reference(w, b, x))


@makers
@modes
def test_one_array_in_all_places_and_then_another(make, jit):
    f, one, other = jit(affine), f32(1, 2), f32(5, 6)
    for w, b, x in [(one, one, one)] * 3 + [(one, other, one)] * 3 + [(other, other, one), (one, one, other)] * 2:
        agree(f(make(w, b), x), reference(w, b, x))


@makers
@modes
def test_a_deleted_array_is_named_and_the_next_call_is_right(make, jit):
    f, w = jit(affine), f32(1, 2)
    module = make(w, f32(3, 4))
    for _ in range(4):
        f(module, w)
    w.delete()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"module\.w"):
            f(module, f32(1, 2))
    agree(f(make(f32(1, 2), f32(3, 4)), f32(5, 6)), f32(17, 28))


@makers
@modes
@pytest.mark.quick(0)
def test_a_warm_call_inside_transforms(make, jit):
    f = jit(affine)
    w, b, x = f32(1, 2), f32(3, 4), f32(5, 6)

    def transformed(g):
        yield jax.grad(lambda *a: g(make(*a[:2]), a[2]).sum(), (0, 1, 2))(w, b, x)
        yield jax.vmap(lambda x: g(make(w, b), x))(jnp.stack([x, b]))
        yield jax.jit(lambda x: g(make(w, b), x))(x)
        yield jax.jvp(lambda x: g(make(w, b), x), (x,), (w,))
        yield jax.lax.scan(lambda c, x: (g(make(w, c), x), c), b, jnp.stack([x, x]))
        yield graftax.jit(lambda m, x: g(m, g(m, x)))(make(w, b), x)

    for _ in range(3):
        for ours, theirs in zip(transformed(f), transformed(affine), strict=True):
            agree(ours, theirs)
            agree(f(make(w, b), x), reference(w, b, x))


@makers
@pytest.mark.quick(0)
def test_settings_hold_for_warm_calls_and_no_longer_than_they_are_on(make):
    f = graftax.jit(affine)
    w, b, x = f32(1, 2), f32(3, 4), f32(5, 6)
    settings = [
        lambda: jax.enable_x64(True),
        lambda: jax.default_matmul_precision("highest"),
        lambda: jax.debug_infs(True),
        lambda: jax.disable_jit(True),
        lambda: jax.default_device(jax.devices()[0]),
        lambda: jax.transfer_guard("disallow"),
        jax.checking_leaks,
        jax.ensure_compile_time_eval,
    ]
    for setting in settings:
        for _ in range(2):
            agree(f(make(w, b), x), reference(w, b, x))
        with setting():
            for _ in range(2):
                agree(f(make(w, b), x), reference(w, b, x))
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="rank_promotion"):
        f(make(w, b), jnp.ones((1, 2)))
    with jax.numpy_dtype_promotion("strict"), pytest.raises(Exception, match="promotion"):
        f(make(w, b), jnp.array([1, 2]))


@makers
@modes
def test_threads_with_three_shapes_share_one_function(make, jit):
    f, failures = jit(affine), []

    def work(i):
        try:
            for step in range(30):
                w, x = jnp.full(((i + step) % 3 + 1,), float(i)), jnp.asarray(float(step))
                agree(f(make(w, w), x), reference(w, w, x))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@makers
def test_donated_parameters_are_gone_each_time(make):
    f = graftax.filter_jit(affine, donate="all")
    for _ in range(4):
        w, b, x = f32(1, 2), f32(3, 4), f32(5, 6)
        module = make(w, b)
        agree(f(module, x), f32(17, 28))
        assert w.is_deleted() or b.is_deleted() or x.is_deleted()
        with pytest.raises((RuntimeError, ValueError), match=r"(module\.(w|b)\S*|x) holds an array that was"):
            f(module, x)
        shared = f32(1, 2)
        agree(f(make(shared, shared), f32(5, 6)), f32(7, 16))


@pytest.mark.parametrize("make", [OfNNX, FLAREJAX])
@pytest.mark.parametrize("donate", ["none", "all"])
def test_state_that_moves_between_attributes_goes_on(make, donate):
    def put(module, name, new):
        if isinstance(getattr(module, name), nnx.Variable):
            getattr(module, name)[...] = new
        else:
            setattr(module, name, new)

    def step(module, x):
        total = value(module.w) + x
        put(module, "b", value(module.w))
        put(module, "w", total)
        return total * 2

    f, ours, theirs = graftax.jit(step, donate=donate), make(f32(1, 2), f32(3, 4)), make(f32(1, 2), f32(3, 4))
    for i in range(8):
        if i == 4:
            for module in (ours, theirs):
                put(module, "w", value(module.b) + 0)
        x = f32(i, 1) if i % 3 else f32(i)
        agree(f(ours, x + 0), step(theirs, x))
        agree([value(ours.w), value(ours.b)], [value(theirs.w), value(theirs.b)])
