# SPDX-License-Identifier: Apache-2.0
"""State that no argument shows: functions, closures, partials, bound methods, globals; and what hides its state."""

import functools
import io
import itertools
import os
import random
import threading
import types
import warnings

import numpy as np
import pytest

import graftax
import oracle
from zoo import Box, f32, scalar

# ── fresh but equal ──


class Loss:
    def __init__(self, scale, w):
        self.scale, self.w = scale, w

    def __call__(self, x):
        return self.w * x * self.scale

    def method(self, x):
        return self.w * x * self.scale


def times(scale, w, x):
    return w * x * scale


def closure(scale, w):
    def inner(x):
        return w * x * scale

    return inner


def around(inner):
    return lambda x: inner(x)


def with_default(scale, w):
    def inner(x, *, scale=scale, w=w):
        return w * x * scale

    return inner


def with_attribute(scale, w):
    def inner(x):
        return inner.w * x * inner.scale

    inner.scale, inner.w = scale, w
    return inner


FRESH = {
    "lambda": lambda scale, w: lambda x: w * x * scale,
    "closure": closure,
    "closure_in_a_closure": lambda scale, w: around(closure(scale, w)),
    "default": with_default,
    "attribute": with_attribute,
    "partial": lambda scale, w: functools.partial(times, scale, w),
    "partial_of_a_lambda": lambda scale, w: functools.partial(lambda a, b, x: a * b * x, scale, w),
    "keyword_partial": lambda scale, w: functools.partial(lambda x, a, b: a * b * x, a=scale, b=w),
    "object": Loss,
    "bound_method": lambda scale, w: Loss(scale, w).method,
}
fresh = pytest.mark.parametrize("make", FRESH.values(), ids=FRESH)


@fresh
def test_a_fresh_but_equal_callable_is_one_key_and_its_arrays_are_inputs(make):
    f = graftax.jit(lambda loss, x: loss(x))
    for value in (1.0, 2.0, 3.0):
        assert f(make(2, f32(value)), f32(5)).tolist() == [10 * value]
    assert f.cache_info().traces == 1
    assert f(make(3, f32(1)), f32(5)).tolist() == [15.0]
    assert f(make(2.0, f32(1)), f32(5)).tolist() == [10.0]
    assert f.cache_info().traces == 3


@fresh
def test_a_fresh_but_equal_callable_inside_an_object_is_one_key(make):
    f = graftax.jit(lambda box, x: box.fns[0](x))
    for value in (1.0, 2.0):
        assert f(Box(fns=[make(2, f32(value))]), f32(5)).tolist() == [10 * value]
    assert f.cache_info().traces == 1


def test_functions_of_other_code_or_other_globals_are_other_keys():
    f = graftax.jit(lambda g, x: g(x))
    text = "lambda x: x * K"
    functions = [eval(text, {"K": k}) for k in (1, 2)] + [lambda x: x * 3, lambda x: x * 4]
    for _ in range(2):
        assert [f(g, f32(1)).tolist() for g in functions] == [[1.0], [2.0], [3.0], [4.0]]
    assert f.cache_info().traces == 4


# ── state that changes between calls ──


@pytest.mark.parametrize("how", ["target", "argument", "callable", "callable_argument"])
def test_an_attribute_that_changes_between_calls_is_used(how):
    loss = Loss(2, f32(1))
    call = {
        "target": lambda f: f(f32(5)),
        "argument": lambda f: f(loss.method, f32(5)),
        "callable": lambda f: f(f32(5)),
        "callable_argument": lambda f: f(loss, f32(5)),
    }[how]
    f = graftax.jit({"target": loss.method, "callable": loss}.get(how, lambda g, x: g(x)))
    for scale, value in ((2, 1.0), (5, 1.0), (5, 7.0), (2, 7.0)):
        loss.scale, loss.w = scale, f32(value)
        assert call(f).tolist() == loss(f32(5)).tolist() == [scale * value * 5]
    assert f.cache_info().traces == 2


NUMBER, ARRAY, ITEMS, TABLE = 1, f32(1), [1], {"a": 1}


def read_globals(x):
    return x * NUMBER + ARRAY, len(ITEMS), list(TABLE)


