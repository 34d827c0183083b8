# SPDX-License-Identifier: Apache-2.0
"""FlareJax modules: references, statics and changes, and programs in the manner of its documentation."""

import dataclasses
import pickle

import jax
import jax.nn as jnn
import jax.numpy as jnp
import jax.random as jrn
import numpy as np
import optax
import pytest

import graftax

pytestmark = pytest.mark.quick(1)

flr = pytest.importorskip("flarejax")

JITS = [flr.filter_jit, graftax.filter_jit, graftax.jit]
MODES = pytest.mark.parametrize("jit", JITS, ids=["flarejax", "filter_jit", "jit"])
OURS = pytest.mark.parametrize("jit", JITS[1:], ids=["filter_jit", "jit"])


class Layer(flr.Module):
    def __init__(self, w, **more):
        self.w = w
        vars(self).update(more)


class Dense(flr.Module):
    """No array but its weights, so that optimizers can be given the module itself."""

    def __init__(self, key, dim_in, dim):
        self.w, self.b = jrn.normal(key, (dim_in, dim)), jnp.zeros(dim)

    def __call__(self, x):
        return x @ self.w + self.b


class MLP(flr.Module):
    def __init__(self, key, *dims, activation=jnn.relu):
        keys = jrn.split(key, len(dims))
        self.layers = [Dense(k, a, b) for k, a, b in zip(keys, dims, dims[1:], strict=False)]
        self.activation = activation

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


class LazyLinear(flr.Module):
    def __init__(self, key, dim):
        self.key, self.dim, self.w = key, dim, None

    def _build(self, x):
        if self.w is None:
            self.w = jrn.normal(self.key, (x.shape[-1], self.dim)) * 0.02

    def __call__(self, x):
        self._build(x)
        return x @ self.w

    @property
    def dim_in(self):
        return None if self.w is None else self.w.shape[0]


def traces(f):
    return f.cache_info().traces


def arrays(obj):
    return {repr(k): _bits(v) for k, v in flr.flatten(obj).items() if isinstance(v, jax.Array)}


def _bits(x):
    return np.asarray(jrn.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def assert_close(a, b):
    a, b = arrays(a), arrays(b)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-6)


# ── references ──


@MODES
def test_a_module_in_two_arguments_is_one_inside(jit):
    f = jit(lambda a, b, *, c: (a is b, a is c))
    one, other = Layer(jnp.ones(2)), Layer(jnp.ones(2))
    for _ in range(2):
        assert f(one, one, c=other) == (True, False)
        assert f(one, other, c=other) == (False, False)
        assert f(one, other, c=one) == (False, True)


@dataclasses.dataclass(frozen=True)
class Frozen(flr.Module):
    w: jax.Array


@MODES
def test_a_frozen_module_keeps_its_identity_too(jit):
    f = jit(lambda a, b: (a is b, a.w + b.w, [a, b]))
    one, other = Frozen(jnp.ones(2)), Frozen(jnp.ones(2))
    for _ in range(2):
        same, total, out = f(one, one)
        assert same
        assert total.tolist() == [2, 2]
        assert out[0] is out[1]
        same, _, out = f(one, other)
        assert not same
        assert out[0] is not out[1]


@MODES
@pytest.mark.parametrize("make", [lambda: [jnp.ones(2)], lambda: {"v": jnp.ones(2)}, lambda: Layer(jnp.ones(2))])
def test_what_two_modules_share_is_shared_inside_and_in_the_result(make, jit):
    shared = make()
    model = Layer(jnp.zeros(1), left=Layer(shared), right=[Layer(shared), Layer(make())])
    f = jit(lambda m: (m.left.w is m.right[0].w, m.left.w is m.right[1].w, m))
    for _ in range(2):
        first, second, out = f(model)
        assert (first, second) == (True, False)
        assert out.left.w is out.right[0].w
        assert out.left.w is not out.right[1].w
        assert (out is model) == (jit is graftax.jit)


@MODES
def test_a_cycle_goes_in_and_comes_out(jit):
    parent = Layer(jnp.ones(2))
    parent.children = [Layer(jnp.ones(2) * n, parent=parent) for n in (1, 2)]
    parent.me = {"self": parent}

    @jit
    def step(parent):
        for child in parent.children:
            child.parent.w = child.parent.w + child.w
        return parent, parent.me["self"] is parent

    for _ in range(2):
        out, same = step(parent)
        assert same
        assert out.me["self"] is out
        assert all(child.parent is out for child in out.children)
    assert out.w.tolist() == ([7, 7] if jit is graftax.jit else [4, 4])


