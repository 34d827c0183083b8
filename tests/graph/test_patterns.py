# SPDX-License-Identifier: Apache-2.0
"""Patterns of key paths mean the same in every option that takes them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

import graftax
from graftax import Path
from graftax._graph.patterns import Pattern, Root
from zoo import Box


class Color(enum.Enum):
    RED = 1


class Loud:
    """A key that cannot be printed."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


LOUD = Loud()


# ---- one meaning: (argument, pattern, the places that it covers, as they print)


def shared() -> Any:
    layer = Box(w=1.0)
    return {"layers": [Box(w=2.0), layer], "head": layer}


def cyclic() -> Any:
    top = Box(child=Box(w=1.0), b=2.0)
    top.child.parent = top
    return top


COVERED: dict[str, tuple[Any, str, list[str]]] = {
    "a key with a dot": ({"a.b": 1.0, "a": {"b": 2.0}}, "x['a.b']", ["x['a.b']"]),
    "a key with a dot, without quotes": ({"a.b": 1.0, "a": {"b": 2.0}}, "x[a.b]", ["x['a.b']"]),
    "keys with dots under a star": ({"a.b": {"w": 1.0, "c.d": 2.0}}, "x[*][*]", ["x['a.b']['c.d']", "x['a.b']['w']"]),
    "a key inside a key with a dot": (
        {"a.b": {"w": 1.0}, "b": {"w": 2.0}},
        "x[*][w]",
        ["x['a.b']['w']", "x['b']['w']"],
    ),
    "a star does not step": ({"a": {"w": 1.0}, "a.w": 2.0}, "x[a*]", ["x['a']['w']", "x['a.w']"]),
    "a key with brackets": ({"a[0]": 1.0, "a": [2.0]}, "x['a[0]']", ["x['a[0]']"]),
    "an item of a key": ({"a[0]": 1.0, "a": [2.0]}, "x[a][0]", ["x['a'][0]"]),
    "keys with brackets under a star": ({"a[0]": 1.0, "b": 2.0}, "x[*]", ["x['a[0]']", "x['b']"]),
    "a key with a quote": ({"it's": 1.0, "its": 2.0}, 'x["it\'s"]', ['x["it\'s"]']),
    "a key without its quote": ({"it's": 1.0, "its": 2.0}, "x[its]", ["x['its']"]),
    "a key with two kinds of quotes": ({"'\"": 1.0, "": 2.0}, "x['\\'\"']", ["x['\\'\"']"]),
    "a key that is a star": ({"*": 1.0, "a": 2.0}, "x['*']", ["x['*']"]),
    "a key that prints as two steps": ({"a']['b": 1.0, "a": {"b": 2.0}}, "x['a']['b']", ["x['a']['b']"]),
    "a key with a line break": ({"a\nb": 1.0, "c": 2.0}, "x[a*]", ["x['a\\nb']"]),
    "the number 1": ({1: 1.0, "1": 2.0}, "x[1]", ["x[1]"]),
    "the text 1": ({1: 1.0, "1": 2.0}, "x['1']", ["x['1']"]),
    "both, under a star": ({1: 1.0, "1": 2.0, "2": 3.0}, "x[1*]", ["x['1']", "x[1]"]),
    "an index": ([1.0, 2.0], "x[1]", ["x[1]"]),
    "None": ({None: 1.0, "None": 2.0}, "x[None]", ["x[None]"]),
    "the text None": ({None: 1.0, "None": 2.0}, "x['None']", ["x['None']"]),
    "True is not 1": ({True: 1.0, "a": 2.0}, "x[True]", ["x[True]"]),
    "a number that is not 1": ({1.0: 1.0, "1.0": 2.0}, "x[1.0]", ["x[1.0]"]),
    "a key that is a tuple": ({(1, "a"): 1.0, "a": 2.0}, "x[(1, 'a')]", ["x[(1, 'a')]"]),
    "a member of an enumeration": ({Color.RED: 1.0, "RED": 2.0}, "x[Color.RED]", ["x[<Color.RED: 1>]"]),
    "a member as messages print it": ({Color.RED: 1.0, "a": 2.0}, "x[<Color.RED: 1>]", ["x[<Color.RED: 1>]"]),
    "an attribute": (Box(w=1.0, inner={"w": 2.0}), "**.w", ["x.w"]),
    "a key of that name": (Box(w=1.0, inner={"w": 2.0}), "**[w]", ["x.inner['w']"]),
    "a key of that name in quotes": (Box(w=1.0, inner={"w": 2.0}), "**['w']", ["x.inner['w']"]),
    "an argument is no attribute": (Box(x=1.0, y=Box(x=2.0)), "*.y.x", ["x.y.x"]),
    "all below": ({"a": [1.0, {"b": 2.0}], "ab": 3.0}, "x[a]", ["x['a'][0]", "x['a'][1]['b']"]),
    "a part of a name": (Box(bias_1=1.0, bias=2.0, w=3.0), "x.bias*", ["x.bias", "x.bias_1"]),
    "the second way to an object": (shared(), "x[head].w", ["x['layers'][1].w"]),
    "the first way to it": (shared(), "x[layers][1]", ["x['layers'][1].w"]),
    "around a cycle": (cyclic(), "x.child.parent.b", ["x.b"]),
    "what it is in is not below": (cyclic(), "x.child", ["x.child.w"]),
}


