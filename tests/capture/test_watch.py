# SPDX-License-Identifier: Apache-2.0
"""What an entry depends on besides its roots: names, what functions consist of, and cells. Who owns it, who is told."""

from __future__ import annotations

import gc
import pickle
import sys
import types
import weakref
from random import Random
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from graftax import _core


def plain(function: Any) -> Any:
    return function


def test_what_reads_refer_to_is_shown_to_the_collector_and_let_go_with_them() -> None:
    held = object()

    def reader(given: Any = ((),), *, keyword: Any = 1) -> Any:
        return held

    class Holder:
        x = object()

    names, globals_ = {sys.intern("a name of this test"): object()}, {sys.intern("another name of this test"): Holder()}
    (name, value), [(other, seen)] = *names.items(), globals_.items()
    assert reader.__closure__
    of_module = types.FunctionType(reader.__code__, globals_, closure=reader.__closure__)
    guard, cell = weakref.ref(of_module), reader.__closure__[0]
    owned = [name, value, names, Holder, Holder.x, reader, reader.__code__, reader.__defaults__, reader.__kwdefaults__]
    owned += [cell, held, guard, other]
    not_owned = [of_module, globals_, seen]

    def counts() -> list[int]:
        return [sys.getrefcount(x) for x in [*owned, *not_owned]]

    before = counts()
    for _ in range(3):
        reads = _core.Reads([(names, name), (Holder, "x"), (guard, other)], [reader], [cell])
        assert reads.holds()
        shown = {id(x) for x in gc.get_referents(reads)}
        assert [id(x) in shown for x in owned] == [True] * len(owned)
        assert not any(id(x) in shown for x in not_owned)
        more = [n + (n < 2**28) for n in before[: len(owned)]]  # Python 3.12 keeps interned names for ever
        assert counts() == more + before[len(owned) :]
        del reads
        assert counts() == before


@pytest.mark.parametrize("same", [True, False])
def test_what_one_entry_no_longer_reads_is_still_told_to_others(same: bool) -> None:
    names = {"one of this test": 1.5, "two of this test": 2.5}
    one, two = names
    stays, goes = (_core.Reads([(names, name)], [], []) for name in (one, one if same else two))
    assert stays.holds() and goes.holds()
    del goes
    names[one] = 3.5
    assert not stays.holds() and stays.changed() == [(names, one)]
    names[one] = 1.5
    assert stays.holds() and not stays.changed()


def test_globals_that_are_gone_say_nothing_of_a_dict_at_their_address() -> None:
    met = False
    for _ in range(20):
        globals_ = {"name": 1.5}
        function = types.FunctionType(plain.__code__, globals_)
        goes, place = _core.Reads([(weakref.ref(function), "name")], [], []), id(globals_)
        assert goes.holds()
        del function, globals_
        assert not goes.holds()
        others = [{"name": 2.5} for _ in range(20)]
        stay = [_core.Reads([(names, "name")], [], []) for names in others]
        met = met or place in map(id, others)
        assert all(reads.holds() for reads in stay)
        del goes
        for names, reads in zip(others, stay, strict=True):  # one by one: what is told of one has all compared
            assert reads.holds()
            names["name"] = 3.5
            assert not reads.holds()
    assert met


@pytest.mark.parametrize("kind", [object, int], ids=["referred to weakly", "kept"])
def test_a_value_in_globals_that_are_read_weakly(kind: type) -> None:
    class Value:
        pass

    made = Value if kind is object else lambda: 10**20
    globals_ = {"name": made()}
    function = types.FunctionType(plain.__code__, globals_)
    value = globals_["name"]
    references = sys.getrefcount(value)
    reads = _core.Reads([(weakref.ref(function), "name")], [], [])
    assert reads.holds()
    if kind is object:
        assert sys.getrefcount(value) == references
    globals_["name"] = made() if kind is object else 10**20 + 1
    assert not reads.holds()
    globals_["name"] = value
    assert reads.holds()
    del globals_["name"], value
    assert not reads.holds()
    globals_["name"] = made()
    assert reads.holds() == (kind is int)
    absent = _core.Reads([(weakref.ref(function), "other")], [], [])
    assert absent.holds()
    globals_["other"] = 1
    assert not absent.holds()


