# SPDX-License-Identifier: Apache-2.0
"""The `repr` of an Optax transformation. It is a pair of functions, whose closures hold its settings."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any, cast

from graftax._base.class_lookup import in_mro

_DEPTH = 8  # of transformations in each other
_WRAPPER = "with_extra_args_support"  # what Optax puts around others to pass arguments on


def is_transformation(value: object) -> bool:
    """Is this the pair of functions that Optax calls a GradientTransformation?"""
    return isinstance(value, tuple) and in_mro(type(value), "_fields") == ("init", "update")


def transformation_text(tx: object) -> str:
    """The steps of a transformation, in order: `clip(max_delta=1.0), scale(step_size=-0.1)`."""
    return ", ".join(_texts(tx, 0)) or type(tx).__name__


def _texts(tx: object, depth: int) -> Iterator[str]:
    # Optax has no class for each transformation: its name and its settings are those of the closure of `update`.
    update = tx if isinstance(tx, types.FunctionType) else getattr(tx, "update", None)
    if isinstance(update, types.FunctionType):
        name, values = _owner(update), _closure_values(update)
    else:
        name, values = type(tx).__name__, dict(getattr(tx, "__dict__", {}))
    if depth > _DEPTH:
        yield "…"
    elif name == _WRAPPER and is_transformation(values.get("tx")):
        yield from _texts(values["tx"], depth)
    elif name == "chain" and isinstance(values.get("update_fns"), tuple):
        for inner in values["update_fns"]:
            yield from _texts(inner, depth + 1)
    else:
        settings = [text for key, value in values.items() if (text := _setting(key.lstrip("_"), value, name, depth))]
        yield f"{name}({', '.join(settings)})" if settings else name


def _setting(key: str, value: object, name: str, depth: int) -> str | None:
    """One setting of a transformation as text. None for empty defaults and for the transformation's own functions."""
    if is_transformation(value):
        return f"{key}=[{', '.join(_texts(value, depth + 1))}]"
    if isinstance(value, Mapping):
        texts = [_setting(str(k), v, name, depth) for k, v in cast("Mapping[Any, Any]", value).items()]
        return ", ".join(text for text in texts if text) or None
    if type(value) in (int, float, str) and value:
        return f"{key}={value!r}"
    if not isinstance(value, types.FunctionType):
        return None
    # Optax puts a schedule into a function that changes its sign.
    inner = _closure_values(value).get("learning_rate")
    value = inner if isinstance(inner, types.FunctionType) else value
    owner = _owner(value)
    # A function of the transformation's own, such as a schedule that it made from a number, shows as its numbers.
    if owner.partition(".")[0] == name:
        return ", ".join(f"{k}={v!r}" for k, v in _closure_values(value).items() if type(v) in (int, float)) or None
    return None if owner == "<lambda>" else f"{key}={owner}"


def _owner(function: types.FunctionType) -> str:
    """The function of Optax that made this one."""
    return function.__qualname__.partition(".<locals>")[0]


def _closure_values(function: types.FunctionType) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        # A cell is empty until its variable is assigned.
        except ValueError:
            continue
    return values
