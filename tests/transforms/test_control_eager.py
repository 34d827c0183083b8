# SPDX-License-Identifier: Apache-2.0
"""Loops and branches outside of any trace: one and the same function compiles once, and nothing grows with calls."""

from __future__ import annotations

import functools
import gc
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from graftax._jit.options import Options
from graftax.transforms._engine import eager_compile
from sizes import sized

ROWS = jnp.arange(12.0).reshape(4, 3)
TRACED: list[str] = []
WEIGHT = jnp.ones(3)
FACTOR = 2


def traced(name: str = "") -> None:
    """Called by what is traced. The list is no global of the functions that are tested, which may not change one."""
    TRACED.append(name)


@pytest.fixture(autouse=True)
def _forget() -> None:
    TRACED.clear()


def megabytes() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4 / 1024


def growth(call: Callable[[int], Any], first: int = sized(40, 10), calls: int = sized(200, 50)) -> float:
    """MB that so many calls keep, after the first few."""
    for number in range(first):
        call(number)
    before = megabytes()
    for number in range(calls):
        call(first + number)
    return megabytes() - before


def add(carry: Any, row: Any) -> tuple[Any, Any]:
    traced()
    return {"sum": carry["sum"] + row.sum(), "name": carry["name"]}, row * 2


LOOPS: dict[str, Callable[[], Any]] = {
    "scan": lambda: graftax.scan(add, {"sum": jnp.zeros(()), "name": "a"}, ROWS)[0]["sum"],
    "scan, reversed": lambda: graftax.scan(add, {"sum": 0.0, "name": "a"}, ROWS, reverse=True)[1],
    "map": lambda: graftax.map(double, {"x": ROWS}),
    "map, in batches": lambda: graftax.map(double, {"x": ROWS}, batch_size=2),
    "while_loop": lambda: graftax.while_loop(below_five, next_one, {"i": jnp.asarray(0)})["i"],
    "while_loop, bounded": lambda: graftax.while_loop(below_five, next_one, {"i": 0}, max_steps=9)["i"],
    "fori_loop": lambda: graftax.fori_loop(0, 5, plus, {"x": jnp.zeros(3)})["x"],
    "cond": lambda: graftax.cond(True, double, halve, {"x": ROWS}),
    "cond of an array": lambda: graftax.cond(jnp.asarray(False), halve, double, {"x": ROWS}),
    "switch": lambda: graftax.switch(1, [double, halve], {"x": ROWS}),
    "associative_scan": lambda: graftax.associative_scan(joined, {"x": ROWS})["x"],
}


def double(tree: Any) -> Any:
    traced()
    return tree["x"] * 2


def halve(tree: Any) -> Any:
    traced()
    return tree["x"] / 2


def joined(left: Any, right: Any) -> Any:
    traced()
    return {"x": left["x"] + right["x"]}


def below_five(state: Any) -> Any:
    traced()
    return state["i"] < 5


def next_one(state: Any) -> Any:
    traced()
    return {"i": state["i"] + 1}


def plus(i: Any, state: Any) -> Any:
    traced()
    return {"x": state["x"] + i}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_the_second_call_traces_nothing_and_two_hundred_keep_nothing(loop: Callable[[], Any]):
    first = loop()
    assert TRACED
    TRACED.clear()
    assert jnp.array_equal(first, loop())
    assert TRACED == []
    assert growth(lambda _: loop()) < 4
    assert TRACED == []
    assert jnp.array_equal(first, graftax.jit(lambda: loop())())


def test_functions_made_anew_are_compiled_once():
    def run(number: int) -> float:
        weight = jnp.full(3, float(number))
        return float(graftax.scan(lambda c, row: (c + (weight * row).sum(), traced()), 0.0, ROWS)[0])

    assert [run(n) for n in range(4)] == [0, 66, 132, 198]
    traces = len(TRACED)
    run(5)
    assert len(TRACED) == traces
    assert growth(run) < 4


def test_a_captured_number_that_changes_is_seen():
    def run(number: int) -> float:
        return float(graftax.scan(lambda c, row: (c + number * row.sum(), None), 0.0, ROWS)[0])

    assert [run(n) for n in (1, 2, 1, 3, 2)] == [66, 132, 66, 198, 132]


