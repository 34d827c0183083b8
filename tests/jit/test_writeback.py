# SPDX-License-Identifier: Apache-2.0
"""What a function does to its arguments is done to the caller's objects, cold and warm."""

import gc
import sys
import weakref
from collections import OrderedDict, defaultdict, deque

import jax
import numpy as np
import pytest

import graftax
import oracle
import zoo
from zoo import (
    Both,
    Box,
    Counter,
    Data,
    Frozen,
    Point,
    Registered,
    RegisteredData,
    Slotted,
    SlottedData,
    Stack,
    f32,
)


def arrays(n=3):
    return [f32(i + 1) for i in range(n)]


def as_plain_python(build, f, calls=2):
    """Call ``f`` on equal graphs in plain Python and through jit; compare all that can be seen."""
    jitted = graftax.jit(f)
    traces = jitted.cache_info().traces
    for shift in range(calls):
        plain, memo = oracle.deep_copy(build(), lambda x: x + shift), {}
        args = oracle.deep_copy(plain, memo=memo)
        pairs = [pair for pair in memo.values() if oracle.is_mutable(pair[0])]
        wanted, got = f(plain), jitted(args)
        node_pairs = [[x for x, _ in pairs], [y for _, y in pairs]]
        assert oracle.difference((wanted, plain, node_pairs[0]), (got, args, node_pairs[1]), pairs) is None
    assert jitted.cache_info().traces == traces + 1


def set_item(x):
    x[0] = x[1] * 2


def add_to_item(x):
    x[0] += 1


def append(x):
    x.append(x[0] * 2)


def append_twice(x):
    x.append(x[0])
    x.append("static")


def insert(x):
    x.insert(1, f32(9))


def pop(x):
    return x.pop()


def pop_first(x):
    first = x[0]
    del x[0]
    return first


def clear(x):
    x.clear()


def reverse(x):
    x.reverse()


def swap(x):
    x[0], x[-1] = x[-1], x[0]


def extend(x):
    x.extend([x[0] + 1, x[1]])


def empty_and_refill(x):
    old = list(x)
    x.clear()
    x.extend(old[::-1])


def put_new_nodes(x):
    x[0] = [x[0], {"new": (x[1], Box(w=x[1] * 2))}]


def put_itself(x):
    x.append(x)


def put_static(x):
    x[0] = None


SEQUENCE = [set_item, add_to_item, append, append_twice, insert, pop, pop_first, clear, reverse, swap] + [
    *(extend, empty_and_refill, put_new_nodes, put_itself, put_static)
]


SEQUENCES = {
    "list": arrays,
    "list_subclass": lambda: Stack(arrays()),
    "deque": lambda: deque(arrays()),
    "deque_maxlen": lambda: deque(arrays(), maxlen=4),
}


@pytest.mark.parametrize("build", SEQUENCES.values(), ids=SEQUENCES)
@pytest.mark.parametrize("change", SEQUENCE)
def test_sequences(build, change):
    as_plain_python(build, change)


def slice_assign(x):
    x[1:2] = [x[0], x[0] * 2]


def slice_delete(x):
    del x[::2]


def sort_statics(x):
    x.append([3, 1, 2])
    x[-1].sort()
    x.sort(key=lambda item: isinstance(item, list), reverse=True)


@pytest.mark.parametrize("change", [slice_assign, slice_delete, sort_statics])
def test_lists(change):
    as_plain_python(arrays, change)


def append_left(x):
    x.appendleft(x[0] * 2)


def rotate(x):
    x.rotate(1)


def push_out(x):
    x.extend([x[0], x[1]])


@pytest.mark.parametrize("change", [append_left, rotate, push_out])
def test_deques(change):
    as_plain_python(lambda: deque(arrays(), maxlen=3), change)


def set_key(x):
    x["a"] = x["b"] * 2


def add_to_key(x):
    x["a"] += 1


def new_key(x):
    x["new"] = x["a"] * 2


def new_key_of_another_type(x):
    x[1, "k"] = x[None] = x["a"]


def delete_key(x):
    del x["a"]


def pop_key(x):
    return x.pop("a")