def leaves(x: Any) -> dict[str, Any]:
    """The places of the floats of a graph, as they print below `x`, and what stands there."""
    flat = graftax.to_dict(x)
    return {"x" + jax.tree_util.keystr(tuple(path)): v for path, v in flat.items() if isinstance(v, (float, jax.Array))}


def with_arrays(x: Any) -> Any:
    return graftax.at(x)[tuple(path for path, _ in graftax.find(x, float))].apply(jnp.asarray)


@pytest.mark.parametrize("case", COVERED)
def test_donation_takes_what_a_pattern_covers(case: str):
    x, pattern, expected = COVERED[case]
    x = with_arrays(x)
    before = leaves(x)
    step = graftax.jit(lambda x: [leaf + 1 for leaf in leaves(x).values()], donate=pattern, mutation="discard")
    step(x)
    assert sorted(path for path, leaf in before.items() if leaf.is_deleted()) == expected


@pytest.mark.parametrize("case", COVERED)
def test_a_gradient_is_by_what_a_pattern_covers(case: str):
    x, pattern, expected = COVERED[case]
    x = with_arrays(x)
    grads = graftax.grad(lambda x: sum(leaves(x).values()), wrt=pattern)(x)
    assert sorted(leaves(grads)) == expected


@pytest.mark.parametrize("case", COVERED)
def test_numbers_are_traced_where_a_pattern_covers_them(case: str):
    x, pattern, expected = COVERED[case]
    x = graftax.copy(x)
    recorded: list[str] = []

    @graftax.jit(dynamic=pattern)
    def f(x: Any) -> None:
        recorded[:] = sorted(path for path, leaf in leaves(x).items() if isinstance(leaf, jax.core.Tracer))

    f(x)
    assert recorded == expected


def axis_of(x: Any, pattern: str, specify: Callable[[str], Any]) -> list[str]:
    """The places that vmap maps, where a pattern has an axis and the rest has none."""
    mapped: list[str] = []

    def f(x: Any) -> None:
        mapped[:] = sorted(path for path, leaf in leaves(x).items() if leaf.ndim == 0)

    x = graftax.at(x)[tuple(path for path, _ in graftax.find(x, float))].apply(lambda v: jnp.full((2, 2), v)[:, 0])
    graftax.vmap(f, in_axes=specify(pattern))(x)
    return mapped


