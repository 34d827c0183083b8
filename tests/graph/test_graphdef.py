# SPDX-License-Identifier: Apache-2.0
"""A GraphDef is data: immutable, exactly comparable, hashable, printable, picklable."""

import array
import datetime
import math
import pickle
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import graftax
import zoo
from graftax import _core
from strategies import graphs
from zoo import Box, Data, Level, Slotted, f32, i32

pytestmark = pytest.mark.quick(8)  # a case takes milliseconds

UNPICKLABLE = ("statics", "statics_beside_arrays")  # an object() and a module


def graphdef(x):
    return graftax.flatten(x)[1]


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_equal_structures_have_equal_graphdefs(build):
    first, second = graphdef(build()), graphdef(build())
    assert isinstance(first, graftax.GraphDef)
    assert first == second
    assert first == second
    assert hash(first) == hash(second)


def test_different_structures_have_different_graphdefs():
    defs = [graphdef(build()) for build in zoo.BUILDERS]
    names = dict(zip(zoo.NAMES, defs, strict=True))
    arrays = ("array", "scalar_array", "zero_size_array", "typed_key", "bfloat16", "complex")
    assert len({names[name] for name in arrays}) == 1  # one dynamic leaf, whatever its shape and dtype
    others = [name for name in zoo.NAMES if name not in arrays[1:]]
    for i, left in enumerate(others):
        for right in others[i + 1 :]:
            assert names[left] != names[right], (left, right)


@given(graphs())
def test_equal_random_structures_have_equal_graphdefs(recipe):
    (one, nodes), (other, others) = recipe.build(), recipe.build(1, (2,))  # what is referred to weakly lives, too
    first, second = graphdef(one), graphdef(other)
    del nodes, others
    assert first == second
    assert hash(first) == hash(second)


def test_array_values_shapes_and_dtypes_are_no_part_of_the_structure():
    assert graphdef([f32(1)]) == graphdef([i32(1, 2)])


def shared():
    x = [f32(1)]
    return [x, x]


def apart():
    return [[f32(1)], [f32(1)]]


UNEQUAL = [
    (1, True),
    (1, 1.0),
    (True, 1.0),
    (1, Level.ONE),
    (0.0, -0.0),
    (complex(0.0, 0.0), complex(0.0, -0.0)),
    ("a", b"a"),
    (None, ()),
    ([], ()),
    (1, f32(1)),
    (int, bool),
    ({1: f32(1)}, {True: f32(1)}),
    ({1: f32(1)}, {1.0: f32(1)}),
    ({0.0: f32(1)}, {-0.0: f32(1)}),
    ({"a": f32(1), "b": f32(2)}, {"b": f32(2), "a": f32(1)}),
    ({"a": f32(1)}, OrderedDict(a=f32(1))),
    (defaultdict(int), defaultdict(list)),
    (deque([f32(1)], 2), deque([f32(1)], 3)),
    (Box(a=f32(1)), Box(b=f32(1))),
    (Box(a=1), Box(a=True)),
    (Box(a=1), Data(1)),
    (Slotted(a=f32(1)), Slotted(b=f32(1))),
    ({1, 2}, {1, 3}),
    ({1}, {True}),
    (bytearray(b"a"), bytearray(b"b")),
    (shared(), apart()),
    ([[f32(1)]], [[f32(1), f32(2)]]),
    (zoo.Registered(f32(1), f32(2), "a"), zoo.Registered(f32(1), f32(2), "b")),
    (zoo.RegisteredData(f32(1), f32(2), 1), zoo.RegisteredData(f32(1), f32(2), True)),
]


@pytest.mark.parametrize("pair", UNEQUAL, ids=range(len(UNEQUAL)))
@pytest.mark.parametrize(
    "wrap",
    [lambda x: x, lambda x: (x, f32(0)), lambda x: {"k": [x]}, Data, Box],
    ids=["bare", "tuple", "dict", "data", "box"],
)
def test_structures_that_differ_are_told_apart_at_every_depth(pair, wrap):
    def put(x):
        return Box(value=x) if wrap is Box else wrap(x)

    left, right = graphdef(put(pair[0])), graphdef(put(pair[1]))
    assert left != right
    assert left == graphdef(put(pair[0]))


