# SPDX-License-Identifier: Apache-2.0
"""The tests with a core that watches itself: `python tests/support/sanitized.py asan FOLDER WORDS`, or `make asan`.

FOLDER holds the core that was built so, WORDS are for pytest. The interpreter has no sanitizer in it, so its runtime is
loaded before it. Reports go to files, because a test keeps what its processes print. A leak counts where the core
allocated: what Python, NumPy and JAX keep for ever is theirs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from records import record

SUPPORT = Path(__file__).resolve().parent
SHARES = 2  # of the tests, at once. Workers of pytest-xdist are killed before they look for leaks
COMPILER = os.environ.get("CXX", "c++")
KEEP = "import graftax, leftover; ctypes.pythonapi.Py_IncRef(ctypes.py_object(graftax.flatten(1)[1]))"


@dataclass(frozen=True)
class Watch:
    """How a kind of build watches."""

    mark: bytes  # what a core that was built so has in it
    flags: list[str]  # of the compiler
    faults: dict[str, str]  # a program that does wrong, and what the report says
    runtimes: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)  # @ stands for where reports go


WATCHES = {
    "asan": Watch(
        b"__asan_report_load8",
        ["-fsanitize=address,undefined"],
        {
            "faults.use_after_free(9)": "heap-use-after-free",
            "faults.overflow(9)": "signed integer overflow",
            "faults.leak(9)": "Direct leak",
        },
        ["libasan.so", "libstdc++.so"],
        {
            "PYTHONMALLOC": "malloc",
            "ASAN_OPTIONS": "handle_segv=0:allocator_may_return_null=1:abort_on_error=1:detect_leaks=1:log_path=@:"
            'stack_trace_format="    #%n %f %S %M"',
            "LSAN_OPTIONS": "exitcode=0",  # what others leave behind is no failure of a test
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:log_path=@",
        },
    ),
    "tsan": Watch(
        b"__tsan_read8",
        ["-fsanitize=thread"],
        {"faults.data_race(1000)": "data race"},
        ["libtsan.so", "libstdc++.so"],
        # The core has no lock and no thread of its own, and those of others are theirs.
        {
            "TSAN_OPTIONS": f"suppressions={SUPPORT / 'tsan.supp'}:report_mutex_bugs=0:detect_deadlocks=0:"
            "report_thread_leaks=0:die_after_fork=0:log_path=@"
        },
    ),
    "debug": Watch(
        b"__glibcxx_assert_fail",
        ["-D_GLIBCXX_ASSERTIONS"],
        {"faults.beyond_the_end(9)": "Assertion '", KEEP: "held by nobody: 1 of GraphDef"},
    ),
}
HEAD = re.compile(
    r"AddressSanitizer: (?!\d+ byte).*|ThreadSanitizer: (?!reported).* \(pid.*|.*runtime error: .*|"
    r"(?:Direct|Indirect) leak of .*|held by nobody: .*|Critical nanobind error.*|.*Assertion '.*' failed.*"
)
OURS = re.compile(r"#\d+ (?:0x\w+ in )?(.*) \(_core\.[^)]*\)")


def found(text: str) -> Iterator[str]:
    """What the reports say, each in a line: what happened, and where in the core."""
    heads = list(HEAD.finditer(text))
    for head, end in zip(heads, [*(head.start() for head in heads[1:]), len(text)], strict=False):
        ours = OURS.search(text, head.end(), end)
        if ours or "leak of" not in head[0]:
            yield head[0].strip() + (f": {ours[1]}" if ours else "")


def printed(*command: str) -> str:
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


class Run:
    """A folder with a core that was built to watch itself, and what ran with it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.watch, self.folder = WATCHES[kind], folder
        self.printed: list[Path] = []
        runtimes = [printed(COMPILER, f"-print-file-name={name}") for name in self.watch.runtimes]
        self.variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(SUPPORT)]),
            "JAX_PLATFORMS": "cpu",
            "GRAFTAX_SANITIZED": kind,
            "GRAFTAX_REPORTS": str(folder / "report"),
            "LD_PRELOAD": " ".join(runtimes),
            **{name: value.replace("@", str(folder / "report")) for name, value in self.watch.variables.items()},
        }

    def python(self, *programs: list[str]) -> list[int]:
        """How they end, at once. What they print is kept: an assertion leaves no other report."""
        started = []
        for words in programs:
            self.printed.append(self.folder / f"report.printed{len(self.printed)}")
            with open(self.printed[-1], "wb") as out:
                command = [sys.executable, *words]
                started.append(subprocess.Popen(command, env=self.variables, stdout=out, stderr=subprocess.STDOUT))
        return [process.wait() for process in started]

    def clear(self) -> None:
        for path in self.folder.glob("report.*"):
            path.unlink()
        self.printed.clear()

    def reports(self) -> list[str]:
        """What was found since the reports were cleared."""
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in self.folder.glob("report.*")]
        return list(dict.fromkeys(finding for text in texts for finding in found(text)))

    def try_out(self) -> None:
        """A check that does not watch the core, or does not find what is wrong, is none."""
        core = next((self.folder / "site" / "graftax").glob("_core.*.so"))
        if self.watch.mark not in core.read_bytes():
            raise SystemExit(f"{core} was built without {self.watch.mark.decode()}")
        if any(self.python(["-c", f"import graftax._core; assert graftax._core.__file__ == {str(core)!r}"])):
            raise SystemExit(f"{core} is not what is imported")
        library = self.folder / "_core.faults.so"
        command = [COMPILER, "-std=c++17", "-g", "-Og", "-fPIC", "-shared", *self.watch.flags]
        subprocess.run([*command, SUPPORT / "faults.cpp", "-o", library], check=True)
        for program, expected in self.watch.faults.items():
            self.clear()
            self.python(["-c", f"import ctypes; faults = ctypes.CDLL({str(library)!r}); {program}"])
            findings = self.reports()
            if not any(expected in finding for finding in findings):
                raise SystemExit(f"`{program}` was not found, but {findings}")
        self.clear()


