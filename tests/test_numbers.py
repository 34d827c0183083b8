# SPDX-License-Identifier: Apache-2.0
"""Python numbers that change between calls: compiled once more, computed on the host, equal to plain Python."""

from __future__ import annotations

import collections
import copy
import dataclasses
import decimal
import enum
import fractions
import functools
import json
import math
import pickle
import random
import re
import threading
from math import exp
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax

INTEGERS = (1, 2, 3, 7, 8, 4, 5)
FLOATS = (0.5, 1.5, 2.25, 3.5)
MANY = None  # the code asks for the value: one trace a value, as with static numbers


def x() -> jax.Array:
    return jnp.arange(3.0)


def traces(f: Any) -> int:
    return f.cache_info().traces


def same(one: Any, other: Any) -> bool:
    """Equal structures, numbers of equal type and value, arrays of equal type and bits."""
    leaves, structure = jax.tree.flatten(one)
    others, other_structure = jax.tree.flatten(other)
    return structure == other_structure and all(map(same_leaf, leaves, others))


def same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, jax.Array):
        typed = (other.shape, other.dtype, other.weak_type) == (one.shape, one.dtype, one.weak_type)
        return isinstance(other, jax.Array) and typed and np.asarray(one).tobytes() == np.asarray(other).tobytes()
    if isinstance(one, np.ndarray | np.generic):
        return type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and repr(one) == repr(other)


# ---- what code does with a number: (program, traces for INTEGERS, traces for FLOATS); None: one a value


def arithmetic(x: Any, n: Any) -> Any:
    return n + 1, 2 - n, n * n, n / 3, n // 3, n % 3, -n, abs(-n), +n, n**2, 2**n, divmod(n, 4), divmod(9, n)


def bits(x: Any, n: Any) -> Any:
    return n << 2, n >> 1, n & 6, n | 1, n ^ 5, ~n, 3 & n


def rounded(x: Any, n: Any) -> Any:
    return round(n / 3), round(n / 3, 2), math.floor(n / 2), math.ceil(n / 2), math.trunc(n / 2)


def with_arrays(x: Any, n: Any) -> Any:
    return x * n, n * x, x + n, n - x, x / n, x % n, x < n, n >= x, x == n


def in_functions(x: Any, n: Any) -> Any:
    made = jnp.asarray(n), jnp.array([n, 1.0]), jnp.full((2,), n), jnp.full_like(x, n), jnp.float32(n)
    return *made, jnp.where(x > 1, n, x), jnp.maximum(x, n), jnp.clip(x, 0, n), jnp.stack([x[0], n]), x.at[0].set(n)


def schedule(x: Any, n: Any) -> Any:
    return x * (0.1 * 0.99**n), x * (0.5 * (1 + math.cos(math.pi * n / 10))), x * (1 - float(n) / 10), x * exp(-n)


def compared(x: Any, n: Any) -> Any:
    return (x * 2 if n > 4 else x), n in (1, 2.25), min(n, 4), max(n, 2), sorted([n, 2, 4])


def as_truth(x: Any, n: Any) -> Any:
    return (x if n else -x), not n, bool(n), n and 1


def in_a_loop(x: Any, n: Any) -> Any:
    for i in range(3):
        x = x * (n + i)
    return x


def through_jax(x: Any, n: Any) -> Any:
    scanned = jax.lax.scan(lambda c, v: (c + v * n, c), 0.0, x)
    chosen = jax.lax.cond(x[0] < 1, lambda a: a * n, lambda a: a, x)
    return (
        jax.grad(lambda v: (v * n).sum())(x),
        jax.vmap(lambda v: v * n)(x),
        jax.jit(lambda a, b: a * b)(x, n),
        scanned,
        chosen,
    )


def through_graftax(x: Any, n: Any) -> Any:
    def loss(model: Any) -> Any:
        model["n"] += 1
        return (model["w"] * model["n"]).sum()

    model = {"w": x, "n": n}
    gradients = graftax.grad(loss)(model)
    scanned = graftax.scan(lambda c, v: (c + v * n, c), jnp.zeros(()), x)
    return gradients["w"], model["n"], scanned, graftax.vmap(lambda v: v * n)(x), graftax.jit(lambda a: a * n)(x)


