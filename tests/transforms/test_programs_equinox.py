# SPDX-License-Identifier: Apache-2.0
"""Programs as in Equinox's documentation, with `filter_*` from graftax and from Equinox: the results are the same."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftax


class OneImportChanged:
    """`filter_*` from graftax, and what it does not have from Equinox."""

    def __getattr__(self, name: str) -> Any:
        return getattr(graftax if name.startswith("filter_") and hasattr(graftax, name) else eqx, name)


def key(seed: int) -> Any:
    return jax.random.key(seed)


def normal(seed: int, *shape: int) -> Any:
    return jax.random.normal(key(seed), shape)


def arrays_of(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if eqx.is_array(x)]


def train(
    lib: Any, loss: Callable[..., Any], model: Any, data: Callable[[int], tuple[Any, ...]], steps: int = 3
) -> Any:
    """(the model after a few steps of Adam, the losses)"""
    optimizer = optax.adam(1e-2)

    @lib.filter_jit
    def step(model: Any, state: Any, *batch: Any) -> Any:
        value, grads = lib.filter_value_and_grad(loss)(model, *batch)
        updates, state = optimizer.update(grads, state, lib.filter(model, lib.is_inexact_array))
        return lib.apply_updates(model, updates), state, value

    state, losses = optimizer.init(lib.filter(model, lib.is_inexact_array)), []
    for i in range(steps):
        model, state, value = step(model, state, *data(i))
        losses.append(value)
    return model, losses


# ---- training


def mlp(lib: Any) -> Any:
    def loss(model: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    model = lib.nn.MLP(3, 2, 8, 2, key=key(0))
    return train(lib, loss, model, lambda i: (normal(i, 5, 3), normal(10 + i, 5, 2)))


class CNN(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self) -> None:
        self.conv = eqx.nn.Conv2d(1, 3, 3, key=key(0))
        self.norm = eqx.nn.BatchNorm(3, "batch", mode="batch")
        self.out = eqx.nn.Linear(12, 4, key=key(1))

    def __call__(self, x: Any, state: Any) -> Any:
        x, state = self.norm(self.conv(x), state)
        x = eqx.nn.MaxPool2d(2, 2)(jax.nn.relu(x))
        return jax.nn.log_softmax(self.out(x.ravel())), state


def cnn_with_batch_norm(lib: Any) -> Any:
    optimizer = optax.sgd(0.1)

    @functools.partial(lib.filter_value_and_grad, has_aux=True)
    def loss(model: Any, state: Any, x: Any, y: Any) -> Any:
        run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        log_p, state = run(x, state)
        return -jnp.mean(jnp.take_along_axis(log_p, y[:, None], 1)), state

    @lib.filter_jit
    def step(model: Any, state: Any, opt_state: Any, x: Any, y: Any) -> Any:
        (value, state), grads = loss(model, state, x, y)
        updates, opt_state = optimizer.update(grads, opt_state)
        return lib.apply_updates(model, updates), state, opt_state, value

    model, state = lib.nn.make_with_state(CNN)()
    opt_state, losses = optimizer.init(lib.filter(model, lib.is_inexact_array)), []
    for i in range(3):
        model, state, opt_state, value = step(model, state, opt_state, normal(i, 4, 1, 6, 6), jnp.arange(4))
        losses.append(value)
    tested = jax.vmap(lib.nn.inference_mode(model), axis_name="batch", in_axes=(0, None))(normal(9, 2, 1, 6, 6), state)
    return model, arrays_of(state), losses, tested[0]


class RNN(eqx.Module):
    hidden_size: int
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear
    bias: jax.Array

    def __init__(self) -> None:
        self.hidden_size = 4
        self.cell = eqx.nn.GRUCell(2, 4, key=key(0))
        self.linear = eqx.nn.Linear(4, 1, use_bias=False, key=key(1))
        self.bias = jnp.zeros(1)

    def __call__(self, xs: Any) -> Any:
        out, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(self.hidden_size), xs)
        return jax.nn.sigmoid(self.linear(out) + self.bias)[0]


def rnn(lib: Any) -> Any:
    def loss(model: Any, xs: Any, y: Any) -> Any:
        p = jax.vmap(model)(xs)
        return -jnp.mean(y * jnp.log(p) + (1 - y) * jnp.log(1 - p))

    return train(lib, loss, RNN(), lambda i: (normal(i, 4, 5, 2), jnp.asarray([0.0, 1.0, 1.0, 0.0])))


def dropout_keys(lib: Any) -> Any:
    model = lib.nn.Sequential(
        [
            lib.nn.Linear(3, 8, key=key(0)),
            lib.nn.Lambda(jax.nn.gelu),
            lib.nn.Dropout(0.5),
            lib.nn.Linear(8, 1, key=key(1)),
        ]
    )

    def loss(model: Any, x: Any, seed: Any) -> Any:
        return jnp.mean(jax.vmap(lambda x, k: model(x, key=k))(x, jax.random.split(seed, len(x))) ** 2)

    model, losses = train(lib, loss, model, lambda i: (normal(i, 5, 3), key(i)))
    return model, losses, jax.vmap(lib.tree_inference(model, value=True))(normal(7, 2, 3))


# ---- many models, some parameters, two players


def ensemble(lib: Any) -> Any:
    models = lib.filter_vmap(lambda k: lib.nn.MLP(2, 1, 4, 1, key=k))(jax.random.split(key(0), 3))
    x, y = normal(1, 6, 2), normal(2, 6, 1)

    @lib.filter_vmap(in_axes=(lib.if_array(0), None, None))
    def outputs(model: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    def loss(models: Any, x: Any, y: Any) -> Any:
        return jnp.sum(outputs(models, x, y))

    models, losses = train(lib, loss, models, lambda _: (x, y))
    return models, losses, outputs(models, x, y)


def axes_by_name(lib: Any) -> Any:
    @lib.filter_vmap(in_axes={"model": lib.if_array(0), "x": None, "scale": {"a": 0, "b": None}})
    def outputs(model: Any, x: Any, scale: Any, name: str, offset: Any, power: int = 2) -> Any:
        assert name == "net"
        return model(x) * scale["a"] * scale["b"] + offset**power

    models = lib.filter_vmap(lambda k: lib.nn.MLP(2, 1, 4, 1, key=k))(jax.random.split(key(0), 3))
    scale = {"a": jnp.arange(3.0), "b": jnp.ones(1)}
    with pytest.raises(ValueError, match="bias"):
        lib.filter_vmap(lambda x: x, in_axes={"bias": 0})(jnp.ones(2))
    return outputs(models, normal(1, 2), scale, "net", jnp.arange(3.0))


def frozen_parameters(lib: Any) -> Any:
    model = lib.nn.MLP(2, 1, 4, 2, key=key(0))
    spec = jax.tree.map(lambda _: False, model)
    spec = lib.tree_at(lambda t: (t.layers[-1].weight, t.layers[-1].bias), spec, replace=(True, True))

    @lib.filter_jit
    @lib.filter_grad
    def gradient(trained: Any, frozen: Any, x: Any) -> Any:
        return jnp.mean(jax.vmap(lib.combine(trained, frozen))(x) ** 2)

    for i in range(3):
        trained, frozen = lib.partition(model, spec)
        grads = gradient(trained, frozen, normal(i, 4, 2))
        model = lib.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
    return model, grads


def gan(lib: Any) -> Any:
    """Two optimizers; each player's step has the other one as a constant."""
    optimizers = optax.adam(1e-2, b1=0.5), optax.adam(2e-2, b1=0.5)

    def scores(critic: Any, x: Any) -> Any:
        return jax.nn.log_sigmoid(jax.vmap(critic)(x))

    @lib.filter_value_and_grad
    def of_critic(critic: Any, maker: Any, real: Any, z: Any) -> Any:
        return -scores(critic, real).mean() - jnp.log1p(-jnp.exp(scores(critic, jax.vmap(maker)(z)))).mean()

    @lib.filter_value_and_grad
    def of_maker(maker: Any, critic: Any, z: Any) -> Any:
        return -scores(critic, jax.vmap(maker)(z)).mean()

    @lib.filter_jit(donate="none")
    def step(players: Any, states: Any, real: Any, z: Any) -> Any:
        maker, critic = players
        values, grads = zip(of_maker(maker, critic, z), of_critic(critic, maker, real, z), strict=True)
        updates = [o.update(g, s) for o, g, s in zip(optimizers, grads, states, strict=True)]
        players = [lib.apply_updates(p, u) for p, (u, _) in zip(players, updates, strict=True)]
        return players, [s for _, s in updates], values

    players = [lib.nn.MLP(2, 2, 4, 1, key=key(0)), lib.nn.MLP(2, "scalar", 4, 1, key=key(1))]
    states = [o.init(lib.filter(p, lib.is_array)) for o, p in zip(optimizers, players, strict=True)]
    for i in range(3):
        players, states, values = step(players, states, normal(i, 4, 2), normal(i + 10, 4, 2))
    return players, states, values