def pop_item(x):
    return x.popitem()


def update(x):
    x.update(b=x["a"], z=x["b"] * 2)


def set_default(x):
    x.setdefault("z", []).append(x["a"])


def replace_all(x):
    a = x["a"]
    x.clear()
    x["only"] = a


def move_to_the_end(x):
    x["a"] = x.pop("a")


def reverse_order(x):
    items = list(x.items())
    x.clear()
    x.update(items[::-1])


def union(x):
    x |= {"u": x["a"] + 1}


MAPPING = [set_key, add_to_key, new_key, new_key_of_another_type, delete_key, pop_key, pop_item, update] + [
    *(set_default, replace_all, move_to_the_end, reverse_order, union, clear)
]


MAPPINGS = {
    "dict": lambda: {"b": f32(1), "a": f32(2)},
    "dict_subclass": lambda: zoo.Table(b=f32(1), a=f32(2)),
    "ordered_dict": lambda: OrderedDict(b=f32(1), a=f32(2)),
    "default_dict": lambda: defaultdict(list, b=f32(1), a=f32(2)),
}


@pytest.mark.parametrize("build", MAPPINGS.values(), ids=MAPPINGS)
@pytest.mark.parametrize("change", MAPPING)
def test_mappings(build, change):
    as_plain_python(build, change)


def move_first(x):
    x.move_to_end("a", last=False)


def move_last(x):
    x.move_to_end("b")


@pytest.mark.parametrize("change", [move_first, move_last])
def test_ordered_dicts(change):
    as_plain_python(MAPPINGS["ordered_dict"], change)


def miss(x):
    x["missed"].append(x["a"])


def read_a_miss(x):
    return len(x["missed"])


def change_factory(x):
    x.default_factory = dict


@pytest.mark.parametrize("change", [miss, read_a_miss, change_factory])
def test_default_dicts(change):
    as_plain_python(MAPPINGS["default_dict"], change)


def set_attribute(x):
    x.a = x.b * 2


def add_to_attribute(x):
    x.a += 1


def delete_attribute(x):
    del x.a


def delete_and_set(x):
    a = x.a
    del x.a
    x.a = a + 1


def swap_attributes(x):
    x.a, x.b = x.b, x.a


def set_to_new_nodes(x):
    x.a = [x.a, {"w": x.b}]


def set_to_itself(x):
    x.a = x


def set_to_static(x):
    x.a = "static"


def set_unset(x):
    x.c = x.a + x.b


OBJECT = [set_attribute, add_to_attribute, swap_attributes, set_to_new_nodes, set_to_itself, set_to_static]


DELETING = [delete_attribute, delete_and_set]


OBJECTS = {
    "object": lambda: Box(a=f32(1), b=f32(2)),
    "slotted": lambda: Slotted(a=f32(1), b=f32(2)),
    "slots_and_dict": lambda: Both(a=f32(1), b=f32(2)),
    "dataclass": lambda: Data(f32(1), f32(2)),
    "slots_dataclass": lambda: SlottedData(f32(1), f32(2)),
}


@pytest.mark.parametrize("build", OBJECTS.values(), ids=OBJECTS)
@pytest.mark.parametrize("change", OBJECT + DELETING)
def test_objects(build, change):
    as_plain_python(build, change)


@pytest.mark.parametrize("change", OBJECT)
def test_registered_objects(change):
    as_plain_python(lambda: Registered(f32(1), f32(2)), change)


def set_fields(x):
    x.weight = x.weight + x.bias
    x.size = x.size + 1


def test_registered_dataclasses():
    as_plain_python(lambda: RegisteredData(f32(1), f32(2)), set_fields)


@pytest.mark.parametrize("name", ["object", "slotted", "slots_and_dict", "dataclass"])
def test_a_new_attribute(name):
    as_plain_python(OBJECTS[name], set_unset)


def test_attributes_of_container_subclasses():
    def f(x):
        x.name = "new"
        x.extra = [x.extra, len(x)]
        x.more = [x.extra]

    for build in (zoo.list_subclass, zoo.dict_subclass, zoo.deque_subclass, zoo.ordered_subclass):
        as_plain_python(build, f)


