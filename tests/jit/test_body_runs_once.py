# SPDX-License-Identifier: Apache-2.0
"""A first call runs the body once, whatever the helpers turn out to read: what it does outside is done once."""

from __future__ import annotations

import os
import subprocess
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax

pytestmark = pytest.mark.filterwarnings("ignore::graftax.ImpureCallWarning")

HELPERS = {
    "a list": ("state = [jnp.ones(2)]", "return x * state[0]", "state[0] = jnp.full(2, 3.0)"),
    "a dict that the helper changes": (
        "state = {'w': jnp.ones(2)}",
        "state['w'] = state['w'] + x; return state['w']",
        "state['w'] = jnp.zeros(2)",
    ),
    "an array": ("w = jnp.ones(2)", "return x * w", "w = jnp.full(2, 3.0)"),
    "an assigned global": ("w = jnp.ones(2)", "global w; w = w + 1; return x * w", "w = jnp.full(2, 3.0)"),
    "a counter": ("n = 0", "global n; n += 1; return x * 2", "n = 7"),
    "a class attribute": (
        "class C:\n    w = jnp.ones(2)\n    def go(self, x): return x * self.w\nc = C()",
        "return c.go(x)",
        "C.w = jnp.full(2, 3.0)",
    ),
    "a closure": (
        "def make(w):\n    def inner(x): return x * w\n    return inner\ninner = make(jnp.ones(2))",
        "return inner(x)",
        "inner = make(jnp.full(2, 3.0))",
    ),
    "mutable defaults": (
        "def inner(x, memo=[jnp.ones(2)]): return x * memo[0]",
        "return inner(x)",
        "inner.__defaults__[0][0] = jnp.full(2, 3.0)",
    ),
    "another module": (
        "config = types.ModuleType('config'); config.w = jnp.ones(2)",
        "return x * config.w",
        "config.w = jnp.full(2, 3.0)",
    ),
    "one helper after another": (
        "a, b = [jnp.ones(2)], [jnp.full(2, 2.0)]\ndef other(x): return x + b[0]",
        "return other(x * a[0])",
        "b[0] = a[0] = jnp.full(2, 3.0)",
    ),
    "what the argument holds": ("w = jnp.ones(2)", "return x + model['w'] * w", "w = jnp.full(2, 3.0)"),
}
BODIES = {
    "plain": "return helper(x)",
    "after a change in place": "log.append(len(log)); model['n'] = 'two'; return helper(x)",
    "in a gradient": "return graftax.grad(lambda y: helper(y).sum())(x)",
    "in a loop": "return graftax.scan(lambda c, _: (helper(c), None), x, length=2)[0]",
    "in a branch": "return graftax.cond(x.sum() > 0, lambda y: helper(y), lambda y: y, x)",
    "in a method": "return Model().go(x)",
    "in a lambda": "return (lambda y: helper(y))(x)",
    "twice": "return helper(helper(x))",
}

CHANGES = {"a dict that the helper changes", "an assigned global", "a counter"}  # what a transform cannot take
TRANSFORMED = {"in a gradient", "in a loop", "in a branch"}
CASES = [(kind, body) for kind in HELPERS for body in BODIES if kind not in CHANGES or body not in TRANSFORMED]


def _program(state: str, helper: str, body: str, path: Path | None) -> Any:
    """A module with a helper, and an `f` that calls it, and adds a letter to a file each time that its body runs."""
    module = types.ModuleType("users")
    vars(module).update(jnp=jnp, graftax=graftax, types=types, path=str(path))
    parts = "\n    ".join(part.strip() for part in helper.split(";"))
    lines = "\n    ".join(part.strip() for part in body.split(";"))
    appends = "with open(path, 'a') as file: file.write('x')" if path is not None else ""
    text = (
        f"log, model = [], {{'w': jnp.full(2, 5.0), 'n': 'one'}}\n{state}\n"
        f"def helper(x):\n    {parts}\n"
        "class Model:\n    def go(self, x):\n        return helper(x)\n"
        f"def f(x):\n    {appends}\n    {lines}\n"
    )
    exec(compile(text, str(Path(__file__).with_name("users.py")), "exec"), vars(module))
    return module


