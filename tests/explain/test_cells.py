# SPDX-License-Identifier: Apache-2.0
"""Code of a notebook is named by its cell, not by the file that the kernel makes up."""

import sys
import types

import jax.numpy as jnp
import pytest

import graftax

FILE = "/tmp/ipykernel_20513/789667617.py"


@pytest.fixture
def cell(monkeypatch):
    """Runs code as the third cell of a notebook."""
    compiler = types.SimpleNamespace(format_code_name=lambda file: ("Cell", "In[3]") if file == FILE else None)
    shell = types.SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    return lambda code, names: exec(compile(code, FILE, "exec"), names)


def test_an_explanation_names_the_cell(cell):
    step = graftax.jit(lambda x: x + 1)
    cell("\nstep(x)", {"step": step, "x": jnp.ones(2)})
    assert "called at In[3], line 2\n" in str(graftax.explain(step))
    step(jnp.ones(3))
    assert "called at test_cells.py:" in str(graftax.explain(step))


def test_a_refused_value_that_is_used_in_a_cell(cell):
    names = {"graftax": graftax, "numbers": iter([1])}
    with pytest.raises(graftax.UnsupportedValueError, match=r"It is used at In\[3\], line 1\."):
        cell("graftax.jit(lambda numbers: next(numbers))(numbers)", names)