def test_globals_that_are_rebound_or_changed_are_used(monkeypatch):
    f = graftax.jit(read_globals)
    here = globals()

    def agree():
        expected, got = read_globals(f32(2)), f(f32(2))
        assert (got[0].tolist(), got[1:]) == (expected[0].tolist(), expected[1:])

    agree()
    monkeypatch.setitem(here, "NUMBER", 3)
    agree()
    monkeypatch.setitem(here, "ARRAY", f32(7))
    agree()
    monkeypatch.setitem(here, "ITEMS", [1, 2])
    agree()
    ITEMS.append(3)
    agree()
    monkeypatch.setitem(TABLE, "b", 2)
    agree()
    assert f.cache_info().traces == 5  # the array is an input


def test_variables_of_the_closure_that_are_rebound_or_changed_are_used():
    number, array, items = 1, f32(1), [1]

    def plain(x):
        return x * number + array, len(items)

    f = graftax.jit(plain)

    def agree():
        expected, got = plain(f32(2)), f(f32(2))
        assert (got[0].tolist(), got[1]) == (expected[0].tolist(), expected[1])

    agree()
    number = 4
    agree()
    array = f32(6)
    agree()
    array = f32(1, 2)
    agree()
    items.append(2)
    agree()
    items = []
    agree()


@pytest.mark.parametrize("helper_is", ["argument", "global"])
def test_a_global_that_a_called_function_names_is_used(helper_is):
    scope = {"K": 2.0}
    helper = eval("lambda x: x * K", scope)
    source = "lambda helper, x: helper(x)" if helper_is == "argument" else "lambda _, x: helper(x)"
    f = graftax.jit(eval(source, {"helper": helper}))
    assert f(helper, f32(1)).tolist() == [2.0]
    scope["K"] = 3.0
    assert f(helper, f32(1)).tolist() == helper(f32(1)).tolist()


@pytest.mark.parametrize("kind", ["class", "module"])
def test_an_attribute_of_a_class_or_module_that_changes_is_used(kind):
    holder = type("Config", (), {}) if kind == "class" else types.ModuleType("config")
    holder.k = 2.0
    f = graftax.jit(lambda x: x * holder.k)
    assert f(f32(1)).tolist() == [2.0]
    holder.k = 3.0
    assert f(f32(1)).tolist() == [3.0]


def test_an_object_that_the_closure_reaches_is_changed_by_the_function():
    def program():
        log, box = [], Box(n=0, w=f32(1))

        def f(x):
            log.append(len(log))
            box.n += 1
            box.w = box.w * 2
            return box.w + x

        return f, log, box

    plain, *expected = program()
    inner, *got = program()
    f = graftax.jit(inner)
    for _ in range(3):
        assert f(f32(1)).tolist() == plain(f32(1)).tolist()
        assert oracle.difference(expected, got) is None


# ── hidden state ──

HIDDEN = {
    "list_iterator": (lambda: iter([1, 2]), "list"),
    "generator": (lambda: (i for i in range(3)), "list"),
    "zip": (lambda: zip([1], [2], strict=True), "list"),
    "map": (lambda: map(str, [1]), "list"),
    "enumerate": (lambda: enumerate([1]), "list"),
    "count": (itertools.count, "list"),
    "text_file": (lambda: io.StringIO("a"), "Read the data"),
    "binary_file": (lambda: io.BytesIO(b"a"), "Read the data"),
    "open_file": (lambda: open(os.devnull), "Read the data"),  # noqa: SIM115
    "random": (lambda: random.Random(0), r"jax\.random"),
    "system_random": (random.SystemRandom, r"jax\.random"),
    "numpy_generator": (lambda: np.random.default_rng(0), r"jax\.random"),
    "numpy_state": (lambda: np.random.RandomState(0), r"jax\.random"),
    "bit_generator": (lambda: np.random.PCG64(0), r"jax\.random"),
}


class NextOf(zip):
    """An iterator by a class statement, whose position C code keeps."""


HIDDEN["subclass"] = (lambda: NextOf([1], [2]), "list")


