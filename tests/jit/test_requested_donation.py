# SPDX-License-Identifier: Apache-2.0
"""Donation: by words, names, positions and key paths; one buffer is passed once; errors name both paths."""

import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import graftax


def arrays(n):
    return [jnp.full(4, float(i)) for i in range(n)]


def test_an_array_in_two_donated_places_is_passed_once():
    @graftax.jit(donate=("a", "b"))
    def f(a, b):
        return a["w"] + 1, b + 2

    for _ in range(2):
        (w,) = arrays(1)
        one, two = f({"w": w}, w)
        assert one.tolist() == [1] * 4 and two.tolist() == [2] * 4
        assert w.is_deleted()
    assert f.cache_info().traces == 1


def test_the_alias_pattern_is_part_of_the_key():
    f = graftax.jit(lambda a, b: (a + 1, b * 2), donate=(0, 1))
    for _ in range(2):
        a, b = arrays(2)
        assert [o.tolist() for o in f(a, b)] == [[1] * 4, [2] * 4]
        (a,) = arrays(1)
        assert [o.tolist() for o in f(a, a)] == [[1] * 4, [0] * 4]
    assert f.cache_info().traces == 2


def test_without_donation_aliases_are_no_key():
    f = graftax.jit(lambda a, b: a + b)
    a, b = arrays(2)
    f(a, b), f(a, a)
    assert f.cache_info().traces == 1


@pytest.mark.parametrize("donate", ["state", "state.opt", "**.opt"])
def test_one_array_donated_and_kept_names_both_paths_and_donates_nothing(donate):
    class State:
        pass

    state = State()
    (state.opt,) = arrays(1)
    f = graftax.jit(lambda state, x: (state.opt + 1, x), donate=donate)
    with pytest.raises(graftax.StructureError, match=r"donate state\.opt, but x is the same array"):
        f(state, state.opt)
    assert not state.opt.is_deleted()


def test_a_captured_array_that_is_also_donated_is_an_error():
    (w,) = arrays(1)
    f = graftax.jit(lambda x: x + w, donate="all")
    with pytest.raises(graftax.StructureError, match="donate x, but closure w is the same array"):
        f(w)
    assert not w.is_deleted()


def test_patterns_choose_leaves():
    a, b, c = arrays(3)
    params = {"layers": [{"w": a, "m": b}], "step": c}
    f = graftax.jit(lambda params, x: x + params["step"], donate="params['layers'][*][m]")
    f(params, jnp.ones(4))
    assert [v.is_deleted() for v in (a, c)] == [False, False]
    assert params["layers"][0]["m"] is not b and not params["layers"][0]["m"].is_deleted()
    assert b.is_deleted()


def test_what_is_donated_and_stays_reachable_is_written_back():
    a, b = arrays(2)
    held = {"a": a, "b": (b, "note")}
    total = graftax.jit(lambda held: held["a"].sum() + held["b"][0].sum(), donate="all")
    for _ in range(3):
        assert float(total(held)) == 4
    assert held["a"].tolist() == [0] * 4 and held["b"][0].tolist() == [1] * 4 and held["b"][1] == "note"


@jax.tree_util.register_pytree_node_class
class Holder:
    """Registered with JAX: its arrays are in a slot, in an attribute, and in a tuple."""

    __slots__ = ("__dict__", "a", "empty")

    def __init__(self, a, b, c):
        self.a, self.b, self.c = a, b, (c, "note")

    def tree_flatten(self):
        return (self.a, self.b, self.c[0]), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_a_registered_object_never_holds_an_array_that_is_gone():
    before = arrays(3)
    held = Holder(*before)
    total = graftax.jit(lambda held: held.a.sum() + held.b.sum() + held.c[0].sum(), donate="all")
    for _ in range(3):
        assert float(total(held)) == 12
    assert all(x.is_deleted() for x in before) and held.c[1] == "note"
    assert [x.tolist() for x in (held.a, held.b, held.c[0])] == [[0] * 4, [1] * 4, [2] * 4]


@pytest.mark.parametrize("make", [Holder, lambda *xs: SimpleNamespace(a=xs[0], b=xs[1])], ids=["registered", "object"])
def test_what_is_written_for_a_donation_is_no_change_of_the_function(make):
    def pure(held):
        return held.a + held.b

    def changes(held):
        held.b = held.b + 1
        return held.a

    assert graftax.jit(pure, mutation="error", donate="all")(make(*arrays(3))).tolist() == [1] * 4
    with pytest.raises(graftax.MutationError, match="changed held"):
        graftax.jit(changes, mutation="error", donate="all")(make(*arrays(3)))


def test_of_many_arrays_none_that_is_donated_comes_back():
    @graftax.jit(donate="gone")
    def f(stays, gone):
        stays[0], gone[0] = gone[0], stays[0]
        return [gone[-1], stays[-1], *gone]

    stays, gone = arrays(40), [x + 100 for x in arrays(40)]
    expected = [[x[0].item() for x in xs] for xs in (stays, gone)]
    expected[0][0], expected[1][0] = expected[1][0], expected[0][0]
    before, last = list(gone), stays[-1]
    out = f(stays, gone)
    assert all(x.is_deleted() for x in before) and out[1] is last
    assert [[x[0].item() for x in xs] for xs in (stays, gone)] == expected
    assert [x[0].item() for x in out] == [expected[1][-1], expected[0][-1], *expected[1]]


def test_a_shared_object_that_holds_the_donated_array_is_one_place():
    (a,) = arrays(1)
    shared = [a]
    f = graftax.jit(lambda x, y: x.__setitem__(0, x[0] + 1), donate=("x", "y"))
    f(shared, shared)
    assert shared[0].tolist() == [1] * 4 and a.is_deleted()


def test_the_words_that_are_quiet_are_quiet_and_the_others_warn():
    for donate, count in (("all", 0), ("warn", 1)):
        (a,) = arrays(1)
        f = graftax.jit(lambda x: x[:2], donate=donate)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            f(a)
        assert sum("donated buffers" in str(w.message) for w in caught) == count
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.warn("Some donated buffers were not usable", stacklevel=1)
        assert len(caught) == 1  # the filter went with the call


def test_a_deleted_input_names_its_path():
    (a,) = arrays(1)
    f = graftax.jit(lambda m: m["w"] + 1, donate="all")
    model = {"w": a}
    f(model)
    model["w"].delete()
    with pytest.raises(RuntimeError, match=r"m\['w'\] holds an array that was deleted"):
        f(model)


def test_nothing_is_donated_when_the_function_raises():
    (a,) = arrays(1)

    @graftax.jit(donate="all")
    def f(x, fail):
        if fail:
            raise ValueError("no")
        return x + 1

    with pytest.raises(ValueError, match="no"):
        f(a, True)
    assert f(a, False).tolist() == [1] * 4


def test_donation_of_an_argument_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="no argument 'y'"):
        graftax.jit(lambda x: x, donate="y")
