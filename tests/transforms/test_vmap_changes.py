# SPDX-License-Identifier: Apache-2.0
"""What a mapped function changes comes back with an axis, or the call says why it cannot; misfits are named."""

from __future__ import annotations

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from zoo import Affine, Box, Data, Frozen, Registered, RegisteredData, Slotted, Table

XS = jnp.arange(6.0).reshape(3, 2)


def says(*parts: str) -> str:
    """A pattern of a message with these parts, in this order."""
    return ".*".join(map(re.escape, parts))


# ---- changes of mapped objects


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_an_array_keeps_its_axis_when_it_is_replaced(axis: int) -> None:
    model = {"w": jnp.moveaxis(XS, 0, axis), "n": 0}

    def double(model: Any) -> None:
        model["w"], model["n"] = model["w"] * 2, model["n"] + 1

    assert graftax.vmap(double, in_axes=axis)(model) is None
    np.testing.assert_allclose(model["w"], jnp.moveaxis(XS, 0, axis) * 2)
    assert model["n"] == 1


BOXES: dict[str, Any] = {
    "dict": lambda w: {"w": w},
    "object": lambda w: Box(w=w),
    "slots": lambda w: Slotted(a=w, b=None),
    "dataclass": lambda w: Data(w),
    "registered": lambda w: Registered(w, None),
    "registered dataclass": lambda w: RegisteredData(w, None),
    "module in a list": lambda w: [Affine(w, None)],
    "frozen in a list": lambda w: [Frozen(w)],
}


def replace(box: Any, value: Any) -> None:
    if isinstance(box, dict):
        box["w"], box["new"] = value, (value * 2, "static")
    elif isinstance(box, list):
        box[0] = type(box[0])(value, (value * 2, "static"))
    else:
        first, second = {Slotted: ("a", "b"), Registered: ("a", "b"), Data: ("a", "b"), Box: ("w", "new")}.get(
            type(box), ("weight", "bias")
        )
        setattr(box, first, value)
        setattr(box, second, (value * 2, "static"))


@pytest.mark.parametrize("make", BOXES.values(), ids=BOXES)
@pytest.mark.parametrize("axis", [0, 1])
def test_new_arrays_in_a_mapped_object_have_its_axis(make: Any, axis: int) -> None:
    box, plain = make(jnp.moveaxis(XS, 0, axis)), make(XS)
    graftax.vmap(lambda box, x: replace(box, x * 3), in_axes=(axis, 0))(box, XS)
    replace(plain, XS * 3)
    for one, other in zip(graftax.flatten(box)[0], graftax.flatten(plain)[0], strict=True):
        np.testing.assert_allclose(one, jnp.moveaxis(other, 0, axis))


def test_an_empty_list_in_a_mapped_argument_is_mapped() -> None:
    model = {"w": XS, "log": []}
    for in_axes in (0, ({"w": 0, "log": 0}, 0), ({"w": 0}, 0), {"model[w]": 0, "**": 0}, {"**": 0}, eqx.if_array(0)):
        model["log"] = []
        graftax.vmap(lambda model, x: model["log"].append(x), in_axes=in_axes)(model, XS)
        np.testing.assert_allclose(model["log"][0], XS)


def test_a_new_value_without_room_for_the_axis_is_refused() -> None:
    model = {"w": XS}

    def add_up(model: Any) -> None:
        model["w"] = model["w"].sum()

    with pytest.raises(ValueError, match=says("add_up", "in_axes", "model['w']", "at 1", "is ()")):
        graftax.vmap(add_up, in_axes=1)(model)
    assert model["w"] is XS
    graftax.vmap(add_up, in_axes=-1)(model)
    np.testing.assert_allclose(model["w"], XS.sum(0))


