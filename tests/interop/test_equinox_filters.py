# SPDX-License-Identifier: Apache-2.0
"""The filtered transforms beside Equinox's own, where programs of Equinox look at more than the result."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax

BOTH = pytest.mark.parametrize("of", [eqx, graftax], ids=["equinox", "graftax"])
ONE = jnp.array(1.0)


class Counted:
    """A function that counts its traces in a variable around it."""

    def __init__(self):
        count = 0

        def function(x):
            nonlocal count
            count += 1
            return x * x

        self.function = function
        self.traces = lambda: count


# ---- what a target holds counts by identity, as what a function captures does


@BOTH
@pytest.mark.parametrize("transform", ["filter_grad", "filter_value_and_grad", "filter_vmap", "filter_jacrev"])
def test_a_transformed_function_that_is_made_again_is_traced_once(of, transform):
    counted = Counted()
    made = getattr(of, transform)
    for x in (1.0, 2.0):
        graftax.filter_jit(made(counted.function))(jnp.full(2 if transform == "filter_vmap" else (), x))
    once = counted.traces()
    graftax.filter_jit(made(counted.function))(jnp.full(2 if transform == "filter_vmap" else (), 3.0))
    assert counted.traces() == once


def test_a_transform_with_other_options_is_another_function():
    f = lambda x: (x**2, x)
    one = graftax.filter_jit(graftax.filter_grad(f, has_aux=True))(ONE)
    other = graftax.filter_jit(graftax.filter_value_and_grad(f, has_aux=True))(ONE)
    assert (one[0], other[0][0], other[1]) == (2, 1, 2)
    xs = jnp.arange(6.0).reshape(2, 3)
    assert graftax.filter_jit(graftax.filter_vmap(jnp.sum))(xs).shape == (2,)
    double = lambda x: x * 2
    assert graftax.filter_jit(graftax.filter_vmap(double, out_axes=1))(xs).shape == (3, 2)
    assert graftax.filter_jit(graftax.filter_vmap(double))(xs).shape == (2, 3)


@BOTH
def test_a_method_of_a_module_counts_its_traces(of):
    traces = 0

    class Model(eqx.Module):
        weight: jax.Array

        def apply(self, x):
            nonlocal traces
            traces += 1
            return self.weight * x

    for weight in (1.0, 2.0, 3.0):
        model = Model(jnp.array(weight))
        assert of.filter_jit(model.apply)(ONE) == weight
    assert traces == 1


@BOTH
def test_a_rule_counts_its_traces(of):
    backward = 0

    @eqx.filter_custom_vjp
    def f(x):
        return x

    @f.def_fwd
    def forward(perturbed, x):
        return x, None

    @f.def_bwd
    def rule(residuals, g, perturbed, x):
        nonlocal backward
        backward += 1
        return g + 2

    for _ in range(3):
        assert of.filter_grad(of.filter_jit(f))(ONE) == 3
    assert backward == 1


CALLS = {
    "filter_grad": lambda of, f: of.filter_grad(f)(ONE),
    "filter_vmap": lambda of, f: of.filter_vmap(f)(ONE[None]),
    "filter_jvp": lambda of, f: of.filter_jvp(f, (ONE,), (ONE,)),
    "filter_vjp": lambda of, f: of.filter_vjp(f, ONE)[0],
    "filter_hessian": lambda of, f: of.filter_hessian(f)(ONE),
    "filter_checkpoint": lambda of, f: of.filter_checkpoint(f)(ONE),
    "filter_closure_convert": lambda of, f: of.filter_closure_convert(f, ONE)(ONE),
    "filter_eval_shape": lambda of, f: of.filter_eval_shape(f, ONE),
    "filter_make_jaxpr": lambda of, f: of.filter_make_jaxpr(f)(ONE),
}


@BOTH
@pytest.mark.parametrize("call", CALLS)
def test_what_a_target_holds_counts_its_traces(of, call):
    class Held(eqx.Module):
        function: object

        def __call__(self, x):
            return self.function(x)

    class Plain:
        def __init__(self, function):
            self.function = function

        def __call__(self, x):
            return self.function(x)

    bound, partial = lambda f: Held(f).__call__, lambda f: functools.partial(lambda g, x: g(x), f)
    for hold in (Held, bound, Plain, eqx.Partial, partial):
        counted = Counted()
        CALLS[call](of, hold(counted.function))
        assert counted.traces() == 1


@BOTH
def test_arrays_that_a_target_captures_are_differentiated(of):
    class Held(eqx.Module):
        function: object

        def __call__(self, x):
            return self.function(x)

    def through(call):
        return of.filter_grad(lambda w: jnp.sum(call(Held(lambda x: w * w * x))))(3 * ONE)

    assert through(lambda f: of.filter_vmap(f)(ONE[None])) == 6
    assert through(lambda f: of.filter_grad(f)(ONE)) == 6
    assert through(lambda f: of.filter_jvp(f, (ONE,), (ONE,))[1]) == 6
    assert through(lambda f: of.filter_closure_convert(f, ONE)(ONE)) == 6
    assert through(lambda f: of.filter_checkpoint(f)(ONE)) == 6


def test_an_object_with_another_function_is_traced_again():
    class Model(eqx.Module):
        activation: object
        weight: jax.Array

        def __call__(self, x):
            return self.activation(self.weight * x)

    for activation in (jnp.sin, lambda x: x + 1, lambda x: x + 2):
        model = Model(activation, jnp.array(2.0))
        assert jnp.allclose(graftax.filter_jit(model)(ONE), activation(2.0))


# ---- tangents


@BOTH
@pytest.mark.parametrize("tangent", [jnp.array(5), np.array(5), 5])
def test_a_tangent_of_another_kind_is_refused(of, tangent):
    with pytest.raises(TypeError):
        of.filter_jvp(lambda x: x * 2, (ONE,), (tangent,))


@BOTH
def test_a_rule_is_given_tangents_that_are_python_numbers(of):
    seen = []

    @of.filter_custom_jvp
    def f(x, y, *, by):
        return by(x) + y

    @f.def_jvp
    def rule(primals, tangents, *, by):
        seen.append(tangents)
        return f(*primals, by=by), tangents[0] ** 2

    value, tangent = jax.jvp(lambda x: f(x, 3.0, by=jnp.sin), (2.0,), (4.0,))
    assert jnp.allclose(value, jnp.sin(2.0) + 3) and tangent == 16
    assert seen[0][1] is None


@BOTH
def test_a_derivative_by_what_a_rule_has_no_place_for(of):
    @of.filter_custom_vjp
    def f(x, y):
        return x + y

    f.def_fwd(lambda perturbed, x, y: (x + y, None))
    f.def_bwd(lambda residuals, g, perturbed, x, y: g)
    with pytest.raises(RuntimeError):
        jax.grad(lambda x: f(x, x))(1.0)


@BOTH
def test_the_first_argument_is_given_by_position(of):
    with pytest.raises(TypeError, match="Functions wrapped with"):
        of.filter_grad(lambda x: x)(x=ONE)


# ---- results


@BOTH
def test_make_jaxpr_keeps_what_a_module_holds_as_constants(of):
    model, inner = eqx.nn.Linear(2, 2, key=jax.random.key(0)), jnp.ones(2)
    x = jnp.arange(2.0)
    jaxpr, dynamic, static = of.filter_make_jaxpr(lambda m, x: (m(x) + inner, "a", np.ones(3), 2))(model, x)
    assert len(jaxpr.in_avals) == 3
    assert any(c is inner for c in jaxpr.consts)
    assert dynamic[0].shape == (2,) and dynamic[2].shape == (3,) and dynamic[2].dtype == np.float32
    assert (dynamic[1], dynamic[3], static) == (None, None, (None, "a", None, 2))
    of_model = of.filter_make_jaxpr(model)(x)[0]
    assert len(of_model.in_avals) == 1
    assert {id(c) for c in of_model.consts} == {id(model.weight), id(model.bias)}


@BOTH
def test_a_shape_that_the_function_returns_is_static(of):
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    _, dynamic, static = of.filter_make_jaxpr(lambda x: (x[None], shape))(jax.ShapeDtypeStruct((2,), jnp.float32))
    assert dynamic == (jax.ShapeDtypeStruct((1, 2), jnp.float32), None)
    assert static == (None, shape)


@BOTH
def test_numbers_in_the_result_of_vmap(of):
    f = lambda x: {"x": x, "n": 2, "name": "a"}
    xs = jnp.arange(3.0)
    out = of.filter_vmap(f)(xs)
    assert (out["n"], out["name"]) == (2, "a")
    out = of.filter_vmap(f, out_axes={"x": 0, "n": 0, "name": None})(xs)
    assert out["n"].shape == (3,) and out["name"] == "a"
    assert of.filter_vmap(lambda x: x, out_axes=0, axis_size=2)(1).shape == (2,)
    assert of.filter_vmap(lambda x: x, out_axes=None, axis_size=2)(1) == 1


# ---- NumPy values in the result


def numpy_values():
    return np.int32(0), np.zeros(2), {"a": np.float64(2.0)}, np.bool_(True)


def looks(tree):
    return [(type(x).__module__.partition(".")[0], str(x.dtype), np.shape(x)) for x in jax.tree.leaves(tree)]


RESULTS = {
    "filter_jit": lambda of: of.filter_jit(lambda x: (x, numpy_values()))(ONE),
    "filter_jit, argument": lambda of: of.filter_jit(lambda x, n: (x, n))(ONE, numpy_values()),
    "filter_jit of filter_grad": lambda of: of.filter_jit(
        of.filter_grad(lambda x: (x * x, numpy_values()), has_aux=True)
    )(ONE),
    "filter_grad, aux": lambda of: of.filter_grad(lambda x: (x * x, numpy_values()), has_aux=True)(ONE),
    "filter_vmap": lambda of: of.filter_vmap(lambda x: (x, numpy_values()))(ONE[None]),
    "filter_vmap, mapped": lambda of: of.filter_vmap(lambda x, n: (x, n))(jnp.ones(2), np.arange(2.0)),
    "filter_vmap, not mapped": lambda of: of.filter_vmap(lambda x, n: (x, n), in_axes=(0, None))(ONE[None], np.ones(2)),
    "filter_eval_shape": lambda of: of.filter_eval_shape(lambda x: (x, numpy_values()), ONE),
    "filter_closure_convert": lambda of: of.filter_closure_convert(lambda x: (x, numpy_values()), ONE).out_struct,
    "filter_make_jaxpr": lambda of: of.filter_make_jaxpr(lambda x: (x, numpy_values()))(ONE)[1],
}


@BOTH
def test_numpy_values_in_the_result_of_filter_jit_are_arrays_in_each_call(of):
    f = of.filter_jit(lambda x: (x, numpy_values()))
    for x in (ONE, ONE + 1):
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(f(x)))


@pytest.mark.parametrize("result", RESULTS)
def test_numpy_values_in_a_result_are_what_equinox_makes_of_them(result):
    own, ours = (RESULTS[result](of) for of in (eqx, graftax))
    assert looks(own) == looks(ours)
    assert jax.tree.structure(own) == jax.tree.structure(ours)


@BOTH
def test_a_jaxpr_returns_the_numpy_values_of_its_function(of):
    jaxpr, shapes, rest = of.filter_make_jaxpr(lambda x: (x, numpy_values(), "text"))(ONE)
    assert len(jaxpr.out_avals) == len(jax.tree.leaves(shapes)) == 5
    assert jax.tree.leaves(rest) == ["text"]


@BOTH
@pytest.mark.parametrize("transform", ["filter_jit", "filter_vmap"])
def test_a_function_in_the_result_keeps_its_numpy_values(of, transform):
    def make(x):
        values = np.arange(3.0)
        return lambda y: values * y

    f = getattr(of, transform)(make)
    for x in (ONE, ONE + 1):
        found = f(x if transform == "filter_jit" else x[None])(np.float64(2))
        assert isinstance(found, np.ndarray) and found.dtype == np.float64


class Power(eqx.Module):
    base: jax.Array

    def of(self, n: "int", x: float = 1.0):
        """So that the method has a docstring and annotations."""
        return self.base**n * x


@pytest.mark.parametrize("library", [graftax, eqx], ids=["graftax", "equinox"])
def test_derivatives_by_a_method_of_a_module_have_its_structure(library):
    """A solver differentiates by `term.vf`: names, docstring and annotations are no leaves of it."""
    method, seen = Power(jnp.asarray(3.0)).of, []

    @library.filter_custom_jvp
    def call(method, x):
        return method(2, x)

    @call.def_jvp
    def rule(primals, tangents):
        seen.append(jax.tree.map(lambda p, t: t is None, *primals[:1], *tangents[:1], is_leaf=lambda x: x is None))
        return call(*primals), tangents[1]

    grads = library.filter_grad(lambda m: m(2))(method)
    assert jax.tree.structure(grads) == jax.tree.structure(method) and grads.__self__.base == 6
    assert library.filter_grad(lambda x: call(method, x))(2.0 * jnp.ones(())) == 1
    assert jax.tree.leaves(seen[0]) == [True]
    moved = eqx.apply_updates(method, grads)
    assert moved.__name__ == "of" and moved(1) == 9
