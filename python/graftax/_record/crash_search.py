# SPDX-License-Identifier: Apache-2.0
"""Looks for the part of a program that ends its process, or never comes back: in other processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any, Literal, NamedTuple

import jax
from jax.extend.core import JaxprEqn

from graftax._base.errors import GraftaxError
from graftax._jax.equations import run_equation
from graftax._record.failures import Failure
from graftax._record.plain_script import Unwritable
from graftax._record.program_parts import CannotRun, Part
from graftax._record.search import SmallestPart, search
from graftax._record.snapshot import error_text

CrashName = Literal["crash", "hang"]

START = "import sys; from graftax._record.crash_search import watch; watch(*sys.argv[1:])"
JOURNAL, RESULT, OUTPUT = "journal", "result", "output"  # files
ASKED = "asked"
ENDED, TOO_LONG, RAISED, FINE = "ended", "took too long", "raised", "fine"
# What faulthandler writes when the time of `dump_traceback_later` is over.
TIMEOUT = "Timeout ("
ENDED_EARLY = "a process that makes the last call in {path} once more ended before its program ran:\n{output}"
NOT_EXPORTED = "what lowers it ends the process"


class Answer(NamedTuple):
    """What came of a question: one of the constants above, and a text."""

    kind: str
    text: str = ""


class Journal:
    """The answers to the questions of a search so far.

    A search asks the same questions in the same order each time. So one whose process was ended by a question begins
    again in a new process, and gets that answer from the journal. Lines are appended to a file: `asked` when a
    question begins, then its answer, which whoever watches the process writes if it cannot.
    """

    def __init__(self, path: str) -> None:
        self._path, self._number = path, 0
        self._answers = [answer for answer in _lines(path) if answer.kind != ASKED]

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """The answer that the journal has already, or that the question gives now."""
        number, self._number = self._number, self._number + 1
        if number < len(self._answers):
            return self._answers[number]
        append(self._path, Answer(ASKED))
        answer = question()
        append(self._path, answer)
        return answer


def append(path: str, answer: Answer) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(answer) + "\n")


def _lines(path: str) -> list[Answer]:
    with open(path, encoding="utf-8") as file:
        # A process that ended while it wrote has left a line without its end.
        return [Answer(*json.loads(line)) for line in file if line.endswith("\n")]


# ---- in the process that may end


class Crash(Failure):
    """Compiling or running a part ends the process or raises; or it takes too long.

    Args:
        fails: `"crash"` or `"hang"`.
        timeout: seconds for each question.
        journal: of the questions.
    """

    # The compiler sees the branches that do not run, too.
    in_any_branch = True

    def __init__(self, fails: CrashName, timeout: float, journal: Journal) -> None:
        self._journal, self._is_hang, self._timeout = journal, fails == "hang", timeout
        self._wanted: Answer | None = None  # how the whole program fails
        self.nothing = f"it takes less than {timeout:g} seconds" if self._is_hang else "its program compiles and runs"
        self.preamble = f"faulthandler.dump_traceback_later({timeout:g}, exit=True)\n" if self._is_hang else ""

    @property
    def sign(self) -> str:
        return TIMEOUT if self._is_hang else _error_kind(self._wanted or Answer(FINE))

    def fails(self, part: Part) -> bool:
        answer = self._ask(lambda: self.compiled(part)(*part.arguments()))
        if answer.kind == FINE or (answer.kind == TOO_LONG) != self._is_hang:
            return False
        self._wanted = self._wanted or answer
        # Not another error, which a part of other shapes may have.
        return (answer.kind, _error_kind(answer)) == (self._wanted.kind, _error_kind(self._wanted))

    def run_equation(self, equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        outputs: list[list[Any]] = []
        answer = self._ask(lambda: outputs.append(run_equation(equation, operands)) or outputs[0])
        if answer.kind != FINE:
            raise CannotRun(answer.text)
        # With an answer from the journal it ran in an earlier process: its values are computed here once more.
        return outputs[0] if outputs else run_equation(equation, operands)

    def _ask(self, run: Callable[[], Any]) -> Answer:
        def question() -> Answer:
            try:
                jax.block_until_ready(run())
                # Callbacks and prints are no results, and may fail as well.
                jax.effects_barrier()
            except Exception as error:
                return Answer(RAISED, error_text(error))
            return Answer(FINE)

        return self._journal.ask(question)

    def write(self, script: Callable[[], str]) -> str:
        def question() -> Answer:
            try:
                return Answer(FINE, script())
            except Unwritable as error:
                return Answer(RAISED, str(error))

        answer = self._journal.ask(question)
        if answer.kind != FINE:
            raise Unwritable(answer.text if answer.kind == RAISED else NOT_EXPORTED)
        return answer.text

    def cause(self, part: Part) -> str:
        kind, text = self._wanted or Answer(FINE)
        if kind == TOO_LONG:
            return f"It takes longer than {self._timeout:g} seconds."
        return f"It raises {text}" if kind == RAISED else f"It ends the process: {text}"


def _error_kind(answer: Answer) -> str:
    """The beginning of an error's text: for one of XLA, its class and status."""
    if answer.kind != RAISED:
        return ""
    name, status, _ = (*answer.text.split(": ", 2), "", "")[:3]
    return f"{name}: {status}" if name == "JaxRuntimeError" else answer.text