def results(path: Path) -> tuple[int, list[str]]:
    """How many tests passed, and what failed."""
    if not path.exists():
        return 0, [f"pytest wrote no {path.name}"]
    cases = list(ElementTree.parse(path).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    passed = sum(case.find("skipped") is None for case in cases) - len(failed)
    return passed, [f"{case.get('classname')}: {case.get('name')} fails" for case in failed]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("kind", choices=WATCHES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--also", default="", help="a program that runs afterwards: 'tests/support/threads.py 60'")
    args, words = parser.parse_known_args()
    run = Run(args.kind, args.folder.resolve())
    run.try_out()
    begin, passed, findings = time.monotonic(), 0, list[str]()
    outcomes = [run.folder / f"outcomes{share}.xml" for share in range(1, SHARES + 1)]
    for path in outcomes:
        path.unlink(missing_ok=True)
    shares = [f"--share={share}/{SHARES}" for share in range(1, SHARES + 1)]
    codes = run.python(
        *(
            ["-m", "pytest", "-p", "leftover", share, f"--junitxml={path}", *words]
            for share, path in zip(shares, outcomes, strict=True)
        )
    )
    for path in outcomes:
        of_share, failed = results(path)
        passed += of_share
        findings += failed
    tried = f"{passed:,} tests"
    if args.also:
        codes += run.python(args.also.split())
        tried += f", `{args.also}`"
    findings += run.reports()
    if any(codes) and not findings:
        findings.append(f"processes end with {codes}")
    for path in run.printed:
        print(path.read_text(encoding="utf-8", errors="replace"))
    record(args.kind, f"make {args.kind}", f"{tried}, in {time.monotonic() - begin:.0f} seconds", findings)
    print(f"{tried}; {len(findings)} findings", *findings, sep="\n")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
