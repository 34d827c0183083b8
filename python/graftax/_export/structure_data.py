# SPDX-License-Identifier: Apache-2.0
"""The structure of an entry as data, from which another process builds the entry before any call."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

from graftax import _core
from graftax._export.structure_digest import sentinels
from graftax._graph.pickling import ByName, graphdef_from_state, picklable
from graftax._graph.structure import Structure

# Indices in the state of a GraphDef (`_STATICS`, `_CODE`), and in one instruction of its code.
_STATICS, _CODE, _TRACK, _SENTINEL = 5, 4, 4, 13


@dataclasses.dataclass
class Structured:
    """The parts of an entry whose structure can be pickled.

    `unnamed` are the rows of sentinels without a name: placeholders, of which each process has its own.
    """

    state: bytes
    names: tuple[str, ...]
    arguments: int
    tupled: bool
    unnamed: tuple[int, ...]

    @classmethod
    def from_entry(
        cls, entry: _core.Entry, graphdef: _core.GraphDef, names: tuple[str, ...], arguments: int
    ) -> Structured | None:
        try:
            name_of = sentinels(Structure(graphdef))
            named = {number: ByName(*name) for number, name in name_of.items() if name is not None}
            state = _with_sentinels(picklable(graphdef, "GraphDef"), named)
            unnamed = tuple(number for number, name in name_of.items() if name is None)
            return cls(pickle.dumps(state), names, arguments, entry.tupled, unnamed)
        # A static value cannot be pickled, such as a lambda. The first call finds the program by its digest alone.
        except Exception:
            return None

    def graphdef(self) -> _core.GraphDef:
        return graphdef_from_state(pickle.loads(self.state))


def bind_sentinels(
    graphdef: _core.GraphDef, unnamed: tuple[int, ...], named: dict[int, Any], roots: tuple[Any, ...]
) -> _core.GraphDef | None:
    """The structure with the placeholders of these roots in place of its own. None if the roots do not fit.

    Sharing is compared. An object that code finds by name (one of `named`) is not a placeholder.
    """
    # Once with any object as a sentinel, to find those of the roots; at the end with these, and with the named ones.
    walk = _core.walk(graphdef, roots, any_sentinel=True)
    if walk is None:
        return None
    state = graphdef._state()  # pyright: ignore[reportPrivateUsage]
    instances = {number: walk[1][state[_CODE][number][_TRACK]] for number in unnamed}
    if any(id(value) in named for value in instances.values()):
        return None
    bound_graphdef = graphdef_from_state(_with_sentinels(state, instances))
    return bound_graphdef if _core.walk(bound_graphdef, roots) is not None else None


def _with_sentinels(state: tuple[Any, ...], instances: dict[int, Any]) -> tuple[Any, ...]:
    """A GraphDef's state with other sentinels in these rows."""
    statics = list(state[_STATICS])
    for number, value in instances.items():
        static_index = state[_CODE][number][_SENTINEL]
        statics[static_index] = (statics[static_index][0], value, *statics[static_index][2:])
    return (*state[:_STATICS], tuple(statics), *state[_STATICS + 1 :])
