# SPDX-License-Identifier: Apache-2.0
"""Each row of the tables in docs/from-jax-jit.md: what `jax.jit` does, and what `graftax.jit` does instead."""

import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax

PAGE = Path(__file__).parents[2] / "docs" / "from-jax-jit.md"
TESTED = []


def row(first_cell):
    """Names the row that a test is of."""
    TESTED.append(first_cell)
    return lambda test: test


def rows():
    """The cells of all rows, without links."""
    text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", PAGE.read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [line for line in cells if line[0] not in ("the program", "---", "the test looks at")]


def test_each_row_has_a_reason_and_a_test():
    assert [first for first, *_ in rows()] == TESTED
    assert all(all(cells) for cells in rows())


@row("computes with Python numbers only")
def test_numbers():
    for jit, kind in (jax.jit, jax.Array), (graftax.jit, int):
        assert isinstance(jit(lambda x: x + 1)(3), kind)


@row("returns a NumPy array")
def test_numpy():
    for jit, kind in (jax.jit, jax.Array), (graftax.jit, np.ndarray):
        assert isinstance(jit(lambda: np.ones(2))(), kind)


@row("reads `.shape` or `.astype` of a number")
def test_shape_of_a_number():
    def shape(x):
        return jnp.zeros(x.shape)

    assert jax.jit(shape)(3).shape == graftax.jit(shape, dynamic="x")(3).shape == ()
    with pytest.raises(AttributeError):
        graftax.jit(shape)(3)


@row("passes a number at first, and an array from then on")
def test_a_number_and_then_an_array():
    by_jax, traces = jax.jit(lambda x: traces.append(None) or x * 2), []
    by_graftax = graftax.jit(lambda x: x * 2)
    for x in 0.5, jnp.asarray(0.5):
        by_jax(x), by_graftax(x)
    assert len(traces) == 1 and by_graftax.cache_info().traces == 2
    assert "number, is an array" in str(graftax.explain(by_graftax))


@row("lowers for a number")
def test_lowering_for_a_number():
    def add_one(x):
        return x + jnp.float32(1)

    assert jax.jit(add_one).lower(1.0).compile()(2.0) == 3
    with pytest.raises(graftax.StructureError):
        graftax.jit(add_one).lower(1.0).compile()(2.0)


@row("computes a NaN from Python numbers, under `debug_nans`")
def test_nans_of_numbers():
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError):
            jax.jit(lambda x: x * 0)(float("inf"))
        assert np.isnan(graftax.jit(lambda x: x * 0)(float("inf")))


@row("returns an argument")
def test_an_argument_is_returned():
    x = jnp.ones(2)
    for jit, is_same in (jax.jit, False), (graftax.jit, True):
        assert (jit(lambda x: x)(x) is x) == is_same


@row("returns a dict")
def test_a_dict_is_returned():
    x = jnp.ones(2)
    for jit, keys in (jax.jit, ["a", "b"]), (graftax.jit, ["b", "a"]):
        assert list(jit(lambda d: d)({"b": x, "a": x})) == keys


@row("appends to a list, counts in a `nonlocal`")
def test_a_list_that_grows():
    for jit, length, kind in (jax.jit, 1, jax.core.Tracer), (graftax.jit, 3, jax.Array):
        inputs_seen, n = [], 0

        @jit
        def f(x, inputs_seen=inputs_seen):
            nonlocal n
            n += 1
            inputs_seen.append(x * 2)
            return x

        for _ in range(3):
            f(jnp.ones(()))
        assert n == len(inputs_seen) == length and isinstance(inputs_seen[-1], kind)


@row("changes an argument in place")
def test_an_argument_is_changed():
    def count(counts):
        counts["n"] += 1

    for jit, expected in (jax.jit, 0), (graftax.jit, 1):
        counts = {"n": jnp.zeros(())}
        jit(count)(counts)
        assert counts["n"] == expected


@row("reads a variable that changes")
def test_a_variable_that_changes():
    for jit, expected in (jax.jit, 2), (graftax.jit, 3):
        scale = 2.0
        f = jit(lambda x: x * scale)
        f(jnp.ones(()))
        scale = 3.0
        assert f(jnp.ones(())) == expected


@row("captures a large array")
def test_a_large_captured_array():
    table = np.arange(1000.0, dtype=np.float32)
    for jit, is_constant in (jax.jit, True), (graftax.jit, False):
        text = jit(lambda x: x + table).lower(jnp.float32(1)).as_text()
        assert ('stablehlo.constant dense<"0x' in text) == is_constant


@row("declares an object with arrays static")
def test_a_static_object_with_arrays():
    class Layer:
        pass

    for jit, expected in (jax.jit, 2), (graftax.jit, 20):
        layer = Layer()
        layer.w = jnp.ones(2)
        f = jit(lambda layer, x: (layer.w * x).sum(), static_argnums=0)
        assert f(layer, 1.0) == 2
        layer.w = layer.w * 10
        assert f(layer, 1.0) == expected


