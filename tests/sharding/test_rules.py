# SPDX-License-Identifier: Apache-2.0
"""Rules and shard: the first rule that means an array decides, and one error has all problems."""

from __future__ import annotations

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import graftax
from devices import run_again

P = PartitionSpec
COUNT = len(jax.devices())
eight = pytest.mark.skipif(COUNT < 8, reason="runs in a process with eight devices")
AUTO = AxisType.Auto
MESH: Any = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AUTO, AUTO)) if COUNT == 8 else None


class Net:
    def __init__(self) -> None:
        self.layers = [{"w": np.ones((8, 4), np.float32), "b": np.zeros(4, np.float32)} for _ in range(2)]
        self.tied = self.layers[0]
        self.name, self.step = "net", jnp.asarray(0)


def spec(x: Any) -> Any:
    return x.sharding.spec


@eight
def test_the_first_rule_that_means_an_array_decides():
    rules = graftax.Rules(
        [
            ("layers[0].w", P("data")),
            (re.compile("/b$"), None),
            (lambda path, leaf: path.matches("layers[*][w]") and leaf.ndim == 2, P(None, ("data", "model"))),
        ]
    )
    with pytest.raises(graftax.StructureError, match=r"layers\[1\]\[w\]: dimension 1 is 4, which the 8 devices of 'da"):
        graftax.shard(Net(), MESH, rules)
    rules = graftax.Rules([("layers[0][w]", P("data")), (re.compile("/b$"), None), (np.ndarray, P(None, "model"))])
    net = graftax.shard(Net(), MESH, rules)
    assert spec(net.layers[0]["w"]) == P("data") and spec(net.layers[1]["w"]) == P(None, "model")
    assert spec(net.layers[1]["b"]) == spec(net.step) == P()
    assert net.tied is net.layers[0] and net.name == "net"


@eight
def test_one_error_has_all_problems_and_nothing_moves():
    rules = [
        ("layers[0][w]", P("modle")),
        ("layers[1][w]", P(None, None, "data")),
        ("**.weight", P("data")),
        ("layers[0][b]", P("data", "data")),
    ]
    net = Net()
    with pytest.raises(graftax.StructureError) as caught:
        graftax.shard(net, MESH, rules)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the rules do not fit this Net:" and len(lines) == 6
    assert any("no axis 'modle': it has data (4), model (2)" in line for line in lines)
    assert any("has 3 entries, and the array 2 dimensions" in line for line in lines)
    assert any("obj.layers[1][b]: no rule selects it" in line for line in lines)
    assert any("the rule **.weight has no effect" in line for line in lines)
    assert isinstance(net.layers[0]["w"], np.ndarray)
    assert spec(graftax.shard(net, MESH, [], default=None).layers[0]["w"]) == P()


@eight
def test_a_shared_array_is_placed_once_by_whichever_path():
    w = np.ones((8, 8))
    model = {"emb": w, "head": w}
    placed = graftax.shard(model, MESH, [("head", P("data"))])
    assert placed["emb"] is placed["head"] and spec(placed["emb"]) == P("data")


@eight
def test_shapes_and_traces():
    rules = graftax.Rules([("**[w]", P("data", "model")), ("**", None)], mesh=MESH)
    shapes = graftax.shard(graftax.eval_shape(Net), None, rules)
    assert spec(shapes.layers[0]["w"]) == P("data", "model")

    @graftax.jit
    def sharded(net: Net) -> Any:
        return graftax.shard(net, MESH, rules).layers[1]["w"] * 2

    assert spec(sharded(Net())) == P("data", "model")
    with jax.set_mesh(MESH):
        net = graftax.shard(Net(), None, [("**", graftax.fsdp("data", min_size=32))])
    assert spec(net.layers[0]["w"]) == P("data") and spec(net.layers[0]["b"]) == P()
    with pytest.raises(graftax.StructureError, match="there is no mesh"):
        graftax.shard(Net(), None, [("**", None)])


def test_a_local_part_is_divided_over_the_mesh_of_the_context():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AUTO,))
    with jax.set_mesh(mesh):
        batch = graftax.shard({"x": np.ones(4)}, None, [("**", P("data"))], local=True)
    assert batch["x"].sharding == NamedSharding(mesh, P("data"))


