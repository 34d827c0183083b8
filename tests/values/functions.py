# SPDX-License-Identifier: Apache-2.0
"""Functions, methods and what is called like one."""

from __future__ import annotations

import functools
import operator
import types
from typing import Any

import jax
import jax.numpy as jnp
from values.record import IMMUTABLE, ITSELF, NO_ARRAYS, VALUE, Kind, constant

import graftax

no_arrays = {"traced": NO_ARRAYS}


def call(v: Any) -> tuple[Any, ...]:
    return v()


def a_def(w, n):
    def function():
        return w, n

    return function


def set_cells(v, w, n):
    for name, cell in zip(v.__code__.co_freevars, v.__closure__, strict=True):
        cell.cell_contents = {"w": w, "n": n}[name]


def set_two_cells(v, w, n):
    v[0].cell_contents, v[1].cell_contents = w, n


def a_default(w, n):
    def function(a=w, b=n):
        return a, b

    return function


def set_defaults(v, w, n):
    v.__defaults__ = (w, n)


def a_keyword_default(w, n):
    def function(*, a=w, b=n):
        return a, b

    return function


def set_keyword_defaults(v, w, n):
    v.__kwdefaults__ = {"a": w, "b": n}


def update_keyword_defaults(v, w, n):
    v.__kwdefaults__.update(a=w, b=n)


def an_attribute(w, n):
    def function():
        return None

    function.w, function.n = w, n
    return function


def a_nested(w, n):
    def outer():
        def inner(scale):
            return w * scale, n

        return inner(2)

    return outer


def a_decorated(w, n):
    def function():
        return w, n

    @functools.wraps(function)
    def wrapper():
        return function() if w is not None else None

    wrapper.calls = [n]
    return wrapper


def set_calls(v, w, n):
    v.calls[:] = [n]
    index = v.__code__.co_freevars.index("w")
    v.__closure__[index].cell_contents = w
    set_cells(v.__wrapped__, w, n)


def getter_and_setter(w, n):
    def get():
        return w, n

    def put(new_w, new_n):
        nonlocal w, n
        w, n = new_w, new_n

    return get, put


def a_recursive(w, n):
    def power(times):
        return w * 1 if times == 0 else power(times - 1) * w

    power.n = n
    return power


def change_recursive(v, w, n):
    v.__closure__[v.__code__.co_freevars.index("w")].cell_contents = w
    v.n = n


def a_captured_list(w, n):
    box = [w, n]
    return lambda: tuple(box)


def set_captured_list(v, w, n):
    v.__closure__[0].cell_contents[:] = [w, n]


class Scale:
    def __init__(self, w, n):
        self.w, self.n = w, n

    def both(self, k=1):
        return self.w * k, self.n

    jitted = graftax.jit(both)

    def get(self, key):
        return getattr(self, key)

    def __call__(self):
        return self.w, self.n

    @classmethod
    def named(cls):
        return (cls.__name__,)

    @staticmethod
    def plain():
        return ("plain",)


class Other(Scale):
    pass


def set_self(v, w, n):
    v.__self__.w, v.__self__.n = w, n


def set_instance(v, w, n):
    v.w, v.n = w, n


def pair(a, b, c=0):
    return a, b, c


def set_partial_attribute(v, w, n):
    v.keywords.update(b=w, c=n)


class Rule:
    """A callable with a partial of its own method in an attribute."""

    def __init__(self, w, n):
        self.w, self.n = w, n
        self.rule = functools.partial(self.both, n)

    def both(self, n):
        return self.w, n, self.n


@jax.custom_jvp
def doubled(x):
    return x * 2


doubled.defjvp(lambda primals, tangents: (primals[0] * 2, tangents[0] * 2))


@jax.custom_jvp
def tripled(x):
    return x * 3


tripled.defjvp(lambda primals, tangents: (primals[0] * 3, tangents[0] * 3))

TWO = jax.jit(lambda x: x * 2)
THREE = jax.jit(lambda x: x * 3)


def on_ones(v):
    return v(jnp.ones(2)), v


