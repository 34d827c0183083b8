# SPDX-License-Identifier: Apache-2.0
"""Writes docs/internals/tested.md from what the long runs left in build/records: `make tested`."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "build" / "records"
PAGE = ROOT / "docs" / "internals" / "tested.md"
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
    results = found["mutants"]
    survived = [r for r in results if r["result"] == "survived"]
    killed = len(results) - len(survived)
    noticed = f"{killed} of the {len(results)} mutants that ran were noticed"
    out = f"\n## Mutants\n\n{noticed}; there are {found['made']}.\n"
    out += "\n| file | ran | noticed |\n|---|---|---|\n"
    ran, lived = Counter(r["file"] for r in results), Counter(r["file"] for r in survived)
    out += "".join(f"| `{file}` | {ran[file]} | {ran[file] - lived[file]} |\n" for file in sorted(ran))
    out += f"\n{found['note']}\n" if "note" in found else ""
    out += "\nNo test noticed these. Nobody has looked yet which of them change nothing that can be seen.\n\n```\n"
    out += "".join(f"{r['file']}:{r['line']}  {r['what']}  {r['text'][:80]}\n" for r in survived)
    return out + "```\n"


def coverage() -> str:
    """What `make coverage` printed to the files that it writes."""
    text = ROOT / "build" / "coverage" / "core.txt"
    total = re.search(r"^TOTAL.*?(\d+)%", text.read_text(encoding="utf-8"), re.MULTILINE) if text.exists() else None
    return f"\n## Coverage\n\nLines of the core: {total[1]}%.\n" if total else ""


def main() -> None:
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDS.glob("*.json"))}
    page = HEAD + "".join(row(found[name]) for name in found if name != "mutants")
    if "mutants" in found:
        page += mutants(found["mutants"])
    PAGE.write_text(page + coverage(), encoding="utf-8")


if __name__ == "__main__":
    main()
