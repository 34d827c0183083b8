# SPDX-License-Identifier: Apache-2.0
"""`graftax.jit`: any object, changes come back."""

from collections.abc import Callable
from typing import Any

import graftax
from benchmarks.inputs import Form
from graftax import _core

NAME = "graftax.jit"
DISTRIBUTION = "graftax"

jit = graftax.jit
flatten = graftax.flatten
unflatten = graftax.unflatten


def accepts(form: Form) -> bool:
    return True


def taken_as(form: Form) -> Form:
    return form


def in_place(form: Form, change: Callable[[Any], None]) -> Callable[[Any], None]:
    return jit(change)


def replay(structure: Any, obj: Any) -> list[Any]:
    leaves = _core.replay(structure, obj)
    if leaves is None:
        raise ValueError("replay did not recognise the structure it was recorded from")
    return leaves
