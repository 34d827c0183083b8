# SPDX-License-Identifier: Apache-2.0
"""`brainstate.transform.jit`: modules are captured, or static by identity; changes of States come back."""

import functools
from collections.abc import Callable
from typing import Any

import brainstate as bst
import jax

from benchmarks.inputs import Form

NAME = "brainstate.transform.jit"
DISTRIBUTION = "brainstate"
WITHOUT = ("update", "chain")  # a result is arrays, no new module

jit = functools.partial(bst.transform.jit, static_argnums=0)


def accepts(form: Form) -> bool:
    return form.library == "brainstate"


def taken_as(form: Form) -> Form:
    return form


def in_place(form: Form, change: Callable[[Any], None]) -> Callable[[Any], None]:
    return jit(change)


def flatten(obj: Any) -> tuple[list[Any], Any]:
    graphdef, states = bst.graph.treefy_split(obj)
    leaves, treedef = jax.tree.flatten(states)
    return leaves, (graphdef, treedef)


def unflatten(structure: Any, leaves: list[Any]) -> Any:
    graphdef, treedef = structure
    return bst.graph.treefy_merge(graphdef, jax.tree.unflatten(treedef, leaves))


def replay(structure: Any, obj: Any) -> list[Any]:
    return flatten(obj)[0]
