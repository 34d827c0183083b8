# SPDX-License-Identifier: Apache-2.0
"""Fills the tables of docs/performance.md and README.md from benchmarks/results.json: nobody types a number.

python benchmarks/run.py --json run.json                     # again with --growth, --decode, --trees, --budgets
python tools/performance_tables.py --keep run.json --write   # without --write: exit 1 where a page is not current
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Started as a file, the package `benchmarks` is found beside it.
sys.path.insert(0, str(ROOT))

from benchmarks import results as stored  # noqa: E402
from tools import charts  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results.json"
PAGES = (ROOT / "docs" / "performance.md", ROOT / "README.md")
BLOCK = re.compile(r"(<!-- measured: ([a-z]+) -->\n).*?(<!-- end -->)", re.DOTALL)

# Few columns stay readable; the JSON has every subject.
SUBJECTS = ("jax_flat", "jax_tree", "graftax_jit", "equinox_filter_jit", "nnx_jit", "flarejax_filter_jit")
NNX = ("graftax_jit", "nnx_jit", "nnx_jit_tree", "nnx_cached_partial", "nnx_split")
DECODE = ("jax_flat", "jax_tree", "graftax_jit", "equinox_filter_jit", "nnx_cached_partial", "nnx_jit")
GRAFTAX = ("graftax_jit", "graftax_filter_jit", "graftax_pack")
PACKED = ("jax_flat", "graftax_jit", "graftax_pack")
# What users wait for. Walks alone are a part of it, and `flatten` has no known structure to compare with.
CALLS = {"first": "first call", "reduce": "reduced", "update": "all updated", "chain": "fed back"}
CALLS["write_back"] = "changed in place"
# Three calls that the README names, by the budgets that measure them.
README_CALLS = {
    "call, dict of 1000, reduce, vs jax.jit on it": ("a dict of 1,000 arrays", "`jax.jit` on the same dict"),
    "call, eqx.Module of 100, reduce, vs equinox.filter_jit": (
        "an Equinox module of 100 arrays",
        "`equinox.filter_jit`",
    ),
    "call, one array, vs jax.jit": ("a single array", "`jax.jit`"),
}
# Less is the machine's noise and no difference.
SLOWER = 1.05


def _grid(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _ratio(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "error" in row:
        return "failed"
    return f"{row['ratio']:.2f}" if row["ratio"] < 100 else f"{row['ratio']:,.0f}"


def _cells(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {(row["case"], row["measure"], row["subject"]): row for row in rows}


def _in_order(rows: list[dict[str, Any]], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def versions(results: dict[str, Any]) -> str:
    """What each part was measured with, and how often."""
    parts: dict[str, list[str]] = {}
    for part, content in sorted(results.items()):
        found = ", ".join(f"{k} {v}" for k, v in content["versions"].items() if v != "absent")
        parts.setdefault(found, []).append(f"{part} in {content['rounds']} rounds")
    return "\n".join(f"- {', '.join(names)}: {found}." for found, names in parts.items())


def budgets(results: dict[str, Any]) -> str:
    verdicts = results["budgets"]["budgets"]

    def figure(v: dict[str, Any], name: str, absent: str) -> str:
        return f"{v[name]:.3f}" if name in v else absent

    def line(v: dict[str, Any]) -> list[str]:
        floors = [figure(v, name, "") for name in ("floor", "by_hand")]
        held = "yes" if v["held"] else "**no**"
        return [v["title"], f"{v['limit']:.2f}", figure(v, "measured", "not measured"), *floors, held]

    heads = ["budget", "at most", "measured", "executable", "by hand", "held"]
    return _grid(heads, [line(v) for v in verdicts])


def numbers(results: dict[str, Any]) -> str:
    """Three calls for the README, as fractions of the time that the others take."""
    measured = {v["title"]: v["measured"] for v in results["budgets"]["budgets"] if "measured" in v}
    lines = [[ours, other, f"{measured[title]:.2f}x"] for title, (ours, other) in README_CALLS.items()]
    return _grid(["argument of the call", "compared with", "time of graftax"], lines)


def _calls(
    measure: str, subjects: tuple[str, ...], only: str = "", part: str = "table"
) -> Callable[[dict[str, Any]], str]:
    def render(results: dict[str, Any]) -> str:
        table = results[part]
        rows = [r for r in table["rows"] if r["measure"] == measure and r["subject"] in subjects and only in r["case"]]
        cells, present = _cells(rows), [s for s in subjects if any(r["subject"] == s for r in rows)]
        lines = [
            [case, *(_ratio(cells.get((case, measure, subject))) for subject in present)]
            for case in _in_order(rows, "case")
        ]
        return _grid(["", *(table["subjects"][s] for s in present)], lines)

    return render


def packed(results: dict[str, Any]) -> str:
    """State that is fed back, packed and as it is, of the cases that were measured packed."""
    table = results["table"]
    cases = {r["case"] for r in table["rows"] if r["subject"] == "graftax_pack" and r["measure"] == "chain"}
    rows = [r for r in table["rows"] if r["case"] in cases]
    return _calls("chain", PACKED)({**results, "table": {**table, "rows": rows}})


def counts(results: dict[str, Any]) -> str:
    """Bytes and objects, of the cases in which they were counted."""
    table = results["table"]
    rows = [r for r in table["rows"] if "amount" in r and r["subject"] in SUBJECTS]
    cells, measures = _cells(rows), _in_order(rows, "measure")
    lines = [
        [f"{case}, {table['subjects'][s]}", *(f"{cells[case, m, s]['amount']:,.0f}" for m in measures)]
        for case in _in_order(rows, "case")
        for s in SUBJECTS
        if all((case, m, s) in cells for m in measures)
    ]
    heads = {"allocated": "bytes in a call", "kept": "bytes freed with f", "grown": "objects, 100 calls"}
    return _grid(["", *(heads.get(m, "objects after f") for m in measures)], lines)


def growth(results: dict[str, Any]) -> str:
    series = results["growth"]
    cells = {(r["measure"], r["leaves"], r["subject"]): r for r in series["rows"]}
    names = {"read_one": "reads one", "update_one": "changes one"}
    lines = [
        [f"{names[m]}, {n:,}", *(_microseconds(cells.get((m, n, s))) for s in series["subjects"])]
        for m in _in_order(series["rows"], "measure")
        for n in _in_order(series["rows"], "leaves")
        if any((m, n, s) in cells for s in series["subjects"])
    ]
    return _grid(["us for a call", *series["subjects"].values()], lines)


def _microseconds(row: dict[str, Any] | None) -> str:
    if row is None or "error" in row:
        return "" if row is None else "failed"
    return f"{row['seconds'] * 1e6:,.1f}" if row["seconds"] < 1e-4 else f"{row['seconds'] * 1e6:,.0f}"


def slower(results: dict[str, Any]) -> str:
    """Every call in which another library took less time than `graftax.jit`, with the quickest one."""
    table = results["table"]
    cells = _cells([r for r in table["rows"] if "ratio" in r and r["measure"] in CALLS and r["equal"]])
    lines: list[list[str]] = []
    for (case, measure, subject), ours in cells.items():
        if subject != "graftax_jit":
            continue
        others = [r for (c, m, s), r in cells.items() if (c, m) == (case, measure) and s not in GRAFTAX]
        best = min(others, key=lambda r: r["ratio"], default=None)
        if best is not None and ours["ratio"] > SLOWER * best["ratio"]:
            times = f"{ours['ratio'] / best['ratio']:.2f}"
            lines.append([f"{case}, {CALLS[measure]}", table["subjects"][best["subject"]], times])
    return _grid(["call", "quickest", "graftax.jit over it"], lines) if lines else "None of the measured calls."


def trees(results: dict[str, Any]) -> str:
    """The smallest and the largest ratio over all sizes: graftax over each of the two, by form and operation."""
    rows = results["trees"]["rows"]
    cells = {(r["case"], r["measure"], r["subject"]): r["seconds"] for r in rows}
    forms = list(dict.fromkeys(r["case"].rpartition(",")[0] for r in rows))
    operations = _in_order(rows, "measure")

    def cell(form: str, operation: str, other: str) -> str:
        cases = [c for c in _in_order(rows, "case") if c.rpartition(",")[0] == form]
        keys = [(c, operation) for c in cases if (c, operation, other) in cells]
        found = [cells[c, m, "graftax_tree"] / cells[c, m, other] for c, m in keys]
        return f"{min(found):.2f} to {max(found):.2f}" if found else ""

    lines = [
        [f"{form}, over {name}", *(cell(form, operation, other) for operation in operations)]
        for form in forms
        for other, name in (("jax_tree", "jax.tree"), ("optree", "optree"))
    ]
    return _grid(["", *operations], lines)


# What a row of each part keeps: what a page shows of it.
ROW = ("case", "measure", "subject")
KEPT = {
    "budgets": ("title", "limit", "measured", "floor", "by_hand", "held"),
    "decode": (*ROW, "ratio", "error"),
    "growth": (*ROW, "leaves", "seconds", "error"),
    "table": (*ROW, "ratio", "amount", "equal", "error"),
    "trees": (*ROW, "seconds"),
}


def kept(results: dict[str, Any]) -> dict[str, Any]:
    """What the pages show of a run, in six figures: small enough to be read as a diff."""

    def shown(row: dict[str, Any]) -> bool:
        return row["measure"] in CALLS or (row["unit"] != "s" and row["subject"] in SUBJECTS)

    def short(value: Any) -> Any:
        return float(f"{value:.6g}") if isinstance(value, float) else value

    parts: dict[str, Any] = {}
    for part, content in results.items():
        rows = "budgets" if part == "budgets" else "rows"
        chosen = [row for row in content[rows] if part != "table" or shown(row)]
        lines = [{k: short(row[k]) for k in KEPT[part] if row.get(k) is not None} for row in chosen]
        parts[part] = {**{k: v for k, v in content.items() if k != "absent"}, rows: lines}
    return parts


RENDER: dict[str, Callable[[dict[str, Any]], str]] = {
    "versions": versions,
    "budgets": budgets,
    "numbers": numbers,
    "reduce": _calls("reduce", SUBJECTS),
    "update": _calls("update", SUBJECTS),
    "first": _calls("first", SUBJECTS),
    "nnx": _calls("write_back", NNX, only="nnx"),
    "packed": packed,
    "counts": counts,
    "decode": _calls("decode", DECODE, part="decode"),
    "growth": growth,
    "trees": trees,
    "slower": slower,
}


def filled(text: str, results: dict[str, Any]) -> str:
    """The page with every measured block as the results have it."""
    return BLOCK.sub(lambda m: f"{m[1]}{RENDER[m[2]](results)}\n{m[3]}", text)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Fills the tables of the pages from benchmarks/results.json.")
    parser.add_argument(
        "--write", action="store_true", help="change the pages; otherwise exit 1 where one would change"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="first take over what the pages show of this run")
    options = parser.parse_args(arguments)
    if options.keep is not None:
        stored.write(RESULTS, stored.read(RESULTS) | kept(stored.read(options.keep)))
    results = stored.read(RESULTS)
    changed = 0
    pages = {page: page.read_text(encoding="utf-8") for page in PAGES}
    made = {page: filled(text, results) for page, text in pages.items()}
    made |= {ROOT / "docs" / "pictures" / name: draw(results) for name, draw in charts.CHARTS.items()}
    for page, new in made.items():
        text = pages.get(page) or (page.read_text(encoding="utf-8") if page.is_file() else "")
        if new != text:
            changed += 1
            print(f"{page.relative_to(ROOT)}: {'written' if options.write else 'not current, run with --write'}")
            if options.write:
                page.write_text(new, encoding="utf-8")
    return 0 if options.write or not changed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
