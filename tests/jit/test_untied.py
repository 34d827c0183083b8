# SPDX-License-Identifier: Apache-2.0
"""A call that makes several of what was shared says so, once, and names both places."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import graftax


def tied_arrays():
    embed = jnp.ones((3, 2))
    return {"embed": embed, "head": embed, "bias": jnp.zeros(3)}


def tied_objects():
    layer = [jnp.ones((2, 2)), {"b": jnp.zeros(2)}]
    return {"encoder": layer, "decoder": layer}


class Trainer:
    def __init__(self, model):
        self.model, self.average = model, None
        self.tx = optax.adam(0.1)
        self.state = self.tx.init(model)

    def step(self, loss):
        grads = jax.grad(loss)(self.model)
        updates, self.state = self.tx.update(grads, self.state, self.model)
        self.model = optax.apply_updates(self.model, updates)


def total(model):
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(model))


def of_embed_and_head(model):
    return jnp.sum(jnp.tanh(model["embed"]) @ model["head"].T + model["bias"])


def untied_warnings(call, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args)
    return [str(w.message) for w in caught if w.category is graftax.UntiedWarning]


def test_a_write_back_that_unties_arrays_names_both_places_and_the_remedy():
    trainer = Trainer(tied_arrays())
    step = graftax.jit(lambda trainer: trainer.step(of_embed_and_head))
    (text,) = untied_warnings(step, trainer)
    assert "trainer.model['embed'] and trainer.model['head'] are one array" in text
    assert "graftax.optimizer" in text
    assert untied_warnings(step, trainer) == []  # a hit
    assert not (trainer.model["embed"] == trainer.model["head"]).all()  # as plain code does it


def test_a_result_that_unties_objects_is_told_with_the_places_of_the_result():
    (text,) = untied_warnings(graftax.jit(lambda m: (0, jax.tree.map(lambda w: 0.9 * w, m))), tied_objects())
    assert "m['encoder'][0] and m['decoder'][0] are of one object" in text
    assert "result[1]['encoder'][0] and result[1]['decoder'][0]" in text
    assert "graftax.map_leaves" in text


@pytest.mark.parametrize(
    "step",
    [
        lambda m: jax.tree.map(lambda w: w - 0.1 * jnp.tanh(w), m),
        lambda m: jax.tree.map(lambda w, g: w - 0.1 * g, m, jax.grad(total)(m)),
        lambda m: jax.tree.map(lambda w, g: (w - 0.1 * g).astype(jnp.bfloat16), m, jax.grad(total)(m)),
        lambda m: optax.apply_updates(m, jax.grad(total)(m)),
        lambda m: jax.tree.map(jnp.copy, m),
        lambda m: jax.tree.unflatten(jax.tree.structure(m), [x * 2 for x in jax.tree.leaves(m)]),
    ],
)
@pytest.mark.parametrize("model", [tied_arrays, tied_objects])
def test_functions_of_trees_are_told(step, model):
    step = graftax.jit(step)
    step.clear_cache()
    assert len(untied_warnings(step, model())) == 1


@pytest.mark.quick(0)
def test_equinox_modules_with_a_shared_layer_are_told():
    class Model(eqx.Module):
        first: eqx.nn.Linear
        second: eqx.nn.Linear

    layer = eqx.nn.Linear(2, 2, key=jax.random.key(0))

    def step(model):
        grads = eqx.filter_grad(lambda m: m.second(m.first(jnp.ones(2))).sum())(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -g, grads))

    (text,) = untied_warnings(graftax.jit(step), Model(layer, layer))
    assert "model.first.weight and model.second.weight are one array" in text
    assert untied_warnings(graftax.filter_jit(step), Model(layer, layer)) == []  # a tree, by value: as in Equinox


@pytest.mark.quick(0)
def test_what_keeps_ties_is_silent():
    model = tied_objects()
    assert untied_warnings(graftax.jit(lambda m: graftax.map_leaves(lambda w: w - 1.0, m)), model) == []

    def replace(box):
        box["model"] = graftax.map_leaves(lambda w: w - 1.0, box["model"])

    assert untied_warnings(graftax.jit(replace), {"model": model}) == []
    for make, loss in ((tied_arrays, of_embed_and_head), (tied_objects, total)):
        model = make()
        opt = graftax.optimizer(optax.adam(0.1), model)

        def step(model, opt, loss=loss):
            opt.update(model, graftax.grad(loss)(model))

        assert untied_warnings(graftax.jit(step), model, opt) == []


@pytest.mark.quick(0)
def test_what_was_equal_by_chance_is_silent():
    """Averages, targets and workers begin with the arrays of their model; counters share one zero."""
    params = {"w": jnp.ones(3)}
    batch = jnp.arange(3.0)

    def averaged(state):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], jax.grad(total)(state["params"]))
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], params)
        return {"params": params, "average": average}

    assert untied_warnings(graftax.jit(averaged), {"params": params, "average": params}) == []
    assert untied_warnings(graftax.jit(averaged), {"params": params, "average": graftax.copy(params)}) == []

    class Net:
        def __init__(self, w):
            self.w = w

    class Both:
        def __init__(self):
            self.net = Net(jnp.ones(3))
            self.workers = [graftax.copy(self.net) for _ in range(3)]

    def by_hand(both):
        for i, net in enumerate([both.net, *both.workers]):
            net.w = net.w - 0.1 * batch * i

    assert untied_warnings(graftax.jit(by_hand), Both()) == []
    zero = jnp.zeros(())
    assert untied_warnings(graftax.jit(lambda c: jax.tree.map(lambda x: x + 1, c)), {"a": zero, "b": zero}) == []
    assert untied_warnings(graftax.jit(lambda a, b: (a - 1, b - 1)), params["w"], params["w"]) == []
    assert untied_warnings(graftax.jit(lambda m: jax.grad(of_embed_and_head)(m)), tied_arrays()) == []
    assert untied_warnings(graftax.jit(lambda m: optax.adam(1.0).init(m)), tied_objects()) == []
    assert (
        untied_warnings(graftax.jit(lambda m: {**m, "head": m["head"] - 1}), tied_arrays()) == []
    )  # one of them alone


def test_cycles_and_many_shared_objects_are_looked_at():
    class Node:
        pass

    nodes = [Node() for _ in range(200)]
    for i, node in enumerate(nodes):
        node.w, node.next, node.all = jnp.ones(2), nodes[(i + 1) % 200], nodes

    def step(nodes):
        for node in nodes:
            node.w = node.w - 1.0

    assert untied_warnings(graftax.jit(step), nodes) == []


def test_it_is_told_once_for_a_function():
    f = graftax.jit(lambda m: jax.tree.map(lambda w: w * 2, m))
    assert len(untied_warnings(f, tied_arrays())) == 1
    assert untied_warnings(f, tied_objects()) == []
    f.clear_cache()
    assert len(untied_warnings(f, tied_objects())) == 1


def halved(m):
    return jax.tree.map(lambda w: w - 0.5 * jnp.tanh(w), m)


def stepped(m):
    return optax.apply_updates(m, jax.tree.map(lambda g: -0.1 * g, jax.grad(of_embed_and_head)(m)))


LOOPS = {
    "graftax.scan": lambda f, m: graftax.scan(lambda m, _: (f(m), None), m, length=3)[0],
    "jax.lax.scan": lambda f, m: jax.lax.scan(lambda m, x: (f(m), x), m, jnp.arange(3.0))[0],
    "fori_loop": lambda f, m: jax.lax.fori_loop(0, 3, lambda _, m: f(m), m),
    "graftax.while_loop": lambda f, m: graftax.while_loop(lambda m: total(m) > 1e9, f, m),
    "jax.lax.while_loop": lambda f, m: jax.lax.while_loop(lambda m: total(m) > 1e9, f, m),
    "graftax.cond": lambda f, m: graftax.cond(total(m) > 1.0, f, lambda m: m, m),
    "jax.lax.cond": lambda f, m: jax.lax.cond(total(m) > 1.0, f, lambda m: m, m),
    "jax.jit": lambda f, m: jax.jit(f)(m),
    "jax.checkpoint": lambda f, m: jax.checkpoint(f)(m),
    "a loop in a loop": lambda f, m: LOOPS["graftax.scan"](lambda m: LOOPS["fori_loop"](f, m), m),
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("step", [halved, stepped])
def test_a_carry_and_a_branch_are_told(loop, step):
    def function(model):
        return loop(step, model)

    assert len(untied_warnings(graftax.jit(function), tied_arrays())) == 1
    kept = lambda m: {**m, "bias": m["bias"] - 1.0}
    assert untied_warnings(graftax.jit(lambda m: loop(kept, m)), tied_arrays()) == []


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_loop_that_keeps_an_average_is_silent(loop):
    params = {"w": jnp.ones(3)}

    def averaged(state):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], jax.grad(total)(state["params"]))
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], params)
        return {"params": params, "average": average}

    assert untied_warnings(graftax.jit(lambda s: loop(averaged, s)), {"params": params, "average": dict(params)}) == []


def test_what_a_loop_writes_is_told():
    def steps(trainer):
        graftax.scan(lambda _, x: (trainer.step(of_embed_and_head), None), None, length=2)

    trainer = Trainer(tied_arrays())
    (text,) = untied_warnings(graftax.jit(steps), trainer)
    assert "trainer.model['embed'] and trainer.model['head']" in text


@pytest.mark.parametrize("tied", [tied_arrays, tied_objects])
def test_a_third_place_outside_of_what_is_replaced_hides_nothing(tied):
    trainer = Trainer(tied())
    trainer.first = next(iter(trainer.model.values()))  # comes before the model
    trainer.__dict__ = dict(sorted(trainer.__dict__.items()))

    def step(trainer):
        grads = graftax.grad(total)(trainer.model)
        trainer.model = jax.tree.map(lambda p, g: p - 0.1 * g, trainer.model, grads)

    (text,) = untied_warnings(graftax.jit(step), trainer)
    assert "trainer.model" in text and "UntiedWarning" not in text
