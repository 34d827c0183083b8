# SPDX-License-Identifier: Apache-2.0
"""`jax.Ref`, JAX's mutable array, as an argument and inside objects."""

import jax
import jax.numpy as jnp
import pytest

import graftax
from graftax._describe import describe

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


@pytest.mark.parametrize(
    ("leave", "path"),
    [
        (lambda ref, box: {"k": [ref]}, r"result\['k'\]\[0\]"),
        (lambda ref, box: box.update(kept=ref), r"box\['kept'\]"),
    ],
)
def test_a_new_ref_is_named_where_it_stands(leave, path):
    with pytest.raises(ValueError, match=f"makes a jax.Ref and leaves it at {path}"):
        graftax.jit(lambda x, box: leave(jax.new_ref(x), box))(jnp.ones(2), {})


def test_the_first_tracer_that_is_met_says_nothing_of_the_others():
    roles: list[str] = []

    def f(x):
        ref = jax.new_ref(x)
        roles.append(describe(ref, object).role)
        return ref[...]

    jax.jit(f)(jnp.ones(2))
    assert roles == ["array"]
