# SPDX-License-Identifier: Apache-2.0
"""What `save` writes, `load` gives back: every kind of graph, array and value."""

import concurrent.futures
import datetime
import decimal
import enum
import fractions
import functools
import json
import math
import os
import pathlib
import stat
import tracemalloc
import uuid
import zoneinfo
from collections import OrderedDict, deque

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import given
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import graftax
import oracle
import zoo
from strategies import graphs
from zoo import Box

safe_open = pytest.importorskip("safetensors").safe_open

KNOWN = ("zoo", "math", "types", "callables", "strategies", "plain")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.safetensors"


def tensors(path):
    with safe_open(path, "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)


def round_trip(path, obj, **options):
    graftax.save(path, obj)
    return graftax.load(path, **options)


@pytest.mark.quick(12)
@pytest.mark.parametrize("name", [name for name in zoo.NAMES if not name.startswith("statics")])
def test_the_zoo_comes_back(path, name):
    obj = dict(zoo.ZOO)[name]()
    new = round_trip(path, obj, classes=KNOWN)
    assert graftax.equal(new, obj)
    assert graftax.flatten(new)[1] == graftax.flatten(obj)[1]
    tensors(path)  # the package takes it, too


@pytest.mark.quick(12)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_the_zoo_comes_back_like_itself(path, name):
    build = dict(zoo.ZOO)[name]
    obj, like = build(), build()
    new = round_trip(path, obj, like=like)
    assert graftax.equal(new, obj)
    if like is not None and name not in ("array", "typed_key"):
        mutable = any(hasattr(like, a) for a in ("append", "update")) or isinstance(like, (Box, zoo.Node))
        mutable = mutable and not isinstance(like, set)
        if mutable:
            assert graftax.load(path, like, into=True) is like
            assert graftax.equal(like, obj)


def test_values_come_back(path):
    values = [v for v in zoo.statics() if v is not zoo.SENTINEL]
    new = round_trip(path, values, classes=KNOWN)
    assert all(a is b or (type(a) is type(b) and repr(a) == repr(b)) for a, b in zip(new, values, strict=True))


@given(graphs())
def test_any_graph_comes_back(tmp_path_factory, recipe):
    path, graph = tmp_path_factory.mktemp("any") / "x.safetensors", recipe.build()
    graftax.save(path, graph)
    assert oracle.difference(graph, graftax.load(path, recipe.build())) is None
    try:
        reloaded = graftax.load(path, classes=KNOWN)
    except graftax.LoadError as error:
        assert "only like= can give" in str(error)
    else:
        assert oracle.difference(graph, reloaded) is None


DTYPES = [np.dtype(name) for name in "?bhilBHILefdFD"] + [
    np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "int2", "int4", "uint2", "uint4", *(n for n in dir(ml_dtypes) if n.startswith("float8_")))
]


@pytest.mark.quick(10)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(path, dtype):
    host = np.asarray(np.arange(6).reshape(2, 3) % 2, np.float32).astype(dtype)
    obj = {"numpy": host, "scalar": host[0, 1], "zero": host[()][1, 1].reshape(()), "none": host[:0]}
    with jax.enable_x64(True):
        obj["jax"] = jnp.asarray(host)
    new = round_trip(path, obj)
    for name, value in obj.items():
        assert type(new[name]) is type(value) and new[name].dtype == value.dtype and new[name].shape == value.shape
        assert np.asarray(new[name]).tobytes() == np.asarray(value).tobytes()
    tensors(path)


def test_what_a_tensor_does_not_say_comes_back(path):
    obj = {
        "weak": jnp.asarray(2.0) * 1,
        "literal": jax.jit(lambda: 3.0)(),
        "key": jax.random.key(3, impl="rbg"),
        "keys": jax.random.split(jax.random.key(3), (2, 3)),
        "raw": jax.random.PRNGKey(0),
        "numpy": np.ones(2),
        "jax": jnp.ones(2),
        "number": np.float64(2.5),
    }
    new = round_trip(path, obj)
    assert graftax.equal(new, obj)
    assert [new[name].weak_type for name in ("weak", "literal", "jax")] == [True, True, False]
    assert str(jax.random.key_impl(new["key"])) == "rbg"
    assert isinstance(new["numpy"], np.ndarray) and isinstance(new["jax"], jax.Array)


def test_the_layout_of_numpy_arrays_does_not_matter(path):
    base = np.arange(12.0).reshape(3, 4)
    obj = [np.asfortranarray(base), base[::-1], base[:, ::-2], base.T, np.broadcast_to(base, (2, 3, 4)), base[1:, 1]]
    for one, other in zip(round_trip(path, obj), obj, strict=True):
        assert np.array_equal(one, other) and one.flags.c_contiguous
    assert np.array_equal(tensors(path)["[0]"], base)


