# SPDX-License-Identifier: Apache-2.0
"""What the libraries' users write around them: implicit layers, tags, masks, adjoints and events under transforms."""

from __future__ import annotations

import functools
from typing import Any

import diffrax as dfx
import equinox as eqx
import flowjax.bijections as bij
import flowjax.distributions as dist
import flowjax.flows
import flowjax.train
import jax
import jax.numpy as jnp
import lineax as lx
import optax
import optimistix as optx
import paramax

KEY = jax.random.key(0)
SYMMETRIC = jnp.asarray([[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 2.0]])
X = jnp.asarray([1.0, -2.0, 0.5])
POSITIVE = lx.positive_semidefinite_tag


def field(t: Any, y: Any, args: Any) -> Any:
    return -args["rate"] * y + jnp.sin(t) * args["drive"]


ARGS = {"rate": jnp.asarray(0.7), "drive": jnp.asarray([1.0, 0.5])}


def solve(args: Any, solver: Any = None, **options: Any) -> Any:
    options.setdefault("stepsize_controller", dfx.PIDController(rtol=1e-4, atol=1e-6))
    solver = dfx.Tsit5() if solver is None else solver
    return dfx.diffeqsolve(dfx.ODETerm(field), solver, 0.0, 1.5, 0.1, jnp.ones(2), args=args, max_steps=256, **options)


# ---- lineax


def operator(kind: str, values: Any) -> Any:
    made = {
        "matrix": lambda: lx.MatrixLinearOperator(values, POSITIVE),
        "function": lambda: lx.FunctionLinearOperator(
            lambda v: values @ v, jax.ShapeDtypeStruct((3,), "float32"), POSITIVE
        ),
        "jacobian": lambda: lx.JacobianLinearOperator(lambda v, a: values @ v + 0 * a, X, 1.0, POSITIVE),
        "diagonal": lambda: lx.DiagonalLinearOperator(jnp.diag(values)),
        "tridiagonal": lambda: lx.TridiagonalLinearOperator(
            jnp.diag(values), jnp.diag(values, -1), jnp.diag(values, 1)
        ),
        "pytree": lambda: lx.PyTreeLinearOperator({"y": values}, {"y": jax.ShapeDtypeStruct((3,), "float32")}),
        "identity": lambda: lx.IdentityLinearOperator(jax.ShapeDtypeStruct((3,), "float32")) * values[0, 0],
        "sum": lambda: lx.MatrixLinearOperator(values) + lx.DiagonalLinearOperator(X**2),
        "product": lambda: lx.MatrixLinearOperator(values) @ lx.DiagonalLinearOperator(X),
        "tagged": lambda: lx.TaggedLinearOperator(lx.MatrixLinearOperator(values), POSITIVE),
        "negative": lambda: -lx.MatrixLinearOperator(values),
        "transposed": lambda: lx.MatrixLinearOperator(values + jnp.triu(values)).T,
    }
    return made[kind]()


KINDS = (
    "matrix",
    "function",
    "jacobian",
    "diagonal",
    "tridiagonal",
    "pytree",
    "identity",
    "sum",
    "product",
    "tagged",
    "negative",
    "transposed",
)


def through_results(kind: str) -> Any:
    """An operator made in one compiled function, tagged and changed in another, solved in a third."""
    op = eqx.filter_jit(functools.partial(operator, kind))(SYMMETRIC)
    rhs = {"y": X} if kind == "pytree" else X
    out = eqx.filter_jit(lambda op, b: lx.linear_solve(op, b, throw=False).value)(op, rhs)
    return out, eqx.filter_jit(lambda op: (op * 2.0).as_matrix() if kind != "pytree" else op.out_size())(op)


def derivatives(kind: str) -> Any:
    def loss(values: Any) -> Any:
        rhs = {"y": X} if kind == "pytree" else X
        return sum(jnp.sum(v**2) for v in jax.tree.leaves(lx.linear_solve(operator(kind, values), rhs).value))

    tangent = jnp.ones_like(SYMMETRIC)
    forward = eqx.filter_jvp(loss, (SYMMETRIC,), (tangent,))
    return eqx.filter_jit(eqx.filter_grad(loss))(SYMMETRIC), forward


