# SPDX-License-Identifier: Apache-2.0
"""A module that is imported by the body of a traced function: what it holds counts as if it had been imported above."""

from __future__ import annotations

import importlib
import itertools
import sys

import jax.numpy as jnp
import pytest

import graftax
from programs import Program, beside, module, values

BODY = """
import jax.numpy as jnp
rate, table, calls = 2.0, [1.0], 0
weights = jnp.full(2, 3.0)
class Config:
    sizes = [4.0]
def scaled(x):
    global calls
    calls += 1
    return x * rate * Config.sizes[0]
"""
NUMBER = itertools.count()
FORMS = {
    "import": "import {name}\n        m = {name}\n",
    "import as": "import {name} as m\n",
    "from": "from {name} import rate, table, scaled, weights\n        import {name} as m\n",
    "submodule": "import {package}.inner as m\n",
    "from a package": "from {package} import inner as m\n",
    "import_module": "m = importlib.import_module('{name}')\n",
    "__import__": "m = __import__('{name}')\n",
}
CHANGES = {
    "a number": lambda m: setattr(m, "rate", 3.0),
    "a list in place": lambda m: m.table.append(5.0),
    "a class attribute in place": lambda m: m.Config.sizes.insert(0, 7.0),
    "an array": lambda m: setattr(m, "weights", jnp.zeros(2)),
    "a function": lambda m: setattr(m, "scaled", lambda x: x * 11),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded_modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - loaded_modules:
        if name.startswith("graftax_test_"):
            del sys.modules[name]


def written(folder):
    """The names of a module and of a package with a module, which nobody has imported."""
    number = next(NUMBER)
    name, package = f"graftax_test_module_{number}", f"graftax_test_package_{number}"
    (folder / f"{name}.py").write_text(BODY)
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("")
    (folder / package / "inner.py").write_text(BODY)
    importlib.invalidate_caches()
    return name, package


def run(folder, form, change, wrap):
    name, package = written(folder)
    source = f"""
    import importlib
    def helper(x):
        {FORMS[form].format(name=name, package=package)}
        return m.scaled(x), len(m.table), m.weights * x
    def f(x): return helper(x)
    """
    imported = f"{package}.inner" if "package" in FORMS[form] else name

    def change_it(_):
        change(sys.modules[imported])

    outs = []
    f = wrap(module(source).f)
    for each in (lambda _: None, change_it, change_it):
        each(None)
        for _ in range(2):
            outs.append(values(f(jnp.ones(2))))
            outs.append([values(getattr(sys.modules[imported], name)) for name in ("calls", "weights", "table")])
    return outs


@pytest.mark.quick(4)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("form", FORMS)
def test_what_a_module_holds_that_is_imported_inside(folder, form, change):
    assert run(folder, form, change, graftax.jit) == run(folder, form, change, lambda f: f)


def test_a_relative_import(folder):
    outs = []
    for wrap in (graftax.jit, lambda f: f):
        _, package = written(folder)
        (folder / package / "outer.py").write_text(
            "def f(x):\n    from .inner import rate, table\n    return x * rate * table[0]\n"
        )
        outer = importlib.import_module(f"{package}.outer")
        f, out = wrap(outer.f), []
        for value in (1.0, 2.0, 3.0):
            out.append(f(jnp.ones(1)).tolist())
            inner = sys.modules[f"{package}.inner"]
            inner.table[0], inner.rate = value, value
        outs.append(out)
    assert outs[0] == outs[1]


def test_a_module_that_fails_fails_as_in_plain_python(folder):
    name, _ = written(folder)
    (folder / f"{name}.py").write_text("raise ValueError('broken')\n")
    importlib.invalidate_caches()
    source = f"""
        def f(x):
            try:
                import {name}
            except ValueError as error:
                return x, str(error)
    """
    beside(Program(source))


def test_an_array_that_a_module_makes_is_no_tracer(folder):
    name, _ = written(folder)
    f = graftax.jit(lambda x: x * importlib.import_module(name).weights)
    assert f(jnp.ones(2)).tolist() == [3.0, 3.0]
    assert sys.modules[name].weights.tolist() == [3.0, 3.0]
