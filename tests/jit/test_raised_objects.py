# SPDX-License-Identifier: Apache-2.0
"""What an exception carries out of a jitted function."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import graftax
from zoo import f32


class DivergedError(Exception):
    def __init__(self, *args: Any, model: Any = None) -> None:
        super().__init__(*args)
        self.model = model


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", [DivergedError, ValueError])
def test_an_exception_carries_the_callers_own_objects(kind: Any, nested: bool) -> None:
    def f(model: Any) -> None:
        raise kind(model, "diverged", model.w * 2)

    run = graftax.jit(f)
    model = SimpleNamespace(w=f32(2), failed=False)
    with pytest.raises(kind) as caught:
        (graftax.jit(lambda model: run(model)) if nested else run)(model)
    assert caught.value.args[:2] == (model, "diverged") and caught.value.args[0] is model
    assert any("args[2] is an array that was traced" in note for note in caught.value.__notes__)


def test_so_do_its_attributes() -> None:
    def f(model: Any) -> None:
        raise DivergedError(model=model)

    model = SimpleNamespace(w=f32(2))
    with pytest.raises(DivergedError) as caught:
        graftax.jit(f)(model)
    assert caught.value.model is model


def test_within_containers_and_in_what_it_was_raised_from() -> None:
    def f(model: Any, given: Any) -> None:
        note = {"models": [model, (1, model)], "given": given}
        try:
            raise KeyError(model)
        except KeyError as error:
            raise DivergedError(note, [note]) from error

    model, given = SimpleNamespace(w=f32(2)), [1]
    with pytest.raises(DivergedError) as caught:
        graftax.jit(f)(model, given)
    note, listed = caught.value.args
    assert note["models"][0] is note["models"][1][1] is model and note["given"] is given and listed[0] is note
    assert caught.value.__cause__ is not None and caught.value.__cause__.args[0] is model
