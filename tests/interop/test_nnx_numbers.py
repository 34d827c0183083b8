# SPDX-License-Identifier: Apache-2.0
"""A Python number that a Variable holds is data, as under NNX; attributes of modules are static."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import graftax


class Scaled(nnx.Module):
    def __init__(self) -> None:
        self.scale, self.calls = nnx.Param(0.5), nnx.Variable(0)
        self.size, self.flag = 4, nnx.Variable(True)

    def __call__(self, x: Any) -> Any:
        self.calls.set_value(self.calls.get_value() + 1)
        return (x * self.scale.get_value() + jnp.zeros(self.size)).sum()


def test_it_is_traced_once():
    model = Scaled()
    run = graftax.jit(lambda m, x: m(x))
    for count in (1, 2, 3):
        assert run(model, 2.0) == 4
        assert model.calls.get_value() == count
    model.scale.set_value(1.5)
    assert run(model, 2.0) == 12 and model.scale.get_value() == 1.5 and type(model.scale.get_value()) is float
    assert run.cache_info().traces == 1
    model.size = 2
    assert run(model, 2.0) == 6 and run.cache_info().traces == 2


class Counted(nnx.Module):
    def __init__(self) -> None:
        self.w, self.steps = nnx.Param(jnp.ones(2)), 0


ONCE = 1 if sys.version_info >= (3, 12) else 2  # compilations, where the trace alone shows that a number changes


def test_a_counter_of_a_module_does_not_compile_on_each_call():
    @graftax.jit
    def step(model: Counted) -> Any:
        model.steps += 1  # NNX asks whether it is an instance of a `typing.Union`
        return model.w.get_value() * model.steps

    model = Counted()
    assert [step(model).tolist() for _ in range(4)] == [[n, n] for n in (1, 2, 3, 4)]
    assert model.steps == 4 and step.cache_info().traces == ONCE


def test_it_is_differentiated_as_by_nnx():
    expected = nnx.grad(lambda m: m(2.0))(Scaled())
    gradient = graftax.grad(lambda m: m(2.0), wrt=nnx.Param)(Scaled())
    np.testing.assert_array_equal(gradient.scale.get_value(), expected["scale"].get_value())
    assert gradient.size == 4


def test_loops_carry_it():
    model = Scaled()

    def step(m: Any, x: Any) -> Any:
        return m, m(x)

    _, out = graftax.scan(step, model, jnp.ones(3))
    assert out.tolist() == [2, 2, 2] and model.calls.get_value() == 3
    assert graftax.while_loop(lambda m: m.calls.get_value() < 5, lambda m: (m(1.0), m)[1], model).calls.get_value() == 5


def test_a_flag_is_traced_as_under_nnx():
    model = Scaled()
    run = graftax.jit(lambda m: jnp.where(m.flag.get_value(), 1, 2))
    assert run(model) == 1
    model.flag.set_value(False)
    assert run(model) == 2


def test_jax_sees_a_variable_as_before():
    model = Scaled()
    assert len(jax.tree.leaves(model)) == len(graftax.flatten(model)[0])
