# SPDX-License-Identifier: Apache-2.0
"""What code of the standard library reads for the code that calls it counts, though no code of the user's names it."""

from __future__ import annotations

import sys
import textwrap
import threading
import types
import typing

import jax.numpy as jnp
import pytest

import graftax
from programs import Program, beside


def _module(**names):
    module = sys.modules["graftax_test_named"] = types.ModuleType("graftax_test_named")
    vars(module).update(names)
    return module


@pytest.fixture(autouse=True)
def imported():
    yield
    sys.modules.pop("graftax_test_named", None)


MODULES = {
    "the statement": "import graftax_test_named as other",
    "importlib": "other = importlib.import_module(NAME)",
    "importlib, by a computed name": "other = importlib.import_module('graftax_test_' + NAME[-5:])",
}
CHANGES_OF_A_MODULE = {
    "a number": lambda m: setattr(sys.modules["graftax_test_named"], "rate", 3.0),
    "in place": lambda m: sys.modules["graftax_test_named"].table.append(4.0),
    "another module": lambda m: _module(rate=7.0, table=[]),
}


@pytest.mark.quick(9)
@pytest.mark.parametrize("change", CHANGES_OF_A_MODULE.values(), ids=CHANGES_OF_A_MODULE)
@pytest.mark.parametrize("how", MODULES.values(), ids=MODULES)
def test_a_module_that_code_imports_by_name(how, change):
    source = f"""
        import importlib, sys, types
        NAME = "graftax_test_named"
        sys.modules[NAME] = types.ModuleType(NAME)
        sys.modules[NAME].rate, sys.modules[NAME].table = 2.0, [1.0]
        def f(x):
            {how}
            return x * other.rate, len(other.table)
    """
    beside(Program(source, change))


FIELDS = """
    import dataclasses
    META = {"scale": 2.0, "more": [1.0]}
    @dataclasses.dataclass
    class C:
        a: float = dataclasses.field(default=1.0, metadata=META)
        b: object = DEFAULT
    def f(x): return HOW
"""
ASKS_OF_FIELDS = {
    "metadata": "[x * q.metadata.get('scale', 1.0) for q in dataclasses.fields(C)]",
    "metadata below": "[x * q.metadata.get('more', [7.0])[0] for q in dataclasses.fields(C())]",
    "the table": "x * C.__dataclass_fields__['a'].metadata['scale']",
    "a default": "dataclasses.fields(C)[0].default",
}


def change_field(m):
    m.META["scale"] = 5.0
    m.META["more"][0] = 3.0
    m.C.__dataclass_fields__["a"].default = 9.0


@pytest.mark.quick(8)
@pytest.mark.parametrize("default", ["0.5", "jnp.zeros(2)"])
@pytest.mark.parametrize("asks", ASKS_OF_FIELDS)
def test_what_the_fields_of_a_dataclass_hold(asks, default):
    source = FIELDS.replace("HOW", ASKS_OF_FIELDS[asks])
    default = default if default == "0.5" else f"dataclasses.field(default_factory=lambda: {default})"
    beside(Program(source.replace("DEFAULT", default), change_field))


DESCRIPTORS = {
    "the function of a cached_property": (
        "k = functools.cached_property(lambda self: 2.0)\n    k.__set_name__(None, 'k')",
        "x * C().k",
        lambda m: setattr(vars(m.C)["k"], "func", lambda self: 9.0),
    ),
    "the arguments of a partialmethod": (
        "def go(self, k, x): return x * k\n    two = functools.partialmethod(go, 2.0)",
        "C().two(x)",
        lambda m: setattr(vars(m.C)["two"], "args", (5.0,)),
    ),
    "a singledispatchmethod": (
        "go = functools.singledispatchmethod(lambda self, kind, x: x * 2)",
        "C().go('', x), C().go(1, x)",
        lambda m: vars(m.C)["go"].register(str, lambda self, kind, x: x * 5),
    ),
    "the state of a property's subclass": (
        "k = counting(lambda self: 2.0)",
        "x * C().k * C.k.scale",
        lambda m: setattr(m.C.k, "scale", 3.0),
    ),
    "the state of a staticmethod's subclass": (
        "go = scaled(lambda x: x * 2)",
        "C().go(x), C.go(x)",
        lambda m: setattr(vars(m.C)["go"], "scale", 3.0),
    ),
    "the state of a cached_property's subclass": (
        "k = cached(lambda self: 2.0)\n    k.__set_name__(None, 'k')",
        "x * C().k",
        lambda m: setattr(m.C.k, "scale", 3.0),
    ),
}
CLASSES = """
class counting(property):
    scale = 1.0
    def __init__(self, get):
        super().__init__(get)
        self.hits = 0
    def __get__(self, obj, cls=None):
        if obj is None: return self
        self.hits += 1
        return self.fget(obj)
class scaled(staticmethod):
    scale = 1.0
    def __get__(self, obj, cls=None):
        call = super().__get__(obj, cls)
        return lambda x: call(x) * self.scale
class cached(functools.cached_property):
    scale = 1.0
    def __get__(self, obj, cls=None):
        return self if obj is None else super().__get__(obj, cls) * self.scale
"""


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", DESCRIPTORS)
def test_what_a_descriptor_holds(name):
    body, result, change = DESCRIPTORS[name]
    source = f"{CLASSES}\nclass C:\n    {body}\ndef f(x): return {result}\n"
    beside(Program(source, change, ("C.k.hits",) if "counting" in body else ()))