@MODES
def test_containers_without_a_module_keep_their_references(jit):
    x = [jnp.zeros(())]

    def func(v):
        v["a"][0] += 1
        return v

    y = jit(func)({"a": x, "b": x})
    assert y["a"] is y["b"]
    y["a"][0] += 1
    assert [float(y[name][0]) for name in "ab"] == [2, 2]
    loop = [jnp.ones(2), 2]
    loop.append(loop)
    out = jit(lambda v: v)(loop)
    assert out[2] is out


# ── statics ──


@OURS
@pytest.mark.parametrize(("one", "other"), [(1, 2), (1, 1.0), (1, True), ("a", "b"), (None, "a"), (jnn.relu, jnn.tanh)])
def test_a_static_attribute_is_part_of_the_key(one, other, jit):
    f = jit(lambda m: (m.w * 2, m.tag))
    for tag in (one, other, one, other):
        doubled, seen = f(Layer(jnp.ones(2), tag=tag))
        assert doubled.tolist() == [2, 2]
        assert (type(seen), seen) == (type(tag), tag)
    assert traces(f) == 2


@OURS
def test_a_static_changed_in_place_is_seen(jit):
    f = jit(lambda m: m.w * m.config["scale"])
    module = Layer(jnp.ones(2), config={"scale": 2})
    assert f(module).tolist() == [2, 2]
    module.config["scale"] = 3
    assert f(module).tolist() == [3, 3]
    module.new = 1
    assert f(module).tolist() == [3, 3]
    assert traces(f) == 3


@OURS
def test_the_order_in_which_attributes_were_set_is_no_part_of_the_key(jit):
    f = jit(lambda m: m.a - m.b)
    one, other = flr.Module(), flr.Module()
    one.a, one.b = jnp.ones(2), jnp.zeros(2)
    other.b, other.a = jnp.zeros(2), jnp.ones(2)
    assert f(one).tolist() == f(other).tolist() == [1, 1]
    assert traces(f) == 1
    assert [*vars(one)] == ["a", "b"]
    assert [*vars(other)] == ["b", "a"]


@OURS
@pytest.mark.quick(0)
def test_a_module_that_went_through_flarejax_is_the_same_structure(jit):
    f = jit(lambda m, x: m(x))
    model = MLP(jrn.key(0), 3, 4, 2)
    for same in (model, flr.unflatten(flr.flatten(model)), jax.tree.map(jnp.negative, model)):
        f(same, jnp.ones((1, 3)))
    assert traces(f) == 1


# ── changes ──


@OURS
@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "w", m.w * 2),
        lambda m: setattr(m, "new", Layer(m.w)),
        lambda m: delattr(m, "tag"),
        lambda m: m.items.append(m.w.sum()),
        lambda m: m.table.update(b=m.w, a=1),
        lambda m: m.items.clear(),
        lambda m: setattr(m, "frozen", True),
        lambda m: m.frozen and None,  # the property makes an attribute
        lambda m: setattr(m, "items", m),
        lambda m: setattr(m.inner, "w", m.items),
    ],
)
def test_a_change_is_that_of_plain_python(change, jit):
    def make():
        return Layer(jnp.arange(2.0), tag="a", items=[jnp.ones(1)], table={"a": 0}, inner=Layer(jnp.ones(3)))

    def step(module):
        change(module)
        return module

    expected, module = make(), make()
    change(expected)
    before = dict(vars(module))
    f = jit(step)
    for _ in range(2):
        module = module if jit is graftax.filter_jit else make()
        out = f(module)
        assert (out is module) == (jit is graftax.jit)
        assert_close(out, expected)
        theirs, mine = flr.flatten(expected), flr.flatten(out)
        assert [v for v in mine.values() if not isinstance(v, jax.Array)] == [
            v for v in theirs.values() if not isinstance(v, jax.Array)
        ]
    if jit is graftax.filter_jit:
        assert dict(vars(module)).keys() == before.keys()
        assert all(vars(module)[name] is value for name, value in before.items())


def test_layers_keep_the_weights_that_they_make_on_their_first_call():
    model = flr.net.Sequential(LazyLinear(jrn.key(0), 4), jnn.relu, flr.net.Bias(jrn.PRNGKey(1)))
    f, x = graftax.jit(lambda model, x: model(x)), jnp.ones((2, 3))
    first = f(model, x)
    assert model.modules[0].dim_in == 3
    assert model.modules[2].dim == 4
    np.testing.assert_allclose(first, model(x), rtol=1e-6)
    np.testing.assert_allclose(f(model, x), first, rtol=1e-6)
    np.testing.assert_allclose(f(model, x), first, rtol=1e-6)
    assert traces(f) == 2  # without weights, and with


