# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run from the command to their files, and their verdicts can fail. No time is asserted."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from benchmarks import budgets, callgrind, growth, subjects, table, trees
from benchmarks import timed as timing
from benchmarks.cases import case, cases
from benchmarks.inputs import DICT, Case
from benchmarks.measures import MEASURES

from graftax import __main__ as command

ROOT = Path(__file__).parents[2]
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
PAIR = ["--subject", "jax_flat", "--subject", "graftax_jit"]


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.quick(0)
def test_a_table_of_one_case_gives_numbers_that_were_checked(tmp_path, capsys):
    out = tmp_path / "new" / "out.json"
    args = ["bench", "--rounds", "2", "--case", "^list 10$", "--measure", "reduce", "--measure", "allocated", *PAIR]
    assert command.main([*args, "--json", str(out)]) == 0
    found = json.loads(out.read_text())["table"]
    assert [(row["subject"], row["unit"], row["equal"]) for row in found["rows"]] == [
        ("jax_flat", "s", True),
        ("graftax_jit", "s", True),
        ("jax_flat", "B", True),
        ("graftax_jit", "B", True),
    ]
    assert found["rows"][0]["ratio"] == 1.0 and found["versions"]["jax"]
    assert "list 10" in capsys.readouterr().out


@pytest.mark.quick(0)  # two seconds; no result depends on it
def test_parts_share_one_file(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    out.write_text('{"table": 1}')
    monkeypatch.setattr(growth, "SIZES", (1, 10))
    assert command.main(["bench", "--growth", "--rounds", "2", *PAIR, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["table"] == 1
    assert {(r["measure"], r["leaves"]) for r in found["growth"]["rows"]} == {
        (m.name, n) for m in growth.SERIES for n in (1, 10)
    }
    assert all(row["equal"] for row in found["growth"]["rows"])


@pytest.mark.quick(0)  # two seconds; no result depends on it
def test_a_step_of_decoding_is_measured_beside_jax_and_nnx(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    monkeypatch.setattr(growth, "VARIABLES", 10)
    assert command.main(["bench", "--decode", "--rounds", "2", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["decode"]["rows"]
    assert {row["subject"] for row in rows} == set(growth.SUBJECTS) and all(row["equal"] for row in rows)


@pytest.mark.quick(0)  # half a minute; nothing else in the suite depends on it
def test_trees_are_measured_beside_jax_and_give_the_same(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    monkeypatch.setattr(trees, "SIZES", (10,))
    assert command.main(["bench", "--trees", "--rounds", "1", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["trees"]["rows"]
    assert {(r["case"], r["measure"]) for r in rows} == {(f"{f}, 10", m) for f in trees.FORMS for m in trees.OPERATIONS}
    assert {"jax_tree", "graftax_tree"} <= {r["subject"] for r in rows} and all(r["equal"] for r in rows)


@pytest.mark.quick(0)  # some seconds; no result depends on it
@pytest.mark.filterwarnings("ignore")  # of Orbax
def test_files_are_measured_beside_safetensors_and_orbax(tmp_path):
    pytest.importorskip("safetensors")
    pytest.importorskip("orbax.checkpoint")
    out = tmp_path / "out.json"
    assert command.main(["bench", "--files", "--rounds", "1", "--megabytes", "64", "--json", str(out)]) in (0, 1)
    found = json.loads(out.read_text())["files"]
    assert len(found["budgets"]) == 4 and all(seconds > 0 for seconds in found["seconds"].values())


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_plot_is_drawn_or_says_what_it_needs(tmp_path, capsys, ending):
    out = tmp_path / f"out.{ending}"
    args = ["bench", "--rounds", "2", "--case", "^list 1$", "--measure", "reduce", *PAIR, "--plot", str(out)]
    status = command.main(args)
    if HAS_MATPLOTLIB:
        assert status == 0 and out.read_bytes()[:5] in (b"<?xml", b"\x89PNG\r")
    else:
        assert status == 2 and "pip install 'graftax[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--plot", "out.pdf"], ["--budgets", "--plot", "a.svg"], ["--budgets", "--case", "x"]]
)
def test_options_that_mean_nothing_are_refused(words):
    with pytest.raises(SystemExit):
        command.main(["bench", *words])


def test_a_run_that_measures_nothing_is_a_failure():
    assert command.main(["bench", "--case", "no such case"]) == 2


def timed(limit, **kwargs):
    return budgets.Timed("one array", limit, "update", "one array", "jax_tree", **kwargs)


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    ("budget", "status"),
    [
        (timed(1e9), 0),
        (timed(1e-9), 1),
        (timed(1e9, subject="no_such_subject"), 1),
        (budgets.Timed("no such case", 1e9, "update", "none", "jax_tree"), 1),
    ],
    ids=["kept", "missed", "absent", "raises"],
)
def test_the_exit_status_of_budgets_says_whether_all_are_held(monkeypatch, tmp_path, budget, status):
    out = tmp_path / "out.json"
    monkeypatch.setattr(budgets, "BUDGETS", (budget, timed(1e9)))
    assert command.main(["bench", "--budgets", "--rounds", "2", "--json", str(out)]) == status
    assert [v["held"] for v in json.loads(out.read_text())["budgets"]["budgets"]] == [status == 0, True]


def test_a_narrow_ratio_is_measured_again_and_the_later_figure_counts(monkeypatch):
    figures = iter([1.04, 0.90])
    asked: list[int] = []

    def compare(measure, case, pair, rounds, on_round):
        asked.append(rounds)
        ratio = next(figures)
        common = {"case": case.name, "measure": measure.name, "equal": True, "fastest": 1.0, "quartiles": (1.0, 1.0)}
        return [table.Row(subject=s, seconds=1.0, ratio=r, **common) for s, r in zip(pair, (1.0, ratio), strict=True)]

    monkeypatch.setattr(timing, "compare", compare)
    present, _ = subjects.load(("jax_tree", "graftax_jit"))
    verdict = timed(1.0).run(present, 10, lambda: None)
    assert asked == [10, 20] and verdict.measured == 0.90 and verdict.held
    assert verdict.detail.startswith("measured again with 20 rounds, after 1.040 with 10:")


def test_a_clear_miss_is_not_measured_again():
    present, _ = subjects.load(("jax_tree", "graftax_jit"))
    verdict = timed(1e-9).run(present, 2, lambda: None)
    assert not verdict.held and "measured again" not in verdict.detail


@pytest.mark.quick(0)
def test_a_wrong_result_is_not_equal():
    class Wrong:
        def __getattr__(self, name):
            return getattr(subjects.load(("jax_tree",))[0]["jax_tree"], name)

        @staticmethod
        def jit(f):
            return lambda obj: f(obj) * 2

    rows = table.compare(MEASURES["reduce"], Case("dict 10", DICT, 10), {"wrong": Wrong()}, 2)
    assert [row.equal for row in rows] == [False]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", [c.name for c in cases() if c.size <= 500])
def test_the_arrays_of_a_case_come_out_as_they_went_in(name):
    chosen = case(name)
    if chosen.missing():
        return  # its library is not installed; the table leaves such a case out too
    arrays = chosen.arrays()
    assert len(arrays) == chosen.size
    obj = chosen.form.build(arrays)
    assert [id(x) for x in chosen.form.arrays(obj)] == [id(x) for x in arrays]
    if chosen.form.assign is not None:
        changed = [x + 1 for x in arrays]
        chosen.form.assign(obj, changed)
        assert [id(x) for x in chosen.form.arrays(obj)] == [id(x) for x in changed]


def test_counts_above_the_baseline_and_other_versions_are_named():
    stored = {"versions": {"jax": "0"}, "counts": {"a": {"per call": 100}, "b": {"per call": 100}}}
    other, worse = callgrind.compare({"a": 104, "b": 106, "c": 1}, stored, 0.05)
    assert any(line.startswith("jax: 0 then") for line in other)
    assert worse == ["b: +6.0%", "c has no stored count"]


def test_the_pages_show_the_stored_results():
    spec = importlib.util.spec_from_file_location("performance_tables", ROOT / "tools" / "performance_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert tables.main([]) == 0
    used = [m[2] for page in tables.PAGES for m in tables.BLOCK.finditer(page.read_text())]
    assert sorted(used) == sorted(tables.RENDER)
    assert re.search(r"^\| .* \| \d+\.\d\d \|", tables.PAGES[0].read_text(), re.MULTILINE)