@pytest.mark.quick(0)
def test_the_number_of_structures_that_are_kept_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eager_compile, "_OPTIONS", Options(cache_size=4))

    def run(number: int) -> Any:
        return graftax.scan(lambda c, row: (c + number, None), 0.0, ROWS)

    assert growth(run, first=8, calls=16) < 4


def with_globals(carry: Any, row: Any) -> tuple[Any, None]:
    return carry + (WEIGHT * row).sum() * FACTOR, None


def test_globals_that_change_are_seen(monkeypatch: pytest.MonkeyPatch):
    def run() -> float:
        return float(graftax.scan(with_globals, 0.0, ROWS)[0])

    assert [run(), run()] == [132, 132]
    monkeypatch.setitem(globals(), "WEIGHT", jnp.full(3, 2.0))
    assert [run(), run()] == [264, 264]
    monkeypatch.setitem(globals(), "FACTOR", 1)
    assert [run(), run()] == [132, 132]


def scaled(value: Any) -> Any:
    return value * FACTOR


class Scaled:
    factor = 2

    def step(self, carry: Any, row: Any) -> tuple[Any, None]:
        return carry + row.sum() * self.factor, None


jitted_step = graftax.jit(with_globals)
module = types.ModuleType("module")
module.factor = 2  # type: ignore[attr-defined]

