# SPDX-License-Identifier: Apache-2.0
"""What `__eq__` and `__hash__` read and change outside of their objects."""

import pytest

from programs import Program, beside

EQUAL = (
    "class V:\n    asked = 0\n    tab = jnp.ones(2)\n    def __init__(self, v): self.v = v\n"
    "    def __hash__(self): return 1\n    def __eq__(self, o):\n        "
)
CLOSE = EQUAL + "return abs(self.v - o.v) < TOL['t']\nTOL = {'t': 0.5}\n"
COUNTED = EQUAL + "V.asked += 1; LOG.append(self.v); return self.v == o.v\nLOG = []\n"
ARRAYS = EQUAL + "return (self.v * V.tab).sum() == o.v\n"
HASHED = (
    "M = {'m': 10}\nclass V:\n    def __init__(self, v): self.v = v\n"
    "    def __hash__(self): return hash(self.v % M['m'])\n    def __eq__(self, o): return hash(self) == hash(o)\n"
)
PROGRAMS = {
    "a dict, asked by ==": (CLOSE + "def f(x, a, b): return x * (2 if a == b else 3)", 1.0, 1.3, "TOL['t'] = 0.1"),
    "a dict, asked by in": (CLOSE + "def f(x, a, b): return x * (2 if a in [b] else 3)", 1.0, 1.3, "TOL['t'] = 0.1"),
    "a dict, asked by a key": (CLOSE + "def f(x, a, b): return x * {a: 2}.get(b, 3)", 1.0, 1.3, "TOL['t'] = 0.1"),
    "a counter": (COUNTED + "def f(x, a, b): return x * (2 if a == b else 3), V.asked", 1.0, 1.0, "V.asked = 7"),
    "an array": (ARRAYS + "def f(x, a, b): return x * (a == b)", 1.0, 2.0, "V.tab = jnp.zeros(2)"),
    "a hash": (HASHED + "def f(x, a, b): return x * len({a, b})", 3, 13, "M['m'] = 7"),
}


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_equality_reads_and_changes_is_real(name):
    source, a, b, change = PROGRAMS[name]
    kept = {"a": (a, b)}
    beside(
        Program(
            source,
            lambda m: exec(change, vars(m)),
            tuple(part for part in ("V.asked", "LOG") if part.partition(".")[0] in source),
            lambda m: (m.jnp.ones(2), *map(m.V, kept["a"])),
        )
    )
