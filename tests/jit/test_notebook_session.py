# SPDX-License-Identifier: Apache-2.0
"""A session in a notebook: after each edit the result is that of plain Python, and only what changed compiles."""

import sys
import types

import pytest

import graftax

STEP = """
@jit
def step(params, x, mode="train"):
    {doc}
    hidden = helper(params["w"] * x) + offset  # {comment}
    params["n"] = params["n"] + 1
    return hidden * {factor} if mode == "train" else hidden
"""
HELPER = "def helper(x):\n    return jnp.{name}(x) * rate\n"
CALL = 'out = step(params, jnp.ones({size}), "{mode}").tolist()'


def step(doc="'text'", comment="why", factor=2):
    return STEP.format(doc=doc, comment=comment, factor=factor)


def call(size=3, mode="train"):
    return CALL.format(size=size, mode=mode)


SETUP = """
offset, rate = jnp.zeros(()), 1.0
params = {"w": jnp.ones(()), "n": jnp.zeros((), int)}
"""

# Each cell is followed by the call of the step before; how many programs that compiles.
SESSION = [
    (SETUP + HELPER.format(name="sin") + step(), call(), 1),
    ("", call(), 0),
    (step(), call(), 0),
    (step(comment="another reason"), call(), 0),
    (step(doc="'another text'"), call(), 0),
    ("\n\n\n" + step(), call(), 0),
    (step(doc=""), call(), 0),
    (step(factor=3), call(), 1),
    (step(), call(), 0),
    (step(factor=3), call(), 0),
    (step(factor="3.0"), call(), 1),
    (step(), call(), 0),
    ("offset = jnp.ones(())", call(), 0),
    ("offset = offset + 1", call(), 0),
    ("params['w'] = params['w'] * 2", call(), 0),
    ("params = {'w': jnp.zeros(()), 'n': jnp.ones((), int)}", call(), 0),
    (step(), call(), 0),
    ("", call(mode="test"), 1),
    (step(comment="of a test"), call(mode="test"), 0),
    ("", call(), 0),
    ("", call(size=5), 1),
    (step(comment="of five"), call(size=5), 0),
    ("", call(), 0),
    (HELPER.format(name="cos"), call(), 1),
    (step(), call(), 0),
    (step(comment="with cos"), call(mode="test"), 1),
    ("rate = 2.0", call(), 1),
    ("rate = 3.0", call(), 0),
    ("rate = 4.0", call(), 0),
    ("rate = 5.0", call(), 0),
    (step(), call(), 0),
    (step(doc="'once more'"), call(), 0),
    ("rate = 6.0", call(), 0),
    ("def helper(x):\n    return x * 0.5", call(), 1),
    (step(), call(), 0),
    ("other = step", call(), 0),
    (step() + "\nstep = other", call(), 0),
    ("params['extra'] = 'text'", call(), 1),
    (step(), call(), 0),
    ("del params['extra']", call(), 0),
    (step(comment="the last one"), call(), 0),
]


def notebook(monkeypatch, jit):
    module = types.ModuleType(f"notebook_of_{jit.__name__}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(module).update(jit=jit)
    exec("import jax, jax.numpy as jnp", vars(module))
    return vars(module)


def plain(function):
    return function


def run(cell, number, scope):
    exec(compile(cell, f"<cell {number}>", "exec"), scope)


@pytest.mark.quick(0)  # test_same_function.py has the parts
@pytest.mark.filterwarnings("ignore::graftax.RecompileWarning")
def test_an_edit_compiles_only_what_it_changes(monkeypatch):
    compiled, expected = notebook(monkeypatch, graftax.jit), notebook(monkeypatch, plain)
    counts = []
    for number, (cell, then, _) in enumerate(SESSION):
        for scope in (compiled, expected):
            run(cell, number, scope)
        before = compiled["step"].cache_info().traces
        for scope in (compiled, expected):
            run(then, number, scope)
        counts.append(compiled["step"].cache_info().traces - before)
        assert compiled["out"] == pytest.approx(expected["out"], rel=1e-6), f"cell {number}: {cell}"
        assert compiled["params"]["n"].item() == expected["params"]["n"].item()
    assert counts == [wanted for *_, wanted in SESSION]
