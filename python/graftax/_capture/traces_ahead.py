# SPDX-License-Identifier: Apache-2.0
"""Traces that run ahead of the calls that they are for. They end before they do what only a call may do."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import warnings
from collections.abc import Generator
from typing import Any, NoReturn


class NotAhead(BaseException):
    """Raised out of a trace that runs ahead of the calls it is for, before it does what only a call may do.

    Code that catches any Exception does not catch it.
    """


class _Thread(threading.local):
    """Whether this thread runs such a trace."""

    is_ahead = False
    has_given_up = False  # even if the code has caught `NotAhead`
    deadline = math.inf


_THREAD = _Thread()


class _AllWarnings(type):
    """The metaclass of a category to which all warnings belong that a trace ahead is about to give.

    Python asks the category of a filter before it gives a warning, and before its registry counts the warning as given.
    """

    def __subclasscheck__(cls, subclass: type) -> bool:
        # A ResourceWarning comes from the garbage collector, which may run at any time.
        return is_ahead() and not issubclass(subclass, ResourceWarning) and give_up()


class _OfTraceAhead(Warning, metaclass=_AllWarnings):
    pass


_FILTER: Any = ("error", None, _OfTraceAhead, None, 0)


@contextlib.contextmanager
def computing_only(seconds: float) -> Generator[None]:
    """While entered, a trace of this thread ends with NotAhead where it may do more than compute values.

    So it is at a call that does more, at a warning, and after this many seconds.
    """
    outer = _THREAD.is_ahead, _THREAD.has_given_up, _THREAD.deadline
    _THREAD.is_ahead, _THREAD.has_given_up, _THREAD.deadline = True, False, time.monotonic() + seconds
    # Not by `warnings.filterwarnings`, after which Python forgets which warnings were given.
    filters: list[Any] = warnings.filters  # pyright: ignore[reportAssignmentType]
    filters.insert(0, _FILTER)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # a `catch_warnings` of another thread may have replaced the filters
            filters.remove(_FILTER)
        _THREAD.is_ahead, _THREAD.has_given_up, _THREAD.deadline = outer


def is_ahead() -> bool:
    """Does this thread run such a trace?"""
    return _THREAD.is_ahead


def give_up() -> NoReturn:
    """Ends such a trace."""
    _THREAD.has_given_up = True
    raise NotAhead


def must_end() -> bool:
    """Has such a trace been given up, or does it take too long?"""
    return _THREAD.has_given_up or time.monotonic() > _THREAD.deadline
