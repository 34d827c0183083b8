# SPDX-License-Identifier: Apache-2.0
"""`Module` and `field`: classes that JAX's own functions open, too."""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import pickle
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftax
from zoo import f32

T = TypeVar("T")


class Linear(graftax.Module):
    weight: Any
    bias: Any
    name: str = graftax.field(static=True, default="linear")

    def __call__(self, x: Any) -> Any:
        return x @ self.weight + self.bias


class Net(graftax.Module):
    def __init__(self) -> None:
        self.inner = Linear(jnp.eye(2), jnp.zeros(2), name="inner")
        self.layers = [self.inner, self.inner]

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x.sum()


class Cell(graftax.Module):
    value: Any = None
    other: Any = None


class Tagged(graftax.Module, static=["tag"]):
    tag: Any
    w: Any


def linear() -> Linear:
    return Linear(jnp.ones((2, 2)), jnp.zeros(2))


def structure(x: Any) -> Any:
    return jax.tree.structure(x)


# ---- the class


def test_the_init_is_generated_or_the_class_s_own():
    assert Linear(1, 2).name == "linear" and Linear(weight=1, bias=2, name="x").name == "x"
    with pytest.raises(TypeError, match="'bias'"):
        Linear(1)

    class Wide(Linear):
        extra: Any = 5

    assert (Wide(1, 2).extra, Wide(1, 2, "n", 7).extra) == (5, 7)

    class Own(Linear):
        def __init__(self, size: int) -> None:
            super().__init__(jnp.ones(size), jnp.zeros(size))
            self.size = size

    class Below(Own):
        other: Any = 3

    assert Own(2).size == Below(2).size == 2 and Below(2).other == 3 and Own(2).weight.shape == (2,)

    class Keywords(Linear, kw_only=True):
        must: Any

    assert Keywords(1, 2, must=3).must == 3
    with pytest.raises(TypeError):
        Keywords(1, 2, "n", 3)

    class After(graftax.Module):
        w: Any

        def __post_init__(self) -> None:
            self.double = self.w * 2

    assert After(2).double == 4 and jax.tree.leaves(After(2)) == [2, 4]


def test_what_the_class_statement_refuses():
    with pytest.raises(ValueError, match=r"mutable default .*default_factory"):

        class Mutable(graftax.Module):
            items: list[int] = []  # noqa: RUF012 - the error is the point

    with pytest.raises(TypeError, match="has no field 'nmae'"):

        class Typo(graftax.Module, static=["nmae"]):
            name: str

    with pytest.raises(TypeError, match=r"give a list of names: \['name'\]"):

        class OneName(graftax.Module, static="name"):
            name: str

    with pytest.raises(TypeError, match="give static= or dynamic="):

        class Two(graftax.Module, static=["name"], dynamic=["name"]):
            name: str


def test_abstract_and_generic_classes_properties_and_slots():
    class Base(graftax.Module, abc.ABC):
        w: Any

        @abc.abstractmethod
        def __call__(self) -> Any: ...

    class Real(Base):
        def __call__(self) -> Any:
            return self.w

        @property
        def double(self) -> Any:
            return self.w * 2

        @double.setter
        def double(self, value: Any) -> None:
            self.w = value / 2

    with pytest.raises(TypeError, match="abstract"):
        Base(1)  # type: ignore[abstract]
    real = Real(f32(2))
    graftax.jit(lambda m: setattr(m, "double", f32(10)))(real)
    assert real() == 5 and jax.jit(lambda m: m.double)(real) == 10

    class Of(graftax.Module, Generic[T]):
        value: T

    one, two = Of[int](f32(1)), Of[str](f32(1))
    assert jax.tree.leaves(one) == [f32(1)] and structure(one) != structure(two)
    assert jax.jit(lambda m: m)(one).value == 1 and graftax.jit(lambda m: m)(one) is one

    class Slots(graftax.Module):
        __slots__ = ("a",)
        a: Any

    assert jax.tree.map(lambda x: x + 1, Slots(1)).a == 2


def test_identity_pickling_copying():
    a, b = linear(), linear()
    assert a == a and a != b and len({a, b}) == 2
    net = Net()
    net.back = net
    for twin in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net), graftax.copy(net)):
        assert twin.layers[0] is twin.layers[1] is twin.inner is not net.inner and twin.back is twin
        assert graftax.equal(twin, net)
    assert pickle.loads(pickle.dumps(structure(linear()))) == structure(linear())
    assert dataclasses.replace(linear(), name="new").name == "new"


