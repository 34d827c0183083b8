# SPDX-License-Identifier: Apache-2.0
"""in_shardings and out_shardings: objects of shardings, patterns, types; errors name the key path."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx, struct
from jax.sharding import NamedSharding, PartitionSpec

import graftax
from devices import run_again

COUNT = len(jax.devices())
MESH = jax.make_mesh((COUNT,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
two_devices = pytest.mark.skipif(COUNT < 2, reason="runs in a process with two devices")
ROWS, ALL = NamedSharding(MESH, PartitionSpec("d")), NamedSharding(MESH, PartitionSpec())


class Module(eqx.Module):
    w: Any
    b: Any
    name: str = eqx.field(static=True, default="net")


@dataclasses.dataclass
class Plain:
    w: Any
    b: Any


@struct.dataclass
class State:
    w: Any
    b: Any


def arrays(cls: Any) -> Any:
    return cls(jnp.ones((4, 2)), jnp.ones(2))


def specs(model: Any) -> list[Any]:
    return [x.sharding.spec for x in (model.w, model.b)]


SHARDINGS = {
    "an object": lambda cls: cls(ROWS, ALL),
    "shapes": lambda cls: cls(
        jax.ShapeDtypeStruct((4, 2), jnp.float32, sharding=ROWS), jax.ShapeDtypeStruct((2,), jnp.float32, sharding=ALL)
    ),
    "patterns": lambda cls: {"w": ROWS, "**": ALL},
    "types": lambda cls: {"**.w": ROWS, cls: ALL},
}


@two_devices
@pytest.mark.parametrize("jit", [graftax.jit, graftax.filter_jit])
@pytest.mark.parametrize("cls", [Module, Plain, State])
@pytest.mark.parametrize("of", SHARDINGS.values(), ids=SHARDINGS)
def test_what_says_where_arrays_are(of: Any, cls: Any, jit: Any):
    def double(model: Any) -> Any:
        return cls(model.w * 2, model.b * 2)

    assert specs(jit(double, in_shardings=(of(cls),))(arrays(cls))) == [PartitionSpec("d"), PartitionSpec()]
    if of is not SHARDINGS["types"]:
        run = jit(double, out_shardings=of(cls))
        assert specs(run(arrays(cls))) == specs(run(arrays(cls))) == [PartitionSpec("d"), PartitionSpec()]


@two_devices
def test_patterns_begin_with_the_names_of_arguments():
    run = graftax.jit(lambda model, x: (model.w * 2, x * 2), in_shardings={"model.w": ROWS, "**": ALL})
    assert [x.sharding.spec for x in run(arrays(Plain), jnp.ones(2))] == [PartitionSpec("d"), PartitionSpec()]
    with pytest.raises(ValueError, match=r"pattern 'model\.weight' of in_shardings decides about no array"):
        graftax.jit(lambda model: model.w, in_shardings={"model.weight": ROWS, "**": ALL})(arrays(Plain))
    with pytest.raises(ValueError, match=r"no entry for model\.b"):
        graftax.jit(lambda model: model.w, in_shardings=({"w": ROWS},))(arrays(Plain))


@two_devices
def test_the_state_of_an_optimizer_and_of_nnx():
    state = optax.adam(1e-3).init({"w": jnp.ones((4, 2))})
    of = jax.tree.map(lambda x: ROWS if x.ndim else ALL, state)
    new = graftax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), in_shardings=(of,), out_shardings=of)(state)
    assert new[0].mu["w"].sharding.spec == PartitionSpec("d")
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    by_filter = nnx.StateSharding({nnx.PathContains("kernel"): ROWS, ...: ALL})
    for sharding in (by_filter, {nnx.PathContains("kernel"): ROWS, ...: ALL}, {"kernel": ROWS, nnx.Param: ALL}):
        kernel, bias = graftax.jit(lambda m: (m.kernel[...] * 2, m.bias[...] * 2), in_shardings=(sharding,))(model)
        assert kernel.sharding.spec == PartitionSpec("d") and bias.sharding.spec == PartitionSpec()


@two_devices
def test_a_size_that_does_not_divide_is_named_by_its_path():
    with pytest.raises(ValueError, match=r"d\['a'\]|dimension size is 3 "):  # JAX 0.10 names no argument
        graftax.jit(lambda d: d["a"] * 2, in_shardings=({"a": ROWS},))({"a": jnp.ones(3)})


@pytest.mark.skipif(COUNT > 1, reason="has them")
def test_all_of_this_on_two_devices():
    run_again(__file__, 2)


@two_devices
def test_a_filter_below_the_name_of_an_argument_decides_about_what_is_written():
    @graftax.jit(out_shardings={"m": {nnx.Param: ROWS}, "return": ROWS})
    def step(m):
        m.kernel[...] = m.kernel + 1
        return m.kernel * 2

    m = nnx.Linear(2, 4, rngs=nnx.Rngs(0))
    assert step(m).sharding == m.kernel.sharding == ROWS


@two_devices
def test_what_is_written_keeps_what_in_shardings_say():
    columns = NamedSharding(MESH, PartitionSpec(None, "d"))

    @graftax.jit(in_shardings=(nnx.StateSharding({...: ROWS}),))
    def step(m):
        m.kernel[...] = jax.lax.with_sharding_constraint(m.kernel[...] + 1, columns)

    m = nnx.Linear(2, 4, rngs=nnx.Rngs(0))
    for _ in range(2):
        step(m)
        assert m.kernel.sharding == ROWS


@two_devices
@pytest.mark.parametrize("of", [nnx.state, lambda m: m, lambda m: nnx.prefix(m, {...: ROWS}, graph=True)])
def test_states_and_prefixes_of_nnx_are_shardings(of: Any):
    m = nnx.Linear(2, 4, rngs=nnx.Rngs(0))
    spec = of(m)
    if not isinstance(spec, nnx.Linear | nnx.State):
        assert graftax.jit(lambda m: m.kernel * 2, in_shardings=(spec,))(m).sharding == ROWS
        return
    spec = jax.tree.map(lambda _: ROWS, spec)
    run = graftax.jit(lambda m: jax.tree.map(lambda x: x * 2, m), in_shardings=(spec,), out_shardings=spec)
    assert [x.sharding for x in jax.tree.leaves(run(of(m)))] == [ROWS] * 2


@two_devices
def test_a_python_number_may_be_among_what_has_shardings():
    run = graftax.jit(lambda s: {"n": s["n"] + 1, "w": s["w"] * 2}, out_shardings={"n": ALL, "w": ROWS})
    state = {"n": 0, "w": jnp.ones(2)}
    for _ in range(3):
        state = run(state)
    assert state["n"] == 3 and state["w"].sharding == ROWS


@two_devices
def test_errors_of_shardings_name_the_place():
    put = jax.device_put(jnp.ones(2), jax.devices()[1])
    with pytest.raises(ValueError, match=r"that is p\['x'\]\)"):
        graftax.jit(lambda p: p["x"], in_shardings=({"x": ROWS},))({"x": put})
    with pytest.raises(ValueError, match=r"key path result\['q'\]"):
        graftax.jit(lambda p: {"q": p * 2}, out_shardings={"q": ROWS})(jnp.ones(3))
    with pytest.raises(
        ValueError, match=r"in_shardings has an entry for 'y' of p, where there is no such part: it has 'x'"
    ):
        graftax.jit(lambda p: p["x"], in_shardings=({"x": ROWS, "y": ROWS},))({"x": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"in_shardings is given for 2 arguments, and there is 1"):
        graftax.jit(lambda p: p * 2, in_shardings=(ROWS, ROWS))(jnp.ones(2))
    with pytest.raises(ValueError, match=r"out_shardings has an entry for q, and <lambda> is given p"):
        graftax.jit(lambda p: p * 2, out_shardings={"q": ROWS, "return": ROWS})(jnp.ones(2))
    with pytest.raises(ValueError, match=r"for m\.bias, which is an array"):
        graftax.jit(lambda m: m.bias, in_shardings=({"m": {nnx.Param: ROWS}},))(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
