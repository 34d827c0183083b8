# SPDX-License-Identifier: Apache-2.0
"""The executable alone, on the flat list: what it and the arrays of its results cost, and no call can be below.

It asks nothing: not whether the arrays are those it was compiled for, nor whether a setting has changed.
"""

from collections.abc import Callable
from typing import Any

import jax

from benchmarks.inputs import Form
from benchmarks.subjects.jax_flat import taken_as as taken_as
from graftax._jax import fast_dispatch

NAME = "executable alone"
DISTRIBUTION = "jax"


def accepts(form: Form) -> bool:
    return True


def jit(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    made: Callable[[list[Any]], list[Any]] | None = None
    is_one = False

    def call(leaves: Any) -> Any:
        nonlocal made, is_one
        if made is None:
            stage = jax.jit(lambda *arrays: f(list(arrays))).lower(*leaves).compile()
            made, is_one = fast_dispatch.bare_executable(stage), stage.out_tree == jax.tree.structure(0)
        return made(leaves)[0] if is_one else made(leaves)

    return call
