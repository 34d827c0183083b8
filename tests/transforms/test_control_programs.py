# SPDX-License-Identifier: Apache-2.0
"""Loops and branches in whole programs: simulations, recurrent networks, optimizers, stateful modules, progress."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import graftax
from oracle import difference
from zoo import Box

# ---- planets that refer to each other


class Planet:
    def __init__(self, place: Any, speed: Any, mass: float) -> None:
        self.place, self.speed, self.mass = place, speed, mass
        self.neighbours: list[Planet] = []


def planets(tilt: Any) -> list[Planet]:
    out = [Planet(jnp.array([i * 1.0, tilt * i]), jnp.array([0.0, 0.1 * i]), 1.0 + i) for i in range(3)]
    for planet in out:
        planet.neighbours = [other for other in out if other is not planet]
    return out


def pull(planet: Planet, other: Planet) -> Any:
    distance = other.place - planet.place
    return other.mass * distance / (distance @ distance + 0.1) ** 1.5


def move(system: list[Planet], _: None) -> Any:
    for planet in system:
        planet.speed = planet.speed + 0.01 * sum(pull(planet, other) for other in planet.neighbours)
    for planet in system:
        planet.place = planet.place + 0.01 * planet.speed
    return system, [planet.place for planet in system]


@pytest.mark.quick(0)
def test_a_cyclic_simulation_moves_the_callers_planets():
    system, copy = planets(0.3), planets(0.3)
    result, tracks = graftax.scan(move, system, length=20)
    for _ in range(20):
        move(copy, None)
    assert result is system
    assert system[0].neighbours[0] is system[1]
    for mine, other, track in zip(system, copy, tracks, strict=True):
        np.testing.assert_allclose(mine.place, other.place, rtol=1e-5)
        np.testing.assert_array_equal(mine.place, track[-1])


@pytest.mark.quick(0)
def test_a_cyclic_simulation_is_differentiated():
    def loss(system: list[Planet]) -> Any:
        graftax.scan(move, system, length=10)
        return system[0].place @ system[2].place

    def by_hand(places: Any, speeds: Any) -> Any:
        masses = jnp.arange(1.0, 4.0)

        def step(state: Any, _: None) -> Any:
            places, speeds = state
            distance = places[None] - places[:, None]
            pulls = masses[None, :, None] * distance / ((distance**2).sum(-1, keepdims=True) + 0.1) ** 1.5
            speeds = speeds + 0.01 * pulls.sum(1)
            return (places + 0.01 * speeds, speeds), None

        (places, _), _ = jax.lax.scan(step, (places, speeds), length=10)
        return places[0] @ places[2]

    system = planets(0.3)
    places, speeds = (jnp.stack([getattr(p, name) for p in system]) for name in ("place", "speed"))
    expected = jax.grad(by_hand, argnums=(0, 1))(places, speeds)
    gradient = graftax.jit(graftax.grad(loss))(system)
    assert gradient[0].neighbours[0] is gradient[1]
    np.testing.assert_allclose(jnp.stack([p.place for p in gradient]), expected[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(jnp.stack([p.speed for p in gradient]), expected[1], rtol=1e-4, atol=1e-6)


def test_objects_that_know_each_other_weakly():
    parent, child = Box(w=jnp.zeros(2)), Box()
    child.parent = weakref.ref(parent)

    def step(carry: Any, x: Any) -> Any:
        carry[1].parent().w = carry[1].parent().w + x
        return carry, carry[0].w

    (one, other), _ = graftax.scan(step, (parent, child), jnp.ones((3, 2)))
    assert one is parent
    assert other is child
    assert parent.w.tolist() == [3, 3]


# ---- Equinox and Optax


@pytest.mark.quick(0)
def test_a_recurrent_network_with_an_equinox_cell_is_that_of_jax():
    cell = eqx.nn.GRUCell(3, 4, key=jax.random.key(0))
    xs = jax.random.normal(jax.random.key(1), (5, 3))

    def run(scan: Any, cell: Any, xs: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            h = cell(x, h)
            return h, h

        return (scan(step, jnp.zeros(4), xs)[1] ** 2).sum()

    assert graftax.jit(functools.partial(run, graftax.scan))(cell, xs) == jax.jit(functools.partial(run, jax.lax.scan))(
        cell, xs
    )
    actual = graftax.grad(functools.partial(run, graftax.scan))(cell, xs)
    expected = jax.grad(functools.partial(run, jax.lax.scan))(cell, xs)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.quick(0)
def test_an_equinox_module_may_be_the_carry():
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))

    def step(model: Any, x: Any) -> Any:
        return eqx.tree_at(lambda m: m.bias, model, model.bias + x), model(x)

    model, _ = graftax.scan(step, linear, jnp.ones((3, 2)))
    assert type(model) is eqx.nn.Linear
    np.testing.assert_allclose(model.bias, linear.bias + 3, rtol=1e-6)


@pytest.mark.quick(0)
def test_training_in_one_scan_is_training_in_a_loop():
    optimizer = optax.adam(0.1)

    def make() -> Box:
        params = {"w": jnp.ones(3), "b": jnp.zeros(())}
        return Box(params=params, opt=optimizer.init(params), best=jnp.asarray(jnp.inf), name="net")

    def loss(params: Any, x: Any) -> Any:
        return ((params["w"] * x).sum() + params["b"] - 1) ** 2

    def step(trainer: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(trainer.params, x)
        updates, trainer.opt = optimizer.update(gradient, trainer.opt)
        trainer.params = optax.apply_updates(trainer.params, updates)

        def better(trainer: Any) -> None:
            trainer.best = value

        graftax.cond(value < trainer.best, better, lambda trainer: None, trainer)
        return trainer, value

    batches = jax.random.normal(jax.random.key(0), (6, 3))
    trainer, looped = make(), make()
    _, values = graftax.scan(step, trainer, batches)
    plain = graftax.jit(step)
    for batch in batches:
        plain(looped, batch)
    for one, other in zip(graftax.flatten(trainer)[0], graftax.flatten(looped)[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    assert trainer.best == values.min()
    assert trainer.name == "net"


# ---- Flax NNX


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.norm = nnx.Linear(3, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.norm(self.linear(x)))


BATCHES = jax.random.normal(jax.random.key(1), (4, 8, 3))


def arrays(model: Any) -> list[Any]:
    leaves = graftax.flatten(model)[0]
    return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]


def applied(model: Any, x: Any) -> Any:
    return model, model(x)


@pytest.mark.quick(0)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("jit", [lambda f: f, graftax.jit])
def test_an_nnx_module_keeps_its_statistics_and_random_counts_through_a_scan(captured: bool, jit: Any):
    model, looped = Network(nnx.Rngs(0)), Network(nnx.Rngs(0))
    expected = jnp.stack([looped(x) for x in BATCHES])
    if captured:
        actual = jit(lambda model, xs: graftax.map(model, xs))(model, BATCHES)
    else:
        actual = jit(lambda model, xs: graftax.scan(applied, model, xs)[1])(model, BATCHES)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    for one, other in zip(arrays(model), arrays(looped), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.quick(0)
def test_only_the_branch_that_runs_changes_an_nnx_module():
    model, looped, fresh = (Network(nnx.Rngs(0)) for _ in range(3))
    looped(BATCHES[0])
    for pred, expected in ((False, fresh), (True, looped)):
        graftax.cond(jnp.asarray(pred), lambda m, x: m(x), lambda m, x: x, model, BATCHES[0])
        for one, other in zip(arrays(model), arrays(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


# ---- functions and configuration as state


def test_functions_in_the_carry_keep_what_they_capture():
    def make() -> dict[str, Any]:
        w, box = jnp.ones(2), Box(w=jnp.ones(2))
        box.scaled = lambda x: box.w * x
        parts = {"f": lambda x: x * w, "m": box.scaled, "p": functools.partial(pull_down, w), "b": box}
        return {**parts, "sum": jnp.zeros(2)}

    def step(carry: Any, x: Any) -> Any:
        carry["b"].w = carry["b"].w + 1
        carry["sum"] = carry["sum"] + carry["f"](x) + carry["m"](x) + carry["p"](x)
        return carry, None

    state, looped = make(), make()
    for _ in range(3):
        step(looped, jnp.ones(2))
    carry, _ = graftax.scan(step, state, jnp.ones((3, 2)))
    assert carry is state
    assert difference(looped, state) is None


def pull_down(w: Any, x: Any) -> Any:
    return w * x - 1


def test_configuration_that_both_branches_change_is_changed_once():
    box = Box(config=Box(n=1, names=["a"]), w=jnp.zeros(2))
    config = box.config

    def one(box: Any) -> None:
        box.config.n += 1
        box.config.names.append("b")
        box.w = box.w + 1

    def other(box: Any) -> None:
        box.config.n += 1
        box.config.names.append("b")

    graftax.cond(True, one, other, box)
    assert box.config is config
    assert (config.n, config.names, box.w.tolist()) == (2, ["a", "b"], [1, 1])


def test_a_ref_in_the_carry_or_captured_is_changed_where_it_is():
    box, ref = Box(r=jax.new_ref(jnp.zeros(2))), jax.new_ref(jnp.zeros(2))

    def step(carry: Any, x: Any) -> Any:
        carry.r[...] += x
        ref[...] += 2 * x
        return carry, None

    assert graftax.scan(step, box, jnp.ones((3, 2)))[0] is box
    assert (box.r[...].tolist(), ref[...].tolist()) == ([3, 3], [6, 6])
    graftax.cond(False, lambda: None, lambda: step(box, 1.0)[1])
    assert (box.r[...].tolist(), ref[...].tolist()) == ([4, 4], [8, 8])


# ---- progress


def add(carry: Any, x: Any) -> Any:
    return carry + x, None


@pytest.mark.parametrize("length", [1, 7, 100, 101, 1234])
@pytest.mark.parametrize("reverse", [False, True])
def test_progress_is_told_at_most_a_hundred_times_and_at_the_end(length: int, reverse: bool):
    reports: list[tuple[int, int]] = []

    def tell(count: int, steps: int) -> None:
        reports.append((count, steps))

    run = jax.jit(lambda xs: graftax.scan(add, 0.0, xs, reverse=reverse, progress=tell)[0])
    for _ in range(2):
        assert run(jnp.ones(length)) == length
        jax.effects_barrier()
        assert 1 <= len(reports) <= 100
        assert sorted(reports) == sorted(set(reports))
        assert max(reports) == (length, length)
        reports.clear()


def test_progress_is_told_while_a_gradient_is_computed():
    reports: list[int] = []
    f: Callable[[Any], Any] = lambda a: graftax.scan(
        add, a, jnp.ones(5), progress=lambda count, _: reports.append(count)
    )[0]
    assert jax.grad(f)(1.0) == 1
    jax.effects_barrier()
    assert max(reports) == 5


@pytest.mark.parametrize("progress", [True, "my title"])
def test_a_bar_shows_the_title(progress: Any, capfd: pytest.CaptureFixture[str]):
    graftax.scan(add, 0.0, jnp.ones(5), progress=progress)
    jax.effects_barrier()
    shown = capfd.readouterr().out
    assert ("my title" if progress != True else "scan of add") in shown  # noqa: E712
    assert "100%" in shown


def test_in_a_notebook_without_widgets_a_bar_is_text(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    graftax.scan(add, 0.0, jnp.ones(5), progress=True)
    jax.effects_barrier()
    assert "100%" in capfd.readouterr().out


def test_a_bar_without_rich_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(ImportError, match=r"pip install graftax\[show\]"):
        graftax.scan(add, 0.0, jnp.ones(5), progress=True)
