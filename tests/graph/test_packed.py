# SPDX-License-Identifier: Apache-2.0
"""Packed state: a handle holds exactly the objects that were packed, and a call on it does what it does on them."""

from __future__ import annotations

import copy
import gc
import pickle
import textwrap
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
import zoo
from graftax import Packed, pack
from graph_equality import same
from watchdog import python


class Layer:
    def __init__(self, n: int, scale: float = 1.0) -> None:
        self.w = scale * jnp.ones((n, n))
        self.b = jnp.zeros(n)
        self.name = f"layer {n}"


class Model:
    def __init__(self) -> None:
        self.layers = [Layer(3), Layer(4, 2.0)]
        self.layers.append(self.layers[0])  # shared
        self.owner = self
        self.step = jnp.zeros((), jnp.int32)


def decay(model: Model, x: jax.Array) -> jax.Array:
    for layer in model.layers[:2]:
        layer.w = 0.5 * layer.w + x
    model.step = model.step + 1
    return model.layers[2].w.sum()


# ---- what a handle holds


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_unpacking_gives_back_what_was_packed(build):
    obj = build()
    assert same(pack(obj).unpack(), obj)


def test_shared_and_cyclic_references_are_kept():
    model = pack(Model()).unpack()
    assert model.owner is model and model.layers[2] is model.layers[0]


@pytest.mark.parametrize(
    "leaf",
    [
        jnp.ones(3, jnp.bfloat16),
        jnp.ones(0),
        jnp.ones((2, 0, 3)),
        jnp.asarray(True),
        jnp.arange(5, dtype=jnp.int8),
        jnp.ones(2, jnp.complex64),
        jnp.asarray([1, 2], jnp.float8_e4m3fn),
        jnp.asarray([1, -2, 3], jnp.int4),
        jnp.asarray(2.0),
        jax.random.key(3),
        jax.random.split(jax.random.key(3), 4),
        np.arange(3.0),
        np.float32(2),
        np.array(["a"]),
    ],
    ids=lambda x: f"{type(x).__name__}-{x.dtype}-{x.shape}",
)
def test_every_dtype_is_exact(leaf):
    obj = {"a": leaf, "b": [leaf, leaf], "c": jnp.ones(2)}
    handle = pack(obj)
    assert same(handle.unpack(), obj)

    def add(d):
        d["c"] = d["c"] + 1

    graftax.jit(add)(handle)
    assert same(handle.unpack(), {**obj, "c": 2.0 * jnp.ones(2)})


def test_small_arrays_share_a_buffer_and_big_ones_stand_apart():
    handle = pack(
        [jnp.ones(10), jnp.ones(10), jnp.ones(100), jnp.ones(2, jnp.int32), jnp.ones(3, jnp.int32)], max_bytes=40
    )
    assert repr(handle) == "<graftax.pack of 5 arrays, 500 bytes: 4 in 2 buffers, 1 apart>"
    assert len(jax.tree.leaves(handle)) == 3


def test_equal_layouts_are_one_object_and_die_with_the_handles():
    first, second = pack(Model()), pack(Model())
    assert first._layout is second._layout
    layout = weakref.ref(first._layout)
    del first, second
    gc.collect()
    assert layout() is None


@pytest.mark.parametrize("max_bytes", [-1, 1.5, "64", True])
def test_a_size_that_is_none_is_refused(max_bytes):
    with pytest.raises(ValueError, match="expected a whole number of bytes"):
        pack([jnp.ones(1)], max_bytes=max_bytes)


def test_packing_twice_is_refused():
    with pytest.raises(TypeError, match="packed already"):
        pack(pack([jnp.ones(1)]))


def test_a_value_that_cannot_be_walked_is_refused_at_its_path():
    with pytest.raises(graftax.UnsupportedValueError, match=r"\['it'\]"):
        pack({"it": iter([1])})


@pytest.mark.parametrize("make", [copy.deepcopy, lambda h: pickle.loads(pickle.dumps(h))], ids=["deepcopy", "pickle"])
def test_copies_have_arrays_of_their_own(make):
    handle = pack({"w": [jnp.ones(3), jnp.ones(4)], "big": jnp.ones(40000)})
    twin = make(handle)
    graftax.jit(lambda s: s["w"].append(s["w"][0] + s["big"][0]))(handle)
    assert same(twin.unpack(), {"w": [jnp.ones(3), jnp.ones(4)], "big": jnp.ones(40000)})