def test_a_variable_of_an_enclosing_function_is_changed() -> None:
    n, last = jnp.zeros(()), None

    def count(x: Any) -> Any:
        nonlocal n
        n = n + 1
        return x

    def remember(x: Any) -> Any:
        nonlocal last
        last = x
        return x

    graftax.vmap(count)(XS)
    assert float(n) == 1
    with pytest.raises(graftax.MutationError, match=says("remember changes closure last to")):
        graftax.vmap(remember)(XS)
    assert last is None


def test_a_value_that_does_not_depend_on_the_axis_is_repeated_in_a_mapped_object() -> None:
    model = {"w": XS}

    def reset(model: Any) -> None:
        model["w"] = jnp.ones(2)

    graftax.vmap(reset)(model)
    np.testing.assert_array_equal(model["w"], jnp.ones((3, 2)))


def test_where_arrays_of_an_object_have_two_axes_a_new_one_is_refused_unless_it_is_said_which() -> None:
    def log(model: Any, x: Any) -> None:
        model["log"].append(x)

    def fresh() -> Any:
        return {"a": XS, "b": XS.T, "log": []}

    model = fresh()
    with pytest.raises(graftax.StructureError, match=says("log", "model['log'][0]", "in_axes", "0 and 1")):
        graftax.vmap(log, in_axes=({"a": 0, "b": 1}, 0))(model, XS)
    assert model["log"] == []
    model = fresh()
    graftax.vmap(log, in_axes=({"a": 0, "b": 1, "log": 1}, 0))(model, XS)
    np.testing.assert_allclose(model["log"][0], XS.T)
    model = fresh()
    graftax.vmap(log, in_axes=({"a": 0, "**": 1}, 0))(model, XS)
    np.testing.assert_allclose(model["log"][0], XS.T)


def test_what_is_left_alone_is_the_callers_own_array() -> None:
    buffer, weights, table = np.ones((3, 2)), jnp.ones((3, 2)), np.ones(2)
    model = {"buffer": buffer, "weights": weights, "n": 0}
    shared = {"table": table, "n": 0}

    def count(model: Any, shared: Any, x: Any) -> Any:
        model["n"], shared["n"] = 1, 2
        return model["buffer"], x

    out = graftax.vmap(count, in_axes=(0, None, 0))(model, shared, XS)
    assert (model["n"], shared["n"]) == (1, 2)
    assert model["buffer"] is buffer
    assert model["weights"] is weights
    assert shared["table"] is table
    np.testing.assert_array_equal(out[0], buffer)


def test_a_numpy_array_is_not_changed_in_place_behind_the_callers_back() -> None:
    shared = {"table": np.zeros(2)}

    def add(shared: Any, x: Any) -> Any:
        shared["table"] += 1
        return x + shared["table"]

    out = graftax.vmap(add, in_axes=(None, 0))(shared, XS)
    np.testing.assert_allclose(out, XS + 1)
    np.testing.assert_allclose(shared["table"], jnp.ones(2))


# ---- changes of objects that are not mapped


def test_what_does_not_depend_on_the_axis_comes_back() -> None:
    counter = {"n": 0, "steps": jnp.zeros(()), "names": []}

    def count(x: Any) -> Any:
        counter["n"] += 1
        counter["steps"] = counter["steps"] + 1
        counter["names"].append("f")
        return x + counter["steps"]

    np.testing.assert_allclose(graftax.vmap(count)(XS), XS + 1)
    assert (counter["n"], float(counter["steps"]), counter["names"]) == (1, 1.0, ["f"])


LOG: list[Any] = []


