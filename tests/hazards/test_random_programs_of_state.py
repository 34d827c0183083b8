# SPDX-License-Identifier: Apache-2.0
"""Random programs of classes, enums, caches, registries, descriptors and threads' state, plainly and jitted."""

import pytest

from random_programs import compare, make

FOUND = [93, 94]  # a table of `singledispatch`; an attribute that a class has of its metaclass only


@pytest.mark.quick(6)
@pytest.mark.parametrize("seed", [*FOUND, *range(1030, 1060)])
def test_a_random_program_does_the_same_jitted(seed: int):
    program = make(seed)
    found = compare(program)
    assert found.difference is None, f"{program.source}\n{program.steps}\n{found.difference}"
    assert found.compared or found.refused
