# SPDX-License-Identifier: Apache-2.0
"""Tables on the terminal."""

from collections.abc import Iterable, Mapping

from benchmarks.budgets import Verdict
from benchmarks.measures import MEASURES
from benchmarks.subjects import Absent
from benchmarks.table import Row

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError as e:
    raise ImportError("the benchmarks print with rich: pip install 'graftax[demo]'") from e


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


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.error is not None or row.seconds is None:
        return "[red]failed[/red]"
    equal = "=" if row.equal else "[red]≠[/red]"
    return f"{duration(row.seconds)} {row.ratio:.2f}x {equal}"


def print_case(console: Console, name: str, rows: list[Row], names: Mapping[str, str]) -> None:
    """One case: a line for each subject, a column for each measure."""
    cells = {(row.subject, row.measure): row for row in rows}
    measures = [m for m in MEASURES.values() if any(row.measure == m.name for row in rows)]
    table = Table(title=name, title_justify="left", title_style="bold")
    table.add_column("")
    for measure in measures:
        table.add_column(measure.title, justify="right")
    for subject, shown in names.items():
        if any(row.subject == subject for row in rows):
            table.add_row(shown, *(_cell(cells.get((subject, m.name))) for m in measures))
    console.print(table)
    for row in rows:
        if row.error is not None:
            console.print(f"failed: {row.subject}, {row.measure}: {row.error}", style="red", markup=False)


def print_verdicts(console: Console, verdicts: list[Verdict]) -> None:
    """Each budget with its limit, what was measured, and whether it is held."""
    table = Table(title="budgets", title_justify="left", title_style="bold")
    table.add_column("budget")
    table.add_column("at most", justify="right")
    table.add_column("measured", justify="right")
    table.add_column("")
    table.add_column("detail")
    for v in verdicts:
        measured = "none" if v.measured is None else f"{v.measured:.3f}x"
        held = "[green]held[/green]" if v.held else "[red]MISSED[/red]"
        table.add_row(v.title, f"{v.limit:.2f}x", measured, held, v.detail)
    console.print(table)
