# SPDX-License-Identifier: Apache-2.0
"""`jax.jit` on the object itself."""

import functools
from typing import Any

import jax

from benchmarks.inputs import Form
from benchmarks.subjects import by_hand

NAME = "jax.jit"
DISTRIBUTION = "jax"

jit = jax.jit
value_and_grad = jax.value_and_grad
in_place = functools.partial(by_hand, jit)
unflatten = jax.tree.unflatten


def accepts(form: Form) -> bool:
    return form.registered


def taken_as(form: Form) -> Form:
    return form


def flatten(obj: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(obj)


def replay(structure: Any, obj: Any) -> list[Any]:
    return jax.tree.flatten(obj)[0]
