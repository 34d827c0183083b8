# SPDX-License-Identifier: Apache-2.0
"""The examples of training beside the same programs written with Equinox: the same numbers, and not more lines."""

import runpy
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PAIRS = ["agent", "gpt"]


def code_lines(path):
    lines = [line.strip() for line in path.read_text().splitlines()]
    return sum(bool(line) and not line.startswith("#") for line in lines)


def numbers(path):
    return np.asarray(runpy.run_path(str(path), run_name="imported")["main"]())


@pytest.mark.quick(0)  # the other takes ten seconds
@pytest.mark.parametrize("name", PAIRS)
def test_the_same_numbers_in_not_more_lines(name):
    pytest.importorskip("equinox")
    ours, theirs = ROOT / "examples" / f"{name}.py", ROOT / "benchmarks" / "training" / f"{name}_equinox.py"
    assert code_lines(ours) <= code_lines(theirs)
    np.testing.assert_allclose(numbers(ours), numbers(theirs), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["agent", "graph_network", "gpt", "kalman", "maml", "population"])
def test_an_example_has_80_to_200_lines_and_none_about_flattening(name):
    text = (ROOT / "examples" / f"{name}.py").read_text()
    assert 80 <= len(text.splitlines()) <= 200
    assert sum(word in line for line in text.splitlines() for word in ("tree_util", "flatten", "jax.tree")) <= 1
