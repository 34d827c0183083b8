# SPDX-License-Identifier: Apache-2.0
"""One array in two places stays one in what is made of a graph, within a trace as outside of it."""

import copy
import itertools
import pickle
import warnings

import jax.numpy as jnp
import optax
import pytest

import graftax
from zoo import Box, f32

NAMES = "abc"


def built(pattern, start=0.0):
    """Three places; those with one letter in the pattern hold one array."""
    arrays = {letter: jnp.full(2, start + i, jnp.float32) for i, letter in enumerate(sorted(set(pattern)))}
    return Box(**{name: arrays[letter] for name, letter in zip(NAMES, pattern, strict=True)}, kind="box")


def ties(*graphs):
    values = [getattr(graph, name) for graph in graphs for name in NAMES]
    return [next(i for i, other in enumerate(values) if other is value) for value in values]


def averaged(target, model):
    graftax.ema(target, model, 0.5)


def mapped(target, model):
    graftax.update(target, graftax.map_leaves(lambda x, y: x + 2 * y, target, model))


def mapped_with_a_path(target, model):
    graftax.update(model, graftax.map_leaves(lambda path, x: x + len(str(path)), model, with_path=True))


def cast_and_back(target, model):
    graftax.update(target, graftax.cast(graftax.cast(model, jnp.float16), jnp.float32))


def copied(target, model):
    graftax.update(target, graftax.copy(model, arrays=True))


def several(target, model):
    graftax.ema(target, model, 0.5)
    mapped(model, target)


def stacked_and_back(target, model):
    graftax.update(target, graftax.unstack(graftax.stack([target, model]))[1])


STEPS = [averaged, mapped, mapped_with_a_path, cast_and_back, copied, several, stacked_and_back]


def plainly(step, target, model):
    step(target, model)


def in_a_call(step, target, model):
    graftax.jit(step)(target, model)


def in_a_scan(step, target, model):
    graftax.scan(lambda _, __: (None, step(target, model)), None, length=2)


def as_a_carry(step, target, model):
    def body(_, carry):
        step(*carry)
        return carry

    graftax.fori_loop(0, 2, body, [target, model])


def in_a_branch(step, target, model):
    graftax.cond(model.a.sum() > -1, lambda: step(target, model), lambda: None)


def in_both_branches(step, target, model):
    graftax.cond(model.a.sum() > -1, lambda: step(target, model), lambda: mapped(target, model))


def in_a_gradient(step, target, model):
    def loss(x):
        step(target, model)
        return x**2

    graftax.grad(loss)(1.0)


def recomputed(step, target, model):
    graftax.checkpoint(step)(target, model)


WAYS = [plainly, in_a_call, in_a_scan, as_a_carry, in_a_branch, in_both_branches, in_a_gradient, recomputed]
ALIKE = [("abc", "abc"), ("aab", "aab"), ("aba", "aba"), ("aaa", "aaa")]
PATTERNS = [*ALIKE, ("aab", "abb"), ("aaa", "aab"), ("aba", "aaa")]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step", STEPS)
def test_a_hit_ties_what_the_caller_has_tied(step, way):
    """Arrays are no part of what is compiled for: one program is right for all patterns."""
    jitted = graftax.jit(lambda target, model: way(step, target, model))
    # Where another branch leaves two, they are two: which one ran is not known.
    for old, new in ALIKE if way in (in_a_branch, in_both_branches) else PATTERNS:
        plain, fast = [(built(old), built(new, 5.0)) for _ in range(2)]
        for _ in range(2):
            for _ in range(2 if way in (in_a_scan, as_a_carry) else 1):
                plainly(step, *plain)
            jitted(*fast)
            assert ties(*fast) == ties(*plain), (old, new)
            assert all(map(jnp.allclose, arrays(fast), arrays(plain)))
    assert jitted.cache_info().traces == 1


def arrays(graphs):
    return [getattr(graph, name) for graph in graphs for name in NAMES]


@pytest.mark.parametrize("way", WAYS)
def test_outside_of_jit_too(way):
    target, model = built("aab"), built("aab", 5.0)
    way(averaged, target, model)
    assert target.a is target.b is not target.c and model.a is model.b


def test_in_a_vmap_where_both_places_have_one_axis():
    def step(target, model):
        graftax.ema(target, model, 0.5)

    def wide():
        model = graftax.map_leaves(lambda x: x + jnp.arange(2.0), built("aab", 5.0))
        return graftax.map_leaves(lambda x: jnp.stack([x, x + 1]), built("aab")), model

    for jit in (lambda f: f, graftax.jit):
        target, model = wide()
        jit(graftax.vmap(step, in_axes=(0, None)))(target, model)
        assert target.a is target.b and target.a.tolist() == [[2.5, 3], [3, 3.5]]
        target, model = wide()
        jit(graftax.vmap(step, in_axes=({"**.a": 1, "**": 0}, None)))(target, model)
        assert target.a.tolist() == [[2.5, 2.5], [3.5, 3.5]] and target.b.tolist() == [[2.5, 3], [3, 3.5]]


