# SPDX-License-Identifier: Apache-2.0
"""in_shardings and out_shardings: objects of shardings, patterns, types; errors name the key path."""

from __future__ import annotations

import dataclasses
import re
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
@pytest.mark.parametrize("make", SHARDINGS.values(), ids=SHARDINGS)
def test_what_says_where_arrays_are(make: Any, cls: Any, jit: Any):
    def double(model: Any) -> Any:
        return cls(model.w * 2, model.b * 2)

    assert specs(jit(double, in_shardings=(make(cls),))(arrays(cls))) == [PartitionSpec("d"), PartitionSpec()]
    if make is not SHARDINGS["types"]:
        run = jit(double, out_shardings=make(cls))
        assert specs(run(arrays(cls))) == specs(run(arrays(cls))) == [PartitionSpec("d"), PartitionSpec()]


@two_devices
def test_patterns_begin_with_the_names_of_arguments():
    run = graftax.jit(lambda model, x: (model.w * 2, x * 2), in_shardings={"model.w": ROWS, "**": ALL})
    assert [x.sharding.spec for x in run(arrays(Plain), jnp.ones(2))] == [PartitionSpec("d"), PartitionSpec()]
    with pytest.raises(ValueError, match=r"pattern 'model\.weight' of in_shardings has no effect"):
        graftax.jit(lambda model: model.w, in_shardings={"model.weight": ROWS, "**": ALL})(arrays(Plain))
    with pytest.raises(ValueError, match=r"no entry for model\.b"):
        graftax.jit(lambda model: model.w, in_shardings=({"w": ROWS},))(arrays(Plain))


@two_devices
def test_the_state_of_an_optimizer_and_of_nnx():
    state = optax.adam(1e-3).init({"w": jnp.ones((4, 2))})
    places = jax.tree.map(lambda x: ROWS if x.ndim else ALL, state)
    new = graftax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), in_shardings=(places,), out_shardings=places)(state)
    assert new[0].mu["w"].sharding.spec == PartitionSpec("d")
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    by_filter = nnx.StateSharding({nnx.PathContains("kernel"): ROWS, ...: ALL})
    for sharding in (by_filter, {nnx.PathContains("kernel"): ROWS, ...: ALL}, {"kernel": ROWS, nnx.Param: ALL}):
        kernel, bias = graftax.jit(lambda m: (m.kernel[...] * 2, m.bias[...] * 2), in_shardings=(sharding,))(model)
        assert kernel.sharding.spec == PartitionSpec("d") and bias.sharding.spec == PartitionSpec()


@pytest.mark.parametrize("spec", [ALL, {"a": ALL, "b": None}], ids=["for all", "by part"])
def test_eval_shape_says_the_shardings_that_were_asked_for(spec: Any):
    shapes = graftax.jit(lambda x: {"a": x * 2, "b": x}, out_shardings=spec).eval_shape(jnp.ones(2))
    assert shapes["a"].sharding == ALL
    assert shapes["b"].sharding == (ALL if spec is ALL else None)


@two_devices
def test_a_size_that_does_not_divide_is_named_by_its_path():
    with pytest.raises(ValueError, match=r"d\['a'\]|dimension size is 3 "):  # JAX 0.10 names no argument
        graftax.jit(lambda d: d["a"] * 2, in_shardings=({"a": ROWS},))({"a": jnp.ones(3)})


@pytest.mark.skipif(COUNT > 1, reason="has them")
@pytest.mark.quick(0)
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


NAMES = ["bias", "kernel", "scale"]  # of Variables


@pytest.mark.parametrize("names", [NAMES, NAMES[1:] + NAMES[:1], NAMES[2:] + NAMES[:2]], ids=str)
def test_each_variable_is_where_its_filter_says(names: list[str]):
    mesh = jax.make_mesh((1, 1), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:1])
    specs = {"bias": PartitionSpec("b"), "kernel": PartitionSpec("a", "b"), "scale": PartitionSpec("a")}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}

    @graftax.jit(in_shardings=(nnx.StateSharding({nnx.PathContains(name): shardings[name] for name in names}),))
    def step(layers: Any):
        for layer in layers:
            for name in NAMES:
                if hasattr(layer, name):
                    getattr(layer, name)[...] += 1

    layers = [
        nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
        nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
        nnx.LayerNorm(2, rngs=nnx.Rngs(0)),
    ]
    step(layers)
    for layer in layers:
        for name in filter(lambda name: hasattr(layer, name), NAMES):
            assert getattr(layer, name).sharding == shardings[name]


