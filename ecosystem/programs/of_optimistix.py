# SPDX-License-Identifier: Apache-2.0
"""Minimisers, least squares, root finders and fixed points, run and stepped by hand."""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import optimistix as optx

Y0 = {"a": jnp.asarray(1.5), "b": jnp.asarray([2.0, -1.0])}
TARGET = jnp.asarray(2.0)
TOL = {"rtol": 1e-4, "atol": 1e-4}


def residual(y: Any, target: Any) -> Any:
    return y["a"] - target, 2 * (y["b"] - y["a"]), 0.1 * jnp.sin(y["b"])


def loss(y: Any, target: Any) -> Any:
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(residual(y, target)))


def root(y: Any, target: Any) -> Any:
    return {"a": y["a"] ** 3 - target, "b": y["b"] - y["a"] + 0.1 * jnp.sin(y["b"])}


def contraction(y: Any, target: Any) -> Any:
    return {"a": 0.5 * jnp.cos(y["a"]) + 0.1 * target, "b": 0.3 * jnp.sin(y["b"]) + y["a"]}


MINIMISERS = {
    "bfgs": optx.BFGS(**TOL),
    "lbfgs": optx.LBFGS(**TOL),
    "dfp": optx.DFP(**TOL),
    "nonlinear_cg": optx.NonlinearCG(**TOL),
    "gradient_descent": optx.GradientDescent(0.05, **TOL),
    "nelder_mead": optx.NelderMead(**TOL),
    "adam": optx.OptaxMinimiser(optax.adam(0.1), **TOL),
    "best_so_far": optx.BestSoFarMinimiser(optx.OptaxMinimiser(optax.sgd(0.05), **TOL)),
}
LEAST_SQUARES = {
    "gauss_newton": optx.GaussNewton(**TOL),
    "levenberg_marquardt": optx.LevenbergMarquardt(**TOL),
    "indirect_lm": optx.IndirectLevenbergMarquardt(**TOL),
    "dogleg": optx.Dogleg(**TOL),
}
ROOTS = {"newton": optx.Newton(**TOL), "chord": optx.Chord(**TOL)}


def run(solve: Any, function: Any, solver: Any) -> Any:
    found = solve(function, solver, Y0, args=TARGET, throw=False, max_steps=400)
    return found.value, found.stats["num_steps"], found.result._value


def under_jit(solve: Any, function: Any, solver: Any) -> Any:
    go = eqx.filter_jit(
        lambda solver, y0, args: solve(function, solver, y0, args=args, throw=False, max_steps=400).value
    )
    return go(solver, Y0, TARGET), go(solver, Y0, TARGET + 1)


def by_hand(solver: Any, function: Any = loss) -> Any:
    """The solver's own loop: a state is a result of one compiled function and an argument of the next."""
    tags: frozenset[Any] = frozenset()
    f = lambda y, args: (function(y, args), None)  # noqa: E731
    f_struct, aux_struct = jax.eval_shape(lambda: f(Y0, TARGET))
    step = eqx.filter_jit(eqx.Partial(solver.step, fn=f, args=TARGET, options={}, tags=tags))
    done = eqx.filter_jit(eqx.Partial(solver.terminate, fn=f, args=TARGET, options={}, tags=tags))
    init = eqx.filter_jit(solver.init, donate="none")
    state = init(f, Y0, TARGET, {}, f_struct, aux_struct, tags)
    y = Y0
    for _ in range(4):
        y, state, _ = step(y=y, state=state)
    return y, done(y=y, state=state)[0]


def gradient(solve: Any, function: Any, solver: Any) -> Any:
    @eqx.filter_jit
    @eqx.filter_grad
    def by(target: Any) -> Any:
        found = solve(function, solver, Y0, args=target, throw=False, max_steps=400)
        return found.value["a"] + found.value["b"].sum()

    return by(TARGET)


def vmapped() -> Any:
    one = lambda target: optx.least_squares(residual, LEAST_SQUARES["gauss_newton"], Y0, args=target).value  # noqa: E731
    return eqx.filter_vmap(one)(jnp.asarray([1.0, 2.0, 3.0]))


def bisection() -> Any:
    solver = optx.Bisection(rtol=1e-5, atol=1e-5)
    options = {"lower": 0.0, "upper": 3.0}
    return optx.root_find(lambda x, args: x**3 - args, solver, jnp.asarray(1.0), args=TARGET, options=options).value


def golden() -> Any:
    solver = optx.GoldenSearch(rtol=1e-4, atol=1e-4)
    options = {"lower": -2.0, "upper": 3.0}
    return optx.minimise(lambda x, a: (x - a) ** 2, solver, jnp.asarray(0.5), args=TARGET, options=options).value


PROGRAMS = {
    **{f"minimise {n}": functools.partial(run, optx.minimise, loss, s) for n, s in MINIMISERS.items()},
    **{f"minimise jit {n}": functools.partial(under_jit, optx.minimise, loss, s) for n, s in MINIMISERS.items()},
    **{f"least squares {n}": functools.partial(run, optx.least_squares, residual, s) for n, s in LEAST_SQUARES.items()},
    **{
        f"least squares jit {n}": functools.partial(under_jit, optx.least_squares, residual, s)
        for n, s in LEAST_SQUARES.items()
    },
    **{f"by hand {n}": functools.partial(by_hand, s) for n, s in MINIMISERS.items() if n != "best_so_far"},
    **{f"by hand {n}": functools.partial(by_hand, s, residual) for n, s in LEAST_SQUARES.items()},
    **{f"root {n}": functools.partial(run, optx.root_find, root, s) for n, s in ROOTS.items()},
    **{f"root jit {n}": functools.partial(under_jit, optx.root_find, root, s) for n, s in ROOTS.items()},
    "fixed point": functools.partial(run, optx.fixed_point, contraction, optx.FixedPointIteration(**TOL)),
    "gradient bfgs": functools.partial(gradient, optx.minimise, loss, MINIMISERS["bfgs"]),
    "gradient newton": functools.partial(gradient, optx.root_find, root, ROOTS["newton"]),
    "gradient gauss_newton": functools.partial(gradient, optx.least_squares, residual, LEAST_SQUARES["gauss_newton"]),
    "vmap": vmapped,
    "bisection": bisection,
    "golden": golden,
}
