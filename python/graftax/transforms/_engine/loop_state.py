# SPDX-License-Identifier: Apache-2.0
"""The graph of a program after a trace: the state of a loop after a step, or after a branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from graftax import _core
from graftax._base.errors import StructureError
from graftax._base.key_path import keystr
from graftax._capture.numbers.symbols import NUMBERS
from graftax._graph.array_aliases import Source
from graftax._graph.structure import RootPath, Structure, place_name
from graftax._graph.structure_diff import differ_only_in_order
from graftax.transforms._engine.program import Program, Recipe
from graftax.transforms._engine.tangents import array_text

HIDDEN_FROM_FLATTEN = (
    "{name}: the function puts an array at {path}, in an attribute that the class's flatten leaves out, so that its "
    "value cannot be followed. Make it one of the children, or keep it elsewhere."
)

COMPUTED_BY_FLATTEN = (
    "{name}: {path} is an array that the flatten of a registered class makes of others, so that its value cannot be "
    "followed from one step or branch to the next. Let the flatten give the arrays that the object holds."
)

R = TypeVar("R")


class Provenance(NamedTuple):
    """The structure of a graph, and the input node that each of its tracked nodes is."""

    graphdef: _core.GraphDef
    origins: list[int | None]  # for each tracked node; None for a new object

    def node_path(self, node: int) -> RootPath:
        """The key path of a node."""
        # It is computed on demand: the paths of all nodes are quadratic in the depth.
        return self.graphdef._node_place(node)  # pyright: ignore[reportPrivateUsage]

    def correspondence(self, reference: Provenance) -> tuple[list[int], list[int]] | None:
        """The indices here of the leaves and nodes of `reference`, by key path; None if the structures differ."""
        if self.graphdef == reference.graphdef:
            return list(range(self.graphdef.num_leaves)), list(range(len(self.origins)))
        # The order of keys and attributes does not matter, because `jax.tree.map` sorts the keys of a dict.
        if not differ_only_in_order(reference.graphdef, self.graphdef):
            return None
        indices: list[list[int]] = []
        # Leaves or nodes that share a key path cannot be matched.
        for own_paths, reference_paths in (
            (self.graphdef.leaf_places(), reference.graphdef.leaf_places()),
            tuple([graph.node_path(node) for node in range(len(graph.origins))] for graph in (self, reference)),
        ):
            index_of = {path: i for i, path in enumerate(own_paths)}
            if len(index_of) != len(own_paths) or index_of.keys() != set(reference_paths):
                return None
            indices.append([index_of[path] for path in reference_paths])
        return indices[0], indices[1]

    def origins_along(self, reference: Provenance) -> list[int | None] | None:
        """The origins of the nodes in the order of `reference`; None if nodes cannot be matched."""
        correspondence = self.correspondence(reference)
        return None if correspondence is None else [self.origins[i] for i in correspondence[1]]


class StateAfter(NamedTuple):
    """The graph after a trace. Leaves are numbered as in a recording of all roots and the parts of the result."""

    program: Program
    initial: Provenance
    final: Provenance
    values: list[Any]  # the leaves, or `EndedTracer`s in their place
    changed: list[int]  # the input nodes that were changed in place
    output_leaves: list[int]  # for each output leaf of the Outcome, its index; -1 if flatten hides it
    outcome: _core.Outcome
    roots: tuple[Any, ...]  # after the trace, with placeholders for arrays
    result: Any  # with placeholders, too
    node_index: dict[int, int]  # input nodes by `id`, which stay valid because `nodes` keeps them alive
    nodes: list[Any]

    def graph(self, roots: tuple[object, ...], result_parts: int = 0) -> Provenance:
        """The graph of roots followed by a number of parts of the result."""
        _, graphdef, nodes = self.program.recorded(roots, result_parts)
        return Provenance(graphdef, [self.node_index.get(id(node)) for node in nodes])

    def reached(self, part: object) -> set[int]:
        """The input nodes that a part of the result reaches."""
        _, graphdef = _core.record((part,))
        walked = _core.walk(graphdef, (part,))
        assert walked is not None
        return {self.node_index[id(node)] for node in walked[1] if id(node) in self.node_index}

    def aligned(self, reference: Provenance) -> StateAfter | None:
        """This state with leaves and nodes numbered as in `reference`; None if the structures differ."""
        correspondence = self.final.correspondence(reference)
        if correspondence is None:
            return None
        if self.final.graphdef == reference.graphdef:
            return self
        leaves, nodes = correspondence
        new_index = {index: i for i, index in enumerate(leaves)}
        return self._replace(
            final=Provenance(reference.graphdef, [self.final.origins[i] for i in nodes]),
            values=[self.values[i] for i in leaves],
            output_leaves=[new_index.get(i, -1) for i in self.output_leaves],
        )


def state_after(
    program: Program,
    leaves: Sequence[object],
    outcome: _core.Outcome,
    outputs: Sequence[object],
    roots_of: Callable[[tuple[Any, ...], Any], tuple[tuple[object, ...], int]],
) -> StateAfter:
    """Finds out what a trace did to a graph, by applying its Outcome to a copy of the graph that holds placeholders.

    `roots_of`: from (the roots, the result) to (the roots of the state, how many of these are parts of the result).

    Raises:
        StructureError: if a registered class computes new arrays when it is flattened.
    """
    # Tracers cannot tell: one tracer may be at several paths, where another step or branch has different arrays. A
    # placeholder is at one path only.
    # The graph before the trace, around one placeholder per leaf.
    placeholders = [_placeholder(leaf) for leaf in leaves]
    roots = program.rebuilt(placeholders)
    _, initial_graphdef, nodes = program.recorded(roots)
    node_index = {id(node): i for i, node in enumerate(nodes) if node is not None}
    # Applying the Outcome puts a new placeholder wherever the trace put an array, and moves nodes as the trace did.
    output_placeholders = [_placeholder(leaf) for leaf in outputs]
    result = outcome.apply(output_placeholders, placeholders, nodes)
    leaf_of = {
        id(placeholder): leaf
        for placeholder, leaf in zip([*placeholders, *output_placeholders], [*leaves, *outputs], strict=True)
    }
    final_roots, result_parts = roots_of(roots, result)
    # The final nodes are those from before the trace, or new ones: `outcome.apply` changes the copies in place.
    final_leaves, graphdef, final_nodes = program.recorded(final_roots, result_parts)
    leaf_index = {id(placeholder): i for i, placeholder in enumerate(final_leaves)}
    computed = next((i for i, placeholder in enumerate(final_leaves) if id(placeholder) not in leaf_of), None)
    if computed is not None:
        root, path = graphdef.leaf_places()[computed]
        names = (*program.names, *("the result" for _ in range(root)))
        raise StructureError(COMPUTED_BY_FLATTEN.format(name=program.name, path=place_name((root, path), names)))
    return StateAfter(
        program,
        Provenance(initial_graphdef, list(range(len(nodes)))),
        Provenance(graphdef, [node_index.get(id(node)) for node in final_nodes]),
        [leaf_of[id(placeholder)] for placeholder in final_leaves],
        outcome.inputs()[2],
        [leaf_index.get(id(placeholder), -1) for placeholder in output_placeholders],
        outcome,
        roots,
        result,
        node_index,
        nodes,
    )


def _placeholder(leaf: object) -> Any:
    """A new array object of the leaf's shape, with size 1 for a symbolic dimension. Only its identity matters."""
    shape = tuple(n if isinstance(n, int) else 1 for n in np.shape(leaf))
    dtype = getattr(leaf, "dtype", None)
    # NumPy has no arrays of JAX's extended dtypes, such as that of random keys.
    if not isinstance(dtype, np.dtype):
        return np.zeros(shape)
    # A view of a single element: a placeholder for a large array takes no memory.
    return np.broadcast_to(np.zeros((), cast("np.dtype[Any]", dtype)), shape)


