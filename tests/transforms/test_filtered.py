# SPDX-License-Identifier: Apache-2.0
"""`filter_*` are Equinox's: the same signatures, the same results, the caller's objects untouched."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax

pytestmark = pytest.mark.quick(1)  # each case compiles Equinox's, too

JITS = pytest.mark.parametrize(
    "jit", [lambda f: f, graftax.filter_jit, eqx.filter_jit], ids=["plain", "jit", "equinox"]
)
X = jnp.asarray([0.5, -1.0])


def assert_equal(a, b):
    """Equal as Equinox's trees, arrays up to rounding."""
    (actual, first), (expected, second) = (jax.tree.flatten(t, is_leaf=lambda x: x is None) for t in (a, b))
    assert first == second
    for x, y in zip(actual, expected, strict=True):
        if eqx.is_array(y):
            assert (x.shape, jnp.result_type(x)) == (y.shape, jnp.result_type(y))
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        else:
            assert type(x) is type(y)
            assert x == y or x is y


def functions_of(name):
    return getattr(graftax, name), getattr(eqx, name)


class Scaled(eqx.Module):
    mlp: eqx.nn.MLP
    scale: jax.Array
    count: jax.Array
    power: float
    note: str
    kind: str = eqx.field(static=True, default="scaled")

    def __call__(self, x):
        return self.mlp(x) * self.scale**self.power * self.count


def mlp():
    return eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))


def scaled():
    return Scaled(mlp(), jnp.asarray(2.0), jnp.asarray(3), 2.0, "a note")


def linear_and_norm():
    return {
        "b": eqx.nn.Linear(2, 2, key=jax.random.key(1)),
        "a": [eqx.nn.LayerNorm(2, eps=0.5), jax.nn.relu, "text", 3, None],
    }


def numpy_arrays():
    return (np.ones(2, np.float32), np.float32(2), np.arange(2), 1.5)


def run(model, x, *, factor=1.0):
    if isinstance(model, dict):
        norm, act = model["a"][:2]
        return act(norm(model["b"](x))) * factor
    if isinstance(model, tuple):
        return model[0] * model[1] * x * factor * model[3]
    return model(x) * factor


def loss(model, x, *, factor=1.0):
    return (run(model, x, factor=factor) ** 2).sum()


def with_aux(model, x):
    return loss(model, x), {"x": x, "note": "aux", "model": model}


MODELS = pytest.mark.parametrize("build", [mlp, scaled, linear_and_norm, numpy_arrays])


# ---- derivatives


@pytest.mark.quick(0)
@JITS
@MODELS
def test_gradients_are_those_of_equinox(build, jit):
    for name in ("filter_grad", "filter_value_and_grad"):
        mine, theirs = functions_of(name)
        assert_equal(jit(mine(loss))(build(), X), theirs(loss)(build(), X))
        assert_equal(jit(mine(loss))(build(), X, factor=3.0), theirs(loss)(build(), X, factor=3.0))
        assert_equal(jit(mine(with_aux, has_aux=True))(build(), X), theirs(with_aux, has_aux=True)(build(), X))
        assert_equal(jit(mine(has_aux=True)(with_aux))(build(), X), theirs(has_aux=True)(with_aux)(build(), X))


@MODELS
@pytest.mark.parametrize("name", ["filter_jacfwd", "filter_jacrev", "filter_hessian"])
def test_jacobians_are_those_of_equinox(build, name):
    mine, theirs = functions_of(name)
    assert_equal(mine(run)(build(), X, factor=2.0), theirs(run)(build(), X, factor=2.0))

    def pair(model, x):
        return run(model, x), {"aux": x}

    assert_equal(mine(pair, has_aux=True)(build(), X), theirs(pair, has_aux=True)(build(), X))


@JITS
@MODELS
def test_products_are_those_of_equinox(build, jit):
    mine, theirs = functions_of("filter_vjp")

    def pulled(vjp):
        def f(model, x):
            out, pull = vjp(run, model, x)
            first = pull(jnp.ones_like(out))
            out, pull, aux = vjp(with_aux, model, x, has_aux=True)
            return first, out, pull(jnp.ones_like(out)), aux["note"]

        return f

    assert_equal(jit(pulled(mine))(build(), X), pulled(theirs)(build(), X))


