# SPDX-License-Identifier: Apache-2.0
"""The function itself: its defaults and its code, when they are replaced, and when it calls itself."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import pytest

import graftax
from programs import Program, beside

NAMED = ("plain.__defaults__", "plain.__kwdefaults__")


def other_defaults(*defaults):
    return lambda m: setattr(m.plain, "__defaults__", copy.deepcopy(defaults))


PROGRAMS = {
    "a memo": Program(
        "def f(x, n=5, memo={}):\n    if n in memo: return memo[n]\n    if n < 2: return x\n"
        "    memo[n] = f(x, n - 1) + f(x, n - 2)\n    return memo[n]\nplain = f",
        other_defaults(6, {2: jnp.full(2, 9.0)}),
        NAMED,
    ),
    "a counter": Program(
        "def f(x, n=3, count=[0]):\n    count[0] += 1\n    return x if n == 0 else f(x, n - 1) + count[0]\nplain = f",
        lambda m: m.plain.__defaults__[1].append(7),
        NAMED,
    ),
    "a keyword": Program(
        "def f(x, n=3, *, seen=[]):\n    seen.append(n)\n"
        "    return x if n == 0 else f(x, n - 1) * len(seen)\nplain = f",
        lambda m: m.plain.__kwdefaults__.update(seen=[1, 2]),
        NAMED,
    ),
    "both": Program(
        "def f(x, n=2, a=[0], *, b=[0]):\n    a[0] += 1\n    b[0] += a[0]\n"
        "    return x if n == 0 else f(x, n - 1) * b[0]\n"
        "plain = f",
        other_defaults(4, [5]),
        NAMED,
    ),
    "an array": Program(
        "def f(x, n=2, w=jnp.ones(2)):\n    return x if n == 0 else f(x * w, n - 1)\nplain = f",
        other_defaults(2, jnp.full(2, 3.0)),
        NAMED,
    ),
    "keyword defaults that its code changes": Program(
        "def f(x, *, k=1):\n    plain.__kwdefaults__['k'] += 1\n    return x * k\nplain = f",
        lambda m: m.plain.__kwdefaults__.update(k=9),
        NAMED,
    ),
    "a list in its defaults that its code changes": Program(
        "def f(x, k=[1]):\n    plain.__defaults__[0].append(2)\n    return x * len(k)\nplain = f",
        other_defaults([5]),
        NAMED,
    ),
    "an array among its defaults that its code replaces": Program(
        "def f(x, k=jnp.ones(2)):\n    plain.__defaults__ = (x + k,)\n    return x * k\nplain = f",
        other_defaults(jnp.full(2, 9.0)),
        NAMED,
    ),
    "a number among its defaults that becomes an array": Program(
        "def f(x, k=1):\n    plain.__defaults__ = (x + k,)\n    return x * k\nplain = f",
        other_defaults(9),
        NAMED,
    ),
    "an array of its own": Program(
        "def f(x):\n    plain.last = plain.last + x\n    return x * plain.last\nplain = f\nplain.last = jnp.zeros(2)",
        lambda m: setattr(m.plain, "last", jnp.full(2, 5.0)),
        ("plain.last",),
    ),
    "calls of its own with defaults that it replaces": Program(
        "def f(x, k=jnp.ones(2), n=2):\n    plain.__defaults__ = (k + x, 2)\n"
        "    return x * k if n == 0 else f(x, n=n - 1)\nplain = f",
        other_defaults(jnp.full(2, 9.0), 2),
        NAMED,
    ),
    "an object": Program(
        "class Box: n = 0\nbox = Box()\ndef f(x, n=2, box=box):\n    box.n = box.n + 1\n    box.x = x\n"
        "    return x if n == 0 else f(x + box.n, n - 1)\nplain = f",
        lambda m: setattr(m.box, "n", 10),
        ("box.n", "box.x"),
    ),
    "a default that could not change before": Program(
        "def f(x, n=2, acc=None):\n    if acc is not None: acc[0] += 1\n    return x if n == 0 else f(x, n - 1) + n\n"
        "plain = f",
        other_defaults(3, [4]),
        NAMED,
    ),
    "one that is given on": Program(
        "def f(x, n=2, acc=[0]):\n    acc[0] += 1\n"
        "    return x if n == 0 else f(x, n - 1, [acc[0]]) + acc[0]\nplain = f",
        other_defaults(3, [2]),
        NAMED,
    ),
    "two functions": Program(
        "def f(x, n=5, acc=[0]):\n    acc[0] += 1\n    return x if n <= 0 else g(x, n - 1) + acc[0]\n"
        "def g(x, n, more=[0]):\n    more[0] += 2\n    return x if n <= 0 else f(x, n - 1) + more[0]\nplain = f",
        lambda m: m.plain.__defaults__[1].append(7),
        (*NAMED, "g.__defaults__"),
    ),
    "a global and a default that are one": Program(
        "log = []\ndef f(x, n=2, log=log):\n    log.append(n)\n    return x if n == 0 else f(x, n - 1) + total()\n"
        "def total(): return len(log)\nplain = f",
        lambda m: m.log.clear(),
        (*NAMED, "log"),
    ),
    "a variable of an enclosing call": Program(
        "def make():\n    seen = []\n    def f(x, n=2, acc=[0]):\n        acc[0] += 1\n        seen.append(n)\n"
        "        return x if n == 0 else f(x, n - 1) * acc[0] + len(seen)\n    return f, seen\n"
        "f, seen = make()\nplain = f",
        lambda m: m.seen.clear(),
        (*NAMED, "seen"),
    ),
    "a helper that is given it": Program(
        "def call(g, x, n): return g(x, n)\n"
        "def f(x, n=2, acc=[0]):\n    acc[0] += 1\n    return x if n == 0 else call(f, x, n - 1) + acc[0]\nplain = f",
        other_defaults(1, [100]),
        NAMED,
    ),
}

CHANGES = {
    "a keyword's default": Program(
        "def f(x, *, k=2): return x * k\nplain = f", lambda m: m.plain.__kwdefaults__.update(k=5), NAMED
    ),
    "all of them": Program(
        "def f(x, *, k=2): return x * k\nplain = f", lambda m: setattr(m.plain, "__kwdefaults__", {"k": 7}), NAMED
    ),
    "one that is no more": Program(
        "def f(x, *, k=2): return x * k\nplain = f", lambda m: setattr(m.plain, "__kwdefaults__", None), NAMED
    ),
    "one that changes": Program(
        "def f(x, *, seen=[]):\n    seen.append(1)\n    return x * len(seen)\nplain = f",
        lambda m: m.plain.__kwdefaults__.update(seen=[1, 2, 3, 4]),
        NAMED,
    ),
    "both kinds": Program(
        "def f(x, a=1, /, b=2, *, c=3, d=4): return x * a * b * c * d\nplain = f",
        lambda m: (setattr(m.plain, "__defaults__", (4, 5)), m.plain.__kwdefaults__.update(d=6)),
        NAMED,
    ),
    "that of a method": Program(
        "class A:\n    def g(self, x, *, k=2): return x * k\nf = A().g\nplain = A.g",
        lambda m: m.plain.__kwdefaults__.update(k=5),
        NAMED,
    ),
    "the code": Program(
        "def f(x, k=2): return x + k\ndef other(x, k=3): return x * k\nplain = f",
        lambda m: setattr(m.plain, "__code__", m.other.__code__),
    ),
    "the code of a method": Program(
        "class A:\n    def g(self, x): return x + 1\n    def other(self, x): return x * 5\nf = A().g\nplain = A.g",
        lambda m: setattr(m.plain, "__code__", m.A.other.__code__),
    ),
    "code with another signature": Program(
        "def f(x): return x + 1\ndef other(x, *more, y=3): return x * y\nplain = f",
        lambda m: setattr(m.plain, "__code__", m.other.__code__) or setattr(m.plain, "__kwdefaults__", {"y": 4}),
    ),
    "code that reads other globals": Program(
        "n, k = 2, 10\ndef f(x): return x + n\ndef other(x): return x * k\nplain = f",
        lambda m: setattr(m.plain, "__code__", m.other.__code__) or setattr(m, "k", 20),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_replaced(name):
    beside(CHANGES[name])


@pytest.mark.parametrize(
    "name", [name for name in CHANGES if name != "one that changes"]
)  # by value: changes stay inside
def test_what_is_replaced_of_a_function_by_value(name):
    beside(CHANGES[name], graftax.filter_jit)


def test_programs_of_other_code_are_gone_and_explained():
    def f(x):
        return x + 1

    jitted, also = graftax.jit(f), graftax.jit(f)
    before = f.__code__
    assert (jitted(1), also(1)) == (2, 2)
    f.__code__ = (lambda x: x * 10).__code__
    assert (jitted(1), also(1), jitted.lower(1).compile()(1)) == (10, 10, 10)
    f.__code__ = before
    assert (jitted(1), also(1)) == (2, 2)
    assert jitted.cache_info().currsize == 1


def named(f):
    """Compiled, and the global name is the compiled one, as where it is decorated."""
    compiled = f.__globals__["f"] = graftax.jit(f)
    return compiled


@pytest.mark.parametrize("wrap", [graftax.jit, named], ids=["called", "decorated"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_function_that_calls_itself(name, wrap):
    beside(PROGRAMS[name], wrap)


def test_a_gradient_of_one():
    def power(x, n=3, calls=[0]):  # noqa: B006
        calls[0] += 1
        return jnp.ones(()) if n == 0 else x * again(x, n - 1)

    again = power
    value, grad = graftax.jit(graftax.value_and_grad(power))(jnp.array(2.0))
    assert (value, grad, power.__defaults__[1]) == (8, 12, [4])


def test_it_is_traced_once_and_hit_afterwards():
    def walk(x, n=2, acc=[0]):  # noqa: B006
        acc[0] += 1
        return x if n == 0 else Names.walk(x + 1, n - 1)

    class Names:
        pass

    Names.walk = staticmethod(walk)
    f = graftax.jit(walk)
    for turn in range(1, 5):
        assert f(jnp.zeros(2)).tolist() == [2, 2]
        assert walk.__defaults__[1] == [3 * turn]
    assert f.cache_info().traces <= 3 and not isinstance(walk.__defaults__[1][0], jax.core.Tracer)
