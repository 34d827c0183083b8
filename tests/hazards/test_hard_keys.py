# SPDX-License-Identifier: Apache-2.0
"""Statics that are hard to compare: known types by full state, containers by content, user code by what it is."""

import array
import ast
import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import itertools
import pathlib
import threading
import types
import uuid
import warnings
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
from hypothesis import settings

import graftax
import zoo
from sizes import sized
from watchdog import isolated
from zoo import Box, Data, Frozen, Stack, Table, f32, scalar

# ── known types, by their full state ──

LONDON = zoneinfo.ZoneInfo("Europe/London") if "Europe/London" in zoneinfo.available_timezones() else datetime.UTC
NOON = datetime.datetime(2024, 10, 27, 1, 30)


class Money(decimal.Decimal):
    """A known type with an attribute of its own."""


class Day(datetime.date): ...


class Ratio(fractions.Fraction): ...


def with_note(value, note):
    value.note = note
    return value


ALIKE = {
    "decimal": [decimal.Decimal(text) for text in ("1", "1.0", "1.00", "0", "-0", "NaN", "sNaN")],
    "fold": [NOON, NOON.replace(fold=1)],
    "fold_in_a_zone": [NOON.replace(tzinfo=LONDON, fold=1), NOON.replace(tzinfo=LONDON), NOON],
    "time_fold": [datetime.time(1), datetime.time(1, fold=1)],
    "one_instant_in_two_zones": [
        datetime.datetime(2024, 1, 1, 12, tzinfo=datetime.UTC),
        datetime.datetime(2024, 1, 1, 13, tzinfo=datetime.timezone(datetime.timedelta(hours=1))),
        datetime.datetime(2024, 1, 1, 12, tzinfo=datetime.timezone(datetime.timedelta(0), "GMT")),
    ],
    "date_and_datetime": [datetime.date(2024, 1, 1), datetime.datetime(2024, 1, 1)],
    "timedelta": [datetime.timedelta(1), datetime.timedelta(2)],
    "fraction": [fractions.Fraction(1), 1, fractions.Fraction(1, 2)],
    "range": [range(0), range(1, 1), range(0, 3, 2), range(0, 4, 2)],
    "slice": [slice(1), slice(True), slice(1.0), slice(0, 1)],
    "path": [pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("a"), pathlib.PureWindowsPath("A"), "a"],
    "uuid": [uuid.UUID(int=1), uuid.UUID(int=2)],
    "text": ["1", b"1", bytearray(b"1")],
    "array": [array.array("i", [1]), array.array("l", [1]), array.array("i", [2])],
    "frozenset": [frozenset({1}), frozenset({True}), frozenset({1.0})],
    "flag": [enum.IntFlag("One", "A").A, enum.IntFlag("Two", "A").A, 1],
}
WRAP = {
    "bare": lambda v: v,
    "tuple": lambda v: ("x", (v,)),
    "object": lambda v: Box(v=v),
    "dataclass": Frozen,
    "dict": lambda v: {"k": [v]},
}


def show(value):
    """A text that tells apart what ``repr`` leaves out."""
    match value:
        case tuple() | list():
            return [show(item) for item in value]
        case dict():
            return [(key, show(item)) for key, item in value.items()]
        case Box() | Frozen():
            return show(vars(value))
        case datetime.datetime() | datetime.time():
            return type(value), repr(value), value.fold, str(value.tzinfo)
    return type(value), repr(value)


@pytest.mark.parametrize("wrap", WRAP.values(), ids=WRAP)
@pytest.mark.parametrize("values", ALIKE.values(), ids=ALIKE)
def test_equal_values_of_known_types_that_are_not_the_same_are_other_keys(values, wrap):
    f = graftax.jit(lambda value, w: show(value))
    for value in (*values, *values):
        assert f(wrap(value), f32(1)) == show(wrap(value))
    assert f.cache_info().currsize == len(values)


def test_the_attributes_of_a_known_types_subclass_count():
    f = graftax.jit(lambda value, w: value.note)
    for make in (lambda: Money(1), lambda: Day(2024, 1, 1), lambda: Ratio(1)):
        for note in ("a", "b", "a"):
            assert f(with_note(make(), note), f32(1)) == note
    names = graftax.jit(lambda value, w: sorted(vars(value)))
    for name in ("note", "other", "note"):
        value = Money(1)
        setattr(value, name, "a")
        assert names(value, f32(1)) == [name]


# ── containers, by content ──

