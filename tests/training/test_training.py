# SPDX-License-Identifier: Apache-2.0
"""Training on real data, step by step beside plain Python: every array agrees, and nothing compiles without need."""

import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import graftax

PIXELS, LABELS = load_digits(return_X_y=True)
BATCHES = [
    (jnp.asarray(PIXELS[i : i + 32] / 16, jnp.float32), jnp.asarray(LABELS[i : i + 32])) for i in range(0, 160, 32)
]


def arrays(graph):
    return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves(graph)]


def leaves(graph):
    return graftax.flatten(graph)[0]


def assert_same(one, other):
    for a, b in zip(arrays(one), arrays(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Linear:
    def __init__(self, inputs, outputs, parent):
        weights = np.random.default_rng(inputs + outputs).normal(size=(inputs, outputs)) / 8
        self.w, self.b = jnp.asarray(weights, jnp.float32), jnp.zeros(outputs)
        self.parent = weakref.ref(parent)

    def __call__(self, x):
        self.parent().calls += 1
        return x @ self.w + self.b


class Trainer:
    """A model with a shared layer, its optimizer, an average of its weights, callbacks that change what they hold."""

    def __init__(self, optimizer):
        self.calls = jnp.asarray(0)
        shared = Linear(16, 16, self)
        self.layers = [Linear(64, 16, self), shared, shared, Linear(16, 10, self)]
        self.optimizer, self.key, self.best = optimizer, jax.random.key(0), jnp.asarray(jnp.inf)
        self.state, self.average = optimizer.init(self.weights()), jax.tree.map(jnp.copy, self.weights())
        self.log = {}
        self.callbacks = [lambda trainer, loss: trainer.log.update(loss=loss), self.lowest()]

    def lowest(self):
        lowest = jnp.asarray(jnp.inf)

        def callback(trainer, loss):
            nonlocal lowest
            lowest = trainer.best = jnp.minimum(lowest, loss)

        return callback

    def weights(self):
        return [(layer.w, layer.b) for layer in dict.fromkeys(self.layers)]

    def predict(self, x):
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)

    def step(self, x, y):
        self.key, key = jax.random.split(self.key)
        x, old, calls = x * jax.random.bernoulli(key, 0.9, x.shape), self.weights(), self.calls

        def loss(weights):
            self.load(weights)
            return cross_entropy(self.predict(x), y)

        value, grads = jax.value_and_grad(jax.checkpoint(loss))(old)
        self.calls = calls + 4
        updates, self.state = self.optimizer.update(grads, self.state, old)
        self.load(optax.apply_updates(old, updates))
        self.average = optax.incremental_update(self.weights(), self.average, 0.1)
        for callback in self.callbacks:
            callback(self, value)
        return value

    def load(self, weights):
        for layer, (w, b) in zip(dict.fromkeys(self.layers), weights, strict=True):
            layer.w, layer.b = w, b


OPTIMIZERS = {
    "clipped, scheduled": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 9))
    ),
    "masked decay": lambda: optax.chain(
        optax.add_decayed_weights(1e-2, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        optax.sgd(0.1, momentum=0.9),
    ),
    "two transforms": lambda: optax.multi_transform(
        {"w": optax.adam(1e-2), "b": optax.sgd(0.1)}, lambda p: jax.tree.map(lambda x: "w" if x.ndim > 1 else "b", p)
    ),
    "guarded, averaged": lambda: optax.apply_if_finite(optax.chain(optax.adam(1e-2), optax.ema(0.9)), 3),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1e-2, 1e-3, 9)),
    "every second step": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
}


