# SPDX-License-Identifier: Apache-2.0
"""State of the thread and of the context is what it is now: read by each call, and changed by it."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from jax.core import Tracer

import graftax
from programs import module

HOLDERS = {
    "a thread's attribute": """
held = threading.local(); held.v = {first}
def get(): return held.v
def put(v): held.v = v
""",
    "a subclass": """
class State(threading.local):
    def __init__(self): self.v = {first}
held = State()
def get(): return held.v
def put(v): held.v = v
""",
    "a stack of the thread": """
held = threading.local(); held.stack = [{first}]
def get(): return held.stack[-1]
def put(v): held.stack.append(v)
""",
    "a context variable": """
held = contextvars.ContextVar('held'); held.set({first})
def get(): return held.get()
def put(v): held.set(v)
""",
    "the default of a context variable": """
held = contextvars.ContextVar('held', default={first})
def get(): return held.get()
def put(v): held.set(v)
""",
    "a list in a context variable": """
held = contextvars.ContextVar('held'); held.set([{first}])
def get(): return held.get()[-1]
def put(v): held.get().append(v)
""",
}
FIRST = {"a number": "2.0", "an array": "jnp.full(2, 2.0)"}
BODIES = {
    "reads": "return x * get()",
    "writes": "put(get() + 1); return x * get()",
    "writes what is traced": "put(get() + x); return x",
    "through a helper": "return helper(x)",
}


def _plain(f: Callable[..., Any]) -> Callable[..., Any]:
    return f


def _program(holder: str, first: str, body: str) -> Any:
    return module(f"""import contextvars, threading
import jax.numpy as jnp
{HOLDERS[holder].format(first=FIRST[first])}
def helper(x): put(get() * 2); return x + get()
def f(x): {BODIES[body]}""")


@pytest.mark.quick(24)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("holder", HOLDERS)
def test_each_call_reads_and_changes_what_is_there_now(holder: str, first: str, body: str):
    def run(jit: Callable[..., Any]) -> list[Any]:
        m = _program(holder, first, body)
        f, x, out = jit(m.f), jnp.ones(2), []
        for between in (lambda: None, lambda: None, lambda: m.put(7.0), lambda: m.put(jnp.full(2, 5.0))):
            between()
            out += [f(x), m.get()]
        return out

    for plain, jitted in zip(run(_plain), run(graftax.jit), strict=True):
        assert not isinstance(jitted, Tracer)
        assert jnp.allclose(plain, jitted)


def test_each_thread_has_its_own():
    held = threading.local()
    held.v = jnp.ones(2)

    @graftax.jit
    def f(x: Any) -> Any:
        held.v = held.v + x
        return held.v

    def other():
        held.v = jnp.full(2, 10.0)
        out.extend([f(1.0), held.v])

    out: list[Any] = []
    assert f(1.0)[0] == 2
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert [v[0] for v in out] == [11, 11]
    assert held.v[0] == 2


def test_what_is_set_and_reset_with_its_token_leaves_nothing():
    held: contextvars.ContextVar[Any] = contextvars.ContextVar("held", default=None)

    @graftax.jit
    def f(x: Any) -> Any:
        token = held.set(x)
        try:
            return held.get() * 2
        finally:
            held.reset(token)

    for v in (1.0, 3.0):
        assert f(jnp.full((), v)) == 2 * v
        assert held.get() is None
    assert held not in contextvars.copy_context()


@pytest.mark.parametrize("kind", ["local", "variable"])
def test_what_raises_has_changed_nothing(kind: str):
    m = _program("a thread's attribute" if kind == "local" else "a context variable", "an array", "reads")

    @graftax.jit
    def f(x: Any) -> Any:
        m.put(x)
        raise ValueError("mine")

    before = m.get()
    with pytest.raises(ValueError, match="mine"):
        f(jnp.ones(2))
    assert m.get() is before


TRANSFORMS = {
    "grad": graftax.grad,
    "vmap": lambda f: lambda x: graftax.vmap(f)(x[None])[0],
    "checkpoint": graftax.checkpoint,
    "scan": lambda f: lambda x: graftax.scan(lambda c, _: (f(c), None), x, length=1)[0],
}


@pytest.mark.parametrize("within", ["plain", "jit"])
@pytest.mark.parametrize("through", TRANSFORMS)
def test_transforms_read_and_change_what_a_thread_has(through: str, within: str):
    held = threading.local()
    held.v = jnp.ones(())

    def f(x: Any) -> Any:
        held.v = held.v + 1
        return x * held.v

    run = TRANSFORMS[through](f)
    run = graftax.jit(run) if within == "jit" else run
    assert run(jnp.full((), 3.0)) == (2 if through == "grad" else 6)
    assert held.v == 2


@pytest.mark.parametrize("through", ["vmap", "checkpoint"])
def test_transforms_read_and_change_what_a_context_has(through: str):
    variable = contextvars.ContextVar[Any]("held")
    variable.set(jnp.ones(()))

    def f(x: Any) -> Any:
        variable.set(variable.get() + 1)
        return x * variable.get()

    assert TRANSFORMS[through](f)(jnp.full((), 3.0)) == 6
    assert variable.get() == 2


def test_a_context_variable_cannot_be_copied():
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("v", default=2.0)
    with pytest.raises(graftax.UnsupportedValueError, match="by its identity"):
        graftax.copy({"v": variable})
    with pytest.raises(graftax.UnsupportedValueError, match="by its identity"):  # it runs on a copy of what it reads
        graftax.grad(lambda x: x * variable.get())(jnp.ones(()))


def test_eval_shape_sets_no_context_variable():
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("v")
    variable.set(value := [jnp.ones(2)])
    assert graftax.jit(lambda x: x * variable.get()[0]).eval_shape(jnp.ones(2)).shape == (2,)
    assert variable.get() is value
