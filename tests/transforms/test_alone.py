# SPDX-License-Identifier: Apache-2.0
"""Functions among arguments and results of `filter_*` are left alone, with what they capture, as in Equinox."""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftax

LIBRARIES = pytest.mark.parametrize("library", [graftax, eqx], ids=["graftax", "equinox"])
K = jnp.asarray([2.0, 3.0])
X = jnp.asarray([0.5, -1.0])


def closing_over(scale: Any) -> Any:
    return lambda x: scale * x


class Scaled:
    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def twice(self, x: Any) -> Any:
        return 2 * self.scale * x


FUNCTIONS = {
    "a closure": lambda: closing_over(K),
    "a default": lambda: lambda x, scale=K: scale * x,
    "a partial": lambda: functools.partial(jnp.multiply, K),
    "a method": lambda: Scaled(K).twice,
    "a wrapped one": lambda: functools.wraps(jnp.sin)(closing_over(K)),
    "a method of an array": lambda: K.__mul__,
}
EACH = pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS)


def net(function: Any) -> eqx.nn.Sequential:
    return eqx.nn.Sequential([eqx.nn.Linear(2, 2, key=jax.random.key(0)), eqx.nn.Lambda(function)])


@LIBRARIES
@EACH
def test_a_model_that_holds_one_is_trained(library: Any, make: Any):
    model = net(make())
    optimiser = optax.adam(0.1)
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))

    @library.filter_jit
    def step(model: Any, state: Any) -> Any:
        updates, state = optimiser.update(library.filter_grad(lambda m: (m(X) ** 2).sum())(model), state)
        return eqx.apply_updates(model, updates), state

    before = (model(X) ** 2).sum()
    for _ in range(2):
        model, state = step(model, state)
    assert (model(X) ** 2).sum() < before
    np.testing.assert_allclose(model.layers[1](X), make()(X))


@pytest.mark.quick(0)
@LIBRARIES
@EACH
def test_derivatives_have_none_in_their_place(library: Any, make: Any):
    model = net(make())
    wanted = jax.tree.structure(eqx.filter(model, eqx.is_inexact_array))

    def loss(m: Any) -> Any:
        return m(X).sum()

    derivatives = [
        library.filter_grad(loss)(model),
        library.filter_value_and_grad(loss)(model)[1],
        library.filter_vjp(loss, model)[1](jnp.ones(()))[0],
        library.filter_jacfwd(loss)(model),
        library.filter_jacrev(loss)(model),
    ]
    for derivative in derivatives:
        assert jax.tree.structure(derivative) == wanted
        np.testing.assert_allclose(derivative.layers[0].bias, make()(jnp.ones(2)), rtol=1e-6)


def test_what_else_holds_the_array_has_its_derivative():
    row = [K]
    gradient = graftax.filter_grad(lambda d: (d["f"](X) * d["row"][0]).sum())({"f": lambda x: row[0] * x, "row": row})
    np.testing.assert_allclose(gradient["row"][0], 2 * K * X)  # it is one list
    assert graftax.filter_grad(lambda f: f(X).sum())(closing_over(K)) is None
    of_all = graftax.grad(lambda f: f(X).sum())(closing_over(K))
    np.testing.assert_allclose(of_all.__closure__[0].cell_contents, X)


@LIBRARIES
@EACH
def test_a_map_returns_one_as_it_is(library: Any, make: Any):
    function = make()
    rows = jnp.stack([X, 2 * X, 3 * X])
    returned, out = library.filter_vmap(lambda f, x: (f, f(x)), in_axes=(None, 0))(function, rows)
    np.testing.assert_allclose(out, jax.vmap(function)(rows))
    np.testing.assert_allclose(returned(X), function(X))
    models = library.filter_vmap(lambda x: eqx.nn.Lambda(function), axis_size=3)(rows)
    np.testing.assert_allclose(models(X), function(X))


@LIBRARIES
@EACH
def test_rules_are_given_none_for_one(library: Any, make: Any):
    function = make()
    received: list[Any] = []

    @library.filter_custom_jvp
    def call(f: Any, x: Any) -> Any:
        return f(x)

    def rule(primals: Any, tangents: Any) -> Any:
        received.append(tangents[0])
        return call(*primals), 10 * tangents[1]

    call.def_jvp(rule)
    np.testing.assert_allclose(jax.jvp(lambda x: call(function, x), (X,), (X,))[1], 10 * X)
    assert received == [None]

    @library.filter_custom_vjp
    def applied(parts: Any, n: Any) -> Any:
        return parts[0](parts[1]), parts[0]

    def forward(perturbed: Any, parts: Any, n: Any) -> Any:
        received.append(perturbed)
        return applied(parts, n), parts[0]

    def backward(residuals: Any, grad: Any, perturbed: Any, parts: Any, n: Any) -> Any:
        received.append((grad[1], residuals(X)))
        return None, 7 * grad[0]

    applied.def_fwd(forward)
    applied.def_bwd(backward)
    np.testing.assert_allclose(applied((function, X), 1)[1](X), function(X))
    np.testing.assert_allclose(jax.grad(lambda x: applied((function, x), 1)[0].sum())(X), [7, 7])
    assert received[1] == (False, True) and received[2][0] is None
    np.testing.assert_allclose(received[2][1], function(X))


def test_a_rule_is_not_asked_for_what_a_function_captures():
    @graftax.filter_custom_jvp
    def call(f: Any, x: Any) -> Any:
        return f(x)

    call.def_jvp(lambda primals, tangents: (call(*primals), 10 * tangents[1]))
    with pytest.raises((TypeError, RuntimeError), match="differentiated with respect to"):
        jax.grad(lambda scale: call(closing_over(scale), X).sum())(K)
