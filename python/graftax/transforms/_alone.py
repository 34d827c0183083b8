# SPDX-License-Identifier: Apache-2.0
"""Functions among the values of a `filter_*` transform: JAX does not open them, and neither does Equinox."""

from __future__ import annotations

import functools
import types

from .. import _core
from .._structure import Op, Structure

FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinMethodType, functools.partial)


def leaves_in_functions(program: _core.GraphDef | _core.Outcome) -> set[int]:
    """The leaves that are reached through functions alone: arrays that they capture."""
    structure = Structure(program)
    tops = [row for row in structure.rows if row.op is Op.node and row.type in FUNCTIONS]
    inside = {row.leaf for top in tops for row in structure.below(top) if row.op is Op.leaf}
    return inside - _outside(structure) if inside else inside


def _outside(structure: Structure) -> set[int]:
    """The leaves that are reached without a function: what a function shares may have been met in it first."""
    found, seen = set[int](), set[int]()
    stack = structure.roots
    while stack:
        row = structure.target(stack.pop())
        if row.number in seen:
            continue
        seen.add(row.number)
        if row.op is Op.leaf:
            found.add(row.leaf)
        elif row.op is Op.node and row.type not in FUNCTIONS:
            stack.extend(structure.children(row))
    return found
