# SPDX-License-Identifier: Apache-2.0
"""``graftax.jit``: arrays traced, the rest static, one trace for every spelling of a call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
import oracle
import zoo
from zoo import Box, f32, scalar


def traces(jitted):
    return jitted.cache_info().traces


def test_arrays_are_traced_and_the_rest_is_static():
    @graftax.jit
    def f(x, n, name, flags):
        assert isinstance(x, jax.core.Tracer)
        assert (type(n), type(name), flags) == (int, str, {"deep": (True, None)})
        return x * n

    assert f(f32(2), 3, "x", {"deep": (True, None)}).tolist() == [6.0]
    assert f(f32(5), 3, "x", {"deep": (True, None)}).tolist() == [15.0]
    assert traces(f) == 1
    assert f(f32(2), 4, "x", {"deep": (True, None)}).tolist() == [8.0]
    assert traces(f) == 2


def test_python_control_flow_on_statics():
    @graftax.jit
    def f(config, x):
        for layer in config["layers"]:
            x = x + layer if config["add"] else x * layer
        return x

    assert f({"layers": [1, 2], "add": True}, f32(1)).tolist() == [4.0]
    assert f({"layers": [1, 2], "add": False}, f32(1)).tolist() == [2.0]


def test_numpy_arrays_and_scalars_are_traced():
    @graftax.jit
    def f(x, y):
        assert isinstance(x, jax.core.Tracer) and isinstance(y, jax.core.Tracer)
        return x + y

    assert f(np.ones(2, np.float32), np.float32(1)).tolist() == [2.0, 2.0]
    assert f(np.zeros(2, np.float32), np.float32(5)).tolist() == [5.0, 5.0]
    assert traces(f) == 1


def test_typed_keys_are_traced():
    f = graftax.jit(lambda key: jax.random.normal(key, (2,)))
    for seed in range(3):
        key = jax.random.key(seed)
        assert np.array_equal(f(key), jax.random.normal(key, (2,)))
    assert traces(f) == 1


def test_arrays_inside_unregistered_objects_are_traced():
    f = graftax.jit(lambda box: box.w * box.n)
    assert f(Box(w=f32(2), n=3)).tolist() == [6.0]
    assert f(Box(w=f32(4), n=3)).tolist() == [12.0]
    assert traces(f) == 1
    assert f(Box(w=f32(4), n=2)).tolist() == [8.0]
    assert traces(f) == 2


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_every_kind_goes_in_and_out(build):
    graph = build()
    f = graftax.jit(lambda x: x)
    for _ in range(2):
        assert oracle.difference(build(), f(graph)) is None
        assert oracle.difference(build(), graph) is None
    assert traces(f) == 1


def test_outputs_mix_arrays_and_statics():
    @graftax.jit
    def f(x):
        return {"y": x + 1, "name": "out", "shape": x.shape, "n": 3, "none": None, "flag": True}

    for value in (1.0, 2.0):
        y = f(scalar(value))
        assert float(y.pop("y")) == value + 1
        assert y == {"name": "out", "shape": (), "n": 3, "none": None, "flag": True}
        assert type(y["flag"]) is bool and type(y["n"]) is int


def test_static_only_outputs():
    f = graftax.jit(lambda x: "text")
    assert f(f32(1)) == "text"
    assert f(f32(2)) == "text"
    assert graftax.jit(lambda: None)() is None


def test_static_outputs_follow_the_shape_that_ran():
    f = graftax.jit(lambda x: (x.shape, x.ndim, [x.sum(), "even" if x.size % 2 == 0 else "odd"]))
    for shape in [(2,), (3,), (2,), (3, 2), (3,), (2,)]:
        got = f(jnp.ones(shape))
        assert got[:2] == (shape, len(shape))
        assert got[2][1] == ("odd" if int(np.prod(shape)) % 2 else "even")
    assert traces(f) == 3


def test_static_outputs_follow_the_dtype_that_ran():
    f = graftax.jit(lambda x: str(x.dtype))
    for dtype in ("float32", "int32", "float32", "int32"):
        assert f(jnp.ones(2, dtype)) == dtype


def test_static_outputs_follow_the_weak_type_that_ran():
    f = graftax.jit(lambda x: x.weak_type)
    weak, strong = jnp.asarray(1.0) * 1, scalar(1.0)
    assert [f(x) for x in (weak, strong, weak, strong)] == [x.weak_type for x in (weak, strong, weak, strong)]


def test_mutations_follow_the_shape_that_ran():
    @graftax.jit
    def f(log, x):
        log.append(x.shape)

    log = []
    for shape in [(2,), (3,), (2,)]:
        f(log, jnp.ones(shape))
    assert log == [(2,), (3,), (2,)]


def test_a_fresh_container_is_made_for_every_call():
    f = graftax.jit(lambda x: [x, {1, 2}, Box(n=1), {"a": []}])
    first, second = f(f32(1)), f(f32(1))
    assert first is not second
    for left, right in zip(first[1:], second[1:], strict=True):
        assert left is not right
    first[1].add(3)
    first[2].n = 5
    first[3]["a"].append(1)
    third = f(f32(1))
    assert third[1] == {1, 2} and third[2].n == 1 and third[3] == {"a": []}


def test_output_sharing_and_cycles_are_kept():
    @graftax.jit
    def f(x):
        box = Box(w=x)
        box.me = box
        both = [box, (box,)]
        both.append(both)
        return both

    def plain(x):
        return f.__wrapped__(x)

    for _ in range(2):
        assert oracle.difference(plain(f32(1)), f(f32(1))) is None


def test_an_untouched_array_comes_back_as_itself():
    x, y = f32(1), np.ones(2, np.float32)
    f = graftax.jit(lambda x, y, z: {"x": x, "y": [y], "z": z + 1})
    for _ in range(2):
        out = f(x, y, f32(1))
        assert out["x"] is x
        assert out["y"][0] is y


def test_under_grad():
    f = graftax.jit(lambda params, x: (params["w"] * x).sum() * params["n"])
    grad = jax.grad(lambda w, x: f({"w": w, "n": 3}, x))
    assert grad(f32(2), f32(5)).tolist() == [15.0]
    assert grad(f32(3), f32(5)).tolist() == [15.0]


def test_under_vmap():
    f = graftax.jit(lambda box: box.w * 2)
    assert jax.vmap(lambda w: f(Box(w=w)))(jnp.arange(3.0)).tolist() == [0.0, 2.0, 4.0]


def test_inside_jax_jit():
    f = graftax.jit(lambda box: box.w * 2)
    outer = jax.jit(lambda w: f(Box(w=w)) + 1)
    assert outer(f32(1)).tolist() == [3.0]
    assert outer(f32(2)).tolist() == [5.0]


def test_inside_graftax_jit():
    @graftax.jit
    def inner(log, x):
        log.append(x)
        return x * 2

    @graftax.jit
    def outer(log, x):
        return inner(log, inner(log, x))

    log = []
    assert outer(log, f32(1)).tolist() == [4.0]
    assert outer(log, f32(2)).tolist() == [8.0]
    assert [x.tolist() for x in log] == [[1.0], [2.0], [2.0], [4.0]]


def test_inside_scan_and_checkpoint():
    f = graftax.jit(lambda box: box.w * 2)

    def body(carry, x):
        y = jax.checkpoint(lambda c: f(Box(w=c)) + x)(carry)
        return y, y

    total, _ = jax.lax.scan(body, scalar(1.0), jnp.ones(3))
    assert float(total) == 15.0


def test_recursion():
    @graftax.jit
    def f(x, n):
        return x if n == 0 else f(x * 2, n - 1)

    assert f(f32(1), 3).tolist() == [8.0]
    assert f(f32(2), 3).tolist() == [16.0]


def test_disable_jit_runs_the_function_itself():
    log = []
    f = graftax.jit(lambda x, log: log.append(isinstance(x, jax.core.Tracer)))
    with jax.disable_jit():
        f(f32(1), log)
    assert log == [False]


def test_lower_compile_trace_and_eval_shape():
    f = graftax.jit(lambda state, n: {"y": state["w"] * n, "n": n})
    state = {"w": f32(1, 2)}
    lowered = f.lower(state, 3)
    assert "multiply" in lowered.as_text()
    assert lowered.compile() is not None
    assert f.trace(state, 3).jaxpr is not None
    out = f.eval_shape(state, 3)
    assert (out["y"].shape, out["y"].dtype, out["n"]) == ((2,), jnp.float32, 3)
    assert isinstance(out["y"], jax.ShapeDtypeStruct)


@pytest.mark.parametrize("way", ["lower", "trace", "eval_shape"])
def test_looking_at_a_function_changes_nothing(way):
    def f(state, config):
        state["w"] = state["w"] + 1
        state["new"] = [state["w"]]
        config.n += 1
        return state

    def build():
        return {"w": f32(1)}, Box(n=1)

    args = build()
    getattr(graftax.jit(f), way)(*args)
    assert oracle.difference(build(), args) is None


def test_the_jaxpr_carries_the_functions_name():
    def my_training_step(x):
        return x + 1

    assert "my_training_step" in graftax.jit(my_training_step).lower(f32(1)).as_text()
