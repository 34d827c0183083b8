# SPDX-License-Identifier: Apache-2.0
"""A program of many classes and functions: what a first trace looks up grows with the code, and not with its square."""

import collections
from typing import Any

import jax.numpy as jnp
import pytest

import graftax
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
    made = ", ".join(f"C{i}()" for i in range(classes))
    return "\n".join([*lines, f"objs = [{made}]", f"def f(x):\n{calls}    return x"])


def names_noted(monkeypatch: pytest.MonkeyPatch, classes: int) -> int:
    """How often a first trace notes a name."""
    count, note = 0, ReadNames.note

    def counting(self: ReadNames, holder: object, name: str, value: object, can_be_root: bool) -> None:
        nonlocal count
        count += 1
        note(self, holder, name, value, can_be_root)

    with monkeypatch.context() as patched:
        patched.setattr(ReadNames, "note", counting)
        assert float(graftax.jit(module(project(classes, 4)).f)(jnp.ones(()))) == 1 + 4 * classes
    return count


def test_what_is_looked_up_grows_with_the_code(monkeypatch: pytest.MonkeyPatch):
    small, large = names_noted(monkeypatch, 6), names_noted(monkeypatch, 24)
    assert large < 6 * small


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
