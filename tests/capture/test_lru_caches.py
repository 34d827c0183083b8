# SPDX-License-Identifier: Apache-2.0
"""What `functools.cache` gives out is the caller's own: what changes there is seen, and each call changes it as plain
Python does. A cache that a trace would fill is filled by plain Python."""

from __future__ import annotations

import contextvars
import functools
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from graftax._capture import cache_layout
from programs import module

Deco = Callable[[Callable[..., Any]], Any]
CACHES: list[Deco] = [functools.cache, functools.lru_cache(8)]


class Settings:
    def __init__(self) -> None:
        self.rate, self.steps = 2.0, 0


RATE = {"k": 2.0}


@functools.lru_cache(8)
def times_rate(n: int) -> float:
    return n * RATE["k"]


class Net:
    def __init__(self) -> None:
        self.w, self.inner = jnp.zeros(2), Settings()


def plain(f: Any) -> Any:
    return f


def a_setting_changes(jit: Any, deco: Deco) -> Any:
    settings = deco(lambda: Settings())
    f, x = jit(lambda x: x * settings().rate), jnp.ones(2)
    yield f(x)
    settings().rate = 5.0
    yield f(x)
    settings.cache_clear()
    yield f(x)
    settings().rate = 7.0
    yield f(x)


def a_counter_counts(jit: Any, deco: Deco) -> Any:
    settings, scale = deco(lambda: Settings()), {"k": 1.0}

    def helper(x: Any) -> Any:
        return x * scale["k"]

    def step(x: Any) -> Any:
        settings().steps += 1
        return helper(x)

    f = jit(step)
    for _ in range(3):
        yield f(jnp.ones(2)), settings().steps


def items_by_key(jit: Any, deco: Deco) -> Any:
    record = deco(lambda name: {"name": name, "hits": 0})

    def hit(x: Any, name: str) -> Any:
        record(name)["hits"] += 1
        return x * record(name)["hits"]

    f = jit(hit)
    for name in "aabab":
        yield f(jnp.ones(2), name), record("a")["hits"], record("b")["hits"]
    record("a")["hits"] = 10
    yield f(jnp.ones(2), "a")


def an_attribute_of_a_net_is_replaced(jit: Any, deco: Deco) -> Any:
    load = deco(lambda: Net())
    f, x = jit(lambda x: x * load().inner.rate + load().w), jnp.ones(2)
    yield f(x)
    net = load()
    net.w = jnp.full(2, 3.0)
    yield f(x), load() is net
    net.inner.rate = 4.0
    yield f(x), load() is net


def of_methods(jit: Any, deco: Deco) -> Any:
    class Config:
        @staticmethod
        @deco
        def rates() -> list[float]:
            return [1.0]

        @classmethod
        @deco
        def own(cls) -> dict[str, float]:
            return {"k": 2.0}

    f, x = jit(lambda x: x * Config.rates()[0] * Config.own()["k"]), jnp.ones(2)
    yield f(x)
    Config.rates()[0] = 3.0
    yield f(x)
    Config.own()["k"] = 5.0
    yield f(x)


def what_it_was_computed_from_changes(jit: Any, deco: Deco) -> Any:
    scale, calls = {"k": 2.0}, []

    @deco
    def table(n: int) -> Any:
        calls.append(n)
        return jnp.full(2, n * scale["k"])

    f, x = jit(lambda x: x * table(3)), jnp.ones(2)
    yield f(x)
    scale["k"] = 5.0
    yield f(x), list(calls)
    table.cache_clear()
    yield f(x), list(calls)


def a_cache_is_cleared(jit: Any, deco: Deco) -> Any:
    count = [0]

    @deco
    def number(n: int) -> int:
        count[0] += n
        return count[0]

    f, x = jit(lambda x: x * number(3)), jnp.ones(2)
    for _ in range(2):
        yield f(x), f(x)
        number.cache_clear()


