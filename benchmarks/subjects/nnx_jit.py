# SPDX-License-Identifier: Apache-2.0
"""`flax.nnx.jit`: NNX graphs, changes of Variables come back."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from benchmarks.inputs import OBJECT, Form
from benchmarks.subjects import by_hand

NAME = "nnx.jit"
DISTRIBUTION = "flax"

jit = nnx.jit


def accepts(form: Form) -> bool:
    return form is not OBJECT and form.library != "brainstate"


def taken_as(form: Form) -> Form:
    return form


def in_place(form: Form, change: Callable[[Any], None]) -> Callable[[Any], None]:
    # Only what lives in Variables comes back; other containers are by value here.
    return jit(change) if form.library == "flax" else by_hand(jit, form, change)


def flatten(obj: Any) -> tuple[list[Any], Any]:
    graphdef, state = nnx.split(obj)
    leaves, treedef = jax.tree.flatten(state)
    return leaves, (graphdef, treedef)


def unflatten(structure: Any, leaves: list[Any]) -> Any:
    graphdef, treedef = structure
    return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))


def replay(structure: Any, obj: Any) -> list[Any]:
    return flatten(obj)[0]
