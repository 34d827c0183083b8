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

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinMethodType, functools.partial)


def leaves_in_functions(program: _core.GraphDef | _core.Outcome) -> set[int]:
    """The leaves that are reached only through functions, which capture them."""
    return _leaves_below(program, lambda row: row.type in _FUNCTIONS)


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
    opaque_leaves = {
        row.leaf
        for top in structure.rows
        if top.op is Op.node and is_top(top)
        for row in structure.subtree(top)
        if row.op is Op.leaf
    }
    # What can be reached without passing such a node is none of these, even if the recording met it in one first. Most
    # programs have no such node, and are not walked again.
    visited, stack = set[int](), structure.roots if opaque_leaves else []
    while stack:
        row = structure.target(stack.pop())
        if row.number in visited:
            continue
        visited.add(row.number)
        if row.op is Op.leaf:
            opaque_leaves.discard(row.leaf)
        elif row.op is Op.node and not is_top(row):
            stack.extend(structure.children(row))
    return opaque_leaves
