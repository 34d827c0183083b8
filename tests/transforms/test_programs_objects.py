# SPDX-License-Identifier: Apache-2.0
"""Programs of plain Python classes that train or simulate something: each gives what plain Python gives."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftax

# ---- the same programs without any transform of objects


def slots_of(root: Any) -> list[tuple[Any, Any]]:
    """(dict or list, key) of each array below an object, once for an object that is reached twice."""
    found: list[tuple[Any, Any]] = []
    seen: set[int] = set()

    def walk(x: Any) -> None:
        if id(x) in seen or isinstance(x, (type, str, jax.Array)) or not (hasattr(x, "__dict__") or type(x) is list):
            return
        seen.add(id(x))
        items = list(enumerate(x)) if isinstance(x, list) else list(vars(x).items())
        for name, value in items:
            if isinstance(value, jax.Array):
                found.append((x if isinstance(x, list) else vars(x), name))
            else:
                walk(value)

    walk(root)
    return found


def twin_of(root: Any) -> Any:
    """A copy that shares no object, with the same arrays."""
    kept = [holder[name] for holder, name in slots_of(root)]
    return copy.deepcopy(root, {id(x): x for x in kept})


def floating(root: Any) -> list[tuple[Any, Any]]:
    return [(h, k) for h, k in slots_of(root) if jnp.issubdtype(h[k].dtype, jnp.floating)]


class Plain:
    """Loops and branches of Python; a gradient is JAX's by the list of an object's arrays."""

    @staticmethod
    def jit(f: Any) -> Any:
        return f

    @staticmethod
    def cond(pred: Any, one: Any, other: Any, *operands: Any) -> Any:
        return (one if pred else other)(*operands)

    @staticmethod
    def switch(index: Any, branches: Any, *operands: Any) -> Any:
        return branches[int(index)](*operands)

    @staticmethod
    def scan(f: Any, carry: Any, xs: Any = None, length: int | None = None) -> Any:
        ys = []
        for i in range(len(xs) if length is None else length):
            carry, y = f(carry, None if xs is None else xs[i])
            ys.append(y)
        return carry, None if ys[0] is None else jnp.stack(ys)

    @staticmethod
    def while_loop(test: Any, step: Any, value: Any, *, max_steps: int | None = None) -> Any:
        del max_steps
        while test(value):
            value = step(value)
        return value

    @staticmethod
    def value_and_grad(f: Any) -> Any:
        def both(root: Any, *args: Any) -> Any:
            def flat(values: list[Any]) -> Any:
                twin, *rest = twin_of([root, *args])
                for (holder, name), value in zip(floating(twin), values, strict=True):
                    holder[name] = value
                return f(twin, *rest)

            gradient = twin_of(root)
            grads = jax.grad(flat)([holder[name] for holder, name in floating(root)])
            for (holder, name), value in zip(floating(gradient), grads, strict=True):
                holder[name] = value
            return f(root, *args), gradient  # what f changes, it changes here

        return both

    @staticmethod
    def grad(f: Any) -> Any:
        return lambda *args: Plain.value_and_grad(f)(*args)[1]


def close(one: Any, other: Any, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def same_arrays(one: Any, other: Any) -> None:
    ours, theirs = slots_of(one), slots_of(other)
    assert [name for _, name in ours] == [name for _, name in theirs]
    for (here, name), (there, _) in zip(ours, theirs, strict=True):
        assert (here[name].shape, here[name].dtype) == (there[name].shape, there[name].dtype), name
        close(here[name], there[name])


def normal(seed: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


class Linear:
    def __init__(self, seed: int, inputs: int, outputs: int) -> None:
        self.w = normal(seed, inputs, outputs) / inputs**0.5
        self.b = jnp.zeros(outputs)

    def __call__(self, x: Any) -> Any:
        return x @ self.w + self.b


class Net:
    def __init__(self, seed: int, *sizes: int) -> None:
        self.layers = [Linear(seed + i, a, b) for i, (a, b) in enumerate(itertools.pairwise(sizes))]
        self.activation = jnp.tanh

    def __call__(self, x: Any) -> Any:
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


def descend(model: Any, gradient: Any, rate: float) -> None:
    for (holder, name), (other, _) in zip(floating(model), floating(gradient), strict=True):
        holder[name] = holder[name] - rate * other[name]


# ---- a DQN: an environment, a replay buffer and a target network, all objects that change


class Corridor:
    """The agent walks left or right on [-1, 1]; the right end pays."""

    def __init__(self) -> None:
        self.place = jnp.zeros(())

    def act(self, action: Any) -> tuple[Any, Any]:
        moved = jnp.clip(self.place + jnp.where(action == 1, 0.3, -0.3), -1, 1)
        reward = jnp.where(moved >= 1, 1.0, -0.1)
        self.place = jnp.where(moved >= 1, 0.0, moved)
        return jnp.stack([moved, moved**2]), reward

    @property
    def seen(self) -> Any:
        return jnp.stack([self.place, self.place**2])


class Replay:
    def __init__(self, size: int) -> None:
        self.size, self.added = size, jnp.asarray(0)
        self.before, self.after = jnp.zeros((size, 2)), jnp.zeros((size, 2))
        self.actions, self.rewards = jnp.zeros(size, jnp.int32), jnp.zeros(size)

    def add(self, before: Any, action: Any, reward: Any, after: Any) -> None:
        i = self.added % self.size
        self.before, self.after = self.before.at[i].set(before), self.after.at[i].set(after)
        self.actions, self.rewards = self.actions.at[i].set(action), self.rewards.at[i].set(reward)
        self.added = self.added + 1

    def sample(self, key: Any, count: int) -> tuple[Any, ...]:
        rows = jax.random.randint(key, (count,), 0, jnp.minimum(self.added, self.size))
        return self.before[rows], self.actions[rows], self.rewards[rows], self.after[rows]


class Agent:
    def __init__(self, world: Corridor, memory: Replay) -> None:
        self.world, self.memory = world, memory
        self.net, self.target = Net(0, 2, 8, 2), Net(0, 2, 8, 2)
        self.steps, self.syncs = jnp.asarray(0), jnp.asarray(0)

    def sync(self) -> None:
        for mine, new in zip(self.target.layers, self.net.layers, strict=True):
            mine.w, mine.b = new.w, new.b
        self.syncs = self.syncs + 1

    def error(self, net: Net, batch: Any) -> Any:
        before, actions, rewards, after = batch
        wanted = rewards + 0.9 * self.target(after).max(-1)
        return jnp.mean((jnp.take_along_axis(net(before), actions[:, None], 1)[:, 0] - wanted) ** 2)

    def step(self, t: Any, key: Any) -> Any:
        coin, choice, draw = jax.random.split(key, 3)
        before = self.world.seen
        action = jnp.where(
            jax.random.uniform(coin) < 0.3, jax.random.randint(choice, (), 0, 2), self.net(before).argmax()
        )
        after, reward = self.world.act(action)
        self.memory.add(before, action, reward, after)
        error, gradient = t.value_and_grad(self.error)(self.net, self.memory.sample(draw, 4))
        descend(self.net, gradient, 0.1)
        self.steps = self.steps + 1
        t.cond(self.steps % 5 == 0, self.sync, lambda: None)
        return error


def q_learning(t: Any, steps: int = 12) -> Any:
    agent = Agent(Corridor(), Replay(8))

    @t.jit
    def run(agent: Agent, keys: Any) -> Any:
        def step(_: None, key: Any) -> Any:
            return None, agent.step(t, key)

        return t.scan(step, None, keys)[1]

    errors = run(agent, jax.random.split(jax.random.key(0), steps))
    return agent, errors


def test_q_learning_with_a_replay_buffer_and_a_target_network():
    (ours, errors), (plain, expected) = q_learning(graftax), q_learning(Plain)
    close(errors, expected)
    same_arrays(ours, plain)
    assert (ours.steps, ours.syncs, ours.memory.added) == (12, 2, 12)
    assert ours.net.layers[0].w is not ours.target.layers[0].w


# ---- a recurrent cell that keeps its state in itself


class GRU:
    def __init__(self, inputs: int, size: int) -> None:
        self.gates, self.candidate = Linear(0, inputs + size, 2 * size), Linear(1, inputs + size, size)
        self.hidden, self.calls = jnp.zeros(size), jnp.asarray(0)

    def __call__(self, x: Any) -> Any:
        z, r = jnp.split(jax.nn.sigmoid(self.gates(jnp.concatenate([x, self.hidden]))), 2)
        new = jnp.tanh(self.candidate(jnp.concatenate([x, r * self.hidden])))
        self.hidden = (1 - z) * self.hidden + z * new
        self.calls = self.calls + 1
        return self.hidden

    def reset(self) -> None:
        self.hidden = jnp.zeros_like(self.hidden)


class Reader:
    def __init__(self) -> None:
        self.cell = GRU(2, 3)
        self.head = Linear(5, 3, 1)
        self.head.reads = self.cell  # back


def sequence_loss(t: Any, model: Reader, xs: Any, wanted: Any) -> Any:
    model.cell.reset()
    t.scan(lambda carry, x: (carry, model.cell(x)), None, xs)
    return ((model.head(model.head.reads.hidden) - wanted) ** 2).sum()


def recurrence(t: Any) -> Any:
    model = Reader()

    @t.jit
    def step(model: Reader, xs: Any, wanted: Any) -> Any:
        value, gradient = t.value_and_grad(functools.partial(sequence_loss, t))(model, xs, wanted)
        descend(model, gradient, 0.1)
        model.cell.reset()
        return value

    return model, [step(model, normal(i, 5, 2), jnp.ones(1)) for i in range(3)], step


def test_a_recurrent_cell_that_changes_itself_trains():
    (ours, values, step), (plain, expected, _) = recurrence(graftax), recurrence(Plain)
    close(values, expected)
    same_arrays(ours, plain)
    assert ours.cell.calls == 15
    assert ours.head.reads is ours.cell
    assert step.cache_info().traces == 1


# ---- a hypernetwork: layers that know who makes their weights, and share what they are made from


class Made:
    """A layer without weights of its own."""

    def __init__(self, hyper: Hyper, code: list[Any], shape: tuple[int, int]) -> None:
        self.hyper, self.code, self.shape = hyper, code, shape

    def __call__(self, x: Any) -> Any:
        return x @ self.hyper.net(self.code[0]).reshape(self.shape)


class Hyper:
    def __init__(self) -> None:
        self.net = Net(0, 2, 6, 9)
        shared = [normal(3, 2)]
        self.layers = [Made(self, shared, (3, 3)), Made(self, [normal(4, 2)], (3, 3)), Made(self, shared, (3, 3))]

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def hypernetwork(t: Any) -> Any:
    hyper = Hyper()

    @t.jit
    def step(hyper: Hyper, x: Any) -> Any:
        value, gradient = t.value_and_grad(lambda hyper, x: ((hyper(x) - x[:, ::-1]) ** 2).mean())(hyper, x)
        assert gradient.layers[0].code is gradient.layers[2].code
        assert gradient.layers[1].hyper is gradient
        descend(hyper, gradient, 0.2)
        return value

    return hyper, [step(hyper, normal(i, 4, 3)) for i in range(3)]


def test_a_hypernetwork_with_shared_codes_trains():
    (ours, values), (plain, expected) = hypernetwork(graftax), hypernetwork(Plain)
    close(values, expected)
    same_arrays(ours, plain)
    assert ours.layers[0].code is ours.layers[2].code
    assert ours.layers[2].hyper is ours


# ---- a particle filter: one object with an axis, and as many objects


class Particle:
    def __init__(self, key: Any) -> None:
        self.place, self.speed = jax.random.normal(key), jnp.zeros(())
        self.likelihood, self.moves, self.kind = jnp.zeros(()), 0, "particle"

    def move(self, key: Any) -> None:
        self.speed = self.speed + 0.1 * jax.random.normal(key)
        self.place = self.place + self.speed
        self.moves += 1

    def weigh(self, sensor: Sensor, seen: Any) -> Any:
        self.likelihood = jnp.exp(-0.5 * ((seen - self.place) / sensor.width) ** 2)
        return self.likelihood


class Sensor:
    def __init__(self) -> None:
        self.width, self.readings = jnp.asarray(0.5), 0


def advance(particle: Particle, sensor: Sensor, key: Any, seen: Any) -> Any:
    particle.move(key)
    sensor.readings += 1
    return particle.weigh(sensor, seen)


@graftax.jit
def filtered(particles: Particle, sensor: Sensor, key: Any, seen: Any) -> Any:
    count = len(particles.place)
    move, draw = jax.random.split(key)
    weights = graftax.vmap(advance, in_axes=(0, None, 0, None))(particles, sensor, jax.random.split(move, count), seen)
    chosen = jax.random.choice(draw, count, (count,), p=weights / weights.sum())
    for name in ("place", "speed", "likelihood"):
        setattr(particles, name, getattr(particles, name)[chosen])
    return particles.place.mean()


def filtered_one_by_one(particles: list[Particle], sensor: Sensor, key: Any, seen: Any) -> Any:
    count = len(particles)
    move, draw = jax.random.split(key)
    weights = [advance(p, sensor, k, seen) for p, k in zip(particles, jax.random.split(move, count), strict=True)]
    chosen = jax.random.choice(draw, count, (count,), p=jnp.stack(weights) / sum(weights))
    particles[:] = [copy.copy(particles[i]) for i in chosen]
    return jnp.stack([p.place for p in particles]).mean()


def test_a_particle_filter_maps_over_objects():
    keys, count = jax.random.split(jax.random.key(1), 4), 6
    first = jax.random.split(jax.random.key(0), count)
    one, sensor = graftax.vmap(Particle)(first), Sensor()
    many, other = [Particle(key) for key in first], Sensor()
    for i, key in enumerate(keys):
        seen = jnp.asarray(0.3 * i)
        close(filtered(one, sensor, key, seen), filtered_one_by_one(many, other, key, seen))
    for name in ("place", "speed", "likelihood"):
        close(getattr(one, name), jnp.stack([getattr(p, name) for p in many]))
    assert (one.moves, one.kind) == (many[0].moves, "particle")
    assert sensor.readings == 4  # one mapped call counts once; six calls, six times
    assert other.readings == 24


# ---- MAML: a gradient through a model that gradients have changed


def task_error(model: Net, x: Any, y: Any) -> Any:
    return ((model(x) - y) ** 2).mean()


def adapted_error(t: Any, steps: int, model: Net, tasks: Any) -> Any:
    total = jnp.zeros(())
    for x, y, x_test, y_test in tasks:
        fast = twin_of(model)
        for _ in range(steps):
            descend(fast, t.grad(task_error)(fast, x, y), 0.1)  # changes `fast`, which the outer gradient goes through
        total = total + task_error(fast, x_test, y_test)
    return total


def tasks_of(seed: int) -> list[Any]:
    return [
        (normal(seed, 3, 1), normal(seed + 1, 3, 1), normal(seed + 2, 3, 1), normal(seed + 3, 3, 1)) for _ in range(2)
    ]


def meta_learning(t: Any) -> Any:
    model = Net(0, 1, 5, 1)

    @t.jit
    def step(model: Net, tasks: Any) -> Any:
        value, gradient = t.value_and_grad(functools.partial(adapted_error, t, 2))(model, tasks)
        descend(model, gradient, 0.1)
        return value

    return model, [step(model, tasks_of(10 * i)) for i in range(2)]


def test_a_gradient_goes_through_an_inner_loop_of_gradients():
    (ours, values), (plain, expected) = meta_learning(graftax), meta_learning(Plain)
    close(values, expected)
    same_arrays(ours, plain)


def test_the_inner_loop_may_change_the_model_that_is_differentiated():
    """Then the gradient is that by the first parameters, and the caller's model has the adapted ones."""
    x, y = normal(0, 3, 1), normal(1, 3, 1)
    model, expected_model = Net(0, 1, 5, 1), Net(0, 1, 5, 1)

    def adapt(model: Net, x: Any, y: Any) -> Any:
        descend(model, graftax.grad(task_error)(model, x, y), 0.1)
        return task_error(model, x, y)

    gradient = graftax.grad(adapt)(model, x, y)
    expected = Plain.grad(functools.partial(adapted_error, Plain, 1))(expected_model, [(x, y, x, y)])
    same_arrays(gradient, expected)
    descend(expected_model, Plain.grad(task_error)(expected_model, x, y), 0.1)
    same_arrays(model, expected_model)


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

    def backward(kept: dict[str, Any], cotangent: Any) -> Any:
        _, pull = graftax.vjp(lambda z: contraction(kept["net"], kept["x"], z), kept["z"])
        u = graftax.fori_loop(0, kept["rounds"], lambda _, u: cotangent + pull(u)[0], cotangent)
        _, pull = graftax.vjp(lambda net, x: contraction(net, x, kept["z"]), kept["net"], kept["x"])
        return None, *pull(u)

    solve.defvjp(forward, backward)


