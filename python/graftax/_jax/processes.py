# SPDX-License-Identifier: Apache-2.0
"""Several processes of one program: their key-value store, and whether devices belong to more than one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from graftax._jax.error_texts import is_of_a_timeout


class Coordinator(NamedTuple):
    """The key-value store of `jax.distributed`, with this process's number and the count. It is not public."""

    client: Any
    process: int
    processes: int

    def put(self, key: str, value: bytes) -> None:
        self.client.key_value_set_bytes(key, value, True)

    def get(self, key: str, seconds: float) -> bytes | None:
        """The value that a process puts there; None after a timeout."""
        try:
            return self.client.blocking_key_value_get_bytes(key, max(1, int(seconds * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if is_of_a_timeout(error):
                return None
            raise

    def list_names(self, key: str) -> list[str]:
        return [name for name, _ in self.client.key_value_dir_get_bytes(key)]

    def delete(self, key: str) -> None:
        self.client.key_value_delete(key)


def coordinator() -> Coordinator | None:
    """The coordinator of this process; None if `jax.distributed` is not initialized.

    Raises:
        AttributeError: if this version of JAX has a different store.
    """
    from jax._src import distributed

    state: Any = distributed.global_state
    client, process, count = state.client, state.process_id, state.num_processes
    if client is None:
        return None
    for name in ("key_value_set_bytes", "blocking_key_value_get_bytes", "key_value_dir_get_bytes", "key_value_delete"):
        getattr(client, name)
    return Coordinator(client, int(process), int(count or 1))


def are_of_several(devices: Sequence[int]) -> bool:
    """Do these devices belong to several processes?"""
    return len({device.process_index for device in jax.devices() if device.id in set(devices)}) > 1


def spans_processes(lowered: object, leaves: Iterable[object]) -> bool:
    """Does a lowered program run on devices of several processes? Falls back on the shardings of its leaves."""
    devices: Any = getattr(getattr(lowered, "_lowering", None), "_device_list", None)
    if devices is None:
        shardings = (getattr(leaf, "sharding", None) for leaf in leaves)
        return any(sharding is not None and not sharding.is_fully_addressable for sharding in shardings)
    return len({device.process_index for device in devices}) > 1
