# SPDX-License-Identifier: Apache-2.0
"""The spec (an axis or a sharding) of each input leaf and each output leaf of a transform."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, cast

from graftax import _core, interop
from graftax._base.errors import StructureError
from graftax._base.handles import HANDLE_CLASSES
from graftax._graph.filters import RecordedView
from graftax._graph.structure import path_text
from graftax.transforms._engine.lift import call_first
from graftax.transforms._engine.opaque_leaves import leaves_in_functions, leaves_in_values
from graftax.transforms._engine.program import Program
from graftax.transforms._engine.spec_broadcast import Broadcast
from graftax.transforms._engine.specs import UNKNOWN, Constant, LeafContext, Spec, SpecOption

ENTRIES_COUNT = (
    "{name}: {option} is a tuple of {count}, and there are {actual} positional arguments. Give one entry for each of "
    "them{keywords}."
)
RETURNED_OTHERWISE = (
    "{name} returns, at {path}, an object that it was given: {inputs} says {entry!r} for it, but {option} says "
    "{requested!r}. Give {entry!r} for it in {option}, or return a copy or the arrays alone."
)
PACK_MAPPED = (
    "{name}: {option} maps {path}, a buffer of packed state, which has no such axis. Pass what unpack() gives, or give "
    "{entry!r} for the handle."
)


_RESULT = "result"

Call = Callable[[Sequence[Callable[..., Any]], Sequence[Any]], Any]


def broadcast_of(program: Program, option: SpecOption, spec: object, keyword: object) -> Broadcast:
    """Broadcasts a spec of the arguments to the leaves of a program.

    Raises:
        StructureError: if the spec maps a buffer of packed state.
    """
    broadcast = Broadcast(
        program.graphdef, program.names, _specs_of_roots(program, option, spec, keyword), program.leaves
    )
    for i in itertools.chain.from_iterable(map(broadcast.leaves_in_type, HANDLE_CLASSES)):
        if broadcast.leaf_specs[i] != option.nothing:
            raise StructureError(option.text(PACK_MAPPED, path=broadcast.path(i), entry=option.nothing))
    return broadcast


def as_positional(
    fun: Callable[..., object], spec: object, args: tuple[object, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, keyword arguments), where keywords become positional if a tuple of entries counts them."""
    # In JAX, entries are for positional arguments only. Here `f(x, y=y)` with two entries means what `f(x, y)` does.
    if kwargs and isinstance(spec, (tuple, list)) and len(cast("Sequence[Any]", spec)) > len(args):
        bound = inspect.signature(fun).bind(*args, **kwargs)
        if len(bound.args) == len(cast("Sequence[Any]", spec)):
            return bound.args, bound.kwargs
    return args, kwargs


def _specs_of_roots(program: Program, option: SpecOption, spec: object, keyword: object) -> list[Spec]:
    """One spec per root. Captured roots are not mapped; keyword arguments have the spec `keyword`."""
    count = program.positional
    keywords = program.operands - count
    captured = [Constant(option, option.nothing)] * (len(program.roots) - program.operands)
    # A tuple has an entry for each positional argument, unless it is a spec itself.
    if isinstance(spec, (tuple, list)) and not option.is_leaf_spec(spec):
        # The prefix is adapted as a whole, because its entries may share parts.
        spec = spec if (adapted := interop.prefix(spec)) is None else adapted
        entries = cast("Sequence[Any]", spec)
        if len(entries) != count or (keywords and keyword is UNKNOWN):
            text = "; keyword arguments are not counted" if keyword is not UNKNOWN else ", and no keyword arguments"
            raise ValueError(option.text(ENTRIES_COUNT, count=len(entries), actual=count, keywords=text))
        return [*map(option.read, entries), *[Constant(option, keyword)] * keywords, *captured]
    # Anything else is for all arguments together, but a constant leaves keyword arguments the spec `keyword`.
    read = spec if isinstance(spec, Spec) else option.read(spec, names=True)
    keyword_spec = Constant(option, keyword) if isinstance(read, Constant) and keyword is not UNKNOWN else read
    return [*[read] * count, *[keyword_spec] * keywords, *captured]


class OutputLeaf(NamedTuple):
    """An output leaf of a traced function: an array of its result, or one that it wrote into an object."""

    path: str
    leaf: Any
    spec: Any
    is_write: bool
    input_leaf: int | None  # the leaf of the program that it is, if it is unchanged
    in_value: bool  # in the result, within an object that JAX does not open


