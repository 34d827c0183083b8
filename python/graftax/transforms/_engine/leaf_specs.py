# SPDX-License-Identifier: Apache-2.0
"""The spec of each leaf that a transform is given and gives: an axis, or a sharding."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, cast

from graftax import _core, interop
from graftax._base.errors import StructureError
from graftax._base.handles import handle_classes
from graftax._graph.filters import Recorded
from graftax._graph.structure import path_text
from graftax.transforms._engine.lift import call_first
from graftax.transforms._engine.opaque_leaves import leaves_in_functions, leaves_in_values
from graftax.transforms._engine.program import Program
from graftax.transforms._engine.specs import UNKNOWN, Broadcast, Constant, Here, Spec, SpecOption

ENTRIES_COUNT = (
    "{name}: {option} is a tuple of {count}, and there are {given} positional arguments. Give one entry for each of "
    "them{keywords}."
)
RETURNED_OTHERWISE = (
    "{name} returns at {path} an object that it was given, which comes back with {entry!r}, as {inputs} says, and "
    "{option} asks for {asked!r} there. Give {entry!r} for it in {option}, or return a copy or the arrays alone."
)
PACK_MAPPED = (
    "{name}: {option} maps {path}, a buffer of packed state, which has no such axis. Pass what unpack() gives, or give "
    "{entry!r} for the handle."
)


_RESULT = "result"

Call = Callable[[Sequence[Callable[..., Any]], Sequence[Any]], Any]


def broadcast_of(program: Program, option: SpecOption, spec: Any, keyword: Any) -> Broadcast:
    """A spec of the arguments, brought to the leaves of a program."""
    broadcast = Broadcast(
        program.graphdef, program.names, _specs_of_roots(program, option, spec, keyword), program.leaves
    )
    for i in itertools.chain.from_iterable(map(broadcast.inside, handle_classes())):
        if broadcast.leaf_specs[i] != option.nothing:
            raise StructureError(
                PACK_MAPPED.format(
                    name=option.name, option=option.keyword, path=broadcast.path(i), entry=option.nothing
                )
            )
    return broadcast


def as_positional(
    fun: Callable[..., Any], spec: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, keyword arguments), with those by position that a tuple of entries has one for."""
    if kwargs and isinstance(spec, (tuple, list)) and len(cast("Sequence[Any]", spec)) > len(args):
        bound = inspect.signature(fun).bind(*args, **kwargs)
        if len(bound.args) == len(cast("Sequence[Any]", spec)):
            return bound.args, bound.kwargs
    return args, kwargs


def _specs_of_roots(program: Program, option: SpecOption, spec: Any, keyword: Any) -> list[Spec]:
    """One spec a root: what is captured is not mapped; keyword arguments have the spec `keyword`."""
    count = program.positional
    keywords = program.operands - count
    captured = [Constant(option, option.nothing)] * (len(program.roots) - program.operands)
    if isinstance(spec, (tuple, list)) and not option.is_leaf_spec(spec):
        spec = spec if (whole := interop.prefix(spec)) is None else whole  # at once: entries may have common parts
        each = cast("Sequence[Any]", spec)
        if len(each) != count or (keywords and keyword is UNKNOWN):
            text = "; keyword arguments are not counted" if keyword is not UNKNOWN else ", and no keyword arguments"
            raise ValueError(
                ENTRIES_COUNT.format(
                    name=option.name, option=option.keyword, count=len(each), given=count, keywords=text
                )
            )
        return [*map(option.read, each), *[Constant(option, keyword)] * keywords, *captured]
    read = spec if isinstance(spec, Spec) else option.read(spec, names=True)
    rest = Constant(option, keyword) if isinstance(read, Constant) and keyword is not UNKNOWN else read
    return [*[read] * count, *[rest] * keywords, *captured]


class OutputLeaf(NamedTuple):
    """An output leaf of a traced function: of the result, or of what it changed."""

    path: str
    leaf: Any
    spec: Any
    written: bool
    of: int | None  # the leaf of the program that it is, untouched
    in_value: bool = False  # of the result, in what JAX does not open


