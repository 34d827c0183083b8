# SPDX-License-Identifier: Apache-2.0
"""`graftax.memory`: the bytes of a call, as XLA counts them, and as the arrays of the objects add up."""

from __future__ import annotations

import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from watchdog import python

scale = jnp.ones(5)


class Layer:
    def __init__(self, n: int) -> None:
        self.w, self.b = jnp.ones((n, n)), jnp.zeros(n)


class Model:
    def __init__(self, n: int = 8) -> None:
        self.layers = [Layer(n), Layer(n)]
        self.name = "model"


def forward(model: Any, x: Any) -> Any:
    for layer in model.layers:
        x = jnp.sort(x @ layer.w) + layer.b
    return x


def update(state: Any, x: Any) -> Any:
    state["w"] = state["w"] + x.sum()
    return state["w"].sum()


def by_path(arrays: Any) -> dict[str, Any]:
    return {array.path: array for array in arrays}


def xla(function: Any, *args: Any, **options: Any) -> Any:
    analysis: Any = jax.jit(function, **options).lower(*args).compile().memory_analysis()
    return analysis


def test_totals_are_those_of_xla_for_the_same_function_of_arrays():
    model, x = Model(), jnp.ones((4, 8))
    leaves = [x for layer in model.layers for x in (layer.w, layer.b)]

    def flat(w0: Any, b0: Any, w1: Any, b1: Any, x: Any) -> Any:
        for w, b in ((w0, b0), (w1, b1)):
            x = jnp.sort(x @ w) + b
        return x

    report, expected = graftax.memory(forward, model, x), xla(flat, *leaves, x)
    assert report.argument_bytes == expected.argument_size_in_bytes == sum(a.nbytes for a in (*leaves, x))
    assert report.result_bytes == pytest.approx(expected.output_size_in_bytes, abs=8)  # a table of the results
    assert report.temporary_bytes == expected.temp_size_in_bytes > 0
    assert report.code_bytes == expected.generated_code_size_in_bytes
    parts = report.argument_bytes + report.result_bytes + report.temporary_bytes + report.code_bytes
    assert report.total_bytes == parts and report.reused_bytes == report.host_bytes == 0


def test_each_array_is_listed_by_the_path_of_its_object():
    report = graftax.memory(forward, Model(), jnp.ones((4, 8)))
    arguments = by_path(report.arguments)
    paths = ["model.layers[0].b", "model.layers[0].w", "model.layers[1].b", "model.layers[1].w", "x"]
    assert sorted(arguments) == paths
    row = arguments["model.layers[1].w"]
    assert (row.shape, row.dtype, row.bytes, row.kind) == ((8, 8), jnp.float32, 256, "argument")
    assert [(a.path, a.kind, a.bytes) for a in report.results] == [("result", "result", 128)]


def test_donated_and_written_back_arrays_are_marked_and_their_memory_counted_once():
    report = graftax.memory(graftax.jit(update, donate="state"), {"w": jnp.ones((9, 9)), "n": 1}, jnp.ones(3))
    w, x = report.arguments
    assert (w.path, w.is_donated, w.is_written_back) == ("state['w']", True, True)
    assert (x.path, x.is_donated, x.is_written_back) == ("x", False, False)
    assert [(a.path, a.kind) for a in report.results] == [("result", "result"), ("state['w']", "change")]
    assert report.reused_bytes == w.bytes == 324
    kept = graftax.memory(graftax.jit(update), {"w": jnp.ones((9, 9)), "n": 1}, jnp.ones(3))
    assert kept.reused_bytes == 0 and kept.result_bytes == report.result_bytes
    assert report.total_bytes - report.temporary_bytes == kept.total_bytes - kept.temporary_bytes - 324


def test_an_array_in_two_places_is_counted_once():
    w = jnp.ones((6, 6))
    report = graftax.memory(lambda a, b: a @ b["k"], w, {"k": w})
    assert report.analysis.argument_size_in_bytes == 2 * w.nbytes
    assert report.argument_bytes == w.nbytes
    assert [array.paths for array in report.arguments] == [("a", "b['k']")]
    assert "argument, also b['k']" in report.text()


def test_two_places_of_a_shape_or_of_a_numpy_array_are_two_arrays():
    for w in (jax.ShapeDtypeStruct((6, 6), jnp.float32), np.ones((6, 6), np.float32)):
        report = graftax.memory(lambda a, b: a @ b, w, w)
        assert report.argument_bytes == 2 * 144 and len(report.arguments) == 2


def test_a_shared_object_lists_its_array_once():
    layer = Layer(6)
    report = graftax.memory(lambda m: m[0].w @ m[1].w, [layer, layer])
    assert report.argument_bytes == layer.w.nbytes
    assert [(a.path, a.is_unused) for a in report.arguments] == [("m[0].w", False), ("m[0].b", True)]


def test_shapes_in_place_of_arrays_give_the_same_report():
    model = Model()
    x = jax.ShapeDtypeStruct((4, 8), "float32")
    concrete = graftax.memory(forward, model, jnp.ones((4, 8)))
    abstract = graftax.memory(forward, graftax.map_leaves(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model), x)
    assert abstract.text() == concrete.text()


def test_memory_of_more_than_the_machine_has_is_told_from_shapes():
    huge = jax.ShapeDtypeStruct((1 << 20, 1 << 22), jnp.float32)
    report = graftax.memory(lambda x: x.sum(), huge)
    assert report.argument_bytes == 1 << 44 and "17.6 TB" in report.text()


