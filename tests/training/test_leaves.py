# SPDX-License-Identifier: Apache-2.0
"""map_leaves, ema, cast, count: each array once, with sharing and cycles kept; over the zoo."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import graftax
import zoo
from graftax._graph.path import Graph
from zoo import Affine, Box, f32

pytestmark = pytest.mark.quick(8)  # a case takes milliseconds


def places(x: Any) -> list[tuple[str, Any]]:
    graph = Graph(x)
    return [(str(graph.path(p)), r.value) for p, r in enumerate(graph.rows) if r.category == "array" and not r.aux]


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_a_map_by_identity_is_a_copy(build: Any):
    x = build()
    y = graftax.map_leaves(lambda leaf: leaf, x)
    assert graftax.diff(y, x) == []
    nodes = [{id(row.value) for row in Graph(part).rows if isinstance(row.value, list | dict | Box)} for part in (x, y)]
    assert not nodes[0] & nodes[1]


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_each_array_is_met_once_with_what_stands_beside_it(build: Any):
    x = build()
    seen: list[tuple[str, Any]] = []

    def note(path: Any, leaf: Any, same: Any, none: Any) -> Any:
        assert same is leaf and none is None
        seen.append((str(path), leaf))
        return leaf

    graftax.map_leaves(
        note, x, x, None if not Graph(x).rows[0].is_leaf else x if not places(x) else None, with_path=True
    )
    distinct = {id(leaf): (path, leaf) for path, leaf in reversed(places(x))}
    assert sorted(path for path, _ in seen) == sorted(path for path, _ in distinct.values())


def test_two_graphs_with_holes_sharing_and_a_cycle():
    layer = Box(w=f32(1, 2), n=3)
    model = Box(a=layer, b=layer, steps=jnp.asarray(1))
    model.me = model
    grads = graftax.grad(lambda m: (m.a.w * m.b.w).sum())(model)
    new = graftax.map_leaves(lambda w, g: w if g is None else w - 0.5 * g, model, grads)
    assert new.a is new.b and new.me is new and new.a.w.tolist() == [0, 0] and new.steps is model.steps
    assert layer.w.tolist() == [1, 2] and new.a.n == 3


def test_an_array_in_two_places_stays_one_where_what_is_beside_it_is_one():
    w = f32(1)
    one = graftax.map_leaves(lambda x: x + 1, {"a": w, "b": w})
    assert one["a"] is one["b"]
    two = graftax.map_leaves(lambda x, y: x + y, {"a": w, "b": w}, {"a": f32(1), "b": f32(2)})
    assert [two["a"][0], two["b"][0]] == [2, 3]


def test_errors_name_the_path():
    layer = {"w": f32(1)}
    model = {"a": layer, "b": layer}
    with pytest.raises(graftax.StructureError, match=r"map_leaves: .* at obj\[b\].*graftax\.map_leaves\(f, obj\)"):
        graftax.map_leaves(lambda x, y: x, model, jax.tree.map(lambda x: x, model))
    with pytest.raises(ZeroDivisionError) as info:
        graftax.map_leaves(lambda x: 1 // 0, model)
    assert "obj[a][w]" in info.value.__notes__[0]


def test_under_jit_and_grad():
    layer = Box(w=f32(1, 2))
    model = [layer, layer]

    @graftax.jit
    def step(model: Any) -> Any:
        loss = lambda m: sum((part.w**2).sum() for part in graftax.map_leaves(lambda w: w * 2, m))
        grads = graftax.grad(loss)(model)
        graftax.update(model, graftax.map_leaves(lambda w, g: w - 0.05 * g, model, grads))

    step(model)
    assert model[0] is layer is model[1]
    np.testing.assert_allclose(layer.w, [1 - 0.05 * 16, 2 - 0.05 * 32], rtol=1e-6)


@pytest.mark.parametrize(
    "build", [lambda: Box(w=f32(1, 2), n=3), lambda: Affine(f32(1, 2), {"b": f32(2)}), lambda: (f32(1),)]
)
def test_ema_is_the_average_of_optax(build: Any):
    old, new = build(), graftax.map_leaves(lambda w: w * 3, build())
    expected = [optax.incremental_update(b, a, 0.25) for (_, a), (_, b) in zip(places(old), places(new), strict=True)]
    result = graftax.ema(old, new, 0.75)
    assert (result is old) == isinstance(old, Box)
    for (_, a), b in zip(places(result), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_ema_keeps_dtypes_ties_and_what_is_shared_with_the_model():
    frozen, layer = Box(w=f32(5)), Box(w=jnp.ones(2, jnp.bfloat16), seen=jnp.asarray(1), key=jax.random.key(0))
    model = {"a": layer, "b": layer, "frozen": frozen}
    target = graftax.copy(model)
    target["frozen"] = frozen
    layer.w, layer.seen, layer.key = jnp.zeros(2, jnp.bfloat16), jnp.asarray(7), jax.random.key(1)
    before = frozen.w
    assert graftax.jit(graftax.ema)(target, model, 0.5) is target
    assert target["a"] is target["b"] and target["a"].w.tolist() == [0.5, 0.5] and target["a"].w.dtype == jnp.bfloat16
    assert target["a"].seen == 7 and jnp.array_equal(target["a"].key, layer.key) and frozen.w is before
    graftax.ema(target, model, 0)
    assert target["a"].w.tolist() == [0, 0] and target["a"].w is not layer.w
    with pytest.raises(graftax.StructureError, match=r"ema: .*at obj\[a\]"):
        graftax.ema(target, {"a": 1, "b": 2, "frozen": frozen}, 0.5)


@pytest.mark.parametrize("other", [jnp.ones(()), jnp.ones((3, 2)), 2.0])
def test_ema_does_not_broadcast(other: Any):
    target, model = Box(deep=[jnp.zeros(2)]), Box(deep=[other])
    with pytest.raises(graftax.StructureError, match=r"ema: obj\.deep\[0\] has the shape \(2,\) in the target, and \("):
        graftax.ema(target, model, 0.5)
    assert target.deep[0].tolist() == [0, 0]


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_cast_is_of_floating_arrays_and_comes_back(build: Any):
    x = build()
    half = graftax.cast(x, jnp.float16)
    for (path, a), (_, b) in zip(places(x), places(half), strict=True):
        assert b.dtype == (jnp.float16 if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype), path
    assert [s.paths for s in graftax.shared(half)] == [s.paths for s in graftax.shared(x)]


def test_cast_of_a_part_and_inside_of_a_loss():
    model = Box(body=Box(w=f32(1, 2), b=f32(1)), norm=Box(w=f32(1)))
    half = graftax.cast(model, jnp.bfloat16, where="body.**")
    assert half.body.w.dtype == half.body.b.dtype == jnp.bfloat16 and half.norm.w.dtype == jnp.float32
    assert graftax.cast(Box(m=Affine(f32(1), f32(2)), w=f32(1)), jnp.bfloat16, where=Affine).w.dtype == jnp.float32
    grads = graftax.grad(lambda m: graftax.cast(m, jnp.bfloat16).body.w.sum().astype(jnp.float32))(model)
    assert grads.body.w.dtype == jnp.float32 and model.body.w.dtype == jnp.float32
    with pytest.raises(graftax.StructureError, match=r"cast: .* matches no floating array of this Box"):
        graftax.cast(model, jnp.bfloat16, where=int)


def test_count():
    layer = Box(w=jnp.ones((3, 4)), b=jnp.zeros(4), seen=jnp.asarray(0), name="x")
    model = [layer, layer]
    assert graftax.count(model) == (16, 64, 2)
    assert graftax.count(model).parameters == 16
    assert graftax.count({"embed": layer.w, "head": layer.w}) == (12, 48, 1)  # one array, twice
    assert graftax.count(model, "**.b") == (4, 16, 1) == graftax.count(model, lambda leaf: leaf is layer.b)
    assert graftax.count(model, jax.Array).arrays == 3
    assert graftax.count(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), nnx.Param) == (4, 16, 2)
    linear = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    shapes = eqx.filter_eval_shape(lambda m: m, linear)
    assert graftax.count(linear) == graftax.count(shapes) == (9, 36, 2)
    with pytest.raises(graftax.StructureError, match=r"there is no \.x"):
        graftax.count(model, "x")


# ---- at(): types, and ** at the end


def test_at_takes_types_wherever_they_stand():
    layer = Affine(f32(1), f32(2))
    model = {"a": layer, "b": [layer], "n": 3}
    doubled = graftax.at(model)[jax.Array].apply(lambda w: w * 2)
    assert doubled["a"].weight[0] == 2 and doubled["b"][0].bias[0] == 4 and doubled["n"] == 3
    assert graftax.at(model)[Affine].set(None) == {"a": None, "b": [None], "n": 3}
    assert graftax.at(model)[jax.Array, np.ndarray].get()[0] is layer.weight
    shared = Box(inner=Box(w=f32(1)))
    tied = {"a": shared, "b": shared.inner}
    tied_anew = graftax.at(tied)[jax.Array].set(0)
    assert tied_anew["a"].inner is tied_anew["b"] and tied_anew["b"].w == 0
    with pytest.raises(graftax.StructureError, match="nothing in this dict is an instance of"):
        graftax.at(model)[bytes]
    with pytest.raises(ValueError, match="lies in"):
        graftax.at(tied)[Box].set(0)


def test_at_everything_means_the_arrays_for_what_is_applied():
    layer = Box(w=f32(1), name="tied")
    model = Box(a=layer, b=layer, n=3, text="x")
    model.me = model
    half = graftax.at(model)["**"].apply(lambda w: w / 2)
    assert half.a is half.b and half.me is half and half.a.w[0] == 0.5 and half.text == "x" and layer.w[0] == 1
    assert graftax.at(model)["a.**"].set(0).b.w == 0
    graftax.at(model)["**"].update(f32(9))
    assert layer.w[0] == 9 and model.n == 3


def test_one_array_in_two_places_is_applied_to_once():
    w = f32(1)
    new = graftax.at({"a": w, "b": [w]})["**"].apply(lambda x: x + 1)
    assert new["a"] is new["b"][0]


class _Drawing:
    def __init__(self):
        self.rng, self.w = graftax.Streams(0, "dropout"), jnp.ones(())

    def __call__(self, x):
        return self.w * jax.random.normal(self.rng("dropout"), x.shape, x.dtype)


def test_what_a_cast_model_draws_is_drawn_from_the_streams_of_the_model():
    @graftax.jit
    @graftax.value_and_grad
    def loss(model, x):
        return graftax.cast(model, jnp.bfloat16)(x).astype(jnp.float32).sum()

    model = _Drawing()
    assert len({float(loss(model, jnp.ones(3))[0]) for _ in range(3)}) == 3
    assert model.rng.counts["dropout"] == 3
    assert model.w.dtype == jnp.float32


def test_an_object_in_which_nothing_is_cast_is_the_same_one():
    model = {"w": jnp.ones(2), "log": [], "deep": {"names": ["x"]}}
    new = graftax.cast(model, jnp.bfloat16)
    assert new is not model
    assert new["log"] is model["log"]
    assert new["deep"] is model["deep"]
    assert model["w"].dtype == jnp.float32
