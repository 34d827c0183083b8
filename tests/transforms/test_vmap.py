# SPDX-License-Identifier: Apache-2.0
"""vmap of functions of any objects: it does what the plain function does on each slice."""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from oracle import deep_copy, difference, is_array
from zoo import BUILDERS, NAMES, Affine, Box, Point

SIZE = 3
XS = jnp.arange(6.0).reshape(SIZE, 2)


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def stacked(graph: Any) -> Any:
    """The graph with an axis more in each array."""

    def three(leaf: Any) -> Any:
        if is_key(leaf):
            return jnp.stack([leaf, leaf, leaf])
        stack = np.stack if isinstance(leaf, np.ndarray | np.generic) else jnp.stack
        return stack([leaf, (leaf * 2).astype(leaf.dtype), leaf])

    return deep_copy(graph, leaf=three)


def sliced(graph: Any, i: int) -> Any:
    return deep_copy(graph, leaf=lambda leaf: leaf[i])


def values(graph: Any) -> list[Any]:
    return [jax.random.key_data(x) if is_key(x) else x for x in graftax.flatten(graph)[0]]


def assert_is_loop(function: Any, graph: Any, *mapped: Any, run: Any = None) -> None:
    """vmap(function) gives and changes what a Python loop over the slices does."""
    parts = [(sliced(graph, i), *(x[i] for x in mapped)) for i in range(SIZE)]
    results = [function(*arguments) for arguments in parts]
    before = graph
    result = (run or graftax.vmap(function))(graph, *mapped)
    assert graph is before
    for stacked, pieces in ((result, results), (graph, [arguments[0] for arguments in parts])):
        for leaf, *loop in zip(values(stacked), *map(values, pieces), strict=True):
            np.testing.assert_allclose(leaf, jnp.stack(loop), rtol=1e-6)
        zeros = functools.partial(deep_copy, leaf=lambda leaf: 0)
        assert difference(zeros(stacked), zeros(pieces[0])) is None


def leaf_wise(graph: Any) -> list[Any]:
    return [jax.random.key_data(x) if is_key(x) else x * 2 for x in graftax.flatten(graph)[0]]


# ---- laws


