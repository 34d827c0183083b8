# SPDX-License-Identifier: Apache-2.0
"""Dicts whose keys are bare objects, such as the state of Equinox: the keys are those of `like`."""

import copy

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import graftax
from zoo import Box


class Net(eqx.Module):
    linear: eqx.nn.Linear
    first: eqx.nn.BatchNorm
    second: eqx.nn.BatchNorm

    def __init__(self, key):
        self.linear = eqx.nn.Linear(3, 4, key=key)
        self.first = eqx.nn.BatchNorm(4, "batch", mode="batch")
        self.second = eqx.nn.BatchNorm(4, "batch", mode="ema")

    def __call__(self, x, state):
        x, state = self.first(self.linear(x), state)
        return self.second(x, state)


def with_names(seed):
    return eqx.nn.make_with_state(Net)(jax.random.key(seed))


def with_objects(seed):
    model = Net(jax.random.key(seed))
    return model, eqx.nn.State(model)


def step(model, state):
    state = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(state))  # which stays valid
    x = jnp.arange(15.0).reshape(5, 3)
    return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)


def is_same(one, other):
    return all(jnp.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.safetensors"


@pytest.fixture(params=[with_names, with_objects])
def make(request):
    return request.param


@pytest.fixture
def trained(make):
    model, state = make(0)
    return model, step(model, state)[1]


@pytest.mark.quick(0)
def test_a_model_and_its_state_come_back(path, make, trained):
    graftax.save(path, trained)
    for like in (make(1), graftax.load(path, make(2))):
        model, state = graftax.load(path, like)
        assert state.get(model.first.batch_counter) == 1
        assert is_same(step(model, state), step(*trained))


@pytest.mark.quick(0)
@pytest.mark.parametrize("container", [list, lambda pair: {"model": pair[0], "state": pair[1]}])
def test_in_place(path, make, trained, container):
    like = container(make(1))
    graftax.save(path, container(trained))
    assert graftax.load(path, like, into=True) is like
    assert is_same(step(*(like.values() if isinstance(like, dict) else like)), step(*trained))


def test_a_state_alone_comes_back_in_place(path, make, trained):
    model, state = make(1)
    graftax.save(path, trained[1])
    assert graftax.load(path, state, into=True) is state
    assert is_same(state, trained[1]) and state.get(model.first.batch_counter) == 1


def test_what_is_immutable_all_the_way_says_so(path, trained):
    graftax.save(path, trained)
    with pytest.raises(TypeError, match="Put it into one"):
        graftax.load(path, copy.copy(trained), into=True)


def test_checkpoints_restore_a_state(tmp_path, make, trained):
    pytest.importorskip("orbax.checkpoint")
    with graftax.Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, dict(enumerate(trained)))
    like = dict(enumerate(make(1)))
    with graftax.Checkpoints(tmp_path, every=1) as checkpoints:
        assert checkpoints.restore(like) == 1
    assert is_same(step(*like.values()), step(*trained))


def test_an_object_that_stands_elsewhere_is_found_in_any_order(path):
    one, two, three, four = object(), object(), object(), object()
    graftax.save(path, {"table": {one: jnp.ones(2), two: jnp.zeros(2)}, "z": [one, two]})
    like = {"table": {three: jnp.full(2, 3.0), four: jnp.full(2, 4.0)}, "z": [four, three]}
    new = graftax.load(path, like)
    assert new["table"][four].sum() == 2 and new["table"][three].sum() == 0 and list(new["table"]) == [three, four]


def test_names_have_no_addresses(path):
    graftax.save(path, {"a": {object(): jnp.ones(2), object(): {"w": jnp.ones(3)}}})
    assert [tensor.name for tensor in graftax.peek(path).tensors] == ["[a][<object 0>]", "[a][<object 1>][w]"]


def test_with_another_number_of_keys_none_goes_by_place(path):
    graftax.save(path, {"a": {object(): jnp.ones(2)}})
    like = {"a": {object(): jnp.zeros(2), object(): jnp.zeros(2)}}
    with pytest.raises(graftax.LoadError) as caught:
        graftax.load(path, like)
    assert len(caught.value.differences) == 3
    assert sum(x.sum() for x in graftax.load(path, like, strict=False)["a"].values()) == 0


def test_keys_of_another_class_are_other_keys(path):
    class Key:
        pass

    graftax.save(path, {Key(): jnp.ones(2), object(): jnp.zeros(2), 3: jnp.full(2, 3.0)})
    key = Key()
    new = graftax.load(path, {object(): jnp.ones(2), 3: jnp.ones(2), key: jnp.zeros(2)})
    assert new[key].sum() == 2 and new[3].sum() == 6
    with pytest.raises(graftax.LoadError):
        graftax.load(path, {object(): jnp.ones(2), object(): jnp.ones(2), 3: jnp.ones(2)})


def test_without_like_the_keys_are_named(path):
    graftax.save(path, Box(table={object(): jnp.ones(2)}))
    with pytest.raises(graftax.LoadError, match="the key <object 0>, which only like= can give"):
        graftax.load(path, classes=[Box])