@pytest.mark.parametrize("axis_name", [None, "i"])
@pytest.mark.parametrize("outer", [lambda f: f, graftax.jit], ids=["plain", "jit"])
def test_what_depends_on_the_axis_is_refused_and_named(axis_name: Any, outer: Any) -> None:
    local = {"last": None}

    def by_argument(model: Any, x: Any) -> None:
        model.stats["mean"] = x.mean()

    def by_closure(x: Any) -> None:
        local["last"] = x

    def by_global(x: Any) -> None:
        LOG.append(x)

    model = Box(stats={"mean": jnp.zeros(())}, n=1)
    cases = [
        (by_argument, (None, 0), (model, XS), "model.stats['mean']"),
        (by_closure, 0, (XS,), "closure local['last']"),
        (by_global, 0, (XS,), "global LOG[0]"),
    ]
    for function, in_axes, args, path in cases:
        run = outer(graftax.vmap(function, in_axes=in_axes, axis_name=axis_name))
        with pytest.raises(graftax.MutationError, match=says(function.__name__, path, "not mapped", "in_axes")):
            run(*args)
    assert model.stats["mean"].shape == ()
    assert (local["last"], LOG) == (None, [])


def test_a_dicts_key_that_is_changed_by_the_axis_is_refused() -> None:
    key = Box(values=[])

    def put(table: Any) -> None:
        for k, value in table.items():
            k.values.append(value)

    with pytest.raises(graftax.MutationError, match="key"):
        graftax.vmap(put)({key: XS})
    assert key.values == []


def test_an_exception_leaves_the_callers_objects_alone() -> None:
    model = {"w": XS, "n": 0}

    def fail(model: Any) -> None:
        model["w"], model["n"] = model["w"] * 2, 1
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        graftax.vmap(fail)(model)
    assert model["w"] is XS
    assert model["n"] == 0


def test_the_function_runs_once() -> None:
    calls: list[int] = []

    def count(model: Any, x: Any) -> Any:
        calls.append(1)
        model["w"] = model["w"] + x
        return model["w"]

    model = {"w": XS}
    graftax.vmap(graftax.vmap(graftax.vmap(count)))({"w": XS[None]}, XS[None])
    assert len(calls) == 1
    graftax.vmap(count)(model, XS)
    assert len(calls) == 2


if hasattr(jax, "new_ref"):

    def test_refs_are_mapped_and_changed() -> None:
        ref, scale = jax.new_ref(jnp.zeros((3, 2))), jax.new_ref(jnp.asarray(2.0))
        state = {"ref": ref, "n": 0}

        def add(state: Any, x: Any) -> Any:
            state["ref"][...] += x * scale[...]
            state["n"] += 1
            return x

        graftax.vmap(add)(state, XS)
        np.testing.assert_allclose(ref[...], XS * 2)
        assert state["n"] == 1
        assert state["ref"] is ref


# ---- objects that are given and returned


def test_a_returned_object_has_to_be_asked_for_with_the_axis_that_it_has() -> None:
    model = {"w": XS.T, "inner": [XS.T]}
    run = graftax.vmap(lambda model: (model, model["inner"]), in_axes=1, out_axes=1)
    value, inner = run(model)
    assert value is model
    assert inner is model["inner"]
    np.testing.assert_allclose(inner[0], XS.T)
    assert graftax.vmap(lambda model: model, in_axes=1, out_axes=-1)(model) is model
    with pytest.raises(graftax.StructureError, match=says("result['w']", "in_axes says 1", "out_axes says 0")):
        graftax.vmap(lambda model: model, in_axes=1)(model)
    with pytest.raises(graftax.StructureError, match=says("result[0]", "in_axes says 1", "out_axes")):
        graftax.vmap(lambda model: model["inner"], in_axes=1)(model)


def test_a_returned_object_that_is_not_mapped_has_to_be_asked_for_without_an_axis() -> None:
    model = {"w": jnp.ones(2), "n": 0}

    def step(model: Any, x: Any) -> Any:
        model["n"] += 1
        return model, x

    with pytest.raises(graftax.StructureError, match=says("result[0]['w']", "in_axes says None", "out_axes says 0")):
        graftax.vmap(step, in_axes=(None, 0))(model, XS)
    assert model["n"] == 0
    assert graftax.vmap(step, in_axes=(None, 0), out_axes=(None, 0))(model, XS)[0] is model
    assert model["n"] == 1


