# SPDX-License-Identifier: Apache-2.0
"""Flax NNX: trainings as its users write them, unchanged: the transforms in `nnx` are replaced by name.

Each gives what it learned and how often its step was traced.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

if os.environ.get("GRAFTAX_ECOSYSTEM") == "replaced":
    import replaced_names

    replaced_names.of_nnx()

X = jax.random.normal(jax.random.key(1), (8, 6))
Y = jnp.sin(X.sum(1, keepdims=True))
TRACES: Any = logging.getLogger("traces")  # static, so that a trace alone counts
STEPS: list[Any] = []


def jitted(step: Any) -> Any:
    STEPS.append(nnx.jit(step))
    return STEPS[-1]


def counted(program: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        TRACES.count = 0
        STEPS.clear()
        found = program()
        asked = all(hasattr(step, "cache_info") for step in STEPS)  # graftax may run a trace again before it is one
        return found, sum(step.cache_info().traces for step in STEPS) if asked else TRACES.count

    return run


def arrays(*of: Any) -> Any:
    def plain(x: Any) -> Any:
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return [jax.tree.map(plain, nnx.to_pure_dict(nnx.state(x))) for x in of]


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 4, (3,), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(24, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.norm(self.conv(x[..., None])))
        return self.out(self.drop(x.reshape(len(x), -1)))


@counted
def classifier() -> Any:
    """The loop of NNX's first tutorial: a model, an optimizer and metrics that are changed in place."""
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(0.01, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), spread=nnx.metrics.Welford("loss"))

    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        out = model(x)
        return ((out - y) ** 2).mean(), out

    @jitted
    def train_step(model: Any, optimizer: Any, metrics: Any, x: Any, y: Any) -> None:
        TRACES.count += 1
        (loss, _), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, x, y)
        metrics.update(loss=loss)
        optimizer.update(model, grads)

    @jitted
    def eval_step(model: Any, metrics: Any, x: Any, y: Any) -> Any:
        TRACES.count += 1
        loss, out = loss_fn(model, x, y)
        metrics.update(loss=loss)
        return out

    history: list[Any] = []
    for _ in range(2):
        for _ in range(3):
            train_step(model, optimizer, metrics, X, Y)
        history.append(metrics.compute())
        metrics.reset()
        model.eval()
        history.append(eval_step(model, metrics, X, Y))
        history.append(metrics.compute())
        metrics.reset()
        model.train()
    return arrays(model), history, optimizer.step[...]


AXES = nnx.StateAxes({(nnx.Param, nnx.RngState): 0, ...: None})