@pytest.mark.quick(3)
@pytest.mark.parametrize(("kind", "body"), CASES)
def test_the_body_runs_once_in_a_first_call_and_each_call_is_right(kind: str, body: str, tmp_path: Path):
    state, helper, change = HELPERS[kind]
    states = list[Any]()
    for jit in (False, True):
        path = tmp_path / str(jit)
        module = _program(state, helper, BODIES[body], path)
        f = graftax.jit(module.f) if jit else module.f
        out = [f(jnp.full(2, 2.0))]
        assert path.read_text() == "x"
        out.append(f(jnp.full(2, 4.0)))
        exec(change, vars(module))
        out.append(f(jnp.full(2, 4.0)))
        states.append((np.array(out), module.log, module.model["n"], getattr(module, "n", None)))
    plain, jitted = states
    np.testing.assert_allclose(jitted[0], plain[0], rtol=1e-6)
    assert plain[1:] == jitted[1:]


@pytest.mark.parametrize("body", ["graftax.vmap(helper)(x)", "graftax.grad(lambda y: helper(y).sum())(x) + helper(x)"])
@pytest.mark.parametrize("kind", [kind for kind in HELPERS if kind not in CHANGES])
@pytest.mark.quick(3)
def test_what_a_transform_is_given_is_read_anew(kind: str, body: str):
    state, helper, change = HELPERS[kind]
    state = state.replace("jnp.ones(2)", "jnp.ones(())").replace("jnp.full(2, 2.0)", "jnp.full((), 2.0)")
    change = change.replace("jnp.full(2, 3.0)", "jnp.full((), 3.0)")
    results = list[Any]()
    for jit in (False, True):
        module = _program(state, helper, f"return {body}", None)
        module.model["w"] = jnp.full((), 5.0)
        f = graftax.jit(module.f) if jit else module.f
        out = [f(jnp.full(2, 2.0))]
        exec(change, vars(module))
        results.append(np.array([*out, f(jnp.full(2, 2.0))]))
    np.testing.assert_allclose(*results, rtol=1e-6)


def test_a_log_that_a_function_under_a_transform_keeps_is_kept():
    log = {"count": 0}

    def counts(x: jax.Array) -> jax.Array:
        log["count"] += 1
        return x * 2

    f = graftax.jit(lambda x: graftax.grad(counts)(x))
    assert f(jnp.ones(())) == 2 and f(jnp.ones(())) == 2 and log == {"count": 2}


@pytest.mark.parametrize("donate", ["all", "all-except-first", "model"])
def test_the_body_runs_once_with_donated_arguments(donate: str, tmp_path: Path):
    path, scale = tmp_path / "runs", [jnp.ones(2)]

    def helper(x: jax.Array) -> jax.Array:
        return x * scale[0]

    @graftax.jit(donate=donate)
    def step(x: jax.Array, model: dict[str, jax.Array]) -> None:
        with path.open("a") as file:
            file.write("x")
        model["w"] = helper(model["w"]) + x

    model = {"w": jnp.ones(2)}
    step(jnp.ones(2), model)
    assert path.read_text() == "x"
    scale[0] = jnp.full(2, 3.0)
    step(jnp.ones(2), model)
    assert model["w"].tolist() == [7, 7]


def test_a_numpy_array_that_only_a_helper_reads_has_values():
    table = np.array([2, 0, 1])

    def helper(x: jax.Array) -> jax.Array:
        return jnp.stack([x[i] for i in table.tolist()])

    f = graftax.jit(lambda x: helper(x))
    assert f(jnp.arange(3)).tolist() == [2, 0, 1]
    table[0] = 1
    assert f(jnp.arange(3)).tolist() == [1, 0, 1]


def hooked(y):
    return y * 2


def put(function, value):
    function.hook = value


def test_what_the_body_put_into_a_helper_before_it_was_read_is_no_input():
    def f(x):
        put(hooked, x + 1)
        return hooked(x) * hooked.hook

    for jitted in (f, graftax.jit(f), graftax.jit(f)):
        vars(hooked).clear()
        assert jitted(jnp.ones(2)).tolist() == jitted(jnp.ones(2)).tolist() == [4, 4]
        assert hooked.hook.tolist() == [2, 2]
    vars(hooked).clear()


TABLE = np.array([2, 0, 1])


class Counted:
    n = 0


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write("x")


def run_process(path: Path) -> None:
    subprocess.run(["sh", "-c", f"printf x >> {path}"], check=True)


def by_values(x: jax.Array) -> jax.Array:
    return jnp.stack([x[i] for i in TABLE.tolist()])


