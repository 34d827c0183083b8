# SPDX-License-Identifier: Apache-2.0
"""A call that runs out of memory says which of its arguments are the largest."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import graftax

NO_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4503599627370496 bytes."


class Model:
    def __init__(self) -> None:
        self.layers = [jnp.ones((i + 1, 100)) for i in range(12)]
        self.tied = self.layers[-1]


def explode(model: Model) -> Any:
    """Stands for a program that the device has no memory for."""
    raise jax.errors.JaxRuntimeError(NO_MEMORY)


def notes(error: BaseException) -> str:
    """The notes of graftax; JAX has one about its frames."""
    return "\n".join(note for note in getattr(error, "__notes__", ()) if "internal frames" not in note)


def test_the_ten_largest_arguments_are_named():
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory") as raised:
        graftax.jit(explode)(Model())
    lines = notes(raised.value).splitlines()
    assert lines[0] == "explode takes 12 arrays of 31.2 kB on a device. The largest:"
    assert lines[1] == "  model.layers[11]: float32[12, 100], 4.8 kB"
    assert len(lines) == 12 and "layers[2]:" in lines[10] and "graftax.memory(f, *args)" in lines[11]


def test_an_inner_call_is_noted_once():
    inner = graftax.jit(explode)
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        graftax.jit(lambda model, x: inner(model) + x)(Model(), jnp.ones(3))
    assert notes(raised.value).count("The largest:") == 1


def test_other_errors_have_no_note():
    def fail(x: Any) -> Any:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else") as raised:
        graftax.jit(fail)(jnp.ones(3))
    assert not notes(raised.value)


def test_a_compiled_stage_names_them_too(monkeypatch: pytest.MonkeyPatch):
    def run(*leaves: Any) -> Any:
        raise jax.errors.JaxRuntimeError(NO_MEMORY)

    compiled = graftax.jit(lambda state: state["w"] + 1).lower({"w": jnp.ones(1000)}).compile()
    monkeypatch.setattr(compiled, "_stage", run)
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        compiled({"w": jnp.ones(1000)})
    assert "  state['w']: float32[1000], 4 kB" in notes(raised.value)
