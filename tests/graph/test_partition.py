# SPDX-License-Identifier: Apache-2.0
"""partition, combine, update and copy: over the zoo, and by each kind of spec."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import graftax
import oracle
import zoo
from graftax._graph.path import Graph
from zoo import Affine, Box, Frozen, Registered, f32

pytestmark = pytest.mark.quick(8)  # a case takes milliseconds


def mutable_ids(x: Any) -> set[int]:
    """The identities of all mutable nodes, but those without content that count by identity."""
    rows = [row.value for row in Graph(x).rows if row.category == "node"]
    return {id(value) for value in rows if oracle.is_mutable(value) and oracle.children(value)}


SPECS: list[tuple[str, Any]] = [
    ("function", eqx.is_array),
    ("type", jax.Array),
    ("types", (jax.Array, np.ndarray)),
    ("union", jax.Array | int),
    ("nothing", lambda leaf: False),
    ("everything", lambda leaf: True),
    ("one_bool", True),
    ("pattern", "**"),
]


@pytest.mark.parametrize("spec", [spec for _, spec in SPECS], ids=[name for name, _ in SPECS])
@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_combine_undoes_partition(build: Any, spec: Any):
    x = build()
    twin = graftax.copy(x)
    selected, rest = graftax.partition(x, spec)
    assert graftax.diff(graftax.combine(selected, rest), x) == []
    assert graftax.diff(graftax.combine(rest, selected), x) == []
    assert graftax.diff(x, twin) == [], "the original is untouched"


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_the_parts_have_no_mutable_node_in_common_with_anything(build: Any):
    x = build()
    selected, rest = graftax.partition(x, jax.Array)
    whole = graftax.combine(selected, rest)
    ids = [mutable_ids(part) for part in (x, selected, rest, whole)]
    assert sum(map(len, ids)) == len(set().union(*ids))


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_each_leaf_is_in_one_part(build: Any):
    selected, rest = graftax.partition(build(), jax.Array)
    for part, wanted in ((selected, True), (rest, False)):
        for row in Graph(part).rows:
            if row.is_leaf and not row.aux and row.value is not None:
                assert isinstance(row.value, jax.Array) == wanted


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_update_with_itself_changes_nothing_and_with_a_part_writes_that_part(build: Any):
    x = build()
    twin = graftax.copy(x)
    assert graftax.update(x, x) is x
    ids = mutable_ids(x)
    graftax.update(x, twin)
    assert graftax.diff(x, twin) == [] and mutable_ids(x) == ids


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_an_update_of_every_array_keeps_nodes_and_what_refers_to_them(build: Any):
    x = build()
    other = graftax.map_leaves(lambda leaf: leaf.copy(), x)
    shared = [s.paths for s in graftax.shared(x) if not isinstance(s.value, jax.Array)]
    ids = mutable_ids(x)
    if ids:
        try:
            graftax.update(x, other)
        except TypeError as error:
            assert "cannot be written to" in str(error)
        assert mutable_ids(x) == ids and graftax.equal(x, other)
        assert [s.paths for s in graftax.shared(x) if not isinstance(s.value, jax.Array)] == shared


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_a_copy_is_equal_and_shares_no_mutable_node(build: Any):
    x = build()
    for arrays in (False, True):
        twin = graftax.copy(x, arrays=arrays)
        assert graftax.diff(twin, x) == []
        assert not mutable_ids(twin) & mutable_ids(x)
        if arrays:
            mine, its = ({id(r.value) for r in Graph(g).rows if isinstance(r.value, jax.Array)} for g in (x, twin))
            assert not mine & its


def test_a_copy_with_arrays_survives_the_donation_of_the_original_and_keeps_tied_arrays():
    w = f32(1, 2)
    model = {"a": w, "b": [w], "n": np.arange(2.0), "key": jax.random.key(1), "weak": jnp.asarray(1.0)}
    twin = graftax.copy(model, arrays=True)
    assert twin["a"] is twin["b"][0] and twin["n"] is not model["n"]
    assert twin["weak"].weak_type
    model["n"][0] = 7
    w.delete()
    assert twin["a"][1] == 2 and twin["n"][0] == 0


def test_donation_of_a_copy_leaves_the_original():
    model = Box(w=f32(1, 2))
    step = jax.jit(lambda w: w + 1, donate_argnums=0)
    step(graftax.copy(model, arrays=True).w)
    assert model.w[0] == 1


# ---- specs


def sample() -> Any:
    layer = Box(w=f32(1), b=None, name="tied")
    return {"layers": [layer, Box(w=f32(2), b=f32(3), name="own")], "head": layer, "sizes": (1, 2)}


def test_a_pattern_selects_all_below_it_through_any_way_to_a_shared_object():
    for pattern in ("layers[0].w", "head.w", "*.w", "layers[0].*"):
        selected, rest = graftax.partition(sample(), pattern)
        assert selected["head"] is selected["layers"][0] and rest["head"] is rest["layers"][0]
        assert selected["head"].w is not None and rest["head"].w is None
        assert selected["layers"][1].w is None
    whole, none = graftax.partition(sample(), "head")
    assert whole["head"].name == "tied" and none["head"].name is None and whole["sizes"] == (None, None)


def test_several_patterns_and_paths():
    selected, _ = graftax.partition(sample(), ["**.b", graftax.Path.parse("sizes[1]")])
    assert selected["layers"][1].b is not None and selected["sizes"] == (None, 2) and selected["head"].w is None


def test_a_tree_of_bools_may_be_a_prefix_and_has_none_where_the_graph_has():
    x = {"a": [f32(1), None], "b": (), "c": {"d": f32(2), "e": []}, "f": None}
    spec = {"a": [True, None], "b": (), "c": {"d": False, "e": []}, "f": None}
    selected, rest = graftax.partition(x, spec)
    assert selected["a"][0] is x["a"][0] and rest["c"]["d"] is x["c"]["d"] and rest["a"] == [None, None]
    selected, _ = graftax.partition(x, {"a": np.True_, "b": False, "c": False, "f": True})
    assert selected["a"][0] is x["a"][0] and selected["c"]["d"] is None


def test_the_tree_of_bools_that_equinox_users_write():
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    spec = jax.tree.map(lambda _: False, model)
    spec = eqx.tree_at(lambda m: m.layers[-1].weight, spec, True)
    ours, theirs = graftax.partition(model, spec), eqx.partition(model, spec)
    for mine, its in zip(ours, theirs, strict=True):
        assert eqx.tree_equal(mine, its)
    assert eqx.tree_equal(graftax.combine(*ours), eqx.combine(*theirs))


@pytest.mark.parametrize("spec", [eqx.is_array, eqx.is_inexact_array])
def test_a_function_selects_what_equinox_selects(spec: Any):
    model = eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(0))
    for mine, its in zip(graftax.partition(model, spec), eqx.partition(model, spec), strict=True):
        assert eqx.tree_equal(mine, its)


def test_another_value_for_what_is_left_out():
    selected, rest = graftax.partition([1, f32(2)], jax.Array, replace="out")
    assert selected[0] == "out" and rest == [1, "out"]


def test_static_fields_and_aux_data_are_in_both_parts():
    for part in graftax.partition([Affine(f32(1), 2, name="mine"), Registered(f32(1), 2, name="its")], int):
        assert part[0].name == "mine" and part[1].name == "its"


def test_closures_bound_methods_partials_and_weak_references():
    class Owner:
        def __init__(self) -> None:
            self.w = f32(1)

        def call(self, x: Any) -> Any:
            return self.w * x

    owner = Owner()
    scale = f32(3)
    x = {
        "owner": owner,
        "method": owner.call,
        "partial": functools.partial(owner.call, x=scale),
        "ref": weakref.ref(owner),
        "closure": lambda y: y * scale,
    }
    selected, rest = graftax.partition(x, jax.Array)
    assert selected["method"].__self__ is selected["owner"] and selected["ref"]() is selected["owner"]
    assert rest["owner"].w is None and rest["closure"].__closure__[0].cell_contents is None
    restored = graftax.combine(selected, rest)
    assert restored["method"](2)[0] == 2 and restored["partial"]()[0] == 3 and restored["closure"](2)[0] == 6
    assert restored["method"].__self__ is restored["owner"] is restored["ref"]() is not owner


def test_values_that_cannot_be_copied_are_kept():
    generator = (i for i in range(3))
    with open(__file__, encoding="utf-8") as file:
        x = [generator, file, f32(1), types]
        selected, rest = graftax.partition(x, jax.Array)
        assert rest[0] is generator and rest[1] is file and selected[0] is None
        assert graftax.combine(selected, rest)[1] is file
        assert graftax.at(x)["[2]"].set(None)[0] is generator
        with pytest.raises(graftax.UnsupportedValueError, match=r"obj\[0\]: generator: it hides state"):
            graftax.copy(x)


# ---- combine and update


def test_combine_takes_the_first_that_is_not_none():
    assert graftax.combine([None, 1, None], [2, 3, None], [4, 5, 6]) == [2, 1, 6]
    x = [1, [2]]
    alone = graftax.combine(x)
    assert alone == x and alone[1] is not x[1]
    with pytest.raises(TypeError, match="at least one graph"):
        graftax.combine()


def test_a_node_in_the_place_of_none_is_a_copy_and_keeps_its_sharing():
    layer = Box(w=f32(1))
    layer.me = layer
    restored = graftax.combine({"a": None, "b": None}, {"a": layer, "b": layer})
    assert (
        restored["a"] is restored["b"] is restored["a"].me and restored["a"] is not layer and restored["a"].w is layer.w
    )


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ([1], [1, 2], r"at obj: a list\(\[0\]\) in the first, a list\(\[0\], \[1\]\) in another"),
        ({"a": 1}, {"b": 1}, r"at obj: a dict\(\[a\]\) in the first, a dict\(\[b\]\) in another"),
        ([[1]], [(1,)], r"at obj\[0\]: a list\(\[0\]\) in the first, a tuple\(\[0\]\) in another"),
        ([[1]], [1], r"at obj\[0\]: a list\(\[0\]\) in the first, an int in another"),
        ([{1}], [{2}], r"at obj\[0\]: set \{1\} in the first, set \{2\} in another"),
        (Affine(1, 2, name="a"), Affine(1, 2, name="b"), r"at obj.name: 'a' in the first, 'b' in another"),
        (Registered(1, 2, name="a"), Registered(1, 2, name="b"), r"at obj.aux_data: 'a' in the first, 'b' in another"),
    ],
)
def test_what_has_another_structure_is_refused_at_its_path(one: Any, other: Any, message: str):
    for function in (graftax.combine, graftax.update):
        with pytest.raises(graftax.StructureError, match=f"^{function.__name__}: .*{message}"):
            function(one, other)


def test_other_sharing_is_another_structure():
    x: list[Any] = [1]
    for one, other in ([[x, x], [[1], [1]]], [[[1], [1]], [x, x]]):
        with pytest.raises(graftax.StructureError, match=r"at obj\[1\]: .* once more"):
            graftax.combine(one, other)


def test_update_writes_in_place_and_keeps_what_the_source_has_none_for():
    x = sample()
    layers = list(x["layers"])
    params, _ = graftax.partition(x, "**.w")
    params["head"].w = f32(10)
    graftax.update(x, params)
    assert x["head"].w[0] == 10 and x["layers"][0] is layers[0] is x["head"] and layers[0].name == "tied"


def test_update_takes_values_as_they_are():
    """A value is the source's own, though an equal one stands there; what is another structure is an error."""
    text, number = "".join(["te", "xt"]), float("2.5")
    x = {"t": "text", "n": 2.5, "f": max, "a": f32(1), "g": jax.nn.relu, "np": np.ones(2)}
    source = {"t": text, "n": number, "f": min, "a": np.float32(3), "g": jax.nn.gelu, "np": f32(2)}
    graftax.update(x, source)
    assert all(x[key] is source[key] for key in source)
    graftax.update(x, dict.fromkeys(source))
    assert all(x[key] is source[key] for key in source)
    with pytest.raises(graftax.StructureError, match=r"\['t'\]|\[t\]"):
        graftax.update(x, {**source, "t": [1]})
    assert all(x[key] is source[key] for key in source)


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_update_gives_what_writing_each_leaf_gives(build: Any):
    def changed() -> Any:
        graph = Graph(build())
        more = {n: v + 1 if type(v) in (int, float) else v for n, v in zip(*graph.core.values(), strict=True)}
        return graph.core.build(more, all=True)

    x, y = build(), build()
    graph, source = Graph(x), Graph(changed())
    values = zip(*graph.core.values(), source.core.values()[1], strict=True)
    changes = {number: new for number, old, new in values if new is not None and new is not old}
    if graph.core.write(changes):
        assert graftax.diff(graftax.update(y, changed()), x) == []


