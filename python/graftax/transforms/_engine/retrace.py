# SPDX-License-Identifier: Apache-2.0
"""Retracing of loops and branches until no trace shows anything new about their state."""

from __future__ import annotations

import collections
import contextlib
import threading
import types
from collections.abc import Callable, Generator, Hashable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax

from graftax import _core
from graftax._capture.signature import resolve


class Retrace(Exception):
    """A trace has shown that more must be carried, traced or copied than was assumed: the transform starts again."""


A = TypeVar("A")
R = TypeVar("R")


_ENCLOSING = threading.local()


class Facts(NamedTuple):
    """What traces have shown about the state of a loop, or of branches."""

    carried: frozenset[str] = frozenset()  # key paths of captured arrays that are changed, so that JAX carries them
    numbers: frozenset[str] = frozenset()  # key paths of Python numbers that change, so that they are traced
    copied: frozenset[int] = frozenset()  # elements of the carry or the result that are not the same objects each time


class Fixpoint:
    """What is known about the state of one loop or branch, and about those within it."""

    def __init__(self) -> None:
        self.facts = Facts()
        # A trace that shows something new starts again. The enclosing loop, which finds the same later, starts again as
        # well and traces the inner loop once more. The inner loop then begins with the facts that it had reached;
        # otherwise every level of nesting would double the number of traces.
        # An inner loop is known by its key (`for_call`), and by how many loops with this key were called before it.
        self._inner: dict[tuple[int, Hashable], Fixpoint] = {}
        self._call_counts: collections.Counter[Hashable] = collections.Counter()  # of the running trace, by key
        self._function = 0  # which function of the loop is being traced: the branches of `cond` have their own loops

    @staticmethod
    def for_call(name: str, functions: Sequence[Callable[..., object]]) -> Fixpoint:
        """The fixpoint of the loop that is being called. It lives as long as the outermost loop runs."""
        enclosing: Fixpoint | None = getattr(_ENCLOSING, "fixpoint", None)
        if enclosing is None:
            return Fixpoint()
        # The key has the number of running traces: on a retrace, a jitted function in between may be compiled already,
        # and then its loops are not called again.
        key = (enclosing._function, len(_core.running_traces()), name, *map(_code, functions))
        enclosing._call_counts[key] += 1
        return enclosing._inner.setdefault((enclosing._call_counts[key], key), Fixpoint())

    def run(
        self, begin: Callable[[], A], attempt: Callable[[A], R], explain: Callable[[A, Exception], None]
    ) -> tuple[A, R]:
        """Makes attempts until one shows nothing new: (what `begin` prepared for the last one, its result).

        `begin` prepares an attempt with the facts that are known; `explain` adds to an error, or raises another one.
        """
        remembered = self.facts != Facts()
        # Each restart adds to the facts, of which there are finitely many, so this ends.
        while True:
            prepared = begin()
            try:
                return prepared, attempt(prepared)
            except Retrace:
                continue
            except Exception as error:
                # Facts from the enclosing loop's last trace may belong to other code: begin once without them.
                if remembered and (self.facts.numbers or self.facts.copied):
                    remembered = False
                    self.facts = Facts()
                    self._inner.clear()
                    continue
                if isinstance(error, (jax.errors.JAXTypeError, TypeError, ValueError)):
                    explain(prepared, error)
                raise

    def restart(self, **shown: AbstractSet[Any]) -> NoReturn:
        """Starts again with more of these facts."""
        self.facts = self.facts._replace(**{name: getattr(self.facts, name) | facts for name, facts in shown.items()})
        raise Retrace

    @contextlib.contextmanager
    def tracing(self, function: int = 0) -> Generator[None]:
        """Covers one trace of a function of the loop, which calls the same inner loops in the same order every time."""
        enclosing = getattr(_ENCLOSING, "fixpoint", None)
        _ENCLOSING.fixpoint, self._function = self, function
        self._call_counts.clear()
        try:
            yield
        finally:
            _ENCLOSING.fixpoint = enclosing


def _code(function: Callable[..., object]) -> types.CodeType | None:
    # Each trace of the enclosing loop makes the inner functions anew, from the same code.
    return resolve(function)[0].__code__ if callable(function) else None