READERS: dict[str, tuple[Callable[[Any, Any], Any], Any, str]] = {
    "a helper's global": (lambda carry, row: (carry + scaled(row).sum(), None), globals(), "FACTOR"),
    "a class attribute": (Scaled().step, Scaled, "factor"),
    "an attribute of a class that a helper makes": (lambda carry, row: Scaled().step(carry, row), Scaled, "factor"),
    "an attribute of a module": (lambda carry, row: (carry + row.sum() * module.factor, None), module, "factor"),
    "what a jitted function captures": (jitted_step, globals(), "FACTOR"),
    "what a jitted function captures, in a function": (lambda *arguments: jitted_step(*arguments), globals(), "FACTOR"),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_the_called_functions_read_is_seen_when_it_changes(reader: str, monkeypatch: pytest.MonkeyPatch):
    step, holder, name = READERS[reader]
    change = monkeypatch.setitem if isinstance(holder, dict) else monkeypatch.setattr

    def run() -> float:
        return float(graftax.scan(step, 0.0, ROWS)[0])

    assert [run(), run()] == [132, 132]
    for factor in (3, 2, 5):
        change(holder, name, factor)
        assert [run(), run()] == [66 * factor] * 2


def test_what_the_traced_code_itself_changes_is_no_reason_to_trace_again():
    def first(carry: Any, row: Any) -> Any:
        traced()
        return carry + row.sum(), None

    def second(carry: Any, row: Any) -> Any:
        traced()
        return carry - row.sum(), None

    for _ in range(3):
        count = len(TRACED)
        graftax.scan(first, 0.0, ROWS)
        graftax.scan(second, 0.0, ROWS)
    assert len(TRACED) == count


def test_defaults_that_change_are_seen():
    def step(carry: Any, row: Any, weight: Any = jnp.ones(3), *, factor: Any = 1) -> Any:
        return carry + (weight * row).sum() * factor, None

    def run() -> float:
        return float(graftax.scan(step, 0.0, ROWS)[0])

    assert [run(), run()] == [66, 66]
    step.__defaults__ = (jnp.full(3, 2.0),)
    assert [run(), run()] == [132, 132]
    step.__kwdefaults__ = {"factor": 3}
    assert [run(), run()] == [396, 396]


class Cell:
    def __init__(self) -> None:
        self.weight, self.calls = jnp.ones(3), 0

    def step(self, carry: Any, row: Any) -> tuple[Any, Any]:
        self.weight = self.weight + row
        return carry, self.weight.sum()

    def __call__(self, carry: Any, row: Any) -> tuple[Any, Any]:
        return self.step(carry, row)


@pytest.mark.parametrize(
    "step_of", [lambda cell: cell.step, lambda cell: cell, lambda cell: functools.partial(Cell.step, cell)]
)
def test_what_steps_change_comes_back_on_every_call(step_of: Callable[[Cell], Any]):
    cell, plain = Cell(), Cell()
    for _ in range(3):
        graftax.scan(step_of(cell), None, ROWS)
        for row in ROWS:
            plain.step(None, row)
        assert jnp.allclose(cell.weight, plain.weight)


def test_a_cell_that_a_step_assigns_comes_back_on_every_call():
    total = jnp.zeros(())

    def step(carry: Any, row: Any) -> Any:
        nonlocal total
        total = total + row.sum()
        return carry, None

    for count in range(1, 4):
        graftax.scan(step, None, ROWS)
        assert float(total) == 66 * count


def test_the_callers_objects_stay_the_same_ones():
    ring: dict[str, Any] = {"x": jnp.ones(3)}
    ring["self"] = ring

    def step(node: Any, row: Any) -> Any:
        node["self"]["x"] = node["x"] + row
        return node, None

    for _ in range(3):
        assert graftax.scan(step, ring, ROWS)[0] is ring
        assert ring["self"] is ring
    assert jnp.allclose(ring["x"], 1 + 3 * ROWS.sum(0))
    assert growth(lambda _: graftax.scan(step, ring, ROWS)) < 4


def test_shapes_in_turn_are_traced_once_each():
    def step(carry: Any, row: Any) -> Any:
        traced()
        return carry + row.sum(), None

    for _ in range(3):
        for rows in (ROWS, ROWS[:2], ROWS[:, :2]):
            assert float(graftax.scan(step, 0.0, rows)[0]) == float(rows.sum())
        count = len(TRACED)
    assert len(TRACED) == count
    TRACED.clear()
    graftax.scan(step, 0.0, ROWS[:2])
    assert TRACED == []


def test_a_loop_in_a_loop_is_compiled_with_it():
    def inner(carry: Any, x: Any) -> Any:
        traced()
        return carry + x, None

    def outer(carry: Any, row: Any) -> Any:
        return graftax.scan(inner, carry, row)

    assert float(graftax.scan(outer, 0.0, ROWS)[0]) == 66
    TRACED.clear()
    assert float(graftax.scan(outer, 1.0, ROWS)[0]) == 67
    assert TRACED == []
    assert growth(lambda n: graftax.scan(outer, float(n), ROWS)) < 4


def test_an_error_is_that_of_every_call_and_leaves_things_as_they_were():
    state = {"x": jnp.zeros(3)}

    def step(carry: Any, row: Any) -> Any:
        state["x"] = state["x"] + row
        raise ZeroDivisionError("of mine")

    for _ in range(3):
        with pytest.raises(ZeroDivisionError, match=r"^of mine"):
            graftax.scan(step, None, ROWS)
        assert float(state["x"].sum()) == 0
    messages: set[str] = set()
    for _ in range(2):
        with pytest.raises(graftax.StructureError) as caught:
            graftax.scan(lambda carry, row: ([carry], None), jnp.zeros(()), ROWS)
        messages.add(str(caught.value))
    assert len(messages) == 1
    assert re.match("scan of <lambda>: a step must not change the structure", messages.pop())


def test_a_call_that_works_comes_after_one_that_fails():
    def step(carry: Any, row: Any) -> Any:
        if broken:
            raise ZeroDivisionError
        return carry + row.sum(), None

    for broken in (True, False, True, False):
        if broken:
            with pytest.raises(ZeroDivisionError):
                graftax.scan(step, 0.0, ROWS)
        else:
            assert float(graftax.scan(step, 0.0, ROWS)[0]) == 66


def test_a_host_function_is_that_of_the_call():
    def run(number: int) -> list[float]:
        values: list[float] = []

        def note(value: Any) -> None:
            values.append(float(value) + number)

        def step(carry: Any, row: Any) -> Any:
            jax.debug.callback(note, row.sum(), ordered=True)
            return carry, None

        graftax.scan(step, None, ROWS[:2])
        jax.effects_barrier()
        return values

    assert [run(n) for n in (0, 0, 1)] == [[3, 12], [3, 12], [4, 13]]


def test_a_pure_host_function_is_that_of_the_call():
    def run(number: int) -> float:
        def host(value: Any) -> Any:
            return np.float32(value * number)

        def step(carry: Any, row: Any) -> Any:
            return carry + jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), row.sum()), None

        return float(graftax.scan(step, 0.0, ROWS)[0])

    assert [run(n) for n in (1, 2, 2, 1)] == [66, 132, 132, 66]