@eight
def test_explicit_axes():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    rules = graftax.Rules([("**", P("x"))], mesh=mesh)
    constrained = jax.jit(lambda a: graftax.shard(a, None, rules) * 2)
    with jax.set_mesh(mesh):
        assert spec(constrained(jnp.ones(8))) == P("x")
    assert spec(graftax.shard({"a": jnp.ones(8)}, None, rules)["a"]) == P("x")


@eight
def test_keys_and_functions_of_the_leaf():
    state = {"key": jax.random.split(jax.random.key(0), 8), "x": jnp.ones((4, 8)), "n": np.float32(2)}
    placed = graftax.shard(state, MESH, [("key", P("data")), ("**", lambda x: P(None, "model") if x.ndim else None)])
    assert spec(placed["key"]) == P("data") and spec(placed["x"]) == P(None, "model")
    assert spec(graftax.shard(state, MESH, [(..., NamedSharding(MESH, P()))])["x"]) == P()
    for bad, error in (
        ([("**", 3)], "3 is not a spec"),
        ([3], "a rule is a pair"),
        ([(3, None)], "does not select arrays"),
    ):
        with pytest.raises(TypeError, match=error):
            graftax.shard(state, MESH, bad)


@eight
def test_metadata_of_flax_counts_where_no_rule_does():
    init = nn.initializers.lecun_normal()
    with jax.set_mesh(MESH):
        linear = nnx.Linear(8, 4, rngs=nnx.Rngs(0), kernel_init=nnx.with_partitioning(init, ("data", None)))
    placed = graftax.shard(linear, MESH, [("bias", None)])
    assert spec(placed.kernel[...]) == P("data", None) and spec(placed.bias[...]) == P()
    assert spec(graftax.shard(linear, MESH, [("**", None)]).kernel[...]) == P()
    for partitioning, names in ((nn.with_partitioning, ("model", None)), (nn.with_logical_partitioning, ("in", None))):
        dense = nn.Dense(4, kernel_init=partitioning(init, names))
        params = dense.init(jax.random.key(0), jnp.ones((1, 8)))["params"]
        with nn.logical_axis_rules([("in", "model")]):
            kernel = graftax.shard(params, MESH, [("bias", None)])["kernel"].value
        assert spec(kernel) == P("model", None)


@eight
def test_shapes_in_variables_of_nnx():
    shapes = graftax.eval_shape(lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    rules = graftax.Rules([("**.kernel", P("data")), (nnx.Param, None)], mesh=MESH)
    assert spec(graftax.shard(shapes, None, rules).kernel.get_value()) == P("data")
    linear = graftax.jit(lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)), out_shardings=rules)()
    assert spec(linear.kernel[...]) == P("data") and spec(linear.bias[...]) == P()


@eight
def test_the_table_shows_bytes_and_problems():
    rules = graftax.Rules([("**[w]", P("data")), ("nothing", None)], mesh=MESH)
    table = rules.table(graftax.eval_shape(Net))
    text = str(table)
    assert (table.bytes, table.bytes_per_device) == (2 * 128 + 2 * 16 + 4, 2 * 32 + 2 * 16 + 4)
    assert "obj.layers[0][w]" in text and "no rule selects it" in text and "the rule nothing has no effect" in text
    assert rules.shardings({"a": {"w": np.ones(4)}, "nothing": np.ones(2)}) == {
        graftax.Path.parse("[a][w]"): NamedSharding(MESH, P("data")),
        graftax.Path.parse("[nothing]"): NamedSharding(MESH, P()),
    }


@eight
def test_an_optimizer_has_the_shardings_of_its_parameters():
    params = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}
    rules = graftax.Rules([("**[w]", P("data")), ("**", None)], mesh=MESH)
    state = graftax.shard({"params": params, "opt": optax.adam(1e-3).init(params)}, None, rules)
    assert spec(state["opt"][0].mu["w"]) == spec(state["params"]["w"]) == P("data")


@pytest.mark.quick(0)
@pytest.mark.skipif(COUNT > 1, reason="has them")
def test_all_of_this_on_eight_devices():
    run_again(__file__, 8)
