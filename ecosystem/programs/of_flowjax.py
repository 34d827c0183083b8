# SPDX-License-Identifier: Apache-2.0
"""Distributions, bijections and flows: densities, samples, training."""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import flowjax.bijections as bij
import flowjax.distributions as dist
import flowjax.flows as flows
import jax
import jax.numpy as jnp
import optax
import paramax
from flowjax.train import fit_to_data

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (5, 2))

DISTRIBUTIONS = {
    "normal": lambda: dist.Normal(jnp.zeros(2), jnp.ones(2) * 2),
    "student": lambda: dist.StudentT(3.0, jnp.zeros(2)),
    "laplace": lambda: dist.Laplace(jnp.ones(2)),
    "gumbel": lambda: dist.Gumbel(jnp.ones(2)),
    "multivariate": lambda: dist.MultivariateNormal(jnp.ones(2), jnp.eye(2) + 0.5),
    "transformed": lambda: dist.Transformed(dist.StandardNormal((2,)), bij.Affine(jnp.ones(2), jnp.full(2, 3.0))),
}
BIJECTIONS = {
    "affine": lambda: bij.Affine(jnp.ones(2), 2 * jnp.ones(2)),
    "triangular": lambda: bij.TriangularAffine(jnp.ones(2), jnp.asarray([[1.0, 0.0], [0.5, 2.0]])),
    "spline": lambda: eqx.filter_vmap(lambda key: bij.RationalQuadraticSpline(knots=4, interval=3))(
        jax.random.split(KEY, 2)
    ),
    "chain": lambda: bij.Chain([bij.Affine(jnp.ones(2)), bij.Flip((2,)), bij.Tanh((2,))]),
    "planar": lambda: bij.Planar(KEY, dim=2),
    "leaky": lambda: bij.LeakyTanh(3.0, (2,)),
}
FLOWS = {
    "coupling": flows.coupling_flow,
    "masked": flows.masked_autoregressive_flow,
    "block": flows.block_neural_autoregressive_flow,
    "planar": flows.planar_flow,
    "triangular": flows.triangular_spline_flow,
}


def flow(name: str, **options: Any) -> Any:
    if name in ("coupling", "masked"):
        options |= {"nn_width": 8}
    if name == "block":
        options |= {"nn_block_dim": 2}
    return FLOWS[name](KEY, base_dist=dist.Normal(jnp.zeros(2)), flow_layers=2, **options)


def densities(name: str) -> Any:
    made = paramax.unwrap(DISTRIBUTIONS[name]())
    return made.log_prob(X), eqx.filter_jit(lambda d, x: d.log_prob(x))(DISTRIBUTIONS[name](), X)


def samples(name: str) -> Any:
    return eqx.filter_jit(lambda d: d.sample(KEY, (4,)))(DISTRIBUTIONS[name]())


def mapped(name: str) -> Any:
    made = BIJECTIONS[name]()
    if name == "spline":
        return eqx.filter_vmap(lambda b, x: b.transform(x))(paramax.unwrap(made), X[0])
    made = paramax.unwrap(made)
    y = eqx.filter_jit(eqx.filter_vmap(made.transform))(X)
    back = () if name in ("planar",) else eqx.filter_vmap(made.inverse)(y)
    return y, back, eqx.filter_vmap(made.transform_and_log_det)(X)


def flow_density(name: str, **options: Any) -> Any:
    return eqx.filter_jit(lambda f, x: f.log_prob(x))(flow(name, **options), X)


def flow_gradient(name: str, **options: Any) -> Any:
    def loss(f: Any) -> Any:
        return -paramax.unwrap(f).log_prob(X).mean()

    value, gradient = eqx.filter_jit(eqx.filter_value_and_grad(loss))(flow(name, **options))
    return value, eqx.filter(gradient, eqx.is_inexact_array)


def inverted(name: str) -> Any:
    return flow(name, invert=False).sample(KEY, (3,))


def trained(name: str) -> Any:
    made, losses = fit_to_data(
        KEY, flow(name), jnp.concatenate([X] * 4), max_epochs=2, show_progress=False, optimizer=optax.adam(1e-2)
    )
    return made.log_prob(X), losses


PROGRAMS = {
    **{f"density {n}": functools.partial(densities, n) for n in DISTRIBUTIONS},
    **{f"sample {n}": functools.partial(samples, n) for n in DISTRIBUTIONS},
    **{f"bijection {n}": functools.partial(mapped, n) for n in BIJECTIONS},
    **{f"flow {n}": functools.partial(flow_density, n) for n in FLOWS},
    **{f"gradient {n}": functools.partial(flow_gradient, n) for n in FLOWS},
    "sample coupling": functools.partial(inverted, "coupling"),
    "trained coupling": functools.partial(trained, "coupling"),
    "trained masked": functools.partial(trained, "masked"),
}
