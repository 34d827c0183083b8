# SPDX-License-Identifier: Apache-2.0
"""Executables that another process compiled, in place of a `jax.jit` object."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax

from graftax import _core
from graftax._explain import ArraySignature, array_signatures, settings_texts
from graftax._jax import cache_of_jax, fast_dispatch
from graftax._jax.compilation import own_jit, pickling_avals
from graftax._jax.settings import settings_of_traces
from graftax._jax.tracers import has_tracer
from graftax._jit.flat_function import encode
from graftax._jit.multihost_check import CrossHostCheck

Token = tuple[Any, ...]
_JitFunction = type(own_jit(len))


@dataclasses.dataclass
class Program:
    """One executable: the leaves, settings and devices that it is for, and the parts that JAX loads it from.

    `digest` is the digest of the lowered program, which hosts compare. `was_retrieved`: JAX has loaded it from its own
    cache.
    """

    signatures: tuple[Token | None, ...]
    settings: dict[str, str]
    devices: tuple[int, ...]
    digest: str
    stage: Any = None
    parts: tuple[bytes, Any, Any] | None = None
    was_retrieved: bool = False
    # Of one with `donate="auto"`: the leaves that it donates, and the number of its Outcome, which its results lack.
    donating: tuple[tuple[int, ...], int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The parts hold the bytes of the executable, so it does not matter any more where JAX had it from.
        return vars(self) | {"stage": None, "parts": self.parts or self.packed(), "was_retrieved": False}

    def packed(self) -> tuple[bytes, Any, Any]:
        """The parts that JAX loads it from. Raises errors of JAX if it holds something of this process."""
        from jax.experimental import serialize_executable

        serialize = cache_of_jax.serialize if self.was_retrieved else serialize_executable.serialize
        with pickling_avals():
            return serialize(self.stage)

    @property
    def outcome(self) -> int:
        """The number of its Outcome."""
        if self.donating is not None:
            return self.donating[1]
        outputs = jax.tree.unflatten(self.stage.out_tree, list(range(self.stage.out_tree.num_leaves)))
        return _core.decode(outputs[2])

    def load(self, outcome: int | None = None, is_written_again: bool = False) -> None:
        """Makes the executable of the parts.

        Args:
            outcome: the number of its Outcome here, if it is another one than where it was compiled.
            is_written_again: the parts are kept, since a copy of an executable that was loaded cannot be run.
        """
        from jax.experimental import serialize_executable

        if self.parts is None or self.stage is not None:
            return
        content, in_tree, out_tree = self.parts
        # The number stands in the tree of the outputs, but for a program that donates.
        if outcome is not None and self.donating is not None:
            self.donating = self.donating[0], outcome
        elif outcome is not None:
            outputs = jax.tree.unflatten(out_tree, list(range(out_tree.num_leaves)))
            out_tree = jax.tree.structure((outputs[0], outputs[1], encode(outcome)))
        # By default JAX takes all devices of the process, and the executable would expect as many shards of each array.
        device_of = {device.id: device for device in jax.devices()}
        devices = [device_of[number] for number in self.devices]
        self.stage = serialize_executable.deserialize_and_load(content, in_tree, out_tree, execution_devices=devices)
        self.parts = self.parts if is_written_again else None


def settings_tokens() -> dict[str, str]:
    """The current settings of JAX, as texts."""
    return settings_texts(settings_of_traces())


def signature_token(signature: ArraySignature) -> Token | None:
    """The signature of a leaf as plain data. None if its sharding cannot be described in another process."""
    placement = _placement(signature)
    return None if placement is None else (tuple(signature.shape), str(signature.dtype), signature.weak, placement)


def _placement(signature: ArraySignature) -> Any:
    # An array that is committed to no device may be on any one: JAX moves it to where the others are.
    if not signature.committed:
        return "anywhere" if signature.sharding is None or len(signature.sharding.device_set) == 1 else None
    sharding = signature.sharding
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        (device,) = sharding.device_set
        return "on", device.id, str(sharding.memory_kind)
    if isinstance(sharding, jax.sharding.NamedSharding) and isinstance(sharding.mesh, jax.sharding.Mesh):
        devices = [device.id for device in sharding.mesh.devices.flat]
        return "mesh", tuple(sharding.mesh.shape.items()), tuple(devices), str(sharding.spec), str(sharding.memory_kind)
    return None


def fitting(programs: Sequence[Program], leaves: Sequence[Any]) -> Program | None:
    """The program for leaves like these, under the current settings of JAX."""
    return next((program for program in all_fitting(programs, leaves) if program.donating is None), None)


def all_fitting(programs: Sequence[Program], leaves: Sequence[Any]) -> list[Program]:
    """The same, with those that donate."""
    if has_tracer(leaves):
        return []
    tokens, settings = tuple(map(signature_token, array_signatures(leaves))), settings_tokens()
    return [program for program in programs if program.signatures == tokens and program.settings == settings]


class Shipped:
    """Runs the executable that fits, otherwise the entry's own `jax.jit` object, whose interface it has."""

    def __init__(
        self, compiled: Any, programs: Sequence[Program], tupled: bool, packs_after: float | None = None
    ) -> None:
        self._compiled, self._tupled = compiled, tupled
        self.programs = list(programs)
        # XLA serializes no executable with a sort once it has run. So that of the first call is packed before, if
        # it took longer than this.
        self._packs_after = packs_after if type(compiled) is _JitFunction else None
        self.packed: tuple[Any, tuple[bytes, Any, Any]] | None = None  # (executable, its parts)

    def __getattr__(self, name: str) -> Any:
        # A copy asks for attributes before it has any: without this, `_compiled` would be looked for in itself.
        if name in ("_compiled", "programs"):
            raise AttributeError(name)
        return getattr(self._compiled, name)

    def __call__(self, *arguments: Any) -> Any:
        if not self.programs:
            if self._packs_after is not None:
                self._pack(arguments)
            return self._compiled(*arguments)
        leaves = arguments[0] if self._tupled else arguments
        program = fitting(self.programs, leaves)
        if program is None:
            return self._compiled(*arguments)
        # The other hosts have to run this program, too, whether they load it or compile it.
        if isinstance(self._compiled, CrossHostCheck):
            self._compiled.check_loaded(leaves, program.digest, program.devices)
        return program.stage(*arguments)

    def _pack(self, arguments: tuple[Any, ...]) -> None:
        min_seconds, self._packs_after = self._packs_after, None
        leaves = arguments[0] if self._tupled else arguments
        if min_seconds is None or has_tracer(leaves):
            return
        begin = time.perf_counter()
        # JAX keeps what it has compiled, and the call that follows runs it.
        stage = self._compiled.lower(*arguments).compile()
        if time.perf_counter() - begin < min_seconds:
            return
        # The writer packs the same executable again and says why that fails.
        with contextlib.suppress(Exception):
            self.packed = fast_dispatch.executable_of(stage), Program((), {}, (), "", stage).packed()

    def parts_of(self, stage: Any) -> tuple[bytes, Any, Any] | None:
        """What was packed of an executable before it ran."""
        packed, self.packed = self.packed, None
        return packed[1] if packed is not None and packed[0] is fast_dispatch.executable_of(stage) else None

    def stage_for(self, leaves: Sequence[Any]) -> Any:
        """The loaded executable for leaves like these, or None."""
        program = fitting(self.programs, leaves) if self.programs else None
        return None if program is None else program.stage

    def program_of(self, leaves: Sequence[Any], donated: tuple[int, ...] | None) -> tuple[Any, int] | None:
        """For a `Donor`: (stage, number of its Outcome) for leaves like these. None: it may donate anything."""
        for program in all_fitting(self.programs, leaves):
            if donated is None or (program.donating is not None and program.donating[0] == donated):
                return program.stage, program.outcome
        return None

    def has_program(self, leaves: Sequence[Any]) -> bool:
        return bool(all_fitting(self.programs, leaves))


def shipped_entry(entry: _core.Entry, context: Any, arguments: int, saved: Any, numbers: Any) -> _core.Entry:
    """An entry that runs saved programs. Their Outcomes come first: the executables refer to them by number."""
    entry.outcomes.extend(saved.outcomes)
    compiled = entry.compiled
    if isinstance(compiled, Shipped):
        compiled.programs.extend(saved.programs)
    else:
        compiled = Shipped(compiled, saved.programs, entry.tupled)
    shipped = _core.Entry(entry.graphdef, context, compiled, entry.outcomes, arguments, entry.tupled)
    saved.guards.put(shipped)
    if entry.donor is not None:
        entry.donor.loaded, shipped.donor = compiled, entry.donor
    if numbers is not None:
        numbers.resume(saved.host)
        shipped.use_numbers(list(zip(saved.host.leaves, saved.host.kinds, strict=True)), saved.host)
        shipped.evaluate = saved.host.compiled(len(shipped.outcomes))
    return shipped