def test_an_object_that_is_changed_and_returned_comes_back_changed() -> None:
    model = {"w": XS}

    def step(model: Any, x: Any) -> Any:
        model["w"], model["y"] = model["w"] + x, x
        return model

    assert graftax.vmap(step)(model, XS) is model
    np.testing.assert_allclose(model["w"], XS * 2)
    np.testing.assert_allclose(model["y"], XS)


# ---- what does not fit


def first(x: Any, *rest: Any, **keywords: Any) -> Any:
    return jax.tree.leaves(x)[0]


SHARED = [jnp.ones((3, 3))]
ERRORS: dict[str, Any] = {
    "sizes": (dict(), (XS, [XS.T]), ValueError, ["rest[0][0] has 2 along axis 0", "x has 3 along axis 0"]),
    "axis_size": (dict(axis_size=4), (XS,), ValueError, ["x has 3", "axis_size is 4"]),
    "scalar": (dict(), ({"a": jnp.ones(())},), ValueError, ["x['a']", "axis 0", "shape is ()", "None"]),
    "no such axis": (dict(in_axes=2), (XS,), ValueError, ["x", "axis 2", "(3, 2)"]),
    "no such axis from the end": (dict(in_axes=-3), (XS,), ValueError, ["axis -3"]),
    "nothing mapped": (dict(), (3, "a"), ValueError, ["maps no array", "axis_size="]),
    "all None": (dict(in_axes=None), (XS,), ValueError, ["maps no array", "axis_size="]),
    "tuple too short": (dict(in_axes=(0,)), (XS, XS), ValueError, ["tuple of 1", "2 positional"]),
    "part missing": (dict(in_axes=({"a": 0},)), ({"a": XS, "b": XS},), graftax.StructureError, ["x['b']"]),
    "part of an object missing": (dict(in_axes=({"w": 0},)), (Box(w=XS, b=XS),), graftax.StructureError, ["x.b"]),
    "too many parts": (dict(in_axes=([0, 0],)), ([XS],), graftax.StructureError, ["[0, 0] for x", "2 parts"]),
    "no such part": (dict(in_axes=({3: 0},)), ({"a": XS},), graftax.StructureError, ["{3: 0} for x", "has 3"]),
    "parts of an array": (dict(in_axes=((0, 1),)), (XS,), graftax.StructureError, ["(0, 1) for x", "array"]),
    "another class": (dict(in_axes=(Data(0),)), ([XS],), TypeError, ["Data", "for x", "int or None"]),
    "no axis": (dict(in_axes="0"), (XS,), TypeError, ["'0' for x", "int or None"]),
    "a float": (dict(in_axes=0.0), ([XS],), TypeError, ["0.0 for x", "int or None"]),
    "a boolean": (dict(in_axes=True), (XS,), TypeError, ["True for x"]),
    "function says no axis": (dict(in_axes=lambda leaf: "a"), ([XS],), TypeError, ["'a' for x[0]"]),
    "pattern of nothing": (dict(in_axes={"y": 0, "**": 0}), (XS,), ValueError, ["'y'", "Available: x"]),
    "pattern too late": (dict(in_axes={"**": 0, "x.b": None}), (Box(b=XS),), ValueError, ["'x.b'", "earlier patterns"]),
    "no pattern": (dict(in_axes={"x": 0}), (XS, XS), graftax.StructureError, ["rest[0]", "'**'"]),
    "two axes": (
        dict(in_axes=(0, 1)),
        (SHARED, (SHARED,)),
        graftax.StructureError,
        ["x[0]", "rest[0][0][0]", "0", "1"],
    ),
    "mapped and not": (dict(in_axes=(0, None)), (SHARED, [SHARED]), graftax.StructureError, ["0 for", "None for"]),
    "two axes by pattern": (
        dict(in_axes={"x": 0, "**": 1}),
        (SHARED, Box(s=SHARED)),
        graftax.StructureError,
        ["x[0]", "rest[0].s[0]"],
    ),
    "out too short": (dict(out_axes=(0,)), ([XS, XS],), graftax.StructureError, ["out_axes", "(0,) for result"]),
    "out of a mapped value": (dict(out_axes=None), (XS,), ValueError, ["out_axes is None", "result"]),
    "out with an axis name": (dict(out_axes=None, axis_name="i"), (XS,), ValueError, ["out_axes is None", "result"]),
    "no room in the result": (dict(out_axes=3), ([XS],), ValueError, ["out_axes", "result", "at 3", "(2,)"]),
    "out says no axis": (dict(out_axes="a"), (XS,), TypeError, ["out_axes", "'a' for result"]),
}


