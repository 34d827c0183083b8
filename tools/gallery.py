# SPDX-License-Identifier: Apache-2.0
"""Draws what three of the examples produce, for docs/gallery.md: python tools/gallery.py.

Run it after a change to one of them. The last digits depend on the machine, so no test compares the pictures.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import graftax

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools import charts  # noqa: E402

LEFT, RIGHT, TOP, BOTTOM = 60.0, 740.0, 30.0, 250.0
COLOURS = ("#b8860b", "#1c7ed6", "#e8590c")


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name=name)


def curve(values: Sequence[float], axis: str, steps: str) -> str:
    """One line from left to right, from zero on."""
    high = max(values)

    def y(value: float) -> float:
        return BOTTOM - value / high * (BOTTOM - TOP)

    def x(step: float) -> float:
        return LEFT + step / (len(values) - 1) * (RIGHT - LEFT)

    parts = [charts.text(12, 16, axis, "soft"), charts.text(RIGHT, BOTTOM + 36, steps, "soft", "end")]
    for value in (0, high / 2, high):
        parts.append(f'<line class="line" x1="{LEFT:g}" x2="{RIGHT:g}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(charts.text(LEFT - 8, y(value) + 4, f"{value:.3g}", "soft", "end"))
    for step in (0, (len(values) - 1) // 2, len(values) - 1):
        parts.append(charts.text(x(step), BOTTOM + 18, str(step + 1), "soft", "middle"))
    line = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(values))
    parts.append(f'<polyline class="curve" stroke="{COLOURS[1]}" points="{line}"/>')
    return charts.svg(BOTTOM + 50, f"{axis}, by {steps}", parts)


def orbits(steps: int = 1200) -> str:
    """The path of each body."""
    planets = example("planets")

    def step(system: Any, _: Any) -> Any:
        planets["advance"](system, None)
        return system, {name: body.position for name, body in system.bodies.items()}

    _, paths = graftax.scan(step, planets["start"](), length=steps)
    scale, middle, half = 100.0, charts.WIDTH / 2, 170.0
    parts: list[str] = []
    for i, ((name, path), colour) in enumerate(zip(paths.items(), COLOURS, strict=True)):
        points = np.asarray(path) * (scale, -scale) + (middle, half)
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points[::4])
        parts.append(f'<polyline class="curve" stroke="{colour}" points="{line}"/>')
        parts.append(f'<circle cx="{points[-1][0]:.1f}" cy="{points[-1][1]:.1f}" r="6" fill="{colour}"/>')
        parts.append(f'<circle cx="24" cy="{28 + 22 * i}" r="5" fill="{colour}"/>')
        parts.append(charts.text(36, 32 + 22 * i, name))
    return charts.svg(2 * half, "The paths of three bodies", parts)


def main() -> None:
    drawn = {
        "gpt": curve(example("gpt")["main"](), "cross entropy per character", "training steps"),
        "agent": curve(example("agent")["main"](), "steps until the pole falls, of 200", "updates of the policy"),
        "planets": orbits(),
    }
    for name, text in drawn.items():
        (ROOT / "docs" / "pictures" / f"gallery-{name}.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
