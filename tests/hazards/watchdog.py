# SPDX-License-Identifier: Apache-2.0
"""Run a test that may crash or hang in a process of its own, killed after a limit."""

from __future__ import annotations

import functools
import inspect
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

TESTS = pathlib.Path(__file__).resolve().parent.parent
CHILD = """
import faulthandler, importlib.util, resource, sys
faulthandler.enable()
resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))  # an error here rather than a machine that swaps
path, name, params = sys.argv[1:4]
spec = importlib.util.spec_from_file_location("child", path)
module = importlib.util.module_from_spec(spec)
sys.modules["child"] = module
spec.loader.exec_module(module)
getattr(module, name).__wrapped__(**eval(params))
print("survived", flush=True)
"""


def python(code: str, *argv: str, seconds: float = 120, **environment: str) -> str:
    """The standard output of a fresh interpreter that runs ``code``; fails on a crash, an error or a hang."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [sys.executable, "-X", "faulthandler", "-c", code, *argv]
    settings = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **environment}
    done = subprocess.run(
        command, env=settings, cwd=TESTS, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def isolated(seconds: float = 120) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test: its body runs in a child process."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        path = inspect.getsourcefile(test)
        assert path is not None

        @functools.wraps(test)
        def run(**params: Any) -> None:
            out = python(CHILD, path, test.__name__, repr(params), seconds=seconds)
            assert out.endswith("survived\n"), out

        return run

    return decorate
