# SPDX-License-Identifier: Apache-2.0
"""Run a test that may crash or hang in a process of its own, killed after a limit."""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib.util
import inspect
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

SUPPORT = pathlib.Path(__file__).resolve().parent
# A child has its seconds on a processor, and so many times as long in all: others may be running.
WAITING = 4


def _environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **more}


def python(code: str, *argv: str, seconds: float = 120, **environment: str) -> str:
    """The standard output of a fresh interpreter that runs ``code``; fails on a crash, an error or a hang."""
    command = [sys.executable, "-X", "faulthandler", "-c", code, *argv]
    settings = _environment(**environment)
    done = subprocess.run(
        command, env=settings, cwd=SUPPORT, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def serve() -> None:
    """What the children of `isolated` are copies of: the imports are done, and no thread runs yet."""
    import beside  # noqa: F401
    import oracle  # noqa: F401

    gc.freeze()  # no child need look at it

    for request in sys.stdin:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX's warning of forks is about its threads
            child = os.fork()
        if not child:
            return _run(*json.loads(request))  # and the interpreter shuts down as any does
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(seconds: float, path: str, name: str, params: str, *streams: str) -> None:
    for i, file in enumerate((os.devnull, *streams)):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), i)
    faulthandler.enable()
    import resource

    if "san.so" not in os.environ.get("LD_PRELOAD", ""):  # a sanitizer maps far more than it uses
        resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))  # an error here rather than a machine that swaps
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
    spec = importlib.util.spec_from_file_location("child", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["child"] = module
    spec.loader.exec_module(module)
    getattr(module, name).__wrapped__(**eval(params))
    print("survived", flush=True)


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    code = "import watchdog; watchdog.serve()"
    pipe = subprocess.PIPE
    # One thread of NumPy's, so that there is one thread in all: others would be missing in a copy.
    settings = _environment(OPENBLAS_NUM_THREADS="1")
    return subprocess.Popen([sys.executable, "-c", code], env=settings, cwd=SUPPORT, stdin=pipe, stdout=pipe, bufsize=0)


def _no_verdict(child: int) -> bool:
    """Did the search for leaks at a child's end crash itself? It stops all threads and reads them from outside."""
    report = pathlib.Path(f"{os.environ.get('GRAFTAX_REPORTS', '')}.{child}")
    return report.exists() and "LeakSanitizer has encountered a fatal error" in report.read_text(errors="replace")


def _copy(path: str, name: str, params: str, seconds: float, times: int = 3) -> str:
    """What a test prints that a child runs; fails on a crash, an error or a hang."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, errors = pathlib.Path(folder, "out"), pathlib.Path(folder, "errors")
        server.stdin.write(json.dumps([seconds, path, name, params, str(out), str(errors)]).encode() + b"\n")
        child = int(server.stdout.readline())
        hangs = not select.select([server.stdout], [], [], WAITING * seconds)[0]
        if hangs:
            os.kill(child, signal.SIGKILL)
        status = int(server.stdout.readline())
        said, why = (file.read_text(errors="replace") for file in (out, errors))
    if status == -signal.SIGABRT and times > 1 and _no_verdict(child):
        return _copy(path, name, params, seconds, times - 1)
    assert not hangs, f"killed after {WAITING * seconds} s\n{said}\n{why}"
    assert status == 0, f"exit status {status}\n{said}\n{why}"
    return said


def isolated(seconds: float = 120) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test: its body runs in a child process."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        path = inspect.getsourcefile(test)
        assert path is not None

        @functools.wraps(test)
        def run(**params: Any) -> None:
            out = _copy(path, test.__name__, repr(params), seconds)
            assert out.endswith("survived\n"), out

        return run

    return decorate