def test_nan_is_itself():
    assert graphdef([math.nan, {float("nan"): 1}]) == graphdef([float("nan"), {math.nan: 1}])


def test_a_graphdef_differs_from_other_things():
    assert graphdef([1]) != [1]
    assert graphdef([1]) != "x"
    assert graphdef([f32(1)]) != jax.tree.structure([f32(1)])


def test_graphdefs_are_dictionary_keys():
    table = {graphdef(build()): name for name, build in zoo.ZOO}
    assert table[graphdef(zoo.cyclic_dict())] == "cyclic_dict"


def test_a_graphdef_is_immutable():
    gd = graphdef([f32(1)])
    for name in ("num_leaves", "num_nodes", "anything"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(gd, name, 3)


def test_a_graphdef_does_not_follow_later_changes_of_the_graph():
    x = [1, {2, 3}, bytearray(b"a"), Box(n=1)]
    gd = graphdef(x)
    x[1].add(4)
    x[2].append(1)
    x[3].n = 2
    assert gd == graphdef([1, {2, 3}, bytearray(b"a"), Box(n=1)])
    assert gd != graphdef(x)


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_num_leaves_counts_the_leaves(build):
    leaves, gd = graftax.flatten(build())
    assert gd.num_leaves == len(leaves)


def test_num_nodes_counts_as_a_treedef_does():
    for tree in ({"b": f32(1), "a": [f32(2), (f32(3),)]}, [], f32(1), [[], {}]):
        assert graphdef(tree).num_nodes == jax.tree.structure(tree).num_nodes


def test_a_node_met_twice_is_counted_once():
    x = []
    for _ in range(40):
        x = [x, x]
    assert graphdef(x).num_nodes == 41


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_its_types_are_those_of_its_rows(build):
    structure = graphdef(build())
    nodes, statics = structure._types()
    rows = structure.rows()
    assert nodes == Counter(row.type for row in rows if row.op is _core.Op.node)
    assert statics >= {type(row.value) for row in rows if row.op is _core.Op.static}


def test_repr_names_containers_keys_and_classes():
    text = repr(graphdef({"weights": [f32(1), Box(size=7)], "p": zoo.Point(f32(1), None)}))
    for part in ("GraphDef", "weights", "*", "Box", "size", "7", "Point", "None"):
        assert part in text


def test_repr_shows_references():
    assert repr(graphdef(shared())) != repr(graphdef(apart()))
    assert repr(graphdef(zoo.cyclic_list())) != repr(graphdef([1, f32(2), []]))


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_repr_ends_on_every_graph(build):
    assert repr(graphdef(build())).startswith("GraphDef(")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", [name for name in zoo.NAMES if name not in UNPICKLABLE])
def test_a_graphdef_survives_pickle(name, protocol):
    leaves, gd = graftax.flatten(dict(zoo.ZOO)[name]())
    restored = pickle.loads(pickle.dumps(gd, protocol))
    assert restored == gd
    assert hash(restored) == hash(gd)
    assert repr(restored) == repr(gd)
    assert graphdef(graftax.unflatten(restored, leaves)) == gd


def test_pickle_of_an_unpicklable_static_names_its_path():
    with pytest.raises(graftax.GraftaxError, match="hook"):
        pickle.dumps(graphdef({"hook": lambda: 0, "w": f32(1)}))


def test_string_arrays_count_by_value():
    assert graphdef([np.array(["a", "b"])]) == graphdef([np.array(["a", "b"])])
    assert graphdef([np.array(["a", "b"])]) != graphdef([np.array(["a", "c"])])


@pytest.mark.parametrize("function", [jax.nn.relu, jax.nn.silu, jnp.tanh], ids=["custom_jvp", "jit", "jnp"])
def test_a_function_that_its_name_leads_to_is_pickled_by_name(function):
    gd = graphdef({"act": function, "w": f32(1)})
    restored = pickle.loads(pickle.dumps(gd))
    assert restored == gd
    assert graftax.unflatten(restored, [f32(2)])["act"] is function


def test_a_function_of_jax_without_a_name_to_find_it_by_is_refused():
    with pytest.raises(graftax.UnpicklableError, match=r"\['act'\]"):
        pickle.dumps(graphdef({"act": jax.custom_jvp(lambda x: x)}))


VIEWS = [(cls, name) for cls in (dict, OrderedDict) for name in ("keys", "values", "items")]


@pytest.mark.parametrize(("cls", "name"), VIEWS, ids=[f"{cls.__name__}.{name}" for cls, name in VIEWS])
def test_a_view_is_rebuilt_as_one_of_the_rebuilt_dict(cls, name):
    mapping = cls(a=f32(1), b=1)
    graph = [mapping, getattr(mapping, name)()]
    leaves, structure = graftax.flatten(graph)
    restored, view = graftax.unflatten(structure, leaves)
    restored["c"] = 2
    assert type(view) is type(graph[1]) and len(view) == 3 and len(graph[1]) == 2
    with pytest.raises(graftax.UnpicklableError, match=type(view).__name__):
        pickle.dumps(structure)


class Text(str):
    pass


class Count(int):
    pass


class Rate(float):
    pass


class Wave(complex):
    pass


class Raw(bytes):
    pass


class Memory(bytearray):
    pass


@pytest.mark.parametrize("value", [Text("a"), Count(3), Rate(2.5), Wave(1j), Raw(b"x"), Memory(b"y")], ids=repr)
def test_a_value_with_attributes_is_printed_and_survives_pickle_with_them(value):
    value.w, value.n = f32(1), 1
    leaves, structure = graftax.flatten([value])
    [restored] = graftax.unflatten(pickle.loads(pickle.dumps(structure)), leaves)
    assert type(restored) is type(value) and restored == value and restored.w is value.w and restored.n == 1
    plain = repr(value) if not isinstance(value, Memory) else "b'y'"
    assert repr(structure) == f"GraphDef([{type(value).__name__}({plain}, w=*, n=1)])"
    other = type(value)(value)
    other.w, other.n = value.w, 2
    assert graphdef([other]) != structure and structure == graphdef([restored])


BUILTINS = {
    weakref.ref: ("weakref", False), weakref.ProxyType: ("weakref", False), array.array: ("buffer", True),
    types.FunctionType: ("function", True), types.CellType: ("cell", True), types.MethodType: ("method", False),
    types.MappingProxyType: ("proxy", False), deque: ("deque", True), defaultdict: ("defaultdict", True),
    frozenset: ("set", False), bytearray: ("buffer", True), types.SimpleNamespace: ("object", True),
    ValueError: ("exception", True), np.ndarray: ("buffer", True), int: ("static", False), Text: ("value", True),
}  # fmt: skip


@pytest.mark.parametrize("cls", BUILTINS, ids=lambda cls: cls.__name__)
def test_a_class_tells_its_kind_without_an_instance(cls):
    subclass = type("Subclass", (cls,), {}) if cls not in FINAL else cls
    _core.forget_kind(cls)
    assert _core.kind_info(cls)[:2] == BUILTINS[cls]
    assert _core.kind_info(subclass)[0] in (BUILTINS[cls][0], "value")


FINAL = (weakref.ProxyType, types.FunctionType, types.CellType, types.MethodType, types.MappingProxyType, np.ndarray)


def test_a_value_that_was_given_in_a_state_is_refilled():
    graph = [array.array("d", [1.5, 2.5]), np.array(["a", "bc"]), Memory(b"xyz"), deque([1], 3), {1, "a"}]
    leaves, structure = graftax.flatten(graph)
    restored = graftax.unflatten(pickle.loads(pickle.dumps(structure)), leaves)
    assert restored[0] == graph[0] and restored[1].tolist() == ["a", "bc"] and restored[2:] == graph[2:]
    restored[0][0], restored[1][0], restored[2][0] = 7.0, "z", 65
    assert graph[0][0] == 1.5 and graph[1][0] == "a" and graph[2][0] == 120


def test_what_is_nested_too_deeply_in_a_key_or_a_static_is_refused():
    def deep(n, inside=1):
        for _ in range(n):
            inside = (inside,)
        return inside

    assert graphdef({deep(150): 1}) == graphdef({deep(150): 1}) != graphdef({deep(150, 2): 1})
    for key in (deep(300), deep(300, "a")):
        with pytest.raises(RecursionError, match="nested too deeply"):
            graphdef({key: 1})


def test_names_and_values_that_cannot_be_printed_have_a_structure():
    class Silent:
        def __repr__(self):
            raise ValueError("no words")

        def __hash__(self):
            return 1

        def __eq__(self, other):
            return self is other

    lone, silent = Box(**{"\ud800": f32(1)}), {Silent(): "\udfff", "k": f32(2)}
    text = repr(graphdef([lone, silent]))
    assert "\\ud800=" in text and "Silent object>" in text


class Queue(deque):
    pass


class Row(list):
    pass


class Table(dict):
    pass


class Pair(tuple):
    pass


PRINTED = [
    (Queue([1, 2], 3), "Queue([1, 2], maxlen=3, w=*)"),
    (Row([1, 2]), "Row([1, 2], w=*)"),
    (Table(a=1), "Table({'a': 1}, w=*)"),
    (Pair((1, 2)), "Pair((1, 2), w=*)"),
]


@pytest.mark.parametrize(("value", "text"), PRINTED, ids=lambda x: type(x).__name__)
def test_attributes_are_printed_after_the_items(value, text):
    value.w = f32(1)
    assert repr(graphdef([value])) == f"GraphDef([{text}])"


def test_a_long_structure_is_printed_in_part():
    text = repr(graphdef(list(range(10**6, 10**6 + 120_000))))
    assert text.startswith("GraphDef([1000000, 1000001, ") and text.endswith("...)")
    assert len(text) < 1_000_100


def test_a_value_that_is_refused_is_refused_in_a_key():
    hidden = (x for x in ())
    for key in (hidden, (hidden, 1), ((1, hidden),)):
        with pytest.raises(graftax.UnsupportedValueError, match="generator as a dict key"):
            graphdef({key: 1})


class Day(datetime.date):
    """Of January: what `__reduce__` gives is nothing that it can be made of."""

    def __new__(cls, day: str):
        return super().__new__(cls, 2020, 1, int(day))


class Noted(datetime.date):
    note = ""


def test_a_date_that_cannot_be_made_anew_stays_itself_and_is_named_where_it_is_needed():
    day, noted = Day("3"), Noted(2020, 1, 3)
    day.note = noted.note = "n"
    assert graftax.jit(lambda day: (day, day.day * 2))(day) == (day, 6)
    leaves, graphdef = graftax.flatten(noted)
    assert graftax.unflatten(graphdef, leaves) == noted
    pickled = pickle.loads(pickle.dumps(graphdef))
    for structure, name in ((graftax.flatten([day])[1], "Day"), (pickled, "Noted")):
        with pytest.raises(graftax.UnsupportedValueError, match=f"an instance of {name} cannot be rebuilt"):
            graftax.unflatten(structure, [])


def test_an_abstract_mesh_is_a_value():
    def mesh(kind):
        return jax.sharding.AbstractMesh((2,), ("d",), axis_types=(kind,))

    kinds = jax.sharding.AxisType
    assert graftax.copy([mesh(kinds.Auto)]) == [mesh(kinds.Auto)]
    same, other = graphdef([mesh(kinds.Auto)]), graphdef([mesh(kinds.Explicit)])
    assert same == graphdef([mesh(kinds.Auto)]) != other
    assert same.fingerprint() == graphdef([mesh(kinds.Auto)]).fingerprint() != other.fingerprint()
    assert pickle.loads(pickle.dumps(same)) == same
    assert graftax.jit(lambda m: (m, m == mesh(kinds.Auto)))(mesh(kinds.Auto)) == (mesh(kinds.Auto), True)
