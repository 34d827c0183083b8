# SPDX-License-Identifier: Apache-2.0
"""`optimizer`: what is trained, frozen and mutable models, the forms of gradients, errors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import graftax
from training import assert_same, layers, loss
from zoo import Affine, Box, f32

# ---- what is trained


def model_of_parts() -> Any:
    return Box(body=Affine(f32(1, 2), f32(3)), head=Box(w=f32(4), b=f32(5)), steps=jnp.asarray(0), rate=0.1, name="x")


@pytest.mark.parametrize(
    ("wrt", "names"),
    [
        (None, ["body.weight", "body.bias", "head.w", "head.b"]),
        ("head", ["head.w", "head.b"]),
        ("**.b*", ["body.weight", "body.bias", "head.b"]),
        (["head.w", "body.bias"], ["body.bias", "head.w"]),
        (Affine, ["body.weight", "body.bias"]),
        (lambda leaf: getattr(leaf, "size", 0) > 1, ["body.weight"]),
        (graftax.Path.parse("head.w"), ["head.w"]),
    ],
)
def test_what_is_trained_is_said_as_in_partition(wrt: Any, names: list[str]):
    model = model_of_parts()
    opt = graftax.optimizer(optax.sgd(0.5), model, wrt=wrt)
    before = opt.parameters(model_of_parts())
    assert list(before) == sorted(names) and f"; {len(names)} parameter" in repr(opt)
    everything = graftax.optimizer(optax.sgd(0.5), model).parameters(model)
    opt.update(model, graftax.grad(loss)(model))  # gradients of more than is trained
    after = graftax.optimizer(optax.sgd(0.5), model).parameters(model)
    assert [name for name in everything if after[name] is not everything[name]] == sorted(names)
    assert (model.name, model.rate, model.steps) == ("x", 0.1, 0)


def test_labels_by_patterns_types_and_predicates():
    rules = {"**.bias": "none", Affine: "slow", "head": "fast"}
    tx = optax.multi_transform(
        {"none": optax.set_to_zero(), "slow": optax.sgd(0.1), "fast": optax.sgd(1.0)}, graftax.labels(rules)
    )
    model = model_of_parts()
    opt = graftax.optimizer(tx, model)
    step = graftax.jit(
        lambda model, opt: (
            opt.update(
                model,
                graftax.grad(lambda m: sum(opt.parameters(m)["body.weight"]) + m.head.w.sum() + m.head.b.sum())(model),
            )
            and None
        )
    )
    step(model, opt)
    assert model.body.bias[0] == 3 and np.allclose(model.body.weight, [0.9, 1.9]) and model.head.w[0] == 3
    tied = Box(a=Box(bias=f32(1)))
    tied.b = tied.a
    assert graftax.optimizer(optax.masked(optax.sgd(1.0), graftax.labels({"b": True, "**": False})), tied).update(
        tied, graftax.grad(loss)(tied)
    ).a.bias[0] == pytest.approx(-0.4)  # by whatever way it is reached
    mask = graftax.labels({"**.b": False, "**": True})
    assert mask({"a.b": 1, "a.w": 2}) == {"a.b": False, "a.w": True}
    assert repr(mask) == "graftax.labels({'**.b': False, '**': True})"
    with pytest.raises(graftax.StructureError, match=r"no rule matches head\.b, head\.w"):
        graftax.optimizer(optax.masked(optax.sgd(1.0), graftax.labels({"body": True})), model)
    with pytest.raises(graftax.StructureError, match=r"haed"):
        graftax.optimizer(optax.masked(optax.sgd(1.0), graftax.labels({"haed": True})), model)
    with pytest.raises(TypeError, match="use patterns"):
        graftax.labels({Box: True})({"w": 1})
    with pytest.raises(ValueError, match="at least one rule"):
        graftax.labels({})


def test_an_array_in_several_places_is_one_parameter():
    w = f32(1, 2)
    model = Box(embed=w, head=(w, "x"), other=jnp.copy(w))
    opt = graftax.optimizer(optax.sgd(0.1, momentum=0.9), model)
    assert list(opt.parameters(model)) == ["embed", "other"] and "tied: embed = head[0]" in repr(opt)
    step = graftax.jit(
        lambda model, opt: opt.update(model, graftax.grad(lambda m: (m.embed + 2 * m.head[0]).sum())(model)) and None
    )
    for _ in range(2):
        step(model, opt)
    np.testing.assert_allclose(model.embed, w - 0.3 - 0.57, rtol=1e-5)
    assert jnp.array_equal(model.embed, model.head[0]) and model.head[1] == "x"


def test_names_are_told_apart():
    model = {"a": {"b": f32(1)}, "a.b": f32(2), 1: f32(3), "1": f32(4)}
    opt = graftax.optimizer(optax.sgd(1.0), model)
    assert list(opt.parameters(model)) == sorted(["[a][b]", "[a.b]", "[1]", "['1']"])

    class Key:
        def __repr__(self) -> str:
            return "key"

    model = {Key(): f32(1), Key(): f32(2)}
    assert len(graftax.optimizer(optax.sgd(1.0), model).parameters(model)) == 2
    assert list(graftax.optimizer(optax.sgd(1.0), f32(1)).parameters(f32(1))) == [""]


# ---- mutable and frozen


@pytest.mark.quick(0)
def test_a_frozen_model_is_made_anew():
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    fit = lambda model, x: (model(x) ** 2).sum()
    x = f32(1, 2)
    opt = graftax.optimizer(optax.adam(1e-2), model)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    tx = optax.adam(1e-2)
    state = tx.init(params)

    @graftax.jit
    def step(model: Any, opt: Any) -> Any:
        return opt.update(model, eqx.filter_grad(fit)(model, x))

    trained = model
    for _ in range(3):
        trained = step(trained, opt)
        updates, state = tx.update(jax.grad(lambda p: fit(eqx.combine(p, static), x))(params), state, params)
        params = optax.apply_updates(params, updates)
    assert_same(jax.tree.leaves(eqx.filter(trained, eqx.is_array)), jax.tree.leaves(params))
    assert graftax.equal(model, eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0)))


def test_a_frozen_part_inside_of_a_mutable_object_is_replaced_there():
    model = Box(mlp=Affine(f32(1), (f32(2), "x")), w=f32(3))
    part = model.mlp
    opt = graftax.optimizer(optax.sgd(0.5), model)
    assert opt.update(model, graftax.grad(loss)(model)) is model
    assert model.mlp is not part and part.weight[0] == 1 and model.mlp.bias[1] == "x"


# ---- the forms of gradients


def test_gradients_as_a_dict_and_as_a_list():
    grads = {"layer.b": f32(2), "w": f32(1)}
    for form in (grads, dict(reversed(grads.items())), list(grads.values()), tuple(grads.values())):
        model = Box(w=f32(1), layer=Box(b=f32(1)))
        graftax.optimizer(optax.sgd(1.0), model).update(model, form)
        assert model.w[0] == 0 and model.layer.b[0] == -1


def test_gradients_of_a_tuple_of_models():
    generator, critic = Box(w=f32(1)), Box(w=f32(1))
    opt = graftax.optimizer(optax.sgd(1.0), (generator, critic))
    grads = graftax.grad(lambda g, c: (g.w * 2 - c.w).sum(), argnums=(0, 1))(generator, critic)
    opt.update((generator, critic), grads)
    assert generator.w[0] == -1 and critic.w[0] == 2


def test_what_the_loss_changes_plays_no_part():
    class Net:
        def __init__(self) -> None:
            self.w, self.calls, self.log = f32(1), 0, []

        def __call__(self, x: Any) -> Any:
            self.calls, self.last = self.calls + 1, x
            self.log.append(x)
            self.__dict__ = {"first": self.log, **self.__dict__}
            return (self.w * x).sum()

    net = Net()
    opt = graftax.optimizer(optax.sgd(1.0), net, wrt="w")
    for _ in range(2):
        opt.update(net, graftax.grad(lambda net, x: net(x))(net, f32(0.25)))
    assert net.w[0] == 0.5 and net.calls == 2 and len(net.log) == 2 and net.last[0] == 0.25


def test_mixed_precision_keeps_the_dtype_of_the_parameter():
    model = Box(w=jnp.ones(2, jnp.bfloat16))
    opt = graftax.optimizer(optax.sgd(0.5), model)
    opt.update(model, [jnp.ones(2, jnp.float32)])
    assert model.w.dtype == jnp.bfloat16 and model.w.tolist() == [0.5, 0.5]


def half(model: Any) -> Any:
    grads = graftax.grad(loss)(model)
    grads.first = grads.second = None
    return grads


ERRORS: dict[str, tuple[Callable[[Any, Any], Any], type, str]] = {
    "no gradient": (
        lambda opt, m: opt.update(m, half(m)),
        graftax.StructureError,
        r"no gradient for first\.w\. .*wrt=",
    ),
    "no gradients at all": (
        lambda opt, m: opt.update(m, None),
        graftax.StructureError,
        "the gradients are a NoneType without",
    ),
    "other shape": (
        lambda opt, m: opt.update(m, {"first.w": f32(1), "b": f32(1)}),
        graftax.StructureError,
        r"gradient of first\.w has the shape \(2,\), and was given the shape \(1,\)",
    ),
    "a place that the model has not": (
        lambda opt, m: opt.update(m, Box(first=Box(w=f32(1, 2)), c=f32(1), b=f32(1))),
        graftax.StructureError,
        r"the gradients have a gradient at obj\.c, where the model has nothing",
    ),
    "untied": (
        lambda opt, m: opt.update(m, Box(first=Box(w=f32(1, 2)), second=Box(w=f32(1, 2)), b=f32(1))),
        graftax.StructureError,
        r"obj\.first\.w of the model is one array, and the gradients have several for it, at .*graftax\.map_leaves",
    ),
    "swapped": (
        lambda opt, m: opt.update(graftax.grad(loss)(m), m),
        graftax.StructureError,
        r"the first one has None at .*name, where the second has a str",
    ),
    "another model": (
        lambda opt, m: opt.update(Box(b=f32(1), v=f32(1)), None),
        graftax.StructureError,
        r"this Box has no array at obj\.first\.w, .*It has ",
    ),
    "no transformation": (
        lambda opt, m: graftax.optimizer(optax.adam, m),
        TypeError,
        r"is of type function.* Call it: adam\(",
    ),
    "other order": (
        lambda opt, m: graftax.optimizer(m, optax.adam(1e-3)),
        TypeError,
        "of type Box. Did you swap the two arguments",
    ),
    "nothing to train": (
        lambda opt, m: graftax.optimizer(optax.sgd(1.0), Box(n=jnp.asarray(1), rate=0.1)),
        TypeError,
        r"no array of a floating dtype to train in this model.*The model has n",
    ),
    "nothing of a type": (lambda opt, m: graftax.optimizer(optax.sgd(1.0), m, wrt=str), TypeError, "wrt=<class 'str'>"),
    "misspelt": (lambda opt, m: graftax.optimizer(optax.sgd(1.0), m, wrt="frist"), graftax.StructureError, "first"),
    "names": (
        lambda opt, m: opt.assign(m, {"b": f32(1), "c": f32(1)}),
        graftax.StructureError,
        r"there is no first\.w, and c is none of them",
    ),
    "shape of a name": (
        lambda opt, m: opt.assign(m, {"b": f32(1), "first.w": 3.0}),
        graftax.StructureError,
        r"first\.w has the shape \(2,\), and was given a float",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
@pytest.mark.quick(10)
def test_errors_say_where_and_what_to_write(call: Any, error: Any, message: str):
    model = layers()
    opt = graftax.optimizer(optax.adam(1.0), model)
    state = copy.deepcopy(opt.state)
    with pytest.raises(error, match=message):
        call(opt, model)
    assert graftax.equal(model, layers()) and graftax.equal(opt.state, state), "nothing was changed"


def test_value_and_gradients_in_one():
    model = Box(w=f32(1), b=f32(2), c=f32(3))
    with pytest.raises(
        graftax.StructureError, match=r"a tuple of 2, .*parameters 3.*value_and_grad returns \(value, grad"
    ):
        graftax.optimizer(optax.sgd(1.0), model).update(model, graftax.value_and_grad(loss)(model))


@pytest.mark.quick(0)
def test_rows_of_gradients_are_for_the_transformations_that_take_them():
    model = {"w": jnp.ones(2), "b": jnp.zeros(())}
    rows = graftax.vmap(graftax.grad(lambda m, x: m["w"] @ x + m["b"]), in_axes=(None, 0))(model, jnp.ones((4, 2)))
    private = optax.contrib.differentially_private_aggregate(l2_norm_clip=100.0, noise_multiplier=0.0, key=0)
    opt = graftax.optimizer(optax.chain(private, optax.sgd(0.5)), model)
    graftax.jit(lambda model, opt, rows: opt.update(model, rows) and None)(model, opt, rows)
    assert model["w"].tolist() == [0.5, 0.5] and model["b"] == -0.5
    for tx in (optax.sgd(0.5), optax.adam(0.5), optax.MultiSteps(optax.adam(0.5), 2)):
        opt = graftax.optimizer(tx, model)
        before = graftax.copy((model, opt))
        with pytest.raises(graftax.StructureError, match=r"gradient of \[b\]"):
            opt.update(model, rows)
        assert graftax.equal(before, (model, opt))


def test_gradients_of_one_argument_in_a_tuple_are_those_of_the_model():
    model, twin = model_of_parts(), model_of_parts()
    by_list = graftax.grad(loss, wrt=["model.head"])(model)
    assert type(by_list) is tuple
    graftax.optimizer(optax.sgd(0.5), model, wrt="head").update(model, by_list)
    graftax.optimizer(optax.sgd(0.5), twin, wrt="head").update(twin, graftax.grad(loss)(twin))
    assert graftax.equal(model, twin)


def test_an_optimizer_that_is_made_in_a_trace_tells_of_tied_arrays():
    """Each place of the array is a parameter there, and the two are trained apart."""

    def train(model: Any) -> None:
        opt = graftax.optimizer(optax.sgd(0.1), model)
        opt.update(model, graftax.grad(lambda m: (3 * m.a + 2 * m.b).sum())(model))

    w = f32(1, 2)
    tied, apart = Box(a=w, b=w, n=jnp.asarray(0.0), m=jnp.asarray(0.0)), Box(a=f32(1, 2), b=f32(1, 2), n=w[0], m=w[0])
    with pytest.warns(graftax.UntiedWarning, match=r"obj\.a and obj\.b count as two parameters") as found:
        graftax.jit(train)(tied)
    assert len(found) == 1 and found[0].filename == __file__
    assert tied.a is not tied.b and tied.a[0] != tied.b[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graftax.jit(train)(apart)
        layer = Box(w=f32(1))
        graftax.jit(lambda model: graftax.optimizer(optax.sgd(0.1), model))(Box(a=layer, b=layer))
        graftax.optimizer(optax.sgd(0.1), Box(a=w, b=w))

    def inner(x: Any) -> Any:  # deeper inside: what is outside of all traces counts
        graftax.grad(lambda x: train(graftax.copy(model)) or x)(x)
        return x

    model = Box(a=w, b=w)
    with pytest.warns(graftax.UntiedWarning, match=r"obj\.a and obj\.b"):
        graftax.jit(graftax.vmap(inner))(f32(1, 2))
