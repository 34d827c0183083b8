# SPDX-License-Identifier: Apache-2.0
"""Instructions of the hot loop under valgrind's callgrind: the same on a busy machine and on a quiet one.

`python benchmarks/callgrind.py` runs itself under valgrind once for each walk and each call, and has the instructions
counted during the loop only. `--write` stores the counts with the versions that
they hold for, `--check` compares with what is stored.
"""

import argparse
import functools
import gc
import importlib.util
import json
import os
import platform
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
from benchmarks.inputs import Case
from benchmarks.measures import MEASURES
from benchmarks.versions import versions

# Loops are named subject/case/what. JAX's own flatten is the number beside which a replay is read.
REPLAYS = (
    "jax_tree/dict 1000/replay",
    "jax_tree/eqx.Module 1000/replay",
    "graftax_jit/dict 1000/replay",
    "graftax_jit/eqx.Module 1000/replay",
)
_CALLS = tuple(f"graftax_jit/{name}/reduce" for name in ("one array", "list 1000", "eqx.Module 1000"))
_TRAINING = (
    "jax_flat/list 1/update",
    "graftax_jit/list 1/update",
    "graftax_jit/object 10/update",
    "graftax_jit/nnx.Module 100/update",
    "graftax_jit/dict 1000/chain",
    "graftax_jit/eqx.Module 1000/update",
)
_NO_DIRECT = ", no direct dispatch"
LOOPS = (*REPLAYS, *_CALLS, *_TRAINING, *(name + _NO_DIRECT for name in _CALLS))
BASELINE = Path(__file__).resolve().parent / "callgrind.json"
TOLERANCE = 0.05
# More than the calls after which a small call asks for its executable: that, and its self-test, compile.
_WARM = 80
_FIXED_ADDRESSES = ("setarch", "-R")
_TRIGGER = re.compile(r"^desc: Trigger: dump (\w+)", re.MULTILINE)
_TOTAL = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)


def _parts(name: str) -> tuple[str, Case, str]:
    subject, case_name, measure = name.removesuffix(_NO_DIRECT).split("/")
    return subject, case(case_name), measure


def _loop(name: str) -> Callable[[], Any]:
    subject, chosen, measure = _parts(name)
    present, absent = subjects.load((subject,))
    if absent:
        raise ImportError(absent[0].reason)
    ready = MEASURES[measure].prepare(present[subject], chosen, chosen.arrays())
    if ready is None or not ready.equal:
        raise RuntimeError(f"{name} does not give the expected result")
    return ready.call


def _control(*words: str) -> None:
    """Tells the valgrind that runs this process to count, to start again from zero, or to write what it counted."""
    subprocess.run(["callgrind_control", *words, str(os.getpid())], check=True, capture_output=True, timeout=300)


def _child(name: str, iterations: int) -> None:
    call = _loop(name)
    for _ in repeat(None, _WARM):
        call()
    gc.collect()
    gc.disable()
    _control("--instr=on")
    # A first pass with instructions counted: what it translates and what `_control` itself loads is not in the dumps.
    call()
    _control("--dump=warm")
    for _ in repeat(None, iterations):
        call()
    _control("--dump=loop")
    _control("--dump=empty")
    # Leave without the interpreter's exit, which is long.
    sys.stdout.flush()
    os._exit(0)


@functools.cache
def _works(prefix: tuple[str, ...]) -> bool:
    """Whether commands can be started this way: containers may forbid it."""
    return shutil.which(prefix[0]) is not None and subprocess.run([*prefix, "true"], check=False).returncode == 0


