# SPDX-License-Identifier: Apache-2.0
"""`python -m graftax replay`: recorded calls in another process, bit for bit, and what is said where that cannot be."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import graftax
from graftax.__main__ import main
from graftax._record import replay
from graftax._record.replay import RecordedCalls

SCRIPT = Path(__file__).parents[1] / "support" / "recorded_script.py"
CASES = {
    "method": "not finite: result, global __main__.SEEN['sum']",
    "train": "not finite: result[1]['loss'], result[1]['shared'][0].w",
    "counter": "not finite: result, closure total",
    "refuse": "raises ValueError: no more than 3",
    "drawn": "not finite: result",
    "failing": "raises JaxRuntimeError: RuntimeError: the host says no",
    "donating": "not finite: result[0]",
    "by_value": "not finite: result[1]",
}
EQUAL = "equal to what was recorded, bit for bit"


def run(*command: object, folder: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, *map(str, command)], env=env, capture_output=True, text=True, cwd=folder)


@pytest.mark.quick(0)
@pytest.mark.parametrize("case", CASES)
def test_calls_of_a_script_are_equal_in_another_process(case: str, tmp_path: Path):
    """The script has tied layers, cycles, closures, globals that helpers change, lambdas and random numbers."""
    made = run(SCRIPT, tmp_path, case, folder=tmp_path)
    files = list(tmp_path.glob("*.record"))
    assert len(files) == 1, made.stderr
    assert f"python -m graftax replay {files[0]}" in made.stderr
    again = run("-m", "graftax", "replay", files[0], folder=SCRIPT.parent)
    calls = [line for line in again.stdout.splitlines() if line.startswith("call ")]
    assert again.returncode == 0 and calls, again.stdout + again.stderr
    assert all(EQUAL in line for line in calls) and CASES[case] in calls[-1]


# ---- a script without a main function


UNGUARDED = """
import sys
import jax.numpy as jnp
import graftax

@graftax.record(dir=sys.argv[1])
def step(state, x):
    state["n"] += 1
    return jnp.log(state["w"] - x)

state = {"w": jnp.ones(3), "n": 0}
print("up to the call")
for i in range(3):
    step(state, jnp.float32(i))
