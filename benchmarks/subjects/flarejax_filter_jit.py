# SPDX-License-Identifier: Apache-2.0
"""`flarejax.filter_jit`: object graphs with references, by value."""

import functools
from typing import Any

import flarejax as flr
import jax

from benchmarks.inputs import OBJECT, Form
from benchmarks.subjects import by_hand

NAME = "flarejax.filter_jit"
DISTRIBUTION = "flarejax"

jit = flr.filter_jit
in_place = functools.partial(by_hand, jit)


def accepts(form: Form) -> bool:
    # It enters its own modules and the builtin containers; any other object is a constant of the program,
    # and so are the arrays inside.
    return form.library in (None, "flarejax") and form is not OBJECT


def taken_as(form: Form) -> Form:
    return form


def flatten(obj: Any) -> tuple[list[Any], Any]:
    flat = flr.flatten(obj)
    dynamic = {path: x for path, x in flat.items() if isinstance(x, jax.Array)}
    static = {path: x for path, x in flat.items() if path not in dynamic}
    return list(dynamic.values()), (list(dynamic), static)


def unflatten(structure: Any, leaves: list[Any]) -> Any:
    paths, static = structure
    return flr.unflatten(static | dict(zip(paths, leaves, strict=True)))


def replay(structure: Any, obj: Any) -> list[Any]:
    return flatten(obj)[0]
