# SPDX-License-Identifier: Apache-2.0
"""`flax.nnx.split` and `jax.jit`, `nnx.merge` inside: the functional way that the Flax documentation shows."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from benchmarks.inputs import Form
from benchmarks.subjects.nnx_jit import DISTRIBUTION as DISTRIBUTION
from benchmarks.subjects.nnx_jit import flatten as flatten
from benchmarks.subjects.nnx_jit import replay as replay
from benchmarks.subjects.nnx_jit import taken_as as taken_as
from benchmarks.subjects.nnx_jit import unflatten as unflatten

NAME = "nnx.split + jax.jit"
# Its walks are those of `nnx.jit`.
WITHOUT = ("flatten", "replay", "unflatten")


def accepts(form: Form) -> bool:
    return form.library == "flax"


def jit(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    # An output is an array or again a module; the latter leaves as its two halves.
    @jax.jit
    def inner(graphdef: Any, state: Any) -> Any:
        out = f(nnx.merge(graphdef, state))
        return nnx.split(out) if isinstance(out, nnx.Module) else out

    def call(obj: Any) -> Any:
        out = inner(*nnx.split(obj))
        return nnx.merge(*out) if isinstance(out, tuple) else out

    return call


def in_place(form: Form, change: Callable[[Any], None]) -> Callable[[Any], None]:
    @jax.jit
    def inner(graphdef: Any, state: Any) -> Any:
        obj = nnx.merge(graphdef, state)
        change(obj)
        return nnx.state(obj)

    def call(obj: Any) -> None:
        nnx.update(obj, inner(*nnx.split(obj)))

    return call
