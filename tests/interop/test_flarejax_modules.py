# SPDX-License-Identifier: Apache-2.0
"""Every class of FlareJax: read as its own flatten reads it, and run as ``flarejax.filter_jit`` runs it."""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jrn
import numpy as np
import pytest

import graftax

flr = pytest.importorskip("flarejax")

from flarejax.flr._filter import Arguments, Result  # noqa: E402
from flarejax.flr._module import MethodWrap  # noqa: E402
from flarejax.opt import Chain, Optimizer  # noqa: E402

from graftax.interop.flarejax import describe  # noqa: E402


def x(*shape: int) -> jax.Array:
    return jnp.array(np.linspace(-1.0, 2.0, int(np.prod(shape)), dtype=np.float32).reshape(shape))


def key(seed: int = 0) -> jax.Array:
    return jrn.PRNGKey(seed)


def path(name: str) -> Any:
    return flr.PathLookup((flr.AttrLookup(name),))


def built(layer, *args):
    layer(*args)
    return layer


def used(optimizer):
    """After one step: with moments, where it has some."""
    gradients = {path("w"): x(2)}
    optimizer(loss=jnp.ones(()), grads=gradients, params={path("w"): x(2)})
    return optimizer


def optimize(optimizer, gradient):
    return optimizer(loss=jnp.ones(()), grads={path("w"): gradient}, params={path("w"): gradient * 2})[path("w")]


def call(module, *args):
    return module(*args)


def double(v):
    return v * 2


def add(v, other, scale=1):
    return v + other * scale


def contract(module, *args):
    return jnp.einsum(module.pattern, *args)


@dataclasses.dataclass(frozen=True)
class Example:
    """Modules of one class, and what is done with them."""

    make: Any
    args: tuple[Any, ...] = ()
    call: Any = call


EXAMPLES = {
    flr.Module: [Example(flr.Module, (), lambda m: jnp.ones(1))],
    MethodWrap: [Example(lambda: flr.net.Linear(key(), 3)._build, (x(2, 4),), lambda m, v: (m(v), m.module.weight)[1])],
    Arguments: [Example(lambda: Arguments((x(2), "a"), {"k": x(3)}), (), lambda m: m.args[0] * m.kwargs["k"].sum())],
    Result: [Example(lambda: Result([x(2), 1]), (), lambda m: m.value[0] * m.value[1])],
    flr.Jit: [
        Example(lambda: flr.Jit(flr.net.Linear(key(), 3)), (x(2, 4),)),
        Example(lambda: flr.Jit(double), (x(2),)),
    ],
    flr.Vmap: [
        Example(lambda: flr.Vmap(built(flr.net.Linear(key(), 3), x(2, 4))), (x(5, 4),)),
        Example(lambda: flr.Vmap(double, in_axes=1, out_axes=0), (x(2, 3),)),
    ],
    flr.Partial: [Example(lambda: flr.Partial(add, x(2), scale=3), (x(2),))],
    flr.net.CrossAttention: [
        Example(lambda: flr.net.CrossAttention(key(), 4, 2), (x(1, 3, 4), x(1, 5, 6))),
        Example(lambda: built(flr.net.CrossAttention(key(), 4, 2), x(1, 3, 4), x(1, 5, 6)), (x(1, 3, 4), x(1, 5, 6))),
    ],
    flr.net.DotProductAttention: [
        Example(lambda: flr.net.DotProductAttention(key(), 4, 2), (x(1, 3, 4),)),
        Example(lambda: flr.net.DotProductAttention(key(), 4, 2, norm=True, tanh_cap=2.0), (x(1, 3, 4),)),
    ],
    flr.net.Sequential: [
        Example(lambda: flr.net.Sequential(flr.net.Affine(key(), 3), jax.nn.relu, double), (x(2, 4),))
    ],
    flr.net.Add: [Example(lambda: flr.net.Add(flr.net.Linear(key(), 4), flr.net._combine.Identity()), (x(2, 4),))],
    flr.net.Multiply: [Example(lambda: flr.net.Multiply(flr.net.Constant.full(2.0), double), (x(2, 4),))],
    flr.net.Constant: [
        Example(lambda: flr.net.Constant.random_normal(key(), (2, 3))),
        Example(lambda: flr.net.Constant.random_uniform(key(), (2,))),
    ],
    flr.net._combine.Identity: [Example(flr.net._combine.Identity, (x(2),))],
    # Its own call passes a keyword that einops does not take.
    flr.net.Einsum: [Example(lambda: flr.net.Einsum("ij,jk->ik"), (x(2, 3), x(3, 4)), contract)],
    flr.net.Rearrange: [Example(lambda: flr.net.Rearrange("(a b) c -> a (b c)", a=2), (x(4, 3),))],
    flr.net.Reduce: [Example(lambda: flr.net.Reduce("(a b) c -> a c", "max", a=2), (x(4, 3),))],
    flr.net.Repeat: [Example(lambda: flr.net.Repeat("a -> a b", b=2), (x(4),))],
    flr.net.Affine: [
        Example(lambda: flr.net.Affine(key(), 3), (x(2, 4),)),
        Example(lambda: built(flr.net.Affine(key(), 3), x(2, 4)), (x(2, 4),)),
    ],
    flr.net.Bias: [Example(lambda: flr.net.Bias(key()), (x(2, 4),))],
    flr.net.Linear: [
        Example(lambda: flr.net.Linear(key(), 3), (x(2, 4),)),
        Example(lambda: flr.net.Linear(jrn.key(1), 3), (x(2, 4),)),
        Example(lambda: built(flr.net.Linear(key(), 3), x(2, 4)), (x(2, 4),)),
    ],
    flr.net.Scale: [Example(flr.net.Scale, (x(2, 4),)), Example(lambda: built(flr.net.Scale(2.0), x(4)), (x(2, 4),))],
    flr.net.LayerNorm: [
        Example(flr.net.LayerNorm, (x(2, 4),)),
        Example(lambda: built(flr.net.LayerNorm(1e-3), x(4)), (x(2, 4),)),
    ],
    flr.net.RMSNorm: [
        Example(flr.net.RMSNorm, (x(2, 4),)),
        Example(lambda: built(flr.net.RMSNorm(1e-3), x(4)), (x(2, 4),)),
    ],
    Optimizer: [Example(Optimizer, (x(2),), optimize)],
    Chain: [Example(lambda: used(Chain(flr.opt.Adam(0.1), flr.opt.SGD(0.5))), (x(2),), optimize)],
    flr.opt.SGD: [Example(lambda: flr.opt.SGD(0.1), (x(2),), optimize)],
    flr.opt.Adam: [
        Example(lambda: flr.opt.Adam(0.1), (x(2),), optimize),
        Example(lambda: used(flr.opt.Adam(0.1)), (x(2),), optimize),
    ],
    flr.opt.AdamW: [Example(lambda: used(flr.opt.AdamW(0.1)), (x(2),), optimize)],
    flr.opt.Trapezoid: [Example(lambda: flr.opt.Trapezoid(10, 2, 2), (x(2),), optimize)],
}
CASES = [pytest.param(e, id=f"{cls.__name__}{i}") for cls, some in EXAMPLES.items() for i, e in enumerate(some)]