@pytest.mark.parametrize("case", sorted(set(COVERED) - {"around a cycle", "what it is in is not below"}))
def test_axes_are_those_of_the_pattern_that_covers_a_place(case: str):
    x, pattern, expected = COVERED[case]
    if case in ("the second way to an object", "the first way to it"):
        with pytest.raises(graftax.StructureError, match="reached twice"):
            axis_of(x, pattern, lambda p: {p: 0, "**": None})
        return
    rest = {"**": None} if len(expected) < len(leaves(with_arrays(x))) else {}
    assert axis_of(x, pattern, lambda p: {p: 0, **rest}) == expected
    if pattern.startswith("x"):
        below = pattern.removeprefix("x").lstrip(".")
        assert axis_of(x, below, lambda p: ({p: 0, **rest},)) == expected


def test_specs_of_shards_take_the_same_patterns():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    x = {"a.b": {"w": jnp.ones(2)}, 1: jnp.ones(2), "1": jnp.ones(2)}
    specs = {"x['a.b']": PartitionSpec("d"), "x[1]": PartitionSpec(), "x['1']": PartitionSpec("d")}
    f = graftax.shard_map(
        lambda x: [x["a.b"]["w"] + x["1"], x[1]], mesh=mesh, in_specs=specs, out_specs=PartitionSpec("d")
    )
    assert f(x)[0].tolist() == [2, 2]
    with pytest.raises(ValueError, match=r"the pattern \"x\['a'\]\['b'\]\" of in_specs has no effect"):
        graftax.shard_map(
            lambda x: x, mesh=mesh, in_specs={"x['a']['b']": PartitionSpec(), "**": PartitionSpec()}, out_specs=None
        )(x)


def test_an_exported_function_traces_what_its_pattern_covers():
    x = {"a.b": 2.0, "a": {"b": 3}, 1: 4.0, "1": 5}
    run = graftax.jit(lambda x, y: y * x["a.b"] * x["a"]["b"] * x[1] * x["1"], dynamic=["x['a.b']", "x[1]"])
    restored = graftax.Exported.deserialize(graftax.export(run)(x, jnp.ones(())).serialize())
    assert restored({**x, "a.b": 1.0, 1: 1.0}, jnp.ones(())) == 15
    with pytest.raises(graftax.StructureError, match=r"x\['1'\]: expected 5, given 6"):
        restored({**x, "1": 6}, jnp.ones(()))


# ---- what a path begins with


def test_a_number_with_two_ways_to_it_is_traced_under_each_of_them():
    """In calls, ahead of time, exported and checked."""
    for pattern in ("a.rate", "b[0].rate"):

        def f(a: Any, b: Any, x: Any) -> Any:
            return x * b[0].rate

        run = graftax.jit(f, dynamic=pattern)
        for rate in (1.0, 2.0, 3.0):
            config = Box(rate=rate)
            assert run(config, [config], jnp.ones(())) == rate
        assert run.cache_info().traces == 1
        config = Box(rate=2.0)
        assert run.lower(config, [config], jnp.ones(())).compile()(config, [config], jnp.ones(())) == 2
        exported = graftax.export(run)(config, [config], jnp.ones(()))
        config.rate = 5.0
        assert exported(config, [config], jnp.ones(())) == 5
        assert graftax.jit(f, dynamic=pattern, check=True)(config, [config], jnp.ones(())) == 5
    pair = (1.0, 2.0)
    run = graftax.jit(lambda a, b: jnp.ones(()) * b[1], dynamic="b[1]")
    assert run(pair, pair) == 2 and run((1.0, 3.0), (1.0, 3.0)) == 3


def donated(pattern: str, f: Callable[..., Any], *args: Any, **kwargs: Any) -> list[bool]:
    held = jax.tree.leaves((args, kwargs))
    graftax.jit(f, donate=pattern)(*args, **kwargs)
    return [leaf.is_deleted() for leaf in held]


