# SPDX-License-Identifier: Apache-2.0
"""Multi-host: before a structure runs for the first time, the hosts compare what they are about to run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from graftax import _core
from graftax._base.errors import type_name
from graftax._explain.array_signature import sharding_text, type_text
from graftax._graph.graphdef_methods import stable_text
from graftax._graph.structure import Op, Structure, place_name
from graftax._jax.arrays import without_key
from graftax._jax.processes import are_of_several, spans_processes
from graftax._jax.tracebacks import boundary
from graftax._jax.tracers import has_tracer
from graftax._jit.call_plan import Layout, Plan
from graftax._jit.multihost_comparison import HostComparison, Line, coordinator, pack_description
from graftax._jit.number_policy import SymbolicNumbers

_MAX_TEXT = 200  # characters of a static value
_MAX_SHOWN = 6  # numbers of an array
# Addresses and indices of callbacks differ between processes.
_HOST_FUNCTION = re.compile(r'backend_config = "\d+"|index = \d+ : ui64')


class CrossHostCheck:
    """Wraps an entry's `jax.jit` object: compares the hosts before leaves of new shapes or shardings run."""

    def __init__(
        self,
        compiled: jax.stages.Wrapped,
        plan: Plan,
        layout: Layout,
        outcomes: list[_core.Outcome],
        numbers: SymbolicNumbers | None,
        tupled: bool,
    ) -> None:
        self._compiled, self._plan, self._layout = compiled, plan, layout
        self._outcomes, self._numbers, self._tupled = outcomes, numbers, tupled
        self._checked: set[tuple[object, ...]] = set()
        self.lower, self.trace = compiled.lower, compiled.trace

    def __call__(self, *arguments: Any) -> Any:
        leaves = arguments[0] if self._tupled else arguments
        self._check_once(leaves, lambda: self._own_program(arguments, leaves))
        return self._compiled(*arguments)

    def check_loaded(self, leaves: Sequence[object], program: str, devices: Sequence[int]) -> None:
        """Compares the hosts before a loaded program runs, by its digest in the file: other hosts may compile it."""
        self._check_once(leaves, lambda: (program, "") if are_of_several(devices) else None)

    def _check_once(self, leaves: Sequence[object], program: Callable[[], tuple[str, str] | None]) -> None:
        """Compares the hosts the first time that leaves like these run.

        `program()` gives the digest and the text of the program, or None if it runs on this host only.
        """
        # Within another trace nothing runs yet.
        key = tuple(map(_signature_of, leaves))
        if key not in self._checked and not has_tracer(leaves):
            description = program()
            if description is not None:
                self._compare(*description)
            # Only now: if the hosts differ, the next call compares them again, and raises as this one does.
            self._checked.add(key)

    def _own_program(self, arguments: tuple[object, ...], leaves: Sequence[object]) -> tuple[str, str] | None:
        lowered = self._compiled.lower(*arguments)
        if not spans_processes(lowered, leaves):
            return None
        text = program_text(lowered)
        return digest(text.encode()), text

    def _compare(self, program: str, text: str) -> None:
        store, active = coordinator(), _core.active_call(self._outcomes)
        if store is None or active is None:
            return
        plan = self._plan
        _, roots, recording, _ = active
        if recording is None:  # a hit, with leaves of other shapes than before
            symbolic = self._numbers.places.keys() if self._numbers else ()
            recording = plan.record(roots, self._layout, symbolic=symbolic)
        texts = [_array_text(leaf) for leaf in recording.leaves]
        lines = [("the function", plan.name), *describe_rows(recording.graphdef, recording.names, texts)]
        parts = {"the structure": digest(json.dumps(lines).encode()), "the program": program}
        HostComparison(store, plan.name).compare_digests(parts, lambda: pack_description(lines, text))


def program_text(lowered: jax.stages.Lowered) -> str:
    """The text of a lowered program without the parts that differ between processes."""
    return _HOST_FUNCTION.sub("", lowered.as_text())


