# SPDX-License-Identifier: Apache-2.0
"""Flax NNX: modules and variables go through jit as they are, and what a function does to them comes back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import graftax


def arrays(tree):
    return [np.asarray(jax.random.key_data(x) if _is_key(x) else x) for x in jax.tree.leaves(tree)]


def _is_key(x):
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def assert_close(a, b):
    a, b = arrays(a), arrays(b)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


class Net(nnx.Module):
    def __init__(self, rngs, width=4):
        self.first = nnx.Linear(3, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(width, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def loss_of(model, x, y):
    return ((model(x) - y) ** 2).mean()


def train_step(model, optimizer, metrics, x, y):
    loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
    optimizer.update(model, grads)
    metrics.update(loss=loss, values=y)
    return loss


def training():
    model = Net(nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), mean=nnx.metrics.Average("values"))
    return model, optimizer, metrics


@functools.cache
def batches():
    xs, ys = jax.random.normal(jax.random.key(7), (3, 5, 3)), jax.random.normal(jax.random.key(8), (3, 5, 2))
    return list(zip(xs, ys, strict=True))


@pytest.mark.quick(0)
def test_three_training_steps_give_the_numbers_of_nnx_jit():
    results = []
    for jit in (nnx.jit, graftax.jit):
        step = jit(train_step)
        state = training()
        losses = [step(*state, x, y) for x, y in batches()]
        model, optimizer, metrics = state
        results.append((losses, nnx.state(model), nnx.state(optimizer), metrics.compute()))
    assert_close(results[0], results[1])
    assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
    assert step.cache_info().traces == 1


@pytest.mark.quick(0)
def test_the_callers_variables_stay_the_objects_they_are():
    model, optimizer, metrics = training()
    before = [id(v) for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)]
    marks = [v._trace_state for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)]
    graftax.jit(train_step)(model, optimizer, metrics, *batches()[0])
    after = [v for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)]
    assert [id(v) for v in after] == before
    assert all(v._trace_state is mark for v, mark in zip(after, marks, strict=True))


def test_metrics_add_up_and_reset():
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average())

    @graftax.jit
    def update(metrics, logits, labels, losses):
        metrics.update(logits=logits, labels=labels, values=losses)

    logits = jnp.array([[0.9, 0.1], [0.2, 0.8]])
    update(metrics, logits, jnp.array([0, 0]), jnp.array([1.0, 3.0]))
    update(metrics, logits, jnp.array([0, 1]), jnp.array([5.0, 7.0]))
    assert metrics.compute()["accuracy"] == 0.75
    assert metrics.compute()["loss"] == 4.0
    graftax.jit(lambda m: m.reset())(metrics)
    assert metrics.loss.count[...] == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.set_value(v.get_value() + 1),
        lambda v: v.__setitem__(..., v[...] + 1),
        lambda v: v.__setitem__(0, v[0] * 2),
        lambda v: v.set_raw_value(v.get_raw_value() - 1),
        lambda v: v.set_metadata("tag", "changed"),
        lambda v: v.set_metadata({"tag": "replaced", "scale": 2.0}),
        lambda v: v.copy_from(nnx.Param(jnp.ones(2), tag="other")),
    ],
)
def test_a_changed_variable_is_changed_as_plain_python_does(change):
    plain, jitted = nnx.Param(jnp.arange(2.0), tag="a"), nnx.Param(jnp.arange(2.0), tag="a")
    change(plain)
    graftax.jit(change)(jitted)
    assert type(jitted) is nnx.Param
    assert jitted.get_metadata() == plain.get_metadata()
    np.testing.assert_array_equal(jitted.get_value(), plain.get_value())
    jitted[...] = 0  # the caller may go on


def test_metadata_and_static_attributes_are_part_of_the_key():
    f = graftax.jit(lambda v: v.get_value() * v.scale, numbers="static")
    assert f(nnx.Param(jnp.ones(()), scale=1)) == 1
    variable = nnx.Param(jnp.ones(()), scale=2)
    assert f(variable) == 2
    variable.set_metadata("scale", 3)
    assert f(variable) == 3
    assert f.cache_info().traces == 3
    assert f(nnx.Variable(jnp.ones(()), scale=3)) == 3  # another type of Variable is another key
    assert f.cache_info().traces == 4


def test_attributes_added_removed_and_replaced_come_back():
    def change(model, x):
        model.offset = nnx.Param(x)
        model.label = "trained"
        model.kernel = nnx.Param(model.kernel[...] * 2)
        del model.bias

    plain, jitted = (nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(2))
    replaced = jitted.kernel
    change(plain, jnp.ones(2))
    graftax.jit(change)(jitted, jnp.ones(2))
    assert vars(jitted).keys() == vars(plain).keys()
    assert jitted.label == "trained"
    assert jitted.kernel is not replaced
    assert dict(jitted._pytree__nodes) == dict(plain._pytree__nodes)
    assert_close(nnx.state(jitted), nnx.state(plain))
    assert jax.tree.structure(jitted) == jax.tree.structure(plain)
    jitted.offset[...] = 0
    jitted.later = nnx.Param(jnp.ones(1))


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_sown_intermediates_come_back_and_can_be_popped():
    class Sowing(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "seen", x * 2)
            return x

    model = Sowing()
    f = graftax.jit(lambda m, x: m(x))
    f(model, jnp.ones(2))
    f(model, jnp.ones(2) * 3)
    np.testing.assert_array_equal(jnp.stack(model.seen.get_value()), [[2, 2], [6, 6]])
    popped = nnx.pop(model, nnx.Intermediate)
    assert len(jax.tree.leaves(popped)) == 2
    assert not hasattr(model, "seen")
    inside = graftax.jit(lambda m, x: (m(x), nnx.pop(m, nnx.Intermediate))[1])(model, jnp.ones(2))
    assert not hasattr(model, "seen")
    np.testing.assert_array_equal(inside["seen"].get_value()[0], [2, 2])


def test_random_streams_advance_as_in_plain_python():
    def draw(rngs):
        return rngs.params(), rngs.dropout(), rngs.uniform((3,)), rngs.fork()

    plain, jitted = (nnx.Rngs(0, dropout=5) for _ in range(2))
    f = graftax.jit(draw)
    for _ in range(3):
        assert_close(f(jitted), draw(plain))
    assert_close(nnx.state(jitted), nnx.state(plain))
    assert f.cache_info().traces == 1
    forked = f(jitted)[3]
    forked.params()  # made inside, advanced outside


@pytest.mark.quick(0)
def test_train_and_eval_are_two_keys_and_nothing_more():
    model = Net(nnx.Rngs(0))
    f = graftax.jit(lambda m, x: m(x))
    x = jnp.ones((2, 3))
    for _ in range(2):
        model.eval()
        assert_close(f(model, x), model(x))
        model.train()
        expected = nnx.clone(model)(x)
        assert_close(f(model, x), expected)
    assert f.cache_info().traces == 2
    graftax.jit(lambda m: m.eval())(model)
    assert model.dropout.deterministic
    assert model.norm.use_running_average


def test_shared_variables_and_submodules_stay_shared():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(4, 3, rngs=rngs)
            self.out = nnx.Linear(3, 4, use_bias=False, rngs=rngs)
            self.table = self.embed.embedding
            self.blocks = nnx.List([self.out, self.out])

    model = Tied(nnx.Rngs(0))

    @graftax.jit
    def f(m):
        assert m.table is m.embed.embedding
        assert m.blocks[0] is m.blocks[1] is m.out
        m.table[...] = m.embed.embedding[...] + 1
        m.blocks[1].kernel[...] = jnp.zeros((3, 4))
        m.other = m.blocks
        return m.blocks[0]

    before = model.embed.embedding[...]
    returned = f(model)
    assert returned is model.out is model.blocks[1]
    assert model.other is model.blocks
    assert model.table is model.embed.embedding
    np.testing.assert_array_equal(model.embed.embedding[...], before + 1)
    assert not model.out.kernel[...].any()


def test_a_child_may_know_its_parent():
    class Node(nnx.Module):
        def __init__(self, value, parent=None):
            self.value = nnx.Param(value)
            self.parent = nnx.data(parent)

    root = Node(jnp.ones(()))
    root.child = nnx.data(Node(jnp.ones(()) * 2, root))

    @graftax.jit
    def f(node):
        assert node.child.parent is node
        node.child.value[...] = node.child.parent.value[...] + 10
        made = Node(jnp.zeros(()), node)
        node.second = nnx.data(made)
        return made

    made = f(root)
    assert root.child.parent is root
    assert root.child.value[...] == 11
    assert made is root.second
    assert made.parent is root
    made.value[...] = 1


def test_modules_made_inside_belong_to_the_caller():
    @graftax.jit
    def make(key):
        model = Net(nnx.Rngs(key))
        return model, {"optimizer": nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)}

    model, rest = make(jax.random.key(0))
    assert_close(nnx.state(model), nnx.state(Net(nnx.Rngs(jax.random.key(0)))))
    model.first.kernel[...] = jnp.zeros((3, 4))
    model.name = "mine"
    model.first.bias.set_metadata("tag", "mine")
    rest["optimizer"].update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    second, _ = make(jax.random.key(0))
    assert second is not model
    assert second.first.kernel[...].any()


def test_the_order_of_attributes_is_no_part_of_the_key():
    class Pair(nnx.Module):
        def __init__(self, *names):
            for name in names:
                setattr(self, name, nnx.Param(jnp.ones(()) * ord(name)))

    @graftax.jit
    def f(pair):
        pair.a[...] = pair.b[...] - pair.a[...]
        return [name for name in vars(pair) if not name.startswith("_")]

    ab, ba = Pair("a", "b"), Pair("b", "a")
    assert f(ab) == f(ba) == ["a", "b"]
    assert f.cache_info().traces == 1
    assert list(vars(ba))[-2:] == ["b", "a"]  # the caller's own order stays
    assert ab.a[...] == ba.a[...] == 1
    del ba.b
    ba.c = nnx.Param(jnp.ones(()))
    with pytest.raises(AttributeError, match="b"):
        f(ba)


def test_captured_modules_are_changed_too():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    @graftax.jit
    def f(x):
        model.calls = getattr(model, "calls", 0) + 1
        model.bias[...] = model.bias[...] + x
        return model(x)

    mark = model._pytree__state._trace_state
    f(jnp.ones(2))
    f(jnp.ones(2))
    assert model.calls == 2
    np.testing.assert_array_equal(model.bias[...], [2, 2])
    assert model._pytree__state._trace_state is mark


def test_a_module_without_arrays_may_be_changed_inside():
    class Plain(nnx.Module):
        def __init__(self):
            self.calls = 0
            self.deterministic = False

    class Holder:  # an object of no library, and without arrays
        def __init__(self, module):
            self.module = module

    module, empty = Plain(), nnx.Variable(3)

    @graftax.jit
    def f(holder, variable):
        holder.module.calls += 1
        holder.module.eval()
        variable.set_value(variable.get_value() + 1)

    holder = Holder(module)
    f(holder, empty)
    f(holder, empty)
    assert holder.module is module
    assert module.calls == 2
    assert module.deterministic
    assert empty.get_value() == 5


@pytest.mark.quick(0)  # by value: test_filter_jit; such a step: test_three_training_steps_give_the_numbers_of_nnx_jit
def test_filter_jit_leaves_the_caller_alone_and_returns_its_own():
    model, optimizer, metrics = training()
    before = arrays(nnx.state((model, optimizer, metrics)))

    @graftax.filter_jit
    def step(model, optimizer, metrics, x, y):
        loss = train_step(model, optimizer, metrics, x, y)
        return model, optimizer, metrics, loss

    state = (model, optimizer, metrics)
    for x, y in batches():
        *state, _ = step(*state, x, y)
    np.testing.assert_equal(arrays(nnx.state((model, optimizer, metrics))), before)
    plain = training()
    for x, y in batches():
        nnx.jit(train_step)(*plain, x, y)
    assert_close(nnx.state(tuple(state)), nnx.state(plain))
    assert step.cache_info().traces == 1
    state[0].first.kernel[...] = 0
    state[0].note = "mine"


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.drop = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(x)) + x


@pytest.mark.quick(0)
@pytest.mark.parametrize("jit", [lambda f: f, graftax.jit], ids=["eager", "jit"])
def test_scanned_layers_keep_their_statistics_and_counts_as_under_nnx_scan(jit):
    x = jax.random.normal(jax.random.key(3), (5, 3))
    make = nnx.vmap(lambda key: Block(nnx.Rngs(key)))
    ours, theirs = (make(jax.random.split(jax.random.key(0), 4)) for _ in range(2))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def expected(x, layer):
        return layer(x)

    for _ in range(2):
        out = jit(lambda layers, x: graftax.scan(lambda x, layer: (layer(x), None), x, layers)[0])(ours, x)
        assert_close(out, expected(x, theirs))
        assert_close(nnx.state(ours), nnx.state(theirs))
    assert ours.norm.mean[...].any() and ours.drop.rngs.count[...].tolist() == [2, 2, 2, 2]


def test_a_fresh_but_equal_model_is_a_hit():
    f = graftax.jit(lambda m, x: m(x))
    for seed in range(3):
        model = Net(nnx.Rngs(seed))
        f(model, jnp.ones((2, 3)))
        f(nnx.clone(model), jnp.ones((2, 3)))
    assert f.cache_info().traces == 1


def test_an_exception_leaves_the_modules_as_they_were():
    model = Net(nnx.Rngs(0))
    before, names = arrays(nnx.state(model)), list(vars(model))

    @graftax.jit
    def f(m, x):
        m(x)
        m.extra = nnx.Param(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        f(model, jnp.ones((2, 3)))
    np.testing.assert_equal(arrays(nnx.state(model)), before)
    assert list(vars(model)) == names
    model.fine = 1


def test_the_optimizer_of_graftax_trains_params_and_leaves_statistics():
    model = Net(nnx.Rngs(0, dropout=1))
    named = graftax.optimizer(optax.sgd(0.1), model).parameters(model)
    assert sorted(named) == sorted(
        f"{a}.{b}"
        for a in ("first", "last", "norm")
        for b in ("kernel", "bias", "scale")
        if hasattr(getattr(model, a), b)
    )
    everything = graftax.optimizer(optax.sgd(0.1), model, wrt=(nnx.Param, nnx.BatchStat)).parameters(model)
    assert everything.keys() - named.keys() == {"norm.mean", "norm.var"}
