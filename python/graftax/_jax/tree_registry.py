# SPDX-License-Identifier: Apache-2.0
"""JAX's registry of pytrees: what was registered of a class, and one level of a node."""

from __future__ import annotations

import inspect
import operator
import sys
import types
from collections import OrderedDict, defaultdict
from typing import Any

from jax._src import tree_util as _tree_util
from jax.tree_util import FlattenedIndexKey, PyTreeDef, default_registry


def is_registered_static(cls: type) -> bool:
    """Was the class given to `jax.tree_util.register_static`? Nothing public tells without a call of its flatten."""
    entry = getattr(_tree_util, "_registry", {}).get(cls)
    name = getattr(getattr(entry, "from_iter", None), "__qualname__", "")
    return "register_static.<locals>" in name


# JAX 0.12 shortened the name; the old one goes with JAX 0.11.
treedef_of_node: Any = getattr(PyTreeDef, "from_node_data_and_children", None) or getattr(
    PyTreeDef, "make_from_node_data_and_children", None
)


def tree_registry() -> Any:
    """JAX's dict from registered types to their functions: its size tells when another type was registered."""
    registry = getattr(_tree_util, "_registry", None)
    return registry if isinstance(registry, dict) else None


def is_tree_node(cls: type) -> bool:
    """Does JAX open values of this type? `jax.tree_util.is_tree_node` goes in front from JAX 0.10 on."""
    query: Any = getattr(_tree_util, "is_tree_node", None)
    if query is not None:
        return query(cls)
    registry = tree_registry()
    builtin = (type(None), list, tuple, dict, OrderedDict, defaultdict)
    return cls in (registry or builtin) or cls in builtin or (issubclass(cls, tuple) and hasattr(cls, "_fields"))


def tree_functions(cls: type) -> tuple[Any, Any] | None:
    """(flatten, unflatten) as registered with JAX; None for its own containers, or where they cannot be read."""
    entry = (tree_registry() or {}).get(cls)
    flatten, unflatten = getattr(entry, "to_iter", None), getattr(entry, "from_iter", None)
    return None if flatten is None or unflatten is None else (flatten, unflatten)


def data_fields(flatten: Any) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """(data fields, meta fields) of a class given to `jax.tree_util.register_dataclass`, by its flatten function."""
    if "register_dataclass.<locals>" not in getattr(flatten, "__qualname__", ""):
        return None
    cells = dict(zip(flatten.__code__.co_freevars, flatten.__closure__ or (), strict=True))
    if set(cells) != {"data_fields", "meta_fields"}:
        return None
    return tuple(cells["data_fields"].cell_contents), tuple(cells["meta_fields"].cell_contents)


# (pairs (key path entry, child), aux data) of a registered node. Public from JAX 0.11 on.
one_level_with_keys: Any = getattr(default_registry, "flatten_one_level_with_keys", None)


def names_function(flatten: Any) -> Any:
    """The function that `jax.tree_util.register_pytree_with_keys` was given, where it made `flatten` of it; or None."""
    if not getattr(flatten, "__qualname__", "").endswith("register_pytree_with_keys.<locals>.flatten_func_impl"):
        return None
    cells = dict(zip(flatten.__code__.co_freevars, flatten.__closure__ or (), strict=True))
    return cells["flatten_with_keys"].cell_contents if set(cells) == {"flatten_with_keys"} else None


def open_first(flatten: object, tree: object) -> tuple[Any, Any]:
    """Opens a node with `one_level_with_keys`, and finds out who names the children of its class.

    JAX does not show a function with keys that was registered beside `flatten`. So a profiler sees which code runs:

    - `flatten`: JAX numbers the children itself (False);
    - the method that `register_pytree_with_keys_class` takes: that method;
    - other code: JAX has to be asked for each object (True).

    None if this node does not tell: it has no children, or a profiler of the user's runs.
    """
    entered: list[types.CodeType] = []

    def note(frame: types.FrameType, event: str, arg: Any) -> None:  # unmeasured: in an event
        if event == "call":  # the first call is the one that JAX makes; what it calls does not matter
            sys.setprofile(None)
            entered.append(frame.f_code)

    if sys.getprofile() is not None:  # a profiler of the user's runs
        return one_level_with_keys(tree), None
    sys.setprofile(note)
    try:
        opened = one_level_with_keys(tree)
    finally:
        sys.setprofile(None)
    method = operator.methodcaller("tree_flatten_with_keys")
    if type(flatten) is operator.methodcaller and entered == [_code_of(method, type(tree))]:
        return opened, method
    if entered != [_code_of(flatten, type(tree))]:
        return opened, True
    pairs = tuple(opened[0])
    numbered = [type(key) is FlattenedIndexKey and key.key == i for i, (key, _) in enumerate(pairs)]
    return (pairs, opened[1]), not all(numbered) if numbered else None


def _code_of(function: object, cls: type) -> types.CodeType | None:
    """Which code runs first when `function` is called with an instance of `cls`; None where that is not known."""
    if type(function) is operator.methodcaller:
        arguments = function.__reduce__()[1]
        function = inspect.getattr_static(cls, arguments[0], None) if len(arguments) == 1 else None
    return function.__code__ if isinstance(function, types.FunctionType) else None


def flatten_one_level(tree: object) -> tuple[Any, Any]:
    """(children, aux data) of a node, as JAX has them. Public in `jax.tree_util` from JAX 0.11 on.

    Raises:
        ValueError: if `tree` is a leaf.
    """
    return _one_level("flatten_one_level", tree)


def flatten_one_level_with_keys(tree: object) -> tuple[Any, Any]:
    """(pairs (key path entry, child), aux data) of a node. Public in `jax.tree_util` from JAX 0.11 on.

    Raises:
        ValueError: if `tree` is a leaf.
    """
    return _one_level("flatten_one_level_with_keys", tree)


def _one_level(name: str, tree: object) -> tuple[Any, Any]:
    opened = getattr(default_registry, name)(tree)
    if opened is None:
        raise ValueError(f"a leaf has no children: {type(tree).__qualname__}")
    return opened
