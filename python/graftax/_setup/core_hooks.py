# SPDX-License-Identifier: Apache-2.0
"""Everything that the core asks Python for, by the names in `core/python/hooks.h`; `_setup` passes it on."""

# ruff: noqa: F401
# pyright: reportUnusedImport=false

from jax import block_until_ready, named_scope
from jax.tree_util import FlattenedIndexKey, GetAttrKey, SequenceKey

from graftax._base import errors
from graftax._base.errors import at_path
from graftax._base.stack_reserve import with_room
from graftax._capture.abstract_classes import registered_classes
from graftax._graph.array_aliases import record_alias_sources
from graftax._graph.graphdef_methods import children as graphdef_children
from graftax._graph.graphdef_methods import fingerprint
from graftax._graph.pickling import reduce_graphdef, reduce_outcome
from graftax._graph.types.describe import describe, numpy_role
from graftax._graph.types.function_nodes import named_function, writes_its_cells
from graftax._graph.types.ignored import Ignored
from graftax._graph.types.opaque_values import check_opaque, is_module_level
from graftax._graph.types.pytree_nodes import dict_key, is_leaf, is_tracer, one_level_treedef
from graftax._graph.types.recomputed_leaves import equal_leaves
from graftax._graph.types.static_values import copied_value, text_array, write_text_array
from graftax._jax.arrays import new_ref
from graftax._jax.jaxprs import open_jaxpr
from graftax._jax.traces import outside_of_traces
from graftax._jax.tree_registry import one_level_with_keys as open_with_keys
from graftax._jax.tree_registry import open_first
from graftax.interop import UNSPOKEN
from graftax.tree._core_hooks import (
    Mark,
    deserialize_using_proto,
    from_iterable_tree,
    from_jax,
    refuse_mismatch,
    replaced,
    to_jax,
    treedef_from_state,
)
from graftax.tree._core_hooks import describe as describe_tree