def test_a_change_that_a_by_value_call_does_not_return_is_named():
    model = Layer(jnp.zeros(1), layers=[LazyLinear(jrn.key(0), 4)])
    f = graftax.filter_jit(lambda model, x: model.layers[0](x))
    with pytest.warns(graftax.LostChangeWarning, match=r"changed model\.layers\[0\],"):
        f(model, jnp.ones((2, 3)))
    assert model.layers[0].w is None


def test_a_random_key_is_used_up_by_the_call():
    plain, jitted = flr.RandomKey(0), flr.RandomKey(0)
    f = graftax.jit(lambda keys: jrn.normal(keys.key, (2,)))
    for _ in range(3):
        np.testing.assert_allclose(f(jitted), jrn.normal(plain.key, (2,)), rtol=1e-6)
    assert traces(f) == 1


# ── methods ──


class Counter(flr.Module):
    def __init__(self):
        self.total, self.calls = jnp.zeros(2), jnp.asarray(0)

    def add(self, x):
        self.total, self.calls = self.total + x, self.calls + 1
        return self.total

    @graftax.jit
    def added(self, x, *, twice=False):
        self.add(x)
        return self.add(x) if twice else self.total


def test_a_method_of_a_module_is_jitted_as_a_value_and_as_a_decorator():
    counter = Counter()
    f = graftax.jit(counter.add)
    assert f(jnp.ones(2)).tolist() == [1, 1]
    assert f(jnp.ones(2)).tolist() == [2, 2]
    assert counter.added(jnp.ones(2)).tolist() == [3, 3]
    assert counter.added(jnp.ones(2), twice=True).tolist() == [5, 5]
    assert counter.calls == 5
    assert counter.add(jnp.ones(2)).tolist() == [6, 6]


@MODES
def test_a_method_is_an_argument_that_knows_its_module(jit):
    counter = Counter()
    f = jit(lambda method, module, x: (method(x), method.__self__ is module, module))
    total, same, module = f(counter.add, counter, jnp.ones(2))
    assert same
    assert total.tolist() == module.total.tolist() == [1, 1]
    assert (module is counter) == (jit is graftax.jit)


# ── errors ──


class Bad(flr.Module):
    def __init__(self, value):
        self.layers = [Layer(jnp.ones(2)), Layer(jnp.ones(2), source=value)]


@OURS
def test_errors_name_the_path_as_one_would_write_it(jit):
    f = jit(lambda model: (model.layers[0].w, str(model.layers[1].source)))
    with pytest.raises(graftax.UnsupportedValueError, match=r"model\.layers\[1\]\.source"):
        f(Bad(iter([1])))
    model = Bad(1)
    f(model)
    f(model)
    model.layers[1].w.delete()
    with pytest.raises(RuntimeError, match=r"model\.layers\[1\]\.w"):
        jit(lambda model: model.layers[1].w + 1)(model)


@OURS
def test_a_tracer_error_names_the_path(jit):
    def branch(model):
        return 1 if model.layers[1].w.sum() > 0 else 2

    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"model\.layers\[1\]\.w"):
        jit(branch)(Bad(1))


# ── as values ──


def test_a_structure_pickles_and_has_a_fingerprint():
    model = MLP(jrn.key(0), 3, 4, 2)
    leaves, graphdef = graftax.flatten(model)
    again = pickle.loads(pickle.dumps(graphdef))
    assert again == graphdef
    assert again.fingerprint() == graphdef.fingerprint()
    assert_close(graftax.unflatten(again, leaves), model)
    assert_close(graftax.from_dict(graftax.to_dict(model)), model)


def test_a_saved_model_is_one_that_was_trained(tmp_path):
    step = graftax.jit(lambda model: setattr(model, "value", model.value * 2))
    model = flr.net.Constant(jnp.ones(2))
    step(model)
    flr.save(model, tmp_path / "model.npz")
    assert flr.load(tmp_path / "model.npz").value.tolist() == [2, 2]
    assert step(flr.load(tmp_path / "model.npz")) is None
    assert traces(step) == 1


# ── programs ──


def data(seed):
    x = jrn.normal(jrn.key(seed), (6, 3))
    return x, jnp.sin(x.sum(-1, keepdims=True))


