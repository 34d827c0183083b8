# SPDX-License-Identifier: Apache-2.0
"""What a type checker knows: the files of tests/typing hold its expected answers, and pyright reads them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parent / "typing").glob("*.py"))
EXPECTED = re.compile(r"# expect: (.+)$")


def errors_of(path, tmp_path):
    """(line, message) of every error that pyright finds in strict mode."""
    settings = {"include": [path.name], "typeCheckingMode": "strict", "reportMissingModuleSource": False}
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


@pytest.mark.quick(1)
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
