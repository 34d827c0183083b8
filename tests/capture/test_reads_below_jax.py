# SPDX-License-Identifier: Apache-2.0
"""A function that runs below JAX's own frames is heard of, whatever JAX's frames run without the evaluation hook."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from graftax import _core
from graftax._base.stack_reserve import with_room
from users_modules import ONE, Wrap, both, module

# The hook that hears of frames is taken away below those of JAX that run nobody else's code: these run the user's.
BELOW_JAX = {
    "a jvp rule": """
        @jax.custom_jvp
        def g(x): return x * 1.0
        @g.defjvp
        def rule(primals, tangents): return g(*primals), tangents[0] * helper(1.0)
        def f(x): return jax.grad(lambda x: g(jnp.sin(x)).sum())(x)
        """,
    "a backward rule": """
        @jax.custom_vjp
        def g(x): return x * 1.0
        g.defvjp(lambda x: (x * 1.0, None), lambda _, t: (t * helper(1.0),))
        def f(x): return jax.grad(lambda x: jnp.cos(g(jnp.sin(x))).sum())(x)
        """,
    "a function under jit, vmap and grad": """
        def f(x): return jax.jit(jax.vmap(jax.grad(lambda v: jnp.sin(helper(v)))))(x)
        """,
    "a wrapper of JAX's own under jit": """
        def f(x): return jax.jit(jax.vmap(helper))(x) + jax.jit(jax.grad(lambda x: helper(x).sum()))(x)
        """,
    "a function in a loop that is transposed": """
        def f(x): return jax.grad(lambda x: jax.lax.scan(lambda c, v: (c * helper(v), None), 1.0, x)[0])(x)
        """,
    "a function that is computed again": """
        def f(x): return jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(helper(x)).sum())(x))(x)
        """,
    "a function that jax.numpy is given": """
        def f(x): return jnp.piecewise(x, [x > 0], [lambda v: helper(v), 0.0]) + jnp.vectorize(lambda v: helper(v))(x)
        """,
    "a linear function": """
        def f(x): return jax.linear_transpose(lambda x: helper(x) + jnp.flip(x), x)(x)[0]
        """,
    "an object that is an array when it is asked": """
        class Lazy:
            def __jax_array__(self): return jnp.ones(2) * helper(1.0)
        def f(x): return jnp.sin(x) + jnp.asarray(Lazy())
        """,
    "a size that is asked for": """
        class Size:
            def __index__(self): return int(helper(1.0))
        def f(x): return jnp.ones(Size()).sum() + jnp.sum(x) + jnp.zeros((Size(), 2)).size
        """,
    "a type that is asked for": """
        class Like:
            @property
            def dtype(self): return jnp.dtype("int32" if helper(1.0) > 3 else "float32")
        def f(x): return jnp.sum(x.astype(Like()) * 1.5) + jnp.zeros(3, Like()).sum()
        """,
    "functions that jax.numpy calls for each element": """
        def f(x):
            add = jnp.frompyfunc(lambda a, b: a + b * helper(1.0), nin=2, nout=1)
            rows = jnp.apply_along_axis(lambda r: helper(r), 0, x)
            return add(x, x) + rows + jnp.fromfunction(lambda i: helper(i), x.shape)
        """,
    "functions that jax.lax is given": """
        def f(x):
            total = jax.lax.reduce(x, 0.0, lambda a, b: a + b * helper(1.0) / helper(1.0), (0,))
            branch = jax.lax.cond(total > 0, lambda v: helper(v), lambda v: v, x)
            mapped = jax.lax.map(lambda v: helper(v), x)
            root = jax.lax.custom_root(lambda v: v - helper(1.0), 0.0, lambda f, v: v - f(v), lambda g, y: y / g(1.0))
            return total + branch + mapped + root + jax.lax.associative_scan(lambda a, b: a + helper(b), x)
        """,
    "a function that an update applies": """
        def f(x): return x.at[1].apply(lambda v: helper(v)) + jnp.piecewise(x, [x > 0], [helper])
        """,
    "a rule in what is cut out of a derivative": """
        @jax.custom_jvp
        def g(x): return x * 1.0
        @g.defjvp
        def rule(primals, tangents): return g(*primals), tangents[0] * helper(1.0)
        def f(x):
            def loss(x, y): return (jax.jit(lambda x: (g(x), y * 2))(x)[0]).sum()
            return jax.grad(loss)(x, x) + jax.jacfwd(lambda x: jnp.stack([g(x[0]), x[1]]))(x)[0]
        """,
    "a host function": """
        def host(v): return helper(v)
        def f(x): return jnp.sin(jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x))
        """,
}


@pytest.mark.parametrize("source", BELOW_JAX.values(), ids=BELOW_JAX)
def test_what_runs_below_jaxs_own_frames_is_heard_of(source: str) -> None:
    def program(wrap: Wrap) -> Any:
        m = module("N = 2.0\ndef helper(x): return x * N\n" + textwrap.dedent(source))
        f = wrap(m.f)
        results = [f(ONE), f(ONE)]
        m.N = 5.0
        return [*results, f(ONE), f(ONE)]

    both(program)


@pytest.mark.quick(0)
def test_two_threads_that_trace_hear_of_their_own_frames() -> None:
    m = module("N = 2.0\ndef helper(x): return x * N\ndef f(x, n): return jnp.sin(helper(x) * n).sum()")
    functions = [graftax.jit(jax.grad(m.f)) for _ in range(4)]

    def calls() -> list[Any]:
        found: list[Any] = [None] * len(functions)

        def call(i: int) -> None:
            found[i] = [functions[i](ONE, n).tolist() for n in (1, 2, 3)]

        threads = [threading.Thread(target=call, args=(i,)) for i in range(len(functions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    for scale in (2.0, 5.0):
        m.N = scale
        plain = [jax.grad(m.f)(ONE, n).tolist() for n in (1, 2, 3)]
        for found in calls():
            for one, other in zip(found, plain, strict=True):
                assert one == pytest.approx(other, rel=1e-5)


def test_room_on_the_stack_changes_nothing() -> None:
    def depth(n: int) -> int:
        return n if n == 0 else 1 + depth(n - 1)

    assert with_room(lambda: with_room(lambda: depth(400))) == 400
    with pytest.raises(ZeroDivisionError) as raised:
        with_room(lambda: 1 // 0)
    assert [entry.name for entry in raised.traceback][-1] == "<lambda>"


@pytest.mark.quick(0)  # imports JAX in a process of its own
def test_jax_in_a_folder_of_any_name_is_not_code_of_the_users(tmp_path: Path):
    for name in ("jax", "jaxlib"):
        (tmp_path / name).symlink_to(Path(sys.modules[name].__path__[0]))
    program = """