def it_is_computed_from_what_the_function_has_changed(jit: Any, deco: Deco) -> Any:
    state = {"k": 2.0}
    table = deco(lambda n: jnp.full(2, n * state["k"]))

    def step(x: Any) -> Any:
        state["k"] = 7.0
        return x * table(3)

    yield jit(step)(jnp.ones(2))


def numbers_change(jit: Any, deco: Deco) -> Any:
    settings = deco(lambda: Settings())

    def step(x: Any, other: Any) -> Any:
        settings().steps += 1
        return x * settings().rate + settings().steps + (other.steps if isinstance(other, Settings) else other)

    for is_alias in (False, True):
        f = jit(step)
        for i in range(5):
            yield f(jnp.ones(2), settings() if is_alias else i), settings().steps
            settings().rate = i * 1.5


def it_is_returned(jit: Any, deco: Deco) -> Any:
    settings = deco(lambda: [Settings()])
    f = jit(lambda x: (settings(), x * settings()[0].rate))
    for rate in (1.0, 2.0):
        result, scaled = f(jnp.ones(2))
        yield result is settings(), scaled
        settings()[0].rate = rate


def it_fails_at_first(jit: Any, deco: Deco) -> Any:
    tries = [0]

    @deco
    def load() -> list[int]:
        tries[0] += 1
        if tries[0] == 1:
            raise OSError("not yet")
        return [tries[0]]

    def step(x: Any) -> Any:
        try:
            return x * load()[0]
        except OSError:
            return -x

    yield jit(step)(jnp.ones(2)), tries[0]


def it_is_made_after_a_change_and_written(jit: Any, deco: Deco) -> Any:
    of_thread, state = contextvars.ContextVar("of_thread", default=1.0), [2.0]
    settings, other = deco(lambda: Settings()), deco(lambda: state[0] + 1)
    of_class = deco(Settings)

    def step(x: Any, order: int) -> Any:
        of_thread.set(of_thread.get() + 1)
        state[0] += 1
        if order:
            other()
        settings().steps += 1
        of_class().steps += 3
        return x * other() + of_thread.get()

    f = jit(step)
    for order in (0, 1, 1, 0):
        yield f(jnp.ones(2), order), settings().steps, of_class().steps, state[0], of_thread.get()
        if order:
            settings.cache_clear()
            of_class().steps = 10


def it_is_made_in_a_trace_that_begins_anew(jit: Any, deco: Deco) -> Any:
    settings, log, rate = deco(lambda *key: Settings()), [], [2.0]

    def by_rate(x: Any) -> Any:
        return x * rate[0]

    def step(x: Any, n: int) -> Any:
        log.append("begun")
        settings(0, 1).steps += 1
        settings().steps += 1
        others = [lambda x: x, by_rate]
        return x * n if n < 3 else others[n % 2](x)  # what it reads is not known before, and then numbers are symbolic

    settings(0, 1).steps = 5
    f = jit(step)
    for n in (1, 2, 3, 5, 7):
        yield f(jnp.ones(2), n), settings(0, 1).steps, settings().steps, len(log), settings.cache_info().currsize
        settings.cache_clear()


class Table:
    def __init__(self, k: Any) -> None:
        self.k = k

    @functools.lru_cache(8)  # noqa: B019
    def rows(self, n: int = 1, *, start: int = 0) -> Any:
        return {"n": n * start}

    @property
    @functools.cache  # noqa: B019
    def first(self) -> Any:
        return [self.k]


def of_instances_without_arrays(jit: Any, deco: Deco) -> Any:
    table, other = Table("a"), Table("b")

    def step(x: Any) -> Any:
        table.rows()["n"] += 1
        other.rows(2, start=3)["n"] += 10
        table.first.append(1)
        return x * table.rows()["n"] * other.rows(2, start=3)["n"], len(table.first)

    f = jit(step)
    table.rows()["n"] = 5
    for _ in range(3):
        yield f(jnp.ones(2)), table.rows()["n"], other.rows(2, start=3)["n"]
    Table.rows.cache_clear()
    yield f(jnp.ones(2)), table.rows()["n"]


