# SPDX-License-Identifier: Apache-2.0
"""What a trace must not leave behind: a class that was made in it, and that holds its tracers."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from jax.core import Tracer

from graftax import _core
from graftax._base.errors import StructureError
from graftax._capture.constant_values import cells_of, defaults_of
from graftax._graph.structure import Op, Structure, place_name

CLASS_HOLDS_TRACER = (
    "{name} gives back {place}: {what} {cls}, which was made inside the traced function, and {where} holds an array "
    "that exists only while it is traced. Define the class outside, and keep the array as an attribute of the "
    "instance."
)


def refuse_tracers_in_classes(name: str, outcome: _core.Outcome) -> None:
    """Raises StructureError where a class of the result, or of what was written back, holds a tracer.

    The attributes of an instance come back as arrays. The attributes of a class, and what its methods capture, would
    stay tracers.
    """
    for cls in outcome.classes:
        holder = next(_tracers_of(cls), None)
        if holder is not None:
            path, description = _place_of(outcome, cls)
            raise StructureError(
                CLASS_HOLDS_TRACER.format(name=name, place=path, what=description, cls=cls.__qualname__, where=holder)
            )


def _tracers_of(cls: type) -> Iterator[str]:
    """Where a class holds tracers, as texts."""
    for base in cls.__mro__[:-1]:
        for attribute, value in list(vars(base).items()):
            if _holds_tracer(value):
                yield f"its attribute {attribute}"
            for function in _functions_of(value):
                state = [(f"the variable {variable}", content) for variable, content in cells_of(function).items()]
                for variable, content in (*state, ("a default", defaults_of(function))):
                    if _holds_tracer(content):
                        yield f"{function.__name__} (in {variable})"


def _holds_tracer(value: Any, depth: int = 3) -> bool:
    """Is it a tracer, or does it hold one in a few levels of containers?"""
    if isinstance(value, Tracer):
        return True
    if depth == 0 or type(value) not in (list, tuple, dict, set, frozenset):
        return False
    items = list(value.values()) if type(value) is dict else list(value)
    return any(_holds_tracer(item, depth - 1) for item in items)


def _functions_of(value: object) -> Iterator[types.FunctionType]:
    functions = (value.fget, value.fset, value.fdel) if isinstance(value, property) else (value,)
    for function in functions:
        function = getattr(function, "__func__", function)  # of a staticmethod or classmethod
        if isinstance(function, types.FunctionType):
            yield function


def _place_of(outcome: _core.Outcome, cls: type) -> tuple[str, str]:
    """(where the outcome has this class, "the class" or "an instance of"), for the message."""
    structure = Structure(outcome)
    for row in structure.rows:
        is_value = row.op is Op.static and row.value is cls
        if is_value or (row.op is Op.node and row.type is cls):
            # The first root of an outcome is the result, the others are what was written back.
            root, path = structure.root_path(row)
            description = "the class" if is_value else "an instance of"
            return place_name((0, path), ("result",)) if root == 0 else "what it changed", description
    return "a result", "an instance of"
