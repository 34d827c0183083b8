# SPDX-License-Identifier: Apache-2.0
"""Functions that traced code makes and that outlive the call have the globals of their module, not what the trace saw
of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import graftax

state: dict[str, Any] = {}
rate: Any = 2.0


class Box:
    made: Any = None


def scaled_by_state() -> Callable[[Any], Any]:
    scale = state["w"]
    return lambda x: x * (state["w"] + 0 * scale)


@functools.cache
def activation(name: str, power: int) -> Callable[[Any], Any]:
    return lambda x: x**power * state["w"]


def directly(x: Any) -> Any:
    return lambda x: x * state["w"]


def after_a_call(x: Any) -> Any:
    made = lambda x: x * state["w"]
    made(x)
    return made


def after_a_read(x: Any) -> Any:
    x = x + state["w"]
    return lambda x: x * state["w"]


def of_a_helper(x: Any) -> Any:
    return scaled_by_state()


def in_an_object(x: Any) -> Any:
    box = Box()
    box.made = [lambda x: x * state["w"]]
    return box.made[0]


def in_a_partial(x: Any) -> Any:
    return functools.partial(lambda k, x: x * k * state["w"], 3.0)


def a_method_of_a_class_made_inside(x: Any) -> Any:
    class Local:
        def scaled(self, x: Any) -> Any:
            return x * state["w"]

    return Local().scaled


def with_a_variable(x: Any) -> Any:
    k = 4.0
    return lambda x: x * k * state["w"]


def under_grad(x: Any) -> Any:
    def loss(x: Any) -> Any:
        return (x * state["w"]).sum(), lambda x: x * state["w"]

    return graftax.grad(loss, has_aux=True)(x)[1]


def of_a_number(x: Any) -> Any:
    return lambda x: x * rate * state["n"]


def of_a_cache(x: Any) -> Any:
    return activation("relu", 2)


MAKERS = [
    directly,
    after_a_call,
    after_a_read,
    of_a_helper,
    in_an_object,
    in_a_partial,
    a_method_of_a_class_made_inside,
    with_a_variable,
    under_grad,
    of_a_number,
    of_a_cache,
]


def sequence(make: Callable[[Any], Any]) -> list[Any]:
    """What the functions that `make` gives answer, before and after changes of the globals that they read."""
    global rate
    rate = 2.0
    state.update(w=jnp.ones(1), n=1.0)
    activation.cache_clear()
    answers, kept = list[Any](), list[Any]()
    for i in range(4):
        kept.append(make(jnp.ones(1 + i // 3)))
        answers += [function(jnp.ones(1)).tolist() for function in kept]
        state["w"], state["n"], rate = state["w"] + 1, state["n"] + 1, rate + 1
        answers += [function(jnp.ones(1)).tolist() for function in kept]
    return answers


@pytest.mark.quick(11)
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_what_is_made_inside_reads_its_module_afterwards(make: Callable[[Any], Any]) -> None:
    assert sequence(graftax.jit(make)) == sequence(make)


def test_what_is_stored_inside_reads_and_writes_its_module() -> None:
    def store(box: Box) -> None:
        def count(by: int) -> Any:
            state["w"] = state["w"] + by
            return state["w"]

        box.made = count
        count(1)

    def run(store: Callable[[Box], None]) -> list[Any]:
        state["w"], box, answers = jnp.zeros(1), Box(), list[Any]()
        for _ in range(3):
            store(box)
            answers += [box.made(10).tolist(), state["w"].tolist(), box.made.__globals__ is globals()]
        return answers

    assert run(graftax.jit(store)) == run(store)


def test_transforms_outside_of_jit_leave_no_tracer_in_what_is_made() -> None:
    state["w"] = jnp.ones(1)

    def loss(x: Any) -> Any:
        return (x * state["w"]).sum(), lambda x: x * state["w"]

    made = graftax.grad(loss, has_aux=True)(jnp.ones(1))[1]
    state["w"] = jnp.full(1, 5.0)
    assert made(jnp.ones(1)).tolist() == [5.0] and made.__globals__ is globals()


@pytest.mark.parametrize("transform", [graftax.grad, graftax.vmap, lambda f: lambda x: graftax.scan(f, x, None, 2)])
def test_a_global_that_is_assigned_below_a_transform_is_not_lost(transform: Callable[..., Any]) -> None:
    def outer(x: Any) -> Any:
        def inner(x: Any, *_: Any) -> Any:
            global rate
            rate = rate + 1
            return (x.sum(), None) if _ else x.sum()

        return transform(inner)(x)

    with pytest.raises(graftax.MutationError, match="global rate"):
        graftax.jit(outer)(jnp.ones(1))


def test_a_global_that_is_assigned_by_what_a_transform_calls_is_kept() -> None:
    def outer(x: Any) -> Any:
        def count() -> None:
            global rate
            rate = rate + 1

        def loss(x: Any) -> Any:
            count()
            return (x * rate).sum()

        return graftax.grad(loss)(x)

    global rate
    rate = 1.0
    f = graftax.jit(outer)
    assert [f(jnp.ones(1)).tolist() for _ in range(3)] == [[2.0], [3.0], [4.0]] and rate == 4.0


def test_what_an_exception_holds_reads_its_module() -> None:
    state["w"] = jnp.ones(1)

    @graftax.jit
    def fails(x: Any) -> Any:
        x = x * state["w"]
        raise ValueError(lambda x: x * state["w"])

    with pytest.raises(ValueError) as caught:
        fails(jnp.ones(1))
    state["w"] = jnp.full(1, 5.0)
    assert caught.value.args[0](jnp.ones(1)).tolist() == [5.0]


def test_a_derivative_rule_made_inside_does_not_keep_what_it_read_the_first_time() -> None:
    state["w"] = jnp.ones(1)

    @graftax.jit
    def scaled(x: Any) -> Any:
        @jax.custom_vjp
        def times(x: Any) -> Any:
            return x * state["w"]

        times.defvjp(lambda x: (times(x), None), lambda _, cotangent: (cotangent * state["w"] * 10,))
        return times(x)

    inside = graftax.jit(jax.grad(lambda x: scaled(x).sum()))
    for expected in (10.0, 20.0, 30.0):
        assert inside(jnp.ones(1)).tolist() == [expected]
        # JAX runs the rule when the trace has ended, and would keep what it read.
        with contextlib.suppress(TypeError, jax.errors.UnexpectedTracerError):
            assert jax.grad(lambda x: scaled(x).sum())(jnp.ones(1)).tolist() == [expected]
        state["w"] = state["w"] + 1


def test_a_host_function_still_sees_what_the_call_was_given() -> None:
    state["w"], counts = jnp.ones(1), list[float]()

    @graftax.jit
    def noted(x: Any) -> Any:
        jax.debug.callback(lambda x: counts.append(float(x[0] * state["w"][0])), x)
        return x * 2

    for _ in range(3):
        noted(jnp.ones(1))
        jax.effects_barrier()
        state["w"] = state["w"] + 1
    assert counts == [1.0, 2.0, 3.0]