def node_name(program: Program, state: StateAfter, node: int) -> str:
    """The key path of an input node, as messages show it."""
    key_path = state.initial.node_path(node)
    return place_name(key_path, program.names) if key_path[0] < len(program.names) else "a part of the state"


def refuse_hidden_leaves(state: StateAfter) -> None:
    """Raises StructureError for an array in an attribute that the flatten of a registered class omits."""
    for number, (_, path) in zip(state.output_leaves, state.outcome.leaf_places(), strict=True):
        if number < 0:
            raise StructureError(HIDDEN_FROM_FLATTEN.format(name=state.program.name, path=keystr(path)))


def with_arrays(value: object) -> Any:
    """`value` with arrays in place of a Python number by itself or in a tuple, as JAX converts a carry."""
    if type(value) in NUMBERS:
        return jnp.asarray(value)
    if type(value) is tuple and any(type(x) in (*NUMBERS, tuple) for x in cast("tuple[Any, ...]", value)):
        return tuple(with_arrays(x) for x in cast("tuple[Any, ...]", value))
    return value


def numbers_in(program: Program, root: int) -> set[str]:
    """The key paths of the static Python numbers that are recorded below a root."""
    # A number that the program traces already is a leaf, and not among the statics.
    structure = Structure(program.graphdef)
    number_rows = (row for row, value in structure.statics() if row.root == root and type(value) in NUMBERS)
    return {place_name(structure.root_path(row), program.names) for row in number_rows}


