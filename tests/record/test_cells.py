# SPDX-License-Identifier: Apache-2.0
"""Recorded calls of functions that stand in cells of a notebook, and in no file."""

from __future__ import annotations

import linecache
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from graftax._record.cells import is_cell, known_cells, load_cells

CELLS = Path(__file__).parents[1] / "support" / "recorded_cells.py"
CAUSES = {
    "closure": "model: log of -1 is nan at <ipython-input-2-",
    "lambda": "net: sqrt of -1 is nan at <ipython-input-2-",
    "gradient": "div of 0.5 and 0 is inf at <ipython-input-2-",
}


def run(*command: object, folder: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, *map(str, command)], env=env, capture_output=True, text=True, cwd=folder)


@pytest.mark.quick(0)
def test_calls_of_a_notebook_are_equal_in_another_process(tmp_path: Path):
    made = run(CELLS, tmp_path, folder=tmp_path)
    files = {file.name.split("-")[0]: file for file in tmp_path.glob("*.record")}
    assert sorted(files) == sorted(CAUSES), made.stderr
    for name, cause in CAUSES.items():
        again = run("-m", "graftax", "replay", files[name], folder=CELLS.parent)
        calls = [line for line in again.stdout.splitlines() if line.startswith("call ")]
        assert len(calls) == 3 and all("equal to what was recorded, bit for bit" in line for line in calls), (
            again.stdout + again.stderr
        )
        assert "not finite: result" in calls[-1] and "computed once" not in again.stdout
        assert cause in run("-m", "graftax", "replay", files[name], "--where", folder=CELLS.parent).stdout


def test_only_definitions_of_a_cell_run_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    text = (
        "import math\nsize = 3\ndata = load('all of it')\ndef f(x=missing): pass\ndef g(): return size\n"
        "h = lambda: g() + math.floor(0.5)\nfor i in range(3): raise SystemExit\n"
    )
    monkeypatch.setitem(linecache.cache, "<python-input-1>", (1, None, ["i = 1\n"], "<python-input-1>"))
    load_cells([["<ipython-input-1-ab>", text]])
    scope = vars(sys.modules["__main__"])
    assert scope["h"]() == 3 and not {"data", "f", "i"} & scope.keys()
    assert {cell.file for cell in known_cells()} >= {"<ipython-input-1-ab>", "<python-input-1>"}
    assert linecache.getline("<ipython-input-1-ab>", 2) == "size = 3\n"
    del linecache.cache["<ipython-input-1-ab>"]


def test_which_files_are_cells():
    cells = "<ipython-input-1-ab>", "/tmp/ipykernel_12/3456.py", "<python-input-0>"
    assert all(map(is_cell, cells)) and not any(map(is_cell, ("<string>", "train.py", "<stdin>", "<attrs generated>")))
