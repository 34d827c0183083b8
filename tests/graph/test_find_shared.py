# SPDX-License-Identifier: Apache-2.0
"""find and shared; and graphs that are deep, wide, changed meanwhile, or looked at by many threads."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
import zoo
from graftax import Path
from graftax._graph.path import Graph
from sizes import sized
from watchdog import isolated
from zoo import Box, Data, f32

DEEP, WIDE = sized(20_000, 3_000), sized(100_000, 5_000)


def paths(found: Any) -> list[str]:
    return [str(place.path) for place in found]


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_everything_is_found_once_and_is_at_its_path(build: Any):
    x = build()
    matches = graftax.find(x, lambda part: True)
    assert matches[0].value is x and str(matches[0].path) == ""
    assert len(set(paths(matches))) == len(matches)
    assert paths(graftax.find(x, "**")) == paths(matches)
    arrays = graftax.find(x, jax.Array)
    assert all(path.get(x) is value for path, value in arrays)


def test_by_type_by_pattern_and_by_function():
    layer = Box(w=f32(1), n=3)
    x = {"layers": [layer, Box(w=f32(2), n=4)], "tied": layer, "name": "x"}
    assert paths(graftax.find(x, Box)) == ["[layers][0]", "[layers][1]"]
    assert paths(graftax.find(x, (int, str))) == ["[layers][0].n", "[layers][1].n", "[name]"]
    assert paths(graftax.find(x, int | str)) == ["[layers][0].n", "[layers][1].n", "[name]"]
    assert paths(graftax.find(x, "tied.w")) == ["[layers][0].w"] == paths(graftax.find(x, "[tied].*"))[:1]
    assert paths(graftax.find(x, Path.parse("layers[1].n"))) == ["[layers][1].n"]
    assert paths(graftax.find(x, lambda part: isinstance(part, int) and part > 3)) == ["[layers][1].n"]
    assert graftax.find(x, "**.nothing") == graftax.find(x, "nothing") == graftax.find(x, bytes) == []
    with pytest.raises(TypeError, match=r"find\(\) takes a type or several, a pattern, or a function of a part, got 3"):
        graftax.find(x, 3)
    with pytest.raises(TypeError) as info:
        graftax.find(x, lambda part: part > 3)
    assert any("obj" in note for note in info.value.__notes__)


def test_shared():
    layer, w, n = Box(w=f32(1)), f32(2), np.arange(2)
    root = {"a": layer, "b": [layer, w], "w": w, "n": n, "m": (n, "text", 1, 1, ())}
    root["me"] = root
    actual = {tuple(map(str, places)): value for value, places in graftax.shared(root)}
    assert actual == {("[a]", "[b][0]"): layer, ("[b][1]", "[w]"): w, ("[n]", "[m][0]"): n, ("", "[me]"): root}
    assert graftax.shared([1, 1, "a", "a", None, None, (), ()]) == graftax.shared(3) == []
    for name, build in zoo.ZOO:
        is_shared = bool(graftax.shared(build()))
        assert is_shared or not name.startswith(("cyclic", "shared_list", "shared_o", "two", "parent", "doubly")), name


# ---- large graphs: anything that is quadratic in these numbers would take minutes


def chain(length: int) -> Any:
    first = last = Data(0, None)
    for i in range(1, length):
        last.b = Data(i, None)
        last = last.b
    return first


def linked(length: int) -> Any:
    nodes = [Box(value=i) for i in range(length)]
    for left, right in itertools.pairwise(nodes):
        left.next, right.prev = right, left
    return nodes


@pytest.mark.quick(0)
@isolated(seconds=90)
def test_deep_graphs():
    x = chain(DEEP)
    path = graftax.find(x, lambda part: part == DEEP - 1 and isinstance(part, int))[0].path
    assert len(path) == DEEP and path.get(x) == DEEP - 1
    path.set(x, "end")
    y = graftax.at(x)[path].set("other")
    assert [d.path for d in graftax.diff(x, y)] == [path] and not graftax.equal(x, y)
    assert graftax.equal(x, graftax.copy(x)) and graftax.shared(x) == []
    ints, rest = graftax.partition(x, int)
    assert graftax.equal(graftax.combine(ints, rest), x)
    graftax.update(x, y)
    assert path.get(x) == "other"
    assert graftax.at(x)["**.a"].apply(lambda a: 1).b.b.a == 1
    assert Path.parse(str(path)) == path and path.matches("**.a")


@pytest.mark.quick(0)
@isolated(seconds=90)
def test_long_doubly_linked_lists():
    nodes = linked(DEEP)
    x = nodes[0]
    assert len(graftax.at(x)["**.value"].get()) == DEEP
    ones = graftax.at(nodes)["[*].value"].set(1)
    assert ones[5].next.prev is ones[5] and ones[7].value == 1 and nodes[7].value == 7
    assert graftax.equal(nodes, graftax.copy(nodes)) and not graftax.equal(nodes, ones)
    assert len(graftax.diff(nodes, ones, limit=100)) == 100
    selected, rest = graftax.partition(nodes, "[*].value")
    assert graftax.equal(graftax.combine(selected, rest), nodes)
    few = linked(1000)  # the paths alone are as long as the list
    assert len(graftax.find([few, {"again": few}], Box)) == len(graftax.shared(few)) == 1000


@pytest.mark.quick(0)
@isolated(seconds=90)
def test_wide_graphs():
    x = {f"k{i}": i for i in range(WIDE)}
    assert [p.get(x) for p, _ in graftax.find(x, int)][-1] == WIDE - 1
    y = graftax.at(x)["[*]"].apply(lambda v: v + 1)
    assert y["k0"] == 1 and len(graftax.diff(x, y)) == WIDE and graftax.equal(y, dict(reversed(y.items())))
    assert graftax.at(x)[f"k{WIDE - 1}"].get() == WIDE - 1
    graftax.update(x, y)
    assert x == y
    for wrong in ("k", "**.k1", "nothing"):
        try:
            graftax.at(x)[wrong]
        except graftax.StructureError as error:
            assert len(str(error)) < 500
        else:
            raise AssertionError(wrong)
    spec = {key: i % 2 == 0 for i, key in enumerate(x)}
    even, odd = graftax.partition(x, spec)
    assert sum(v is None for v in even.values()) == WIDE // 2 and graftax.equal(graftax.combine(even, odd), x)
    many: list[Any] = [()] * WIDE + [(1, 2)] * 1000
    assert graftax.equal(many, list(many)) and len(graftax.find(many, "[*]")) == WIDE + 1000
    first = graftax.at(many)[lambda m: m[7]].set("seven")
    assert first[7] == "seven" and first[6] == first[8] == ()


@pytest.mark.quick(0)
@isolated(seconds=90)
def test_many_references_to_one_wide_object():
    shared = {f"k{i}": i for i in range(2000)}
    x = [shared] * 2000
    assert len(graftax.at(x)["[*][*]"].get()) == 2000
    y = graftax.at(x)["[*][k7]"].set("new")
    assert all(part is y[0] for part in y) and y[0]["k7"] == "new"
    assert len(graftax.diff(x, y)) == 1
    changed = graftax.at(x)["[3][k1]", "[4][k2]"].set(["a", "b"])
    assert changed[0]["k1"] == "a" and changed[0]["k2"] == "b"


def test_what_grows_without_end_is_refused():
    pair: Any = (f32(1),)
    for _ in range(40):
        pair = (pair, pair)
    with pytest.raises(graftax.StructureError, match="reached again and again"):
        graftax.find(pair, int)


# ---- code of the user's in between


def test_a_graph_that_a_predicate_changes():
    x: dict[str, Any] = {"a": 1, "b": [2, 3]}

    def predicate(leaf: Any) -> bool:
        x["b"].clear()
        return True

    selected, rest = graftax.partition(x, predicate)
    assert selected == {"a": 1, "b": [2, 3]} and rest == {"a": None, "b": [None, None]}
    places = graftax.at({"l": [1, 2]})["l[1]"]
    places._graph.rows[0].value["l"].clear()
    assert places.get() == 2 and places.set(5) == {"l": [1, 5]}


def test_a_graph_that_grows_while_places_are_looked_for():
    graph: dict[str, Any] = {"a": [1, 2]}
    watched = Graph(graph)
    graph["a"].append(3)
    with pytest.raises(graftax.ConcurrentChangeError, match="list changed while it was read"):
        watched.matching("a[*]")


def test_objects_that_die_meanwhile():
    died: list[str] = []

    class Dying:
        def __init__(self, name: str) -> None:
            self.name = name

        def __del__(self) -> None:
            died.append(self.name)
            graftax.find([1, 2], int)

    x = {"a": Dying("a"), "b": [Dying("b")]}
    graftax.at(x)["a"].update(None)
    gc.collect()
    assert died == ["a"]
    y = graftax.at(x)["b[0]"].set(1)
    del x
    gc.collect()
    assert died == ["a", "b"] and y == {"a": None, "b": [1]}


def test_nothing_is_kept():
    layer = Box(w=f32(1))
    layer.me = layer
    watched = weakref.ref(layer)
    x = {"l": layer, "m": [layer]}
    for _ in range(3):
        graftax.partition(x, jax.Array)
        graftax.at(x)["l.w"].set(1)
        graftax.at(x)[lambda m: m["l"].w].apply(str)
        graftax.equal(x, graftax.copy(x))
        with pytest.raises(graftax.StructureError):
            graftax.at(x)["l.nothing"]
        graftax.shared(x)
    places = graftax.at(x)["l"]
    x["places"] = places  # a cycle through what at() returns
    del layer, x, places
    gc.collect()
    assert watched() is None


def test_threads():
    layer = Box(w=1)
    x = {"layers": [Box(w=i) for i in range(50)], "tied": layer, "head": layer}
    barrier = threading.Barrier(4)
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            barrier.wait()
            for i in range(20):
                y = graftax.at(x)["**.w"].apply(lambda w: (w, number))
                assert y["head"] is y["tied"] and y["layers"][i].w == (i, number)
                assert graftax.equal(graftax.combine(*graftax.partition(y, int)), y)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and layer.w == 1


def test_a_class_whose_flatten_fails_is_an_error_with_the_path():
    class Failing:
        pass

    def flatten(obj: Any) -> Any:
        raise ArithmeticError("no flatten today")

    jax.tree_util.register_pytree_node(Failing, flatten, lambda aux, children: Failing())
    with pytest.raises(ArithmeticError) as info:
        graftax.find({"a": [Failing()]}, int)
    assert any("obj['a'][0]" in note for note in info.value.__notes__)


def test_a_class_whose_unflatten_fails_or_makes_something_else():
    class Odd:
        def __init__(self, w: Any) -> None:
            self.w = w

    jax.tree_util.register_pytree_node(Odd, lambda x: ((x.w,), None), lambda aux, children: list(children))
    x = {"odd": Odd(1), "after": [2]}
    with pytest.raises(TypeError, match=r"unflatten of .*Odd makes a list"):
        graftax.at(x)["odd[0]", "after[0]"].update([5, 6])
    assert x["odd"].w == 1 and x["after"] == [2]


def test_within_jit_and_with_shapes():
    shapes = jax.eval_shape(lambda: {"w": jnp.ones((2, 3)), "b": jnp.ones(3)})
    assert paths(graftax.find(shapes, jax.ShapeDtypeStruct)) == ["[w]", "[b]"] or paths(
        graftax.find(shapes, jax.ShapeDtypeStruct)
    ) == ["[b]", "[w]"]
    count = graftax.jit(lambda m: len(graftax.find(m, jax.Array)) * m["w"])({"w": f32(2), "b": [f32(3)]})
    assert count.tolist() == [4]
