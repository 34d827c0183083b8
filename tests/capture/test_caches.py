# SPDX-License-Identifier: Apache-2.0
"""A `functools.lru_cache` that a traced function fills keeps no tracer: plainly, jitted, and again."""

import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from graftax._capture import caches_after_traces


@functools.lru_cache
def table(n):
    return jnp.arange(n) * 1.0


@functools.cache
def rotations(n):
    return {"cos": jnp.cos(table(n)), "sin": (jnp.sin(table(n)),)}


class Layer:
    def __init__(self):
        self.w = jnp.ones(3)

    @functools.lru_cache  # noqa: B019 - what is tried
    def twice(self):
        return self.w * 2

    @staticmethod
    @functools.cache
    def rows(n):
        return jnp.arange(n) * 2.0

    @classmethod
    @functools.cache
    def of_class(cls, n):
        return jnp.arange(n) * 3.0


@functools.cache
def scaled(layer, by):
    return layer.w * by


def memo(function):
    cached = functools.lru_cache(function)

    @functools.wraps(function)
    def wrapped(*args):
        return cached(*args)

    return wrapped


@memo
def decorated(n):
    return jnp.ones(n) * n


def of_a_global(layer, x):
    return x + table(3)


def of_containers(layer, x):
    return x * rotations(3)["cos"] + rotations(3)["sin"][0]


def of_methods(layer, x):
    return layer.twice() + layer.rows(3) + Layer.of_class(3) + x


def of_a_decorator(layer, x):
    return decorated(3) + x


def of_an_object(layer, x):
    return scaled(layer, 2) + scaled(layer, 2) + x


def in_a_loop_and_after_it(layer, x):
    total, _ = graftax.scan(lambda c, row: (c + table(4).sum() + row, table(4)[0]), 0.0, x)
    return total + table(4).sum()


def in_a_gradient_and_after_it(layer, x):
    return graftax.grad(lambda w: (w * table(3)).sum())(x) + table(3)


def in_branches(layer, x):
    return graftax.cond(x.sum() > 0, lambda: table(3) + x, lambda: table(3) - x) + table(3)


PROGRAMS = [
    of_a_global,
    of_containers,
    of_methods,
    of_a_decorator,
    of_an_object,
    in_a_loop_and_after_it,
    in_a_gradient_and_after_it,
    in_branches,
]


def forget():
    for cache in (table, rotations, scaled, Layer.twice, Layer.rows, vars(Layer)["of_class"].__func__):
        cache.cache_clear()


@pytest.fixture(autouse=True)
def forgotten():
    forget()


@pytest.mark.parametrize("program", PROGRAMS)
def test_two_jitted_functions_and_plain_code_share_a_cache(program):
    layer, x = Layer(), jnp.ones(3)
    expected = program(layer, x)
    forget()
    first, second = graftax.jit(program), graftax.jit(lambda layer, x: program(layer, x) * 1)
    for jitted in (first, second, first):
        np.testing.assert_allclose(jitted(layer, x), expected, rtol=1e-6)
    np.testing.assert_allclose(program(layer, x), expected, rtol=1e-6)
    assert first.cache_info().traces == 1


def test_a_trace_that_fails_leaves_no_tracer():
    def f(x):
        raise ValueError(table(5).shape)

    with pytest.raises(ValueError):
        graftax.jit(f)(jnp.ones(2))
    assert not isinstance(table(5), jax.core.Tracer)


def test_values_that_were_there_stay():
    cached = table(6)
    graftax.jit(lambda x: x + table(6))(jnp.ones(6))
    assert table(6) is cached


def test_numbers_stay_cached():
    calls = []

    @functools.lru_cache
    def width(n):
        calls.append(n)
        return n * 2

    jitted = graftax.jit(lambda x: x[: width(1)])
    for _ in range(3):
        assert jitted(jnp.ones(5)).shape == (2,)
    assert width(1) == 2 and len(calls) <= 2