def tags_under_vmap() -> Any:
    many = jnp.stack([SYMMETRIC, 2 * SYMMETRIC])
    ops = eqx.filter_vmap(lambda m: lx.MatrixLinearOperator(m, POSITIVE))(many)
    solve_one = lambda op, b: lx.linear_solve(op, b, lx.AutoLinearSolver(well_posed=True)).value  # noqa: E731
    both = eqx.filter_vmap(solve_one, in_axes=(eqx.if_array(0), None))(ops, X)
    assert POSITIVE in ops.tags
    return both, eqx.filter_vmap(lx.is_positive_semidefinite)(ops)


def state_reused() -> Any:
    solver = lx.LU()
    state = eqx.filter_jit(lambda m: solver.init(lx.MatrixLinearOperator(m), {}))(SYMMETRIC)
    once = eqx.filter_jit(lambda s, b: lx.linear_solve(lx.MatrixLinearOperator(SYMMETRIC), b, solver, state=s).value)
    return once(state, X), once(state, 2 * X)


# ---- optimistix


def implicit_layer(adjoint: Any, root: bool) -> Any:
    mlp = eqx.nn.MLP(2, 2, 4, 1, key=KEY)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(mlp: Any, x: Any) -> Any:
        if root:
            fn = lambda y, args: y - 0.3 * args[0](y) - args[1]  # noqa: E731
            y = optx.root_find(fn, optx.Newton(1e-5, 1e-5), x, (mlp, x), adjoint=adjoint, max_steps=32).value
        else:
            fn = lambda y, args: 0.3 * args[0](y) + args[1]  # noqa: E731
            y = optx.fixed_point(
                fn, optx.FixedPointIteration(1e-5, 1e-5), x, (mlp, x), adjoint=adjoint, max_steps=64
            ).value
        return jnp.sum(y**2)

    value, grads = loss(mlp, jnp.asarray([0.3, -0.2]))
    return value, jax.tree.leaves(eqx.filter(grads, eqx.is_array))


def custom_jacobian(solver: Any) -> Any:
    def residual(y: Any, args: Any) -> Any:
        return SYMMETRIC @ y - args + 0.01 * y**3

    options = {"jac": "bwd"} if isinstance(solver, (optx.LevenbergMarquardt, optx.GaussNewton, optx.Dogleg)) else {}
    go = eqx.filter_jit(
        lambda a: optx.least_squares(residual, solver, jnp.zeros(3), a, options=options, max_steps=99).value
    )
    return go(X), eqx.filter_vmap(go)(jnp.stack([X, 2 * X]))


def aux_and_has_aux() -> Any:
    def fn(y: Any, args: Any) -> Any:
        return jnp.sum((y - args) ** 2), {"steps": jnp.sum(y), "twice": 2 * y}

    found = optx.minimise(fn, optx.BFGS(1e-4, 1e-4), jnp.zeros(3), X, has_aux=True)
    return found.value, found.aux["steps"], found.stats["num_steps"]


def best_so_far() -> Any:
    solver = optx.BestSoFarMinimiser(optx.OptaxMinimiser(optax.adam(0.3), 1e-3, 1e-3))
    return optx.minimise(lambda y, a: jnp.sum((y - a) ** 2), solver, jnp.zeros(3), X, max_steps=200, throw=False).value


def bounded() -> Any:
    fn = lambda y, a: jnp.stack([y[0] ** 2 + y[1] - a, y[0] - y[1]])  # noqa: E731
    options = {"lower": jnp.zeros(2), "upper": 3 * jnp.ones(2)}
    run = lambda a: optx.root_find(fn, optx.Chord(1e-4, 1e-4), jnp.ones(2), a, options=options, max_steps=64).value  # noqa: E731
    return run(jnp.asarray(2.0)), jax.jacfwd(run)(jnp.asarray(2.0)), eqx.filter_jacrev(run)(jnp.asarray(2.0))


# ---- diffrax


def adjoint(kind: Any, solver: Any = None) -> Any:
    def loss(args: Any) -> Any:
        return jnp.sum(solve(args, solver, adjoint=kind).ys ** 2)

    if isinstance(kind, (dfx.ForwardMode, dfx.DirectAdjoint)):
        out = eqx.filter_jit(lambda a: eqx.filter_jvp(loss, (a,), (jax.tree.map(jnp.ones_like, a),)))(ARGS)
        return out if isinstance(kind, dfx.ForwardMode) else (out, eqx.filter_grad(loss)(ARGS))
    return eqx.filter_jit(eqx.filter_value_and_grad(loss))(ARGS)


