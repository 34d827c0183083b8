# SPDX-License-Identifier: Apache-2.0
"""Everything that the core asks Python for, by the names in `core/hooks.h`; `_setup` passes it on."""

from jax import block_until_ready, named_scope
from jax.tree_util import FlattenedIndexKey, GetAttrKey, SequenceKey

from . import _errors as errors
from ._compat import new_ref, open_first
from ._compat import one_level_with_keys as open_with_keys
from ._describe import describe, numpy_role
from ._errors import at_path
from ._functions import named_function, writes_its_cells
from ._graphdef import children as graphdef_children
from ._graphdef import fingerprint
from ._ignored import Ignored
from ._jax_nodes import dict_key, is_leaf, one_level_treedef
from ._jaxprs import open_jaxpr
from ._made import made_alike
from ._opaque import check_opaque, is_module_level
from ._pickle import reduce_graphdef, reduce_outcome
from ._room import with_room
from ._statics import remade, text_array, write_text_array
from ._ties import note_made
from ._trees import (
    Mark,
    deserialize_using_proto,
    from_iterable_tree,
    from_jax,
    refuse_mismatch,
    replaced,
    to_jax,
    treedef_from_state,
)
from ._trees import describe as describe_tree
from .interop import UNSPOKEN

__all__ = [
    "UNSPOKEN",
    "FlattenedIndexKey",
    "GetAttrKey",
    "Ignored",
    "Mark",
    "SequenceKey",
    "at_path",
    "block_until_ready",
    "check_opaque",
    "describe",
    "describe_tree",
    "deserialize_using_proto",
    "dict_key",
    "errors",
    "fingerprint",
    "from_iterable_tree",
    "from_jax",
    "graphdef_children",
    "is_leaf",
    "is_module_level",
    "made_alike",
    "named_function",
    "named_scope",
    "new_ref",
    "note_made",
    "numpy_role",
    "one_level_treedef",
    "open_first",
    "open_jaxpr",
    "open_with_keys",
    "reduce_graphdef",
    "reduce_outcome",
    "refuse_mismatch",
    "remade",
    "replaced",
    "text_array",
    "to_jax",
    "treedef_from_state",
    "with_room",
    "write_text_array",
    "writes_its_cells",
]
