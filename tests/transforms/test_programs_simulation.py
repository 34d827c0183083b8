# SPDX-License-Identifier: Apache-2.0
"""Programs of plain Python classes that simulate, filter and solve: each gives what plain Python gives."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from plain import Net, Plain, close, floating, normal, same_arrays

pytestmark = pytest.mark.quick(1)

# ---- a particle filter: one object with an axis, and as many objects


class Particle:
    def __init__(self, key: Any) -> None:
        self.place, self.speed = jax.random.normal(key), jnp.zeros(())
        self.likelihood, self.moves, self.kind = jnp.zeros(()), 0, "particle"

    def move(self, key: Any) -> None:
        self.speed = self.speed + 0.1 * jax.random.normal(key)
        self.place = self.place + self.speed
        self.moves += 1

    def weigh(self, sensor: Sensor, measured: Any) -> Any:
        self.likelihood = jnp.exp(-0.5 * ((measured - self.place) / sensor.width) ** 2)
        return self.likelihood


class Sensor:
    def __init__(self) -> None:
        self.width, self.readings = jnp.asarray(0.5), 0


def advance(particle: Particle, sensor: Sensor, key: Any, measured: Any) -> Any:
    particle.move(key)
    sensor.readings += 1
    return particle.weigh(sensor, measured)


@graftax.jit
def filtered(particles: Particle, sensor: Sensor, key: Any, measured: Any) -> Any:
    count = len(particles.place)
    move, draw = jax.random.split(key)
    weights = graftax.vmap(advance, in_axes=(0, None, 0, None))(
        particles, sensor, jax.random.split(move, count), measured
    )
    chosen = jax.random.choice(draw, count, (count,), p=weights / weights.sum())
    for name in ("place", "speed", "likelihood"):
        setattr(particles, name, getattr(particles, name)[chosen])
    return particles.place.mean()


def filtered_one_by_one(particles: list[Particle], sensor: Sensor, key: Any, measured: Any) -> Any:
    count = len(particles)
    move, draw = jax.random.split(key)
    weights = [advance(p, sensor, k, measured) for p, k in zip(particles, jax.random.split(move, count), strict=True)]
    chosen = jax.random.choice(draw, count, (count,), p=jnp.stack(weights) / sum(weights))
    particles[:] = [copy.copy(particles[i]) for i in chosen]
    return jnp.stack([p.place for p in particles]).mean()


@pytest.mark.quick(0)  # two seconds: test_vmap maps over objects
def test_a_particle_filter_maps_over_objects():
    keys, count = jax.random.split(jax.random.key(1), 4), 6
    first = jax.random.split(jax.random.key(0), count)
    ensemble, sensor = graftax.vmap(Particle)(first), Sensor()
    particles, other = [Particle(key) for key in first], Sensor()
    for i, key in enumerate(keys):
        measured = jnp.asarray(0.3 * i)
        close(filtered(ensemble, sensor, key, measured), filtered_one_by_one(particles, other, key, measured))
    for name in ("place", "speed", "likelihood"):
        close(getattr(ensemble, name), jnp.stack([getattr(p, name) for p in particles]))
    assert (ensemble.moves, ensemble.kind) == (particles[0].moves, "particle")
    assert sensor.readings == 4  # one mapped call counts once; six calls, six times
    assert other.readings == 24


# ---- a fixed point, differentiated by the implicit function theorem


class Equilibrium:
    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.iterations = jnp.asarray(0)

    @graftax.custom_vjp
    def solve(self, net: Net, x: Any) -> Any:
        def step(state: dict[str, Any]) -> Any:
            self.iterations = self.iterations + 1
            return {"z": contraction(net, x, state["z"]), "last": state["z"]}

        def far(state: dict[str, Any]) -> Any:
            return jnp.abs(state["z"] - state["last"]).max() > self.tolerance

        return graftax.while_loop(far, step, {"z": jnp.zeros_like(x), "last": jnp.ones_like(x)})["z"]

    def forward(self, net: Net, x: Any) -> Any:
        z = self.solve(net, x)
        return z, {"net": net, "x": x, "z": z, "rounds": 40}

    def backward(residuals: dict[str, Any], cotangent: Any) -> Any:
        net, x, z = residuals["net"], residuals["x"], residuals["z"]
        _, pull = graftax.vjp(lambda z: contraction(net, x, z), z)
        u = graftax.fori_loop(0, residuals["rounds"], lambda _, u: cotangent + pull(u)[0], cotangent)
        _, pull = graftax.vjp(
            lambda net, x: contraction(net, x, z), net, x
        )  # a closure over `kept` would hold net, too
        return None, *pull(u)

    solve.defvjp(forward, backward)


def contraction(net: Net, x: Any, z: Any) -> Any:
    return 0.5 * jnp.tanh(net(z) + x)


@pytest.mark.quick(0)  # two seconds: its rules are those of test_custom
def test_an_implicit_solver_is_differentiated_at_its_fixed_point():
    net, x, solver = Net(0, 2, 3, 2), normal(5, 2), Equilibrium(1e-6)

    @graftax.jit
    def step(solver: Equilibrium, net: Net, x: Any) -> Any:
        value, (of_net, of_x) = graftax.value_and_grad(lambda net, x: (solver.solve(net, x) ** 2).sum(), (0, 1))(net, x)
        return value, of_net, of_x

    def unrolled(net: Net, x: Any) -> Any:
        z = jnp.zeros_like(x)
        for _ in range(40):
            z = contraction(net, x, z)
        return (z**2).sum()

    value, of_net, of_x = step(solver, net, x)
    expected, expected_net = Plain.value_and_grad(unrolled)(net, x)
    close(value, expected)
    same_arrays(of_net, expected_net)
    close(of_x, jax.grad(unrolled, 1)(net, x))
    fixed_point, last, rounds = jnp.zeros(2), jnp.ones(2), 0
    while np.abs(fixed_point - last).max() > solver.tolerance:
        fixed_point, last, rounds = contraction(net, x, fixed_point), fixed_point, rounds + 1
    assert abs(int(solver.iterations) - rounds) <= 1  # rounding


# ---- a simulator that branches on the state of objects


class Battery:
    def __init__(self) -> None:
        self.charge, self.cycles = jnp.asarray(1.0), jnp.asarray(0)


class Robot:
    def __init__(self, battery: Battery, gain: float) -> None:
        self.battery, self.gain = battery, jnp.asarray(gain)
        self.place, self.mode, self.log = jnp.asarray([0.0, 2.0]), jnp.asarray(0), jnp.zeros((4, 2))
        self.time = jnp.asarray(0)

    def seek(self) -> str:
        self.place = self.place - self.gain * 0.1 * self.place
        self.mode = jnp.where(self.place @ self.place < 1.5, 1, 0)
        return "moved"

    def circle(self) -> str:
        turn = jnp.asarray([[0.8, -0.6], [0.6, 0.8]])
        self.place = turn @ self.place * (1 + 0.01 * self.gain)
        self.mode = jnp.where(self.time > 12, 2, 1)
        return "moved"

    def rest(self) -> str:
        self.place = self.place * 1.0
        return "moved"


def charge(robot: Robot) -> None:
    robot.battery.charge = robot.battery.charge + 0.5
    robot.battery.cycles = robot.battery.cycles + 1


def drive(t: Any, robot: Robot) -> None:
    assert t.switch(robot.mode, [robot.seek, robot.circle, robot.rest]) == "moved"
    robot.battery.charge = robot.battery.charge - 0.1 * jnp.abs(robot.gain)


def simulate(t: Any, fleet: list[Robot]) -> list[Robot]:
    def step(fleet: list[Robot]) -> list[Robot]:
        for robot in fleet:
            t.cond(robot.battery.charge < 0.3, charge, functools.partial(drive, t), robot)
            robot.log = robot.log.at[robot.time % 4].set(robot.place)
            robot.time = robot.time + 1
        return fleet

    return t.while_loop(lambda fleet: fleet[0].time < 18, step, fleet, max_steps=20)


GAINS = (1.03, 0.47)  # no step ends at a threshold


def fleet_of(gains: tuple[float, float]) -> list[Robot]:
    battery = Battery()  # one for both
    return [Robot(battery, gain) for gain in gains]


@pytest.mark.quick(0)
def test_a_simulator_with_modes_runs_as_in_plain_python():
    fleet, plain = fleet_of(GAINS), fleet_of(GAINS)
    run = graftax.jit(functools.partial(simulate, graftax))
    assert run(fleet) is fleet
    simulate(Plain, plain)
    same_arrays(fleet, plain)
    assert fleet[0].battery is fleet[1].battery
    assert fleet[0].battery.cycles >= 2
    assert fleet[0].mode == 2


@pytest.mark.quick(0)
@pytest.mark.parametrize("jit", [lambda f: f, graftax.jit], ids=["plain", "jit"])
def test_a_simulator_with_modes_is_differentiated(jit: Callable[..., Any]):
    def ends(t: Any, fleet: list[Robot]) -> Any:
        return sum((robot.place**2).sum() + robot.battery.charge for robot in simulate(t, fleet))

    gradient = jit(graftax.grad(functools.partial(ends, graftax)))(fleet_of(GAINS))
    expected = by_hand(ends, GAINS)
    close([robot.gain for robot in gradient], expected, 1e-3)
    assert gradient[0].battery is gradient[1].battery


def by_hand(ends: Callable[..., Any], gains: tuple[float, float]) -> list[float]:
    """Central differences of the plain program, in float64."""
    with jax.enable_x64(True):

        def value(*gains: float) -> float:
            fleet = fleet_of(gains)
            for holder, name in floating(fleet):
                holder[name] = holder[name].astype(jnp.float64)
            return float(ends(Plain, fleet))

        one, other, h = *gains, 1e-5
        return [
            (value(one + h, other) - value(one - h, other)) / (2 * h),
            (value(one, other + h) - value(one, other - h)) / (2 * h),
        ]