class EndedTracer(NamedTuple):
    """What is kept of a tracer after its trace has ended."""

    # Keeping the tracer itself would be a leak to JAX's checker (`jax.checking_leaks`).
    aval: Any
    source: int | None  # the input leaf that it is, if it is one
    first_leaf: int  # the first leaf of the state that holds it
    source_op: Source | None  # the operation that computed it, and from which leaves

    @property
    def recipe(self) -> Recipe:
        """(how it was computed, from which input leaves): equal recipes give one array if the inputs are one array."""
        if self.source_op is not None:
            return self.source_op.operation, self.source_op.inputs
        return (self.first_leaf, ()) if self.source is None else ("input", (self.source,))


def type_of(leaf: object) -> Any:
    return leaf.aval if isinstance(leaf, EndedTracer) else jax.typeof(leaf)


def same_type(left_array: Any, right_array: Any, promote_weak: bool = False) -> bool:
    """Whether two arrays have the same shape and dtype. With `promote_weak`, the first one's weak type matches any."""
    left_array, right_array = type_of(left_array), type_of(right_array)
    return left_array.shape == right_array.shape and (
        left_array.dtype == right_array.dtype or (promote_weak and getattr(left_array, "weak_type", False))
    )


def type_text(leaf: object) -> str:
    if not hasattr(leaf, "dtype") and not isinstance(leaf, EndedTracer):
        return type(leaf).__qualname__
    aval = type_of(leaf)
    return array_text(aval.shape, aval.dtype)


def elements(result: object) -> tuple[Any, ...]:
    """The parts of a result that are compared one by one: the elements of a tuple, or the object itself."""
    return cast("tuple[Any, ...]", result) if type(result) is tuple else (result,)


def with_copies(result: object, copied: frozenset[int]) -> Any:
    """The result with the elements of these indices copied, in one copy, so that shared objects stay shared."""
    if not copied:
        return result
    parts = list(elements(result))
    # The facts may be those of another trace, in which the result had more elements.
    chosen = sorted(i for i in copied if i < len(parts))
    leaves, graphdef = _core.flatten(tuple(parts[i] for i in chosen))
    copies = _core.unflatten(graphdef, leaves)
    for i, copy in zip(chosen, copies, strict=True):
        parts[i] = copy
    return tuple(parts) if type(result) is tuple else parts[0]