print("after the call")
"""


@pytest.mark.quick(0)
def test_a_script_runs_again_up_to_its_call(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(UNGUARDED)
    assert run(script, tmp_path / "records", folder=tmp_path).returncode == 0
    (file,) = (tmp_path / "records").glob("*.record")
    again = run("-m", "graftax", "replay", file, "--where", folder=tmp_path)
    assert "up to the call" in again.stdout and "after the call" not in again.stdout
    assert "log of 0 is inf at train.py:9" in again.stdout, again.stdout + again.stderr
    # The function has changed since: what is said is the first line that differs.
    script.write_text(UNGUARDED.replace("jnp.log(", "jnp.exp("))
    changed = run("-m", "graftax", "replay", file, folder=tmp_path)
    assert changed.returncode == 1
    assert "step has changed since the call was recorded: line 9 was 'return jnp.log(" in changed.stdout
    assert "result: recorded float32[3]" in changed.stdout
    script.write_text(UNGUARDED.replace("def step(", "def other("))
    gone = run("-m", "graftax", "replay", file, folder=tmp_path)
    assert gone.returncode == 2 and "step cannot be run again" in gone.stderr and "Traceback" not in gone.stderr
    script.unlink()
    assert "which defines step, is not there" in run("-m", "graftax", "replay", file, folder=tmp_path).stderr


# ---- files that cannot be run


def norm(x: Any) -> Any:
    return x / jnp.sqrt((x * x).sum())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    recorder = graftax.record(norm, dir=tmp_path, nonfinite=False)
    recorder(jnp.arange(3.0))
    recorder(jnp.zeros(3))
    recorder.save(tmp_path / "norm.record")
    return tmp_path / "norm.record"


def replayed(capsys: pytest.CaptureFixture[str], file: Path, *options: str) -> tuple[int, str]:
    status = main(["replay", str(file), *options])
    return status, "".join(capsys.readouterr())


def test_what_a_replay_prints(capsys: pytest.CaptureFixture[str], file: Path):
    lines = replayed(capsys, file)[1].splitlines()
    assert lines[0] == "norm: saved by hand; 2 recorded calls"
    assert lines[-2:] == [f"call 1 of 2: {EQUAL}", f"call 2 of 2: {EQUAL}; not finite: result"]
    status, text = replayed(capsys, file, "--plain")
    assert "call 2 of 2" in text and "not finite: result" in text
    assert ("differs" in text) == ("each operation rounds on its own" in text) == bool(status)
    assert "div of 0 and 0 is nan at test_replay.py" in replayed(capsys, file, "--where")[1]


@pytest.mark.quick(0)
def test_calls_are_equal_after_jax_has_forgotten_its_programs(file: Path):
    recorded = RecordedCalls(file)
    first = [recorded.run(i) for i in range(2)]
    jax.clear_caches()
    again = [recorded.run(i) for i in range(2)]
    assert [outcome.differences for outcome in (*first, *again)] == [[]] * 4
    assert again[1].nonfinite == first[1].nonfinite == ["result"]


def test_byte_code_of_another_python_is_no_change(file: Path, monkeypatch: pytest.MonkeyPatch):
    assert RecordedCalls(file).notes == []
    monkeypatch.setattr(replay, "code_digest", lambda _: "of other byte code")
    assert RecordedCalls(file).notes == ["norm has changed since the call was recorded"]
    monkeypatch.setattr(replay, "PYTHON", "3.1")  # this process is another one than that of the file
    assert RecordedCalls(file).notes == []
    monkeypatch.setattr(replay, "source_of", lambda _: "def norm(x: Any) -> Any:\n    return x\n")
    (note,) = RecordedCalls(file).notes
    assert re.search(r"line \d+ was 'return x / jnp.sqrt\(\(x \* x\).sum\(\)\)', is 'return x'", note)


def test_where_shows_the_line_of_an_exception(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    recorder = graftax.record(refusing, on=(), dir=tmp_path)
    with pytest.raises(KeyError):
        recorder(jnp.ones(2))
    recorder.save(tmp_path / "file")
    text = replayed(capsys, tmp_path / "file", "--where")[1]
    assert "KeyError: 'no such layer'" in text and "in refusing" in text


def refusing(x: Any) -> Any:
    raise KeyError("no such layer")


def test_a_damaged_file_is_refused(capsys: pytest.CaptureFixture[str], file: Path):
    content = file.read_bytes()
    for at in (len(content) - 5, content.index(b"structures") + 40, 20):
        damaged = bytearray(content)
        damaged[at] ^= 0x10
        file.write_bytes(damaged)
        status, text = replayed(capsys, file)
        assert status == 2 and text.startswith("graftax replay: ") and str(file) in text
    file.write_bytes(content[:-7])
    assert replayed(capsys, file)[0] == 2
    assert replayed(capsys, file.with_name("nothing"))[0] == 2


def test_another_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    graftax.save(tmp_path / "model", {"w": jnp.ones(2)})
    status, text = replayed(capsys, tmp_path / "model")
    assert status == 2 and "has no recorded calls" in text


def rewritten(file: Path, **changes: Any) -> None:
    """The file with another header."""
    metadata = graftax.peek(file).metadata
    header = json.loads(metadata["recorded"]) | changes
    graftax.save(file, graftax.load(file), metadata={"recorded": json.dumps(header)})


def test_other_versions_and_settings_are_named(capsys: pytest.CaptureFixture[str], file: Path):
    header = json.loads(graftax.peek(file).metadata["recorded"])
    rewritten(file, versions=header["versions"] | {"jax": "0.0.1"}, devices="8 x H100 (gpu)")
    status, text = replayed(capsys, file)
    assert status == 0 and "note: jax was 0.0.1, is " in text and "8 x H100 (gpu)" in text
    rewritten(file, format=99, versions=header["versions"] | {"graftax": "9.9"})
    status, text = replayed(capsys, file)
    assert status == 2 and "written by a later version of graftax (9.9)" in text


def test_results_that_differ_are_named(capsys: pytest.CaptureFixture[str], file: Path):
    header = json.loads(graftax.peek(file).metadata["recorded"])
    header["calls"][0]["results"]["leaves"]["result"] = "float32[3] 0000000000000000"
    rewritten(file, calls=header["calls"])
    status, text = replayed(capsys, file)
    assert status == 1
    assert re.search(r"call 1 of 2: differs.*\n  result: recorded float32\[3\] 0{16}, now float32\[3\] \w{16}\n", text)


def test_what_has_no_name_is_named_when_a_file_is_written(tmp_path: Path):
    class Local:
        def __init__(self) -> None:
            self.w = jnp.ones(2)

    recorder = graftax.record(lambda model: model[0].w.sum(), dir=tmp_path)
    recorder([Local()])
    with pytest.raises(graftax.UnpicklableError, match=r"model\[0\].*Local"):
        recorder.save(tmp_path / "local.record")
    scope: dict[str, Any] = {"jnp": jnp, "__name__": "nowhere"}
    exec("def made(x): return jnp.log(x)", scope)
    made = graftax.record(scope["made"], dir=tmp_path)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        made(-jnp.ones(2))
        made.flush()
    assert "could not be written" in str(found[-1].message) and "notebook" in str(found[-1].message)