by_identity = {"identity": ITSELF, "without": {"traced": NO_ARRAYS, "in place": IMMUTABLE}}

KINDS = [
    Kind(
        "def",
        a_def,
        call,
        set_cells,
        identity=VALUE,
        note="Equal if code, globals, defaults, cells, attributes are.",
    ),
    Kind("lambda", lambda w, n: lambda: (w, n), call, set_cells, identity=VALUE),
    Kind("closure over a list", a_captured_list, call, set_captured_list, identity=VALUE),
    Kind("default value", a_default, call, set_defaults, identity=VALUE),
    Kind("keyword default, replaced", a_keyword_default, call, set_keyword_defaults, identity=VALUE),
    Kind("keyword default, updated", a_keyword_default, call, update_keyword_defaults, identity=VALUE),
    Kind(
        "attribute of a function",
        an_attribute,
        lambda v: (v.w, v.n, v()),
        lambda v, w, n: v.__dict__.update(w=w, n=n),
        identity=VALUE,
    ),
    Kind("function that makes a function", a_nested, call, set_cells, identity=VALUE),
    Kind("decorated function", a_decorated, lambda v: (*v(), *v.calls), set_calls, identity=VALUE),
    Kind(
        "recursive closure",
        a_recursive,
        lambda v: (v(2), v.n),
        change_recursive,
        identity=VALUE,
    ),
    Kind(
        "two closures over one variable, one of them `nonlocal`",
        getter_and_setter,
        lambda v: v[0](),
        lambda v, w, n: v[1](w, n),
        identity=VALUE,
    ),
    Kind(
        "cell",
        lambda w, n: [types.CellType(w), types.CellType(n)],
        lambda v: (v[0].cell_contents, v[1].cell_contents),
        set_two_cells,
    ),
    Kind(
        "bound method",
        lambda w, n: Scale(w, n).both,
        call,
        set_self,
        identity=VALUE,
        note="Traversed: the instance is part of the graph.",
    ),
    Kind(
        "method that is jitted",
        lambda w, n: Scale(w, n).jitted,
        call,
        set_self,
        identity=VALUE,
        note="Traversed like any bound method, and so is the `jit` of a bound method, a partial or an object.",
    ),
    Kind(
        "bound method of a list",
        lambda w, n: [w, n].copy,
        lambda v: tuple(v()),
        lambda v, w, n: v.__self__.__setitem__(slice(None), [w, n]),
        identity=VALUE,
    ),
    constant("class method", Scale.named, Other.named),
    constant("static method", Scale.plain, pair),
    Kind("callable object", Scale, call, set_instance),
    Kind(
        "`functools.partial`",
        lambda w, n: functools.partial(pair, 1, b=w, c=n),
        lambda v: (*v(), *v.args, *v.keywords.values()),
        set_partial_attribute,
        identity=VALUE,
    ),
    Kind(
        "`functools.partial` of a method",
        lambda w, n: functools.partial(Scale(w, n).both, k=2),
        call,
        lambda v, w, n: set_self(v.func, w, n),
        identity=VALUE,
    ),
    Kind(
        "`functools.partial` within a `functools.partial`",
        lambda w, n: [functools.partial(functools.partial(pair, w), n), functools.partial(a_def(w, n))],
        lambda v: (*v[0](), *v[1]()),
        lambda v, w, n: v.__setitem__(slice(None), [functools.partial(pair, w, n), functools.partial(a_def(w, n))]),
    ),
    Kind(
        "object that holds a partial of its own method",
        Rule,
        lambda v: v.rule(),
        lambda v, w, n: v.__init__(w, n),
    ),
    constant("built-in function", len, max, **{**by_identity}),
    Kind(
        "`operator.itemgetter`",
        lambda w, n: n,
        on_ones,
        statics=(operator.itemgetter(0), operator.itemgetter(1)),
        **by_identity,
    ),
    Kind("`jax.custom_jvp` function", lambda w, n: n, on_ones, statics=(doubled, tripled), **by_identity),
    Kind("function of `jax.jit`", lambda w, n: n, on_ones, statics=(TWO, THREE), **by_identity),
]
