# SPDX-License-Identifier: Apache-2.0
"""`explain`: which programs a function was compiled to and why, or what a call would do."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any, ParamSpec, overload

from .. import _core
from ._cause import Cause
from ._log import because, headline, record
from ._variant import Variant

if TYPE_CHECKING:
    from .._jitted import Jitted

P = ParamSpec("P")

NO_FUNCTION = "graftax.{name} takes a function that graftax.jit made, and {function!r} is none"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What was compiled of a function. Prints as text; `to_json()` is the same as data."""

    name: str
    variants: tuple[Variant, ...]
    calls: int
    count: int  # of all programs, those that were dropped long ago included
    seconds: float  # of all compilations

    def to_json(self) -> str:
        """The same as JSON: an object with `function`, `calls`, `programs`, `seconds`, and `variants`, a list."""
        variants = [record(variant) | {"live": variant.is_live} for variant in self.variants]
        counts = {"calls": self.calls, "programs": self.count, "seconds": round(self.seconds, 6)}
        return json.dumps({"function": self.name, **counts, "variants": variants})

    def __str__(self) -> str:
        if not self.count:
            return f"{self.name}: nothing was compiled"
        lines = [
            f"{self.name}: {self.count} program{'s' * (self.count > 1)} in {self.seconds:.2f} s, {self.calls} calls"
        ]
        if self.count > len(self.variants):
            lines.append(f"({self.count - len(self.variants)} that were dropped are not shown)")
        for variant in self.variants:
            gone = f", dropped: {variant.dropped}" if variant.dropped else ""
            clock = time.strftime("%H:%M:%S", time.localtime(variant.when))
            lines.append(f"#{variant.number}  {clock}  {headline(variant)}{gone}")
            lines += because(variant.nearest, variant.causes, "    ")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


@dataclasses.dataclass(frozen=True)
class CallExplanation:
    """What a call would do: `hit` says whether a program is there, `causes` how it differs from the nearest one."""

    name: str
    hit: bool
    number: int  # of the program, or of the one that is most like it
    causes: tuple[Cause, ...]

    def to_json(self) -> str:
        """The same as JSON."""
        causes = [cause._asdict() | {"text": str(cause), "remedy": cause.remedy} for cause in self.causes]
        return json.dumps({"function": self.name, "hit": self.hit, "nearest": self.number or None, "causes": causes})

    def __str__(self) -> str:
        if self.hit:
            return f"{self.name}: a hit, program #{self.number} runs"
        return "\n".join([f"{self.name}: a miss, this call compiles", *because(self.number, self.causes, "  ")])

    def __repr__(self) -> str:
        return str(self)


@overload
def explain(function: Jitted[..., Any], /) -> Explanation: ...
@overload
def explain(function: Jitted[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> CallExplanation: ...
def explain(function: Any, /, *args: Any, **kwargs: Any) -> Explanation | CallExplanation:
    """Says why a function was compiled: each program with every difference to the most similar one.

    Args:
        function: what `graftax.jit` or `filter_jit` returned.
        *args, **kwargs: of a call. With them nothing runs: the result says whether this call would compile, and why.

    Returns:
        An explanation. It prints as text, and `to_json()` gives it as data; of a function it has `variants`, of a call
        `hit` and `causes`.

    >>> import graftax, jax.numpy as jnp
    >>> f = graftax.jit(lambda x, mode: x * 2)
    >>> for mode in ("train", "test"):
    ...     y = f(jnp.ones(3), mode)
    >>> print(graftax.explain(f).variants[1].causes[0])
    mode was 'train', is 'test'
    >>> graftax.explain(f, jnp.ones(3), "test").hit
    True
    >>> print(graftax.explain(f, jnp.ones(4), "test").causes[0])
    x was shape (3,), is shape (4,)
    """
    caller = function
    if not hasattr(caller, "_plan"):
        raise TypeError(NO_FUNCTION.format(name="explain", function=function))
    table = caller._table
    if not args and not kwargs:
        history = table.history
        return Explanation(caller._plan.name, tuple(history.variants), table.calls, history.count, history.seconds)
    return _of_call(caller, table, args, kwargs)


def _of_call(caller: Any, table: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallExplanation:
    recording, explanations = caller._recorded(args, kwargs), []
    for found in (recording, caller._recorded_symbolic(args, kwargs)):
        if found is not None:
            explanations.append(_of_recording(caller._plan.name, table, found))
    hits = [explanation for explanation in explanations if explanation.hit]
    return (hits or explanations[-1:])[0]


def _of_recording(name: str, table: Any, recording: _core.Recording) -> CallExplanation:
    variant = Variant.of(name, recording.graphdef, recording.names, recording.leaves, table.reads)
    for known in reversed(table.history.variants):
        entry = known.entry()
        if not known.is_live or entry is None or known.graphdef != variant.graphdef:
            continue
        if entry.serves(recording) and not known.differences_to(variant):
            return CallExplanation(name, True, known.number, ())
    number, causes = table.history.explain(variant)
    return CallExplanation(name, False, number, causes)
