# SPDX-License-Identifier: Apache-2.0
"""Each error and warning has a page, and each refused value a page with its way out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from values.refused import KINDS

import graftax

FOLDER = Path(__file__).parents[2] / "docs" / "errors"
RAISED = [
    n for n, v in vars(graftax).items() if isinstance(v, type) and issubclass(v, Exception) and n != "GraftaxError"
]
TABLE = (FOLDER / "UnsupportedValueError.md").read_text(encoding="utf-8")
LINES = [line for line in TABLE.splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("name", RAISED)
def test_a_public_error_has_a_page_that_shows_it(name):
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {name}\n") and f"graftax.{name}" in text + "graftax.UnsupportedValueError"
    assert f"(errors/{name}.md)" in (FOLDER.parent / "errors.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name, _ in KINDS])
def test_a_refused_value_has_a_page(name):
    value = name.partition(": pass")[0].partition(": read")[0]
    lines = [line for line in LINES if value in line]
    assert lines, value
    page = re.search(r"\((refused-[a-z-]+\.md)\)", lines[0])[1]
    assert "graftax.UnsupportedValueError" in (FOLDER / page).read_text(encoding="utf-8")
