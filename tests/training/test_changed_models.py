# SPDX-License-Identifier: Apache-2.0
"""A model that is changed after its optimizer was made: tied, untied, with other layers. An error, and `refresh`."""

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
import pytest
from flax import nnx

import graftax
from zoo import Box


def layer(*values: float) -> Box:
    return Box(w=jnp.asarray(values, jnp.float32))


def shared_layer() -> dict[str, Box]:
    one = layer(1, 1)
    return {"a": one, "b": one}


def shared_array() -> dict[str, Box]:
    one = layer(1, 1)
    return {"a": one, "b": Box(w=one.w)}


def apart() -> dict[str, Box]:
    return {"a": layer(1, 1), "b": layer(2, 2)}


def loss(model: Any) -> Any:
    return sum((part.w**2).sum() for part in model.values() if isinstance(part.w, jax.Array))


def put(key: str, make: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda model: model.__setitem__(key, make(model))


def set_w(key: str, make: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda model: setattr(model[key], "w", make(model))


ADDED = r"obj\[b\]\.w of the model is not trained: .*had no array of its own there\. opt\.refresh\(model\)"
UNTIED = r"obj\[a\]\.w, obj\[b\]\.w were one array .* and are several now.*put one array into all"
TIED = r"obj\[a\]\.w, obj\[b\]\.w were several parameters .* and are one array now"
NEW = r"obj\[c\]\.w of the model is not trained: .*If it is no parameter, say what is trained"
REMOVED = r"no array at obj\[b\]\.w"

CHANGES: dict[str, tuple[Callable[[], Any], Any, Callable[[Any], Any], str, list[str]]] = {
    "a layer is untied": (shared_layer, None, put("b", lambda m: layer(5, 5)), ADDED, ["[a].w", "[b].w"]),
    "a layer is copied": (shared_layer, None, put("b", lambda m: copy.deepcopy(m["a"])), ADDED, ["[a].w", "[b].w"]),
    "an array is untied": (shared_array, None, set_w("b", lambda m: jnp.full(2, 5.0)), UNTIED, ["[a].w", "[b].w"]),
    "a layer is tied": (apart, None, put("b", lambda m: m["a"]), TIED, ["[a].w"]),
    "an array is tied": (apart, None, set_w("b", lambda m: m["a"].w), TIED, ["[a].w"]),
    "a layer is added": (apart, None, put("c", lambda m: layer(3)), NEW, ["[a].w", "[b].w", "[c].w"]),
    "one that a pattern means": (apart, "**.w", put("c", lambda m: layer(3)), NEW, ["[a].w", "[b].w", "[c].w"]),
    "one of a type": (apart, Box, put("c", lambda m: layer(3)), NEW, ["[a].w", "[b].w", "[c].w"]),
    "a layer is removed": (apart, None, lambda m: m.pop("b"), REMOVED, ["[a].w"]),
    "a layer is frozen": (apart, None, set_w("b", lambda m: graftax.Static(m["b"].w)), REMOVED, ["[a].w"]),
    "other shape": (apart, None, put("b", lambda m: layer(7)), r"update of \[b\]\.w has .*refresh", ["[a].w", "[b].w"]),
}


@pytest.mark.parametrize("jitted", [False, True], ids=["plain", "jitted"])
@pytest.mark.parametrize(("make", "wrt", "change", "message", "names"), CHANGES.values(), ids=CHANGES)
@pytest.mark.quick(5)
def test_a_changed_model_is_an_error_and_refresh_takes_it(
    make: Any, wrt: Any, change: Any, message: str, names: list[str], jitted: bool
):
    model = make()
    opt = graftax.optimizer(optax.adam(0.5), model, wrt=wrt)

    def step(model: Any, opt: Any) -> None:
        opt.update(model, graftax.grad(loss)(model))

    if jitted:
        step = graftax.jit(step)
    step(model, opt)
    change(model)
    before = graftax.copy((model, opt.state))
    with pytest.raises(graftax.StructureError, match=message):
        step(model, opt)
    assert graftax.equal((model, opt.state), before), "nothing has been changed"
    momentum = opt.state[0].mu["[a].w"]
    opt.refresh(model)
    assert opt.state[0].mu["[a].w"] is momentum and opt.state[0].count == 1, "what stays keeps its state"
    assert list(opt.parameters(model)) == names == list(opt.state[0].mu)
    values = opt.parameters(model)
    step(model, opt)
    after = opt.parameters(model)
    assert all((after[name] != values[name]).all() for name in names)
    if "tied" in message or make is apart:
        assert model["a"].w[0] == model["b"].w[0] if message is TIED else True


@pytest.mark.parametrize(
    "change",
    [put("b", lambda m: layer(5, 5)), put("c", lambda m: layer(3)), lambda m: None],
    ids=["replaced", "not selected", "unchanged"],
)
def test_what_is_no_change_of_the_parameters_is_no_error(change: Any):
    model = apart()
    opt = graftax.optimizer(optax.sgd(0.5), model, wrt=["a", "b"])
    change(model)
    opt.update(model, graftax.grad(loss)(model))
    assert model["a"].w[0] == 0 and model["b"].w[0] == 0 and all(b.w[0] in (0, 3) for b in model.values())


def test_a_tree_of_bools_belongs_to_one_structure():
    model = apart()
    opt = graftax.optimizer(optax.sgd(0.5), model, wrt={"a": True, "b": False})
    opt.update(model, graftax.grad(loss)(model))
    model["c"] = layer(3)
    with pytest.raises(graftax.StructureError, match=NEW):
        opt.update(model, graftax.grad(loss)(model))
    with pytest.raises(TypeError, match=r"refresh\(model, wrt=\.\.\.\)"):
        opt.refresh(model)
    opt.refresh(model, wrt=["a", "c"])
    opt.update(model, graftax.grad(loss)(model))
    assert model["b"].w[0] == 2 and model["c"].w[0] == 0


def test_names_are_pickled_without_predicates():
    for wrt in (None, "**.w", lambda leaf: True):
        opt = graftax.optimizer(optax.sgd(0.5), apart(), wrt=wrt)
        names = pickle.loads(pickle.dumps(opt._names))
        assert names == opt._names and names.trained(graftax._graph.path.Graph(apart())) == [2, 4]


def test_slow_parameters_are_refreshed():
    model = apart()
    make = optax.LookaheadParams.init_synced
    opt = graftax.optimizer(optax.lookahead(optax.sgd(0.5), 2, 0.5), model, params=make)
    opt.update(model, graftax.grad(loss)(model))
    slow = opt.slow["[a].w"]
    model["c"] = layer(3)
    opt.refresh(model)
    assert opt.slow["[a].w"] is slow and opt.slow["[c].w"][0] == 3
    opt.update(model, graftax.grad(loss)(model))


def test_inside_of_a_step():
    """What the step itself unties is an error, and what loops, branches and maps of it keep tied stays so."""

    def untying(model: Any, opt: Any) -> None:
        model["b"].w = model["b"].w * 2
        opt.update(model, graftax.grad(loss)(model))

    def mapping(model: Any, opt: Any) -> None:
        def body(carry: Any, _: Any) -> Any:
            opt.update(model, graftax.grad(loss)(model))
            return carry, None

        def keep(model: Any, opt: Any) -> None:
            pass

        def update(model: Any, opt: Any) -> None:
            opt.update(model, graftax.grad(loss)(model))

        graftax.scan(body, 0, None, length=2)
        graftax.cond(model["a"].w.sum() > -100, update, keep, model, opt)
        update(model, opt)
        model.update(graftax.map_leaves(lambda w: w * 1.5, model))
        update(model, opt)

    for wrap in (lambda f: f, graftax.jit):
        model = shared_array()
        opt = graftax.optimizer(optax.sgd(0.125), model)
        with pytest.raises(graftax.StructureError, match=UNTIED):
            wrap(untying)(model, opt)
        model = shared_array()
        opt = graftax.optimizer(optax.sgd(0.125), model)
        step = wrap(mapping)
        for _ in range(2):
            step(model, opt)
            assert model["a"].w is model["b"].w
        np.testing.assert_allclose(model["a"].w, (0.5**5 * 1.5) ** 2)


def test_models_of_libraries():
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.a, self.b = (nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(2))
            self.b.kernel = self.a.kernel

    def loss(net: Any) -> Any:
        return (net.a(jnp.ones(2)) + net.b(jnp.ones(2))).sum()

    net = Net()
    opt = graftax.optimizer(optax.sgd(0.5), net)
    net.b.kernel = nnx.Param(jnp.ones((2, 2)))
    with pytest.raises(graftax.StructureError, match=r"obj\.b\.kernel.* is not trained"):
        opt.update(net, graftax.grad(loss)(net))
    opt.refresh(net)
    net.norm = nnx.BatchNorm(2, use_bias=False, use_scale=False, rngs=nnx.Rngs(0))  # statistics are no parameters
    opt.update(net, graftax.grad(loss)(net))
    assert net.b.kernel[...][0, 0] == 0.5

    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    model: Any = {"a": linear, "b": linear}
    loss = lambda m: (m["a"](jnp.ones(2)) + m["b"](jnp.ones(2))).sum()
    opt = graftax.optimizer(optax.sgd(0.5), model)
    model = opt.update(model, graftax.grad(loss)(model))
    model = eqx.tree_at(lambda m: m["b"].weight, model, jnp.ones((2, 2)))
    with pytest.raises(graftax.StructureError, match=r"obj\[a\]\.weight, obj\[b\]\.weight were one array"):
        opt.update(model, graftax.grad(loss)(model))
    opt.refresh(model)
    assert opt.update(model, graftax.grad(loss)(model))["b"].weight[0, 0] == 0.5