def _instructions(name: str, iterations: int) -> float:
    """Instructions of one pass of a loop: the dump after the loop less the dump after nothing."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "valgrind",
            "--tool=callgrind",
            "--instr-atstart=no",  # imports and compilation are most of the run: ten times quicker if not counted
            f"--callgrind-out-file={folder}/out",
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
            # One thread in each pool: fewer instructions that have nothing to do with the loop.
            "OMP_NUM_THREADS": "1",
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
            "GRAFTAX_DIRECT_DISPATCH": "0" if name.endswith(_NO_DIRECT) else "1",
        }
        # With addresses at random, dict and hash table layouts differ from run to run.
        prefix = _FIXED_ADDRESSES if _works(_FIXED_ADDRESSES) else ()
        done = subprocess.run(
            [*prefix, *command], env={**os.environ, **fixed}, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{name} failed under valgrind:\n{done.stderr[-2000:]}")
        totals: dict[str, int] = {}
        for dump in Path(folder).glob("out.*"):
            text = dump.read_text()
            trigger, total = _TRIGGER.search(text), _TOTAL.search(text)
            if trigger and total:
                totals[trigger[1]] = int(total[1])
        if not {"loop", "empty"} <= totals.keys():
            raise RuntimeError(f"callgrind wrote no counts for {name}")
        return (totals["loop"] - totals["empty"]) / iterations


def _passes(name: str, iterations: int) -> int:
    """Fewer of a loop over many arrays: each of its passes counts as many of a small one."""
    return max(25, min(iterations, 50 * iterations // _parts(name)[1].size))


def _measure(names: list[str], iterations: int) -> dict[str, float]:
    """Instructions of one pass of each loop."""
    from benchmarks import report

    counts: dict[str, float] = {}
    with report.progress(report.console()) as bar:
        task = bar.add_task("", total=len(names))
        for name in names:
            bar.update(task, description=name)
            counts[name] = _instructions(name, _passes(name, iterations))
            bar.advance(task)
    return counts


def _built_with() -> dict[str, str]:
    """The versions that change a count without a change of graftax."""
    named = {k: v for k, v in versions().items() if k in ("python", "system", "jax", "jaxlib", "numpy", "equinox")}
    core = importlib.util.find_spec("graftax._core")
    binary = Path(core.origin).read_bytes() if core is not None and core.origin else b""
    compiler = re.search(rb"(?:GCC: \([^)]*\)|clang version) [\d.]+", binary)
    return named | {
        "python built with": platform.python_compiler(),
        "compiler": compiler[0].decode() if compiler else "",
    }


def compare(counts: dict[str, float], stored: dict[str, Any], tolerance: float) -> tuple[list[str], list[str]]:
    """Which versions are not those of the baseline, and which counts are above it by more than the tolerance."""
    now = _built_with()
    then: dict[str, str] = stored["versions"]
    other = [f"{k}: {then.get(k)} then, {now.get(k)} now" for k in then | now if then.get(k) != now.get(k)]
    worse: list[str] = []
    for name, count in counts.items():
        before = stored["counts"].get(name)
        if before is None:
            worse.append(f"{name} has no stored count")
        elif count > before["per call"] * (1 + tolerance):
            worse.append(f"{name}: {count / before['per call'] - 1:+.1%}")
    return other, worse


def _check(counts: dict[str, float], tolerance: float) -> int:
    other, worse = compare(counts, json.loads(BASELINE.read_text()), tolerance)
    if other:
        print("The baseline was counted with other versions, so a difference need not be graftax's:")
        print("\n".join(f"  {line}" for line in other))
    for line in worse:
        print(f"REGRESSION {line} (tolerance {tolerance:.0%})")
    print(f"{len(counts) - len(worse)} of {len(counts)} counts are within {tolerance:.0%} of {BASELINE.name}")
    return 1 if worse else 0


def _content(counts: dict[str, float], iterations: int) -> dict[str, Any]:
    return {
        "versions": _built_with(),
        "iterations": iterations,
        "counts": {n: {"per call": round(c), "per leaf": round(c / _parts(n)[1].size, 1)} for n, c in counts.items()},
    }


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Instructions of one walk and of one call, and of each per leaf.")
    parser.add_argument("--loop", action="append", choices=LOOPS, help="only this one (repeatable)")
    parser.add_argument("--iterations", type=int, default=500)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help=f"store the counts in {BASELINE.name}")
    what.add_argument("--check", action="store_true", help=f"exit 1 when a count is above that in {BASELINE.name}")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="of --check, as a fraction (%(default)s)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.write and args.loop:
        parser.error("--write stores every count: it takes no --loop")
    if args.check and not BASELINE.exists():
        parser.error(f"there is no {BASELINE.name} to compare with: run with --write first")
    return args


def main(argv: list[str]) -> int:
    """0 when every loop was counted and, with `--check`, none takes more than it did."""
    args = _parse(argv)
    if args.child:
        _child(args.child, args.iterations)
    if shutil.which("valgrind") is None or shutil.which("callgrind_control") is None:
        print("callgrind.py needs valgrind on the PATH", file=sys.stderr)
        return 2
    names: list[str] = args.loop or list(LOOPS)
    _, absent = subjects.load(tuple({_parts(name)[0] for name in names}))
    # A baseline without some of its counts would check nothing of them.
    if absent or any(_parts(name)[1].missing() for name in names):
        print("callgrind.py needs equinox and an installed graftax", file=sys.stderr)
        return 2
    content = _content(_measure(names, args.iterations), args.iterations)
    for name, count in content["counts"].items():
        print(f"{name:<54} {count['per call']:>12,} a call {count['per leaf']:>10,.1f} a leaf")
    if args.write:
        BASELINE.write_text(json.dumps(content, indent=1) + "\n")
    return _check({n: c["per call"] for n, c in content["counts"].items()}, args.tolerance) if args.check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
