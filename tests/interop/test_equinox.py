# SPDX-License-Identifier: Apache-2.0
"""``equinox.Module``: every sort of field, method, wrapper and class, as argument, as result and as what is jitted."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equinox._module._flatten import MISSING
from jaxtyping import Array, Float, TypeCheckError, jaxtyped

import graftax
from zoo import f32

pytestmark = pytest.mark.quick(1)  # each case is there for jit and for filter_jit

MODES = pytest.mark.parametrize("jit", [graftax.jit, graftax.filter_jit], ids=["jit", "filter_jit"])
T = TypeVar("T")
KEY = jax.random.key(0)


def call(f, *args):
    return f(*args)


def traces(jitted):
    return jitted.cache_info().traces


class Scale(eqx.Module):
    w: jax.Array
    how: Any = eqx.field(static=True, default=None)

    def __call__(self, x):
        return self.w * x

    def twice(self, x: Float[Array, "..."], *more: "Scale", key: Callable[[int], T] | None = None) -> T | None:
        return self.w * x * 2


class Config:
    def __init__(self, n):
        self.n = n

    def size(self):
        return self.n


def double(x):
    return x * 2


class Colour(eqx.Enumeration):
    red = "the first"
    green = "the second"


# ── static fields ──

STATICS = {
    "string": ("a", "b"),
    "int": (1, 2),
    "type": (1, True),
    "tuple": ((1, ("x", None)), (1, ("y", None))),
    "frozenset": (frozenset({1, 2}), frozenset({1, 3})),
    "dict": ({"a": [1, 2]}, {"a": [1, 3]}),
    "dict_order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "list": ([1, 2], [2, 1]),
    "set": ({1}, {2}),
    "function": (double, call),
    "lambda": (lambda x: x, lambda x: x + 1),
    "builtin": (jnp.sin, jnp.cos),
    "class": (Scale, Config),
    "object": (Config(1), Config(2)),
    "dtype": (jnp.dtype("float32"), jnp.dtype("int32")),
    "partial": (functools.partial(jax.nn.leaky_relu, negative_slope=0.2), functools.partial(jnp.add, 1)),
    "bound": (Config(1).size, Config(2).size),
    "slice": (slice(1, 2), slice(1, 3)),
    "none": (None, ...),
    "module": (eqx.nn.Identity(), eqx.nn.Lambda(jnp.sin)),
    "treedef": (jax.tree.structure([1]), jax.tree.structure((1,))),
}


@MODES
@pytest.mark.parametrize("name", STATICS)
def test_a_static_field_is_part_of_the_key_and_of_the_result(name, jit):
    jitted = jit(lambda m, x: jax.tree.map(lambda w: w + x, m))
    one, other = STATICS[name]
    for value in (one, other, one):
        m = Scale(f32(1, 2), value)
        for _ in range(2):
            out = jitted(m, f32(1))
            assert jax.tree.structure(out) == jax.tree.structure(m)
            assert type(out.how) is type(value)
            np.testing.assert_array_equal(out.w, m.w + 1)
            m = jax.tree.map(lambda a, b: a + b, m, out)  # one structure before and after
    assert traces(jitted) == 2


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@MODES
def test_fields_of_a_static_value_are_no_leaves(jit):
    m = Scale(f32(1), ({"a": np.ones(2, np.float32)}, "x"))
    assert [x is m.w for x in graftax.flatten(m)[0]] == [True]
    out = jit(lambda m: m)(m)
    assert type(out.how[0]["a"]) is np.ndarray


@MODES
def test_a_static_object_is_itself_inside_and_outside(jit):
    config = Config(3)
    f = jit(lambda m: (m.how is config, m))
    for _ in range(2):
        same, out = f(Scale(f32(1), config))
        assert same and out.how is config


@MODES
def test_a_static_object_that_changes_is_seen(jit):
    m = Scale(f32(2), Config(3))
    f = jit(lambda m, x: m(x) * m.how.n)
    assert f(m, f32(1)).tolist() == [6.0]
    m.how.n = 5
    assert f(m, f32(1)).tolist() == [10.0]


# ── how modules are made ──


class Converted(eqx.Module):
    w: jax.Array = eqx.field(converter=jnp.asarray)
    sizes: tuple[int, ...] = eqx.field(converter=tuple, static=True)

    def __check_init__(self):
        made.append(self)
        if self.w.ndim != 1:
            raise ValueError("w must be a vector")


class Abstract(eqx.Module):
    w: eqx.AbstractVar[jax.Array]
    name: eqx.AbstractClassVar[str]

    @abc.abstractmethod
    def act(self, x): ...

    def __call__(self, x):
        return self.act(self.w * x)


class Concrete(Abstract):
    w: jax.Array
    name = "concrete"

    def act(self, x):
        return x + 1


class WithInit(Concrete):
    b: jax.Array

    def __init__(self, n):
        self.b = jnp.ones(n)  # not in the order of the class
        self.w = jnp.full(n, 2.0)

    def act(self, x):
        return super().act(x) + self.b


class Box(eqx.Module, Generic[T]):
    item: T

    def get(self) -> T:
        return self.item


class Always(eqx.Module):
    w: jax.Array

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


made: list[Any] = []


@MODES
def test_converters_and_checks_do_not_run_again(jit):
    made.clear()
    m = Converted([1.0, 2.0], [3, 4])
    count = len(made)
    out = jit(lambda m: jax.tree.map(lambda x: x * 2, m))(m)
    assert out.w.tolist() == [2.0, 4.0] and out.sizes == (3, 4)
    assert len(made) == count
    with pytest.raises(ValueError, match="must be a vector"):
        jit(lambda w: Converted(w, [1]))(jnp.ones((2, 2)))
    assert jit(lambda w: Converted(w, [1]))(f32(1)).sizes == (1,)


@MODES
def test_abstract_fields_and_subclasses(jit):
    f = jit(lambda m, x: (m(x), m.name, m))
    for m in (Concrete(f32(2, 2)), WithInit(2)):
        value, name, out = f(m, f32(1, 1))
        np.testing.assert_array_equal(value, m(f32(1, 1)))
        assert name == "concrete" and type(out) is type(m)
        assert eqx.tree_equal(out, m)
    assert [x is y for x, y in zip(graftax.flatten(m)[0], (m.w, m.b), strict=True)] == [True, True]
    assert traces(f) == 2


@MODES
def test_generic_modules_keep_their_parameters(jit):
    m = Box[jax.Array](f32(1))
    assert m.__orig_class__ == Box[jax.Array]
    f = jit(lambda m: (m.get() + 1, m.__orig_class__, m))
    for _ in range(2):
        value, parameters, out = f(m)
        assert value.tolist() == [2.0]
        assert parameters == out.__orig_class__ == Box[jax.Array]
    assert traces(f) == 1


@MODES
def test_an_eq_of_ones_own_decides_nothing(jit):
    f = jit(lambda m: m.w * 2)
    assert f(Always(f32(1))).tolist() == [2.0]
    assert f(Always(f32(1, 2))).tolist() == [2.0, 4.0]
    g = jit(lambda m: m.w)
    assert [g(Always(n)) for n in (1, 2, 1)] == [1, 2, 1]


@MODES
def test_a_missing_field_stays_missing(jit):
    m = Scale(f32(1), "x")
    bare = jax.tree.unflatten(jax.tree.structure(m), [f32(2)])
    object.__delattr__(bare, "w")
    through_jax = jax.tree.map(lambda x: x, bare)
    assert "w" not in vars(bare) and "w" not in vars(through_jax)
    assert graftax.flatten(bare) == graftax.flatten(through_jax)
    out = jit(lambda m: (hasattr(m, "w"), m.how, m))(bare)
    assert out[:2] == (False, "x") and not hasattr(out[2], "w")
    assert jax.tree.structure(out[2]) == jax.tree.structure(bare)


def test_equinoxs_mark_for_what_is_missing_is_no_field():
    """Equinox's own unflatten writes the mark where a wrapper had no such name."""
    m = Box[int](f32(1))
    through_jax = jax.tree.map(lambda x: x, m)
    assert MISSING in vars(through_jax).values()
    assert graftax.flatten(through_jax)[1] == graftax.flatten(Box(f32(1)))[1]


