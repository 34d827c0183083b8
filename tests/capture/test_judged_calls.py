# SPDX-License-Identifier: Apache-2.0
"""Calls of packages' code that a trace hears once: a judgement holds for no call that may do more."""

import gc
import math
import types
import weakref

import pytest

from graftax import _core


def code() -> None: ...


CODE = code.__code__


class Callable:
    def __call__(self) -> None: ...


def heard_after(judged: tuple[object, object], *call: object) -> bool:
    """Is `call` told of, where the call `judged` has no effect?"""
    told: list[object] = []

    def on_call(*event: object) -> None:
        told.append(event)

    calls = _core.JudgedCalls(on_call)
    calls.add_code(CODE)
    calls.add(*judged)
    calls.hear(CODE, 0, *call)
    return bool(told)


MODULE = types.ModuleType("m")


@pytest.mark.parametrize(
    ("judged", "call"),
    [
        ((len, []), (len, ())),
        ((isinstance, int), (isinstance, int)),
        ((map, math.sin), (map, math.sin)),
        ((setattr, MODULE), (setattr, MODULE)),
        ((type, 1), (type, 2)),
    ],
)
def test_a_judged_call_is_not_told_again(judged: tuple[object, object], call: tuple[object, object]) -> None:
    assert not heard_after(judged, *call)


@pytest.mark.parametrize(
    ("judged", "call"),
    [
        ((len, []), (max, [])),
        ((map, math.sin), (map, math.cos)),  # which is called by it
        ((map, None), (map, code)),
        ((map, Callable()), (map, Callable())),
        ((setattr, Callable), (setattr, MODULE)),
        ((setattr, object()), (setattr, MODULE)),
        ((type, object()), (type, "Name")),  # it makes a class, which a base may note
        ((type, "a value"), (type, "Name")),
    ],
)
def test_a_call_that_may_do_more_is_told(judged: tuple[object, object], call: tuple[object, object]) -> None:
    assert heard_after(judged, *call)


def test_code_that_was_not_added_is_told_of_every_call() -> None:
    told: list[object] = []

    def on_call(*event: object) -> None:
        told.append(event)

    calls = _core.JudgedCalls(on_call)
    calls.add(len, [])
    calls.hear(CODE, 7, len, [])
    assert told == [(CODE, 7, len, [])]


def test_what_is_forgotten_is_let_go() -> None:
    def function() -> None: ...

    calls, alive = _core.JudgedCalls(print), weakref.ref(function)
    calls.add_code(CODE)
    calls.add(function, None)
    assert calls.knows(function, None) and calls.has_code(CODE)
    del function
    gc.collect()
    assert alive() is not None
    calls.clear()
    gc.collect()
    assert alive() is None and not calls.has_code(CODE)