def test_ties_beside_an_optimizer():
    """A tie by array, trained and averaged for many steps, is one at the end in all three."""

    def loss(model):
        return (model.a * model.b).sum() + (model.c**2).sum()

    @graftax.jit
    def step(model, average, opt):
        def one(_, __):
            opt.update(model, graftax.grad(loss)(model))
            graftax.ema(average, model, 0.9)
            return None, None

        graftax.scan(one, None, length=3)

    model = built("aab", 2.0)
    average, opt = graftax.copy(model), graftax.optimizer(optax.adam(0.1), model)
    for _ in range(3):
        step(model, average, opt)
        assert model.a is model.b and average.a is average.b and model.a is not average.a
    assert graftax.count(average).parameters == 4 and list(opt.state[0].mu) == ["a", "c"]


def test_what_keeps_ties_is_told_of_no_more():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = graftax.jit(lambda model: graftax.map_leaves(lambda x: x * 2, model))(built("aab"))
        assert result.a is result.b


def test_what_a_function_computes_for_each_place_stays_two():
    """In plain Python it makes two arrays; and so it does here."""

    def halve(model):
        model.a, model.b = model.a / 2, model.b / 2

    model = built("aab", 1.0)
    graftax.jit(halve)(model)
    assert model.a is not model.b


def test_of_many_places_each_finds_its_own():
    names = [f"x{i}" for i in range(60)]
    shared = [jnp.full(2, float(i), jnp.float32) for i in range(20)]
    target, model = ({name: shared[i % 20] + k for i, name in enumerate(names)} for k in range(2))
    for i, name in enumerate(names[20:]):
        target[name] = target[names[i % 20]]
        model[name] = model[names[i % (20 if i < 30 else 10)]]
    step = graftax.jit(lambda target, model: graftax.ema(target, model, 0.5) and None)
    plain = dict(target)
    graftax.ema(plain, model, 0.5)
    step(target, model)
    for one, other in itertools.combinations(names, 2):
        assert (target[one] is target[other]) == (plain[one] is plain[other])


@pytest.mark.parametrize("how", ["compiled ahead", "exported"])
def test_in_programs_that_are_kept(how):
    @graftax.jit
    def step(target, model):
        return graftax.map_leaves(lambda x, y: x + y, target, model)

    target, model = built("aab"), built("aab", 5.0)
    if how == "compiled ahead":
        kept = step.lower(target, model).compile()
    else:
        exported = graftax.export(step)(target, model)
        kept = type(exported).deserialize(exported.serialize())
    for pattern in ("aab", "abb", "abc"):
        target, model = built(pattern), built(pattern, 5.0)
        assert ties(kept(target, model)) == ties(step(target, model)) == ties(target)


def test_an_outcome_with_ties_survives_pickle():
    step = graftax.jit(lambda model: graftax.map_leaves(lambda x: x * 2, model))
    outcome = step.trace(built("aab"))._staging.entry.outcomes[0]
    restored = pickle.loads(pickle.dumps(outcome))
    assert restored.alike == outcome.alike == [[(0, [0]), (1, [1]), (2, [2])]]
    with pytest.raises(ValueError, match="malformed"):
        type(outcome)._from_state((*outcome._state()[:6], [[(7, [0])]]))


def test_one_array_in_two_places_is_one_in_the_handle():
    """Ties of arrays are a part of the structure: a step that makes two of one packs anew."""

    def make():
        small, big = f32(1, 2), jnp.ones(300_000)
        return Box(a=small, b=small, n=[f32(3, 4), small], first=big, second=big, x="tied")

    def tied(box):
        values = [box.a, box.b, *box.n, box.first, box.second]
        return [next(i for i, other in enumerate(values) if other is x) for x in values]

    handle, plain = graftax.pack(make()), make()
    assert handle.nbytes == 8 + 8 + 1_200_000 and tied(handle.unpack()) == tied(plain) == [0, 0, 2, 0, 4, 4]

    @graftax.jit
    def step(box):
        box.a = box.b = box.n[1] = box.a * 2
        box.n[0] = box.n[0] - 1

    for _ in range(2):
        step(handle), step(plain)
        assert tied(handle.unpack()) == tied(plain) and graftax.equal(handle.unpack(), plain)
    assert step.cache_info().traces == 2  # one for the handle, one for the box
    for twin in (copy.copy(handle), pickle.loads(pickle.dumps(handle))):
        assert tied(twin.unpack()) == tied(plain)

    @graftax.jit
    def untie(box):
        box.b = box.b + 1

    for _ in range(2):
        untie(handle), untie(plain)
        assert tied(handle.unpack()) == tied(plain) == [0, 1, 2, 0, 4, 4]
        assert graftax.equal(handle.unpack(), plain)


def test_an_optimizer_that_is_made_of_a_handle_knows_its_tied():
    w = f32(1, 2)
    handle, plain = graftax.pack(Box(a=w, b=w)), Box(a=w, b=w)
    opt, other = graftax.optimizer(optax.sgd(0.1), handle), graftax.optimizer(optax.sgd(0.1), plain)
    assert list(opt.parameters(handle)) == list(other.parameters(plain)) == ["a"]

    @graftax.jit
    def step(model, opt):
        opt.update(model, graftax.grad(lambda m: (3 * m.a + 2 * m.b).sum())(model))

    step(handle, opt), step(plain, other)
    contents = handle.unpack()
    assert contents.a is contents.b and graftax.equal(contents, plain)