def test_a_pattern_begins_with_what_messages_call_an_argument():
    def f(x: Any, *rest: Any, **named: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf + 1, (x, rest, named))

    def given() -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ({"w": jnp.ones(2)}, {"w": jnp.ones(2)}, [jnp.ones(2)]), {"a.b": [jnp.ones(2)], "c": {"w": jnp.ones(2)}}

    expected = {
        "x[w]": [True, False, False, False, False],
        "rest[0][w]": [False, True, False, False, False],
        "rest[*]": [False, True, True, False, False],
        "rest[1][0]": [False, False, True, False, False],
        "['a.b'][0]": [False, False, False, True, False],
        "c[w]": [False, False, False, False, True],
        "**[w]": [True, True, False, False, True],
        "*[w]": [True, False, False, False, True],
        "**": [True] * 5,
    }
    for pattern, flags in expected.items():
        args, kwargs = given()
        assert donated(pattern, f, *args, **kwargs) == flags, pattern


def test_what_a_function_captures_is_called_closure_and_global():
    state, inner = {"w": jnp.ones(2), "v": jnp.ones(2)}, jnp.ones(2)

    def helper(x: Any) -> Any:
        return x + inner

    def f(x: Any, g: Any) -> Any:
        state["w"] = state["w"] + x
        return g(x) + state["v"]

    old = state["w"], state["v"], inner
    graftax.jit(f, donate=["closure state[w]", "g.__closure__[inner]"])(jnp.ones(2), helper)
    assert [leaf.is_deleted() for leaf in old] == [True, False, True]


def test_one_pattern_gives_the_gradients_of_all_arguments_in_which_it_means_something():
    model = Box(w=jnp.ones(2))
    grads = graftax.grad(lambda a, b: (a.w * b.w).sum(), wrt="**.w")(model, model)
    assert len(grads) == 2 and grads[0] is grads[1] and grads[0].w.tolist() == [2, 2]


# ---- the automaton


def test_a_pattern_covers_a_path_and_what_is_below():
    path = (Root("state"), DictKey("a.b"), SequenceKey(0), GetAttrKey("w"))
    for text in ("state", "state[*]", "state['a.b'][0]", "**.w", "**[0]", "*", "**", "state.**.w", "st*[a*]"):
        assert Pattern(text).covers(path), text
    for text in (
        "w",
        ".w",
        "state.w",
        "state[a]",
        "state[a.b].w",
        "stat",
        "**.w.**.w",
        "[state]",
        "**.state",
        "**[a][b]",
    ):
        assert not Pattern(text).covers(path), text
    assert not Pattern("state").covers(()) and Pattern("**").covers(())


def test_a_pattern_of_many_stars_takes_no_more_than_its_length_times_the_path():
    pattern, path = Pattern("**" + ".a.**" * 60 + ".b"), [GetAttrKey("a")] * 2000
    assert not pattern.covers(path) and pattern.covers([*path, GetAttrKey("b"), GetAttrKey("c")])


def test_a_shared_object_with_many_ways_to_it_is_looked_at_once():
    x: Any = [Box(w=jnp.ones(()))]
    for _ in range(60):
        x = [x, x]
    grads = graftax.grad(lambda x: x[0][0][1][0].__len__() * leaf_of(x), wrt="**[0].w")(x)
    assert leaf_of(grads) == 2


def leaf_of(x: Any) -> Any:
    while isinstance(x, list):
        x = x[0]
    return x.w


def test_a_key_that_cannot_be_printed_is_covered_by_a_star():
    path = (Root("x"), DictKey(LOUD), GetAttrKey("w"))
    assert Pattern("x[*].w").covers(path) and Pattern("x").covers(path) and not Pattern("x[L*].w").covers(path)


# ---- what is wrong is said

WRONG = ["state..w", "state[w", "**w", "state[0]w", "", "state['\\x']", "state.a**"]