def test_update_replaces_what_is_inside():
    handle = pack([jnp.ones(2), jnp.ones(3)])
    handle.update([jnp.zeros(2), "text"])
    assert (
        same(handle.unpack(), [jnp.zeros(2), "text"]) and handle.graphdef == graftax.flatten([jnp.zeros(2), "text"])[1]
    )


# ---- in a call


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_a_function_is_given_what_was_packed(build):
    obj = build()
    handle = pack(obj)
    assert same(graftax.jit(lambda inside: inside)(handle), graftax.jit(lambda inside: inside)(obj))
    assert same(handle.unpack(), obj)


def test_a_changed_object_is_in_the_handle_afterwards():
    model, handle, step = Model(), pack(Model()), graftax.jit(decay)
    for i in range(4):
        assert step(handle, jnp.float32(i)) == decay(model, jnp.float32(i))
    assert same(handle.unpack(), model) and step.cache_info().traces == 1


def test_a_step_without_changes_returns_a_new_handle_and_uses_up_the_old():
    @graftax.jit
    def step(state, x):
        return pack({**state, "w": [w + x for w in state["w"]]}), x

    first = pack({"w": [jnp.zeros(2), jnp.zeros(3)], "name": "s"})
    second, _ = step(first, 1.0)
    third, _ = step(second, 1.0)
    assert same(third.unpack(), {"w": [2.0 * jnp.ones(2), 2.0 * jnp.ones(3)], "name": "s"})
    assert repr(first) == "<graftax.pack used up by step>" and step.cache_info().traces == 1
    for use in (lambda: first.unpack(), lambda: step(first, 1.0), lambda: first.update({}), lambda: first.graphdef):
        with pytest.raises(graftax.StructureError, match="used up by step, which returned a new one"):
            use()


def test_a_handle_that_does_not_donate_is_never_used_up():
    old = pack([jnp.zeros(2), jnp.zeros(3)], donate=False)
    new = graftax.jit(lambda s: pack([x + 1 for x in s]))(old)
    assert same(old.unpack(), [jnp.zeros(2), jnp.zeros(3)]) and same(new.unpack(), [jnp.ones(2), jnp.ones(3)])


def test_another_structure_returned_leaves_the_old_handle_alone():
    old = pack([jnp.zeros(2), jnp.zeros(3)])
    new = graftax.jit(lambda s: pack({"sum": s[0].sum(), "both": s}))(old)
    assert same(old.unpack(), [jnp.zeros(2), jnp.zeros(3)]) and isinstance(new, Packed)


def test_a_function_that_only_reads_leaves_the_handle_as_it_is():
    model, handle, read = Model(), pack(Model()), graftax.jit(lambda m: (m.layers[0].w.sum(), m.layers[0].name))
    for _ in range(3):
        assert read(handle) == (9, "layer 3")
    assert same(handle.unpack(), model)


def test_the_memory_of_a_handle_is_used_again():
    handle = pack({"w": [jnp.ones(3), jnp.ones(4)], "big": jnp.ones(40000)})
    before = jax.tree.leaves(handle)

    @graftax.jit
    def step(state):
        state["w"] = [2 * w for w in state["w"]]
        state["big"] = state["big"] + 1

    step(handle)
    assert all(x.is_deleted() for x in before) and handle.unpack()["big"][0] == 2


def test_the_objects_that_were_packed_keep_their_arrays():
    state = {"w": [jnp.ones(3), jnp.ones(4)], "big": jnp.ones(40000)}
    handle = pack(state)
    contents = handle.unpack()
    graftax.jit(lambda s: s["w"].pop())(handle)
    assert state["big"][0] == contents["big"][0] == 1 and len(contents["w"]) == 2


def test_without_copies_the_big_arrays_are_shared_until_they_are_donated():
    big = jnp.ones(40000)
    handle = pack([big, jnp.ones(2), jnp.ones(2)], copy=False)
    assert handle.unpack(copy=False)[0] is big
    graftax.jit(lambda s: s.append(s[0].sum()))(handle)
    assert big.is_deleted() and handle.unpack()[3] == 40000


