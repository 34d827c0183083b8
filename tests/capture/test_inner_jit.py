# SPDX-License-Identifier: Apache-2.0
"""A function that JAX jits inside of a traced function, and that reads arrays by name: each caller has its own."""

import gc

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import graftax

X = jnp.ones(2)


class Parameters:
    def __init__(self):
        self.w = jnp.full(2, 3.0)


def programs(kind):
    """Functions of an array, of which all read one dict, and that dict."""
    found = {"w": jnp.full(2, 2.0), "object": Parameters()}

    def base(x):
        return x * found["w"]

    def by_a_helper(x):
        return base(x) + found["object"].w

    one, two = kind(base), kind(by_a_helper)
    return found, {
        "alone": lambda x: one(x),
        "twice": lambda x: one(x) + one(x + 1),
        "by a helper": lambda x: two(x),
        "in a loop": lambda x: jax.lax.scan(lambda c, _: (one(c), None), x, None, length=2)[0],
        "in a loop of ours": lambda x: graftax.scan(lambda c, _: (one(c), None), x, None, length=2)[0],
        "in a gradient": lambda x: jax.grad(lambda x: one(x).sum())(x),
        "in a gradient of ours": lambda x: graftax.grad(lambda x: one(x).sum())(x),
        "kept for the way back": lambda x: jax.checkpoint(one)(x) + two(x),
        "mapped": lambda x: jax.vmap(one)(jnp.stack([x, x]))[1],
    }


@pytest.mark.parametrize("name", programs(jax.jit)[1])
@pytest.mark.parametrize("kind", [jax.jit, eqx.filter_jit, nnx.jit], ids=["jax", "equinox", "nnx"])
def test_several_callers_and_plain_code_share_it(kind, name):
    _, plain = programs(lambda f: f)
    expected = plain[name](X)
    found, made = programs(kind)
    program = made[name]
    first, second = graftax.jit(program), graftax.jit(lambda x: program(x) * 2)
    for _ in range(2):
        assert (first(X) == expected).all()
        assert (second(X) == 2 * expected).all()
    assert (first(jnp.ones((3, 2)))[0] == expected).all() or name == "mapped"
    assert (program(X) == expected).all()
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(found))


@pytest.mark.parametrize("kind", [jax.jit, eqx.filter_jit, nnx.jit], ids=["jax", "equinox", "nnx"])
def test_what_it_reads_is_an_input(kind):
    found, made = programs(kind)
    jitted = graftax.jit(made["by a helper"])
    jitted(X)
    found["w"] = found["w"] * 5
    assert (jitted(X) == 13).all() and jitted.cache_info().traces == 1


def test_what_reads_nothing_shares_jax_caches():
    @jax.jit
    def doubled(x):
        return x * 2

    for factor in (1, 2, 3):
        jitted = graftax.jit(lambda x, factor=factor: doubled(x) * factor)
        assert (jitted(X) == 2 * factor).all() and not jitted._table.reads.has_inner_jit

    _, made = programs(jax.jit)
    jitted = graftax.jit(made["alone"])
    jitted(X)
    assert jitted._table.reads.has_inner_jit


def tracers():
    gc.collect()
    return sum(isinstance(x, jax.core.Tracer) for x in gc.get_objects())


def test_no_trace_leaves_its_tracers_in_the_caches():
    found, made = programs(jax.jit)
    jitted = graftax.jit(lambda x, name: made["twice"](x) + len(name))
    before = tracers()
    for name in ("a", "bb", "ccc"):
        jitted(X, name)
    assert tracers() == before and found["w"][0] == 2
