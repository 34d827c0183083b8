# SPDX-License-Identifier: Apache-2.0
"""Warm, frozen, counted: `lower`, `warm` and the call share one trace; a frozen function compiles nothing."""

from __future__ import annotations

import io
import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax


def compiled_in(call, name):
    """How often XLA compiles the function of this name, as JAX logs it."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("jax").addHandler(handler)
    try:
        with jax.log_compiles():
            call()
    finally:
        logging.getLogger("jax").removeHandler(handler)
    return sum(text.startswith("Finished XLA compilation") and f"({name})" in text for text in said)


def shapes(*sizes):
    return [jax.ShapeDtypeStruct((n,), jnp.float32) for n in sizes]


MODEL = {"w": jnp.ones(())}


def test_a_compilation_is_counted():
    assert compiled_in(lambda: graftax.jit(lambda x: x * 3)(jnp.ones(2)), "<lambda>") == 1


@pytest.mark.parametrize("way", ["lower", "trace"])
@pytest.mark.parametrize("x", [jnp.ones(3), jax.ShapeDtypeStruct((3,), jnp.float32), np.ones(3, np.float32)])
@pytest.mark.parametrize("many", [False, True], ids=["few leaves", "many leaves"])
def test_a_call_after_a_stage_traces_and_compiles_nothing(way, x, many):
    def scaled(model, x):
        model["seen"] = x.sum()
        return model["w"] * x

    f = graftax.jit(scaled)
    model = MODEL | ({f"p{i}": jnp.ones(()) for i in range(40)} if many else {})
    lowered = f.lower(model, x) if way == "lower" else f.trace(model, x).lower()
    run = lowered.compile()
    given = model | {}
    assert compiled_in(lambda: f(given, jnp.ones(3)), "scaled") == 0
    assert f.cache_info().traces == 1 and given["seen"] == 3 and "seen" not in model
    given = model | {}
    assert run(given, jnp.ones(3)).tolist() == [1, 1, 1] and given["seen"] == 3


def test_a_stage_after_a_call_traces_and_compiles_nothing():
    f = graftax.jit(lambda x: x * 2)
    f(jnp.ones(3))
    assert compiled_in(lambda: f.lower(jnp.ones(3)).compile(), "<lambda>") == 0
    assert f.cache_info().traces == 1


def test_a_global_that_changes_after_lowering_is_seen(monkeypatch):
    monkeypatch.setitem(globals(), "RATE", 2)
    f = graftax.jit(lambda x: by_rate(x))
    f.lower(jnp.ones(2)).compile()
    monkeypatch.setitem(globals(), "RATE", 5)
    assert f(jnp.ones(2)).tolist() == [5, 5]


RATE = 2


def by_rate(x):
    return x * RATE


def test_lowering_a_donating_function_leaves_warnings_as_they_were(recwarn):
    f = graftax.jit(lambda x: x.sum(), donate="all")
    f.lower(jnp.ones(3)).compile()
    with pytest.warns(UserWarning, match="Some donated buffers were not usable"):
        import warnings

        warnings.warn("Some donated buffers were not usable", UserWarning, stacklevel=1)


# ---- warm


@pytest.mark.parametrize("threads", [1, 8])
def test_warm_compiles_what_calls_need(threads):
    f = graftax.jit(lambda model, x, mode: model["w"] * x * len(mode))
    reports = []
    calls = [(MODEL, x, mode) for x in shapes(2, 3) for mode in ("train", "eval")]
    f.warm(
        [*calls, {"model": MODEL, "x": jnp.ones(4), "mode": "eval"}],
        threads=threads,
        progress=lambda *t: reports.append(t),
    )
    assert [(done, of) for done, of, _ in reports] == [(i, 5) for i in range(1, 6)]

    def run():
        for n, mode in ((2, "train"), (2, "eval"), (3, "train"), (3, "eval"), (4, "eval")):
            assert f(MODEL, jnp.ones(n), mode).shape == (n,)

    assert compiled_in(run, "<lambda>") == 0
    assert f.cache_info().traces == 5


@pytest.mark.filterwarnings("error::graftax.RecompileWarning")
def test_what_is_asked_for_is_not_warned_of():
    f = graftax.jit(lambda x: x * 2)
    f.warm([(x,) for x in shapes(*range(8))])
    f(jnp.ones(9))
    assert len(graftax.explain(f).variants) == 9


def test_an_error_of_one_call_is_that_of_warm():
    f = graftax.jit(lambda x: x @ jnp.ones(3))
    with pytest.raises(TypeError, match="dot"):
        f.warm([(x,) for x in shapes(3, 4)])
    with pytest.raises(TypeError, match="each a tuple"):
        f.warm([jnp.ones(3)])
    with pytest.raises(TypeError, match="warm takes a list of calls"):
        f.warm(jnp.ones(()))


def test_a_terminal_shows_how_far_it_is(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    graftax.jit(lambda x: x * 2).warm([(x,) for x in shapes(1, 2)])
    assert "1/2 programs" in sys.stderr.getvalue() and sys.stderr.getvalue().endswith(" s\n")


# ---- frozen


@pytest.fixture
def frozen():
    f = graftax.jit(lambda x, mode: x * 2)
    f(jnp.ones(3), "a")
    f.freeze()
    return f


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        (lambda: (jnp.ones(4), "a"), r"x was shape \(3,\), is shape \(4,\)"),
        (lambda: (jnp.ones(3), "b"), "mode was 'a', is 'b'"),
        (lambda: (jnp.ones(3), ["a"]), "mode was 'a', is list"),
        (lambda: (jax.device_put(jnp.ones(3), jax.devices()[0]), "a"), "put on its device"),
    ],
)
def test_a_miss_of_a_frozen_function_raises_with_the_explanation(frozen, args, cause):
    def run():
        for _ in range(2):
            with pytest.raises(graftax.RecompileError, match=cause):
                frozen(*args())

    assert compiled_in(run, "<lambda>") == 0
    assert frozen(jnp.ones(3), "a").tolist() == [2, 2, 2]
    frozen.unfreeze()
    assert frozen(*args()).shape == args()[0].shape


def test_a_setting_is_a_miss_of_a_frozen_function_too(frozen):
    with jax.default_matmul_precision("highest"), pytest.raises(graftax.RecompileError, match="matmul_precision"):
        frozen(jnp.ones(3), "a")


# ---- assert_max_traces


def test_too_many_traces_are_an_error_that_explains_them():
    f = graftax.jit(lambda x: x * 2)
    f(jnp.ones(1))
    with graftax.assert_max_traces(f, 1):
        f(jnp.ones(1)), f(jnp.ones(2)), f(jnp.ones(2))
    with (
        pytest.raises(AssertionError, match=r"traced 2 times here, and at most 1(.|\n)*x was shape \(\d,\)"),
        graftax.assert_max_traces(f, 1),
    ):
        f(jnp.ones(3)), f(jnp.ones(4))


def test_only_jitted_functions_are_counted():
    with pytest.raises(TypeError, match=r"assert_max_traces takes"), graftax.assert_max_traces(len, 1):
        pass
