# SPDX-License-Identifier: Apache-2.0
"""`graftax.minimize`: the smallest part of a recorded call that still fails, as a script of plain JAX."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

from graftax._base.errors import GraftaxError
from graftax._jax.tracebacks import boundary
from graftax._record.crash_search import search_in_processes
from graftax._record.failures import Custom, Failure, Nonfinite, Predicate, Wrong
from graftax._record.search import SmallestPart, search

FAILURES = ("nonfinite", "wrong", "crash", "hang")
UNKNOWN = "fails={fails!r}: expected one of {names}, or a function of the program and its arguments"
NOT_WRITTEN = "what fails in {name}, {operations}, cannot be written as a script of plain JAX: {error}. {cause}"
NOT_PROVEN = "the script {path} did not fail as expected when it ran:\n{output}"
NO_TOLERANCE = "tolerance={tolerance}: only fails='wrong' compares results with a tolerance"
FALSE = "`fails` is false of its program"


class Minimized:
    """What `graftax.minimize` returns.

    Attributes:
        path: of the script.
        text: the script itself.
        operations: JAX's names of the operations that are left.
        equations: how many equations the call had.
        cause: what `graftax.nonfinite` says of them; empty if it finds nothing.
    """

    def __init__(self, path: str, text: str, operations: list[str], equations: int, cause: str) -> None:
        self.path, self.text, self.operations, self.equations, self.cause = path, text, operations, equations, cause

    def __repr__(self) -> str:
        return f"<graftax.minimize: {', '.join(self.operations)} of {self.equations} equations, in {self.path}>"


@boundary
def minimize(
    path: str | os.PathLike[str],
    script: str | os.PathLike[str] | None = None,
    *,
    fails: Literal["nonfinite", "wrong", "crash", "hang"] | Predicate = "nonfinite",
    tolerance: float | None = None,
    timeout: float = 60,
) -> Minimized:
    """Finds the smallest part of a recorded call that still fails.

    The part is written as a script of plain JAX, with its inputs, and the script is run once in a process of its own
    to prove that it fails. Give it to those who maintain the operation, or step through it.

    Args:
        path: a file of `graftax.record`. Its last call is used.
        script: the path of the script. By default that of the file, with `.py`.
        fails: what is looked for.
            `"nonfinite"`: a nan or an infinity out of finite values.
            `"wrong"`: the compiled program returns something else than its operations one after the other.
            `"crash"`: compiling or running ends the process, or raises an error, such as one of XLA. It is tried in
            other processes, and one that ends is replaced.
            `"hang"`: it takes longer than `timeout`, also in other processes.
            Or your own test, called with a function of arrays, not yet compiled, and a list of its arguments:
            `lambda program, arguments: jax.jit(program)(*arguments)[0].min() < 0`. It may get any part of the
            program; an exception counts as False.
        tolerance: for `"wrong"`, how far a floating result may be off, relative to its largest element. By default the
            square root of its type's precision: 0.0003 for float32, 0.09 for bfloat16.
        timeout: for `"crash"` and `"hang"`, the seconds that each part may take to compile and run.

    Returns:
        a `Minimized`, with the `path`, the `text` and the `operations` of the script.

    Raises:
        GraftaxError: if the call does not fail in this way, fails in Python code, or is given values that are not
            finite.
        ValueError: for a `tolerance` with another kind of failure than `"wrong"`.

    Example:
        >>> f = graftax.record(lambda x: jnp.log(x * 2 - 3).sum(), nonfinite=False)
        >>> y = f(jnp.arange(4.0))
        >>> f.save(folder / "call.record")
        >>> graftax.minimize(folder / "call.record").operations
        ['log']
    """
    if tolerance is not None and fails != "wrong":
        raise ValueError(NO_TOLERANCE.format(tolerance=tolerance))
    path = os.fspath(path)
    script = os.fspath(script) if script is not None else str(Path(path).with_suffix(".py"))
    if not callable(fails) and fails in ("crash", "hang"):
        smallest, custom = search_in_processes(path, fails, timeout), None
    else:
        failure = _failure(fails, tolerance)
        smallest, custom = search(path, failure), failure if isinstance(failure, Custom) else None
    text = _proven(smallest, script, custom)
    return Minimized(script, text, smallest.operations, smallest.equations, smallest.cause)


def _failure(fails: object, tolerance: float | None) -> Failure:
    if callable(fails):
        return Custom(fails)
    if fails not in FAILURES:
        raise ValueError(UNKNOWN.format(fails=fails, names=", ".join(map(repr, FAILURES))))
    return Wrong(tolerance) if fails == "wrong" else Nonfinite()


def _proven(smallest: SmallestPart, script: str, custom: Custom | None) -> str:
    """Writes the script, readable if possible, and runs it; returns its text."""
    if not smallest.texts:
        operations, error = ", ".join(smallest.operations), smallest.unwritable
        message = NOT_WRITTEN.format(name=smallest.name, operations=operations, error=error, cause=smallest.cause)
        raise GraftaxError(message)
    output = ""
    # The most readable one that fails stays in the file.
    for text in smallest.texts:
        Path(script).write_text(text, encoding="utf-8")
        run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
        # A script may also fail for another reason than the part: its sign has to be in what it writes. Without a sign
        # the part ends the process and raises nothing, so there must be no traceback.
        has_sign = (
            smallest.sign in run.stderr if smallest.sign else "Traceback (most recent call last)" not in run.stderr
        )
        if (bool(run.returncode) and has_sign) if custom is None else custom.is_shown_in(script):
            return text
        output = run.stdout + run.stderr + (FALSE if custom is not None else "")
    raise GraftaxError(NOT_PROVEN.format(path=script, output=output))
