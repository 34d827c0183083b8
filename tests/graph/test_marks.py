# SPDX-License-Identifier: Apache-2.0
"""`Static`, `Dynamic`, `dynamic=` and `register_static`: what is traced and what is not, where the user says so."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax

x = jnp.arange(3.0)


@pytest.mark.parametrize("dynamic", ["k", 1, ("k",), "**"])
def test_a_dynamic_number_is_traced_once(dynamic):
    f = graftax.jit(lambda y, k: y * k, dynamic=dynamic)
    for k in (1, 2, 3):
        assert f(x, k).tolist() == (x * k).tolist()
    assert f.cache_info().traces == 1
    assert f(x, 0.5).dtype == (x * 0.5).dtype  # another type of number: traced for itself, in the same entry
    assert f.cache_info().traces == 2


def test_dynamic_numbers_deep_in_an_argument():
    f = graftax.jit(lambda cfg, y: y * cfg["lr"] + len(cfg["steps"]), dynamic="cfg[lr]")
    for lr in (0.1, 0.2, 0.3):
        assert f({"lr": lr, "steps": [1, 2]}, x).tolist() == (x * lr + 2).tolist()
    assert f.cache_info().traces == 1
    f({"lr": 0.1, "steps": [1, 3]}, x)
    assert f.cache_info().traces == 2


def test_a_dynamic_number_that_is_not_changed_stays_the_callers_number():
    box = {"k": 3}
    f = graftax.jit(lambda box, y: (box["k"], y * box["k"]), dynamic="box")
    result = f(box, x)
    assert result[0] == 3 and type(result[0]) is int and box == {"k": 3} and type(box["k"]) is int


def test_the_keys_of_dynamic_and_static_numbers_differ():
    f = graftax.jit(lambda cfg, y: y * cfg["a"], dynamic="cfg[a]")
    assert f({"a": 2}, x).tolist() == (2 * x).tolist()
    assert f({"a": jnp.float32(2)}, x).tolist() == (2 * x).tolist()
    assert f({"a": 3}, x).tolist() == (3 * x).tolist()


def test_dynamic_marks_a_value_wherever_it_stands():
    class Config:
        def __init__(self, rate):
            self.rate = graftax.Dynamic(rate)
            self.name = "c"

    f = graftax.jit(lambda c, y: y * c.rate.value)
    for rate in (0.5, 1.5, 2.5):
        assert f(Config(rate), x).tolist() == (x * rate).tolist()
    assert f.cache_info().traces == 1
    config = Config(1.0)

    @graftax.jit
    def decay(c):
        c.rate.value = c.rate.value * 0.5

    decay(config), decay(config)
    assert float(config.rate.value) == 0.25
    assert graftax.jit(lambda d: d.value["a"] + d.value["b"][0])(graftax.Dynamic({"a": 1, "b": [2]})) == 3


def test_the_warning_of_a_changing_static_names_the_ways_out():
    f = graftax.jit(lambda y, k: y * k, numbers="static")
    with pytest.warns(graftax.RecompileWarning, match=r"dynamic='k'.*graftax\.Dynamic"):
        for k in range(12):
            f(x, float(k))


def test_static_keeps_arrays_out_of_the_trace():
    @graftax.jit
    def f(y, table):
        assert not isinstance(table.value, jax.core.Tracer)
        return y * float(np.asarray(table.value).max())

    for top in (1.0, 2.0, 2.0):
        assert f(x, graftax.Static(np.array([0.0, top]))).tolist() == (x * top).tolist()
    assert f.cache_info().traces == 2
    w = jnp.ones(2)
    f(x, graftax.Static(w)), f(x, graftax.Static(w))
    assert f.cache_info().traces == 3


def test_a_static_value_changed_in_place_is_a_new_key():
    mark = graftax.Static([1, 2])
    f = graftax.jit(lambda y, s: y * sum(s.value))
    assert f(x, mark).tolist() == (3 * x).tolist()
    mark.value.append(3)
    assert f(x, mark).tolist() == (6 * x).tolist()


def test_register_static_makes_instances_opaque():
    @graftax.register_static
    class Mode:
        def __init__(self, k):
            self.k = k
            self.hidden = jnp.ones(2)

        def __eq__(self, other):
            return self.k == other.k

        def __hash__(self):
            return hash(self.k)

    f = graftax.jit(lambda m, y: y * m.k)
    for k in (1, 2, 1):
        assert f(Mode(k), x).tolist() == (x * k).tolist()
    assert f.cache_info().traces == 2
    assert graftax.flatten(Mode(1))[0] == []
    assert jax.jit(lambda m, y: y * m.k)(Mode(3), x).tolist() == (3 * x).tolist()


def test_register_static_after_the_class_was_met():
    class Late:
        def __init__(self, w):
            self.w = w

    assert len(graftax.flatten(Late(x))[0]) == 1
    graftax.register_static(Late)
    assert len(graftax.flatten(Late(x))[0]) == 0
    with pytest.raises(ValueError):
        graftax.register_static(Late)


def test_shapes_stand_for_arrays_where_nothing_runs():
    class Model:
        def __init__(self, w):
            self.w, self.name = w, "m"

    f = graftax.jit(lambda m, y: {"y": y @ m.w, "m": m, "name": m.name})
    shape = jax.ShapeDtypeStruct((3, 2), jnp.float32)
    result = f.eval_shape(Model(shape), x)
    assert result["y"].shape == (2,) and result["name"] == "m" and result["m"].w.shape == (3, 2)
    compiled = f.lower(Model(shape), jax.ShapeDtypeStruct((3,), jnp.float32)).compile()
    model = Model(jnp.ones((3, 2)))
    result = compiled(model, x)
    assert result["y"].tolist() == [3, 3] and result["m"] is model
    assert "dot" in str(f.trace(Model(shape), x).jaxpr)


def test_a_shape_in_a_call_is_a_static_value():
    f = graftax.jit(lambda s, y: jnp.zeros(s.shape) + y)
    for n in (3, 1, 3):
        assert f(jax.ShapeDtypeStruct((n,), jnp.float32), x[:1]).shape == (n,)
    assert f.cache_info().traces == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(jax.ShapeDtypeStruct((3,), jnp.float32), x[:1])


if hasattr(jax, "new_ref"):

    def test_a_ref_in_two_places_is_passed_once():
        ref = jax.new_ref(jnp.zeros(2))

        @graftax.jit
        def f(a, b):
            assert a is b["r"]
            a[...] += 1
            b["r"][...] += 2

        f(ref, {"r": ref}), f(ref, {"r": ref})
        assert ref[...].tolist() == [6, 6]
        assert f.cache_info().traces == 1
        other = jax.new_ref(jnp.zeros(2))
        g = graftax.jit(lambda a, b: (a.__setitem__(..., a[...] + 1), b["r"].__setitem__(..., b["r"][...] + 2)))
        g(ref, {"r": other})
        g(ref, {"r": ref})
        assert ref[...].tolist() == [10, 10] and other[...].tolist() == [2, 2]
        assert g.cache_info().traces == 2


def test_numbers_that_a_function_holds_are_static_also_in_a_dynamic_argument():
    def scaled(k):
        return lambda y: y * 2 if k > 1 else y

    f = graftax.jit(lambda state, y: state["f"](y) * state["n"], dynamic="state")
    for n in (1, 2, 3):
        assert f({"f": scaled(2), "n": n}, x).tolist() == (x * 2 * n).tolist()
    assert f.cache_info().traces == 1
    assert f({"f": scaled(1), "n": 1}, x).tolist() == x.tolist()