def test_prints_come_on_every_call(capfd: pytest.CaptureFixture[str]):
    def step(carry: Any, row: Any) -> Any:
        jax.debug.print("row {}", row.sum())
        return carry, None

    for _ in range(2):
        graftax.scan(step, None, ROWS[:2])
        jax.effects_barrier()
        assert capfd.readouterr().out == "row 3.0\nrow 12.0\n"


def test_a_jitted_function_keeps_its_options():
    jitted = graftax.jit(lambda carry, row: ({**carry, "sum": carry["sum"] + row.sum()}, row * 2))
    forbids = graftax.jit(lambda carry, row: (carry.update(sum=carry["sum"] + 1) or carry, None), mutation="error")
    for _ in range(3):
        assert float(graftax.scan(jitted, {"sum": 0.0, "name": "a"}, ROWS)[0]["sum"]) == 66
        with pytest.raises(graftax.MutationError, match="mutation='error' forbids"):
            graftax.scan(forbids, {"sum": 0.0}, ROWS)


def test_numpy_arrays_are_read_on_every_call():
    table = np.ones(3, np.float32)

    def step(carry: Any, row: Any) -> Any:
        return carry + (table * row).sum(), None

    for factor in (1, 2, 3):
        table[:] = factor
        assert float(graftax.scan(step, 0.0, ROWS)[0]) == 66 * factor


def test_without_jit_it_is_plain_python():
    sums: list[float] = []

    def step(carry: Any, row: Any) -> Any:
        sums.append(float(row.sum()))
        return carry + row.sum(), None

    with jax.disable_jit():
        for _ in range(2):
            assert float(graftax.scan(step, 0.0, ROWS)[0]) == 66
    assert sums == [3, 12, 21, 30] * 2


def test_settings_of_jax_are_seen():
    def step(carry: Any, row: Any) -> Any:
        return carry, jnp.zeros(())

    def dtype() -> Any:
        return graftax.scan(step, None, ROWS)[1].dtype

    assert dtype() == jnp.float32
    with jax.enable_x64(True):
        assert dtype() == jnp.float64
    assert dtype() == jnp.float32


def test_the_same_code_in_another_namespace_is_another_function():
    code = compile("def step(carry, row): return carry + row.sum() * factor, None", "<made>", "exec")
    for factor in (1, 2, 3):
        namespace: dict[str, Any] = {"factor": factor}
        exec(code, namespace)
        assert float(graftax.scan(namespace["step"], 0.0, ROWS)[0]) == 66 * factor


def test_functions_of_one_code_and_other_kind_differ():
    def step(carry: Any, row: Any, *extra: Any) -> Any:
        return carry + row.sum() + len(extra), None

    class Bound:
        pass

    bound = Bound()
    Bound.__call__ = lambda self, carry, row: (carry - row.sum(), None)  # type: ignore[attr-defined]
    for _ in range(2):
        assert float(graftax.scan(step, 0.0, ROWS)[0]) == 66
        assert float(graftax.scan(bound, 0.0, ROWS)[0]) == -66
        assert float(graftax.scan(Bound.__call__.__get__(bound), 0.0, ROWS)[0]) == -66  # type: ignore[attr-defined]


@pytest.mark.quick(0)
def test_many_functions_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eager_compile, "_MAX_FUNCTIONS", 4)

    def run(number: int) -> None:
        namespace: dict[str, Any] = {}
        exec(f"def step(carry, row): return carry + row.sum() + {number}, None", namespace)
        assert float(graftax.scan(namespace["step"], 0.0, ROWS)[0]) == 66 + 4 * number

    assert growth(run, first=8, calls=16) < 4
    assert len(eager_compile._COMPILED) <= 4
