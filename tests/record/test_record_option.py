# SPDX-License-Identifier: Apache-2.0
"""`jit(f, record=...)` is `graftax.record(jit(f))`, and a recorder is a context whose end reads its last calls."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import graftax
from graftax._record.replay import RecordedCalls


def logarithm(x: Any) -> Any:
    return jnp.log(x)


class Layer:
    def __init__(self, scale: float) -> None:
        self.scale, self.calls = jnp.float32(scale), 0

    @graftax.jit(record={"nonfinite": False, "last": 2})
    def scaled(self, x: Any) -> Any:
        self.calls += 1
        return self.scale * x

    @graftax.jit(record=True)
    @staticmethod
    def doubled(x: Any) -> Any:
        return x * 2

    @graftax.jit(record=True)
    @classmethod
    def of(cls, x: Any) -> Any:
        return x - 1


def texts(found: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in found if w.category is graftax.RecordedCallWarning]


def test_an_option_of_jit_records(tmp_path: Path):
    step = graftax.jit(logarithm, record={"dir": tmp_path, "last": 2}, donate="x")
    assert isinstance(step, graftax.Recorder) and step._options.donate == ("x",)
    with pytest.warns(graftax.RecordedCallWarning, match="not finite"):
        for value in (1.0, 2.0, -1.0):
            step(jnp.full(3, value))
        step.flush()
    recorded = RecordedCalls(step.files[0])
    assert len(recorded) == 2 and [recorded.run(i).differences for i in range(2)] == [[], []]
    assert recorded.where().cause.operation == "log"


def test_without_the_option_nothing_is_recorded():
    assert type(graftax.jit(logarithm, record=False)) is graftax.Jitted


def test_the_option_decorates_functions_methods_and_their_kinds(tmp_path: Path):
    @graftax.jit(record={"dir": tmp_path})
    def twice(x: Any) -> Any:
        return x * 2

    layer = Layer(3)
    for function, value in ((twice, 4.0), (layer.scaled, 6.0), (layer.doubled, 4.0), (layer.of, 1.0)):
        assert function(jnp.full(2, 2.0)).tolist() == [value, value]
        function.save(tmp_path / "call")
        assert RecordedCalls(tmp_path / "call").run(0).differences == []
    assert layer.calls == 1


def test_wrong_options_are_refused_where_they_are_given():
    with pytest.raises(ValueError, match="last=0"):
        graftax.jit(record={"last": 0})
    with pytest.raises(TypeError, match="'lost'"):
        graftax.jit(logarithm, record={"lost": 3})
    with pytest.raises(TypeError, match="expected True, or a dict"):
        graftax.jit(logarithm, record="runs")
    with pytest.raises(ValueError, match="check=True"):
        graftax.jit(logarithm, record=True, check=True)


# ---- as a context


def test_leaving_the_block_reads_the_last_call(tmp_path: Path):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with graftax.record(logarithm, dir=tmp_path) as step:
            step(jnp.ones(2))
            step(-jnp.ones(2))
            assert not found
    (text,) = texts(found)
    assert "a result is not finite" in text and step.files[0] in text


def test_an_exception_that_ends_the_block_writes_the_calls(tmp_path: Path):
    layer = Layer(2)
    for on, expected in ((ArithmeticError, 1), (LookupError, 0), ((), 0)):
        step = graftax.record(logarithm, dir=tmp_path, on=on)
        with warnings.catch_warnings(record=True) as found, pytest.raises(ZeroDivisionError):
            warnings.simplefilter("always")
            with step:
                step(layer.scale)
                raise ZeroDivisionError("the loader is empty")
        assert len(texts(found)) == len(step.files) == expected
        assert all("its block raised ZeroDivisionError: the loader is empty" in text for text in texts(found))
    with pytest.raises(KeyError), graftax.record(logarithm, dir=tmp_path) as step:
        raise KeyError("before any call")
    assert step.files == []


def test_an_exception_of_a_call_is_written_once(tmp_path: Path):
    def refuse(x: Any) -> Any:
        raise ValueError(f"no {x.shape}")

    with warnings.catch_warnings(record=True) as found, pytest.raises(ValueError, match="no"):
        warnings.simplefilter("always")
        with graftax.record(refuse, dir=tmp_path) as step:
            step(jnp.ones(2))
    (text,) = texts(found)
    assert "it raised ValueError: no (2,)" in text and len(step.files) == 1


def test_a_block_of_a_bound_method_is_that_of_its_recorder(tmp_path: Path):
    layer = Layer(3)
    recorder = graftax.record(layer.scaled, nonfinite=True, dir=tmp_path)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with recorder as scaled:
            scaled(jnp.array([1.0, jnp.inf]))
    assert len(texts(found)) == 1 and layer.calls == 1
    jax.block_until_ready(layer.scale)


@pytest.mark.parametrize("patterns", ["return[0]", "result.loss", ["result[2]", "layer.scale"]])
def test_patterns_that_cover_no_result_are_told(tmp_path: Path, patterns: Any) -> None:
    f = graftax.record(lambda x: (jnp.log(x), x * 2), nonfinite=patterns, dir=tmp_path)
    with pytest.warns(
        graftax.RecordedCallWarning, match=r"covers no floating result.*Name some of result\[0\], result\[1\]"
    ):
        f(-jnp.ones(2))
    f.flush()
    assert f.files == []


def test_a_pattern_that_covers_one_result_is_enough(tmp_path: Path) -> None:
    f = graftax.record(lambda x: (jnp.log(x), x * 2), nonfinite=["result[1]", "result[2]"], dir=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(-jnp.ones(2))
        f.flush()
    assert f.files == []