class Outputs:
    """Gives each output leaf of a program its spec.

    Args:
        program: the program.
        broadcast: the specs of its leaves.
        option: what its result is given.
        leaves: what the transform gives in their place.
    """

    def __init__(self, program: Program, broadcast: Broadcast, option: SpecOption, leaves: Sequence[Any]) -> None:
        self._program, self._broadcast, self._option, self._leaves = program, broadcast, option, leaves

    def trace(self, spec: Any, alone: bool = False, call: Call = call_first) -> list[OutputLeaf]:
        """Runs the program, whose result is given `spec`. `alone`: but for what functions in it capture.

        `call` calls the function.
        """
        results: list[Any] = []
        after: list[Recorded] = []

        def body(functions: list[Callable[..., Any]], operands: list[Any]) -> Any:
            result = call(functions, operands)
            results.append(result)
            if self._broadcast.has_filters:  # they are asked about what is new in the operands, too
                leaves, graphdef = _core.record(tuple(operands))
                after.append(Recorded(graphdef, leaves))
            return result

        outcome, out = self._program.trace(self._leaves, body, arrays=True)
        nodes, _, tracks = outcome.inputs()
        places = outcome.leaf_places()
        read = self._option.read(spec)
        whole = None
        if nodes or not isinstance(read, Constant):  # else it is the same for all
            values, graphdef = _core.flatten(results[0])
            whole = Broadcast(graphdef, (_RESULT,), [read], values)
        apart = leaves_in_functions(outcome) if alone else set[int]()
        in_values = leaves_in_values(outcome) if alone else set[int]()
        found: list[OutputLeaf] = []
        for i, ((root, path), leaf) in enumerate(zip(places, out, strict=True)):
            if root > 0:
                name, leaf_spec = self._broadcast.written(tracks[root - 1], path, leaf, after[-1] if after else None)
            else:
                name = _RESULT + path_text(path)
                leaf_spec = whole.at(path) if whole is not None else read.leaf_spec(leaf, Here(lambda: _RESULT, tuple))
            leaf_spec = self._option.nothing if i in apart and root == 0 else leaf_spec
            of = self._program.untouched.get(i)
            if of is not None and not self._same(leaf_spec, self._broadcast.leaf_specs[of], leaf):
                of = None
            found.append(OutputLeaf(name, leaf, leaf_spec, root > 0, of, root == 0 and i in in_values))
        if whole is not None and nodes:
            own = {path for root, path in places if root == 0}
            if alone:
                paths = whole.graphdef.leaf_paths()
                own.update(paths[i] for i in leaves_in_values(whole.graphdef))
            self._check_returned(whole, own, found)
        return found

    def _check_returned(self, whole: Broadcast, own: AbstractSet[tuple[Any, ...]], found: Sequence[OutputLeaf]) -> None:
        """An object that the function was given, and returns, comes back as it is: is that what was asked for?"""
        option = self._option
        has: dict[int, list[Any]] = {}
        for leaf, leaf_spec in [
            *zip(self._leaves, self._broadcast.leaf_specs, strict=True),
            *((o.leaf, o.spec) for o in found),
        ]:
            has.setdefault(id(leaf), []).append(leaf_spec)
        for path, leaf, asked in zip(whole.graphdef.leaf_paths(), whole.leaves, whole.leaf_specs, strict=True):
            if path in own or id(leaf) not in has:
                continue
            leaf_spec = has[id(leaf)][0]
            if not any(self._same(asked, e, leaf) for e in has[id(leaf)]):
                raise StructureError(
                    RETURNED_OTHERWISE.format(
                        name=option.name,
                        path=_RESULT + path_text(path),
                        option=option.keyword,
                        entry=leaf_spec,
                        asked=asked,
                        inputs=self._broadcast.keyword,
                    )
                )

    def _same(self, leaf_spec: Any, other: Any, leaf: Any) -> bool:
        return self._option.canonical(leaf_spec, leaf) == self._option.canonical(other, leaf)
