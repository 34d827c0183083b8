# SPDX-License-Identifier: Apache-2.0
"""What a type checker knows of derivatives other than gradients, of rules for them, and of Equinox's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_type

import jax
import jax.extend
import jax.numpy as jnp

import graftax


class Model:
    def __init__(self) -> None:
        self.w = jnp.ones(3)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.w * x


def loss(model: Model, x: jax.Array, scale: float = 1.0) -> jax.Array:
    return (model(x) * scale).sum()


def loss_and_more(model: Model, x: jax.Array) -> tuple[jax.Array, dict[str, int]]:
    return model(x).sum(), {"n": 1}


def moved(model: Model, x: jax.Array) -> Model:
    return model


def power(x: jax.Array, n: int) -> jax.Array:
    return x**n


@graftax.jacfwd(argnums=1)
def by_x(model: Model, x: jax.Array) -> jax.Array:
    return model(x)


def jacobians(model: Model, x: jax.Array) -> None:
    assert_type(graftax.jacfwd(loss)(model, x), Model)
    assert_type(graftax.jacrev(loss)(model, x, scale=2.0), Model)
    assert_type(graftax.jacrev(loss_and_more, has_aux=True)(model, x), tuple[Model, dict[str, int]])
    assert_type(graftax.jacfwd(power)(x, 2), jax.Array)
    assert_type(graftax.hessian(power)(x, 2), jax.Array)
    assert_type(graftax.hessian(loss)(model, x), Any)
    assert_type(graftax.jacfwd(moved)(model, x), Any)
    assert_type(graftax.jacrev(loss, wrt="model.w")(model, x), Any)
    assert_type(by_x(model, x), Any)
    assert_type(graftax.filter_jacfwd(loss)(model, x), Model)
    assert_type(graftax.filter_jacrev(loss)(model, x), Model)
    assert_type(graftax.filter_hessian(power)(x, 2), jax.Array)


def forward(model: Model, x: jax.Array) -> None:
    value, rate = graftax.jvp(moved, (model, x), (model, None))
    assert_type(value, Model)
    assert_type(rate, Model)
    assert_type(graftax.jvp(loss_and_more, (model, x), (model, x), has_aux=True)[2], dict[str, int])
    assert_type(graftax.jvp(power, list[Any]([x, 2]), [x, None])[1], jax.Array)
    out, push = graftax.linearize(moved, model, x)
    assert_type(out, Model)
    assert_type(push(model, None), Model)
    assert_type(graftax.linearize(loss_and_more, model, x, has_aux=True)[2], dict[str, int])
    assert_type(graftax.filter_jvp(power, (x, 2), (x, None))[0], jax.Array)


def reverse(model: Model, x: jax.Array) -> None:
    value, pull = graftax.vjp(moved, model, x)
    assert_type(value, Model)
    assert_type(pull(model), tuple[Model, jax.Array])
    assert_type(graftax.vjp(loss, model, x)[1](x), tuple[Model, jax.Array])
    assert_type(graftax.vjp(lambda m: m.w, model)[0], jax.Array)
    number, pull, aux = graftax.vjp(loss_and_more, model, x, has_aux=True)
    assert_type(pull(number), tuple[Model, jax.Array])
    assert_type(aux, dict[str, int])
    assert_type(graftax.filter_vjp(moved, model, x)[1](model), tuple[Model, jax.Array])


@graftax.custom_jvp
def norm(model: Model, scale: float) -> jax.Array:
    return model.w.sum() * scale


@norm.defjvp
def norm_rule(primals: tuple[Model, float], tangents: tuple[Model, float]) -> tuple[jax.Array, jax.Array]:
    return norm(*primals), tangents[0].w.sum()


@graftax.custom_vjp(nondiff_argnames="n")
def clipped(x: jax.Array, n: int) -> jax.Array:
    return x


@graftax.filter_custom_vjp
def scaled(x: jax.Array, n: int) -> jax.Array:
    return x


@scaled.def_fwd
def scaled_fwd(perturbed: Any, x: jax.Array, n: int) -> tuple[jax.Array, None]:
    return x, None


class WithRule:
    @graftax.custom_jvp
    def size(self, x: jax.Array) -> str:
        return str(x)


def rules(model: Model, x: jax.Array) -> None:
    assert_type(norm(model, 2.0), jax.Array)
    assert_type(norm_rule((model, 2.0), (model, 1.0)), tuple[jax.Array, jax.Array])
    assert_type(clipped(x, n=2), jax.Array)
    assert_type(graftax.grad(norm)(model, 2.0), Model)
    assert_type(scaled(x, 3), jax.Array)
    assert_type(scaled_fwd(None, x, 3), tuple[jax.Array, None])
    assert_type(WithRule().size(x), str)


@graftax.filter_value_and_grad(has_aux=True)
def by_value(model: Model) -> tuple[jax.Array, str]:
    return model.w.sum(), "w"


@graftax.filter_vmap(in_axes=(None, 0))
def rows(model: Model, x: jax.Array) -> dict[str, jax.Array]:
    return {"y": model(x)}


@graftax.value_and_grad(has_aux=True)
def both(model: Model, x: jax.Array) -> tuple[jax.Array, str]:
    return model(x).sum(), "w"


@graftax.shard_map(out_specs=jax.sharding.PartitionSpec("data"))
def sharded(model: Model, x: jax.Array) -> dict[str, jax.Array]:
    return {"y": model(x)}


def of_equinox(model: Model, x: jax.Array) -> None:
    assert_type(graftax.filter_grad(loss)(model, x), Model)
    assert_type(graftax.filter_grad(loss_and_more, has_aux=True)(model, x), tuple[Model, dict[str, int]])
    assert_type(graftax.filter_value_and_grad(loss)(model, x), tuple[jax.Array, Model])
    assert_type(by_value(model), tuple[tuple[jax.Array, str], Model])
    assert_type(both(model, x), tuple[tuple[jax.Array, str], Model])
    assert_type(rows(model, x), dict[str, jax.Array])
    assert_type(graftax.filter_vmap(loss)(model, x), jax.Array)
    assert_type(graftax.filter_checkpoint(loss)(model, x), jax.Array)
    assert_type(graftax.filter_closure_convert(loss, model, x)(model, x), jax.Array)
    assert_type(graftax.filter_shard(model, None), Model)


def others(model: Model, x: jax.Array, f: Callable[..., Any]) -> None:
    assert_type(graftax.map(model, x), jax.Array)
    assert_type(graftax.map(f, x), Any)
    assert_type(graftax.associative_scan(lambda a, b: a + b, x), jax.Array)
    assert_type(sharded(model, x), dict[str, jax.Array])
    assert_type(graftax.make_jaxpr(loss)(model, x), jax.extend.core.ClosedJaxpr)  # pyright: ignore[reportPrivateImportUsage]
    assert_type(graftax.eval_shape(loss, model, x), Any)


def wrong(model: Model, x: jax.Array) -> None:
    graftax.jacfwd(loss)(x, x)  # expect: "Array" is not assignable to "Model"
    norm(model)  # expect: Argument missing for parameter "scale"
    clipped(x, 2, 3)  # expect: Expected 2 positional arguments
    graftax.vjp(loss, x, x)  # expect: cannot be assigned to parameter "primals"
    graftax.filter_grad(loss)(x, x)  # expect: "Array" is not assignable to "Model"
    graftax.associative_scan(power, x)  # expect: cannot be assigned to parameter "fn"
    rows(model)  # expect: Argument missing for parameter "x"
