# SPDX-License-Identifier: Apache-2.0
"""Numbers that cannot be symbolic, or not for long; what other code keeps of a symbol; threads, donation, libraries."""

from __future__ import annotations

import collections
import dataclasses
import decimal
import enum
import fractions
import functools
import json
import math
import random
import re
import threading
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from number_values import FLOATS, INTEGERS, same, traces, x

# ---- what cannot be symbolic


def test_what_raises_with_a_symbol_only_is_static_for_good():
    def takes_a_real_int(x: Any, n: Any) -> Any:
        return x, int.__add__(n, 1)

    f = graftax.jit(takes_a_real_int)
    for n in (1, 2, 3, 4):
        assert f(x(), n)[1] == n + 1
    assert traces(f) == 4


def test_an_error_of_the_function_is_its_error_and_no_reason_to_be_static():
    def f(x: Any, n: Any) -> Any:
        if n > 4:
            raise RuntimeError(f"{n} is too many")
        return x * n, 10 / (n - 3)

    jitted = graftax.jit(f)
    for n in (1, 2):
        assert same(jitted(x(), n), f(x(), n))
    for n, error in ((5, RuntimeError), (3, ZeroDivisionError), (6, RuntimeError), (3, ZeroDivisionError)):
        with pytest.raises(error) as raised:
            jitted(x(), n)
        assert error is ZeroDivisionError or str(raised.value) == f"{n} is too many"
    for n in (4, 2, 4, 0, -1):
        assert same(jitted(x(), n), f(x(), n))


def test_what_nobody_needs_raises_as_in_plain_python():
    def f(state: Any, x: Any) -> Any:
        state["n"] = state["m"] / state["r"]
        state["n"] = state["m"]
        return x

    jitted = graftax.jit(f)
    for r in (1.0, 2.0, 3.0):
        jitted({"n": 0, "m": 1, "r": r}, x())
    with pytest.raises(ZeroDivisionError):
        jitted({"n": 0, "m": 1, "r": 0.0}, x())


def test_a_number_whose_value_is_asked_for_again_and_again_is_static():
    f = graftax.jit(lambda x, n: [x] * n, cache_size=50)
    for n in range(1, 12):
        assert len(f(x(), n)) == n
    entries = [entry for entry in f._table.entries.values() if entry.host is not None]
    assert 0 < len(entries) <= 5


def test_numbers_can_be_static():
    f = graftax.jit(lambda x, n: x * n, numbers="static")
    for n in range(4):
        assert f(x(), n)[1] == n
    assert traces(f) == 4
    with pytest.raises(ValueError, match="numbers='some': expected 'symbolic' or 'static'"):
        graftax.jit(lambda x: x, numbers="some")


def test_a_symbol_that_something_keeps_is_its_value():
    held: list[Any] = []

    class Keeper:
        def keep(self, n: Any) -> None:
            held.append(n)

    keeper = graftax.Static(Keeper())
    f = graftax.jit(lambda x, n: (keeper.value.keep(n), x * n)[1])
    for n in (1, 2, 3):
        assert f(x(), n)[1] == n
        assert held[-1] == n and held[-1] + 1 == n + 1 and f"{held[-1]}" == str(n)


def test_a_host_function_sees_the_number_of_the_call():
    calls: list[Any] = []

    def step(x: Any, n: Any) -> Any:
        jax.debug.callback(lambda v: calls.append((n, float(v))), x[1])
        return x * n

    f = graftax.jit(step)
    for n in (1, 2, 3, 2):
        f(x(), n)
        jax.effects_barrier()
    assert calls == [(1, 1.0), (2, 1.0), (3, 1.0), (2, 1.0)]


def test_a_cached_helper_is_given_no_symbol_to_keep():
    import functools

    @functools.lru_cache
    def rate(n: int) -> float:
        return 0.5**n

    f = graftax.jit(lambda x, n: x * rate(n))
    for n in (1, 2, 3, 2):
        assert f(x(), n)[1] == 0.5**n
        assert type(rate(n)) is float and rate(n) == 0.5**n


def test_equal_numbers_of_two_equal_tuples_stay_one_value():
    f = graftax.jit(lambda a, b, x: (a, b, x * a[0] + b[1]))
    for n in (1, 2, 3):
        a, b = (n, 2.0), (n, 2.0)
        assert same(f(a, b, x()), (a, b, x() * n + 2.0))


