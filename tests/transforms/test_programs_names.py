# SPDX-License-Identifier: Apache-2.0
"""The transforms are called as JAX's are: by the same names, in the same order, with the same defaults."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import graftax

LAX = ("scan", "while_loop", "fori_loop", "map", "associative_scan", "cond", "switch")
THEIRS: dict[str, Any] = {
    **{
        name: getattr(jax, name)
        for name in (
            *("grad", "value_and_grad", "jacfwd", "jacrev", "hessian", "jvp", "vjp", "linearize", "custom_jvp"),
            *("custom_vjp", "vmap", "shard_map", "checkpoint", "eval_shape", "make_jaxpr", "pure_callback"),
        )
    },
    **{name: getattr(jax.lax, name) for name in LAX},
    "io_callback": jax.experimental.io_callback,
}
# Deprecated, experimental or of the newest versions only: what JAX takes and the transform here does not.
WITHOUT = {
    "scan": {"_split_transpose"},
    "cond": {"operand"},
    "switch": {"operand"},
    "vjp": {"reduce_axes", "saveable_args", "in_nzs"},
    "linearize": {"in_nzs"},
    "vmap": {"sum_match"},
    "checkpoint": {"concrete", "static_argnames"},
    "pure_callback": {"vectorized"},
}
OTHERWISE = {
    ("shard_map", "in_specs"),  # no default in every version
    ("scan", "f"),  # without it, a decorator with options
    ("jvp", "primals"),  # without them, a decorator, as in NNX
    ("jvp", "tangents"),
    ("scan", "init"),  # without it, the carry is the first argument
    ("eval_shape", "fun"),  # by position only, so that `fun` may be the name of an argument
}


@pytest.mark.quick(100)
@pytest.mark.parametrize("name", THEIRS)
def test_a_transform_has_the_arguments_of_jax(name: str):
    theirs, ours = (inspect.signature(f).parameters for f in (THEIRS[name], getattr(graftax, name)))
    shared = [p for p in theirs if p not in WITHOUT.get(name, set())]
    assert [p for p in ours if p in shared] == shared
    for p in shared:
        if p == "fun" and ours[p].default is None:  # without it, a decorator with options
            assert ours[p].kind == theirs[p].kind
        elif (name, p) not in OTHERWISE:
            assert (ours[p].kind, ours[p].default) == (theirs[p].kind, theirs[p].default), p
    added = [p for p in ours if p not in shared]
    assert all(ours[p].kind is inspect.Parameter.KEYWORD_ONLY for p in added)


def test_arguments_without_derivative_are_named():
    def scaled(x: Any, power: int, config: Any) -> Any:
        return x**power * config["scale"]

    for options in ({"nondiff_argnames": ("power", "config")}, {"nondiff_argnums": (1,), "nondiff_argnames": "config"}):
        f = graftax.custom_vjp(scaled, **options)
        f.defvjp(
            lambda x, power, config: (scaled(x, power, config), x),
            lambda power, config, x, g: (g * power * config["scale"] * x * 10,),
        )
        assert graftax.grad(lambda x, f=f: f(x, 2, {"scale": 3.0}))(jnp.asarray(1.0)) == 60
    rule = graftax.custom_jvp(scaled, nondiff_argnames=["power", "config"])
    rule.defjvp(lambda power, config, primals, tangents: (scaled(*primals, power, config), tangents[0] * power))
    assert graftax.grad(lambda x: rule(x, 5, {"scale": 3.0}))(jnp.asarray(1.0)) == 5
    with pytest.raises(ValueError, match="no argument 'powr'; it is given x, power, config"):
        graftax.custom_vjp(scaled, nondiff_argnames="powr")


def test_a_callback_takes_its_shapes_by_name():
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    twice = graftax.jit(lambda x: graftax.pure_callback(lambda x: x * 2, result_shape_dtypes=shape, x=x))
    assert twice(jnp.ones(2)).tolist() == [2, 2]
