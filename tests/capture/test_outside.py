# SPDX-License-Identifier: Apache-2.0
"""Code under a trace that reaches what is neither an argument nor a global of the function: programs of each kind, run
plainly and jitted, on a hit, and after a change. Where `jit` cannot follow it says so, and changes nothing."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

import graftax
from programs import ABSENT, ONE, Program, beside, module, run


def _set(name: str, value: Any) -> Any:
    return lambda m: setattr(m, name, value)


def _times(name: str) -> Any:
    return lambda m: setattr(m, name, getattr(m, name) * 3)


PART = "class Part:\n    def __init__(self, w): self.w = w\n"

NESTED = {
    "a global array": Program(
        "W = jnp.ones(2)\n@graftax.jit\ndef g(x): return x * W\ndef f(x): return g(x)", _times("W")
    ),
    "a list that is changed": Program(
        "L = [0]\n@graftax.jit\ndef g(x):\n    L[0] += 1\n    return x * L[0]\ndef f(x): return g(x) + g(x)",
        lambda m: m.L.append(1),
        ("L",),
    ),
    "a variable of an enclosing call": Program(
        "def make():\n    w = [jnp.ones(2)]\n    @graftax.jit\n    def g(x):\n        w[0] = w[0] + x\n"
        "        return w[0]\n"
        "    return g, w\ng, w = make()\ndef f(x): return g(x)",
        lambda m: m.w.__setitem__(0, jnp.zeros(2)),
        ("w",),
    ),
    "a default": Program(
        "@graftax.jit\ndef g(x, k=2): return x * k\ndef f(x): return g(x)",
        lambda m: setattr(m.g.__wrapped__, "__defaults__", (5,)),
    ),
    "two deep": Program(
        "S = {'w': jnp.ones(2)}\n@graftax.jit\ndef h(x):\n    S['w'] = S['w'] + x\n    return S['w'].sum()\n"
        "@graftax.jit\ndef g(x): return h(x) * 2\ndef f(x): return g(x) + h(x)",
        lambda m: m.S.update(w=jnp.zeros(2)),
        ("S",),
    ),
    "a method": Program(
        f"{PART}    @graftax.jit\n    def step(self, x):\n        self.w = self.w + x\n        return self.w\n"
        "part = Part(jnp.ones(2))\ndef f(x): return part.step(x)",
        lambda m: setattr(m.part, "w", jnp.zeros(2)),
        ("part.w",),
    ),
}

SETS = {
    "of texts": Program("S = {'a', 'bb', 'ccc'}\ndef f(x): return [x * len(s) for s in S]", lambda m: m.S.add("dddd")),
    "that collide": Program("S = {8, 0, 16}\ndef f(x): return [x * s for s in S]", lambda m: m.S.add(24)),
    "as an argument": Program("def f(s): return list(s)", given=lambda m: ({"x", "y", "z", "w"},)),
    "frozen, in a key": Program(
        "D = {frozenset(['p', 'q', 'r']): 1}\nL = (frozenset(['s', 't', 'u']),)\n"
        "def f(x): return x, [list(k) for k in D], list(L[0])"
    ),
    "frozen, as an argument": Program("def f(s, x): return list(s), x", given=lambda m: (frozenset("abcdefgh"), ONE)),
    "frozen, below an object with arrays": Program(
        f"{PART}part = Part(jnp.ones(2))\npart.s = frozenset('abcdefgh')\ndef f(p): return list(p.s), p.w",
        given=lambda m: (m.part,),
    ),
    "frozen": Program("S = frozenset(['p', 'q', 'r'])\ndef f(x): return [x] * len(S), list(S)"),
    "of a helper": Program(
        "S = {'a', 'b', 'c'}\ndef order(): return [s for s in S]\ndef f(x): return x, order()",
        lambda m: setattr(m, "S", {"c", "d", "e"}),
    ),
    "on a class": Program(
        "class A: tags = {'u', 'v', 'w'}\ndef f(x): return [t for t in A.tags]", lambda m: m.A.tags.pop()
    ),
}

IDS = {
    "a dict of ids": Program(
        f"{PART}parts = [Part(jnp.ones(2)), Part(jnp.zeros(2))]\n"
        f"SCALE = {{id(p): float(i + 1) for i, p in enumerate(parts)}}\n"
        "def f(parts): return [p.w * SCALE[id(p)] for p in parts]",
        lambda m: m.SCALE.update({id(m.parts[0]): 7.0}),
        given=lambda m: (m.parts,),
    ),
    "a set of ids": Program(
        f"{PART}parts = [Part(jnp.ones(2)), Part(jnp.zeros(2))]\nFROZEN = {{id(parts[0])}}\n"
        "def f(parts): return [p.w if id(p) in FROZEN else p.w + 1 for p in parts]",
        lambda m: m.FROZEN.add(id(m.parts[1])),
        given=lambda m: (m.parts,),
    ),
    "one that is asked once": Program(
        f"{PART}part = Part(jnp.ones(2))\nlast = id(part)\ndef f(part): return part.w * (1 if id(part) == last else 0)",
        _set("last", 0),
        given=lambda m: (m.part,),
    ),
    "in a helper": Program(
        f"{PART}part = Part(jnp.ones(2))\nKNOWN = {{id(part): 'known'}}\ndef name(p): return KNOWN.get(id(p), 'new')\n"
        "def f(part): return part.w, name(part)",
        lambda m: m.KNOWN.clear(),
        given=lambda m: (m.part,),
    ),
    "in a list": Program(
        f"{PART}part = Part(jnp.ones(2))\nORDER = [id(part), 3]\ndef f(part): return part.w * ORDER.index(id(part))",
        lambda m: m.ORDER.insert(0, 5),
        given=lambda m: (m.part,),
    ),
}

IDENTITY = {
    "a class attribute": Program(
        f"{PART}    def here(self): return self is Part.FIRST\nPart.FIRST = part = Part(jnp.ones(2))\n"
        "def f(part): return part.w, part.here()",
        lambda m: setattr(m.Part, "FIRST", m.Part(jnp.ones(2))),
        given=lambda m: (m.part,),
    ),
    "a list on a class": Program(
        f"{PART}    frozen = []\npart = Part(jnp.ones(2))\nPart.frozen.append(part)\n"
        "def f(part): return part.w, any(p is part for p in Part.frozen)",
        lambda m: m.Part.frozen.clear(),
        given=lambda m: (m.part,),
    ),
    "a registry": Program(
        f"{PART}REGISTRY = {{}}\npart = REGISTRY['a'] = Part(jnp.ones(2))\ndef find(n): return REGISTRY[n]\n"
        "def f(part): return part.w, find('a') is part",
        lambda m: m.REGISTRY.update(a=m.Part(jnp.ones(2))),
        given=lambda m: (m.part,),
    ),
    "a helper's global": Program(
        f"{PART}part = CURRENT = Part(jnp.ones(2))\ndef is_current(p): return p is CURRENT\n"
        "def f(part): return part.w, is_current(part)",
        lambda m: setattr(m, "CURRENT", None),
        given=lambda m: (m.part,),
    ),
    "a default": Program(
        f"{PART}part = Part(jnp.ones(2))\ndef same(p, one=part): return p is one\n"
        f"def f(part): return part.w, same(part)",
        lambda m: setattr(m.same, "__defaults__", (m.Part(jnp.ones(2)),)),
        given=lambda m: (m.part,),
    ),
    "a child that a helper knows": Program(
        f"{PART}part = Part(jnp.ones(2))\npart.child = CHILD = Part(jnp.zeros(2))\ndef is_it(p): return p is CHILD\n"
        "def f(part): return part.child.w, is_it(part.child)",
        lambda m: setattr(m, "CHILD", m.part),
        given=lambda m: (m.part,),
    ),
}

BOTH_WAYS = {
    "read": Program(
        f"{PART}part = Part(jnp.ones(2))\ndef read(): return part.w\ndef f(p):\n    p.w = p.w + 1\n    return read()",
        lambda m: setattr(m.part, "w", jnp.zeros(2)),
        ("part.w",),
        lambda m: (m.part,),
    ),
    "changed": Program(
        f"{PART}part = Part(jnp.ones(2))\ndef change(): part.w = part.w * 2\ndef f(p):\n    change()\n    return p.w",
        lambda m: setattr(m.part, "w", jnp.zeros(2)),
        ("part.w",),
        lambda m: (m.part,),
    ),
    "a list": Program(
        "L = [jnp.ones(2)]\ndef add(x): L.append(x)\ndef f(l):\n    add(l[0])\n    return len(l), l[-1]",
        lambda m: m.L.clear() or m.L.append(jnp.zeros(2)),
        ("L",),
        lambda m: (m.L,),
    ),
    "a dict on a class": Program(
        "class A: d = {'w': jnp.ones(2)}\ndef read(): return A.d['w']\ndef f(d):\n    d['w'] = d['w'] + 1\n"
        "    return read()",
        lambda m: m.A.d.update(w=jnp.zeros(2)),
        ("A.d",),
        lambda m: (m.A.d,),
    ),
    "a child": Program(
        f"{PART}child = Part(jnp.ones(2))\ntop = Part(child)\ndef read(): return child.w\n"
        "def f(top):\n    top.w.w = top.w.w + 1\n    return read()",
        lambda m: setattr(m.child, "w", jnp.zeros(2)),
        ("child.w",),
        lambda m: (m.top,),
    ),
}

STATE = {
    "in a cell": Program(
        "def make():\n    n = jnp.zeros(2)\n    def g(x):\n        nonlocal n\n        n = n + x\n"
        "        return n\n    return g\n"
        "g = make()\ndef f(x): return g(x)"
    ),
    "in a default": Program("def g(x, seen=[]):\n    seen.append(1)\n    return x * len(seen)\ndef f(x): return g(x)"),
    "in an attribute": Program(
        "def g(x):\n    g.n = g.n + 1\n    return x * g.n\ng.n = 0\ndef f(x): return g(x)",
        lambda m: setattr(m.g, "n", 9),
        ("g.n",),
    ),
    "in keyword defaults": Program(
        "def g(x, *, k=2): return x * k\ndef f(x): return g(x)", lambda m: m.g.__kwdefaults__.update(k=5)
    ),
    "in defaults that are replaced": Program(
        "def g(x, k=2): return x * k\ndef f(x): return g(x)", lambda m: setattr(m.g, "__defaults__", (5,))
    ),
    "a variable that two share": Program(
        "def make():\n    w = jnp.ones(2)\n    def put(v):\n        nonlocal w\n        w = v\n"
        "    def get(): return w\n"
        "    return put, get\nput, get = make()\ndef f(x): return x * get()",
        lambda m: m.put(jnp.full(2, 4.0)),
    ),
}

WRAPPED = {
    "partial": Program(
        "W = jnp.ones(2)\ndef h(k, x): return x * W * k\ng = functools.partial(h, 2)\ndef f(x): return g(x)",
        _times("W"),
    ),
    "wraps": Program(
        "W = jnp.ones(2)\ndef deco(h):\n    @functools.wraps(h)\n    def inner(*a): return h(*a) + 1\n"
        "    return inner\n"
        "@deco\ndef g(x): return x * W\ndef f(x): return g(x)",
        _times("W"),
    ),
    "jax.grad": Program(
        "W = jnp.ones(2)\ndef h(x): return (x * x * W).sum()\ng = jax.grad(h)\ndef f(x): return g(x)", _times("W")
    ),
    "graftax.grad": Program("W = jnp.ones(2)\ndef h(x): return (x * x * W).sum()\nf = graftax.grad(h)", _times("W")),
    "jax.vmap": Program("W = jnp.ones(())\ndef h(x): return x * W\nf = jax.vmap(h)", _times("W")),
    "a bound method": Program(
        f"{PART}    def g(self, x): return x * self.w\npart = Part(jnp.ones(2))\nf = part.g",
        lambda m: setattr(m.part, "w", jnp.zeros(2)),
    ),
    "a callable object": Program(
        f"K = 2\n{PART}    def __call__(self, x): return x * self.w * K\nf = Part(jnp.ones(2))", _set("K", 5)
    ),
}

LOOPS = {
    "a helper's number": Program(
        "K = 2\ndef h(x): return x * K\ndef step(c, x): return c + h(x), None\n"
        "def f(x): return graftax.scan(step, 0.0, x)[0]",
        _set("K", 5),
    ),
    "a helper's array": Program(
        "W = jnp.ones(())\ndef h(x): return x * W\ndef step(c, x): return c + h(x), None\n"
        "def f(x): return graftax.scan(step, 0.0, x)[0]",
        _times("W"),
    ),
    "the step's own state": Program(
        "S = {'n': jnp.zeros(())}\ndef step(c, x):\n    S['n'] = S['n'] + x\n    return c, None\n"
        "def f(x): return graftax.scan(step, 0.0, x)[0]",
        lambda m: m.S.update(n=jnp.ones(())),
        ("S",),
    ),
    "a class attribute": Program(
        "class A:\n    k = 2\n    def step(self, c, x): return c + x * self.k, None\na = A()\n"
        "def f(x): return graftax.scan(a.step, 0.0, x)[0]",
        lambda m: setattr(m.A, "k", 5),
    ),
    "a class in a variable": Program(
        "def make(cls): return lambda v: v * cls.k\nclass A: k = 2\ndef f(x): return graftax.map(make(A), x)",
        lambda m: setattr(m.A, "k", 5),
    ),
    "a default of a helper": Program(
        "def h(x, k=2): return x * k\ndef f(x): return graftax.cond(True, lambda v: h(v), lambda v: v, x)",
        lambda m: setattr(m.h, "__defaults__", (5,)),
    ),
    "functions made anew": Program(
        "K = 2\ndef f(x): return graftax.while_loop(lambda c: c.sum() < 20, lambda c: c * K + 1, x)", _set("K", 3)
    ),
}

OPAQUE_SOURCE = "class Part: pass\npart = Part()\npart.of = {made}\ndef f(x): return x * {read}"
OPAQUE = {
    name: Program(f"import {module}\n{OPAQUE_SOURCE.format(made=made, read=read)}", change)
    for name, module, made, read, change in (
        ("ctypes", "ctypes", "ctypes.c_int(2)", "part.of.value", lambda m: setattr(m.part.of, "value", 5)),
        (
            "decimal.Context",
            "decimal",
            "decimal.Context(prec=2)",
            "part.of.prec",
            lambda m: setattr(m.part.of, "prec", 5),
        ),
        ("a queue", "queue", "queue.SimpleQueue()", "(part.of.qsize() + 2)", lambda m: m.part.of.put(1)),
        ("hashlib", "hashlib", "hashlib.sha256()", "len(part.of.hexdigest())", lambda m: m.part.of.update(b"a")),
        (
            "ElementTree",
            "xml.etree.ElementTree",
            "xml.etree.ElementTree.Element('a')",
            "len(part.of.tag)",
            lambda m: setattr(m.part.of, "tag", "abc"),
        ),
    )
}

LOCAL = {
    "an instance": Program("def f(x):\n    class A:\n        def get(self): return x\n    return A()"),
    "a class": Program("def f(x):\n    class A:\n        w = x\n    return A"),
    "an instance in a list": Program("def f(x):\n    class A:\n        def get(self, y=x): return y\n    return [A()]"),
    "a bound method": Program("def f(x):\n    class A:\n        def get(self): return x\n    return A().get"),
    "in an argument": Program(
        "def f(d, x):\n    class A:\n        def get(self): return x\n    d['a'] = A()", given=lambda m: ({}, ONE)
    ),
}

FROZEN_SOURCE = "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass P:\n    w: object\np = P(jnp.ones(2))\n"
FROZEN = {
    f"{name}, {what}": Program(
        f"{FROZEN_SOURCE}def f(p):\n    {code}\n    return p.w", names=("p.w", "p.new"), given=lambda m: (m.p,)
    )
    for what, value in (("an array", "p.w * 2"), ("a number", "5"))
    for name, code in (
        ("object.__setattr__", f"object.__setattr__(p, 'new', {value})"),
        ("__dict__", f"p.__dict__['new'] = {value}"),
        ("vars", f"vars(p).update(new={value})"),
    )
}

HOST_SOURCE = "T = np.arange(2, dtype=np.float32)\nSHAPE = jax.ShapeDtypeStruct((2,), jnp.float32)\nlog = []\n"
HOST = {
    "a table": Program(
        f"{HOST_SOURCE}def look(v): return T[np.asarray(v, int)]\n"
        f"def f(x): return jax.pure_callback(look, SHAPE, x * 0)",
        lambda m: m.T.__setitem__(slice(None), 7),
    ),
    "a table that is replaced": Program(
        f"{HOST_SOURCE}def look(v): return T[np.asarray(v, int)]\n"
        f"def f(x): return jax.pure_callback(look, SHAPE, x * 0)",
        _times("T"),
    ),
    "a table of a local function": Program(
        f"{HOST_SOURCE}def f(x):\n    def look(v): return (v * T).astype(np.float32)\n"
        "    return graftax.pure_callback(look, SHAPE, x)",
        lambda m: m.T.__setitem__(slice(None), 7),
    ),
    "a table that both read, a global": Program(
        f"{HOST_SOURCE}def f(x):\n    def look(v): return (v * T).astype(T.dtype)\n"
        "    return jax.pure_callback(look, SHAPE, x) + T",
        lambda m: m.T.__setitem__(slice(None), 7),
    ),
    "a table that both read, a variable": Program(
        f"{HOST_SOURCE}def make(t):\n    def look(v): return (v * t).astype(t.dtype)\n"
        "    def f(x): return jax.pure_callback(look, SHAPE, x) + t\n    return f\nf = make(T)",
        lambda m: m.T.__setitem__(slice(None), 7),
    ),
    "a table in a dict that both read": Program(
        f"{HOST_SOURCE}D = {{'t': T}}\ndef f(x):\n    def look(v): return (v * D['t']).astype(D['t'].dtype)\n"
        "    return graftax.pure_callback(look, SHAPE, x) + D['t']",
        lambda m: m.D.update(t=m.T + 5),
    ),
    "a list that fills": Program(
        f"{HOST_SOURCE}def f(x):\n    jax.debug.callback(lambda v: log.append(v.tolist()), x, ordered=True)\n"
        "    jax.effects_barrier() if not isinstance(x, jax.core.Tracer) else None\n    return x",
        lambda m: m.log.clear(),
    ),
    "a method of an object": Program(
        f"{HOST_SOURCE}class Log:\n    def __init__(self): self.n = 0\n    def note(self, v):\n"
        f"        self.n += 1\n        return v\n"
        "it = Log()\ndef f(x): return jax.experimental.io_callback(it.note, SHAPE, x)",
        lambda m: setattr(m.it, "n", 10),
        ("it.n",),
    ),
}

FOLLOWED = {
    "nested jit": NESTED,
    "sets": SETS,
    "ids": IDS,
    "identity": IDENTITY,
    "both ways": BOTH_WAYS,
    "state of functions": STATE,
    "wrapped": WRAPPED,
    "loops": LOOPS,
    "host functions": HOST,
}
MAY_BE_REFUSED = {"opaque": OPAQUE, "local classes": LOCAL, "frozen": FROZEN}


def _cases(families: dict[str, dict[str, Program]]) -> list[Any]:
    assert all(len(programs) >= 5 for programs in families.values())
    return [pytest.param(p, id=f"{family}: {name}") for family, all_ in families.items() for name, p in all_.items()]


@pytest.mark.parametrize("program", _cases(FOLLOWED))
def test_it_is_as_plain_python(program: Program) -> None:
    beside(program)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_outside_of_jit_is_as_in_it(name: str) -> None:
    assert run(LOOPS[name], lambda f: f) == run(LOOPS[name], graftax.jit)


@pytest.mark.parametrize("program", _cases(MAY_BE_REFUSED))
def test_it_is_as_plain_python_or_an_error(program: Program) -> None:
    given = run(program, graftax.jit)
    results, kept = given[::2], given[1::2]
    if any(isinstance(r, type) and issubclass(r, graftax.GraftaxError) for r in results):
        assert len(set(map(str, results))) == 1
        assert all(ABSENT in names or names == kept[0] for names in kept)
    else:
        assert given == run(program, lambda f: f)


@pytest.mark.parametrize("raised", ["ValueError", "KeyboardInterrupt", "SystemExit", "GeneratorExit", "Stop"])
@pytest.mark.parametrize("change", ["p.w = p.w + x", "A.k = x", "L.append(x)", "global n\n    n = x", "D['w'] = x"])
def test_no_tracer_is_left_whatever_is_raised(change: str, raised: str) -> None:
    source = (
        f"{PART}class A: k = None\nclass Stop(BaseException): pass\nL, D, n, p = [], {{}}, None, Part(jnp.ones(2))\n"
        f"def helper(x):\n    {change}\n    raise {raised}\ndef f(x): helper(x)"
    )
    m = module(source)
    kinds = {"ValueError": ValueError, "KeyboardInterrupt": KeyboardInterrupt, "SystemExit": SystemExit}
    for _ in range(2):
        with pytest.raises(kinds.get(raised) or getattr(m, raised, GeneratorExit)):
            graftax.jit(m.f)(ONE)
        assert (m.A.k, m.L, m.D, m.n, m.p.w.tolist()) == (None, [], {}, None, [1, 1])
