# SPDX-License-Identifier: Apache-2.0
"""Values that stand for the state of a caller, made anew for each call: aux data, counters, caches, exceptions."""

import functools
import threading

import jax
import jax.numpy as jnp
import pytest

import graftax

x = jnp.arange(3.0)


@jax.tree_util.register_pytree_node_class
class WithFunction:
    def __init__(self, w, apply):
        self.w, self.apply = w, apply

    def tree_flatten(self):
        return (self.w,), (self.apply,)

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(children[0], *aux)


def counted():
    calls = [0]

    def apply(y):
        calls[0] += 1
        return y

    return apply


def test_aux_data_of_a_result_is_that_of_this_call():
    f = graftax.jit(lambda s: WithFunction(s.apply(s.w), s.apply))
    for _ in range(3):
        state = WithFunction(x, counted())
        assert f(state).apply is state.apply
    assert f.cache_info().traces == 1


def test_aux_data_with_arrays_leaves_no_tracer():
    f = graftax.jit(lambda y: WithFunction(y, lambda z: z + y))
    for i in range(3):
        assert f(x + i).apply(1).tolist() == (x + i + 1).tolist()
    assert f.cache_info().traces == 1


def test_a_copy_has_counters_of_its_own():
    def make(extra):
        n = 1

        def read():
            return n

        def bump():
            nonlocal n
            n += 1
            extra.append(n)

        return read, bump

    read, bump = functions = make([])
    leaves, graphdef = graftax.flatten(functions)
    read_copy, bump_copy = graftax.unflatten(graphdef, leaves)
    bump_copy()
    assert (read(), read_copy()) == (1, 2)
    bump(), bump()
    assert (read(), read_copy()) == (3, 2)


@pytest.mark.parametrize("make", [threading.Lock, threading.Event, object])
def test_what_cannot_be_made_anew_for_each_call_is_a_clear_error(make):
    with pytest.raises(graftax.UnsupportedValueError, match="created inside"):
        graftax.jit(lambda: {"made": make()})()
    given = make()
    assert graftax.jit(lambda o: {"given": o})(given)["given"] is given


@pytest.mark.parametrize("wrap", [jax.jit, graftax.jit])
def test_a_jitted_function_that_holds_a_tracer_is_a_clear_error(wrap):
    with pytest.raises(graftax.UnsupportedValueError, match="traced array"):
        graftax.jit(lambda y: wrap(lambda z: z * y))(x)


def test_a_function_whose_cache_is_filled_inside():
    @functools.singledispatch
    def double(y):
        return y * 2

    def use(f, y):
        return f(y)

    for _ in range(2):
        assert graftax.jit(use)(lambda y: double(y), x).tolist() == (2 * x).tolist()


def test_exceptions_views_and_methods_of_builtins_are_read_anew():
    items, table, error = [x], {"a": x}, ValueError(x)
    f = graftax.jit(lambda copy, values, error: (copy()[0], next(iter(values)), error.args[0]))
    for i in range(3):
        items[0], table["a"], error.args = x + i, x + i + 1, (x + i + 2,)
        out = f(items.copy, table.values(), error)
        assert [o.tolist() for o in out] == [(x + i + k).tolist() for k in range(3)]
    assert f.cache_info().traces == 1