CONTAINERS = {
    "set": (lambda w: {1, "a"}, lambda x: x.add(2)),
    "bytearray": (lambda w: bytearray(b"ab"), lambda x: x.append(1)),
    "counter": (lambda w: Counter("aab"), lambda x: x.update("b")),
    "deque": (lambda w: deque([1, w]), lambda x: x.append(2)),
    "list_subclass": (lambda w: Stack([1, w]), lambda x: x.append(2)),
    "dict_subclass": (lambda w: Table(a=1, w=w), lambda x: x.update(b=2)),
    "ordered_dict": (lambda w: OrderedDict(a=1, w=w), lambda x: x.move_to_end("a")),
    "default_dict": (lambda w: defaultdict(int, a=1, w=w), lambda x: x["new"]),
    "namespace": (lambda w: types.SimpleNamespace(a=1, w=w), lambda x: setattr(x, "a", 2)),
    "dataclass": (lambda w: Data(1, w), lambda x: setattr(x, "a", 2)),
    "object": (lambda w: Box(a=1, w=w, tags={"t"}), lambda x: x.tags.add("u")),
}


def content(x):
    """What a container holds besides its arrays, in its order."""
    match x:
        case set():
            return sorted(map(repr, x))
        case dict():
            return [(key, "*" if key == "w" else repr(item)) for key, item in x.items()]
        case deque() | list():
            return [repr(item) for item in x if isinstance(item, int)]
        case Box():
            return sorted(x.tags)
        case Data():
            return x.a
        case types.SimpleNamespace():
            return [(key, item) for key, item in vars(x).items() if key != "w"]
    return repr(x)


@pytest.mark.parametrize(("make", "change"), CONTAINERS.values(), ids=CONTAINERS)
def test_a_container_is_compared_by_content_and_its_arrays_are_traced(make, change):
    f = graftax.jit(lambda x, w: (content(x), w * 2))
    for value in (1.0, 2.0):
        x = make(f32(value))
        before = content(x)
        for _ in range(2):
            assert f(x, f32(value))[0] == before
        change(x)
        assert content(x) != before
        assert f(x, f32(value))[0] == content(x)
    assert f.cache_info().traces == (1 if isinstance(x, Data) else 2)  # a number that changes is symbolic


NUMPY_STATICS = {
    "text": lambda v: np.array(["a", v]),
    "bytes": lambda v: np.array([b"a", v.encode()]),
    "dates": lambda v: np.array(["2024-01-01", f"2024-01-0{len(v) + 1}"], "M8[D]"),
    "durations": lambda v: np.array([1, len(v)], "m8[s]"),
    "date_scalar": lambda v: np.datetime64(f"2024-01-0{len(v) + 1}"),
    "objects": lambda v: np.array([object, v], object),
    "records": lambda v: np.array([(1, len(v))], [("a", "i4"), ("b", "i4")]),
    "record_scalar": lambda v: np.array([(1, len(v))], [("a", "i4"), ("b", "i4")])[0],
}


@pytest.mark.parametrize("make", NUMPY_STATICS.values(), ids=NUMPY_STATICS)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: Box(rows=[v])], ids=["bare", "nested"])
def test_numpy_arrays_that_jax_has_no_type_for_are_static_by_value_or_refused_by_path(make, wrap):
    f = graftax.jit(lambda x, w: repr(x.rows[0] if isinstance(x, Box) else x))
    for value in ("b", "cc", "b", "cc"):
        x = wrap(make(value))
        try:
            assert f(x, f32(1)) == repr(make(value))
        except graftax.UnsupportedValueError as error:
            assert str(error).startswith("x.rows[0]: " if isinstance(x, Box) else "x: ")
            assert f.cache_info().traces == 0
    assert f.cache_info().traces in (0, 2)


def test_a_numpy_static_changed_in_place_is_another_key():
    f = graftax.jit(lambda x, w: x.tolist())
    x = np.array(["aa", "bb"])
    assert f(x, f32(1)) == ["aa", "bb"]
    x[0] = "zz"
    assert f(x, f32(1)) == ["zz", "bb"]


# ── __eq__ and __hash__ that do what they should not ──


def raising(self, other):
    raise ValueError("my own __eq__")


ODD_EQ = {
    "raises": raising,
    "not_a_bool": lambda self, other: "yes",
    "an_array": lambda self, other: np.array([True, False]),
    "no_truth": lambda self, other: Falsy(),
    "always": lambda self, other: True,
    "never": lambda self, other: False,
    "not_implemented": lambda self, other: NotImplemented,
}


BASES = {"object": object, "extension": ast.Name}
NEEDS = {"object": {}, "extension": {"id": "n"}}


class Falsy:
    def __bool__(self):
        raise ValueError("no truth value")


def odd(bases, equal, hash_of=lambda self: 1):
    return type("Odd", bases, {"__eq__": equal, "__hash__": hash_of, "method": lambda self: 0})


