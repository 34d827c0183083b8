# SPDX-License-Identifier: Apache-2.0
"""`graftax.minimize`: planted faults in large programs, each with the operations that have to be left."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import graftax
from graftax._record.failures import Nonfinite
from graftax._record.origin_marks import are_finite
from graftax._record.program_parts import Part, part_of
from graftax._record.reduction import reduced, with_fewer_equations, with_smaller_arrays

NONFINITE = Nonfinite()
STATE = {"scale": jnp.float32(1)}


def layers(x: Any) -> Any:
    for i in range(20):
        x = jnp.tanh(x) + i / 20
    return x


def in_layers(x: Any) -> Any:
    STATE["scale"] = STATE["scale"] * 2
    return layers(jnp.log(layers(x) - 2) * STATE["scale"])


def in_derivative(x: Any) -> Any:
    return jax.grad(lambda x: layers(jnp.sqrt(((x - 0.5) ** 2).sum())))(x)


def in_scan(x: Any) -> Any:
    return lax.scan(lambda c, _: (layers(jnp.sqrt(c - 0.9)), c), x, None, length=8)[1]


def in_while(x: Any) -> Any:
    return lax.while_loop(lambda c: c[1] < 9, lambda c: (c[0] * 1e10 + 1, c[1] + 1), (x, 0))[0]


def in_branch(x: Any) -> Any:
    return lax.cond(x.sum() > 0, lambda x: layers(jnp.arccosh(x / 2)), layers, x)


def beside_masked(x: Any) -> Any:
    return jnp.where(x > 5, jnp.log(x - 5), x).sum() + (1 / (x - x)).sum()


def in_a_product(x: Any) -> Any:
    return (jnp.outer(x, x) * 1e30) @ (jnp.outer(x, x) * 1e30)


def only_compiled(x: Any) -> Any:
    """XLA divides by the product, which is 0."""
    y = layers(x) * 0 + 1e-30
    return (y / y) / y + layers(x)


def custom_rule(x: Any) -> Any:
    return jax.nn.softplus(x) + jnp.cbrt(x) * jnp.linalg.norm(x * 1e30)


FAULTS: dict[Callable[..., Any], str] = {
    in_layers: "log",
    in_derivative: "div|mul",
    in_scan: "sqrt",
    in_while: "mul",
    in_branch: "sqrt|log|sub|mul|log1p|acosh|add|div",
    beside_masked: "div|mul",
    in_a_product: "dot_general",
    only_compiled: "div, div",
    custom_rule: "reduce_sum|mul|square|integer_pow",
}


def recorded(function: Callable[..., Any], folder: Path, *args: Any) -> Path:
    recorder = graftax.record(function, nonfinite=False, dir=folder)
    recorder(*args)
    recorder.save(folder / "call.record")
    return folder / "call.record"


@pytest.mark.quick(0)
@pytest.mark.parametrize("function", FAULTS, ids=lambda f: f.__name__)
def test_the_script_has_what_fails(tmp_path: Path, function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    made = graftax.minimize(recorded(function, tmp_path, jnp.full(8, 0.5)))
    assert re.fullmatch(FAULTS[function], ", ".join(made.operations)), made
    assert made.equations >= len(made.operations) and made.path == str(tmp_path / "call.py")
    assert "graftax" not in "".join(line for line in made.text.splitlines() if "import" in line)
    # Its arrays have a few numbers: those that fail.
    assert all(len(numbers.split(",")) <= 8 for numbers in re.findall(r"numpy\.array\((.*?), numpy", made.text))
    run = subprocess.run([sys.executable, made.path], capture_output=True, text=True, check=False)
    assert run.returncode == 1 and "AssertionError: a result is not finite, and all inputs are" in run.stderr


@pytest.mark.quick(0)
def test_the_state_of_this_process_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = recorded(with_a_constant, tmp_path, jnp.full(8, 0.5))
    STATE["scale"] = after = jnp.float32(7)
    monkeypatch.setattr(sys.modules[__name__], "SHIFT", 0)
    assert graftax.minimize(path).operations == ["log"]
    assert STATE["scale"] is after and SHIFT == 0


SHIFT = 2


def with_a_constant(x: Any) -> Any:
    STATE["scale"] = STATE["scale"] * 2
    return jnp.log(x - SHIFT) * STATE["scale"]


@pytest.mark.quick(0)
def test_an_operation_without_a_public_name_is_exported(tmp_path: Path):
    def solve(x: Any) -> Any:
        return lax.custom_root(lambda y: y * x - 1, x, lambda f, y: 1 / (x - x), lambda g, y: y / g(1.0))

    made = graftax.minimize(recorded(solve, tmp_path, jnp.float32(2)))
    assert ("jax.export.deserialize" in made.text) == ("import jax.export" in made.text)
    assert "jax.export.deserialize" in made.text or jax.__version_info__ < (0, 11)  # there it is made of public ones


def host(x: Any) -> Any:
    return 1 / x


@pytest.mark.quick(0)
def test_what_cannot_be_made_smaller_is_said(tmp_path: Path):
    with pytest.raises(graftax.GraftaxError, match="does not fail here"):
        graftax.minimize(recorded(layers, tmp_path, jnp.ones(2)))
    with pytest.raises(graftax.GraftaxError, match="not finite: x: the argument is nan already"):
        graftax.minimize(recorded(layers, tmp_path, jnp.full(2, jnp.nan)))

    def callback(x: Any) -> Any:
        return jax.pure_callback(host, jax.ShapeDtypeStruct((), "float32"), x)

    with warnings.catch_warnings(), pytest.raises(graftax.GraftaxError, match="cannot be written as a script"):
        warnings.simplefilter("ignore")
        graftax.minimize(recorded(callback, tmp_path, jnp.float32(0)))

    def raising(x: Any) -> Any:
        raise KeyError("no such layer")

    recorder = graftax.record(raising, on=(), dir=tmp_path)
    with pytest.raises(KeyError):
        recorder(jnp.ones(2))
    recorder.save(tmp_path / "raising.record")
    with pytest.raises(graftax.GraftaxError, match=r"raises while it is traced.*KeyError: 'no such layer'"):
        graftax.minimize(tmp_path / "raising.record")


# ---- the parts


def whole(function: Callable[..., Any], *args: Any) -> Part:
    return part_of(jax.make_jaxpr(function)(*args), args)


@pytest.mark.quick(0)
@pytest.mark.parametrize("bad", range(0, 40, 7))
def test_one_equation_among_many_is_left(bad: int):
    def f(x: Any) -> Any:
        for i in range(40):
            x = jnp.sqrt(x - 9) * 0 + x if i == bad else x + 0.5
        return x

    part = reduced(whole(f, jnp.arange(-30.0, -20.0)), NONFINITE)
    assert part.operations == ["sqrt"] and NONFINITE.shows(part)
    assert part.arguments()[0].shape == (1,)


def test_a_part_without_any_of_its_equations_or_numbers_is_finite():
    def f(x: Any) -> Any:
        return jnp.sin(jnp.max(x) * jnp.sum(x) * 1e20)

    part = with_fewer_equations(whole(f, jnp.full((6, 5), 1e12)), NONFINITE.shows)
    part = with_smaller_arrays(part, NONFINITE.shows)
    assert NONFINITE.shows(part) and all(are_finite(x) for x in part.arguments())
    for i in range(len(part.steps)):
        rest = Part((*part.steps[:i], *part.steps[i + 1 :]), part.values)
        assert not rest.steps or not NONFINITE.shows(rest)
