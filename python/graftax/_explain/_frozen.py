# SPDX-License-Identifier: Apache-2.0
"""Calls that must compile nothing: of a frozen function, and in `assert_max_traces`."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NoReturn

from .. import _core
from .._errors import GraftaxError
from ._explanation import NO_FUNCTION
from ._history import History
from ._log import because, described
from ._variant import Variant

if TYPE_CHECKING:
    from .._jitted import Jitted

FROZEN = (
    "{name} is frozen, and this call would compile:\n{causes}\nGive it what it was compiled for, warm it for this call "
    "before freeze(), or let it compile again with unfreeze()."
)
TOO_MANY_TRACES = "{name} was traced {count} times here, and at most {limit} were expected:\n{variants}"


class RecompileError(GraftaxError):
    """A call of a frozen function would have compiled; the message says why."""


def refuse(table: Any, name: str, recording: _core.Recording) -> NoReturn:
    """Raises for a call that no program is there for."""
    call = Variant.of(name, recording.graphdef, recording.names, recording.leaves, table.reads)
    refuse_variant(table.history, call)


def refuse_variant(history: History, call: Variant) -> NoReturn:
    number, causes = history.explain(call)
    raise RecompileError(FROZEN.format(name=call.name, causes="\n".join(because(number, causes, "  "))))


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
