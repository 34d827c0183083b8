# SPDX-License-Identifier: Apache-2.0
"""Damaged input for all that reads, at length: `python tests/support/fuzz.py SECONDS [READER...]`, or `make fuzz`.

Each reader of readers.py has a process of its own, where libFuzzer, through atheris, keeps the inputs that reach
something new of graftax: of its modules, and of a core that was built to count what runs (reached.cpp). What is found
is kept in tests/support/corpus, where test_fuzz.py tries it from then on. The counts of one day add up.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from records import record

BUILD = Path(__file__).resolve().parents[2] / "build" / "fuzz"
OPTIONS = ["-timeout=20", "-rss_limit_mb=3000", "-print_final_stats=1"]
COUNTERS = 1 << 16  # of reached.cpp


def tell(fuzzer: ctypes.CDLL, core: ctypes.CDLL) -> object:
    """Tells libFuzzer of the core's counters, and of a place for each: it may use these as long as the answer lives."""
    counters = (ctypes.c_ubyte * COUNTERS).in_dll(core, "graftax_reached")
    places = (ctypes.c_size_t * (2 * COUNTERS))()  # each with flags, which are none
    for number in range(COUNTERS):
        places[2 * number] = ctypes.addressof(counters) + number
    for what, array in (("8bit_counters", counters), ("pcs", places)):
        begin = ctypes.addressof(array)
        end = begin + ctypes.sizeof(array)
        getattr(fuzzer, f"__sanitizer_cov_{what}_init")(ctypes.c_void_p(begin), ctypes.c_void_p(end))
    return places


def guided(name: str, words: list[str]) -> None:
    """Does not return: libFuzzer ends the process."""
    import atheris
    from atheris import core_with_libfuzzer

    with atheris.instrument_imports(include=["graftax"]):
        import readers

    longest = f"-max_len={readers.READERS[name].longest}"
    atheris.Setup([sys.argv[0], *words, longest], lambda data: readers.attempt(name, data))
    _places = tell(ctypes.CDLL(core_with_libfuzzer.__file__), ctypes.CDLL(readers._core.__file__))
    for number, data in enumerate(readers.prepare(name)):
        (BUILD / name / "seeds" / str(number)).write_bytes(data)
    atheris.Fuzz()


def fuzz(name: str, seconds: int, most: int) -> tuple[int, str | None]:
    """How many inputs a reader was given, and what was wrong with the answer to the last one."""
    kept, seeds, found = folders = [BUILD / name / folder for folder in ("kept", "seeds", "found")]
    shutil.rmtree(seeds, ignore_errors=True)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    words = [*OPTIONS, f"-max_total_time={seconds}", f"-runs={most}", f"-artifact_prefix={found}/"]
    log = BUILD / name / "log"
    with open(log, "wb") as out:
        command = [sys.executable, __file__, "--guided", name, *words, str(kept), str(seeds)]
        status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    text = log.read_text(encoding="utf-8", errors="replace")
    counts = re.findall(r"^#(\d+)", text, re.M) + re.findall(r"^stat::number_of_executed_units: *(\d+)", text, re.M)
    what = re.search(r"=== Uncaught Python exception: ===\n(.*)|ERROR: (.*)", text)
    wrong = (what[1] or what[2] if what else f"it ends with {status}: see {log}") if status else None
    return int(counts[-1]) if counts else 0, wrong


def main() -> int:
    import readers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=int, help="for each reader")
    parser.add_argument("readers", nargs="*", metavar="READER", help=", ".join(readers.READERS))
    parser.add_argument("--most", type=int, default=-1, help="inputs for each reader")
    args = parser.parse_args()
    day, wrong = BUILD / f"{time.strftime('%Y-%m-%d')}.json", None
    for name in args.readers or readers.READERS:
        count, what = fuzz(name, args.seconds, args.most)
        wrong = wrong or what
        print(f"{name}: {count:,} inputs, {what or 'nothing found'}", flush=True)
        for file in (BUILD / name / "found").glob("*"):
            (readers.CORPUS / name).mkdir(parents=True, exist_ok=True)
            file.rename(readers.CORPUS / name / file.name)
        # What was found of a reader is mended, or is found again.
        tried = json.loads(day.read_text(encoding="utf-8")) if day.exists() else {}
        tried[name] = [count + tried.get(name, [0])[0], what]
        day.write_text(json.dumps(tried), encoding="utf-8")
        counts = ", ".join(f"{tried[name][0]:,} of {name}" for name in readers.READERS if name in tried)
        findings = [f"{name}: {what}" for name, (_, what) in tried.items() if what]
        record("fuzz", "make fuzz", f"damaged inputs: {counts}", findings)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(guided(sys.argv[2], sys.argv[3:]) if sys.argv[1:2] == ["--guided"] else main())
