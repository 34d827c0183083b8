# SPDX-License-Identifier: Apache-2.0
"""Random programs of classes, enums, caches, registries, descriptors and threads' state, plainly and jitted."""

import pytest

from random_programs import compare, make

# A table of `singledispatch`; an attribute that a class has of its metaclass only; caches that a trace
# fills; members that the function gives a class; a cached number.
FOUND = [93, 4036, 20174, 94, 36, 3034, 3106, 119, 4095, 1025, 1091]


@pytest.mark.quick(6)
@pytest.mark.parametrize("seed", [*FOUND, *range(1030, 1060)])
def test_a_random_program_does_the_same_jitted(seed: int):
    program = make(seed)
    found = compare(program)
    assert found.difference is None, f"{program.source}\n{program.steps}\n{found.difference}"
    assert found.compared or found.refused