def event(steady: bool) -> Any:
    if steady:
        occasion = dfx.Event(dfx.steady_state_event(rtol=1e-2, atol=1e-2))
    else:
        occasion = dfx.Event(lambda t, y, args, **_: y[0] - 0.9, optx.Bisection(1e-4, 1e-4))
    found = eqx.filter_jit(lambda a: solve(a, event=occasion))(ARGS)
    batch = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), ARGS)
    many = eqx.filter_vmap(lambda a: solve(a, event=occasion).ts)(batch)
    return found.ts, found.ys, found.event_mask, many


def noisy(kind: str) -> Any:
    path = dfx.VirtualBrownianTree(
        0.0, 1.0, 1e-3, (2,), KEY, levy_area=dfx.SpaceTimeLevyArea if kind == "levy" else dfx.BrownianIncrement
    )

    @eqx.filter_jit
    def run(scale: Any) -> Any:
        diffusion = lambda t, y, args: lx.DiagonalLinearOperator(scale * (1 + 0.1 * y))  # noqa: E731
        terms = dfx.MultiTerm(dfx.ODETerm(lambda t, y, args: -y), dfx.ControlTerm(diffusion, path))
        solver = dfx.SPaRK() if kind == "levy" else dfx.Heun() if kind == "heun" else dfx.ItoMilstein()
        return dfx.diffeqsolve(
            terms, solver, 0.0, 1.0, 0.05, jnp.ones(2), saveat=dfx.SaveAt(ts=jnp.linspace(0, 1, 4))
        ).ys

    return run(jnp.asarray(0.3)), eqx.filter_jacrev(run)(jnp.asarray(0.3))


def dense_output() -> Any:
    found = eqx.filter_jit(lambda a: solve(a, saveat=dfx.SaveAt(dense=True)))(ARGS)
    at = eqx.filter_jit(lambda s, t: (s.evaluate(t), s.derivative(t)))
    return [at(found, t) for t in (0.2, jnp.asarray(1.1))], eqx.filter_vmap(lambda t: found.evaluate(t))(
        jnp.linspace(0, 1, 5)
    )


def saved_states() -> Any:
    saveat = dfx.SaveAt(
        subs=[dfx.SubSaveAt(t1=True), dfx.SubSaveAt(ts=jnp.asarray([0.5, 1.0]), fn=lambda t, y, a: y[0])],
        solver_state=True,
        controller_state=True,
    )
    found = eqx.filter_jit(lambda a: solve(a, saveat=saveat))(ARGS)
    again = eqx.filter_jit(lambda s: solve(ARGS, solver_state=s.solver_state, controller_state=s.controller_state).ys)
    return found.ys, again(found)


def controlled_equation() -> Any:
    ts = jnp.linspace(0, 1, 6)
    coefficients = dfx.backward_hermite_coefficients(ts, jnp.stack([ts, jnp.sin(3 * ts)], -1))

    class Field(eqx.Module):
        mlp: eqx.nn.MLP

        def __call__(self, t: Any, y: Any, args: Any) -> Any:
            return self.mlp(y).reshape(2, 2)

    @eqx.filter_jit
    @eqx.filter_grad
    def loss(model: Any, coefficients: Any) -> Any:
        control = dfx.CubicInterpolation(ts, coefficients)
        term = dfx.ControlTerm(model, control).to_ode()
        return dfx.diffeqsolve(term, dfx.Tsit5(), 0.0, 1.0, 0.1, jnp.ones(2)).ys.sum()

    model = Field(eqx.nn.MLP(2, 4, 4, 1, activation=jnp.tanh, final_activation=jnp.tanh, key=KEY))
    return jax.tree.leaves(eqx.filter(loss(model, coefficients), eqx.is_array))


# ---- flows, parameters


def masked_training() -> Any:
    """A flow with frozen base and masked weights, trained by the library's own loop and by hand."""
    base = paramax.non_trainable(dist.Normal(jnp.zeros(2)))
    flow = flowjax.flows.masked_autoregressive_flow(KEY, base_dist=base, flow_layers=2, nn_width=4, nn_depth=1)
    data = jax.random.normal(KEY, (16, 2)) * 0.5 + 1
    trained, losses = flowjax.train.fit_to_data(KEY, flow, data, max_epochs=2, show_progress=False, batch_size=8)
    params, static = eqx.partition(trained, eqx.is_inexact_array, is_leaf=lambda x: isinstance(x, paramax.NonTrainable))

    @eqx.filter_jit
    def step(params: Any, x: Any) -> Any:
        grads = eqx.filter_grad(lambda p: -paramax.unwrap(eqx.combine(p, static)).log_prob(x).mean())(params)
        return eqx.apply_updates(params, jax.tree.map(lambda g: -0.01 * g, grads))

    params = step(step(params, data), data)
    return losses, eqx.filter_vmap(eqx.combine(params, static).log_prob)(data)


