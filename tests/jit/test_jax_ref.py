# SPDX-License-Identifier: Apache-2.0
"""`jax.Ref`, JAX's mutable array, as an argument and inside objects."""

import jax
import jax.numpy as jnp
import pytest

import graftax
from graftax._graph.types.describe import describe

new_ref = getattr(jax, "new_ref", None)


class Model:
    def __init__(self, ref):
        self.ref = ref


if new_ref is not None:

    @pytest.mark.parametrize("jit", [graftax.jit, graftax.filter_jit])
    def test_a_ref_is_changed_in_place_with_one_trace(jit):
        f = jit(lambda model, x: model.ref.__setitem__(..., model.ref[...] + x))
        for start in (0.0, 5.0):
            model = Model(new_ref(jnp.full(2, start)))
            f(model, jnp.ones(2))
            f(model, jnp.ones(2))
            assert model.ref[...].tolist() == [start + 2] * 2
        assert f.cache_info().traces == 1

    def test_a_returned_ref_is_the_callers_own():
        ref = new_ref(jnp.ones(2))
        assert graftax.jit(lambda m: {"r": m.ref})(Model(ref))["r"] is ref


def test_this_jax_has_refs_or_the_tests_above_are_not_there():
    assert (new_ref is None) == ("test_a_returned_ref_is_the_callers_own" not in globals())


@pytest.mark.skipif(new_ref is None, reason="this JAX has none")
class TestNew:
    def test_each_call_makes_one(self):
        f = graftax.jit(lambda x: {"k": [jax.new_ref(x * 2)]})
        first, second = (f(jnp.ones(2))["k"][0] for _ in range(2))
        first[...] = first[...] + 1
        assert first[...].tolist() == [3, 3] and second[...].tolist() == [2, 2]
        assert type(first) is type(jax.new_ref(jnp.ones(2))) and f.cache_info().traces == 1

    def test_one_in_two_places_is_one(self):
        @graftax.jit
        def f(x, box):
            box["kept"] = box["again"] = jax.new_ref(x)
            box["kept"][...] = x + 1
            return box["kept"]

        for box in ({}, {}):
            out = f(jnp.ones(2), box)
            assert out is box["kept"] is box["again"] and out[...].tolist() == [2, 2]

    def test_it_is_an_argument_of_the_next_call(self):
        make = graftax.jit(lambda x: Model(jax.new_ref(x)))

        @graftax.jit
        def add(model):
            model.ref[...] += 1

        model = make(jnp.zeros(2))
        for _ in range(3):
            add(model)
        assert model.ref[...].tolist() == [3, 3]

    def test_inside_of_another_jitted_function(self):
        inner = graftax.jit(jax.new_ref)

        @graftax.jit
        def f(x):
            ref = inner(x)
            ref[...] = ref[...] * 3
            return ref[...], ref

        value, ref = f(jnp.ones(2))
        assert value.tolist() == ref[...].tolist() == [3, 3]

    def test_ahead_of_time(self):
        f = graftax.jit(lambda x: (jax.new_ref(x), x + 1))
        assert f.lower(jnp.ones(2)).compile()(jnp.ones(2))[0][...].tolist() == [1, 1]
        assert f.eval_shape(jnp.ones(2))[0].shape == (2,)


def test_the_first_tracer_that_is_met_says_nothing_of_the_others():
    roles: list[str] = []

    def f(x):
        ref = jax.new_ref(x)
        roles.append(describe(ref, object).role)
        return ref[...]

    jax.jit(f)(jnp.ones(2))
    assert roles == ["array"]