def test_update_of_a_source_that_raises_when_it_is_walked():
    class Raises:
        def __init__(self, value: Any) -> None:
            self.value = value

    def flatten(node: Raises) -> Any:
        if node.value == "raise":
            raise ArithmeticError("not now")
        return (node.value,), None

    graftax.register(Raises, flatten=flatten, unflatten=lambda _, children: Raises(*children))
    x = [Raises(1), [2]]
    with pytest.raises(ArithmeticError, match="not now"):
        graftax.update(x, [Raises("raise"), [3]])
    assert x[0].value == 1 and x[1] == [2]


def test_update_makes_immutable_objects_anew_in_what_holds_them():
    x = {"t": (1, Frozen(2, [3])), "kept": [4]}
    inner, kept = x["t"][1].a, x["kept"]
    graftax.update(x, {"t": (10, Frozen(20, [30])), "kept": [40]})
    assert inner == 2 and x["t"] == (10, Frozen(20, [30])) and x["kept"] is kept and kept == [40]


def test_an_update_that_fails_writes_nothing():
    class Key:
        broken = False

        def __hash__(self) -> int:
            if Key.broken:
                raise ArithmeticError("no hash now")
            return 1

    key = Key()
    x = {"first": [1], "second": {key: 2, "k": 3}, "last": [4]}
    source = {"first": [10], "second": {key: 20, "k": 30}, "last": [40]}
    graph, other = Graph(x), Graph(source)
    changes = {p: other.rows[p].value for p, row in enumerate(graph.rows) if row.is_leaf}
    Key.broken = True
    with pytest.raises(ArithmeticError):
        graph.write(changes)
    Key.broken = False
    assert x["first"] == [1] and x["last"] == [4] and list(x["second"].values()) == [2, 3]


