# SPDX-License-Identifier: Apache-2.0
"""The main job: three kinds of models learn to read digits through `graftax.jit`, in place or returned."""

import io
import math
import re
import sys
from collections import Counter

import jax.numpy as jnp
import pytest
from rich.console import Console

from graftax.__main__ import main
from graftax._cli.demo import compare, digits, equinox_model, experiment, nnx_model, plain_model, report, training


@pytest.mark.quick(0)  # for one epoch: below
@pytest.mark.parametrize("model", [equinox_model, nnx_model, plain_model], ids=lambda m: m.__name__.rpartition(".")[2])
def test_a_model_learns_to_read_digits(model):
    *_, last = training.run(model.Trainer(), 3, digits.load())
    assert last.test_accuracy > 0.85


# Who fails, and the first words of why.
FAILS = {
    "equinox": {"jax.jit": "TypeError", "nnx.jit": "TypeError", "flarejax.filter_jit": "ValueError"},
    "nnx": {"flarejax.filter_jit": "ValueError"},
    "plain": {"jax.jit": "TypeError", "equinox.filter_jit": "wrong", "nnx.jit": "TypeError", "wrapper": "wrong"},
}


@pytest.mark.quick(0)  # the demo itself: no part of it has a test of its own
@pytest.mark.parametrize("model", sorted(FAILS))
def test_the_demo_trains_a_model_and_compares_every_way_to_compile_its_step(model, monkeypatch):
    data = digits.load()
    few = digits.Digits(data.train_x[:320], data.train_y[:320], data.test_x[:8], data.test_y[:8])
    monkeypatch.setattr(digits, "load", lambda: few)
    monkeypatch.setattr(report, "QUICK_EPOCHS", 1)
    console = Console(record=True, file=io.StringIO(), width=120)
    assert report.show_all(quick=True, models=[model], console=console) == 0
    text = console.export_text()
    assert "epoch  1   loss" in text and report.MODELS[model].TITLE in text
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    found = {name: (flattens, loss) for name, _, _, flattens, loss in rows if name}
    assert found.keys() >= {"graftax.jit", compare.BASELINE, *FAILS[model]}
    failed = {name: re.match(r"\w+", loss)[0] for name, (_, loss) in found.items() if not loss[0].isdigit()}
    assert failed == FAILS[model]
    flattens, loss = found["graftax.jit"]
    assert flattens == "0 + 0" and math.isclose(float(loss), float(found[compare.BASELINE][1]), rel_tol=1e-3)


def test_a_library_that_the_demo_lacks_is_named(monkeypatch, capsys):
    for name in ("report", "digits"):
        monkeypatch.delitem(sys.modules, f"graftax._cli.demo.{name}")
        monkeypatch.delattr(f"graftax._cli.demo.{name}")
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo", "--quick"]) == 1
    assert "needs sklearn" in capsys.readouterr().out and "graftax._cli.demo.report" not in sys.modules
    monkeypatch.setitem(sys.modules, "graftax._cli.demo.report", None)  # no library
    with pytest.raises(ModuleNotFoundError, match="report"):
        main(["demo"])


@pytest.mark.parametrize("static", [False, True])
def test_graftax_calls_flatten_and_unflatten_no_more_than_jax_does(static):
    calls, raw = experiment.steady_calls(static=static), experiment.steady_calls()["jax.jit"]
    for name in ("graftax.jit", "graftax.filter_jit"):
        assert len(calls[name]) == len(raw) == 2
        assert Counter(calls[name]) == Counter(raw)


def test_the_command_line_prints_the_experiment(capsys):
    assert main(["demo", "--trace"]) == 0
    assert "Output.tree_unflatten" in capsys.readouterr().out


def test_contenders_are_timed_where_they_are_right_and_named_where_they_are_not():
    def adds(what):
        def start():
            state = {"sum": 0.0}

            def step(x, y):
                state["sum"] += float((x + y).sum()) + what
                return jnp.asarray(state["sum"])

            return step

        return start

    def fails():
        raise TypeError("takes its own modules only\nand says more")

    batches = [(jnp.ones(2), jnp.ones(2)), (jnp.ones(2), jnp.zeros(2))]
    contenders = [
        compare.Contender(compare.BASELINE, adds(0)),
        compare.Contender("graftax.jit", adds(0)),
        compare.Contender("stale", adds(1)),
        compare.Contender("refused", fails),
        compare.Contender("known", fails, "no pytree"),
    ]
    results = compare.compare(contenders, batches, rounds=2)
    base, ours, stale, refused, known = results
    assert (base.loss, ours.loss, base.failure, ours.failure) == (6, 6, "", "")
    assert base.seconds > 0 and ours.seconds > 0 and (ours.flattens, ours.unflattens) == (0, 0)
    assert stale.failure == "wrong, 8.00000: expected 6.00000" and math.isnan(stale.seconds)
    assert refused.failure == "TypeError: takes its own modules only" and known.failure == "TypeError: no pytree"
    console = Console(record=True, width=120)
    console.print(compare.table("A model", results))
    text = console.export_text()
    assert "A model" in text and "1.00x" in text and "no pytree" in text and text.count("6.00000") == 3


@pytest.mark.quick(0)
def test_flatten_functions_of_the_models_are_counted():
    (x, y), *_ = digits.load().batches(8, seed=0)
    contender = next(c for c in equinox_model.contenders() if c.name == "equinox.filter_jit")
    step = contender.start()
    step(x, y)
    with compare.TreeCalls() as calls:
        step(x, y)
    assert calls.flattens > 0 and calls.unflattens > 0


def test_doctor_names_versions(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "jaxlib" in out
    assert "graftax" in out
