# SPDX-License-Identifier: Apache-2.0
"""`optimizer` beside plain Optax over the zoo, in transforms and jit; what it keeps."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

import graftax
import zoo
from training import TRANSFORMATIONS, assert_same, floating, layers, loss
from zoo import Box, f32


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


TRAINED = [(name, build) for name, build in zoo.ZOO if any(map(floating, graftax.flatten(build())[0]))]


@pytest.mark.parametrize("transformation", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
@pytest.mark.parametrize("build", [build for _, build in TRAINED], ids=[name for name, _ in TRAINED])
@pytest.mark.quick(1)
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


@pytest.mark.quick(1)
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
    with pytest.raises(TypeError, match=r"params= has to turn.*returned of type dict"):
        graftax.optimizer(tx, model, params=dict)


@pytest.mark.quick(0)
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


@pytest.mark.quick(0)  # three seconds; the steps are those of plain Optax: above
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
        flat = nnx.Linear(2, 2, rngs=nnx.Rngs(0))  # whose State has the names of the parameters as keys
        before = flat.bias[...]
        graftax.optimizer(optax.sgd(1.0), flat).update(flat, nnx.grad(lambda m: m.bias[...].sum())(flat))
        assert jnp.array_equal(flat.bias[...], before - 1)


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
@pytest.mark.quick(1)
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


@pytest.mark.quick(0)
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

    packed, twin = graftax.pack(layers()), layers()
    opt, other = graftax.optimizer(optax.sgd(0.1), packed), graftax.optimizer(optax.sgd(0.1), twin)
    assert list(opt.parameters(packed)) == list(other.parameters(twin))
    assert opt.update(packed, graftax.grad(loss)(packed.unpack())) is packed
    other.update(twin, graftax.grad(loss)(twin))
    assert_same(graftax.flatten(packed.unpack())[0], graftax.flatten(twin)[0])
    opt.assign(packed, opt.parameters(layers()))
    assert graftax.equal(packed.unpack(), layers())


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
    adam = "scale_by_adam(b1=0.9, b2=0.999, eps=1e-08), scale(step_size=-0.001)"
    assert repr(opt) == f"Optimizer({adam}; 2 parameters: b, first.w)"
    assert f"tx: {adam}" in graftax.show(opt).text() and "closure" not in graftax.show(opt).text()
    mask = graftax.labels({"b": False, "**": True})
    tx = optax.chain(optax.clip(1.0), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 5), mask=mask))
    text = repr(graftax.optimizer(tx, model))
    decay = "masked(inner=[add_decayed_weights(weight_decay=0.0001)]"
    for part in ("clip(max_delta=1.0)", decay, "=polynomial_schedule)"):
        assert part in text, text
    for tx, part in (
        (optax.MultiSteps(optax.sgd(0.1), 3), "MultiSteps(opt=[identity, scale(step_size=-0.1)], every_k_schedule=3)"),
        (optax.inject_hyperparams(optax.adam)(learning_rate=0.1), "inject_hyperparams(inner_factory=adam)"),
        (
            optax.multi_transform({"a": optax.sgd(0.1), "z": optax.set_to_zero()}, graftax.labels({"**": "a"})),
            "z=[set_",
        ),
        (optax.set_to_zero(), "Optimizer(set_to_zero; 2 parameters"),
    ):
        assert part in repr(graftax.optimizer(tx, model)), repr(graftax.optimizer(tx, model))
    assert "Optimizer" in repr(graftax.flatten(opt)[1])


def test_a_parameter_that_is_weakly_typed_stays_so():
    """As `jnp.asarray(0.5)` is: another type would compile the next step anew."""

    class Scale:
        def __init__(self):
            self.by = jnp.asarray(0.5)

    scale = Scale()
    opt = graftax.optimizer(optax.adam(0.1), scale)

    @graftax.jit
    def step(scale, opt):
        opt.update(scale, graftax.grad(lambda s: s.by**2)(scale))

    for _ in range(3):
        step(scale, opt)
    assert scale.by.weak_type and scale.by < 0.5 and step.cache_info().traces == 1