def halves(tree):
    return jax.tree.map(lambda x: 0.5 * jnp.ones_like(x) if eqx.is_inexact_array(x) else None, tree)


@pytest.mark.quick(0)
@MODELS
def test_tangents_are_those_of_equinox(build):
    def f(model, x, n, *, factor):
        return {"y": run(model, x, factor=factor), "x": x, "model": model, "n": n}

    mine, theirs = functions_of("filter_jvp")
    nothing = jax.tree.map(lambda _: None, build())
    for rates in (halves((build(), X, 3)), (halves(build()), None, None), (nothing, X, None)):
        arguments = (f, (build(), X, 3), rates)
        assert_equal(mine(*arguments, factor=2.0), theirs(*arguments, factor=2.0))


def test_a_float_with_a_tangent_is_traced():
    mine, theirs = functions_of("filter_jvp")
    arguments = (lambda x, y: (x * y, y), (2.0, jnp.ones(2)), (1.0, None))
    assert_equal(mine(*arguments), theirs(*arguments))


def test_tangents_of_another_tree_are_an_error():
    for jvp in functions_of("filter_jvp"):
        with pytest.raises(ValueError, match="tangents"):
            jvp(lambda x: x, (X,), ({"x": X},))


def test_a_partitioned_model_is_differentiated_by_its_first_half():
    model = scaled()
    diff, static = eqx.partition(model, eqx.is_inexact_array)

    def f(diff, static, x):
        return loss(eqx.combine(diff, static), x)

    mine, theirs = functions_of("filter_grad")
    assert_equal(mine(f)(diff, static, X), theirs(f)(diff, static, X))
    head = eqx.tree_at(lambda t: t.scale, jax.tree.map(lambda _: False, model), True)
    diff, static = eqx.partition(model, head)
    assert_equal(mine(f)(diff, static, X), theirs(f)(diff, static, X))
    assert eqx.apply_updates(model, mine(loss)(model, X)).note == "a note"


def test_other_uses_of_the_object_are_constants():
    """One dict that is given twice, or captured, is a tree for Equinox each time."""
    w = {"w": jnp.asarray(3.0)}
    for f, args in (
        (lambda a, b: a["w"] * b["w"], (w, w)),
        (lambda a: a["w"] * w["w"], (w,)),
    ):
        for name in ("filter_grad", "filter_value_and_grad", "filter_jacfwd", "filter_jacrev", "filter_hessian"):
            mine, theirs = functions_of(name)
            assert eqx.tree_equal(mine(f)(*args), theirs(f)(*args))


def test_nothing_to_differentiate_is_none():
    mine, theirs = functions_of("filter_grad")
    assert_equal(
        mine(lambda x: jnp.asarray(1.0) * x["n"])({"n": 3.0}), theirs(lambda x: jnp.asarray(1.0) * x["n"])({"n": 3.0})
    )


def test_the_first_argument_is_given_by_position():
    for grad in functions_of("filter_grad"):
        with pytest.raises(TypeError, match=r"position"):
            grad(loss)(model=mlp(), x=X)
        with pytest.raises(ValueError, match=r"argnums|tuple"):
            grad(loss, argnums=1)


def test_a_method_is_differentiated_by_its_object():
    for name, library in (("graftax", graftax), ("equinox", eqx)):

        class Model(eqx.Module):
            w: jax.Array

            @library.filter_value_and_grad
            def score(self, x):
                return (self.w * x).sum()

        value, gradient = Model(X).score(X)
        assert float(value) == 1.25, name
        np.testing.assert_array_equal(gradient.w, X)


# ---- by value


def test_the_callers_objects_are_untouched_and_told_of():
    def f(state, x):
        state["n"] += 1
        state["w"] = state["w"] * 2
        return (state["w"] * x).sum()

    state = {"w": X, "n": 0}
    for call in (
        lambda: graftax.filter_grad(f)(state, X),
        lambda: graftax.filter_checkpoint(f)(state, X),
        lambda: graftax.filter_vjp(f, state, X),
        lambda: graftax.filter_jacrev(f)(state, X),
        lambda: graftax.filter_eval_shape(f, state, X),
        lambda: graftax.filter_make_jaxpr(f)(state, X),
    ):
        with pytest.warns(graftax.LostChangeWarning, match="state"):
            call()
    assert state["n"] == 0
    assert state["w"] is X


