# SPDX-License-Identifier: Apache-2.0
"""`flax.nnx.cached_partial`: `nnx.jit` bound to one object, whose graph is walked once and not at each call."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from benchmarks.inputs import Form
from benchmarks.subjects.nnx_jit import DISTRIBUTION as DISTRIBUTION
from benchmarks.subjects.nnx_jit import flatten as flatten
from benchmarks.subjects.nnx_jit import replay as replay
from benchmarks.subjects.nnx_jit import taken_as as taken_as
from benchmarks.subjects.nnx_jit import unflatten as unflatten

NAME = "nnx.cached_partial"
# It is bound to its object: a state that is another object at each step has to be bound again each time.
# Its walks are those of `nnx.jit`.
WITHOUT = ("chain", "flatten", "replay", "unflatten")


def accepts(form: Form) -> bool:
    return form.library == "flax"


def jit(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    compiled = nnx.jit(f)
    bound_to: Any = None
    bound: Callable[[], Any] | None = None

    def call(obj: Any) -> Any:
        nonlocal bound_to, bound
        if bound is None or obj is not bound_to:
            bound_to, bound = obj, nnx.cached_partial(compiled, obj)
        return bound()

    return call


def in_place(form: Form, change: Callable[[Any], None]) -> Callable[[Any], None]:
    return jit(change)
