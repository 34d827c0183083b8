# SPDX-License-Identifier: Apache-2.0
"""Code of two modules that is equal reads the globals of its own module."""

import sys
import types
from typing import Any

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


SOURCE_OF_TWO = """
def g(x): return x * K
def through(x): return g(x)
def of_a_list(x): return x * HELD[0]
def set_k(k):
    global K
    K = k
class C:
    def go(self, x): return x * K
c = C()
def of_a_method(x): return c.go(x)
"""


def two_namespaces(name: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    code, both = compile(SOURCE_OF_TWO, "<string>", "exec"), ({"K": 2.0, "HELD": [2.0]}, {"K": 3.0, "HELD": [3.0]})
    for i, namespace in enumerate(both):
        if name is not None:
            namespace["__name__"] = f"{name}_{i}"
        exec(code, namespace)
    return both


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", [None, "made"])
@pytest.mark.parametrize("called", ["g", "through", "of_a_list", "of_a_method"])
def test_code_that_is_executed_in_two_namespaces_reads_those_of_each(called: str, name: str | None):
    results: list[list[float]] = []
    for jit in (lambda f: f, graftax.jit):
        one, other = two_namespaces(name)
        functions = one[called], other[called]

        def both(x: Any, functions: Any = functions) -> Any:
            return [f(x) for f in functions]

        f, x = jit(both), jnp.ones(())
        numbers = [float(y) for y in f(x)]
        for namespace, k in ((other, 5.0), (one, 7.0), (other, 9.0)):
            namespace["K"] = namespace["HELD"][0] = k
            numbers += [float(y) for y in f(x)]
        other["set_k"](11.0)
        numbers += [float(y) for y in f(x)]
        results.append(numbers)
    assert results[0] == results[1]


def test_functions_made_of_one_code_object_read_their_own_globals():
    def h(x: Any) -> Any:
        return x * K  # noqa: F821

    scopes: list[dict[str, Any]] = [{"K": 2.0}, {"K": jnp.full((), 3.0)}]
    a, b = (types.FunctionType(h.__code__, scope) for scope in scopes)
    f, x = graftax.jit(lambda x: (a(x), b(x))), jnp.ones(())
    assert [float(y) for y in f(x)] == [2, 3]
    scopes[1]["K"] = jnp.full((), 5.0)
    assert [float(y) for y in f(x)] == [2, 5]
    scopes[0]["K"] = 7.0
    assert [float(y) for y in f(x)] == [7, 5]