def test_a_numpy_array_can_be_written_to_and_the_file_stays(path):
    obj = round_trip(path, {"a": np.zeros(1000)})
    obj["a"][:] = 1
    assert graftax.load(path)["a"].sum() == 0


def test_arrays_on_a_cpu_are_not_copied(path):
    graftax.save(path, {"w": np.zeros((64, 1024), np.float32), "b": jnp.zeros(16)})
    new = graftax.load(path, {"w": jnp.ones((64, 1024)), "b": jnp.zeros(16)})
    lazy = graftax.load(path, lazy=True)
    assert isinstance(lazy["w"], np.ndarray) and isinstance(lazy["b"], np.ndarray)
    assert new["w"].unsafe_buffer_pointer() % 4096 == lazy["w"].ctypes.data % 4096
    assert jax.jit(lambda w: w + 1, donate_argnums=0)(new["w"]).sum() == 64 * 1024
    assert graftax.load(path)["w"].sum() == 0


class Rights(enum.Flag):
    READ, WRITE = 1, 2


class Bits(enum.IntFlag, boundary=enum.KEEP):
    LOW = 1


class Count(int):
    """Of a class that keeps nothing beside the number."""


class Label(str):
    __slots__ = ()


VALUES = [
    10**400,
    -(1 << 63),
    1 << 63,
    -0.0,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
    complex(-0.0, math.nan),
    b"\0\xff",
    "\ud800",
    "\0",
    ...,
    NotImplemented,
    range(1, 10, 3),
    slice(1, None, 2),
    np.dtype("float64"),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype("<U3"),
    np.dtype("M8[ns]"),
    jnp.float32,
    np.float32,
    int,
    jax.nn.relu,
    jnp.tanh,
    datetime.date(2020, 2, 29),
    datetime.datetime(2020, 2, 29, 1, 2, 3, 4),
    datetime.datetime(2020, 2, 29, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "here"), fold=1),
    datetime.datetime(2020, 2, 29, tzinfo=datetime.UTC),
    datetime.time(1, 2, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    datetime.timedelta(1, 2, 3),
    decimal.Decimal("1.10"),
    fractions.Fraction(1, 3),
    uuid.UUID(int=5),
    pathlib.Path("a/b"),
    pathlib.PurePosixPath("/a"),
    pathlib.PureWindowsPath("c:\\a"),
    PartitionSpec("data", None, ("a", "b")),
    np.array(["a", "bc"]),
    np.datetime64("2020-01-01"),
    np.str_("x"),
    zoo.Color.RED,
    Rights.READ | Rights.WRITE,
    Bits(9),
    Count(3),
    Label("x"),
    math,
    functools.partial(jnp.sum, axis=0),
    frozenset({1, 2}),
    deque([1], maxlen=3),
    OrderedDict(b=1, a=2),
    bytearray(b"ab"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:30])
@pytest.mark.quick(200)  # a case takes milliseconds
def test_a_value_comes_back(path, value):
    new = round_trip(path, {"v": value, "w": jnp.ones(1)}, classes=(*KNOWN, Rights, Bits, Count, Label))["v"]
    assert type(new) is type(value)
    assert new is value or repr(new) == repr(value)


def test_keys_of_every_kind_come_back(path):
    obj = {1: 0, True.__class__: 1, "a.b": {"c": 2}, "a": {"b.c": 3}, None: 4, (1, ("x", 2.5)): jnp.ones(1), -3: 5}
    obj |= {"1": 6, 1.5: 7, b"k": 8, frozenset({1}): 9, zoo.Color.RED: 10, "": 11, "__metadata__": jnp.zeros(2)}
    new = round_trip(path, obj, classes=KNOWN)
    assert graftax.equal(new, obj) and list(new) == list(obj)
    tensors(path)


def test_a_shared_array_is_there_once_and_names_are_paths(path):
    w = jnp.arange(3.0)
    layer = Box(w=w)
    obj = {"layers": [layer, layer], "tied": w, "own": jnp.ones(1)}
    new = round_trip(path, obj, classes=["zoo.Box"])
    assert set(tensors(path)) == {"[layers][0].w", "[own]"}
    assert new["layers"][0] is new["layers"][1] and new["tied"] is new["layers"][0].w


def test_names_of_two_paths_never_collide(path):
    obj = {"a": {"b": jnp.ones(1)}, "a][b": jnp.zeros(2), "x" * 900: jnp.ones(3), "x" * 901: jnp.ones(4)}
    obj |= {"\ud800": jnp.ones(5), "\\ud800": jnp.ones(6)}
    assert graftax.equal(round_trip(path, obj), obj)
    assert len(tensors(path)) == 6


def test_a_deep_graph_comes_back(path):
    obj = None
    for i in range(3000):
        obj = [i, obj]
    new = round_trip(path, [obj, jnp.ones(1)])[0]
    for _ in range(3000):
        new = new[1]
    assert new is None


