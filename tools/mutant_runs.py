# SPDX-License-Identifier: Apache-2.0
"""Runs mutants: one process imports everything once, and forks for each mutant.

First each test runs without a mutant and says which ones it reaches, and how long it takes. A mutant's tests are those
that reach it: first those that noticed others of its file, then one case of each test function, first what is fast and
reaches little else.
Where a sample of the cases is run and none notices it, the other cases of these functions follow for a while. A test
counts that passes without the mutant, in a process of its own too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PATIENCE = 60.0  # seconds that tests may take longer, and ten times as long: what runs on hangs, and was noticed
WAITS = 240.0  # seconds more for one that has had little of a processor: others may be busy on this machine
FEW = 12  # tests that run first, of so many files at most
FILES = 3
CASES = 2  # the stage that runs all cases of the functions
AT_IMPORT = [  # tests for what runs while graftax is imported
    "tests/jit/test_direct.py::test_the_second_call_of_a_structure_goes_direct",
    "tests/jit/test_direct.py::test_results_are_those_of_jax_jit_in_every_attribute",
    "tests/jit/test_direct.py::test_a_numpy_leaf_is_what_jax_jit_makes_of_it",
    "tests/jit/test_direct.py::test_a_layout_of_its_own_is_seen",
    "tests/jit/test_direct.py::test_a_numpy_leaf_may_be_written_to_as_soon_as_the_call_returns",
    "tests/jit/test_direct.py::test_a_deleted_input_is_named_by_its_path",
    "tests/jit/test_direct.py::test_debug_nans_is_asked_on_every_call",
    "tests/jit/test_requested_donation.py",
    "tests/jit/test_settings.py",
    "tests/jit/test_direct_leaves.py",
    "tests/capture/test_watch.py",
]


class Mutant(NamedTuple):
    number: int
    file: str
    line: int
    what: str
    text: str
    nth: int = 0  # among those of the same file, line's text and change

    @property
    def name(self) -> str:
        return f"{self.file} | {self.text} | {self.what} | {self.nth}"


class Reach(NamedTuple):
    """What one test did without a mutant."""

    test: str
    seconds: float
    passed: bool
    mutants: list[int]


class Child(NamedTuple):
    pid: int
    out: Path
    until: float
    done: Callable[[str, list[str]], None]  # called with how it ended, and the lines that it wrote


class Children:
    """Forked processes, some at a time. Each writes lines to a file of its own."""

    def __init__(self, place: Path) -> None:
        self.place, self.made, self.at_once = place, 0, 2
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        self.running: list[Child] = []

    def start(self, work: Callable[[Any], None], seconds: float, done: Callable[[str, list[str]], None]) -> None:
        while len(self.running) >= self.at_once:
            self.look()
        self.made += 1
        folder = self.place / str(self.made)
        folder.mkdir()
        pid = os.fork()
        if pid == 0:
            status = 3
            with contextlib.suppress(BaseException):
                os.setsid()
                os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)
                for number in (1, 2):
                    os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
                with open(folder / "out", "w", buffering=1) as out:
                    work(out)
                status = 0
            os._exit(status)
        self.running.append(Child(pid, folder, time.monotonic() + seconds, done))

    def look(self) -> None:
        for child in list(self.running):
            if child not in self.running:  # what was done for another has looked, too
                continue
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            late = time.monotonic() - child.until
            if not pid and (late < 0 or (late < WAITS and spent(child.pid) < PATIENCE)):
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            if not pid:
                os.waitpid(child.pid, 0)
            self.running.remove(child)
            ended = "hung" if not pid else "ended" if status == 0 else "crashed"
            if ended == "crashed":
                print("status", status, (child.out / "log").read_text(errors="replace")[-1500:], flush=True)
            out = child.out / "out"
            lines = out.read_text().splitlines() if out.exists() else []
            shutil.rmtree(child.out, ignore_errors=True)
            child.done(ended, lines)
        time.sleep(0.01)

    def wait(self) -> None:
        while self.running:
            self.look()


class Chosen:
    """A plugin of pytest: runs tests in an order, and writes what became of each."""

    def __init__(
        self,
        tests: list[str] | None,
        out: Any,
        taken: Callable[[], set[int]],
        seconds: float = math.inf,
        without: Container[str] = (),
    ) -> None:
        self.tests = None if tests is None else {test: i for i, test in enumerate(tests)}
        self.out, self.taken, self.failed = out, taken, False
        self.until, self.without = busy() + seconds, without

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.tests is not None and self.until < math.inf:  # functions: a case of each, then another of each
            turn: Counter[str] = Counter()
            chosen: list[tuple[int, int, pytest.Item]] = []
            for item in items:
                if (function := function_of(item.nodeid)) in self.tests and item.nodeid not in self.without:
                    chosen.append((turn[function], self.tests[function], item))
                    turn[function] += 1
            items[:] = [item for _, _, item in sorted(chosen, key=lambda c: c[:2])]
        elif self.tests is not None:
            chosen_items = [item for item in items if item.nodeid in self.tests]
            items[:] = sorted(chosen_items, key=lambda item: self.tests[item.nodeid])
        if self.tests is not None:
            print(json.dumps(("chosen", len(items))), file=self.out)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.taken()
        self.failed = False
        print(json.dumps(("starts", item.nodeid)), file=self.out)
        start = busy()
        answer = yield
        seconds = busy() - start
        print(json.dumps((item.nodeid, seconds, not self.failed, sorted(self.taken()))), file=self.out)
        if busy() > self.until:
            item.session.shouldstop = "enough"
        return answer

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.failed


class Runs:
    """All runs of one build."""

    def __init__(
        self,
        place: Path,
        record: Path,
        mutants: list[Mutant],
        key: str,
        wanted: list[Mutant],
        at_import: bytes,
        budget: float,
        cases: float,
        words: list[str],
    ) -> None:
        self.place, self.record, self.mutants, self.key, self.wanted = place, record, mutants, key, wanted
        self.budget, self.cases = budget, cases
        self.every, self.sample = ["-q", "-s", "-p", "no:xdist", "-p", "no:cacheprovider"], words
        self.named = {mutant.name: mutant for mutant in mutants}
        self.children = Children(place / "runs")
        self.reached: list[Reach] = []
        self.alone: dict[str, bool] = {}  # test -> does it pass in a process of its own?
        self.kills: dict[str, Counter[str]] = defaultdict(Counter)  # file -> test -> mutants that it noticed
        self.results: dict[str, dict[str, Any]] = {}
        if record.exists():
            self.results = {r["name"]: r for r in json.loads(record.read_text())["mutants"]}
        core = ctypes.CDLL(sys.modules["graftax._core"].__file__)
        self.chosen = ctypes.c_int.in_dll(core, "graftax_mutant")
        self.show = core.graftax_reach
        self.at_import = numbers(at_import)
        self.memory = mmap.mmap(-1, len(at_import))

    def run(self, files: list[str]) -> None:
        self._reach(files)
        self._place_new()
        self._run_all()

    def _open_memory(self, path: Path) -> None:
        """Where this process, and those that it starts, say what they reach."""
        path.write_bytes(bytes(len(self.memory)))
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)
        os.environ["GRAFTAX_REACHED"] = str(path)
        self.show(str(path).encode())

    def _take_reached(self) -> set[int]:
        found = numbers(self.memory[:])
        self.memory[:] = bytes(len(self.memory))
        return found

    def _pytest(self, words: list[str], tests: list[str] | None, out: Any, seconds: float = math.inf) -> None:
        """Runs tests by name; for some seconds, functions in all their cases."""
        bad = {test for test, passes in self.alone.items() if not passes}
        plugin = Chosen(tests, out, self._take_reached, seconds, bad)
        given = [*self.every, *(self.sample if seconds == math.inf else []), *words]
        status = pytest.main(given, plugins=[plugin])
        stopped = status == pytest.ExitCode.INTERRUPTED and busy() > plugin.until
        if (
            status in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERRUPTED)
            and not stopped
        ):
            os._exit(4)  # what the tests share, or one of their files, cannot be imported

    # ---- what each test reaches

    def _reach(self, files: list[str]) -> None:
        kept = self.place / "reached"
        kept.mkdir(exist_ok=True)
        by_number = {mutant.number: mutant for mutant in self.mutants}
        for name in files:
            key = f"{zlib.crc32(Path(name).read_bytes())} {self.key}"
            cache = kept / f"{name.replace('/', '-')}.json"
            if cache.exists() and (found := json.loads(cache.read_text()))["key"] == key:
                self._take_kept(found["reached"])
                continue

            def work(out: Any, name: str = name) -> None:
                self._open_memory(Path(out.name).with_name("reached"))
                self._pytest([name], None, out)

            def done(ended: str, lines: list[str], cache: Path = cache, key: str = key, name: str = name) -> None:
                found = [r for r in map(json.loads, lines) if len(r) == 4]
                bad = [r[0] for r in found if not r[2]]
                seconds = sum(r[1] for r in found)
                print(f"{name}: {ended}, {len(found)} tests, {seconds:.0f} s, fail: {bad}", flush=True)
                self.reached.extend(Reach(*r) for r in found)
                named = [(*r[:3], [by_number[n].name for n in r[3]]) for r in found]
                cache.write_text(json.dumps({"key": key, "reached": named}))

            self.children.start(work, 1200, done)
        self.children.wait()

    def _take_kept(self, kept: list[list[Any]]) -> None:
        for test, seconds, passed, names in kept:
            numbers = sorted(self.named[name].number for name in names if name in self.named)
            self.reached.append(Reach(test, seconds, passed, numbers))

    def _place_new(self) -> None:
        """Lines that are new since the build that was asked what it reaches: whoever reaches the one next to them."""
        met = {number for r in self.reached for number in r.mutants}
        of_file: dict[str, list[Mutant]] = defaultdict(list)
        for mutant in self.mutants:
            if mutant.number in met:
                of_file[mutant.file].append(mutant)
        for mutant in self.wanted:
            if mutant.number not in met and (near := of_file[mutant.file]):
                next_to = min(near, key=lambda m: abs(m.line - mutant.line)).number
                for r in self.reached:
                    if next_to in r.mutants:
                        r.mutants.append(mutant.number)

    # ---- mutants

    def tests_of(self, mutant: Mutant) -> tuple[list[Reach], list[Reach]]:
        """A few that run first, of a few files, and as many others as the budget has room for."""
        reach = [r for r in self.reached if r.passed and mutant.number in self._sets[r.test]]
        reach = [r for r in reach if self.alone.get(r.test, True)]
        kills = self.kills[mutant.file]
        first = sorted((r for r in reach if kills[r.test]), key=lambda r: r.seconds / kills[r.test])[:30]
        chosen = {r.test for r in first}
        case: Counter[str] = Counter()
        rest: list[tuple[int, float, Reach]] = []
        for r in sorted(reach, key=lambda r: r.seconds):
            function = function_of(r.test)
            if r.test not in chosen:
                rest.append((case[function], r.seconds * len(r.mutants), r))
            case[function] += 1
        budget = self.budget
        few: list[Reach] = []
        others: list[Reach] = []
        for r in [*first, *(r for _, _, r in sorted(rest))]:
            if r.seconds > budget:
                continue
            budget -= r.seconds
            files = {file_of(f.test) for f in [*few, r]}
            (few if len(few) < FEW and len(files) <= FILES else others).append(r)
        return few, others

    def _run_all(self) -> None:
        self._sets = {r.test: set(r.mutants) for r in self.reached}
        for r in self.results.values():
            if r.get("by"):
                self.kills[r["file"]][r["by"]] += 1
        for mutant in self.wanted:
            self._run(mutant)
            self.children.look()
        self.children.wait()
        lived = sum(r["result"] == "survived" for r in self.results.values())
        print(f"{len(self.results) - lived} of {len(self.results)} mutants noticed; {len(self.mutants)} were made")

    def _run(self, mutant: Mutant, stage: int = 0, crashed: str | None = None) -> None:
        """Runs a few tests of a mutant; where none fails, all others; then their other cases, for a while.

        A process that crashes, or hangs, has to do so twice in one test: any forked process may by chance.
        """
        few, others = self.tests_of(mutant)
        tests = len(few) + len(others)
        part = [few, others, [*few, *others] if self.cases and self.sample else []][stage]
        names = [r.test for r in part] if stage < CASES else list(dict.fromkeys(function_of(r.test) for r in part))
        seconds = math.inf if stage < CASES else self.cases

        def work(out: Any) -> None:
            os.environ["GRAFTAX_MUTANT"] = str(mutant.number)
            self.chosen.value = mutant.number
            self._pytest(["-x", *sorted(set(map(file_of, names)))], names, out, seconds)

        def done(ended: str, lines: list[str]) -> None:
            by, noticed = failure(ended, [json.loads(line) for line in lines])
            if by and not self._passes_alone(by, seconds):
                return self._run(mutant, stage)
            if ended != "ended" and crashed != (by or ""):
                return self._run(mutant, stage, by or "")
            if not noticed and stage < CASES:
                return self._run(mutant, stage + 1)
            if not noticed and mutant.number in self.at_import:
                return self._run_anew(mutant, tests)
            if by:
                self.kills[mutant.file][by] += 1
            self._note(mutant, ("killed" if ended == "ended" else ended) if noticed else "survived", by, tests)

        if part:
            usual = sum(r.seconds for r in part) if stage < CASES else seconds
            self.children.start(work, PATIENCE + 10 * usual, done)
        else:
            done("ended", [])

    def _passes_alone(self, test: str, seconds: float) -> bool:
        if test not in self.alone:
            answers: list[bool] = []

            def work(out: Any) -> None:
                if seconds < math.inf:
                    self.sample = []
                self._pytest([file_of(test)], [test], out)

            def done(ended: str, lines: list[str]) -> None:
                answers.append(ended == "ended" and not failure(ended, [json.loads(line) for line in lines])[1])

            others, self.children.running = self.children.running, []
            self.children.start(work, 600, done)
            self.children.wait()
            self.children.running = others
            self.alone[test] = answers[0]
            if not answers[0]:
                print("fails without a mutant, too:", test, flush=True)
        return self.alone[test]

    def _run_anew(self, mutant: Mutant, tests: int) -> None:
        """Of what runs while graftax is imported: a process that has the mutant from the beginning."""

        def work(out: Any) -> None:
            given = {**os.environ, "GRAFTAX_MUTANT": str(mutant.number)}
            words = [sys.executable, "-m", "pytest", "-x", *self.every, *self.sample, *AT_IMPORT]
            print(subprocess.run(words, env=given, check=False).returncode, file=out)

        def done(ended: str, lines: list[str]) -> None:
            self._note(mutant, "survived" if ended == "ended" and lines == ["0"] else "killed", None, tests)

        self.children.start(work, 600, done)

    def _note(self, mutant: Mutant, result: str, by: str | None, tests: int) -> None:
        name = mutant.name
        found = {k: v for k, v in mutant._asdict().items() if k not in ("number", "nth")}
        self.results[name] = {"name": name, **found, "result": result, "by": by, "tests": tests}
        text = {"made": len(self.mutants), "mutants": list(self.results.values())}
        self.record.parent.mkdir(parents=True, exist_ok=True)
        self.record.write_text(json.dumps(text, indent=1))
        print(
            len(self.results),
            result,
            f"{mutant.file}:{mutant.line}",
            mutant.what,
            "|",
            mutant.text,
            "|",
            by,
            tests,
            flush=True,
        )


def busy() -> float:
    """Seconds of all threads, and of the processes that were waited for: others may be busy on this machine."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def spent(pid: int) -> float:
    """Seconds of a processor that a child, and the processes that it waited for, have had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def file_of(test: str) -> str:
    return test.partition("::")[0]


def function_of(test: str) -> str:
    return test.partition("[")[0]


def numbers(flags: bytes) -> set[int]:
    return {i for i, flag in enumerate(flags) if flag}


def failure(ended: str, lines: list[Any]) -> tuple[str | None, bool]:
    """The test that failed, or ran when the process ended; and did any?"""
    last = next((line for line in reversed(lines) if len(line) == 2), None)
    if ended != "ended":
        return (last[1] if last and last[0] == "starts" else None), True
    return next(((line[0], True) for line in lines if len(line) == 4 and not line[2]), (None, False))


def in_turn(mutants: list[Mutant]) -> Iterator[Mutant]:
    """A random order that stays the same."""
    yield from sorted(mutants, key=lambda m: zlib.crc32(m.name.encode()))
