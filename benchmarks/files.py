# SPDX-License-Identifier: Apache-2.0
"""Files beside those who also write them: how fast a large one is loaded, and many small leaves are saved.

A large file is loaded and every page of it touched, beside the safetensors package; the first number of a leaf is read;
2000 small leaves are saved, beside Orbax. In interleaved rounds; the medians are compared.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import graftax
from benchmarks.budgets import Verdict

ROUNDS = 5
MEGABYTES = 2048
_LEAF = 64  # megabytes
_LEAVES = 2000

Ways = dict[str, Callable[[], Any]]


def steps(rounds: int) -> int:
    """How often `measure` calls `advance`."""
    return 1 + rounds * 7


def measure(megabytes: int, rounds: int, advance: Callable[[], None]) -> dict[str, float]:
    """The median seconds of each way."""
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = max(1, megabytes // _LEAF)
        graftax.save(folder / "large", {f"w{i}": np.full((_LEAF, 1 << 18), i, np.float32) for i in range(count)})
        small = {f"l{i}": jnp.full(64, i, jnp.float32) for i in range(_LEAVES)}
        jax.block_until_ready(small)
        advance()
        for ways in itertools.islice(_rounds(folder, small), rounds):
            for way, run in ways.items():
                begin = time.perf_counter()
                run()
                times.setdefault(way, []).append(time.perf_counter() - begin)
                advance()
    return {way: statistics.median(found) for way, found in times.items()}


def verdicts(times: dict[str, float], megabytes: int) -> list[Verdict]:
    """The budgets: each as a time beside another."""
    numpy, devices = times["load, safetensors to NumPy"], times["load, safetensors to JAX"]
    first, save, orbax = times["first leaf, graftax"], times["save, graftax"], times["save, Orbax"]
    size = f"{megabytes / 1024:g} GB"
    return [
        _verdict(f"load {size}, over safetensors to NumPy", times["load, graftax"], numpy, 1 / 0.8),
        _verdict(f"load {size}, over safetensors to JAX", times["load, graftax"], devices, 1 / 0.8),
        _verdict(f"first leaf of {size}, over 50 ms", first, 0.05, 1.0),
        _verdict(f"save {_LEAVES} small leaves, over Orbax", save, orbax, 0.1),
    ]


def _verdict(title: str, seconds: float, of: float, limit: float) -> Verdict:
    ratio = seconds / of
    return Verdict(title, limit, ratio, ratio <= limit, f"{seconds * 1000:.1f} ms of {of * 1000:.1f}")


def _rounds(folder: Path, small: dict[str, Any]) -> Iterator[Ways]:
    """Ways of a round. Imports what is not always there: an ImportError says that."""
    import safetensors
    import safetensors.flax
    import safetensors.numpy
    from orbax.checkpoint import v1 as orbax

    large = folder / "large"

    def opened() -> dict[str, Any]:
        with safetensors.safe_open(large, "np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)

    for number in itertools.count():
        yield {
            "load, safetensors to NumPy": lambda: _touched(safetensors.numpy.load_file(large)),
            "load, safetensors with safe_open": lambda: _touched(opened()),
            "load, safetensors to JAX": lambda: _touched(safetensors.flax.load_file(large)),
            "load, graftax": lambda: _touched(graftax.load(large)),
            "first leaf, graftax": lambda: graftax.load(large, lazy=True)["w0"][0, 0],
            "save, Orbax": functools.partial(orbax.save, folder / f"orbax{number}", small),
            "save, graftax": lambda: graftax.save(folder / "small", small),
        }


def _touched(tensors: dict[str, Any]) -> float:
    """A number of each page of four kilobytes."""
    return sum(float(np.asarray(x).ravel()[::1024].sum()) for x in tensors.values())
