# SPDX-License-Identifier: Apache-2.0
"""`mutation=` error and discard, failed traces, and tracers that would be left behind."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import pytest

import graftax
import oracle
from zoo import (
    Box,
    f32,
)


@pytest.mark.filterwarnings("ignore::UserWarning")  # the advice on statics that change
def test_python_counters_count():
    @graftax.jit
    def f(x, counter, log):
        counter[0] += 1
        log.n += 1
        return x * counter[0] * log.n

    counter, log = [0], Box(n=0)
    assert [f(f32(1), counter, log).tolist() for _ in range(3)] == [[1.0], [4.0], [9.0]]
    assert counter == [3] and log.n == 3


def changing(params, config):
    params["w"] = params["w"] + 1
    config.sizes.append(3)
    return params, config


def sample():
    return {"w": f32(1)}, Box(sizes=[1, 2])


def test_discard_leaves_the_arguments_and_returns_new_nodes():
    f = graftax.jit(changing, mutation="discard")
    for _ in range(2):
        args = sample()
        params, config = f(*args)
        assert oracle.difference(sample(), args) is None
        assert params is not args[0] and params["w"].tolist() == [2.0]
        assert config is not args[1] and config.sizes == [1, 2, 3]


def test_discard_keeps_handed_over_nodes_that_did_not_change():
    config = Box(sizes=[1, 2])
    f = graftax.jit(lambda config, x: (config, x), mutation="discard")
    for _ in range(2):
        assert f(config, [f32(1)])[0] is config


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (lambda params, config: params.update(w=params["w"] + 1), "params"),
        (lambda params, config: config.sizes.append(3), "sizes"),
        (lambda params, config: setattr(config, "new", 3), "config"),
    ],
)
def test_error_names_what_changed_and_leaves_the_arguments(f, name):
    jitted = graftax.jit(f, mutation="error")
    for _ in range(2):
        args = sample()
        with pytest.raises(graftax.GraftaxError, match=name):
            jitted(*args)
        assert oracle.difference(sample(), args) is None


def test_error_names_eight_places_at_most():
    f = graftax.jit(lambda boxes: [setattr(box, "new", 1) for box in boxes], mutation="error")
    with pytest.raises(graftax.MutationError) as raised:
        f([Box(w=f32(i)) for i in range(12)])
    assert [f"boxes[{i}]" in str(raised.value) for i in range(12)] == [i < 8 for i in range(12)]


@pytest.mark.parametrize("key", [1, 1.5, b"k", "".join(["k", "ey"]), None, (1, ("a", 2)), frozenset({1})])
def test_a_dict_that_nobody_touches_is_unchanged_whatever_its_keys_are(key):
    f = graftax.jit(lambda d: d[key] + 1, mutation="error")
    assert [f({key: f32(1), "other": 2}).tolist() for _ in range(2)] == [[2.0]] * 2


@pytest.mark.parametrize("value", [10**20, 1.5, 1.5j, "text" * 3, b"text" * 3], ids=lambda v: type(v).__name__)
@pytest.mark.quick(5)
def test_an_equal_value_is_no_change_and_another_one_is(value):
    def equal_one(box, w):
        box.value = pickle.loads(pickle.dumps(box.value))

    def other_one(box, w):
        box.value = box.value + box.value

    for holder in (Box, lambda value: Box(value=value, w=f32(1))):
        graftax.jit(equal_one, mutation="error")(holder(value=value), f32(1))
        with pytest.raises(graftax.MutationError, match="box"):
            graftax.jit(other_one, mutation="error")(holder(value=value), f32(1))


def test_discard_returns_anew_what_leads_to_a_change_by_another_way():
    def f(one, other, x):
        one.inner.append(2)
        return other, x

    shared = [1]
    one, other = Box(inner=shared), Box(inner=shared, name="other")
    jitted = graftax.jit(f, mutation="discard")
    for first, second in ((one, other), (other, one)):
        for _ in range(2):
            result, _ = jitted(first, second, f32(1))
            assert result is not second and result.inner == [1, 2] and shared == [1] == second.inner


@pytest.mark.parametrize("both", [True, False], ids=["both", "one"])
def test_discard_gives_functions_that_share_a_variable_one_variable_again(both):
    def pair(w, held):
        n = 0

        def count():
            nonlocal n
            n += 1
            return n, w

        def read():
            return n, held

        return count, read

    jitted = graftax.jit(lambda count, read, x: ((count if both else 1), read, count, x + 1), mutation="discard")
    for _ in range(2):
        count, read = pair(f32(1), [f32(1)])
        first, new_read, new_count, _ = jitted(count, read, f32(1))
        assert new_count()[0] == 1 == new_read()[0] and read()[0] == 0 and first in (1, new_count)


@dataclasses.dataclass(frozen=True)
class FrozenNode:
    w: object
    inner: object = None
    name: str = "name"
    cache: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedNode:
    w: object
    inner: object = None
    name: str = "name"
    cache: object = None


def flatten_frozen(node):
    return (node.w, node.inner), (node.name, 1)


for cls in (FrozenNode, SlottedNode):
    jax.tree_util.register_pytree_node(cls, flatten_frozen, lambda aux, xs, cls=cls: cls(*xs, aux[0]))

REPLACED = {
    "w": lambda x: x,
    "inner": lambda x: FrozenNode(x),
    "name": lambda x: "other",
}


@pytest.mark.parametrize("cls", [FrozenNode, SlottedNode])
@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.quick(6)
def test_a_registered_immutable_object_cannot_be_changed_below_its_own_setattr(cls, name):
    jitted = graftax.jit(lambda nodes, x: object.__setattr__(nodes[0], name, REPLACED[name](x)))
    for _ in range(2):
        node = cls(f32(1), FrozenNode(f32(2)))
        before = [getattr(node, field.name) for field in dataclasses.fields(cls)]
        with pytest.raises(graftax.MutationError, match=rf"nodes\[0\]: .*'{name}' of an immutable {cls.__name__} was"):
            jitted((node,), f32(2))
        assert all(getattr(node, f.name) is was for f, was in zip(dataclasses.fields(cls), before, strict=True))


def test_a_registered_immutable_object_cannot_lose_or_get_an_attribute_below_its_own_setattr():
    def deletes(node):
        object.__delattr__(node, "inner")

    def adds(node):
        object.__setattr__(node, "new", node.w)

    for change, text in ((deletes, "'inner' of an immutable"), (adds, "'new' was added to an immutable FrozenNode")):
        node = FrozenNode(f32(1), f32(2))
        before = dict(vars(node))
        with pytest.raises(graftax.MutationError, match=text):
            graftax.jit(change)(node)
        assert vars(node) == before


@pytest.mark.parametrize("cls", [FrozenNode, SlottedNode])
def test_what_a_registered_immutable_object_keeps_for_itself_may_change(cls):
    @graftax.jit
    def f(node):
        object.__setattr__(node, "cache", node.w * 2)
        object.__setattr__(node, "name", "".join(["na", "me"]))
        return node.cache

    for _ in range(2):
        assert f(cls(f32(1), None)).tolist() == [2.0]
        assert f(cls(f32(1), FrozenNode(f32(1)))).tolist() == [2.0]


def test_error_lets_pure_functions_pass():
    @graftax.jit(mutation="error")
    def f(params, config):
        local = dict(params, extra=[])
        local["extra"].append(config.sizes[0])
        return local

    for _ in range(2):
        args = sample()
        assert f(*args)["extra"] == [1]
        assert oracle.difference(sample(), args) is None


def test_a_failed_trace_leaves_the_arguments_as_they_were():
    def f(g, x):
        g["a"].append(x)
        g["config"].n = x
        g["config"].sizes.append(x)
        del g["config"].name
        g["set"].add(5)
        g["new"] = x
        raise KeyError("no")

    def build():
        return {"a": [f32(1)], "config": Box(n=1, sizes=[1], name="x"), "set": {1}}

    jitted = graftax.jit(f)
    for _ in range(3):
        g, memo = build(), {}
        copy = oracle.deep_copy(g, memo=memo)
        with pytest.raises(KeyError, match="no"):
            jitted(g, f32(2))
        pairs = [pair for pair in memo.values() if oracle.is_mutable(pair[0])]
        assert oracle.difference(g, copy, pairs) is None


@jax.tree_util.register_pytree_node_class
class Registered:
    """Registered with JAX, with slots besides its dict. Below an object without arrays it is handed over as itself."""

    __slots__ = ("__dict__", "free", "limit")

    def __init__(self, limit, name="name", free=4):
        self.limit, self.name = limit, name
        if free is not None:
            self.free = free

    def tree_flatten(self):
        return (self.limit,), (self.name, getattr(self, "free", None))

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children, *aux)

    def state(self):
        return dict(vars(self)), self.limit, getattr(self, "free", "empty")


def fills(node):
    node.new = 1
    node.free = 6
    del node.name


def empties(node):
    node.name = "other"
    node.limit = node.limit + 1
    del node.free


CHANGES = [(None, fills), (4, fills), (4, empties)]


@pytest.mark.parametrize("mode", ["propagate", "error"])
@pytest.mark.parametrize(("free", "change"), CHANGES, ids=["filled", "changed", "emptied"])
def test_a_registered_object_without_arrays_gets_all_its_attributes_back(free, change, mode):
    @graftax.jit(mutation=mode)
    def f(box, x):
        change(box.node)
        if mode == "propagate":
            raise KeyError("no")
        return x

    node = Registered(3, free=free)
    held, before = node.__dict__, node.state()
    for _ in range(2):
        with pytest.raises((KeyError, graftax.MutationError)):
            f(Box(node=node), f32(1))
        assert node.state() == before and vars(node) is held


@pytest.mark.parametrize("limit", [lambda: 3, lambda: f32(3)], ids=["itself", "rebuilt"])
@pytest.mark.parametrize(("free", "change"), CHANGES, ids=["filled", "changed", "emptied"])
def test_a_registered_object_is_changed_as_in_plain_python(limit, free, change):
    plain, node = Registered(limit(), free=free), Registered(limit(), free=free)
    change(plain)
    graftax.jit(lambda box: change(box.node))(Box(node=node))
    assert oracle.difference(plain.state(), node.state()) is None


def test_a_call_after_a_failed_one_is_fine():
    @graftax.jit
    def f(log, x, fail):
        log.append(x)
        if fail:
            raise ValueError("no")
        return x

    log = []
    for value in (1.0, 2.0):
        with pytest.raises(ValueError, match="no"):
            f(log, f32(value), True)
        f(log, f32(value), False)
    assert [x.tolist() for x in log] == [[1.0], [2.0]]


def test_a_failed_write_of_the_trace_itself_leaves_the_arguments():
    def f(g, x):
        g.append(x)
        return jnp.ones((2, 3)) @ jnp.ones((2, 3))

    g = []
    with pytest.raises(TypeError):
        graftax.jit(f)(g, f32(1))
    assert g == []


def test_a_tracer_left_where_it_can_be_seen_is_a_clear_error():
    @graftax.jit
    def f(x):
        @jax.jit
        def inner(y):
            x.append(y)
            return y

        return inner(x[0])

    g = [f32(1)]
    with pytest.raises((graftax.GraftaxError, jax.errors.UnexpectedTracerError)):
        f(g)
    assert oracle.same_graph(g, [f32(1)])


def test_a_tracer_left_in_a_set_or_a_key_is_a_clear_error():
    def into_key(g, x):
        g["d"][(1, x)] = 1

    g = {"d": {"k": 1}}
    with pytest.raises((graftax.GraftaxError, TypeError)):
        graftax.jit(into_key)(g, f32(1))
    assert oracle.same_graph(g, {"d": {"k": 1}})


def test_a_mutable_opaque_object_made_inside_is_a_clear_error():
    @graftax.jit
    def f(x):
        return {"counter": iter([1, 2]), "x": x}

    with pytest.raises(graftax.GraftaxError, match="counter"):
        f(f32(1))


@dataclasses.dataclass(frozen=True)
class Names:
    """Registered with JAX, immutable, and flattened into a new list each time."""

    names: tuple


jax.tree_util.register_pytree_node(Names, lambda n: (([*n.names],), None), lambda _, parts: Names(tuple(parts[0])))


def test_an_immutable_registered_object_with_computed_children_is_handed_over_as_it_is():
    f = graftax.jit(lambda box, x: x + len(box.node.names))
    box = Box(node=Names(("a", "b")))
    node = box.node
    assert [f(box, f32(1)).tolist() for _ in range(2)] == [[3.0], [3.0]]
    assert box.node is node and node == Names(("a", "b"))


@pytest.mark.parametrize("attribute", ["names", "more"])
def test_an_immutable_registered_object_gets_its_attributes_back_after_an_error(attribute):
    @graftax.jit
    def f(box, x):
        object.__setattr__(box.node, attribute, ("c",))
        raise KeyError("no")

    box = Box(node=Names(("a", "b")))
    with pytest.raises(KeyError, match="no"):
        f(box, f32(1))
    assert vars(box.node) == {"names": ("a", "b")}