def test_two_threads_have_their_own_numbers():
    f = graftax.jit(lambda x, n: (x * n, n + 1))
    wrong: list[Any] = []

    def work(start: int) -> None:
        for n in range(start, start + 60):
            out = f(x(), n)
            if out[1] != n + 1 or out[0].tolist() != [0, n, 2 * n]:
                wrong.append((n, out))

    threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and traces(f) <= 12


def test_donated_state_with_a_counter():
    def step(state: Any, x: Any) -> Any:
        state["w"] = state["w"] + x * state["n"]
        state["n"] += 1

    f = graftax.jit(step, donate="state")
    state, plain = {"w": x(), "n": 0}, {"w": x(), "n": 0}
    for _ in range(6):
        f(state, x())
        step(plain, x())
        assert same(state, plain)
    assert traces(f) == 1


def test_donated_state_with_a_counter_behind_an_array_in_two_places():
    def step(state: Any, x: Any) -> Any:
        state["w"] = state["w"] * 2
        state["history"].append(state["w"])
        state["history"].pop(0)
        state["n"] += 1

    def made() -> dict[str, Any]:
        w = x()
        return {"w": w, "history": [w], "n": 0}

    f, state, plain = graftax.jit(step, donate="state"), made(), made()
    for _ in range(4):
        f(state, x())
        step(plain, x())
        assert same(state, plain) and state["history"][0] is state["w"]
    assert traces(f) == 1


def test_numbers_that_changed_are_forwarded_by_value_too():
    f = graftax.jit(lambda box, x: {**box, "n": box["n"] + 1}, mutation="discard")
    for n in (1, 2, 3):
        box = {"n": n, "w": x()}
        assert f(box, x())["n"] == n + 1 and box["n"] == n
    assert traces(f) == 1


def test_a_number_in_the_graph_of_an_nnx_module_and_of_a_train_state():
    nnx = pytest.importorskip("flax.nnx")
    train_state, optax = pytest.importorskip("flax.training.train_state"), pytest.importorskip("optax")
    counter = nnx.Variable(0)

    def count(counter: Any, x: Any) -> Any:
        counter.set_value(counter.get_value() + 1)
        return x * counter.get_value()

    f = graftax.jit(count)
    for n in range(1, 5):
        assert f(counter, x())[1] == n
    assert traces(f) <= 2

    apply = graftax.jit(lambda state, g: state.apply_gradients(grads=g))
    state = train_state.TrainState.create(apply_fn=None, params={"w": x()}, tx=optax.sgd(0.5))
    for n in range(1, 5):
        state = apply(state, {"w": jnp.ones(3)})
        assert int(state.step) == n and state.params["w"][0] == -0.5 * n
    assert traces(apply) <= 2


def test_schedules_of_optax_take_a_counter():
    optax = pytest.importorskip("optax")
    schedules = optax.cosine_decay_schedule(0.1, 100), optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 100)
    f = graftax.jit(lambda n: [schedule(n) for schedule in schedules])
    for n in range(0, 60, 7):
        assert np.allclose(f(n), [schedule(n) for schedule in schedules], rtol=1e-5)
    assert traces(f) == 3  # in Python, one of them compares the counter with the end of its first part


# ---- what reads a number in C


class Level(enum.IntEnum):
    low = 1
    high = 2


class Count(int):
    pass


@dataclasses.dataclass(frozen=True)
class Key:
    n: int


def with_other_numbers(x: Any, n: Any) -> Any:
    return n == Level.high, Level.low != n, n in (Level.low, Level.high), n + Count(2), Count(3) * n, n >= Count(3)


def with_decimals(x: Any, n: Any) -> Any:
    return decimal.Decimal("1.5") == n, n == decimal.Decimal("2.25"), n != fractions.Fraction(1, 2)


def with_a_match(x: Any, n: Any) -> Any:
    match n:
        case Level.high:
            return "high", x * n
        case int() | float():
            return "other", x + n


