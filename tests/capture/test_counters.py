# SPDX-License-Identifier: Apache-2.0
"""Numbers that code computes anew from themselves are symbolic from the first call on, where the body runs once."""

import collections
import copy
import dataclasses
import functools
import math
import operator
import reprlib
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import graftax

OUTSIDE: list[str] = []


class Counted:
    def __init__(self):
        self.w, self.steps, self.rate = jnp.ones(3), 0, 1.0

    def advance(self):
        self.steps += 1

    @property
    def decayed(self):
        return self.rate * 0.5


def by_attribute(model):
    model.steps += 1
    model.w = model.w + model.steps


def by_assignment(model):
    model.w = model.w * 2
    model.steps = model.steps + 1


def by_method(model):
    model.advance()
    model.w = model.w - model.steps


def by_helper(model):
    by_attribute(model)


def of_a_float(model):
    model.rate *= 0.5
    model.w = model.w * model.decayed


def with_a_branch(model):
    model.steps += 1
    if model.steps > 2:
        model.w = model.w * 3


def counts_down(model):
    left = Counted()
    left.steps = 3
    while left.steps:
        left.steps -= 1
        model.w = model.w + 1
    model.steps += left.steps + 1


def by_setattr(model):
    setattr(model, "steps", model.steps + 1)  # noqa: B010
    model.w = model.w * model.steps


def calls(f, count=5):
    model, results = Counted(), []
    for _ in range(count):
        f(model)
        results.append((model.w.tolist(), model.steps, model.rate, type(model.steps), type(model.rate)))
    return results


@pytest.mark.parametrize("f", [by_attribute, by_assignment, by_method, by_helper, by_setattr, of_a_float, counts_down])
def test_a_counter_compiles_once(f):
    jitted = graftax.jit(f)
    assert calls(jitted) == calls(f)
    assert jitted.cache_info().traces == 1


def test_a_counter_that_decides_compiles_once_for_each_answer():
    jitted = graftax.jit(with_a_branch)
    assert calls(jitted) == calls(with_a_branch)
    assert jitted.cache_info().traces == 2


def test_a_counter_in_a_dict():
    def train(state, x):
        state["steps"] += 1
        return x * state["steps"]

    def assign(state, x):
        state["steps"] = state["steps"] + 1
        return x * state["steps"]

    for f in (train, assign):
        jitted, state, plain = graftax.jit(f), {"steps": 0}, {"steps": 0}
        for _ in range(4):
            assert jitted(state, jnp.ones(2)).tolist() == f(plain, jnp.ones(2)).tolist()
        assert state == plain and jitted.cache_info().traces == 1


def test_a_number_in_a_dict_that_changes_nothing_but_others_is_no_counter():
    def scale(state):
        state["w"] = state["w"] * state["rate"]

    state = {"w": jnp.ones(2), "rate": 2}
    assert "symbolic" not in str(graftax.show(graftax.jit(scale), state))


def test_a_counter_in_a_closure():
    counted = Counted()

    @graftax.jit
    def closed_over(x):
        counted.steps += 1
        return x * counted.steps

    assert [closed_over(jnp.ones(())).item() for _ in range(4)] == [1, 2, 3, 4]
    assert counted.steps == 4


@dataclasses.dataclass
class Fields:
    w: jax.Array
    steps: int = 0
    sizes: list[int] = dataclasses.field(default_factory=lambda: [2, 0])


@dataclasses.dataclass(slots=True, order=True)
class Slots:
    w: jax.Array
    steps: int = 0
    sizes: list[int] = dataclasses.field(default_factory=lambda: [2, 0])

    @reprlib.recursive_repr()
    def __repr__(self):
        return f"Slots({self.steps})"


@pytest.mark.parametrize("cls", [Fields, Slots])
def test_a_counter_in_a_dataclass_and_in_a_list(cls):
    def step(state):
        state.steps += 1
        state.sizes[1] += state.steps
        state.w = state.w[: state.sizes[0]] * state.sizes[1]

    step.of = cls  # shares no program with the other
    jitted, state, plain = graftax.jit(step), cls(jnp.ones(2)), cls(jnp.ones(2))
    for _ in range(4):
        jitted(state), step(plain)
        assert (state.steps, state.sizes, state.w.tolist()) == (plain.steps, plain.sizes, plain.w.tolist())
    assert jitted.cache_info().traces == 1


def test_a_counter_in_a_list_that_is_captured_and_in_a_variable():
    def made():
        counts, n = [0], 0

        def step(x):
            nonlocal n
            n += 1
            counts[0] += 2
            return x * n + counts[0], n, counts

        return step

    plain, jitted = made(), graftax.jit(made())
    for _ in range(4):
        x = jnp.float32(3)
        assert jitted(x) == plain(x)
    assert jitted.cache_info().traces == 1


def test_an_index_of_another_list_costs_nothing():
    @graftax.jit
    def step(shape, x):
        sizes = [1, 2]
        sizes[0] += 1
        return jnp.zeros(shape[0]) + x[: sizes[0]].sum(), shape[0]

    for _ in range(3):
        result, size = step([3, 4], jnp.ones(4))
        assert result.tolist() == [2, 2, 2] and size == 3 and type(size) is int
    assert step.cache_info().traces == 1


