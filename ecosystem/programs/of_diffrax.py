# SPDX-License-Identifier: Apache-2.0
"""Differential equations: each solver, adjoints, events, noise, saving, steps by hand."""

from __future__ import annotations

import functools
from typing import Any

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import optimistix as optx

Y0 = jnp.asarray([1.0, 0.5])
RATE = jnp.asarray(1.3)


def field(t: Any, y: Any, rate: Any) -> Any:
    return jnp.stack([-rate * y[0] + 0.1 * jnp.sin(t), rate * y[0] - 0.5 * y[1]])


def solved(solver: Any, rate: Any = RATE, **options: Any) -> Any:
    term = dfx.ODETerm(field)
    controller = options.pop("controller", dfx.PIDController(rtol=1e-4, atol=1e-5))
    return dfx.diffeqsolve(
        term, solver, 0.0, 2.0, 0.1, Y0, args=rate, stepsize_controller=controller, max_steps=512, **options
    )


def ode(solver: Any, **options: Any) -> Any:
    found = solved(solver, saveat=dfx.SaveAt(ts=jnp.linspace(0.0, 2.0, 5)), **options)
    return found.ts, found.ys, found.stats["num_steps"]


def under_jit(solver: Any) -> Any:
    go = eqx.filter_jit(lambda rate: solved(solver, rate).ys)
    return go(RATE), go(2 * RATE)


def gradient(adjoint: Any) -> Any:
    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(rate: Any) -> Any:
        return solved(dfx.Tsit5(), rate, adjoint=adjoint).ys.sum()

    return loss(RATE)


def neural() -> Any:
    class Field(eqx.Module):
        mlp: eqx.nn.MLP

        def __call__(self, t: Any, y: Any, args: Any) -> Any:
            return self.mlp(y)

    model = Field(eqx.nn.MLP(2, 2, 8, 1, activation=jax.nn.softplus, key=jax.random.key(0)))

    @eqx.filter_jit
    def step(model: Any, y0: Any) -> Any:
        @eqx.filter_value_and_grad
        def loss(model: Any) -> Any:
            def one(y: Any) -> Any:
                return dfx.diffeqsolve(dfx.ODETerm(model), dfx.Heun(), 0.0, 1.0, 0.1, y).ys

            return (eqx.filter_vmap(one)(y0) ** 2).mean()

        value, gradient = loss(model)
        return value, eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradient))

    values = []
    for _ in range(3):
        value, model = step(model, jnp.stack([Y0, -Y0]))
        values.append(value)
    return values


def event(direction: Any, root_finder: Any) -> Any:
    kind = dfx.Event(lambda t, y, args, **kwargs: y[0] - 0.4, root_finder, direction=direction)
    found = solved(dfx.Tsit5(), event=kind)
    return found.ts, found.ys, found.event_mask


def gradient_of_event() -> Any:
    finder = optx.Newton(1e-5, 1e-5, optx.rms_norm)

    @jax.jit
    @jax.grad
    def by(rate: Any) -> Any:
        kind = dfx.Event(lambda t, y, args, **kwargs: y[0] - 0.4, finder)
        return solved(dfx.Tsit5(), rate, event=kind).ts[-1]

    return by(RATE)


def steady() -> Any:
    return solved(dfx.Tsit5(), event=dfx.Event(dfx.steady_state_event(rtol=1e-2, atol=1e-2))).ys


def noise(solver: Any, levy: Any = None) -> Any:
    path = dfx.VirtualBrownianTree(
        0.0, 1.0, tol=1e-2, shape=(2,), key=jax.random.key(1), levy_area=levy or dfx.BrownianIncrement
    )
    terms = dfx.MultiTerm(dfx.ODETerm(field), dfx.ControlTerm(lambda t, y, args: 0.1 * jnp.eye(2), path))
    go = eqx.filter_jit(lambda terms: dfx.diffeqsolve(terms, solver, 0.0, 1.0, 0.1, Y0, args=RATE).ys)
    return go(terms)