@pytest.mark.parametrize(("make", "remedy"), HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize(
    ("wrap", "use", "path"),
    [
        (lambda v: v, lambda x: bool(x), "x"),
        (lambda v: Box(cfg={"k": [1, v]}), lambda x: bool(x.cfg["k"][1]), r"x\.cfg\['k'\]\[1\]"),
    ],
    ids=["bare", "deep"],
)
def test_what_hides_its_state_is_refused_with_its_path_and_the_way_out(make, remedy, wrap, use, path):
    f = graftax.jit(lambda x, w: use(x) and w)
    value = make()
    try:
        for _ in range(2):
            with pytest.raises(graftax.UnsupportedValueError, match=f"^{path}: .*{remedy}") as caught:
                f(wrap(value), f32(1))
        assert type(value).__name__ in str(caught.value)
        assert f.cache_info().traces == 0
        held = wrap(value)
        assert graftax.jit(lambda x, w: (x, w + 1))(held, f32(1))[0] is held  # what only passes through may be there
    finally:
        getattr(value, "close", lambda: None)()


class Keys:
    """An iterator whose position is in its attributes."""

    def __init__(self):
        self.key, self.drawn, self.ahead = f32(1), 0, []

    def __iter__(self):
        return self

    def __next__(self):
        if not self.ahead:
            self.key, self.ahead = self.key * 2, [self.key, self.key + 1]
        self.drawn += 1
        return self.ahead.pop() * self.drawn


@pytest.mark.parametrize("captured", [False, True], ids=["argument", "captured"])
def test_an_iterator_in_python_is_an_object_like_any_other(captured):
    def program(wrap):
        keys = Keys()
        f = wrap(lambda x: next(keys) + x) if captured else wrap(lambda x, keys: next(keys) + x)
        return [(f(f32(i)) if captured else f(f32(i), keys)).item() for i in range(5)], keys

    values, keys = program(graftax.jit)
    expected, of_plain = program(lambda f: f)
    assert values == expected
    assert oracle.difference(of_plain, keys) is None


def test_an_iterator_in_python_is_refused_where_it_reads_a_hidden_one():
    class Lines:
        def __init__(self):
            self.source = iter([1, 2])

        def __iter__(self):
            return self

        def __next__(self):
            return next(self.source)

    lines = Lines()
    with pytest.raises(graftax.UnsupportedValueError, match=r"^lines\.source: list_iterator: "):
        graftax.jit(lambda lines, x: next(lines) + x)(lines, f32(1))
    assert next(lines) == 1


def test_a_refused_value_is_not_advanced():
    values = iter([1, 2, 3])
    for _ in range(3):
        with pytest.raises(graftax.UnsupportedValueError):
            graftax.jit(lambda x: next(x))(values)
    assert list(values) == [1, 2, 3]


def test_a_captured_iterator_is_refused_by_name():
    values = iter([1, 2])
    f = graftax.jit(lambda x: x + next(values))
    with pytest.raises(graftax.UnsupportedValueError, match="closure values"):
        f(f32(1))
    assert next(values) == 1


@pytest.mark.quick(1)
@pytest.mark.parametrize("make", [threading.Lock, threading.RLock, threading.Event], ids=["lock", "rlock", "event"])
def test_a_lock_counts_by_identity_and_is_the_callers_own_inside(make):
    first, second = make(), make()
    seen = graftax.jit(lambda x, w: (x is first, w))
    for _ in range(2):
        assert [seen(x, f32(1))[0] for x in (first, second)] == [True, False]
    box = Box(lock=first, w=f32(1))
    out = graftax.jit(lambda box: (box.lock, box.w * 2))(box)
    assert out[0] is first


def test_a_lock_held_by_the_function_is_free_again():
    lock = threading.Lock()

    @graftax.jit
    def f(x):
        with lock:
            return x + 1

    for _ in range(2):
        assert f(f32(1)).tolist() == [2.0]
        assert not lock.locked()


@pytest.mark.quick(0)
def test_a_static_that_changes_on_most_calls_earns_one_warning_whatever_it_is():
    f = graftax.jit(lambda g, x: g(x), numbers="static")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for scale in range(20):
            f(closure(scale, f32(1)), scalar())
    assert len(caught) == 1
    assert "g" in str(caught[0].message) and issubclass(caught[0].category, graftax.RecompileWarning)
