# SPDX-License-Identifier: Apache-2.0
"""The libraries' own test suites, with graftax's names in place of theirs: what passes with their own names alone.

    python ecosystem/suites.py [SUITE ...] [--jit] [--tests FOLDER] [-- PYTEST ARGUMENTS]

Each suite is that of the installed version, cloned at its tag, and runs in two processes. What fails in the second
alone is listed by its cause: its message without numbers.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent


class Suite(NamedTuple):
    """Where a library keeps its tests."""

    repository: str
    folder: str
    package: str
    names: str = "equinox"


SUITES = {
    "equinox": Suite("patrick-kidger/equinox", "tests", "equinox"),
    "lineax": Suite("patrick-kidger/lineax", "tests", "lineax"),
    "optimistix": Suite("patrick-kidger/optimistix", "tests", "optimistix"),
    "diffrax": Suite("patrick-kidger/diffrax", "test", "diffrax"),
    "flowjax": Suite("danielward27/flowjax", "tests", "flowjax"),
    "paramax": Suite("danielward27/paramax", "tests", "paramax"),
    "nnx": Suite("google/flax", "tests/nnx", "flax", names="nnx"),
}


def cloned(suite: Suite, into: Path) -> Path:
    """The tests of the version that is installed."""
    tag = f"v{importlib.metadata.version(suite.package)}"
    url = f"https://github.com/{suite.repository}"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", "--branch", tag, url, str(into)], check=True)
    return into / suite.folder


def outcomes(tests: Path, names: str, more: list[str]) -> dict[str, str | None]:
    """What each test came to: None, or the first line of its error."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", f"--junitxml={report}"]
        path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "GRAFTAX_NAMES": names}
        found = subprocess.run(
            [*command, "-p", "replaced_names", tests.name, *more], cwd=tests.parent, env=environment, check=False
        )
        if found.returncode not in (0, 1):
            raise RuntimeError(f"pytest ended with {found.returncode} in {tests}")
        return dict(_read(report))


def _read(report: Path) -> list[tuple[str, str | None]]:
    cases: list[tuple[str, str | None]] = []
    for case in ElementTree.parse(report).iter("testcase"):
        parts = [part for part in (case.find("failure"), case.find("error")) if part is not None]
        text = (parts[0].get("message") or "").strip() if parts else None
        cases.append((f"{case.get('classname')}::{case.get('name')}", text and text.splitlines()[0]))
    return cases


def cause(message: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+", "N", message)[:160]


def compare(name: str, tests: Path, names: str, more: list[str]) -> int:
    """Prints a table of causes. Returns how many tests fail."""
    own = outcomes(tests, "", more)
    ours = outcomes(tests, names, more)
    good = [test for test, error in own.items() if error is None]
    failed = {test: error or "not run" for test in good if (error := ours.get(test, "not run")) is not None}
    print(f"{name}: {len(good) - len(failed)} of {len(good)} pass that pass with its own names", flush=True)
    by_cause: dict[str, list[str]] = collections.defaultdict(list)
    for test in failed:
        by_cause[cause(failed[test])].append(test)
    for text, there in sorted(by_cause.items(), key=lambda item: -len(item[1])):
        print(f"  {len(there):4}  {text}  ({min(there)})", flush=True)
    return len(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", default=[*SUITES])
    parser.add_argument("--jit", action="store_true", help="replace filter_jit alone")
    parser.add_argument("--tests", type=Path, help="a folder with the tests of the one suite, in place of a clone")
    given, more = parser.parse_known_args()
    failed = 0
    for name in given.suites:
        names = "filter_jit" if given.jit and SUITES[name].names == "equinox" else SUITES[name].names
        more = [argument for argument in more if argument != "--"]
        if given.tests is not None:
            failed += compare(name, given.tests.resolve(), names, more)
            continue
        with tempfile.TemporaryDirectory() as folder:
            failed += compare(name, cloned(SUITES[name], Path(folder) / name), names, more)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