def test_libraries_come_back(path):
    model = eqx.nn.MLP(2, 3, 4, 2, key=jax.random.key(0))
    with pytest.raises(graftax.LoadError, match="lambda"):
        round_trip(path, model)
    new = graftax.load(path, eqx.nn.MLP(2, 3, 4, 2, key=jax.random.key(1)))
    assert eqx.tree_equal(model, new) and type(new) is eqx.nn.MLP
    x = jnp.ones(2)
    assert jnp.array_equal(new(x), model(x))


def test_numbers_that_a_class_calls_data_come_back(path):
    def state(step):
        return TrainState.create(apply_fn=len, params={"w": jnp.ones(2)}, tx=adam).replace(step=step)

    adam = optax.adam(1e-2)
    for saved, like, kind in [(3, 0, int), (jnp.asarray(3), 0, int), (3, jnp.asarray(0), jax.Array)]:
        graftax.save(path, state(saved))
        new = graftax.load(path, state(like)).step
        assert isinstance(new, kind) and new == 3
    train_state = state(0)
    graftax.save(path, train_state.apply_gradients(grads={"w": jnp.ones(2)}))
    new = graftax.load(path, train_state)
    assert new.step == 1 and new.opt_state[0].count == 1
    graftax.save(path, {"a": jnp.asarray(3)})
    with pytest.raises(graftax.LoadError, match="an array of int32"):
        graftax.load(path, {"a": 0})


def test_exceptions_come_back(path):
    graftax.save(path, [ValueError("text", 1), jnp.ones(2)])
    new = graftax.load(path, classes=[ValueError])
    assert type(new[0]) is ValueError and new[0].args == ("text", 1)


def nnx_model(seed):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(2, 3, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.norm = nnx.BatchNorm(3, rngs=rngs)

    return Net(nnx.Rngs(seed))


def test_nnx_modules_come_back(path):
    model, like = nnx_model(0), nnx_model(1)
    model.norm.mean[...] += 1
    graftax.save(path, model)
    assert graftax.load(path, like, into=True) is like
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), nnx.state(model), nnx.state(like))))
    assert isinstance(like.linear.kernel, nnx.Param) and like.norm.mean[0] == 1


def test_optimizers_come_back(path):
    params = {"w": jnp.ones(3), "b": jnp.zeros(())}
    tx = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    state = tx.init(params)
    _, state = tx.update(params, state, params)
    new = round_trip(path, state)
    assert graftax.equal(new, state)

    model = {"w": jnp.ones(3)}
    opt = graftax.optimizer(optax.adam(1e-2), model)
    graftax.save(path, (model, opt))
    new_params = {"w": jnp.zeros(3)}
    new_model, new_opt = graftax.load(path, (new_params, graftax.optimizer(optax.adam(1e-3), new_params)))
    assert jnp.array_equal(new_model["w"], model["w"]) and type(new_opt) is type(opt)


def test_meshes_are_saved_by_their_axes(path):
    mesh = jax.make_mesh((1,), ("data",))
    obj = {"mesh": mesh, "sharding": NamedSharding(mesh, PartitionSpec("data")), "x": jnp.ones(2)}
    new = round_trip(path, obj, mesh=mesh)
    assert new["mesh"] is mesh and new["sharding"] == obj["sharding"]
    assert round_trip(path, obj)["mesh"].shape == mesh.shape


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", list(AxisType), ids=str)
def test_a_mesh_keeps_the_types_of_its_axes(path, kind):
    mesh = jax.make_mesh((1, 1), ("a", "b"), axis_types=(kind, AxisType.Auto))
    abstract = AbstractMesh((2, 3), ("a", "b"), axis_types=(kind, AxisType.Auto))
    obj = {"mesh": mesh, "abstract": abstract, "sharding": NamedSharding(mesh, PartitionSpec("b")), "x": jnp.ones(2)}
    for options in ({}, {"like": obj | {"x": jnp.zeros(2)}}):
        new = round_trip(path, obj, **options)
        assert all(new[name] == obj[name] for name in ("mesh", "abstract", "sharding"))


def test_only_some_arrays_are_written(path):
    obj = {"a": jnp.ones(2), "b": jnp.ones(3), "n": 4}
    graftax.save(path, obj, only="a")
    assert set(tensors(path)) == {"[a]"}
    like = {"a": jnp.zeros(2), "b": jnp.zeros(3), "n": 0}
    new = graftax.load(path, like)
    assert new["a"].sum() == 2 and new["b"] is like["b"] and new["n"] == 4
    with pytest.raises(graftax.LoadError, match="left out"):
        graftax.load(path)


