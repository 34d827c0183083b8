# SPDX-License-Identifier: Apache-2.0
"""Measures one call of graftax and of the libraries it replaces: `python benchmarks/run.py --help`."""

import argparse
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Started as a file or loaded from one, the package `benchmarks` is found beside it.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import budgets, files, growth, report, results, subjects, table, trees
from benchmarks.cases import cases
from benchmarks.verdicts import Verdict
from benchmarks.versions import versions

_PLOTS = (".svg", ".png")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/run.py", description="What a call costs, side by side in one process."
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--budgets", action="store_true", help="measure the budgets; exit 1 if one is missed")
    what.add_argument("--growth", action="store_true", help="measure calls with 1 to 100,000 leaves")
    what.add_argument("--decode", action="store_true", help="measure a call that reads one of 7,600 NNX Variables")
    what.add_argument("--trees", action="store_true", help="measure graftax.tree beside jax.tree and optree")
    what.add_argument("--files", action="store_true", help="load and save beside safetensors and Orbax; exit 1 too")
    parser.add_argument("--megabytes", type=int, default=files.MEGABYTES, help="of the large file of --files")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller sizes, for a first look")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (31; 101 for budgets; 7 when quick)")
    parser.add_argument("--case", metavar="REGEX", default="", help="only cases whose name matches")
    parser.add_argument(
        "--measure", action="append", choices=list(table.ALL_MEASURES), help="only this measure (repeatable)"
    )
    parser.add_argument("--subject", action="append", choices=subjects.ORDER, help="only this subject (repeatable)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the numbers to FILE, beside what else is there"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them: FILE.svg or FILE.png")
    args = parser.parse_args(argv)
    if args.plot is not None and (
        args.budgets or args.decode or args.trees or args.files or args.plot.suffix not in _PLOTS
    ):
        parser.error("--plot draws the table or the growth series, as .svg or .png")
    if (args.budgets or args.files) and (args.case or args.measure or args.subject):
        parser.error("--budgets and --files measure all: --case, --measure and --subject choose from the table")
    return args


def _rounds(args: argparse.Namespace, usual: int) -> int:
    return args.rounds or (7 if args.quick else usual)


def _write(path: Path | None, part: str, content: dict[str, Any]) -> None:
    """One file may hold the table, the growth series and the budgets; each says what it was measured with."""
    if path is None:
        return
    results.write(path, results.read(path) | {part: {"versions": versions(), **content}})


def _content(
    rows: list[table.Row], rounds: int, names: dict[str, str], absent: list[subjects.Absent]
) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "subjects": names,
        "absent": [asdict(a) for a in absent],
        "rows": [asdict(row) for row in rows],
    }


def _run_table(args: argparse.Namespace, console: report.Console) -> list[table.Row]:
    present, absent = subjects.load(tuple(args.subject) if args.subject else subjects.ORDER)
    report.print_absent(console, absent)
    names = {name: module.NAME for name, module in present.items()}
    rounds = _rounds(args, 31)
    chosen = [c for c in cases() if re.search(args.case, c.name)]
    plan = table.plan(chosen, args.measure)
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
    _write(args.json, "table", _content(rows, rounds, names, absent))
    if args.plot is not None:
        from benchmarks import plot

        plot.table(rows, names, args.plot)
    return rows


def _run_growth(args: argparse.Namespace, console: report.Console) -> list[table.Row]:
    present, absent = subjects.load(tuple(args.subject) if args.subject else growth.SUBJECTS)
    report.print_absent(console, absent)
    names = {name: module.NAME for name, module in present.items()}
    rounds = _rounds(args, 31)
    part = "decode" if args.decode else "growth"
    plan = growth.decoding() if args.decode else growth.plan(largest=1000 if args.quick else growth.SIZES[-1])
    rows: list[table.Row] = []
    with report.progress(console) as bar:
        task = bar.add_task("", total=sum(growth.rounds_for(case, rounds) for case, _ in plan))
        for case, measure in plan:
            bar.update(task, description=f"{case.name}: {measure.title}")
            rows += growth.measure(case, measure, present, rounds, lambda: bar.advance(task))
    report.print_growth(console, rows, names)
    _write(args.json, part, _content(rows, rounds, names, absent))
    if args.plot is not None:
        from benchmarks import plot

        plot.growth_series(rows, names, args.plot)
    return rows


def _run_trees(args: argparse.Namespace, console: report.Console) -> list[table.Row]:
    rounds = _rounds(args, 15)
    plan = trees.plan(largest=1000 if args.quick else trees.SIZES[-1])
    rows: list[table.Row] = []
    with report.progress(console) as bar:
        task = bar.add_task("", total=sum(trees.rounds_for(size, rounds) for _, size, _ in plan))
        for form, size, operation in plan:
            bar.update(task, description=f"{form}, {size}: {operation}")
            rows += trees.measure(form, size, operation, rounds, lambda: bar.advance(task))
    report.print_trees(console, rows, trees.SUBJECTS)
    _write(args.json, "trees", _content(rows, rounds, trees.SUBJECTS, []))
    return rows


def _run_budgets(args: argparse.Namespace, console: report.Console) -> list[Verdict]:
    present, absent = subjects.load()
    report.print_absent(console, absent)
    rounds = _rounds(args, 101)
    verdicts: list[Verdict] = []
    with report.progress(console) as bar:
        task = bar.add_task("", total=sum(b.rounds(rounds) for b in budgets.BUDGETS))
        for budget in budgets.BUDGETS:
            bar.update(task, description=budget.title)
            try:
                verdict = budget.run(present, rounds, lambda: bar.advance(task))
            except Exception as e:  # a failure misses its own budget; the others are still measured
                verdict = Verdict(budget.title, budget.limit, None, False, table.short(e))
            verdicts.append(verdict)
    report.print_verdicts(console, verdicts)
    _write(args.json, "budgets", {"rounds": rounds, "budgets": [asdict(v) for v in verdicts]})
    return verdicts


def _run_files(args: argparse.Namespace, console: report.Console) -> list[budgets.Verdict]:
    rounds = args.rounds or (2 if args.quick else files.ROUNDS)
    with report.progress(console) as bar:
        task = bar.add_task(f"files, {args.megabytes} MB", total=files.steps(rounds))
        times = files.measure(args.megabytes, rounds, lambda: bar.advance(task))
    verdicts = files.verdicts(times, args.megabytes)
    report.print_seconds(console, times)
    report.print_verdicts(console, verdicts)
    content = {"rounds": rounds, "megabytes": args.megabytes, "seconds": times}
    _write(args.json, "files", {**content, "budgets": [asdict(v) for v in verdicts]})
    return verdicts


def main(argv: list[str]) -> int:
    """Run with these command-line arguments; 0 when all is equal and every asked budget is held."""
    args = _parse(argv)
    if args.plot is not None:
        try:
            from benchmarks import plot  # noqa: F401
        except ImportError as e:  # before anything is measured
            print(e, file=sys.stderr)
            return 2
    console = report.console()
    report.print_versions(console, versions())
    if args.budgets or args.files:
        judged = _run_files(args, console) if args.files else _run_budgets(args, console)
        return 0 if all(verdict.held for verdict in judged) else 1
    run = _run_growth if args.growth or args.decode else _run_trees if args.trees else _run_table
    rows = run(args, console)
    if not rows:
        print("nothing was measured: no case, measure and subject fit together", file=sys.stderr)
        return 2
    return 0 if all(row.equal for row in rows if row.error is None) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
