# SPDX-License-Identifier: Apache-2.0
"""Files beside those who also write them: `python -m benchmarks.files [megabytes]`.

A large file is loaded and every page of it touched, beside the safetensors package; the first number of a leaf is read;
2000 small leaves are saved, beside Orbax. In interleaved rounds; the medians are compared.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from orbax.checkpoint import v1 as orbax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import graftax

ROUNDS = 5
LEAF = 64  # megabytes


def touched(tensors: dict[str, Any]) -> float:
    return sum(float(np.asarray(x).ravel()[::1024].sum()) for x in tensors.values())


def seconds(f: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    f()
    return time.perf_counter() - begin


def measured(folder: Path, megabytes: int) -> dict[str, list[float]]:
    """The seconds of each way, in rounds."""
    large, few = folder / "large.safetensors", folder / "small.safetensors"
    small = {f"l{i}": jnp.full(64, i, jnp.float32) for i in range(2000)}
    jax.block_until_ready(small)
    times: dict[str, list[float]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("writing the large file", total=1 + ROUNDS * 5)
        count = max(1, megabytes // LEAF)
        graftax.save(large, {f"w{i}": np.full((LEAF, 1 << 18), i, np.float32) for i in range(count)})
        progress.advance(bar)
        for number in range(ROUNDS):
            ways: dict[str, Callable[[], Any]] = {
                "load, safetensors": lambda: touched(safetensors.numpy.load_file(large)),
                "load, graftax": lambda: touched(graftax.load(large)),
                "first leaf, graftax": lambda: graftax.load(large, lazy=True)["w0"][0, 0],
                "save 2000, Orbax": functools.partial(orbax.save, folder / f"orbax{number}", small),
                "save 2000, graftax": lambda: graftax.save(few, small),
            }
            for name, way in ways.items():
                progress.update(bar, description=name)
                times.setdefault(name, []).append(seconds(way))
                progress.advance(bar)
    return times


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 2048
    with tempfile.TemporaryDirectory() as folder:
        times = {name: statistics.median(rounds) for name, rounds in measured(Path(folder), megabytes).items()}
    checks = [
        ("speed of loading, graftax / safetensors", times["load, safetensors"] / times["load, graftax"], ">=", 0.8),
        ("first leaf, milliseconds", times["first leaf, graftax"] * 1000, "<=", 50.0),
        ("time of saving, graftax / Orbax", times["save 2000, graftax"] / times["save 2000, Orbax"], "<=", 0.1),
    ]
    table = Table("", "measured", "budget", "")
    for name, value, sign, budget in checks:
        fine = value >= budget if sign == ">=" else value <= budget
        table.add_row(name, f"{value:.3g}", f"{sign} {budget:g}", "" if fine else "over")
    Console().print(table)


if __name__ == "__main__":
    main()
