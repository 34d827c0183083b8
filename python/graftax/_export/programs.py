# SPDX-License-Identifier: Apache-2.0
"""Executables that another process compiled, in place of a `jax.jit` object."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.core

from graftax import _core
from graftax._explain import ArraySignature, array_signatures, settings_texts
from graftax._jax import fast_dispatch
from graftax._jit.multihost_check import CrossHostCheck, digest, program_text

Token = tuple[Any, ...]


@dataclasses.dataclass
class Program:
    """One executable: the leaves, settings and devices that it is for, and the parts that JAX loads it from.

    `digest` is the digest of the lowered program, which hosts compare.
    """

    signatures: tuple[Token, ...]
    settings: dict[str, str]
    devices: tuple[int, ...]
    digest: str
    parts: tuple[bytes, Any, Any]
    stage: Any = None

    @classmethod
    def from_lowered(cls, lowered: Any, signatures: tuple[Token, ...], settings: dict[str, str]) -> Program:
        from jax.experimental import serialize_executable

        stage, program = lowered.compile(), digest(program_text(lowered).encode())
        return cls(
            signatures, settings, fast_dispatch.devices_of(stage), program, serialize_executable.serialize(stage)
        )

    def load(self) -> None:
        from jax.experimental import serialize_executable

        # By default JAX takes all devices of the process, and the executable would expect as many shards of each array.
        device_of = {device.id: device for device in jax.devices()}
        devices = [device_of[number] for number in self.devices]
        self.stage = serialize_executable.deserialize_and_load(*self.parts, execution_devices=devices)
        self.parts = b"", None, None


def settings_tokens() -> dict[str, str]:
    """The current settings of JAX, as texts."""
    return settings_texts(fast_dispatch.settings_of_traces())


def signature_token(signature: ArraySignature) -> Token | None:
    """The signature of a leaf as plain data. None if its sharding cannot be described in another process."""
    return (
        (tuple(signature.shape), str(signature.dtype), signature.weak, _placement(signature))
        if _placement(signature) is not None
        else None
    )


def _placement(signature: ArraySignature) -> Any:
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
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return None
    tokens, settings = tuple(map(signature_token, array_signatures(leaves))), settings_tokens()
    for program in programs:
        if program.signatures == tokens and program.settings == settings:
            return program
    return None


class Shipped:
    """Runs the executable that fits, otherwise the entry's own `jax.jit` object, whose interface it has."""

    def __init__(self, compiled: Any, programs: Sequence[Program], tupled: bool) -> None:
        self._compiled, self._programs, self._tupled = compiled, programs, tupled
        self.lower, self.trace = compiled.lower, compiled.trace

    def __call__(self, *arguments: Any) -> Any:
        leaves = arguments[0] if self._tupled else arguments
        program = self._fitting(leaves)
        if program is None:
            return self._compiled(*arguments)
        if isinstance(self._compiled, CrossHostCheck):
            self._compiled.check_loaded(leaves, program.digest, program.devices)
        return program.stage(*arguments)

    def stage_for(self, leaves: Sequence[Any]) -> Any:
        """The loaded executable for leaves like these, or None."""
        program = self._fitting(leaves)
        return None if program is None else program.stage

    def _fitting(self, leaves: Sequence[Any]) -> Program | None:
        return fitting(self._programs, leaves)


def shipped_entry(entry: _core.Entry, context: Any, arguments: int, saved: Any, numbers: Any) -> _core.Entry:
    """An entry that runs saved programs. Their Outcomes come first: the executables refer to them by number."""
    entry.outcomes.extend(saved.outcomes)
    compiled = Shipped(entry.compiled, saved.programs, entry.tupled)
    shipped = _core.Entry(entry.graphdef, context, compiled, entry.outcomes, arguments, entry.tupled)
    if numbers is not None:
        numbers.resume(saved.host)
        shipped.use_numbers(list(zip(saved.host.leaves, saved.host.kinds, strict=True)), saved.host)
        shipped.evaluate = saved.host.compiled(len(shipped.outcomes))
    return shipped
