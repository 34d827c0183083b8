# SPDX-License-Identifier: Apache-2.0
"""What loops and branches have found out, for when they are traced again."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

from graftax import _core
from graftax._capture.signature import resolve


class Retrace(Exception):
    """A trace found that more has to be carried, traced or copied than was assumed: the transform starts anew."""


T = TypeVar("T")


_AROUND = threading.local()


class Fixpoint(Generic[T]):
    """What one loop or choice has found out, and what the ones inside of it have.

    A trace that finds that more has to be carried begins anew, and so does the loop around it, which finds the same
    afterwards. Here the inner one finds what it knew before: else each level would double the traces.
    """

    def __init__(self) -> None:
        self.found: T | None = None
        self._inner: dict[Any, Fixpoint[Any]] = {}
        self._met: collections.Counter[Any] = collections.Counter()
        self._function = 0

    @staticmethod
    def of(name: str, functions: Sequence[Callable[..., Any]]) -> Fixpoint[Any]:
        """That of the loop which is called now. It lives as long as the outermost loop runs."""
        around: Fixpoint[Any] | None = getattr(_AROUND, "fixpoint", None)
        if around is None:
            return Fixpoint()
        # The number of running traces is in it: the next time, a loop in a jitted function may be compiled already.
        key = (around._function, len(_core.running_traces()), name, *map(_code, functions))
        around._met[key] += 1
        return around._inner.setdefault((around._met[key], key), Fixpoint())

    def forget(self) -> None:
        self.found = None
        self._inner.clear()

    @contextlib.contextmanager
    def tracing(self, function: int = 0) -> Generator[None]:
        """While this function of the loop is traced: it calls the same inner ones, in the same order, each time."""
        before = getattr(_AROUND, "fixpoint", None)
        _AROUND.fixpoint, self._function = self, function
        self._met.clear()
        try:
            yield
        finally:
            _AROUND.fixpoint = before


def _code(function: Callable[..., Any]) -> Any:
    return resolve(function)[0].__code__ if callable(function) else None
