# SPDX-License-Identifier: Apache-2.0
"""shard_map of functions of any objects, on eight devices: it does what JAX's does with the arrays."""

from __future__ import annotations

import ast

import pytest

from watchdog import python

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import graftax
from zoo import Box, Affine

mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
assert len(jax.devices()) == 8
XS = jnp.arange(32.0).reshape(16, 2)


def raises(error, *parts):
    class Raises:
        def __enter__(self):
            return self

        def __exit__(self, cls, value, trace):
            assert cls is not None, "nothing was raised"
            assert issubclass(cls, error), f"{cls}: {value}"
            assert all(part in str(value) for part in parts), str(value)
            return True

    return Raises()


"""

CASES: dict[str, str] = {
    "the result is that of the arrays": """
def step(batch, scale):
    assert (batch["x"].shape, batch["id"]) == ((4, 2), "first")
    return {"y": batch["x"] * scale, "sum": jax.lax.psum(batch["x"].sum(), ("data",)), "id": batch["id"]}

specs = dict(mesh=mesh, in_specs=(P("data"), P()))
run = graftax.shard_map(step, out_specs={"y": P("data"), "sum": P(), "id": None}, **specs)
plain = jax.shard_map(lambda x, s: (x * s, jax.lax.psum(x.sum(), "data")), out_specs=(P("data"), P()), **specs)
for call in (run, graftax.jit(run)):
    out = call({"x": XS, "id": "first"}, jnp.asarray(2.0))
    y, total = plain(XS, jnp.asarray(2.0))
    np.testing.assert_allclose(out["y"], y)
    np.testing.assert_allclose(out["sum"], total)
    assert out["id"] == "first"
    assert out["y"].sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
""",
    "changes come back": """
def step(model, batch):
    model.w = model.w - jax.lax.pmean(batch["x"].mean(0), "data")
    model.seen, model.log = model.seen + 1, [*model.log, "step"]
    batch["y"] = batch["x"] * 2
    batch["x"] = batch["x"] + 1
    return batch