def test_an_unflatten_that_fails_leaves_everything_as_it_was():
    @jax.tree_util.register_pytree_node_class
    class Checked:
        def __init__(self, value: Any) -> None:
            self.value = value

        def tree_flatten(self) -> Any:
            return (self.value,), None

        @classmethod
        def tree_unflatten(cls, aux: Any, children: Any) -> Any:
            if children[0] == "bad":
                raise ValueError("never bad")
            return cls(*children)

    x = [[1], Checked(2), [3]]
    with pytest.raises(ValueError, match="never bad"):
        graftax.update(x, [[10], Checked("bad"), [30]])
    assert x[0] == [1] and x[1].value == 2 and x[2] == [3]
    graftax.update(x, [[10], Checked(20), [30]])
    assert x[0] == [10] and x[1].value == 20


def test_an_immutable_root_cannot_be_updated():
    with pytest.raises(TypeError, match=r"obj\[0\] cannot be written to.*(?s:.)*graftax.at\(obj\)\[path\].set"):
        graftax.update((1, 2), (3, 2))
    with pytest.raises(TypeError, match=r"obj\[0\], obj\[1\], obj\[2\], obj\[3\] and 5 more cannot"):
        graftax.update(tuple(range(9)), tuple(range(1, 10)))


def test_an_error_in_a_predicate_names_the_place():
    def broken(leaf: Any) -> bool:
        return leaf > 1

    with pytest.raises(TypeError) as info:
        graftax.partition({"a": 2, "b": "text"}, broken)
    assert any("obj[b]" in note for note in info.value.__notes__)
    with pytest.raises(ValueError, match="truth value") as ambiguous:
        graftax.partition([f32(1, 2)], lambda leaf: leaf > 1)
    assert any("obj[0]" in note for note in ambiguous.value.__notes__)


