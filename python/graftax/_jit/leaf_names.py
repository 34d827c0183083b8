# SPDX-License-Identifier: Apache-2.0
"""Key paths as the names of flat leaves in JAX's programs, profiles, logs and errors."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graftax import _core
from graftax._base.key_path import keystr
from graftax._graph.structure import RootPath, place_name, written_path

if TYPE_CHECKING:
    from graftax._jit.stages import Staging


def leaf_names(graphdef: _core.GraphDef, root_names: tuple[str, ...]) -> list[str]:
    """One name for each leaf: `params['w']`, `model.layers[0].bias`."""
    return graphdef._leaf_names(root_names)  # pyright: ignore[reportPrivateUsage]


def named_leaves(recording: _core.Recording) -> list[tuple[Any, str]]:
    """(leaf, its name) of each leaf of a call."""
    return list(zip(recording.leaves, leaf_names(recording.graphdef, recording.names), strict=True))


def output_places(outcome: _core.Outcome) -> list[RootPath]:
    """The places of the outputs of a program: of the leaves of its Outcome, but for symbolic numbers."""
    # Those are computed by the host.
    numbers = {leaf for leaf, _ in outcome.numbers}
    return [place for i, place in enumerate(outcome.leaf_places()) if i not in numbers]


def output_names(staging: Staging, stage: Any) -> list[tuple[str, bool]]:
    """(key path, is it written back) of each output of a JAX stage, in the result or in what the call changes."""
    results, written, code = stage.out_info
    count = len(results) + len(written)
    outcome = staging.entry.outcomes[_core.decode(code)]
    nodes = outcome.inputs()[2]
    names = [(output_path(staging, nodes, place), place[0] > 0) for place in output_places(outcome)]
    return names if len(names) == count else [(f"output {i}", i >= len(results)) for i in range(count)]


def output_path(recorded: _core.Recording | Staging, nodes: Sequence[int], place: RootPath) -> str:
    """The key path of an output leaf as a text: in the result, or below the argument that is written.

    `nodes` are those that the Outcome writes, and `place` is the place of the leaf in it.
    """
    # Root 0 of an Outcome is the result, the others are written nodes.
    if place[0] == 0:
        return f"result{keystr(place[1])}"
    return place_name(written_path(recorded.graphdef, nodes, place), recorded.names)


_TUPLED = [inspect.Parameter("leaves", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
_SEPARATE = [inspect.Parameter("leaves", inspect.Parameter.VAR_POSITIONAL)]


class LeafNames(inspect.Signature):
    """The signature of a flat function: JAX binds it, once a trace, to find the name of each leaf.

    A parameter cannot be called `model.enc['w']`, so `bind` puts such names into the bound arguments instead. JAX keeps
    the signature as long as the function. It refers to the GraphDef weakly, because that leads to the user's classes.
    """

    def __init__(self, graphdef: _core.GraphDef, roots: tuple[str, ...], tupled: bool) -> None:
        super().__init__(_TUPLED if tupled else _SEPARATE)
        self._tupled, self._roots = tupled, roots
        self._graphdef = weakref.ref(graphdef)

    @property
    def names(self) -> list[str]:
        """A distinct name for each leaf; empty once the entry is gone."""
        graphdef = self._graphdef()
        names = [] if graphdef is None else leaf_names(graphdef, self._roots)
        # One array may be two leaves of the same name. `bind` makes a dict, which would lose one of them.
        has_duplicates = len(set(names)) < len(names)
        return [f"{name} ({i})" for i, name in enumerate(names)] if has_duplicates else names

    def bind(self, *args: object, **kwargs: object) -> inspect.BoundArguments:
        # JAX also binds arguments of another number, to say that they do not fit.
        (leaves,) = args if self._tupled and len(args) == 1 else (args,)
        bound = super().bind(*args, **kwargs)
        names = self.names
        # With symbolic numbers, two vectors that the host computes from them follow the leaves.
        if isinstance(leaves, tuple) and len(leaves) == len(names) + 2:
            names = [*names, "whole numbers", "floating numbers"]
        if isinstance(leaves, tuple) and len(leaves) == len(names):
            bound.arguments = dict(zip(names, leaves, strict=True))
        return bound
