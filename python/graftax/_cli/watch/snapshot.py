# SPDX-License-Identifier: Apache-2.0
"""Snapshots of values. Arrays are held weakly, so that watching keeps none alive."""

from __future__ import annotations

import re
import types
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from graftax import _core
from graftax._base.key_path import keystr
from graftax._capture.bytecode import globals_in
from graftax._graph.structure_diff import differences_text

_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_MAX_DIFFERENCES = 3  # differences that are named


class Snapshot:
    """The structure of named values, and their arrays. Values that cannot be walked are left out."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._names = tuple(values)
        self._parts: dict[str, tuple[list[Any], _core.GraphDef]] = {}
        for name, value in values.items():
            try:
                leaves, graphdef = _core.flatten(value)
            # graftax does not take every value, and a flatten of the user's may raise.
            except Exception:
                continue
            self._parts[name] = [_reference(leaf) for leaf in leaves], graphdef

    def differences(self, values: dict[str, Any]) -> list[str]:
        """The differences of `values` to the snapshot, as texts."""
        lines: list[str] = []
        for name, (leaves, graphdef) in self._parts.items():
            if name not in values:
                continue
            try:
                leaves_now, graphdef_now = _core.flatten(values[name])
            except Exception:
                continue
            # Another structure, or another static value; with an equal structure, leaves are compared by identity.
            if graphdef != graphdef_now:
                text = differences_text(graphdef, graphdef_now, (name,), limit=_MAX_DIFFERENCES)
                lines += [re.sub(r": expected (.*), given ", r" was \1, is ", x.strip()) for x in text.splitlines()]
                continue
            pairs = enumerate(zip(leaves, leaves_now, strict=True))
            changed = [i for i, (leaf, current_leaf) in pairs if leaf() is not current_leaf]
            paths = graphdef.leaf_places() if changed else []
            lines.extend(f"{name}{keystr(paths[i][1])}: another array" for i in changed)
        return lines[:_MAX_DIFFERENCES]

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """(path, array) of each array that is still there, each once."""
        visited: set[int] = set()
        for name, (leaves, graphdef) in self._parts.items():
            for leaf, (_, path) in zip(leaves, graphdef.leaf_places(), strict=True):
                array = leaf()
                if isinstance(array, (jax.Array, np.ndarray)) and id(array) not in visited:
                    visited.add(id(array))
                    yield f"{name}{keystr(path)}", array


def captured(function: Any) -> dict[str, Any]:
    """The closure variables of a function and the globals that it names, except functions, classes and modules."""
    if not isinstance(function, types.FunctionType):
        return {}
    values: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    # A name of the closure hides a global of the same name.
    for name in globals_in(function.__code__)[0]:
        if name in function.__globals__:
            values.setdefault(name, function.__globals__[name])
    # What is callable and can be lowered is a jitted function.
    return {
        name: value
        for name, value in values.items()
        if not (isinstance(value, _CODE) or (callable(value) and hasattr(value, "lower")))
    }


def _reference(leaf: Any) -> Any:
    try:
        return weakref.ref(leaf)
    # A NumPy scalar cannot be referred to weakly. It holds no more than its number.
    except TypeError:
        return lambda: leaf
