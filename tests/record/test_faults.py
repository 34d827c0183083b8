# SPDX-License-Identifier: Apache-2.0
"""Sixty-three planted faults, from a recorded call that goes wrong to the object and the line that its file names."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax

import graftax
from graftax._record.replay import RecordedCalls


@jax.custom_vjp
def halved(x: Any) -> Any:
    return x * 0.5


halved.defvjp(lambda x: (x * 0.5, x), lambda x, g: (0.5 * g * (x / x),))


class Faults:
    """Methods of a layer with one array `w`: each makes a nan or an infinity of some inputs."""

    w: Any

    def exp(self, x: Any) -> Any:
        return jnp.exp(x * self.w * 40)  # HERE exp

    def log(self, x: Any) -> Any:
        return jnp.log(2 - x * self.w)  # HERE log

    def normalized(self, x: Any) -> Any:
        return x / jnp.sum(x * self.w - 3)  # HERE normalized

    def arc(self, x: Any) -> Any:
        return jnp.arccos(x * self.w / 2)  # HERE arc

    def power(self, x: Any) -> Any:
        return jnp.power(2 - x * self.w, 0.5)  # HERE power

    def half(self, x: Any) -> Any:
        return (x * self.w).astype(jnp.float16) * 30000  # HERE half

    def brain(self, x: Any) -> Any:
        return (x * self.w).astype(jnp.bfloat16) * jnp.bfloat16(1.5e38)  # HERE brain

    def explode(self, x: Any) -> Any:
        def cell(carry: Any, _: Any) -> Any:
            return carry * carry * self.w, None  # HERE explode

        return lax.scan(cell, x, None, length=7)[0]

    def shrink(self, x: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.log(c) * self.w, c), 20 / x**3, None, length=3)[1]  # HERE shrink

    def until(self, x: Any) -> Any:
        return lax.while_loop(lambda c: c[1] < 7, lambda c: (c[0] ** 2 * self.w, c[1] + 1), (x, 0))[0]  # HERE until

    def either(self, x: Any) -> Any:
        return lax.cond(x.sum() < 4, lambda y: y, lambda y: jnp.log(2 - y * self.w), x)  # HERE either

    def chosen(self, x: Any) -> Any:
        rules = [lambda y: y, lambda y: y + 1, lambda y: jnp.sqrt(y * self.w - 9)]  # HERE chosen
        return lax.switch(x[0].astype(int) - 1, rules, x)

    def mapped(self, x: Any) -> Any:
        return jax.vmap(lambda y: jnp.log(2 - y * self.w))(x)  # HERE mapped

    def remade(self, x: Any) -> Any:
        return jax.checkpoint(lambda y: jnp.sqrt(2 - y * self.w))(x)  # HERE remade

    def guarded(self, x: Any) -> Any:
        masked = jnp.where(x > 9, jnp.log(x - 9), x)
        return jnp.sqrt(2 - masked * self.w)  # HERE guarded

    # Faults of the derivative: the value is finite.

    def length(self, x: Any) -> Any:
        return jnp.linalg.norm((x - 3) * self.w)  # HERE length

    def root(self, x: Any) -> Any:
        return jnp.where(x < 3, jnp.sqrt(jnp.abs(3 - x) * self.w), 0.0)  # HERE root

    def ratio(self, x: Any) -> Any:
        away = x * self.w - 3
        return jnp.where(away == 0, 1.0, jnp.sin(away) / away)  # HERE ratio

    def ruled(self, x: Any) -> Any:
        return halved((3 - x) * self.w)  # HERE ruled


class Layer(Faults):
    def __init__(self) -> None:
        self.w = jnp.ones(())


class LayerModule(Faults, eqx.Module):
    w: Any = eqx.field(default_factory=lambda: jnp.ones(()))


class LayerNNX(Faults, nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(()))


class Net:
    """Three layers by their method; the second is at fault."""

    def __init__(self, layer: Any) -> None:
        self.layers = [layer() for _ in range(3)]


KINDS = {"plain": Layer, "equinox": LayerModule, "nnx": LayerNNX}


class Fault(NamedTuple):
    operations: str
    is_backward: bool = False
    loops: int = 0
    masked: tuple[str, ...] = ()


FAULTS = {
    "exp": Fault("exp"),
    "log": Fault("log"),
    "normalized": Fault("div"),
    "arc": Fault("acos"),
    "power": Fault("pow sqrt"),
    "half": Fault("mul"),
    "brain": Fault("mul"),
    "explode": Fault("mul", loops=1),
    "shrink": Fault("log", loops=1),
    "until": Fault("integer_pow square", loops=1),
    "either": Fault("log", loops=1),
    "chosen": Fault("sqrt", loops=1),
    "mapped": Fault("log"),
    "remade": Fault("sqrt"),
    "guarded": Fault("sqrt", masked=("log",)),
    "length": Fault("div", is_backward=True),
    "root": Fault("div mul", is_backward=True),
    "ratio": Fault("div mul integer_pow", is_backward=True, masked=("div",)),
    "ruled": Fault("div", is_backward=True),  # the line is the one that calls the function with the rule
}


def value(method: str, net: Net, x: Any) -> Any:
    x = x * net.layers[0].w
    y = getattr(net.layers[1], method)(x)
    return (y.astype(jnp.float32) * net.layers[2].w * 1e-3).sum()


def line_of(marker: str, where: Any) -> int:
    lines, first = inspect.getsourcelines(where)
    return first + next(i for i, line in enumerate(lines) if line.rstrip().endswith(f"# HERE {marker}"))


def found_in_file(recorder: Any, calls: list[tuple[Any, ...]]) -> Any:
    """The report on the file that a recorder writes, of which the last of these calls is at fault."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", graftax.RecordedCallWarning)
        for arguments in calls:
            recorder(*arguments)
        recorder.flush()
    assert [w.category for w in told] == [graftax.RecordedCallWarning]
    (file,) = recorder.files
    assert len(RecordedCalls(file)) == len(calls)
    return RecordedCalls(file).where()


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_layer_is_named_by_object_and_line(name: str, kind: str, tmp_path: Path):
    fault = FAULTS[name]

    def f(net: Net, x: Any) -> Any:
        return value(name, net, x)

    call = graftax.jit(lambda net, x: graftax.grad(f)(net, x) if fault.is_backward else f(net, x))
    net = Net(KINDS[kind])
    report = found_in_file(graftax.record(call, dir=tmp_path), [(net, jnp.full(3, x)) for x in (1.0, 3.0)])
    cause = report.cause
    assert cause is not None and cause.path == "net.layers[1]" and cause.line == line_of(name, Faults)
    assert cause.operation in fault.operations.split() and cause.is_backward == fault.is_backward
    assert len(cause.loops) == fault.loops
    assert set(fault.masked) <= {origin.operation for origin in report.masked}


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_divides_by_zero(kind: str, tmp_path: Path):
    optimizer = optax.scale_by_rms(decay=0.0, eps=0.0)

    def step(net: Net, x: Any) -> Any:
        w = net.layers[1].w[...]
        updates, _ = optimizer.update((x - 3) * w, optimizer.init(w))  # HERE optimizer
        return optax.apply_updates(w, updates)

    report = found_in_file(graftax.record(step, dir=tmp_path), [(Net(KINDS[kind]), jnp.float32(x)) for x in (1, 3)])
    assert report.cause is not None and report.cause.line == line_of("optimizer", step) and report.cause.inside


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_batch(kind: str, tmp_path: Path):
    recorder = graftax.record(lambda net, batch: value("exp", net, batch["x"]), dir=tmp_path)
    report = found_in_file(recorder, [(Net(KINDS[kind]), {"x": jnp.array([1.0, x])}) for x in (1.0, jnp.nan)])
    assert str(report.cause) == "batch['x']: the argument is nan already"
