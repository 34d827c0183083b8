# SPDX-License-Identifier: Apache-2.0
"""Damaged input: some for each of readers.py, and what was once answered in a wrong way."""

import random

import pytest

import readers
from sizes import sized
from watchdog import isolated


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", readers.READERS)
@isolated()
def test_damaged_input_is_an_error_of_the_kinds_that_are_promised(name):
    given = readers.prepare(name)
    for number in range(sized(2_000, 100)):
        rng = random.Random(number)
        data = readers.damaged(rng.choice(given), rng)
        try:
            readers.attempt(name, data)
        except Exception as error:
            raise AssertionError(f"{name} of {data!r}") from error


@pytest.mark.parametrize("name", sorted(p.name for p in readers.CORPUS.glob("*")))
@isolated()
def test_what_was_found_once(name):
    readers.prepare(name)
    for file in sorted((readers.CORPUS / name).iterdir()):
        try:
            readers.attempt(name, file.read_bytes())
        except Exception as error:
            raise AssertionError(str(file)) from error
