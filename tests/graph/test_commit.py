# SPDX-License-Identifier: Apache-2.0
"""Changes come back as a whole or not at all, and only what the function changed is written."""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from graftax import _core
from raising_key import Key, Stop

testcapi = pytest.importorskip("_testcapi", reason="this Python was built without its test modules")


class Plain:
    def __init__(self) -> None:
        self.a, self.b = 1, [2]

    def method(self) -> None: ...


@dataclasses.dataclass(slots=True)
class Slotted:
    a: Any = 1
    b: Any = None


class Box(dict[Any, Any]):
    """A dict with attributes."""


ODD, NEW = Key(1), Key(9)


def _function() -> Any:
    def f(x: int = 1, *, y: int = 2) -> int:
        return x + y

    f.note = "old"  # type: ignore[attr-defined]
    return f


def _boxed() -> Box:
    box = Box(a=1)
    box.note = "old"  # type: ignore[attr-defined]
    return box


def _change_slots(s: Slotted) -> None:
    s.a, s.b = "new", [1]


def _change_function(f: Any) -> None:
    f.__defaults__, f.__kwdefaults__, f.note, f.more = (5,), {"y": 7}, "new", 1


def _change_attributes(p: Any) -> None:
    del p.a
    p.c, p.a = 3, 4


def _set(**items: Any) -> Callable[[Any], None]:
    return lambda p: [setattr(p, k, v) for k, v in items.items()] and None


# What is made, and what is done to it.
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list item": (lambda: [1, 2, 3], lambda x: x.__setitem__(1, "new")),
    "list": (lambda: [1, 2, 3], lambda x: x.extend("abc")),
    "dict value": (lambda: {"a": 1, "b": 2}, lambda x: x.update(a="new")),
    "dict key": (lambda: {"a": 1, "b": 2}, lambda x: x.update(c=3) or x.pop("a", None)),
    "dict order": (lambda: {"a": 1, "b": 2}, lambda x: x.update(a=x.pop("a"))),
    "dict of user keys": (lambda: {ODD: 1, "b": 2}, lambda x: x.update({ODD: "new", NEW: 1})),
    "dict of user keys that go": (lambda: {"a": 1, ODD: 1, "b": 2}, lambda x: x.update(a="new") or x.pop(ODD, None)),
    "dict of user keys that come": (lambda: {"a": 1, "b": 2}, lambda x: x.update({"a": "new", NEW: 1, ODD: 2})),
    "default dict": (lambda: defaultdict(list, a=1), lambda x: x["new"]),
    "ordered dict value": (lambda: OrderedDict(a=1, b=2), lambda x: x.update(a="new")),
    "ordered dict": (lambda: OrderedDict(a=1, b=2), lambda x: x.move_to_end("a") or x.update(c=3)),
    "ordered dict of user keys": (lambda: OrderedDict({ODD: 1, "b": 2}), lambda x: x.update({NEW: 1})),
    "set": (lambda: {1, 2}, lambda x: x.update(range(20))),
    "set of user keys": (lambda: {ODD}, lambda x: x.add(NEW)),
    "deque": (lambda: deque([1, 2], 5), lambda x: x.extend("abcde")),
    "bytearray": (lambda: bytearray(b"abc"), lambda x: x.extend(b"defg")),
    "bytearray of the same size": (lambda: bytearray(b"abc"), lambda x: x.__setitem__(0, 65)),
    "array": (lambda: array.array("i", [1, 2]), lambda x: x.extend([3] * 30)),
    "array of text": (lambda: np.array(["a", "b"]), lambda x: x.__setitem__(0, "z")),
    "attributes": (Plain, _set(a="new")),
    "new attributes": (Plain, _set(a="new", c=1, d=2, e=3)),
    "attributes in another order": (Plain, _change_attributes),
    "slots": (Slotted, _change_slots),
    "function": (_function, _change_function),
    "dict with attributes": (_boxed, lambda x: x.update(b=2) or setattr(x, "note", "new") or setattr(x, "more", 1)),
}


def _seen(obj: Any) -> Any:
    """What a caller sees of an object, as comparable values."""
    if isinstance(obj, np.ndarray):
        return obj.tolist()
    plain: Any = (
        list(obj.items()) if isinstance(obj, dict) else list(obj) if isinstance(obj, collections.abc.Iterable) else None
    )
    if isinstance(obj, set):
        plain = sorted(map(repr, obj))
    fields = {k: repr(v) for k, v in getattr(obj, "__dict__", {}).items() if k != "__graftax_tables__"}
    slots = [getattr(obj, "a", None), getattr(obj, "b", None)] if isinstance(obj, Slotted) else None
    parts = (obj.__defaults__, obj.__kwdefaults__) if hasattr(obj, "__kwdefaults__") else None
    return repr((plain, list(fields.items()), slots, parts))


