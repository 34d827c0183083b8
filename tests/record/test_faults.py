# SPDX-License-Identifier: Apache-2.0
"""Ninety planted faults, from a recorded call that goes wrong to the object and the line that its file names."""

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


@jax.custom_jvp
def sinc(x: Any) -> Any:
    return jnp.where(x == 0, 1.0, jnp.sin(x) / jnp.where(x == 0, 1.0, x))


@sinc.defjvp
def sinc_rule(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    return sinc(x), dx * (jnp.cos(x) / x)  # HERE pushed


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

    def nested(self, x: Any) -> Any:
        def outer(c: Any, _: Any) -> Any:
            return c, lax.scan(lambda d, _: (d - 1, jnp.log(d * self.w)), c, None, length=4)[1]  # HERE nested

        return lax.scan(outer, 6 - x, None, length=2)[1]

    def late(self, x: Any) -> Any:
        def body(c: Any, i: Any) -> Any:
            return lax.cond(i > 2, lambda y: jnp.arctanh(y * self.w), lambda y: y, c), None  # HERE late

        return lax.scan(body, x / 2.5, jnp.arange(5))[0]

    def turned(self, x: Any) -> Any:
        def body(c: Any) -> Any:
            rules = [lambda y: y, lambda y: jnp.sqrt(2 - y * self.w), lambda y: -y]  # HERE turned
            return c[0] + 1, lax.switch(c[0], rules, c[1])

        return lax.while_loop(lambda c: c[0] < 3, body, (0, x))[1]

    def factored(self, x: Any) -> Any:
        return jnp.linalg.cholesky(jnp.eye(3) * (2 - x * self.w))  # HERE factored

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

    def pushed(self, x: Any) -> Any:
        return sinc((3 - x) * self.w)

    def repeated(self, x: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.sqrt(c) * self.w, c), 3 - x, None, length=3)[1]  # HERE repeated

    def counted(self, x: Any) -> Any:
        return lax.fori_loop(0, 2, lambda _, c: jnp.sqrt(c) * self.w, 3 - x)  # HERE counted

    def taken(self, x: Any) -> Any:
        return lax.cond(x[0] > 2, lambda y: jnp.arccos(y / 3 * self.w), lambda y: y, x)  # HERE taken

    def again(self, x: Any) -> Any:
        return jax.checkpoint(lambda y: jnp.sqrt(jnp.sin(y * self.w)))(3 - x)  # HERE again


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
    place: Any = Faults


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
    "nested": Fault("log", loops=2),
    "late": Fault("atanh", loops=2),
    "turned": Fault("sqrt", loops=2),
    "factored": Fault("cholesky"),
    "mapped": Fault("log"),
    "remade": Fault("sqrt"),
    "guarded": Fault("sqrt", masked=("log",)),
    "length": Fault("div", is_backward=True),
    "root": Fault("div mul", is_backward=True),
    "ratio": Fault("div mul integer_pow", is_backward=True, masked=("div",)),
    "ruled": Fault("div", is_backward=True),  # the line is the one that calls the function with the rule
    "pushed": Fault("div", is_backward=True, place=sinc_rule),
    "repeated": Fault("div mul", is_backward=True, loops=1),
    "counted": Fault("div mul", is_backward=True, loops=1),
    "taken": Fault("rsqrt div mul", is_backward=True, loops=1),
    "again": Fault("div mul", is_backward=True),
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
    assert cause is not None and cause.path == "net.layers[1]" and cause.line == line_of(name, fault.place)
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
