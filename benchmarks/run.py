# SPDX-License-Identifier: Apache-2.0
"""Measures one call of graftax and of the libraries it replaces: `python benchmarks/run.py --help`."""

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

# Started as a file or loaded from one, the package `benchmarks` is found beside it.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import budgets, report, subjects, table
from benchmarks.inputs import cases
from benchmarks.measures import MEASURES
from benchmarks.versions import versions


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/run.py", description="What a call costs, side by side in one process."
    )
    parser.add_argument("--budgets", action="store_true", help="measure the budgets; exit 1 if one is missed")
    parser.add_argument("--final", action="store_true", help="the final budgets (implies --budgets)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for a first look")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (31; 101 for budgets; 7 when quick)")
    parser.add_argument("--case", metavar="REGEX", default="", help="only cases whose name matches")
    parser.add_argument("--measure", action="append", choices=list(MEASURES), help="only this measure (repeatable)")
    parser.add_argument("--subject", action="append", choices=subjects.ORDER, help="only this subject (repeatable)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE")
    return parser.parse_args(argv)


def _write(path: Path | None, content: dict[str, object]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")


def _run_table(args: argparse.Namespace, console: report.Console) -> int:
    present, absent = subjects.load(tuple(args.subject) if args.subject else subjects.ORDER)
    report.print_absent(console, absent)
    names = {name: module.NAME for name, module in present.items()}
    rounds = args.rounds or (7 if args.quick else 31)
    chosen = [c for c in cases() if re.search(args.case, c.name)]
    plan = table.plan(chosen, args.measure or list(MEASURES))
    rows: list[table.Row] = []
    with report.progress(console) as bar:
        task = bar.add_task("", total=sum(table.rounds_for(m, rounds) for _, m in plan))
        shown: list[table.Row] = []
        for i, (case, measure) in enumerate(plan):
            bar.update(task, description=f"{case.name}: {measure.title}")
            wanted = table.rounds_for(measure, rounds)
            shown += table.compare(measure, case, present, wanted, lambda: bar.advance(task))
            if i + 1 == len(plan) or plan[i + 1][0] is not case:
                report.print_case(console, case.name, shown, names)
                rows += shown
                shown = []
    _write(
        args.json,
        {
            "versions": versions(),
            "rounds": rounds,
            "absent": [asdict(a) for a in absent],
            "rows": [asdict(row) for row in rows],
        },
    )
    return 0 if all(row.equal for row in rows if row.error is None) else 1


def _run_budgets(args: argparse.Namespace, console: report.Console) -> int:
    present, absent = subjects.load()
    report.print_absent(console, absent)
    chosen = budgets.FINAL if args.final else budgets.FIRST
    rounds = args.rounds or (7 if args.quick else 101)
    verdicts: list[budgets.Verdict] = []
    with report.progress(console) as bar:
        task = bar.add_task("", total=sum(b.rounds(rounds) for b in chosen))
        for budget in chosen:
            bar.update(task, description=budget.title)
            try:
                verdict = budget.run(present, rounds, lambda: bar.advance(task))
            except Exception as e:  # a failure misses its own budget; the others are still measured
                verdict = budgets.Verdict(budget.title, budget.limit, None, False, table.short(e))
            verdicts.append(verdict)
    report.print_verdicts(console, verdicts)
    _write(
        args.json,
        {"versions": versions(), "rounds": rounds, "budgets": [asdict(v) for v in verdicts]},
    )
    return 0 if all(v.held for v in verdicts) else 1


def main(argv: list[str]) -> int:
    """Run with these command-line arguments; 0 when all is equal and every asked budget is held."""
    args = _parse(argv)
    console = report.Console()
    report.print_versions(console, versions())
    return _run_budgets(args, console) if args.budgets or args.final else _run_table(args, console)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
