# SPDX-License-Identifier: Apache-2.0
"""Every ordered pair of transforms, on object graphs, gives what the same pair of JAX's gives on the arrays by hand."""

from __future__ import annotations

import functools
import itertools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import eval_jaxpr
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import graftax
import zoo
from graftax._capture import numpy_in_place


def is_inexact(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


class Objects:
    """graftax on graphs. `arrays` are the floating arrays of a graph, `like` is a graph with others in their places."""

    @staticmethod
    def arrays(obj):
        return [x for x in graftax.flatten(obj)[0] if is_inexact(x)]

    @staticmethod
    def like(obj, change, change_others=lambda x: x):
        leaves, graphdef = graftax.flatten(obj)
        return graftax.unflatten(graphdef, [change(x) if is_inexact(x) else change_others(x) for x in leaves])

    @staticmethod
    def leaves(obj):
        return graftax.flatten(obj)[0]

    @staticmethod
    def tangent(obj):
        return Objects.like(obj, jnp.ones_like, lambda x: None)


class Lists:
    """JAX on a list of arrays."""

    @staticmethod
    def arrays(obj):
        return jax.tree.leaves(obj)

    @staticmethod
    def like(obj, change, change_others=None):
        return [change(x) for x in obj]

    leaves = arrays

    @staticmethod
    def tangent(obj):
        return [jnp.ones_like(x) for x in obj]


def total(kind, obj):
    return sum((x.sum() for x in kind.arrays(obj)), jnp.zeros(()))


def sum_of(kind, value, gradient):
    return value + total(kind, gradient)


def pair(kind, obj):
    """A graph with an axis more in each array: the object, and twice the object."""
    return kind.like(obj, lambda x: jnp.stack([x, 2 * x]), lambda x: jnp.stack([x, x]) if hasattr(x, "shape") else x)


def with_rule(kind, t, f):
    g = t.custom_jvp(lambda obj: f(obj))
    g.defjvp(lambda primals, tangents: t.jvp(f, primals, tangents))
    return g


def with_pull_back(kind, t, f):
    g = t.custom_vjp(lambda obj: f(obj))
    g.defvjp(lambda obj: (f(obj), obj), lambda residuals, c: t.vjp(f, residuals)[1](c))
    return g


# Each makes of a function of an object to a number another one.
TRANSFORMS = {
    "jit": lambda kind, t, f: t.jit(f),
    "grad": lambda kind, t, f: lambda obj: total(kind, t.grad(f)(obj)),
    "value_and_grad": lambda kind, t, f: lambda obj: sum_of(kind, *t.value_and_grad(f)(obj)),
    "jacfwd": lambda kind, t, f: lambda obj: total(kind, t.jacfwd(f)(obj)),
    "jacrev": lambda kind, t, f: lambda obj: total(kind, t.jacrev(f)(obj)),
    "hessian": lambda kind, t, f: lambda obj: total(kind, t.hessian(f)(obj)),
    "jvp": lambda kind, t, f: lambda obj: t.jvp(f, (obj,), (kind.tangent(obj),))[1],
    "linearize": lambda kind, t, f: lambda obj: t.linearize(f, obj)[1](kind.tangent(obj)),
    "vjp": lambda kind, t, f: lambda obj: total(kind, t.vjp(f, obj)[1](jnp.ones(()))[0]),
    "vmap": lambda kind, t, f: lambda obj: t.vmap(f)(pair(kind, obj)).sum(),
    "checkpoint": lambda kind, t, f: t.checkpoint(f),
    "scan": lambda kind, t, f: lambda obj: t.scan(lambda c, _: (c + f(obj), None), jnp.zeros(()), length=2)[0],
    "fori_loop": lambda kind, t, f: lambda obj: t.fori_loop(0, 2, lambda i, c: c + f(obj), jnp.zeros(())),
    "while_loop": lambda kind, t, f: (
        lambda obj: t.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + f(obj)), (jnp.asarray(0), jnp.zeros(()))
        )[1]
    ),
    "cond": lambda kind, t, f: (
        lambda obj: t.cond(total(kind, obj) > -1e6, lambda obj: f(obj), lambda obj: 2 * f(obj), obj)
    ),
    "switch": lambda kind, t, f: lambda obj: t.switch(jnp.asarray(1), [lambda o: jnp.zeros(()), lambda o: f(o)], obj),
    "map": lambda kind, t, f: lambda obj: t.map(f, pair(kind, obj)).sum(),
    "custom_jvp": with_rule,
    "custom_vjp": with_pull_back,
}
PAIRS = list(itertools.product(TRANSFORMS, TRANSFORMS))


def shard_mapped(kind, t, f):
    return t.jit(t.shard_map(f, mesh=MESH, in_specs=P(), out_specs=P()))


def through_host(kind, t, f):
    """The host is given the number and the object, and returns twice the number."""

    def run(obj):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return t.pure_callback(doubled, shape, f(obj), obj, vmap_method="sequential")

    return run


def doubled(x, obj):
    assert all(isinstance(leaf, np.ndarray | jax.Array) for leaf in graftax.flatten(obj)[0])
    return np.asarray(2 * x, np.float32)


