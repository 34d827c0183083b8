# SPDX-License-Identifier: Apache-2.0
"""What the `__init__` of a dataclass reads: default factories with state, and objects that are defaults."""

import sys

import pytest

from programs import Program, beside

# docs/limits.md names it.
pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11: generated constructors are not read")

HEAD = "from dataclasses import dataclass, field\nclass Cfg:\n    def __init__(self): self.k = 0.0\n"
FACTORIES = {
    "a bound method": "class Ids:\n    def __init__(self): self.n = 0\n    def next(self):\n        self.n += 1\n"
    "        return self.n\nkept = Ids()\nfactory = kept.next",
    "a method of a dict": "kept = {'k': 1.0}\nfactory = kept.copy",
    "a method of a list": "kept = [5, 4, 3, 2, 1]\nfactory = kept.pop",
    "a partial": "kept = {'k': 1.0}\ndef make(base): return dict(base)\nfactory = functools.partial(make, kept)",
    "a function with state": "kept = []\ndef make(kept=kept):\n    kept.append(1)\n    return [*kept]\nfactory = make",
    "an array": "kept = {'k': jnp.zeros(2)}\nfactory = kept.copy",
}
BODY = "\n@dataclass\nclass C:\n    part: object = field(default_factory=factory)\ndef f(x): return x * 2, C().part\n"


def change(m):
    if isinstance(m.kept, dict):
        m.kept["k"] += 1
    elif isinstance(m.kept, list):
        m.kept.append(7)
    else:
        m.kept.n = 10


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", FACTORIES)
def test_a_default_factory_with_state_is_called_on_each_call(name):
    shown = "kept.n" if name == "a bound method" else "kept"
    beside(Program(HEAD + FACTORIES[name] + BODY, change, (shown,)))


@pytest.mark.quick(8)
@pytest.mark.parametrize("value", ["0.0", "jnp.zeros(2)"])
@pytest.mark.parametrize("given", ["cfg: Cfg = CFG", "cfg: Cfg = field(default=CFG, kw_only=True)"])
def test_an_object_that_is_a_default_is_the_one_of_that_name(given, value):
    source = (
        HEAD + f"CFG = Cfg()\nCFG.k = {value}\n@dataclass\nclass C:\n    {given}\n"
        "def f(x):\n    c = C()\n    c.cfg.k = c.cfg.k + x\n    return c.cfg is CFG, c.cfg.k\n"
    )
    beside(Program(source, lambda m: setattr(m.CFG, "k", 5.0), ("CFG.k",)))
