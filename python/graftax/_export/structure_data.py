# SPDX-License-Identifier: Apache-2.0
"""The structure of an entry in a file, and here again, before a call has asked for it."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

from graftax import _core
from graftax._export.digest import sentinels
from graftax._graph.pickling import ByName, graphdef_from_state, picklable
from graftax._graph.structure import Structure

_STATICS, _CODE, _TRACK, _OWN = 5, 4, 4, 13  # of a state, and of an instruction in it


@dataclasses.dataclass
class Structured:
    """What an entry is made of, where its structure has a pickle.

    `unnamed` are the rows of instances without fields that no name leads to: placeholders in a graph, of which each
    process has its own.
    """

    state: bytes
    names: tuple[str, ...]
    arguments: int
    tupled: bool
    unnamed: tuple[int, ...]

    @classmethod
    def of(cls, entry: _core.Entry, graphdef: _core.GraphDef, names: tuple[str, ...], arguments: int) -> Any:
        try:
            places = sentinels(Structure(graphdef))
            named = {number: ByName(*place) for number, place in places.items() if place is not None}
            state = _with_sentinels(picklable(graphdef, "GraphDef"), named)
            unnamed = tuple(number for number, place in places.items() if place is None)
            return cls(pickle.dumps(state), names, arguments, entry.tupled, unnamed)
        except Exception:  # what it holds says what it cannot be
            return None

    def graphdef(self) -> _core.GraphDef:
        return graphdef_from_state(pickle.loads(self.state))


def bound(
    graphdef: _core.GraphDef, unnamed: tuple[int, ...], named: dict[int, Any], roots: tuple[Any, ...]
) -> _core.GraphDef | None:
    """The structure with the placeholders of these roots in the place of its own; None where the roots do not fit.

    Sharing is compared, and an object that code finds by a name (one of `named`) is no placeholder.
    """
    walk = _core.walk(graphdef, roots, any_sentinel=True)
    if walk is None:
        return None
    state = graphdef._state()  # pyright: ignore[reportPrivateUsage]
    own = {number: walk[1][state[_CODE][number][_TRACK]] for number in unnamed}
    if any(id(value) in named for value in own.values()):
        return None
    out = graphdef_from_state(_with_sentinels(state, own))
    return out if _core.walk(out, roots) is not None else None  # those with a name are compared


def _with_sentinels(state: tuple[Any, ...], own: dict[int, Any]) -> tuple[Any, ...]:
    """A state with other objects in the place of the instances without fields in these rows."""
    statics = list(state[_STATICS])
    for number, value in own.items():
        at = state[_CODE][number][_OWN]
        statics[at] = (statics[at][0], value, *statics[at][2:])
    return (*state[:_STATICS], tuple(statics), *state[_STATICS + 1 :])
