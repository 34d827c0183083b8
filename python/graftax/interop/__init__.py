# SPDX-License-Identifier: Apache-2.0
"""What graftax knows of other libraries: one module a library, imported only once that library is."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from graftax._base.type_record import Description, TreeDescription

ADAPTERS = {
    "equinox": ".equinox",
    "flarejax": ".flarejax",
    "flax.core.spmd": ".linen",
    "flax.nnx": ".nnx",
    "flax.training.train_state": ".train_state",
}


class LibraryFilter(NamedTuple):
    """A filter of another library: what it is asked about, and how."""

    of: type | tuple[type, ...]  # each object of this class is one value for it; elsewhere a leaf is
    asks: Callable[[tuple[Any, ...], Any], Any]  # (names, indices and keys from the root on, the value)


def library_filter(spec: Any) -> LibraryFilter | None:
    """The filter that an object of an imported library is; None where no adapter knows it."""
    return _first("library_filter", spec)


def path_filter(spec: Any) -> LibraryFilter | None:
    """The filter that a function of a path and a value is in an imported library."""
    return _first("path_filter", spec)


def choices(spec: Any) -> list[tuple[Any, Any]] | None:
    """(filter, entry) pairs of an object in which an imported library says what goes for which arrays."""
    return _first("choices", spec)


def differentiated(spec: Any) -> tuple[int, Any] | None:
    """(position, filter) of an object in which an imported library says what of an argument is differentiated."""
    return _first("differentiated", spec)


def axes(node: Any) -> Any:
    """The `PartitionSpec` that an imported library keeps in the object which holds an array; None where it has none."""
    return _first("axes", node)


NO_AXIS_NAMES = "transform_metadata={names!r} is for the Variables of Flax NNX, which is not imported"

# Names of fields that users do not spell: paths are printed without them. Each adapter adds its own when imported.
# Of Flax NNX `layer.kernel` is a Variable, and the array in it.
UNSPOKEN: set[str] = set()


def value_field(obj: Any) -> str | None:
    """The field of an object that its library's users take for its value."""
    return _first("value_field", obj)


def is_module(obj: Any) -> bool:
    """Is this a module of an imported library: a layer or a model, more than data?"""
    return _first("is_module", obj) is True


def is_trained(holder: Any) -> bool:
    """Is what an object holds trained where nothing is said? A library may know of statistics and caches."""
    return _first("is_trained", holder) is not False


def items(obj: Any) -> list[Any] | None:
    """The items of what an imported library has for a list; None for all else."""
    return _first("items", obj)


def refuse_around(name: str) -> None:
    """Raises where a library waits, around the call, for a transform of its own."""
    for module in _adapters():
        if (refuse := getattr(module, "refuse_around", None)) is not None:
            refuse(name)


def is_carry(spec: Any) -> bool:
    """Is this a library's own mark for what a loop carries?"""
    return _first("is_carry", spec) is True


def none_for_empty(graph: Any) -> Any:
    """A graph in which None stands for each of a library's objects for one array that holds none."""
    found = _first("none_for_empty", graph)
    return graph if found is None else found


def prefix(spec: Any) -> Any:
    """An object like the one that a library's own prefix object speaks of, with its entries in place of arrays."""
    return _first("prefix", spec)


def with_axis_names(function: Any, in_axes: Any, out_axes: Any, names: Any) -> Any:
    """A function that takes the name of the mapped axis off what it is given, and puts it on what it leaves.

    Raises:
        TypeError: where no imported library keeps names of axes beside arrays.
    """
    found = _first("with_axis_names", function, in_axes, out_axes, names)
    if found is None:
        raise TypeError(NO_AXIS_NAMES.format(names=names))
    return found


def describe(cls: type) -> Description | None:
    """How the core is to treat a class that an imported library made; None where no adapter knows it.

    An adapter imports the names that it needs. Where a version of the library lacks one, its classes are what they are
    to JAX: registered nodes.
    """
    return _first("describe", cls)


def tree_fields(cls: type, flatten: Any, unflatten: Any) -> TreeDescription | None:
    """How to read and write a class that is registered with JAX by name, where that does what its functions do."""
    return _first("tree_fields", cls, flatten, unflatten)


def _first(name: str, *args: Any) -> Any:
    """What the first adapter says that has this function, and an answer."""
    for module in _adapters():
        ask = getattr(module, name, None)
        found = ask and ask(*args)
        if found is not None:
            return found
    return None


def have_errors() -> bool:
    """Is a library imported that raises errors from inside of computations?"""
    return any(hasattr(module, "raises") for module in _adapters())


def raises_its_own(host: Any) -> bool:
    """Is this host function one that a library raises errors of its own through, when the computation runs?"""
    return any(module.raises(host) for module in _adapters() if hasattr(module, "raises"))


def own_error(error: BaseException) -> BaseException | None:
    """A library's own error, which JAX has wrapped into one of its own."""
    found = (module.own_error(error) for module in _adapters() if hasattr(module, "own_error"))
    return next((own for own in found if own is not None), None)


def _adapters() -> Iterator[ModuleType]:
    for library, adapter in ADAPTERS.items():
        if library not in sys.modules:
            continue
        try:
            yield importlib.import_module(adapter, __name__)
        except ImportError:
            continue