def test_repr():
    assert repr(linear()) == "Linear(weight=f32[2,2], bias=f32[2], name='linear')"
    net = Net()
    net.me = (net,)
    assert repr(net).replace("\n", "").replace("  ", "") == (
        "Net(inner=Linear(weight=f32[2,2], bias=f32[2], name='inner'),"
        "layers=[<Linear at .inner>, <Linear at .inner>],me=(<Net at the root>,))"
    )

    class Pair(NamedTuple):
        left: Any
        right: Any

    cell = Cell()
    cell.value = Pair(cell, 1)
    assert "Pair(left=<Cell that contains this>" in repr(cell) and repr(cell) == repr(cell)
    wide = repr(Cell([Cell(i) for i in range(1000)]))
    assert "... 980 more" in wide and len(wide) < 2000
    deep = Cell(0)
    for _ in range(20_000):
        deep = Cell(deep)
    assert "..." in repr(deep) and len(repr(deep)) < 5000

    class Short(graftax.Module):
        w: Any

        def __repr__(self) -> str:
            return "short"

    assert repr(Cell(Short(1))) == "Cell(value=short, other=None)"
    assert repr(Cell(np.ones(2), jax.random.key(0))).startswith("Cell(value=f64[2] ndarray, other=key<")


def test_repr_shows_what_is_in_slots():
    class Slotted(graftax.Module):
        __slots__ = ("b", "w")

        def __init__(self, w: Any) -> None:
            self.w = w

    m = Slotted(f32(1, 2))
    m.extra = 3
    name = "test_repr_shows_what_is_in_slots.<locals>.Slotted"
    assert repr(m) == f"{name}(extra=3, w=f32[2])"


def test_the_init_is_generated_beside_a_protocol():
    class Callable_(Protocol):
        def __call__(self) -> Any: ...

    class Real(graftax.Module, Callable_):
        w: Any

        def __call__(self) -> Any:
            return self.w

    class Below(Real):
        b: Any = 2

    assert Real(3)() == 3 and (Below(3).b, Below(3, 4).b) == (2, 4)
    assert jax.tree.leaves(Below(3)) == [3, 2]


def test_a_dataclass_decorator_with_slots_is_refused():
    with pytest.raises(TypeError, match=r"Model is a dataclass already.*leave dataclass\(slots=True\) off"):

        @dataclasses.dataclass(slots=True)
        class Model(graftax.Module):
            w: Any
            name: str = graftax.field(static=True, default="model")


def test_attributes_come_and_go():
    m = linear()
    before = structure(m)
    m.extra = f32(1)
    assert len(jax.tree.leaves(m)) == 3 and jax.tree.map(lambda x: x, m).extra is m.extra
    del m.extra
    assert structure(m) == before
    del m.bias
    assert len(jax.tree.leaves(m)) == 1 and not hasattr(jax.tree.map(lambda x: x, m), "bias")
    m.bias = f32(0, 0)
    assert structure(m) == before, "fields count in the order of the class"

    @graftax.jit
    def grow(m: Any) -> None:
        m.count = m.bias + 1
        del m.weight

    grow(m)
    assert m.count.tolist() == [1, 1] and not hasattr(m, "weight")


def test_static_and_dynamic_are_inherited():
    class Below(Tagged):
        more: Any = 1

    assert jax.tree.leaves(Below("t", 2)) == [2, 1]

    class Only(graftax.Module, dynamic=["w"]):
        w: Any
        size: Any = 3

    class Wider(Only):
        b: Any = 4

    assert jax.tree.leaves(Only(1)) == [1] and jax.tree.leaves(Wider(1)) == [1, 4]
    assert Wider(1).size == jax.tree.map(lambda x: x, Wider(1)).size == 3


# ---- in JAX and what is written for it


def test_static_values_are_compared_with_their_types():
    traces = []

    @jax.jit
    def f(m: Any) -> Any:
        traces.append(m.tag)
        return m.w

    for tags in ([1, True, 1.0], ["a", b"a"], [0.0, -0.0], [[1], (1,)], [{"a": 1}, {"a": True}]):
        for tag in tags + tags:
            traces.clear() if tag is None else f(Tagged(tag, f32(1)))
        assert len(traces) == len(tags)
        traces.clear()
    tagged = Tagged(np.ones(2), f32(1))
    f(tagged), f(Tagged(np.ones(2), f32(1)))
    tagged.tag = np.zeros(2)
    f(tagged)
    assert len(traces) == 2
    changing = Tagged(["x"], f32(1))
    traces.clear()
    f(changing)
    changing.tag.append("y")
    f(changing)
    assert len(traces) == 2, "a static list that was changed is another one"