def test_a_type_of_objects_selects_all_that_is_below_them():
    layer = Box(w=f32(1), n="layer")
    model = {"a": layer, "b": [layer, Box(w=f32(2))], "c": f32(3)}
    boxes, rest = graftax.partition(model, Box)
    assert boxes["a"] is boxes["b"][0] and boxes["a"].w is layer.w and boxes["a"].n == "layer" and boxes["c"] is None
    assert rest["a"].w is None and rest["a"].n is None and rest["c"] is model["c"]
    assert graftax.equal(graftax.combine(boxes, rest), model)


class Norm(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.norm = nnx.Linear(2, 2, rngs=rngs), nnx.BatchNorm(2, rngs=rngs)
        self.tied = self.linear


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (jax.Array, ["kernel", "mean", "scale"]),
        (nnx.Param, ["kernel", "scale"]),
        ("**.mean", ["mean"]),
        (lambda leaf: isinstance(leaf, jax.Array) and leaf.ndim == 2, ["kernel"]),
        (jax.tree.map(lambda leaf: leaf.ndim == 2, Norm(nnx.Rngs(0))), ["kernel"]),
    ],
    ids=["type of leaves", "type of objects", "pattern", "function", "bools"],
)
def test_arrays_of_nnx_modules_are_leaves_and_the_rest_is_structure(spec: Any, expected: list[str]):
    def held(net: Any) -> list[str]:
        variables = {"kernel": net.linear.kernel, "mean": net.norm.mean, "scale": net.norm.scale}
        return [name for name, variable in variables.items() if variable.get_raw_value() is not None]

    net = Norm(nnx.Rngs(0))
    selected, rest = graftax.partition(net, spec)
    assert held(selected) == expected and {*held(rest)} == {"kernel", "mean", "scale"} - {*expected}
    assert selected.tied is selected.linear and selected.norm.momentum == rest.norm.momentum == 0.99
    for parts in ((selected, rest), (rest, selected)):
        assert graftax.equal(graftax.combine(*parts), net)
    other = Norm(nnx.Rngs(1))
    assert graftax.equal(graftax.update(other, net), net) and other.tied is other.linear
    other.norm.momentum = 0.5
    with pytest.raises(graftax.StructureError, match=r"norm\.momentum: 0\.99 in the first, 0\.5 in another"):
        graftax.update(net, other)