# ---- rules, solvers, memory


def rules_of_ones_own(lib: Any) -> Any:
    @lib.filter_custom_vjp
    def clip(model: Any, bound: Any, *, power: int) -> Any:
        return model(jnp.ones(2)) ** power

    @clip.def_fwd
    def forward(perturbed: Any, model: Any, bound: Any, *, power: int) -> Any:
        out, pull = lib.filter_vjp(lambda m: m(jnp.ones(2)) ** power, model)
        return out, pull

    @clip.def_bwd
    def backward(residuals: Any, g: Any, perturbed: Any, model: Any, bound: Any, *, power: int) -> Any:
        (grads,) = residuals(jnp.clip(g, -bound, bound))
        return jax.tree.map(lambda x: jnp.clip(x, -bound, bound), grads)

    @lib.filter_custom_jvp
    def soft(x: Any, slope: float) -> Any:
        return jnp.sign(x["x"]) * slope

    @soft.def_jvp
    def soft_jvp(primals: Any, tangents: Any) -> Any:
        (x, slope), (t, _) = primals, tangents
        return soft(x, slope), t["x"] * (1 - jnp.tanh(x["x"]) ** 2) * slope

    model = lib.nn.Linear(2, 2, key=key(0))
    first = lib.filter_jit(lib.filter_grad(lambda m: (clip(m, 0.3, power=2) * 5).sum()))(model)
    second = lib.filter_grad(lambda x: soft(x, 3.0).sum())({"x": jnp.asarray([0.5, -2.0]), "note": "text"})
    rates = lib.filter_jvp(lambda m, x: m(x), (model, jnp.ones(2)), (jax.tree.map(jnp.ones_like, model), None))
    return first, second, rates