@pytest.mark.quick(0)
def test_jit_grad_vmap_and_scan_of_jax():
    m = linear()
    assert jax.jit(lambda m, x: m(x))(m, jnp.ones(2)).tolist() == [2, 2]
    grads = jax.grad(lambda m: m(jnp.ones(2)).sum())(m)
    assert type(grads) is Linear and grads.bias.tolist() == [1, 1] and grads.name == "linear"
    batch = jax.vmap(lambda k: Linear(k * jnp.ones((2, 2)), jnp.zeros(2)))(jnp.arange(3.0))
    assert batch.weight.shape == (3, 2, 2)
    assert jax.vmap(lambda m, x: m(x), in_axes=(0, None))(batch, jnp.ones(2)).shape == (3, 2)
    axes = Linear(0, None)
    assert jax.vmap(lambda m: m(jnp.ones(2)), in_axes=(axes,))(Linear(batch.weight, m.bias)).shape == (3, 2)
    carry, _ = jax.lax.scan(lambda m, _: (jax.tree.map(lambda w: w + 1, m), None), m, length=3)
    assert carry.bias.tolist() == [3, 3]
    assert jax.lax.cond(True, lambda m: m, lambda m: m, m).weight.shape == (2, 2)
    jacobian = jax.jacobian(lambda m: Linear(m.weight * 2, m.bias))(m)
    assert jacobian.weight.weight.shape == (2, 2, 2, 2) and jacobian.weight.bias.shape == (2, 2, 2)
    assert jax.eval_shape(lambda m: m, m).weight.shape == (2, 2)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path({"m": m})]
    assert paths == ["['m'].weight", "['m'].bias"]
    assert jax.tree_util.tree_map_with_path(lambda path, w: len(path), m).bias == 1


def test_a_mismatch_names_what_differs():
    with pytest.raises(ValueError, match=r"(?s)Linear.*name='a'.*name='b'"):
        jax.tree.map(lambda a, b: a, Linear(1, 2, "a"), Linear(1, 2, "b"))


def test_optax():
    m = linear()

    def loss(m: Any) -> Any:
        return (m(jnp.ones(2)) ** 2).sum()

    for optimizer in (
        optax.adam(0.1),
        optax.masked(optax.sgd(0.1), Linear(True, False)),
        optax.multi_transform({"a": optax.sgd(0.1), "b": optax.adam(0.1)}, lambda m: Linear("a", "b")),
    ):
        state = optimizer.init(m)

        @jax.jit
        def step(m: Any, state: Any, optimizer: Any = optimizer) -> Any:
            updates, state = optimizer.update(jax.grad(loss)(m), state, m)
            return optax.apply_updates(m, updates), state

        new, state = step(m, state)
        assert structure(new) == structure(m) and not jnp.array_equal(new.weight, m.weight)
        assert structure(step(new, state)[0]) == structure(m)


def test_equinox():
    m = linear()
    arrays, rest = eqx.partition(m, eqx.is_array)
    assert eqx.tree_equal(eqx.combine(arrays, rest), m)
    assert eqx.filter_jit(lambda m: m(jnp.ones(2)))(m).tolist() == [2, 2]
    assert eqx.filter_grad(lambda m: m(jnp.ones(2)).sum())(m).bias.tolist() == [1, 1]
    assert eqx.tree_at(lambda m: m.bias, m, None).bias is None


# ---- in graftax


def test_mutation_sharing_and_cycles_come_back():
    net = Net()
    net.back = net
    inner = net.inner

    @graftax.jit
    def step(net: Any) -> Any:
        net.back.inner.weight = net.inner.weight * 2
        net.seen = net.layers[1]
        return net.layers

    assert step(net) is net.layers and net.seen is inner is net.layers[0] and inner.weight[0, 0] == 2
    grads = graftax.grad(lambda net: net(jnp.ones(2)))(net)
    assert grads.layers[0] is grads.inner is grads.seen and grads.back is grads
    result, _ = graftax.scan(lambda m, _: (m, setattr(m, "bias", m.bias + 1)), linear(), length=2)
    assert result.bias.tolist() == [2, 2]
    stacked = graftax.vmap(lambda k: Linear(k, k))(jnp.arange(3.0))
    assert graftax.vmap(lambda m: m.weight + m.bias)(stacked).tolist() == [0, 2, 4]
    packed = graftax.pack(linear())
    assert graftax.equal(packed.unpack(), linear())


def test_graftax_tree_agrees_with_jax():
    for m in (linear(), Tagged([1], {"w": f32(1)}), Cell(linear(), [1, None])):
        assert graftax.tree.leaves(m) == jax.tree.leaves(m) or graftax.equal(graftax.tree.leaves(m), jax.tree.leaves(m))
        assert graftax.equal(graftax.tree.map(lambda x: x, m), jax.tree.map(lambda x: x, m))


