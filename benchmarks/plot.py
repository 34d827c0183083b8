# SPDX-License-Identifier: Apache-2.0
"""Plots of the table and of the growth series, as SVG or PNG. No display is needed."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import growth
from benchmarks.measures import MEASURES
from benchmarks.table import Row

try:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
except ImportError as e:
    raise ImportError("--plot draws with matplotlib: pip install 'graftax[bench]'") from e

_MARKERS = "os^vDPX*<>hp"
_COLOURS = (*(f"C{i}" for i in range(10)), "black", "gold")
_PANELS_IN_A_ROW = 3
_LEGEND_COLUMNS = 4


def _style(names: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """One colour and one marker for each subject: a plot may be printed in grey."""
    return {
        subject: {"color": _COLOURS[i % len(_COLOURS)], "marker": _MARKERS[i % len(_MARKERS)], "label": name}
        for i, (subject, name) in enumerate(names.items())
    }


def _timed(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.seconds is not None and row.ratio is not None]


def _finish(figure: Figure, axes: list[Any], path: Path, title: str) -> None:
    """The legend stands below all panels, where no point can be under it."""
    handles: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.suptitle(title)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=min(_LEGEND_COLUMNS, len(handles)),
        frameon=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _ratio_axis(ax: Any) -> None:
    """From a half to twice at least, so that noise does not fill a panel; labels where there is room for them."""
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    low, high = min(low, 0.45), max(high, 2.2)
    ax.set_xlim(low, high)
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 50 else (1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


def table(rows: list[Row], names: Mapping[str, str], path: Path) -> None:
    """Every case's ratios to its first subject: a panel for each measure, a line for each case."""
    rows = _timed(rows)
    if not rows:
        raise ValueError("nothing to plot: no time was measured")
    cases = list(dict.fromkeys(row.case for row in rows))
    measures = [m for m in MEASURES.values() if any(row.measure == m.name for row in rows)]
    columns = 2 if len(measures) == 4 else min(_PANELS_IN_A_ROW, len(measures))
    lines = math.ceil(len(measures) / columns)
    size = (2.5 + 3.6 * columns, 1.6 + lines * (1.0 + 0.27 * len(cases)))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False)
    axes = [ax for line in grid for ax in line]
    styles = _style(names)
    for ax, measure in zip(axes, measures, strict=False):
        ax.set_title(measure.title, fontsize=10)
        ax.axvline(1.0, color="0.4", linewidth=1, zorder=1)
        for subject, style in styles.items():
            points = {row.case: row.ratio for row in rows if (row.measure, row.subject) == (measure.name, subject)}
            if points:
                ax.plot(list(points.values()), [cases.index(c) for c in points], linestyle="none", alpha=0.8, **style)
        _ratio_axis(ax)
        ax.set_yticks(range(len(cases)), cases, fontsize=8)
        ax.grid(axis="both", which="major", color="0.9", zorder=0)
        ax.tick_params(axis="x", labelsize=8)
    # All panels share the lines: the first case stands on top, as in the table.
    axes[0].set_ylim(len(cases) - 0.5, -0.5)
    for ax in axes[len(measures) :]:
        ax.set_axis_off()
    _finish(figure, axes, path, "time of a call over that of the first subject (left of the line is faster)")


def growth_series(rows: list[Row], names: Mapping[str, str], path: Path) -> None:
    """Microseconds of a call against the number of leaves, both logarithmic: a panel for each measure."""
    rows = _timed(rows)
    if not rows:
        raise ValueError("nothing to plot: no time was measured")
    measures = [m for m in growth.SERIES if any(row.measure == m.name for row in rows)]
    figure = Figure(figsize=(1.5 + 4.5 * len(measures), 4.6), layout="constrained")
    axes = list(figure.subplots(1, len(measures), sharey=True, squeeze=False)[0])
    for ax, measure in zip(axes, measures, strict=True):
        ax.set_title(measure.title, fontsize=10)
        for subject, style in _style(names).items():
            taken = [row for row in rows if (row.measure, row.subject) == (measure.name, subject)]
            if taken:
                ax.plot([r.leaves for r in taken], [r.seconds * 1e6 for r in taken if r.seconds], **style)
        ax.set_xscale("log")
        ax.set_yscale("log")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}"))
        ax.set_xlabel("leaves")
        ax.grid(which="major", color="0.9")
    axes[0].set_ylabel("microseconds for one call")
    _finish(figure, axes, path, "steady call of a dict of arrays")