def test_a_tree_from_jax_that_lost_its_sharing_is_refused_with_the_way_out():
    layer = {"w": f32(1)}
    model = {"a": layer, "b": layer}
    with pytest.raises(graftax.StructureError, match=r"the dict of obj\[a\] once more in the first.*graftax.flatten"):
        graftax.update(model, jax.tree.map(lambda x: x * 2, model))
    leaves, graphdef = graftax.flatten(model)
    graftax.update(model, graftax.unflatten(graphdef, [x * 2 for x in leaves]))
    assert layer["w"] == 2


def test_annotations_stand_for_their_classes():
    graph = {"a": f32(1), "b": 1, "c": "text", "d": [2.0]}
    for union in (typing.Optional[int], typing.Union[int, None], int | None):  # noqa: UP007, UP045 - all ways to write it
        assert graftax.partition(graph, union)[0] == {"a": None, "b": 1, "c": None, "d": [None]}
        assert [str(path) for path, _ in graftax.find(graph, union)] == ["[b]"]
    arrays, rest = graftax.partition(graph, jax.typing.ArrayLike)
    assert arrays["a"] is graph["a"] and rest == {"a": None, "b": None, "c": "text", "d": [None]}
    for function in (graftax.partition, graftax.find):  # `list[int]` can be called, and makes a list of anything
        with pytest.raises(TypeError, match=r"isinstance does not accept list\[int\]: give the class, list"):
            function(graph, list[int])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (3, r"3 at obj does not say whether a leaf is selected"),
        ({"a": True}, r"nothing for obj\[b\]: give True or False"),
        ({"a": True, "b": True, "c": True}, r"entry for obj\[c\], and there is no such place"),
        ({"a": True, "b": {"x": "yes"}}, r"'yes' at obj\[b\]\[x\] does not say"),
        ({"a": [True], "b": True}, r"\[True\] at obj\[a\] does not say"),
        ("**.w", r"nothing in this dict matches '\*\*.w'. It has \[a\], \[b\], \[b\]\[x\]"),
        ("b.z", r"the dict at .* has no .z"),
    ],
)
def test_a_spec_that_does_not_fit_is_refused_with_the_place(spec: Any, message: str):
    with pytest.raises(graftax.StructureError, match=message):
        graftax.partition({"a": 1, "b": {"x": 2}}, spec)


