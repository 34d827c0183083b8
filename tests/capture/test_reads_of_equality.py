# SPDX-License-Identifier: Apache-2.0
"""What `__eq__` and `__hash__` read and count, wherever objects are compared: directly, in lists, as keys."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from programs import Program, beside

VALUES = """import functools
TOL, COUNT, LOG = {'t': 0.5}, [0], []
class Stats: n = 0
stats = Stats()
class Close:
    tol = [0.5]
    def __eq__(self, other): return abs(self.v - other.v) < self.tol[0]
    def __hash__(self): return 1
class A:
    def __init__(self, v): self.v = v
class Near(A):
    def __eq__(self, other): return abs(self.v - other.v) < TOL['t']
    def __hash__(self): return hash(TOL['t'] > 1)
class Mixed(A, Close): pass
class Counted(A):
    def __eq__(self, other):
        COUNT[0] += 1
        stats.n += 1
        LOG.append(self.v)
        return self.v == other.v
@functools.total_ordering
class Ordered(A):
    def __eq__(self, other): return self.v * TOL['t'] == other.v
    def __lt__(self, other): return self.v * TOL['t'] < other.v
class Meta(type):
    def __eq__(cls, other): return TOL['t'] > 1
    def __hash__(cls): return 7
class X(metaclass=Meta): pass
class Y(metaclass=Meta): pass
class AsArrays(A):
    def __eq__(self, other): return jnp.abs(self.v - other.v) < TOL['t']
near, mixed, counted = [C(1.0) for C in (Near, Mixed, Counted)]
"""
READS = {
    "compared": "x * (near == Near(1.3))",
    "in a list": "x * (Near(1.3) in [near])",
    "a key of a dict": "x * {near: 5.0}.get(Near(1.3), 2.0)",
    "an element of a set": "x * len({near, Near(1.3), Near(7.0)})",
    "by a mixin": "x * [Mixed(9.0), mixed].index(Mixed(1.3)) if Mixed(1.3) in [mixed] else x",
    "counted": "x * [Counted(3.0), counted].count(Counted(1.0))",
    "in order": "x * max([Ordered(2.0), Ordered(1.0)]).v",
    "of a metaclass": "x * (X == Y)",
    "of arrays": "AsArrays(x) == AsArrays(x * 1.3)",
}
CHANGES = {
    "an item": lambda m: m.TOL.update(t=0.1),
    "the dict": lambda m: setattr(m, "TOL", {"t": 3.0}),
    "an array": lambda m: setattr(m, "TOL", {"t": jnp.float32(0.1)}),
    "a list of the mixin": lambda m: m.Close.tol.__setitem__(0, 0.1),
    "a list that hides it": lambda m: setattr(m.Mixed, "tol", [0.1]),
    "a count": lambda m: setattr(m.stats, "n", 100),
}


CASES = [(read, change) for read in READS for change in CHANGES if change != "an array" or read == "of arrays"]


@pytest.mark.quick(8)
@pytest.mark.parametrize(("read", "change"), CASES)
def test_what_an_equality_reads_and_counts(read: str, change: str):
    source = VALUES + f"def f(x): return {READS[read]}\n"
    beside(Program(source, CHANGES[change], ("COUNT", "LOG", "stats.n", "TOL")))
