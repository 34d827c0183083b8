# SPDX-License-Identifier: Apache-2.0
"""Equinox: trainings and models as its users write them.

Each gives what it learned and how often its step was traced.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import optax

KEYS = jax.random.split(jax.random.key(7), 8)
X = jax.random.normal(KEYS[0], (16, 4))
Y = jnp.sin(X.sum(1, keepdims=True))


def trained(model: Any, loss: Callable[..., Any], batches: Any, *, has_aux: bool = False, **options: Any) -> Any:
    """What a training gives: the model, the losses and the traces, with a new batch in each step and one model more."""
    optimizer = options.get("optimizer", optax.adam(1e-2))
    traces = 0

    @eqx.filter_jit
    def step(model: Any, state: Any, *batch: Any) -> Any:
        nonlocal traces
        traces += 1
        value, gradient = eqx.filter_value_and_grad(loss, has_aux=has_aux)(model, *batch)
        updates, state = optimizer.update(gradient, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    losses: list[Any] = []
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    for batch in batches:
        model, state, value = step(model, state, *batch)
        losses.append(value)
    other = jax.tree.map(lambda x: x * 0.5 if eqx.is_inexact_array(x) else x, model)
    losses.append(step(other, state, *batches[0])[2])
    return eqx.filter(model, eqx.is_array), losses, traces


BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in (0, 4, 8)]


def error(model: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def regression() -> Any:
    return trained(eqx.nn.MLP(4, 1, 8, 2, key=KEYS[1]), error, BATCHES)


def mapped_layer() -> Any:
    """A layer under `filter_vmap` and one under `filter_checkpoint` as parts of a model."""
    layers = [
        eqx.filter_vmap(eqx.nn.Linear(4, 8, key=KEYS[1])),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.filter_checkpoint(jax.tree_util.Partial(jnp.multiply, jnp.ones(8))),
        eqx.filter_jit(eqx.filter_vmap(eqx.nn.Linear(8, 1, key=KEYS[2]))),
    ]

    def loss(layers: Any, x: Any, y: Any) -> Any:
        for layer in layers:
            x = layer(x)
        return jnp.mean((x - y) ** 2)

    return trained(layers, loss, BATCHES)


class Field(eqx.Module):
    net: eqx.nn.MLP
    scale: jax.Array

    @eqx.filter_jit
    def __call__(self, t: Any, y: Any, args: Any) -> Any:
        return self.scale * self.net(jnp.append(y, t))

    @eqx.filter_jit
    def drift(self, t: Any, y: Any, args: Any) -> Any:
        return -self.scale * y

    def spread(self, t: Any, y: Any, args: Any) -> Any:
        return 0.1 * jnp.tanh(self.net(jnp.append(y, t)))


def field() -> Field:
    return Field(eqx.nn.MLP(5, 4, 8, 1, activation=jnp.tanh, key=KEYS[1]), jnp.asarray(0.5))


def neural_ode(adjoint: Any) -> Any:
    """A neural ODE whose field is a jitted method of the model."""

    def path(model: Any, start: Any) -> Any:
        return dfx.diffeqsolve(
            dfx.ODETerm(model),
            dfx.Heun(),
            0.0,
            1.0,
            0.25,
            start,
            saveat=dfx.SaveAt(ts=jnp.linspace(0, 1, 3)),
            max_steps=16,
            adjoint=adjoint,
        ).ys

    def loss(model: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jax.vmap(path, (None, 0))(model, x)[:, -1].sum(1) - y[:, 0]) ** 2)

    return trained(field(), loss, BATCHES)


def term_of_a_method() -> Any:
    """`ODETerm(model.drift)` under the adjoint that asks what the term holds."""

    def loss(model: Any, x: Any, y: Any) -> Any:
        solution = dfx.diffeqsolve(
            dfx.ODETerm(model.drift),
            dfx.Heun(),
            0.0,
            1.0,
            0.25,
            x.mean(0),
            adjoint=dfx.BacksolveAdjoint(),
            max_steps=16,
        )
        return jnp.sum((solution.ys[-1] - y.mean()) ** 2)

    return trained(field(), loss, BATCHES)


def neural_sde() -> Any:
    def loss(model: Any, x: Any, keys: Any) -> Any:
        def one(start: Any, key: Any) -> Any:
            noise = dfx.VirtualBrownianTree(0.0, 1.0, 0.05, (), key)
            terms = dfx.MultiTerm(dfx.ODETerm(model.drift), dfx.ControlTerm(model.spread, noise))
            return dfx.diffeqsolve(terms, dfx.Euler(), 0.0, 1.0, 0.1, start, max_steps=32).ys[-1]

        return jnp.var(eqx.filter_vmap(one)(x, keys))

    return trained(field(), loss, [(X[i : i + 4], jax.random.split(KEYS[i], 4)) for i in range(3)])


class Control(eqx.Module):
    initial: eqx.nn.Linear
    net: eqx.nn.MLP
    out: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        one, two, three = jax.random.split(key, 3)
        self.initial = eqx.nn.Linear(2, 4, key=one)
        self.net = eqx.nn.MLP(4, 8, 8, 1, final_activation=jnp.tanh, key=two)
        self.out = eqx.nn.Linear(4, 1, key=three)

    def __call__(self, ts: Any, coefficients: Any) -> Any:
        control = dfx.CubicInterpolation(ts, coefficients)
        term = dfx.ControlTerm(lambda t, y, args: self.net(y).reshape(4, 2), control).to_ode()
        start = self.initial(control.evaluate(ts[0]))
        end = dfx.diffeqsolve(term, dfx.Heun(), ts[0], ts[-1], 0.25, start, max_steps=16).ys[-1]
        return jax.nn.sigmoid(self.out(end))[0]


def neural_cde() -> Any:
    ts = jnp.linspace(0, 1, 5)
    paths = jnp.stack([jnp.broadcast_to(ts, (8, 5)), jnp.cumsum(X[:8, :1] * jnp.ones((8, 5)), 1)], -1)
    coefficients = jax.vmap(dfx.backward_hermite_coefficients, (None, 0))(ts, paths)

    def loss(model: Any, coefficients: Any, labels: Any) -> Any:
        return jnp.mean((jax.vmap(model, (None, 0))(ts, coefficients) - labels) ** 2)

    return trained(Control(KEYS[2]), loss, [(coefficients, (Y[:8, 0] > 0) * scale) for scale in (1.0, 0.5)])


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    spectral: eqx.nn.SpectralNorm
    dropout: eqx.nn.Dropout

    def __init__(self, key: Any) -> None:
        one, two, three = jax.random.split(key, 3)
        self.linear = eqx.nn.Linear(4, 6, key=one)
        self.norm = eqx.nn.BatchNorm(6, "batch", mode="batch")
        self.spectral = eqx.nn.SpectralNorm(eqx.nn.Linear(6, 1, key=two), "weight", key=three)
        self.dropout = eqx.nn.Dropout(0.2)

    def __call__(self, x: Any, state: Any, key: Any) -> Any:
        x, state = self.norm(self.linear(x), state)
        x, state = self.spectral(self.dropout(jax.nn.relu(x), key=key), state)
        return x, state


def stateful() -> Any:
    model, state = eqx.nn.make_with_state(Normed)(KEYS[3])
    optimizer = optax.sgd(0.1)
    memory = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    traces = 0

    def loss(model: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        run = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
        out, state = run(x, state, jax.random.split(key, len(x)))
        return jnp.mean((out - y) ** 2), state

    @eqx.filter_jit
    def step(model: Any, state: Any, memory: Any, x: Any, y: Any, key: Any) -> Any:
        nonlocal traces
        traces += 1
        gradient, state = eqx.filter_grad(loss, has_aux=True)(model, state, x, y, key)
        updates, memory = optimizer.update(gradient, memory)
        return eqx.apply_updates(model, updates), state, memory

    for i, (x, y) in enumerate(BATCHES):
        model, state, memory = step(model, state, memory, x, y, KEYS[i])
    quiet = eqx.nn.inference_mode(model)
    out, _ = eqx.filter_jit(jax.vmap(quiet, in_axes=(0, None, None), out_axes=(0, None), axis_name="batch"))(
        X, state, KEYS[0]
    )
    return out, eqx.filter(model, eqx.is_array), jax.tree.leaves(state), traces


def adversaries() -> Any:
    """A GAN: two models, two optimizers, alternating steps."""
    generator, critic = eqx.nn.MLP(2, 4, 8, 1, key=KEYS[1]), eqx.nn.MLP(4, "scalar", 8, 1, key=KEYS[2])
    one, two = optax.rmsprop(1e-3), optax.rmsprop(-1e-3)
    states = one.init(eqx.filter(generator, eqx.is_array)), two.init(eqx.filter(critic, eqx.is_array))
    traces = 0

    def loss(both: Any, real: Any, key: Any) -> Any:
        generator, critic = both
        fake = jax.vmap(generator)(jax.random.normal(key, (len(real), 2)))
        return jnp.mean(jax.vmap(critic)(fake) - jax.vmap(critic)(real))

    @eqx.filter_jit
    def step(both: Any, states: Any, real: Any, key: Any) -> Any:
        nonlocal traces
        traces += 1
        to_generator, to_critic = eqx.filter_grad(loss)(both, real, key)
        first, one_state = one.update(to_generator, states[0])
        second, two_state = two.update(to_critic, states[1])
        generator, critic = eqx.apply_updates(both, (first, second))
        critic = eqx.tree_at(
            lambda c: [layer.weight for layer in c.layers], critic, replace_fn=lambda w: jnp.clip(w, -0.5, 0.5)
        )
        return (generator, critic), (one_state, two_state)

    both: Any = (generator, critic)
    for i in range(3):
        both, states = step(both, states, X[i : i + 8], KEYS[i])
    return eqx.filter(both, eqx.is_array), traces


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    out: eqx.nn.Linear
    steps: int = eqx.field(static=True)

    def __call__(self, xs: Any) -> Any:
        @eqx.filter_checkpoint
        def step(hidden: Any, x: Any) -> Any:
            hidden = self.cell(x, hidden)
            return hidden, self.out(hidden)

        hidden, _ = jax.lax.scan(step, jnp.zeros(self.cell.hidden_size), xs, length=self.steps)
        return self.out(hidden)


def recurrent() -> Any:
    model = Recurrent(eqx.nn.GRUCell(1, 5, key=KEYS[1]), eqx.nn.Linear(5, 1, key=KEYS[2]), 4)
    return trained(model, error, [(x[..., None], y) for x, y in BATCHES])


class Adapted(eqx.Module):
    frozen: eqx.nn.Linear
    down: jax.Array
    up: jax.Array

    def __call__(self, x: Any) -> Any:
        return jax.lax.stop_gradient(self.frozen)(x) + self.up @ (self.down @ x)


def lora() -> Any:
    model = eqx.nn.MLP(4, 1, 8, 2, key=KEYS[1])

    def is_linear(x: Any) -> bool:
        return isinstance(x, eqx.nn.Linear)

    def adapt(layer: Any) -> Any:
        if not is_linear(layer):
            return layer
        return Adapted(layer, 0.1 * jnp.ones((2, layer.in_features)), jnp.zeros((layer.out_features, 2)))

    model = jax.tree.map(adapt, model, is_leaf=is_linear)
    wanted = jax.tree.map(lambda _: False, model)
    wanted = eqx.tree_at(
        lambda m: [part for layer in m.layers for part in (layer.down, layer.up)], wanted, replace_fn=lambda _: True
    )
    part, rest = eqx.partition(model, wanted)

    def loss(part: Any, rest: Any, x: Any, y: Any) -> Any:
        return error(eqx.combine(part, rest), x, y)

    return trained(part, loss, [(rest, *batch) for batch in BATCHES])


class Experts(eqx.Module):
    gate: eqx.nn.Linear
    experts: eqx.nn.MLP

    def __init__(self, count: int, key: Any) -> None:
        one, two = jax.random.split(key)
        self.gate = eqx.nn.Linear(4, count, key=one)
        self.experts = eqx.filter_vmap(lambda k: eqx.nn.MLP(4, 1, 6, 1, key=k))(jax.random.split(two, count))

    def __call__(self, x: Any) -> Any:
        weights = jax.nn.softmax(self.gate(x))
        outs = eqx.filter_vmap(lambda expert, x: expert(x), in_axes=(eqx.if_array(0), None))(self.experts, x)
        top, at = jax.lax.top_k(weights, 2)
        return (top[:, None] * outs[at]).sum(0) / top.sum()


def experts() -> Any:
    return trained(Experts(4, KEYS[4]), error, BATCHES)


def stacked_layers() -> Any:
    """Layers of one kind in a scan, each rematerialised."""

    def loss(layers: Any, x: Any, y: Any) -> Any:
        arrays, rest = eqx.partition(layers, eqx.is_array)

        @functools.partial(eqx.filter_checkpoint, policy=jax.checkpoint_policies.dots_saveable)
        def layer(x: Any, arrays: Any) -> Any:
            return jnp.tanh(jax.vmap(eqx.combine(arrays, rest))(x)), None

        return jnp.mean((jax.lax.scan(layer, x, arrays)[0].sum(1, keepdims=True) - y) ** 2)

    return trained(eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 4, key=key))(KEYS[:5]), loss, BATCHES)


def by_physics() -> Any:
    """A network that solves u'' = -u: derivatives by the input inside of one by the parameters."""

    def loss(model: Any, points: Any) -> Any:
        second = jax.vmap(lambda x: eqx.filter_hessian(model)(x) + model(x))(points)
        first = eqx.filter_jacfwd(model)(jnp.asarray(0.0)) - 1
        return jnp.mean(second**2) + first**2 + model(jnp.asarray(0.0)) ** 2

    model = eqx.nn.MLP("scalar", "scalar", 8, 2, activation=jnp.tanh, key=KEYS[5])
    return trained(model, loss, [(X[:, i],) for i in range(3)])


def tasks() -> Any:
    """MAML: a gradient through steps of gradient descent, one model for each task."""

    def loss(model: Any, xs: Any, ys: Any) -> Any:
        def one(x: Any, y: Any) -> Any:
            adapted = eqx.apply_updates(
                model, jax.tree.map(lambda g: -0.1 * g, eqx.filter_grad(error)(model, x[:4], y[:4]))
            )
            return error(adapted, x[4:], y[4:])

        return eqx.filter_vmap(one)(xs, ys).mean()

    xs, ys = X.reshape(2, 8, 4), Y.reshape(2, 8, 1)
    return trained(eqx.nn.MLP(4, 1, 6, 1, key=KEYS[6]), loss, [(xs, ys), (xs + 0.1, ys)])


def straight_through() -> Any:
    """Quantised weights: a rule for cotangents by Equinox, with an argument that is not differentiated."""

    @eqx.filter_custom_vjp
    def rounded(x: Any, levels: Any) -> Any:
        return jax.tree.map(lambda a: jnp.round(a * levels) / levels if eqx.is_inexact_array(a) else a, x)

    @rounded.def_fwd
    def _(perturbed: Any, x: Any, levels: Any) -> Any:
        return rounded(x, levels), None

    @rounded.def_bwd
    def _(residuals: Any, cotangent: Any, perturbed: Any, x: Any, levels: Any) -> Any:
        return cotangent

    def loss(model: Any, x: Any, y: Any) -> Any:
        return error(rounded(model, 8), x, y)

    return trained(eqx.nn.MLP(4, 1, 8, 1, key=KEYS[1]), loss, BATCHES)


def kept_and_loaded() -> Any:
    """A training that goes on from a file."""
    first, losses, traces = trained(eqx.nn.MLP(4, 1, 8, 1, key=KEYS[1]), error, BATCHES)
    model = eqx.combine(first, eqx.nn.MLP(4, 1, 8, 1, key=KEYS[1]))
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, model)
    file.seek(0)
    like = eqx.filter_eval_shape(eqx.nn.MLP, 4, 1, 8, 1, key=KEYS[2])
    again = eqx.tree_deserialise_leaves(file, like)
    return trained(again, error, BATCHES), losses, traces


def checked() -> Any:
    """Errors at run time that do not come, bounded loops and a callback, in one step."""

    def loss(model: Any, x: Any, y: Any) -> Any:
        x = eqx.error_if(x, jnp.isnan(x).any(), "no number")
        y = eqx.filter_pure_callback(lambda a: a * 1, y, result_shape_dtypes=y)
        _, out = eqx.internal.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.9), (0, x), max_steps=4, kind="checkpointed"
        )
        return error(model, out, y)

    return trained(eqx.nn.MLP(4, 1, 8, 1, key=KEYS[1]), loss, BATCHES)


def autoencoder() -> Any:
    """A variational autoencoder: keys in the batch, two networks in a dict, aux of several parts."""
    model = {"dec": eqx.nn.MLP(2, 4, 8, 1, key=KEYS[2]), "enc": eqx.nn.MLP(4, 4, 8, 1, key=KEYS[1]), "name": "vae"}

    def loss(model: Any, x: Any, key: Any) -> Any:
        mean, spread = jnp.split(jax.vmap(model["enc"])(x), 2, axis=1)
        z = mean + jnp.exp(spread) * jax.random.normal(key, mean.shape)
        rebuilt = jnp.mean((jax.vmap(model["dec"])(z) - x) ** 2)
        prior = jnp.mean(mean**2 + jnp.exp(2 * spread) - 2 * spread - 1)
        return rebuilt + 0.1 * prior, {"prior": prior, "kind": "gauss"}

    return trained(model, loss, [(X[i : i + 8], KEYS[i]) for i in range(3)], has_aux=True)


def attention() -> Any:
    class Block(eqx.Module):
        attend: eqx.nn.MultiheadAttention
        norm: eqx.nn.LayerNorm
        out: eqx.nn.Linear

        def __call__(self, x: Any, *, key: Any = None) -> Any:
            x = x[:, None] * jnp.ones(4)
            mask = jnp.tril(jnp.ones((4, 4), bool))
            x = x + self.attend(*[jax.vmap(self.norm)(x)] * 3, mask=mask)
            return self.out(x.mean(0))

    model = Block(eqx.nn.MultiheadAttention(2, 4, key=KEYS[1]), eqx.nn.LayerNorm(4), eqx.nn.Linear(4, 1, key=KEYS[2]))
    return trained(model, error, BATCHES, optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))


ADJOINTS = {"recursive": dfx.RecursiveCheckpointAdjoint(), "backsolve": dfx.BacksolveAdjoint()}
PROGRAMS: dict[str, Any] = {f"neural ODE {name}": functools.partial(neural_ode, a) for name, a in ADJOINTS.items()}
PLAIN = (regression, mapped_layer, term_of_a_method, neural_sde, neural_cde, stateful, adversaries, recurrent, lora)
PLAIN += (
    experts,
    stacked_layers,
    by_physics,
    tasks,
    straight_through,
    kept_and_loaded,
    checked,
    autoencoder,
    attention,
)
PROGRAMS |= {program.__name__.replace("_", " "): program for program in PLAIN}
