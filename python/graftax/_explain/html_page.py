# SPDX-License-Identifier: Apache-2.0
"""What `log_recompiles` wrote of a run, as one page that needs nothing else: functions by the seconds they took."""

from __future__ import annotations

import html
import importlib.resources
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from graftax._base.size_text import count_text

NO_LOG = "{path} is not a log of graftax.log_recompiles: line {line} is not a JSON object with a function"

Line = dict[str, Any]


def read(paths: Iterable[Path]) -> list[Line]:
    """The lines of some logs.

    Raises:
        ValueError: if a file is no such log.
    """
    lines: list[Line] = []
    for path in paths:
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            if not isinstance(line, dict) or "function" not in line:
                raise ValueError(NO_LOG.format(path=path, line=number))
            lines.append(line)  # pyright: ignore[reportUnknownArgumentType]
    return lines


def page(lines: list[Line]) -> str:
    template = importlib.resources.files("graftax._explain").joinpath("page.html").read_text(encoding="utf-8")
    functions: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        functions[line["function"]].append(line)
    ranked = sorted(functions.items(), key=lambda item: -sum(map(_seconds, item[1])))
    processes = {line["process"] for line in lines}
    total = sum(map(_seconds, lines))
    of = f" by {len(processes)} processes" if len(processes) > 1 else ""
    filled = {
        "TITLE": f"{count_text(len(lines), 'program')} compiled in {total:.2f} s",
        "SUMMARY": f"{count_text(len(functions), 'function')}{of}; the most expensive first",
        "CAUSES": "".join(_cause_rows(lines)),
        "FUNCTIONS": "".join(_function(name, own, total, len(processes) > 1) for name, own in ranked),
    }
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda found: filled[found[1]], template)


def _seconds(line: Line) -> float:
    return sum(line["seconds"].values())


def _cause_rows(lines: list[Line]) -> Iterable[str]:
    """Each kind of cause, with the seconds of the programs that have it; one with several counts for each."""
    kinds: dict[str, tuple[int, float]] = {}
    for line in lines:
        for kind in {cause["kind"] for cause in line["causes"]}:
            number, seconds = kinds.get(kind, (0, 0.0))
            kinds[kind] = number + 1, seconds + _seconds(line)
    for kind, (number, seconds) in sorted(kinds.items(), key=lambda item: -item[1][1]):
        name = "first call" if kind == "first" else kind
        yield f"<tr><td>{html.escape(name)}<td class=n>{number}<td class=n>{seconds:.2f}</tr>"


def _function(name: str, lines: list[Line], total: float, several: bool) -> str:
    seconds = sum(map(_seconds, lines))
    width = 100 * seconds / total if total else 0
    head = (
        f"<summary><code>{html.escape(name)}</code><span class=n>{seconds:.2f} s</span>"
        f"<span class=n>{count_text(len(lines), 'program')}</span>"
        f'<span class=bar style="width:{width:.1f}%"></span></summary>'
    )
    variants = "".join(_variant(line, several) for line in sorted(lines, key=lambda line: line["when"]))
    return f"<details{' open' if len(lines) > 1 else ''}>{head}<div class=in>{variants}</div></details>"


def _escaped(value: Any) -> str:
    """A number, as a log of graftax has it; a log may come from anywhere."""
    return html.escape(str(value))


def _variant(line: Line, several: bool) -> str:
    parts = ", ".join(f"{html.escape(part)} {seconds:.2f}" for part, seconds in line["seconds"].items())
    process = f", process {_escaped(line['process'])}" if several else ""
    unlike = f", unlike #{_escaped(line['nearest'])}" if line["nearest"] else ""
    where = html.escape(f"{line['file']}:{line['line']}")
    out = [
        f"<div class=v><b>#{_escaped(line['number'])}</b> {_seconds(line):.2f} s "
        f"<span class=dim>({parts}){unlike}{process}</span>"
        f"<br><code class=dim>{where}</code>"
    ]
    for cause in line["causes"]:
        out.append(f"<div class=c><span class=k>{html.escape(cause['kind'])}</span> {html.escape(cause['text'])}</div>")
    for remedy in dict.fromkeys(cause["remedy"] for cause in line["causes"] if cause["remedy"]):
        out.append(f"<div class=r>→ {html.escape(remedy)}</div>")
    return "".join([*out, "</div>"])
