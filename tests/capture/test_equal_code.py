# SPDX-License-Identifier: Apache-2.0
"""Code of two modules that is equal reads the globals of its own module."""

import sys
import types

import jax.numpy as jnp
import pytest

import graftax

SOURCE = "def scaled(x): return x * factor\n"


@pytest.fixture
def modules(monkeypatch):
    pair = types.ModuleType("scaled_by_two"), types.ModuleType("scaled_by_three")
    for module, factor in zip(pair, (2.0, 3.0), strict=True):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(module)["factor"] = factor
        exec(compile(SOURCE, "scaled.py", "exec"), vars(module))
    return pair


def test_each_of_two_functions_with_equal_code_reads_its_own_module(modules):
    two, three = modules
    f = graftax.jit(lambda x: two.scaled(x) + three.scaled(x))
    assert f(jnp.ones(1)).tolist() == [5]
    three.factor = 10.0
    assert f(jnp.ones(1)).tolist() == [12]
    two.factor = 1.0
    assert f(jnp.ones(1)).tolist() == [11]


def test_a_function_that_takes_the_place_of_one_with_equal_code_reads_its_own_module(modules):
    chosen = [module.scaled for module in modules]

    @graftax.jit
    def f(x, i):
        return chosen[i](x)

    assert [f(jnp.ones(1), i).tolist() for i in (0, 1)] == [[2], [3]]
    modules[1].factor = 7.0
    assert [f(jnp.ones(1), i).tolist() for i in (0, 1)] == [[2], [7]]
