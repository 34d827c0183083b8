# SPDX-License-Identifier: Apache-2.0
"""`jarp.jit(filter=True)`: arrays traced, the other leaves of a pytree static. Optional: no extra installs jarp.

Importing jarp registers bound methods as pytree nodes for all of JAX in this process; no case here holds one.
"""

import functools
from typing import Any

import jarp
from jarp import tree

from benchmarks.subjects import by_hand
from benchmarks.subjects.jax_tree import accepts as accepts
from benchmarks.subjects.jax_tree import taken_as as taken_as

NAME = "jarp.jit"
DISTRIBUTION = "jarp"

jit = functools.partial(jarp.jit, filter=True)
in_place = functools.partial(by_hand, jit)


def flatten(obj: Any) -> tuple[list[Any], Any]:
    return tree.partition(obj)


def unflatten(structure: Any, leaves: list[Any]) -> Any:
    return tree.combine(leaves, structure)


def replay(structure: Any, obj: Any) -> list[Any]:
    return flatten(obj)[0]