def integrated(lib: Any, f: Callable[..., Any], y: Any, steps: int = 5) -> Any:
    """Heun's method whose reverse pass integrates backwards: the vector field has to be without closure."""
    f = lib.filter_closure_convert(f, y)
    h = 0.1

    def heun(f: Any, y: Any, h: float) -> Any:
        first = f(y)
        return y + h / 2 * (first + f(y + h * first))

    @lib.filter_custom_vjp
    def solve(arguments: Any) -> Any:
        f, y = arguments
        return jax.lax.fori_loop(0, steps, lambda _, y: heun(f, y, h), y)

    @solve.def_fwd
    def forward(perturbed: Any, arguments: Any) -> Any:
        out = solve(arguments)
        return out, out

    @solve.def_bwd
    def backward(out: Any, g: Any, perturbed: Any, arguments: Any) -> Any:
        f, _ = arguments
        arrays, statics = lib.partition(f, lib.is_inexact_array)

        def step_back(_: Any, carry: Any) -> Any:
            y, g, total = carry
            y = heun(f, y, -h)
            _, pull = jax.vjp(lambda a, y: heun(lib.combine(a, statics), y, h), arrays, y)
            more, g = pull(g)
            return y, g, jax.tree.map(jnp.add, total, more)

        zeros = jax.tree.map(jnp.zeros_like, arrays)
        _, g, total = jax.lax.fori_loop(0, steps, step_back, (out, g, zeros))
        return total, g

    return solve((f, y))