@pytest.mark.parametrize("case", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("outer", [lambda f: f, graftax.jit], ids=["plain", "jit"])
def test_what_does_not_fit_is_named(case: Any, outer: Any) -> None:
    options, args, error, parts = case
    function = (lambda x: [x[0], x[1]]) if options.get("out_axes") == (0,) else first
    with pytest.raises(error) as caught:
        outer(graftax.vmap(function, **options))(*args)
    for part in parts:
        assert part in str(caught.value)
    assert "vmap of" in str(caught.value)


def test_packed_state_is_mapped_where_it_is_opened() -> None:
    handle = graftax.pack({"w": XS})
    double = graftax.vmap(lambda model: model["w"] * 2)
    np.testing.assert_allclose(graftax.jit(double)(handle), XS * 2)
    handle = graftax.pack({"w": XS})
    with pytest.raises(graftax.StructureError, match=says("model._arrays[0]", "unpack()", "None")):
        double(handle)
    scaled = graftax.vmap(lambda model, x: model["w"] * x, in_axes=(None, 0))(handle, XS)
    assert scaled.shape == (3, 3, 2)


def test_captured_and_mapped_is_two_axes() -> None:
    shared = {"w": XS}
    with pytest.raises(graftax.StructureError, match=says("model['w']", "closure shared['w']", "0", "None")):
        graftax.vmap(lambda model: model["w"] * shared["w"])(shared)


def test_one_object_under_the_same_axis_is_one_inside() -> None:
    shared = {"w": XS, "n": 0}

    def check(a: Any, b: Any, x: Any) -> Any:
        assert a is b[0]
        a["n"] += 1
        return a["w"] * x

    np.testing.assert_allclose(graftax.vmap(check)(shared, [shared], XS), XS * XS)
    assert shared["n"] == 1


def test_a_module_that_is_replaced_in_a_list_keeps_its_axes() -> None:
    layers = [Affine(XS, jnp.zeros(2))]

    def step(layers: Any, x: Any) -> None:
        layers[0] = eqx.tree_at(lambda m: m.weight, layers[0], layers[0].weight + x)

    graftax.vmap(step, in_axes=({"**.weight": 0, "**.bias": None}, 0))(layers, XS)
    np.testing.assert_allclose(layers[0].weight, XS * 2)
    assert layers[0].bias.shape == (2,)


def test_an_attribute_and_a_key_of_one_name_are_two_places() -> None:
    table = Table(extra=XS)
    table.extra = XS.T

    def swap(table: Any) -> None:
        table["extra"], table.extra = table["extra"] * 2, table.extra * 3

    graftax.vmap(swap, in_axes={"table['extra']": 0, "table.extra": 1})(table)
    np.testing.assert_allclose(table["extra"], XS * 2)
    np.testing.assert_allclose(table.extra, XS.T * 3)


@pytest.mark.quick(0)
def test_many_arrays_in_one_list_are_replaced() -> None:
    rows = [XS + i for i in range(2000)]
    run = graftax.jit(graftax.vmap(lambda rows: rows.reverse(), in_axes={"rows[*]": 0}))
    run(rows)
    np.testing.assert_allclose(rows[0], XS + 1999)
