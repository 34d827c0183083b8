# SPDX-License-Identifier: Apache-2.0
"""docs/values.md shows the kinds and the laws of tests/values as they are now, and its tool tells right from wrong."""

import json
import re
import subprocess
import sys

import pytest
from tools import values_table
from values.kinds import GROUPS, KINDS, LAWS, REFUSED

RUN_ON = re.compile(r"^Run on: .*$", re.MULTILINE)
TEXT = values_table.PAGE.read_text(encoding="utf-8")
ALL_GOOD = {f"{kind.group}: {kind.name}": dict.fromkeys(LAWS, True) for kind in KINDS}


def without_results(text):
    return RUN_ON.sub("Run on: here.", re.sub(r"\| [✓✗]( [✓✗])* (?=\|)", "| ✓ ", text))


def test_the_page_lists_the_kinds_and_laws_of_the_tests():
    pytest.importorskip("flarejax")  # its kinds have rows too
    now = values_table.page([{"name": "here", "cells": ALL_GOOD}])
    assert without_results(TEXT) == without_results(now), "write docs/values.md anew: see CONTRIBUTING.md"


def test_the_page_names_where_its_results_come_from():
    (line,) = RUN_ON.findall(TEXT)
    assert len(re.findall(r"Python 3\.\d+, JAX 0\.\d+", line)) >= 2, "the oldest JAX and the newest"


def test_the_page_has_a_row_for_every_kind_and_a_line_for_what_is_refused():
    pytest.importorskip("flarejax")  # its kinds have rows too
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| kind |")]
    assert len(rows) == len(KINDS)
    assert all(line.count("|") == len(LAWS) + 3 for line in rows)
    assert [line[3:] for line in TEXT.splitlines() if line.startswith("## ")] == [*GROUPS, "Refused"]
    assert all(f"- [{name}](errors/{values_table.page_of(name)})" in TEXT.splitlines() for name, _ in REFUSED)


def test_a_cell_shows_where_two_environments_differ():
    kind = next(kind for kind in KINDS if not kind.without)
    good, bad = ({"cells": {f"{kind.group}: {kind.name}": {"key": result}}} for result in (True, False))
    assert values_table.cell(kind, "key", [good, good]) == "✓"
    assert values_table.cell(kind, "key", [bad]) == "✗"
    assert values_table.cell(kind, "key", [bad, good]) == "✗ ✓"


def test_a_kind_without_a_result_is_an_error():
    with pytest.raises(SystemExit, match="no result"):
        values_table.cell(KINDS[0], "key", [{"cells": {}}])


@pytest.mark.quick(0)  # a run of pytest for one cell of a page
def test_a_run_records_every_law_of_a_kind(tmp_path):
    out = tmp_path / "results.json"
    command = [sys.executable, str(values_table.__file__), "run", "--out", str(out), "-k", "kw_only"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    assert json.loads(out.read_text())["cells"] == {"Dataclasses: `kw_only=True`": dict.fromkeys(LAWS, True)}


def test_a_failed_test_is_recorded_as_wrong():
    class Report:
        nodeid, when, failed, passed = "x", "call", True, False

    recorder = values_table.Recorder(LAWS)
    recorder.place["x"] = ("a kind", "key")
    recorder.pytest_runtest_logreport(Report())
    assert recorder.cells == {"a kind": {"key": False}}
