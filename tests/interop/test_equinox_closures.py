# SPDX-License-Identifier: Apache-2.0
"""Closure-converted functions and Jaxprs with constants are arguments and results of every transform."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

import graftax

M = jnp.arange(9.0).reshape(3, 3)
V = jnp.asarray([1.0, -1.0, 2.0])


@pytest.fixture(params=[eqx.filter_closure_convert, graftax.filter_closure_convert], ids=["equinox", "graftax"])
def convert(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("jit", [graftax.jit, graftax.filter_jit])
def test_one_comes_out_of_a_trace_and_goes_into_another(convert: Any, jit: Any):
    make = jit(lambda m: convert(lambda x: m @ x, V))
    function = make(M)
    for scale in (1, 2):
        function = make(M * scale)
        np.testing.assert_array_equal(function(V), M * scale @ V)
    call = jit(lambda f, x: f(x))
    np.testing.assert_array_equal(call(function, V), M * 2 @ V)
    np.testing.assert_array_equal(call(make(M), V), M @ V)
    assert make.cache_info().traces == 1 and call.cache_info().traces == 1


def test_loops_and_branches_carry_them(convert: Any):
    def powers(m: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            function, x = carry
            return (function, function(x)), x

        return graftax.scan(step, (convert(lambda x: m @ x, V), V), length=3)[0][1]

    expected = M @ M @ M @ V
    np.testing.assert_allclose(powers(M), expected)
    np.testing.assert_allclose(graftax.jit(powers)(M), expected)
    np.testing.assert_allclose(jax.jit(powers)(M), expected)
    chosen = graftax.cond(True, lambda f: f(V), lambda f: -f(V), convert(lambda x: M @ x, V))
    np.testing.assert_array_equal(chosen, M @ V)


def test_each_is_made_along_an_axis(convert: Any):
    matrices = jnp.stack([M, 2 * M])
    functions = graftax.filter_vmap(lambda m: convert(lambda x: m @ x, V))(matrices)
    out = graftax.filter_vmap(lambda f, x: f(x), in_axes=(eqx.if_array(0), None))(functions, V)
    np.testing.assert_allclose(out, matrices @ V)


def test_derivatives_go_through_and_by_them(convert: Any):
    by_matrix = graftax.filter_grad(lambda m: convert(lambda x: m @ x, V)(V).sum())(M)
    np.testing.assert_allclose(by_matrix, jax.grad(lambda m: (m @ V).sum())(M))
    function = graftax.jit(lambda m: convert(lambda x: m @ x, V))(M)
    gradient = graftax.filter_grad(lambda f: f(V).sum())(function)
    assert len(jax.tree.leaves(gradient)) == len(jax.tree.leaves(eqx.filter(function, eqx.is_array)))
    np.testing.assert_allclose(jax.tree.leaves(gradient)[0], jax.grad(lambda m: (m @ V).sum())(M))
    assert jax.tree.structure(eqx.apply_updates(function, gradient)) == jax.tree.structure(function)


def test_shapes_of_one_are_asked_for(convert: Any):
    shape = graftax.filter_eval_shape(lambda m: convert(lambda x: m @ x, V), M)
    assert jax.tree.leaves(eqx.filter(shape, lambda x: isinstance(x, jax.ShapeDtypeStruct)))[0].shape == (3, 3)


def test_what_it_is_for_can_be_asked():
    def function(x: Any, word: str, *, scale: Any) -> Any:
        return x * scale, word

    given = jnp.zeros(3), "word"
    ours, theirs = (library.filter_closure_convert(function, *given, scale=jnp.ones(3)) for library in (graftax, eqx))
    assert (ours.in_struct, ours.out_struct) == (theirs.in_struct, theirs.out_struct)


LIBRARIES = pytest.mark.parametrize("library", [graftax, eqx], ids=["graftax", "equinox"])
SCALES = {"scale": 2.0}


def scaled(x: Any, power: int = 1) -> Any:
    return SCALES["scale"] * x**power


@LIBRARIES
def test_a_function_without_closure_is_called_as_it_is(library: Any, monkeypatch: pytest.MonkeyPatch):
    ran: list[Any] = []
    monkeypatch.setitem(globals(), "note", ran.append)
    function = library.filter_closure_convert(noting, V)
    assert ran == [] and jax.tree.leaves(function) == [noting]
    assert type(function).__name__ == "_TrivialClosureConvert"
    np.testing.assert_array_equal(function(V), V + 1)
    np.testing.assert_array_equal(jax.jit(lambda x: function(x))(V), V + 1)
    assert len(ran) == 2 and ran[0] is V
    assert function.in_struct == ((jax.ShapeDtypeStruct((3,), jnp.float32),), {})
    assert function.out_struct == jax.ShapeDtypeStruct((3,), jnp.float32)
    with pytest.raises(ValueError, match="converted"):
        function(V[:2])
    with pytest.raises(ValueError, match="converted"):
        function(1.0)


def noting(x: Any) -> Any:
    note(x)  # noqa: F821
    return x + 1


@LIBRARIES
@pytest.mark.parametrize("jit", [graftax.jit, graftax.filter_jit])
def test_one_without_closure_goes_through_transforms(library: Any, jit: Any, monkeypatch: pytest.MonkeyPatch):
    function = library.filter_closure_convert(scaled, V, power=2)
    call = jit(lambda f, x: f(x, power=2))
    np.testing.assert_array_equal(call(function, V), 2 * V**2)
    np.testing.assert_array_equal(call(library.filter_closure_convert(scaled, V, power=2), V), 2 * V**2)
    assert call.cache_info().traces == 1
    made = jit(lambda x: library.filter_closure_convert(scaled, x, power=2))(V)
    np.testing.assert_array_equal(made(2 * V, power=2), 8 * V**2)
    np.testing.assert_array_equal(graftax.filter_grad(lambda x: function(x, power=2).sum())(V), 4 * V)
    rows = graftax.filter_vmap(lambda f, x: f(x, power=2), in_axes=(None, 0))(function, jnp.stack([V, 2 * V]))
    np.testing.assert_array_equal(rows, jnp.stack([2 * V**2, 8 * V**2]))
    if jit is graftax.jit:  # what it reads counts
        monkeypatch.setitem(SCALES, "scale", 3.0)
        np.testing.assert_array_equal(call(function, V), 3 * V**2)


@pytest.mark.parametrize("jit", [graftax.jit, graftax.filter_jit])
def test_a_jaxpr_holds_its_constants_as_arrays(jit: Any):
    make = jit(lambda m: jax.make_jaxpr(lambda x: jax.jit(lambda y: y + m)(m @ x))(V))
    closed = make(M), make(2 * M)
    for scale, one in enumerate(closed, 1):
        np.testing.assert_array_equal(one.consts[0], M * scale)
        run = jit(lambda c, x: jax.extend.core.jaxpr_as_fun(c)(x)[0])
        np.testing.assert_array_equal(run(one, V), M * scale + (M * scale) @ V)
    assert make.cache_info().traces == 1


def test_a_jaxpr_without_constants_is_itself():
    closed = jax.make_jaxpr(lambda x: x + 1)(V)
    seen: list[Any] = []

    @graftax.jit
    def function(closed: Any) -> Any:
        seen.append(closed)
        return closed

    assert function(closed) is closed and seen == [closed]


class Tag:
    def __init__(self, name: str) -> None:
        self.name = name


SYMMETRIC = Tag("symmetric")


class Operator(eqx.Module):
    matrix: Any
    tags: frozenset[Tag] = eqx.field(static=True)


@pytest.mark.parametrize("jit", [graftax.jit, graftax.filter_jit])
def test_a_sentinel_of_a_module_is_an_element_of_a_result(jit: Any):
    operator = jit(lambda m: Operator(m, frozenset([SYMMETRIC])))(M)
    assert operator.tags == {SYMMETRIC}
    by_name = graftax.jit(lambda m: {SYMMETRIC: m})(M)
    np.testing.assert_array_equal(by_name[SYMMETRIC], M)


def test_a_rule_may_return_symbolic_zeros_and_functions_of_its_own_trace():
    @graftax.filter_custom_jvp
    def double(x: Any) -> Any:
        return 2 * x, {"seen": x, "function": graftax.filter_closure_convert(lambda y: x * y, V)}

    @double.def_jvp
    def _(primals: Any, tangents: Any) -> Any:
        (x,), (rate,) = primals, tangents
        rest = {"seen": x, "function": graftax.filter_closure_convert(lambda y: x * y, V)}
        arrays, _ = eqx.partition(rest, eqx.is_array)
        zeros = jax.custom_derivatives.zero_from_primal(arrays, symbolic_zeros=True)
        return (2 * x, rest), (3 * rate, zeros)

    np.testing.assert_array_equal(jax.grad(lambda x: double(x)[0].sum() + double(x)[1]["seen"].sum())(V), [3, 3, 3])


MADE = {
    "filter_jit": lambda lib: lib.filter_jit(lambda x: (x, object()))(V)[1],
    "filter_eval_shape": lambda lib: lib.filter_eval_shape(lambda x: (x, object()), V)[1],
    "filter_jvp": lambda lib: lib.filter_jvp(lambda x: (x, object()), (V,), (V,))[0][1],
    "filter_vjp": lambda lib: lib.filter_vjp(lambda x: (x, object()), V)[0][1],
    "filter_make_jaxpr": lambda lib: lib.filter_make_jaxpr(lambda x: (x, object()))(V)[2][1],
    "filter_vmap": lambda lib: lib.filter_vmap(lambda x: (x, object()))(V)[1],
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_a_mark_that_a_function_makes_is_returned_as_by_equinox(make: Any):
    assert type(make(eqx)) is type(make(graftax)) is object
    with pytest.raises(graftax.UnsupportedValueError, match="created inside the function"):
        graftax.jit(lambda x: (x, object()))(V)


def test_a_converted_function_takes_dicts_in_any_order():
    p = {"b": jnp.ones(2), "a": jnp.zeros(2)}
    converted = graftax.filter_closure_convert(lambda p, n: p["b"] - p["a"] + n["m"][0], p, {"m": [1.0], "k": "text"})
    other = {"a": jnp.zeros(2), "b": jnp.ones(2)}
    assert (converted(other, {"k": "text", "m": [1.0]}) == 2).all()
    with pytest.raises(graftax.StructureError, match="was converted for other arguments"):
        converted({"a": jnp.zeros(2), "c": jnp.ones(2)}, {"m": [1.0], "k": "text"})


def test_a_rule_may_have_an_argument_that_is_named_self():
    @graftax.filter_custom_vjp
    def scaled(x, *, self):
        return x * self

    scaled.def_fwd(lambda perturbed, x, *, self: (x * self, None))
    scaled.def_bwd(lambda residuals, g, perturbed, x, *, self: 10 * g * self)
    assert graftax.filter_grad(lambda x: scaled(x, self=2.0))(jnp.array(1.0)) == 20


@pytest.mark.parametrize("library", [graftax, eqx], ids=["graftax", "equinox"])
def test_an_array_of_a_number_s_type_keeps_it(library):
    """So the function computes as it would: `bfloat16 * weak float32` is no `float32`."""
    weak, seen = jnp.asarray(2.0), []

    def f(x, n):
        seen.append(n.weak_type)
        return x * n * weak, n

    converted = library.filter_closure_convert(f, jnp.ones(2, jnp.bfloat16), weak)
    out = converted(jnp.ones(2, jnp.bfloat16), weak)
    assert seen == [True] and out[0].dtype == jnp.bfloat16 and out[1].weak_type
    assert [x.weak_type for x in converted.out_struct] == [False, True]
    assert [x.weak_type for x in converted.in_struct[0]] == [False, False]
    assert converted(jnp.ones(2, jnp.bfloat16), jnp.float32(2))[0].dtype == jnp.bfloat16


def scanned(x):
    return jax.lax.scan(lambda c, y: (c + y, c), x, jnp.stack([x, x]))[0]


PROGRAMS = {
    "a call": (lambda x: jax.jit(jnp.sin)(x) * 2, lambda x: jax.jit(jnp.cos)(x) * 2),
    "a scan": (scanned, lambda x: jax.lax.scan(lambda c, y: (c * y, c), x, jnp.stack([x, x]))[0]),
    "a number": (lambda x: x * 2, lambda x: x * 3),
    "a shape": (lambda x: x.reshape(1, -1), lambda x: x.reshape(-1, 1)),
    "an index": (lambda x: x[jnp.array([0, 1])], lambda x: x[jnp.array([0])]),
    "a branch": (
        lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
        lambda x: jax.lax.cond(x.sum() > 0, jnp.cos, jnp.sin, x),
    ),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_functions_that_do_the_same_are_one_structure_and_others_are_not(name):
    def converted(f):
        return graftax.filter_closure_convert(lambda x: f(x), V)

    one, other = PROGRAMS[name]
    run, kept = graftax.jit(lambda f, x: f(x)), []
    for f in (one, one, other, one, other):
        kept.append(converted(f))
        np.testing.assert_allclose(run(kept[-1], V), f(V), rtol=1e-6)
    assert run.cache_info().traces == 2
