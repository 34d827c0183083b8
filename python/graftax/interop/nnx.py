# SPDX-License-Identifier: Apache-2.0
"""Flax NNX: modules, Variables and states, read as fields.

NNX marks each object with the JAX trace that it was made in, and refuses to change it in another trace. The mark is not
part of the key: objects rebuilt for a trace get the mark of that trace, and the caller's objects keep theirs.

NNX sorts the attributes of a module, and its own transforms leave them sorted. So their order is not part of the key
either, and a compiled function sees them sorted.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax.core.spmd import get_logical_axis_rules
from flax.nnx import extract, filterlib, graphlib, helpers, merge, spmd
from flax.nnx.graphlib import GraphState
from flax.nnx.module import Module
from flax.nnx.pytreelib import Pytree, PytreeState
from flax.nnx.statelib import FlatState, State
from flax.nnx.tracers import TraceState
from flax.nnx.transforms import compilation
from flax.nnx.transforms.autodiff import DiffState
from flax.nnx.transforms.iteration import Carry
from flax.nnx.variablelib import HijaxVariable, Param, Variable
from flax.typing import HashableMapping
from jax.sharding import PartitionSpec, Sharding

from graftax._base.errors import GraftaxError
from graftax._base.type_record import Description
from graftax.interop import UNSPOKEN, LibraryFilter
from graftax.interop.linen import mesh_axes

# Flax before 0.12.8 has a type alias where it has a class now.
_BY_FIELDS = tuple(filter(inspect.isclass, (PytreeState, Variable, State, FlatState, GraphState)))


TreeState = getattr(extract, "TreeState", None)  # that of `nnx.prefix`, since Flax 0.12.9

# These look up notes on a running call by their own identity, so a copy would not find them.
_JITTED = tuple(
    getattr(compilation, name)
    for name in ("JitWrapped", "SimpleJitWrapped", "SimpleJitPartialWrapped")
    if hasattr(compilation, name)
)

_List = getattr(helpers, "List", None)

_VALUE = "_raw_value"  # the field of a Variable that holds its value
UNSPOKEN.add(_VALUE)
_DATA = frozenset({_VALUE})  # traced even if it is a Python number; metadata and attributes of modules are static


def describe(cls: type) -> Description | None:
    """How the core treats a class of NNX or a subclass. None for other classes."""
    if issubclass(cls, _JITTED):
        return Description("identity")
    if issubclass(cls, TraceState):
        return Description("context", reduce=cls)
    if issubclass(cls, HijaxVariable):  # JAX traces it as one value
        return Description("array")
    if issubclass(cls, Pytree):
        return Description("node", frozen=False, by_name=True)
    if issubclass(cls, Variable):
        return Description("node", frozen=False, arrays_only=True, dynamic_fields=_DATA)
    if issubclass(cls, _BY_FIELDS):
        return Description("node", frozen=False)
    if issubclass(cls, HashableMapping):  # a private dict that is never changed
        return Description("reduce", reduce=operator.attrgetter("_mapping"))
    return None


def is_module(obj: object) -> bool | None:
    return isinstance(obj, Module) or None


def items(obj: Any) -> list[Any] | None:
    return list(obj) if _List is not None and isinstance(obj, _List) else None


def value_field(obj: object) -> str | None:
    return _VALUE if isinstance(obj, Variable) else None


def is_trained(holder: object) -> bool | None:
    return isinstance(holder, Param) if isinstance(holder, Variable) else None


IN_CACHED_PARTIAL = (
    "{name} is called through nnx.cached_partial, which caches the structure of a module for nnx.jit. graftax.jit "
    "reads modules by itself: call it with the module, without nnx.cached_partial."
)


def refuse_around(name: str) -> None:
    """Raises inside of `nnx.cached_partial`, whose cache graftax does not use."""
    context: Any = graphlib.GRAPH_CONTEXT
    if getattr(context, "tmp_static_cache", None) is not None:
        context.tmp_static_cache = None  # otherwise an error of NNX replaces this one
        raise GraftaxError(IN_CACHED_PARTIAL.format(name=name))


_FILTERS = tuple(
    getattr(filterlib, name)
    for name in ("WithTag", "PathContains", "PathIn", "OfType", "Any", "All", "Not", "Everything", "Nothing")
    if hasattr(filterlib, name)
)


def library_filter(spec: Any) -> LibraryFilter | None:
    """A filter of NNX, which tests Variables."""
    return LibraryFilter(Variable, spec) if isinstance(spec, _FILTERS) else None


def path_filter(spec: Any) -> LibraryFilter:
    return LibraryFilter(Variable, spec)


def choices(spec: object) -> list[tuple[Any, Any]] | None:
    """The (filter, entry) pairs of `nnx.StateAxes` or `nnx.StateSharding`."""
    # Attributes of these names may belong to something else, such as a convolution of the user's.
    if type(spec).__module__.partition(".")[0] != "flax":
        return None
    filters, entries = getattr(spec, "filters", None), getattr(spec, "axes", getattr(spec, "shardings", None))
    if filters is None or entries is None:
        return None
    return [(filterlib.All(filter_), entry) for filter_, entry in zip(filters, entries, strict=True)]


def none_for_empty(graph: Any) -> Any:
    """The graph with None in place of Variables that hold None."""

    def is_variable(x: Any) -> bool:
        return isinstance(x, Variable)

    def none_if_empty(x: Any) -> Any:
        return None if is_variable(x) and x.get_raw_value() is None else x

    return jax.tree.map(none_if_empty, graph, is_leaf=is_variable)


def axes(node: object) -> PartitionSpec | Sharding | None:
    """The mesh axes named in a Variable. Flax before 0.12 calls them `sharding`."""
    if not isinstance(node, Variable):
        return None
    metadata: dict[str, Any] = node.get_metadata()
    names = metadata.get("out_sharding") or metadata.get("sharding_names") or metadata.get("sharding")
    if not names or isinstance(names, Sharding):
        return names or None
    return mesh_axes(names, (*metadata.get("sharding_rules", ()), *(get_logical_axis_rules() or ())))


def is_carry(spec: object) -> bool | None:
    """`nnx.Carry`, as `nnx.scan` takes it."""
    return True if spec is Carry else None


def prefix(spec: Any) -> Any:
    """The graph of `nnx.prefix`, or those of several with common parts."""
    if TreeState is None:
        return None
    if type(spec) in (tuple, list) and any(type(item) is TreeState for item in spec):
        return type(spec)(extract.from_tree2(list(spec)))
    if type(spec) is not TreeState:
        return None
    state: Any = spec
    return merge(state.graphdef, state.state)


def differentiated(spec: object) -> tuple[int, Any] | None:
    """(argument number, filter) of `nnx.DiffState`."""
    return (spec.argnum, filterlib.All(spec.filter)) if isinstance(spec, DiffState) else None


def with_axis_names(function: Any, in_axes: Any, out_axes: Any, names: Any) -> Any:
    """Removes and adds axis names, as `transform_metadata` of `nnx.vmap` and `nnx.scan` does."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for variable, axis in _with_axes(args, in_axes):
            spmd.remove_axis(variable, axis, names)
        result = function(*args, **kwargs)
        # By identity: a Variable that is an argument and in the result gets the name once, at its axis as an argument.
        of_arguments = {id(variable): (variable, axis) for variable, axis in _with_axes(args, in_axes)}
        of_result = {id(variable): (variable, axis) for variable, axis in _with_axes(result, out_axes)}
        for variable, axis in (of_result | of_arguments).values():
            spmd.add_axis(variable, axis, names)
        return result

    return wrapped


def _with_axes(graph: Any, axes: Any) -> list[tuple[Any, int]]:
    """The Variables with a mapped axis, each with the position of that axis in the unmapped array."""
    variables: list[tuple[Any, int]] = []
    for path, variable in graphlib.iter_graph(graph):
        axis = _axis_at(axes, path, variable) if isinstance(variable, Variable) else None
        if axis is not None:
            value: Any = variable.get_raw_value()
            variables.append((variable, axis if axis >= 0 else axis + value.ndim + 1))
    return variables


def _axis_at(axes: Any, path: Sequence[Any], variable: Any) -> int | None:
    # Down the axes along the path, as far as they are containers; a filter decides for all below it.
    for i, name in enumerate(path):
        if (pairs := choices(axes)) is not None:
            axes_chosen = (
                axis for filter_, axis in pairs if filterlib.to_predicate(filter_)(tuple(path[i:]), variable)
            )
            return next(axes_chosen, None)
        if axes is None or type(axes) is int or is_carry(axes):
            break
        axes = axes[name] if isinstance(axes, (tuple, list, Mapping)) else getattr(axes, str(name), None)
    axes = axes.get_raw_value() if isinstance(axes, Variable) else axes
    return axes if type(axes) is int else None
