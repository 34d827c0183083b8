# SPDX-License-Identifier: Apache-2.0
"""What Python 3.15 brought: lazy imports, frozen dicts, sentinels."""

from __future__ import annotations

import builtins
import sys
import types

import jax.numpy as jnp
import pytest

import graftax

pytestmark = pytest.mark.skipif(sys.version_info < (3, 15), reason="needs Python 3.15")

PROGRAM = """
lazy import lazily_imported as settings
lazy from lazily_imported import table
lazy import no_such_module_at_all as missing

def own(x): return x * settings.scale * table[0]
def helper(x): return x * settings.scale * table[0]
def through(x): return helper(x)
def guarded(x, wanted): return missing.f(x) if wanted else x
"""


@pytest.fixture
def program(monkeypatch):
    settings = types.ModuleType("lazily_imported")
    settings.scale, settings.table = 2.0, [3.0]
    monkeypatch.setitem(sys.modules, "lazily_imported", settings)
    scope = types.ModuleType("with_lazy_imports")
    exec(compile(PROGRAM, "with_lazy_imports.py", "exec"), vars(scope))
    monkeypatch.setitem(sys.modules, "with_lazy_imports", scope)
    return scope, settings


@pytest.mark.parametrize("name", ["own", "through"])
def test_a_lazily_imported_module_counts_as_any_other(program, name):
    scope, settings = program
    f = graftax.jit(getattr(scope, name))
    assert f(jnp.ones(())) == 6.0
    assert f(jnp.ones(())) == 6.0
    assert f.cache_info().traces == 1
    settings.table[0] = 4.0
    assert f(jnp.ones(())) == 8.0
    settings.scale = 3.0
    assert f(jnp.ones(())) == 12.0


def test_what_cannot_be_imported_is_an_error_where_it_is_used(program):
    f = graftax.jit(program[0].guarded)
    assert f(jnp.ones(()), False) == 1.0
    with pytest.raises(ImportError, match="no_such_module_at_all"):
        f(jnp.ones(()), True)


def test_a_frozen_dict_is_traced_where_it_holds_arrays_and_compared_elsewhere():
    frozen = builtins.frozendict
    f = graftax.jit(lambda d, x: (d["w"] * d["n"] * x, frozen(d, x=x)))
    for w, n in ((1.0, 2), (2.0, 2), (2.0, 3)):
        given = frozen(w=jnp.float32(w), n=n)
        product, out = f(given, 1.0)
        assert product == w * n
        assert type(out) is frozen and out == frozen(given, x=1.0)
    assert f.cache_info().traces <= 3


def test_a_sentinel_is_itself_inside_and_outside():
    absent = builtins.sentinel("absent")
    f = graftax.jit(lambda value, x: (x if value is absent else x * value, value))
    value, out = f(absent, jnp.ones(()))
    assert value == 1.0 and out is absent
    assert f(3.0, jnp.ones(()))[0] == 3.0