def answer_questions(path: str, fails: CrashName, timeout: str, journal: str, result: str) -> None:
    """Searches as far as this process lives, and writes what it found."""
    try:
        answer: dict[str, Any] = search(path, Crash(fails, float(timeout), Journal(journal)))._asdict()
    except GraftaxError as error:
        answer = {"error": str(error)}
    # Renamed when it is whole: its name tells the process that watches that the search is over.
    with open(result + ".part", "w", encoding="utf-8") as file:
        json.dump(answer, file)
    os.replace(result + ".part", result)


# ---- in the process that watches


def watch(path: str, fails: CrashName, timeout: str, folder: str) -> None:
    """Lets process after process search, each from where the one before it has ended, until one has found something."""
    journal, result, log = (os.path.join(folder, name) for name in (JOURNAL, RESULT, OUTPUT))
    open(journal, "x").close()
    while not os.path.exists(result):
        size_before = os.path.getsize(journal)
        _run_process((path, fails, timeout, journal, result), log)
        # It ended before it asked anything, and so would the next one.
        if os.path.getsize(journal) == size_before:
            break


# This process has imported JAX and has not looked for devices, so a copy of it is a new one that need not import.
# Elsewhere, what the system has loaded into it may not be copied.
_CONTEXT = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


def _run_process(arguments: tuple[str, CrashName, str, str, str], log: str) -> None:
    """Runs one process until it ends or a question takes too long, and notes that."""
    timeout, journal = float(arguments[2]), arguments[3]
    process = _CONTEXT.Process(target=_run_logged, args=(log, arguments))
    with warnings.catch_warnings():
        # Of threads: NumPy's are the only ones, and wait for work.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    is_in_time = _wait(process, journal, timeout)
    # A process that has ended by itself is not disturbed by this, and one that hangs is over.
    process.kill()
    process.join()
    if _is_asked(journal):
        with open(log, errors="replace") as file:
            end = _end_text(process.exitcode or 0, file.read())
        append(journal, Answer(ENDED, end) if is_in_time else Answer(TOO_LONG))


def _run_logged(log: str, arguments: tuple[str, CrashName, str, str, str]) -> None:
    with open(log, "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    answer_questions(*arguments)


def _wait(process: BaseProcess, journal: str, timeout: float) -> bool:
    """Waits until the process ends; False if it waits for the same answer for too long."""
    size, changed = -1, time.monotonic()
    while process.is_alive():
        if os.path.getsize(journal) != size:
            size, changed = os.path.getsize(journal), time.monotonic()
        elif time.monotonic() - changed > timeout and _is_asked(journal):
            return False
        time.sleep(0.02)
    return True


def _is_asked(journal: str) -> bool:
    """Is there no answer to the last question?"""
    lines = _lines(journal)
    return bool(lines) and lines[-1].kind == ASKED


def _end_text(status: int, output: str) -> str:
    """How a process ended, with the last line that it wrote."""
    name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return f"{name}. {next((line for line in reversed(output.splitlines()) if line.strip()), '')}".strip()


# ---- in the process of the user


def search_in_processes(path: str, fails: CrashName, timeout: float) -> SmallestPart:
    """The same as `search`, in other processes."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = os.path.join(folder, RESULT), os.path.join(folder, OUTPUT)
        output = _watched([path, fails, str(timeout), folder], log)
        if not os.path.exists(result):
            raise GraftaxError(ENDED_EARLY.format(path=path, output=output[-2000:]))
        with open(result, encoding="utf-8") as file:
            answer = json.load(file)
    if "error" in answer:
        raise GraftaxError(answer["error"])
    return SmallestPart(**answer)


def _watched(arguments: list[str], log: str) -> str:
    """Runs the process that watches; returns what it, or the last one that it has watched, has written."""
    # Sets of texts have the same order in each process, so that the program is traced alike.
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", START, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        process.wait()
    finally:
        # The user has interrupted it. The process that it watches may hang, so the whole session is ended.
        if process.poll() is None:
            if sys.platform == "win32":
                process.kill()
            else:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    with open(log, errors="replace") as file:
        return file.read()
