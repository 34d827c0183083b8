# SPDX-License-Identifier: Apache-2.0
"""Classes that libraries make, or that are registered with JAX."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import chex
import equinox as eqx
import flax.linen
import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from values.classes import assign, assign_box, both, boxed, with_box
from values.record import IMMUTABLE, NO_ARRAYS, VALUE, Kind

import graftax

# ── JAX's own registry ──


@jax.tree_util.register_pytree_node_class
class Registered:
    def __init__(self, w, n):
        self.w, self.n = w, n

    def tree_flatten(self):
        return (self.w,), self.n

    @classmethod
    def tree_unflatten(cls, n, children):
        return cls(*children, n)


@jax.tree_util.register_pytree_with_keys_class
class RegisteredWithKeys(Registered):
    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("w"), self.w),), self.n


@jax.tree_util.register_pytree_node_class
class RegisteredByDict(Registered):
    """What is static comes in a dict, made afresh by each flatten."""

    def tree_flatten(self):
        return (self.w,), {"n": self.n, "names": ["n"]}

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children, aux["n"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class RegisteredData:
    w: Any
    n: Any = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RegisteredFrozen:
    w: Any
    n: Any = dataclasses.field(metadata={"static": True})
    box: Any


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class RegisteredStatic:
    n: Any


@graftax.register_static
@dataclasses.dataclass(frozen=True)
class OwnStatic:
    n: Any


# ── libraries ──


@flax.struct.dataclass
class Struct:
    w: Any
    n: Any = flax.struct.field(pytree_node=False)
    box: Any


@chex.dataclass(mappable_dataclass=False)
class Chex:
    w: Any
    n: Any


@chex.dataclass
class ChexMappable:
    w: Any
    n: Any


@chex.dataclass(frozen=True)
class ChexFrozen:
    w: Any
    n: Any
    box: Any


class Module(eqx.Module):
    w: Any
    n: Any
    box: Any


class StaticModule(eqx.Module):
    w: Any
    n: Any = eqx.field(static=True)
    box: Any

    def __call__(self):
        return self.w, self.n


class Net(nnx.Module):
    def __init__(self, w, n):
        self.w, self.n = nnx.Param(w), n


class Stats(nnx.Module):
    """Two kinds of variables, and one of them in two places."""

    def __init__(self, w, n):
        self.mean = nnx.BatchStat(w)
        self.layers = nnx.List([Net(w, n)])
        self.tied = self.layers[0].w


def change_stats(v, w, n):
    v.mean[...] = w
    v.tied[...] = w
    v.layers[0].n = n


DENSE = {n: flax.linen.Dense(n) for n in (2, 3)}


def apply_dense(v):
    x = jnp.ones((1, 2))
    return v.features, v.apply(v.init(jax.random.key(0), x), x)


def adam(w, n):
    return optax.adam(w, b1=n)


def use_adam(v):
    gradients = {"w": jnp.asarray([0.5, -1.0])}
    updates, state = v.update(gradients, v.init(gradients))
    return updates["w"], state[0].mu["w"]


def adam_state(w, n):
    return optax.ScaleByAdamState(count=jnp.asarray(3), mu={"w": w}, nu={"w": w, "n": n}), optax.EmptyState()


def change_state(v, w, n):
    v[0].mu["w"] = w
    v[0].nu["n"] = n


def flarejax_kinds():
    """FlareJax is there for comparison; nothing else here needs it."""
    if importlib.util.find_spec("flarejax") is None:
        return []
    import flarejax as flr

    class Flare(flr.Module):
        def __init__(self, w, n):
            self.w, self.n = w, n

    class FlareGraph(flr.Module):
        """One module in two places, and a child that knows its parent."""

        def __init__(self, w, n):
            self.layers = [Flare(w, n)]
            self.tied = self.layers[0]
            self.tied.parent = self

    def read(v):
        return v.layers[0].w, v.tied.n, v.tied is v.layers[0], v.tied.parent is v

    return [
        Kind("`flarejax.Module`", Flare, both, assign),
        Kind(
            "`flarejax.Module`, shared and cyclic",
            FlareGraph,
            read,
            lambda v, w, n: assign(v.layers[0], w, n),
        ),
    ]


def keywords(cls):
    return lambda w, n: cls(w=w, n=n)


HOLDS = "Immutable, but the list inside can be changed."
fixed = {"traced": NO_ARRAYS, "in place": IMMUTABLE}

REGISTERED = [
    Kind(
        "`register_pytree_node_class`",
        Registered,
        both,
        assign,
        note="Through its own flatten and unflatten.",
    ),
    Kind("`register_pytree_with_keys_class`", RegisteredWithKeys, both, assign),
    Kind("`register_pytree_node_class`, static part in a dict", RegisteredByDict, both, assign),
    Kind("`register_dataclass`", RegisteredData, both, assign),
    Kind("`register_dataclass`, frozen", boxed(RegisteredFrozen), with_box, assign_box, identity=VALUE, note=HOLDS),
    *(
        Kind(
            name,
            lambda w, n, cls=cls: cls(n),
            lambda v: (v, v.n),
            statics=(1, 2, "a"),
            identity=VALUE,
            without={"traced": NO_ARRAYS, "in place": "not seen"},
            note="Compared with its own `==`.",
        )
        for name, cls in {
            "`jax.tree_util.register_static`": RegisteredStatic,
            "`graftax.register_static`": OwnStatic,
        }.items()
    ),
]

LIBRARIES = [
    Kind("`flax.struct.dataclass`", boxed(Struct), with_box, assign_box, identity=VALUE, note=HOLDS),
    Kind("`chex.dataclass`", keywords(Chex), both, assign),
    Kind("`chex.dataclass`, mappable", keywords(ChexMappable), lambda v: (*both(v), *v), assign),
    Kind(
        "`chex.dataclass`, frozen",
        lambda w, n: ChexFrozen(w=w, n=n, box=[w, n]),
        with_box,
        assign_box,
        identity=VALUE,
        note=HOLDS,
    ),
    Kind("`equinox.Module`", boxed(Module), with_box, assign_box, identity=VALUE, note=HOLDS),
    Kind(
        "`equinox.Module` with a static field",
        boxed(StaticModule),
        lambda v: (*v(), *v.box),
        assign_box,
        identity=VALUE,
        note=HOLDS,
    ),
    Kind(
        "`flax.nnx.Module`",
        Net,
        lambda v: (v.w[...], v.n, type(v.w).__name__),
        lambda v, w, n: (v.w.__setitem__(..., w), setattr(v, "n", n))[1],
    ),
    Kind(
        "`flax.nnx.Module` with a tied parameter",
        Stats,
        lambda v: (v.mean[...], v.tied[...], v.layers[0].n, v.tied is v.layers[0].w),
        change_stats,
    ),
    *flarejax_kinds(),
    Kind(
        "`flax.linen` module",
        lambda w, n: DENSE[n],
        apply_dense,
        statics=(2, 3),
        identity=VALUE,
        without=fixed,
        note="Instances are numbered, so a freshly built module is traced again.",
    ),
    Kind(
        "fresh `optax.adam(...)`", adam, use_adam, statics=(0.9, 0.8), identity=VALUE, without={"in place": IMMUTABLE}
    ),
    Kind(
        "state of an optax optimizer",
        adam_state,
        lambda v: (v[0].count, v[0].mu["w"], *v[0].nu.values()),
        change_state,
        identity=VALUE,
    ),
]
