# SPDX-License-Identifier: Apache-2.0
"""Code that asks for what a function holds, and changes it: defaults, keyword defaults, attributes, variables."""

from typing import NamedTuple

import jax.numpy as jnp
import pytest

import graftax
from programs import Program, beside

KEYWORD, DEFAULT = "def g(x, *, k={v}): return x * k\n", "def g(x, k={v}): return x * k\n"
PARTS = {
    "keyword defaults": KEYWORD + "def f(x):\n    g.__kwdefaults__['k'] += 1\n    return g(x)",
    "keyword defaults by update": KEYWORD
    + "def f(x):\n    g.__kwdefaults__.update(k=g.__kwdefaults__['k'] + 1)\n    return g(x)",
    "keyword defaults after the call": KEYWORD
    + "def f(x):\n    y = g(x)\n    g.__kwdefaults__['k'] += 1\n    return y",
    "keyword defaults that are read": KEYWORD + "def f(x): return x * g.__kwdefaults__['k']",
    "keyword defaults by another name": KEYWORD
    + "def f(x):\n    h = g\n    h.__kwdefaults__['k'] += 1\n    return g(x)",
    "its own keyword defaults": "def g(x, *, k={v}):\n    g.__kwdefaults__['k'] += 1\n    return x * k\n"
    "def f(x): return g(x)",
    "defaults": DEFAULT + "def f(x):\n    g.__defaults__ = (x + g.__defaults__[0],)\n    return g(x)",
    "defaults that are read": DEFAULT + "def f(x): return x * g.__defaults__[0]",
    "its own defaults": "def g(x, k={v}):\n    g.__defaults__ = (x + k,)\n    return x * k\ndef f(x): return g(x)",
    "defaults of a method": "class C:\n    def g(self, x, k={v}):\n        C.g.__defaults__ = (x + k,)\n"
    "        return x * k\nc = C()\ng = C.g\ndef f(x): return c.g(x)",
    "defaults below vmap": DEFAULT
    + "def f(x):\n    g.__defaults__ = (g.__defaults__[0] + 1,)\n    return jax.vmap(g)(x)",
    "an attribute": "def g(x, k=1): return x * g.scale\ng.scale = {v}\n"
    "def f(x):\n    g.scale = g.scale + x\n    return g(x)",
    "its own attribute": "def g(x, k=1):\n    g.scale = g.scale + x\n    return x * g.scale\ng.scale = {v}\n"
    "def f(x): return g(x)",
    "a variable": "def make():\n    c = {v}\n    def g(x, k=1): return x * c\n    return g\ng = make()\n"
    "def f(x):\n    g.__closure__[0].cell_contents += 1\n    return g(x)",
}


def change(m):
    if m.g.__kwdefaults__:
        m.g.__kwdefaults__["k"] = 9.0
    else:
        m.g.__defaults__ = (9.0,)


@pytest.mark.parametrize("value", ["1", "jnp.ones(())"])
@pytest.mark.parametrize("name", PARTS)
def test_code_may_change_what_a_function_holds(name, value):
    source = PARTS[name].replace("{v}", value)
    beside(Program(source, change, ("g.__defaults__", "g.__kwdefaults__", "g.scale")))


@pytest.mark.parametrize("value", [1, jnp.ones(())])
def test_code_may_change_a_list_in_the_defaults_of_a_function(value):
    source = "def g(x, k=[]): return x * len(k)\ndef f(x):\n    g.__defaults__[0].append(2)\n    return g(x)"
    beside(Program(source, lambda m: setattr(m.g, "__defaults__", ([value],)), ("g.__defaults__",)))