@pytest.mark.parametrize("equal", ODD_EQ.values(), ids=ODD_EQ)
@pytest.mark.parametrize("base", [object, int, str, tuple, list, dict, decimal.Decimal], ids=lambda base: base.__name__)
def test_the_eq_of_a_class_is_not_asked(base, equal):
    cls = odd((base,), equal)
    f = graftax.jit(lambda x, w: (x.n, x.w * w))
    g = graftax.jit(lambda x, w: x[1].n)
    for n in (1, 2, 1, 2):
        x = cls()
        x.n = n
        if base not in (int, str, decimal.Decimal):
            x.w = f32(3)
            out = f(x, f32(2))
            assert (out[0], out[1].tolist()) == (n, [6.0])
        assert g(("a", x), f32(1)) == n
    assert g.cache_info().traces == 2


@pytest.mark.parametrize("equal", ODD_EQ.values(), ids=ODD_EQ)
def test_the_eq_of_an_extension_types_subclass_never_makes_a_wrong_hit(equal):
    cls = odd((ast.Name,), equal)
    things = [cls(id=f"n{i}") for i in range(3)]
    f = graftax.jit(lambda x, w: x[0])
    for thing in (*things, *things):
        try:
            assert f([thing], f32(1)) is thing or equal(thing, thing) is True
        except ValueError as error:
            assert str(error) in ("my own __eq__", "no truth value")


def test_an_eq_that_raises_is_named_with_its_path():
    cls = odd((ast.Name,), raising)
    f = graftax.jit(lambda x, w: w)
    f([cls(id="a")], f32(1))
    with pytest.raises(ValueError, match="my own __eq__") as caught:
        f([cls(id="b")], f32(1))
    assert "x[0]" in " ".join(getattr(caught.value, "__notes__", ()))


def test_a_hash_that_raises_is_the_users_exception():
    def no_hash(self):
        raise ValueError("my own __hash__")

    by_state, extension = odd((object,), raising, no_hash), odd((ast.Name,), raising, no_hash)
    f = graftax.jit(lambda x, w: w + 1)
    assert f(by_state(), f32(1)).tolist() == [2.0]
    with pytest.raises(ValueError, match="my own __hash__"):
        f({"k": extension(id="n")}, f32(1))
    assert f({"k": 1}, f32(1)).tolist() == [2.0]


@pytest.mark.quick(0)
@pytest.mark.parametrize("base", ["object", "extension"])
@pytest.mark.parametrize("place", ["value", "key", "element"])
@isolated()
def test_eq_and_hash_that_call_the_jitted_function(base, place):
    f = graftax.jit(lambda x, w: w + 1)
    depth = [0]

    def call_again():
        if depth[0] < 3:
            depth[0] += 1
            assert f([1], f32(1)).shape == (1,)  # not its value: this may run while JAX traces
            depth[0] -= 1

    def equal(self, other):
        call_again()
        return self is other

    def hash_of(self):
        call_again()
        return 7

    cls = odd((BASES[base],), equal, hash_of)
    things = [cls(**NEEDS[base]) for _ in range(3)]
    for thing in (*things, *things):
        x = {"value": lambda: [thing], "key": lambda: {thing: 1}, "element": lambda: {thing}}[place]()
        assert f(x, f32(1)).tolist() == [2.0]


@pytest.mark.quick(0)
@pytest.mark.parametrize("base", ["object", "extension"])
@pytest.mark.parametrize("holder", ["list", "dict", "set"])
@isolated()
def test_eq_and_hash_that_change_what_holds_them(base, holder):
    f = graftax.jit(lambda x, w: w + len(x))
    armed, box = [False], []

    def meddle():
        if armed[0] and box:
            armed[0] = False
            box.pop().clear()

    def equal(self, other):
        meddle()
        return self is other

    def hash_of(self):
        meddle()
        return 7

    cls = odd((BASES[base],), equal, hash_of)
    things = [cls(**NEEDS[base]) for _ in range(20)]
    make = {"list": list, "dict": dict.fromkeys, "set": set}[holder]
    for _ in range(6):
        x = make(things)
        f(make(things), f32(1))
        box[:], armed[0] = [x], True
        try:
            assert f(x, f32(1)).tolist() in ([21.0], [1.0])
        except RuntimeError as error:
            assert "chang" in str(error)
        armed[0] = False
        assert f(make(things), f32(1)).tolist() == [21.0]


