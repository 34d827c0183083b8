# SPDX-License-Identifier: Apache-2.0
"""Seconds from the start of Python to the first result of an example, with and without caches on disk.

In brackets the seconds of all processor cores, which other programs on the machine change less, and how often the
function was traced.

    python benchmarks/first_result.py [--of NAME ...]

Each row is four fresh processes: without a cache, with an empty `GRAFTAX_CACHE`, with what that has written, and with
JAX's own cache, filled before by a fifth one.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

EXAMPLES = Path(__file__).parents[1] / "examples"
# The compiled function of each example.
STEPS = {
    "gpt": "train",
    "transformer": "step",
    "nnx_training": "step",
    "tied_layers": "train",
    "maml": "train",
    "population": "generation",
}
COLUMNS = ("no cache", "first run", "second run", "JAX's own cache")


class Timed:
    """A compiled function whose first call ends the process, when its result is there."""

    def __init__(self, function: Any, begin: float) -> None:
        self._function, self._begin = function, begin

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        jax.block_until_ready(jax.tree.leaves(self._function(*args, **kwargs)))
        print(time.time() - self._begin, time.process_time(), self._function.cache_info().traces)
        raise SystemExit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def run_example(name: str, begin: float) -> None:
    """Runs an example up to the first result."""
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name]
    example: Any = importlib.import_module(name)
    setattr(example, STEPS[name], Timed(getattr(example, STEPS[name]), begin))
    example.main()


def seconds(name: str, **environment: str) -> str:
    """Of a fresh process, and of the processor cores; and its traces."""
    command = [sys.executable, __file__, "--run", name, str(time.time())]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    wall, cores, traces = map(float, done.stdout.split()[-3:])
    return f"{wall:.1f} ({cores:.1f}, {traces:.0f})"


def row(name: str) -> list[str]:
    """One cell for each column."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as jax_folder:
        of_jax = {"JAX_COMPILATION_CACHE_DIR": jax_folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5"}
        seconds(name, **of_jax)
        runs: list[dict[str, str]] = [{}, {"GRAFTAX_CACHE": folder}, {"GRAFTAX_CACHE": folder}, of_jax]
        return [seconds(name, **environment) for environment in runs]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--of", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--run", nargs=2)
    arguments = parser.parse_args()
    if arguments.run:
        run_example(arguments.run[0], float(arguments.run[1]))
        return
    print("| example |", " | ".join(COLUMNS), "|")
    print("| --- |", " | ".join("---:" for _ in COLUMNS), "|")
    for name in arguments.of:
        print(f"| {name}.py |", " | ".join(row(name)), "|", flush=True)


if __name__ == "__main__":
    main()