class Holder:
    def __init__(self, get: Any) -> None:
        self.get = get


def it_is_given(jit: Any, deco: Deco) -> Any:
    record = deco(lambda n, m=1: [n])
    holder, listed = Holder(record), [functools.partial(record, 5)]

    def step(get: Any, holder: Any, x: Any) -> Any:
        get(2).append(1)
        holder.get(3).append(1)
        listed[0](6).append(1)
        return x * len(get(2)) * len(holder.get(3)) * len(listed[0](6))

    f = jit(step)
    for _ in range(3):
        yield f(record, holder, jnp.ones(2))
    record.cache_clear()
    yield f(record, holder, jnp.ones(2)), record(2), record(3), record(5, 6)


class Slotted:
    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = 2.0


def an_object_with_slots_changes(jit: Any, deco: Deco) -> Any:
    settings = deco(lambda: Slotted())
    f = jit(lambda x: x * settings().rate)
    for rate in (2.0, 3.0, 5.0):
        settings().rate = rate
        yield f(jnp.ones(2))


PROGRAMS = [
    *(of_instances_without_arrays, it_is_given, an_object_with_slots_changes),
    *(it_is_made_after_a_change_and_written, it_is_made_in_a_trace_that_begins_anew),
    *(numbers_change, it_is_returned, it_fails_at_first),
    *(a_setting_changes, a_counter_counts, items_by_key, an_attribute_of_a_net_is_replaced, of_methods),
    *(what_it_was_computed_from_changes, a_cache_is_cleared, it_is_computed_from_what_the_function_has_changed),
]


