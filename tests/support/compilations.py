# SPDX-License-Identifier: Apache-2.0
"""What JAX compiles in this process, by the names of the functions."""

from typing import Any

from graftax._jax.compilation import compile_stage, on_compile_stages

compiled: list[str] = []  # names, as they are compiled


def _note(event: str, seconds: float, **about: Any) -> None:
    found = compile_stage(event, about)
    if found is not None and found[0] == "compiled":
        compiled.append(found[1])


on_compile_stages(_note)


def count_of(*names: str) -> int:
    """How many programs of functions with these names JAX has compiled so far."""
    return sum(name in names for name in compiled)
