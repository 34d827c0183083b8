# SPDX-License-Identifier: Apache-2.0
"""Tables on the terminal."""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from benchmarks import growth
from benchmarks.subjects import Absent
from benchmarks.table import ALL_MEASURES, Row
from benchmarks.verdicts import Verdict

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError as e:
    raise ImportError("the benchmarks print with rich: pip install 'graftax[bench]'") from e


Key = TypeVar("Key")

# A file has no width of its own; tables of eight measures need this much.
_FILE_WIDTH = 170


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)


def progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def print_versions(console: Console, found: Mapping[str, str]) -> None:
    console.print(", ".join(f"{name} {value}" for name, value in found.items()), style="dim", highlight=False)


def print_absent(console: Console, absent: Iterable[Absent]) -> None:
    for subject in absent:
        console.print(f"absent: {subject.name} ({subject.reason})", style="yellow", highlight=False)


def duration(seconds: float) -> str:
    """Three figures that fit a column."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            value = seconds * scale
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def amount(row: Row) -> str:
    """A count in its unit."""
    assert row.amount is not None
    if row.unit == "B" and abs(row.amount) >= 10_000:
        return f"{row.amount / 1000:,.0f} kB"
    return f"{row.amount:,.0f} B" if row.unit == "B" else f"{row.amount:+,.0f}"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.error is not None:
        return "[red]failed[/red]"
    equal = "=" if row.equal else "[red]≠[/red]"
    if row.seconds is None:
        return f"{amount(row)} {equal}"
    return f"{duration(row.seconds)} {row.ratio:.2f}x {equal}"


def _table(
    title: str, rows: list[Row], names: Mapping[str, str], columns: Mapping[Key, str], key: Callable[[Row], Key]
) -> Table:
    """A line for each subject, a column for each key of a row."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for heading in columns.values():
        table.add_column(heading, justify="right")
    cells = {(row.subject, key(row)): row for row in rows}
    for subject, shown in names.items():
        if any(row.subject == subject for row in rows):
            table.add_row(shown, *(_cell(cells.get((subject, column))) for column in columns))
    return table


def print_case(console: Console, name: str, rows: list[Row], names: Mapping[str, str]) -> None:
    """One case: a line for each subject, a column for each measure; what is counted has a table of its own."""
    for timed in (True, False):
        units = {m.name: m.title for m in ALL_MEASURES.values() if (m.unit == "s") == timed}
        shown = [row for row in rows if row.measure in units]
        if shown:
            present = {row.measure for row in shown}
            columns = {key: title for key, title in units.items() if key in present}
            title = name if timed else f"{name}, counted"
            console.print(_table(title, shown, names, columns, lambda row: row.measure))
    print_failed(console, rows)


def print_growth(console: Console, rows: list[Row], names: Mapping[str, str]) -> None:
    """One table for each measure: a line for each subject, a column for each number of leaves."""
    for measure in [m for m in growth.MEASURES.values() if any(row.measure == m.name for row in rows)]:
        shown = [row for row in rows if row.measure == measure.name]
        columns = {row.leaves: f"{row.leaves:,}" for row in shown}
        console.print(_table(f"leaves; {measure.title}", shown, names, columns, lambda row: row.leaves))
    print_failed(console, rows)


def print_trees(console: Console, rows: list[Row], names: Mapping[str, str]) -> None:
    """One table for each form and size: a line for each library, a column for each operation."""
    for case in dict.fromkeys(row.case for row in rows):
        shown = [row for row in rows if row.case == case]
        columns = {row.measure: row.measure for row in shown}
        console.print(_table(case, shown, names, columns, lambda row: row.measure))


def print_failed(console: Console, rows: list[Row]) -> None:
    for row in rows:
        if row.error is not None:
            console.print(f"failed: {row.subject}, {row.measure}: {row.error}", style="red", markup=False)


def print_verdicts(console: Console, verdicts: list[Verdict]) -> None:
    """Each budget with its limit, what was measured, and whether it is held."""
    table = Table(title="budgets", title_justify="left", title_style="bold")
    table.add_column("budget")
    table.add_column("at most", justify="right")
    table.add_column("measured", justify="right")
    table.add_column("executable", justify="right")
    table.add_column("by hand", justify="right")
    table.add_column("")
    table.add_column("detail")
    for v in verdicts:
        measured = "none" if v.measured is None else f"{v.measured:.3f}x"
        held = "[green]held[/green]" if v.held else "[red]MISSED[/red]"
        floors = ["" if floor is None else f"{floor:.3f}x" for floor in (v.floor, v.by_hand)]
        table.add_row(v.title, f"{v.limit:.2f}x", measured, *floors, held, v.detail)
    console.print(table)


def print_seconds(console: Console, times: dict[str, float]) -> None:
    """Each way with its median."""
    table = Table(title="seconds", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("median", justify="right")
    for way, seconds in times.items():
        table.add_row(way, f"{seconds:.4f}")
    console.print(table)
