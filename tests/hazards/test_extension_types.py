# SPDX-License-Identifier: Apache-2.0
"""Objects of C code that change where nobody can see it are refused; those that do not change are statics."""

import ctypes
import decimal
import functools
import hashlib
import itertools
import mmap
import multiprocessing
import operator
import queue
import random
import re
import sqlite3
import struct
import sys
import threading
import types
import weakref
import xml.etree.ElementTree as ElementTree
import zlib
from random import getrandbits
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax

X = jnp.ones(2)


class Pair(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int),)

    def __eq__(self, other):
        return self.a == other.a

    def __hash__(self):
        return hash(self.a)


class Marked(ElementTree.Element):
    pass


def connection():
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    db.execute("create table t (k real)")
    db.execute("insert into t values (2)")
    return db


def mapped():
    memory = mmap.mmap(-1, 8)
    memory[0] = 2
    return memory


class Case(NamedTuple):
    make: object
    read: object
    change: object
    remedy: str = "register_static"


def set_a(o):
    o.a = 5


def set_value(o):
    o.value = 5


def write_first(o):
    o[0] = 5


def set_prec(o):
    o.prec = 5


CASES = {
    "structure": Case(lambda: Pair(2), lambda o: o.a, set_a, "Pass its value"),
    "c_int": Case(lambda: ctypes.c_int(2), lambda o: o.value, set_value, "Pass its value"),
    "c_array": Case(lambda: (ctypes.c_int * 3)(2), lambda o: o[0], write_first, "as_array"),
    "c_pointer": Case(lambda: ctypes.pointer(ctypes.c_int(2)), lambda o: o[0], write_first, "Pass its value"),
    "shared_value": Case(lambda: multiprocessing.Value("d", 2.0), lambda o: o.value, set_value, "Pass its value"),
    "shared_array": Case(lambda: multiprocessing.RawArray("d", 2), lambda o: o[0], write_first, "as_array"),
    "decimal_context": Case(lambda: decimal.Context(prec=3), lambda o: o.prec, set_prec, "prec"),
    "element": Case(lambda: ElementTree.Element("a", k="2"), lambda o: float(o.get("k")), lambda o: o.set("k", "5")),
    "element_subclass": Case(lambda: Marked("a", k="2"), lambda o: float(o.get("k")), lambda o: o.set("k", "5")),
    "element_tree": Case(
        lambda: ElementTree.ElementTree(ElementTree.Element("a", k="2")),
        lambda o: float(o.getroot().get("k")),
        lambda o: o.getroot().set("k", "5"),
    ),
    "hash": Case(lambda: hashlib.sha256(b"a"), lambda o: o.digest()[0], lambda o: o.update(b"b")),
    "compressor": Case(zlib.compressobj, lambda o: len(o.copy().flush()), lambda o: o.compress(b"abc")),
    "scanner": Case(lambda: re.compile("a").scanner("aba"), lambda o: o.match() is None, lambda o: None),
    "connection": Case(
        connection,
        lambda o: o.execute("select sum(k) from t").fetchone()[0],
        lambda o: o.execute("insert into t values (3)"),
    ),
    "mapped_memory": Case(mapped, lambda o: o[0], write_first),
    "queue": Case(queue.Queue, lambda o: o.qsize(), lambda o: o.put(1), "deque"),
    "simple_queue": Case(queue.SimpleQueue, lambda o: o.qsize(), lambda o: o.put(1), "deque"),
    "method_of_a_queue": Case(lambda: queue.SimpleQueue().qsize, lambda o: o(), lambda o: o.__self__.put(1), "deque"),
    "method_of_an_iterator": Case(lambda: itertools.count().__next__, lambda o: o(), lambda o: None, "list"),
    "method_of_random": Case(lambda: random.Random(0).random, lambda o: o(), lambda o: None, r"jax\.random"),
    "seed": Case(
        lambda: np.random.SeedSequence(0), lambda o: o.n_children_spawned, lambda o: o.spawn(1), r"jax\.random"
    ),
}
HELD = None
READ = None


class Holder:
    held = None


def helper():
    return READ(HELD)


def by_argument(o):
    return lambda x, o=None: x * READ(o), {"o": o}


def by_part(o):
    return lambda x, o=None: x * READ(o["k"][0]), {"o": {"k": [o]}}


def by_closure(o):
    return lambda x: x * READ(o), {}


def by_default(o):
    def f(x, *, o=o):
        return x * READ(o)

    return f, {}


def by_global(o):
    return lambda x: x * READ(HELD), {}


def by_helper(o):
    return lambda x: x * helper(), {}


def by_class(o):
    return lambda x: x * READ(Holder.held), {}


PLACES = (by_argument, by_part, by_closure, by_default, by_global, by_helper, by_class)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_hidden_state_is_refused_before_and_after_a_change(case, place, monkeypatch):
    value = case.make()
    monkeypatch.setitem(globals(), "READ", case.read)
    monkeypatch.setitem(globals(), "HELD", value)
    monkeypatch.setattr(Holder, "held", value)
    function, given = place(value)
    jitted, passed = graftax.jit(function), graftax.jit(lambda x, k: x * k)
    seen = []
    for _ in range(2):
        with pytest.raises(graftax.UnsupportedValueError, match=case.remedy):
            jitted(X, **given)
        seen.append(function(X, **given).tolist())  # plain Python sees the change
        now = seen[-1][0]
        assert passed(X, now).tolist() == seen[-1]  # the way out
        case.change(value)
    assert seen[0] != seen[1]
    getattr(value, "close", lambda: None)()


