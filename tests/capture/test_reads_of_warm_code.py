# SPDX-License-Identifier: Apache-2.0
"""Code that ran often before it is traced: the interpreter has specialized it, and it reads what a trace shows it."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import graftax
from programs import module, values

START = """
import types
M = types.ModuleType("M")
M.w = jnp.ones(2)
W = jnp.ones(2)
class C:
    w = jnp.ones(2)
class Holder:
    def __init__(self): self.w = jnp.ones(2)
    def read(self): return self.w
H = Holder()
def made():
    w = jnp.ones(2)
    def read(): return w
    def write(v):
        nonlocal w
        w = v
    return read, write
read, write = made()
def with_default(w=W): return w
def steps():
    yield M.w
    yield M.w + W
"""

READS = {
    "a global": ("W", "m.W = v"),
    "an attribute of a module": ("M.w", "m.M.w = v"),
    "an attribute of a class": ("C.w", "m.C.w = v"),
    "an attribute of a class, by an instance": ("C().w", "m.C.w = v"),
    "an attribute of an object": ("H.w", "m.H.w = v"),
    "a method": ("H.read()", "m.H.w = v"),
    "a variable of an enclosing call": ("read()", "m.write(v)"),
    "a default": ("with_default()", "m.with_default.__defaults__ = (v,)"),
    "a generator": ("sum(steps())", "m.M.w = v"),
    "a comprehension": ("sum([M.w for _ in range(3)])", "m.M.w = v"),
}
HELPERS = {
    "a helper": "def helper(x): return x * {read}",
    "a loop": "def helper(x):\n    for _ in range(20): y = x * {read}\n    return y",
    "assigned in place": "def helper(x):\n    M.w = M.w + 1\n    return x * {read}",
}


@pytest.mark.parametrize("helper", HELPERS)
@pytest.mark.parametrize("name", READS)
@pytest.mark.quick(4)
def test_warm_code_sees_changes(name: str, helper: str) -> None:
    read, change = READS[name]
    source = START + HELPERS[helper].format(read=read) + "\ndef f(x): return helper(x)"

    def program(wrap):
        m = module(source)
        for _ in range(30):
            m.f(1.0)
        f, out = wrap(m.f), []
        for v in (jnp.full(2, 2.0), jnp.full(2, 3.0), 4.0, 5.0, jnp.full(2, 6.0)):
            exec(change, {"m": m, "v": v})
            out += [values(f(jnp.ones(2))), values(m.M.w)]
        return out

    assert program(graftax.jit) == program(lambda f: f)
