# SPDX-License-Identifier: Apache-2.0
"""A trace leaves nothing of its own in the caller's world. What its code puts there is put there by each call."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import pytest

import graftax
from programs import Program, beside

pytestmark = pytest.mark.filterwarnings("ignore::graftax.ImpureCallWarning")  # of globals()

WORLD = """import types
mod = types.ModuleType('mod')
mod.held = 1.0
class Base: held = 1.0
class A(Base): pass
class B(A):
    __slots__ = ('w',)
def g(y): return y
def put(o, n, v): setattr(o, n, v)
def name(): return 'la' + 'st'
def keep(v): globals()['last'] = v
last = 0.5
"""
PUTS = {
    "a new attribute of a module": "mod.last = x * 2",
    "one that is counted": "mod.last = getattr(mod, 'last', 0) + 1",
    "one that is there": "mod.held = mod.held + x",
    "by a text": "setattr(mod, 'last', x)",
    "by a computed name": "setattr(mod, name(), x)",
    "through a helper": "put(mod, 'last', [x])",
    "in the module's dict": "vars(mod)['last'] = (x, 1)",
    "in the module's __dict__": "mod.__dict__['last'] = x * 3",
    "by an update of it": "mod.__dict__.update(last=x, held=[x])",
    "a class": "setattr(A, 'last', x)",
    "a class by a computed name": "setattr(A, name(), {'k': x})",
    "a class that counts": "A.last = getattr(A, 'last', 0) + 1",
    "a class in a helper": "put(Base, 'held', x + Base.held)",
    "in a loop": "for o in (mod, A, g): o.last = x",
    "a function": "put(g, 'last', x)",
    "a function by a computed name": "setattr(g, name(), x)",
    "a global": "globals()['last'] = x",
    "a global in a helper": "keep(x)",
    "a global by a computed name": "globals()[name()] = [x]",
}
PLACES = ("mod.last", "mod.held", "A.last", "Base.held", "g.last", "last")


@pytest.mark.quick(6)
@pytest.mark.parametrize("put", PUTS)
@pytest.mark.parametrize("body", ["    {put}\n    return x + 1", "    y = helper(x)\n    {put}\n    return y"])
def test_what_is_put_anywhere_is_put_there_by_each_call(put: str, body: str):
    helper = "K = {'k': 2.0}\ndef helper(x): return x * K['k']\n"
    source = WORLD + helper + "def f(x):\n" + body.format(put=PUTS[put])
    beside(Program(source, lambda m: setattr(m.mod, "held", 3.0), PLACES))


@pytest.mark.quick(6)
@pytest.mark.parametrize("put", PUTS)
def test_nothing_leads_to_a_tracer_after_a_call_that_raises(put: str):
    scope: dict = {"__name__": "left_behind_program", "jnp": jnp}
    exec(WORLD, scope)
    exec(f"def f(x):\n    {PUTS[put]}\n    raise LookupError", scope)
    with pytest.raises(LookupError):
        graftax.jit(scope["f"])(jnp.ones(2))
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, jax.core.Tracer)]
