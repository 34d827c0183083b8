# SPDX-License-Identifier: Apache-2.0
"""``equinox.nn.State``: what a layer used up is used up for the caller too, exactly where it is in plain Python."""

import equinox as eqx
import equinox.nn as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from zoo import f32

pytestmark = pytest.mark.quick(1)  # as in test_equinox

MODES = pytest.mark.parametrize("jit", [graftax.jit, graftax.filter_jit], ids=["jit", "filter_jit"])
OLD = "Attempted to use old state"


class Count(eqx.Module):
    index: nn.StateIndex

    def __init__(self, start=0):
        self.index = nn.StateIndex(jnp.array(start))

    def __call__(self, x, state):
        n = state.get(self.index)
        return x + n, state.set(self.index, n + 1)


class Two(eqx.Module):
    first: Count
    second: Count

    def __init__(self):
        self.first, self.second = Count(0), Count(10)

    def __call__(self, x, state):
        x, state = self.first(x, state)
        return self.second(x, state)


def is_old(state):
    return repr(state) == "State(~old~)"


def fresh(f):
    """A function of its own: a function's table serves all its wrappers."""
    return lambda *args: f(*args)


def call(model, x, state):
    return model(x, state)


def forget(model, x, state):
    out, _ = model(x, state)
    return out


def keep_old(model, x, state):
    out, new = model(x, state)
    return out, new, state


def look(model, x, state):
    return x + state.get(model.index)


@pytest.mark.parametrize("f", [call, forget, keep_old, look])
def test_the_callers_state_ends_as_after_plain_python(f):
    jitted = graftax.jit(fresh(f))
    ends = []
    for run in (f, jitted, jitted):
        model, state = nn.make_with_state(Count)()
        out = run(model, f32(1), state)
        olds = [is_old(x) for x in jax.tree.leaves(out, is_leaf=lambda x: isinstance(x, nn.State))]
        ends.append((is_old(state), olds, isinstance(out, tuple) and out[-1] is state))
    assert ends[0] == ends[1] == ends[2]
    assert ends[0][0] == (f is not look)
    assert jitted.cache_info().traces == 1


@pytest.mark.parametrize("f", [call, forget, look])
def test_by_value_the_callers_state_stays_good_and_nothing_is_warned_of(f):
    jitted, theirs = graftax.filter_jit(fresh(f)), eqx.filter_jit(f)
    model, state = nn.make_with_state(Count)(3)
    for _ in range(2):
        ours = jitted(model, f32(1), state)
        assert not is_old(state)
        assert eqx.tree_equal(ours, theirs(model, f32(1), state))
    assert jitted.cache_info().traces == 1


def test_an_argument_that_only_expired_is_no_forbidden_change():
    model, state = nn.make_with_state(Count)(3)
    out, new = graftax.jit(call, mutation="error")(model, f32(1), state)
    assert out.tolist() == [4.0] and new.get(model.index) == 4


@MODES
def test_a_state_that_is_used_twice_raises_as_in_equinox(jit):
    def twice(model, x, state):
        a, _ = model(x, state)
        b, _ = model(x, state)
        return a + b

    model, state = nn.make_with_state(Count)()
    f = jit(twice)
    for _ in range(2):
        with pytest.raises(ValueError, match=OLD):
            f(model, f32(1), state)
        assert not is_old(state)  # a failed call leaves its arguments as they were


@MODES
def test_an_old_state_is_refused_where_it_is_used_and_only_there(jit):
    model, state = nn.make_with_state(Count)()
    model(f32(1), state)
    assert is_old(state)
    with pytest.raises(ValueError, match=OLD):
        jit(call)(model, f32(1), state)
    assert jit(lambda x, state: x + 1)(f32(1), state).tolist() == [2.0]


@MODES
def test_a_state_is_counted_on_from_call_to_call(jit):
    model, state = nn.make_with_state(Two)()
    f = jit(fresh(call))
    for n in range(4):
        out, state = f(model, f32(0), state)
        assert out.tolist() == [10.0 + 2 * n]
        assert (state.get(model.first.index), state.get(model.second.index)) == (n + 1, n + 11)
    assert f.cache_info().traces == 1


def test_a_state_that_comes_back_untouched_is_the_callers_own():
    _, state = nn.make_with_state(Count)()
    f = graftax.jit(lambda state, x: (state, x + 1))
    for _ in range(2):
        assert f(state, f32(1))[0] is state
    assert graftax.filter_jit(lambda state: state)(state) is not state


@MODES
def test_the_same_state_given_twice_is_one_state(jit):
    def both(model, a, b):
        assert a is b
        return model(f32(0), a)

    model, state = nn.make_with_state(Count)()
    jit(both)(model, state, state)


