# SPDX-License-Identifier: Apache-2.0
"""JAX's own transforms around code that changes objects: the error names the place, the transform, the replacement."""

import jax
import jax.numpy as jnp
import pytest

import graftax


class Norm:
    def __init__(self):
        self.mean, self.w, self.held = jnp.zeros(3), jnp.ones(3), {"last": None}

    def __call__(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x
        return (self.w * x - self.mean).sum()


def stacked(x):
    return jnp.stack([x, x])


BY_JAX = {
    "grad": (lambda m, x: jax.grad(m)(x), r"jax\.grad", "grad"),
    "vjp": (lambda m, x: jax.vjp(m, x)[0], r"jax\.grad", "grad"),
    "linearize": (lambda m, x: jax.linearize(m, x)[0], r"jax\.linearize", "linearize"),
    "jvp": (lambda m, x: jax.jvp(m, (x,), (x,)), r"jax\.jvp", "jvp"),
    "jacfwd": (lambda m, x: jax.jacfwd(m)(x), r"jax\.jvp \(or jacfwd", "jvp"),
    "vmap": (lambda m, x: jax.vmap(m)(stacked(x)), r"jax\.vmap", "vmap"),
    "grad of vmap": (lambda m, x: jax.grad(lambda x: jax.vmap(m)(stacked(x)).sum())(x), r"jax\.vmap", "vmap"),
    "scan": (lambda m, x: jax.lax.scan(lambda c, x: (c + m(x), None), 0.0, stacked(x)), r"jax\.lax\.scan", "scan"),
    "map": (lambda m, x: jax.lax.map(m, stacked(x)), r"jax\.lax\.scan \(or map\)", "scan"),
    "fori": (lambda m, x: jax.lax.fori_loop(0, 3, lambda i, c: c + m(x), 0.0), r"jax\.lax\.fori_loop", "fori_loop"),
    "while": (
        lambda m, x: jax.lax.while_loop(lambda c: c < 3, lambda c: c + m(x), 0.0),
        r"jax\.lax\.while",
        "while_loop",
    ),
    "cond": (lambda m, x: jax.lax.cond(x.sum() > 0, lambda: m(x), lambda: 0.0), r"jax\.lax\.cond", "cond"),
    "switch": (lambda m, x: jax.lax.switch(1, [lambda: 0.0, lambda: m(x)]), r"jax\.lax\.switch", "switch"),
    "checkpoint": (lambda m, x: jax.checkpoint(m)(x), r"jax\.checkpoint", "checkpoint"),
    "grad of checkpoint": (lambda m, x: jax.grad(jax.checkpoint(m))(x), r"jax\.checkpoint", "checkpoint"),
    "jit": (lambda m, x: jax.jit(m)(x), r"jax\.jit", "jit"),
}


@pytest.mark.parametrize("case", BY_JAX)
@pytest.mark.parametrize("use", ["left", "used", "returned", "leaked", "by a transform"])
def test_a_tracer_of_an_ended_transform_is_named(case, use):
    run, transform, ours = BY_JAX[case]
    model, x = Norm(), jnp.ones(3)
    text = rf"m\.mean holds a tracer of {transform}.*graftax\.{ours} in its"
    error = pytest.raises(graftax.MutationError, match=text)

    def call(m, x):
        run(m, x)
        if use == "used":
            return m.mean + 1
        return m.mean if use == "returned" else None

    if use in ("left", "used", "returned"):
        with error:
            graftax.jit(call)(model, x)
        assert (model.mean == 0).all()  # the caller's object is as it was
    else:
        run(model, x)  # as JAX does it: the model is spoilt
        with error:
            if use == "leaked":
                graftax.jit(lambda m: m.mean.sum())(model)
            else:
                graftax.grad(lambda w, m: (w * m.mean).sum())(x, model)


def test_it_is_told_on_a_hit_too():
    model = Norm()
    f = graftax.jit(lambda m: m.mean.sum())
    assert f(model) == 0 and f(model) == 0
    jax.vmap(model)(jnp.ones((2, 3)))
    with pytest.raises(graftax.MutationError, match=r"m\.mean holds a tracer of jax\.vmap"):
        f(model)
    model.mean = jnp.ones(3)
    assert f(model) == 3 and f.cache_info().traces == 1


def test_the_path_is_that_of_the_place():
    model = Norm()

    @graftax.jit
    def f(models, xs):
        def step(carry, x):
            models["a"][1].held["last"] = x
            return carry, x

        return jax.lax.scan(step, 0.0, xs)[1]

    text = r"models\['a'\]\[1\]\.held\['last'\] holds a tracer of jax\.lax\.scan"
    with pytest.raises(graftax.MutationError, match=text):
        f({"a": [1, model]}, jnp.ones(3))
    assert model.held["last"] is None


@pytest.mark.quick(0)
def test_what_still_runs_is_no_error():
    """Tracers of transforms around, and of those of this package, mean something."""
    model = Norm()

    def inner(m, x):
        return m(x)

    def outer(x):
        local = graftax.copy(model)
        value = graftax.jit(inner)(local, x)
        return value + jax.vmap(lambda y: graftax.jit(lambda m: m.mean.sum() * y)(local))(x).sum() + local.mean.sum()

    jax.jit(jax.grad(outer))(jnp.ones(3))
    jax.jvp(lambda x: jax.jit(outer)(x), (jnp.ones(3),), (jnp.ones(3),))
    jax.vmap(jax.grad(outer))(jnp.ones((2, 3)))
    jax.hessian(outer)(jnp.ones(3))
    jax.lax.scan(lambda c, x: (c + outer(x), None), 0.0, jnp.ones((2, 3)))

    def loop(x):
        local = graftax.copy(model)
        graftax.scan(lambda c, y: (c, graftax.vmap(lambda z: z * local(x))(y)), 0.0, jnp.ones((2, 3)))
        return local.mean.sum()

    assert jnp.isfinite(jax.jit(jax.grad(loop))(jnp.ones(3))).all()
