# SPDX-License-Identifier: Apache-2.0
"""What decides a lookup in a class: names that it, a base or a mixin gets later, special methods, computed names."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import pytest

import graftax
from programs import Program, beside, module

CLASSES = """import abc, dataclasses, inspect, operator, typing
class Base:
    k = [2.0]
    n = 1.0
    w = jnp.ones(())
    def go(self, x): return x * 2
class Mixin: pass
class B(Mixin, Base): pass
class C(B): pass
class V:
    def __init__(self): self.v = 1.0
    def visit(self, kind, x): return getattr(self, 'visit_' + kind)(x)
    def visit_a(self, x): return x * 2
b, c, v = B(), C(), V()
key = operator.attrgetter('n')
go = operator.methodcaller('go', 3.0)
@typing.runtime_checkable
class Goes(typing.Protocol):
    def runs(self): ...
@dataclasses.dataclass(frozen=True)
class Key:
    a: int
Key.unit = 1.0
keys = {Key(1)}
class Kinds: all = (Base, V)
def by_default(*, cls=Base): return cls.n
def by_tuple(classes=((Base, 1), (V, 2))): return classes[0][0].n
def by_closure():
    held = [Base]
    return lambda: held[0].n
of_closure = by_closure()
"""
READS = {
    "a list of the base": "x * b.k[0]",
    "a number of the base": "x * b.n",
    "an array of the base": "x * c.w",
    "a method of the base": "c.go(x)",
    "through super": "x * super(C, c).n",
    "its truth": "x * (2 if v else 3)",
    "equality": "x * (b == c)",
    "a length": "x * (len(b) if hasattr(b, '__len__') else 7)",
    "membership": "x * ((1 in b) if hasattr(type(b), '__contains__') else 7)",
    "names of a list": "x * sum(getattr(b, name) for name in ('n',))",
    "a computed name": "v.visit('a', x)",
    "dir": "x * len([name for name in dir(v) if name.startswith('visit_')])",
    "members": "x * len(inspect.getmembers(V, inspect.isfunction))",
    "attrgetter": "x * key(b)",
    "methodcaller": "x * go(b)",
    "a format": "x * float('{0.n}'.format(b))",
    "the walk over the bases": "x * sum(getattr(cls, 'n', 0.5) for cls in type(c).__mro__)",
    "a protocol": "x * isinstance(b, Goes)",
    "a class pattern": "matched(b, x)",
    "a class in a default": "x * by_default()",
    "a class in a tuple": "x * by_tuple()",
    "a class in a closure": "x * of_closure()",
    "a class in a class": "x * Kinds.all[0].n",
    "the class of a key": "x * sum(key.unit for key in keys)",
    "an attribute of a method": "x * getattr(b.go, 'rate', 2.0)",
}
MATCHED = """
def matched(o, x):
    match o:
        case Base(n=1.0): return x * 2
        case Base(n=5.0): return x * 3
    return x
"""
CHANGES = {
    "the base": lambda m: setattr(m.Base, "n", 5.0),
    "the list of the base": lambda m: m.Base.k.append(0) or m.Base.k.__setitem__(0, 5.0),
    "a list of its own": lambda m: setattr(m.B, "k", [5.0]),
    "a number of the mixin": lambda m: setattr(m.Mixin, "n", 5.0),
    "an array of its own": lambda m: setattr(m.B, "w", jnp.full((), 5.0)),
    "a method of its own": lambda m: setattr(m.B, "go", lambda self, x: x * 5),
    "a truth": lambda m: setattr(m.V, "__bool__", lambda self: False),
    "an equality": lambda m: setattr(m.Mixin, "__eq__", lambda self, other: True),
    "a length": lambda m: setattr(m.Base, "__len__", lambda self: 4),
    "a container": lambda m: setattr(m.Base, "__contains__", lambda self, x: True),
    "another visitor": lambda m: setattr(m.V, "visit_a", lambda self, x: x * 5),
    "one visitor more": lambda m: setattr(m.V, "visit_b", lambda self, x: x * 5),
    "a member of the protocol": lambda m: setattr(m.B, "runs", lambda self: 1),
    "a unit": lambda m: setattr(m.Key, "unit", 5.0),
    "the rate of a method": lambda m: setattr(m.Base.go, "rate", 5.0),
    "the name is gone": lambda m: delattr(m.Base, "n") or setattr(m.B, "n", 6.0) or setattr(m.Mixin, "n", 7.0),
    "getattr": lambda m: setattr(m.B, "__getattribute__", lambda self, name: object.__getattribute__(self, name)),
}


@pytest.mark.quick(7)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("read", READS)
def test_a_class_that_changes_is_read_anew(read: str, change: str):
    source = CLASSES + MATCHED + f"def f(x): return {READS[read]}\n"
    beside(Program(source, CHANGES[change], ("B.n", "Base.n", "Base.k")))


ABOVE = """
class Base:
    rate = 2.0
    def go(self, x): return x * self.rate
class Other:
    def go(self, x): return x * 3
class Mid(Base): pass
class C(Mid): pass
class S(Mid):
    def go(self, x): return super().go(x) + 1
