# SPDX-License-Identifier: Apache-2.0
"""Finds the smallest part of a recorded call that fails, and writes it as a script."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Generator
from typing import NamedTuple

import jax

from graftax._base.errors import GraftaxError, ImpureCallWarning
from graftax._jax.equations import count_equations
from graftax._record.failures import Failure, Nonfinite
from graftax._record.nonfinite import TracedCall, find_origins, trace_call
from graftax._record.plain_script import Unwritable, script_of
from graftax._record.program_parts import Part, part_of
from graftax._record.reduction import equation_at, reduced
from graftax._record.replay import RecordedCalls
from graftax._record.snapshot import error_text

RAISES = (
    "the last call in {path} raises while it is traced, so there is no program to make smaller: {error}. "
    "`python -m graftax replay {path}` shows where."
)
RAISES_LATER = "an equation of the last call in {path} raises when it runs, in code of yours that it calls: {error}"
NOTHING_FAILS = "the last call in {path} does not fail here: {nothing}"
NOT_FINITE_ALREADY = "the last call in {path} is given values that are not finite: {origin}"
NOT_ALONE = "no part of the last call in {path} fails alone, out of finite inputs"


class SmallestPart(NamedTuple):
    """The smallest part that fails.

    Attributes:
        name: of the recorded function.
        texts: scripts of the part, the most readable first.
        unwritable: why there is none.
        operations: JAX's names of those in the part.
        equations: how many the program has.
        cause: a line of what goes wrong.
        sign: what a script writes to the error stream when it fails as the part does.
    """

    name: str
    texts: list[str]
    unwritable: str
    operations: list[str]
    equations: int
    cause: str
    sign: str


def search(path: str, failure: Failure) -> SmallestPart:
    """Looks for a failure in the last call of a file.

    Raises:
        GraftaxError: if the call does not fail so, or has no program.
    """
    with contextlib.closing(RecordedCalls(path)) as recorded, _traced(recorded) as call:
        find = _nonfinite_part if isinstance(failure, Nonfinite) else _failing_part
        part, cause = find(call, failure, path)
        name = recorded.header["name"]
        title = f"A part of {name} that fails. {cause}\n\nBy graftax.minimize, JAX {jax.__version__}.\n"
        texts, unwritable = _scripts(part, title, failure)
        count = count_equations(call.traced.jaxpr)
    return SmallestPart(name, texts, unwritable, part.operations, count, cause, failure.sign)


@contextlib.contextmanager
def _traced(recorded: RecordedCalls) -> Generator[TracedCall]:
    """The program of the last call, while the names that its code reads have what was recorded."""
    prepared = recorded.prepare(len(recorded) - 1)
    with warnings.catch_warnings(), contextlib.closing(prepared):
        # What the call uses of the world outside was told when it was recorded.
        warnings.simplefilter("ignore", ImpureCallWarning)
        try:
            call = trace_call(prepared.jitted, tuple(prepared.args), prepared.kwargs)
        except Exception as error:
            raise GraftaxError(RAISES.format(path=recorded.path, error=error_text(error))) from error
        yield call


@contextlib.contextmanager
def _errors_of_callbacks(path: str) -> Generator[None]:
    try:
        yield
    except Exception as error:
        raise GraftaxError(RAISES_LATER.format(path=path, error=error_text(error))) from error


def _failing_part(call: TracedCall, failure: Failure, path: str) -> tuple[Part, str]:
    """(the smallest part, a line of what goes wrong)."""
    with _errors_of_callbacks(path):
        whole = part_of(call.traced.jaxpr, call.leaves, failure.run_equation)
        does_fail = failure.fails(whole)
    if not does_fail:
        raise GraftaxError(NOTHING_FAILS.format(path=path, nothing=failure.nothing))
    part = reduced(whole, failure)
    return part, failure.cause(part)


def _nonfinite_part(call: TracedCall, failure: Failure, path: str) -> tuple[Part, str]:
    """The same, for a failure that `graftax.nonfinite` finds sooner: as a rule it is one equation."""
    with _errors_of_callbacks(path):
        interpreter, report = find_origins(call)
    cause = report.cause
    if cause is not None and cause.kind == "argument":
        raise GraftaxError(NOT_FINITE_ALREADY.format(path=path, origin=cause))
    place = interpreter.place_of(cause) if cause is not None else ()
    part = equation_at(call.traced.jaxpr, call.leaves, place) if place else None
    if part is None or not failure.shows(part):
        # Only the compiled program fails: what XLA makes of several equations.
        part = part_of(call.traced.jaxpr, call.leaves)
        if not failure.shows(part):
            message = NOT_ALONE if report else NOTHING_FAILS
            raise GraftaxError(message.format(path=path, nothing=failure.nothing))
    return reduced(part, failure), str(cause or "")


def _scripts(part: Part, title: str, failure: Failure) -> tuple[list[str], str]:
    """(the scripts that can be written, why others cannot)."""
    texts, unwritable = list[str](), ""
    # The first one is readable. The second, a program of `jax.export`, has also what has no public name.
    for exported in (False, True):
        try:
            check = failure.check(part)
            write = functools.partial(script_of, part, title, failure.preamble, check, exported)
            texts.append(failure.write(write))
        except Unwritable as error:
            unwritable = str(error)
    return texts, unwritable