def summed(kind, t, f):
    def combine(a, b):
        return {"sum": a["sum"] + b["sum"] + 0 * total(kind, a["of"]), "of": b["of"]}

    def run(obj):
        values = {
            "sum": jnp.stack([f(obj), jnp.ones(()), jnp.ones(())]),
            "of": kind.like(obj, three, lambda x: three(x) if hasattr(x, "shape") else x),
        }
        return t.associative_scan(combine, values)["sum"][-1]

    return run


def three(x):
    return jnp.stack([x] * 3)


def shaped(kind, t, f):
    return lambda obj: total(kind, obj) + jnp.zeros(t.eval_shape(f, obj).shape)


def evaluated(kind, t, f):
    def run(obj):
        closed = t.make_jaxpr(f)(obj)
        return eval_jaxpr(closed.jaxpr, closed.consts, *kind.leaves(obj))[0]

    return run


MESH = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))
MORE = {
    "shard_map": shard_mapped,
    "pure_callback": through_host,
    "associative_scan": summed,
    "eval_shape": shaped,
    "make_jaxpr": evaluated,
}
OFTEN = ("jit", "grad", "jvp", "vmap", "checkpoint", "scan", "cond", "custom_jvp", "custom_vjp")
PAIRS_WITH_MORE = [pair for pair in itertools.product((*OFTEN, *MORE), repeat=2) if not MORE.keys().isdisjoint(pair)]
TRANSFORMS |= MORE
JAX = SimpleNamespace(**{n: getattr(jax, n) for n in TRANSFORMS if hasattr(jax, n)})
for name in ("scan", "fori_loop", "while_loop", "cond", "switch", "map", "associative_scan"):
    setattr(JAX, name, getattr(jax.lax, name))


def measure(kind, obj):
    return sum(((0.1 * (i + 1)) * (jnp.sin(x) ** 2).sum() for i, x in enumerate(kind.arrays(obj))), jnp.zeros(()))


def composed(kind, library, outer, inner):
    f = functools.partial(measure, kind)
    return TRANSFORMS[outer](kind, library, TRANSFORMS[inner](kind, library, lambda obj: f(obj)))


REASON = re.compile("callbacks do not support JVP")


def outcome(f, *args):
    try:
        return f(*args), None
    except Exception as error:
        return None, error


def check(build, outer, inner):
    obj = build()
    expected, refused = outcome(composed(Lists, JAX, outer, inner), Objects.arrays(obj))
    actual, error = outcome(composed(Objects, graftax, outer, inner), obj)
    if refused is not None:
        assert type(error) is type(refused), (error, refused)
        assert REASON.search(str(refused)) is None or REASON.search(str(error)), (error, refused)
        return
    if error is not None:
        raise error
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


class Node:
    def __init__(self, value):
        self.value = jnp.asarray(value)
        self.neighbours, self.name, self.count = [], "node", jnp.asarray(1)


def web():
    """Nodes that refer to each other, one of them in three places; statics, a tuple, a counter."""
    a, b = Node([0.1, 0.2]), Node([[0.3], [0.4]])
    a.neighbours, b.neighbours = [b, a], [a]
    a.pair = (b, jnp.asarray(0.5), "text", None)
    return {"a": a, "again": [a], "mode": "train"}


@pytest.mark.parametrize(("outer", "inner"), PAIRS + PAIRS_WITH_MORE)
@pytest.mark.quick(1)
def test_a_pair_of_transforms_on_a_cyclic_graph(outer, inner):
    check(web, outer, inner)


# Every graph of the zoo meets some of the pairs, and every pair some of the graphs.
WITH_ARRAYS = [(n, b) for n, b in zoo.ZOO if any(is_inexact(x) and x.ndim < 3 for x in graftax.flatten(b())[0])]
SOME = [(name, *PAIRS[(7 * i + 89 * k) % len(PAIRS)]) for i, (name, _) in enumerate(WITH_ARRAYS) for k in range(4)]


@pytest.mark.parametrize(("name", "outer", "inner"), SOME)
@pytest.mark.quick(3)
def test_a_pair_of_transforms_on_the_zoo(name, outer, inner):
    check(dict(WITH_ARRAYS)[name], outer, inner)


def test_what_vmap_has_computed_is_an_argument_of_a_gradient_inside_of_jit():
    """In a process that has seen no such tracer before: the class that watches it is new, too."""
    numpy_in_place._class_of.cache_clear()

    def loss(model, x):
        return ((model["w"] * x) ** 2).sum()

    def adapted(model, x):
        return loss({"w": model["w"] - 0.1 * graftax.grad(loss)(model, x * 2)["w"]}, x)

    model, xs = {"w": jnp.arange(1.0, 3.0)}, jnp.arange(6.0).reshape(3, 2)
    actual = graftax.jit(lambda model, xs: graftax.vmap(lambda x: adapted(model, x))(xs))(model, xs)
    np.testing.assert_allclose(actual, [adapted(model, x) for x in xs], rtol=1e-6)