def contraction(net: Net, x: Any, z: Any) -> Any:
    return 0.5 * jnp.tanh(net(z) + x)


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
    found, last, rounds = jnp.zeros(2), jnp.ones(2), 0
    while np.abs(found - last).max() > solver.tolerance:
        found, last, rounds = contraction(net, x, found), found, rounds + 1
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


def test_a_simulator_with_modes_runs_as_in_plain_python():
    fleet, plain = fleet_of(GAINS), fleet_of(GAINS)
    run = graftax.jit(functools.partial(simulate, graftax))
    assert run(fleet) is fleet
    simulate(Plain, plain)
    same_arrays(fleet, plain)
    assert fleet[0].battery is fleet[1].battery
    assert fleet[0].battery.cycles >= 2
    assert fleet[0].mode == 2


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


# ---- a trainer that owns everything, and tells the host


class Trainer:
    def __init__(self, optimizer: Any) -> None:
        self.net, self.optimizer, self.average = Net(0, 2, 4, 1), optimizer, Net(0, 2, 4, 1)
        self.state = optimizer.init(self.params())
        self.best, self.settings = jnp.asarray(jnp.inf), {"decay": 0.9, "name": "run"}

    def params(self) -> Any:
        return [(layer.w, layer.b) for layer in self.net.layers]

    def step(self, batch: tuple[Any, Any], tell: Any) -> Any:
        error, gradient = graftax.value_and_grad(task_error)(self.net, *batch)
        grads = [(layer.w, layer.b) for layer in gradient.layers]
        updates, self.state = self.optimizer.update(grads, self.state, self.params())
        decay = self.settings["decay"]
        for mine, slow, (w, b) in zip(self.net.layers, self.average.layers, updates, strict=True):
            mine.w, mine.b = mine.w + w, mine.b + b
            slow.w, slow.b = (decay * s + (1 - decay) * m for s, m in ((slow.w, mine.w), (slow.b, mine.b)))
        self.best = jnp.minimum(self.best, error)
        graftax.io_callback(tell, None, {"error": error, **self.settings}, ordered=True)
        return error

    @graftax.jit
    def fit(self, batches: Any, tell: Any) -> Any:
        return graftax.scan(lambda _, batch: (None, self.step(batch, tell)), None, batches)[1]


