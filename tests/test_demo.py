# SPDX-License-Identifier: Apache-2.0
"""The main job: three kinds of models learn to read digits through `graftax.jit`, in place or returned."""

import pytest

from graftax.__main__ import main
from graftax._demo import equinox_model, experiment, nnx_model, plain_model, training


@pytest.mark.quick(1)
@pytest.mark.parametrize("model", [equinox_model, nnx_model, plain_model], ids=lambda m: m.__name__.rpartition(".")[2])
def test_a_model_learns_to_read_digits(model):
    assert training.train(model.Trainer(), epochs=3) > 0.85


@pytest.mark.parametrize("static", [False, True])
def test_graftax_calls_flatten_and_unflatten_no_more_than_jax_does(static):
    calls = experiment.count_calls(static=static)
    raw = experiment.count_calls(static=False)["jax.jit"]
    for name in ("graftax.jit", "graftax.filter_jit"):
        assert sum(calls[name].values()) == sum(raw.values()) == 2
        assert calls[name] == raw


def test_the_command_line_prints_the_experiment(capsys):
    assert main(["demo", "--trace"]) == 0
    assert "Output.tree_unflatten" in capsys.readouterr().out


def test_doctor_names_versions(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "jaxlib" in out
    assert "graftax" in out
