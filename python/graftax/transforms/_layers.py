# SPDX-License-Identifier: Apache-2.0
"""A loop over objects, such as the layers of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import _core
from .._difference import differences_text
from .._errors import StructureError
from .._stacking import stacked
from ..surgery import update
from ._lift import name_of
from ._slices import as_pair

OTHER_LENGTH = "{name}: there are {count} objects, and length={length}."
OTHER_LAYER = (
    "{name}: a step may change arrays of the object that it is given, and changed its structure:\n{lines}\n"
    "Make what differs a jax.Array."
)


def scan_objects(scan: Callable[..., Any], f: Any, init: Any, objects: list[Any], length: Any, **options: Any) -> Any:
    """A scan over the objects, stacked; what the steps change of them is written back to each."""
    name = name_of(f, "scan")
    if length is not None and length != len(objects):
        raise ValueError(OTHER_LENGTH.format(name=name, count=len(objects), length=length))

    def step(carry: Any, obj: Any) -> Any:
        _, structure = _core.flatten(obj)
        carry, y = as_pair(name, f(carry, obj))
        _, now = _core.flatten(obj)
        if now != structure:
            raise StructureError(OTHER_LAYER.format(name=name, lines=differences_text(structure, now)))
        return carry, y

    step.__name__ = step.__qualname__ = getattr(f, "__qualname__", type(f).__qualname__)
    layers = stacked(name, objects)
    before, _ = _core.flatten(layers)
    carry, ys = scan(step, init, layers, **options)
    after, _ = _core.flatten(layers)
    new = {i: b for i, (a, b) in enumerate(zip(before, after, strict=True)) if a is not b}
    if new:
        for number, obj in enumerate(objects):
            leaves, structure = _core.flatten(obj)
            rows = [new[i][number] if i in new else None for i in range(len(leaves))]
            update(obj, _core.unflatten(structure, rows))
    return carry, ys
