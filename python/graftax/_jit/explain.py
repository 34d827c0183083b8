# SPDX-License-Identifier: Apache-2.0
"""`explain` and `assert_max_traces`: why and how often a jitted function was compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, ParamSpec, overload

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._explain import CallExplanation, Explanation, Variant
from graftax._explain.log import describe
from graftax._jit.cache import FunctionTable
from graftax._jit.jitted import Jitted
from graftax._jit.symbolic_call import would_be_symbolic

P = ParamSpec("P")

NO_FUNCTION = "graftax.{name} takes a function that graftax.jit returned, not {function!r}"
TOO_MANY_TRACES = "{name} was traced {count} times here, and at most {limit} were expected:\n{variants}"


@overload
def explain(function: Jitted[..., Any], /) -> Explanation: ...
@overload
def explain(function: Jitted[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> CallExplanation: ...
def explain(function: Any, /, *args: object, **kwargs: object) -> Explanation | CallExplanation:
    """Says why a function was compiled: each program with every difference to the most similar one.

    Args:
        function: what `graftax.jit` or `filter_jit` returned.
        *args, **kwargs: the arguments of a call. With them the result says whether this call would compile, and why.
            Nothing runs.

    Returns:
        an explanation, which prints as text, and as data with `to_json()`. For a function it has `variants`, for a call
        `hit` and `causes`.

    Raises:
        TypeError: if `function` was not returned by `graftax.jit` or `filter_jit`.

    Example:
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
    caller = _jitted("explain", function)
    table = caller._table
    if not args and not kwargs:
        history = table.history
        donation = str(caller.donation()) if caller._options.donates_proven else ""
        variants = tuple(history.variants)
        return Explanation(caller._plan.name, variants, table.calls, history.count, history.seconds, donation)
    return _explain_call(caller, table, args, kwargs)


def _jitted(name: str, function: object) -> Any:
    if not hasattr(function, "_plan"):
        raise TypeError(NO_FUNCTION.format(name=name, function=function))
    return function


def _explain_call(
    caller: Any, table: FunctionTable, args: tuple[object, ...], kwargs: dict[str, object]
) -> CallExplanation:
    call = caller._record_call(args, kwargs)
    recordings = [call.recording]
    numbers = would_be_symbolic(call.plan, table, caller._function, call.recording)
    if numbers is not None:
        # A number that is a key, too, cannot be a leaf: the call would be recorded with its value.
        with contextlib.suppress(GraftaxError):
            recordings.append(call.plan.record(call.roots, call.layout, symbolic=numbers.places.keys()))
    # A call may run a program for these numbers, or one for symbolic numbers: it hits if either is there.
    explanations = [_explain_recording(caller._plan.name, table, recording) for recording in recordings]
    hits = [explanation for explanation in explanations if explanation.hit]
    return (hits or explanations[-1:])[0]


def _explain_recording(name: str, table: FunctionTable, recording: _core.Recording) -> CallExplanation:
    variant = Variant.from_call(name, recording.graphdef, recording.names, recording.leaves, table.reads)
    for candidate in reversed(table.history.variants):
        entry = candidate.entry()
        if not candidate.is_live or entry is None or candidate.graphdef != variant.graphdef:
            continue
        if entry.serves(recording) and not candidate.differences_to(variant):
            return CallExplanation(name, True, candidate.number, ())
    number, causes = table.history.explain(variant)
    return CallExplanation(name, False, number, causes)


@contextlib.contextmanager
def assert_max_traces(function: Jitted[..., Any], limit: int) -> Generator[None]:
    """A context manager for tests: fails if the block traces a function more often than `limit` times.

    Args:
        function: what `graftax.jit` returned.
        limit: the number of traces that are allowed in the block.

    Raises:
        AssertionError: if there were more; it says what each was for.

    Example:
        >>> f = graftax.jit(lambda x: x * 2)
        >>> with graftax.assert_max_traces(f, 1):
        ...     y = f(f(jnp.ones(3)))
    """
    caller = _jitted("assert_max_traces", function)
    table = caller._table
    traces_before, variants_before = table.traces, table.history.count
    yield
    count = table.traces - traces_before
    if count > limit:
        added = [variant for variant in table.history.variants if variant.number > variants_before]
        variants = "\n".join(map(describe, added))
        name = caller._plan.name
        raise AssertionError(TOO_MANY_TRACES.format(name=name, count=count, limit=limit, variants=variants))
