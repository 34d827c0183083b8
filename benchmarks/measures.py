# SPDX-License-Identifier: Apache-2.0
"""What is timed. Each measure makes a ready call for a subject and a case, and checks its result first."""

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import jax
import numpy as np

from benchmarks.inputs import Case, bumped, total


@dataclass(frozen=True)
class Ready:
    """A call to time, or one that returns a count, and whether the result of the step was the expected one."""

    call: Callable[[], Any]
    equal: bool


@dataclass(frozen=True)
class Measure:
    """`prepare` takes a subject, a case and the arrays of the case.

    All subjects share the arrays: another place in memory alone moves a number by several per cent.
    It returns None where the measure means nothing (an object that cannot be changed in place).
    """

    name: str
    title: str
    prepare: Callable[[ModuleType, Case, list[Any]], Ready | None]
    # A first call can be made only once, so its slices are one call long and there are fewer rounds.
    once: bool = False
    # Seconds are taken by the clock; of any other unit the call itself returns how many.
    unit: str = "s"


def work(obj: Any) -> Any:
    """Stands for the one global of `_called`, whose copies each have their own."""
    raise NotImplementedError


def _called(obj: Any) -> Any:
    return work(obj)


def user_function(body: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A new function with no cells and one global, so that a jit that reads captured state reads no more."""
    return FunctionType(_called.__code__, {"work": body}, "user_function")


def same(arrays: list[Any], expected: list[Any]) -> bool:
    pairs = zip(arrays, expected, strict=True) if len(arrays) == len(expected) else None
    return pairs is not None and all(
        a.dtype == e.dtype and a.shape == e.shape and np.array_equal(a, e) for a, e in pairs
    )


def plus(case: Case, steps: int) -> list[Any]:
    return [v + v.dtype.type(steps) for v in case.values()]


def _expected_total(case: Case, steps: int = 0) -> float:
    return float(sum(v.astype(np.float64).sum() for v in plus(case, steps)))


def _first(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready:
    form = subject.taken_as(case.form)
    obj = form.build(arrays)

    def call() -> Any:
        # A new function object each time: nothing to find in any cache of traces.
        step = subject.jit(user_function(lambda obj: total(form.arrays(obj))))
        return step(obj).block_until_ready()

    return Ready(call, float(call()) == _expected_total(case))


def _reduce(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready:
    form = subject.taken_as(case.form)
    obj = form.build(arrays)

    step = subject.jit(user_function(lambda obj: total(form.arrays(obj))))
    more = form.build(bumped(arrays))
    # Other values on the known structure: arrays that became constants of the program would show here.
    equal = float(step(obj)) == _expected_total(case) and float(step(more)) == _expected_total(case, 1)
    return Ready(lambda: step(obj).block_until_ready(), equal)


def update_step(
    subject: ModuleType, case: Case, arrays: list[Any]
) -> tuple[Callable[[Any], Any], Any, Callable[[Any], Any], bool]:
    """A compiled step that returns a new object, its argument, how to read one array, and whether it is right."""
    form = subject.taken_as(case.form)
    obj = form.build(arrays)

    step = subject.jit(user_function(lambda obj: form.build(bumped(form.arrays(obj)))))
    equal = same(form.arrays(step(step(obj))), plus(case, 2))
    equal = equal and same(form.arrays(obj), plus(case, 0))
    return step, obj, form.probe, equal


def _update(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready:
    step, obj, probe, equal = update_step(subject, case, arrays)
    return Ready(lambda: probe(step(obj)).block_until_ready(), equal)


def _chain(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready:
    step, state, probe, equal = update_step(subject, case, arrays)

    def call() -> None:
        nonlocal state
        state = step(state)
        probe(state).block_until_ready()

    return Ready(call, equal)


def _write_back(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready | None:
    form = case.form
    assign = form.assign
    if assign is None:
        return None
    obj = form.build(arrays)

    step = subject.in_place(form, user_function(lambda obj: assign(obj, bumped(form.arrays(obj)))))
    step(obj)
    step(obj)  # a second time, on the known structure
    equal = same(form.arrays(obj), plus(case, 2))

    def call() -> None:
        step(obj)
        form.probe(obj).block_until_ready()

    return Ready(call, equal)


def _differentiated(subject: ModuleType, case: Case) -> Callable[[], Any] | None:
    """What makes a new compiled step that returns a loss with its gradient."""
    form, value_and_grad = subject.taken_as(case.form), getattr(subject, "value_and_grad", None)
    if value_and_grad is None:
        return None

    def loss(obj: Any) -> Any:
        return total([x * x for x in form.arrays(obj)])

    return lambda: subject.jit(user_function(lambda obj: value_and_grad(loss)(obj)))


def _gradient(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready | None:
    make, form = _differentiated(subject, case), subject.taken_as(case.form)
    if make is None:
        return None
    step, obj = make(), form.build(arrays)
    value, gradient = step(obj)
    equal = float(value) == float(sum((v.astype(np.float64) ** 2).sum() for v in case.values()))
    equal = equal and same(form.arrays(gradient), [2 * v for v in case.values()])
    return Ready(lambda: step(obj)[0].block_until_ready(), equal)


def _gradient_trace(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready | None:
    make, obj = _differentiated(subject, case), subject.taken_as(case.form).build(arrays)
    if make is None or not hasattr(make(), "trace"):
        return None

    def call() -> Any:
        return make().trace(obj)  # a new function each time: nothing to find in any cache of traces

    return Ready(call, len(call().jaxpr.jaxpr.outvars) == 1 + case.size)


def _optimizer(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready | None:
    """Steps of Adam by given gradients, state and parameters fed back or changed in place."""
    make, form = getattr(subject, "trained", None), subject.taken_as(case.form)
    if make is None or form.assign is None:
        return None
    ones = [jax.numpy.ones_like(x) for x in arrays]
    step = make(form.build([x + 0 for x in arrays]), form.build(ones), 1e-3)
    step()
    now = form.arrays(step())  # by gradients of one, each step is one learning rate
    pairs = zip(now, case.values(), strict=True)
    equal = all(np.allclose(a, b - 2e-3, rtol=1e-5, atol=1e-5) for a, b in pairs)
    return Ready(lambda: form.probe(step()).block_until_ready(), equal)


def _complete(leaves: list[Any], arrays: list[Any]) -> bool:
    # Orders differ between libraries and a shared array may come more than once.
    return {id(x) for x in leaves if isinstance(x, jax.Array)} == {id(x) for x in arrays}


def _flatten(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready:
    form = subject.taken_as(case.form)
    obj = form.build(arrays)
    flatten = subject.flatten
    return Ready(lambda: flatten(obj), _complete(flatten(obj)[0], arrays))


def _replay(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready:
    form = subject.taken_as(case.form)
    obj = form.build(arrays)
    _, structure = subject.flatten(obj)
    replay = subject.replay
    return Ready(lambda: replay(structure, obj), _complete(list(replay(structure, obj)), arrays))


def _unflatten(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready:
    form = subject.taken_as(case.form)
    leaves, structure = subject.flatten(form.build(arrays))
    unflatten = subject.unflatten
    equal = same(form.arrays(unflatten(structure, leaves)), plus(case, 0))
    return Ready(lambda: unflatten(structure, leaves), equal)


def _partition(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready | None:
    if not hasattr(subject, "partition"):
        return None
    obj, partition = subject.taken_as(case.form).build(arrays), subject.partition
    return Ready(lambda: partition(obj), _complete(jax.tree.leaves(partition(obj)[0]), arrays))


def _combine(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready | None:
    if not hasattr(subject, "combine"):
        return None
    form = subject.taken_as(case.form)
    halves, combine = subject.partition(form.build(arrays)), subject.combine
    return Ready(lambda: combine(*halves), same(form.arrays(combine(*halves)), plus(case, 0)))


def _copy(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready | None:
    if not hasattr(subject, "copy"):
        return None
    form, copy = subject.taken_as(case.form), subject.copy
    obj = form.build(arrays)
    return Ready(lambda: copy(obj), copy(obj) is not obj and same(form.arrays(copy(obj)), plus(case, 0)))


def _equal(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready | None:
    if not hasattr(subject, "equal"):
        return None
    form, equal = subject.taken_as(case.form), subject.equal
    one, other = form.build(arrays), form.build([x + 0 for x in arrays])
    right = bool(equal(one, other)) and not bool(equal(one, form.build(bumped(arrays))))
    return Ready(lambda: bool(equal(one, other)), right)


def _merge(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready | None:
    if not hasattr(subject, "merge"):
        return None
    form, merge = subject.taken_as(case.form), subject.merge
    obj, others = form.build(arrays), [form.build(arrays), form.build(bumped(arrays))]
    equal = same(form.arrays(merge(obj, others[1])), plus(case, 1))

    def call() -> Any:
        others.reverse()  # other arrays each time: nothing is written where they are the same
        return merge(obj, others[0])

    return Ready(call, equal)


def _flat_form(subject: ModuleType, case: Case, arrays: list[Any]) -> Ready | None:
    if not hasattr(subject, "to_dict"):
        return None
    obj, to_dict = subject.taken_as(case.form).build(arrays), subject.to_dict
    return Ready(lambda: to_dict(obj), _complete(list(to_dict(obj)), arrays))


MEASURES = {
    m.name: m
    for m in (
        Measure("first", "first call", _first, once=True),
        Measure("reduce", "reduce to a scalar", _reduce),
        Measure("update", "all updated", _update),
        Measure("chain", "all updated, fed back", _chain),
        Measure("write_back", "changed in place", _write_back),
        Measure("gradient", "loss and gradient", _gradient),
        Measure("gradient_trace", "loss and gradient, traced", _gradient_trace, once=True),
        Measure("optimizer", "update of optax.adam", _optimizer),
        Measure("flatten", "flatten", _flatten),
        Measure("replay", "flatten, known structure", _replay),
        Measure("unflatten", "unflatten", _unflatten),
        Measure("partition", "partition into arrays and the rest", _partition),
        Measure("combine", "combine what partition gave", _combine),
        Measure("copy", "copy", _copy),
        Measure("equal", "equal", _equal),
        Measure("merge", "new arrays into it", _merge),
        Measure("to_dict", "leaves by their paths", _flat_form),
    )
}
