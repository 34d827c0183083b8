# SPDX-License-Identifier: Apache-2.0
"""Writes docs/internals/tested.md from what the long runs left in build/records: `make tested`."""

from __future__ import annotations

import datetime
import json
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "build" / "records"
COVERAGE = ROOT / "build" / "coverage"
EQUAL = ROOT / "tools" / "equal_mutants.toml"
PAGE = ROOT / "docs" / "internals" / "tested.md"
TITLE = "\n## Coverage\n"
LOWEST = 10  # files in the table of coverage
HEAD = """# What was tested

This page is written by `make tested`, from what the long runs left in the folder of records. A command that has no row
was not run before the page was written.

| command | tried | day | findings |
|---|---|---|---|
"""


def row(found: dict[str, Any]) -> str:
    findings = "; ".join(found["findings"]) or "none"
    return f"| `{found['command']}` | {found['tried']} | {found['day']} | {findings.replace('|', '/')} |\n"


def mutants(found: dict[str, Any]) -> str:
    equal = tomllib.loads(EQUAL.read_text(encoding="utf-8"))
    results = [r for r in found["mutants"] if not any(r["name"] in names for names in equal.values())]
    survived = [r for r in results if r["result"] == "survived"]
    killed = len(results) - len(survived)
    out = f"""
## Mutants

A mutant is the code with one wrong line: `make mutants` says which of them a test notices. {killed} of the
{len(results)} that ran were noticed, {killed / len(results):.1%}; there are {found["made"]}, and these were drawn by
chance. Mutants that no program can notice are left out: `tools/equal_mutants.toml` has them, with reasons.
"""
    if survived:
        out += "\nNo test noticed these, in a few seconds each.\n\n```\n"
        out += "".join(f"{r['file']}  {r['what']}  {r['text'][:80]}\n" for r in survived) + "```\n"
    return out


def coverage() -> str:
    """What `make coverage` left; where it has not run here, what the page says already."""
    core, python = COVERAGE / "core.json", COVERAGE / "python.json"
    if not core.exists() or not python.exists():
        _, title, table = PAGE.read_text(encoding="utf-8").partition(TITLE)
        return title + table
    found = json.loads(core.read_text(encoding="utf-8"))
    total = json.loads(python.read_text(encoding="utf-8"))["totals"]
    day = datetime.date.fromtimestamp(core.stat().st_mtime)
    out = f"""{TITLE}
What `make coverage` reached on {day}. Of Python {total["covered_lines"] / total["num_statements"]:.1%} of the
lines. Of the core {found["line_percent"]}% of the lines and {found["branch_percent"]}% of the branches (those
that only an exception takes are not counted). The files of the core with the fewest lines reached:

| file | lines | branches |
|---|---|---|
"""
    files = [file for file in found["files"] if file["line_total"]]  # one for another system has none
    for file in sorted(files, key=lambda file: file["line_percent"])[:LOWEST]:
        branches = f"{file['branch_percent']}%" if file["branch_total"] else ""
        out += f"| `{file['filename']}` | {file['line_percent']}% | {branches} |\n"
    return out


def main() -> None:
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDS.glob("*.json"))}
    page = HEAD + "".join(row(found[name]) for name in found if name != "mutants")
    if "mutants" in found:
        page += mutants(found["mutants"])
    PAGE.write_text(page + coverage(), encoding="utf-8")


if __name__ == "__main__":
    main()
