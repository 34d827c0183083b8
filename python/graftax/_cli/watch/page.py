# SPDX-License-Identifier: Apache-2.0
"""The findings as a self-contained HTML page."""

from __future__ import annotations

import html
import importlib.resources
import re
from collections import Counter
from typing import Any

from graftax._base.size_text import count_text
from graftax._cli.watch.record import Record, records_by_cost


def page(records: dict[Any, Record], program: str) -> str:
    template = importlib.resources.files("graftax._cli.watch").joinpath("page.html").read_text(encoding="utf-8")
    called = records_by_cost(records)
    findings = sum(len(record.findings()) for record in called)
    filled = {
        "TITLE": f"What graftax would change in {html.escape(program)}",
        "SUMMARY": f"{count_text(len(called), 'function')}, {count_text(findings, 'finding')}. Nothing was replaced: "
        "each function ran with the jit that it was written for. Measured is what this run took; what graftax would "
        "take instead was not run, but for the time in which it walks the arguments.",
        "FUNCTIONS": "".join(map(_function, called)) or "<p>No function was called.",
    }
    # In one pass: what is filled in may have braces of its own.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: filled[match[1]], template)


def _function(record: Record) -> str:
    compilations = f"{len(record.compilations)} compiled, {record.seconds:.2f} s"
    head = (
        f"<summary><span><code>{html.escape(record.name)}</code> <span class=dim>{html.escape(record.jit)}, "
        f"{html.escape(record.location)}</span></span><span class=n>{count_text(record.calls, 'call')}</span>"
        f"<span class=n>{record.median_microseconds:.1f} µs a call</span><span class=n>{compilations}</span></summary>"
    )
    findings = record.findings()
    rows = [_row(f"the median of the calls, up to their return: {record.median_microseconds:.1f} µs", *_walk(record))]
    rows += [_row(*finding) for finding in findings]
    causes = Counter(compilation.cause for compilation in record.compilations)
    compiled = "".join(f"<tr><td>{count}<td>{html.escape(cause)}</tr>" for cause, count in causes.most_common())
    return (
        f"<details{' open' if findings else ''}>{head}<div class=in>"
        f"<table><tr><th>this run<th>graftax<th>how it is known</tr>{''.join(rows)}</table>"
        f"<table><tr><th>programs<th>cause</tr>{compiled}</table></div></details>"
    )


def _walk(record: Record) -> tuple[str, str]:
    if not record.walk_nanoseconds:
        return "not known: too few calls, or arguments that it does not take", "not measured"
    text = f"{record.walk_nanoseconds / 1e3:.1f} µs to walk the arguments, and the launch"
    return text, "the walk is measured, the launch is not"


def _row(observation: str, change: str, evidence: str) -> str:
    return f"<tr><td>{html.escape(observation)}<td>{html.escape(change)}<td class=dim>{html.escape(evidence)}</tr>"
