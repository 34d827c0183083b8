# SPDX-License-Identifier: Apache-2.0
"""Programs in the manner of Equinox's documentation: ``filter_jit`` is replaced, and nothing else changes."""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftax

pytestmark = pytest.mark.quick(1)  # a second each

MODES = pytest.mark.parametrize("jit", [graftax.jit, graftax.filter_jit], ids=["jit", "filter_jit"])
STEPS = 3


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def agree(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if eqx.is_array(b):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        else:
            assert a is b or a == b


def check(jit, program, traced=1):
    """The program's numbers are those it has with ``equinox.filter_jit``, and its step is traced `traced` times."""
    ours, count = program(jit)
    theirs, _ = program(eqx.filter_jit)
    agree(ours, theirs)
    assert count == traced


def traces(jitted):
    """How often a function was traced; Equinox is taken to trace it once."""
    return jitted.cache_info().traces if isinstance(jitted, type(graftax.jit(abs))) else 1


# ── training ──


def mlp_step(jit, optimizer):
    made = eqx.nn.MLP(3, 2, 8, 2, key=jax.random.key(0))

    def loss(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    @jit
    def step(model, state, x, y):
        value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    model, state, losses = made, optimizer.init(eqx.filter(made, eqx.is_inexact_array)), []
    for seed in range(STEPS):
        model, state, value = step(model, state, normal(seed, 5, 3), normal(seed + 10, 5, 2))
        losses.append(value)
    assert losses[0] != losses[1]
    return (eqx.filter(model, eqx.is_array), state, losses), traces(step)


@pytest.mark.quick(0)
@MODES
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw_with_schedule", "chain"])
def test_an_mlp_trains(name, jit):
    schedule = optax.cosine_decay_schedule(1e-2, 10)
    optimizer = {
        "sgd": lambda: optax.sgd(0.1, momentum=0.9),
        "adam": lambda: optax.adam(1e-2),
        "adamw_with_schedule": lambda: optax.adamw(schedule),
        "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    }[name]()
    # Optax's schedule turns a number that it captures into a float on its first call: another key, once.
    once_more = name == "adamw_with_schedule" and jit is graftax.jit
    check(jit, lambda jit: mlp_step(jit, optimizer), traced=2 if once_more else 1)


class Trainer(eqx.Module):
    """A module that holds its optimizer and the optimizer's state."""

    model: eqx.nn.MLP
    optimizer: optax.GradientTransformation
    state: optax.OptState

    def __init__(self, optimizer, key):
        self.model = eqx.nn.MLP(2, 1, 4, 1, key=key)
        self.optimizer = optimizer
        self.state = optimizer.init(eqx.filter(self.model, eqx.is_inexact_array))

    def step(self, x):
        grads = eqx.filter_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(self.model)
        updates, state = self.optimizer.update(grads, self.state)
        model = eqx.apply_updates(self.model, updates)
        return eqx.tree_at(lambda t: (t.model, t.state), self, (model, state))


@MODES
@pytest.mark.quick(0)
def test_a_module_that_holds_its_optimizer(jit):
    optimizer = optax.adam(1e-2)

    def program(jit):
        step = jit(lambda trainer, x: trainer.step(x))
        for seed in (0, 1):
            trainer = Trainer(optimizer, jax.random.key(seed))
            for _ in range(STEPS):
                trainer = step(trainer, jnp.ones((3, 2)))
        return eqx.filter(trainer, eqx.is_array), traces(step)

    check(jit, program)


class Normed(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    spectral: eqx.nn.SpectralNorm
    last: eqx.nn.Linear

    def __init__(self, key, mode):
        a, b, c, d = jax.random.split(key, 4)
        self.first = eqx.nn.Linear(3, 4, key=a)
        self.norm = eqx.nn.BatchNorm(4, "batch", mode=mode)
        self.spectral = eqx.nn.SpectralNorm(eqx.nn.Linear(4, 4, key=b), "weight", key=c)
        self.last = eqx.nn.Linear(4, 2, key=d)

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        x, state = self.spectral(jax.nn.relu(x), state)
        return self.last(x), state


@pytest.mark.quick(0)  # of its parts: test_a_stateful_operation, and test_equinox_state
@MODES
@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_a_stateful_model_trains(mode, jit):
    optimizer = optax.adam(1e-2)

    def loss(model, state, x, y):
        out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        return jnp.mean((out - y) ** 2), state

    def program(jit):
        @jit
        def step(model, state, opt_state, x, y):
            grads, state = eqx.filter_grad(loss, has_aux=True)(model, state, x, y)
            updates, opt_state = optimizer.update(grads, opt_state)
            return eqx.apply_updates(model, updates), state, opt_state

        @jit
        def evaluate(model, state, x):
            model = eqx.nn.inference_mode(model)
            return jax.vmap(lambda x: model(x, state)[0])(x)

        model, state = eqx.nn.make_with_state(Normed)(jax.random.key(0), mode)
        opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        for seed in range(STEPS):
            model, state, opt_state = step(model, state, opt_state, normal(seed, 6, 3), normal(seed + 9, 6, 2))
        out = evaluate(model, state, normal(8, 6, 3))
        return (eqx.filter(model, eqx.is_array), state, out), traces(step)

    check(jit, program)


# ── from the documentation ──


class CNN(eqx.Module):
    layers: list

    def __init__(self, key):
        a, b, c = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 3, kernel_size=4, key=a),
            eqx.nn.MaxPool2d(kernel_size=2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(3 * 8 * 8, 8, key=b),
            jax.nn.sigmoid,
            eqx.nn.Linear(8, 10, key=c),
            jax.nn.log_softmax,
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def cross_entropy(y, predicted):
    return -jnp.mean(jnp.take_along_axis(predicted, jnp.expand_dims(y, 1), axis=1))


@pytest.mark.quick(0)  # two seconds, and the way of training is that of the MLP
@MODES
def test_a_convolutional_classifier(jit):
    optimizer = optax.adamw(3e-3)

    def program(jit):
        @jit
        def loss(model, x, y):
            return cross_entropy(y, jax.vmap(model)(x))

        @jit
        def accuracy(model, x, y):
            return jnp.mean(y == jnp.argmax(jax.vmap(model)(x), axis=1))

        @jit
        def step(model, opt_state, x, y):
            value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
            updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
            return eqx.apply_updates(model, updates), opt_state, value

        model = CNN(jax.random.key(5678))
        opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
        numbers = []
        for seed in range(STEPS):
            x, y = normal(seed, 4, 1, 12, 12), np.arange(4) + seed  # NumPy labels, as a data loader gives them
            model, opt_state, value = step(model, opt_state, x, y)
            numbers += [value, loss(model, x, y), accuracy(model, x, y)]
        return (eqx.filter(model, eqx.is_array), numbers), traces(step)

    check(jit, program)


class RNN(eqx.Module):
    hidden_size: int
    cell: eqx.Module
    linear: eqx.nn.Linear
    bias: jax.Array

    def __init__(self, in_size, out_size, hidden_size, *, key):
        a, b = jax.random.split(key)
        self.hidden_size = hidden_size
        self.cell = eqx.nn.GRUCell(in_size, hidden_size, key=a)
        self.linear = eqx.nn.Linear(hidden_size, out_size, use_bias=False, key=b)
        self.bias = jnp.zeros(out_size)

    def __call__(self, sequence):
        def body(carry, x):
            return self.cell(x, carry), None

        out, _ = jax.lax.scan(body, jnp.zeros((self.hidden_size,)), sequence)
        return jax.nn.sigmoid(self.linear(out) + self.bias)


@pytest.mark.quick(0)  # as the convolutional one
@MODES
def test_a_recurrent_classifier(jit):
    def program(jit):
        @eqx.filter_value_and_grad
        def loss(model, x, y):
            predicted = jax.vmap(model)(x)
            return -jnp.mean(y * jnp.log(predicted) + (1 - y) * jnp.log(1 - predicted))

        optimizer = optax.adam(3e-3)

        @jit
        def step(model, x, y, opt_state):
            value, grads = loss(model, x, y)
            updates, opt_state = optimizer.update(grads, opt_state)
            return value, eqx.apply_updates(model, updates), opt_state

        model = RNN(2, 1, 4, key=jax.random.key(1))
        opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        values = []
        for seed in range(STEPS):
            value, model, opt_state = step(model, normal(seed, 5, 6, 2), jnp.ones((5, 1)), opt_state)
            values.append(value)
        return (eqx.filter(model, eqx.is_array), values), traces(step)

    check(jit, program)


class CustomLinear(eqx.Module):
    weight: jax.Array
    bias: jax.Array

    def __init__(self, in_size, out_size, key):
        a, b = jax.random.split(key)
        self.weight = jax.random.normal(a, (out_size, in_size))
        self.bias = jax.random.normal(b, (out_size,))

    def __call__(self, x):
        return self.weight @ x + self.bias


@MODES
def test_a_layer_of_ones_own(jit):
    def program(jit):
        @jit
        @eqx.filter_grad
        def gradient(model, x, y):
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        model, start = CustomLinear(2, 3, jax.random.key(0)), traces(gradient)  # a table of all of filter_grad's
        for _ in range(STEPS):
            grads = gradient(model, jnp.ones((4, 2)), jnp.zeros((4, 3)))
            model = jax.tree.map(lambda m, g: m - 0.1 * g, model, grads)
        return model, traces(gradient) - start

    check(jit, program)


@pytest.mark.quick(0)  # two seconds: test_vmap_nesting has an ensemble
@MODES
def test_an_ensemble_trains(jit):
    def program(jit):
        @jit
        def make(keys):
            return eqx.filter_vmap(lambda key: eqx.nn.MLP(2, 2, 4, 1, key=key))(keys)

        def loss(model, x):
            return jnp.mean(model(x) ** 2)

        @jit
        @eqx.filter_vmap(in_axes=(eqx.if_array(0), None))
        def step(model, x):
            grads = eqx.filter_grad(loss)(model, x)
            return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))

        models, start = make(jax.random.split(jax.random.key(0), 3)), traces(step)  # a table of all of filter_vmap's
        for _ in range(STEPS):
            models = step(models, jnp.ones(2))
        return eqx.filter(models, eqx.is_array), traces(step) - start

    check(jit, program)


@pytest.mark.quick(0)
@MODES
def test_frozen_parameters(jit):
    def program(jit):
        model = eqx.nn.MLP(2, 1, 4, 2, key=jax.random.key(0))
        spec = jax.tree.map(lambda _: False, model)
        spec = eqx.tree_at(lambda t: (t.layers[-1].weight, t.layers[-1].bias), spec, replace=(True, True))
        optimizer = optax.sgd(0.1)

        @jit
        def step(model, x, opt_state):
            @eqx.filter_grad
            def gradient(trained, frozen):
                return jnp.mean(jax.vmap(eqx.combine(trained, frozen))(x) ** 2)

            trained, frozen = eqx.partition(model, spec)
            updates, opt_state = optimizer.update(gradient(trained, frozen), opt_state)
            return eqx.apply_updates(model, updates), opt_state

        new, opt_state = model, optimizer.init(eqx.filter(model, spec))
        for seed in range(STEPS):
            new, opt_state = step(new, normal(seed, 5, 2), opt_state)
        assert all(
            np.array_equal(a, b)
            for old_layer, new_layer in zip(model.layers[:-1], new.layers[:-1], strict=True)
            for a, b in zip(jax.tree.leaves(old_layer), jax.tree.leaves(new_layer), strict=True)
        )
        assert not np.array_equal(model.layers[-1].weight, new.layers[-1].weight)
        return eqx.filter(new, eqx.is_array), traces(step)

    check(jit, program)


class Counter(eqx.Module):
    index: eqx.nn.StateIndex

    def __init__(self):
        self.index = eqx.nn.StateIndex(jnp.array(0))

    def __call__(self, x, state):
        value = state.get(self.index)
        return x + value, state.set(self.index, value + 1)


@MODES
def test_a_stateful_operation(jit):
    def program(jit):
        counter, state = eqx.nn.make_with_state(Counter)()
        step = jit(lambda model, x, state: model(x, state))
        x = jnp.array(2.3)
        for _ in range(STEPS):
            x, state = step(counter, x, state)
        return (x, state), traces(step)

    check(jit, program)


def test_saved_weights_of_a_trained_model(tmp_path):
    step = graftax.filter_jit(lambda model: jax.tree.map(lambda w: w * 2 if eqx.is_array(w) else w, model))
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    trained = step(model)
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", trained)
    agree(eqx.tree_deserialise_leaves(tmp_path / "model.eqx", model), trained)


ONCE = 1 if sys.version_info >= (3, 12) else 2  # compilations, where the trace alone shows that a number changes


def test_a_counter_beside_a_function_that_filter_jit_has_not_met_does_not_compile_on_each_call():
    inner = eqx.filter_jit(lambda x: x * 2)  # its first call makes texts, by code that names `type` to `typing.cast`

    class Counted:
        def __init__(self):
            self.calls = 0

    @graftax.jit
    def step(counted, x):
        counted.calls += 1
        return inner(x) * counted.calls

    counted = Counted()
    for count in range(1, 5):
        assert step(counted, jnp.ones(2)).tolist() == [2 * count] * 2 and counted.calls == count
    assert step.cache_info().traces == 2  # it sets up a logger, which must not be done again


def test_a_counter_of_a_module_that_vmap_maps_does_not_compile_on_each_call():
    class Counted(eqx.Module):
        linear: eqx.nn.Linear
        steps: int

        def __call__(self, x):
            return self.linear(x)

    @graftax.jit
    def step(model, x):
        y = jax.vmap(model)(x) * model.steps  # JAX asks the module for its text, which shows the number
        return eqx.tree_at(lambda m: m.steps, model, model.steps + 1), y

    model, x = Counted(eqx.nn.Linear(2, 1, key=jax.random.key(0)), 0), jnp.ones((3, 2))
    for count in range(4):
        expected = jax.vmap(model.linear)(x) * count
        model, y = step(model, x)
        assert model.steps == count + 1
        np.testing.assert_allclose(y, expected, rtol=1e-6)
    assert step.cache_info().traces == ONCE


def test_jax_is_given_the_names_of_builtins():
    assert jax.make_jaxpr(sum)([1, 2]).jaxpr.debug_info.func_src_info == "sum"
