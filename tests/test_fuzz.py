# SPDX-License-Identifier: Apache-2.0
"""Damaged input: a few of the cases of fuzz.py, and those that were once answered in a wrong way."""

import pytest

import fuzz
from hazards.watchdog import isolated
from sizes import sized


@pytest.mark.parametrize("name", fuzz.TARGETS)
@isolated()
def test_damaged_input_is_an_error_of_the_kinds_that_are_promised(name):
    count, found = fuzz.fuzz(name, 60, 0, sized(2_000, 100))
    assert count and not found


@pytest.mark.parametrize("name", sorted(p.name for p in fuzz.CORPUS.glob("*")))
@isolated()
def test_what_was_found_once(name):
    for file in sorted((fuzz.CORPUS / name).iterdir()):
        data = file.read_bytes()
        assert fuzz.attempt(fuzz.TARGETS[name], data.decode() if name == "patterns" else data) is None, file
