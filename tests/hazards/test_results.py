# SPDX-License-Identifier: Apache-2.0
"""What comes back: first attributes, donated arrays, values made inside; and what is refused."""

import dataclasses
import functools
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from zoo import Box

x = jnp.arange(3.0)


def test_an_object_without_attributes_gets_its_first_one():
    class Empty:
        pass

    def f(s, y):
        s.y = y * 2
        s.n = getattr(s, "n", 0) + 1
        return s

    plain, jitted = Empty(), Empty()
    g = graftax.jit(f)
    for n in (1, 2, 3):
        f(plain, x)
        assert g(jitted, x) is jitted
        assert jitted.n == plain.n == n
        assert jitted.y.tolist() == plain.y.tolist()
    untouched = Empty()
    by_value = graftax.filter_jit(f)(untouched, x)
    assert vars(untouched) == {}
    assert by_value.n == 1


@pytest.mark.parametrize("wrap", [lambda a: (a,), lambda a: {"m": eqx.nn.Identity(), "t": (a, "x")}])
def test_a_donated_array_below_an_immutable_node_is_written_back(wrap):
    f = graftax.jit(lambda s: jnp.zeros(3), donate="all")
    state = [wrap(x + 1)]
    f(state)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))


def test_one_array_donated_and_kept_is_an_error_with_both_paths():
    y = x + 1
    f = graftax.jit(lambda a, b: (a["w"] + 1, b + 2), donate_argnums=0)
    with pytest.raises(graftax.StructureError, match=r"a\['w'\].* b "):
        f({"w": y}, y)
    assert not y.is_deleted()


@pytest.mark.parametrize(
    "hide",
    [
        lambda y: slice(y[0], None),
        lambda y: SyntaxError(y),
    ],
)
def test_a_tracer_hidden_in_an_opaque_result_is_an_error(hide):
    with pytest.raises(graftax.GraftaxError):
        graftax.jit(hide)(x)


def test_a_function_and_a_proxy_made_inside_come_out_with_arrays():
    assert graftax.jit(lambda y: lambda: y + 1)(x)().tolist() == (x + 1).tolist()
    assert graftax.jit(lambda y: ValueError(y))(x).args[0].tolist() == x.tolist()
    assert graftax.jit(lambda y: types.MappingProxyType({"a": y}))(x)["a"].tolist() == x.tolist()


def test_a_slice_with_arrays_is_a_clear_error():
    with pytest.raises(graftax.GraftaxError, match="slice"):
        graftax.jit(lambda s: x[s])(slice(jnp.array([1, 2]), None))


def test_partial_of_jax_is_traced():
    def g(w, y):
        return w * y

    f = graftax.jit(lambda p, y: p(y))
    for i in range(4):
        assert f(jax.tree_util.Partial(g, x + i), x).tolist() == ((x + i) * x).tolist()
    assert f.cache_info().traces == 1
    out = graftax.jit(lambda y: jax.tree_util.Partial(g, y))(x)
    assert out.args[0].tolist() == x.tolist()


def test_attributes_of_a_tuple_subclass_come_back():
    class Counted(tuple):
        n = 0

    def f(t):
        t.n += 1
        return t[0] + t.n

    t = Counted((x,))
    g = graftax.jit(f)
    for n in (1, 2, 3):
        assert g(t).tolist() == (x + n).tolist()
        assert t.n == n


def test_a_matrix_is_refused():
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix([[1.0]])
    with pytest.raises(graftax.UnsupportedValueError, match=r"numpy\.asarray"):
        graftax.jit(lambda m: m * m)(matrix)


def test_a_class_assigned_in_a_failing_trace_is_put_back():
    class A:
        def __init__(self):
            self.k = 1

        def method(self): ...

    class B(A):
        pass

    def f(a):
        a.__class__ = B

    a = A()
    with pytest.raises(graftax.StructureError, match="class"):
        graftax.jit(f)(a)
    assert type(a) is A


def test_a_cached_property_of_a_frozen_object_leaves_no_tracer():
    @dataclasses.dataclass(frozen=True)
    class Config:
        k: int = 2

        @functools.cached_property
        def table(self):
            return jnp.arange(self.k) * 1.0

    for jit in (graftax.jit, graftax.filter_jit):
        config = Config()
        assert jit(lambda c, y: c.table.sum() + y)(config, x).tolist() == (x + 1).tolist()
        assert not any(isinstance(v, jax.core.Tracer) for v in vars(config).values())


def test_donation_alone_is_no_mutation():
    held = [x + 1]
    f = graftax.jit(lambda held, y: y + held[0], donate_argnums=0, mutation="error")
    f(held, x)
    f(held, x)
    assert held[0].tolist() == (x + 1).tolist()


def test_one_numpy_array_may_be_donated_twice():
    a = np.ones(3, np.float32)
    one, two = graftax.jit(lambda a, b: (a + 1, b + 2), donate_argnums=(0, 1))(a, a)
    assert (one.tolist(), two.tolist()) == ([2, 2, 2], [3, 3, 3])


class Bare:
    pass


MARK = Bare()


def test_an_object_without_attributes_that_is_made_inside_is_made_for_every_call():
    f = graftax.jit(lambda y: (Bare(), y))
    first = f(x)[0]
    first.v = 1
    second = f(x)[0]
    assert second is not first
    assert vars(second) == {}
    g = graftax.jit(lambda y: (MARK, y))
    assert g(x)[0] is g(x)[0] is MARK


def _in_a_method(x):
    class Local:
        def get(self):
            return x + 1

    return Local()


def _in_a_property(x):
    class Local:
        doubled = property(lambda self: x * 2)

    return {"made": [Local()]}


def _in_a_static_method(x):
    class Local:
        @staticmethod
        def get():
            return x

    return Local


def _in_an_attribute(x):
    class Local:
        scale = x * 3

    return Local()


def _in_a_base(x):
    class Base:
        def get(self):
            return x

    class Local(Base):
        pass

    return Local()


@pytest.mark.parametrize("make", [_in_a_method, _in_a_property, _in_a_static_method, _in_an_attribute, _in_a_base])
def test_a_class_that_holds_a_tracer_does_not_leave_the_trace(make):
    f = graftax.jit(make)
    for _ in range(2):
        with pytest.raises(graftax.StructureError, match=r"result.*Local.*made inside the traced function"):
            f(x)


def test_a_class_made_inside_may_be_returned_where_it_holds_no_tracer():
    def make(x):
        class Local:
            kind = "local"

            def __init__(self, w):
                self.w = w

            def get(self):
                return self.w + 1

        return Local(x * 2)

    f = graftax.jit(make)
    for _ in range(2):
        assert f(x).get().tolist() == make(x).get().tolist() and f(x).kind == "local"


def test_a_change_that_puts_such_an_object_into_an_argument_is_refused():
    box = Box(held=None)

    def put(box, x):
        box.held = _in_a_method(x)

    with pytest.raises(graftax.StructureError, match="what it changed"):
        graftax.jit(put)(box, x)
    assert box.held is None
