# SPDX-License-Identifier: Apache-2.0
"""What counts as a failure of a part of a program, and how a script shows it."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy  # under this name: the source of `differ` is written into scripts

from graftax._jax.arrays import without_key
from graftax._jax.compilation import own_jit
from graftax._jax.equations import run_equation
from graftax._record.origin_marks import are_finite
from graftax._record.plain_script import array_text
from graftax._record.program_parts import Part, RunEquation, run_one_by_one

Predicate = Callable[[Callable[..., list[Any]], list[Any]], object]

NOT_FINITE = "a result is not finite, and all inputs are"
DIFFERENT = "a result is not what its operations return one by one"


class Failure(abc.ABC):
    """What is looked for.

    Attributes:
        nothing: says that a call does not fail.
        in_any_branch: may it lie in a branch that does not run?
        run_equation: gives the values of an equation's outputs.
        preamble: what the script does before it runs the program.
        sign: what the failing script writes. Empty where its process ends without an exception.
    """

    nothing: str
    sign = ""
    preamble = ""
    in_any_branch = False
    run_equation: RunEquation = staticmethod(run_equation)

    def shows(self, part: Part) -> bool:
        """Does the part fail? One that cannot run by itself, or not with arrays of these shapes, does not."""
        try:
            return self.fails(part)
        except Exception:
            return False

    @abc.abstractmethod
    def fails(self, part: Part) -> bool:
        """Does the part fail? Whatever running it raises is raised."""

    def cause(self, part: Part) -> str:
        """What goes wrong, in a line."""
        return ""

    def check(self, part: Part) -> str:
        """The end of the script, which has `results`: it fails as the part does."""
        return ""

    def write(self, script: Callable[[], str]) -> str:
        """The text of a script, from what makes it."""
        return script()

    # A loop has the same equations in each iteration, so they are compiled once.
    _compiled: tuple[Any, Callable[..., list[Any]]] | None = None

    def compiled(self, part: Part) -> Callable[..., list[Any]]:
        key = [(id(step.equation), step.operands, step.outputs) for step in part.steps]
        if self._compiled is None or self._compiled[0] != key:
            self._compiled = key, own_jit(part.function())
        return self._compiled[1]


class Nonfinite(Failure):
    nothing = "all its results are finite"
    sign = NOT_FINITE

    def fails(self, part: Part) -> bool:
        arguments = part.arguments()
        return all(map(are_finite, arguments)) and not all(map(are_finite, self.compiled(part)(*arguments)))

    def check(self, part: Part) -> str:
        return f'for result in results:\n    assert jax.numpy.isfinite(result).all(), "{NOT_FINITE}"\n'


# Uses nothing but its arguments, jax and numpy: `Wrong.check` writes its source into a script.
def differ(result: Any, right: Any, tolerance: float) -> bool:
    """Is an element of the result further off than this, relative to the largest element?"""
    if jax.numpy.issubdtype(result.dtype, jax.dtypes.prng_key):
        result, right = jax.random.key_data(result), jax.random.key_data(right)
    a, b = numpy.asarray(result), numpy.asarray(right)
    if tolerance == 0:
        return not numpy.array_equal(a, b)
    wide = numpy.complex128 if a.dtype.kind == "c" else numpy.float64
    a, b = a.astype(wide), b.astype(wide)
    largest = numpy.abs(b[numpy.isfinite(b)]).max(initial=0)
    with numpy.errstate(all="ignore"):
        equal = (a == b) | (numpy.isnan(a) & numpy.isnan(b)) | (numpy.abs(a - b) <= tolerance * largest)
    return not equal.all()


class Wrong(Failure):
    """The compiled part returns something else than its equations one by one.

    Args:
        tolerance: of a floating result, relative to its largest element. By default the square root of its precision.
    """

    nothing = "compiled and one operation after the other, it returns the same"
    sign = DIFFERENT
    run_equation = staticmethod(run_one_by_one)

    def __init__(self, tolerance: float | None = None) -> None:
        self._chosen_tolerance = tolerance

    def fails(self, part: Part) -> bool:
        return any(differ(*pair, self.tolerance(pair[1])) for pair in self._results(part))

    def _results(self, part: Part) -> list[tuple[Any, Any]]:
        right = part.function(run_one_by_one)(*part.arguments())
        return list(zip(self.compiled(part)(*part.arguments()), right, strict=True))

    def tolerance(self, x: Any) -> float:
        if not jax.numpy.issubdtype(x.dtype, jax.numpy.inexact):
            return 0
        return float(jax.numpy.finfo(x.dtype).eps) ** 0.5 if self._chosen_tolerance is None else self._chosen_tolerance

    def cause(self, part: Part) -> str:
        for result, right in self._results(part):
            if differ(result, right, self.tolerance(right)):
                a, b = numpy.asarray(without_key(result)), numpy.asarray(without_key(right))
                index = numpy.unravel_index(numpy.argmax(_distance(a, b)), a.shape)
                place = f" at {[int(i) for i in index]}" if index else ""
                return f"Compiled, it returns {a[index]}{place}; one operation after the other, {b[index]}."
        return ""

    def check(self, part: Part) -> str:
        right = part.function(run_one_by_one)(*part.arguments())
        expected = "".join(f"    ({array_text(x)}, {self.tolerance(x)}),\n" for x in right)
        return (
            (
                f"# What the operations return one by one, and the tolerance.\nexpected = [\n{expected}]\n\n\n"
                f"{inspect.getsource(differ)}\n\n"
                "for result, (right, tolerance) in zip(results, expected):\n"
                f'    assert not differ(result, right, tolerance), f"{DIFFERENT}: {{right}}"\n'
            )
            # The script imports no `Any`.
            .replace(": Any", "")
            .replace(": float", "")
        )


def _distance(a: Any, b: Any) -> Any:
    """How far the elements are apart; those of which one alone is finite are the furthest."""
    if a.dtype.kind == "b":
        return a != b
    wide = numpy.complex128 if a.dtype.kind == "c" else numpy.float64
    a, b = a.astype(wide), b.astype(wide)
    with numpy.errstate(all="ignore"):
        distances = numpy.where((a == b) | (numpy.isnan(a) & numpy.isnan(b)), 0, numpy.abs(a - b))
    return numpy.where(numpy.isnan(distances), numpy.inf, distances)


class Custom(Failure):
    """A test of the user's."""

    nothing = "`fails` is false of it"

    def __init__(self, predicate: Predicate) -> None:
        self._predicate = predicate

    def fails(self, part: Part) -> bool:
        return bool(self._predicate(part.function(), part.arguments()))

    def is_shown_in(self, script: str) -> bool:
        """Is it true of the script's program?"""
        with open(script, encoding="utf-8") as file:
            definitions = file.read().partition("\nresults = ")[0]
        scope: dict[str, Any] = {"__name__": "script"}
        exec(compile(definitions, script, "exec"), scope)
        program = scope["program"]
        return bool(self._predicate(getattr(program, "__wrapped__", program), list(scope["arguments"])))
