# SPDX-License-Identifier: Apache-2.0
"""A loop over objects, such as the layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import _core
from .._difference import differences_text
from .._errors import StructureError
from .._stacking import Each, stacked
from ..surgery import update
from ._lift import name_of
from ._slices import as_pair

OTHER_LENGTH = "{name}: there are {count} objects, and length={length}."
OTHER_LAYER = (
    "{name}: a step may change arrays of the object that it is given, and changed its structure:\n{lines}\n"
    "Make what differs a jax.Array."
)


class Layers:
    """Objects of one structure as one, stacked; what is changed of it is written back to each."""

    def __init__(self, name: str, objects: list[Any]) -> None:
        self._name, self._objects, self.stacked = name, objects, stacked(name, objects)
        self._before, self._structure = _core.flatten(self.stacked)

    def write_back(self) -> None:
        """Writes the rows of the arrays that are other ones now.

        Raises:
            StructureError: where more than arrays has changed.
        """
        after, structure = _core.flatten(self.stacked)
        require_structure(self._name, self._structure, structure)
        new = {i: b for i, (a, b) in enumerate(zip(self._before, after, strict=True)) if a is not b}
        for number, obj in enumerate(self._objects if new else ()):
            leaves, structure = _core.flatten(obj)
            rows = [new[i][number] if i in new else None for i in range(len(leaves))]
            update(obj, _core.unflatten(structure, rows))


def require_structure(name: str, before: _core.GraphDef, after: _core.GraphDef) -> None:
    """Raises a StructureError where an object has another structure than before a step."""
    if after != before:
        raise StructureError(OTHER_LAYER.format(name=name, lines=differences_text(before, after)))


def scan_objects(scan: Callable[..., Any], f: Any, init: Any, objects: list[Any], length: Any, **options: Any) -> Any:
    """A scan over the objects, stacked; what the steps change of them is written back to each."""
    name = name_of(f, "scan")
    if length is not None and length != len(objects):
        raise ValueError(OTHER_LENGTH.format(name=name, count=len(objects), length=length))

    def step(carry: Any, obj: Any) -> Any:
        _, structure = _core.flatten(obj)
        carry, y = as_pair(name, f(carry, obj))
        require_structure(name, structure, _core.flatten(obj)[1])
        return carry, y

    step.__name__ = step.__qualname__ = getattr(f, "__qualname__", type(f).__qualname__)
    layers = Layers(name, objects)
    result = scan(step, init, layers.stacked, **options)
    layers.write_back()
    return result


def with_objects(name: str, call: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    """Calls with each `graftax.each(objects)` among the arguments as one object, stacked."""
    given = {i: Layers(name, arg.objects) for i, arg in enumerate(args) if isinstance(arg, Each)}
    result = call(*(given[i].stacked if i in given else arg for i, arg in enumerate(args)), **kwargs)
    for layers in given.values():
        layers.write_back()
    return result
