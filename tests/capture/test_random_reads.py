# SPDX-License-Identifier: Apache-2.0
"""Random modules whose helpers read and change what is no argument: jitted beside plain, and after changes."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st

import graftax


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float


class Atom(NamedTuple):
    """Something outside of the arguments: how a module defines it, reads it, and how it changes from outside."""

    define: str
    read: str
    changes: tuple[Callable[[Any], Any], ...]
    state: Callable[[Any], Any]


def setting(**values: Any) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        vars(module).update(values)

    return change


def _patch(module: Any) -> None:
    module.Layer.go = lambda self, x: x - self.scale


ATOMS = [
    Atom("N = 2.0", "x * N", (setting(N=3.0), setting(N=2.0), setting(N=2)), lambda m: m.N),
    Atom("W = jnp.ones(2)", "x + W", (lambda m: setattr(m, "W", m.W * 2),), lambda m: m.W),
    Atom("CONFIG = Config(1.5)", "x * CONFIG.rate", (lambda m: setattr(m, "CONFIG", Config(2.5)),), lambda m: m.CONFIG),
    Atom(
        """
        LOG = [1]
        def log(x):
            LOG.append(len(LOG))
            return x + sum(LOG)
        """,
        "log(x)",
        (lambda m: m.LOG.append(7), lambda m: m.LOG.clear(), lambda m: setattr(m, "LOG", [5])),
        lambda m: m.LOG,
    ),
    Atom(
        """
        TABLE = {"k": jnp.ones(2), "n": 1}
        def table(x):
            TABLE["k"] = TABLE["k"] + 1
            return x * TABLE["k"] * TABLE["n"]
        """,
        "table(x)",
        (lambda m: m.TABLE.update(n=m.TABLE["n"] + 1), lambda m: m.TABLE.update(k=jnp.zeros(2))),
        lambda m: m.TABLE,
    ),
    Atom(
        """
        class Layer:
            scale = 2.0
            w = jnp.ones(2)
            def go(self, x): return x * self.scale + self.w
        LAYER = Layer()
        """,
        "LAYER.go(x)",
        (
            lambda m: setattr(m.Layer, "scale", 5.0),
            lambda m: setattr(m.Layer, "w", m.Layer.w + 1),
            lambda m: setattr(m.LAYER, "scale", 7.0),
            _patch,
        ),
        lambda m: (m.Layer.scale, m.Layer.w, vars(m.LAYER)),
    ),
    Atom(
        """
        def make():
            n, act = 0, jnp.abs
            def count(x):
                nonlocal n
                n += 1
                return act(x) + n
            def set_to(f):
                nonlocal act
                act = f
            return count, set_to, lambda: n
        count, set_to, counted = make()
        """,
        "count(x)",
        (lambda m: m.set_to(jnp.sin), lambda m: m.set_to(jnp.abs)),
        lambda m: m.counted(),
    ),
    Atom(
        """
        def given(x, k=1.0, acc=[]):
            acc.append(1)
            return x * k + len(acc)
        """,
        "given(x)",
        (lambda m: setattr(m.given, "__defaults__", (2.0, [])),),
        lambda m: m.given.__defaults__,
    ),
    Atom(
        "NAMES = {8, 0, 16}",
        "x + float(sum(i * v for i, v in enumerate(NAMES)))",
        (lambda m: m.NAMES.add(24), lambda m: m.NAMES.discard(0), setting(NAMES={16, 8, 0})),
        lambda m: list(m.NAMES),
    ),
    Atom(
        """
        def calls(x):
            calls.number += 1
            return x + calls.number
        calls.number = 0
        """,
        "calls(x)",
        (lambda m: setattr(m.calls, "number", 10),),
        lambda m: m.calls.number,
    ),
    Atom(
        'REGISTRY = {"act": jnp.sin}',
        'REGISTRY["act"](x)',
        (lambda m: m.REGISTRY.update(act=jnp.cos), lambda m: m.REGISTRY.update(act=lambda x: x + m.ONE)),
        lambda m: m.ONE,
    ),
    Atom("", "SUB.K * x", (lambda m: setattr(m.SUB, "K", m.SUB.K + 1),), lambda m: m.SUB.K),
]

# How a helper is written around what it reads.
FORMS = [
    "def {name}(x): return {body}",
    "@JIT\ndef {name}(x): return {body}",
    "def {name}(x, scale=1.0): return ({body}) * scale",
    "def _{name}(y, x): return {body}\n{name} = functools.partial(_{name}, None)",
    "@wrapped\ndef {name}(x): return {body}",
    "{name} = lambda x: [{body} for x in (x,)][0]",
]
HEAD = """
ONE = 1.0
def wrapped(f):
    @functools.wraps(f)
    def inner(*args): return f(*args)
    return inner
"""
HELPERS = st.lists(st.tuples(st.integers(0, len(ATOMS) - 1), st.integers(0, len(FORMS) - 1)), min_size=1, max_size=4)
STEPS = st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(0, 3))), min_size=2, max_size=6)


def make_module(helpers: list[tuple[int, int]], jit: Callable[[Any], Any]) -> Any:
    """Each helper reads one thing and calls the helper before it; `f` is the last."""
    module: Any = types.ModuleType("users")
    sub: Any = types.ModuleType("users.sub")
    sub.K = 3.0
    vars(module).update(jnp=jnp, functools=functools, graftax=graftax, JIT=jit, Config=Config, SUB=sub)
    source = [HEAD, *dict.fromkeys(textwrap.dedent(ATOMS[atom].define) for atom, _ in helpers)]
    before = "x"
    for number, (atom, form) in enumerate(helpers):
        body = ATOMS[atom].read.replace("(x)", f"({before})") if "(x)" in ATOMS[atom].read else ATOMS[atom].read
        body = body if "(x)" in ATOMS[atom].read else f"({body}) + ({before})"
        source.append(FORMS[form].format(name=f"helper{number}", body=body))
        before = f"helper{number}(x)"
    source.append(f"def f(x): return {before} * 0.5")
    exec(compile("\n".join(source), "users.py", "exec"), vars(module))
    module.f = jit(module.f)
    return module


def seen(helpers: list[tuple[int, int]], module: Any) -> Any:
    return graftax.to_dict([ATOMS[atom].state(module) for atom, _ in helpers])


@given(HELPERS, STEPS)
def test_helpers_of_a_jitted_function_do_what_they_do_in_plain_python(
    helpers: list[tuple[int, int]], steps: list[tuple[int, int] | None]
) -> None:
    plain, jitted = make_module(helpers, lambda f: f), make_module(helpers, graftax.jit)
    x = jnp.asarray([0.5, -2.0])
    for step in steps:
        if step is not None:
            changes = ATOMS[helpers[step[0] % len(helpers)][0]].changes
            change = changes[step[1] % len(changes)]
            change(plain), change(jitted)
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # advice is tested elsewhere
                want, got = plain.f(x), jitted.f(x)
            assert jnp.allclose(want, got, rtol=1e-5), (want, got)
            assert repr(seen(helpers, plain)) == repr(seen(helpers, jitted))