def describe_rows(graphdef: _core.GraphDef, names: tuple[str, ...], leaves: Sequence[str]) -> list[Line]:
    """A structure as (key path, text) lines that are the same in every process."""
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
            text = f"the same as {place_name(structure.root_path(structure.target(row)), names)}"
        lines.append((place_name(structure.root_path(row), names), text))
    return lines


def _text(value: object) -> str:
    try:
        text = stable_text(value, lambda unnamed: f"a {type_name(unnamed)}")  # without a stable text: its class
    except Exception:
        text = f"a {type_name(value)}"
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}... ({digest(text.encode())[:8]})"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _signature_of(leaf: Any) -> tuple[object, ...]:
    """The properties of a leaf that JAX compiles for."""
    return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False), getattr(leaf, "sharding", None)


def _array_text(leaf: Any) -> str:
    """Type and sharding of a leaf. The devices of an array on this host alone may differ between hosts."""
    if getattr(leaf, "shape", None) is None or getattr(leaf, "dtype", None) is None:
        return type_name(leaf)
    text = type_text(leaf)
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or sharding.is_fully_addressable:
        return text
    text += f", {sharding_text(sharding)}"
    if not isinstance(sharding, NamedSharding):
        return text
    # Meshes of one shape may have the devices in another order, and then the parts are elsewhere.
    ids = sorted((device.id, str(index)) for device, index in sharding.devices_indices_map(leaf.shape).items())
    return f"{text} (order {digest(repr(ids).encode())[:8]})"


# ---- the public function


@boundary
def check_hosts(obj: object, values: bool = True) -> None:
    """Compares an object between the hosts: its structure and, with `values`, the numbers in its arrays.

    All hosts have to call it, at the same point. With one process it does nothing. An array that spans hosts is
    compared where several of them hold a copy of a part; all others are compared as a whole.

    Args:
        obj: any object: a model, a state, a batch, a dict of settings.
        values: False compares types, static values, shapes and shardings only.

    Raises:
        StructureError: on every host, with the first place that differs and what both have there; or if a host has
            not arrived after 60 s.

    Example:
        >>> graftax.check_hosts({"w": jnp.ones(3), "steps": 1000})
    """
    store = coordinator()
    if store is None:
        return
    leaves, graphdef = _core.flatten(obj)
    texts = [_array_text(leaf) + (_value_text(leaf) if values else "") for leaf in leaves]
    lines = describe_rows(graphdef, ("obj",), texts)
    HostComparison(store, "check_hosts").compare_digests(
        {"the structure": digest(json.dumps(lines).encode())}, lambda: pack_description(lines, "")
    )
    # Every host has to take part if any does, whether it holds copies or not.
    if values and any(_is_shared(leaf) for leaf in leaves):
        copies = dict(_copies(graphdef, leaves))
        HostComparison(store, "check_hosts").compare_copies(copies)


def _value_text(leaf: object) -> str:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.is_fully_replicated:
        return ""
    values = np.asarray(without_key(leaf))
    if values.size <= _MAX_SHOWN:
        return f" {values.tolist()}"
    return f" with values {digest(np.ascontiguousarray(values).tobytes())[:12]}"


def _is_shared(leaf: object) -> bool:
    """Do several hosts hold copies of one part of an array? The answer is the same on all hosts."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
        return False
    holders: dict[str, set[int]] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        holders.setdefault(str(index), set()).add(device.process_index)
    return any(len(hosts) > 1 for hosts in holders.values())


def _copies(graphdef: _core.GraphDef, leaves: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """(key path and slice, digest) of each shard on this host of arrays that several hosts hold copies of."""
    paths = graphdef.leaf_places()
    for path, leaf in zip(paths, leaves, strict=True):
        if not _is_shared(leaf):
            continue
        for shard in without_key(leaf).addressable_shards:
            index = [(part.start or 0, part.stop) for part in shard.index]
            data = np.ascontiguousarray(np.asarray(shard.data)).tobytes()
            yield f"{place_name(path, ('obj',))}{_part_text(index)}", digest(data)[:16]


def _part_text(index: list[tuple[int, int | None]]) -> str:
    return "[" + ", ".join(":" if not start and stop is None else f"{start}:{stop}" for start, stop in index) + "]"
