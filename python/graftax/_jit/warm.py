# SPDX-License-Identifier: Apache-2.0
"""`f.warm`: compiles the programs of later calls ahead of time, several at once."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterable
from typing import Any

from graftax._base.progress_bar import Bar, ProgressCallback
from graftax._explain.compile_events import expected
from graftax._jit.stages import Lowered

NO_CALL = (
    "warm takes a list of calls, each a tuple of positional arguments or a dict of keyword arguments, and {call!r} is "
    'neither: write f.warm([(x, "train"), (x, "test")]).'
)


def warm(
    lower: Callable[..., Lowered[..., Any]],
    name: str,
    calls: Iterable[object],
    threads: int,
    report: ProgressCallback | None,
) -> None:
    """Lowers all calls in this thread, because JAX's settings are thread-local, and compiles in a pool of threads."""
    try:
        listed_calls = list(calls)
    except TypeError:
        raise TypeError(NO_CALL.format(call=calls)) from None
    arguments = [_arguments(call) for call in listed_calls]  # all are checked before the first is lowered
    report = report or Bar(name)
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(max(1, threads)) as pool:
        with expected():
            # The threads begin with the first program while the others are still traced.
            waiting = [pool.submit(lower(*args, **kwargs).compile) for args, kwargs in arguments]
        for count, future in enumerate(concurrent.futures.as_completed(waiting), 1):
            future.result()
            report(count, len(arguments), time.perf_counter() - start)


def _arguments(call: object) -> tuple[tuple[object, ...], dict[str, object]]:
    if isinstance(call, dict):
        return (), call
    if not isinstance(call, tuple):
        raise TypeError(NO_CALL.format(call=call))
    return call, {}
