# SPDX-License-Identifier: Apache-2.0
"""`optimizer` beside plain Optax over the zoo, in transforms and jit; what it is given; what it keeps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

import graftax
import zoo
from zoo import Affine, Box, f32

MATRICES = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
GROUPS = lambda params: jax.tree.map(lambda x: "slow" if x.size > 1 else "fast", params)

TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "sgd, momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(1e-2),
    "clipped, scheduled": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adam(optax.linear_schedule(1e-1, 1e-3, 4))
    ),
    "masked decay": lambda: optax.chain(optax.add_decayed_weights(1e-1, mask=MATRICES), optax.sgd(0.1)),
    "two transforms": lambda: optax.multi_transform({"slow": optax.sgd(1e-2), "fast": optax.adam(0.1)}, GROUPS),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1e-1, 1e-3, 9)),
    "every second step": lambda: optax.MultiSteps(optax.adam(1e-1), 2),
    "guarded": lambda: optax.apply_if_finite(optax.rmsprop(1e-2), 3),
    "lion": lambda: optax.lion(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2),
    "prodigy": lambda: optax.contrib.prodigy(1e-1),
    "polyak": lambda: optax.polyak_sgd(1.0),
    "line search": lambda: optax.lbfgs(linesearch=None),
}


def floating(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size > 0


def loss(model: Any) -> jax.Array:
    terms = [((leaf.astype(jnp.float32) - 0.3) ** 2).sum() for leaf in graftax.flatten(model)[0] if floating(leaf)]
    return sum(terms[1:], start=terms[0])


def plain(tx: Any, model: Any, steps: int) -> list[Any]:
    """Optax by hand: a list of the distinct arrays, and all leaves of the model afterwards."""
    leaves, graphdef = graftax.flatten(model)
    distinct = list({id(x): x for x in leaves if floating(x)}.values())
    number = {id(x): i for i, x in enumerate(distinct)}
    at = [number.get(id(x)) for x in leaves]

    def together(params: list[Any]) -> list[Any]:
        return [leaf if i is None else params[i] for leaf, i in zip(leaves, at, strict=True)]

    distinct = list(map(jnp.asarray, distinct))
    state = tx.init(distinct)
    tx = optax.with_extra_args_support(tx)
    for _ in range(steps):
        value, grads = jax.value_and_grad(lambda p: loss(graftax.unflatten(graphdef, together(p))))(distinct)
        updates, state = tx.update(grads, state, distinct, value=value)
        distinct = optax.apply_updates(distinct, updates)
    return together(distinct)


def assert_same(leaves: list[Any], expected: list[Any]) -> None:
    for a, b in zip(leaves, expected, strict=True):
        assert a.dtype == b.dtype
        if floating(a):
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-5, atol=1e-6)


TRAINED = [(name, build) for name, build in zoo.ZOO if any(map(floating, graftax.flatten(build())[0]))]


@pytest.mark.parametrize("transformation", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
@pytest.mark.parametrize("build", [build for _, build in TRAINED], ids=[name for name, _ in TRAINED])
@pytest.mark.quick(40)
def test_the_steps_are_those_of_plain_optax(build: Any, transformation: Any):
    expected = plain(transformation(), build(), 2)
    model = build()
    shape, shared = jax.tree.map(type, graftax.flatten(model)[1].leaf_places()), graftax.shared(model)
    opt = graftax.optimizer(transformation(), model, wrt=floating)
    for _ in range(2):
        value, grads = graftax.value_and_grad(loss, wrt=floating)(model)
        model = opt.update(model, grads, value=value)
    assert_same(graftax.flatten(model)[0], expected)
    assert jax.tree.map(type, graftax.flatten(model)[1].leaf_places()) == shape
    assert [s.paths for s in graftax.shared(model)] == [s.paths for s in shared]


@pytest.mark.parametrize("transformation", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_in_a_jitted_step(transformation: Any):
    w = f32(1, 2, 3)

    def build() -> Any:
        layer, root = Box(w=jnp.ones((2, 2)), b=f32(1, 2), n=3), Box(embed=w, head=[w], seen=jnp.asarray(0))
        root.layers, root.me = [layer, layer], root
        return root

    expected = plain(transformation(), build(), 3)
    model, opt = build(), graftax.optimizer(transformation(), build())

    @graftax.jit
    def step(model: Any, opt: Any) -> Any:
        value, grads = graftax.value_and_grad(loss)(model)
        opt.update(model, grads, value=value)
        return value

    layer = model.layers[0]
    for _ in range(3):
        step(model, opt)
    assert_same(graftax.flatten(model)[0], expected)
    assert model.layers == [layer, layer] and model.me is model and step.cache_info().traces == 1
    assert jnp.array_equal(model.embed, model.head[0])


def test_lookahead_keeps_its_slow_parameters():
    tx = optax.lookahead(optax.sgd(0.1), 2, 0.5)
    model = Box(w=f32(1, 2))
    params = optax.LookaheadParams.init_synced(model.w)
    state, opt = tx.init(params), graftax.optimizer(tx, model, params=optax.LookaheadParams.init_synced)
    step = graftax.jit(lambda model, opt: opt.update(model, graftax.grad(loss)(model)) and None)
    for _ in range(3):
        updates, state = tx.update(2 * (params.fast - 0.3), state, params)
        params = optax.apply_updates(params, updates)
        step(model, opt)
    np.testing.assert_allclose(model.w, params.fast, rtol=1e-6)
    np.testing.assert_allclose(opt.slow["w"], params.slow, rtol=1e-6)
    opt.assign(model, opt.slow)
    np.testing.assert_allclose(model.w, params.slow, rtol=1e-6)
    with pytest.raises(TypeError, match=r"params= makes.*returned of type dict"):
        graftax.optimizer(tx, model, params=dict)


def test_a_line_search_asks_a_function_of_the_model():
    def fit(model: Any, x: Any) -> Any:
        model.calls += 1
        return ((model.w * x - 3) ** 2).sum() + (model.layer.b**2).sum()

    def build() -> Any:
        layer = Box(b=f32(1))
        return Box(w=f32(1, 2), layer=layer, twin=layer, calls=0)

    x, tx = f32(1, 2), optax.lbfgs()
    params = {"w": f32(1, 2), "layer.b": f32(1)}
    of_dict = lambda p, x: ((p["w"] * x - 3) ** 2).sum() + (p["layer.b"] ** 2).sum()
    state = tx.init(params)
    model = build()
    opt = graftax.optimizer(tx, model)
    for _ in range(3):
        value, grads = jax.value_and_grad(of_dict)(params, x)
        updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=of_dict, x=x)
        params = optax.apply_updates(params, updates)
        value, grads = graftax.value_and_grad(fit)(model, x)
        opt.update(model, grads, value=value, grad=grads, value_fn=fit, x=x)
    np.testing.assert_allclose(model.w, params["w"], rtol=1e-5)
    assert model.calls == 3 and model.twin is model.layer


@pytest.mark.parametrize("wrt", [nnx.Param, None])
def test_beside_the_optimizer_of_nnx(wrt: Any):
    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first, self.last = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
            self.again = self.first
            self.norm = nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.last(nnx.relu(self.again(self.norm(self.last(nnx.relu(self.first(x)))))))

    fit = lambda net, x: (net(x) ** 2).mean()
    x = jax.random.normal(jax.random.key(0), (16, 4))
    ours, theirs = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    opt, reference = (
        graftax.optimizer(optax.adam(1e-2), ours, wrt=wrt),
        nnx.Optimizer(theirs, optax.adam(1e-2), wrt=nnx.Param),
    )

    @graftax.jit
    def step(net: Any, opt: Any) -> None:
        opt.update(net, graftax.grad(fit)(net, x))

    for _ in range(4):
        reference.update(theirs, nnx.grad(fit)(theirs, x))
        step(ours, opt)
    assert_same(graftax.flatten(ours)[0], graftax.flatten(theirs)[0])
    assert ours.again is ours.first
    if wrt is not None:
        assert "again.kernel" in opt.parameters(ours) and len(opt.parameters(ours)) == 6
        opt.update(ours, nnx.grad(fit)(ours, x))  # a State is taken, too
        reference.update(theirs, nnx.grad(fit)(theirs, x))
        assert_same(graftax.flatten(ours)[0], graftax.flatten(theirs)[0])


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
    assert list(before) == sorted(names) and repr(opt).startswith(f"Optimizer(chain, {len(names)} parameter")
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
    with pytest.raises(graftax.StructureError, match=r"no rule says anything of head\.b, head\.w"):
        graftax.optimizer(optax.masked(optax.sgd(1.0), graftax.labels({"body": True})), model)
    with pytest.raises(graftax.StructureError, match=r"haed"):
        graftax.optimizer(optax.masked(optax.sgd(1.0), graftax.labels({"haed": True})), model)
    with pytest.raises(TypeError, match="only patterns can"):
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
    opt = graftax.optimizer(optax.sgd(1.0), net)
    for _ in range(2):
        opt.update(net, graftax.grad(lambda net, x: net(x))(net, f32(0.25)))
    assert net.w[0] == 0.5 and net.calls == 2 and len(net.log) == 2 and net.last[0] == 0.25


def test_mixed_precision_keeps_the_dtype_of_the_parameter():
    model = Box(w=jnp.ones(2, jnp.bfloat16))
    opt = graftax.optimizer(optax.sgd(0.5), model)
    opt.update(model, [jnp.ones(2, jnp.float32)])
    assert model.w.dtype == jnp.bfloat16 and model.w.tolist() == [0.5, 0.5]


def layers() -> Any:
    layer = Box(w=f32(1, 2), name="tied")
    return Box(first=layer, second=layer, b=f32(1), none=None)


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
        "of type Box. The two are in the other order",
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
@pytest.mark.quick(20)
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


# ---- in transforms


def test_in_a_scan():
    model, twin = layers(), layers()
    opt, other = graftax.optimizer(optax.adam(0.1), model), graftax.optimizer(optax.adam(0.1), twin)

    def body(carry: Any, x: Any) -> Any:
        model, opt = carry
        value, grads = graftax.value_and_grad(lambda m: loss(m) * x)(model)
        opt.update(model, grads)
        return (model, opt), value

    xs = f32(1, 2, 3)
    (result, _), values = graftax.jit(lambda model, opt: graftax.scan(body, (model, opt), xs))(model, opt)
    for x in xs:
        body((twin, other), x)
    assert_same(graftax.flatten(result)[0], graftax.flatten(twin)[0])
    assert result.first is result.second and values.shape == (3,)

    model, opt = layers(), graftax.optimizer(optax.adam(0.1), layers())

    @graftax.jit
    def epoch(model: Any, opt: Any, xs: Any) -> Any:  # what is captured comes back
        def body(_: Any, x: Any) -> Any:
            opt.update(model, graftax.grad(lambda m: loss(m) * x)(model))
            return None, None

        graftax.scan(body, None, xs)

    epoch(model, opt, xs)
    assert_same(graftax.flatten(model)[0], graftax.flatten(twin)[0])
    assert graftax.equal(opt.state, other.state, rtol=1e-5)


@pytest.mark.parametrize("transformation", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
@pytest.mark.quick(3)
def test_in_a_branch(transformation: Any):
    @graftax.jit
    def step(model: Any, opt: Any, ok: Any) -> None:
        value, grads = graftax.value_and_grad(loss)(model)
        graftax.cond(ok, lambda: opt.update(model, grads, value=value) and None, lambda: None)

    model, twin = layers(), layers()
    opt, other = graftax.optimizer(transformation(), model), graftax.optimizer(transformation(), twin)
    for ok in (False, True, False, True):
        step(model, opt, jnp.asarray(ok))
    for _ in range(2):
        value, grads = graftax.value_and_grad(loss)(twin)
        other.update(twin, grads, value=value)
    assert_same(graftax.flatten(model)[0], graftax.flatten(twin)[0])


def test_a_population():
    def member(key: Any) -> Any:
        layer = Box(w=jax.random.normal(key, (3,)))
        model = Box(a=layer, b=layer, name="x")
        return model, graftax.optimizer(optax.inject_hyperparams(optax.adam)(learning_rate=0.1), model)

    def step(model: Any, opt: Any) -> Any:
        value, grads = graftax.value_and_grad(loss)(model)
        opt.update(model, grads)
        return value

    keys = jax.random.split(jax.random.key(0), 3)
    models, opts = graftax.vmap(member)(keys)
    opts.state.hyperparams["learning_rate"] = f32(0.1, 0.2, 0.3)
    run = graftax.jit(graftax.vmap(step))
    for _ in range(2):
        assert run(models, opts).shape == (3,)
    for i, key in enumerate(keys):
        model, opt = member(key)
        opt.state.hyperparams["learning_rate"] = f32(0.1, 0.2, 0.3)[i]
        step(model, opt), step(model, opt)
        np.testing.assert_allclose(models.a.w[i], model.a.w, rtol=1e-5)
    assert models.a is models.b


@pytest.mark.parametrize("donate", ["all", "model", "opt", ("opt.state", "**.w")], ids=str)
def test_with_donation(donate: Any):
    def fresh() -> Any:
        return graftax.copy(layers(), arrays=True)

    model, twin = fresh(), fresh()
    opt, other = graftax.optimizer(optax.adam(0.1), model), graftax.optimizer(optax.adam(0.1), twin)

    def step(model: Any, opt: Any) -> None:
        opt.update(model, graftax.grad(loss)(model))

    run = graftax.jit(step, donate=donate)
    for _ in range(3):
        run(model, opt), step(twin, other)
    assert_same(graftax.flatten(model)[0], graftax.flatten(twin)[0])


def test_packed():
    model, twin = layers(), layers()
    opt, other = graftax.optimizer(optax.adam(0.1), model), graftax.optimizer(optax.adam(0.1), twin)

    def step(run: Any) -> None:
        model, opt = run
        opt.update(model, graftax.grad(loss)(model))

    packed, jitted = graftax.pack((model, opt)), graftax.jit(step)
    for _ in range(2):
        jitted(packed), step((twin, other))
    model, opt = packed.unpack()
    assert_same(graftax.flatten(model)[0], graftax.flatten(twin)[0])


# ---- what it keeps


def test_the_state_is_a_graph_that_is_saved_copied_and_compared():
    model = layers()
    opt = graftax.optimizer(optax.adam(0.1), model)
    opt.update(model, graftax.grad(loss)(model))
    assert set(opt.state[0].mu) == {"first.w", "b"}
    model_then, opt_then = graftax.copy((model, opt))
    saved = pickle.dumps((opt.state, opt.parameters(model)))
    opt.update(model, graftax.grad(loss)(model))
    assert any(".state[0]" in str(d.path) for d in graftax.diff(opt, opt_then))
    opt_then.update(model_then, graftax.grad(loss)(model_then))
    assert graftax.equal((model, opt.state), (model_then, opt_then.state))

    new = layers()
    again = graftax.optimizer(optax.adam(0.1), new)
    again.state, parameters = pickle.loads(saved)
    again.assign(new, parameters)
    again.update(new, graftax.grad(loss)(new))
    assert graftax.equal((new, again.state), (model, opt.state))
    assert copy.deepcopy(opt).parameters(model).keys() == opt.parameters(model).keys()


def test_containers_of_the_state_stay_and_nothing_is_read_too_late():
    class Shift:
        """A state that hands on its own containers."""

        def init(self, params: Any) -> Any:
            zeros = {name: jnp.zeros_like(p) for name, p in params.items()}
            return {"new": zeros, "old": zeros, "log": [0]}

        def update(self, grads: Any, state: Any, params: Any = None) -> Any:
            return state["old"], {"new": grads, "old": state["new"], "log": [state["log"][0] + 1]}

    model = Box(w=f32(1))
    opt = graftax.optimizer(Shift(), model)
    log = opt.state["log"]
    for i in (1, 2, 3, 4):
        opt.update(model, [f32(i)], unknown=3)  # extra arguments that it does not take are left out, as in Optax
    assert model.w[0] == 1 + 1 + 2 and opt.state["old"]["w"][0] == 3 and opt.state["log"] is log == [4]


def test_shardings_are_kept():
    mesh = jax.make_mesh((1,), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    model = Box(w=jax.device_put(jnp.ones(4), sharding))
    opt = graftax.optimizer(optax.adam(0.1), model)
    step = graftax.jit(lambda model, opt: opt.update(model, graftax.grad(loss)(model)) and None)
    step(model, opt)
    assert model.w.sharding == opt.state[0].mu["w"].sharding == sharding


def test_repr():
    model = layers()
    opt = graftax.optimizer(optax.adam(1e-3), model)
    assert repr(opt) == "Optimizer(chain, 2 parameters: b, first.w)"
    assert "Optimizer" in repr(graftax.flatten(opt)[1])