def adjoint_solver(lib: Any) -> Any:
    def loss(model: Any, y: Any, scale: Any) -> Any:
        return (integrated(lib, lambda y: jnp.tanh(model(y)) * scale, y) ** 2).sum()

    model, y = lib.nn.MLP(2, 2, 4, 1, key=key(0)), normal(1, 2)
    derivative = lib.filter_value_and_grad(lambda parts: loss(*parts))
    return lib.filter_jit(derivative)((model, y, jnp.asarray(0.5))), derivative((model, y, jnp.asarray(0.5)))


class Field(eqx.Module):
    scale: jax.Array
    mlp: eqx.nn.MLP

    def __call__(self, t: Any, y: Any, args: None) -> Any:
        del args
        return self.scale * self.mlp(jnp.append(y, t))


class NeuralODE(eqx.Module):
    field: Field

    def __call__(self, ts: Any, y: Any) -> Any:
        def step(y: Any, t: Any) -> Any:
            t, dt = t
            k1 = self.field(t, y, None)
            k2 = self.field(t + dt / 2, y + dt / 2 * k1, None)
            y = y + dt * k2
            return y, y

        return jax.lax.scan(step, y, (ts[:-1], jnp.diff(ts)))[1]


def neural_ode(lib: Any) -> Any:
    ts = jnp.linspace(0, 1, 6)
    ys = jax.vmap(lambda s: jnp.stack([jnp.cos(ts + s), jnp.sin(ts + s)], -1))(jnp.arange(3.0))

    def loss(model: Any, ts: Any, ys: Any) -> Any:
        return jnp.mean((jax.vmap(model, in_axes=(None, 0))(ts, ys[:, 0]) - ys[:, 1:]) ** 2)

    model = NeuralODE(Field(jnp.asarray(1.0), lib.nn.MLP(3, 2, 6, 1, activation=jax.nn.softplus, key=key(0))))
    return train(lib, loss, model, lambda _: (ts, ys))


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, k: Any) -> None:
        one, two = jax.random.split(k)
        self.attention = eqx.nn.MultiheadAttention(2, 4, key=one)
        self.norm = eqx.nn.LayerNorm(4)
        self.mlp = eqx.nn.MLP(4, 4, 8, 1, key=two)

    def __call__(self, x: Any, mask: Any = None, *, causal: bool) -> Any:
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool)) if causal else mask
        h = jax.vmap(self.norm)(x)
        x = x + self.attention(h, h, h, mask=mask)
        return x + jax.vmap(self.mlp)(x)


def checkpointed_blocks(lib: Any) -> Any:
    """Layers stacked by `filter_vmap`, run by `lax.scan`, and computed again in the reverse pass."""
    blocks = lib.filter_vmap(Block)(jax.random.split(key(0), 2))

    def loss(blocks: Any, x: Any) -> Any:
        arrays, statics = lib.partition(blocks, lib.is_array)

        @lib.filter_checkpoint
        def run(block: Any, x: Any, *, causal: bool) -> Any:
            return block(x, causal=causal)

        def step(x: Any, layer: Any) -> Any:
            return run(lib.combine(layer, statics), x, causal=True), None

        return (jax.lax.scan(step, x, arrays)[0] ** 2).mean()

    return train(lib, loss, blocks, lambda i: (normal(i, 3, 4),), steps=2)


# ---- shapes, files, host functions, jaxprs


def shapes_and_a_file(lib: Any) -> Any:
    def make(k: Any, *, width: int) -> Any:
        return {"model": lib.nn.MLP(2, 2, width, 1, key=k), "step": jnp.asarray(0), "hyper": {"width": width}}

    file = io.BytesIO()
    lib.tree_serialise_leaves(file, make(key(3), width=4))
    file.seek(0)
    like = lib.filter_eval_shape(make, key(0), width=4)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(like) if hasattr(x, "shape"))
    loaded = lib.tree_deserialise_leaves(file, like)
    return loaded, loaded["model"](jnp.ones(2))