def in_a_carry(x: Any, n: Any) -> Any:
    return graftax.scan(lambda c, v: ((c[0] + v, c[1]), v), (jnp.zeros(()), n), x)


def keys(x: Any, n: Any) -> Any:
    return jax.random.normal(jax.random.fold_in(jax.random.key(0), n), (2,))


def its_type(x: Any, n: Any) -> Any:
    return type(n) is int, type(n).__name__, isinstance(n, int), isinstance(n, float), isinstance(n, bool), x


def copied(x: Any, n: Any) -> Any:
    return copy.copy(n) + 1, copy.deepcopy([n])[0] * 2, x


def exponent(x: Any, n: Any) -> Any:
    return x**n


def a_shape(x: Any, n: Any) -> Any:
    return jnp.zeros(int(n)), [x * i for i in range(int(n))]


def an_index(x: Any, n: Any) -> Any:
    return [10, 20, 30, 40, 50, 60, 70, 80, 90][int(n)], x


def text(x: Any, n: Any) -> Any:
    return f"{n}", f"{n:.1f}", str(n), "%s" % n, x  # noqa: UP031


def a_key(x: Any, n: Any) -> Any:
    return {float(n): x, -1.0: n + 1}, {n, -1.0} == {n, -1}


def in_numpy(x: Any, n: Any) -> Any:
    return np.float32(2) * n, np.arange(3) * n, np.array([n, 1.0]), np.sqrt(n), x


def with_complex(x: Any, n: Any) -> Any:
    return n * 1j, complex(n), (-1.5) ** (n + 0.5), x


def in_json(x: Any, n: Any) -> Any:
    return json.dumps({"n": n}), pickle.loads(pickle.dumps(n)), x


PROGRAMS = [
    (arithmetic, 2, 2),
    (bits, 2, None),
    (rounded, 2, 2),
    (with_arrays, 2, 2),
    (in_functions, 2, 2),
    (schedule, 2, 2),
    (compared, 4, MANY),
    (as_truth, 2, 2),
    (in_a_loop, 2, 2),
    (through_jax, 2, 2),
    (through_graftax, 2, 2),
    (in_a_carry, 2, 2),
    (keys, 2, 2),
    (its_type, 2, 2),
    (copied, 2, 2),
    (exponent, MANY, MANY),
    (a_shape, MANY, MANY),
    (an_index, MANY, MANY),
    (text, MANY, MANY),
    (a_key, MANY, MANY),
    (in_numpy, MANY, MANY),
    (with_complex, MANY, MANY),
    (in_json, MANY, MANY),
]


@pytest.mark.parametrize(("program", "count", "values"), [
    *((program, count, INTEGERS) for program, count, _ in PROGRAMS),
    *((program, count, FLOATS) for program, _, count in PROGRAMS),
])  # fmt: skip
def test_a_number_that_changes_gives_what_plain_python_gives(program: Any, count: int | None, values: Any):
    f = graftax.jit(program, warn_impure=False)
    f.clear_cache()  # a table belongs to the function
    for value in (*values, values[0], values[-1]):
        try:
            expected = program(x(), value)
        except TypeError as error:
            with pytest.raises(type(error)):
                f(x(), value)
            return
        assert same(f(x(), value), expected), value
    assert traces(f) == (len(values) if count is None else count)


# ---- programs


class Trainer:
    def __init__(self) -> None:
        self.w, self.step, self.base, self.best = jnp.ones(3), 0, 0.125, math.inf

    def train(self, x: Any) -> Any:
        rate = self.base * 0.5**self.step
        if self.step % 10 == 0:
            self.w = self.w * 2
        self.w = self.w - rate * x
        self.step += 1
        self.best = min(self.best, 100.0 / self.step)
        return self.step, rate