def subclasses(cls):
    return {cls}.union(*map(subclasses, type.__subclasses__(cls)))


def test_every_class_has_an_example_and_is_read_by_fields():
    theirs = {cls for cls in subclasses(flr.Module) if cls.__module__.startswith("flarejax.")}
    assert theirs == set(EXAMPLES)
    for cls in theirs:
        assert describe(cls).role == "node"
        assert describe(cls).by_name


def agree(a, b):
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    assert len(a) == len(b) > 0
    for ours, theirs in zip(a, b, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


# ── what is read ──


def plain(value):
    """A value of a flat form, where it is no function: those are opened here and are values there."""
    return None if isinstance(value, types.FunctionType) else value


def functions(flat):
    return [repr(place) for place, value in flat.items() if isinstance(value, types.FunctionType)]


def ours(obj, opened):
    """The flat form of graftax in the words of FlareJax; what is below a function of `opened` is left out."""
    flat = {}
    for place, value in graftax.to_dict(obj).items():
        inside = [name for name in opened if repr(place).startswith((f"{name}.", f"{name}["))]
        flat[inside[0] if inside else repr(place)] = None if inside else value
    return flat


def by_path(flat):
    return {repr(place): plain(value) for place, value in flat.items()}


def assert_same_flat_form(obj):
    theirs = flr.flatten(obj)
    mine = ours(obj, functions(theirs))
    expected = by_path(theirs)
    assert mine.keys() == expected.keys()
    for place, value in expected.items():
        if isinstance(value, flr.PathLookup):
            assert isinstance(mine[place], graftax.Ref)
            assert repr(value) in repr(mine[place])
        elif isinstance(value, jax.Array):
            assert mine[place] is value
        else:
            assert type(mine[place]) is type(value)
            assert mine[place] == value


@pytest.mark.parametrize("example", CASES)
def test_paths_arrays_and_statics_are_those_of_its_own_flatten(example):
    assert_same_flat_form(example.make())


@pytest.mark.parametrize("example", CASES)
def test_the_leaves_are_those_that_jax_is_given(example):
    module = example.make()
    leaves, _ = graftax.flatten(module)
    assert {id(leaf) for leaf in leaves} == {id(leaf) for leaf in jax.tree.leaves(module)}
    assert len(leaves) == len(jax.tree.leaves(module))


@pytest.mark.parametrize("example", CASES)
def test_unflatten_makes_an_equal_module(example):
    module = example.make()
    leaves, graphdef = graftax.flatten(module)
    made = graftax.unflatten(graphdef, leaves)
    assert type(made) is type(module)
    assert made is not module
    assert graftax.flatten(made)[1] == graphdef
    assert jax.tree.structure(made) == jax.tree.structure(module) or functions(flr.flatten(module))


class Block(flr.Module):
    def __init__(self):
        self.tail = (jnp.ones(1), [jnp.ones(2)])
        self.inner = flr.net.Constant(jnp.ones(3))
        self._frozen = False
        self.body = [flr.net.Scale(), jnp.ones(4)]
        self.again = self.inner
        self.empty = [[], {}, flr.net._combine.Identity()]
        self.up = self


def test_the_order_is_that_of_its_own_flatten():
    module = Block()
    theirs = {repr(k): v for k, v in flr.flatten(module).items() if isinstance(v, jax.Array)}
    leaves, graphdef = graftax.flatten(module)
    paths = [repr(graftax.Path(path)) for path in graphdef.leaf_paths()]
    assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in theirs.values()]
    assert paths == [*theirs] == ["obj.again.value", "obj.body[1]", "obj.tail[0]", "obj.tail[1][0]"]
    assert_same_flat_form(module)


