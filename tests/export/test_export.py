# SPDX-License-Identifier: Apache-2.0
"""An exported function runs elsewhere as it does here, and refuses what it was not exported for."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
import zoo
from exported_functions import Layer, model, relu, step
from watchdog import python
from zoo import Box, f32, i32

pytestmark = pytest.mark.usefixtures("cache_of_jax_is_off")


def reloaded(exported):
    return graftax.Exported.deserialize(exported.serialize())


ELSEWHERE = """
import sys, graftax, jax.numpy as jnp
from exported_functions import model, relu
run = graftax.Exported.deserialize(open(sys.argv[1], "rb").read())
for _ in range(2):
    m = model()
    x = jnp.array([2.0, -2.0])
    out = run(m, x, 0.25, x, tag="t")
    layer = m["layers"][0]
    assert out["layer"] is layer is m["best"] is out["named"]["out"]
    assert out["again"][0] is out["again"][1] is layer.log
    assert layer.w.tolist() == [2.5, -1.0] and layer.log[0] == 1 and layer.log[1] == 1.5
    assert out["name"] == "LAYER" and out["act"] is relu and out["named"]["tag"] == "t"
m["layers"][0].name = "other"
try:
    run(m, x, 0.25, x, tag="t")
except graftax.StructureError as error:
    print(error)
