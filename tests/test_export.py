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
from hazards.watchdog import python
from zoo import Box, f32, i32


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


MARK = object()


def local_static():
    def hook():
        pass

    return hook


@pytest.mark.parametrize(
    ("f", "x", "place"),
    [
        (lambda x: x["w"], {"w": f32(1), "hook": [local_static()]}, r"\['hook'\]\[0\]"),
        (lambda x: {"out": [x, local_static()]}, f32(1), r"\['out'\]\[1\]"),
        (lambda x, mark=MARK: x, f32(1), "mark"),
        (lambda x, default=local_static(): x, f32(1), "default"),
    ],
    ids=["argument", "result", "sentinel", "default"],
)
def test_what_cannot_be_saved_is_named_with_its_path(f, x, place):
    exported = graftax.export(f)(x)
    exported(x)
    with pytest.raises(graftax.UnpicklableError, match=place):
        exported.serialize()


@pytest.mark.parametrize("blob", [b"", b"x" * 100, b"graftax.Exported 1\n", b"graftax.Exported 1\n" + b"\x80\x04N."])
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
