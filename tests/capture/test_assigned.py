# SPDX-License-Identifier: Apache-2.0
"""Names that the code under a trace binds anew: globals, attributes of classes and modules, defaults of functions. Each
program runs plainly and jitted, again on a hit, and after a change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import graftax
from programs import ONE, Program, beside, module

PROGRAMS = {
    "the function's own global": Program(
        "n = 0\ndef f(x):\n    global n\n    n += 1\n    return x * n", lambda m: setattr(m, "n", 10), ("n",)
    ),
    "a helper's global": Program(
        "n = 0\ndef helper(x):\n    global n\n    n += 1\n    return x * n\ndef f(x): return helper(x)",
        lambda m: setattr(m, "n", 10),
        ("n",),
    ),
    "a helper's array": Program(
        "W = jnp.zeros(2)\ndef helper(x):\n    global W\n    W = W + x\ndef f(x):\n    helper(x)\n    return W.sum()",
        lambda m: setattr(m, "W", m.W * 3),
        ("W",),
    ),
    "a global that is not there yet": Program(
        "def helper(x):\n    global last\n    last = x * 2\n    return last\ndef f(x): return helper(x)",
        names=("last",),
    ),
    "a global that is deleted": Program(
        "n = 1\ndef helper():\n    global n\n    try: del n\n    except NameError: pass\n"
        "def f(x):\n    helper()\n    return x",
        lambda m: setattr(m, "n", 1),
        ("n",),
    ),
    "a table that is made when it is asked for": Program(
        "W = None\ndef table():\n    global W\n    if W is None: W = jnp.full(2, 3.0)\n    return W\n"
        "def f(x): return x * table()",
        lambda m: setattr(m, "W", None),
        ("W",),
    ),
    "a function": Program(
        "def one(x): return x\ndef two(x): return x * 2\nnow = one\ndef turn():\n    global now\n"
        "    now = two if now is one else one\ndef f(x):\n    turn()\n    return now(x)",
        lambda m: setattr(m, "now", m.two),
    ),
    "of two modules": Program(
        "import types\nother = types.ModuleType('other')\nother.n = 1\n"
        "exec('def bump():\\n    global n\\n    n += 1\\n    return n', vars(other))\nn = 100\n"
        "def f(x): return x * other.bump() + n",
        lambda m: setattr(m.other, "n", 50),
    ),
    "in a jitted function that is called": Program(
        "W = jnp.zeros(2)\n@graftax.jit\ndef helper(x):\n    global W\n    W = W + x\n    return W\n"
        "def f(x): return helper(x) + helper(x)",
        lambda m: setattr(m, "W", m.W * 2),
        ("W",),
    ),
    "two that change places": Program(
        "a, b = jnp.ones(2), jnp.zeros(2)\ndef swap():\n    global a, b\n    a, b = b, a\n"
        "def f(x):\n    swap()\n    return x * a + b",
        lambda m: setattr(m, "a", m.a + 1),
        ("a", "b"),
    ),
    "put back before the end": Program(
        "n = 1\ndef helper(x): return x * n\ndef f(x):\n    global n\n    old, n = n, 5\n    try: return helper(x)\n"
        "    finally: n = old",
        lambda m: setattr(m, "n", 2),
        ("n",),
    ),
    "an attribute of a class": Program(
        "class A: k = 1\ndef f(x):\n    A.k += 1\n    return x * A.k", lambda m: setattr(m.A, "k", 10), ("A.k",)
    ),
    "an attribute of a class, an array": Program(
        "class A: w = jnp.zeros(2)\ndef f(x):\n    A.w = A.w + x\n    return x * A.w",
        lambda m: setattr(m.A, "w", m.A.w * 2),
        ("A.w",),
    ),
    "an attribute of type(self)": Program(
        "class A:\n    n = 0\n    def step(self, x):\n        type(self).n += 1\n        return x * self.n\n"
        "a = A()\ndef f(x): return a.step(x)",
        lambda m: setattr(m.A, "n", 5),
        ("A.n",),
    ),
    "an attribute of cls": Program(
        "class A:\n    n = 0\n    @classmethod\n    def step(cls, x):\n        cls.n += 1\n        return x * cls.n\n"
        "def f(x): return A.step(x)",
        lambda m: setattr(m.A, "n", 5),
        ("A.n",),
    ),
    "a new attribute of a subclass": Program(
        "class A: k = 1\nclass B(A): pass\ndef f(x):\n    B.k = B.k + 1\n    return x * A.k * B.k",
        lambda m: setattr(m.A, "k", 7),
        ("A.k", "B.k"),
    ),
    "a method": Program(
        "class A:\n    def g(self, x): return x\na = A()\ndef f(x):\n    A.g = lambda self, x: x * 5\n    return a.g(x)"
    ),
    "an attribute that is deleted": Program(
        "class A: k = 1\ndef f(x):\n    if hasattr(A, 'k'): del A.k\n    return x",
        lambda m: setattr(m.A, "k", 3),
        ("A.k",),
    ),
    "an attribute of a module": Program(
        "import types\nM = types.ModuleType('M')\nM.k, M.w = 1, jnp.ones(2)\ndef helper(x):\n    M.k += 1\n"
        "    M.w = M.w + x\ndef f(x):\n    helper(x)\n    return M.w * M.k",
        lambda m: setattr(m.M, "k", 10),
        ("M.k", "M.w"),
    ),
    "an attribute of a helper": Program(
        "def helper(x):\n    helper.n = getattr(helper, 'n', 0) + 1\n    return x * helper.n\n"
        "def f(x): return helper(x)",
        lambda m: setattr(m.helper, "n", 10),
        ("helper.n",),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_the_code_assigns_is_assigned_on_every_call(name: str) -> None:
    beside(PROGRAMS[name])


SET_BEFORE = {
    "an attribute of a function": Program(
        "def g(x): return x\ndef mark(fn): fn.marks = getattr(fn, 'marks', 0) + 1\n"
        "def f(x):\n    mark(g)\n    return x, (lambda: getattr(g, 'marks', 0))()",
        lambda m: setattr(m.g, "marks", 5),
        ("g.marks",),
    ),
    "a default of a function": Program(
        "def g(x, k=[1.0]): return x * k[0]\ndef give(fn, *k): fn.__defaults__ = k\n"
        "def f(x):\n    give(g, [2.0, *g.__defaults__[0]])\n    return (lambda: g(x))()",
        lambda m: m.g.__defaults__[0].insert(0, 7.0),
        ("g.__defaults__",),
    ),
    "a list of a class": Program(
        "class C: pass\ndef put(cls, name, value): setattr(cls, name, value)\ndef get(cls): return cls.table\n"
        "def f(x):\n    put(C, 'table', [2.0, *getattr(C, 'table', [])][:3])\n"
        "    return x * (lambda: get(C)[0])(), (lambda: len(C.table))()",
        lambda m: m.C.table.append(5.0),
        ("C.table",),
    ),
}


@pytest.mark.parametrize("name", SET_BEFORE)
def test_what_the_code_sets_before_it_is_read_is_set_once(name: str) -> None:
    beside(SET_BEFORE[name])


NOT_YET = """
import inspect, typing
@typing.runtime_checkable
class Goes(typing.Protocol):
    def go(self): ...
