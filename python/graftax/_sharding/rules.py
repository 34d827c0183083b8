# SPDX-License-Identifier: Apache-2.0
"""Sharding rules: the first rule that selects an array decides how it is sharded."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from graftax import interop
from graftax._base.errors import StructureError, some
from graftax._graph.filters import as_filter
from graftax._graph.path import Graph, GraphRow, Path
from graftax._graph.select import ObjectView, matching
from graftax._graph.structure import is_hidden_entry, plain_key
from graftax._jax.tracebacks import boundary

NO_RULE = "no rule selects it. The last rule can be ('**', None), which replicates what no other rule selects"
UNUSED = "has no effect: it selects no array, or earlier rules select them all"
NO_AXIS = "the mesh has no axis {axis!r}: it has {axes}"
TOO_LONG = "{spec} has {entries} entries, and the array {dims}"
TWICE = "{spec} uses the axis {axis!r} twice"
INDIVISIBLE = "dimension {dim} is {size}, which the {parts} devices of {axes} do not divide"
NO_SPEC = "{spec!r} is not a spec: give a PartitionSpec, None (replicated), a Sharding, or a function of a leaf"
NO_MESH = (
    "there is no mesh: give one (shard(obj, mesh, rules), Rules(..., mesh=mesh)), or call within jax.set_mesh(mesh)"
)
NOT_A_RULE = "a rule is a pair (where, spec), and {rule!r} is not a pair"
NO_WHERE = "{where!r} does not select arrays: give a pattern, re.Pattern, type, filter, or f(path, leaf)"
PROBLEMS = "the rules do not fit {what}:\n{lines}"

_MAX_LINES = 40  # problems that a message shows

ArraySelector = Any  # a pattern, `re.Pattern`, type, filter or `f(path, leaf)`
Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


class Shaped(Protocol):
    """An array, or a `jax.ShapeDtypeStruct` in its place."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


class FullySharded(NamedTuple):
    """What `fsdp` returns: the largest dimension that the axes divide is split over them."""

    axes: tuple[str, ...]
    min_size: int

    def spec(self, leaf: Shaped, mesh: Mesh) -> PartitionSpec:
        parts = math.prod(mesh.shape[axis] for axis in self.axes)
        # An empty dimension is divisible by everything, and splitting it saves nothing.
        fits = [d for d, size in enumerate(leaf.shape) if size and size % parts == 0]
        if math.prod(leaf.shape) < self.min_size or not fits:
            return PartitionSpec()
        dim = max(fits, key=lambda d: leaf.shape[d])
        return PartitionSpec(*[None] * dim, self.axes)


def fsdp(*axes: str, min_size: int = 2**18) -> Any:
    """A spec for `Rules` that splits each array over mesh axes, along its largest dimension that they divide.

    Args:
        axes: names of mesh axes.
        min_size: arrays with fewer elements are replicated, and so are arrays without such a dimension.

    Returns:
        the spec.

    Example:
        >>> graftax.Rules([("**", graftax.fsdp("data"))])
        Rules([('**', FullySharded(axes=('data',), min_size=262144))])
    """
    return FullySharded(axes, min_size)


class Assigned(NamedTuple):
    """The sharding of one array."""

    path: Path
    leaf: Shaped
    decided_by: str  # the rule, `scalar`, `metadata` or `default`; empty if nothing decides
    spec: PartitionSpec | Sharding | None
    problem: str


class Assignment(NamedTuple):
    """The shardings that rules assign to the arrays of an object, each array once, and the problems."""

    cls: str
    arrays: list[Assigned]
    unused: list[str]
    mesh: Mesh

    def check(self) -> None:
        """Raises StructureError with everything that is wrong."""
        problems = [f"  {a.path!r}: {a.problem}" for a in self.arrays if a.problem]
        refuse(f"this {self.cls}", [*problems, *(f"  the rule {rule} {UNUSED}" for rule in self.unused)])

    def shardings(self) -> Iterator[tuple[Assigned, Any]]:
        """Yields each array and its sharding, which is a bare spec if the mesh is that of the context."""
        for array in self.arrays:
            spec = array.spec
            # The abstract mesh of the context has no devices to place an array on.
            if isinstance(spec, PartitionSpec) and isinstance(self.mesh, jax.sharding.Mesh):
                yield array, NamedSharding(self.mesh, spec)
            else:
                yield array, spec