def as_keys(x: Any, n: Any) -> Any:
    counter = collections.Counter([n, 1, n])
    return {n: x}, {n}, {(n, (1, n)): 2}, frozenset([n + 1]), counter, {Key(n): 1}, {n > 2: n, n // 2: x}


def added_by_sum(x: Any, n: Any) -> Any:
    tenths = [0.1] * 10
    mixed = sum([1e16, n, -1e16, 1.0]), sum([n, 0.1, 0.2, 0.3]), sum(tenths, n), sum(n * k for k in tenths)
    return *mixed, sum([n, *tenths, x]), sum([x, n]), sum([]), sum([(n,), (1,)], ())


def as_a_seed(x: Any, n: Any) -> Any:
    return random.Random(-n).random()


def in_messages(x: Any, n: Any) -> Any:
    texts: list[str] = []
    for wrong in (lambda: n + "a", lambda: list(n), lambda: n(), lambda: "a" + n):
        try:
            wrong()
        except TypeError as error:
            texts.append(str(error))
    return texts, x * n


def types_below(value: Any) -> Any:
    """The types of what is in containers and keys."""
    if isinstance(value, dict):
        return type(value), [(types_below(k), types_below(v)) for k, v in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), [types_below(v) for v in value]
    return type(value), types_below(value.n) if isinstance(value, Key) else None


def test_keys_made_of_a_number_are_plain_numbers_afterwards():
    def f(d, n, x):
        d[n + 1, "a"] = x * n
        d["b", (n, 2)] = n
        return {n, (n, "c")}

    f = graftax.jit(f)
    for n in range(8):
        d: dict[Any, Any] = {}
        found = f(d, n, jnp.ones(2))
        keys = [*d, *found]
        assert list(d) == [(n + 1, "a"), ("b", (n, 2))] and found == {n, (n, "c")}
        flat = [e for key in keys if isinstance(key, tuple) for e in key]
        flat += [e for key in flat if isinstance(key, tuple) for e in key]
        assert {type(e) for e in [*flat, *keys]} <= {int, str, tuple} and type(d["b", (n, 2)]) is int
    assert f.cache_info().misses == 8


OTHERS = (with_other_numbers, with_decimals, with_a_match, as_keys, added_by_sum, as_a_seed, in_messages)


@pytest.mark.quick(4)
@pytest.mark.parametrize("values", [INTEGERS, FLOATS], ids=["int", "float"])
@pytest.mark.parametrize("program", OTHERS)
def test_what_reads_a_number_in_c_finds_what_it_finds_in_plain_python(program: Any, values: Any):
    f = graftax.jit(program)
    for value in values:
        result, expected = f(x(), value), program(x(), value)
        assert repr(result).replace("-0.", "0.") == repr(expected).replace("-0.", "0.")
        assert types_below(result) == types_below(expected)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["a"], meta_fields=["n"])
@dataclasses.dataclass
class WithMeta:
    a: Any
    n: int


def test_a_static_field_gets_a_number_and_no_symbol():
    f = graftax.jit(lambda x, n: WithMeta(x * n, n + 1))
    for n in INTEGERS:
        out = f(x(), n)
        assert type(out.n) is int
        assert out.n == n + 1


def test_a_float_becomes_an_integer_as_jax_makes_it_one():
    f = graftax.jit(lambda n: jnp.asarray(n, jnp.int32))
    for value in (1.0, 2.5, 4.5, 3.9, -2.5):
        assert int(f(value)) == int(value)
    assert traces(f) == 2
    for value in (1900000001.0, 3.0 * (1 - 1e-15)):
        assert int(f(value)) == int(value)
    with pytest.raises(OverflowError):
        f(1e12)


@pytest.mark.parametrize(
    ("program", "value", "text"),
    [
        (lambda x, n: x * n, 2**40, "n was an int that JAX can take, is 1099511627776"),
        (lambda x, n: x * (1 / n), 0, "1 / n was a float, is ZeroDivisionError"),
        (lambda x, n: x * math.sqrt(n), -1, "math.sqrt(n) was a float, is ValueError"),
    ],
)
def test_a_frozen_function_says_which_number_it_cannot_compute(program: Any, value: int, text: str):
    f = graftax.jit(program)
    for n in (1, 2, 3):
        f(x(), n)
    f.freeze()
    with pytest.raises(graftax.GraftaxError, match=re.escape(text)):
        f(x(), value)


