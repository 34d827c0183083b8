# SPDX-License-Identifier: Apache-2.0
"""Programs of plain Python classes that learn: each gives what plain Python gives."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import graftax
from plain import Linear, Net, Plain, close, descend, normal, same_arrays, twin_of

pytestmark = pytest.mark.quick(0)  # a program learns for seconds, and each of its parts has a test; one is drawn below

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


@pytest.mark.quick(0)
def test_a_trainer_fits_in_one_scan_and_tells_the_host():
    optimizer, reports = optax.adam(1e-2), []
    trainer, batches = Trainer(optimizer), (normal(1, 4, 5, 2), normal(2, 4, 5, 1))
    errors = trainer.fit(batches, lambda report: reports.append((report["name"], float(report["error"]))))
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
    assert [name for name, _ in reports] == ["run"] * 4
    close([error for _, error in reports], expected)
    close(trainer.best, min(expected))
    for layer, slow, (w, b), (aw, ab) in zip(trainer.net.layers, trainer.average.layers, params, average, strict=True):
        for actual, wanted in ((layer.w, w), (layer.b, b), (slow.w, aw), (slow.b, ab)):
            close(actual, wanted)