def test_one_handle_in_two_arguments_is_one_object():
    def move(a, b):
        a.append(b[0] + 1)
        return a is b

    handle = pack([jnp.ones(2), jnp.ones(3)])
    assert graftax.jit(move)(handle, b=handle) is True
    assert len(handle.unpack()) == 3


def test_a_big_array_of_a_handle_may_be_another_argument_too():
    big = jnp.ones(40000)
    handle = pack([big, jnp.ones(2), jnp.ones(2)], copy=False)
    with pytest.raises(graftax.StructureError, match="is the same array and is kept"):
        graftax.jit(lambda s, x: s.append(x.sum()))(handle, big)
    assert not big.is_deleted()


def test_below_an_argument_and_in_a_closure_a_handle_is_a_handle():
    handle = pack([jnp.ones(2), jnp.ones(3)])

    def f(box):
        contents = handle.unpack()
        contents[0] = contents[0] + 1
        handle.update(contents)
        return type(box["h"]) is Packed and box["h"] is handle

    assert graftax.jit(f)({"h": handle}) is True
    assert same(handle.unpack(), [2.0 * jnp.ones(2), jnp.ones(3)])


def test_an_exception_leaves_the_handle_as_it_was():
    handle = pack([jnp.ones(2), jnp.ones(3)])

    def f(s):
        s[0] = s[0] + 1
        raise KeyError("no")

    with pytest.raises(KeyError):
        graftax.jit(f)(handle)
    assert same(handle.unpack(), [jnp.ones(2), jnp.ones(3)])


def test_by_value_nothing_is_written_and_nothing_donated():
    handle = pack([jnp.ones(2), jnp.ones(3)])
    buffer = jax.tree.leaves(handle)[0]
    with pytest.warns(graftax.LostChangeWarning, match="changed s"):
        graftax.filter_jit(lambda s: s.pop())(handle)
    graftax.jit(lambda s: s.pop(), mutation="discard")(handle)
    new = graftax.filter_jit(lambda s: pack([x + 1 for x in s]))(handle)
    assert not buffer.is_deleted() and same(handle.unpack(), [jnp.ones(2), jnp.ones(3)])
    assert same(new.unpack(), [2.0 * jnp.ones(2), 2.0 * jnp.ones(3)])


def test_a_change_is_an_error_where_changes_are():
    handle = pack([jnp.ones(2), jnp.ones(3)])
    with pytest.raises(graftax.MutationError, match="changed s"):
        graftax.jit(lambda s: s.pop(), mutation="error")(handle)
    assert same(handle.unpack(), [jnp.ones(2), jnp.ones(3)])


def test_without_jit_the_function_is_given_the_object_inside_too():
    model, handle = Model(), pack(Model())
    with jax.disable_jit():
        graftax.jit(decay)(handle, jnp.float32(1))
        new = graftax.jit(lambda s: pack([x + 1 for x in s]))(old := pack([jnp.ones(2), jnp.ones(3)]))
    decay(model, jnp.float32(1))
    assert same(handle.unpack(), model) and same(new.unpack(), [2.0 * jnp.ones(2), 2.0 * jnp.ones(3)])
    with pytest.raises(graftax.StructureError, match="used up"):
        old.unpack()


def test_new_shapes_dtypes_and_statics_inside_are_seen():
    @graftax.jit
    def grow(s):
        s["w"] = jnp.concatenate([s["w"], s["w"]])
        s["mode"] = s["mode"] + "!"
        return s["mode"]

    handle, plain = (
        pack({"w": jnp.ones(2), "v": jnp.ones(3), "mode": "a"}),
        {"w": jnp.ones(2), "v": jnp.ones(3), "mode": "a"},
    )
    for _ in range(3):
        assert grow(handle) == grow(plain)
    handle.update({**plain, "w": plain["w"].astype(jnp.bfloat16), "mode": "b"})
    plain.update(w=plain["w"].astype(jnp.bfloat16), mode="b")
    assert grow(handle) == grow(plain) == "b!" and same(handle.unpack(), plain)


