# SPDX-License-Identifier: Apache-2.0
"""`equinox.filter_jit`: arrays traced, the other leaves of a pytree static."""

import functools
from typing import Any

import equinox as eqx
import jax

from benchmarks.inputs import FLAREJAX, Form
from benchmarks.subjects import by_hand
from benchmarks.subjects.jax_tree import taken_as as taken_as

NAME = "equinox.filter_jit"
DISTRIBUTION = "equinox"

jit = eqx.filter_jit
value_and_grad = eqx.filter_value_and_grad
in_place = functools.partial(by_hand, jit)
combine = eqx.combine
equal = eqx.tree_equal


def accepts(form: Form) -> bool:
    # On a FlareJax module `equinox.partition` gives two trees that no longer match.
    return form.registered and form is not FLAREJAX


def partition(obj: Any) -> tuple[Any, Any]:
    return eqx.partition(obj, eqx.is_array)


def copy(obj: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf, obj)


def merge(obj: Any, other: Any) -> Any:
    return jax.tree.map(lambda _, new: new, obj, other)


def to_dict(obj: Any) -> Any:
    return {path: leaf for path, leaf in jax.tree.flatten_with_path(obj)[0]}.values()


def flatten(obj: Any) -> tuple[list[Any], Any]:
    dynamic, static = eqx.partition(obj, eqx.is_array)
    leaves, treedef = jax.tree.flatten(dynamic)
    return leaves, (treedef, static)


def unflatten(structure: Any, leaves: list[Any]) -> Any:
    treedef, static = structure
    return eqx.combine(jax.tree.unflatten(treedef, leaves), static)


def replay(structure: Any, obj: Any) -> list[Any]:
    return flatten(obj)[0]
