# SPDX-License-Identifier: Apache-2.0
"""brainstate's modules under graftax's transforms."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftax

bst = pytest.importorskip("brainstate")

X = jnp.ones((5, 3))


class Net(bst.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = bst.nn.Linear(3, 4), bst.nn.Linear(4, 2)
        self.calls = bst.ShortTermState(jnp.zeros(()))

    def __call__(self, x: Any) -> Any:
        self.calls.value = self.calls.value + 1
        return self.out(jnp.tanh(self.hidden(x)))


def loss_of(net: Any, x: Any) -> Any:
    return (net(x) ** 2).mean()


@pytest.mark.quick(0)
def test_a_state_that_is_written_is_written_in_the_callers_module():
    net, plain = Net(), Net()
    run = graftax.jit(lambda net, x: net(x))
    for n in (1, 2, 3):
        np.testing.assert_allclose(run(net, X), Net.__call__(copy.deepcopy(net), X), rtol=1e-5)
        assert net.calls.value == n
    assert run.cache_info().traces == 1
    run(plain, X)
    assert run.cache_info().traces == 1, "another module of the same structure is the same program"


def test_a_state_can_be_read_and_written_by_brainstate_before_and_after():
    net = Net()
    by_brainstate, by_graftax = bst.transform.jit(lambda x: net(x)), graftax.jit(lambda x: net(x))
    first, second = by_brainstate(X), by_graftax(X)
    np.testing.assert_allclose(first, second, rtol=1e-6)
    by_brainstate(X)
    assert net.calls.value == 3


def test_transforms_of_brainstate_run_inside():
    net = Net()

    def step(net: Any, x: Any) -> Any:
        def body(i: Any) -> Any:
            net.calls.value = net.calls.value + i
            return net.calls.value

        return bst.transform.for_loop(body, x)

    assert graftax.jit(step)(net, jnp.arange(4.0)).tolist() == [0, 1, 3, 6]
    assert net.calls.value == 6


@pytest.mark.quick(0)
def test_a_gradient_by_class_of_states_is_brainstates_own():
    net = Net()
    ours = graftax.grad(loss_of, wrt=bst.ParamState)(net, X)
    theirs = bst.transform.grad(lambda: loss_of(net, X), net.states(bst.ParamState))()
    assert ours.calls is None or ours.calls.value is None
    for path, value in theirs.items():
        mine = getattr(ours, path[0]).weight.value
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), mine, value)


def test_an_optimizer_trains_the_states_that_are_parameters():
    class Noisy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = jnp.ones(3)  # a constant to brainstate
            self.seen = bst.ShortTermState({"mean": jnp.zeros(3)})

    net = Noisy()
    opt = graftax.optimizer(optax.sgd(0.01), net)

    @graftax.jit
    def step(net: Any, opt: Any, x: Any) -> Any:
        loss, grads = graftax.value_and_grad(loss_of)(net, x)
        opt.update(net, grads)
        return loss

    losses = [float(step(net, opt, X)) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert step.cache_info().traces == 1
    assert net.calls.value == 4
    assert net.scale.tolist() == [1, 1, 1]
    assert net.seen.value["mean"].tolist() == [0, 0, 0]


@pytest.mark.quick(0)
def test_a_recurrent_cell_is_scanned():
    cell, plain = bst.nn.GRUCell(3, 4), None
    cell.init_state(2)
    plain = copy.deepcopy(cell)
    xs = jnp.ones((6, 2, 3))
    _, rows = graftax.scan(lambda c, x: (c, cell(x)), 0, xs)
    np.testing.assert_allclose(rows[-1], [plain(x) for x in xs][-1], rtol=1e-5)
    np.testing.assert_allclose(cell.h.value, plain.h.value, rtol=1e-5)


def test_a_list_of_layers_is_mapped_layer_by_layer():
    layers = [Net() for _ in range(2)]
    rows = graftax.vmap(lambda net, x: net.hidden(x))(layers, jnp.ones((2, 5, 3)))
    np.testing.assert_allclose(rows[1], layers[1].hidden(X), rtol=1e-6)


def test_hooks_of_a_state_run_in_the_trace():
    net, written = Net(), []
    net.calls.register_hook("write_after", lambda context: written.append(float(len(written))))
    graftax.jit(lambda net, x: net(x))(net, X)
    assert written == [0.0]


def test_the_structure_survives_a_pickle_and_a_copy():
    net, other = Net(), Net()
    leaves, structure = graftax.flatten(net)
    assert structure == graftax.flatten(other)[1]
    again = pickle.loads(pickle.dumps(structure))
    assert again == structure
    rebuilt = graftax.unflatten(again, leaves)
    assert rebuilt.calls.value == 0
    assert rebuilt.hidden.weight._trace_state.is_valid()
    assert graftax.equal(net, graftax.copy(net))


def test_a_filter_of_brainstate_selects_states():
    net = Net()
    found = graftax.find(net, bst.util.filter.OfType(bst.ParamState))
    assert len(found) == 2