def by_class(x: jax.Array) -> jax.Array:
    Counted.n = Counted.n + 1
    return x * Counted.n


@pytest.mark.parametrize("warn_impure", [True, False])
@pytest.mark.parametrize("helper", [by_values, by_class])
@pytest.mark.parametrize(("act", "call"), [(append, "open"), (run_process, "subprocess.run")])
def test_what_must_not_be_done_twice_is_refused_a_second_time(
    act: Callable[[Path], None],
    call: str,
    helper: Callable[[jax.Array], jax.Array],
    warn_impure: bool,
    tmp_path: Path,
):
    path, x, Counted.n = tmp_path / "runs", jnp.arange(3.0), 0

    def f(x: jax.Array) -> jax.Array:
        act(path)
        return helper(x)

    jitted = graftax.jit(f, warn_impure=warn_impure)
    with pytest.raises(graftax.MutationError, match=rf"f called \S*{call}\(\) .* a second time") as caught:
        jitted(x)
    assert f"{__file__}:{act.__code__.co_firstlineno + 1}" in str(caught.value)
    assert path.read_text() == "x" and Counted.n == 0  # the objects are as they were
    np.testing.assert_array_equal(jitted(x), [2, 0, 1] if helper is by_values else x)
    assert path.read_text() == "xx"


def make_folder(path: Path) -> None:
    os.mkdir(path)


def make_folder_of_path(path: Path) -> None:
    path.mkdir()


def make_where_there_is_none(path: Path) -> None:
    path.mkdir(exist_ok=True)


@pytest.mark.filterwarnings("ignore::graftax.ImpureCallWarning")
@pytest.mark.parametrize("act", [make_folder, make_folder_of_path, make_where_there_is_none])
def test_a_folder_is_made_once(act: Callable[[Path], None], tmp_path: Path):
    Counted.n = 0

    @graftax.jit
    def f(x: jax.Array) -> jax.Array:
        act(tmp_path / "folder")
        return by_class(x)

    if act is make_where_there_is_none:
        np.testing.assert_array_equal(f(jnp.arange(3.0)), jnp.arange(3.0))
    else:
        with pytest.raises(graftax.MutationError, match=r"f called \S*mkdir\(\) .* a second time"):
            f(jnp.arange(3.0))
    assert (tmp_path / "folder").is_dir()


def test_what_can_be_done_twice_is_not_refused(tmp_path: Path):
    path, Counted.n = tmp_path / "text", 0

    @graftax.jit
    def f(x: jax.Array) -> jax.Array:
        with path.open("w") as file:
            file.write("whole")
        with ThreadPoolExecutor(1) as pool:
            return by_class(x * pool.submit(len, "a").result())

    assert f(jnp.ones(())) == 1 and path.read_text() == "whole" and Counted.n == 1


class Text(str):
    pass


class Plain:
    pass


def function() -> Any:
    def inner() -> None: ...

    return inner


RATE = {"k": 2}
EDITS = {
    "new names": "bcd",
    "one goes": "-abc",
    "one goes and comes back": "-aba",
    "one goes, comes back and goes": "-abca-a",
}


@pytest.mark.quick(8)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("first", ["a", "yza", "ayz"])
@pytest.mark.parametrize("make", [lambda: Text("t"), Plain, function, types.SimpleNamespace, dict])
def test_names_keep_their_order_when_a_trace_takes_in_what_it_reads(make: Any, first: str, late: bool, edit: str):
    def names_of(x: Any) -> list[str]:
        return [name for name in (x if isinstance(x, dict) else vars(x)) if len(name) == 1]

    def change(x: Any, names: str) -> None:
        goes = False
        for name in names:
            if name == "-":
                goes = True
                continue
            target = x if isinstance(x, dict) else vars(x)
            if goes:
                del target[name]
            else:
                target[name] = 1
            goes = False

    def helper() -> int:
        return RATE["k"]

    def f(x: Any) -> int:
        change(x, EDITS[edit])
        k = helper()
        seen.append(names_of(x))
        if late:
            change(x, "wu")
        return k

    orders: list[list[str]] = []
    seen: list[list[str]] = []
    for run in (f, graftax.jit(f)):
        x = make()
        change(x, first)
        run(x)
        orders.append(names_of(x))
    assert orders[0] == orders[1] and seen[0] == seen[1]