def test_a_traced_number_stays_one():
    @graftax.jit
    def step(s):
        s["w"] = s["w"] * s["rate"].value

    handle = pack({"w": jnp.ones(2), "v": jnp.ones(2), "rate": graftax.Dynamic(0.5)})
    step(handle)
    step(handle)
    assert handle.unpack()["rate"].value == 0.5 and handle.unpack()["w"].tolist() == [0.25, 0.25]
    handle.update({**handle.unpack(), "rate": graftax.Dynamic(2.0)})
    step(handle)
    assert handle.unpack()["w"].tolist() == [0.5, 0.5] and step.cache_info().traces == 1


def test_it_can_be_checked_lowered_and_traced():
    handle, model = pack(Model()), Model()
    checked = graftax.jit(decay, check=True)
    checked(handle, jnp.float32(1)), decay(model, jnp.float32(1))
    assert same(handle.unpack(), model)
    compiled = graftax.jit(decay).lower(handle, jnp.float32(1)).compile()
    compiled(handle, jnp.float32(1)), decay(model, jnp.float32(1))
    assert same(handle.unpack(), model)
    shape = graftax.jit(lambda s: pack([x + 1 for x in s])).eval_shape(pack([jnp.ones(2), jnp.ones(3)]))
    assert [x.shape for x in shape.unpack()] == [(2,), (3,)]


def test_a_number_that_keeps_changing_is_named_where_it_stands():
    @graftax.jit
    def step(s):
        s["opt"]["count"] += 1
        s["w"] = s["w"] + 1

    handle = pack({"w": jnp.ones(2), "opt": {"count": 0}})
    with pytest.warns(graftax.RecompileWarning, match=r"s\['opt'\]\['count'\] keeps changing.*pack a jax.Array or"):
        for _ in range(12):
            step(handle)


# ---- with JAX's transforms and other libraries


def loss(params, x):
    for w, b in params:
        x = jnp.tanh(x @ w + b)
    return (x**2).sum()


def layers():
    keys = jax.random.split(jax.random.key(0), 3)
    return [(jax.random.normal(k, (4, 4)), jnp.zeros(4)) for k in keys]


