# SPDX-License-Identifier: Apache-2.0
"""stack, unstack, and a scan over `each` object: as the loop written out, traced once for all."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

import chex
import equinox as eqx
import flarejax
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import graftax
import zoo
from graftax import each, tree
from zoo import Affine, Box, f32


class Layer:
    def __init__(self, i: int, size: int = 3):
        self.w, self.act = jax.random.normal(jax.random.key(i), (size, size)), "tanh"
        self.mean, self.inner = jnp.zeros(size), {"b": jnp.full(size, float(i))}

    def __call__(self, x: Any) -> Any:
        x = x @ self.w + self.inner["b"]
        self.mean = 0.9 * self.mean + 0.1 * x
        return jnp.tanh(x) if self.act == "tanh" else x


def run(x: Any, layer: Any) -> Any:
    x = layer(x)
    return x, x.sum()


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_unstack_undoes_stack(build: Any):
    x = build()
    stacked = graftax.stack([x, x])
    assert [s.paths for s in graftax.shared(stacked)] == [s.paths for s in graftax.shared(x)]
    if graftax.flatten(x)[0]:
        for one in graftax.unstack(stacked):
            assert graftax.flatten(one)[1] == graftax.flatten(x)[1]
            for a, b in zip(graftax.flatten(one)[0], graftax.flatten(x)[0], strict=True):
                assert a.shape == b.shape and jnp.array_equal(a, jnp.asarray(b))


def test_a_mismatch_names_the_object_and_the_place():
    def message(*objects: Any) -> str:
        with pytest.raises(graftax.StructureError) as info:
            graftax.stack(objects)
        return str(info.value)

    assert "number 2 differs from the first" in message(Box(n=1), Box(n=1), Box(n=2))
    assert "obj.n" in message(Box(n=1, w=f32(1)), Box(n=2, w=f32(1)))
    assert message(Box(w=f32(1)), Box(w=f32(1, 2))).endswith(
        "obj.w is float32[1] in the first object, and float32[2] in number 1."
    )
    assert "float16" in message(Box(w=f32(1)), Box(w=f32(1).astype(jnp.float16)))
    with pytest.raises(ValueError, match="at least one"):
        graftax.stack([])
    with pytest.raises(graftax.StructureError, match=r"obj\.b has 2 rows, and obj\.a 1 rows"):
        graftax.unstack(Box(a=f32(1), b=f32(1, 2)))
    with pytest.raises(graftax.StructureError, match=r"obj\.a has no rows"):
        graftax.unstack(Box(a=jnp.asarray(1)))
    with pytest.raises(graftax.StructureError, match="no array"):
        graftax.unstack(Box(a=1))


def test_a_population_by_vmap():
    models = [Layer(i) for i in range(3)]
    result = graftax.vmap(lambda m, x: m(x), in_axes=(0, None))(graftax.stack(models), jnp.ones(3))
    np.testing.assert_allclose(result, jnp.stack([m(jnp.ones(3)) for m in models]), rtol=1e-5)


@pytest.mark.parametrize("jit", [lambda f: f, graftax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_over_layers_is_the_loop(jit: Any, reverse: bool):
    layers, twins = [Layer(i) for i in range(4)], [Layer(i) for i in range(4)]
    objects = list(layers)
    x, ys = jit(lambda x, layers: graftax.scan(run, x, each(layers), reverse=reverse))(jnp.ones(3), layers)
    y = jnp.ones(3)
    for twin in reversed(twins) if reverse else twins:
        y, _ = run(y, twin)
    np.testing.assert_allclose(x, y, rtol=1e-5)
    assert ys.shape == (4,) and all(a is b for a, b in zip(layers, objects, strict=True))
    for layer, twin in zip(layers, twins, strict=True):
        np.testing.assert_allclose(layer.mean, twin.mean, rtol=1e-5, atol=1e-6)
        assert layer.act == "tanh"


def test_gradients_and_training_through_it():
    class Model:
        def __init__(self) -> None:
            self.layers = [Layer(i) for i in range(3)]

    scanned = lambda m, x: (graftax.scan(run, x, each(m.layers))[0] ** 2).sum()

    def unrolled(m: Any, x: Any) -> Any:
        for layer in m.layers:
            x = layer(x)
        return (x**2).sum()

    a, b = Model(), Model()
    for fit, model in ((scanned, a), (unrolled, b)):
        opt = graftax.optimizer(optax.sgd(0.1), model, wrt=["**.w", "**.inner"])
        step = graftax.jit(lambda model, opt, x, fit=fit: opt.update(model, graftax.grad(fit)(model, x)) and None)
        for _ in range(2):
            step(model, opt, jnp.ones(3))
    assert graftax.equal(a, b, rtol=1e-4, atol=1e-6)


def test_the_loop_is_traced_once_for_all():
    def lines(count: int) -> int:
        layers = [Layer(i) for i in range(count)]
        program = graftax.make_jaxpr(lambda x: graftax.scan(run, x, each(layers))[0])(jnp.ones(3))
        return str(program).count("tanh")

    assert lines(2) == lines(12) == 1


def test_untouched_arrays_stay_the_callers_own():
    layers = [Layer(i) for i in range(2)]
    before = [layer.w for layer in layers]
    graftax.scan(run, jnp.ones(3), each(layers))
    assert all(layer.w is w for layer, w in zip(layers, before, strict=True))


def test_lists_are_sliced_as_in_jax():
    xs = [f32(1, 2), {"a": f32(3, 4)}]
    step = lambda c, x: (c + x[0] * x[1]["a"], None)
    assert graftax.scan(step, jnp.zeros(()), xs)[0] == jax.lax.scan(step, jnp.zeros(()), xs)[0] == 11
    modules = [Affine(f32(1, 2), f32(3, 4))]
    step = lambda c, x: (c + x[0].weight * x[0].bias, None)
    assert (
        graftax.scan(step, jnp.zeros(()), modules)[0]
        == jax.lax.scan(
            step,
            jnp.zeros(()),
            modules,
        )[0]
    )
    linears = [eqx.nn.Linear(3, 3, key=jax.random.key(i)) for i in range(3)]
    x, _ = graftax.scan(lambda x, layer: (layer(x), None), jnp.ones(3), graftax.stack(linears))
    y = jnp.ones(3)
    for linear in linears:
        y = linear(y)
    np.testing.assert_allclose(x, y, rtol=1e-5)
    z, _ = graftax.scan(lambda x, layer: (layer(x), None), jnp.ones(3), each(linears))
    assert jnp.array_equal(x, z)
    assert tree.structure(graftax.stack(linears)) == tree.structure(linears[0])


def test_errors_of_a_scan_over_objects():
    def grow(x: Any, layer: Any) -> Any:
        layer.calls = 3
        return x, None

    with pytest.raises(graftax.StructureError, match=r"scan of .*grow: a step may change arrays .*(.|\n)*calls"):
        graftax.scan(grow, jnp.ones(3), each([Layer(0), Layer(1)]))
    with pytest.raises(graftax.StructureError, match=r"scan of run: .*number 1 differs"):
        graftax.scan(run, jnp.ones(3), each([Layer(0), Box(w=f32(1))]))
    with pytest.raises(graftax.StructureError, match=r"scan of run: obj\.w is float32\[3, 3\] .* number 1"):
        graftax.scan(run, jnp.ones(3), each([Layer(0), Layer(1, 2)]))
    with pytest.raises(ValueError, match="there are 1 objects, and length=3"):
        graftax.scan(run, jnp.ones(3), each([Layer(0)]), length=3)


@pytest.mark.parametrize("jit", [lambda f: f, graftax.jit], ids=["plain", "jit"])
def test_a_vmap_over_a_list_of_models(jit: Any):
    models, x = [Layer(i) for i in range(3)], jnp.ones(3)
    expected = [graftax.copy(model)(x) for model in models]

    def run(models: Any, x: Any) -> Any:
        return graftax.vmap(lambda model, x: model(x), in_axes=(0, None))(graftax.each(models), x)

    np.testing.assert_allclose(jit(run)(models, x), expected, rtol=1e-5)
    for model, y in zip(models, expected, strict=True):
        np.testing.assert_allclose(jnp.tanh(model.mean / 0.1), y, rtol=1e-4)
    models[1].w = jnp.ones(2)
    with pytest.raises(
        graftax.StructureError, match=r"vmap of .*obj\.w is float32.* in the first object, .* in number 1"
    ):
        run(models, x)


class OfEquinox(eqx.Module):
    w: Any

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(self.w @ x)


class OfGraftax(graftax.Module):
    w: Any

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(self.w @ x)


class OfNnx(nnx.Module):
    def __init__(self, w: Any) -> None:
        self.w, self.calls = nnx.Param(w), nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: Any) -> Any:
        self.calls[...] = self.calls[...] + 1
        return jnp.tanh(self.w[...] @ x)


class OfFlareJax(flarejax.Module):
    def __init__(self, w: Any) -> None:
        self.w = w

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(self.w @ x)


@dataclasses.dataclass
class OfDataclass:
    w: Any

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(self.w @ x)


def with_gradient(layers: Any, x: Any) -> Any:
    def loss(layers: Any) -> Any:
        y, _ = graftax.scan(run, x, layers)
        return y.sum(), y

    return graftax.value_and_grad(loss, has_aux=True)(layers)


WAYS: dict[str, Any] = {
    "plain": lambda layers, x: graftax.scan(run, x, layers)[0],
    "jit": graftax.jit(lambda layers, x: graftax.scan(run, x, layers)[0]),
    "reverse": lambda layers, x: graftax.scan(run, x, layers[::-1], reverse=True)[0],
    "length": lambda layers, x: graftax.scan(run, x, layers, length=3)[0],
    "checkpoint": graftax.checkpoint(lambda layers, x: graftax.scan(run, x, layers)[0]),
    "grad": lambda layers, x: with_gradient(layers, x)[0][1],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", [Layer, OfEquinox, OfGraftax, OfNnx, OfFlareJax, OfDataclass])
def test_a_list_of_layers_is_gone_over_layer_by_layer(cls: Any, way: str):
    make = (lambda i: Layer(i)) if cls is Layer else lambda i: cls(jax.random.normal(jax.random.key(i), (3, 3)))
    layers, twins, y = [make(i) for i in range(3)], [make(i) for i in range(3)], jnp.ones(3)
    for twin in twins:
        y = twin(y)
    np.testing.assert_allclose(WAYS[way](layers, jnp.ones(3)), y, rtol=1e-5)
    assert graftax.equal(layers, twins, rtol=1e-4, atol=1e-6)
    if cls is OfNnx:
        np.testing.assert_allclose(graftax.scan(run, jnp.ones(3), nnx.List(layers))[0], y, rtol=1e-5)


def test_a_list_of_data_is_sliced_as_in_jax():
    @flax.struct.dataclass
    class Struct:
        w: Any

    class Named(NamedTuple):
        w: Any

    step = lambda total, x: (total + x[0].w * x[1].w, None)
    for cls in (Struct, Named, chex.dataclass(type("Chex", (), {"__annotations__": {"w": Any}}))):
        xs = [cls(w=f32(1, 2)), cls(w=f32(3, 4))]
        assert graftax.scan(step, jnp.zeros(()), xs)[0] == jax.lax.scan(step, jnp.zeros(()), xs)[0]
    modules = OfEquinox(f32(1, 2)), OfEquinox(f32(3, 4))
    assert graftax.scan(step, jnp.zeros(()), modules)[0] == 11


@pytest.mark.parametrize("jit", [lambda f: f, graftax.jit], ids=["plain", "jit"])
def test_layers_that_differ_are_named_in_a_note(jit: Any):
    scan = jit(lambda x, layers: graftax.scan(run, x, layers)[0])
    for layers, line in (
        ([Layer(0), Layer(1, 2)], r"obj\.w is float32\[3, 3\] in the first object, and float32\[2, 2\] in number 1"),
        ([OfEquinox(jnp.ones((3, 3))), OfEquinox(jnp.ones(3))], r"obj\.w is float32\[3, 3\] in the first .* number 1"),
        ([OfEquinox(jnp.ones((2, 3))), OfEquinox([jnp.ones(2)])], r"number 1 differs from the first"),
        ([OfEquinox(jnp.ones((2, 3)))], r"list of one OfEquinox, whose arrays all have 2 rows.*graftax\.each"),
    ):
        with pytest.raises((ValueError, TypeError)) as info:
            scan(jnp.ones(3), layers)
        assert re.search(line, "".join(info.value.__notes__))
    with pytest.raises(ValueError, match=r"2 objects, and length=5.*tuple"):
        graftax.scan(run, jnp.ones(3), [Layer(0), Layer(1)], length=5)


@pytest.mark.quick(0)
@pytest.mark.parametrize("jit", [lambda f: f, graftax.jit], ids=["plain", "jit"])
def test_what_layers_share_is_changed_by_no_step(jit: Any):
    scan = jit(lambda x, layers: graftax.scan(run, x, layers)[0])
    layer, other = Layer(0), Layer(1)
    with pytest.raises(graftax.StructureError, match=r"obj\.mean is changed, and items 0 and 2 of the list are one"):
        scan(jnp.ones(3), [layer, other, layer])
    assert not layer.mean.any()
    other.inner = layer.inner  # read alone
    scan(jnp.ones(3), [layer, other])
    assert layer.mean.any() and other.inner is layer.inner
    twice = OfDataclass(jnp.eye(3))
    np.testing.assert_allclose(scan(jnp.ones(3), [twice, twice]), twice(twice(jnp.ones(3))), rtol=1e-6)
    grads = graftax.grad(lambda layers: scan(jnp.ones(3), layers).sum())([twice, twice])
    loop = graftax.grad(lambda layers: layers[1](layers[0](jnp.ones(3))).sum())([twice, twice])
    assert grads[0] is grads[1] and graftax.equal(grads, loop, rtol=1e-5)


def test_a_layer_changed_through_what_a_step_captures_is_an_error():
    layers = [Layer(0), Layer(1)]

    def step(x: Any, layer: Any) -> Any:
        layers[1].w = layers[1].w * 2
        return layer(x), None

    with pytest.raises(graftax.StructureError, match=r"changes obj\.w of number 1 through what it captures"):
        graftax.jit(lambda: graftax.scan(step, jnp.ones(3), layers))()


def test_a_list_of_objects_that_cannot_be_sliced_says_what_goes_over_them():
    for layers in ([{"w": jnp.ones(())}, {"w": jnp.ones(())}], [{"w": jnp.ones(2)}, {"w": jnp.ones(3)}]):
        with pytest.raises(ValueError, match=r"graftax\.each\(xs\)"):
            graftax.scan(lambda x, layer: (x, None), 0.0, layers)


class OtherLayer(Layer):
    pass


def test_layers_of_several_classes_are_named_in_a_note():
    with pytest.raises(Exception) as info:
        graftax.scan(run, jnp.ones(3), [Layer(0), Layer(1), OtherLayer(2)])
    assert re.search(r"number 2 differs from the first:\n  obj: expected Layer, given OtherLayer", notes(info.value))


def notes(error: BaseException) -> str:
    return "".join(getattr(error, "__notes__", []))


@pytest.mark.parametrize("layers", [[OfEquinox(jnp.eye(3)), OfEquinox(jnp.eye(3))], [Layer(0), OtherLayer(1)]])
def test_a_vmap_over_a_plain_list_of_models_with_rows_tells_of_each(layers: Any):
    with pytest.raises((ValueError, TypeError)) as info:
        graftax.vmap(lambda layer, x: layer(x), in_axes=(0, None))(layers, jnp.ones(3))
    assert f"argument 0 is a list of 2 {type(layers[0]).__name__}" in notes(info.value)
    assert "graftax.each" in notes(info.value)
    with pytest.raises(TypeError) as info:
        graftax.vmap(lambda x, y: x + None)(jnp.ones(3), [jnp.ones(3)])
    assert "graftax.each" not in notes(info.value)


class OfPair(eqx.Module):
    w: Any
    scale: Any = eqx.field(default_factory=lambda: jnp.ones(()))

    def __call__(self, x: Any) -> Any:
        return self.w @ x * self.scale


@pytest.mark.quick(1)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("make", [Layer, lambda i: OfPair(jnp.eye(3) * i)], ids=["unknown to JAX", "module"])
def test_one_layer_is_gone_over_as_two_are(make: Any, count: int):
    x, layers = jnp.ones(3), [make(i) for i in range(count)]
    wanted = jnp.stack([layer(x) for layer in layers])
    for xs in (layers, graftax.each(layers)):
        np.testing.assert_allclose(graftax.map(lambda layer: layer(x), xs), wanted)
        np.testing.assert_allclose(graftax.map(lambda layer: layer(x), xs, batch_size=2), wanted)
        np.testing.assert_allclose(graftax.scan(lambda c, layer: (c, layer(x)), 0, xs)[1], wanted)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_vmap_calls_with_each_layer_that_has_no_rows(count: int):
    run = graftax.jit(graftax.vmap(lambda layer, x: layer(x), in_axes=(0, None)))
    layers, x = [Layer(i) for i in range(count)], jnp.ones(3)
    wanted = jnp.stack([copy(x) for copy in graftax.copy(layers)])
    np.testing.assert_allclose(run(layers, x), wanted, rtol=1e-6)
    assert all(layer.mean.any() for layer in layers[1:])
    modules = [OfEquinox([jnp.ones(2), jnp.ones(())])] * count  # JAX finds no axis that all arrays have
    assert graftax.vmap(lambda module: module.w[0].sum())(modules).shape == (count,)


def test_a_list_of_objects_with_as_many_rows_as_the_other_arguments_is_one_model():
    layers, xs = [Layer(0), Layer(1)], jnp.ones((3, 5))  # all arrays of the layers have three rows
    assert graftax.vmap(lambda model, x: model[0].w[0] + x[0])(layers, xs).shape == (3,)


class Counted:
    def __init__(self, w: float) -> None:
        self.w, self.calls = f32(w), f32(0.0)


class Counts:
    def __init__(self) -> None:
        self.layers = [Counted(i + 1.0) for i in range(3)]
        self.first = self.layers[0].w


HELD = Counts()


def all_calls() -> Any:
    return sum(layer.calls for layer in HELD.layers)


def counted(x: Any, layer: Counted) -> tuple[Any, None]:
    layer.calls = layer.calls + 1.0
    return x + layer.w, None


READING: dict[str, tuple[Any, str | None]] = {
    "a neighbour": (lambda m: lambda x, layer: counted(x + m.layers[0].calls, layer), r"m\.layers\[0\]\.calls"),
    "one in the carry": (None, r"\.layers\[1\]\.calls"),
    "what a helper reads": (lambda m: lambda x, layer: counted(x + all_calls(), layer), "a helper reads"),
    "what no step changes": (lambda m: lambda x, layer: counted(x + m.layers[2].w, layer), None),
    "an array by itself": (lambda m: lambda x, layer: counted(x + m.first * m.start, layer), None),
}


@pytest.mark.parametrize("how", READING)
@pytest.mark.parametrize("jit", [lambda f: f, graftax.jit], ids=["plain", "jit"])
def test_what_a_step_reads_of_other_objects_is_not_stale(how: str, jit: Any):
    make, message = READING[how]

    def in_carry(carry: Any, layer: Counted) -> tuple[Any, None]:
        x, m = carry
        return (counted(x + m.layers[1].calls, layer)[0], m), None

    def run(m: Counts, x: Any, loop: Any) -> Any:
        m.start = m.layers[0].calls  # pyright: ignore[reportAttributeAccessIssue]
        if make is None:
            return loop(in_carry, (x, m), m.layers)[0][0]
        return loop(make(m), x, m.layers)[0]

    def plain_loop(f: Any, carry: Any, layers: Any) -> Any:
        for layer in layers:
            carry, _ = f(carry, layer)
        return (carry,)

    global HELD
    HELD = Counts()
    expected = run(HELD, f32(1.0), plain_loop)
    with jax.disable_jit():
        HELD = Counts()
        assert run(HELD, f32(1.0), graftax.scan) == expected
    HELD = Counts()
    call = jit(lambda m, x: run(m, x, graftax.scan))
    if message is None:
        assert call(HELD, f32(1.0)) == expected
        assert [layer.calls for layer in HELD.layers] == [1.0, 1.0, 1.0]
    else:
        with pytest.raises(graftax.StructureError, match=f"reads .*{message}.*calls of number"):
            call(HELD, f32(1.0))
        assert [layer.calls for layer in HELD.layers] == [0.0, 0.0, 0.0]
