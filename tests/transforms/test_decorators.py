# SPDX-License-Identifier: Apache-2.0
"""Transforms as decorators with options, as users of NNX and Equinox write them."""

from __future__ import annotations

import copy
from typing import Any

import jax.numpy as jnp
import pytest

import graftax

X = jnp.arange(6.0).reshape(2, 3)


def test_with_options_each_is_a_decorator():
    @graftax.vmap(in_axes=1, out_axes=1)
    def columns(x: Any) -> Any:
        return x / x.sum()

    @graftax.grad(argnums=1)
    def by_second(a: Any, b: Any) -> Any:
        return (a * b**2).sum()

    @graftax.value_and_grad(wrt="b")
    def product(a: Any, b: Any) -> Any:
        return (a * b).sum()

    @graftax.checkpoint(prevent_cse=False)
    def sine(x: Any) -> Any:
        return jnp.sin(x)

    @graftax.jacrev(argnums=0)
    def slopes(x: Any) -> Any:
        return x**2

    assert columns(X).sum(0).tolist() == [1, 1, 1]
    assert by_second(1.0, 3.0) == 6 and product(2.0, 3.0)[1] == 2
    assert graftax.grad(lambda x: sine(x))(0.0) == 1 and slopes(2.0) == 4
    assert columns.__name__ == "columns"


def test_derivatives_at_a_point_are_decorators_without_a_function():
    @graftax.vjp(has_aux=True)
    def pulled(state: Any, x: Any) -> Any:
        state["calls"] += 1
        return (state["w"] * x).sum(), "aux"

    @graftax.jvp()
    def pushed(x: Any) -> Any:
        return x**2

    state: Any = {"w": jnp.ones(2), "calls": 0}
    value, pull, aux = pulled(state, jnp.ones(2))
    assert value == 2 and aux == "aux" and state["calls"] == 1
    assert pull(1.0)[1].tolist() == [1, 1]
    assert pushed((3.0,), (1.0,)) == (9, 6)
    with pytest.raises(TypeError, match=r"primals is a NoneType. Both are tuples"):
        graftax.jvp(lambda x: x)


@pytest.mark.parametrize("rule", [graftax.custom_jvp, graftax.custom_vjp])
def test_a_rule_says_what_is_not_differentiated(rule: Any):
    @rule(nondiff_argnums=(0,))
    def power(n: int, x: Any) -> Any:
        return x**n

    if rule is graftax.custom_jvp:
        power.defjvp(lambda n, primals, rates: (primals[0] ** n, 10 * rates[0]))
    else:
        power.defvjp(lambda n, x: (x**n, None), lambda n, residuals, g: (10 * g,))
    assert graftax.grad(lambda x: power(3, x))(2.0) == 10
    assert power(3, 2.0) == 8


def test_no_callable_is_an_error_as_before():
    for transform in (graftax.vmap, graftax.grad, graftax.custom_jvp):
        with pytest.raises(TypeError, match="callable"):
            transform(None)


@graftax.custom_jvp
def ruled(x: Any) -> Any:
    return x


def test_a_rule_is_copied_as_before():
    assert isinstance(copy.copy(ruled), graftax.custom_jvp)