class Slotted(flr.Module):
    __slots__ = ("bias", "weight")

    def __init__(self):
        self.weight, self.extra, self.bias = jnp.ones(2), jnp.ones(1), jnp.ones(3)


def test_slots_are_read_too():
    assert describe(Slotted).role == "node"
    assert_same_flat_form(Slotted())


def test_a_slot_that_is_not_filled_is_not_there():
    module = Slotted()
    del module.weight  # its own flatten raises AttributeError

    @graftax.jit
    def fill(module):
        module.weight, was = module.bias * 2, hasattr(module, "weight")
        return was

    assert fill(module) is False
    assert module.weight.tolist() == [2, 2, 2]
    assert fill(module) is True


# ── classes that FlareJax sees otherwise ──


class LeavesOut(flr.Module):
    """Its flatten shows one attribute of two."""

    def __init__(self, w):
        self.w, self.cache = w, {"hits": 1}

    def tree_flatten(self):
        return (self.w,), "aux"

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


class OnlyUnflatten(flr.Module):
    @classmethod
    def tree_unflatten(cls, aux, children):
        made = super().tree_unflatten(aux, children)
        made.unflattened = True
        return made


class Computed(flr.Module):
    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        return value + 1 if name == "w" else value


class OneSlot(flr.Module):
    __slots__ = ("a",)


class MoreSlots(OneSlot):
    __slots__ = ("b",)


class Mangled(flr.Module):
    __slots__ = ("__w",)


class Hidden(OneSlot):
    a = 3


class OfList(flr.Module, list):
    pass


class OfText(flr.Module, str):
    pass


class Virtual:
    pass


flr.Module.register(Virtual)
OTHERS = [LeavesOut, OnlyUnflatten, Computed, MoreSlots, Mangled, Hidden, OfList, OfText, Virtual]


@pytest.mark.parametrize("cls", OTHERS)
def test_a_class_that_flatten_sees_otherwise_is_not_read_by_fields(cls):
    assert describe(cls) is None


@pytest.mark.parametrize("cls", [LeavesOut, OnlyUnflatten])
def test_it_goes_through_its_own_flatten(cls):
    module = cls(jnp.ones(2)) if cls is LeavesOut else cls()
    module.w = jnp.ones(2)
    leaves, graphdef = graftax.flatten(module)
    assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in jax.tree.leaves(module)]
    made = graftax.unflatten(graphdef, leaves)
    assert cls is LeavesOut or made.unflattened


def test_what_its_flatten_leaves_out_stays_as_it_is():
    module = LeavesOut(jnp.ones(2))
    cache = module.cache

    @graftax.jit
    def step(module):
        module.w = module.w * 2

    for n in (2, 4):
        step(module)
        assert module.w.tolist() == [n, n]
        assert module.cache is cache == {"hits": 1}
    assert step.cache_info().traces == 1


# ── what is run ──


def _bits(value):
    return jrn.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value


def assert_equal_modules(module, other):
    mine, theirs = flr.flatten(module), flr.flatten(other)
    assert mine.keys() == theirs.keys()
    for place, value in theirs.items():
        if isinstance(value, jax.Array):
            np.testing.assert_allclose(_bits(mine[place]), _bits(value), rtol=1e-5, atol=1e-6)
        else:
            assert plain(mine[place]) == plain(value)


@pytest.mark.parametrize("example", CASES)
def test_a_call_by_value_is_that_of_flarejax(example):
    def program(module, *args):
        return example.call(module, *args), module

    f, one = graftax.filter_jit(program), example.make()
    expected, changed = flr.filter_jit(program)(example.make(), *example.args)
    for module in (one, one, example.make()):
        before = flr.flatten(module)
        result, made = f(module, *example.args)
        agree(result, expected)
        assert_equal_modules(made, changed)
        assert made is not module
        after = flr.flatten(module)
        assert after.keys() == before.keys()
        assert all(after[place] is value for place, value in before.items())
    assert f.cache_info().traces == 1


@pytest.mark.parametrize("example", CASES)
def test_a_call_changes_the_module_as_plain_python_does(example):
    expected, got = example.make(), example.make()
    f = graftax.jit(lambda module, *args: example.call(module, *args))
    for _ in range(2):
        agree(f(got, *example.args), example.call(expected, *example.args))
        assert_equal_modules(got, expected)