c, s = C(), S()
"""
ASKED_ABOVE = {
    "isinstance": "x * (5 if isinstance(c, Other) else 7)",
    "isinstance, and a method": "c.go(x) * (5 if isinstance(c, Other) else 7)",
    "issubclass": "x * (5 if issubclass(C, Other) else 7)",
    "super": "s.go(x)",
    "the order": "(x, [cls.__name__ for cls in S.__mro__])",
    "the bases": "(x, [cls.__name__ for cls in Mid.__bases__])",
    "a pattern": "matched(c, x)",
}
OTHER_BASES = {
    "one more": lambda m: setattr(m.Mid, "__bases__", (m.Base, m.Other)),
    "one more, in front": lambda m: setattr(m.Mid, "__bases__", (m.Other, m.Base)),
    "another one": lambda m: setattr(m.Mid, "__bases__", (m.Other,)),
    "one more for the class itself": lambda m: setattr(m.C, "__bases__", (m.Mid, m.Other)),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("change", OTHER_BASES)
@pytest.mark.parametrize("read", ASKED_ABOVE)
def test_a_class_that_gets_other_bases_is_read_anew(read: str, change: str):
    matched = MATCHED.replace("Base(n=1.0)", "Other()").replace("Base(n=5.0)", "Base()")
    source = ABOVE + matched + f"def f(x): return {ASKED_ABOVE[read]}\n"
    beside(Program(source, OTHER_BASES[change]))


def test_what_a_new_base_holds_is_read_anew():
    source = ABOVE + "def f(x): return c.go(x), isinstance(c, Other)\n"
    m = module(source)
    f = graftax.jit(m.f)
    for rate in (3, 4, 5):
        if rate == 4:
            m.Mid.__bases__ = (m.Other,)
        m.Other.go = lambda self, x, rate=rate: x * rate
        for _ in range(2):
            assert [float(f(jnp.ones(()))[0]), f(jnp.ones(()))[1]] == [float(m.f(1.0)[0]), m.f(1.0)[1]]


def test_bases_that_change_are_explained():
    m = module(ABOVE + "def f(x): return x * (5 if isinstance(c, Other) else 7)\n")
    f = graftax.jit(m.f)
    f(jnp.ones(()))
    m.Mid.__bases__ = (m.Base, m.Other)
    f(jnp.ones(()))
    causes = map(str, graftax.explain(f).variants[1].causes)
    assert any("the order of the bases of C was ('Mid', 'Base', 'object')" in cause for cause in causes)


def test_a_module_that_gets_a_getattr():
    source = (
        "import types\nmod = types.ModuleType('mod')\nmod.__getattr__ = lambda name: 2.0\ndef f(x): return x * mod.k\n"
    )
    beside(Program(source, lambda m: setattr(m.mod, "__getattr__", lambda name: 5.0)))
    beside(Program(source, lambda m: setattr(m.mod, "k", 5.0)))


DICTS = """import inspect
class Box:
    def __init__(self): self.n = 1.0
class A:
    m, log, rate, w = Box(), [], 2.0, jnp.ones(())
    @classmethod
    def own(cls): return cls.__dict__['m']
a = A()
def f(x):
    {do}
    return x * A.rate + A.w, {read}
"""
IN_DICTS = {
    "of a class": ("A.__dict__['m'].n += 1", "A.__dict__['m'].n"),
    "of the class of an object": ("type(a).__dict__['m'].n += 1", "len(type(a).__dict__['log'])"),
    "of each base": ("pass", "[c.__dict__['m'].n for c in type(a).__mro__ if 'm' in c.__dict__]"),
    "in a class method": ("A.own().n += 1", "A.own().n"),
    "by inspect": ("inspect.getattr_static(a, 'm').n += 1", "inspect.getattr_static(A, 'rate')"),
    "of an array": ("A.w = A.__dict__['w'] + 1", "A.__dict__['w'] * 2"),
    "of a number": ("A.rate = A.__dict__['rate'] * 2", "A.__dict__['rate']"),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize(("do", "read"), IN_DICTS.values(), ids=IN_DICTS)
def test_the_dict_of_a_class_shows_what_a_trace_has_there(do: str, read: str):
    def change(m):
        m.A.m.n, m.A.rate = 40.0, 9.0
        m.A.log.append(1)

    beside(Program(DICTS.format(do=do, read=read), change, ("A.m.n", "A.log", "A.rate", "A.w")))


def test_another_thread_finds_the_classs_own_in_its_dict():
    class A:
        w = jnp.ones(())

    seen, is_traced, has_looked = [], threading.Event(), threading.Event()

    def look():
        is_traced.wait()
        seen.append(A.__dict__["w"])
        has_looked.set()

    def f(x):
        wait()
        return x * A.__dict__["w"]

    def wait():
        is_traced.set()
        has_looked.wait()

    thread = threading.Thread(target=look)
    thread.start()
    graftax.jit(f, warn_impure=False)(jnp.ones(1))
    thread.join()
    assert seen == [A.w] and isinstance(seen[0], jax.Array) and not isinstance(seen[0], jax.core.Tracer)


@pytest.mark.parametrize("setter", ["type.__setattr__", "Meta.__setattr__", "super(Meta, A).__setattr__"])
def test_an_attribute_that_a_method_sets_is_set_once_a_call(setter: str):
    held = "" if setter.startswith("super") else "A, "
    source = f"""
    class Meta(type): pass
    class A(metaclass=Meta): pass
    def f(x):
        {setter}({held}'n', getattr(A, 'n', 0) + 1)
        {setter}({held}'w', x * 3)
        return x * A.n
    """
    beside(Program(source, lambda m: setattr(m.A, "n", 7), ("A.n", "A.w")))