def stacked_bijections() -> Any:
    layers = eqx.filter_vmap(lambda key: bij.Affine(jax.random.normal(key, (2,)), jnp.ones(2)))(
        jax.random.split(KEY, 3)
    )
    chain = bij.Scan(layers)
    flow = dist.Transformed(dist.Normal(jnp.zeros(2)), bij.Invert(chain))
    sample = eqx.filter_jit(flow.sample)(KEY, (4,))
    return sample, eqx.filter_jit(flow.log_prob)(sample), eqx.filter_jacrev(flow.log_prob)(sample[0])


def variational() -> Any:
    guide = flowjax.flows.coupling_flow(
        KEY,
        base_dist=dist.Normal(jnp.zeros(2)),
        transformer=bij.RationalQuadraticSpline(knots=4, interval=3),
        flow_layers=1,
        nn_width=4,
    )
    loss = flowjax.train.losses.ElboLoss(lambda x: -jnp.sum((x - 1) ** 2), num_samples=8)
    trained, losses = flowjax.train.fit_to_key_based_loss(
        KEY, guide, loss_fn=loss, steps=3, learning_rate=1e-2, show_progress=False
    )
    return jnp.asarray(losses), trained.sample(KEY, (3,))


def reparameterised() -> Any:
    class Scale(eqx.Module):
        raw: Any
        rest: Any

        def __call__(self, x: Any) -> Any:
            return self.raw * x + self.rest

    model = Scale(paramax.Parameterize(jnp.exp, jnp.asarray(0.2)), paramax.WeightNormalization(SYMMETRIC))
    run = eqx.filter_jit(lambda m, x: paramax.unwrap(m)(x))
    grads = eqx.filter_grad(lambda m: paramax.unwrap(m)(X).sum())(model)
    return run(model, X), jax.tree.leaves(eqx.filter(grads, eqx.is_array))


PROGRAMS: dict[str, Any] = {f"operator {kind}": functools.partial(through_results, kind) for kind in KINDS}
PROGRAMS |= {f"derivatives {kind}": functools.partial(derivatives, kind) for kind in KINDS}
ADJOINTS: dict[str, Any] = {
    "recursive": dfx.RecursiveCheckpointAdjoint(checkpoints=8),
    "backsolve": dfx.BacksolveAdjoint(),
    "direct": dfx.DirectAdjoint(),
    "forward": dfx.ForwardMode(),
}
PROGRAMS |= {f"adjoint {name}": functools.partial(adjoint, kind) for name, kind in ADJOINTS.items()}
PROGRAMS["adjoint of an implicit solver"] = functools.partial(adjoint, dfx.RecursiveCheckpointAdjoint(), dfx.Kvaerno3())
SOLVERS = [optx.LevenbergMarquardt, optx.GaussNewton, optx.Dogleg, optx.IndirectLevenbergMarquardt]
PROGRAMS |= {f"least squares {kind.__name__}": functools.partial(custom_jacobian, kind(1e-4, 1e-4)) for kind in SOLVERS}
for found in (True, False):
    for way in (optx.ImplicitAdjoint(), optx.RecursiveCheckpointAdjoint()):
        name = f"{'root' if found else 'fixed point'} as a layer, {type(way).__name__}"
        PROGRAMS[name] = functools.partial(implicit_layer, way, found)
PROGRAMS |= {f"noise {kind}": functools.partial(noisy, kind) for kind in ("heun", "milstein", "levy")}
PROGRAMS |= {"events": functools.partial(event, False), "steady state": functools.partial(event, True)}
REST = (tags_under_vmap, state_reused, aux_and_has_aux, best_so_far, bounded, dense_output, saved_states)
REST += (controlled_equation, masked_training, stacked_bijections, variational, reparameterised)
PROGRAMS |= {program.__name__.replace("_", " "): program for program in REST}
