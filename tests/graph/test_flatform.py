# SPDX-License-Identifier: Apache-2.0
"""The flat form: paths to values, references as ``Ref``."""

import gc
import weakref
from collections.abc import Sequence

import jax
import pytest
from hypothesis import given
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

import graftax
import oracle
import zoo
from strategies import graphs
from watchdog import python
from zoo import Box, f32

pytestmark = pytest.mark.quick(8)  # a case takes milliseconds

CLASS = GetAttrKey("__class__")


def plain(path):
    return str(path).replace("'", "").removeprefix("obj")


def by_text(flat):
    return {plain(path): value for path, value in flat.items()}


def test_a_shared_list_in_two_keys():
    x = [1, 2]
    flat = graftax.to_dict({"a": x, "b": x})
    a = DictKey("a")
    assert {tuple(path) for path in flat} == {
        (CLASS,),
        (a, CLASS),
        (a, SequenceKey(0)),
        (a, SequenceKey(1)),
        (DictKey("b"),),
    }
    assert flat[graftax.Path((CLASS,))] is dict
    assert flat[graftax.Path((a, CLASS))] is list
    assert flat[graftax.Path((a, SequenceKey(0)))] == 1
    assert flat[graftax.Path((a, SequenceKey(1)))] == 2
    reference = flat[graftax.Path((DictKey("b"),))]
    assert isinstance(reference, graftax.Ref)
    assert tuple(reference.path) == (a,)

    y = graftax.from_dict(flat)
    y["a"][0] = 4
    assert y == {"a": [4, 2], "b": [4, 2]}


def test_a_cyclic_list():
    x = [1, 2]
    x.append(x)
    flat = graftax.to_dict(x)
    assert len(flat) == 4
    assert flat[graftax.Path((CLASS,))] is list
    reference = flat[graftax.Path((SequenceKey(2),))]
    assert isinstance(reference, graftax.Ref)
    assert tuple(reference.path) == ()
    y = graftax.from_dict(flat)
    assert y[:2] == [1, 2] and y[2] is y


def test_paths_print_as_key_paths():
    flat = by_text(graftax.to_dict({"a": [Box(w=1)]}))
    assert flat["[a][0].w"] == 1
    assert flat["[a][0].__class__"] is Box


def test_paths_are_sequences_of_jax_key_path_entries():
    for path in graftax.to_dict({"a": [Box(w=1)]}):
        assert isinstance(path, graftax.Path) and isinstance(path, Sequence)
        assert all(isinstance(entry, DictKey | SequenceKey | GetAttrKey) for entry in path)


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_every_kind_comes_back(build):
    graph = build()
    flat = graftax.to_dict(graph)
    assert oracle.difference(graph, graftax.from_dict(flat)) is None
    assert oracle.difference(build(), graph) is None


@given(graphs())
def test_random_graphs_come_back(recipe):
    graph = recipe.build()  # with all nodes: a root may be a weak reference
    assert oracle.difference(graph, graftax.from_dict(graftax.to_dict(graph))) is None


def test_a_cyclic_tuple_comes_back():
    t = graftax.from_dict(graftax.to_dict(zoo.cyclic_tuple()))
    assert type(t) is tuple and type(t[0]) is list
    assert type(t[0][0]) is tuple and t[0][0][0] is t[0]


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_arrays_stay_the_same_arrays(build):
    graph = build()
    values = [id(value) for value in graftax.to_dict(graph).values() if oracle.is_array(value)]
    assert values == [id(leaf) for leaf in oracle.flatten(graph)[0]]


def test_values_can_be_edited():
    flat = graftax.to_dict(zoo.shared_list())
    edited = {path: value * 2 if isinstance(value, jax.Array) else value for path, value in flat.items()}
    y = graftax.from_dict(edited)
    assert y["a"] is y["b"]
    assert y["a"][0].tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    "value",
    [
        graftax.Path((DictKey("a"),)),
        graftax.Path(()),
        (DictKey("a"),),
        DictKey("a"),
    ],
    ids=str,
)
def test_a_value_that_happens_to_be_a_path_is_kept(value):
    x = {"a": [1], "b": value}
    y = graftax.from_dict(graftax.to_dict(x))
    assert y["b"] == value and type(y["b"]) is type(value)
    assert y["a"] == [1] and y["a"] is not y["b"]


def test_a_value_that_happens_to_be_a_ref_is_kept_or_refused():
    x = {"a": [1], "b": graftax.Ref(graftax.Path((DictKey("a"),)))}
    try:
        y = graftax.from_dict(graftax.to_dict(x))
    except graftax.GraftaxError:
        return
    assert isinstance(y["b"], graftax.Ref) and y["a"] == [1]


