# SPDX-License-Identifier: Apache-2.0
"""The attributes of JAX's stages, from flat leaves to the structures of the arguments and of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from graftax import _core
from graftax._base.errors import GraftaxError

if TYPE_CHECKING:
    from graftax._jit.stages import Staging

NO_COPY = "{name} returns or changes an object that cannot be copied, so its result is not known without a call."

OF_ARGUMENTS = frozenset({"args_info", "in_avals", "input_shardings", "input_formats"})
_OF_RESULT = {
    "out_info": "args_info",
    "out_avals": "in_avals",
    "output_shardings": "input_shardings",
    "output_formats": "input_formats",
}
_TREES = {"in_tree": "in_avals", "out_tree": "out_info"}
NAMES = OF_ARGUMENTS | _OF_RESULT.keys() | _TREES.keys()


def info(staging: Staging, stage: object, name: str) -> Any:
    """An attribute of a JAX stage, in the structure of the user function's arguments or result."""
    if name in _TREES:
        return jax.tree.structure(info(staging, stage, _TREES[name]))
    flat: Callable[[str], list[Any]] = lambda attribute: flat_arguments(staging, getattr(stage, attribute))  # noqa: E731
    if name in OF_ARGUMENTS:
        return _of_arguments(staging, flat(name))
    # What the function returns untouched is not an output of the program: it has what the argument has.
    forwarded: list[Any] = flat(_OF_RESULT[name])
    if name == "out_info":
        forwarded = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in forwarded]
    return _of_result(staging, flat("args_info"), forwarded, getattr(stage, name))


def flat_arguments(staging: Staging, arguments: Any) -> list[Any]:
    """What a JAX stage says of its arguments, one value a leaf."""
    return list(arguments[0][0] if staging.entry.tupled else arguments[0])


def _of_arguments(staging: Staging, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) as they were given, with these leaves and None in place of static values."""
    # As in JAX, arguments that are declared static are left out.
    roots = _core.unflatten_roots(staging.graphdef, leaves, True)
    positional, named = staging.spelling
    names, static = staging.plan.signature.root_names(staging.layout), staging.static
    args = tuple(roots[staging.bound_count + i] for i in range(positional) if i not in static)
    return args, {name: roots[names.index(name)] for name in named if name not in static}


def _of_result(staging: Staging, arguments: list[Any], forwarded: list[Any], flat: tuple[Any, Any, Any]) -> Any:
    result, written, code = flat
    outcome = staging.entry.outcomes[_core.decode(code)]
    avals = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in arguments]
    _core.record(tuple(avals))  # a walk can handle only types that a recording has seen
    # The Outcome writes to a copy of the arguments. An object that two copies share is none: it is the user's own.
    copies = [_core.walk(staging.graphdef, _core.unflatten_roots(staging.graphdef, avals)) for _ in range(2)]
    (_, first_nodes), (_, second_nodes) = [copy or ([], []) for copy in copies]
    if None in copies or any(first_nodes[i] is second_nodes[i] for i in outcome.inputs()[2]):
        raise GraftaxError(NO_COPY.format(name=staging.plan.name))
    return outcome.apply([*result, *written], forwarded, first_nodes)
