# SPDX-License-Identifier: Apache-2.0
"""Leaves within functions and plain objects, which neither JAX nor Equinox opens. `filter_*` treats them as values."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

from graftax import _core
from graftax._base.handles import HANDLE_CLASSES
from graftax._graph.module import Module
from graftax._graph.structure import Op, Row, Structure
from graftax._jax.tree_registry import is_tree_node

FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinMethodType, functools.partial)


def leaves_in_functions(program: _core.GraphDef | _core.Outcome) -> set[int]:
    """The leaves that are reached only through functions, which capture them."""
    return _leaves_below(program, lambda row: row.type in FUNCTIONS)


def leaves_in_values(program: _core.GraphDef | _core.Outcome) -> set[int]:
    """The leaves that are reached only through functions and objects of plain classes.

    Objects of `graftax.Module` and handles are opened like pytrees.
    """
    return _leaves_below(program, _is_value)


def _is_value(row: Row) -> bool:
    cls = row.type
    return isinstance(cls, type) and not (is_tree_node(cls) or issubclass(cls, Module) or cls in HANDLE_CLASSES)


def _leaves_below(program: _core.GraphDef | _core.Outcome, is_top: Callable[[Row], bool]) -> set[int]:
    structure = Structure(program)
    # Most programs have none of these nodes: only then is the whole structure walked again.
    tops = [row for row in structure.rows if row.op is Op.node and is_top(row)]
    opaque_leaves = {row.leaf for top in tops for row in structure.subtree(top) if row.op is Op.leaf}
    return opaque_leaves - _leaves_reached_elsewhere(structure, is_top) if opaque_leaves else opaque_leaves


def _leaves_reached_elsewhere(structure: Structure, is_top: Callable[[Row], bool]) -> set[int]:
    """The leaves that can be reached without passing such a node, even if the recording met them in one first."""
    leaves, visited = set[int](), set[int]()
    stack = structure.roots
    while stack:
        row = structure.target(stack.pop())
        if row.number in visited:
            continue
        visited.add(row.number)
        if row.op is Op.leaf:
            leaves.add(row.leaf)
        elif row.op is Op.node and not is_top(row):
            stack.extend(structure.children(row))
    return leaves