@pytest.mark.parametrize("build", BUILDERS, ids=NAMES)
def test_mapping_a_graph_is_mapping_its_leaves(build: Any) -> None:
    graph = stacked(build())
    flat = [jnp.asarray(x) if not is_key(x) else x for x in graftax.flatten(graph)[0]]
    expected = jax.vmap(leaf_wise, axis_size=SIZE)(flat)
    for run in (graftax.vmap(leaf_wise, axis_size=SIZE), graftax.jit(graftax.vmap(leaf_wise, axis_size=SIZE))):
        for one, other in zip(run(graph), expected, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


def keep_and_add(state: dict[str, Any], x: Any) -> Any:
    state["again"], state["new"] = state["graph"], [x * 2, "text"]
    state["count"] += 1
    return {"graph": state["graph"], "x": x}


@pytest.mark.parametrize("build", BUILDERS, ids=NAMES)
@pytest.mark.parametrize("outer", [lambda f: f, graftax.jit], ids=["plain", "jit"])
def test_changes_come_back_as_from_a_loop_over_the_slices(build: Any, outer: Any) -> None:
    state = {"graph": stacked(build()), "count": 0}
    expected = deep_copy(state)
    assert_is_loop(keep_and_add, state, XS, run=outer(graftax.vmap(keep_and_add)))
    assert difference(state["again"], expected["graph"]) is None


@pytest.mark.parametrize("build", BUILDERS, ids=NAMES)
def test_a_mutable_object_that_is_returned_is_the_callers(build: Any) -> None:
    box = [stacked(build())]
    graph = box[0]
    result = graftax.vmap(lambda box, x: (box, x))(box, XS)
    assert result[0] is box
    assert isinstance(graph, tuple) or is_array(graph) or box[0] is graph


@pytest.mark.parametrize("build", BUILDERS, ids=NAMES)
def test_what_is_not_mapped_is_as_outside(build: Any) -> None:
    graph = build()
    sums = graftax.vmap(lambda graph, x: (leaf_wise(graph), x), in_axes=(None, 0), out_axes=(None, 0))(graph, XS)
    for one, other in zip(sums[0], leaf_wise(graph), strict=True):
        np.testing.assert_array_equal(one, other)


def test_mapping_under_jax_jit_is_the_same() -> None:
    def run(w: Any, xs: Any) -> Any:
        model = Box(w=w, log=[], n=0)

        def step(model: Any, x: Any) -> Any:
            model.n += 1
            model.log.append(model.w * x)
            return model.log[-1].sum()

        return graftax.vmap(step)(model, xs), model.log[0], model.n

    for one, other in zip(jax.jit(run)(XS + 1, XS), run(XS + 1, XS), strict=True):
        np.testing.assert_allclose(one, other)


# ---- in_axes


class Model:
    def __init__(self) -> None:
        self.layers = [Box(w=jnp.arange(6.0).reshape(3, 2), b=jnp.ones(2)), Box(w=jnp.ones((3, 2)), b=jnp.zeros(2))]
        self.scale = jnp.arange(12.0).reshape(2, 2, 3)
        self.name = "net"


def apply(model: Any, x: Any) -> Any:
    for layer in model.layers:
        x = x * layer.w + layer.b
    return x @ model.scale


SPECS: dict[str, Any] = {
    "by part": ({"layers": [{"w": 0, "b": None}, {"w": 0, "b": None}], "scale": 2, "name": None}, 0),
    "without statics": ({"layers": [{"w": 0, "b": None}, {"w": 0, "b": None}], "scale": -1}, 0),
    "patterns below": ({"layers[*].w": 0, "scale": 2, "**": None}, 0),
    "patterns from the argument": ({"model.scale": 2, "**.b": None, "**": 0}, 0),
    "patterns for all": {"model.scale": 2, "**.b": None, "**": 0},
    "patterns with quotes": {"model.scale": 2, "model.layers[*].b": None, "model": 0, "x": 0},
    "function of the array": (lambda leaf: {1: None, 2: 0, 3: 2}[leaf.ndim], 0),
    "function for all": lambda leaf: {1: None, 2: 0, 3: 2}[leaf.ndim],
    "function in a part": ({"layers": lambda leaf: 0 if leaf.ndim == 2 else None, "scale": 2}, 0),
    "a list of entries": [{"layers": [{"w": 0, "b": None}] * 2, "scale": 2}, 0],
}


@pytest.mark.parametrize("in_axes", SPECS.values(), ids=SPECS)
def test_in_axes_in_all_its_forms(in_axes: Any) -> None:
    model = Model()
    flat = ([(layer.w, layer.b) for layer in model.layers], model.scale)

    def plain(flat: Any, x: Any) -> Any:
        return apply(Box(layers=[Box(w=w, b=b) for w, b in flat[0]], scale=flat[1]), x)

    expected = jax.vmap(plain, in_axes=(([(0, None)] * 2, 2), 0))(flat, XS)
    np.testing.assert_allclose(graftax.vmap(apply, in_axes=in_axes)(model, XS), expected)


def test_an_object_of_axes_stands_for_its_class() -> None:
    module = Affine(jnp.ones((2, 3)), {"b": jnp.ones(3)}, name="m")
    axes = Affine(1, {"b": 0}, name="m")
    out = graftax.vmap(lambda m: m.weight * m.bias["b"], in_axes=(axes,))(module)
    assert out.shape == (3, 2)
    point = Point(jnp.ones(3), jnp.ones(2))
    out = graftax.vmap(lambda p: p.x * p.y, in_axes=(Point(0, None),))(point)
    assert out.shape == (3, 2)


@pytest.mark.quick(0)
def test_a_callable_module_of_axes_is_no_function() -> None:
    linear = eqx.filter_vmap(lambda key: eqx.nn.Linear(2, 4, key=key))(jax.random.split(jax.random.key(0), SIZE))
    axes = eqx.tree_at(lambda m: (m.weight, m.bias), linear, (0, 0))
    out = graftax.vmap(lambda m, x: m(x), in_axes=(axes, None))(linear, XS[0])
    np.testing.assert_allclose(out, jnp.einsum("noi,i->no", linear.weight, XS[0]) + linear.bias, rtol=1e-6)


def test_keyword_arguments_are_mapped_over_their_first_axis() -> None:
    run = graftax.vmap(lambda x, *, scale: x * scale, in_axes=1)
    np.testing.assert_allclose(run(XS.T, scale=jnp.arange(3.0)), XS * jnp.arange(3.0)[:, None])
    run = graftax.vmap(lambda x, *, scale: x * scale, in_axes={"x": 0, "scale": None})
    np.testing.assert_allclose(run(XS, scale=jnp.arange(2.0)), XS * jnp.arange(2.0))


def test_static_arguments_stay_what_they_are() -> None:
    sentinel = object()

    def check(x: Any, n: Any, text: Any, marker: Any) -> Any:
        assert (n, text) == (3, "t")
        assert marker is sentinel
        return {"x": x * n, "n": n, "thing": marker, "pair": (None, "s")}

    out = graftax.vmap(check)(XS, 3, "t", sentinel)
    assert out["thing"] is sentinel
    assert (out["n"], out["pair"]) == (3, (None, "s"))


def test_captured_arrays_are_not_mapped() -> None:
    weights = {"w": jnp.ones((SIZE, 2))}
    assert graftax.vmap(lambda x: weights["w"] * x)(XS).shape == (SIZE, SIZE, 2)


def test_an_array_in_two_places_of_immutable_nodes_can_have_two_axes() -> None:
    x = jnp.arange(9.0).reshape(3, 3)
    out = graftax.vmap(lambda a, b: a[0] * b[0], in_axes=(0, 1))((x,), (x,))
    np.testing.assert_allclose(out, x * x.T)


def test_axis_size_alone_is_enough() -> None:
    out = graftax.vmap(lambda n: jax.lax.axis_index("i") + n, axis_name="i", axis_size=4, in_axes=None)(1)
    np.testing.assert_array_equal(out, jnp.arange(4) + 1)


def test_collectives_see_the_axis_name() -> None:
    model = {"mean": jnp.zeros(2), "n": 0}

    def update(model: Any, x: Any) -> Any:
        model["mean"], model["n"] = jax.lax.pmean(x, "batch"), model["n"] + 1
        return x - model["mean"]

    out = graftax.vmap(update, in_axes=(None, 0), axis_name="batch")(model, XS)
    np.testing.assert_allclose(out, XS - XS.mean(0))
    np.testing.assert_allclose(model["mean"], XS.mean(0))
    assert model["n"] == 1


# ---- out_axes


OUT_SPECS: dict[str, Any] = {
    "a container": {"a": 1, "b": (0, None), "s": None},
    "without statics": {"a": 1, "b": (0, None)},
    "patterns": {"a": 1, "b[1]": None, "**": 0},
    "patterns from the result": {"result['a']": 1, "**[1]": None, "**": 0},
    "negative": {"a": -1, "b": [-2, None]},
}


@pytest.mark.parametrize("out_axes", OUT_SPECS.values(), ids=OUT_SPECS)
def test_out_axes_in_all_its_forms(out_axes: Any) -> None:
    out = graftax.vmap(lambda x: {"a": x, "b": (x, jnp.ones(4)), "s": "static"}, out_axes=out_axes)(XS)
    assert (out["a"].shape, out["b"][0].shape, out["b"][1].shape, out["s"]) == ((2, 3), (3, 2), (4,), "static")
    np.testing.assert_allclose(out["a"].T, out["b"][0])


def test_out_axes_as_a_function_of_the_array() -> None:
    out = graftax.vmap(lambda x: (x, x.sum()), out_axes=lambda leaf: leaf.ndim)(XS)
    assert (out[0].shape, out[1].shape) == ((2, 3), (3,))


def test_sharing_in_the_result_is_kept() -> None:
    def twice(x: Any) -> Any:
        shared = [x]
        return {"a": shared, "b": (shared, Box(s=shared))}

    for spec in (1, {"a": 1, "b": 1}, {"**": 1}):
        out = graftax.vmap(twice, out_axes=spec)(XS)
        assert out["a"] is out["b"][0] is out["b"][1].s
        assert out["a"][0].shape == (2, 3)


def test_a_numpy_array_that_the_function_makes_has_the_axis_as_well():
    def f(d):
        d["n"], d["rows"] = np.zeros(2), [np.arange(3), "text"]
        return {"x": d["x"], "row": np.ones(2, np.float32), "one": np.float32(2), "words": np.array(["a", "b"])}

    for outer in (lambda f: f, graftax.jit):
        d = {"x": jnp.ones(3), "n": np.ones(3)}
        out = outer(graftax.vmap(f, out_axes={"x": 0, "row": 1, "one": 0, "words": 0}))(d)
        assert (out["row"].shape, out["one"].tolist(), out["words"].tolist()) == ((2, 3), [2, 2, 2], ["a", "b"])
        assert (d["n"].shape, d["rows"][0].tolist(), d["rows"][1]) == ((3, 2), [[0, 1, 2]] * 3, "text")
    expected = jax.vmap(lambda x: (x, np.ones(2), np.float32(2)), out_axes=(0, 1, 0))(jnp.ones(3))
    assert [x.shape for x in expected[1:]] == [out["row"].shape, out["one"].shape]
    assert graftax.vmap(lambda x: np.ones(2), out_axes=None)(jnp.ones(3)).shape == (2,)


def test_derivatives_by_integers_have_the_axis_as_well():
    def transformed(library):
        return library.vmap(library.grad(lambda p: (p["w"] * p["n"]).sum(), allow_int=True))

    actual, expected = (transformed(m)({"w": jnp.ones(2), "n": jnp.arange(2)}) for m in (graftax, jax))
    assert actual["n"].shape == expected["n"].shape and actual["n"].dtype == expected["n"].dtype
    returned = graftax.jit(lambda zeros: {"zeros": zeros["n"]})(actual)["zeros"]
    assert returned.dtype == jax.dtypes.float0 and returned.shape == (2,)