@pytest.mark.quick(3)
@pytest.mark.filterwarnings("ignore::graftax.RecompileWarning")
@pytest.mark.parametrize("deco", CACHES, ids=["cache", "lru_cache"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_jitted_function_does_with_a_cache_what_plain_python_does(program: Any, deco: Deco):
    expected, ours = list(program(plain, deco)), list(program(graftax.jit, deco))
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(ours), strict=True):
        np.testing.assert_allclose(one, other)


def test_a_number_that_a_cached_one_was_computed_from_changes():
    f = graftax.jit(lambda x, n: (x * n, times_rate(3)))
    for n, k, expected in ((2, 2.0, 6.0), (6, 2.0, 6.0), (4, 63.0, 6.0), (5, 63.0, 189.0), (6, 8.0, 189.0)):
        RATE["k"] = k
        assert f(jnp.ones(()), n) == (n, expected) and times_rate(3) == expected
        if n == 4:
            times_rate.cache_clear()


def test_other_entries_stay_where_one_holds_a_tracer():
    @functools.cache
    def pair(n: int, *more: Any) -> Any:
        return [jnp.ones(n)]

    cached = pair(1)
    graftax.jit(lambda x: x + pair(2, "not before the trace")[0])(jnp.ones(2))
    assert pair(1) is cached and pair.cache_info().currsize == 1


def test_an_object_that_is_no_longer_cached_is_not_kept():
    settings = functools.cache(lambda: Settings())
    f = graftax.jit(lambda x: x * settings().rate)
    f(jnp.ones(2))
    old = weakref.ref(settings())
    settings.cache_clear()
    f(jnp.ones(2))
    f.clear_cache()
    gc.collect()
    assert old() is None


def test_the_layout_of_caches_is_known():
    assert cache_layout.is_known


CAUGHT = """
class Settings:
    def __init__(self): self.steps = 0
@functools.cache
def settings(): return Settings()
@functools.cache
def rate(): return table["k"] + 1
table, log = {"k": 2.0}, [0]
def caught(read):
    try: return read()
    except: return -1.0
def f(x):
    value = caught(lambda: rate())
    log[0] += 1
    settings().steps += 1
    return x * value
"""


def test_what_it_gave_in_a_trace_whose_end_the_function_caught_is_made_again():
    def counts(jit: Any) -> list[Any]:
        m = module(CAUGHT)
        f = jit(m.f)
        return [(f(jnp.ones(1)).tolist(), m.settings().steps, m.log[0]) for _ in range(3)]

    assert counts(graftax.jit) == counts(plain)


class Model:
    def __init__(self) -> None:
        self.w = jnp.ones(2)

    @functools.cache  # noqa: B019
    def state(self) -> dict[str, int]:
        return {"n": 0}

    @functools.cache  # noqa: B019
    def double(self) -> Any:
        return self.w * 2


def test_the_cache_of_a_method_is_told_of_where_the_object_is_a_copy():
    def step(model: Any) -> Any:
        model.state()["n"] += 1
        return model.w * model.state()["n"]

    model = Model()
    with pytest.warns(graftax.ImpureCallWarning, match=r"calls Model.state\(\) .*goes by the object, which is a copy"):
        graftax.jit(step)(model)
    assert Model.state.cache_info().currsize == 0
    model.double()
    with pytest.warns(graftax.ImpureCallWarning, match=r"calls Model.double\(\)"):
        graftax.jit(lambda model: model.double())(model)
    assert Model.double.cache_info().currsize == 1  # that of the caller's
    assert graftax.jit(lambda model: model.double())(Model()).tolist() == [2.0, 2.0]  # nothing is lost


@pytest.mark.skipif(sys.version_info < (3, 12), reason="methods of C code are heard of from 3.12 on")
def test_what_a_function_asks_a_cache_itself_is_told():
    record = functools.cache(lambda n: [n])

    def clear(x: Any) -> Any:
        size = len(record(1))
        record.cache_clear()
        return x * size

    def ask(cache: Any, x: Any) -> Any:
        return x * cache.cache_info().currsize

    with pytest.warns(graftax.ImpureCallWarning, match=r"clear calls cache_clear\(\) .*leave the cache alone"):
        graftax.jit(clear)(jnp.ones(2))
    with pytest.warns(graftax.ImpureCallWarning, match=r"ask calls cache_info\(\) .*do not ask it again"):
        graftax.jit(ask)(record, jnp.ones(2))


@pytest.mark.parametrize("size", [0, 2])
def test_a_cache_that_drops_what_the_function_asks_for_again_is_refused(size: int):
    calls: list[int] = []

    @functools.lru_cache(size)
    def double(n: int) -> int:
        calls.append(n)
        return n * 2

    def step(x: Any) -> Any:
        return x * sum(double(n) for n in (1, 2, 3, 1))

    with pytest.raises(graftax.MutationError, match=r"asks for .*double\(\d\), and the cache drops .*maxsize"):
        graftax.jit(step)(jnp.ones(2))
    assert double(1) == 2


@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_an_equal_object_has_other_results_in_the_cache_of_a_method(filled: bool, given: bool):
    source = """
    class Rows:
        @functools.lru_cache(8)
        def rows(self, n=1): return {"n": n}
    one, two = Rows(), Rows()
    here = one
    def f(x, rows): return x * (rows or here).rows()["n"]
    """

    def run(wrap: Any) -> list[Any]:
        m = module(source)
        f, out = wrap(m.f), list[Any]()
        if filled:
            m.two.rows()["n"] = 7
        for rows, change in ((m.one, 0), (m.one, 0), (m.two, 0), (m.two, 9), (m.one, 0)):
            m.here = rows
            if change:
                rows.rows()["n"] = change
            out.append(f(jnp.ones(1), rows if given else None).tolist())
        return out

    assert run(graftax.jit) == run(plain)


class Doubled:
    def __init__(self, w: Any) -> None:
        self.w = w

    @functools.lru_cache  # noqa: B019
    def twice(self) -> Any:
        return self.w * 2


def test_new_objects_for_which_a_cached_method_has_no_result_share_a_program() -> None:
    f = graftax.jit(lambda v: v.twice())
    for i in range(4):
        assert float(f(Doubled(jnp.float32(i)))) == 2 * i
    assert f.cache_info().traces == 1
