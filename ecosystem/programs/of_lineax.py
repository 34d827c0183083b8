# SPDX-License-Identifier: Apache-2.0
"""Linear solves: each operator with the solvers that take it, under transforms."""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx

N = 4
A = jax.random.normal(jax.random.key(0), (N, N)) + 4 * jnp.eye(N)
SPD = A @ A.T + jnp.eye(N)
B = jnp.arange(1.0, N + 1)

OPERATORS = {
    "matrix": (lambda: lx.MatrixLinearOperator(A), lx.AutoLinearSolver(well_posed=True)),
    "lu": (lambda: lx.MatrixLinearOperator(A), lx.LU()),
    "qr": (lambda: lx.MatrixLinearOperator(A[:, :3]), lx.QR()),
    "svd": (lambda: lx.MatrixLinearOperator(A[:, :3]), lx.AutoLinearSolver(well_posed=False)),
    "cholesky": (lambda: lx.MatrixLinearOperator(SPD, lx.positive_semidefinite_tag), lx.Cholesky()),
    "cg": (lambda: lx.MatrixLinearOperator(SPD, lx.positive_semidefinite_tag), lx.CG(1e-6, 1e-6)),
    "gmres": (lambda: lx.MatrixLinearOperator(A), lx.GMRES(1e-6, 1e-6)),
    "bicgstab": (lambda: lx.MatrixLinearOperator(A), lx.BiCGStab(1e-6, 1e-6)),
    "diagonal": (lambda: lx.DiagonalLinearOperator(jnp.diag(A)), lx.Diagonal()),
    "tridiagonal": (
        lambda: lx.TridiagonalLinearOperator(jnp.diag(A), jnp.diag(A, 1), jnp.diag(A, -1)),
        lx.Tridiagonal(),
    ),
    "triangular": (lambda: lx.MatrixLinearOperator(jnp.tril(A), lx.lower_triangular_tag), lx.Triangular()),
    "jacobian": (
        lambda: lx.JacobianLinearOperator(lambda x, _: A @ x + 0.1 * jnp.sin(x), B),
        lx.AutoLinearSolver(well_posed=True),
    ),
    "function": (
        lambda: lx.FunctionLinearOperator(lambda x: A @ x, jax.ShapeDtypeStruct((N,), jnp.float32)),
        lx.AutoLinearSolver(well_posed=True),
    ),
    "sum": (
        lambda: lx.MatrixLinearOperator(A) + 2 * lx.IdentityLinearOperator(jax.ShapeDtypeStruct((N,), jnp.float32)),
        lx.LU(),
    ),
    "product": (lambda: lx.MatrixLinearOperator(A) @ lx.DiagonalLinearOperator(B), lx.LU()),
}


def solved(name: str) -> Any:
    make, solver = OPERATORS[name]
    return lx.linear_solve(make(), B, solver, throw=False).value


def solved_under_jit(name: str) -> Any:
    make, solver = OPERATORS[name]
    state = eqx.filter_jit(lambda operator: solver.init(operator, {}))(make())
    run = eqx.filter_jit(
        lambda operator, state, b: lx.linear_solve(operator, b, solver, state=state, throw=False).value
    )
    return run(make(), state, B), run(make(), state, 2 * B)


def operator_from_jit(name: str) -> Any:
    operator = eqx.filter_jit(lambda: OPERATORS[name][0]())()
    return operator.mv(jnp.ones(operator.in_size())), operator.as_matrix(), lx.is_symmetric(operator)


def materialised() -> Any:
    operator = OPERATORS["function"][0]()
    return eqx.filter_jit(lambda op: lx.materialise(op).as_matrix())(operator)


def linearised() -> Any:
    operator = lx.linearise(OPERATORS["jacobian"][0]())
    return eqx.filter_jit(lambda op, x: (op.mv(x), op.T.mv(x)))(operator, B)


def gradient(solver: Any) -> Any:
    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(operator: Any) -> Any:
        return (lx.linear_solve(operator, B, solver, throw=False).value ** 2).sum()

    value, by = loss(lx.MatrixLinearOperator(SPD, lx.positive_semidefinite_tag))
    return value, by.matrix


def vmapped() -> Any:
    operators = eqx.filter_vmap(lx.MatrixLinearOperator)(jnp.stack([A, SPD]))
    return eqx.filter_vmap(lambda op, b: lx.linear_solve(op, b, lx.LU()).value, in_axes=(eqx.if_array(0), None))(
        operators, B
    )


def forward() -> Any:
    def f(matrix: Any) -> Any:
        return lx.linear_solve(lx.MatrixLinearOperator(matrix), B, lx.LU()).value

    return eqx.filter_jvp(f, (A,), (jnp.ones_like(A),)), eqx.filter_jacfwd(f)(A), eqx.filter_jacrev(f)(A)


PROGRAMS = {
    **{f"solve {name}": functools.partial(solved, name) for name in OPERATORS},
    **{f"jit {name}": functools.partial(solved_under_jit, name) for name in OPERATORS},
    **{f"operator {name}": functools.partial(operator_from_jit, name) for name in OPERATORS},
    "materialised": materialised,
    "linearised": linearised,
    "gradient lu": functools.partial(gradient, lx.LU()),
    "gradient cg": functools.partial(gradient, lx.CG(1e-6, 1e-6)),
    "vmap": vmapped,
    "derivatives": forward,
}
