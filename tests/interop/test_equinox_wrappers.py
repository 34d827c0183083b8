# SPDX-License-Identifier: Apache-2.0
"""What a `filter_*` makes of a module is a tree of JAX with the module's leaves, as Equinox's wrappers are."""

import copy
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import graftax
from graftax._jit import pytree_callable

jax.config.update("jax_platforms", "cpu")

WRAPPERS = ["filter_jit", "filter_vmap", "filter_grad", "filter_value_and_grad", "filter_checkpoint"]
JACOBIANS = ["filter_jacfwd", "filter_jacrev", "filter_hessian"]


def linear(seed: int = 0) -> eqx.nn.Linear:
    return eqx.nn.Linear(2, 2, key=jax.random.key(seed))


def batch(name: str) -> jax.Array:
    return jnp.ones((3, 2)) if name == "filter_vmap" else jnp.ones(2)


def close(one: Any, other: Any) -> bool:
    return bool(jnp.allclose(one, other, rtol=1e-5))


@pytest.mark.parametrize("name", [*WRAPPERS, *JACOBIANS, "filter_make_jaxpr"])
@pytest.mark.parametrize("library", [eqx, graftax], ids=["equinox", "graftax"])
def test_its_arrays_are_leaves(library, name):
    made = getattr(library, name)(linear())
    assert len(jax.tree.leaves(eqx.filter(made, eqx.is_array))) == 2
    doubled = jax.tree.map(lambda x: 2 * x, eqx.filter(made, eqx.is_array))
    assert close(jax.tree.leaves(doubled)[0], 2 * linear().weight)


@pytest.mark.parametrize("library", [eqx, graftax], ids=["equinox", "graftax"])
def test_a_jaxpr_is_shown_of_other_arrays(library):
    show = library.filter_make_jaxpr(linear())
    other = jax.tree.map(lambda x: 2 * x if eqx.is_array(x) else x, show)
    for made, scale in ((show, 1), (other, 2)):
        jaxpr, shape, static = made(jnp.ones(2))
        assert (shape.shape, static) == ((2,), None)
        assert any(close(const, scale * linear().weight) for const in jaxpr.consts)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["filter_jit", "filter_vmap", "filter_checkpoint"])
def test_it_is_trained_as_a_layer_is(name):
    class Net(eqx.Module):
        layer: Any

        def __call__(self, x: Any) -> Any:
            return (self.layer(x) ** 2).sum()

    def trained(library: Any, layer: Any) -> Any:
        @library.filter_jit
        def step(net: Any, x: Any) -> Any:
            gradient = library.filter_grad(lambda net, x: net(x))(net, x)
            return eqx.apply_updates(net, jax.tree.map(lambda g: -0.1 * g, gradient))

        net = Net(layer)
        for _ in range(3):
            net = step(net, batch(name))
        return net(batch(name))

    theirs = trained(eqx, getattr(eqx, name)(linear()))
    ours = trained(graftax, getattr(graftax, name)(linear()))
    assert close(theirs, ours) and ours < Net(getattr(graftax, name)(linear()))(batch(name))


@pytest.mark.parametrize("name", ["filter_jit", "filter_vmap", "filter_checkpoint"])
def test_another_layer_in_it_is_no_new_trace(name):
    run = graftax.filter_jit(lambda f, x: f(x))
    for seed in range(3):
        x = batch(name)
        expected = jax.vmap(linear(seed))(x) if x.ndim == 2 else linear(seed)(x)
        assert close(run(getattr(graftax, name)(linear(seed)), x), expected)
    assert run.cache_info().traces == 1


def test_other_options_are_another_structure():
    one, same, other = (graftax.filter_vmap(linear(), in_axes=axis) for axis in (0, 0, 1))
    assert jax.tree.structure(one) == jax.tree.structure(same) != jax.tree.structure(other)
    one, same, other = (graftax.filter_jit(linear(), donate=donate) for donate in ("none", "none", "all"))
    assert jax.tree.structure(one) == jax.tree.structure(same) != jax.tree.structure(other)


@pytest.mark.parametrize("name", WRAPPERS)
def test_surgery_goes_through_it(name):
    made = getattr(graftax, name)(linear())
    zero = eqx.tree_at(lambda f: f.__wrapped__.weight, made, jnp.zeros((2, 2)))
    assert not zero.__wrapped__.weight.any() and made.__wrapped__.weight.any()
    arrays, rest = eqx.partition(made, eqx.is_array)
    assert eqx.tree_equal(eqx.combine(arrays, rest), made)