@pytest.mark.parametrize("pattern", WRONG)
def test_what_is_no_pattern_is_refused_with_the_option(pattern: str):
    def f(state: Any) -> Any:
        return state

    state = {"w": jnp.ones(())}
    users: dict[str, Callable[[], Any]] = {
        "f, donate=": lambda: graftax.jit(f, donate=pattern),
        "f, dynamic=": lambda: graftax.jit(f, dynamic=pattern),
        "grad of f, wrt=": lambda: graftax.grad(f, wrt=pattern)(state),
        "vmap of f, in_axes": lambda: graftax.vmap(f, in_axes={pattern: 0})(state),
    }
    for where, call in users.items():
        with pytest.raises(ValueError, match="is not a pattern") as caught:
            call()
        assert str(caught.value).startswith(f"{where}: {pattern!r} is not a pattern: "), where
        assert "Write layers[*].w" in str(caught.value)


def test_a_specification_of_all_arguments_has_patterns_as_keys():
    with pytest.raises(TypeError, match=r"in_axes as a whole has patterns .* and 0 is not one\. .*give a tuple"):
        graftax.vmap(lambda x: x, in_axes={0: 0})(jnp.ones(2))


@pytest.mark.parametrize("option", ["donate", "dynamic"])
def test_a_pattern_that_means_nothing_is_an_error_that_names_what_is_near(option: str):
    def f(state: Any) -> Any:
        return state["w"]

    state = {"w": jnp.ones(()), "moments": [jnp.ones(())], "rate": 0.1}
    for pattern in ("**[momnets]", "state.moments", "state[moments][1]", "closure moments"):
        with pytest.raises(ValueError) as caught:
            graftax.jit(f, **{option: pattern})(state)
        text = str(caught.value)
        assert text.startswith(
            f"f: the pattern {pattern!r} of {option}= matches nothing that is there. Available: state['"
        )
        near = {"donate": "state['moments'][0]", "dynamic": "state['rate']"}
        assert [o for o, path in near.items() if path in text] == [option] and text.endswith(
            ".w is an attribute, [w] a key."
        )
    for pattern in ("**[momnets]", "**.w"):
        with pytest.raises(graftax.StructureError, match="matches nothing that is there"):
            graftax.jit(f, **{option: pattern}, check=True)(state)
        with pytest.raises(ValueError, match="matches nothing that is there"):
            graftax.jit(f, **{option: pattern}).lower(state)
        with pytest.raises(ValueError, match="matches nothing that is there"):
            graftax.jit(f, **{option: pattern}).eval_shape(state)


@pytest.mark.parametrize("option", ["donate", "dynamic"])
def test_a_pattern_may_mean_what_holds_nothing_for_it_or_nothing_yet(option: str):
    def f(state: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf + 1, state["w"])

    state = {"w": jnp.ones(()), "name": "s", "cache": [], "opt": None, "by": {}, "rate": 1}
    for pattern in ("state[name]", "state[rate]", "state[w]", "state[cache][*].k", "state[opt].m", "state[by][x].**.w"):
        assert graftax.jit(f, **{option: pattern})({**state, "w": jnp.ones(())}) == 2
    with pytest.raises(ValueError, match="matches nothing that is there"):
        graftax.jit(f, **{option: "state[name].x"})(state)


def test_a_pattern_of_a_gradient_that_means_nothing_names_what_is_near():
    model = {f"layer{i}": {"w": jnp.ones(()), "b": jnp.ones(())} for i in range(20)}
    with pytest.raises(ValueError) as caught:
        graftax.grad(lambda m: 1.0, wrt="m[layer17][v]")(model)
    assert "Available: m['layer17']['" in str(caught.value) and " more. .w is an attribute" in str(caught.value)
    with pytest.raises(ValueError, match="Available: no array"):
        graftax.grad(lambda m: 1.0, wrt="m[a]")({"b": 1})


def test_a_pattern_of_everything_means_nothing_in_particular():
    assert graftax.jit(lambda: 1, donate="**", dynamic=("**", "**.**"))() == 1


def test_a_path_with_an_escape_that_is_none_is_no_path():
    with pytest.raises(ValueError, match="is not a path"):
        Path.parse("['\\x']")
