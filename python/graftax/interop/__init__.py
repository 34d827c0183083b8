# SPDX-License-Identifier: Apache-2.0
"""Adapters for other libraries: one module for each, imported after the library itself."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from graftax._base.type_record import Description, TreeDescription

# The module that has to be imported for an adapter to apply. `import flax` alone imports neither NNX nor train states.
ADAPTERS = {
    "brainstate": ".brainstate",
    "equinox": ".equinox",
    "flarejax": ".flarejax",
    "flax.core.spmd": ".linen",
    "flax.nnx": ".nnx",
    "flax.training.train_state": ".train_state",
}


class LibraryFilter(NamedTuple):
    """A filter of another library: the values that it is applied to, and the test."""

    value_types: type | tuple[type, ...]  # objects of these types are tested as a whole; elsewhere each leaf is
    accepts: Callable[[tuple[Any, ...], Any], Any]  # takes (the plain keys of the path, the value)


def library_filter(spec: object) -> LibraryFilter | None:
    """The filter in an object of an imported library. None if no adapter knows it."""
    return _first_answer("library_filter", spec)


def path_filter(spec: object) -> LibraryFilter | None:
    """The filter that an imported library makes of a function of (path, value)."""
    return _first_answer("path_filter", spec)


def choices(spec: object) -> list[tuple[Any, Any]] | None:
    """The (filter, entry) pairs of a library's object that gives options by filter, such as `nnx.StateAxes`."""
    return _first_answer("choices", spec)


def differentiated(spec: object) -> tuple[int, Any] | None:
    """(argument number, filter) of a library's object that selects what is differentiated, such as `nnx.DiffState`."""
    return _first_answer("differentiated", spec)


def axes(node: object) -> Any:
    """The `PartitionSpec` in a library's object that holds an array. None if it has none."""
    return _first_answer("axes", node)


# Fields that printed paths leave out, since users do not write them. Each adapter adds its own when it is imported. In
# Flax NNX `layer.kernel` names a Variable, and also the array in its field `_raw_value`.
UNSPOKEN: set[str] = set()


def value_field(obj: object) -> str | None:
    """The field of an object that holds its value, such as the array of a Variable."""
    return _first_answer("value_field", obj)


def is_module(obj: object) -> bool:
    """Is this a module of an imported library, such as a layer or a model?"""
    # An adapter that does not know the object answers None, not False: another one may know it.
    return _first_answer("is_module", obj) is True


def is_trained(holders: Iterable[object]) -> bool:
    """Is an array in these objects, the innermost first, trained by default? A library may mark what is not."""
    answers = (_first_answer("is_trained", holder) for holder in holders)
    return next((answer for answer in answers if answer is not None), True)


def items(obj: object) -> list[Any] | None:
    """The items of a library's own list type. None for other objects."""
    return _first_answer("items", obj)


def refuse_around(name: str) -> None:
    """Raises if the call is inside of a library's context that only its own transforms support."""
    _first_answer("refuse_around", name)


def is_carry(spec: object) -> bool:
    """Is this a library's own mark for the carry of a loop?"""
    return _first_answer("is_carry", spec) is True


def none_for_empty(graph: object) -> Any:
    """The graph with None in place of a library's array objects that are empty."""
    answer = _first_answer("none_for_empty", graph)
    return graph if answer is None else answer


def prefix(spec: object) -> Any:
    """The graph of a library's own prefix object, with its entries in place of arrays."""
    return _first_answer("prefix", spec)


def with_axis_names(function: Any, in_axes: Any, out_axes: Any, names: Any) -> Any:
    """A function that removes the name of the mapped axis from its arguments, and adds it to its result.

    Raises:
        TypeError: if no imported library keeps axis names.
    """
    wrapped = _first_answer("with_axis_names", function, in_axes, out_axes, names)
    if wrapped is None:
        raise TypeError(f"transform_metadata={names!r} is for the Variables of Flax NNX, which is not imported")
    return wrapped


def describe(cls: type) -> Description | None:
    """How the core treats a class of an imported library. None if no adapter knows it.

    If a version of the library lacks a name that the adapter imports, its classes are treated as in JAX: as registered
    nodes.
    """
    return _first_answer("describe", cls)


def tree_fields(cls: type, flatten: object, unflatten: object) -> TreeDescription | None:
    """How to read and write a class registered with JAX by its fields, if that is equal to its flatten function."""
    return _first_answer("tree_fields", cls, flatten, unflatten)


def _first_answer(name: str, *args: object) -> Any:
    """The first answer of an adapter that has this function."""
    for module in _adapters():
        function = getattr(module, name, None)
        answer = function and function(*args)
        if answer is not None:
            return answer
    return None


def have_errors() -> bool:
    """Is a library imported that raises errors inside of running computations?"""
    return any(hasattr(module, "raises") for module in _adapters())


def raises_its_own(host: object) -> bool:
    """Is this the host function by which a library raises its own errors when the computation runs?"""
    return any(module.raises(host) for module in _adapters() if hasattr(module, "raises"))


def own_error(error: BaseException) -> BaseException | None:
    """The library's own error that JAX has wrapped in one of its own."""
    return _first_answer("own_error", error)


def _adapters() -> Iterator[ModuleType]:
    for library, adapter in ADAPTERS.items():
        # No object can be of a library that the program has not imported, and importing one here takes seconds.
        if library not in sys.modules:
            continue
        try:
            yield importlib.import_module(adapter, __name__)
        except ImportError:  # a version of the library without a name that the adapter imports
            continue
