# SPDX-License-Identifier: Apache-2.0
"""Flax NNX: programs of its guides, with NNX's transforms and with graftax's as users write them instead."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

if os.environ.get("GRAFTAX_ECOSYSTEM") == "replaced":
    import graftax as lib

    jit, grad, value_and_grad, vmap, cond, remat = (
        lib.jit,
        lib.grad,
        lib.value_and_grad,
        lib.vmap,
        lib.cond,
        lib.checkpoint,
    )

    def scan(f: Any, carry: Any, layers: Any) -> Any:
        return lib.scan(lambda x, layer: (f(x, layer), None), carry, layers)[0]

    PARAMS: dict[str, Any] = {"wrt": nnx.Param}
else:
    jit, grad, value_and_grad, vmap, cond, remat = nnx.jit, nnx.grad, nnx.value_and_grad, nnx.vmap, nnx.cond, nnx.remat
    PARAMS = {}

    def scan(f: Any, carry: Any, layers: Any) -> Any:
        return nnx.scan(f, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(carry, layers)


X = jax.random.normal(jax.random.key(1), (6, 4))
Y = jax.random.normal(jax.random.key(2), (6, 4))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int = 4) -> None:
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.drop(nnx.relu(self.norm(self.linear(x)))) + x


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attend = nnx.MultiHeadAttention(2, 4, rngs=rngs, decode=False)
        self.norm = nnx.LayerNorm(4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.norm(self.attend(x[None])[0] + x)


class Conv(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv, self.out = nnx.Conv(1, 2, (2, 2), rngs=rngs), nnx.Linear(2, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(nnx.avg_pool(self.conv(x[None, :, :, None]), (1, 1))[0].mean(1))


class Lora(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.LoRALinear(4, 4, lora_rank=2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.linear(x)


class Recurrent(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rnn = nnx.RNN(nnx.GRUCell(4, 4, rngs=rngs))

    def __call__(self, x: Any) -> Any:
        return self.rnn(x[None])[0]


MODELS = {"block": Block, "attention": Attention, "conv": Conv, "lora": Lora, "recurrent": Recurrent}
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adam": optax.adam(1e-2),
    "clipped": optax.chain(optax.clip(0.1), optax.adamw(1e-2)),
}


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return ((model(x) - y) ** 2).mean()


def state_of(*objects: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        nnx.to_pure_dict(nnx.state(objects)) if hasattr(nnx, "to_pure_dict") else nnx.state(objects),
    )


def forward(name: str) -> Any:
    model = MODELS[name](nnx.Rngs(0))
    return jit(lambda m, x: m(x))(model, X), state_of(model)


def trained(name: str, optimizer: str = "adam") -> Any:
    model = MODELS[name](nnx.Rngs(0))
    opt = nnx.Optimizer(model, OPTIMIZERS[optimizer], wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

    @jit
    def step(model: Any, opt: Any, metrics: Any, x: Any, y: Any) -> Any:
        value, grads = value_and_grad(loss_of, **PARAMS)(model, x, y)
        opt.update(model, grads)
        metrics.update(loss=value)

    for _ in range(3):
        step(model, opt, metrics, X, Y)
    model.eval()
    return state_of(model, opt), metrics.compute(), jit(loss_of)(model, X, Y)


def ensemble(name: str) -> Any:
    make = vmap(lambda key: MODELS[name](nnx.Rngs(key)))
    models = make(jax.random.split(jax.random.key(0), 3))
    out = jit(vmap(lambda m, x: m(x), in_axes=(0, None)))(models, X)
    return out, state_of(models)


def layers() -> Any:
    models = vmap(lambda key: Block(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))
    out = jit(lambda models, x: scan(lambda x, m: m(x), x, models))(models, X)
    return out, state_of(models)


def state_axes() -> Any:
    models = vmap(lambda key: Block(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))
    models.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0), use_running_average=True)
    axes = nnx.StateAxes({nnx.PathContains("norm"): None, ...: 0})
    return vmap(lambda m, x: m(x), in_axes=(axes, None))(models, X), state_of(models)


def of_lora() -> Any:
    model = Lora(nnx.Rngs(0))
    gradient = grad(loss_of, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, X, Y)
    return nnx.state(gradient) if isinstance(gradient, nnx.Module) else gradient


def branches() -> Any:
    model = Block(nnx.Rngs(0))

    def change(m: Any, x: Any) -> Any:
        return m(x)

    def keep(m: Any, x: Any) -> Any:
        return m(x) * 2

    return jit(lambda m, x: cond(x.sum() > 0, change, keep, m, x))(model, X), state_of(model)


def remade() -> Any:
    model = Block(nnx.Rngs(0))
    model.eval()
    value, gradient = value_and_grad(lambda m: (remat(lambda m, x: m(x))(m, X) ** 2).mean(), **PARAMS)(model)
    return value, nnx.state(gradient, nnx.Param) if isinstance(gradient, nnx.Module) else gradient


def split_and_merged() -> Any:
    block = Block(nnx.Rngs(0))
    block.eval()  # NNX lets nothing be changed across the trace of jax.grad
    graphdef, params, rest = nnx.split(block, nnx.Param, ...)

    @jit
    def step(params: Any, rest: Any) -> Any:
        def loss(params: Any) -> Any:
            model = nnx.merge(graphdef, params, rest)
            return loss_of(model, X, Y), nnx.state(model, nnx.BatchStat)

        (value, stats), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), stats, value

    return step(params, rest)


def counted() -> Any:
    class Count(nnx.Variable):
        pass

    class Counter(nnx.Module):
        def __init__(self) -> None:
            self.count = Count(jnp.asarray(0))

        def __call__(self, x: Any) -> Any:
            self.count[...] += 1
            return x * self.count[...]

    model = Counter()
    step = jit(lambda m, x: m(x))
    return [step(model, 1.0), step(model, 1.0), model.count[...]]


PROGRAMS = {
    **{f"forward {n}": functools.partial(forward, n) for n in MODELS},
    **{f"trained {n}": functools.partial(trained, n) for n in MODELS},
    **{f"trained by {n}": functools.partial(trained, "block", n) for n in OPTIMIZERS},
    **{f"ensemble {n}": functools.partial(ensemble, n) for n in MODELS},
    "layers": layers,
    "state axes": state_axes,
    "lora": of_lora,
    "branches": branches,
    "remat": remade,
    "split and merge": split_and_merged,
    "counter": counted,
}