def test_a_number_that_is_only_read_is_part_of_the_program():
    jitted = graftax.jit(lambda model, x: x[: model.steps] * model.rate)
    model = Counted()
    model.steps = 2
    assert jitted(model, jnp.ones(3)).shape == (2,)
    assert "symbolic" not in str(graftax.show(jitted, model, jnp.ones(3)))


def roots(model):
    OUTSIDE.append("ran")
    model.steps += 1
    model.w = model.w * math.sqrt(model.steps) + float(model.steps)


def catches(model):
    OUTSIDE.append("ran")
    model.steps += 1
    try:
        model.w = model.w[model.steps]
    except TypeError:
        model.w = model.w * 0


def asks_for_the_type(model):
    OUTSIDE.append("ran")
    model.steps += 1
    model.w = model.w * (2 if type(model.steps) is int else 3)


def as_float(f):
    @functools.wraps(f)
    def wrapper(model):
        OUTSIDE.append("ran")
        f(model)
        model.w = model.w * float(model.steps)

    return wrapper


def as_a_dict(model):
    OUTSIDE.append("ran")
    model.steps += 1
    state = Fields(model.w, model.steps)
    model.w = model.w * dataclasses.asdict(state)["steps"]


@as_float
def wrapped(model):
    model.steps += 1


class Asked:
    """What it has is made by its own code, which nobody but the function may run."""

    def __getattr__(self, name):
        OUTSIDE.append(name)
        raise RuntimeError(name)

    def __call__(self, x):
        return x * 2


ASKED = Asked()


def with_an_object_that_answers(model):
    model.steps += 1
    model.w = ASKED(model.w)


def test_what_is_looked_at_runs_no_code():
    OUTSIDE.clear()
    assert calls(graftax.jit(with_an_object_that_answers), 2) == calls(with_an_object_that_answers, 2)
    assert not OUTSIDE


@pytest.mark.parametrize("f", [roots, catches, asks_for_the_type, as_a_dict, wrapped])
def test_where_symbols_would_make_the_trace_begin_anew_the_body_runs_once_in_the_first_call(f):
    OUTSIDE.clear()
    model, plain = Counted(), Counted()
    graftax.jit(f, warn_impure=False)(model)
    assert OUTSIDE == ["ran"]
    f(plain)
    assert model.w.tolist() == plain.w.tolist() and model.steps == plain.steps


class Named(NamedTuple):
    w: jax.Array
    steps: int


@dataclasses.dataclass(frozen=True)
class Frozen:
    w: jax.Array
    steps: int


def in_a_dict():
    return {"w": jnp.ones(2), "steps": 0}


def by_update(state):
    state.update(steps=state["steps"] + 1)
    return state, state["w"] * state["steps"]


def by_a_union_in_place(state):
    state |= {"steps": state["steps"] + 1}
    return state, state["w"] * state["steps"]


def by_get(state):
    steps = state.get("steps", 0)
    steps = steps + 1
    state["steps"] = steps
    return state, state["w"] * steps


def by_a_new_dict(state):
    return {**state, "steps": state["steps"] + 1}, state["w"] * state["steps"]


def by_a_union(state):
    return state | {"steps": state["steps"] + 1}, state["w"] * state["steps"]


def by_the_dict_of_an_object(state):
    state.__dict__.update(steps=state.steps + 1)
    return state, state.w * state.steps


def by_a_method_that_replaces(state):
    state = state._replace(steps=state.steps + 1)
    return state, state.w * state.steps


def by_replace(state):
    state = dataclasses.replace(
        state,
        w=state.w * 2,
        steps=state.steps + 1,
    )
    return state, state.w * state.steps


def by_a_named_tuple(state):
    return Named(state.w * 2, state.steps + 1), state.w * state.steps


def by_a_dataclass(state):
    return Frozen(state.w * 2, steps=state.steps + 1), state.w * state.steps


def by_a_function(state):
    state.steps = next_one(state.steps)
    return state, state.w * state.steps


def next_one(n):
    return n + 1


def in_a_result(state):
    w, steps = state
    return (w * 2, steps + 1), w * steps


def in_a_list(state):
    return [state[0] * 2, state[1] + 1], state[0] * state[1]


def in_an_item_with_a_number_as_its_key(state):
    state[1] += 1
    return state, state[0] * state[1]


def in_a_loop(state):
    for _ in range(3):
        steps = state.steps
        if steps > -1:
            steps += 1
        state.steps = steps
    return state, state.w * state.steps


class Tallied:
    def __init__(self):
        self.w, self.counts = jnp.ones(2), collections.Counter(seen=0)


def by_an_update_of_a_tally(state):
    state.counts.update(seen=2)
    state.counts.update(["seen", "seen"])
    state.counts.subtract(seen=1)
    return state, state.w * state.counts["seen"]


def by_vars(state):
    vars(state)["steps"] += 1
    return state, state.w * state.steps


def by_setting_a_place(state):
    state = graftax.at(state)["steps"].set(state.steps + 1)
    return state, state.w * state.steps