def test_closures_are_as_in_jax():
    calls = []

    def f(x):
        calls.append(1)
        return (x * x).sum()

    graftax.filter_grad(f)(X)
    assert len(calls) == 1


# ---- without derivatives


@JITS
@MODELS
def test_checkpoint_is_that_of_equinox(build, jit):
    mine, theirs = functions_of("filter_checkpoint")
    assert_equal(jit(mine(run))(build(), X, factor=2.0), theirs(run)(build(), X, factor=2.0))
    policy = jax.checkpoint_policies.everything_saveable
    results = [
        library.filter_grad(library.filter_checkpoint(policy=policy, prevent_cse=False)(loss))(build(), X)
        for library in (graftax, eqx)
    ]
    assert_equal(*results)


@MODELS
def test_shapes_are_those_of_equinox(build):
    def f(model, x, name):
        return {"y": run(model, x), "model": model, "name": name}

    mine, theirs = functions_of("filter_eval_shape")
    for x in (X, jax.ShapeDtypeStruct((2,), jnp.float32)):
        assert eqx.tree_equal(mine(f, build(), x, "n"), theirs(f, build(), x, "n"))
    same_class = mine(eqx.nn.Linear, 3, 4, key=jax.random.key(0))
    assert eqx.tree_equal(same_class, theirs(eqx.nn.Linear, 3, 4, key=jax.random.key(0)))


@MODELS
def test_jaxprs_are_those_of_equinox(build):
    def f(model, x, name):
        return {"name": name, "y": run(model, x)}

    mine, theirs = functions_of("filter_make_jaxpr")
    for x in (X, jax.ShapeDtypeStruct((2,), jnp.float32)):
        (jaxpr, *rest), (expected, *other) = mine(f)(build(), x, "n"), theirs(f)(build(), x, "n")
        assert eqx.tree_equal(rest, other)
        assert sorted(str(v.aval) for v in jaxpr.jaxpr.invars) == sorted(str(v.aval) for v in expected.jaxpr.invars)
        assert [str(e.primitive) for e in jaxpr.jaxpr.eqns] == [str(e.primitive) for e in expected.jaxpr.eqns]


@JITS
def test_callbacks_are_those_of_equinox(jit):
    def host(tree, *, by):
        return {"y": np.asarray(tree["x"]) * by, "note": tree["note"]}

    shape = {"y": jax.ShapeDtypeStruct((2,), jnp.float32), "note": "n"}
    mine, theirs = (
        jit(lambda x, call=call: call(host, {"x": x, "note": "n"}, result_shape_dtypes=shape, by=2.0))
        for call in functions_of("filter_pure_callback")
    )
    assert_equal(mine(X), theirs(X))
    for call in functions_of("filter_pure_callback"):
        with pytest.raises(Exception, match=r"static elements|expected 'other', given 'n'"):
            call(host, {"x": X, "note": "n"}, result_shape_dtypes={**shape, "note": "other"}, by=2.0)[
                "y"
            ].block_until_ready()

    def mapped(call):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.vmap(lambda x: call(lambda x: x * 2, x, result_shape_dtypes=shape, vmap_method="sequential"))(X)

    assert_equal(*map(mapped, functions_of("filter_pure_callback")))


@JITS
@MODELS
def test_shards_are_those_of_equinox(build, jit):
    device = jax.devices()[0]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    mine, theirs = functions_of("filter_shard")
    for placement in (device, sharding):
        assert_equal(jit(lambda m, placement=placement: mine(m, placement))(build()), theirs(build(), placement))
    spec = (sharding, sharding)
    assert_equal(jit(lambda m: mine((m, X), spec))(build()), theirs((build(), X), spec))