def test_a_trainer_that_counts_compiles_three_times():
    f = graftax.jit(Trainer.train)
    plain, jitted = Trainer(), Trainer()
    for _ in range(45):
        assert same(f(jitted, x()), plain.train(x()))
        assert same([jitted.w, jitted.step, jitted.best], [plain.w, plain.step, plain.best])
    assert type(jitted.step) is int and type(jitted.best) is float
    assert traces(f) == 3


def test_two_numbers_that_change_at_different_times():
    f = graftax.jit(lambda x, state: (x * state["a"] + state["b"], state["a"] * state["b"]))
    for a, b in ((1, 2.0), (3, 2.0), (4, 2.0), (4, 5.0), (6, 7.0), (1, 2.0), (3, 2.0)):
        assert same(f(x(), {"a": a, "b": b}), (x() * a + b, a * b))
    assert traces(f) == 3  # static, one symbol, two symbols


def test_closures_globals_and_attributes_count_too():
    class Counter:
        n = 0

    made = Counter()
    made.n = 1
    rate = 0.5

    def step(x: Any) -> Any:
        nonlocal rate
        rate = rate / 2
        made.n += 1
        return x * rate

    f = graftax.jit(step)
    for i in range(6):
        assert f(x()).tolist() == (x() * 0.5 ** (i + 2)).tolist()
        assert (made.n, rate) == (i + 2, 0.5 ** (i + 2))
    assert traces(f) == 2


def test_an_object_that_is_given_back_keeps_its_number():
    f = graftax.jit(lambda box, x: (box, box["n"], [box["n"], box["n"] + 1], x))
    for n in (10**6, 10**6 + 1, 10**6 + 2):
        box = {"n": n}
        out = f(box, x())
        assert out[0] is box and out[1] is n and out[2][0] is n and out[2][1] == n + 1
    assert traces(f) == 2


def test_one_family_of_structures_does_not_know_the_numbers_of_another():
    f = graftax.jit(lambda x, a: [x * v for v in a])
    for values in ([1], [2], [1, 2], [3], [4, 5], [6, 7]):
        assert same(f(x(), values), [x() * v for v in values])
    assert traces(f) == 4


def test_int_and_float_and_bool_in_one_place_are_three_structures():
    f = graftax.jit(lambda x, n: (x * n, n))
    for n in (1, True, 1.0, 2, 2.0, False, 3, 3.5):
        assert same(f(x(), n), (x() * n, n)), n
    assert traces(f) == 6  # a static one of int and float, both bools, a symbol of int and of float


@pytest.mark.parametrize("value", [-0.0, 0.0, math.nan, math.inf, -math.inf, 1e300, 5e-324])
def test_special_floats(value: float):
    f = graftax.jit(lambda x, n: (x * n, n, n + 1, n == 0, math.copysign(1, n), x + 1 if n > 0 else x))
    for n in (1.0, 2.0, value, 3.0, value):
        expected = x() * n, n, n + 1, n == 0, math.copysign(1, n), x() + 1 if n > 0 else x()
        assert same(f(x(), n), expected), n


def test_a_value_that_was_asked_for_tells_zeros_apart():
    f = graftax.jit(lambda n, x: (str(n), x))
    for n in (1.0, 0.0, -0.0, math.nan, 0.0, -0.0):
        assert f(n, x())[0] == str(n)


def test_integers_that_jax_cannot_take_work_as_long_as_they_meet_no_array():
    f = graftax.jit(lambda x, n: (n + 1, x))
    for n in (1, 2**40, 2**70, -(2**80), 3):
        assert f(x(), n)[0] == n + 1
    assert traces(f) == 2
    g = graftax.jit(lambda x, n: x * n)
    assert [g(x(), n)[1] for n in (1, 2, 3)] == [1, 2, 3]
    with pytest.raises(OverflowError):
        g(x(), 2**40)
    assert g(x(), 5)[1] == 5


def test_settings_of_jax_are_those_of_the_call():
    f = graftax.jit(lambda x, n: x * n)
    for n in (1, 2):
        f(x(), n)
    with jax.enable_x64(True):
        for n in (3, 2**40):
            assert int(f(jnp.arange(3), n)[1]) == n
    assert f(x(), 4)[1] == 4