def test_floating_arrays_are_written_in_another_dtype(path):
    key = jax.random.key(0)
    graftax.save(path, {"a": jnp.ones(2), "i": jnp.arange(2), "k": key, "n": np.ones(2)}, dtype=jnp.bfloat16)
    new = graftax.load(path)
    assert [str(new[name].dtype) for name in "ain"] == ["bfloat16", "int32", "bfloat16"]
    assert graftax.equal(new["k"], key)
    with pytest.raises(ValueError, match="floating"):
        graftax.save(path, {"w": jnp.ones(2)}, dtype="int32")


def test_texts_are_kept_with_it(path):
    graftax.save(path, [jnp.ones(2)], metadata={"run": "7"})
    assert graftax.peek(path).metadata == {"run": "7"}
    with safe_open(path, "np") as file:
        assert file.metadata()["run"] == "7"
    with pytest.raises(TypeError, match="strings"):
        graftax.save(path, [], metadata={"run": 7})
    with pytest.raises(ValueError, match="reserves"):
        graftax.save(path, [], metadata={"graftax": "{}"})
    with pytest.raises(ValueError, match="lone surrogate"):
        graftax.save(path, {"w": jnp.ones(2)}, metadata={"run": "\ud800"})


def test_what_no_file_can_hold_is_refused_with_its_path(path):
    deleted = jnp.ones(2) + 1
    deleted.delete()
    for value, message in [(deleted, "deleted"), ({object()}, "element of a set")]:
        with pytest.raises(graftax.UnsupportedValueError, match=message) as caught:
            graftax.save(path, {"a": [value]})
        assert "a" in str(caught.value)
    with pytest.raises(graftax.UnsupportedValueError, match="tracer"):
        jax.jit(lambda x: graftax.save(path, {"a": x}))(jnp.ones(1))
    assert not list(path.parent.iterdir())


def test_shapes_without_data_are_refused_with_their_path(path):
    shapes = graftax.eval_shape(lambda: {"w": jnp.ones(2), "b": jnp.ones(())})
    with pytest.raises(
        graftax.UnsupportedValueError, match=r"obj\[model\]\[w\]: .*Save what the function itself returns"
    ):
        graftax.save(path, {"model": shapes, "epoch": 3})
    assert not list(path.parent.iterdir())
    graftax.save(path, {"input": jax.ShapeDtypeStruct((2,), jnp.float32), "w": jnp.ones(2)})  # a value among others
    assert graftax.load(path, {"input": 0, "w": jnp.zeros(2)})["w"].sum() == 2


@pytest.mark.quick(0)
def test_loading_takes_memory_for_a_node_and_not_for_each_field_of_its_instruction(path):
    graftax.save(path, [{"n": i} for i in range(2000)])
    graftax.load(path)
    tracemalloc.start()
    try:
        graftax.load(path)
        assert tracemalloc.get_traced_memory()[1] < 2700 * 2000  # a dict of each instruction: 3,400 bytes a node
    finally:
        tracemalloc.stop()


# ---- who may read a file, and several that write one


@pytest.mark.skipif(os.name == "nt", reason="other permissions")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
@pytest.mark.parametrize("most", ["50GB", 8])
def test_a_file_that_is_replaced_keeps_its_permissions(mode, most, tmp_path):
    path = tmp_path / "x.safetensors"
    graftax.save(path, {"a": jnp.ones(2)})
    path.chmod(mode)
    graftax.save(path, {"a": jnp.ones(2), "b": jnp.zeros(2)}, max_file=most)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {mode}


def test_several_that_save_under_one_name_leave_one_file_with_its_parts(tmp_path):
    path, saved = tmp_path / "x.safetensors", {f"w{i}": jnp.full(8, i) for i in range(5)}

    def save_and_load(number):
        for _ in range(4):
            graftax.save(path, saved, max_file=32 * (1 + number % 2))
            assert graftax.load(path)["w4"][0] == 4

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        list(threads.map(save_and_load, range(6)))
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    listed = json.loads(header["__metadata__"]["graftax"])["parts"]
    assert {file.name for file in tmp_path.iterdir()} == {path.name, *listed}


@pytest.mark.parametrize("like", [False, True])
def test_keys_and_refs_are_what_they_are_in_a_lazy_load(like, tmp_path):
    saved = {"key": jax.random.key(3), "ref": jax.new_ref(jnp.ones(2)), "w": jnp.ones(2)}
    graftax.save(tmp_path / "x", saved)
    loaded = graftax.load(tmp_path / "x", saved if like else None, lazy=True)
    assert loaded["key"].dtype == saved["key"].dtype and jnp.array_equal(
        jax.random.key_data(loaded["key"]), jax.random.key_data(saved["key"])
    )
    assert type(loaded["ref"]) is type(saved["ref"]) and loaded["ref"][...].tolist() == [1, 1]
    assert type(loaded["w"]) is np.ndarray
