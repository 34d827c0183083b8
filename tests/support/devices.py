# SPDX-License-Identifier: Apache-2.0
"""A file of tests once more, in a process that sees so many devices on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

from sizes import QUICK


def run_again(path: str, count: int) -> None:
    sample = ["--quick"] if os.environ.get(QUICK) else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *sample, path]
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
    root = Path(__file__).parents[2]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:]
