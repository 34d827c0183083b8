# SPDX-License-Identifier: Apache-2.0
"""Jitted functions that are bound to an object, called by other jitted functions: the object is a part of the graph."""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import graftax


class Counter:
    def __init__(self) -> None:
        self.w, self.factor, self.calls = jnp.ones(2), 1.0, 0

    def step(self, x: Any) -> Any:
        self.w, self.calls = self.w + x * self.factor, self.calls + 1
        return self.w

    def __call__(self, x: Any) -> Any:
        return self.step(x)

    jitted = graftax.jit(step)


BINDINGS: dict[str, Callable[[Counter], Callable[[Any], Any]]] = {
    "method": lambda counter: counter.jitted,
    "jit of a method": lambda counter: graftax.jit(counter.step),
    "jit of a partial": lambda counter: graftax.jit(functools.partial(Counter.step, counter)),
    "jit of a partial of a method": lambda counter: graftax.jit(functools.partial(counter.step)),
    "jit of an object": lambda counter: graftax.jit(counter),
    "jit of a jitted method": lambda counter: graftax.jit(counter.jitted),
}
MODULE = types.ModuleType("bound_inside")


def _of_helper(bound: Any) -> Callable[[Any], Any]:
    MODULE.bound = bound
    exec("def helper(x): return bound(x)", vars(MODULE))
    helper = MODULE.helper
    return graftax.jit(lambda x: helper(x))


def _of_argument(bound: Any) -> Callable[[Any], Any]:
    call = graftax.jit(lambda f, x: f(x))
    return lambda x: call(bound, x)


def _of_dict(bound: Any) -> Callable[[Any], Any]:
    call, functions = graftax.jit(lambda functions, x: functions["f"](x)), {"f": bound}
    return lambda x: call(functions, x)


CALLS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "variable": lambda bound: graftax.jit(lambda x: bound(x)),
    "global of a helper": _of_helper,
    "argument": _of_argument,
    "in a dict": _of_dict,
}


@pytest.mark.parametrize("reached", CALLS)
@pytest.mark.parametrize("bound", BINDINGS)
def test_its_object_is_read_and_changed_as_in_plain_python(bound: str, reached: str):
    counter, plain = Counter(), Counter()
    call = CALLS[reached](BINDINGS[bound](counter))
    for factor in (1.0, 1.0, 2.0, 3.0):
        counter.factor = plain.factor = factor
        counter.w, plain.w = counter.w * 2, plain.w * 2
        assert call(jnp.ones(2)).tolist() == plain.step(jnp.ones(2)).tolist()
        assert counter.w.tolist() == plain.w.tolist()
        assert counter.calls == plain.calls


class Trainer:
    """As code has it that was written for `jax.jit`: a method that is compiled when an object is made."""

    def __init__(self) -> None:
        self.w = jnp.zeros(2)
        self.step = graftax.jit(self._step)

    def _step(self, x: Any) -> Any:
        self.w = self.w + x
        return self.w.sum()

    def epoch(self, xs: list[Any]) -> list[Any]:
        return [self.step(x) for x in xs]


def test_an_object_may_hold_its_own_jitted_method():
    trainer, step = Trainer(), None
    epoch = graftax.jit(Trainer.epoch)
    for i in range(3):
        step = trainer.step
        assert [loss.item() for loss in epoch(trainer, [jnp.ones(2), jnp.ones(2)])] == [4 * i + 2, 4 * i + 4]
        assert trainer.step is step
    assert trainer.w.tolist() == [6, 6]
    trainer.step(jnp.ones(2))
    assert trainer.w.tolist() == [7, 7]
    assert epoch.cache_info().traces == 1


def test_a_function_may_make_an_object_that_holds_one():
    @graftax.jit
    def make(x: Any) -> Any:
        trainer = Trainer()
        trainer.step(x)
        return trainer

    for _ in range(2):
        trainer = make(jnp.ones(2))
        assert trainer.w.tolist() == [1, 1]
        trainer.step(jnp.ones(2))
        assert trainer.w.tolist() == [2, 2]


def test_a_new_binding_of_the_same_method_compiles_nothing():
    counter, call = Counter(), graftax.jit(lambda f, x: f(x))
    for _ in range(3):
        call(counter.jitted, jnp.ones(2))
    assert call.cache_info().traces == 1


def test_a_jitted_function_without_an_object_is_itself():
    double = graftax.jit(lambda x: x * 2)
    give = graftax.jit(lambda functions, x: (functions[0](x), functions[0]))
    assert give([double], jnp.ones(()))[1] is double
    leaves, _ = graftax.flatten({"f": double})
    assert leaves == []


@pytest.mark.parametrize("bound", BINDINGS)
def test_one_that_is_held_twice_is_equal_to_itself(bound: str):
    counter, other = Counter(), Counter()
    first, second = BINDINGS[bound](counter), BINDINGS[bound](other)
    compare = graftax.jit(lambda main, all_of_them: (all_of_them.index(main), hash(main) == hash(all_of_them[1])))
    for _ in range(2):
        assert compare(first, [second, first]) == (1, True)
    remove = graftax.jit(lambda functions: functions["all"].remove(functions["main"]))
    functions = {"all": [second, first], "main": first}
    remove(functions)
    assert functions["all"] == [second]
