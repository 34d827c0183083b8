# SPDX-License-Identifier: Apache-2.0
"""Branches and loops whose functions put new containers in place of old ones: contents are selected leaf by leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftax


class Box:
    def __init__(self, **values):
        self.__dict__.update(values)


class Trainer:
    def __init__(self):
        self.params = {"w": jnp.ones(3), "layers": [{"b": jnp.zeros(2)}, {"b": jnp.ones(2)}]}
        self.tx = optax.adam(0.1)
        self.state = self.tx.init(self.params)

    def step(self):
        grads = jax.tree.map(lambda x: x + 1.0, self.params)
        updates, self.state = self.tx.update(grads, self.state, self.params)
        self.params = optax.apply_updates(self.params, updates)


def leaves(graph):
    return [np.asarray(x) for x in graftax.flatten(graph)[0]]


def assert_equal(actual, expected):
    assert graftax.flatten(actual)[1] == graftax.flatten(expected)[1]
    assert all(np.allclose(x, y, atol=1e-6) for x, y in zip(leaves(actual), leaves(expected), strict=True))


@pytest.fixture(params=["jit", "eager", "nested"])
def run(request):
    if request.param == "jit":
        return graftax.jit
    if request.param == "eager":
        return lambda f: f

    def nested(f):
        return graftax.jit(lambda *args: graftax.cond(jnp.asarray(True), lambda: f(*args), lambda: f(*args)))

    return nested


@pytest.mark.quick(0)
def test_an_optimizer_step_with_fresh_dicts_is_a_branch(run):
    step = run(lambda trainer, ok: graftax.cond(ok, trainer.step, lambda: None))
    trainer, plain = Trainer(), Trainer()
    for ok in (True, False, True, True, False):
        step(trainer, jnp.asarray(ok))
        if ok:
            plain.step()
        assert_equal(trainer, plain)


@pytest.mark.quick(0)
def test_which_branch_replaces_makes_no_difference(run):
    for order in (lambda ok, f, g: graftax.cond(ok, f, g), lambda ok, f, g: graftax.switch(ok.astype(int), [g, f, g])):
        step = run(lambda trainer, ok, order=order: order(ok, trainer.step, lambda: None))
        turned = run(lambda trainer, ok, order=order: order(~ok, lambda: None, trainer.step))
        trainer, plain = Trainer(), Trainer()
        step(trainer, jnp.asarray(True))
        step(trainer, jnp.asarray(False))
        turned(trainer, jnp.asarray(True))
        plain.step()
        plain.step()
        assert_equal(trainer, plain)


def test_branches_that_replace_different_things_of_one_object(run):
    """Each branch leaves what the other replaces: neither write alone is the state."""

    def first(box):
        box.a = {"v": box.a["v"] + 1}
        box.n = box.n + 1

    def second(box):
        box.b = [box.b[0] * 2, {"in": box.b[1]["in"] - 1}]
        box.a["v"] = box.a["v"] * 10

    def third(box):
        box.b[1] = {"in": box.b[1]["in"] + 5}
        return None

    def make():
        return Box(a={"v": jnp.ones(2)}, b=[jnp.ones(2), {"in": jnp.zeros(2)}], n=jnp.asarray(0))

    branches = [first, second, third]
    choose = run(lambda box, i: graftax.switch(i, [lambda b=b: b(box) for b in branches]))
    for i, branch in enumerate(branches):
        box, plain = make(), make()
        choose(box, jnp.asarray(i))
        branch(plain)
        assert_equal(box, plain)


def test_the_old_object_stays_as_it_was(run):
    box = Box(d={"v": jnp.ones(2)})
    old = box.d

    def replace():
        box.d = {"v": box.d["v"] * 2}

    def change():
        box.d["v"] = box.d["v"] * 3

    run(lambda ok: graftax.cond(ok, replace, change))(jnp.asarray(True))
    assert (box.d["v"] == 2).all() and (old["v"] == 1).all() and box.d is not old


def test_a_variable_that_is_bound_anew(run):
    def call(ok):
        state = {"v": jnp.zeros(2)}

        def replace():
            nonlocal state
            state = {"v": state["v"] + 1}

        graftax.cond(ok, replace, lambda: None)
        return state["v"]

    call = run(call)
    assert (call(jnp.asarray(True)) == 1).all() and (call(jnp.asarray(False)) == 0).all()


def test_an_object_that_two_hold_is_an_error_that_says_what_to_write(run):
    box = Box(d={"v": jnp.ones(2)})
    box.other = box.d

    def replace():
        box.d = {"v": box.d["v"] * 2}

    with pytest.raises(graftax.StructureError, match=r"box\.d and .*box\.other.*(?s:.*)instead of replacing it"):
        run(lambda ok: graftax.cond(ok, replace, lambda: None))(jnp.asarray(True))
    assert box.other is box.d and (box.d["v"] == 1).all()


def test_another_structure_or_shape_names_the_place(run):
    box = Box(d={"v": jnp.ones(2)})

    def add_array():
        box.d = {"v": box.d["v"], "w": jnp.ones(1)}

    def longer():
        box.d = {"v": jnp.ones(3)}

    with pytest.raises(graftax.StructureError, match=r"box\.d\['w'\]: expected an array, given nothing"):
        run(lambda ok: graftax.cond(ok, add_array, lambda: None))(jnp.asarray(True))
    with pytest.raises(graftax.StructureError, match=r"box\.d\['v'\] is float32\[3\] after .* and float32\[2\]"):
        run(lambda ok: graftax.cond(ok, longer, lambda: None))(jnp.asarray(True))


def test_of_three_branches_one_may_have_fewer_arrays(run):
    box = Box(d={"v": jnp.ones(2)})

    def add_array():
        box.d = {"v": box.d["v"] + 1, "w": jnp.ones(1)}

    with pytest.raises(graftax.StructureError, match="leave different structures"):
        run(lambda i: graftax.switch(i, [add_array, lambda: None, lambda: None]))(jnp.asarray(0))


def test_the_old_object_may_be_the_result(run):
    box = Box(d={"v": jnp.ones(2)})

    def replace():
        old, box.d = box.d, {"v": box.d["v"] * 2}
        return old["v"], box.d

    def keep():
        return box.d["v"] * 5, box.d

    call = run(lambda ok: graftax.cond(ok, replace, keep))
    value, d = call(jnp.asarray(True))
    assert (value == 1).all() and (d["v"] == 2).all() and (box.d["v"] == 2).all()
    value, d = call(jnp.asarray(False))
    assert (value == 10).all() and (d["v"] == 2).all()


def test_gradients_go_through_the_selection():
    def loss(w, ok):
        box = Box(d={"v": w})

        def replace():
            box.d = {"v": box.d["v"] ** 2}

        graftax.cond(ok, replace, lambda: None)
        return box.d["v"].sum()

    grad = graftax.jit(graftax.grad(loss))
    assert (grad(jnp.full(2, 3.0), jnp.asarray(True)) == 6).all()
    assert (grad(jnp.full(2, 3.0), jnp.asarray(False)) == 1).all()


def test_members_of_a_population_choose_each_for_itself():
    def member(w, ok):
        box = Box(d={"v": w})

        def replace():
            box.d = {"v": box.d["v"] * 2}

        graftax.cond(ok, replace, lambda: None)
        return box.d["v"]

    out = graftax.jit(graftax.vmap(member))(jnp.ones((2, 3)), jnp.asarray([True, False]))
    assert (out == jnp.asarray([[2.0] * 3, [1.0] * 3])).all()


@pytest.mark.quick(1)
@pytest.mark.parametrize("loop", ["scan", "fori_loop", "while_loop"])
def test_loops_take_replaced_containers(run, loop):
    def call(trainer, n):
        if loop == "scan":
            graftax.scan(lambda carry, _: (trainer.step(), (carry, None))[1], 0.0, jnp.arange(3))
        elif loop == "fori_loop":
            graftax.fori_loop(0, n, lambda i, carry: (trainer.step(), carry)[1], 0.0)
        else:
            graftax.while_loop(lambda i: i < n, lambda i: (trainer.step(), i + 1)[1], 0)

    call = run(call)
    trainer, plain = Trainer(), Trainer()
    call(trainer, jnp.asarray(3))
    call(trainer, jnp.asarray(3 if loop == "scan" else 0))
    for _ in range(6 if loop == "scan" else 3):
        plain.step()
    assert_equal(trainer, plain)


def test_a_branch_in_a_loop_replaces():
    @graftax.jit
    def call(trainer, oks):
        graftax.scan(lambda carry, ok: (graftax.cond(ok, trainer.step, lambda: None), (carry, None))[1], 0.0, oks)

    trainer, plain = Trainer(), Trainer()
    call(trainer, jnp.asarray([True, False, True]))
    plain.step()
    plain.step()
    assert_equal(trainer, plain)


def test_an_order_of_keys_is_no_reason_for_an_error(run):
    """It may be any, so that a message does not name it beside what is wrong."""
    box = Box(d={"v": jnp.ones(2), "u": jnp.zeros(2)})
    box.other = box.d

    def replace(box):
        box.d = {"u": box.d["u"] + 1, "v": box.d["v"] * 2}

    for choose in (
        lambda box: graftax.cond(box.d["v"].sum() > 0, lambda: replace(box), lambda: None),
        lambda box: graftax.fori_loop(0, 2, lambda _, __: replace(box), None),
    ):
        with pytest.raises(graftax.StructureError, match=r"box\.d and .*box\.other: expected") as found:
            run(choose)(box)
        assert "the order" not in str(found.value)
