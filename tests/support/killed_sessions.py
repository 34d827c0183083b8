# SPDX-License-Identifier: Apache-2.0
"""Random sessions beside plain Python with a cache on disk, in processes that are killed at random moments.

All processes share one cache. Each begins with what those before it have left there, whole or not: every session has to
be as in plain Python. `python tests/support/killed_sessions.py FOLDER SECONDS [SEED]` says how many sessions were run.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

_SECONDS_OF_PROCESS = 15.0, 90.0  # after which it is killed
_SESSIONS_OF_PROCESS = 40

CHILD = """
import sys
import graftax
cache = graftax.cache(sys.argv[1], min_seconds=0)
from hypothesis import settings
import sessions

class Counted(sessions.Session):
    def teardown(self):
        super().teardown()
        print("session", sum(f.cache_info().disk for f in sessions.JITTED.values()), flush=True)

chosen = settings(max_examples=int(sys.argv[2]), stateful_step_count=sessions.STEPS, deadline=None, database=None,
                  derandomize=False)
sessions.run_state_machine_as_test(Counted, settings=chosen)
"""


def run(folder: Path, seconds: float, seed: int) -> int:
    """The exit status: 1 if a session differed."""
    draw, end = random.Random(seed), time.monotonic() + seconds
    sessions = killed = found = differed = 0
    while time.monotonic() < end:
        command = [sys.executable, "-W", "ignore", "-c", CHILD, str(folder), str(_SESSIONS_OF_PROCESS)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parent
        )
        try:
            output, errors = process.communicate(timeout=draw.uniform(*_SECONDS_OF_PROCESS))
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            killed += 1
        else:
            if process.returncode != 0:
                differed += 1
                print(errors, flush=True)
        ended = [line for line in output.splitlines() if line.startswith("session ")]
        sessions += len(ended)
        found += int(ended[-1].split()[1]) if ended else 0
        counts = f"{sessions} sessions, {killed} processes killed, {found} programs found on disk"
        print(f"{counts}, {differed} differences", flush=True)
    return int(differed > 0)


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else 0))