"""


@pytest.mark.quick(0)
def test_another_process_runs_it_on_object_graphs(tmp_path):
    x = f32(2, -2)
    exported = graftax.export(step)(model(), x, 0.25, x, tag="t")
    (tmp_path / "step").write_bytes(exported.serialize())
    out = python(ELSEWHERE, str(tmp_path / "step"))
    assert "model['layers'][0].name: expected 'layer', given 'other'" in out


def test_exporting_touches_nothing():
    m = model()
    before, w = graftax.flatten(m)[1], m["best"].w
    graftax.export(step)(m, f32(1, 2))
    assert graftax.flatten(m)[1] == before and m["best"].w is w


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_an_exported_function_gives_what_the_call_gives(build):
    x = build()
    expected, given = graftax.jit(lambda x: (x, [x]))(x), graftax.export(lambda x: (x, [x]))(x)(x)
    assert graftax.flatten(given)[1] == graftax.flatten(expected)[1]
    for a, b in zip(graftax.flatten(given)[0], graftax.flatten(expected)[0], strict=True):
        assert a is b or jnp.array_equal(a, b)


def test_call_and_the_object_itself_do_the_same():
    exported = graftax.export(lambda x, n: (x * n, n))(f32(1), 2)
    for run in (exported, exported.call, reloaded(exported), reloaded(exported).call):
        assert run(f32(3), 2)[0].tolist() == [6.0]
    assert isinstance(exported.exported, jax.export.Exported)
    assert exported.exported.platforms


def test_every_spelling_of_a_call_works():
    def f(a, b=2, /, c=3, *, d=4, **rest):
        return a * b * c * d, rest

    run = reloaded(graftax.export(f)(f32(1)))
    x = f32(2)
    for args, kwargs in [((x,), {}), ((x, 2), {"c": 3}), ((x, 2, 3), {"d": 4})]:
        assert run(*args, **kwargs)[0].tolist() == [48.0]
    with pytest.raises(TypeError, match="missing a required"):
        run()
    with pytest.raises(TypeError, match="too many"):
        run(x, 2, 3, 4)
    with pytest.raises(graftax.StructureError, match="extra keyword arguments: expected none, given 'e'"):
        run(x, e=1)
    with pytest.raises(graftax.StructureError, match="d: expected 4, given 5"):
        run(x, d=5)


@pytest.mark.parametrize("given", [f32(1, 2), i32(1)], ids=["shape", "dtype"])
def test_an_array_of_another_kind_is_named_by_its_path(given):
    run = graftax.export(lambda unused, m: m["w"][0] * 2)(f32(1), {"w": [f32(1)]})
    with pytest.raises(ValueError, match=r"m\['w'\]\[0\]"):
        run(f32(1), {"w": [given]})


CONSTANT = np.ones(2, np.float32)
STATE = {"calls": 0, "w": jnp.ones(2)}
KEY = jax.random.key(0)


def uses_globals(x):
    return x * STATE["w"] + CONSTANT + jax.random.uniform(KEY), STATE["w"], CONSTANT


def test_what_is_captured_becomes_part_of_the_program():
    expected = uses_globals(f32(1, 2))
    exported = graftax.export(uses_globals)(f32(1, 2))
    old, STATE["w"] = STATE["w"], f32(100, 100)
    try:
        for run in (exported, reloaded(exported)):
            for one, other in zip(run(f32(1, 2)), expected, strict=True):
                assert jnp.array_equal(one, other)
    finally:
        STATE["w"] = old


def counts(x):
    STATE["calls"] += 1
    return x


def returns_captured(x):
    return [STATE, x]


def keeps_captured(x):
    x.append(STATE)


def test_a_change_of_what_is_captured_is_an_error_and_undone():
    with pytest.raises(graftax.MutationError, match=r"counts changes global STATE, which it captures"):
        graftax.export(counts)(f32(1))
    assert STATE["calls"] == 0
    log = []
    with pytest.raises(graftax.MutationError, match="closure log"):
        graftax.export(lambda x: log.append(x))(f32(1))
    assert log == []


@pytest.mark.parametrize("f", [returns_captured, keeps_captured])
def test_a_captured_object_in_the_result_is_an_error(f):
    with pytest.raises(graftax.StructureError, match="holds global STATE, which it captures"):
        graftax.export(f)([f32(1)])


def test_an_argument_that_is_also_captured_is_an_error():
    with pytest.raises(graftax.StructureError, match="given state, which it also captures as global STATE"):
        graftax.export(lambda state, x: state["w"] + STATE["w"])(STATE, f32(1))


def test_a_bound_method_carries_its_object():
    layer = Layer(f32(2))
    run = reloaded(graftax.export(layer.scale)(f32(1)))
    layer.w = f32(100)
    assert run(f32(3)).tolist() == run(x=f32(3)).tolist() == [6.0]

    class Counter:
        def __init__(self):
            self.n = f32(0)

        @graftax.jit
        def add(self, x):
            self.n = self.n + x

    with pytest.raises(graftax.MutationError, match=r"self.*pass the instance"):
        graftax.export(Counter().add)(f32(1))
    run, counter = graftax.export(Counter.add)(Counter(), f32(1)), Counter()
    run(counter, f32(5))
    assert counter.n.tolist() == [5.0]


def test_options_of_a_jitted_function_are_kept():
    box = [f32(1)]
    change = lambda box: box.append(box[0])
    graftax.export(graftax.jit(change, mutation="discard"))(box)(box)
    assert len(box) == 1
    with pytest.raises(graftax.MutationError, match="forbids"):
        graftax.export(graftax.jit(change, mutation="error"))(box)
    graftax.export(graftax.jit(change, donate="all"))(box)(box)
    assert len(box) == 2 and box[0].tolist() == [1.0]


def test_shapes_and_traced_numbers_stand_for_arrays():
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    run = reloaded(graftax.export(graftax.jit(lambda m, n: m["w"] * n, dynamic="n"))({"w": shape}, 2))
    assert run({"w": f32(1, 2)}, 5).tolist() == [5.0, 10.0]
    with pytest.raises(graftax.StructureError, match=r"m\['w'\]: expected an array, given 1"):
        run({"w": 1}, 5)


def test_platforms_are_those_asked_for():
    exported = graftax.export(lambda x: x * 2, platforms=["cpu", "tpu"])(f32(1))
    assert exported.exported.platforms == ("cpu", "tpu")
    assert reloaded(exported)(f32(2)).tolist() == [4.0]


def test_a_loaded_function_can_be_transformed():
    exported = graftax.export(lambda m, x: (m["w"] * x**2).sum())({"w": f32(1, 2)}, f32(3, 4))
    run = graftax.Exported.deserialize(exported.serialize(vjp_order=1))
    m = {"w": f32(1, 2)}
    assert jax.grad(lambda x: run(m, x))(f32(3, 4)).tolist() == [6.0, 16.0]
    assert jax.jit(lambda x: run(m, x))(f32(1, 1)).tolist() == 3.0
    assert graftax.jit(lambda m, x: run(m, x))(m, f32(1, 1)).tolist() == 3.0


def test_an_exported_function_can_be_pickled_and_copied():
    exported = graftax.export(lambda x, n: x * n)(f32(1), 2)
    for again in (pickle.loads(pickle.dumps(exported)), copy.deepcopy(exported), copy.copy(exported)):
        assert again(f32(3), 2).tolist() == [6.0]
    assert "<lambda>(x, n)" in repr(again)


def local_static():
    def hook():
        pass

    return hook


@pytest.mark.quick(20)
@pytest.mark.parametrize(
    ("f", "x", "place"),
    [
        (lambda x: x["w"], {"w": f32(1), "hook": [local_static()]}, r"\['hook'\]\[0\]"),
        (lambda x: {"out": [x, local_static()]}, f32(1), r"\['out'\]\[1\]"),
        (lambda x, mark=object(): x, f32(1), "mark"),
        (lambda x, default=local_static(): x, f32(1), "default"),
    ],
    ids=["argument", "result", "sentinel", "default"],
)
def test_what_cannot_be_saved_is_named_with_its_path(f, x, place):
    exported = graftax.export(f)(x)
    exported(x)
    with pytest.raises(graftax.UnpicklableError, match=place):
        exported.serialize()


@pytest.mark.parametrize("blob", [b"", b"x" * 100, b"graftax.Exported 3\n", b"graftax.Exported 3\n" + b"\x80\x04N."])
def test_other_bytes_are_refused(blob):
    with pytest.raises(graftax.StructureError, match="not the bytes of an exported function"):
        graftax.Exported.deserialize(blob)


def test_cut_bytes_are_refused():
    blob = graftax.export(relu)(f32(1)).serialize()
    for end in range(0, len(blob), 97):
        with pytest.raises(graftax.StructureError, match="damaged"):
            graftax.Exported.deserialize(blob[:end])
    for kind in (bytes, memoryview, bytearray):
        assert graftax.Exported.deserialize(kind(blob))(f32(-1)).tolist() == [0.0]


def test_a_changed_bit_is_refused_anywhere():
    weights = np.arange(8, dtype=np.float32)
    blob = graftax.export(lambda x: x * weights)(f32([1] * 8)).serialize()
    assert weights.tobytes() in blob  # which JAX's own bytes have no digest of
    for at in range(0, len(blob), 7):
        damaged = bytearray(blob)
        damaged[at] ^= 1
        with pytest.raises(graftax.StructureError, match="damaged"):
            graftax.Exported.deserialize(damaged)


def test_numpy_arguments_stay_the_callers():
    x = np.ones(2, np.float32)
    box = Box(x=x)
    run = reloaded(graftax.export(lambda b: (b.x, b.x * 2))(box))
    same, double = run(box)
    x[:] = -1
    assert same is x and double.tolist() == [2.0, 2.0]


def test_a_function_of_jax_in_a_model_is_saved_by_name():
    import equinox

    mlp = equinox.nn.MLP(2, 2, 4, 1, activation=jax.nn.relu, final_activation=jax.nn.sigmoid, key=jax.random.key(0))
    exported = graftax.export(lambda model, x: (model(x), model.activation))(mlp, f32(1, 2))
    again = graftax.Exported.deserialize(exported.serialize())
    result, activation = again(mlp, f32(1, 2))
    np.testing.assert_allclose(result, mlp(f32(1, 2)), rtol=1e-6)
    assert activation is jax.nn.relu


# ---- packed state


def packed(scale=1.0, size=3, **more):
    return graftax.pack({"w": jnp.ones(size) * scale, "b": jnp.zeros(2), "name": "net", "log": [], **more})


def train(net, rate):
    net["w"] = net["w"] + rate
    net["b"] = net["b"] + net["w"].sum()
    net["log"].append(net["b"][0])
    return {"out": net["w"] * 2, "name": net["name"]}


@pytest.mark.quick(0)
def test_packed_state_is_an_argument_and_takes_its_changes_back():
    exported = reloaded(graftax.export(train)(packed(), f32(1)))
    handle, plain = packed(2.0), packed(2.0).unpack()
    kept = copy.copy(handle)
    found, expected = exported(handle, f32(1)), train(plain, f32(1))
    inside = handle.unpack()
    assert found["out"].tolist() == expected["out"].tolist() and found["name"] == "net"
    assert [inside["w"].tolist(), inside["b"].tolist()] == [plain["w"].tolist(), plain["b"].tolist()]
    assert [float(x) for x in inside["log"]] == [float(x) for x in plain["log"]]
    assert kept.unpack()["w"].tolist() == [2, 2, 2]  # nothing is donated


@pytest.mark.quick(0)
def test_packed_state_below_an_argument_and_twice():
    def both(a, b):
        train(a, f32(1)[0])
        return train(b["inside"].unpack() if "inside" in b else b, f32(1)[0])["out"]

    exported = reloaded(graftax.export(both)(packed(), {"inside": packed()}))
    assert exported(packed(), {"inside": packed(4.0)}).tolist() == [10, 10, 10]
    shared, again = packed(), packed()
    exported = reloaded(graftax.export(both)(shared, shared))
    assert exported(again, again).tolist() == graftax.jit(both)(shared, shared).tolist() == [6, 6, 6]
    assert again.unpack()["w"].tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: packed(size=4), r"float32\[3\] inside at \['w'\], given float32\[4\]"),
        (lambda: packed(more=1), r"nothing inside at \['more'\], given 1"),
        (lambda: packed().unpack(), "net: expected Packed, given dict"),
    ],
)
def test_other_packed_state_is_refused_with_the_place_inside(given, words):
    exported = graftax.export(train)(packed(), f32(1))
    with pytest.raises(graftax.StructureError, match=words):
        exported(given(), f32(1))


def test_a_handle_that_is_captured_is_part_of_the_program():
    handle = packed(3.0)
    exported = reloaded(graftax.export(lambda x: handle.unpack()["w"] * x)(f32(2)))
    handle.update({"w": f32(0)})
    assert exported(f32(2)).tolist() == [6, 6, 6]
    with pytest.raises(graftax.MutationError, match="closure handle, which it captures"):
        graftax.export(lambda x: handle.update({"w": x}))(f32(2))


def test_shapes_in_packed_state_are_refused():
    handle = graftax.pack({"w": jax.ShapeDtypeStruct((3,), jnp.float32), "b": jnp.zeros(2)})
    with pytest.raises(graftax.StructureError, match=r"net\['w'\], a jax.ShapeDtypeStruct inside of packed state"):
        graftax.export(lambda net: net["b"])(handle)


# ---- symbolic shapes


def symbolic(text, *more):
    return jax.ShapeDtypeStruct((*jax.export.symbolic_shape(text), *more), jnp.float32)


def grow(net):
    net["x"], net["calls"] = net["x"] + 1, net["calls"] + 1
    return net


def looped(x):
    w = {"w": jnp.ones(2), "seen": jnp.zeros(())}

    def step(carry, row):
        w["seen"] = w["seen"] + row.sum()
        return carry + row, carry * w["w"]

    last, rows = graftax.scan(step, jnp.zeros(2), x)
    doubled = graftax.map(lambda row: {"row": row * 2}, x)["row"]
    chosen = graftax.cond(x.sum() > 0, lambda x: {"a": x}, lambda x: {"a": -x}, x)["a"]
    mapped = graftax.vmap(lambda row: row @ w["w"])(x)
    halved = [
        graftax.while_loop(lambda s: s["x"].sum() > 1, lambda s: {"x": s["x"] / 2}, {"x": x}, max_steps=m)["x"]
        for m in (None, 9)
    ]
    counted = graftax.fori_loop(0, 3, lambda i, s: {"x": s["x"] + i}, {"x": x})["x"]
    return [last, rows, doubled, chosen, mapped, *halved, counted, w["seen"]]


def test_symbolic_shapes_stand_for_all():
    exported = reloaded(graftax.export(grow)({"x": symbolic("b", 2), "calls": 0}))
    for size in (1, 3):
        net = {"x": jnp.zeros((size, 2)), "calls": 0}
        assert exported(net) is net and net["x"].tolist() == [[1, 1]] * size and net["calls"] == 1
    with pytest.raises(ValueError, match=r"net.*\['x'\]"):
        exported({"x": jnp.zeros((3, 3)), "calls": 0})
    shape = symbolic("b")
    with pytest.raises(ValueError, match=r"scope[\s\S]*from a\['x'\]"):
        graftax.export(lambda a, b: a["x"] + b)({"x": shape}, symbolic("b"))
    pair = reloaded(graftax.export(lambda a, b: a["x"] + b)({"x": shape}, shape))
    with pytest.raises(ValueError, match=r"b.shape\[0\]"):
        pair({"x": jnp.zeros(3)}, jnp.zeros(4))


@pytest.mark.quick(0)
def test_loops_and_branches_run_over_symbolic_shapes():
    exported = reloaded(graftax.export(looped)(symbolic("b", 2)))
    for size in (1, 4):
        x = jnp.arange(2.0 * size).reshape(size, 2)
        for found, expected in zip(exported(x), looped(x), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("f", "place"),
    [
        (lambda d: {"n": d["x"].shape[0]}, r"\['n'\]"),
        (lambda d: [d["x"].shape[0] * 2 + 1], r"\[0\]"),
        (lambda d: d.update(n=d["x"].shape[0]), r"\['n'\]"),
    ],
)
def test_a_symbolic_dimension_in_the_result_is_an_error(f, place):
    with pytest.raises(graftax.StructureError, match=rf"symbolic dimension .* at {place}[\s\S]*jnp.asarray"):
        graftax.export(f)({"x": symbolic("b"), "n": 0})
    mended = graftax.export(lambda d: {"n": jnp.asarray(d["x"].shape[0])})({"x": symbolic("b"), "n": 0})
    assert mended({"x": jnp.zeros(5), "n": 0})["n"] == 5


def test_a_callback_in_an_exported_function_is_named():
    def watched(x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(NotImplementedError) as caught:
        graftax.export(watched)(f32(1))
    assert any(
        "watched calls a function on the host" in note and "jax.debug.print" in note for note in caught.value.__notes__
    )


def test_weak_types_of_results_and_changes_are_kept_in_the_bytes():
    def f(d, x):
        d["w"] = x * 2
        return x, x.astype(jnp.int32), jnp.float32(1) * 2

    exported = graftax.export(f)({"w": jnp.asarray(1.0)}, jnp.asarray(1.0))
    for function in (exported, type(exported).deserialize(exported.serialize())):
        given, expected = {"w": jnp.asarray(1.0)}, {"w": jnp.asarray(1.0)}
        one, other = function(given, jnp.asarray(1.0)), graftax.jit(f)(expected, jnp.asarray(1.0))
        assert [x.weak_type for x in (*one, given["w"])] == [x.weak_type for x in (*other, expected["w"])]