import jax
from graftax._capture.code_owner import is_in_package, is_never_asked
assert is_never_asked(jax.__file__) and is_in_package(jax.numpy.__file__, "jax"), jax.__file__
assert not is_never_asked(__file__)
print(jax.__file__)
"""
    script = tmp_path / "program.py"
    script.write_text(program)
    path = os.pathsep.join([str(tmp_path), str(Path(graftax.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(tmp_path / "jax" / "__init__.py"), done.stderr


def _hears_of_frames() -> bool:
    """Has the interpreter another function than its own to evaluate a frame?"""
    state, api = ctypes.c_void_p, ctypes.pythonapi
    api.PyInterpreterState_Get.restype = api._PyInterpreterState_GetEvalFrameFunc.restype = state
    api._PyInterpreterState_GetEvalFrameFunc.argtypes = [state]
    now = api._PyInterpreterState_GetEvalFrameFunc(api.PyInterpreterState_Get())
    return now != ctypes.cast(api._PyEval_EvalFrameDefault, state).value


@pytest.mark.skipif(bool(_core.frames_unknown()), reason="frames are not heard of on this interpreter")
@pytest.mark.parametrize("make", [jnp.ones, np.ones], ids=["jax", "numpy"])
def test_jax_runs_without_the_hook_below_an_operator_on_an_argument(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[int], object]
) -> None:
    heard: list[bool] = []
    call = type(jnp.multiply).__call__

    def noting(self: object, *args: object) -> object:
        heard.append(_hears_of_frames())
        return call(self, *args)

    def f(x: Any) -> Any:
        assert _hears_of_frames()
        return jax.grad(lambda y: (y * y).sum())(x) + (x * 2) * 3

    monkeypatch.setattr(type(jnp.multiply), "__call__", noting)
    assert graftax.jit(f)(make(3)).tolist() == [8, 8, 8]
    assert not any(heard)
    assert len(heard) >= 3