for outer in (lambda f: f, graftax.jit):
    model, batch = Box(w=jnp.zeros(2), seen=0, log=[], kept=jnp.ones(3)), {"x": XS, "n": 1}
    w, kept = model.w, model.kept
    run = outer(graftax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")))
    assert run(model, batch) is batch
    np.testing.assert_allclose(model.w, -XS.mean(0))
    assert (model.seen, model.log) == (1, ["step"])
    np.testing.assert_allclose(batch["x"], XS + 1)
    np.testing.assert_allclose(batch["y"], XS * 2)
    for x in (batch["x"], batch["y"]):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
    np.testing.assert_array_equal(model.kept, jnp.ones(3))
    if outer is not graftax.jit:
        assert model.kept is kept
""",
    "what a function captures is replicated": """
table, count = {"w": jnp.ones(2)}, {"n": 0, "sum": jnp.zeros(())}

@graftax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
def step(x):
    count["n"] += 1
    count["sum"] = count["sum"] + jax.lax.psum(x.sum(), "data")
    assert table["w"].shape == (2,)
    return x * table["w"]

np.testing.assert_allclose(step(XS), XS)
assert count["n"] == 1
np.testing.assert_allclose(count["sum"], XS.sum())
""",
    "a change that differs by shard is refused": """
def step(model, x):
    model["stats"]["mean"] = x.mean(0)
    return x

model = {"stats": {"mean": jnp.zeros(2)}}
specs = dict(mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
for outer in (lambda f: f, graftax.jit):
    with raises(graftax.MutationError, "step", "model['stats']['mean']", "'data'", "replicated", "pmean"):
        outer(graftax.shard_map(step, **specs))(model, XS)
    np.testing.assert_array_equal(model["stats"]["mean"], jnp.zeros(2))
log = []
with raises(graftax.MutationError, "log[0]", "'data'"):
    graftax.shard_map(lambda x: log.append(x), mesh=mesh, in_specs=P("data"), out_specs=P())(XS)
assert log == []
graftax.shard_map(step, check_vma=False, **specs)(model, XS)
np.testing.assert_allclose(model["stats"]["mean"], XS[:4].mean(0))
""",
    "specs come in all forms": """
def step(model, x):
    return x @ model.w[0] + model.inner["b"]

def fresh():
    return Box(w=[jnp.ones((2, 4))], inner={"b": jnp.arange(4.0)}, name="net")

expected = XS @ jnp.ones((2, 4)) + jnp.arange(4.0)
forms = [
    ({"w": [P(None, "model")], "inner": {"b": P("model")}}, P("data")),
    ({"w[0]": P(None, "model"), "**['b']": P("model")}, P("data")),
    {"model.w": P(None, "model"), "x": P("data"), "**": P("model")},
    (lambda leaf: P(*[None] * (leaf.ndim - 1), "model"), P("data")),
]
for in_specs in forms:
    for out_specs in (P("data", "model"), lambda leaf: P("data", "model"), {"**": P("data", "model")}):
        out = graftax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(fresh(), XS)
        np.testing.assert_allclose(out, expected)
run = graftax.shard_map(step, mesh=mesh, in_specs={"x": P("data"), "model": P()}, out_specs=P("data"))
np.testing.assert_allclose(run(x=XS, model=fresh()), expected)
""",
    "what does not fit is named": """
def run(f=lambda x, y: x["a"], x=None, y=3, in_specs=(P("data"), P()), out_specs=P("data"), **options):
    x = {"a": XS} if x is None else x
    return graftax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)(x, y)

shared = [XS]
with raises(TypeError, "None for x['a']", "PartitionSpec"):
    run(in_specs=(None, None))
with raises(TypeError, "'data' for x", "PartitionSpec"):
    run(in_specs=("data", P()))
with raises(ValueError, "tuple of 1", "2 positional"):
    run(in_specs=(P("data"),))
with raises(graftax.StructureError, "has no entry for x['b']"):
    run(x={"a": XS, "b": XS}, in_specs=({"a": P("data")}, P()))
with raises(graftax.StructureError, "x[0]", "y[0][0]", repr(P("data")), repr(P())):
    run(f=lambda x, y: x[0], x=shared, y=[shared])
with raises(ValueError, "x['a']", "divide"):
    run(x={"a": XS[:3]})
with raises(ValueError, "x['a']", "'rows'"):
    run(in_specs=(P("rows"), P()))
with raises(ValueError, "result", "'rows'", "'data', 'model'"):
    run(out_specs=P("rows"))
with raises(ValueError, "result[0]", "'data'", repr(P())):
    run(f=lambda x, y: (x["a"],), out_specs=P())
with raises(ValueError, "result[1]", "rank 0"):
    run(f=lambda x, y: (x["a"], x["a"].sum()), out_specs=P("data"))
with raises(graftax.StructureError, "returns, at result['a'],", repr(P("data")), repr(P()), "out_specs"):
    run(f=lambda x, y: x, out_specs=P())
with raises(ValueError, "tuple of 2", "no keyword arguments"):
    graftax.shard_map(lambda x, y: x, mesh=mesh, in_specs=(P(), P()), out_specs=P())(XS, y=XS)
with raises(KeyError, "mine"):
    graftax.shard_map(lambda x: {}["mine"], mesh=mesh, in_specs=P(), out_specs=P())(XS)
""",
    "gradients and maps go through": """
def loss(model, x):
    model["calls"] += 1
    rows = graftax.shard_map(lambda model, x: (x * model["w"]).sum(1), mesh=mesh, in_specs=(P(), P("data")),
                             out_specs=P("data"))(model, x)
    return rows.sum()

model = {"w": jnp.ones(2), "calls": 0}
np.testing.assert_allclose(graftax.grad(loss)(model, XS)["w"], XS.sum(0))
np.testing.assert_allclose(graftax.jit(graftax.grad(loss))(model, XS)["w"], XS.sum(0))
np.testing.assert_allclose(jax.jit(jax.grad(lambda w: loss({"w": w, "calls": 0}, XS)))(jnp.ones(2)), XS.sum(0))
assert model["calls"] == 2

def inner(model, x):
    return graftax.vmap(graftax.grad(lambda model, x: (model["w"] * x).sum()), in_axes=(None, 0))(model, x)["w"]

def plain(w, x):
    return jax.vmap(jax.grad(lambda w, x: (w * x).sum()), in_axes=(None, 0))(w, x)

specs = dict(mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
for check_vma in (True, False):
    run = graftax.shard_map(inner, check_vma=check_vma, **specs)
    try:
        expected = jax.shard_map(plain, check_vma=check_vma, **specs)(model["w"], XS)
    except TypeError:  # JAX 0.8 cannot; goes with it
        with raises(TypeError, "axis_index_groups"):
            run(model, XS)
        continue
    np.testing.assert_allclose(run(model, XS), expected)
outer = graftax.vmap(
    lambda x: graftax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)
)
np.testing.assert_allclose(outer(jnp.stack([XS, XS + 1])), jnp.stack([XS, XS + 1]) * 2)
""",
    "some axes can be left to the compiler": """
run = graftax.shard_map(
    lambda batch: {"x": batch["x"] * 2}, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
)
np.testing.assert_allclose(graftax.jit(run)({"x": XS})["x"], XS * 2)
with raises(ValueError, "'model'", "result['x']"):
    graftax.jit(graftax.shard_map(lambda batch: {"x": batch["x"] * 2}, mesh=mesh, in_specs=P("data"),
                out_specs=P("data", "model"), axis_names={"data"}))({"x": XS})
""",
    "the mesh in force is used": """
with jax.set_mesh(mesh):
    run = graftax.shard_map(lambda batch: batch["x"] * 2, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_allclose(run({"x": XS}), XS * 2)
""",
    "an array that is sharded otherwise along explicit axes is named": """
explicit = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Explicit,))
with jax.set_mesh(explicit):
    batch = {"x": jax.device_put(jnp.arange(8.0), NamedSharding(explicit, P("rows"))), "n": 0}
    scale = jnp.ones(1)

    def step(batch):
        batch["n"] += 1
        return batch["x"] * scale

    out = graftax.shard_map(step, in_specs=P("rows"), out_specs=P("rows"))(batch)
    np.testing.assert_allclose(out, jnp.arange(8.0))
    captured, count = batch["x"], 1
    try:
        jax.shard_map(lambda x: x, in_specs=P(), out_specs=P())(captured)
    except ValueError:
        with raises(ValueError, "does not match", "batch['x']"):
            graftax.shard_map(step, in_specs=P(), out_specs=P())(batch)
        with raises(ValueError, "does not match", "captured:"):
            graftax.shard_map(lambda x: captured * x, in_specs=P(), out_specs=P())(scale)
    else:  # JAX 0.8 moves it instead; goes with it
        count = 2
        out = graftax.shard_map(step, in_specs=P(), out_specs=P())(batch)
        np.testing.assert_allclose(out, jnp.arange(8.0))