@pytest.mark.parametrize("name", WRAPPERS)
def test_it_is_copied_and_pickled(name):
    made = getattr(graftax, name)(linear())
    for again in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(again) is type(made) and close(again.__wrapped__.weight, made.__wrapped__.weight)
    assert "Linear" in repr(made)


def test_leaves_that_are_no_arrays_make_one_that_is_not_called():
    made = graftax.filter_vmap(jax.tree_util.Partial(jnp.add, jnp.ones(2)))
    assert len(jax.tree.leaves(made)) == 1
    for name in WRAPPERS:
        made = getattr(graftax, name)(linear())
        nothing = jax.tree.map(lambda _: None, made, is_leaf=lambda x: isinstance(x, eqx.Module))
        assert not jax.tree.leaves(nothing) and not hasattr(nothing, "shape")


def test_a_plain_function_stays_a_leaf():
    for name in (*WRAPPERS, *JACOBIANS):
        made = getattr(graftax, name)(lambda x: x)
        assert jax.tree.leaves(made) == [made]
        assert not isinstance(made, pytree_callable.PytreeFunction)


class Field(eqx.Module):
    net: eqx.nn.Linear

    @graftax.filter_jit
    def value(self, y: Any) -> Any:
        return self.net(y)

    @graftax.filter_jit
    @eqx.filter_grad
    def slope(self, y: Any) -> Any:
        return self.net(y).sum()

    @graftax.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def once(self, y: Any) -> Any:
        return self.net(y)

    @graftax.filter_vmap(in_axes=(None, 0))
    def rows(self, y: Any) -> Any:
        return self.net(y)

    @graftax.filter_checkpoint
    @eqx.filter_jit
    def again(self, y: Any) -> Any:
        return self.net(y)


def test_in_the_body_of_a_class_it_is_a_method():
    field = Field(linear())
    assert close(field.value(jnp.ones(2)), linear()(jnp.ones(2)))
    for _ in range(3):
        assert close(field.once(jnp.ones(2)), linear()(jnp.ones(2)))
    assert close(field.again(jnp.ones(2)), linear()(jnp.ones(2)))
    assert close(field.rows(jnp.ones((3, 2))), jax.vmap(linear())(jnp.ones((3, 2))))
    assert close(field.slope(jnp.ones(2)).net.bias, jnp.ones(2))


def test_a_rule_reaches_the_arrays_of_a_method():
    """As a solver does that is given `model.field`."""

    @graftax.filter_custom_vjp
    def solve(field: Any, y: Any) -> Any:
        return field(y)

    @solve.def_fwd
    def _(perturbed: Any, field: Any, y: Any) -> Any:
        return field(y), None

    @solve.def_bwd
    def _(residuals: Any, cotangent: Any, perturbed: Any, field: Any, y: Any) -> Any:
        return jax.tree.map(lambda x: jnp.full_like(x, 3) if eqx.is_array(x) else None, field)

    for of in (lambda f: f.value, lambda f: graftax.filter_jit(f.net), lambda f: graftax.filter_checkpoint(f.net)):
        gradient = graftax.filter_grad(lambda f, of=of: solve(of(f), jnp.ones(2)).sum())(Field(linear()))
        assert close(gradient.net.weight, jnp.full((2, 2), 3.0))


def test_a_method_is_pickled_and_counts_its_traces():
    field = Field(linear())
    method = pickle.loads(pickle.dumps(field.value))
    assert close(method(jnp.ones(2)), field.value(jnp.ones(2)))
    assert method.__self__.net.weight.shape == (2, 2) and method.cache_info().traces >= 1
    assert len(jax.tree.leaves(eqx.filter(method, eqx.is_array))) == 2


@pytest.mark.parametrize("library", [eqx, graftax], ids=["equinox", "graftax"])
def test_the_stages_of_jax_are_reached(library):
    lowered = library.filter_jit(lambda f, x: f(x)).lower(linear(), jnp.ones(2))
    assert lowered.lowered.cost_analysis()["flops"] > 0
    assert lowered.compile().compiled.memory_analysis() is not None