def by_hand() -> Any:
    solver, term = dfx.Tsit5(), dfx.ODETerm(field)
    step = eqx.filter_jit(lambda t0, t1, y, state: solver.step(term, t0, t1, y, RATE, state, made_jump=False))
    state = eqx.filter_jit(solver.init)(term, 0.0, 0.1, Y0, RATE)
    y = Y0
    for i in range(4):
        y, error, _, state, _ = step(0.1 * i, 0.1 * (i + 1), y, state)
    return y, error


def controlled() -> Any:
    ts = jnp.linspace(0.0, 1.0, 6)
    data = jnp.stack([ts, jnp.sin(ts)], axis=-1)
    control = dfx.CubicInterpolation(ts, dfx.backward_hermite_coefficients(ts, data))
    term = dfx.ControlTerm(lambda t, y, args: jnp.ones((2, 2)) * y[:, None], control).to_ode()
    return eqx.filter_jit(lambda y: dfx.diffeqsolve(term, dfx.Tsit5(), 0.0, 1.0, 0.1, y).ys)(Y0)


def dense() -> Any:
    found = eqx.filter_jit(lambda: solved(dfx.Dopri5(), saveat=dfx.SaveAt(dense=True)))()
    return found.evaluate(0.7), eqx.filter_vmap(found.evaluate)(jnp.linspace(0.1, 1.9, 4))


def steps() -> Any:
    saveat = dfx.SaveAt(
        subs=[dfx.SubSaveAt(t0=True, t1=True), dfx.SubSaveAt(steps=True, fn=lambda t, y, args: y.sum())]
    )
    return solved(dfx.Heun(), saveat=saveat, controller=dfx.ConstantStepSize()).ys


SOLVERS = {
    "euler": (dfx.Euler(), dfx.ConstantStepSize()),
    "heun": (dfx.Heun(), None),
    "midpoint": (dfx.Midpoint(), None),
    "ralston": (dfx.Ralston(), None),
    "bosh3": (dfx.Bosh3(), None),
    "tsit5": (dfx.Tsit5(), None),
    "dopri5": (dfx.Dopri5(), None),
    "dopri8": (dfx.Dopri8(), None),
    "implicit_euler": (dfx.ImplicitEuler(), None),
    "kvaerno3": (dfx.Kvaerno3(), None),
    "kvaerno5": (dfx.Kvaerno5(), None),
    "reversible_heun": (dfx.ReversibleHeun(), None),
}


def options(controller: Any) -> dict[str, Any]:
    return {} if controller is None else {"controller": controller}


PROGRAMS = {
    **{f"ode {n}": functools.partial(ode, s, **options(c)) for n, (s, c) in SOLVERS.items()},
    **{f"jit {n}": functools.partial(under_jit, SOLVERS[n][0]) for n in ("tsit5", "kvaerno3")},
    "gradient recursive": functools.partial(gradient, dfx.RecursiveCheckpointAdjoint()),
    "gradient direct": functools.partial(gradient, dfx.DirectAdjoint()),
    "gradient backsolve": functools.partial(gradient, dfx.BacksolveAdjoint()),
    "neural": neural,
    "event": functools.partial(event, None, None),
    "event down": functools.partial(event, False, optx.Newton(1e-5, 1e-5, optx.rms_norm)),
    "event up": functools.partial(event, True, optx.Newton(1e-5, 1e-5, optx.rms_norm)),
    "gradient of event": gradient_of_event,
    "steady": steady,
    "noise euler": functools.partial(noise, dfx.Euler()),
    "noise heun": functools.partial(noise, dfx.Heun()),
    "noise shark": functools.partial(noise, dfx.SlowRK(), dfx.SpaceTimeTimeLevyArea),
    "by hand": by_hand,
    "controlled": controlled,
    "dense": dense,
    "steps": steps,
}
