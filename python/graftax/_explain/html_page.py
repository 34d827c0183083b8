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
    by_processes = f" by {len(processes)} processes" if len(processes) > 1 else ""
    filled = {
        "TITLE": f"{count_text(len(lines), 'program')} compiled in {total:.2f} s",
        "SUMMARY": f"{count_text(len(functions), 'function')}{by_processes}; the most expensive first",
        "CAUSES": "".join(_cause_rows(lines)),
        "FUNCTIONS": "".join(_function(name, own_lines, total, len(processes) > 1) for name, own_lines in ranked),
    }
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: filled[match[1]], template)


def _seconds(line: Line) -> float:
    return sum(line["seconds"].values())


def _cause_rows(lines: list[Line]) -> Iterable[str]:
    """Each kind of cause, with the seconds of the programs that have it; one with several counts for each."""
    kinds: dict[str, tuple[int, float]] = {}
    for line in lines:
        # A set: the seconds of a program with two causes of a kind count once.
        for kind in {cause["kind"] for cause in line["causes"]}:
            number, seconds = kinds.get(kind, (0, 0.0))
            kinds[kind] = number + 1, seconds + _seconds(line)
    for kind, (number, seconds) in sorted(kinds.items(), key=lambda item: -item[1][1]):
        name = "first call" if kind == "first" else kind
        yield f"<tr><td>{html.escape(name)}<td class=n>{number}<td class=n>{seconds:.2f}</tr>"


def _function(name: str, lines: list[Line], total: float, has_processes: bool) -> str:
    seconds = sum(map(_seconds, lines))
    width = 100 * seconds / total if total else 0
    head = (
        f"<summary><code>{html.escape(name)}</code><span class=n>{seconds:.2f} s</span>"
        f"<span class=n>{count_text(len(lines), 'program')}</span>"
        f'<span class=bar style="width:{width:.1f}%"></span></summary>'
    )
    variants = "".join(_variant(line, has_processes) for line in sorted(lines, key=lambda line: line["when"]))
    return f"<details{' open' if len(lines) > 1 else ''}>{head}<div class=in>{variants}</div></details>"


def _escaped(value: object) -> str:
    # Also of a number, which is one in the logs of graftax: a log may come from anywhere.
    return html.escape(str(value))


def _variant(line: Line, has_processes: bool) -> str:
    stages = ", ".join(f"{html.escape(stage)} {seconds:.2f}" for stage, seconds in line["seconds"].items())
    process = f", process {_escaped(line['process'])}" if has_processes else ""
    unlike = f", unlike #{_escaped(line['nearest'])}" if line["nearest"] else ""
    place = html.escape(f"{line['file']}:{line['line']}")
    elements = [
        f"<div class=v><b>#{_escaped(line['number'])}</b> {_seconds(line):.2f} s "
        f"<span class=dim>({stages}){unlike}{process}</span>"
        f"<br><code class=dim>{place}</code>"
    ]
    for cause in line["causes"]:
        kind, text = html.escape(cause["kind"]), html.escape(cause["text"])
        elements.append(f"<div class=c><span class=k>{kind}</span> {text}</div>")
    # Several causes of one kind have the same remedy.
    for remedy in dict.fromkeys(cause["remedy"] for cause in line["causes"] if cause["remedy"]):
        elements.append(f"<div class=r>→ {html.escape(remedy)}</div>")
    return "".join([*elements, "</div>"])