def loss_of(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def flarejax_adam(jit):
    """FlareJax's own optimizers, whose step is jitted by value."""
    optimizer, model, losses = (
        flr.opt.Adam(1e-2),
        flr.net.Sequential(flr.net.Affine(jrn.PRNGKey(0), 4), jnn.relu, LazyLinear(jrn.key(1), 1)),
        [],
    )
    step = jit(lambda optimizer, *args: optimizer._minimize_no_jit(loss_of, *args))
    for seed in range(4):
        optimizer, model, loss = step(optimizer, model, *data(seed))
        losses.append(loss)
    return [optimizer, model, losses], step


def frozen_and_tied(jit):
    """One weight in two layers, and one layer that is not trained."""
    model = MLP(jrn.key(0), 3, 3, 3, 1)
    model.layers[1] = model.layers[0]

    @jit
    def step(model, x, y):
        grads = jax.grad(lambda flat: loss_of(flr.unflatten(still | flat), x, y))
        flat = flr.flatten(model)
        still = {k: v for k, v in flat.items() if not isinstance(v, jax.Array)}
        moving = {k: v for k, v in flat.items() if isinstance(v, jax.Array)}
        changes = grads(moving)
        return flr.unflatten(flat | {k: v - 0.1 * changes[k] for k, v in moving.items()})

    for seed in range(3):
        model = step(model, *data(seed))
        assert model.layers[0] is model.layers[1]
    return model, step


def scanned_recurrence(jit):
    class Cell(flr.Module):
        def __init__(self, key):
            self.w = jrn.normal(key, (3, 3)) * 0.5

        def __call__(self, h, x):
            h = jnp.tanh(h @ self.w + x)
            return h, h

    run = jit(lambda cell, xs: jax.lax.scan(cell, jnp.zeros(3), xs))
    return [run(Cell(jrn.key(seed)), data(seed)[0]) for seed in range(2)], run


def vectorised_ensemble(jit):
    run = jit(lambda models, x: [flr.Vmap(model)(x) for model in models])
    return [run([MLP(jrn.key(n), 3, 4, 1) for n in range(2)], data(seed)[0]) for seed in range(2)], run


def structure_by_static(jit):
    """Control flow by attributes; a list that grows inside."""

    def forward(model, x, skip):
        trail = []
        for name in model.order:
            x = getattr(model, name)(x) + (x if name in skip else 0)
            trail.append(x.sum())
        model.trail = trail
        return x, model

    model = Layer(jnp.zeros(1), a=Dense(jrn.key(0), 3, 3), b=Dense(jrn.key(1), 3, 3), order=("a", "b", "a"))
    run = jit(forward)
    results = []
    for skip in ({"b": 1}, {"a": 1}, {"b": 1}):
        out, changed = run(model, data(0)[0], skip)
        results.append([out, changed.trail])
    return results, None


PROGRAMS = [flarejax_adam, frozen_and_tied, scanned_recurrence, vectorised_ensemble, structure_by_static]


@pytest.mark.quick(1)
@OURS
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_of_flarejax_filter_jit(program, jit):
    (ours, step), (theirs, _) = program(jit), program(flr.filter_jit)
    assert_close([ours], [theirs])
    # As often as FlareJax traces it: a layer without its weights, then an optimizer without moments, then both with.
    assert step is None or traces(step) == (3 if program is flarejax_adam else 1)


def optax_by_leaves(jit, optimizer):
    """FlareJax cannot rebuild a namedtuple, so the optimizer's state travels as leaves."""
    model = MLP(jrn.key(0), 3, 4, 1)
    state, treedef = jax.tree.flatten(optimizer.init(model))

    @jit
    def step(model, state, x, y):
        loss, grads = jax.value_and_grad(loss_of)(model, x, y)
        updates, new = optimizer.update(grads, jax.tree.unflatten(treedef, state), model)
        return optax.apply_updates(model, updates), jax.tree.leaves(new), loss

    losses = []
    for seed in range(4):
        model, state, loss = step(model, state, *data(seed))
        losses.append(loss)
    return [model, state, losses], step


def optax_in_place(optimizer):
    model = MLP(jrn.key(0), 3, 4, 1)

    class Trainer(flr.Module):
        def __init__(self):
            self.model, self.optimizer, self.state = model, optimizer, optimizer.init(model)

        @graftax.jit
        def step(self, x, y):
            loss, grads = jax.value_and_grad(loss_of)(self.model, x, y)
            updates, self.state = self.optimizer.update(grads, self.state, self.model)
            self.model = optax.apply_updates(self.model, updates)
            return loss

    trainer, losses = Trainer(), []
    for seed in range(4):
        losses.append(trainer.step(*data(seed)))
    return [trainer.model, jax.tree.leaves(trainer.state), losses]


@pytest.mark.quick(0)
@pytest.mark.parametrize("make", [lambda: optax.adam(1e-2), lambda: optax.chain(optax.clip(0.1), optax.adamw(1e-2))])
def test_training_with_optax_gives_the_numbers_of_flarejax(make):
    theirs, _ = optax_by_leaves(flr.filter_jit, make())
    for jit in (graftax.filter_jit, graftax.jit):
        ours, step = optax_by_leaves(jit, make())
        assert_close(ours, theirs)
        assert traces(step) == 1
    assert_close(optax_in_place(make()), theirs)
