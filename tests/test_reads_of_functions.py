# SPDX-License-Identifier: Apache-2.0
"""Code that asks for what a function holds, and changes it: defaults, keyword defaults, attributes, variables."""

import jax.numpy as jnp
import pytest

from programs import Program, beside

KEYWORD, DEFAULT = "def g(x, *, k={v}): return x * k\n", "def g(x, k={v}): return x * k\n"
PARTS = {
    "keyword defaults": KEYWORD + "def f(x):\n    g.__kwdefaults__['k'] += 1\n    return g(x)",
    "keyword defaults by update": KEYWORD
    + "def f(x):\n    g.__kwdefaults__.update(k=g.__kwdefaults__['k'] + 1)\n    return g(x)",
    "keyword defaults after the call": KEYWORD
    + "def f(x):\n    y = g(x)\n    g.__kwdefaults__['k'] += 1\n    return y",
    "keyword defaults that are read": KEYWORD + "def f(x): return x * g.__kwdefaults__['k']",
    "keyword defaults by another name": KEYWORD
    + "def f(x):\n    h = g\n    h.__kwdefaults__['k'] += 1\n    return g(x)",
    "its own keyword defaults": "def g(x, *, k={v}):\n    g.__kwdefaults__['k'] += 1\n    return x * k\n"
    "def f(x): return g(x)",
    "defaults": DEFAULT + "def f(x):\n    g.__defaults__ = (x + g.__defaults__[0],)\n    return g(x)",
    "defaults that are read": DEFAULT + "def f(x): return x * g.__defaults__[0]",
    "its own defaults": "def g(x, k={v}):\n    g.__defaults__ = (x + k,)\n    return x * k\ndef f(x): return g(x)",
    "defaults of a method": "class C:\n    def g(self, x, k={v}):\n        C.g.__defaults__ = (x + k,)\n"
    "        return x * k\nc = C()\ng = C.g\ndef f(x): return c.g(x)",
    "defaults below vmap": DEFAULT
    + "def f(x):\n    g.__defaults__ = (g.__defaults__[0] + 1,)\n    return jax.vmap(g)(x)",
    "an attribute": "def g(x, k=1): return x * g.scale\ng.scale = {v}\n"
    "def f(x):\n    g.scale = g.scale + x\n    return g(x)",
    "its own attribute": "def g(x, k=1):\n    g.scale = g.scale + x\n    return x * g.scale\ng.scale = {v}\n"
    "def f(x): return g(x)",
    "a variable": "def make():\n    c = {v}\n    def g(x, k=1): return x * c\n    return g\ng = make()\n"
    "def f(x):\n    g.__closure__[0].cell_contents += 1\n    return g(x)",
}


def change(m):
    if m.g.__kwdefaults__:
        m.g.__kwdefaults__["k"] = 9.0
    else:
        m.g.__defaults__ = (9.0,)


@pytest.mark.parametrize("value", ["1", "jnp.ones(())"])
@pytest.mark.parametrize("name", PARTS)
def test_code_may_change_what_a_function_holds(name, value):
    source = PARTS[name].replace("{v}", value)
    beside(Program(source, change, ("g.__defaults__", "g.__kwdefaults__", "g.scale")))


@pytest.mark.parametrize("value", [1, jnp.ones(())])
def test_code_may_change_a_list_in_the_defaults_of_a_function(value):
    source = "def g(x, k=[]): return x * len(k)\ndef f(x):\n    g.__defaults__[0].append(2)\n    return g(x)"
    beside(Program(source, lambda m: setattr(m.g, "__defaults__", ([value],)), ("g.__defaults__",)))
