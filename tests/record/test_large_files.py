# SPDX-License-Identifier: Apache-2.0
"""Recordings with large arrays: one array at a time is in memory, and a terminal shows how far it is."""

from __future__ import annotations

import io
import itertools
import os
import resource
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from graftax._base import progress_bar
from graftax._base.progress_bar import ByteBar
from graftax._record.replay import RecordedCalls

SIZE = 50_000_000

MEASURED = """
import sys
import graftax
from graftax._record.replay import RecordedCalls
from test_large_files import arrays_of, sums, Peak

small, large, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
"""

WRITING = """
recorder = graftax.record(sums, last=1, nonfinite=False)
for path, size in ((small, size // 500), (large, size)):  # what is loaded and compiled once is not counted
    recorder(arrays_of(size))
    peak = Peak()
    recorder.save(path)
print(peak.above())
"""

READING = """
assert RecordedCalls(small).run(0).differences == []
peak = Peak()
recorded = RecordedCalls(large)
opened = peak.above()
recorded.prepare(0).close()
prepared = peak.above()
assert recorded.run(0).differences == []
print(opened, prepared)
"""


class Peak:
    """The largest memory of this process from now on."""

    def __init__(self) -> None:
        if sys.platform == "linux":
            Path("/proc/self/clear_refs").write_text("5")  # begins anew
        self._before = self._largest()

    def above(self) -> int:
        """Bytes, beyond those at the beginning."""
        return self._largest() - self._before

    def _largest(self) -> int:
        if sys.platform != "linux":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def sums(arrays: dict[str, Any]) -> list[Any]:
    return [array.sum() for array in arrays.values()]


def arrays_of(size: int) -> dict[str, Any]:
    """Eight of JAX and eight of NumPy, of so many bytes in all."""
    count = size // 16 // 4
    on_device = {f"w{i}": jnp.full(count, i, jnp.float32) for i in range(8)}
    return on_device | {f"b{i}": np.full(count, i, np.float32) for i in range(8)}


def measured(code: str, folder: Path) -> list[float]:
    """What a process of its own prints, in sizes of the recording."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", MEASURED + code, folder / "small", folder / "large", str(SIZE)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [int(text) / SIZE for text in done.stdout.split()]


@pytest.mark.quick(0)
def test_one_array_at_a_time_of_a_large_recording_is_copied(tmp_path: Path):
    (written,) = measured(WRITING, tmp_path)
    assert (tmp_path / "large").stat().st_size > 0.9 * SIZE
    opened, prepared = measured(READING, tmp_path)
    # The arrays are there once, as the call gets them.
    assert written < 0.7 and opened < 0.5 and 0.8 < prepared < 1.4, (written, opened, prepared)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show_on_terminal(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]) -> Terminal:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setattr(progress_bar, "time", types.SimpleNamespace(monotonic=clock))
    return terminal


def test_a_terminal_shows_how_much_is_done_after_a_second(monkeypatch: pytest.MonkeyPatch):
    now = [5.0]
    terminal = show_on_terminal(monkeypatch, lambda: now[0])
    bar = ByteBar("reading a.record", 4_000_000)
    for seconds in (0.5, 0.6, 0.05, 1.0):
        now[0] += seconds
        bar.add(1_000_000)
    lines = terminal.getvalue().split("\r\x1b[K")[1:]
    assert lines == [
        "reading a.record: [############............] 2 MB of 4 MB, 1.1 s",
        "reading a.record: [########################] 4 MB of 4 MB, 2.1 s\n",
    ]


def test_writing_and_reading_count_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = itertools.count(0, 2)
    terminal = show_on_terminal(monkeypatch, lambda: float(next(clock)))
    recorder = graftax.record(lambda tree: [tree["a"] * 2, tree["a"]], nonfinite=False, dir=tmp_path)
    recorder({"a": jnp.ones(1000), "b": np.ones(500), "n": 3})
    recorder.save(tmp_path / "call.record")
    assert terminal.getvalue().endswith("\n") and "writing call.record: [####" in terminal.getvalue()
    terminal.truncate(0)
    assert RecordedCalls(tmp_path / "call.record").run(0).differences == []
    assert terminal.getvalue().endswith("8 kB of 8 kB, 4.0 s\n") and terminal.getvalue().count("\n") == 1


def test_nothing_is_shown_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    terminal = show_on_terminal(monkeypatch, lambda: 5.0)
    recorder = graftax.record(sums, nonfinite=False, dir=tmp_path)
    recorder({"a": jnp.ones(4)})
    recorder.save(tmp_path / "call")
    RecordedCalls(tmp_path / "call")
    assert terminal.getvalue() == ""


def test_an_array_that_was_damaged_is_refused_before_anything_runs(tmp_path: Path):
    recorder = graftax.record(sums, nonfinite=False, dir=tmp_path)
    recorder({"a": jnp.ones(4000)})
    recorder.save(tmp_path / "call")
    content = bytearray((tmp_path / "call").read_bytes())
    content[-5] ^= 1
    (tmp_path / "call").write_bytes(content)
    with pytest.raises(graftax.LoadError, match="the arrays are not what was written"):
        RecordedCalls(tmp_path / "call")