@row("passes strings, static lists, or any other object")
def test_other_objects():
    def chosen(x, mode):
        return x.sum() if mode[0] == "sum" else x

    with pytest.raises(TypeError):
        jax.jit(chosen)(jnp.ones(3), ["sum"])
    with pytest.raises(ValueError):
        jax.jit(chosen, static_argnums=1)(jnp.ones(3), ["sum"])
    assert graftax.jit(chosen)(jnp.ones(3), ["sum"]) == 3
    assert graftax.jit(chosen, static_argnums=1)(jnp.ones(3), ["max"]).shape == (3,)


@row("passes one `jax.Ref` twice, or returns one")
def test_refs():
    def added(x, y):
        x[...] += y[...]
        return x

    ref = jax.new_ref(jnp.ones(()))
    with pytest.raises(ValueError):
        jax.jit(added)(ref, ref)
    assert graftax.jit(added)(ref, ref) is ref and ref[...] == 2


@row("is compiled ahead of time with static arguments")
def test_static_arguments_of_a_program():
    def power(x, n):
        return x**n

    for jit in jax.jit, graftax.jit:
        squared = jit(power, static_argnums=1).lower(jnp.float32(3), 2).compile()
        assert squared(jnp.float32(3)) == 9
        if jit is graftax.jit:
            assert squared(jnp.float32(3), 2) == 9
        else:
            with pytest.raises(TypeError):
                squared(jnp.float32(3), 2)


@row("gives a program that was compiled ahead of time another structure")
def test_another_structure():
    for jit, error, text in (jax.jit, TypeError, "pytree"), (graftax.jit, graftax.StructureError, r"x\b"):
        program = jit(lambda x: x).lower(jnp.ones(2)).compile()
        with pytest.raises(error, match=text):
            program([jnp.ones(2)])


@row("names a positional-only parameter in an option")
def test_a_positional_only_parameter():
    def shaped(n, /):
        return jnp.zeros(n)

    with pytest.raises(ValueError):
        jax.jit(shaped, static_argnames="n")
    assert graftax.jit(shaped, static_argnames="n")(3).shape == (3,)


@row("reads an iterator or an open file")
def test_an_iterator():
    for jit in jax.jit, graftax.jit:
        numbers = iter([1.0, 2.0])
        f = jit(lambda x: x + next(numbers))
        if jit is jax.jit:
            assert f(0.0) == f(0.0) == 1
        else:
            with pytest.raises(graftax.UnsupportedValueError):
                f(0.0)


@row("prints the compiled function")
def test_texts():
    for jit, text in (jax.jit, "<PjitFunction of"), (graftax.jit, "<graftax.jit of"):
        assert repr(jit(lambda x: x)).startswith(text)


@row("passes `device=` or `backend=`, deprecated in JAX")
def test_device():
    with pytest.raises(TypeError):
        graftax.jit(lambda x: x, device=jax.devices()[0])


@row("`_cache_size()`")
def test_cache_size():
    for jit in jax.jit, graftax.jit:
        f = jit(lambda x: x + 1)
        f(jnp.ones(2)), f(jnp.ones(3)), f(jnp.ones(3))
        assert f._cache_size() == 2


@row("`isinstance(x, jax.core.Tracer)` where `x` is a Python number")
def test_tracers():
    for jit, is_tracer in (jax.jit, True), (graftax.jit, False):
        are_tracers = []
        jit(lambda x, are_tracers=are_tracers: are_tracers.append(isinstance(x, jax.core.Tracer)))(1)
        assert are_tracers == [is_tracer]


@row("a captured flag that forbids another trace (`assert may_trace`)")
def test_a_flag():
    for jit in jax.jit, graftax.jit:
        may_trace = True

        @jit
        def f(x):
            assert may_trace
            return x

        f(jnp.ones(()))
        may_trace = False
        if jit is jax.jit:
            f(jnp.ones(()))
        else:
            with pytest.raises(AssertionError):
                f(jnp.ones(()))


@row("what JAX logs under `jax_explain_cache_misses`")
def test_logged_causes(caplog):
    for jit in jax.jit, graftax.jit:
        f = jit(lambda x: jax.tree.leaves(x)[0])
        f(jnp.ones(2))
        caplog.clear()
        with caplog.at_level(logging.WARNING), jax.explain_cache_misses(True):
            f([jnp.ones(2)])
        assert ("different input pytree" in caplog.text) == (jit is jax.jit)
        assert ("never seen function" in caplog.text) == (jit is graftax.jit)
    assert "list" in str(graftax.explain(f))


@row("`__getstate__()`, `_fun`, `_executable`")
def test_private_attributes():
    f = graftax.jit(lambda x: x)
    for name in "_fun", "_executable":
        assert not hasattr(f, name)