def test_an_object_without_attributes_gets_one():
    class Empty:
        def use(self):
            return self.w

    def f(box, x):
        box.w = x * 2

    jitted = graftax.jit(f)
    for value in (1.0, 2.0):
        box = Empty()
        jitted(box, f32(value))
        assert box.use().tolist() == [value * 2]


def test_frozen_objects_raise_as_in_plain_python():
    def f(x):
        x.a = 1

    for frozen in (
        Frozen(f32(1)),
        Frozen(1),
        zoo.SlottedFrozen(f32(1)),
        zoo.Affine(f32(1), None),
        Point(f32(1), 2),
    ):
        with pytest.raises(Exception) as plain:
            f(frozen)
        with pytest.raises(type(plain.value)) as caught:
            graftax.jit(f)(frozen)
        assert str(caught.value) == str(plain.value)


def alias(g):
    g["a"] = g["b"]


def unalias(g):
    g["a"] = [g["a"][0]]


def move(g):
    g["b"].append(g.pop("a"))


def exchange(g):
    g["a"], g["b"] = g["b"], g["a"]


def old_into_new_into_old(g):
    g["b"].append({"box": Box(inner=g["a"])})


def close_a_cycle(g):
    g["a"].append(g)


def change_what_was_taken_out(g):
    x = g.pop("a")
    x.append(g["b"][0] * 3)


def share_a_new_node(g):
    g["x"] = g["y"] = new = [g["a"][0] + 1]
    g["b"].append(new)


def through_tuples(g):
    g["t"] = (g["a"], Frozen(g["b"]), Point([g["a"]], 3))


@pytest.mark.parametrize(
    "change",
    [alias, unalias, move, exchange, old_into_new_into_old, close_a_cycle, change_what_was_taken_out]
    + [share_a_new_node, through_tuples],
)
@pytest.mark.parametrize("sharing", ["shared", "apart"])
def test_nodes_are_moved_aliased_and_created(change, sharing):
    def build():
        x = [f32(1)]
        return {"a": x, "b": x if sharing == "shared" else [f32(2)]}

    as_plain_python(build, change)


def test_a_cycle_is_cut():
    def f(x):
        x.pop()

    as_plain_python(zoo.cyclic_list, f)


def test_changes_below_immutable_nodes():
    def f(g):
        g[0].a.append(g[1].x["w"])
        g[1].x["w"] = g[2][0].n
        g[2][0].n += 1

    as_plain_python(lambda: (Frozen([f32(1)]), Point({"w": f32(2)}, 1), (Box(n=3),)), f)


def test_an_immutable_node_is_replaced():
    def f(box):
        box.model = zoo.Affine(box.model.weight + 1, box.model.bias)
        box.pair = (*box.pair, box.model)

    as_plain_python(lambda: Box(model=zoo.Affine(f32(1), [f32(2)]), pair=(1, f32(3))), f)


def test_sets_and_bytearrays_come_back():
    def f(g):
        g["set"].add(3)
        g["set"].discard(1)
        g["bytes"].extend(b"cd")
        g["new"] = {4}
        return g["w"] + len(g["set"])

    as_plain_python(lambda: {"set": {1, 2}, "bytes": bytearray(b"ab"), "w": f32(1)}, f)


def test_array_free_objects_come_back_changed():
    def f(g):
        g["config"].n += 1
        g["config"].sizes.append(3)
        g["config"].w = g["w"] * 2
        return g["config"]

    as_plain_python(lambda: {"config": Box(n=1, sizes=[1, 2]), "w": f32(1)}, f)


def test_methods_that_mutate():
    def f(counter):
        counter.step()
        counter.weight = counter.weight * 2

    as_plain_python(lambda: Counter(1, f32(2)), f)


def test_several_arguments_positional_and_keyword():
    @graftax.jit
    def f(a, /, b, *rest, c, **more):
        for i, x in enumerate([a, b, *rest, c, *more.values()]):
            x.append(x[0] + i)

    for _ in range(2):
        lists = [[f32(0)] for _ in range(6)]
        f(*lists[:4], c=lists[4], d=lists[5])
        assert [x[1].tolist() for x in lists] == [[0.0], [1.0], [2.0], [3.0], [4.0], [5.0]]


