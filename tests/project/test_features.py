# SPDX-License-Identifier: Apache-2.0
"""Each cell of the README's table of features is what a program does with that library."""

from __future__ import annotations

import importlib.metadata

import pytest

pytest.importorskip("flarejax")
pytest.importorskip("brainstate")

import features

LINES = features.BLOCK.search(features.README.read_text(encoding="utf-8"))[2].splitlines()
CELLS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES]
WRITTEN_WITH = {
    "brainstate": "0.6",
    "equinox": "0.13",
    "flax": "0.12",
    "flarejax": "0.4",
    "jax": "0.12",
}  # others may differ in other versions


def test_the_table_has_the_rows_and_columns_of_the_programs():
    assert CELLS[0][1:] == [lib.name for lib in features.LIBRARIES]
    assert [line[0] for line in CELLS[2:]] == [*features.ROWS]


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", features.ROWS)
def test_a_row_is_what_the_programs_give(name):
    written = next(line for line in CELLS if line[0] == name)[1:]
    now = [features.cell(features.ROWS[name], lib) for lib in features.LIBRARIES]
    assert now[0] == written[0]
    if all(importlib.metadata.version(lib).startswith(version) for lib, version in WRITTEN_WITH.items()):
        assert now == written, "write the table anew: python tools/feature_table.py --write"


def test_a_program_that_raises_or_gives_something_else_holds_for_nothing():
    lib = features.LIBRARIES[0]
    assert features.cell(lambda lib, make: 1 / 0, lib) == features.NO
    assert features.cell(lambda lib, make: False, lib) == features.NO
    assert features.cell(lambda lib, make: True, lib) == features.YES


def test_objects_of_its_own_classes_alone_are_told_apart():
    lib = features.LIBRARIES[1]
    assert features.cell(lambda lib, make: make is lib.own, lib) == features.OWN
