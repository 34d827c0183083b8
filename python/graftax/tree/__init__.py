# SPDX-License-Identifier: Apache-2.0
"""`jax.tree` and `jax.tree_util`, every name with the same behaviour, on the walk of graftax.

Sharing is not tracked here: everything is a tree. Types that are registered with JAX are nodes here, and `register_*`
registers with JAX.
"""

from jax.tree_util import DictKey as DictKey
from jax.tree_util import FlattenedIndexKey as FlattenedIndexKey
from jax.tree_util import GetAttrKey as GetAttrKey
from jax.tree_util import KeyEntry as KeyEntry
from jax.tree_util import KeyPath as KeyPath
from jax.tree_util import Partial as Partial
from jax.tree_util import SequenceKey as SequenceKey
from jax.tree_util import default_registry as default_registry
from jax.tree_util import keystr as keystr
from jax.tree_util import register_dataclass as register_dataclass
from jax.tree_util import register_pytree_node as register_pytree_node
from jax.tree_util import register_pytree_node_class as register_pytree_node_class
from jax.tree_util import register_pytree_with_keys as register_pytree_with_keys
from jax.tree_util import register_pytree_with_keys_class as register_pytree_with_keys_class
from jax.tree_util import register_static as register_static

from graftax._core import PyTreeDef as PyTreeDef
from graftax._jax.tree_registry import flatten_one_level as flatten_one_level
from graftax._jax.tree_registry import flatten_one_level_with_keys as flatten_one_level_with_keys
from graftax._jax.tree_registry import is_tree_node as is_tree_node
from graftax.tree._core_hooks import from_jax as from_jax
from graftax.tree._core_hooks import to_jax as to_jax
from graftax.tree.functions import all_leaves as all_leaves
from graftax.tree.functions import static as static
from graftax.tree.functions import tree_all as tree_all
from graftax.tree.functions import tree_leaves_with_path as tree_leaves_with_path
from graftax.tree.functions import tree_reduce as tree_reduce
from graftax.tree.functions import tree_reduce_associative as tree_reduce_associative
from graftax.tree.functions import tree_transpose as tree_transpose
from graftax.tree.functions import treedef_children as treedef_children
from graftax.tree.functions import treedef_is_leaf as treedef_is_leaf
from graftax.tree.functions import treedef_tuple as treedef_tuple
from graftax.tree.prefix import broadcast_prefix as broadcast_prefix
from graftax.tree.prefix import tree_broadcast as tree_broadcast
from graftax.tree.walks import tree_flatten as tree_flatten
from graftax.tree.walks import tree_flatten_with_path as tree_flatten_with_path
from graftax.tree.walks import tree_leaves as tree_leaves
from graftax.tree.walks import tree_map as tree_map
from graftax.tree.walks import tree_map_with_path as tree_map_with_path
from graftax.tree.walks import tree_structure as tree_structure
from graftax.tree.walks import tree_unflatten as tree_unflatten

# As in `jax.tree`.
all = tree_all
broadcast = tree_broadcast
flatten = tree_flatten
flatten_with_path = tree_flatten_with_path
leaves = tree_leaves
leaves_with_path = tree_leaves_with_path
map = tree_map
map_with_path = tree_map_with_path
reduce = tree_reduce
reduce_associative = tree_reduce_associative
structure = tree_structure
transpose = tree_transpose
unflatten = tree_unflatten
