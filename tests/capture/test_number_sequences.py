# SPDX-License-Identifier: Apache-2.0
"""A sample of what `tests/support/number_sequences.py` tries: numbers near boundaries, as in plain Python."""

from __future__ import annotations

import pytest

import number_sequences


@pytest.mark.quick(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(100, 106))
def test_each_call_has_the_outcome_of_plain_python(seed: int):
    sequence = number_sequences.make(seed)
    _, difference = number_sequences.compare(sequence)
    assert not difference.startswith("at "), f"{sequence.source}\n{difference}"