def test_a_reference_to_nowhere_is_a_clear_error():
    flat = dict(graftax.to_dict({"a": [1]}))
    flat[graftax.Path((DictKey("b"),))] = graftax.Ref(graftax.Path((DictKey("lost"),)))
    with pytest.raises(graftax.GraftaxError, match="lost"):
        graftax.from_dict(flat)


def test_entries_without_their_class_are_a_clear_error():
    flat = {path: value for path, value in graftax.to_dict({"a": [1]}).items() if path[-1] != CLASS}
    with pytest.raises(graftax.GraftaxError):
        graftax.from_dict(flat)


def test_refs_compare_by_path():
    path = graftax.Path((DictKey("a"),))
    assert graftax.Ref(path) == graftax.Ref(path)
    assert graftax.Ref(path) != graftax.Ref(graftax.Path(()))
    assert graftax.Ref(path).path == path


ORDER = """
import graftax, zoo
skip = {"statics", "statics_beside_arrays"}
for name, build in zoo.ZOO:
    if name not in skip:
        print(name, [str(path) for path in graftax.to_dict(build())])
"""


@pytest.mark.quick(0)  # what the text of GraphDefs shows, too: test_fingerprint
def test_the_order_is_the_same_in_every_process():
    first, second = (python(ORDER, PYTHONHASHSEED=seed) for seed in ("1", "2"))
    assert first == second
    assert len(first.splitlines()) == len(zoo.ZOO) - 2


def test_the_order_is_that_of_the_walk():
    flat = [plain(path) for path in graftax.to_dict({"b": [1, (2,)], "a": Box(z=3, y=4)}) if path[-1:] != (CLASS,)]
    assert flat == ["[b][0]", "[b][1][0]", "[a].z", "[a].y"]


def test_a_value_that_is_repeated_inside_a_repeated_value_keeps_its_place():
    inner = zoo.Affine(weight=(1, "x"), bias=(1, "x"))
    graph = [zoo.Affine(weight=inner, bias=inner), zoo.Affine(weight=inner, bias=inner)]
    assert oracle.difference(graph, graftax.from_dict(graftax.to_dict(graph))) is None


@pytest.mark.quick(0)
def test_a_dag_of_forty_tuples_has_a_small_flat_form():
    graph = ("x",)
    for _ in range(40):
        graph = (graph, graph)
    flat = graftax.to_dict(graph)
    assert len(flat) < 50_000
    assert graftax.flatten(graftax.from_dict(flat))[1].num_nodes < 50_000


def test_named_items_go_by_name():
    class Both:
        def __init__(self, one, other):
            self.one, self.other = one, other

    graftax.register(
        Both,
        flatten=lambda b: ((b.other, b.one), "aux"),
        unflatten=lambda _, c: Both(c[1], c[0]),
        names=["other", "one"],
    )
    flat = graftax.to_dict([zoo.Point(1, [2]), Both(3, 4)])
    assert [str(path) for path in flat if "__" not in str(path)] == [
        "[0].x",
        "[0].y[0]",
        "[1].aux_data",
        "[1].other",
        "[1].one",
    ]
    point, both = graftax.from_dict(dict(reversed(flat.items())))
    assert point == zoo.Point(1, [2]) and (both.one, both.other) == (3, 4)
    renamed = {graftax.Path([*p[:-1], SequenceKey(0)]) if str(p) == "[0].x" else p: v for p, v in flat.items()}
    with pytest.raises(graftax.StructureError, match=r"obj\[0\] is a tuple node and needs the entries x, y"):
        graftax.from_dict(renamed)


def test_a_structure_met_again_has_a_flat_form_of_its_own():
    graph = {"x": f32(1), "tied": {"y": f32(2)}, "set": {"a"}, "n": 3}
    graph["again"] = graph["tied"]
    one, two = graftax.to_dict(graph), graftax.to_dict(graph)
    elements = next(path for path, value in one.items() if isinstance(value, list))
    one[elements].append("b")
    one.popitem()
    three = graftax.to_dict(graftax.map_leaves(lambda leaf: leaf + 1, graph))
    assert list(two) == list(three) and two[elements] == three[elements] == ["a"]
    x = graftax.Path([DictKey("x")])
    assert two[x] is graph["x"] and three[x] == 2
    assert oracle.difference(graph, graftax.from_dict(two)) is None
    assert graftax.to_dict({**graph, "n": 4})[graftax.Path([DictKey("n")])] == 4


def test_a_flat_form_keeps_nothing_alive():
    class Held:
        pass

    def flat_form():
        held = Held()
        graph = {"x": f32(1), "key": (held,)}
        for _ in range(3):
            graftax.to_dict(graph)
        return weakref.ref(held)

    held = flat_form()
    gc.collect()
    assert held() is None