REACHED = {
    "a global": ("", "h"),
    "a list": ("kept = [h]\n", "kept[0]"),
    "a dict": ("kept = {'a': h}\n", "kept['a']"),
    "a partial": ("kept = functools.partial(h, 1.0)\n", "kept.func"),
    "a static method": ("class C:\n    h = staticmethod(h)\n", "C.h"),
    "a closure": ("def make():\n    k = h\n    def get(): return k\n    return get\nget = make()\n", "get()"),
    "an object": ("class S:\n    def __init__(self): self.h = h\nkept = S()\n", "kept.h"),
}
ASKED = ["getattr({o}, 'm', 0)", "(5 if hasattr({o}, 'm') else 2)", "tried({o})", "vars({o}).get('m', 0)", "asks({o})"]
SET = [
    "",
    "    {o}.m = x * 2\n",
    "    setattr({o}, 'm', 3)\n",
    "    puts({o}, x + 1)\n",
    "    {o}.__defaults__ = (x,)\n",
]
HELPERS = """def tried(o):
    try: return o.m
    except AttributeError: return 4
def asks(o): return getattr(o, 'm', 6)
def puts(o, v): o.m = v
def h(y, k=2.0, *, q=1.0): return y * k * q
"""
CHANGES = {
    "gained": lambda m: setattr(m.h, "m", 9.0),
    "an array": lambda m: setattr(m.h, "m", jnp.full(2, 3.0)),
    "deleted": lambda m: vars(m.h).pop("m", None),
    "keyword defaults": lambda m: setattr(m.h, "__kwdefaults__", {"q": 5.0}),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("changed", CHANGES)
@pytest.mark.parametrize("reached", REACHED)
@pytest.mark.parametrize("start", ["", "h.m = 1.5\n"])
def test_an_attribute_of_a_function_is_what_it_is_now(reached, changed, start):
    defined, o = REACHED[reached]
    for at, asked in enumerate(ASKED):
        body = SET[at].format(o=o) + f"    return x * {asked.format(o=o)} + {o}(1.0)\n"
        source = HELPERS + start + defined + "def f(x):\n" + body
        beside(Program(source, CHANGES[changed], ("h.m", "h.__defaults__", "h.__kwdefaults__")))


def test_a_function_that_a_root_holds_may_be_set_by_another_name():
    source = (
        HELPERS + "class C: h = staticmethod(h)\nkept = [h]\n"
        "def f(x):\n    puts(C.h, 'm', x)\n    return x * (2 if hasattr(kept[0], 'n') else 3) + kept[0].m"
    )
    beside(Program(source, lambda m: setattr(m.h, "n", 1), ("h.m",)))


def test_a_fresh_function_with_an_attribute_stays_one_program():
    jitted = graftax.jit(lambda g, x: g(x) + getattr(g, "m", 0))
    for i in range(3):

        def g(x):
            return x * getattr(g, "m", 2)

        g.m = jnp.float32(i)
        assert jitted(g, jnp.ones(2)).tolist() == [i + i] * 2
    assert jitted.cache_info().traces == 1


MADE_AGAIN = {
    "in a helper": "def helper(): return step()",
    "in a lambda": "def helper(): return (lambda: step())()",
    "below try": "def helper():\n    try: return step()\n    except: return -1",
    "twice": "def helper(): return step() + step()",
    "by another name": "def helper():\n    s = step\n    return s()",
    "by an attribute": "import types\nkept = types.SimpleNamespace()\n"
    "def helper():\n    kept.last = step\n    return kept.last()",
}


@pytest.mark.parametrize("name", MADE_AGAIN)
def test_a_function_with_state_that_is_made_again_between_calls(name):
    source = (
        "def make():\n    count = 0\n    def step():\n        nonlocal count\n        count += 1\n"
        f"        return count\n    return step\nstep = make()\n{MADE_AGAIN[name]}\ndef f(x): return x * helper()"
    )
    beside(Program(source, lambda m: setattr(m, "step", m.make()), ("step.__closure__[0].cell_contents",)))


LOG: list[int] = []


def note(x, log=LOG):
    log.append(1)
    return x


def test_a_call_that_fails_again_changes_nothing_again():
    """What a helper has was found by the first trace, in which it was heard of for the only time."""

    def f(x):
        raise ValueError(note(x))

    jitted = graftax.jit(f)
    for _ in range(3):
        with pytest.raises(ValueError):
            jitted(jnp.ones(1))
        assert LOG == []


class Defaults(NamedTuple):
    a: float
    b: float = 3.0


def test_the_defaults_of_a_named_tuple_that_are_replaced_are_noticed(monkeypatch: pytest.MonkeyPatch):
    step = graftax.jit(lambda x: x * Defaults(1.0).b)
    assert float(step(jnp.ones(()))) == 3
    monkeypatch.setattr(Defaults.__new__, "__defaults__", (7.0,))
    assert float(step(jnp.ones(()))) == 7
