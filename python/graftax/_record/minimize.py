# SPDX-License-Identifier: Apache-2.0
"""`graftax.minimize`: the smallest part of a recorded call that still fails, as a script of plain JAX."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax

from graftax._base.errors import GraftaxError, ImpureCallWarning
from graftax._jax.tracebacks import boundary
from graftax._record.nonfinite import TracedOrigins, trace_origins
from graftax._record.plain_script import FAILS, Unwritable, script_of
from graftax._record.reduction import Flattening, Part, equation_at, with_fewer_equations, with_smaller_arrays
from graftax._record.replay import RecordedCalls
from graftax._record.snapshot import error_text

RAISES = (
    "the last call in {path} raises while it is traced, so there is no program to make smaller: {error}. "
    "`python -m graftax replay {path}` shows where."
)
RAISES_LATER = "an equation of the last call in {path} raises when it runs, in code of yours that it calls: {error}"
ALL_FINITE = "the last call in {path} does not fail here: all its results are finite"
NOT_FINITE_ALREADY = "the last call in {path} is given what is not finite: {origin}"
NOT_ALONE = "no part of the last call in {path} fails alone, out of finite inputs"
NOT_PROVEN = "the script {path} did not fail as expected when it ran:\n{output}"


class Minimized:
    """What `graftax.minimize` returns.

    Attributes:
        path: of the script.
        text: of it.
        operations: JAX's names of the operations that are left.
        equations: how many there were.
        cause: what `graftax.nonfinite` says of them; empty if it finds nothing.
    """

    def __init__(self, path: str, text: str, operations: list[str], equations: int, cause: str) -> None:
        self.path, self.text, self.operations, self.equations, self.cause = path, text, operations, equations, cause

    def __repr__(self) -> str:
        return f"<graftax.minimize: {', '.join(self.operations)} of {self.equations} equations, in {self.path}>"


@boundary
def minimize(path: str | os.PathLike[str], script: str | os.PathLike[str] | None = None) -> Minimized:
    """Finds the smallest part of a recorded call that makes a nan or an infinity out of finite values.

    The part is written as a script of plain JAX, with its inputs, and the script is run once in a process of its own
    to prove that it fails. Give it to those who maintain the operation, or step through it.

    Args:
        path: a file of `graftax.record`. Its last call is used.
        script: the path of the script. By default that of the file, with `.py`.

    Returns:
        a `Minimized`, with the `path`, the `text` and the `operations` of the script.

    Raises:
        GraftaxError: if the call does not fail, fails in Python code, or is given what is not finite.

    Example:
        >>> f = graftax.record(lambda x: jnp.log(x * 2 - 3).sum(), nonfinite=False)
        >>> y = f(jnp.arange(4.0))
        >>> f.save(folder / "call.record")
        >>> graftax.minimize(folder / "call.record").operations
        ['log']
    """
    path = os.fspath(path)
    with contextlib.closing(RecordedCalls(path)) as recorded:
        traced, name = _traced(recorded), recorded.header["name"]
        part, count = _failing_part(traced, path)
        part = with_smaller_arrays(part)
        cause = str(traced.report.cause or "")
        title = f"A part of {name} that fails. {cause}\n\nBy graftax.minimize, JAX {jax.__version__}.\n"
        script = os.fspath(script) if script is not None else str(Path(path).with_suffix(".py"))
        text = _proven(part, title, script, name)
    operations = [step.equation.primitive.name for step in part.steps]
    return Minimized(script, text, operations, count, cause)


def _traced(recorded: RecordedCalls) -> TracedOrigins:
    """The program of the last call, run equation by equation."""
    prepared = recorded.prepare(len(recorded) - 1)
    with warnings.catch_warnings(), contextlib.closing(prepared):
        warnings.simplefilter("ignore", ImpureCallWarning)
        try:
            prepared.jitted.trace(*prepared.args, **prepared.kwargs)
        except Exception as error:
            raise GraftaxError(RAISES.format(path=recorded.path, error=error_text(error))) from error
        try:
            return trace_origins(prepared.jitted, tuple(prepared.args), prepared.kwargs)
        except Exception as error:
            raise GraftaxError(RAISES_LATER.format(path=recorded.path, error=error_text(error))) from error


def _failing_part(traced: TracedOrigins, path: str) -> tuple[Part, int]:
    """(a part that fails, how many equations the program has)."""
    flattening = Flattening()
    inputs = [flattening.add(leaf) for leaf in traced.leaves]
    flattening.run(traced.jaxpr.jaxpr, traced.jaxpr.consts, inputs)
    whole, cause = Part(tuple(flattening.steps), flattening.values), traced.report.cause
    if cause is not None and cause.kind == "argument":
        raise GraftaxError(NOT_FINITE_ALREADY.format(path=path, origin=cause))
    place = traced.interpreter.place_of(cause) if cause is not None else ()
    part = equation_at(traced.jaxpr, traced.leaves, place) if place else None
    if part is not None and part.fails():
        return part, len(whole.steps)
    # Only the compiled program fails: what XLA makes of several equations.
    if not whole.fails():
        raise GraftaxError((NOT_ALONE if traced.report else ALL_FINITE).format(path=path))
    return with_fewer_equations(whole), len(whole.steps)


def _proven(part: Part, title: str, script: str, name: str) -> str:
    """Writes the script, readable if possible, and runs it; returns its text."""
    output = ""
    for exported in (False, True):
        try:
            text = script_of(part, title, exported)
        except Unwritable as error:
            if exported:
                message = f"what fails in {name} cannot be written as a script of plain JAX: {error}"
                raise GraftaxError(message) from error
            continue
        Path(script).write_text(text, encoding="utf-8")
        run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
        if run.returncode and FAILS in run.stderr:
            return text
        output = run.stdout + run.stderr
    raise GraftaxError(NOT_PROVEN.format(path=script, output=output))
