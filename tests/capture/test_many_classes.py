# SPDX-License-Identifier: Apache-2.0
"""A program of many classes and functions: what a first trace looks up grows with the code, and not with its square."""

import collections
from typing import Any

import jax.numpy as jnp
import pytest

import graftax
from graftax._capture.attribute_reads import AttributeReads
from graftax._capture.read_names import ReadNames
from graftax._capture.read_set import ReadSet
from programs import Program, beside, module


def project(classes: int, methods: int) -> str:
    """Classes whose methods have names of their own, and read attributes of their own."""
    lines: list[str] = []
    for i in range(classes):
        lines += [f"class C{i}:", f"    k{i} = 1.0", f"    def __init__(self): self.w{i} = jnp.ones(())"]
        for j in range(methods):
            lines.append(f"    def m{i}_{j}(self, x): return x * self.w{i} + self.k{i}")
    calls = "".join(f"    x = objs[{i}].m{i}_{j}(x)\n" for i in range(classes) for j in range(methods))
    instances = ", ".join(f"C{i}()" for i in range(classes))
    return "\n".join([*lines, f"objs = [{instances}]", f"def f(x):\n{calls}    return x"])


def times_called(monkeypatch: pytest.MonkeyPatch, cls: type, method: str, classes: int) -> int:
    """How often a first trace calls a method of what notes names."""
    count, original = 0, getattr(cls, method)

    def counting(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return original(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(cls, method, counting)
        assert float(graftax.jit(module(project(classes, 4)).f)(jnp.ones(()))) == 1 + 4 * classes
    return count


@pytest.mark.parametrize(
    ("cls", "method"), [(ReadNames, "note"), (AttributeReads, "asked_of")], ids=["names", "classes"]
)
def test_what_is_looked_up_grows_with_the_code(monkeypatch: pytest.MonkeyPatch, cls: type, method: str):
    small, large = (times_called(monkeypatch, cls, method, classes) for classes in (6, 24))
    assert 0 < large < 6 * small


READS = "def g(x): return x * a.k\ndef h(x): return x * getattr(a, 'late', 2.0)\ndef f(x): return g(x) + h(x)"


@pytest.mark.parametrize("holder", ["A", "B"])
def test_a_name_that_a_class_gets_later_is_noticed(holder: str):
    source = f"class B: k = 1.0\nclass A(B): pass\na = A()\n{READS}"
    beside(Program(source, lambda m: setattr(getattr(m, holder), "late", 7.0)))


def test_a_name_that_a_base_of_the_standard_library_gets_later_is_noticed(monkeypatch: pytest.MonkeyPatch):
    m = module(f"import collections\nclass A(collections.UserDict): k = 1.0\na = A()\n{READS}")
    step = graftax.jit(m.f)
    assert float(step(jnp.ones(()))) == 3
    monkeypatch.setattr(collections.UserDict, "late", 7.0, raising=False)
    assert float(step(jnp.ones(()))) == 8


@pytest.mark.parametrize("sets", ["A.late = 7.0", "B.late = 7.0", "a.late = 7.0"])
def test_a_name_that_the_trace_gives_a_class_before_code_asks_for_it(sets: str):
    source = f"""
class B: k = 1.0
class A(B): pass
a = A()
def g(x): return x * a.k
def h(x): return x * a.k + getattr(a, 'late', 2.0)
def f(x):
    x = g(x)
    {sets}
    return h(x)"""
    beside(Program(source))


def test_a_name_that_a_library_gives_a_class_in_the_trace_is_looked_up():
    a = module("class B: k = 1.0\nclass A(B): pass").A
    reads = AttributeReads()

    def asked_for(name: str) -> list[tuple[type, str]]:
        reads.attributes.add(name)
        return [
            (holder, name)
            for cls, asked, is_first in reads.not_looked_up()
            for holder, name, *_ in reads.asked_of(cls, asked, is_first)
        ]

    assert list(reads.add(a)) and {(a, "k"), (a.__base__, "k")} <= set(asked_for("k"))
    a.__base__.late = 2.0
    assert set(asked_for("late")) == {(a, "late"), (a.__base__, "late")}
    assert asked_for("other") == asked_for("late") == []


def test_a_trace_takes_in_what_helpers_of_other_modules_read(monkeypatch: pytest.MonkeyPatch):
    begun, begin = 0, ReadSet.begin

    def counting(self: ReadSet, *arguments: Any) -> None:
        nonlocal begun
        begun += 1
        begin(self, *arguments)

    monkeypatch.setattr(ReadSet, "begin", counting)
    helpers = [
        module("".join(f"D{i} = {{'k': [1.0]}}\ndef h{i}(x): return x * D{i}['k'][0]\n" for i in range(5)))
        for _ in range(2)
    ]
    calls = "".join(f"    x = {m}.h{i}(x)\n" for m in ("first", "second") for i in range(5))
    step = graftax.jit(module(f"def f(x):\n{calls}    return x", first=helpers[0], second=helpers[1]).f)
    assert float(step(jnp.ones(()))) == 1 and begun == 1
    helpers[1].D3["k"][0] = 7.0
    assert float(step(jnp.ones(()))) == 7
