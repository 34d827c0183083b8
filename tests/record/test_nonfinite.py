# SPDX-License-Identifier: Apache-2.0
"""`graftax.nonfinite`: planted faults, each with the line that has to be named."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import graftax

f32 = jnp.float32


class Faults:
    """Methods of a layer with one array, each with a fault for some of its values."""

    w: Any

    def exp(self, x: Any) -> Any:
        return jnp.exp(x * self.w)  # HERE exp

    def log(self, x: Any) -> Any:
        return jnp.log(x * self.w)  # HERE log

    def norm(self, x: Any) -> Any:
        return x / jnp.sum(x * self.w)  # HERE norm

    def root(self, x: Any) -> Any:
        return jnp.where(x > 0, jnp.sqrt(x * self.w), 0.0)  # HERE root

    def length(self, x: Any) -> Any:
        return jnp.linalg.norm(x * self.w)  # HERE length

    def half(self, x: Any) -> Any:
        return (x * self.w).astype(jnp.float16) * 1000  # HERE half

    def grow(self, x: Any) -> Any:
        return lax.scan(lambda c, _: (c * self.w * 1e9, None), x, None, length=6)[0]  # HERE grow

    def shrink(self, x: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.log(c) * self.w, c), x, None, length=5)[1]  # HERE shrink

    def until(self, x: Any) -> Any:
        return lax.while_loop(lambda c: c[1] < 9, lambda c: (c[0] * 1e10 * self.w, c[1] + 1), (x, 0))[0]  # HERE until

    def either(self, x: Any) -> Any:
        return lax.cond(x.sum() < 1e9, lambda y: jnp.log(y * self.w), lambda y: y, x)  # HERE either

    def again(self, x: Any) -> Any:
        return jax.checkpoint(lambda y: jnp.log(y * self.w))(x)  # HERE again

    def squared(self, x: Any) -> Any:
        return (x * self.w) ** 2  # HERE squared

    def arc(self, x: Any) -> Any:
        return jnp.arccos(x * self.w)  # HERE arc

    def power(self, x: Any) -> Any:
        return jnp.power(x * self.w, 0.5)  # HERE power

    def mapped(self, x: Any) -> Any:
        return jax.vmap(lambda y: jnp.log(y * self.w))(x)  # HERE mapped


class Scale(Faults):
    def __init__(self, w: Any) -> None:
        self.w = w


class ScaleModule(Faults, eqx.Module):
    w: Any


class ScaleNNX(Faults, nnx.Module):
    def __init__(self, w: Any) -> None:
        self.w = nnx.Param(w)


KINDS = {"plain": Scale, "equinox": ScaleModule, "nnx": ScaleNNX}


class Net:
    """Three layers by their method; the second is at fault."""

    def __init__(self, kind: str, method: str, weights: Any) -> None:
        self.layers = [KINDS[kind](w) for w in weights]
        self.method = method

    def __call__(self, x: Any) -> Any:
        x = x * self.layers[0].w
        x = getattr(self.layers[1], self.method)(x)
        return x * self.layers[2].w


def net(method: str, w: float, kind: str = "plain") -> Net:
    return Net(kind, method, [jnp.ones(()), jnp.asarray(w), jnp.ones(())])


FORWARD = {  # method: (weight, input, operation, loops)
    "exp": (100.0, 3.0, "exp", 0),
    "log": (-1.0, 3.0, "log", 0),
    "norm": (0.0, 3.0, "div", 0),
    "half": (100.0, 3.0, "mul", 0),
    "grow": (1.0, 3.0, "mul", 1),
    "shrink": (1.0, 3.0, "log", 1),
    "until": (1.0, 3.0, "mul", 1),
    "either": (-1.0, 3.0, "log", 1),
    "again": (-1.0, 3.0, "log", 0),
    "squared": (1e30, 3.0, "integer_pow square mul", 0),
    "arc": (1.0, 3.0, "acos", 0),
    "power": (-1.0, 3.0, "pow sqrt", 0),
    "mapped": (-1.0, 3.0, "log", 0),
}
BACKWARD = {"root": (1.0, 0.0), "length": (1.0, 0.0)}


def line_of(marker: str, where: Any) -> int:
    lines, first = inspect.getsourcelines(where)
    return first + next(i for i, line in enumerate(lines) if line.rstrip().endswith(f"# HERE {marker}"))


def loss(model: Any, x: Any) -> Any:
    return model(x).astype(f32).sum()


CALLS: dict[str, Callable[..., Any]] = {"forward": loss, "gradient": graftax.grad(loss)}


CASES = [(call, method) for call in CALLS for method in FORWARD if (call, method) != ("gradient", "until")]


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("call", "method"), CASES)  # JAX has no gradient of a while loop
def test_a_fault_of_a_method_is_named_by_object_line_and_operation(call: str, method: str, kind: str):
    w, x, operation, loops = FORWARD[method]
    report = graftax.nonfinite(CALLS[call], net(method, w, kind), jnp.full(3, x))
    cause = report.cause
    assert report and cause is not None
    assert cause.path.endswith("model.layers[1]") and cause.line == line_of(method, Faults)
    assert cause.operation in operation.split() and len(cause.loops) == loops
    assert call == "gradient" or not cause.is_backward
    assert str(cause).startswith("model.layers[1]: ") and f"test_nonfinite.py:{cause.line}" in str(report)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", BACKWARD)
def test_a_fault_of_the_derivative_is_named_by_the_line_of_the_function(method: str, kind: str):
    w, x = BACKWARD[method]
    model, data = net(method, w, kind), jnp.full(3, x)
    assert not graftax.nonfinite(loss, model, data)
    report = graftax.nonfinite(graftax.value_and_grad(loss), model, data)
    cause = report.cause
    assert cause is not None and cause.path == "model.layers[1]"
    assert cause.line == line_of(method, Faults) and cause.is_backward and "result[0]" not in report.results


def test_the_iteration_and_the_operand_are_told():
    cause = graftax.nonfinite(loss, net("grow", 1.0), jnp.full(3, 3.0)).cause
    assert cause is not None and cause.loops == ("iteration 4 of scan",)
    assert cause.value == "inf" and cause.inputs[0].startswith("float32[3] from 3e+36")
    cause = graftax.nonfinite(loss, net("log", -1.0), jnp.full(3, 3.0)).cause
    assert cause is not None and cause.operands == ("-3",) and cause.value == "nan"


class Dense(eqx.Module):
    linear: eqx.nn.Linear
    limit: float

    def __call__(self, x: Any) -> Any:
        y = self.linear(x)
        return jnp.log(y - self.limit)  # HERE eqx


class Tower(nnx.Module):
    def __init__(self) -> None:
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(2)])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)  # HERE nnx
        return x


class Deep:
    def __init__(self, w: float) -> None:
        self.w = jnp.asarray(w)

    def __call__(self, x: Any) -> Any:
        for _ in range(12):
            x = x + jnp.tanh(x * self.w)
        return jnp.log(self.w) * x


def test_a_layer_that_shares_its_program_is_named():
    layers = [Deep(w) for w in (1.0, 1.0, 1.0, 1.0, -1.0, 1.0)]

    @graftax.jit
    def run(layers: list[Deep], x: Any) -> Any:
        for layer in layers:
            x = layer(x)
        return x

    run(layers, jnp.ones(3))
    assert graftax.explain(run).variants[0].repeated == ("Deep: traced once for 5 calls",)
    cause = graftax.nonfinite(run, layers, jnp.ones(3)).cause
    assert cause is not None and cause.path == "layers[4]"


@pytest.mark.quick(0)  # the table above has Equinox modules, too
def test_equinox_modules_are_named():
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    model = [Dense(linear, 0.0), Dense(linear, 99.0)]
    report = graftax.nonfinite(lambda model, x: model[1](model[1].linear(x)), model, jnp.ones(2))
    assert report.cause is not None
    assert report.cause.path == "model[1]" and report.cause.line == line_of("eqx", Dense)


@pytest.mark.quick(0)  # the optimizer is one, too
def test_a_fault_inside_of_a_library_names_your_line_and_its_own():
    model = Tower()
    model.layers[1].kernel[...] = jnp.full((2, 2), 3e38)
    cause = graftax.nonfinite(lambda model, x: model(x), model, jnp.full(2, 5.0)).cause
    assert cause is not None and cause.path == "model.layers.1" and cause.operation == "dot_general"
    assert cause.line == line_of("nnx", Tower) and "linear.py" in cause.inside


def masked(x: Any) -> Any:
    return jnp.where(x > 5, jnp.log(x - 5), x)


def masked_by_slice(x: Any) -> Any:
    return jnp.log(x - jnp.arange(3.0))[:2]


def masked_by_exp(x: Any) -> Any:
    return jnp.exp(jnp.log(x * 0))


def masked_by_maximum(x: Any) -> Any:
    return jnp.maximum(jnp.log(x * 0), 1)


@pytest.mark.quick(4)
@pytest.mark.parametrize("function", [masked, masked_by_slice, masked_by_exp, masked_by_maximum])
def test_a_value_that_reaches_no_result_is_listed_and_not_blamed(function: Callable[..., Any]):
    report = graftax.nonfinite(function, jnp.full(3, 2.0))
    assert not report and report.cause is None and not report.results
    assert [origin.operation for origin in report.masked] == ["log"] and "masked: " in str(report)


def test_of_two_faults_the_one_that_is_masked_is_not_blamed():
    def two(x: Any) -> Any:
        first = jnp.where(x > 5, jnp.log(x - 5), x)
        return first + jnp.sqrt(-x)

    report = graftax.nonfinite(two, jnp.full(3, 2.0))
    assert report.cause is not None and report.cause.operation == "sqrt"
    assert [origin.operation for origin in report.masked] == ["log"]


def test_a_constant_that_masks_on_purpose_is_not_the_cause():
    def attention(x: Any) -> Any:
        return jax.nn.softmax(jnp.where(x > 5, x, -jnp.inf))

    cause = graftax.nonfinite(attention, jnp.ones(3)).cause
    assert cause is not None and cause.operation == "sub" and cause.value == "nan"
    assert not graftax.nonfinite(attention, jnp.array([1.0, 9.0]))


def test_a_bad_batch_is_named_by_its_path():
    report = graftax.nonfinite(lambda w, batch: w * batch["x"], f32(2), {"x": np.array([1, np.nan], np.float32)})
    assert str(report.cause) == "batch['x']: the argument is nan already"


def test_what_a_call_would_change_is_a_result_and_nothing_changes():
    def step(model: Any, x: Any) -> None:
        model.w = model.w - jnp.log(x)

    model, before = Scale(jnp.ones(2)), None
    before = model.w
    report = graftax.nonfinite(step, model, jnp.zeros(2))
    assert report.results == ["model.w"] and model.w is before


def test_an_optimizer_that_divides_by_zero():
    optimizer = optax.scale_by_rms(decay=0.0, eps=0.0)

    def step(w: Any, gradient: Any) -> Any:
        updates, _ = optimizer.update(gradient, optimizer.init(w))  # HERE optimizer
        return optax.apply_updates(w, updates)

    cause = graftax.nonfinite(step, jnp.ones(2), jnp.zeros(2)).cause
    assert cause is not None and cause.line == line_of("optimizer", step) and cause.inside


@jax.custom_vjp
def rule(x: Any) -> Any:
    return jnp.log(x + 10)


rule.defvjp(lambda x: (rule(x), x), lambda x, g: (g / x,))


@jax.custom_jvp
def other_rule(x: Any) -> Any:
    return x * 2


@other_rule.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return other_rule(primals[0]), tangents[0] * jnp.log(primals[0])


@pytest.mark.parametrize(("function", "operation"), [(rule, "div"), (other_rule, "log")])
def test_the_derivative_of_a_custom_rule(function: Callable[..., Any], operation: str):
    def total(x: Any) -> Any:
        return function(x).sum()

    assert not graftax.nonfinite(total, jnp.zeros(2))
    cause = graftax.nonfinite(jax.grad(total), jnp.zeros(2)).cause
    assert cause is not None and cause.operation == operation and cause.is_backward


def test_the_body_of_a_custom_rule():
    cause = graftax.nonfinite(rule, jnp.full(2, -11.0)).cause
    assert cause is not None and cause.operation == "log" and cause.operands == ("-1",)


def test_backward_through_a_loop():
    def recurrent(w: Any, x: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.sqrt(c * w), None), x, None, length=3)[0].sum()  # HERE recurrent

    report = graftax.nonfinite(jax.grad(recurrent), f32(1), jnp.zeros(2))
    assert report.cause is not None and report.cause.line == line_of("recurrent", recurrent)
    assert report.cause.loops


def test_bfloat16_overflows():
    cause = graftax.nonfinite(lambda x: x * x, jnp.full(2, 1e30, jnp.bfloat16)).cause
    assert cause is not None and cause.operation in ("mul", "square", "integer_pow")
    assert "bfloat16[2]" in cause.inputs[0]


def test_a_jitted_function_and_its_captures_are_taken_as_they_are():
    scale = jnp.zeros(2)

    @graftax.jit
    def divide(x: Any) -> Any:
        return x / scale

    report = graftax.nonfinite(divide, jnp.ones(2))
    assert report.cause is not None and report.cause.operands == ("1", "0")


def test_a_report_has_a_table_and_a_page():
    report = graftax.nonfinite(lambda x: jnp.log(x), jnp.zeros(2))
    (row,) = report.table()
    assert row["role"] == "cause" and row["operation"] == "log" and isinstance(report, graftax.NonfiniteReport)
    assert "<table>" in report._repr_html_() and "&lt;lambda&gt;" in report._repr_html_()
    assert str(graftax.nonfinite(lambda x: x, jnp.ones(2))) == "<lambda>: all results are finite"


@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="this JAX has no jax.new_ref")
def test_what_is_written_into_a_ref_is_followed_and_the_callers_ref_stays():
    ref = jax.new_ref(jnp.ones(2))

    def write(ref: Any, x: Any) -> Any:
        ref[...] = jnp.log(ref[...] - 2)  # HERE ref
        return ref[...] * x

    report = graftax.nonfinite(write, ref, jnp.ones(2))
    assert report.cause is not None and report.cause.operation == "log" and not report.masked
    assert report.cause.line == line_of("ref", write) and report.results == ["result", "ref"]
    assert (ref[...] == 1).all()


def test_what_the_function_prints_is_not_repeated(capfd: pytest.CaptureFixture[str]):
    def prints(x: Any) -> Any:
        jax.debug.print("{}", x)
        return jnp.log(x)

    assert graftax.nonfinite(prints, jnp.zeros(2)).cause is not None
    jax.effects_barrier()
    assert capfd.readouterr().out == ""
