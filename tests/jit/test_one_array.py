# SPDX-License-Identifier: Apache-2.0
"""An array that a jitted function leaves in two places is one array there, as it is without `jit`."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import graftax
from zoo import Box


def in_the_result(x):
    y = x["a"] * 2
    return y, [y, {"y": y}], x["a"], y + 1


def in_what_is_written(x):
    x["a"] = x["b"] = x["a"] + 1
    x["list"].append(x["a"])


def in_both(x):
    x["a"] = x["a"] + 1
    x["box"].w = x["a"]
    return {"new": x["a"], "old": x["b"], "again": [x["box"]]}


def in_new_objects(x):
    first = Box(w=x["a"] + 1)
    second = Box(w=first.w, other=first)
    first.other = second
    x["pair"] = first, second
    return second


def by_way_of_a_helper(x):
    def tie(model):
        model.head = model.w

    x["box"].w = x["box"].w - 1
    tie(x["box"])
    return jax.tree.map(lambda w: w, {"w": x["box"].head})


PROGRAMS = [in_the_result, in_what_is_written, in_both, in_new_objects, by_way_of_a_helper]


def fresh():
    return {"a": jnp.ones(3), "b": jnp.zeros(3), "list": [jnp.ones(2)], "box": Box(w=jnp.ones(3), name="box")}


def which(*roots):
    """The places of arrays, those of one array together."""
    leaves, graphdef = graftax.flatten(roots)
    places_of: dict[int, list[str]] = {}
    for leaf, place in zip(leaves, graphdef.leaf_places(), strict=True):
        places_of.setdefault(id(leaf), []).append(str(place))
    return sorted(places_of.values())


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("options", [{}, {"donate": "x"}], ids=["kept", "donated"])
def test_one_array_stays_one(program, options):
    plain, jitted = fresh(), fresh()
    f = graftax.jit(program, **options)
    for _ in range(3):
        expected, result = program(plain), f(jitted)
        assert which(jitted, result) == which(plain, expected)
        assert graftax.equal((jitted, result), (plain, expected))


@pytest.mark.parametrize("program", PROGRAMS)
def test_one_array_stays_one_in_what_was_compiled_ahead(program):
    plain, jitted = fresh(), fresh()
    compiled = graftax.jit(program).lower(jitted).compile()
    expected, result = program(plain), compiled(jitted)
    assert which(jitted, result) == which(plain, expected)


@pytest.mark.parametrize("program", [in_the_result, in_both])
def test_one_array_stays_one_in_an_exported_program(program):
    plain, argument = fresh(), fresh()
    exported = graftax.export(graftax.jit(program))(argument)
    reloaded = type(exported).deserialize(exported.serialize())
    expected, result = program(plain), reloaded(argument)
    assert which(result) == which(expected)


def test_an_outcome_with_one_array_in_two_places_survives_pickle():
    f = graftax.jit(in_the_result)
    outcome = f.trace(fresh())._staging.entry.outcomes[0]
    assert outcome.num_leaves == 2
    again = pickle.loads(pickle.dumps(outcome))
    out = [jnp.ones(3), jnp.zeros(3)]
    (first, (second, third), old, _) = again.apply(out, [jnp.ones(1)] * 4, [None] * 4)
    assert first is out[0] and first is second and third["y"] is first and old is not first


def test_the_program_computes_it_once():
    text = graftax.jit(lambda x: (y := jnp.sin(x), y, [y])).lower(jnp.ones(3)).as_text()
    assert text.count("sine") == 1 and "-> (tensor<3xf32>" in text and "tensor<3xf32>, tensor<3xf32>" not in text


def test_equal_arrays_stay_two():
    first, second = graftax.jit(lambda x: (x + 1, x + 1))(jnp.ones(3))
    assert first is not second
    first, second = graftax.jit(lambda: (jnp.ones(3), jnp.ones(3)))()
    assert first is not second


def test_two_places_of_a_numpy_array_stay_two():
    """NumPy arrays that a function makes are made anew on each call, and each can be changed."""

    def f(x):
        made = np.arange(3)
        return x + 1, made, [made]

    _, first, (second,) = graftax.jit(f)(jnp.ones(3))
    assert (first == second).all()


def test_numbers_and_one_array_go_together():
    def f(x, n):
        y = x * n
        return y, n + 1, [y], n + 1

    jitted = graftax.jit(f)
    for n in (1.5, 2.5, 3.5, 4.5):
        y, m, (item,), last = jitted(jnp.ones(3), n)
        assert y is item and (m, last) == (n + 1, n + 1) and y[0] == n


def double(model, *_):
    model.w = model.head = model.w * 2
    return model


def over_no_rows(model):
    return graftax.scan(lambda carry, _: (carry, double(model).head), 0.0, None, length=3)[1]


def over_rows(model):
    graftax.scan(lambda m, _: (double(m), None), model, jnp.zeros(2))


def counted(model):
    graftax.fori_loop(0, 3, lambda _, m: double(m), model)


def mapped(model):
    graftax.map(lambda x: double(model) and x, jnp.zeros(2))


def in_every_branch(model):
    graftax.cond(model.w.sum() > 0, lambda: double(model) and None, lambda: double(double(model)) and None)


def in_the_result_of_branches(model):
    def pair(m):
        y = m.w + 1
        return [y, y]

    return graftax.switch(jnp.asarray(1), [pair, lambda m: pair(double(m))], model)


@pytest.mark.parametrize("jit", [graftax.jit, lambda f: f], ids=["jitted", "eager"])
@pytest.mark.parametrize(
    "program", [over_no_rows, over_rows, counted, mapped, in_every_branch, in_the_result_of_branches]
)
def test_what_each_step_and_each_branch_makes_one_is_one(program, jit):
    model = Box(w=jnp.ones(3), head=jnp.zeros(3))
    result = jit(program)(model)
    if program is in_the_result_of_branches:
        assert result[0] is result[1] and model.w[0] == 2
    else:
        assert model.w is model.head and model.w[0] > 1


def test_what_one_branch_makes_one_is_two_after_the_other():
    def maybe(model, ok):
        graftax.cond(ok, lambda: double(model) and None, lambda: None)

    model = Box(w=jnp.ones(3), head=jnp.zeros(3))
    graftax.jit(maybe)(model, jnp.asarray(False))
    assert model.w[0] == 1 and model.head[0] == 0


@pytest.mark.parametrize("steps", [0, 2])
def test_a_loop_that_may_have_no_step_keeps_two(steps):
    def grow(model, steps):
        def step(model):
            model.n = model.n + 1
            return double(model)

        graftax.while_loop(lambda model: model.n < steps, step, model)

    model = Box(w=jnp.ones(3), head=jnp.full(3, 7.0), n=jnp.array(0))
    graftax.jit(grow)(model, jnp.asarray(steps))
    assert (model.w[0], model.head[0]) == ((1, 7) if steps == 0 else (4, 4))


def test_under_out_shardings_each_place_has_its_own():
    there = SingleDeviceSharding(jax.devices()[0])
    first, second = graftax.jit(lambda x: (y := x + 1, y), out_shardings=there)(jnp.ones(3))
    assert (first == second).all()


def test_a_tie_that_a_step_makes_lasts():
    model = Box(embed=jnp.ones(3), head=jnp.zeros(3))

    @graftax.jit
    def tie(model):
        model.head = model.embed

    @graftax.jit
    def step(model):
        model.embed = model.head = model.embed * 0.5

    tie(model)
    assert model.head is model.embed
    for _ in range(3):
        step(model)
        assert model.head is model.embed
    assert graftax.count(model).parameters == 3


def test_show_draws_an_array_that_is_written_and_returned():
    text = graftax.show(graftax.jit(in_both), fresh()).text()
    assert "written" in text
