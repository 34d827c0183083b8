# SPDX-License-Identifier: Apache-2.0
"""`python -m graftax doctor`: what is installed and in force, whether it works, and what to report."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest

from graftax.__main__ import main
from graftax._cli import doctor


def run_doctor(**variables):
    environment = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-m", "graftax", "doctor"], capture_output=True, text=True, env=environment)


@pytest.mark.quick(0)
def test_all_is_well_where_it_is():
    run = run_doctor()
    assert run.returncode == 0, run.stdout + run.stderr
    for text in ("jaxlib", "extension", "devices", "direct calls", "Self-test", "To report a bug"):
        assert text in run.stdout
    assert "FAILED" not in run.stdout
    assert "WRONG" not in run.stdout


@pytest.mark.quick(0)
def test_settings_that_slow_calls_down_are_named_and_the_self_test_still_passes():
    run = run_doctor(JAX_DISABLE_JIT="1", JAX_DEBUG_NANS="1", GRAFTAX_DIRECT_DISPATCH="0", GRAFTAX_TRACEBACK="full")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "note: jax_disable_jit=True: nothing is compiled" in run.stdout
    assert "note: direct calls are off: GRAFTAX_DIRECT_DISPATCH=0" in run.stdout
    assert "all frames; JAX: quiet_remove_frames" in run.stdout
    assert "GRAFTAX_TRACEBACK=full" in run.stdout


def test_a_self_test_that_fails_is_named_and_is_the_exit_status(monkeypatch, capsys):
    def broken():
        raise ValueError("it broke")

    monkeypatch.setitem(doctor.SELF_TEST, "gradients of an object", broken)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAILED  gradients of an object" in out
    assert "ValueError: it broke" in out


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"jax": "0.12.1", "jaxlib": "0.10.0"}, "jaxlib 0.10.0 is older than jax 0.12.1"),
        ({"jax": "0.7.2", "jaxlib": "0.7.2"}, "jax 0.7.2 is older than 0.8"),
        ({"numpy": "1.25.0"}, "numpy 1.25.0 is older than 1.26"),
    ],
)
def test_versions_that_do_not_go_together_are_wrong(monkeypatch, versions, said):
    known = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name) or known(name))
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: ["jax>=0.8", "numpy>=1.26", "rich; x"])
    wrong = [finding.text for finding in doctor._findings() if finding.wrong]
    assert any(said in text for text in wrong), wrong


def test_a_tracer_that_looks_on_is_named(capsys):
    sys.settrace(lambda *args: None)
    try:
        assert "sys.settrace (function)" in doctor._observers()
    finally:
        sys.settrace(None)


def test_every_setting_that_it_knows_is_one_of_jaxs():
    assert all(hasattr(jax.config, name) for name in doctor._SETTINGS)
