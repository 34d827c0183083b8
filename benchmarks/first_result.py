# SPDX-License-Identifier: Apache-2.0
"""Seconds from the start of Python to the first result of an example, with and without caches on disk.

In brackets the seconds of all processor cores, which other programs on the machine change less; how many of them were
over when the function was called, for imports and data; how often it was traced, and how often XLA compiled anything.

    python benchmarks/first_result.py [--of NAME ...]
    python benchmarks/first_result.py --script FILE [--replace] [--jax FILE]

With a script, which runs to its end, the brackets say what its functions took to be traced, lowered and compiled.
`--replace` runs it as `python -m graftax run` does, `--jax` names the script as it was, for the column of JAX's own
cache.

Each row is four fresh processes: without a cache, with an empty `GRAFTAX_CACHE`, with what that has written, and with
JAX's own cache alone, filled before by a fifth one.
"""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import graftax
from graftax._jit.jitted import Jitted

EXAMPLES = Path(__file__).parents[1] / "examples"
# The compiled function of each example.
STEPS = {
    "gpt": "train",
    "transformer": "step",
    "nnx_training": "step",
    "tied_layers": "train",
    "kalman": "train",
    "planets": "improve",
    "maml": "train",
    "population": "generation",
}
COLUMNS = ("no cache", "first run", "second run", "JAX's own cache")


_compilations = 0


def _count(event: str, *_: Any, **__: Any) -> None:
    global _compilations
    _compilations += event.endswith("backend_compile_duration")
    _compilations -= event.endswith("compilation_cache/cache_hits")


class Timed:
    """A compiled function whose first call ends the process, when its result is there."""

    def __init__(self, function: Any, begin: float) -> None:
        self._function, self._begin = function, begin

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        before = time.process_time()
        jax.block_until_ready(jax.tree.leaves(self._function(*args, **kwargs)))
        traces = self._function.cache_info().traces
        print(time.time() - self._begin, time.process_time(), traces, before, _compilations)
        raise SystemExit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def run_example(name: str, begin: float) -> None:
    """Runs an example up to the first result."""
    jax.monitoring.register_event_listener(_count)
    jax.monitoring.register_event_duration_secs_listener(_count)
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name]
    example: Any = importlib.import_module(name)
    setattr(example, STEPS[name], Timed(getattr(example, STEPS[name]), begin))
    example.main()


_made: list[Any] = []
_make = Jitted.__init__


def _note_made(self: Any, *arguments: Any) -> None:
    """By a name of this module: a function that a trace makes depends on it, and is to be found in the next process."""
    _make(self, *arguments)
    _made.append(self)


def run_script(script: str, replace: str, begin: float) -> None:
    """Runs a script to its end."""
    from graftax.replace import install

    jax.monitoring.register_event_listener(_count)
    jax.monitoring.register_event_duration_secs_listener(_count)
    Jitted.__init__ = _note_made  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv, sys.path[0] = [script], str(Path(script).resolve().parent)
    if replace:
        install()
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        infos = [function.cache_info() for function in _made]
        traces, disk = sum(info.traces for info in infos), sum(info.disk for info in infos)
        compiled = sum(v.all_seconds for f in _made for v in graftax.explain(f).variants)
        print(time.time() - begin, time.process_time(), traces, disk, compiled, _compilations)


def seconds(name: str, *words: str, **environment: str) -> str:
    """Of a fresh process, and of the processor cores; and its traces."""
    command = [sys.executable, "-W", "ignore", __file__, *(words or ("--run", name)), "--begin", str(time.time())]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    wall, cores, traces, *found = map(float, done.stdout.splitlines()[-1].split())
    counts = f"{traces:.0f} traced, {found[-1]:.0f} compiled"
    if not words:
        return f"{wall:.1f} ({cores:.1f}, {found[0]:.1f} before it; {counts})"
    return f"{wall:.1f} ({cores:.1f}, {found[1]:.1f} compiling; {counts}, {found[0]:.0f} found)"


def row(name: str, *words: str, of_jax: Sequence[str] = ()) -> list[str]:
    """One cell for each column."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as jax_folder:
        jax_cache = {"JAX_COMPILATION_CACHE_DIR": jax_folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        seconds(name, *(of_jax or words), **jax_cache)
        runs: list[dict[str, str]] = [{}, {"GRAFTAX_CACHE": folder}, {"GRAFTAX_CACHE": folder}]
        cells = [seconds(name, *words, **environment) for environment in runs]
        return [*cells, seconds(name, *(of_jax or words), **jax_cache)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--of", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--script")
    parser.add_argument("--jax")
    parser.add_argument("--replace", action="store_true")
    parser.add_argument("--run")
    parser.add_argument("--begin", type=float)
    arguments = parser.parse_args()
    if arguments.begin and arguments.run:
        run_example(arguments.run, arguments.begin)
        return
    if arguments.begin:
        run_script(arguments.script, arguments.replace, arguments.begin)
        return
    print("| example |", " | ".join(COLUMNS), "|")
    print("| --- |", " | ".join("---:" for _ in COLUMNS), "|")
    if arguments.script:
        words = ["--script", arguments.script, *(["--replace"] if arguments.replace else [])]
        of_jax = ["--script", arguments.jax] if arguments.jax else []
        print(f"| {arguments.script} |", " | ".join(row("", *words, of_jax=of_jax)), "|", flush=True)
        return
    for name in arguments.of:
        print(f"| {name}.py |", " | ".join(row(name)), "|", flush=True)


if __name__ == "__main__":
    main()
