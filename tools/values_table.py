# SPDX-License-Identifier: Apache-2.0
"""Writes docs/values.md from runs of tests/values.

python tools/values_table.py run --out results.json    # once in each environment
python tools/values_table.py write a.json b.json       # oldest JAX first
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "values.md"
HEAD = """\
<!-- Written by tools/values_table.py from runs of tests/values. Do not edit. -->
# Every kind of value

What does `graftax.jit` do with a value of a given kind? The tables answer five questions for each kind. Every answer
comes from a test in `tests/values` that runs the jitted function beside the plain one.

- **traced**: is an array inside the value an input of the program? If so, another array of the same shape gives the new
  result without a new trace.
- **key**: does an equal value reuse the compiled program, and does a different one compile again? Types are compared at
  every depth: `1`, `1.0` and `True` differ, and so do `0.0` and `-0.0`. `nan` equals itself.
- **in place**: if the value is changed between two calls, as an argument or as a captured variable, does the next call
  use the new content?
- **write-back**: if the function changes the value and returns it, does the caller's value end up as it would without
  `jit`, on the first call and on later ones? A mutable value is passed twice and has to remain one object.
- **round trip**: does `graftax.unflatten` rebuild an equal value from the output of `graftax.flatten`? Types, content
  and sharing are compared, with other arrays as well.

"""
REFUSAL = """\
The error names the key path and the reason. Most of these values may be part of an argument, and are refused only if
the function uses them. Arrays where none are allowed, and NumPy arrays of a type that JAX lacks, are refused before
the function runs. Each page shows what to write instead.

Objects implemented in C, and instances of Python classes derived from such types, are refused if they may change,
because graftax cannot see such a change. Functions are accepted, as are types known to be immutable and objects that
define `==` and `hash` themselves. If an object never changes, say so with `graftax.register_static(its class)`.
"""
MARKS = """\
✓ yes, ✗ not yet, — the question does not apply to this kind, with the reason.
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


def page_of(refused: str) -> str:
    """The page of a refused value, by the table of docs/errors/UnsupportedValueError.md."""
    value = refused.partition(": pass")[0].partition(": read")[0]
    table = (ROOT / "docs" / "errors" / "UnsupportedValueError.md").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in table if re.search(rf"(\| |, ){re.escape(value)}( \||, )", line)]
    return line.rpartition("(")[2].partition(")")[0]


def page(results: list[dict[str, Any]]) -> str:
    """The text of docs/values.md."""
    from values.kinds import GROUPS, KINDS, LAWS, REFUSED

    names = "; ".join(result["name"] for result in results)
    lines = [HEAD + MARKS, f"Run on: {names}. Where these differ, a cell has one mark for each, in this order.", ""]
    for group in GROUPS:
        lines += [f"## {group}", "", f"| kind | {' | '.join(LAWS)} | |", "|---|" + "---|" * len(LAWS) + "---|"]
        for kind in KINDS:
            if kind.group == group:
                cells = " | ".join(cell(kind, law, results) for law in LAWS)
                lines.append(f"| {kind.name} | {cells} | {kind.note} |".replace("|  |", "| |"))
        lines.append("")
    lines += ["## Refused", "", REFUSAL]
    lines += [f"- [{name}](errors/{page_of(name)})" for name, _ in REFUSED]
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