def trace_outputs(
    program: Program,
    broadcast: Broadcast,
    option: SpecOption,
    leaves: Sequence[object],
    spec: object,
    ignore_opaque: bool = False,
    call: Call = call_first,
) -> list[OutputLeaf]:
    """Traces a program with these leaves, and assigns to each output leaf what the user's `spec` says of it."""
    results: list[Any] = []
    operands_after: list[RecordedView] = []

    def body(functions: list[Callable[..., Any]], operands: list[Any]) -> Any:
        result = call(functions, operands)
        results.append(result)
        # Filters also decide about new leaves in the operands, which have to be recorded before the trace ends.
        if broadcast.has_filters:
            values, graphdef = _core.record(tuple(operands))
            operands_after.append(RecordedView(graphdef, values))
        return result

    outcome, outputs = program.trace(leaves, body, arrays=True)
    nodes, _, tracks = outcome.inputs()
    leaf_places = outcome.leaf_places()
    read = option.read(spec)
    # The result is flattened by value for this: a returned operand has no output leaves of its own. A constant is the
    # same for all leaves.
    result_specs = None
    if nodes or not isinstance(read, Constant):
        values, graphdef = _core.flatten(results[0])
        result_specs = Broadcast(graphdef, (_RESULT,), [read], values)
    excluded = leaves_in_functions(outcome) if ignore_opaque else set[int]()
    in_values = leaves_in_values(outcome) if ignore_opaque else set[int]()
    output_leaves: list[OutputLeaf] = []
    # Root 0 of an Outcome is the result; each other root is an operand's node that the function has written to.
    for i, ((root, path), leaf) in enumerate(zip(leaf_places, outputs, strict=True)):
        if root > 0:
            graph_after = operands_after[-1] if operands_after else None
            name, leaf_spec = broadcast.spec_of_written(tracks[root - 1], path, leaf, graph_after)
        else:
            name = _RESULT + path_text(path)
            if i in excluded:
                leaf_spec = option.nothing
            elif result_specs is not None:
                leaf_spec = result_specs.spec_at(path)
            else:
                leaf_spec = read.leaf_spec(leaf, LeafContext(lambda: _RESULT, tuple))
        input_leaf = program.untouched.get(i)
        # An unchanged leaf keeps the caller's array only if its spec is the same on both sides.
        if input_leaf is not None and not _is_equivalent(option, leaf_spec, [broadcast.leaf_specs[input_leaf]], leaf):
            input_leaf = None
        output_leaves.append(OutputLeaf(name, leaf, leaf_spec, root > 0, input_leaf, root == 0 and i in in_values))
    # A returned operand keeps the arrays that it has, so its spec in the result has to agree with them.
    if result_specs is not None and nodes:
        known = [*zip(leaves, broadcast.leaf_specs, strict=True), *((o.leaf, o.spec) for o in output_leaves)]
        own_paths = {path for root, path in leaf_places if root == 0}
        _check_returned(option, broadcast.keyword, result_specs, own_paths, known, ignore_opaque)
    return output_leaves


def _check_returned(
    option: SpecOption,
    keyword: str,
    result_specs: Broadcast,
    own_paths: AbstractSet[tuple[Any, ...]],
    known: Sequence[tuple[Any, Any]],
    ignore_opaque: bool,
) -> None:
    """Raises StructureError if a returned operand, which keeps its arrays, has another spec in the result.

    `own_paths` are those of arrays that the result has of its own. `known`: input and written leaves, and their specs.
    """
    paths = result_specs.graphdef.leaf_paths()
    ignored = {paths[i] for i in leaves_in_values(result_specs.graphdef)} if ignore_opaque else set[Any]()
    # A tracer tells which input or written leaf an array of a returned operand is; it may be several of them.
    specs_by_id: dict[int, list[Any]] = {}
    for leaf, leaf_spec in known:
        specs_by_id.setdefault(id(leaf), []).append(leaf_spec)
    for path, leaf, requested in zip(paths, result_specs.leaves, result_specs.leaf_specs, strict=True):
        specs = specs_by_id.get(id(leaf)) if path not in own_paths and path not in ignored else None
        if specs and not _is_equivalent(option, requested, specs, leaf):
            fields = {"entry": specs[0], "requested": requested, "inputs": keyword}
            raise StructureError(option.text(RETURNED_OTHERWISE, path=_RESULT + path_text(path), **fields))


def _is_equivalent(option: SpecOption, leaf_spec: object, specs: Sequence[object], leaf: object) -> bool:
    """Is it equivalent to one of these specs? For axes, -1 and 1 may mean the same."""
    return any(option.canonical(leaf_spec, leaf) == option.canonical(spec, leaf) for spec in specs)
