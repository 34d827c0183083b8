# SPDX-License-Identifier: Apache-2.0
"""What JAX does not open among the values of a `filter_*` transform, and neither does Equinox: functions, objects."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

from graftax import _core
from graftax._base.handles import handle_classes
from graftax._graph.module import Module
from graftax._graph.structure import Op, Row, Structure
from graftax._jax.compat import is_tree_node

FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinMethodType, functools.partial)


def leaves_in_functions(program: _core.GraphDef | _core.Outcome) -> set[int]:
    """The leaves that are reached through functions alone: arrays that they capture."""
    return _leaves_below(program, lambda row: row.type in FUNCTIONS)


def leaves_in_values(program: _core.GraphDef | _core.Outcome) -> set[int]:
    """The leaves that are reached through functions and objects of plain classes alone.

    Objects of `graftax.Module` and handles are opened as trees are.
    """
    return _leaves_below(program, _is_value)


def _is_value(row: Row) -> bool:
    cls = row.type
    return isinstance(cls, type) and not (is_tree_node(cls) or issubclass(cls, Module) or cls in handle_classes())


def _leaves_below(program: _core.GraphDef | _core.Outcome, is_top: Callable[[Row], bool]) -> set[int]:
    structure = Structure(program)
    tops = [row for row in structure.rows if row.op is Op.node and is_top(row)]
    inside = {row.leaf for top in tops for row in structure.below(top) if row.op is Op.leaf}
    return inside - _outside(structure, is_top) if inside else inside


def _outside(structure: Structure, is_top: Callable[[Row], bool]) -> set[int]:
    """The leaves that are reached without such a node: what it shares may have been met in it first."""
    found, seen = set[int](), set[int]()
    stack = structure.roots
    while stack:
        row = structure.target(stack.pop())
        if row.number in seen:
            continue
        seen.add(row.number)
        if row.op is Op.leaf:
            found.add(row.leaf)
        elif row.op is Op.node and not is_top(row):
            stack.extend(structure.children(row))
    return found
