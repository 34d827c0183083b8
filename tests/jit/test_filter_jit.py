# SPDX-License-Identifier: Apache-2.0
"""``graftax.filter_jit``: by value; the caller's graph is never touched."""

import functools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
import oracle
import zoo
from zoo import Affine, Box, f32


def quiet(f, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return f(*args)


def test_the_seed_example():
    @graftax.filter_jit
    def func(v):
        v["a"][0] += 1
        return v

    for _ in range(2):
        x = [jnp.zeros(())]
        y = {"a": x, "b": x}
        out = quiet(func, y)
        assert out["a"] is out["b"]
        assert float(out["a"][0]) == 1.0
        assert out is not y and out["a"] is not x
        assert y["a"] is y["b"] is x and float(x[0]) == 0.0


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_every_kind_goes_in_and_out(build):
    graph = build()
    f = graftax.filter_jit(lambda x: x)
    expected = build()
    if build is zoo.BUILDERS[zoo.NAMES.index("numpy_array")]:
        expected = jax.tree.map(jnp.asarray, expected)  # as in Equinox
    for _ in range(2):
        assert oracle.difference(expected, f(graph)) is None
        assert oracle.difference(build(), graph) is None
    assert f.cache_info().traces == 1


def test_returned_nodes_with_arrays_are_new():
    f = graftax.filter_jit(lambda g: g)
    for _ in range(2):
        g = {"x": [f32(1)], "box": Box(w=f32(2))}
        out = f(g)
        assert out is not g and out["x"] is not g["x"] and out["box"] is not g["box"]


def test_returned_handed_over_nodes_stay_themselves():
    config = Box(n=1)
    f = graftax.filter_jit(lambda config, x: (config, x))
    for _ in range(2):
        assert f(config, f32(1))[0] is config


def test_a_changed_handed_over_node_is_returned_as_a_new_one():
    @graftax.filter_jit
    def f(config, x):
        config.n += 1
        return config

    for _ in range(2):
        config = Box(n=1)
        out = quiet(f, config, f32(1))
        assert out is not config and out.n == 2 and config.n == 1


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (lambda cfg, w: setattr(cfg, "n", 5), "cfg"),
        (lambda cfg, w: cfg.sizes.append(3), "sizes"),
        (lambda cfg, w: w.append(w[0] * 2), "w"),
        (lambda cfg, w: w.__setitem__(0, w[0] * 2), "w"),
    ],
)
def test_a_lost_change_is_warned_of_once_with_its_path(f, name):
    def build():
        return Box(n=1, sizes=[1]), [f32(1)]

    jitted = graftax.filter_jit(f)
    args = build()
    with pytest.warns(UserWarning, match=name) as caught:
        jitted(*args)
    assert len(caught) == 1
    assert oracle.difference(build(), args) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jitted(*args)
    assert oracle.difference(build(), args) is None


def test_a_pure_function_is_not_warned_of():
    @graftax.filter_jit
    def f(cfg, w):
        new = dict(w)
        new["a"] = new["a"] + cfg.n
        return new

    assert f(Box(n=1), {"a": f32(1)})["a"].tolist() == [2.0]


def test_a_failed_trace_leaves_the_arguments():
    @graftax.filter_jit
    def f(cfg, w):
        cfg.n = w[0]
        w.append(1)
        raise ValueError("no")

    cfg, w = Box(n=1), [f32(1)]
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            f(cfg, w)
        assert cfg.n == 1 and len(w) == 1


def test_closures_are_read_at_trace_time_so_that_traces_can_be_counted():
    traced = []

    @graftax.filter_jit
    def f(x):
        traced.append("once")
        return x + 1

    for value in (1.0, 2.0, 3.0):
        f(f32(value))
    assert traced == ["once"]
    f(f32(1, 2))
    assert traced == ["once", "once"]


def test_an_equinox_model_trains_as_with_equinox():
    def loss(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    def step(model, x, y):
        grads = eqx.filter_grad(loss)(model, x, y)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))

    model = zoo.linear()
    x, y = jnp.ones((4, 2)), jnp.ones((4, 3))
    ours, theirs = graftax.filter_jit(step), eqx.filter_jit(step)
    a = b = model
    for _ in range(3):
        a, b = ours(a, x, y), theirs(b, x, y)
    assert ours.cache_info().traces == 1
    assert type(a) is type(b)
    np.testing.assert_allclose(a.weight, b.weight, rtol=1e-6)
    np.testing.assert_allclose(a.bias, b.bias, rtol=1e-6)


def test_methods_and_bound_methods_and_modules():
    class Scale(eqx.Module):
        w: jax.Array

        @graftax.filter_jit
        def __call__(self, x):
            return self.w * x

        def twice(self, x):
            return self.w * x * 2

    scale = Scale(f32(3))
    assert scale(f32(2)).tolist() == [6.0]
    assert graftax.filter_jit(scale.twice)(f32(2)).tolist() == [12.0]
    assert graftax.filter_jit(Affine.__eq__)(Affine(1, 2), 3) is not True


def test_options_come_along():
    f = graftax.filter_jit(lambda x, name: x * len(name), cache_size=1)
    for name in ("a", "bb", "a"):
        f(f32(1), name)
    assert f.cache_info().traces == 3

    @functools.partial(graftax.filter_jit, donate="none")
    def g(x):
        return x + 1

    assert g(f32(1)).tolist() == [2.0]
    with pytest.raises((TypeError, ValueError), match="some"):
        graftax.filter_jit(lambda x: x, donate="some")


@pytest.mark.parametrize("donate", ["all", "all-except-first", "warn", "warn-except-first", "none"])
def test_equinoxs_words_for_donation(donate):
    f = graftax.filter_jit(lambda x, y: (x * 2, y * 2), donate=donate)
    x, y = jnp.ones(64), jnp.ones(64)
    out = f(x, y)
    assert out[0].tolist() == out[1].tolist() == [2.0] * 64
    assert x.is_deleted() == (donate in ("all", "warn"))
    assert y.is_deleted() == (donate != "none")


def test_numbers_can_be_static():
    f, g = graftax.filter_jit(lambda x, n: x * n, numbers="static"), graftax.filter_jit(lambda x, n: x * n)
    for n in (1, 2, 3, 4):
        assert f(jnp.ones(2), n)[0] == g(jnp.ones(2), n)[0] == n
    assert (f.cache_info().traces, g.cache_info().traces) == (4, 2)
    with pytest.raises(ValueError, match="numbers='traced'"):
        graftax.filter_jit(lambda x: x, numbers="traced")  # pyright: ignore


@pytest.mark.parametrize("function", [lambda x: x, lambda x: {"a": [x], "b": x * 2}])
@pytest.mark.parametrize("x", [np.ones(2, np.float32), np.float32(3), 3.0, jnp.ones(2)], ids=lambda x: type(x).__name__)
def test_values_of_numpy_come_back_as_from_equinox(function, x):
    ours, theirs = graftax.filter_jit(function), eqx.filter_jit(function)
    for _ in range(2):
        result, expected = ours(x), theirs(x)
        assert list(map(type, jax.tree.leaves(result))) == list(map(type, jax.tree.leaves(expected)))
        assert jax.tree.all(jax.tree.map(np.array_equal, result, expected))
    if isinstance(x, np.ndarray):
        assert graftax.jit(lambda x: x)(x) is x  # as in plain Python