def test_each_array_gets_the_sharding_of_its_part():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    rows, replicated = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(spec)) for spec in ("d", None))
    sharded = graftax.filter_shard({"a": [X, "text"], "b": {"c": X}}, {"a": rows, "b": replicated})
    assert (sharded["a"][0].sharding.spec, sharded["b"]["c"].sharding.spec) == (rows.spec, replicated.spec)
    assert sharded["a"][1] == "text"


# ---- closures


def test_a_converted_function_may_return_a_lock():
    double, lock = graftax.filter_closure_convert(lambda x: (x * 2, threading.Lock()), X)(X)
    assert double.tolist() == (X * 2).tolist()
    assert not lock.locked()


def test_a_converted_closure_holds_what_it_closed_over():
    for library in (graftax, eqx):

        def f(x, y, library=library):
            z = x + y

            def inner(tree):
                return {"y": z * tree["a"], "n": tree["n"]}

            converted = library.filter_closure_convert(inner, {"a": y, "n": 3})
            assert any(leaf is z for leaf in jax.tree.leaves(converted))
            assert any(const is z for const in converted.consts)
            result = converted({"a": y, "n": 3})
            assert result["n"] == 3
            return result["y"]

        assert jax.grad(f)(1.0, jnp.asarray(2.0)) == 2


@pytest.mark.quick(0)
def test_a_converted_module_holds_its_arrays():
    model = mlp()
    converted = graftax.filter_closure_convert(model, X)
    np.testing.assert_allclose(converted(X), model(X), rtol=1e-6)
    arrays = eqx.filter(converted, eqx.is_array)
    assert len(jax.tree.leaves(arrays)) == len(jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    gradient = eqx.filter_grad(lambda c: c(X).sum())(converted)
    expected = eqx.filter_grad(lambda m: m(X).sum())(model)
    for a, b in zip(gradient.consts, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"a": X, "n": 4},), r"\['n'\]: expected 3, given 4"),
        (({"a": jnp.ones(3), "n": 3},), r"arrays of"),
        (({"a": X},), r"\['n'\]"),
    ],
)
def test_a_converted_closure_is_for_arguments_like_those_given(arguments, message):
    z = jnp.ones(())
    converted = graftax.filter_closure_convert(lambda tree: z * tree["a"], {"a": X, "n": 3})
    with pytest.raises(graftax.StructureError, match=message):
        converted(*arguments)
    with pytest.raises(ValueError, match="different"):
        eqx.filter_closure_convert(lambda tree: z * tree["a"], {"a": X, "n": 3})(*arguments)


# ---- signatures

NAMES = [name for name in dir(graftax) if name.startswith("filter_") and hasattr(eqx, name)]


@pytest.mark.quick(100)
@pytest.mark.parametrize("name", sorted(set(NAMES) - {"filter_jit"}))
def test_the_parameters_are_those_of_equinox(name):
    mine, theirs = (
        [
            (p.name, p.kind)
            for p in inspect.signature(getattr(library, name)).parameters.values()
            if p.kind is not p.VAR_KEYWORD
        ]
        for library in (graftax, eqx)
    )
    assert mine == theirs


@pytest.mark.parametrize(
    "transform",
    [
        graftax.filter_grad,
        graftax.filter_value_and_grad,
        graftax.filter_vmap,
        graftax.filter_checkpoint,
        graftax.filter_jacrev,
    ],
    ids=lambda transform: transform.__name__,
)
def test_what_is_made_again_of_a_function_is_compiled_once_by_others(transform):
    runs = 0

    def square(x):
        nonlocal runs
        runs += 1
        return (x**2).sum()

    for _ in range(3):
        eqx.filter_jit(transform(square))(jnp.ones(3))
    assert runs == 1
    named = transform(square)
    named.tag = "mine"
    assert transform(square) is not named and not hasattr(transform(square), "tag")


@pytest.mark.quick(0)
def test_what_is_made_of_a_function_does_not_keep_it():
    def square(x):
        return (x**2).sum()

    transformed = [graftax.filter_grad(square), graftax.filter_vmap(square)]
    transformed[0](jnp.ones(3))
    gone = weakref.ref(square)
    del square, transformed
    jax.clear_caches()
    gc.collect()
    assert gone() is None
