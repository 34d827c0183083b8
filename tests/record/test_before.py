# SPDX-License-Identifier: Apache-2.0
"""`graftax.record(before=True)`: the file of a call that has killed its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from graftax._record.replay import RecordedCalls

SCRIPT = """
import os, sys
import jax, jax.numpy as jnp, numpy as np
import graftax

LIMIT = float(sys.argv[2])

def look(x):
    if x[0] > LIMIT:
        os.abort()
    return x

@graftax.record(dir=sys.argv[1], before=True)
@graftax.jit(donate="all", warn_impure=False)
def step(state, x):
    state["w"] = state["w"] + jax.pure_callback(look, jax.ShapeDtypeStruct((2,), jnp.float32), x)
    state["steps"] += 1
    return state["w"].sum()

state = {"w": jnp.zeros(2), "steps": 0}
for i in range(6):
    jax.block_until_ready(step(state, jnp.full(2, float(i))))
print("done")
"""


def run(folder: Path, limit: float) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return subprocess.run([sys.executable, script, folder, str(limit)], capture_output=True, text=True, timeout=300)


@pytest.mark.quick(0)
def test_a_call_that_kills_the_process_is_in_the_file(tmp_path: Path) -> None:
    ended = run(tmp_path, 3.0)
    assert ended.returncode != 0 and "done" not in ended.stdout
    (file,) = tmp_path.glob("*.record")
    assert file.name.startswith("step-running-")
    calls = RecordedCalls(file)
    assert len(calls.header["calls"]) == 1
    prepared = calls.prepare(0)
    state, x = prepared.args
    np.testing.assert_array_equal(x, [4.0, 4.0])
    np.testing.assert_array_equal(state["w"], [6.0, 6.0])
    assert int(state["steps"]) == 4


@pytest.mark.quick(0)
def test_a_process_that_ends_leaves_no_file(tmp_path: Path) -> None:
    ended = run(tmp_path, 100.0)
    assert ended.stdout.split() == ["done"], ended.stderr
    assert list(tmp_path.glob("*.record*")) == []


def test_a_call_that_cannot_be_written_is_made_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    f = graftax.record(lambda x: x + 1, dir=tmp_path / "file" / "folder", before=True)
    with pytest.warns(graftax.RecordedCallWarning, match="a call is about to begin. The call could not be written"):
        assert f(jnp.ones(2)).tolist() == [2.0, 2.0]
