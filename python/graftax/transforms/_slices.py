# SPDX-License-Identifier: Apache-2.0
"""What a loop goes over, and what its steps give, one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .. import _core
from .._compat import is_dimension
from .._difference import describe, differences
from .._errors import StructureError
from .._structure import Place, place_name
from ._state import type_text, with_arrays

NOT_A_PAIR = (
    "{name}: the function has to return a pair (carry, y), and returned {found}. Return (carry, None) for no y."
)
NOT_SLICED = (
    "{name}: {path} is a scalar and has no rows to go over. What is the same in each step belongs into the carry or "
    "the closure; a Python number in xs is the same in each step."
)
OTHER_LENGTH = "{name}: {path} has {count} rows and {first} means {length}. All arrays of xs have as many rows."
NO_LENGTH = (
    "{name}: xs holds no array, so the number of steps is not known: pass length=, or arrays with a row for each step "
    "(jnp.arange(n) for a range)."
)
WRONG_LENGTH = "{name}: length={given!r}: expected a whole number of steps, 0 or more."
OTHER_ELEMENTS = "{name}: the function has to return the same structure each time, and does not:\n{differences}"


class Slices(NamedTuple):
    """What a loop goes over: `x` is a new graph in each step."""

    leaves: list[Any]
    graphdef: _core.GraphDef
    length: int
    names: list[str]

    @staticmethod
    def of(name: str, xs: Any, length: int | None) -> Slices:
        if length is not None and not isinstance(length, Tracer) and type(length) is not int:
            length = _whole(name, length)
        if isinstance(length, int) and length < 0:
            raise ValueError(WRONG_LENGTH.format(name=name, given=length))
        leaves, graphdef = _core.record((xs,), ("xs",), [0], None)
        names, first = [place_name(place, ("xs",)) for place in graphdef.leaf_places()], ""
        for leaf, place in zip(leaves, names, strict=True):
            shape = np.shape(leaf)
            if not shape:
                raise ValueError(NOT_SLICED.format(name=name, path=place))
            if length is None:
                length, first = shape[0], place
            elif shape[0] != length:
                other = first or f"length={length}"
                raise ValueError(OTHER_LENGTH.format(name=name, path=place, count=shape[0], first=other, length=length))
            first = first or place
        if length is None:
            raise ValueError(NO_LENGTH.format(name=name))
        return Slices([x.copy() if isinstance(x, np.ndarray) else x for x in leaves], graphdef, length, names)

    @property
    def asked(self) -> int | None:
        """What JAX is told: it takes a symbolic number of rows from the arrays only."""
        return None if self.leaves else self.length

    def rebuilt(self, rows: Sequence[Any]) -> Any:
        return _core.unflatten(self.graphdef, list(rows))


def _whole(name: str, length: Any) -> Any:
    """A number of steps, as JAX takes it: 3.0 is 3, and a symbolic one is itself."""
    if is_dimension(type(length)):
        return length
    with contextlib.suppress(TypeError, ValueError):
        if int(length) == length:
            return int(length)
    raise ValueError(WRONG_LENGTH.format(name=name, given=length))


def as_pair(name: str, result: Any) -> tuple[Any, Any]:
    several = type(result) in (tuple, list)
    if not several or len(result) != 2:
        raise TypeError(NOT_A_PAIR.format(name=name, found=type_text(result) + f" of {len(result)}" * several))
    return cast("tuple[Any, Any]", result)


def plain_scan(name: str, f: Callable[..., Any], carry: Any, slices: Slices, reverse: bool) -> tuple[Any, Any]:
    """The loop in Python, on the caller's own objects: what `jax.disable_jit` asks for."""
    ys: list[tuple[list[Any], _core.GraphDef]] = []
    for i in reversed(range(slices.length)) if reverse else range(slices.length):
        carry, y = as_pair(name, f(carry, slices.rebuilt([leaf[i] for leaf in slices.leaves])))
        ys.append(_core.flatten(with_arrays(y)))
    ys = ys[::-1] if reverse else ys
    changing = {d.path for _, graphdef in ys for d in differences(ys[0][1], graphdef, ("y",))}
    if changing:  # numbers that the steps change: a compiled loop traces them

        def changes(place: Place) -> bool:
            return place_name(place, ("y",)) in changing

        ys = [_core.record((_core.unflatten(g, y),), ("y",), [0], None, dynamic=changes) for y, g in ys]
    for _, graphdef in ys:
        if graphdef != ys[0][1]:
            text = describe(ys[0][1], graphdef, ("y",))
            raise StructureError(OTHER_ELEMENTS.format(name=name, differences=text))
    columns = zip(*(leaves for leaves, _ in ys), strict=True)
    return carry, _core.unflatten(ys[0][1], [jnp.stack([jnp.asarray(x) for x in column]) for column in columns])