@two_devices
@pytest.mark.parametrize("make", [nnx.state, lambda m: m, lambda m: nnx.prefix(m, {...: ROWS}, graph=True)])
def test_states_and_prefixes_of_nnx_are_shardings(make: Any):
    m = nnx.Linear(2, 4, rngs=nnx.Rngs(0))
    spec = make(m)
    if not isinstance(spec, nnx.Linear | nnx.State):
        assert graftax.jit(lambda m: m.kernel * 2, in_shardings=(spec,))(m).sharding == ROWS
        return
    spec = jax.tree.map(lambda _: ROWS, spec)
    run = graftax.jit(lambda m: jax.tree.map(lambda x: x * 2, m), in_shardings=(spec,), out_shardings=spec)
    assert [x.sharding for x in jax.tree.leaves(run(make(m)))] == [ROWS] * 2


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
        ValueError, match=r"in_shardings has an entry for p\['y'\], and there is no such part: p has \['x'\]"
    ):
        graftax.jit(lambda p: p["x"], in_shardings=({"x": ROWS, "y": ROWS},))({"x": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"in_shardings is given for 2 arguments, and there is 1"):
        graftax.jit(lambda p: p * 2, in_shardings=(ROWS, ROWS))(jnp.ones(2))
    with pytest.raises(ValueError, match=r"out_shardings has an entry for q, and <lambda> is given p"):
        graftax.jit(lambda p: p * 2, out_shardings={"q": ROWS, "return": ROWS})(jnp.ones(2))
    with pytest.raises(ValueError, match=r"for m\.bias, which is an array"):
        graftax.jit(lambda m: m.bias, in_shardings=({"m": {nnx.Param: ROWS}},))(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


@dataclasses.dataclass
class Pair:
    w: Any
    b: Any = None
    head: Any = None


class Bare:
    def __init__(self, **fields: Any):
        vars(self).update(fields)


class Layers(nnx.Module):
    def __init__(self, count: int):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(count)])


def of_state(count: int) -> Any:
    return jax.tree.map(lambda _: ROWS, nnx.state(Layers(count)))


STRANGE = {
    "an attribute": (lambda: Bare(w=ROWS, b=ALL), lambda: Bare(w=jnp.ones(2)), r"m\.b, .* m has \.w"),
    "of another class": (lambda: Pair(ROWS, ALL), lambda: Bare(w=jnp.ones(2)), r"m\.b, .* m has \.w"),
    "an item": (lambda: Bare(w=[ROWS, ALL]), lambda: Bare(w=[jnp.ones(2)]), r"m\.w\[1\], .* m\.w has \[0\]"),
    "below another": (lambda: {"a": Bare(x=Bare(y=ROWS))}, lambda: {"a": Bare(x=3), "b": 1}, r"m\['a'\]\.x\.y"),
    "of what has no arrays": (lambda: {"x": ROWS}, lambda: {}, r"m\['x'\], .* m has no parts"),
    "in a state of nnx": (lambda: of_state(3), lambda: Layers(2), r"m\['layers'\]\[2\]"),
}


@two_devices
@pytest.mark.parametrize(("spec", "model", "message"), STRANGE.values(), ids=STRANGE)
def test_an_entry_for_what_is_not_there_is_an_error(spec: Any, model: Any, message: str):
    with pytest.raises(ValueError, match=r"in_shardings has an entry for " + message):
        graftax.jit(lambda m, x: x * 2, in_shardings=(spec(), ROWS))(model(), jnp.ones(2))
    of_result = re.sub(r"\bm\b", r"the result\\[0\\]", message)
    with pytest.raises(ValueError, match=r"out_shardings has an entry for " + of_result):
        graftax.jit(lambda x: (model(), x), out_shardings=(spec(), ROWS))(jnp.ones(2))


@two_devices
def test_an_entry_that_says_nothing_may_be_for_what_is_not_there():
    model = {"w": jnp.ones((4, 2)), "x": jnp.ones(2), "layers": Layers(2)}
    for spec in (
        {"w": ROWS, "**": ALL},  # a name beside a pattern
        {"w": ROWS, "x": ALL, "layers": of_state(2)},
        Bare(w=ROWS, x=ALL, layers=ALL, b=None, name="net", empty=[]),
        Bare(w=ROWS, x=ALL, layers=Pair({nnx.Param: ALL}).w),
    ):
        w, x = graftax.jit(lambda m: (m["w"] * 2, m["x"] * 2), in_shardings=(spec,))(model)
        assert w.sharding.spec == PartitionSpec("d") and x.sharding.spec == PartitionSpec()
    assert graftax.jit(lambda m: m.w * 2, in_shardings=(Pair(ROWS, ALL, ALL),))(Pair(jnp.ones(2))).sharding == ROWS
