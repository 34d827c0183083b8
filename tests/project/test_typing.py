# SPDX-License-Identifier: Apache-2.0
"""What a type checker knows: the files of `typing` hold its expected answers, and pyright and mypy read them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import graftax

FILES = sorted((Path(__file__).parent / "typing").glob("*.py"))
EXPECTED = re.compile(r"# (?:not mypy, )?expect: (.+)$")


def errors_of(path, tmp_path):
    """(line, message) of every error that pyright finds in strict mode."""
    settings = {
        "include": [path.name],
        "typeCheckingMode": "strict",
        "reportMissingModuleSource": False,
        "reportMissingTypeStubs": False,
    }
    for rule in ("UnknownLambdaType", "UnknownVariableType", "UnknownMemberType", "UnknownArgumentType"):
        settings[f"report{rule}"] = False  # JAX's own annotations are unknown in part
    (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == 1, found
    return [
        (d["range"]["start"]["line"] + 1, d["message"]) for d in found["generalDiagnostics"] if d["severity"] == "error"
    ]


def test_there_are_files_to_read():
    assert FILES


@pytest.mark.quick(0)
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_pyright_knows_what_the_file_says(path, tmp_path):
    expected = {
        number: found[1]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := EXPECTED.search(line))
    }
    errors = errors_of(path, tmp_path)
    assert not [(line, text) for line, text in errors if line not in expected]
    for line, text in expected.items():
        assert [found for at, found in errors if at == line and text in found], f"{path}:{line}: no error with {text!r}"


@pytest.mark.quick(0)  # eight seconds a file; pyright reads the same files
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_mypy_knows_it_too(path, tmp_path):
    """It says errors in words of its own; and what it does not follow is marked `not mypy`."""
    pytest.importorskip("mypy")
    options = [
        "--cache-dir",
        str(tmp_path),
        "--follow-imports=silent",
        "--ignore-missing-imports",
        "--no-error-summary",
    ]
    home = Path(graftax.__file__).parents[1]
    # Of what is installed mypy knows, and refuses to be told.
    environment = os.environ | ({} if home.name == "site-packages" else {"MYPYPATH": str(home)})
    command = [sys.executable, "-m", "mypy", *options, path.name]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, cwd=path.parent, env=environment
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = {int(m[1]) for m in re.finditer(rf"^{path.name}:(\d+): error", done.stdout, re.MULTILINE)}
    lines = dict(enumerate(path.read_text().splitlines(), 1))
    expected = {number for number, line in lines.items() if EXPECTED.search(line)}
    known = {number for number, line in lines.items() if "# not mypy" not in line}
    assert found & known == expected & known, done.stdout
