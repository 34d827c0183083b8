# SPDX-License-Identifier: Apache-2.0
"""What donation saves: steps with ``donate="auto"`` beside those of ``jax.jit``, in time and in memory at the peak.

::

    python benchmarks/donated.py [--scale 1] [--rounds 15] [--json FILE]

The times are interleaved in this process. The peak is that of a process of its own for each step and way: a device
counts its highest use from the start, and so does the operating system.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounds import interleave, ratios

STEPS = ("updated", "adam", "small")
WAYS = ("jax.jit", "donate_argnums", "auto", "graftax.jit")
Arrays = dict[str, list[jax.Array]]
MEGABYTE = 1_000_000


def _arrays(count: int, megabytes: float) -> list[jax.Array]:
    length = max(4, int(megabytes * MEGABYTE / 4))
    return [jnp.full(length, 1.0 + i, jnp.float32) for i in range(count)]


def _update(state: Arrays) -> None:
    state["w"] = [w * 0.999 + 0.001 for w in state["w"]]


def _adam(state: Arrays) -> None:
    for i, (w, m, v) in enumerate(zip(state["w"], state["m"], state["v"], strict=True)):
        gradient = w * 0.01
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        state["w"][i], state["m"][i], state["v"][i] = w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


def _step(name: str, scale: float) -> tuple[str, Callable[[Arrays], None], Arrays]:
    if name == "updated":
        return f"20 arrays of {4 * scale:g} MB, updated", _update, {"w": _arrays(20, 4 * scale)}
    if name == "small":
        return "100 arrays of 16 bytes, updated", _update, {"w": _arrays(100, 0)}
    state = {"w": _arrays(100, scale), "m": _arrays(100, scale), "v": _arrays(100, scale)}
    return f"Adam for 100 weights of {scale:g} MB", _adam, state


def _runner(way: str, step: Callable[[Arrays], None], state: Arrays) -> Callable[[], object]:
    """A call of the step that goes on from the state that the last one left."""
    import graftax

    if way in ("auto", "graftax.jit"):
        jitted = graftax.jit(step, donate="auto") if way == "auto" else graftax.jit(step)

        def call() -> object:
            jitted(state)
            return jax.block_until_ready(state)

        return call

    def returning(state: Arrays) -> Arrays:
        step(state)
        return state

    by_value = jax.jit(returning, donate_argnums=(0,) if way == "donate_argnums" else ())
    held = [state]

    def call_by_value() -> object:
        held.append(by_value(held.pop()))
        return jax.block_until_ready(held)

    return call_by_value


def _peak(in_use: str = "peak_bytes_in_use") -> int:
    """Bytes: the device's own count, or where it has none, as a CPU, the resident memory of the process."""
    statistics_of_device = jax.devices()[0].memory_stats()
    if statistics_of_device:
        return statistics_of_device[in_use]
    status = Path("/proc/self/status")
    if status.exists():  # Linux: `ru_maxrss` of a new process begins with that of the process that started it
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _measure_peak(name: str, way: str, scale: float) -> dict[str, Any]:
    _, step, state = _step(name, scale)
    call = _runner(way, step, state)
    jax.block_until_ready(state)
    before = _peak("bytes_in_use")
    del state
    for _ in range(8):
        call()
    return {"state": before, "over": _peak() - before}


def _peak_of(name: str, way: str, scale: float) -> dict[str, Any]:
    words = [sys.executable, __file__, "--peak", name, way, "--scale", str(scale)]
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def _row(name: str, scale: float, rounds: int) -> dict[str, Any]:
    title = _step(name, scale)[0]
    times = interleave({way: _runner(way, *_step(name, scale)[1:]) for way in WAYS}, rounds)
    return {
        "title": title,
        "milliseconds": 1000 * statistics.median(times["jax.jit"]),
        "ratios": {way: statistics.median(ratios(times[way], times["jax.jit"])) for way in WAYS},
        "memory": {} if name == "small" else {way: _peak_of(name, way, scale) for way in WAYS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="how many times the sizes of the rows")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peak", nargs=2, metavar=("STEP", "WAY"), help="only this peak, in this process")
    words = parser.parse_args()
    if words.peak:
        print(json.dumps(_measure_peak(words.peak[0], words.peak[1], words.scale)))
        return
    rows = [_row(name, words.scale, words.rounds) for name in STEPS]
    device = jax.devices()[0]
    print(f"{device.device_kind} ({device.platform}), JAX {jax.__version__}; ratios to jax.jit without donation")
    for row in rows:
        shown = ", ".join(f"{way} {ratio:.2f}" for way, ratio in row["ratios"].items())
        print(f"{row['title']}: {row['milliseconds']:.3f} ms; {shown}")
        for way, bytes_of in row["memory"].items():
            print(f"    {way}: {bytes_of['over'] / MEGABYTE:,.0f} MB over {bytes_of['state'] / MEGABYTE:,.0f}")
    if words.json:
        words.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
