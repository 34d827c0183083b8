# SPDX-License-Identifier: Apache-2.0
"""Several hosts run one program: before a structure runs for the first time they compare what they are about to run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax.sharding import NamedSharding

from graftax import _core
from graftax._base.errors import type_name
from graftax._explain.array_signature import sharding_text
from graftax._graph.graphdef_methods import stable_text
from graftax._graph.structure import Op, Structure, place_name
from graftax._jax import fast_dispatch
from graftax._jax.tracebacks import boundary
from graftax._jit.call_plan import Layout, Plan
from graftax._jit.multihost_rendezvous import Line, Meeting, packed, store
from graftax._jit.number_policy import SymbolicNumbers

_MOST = 200  # characters of a value
_SHOWN = 6  # numbers
_HOST_FUNCTION = re.compile(r'backend_config = "\d+"|index = \d+ : ui64')  # its address or number in this process


class Agreeing:
    """Stands around an entry's `jax.jit` object: compares the hosts before leaves of a kind that is new here run.

    Args:
        compiled: the object, or what stands in its place.
        plan, layout: of the function and of the call.
        outcomes, numbers: of the entry.
        tupled: does it take one tuple of leaves?
    """

    def __init__(
        self,
        compiled: Any,
        plan: Plan,
        layout: Layout,
        outcomes: list[_core.Outcome],
        numbers: SymbolicNumbers | None,
        tupled: bool,
    ) -> None:
        self._compiled, self._plan, self._layout = compiled, plan, layout
        self._outcomes, self._numbers, self._tupled = outcomes, numbers, tupled
        self._met: set[Any] = set()
        self.lower, self.trace = compiled.lower, compiled.trace

    def __call__(self, *given: Any) -> Any:
        leaves = given[0] if self._tupled else given
        self._before(leaves, lambda: self._own_program(given, leaves))
        return self._compiled(*given)

    def before_loaded(self, leaves: Sequence[Any], program: str, devices: Sequence[int]) -> None:
        """Compares hosts before a program that was loaded runs, by the digest in its file: others may compile it."""
        self._before(leaves, lambda: (program, "") if fast_dispatch.are_of_several(devices) else None)

    def _before(self, leaves: Sequence[Any], program: Callable[[], tuple[str, str] | None]) -> None:
        """`program`: its digest and its text; None where it is of this host alone."""
        key = tuple(map(_kind, leaves))
        if key not in self._met and not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            found = program()
            if found is not None:
                self._agree(*found)
            self._met.add(key)

    def _own_program(self, given: tuple[Any, ...], leaves: Sequence[Any]) -> tuple[str, str] | None:
        lowered = self._compiled.lower(*given)
        if not fast_dispatch.spans_processes(lowered, leaves):
            return None
        text = program_text(lowered)
        return digest(text.encode()), text

    def _agree(self, program: str, text: str) -> None:
        there, active = store(), _core.active_call(self._outcomes)
        if there is None or active is None:
            return
        plan = self._plan
        _, roots, recording, _ = active
        if recording is None:
            symbolic = self._numbers.places.keys() if self._numbers else ()
            recording = plan.record(roots, self._layout, symbolic=symbolic)
        texts = [_array_text(leaf) for leaf in recording.leaves]
        lines = [("the function", plan.name), *lines_of(recording.graphdef, recording.names, texts)]
        parts = {"the structure": digest(json.dumps(lines).encode()), "the program": program}
        Meeting(there, plan.name).agree(parts, lambda: packed(lines, text))


def program_text(lowered: Any) -> str:
    """A lowered program, without what is this process's own in it."""
    return _HOST_FUNCTION.sub("", lowered.as_text())


def lines_of(graphdef: _core.GraphDef, names: tuple[str, ...], leaves: Sequence[str]) -> list[Line]:
    """What a structure is, row by row, in texts that do not depend on the process."""
    structure = Structure(graphdef)
    lines: list[Line] = []
    for row in structure.rows:
        if row.op is Op.leaf:
            text = leaves[row.leaf]
        elif row.op is Op.node:
            text = f"{_text(row.type)} of {sum(1 for _ in structure.children(row))}"
        elif row.op is Op.static:
            text = _text(row.value)
        else:
            text = f"the same as {place_name(structure.place(structure.target(row)), names)}"
        lines.append((place_name(structure.place(row), names), text))
    return lines


