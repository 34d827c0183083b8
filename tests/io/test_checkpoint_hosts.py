# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that several processes write, and another number of processes reads; what the system ends early."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("orbax.checkpoint")

from processes import run

PROGRAM = Path(__file__).with_name("checkpoint_hosts.py")
pytestmark = pytest.mark.quick(1)


def save(folder, count, shape, devices=1):
    assert run(PROGRAM, count, folder, "save", shape, devices=devices) == [{"save": [True, True]}] * count


def restore(folder, count, shape, devices=1, positions=()):
    restored = [one["restore"] for one in run(PROGRAM, count, folder, "restore", shape, devices=devices)]
    assert restored == [[[6, 5], [], True, position] for position in positions]


@pytest.mark.quick(0)
def test_two_processes_save_and_one_restores(tmp_path):
    save(tmp_path / "run", 2, "2")
    restore(tmp_path / "run", 1, "1", positions=[60])


@pytest.mark.quick(0)  # the one above runs instead
def test_four_processes_save_and_others_restore_on_other_meshes(tmp_path):
    save(tmp_path / "run", 4, "4")
    restore(tmp_path / "run", 4, "2x2", positions=[60, 61, 62, 63])
    restore(tmp_path / "run", 2, "2", positions=[60, 61])
    restore(tmp_path / "run", 2, "2x4", devices=4, positions=[60, 61])
    restore(tmp_path / "run", 1, "1", positions=[60])
    restore(tmp_path / "run", 1, "4x2", devices=8, positions=[60])


@pytest.mark.quick(0)
def test_one_process_saves_and_two_restore(tmp_path):
    save(tmp_path / "run", 1, "2x2", devices=4)
    restore(tmp_path / "run", 2, "2", positions=[60, 0])  # nothing was saved for the second


@pytest.mark.quick(0)
def test_all_hosts_save_one_step_when_one_of_them_is_to_end(tmp_path):
    assert run(PROGRAM, 2, tmp_path / "run", "preempted") == [{"preempted": [True, True]}] * 2


ALONE = """
import os, signal, sys
import graftax

folder, looks = sys.argv[1], sys.argv[2] == "looks"
state = {"n": 0}
with graftax.Checkpoints(folder, every=1000) as checkpoints:
    found = checkpoints.restore(state)
    for step in range(0 if found is None else found + 1, 30):
        state["n"] = step
        if step % 10 == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        checkpoints.save(step, state)
        if looks and checkpoints.preempted:
            break
print(found, state["n"], checkpoints.steps)
"""


def alone(folder, looks):
    command = [sys.executable, "-W", "ignore", "-c", ALONE, str(folder), looks]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    return process.returncode, process.stdout.strip()


@pytest.mark.quick(0)
@pytest.mark.skipif(os.name == "nt", reason="no such signal")
def test_a_step_is_saved_where_the_system_ends_the_program(tmp_path):
    assert alone(tmp_path / "run", "does not look") == (-signal.SIGTERM, "")  # it ends after that step
    assert alone(tmp_path / "run", "looks") == (0, "7 17 [0, 7, 17]")
