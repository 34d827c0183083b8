# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time stages: `trace`, `lower` and `compile`. A compiled stage checks the structure of its arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, NoReturn, ParamSpec, TypeVar, cast

import numpy as np

from graftax import _core
from graftax._base.errors import StructureError, UnpicklableError, rename_leaves
from graftax._capture.origin import Origin
from graftax._capture.signature import give_back
from graftax._explain.compile_events import compiling
from graftax._graph.structure_diff import Difference, differences, differences_text
from graftax._jax.tracebacks import boundary
from graftax._jit.call_plan import Layout, Plan
from graftax._jit.leaf_guards import LeafGuards
from graftax._jit.leaf_names import leaf_names
from graftax._jit.stage_info import NAMES, info

COMPILED_FOR_OTHERS = (
    "{name} was {verb} for other arguments:\n{differences}\n{remedy}, or call the jitted function, which compiles for "
    "any arguments."
)
LOWER_AGAIN = "Lower it again for these"
ANY_NUMBER = "Write dynamic={path!r} for a program that takes any number, {otherwise}"
OTHER_ORDER = "  a set with the same elements iterates in a different order, or would after a change"
NOT_PICKLABLE = (
    "a {what} belongs to this process and cannot be pickled or copied. graftax.export(f)(*args).serialize() makes "
    "bytes that another process can call; a copy of the jitted function can be lowered again."
)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Matched(NamedTuple):
    """The arguments of a call, as its roots."""

    roots: tuple[object, ...]
    layout: tuple[object, ...]
    # The names among the roots that the code assigns, with their cells and what these held.
    captures: list[tuple[Origin, types.CellType, object]]


@dataclasses.dataclass(frozen=True, eq=False)
class Staging:
    """What a stage needs to check later arguments and to build the result."""

    caller: Any  # the Jitted
    plan: Plan  # of that time: the caller's plan may have more roots by now
    graphdef: _core.GraphDef
    layout: Layout
    names: tuple[str, ...]  # of the roots
    entry: _core.Entry  # the one that a call would run
    bound_count: int  # how many roots the bound method provides
    spelling: tuple[int, tuple[str, ...]]  # how many arguments were given by position, and the names of the others
    static: dict[int | str, object]  # the arguments that are declared static

    def match(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[list[Any], list[Any], Matched]:
        """(leaves, nodes, arguments) of a call. As in JAX, what is declared static may be left out."""
        try:
            return self._match(args, kwargs)
        except (StructureError, TypeError):
            if not self.static:
                raise
            # Once more with the static arguments in their places. If that does not fit either, the first error counts.
            with_static = list(args)
            for i in sorted(i for i in self.static if isinstance(i, int)):
                with_static.insert(i, self.static[i])
            named = {name: value for name, value in self.static.items() if isinstance(name, str)}
            with contextlib.suppress(StructureError, TypeError):
                return self._match(tuple(with_static), {**kwargs, **named})
            raise

    def _match(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[list[Any], list[Any], Matched]:
        plan = self.plan
        roots, layout = self.caller._bind_arguments(args, kwargs, plan)
        captures = plan.signature.held(roots)
        leaves, nodes = match_structure(
            plan.name, self.graphdef, self.layout, self.names, roots, layout, plan.record, in_order=True
        )
        refuse_unguarded(plan.name, LeafGuards.of(self.entry), leaves, self.graphdef, self.names)
        return leaves, nodes, Matched(roots, layout, captures)


class _Stage(Generic[P, R]):
    """Wraps a stage of JAX, whose attributes are available here.

    Those about arguments and result (`args_info`, `out_info`, `in_tree`, `output_shardings`) have the structures of the
    user function instead of the flat ones.
    """

    def __init__(self, staging: Staging, stage: Any) -> None:
        self._staging, self._stage = staging, stage

    def __getattr__(self, name: str) -> Any:
        if name in ("_stage", "_staging"):  # during copy or unpickle, before __init__
            raise AttributeError(name)
        return info(self._staging, self._stage, name) if name in NAMES else getattr(self._stage, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._stage)})

    def __repr__(self) -> str:
        return f"<graftax {type(self).__name__} of {self._staging.plan.name}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UnpicklableError(NOT_PICKLABLE.format(what=f"{type(self).__name__} function"))


class Traced(_Stage[P, R]):
    """The result of `Jitted.trace`: a traced function. Its `jaxpr` takes and returns flat leaves."""

    @boundary
    def lower(self, **options: Any) -> Lowered[P, R]:
        """Lowers the function. The options are those of `jax.stages.Traced.lower`."""
        return Lowered(self._staging, self._stage.lower(**options))


class Lowered(_Stage[P, R]):
    """The result of `Jitted.lower`: a function in the compiler's input language."""

    @property
    def lowered(self) -> Any:
        """JAX's own stage, under the name that Equinox uses."""
        return self._stage

    @boundary
    def compile(self, *args: Any, **options: Any) -> Compiled[P, R]:
        """Compiles the function. The arguments are those of `jax.stages.Lowered.compile`."""
        with compiling(self._staging.caller._table.history.latest_variant(self._staging.entry)):
            return Compiled(self._staging, self._stage.compile(*args, **options))