@MODES
def test_a_cached_property_is_computed_inside_and_leaves_no_tracer(jit):
    class Squares(eqx.Module):
        w: jax.Array

        @functools.cached_property
        def squared(self):
            return self.w**2

    m = Squares(f32(3))
    f = jit(lambda m: m.squared + 1)
    assert [f(m).tolist() for _ in range(2)] == [[10.0]] * 2
    assert "squared" not in vars(m)
    assert m.squared.tolist() == [9.0]
    assert f(m).tolist() == [10.0]


@MODES
def test_modules_are_frozen_inside_as_outside(jit):
    def f(m):
        m.w = m.w + 1

    with pytest.raises(dataclasses.FrozenInstanceError):
        f(Scale(f32(1)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        jit(f)(Scale(f32(1)))


@MODES
def test_one_array_in_two_places_is_two_leaves(jit):
    w = f32(1, 2)
    m = eqx.nn.Sequential([eqx.nn.Lambda(Scale(w)), eqx.nn.Lambda(Scale(w))])
    assert len(graftax.flatten(m)[0]) == 2
    f = jit(lambda m, x: m(x))
    assert f(m, f32(1, 1)).tolist() == [1.0, 4.0]
    changed = eqx.tree_at(lambda m: m[0].fn.w, m, f32(3, 3))
    assert f(changed, f32(1, 1)).tolist() == [3.0, 6.0]
    assert traces(f) == 1


@MODES
def test_shared_weights_stay_tied(jit):
    embedding, linear = eqx.nn.Embedding(4, 3, key=KEY), eqx.nn.Linear(3, 4, use_bias=False, key=KEY)
    shared = eqx.nn.Shared((embedding, linear), lambda p: p[1].weight, lambda p: p[0].weight)

    def f(shared, token):
        embedding, linear = shared()
        assert embedding.weight is linear.weight
        return linear(embedding(token))

    def step(shared, token):
        grads = eqx.filter_grad(lambda s: f(s, token).sum())(shared)
        return eqx.apply_updates(shared, jax.tree.map(lambda g: -0.1 * g, grads))

    jitted = jit(step)
    a = b = shared
    for _ in range(3):
        a, b = jitted(a, jnp.array(1)), step(b, jnp.array(1))
        np.testing.assert_allclose(a.pytree[0].weight, b.pytree[0].weight, rtol=1e-6)
    assert traces(jitted) == 1


@MODES
def test_jaxtyped_modules_check_shapes_while_they_are_traced(jit):
    beartype = pytest.importorskip("beartype").beartype

    @jaxtyped(typechecker=beartype)
    class Typed(eqx.Module):
        w: Float[Array, "2 3"]  # noqa: F722
        b: Float[Array, "2"]

        @jaxtyped(typechecker=beartype)
        def __call__(self, x: Float[Array, "3"]) -> Float[Array, "2"]:
            return self.w @ x + self.b

    f = jit(lambda m, x: m(x))
    m = Typed(jnp.ones((2, 3)), jnp.ones(2))
    for k in (1, 2):
        assert f(m, jnp.ones(3) * k).tolist() == [3.0 * k + 1] * 2
    assert traces(f) == 1
    with pytest.raises(TypeCheckError):
        f(m, jnp.ones(4))


# ── methods ──


class Jitted(eqx.Module):
    w: jax.Array

    @graftax.jit
    def by_jit(self, x):
        return self.w * x

    @graftax.filter_jit
    def __call__(self, x):
        return self.w * x * 2

    @classmethod
    @graftax.jit
    def of_class(cls, x):
        return x, cls

    @staticmethod
    @graftax.filter_jit
    def of_none(x):
        return x + 1


def test_jitted_methods():
    for w in (2.0, 3.0):
        m = Jitted(f32(w))
        assert m.by_jit(f32(1)).tolist() == [w]
        assert m(f32(1)).tolist() == [2 * w]
    assert m.of_class(f32(1))[1] is Jitted
    assert Jitted.of_none(f32(1)).tolist() == [2.0]
    assert eqx.filter_vmap(lambda m, x: m(x))(Jitted(f32(1, 2)), f32(1, 1)).tolist() == [2.0, 4.0]


@MODES
def test_bound_methods_as_arguments(jit):
    f = jit(lambda method, x: (method(x), method.__self__.w, method.__name__))
    for w in (1.0, 2.0, 3.0):
        value, weight, name = f(Scale(f32(w)).twice, f32(1))
        assert (value.tolist(), weight.tolist(), name) == ([2 * w], [w], "twice")
    assert traces(f) == 1


@MODES
def test_bound_methods_as_what_is_jitted(jit):
    for w in (1.0, 2.0):
        m = Scale(f32(w))
        assert jit(m.twice)(f32(1)).tolist() == [2 * w]
        assert jit(m)(f32(1)).tolist() == [w]
        assert jit(m.__call__)(f32(1)).tolist() == [w]


@MODES
def test_a_bound_method_comes_back_as_one(jit):
    method = Scale(f32(2)).twice
    out = jit(lambda m: m)(method)
    assert type(out) is type(method) and out(f32(1)).tolist() == [4.0]
    assert eqx.tree_equal(out, method)
    assert jax.tree.structure(out) == jax.tree.structure(method)


# ── what Equinox wraps ──


class Logged(eqx.Module):
    fn: Callable[..., Any]

    def __call__(self, *args):
        return self.fn(*args)

    @property
    def __wrapped__(self):
        return self.fn


def wrappers(m):
    return {
        "update_wrapper": eqx.module_update_wrapper(Logged(m.twice)),
        "partial": eqx.Partial(lambda a, b, c: a * b * c, m.w, c=m.w),
        "partial_of_module": eqx.Partial(m),
        "filter_jit": eqx.filter_jit(m),
        "filter_vmap": eqx.filter_vmap(m, in_axes=None, axis_size=2),
        "filter_grad": eqx.filter_grad(lambda x: jnp.sum(x**3)),
        "filter_value_and_grad": eqx.filter_value_and_grad(lambda x: jnp.sum(x**2)),
        "filter_checkpoint": eqx.filter_checkpoint(m),
        "closure_converted": eqx.filter_closure_convert(lambda x: m(x) + m.w, m.w),
        "lambda": eqx.nn.Lambda(double),
    }


@eqx.filter_custom_jvp
def cubed(x):
    return x**3


@cubed.def_jvp
def cubed_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return x**3, 30 * x**2 * t


@MODES
@pytest.mark.parametrize("name", wrappers(Scale(jnp.ones(3))))
def test_equinoxs_wrappers_as_arguments_and_as_what_is_jitted(name, jit):
    f = jit(lambda w, x: w(x))
    wrapper = wrappers(Scale(jnp.arange(3.0)))[name]
    for variant in (wrapper, jax.tree.map(lambda x: x * 2 if eqx.is_array(x) else x, wrapper)):
        expected = variant(jnp.ones(3))
        for out in (f(variant, jnp.ones(3)), jit(variant)(jnp.ones(3))):
            assert eqx.tree_equal(out, expected, rtol=1e-6)
    assert traces(f) == 1
    leaves, graphdef = graftax.flatten(wrapper)
    again = graftax.unflatten(graphdef, leaves)
    arrays = [id(x) for x in jax.tree.leaves(eqx.filter(wrapper, eqx.is_array))]
    # The constants of a Jaxpr are those of its function, too.
    assert list(dict.fromkeys(map(id, leaves))) == list(dict.fromkeys(arrays))
    assert eqx.tree_equal(again, wrapper)
    assert jax.tree.structure(again) == jax.tree.structure(wrapper)


@MODES
def test_derivatives_of_equinoxs_custom_rules(jit):
    assert jit(lambda x: eqx.filter_grad(lambda x: cubed(x).sum())(x))(f32(1)).tolist() == [30.0]
    f = jit(lambda g, x: eqx.filter_grad(lambda x: g(x).sum())(x))
    assert [f(cubed, f32(n)).tolist() for n in (1, 2)] == [[30.0], [120.0]]
    assert jit(cubed)(f32(2)).tolist() == [8.0]
    assert jit(lambda g: g)(cubed) is cubed


@MODES
@pytest.mark.quick(0)
def test_an_ensemble_is_one_module_with_stacked_arrays(jit):
    make = eqx.filter_vmap(lambda key: eqx.nn.MLP(2, 2, 4, 1, key=key))

    def run(models, x):
        return eqx.filter_vmap(lambda m, x: m(x), in_axes=(eqx.if_array(0), None))(models, x)

    f = jit(run)
    for seed in (0, 1):
        models = jit(make)(jax.random.split(jax.random.key(seed), 3))
        np.testing.assert_allclose(f(models, f32(1, 2)), run(models, f32(1, 2)), rtol=1e-6)
    assert traces(f) == 1


@MODES
def test_items_of_an_enumeration(jit):
    f = jit(lambda item, x: (item == Colour.red, Colour.where(item == Colour.red, Colour.green, Colour.red), item))
    for item, other in ((Colour.red, Colour.green), (Colour.green, Colour.red)):
        is_red, swapped, same = f(item, f32(1))
        assert bool(is_red) == (item is Colour.red)
        assert bool(swapped == other) and bool(same == item)
        assert isinstance(same, Colour)
        assert Colour[same] == Colour[item]
    assert traces(f) == 1


@MODES
def test_a_failed_check_at_run_time_is_an_error_with_its_message(jit):
    f = jit(lambda x: eqx.error_if(x, x.sum() > 1, "the sum is too big") + 1)
    assert f(f32(0)).tolist() == [1.0]
    with pytest.raises((ValueError, RuntimeError), match="the sum is too big"):
        jax.block_until_ready(f(f32(2)))
    assert f(f32(0)).tolist() == [1.0]


def test_traces_are_counted_where_equinox_counts_them():
    f = graftax.filter_jit(eqx.debug.assert_max_traces(lambda x: x + 1, max_traces=1))
    for value in (1.0, 2.0):
        assert f(f32(value)).tolist() == [value + 1]
    with pytest.raises(RuntimeError, match="can only be traced 1 times"):
        f(f32(1, 2))


# What is logged shows the lines of this file, so none that runs may spell the name that is looked for.
JITS = [graftax.jit, graftax.filter_jit]


def nested(f):
    return graftax.jit(lambda x: graftax.jit(f)(x))


@pytest.mark.parametrize("jit", [*JITS, nested])
def test_a_failed_error_if_is_equinoxs_own_error(jit, caplog):
    jitted = jit(lambda x: eqx.error_if(x, x.sum() > 10, "too big"))
    for _ in range(2):
        assert jitted(jnp.ones(3)).tolist() == [1, 1, 1]
        with pytest.raises(eqx.EquinoxRuntimeError, match="too big") as caught:
            jitted(jnp.full(3, 9.0))
        assert "filter_jit" not in str(caught.value) + caplog.text