def test_no_code_of_what_a_cache_keeps_runs():
    class Touchy:
        @property
        def __class__(self):
            raise RuntimeError("nobody asked")

        def __getattribute__(self, name):
            raise RuntimeError("nobody asked")

    @functools.cache
    def made(n):
        return n, Touchy()

    made(1)
    assert graftax.jit(lambda x: x * made(2)[0])(jnp.ones(2))[0] == 2
    assert made.cache_info().currsize == 2


@functools.lru_cache
def times_scale(n):
    return n * SCALE


SCALE = 2.0


def test_a_number_that_changes_is_a_key_like_another(monkeypatch):
    """What a cache has for a number stays, as in plain Python, where the program reads something else by then."""
    results = []
    for wrap in (lambda f: f, graftax.jit):
        times_scale.cache_clear()
        f = wrap(lambda x, n: x * times_scale(n))
        results.append([float(f(1.0, n)) for n in (3, 4)])
        monkeypatch.setitem(globals(), "SCALE", 5.0)
        results[-1] += [float(f(1.0, n)) for n in (3, 7)]
        monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert results[0] == results[1] == [6.0, 8.0, 6.0, 35.0]


@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_cache_has_one_result_for_a_number_that_changes(is_guarded):
    def run(jit):
        asked = []

        @functools.cache
        def total(n):
            asked.append(n)
            return n if n < 1 else n + total(n - 1)

        def guarded(n):
            try:
                return total(n)
            except Exception:
                return -1

        f = jit(lambda x, n: x * (guarded if is_guarded else total)(n))
        results = [float(f(jnp.ones(()), n)) for n in (2, 3, 4, 3)]
        return results, total(4), asked, total.cache_info().currsize

    assert run(graftax.jit) == run(lambda f: f)


def test_a_trace_ends_while_another_thread_meets_caches():
    """At each call and return, as threads take turns. Caches are noted for as long as they live."""
    kept, before = [], len(caches_after_traces._met)

    def meet(*event):
        kept.append(functools.lru_cache(lambda: None))
        caches_after_traces.note_cache(kept[-1])

    meet(), meet()
    sys.setprofile(meet)
    try:
        caches_after_traces.clear_caches()
    finally:
        sys.setprofile(None)
    caches_after_traces.note_cache(kept[0])
    assert len(caches_after_traces._met) == before + len(kept) > before + 3
    kept.clear()
    assert len(caches_after_traces._met) == before


class Net:
    def __init__(self):
        self.w, self.steps, self.kept = jnp.zeros(2), 0, {}


@functools.cache
def load():
    return Net()


@pytest.mark.parametrize(
    "change",
    [
        lambda net, x: setattr(net, "w", net.w + x),
        lambda net, x: net.kept.update(last=x),
        lambda net, x: setattr(net, "last", [x]),
        lambda net, x: setattr(net, "inner", Net()) or setattr(net.inner, "w", x),
    ],
)
def test_an_object_that_a_cache_gives_out_is_not_lost(change):
    load.cache_clear()
    net = load()
    net.w = jnp.full(2, 100.0)
    jitted = graftax.jit(lambda x: change(load(), x))
    for _ in range(2):
        with pytest.raises(graftax.MutationError, match=r"an object that load\(\) returned"):
            jitted(jnp.ones(2))
        assert load() is net and vars(net).keys() == {"w", "steps", "kept"}
        assert net.w.tolist() == [100.0, 100.0] and not net.kept


RATE = {"k": 2.0}


def test_what_a_cache_gave_out_is_changed_once_by_a_trace_that_begins_anew():
    load.cache_clear()
    load()

    def f(x):
        load().steps += 1
        return eval("scaled(x)", {"scaled": scaled, "x": x})  # no name leads to it

    def scaled(x):
        return x * RATE["k"]

    assert graftax.jit(f)(jnp.ones(2)).tolist() == [2.0, 2.0]
    assert load().steps == 1


TOTAL = {"n": 2}


def reads_more(x):
    return x * RATE["k"]  # a root that the trace takes in: it is repeated without its body


def counts_more(x):
    TOTAL["n"] += 1  # which is a counter: the finished trace does not fit, and the body runs again
    return x * RATE["k"]


class Rates:
    rate = 1.0


rates = types.ModuleType("rates")


