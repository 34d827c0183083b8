# SPDX-License-Identifier: Apache-2.0
"""Types and NNX's filters say what is differentiated, mapped, selected and found."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx import filterlib

import graftax


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.last = nnx.Linear(2, 2, rngs=rngs), nnx.Linear(2, 2, rngs=rngs)
        self.lora, self.norm = nnx.LoRA(2, 1, 2, rngs=rngs), nnx.BatchNorm(2, rngs=rngs)
        self.norm.mean.set_metadata(tag="statistics")

    def __call__(self, x: Any) -> Any:
        return self.norm(self.last(self.first(x)) + self.lora(x)).sum()


FILTERS = [
    nnx.Param,
    nnx.LoRAParam,
    nnx.BatchStat,
    nnx.OfType(nnx.LoRAParam),
    nnx.PathContains("first"),
    filterlib.PathIn(("first", "kernel"), ("norm", "scale")),
    nnx.Not(nnx.LoRAParam),
    nnx.All(nnx.Param, nnx.PathContains("last")),
    nnx.Any(nnx.LoRAParam, nnx.PathContains("kernel")),
    (nnx.LoRAParam, nnx.PathContains("norm")),
    [nnx.LoRAParam, nnx.BatchStat],
    ...,
]
X = jnp.arange(6.0).reshape(3, 2)


def paths(graph: Any) -> list[str]:
    return sorted(str(path).removesuffix("._raw_value") for path, _ in graftax.find(graph, jax.Array))


def expected(model: Any, wanted: Any) -> list[str]:
    """The Variables that NNX's own split puts first."""
    flat = nnx.to_flat_state(nnx.state(model, wanted))
    return sorted("." + ".".join(map(str, path)) for path, _ in flat)


@pytest.mark.quick(0)
@pytest.mark.parametrize("wanted", FILTERS, ids=[f"{i}" for i in range(len(FILTERS))])
def test_a_filter_means_what_it_means_to_nnx(wanted: Any):
    model = Net(nnx.Rngs(0))
    means = expected(model, wanted)
    assert means
    assert paths(graftax.partition(model, wanted)[0]) == means
    assert paths(graftax.grad(lambda m, x: m(x), wrt=wanted)(model, X)) == means
    doubled = graftax.at(model)[nnx.All(wanted)].apply(nnx.clone)
    assert paths(doubled) == paths(model)
    if wanted is not ...:
        assert sorted(str(path) for path, _ in graftax.find(model, wanted)) == means


@pytest.mark.quick(0)
def test_a_gradient_by_a_type_is_that_of_nnx():
    model = Net(nnx.Rngs(0))
    wanted = nnx.DiffState(0, nnx.LoRAParam)
    theirs = nnx.grad(lambda m, x: m(x), argnums=wanted)(nnx.clone(model), X)
    for gradient in (
        graftax.grad(lambda m, x: m(x), wrt=nnx.LoRAParam)(model, X),
        graftax.grad(lambda m, x: m(x), argnums=wanted)(model, X),
    ):
        assert len(paths(gradient)) == 2
        for name in ("lora_a", "lora_b"):
            np.testing.assert_allclose(getattr(gradient.lora, name)[...], theirs["lora"][name][...], rtol=1e-5)


@pytest.mark.quick(0)
def test_of_two_arguments_each_has_its_own_filter():
    models = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))
    which = nnx.DiffState(0, nnx.LoRAParam), nnx.DiffState(1, nnx.PathContains("first"))
    one, other = graftax.grad(lambda a, b: a(X) + b(X), argnums=which)(*models)
    assert paths(one) == [".lora.lora_a", ".lora.lora_b"]
    assert paths(other) == [".first.bias", ".first.kernel"]


def test_a_type_that_is_nowhere_differentiates_nothing():
    with pytest.raises(TypeError, match="no array of a floating"):
        graftax.grad(lambda m, x: m(x), wrt=nnx.Cache)(Net(nnx.Rngs(0)), X)
    with pytest.raises(graftax.StructureError, match="no floating array"):
        graftax.cast(Net(nnx.Rngs(0)), jnp.bfloat16, nnx.Cache)


def stacked() -> Any:
    models = nnx.vmap(lambda key: Net(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))
    models.norm = nnx.BatchNorm(2, use_running_average=True, rngs=nnx.Rngs(0))
    return models


