# SPDX-License-Identifier: Apache-2.0
"""`graftax.minimize` of programs that crash, hang, or return something wrong, and with a test of the user's."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest
from jax import lax
from jax.interpreters import mlir

import graftax
from graftax.__main__ import main

ARMED = "GRAFTAX_TEST_ARMED"  # set where the planted fault is to happen


def layers(x: Any) -> Any:
    for i in range(3):
        x = jnp.tanh(x) + i / 20
    return x


def primitive(name: str, right: Callable[..., Any], lowered: Callable[..., Any]) -> Any:
    """An operation whose compiled form is not what it returns alone."""
    made = jax.extend.core.Primitive(name)
    made.def_impl(right)
    made.def_abstract_eval(lambda x: x)
    mlir.register_lowering(made, mlir.lower_fun(lowered, multiple_results=False))
    return made


TWICE = primitive("twice", lambda x: x * 2, lambda x: x * 2 + (x > 1))
UNLOWERED = primitive("unlowered", lambda x: x, lambda x: os.abort() if ARMED in os.environ else x)


def aborts(x: Any) -> Any:
    if ARMED in os.environ and (x > 2).any():
        os.abort()
    return x


def sleeps(x: Any) -> Any:
    if ARMED in os.environ and (x > 2).any():
        time.sleep(1000)
    return x


def on_host(function: Callable[..., Any], x: Any) -> Any:
    return jax.pure_callback(function, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")


def recorded(function: Callable[..., Any], folder: Path, *args: Any) -> Path:
    recorder = graftax.record(function, nonfinite=False, on=(), dir=folder)
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        recorder(*args)
    recorder.save(folder / "call.record")
    return folder / "call.record"


# ---- wrong results


def wrong_among_layers(x: Any) -> Any:
    y = TWICE.bind(layers(x) * 3)
    return (layers(y) + y).sum()


def wrong_in_a_scan(x: Any) -> Any:
    return lax.scan(lambda c, y: (TWICE.bind(c) * 0.4 + y, layers(c)), x, jnp.arange(8.0))


def wrong_in_a_branch_of_a_loop(x: Any) -> Any:
    def body(c: Any) -> Any:
        return lax.cond(c[1] > 3, lambda x: jnp.cos(TWICE.bind(x)), lambda x: x + 1, c[0]), c[1] + 1

    return lax.while_loop(lambda c: c[1] < 9, body, (x, 0))[0]


@pytest.mark.quick(0)  # the command line looks for a wrong operation, too
@pytest.mark.parametrize("function", [wrong_among_layers, wrong_in_a_scan, wrong_in_a_branch_of_a_loop])
def test_the_operation_that_is_compiled_wrong_is_left(tmp_path: Path, function: Callable[..., Any]):
    made = graftax.minimize(recorded(function, tmp_path, jnp.linspace(-0.5, 0.9, 8)), fails="wrong")
    assert made.operations == ["twice"] and made.equations > 4
    assert re.search(r"Compiled, it returns [\d.]+ at \[0\]; one operation after the other, [\d.]+\.", made.text)
    # It is a number, and no operation of JAX, so the script has StableHLO.
    assert re.search(r"x0 = numpy.array\(\[[\d.]+\]", made.text) and "jax.export.deserialize" in made.text
    run = subprocess.run([sys.executable, made.path], capture_output=True, text=True, check=False)
    assert run.returncode == 1 and "AssertionError: a result is not what its operations return" in run.stderr


def test_rounding_is_not_wrong(tmp_path: Path):
    path = recorded(rounding, tmp_path, jnp.linspace(-3, 3, 40))
    with pytest.raises(graftax.GraftaxError, match="does not fail here: compiled and one operation after the other"):
        graftax.minimize(path, fails="wrong")


def rounding(x: Any) -> Any:
    y = lax.scan(lambda c, y: (jnp.sin(c) * y, c), x, jnp.arange(5.0), reverse=True)
    half = layers(x.astype(jnp.bfloat16)) @ layers(x.astype(jnp.bfloat16))
    return y, half, jax.random.key(3), jnp.argsort(x), jax.nn.softmax(x.astype(jnp.float16) * 9), x / 0


# ---- a test of the user's


def products(x: Any) -> Any:
    return layers(x) + jnp.cos(jnp.outer(x, x) * 50 + 10) * 30


@pytest.mark.quick(0)
def test_a_test_of_the_user(tmp_path: Path):
    path = recorded(products, tmp_path, jnp.linspace(-0.5, 0.9, 8))

    def is_large(program: Callable[..., Any], arguments: list[Any]) -> Any:
        return max(jnp.max(jnp.abs(x)) for x in program(*arguments)) > 20

    made = graftax.minimize(path, fails=is_large)
    assert made.operations in (["mul"], ["add"]) and max(map(len, made.text.splitlines())) < 120
    scope: dict[str, Any] = {}
    exec(made.text, scope)
    assert is_large(scope["program"], scope["arguments"])
    with pytest.raises(graftax.GraftaxError, match="does not fail here: `fails` is false of it"):
        graftax.minimize(path, fails=lambda program, arguments: False)
    with pytest.raises(ValueError, match="fails='slow': expected one of 'nonfinite', 'wrong', 'crash', 'hang'"):
        graftax.minimize(path, fails="slow")  # pyright: ignore[reportArgumentType]


# ---- crashes


def without_memory(x: Any) -> Any:
    return layers(lax.sort(jnp.broadcast_to(layers(x)[:, None], (8, 1 << 46)))[0, 0])


def without_a_library(x: Any) -> Any:
    return layers(lax.scan(lambda c, _: (layers(of_a_library(c)), c), layers(x), None, length=3)[0])


def of_a_library(x: Any) -> Any:
    return jax.ffi.ffi_call("graftax_not_there", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@pytest.mark.quick(0)
def test_an_error_of_xla(tmp_path: Path):
    made = graftax.minimize(recorded(without_memory, tmp_path, jnp.ones(8)), fails="crash")
    assert made.operations[-1] in ("broadcast_in_dim", "sort") and len(made.operations) == 1
    assert "RESOURCE_EXHAUSTED" in made.cause and ".bind(x0" in made.text and "jax.export" not in made.text
    made = graftax.minimize(recorded(without_a_library, tmp_path, jnp.ones(8)), fails="crash")
    assert made.operations == ["ffi_call"] and "NOT_FOUND" in made.cause
    run = subprocess.run([sys.executable, made.path], capture_output=True, text=True, check=False)
    assert run.returncode == 1 and "JaxRuntimeError: NOT_FOUND" in run.stderr


def ended_on_the_host(x: Any) -> Any:
    return layers(on_host(aborts, layers(x) * 8))


def ended_when_lowered(x: Any) -> Any:
    return layers(lax.cond(x.sum() > 99, lambda x: layers(UNLOWERED.bind(x)), layers, x))


def hanging(x: Any) -> Any:
    return layers(lax.fori_loop(0, 4, lambda i, x: layers(on_host(sleeps, x * 4)), layers(x)))


ENDS: dict[Callable[..., Any], tuple[Any, str, str]] = {
    ended_on_the_host: ("crash", "pure_callback", "It ends the process: SIGABRT"),
    ended_when_lowered: ("crash", "unlowered", "It ends the process: SIGABRT"),
    hanging: ("hang", "pure_callback", "It takes longer than 4 seconds"),
}


@pytest.mark.quick(0)
@pytest.mark.parametrize("function", ENDS, ids=lambda f: f.__name__)
def test_what_ends_its_process_is_found_from_another(
    tmp_path: Path, function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    path = recorded(function, tmp_path, jnp.linspace(0, 0.9, 8))
    fails, operation, cause = ENDS[function]
    with pytest.raises(graftax.GraftaxError, match="does not fail here: it"):
        graftax.minimize(path, fails=fails, timeout=20)
    monkeypatch.setenv(ARMED, "1")
    with pytest.raises(graftax.GraftaxError) as raised:
        graftax.minimize(path, fails=fails, timeout=4 if fails == "hang" else 60)
    # It needs code of this file, which no script of plain JAX has.
    assert re.search(rf"what fails in {function.__name__}, {operation}, cannot be written", str(raised.value))
    assert cause in str(raised.value)


@pytest.mark.quick(0)
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = str(recorded(wrong_among_layers, tmp_path, jnp.linspace(-0.5, 0.9, 8)))
    script = tmp_path / "small.py"
    assert main(["minimize", path, "--wrong", "--out", str(script)]) == 0
    assert capsys.readouterr().out.startswith(f"{script}: twice, of ") and script.exists()
    assert main(["minimize", path, "--wrong", "--tolerance", "9"]) == 2
    assert "does not fail here: compiled and one operation after the other" in capsys.readouterr().err
    assert main(["minimize", path]) == 2
    assert "graftax minimize: the last call in" in capsys.readouterr().err
