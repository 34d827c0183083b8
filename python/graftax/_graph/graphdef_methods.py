# SPDX-License-Identifier: Apache-2.0
"""What a GraphDef does in Python: its fingerprint, its children."""

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
from graftax._graph.pickling import JITTED, OF_DEVICES, ByName, dumps, named
from graftax._graph.structure import Structure
from graftax._graph.types.static_values import PLAIN

NO_FINGERPRINT = (
    "this GraphDef holds {value!r} at {path}, which has no name and no pickle to make a fingerprint of: {error}"
)


def fingerprint(graphdef: _core.GraphDef) -> str:
    """A text of 64 hexadecimal digits that equal structures share in every process.

    Classes, functions and modules count by qualified name, other statics by value; one that has neither raises.
    """
    digest = hashlib.sha256()
    for row in graphdef.rows():
        place = (row.root, row.parent, entry_text(row.key_entry), row.target, row.leaf)
        try:
            value = _stable(row.value)
        except Exception as error:
            path = keystr(Structure(graphdef).place(row)[1]) or "the root"
            raise UnpicklableError(NO_FINGERPRINT.format(value=row.value, path=path, error=error)) from error
        digest.update(repr((place, row.op.name, _stable(row.type), value)).encode())
    return digest.hexdigest()


def stable_text(value: Any, other: Callable[[Any], str]) -> str:
    """A text that equal values have in every process; `other` gives that of a value of any other class."""
    if type(value) in PLAIN:
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return f"name {value.__module__}.{value.__qualname__}"
    if isinstance(value, (list, tuple)):
        parts = [stable_text(v, other) for v in cast("list[Any]", value)]
        # A list stands for the elements of a set, which have no order.
        return f"{type(value).__name__} {sorted(parts) if isinstance(value, list) else parts}"
    if isinstance(value, tree_util.PyTreeDef):
        return f"treedef {value}"
    if isinstance(value, frozenset):
        return f"frozenset {sorted(stable_text(v, other) for v in cast('frozenset[Any]', value))}"
    if isinstance(value, enum.Enum):
        return f"enum {stable_text(type(value), other)}.{value.name}"
    return other(value)


def _stable(value: Any) -> str:
    return stable_text(value, _pickled)


def _pickled(value: Any) -> str:
    found = value if isinstance(value, OF_DEVICES) else named(value)
    if isinstance(found, ByName):
        return "name {}.{}".format(*found.place)
    if isinstance(found, jax.sharding.AbstractMesh):  # two processes pickle it in two ways
        return repr(found)
    if isinstance(found, JITTED):  # JAX does not tell its options
        return f"jitted {_stable(found.__wrapped__)}"
    return f"{_stable(type(value))} {dumps(value, protocol=4)!r}"


def children(graphdef: _core.GraphDef) -> list[_core.GraphDef]:
    """The GraphDef of each child of the root, as if the child had been flattened by itself."""
    leaf = np.float32(0)  # any dynamic leaf will do: structures do not tell them apart
    obj = _core.unflatten(graphdef, [leaf] * graphdef.num_leaves)
    return [_core.flatten(child)[1] for child in _core.children(obj)]