assert batch["n"] == count
""",
    "a NumPy array that the function makes is one piece of many": """
def step(batch):
    batch["made"] = np.ones(2, np.float32)
    return {"row": np.arange(2), "word": np.array(["a"])}

batch = {"x": XS}
out = graftax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(batch)
plain = jax.shard_map(lambda x: np.arange(2), mesh=mesh, in_specs=P("data"), out_specs=P("data"))(XS)
np.testing.assert_array_equal(out["row"], plain)
assert (out["word"].tolist(), batch["made"].shape) == (["a"], (8,))
""",
    "derivative rules hold in a shard_map that is not compiled": """
def ruled(library, f):
    made = library.custom_vjp(f)
    made.defvjp(lambda p: (f(p), p), lambda p, c: ({"w": 5 * c * p["w"]},))
    return made

def square(p):
    return (p["w"] ** 2).sum()

specs = dict(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
for options in ({}, {"check_vma": False}):
    plain = ruled(jax, square)
    expected = jax.shard_map(lambda w: jax.grad(plain)({"w": w})["w"], **specs, **options)(XS)
    made = ruled(graftax, square)
    value = graftax.shard_map(lambda p: made(p)[None], **specs, **options)({"w": XS, "name": "a"})
    np.testing.assert_allclose(value, (XS.reshape(4, 8) ** 2).sum(1))
    for outer in (lambda f: f, graftax.jit):
        run = outer(graftax.shard_map(lambda p: graftax.grad(made)(p)["w"], **specs, **options))
        np.testing.assert_allclose(run({"w": XS, "name": "a"}), expected)
""",
    "without in_specs each array has the sharding of its own type": """
explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
def put(x, *spec):
    return jax.device_put(x, NamedSharding(explicit, P(*spec)))

def step(model, batch, *, scale=None):
    assert (batch["x"].shape, model["w"].shape, model["name"]) == ((4, 2), (2, 4), "net")
    model["seen"] = model["seen"] + 1
    model["rows"], batch["double"] = jax.lax.psum(batch["x"].sum(0), "data"), 2 * batch["x"]
    model["calls"] += 1
    return batch["x"] @ model["w"] * (1 if scale is None else scale)

bias = jnp.ones(())
def fresh():
    model = {"w": put(jnp.arange(16.0).reshape(2, 8), None, "model"), "seen": jnp.zeros(()), "name": "net", "calls": 0}
    model["rows"] = jnp.zeros(2)
    return model, {"x": put(XS, "data"), "same": model}

plain = jax.shard_map(lambda w, x: x @ w, mesh=explicit, out_specs=P("data", "model"))
for outer in (lambda f: f, graftax.jit):
    for context, options in ((jax.set_mesh(explicit), {}), (None, {"mesh": explicit})):
        if context is not None:
            context.__enter__()
        run = outer(graftax.shard_map(step, out_specs=P("data", "model"), **options))
        model, batch = fresh()
        out = run(model, batch)
        np.testing.assert_allclose(out, plain(model["w"], put(XS, "data")))
        assert jax.typeof(out).sharding.spec == P("data", "model")
        assert (model["calls"], model["seen"], batch["same"] is model) == (1, 1, True)
        np.testing.assert_allclose(batch["double"], 2 * XS)
        assert jax.typeof(batch["double"]).sharding.spec == P("data", None)
        np.testing.assert_allclose(model["rows"], XS.sum(0))
        np.testing.assert_allclose(run(*fresh(), scale=jnp.asarray(2.0)), 2 * out)
        if context is not None:
            context.__exit__(None, None, None)
partly = graftax.shard_map(lambda b: b["x"] * 2, mesh=explicit, out_specs=P("data"), axis_names={"data"})
expected = jax.shard_map(lambda x: x * 2, mesh=explicit, out_specs=P("data"), axis_names={"data"})
both = put(XS, "data", "model")
with jax.set_mesh(explicit):
    np.testing.assert_allclose(graftax.jit(partly)({"x": both}), jax.jit(expected)(both))
    with raises(ValueError, "b['x']", "('model', 'data')"):
        graftax.jit(partly)({"x": put(XS, ("model", "data"))})
with raises(TypeError, "'data'", "Auto", "in_specs", "Explicit"):
    graftax.shard_map(lambda x: x, mesh=mesh, out_specs=P())(XS)
with raises(TypeError, "Auto"):
    jax.shard_map(lambda x: x, mesh=mesh, out_specs=P())(XS)
""",
    "modules of Equinox are sharded": """
import equinox as eqx

layer = Affine(jnp.ones((8, 2)), jnp.arange(8.0), name="layer")
run = graftax.shard_map(lambda m, x: m.weight @ x + m.bias, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
np.testing.assert_allclose(run(layer, jnp.ones(2)), 2 + jnp.arange(8.0))
specs = Affine(P("data"), P("data"), name="layer")
run = graftax.shard_map(lambda m: m, mesh=mesh, in_specs=(specs,), out_specs=specs)
out = run(layer)
assert out.name == "layer"
assert out.weight.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
""",
}


RUN = """
import sys, traceback
cases = {cases!r}
found = {{}}
for name, code in cases.items():
    try:
        exec(compile(code, name, "exec"), dict(globals()))
        found[name] = ""
    except BaseException:
        found[name] = traceback.format_exc()
print(found)
"""
FAILS = {
    "nothing is raised": "with raises(ValueError): pass",
    "another message": "with raises(ValueError, 'never'): int('')",
}


@pytest.fixture(scope="module")
def outputs(request: pytest.FixtureRequest) -> dict[str, str]:
    """For each case of this run what it raised; one interpreter with eight devices runs them all."""
    names = {item.callspec.params["name"] for item in request.session.items if item.path == request.path}
    code = PROGRAM + RUN.format(cases={name: case for name, case in (CASES | FAILS).items() if name in names})
    out = python(code, XLA_FLAGS="--xla_force_host_platform_device_count=8", seconds=300)
    return ast.literal_eval(out.splitlines()[-1])


@pytest.mark.quick(0)  # half a second each; nothing else runs over several devices at once
@pytest.mark.parametrize("name", CASES)
def test_over_eight_devices(name: str, outputs: dict[str, str]) -> None:
    assert not outputs[name], outputs[name]


@pytest.mark.quick(0)
@pytest.mark.parametrize("name", FAILS)
def test_a_case_can_fail(name: str, outputs: dict[str, str]) -> None:
    assert "AssertionError" in outputs[name]