def by_setting_a_path(state):
    state = graftax.at(state)["[0].steps"].set(state[0].steps + 1)
    return state, state[0].w * state[0].steps


def by_setting_what_a_function_returns(state):
    state = graftax.at(state)[lambda s: s.steps].set(state.steps + 1)
    return state, state.w * state.steps


def by_a_function_of_a_place(state):
    state[0] = graftax.at(state[0])["steps"].apply(lambda n: n + 1)
    return state, state[0].w * state[0].steps


def by_an_update_of_a_place(state):
    graftax.at(state)["steps"].update(state.steps + 1)
    return state, state.w * state.steps


def by_setattr_and_getattr(state):
    name = "steps"
    setattr(state, name, getattr(state, name) + 1)
    return state, state.w * state.steps


def by_an_operator(state):
    state.steps = operator.iadd(state.steps, 1)
    return state, state.w * state.steps


def by_copy_replace(state):
    state = copy.replace(state, steps=state.steps + 1)  # pyright: ignore[reportAttributeAccessIssue]
    return state, state.w * state.steps


def by_a_condition(state):
    state.steps = state.steps + 1 if state.steps < 9 else 0
    return state, state.w * state.steps


def by_a_variable_of_two_branches(state):
    if state.steps < 9:
        steps = state.steps + 1
    else:
        steps = 0
        state.w = state.w * 0
    state.steps = steps
    return state, state.w * state.steps


def in_nested_lists(state):
    state[2][0]["n"][1] += 1
    return state, state[0] * state[2][0]["n"][1]


def in_nested_tuples(state):
    w, (a, (b, n)) = state
    return (w, (a, (b, n + 1))), w * n


SPELLINGS = [
    *((Counted, f) for f in (by_vars, by_setting_a_place, by_setting_what_a_function_returns, by_an_update_of_a_place)),
    *((Counted, f) for f in (by_setattr_and_getattr, by_an_operator, by_a_condition, by_a_variable_of_two_branches)),
    *((lambda: [Counted()], f) for f in (by_setting_a_path, by_a_function_of_a_place)),
    (Tallied, by_an_update_of_a_tally),
    (lambda: [jnp.ones(2), 0, [{"n": [3, 4]}]], in_nested_lists),
    (lambda: (jnp.ones(2), (1, (2, 0))), in_nested_tuples),
    *((in_a_dict, f) for f in (by_update, by_a_union_in_place, by_get, by_a_new_dict, by_a_union)),
    *((Counted, f) for f in (by_the_dict_of_an_object, by_a_function, in_a_loop)),
    (functools.partial(Named, jnp.ones(2), 0), by_a_method_that_replaces),
    (functools.partial(Named, jnp.ones(2), 0), by_a_named_tuple),
    (functools.partial(Frozen, jnp.ones(2), 0), by_replace),
    (functools.partial(Frozen, jnp.ones(2), 0), by_a_dataclass),
    (lambda: (jnp.ones(2), 0), in_a_result),
    (lambda: [jnp.ones(2), 0], in_a_list),
    (lambda: {0: jnp.ones(2), 1: 0}, in_an_item_with_a_number_as_its_key),
]


if sys.version_info >= (3, 13):
    SPELLINGS.append((functools.partial(Named, jnp.ones(2), 0), by_copy_replace))


@pytest.mark.parametrize("make, f", SPELLINGS, ids=[f.__name__ for _, f in SPELLINGS])
def test_a_counter_that_is_handed_on_under_its_name_compiles_once(make, f):
    jitted, state, plain = graftax.jit(f), make(), make()
    for _ in range(4):
        (state, result), (plain, expected) = jitted(state), f(plain)
        assert result.tolist() == expected.tolist()
        assert graftax.equal(state, plain)
    assert jitted.cache_info().traces == 1


def test_a_parameter_that_is_returned_one_higher_compiles_once():
    @graftax.jit
    def step(w, n, *, total):
        return w * n, [n + 1, {"sum": total + 3}]

    w, n, total = jnp.ones(2), 1, 0
    for expected in (1, 2, 6, 24):
        w, (n, sums) = step(w, n, total=total)
        total = sums["sum"]
        assert w.tolist() == [expected] * 2 and type(n) is int and type(total) is int
    assert (n, total) == (5, 12)
    assert step.cache_info().traces == 1


def test_a_parameter_that_only_scales_is_part_of_the_program():
    jitted = graftax.jit(lambda w, rate: (w * rate, {"rate": rate}))
    assert "symbolic" not in str(graftax.show(jitted, jnp.ones(2), 2))
    assert jitted(jnp.ones(2), 2)[1] == {"rate": 2}


def test_a_method_of_a_library_that_replaces_compiles_once():
    struct = pytest.importorskip("flax.struct")

    @struct.dataclass
    class State:
        w: jax.Array
        steps: int

    @graftax.jit
    def step(state):
        return state.replace(w=state.w * 2, steps=state.steps + 1)

    state = State(jnp.ones(2), 0)
    for _ in range(3):
        state = step(state)
    assert state.steps == 3 and state.w.tolist() == [8, 8]
    assert step.cache_info().traces == 1