@pytest.mark.parametrize("donate", ["none", "self", "all", ("**.w", "self.state")], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.quick(0)  # three seconds: test_writeback trains plain objects, the test of a state below, too
def test_a_trainer_of_plain_objects(optimizer, donate):
    plain, fast = Trainer(optimizer()), Trainer(optimizer())
    step = graftax.jit(Trainer.step, donate=donate)
    step.clear_cache()  # the table is the function's
    for x, y in BATCHES:
        if "all" in donate:
            x, y = jnp.copy(x), jnp.copy(y)
        expected = plain.step(x, y)
        assert_same(step(fast, x, y), expected)
    assert_same(plain, fast)
    assert fast.layers[1] is fast.layers[2] and fast.layers[0].parent() is fast
    assert fast.calls == 4 * len(BATCHES) and fast.log["loss"] >= fast.best
    assert step.cache_info().traces <= 2  # the first call adds log["loss"]


@pytest.mark.quick(0)  # three seconds: test_control_programs trains in a scan
def test_an_epoch_as_a_scan_over_an_object():
    plain, fast = Trainer(optax.adam(1e-2)), Trainer(optax.adam(1e-2))
    plain.callbacks.clear(), fast.callbacks.clear()

    @graftax.jit
    def epoch(trainer, xs, ys):
        def body(carry, batch):
            trainer.key, trainer.state, trainer.average, trainer.calls, weights = carry
            trainer.load(weights)
            value = trainer.step(*batch)
            return (trainer.key, trainer.state, trainer.average, trainer.calls, trainer.weights()), value

        first = (trainer.key, trainer.state, trainer.average, trainer.calls, trainer.weights())
        last, values = jax.lax.scan(body, first, (xs, ys))
        trainer.key, trainer.state, trainer.average, trainer.calls, weights = last
        trainer.load(weights)
        return values

    values = epoch(fast, *map(jnp.stack, zip(*BATCHES, strict=True)))
    assert_same(list(values), [plain.step(x, y) for x, y in BATCHES])
    assert_same(plain, fast)


@pytest.mark.quick(0)
@pytest.mark.parametrize("donate", ["none", "state"])
def test_a_train_state_with_a_loss_made_for_every_step(donate):
    def train_state():
        params = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}
        return TrainState.create(apply_fn=lambda p, x: x @ p["w"] + p["b"], params=params, tx=optax.adam(1e-2))

    def train_step(state, loss, x, y):
        value, grads = jax.value_and_grad(lambda p: loss(state.apply_fn(p, x), y))(state.params)
        return state.apply_gradients(grads=grads), value

    step = graftax.jit(train_step, donate=donate, dynamic="state")  # its `step` begins as an int
    plain, fast, weight = train_state(), train_state(), jnp.asarray(2.0)
    for x, y in BATCHES:
        weight = weight * 0.5
        loss = lambda logits, labels, weight=weight: weight * cross_entropy(logits, labels)
        plain, expected = train_step(plain, loss, x, y)
        fast, value = step(fast, loss, x, y)
        assert_same((value, fast.params, fast.opt_state), (expected, plain.params, plain.opt_state))
        assert fast.step == plain.step
    assert step.cache_info().traces == 2  # an int, then an array


@pytest.mark.quick(0)
def test_a_chex_dataclass_that_the_step_changes():
    @chex.dataclass
    class State:
        params: dict
        moments: tuple
        rate: float

    def step(state, x, y):
        grads = jax.grad(lambda p: cross_entropy(x @ p["w"], y))(state.params)
        updates, state.moments = optax.sgd(1.0, momentum=0.9).update(grads, state.moments)
        state.params = jax.tree.map(lambda p, u: p + state.rate * u, state.params, updates)

    def new():
        params = {"w": jnp.zeros((64, 10))}
        return State(params=params, moments=optax.sgd(1.0, momentum=0.9).init(params), rate=0.1)

    plain, fast, jitted = new(), new(), graftax.jit(step, dynamic="state")
    for x, y in BATCHES:
        step(plain, x, y), jitted(fast, x, y)
        plain.rate, fast.rate = plain.rate * 0.5, fast.rate * 0.5
    assert_same(plain, fast)
    assert type(fast.rate) is float and jitted.cache_info().traces == 1
