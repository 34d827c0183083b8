# SPDX-License-Identifier: Apache-2.0
"""Derivatives take the arguments that JAX's take, and say what is wrong with others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax

ONES = jnp.ones(2)


def times(x, y):
    return (x * y).sum()


@pytest.mark.parametrize("transform", ["grad", "value_and_grad", "jacfwd", "jacrev", "hessian"])
@pytest.mark.parametrize("argnums", [1, -1, np.int64(1), (0, 1), [1, 0], np.array([0, 1])])
def test_positions_are_given_as_to_jax(transform, argnums):
    gradient = getattr(graftax, transform)(times, argnums)(ONES, 2 * ONES)
    by_jax = int(argnums) if np.ndim(argnums) == 0 else tuple(argnums)
    expected = getattr(jax, transform)(times, by_jax)(ONES, 2 * ONES)
    jax.tree.map(np.testing.assert_allclose, gradient, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"argnums": 1.0}, r"argnums=1\.0 does not say which arguments"),
        ({"argnums": None}, r"argnums=None.*wrt="),
        ({"argnums": "x"}, r"argnums='x'.*wrt="),
        ({"wrt": 3.5}, r"wrt=3\.5.*predicate"),
        ({"wrt": ["x", None]}, r"wrt=None"),
        ({"argnums": ()}, r"differentiate in no argument"),
    ],
)
def test_what_names_no_argument_is_told(options, message):
    with pytest.raises(TypeError, match=message):
        graftax.grad(times, **options)(ONES, ONES)


@pytest.mark.parametrize(("options", "message"), [({"argnums": 2}, "no argument 2; it is given x, y.*wrt=")])
def test_what_is_not_given_is_told(options, message):
    with pytest.raises(ValueError, match=message):
        graftax.grad(times, **options)(ONES, y=ONES)


@pytest.mark.parametrize("wrt", ["x", ["x"], "y", ["y", "x"]])
def test_a_number_that_is_an_argument_is_differentiated_by_name_too(wrt):
    names = [wrt] if isinstance(wrt, str) else wrt
    expected = [{"x": 3.0, "y": 2.0}[name] for name in names]
    for call in (lambda f: f(2.0, 3.0), lambda f: f(2.0, y=3.0), lambda f: f(x=2.0, y=3.0)):
        gradient = call(graftax.grad(lambda x, y: x * y, wrt=wrt))
        assert (list(gradient) if isinstance(wrt, list) else [gradient]) == expected


@pytest.mark.parametrize("number", [3, True, 3.0, jnp.asarray(3)])
def test_integers_are_differentiated_where_that_is_allowed(number):
    actual, expected = (m.grad(lambda x: x * 2.0, allow_int=True)(number) for m in (graftax, jax))
    assert actual.dtype == expected.dtype and actual.shape == expected.shape


def test_zeros_of_jax_are_tangents_and_cotangents():
    zero = np.zeros((), jax.dtypes.float0)
    integers = {"n": jnp.asarray(3)}
    value, rate = graftax.jvp(lambda x, i: x * i["n"], (ONES, integers), (ONES, {"n": zero}))
    assert value.tolist() == rate.tolist() == [3, 3]
    value, push = graftax.linearize(lambda x, i: x * i["n"], ONES, integers)
    assert push(ONES, {"n": zero}).tolist() == [3, 3]
    _, pull = graftax.vjp(lambda x: {"y": x * 2, "n": jnp.asarray(1)}, ONES)
    assert pull({"y": ONES, "n": zero})[0].tolist() == [2, 2]


def test_one_tangent_is_given_for_each_primal():
    for tangents in ((ONES,), (ONES, ONES, ONES)):
        with pytest.raises(TypeError, match=rf"tangents is a tuple of {len(tangents)}\..*one element for each"):
            graftax.jvp(times, (ONES, ONES), tangents)
        with pytest.raises(TypeError):
            jax.jvp(times, (ONES, ONES), tangents)
        with pytest.raises(TypeError, match=rf"2 primals and {len(tangents)} tangents"):
            graftax.linearize(times, ONES, ONES)[1](*tangents)
    for primals, tangents in ((ONES, ONES), ((ONES,), ONES), (ONES, (ONES,))):
        with pytest.raises(TypeError, match=r"(primals|tangents) is a ArrayImpl.*tuples"):
            graftax.jvp(jnp.sum, primals, tangents)


def test_a_pair_may_be_a_list():
    def f(x):
        return [(x**2).sum(), {"aux": x}]

    value, aux = graftax.value_and_grad(f, has_aux=True)(ONES)[0]
    assert (value, aux["aux"].tolist()) == (2, [1, 1])
    assert graftax.grad(f, has_aux=True)(ONES)[1]["aux"].tolist() == [1, 1]
    assert graftax.jacrev(f, has_aux=True)(ONES)[1]["aux"].tolist() == [1, 1]
    assert graftax.vjp(f, ONES, has_aux=True)[2]["aux"].tolist() == [1, 1]
    assert graftax.jvp(f, (ONES,), (ONES,), has_aux=True)[2]["aux"].tolist() == [1, 1]


def test_vjp_has_the_options_of_jax():
    assert graftax.vjp(jnp.sin, ONES, reduce_axes=())[0].tolist() == jnp.sin(ONES).tolist()


@pytest.mark.parametrize("name", ["custom_jvp", "custom_vjp", "filter_custom_jvp", "filter_custom_vjp", "grad", "vmap"])
def test_what_is_no_function_is_refused_where_it_is_wrapped(name):
    with pytest.raises(TypeError, match=rf"{name.replace('grad', '.*grad')} expects a callable"):
        getattr(graftax, name)(3)


def test_nondiff_argnums_are_positions_of_arguments():
    f = graftax.custom_jvp(lambda x: x, nondiff_argnums=(2,))
    f.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    with pytest.raises(IndexError, match="nondiff_argnums has 2, and the call has 1"):
        f(ONES)


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_a_rule_may_return_numpy_arrays(kind):
    def f(x):
        return {"y": x * 2, "table": np.arange(3.0, dtype=np.float32)}

    if kind == "jvp":
        ruled = graftax.custom_jvp(f)
        ruled.defjvp(lambda primals, tangents: (f(*primals), {"y": 5 * tangents[0], "table": None}))
    else:
        ruled = graftax.custom_vjp(f)
        ruled.defvjp(lambda x: (f(x), None), lambda residuals, c: (5 * c["y"],))
    assert graftax.grad(lambda x: ruled(x)["y"].sum())(ONES).tolist() == [5, 5]
    assert graftax.jit(ruled)(ONES)["table"].tolist() == [0, 1, 2]


def test_a_filtered_transform_is_called_by_its_name():
    for name in ("filter_grad", "filter_value_and_grad"):
        with pytest.raises(TypeError, match=f"^{name} of <lambda>"):
            getattr(graftax, name)(lambda x: x)(ONES)
        with pytest.raises(TypeError, match=rf"graftax.{name} expects a callable"):
            getattr(graftax, name)(3)
