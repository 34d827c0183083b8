# SPDX-License-Identifier: Apache-2.0
"""Functions that one process saves and another one loads, in `test_ship.py`."""

import collections.abc
import dataclasses

import jax
import jax.numpy as jnp
import optax

import graftax

LIMIT = 2
rate = [3.0]
offsets = jnp.arange(3.0)


class Model:
    scale = 2.0
    __tags__ = frozenset(("a", "b", "c", "d", "e"))  # its order is another one in each process

    def __init__(self):
        self.w, self.calls = jnp.ones(()), jnp.zeros(())

    def out(self, x):
        return self.w * x * self.scale


def helper(x):
    return x * rate[0] * LIMIT


@graftax.jit
def step(model, x, mode):
    model.calls = model.calls + (0 if isinstance(model, collections.abc.Sized) else 1)
    return {"y": helper(model.out(x)), "mode": mode, "model": model}


@graftax.jit(donate="all")
def donating(state, x):
    state["w"] = state["w"] + x
    return state["w"].sum()


@graftax.jit
def wide(params, x):
    return jax.tree.map(lambda p: p + x, params)


@graftax.jit(mutation="discard")
def by_value(x, key, function):
    return function(x) + jax.random.uniform(key, x.shape)


@graftax.filter_jit
def filtered(model, x):
    return helper(model.out(x)) * offsets.sum()


@jax.jit
def jitted_by_jax(x):
    return helper(x)


@graftax.jit
def calling_jax(x):
    return jitted_by_jax(x)


def scaled_by(k):
    def inner(x):
        return x * k

    return inner


inner = scaled_by(3.0)


@graftax.jit
def with_closure(x):
    return inner(x)


def activation(x):
    return jnp.tanh(x)


class WithFunctions:
    def __init__(self, scale=2.0):
        self.w, self.own, self.library = jnp.ones(3), activation, jax.nn.relu
        self.inner, self.closure, self.module = lambda x: x + 1, lambda x: x * scale, jnp


@graftax.jit
def calling(model, x):
    return model.closure(model.inner(model.own(model.w * x))) + model.library(x) * model.module.pi


class Trainer:
    def __init__(self, step=0):
        self.step, self.base, self.w, self.marks = step, 0.5, jnp.ones(3), 0


@graftax.jit
def counting(trainer, x):
    trainer.step += 1
    rate = trainer.base * 0.99**trainer.step
    if trainer.step % 4 == 0:
        trainer.marks += 1
    trainer.w = trainer.w - rate * x
    return trainer.w.sum()


@dataclasses.dataclass(frozen=True)
class Config:
    name: str = "adam"
    rate: float = 0.1


@graftax.jit
def training(weights, opt, config, x):
    opt.update(weights, {"w": x * config.rate})
    return weights["w"]


class Placeholder:
    """Counts by identity: each process has its own."""

    def __repr__(self):
        return "Placeholder"


@graftax.jit
def with_placeholders(model, x):
    return x * 2 if model["a"] is model["b"] else x * 3


@graftax.jit
def with_a_librarys_sentinel(x, value):
    return x * 2 if value is dataclasses.MISSING else x * 3


UNSET, OTHER = object(), object()


class Modes:
    AUTO = object()


@graftax.jit
def with_sentinels(options, x):
    return x * (2.0 if options["scale"] is UNSET else 3.0) + (0.0 if options["mode"] is Modes.AUTO else 1.0)


def arguments(name, n=3):
    """Of a call."""
    x = jnp.arange(float(n))
    return {
        "step": lambda: (Model(), x, "train"),
        "donating": lambda: ({"w": x + 1}, x),
        "wide": lambda: ({f"p{i}": jnp.ones(n) * i for i in range(40)}, x),
        "with_closure": lambda: (x,),
        "with_sentinels": lambda: ({"scale": UNSET, "mode": Modes.AUTO}, x),
        "calling": lambda: (WithFunctions(), x),
        "training": lambda: (weights := {"w": x + 1}, graftax.optimizer(optax.adam(0.1), weights), Config(), x),
        "counting": lambda: (Trainer(n), jnp.arange(3.0)),
        "filtered": lambda: (Model(), x),
        "calling_jax": lambda: (x,),
        "by_value": lambda: (x, jax.random.key(0), helper),
    }[name]()


def result(name, n=3):
    """What a call gives, as plain lists."""
    args = arguments(name, n)
    out = globals()[name](*args)
    leaves = graftax.flatten([out, args[0] if name in ("step", "donating", "counting") else None])[0]
    return [leaf.tolist() for leaf in leaves]