def host_functions(lib: Any) -> Any:
    def look_up(batch: Any, scale: Any) -> Any:
        return {"y": np.interp(np.asarray(batch["x"]), [0.0, 1.0], [0.0, 10.0]).astype(np.float32) * np.float32(scale)}

    @lib.filter_jit
    def run(batch: Any) -> Any:
        shape = {"y": jax.ShapeDtypeStruct(batch["x"].shape, jnp.float32)}
        return lib.filter_pure_callback(look_up, batch, 2.0, result_shape_dtypes=shape)["y"] + 1

    return run({"x": jnp.asarray([0.1, 0.5]), "name": "first"}), run({"x": jnp.asarray([0.2]), "name": "second"})


def jacobians_and_curvature(lib: Any) -> Any:
    model, x = lib.nn.MLP(2, 2, 3, 1, activation=jnp.tanh, key=key(0)), normal(1, 2)
    field = lib.filter_jit(lambda x: jnp.trace(lib.filter_jacfwd(model)(x)))  # a divergence
    energy = lambda x: (model(x) ** 2).sum()
    _, shapes, statics = lib.filter_make_jaxpr(lambda m, x: {"y": m(x), "kind": "out"})(model, x)
    return field(x), lib.filter_jacrev(model)(x), lib.filter_hessian(energy)(x), shapes["y"].shape, statics["kind"]


def gradient_penalty(lib: Any) -> Any:
    """A gradient inside of what is differentiated, for each element of a batch."""

    def loss(critic: Any, x: Any) -> Any:
        slopes = lib.filter_vmap(lib.filter_grad(lambda x: critic(x)))(x)
        return jnp.mean((jnp.sqrt((slopes**2).sum(-1)) - 1) ** 2)

    critic = lib.nn.MLP(2, "scalar", 4, 1, activation=jnp.tanh, key=key(0))
    return train(lib, loss, critic, lambda i: (normal(i, 4, 2),))


class Spectral(eqx.Module):
    layer: eqx.nn.SpectralNorm
    out: eqx.nn.Linear

    def __init__(self) -> None:
        self.layer = eqx.nn.SpectralNorm(eqx.nn.Linear(2, 3, key=key(0)), "weight", key=key(1))
        self.out = eqx.nn.Linear(3, 1, key=key(2))

    def __call__(self, x: Any, state: Any) -> Any:
        x, state = self.layer(x, state)
        return self.out(jnp.tanh(x)), state


def stateful_ensemble(lib: Any) -> Any:
    """`eqx.nn.State` with a mapped axis, as in the documentation's section on ensembles of stateful models."""
    make = lib.nn.make_with_state(lambda _: Spectral())
    model, state = lib.filter_vmap(make)(jnp.arange(3))

    @lib.filter_jit
    def step(model: Any, state: Any, x: Any) -> Any:
        def loss(model: Any, state: Any) -> Any:
            y, state = lib.filter_vmap(lambda m, s: m(x, s))(model, state)
            return (y**2).sum(), state

        (value, state), grads = lib.filter_value_and_grad(loss, has_aux=True)(model, state)
        return lib.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), state, value

    for i in range(2):
        model, state, value = step(model, state, normal(i, 2))
    return model, arrays_of(state), value


PROGRAMS = [
    *(mlp, cnn_with_batch_norm, rnn, dropout_keys, ensemble, axes_by_name, frozen_parameters, gan, rules_of_ones_own),
    *(adjoint_solver, neural_ode, checkpointed_blocks, shapes_and_a_file, host_functions, jacobians_and_curvature),
    *(gradient_penalty, stateful_ensemble),
]


@pytest.mark.filterwarnings("error::graftax.LostChangeWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.quick(1)
def test_one_changed_import_changes_no_result(program: Callable[[Any], Any]):
    ours, theirs = program(OneImportChanged()), program(eqx)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if eqx.is_array_like(other):
            assert (jnp.shape(one), jnp.result_type(one)) == (jnp.shape(other), jnp.result_type(other))
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        else:
            assert one is other or one == other


def test_all_of_equinox_but_its_pmap_is_there():
    names = {name for name in dir(eqx) if name.startswith("filter_")} - {"filter_pmap"}
    assert {name for name in names if getattr(OneImportChanged(), name) is not getattr(graftax, name, None)} == set()