class Compiled(_Stage[P, R]):
    """A compiled function: takes arguments with the structure and the static values that it was lowered for."""

    @property
    def compiled(self) -> Any:
        """JAX's own stage, under the name that Equinox uses."""
        return self._stage

    @boundary
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs it.

        Args:
            *args, **kwargs: the arguments of a call. What is declared static may be left out, as in JAX.

        Raises:
            StructureError: if the structure or a static value differs; it names the key paths.
            TypeError: if an array has a different shape or dtype; it names its path.
        """
        staging = self._staging
        leaves, nodes, (roots, layout, captures) = staging.match(args, kwargs)
        # The flat program runs as in a call. Its errors name flat leaves, and get key paths.
        try:
            arguments = copy_numpy_leaves(leaves)
            result, written, code = self._stage(tuple(arguments)) if staging.entry.tupled else self._stage(*arguments)
        except (TypeError, ValueError) as error:
            rename_leaves(error, leaf_names(staging.graphdef, staging.names))
            raise
        except RuntimeError as error:
            raise staging.caller._explain(error, roots, layout) from error.__cause__  # pyright: ignore[reportPrivateUsage]
        # JAX returns the number of the Outcome with the outputs: that one builds the result and writes back.
        outcome = staging.entry.outcomes[_core.decode(code)]
        value = outcome.apply([*result, *written], leaves, nodes)
        give_back(captures)
        return cast(R, value)


def copy_numpy_leaves(leaves: list[Any]) -> list[Any]:
    """The leaves with copies of NumPy arrays, which the executable may still read after the call has returned."""
    return [x.copy() if isinstance(x, (np.ndarray, np.generic)) else x for x in leaves]


def match_structure(
    name: str,
    graphdef: _core.GraphDef,
    layout: tuple[object, ...],
    names: tuple[str, ...],
    roots: tuple[object, ...],
    layout_given: tuple[object, ...],
    record: Callable[[tuple[object, ...], Layout], _core.Recording],
    verb: str = "compiled",
    remedy: str = LOWER_AGAIN,
    in_order: bool = False,
) -> tuple[list[Any], list[Any]]:
    """(leaves, nodes) of these roots. Raises if their structure is not `graphdef` or their layout is not `layout`.

    Args:
        name: of the function, for messages; so are `names`, `verb` and `remedy`.
        graphdef, layout: what is expected.
        roots, layout_given: the arguments.
        record: `record(roots, layout)` records as `graphdef` was recorded.
        in_order: sets have to iterate in the same order, too.
    """
    walked = _core.walk(graphdef, roots, in_order=in_order) if layout_given == layout else None
    if walked is not None:
        return walked
    # From here on the call fails, unless the walk lacked a class: find the difference for the message.
    if layout_given != layout:
        extra = [layout[0] if layout else 0, layout_given[0] if layout_given else 0]
        named = [", ".join(map(repr, names[1:])) or "none" for names in (layout, layout_given)]
        differing = [
            Difference("extra positional arguments", str(extra[0]), str(extra[1])),
            Difference("extra keyword arguments", named[0], named[1]),
        ]
        text = "\n".join("  " + difference.line() for difference in differing if difference.one != difference.other)
    else:
        recorded = record(roots, layout).graphdef
        # The recording has described classes that the walk did not know.
        walked = _core.walk(graphdef, roots, in_order=in_order)
        if walked is not None:
            return walked
        text = OTHER_ORDER if in_order and graphdef == recorded else differences_text(graphdef, recorded, names)
        # If a number differs, a program that takes any number is most likely what is wanted.
        numbers = (d.path for d in differences(graphdef, recorded, names) if _is_number(d.one) and _is_number(d.other))
        if (path := next(numbers, None)) is not None:
            remedy = ANY_NUMBER.format(path=path, otherwise=remedy[0].lower() + remedy[1:])
    raise StructureError(COMPILED_FOR_OTHERS.format(name=name, verb=verb, differences=text, remedy=remedy))


def refuse_unguarded(
    name: str,
    guards: LeafGuards,
    leaves: Sequence[object],
    graphdef: _core.GraphDef,
    names: tuple[str, ...],
    verb: str = "compiled",
    remedy: str = LOWER_AGAIN,
) -> None:
    """Raises StructureError where these leaves need another program, though their structure is `graphdef`."""
    if (broken := guards.broken(leaves)) is not None:
        paths = leaf_names(graphdef, names)
        text = f"  {Difference(' and '.join(paths[leaf] for leaf in broken[0]), *broken[1:]).line()}"
        raise StructureError(COMPILED_FOR_OTHERS.format(name=name, verb=verb, differences=text, remedy=remedy))


def _is_number(text: str) -> bool:
    try:
        complex(text)
    except ValueError:
        return False
    return True