def test_nothing_runs_and_nothing_changes():
    runs: list[int] = []

    def step(state: Any) -> Any:
        jax.debug.callback(lambda: runs.append(1))
        state["w"] = state["w"] + 1
        state["n"] += 1

    w = jnp.ones(3)
    state = {"w": w, "n": 0}
    graftax.memory(graftax.jit(step, donate="state"), state)
    jax.effects_barrier()
    assert not runs and state["w"] is w and state["n"] == 0 and not w.is_deleted()


def test_captured_arrays_are_marked():
    report = graftax.memory(lambda x: x * scale.sum(), jnp.ones(3))
    assert {a.path: a.kind for a in report.arguments} == {"x": "argument", "global scale": "captured"}


def test_an_array_that_the_program_does_not_read_is_marked_and_not_counted():
    report = graftax.memory(lambda batch: batch["x"] + 1, {"x": jnp.ones(3), "y": jnp.ones(100)})
    y = by_path(report.arguments)["batch['y']"]
    assert y.is_unused and y.bytes == 400 and report.argument_bytes == 12
    kept = graftax.memory(graftax.jit(lambda x, y: x + 1, keep_unused=True), jnp.ones(3), jnp.ones(100))
    assert kept.argument_bytes == 412 and not by_path(kept.arguments)["y"].is_unused


def test_random_keys_have_the_bytes_of_their_data():
    key = jax.random.key(0)
    report = graftax.memory(lambda k: jax.random.split(k, 3), key)
    assert report.argument_bytes == report.arguments[0].bytes == jax.random.key_data(key).nbytes
    assert report.results[0].bytes == 3 * report.argument_bytes


@pytest.mark.quick(0)
def test_many_arrays_are_summed_as_few_are():
    arrays = [jnp.asarray(np.ones(i, np.float32)) for i in range(1, 34)]
    report = graftax.memory(lambda xs: [x * 2 for x in xs], arrays)
    assert report.argument_bytes == sum(a.bytes for a in report.arguments) == sum(a.nbytes for a in arrays)
    assert [a.path for a in report.largest(2)] == ["xs[32]", "result[32]"]
    assert "the largest 10 of 66 arrays:" in str(report)


def test_packed_state_is_one_array():
    state = {"a": jnp.ones(3), "b": jnp.ones(5)}
    packed = graftax.pack(state)
    report = graftax.memory(graftax.jit(lambda s: s["a"].sum() + s["b"].sum()), packed)
    assert sum(a.bytes for a in report.arguments) == report.argument_bytes >= 32


def test_methods_and_traced_numbers_are_arguments():
    class Scaled:
        def __init__(self) -> None:
            self.w = jnp.ones(4)

        @graftax.jit(dynamic="rate")
        def call(self, x: Any, rate: float) -> Any:
            return self.w * x * rate

    report = graftax.memory(Scaled().call, jnp.ones(4), 0.5)
    assert {a.path: (a.bytes, a.kind) for a in report.arguments} == {
        "self.w": (16, "argument"),
        "x": (16, "argument"),
        "rate": (4, "argument"),
    }


@pytest.mark.quick(0)  # another process; the arrays of one device are those of the tests above
def test_bytes_are_those_of_one_device():
    code = """
        import jax, jax.numpy as jnp, graftax
        from jax.sharding import NamedSharding, PartitionSpec as P
        mesh = jax.make_mesh((4,), ("d",))
        x, z = (jax.device_put(jnp.ones(n), NamedSharding(mesh, spec)) for n, spec in (((8, 4), P("d")), (4, P())))
        report = graftax.memory(lambda x, z: x * 2 + z, x, z)
        expected = jax.jit(lambda x, z: x * 2 + z).lower(x, z).compile().memory_analysis()
        assert report.devices == 4 and report.argument_bytes == expected.argument_size_in_bytes == 48
        assert [(a.path, a.shape, a.bytes) for a in report.arguments] == [("x", (8, 4), 32), ("z", (4,), 16)]
        assert report.results[0].bytes == report.result_bytes == 32
        shape = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=x.sharding)
        assert graftax.memory(lambda x, z: x * 2 + z, shape, z).text() == report.text()
        print(report)
        """
    out = python(textwrap.dedent(code), XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert "on each of 4 devices" in out


def test_a_call_after_the_report_traces_nothing():
    step = graftax.jit(lambda x: x * 2)
    graftax.memory(step, jnp.ones(3))
    with graftax.assert_max_traces(step, 0):
        step(jnp.ones(3))


def test_text_and_html_have_the_same_numbers():
    report = graftax.memory(lambda m: m["<w>"] * 2, {"<w>": jnp.ones(1000)})
    assert str(report).splitlines()[:3] == ["<lambda>: 8 kB", "  arguments       4 kB", "  results         4 kB"]
    html = report._repr_html_()
    assert "&lt;w&gt;" in html and "<w>" not in html and "<td>4 kB</td>" in html
    assert repr(report) == "<graftax.memory of <lambda>: 8 kB>"
    assert [(row["path"], row["type"], row["bytes"]) for row in report.table()] == [
        ("m['<w>']", "float32[1000]", 4000),
        ("result", "float32[1000]", 4000),
    ]


def test_a_backend_without_an_analysis_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda self: None)  # pyright: ignore
    with pytest.raises(graftax.GraftaxError, match="no memory analysis of <lambda> on cpu"):
        graftax.memory(lambda x: x + 1, jnp.ones(2))