@isolated()
@pytest.mark.quick(0)
def test_eq_and_hash_that_yield_to_eight_threads():
    import time

    class Slow(ast.Name):
        def __eq__(self, other):
            time.sleep(0)
            return type(other) is Slow and self.id == other.id

        def __hash__(self):
            time.sleep(0)
            return 7

    f = graftax.jit(lambda x, w: (x["k"].id, w + 1))
    barrier, wrong = threading.Barrier(8), []

    def work(number):
        barrier.wait()
        for turn in range(30):
            name = f"n{(turn + number) % 6}"
            try:
                if f({"k": Slow(id=name), Slow(id="key"): 1}, scalar())[0] != name:
                    wrong.append(name)
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert f.cache_info().currsize == 6


# ── many keys, big keys ──


class Counted(ast.Name):
    """Compared by its own ``__eq__``, which counts."""

    asked = 0

    def __eq__(self, other):
        Counted.asked += 1
        return type(other) is Counted and self.id == other.id

    def __hash__(self):
        Counted.asked += 1
        return hash(self.id)


@pytest.mark.quick(0)
def test_a_call_compares_with_few_keys_however_many_are_known():
    costs, many = {}, sized(400, 60)
    for known in (1, many):
        f = graftax.jit(lambda x, w: w)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the advice on statics that change
            for number in range(known):
                f(Counted(id=f"n{number}"), scalar())
        for which, number in (("newest", known - 1), ("again", known - 1), ("oldest", 0)):
            Counted.asked = 0
            f(Counted(id=f"n{number}"), scalar())
            costs[known, which] = Counted.asked
        assert f.cache_info().traces == known
    assert costs[many, "again"] == costs[1, "again"] == costs[many, "newest"]
    assert costs[many, "oldest"] <= 8 + 4 * costs[1, "again"]  # the eight used last, then one look-up


@pytest.mark.quick(0)
@isolated()
def test_a_big_immutable_static_that_is_met_again_is_not_read():
    """Its memory is overwritten behind Python's back: a call that read it would take it for another value."""
    text, numbers = b"a" * 10_000_000, (1000,) * 100_000
    f = graftax.jit(lambda text, numbers, w: (len(text), w + 1))
    for _ in range(2):
        assert f(text, numbers, scalar())[0] == 10_000_000
    other = 1001
    data = (ctypes.c_char * len(text)).from_address(id(text) + bytes.__basicsize__ - 1)
    items = (ctypes.c_void_p * len(numbers)).from_address(id(numbers) + tuple.__basicsize__)
    was = items[50_000]
    data[5_000_000], items[50_000] = b"b", id(other)
    try:
        f(text, numbers, scalar())
        assert f.cache_info().traces == 1
        assert text != b"a" * 10_000_000 and numbers != (1000,) * 100_000
    finally:
        data[5_000_000], items[50_000] = b"a", was


@pytest.mark.quick(0)
def test_a_big_static_that_is_equal_but_another_object_is_one_key():
    f = graftax.jit(lambda text, numbers, w: w + len(text) + numbers[-1])
    for _ in range(2):
        out = f(b"a" * 1_000_000, tuple(range(100_000)), scalar(0.0))
        assert float(out) == 1_099_999.0
    f(b"a" * 999_999 + b"b", tuple(range(100_000)), scalar(0.0))
    f(b"a" * 1_000_000, (*range(99_999), 5), scalar(0.0))
    assert f.cache_info().traces == 3


@pytest.mark.quick(0)
@isolated(seconds=400)
def test_thousands_of_statics_keep_as_many_entries_as_the_table_holds():
    import gc

    # Each is compiled: all of them in the nightly profile.
    turns = 10_000 if settings.default.max_examples > 1_000 else sized(1_000, 150)

    class Config:
        def __init__(self, n):
            self.n = n

        def use(self):
            return self.n

    f = graftax.jit(lambda config, w: config.n, cache_size=64, numbers="static")
    sizes = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(turns):
            assert f(Config(n), 0) == n
            if (n + 1) % min(500, turns // 2) == 0:
                gc.collect()
                sizes.append(len(gc.get_objects()))
    assert f.cache_info()._replace(hits=0) == (0, turns, 64, 64, turns, 0, 0, 0)
    assert max(sizes) - min(sizes) < 500  # objects, of which every structure needs more than one
    assert [str(warning.message).split(" because ")[1][:12] for warning in caught] == ["config.n kee"]


@dataclasses.dataclass(frozen=True)
class Wide:
    values: tuple


def test_the_number_of_entries_is_bounded_by_default_and_reported():
    f = graftax.jit(lambda x: x, numbers="static")
    assert f.cache_info().maxsize == 512
    for x in itertools.chain.from_iterable([Wide((n,)), {n}, [n]] for n in range(3)):
        f(x)
    assert f.cache_info().currsize == f.cache_info().misses == 9
    assert zoo.Level.ONE == 1 and f(zoo.Level.ONE) is zoo.Level.ONE