def test_an_untouched_graph_stays_the_very_same():
    x = {"w": f32(1), "n": np.ones(2), "deep": [Box(w=f32(2))]}
    before = {"w": x["w"], "n": x["n"], "w2": x["deep"][0].w}
    f = graftax.jit(lambda x: x["w"] + x["deep"][0].w)
    for _ in range(2):
        f(x)
        assert x["w"] is before["w"] and x["n"] is before["n"] and x["deep"][0].w is before["w2"]


def test_moved_arrays_stay_the_same_arrays():
    x, y = f32(1), f32(2)
    f = graftax.jit(lambda g: g.reverse())
    g = [x, y]
    f(g)
    assert g[0] is y and g[1] is x
    f(g)
    assert g[0] is x and g[1] is y


@pytest.mark.quick(0)
def test_a_training_step_trains():
    def loss(params, x):
        return ((params["w"] * x + params["b"] - 3.0) ** 2).mean()

    def step(params, x):
        grads = jax.grad(loss)(dict(params), x)
        for k in params:
            params[k] -= 0.1 * grads[k]
        return loss(params, x)

    plain, params = ({"w": f32(0.5), "b": f32(0.0)} for _ in range(2))
    x, jitted = f32(1, 2), graftax.jit(step)
    losses = [(float(step(plain, x)), float(jitted(params, x))) for _ in range(3)]
    assert jitted.cache_info().traces == 1
    assert losses[0][1] > losses[1][1] > losses[2][1]
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-6)
    np.testing.assert_allclose(params["w"], plain["w"], rtol=1e-6)


def _set(holder, name, value):
    setattr(holder, name, value)


REPLACED = {
    "list item": (lambda v: [v, 1], lambda x: x.__setitem__(0, None)),
    "list": (lambda v: [1, v], lambda x: x.pop()),
    "dict value": (lambda v: {"a": v}, lambda x: x.update(a=None)),
    "dict key": (lambda v: {"a": v, "b": 1}, lambda x: x.pop("a")),
    "dict order": (lambda v: {"a": v, "b": 1}, lambda x: x.update(a=None, b=x.pop("b"))),
    "ordered dict": (lambda v: OrderedDict(a=v, b=1), lambda x: (x.pop("a"), x.move_to_end("b"))),
    "default dict": (lambda v: defaultdict(list, a=v), lambda x: x.clear()),
    "deque": (lambda v: deque([v, 1]), lambda x: x.rotate() or x.pop()),
    "attribute": (lambda v: Box(a=v), lambda x: _set(x, "a", None)),
    "attribute that goes": (lambda v: Box(a=v), lambda x: delattr(x, "a")),
    "slot": (lambda v: Slotted(a=v), lambda x: _set(x, "a", None)),
    "slot that goes": (lambda v: Slotted(a=v, b=1), lambda x: delattr(x, "a")),
    "slot and attribute": (lambda v: Both(a=v, z=1), lambda x: _set(x, "a", x.z)),
    "attribute of a registered object": (lambda v: Registered(v, 1), lambda x: _set(x, "a", None)),
}


@pytest.mark.parametrize("case", REPLACED)
@pytest.mark.quick(2)
def test_what_is_replaced_is_let_go_and_what_stays_is_owned_once(case):
    build, change = REPLACED[case]

    class Value:
        """An object without attributes: nothing but the container refers to it."""

    f = graftax.jit(lambda x, y: (change(x[0]), y + 1)[1])
    held = []
    for _ in range(4):
        replaced, stays = Value(), Value()
        x = [build(replaced), stays]
        counts = sys.getrefcount(stays), sys.getrefcount(x[0])
        f(x, f32(1))
        same = (sys.getrefcount(stays), sys.getrefcount(x[0])) == counts
        gone = weakref.ref(replaced)
        del replaced
        gc.collect()
        held.append((gone() is None, same))
    assert held == [(True, True)] * 4
