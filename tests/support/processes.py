# SPDX-License-Identifier: Apache-2.0
"""Several processes on this machine, as hosts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import graftax

LIMIT = 300  # seconds


def run(program: Path, count: int, *arguments: object, devices: int = 1) -> list[dict[str, Any]]:
    """Runs `program NUMBER COUNT PORT *arguments` in each: what each prints as `RESULT [name, value]`, by name."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    xla = f"--xla_force_host_platform_device_count={devices}" if devices > 1 else ""
    package = str(Path(graftax.__file__).parents[1])
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla, "PYTHONPATH": package, "PYTHONWARNINGS": "ignore"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(number), str(count), port, *map(str, arguments)],
            env={**os.environ, **flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(count)
    ]
    try:
        texts = [process.communicate(timeout=LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    found = [
        dict(json.loads(line.removeprefix("RESULT ")) for line in text.splitlines() if line.startswith("RESULT "))
        for text in texts
    ]
    assert all(process.returncode == 0 for process in processes), "\n".join(text[-2000:] for text in texts)
    return found
