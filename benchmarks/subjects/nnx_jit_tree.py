# SPDX-License-Identifier: Apache-2.0
"""`flax.nnx.jit(graph=False)`: NNX modules as plain pytrees, without shared references; Variables come back."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from flax import nnx

from benchmarks.inputs import SHARED, TIED, Form
from benchmarks.subjects import by_hand, nnx_jit
from benchmarks.subjects.nnx_jit import DISTRIBUTION as DISTRIBUTION
from benchmarks.subjects.nnx_jit import flatten as flatten
from benchmarks.subjects.nnx_jit import replay as replay
from benchmarks.subjects.nnx_jit import taken_as as taken_as
from benchmarks.subjects.nnx_jit import unflatten as unflatten

NAME = "nnx.jit(graph=False)"
# These walks are the same functions as those of `nnx.jit`.
WITHOUT = ("flatten", "replay", "unflatten")

if "graph" not in inspect.signature(nnx.jit).parameters:
    raise ImportError("this Flax has no nnx.jit(graph=False)")

jit = functools.partial(nnx.jit, graph=False)


def accepts(form: Form) -> bool:
    # Its tree mode knows no node that is met twice.
    return nnx_jit.accepts(form) and form not in (SHARED, TIED)


def in_place(form: Form, change: Callable[[Any], None]) -> Callable[[Any], None]:
    return jit(change) if form.library == "flax" else by_hand(jit, form, change)