def test_behind_the_first_decision_that_differs_nothing_is_computed():
    """For such numbers the code goes another way: `2**n` would take for ever."""
    f = graftax.jit(lambda x, n: x * 2 if n < 99 and 2**n < 2**99 else x)
    for n in (1, 2, 3):
        f(x(), n)
    f.freeze()
    with pytest.raises(graftax.GraftaxError, match="n < 99 was True, is False") as error:
        f(x(), 100)
    assert "2 ** n" not in str(error.value)


# `Union[...]` of today's Python is another class than that of `typing` before 3.14.
NUMBER: Any = typing.Union[int, float]  # noqa: UP007


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "program, traces",
    [
        (lambda x, n: x * n if isinstance(n, NUMBER) else x * 3, 2),
        (lambda x, n: x * n if n < 3 or isinstance(n, NUMBER) else x * 3, 3),  # met in a trace with symbols
    ],
)
def test_a_number_that_is_asked_for_a_union_of_types_is_symbolic(program: Any, traces: int):
    f = graftax.jit(program)
    for n in (1, 2, 3, 4, 1):
        assert same(f(x(), n), program(x(), n))
    assert f.cache_info().traces == traces


def test_code_that_cannot_be_told_of_symbols_has_static_numbers_once_it_is_met():
    def program(x: Any, n: int) -> Any:
        return json.dumps({"n": n}) if n > 2 else "", x * n

    f = graftax.jit(program)
    for n in (1, 2, 3, 4, 1):
        assert same(f(x(), n), program(x(), n))


def test_a_serializer_in_c_is_given_numbers():
    def note(n):
        return json.dumps({"n": n}, default=str)

    f = graftax.jit(lambda x, n: (x * n, note(n)))
    for n in range(4):
        assert f(jnp.ones(1), n)[1] == note(n)


@pytest.mark.parametrize("where", ["all", "argument", "pattern"])
def test_numbers_beside_shardings_of_the_arguments(where):
    sharding = jax.sharding.NamedSharding(jax.make_mesh((1,), ("d",)), jax.sharding.PartitionSpec("d"))
    options = {"all": sharding, "argument": (None, sharding), "pattern": {"state[w]": sharding, "**": None}}

    def step(state, y):
        state["step"] += 1
        state["w"] = state["w"] + y * 0.9 ** state["step"]
        return state["w"]

    f = graftax.jit(step, in_shardings=options[where])
    plain, state = {"w": jnp.ones(4), "step": 0}, {"w": jnp.ones(4), "step": 0}
    for _ in range(5):
        np.testing.assert_allclose(f(state, jnp.ones(4)), step(plain, jnp.ones(4)), rtol=1e-6)
    assert state["step"] == 5 and f.cache_info().traces == 2


@pytest.mark.quick(20)  # a case takes milliseconds
@pytest.mark.parametrize(
    "ask",
    [
        lambda n, x: x * hasattr(n, "__array__"),
        lambda n, x: x * (n.__add__(2.0) is NotImplemented),
        lambda n, x: x * n.__mul__(3),
        lambda n, x: x * (getattr(n, "__jax_array__", None) is None),
    ],
)
def test_what_a_number_has_not_is_answered_as_by_a_number(ask):
    f, x = graftax.jit(ask), jnp.ones(2)
    for n in range(1, 5):
        assert f(n, x).tolist() == ask(n, x).tolist()


def test_a_program_that_cannot_be_compiled_with_a_symbol_is_compiled_without():
    """JAX keeps what it traced of a rule, and what that closes over: a symbol's array would be another trace's."""

    class Scale:
        by = 2.0

    @jax.custom_jvp
    def g(x):
        return x * 1.0

    @g.defjvp
    def rule(primals, tangents):
        return g(*primals), tangents[0] * Scale.by

    f = graftax.jit(jax.grad(lambda x: jax.jit(lambda x: g(x))(x).sum()))
    for by in (2.0, 5.0, 7.0, 5.0):
        Scale.by = by
        assert f(jnp.ones(3)).tolist() == [by] * 3


@pytest.mark.parametrize("name", ["_value", "_trace", "aval", "dtype", "shape", "item", "dimension_as_value"])
def test_a_number_has_no_attribute_of_an_array(name: str):
    f = graftax.jit(lambda x, n: (hasattr(n, name), x * n))
    assert [f(x(), n)[0] for n in (1, 2, 3)] == [False] * 3
