# SPDX-License-Identifier: Apache-2.0
"""The methods of a GraphDef that are written in Python: its fingerprint and its children."""

from __future__ import annotations

import enum
import hashlib
import types
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
from jax import tree_util

from graftax import _core
from graftax._base.errors import UnpicklableError
from graftax._base.key_path import entry_text, keystr
from graftax._graph.pickling import JITTED, TYPES_WITH_DEVICES, ByName, dumps, name_for_pickle
from graftax._graph.structure import Structure
from graftax._graph.types.static_values import PLAIN

NO_FINGERPRINT = (
    "this GraphDef holds {value!r} at {path}, which has no name and no pickle to make a fingerprint of: {error}"
)


def fingerprint(graphdef: _core.GraphDef) -> str:
    """A SHA-256 hex digest, the same for equal structures in every process.

    Classes, functions and modules count by qualified name, other statics by value.

    Raises:
        UnpicklableError: for a static with neither a name nor a pickle.
    """
    digest = hashlib.sha256()
    for row in graphdef.rows():
        # The position of the row, without objects whose text differs between processes.
        position = (row.root, row.parent, entry_text(row.key_entry), row.target, row.leaf)
        try:
            value = _stable_text(row.value)
        except Exception as error:
            path = keystr(Structure(graphdef).root_path(row)[1]) or "the root"
            raise UnpicklableError(NO_FINGERPRINT.format(value=row.value, path=path, error=error)) from error
        digest.update(repr((position, row.op.name, _stable_text(row.type), value)).encode())
    return digest.hexdigest()


def stable_text(value: object, fallback: Callable[[Any], str]) -> str:
    """A text that is the same for equal values in every process; `fallback` gives the text of unknown values."""
    if type(value) in PLAIN:
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    # By name: their ids and code differ between processes.
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return f"name {value.__module__}.{value.__qualname__}"
    if isinstance(value, (list, tuple)):
        parts = [stable_text(v, fallback) for v in cast("list[Any]", value)]
        # A list is the payload of a set, whose elements have no order.
        return f"{type(value).__name__} {sorted(parts) if isinstance(value, list) else parts}"
    if isinstance(value, tree_util.PyTreeDef):
        return f"treedef {value}"
    if isinstance(value, frozenset):
        return f"frozenset {sorted(stable_text(v, fallback) for v in cast('frozenset[Any]', value))}"
    if isinstance(value, enum.Enum):
        return f"enum {stable_text(type(value), fallback)}.{value.name}"
    return fallback(value)


def _stable_text(value: object) -> str:
    return stable_text(value, _named_or_pickled)


def _named_or_pickled(value: Any) -> str:
    named_value = value if isinstance(value, TYPES_WITH_DEVICES) else name_for_pickle(value)
    if isinstance(named_value, ByName):
        return "name {}.{}".format(*named_value.args)
    if isinstance(named_value, jax.sharding.AbstractMesh):  # its pickle differs between processes
        return repr(named_value)
    if isinstance(named_value, JITTED):  # its options are not known: JAX does not expose them
        return f"jitted {_stable_text(named_value.__wrapped__)}"
    # A fixed protocol: the default one changes between versions of Python.
    return f"{_stable_text(type(value))} {dumps(value, protocol=4)!r}"


def children(graphdef: _core.GraphDef) -> list[_core.GraphDef]:
    """The GraphDef of each child of the root, as if the child had been flattened by itself."""
    leaf = np.float32(0)  # any leaf will do: it is not part of a structure
    obj = _core.unflatten(graphdef, [leaf] * graphdef.num_leaves)
    return [_core.flatten(child)[1] for child in _core.children(obj)]
