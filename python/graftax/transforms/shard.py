# SPDX-License-Identifier: Apache-2.0
"""Where the arrays of a graph are: `shard`, by rules, and Equinox's `filter_shard`."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.core
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from graftax import _core
from graftax._base.errors import at_path
from graftax._graph.path import Graph
from graftax._graph.prefix_tree import is_prefix
from graftax._graph.structure import Structure
from graftax._jax.tracebacks import boundary
from graftax._sharding.rules import Mesh, Rules, is_placed
from graftax.tree import tree_broadcast

T = TypeVar("T")


@boundary
def shard(obj: T, mesh: Mesh | None, rules: Any, default: Any = ..., *, local: bool = False) -> T:
    """A copy of a graph whose arrays are sharded by rules; sharing and cycles are kept.

    An array in several places is placed once. A `jax.ShapeDtypeStruct`, as `eval_shape` returns it, gets the sharding.
    Within a compiled function, arrays get a sharding constraint. NumPy arrays go to each device in parts, and with
    several processes each reads only the parts of its own devices.

    Args:
        obj: any object.
        mesh: the mesh. With None it is that of the rules, or of `jax.set_mesh`.
        rules: `graftax.Rules`, or whatever `Rules` accepts.
        default: the spec of arrays that no rule matches. Without it, such an array is an error.
        local: the arrays in this process are its part of the whole array, as a data loader reads it.

    Returns:
        the copy.

    Raises:
        StructureError: if the rules do not fit. It has a line for each array that no rule matches, each rule that is
            never used, each unknown axis and each size that cannot be divided. Nothing has been moved then.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> model = {"w": np.ones((4, 2)), "step": 3}
        >>> graftax.shard(model, mesh, [("w", P("data"))])["w"].sharding.spec
        P('data',)
    """
    rules = rules if isinstance(rules, Rules) else Rules(rules)
    graph = Graph(obj)
    assignment = rules.assign(graph, mesh, default, local)
    # Everything that does not fit is reported at once, before an array is moved.
    assignment.check()
    placed: dict[int, Any] = {}  # by the id of the array, which may be in several places
    for array, sharding in assignment.shardings():
        try:
            placed[id(array.leaf)] = _placed(array.leaf, sharding, local)
        except Exception as error:
            raise at_path(error, repr(array.path))  # noqa: B904 - it is the same one
    changes = {
        n: placed[id(row.value)] for n, row in enumerate(graph.rows) if is_placed(row) and id(row.value) in placed
    }
    return graph.core.build(changes, all=True)


def _placed(leaf: Any, sharding: Any, local: bool) -> Any:
    """The array with a sharding. A bare spec refers to the mesh of the context."""
    if isinstance(leaf, jax.core.Tracer):
        return _constrained(leaf, sharding)
    if isinstance(sharding, PartitionSpec):
        sharding = NamedSharding(jax.sharding.get_mesh(), sharding)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)
    if isinstance(leaf, jax.Array) and (sharding.is_fully_addressable or not leaf.is_fully_addressable):
        return leaf if leaf.sharding == sharding else jax.device_put(leaf, sharding)
    # From here on the sharding spans processes, and the values come from the host; random keys go as their data.
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _placed(jax.random.key_data(leaf), sharding, local)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if local and not sharding.is_fully_addressable:
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    # Each process copies the parts of its own devices only.
    host_array = np.asarray(leaf)
    # As `jax.device_put` does: without `jax_enable_x64` JAX has no arrays of 64 bits.
    dtype = jax.dtypes.canonicalize_dtype(host_array.dtype)
    return jax.make_array_from_callback(host_array.shape, sharding, lambda part: np.asarray(host_array[part], dtype))


def _constrained(leaf: object, sharding: PartitionSpec | Sharding) -> Any:
    # Along explicit axes the sharding is part of the type, which only `reshard` changes.
    mesh: Any = sharding.mesh if isinstance(sharding, NamedSharding) else jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in getattr(mesh, "axis_types", ()):
        return jax.sharding.reshard(leaf, sharding)
    return jax.lax.with_sharding_constraint(leaf, sharding)


@boundary
def filter_shard(x: T, device_or_shardings: Any) -> T:
    """As `equinox.filter_shard`: a copy of `x` whose arrays are on a device, or have shardings.

    Args:
        x: any graph.
        device_or_shardings: a device; a sharding for all arrays; or a tree of shardings that is a prefix of `x`.

    Returns:
        the copy. In a compiled function, the arrays get a sharding constraint.

    Raises:
        ValueError: if the tree of shardings is not a prefix of `x`, or an array cannot be divided that way.

    Example:
        >>> model = graftax.filter_shard({"w": jnp.ones(2), "name": "net"}, jax.devices()[0])
        >>> model["w"].devices() == {jax.devices()[0]}
        True
    """
    spec = device_or_shardings
    if isinstance(spec, jax.Device):
        spec = SingleDeviceSharding(spec)
    leaves, graphdef = _core.flatten(x)
    # `with_sharding_constraint` takes the flat leaves, so it cannot match a tree of shardings by itself.
    if is_prefix(spec) or not jax.tree_util.all_leaves([spec]):
        # A sharding is static: `full` is a graph like `x` with a static in place of each array.
        full = tree_broadcast(spec, x, is_leaf=lambda part: part is None)
        structure = Structure(_core.flatten(full)[1])
        spec_at = {structure.root_path(row): value for row, value in structure.statics()}
        spec = [spec_at[key_path] for key_path in graphdef.leaf_places()]
    return _core.unflatten(graphdef, jax.lax.with_sharding_constraint(leaves, spec))
