# SPDX-License-Identifier: Apache-2.0
"""Executables that were compiled elsewhere, in the place of a `jax.jit` object."""

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
    """One executable: for what leaves and settings, on which devices, and the parts that JAX loads it from.

    `digest` is that of the lowered program, by which hosts compare.
    """

    looks: tuple[Token, ...]
    settings: dict[str, str]
    devices: tuple[int, ...]
    digest: str
    parts: tuple[bytes, Any, Any]
    stage: Any = None

    @classmethod
    def of(cls, lowered: Any, looks: tuple[Token, ...], settings: dict[str, str]) -> Program:
        from jax.experimental import serialize_executable

        stage, program = lowered.compile(), digest(program_text(lowered).encode())
        return cls(looks, settings, fast_dispatch.devices_of(stage), program, serialize_executable.serialize(stage))

    def load(self) -> None:
        from jax.experimental import serialize_executable

        # Without these JAX takes all devices of the process, and the executable asks for as many parts of each array.
        known = {device.id: device for device in jax.devices()}
        devices = [known[number] for number in self.devices]
        self.stage = serialize_executable.deserialize_and_load(*self.parts, execution_devices=devices)
        self.parts = b"", None, None


def settings_tokens() -> dict[str, str]:
    """JAX's settings of now, as texts."""
    return settings_texts(fast_dispatch.settings_of_traces())


def look_token(look: ArraySignature) -> Token | None:
    """What an executable asks of a leaf, as plain data; None where it lies in a way that has no name elsewhere."""
    return (tuple(look.shape), str(look.dtype), look.weak, _place(look)) if _place(look) is not None else None


def _place(look: ArraySignature) -> Any:
    if not look.committed:
        return "anywhere" if look.sharding is None or len(look.sharding.device_set) == 1 else None
    sharding = look.sharding
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        (device,) = sharding.device_set
        return "on", device.id, str(sharding.memory_kind)
    if isinstance(sharding, jax.sharding.NamedSharding) and isinstance(sharding.mesh, jax.sharding.Mesh):
        devices = [device.id for device in sharding.mesh.devices.flat]
        return "mesh", tuple(sharding.mesh.shape.items()), tuple(devices), str(sharding.spec), str(sharding.memory_kind)
    return None


def fitting(programs: Sequence[Program], leaves: Sequence[Any]) -> Program | None:
    """The program for such leaves, under the settings of now."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return None
    asked, settings = tuple(map(look_token, array_signatures(leaves))), settings_tokens()
    for program in programs:
        if program.looks == asked and program.settings == settings:
            return program
    return None


class Shipped:
    """Runs the executable that fits, or else the `jax.jit` object of this process. Holds what the core asks of one."""

    def __init__(self, compiled: Any, programs: Sequence[Program], tupled: bool) -> None:
        self._compiled, self._programs, self._tupled = compiled, programs, tupled
        self.lower, self.trace = compiled.lower, compiled.trace

    def __call__(self, *given: Any) -> Any:
        leaves = given[0] if self._tupled else given
        program = self._fitting(leaves)
        if program is None:
            return self._compiled(*given)
        if isinstance(self._compiled, CrossHostCheck):
            self._compiled.check_loaded(leaves, program.digest, program.devices)
        return program.stage(*given)

    def stage_for(self, leaves: Sequence[Any]) -> Any:
        """The executable that was saved for such leaves, loaded; or None."""
        program = self._fitting(leaves)
        return None if program is None else program.stage

    def _fitting(self, leaves: Sequence[Any]) -> Program | None:
        return fitting(self._programs, leaves)


def shipped_entry(entry: _core.Entry, context: Any, arguments: int, of: Any, numbers: Any) -> _core.Entry:
    """An entry that runs what was saved. Its Outcomes come first, so that the numbers in the executables mean them."""
    entry.outcomes.extend(of.outcomes)
    compiled = Shipped(entry.compiled, of.programs, entry.tupled)
    out = _core.Entry(entry.graphdef, context, compiled, entry.outcomes, arguments, entry.tupled)
    if numbers is not None:
        numbers.resume(of.host)
        out.use_numbers(list(zip(of.host.leaves, of.host.kinds, strict=True)), of.host)
        out.evaluate = of.host.compiled(len(out.outcomes))
    return out