@pytest.mark.parametrize("holder", [{}, type("Users", (), {})], ids=["dict", "class"])
def test_a_name_that_comes_and_goes_is_noticed(holder: Any) -> None:
    def put(value: Any) -> None:
        if isinstance(holder, dict):
            holder["name"] = value
        else:
            holder.name = value

    def drop() -> None:
        if isinstance(holder, dict):
            del holder["name"]
        else:
            del holder.name

    absent = _core.Reads([(holder, "name")], [], [])
    assert absent.holds()
    put(1)
    there = _core.Reads([(holder, "name")], [], [])
    assert there.holds() and not absent.holds()
    assert absent.changed() == [(holder, "name")] and there.changed() == []
    for other in (2, 1.0, True, "1", [1]):
        put(other)
        assert not there.holds() and not absent.holds()
    drop()
    assert absent.holds() and not there.holds()
    put(10**20 // 10**20)  # another object, the same number
    assert there.holds() and not absent.holds()
    drop()


@pytest.mark.parametrize("value", [10**30, "a text that is no constant", b"bytes, too", 1.5, -0.0])
def test_an_equal_number_or_text_is_the_same_value(value: Any) -> None:
    again = pickle.loads(pickle.dumps(value))
    cell, names = types.CellType(value), {"name": value}
    reads = _core.Reads([(names, "name")], [], [cell])
    names["name"] = cell.cell_contents = again
    assert reads.holds() and not reads.changed() and not reads.changed_cells()
    for other in (value * 2 if value else 1.0, 0.0, None, (value,)):
        names["name"] = other
        assert not reads.holds() and reads.changed() == [(names, "name")]
        names["name"], cell.cell_contents = value, other
        assert not reads.holds() and reads.changed_cells() == [cell]
        cell.cell_contents = value
        assert reads.holds()
        cell.cell_contents = other  # and nothing else
        assert not reads.holds()
        cell.cell_contents = value
        assert reads.holds()


@pytest.mark.parametrize("part", ["__defaults__", "__kwdefaults__", "__code__"])
def test_what_a_function_consists_of_is_still_told_when_another_entry_lets_go_of_it(part: str) -> None:
    def function(x: Any = 1.5, *, y: Any = 2.5) -> Any:
        return x, y

    stays, goes = (_core.Reads([], [function], []) for _ in range(2))
    assert stays.holds() and goes.holds()
    del goes
    before = getattr(function, part)
    setattr(function, part, {"__defaults__": (2.5,), "__kwdefaults__": {"y": 3.5}}.get(part, plain.__code__))
    assert not stays.holds()
    setattr(function, part, before)
    assert stays.holds()


def test_defaults_that_are_equal_are_the_same_ones():
    def function(x: Any = 10**30, y: Any = "two") -> Any:
        return x, y

    reads = _core.Reads([], [function], [])
    for _ in range(2):
        function.__defaults__ = pickle.loads(pickle.dumps(function.__defaults__))
        assert reads.holds()
    for other in ((10**30, "three"), (10**30,), (10**30, "two", 3), (), None):
        function.__defaults__ = other
        assert not reads.holds()
        function.__defaults__ = (10**30, "two")
        assert reads.holds()


def many_globals() -> tuple[dict[str, Any], Any]:
    """A function that reads so many globals that they are watched, and its globals."""
    scope: dict[str, Any] = {"__name__": "globals of a test", **{f"g{i}": i for i in range(8)}}
    exec("def f(x):\n    return x + len((1, 2)) + " + " + ".join(f"g{i}" for i in range(8)), scope)
    return scope, scope["f"]


def outcome(f: Any, *args: Any) -> tuple[Any, ...]:
    try:
        return type(result := f(*args)), float(result)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(4))
def test_a_global_of_many_that_changes_is_seen_on_the_next_call(seed: int) -> None:
    scope, plain_f = many_globals()
    f, x, random = graftax.jit(plain_f), jnp.float32(1), Random(seed)
    values = [7, 2.5, jnp.float32(3), np.float32(4), True, jnp.float32(5)]
    changes: list[Any] = [
        lambda name: scope.__setitem__(name, random.choice(values)),
        lambda name: scope.update({name: random.choice(values)}),
        lambda name: scope.pop(name, None),
        lambda name: scope.setdefault(name, 6),
        lambda name: scope.__setitem__("len", lambda _, value=random.choice(values): value),
        lambda name: scope.pop("len", None),
        lambda name: scope.__setitem__("of nobody", object()),
        lambda name: None,
    ]
    for _ in range(40):
        random.choice(changes)(f"g{random.randrange(8)}")
        assert outcome(f, x) == outcome(plain_f, x)


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(4))
def test_globals_that_are_not_compared_again_are_those_of_each_entry(seed: int) -> None:
    scope, plain_f = many_globals()
    helpers = [lambda x: x + 1, lambda x: x * 2, abs]
    for i in range(3):
        scope[f"h{i}"] = helpers[0]
    exec("def f(x, *more):\n    for h in (h0, h1, h2): x = h(x)\n    return x * g0 + g1 + g2 + len(more)", scope)
    f, plain_f, random = graftax.jit(scope["f"], numbers="static"), scope["f"], Random(seed)
    arguments = [(jnp.float32(-2),), (jnp.int32(3),), (jnp.float32(-2), 1)]
    for _ in range(30):
        for _ in range(random.randrange(3)):
            scope[f"g{random.randrange(3)}"] = random.choice([1, 2, True, 2.0])
            scope[f"h{random.randrange(3)}"] = random.choice(helpers)
        for _ in range(4):
            given = random.choice(arguments)
            assert outcome(f, *given) == outcome(plain_f, *given)


def test_a_global_of_many_is_not_kept_alive() -> None:
    scope, plain_f = many_globals()
    f = graftax.jit(plain_f)
    scope["g3"] = jnp.ones(())
    for _ in range(3):
        f(1.0)
    array = weakref.ref(scope["g3"])
    scope["g3"] = 3
    gc.collect()
    assert array() is None and f(1.0) == plain_f(1.0)
    scope["compiled"], globals_ = f, weakref.ref(plain_f)
    f(1.0)
    del f, plain_f, scope
    gc.collect()
    assert globals_() is None


def test_a_lookup_of_globals_that_calls_the_function_again() -> None:
    scope, plain_f = many_globals()
    f, x = graftax.jit(plain_f), jnp.float32(1)

    class Calls(str):
        depth = 0
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            if Calls.depth == 0:
                Calls.depth = 1
                scope["g5"] = 50
                assert f(x) == plain_f(x)
                Calls.depth = 0
            return str.__eq__(self, str(other))

    f(x)
    Calls.depth = 1
    for i in range(8):
        scope[Calls(f"h{i}")] = i
    Calls.depth = 0
    scope["g1"] = 10
    for _ in range(3):
        assert f(x) == plain_f(x)