@pytest.mark.parametrize(
    "axes",
    [
        {nnx.BatchNorm: None, ...: 0},
        {nnx.BatchStat: None, "**.norm": None, nnx.Param: 0, ...: 0},
        {nnx.All(nnx.Any(nnx.Param, nnx.BatchStat), nnx.Not(nnx.PathContains("norm"))): 0, ...: None},
        nnx.StateAxes({nnx.PathContains("norm"): None, "no such tag": 1, ...: 0}),
    ],
    ids=["type", "mixed", "filters", "StateAxes"],
)
@pytest.mark.quick(0)
def test_axes_by_filters(axes: Any):
    models = stacked()
    kind = nnx.StateAxes({nnx.PathContains("norm"): None, ...: 0})
    theirs = nnx.vmap(lambda m, x: m(x), in_axes=(kind, None))(nnx.clone(models), X)
    np.testing.assert_allclose(graftax.vmap(lambda m, x: m(x), in_axes=(axes, None))(models, X), theirs, rtol=1e-5)
    np.testing.assert_allclose(graftax.vmap(lambda m: m(X), in_axes=axes)(models), theirs, rtol=1e-5)


@pytest.mark.quick(0)
def test_results_have_axes_by_filters():
    make = graftax.vmap(lambda key: Net(nnx.Rngs(key)), out_axes={nnx.LoRAParam: 1, ...: 0})
    model = make(jax.random.split(jax.random.key(0), 3))
    assert model.lora.lora_a[...].shape == (2, 3, 1) and model.first.kernel[...].shape == (3, 2, 2)


@pytest.mark.quick(0)
@pytest.mark.parametrize("axes", [nnx.Param, (nnx.Param,)])
def test_a_class_is_no_axis_and_is_not_called(axes: Any):
    with pytest.raises(TypeError, match="an axis"):
        graftax.vmap(lambda m: m(X), in_axes=axes)(stacked())


def test_types_of_any_classes_are_filters():
    class Layer:
        def __init__(self) -> None:
            self.w, self.note = jnp.ones(2), "layer"

    class Model:
        def __init__(self) -> None:
            self.layer, self.scale = Layer(), jnp.asarray(2.0)
            self.again = self.layer

    gradient = graftax.grad(lambda m: (m.layer.w * m.scale).sum(), wrt=Layer)(Model())
    assert gradient.layer.w.tolist() == [2, 2] and gradient.scale is None and gradient.again is gradient.layer


def test_prefixes_of_arguments_with_a_common_part():
    if not hasattr(nnx, "prefix"):
        pytest.skip("older Flax")
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.arange(6.0).reshape(2, 3)
    first, second = nnx.prefix((layer, layer), {nnx.Param: -1}, graph=True)

    @graftax.vmap(in_axes=(first, second, None))
    def run(a: nnx.Linear, b: nnx.Linear, x: Any) -> Any:
        assert a is b
        return (a.kernel[...] * x).sum() + b.bias[...]

    np.testing.assert_array_equal(run(layer, layer, jnp.ones(2)), [3.0, 5.0, 7.0])


def test_a_function_of_path_and_value_is_a_filter():
    def is_first_kernel(path: Any, value: Any) -> bool:
        return path[0] == "first" and "kernel" in path and isinstance(value, nnx.Param)

    model = Net(nnx.Rngs(0))
    assert [path for path, _ in nnx.to_flat_state(nnx.state(model, is_first_kernel))] == [("first", "kernel")]
    assert [str(path) for path, _ in graftax.find(model, is_first_kernel)] == [".first.kernel"]
    assert len(jax.tree.leaves(nnx.state(graftax.partition(model, is_first_kernel)[0]))) == 1
    gradient = graftax.grad(lambda m: m(X).sum(), wrt=is_first_kernel)(model)
    assert gradient.first.kernel[...].shape == (2, 2) and gradient.first.bias.get_raw_value() is None
    plain = {"a": {"w": jnp.ones(2), "b": jnp.ones(2)}}
    found = graftax.grad(lambda p: p["a"]["w"].sum() + p["a"]["b"].sum(), wrt=lambda path, x: path[-1] == "w")(plain)
    assert found["a"]["w"].tolist() == [1, 1] and found["a"]["b"] is None
