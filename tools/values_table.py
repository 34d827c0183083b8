# SPDX-License-Identifier: Apache-2.0
"""Writes docs/values.md from runs of tests/values.

python tools/values_table.py run --out results.json    # once in each environment
python tools/values_table.py write a.json b.json       # oldest JAX first
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "values.md"
HEAD = """\
<!-- Written by tools/values_table.py from runs of tests/values. Do not edit. -->
# Values

Every kind of Python value, and five laws. A cell is the result of a test in `tests/values`; what is right is what a
plain call of the same function does with a value made afresh.

- **traced**: an array in the value is an input. Another array of the same shape gives the new result, with no new
  trace.
- **key**: an equal value made afresh is a hit; another static is a new trace and gives its own result. Types count at
  every depth: `1`, `1.0` and `True` differ, and so do `0.0` and `-0.0`; `nan` is itself.
- **in place**: the value is changed between two calls, as an argument and as a captured variable, and the next call
  uses what it is now.
- **write-back**: the function changes the value, or what it holds, and returns it. The caller's value ends as it does
  without `jit`, on the call that traces and on the next. Where the value has an identity, it is one
  object in two arguments, and the result is the caller's own object; otherwise it is an equal one.
- **round trip**: `graftax.unflatten` of what `graftax.flatten` gives is equal in type, content and sharing, also with
  other arrays.

"""
REFUSAL = """\
An object of C code (an extension type, or a class derived from one) is refused where it may change, because nobody can
see that: it is taken if it is a function, is known not to change, or says by its own `==` and hash what it is. Where
an instance never changes, `graftax.register_static(its class)` says so.

An error names the place, the reason and the way out, before anything has run:
"""
MARKS = """\
✓ exact, ✗ not exact yet, — the law says nothing of this kind, and why.
"""


def words(version: str) -> str:
    """The part of a version that names a release."""
    return ".".join(version.split(".")[:2])


class Recorder:
    """Collects one result for each kind and law."""

    def __init__(self, laws: dict[str, str]) -> None:
        self.law_of = {test: law for law, test in laws.items()}
        self.cells: dict[str, dict[str, bool]] = {}
        self.place: dict[str, tuple[str, str]] = {}

    def pytest_itemcollected(self, item: Any) -> None:
        law = self.law_of.get(item.originalname)
        if law is not None:
            kind = item.callspec.params["kind"]
            self.place[item.nodeid] = (f"{kind.group}: {kind.name}", law)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.nodeid in self.place and (report.when == "call" or report.failed):
            name, law = self.place[report.nodeid]
            laws = self.cells.setdefault(name, {})
            laws[law] = report.passed and laws.get(law, True)


def run(out: Path, only: str) -> int:
    """Runs tests/values here and writes what came of it; `only` is an expression for pytest's `-k`."""
    import jax
    import pytest

    from values.record import LAWS  # not from values.kinds: pytest's plugins want to be first to import libraries

    recorder = Recorder(LAWS)
    status = pytest.main(["-q", "--tb=line", "-rN", "-k", only, str(ROOT / "tests" / "values")], plugins=[recorder])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(status)
    python = words(sys.version)
    result = {"name": f"Python {python}, JAX {words(jax.__version__)}", "cells": recorder.cells}
    out.write_text(json.dumps(result, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    wrong = [f"{name}, {law}" for name, laws in recorder.cells.items() for law, good in laws.items() if not good]
    print("\n".join([f"{result['name']}: {len(wrong)} not exact", *wrong]))
    return 0


def cell(kind: Any, law: str, results: list[dict[str, Any]]) -> str:
    """One mark, or one for each environment where they differ."""
    if law in kind.without:
        return f"— {kind.without[law]}"
    found = [result["cells"].get(f"{kind.group}: {kind.name}", {}).get(law) for result in results]
    if None in found:
        raise SystemExit(f"no result for {kind.group}: {kind.name}, {law}. Run the tests again in every environment.")
    marks = ["✓" if good else "✗" for good in found]
    return marks[0] if len(set(marks)) == 1 else " ".join(marks)


def page(results: list[dict[str, Any]]) -> str:
    """The text of docs/values.md."""
    from values.kinds import GROUPS, KINDS, LAWS, REFUSED

    names = "; ".join(result["name"] for result in results)
    lines = [HEAD + MARKS, f"Run on: {names}. Where they differ, a cell has one mark for each, in this order.", ""]
    for group in GROUPS:
        lines += [f"## {group}", "", f"| kind | {' | '.join(LAWS)} | |", "|---|" + "---|" * len(LAWS) + "---|"]
        for kind in KINDS:
            if kind.group == group:
                cells = " | ".join(cell(kind, law, results) for law in LAWS)
                lines.append(f"| {kind.name} | {cells} | {kind.note} |".replace("|  |", "| |"))
        lines.append("")
    lines += ["## Refused", "", REFUSAL]
    lines += [f"- {name}" for name, _ in REFUSED]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Writes docs/values.md from runs of tests/values.")
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="run the tests in this environment")
    runs.add_argument("--out", type=Path, required=True, help="where the results go (JSON)")
    runs.add_argument("-k", dest="only", default="", help="only the kinds that this expression selects, as in pytest")
    writes = commands.add_parser("write", help="write the page from the results of one or more environments")
    writes.add_argument("results", type=Path, nargs="+", help="files that `run` wrote, oldest JAX first")
    options = parser.parse_args(arguments)
    sys.path[:0] = [str(ROOT / "tests")]
    if options.command == "run":
        return run(options.out, options.only)
    PAGE.write_text(page([json.loads(path.read_text(encoding="utf-8")) for path in options.results]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
