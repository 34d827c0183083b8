# SPDX-License-Identifier: Apache-2.0
"""`at`: copies with other values in some places, and writes in place."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import graftax
import oracle
import zoo
from graftax._graph.path import Graph
from zoo import Affine, Box, Data, Frozen, Node, Point, Registered, RegisteredData, SlottedFrozen, f32

pytestmark = pytest.mark.quick(8)  # a case takes milliseconds

NEW = "another value"


def leaf_paths(x: Any) -> list[graftax.Path]:
    graph = Graph(x)
    return [graph.path(place) for place, row in enumerate(graph.rows) if row.is_leaf]


def spine(graph: Graph, place: int) -> set[int]:
    """The nodes from which a place is reached, by any way."""
    above: dict[int, set[int]] = {}
    for row in graph.rows[1:]:
        above.setdefault(row.target, set()).add(row.parent)
    reached: set[int] = set()
    work = [graph.rows[place].parent]
    while work:
        node = work.pop()
        if node >= 0 and node not in reached:
            reached.add(node)
            work += above.get(node, ())
    return reached


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_a_copy_differs_in_that_place_and_shares_all_that_does_not_contain_it(build: Any):
    x = build()
    twin = graftax.copy(x)
    before = Graph(x)
    for place in [p for p, row in enumerate(before.rows) if row.is_leaf][:12]:
        path = before.path(place)
        if str(path).endswith((".aux_data[0]", ".default_factory")):  # these cannot be any value
            continue
        changed = graftax.at(x)[path].set(NEW)
        assert [d.path for d in graftax.diff(changed, x)] == [path]
        assert path.get(changed) is NEW
        on_the_way = spine(before, place)
        for node, row in enumerate(before.rows):
            if row.category == "node" and oracle.is_mutable(row.value):
                assert (before.path(node).get(changed) is row.value) == (node not in on_the_way)
    assert graftax.diff(x, twin) == []


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_setting_what_is_there_gives_an_equal_graph_and_an_update_keeps_the_objects(build: Any):
    x = build()
    for path in leaf_paths(x)[:12]:
        value = path.get(x)
        assert graftax.diff(graftax.at(x)[path].set(value), x) == []
        kept = mutable_ids(x)
        try:
            path.set(x, value)
        except TypeError as error:
            assert "every object from the root" in str(error)
        assert kept == mutable_ids(x)


def mutable_ids(x: Any) -> list[int]:
    return [id(row.value) for row in Graph(x).rows if row.category == "node" and oracle.is_mutable(row.value)]


def test_only_the_spine_is_made_anew():
    x = {"a": [[1], [2]], "b": {"c": [3]}}
    y = graftax.at(x)["a[0][0]"].set(9)
    assert y == {"a": [[9], [2]], "b": {"c": [3]}} and x["a"][0] == [1]
    assert y["b"] is x["b"] and y["a"][1] is x["a"][1] and y["a"] is not x["a"]


# ---- which place is meant


def test_a_path_means_one_place_even_where_a_shared_object_stands():
    layer = Box(w=f32(1))
    model = {"first": layer, "list": [layer]}
    for path, other in (("first", "list[0]"), ("list[0]", "first")):
        changed = graftax.at(model)[path].set(NEW)
        assert graftax.Path.parse(path).get(changed) is NEW and graftax.Path.parse(other).get(changed) is layer
    graftax.Path.parse("first").set(model, NEW)
    assert model["first"] is NEW and model["list"] == [layer]


def test_a_path_through_a_shared_object_changes_it_wherever_it_stands():
    layer = Box(w=f32(1))
    model = {"first": layer, "list": [layer]}
    for path in ("first.w", "list[0].w"):
        changed = graftax.at(model)[path].set(NEW)
        assert changed["first"] is changed["list"][0] and changed["first"].w is NEW
    assert layer.w[0] == 1
    graftax.at(model)["list[0].w"].update(NEW)
    assert layer.w is NEW


def test_an_object_that_a_function_returns_is_replaced_wherever_it_stands():
    layer = Box(w=f32(1))
    model = {"first": layer, "list": [layer]}
    places = graftax.at(model)[lambda m: m["list"][0]]
    assert list(map(str, places.paths)) == ["[first]", "[list][0]"] and places.get() is layer
    assert places.set(NEW) == {"first": NEW, "list": [NEW]}
    calls = []
    new = places.apply(lambda old: calls.append(old) or [old])
    assert new["first"] is new["list"][0] and calls == [layer]


def test_a_way_back_can_be_cut():
    root = Node(f32(1))
    child = Node(f32(2), root)
    grandchild = Node(f32(3), child)
    changed = graftax.at(root)["children[0].parent"].set(None)
    assert changed.children[0].parent is None and changed is not root
    assert changed.children[0].children[0].parent is changed.children[0]
    assert child.parent is root and grandchild.parent is child
    graftax.at(root)["children[0].parent"].update(None)
    assert child.parent is None


def test_cycles_stay_cycles():
    for build in (zoo.cyclic_list, zoo.cyclic_dict, zoo.cyclic_object, zoo.cyclic_frozen, zoo.cyclic_registered):
        x = build()
        place = leaf_paths(x)[-1]
        y = graftax.at(x)[place].set(NEW)
        reference = next(r for r in Graph(y).rows if r.category == "ref")
        assert reference.value is not x and graftax.equal(graftax.at(y)[place].set(place.get(x)), x)


@pytest.mark.parametrize(
    ("graph", "where", "path"),
    [
        ({"a": None, "b": None}, lambda m: m["b"], "[b]"),
        ({"a": 1, "b": [1, True, 1.0]}, lambda m: m["b"][0], "[b][0]"),
        ({"a": (), "b": [(), ()]}, lambda m: m["b"][1], "[b][1]"),
        ({"a": ("x",), "b": [("x",)]}, lambda m: m["b"][0], "[b][0]"),
        ({"t": (1, (1,)), "n": 1}, lambda m: m["t"][1][0], "[t][1][0]"),
        ([None, {"n": 1, "l": [None, None]}], lambda m: m[1]["l"][m[1]["n"]], "[1][l][1]"),
        (Box(a=None, b=Frozen(None)), lambda m: m.b.a, ".b.a"),
        (Box(f=len, g=len), lambda m: m.g, ".g"),
    ],
)
def test_a_function_may_point_at_what_stands_in_several_places(graph: Any, where: Any, path: str):
    places = graftax.at(graph)[where]
    assert [str(p) for p in places.paths] == [path]
    assert [str(d.path) for d in graftax.diff(places.set(NEW), graph)] == [path]


def test_one_array_in_two_places_and_one_tuple_in_two_places():
    w = f32(1)
    pair = (w, 2)
    model = Box(a=w, b=w, c=pair, d=pair)
    changed = graftax.at(model)[lambda m: m.b].set(NEW)
    assert changed.a is w and changed.b is NEW and changed.c is pair
    changed = graftax.at(model)[lambda m: m.d].set(NEW)
    assert changed.c == pair and changed.d is NEW
    changed = graftax.at(model)[lambda m: m.d[0]].set(NEW)
    assert changed.d == (NEW, 2) and changed.c is pair


def test_several_places():
    model = {"l": [Box(w=1, b=None), Box(w=2, b=None)], "n": 3}
    for where in (
        ("l[0].w", "l[1].b"),
        ["l[0].w", "l[1].b"],
        lambda m: (m["l"][0].w, m["l"][1].b),
        lambda m: [m["l"][0].w, m["l"][1].b],
    ):
        places = graftax.at(model)[where]
        assert places.get() == [1, None]
        changed = places.set(["x", "y"])
        assert changed["l"][0].w == "x" and changed["l"][1].b == "y" and changed["l"][0].b is None
    assert graftax.at(model)["n", lambda m: m["l"][1].w].set((5, 6))["l"][1].w == 6


def test_patterns():
    layer = Box(w=1, b=2)
    model = {"layers": [layer, Box(w=3, b=4)], "tied": layer, "a.b": {"[x]": 5, "it's": 6}}
    at = graftax.at(model)
    assert at["layers[*].w"].get() == [1, 3] and at["**.w"].get() == [1, 3] and at["tied.*"].get() == [1, 2]
    assert at["*.w"].get() == [1] and at["**[layers][*].b"].get() == [2, 4] and at["layers.**.b"].get() == [2, 4]
    assert at["[a.b][*]"].get() == [5, 6] and at["*['[x]']"].get() == [5] and at['**["it\'s"]'].get() == [6]
    assert at["[a*][*]"].get() == [5, 6] and at["obj[layers][1].*"].get() == [3, 4]
    changed = at["**.w"].apply(lambda w: w * 10)
    assert changed["tied"] is changed["layers"][0] and changed["tied"].w == 10 and changed["layers"][1].w == 30
    assert at["**.w"].set(0)["layers"][1].w == 0
    assert [str(p) for p in at["layers[*]"].paths] == ["[layers][0]", "[layers][1]"]


def test_what_is_called_obj_is_not_the_root():
    model = {"obj": {"w": 1}, "w": 2}
    assert graftax.at(model)["obj.w"].get() == 1 and graftax.at(model)["obj[*]"].get() == [1]
    assert graftax.at({"w": 2})["obj[w]"].get() == 2


# ---- every kind of node


def test_every_kind_of_node():
    owner = Box(w=1)
    array = f32(1)
    x = {
        "deque": deque([1, 2], maxlen=3),
        "ordered": OrderedDict(b=1, a=2),
        "default": defaultdict(list, a=1),
        "point": Point(1, [2]),
        "frozen": SlottedFrozen(1, 2),
        "slots": zoo.Slotted(a=1),
        "registered": Registered(1, 2),
        "data": RegisteredData(1, 2),
        "eqx": Affine(1, 2, name="old"),
        "partial": functools.partial(max, 1, default=2),
        "ref": weakref.ref(owner),
        "owner": owner,
        "method": owner.total,
        "closure": lambda: array,
        "keys": {1: 1, None: 2, (1, "x"): 3, True + 1: 4},
    }
    changed = x
    for path in (
        "deque[1]",
        "ordered[a]",
        "default[a]",
        "point[1][0]",
        "frozen.a",
        "slots.a",
        "registered[<flat index 1>]",
        "data.bias",
        "eqx.name",
        "partial.args[0]",
        "owner.w",
        "closure.__closure__['array'].cell_contents",
        "keys[1]",
        "keys[None]",
        "keys[(1, 'x')]",
    ):
        changed = graftax.at(changed)[path].set(NEW)
        assert graftax.at(changed)[path].get() is NEW
    assert list(changed["deque"]) == [1, NEW] and changed["deque"].maxlen == 3
    assert list(changed["ordered"].items()) == [("b", 1), ("a", NEW)] and changed["default"].default_factory is list
    assert changed["point"] == Point(1, [NEW]) and changed["frozen"] == SlottedFrozen(NEW, 2)
    assert changed["registered"].b is NEW and changed["data"].bias is NEW and changed["eqx"].name is NEW
    assert changed["partial"].args == (NEW,) and changed["closure"]() is NEW
    assert changed["ref"]() is changed["owner"] is changed["method"].__self__ and changed["owner"].w is NEW
    assert owner.w == 1 and x["closure"]() is array


def test_aux_data_and_static_fields_can_be_set():
    assert graftax.at(Registered(1, 2, name="old"))["aux_data"].set("new").name == "new"
    assert graftax.at(RegisteredData(1, 2, size=3))["aux_data[0]"].set(4).size == 4
    x = [Affine(1, 2, name="old")]
    graftax.at(x)["[0].name"].update("new")
    assert x[0].name == "new"


@pytest.mark.quick(0)
def test_it_does_what_tree_at_of_equinox_does():
    model = eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(0))
    wheres: list[Any] = [
        lambda m: m.layers[0].weight,
        lambda m: m.layers[1],
        lambda m: m.activation,
        lambda m: (m.layers[0].bias, m.layers[2].weight),
    ]
    for where in wheres:
        values = ("a", "b") if isinstance(where(model), tuple) else "a"
        ours, theirs = graftax.at(model)[where].set(values), eqx.tree_at(where, model, values)
        assert jax.tree.structure(ours) == jax.tree.structure(theirs) and eqx.tree_equal(ours, theirs)
    no_bias = eqx.nn.Linear(2, 2, use_bias=False, key=jax.random.key(0))
    ours = graftax.at(no_bias)[lambda m: m.bias].set(f32(0, 0))
    assert eqx.tree_equal(ours, eqx.tree_at(lambda m: m.bias, no_bias, f32(0, 0), is_leaf=lambda x: x is None))


def test_nnx_modules():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    path = next(p for p, value in graftax.find(model, jax.Array) if "kernel" in str(p))
    changed = graftax.at(model)[path].set(jnp.zeros((2, 2)))
    assert changed(jnp.ones(2)).sum() == 0 and model(jnp.ones(2)).sum() != 0
    assert changed.bias is model.bias
    graftax.at(model)[path].update(jnp.zeros((2, 2)))
    assert model(jnp.ones(2)).sum() == 0
    changed = graftax.at(model)[lambda m: m.kernel].apply(lambda v: nnx.Param(v[...] + 1))
    assert changed(jnp.ones(2)).sum() == 4


def test_under_a_transform():
    model = Box(w=f32(1, 2), b=f32(3))

    @graftax.grad
    def loss(w: Any) -> Any:
        return (graftax.at(model)["w"].set(w).w * model.b).sum()

    assert loss(f32(1, 1)).tolist() == [3, 3]
    doubled = graftax.jit(lambda m: graftax.at(m)["**.w"].apply(lambda w: 2 * w))(model)
    assert doubled.w.tolist() == [2, 4] and doubled.b is model.b and model.w.tolist() == [1, 2]


# ---- update


def test_update_writes_through_immutable_objects():
    inner = [1]
    x = Box(t=(Frozen((inner, 2)), Data(3)), rest=[4])
    data, rest = x.t[1], x.rest
    graftax.at(x)["t[0].a[1]"].update(NEW)
    assert x.t[0] == Frozen((inner, NEW)) and x.t[0].a[0] is inner and x.t[1] is data and x.rest is rest
    graftax.at(x)["t[1].a", "t[0]"].update(["p", "q"])
    assert x.t == ("q", data) and data.a == "p"


def test_update_of_one_tuple_that_stands_in_two_places_changes_the_one():
    pair = (1, 2)
    x = [pair, {"p": pair}]
    graftax.at(x)["[1]['p'][0]"].update(NEW)
    assert x == [(1, 2), {"p": (NEW, 2)}]


def test_update_of_a_cyclic_immutable_object():
    x = zoo.cyclic_frozen()
    holder = [x]
    graftax.at(holder)["[0].b"].update(NEW)
    assert holder[0].b is NEW and holder[0] is not x and holder[0].a[1] is holder[0]


def test_a_registered_subclass_of_list_is_made_anew_in_what_holds_it():
    class Items(list):  # type: ignore[type-arg]
        pass

    jax.tree_util.register_pytree_node(Items, lambda x: (tuple(x), None), lambda _, children: Items(children))
    x = {"items": Items([1, 2])}
    graftax.at(x)["items[1]"].update(NEW)
    assert x == {"items": [1, NEW]}


# ---- errors


@dataclasses.dataclass
class Model:
    w: Any = 1
    layers: Any = dataclasses.field(default_factory=lambda: [Data(1), Data(2)])


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("weight", graftax.StructureError, r"there is no .weight: this Model has no .weight. It has .w"),
        ("layers[2]", graftax.StructureError, r"the list at .layers has no \[2\]. It has \[1\], \[0\]"),
        ("layers[0].a.x", graftax.StructureError, r"the int at .layers\[0\].a has no .x. It has nothing below"),
        ("**.c", graftax.StructureError, r"nothing in this Model matches '\*\*.c'. It has .*layers"),
        ("layers..a", ValueError, r"is not a path: what begins at '..a' cannot be parsed"),
        ("**.layers[*]a", ValueError, r"is not a pattern: what begins at 'a' cannot be parsed"),
        (3, TypeError, r"at\(\) takes a path, a pattern, a type, a function, or several of those, got 3"),
        ((), TypeError, r"got \(\)"),
        ([], TypeError, r"got \[\]"),
        (lambda m: m.layers[0].a + 1000, graftax.StructureError, r"must return parts of.*an int that is no part"),
        (lambda m: [m.w, object()], graftax.StructureError, r"must return parts of the object"),
        (lambda m: m.layers[m.w - 1].a, graftax.StructureError, r"\.w, obj.layers\[0\].a.*failed: TypeError.*the path"),
    ],
)
def test_a_place_that_is_not_there(where: Any, error: Any, message: str):
    with pytest.raises(error, match=message):
        graftax.at(Model())[where]


def test_two_values_for_one_place_and_a_value_inside_another():
    layer = Box(w=1)
    model = {"a": layer, "b": layer}
    with pytest.raises(ValueError, match=r"obj\[a\].w is given two values"):
        graftax.at(model)["a.w", "b.w"].set([1, 2])
    assert graftax.at(model)["a.w", "b.w"].set([NEW, NEW])["a"].w is NEW
    for where in (("layers", "layers[0].a"), "layers.**"):
        with pytest.raises(ValueError, match=r"obj.layers\[0\]\S* lies in obj.layers\S*, which is replaced as well"):
            graftax.at(Model())[where].apply(lambda old: old)
    changed = graftax.at(model)["a", "b.w"].set([1, 2])  # the layer is still there, as b
    assert changed["a"] == 1 and changed["b"].w == 2


def test_the_number_of_values():
    with pytest.raises(ValueError, match=r"one value for each of the 2 places, got 1 values"):
        graftax.at([1, 2])["[0]", "[1]"].set([1])
    with pytest.raises(ValueError, match=r"one value for each of the 2 places, got an int"):
        graftax.at([1, 2])[lambda x: (x[0], x[1])].set(1)


@pytest.mark.parametrize("value", [jnp.zeros(2), np.zeros(2), "ab", {"a": 1, "b": 2}, {1, 2}], ids=repr)
def test_the_rows_of_an_array_and_what_has_no_order_are_no_values_for_several_places(value: Any):
    with pytest.raises(ValueError, match=rf"one value for each of the 2 places, got an? {type(value).__name__[:5]}"):
        graftax.at([1, 2])["[0]", "[1]"].set(value)
    assert graftax.at([1, 2])["[0]", "[1]"].set(iter((3, 4))) == [3, 4]


def test_the_items_of_a_named_tuple_have_names():
    state = (optax.ScaleByAdamState(jnp.asarray(3), {"w": jnp.ones(2)}, {"w": jnp.zeros(2)}), optax.EmptyState())
    assert graftax.at(state)["[0].count"].get() is graftax.at(state)["[0][0]"].get() is state[0].count
    jax_path = jax.tree_util.tree_leaves_with_path(state)[1][0]
    assert graftax.at(state)[graftax.Path(jax_path)].get() is graftax.Path(jax_path).get(state) is state[0].mu["w"]
    fresh = graftax.at(state)["[*].mu[*]"].apply(jnp.zeros_like)
    assert type(fresh[0]) is optax.ScaleByAdamState and fresh[0].mu["w"].sum() == 0 and fresh[0].nu is state[0].nu
    assert [value for _, value in graftax.find(state, "**.mu[w]")] == [state[0].mu["w"]]
    with pytest.raises(graftax.StructureError, match=r"has no \.mean\. It has \.count, \.mu, \.nu\."):
        graftax.at(state)["[0].mean"]


def test_an_error_of_the_function_given_to_apply_names_the_place():
    with pytest.raises(ZeroDivisionError) as info:
        graftax.at({"a": 1, "b": 0})["*"].apply(lambda x: 1 / x)
    assert any("obj[b]" in note for note in info.value.__notes__)


def test_an_error_in_the_function_that_points_is_its_own():
    with pytest.raises(KeyError, match="nothing"):
        graftax.at({})[lambda m: m["nothing"]]


def test_places_print():
    assert repr(graftax.at([1, [2]])["[1][0]"]) == "<places obj[1][0]>"
    assert repr(graftax.at(list(range(20)))["[*]"]).endswith("obj[7] and 12 more>")


def test_a_traced_function_may_return_arrays_that_it_was_given():
    @graftax.jit
    def f(x):
        a, b = x + 1, x + 2
        kept = graftax.at({"a": a, "b": b})["*"].apply(lambda w: w)
        swapped = graftax.at({"a": a, "b": b})["*"].apply(lambda w: b if w is a else a)
        return kept, swapped

    kept, swapped = f(jnp.zeros(1))
    assert [kept["a"], kept["b"], swapped["a"], swapped["b"]] == [1, 2, 2, 1]
