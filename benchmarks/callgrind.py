# SPDX-License-Identifier: Apache-2.0
"""Instructions of one replay under valgrind's callgrind: the same on a busy machine and on a quiet one.

`python benchmarks/callgrind.py` runs itself under valgrind twice for each walk, with and without the loop;
the difference over the iterations is the count of one walk.
"""

import argparse
import functools
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import subjects
from benchmarks.cases import case

LEAVES = 1000
# Walks are named subject/case; JAX's own flatten gives the number beside which a replay is read.
WALKS = (
    "jax_tree/dict 1000",
    "jax_tree/eqx.Module 1000",
    "graftax_jit/dict 1000",
    "graftax_jit/eqx.Module 1000",
)
_WARM = 5
_FIXED_ADDRESSES = ("setarch", "-R")
_TOTAL = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)


def _walk(name: str) -> Callable[[], Any]:
    subject_name, _, case_name = name.partition("/")
    present, absent = subjects.load((subject_name,))
    if absent:
        raise ImportError(absent[0].reason)
    subject, chosen = present[subject_name], case(case_name)
    obj = chosen.form.build(chosen.arrays())
    _, structure = subject.flatten(obj)
    replay = subject.replay
    return lambda: replay(structure, obj)


def _child(name: str, iterations: int) -> None:
    walk = _walk(name)
    gc.collect()
    gc.disable()
    for _ in repeat(None, _WARM + iterations):
        walk()
    # Leave without the interpreter's exit, which is long and not the same in every run.
    sys.stdout.flush()
    os._exit(0)


@functools.cache
def _works(prefix: tuple[str, ...]) -> bool:
    """Whether commands can be started this way: containers may forbid it."""
    return shutil.which(prefix[0]) is not None and subprocess.run([*prefix, "true"], check=False).returncode == 0


def _instructions(name: str, iterations: int) -> int:
    """Every instruction of a process that imports, builds the object and walks it this often."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        command = [
            "valgrind",
            "--tool=callgrind",
            f"--callgrind-out-file={out}",
            sys.executable,
            str(Path(__file__).resolve()),
            "--child",
            name,
            "--iterations",
            str(iterations),
        ]
        fixed = {
            "JAX_PLATFORMS": "cpu",
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            # One thread in each pool: fewer instructions that have nothing to do with the walk.
            "OMP_NUM_THREADS": "1",
        }
        # With addresses at random, dict and hash table layouts differ from run to run.
        prefix = _FIXED_ADDRESSES if _works(_FIXED_ADDRESSES) else ()
        done = subprocess.run(
            [*prefix, *command], env={**os.environ, **fixed}, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{name} failed under valgrind:\n{done.stderr[-2000:]}")
        found = _TOTAL.search(out.read_text())
        if found is None:
            raise RuntimeError(f"no total in callgrind's output for {name}")
        return int(found[1])


def _measure(names: list[str], iterations: int) -> dict[str, float]:
    """Instructions per leaf of one walk."""
    from benchmarks import report

    counts: dict[str, float] = {}
    with report.progress(report.Console()) as bar:
        task = bar.add_task("", total=2 * len(names))
        for name in names:
            bar.update(task, description=name)
            base = _instructions(name, 0)
            bar.advance(task)
            counts[name] = (_instructions(name, iterations) - base) / iterations / LEAVES
            bar.advance(task)
    return counts


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Instructions per leaf of one walk over 1000 leaves.")
    parser.add_argument("--walk", action="append", choices=WALKS, help="only this walk (repeatable)")
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--limit", type=float, help="exit 1 when a replay of graftax takes more per leaf")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """0 when every walk was counted and no limit is passed."""
    args = _parse(argv)
    if args.child:
        _child(args.child, args.iterations)
    if shutil.which("valgrind") is None:
        print("callgrind.py needs valgrind on the PATH", file=sys.stderr)
        return 2
    names: list[str] = args.walk or list(WALKS)
    _, absent = subjects.load(tuple({name.partition("/")[0] for name in names}))
    missing = {a.name for a in absent}
    for a in absent:
        print(f"absent: {a.name} ({a.reason})")
    counts = _measure([n for n in names if n.partition("/")[0] not in missing], args.iterations)
    for name, count in counts.items():
        print(f"{name:<32} {count:10.1f} instructions per leaf")
    if args.json is not None:
        args.json.write_text(json.dumps(counts, indent=1) + "\n")
    over = [n for n, c in counts.items() if args.limit and n.startswith("graftax") and c > args.limit]
    return 1 if over or missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
