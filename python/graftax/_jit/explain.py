# SPDX-License-Identifier: Apache-2.0
"""`explain` and `assert_max_traces`: what is asked of a jitted function about its compilations."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, ParamSpec, overload

from graftax import _core
from graftax._explain import CallExplanation, Explanation, Variant
from graftax._explain.log import described
from graftax._jit.jitted import Jitted

P = ParamSpec("P")

NO_FUNCTION = "graftax.{name} takes a function that graftax.jit made, and {function!r} is none"
TOO_MANY_TRACES = "{name} was traced {count} times here, and at most {limit} were expected:\n{variants}"


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


@contextlib.contextmanager
def assert_max_traces(function: Jitted[..., Any], limit: int) -> Generator[None]:
    """In tests: the block traces a function at most so often.

    Args:
        function: what `graftax.jit` made.
        limit: traces of it in the block.

    Raises:
        AssertionError: where there were more; it says what each was for.

    >>> import graftax, jax.numpy as jnp
    >>> f = graftax.jit(lambda x: x * 2)
    >>> with graftax.assert_max_traces(f, 1):
    ...     y = f(f(jnp.ones(3)))
    """
    caller: Any = function
    if not hasattr(caller, "_plan"):
        raise TypeError(NO_FUNCTION.format(name="assert_max_traces", function=function))
    table = caller._table
    traces, known = table.traces, table.history.count
    yield
    count = table.traces - traces
    if count > limit:
        variants = "\n".join(described(variant) for variant in table.history.variants if variant.number > known)
        name = caller._plan.name
        raise AssertionError(TOO_MANY_TRACES.format(name=name, count=count, limit=limit, variants=variants))