def test_the_error_names_the_place_and_the_type():
    with pytest.raises(graftax.UnsupportedValueError, match=r"^box\['k'\]: .*Element: "):
        graftax.jit(lambda box: box["k"].tag)({"k": ElementTree.Element("a")})


def test_one_made_inside_is_no_result():
    with pytest.raises(graftax.UnsupportedValueError, match="Element"):
        graftax.jit(lambda x: (x, ElementTree.Element("a")))(X)


def test_used_inside_alone_it_is_as_in_plain_python():
    def f(x, text):
        root = ElementTree.fromstring(text)
        return x * float(root.get("k")) * len(hashlib.sha256(text.encode()).hexdigest())

    jitted = graftax.jit(f)
    for text in ("<a k='2'/>", "<a k='3'/>", "<a k='2'/>"):
        assert jitted(X, text).tolist() == f(X, text).tolist()


@pytest.mark.filterwarnings("ignore::graftax.ImpureCallWarning")
def test_what_a_library_keeps_for_itself_is_a_binding():
    def f(x):
        number = decimal.Decimal(1) / decimal.Decimal(3)  # through the library's own context of this thread
        return x * float(number) * random.choice([2.0])

    assert graftax.jit(f)(X).tolist() == f(X).tolist()


@pytest.mark.filterwarnings("ignore::graftax.ImpureCallWarning")
def test_a_function_of_a_library_is_a_name_also_where_it_is_a_method_of_a_hidden_object():
    def inner():
        return getrandbits(1)

    for draw in (lambda x: x * getrandbits(1), lambda x: x * inner(), lambda x, f=getrandbits: x * f(1)):
        assert graftax.jit(draw)(X).tolist() in ([0, 0], [1, 1])


def test_a_class_that_is_registered_as_static_is_taken():
    class Fixed(ElementTree.Element):
        pass

    first, second = Fixed("a"), Fixed("a")
    graftax.register_static(Fixed)
    f = graftax.jit(lambda x, o: (x, o is first))
    assert [f(X, o)[1] for o in (first, second, first)] == [True, False, True]
    assert f.cache_info().traces == 2


class Slotted:
    __slots__ = ("k",)


def function():
    return 1


LASTING = {
    "match": re.match("a", "a"),
    "pattern": re.compile("a"),
    "struct": struct.Struct("i"),
    "itemgetter": operator.itemgetter(0),
    "attrgetter": operator.attrgetter("a"),
    "methodcaller": operator.methodcaller("a"),
    "cached": functools.lru_cache(function),
    "cached_partial": functools.lru_cache(functools.partial(function)),
    "builtin": print,
    "method_descriptor": list.append,
    "slot_wrapper": int.__add__,
    "member": Slotted.k,
    "getset": types.FunctionType.__dict__["__code__"],
    "static_method": staticmethod(function),
    "code": function.__code__,
    "alias": list[int],
    "union": int | str,
    "c_function": ctypes.CDLL(None).abs if sys.platform != "win32" else None,
    "c_library": ctypes.CDLL(None) if sys.platform != "win32" else None,
    "lock": threading.Lock(),
    "shared_lock": multiprocessing.Lock(),
    "ufunc": np.add,
    "numpy_function": np.sum,
    "dtype": np.dtype("f4"),
    "jax_function": jnp.sum,
    "jitted": jax.jit(lambda x: x),
    "jax_ufunc": jnp.add,
    "custom_jvp": jax.nn.relu,
    "compiled": jax.jit(lambda x: x).lower(X).compile(),
    "device": jax.devices()[0],
    "client": jax.devices()[0].client,
    "config": jax.config,
    "treedef": jax.tree.structure([1, 2]),
    "primitive": jax.lax.sin_p,
    "object": object(),
    "weak_set": weakref.WeakSet(),
}


@pytest.mark.parametrize("value", LASTING.values(), ids=LASTING)
def test_what_does_not_change_is_taken(value):
    f = graftax.jit(lambda x, o: x)
    for _ in range(2):
        assert f(X, value).tolist() == X.tolist()
        assert graftax.jit(lambda x: (x, value)[0])(X).tolist() == X.tolist()
    assert f.cache_info().traces == 1


def changed_item(table):
    table["a"] = [7.0, 8.0]


def changed_columns(table):
    table["c"] = 1.0


def changed_cell(table):
    table.loc[0, "a"] = 50.0


@pytest.mark.parametrize("change", [changed_item, changed_columns, changed_cell])
@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"k": [t]}], ids=["bare", "deep"])
def test_a_table_of_pandas_is_refused(change, wrap):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": [1.0, 2.0]})
    f = graftax.jit(lambda x, t: x * len(str(t)))
    for value in (table, table["a"], table.index, table["a"].array):
        for _ in range(2):
            with pytest.raises(graftax.UnsupportedValueError, match="to_numpy"):
                f(X, wrap(value))
            change(table)


def test_a_table_of_polars_is_refused():
    polars = pytest.importorskip("polars")
    table = polars.DataFrame({"a": [1.0, 2.0]})
    for value in (table, table["a"], table.lazy()):
        with pytest.raises(graftax.UnsupportedValueError, match="to_numpy"):
            graftax.jit(lambda x, t: x * len(str(t)))(X, value)
