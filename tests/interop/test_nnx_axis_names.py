# SPDX-License-Identifier: Apache-2.0
"""`transform_metadata`: a mapped axis has its name in the sharding of each Variable, and none where it is gone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import graftax

LAYERS = {nnx.PARTITION_NAME: "layers", "nickname": "nick"}
BY_TYPE = nnx.StateAxes({(nnx.Param, nnx.RngState): 0, ...: None})


def mesh(*names: str) -> Any:
    return jax.set_mesh(jax.make_mesh((1,) * len(names), names, axis_types=(jax.sharding.AxisType.Auto,) * len(names)))


def named(init: Any, **more: Any) -> Any:
    return nnx.with_metadata(init, **more)


@pytest.mark.parametrize("axes", [0, BY_TYPE], ids=["axis", "StateAxes"])
@pytest.mark.quick(0)
def test_stacked_layers_name_their_axis_and_each_layer_does_not(axes: Any):
    class Layers(nnx.Module):
        @nnx.split_rngs(splits=4)
        @graftax.vmap(in_axes=(axes, axes), transform_metadata=LAYERS)
        def __init__(self, rngs: nnx.Rngs) -> None:
            init = named(nnx.initializers.lecun_normal(), out_sharding=("in", "out"), nickname=("i", "o"))
            self.linear = nnx.Linear(3, 3, kernel_init=init, rngs=rngs)

        @graftax.scan(in_axes=(axes, nnx.Carry), transform_metadata=LAYERS)
        def __call__(self, x: Any) -> Any:
            assert self.linear.kernel.out_sharding == ("in", "out")
            return self.linear(x), None

    with mesh("layers", "in", "out"):
        layers = Layers(nnx.Rngs(0))
        y, _ = layers(jnp.ones((2, 3)))
    assert y.shape == (2, 3)
    assert layers.linear.kernel.shape == (4, 3, 3)
    assert layers.linear.kernel.out_sharding == ("layers", "in", "out")
    assert layers.linear.kernel.nickname == ("nick", "i", "o")


@pytest.mark.quick(0)
def test_a_result_has_the_name_where_its_axis_is():
    def make(key: Any) -> nnx.Linear:
        init = named(nnx.initializers.lecun_normal(), out_sharding=("in", "out"))
        return nnx.Linear(2, 3, kernel_init=init, use_bias=False, rngs=nnx.Rngs(key))

    keys = jax.random.split(jax.random.key(0), 4)
    with mesh("layers", "in", "out"):
        for axis, expected in (
            (0, ("layers", "in", "out")),
            (1, ("in", "layers", "out")),
            (-1, ("in", "out", "layers")),
        ):
            made = graftax.vmap(make, out_axes=axis, transform_metadata={nnx.PARTITION_NAME: "layers"})(keys)
            assert made.kernel.out_sharding == expected
            assert made.kernel.shape[expected.index("layers")] == 4


def test_what_is_not_mapped_keeps_its_names():
    model = nnx.Linear(2, 2, kernel_init=named(nnx.initializers.ones, nickname=("i", "o")), rngs=nnx.Rngs(0))
    run = graftax.vmap(lambda m, x: m(x), in_axes=(None, 0), transform_metadata=LAYERS)
    assert run(model, jnp.ones((3, 2))).shape == (3, 2)
    assert model.kernel.nickname == ("i", "o")