def test_a_function_that_is_registered_for_a_class():
    source = """
        @functools.singledispatch
        def go(kind, x): return x * 2
        def f(x): return go("", x), go(1, x), go.dispatch(str) is go.dispatch(object)
    """
    beside(Program(source, lambda m: m.go.register(str, lambda kind, x: x * 5)))
    source = """
        @functools.singledispatch
        def go(kind): return 1
        def f(x):
            count = len(go.registry)
            go.register(str, lambda kind: 2)
            return x, count
    """
    beside(Program(source, lambda m: m.go.register(int, lambda kind: 3)))


ASKS_OF_A_REGISTRY = [
    "len(go.registry)",
    "[cls.__name__ for cls in go.registry]",
    "list(go.registry.keys())",
    "str in go.registry",
    "str in registry()",
    "go.registry.get(str, len)('four')",
    "go.dispatch(str)('four')",
    "len(HELD[0].registry)",
    "len(C.go.registry), len(vars(C)['way'].registry)",
    "len(vars(C)['method'].dispatcher.registry)",
    "len(getattr(go, 'regi' + 'stry'))",
    "len(PART.func.registry)",
]


@pytest.mark.quick(3)
@pytest.mark.parametrize("asks", ASKS_OF_A_REGISTRY)
def test_what_is_registered_is_asked_for(asks):
    source = f"""
        @functools.singledispatch
        def go(kind): return 1
        HELD, PART = [go], functools.partial(go, 1)
        class C:
            go = staticmethod(go)
            way = go.__get__(None, int)
            method = functools.singledispatchmethod(lambda self, kind: 1)
        def registry(): return go.registry
        def f(x): return x, {asks}
    """

    def change(m):
        m.go.register(str, lambda kind: 2)
        vars(m.C)["method"].register(str, lambda self, kind: 2)

    beside(Program(source, change))