@pytest.fixture(params=["exchanged", "replaced"])
def how(request: pytest.FixtureRequest) -> Iterator[str]:
    """How the content of a container becomes another: by its layout, or by calls, where that is not known."""
    _core.use_layouts(request.param == "exchanged")
    yield request.param
    _core.use_layouts(True)


class Applied:
    """An Outcome of one call of `change` on some objects, to be applied to others like them."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

        def step(*objs: Any) -> None:
            for name, obj in zip(names, objs, strict=True):
                CHANGES[name][1](obj)

        jitted = graftax.jit(step)
        jitted(*self.made())
        [self.entry] = jitted._table.entries.values()  # type: ignore[attr-defined]
        self.outcome = self.entry.outcomes[-1]
        self.expected = [_seen(obj) for obj in self.changed()]

    def made(self) -> list[Any]:
        return [CHANGES[name][0]() for name in self.names]

    def changed(self) -> list[Any]:
        objs = self.made()
        for name, obj in zip(self.names, objs, strict=True):
            CHANGES[name][1](obj)
        return objs

    def nodes(self, objs: list[Any]) -> list[Any]:
        _, graphdef = _core.record(tuple(objs), ("",) * len(objs))
        walked = _core.walk(graphdef, tuple(objs))
        assert walked is not None
        return walked[1]

    def check(self, objs: list[Any], before: list[Any]) -> bool:
        after = [_seen(obj) for obj in objs]
        assert after in (before, self.expected), "half written"
        return after == self.expected


@pytest.mark.quick(8)
@pytest.mark.quick(200)  # a case takes milliseconds
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_written_is_what_the_function_did(name: str, how: str) -> None:
    applied = Applied([name])
    [obj] = objs = applied.made()
    kept = CHANGES[name][0]()
    applied.outcome.apply([], [], applied.nodes(objs))
    assert [_seen(obj)] == applied.expected
    applied.outcome.apply([], [], applied.nodes([kept]))
    assert _seen(kept) == _seen(obj)
    if not isinstance(obj, np.ndarray) and not callable(obj):
        CHANGES[name][1](kept)  # still an object like any other


@pytest.mark.parametrize("name", CHANGES)
def test_a_failed_allocation_leaves_everything_as_it_was(name: str, how: str) -> None:
    applied = Applied(["list", name, "attributes", "dict key"])
    for k in itertools.count():
        objs = applied.made()
        nodes, before = applied.nodes(objs), [_seen(obj) for obj in objs]
        apply = applied.outcome.apply
        failed = False
        testcapi.set_nomemory(k, k + 1)
        try:
            apply([], [], nodes)
        except MemoryError:
            failed = True
        finally:
            testcapi.remove_mem_hooks()
        written = applied.check(objs, before)
        assert failed != written
        if written:
            break
    assert k, "no allocation was met"


@pytest.mark.parametrize("name", [name for name in CHANGES if "user keys" in name])
def test_a_hash_that_raises_leaves_everything_as_it_was(name: str, how: str) -> None:
    applied = Applied(["list", name, "attributes", "dict key"])
    for k in itertools.count(1):
        objs = applied.made()
        nodes, before = applied.nodes(objs), [_seen(obj) for obj in objs]
        Key.left[0] = k
        try:
            applied.outcome.apply([], [], nodes)
        except Stop:
            assert not applied.check(objs, before)
            continue
        finally:
            Key.left[0] = 0
        assert applied.check(objs, before)
        break
    assert (k > 1) == ("go" not in name), "no key was hashed, or one that only goes was"


def test_a_bytearray_that_is_looked_at_is_refused_before_the_first_write(how: str) -> None:
    applied = Applied(["list", "bytearray", "array"])
    objs = applied.made()
    nodes, before = applied.nodes(objs), [_seen(obj) for obj in objs]
    for held in objs[1:]:
        with memoryview(held), pytest.raises(BufferError):
            applied.outcome.apply([], [], nodes)
        assert not applied.check(objs, before)


def test_what_others_changed_meanwhile_stays() -> None:
    class Model:
        def __init__(self) -> None:
            self.a, self.b, self.c = jnp.zeros(2), jnp.zeros(2), {"x": 0, "y": 0, "z": [1, 2]}

        def method(self) -> None: ...

    def step(m: Model) -> None:
        m.a = m.a + 1
        m.c["x"] = 1
        m.c["z"][0] = "new"

    jitted, model = graftax.jit(step), Model()
    jitted(Model())
    [entry] = jitted._table.entries.values()  # type: ignore[attr-defined]
    leaves, graphdef = _core.record((model,), ("m",))
    walked = _core.walk(graphdef, (model,))
    assert walked is not None
    mine = model.b = jnp.ones(2)
    model.c["y"], model.c["new"] = 5, 6
    model.c["z"][1] = "mine"
    entry.outcomes[-1].apply([jnp.ones(2)], leaves, walked[1])
    assert model.b is mine and model.a.tolist() == [1, 1]
    assert model.c == {"x": 1, "y": 5, "z": ["new", "mine"], "new": 6}


def test_an_iterator_under_way_notices() -> None:
    applied = Applied(["deque", "ordered dict"])
    objs = applied.made()
    running = [iter(obj) for obj in objs]
    for iterator in running:
        next(iterator)
    applied.outcome.apply([], [], applied.nodes(objs))
    for iterator in running:
        with pytest.raises(RuntimeError):
            next(iterator)


class Named:
    """Equal to its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return self.name == other