class TableRow(NamedTuple):
    """A line of `Rules.table`."""

    path: Path
    shape: tuple[int, ...]
    dtype: Any
    rule: str
    spec: Any
    bytes: int
    bytes_per_device: int
    problem: str


class Table(NamedTuple):
    """What `Rules.table` returns: prints as a table."""

    rows: tuple[TableRow, ...]
    unused: tuple[str, ...]
    bytes: int
    bytes_per_device: int

    def __str__(self) -> str:
        head = ("path", "array", "rule", "spec", "bytes", "per device")
        cells = [head] + [
            (repr(r.path), f"{r.dtype}{list(r.shape)}", r.rule, r.problem or _spec_text(r.spec), _size(r.bytes))
            + (_size(r.bytes_per_device),)
            for r in self.rows
        ]
        cells.append(("", "", "", "all", _size(self.bytes), _size(self.bytes_per_device)))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        return "\n".join(lines + [f"the rule {rule} {UNUSED}" for rule in self.unused])

    __repr__ = __str__


class Rules:
    """Shardings for the arrays of an object, by rules. The first rule that matches an array decides.

    The same rules work for `graftax.shard`, for `in_shardings=` and `out_shardings=` of `graftax.jit`, and for loading.
    Scalars are replicated and need no rule. If no rule matches an array, the axis names that Flax keeps beside it are
    used (`nnx.with_partitioning`, `nn.with_partitioning`).

    Args:
        rules: pairs (where, spec).
            where: a key-path pattern (`"layers[*].w"`, `"**[bias]"`), which includes everything below; a compiled
            regular expression, looked for in the path joined with `/` (`layers/0/w`); a type or a filter; or a function
            `f(path, leaf)`.
            spec: a `PartitionSpec`; None, which replicates; a function of the leaf that returns one of these;
            `graftax.fsdp("data")`; or a sharding.
        mesh: the mesh to use if no other is given and none is set with `jax.set_mesh`.

    Raises:
        TypeError: if a rule is not a pair, or its spec has another type.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> rules = graftax.Rules([("**[bias]", None), ("layers[*]", P("data")), ("**", graftax.fsdp("data"))])
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> print(rules.table({"layers": [{"bias": jnp.ones(4), "w": jnp.ones((4, 4))}]}, mesh).rows[0].rule)
        **[bias]
    """

    def __init__(
        self, rules: Iterable[tuple[ArraySelector, Any]] | Mapping[ArraySelector, Any], *, mesh: Mesh | None = None
    ) -> None:
        # A mapping has its rules in their order, too. The pairs are kept, since `rules` may be an iterator.
        items: Iterable[Any] = cast("Mapping[Any, Any]", rules).items() if isinstance(rules, Mapping) else rules
        pairs: list[tuple[Any, Any]] = []
        for rule in items:
            if not isinstance(rule, tuple) or len(cast("tuple[Any, ...]", rule)) != 2:
                raise TypeError(NOT_A_RULE.format(rule=rule))
            selector, spec = cast("tuple[Any, Any]", rule)
            # What a function returns is checked when it is called.
            if not (spec is None or callable(spec) or isinstance(spec, (PartitionSpec, Sharding, FullySharded))):
                raise TypeError(NO_SPEC.format(spec=spec))
            pairs.append((selector, spec))
        self._pairs, self._mesh = tuple(pairs), mesh

    def __repr__(self) -> str:
        return f"Rules({list(self._pairs)!r})"

    @boundary
    def shardings(self, obj: object, mesh: Mesh | None = None) -> dict[Path, Any]:
        """The sharding of each array of an object, by its path; the arrays may be `jax.ShapeDtypeStruct`s.

        Raises:
            StructureError: if the rules do not fit; says everything that is wrong.
        """
        assignment = self.assign(Graph(obj), mesh)
        assignment.check()
        return {array.path: sharding for array, sharding in assignment.shardings()}

    @boundary
    def table(self, obj: object, mesh: Mesh | None = None) -> Table:
        """The rule, the sharding and the bytes on each device for each array of an object. Moves nothing.

        Args:
            obj: any object, with arrays or `jax.ShapeDtypeStruct`s.
            mesh: as for `shard`.
        """
        assignment = self.assign(Graph(obj), mesh)
        rows: list[TableRow] = []
        for array, sharding in assignment.shardings():
            width = array.leaf.dtype.itemsize
            size = math.prod(array.leaf.shape) * width
            # A spec that does not fit divides nothing: the table shows the problem in its place.
            device_size = size if array.problem else _elements_per_device(array, sharding, assignment.mesh) * width
            description = array.path, tuple(array.leaf.shape), array.leaf.dtype, array.decided_by, array.spec
            rows.append(TableRow(*description, size, device_size, array.problem))
        total, per_device = sum(r.bytes for r in rows), sum(r.bytes_per_device for r in rows)
        return Table(tuple(rows), tuple(assignment.unused), total, per_device)

    def assign(self, graph: Graph, mesh: Mesh | None = None, default: object = ..., local: bool = False) -> Assignment:
        """Applies the rules to each array of a graph. Rules that do not fit are noted as problems, and do not raise.

        Args:
            graph: the object.
            mesh: where it is None, that of the rules, then that of the context.
            default: the spec of arrays that no rule matches; with `...` such an array is a problem.
            local: arrays are this process's part of the whole, and have to be divisible among its own devices only.
        """
        mesh = mesh if mesh is not None else self._mesh
        if mesh is None:
            mesh = jax.sharding.get_abstract_mesh()
            if mesh.empty:
                raise StructureError(NO_MESH)
        divided_mesh = mesh
        if local:
            # Only a concrete mesh has that of this process's own devices.
            divided_mesh = (mesh if isinstance(mesh, jax.sharding.Mesh) else jax.sharding.get_mesh()).local_mesh
        arrays = _arrays(graph)
        # The first rule that selects an array decides. A rule that decides about no array is unused.
        decided: dict[int, tuple[str, Any]] = {}
        unused: list[str] = []
        for selector, spec in self._pairs:
            newly_decided = [number for number in _selected_arrays(graph, selector, arrays) if number not in decided]
            if not newly_decided:
                unused.append(_selector_text(selector))
            decided.update((number, (_selector_text(selector), spec)) for number in newly_decided)
        # A scalar has no dimension to split, whatever the rules say. Other arrays may be left to their metadata.
        for number, leaf in arrays.items():
            if leaf.shape == ():
                decided[number] = "scalar", PartitionSpec()
            elif number not in decided and (names := _metadata(graph, number)) is not None:
                decided[number] = "metadata", names
            elif number not in decided and default is not ...:
                decided[number] = "default", default
        assigned: list[Assigned] = []
        for number, leaf in arrays.items():
            decided_by, spec = decided.get(number, ("", None))
            spec, problem = _resolved(spec, leaf, divided_mesh) if decided_by else (None, NO_RULE)
            assigned.append(Assigned(graph.path(number), leaf, decided_by, spec, problem))
        return Assignment(type(graph.rows[0].value).__qualname__, assigned, unused, mesh)