class Stack(nnx.Module):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(AXES, AXES))
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(6, 6, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    @nnx.scan(in_axes=(AXES, nnx.Carry))
    def __call__(self, x: Any) -> Any:
        return nnx.relu(self.drop(self.linear(x))), None


@counted
def stack() -> Any:
    """Layers that are made under `vmap` and run under `scan`, as methods."""
    model = Stack(nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)

    @jitted
    def step(model: Any, optimizer: Any) -> Any:
        TRACES.count += 1
        loss, grads = nnx.value_and_grad(lambda m: ((m(X)[0].sum(1, keepdims=True) - Y) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    return [step(model, optimizer) for _ in range(3)], arrays(model)


@counted
def remade_layers() -> Any:
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs: Any) -> Any:
        return nnx.Linear(6, 6, rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def forward(x: Any, layer: Any) -> Any:
        return jnp.tanh(layer(x))

    @jitted
    def step(layers: Any, x: Any) -> Any:
        TRACES.count += 1
        grads = nnx.grad(lambda layers: (forward(x, layers) ** 2).mean())(layers)
        nnx.update(layers, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(layers, nnx.Param), grads))
        return forward(x, layers)

    layers = make(nnx.Rngs(0))
    return [step(layers, X * i) for i in range(1, 4)], arrays(layers)


@counted
def recurrent() -> Any:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.cell = nnx.LSTMCell(1, 5, rngs=rngs)
            self.rnn = nnx.RNN(nnx.GRUCell(5, 4, rngs=rngs), rngs=rngs)
            self.out = nnx.Linear(4, 1, rngs=rngs)

        def __call__(self, xs: Any) -> Any:
            @nnx.scan(in_axes=(None, nnx.Carry, 1), out_axes=(nnx.Carry, 1))
            def over_time(cell: Any, carry: Any, x: Any) -> Any:
                return cell(carry, x)

            carry = self.cell.initialize_carry((len(xs), 1), nnx.Rngs(0))
            _, hidden = over_time(self.cell, carry, xs)
            return self.out(self.rnn(hidden)[:, -1])

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)

    @jitted
    def step(model: Any, optimizer: Any, xs: Any, y: Any) -> Any:
        TRACES.count += 1
        loss, grads = nnx.value_and_grad(lambda m: ((m(xs) - y) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    return [step(model, optimizer, X[..., None] * i, Y) for i in (1, 2, 3)], arrays(model)


@counted
def lora() -> Any:
    model = nnx.Sequential(
        nnx.LoRALinear(6, 8, lora_rank=2, rngs=nnx.Rngs(0)),
        nnx.relu,
        nnx.LoRALinear(8, 1, lora_rank=2, rngs=nnx.Rngs(1)),
    )
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)

    @jitted
    def step(model: Any, optimizer: Any) -> Any:
        TRACES.count += 1
        by = nnx.DiffState(0, nnx.LoRAParam)
        loss, grads = nnx.value_and_grad(lambda m: ((m(X) - Y) ** 2).mean(), argnums=by)(model)
        optimizer.update(model, grads)
        return loss

    return [step(model, optimizer) for _ in range(3)], arrays(model)


@counted
def autoencoder() -> Any:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.enc, self.dec = nnx.Linear(6, 4, rngs=rngs), nnx.Linear(2, 6, rngs=rngs)
            self.rngs = rngs.fork()

        def __call__(self, x: Any) -> Any:
            mean, spread = jnp.split(self.enc(x), 2, axis=-1)
            self.sow(nnx.Intermediate, "mean", mean)
            return self.dec(mean + jnp.exp(spread) * self.rngs.noise.normal(mean.shape)), mean, spread

    model = Model(nnx.Rngs(0, noise=3))
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)

    @jitted
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        TRACES.count += 1

        def loss(model: Any) -> Any:
            out, mean, spread = model(x)
            prior = (mean**2 + jnp.exp(2 * spread) - 2 * spread).mean()
            return ((out - x) ** 2).mean() + 0.1 * prior, {"prior": prior}

        (value, aux), grads = nnx.value_and_grad(loss, has_aux=True)(model)
        seen = nnx.pop(model, nnx.Intermediate)
        optimizer.update(model, grads)
        return value, aux, nnx.to_pure_dict(seen)

    return [step(model, optimizer, X + i) for i in range(3)], arrays(model)


@counted
def adversaries() -> Any:
    one, two = nnx.Linear(2, 6, rngs=nnx.Rngs(0)), nnx.Linear(6, 1, rngs=nnx.Rngs(1))
    first, second = (nnx.Optimizer(m, optax.rmsprop(r), wrt=nnx.Param) for m, r in ((one, 1e-2), (two, -1e-2)))

    @jitted
    def step(one: Any, two: Any, first: Any, second: Any, rngs: Any) -> Any:
        TRACES.count += 1
        z = rngs.normal((8, 2))
        loss, (to_one, to_two) = nnx.value_and_grad(lambda a, b: (b(a(z)) - b(X)).mean(), argnums=(0, 1))(one, two)
        first.update(one, to_one)
        second.update(two, to_two)
        return loss

    rngs = nnx.Rngs(5)
    return [step(one, two, first, second, rngs) for _ in range(3)], arrays(one, two)


@counted
def experts() -> Any:
    class Mixture(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.gate = nnx.Linear(6, 4, rngs=rngs)
            self.experts = nnx.vmap(lambda rngs: nnx.Linear(6, 1, rngs=rngs))(rngs.fork(split=4))

        def __call__(self, x: Any) -> Any:
            outs = nnx.vmap(lambda expert, x: expert(x), in_axes=(0, None))(self.experts, x)
            return jnp.einsum("ebo,be->bo", outs, jax.nn.softmax(self.gate(x)))

    model = Mixture(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)

    @jitted
    def step(model: Any, optimizer: Any) -> Any:
        TRACES.count += 1
        loss, grads = nnx.value_and_grad(lambda m: ((m(X) - Y) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    return [step(model, optimizer) for _ in range(3)], arrays(model)


@counted
def decoder() -> Any:
    """Attention with a cache that is filled token by token."""
    block = nnx.MultiHeadAttention(2, 6, decode=True, rngs=nnx.Rngs(0))
    block.init_cache((2, 4, 6))

    @jitted
    def token(block: Any, x: Any) -> Any:
        TRACES.count += 1
        return block(x)

    return [token(block, X[None, i : i + 1] * jnp.ones((2, 1, 1))) for i in range(4)], arrays(block)


@counted
def spread_over_devices() -> Any:
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    @nnx.jit
    def make() -> Any:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        model = nnx.Linear(6, 1, kernel_init=init, rngs=nnx.Rngs(0))
        nnx.update(model, jax.lax.with_sharding_constraint(nnx.state(model), nnx.get_partition_spec(nnx.state(model))))
        return model

    with jax.set_mesh(mesh):
        model = make()
        optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))

        @jitted
        def step(model: Any, optimizer: Any, x: Any) -> Any:
            TRACES.count += 1
            loss, grads = nnx.value_and_grad(lambda m: ((m(x) - Y) ** 2).mean())(model)
            optimizer.update(model, grads)
            return loss

        losses = [step(model, optimizer, x) for _ in range(3)]
    return losses, arrays(model), model.kernel.sharding.spec == PartitionSpec(None, "model")


@counted
def teacher() -> Any:
    """A target network that follows, and a branch and loops that change modules."""
    online = nnx.Linear(6, 1, rngs=nnx.Rngs(0))
    target = nnx.clone(online)
    optimizer = nnx.Optimizer(online, optax.sgd(0.1), wrt=nnx.Param)

    def follow(online: Any, target: Any) -> None:
        mixed = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, nnx.state(target), nnx.state(online))
        nnx.update(target, mixed)

    @jitted
    def step(online: Any, target: Any, optimizer: Any, i: Any) -> Any:
        TRACES.count += 1
        loss, grads = nnx.value_and_grad(lambda m: ((m(X) - target(X) - Y) ** 2).mean())(online)
        optimizer.update(online, grads)
        nnx.cond(i % 2 == 0, follow, lambda online, target: None, online, target)

        def shrink(_: Any, m: Any) -> Any:
            m.bias[...] = m.bias[...] * 0.5
            return m

        nnx.fori_loop(0, 2, shrink, target)
        return loss

    return [step(online, target, optimizer, jnp.asarray(i)) for i in range(4)], arrays(online, target)


@counted
def kept_and_restored() -> Any:
    model = Net(nnx.Rngs(0))

    @jitted
    def step(model: Any) -> Any:
        TRACES.count += 1
        grads = nnx.grad(lambda m: ((m(X) - Y) ** 2).mean())(model)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))

    step(model)
    graphdef, state = nnx.split(model)
    pure = nnx.to_pure_dict(state)
    abstract = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    _, wanted = nnx.split(abstract)
    nnx.replace_by_pure_dict(wanted, pure)
    again = nnx.merge(graphdef, wanted)
    step(again)
    step(model)
    return arrays(model, again)


PROGRAMS: dict[str, Any] = {
    "classifier": classifier,
    "stack of layers": stack,
    "rematerialised layers": remade_layers,
    "recurrent": recurrent,
    "LoRA": lora,
    "autoencoder": autoencoder,
    "adversaries": adversaries,
    "experts": experts,
    "decoder": decoder,
    "spread over devices": spread_over_devices,
    "teacher": teacher,
    "kept and restored": kept_and_restored,
}
