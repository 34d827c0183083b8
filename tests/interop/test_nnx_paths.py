# SPDX-License-Identifier: Apache-2.0
"""Key paths of NNX modules stop at the Variable, as its users know them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import graftax


class Net(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.scale = nnx.BatchStat(jnp.ones(2))


def test_messages_name_the_variable():
    net = Net()
    with pytest.raises(Exception, match=r"Available: net\.scale, net\.linear\.bias, net\.linear\.kernel\.") as error:
        graftax.jit(lambda net: net.scale[...], donate="net.other")(net)
    assert "_raw_value" not in str(error.value)
    with pytest.raises(graftax.StructureError, match=r"here at net\.linear\.bias, net\.linear\.kernel, net\.scale"):
        graftax.jvp(lambda net: net.scale[...].sum(), (net,), ({"scale": jnp.ones(3)},))
    net.linear.kernel = nnx.Param(open)
    with pytest.raises(Exception) as error:
        graftax.vmap(lambda net: net.scale[...], in_axes={"net.linear": 0})(net)
    assert "_raw_value" not in str(error.value)


@pytest.mark.parametrize("where", ["linear.kernel", lambda net: net.linear.kernel])
def test_an_array_is_put_into_the_variable(where):
    net = Net()
    other = graftax.at(net)[where].set(jnp.zeros((2, 2)))
    assert type(other.linear.kernel) is nnx.Param and not other.linear.kernel[...].any()
    assert net.linear.kernel[...].any() and other.scale is net.scale
    doubled = graftax.at(net)[where].apply(lambda kernel: kernel * 2)
    assert type(doubled.linear.kernel) is nnx.Param
    np.testing.assert_array_equal(doubled.linear.kernel[...], net.linear.kernel[...] * 2)
    graftax.at(net)[where].update(np.ones((2, 2), np.float32))
    assert type(net.linear.kernel) is nnx.Param and net.linear.kernel[...].sum() == 4


def test_several_at_once():
    net = Net()
    halved = graftax.at(net)["**.kernel"].apply(lambda kernel: kernel[...] / 2)
    assert type(halved.linear.kernel) is nnx.Param
    none = graftax.at(net)[nnx.Param].apply(lambda variable: variable[...] * 0)
    assert [type(v) for _, v in graftax.find(none, nnx.Variable)] == [nnx.Param, nnx.Param, nnx.BatchStat]


def test_another_variable_takes_the_place():
    other = graftax.at(Net())["linear.kernel"].set(nnx.LoRAParam(jnp.zeros((2, 1))))
    assert type(other.linear.kernel) is nnx.LoRAParam
    assert graftax.at(Net())["linear.bias"].set(None).linear.bias is None
    assert graftax.eval_shape(lambda: Net()).linear.kernel.shape == (2, 2)
    assert isinstance(jax.tree.leaves(nnx.state(other))[0], jax.Array)


def test_cached_partial_has_nothing_to_keep():
    net, f = Net(), graftax.jit(lambda net, x: net.linear(x))
    cached = nnx.cached_partial(f, net)
    for _ in range(2):
        with pytest.raises(graftax.GraftaxError, match=r"without nnx\.cached_partial"):
            cached(jnp.ones(2))
    assert f(net, jnp.ones(2)).shape == (2,)
    assert nnx.cached_partial(nnx.jit(lambda net, x: net.linear(x)), net)(jnp.ones(2)).shape == (2,)