def _text(value: Any) -> str:
    try:
        text = stable_text(value, lambda other: f"a {type_name(other)}")  # what has no name elsewhere: by its class
    except Exception:
        text = f"a {type_name(value)}"
    return text if len(text) <= _MOST else f"{text[:_MOST]}... ({digest(text.encode())[:8]})"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _kind(leaf: Any) -> Any:
    """What a program is compiled for, of a leaf."""
    return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False), getattr(leaf, "sharding", None)


def _array_text(leaf: Any) -> str:
    """Type and sharding of a leaf. Where an array of this host alone lies is no matter of the others."""
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        return type_name(leaf)
    weakly = ", weakly typed" if getattr(leaf, "weak_type", False) else ""
    known = jax.dtypes.canonicalize_dtype(dtype) if isinstance(leaf, (np.ndarray, np.generic)) else dtype
    text = f"{known}{list(shape)}{weakly}"
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or sharding.is_fully_addressable:
        return text
    devices = ""
    if isinstance(sharding, NamedSharding):
        ids = sorted((device.id, str(index)) for device, index in sharding.devices_indices_map(leaf.shape).items())
        devices = digest(repr(ids).encode())[:8]
    return f"{text}, {sharding_text(sharding)} (order {devices})" if devices else f"{text}, {sharding_text(sharding)}"


# ---- asked for by hand


@boundary
def check_hosts(obj: Any, values: bool = True) -> None:
    """Compares an object between the hosts: its structure and, with `values`, the numbers in its arrays.

    All hosts have to call it, at the same point. With one process it does nothing. An array that spans hosts is
    compared where several of them hold a copy of a part; all others are compared as a whole.

    Args:
        obj: any object: a model, a state, a batch, a dict of settings.
        values: False compares types, static values, shapes and shardings only.

    Raises:
        StructureError: on every host, with the first place that differs and what both have there; or where a host has
            not come after 60 s.

    Example:
        >>> graftax.check_hosts({"w": jnp.ones(3), "steps": 1000})
    """
    there = store()
    if there is None:
        return
    leaves, graphdef = _core.flatten(obj)
    texts = [_array_text(leaf) + (_value_text(leaf) if values else "") for leaf in leaves]
    lines = lines_of(graphdef, ("obj",), texts)
    Meeting(there, "check_hosts").agree(
        {"the structure": digest(json.dumps(lines).encode())}, lambda: packed(lines, "")
    )
    copies = {place: part for place, part in _copies(graphdef, leaves)} if values else {}
    if any(_is_shared(leaf) for leaf in leaves) and values:
        Meeting(there, "check_hosts").compare(copies)


def _value_text(leaf: Any) -> str:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.is_fully_replicated:
        return ""
    whole = _numbers(leaf)
    if whole.size <= _SHOWN:
        return f" {whole.tolist()}"
    return f" with values {digest(np.ascontiguousarray(whole).tobytes())[:12]}"


def _numbers(array: Any) -> Any:
    if isinstance(array, jax.Array) and jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


def _is_shared(leaf: Any) -> bool:
    """Do several hosts hold copies of one part of an array? All hosts answer alike."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
        return False
    holders: dict[str, set[int]] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        holders.setdefault(str(index), set()).add(device.process_index)
    return any(len(hosts) > 1 for hosts in holders.values())


def _copies(graphdef: _core.GraphDef, leaves: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """(place and part, digest) of what this host holds of arrays whose parts several hosts hold."""
    places = graphdef.leaf_places()
    for place, leaf in zip(places, leaves, strict=True):
        if not _is_shared(leaf):
            continue
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        for shard in leaf.addressable_shards:
            index = [(part.start or 0, part.stop) for part in shard.index]
            data = np.ascontiguousarray(np.asarray(shard.data)).tobytes()
            yield f"{place_name(place, ('obj',))}{_part_text(index)}", digest(data)[:16]


def _part_text(index: list[tuple[int, int | None]]) -> str:
    return "[" + ", ".join(":" if not start and stop is None else f"{start}:{stop}" for start, stop in index) + "]"
