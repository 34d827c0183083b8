# SPDX-License-Identifier: Apache-2.0
"""Numbers that change together with the structure, keys and rows of a number, and the line that asks for a value."""

from __future__ import annotations

import math
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax


def traces(f: Any) -> int:
    return f.cache_info().traces


class Run:
    def __init__(self) -> None:
        self.p: dict[str, Any] = {"w": jnp.ones(3), "b": jnp.zeros(())}  # tree functions sort it
        self.step, self.rate, self.metrics = 0, 0.01, dict[str, Any]()


def train(run: Run, x: jax.Array) -> jax.Array:
    grads = jax.grad(lambda p: ((x * p["w"] + p["b"]) ** 2).sum())(run.p)
    run.p = jax.tree.map(lambda p, g: p - run.rate * 0.5**run.step * g, run.p, grads)
    run.metrics = {"norm": grads["b"]}
    return run.p["b"]


def test_a_counter_that_changes_while_its_object_is_set_up_is_symbolic_at_once():
    step, run, plain = graftax.jit(train), Run(), Run()
    for _ in range(12):
        out, expected = step(run, jnp.arange(3.0)), train(plain, jnp.arange(3.0))
        np.testing.assert_allclose(out, expected, rtol=1e-5)
        run.step, plain.step = run.step + 1, plain.step + 1  # outside, where no trace shows that it is a counter
    assert run.step == plain.step == 12 and list(run.p) == ["b", "w"]
    assert traces(step) == 2
    texts = [str(cause) for cause in graftax.explain(step).variants[1].causes]
    assert "run.step was 0, is 1: from now on, one program takes any value" in texts


def test_explain_says_it_beforehand():
    step, run = graftax.jit(lambda run, x: train(run, x)), Run()
    step(run, jnp.arange(3.0))
    run.step += 1
    causes = graftax.explain(step, run, jnp.arange(3.0)).causes
    assert "run.step was 0, is 1: from now on, one program takes any value" in [str(cause) for cause in causes]


def test_a_number_whose_value_is_asked_for_stays_static_in_new_structures():
    f = graftax.jit(lambda x, n, extra: jnp.zeros(n) + x + len(extra))
    for i in range(3):
        f(1.0, 2 + i, {})
    for i in range(3):
        assert f(1.0, 2 + i, {"a": 1}).shape == (2 + i,)
    kinds = [[cause.kind for cause in variant.causes] for variant in graftax.explain(f).variants]
    assert traces(f) == 6 and "symbol" in kinds[1] and "symbol" not in kinds[3]


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey], ids=["key", "PRNGKey"])
def test_keys_of_a_number_are_compiled_once(make: Any):
    f = graftax.jit(lambda seed: jax.random.key_data(make(seed + 1)))
    for seed in (0, 1, 2, 7, -3, 2**31 - 2, -(2**31) - 1):
        assert np.array_equal(f(seed), jax.random.key_data(make(seed + 1)))
    assert traces(f) == 2
    for seed in (2**31, 2**40, -(2**35)):  # an int32 does not hold them
        assert np.array_equal(f(seed), jax.random.key_data(make(seed + 1)))


ROWS: dict[str, Any] = {
    "row": lambda x, i: x[i],
    "column": lambda x, i: x[:, i],
    "element": lambda x, i: x[i, i],
    "computed": lambda x, i: x[i - 1],
    "part of a row": lambda x, i: x[i, :2],
    "gradient": lambda x, i: jax.grad(lambda x: (x[i] ** 3).sum())(x),
    "mapped": lambda x, i: jax.vmap(lambda row: row[i])(x),
}


@pytest.mark.quick(0)
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_a_number_are_compiled_once(name: str):
    x, f = jnp.arange(16.0).reshape(4, 4), graftax.jit(ROWS[name])
    for i in (0, 1, 2, 3, -1, -4, 5, -7):
        assert np.array_equal(f(x, i), ROWS[name](x, i))
    assert traces(f) == 2


