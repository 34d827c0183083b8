# SPDX-License-Identifier: Apache-2.0
"""A rule for cotangents runs after the trace of its function: it reads and changes the caller's objects as they are."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import graftax


class Model:
    def __init__(self, arrays):
        self.runs, self.scale, self.log, self.last = 0, 1, [], 0.0
        if arrays:
            self.w, self.last = jnp.ones(3), jnp.zeros(())


def rule_outside(custom, model, change):
    """A loss with a rule that is made outside of it."""

    @custom
    def sine(x):
        return jnp.sin(x)

    forwards = 0

    def forward(x):
        nonlocal forwards
        forwards += 1
        if change == "reads":
            model.scale += 2
        return jnp.sin(x), x

    def backward(x, g):
        if change == "counts":
            model.runs += 1
        if change == "appends":
            model.log.append(len(model.log))
        if change == "keeps":
            model.last = g * 2
        return (g * jnp.cos(x) * model.scale,)

    sine.defvjp(forward, backward)
    return (lambda model, x: 2 * sine(x)), lambda: forwards


def rule_inside(custom, model, change):
    """A loss that makes the rule, around the objects that it is given."""

    def loss(model, x):
        f, _ = rule_outside(custom, model, change)
        return f(model, x)

    return loss, lambda: 0


def of_jax(loss):
    return lambda model, x: jax.grad(lambda x: loss(model, x))(x)


GRADIENTS = {
    "argnums": lambda loss: graftax.grad(loss, argnums=1),
    "closure": lambda loss: lambda model, x: graftax.grad(lambda x: loss(model, x))(x),
    "value_and_grad": lambda loss: lambda model, x: graftax.value_and_grad(loss, argnums=1)(model, x)[1],
    "jacrev": lambda loss: graftax.jacrev(loss, argnums=1),
    "vjp": lambda loss: lambda model, x: graftax.vjp(lambda x: loss(model, x), x)[1](jnp.ones(()))[0],
    "jax.grad": of_jax,
    "jit within": lambda loss: lambda model, x: graftax.grad(lambda x: graftax.jit(loss)(model, x))(x),
    "checkpoint within": lambda loss: lambda model, x: graftax.grad(lambda x: graftax.checkpoint(loss)(model, x))(x),
}


def state_after(make, custom, gradient, around, change, arrays):
    model = Model(arrays)
    loss, forwards = make(custom, model, change)
    run = around(gradient(loss))
    values = [float(run(model, jnp.asarray(step / 4))) for step in range(3)]
    return values, model.runs, model.scale, model.log, float(model.last), forwards()


@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize("change", ["counts", "reads", "appends", "keeps"])
@pytest.mark.parametrize("around", [lambda f: f, graftax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("make", [rule_outside, rule_inside])
def test_a_rule_finds_and_changes_the_objects_of_the_caller(make, gradient, around, change, arrays):
    if change == "keeps" and (gradient in ("jacrev", "checkpoint within", "jit within") or not arrays):
        return  # JAX runs the rule under a vmap or a trace of its own: what it makes there is no array
    expected, *state = state_after(make, jax.custom_vjp, of_jax, lambda f: f, change, arrays)
    values, *final_state = state_after(make, graftax.custom_vjp, GRADIENTS[gradient], around, change, arrays)
    assert values == pytest.approx(expected) and final_state == state


def test_a_rule_reads_arrays_that_the_function_has_changed():
    model = Model(True)

    def loss(model, x):
        @graftax.custom_vjp
        def identity(x):
            return x

        identity.defvjp(lambda x: (x, None), lambda _, g: (g * model.w.sum(),))
        model.w = model.w * 2
        return identity(x) * 1.0

    assert [graftax.grad(loss, argnums=1)(model, jnp.ones(())) for _ in range(2)] == [6, 12]
    assert model.w.tolist() == [4, 4, 4]


def test_what_fails_in_the_backward_pass_leaves_what_the_forward_pass_did():
    model = Model(False)

    def loss(model, x):
        model.runs += 1

        @graftax.custom_vjp
        def identity(x):
            return x

        identity.defvjp(lambda x: (x, None), lambda _, g: 1 / 0)
        return identity(x)

    for gradient in (graftax.grad(loss, argnums=1), of_jax(loss)):
        with pytest.raises(ZeroDivisionError):
            gradient(model, jnp.ones(()))
    assert model.runs == 2
    with pytest.raises(ZeroDivisionError):
        graftax.jit(graftax.grad(loss, argnums=1))(model, jnp.ones(()))
    assert model.runs == 2  # a compiled call that fails leaves all as it was


def test_a_compiled_function_holds_nothing_of_what_its_rules_reach():
    model = Model(True)
    loss, _ = rule_inside(graftax.custom_vjp, model, "counts")
    run = graftax.jit(lambda model, x: loss(model, x))
    run(model, jnp.ones(()))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and run is not None


LOOPS = {
    "scan": lambda library, sine, x: library.scan(lambda c, _: (sine(c), None), x, None, length=3)[0],
    "map": lambda library, sine, x: library.map(sine, jnp.stack([x, x])).sum(),
    "cond": lambda library, sine, x: library.cond(x > 0, sine, lambda x: x, x),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_rule_of_what_runs_in_a_loop_or_a_branch_counts(loop):
    counts = []
    for library, custom, grad in ((jax.lax, jax.custom_vjp, jax.grad), (graftax, graftax.custom_vjp, graftax.grad)):
        model = Model(False)
        sine, _ = rule_outside(custom, model, "counts")
        for around in (lambda f: f, jax.jit if library is jax.lax else graftax.jit):
            around(grad(lambda x: LOOPS[loop](library, lambda x: sine(model, x), x)))(jnp.ones(()))
            counts.append(model.runs)
    assert counts[:2] == counts[2:] and counts[0] > 0


def test_a_rule_that_changes_what_the_loop_changes_is_an_error_that_says_so():
    model = Model(True)

    @graftax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    def forward(x):
        model.runs += 1
        return jnp.sin(x), x

    sine.defvjp(forward, lambda x, g: (g * jnp.cos(x),))

    def step(c, _):
        model.last = model.last + c
        return sine(c), None

    with pytest.raises(graftax.ConcurrentChangeError, match=r"a derivative rule, .* changed .*model.*\.runs"):
        graftax.grad(lambda x: graftax.scan(step, x, None, length=3)[0])(jnp.ones(()))