EQUAL_KEYS = [(1, 1.0), (1, True), (1.0, 1), (True, 1), (0.0, -0.0), (0.0, False), ("a", Named("a")), (2**70, 2.0**70)]


@pytest.mark.parametrize(("old", "new"), EQUAL_KEYS, ids=range(len(EQUAL_KEYS)))
@pytest.mark.parametrize(
    "make", [dict, OrderedDict, functools.partial(defaultdict, None)], ids=["dict", "odict", "ddict"]
)
@pytest.mark.quick(4)
def test_a_key_that_is_only_equal_takes_the_place_of_the_old_one(
    make: Callable[[Any], Any], old: Any, new: Any
) -> None:
    def replace(d: Any, x: Any) -> None:
        del d[old]
        d[new] = x

    for value in (jnp.ones(1), 5):
        for first in ({}, {"b": 2}, {"b": jnp.ones(2), 3: 1}):
            jitted = graftax.jit(replace)
            for _ in range(3):
                actual, expected = (make({**first, old: value}) for _ in range(2))
                jitted(actual, value)
                replace(expected, value)
                assert [(type(k), str(k)) for k in actual] == [(type(k), str(k)) for k in expected]
                assert [np.asarray(v).tolist() for v in actual.values()] == [
                    np.asarray(v).tolist() for v in expected.values()
                ]


def _refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a write called a method of the subclass")


OF_SUBCLASSES = {
    dict: ([("a", 1), ("b", 2)], "__init__ __getitem__ __setitem__ __delitem__ __iter__ keys items copy clear update"),
    OrderedDict: ([("a", 1), ("b", 2)], "__init__ __setitem__ __delitem__ __iter__ keys items copy clear update"),
    deque: ([1, 2, 3], "__init__ __getitem__ __setitem__ __iter__ __len__ copy clear extend append"),
    array.array: ([1, 2, 3], "__getitem__ __setitem__ __delitem__ __iter__ __len__ extend append tobytes frombytes"),
}


@pytest.mark.quick(20)
@pytest.mark.parametrize("base", OF_SUBCLASSES, ids=lambda base: base.__name__)
def test_no_method_of_a_subclass_is_called(base: type[Any], how: str) -> None:
    content, names = OF_SUBCLASSES[base]
    code = ("i",) if base is array.array else ()

    def made(cls: type[Any]) -> Any:
        result = cls.__new__(cls, *code)
        if issubclass(cls, dict):
            for key, value in content:
                (OrderedDict if issubclass(cls, OrderedDict) else dict).__setitem__(result, key, value)
        else:
            base.extend(result, content)
        return result

    def change(obj: Any) -> None:
        if base is dict or base is OrderedDict:
            value = base.pop(obj, "a")
            base.__setitem__(obj, "new", 3)
            base.__setitem__(obj, "a", value)
        else:
            base.extend(obj, [4, 5])

    closed = type("Closed", (base,), dict.fromkeys(names.split(), _refuse))
    plain, obj, twin = made(base), made(closed), made(closed)
    change(plain)
    jitted = graftax.jit(change)
    jitted(obj)
    jitted(twin)
    for each in (obj, twin):
        assert (base.items(each) if isinstance(each, dict) else [*base.__iter__(each)]) == (
            plain.items() if isinstance(plain, dict) else [*plain]
        )
        assert [*base.__iter__(each)] == [*plain]


@pytest.mark.quick(20)
@pytest.mark.skipif(not hasattr(testcapi, "watch_dict"), reason="no watchers of dicts before Python 3.12")
@pytest.mark.parametrize("name", [name for name in CHANGES if "dict" in name or "attributes" in name])
def test_who_watches_a_dict_is_told(name: str) -> None:
    watcher = testcapi.add_dict_watcher(0)
    try:
        applied = Applied([name])
        [obj] = objs = applied.made()
        watched = [x for x in (obj, getattr(obj, "__dict__", None)) if isinstance(x, dict)]
        for x in watched:
            testcapi.watch_dict(watcher, x)
        before = len(testcapi.get_dict_watcher_events())
        applied.outcome.apply([], [], applied.nodes(objs))
        assert [_seen(obj)] == applied.expected
        assert len(testcapi.get_dict_watcher_events()) > before
        for x in watched:
            testcapi.unwatch_dict(watcher, x)
    finally:
        testcapi.clear_dict_watcher(watcher)
