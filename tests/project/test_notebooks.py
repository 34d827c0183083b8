# SPDX-License-Identifier: Apache-2.0
"""The tutorials as notebooks: they are what their pages and examples say, and they run from top to bottom."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("notebooks", ROOT / "tools" / "notebooks.py")
notebooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(notebooks)


@pytest.mark.quick(100)
@pytest.mark.parametrize("name", notebooks.SOURCES)
def test_a_notebook_is_written_from_its_source(name):
    kept = (notebooks.FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert kept == notebooks.notebook_text(name), "write it anew: python tools/notebooks.py"


@pytest.mark.quick(0)  # the blocks of the pages and the examples run by themselves
@pytest.mark.parametrize("name", notebooks.SOURCES)
def test_a_notebook_runs_from_top_to_bottom(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("__main__")  # as in a notebook, where all cells share their names
    monkeypatch.setitem(sys.modules, module.__name__, module)
    shown = types.ModuleType("IPython.display")
    shown.SVG = lambda path: Path(path).read_text(encoding="utf-8")
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    for cell in json.loads(notebooks.notebook_text(name))["cells"]:
        code = re.sub(r"^%pip .*$", "", "".join(cell["source"]), flags=re.MULTILINE)
        if cell["cell_type"] == "code" and "raises-exception" in cell["metadata"].get("tags", ()):
            with pytest.raises(Exception, match=r"\w"):
                exec(compile(code, name, "exec"), module.__dict__)
        elif cell["cell_type"] == "code":
            exec(compile(code, name, "exec"), module.__dict__)


def test_a_notebook_does_not_repeat_what_its_cells_print():
    page = "Text\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\nMore\n\n```text\nfile\n```\n"
    assert "".join(text for _, text in notebooks.cells_of_page(page)).split("```") == [
        "Text\n\nprint(1)\n\n\nMore\n\n",
        "text\nfile\n",
        "\n",
    ]


def test_a_line_that_raises_is_marked_for_the_notebook():
    cells = [notebooks._cell(0, "code", f"f(x)  # {text}") for text in ("TypeError: ... is of type", "ValueError", "3")]
    assert [bool(cell["metadata"]) for cell in cells] == [True, True, False]


def test_the_links_of_a_page_lead_from_the_folder_of_notebooks():
    text = "\n".join(
        source for _, source in notebooks.cells_of_page("See [a](show.md), [b](https://x.org) and [c](#d).")
    )
    assert text == "See [a](../show.md), [b](https://x.org) and [c](#d)."