def sets_class():
    Rates.rate = 5.0


def sets_module():
    rates.rate = 5.0


def sets_by_text():
    setattr(Rates, "rate", 5.0)  # noqa: B010 - what is tried


@pytest.mark.parametrize("change", [sets_class, sets_module, sets_by_text])
def test_a_cache_is_not_filled_with_what_was_before_a_change(change):
    Rates.rate = rates.rate = 1.0

    @functools.cache
    def rated(n):
        return n * Rates.rate * rates.rate

    @graftax.jit
    def f(x):
        change()
        return x * rated(2)

    assert f(jnp.ones(())) == 10 and rated(2) == 10 and f(jnp.ones(())) == 10


@pytest.mark.parametrize("helper", [reads_more, counts_more])
@pytest.mark.parametrize("is_guarded", [True, False], ids=["guarded", "plain"])
@pytest.mark.parametrize("ask", [lambda f: f(), lambda f: f(1), lambda f: f(n=1)], ids=["default", "position", "name"])
def test_what_a_trace_has_put_into_a_cache_is_changed_once(helper, is_guarded, ask):
    @functools.lru_cache(8)
    def rows(n=1):
        return {"n": n}

    def guarded(read):
        try:
            return read()
        except Exception as error:
            return error

    def f(x):
        ask(rows)["n"] += 1
        return guarded(lambda: helper(x)) if is_guarded else helper(x)

    total, jitted = TOTAL["n"], graftax.jit(f)
    for count in (2, 3, 4):
        assert jitted(jnp.ones(1)).tolist() == [2.0]
        assert (ask(rows)["n"], TOTAL["n"] - total) == (count, (count - 1) * (helper is counts_more))


@pytest.mark.parametrize("size", [None, 8])
def test_a_cache_of_a_method_keeps_its_entries_and_is_no_input(size):
    class Scale:
        def __init__(self, w, n):
            self.w, self.n = w, n

        @functools.lru_cache(size)  # noqa: B019 - what is tried
        def scaled(self):
            return self.w * self.n

    jitted = graftax.jit(lambda scale: scale.scaled(), numbers="static")
    for n in (1, 2, 3):
        outside, given = Scale(jnp.ones(2), n), Scale(jnp.ones(2), n)
        assert outside.scaled().tolist() == jitted(given).tolist() == jitted(given).tolist() == [n, n]


@pytest.mark.parametrize("size", [None, 8])
def test_a_call_that_fails_leaves_a_cache_in_order(size):
    @functools.lru_cache(size)
    def double(n):
        return {"w": jnp.ones(2) * n}

    def f(x):
        double(1)["w"] = x
        double(5)
        raise KeyError("mine")

    cached = double(1)
    with pytest.raises(KeyError, match="mine"):
        graftax.jit(f)(jnp.ones(2))
    assert cached["w"].tolist() == [1, 1]
    for _ in range(2):
        assert double(1)["w"].tolist() == [1, 1] and double(5)["w"].tolist() == [5, 5]
    assert double.cache_info().currsize == 2


@functools.cache
def registry():
    return {"n": 0}


@functools.cache
def large():
    return [{"i": i} for i in range(50)]


def test_a_trace_looks_at_the_caches_that_its_code_names(monkeypatch):
    looked: list[object] = []
    results_in = caches_after_traces.results_in
    monkeypatch.setattr(caches_after_traces, "results_in", lambda cache: looked.append(cache) or results_in(cache))
    assert graftax.jit(lambda x: x * len(large()))(jnp.ones(1)) == 50

    def fails(x, is_known):
        if is_known:
            registry()["n"] += 1
            raise KeyError("mine")
        return x * 2

    other = graftax.jit(lambda x: x + registry()["n"])
    assert other(jnp.ones(1)) == 1
    looked.clear()
    jitted = graftax.jit(fails)
    with pytest.raises(KeyError, match="mine"):  # it meets a cache that another function has named before
        jitted(jnp.ones(1), True)
    assert registry() == {"n": 0} and jitted(jnp.ones(1), False) == 2
    assert registry in looked and large not in looked