def test_explain_names_the_line_that_asks_for_a_value():
    def shaped(x: Any, n: int) -> Any:
        return x + jnp.zeros(n)

    f, line = graftax.jit(shaped), shaped.__code__.co_firstlineno + 1
    with pytest.warns(graftax.RecompileWarning, match=rf"line test_numbers_of_new_structures\.py:{line} needs"):
        for n in range(1, 6):
            f(1.0, n)
    cause = graftax.explain(f).variants[2].causes[0]
    assert (cause.kind, cause.path, cause.before, cause.now) == ("asked", "n", "2", "3")
    assert str(cause) == f"n was 2, is 3 (test_numbers_of_new_structures.py:{line} needs its value)"


class Scaled(eqx.Module):
    w: jax.Array
    step: int

    def __call__(self, x: Any) -> Any:
        return x * self.w * 0.5**self.step


def typed(model: Scaled, x: Any) -> Any:
    return x * math.sqrt(model.step) if type(model.step) is int and model.step % 2 else x * float(model.step)


BY_VALUE: dict[str, Any] = {
    "called": lambda model, x: model(x),
    "returned": lambda model, x: eqx.tree_at(lambda m: m.step, model, model.step + 1),
    "gradient": lambda model, x: graftax.filter_grad(lambda m: m(x).sum())(model).w,
    "gradient of equinox": lambda model, x: eqx.filter_grad(lambda m: m(x).sum())(model).w,
    "mapped": lambda model, x: eqx.filter_vmap(model)(x),
    "parts": lambda model, x: eqx.combine(*eqx.partition(model, eqx.is_array))(x),
    "what Python asks": typed,
}


ONCE = 1 if sys.version_info >= (3, 12) else 2  # compilations, where the trace alone shows that a number changes


@pytest.mark.parametrize("name", BY_VALUE)
def test_filter_jit_takes_numbers_that_change(name: str):
    f = graftax.filter_jit(BY_VALUE[name])
    for i in (0, 1, 2, 3, 7, 4):
        model = Scaled(jnp.full(3, 2.0), i)
        expected, out = BY_VALUE[name](model, jnp.arange(3.0)), f(model, jnp.arange(3.0))
        if isinstance(out, Scaled):
            assert (out.step, type(out.step)) == (i + 1, int)
        else:
            np.testing.assert_allclose(out, expected, rtol=1e-6)
    assert traces(f) == {"what Python asks": 3, "returned": ONCE}.get(name, 2)


def test_what_a_function_by_value_reads_is_still_as_in_jax():
    rates = {"rate": 2.0}
    f = graftax.filter_jit(lambda x, n: x * n * rates["rate"])
    for n in range(1, 5):
        assert f(jnp.float32(1), n) == 2.0 * n
    rates["rate"] = 3.0  # not seen, as under jax.jit
    assert f(jnp.float32(1), 5) == 10.0 and traces(f) == 2


SHARDED: dict[str, Any] = {
    "one": lambda spec: spec,
    "a tree": lambda spec: {"loss": None, "step": None, "w": spec},
    "without the number": lambda spec: {"loss": None, "w": spec},
}


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("in_shardings", [False, True])
def test_numbers_with_shardings_of_the_result(name: str, in_shardings: bool):
    def go(run: Run, x: jax.Array) -> Any:
        run.step += 1
        run.p["w"] = run.p["w"] - x * 0.5**run.step
        return {"loss": run.p["w"].sum(), "step": run.step, "w": run.p["w"] * run.step}

    spec = jax.sharding.NamedSharding(jax.make_mesh((1,), ("d",)), jax.sharding.PartitionSpec())
    options = {"in_shardings": (None, spec)} if in_shardings else {}
    step, run, plain = graftax.jit(go, out_shardings=SHARDED[name](spec), **options), Run(), Run()
    for _ in range(6):
        out, expected = step(run, jnp.arange(3.0)), go(plain, jnp.arange(3.0))
        assert out["step"] == expected["step"] == run.step and type(out["step"]) is int
        assert np.array_equal(out["w"], expected["w"]) and out["w"].sharding == spec
    assert traces(step) <= 3
