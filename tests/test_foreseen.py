# SPDX-License-Identifier: Apache-2.0
"""A first call runs the function's body once: what helpers read is known before."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import graftax
from programs import Program, beside, module

COUNT = "import pathlib, tempfile, functools, types\nruns = []\nimport os\n"
HELPERS = {
    "a dict": "K = {'k': 2.0}\ndef h(x): return x * K['k']\n",
    "a helper's helper": "K = {'k': 2.0}\nL = [1.0]\ndef g(x): return x + L[0]\ndef h(x): return g(x) * K['k']\n",
    "a counter": "K = {'k': 2.0}\nN = 0\ndef h(x):\n    global N\n    N += 1\n    return x * N * K['k']\n",
    "an array": "K = {'k': jnp.ones(())}\ndef h(x): return x * K['k']\n",
    "state": "K = {'k': 2.0}\ndef make():\n    s = [1.0]\n    def h(x):\n        s[0] += 1\n"
    "        return x * s[0] * K['k']\n    return h\nh = make()\n",
    "a method": "K = {'k': 2.0}\nclass M:\n    def go(self, x): return x * K['k']\nm = M()\ndef h(x): return m.go(x)\n",
    "a class": "K = {'k': 2.0}\nclass M:\n    def __init__(self, x): self.x = x * K['k']\ndef h(x): return M(x).x\n",
    "a static method": "K = {'k': 2.0}\nclass M:\n    @staticmethod\n    def go(x): return x * K['k']\n"
    "def h(x): return M.go(x)\n",
    "a partial": "K = {'k': 2.0}\ndef g(a, x): return x * a * K['k']\nh = functools.partial(g, 3.0)\n",
    "a decorator": "K = {'k': 2.0}\ndef deco(f):\n    @functools.wraps(f)\n    def w(x): return f(x)\n    return w\n"
    "@deco\ndef h(x): return x * K['k']\n",
    "a cache": "K = {'k': 2.0}\n@functools.cache\ndef t(n): return n * K['k']\ndef h(x): return x * t(3)\n",
    "a recursion": "K = {'k': 2.0}\ndef h(x, n=3): return h(x, n - 1) * K['k'] if n else x\n",
    "a module's name": "K = {'k': 2.0}\nmod = types.SimpleNamespace()\ndef g(x): return x * K['k']\nmod.g = g\n"
    "def h(x): return mod.g(x)\n",
}


@pytest.mark.quick(8)
@pytest.mark.parametrize("helper", HELPERS)
def test_what_the_body_does_outside_it_does_once(helper: str, tmp_path):
    m = module(
        COUNT
        + HELPERS[helper]
        + "def f(path, x):\n    with open(path, 'a') as file: file.write('a')\n    return h(x)\n"
    )
    path = str(tmp_path / "file")
    graftax.jit(m.f, warn_impure=False)(path, jnp.ones(2))
    with open(path) as file:
        assert file.read() == "a"


@pytest.mark.parametrize("helper", HELPERS)
def test_and_the_program_is_right(helper: str):
    source = COUNT + HELPERS[helper] + "def f(x): return h(x)\n"
    change = (lambda m: None) if helper == "a cache" else (lambda m: m.K.update(k=5.0))
    beside(Program(source, change, ("K", "N")))


def test_what_no_code_has_read_is_no_root():
    m = module(
        "import sys\nFILE, LOG = [sys.stdin], []\nK = {'k': 2.0}\ndef h(x): return x * K['k']\n"
        "def reads(x): return x + len(FILE[0].read())\ndef logs(x): return x + len(LOG)\n"
        "def f(x, mode=0):\n    if mode == 1: return reads(x)\n    if mode == 2: return logs(x)\n    return h(x)\n"
    )
    f = graftax.jit(m.f)
    for i in range(4):
        assert f(jnp.ones(2)).tolist() == [2.0, 2.0]
        m.LOG.append(i)
    assert f.cache_info().traces == 1
    assert f(jnp.ones(2), 2).tolist() == [5.0, 5.0]
    m.LOG.append(0)
    assert f(jnp.ones(2), 2).tolist() == [6.0, 6.0]