def test_a_trainer_fits_in_one_scan_and_tells_the_host():
    optimizer, told = optax.adam(1e-2), []
    trainer, batches = Trainer(optimizer), (normal(1, 4, 5, 2), normal(2, 4, 5, 1))
    errors = trainer.fit(batches, lambda report: told.append((report["name"], float(report["error"]))))
    jax.effects_barrier()

    params = average = [(layer.w, layer.b) for layer in Net(0, 2, 4, 1).layers]
    state, expected = optimizer.init(params), []
    for x, y in zip(*batches, strict=True):

        def error(params: Any, x: Any = x, y: Any = y) -> Any:
            (w1, b1), (w2, b2) = params
            return ((jnp.tanh(x @ w1 + b1) @ w2 + b2 - y) ** 2).mean()

        value, grads = jax.value_and_grad(error)(params)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
        expected.append(float(value))
    close(errors, expected)
    assert [name for name, _ in told] == ["run"] * 4
    close([error for _, error in told], expected)
    close(trainer.best, min(expected))
    for layer, slow, (w, b), (aw, ab) in zip(trainer.net.layers, trainer.average.layers, params, average, strict=True):
        for found, wanted in ((layer.w, w), (layer.b, b), (slow.w, aw), (slow.b, ab)):
            close(found, wanted)