def test_a_decorated_method():
    class Counter(graftax.Module):
        count: Any

        @graftax.jit
        def step(self, by: Any) -> Any:
            self.count = self.count + by
            return self

    counter = Counter(f32(0))
    assert counter.step(f32(2)) is counter and counter.step(f32(3)).count == 5


def test_a_static_field_may_close_a_cycle():
    class Part(graftax.Module):
        w: Any
        child: Any = None
        parent: Any = graftax.field(static=True, default=None)

    root = Part(f32(1))
    root.child = Part(f32(2), parent=root)
    assert len(jax.tree.leaves(root)) == 2
    assert jax.jit(lambda p: p.w + p.child.w)(root) == graftax.jit(lambda p: p.w + p.child.w)(root) == 3
    assert graftax.copy(root).child.parent.child.w is root.child.w


def test_field():
    declared = graftax.field(static=True, default=3, metadata={"unit": "m"})
    assert dict(declared.metadata) == {"unit": "m", "static": True} and declared.default == 3
    assert dict(graftax.field(default_factory=list).metadata) == {}
    with pytest.raises(ValueError, match="cannot specify both"):
        graftax.field(default=1, default_factory=list)


def test_a_cached_property_is_an_attribute_like_any_other():
    class Lazy(graftax.Module):
        w: Any

        @functools.cached_property
        def double(self) -> Any:
            return self.w * 2

    lazy = Lazy(f32(1))
    assert lazy.double == 2 and len(jax.tree.leaves(lazy)) == 2
    assert jax.jit(lambda m: m.double)(lazy) == 2


class Sized(graftax.Module):
    w: Any
    size: int
    dtype: Any = None
    rate: float | None = None
    name: str = graftax.field(static=True, default="sized")

    def __call__(self, x: Any) -> Any:
        return (self.w * x).sum() * self.size


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: Sized(f32(1), 3), r"Sized\.size holds 3, a Python number.*size: int = graftax\.field\(static=True\)"),
        (lambda: Sized(f32(1), f32(0), jnp.float32), r"Sized\.dtype holds .*, a dtype.*dtype: Any = graftax\.field"),
        (lambda: Sized(f32(1), f32(0), np.dtype("int8")), r"Sized\.dtype holds dtype\('int8'\)"),
        (lambda: Sized(f32(1), f32(0), None, 0.5), r"Sized\.rate holds 0\.5.*rate: float \| None = graftax\.field"),
    ],
)
def test_jax_does_not_take_a_number_or_a_dtype_that_is_not_declared(made: Any, words: str):
    optax = pytest.importorskip("optax")
    for call in (
        lambda m: jax.tree.map(lambda w: w, m),
        lambda m: jax.tree.leaves([{"in": m}]),
        jax.jit(lambda m: m.w),
        jax.grad(lambda m: m.w.sum()),
        lambda m: jax.vmap(lambda m: m.w)(m),
        lambda m: optax.adam(1e-3).init(m),
        lambda m: graftax.tree.leaves(m) if not isinstance(m.size, jax.Array) else jax.tree.leaves(m),
        graftax.jit(lambda m: jax.tree.map(lambda w: w * 2, m)),
    ):
        with pytest.raises(graftax.UnsupportedValueError, match=words):
            call(made())


def test_graftax_takes_it_and_statics_stay_in_gradients():
    optax = pytest.importorskip("optax")
    model = Sized(f32(1, 2), 3, jnp.float32, 0.5)
    grads = graftax.jit(graftax.grad(lambda m, x: m(x)))(model, 2.0)
    assert grads.name == "sized" and grads.size is None and (grads.w == 6).all()
    opt = graftax.optimizer(optax.sgd(1.0), model)
    opt.update(model, grads)
    assert (model.w == f32(1, 2) - 6).all() and model.size == 3 and model.dtype is jnp.float32
    assert graftax.copy(model).size == graftax.map_leaves(lambda w: w, model).size == 3


def test_what_is_declared_or_may_be_an_array_is_taken():
    class Static(graftax.Module):
        w: Any
        size: int = graftax.field(static=True, default=3)

    class Either(graftax.Module):
        size: jax.Array | float
        more: Any = 2

    class Dynamic(graftax.Module, dynamic=["size"]):
        size: int

    assert jax.tree.leaves(Static(f32(1))) == [1]
    assert jax.tree.leaves(Either(0.5)) == [0.5, 2]
    assert jax.tree.leaves(Dynamic(4)) == [4]
    assert jax.tree.map(lambda w: w + 1, Sized(f32(1), f32(2))).size == 3
    assert jax.tree.leaves(jax.tree.map(lambda w: w.ndim > 1, Sized(f32(1), f32(2)))) != []