@pytest.mark.parametrize("n", [300, -1, 70000])
def test_an_integer_that_does_not_fit_a_dtype_is_the_error_that_it_is_in_jax(n: int):
    f = graftax.jit(lambda n: jnp.asarray(n, jnp.uint8))
    for value in (1, 2, 3):
        assert f(value) == value
    with pytest.raises(OverflowError):
        jnp.asarray(n, jnp.uint8)
    with pytest.raises(OverflowError):
        f(n)
    assert f(4) == 4


def test_more_inputs_than_were_expected():
    def f(x: Any, n: Any) -> Any:
        return [x * (n + i) for i in range(50)], [x * (n / (i + 1)) for i in range(50)]

    jitted = graftax.jit(f)
    for n in (1, 2, 3, 4):
        assert same(jitted(x(), n), f(x(), n))
    assert traces(jitted) <= 3


def test_other_shapes_of_one_entry():
    f = graftax.jit(lambda x, n: (x * n if x.shape[0] > 2 else x / (n + 1), n * x.shape[0]))
    for n, size in ((1, 3), (2, 3), (3, 3), (4, 2), (5, 2), (6, 3), (7, 2), (8, 4)):
        value = jnp.arange(1.0, size + 1)
        assert same(f(value, n), (value * n if size > 2 else value / (n + 1), n * size))
    assert traces(f) == 4  # static, and one for each of three shapes


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
    with pytest.raises(ValueError, match="numbers='some': expected one of 'symbolic', 'static'"):
        graftax.jit(lambda x: x, numbers="some")


def test_a_symbol_that_something_keeps_is_its_value():
    kept: list[Any] = []

    class Keeper:
        def keep(self, n: Any) -> None:
            kept.append(n)

    keeper = graftax.Static(Keeper())
    f = graftax.jit(lambda x, n: (keeper.value.keep(n), x * n)[1])
    for n in (1, 2, 3):
        assert f(x(), n)[1] == n
        assert kept[-1] == n and kept[-1] + 1 == n + 1 and f"{kept[-1]}" == str(n)


def test_a_host_function_sees_the_number_of_the_call():
    seen: list[Any] = []

    def step(x: Any, n: Any) -> Any:
        jax.debug.callback(lambda v: seen.append((n, float(v))), x[1])
        return x * n

    f = graftax.jit(step)
    for n in (1, 2, 3, 2):
        f(x(), n)
        jax.effects_barrier()
    assert seen == [(1, 1.0), (2, 1.0), (3, 1.0), (2, 1.0)]


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
    assert traces(f) == 2


def test_numbers_that_changed_are_forwarded_by_value_too():
    f = graftax.jit(lambda box, x: {**box, "n": box["n"] + 1}, mutation="discard")
    for n in (1, 2, 3):
        box = {"n": n, "w": x()}
        assert f(box, x())["n"] == n + 1 and box["n"] == n
    assert traces(f) == 2


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
    found: list[str] = []
    for wrong in (lambda: n + "a", lambda: list(n), lambda: n(), lambda: "a" + n):
        try:
            wrong()
        except TypeError as error:
            found.append(str(error))
    return found, x * n


def types_below(value: Any) -> Any:
    """The types of what is in containers and keys."""
    if isinstance(value, dict):
        return type(value), [(types_below(k), types_below(v)) for k, v in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), [types_below(v) for v in value]
    return type(value), types_below(value.n) if isinstance(value, Key) else None


OTHERS = (with_other_numbers, with_decimals, with_a_match, as_keys, added_by_sum, as_a_seed, in_messages)


@pytest.mark.parametrize("values", [INTEGERS, FLOATS], ids=["int", "float"])
@pytest.mark.parametrize("program", OTHERS)
def test_what_reads_a_number_in_c_finds_what_it_finds_in_plain_python(program: Any, values: Any):
    f = graftax.jit(program)
    for value in values:
        found, expected = f(x(), value), program(x(), value)
        assert repr(found).replace("-0.", "0.") == repr(expected).replace("-0.", "0.")
        assert types_below(found) == types_below(expected)


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
