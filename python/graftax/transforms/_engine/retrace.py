# SPDX-License-Identifier: Apache-2.0
"""Retracing of loops and branches until the assumptions about their state hold."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

from graftax import _core
from graftax._capture.signature import resolve


class Retrace(Exception):
    """A trace has shown that more must be carried, traced or copied than was assumed: the transform starts again."""


T = TypeVar("T")


_ENCLOSING = threading.local()


class Fixpoint(Generic[T]):
    """The assumptions of one loop or branch about its state, and those of the loops within it.

    A trace that contradicts an assumption starts again. The enclosing loop, which finds the same contradiction later,
    starts again as well and traces the inner loop once more. The inner loop then begins with the assumptions that it
    had reached; otherwise every level of nesting would double the number of traces.
    """

    def __init__(self) -> None:
        self.assumptions: T | None = None
        self._inner: dict[Any, Fixpoint[Any]] = {}
        self._call_counts: collections.Counter[Any] = collections.Counter()
        self._function = 0

    @staticmethod
    def for_call(name: str, functions: Sequence[Callable[..., Any]]) -> Fixpoint[Any]:
        """The fixpoint of the loop that is being called. It lives as long as the outermost loop runs."""
        enclosing: Fixpoint[Any] | None = getattr(_ENCLOSING, "fixpoint", None)
        if enclosing is None:
            return Fixpoint()
        # The key has the number of running traces: on a retrace, a jitted function in between may be compiled already,
        # and then its loops are not called again.
        key = (enclosing._function, len(_core.running_traces()), name, *map(_code, functions))
        enclosing._call_counts[key] += 1
        return enclosing._inner.setdefault((enclosing._call_counts[key], key), Fixpoint())

    def forget(self) -> None:
        self.assumptions = None
        self._inner.clear()

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


def _code(function: Callable[..., Any]) -> Any:
    return resolve(function)[0].__code__ if callable(function) else None
