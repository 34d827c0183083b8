# SPDX-License-Identifier: Apache-2.0
"""Calls of packages' code that a trace hears once: a judgement holds for no call that may do more."""

import functools
import gc
import math
import types
import weakref

import pytest

from graftax import _core
from graftax._capture.unheard_effects import is_lasting_judgement


def code() -> None: ...


CODE = code.__code__


class Callable:
    def __call__(self) -> None: ...

    def method(self, value: object) -> None: ...


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
        ((map, Callable()), (map, Callable())),  # by the class, where that decides
        ((code, Callable()), (code, math.sin)),  # it is heard itself when it runs
        ((Callable().method, 1), (Callable().method, 2)),
        ((object().__getattribute__, "x"), (object().__getattribute__, "x")),
        (([].append, 1), ([].append, 1)),
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
        ((map, Callable()), (map, functools.partial(code))),
        ((map, Callable()), (map, Callable)),
        ((Callable().method, 1), (code, 1)),
        ((object().__getattribute__, "x"), (object, "x")),
        (([].append, 1), (list, 1)),
        (([].append, 1), (set().add, 1)),
        ((setattr, Callable), (setattr, MODULE)),
        ((setattr, object()), (setattr, MODULE)),
        ((type, object()), (type, "Name")),  # it makes a class, which a base may note
        ((type, "a value"), (type, "Name")),
    ],
)
def test_a_call_that_may_do_more_is_told(judged: tuple[object, object], call: tuple[object, object]) -> None:
    assert heard_after(judged, *call)


@pytest.mark.parametrize("first", [code, Callable().method, functools.partial(code), functools.cache(code), [].append])
def test_what_calls_something_itself_is_judged_each_time(first: object) -> None:
    assert not is_lasting_judgement(map, first)
    assert is_lasting_judgement(code, first) and is_lasting_judgement(Callable().method, first)


@pytest.mark.parametrize("first", [1, "a", Callable(), Callable, math.sin, math])
def test_a_judgement_lasts_where_the_class_decides(first: object) -> None:
    assert is_lasting_judgement(map, first)


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
