# SPDX-License-Identifier: Apache-2.0
"""`mutation=` error and discard, failed traces, and tracers that would be left behind."""

import jax
import jax.numpy as jnp
import pytest

import graftax
import oracle
from zoo import (
    Box,
    f32,
)


@pytest.mark.filterwarnings("ignore::UserWarning")  # the advice on statics that change
def test_python_counters_count():
    @graftax.jit
    def f(x, counter, log):
        counter[0] += 1
        log.n += 1
        return x * counter[0] * log.n

    counter, log = [0], Box(n=0)
    assert [f(f32(1), counter, log).tolist() for _ in range(3)] == [[1.0], [4.0], [9.0]]
    assert counter == [3] and log.n == 3


def changing(params, config):
    params["w"] = params["w"] + 1
    config.sizes.append(3)
    return params, config


def sample():
    return {"w": f32(1)}, Box(sizes=[1, 2])


def test_discard_leaves_the_arguments_and_returns_new_nodes():
    f = graftax.jit(changing, mutation="discard")
    for _ in range(2):
        args = sample()
        params, config = f(*args)
        assert oracle.difference(sample(), args) is None
        assert params is not args[0] and params["w"].tolist() == [2.0]
        assert config is not args[1] and config.sizes == [1, 2, 3]


def test_discard_keeps_handed_over_nodes_that_did_not_change():
    config = Box(sizes=[1, 2])
    f = graftax.jit(lambda config, x: (config, x), mutation="discard")
    for _ in range(2):
        assert f(config, [f32(1)])[0] is config


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (lambda params, config: params.update(w=params["w"] + 1), "params"),
        (lambda params, config: config.sizes.append(3), "sizes"),
        (lambda params, config: setattr(config, "new", 3), "config"),
    ],
)
def test_error_names_what_changed_and_leaves_the_arguments(f, name):
    jitted = graftax.jit(f, mutation="error")
    for _ in range(2):
        args = sample()
        with pytest.raises(graftax.GraftaxError, match=name):
            jitted(*args)
        assert oracle.difference(sample(), args) is None


def test_error_lets_pure_functions_pass():
    @graftax.jit(mutation="error")
    def f(params, config):
        local = dict(params, extra=[])
        local["extra"].append(config.sizes[0])
        return local

    for _ in range(2):
        args = sample()
        assert f(*args)["extra"] == [1]
        assert oracle.difference(sample(), args) is None


def test_a_failed_trace_leaves_the_arguments_as_they_were():
    def f(g, x):
        g["a"].append(x)
        g["config"].n = x
        g["config"].sizes.append(x)
        del g["config"].name
        g["set"].add(5)
        g["new"] = x
        raise KeyError("no")

    def build():
        return {"a": [f32(1)], "config": Box(n=1, sizes=[1], name="x"), "set": {1}}

    jitted = graftax.jit(f)
    for _ in range(3):
        g, memo = build(), {}
        copy = oracle.deep_copy(g, memo=memo)
        with pytest.raises(KeyError, match="no"):
            jitted(g, f32(2))
        pairs = [pair for pair in memo.values() if oracle.is_mutable(pair[0])]
        assert oracle.difference(g, copy, pairs) is None


def test_a_call_after_a_failed_one_is_fine():
    @graftax.jit
    def f(log, x, fail):
        log.append(x)
        if fail:
            raise ValueError("no")
        return x

    log = []
    for value in (1.0, 2.0):
        with pytest.raises(ValueError, match="no"):
            f(log, f32(value), True)
        f(log, f32(value), False)
    assert [x.tolist() for x in log] == [[1.0], [2.0]]


def test_a_failed_write_of_the_trace_itself_leaves_the_arguments():
    def f(g, x):
        g.append(x)
        return jnp.ones((2, 3)) @ jnp.ones((2, 3))

    g = []
    with pytest.raises(TypeError):
        graftax.jit(f)(g, f32(1))
    assert g == []


def test_a_tracer_left_where_it_can_be_seen_is_a_clear_error():
    @graftax.jit
    def f(x):
        @jax.jit
        def inner(y):
            x.append(y)
            return y

        return inner(x[0])

    g = [f32(1)]
    with pytest.raises((graftax.GraftaxError, jax.errors.UnexpectedTracerError)):
        f(g)
    assert oracle.same_graph(g, [f32(1)])


def test_a_tracer_left_in_a_set_or_a_key_is_a_clear_error():
    def into_key(g, x):
        g["d"][(1, x)] = 1

    g = {"d": {"k": 1}}
    with pytest.raises((graftax.GraftaxError, TypeError)):
        graftax.jit(into_key)(g, f32(1))
    assert oracle.same_graph(g, {"d": {"k": 1}})


def test_a_mutable_opaque_object_made_inside_is_a_clear_error():
    @graftax.jit
    def f(x):
        return {"counter": iter([1, 2]), "x": x}

    with pytest.raises(graftax.GraftaxError, match="counter"):
        f(f32(1))