SIGNATURES = {
    "a default": ("inspect.signature(g).parameters['k'].default", lambda m: setattr(m.g, "__defaults__", (3.0, []))),
    "a default, in place": ("inspect.signature(g).parameters['more'].default[0]", lambda m: m.MORE.insert(0, 5.0)),
    "of a partial": ("list(inspect.signature(functools.partial(g, 1)).parameters)", lambda m: setattr(m, "g", m.h)),
    "of a wrapper": (
        "inspect.signature(wrapper).parameters['k'].default",
        lambda m: setattr(m.g, "__defaults__", (3.0, [])),
    ),
    "of a class": ("list(inspect.signature(C).parameters)", lambda m: setattr(m.C, "__init__", m.h)),
    "a kept one": ("KEPT.parameters['more'].default[0]", lambda m: m.MORE.insert(0, 5.0)),
    "a kept one, changed": ("KEPT.parameters['more'].default.append(1) or len(MORE)", lambda m: m.MORE.append(5.0)),
    "getfullargspec": ("inspect.getfullargspec(g).defaults[0]", lambda m: setattr(m.g, "__defaults__", (3.0, []))),
    "an annotation": ("g.__annotations__['k']", lambda m: m.g.__annotations__.update(k=7.0)),
    "annotations": ("inspect.get_annotations(g)['k']", lambda m: setattr(m.g, "__annotations__", {"k": 7.0})),
    "the first annotation": ("dict(h.__annotations__)", lambda m: m.h.__annotations__.update(a=7.0)),
    "the first annotation, as a hint": ("typing.get_type_hints(h)", lambda m: m.h.__annotations__.update(a=int)),
    "first annotations": ("inspect.get_annotations(h)", lambda m: setattr(m.h, "__annotations__", {"a": 7.0})),
    "the first annotation of a class": ("typing.get_type_hints(Bare)", lambda m: m.Bare.__annotations__.update(a=int)),
    "annotations of a class": ("sorted(typing.get_type_hints(C))", lambda m: m.C.__annotations__.update(more=int)),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature(name):
    asks, change = SIGNATURES[name]
    source = f"""
        import inspect, typing
        MORE = [1.0]
        def g(x, k: 2.0 = 2.0, more=MORE): return x
        def h(self, a, b): pass
        @functools.wraps(g)
        def wrapper(*args): return g(*args)
        class C:
            field: int
            def __init__(self, a): pass
        class Bare: pass
        KEPT = inspect.signature(g)
        def f(x): return x, {asks}
    """
    beside(Program(source, change))


LEVELS = {
    "of the logger": lambda m: m.log.setLevel("DEBUG"),
    "of the one above": lambda m: m.log.parent.setLevel("DEBUG"),
    "of all": lambda m: m.logging.disable(m.logging.CRITICAL),
    "off": lambda m: setattr(m.log, "disabled", True),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("change", LEVELS.values(), ids=LEVELS)
@pytest.mark.parametrize("log", ["log", "holder.log"])
def test_what_a_logger_is_enabled_for(log, change):
    source = f"""
        import logging, types
        logging.getLogger("graftax_test.one").setLevel("NOTSET")
        logging.getLogger("graftax_test").setLevel("INFO")
        log = logging.getLogger("graftax_test.one.two")
        logging.disable(logging.NOTSET)
        log.disabled = False
        log.setLevel("INFO" if {change is LEVELS["of the logger"]} else "NOTSET")
        holder = types.SimpleNamespace(log=log)
        def f(x):
            levels = [{log}.isEnabledFor(level) for level in (logging.DEBUG, logging.INFO)]
            return (x * 2 if levels[0] else x), levels, {log}.getEffectiveLevel()
    """
    try:
        beside(Program(source, change))
    finally:
        module = sys.modules["logging"]
        module.disable(module.NOTSET)
        module.getLogger("graftax_test.one.two").disabled = False
        for name in ("graftax_test", "graftax_test.one"):
            module.getLogger(name).setLevel("NOTSET")


NAMES = {
    "the name of a class": ("C.__name__", lambda m: setattr(m.C, "__name__", "D")),
    "the qualified name of a class": ("C.__qualname__", lambda m: setattr(m.C, "__qualname__", "D")),
    "the class of an object": ("type(C()).__name__", lambda m: setattr(m.C, "__name__", "D")),
    "the name of a function": ("g.__name__", lambda m: setattr(m.g, "__name__", "h")),
    "the text of a function": ("g.__doc__", lambda m: setattr(m.g, "__doc__", "other")),
    "the name of a method": ("C().go.__name__", lambda m: setattr(m.C.go, "__name__", "h")),
    "the module of a function": ("g.__module__", lambda m: setattr(m.g, "__module__", "h")),
}
if sys.version_info >= (3, 12):  # before, code that `dataclasses` generates is not read
    NAMES["the text of a dataclass"] = ("repr(D(1))", lambda m: setattr(m.D, "__qualname__", "E"))


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", NAMES)
def test_the_names_of_classes_and_functions(name):
    asks, change = NAMES[name]
    source = f"""
        import dataclasses
        @dataclasses.dataclass
        class D:
            value: int
        class C:
            def go(self): pass
        def g(x): "text"
        def f(x): return x, {asks}
    """
    beside(Program(source, change))


def test_a_name_that_is_changed_back_is_served_again():
    class Named:
        pass

    f = graftax.jit(lambda x: (Named.__name__, x))
    names = []
    for name in ("Named", "Other", "Named", "Other"):
        Named.__name__ = name
        names.append(f(jnp.ones(1))[0])
    assert names == ["Named", "Other", "Named", "Other"]
    assert f._cache_size() == 2


def test_subclasses():
    source = """
        class Plugin: pass
        class One(Plugin):
            rate = 2.0
        def f(x): return [x * plugin.rate for plugin in Plugin.__subclasses__()]
    """

    def change(m):
        m.One.rate = 3.0
        m.Two = type("Two", (m.Plugin,), {"rate": 5.0})

    beside(Program(source, change))


# What a counter's trace makes is made anew each time it begins anew: it is no reason to do so again.
MADE_ANEW = {
    "a signature": ("def g(x: int): return x", "str(inspect.signature(g))"),
    "functions that are registered": (
        "@functools.singledispatch\n"
        "def g(x): return x\n"
        "@g.register\n"
        "def _(x: int): return 2 * x\n"
        "@g.register\n"
        "def _(x: str): return x",
        "(g(3), g('a'), g(2.0))",
    ),
    "a dataclass": ("@dataclasses.dataclass\nclass C:\n    k: int", "(C(3).k, len(dataclasses.fields(C)))"),
    "make_dataclass": ("C = dataclasses.make_dataclass('C', [('k', int)])", "dataclasses.replace(C(3), k=4).k"),
    "annotations": ("class C(typing.NamedTuple):\n    k: int", "sorted(typing.get_type_hints(C))"),
    "a dispatching method": (
        "class C:\n"
        "    @functools.singledispatchmethod\n"
        "    def g(self, k): return k\n"
        "    @g.register\n"
        "    def _(self, k: int): return 2 * k",
        "(C().g(3), C().g(2.0))",
    ),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", MADE_ANEW)
def test_what_the_function_makes_itself(name, monkeypatch):
    monkeypatch.setattr("graftax._jit.jitted.MOST_RESTARTS", 20)
    made, asks = MADE_ANEW[name]
    body = textwrap.indent(made, " " * 4)
    source = f"""
import dataclasses, inspect, typing
class Calls:
    n = 0
def older(x: int): pass
def f(x):
    Calls.n += 1
{body}
    return x * Calls.n, {asks}, sorted(typing.get_type_hints(older))
"""
    beside(Program(source, lambda m: m.older.__annotations__.update(more=int), ("Calls.n",)))


def test_functions_of_one_name_are_told_from_those_that_a_trace_makes():
    source = """
        import inspect
        class Calls:
            n = 0
        def make():
            def g(x: int): return x
            return g
        first, second = make(), make()
        def f(x):
            Calls.n += 1
            return x * Calls.n, [sorted(inspect.get_annotations(g)) for g in (first, second, make())]
    """
    beside(Program(source, lambda m: m.second.__annotations__.update(more=int), ("Calls.n",)))


def test_a_copier_that_is_registered_for_a_class():
    source = """
        import copy, copyreg
        class C:
            rate = 2.0
        def other():
            made = C()
            made.rate = 7.0
            return made
        def f(x): return x * copy.copy(C()).rate, x * copy.deepcopy(C()).rate
    """
    try:
        beside(Program(source, lambda m: m.copyreg.pickle(m.C, lambda c: (m.other, ()))))
    finally:
        table = sys.modules["copyreg"].dispatch_table
        for cls in [cls for cls in table if cls.__module__ == "users"]:
            del table[cls]


def test_a_trace_in_another_thread_makes_no_class_of_this_one():
    """Both come to a class of one name, as a trace does that makes the class anew each time."""

    def made(annotations):
        class Config:
            pass

        Config.__annotations__ = annotations
        return Config

    classes, has_met, may_end = (made({"a": int}), made({"b": float})), threading.Event(), threading.Event()

    def count(x, which):
        count = len(typing.get_type_hints(classes[which]))
        if which == 0 and threading.current_thread() is thread:
            has_met.set()
            may_end.wait(60)
        return x * count

    counted = graftax.jit(count, static_argnums=1, warn_impure=False)
    thread = threading.Thread(target=lambda: counted(jnp.ones(()), 0))
    thread.start()
    has_met.wait(60)
    counted(jnp.ones(()), 1)
    may_end.set()
    thread.join()
    classes[1].__annotations__["c"] = int
    assert [counted(jnp.ones(()), which).item() for which in (0, 1)] == [1, 2]


def test_annotations_of_functions_and_classes_of_an_enclosing_call():
    def helper(x: typing.Any):
        return x

    def bare(x):
        return x

    class Bare:
        pass

    asked: dict[typing.Any, typing.Any] = {
        helper: lambda x: helper(x) * len(helper.__annotations__),
        bare: lambda x: bare(x) * len(bare.__annotations__),
        Bare: lambda x: x * len(Bare.__annotations__),
    }
    for holder, function in asked.items():
        f, size = graftax.jit(function), len(holder.__annotations__)
        assert f(jnp.ones(())) == size
        holder.__annotations__["more"] = int
        assert f(jnp.ones(())) == size + 1
        holder.__annotations__ = {}
        assert f(jnp.ones(())) == 0
