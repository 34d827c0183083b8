# SPDX-License-Identifier: Apache-2.0
"""What JAX compiles, by the names of the functions."""

import contextlib
from collections.abc import Generator
from typing import Any

import jax

from graftax._jax.compilation import compile_stage, on_compile_stages

_compiled: list[str] = []  # names, as they are compiled


def _note(event: str, seconds: float, **about: Any) -> None:
    found = compile_stage(event, about)
    if found is not None and found[0] == "compiled":
        _compiled.append(found[1])


@contextlib.contextmanager
def compilations(*names: str) -> Generator[list[str]]:
    """The functions with these names that JAX compiles while this is entered, in the list that it gives."""
    of_these: list[str] = []
    _compiled.clear()
    on_compile_stages(_note)
    try:
        yield of_these
    finally:
        jax.monitoring.unregister_event_duration_listener(_note)
        of_these += [name for name in _compiled if name in names]