def test_a_state_inside_an_object_is_used_up_there():
    class Box:
        def __init__(self):
            self.model, self.state = nn.make_with_state(Count)()

        def step(self, x):
            out, self.state = self.model(x, self.state)
            return out

    box = Box()
    f = graftax.jit(lambda box, x: box.step(x))
    for n in range(3):
        before = box.state
        assert f(box, f32(0)).tolist() == [float(n)]
        assert is_old(before) and not is_old(box.state)


@MODES
def test_markers_count_by_identity(jit):
    """Before ``make_with_state`` a marker is a bare object: an index made anew is another key."""

    def value(index, state):
        return state.get(index) * 2

    f = jit(value)
    one, other = nn.StateIndex(f32(1)), nn.StateIndex(f32(2))
    state = nn.State([one, other])
    assert [f(one, state).tolist(), f(other, state).tolist(), f(one, state).tolist()] == [[2.0], [4.0], [2.0]]
    assert f.cache_info().traces == 2
    stranger = nn.StateIndex(f32(1))
    with pytest.raises(KeyError):
        value(stranger, state)
    with pytest.raises(KeyError):
        f(stranger, state)


@MODES
def test_two_models_of_one_class_are_one_structure(jit):
    f = jit(fresh(call))
    for start in (0, 5, 7):
        model, state = nn.make_with_state(Count)(start)
        assert f(model, f32(1), state)[0].tolist() == [1.0 + start]
    assert f.cache_info().traces == 1


@MODES
def test_substate_and_update(jit):
    def run(model, x, state):
        sub = state.substate(model.second)
        x, sub = model.second(x, sub)
        return x, state.update(sub)

    model, state = nn.make_with_state(Two)()
    f = jit(run)
    expected_model, expected_state = nn.make_with_state(Two)()
    for _ in range(3):
        out, state = f(model, f32(0), state)
        expected, expected_state = run(expected_model, f32(0), expected_state)
        assert out.tolist() == expected.tolist()
        assert eqx.tree_equal(state, expected_state)
    assert f.cache_info().traces == 1


@MODES
def test_a_wrong_value_is_refused_as_in_equinox(jit):
    model, state = nn.make_with_state(Count)()
    with pytest.raises(ValueError, match="different structures/shapes/dtypes"):
        jit(lambda model, state: state.set(model.index, jnp.ones(3)))(model, state)
    assert not is_old(state)


@MODES
def test_models_and_states_made_inside(jit):
    model, state = jit(lambda start: nn.make_with_state(Count)(start))(jnp.array(4))
    out, state = jit(call)(model, f32(1), state)
    assert out.tolist() == [5.0] and state.get(model.index) == 5


def test_delete_init_state_leaves_no_array():
    pair = Two()
    assert len(graftax.flatten(pair)[0]) == 2
    bare = nn.delete_init_state(pair)
    assert graftax.flatten(bare)[0] == []
    state = nn.State(pair)
    out, _ = graftax.filter_jit(call)(bare, f32(0), state)
    assert out.tolist() == [10.0]


def test_a_state_in_the_flat_form_and_back():
    _, state = nn.make_with_state(Two)()
    again = graftax.from_dict(graftax.to_dict(state))
    assert eqx.tree_equal(again, state)
    leaves, graphdef = graftax.flatten(state)
    assert [id(x) for x in leaves] == [id(x) for x in jax.tree.leaves(state)]
    assert eqx.tree_equal(graftax.unflatten(graphdef, leaves), state)
    assert graftax.flatten(again)[1] == graphdef


@MODES
def test_a_vmapped_stateful_model(jit):
    def run(model, xs, states):
        return eqx.filter_vmap(call, in_axes=(None, 0, 0))(model, xs, states)

    @eqx.filter_vmap
    def make(start):
        return nn.make_with_state(Count)(start)

    model, states = make(jnp.arange(3))
    f = jit(run)
    a = b = states
    for _ in range(2):
        (out, a), (expected, b) = f(model, jnp.zeros(3), a), eqx.filter_jit(run)(model, jnp.zeros(3), b)
        np.testing.assert_array_equal(out, expected)
        assert eqx.tree_equal(a, b)
    assert f.cache_info().traces == 1


@MODES
def test_a_state_in_a_scan(jit):
    def run(model, xs, state):
        def body(state, x):
            out, state = model(x, state)
            return state, out

        return jax.lax.scan(body, state, xs)

    model, state = nn.make_with_state(Count)()
    state = jax.tree.map(lambda n: n.astype(jnp.int32), state)
    new, out = jit(run)(model, jnp.zeros(3), state)
    assert out.tolist() == [0.0, 1.0, 2.0] and new.get(model.index) == 3


def test_a_state_as_argument_of_jax_transformations_inside():
    model, state = nn.make_with_state(Count)(2)

    def loss(x, model, state):
        out, new = model(x, state)
        return (out**2).sum(), new

    def step(x, model, state):
        return jax.grad(loss, has_aux=True)(x, model, state)

    grads, new = graftax.jit(step)(f32(1), model, state)
    assert grads.tolist() == [6.0] and new.get(model.index) == 3