def test_frozen_dataclasses_are_made_anew_without_their_init():
    @dataclasses.dataclass(frozen=True)
    class Positive:
        value: Any

        def __post_init__(self) -> None:
            assert self.value > 0

    selected, rest = graftax.partition([Positive(3)], str)
    assert selected[0].value is None and graftax.combine(selected, rest) == [Positive(3)]


def test_a_message_shows_a_value_that_has_no_repr():
    class Mute:
        def __repr__(self):
            raise RuntimeError("no repr")

    with pytest.raises(graftax.StructureError, match=r"obj\[a\] does not say"):
        graftax.partition({"a": {"b": 1}}, {"a": Mute()})


def forgotten(ref: Any) -> None:
    """A callback of weak references."""


def holding(value: Any) -> Any:
    return lambda ref: value


class Watched:
    def __init__(self, w: Any) -> None:
        self.w = w

    def forget(self, ref: Any) -> None:
        self.w = None


CALLBACKS: list[Any] = [
    forgotten,
    lambda ref: None,
    holding([1]),
    holding(f32(2)),
    functools.partial(forgotten),
    print,
    Watched(f32(3)).forget,
]


@pytest.mark.parametrize("callback", CALLBACKS)
@pytest.mark.parametrize("spec", [jax.Array, str, lambda leaf: True, lambda leaf: False])
def test_a_weak_reference_with_a_callback_is_put_together_again(callback: Any, spec: Any):
    watched = Watched(f32(1))
    graph = {"watched": watched, "ref": weakref.ref(watched, callback), "name": "a"}
    selected, rest = graftax.partition(graph, spec)
    restored = graftax.combine(selected, rest)
    assert oracle.difference(graph, restored) is None
    assert restored["ref"]() is restored["watched"] and type(restored["ref"].__callback__) is type(callback)
    assert oracle.difference(graph, graftax.combine(rest, selected)) is None
    graftax.update(graph, restored)
    assert graph["watched"].w is restored["watched"].w


class _Later:
    """Without attributes: they come later."""


@pytest.mark.parametrize("hold", [lambda x: x, lambda x: {"cache": x}, lambda x: [x, x]], ids=["root", "dict", "twice"])
def test_a_copy_has_an_empty_instance_of_its_own(hold: Any):
    objects = [hold(_Later())]
    twin = graftax.copy(objects)
    one, other = ([*o.values()] if isinstance(o, dict) else o if isinstance(o, list) else [o] for o in objects + twin)
    assert type(other[0]) is _Later
    assert other[0] is not one[0]
    assert all(o is other[0] for o in other)


_NAMED = _Later()


def test_a_copy_keeps_a_sentinel_that_a_module_names():
    assert graftax.copy([_NAMED])[0] is _NAMED