class Base:
    def go_base(self): return 1
class C(Base): pass
c = C()
def looks():
    return ASKS
def f(x):
    before = looks()
    SETS
    return x, before, looks()
"""
ASKS_OF_A_NAME = {
    "a protocol": ("isinstance(c, Goes), issubclass(C, Goes)", "C.go = lambda self: 1", "go"),
    "a member of a base": ("isinstance(c, Goes), hasattr(c, 'go')", "Base.go = lambda self: 1", "go"),
    "a length": ("hasattr(c, '__len__'), bool(c)", "C.__len__ = lambda self: 0", "__len__"),
    "a static look": ("inspect.getattr_static(c, 'go', None) is None", "C.go = 1", "go"),
    "its names": ("'go' in dir(c), 'go' in vars(C), 'go' in C.__dict__", "C.go = 1", "go"),
    "a getter": ("getattr(c, 'go', None)", "C.__getattr__ = lambda self, name: 5.0", "__getattr__"),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", ASKS_OF_A_NAME)
def test_a_class_has_not_got_what_the_code_gives_it_later(name: str) -> None:
    asks, sets, attribute = ASKS_OF_A_NAME[name]

    def change(m: Any) -> None:
        for cls in (m.C, m.Base):
            if attribute in vars(cls):
                delattr(cls, attribute)

    beside(Program(NOT_YET.replace("ASKS", asks).replace("SETS", sets), change))


def test_a_class_is_given_what_its_metaclass_has() -> None:
    source = """
        class Meta(type):
            scale = 2.0
            @property
            def size(cls): return 7.0
        class C(metaclass=Meta): pass
        def f(x):
            read = C.scale, C.size, hasattr(C, "other")
            C.scale = 5.0
            C.other = 1.0
            return x, read
    """
    beside(Program(source, lambda m: delattr(m.C, "scale"), ("C.scale", "C.other")))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "assign", ["global n\n    n = x", "A.k = x", "A.k, M.k = x, x", "A.new = x"], ids=["global", "class", "both", "new"]
)
def test_an_error_takes_back_what_was_assigned(assign: str, error: type[BaseException]) -> None:
    source = "import types\nM = types.ModuleType('M')\nM.k = n = 0\nclass A: k = 0\n"
    m = module(f"{source}def helper(x):\n    {assign}\n    raise E\ndef f(x): return helper(x)", E=error)
    for _ in range(2):
        with pytest.raises(error):
            graftax.jit(m.f)(ONE)
        assert (m.n, m.A.k, m.M.k, hasattr(m.A, "new")) == (0, 0, 0, False)


def test_a_mode_that_forbids_changes_names_the_global() -> None:
    m = module("n = 0\ndef helper():\n    global n\n    n += 1\ndef f(x):\n    helper()\n    return x")
    with pytest.raises(graftax.MutationError, match=r"global users\.n"):
        graftax.jit(m.f, mutation="error")(ONE)
    graftax.jit(m.f, mutation="discard")(ONE)
    assert m.n == 0


def test_an_array_that_is_assigned_compiles_once() -> None:
    m = module("W = jnp.zeros(2)\ndef helper(x):\n    global W\n    W = W + x\ndef f(x):\n    helper(x)\n    return W")
    f = graftax.jit(m.f)
    for count in range(1, 6):
        assert f(ONE).tolist() == m.W.tolist() == [count] * 2
    assert f.cache_info().traces == 1


def test_what_is_lowered_assigns_too() -> None:
    m = module("W = jnp.zeros(2)\ndef helper(x):\n    global W\n    W = W + x\ndef f(x):\n    helper(x)\n    return W")
    compiled = graftax.jit(m.f).lower(ONE).compile()
    assert m.W.tolist() == [0, 0]
    for count in range(1, 4):
        assert compiled(ONE).tolist() == m.W.tolist() == [count] * 2


@pytest.mark.parametrize("name", ["a helper's global", "an attribute of a class", "an attribute of a module"])
def test_a_check_finds_nothing_where_it_is_given_back(name: str) -> None:
    program = PROGRAMS[name]
    beside(program, lambda f: graftax.jit(f, check=True))


def test_a_check_finds_a_global_that_is_not_given_back() -> None:
    m = module("n = 0\ndef f(x):\n    globals()['n'] += 1\n    return x * n")
    with pytest.raises(graftax.CheckError):
        for _ in range(2):
            graftax.jit(m.f, check=True)(ONE)


@pytest.mark.filterwarnings("ignore::graftax.ImpureCallWarning")  # of Thread.start()
def test_another_thread_keeps_its_values_while_globals_are_assigned() -> None:
    counts: set[int] = set()
    m = module(
        "n = 0\ndef helper(x):\n    global n\n    n = x\n    wait()\n    return n\ndef f(x): return helper(x)",
        wait=lambda: _in_thread(lambda: counts.add(m.n)),
    )
    assert graftax.jit(m.f)(ONE).tolist() == m.n.tolist() == [1, 1]
    assert counts == {0}


def _in_thread(run: Callable[[], Any]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.mark.parametrize("transform", ["scan", "grad", "cond"])
def test_a_value_of_a_transform_that_a_helper_keeps_is_an_error_that_names_the_place(transform: str) -> None:
    m = module(
        "S = {'w': jnp.zeros(2)}\ndef helper(x): S['w'] = x * 2\n"
        "def step(c, x):\n    helper(x)\n    return c, None\n"
        "def loss(x):\n    helper(x)\n    return x.sum()\n"
        "def scan(x): return graftax.scan(step, 0.0, x[None])[0]\n"
        "def grad(x): return graftax.grad(loss)(x)\n"
        "def cond(x): return graftax.cond(x.sum() > 0, loss, lambda x: x.sum(), x)"
    )
    for _ in range(2):
        with pytest.raises(graftax.MutationError, match=r"users\.S\['w'\]"):
            graftax.jit(getattr(m, transform))(ONE)
        assert m.S["w"].tolist() == jnp.zeros(2).tolist()


def test_threads_that_trace_at_once_leave_a_class_as_it_was() -> None:
    m = module(
        "class A: w, n = jnp.ones(2), 0\nclass B: n = 0\n"
        "def helper(x):\n    b = B()\n    b.n = 1\n    y = x * A.w\n    for _ in range(50): y = y + b.n\n    return y"
    )

    def trace() -> None:
        for _ in range(3):
            assert graftax.jit(lambda x: m.helper(x))(ONE).tolist() == [51, 51]

    threads = [threading.Thread(target=trace) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert vars(m.A)["w"].tolist() == [1, 1] and vars(m.B)["n"] == 0