def refuse(subject: str, lines: Sequence[str]) -> None:
    """Raises StructureError with these problems, if there are any."""
    if lines:
        remaining = [f"  and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
        raise StructureError(PROBLEMS.format(what=subject, lines="\n".join([*lines[:_MAX_LINES], *remaining])))


def is_placed(row: GraphRow) -> bool:
    """Whether rules apply to a row: a leaf array, or a shape in its place, also where the shape is static for JAX."""
    return (row.category == "array" and not row.aux) or isinstance(row.value, jax.ShapeDtypeStruct)


def _arrays(graph: Graph) -> dict[int, Shaped]:
    """The arrays of a graph, and the shapes in place of arrays, by row; each object once."""
    visited: set[int] = set()
    arrays: dict[int, Shaped] = {}
    for number, row in enumerate(graph.rows):
        if is_placed(row) and id(row.value) not in visited:
            visited.add(id(row.value))
            arrays[number] = row.value
    return arrays


def _selected_arrays(graph: Graph, selector: ArraySelector, arrays: dict[int, Shaped]) -> list[int]:
    """The rows of the arrays that a rule selects."""
    if isinstance(selector, re.Pattern):
        # Regular expressions search a path such as `layers/0/w`, without the entry for the value of a Variable.
        texts = {
            n: "/".join(str(plain_key(entry)) for entry in graph.path(n) if not is_hidden_entry(entry)) for n in arrays
        }
        return [n for n, text in texts.items() if cast("re.Pattern[str]", selector).search(text)]
    leaf_filter = as_filter(selector)
    if isinstance(selector, (str, Path)) or leaf_filter is not None:
        try:
            chosen = graph.descendants(
                matching(graph, selector) if leaf_filter is None else leaf_filter.select(ObjectView(graph))
            )
        # A pattern that selects nothing is reported as unused, together with the other problems.
        except StructureError:
            return []
        # An array at several paths is in `arrays` once, at the first of them, and the rule may select another one.
        selected_ids = {id(graph.rows[number].value) for number in chosen}
        return [n for n in arrays if id(arrays[n]) in selected_ids]
    if callable(selector):
        return [n for n in arrays if selector(graph.path(n), arrays[n])]
    raise TypeError(NO_WHERE.format(where=selector))


def _metadata(graph: Graph, number: int) -> Any:
    """The spec that a library stores beside an array, in the array's parent."""
    parent = graph.rows[number].parent
    return None if parent < 0 else interop.axes(graph.rows[parent].value)


def _resolved(spec: object, leaf: Shaped, mesh: Mesh) -> tuple[PartitionSpec | Sharding | None, str]:
    """(the spec or sharding of an array, the problem with it as text, which is empty if there is none)."""
    if isinstance(spec, FullySharded):
        # With an unknown axis the spec is that axis, for which `_misfit` has a message.
        missing = [axis for axis in spec.axes if axis not in mesh.shape]
        spec = PartitionSpec(missing[0]) if missing else spec.spec(leaf, mesh)
    elif callable(spec) and not isinstance(spec, (PartitionSpec, Sharding)):
        spec = cast("Callable[[Any], Any]", spec)(leaf)
    if spec is None:
        spec = PartitionSpec()
    # A sharding has a mesh of its own, which need not be the one that the specs refer to.
    if isinstance(spec, Sharding):
        try:
            spec.shard_shape(tuple(leaf.shape))
        except ValueError as error:
            return spec, str(error)
        return spec, ""
    if not isinstance(spec, PartitionSpec):
        return None, NO_SPEC.format(spec=spec)
    return spec, _misfit(spec, leaf, mesh)


def _misfit(spec: PartitionSpec, leaf: Shaped, mesh: Mesh) -> str:
    """What is wrong with a spec for an array; empty if nothing is."""
    if len(spec) > len(leaf.shape):
        dims = "1 dimension" if len(leaf.shape) == 1 else f"{len(leaf.shape)} dimensions"
        return TOO_LONG.format(spec=_spec_text(spec), entries=len(spec), dims=dims)
    axes = [_axes(entry) for entry in spec]
    for axis, times in Counter(axis for part in axes for axis in part).items():
        if axis not in mesh.shape:
            return NO_AXIS.format(axis=axis, axes=some([f"{a} ({n})" for a, n in mesh.shape.items()]))
        if times > 1:
            return TWICE.format(spec=_spec_text(spec), axis=axis)
    for dim, part in enumerate(axes):
        parts = math.prod(mesh.shape[axis] for axis in part)
        if leaf.shape[dim] % parts:
            named = " and ".join(map(repr, part))
            return INDIVISIBLE.format(dim=dim, size=leaf.shape[dim], parts=parts, axes=named)
    return ""


def _axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a spec."""
    # What is unconstrained is left to the compiler, which may choose any axes or none.
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def _elements_per_device(array: Assigned, sharding: object, mesh: Mesh) -> int:
    """The number of an array's elements on one device."""
    if isinstance(sharding, Sharding):
        return math.prod(sharding.shard_shape(tuple(array.leaf.shape)))
    axes = [axis for entry in cast("PartitionSpec", array.spec) for axis in _axes(entry)]
    return math.prod(array.leaf.shape) // math.prod(mesh.shape[axis] for axis in axes)


def _selector_text(selector: ArraySelector) -> str:
    if isinstance(selector, str):
        return selector
    if isinstance(selector, re.Pattern):
        return f"re {cast('re.Pattern[str]', selector).pattern}"
    return getattr(selector, "__name__", None) or repr(selector)


def _spec_text(spec: object) -> str:
    return str(spec).replace("PartitionSpec", "P") if isinstance(spec, PartitionSpec) else str(spec)


def _size(size: int) -> str:
    return f"{size:,}"