@pytest.mark.quick(0)
def test_gradients_inside_a_call_are_those_of_the_objects():
    @graftax.jit
    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        params[:] = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return value

    handle, plain, x = pack(layers()), layers(), jnp.ones((2, 4))
    for _ in range(3):
        np.testing.assert_allclose(step(handle, x), step(plain, x), rtol=1e-6)
    for a, b in zip(jax.tree.leaves(handle.unpack()), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.quick(0)
def test_the_gradient_by_a_handle_is_a_handle():
    handle, x = pack(layers()), jnp.ones((2, 4))
    by_handle = jax.grad(lambda h: loss(h.unpack(), x))(handle)
    for a, b in zip(jax.tree.leaves(by_handle.unpack()), jax.tree.leaves(jax.grad(loss)(layers(), x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert len(jax.tree.leaves(by_handle)) == 1


def test_jax_maps_over_handles():
    stacked = jax.vmap(lambda i: pack([i, jnp.stack([i, i])]))(jnp.arange(3.0))
    sums = jax.vmap(lambda h: h.unpack()[1].sum())(stacked)
    assert sums.tolist() == [0, 2, 4]
    final, _ = jax.lax.scan(
        lambda h, _: (pack([x + 1 for x in h.unpack()]), None), pack([jnp.ones(2), jnp.ones(3)]), length=3
    )
    assert same(final.unpack(), [4.0 * jnp.ones(2), 4.0 * jnp.ones(3)])


def test_jax_jit_takes_a_handle():
    result = jax.jit(lambda h: pack([x + 1 for x in h.unpack()]))(pack([jnp.ones(2), jnp.ones(3)]))
    assert same(result.unpack(), [2.0 * jnp.ones(2), 2.0 * jnp.ones(3)])


@pytest.mark.quick(0)
def test_optax_works_on_what_is_inside_and_on_whole_buffers():
    optax = pytest.importorskip("optax")
    optimizer = optax.adamw(1e-2)

    @graftax.jit
    def step(state, x):
        params, opt = state
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, opt = optimizer.update(grads, opt, params)
        return pack((optax.apply_updates(params, updates), opt)), value

    @jax.jit
    def on_buffers(handle, opt, x):
        value, grads = jax.value_and_grad(lambda h: loss(h.unpack(), x))(handle)
        updates, opt = optimizer.update(grads, opt, handle)
        return optax.apply_updates(handle, updates), opt, value

    x = jnp.ones((2, 4))
    state, whole = pack((layers(), optimizer.init(layers()))), pack(layers())
    whole_opt = optimizer.init(whole)
    params, opt = layers(), optimizer.init(layers())
    for _ in range(3):
        expected, grads = jax.value_and_grad(loss)(params, x)
        updates, opt = optimizer.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
        state, value = step(state, x)
        whole, whole_opt, other = on_buffers(whole, whole_opt, x)
        np.testing.assert_allclose([value, other], expected, rtol=1e-5)
    for unpacked in (state.unpack()[0], whole.unpack()):
        for a, b in zip(jax.tree.leaves(unpacked), jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.quick(0)  # as the one of nnx below
def test_an_equinox_model_is_trained_packed():
    eqx, optax = pytest.importorskip("equinox"), pytest.importorskip("optax")
    optimizer = optax.adam(1e-2)

    def objective(model, x):
        return (jax.vmap(model)(x) ** 2).sum()

    def step(model, opt, x):
        grads = eqx.filter_grad(objective)(model, x)
        updates, opt = optimizer.update(grads, opt)
        return eqx.apply_updates(model, updates), opt

    model = eqx.nn.MLP(3, 2, 4, 2, key=jax.random.key(0))
    opt = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    packed = graftax.jit(lambda state, x: pack(step(*state, x)))
    state, x = pack((model, opt)), jnp.ones((5, 3))
    for _ in range(3):
        state = packed(state, x)
        model, opt = step(model, opt, x)
    unpacked = state.unpack()[0]
    assert unpacked.activation is model.activation and packed.cache_info().traces == 1
    for a, b in zip(
        jax.tree.leaves(eqx.filter(unpacked, eqx.is_array)),
        jax.tree.leaves(eqx.filter(model, eqx.is_array)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.quick(0)
def test_an_nnx_model_and_optimizer_are_trained_packed():
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(3, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(self.norm(self.inner(x))).sum(-1)

    def make():
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def step(state, x):
        model, optimizer = state
        value, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return value

    plain, handle, jitted, x = make(), pack(make()), graftax.jit(step), jnp.arange(12.0).reshape(4, 3)
    for _ in range(3):
        np.testing.assert_allclose(jitted(handle, x), jitted(plain, x), rtol=1e-5)
    a, b = nnx.state(handle.unpack()[0]), nnx.state(plain[0])
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.quick(0)
def test_replicated_arrays_are_packed_where_they_are_and_sharded_ones_stand_apart():
    python(
        textwrap.dedent(
            """
            import jax, jax.numpy as jnp, graftax
            from jax.sharding import NamedSharding, PartitionSpec as P

            mesh = jax.make_mesh((8,), ("x",))
            everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))
            state = {
                "a": [jax.device_put(jnp.ones(4), everywhere) for _ in range(3)],
                "b": [jax.device_put(jnp.ones(8), split) for _ in range(3)],
            }
            handle = graftax.pack(state)
            assert len(jax.tree.leaves(handle)) == 4, handle
            out = handle.unpack()
            assert all(x.sharding == everywhere for x in out["a"]) and all(x.sharding == split for x in out["b"])

            def step(s):
                s["a"] = [x + 1 for x in s["a"]]
                s["b"] = [x + 1 for x in s["b"]]

            f = graftax.jit(step)
            f(handle), f(handle)
            out = handle.unpack()
            assert all(x.sharding.is_fully_replicated and (x == 3).all() for x in out["a"])
            assert all(x.sharding.is_equivalent_to(split, 1) and (x == 3).all() for x in out["b"]), out
            first, second = jax.devices()[:2]
            apart = graftax.pack([jax.device_put(jnp.ones(2), d) for d in (first, second)] * 2 + [jnp.ones(2)])
            assert [next(iter(x.devices())) for x in apart.unpack()] == [first, second, first, second, first]
            assert [x.committed for x in apart.unpack()] == [True] * 4 + [False]
            """
        ),
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )
