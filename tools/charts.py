# SPDX-License-Identifier: Apache-2.0
"""Two pictures of benchmarks/results.json, as SVG: bars of the ratios, and how a call grows with the arrays.

Text, so that a picture is the same on every machine; light and dark, as the reader's screen is.
"""

from __future__ import annotations

import math
from typing import Any
from xml.sax.saxutils import escape

STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1d2026; } .soft { fill: #5d6470; } .back { fill: #ffffff; }
.line { stroke: #d4d8df; } .one { stroke: #5d6470; stroke-dasharray: 4 3; } .curve { fill: none; stroke-width: 2.5; }
@media (prefers-color-scheme: dark) {
text { fill: #e4e6eb; } .soft { fill: #98a0ad; } .back { fill: #16181d; } .line { stroke: #343a45; }
.one { stroke: #98a0ad; } }
"""
COLOURS = {
    "graftax_jit": "#1c7ed6",
    "jax_flat": "#868e96",
    "jax_tree": "#b8860b",
    "equinox_filter_jit": "#e8590c",
    "nnx_jit": "#2f9e44",
    "flarejax_filter_jit": "#9c36b5",
}
CASES = {
    "dict 1000": "a dict of 1,000 arrays",
    "eqx.Module 1000": "an Equinox module of 1,000",
    "object 1000": "plain objects, 1,000",
}
WIDTH, LEFT, BAR = 760, 190, 18


def svg(height: float, label: str, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}"'
    )
    body = "\n".join(parts)
    style = f'<style>\n{STYLE}</style><rect class="back" width="100%" height="100%"/>'
    return f'{head} role="img" aria-label="{label}">{style}\n{body}\n</svg>\n'


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(content)}</text>'


def ratios(results: dict[str, Any]) -> str:
    """A bar for each library that takes such objects; the scale is logarithmic, from a quarter on."""
    table = results["table"]
    cells = {(r["case"], r["subject"]): r["ratio"] for r in table["rows"] if r["measure"] == "reduce" and "ratio" in r}
    low, high = math.log(0.25), math.log(40)

    def at(ratio: float) -> float:
        return LEFT + (math.log(ratio) - low) / (high - low) * (WIDTH - LEFT - 70)

    y, bars = 34.0, []
    for case, title in CASES.items():
        bars.append(text(12, y + 4, title, "soft"))
        y += 14
        for subject, colour in COLOURS.items():
            ratio = cells.get((case, subject))
            if ratio is None or subject == "jax_flat":
                continue
            bars.append(text(LEFT - 8, y + 14, table["subjects"][subject], "", "end"))
            width = at(ratio) - LEFT
            bars.append(f'<rect x="{LEFT}" y="{y:g}" width="{width:.1f}" height="{BAR}" rx="2" fill="{colour}"/>')
            bars.append(text(LEFT + width + 6, y + 14, f"{ratio:.2f}"))
            y += BAR + 4
        y += 18
    one = at(1)
    mark = f'<line class="one" x1="{one:.1f}" x2="{one:.1f}" y1="24" y2="{y - 14:g}"/>'
    head = text(one, 18, "jax.jit, flat list of the same arrays = 1 (logarithmic)", "soft", "middle")
    return svg(y, "The time of a call over that of jax.jit, by library", [head, mark, *bars])


def growth(results: dict[str, Any]) -> str:
    """A curve for each library: microseconds of a call by the number of arrays, both logarithmic."""
    series = results["growth"]
    rows = [r for r in series["rows"] if r["measure"] == "read_one" and "seconds" in r]
    bottom, top, right = 340.0, 30.0, 580.0
    sizes = sorted({r["leaves"] for r in rows})

    def x(leaves: int) -> float:
        return 70 + math.log10(leaves) / math.log10(sizes[-1]) * (right - 70)

    def y(us: float) -> float:
        return bottom - math.log10(us) / 5 * (bottom - top)

    parts = [text(12, 16, "microseconds of a call", "soft"), text((70 + right) / 2, 376, "arrays", "soft", "middle")]
    for power in range(6):
        parts.append(f'<line class="line" x1="70" x2="{right:g}" y1="{y(10**power):.1f}" y2="{y(10**power):.1f}"/>')
        parts.append(text(62, y(10**power) + 4, f"{10**power:,}", "soft", "end"))
    parts += [text(x(n), 358, f"{n:,}", "soft", "middle") for n in sizes]
    ends: list[float] = []
    curves = [
        (s, sorted((r["leaves"], r["seconds"] * 1e6) for r in rows if r["subject"] == s)) for s in series["subjects"]
    ]
    for subject, points in sorted(curves, key=lambda curve: -curve[1][-1][1]):
        line = " ".join(f"{x(n):.1f},{y(us):.1f}" for n, us in points)
        parts.append(f'<polyline class="curve" stroke="{COLOURS[subject]}" points="{line}"/>')
        parts += [f'<circle cx="{x(n):.1f}" cy="{y(us):.1f}" r="3.5" fill="{COLOURS[subject]}"/>' for n, us in points]
        end = max(y(points[-1][1]), ends[-1] + 16 if ends else 0)
        ends.append(end)
        parts.append(f'<circle cx="{right + 16:g}" cy="{end:.1f}" r="4" fill="{COLOURS[subject]}"/>')
        parts.append(text(right + 26, end + 4, series["subjects"][subject]))
    return svg(390, "How the time of a call grows with the number of arrays", parts)


CHARTS = {"ratios.svg": ratios, "growth.svg": growth}
