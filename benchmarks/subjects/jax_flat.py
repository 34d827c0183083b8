# SPDX-License-Identifier: Apache-2.0
"""`jax.jit` on the flat list of arrays, passed as one argument: what a careful user would write by hand."""

from collections.abc import Callable
from typing import Any

import jax

from benchmarks.inputs import LIST, ONE, Form, bumped

NAME = "jax.jit, flat list"
DISTRIBUTION = "jax"

jit = jax.jit
value_and_grad = jax.value_and_grad
unflatten = jax.tree.unflatten


def accepts(form: Form) -> bool:
    return form is not ONE


def taken_as(form: Form) -> Form:
    return LIST


def in_place(form: Form, change: Callable[[Any], None]) -> Callable[[Any], None]:
    step = jit(bumped)
    assign = form.assign
    if assign is None:
        raise TypeError(f"{form.name} cannot be changed in place")

    def call(obj: Any) -> None:
        assign(obj, step(form.arrays(obj)))

    return call


def flatten(obj: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(obj)


def replay(structure: Any, obj: Any) -> list[Any]:
    return jax.tree.flatten(obj)[0]


def trained(params: Any, grads: Any, rate: float) -> Callable[[], Any]:
    import optax

    tx = optax.adam(rate)
    state = tx.init(params)

    @jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def call() -> Any:
        nonlocal params, state
        params, state = step(params, state, grads)
        return params

    return call
