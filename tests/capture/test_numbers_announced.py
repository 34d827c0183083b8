# SPDX-License-Identifier: Apache-2.0
"""`numbers={pattern: "symbolic" or "static"}`: what is known to change, or not to, is so from the first call on."""

import logging

import jax
import jax.numpy as jnp
import pytest

import graftax


class Model:
    def __init__(self):
        self.w, self.steps, self.width = jnp.ones(2), 0, 3


def step(model, x):
    model.steps += 1
    return x * model.w * model.steps + jnp.ones(model.width).sum()


def results(f, calls=4):
    model = Model()
    return [(f(model, jnp.ones(2)).tolist(), model.steps) for _ in range(calls)]


@pytest.mark.parametrize("pattern", ["model.steps", "**.steps", "model"])
def test_a_counter_that_is_announced_compiles_once(pattern):
    f = graftax.jit(step, numbers={pattern: "symbolic"})
    assert results(f) == results(step)
    assert f.cache_info().traces == 1


def test_a_number_that_is_static_by_its_pattern_compiles_for_each_value():
    f = graftax.jit(step, numbers={"model.steps": "static"})
    assert results(f) == results(step)
    assert f.cache_info().traces == 4


def test_the_first_pattern_that_covers_a_number_decides_and_others_are_as_usual():
    f = graftax.jit(step, numbers={"**.width": "static", "**": "symbolic"})
    assert results(f) == results(step)
    assert f.cache_info().traces == 1
    by_default = graftax.jit(step, numbers={"**.width": "static"})
    assert results(by_default) == results(step)
    assert by_default.cache_info().traces == 1  # a counter


def test_an_argument_by_its_name_and_a_dict():
    f = graftax.jit(lambda x, k, d: x * k + d["n"], numbers={"k": "symbolic", "d['n']": "symbolic"})
    assert [f(jnp.ones(()), k, {"n": k * 2}).item() for k in range(3)] == [0, 3, 6]
    assert f.cache_info().traces == 1


def test_a_program_that_is_warmed_counts_and_may_be_frozen(caplog):
    f = graftax.jit(step, numbers={"model.steps": "symbolic"})
    model = Model()
    f.warm([(model, jax.ShapeDtypeStruct((2,), "float32"))])
    assert model.steps == 0
    f.freeze()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        assert results(f) == results(step)
    assert not [record for record in caplog.records if "step" in record.getMessage()]


def test_filter_jit_takes_it_too():
    f = graftax.filter_jit(lambda x, k: x * k, numbers={"k": "symbolic"})
    assert [f(jnp.ones(()), k).item() for k in range(3)] == [0, 1, 2]
    assert f._cache_size() == 1


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(graftax.StructureError, match=r"model\.stepz.*numbers=.*model\.steps"):
        graftax.jit(step, numbers={"model.stepz": "symbolic"})(Model(), jnp.ones(2))


@pytest.mark.parametrize("numbers", ["sometimes", {"x": "sometimes"}, {1: "static"}, None])
def test_another_word_is_refused(numbers):
    with pytest.raises(ValueError, match="expected 'symbolic' or 'static', or a dict"):
        graftax.jit(step, numbers=numbers)
