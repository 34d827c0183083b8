# SPDX-License-Identifier: Apache-2.0
"""Packed state loses nothing and shows nothing old: who holds its arrays, what changes outside, where it fails."""

from __future__ import annotations

import copy
import gc
import re
import textwrap
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from graftax import Packed, pack
from graph_equality import same
from watchdog import python

# ---- nothing lost: the arrays of a handle are its own


def big(value: float = 1.0) -> jax.Array:
    return value * jnp.ones(40000)


def grow(state) -> None:
    """A step that donates every array of a handle, and writes each anew."""
    for name, x in state.items():
        if isinstance(x, jax.Array):
            state[name] = x + 1


def with_big() -> dict[str, jax.Array]:
    return {"big": big(), "a": jnp.ones(2), "b": jnp.ones(3)}


def put(state, x):
    state["big"] = x
    return x


def below(handle):
    return graftax.jit(lambda box: box["h"].unpack())({"h": handle})["big"]


GIVEN_AND_HELD = {
    "an argument that is put into a handle": lambda h, x: (graftax.jit(lambda s, x: s.update(big=x))(h, x), (h, x))[1],
    "an argument that is packed": lambda h, x: (graftax.jit(lambda x: pack({"big": x, "a": x[:2]}))(x), x),
    "an argument that is packed by jax.jit": lambda h, x: (jax.jit(lambda x: pack({"big": x, "a": x[:2]}))(x), x),
    "an argument that a handle is updated with": lambda h, x: (
        graftax.jit(lambda box, x: box["h"].update({"big": x}))({"h": h}, x),
        (h, x),
    )[1],
    "the result by value": lambda h, x: (h, graftax.filter_jit(lambda s: s["big"])(h)),
    "the result beside a new handle by value": lambda h, x: graftax.filter_jit(lambda s: (pack(s), s["big"]))(h),
    "what is unpacked below an argument": lambda h, x: (h, below(h)),
    "what jax.jit unpacks": lambda h, x: (h, jax.jit(lambda h: h.unpack()["big"])(h)),
    "the result of a change": lambda h, x: (h, graftax.jit(lambda s, x: put(s, x + 1))(h, x)),
    "the result without a change": lambda h, x: (h, graftax.jit(lambda s: s["big"])(h)),
    "the other of two new handles": lambda h, x: graftax.jit(lambda s: (pack(s), pack({**s, "n": 1})))(h),
    "a new handle of changed state": lambda h, x: (h, graftax.jit(lambda s: (put(s, s["big"] + 1), pack(s))[1])(h)),
}


@pytest.mark.parametrize("case", GIVEN_AND_HELD.values(), ids=GIVEN_AND_HELD)
def test_no_other_object_holds_an_array_of_a_handle(case):
    handle, other = case(pack(with_big()), big())
    array = other.unpack()["big"] if type(other) is Packed else other
    before = np.array(array)
    step = graftax.jit(grow)
    step(handle), step(handle)
    after = other.unpack()["big"] if type(other) is Packed else other
    np.testing.assert_array_equal(after, before)
    assert handle.unpack()["big"][0] == before[0] + 2


def test_what_runs_without_jit_holds_no_array_of_a_handle():
    handle, x = pack(with_big()), big(5.0)
    with jax.disable_jit():
        result = graftax.jit(put)(handle, x)
    graftax.jit(grow)(handle)
    assert result[0] == x[0] == 5 and handle.unpack()["big"][0] == 6


def test_what_was_unpacked_keeps_its_values_and_so_do_views_of_it():
    handle, step, held = pack(with_big()), graftax.jit(grow), []
    for i in range(5):
        own, shared = handle.unpack(), handle.unpack(copy=False)
        views = [np.asarray(x) for x in (*own.values(), *shared.values())]
        held.append((1 + i, [*own.values(), *views]))
        step(handle)
    for value, arrays in held:
        assert all((x == value).all() for x in arrays)


@pytest.mark.parametrize("donate", [True, False])
def test_numpy_arrays_are_copied_in_and_out(donate):
    array = np.zeros(3)
    handle = pack({"n": array, "w": jnp.ones(2)}, donate=donate)
    array[0] = 5
    handle.unpack()["n"][1] = 7
    assert handle.unpack()["n"].tolist() == [0, 0, 0]


def test_a_numpy_array_changed_in_place_without_jit_is_in_the_handle():
    def f(s):
        s["n"][0] = 4

    handle = pack({"n": np.zeros(2), "w": jnp.ones(2)})
    with jax.disable_jit():
        graftax.jit(f)(handle)
    assert handle.unpack()["n"].tolist() == [4, 0]


def test_a_shallow_copy_has_arrays_of_its_own():
    handle = pack({**with_big(), "n": np.ones(2)})
    twin = copy.copy(handle)
    graftax.jit(grow)(handle)
    assert same(twin.unpack(), {**with_big(), "n": np.ones(2)})


def test_arrays_that_another_handle_gave_away_are_a_clear_error():
    handle = pack(with_big())
    twin = jax.tree.map(lambda x: x, handle)
    graftax.jit(grow)(handle)
    with pytest.raises(graftax.StructureError, match="the arrays of this packed state are gone"):
        twin.unpack()
    with pytest.raises((RuntimeError, ValueError), match="holds an array that was deleted"):
        graftax.jit(grow)(twin)
    twin.update(with_big())
    assert same(twin.unpack(), with_big())


def test_a_program_that_fails_while_it_runs_has_taken_the_arrays():
    def fail(x):
        raise ValueError("this callback fails")

    def f(s):
        s["a"] = s["a"] + jax.pure_callback(fail, jax.ShapeDtypeStruct((2,), jnp.float32), s["a"])

    handle = pack(with_big())
    with pytest.raises(Exception, match="this callback fails"):
        graftax.jit(f)(handle)
        jax.block_until_ready(jax.tree.leaves(handle))
    with pytest.raises((graftax.StructureError, RuntimeError)):
        jax.block_until_ready(handle.unpack())


def test_of_several_handles_that_a_result_might_replace_none_is_used_up():
    target, params = pack([jnp.ones(2), jnp.ones(3)]), pack([jnp.zeros(2), jnp.zeros(3)])
    new = graftax.jit(lambda target, params: pack([x + 1 for x in params]))(target, params)
    assert same(target.unpack(), [jnp.ones(2), jnp.ones(3)]) and same(params.unpack(), [jnp.zeros(2), jnp.zeros(3)])
    pair = graftax.jit(lambda a, b: (pack([x + 1 for x in a]), pack([x + 2 for x in b])))(target, params)
    assert [x.unpack()[0][0] for x in (*pair, new)] == [2, 2, 1]
    assert repr(target) == repr(params) == "<graftax.pack used up by <lambda>>"


@pytest.mark.parametrize("jitted", [True, False])
def test_a_change_from_two_sides_is_an_error_and_none_is_written(jitted):
    def f(s, box):
        s[0] = s[0] + 1
        box["h"].update([jnp.zeros(2), jnp.zeros(3)])

    handle = pack([jnp.ones(2), jnp.ones(3)])
    with jax.disable_jit(not jitted), pytest.raises(graftax.StructureError, match="one of the two would be lost"):
        graftax.jit(f)(handle, {"h": handle})
    assert handle.unpack()[0][0] == (1 if jitted else 0)  # without jit, update has happened as anything has


def test_an_update_through_the_handle_alone_is_kept():
    def f(s, box):
        box["h"].update([x + 1 for x in s])

    handle = pack([jnp.ones(2), jnp.ones(3)])
    graftax.jit(f)(handle, {"h": handle})
    assert same(handle.unpack(), [2.0 * jnp.ones(2), 2.0 * jnp.ones(3)])


@pytest.mark.parametrize("jitted", [True, False])
def test_no_handle_is_written_where_another_cannot_be(jitted):
    def f(a, b):
        a[0] = a[0] + 1
        b.append(iter([1]))

    a, b = pack([jnp.ones(2), jnp.ones(3)]), pack([jnp.ones(2), jnp.ones(3)])
    with jax.disable_jit(not jitted), pytest.raises(graftax.UnsupportedValueError, match="list_iterator"):
        graftax.jit(f)(a, b)
    assert same(a.unpack(), [jnp.ones(2), jnp.ones(3)]) and same(b.unpack(), [jnp.ones(2), jnp.ones(3)])


def test_what_a_function_keeps_of_the_object_inside_is_an_object_of_its_own_afterwards():
    handle, box = pack(with_big()), []
    graftax.jit(lambda s, box: box.append(s))(handle, box)
    graftax.jit(grow)(handle)
    assert same(box, [with_big()]) and handle.unpack()["big"][0] == 2


def test_a_step_that_replaces_its_large_arrays_copies_none():
    def functional(s):
        return pack({k: x + 1 for k, x in s.items()})

    for step in (grow, functional, lambda s: s["big"].sum()):
        program = graftax.jit(step).lower(pack(with_big())).compile().as_text()
        assert "40000" in program and not re.search(r"= f32\[40000\]\S* copy\(", program)


def test_a_ref_inside_stays_itself():
    def f(s):
        s["ref"][...] = s["ref"][...] + 1

    ref = jax.new_ref(jnp.zeros(3))
    handle, step = pack({"ref": ref, **with_big()}), graftax.jit(f)
    step(handle), step(handle)
    assert handle.unpack()["ref"] is ref and ref[...].tolist() == [2, 2, 2]


# ---- nothing stale: what stays itself inside is seen when it changes


class Key:
    def __init__(self) -> None:
        self.scale = 2.0


def a_closure():
    scale = 2.0

    def scaled(x):
        return x * scale

    def change():
        nonlocal scale
        scale = 3.0

    return {"f": scaled}, lambda s: s["f"](1.0), change


def a_default():
    def scaled(x, scale=2.0):
        return x * scale

    return {"f": scaled}, lambda s: s["f"](1.0), lambda: setattr(scaled, "__defaults__", (3.0,))


def an_attribute():
    def scaled(x):
        return x * scaled.scale

    scaled.scale = 2.0
    return {"f": scaled}, lambda s: s["f"](1.0), lambda: setattr(scaled, "scale", 3.0)


def a_dict_key():
    key = Key()
    return {"d": {key: 1}}, lambda s: next(iter(s["d"])).scale, lambda: setattr(key, "scale", 3.0)


def a_key_in_a_tuple():
    key = Key()
    return {"d": {(key, 1): 1}}, lambda s: next(iter(s["d"]))[0].scale, lambda: setattr(key, "scale", 3.0)


def a_set_element():
    key = Key()
    return {"d": {key}}, lambda s: next(iter(s["d"])).scale, lambda: setattr(key, "scale", 3.0)


LIVE = [a_closure, a_default, an_attribute, a_dict_key, a_key_in_a_tuple, a_set_element]


@pytest.mark.parametrize("make", LIVE, ids=lambda f: f.__name__)
def test_a_change_to_what_stays_itself_inside_is_seen(make):
    contents, read, change = make()
    handle, f = pack({**contents, "w": jnp.ones(2), "v": jnp.ones(3)}), graftax.jit(lambda s: read(s) * s["w"][0])
    assert [f(handle), f(handle)] == [2, 2] and f.cache_info().traces == 1
    change()
    with jax.disable_jit():
        expected = f(handle)
    assert f(handle) == expected == read(handle.unpack()) == 3


def test_equal_functions_in_two_handles_stay_two():
    (one, read, change), (other, _, change_other) = a_closure(), a_closure()
    first, second = (pack({**x, "w": jnp.ones(2), "v": jnp.ones(3)}) for x in (one, other))
    f = graftax.jit(lambda s: read(s) * s["w"][0])
    assert first.unpack()["f"] is one["f"] and second.unpack()["f"] is other["f"]
    change()
    assert (f(first), f(second)) == (3, 2)
    change_other()
    assert (f(first), f(second)) == (3, 3)


def test_functions_inside_die_with_the_handle():
    contents, read, change = a_closure()
    handle, f = pack({**contents, "w": jnp.ones(2)}), graftax.jit(lambda s: read(s) * s["w"][0])
    f(handle)
    dead = weakref.ref(contents["f"])
    del contents, handle, change
    gc.collect()
    assert dead() is None


def test_a_key_that_the_function_changes_is_changed_once_a_call():
    def f(s):
        for key in s["d"]:
            key.scale += 1
        s["w"] = s["w"] * next(iter(s["d"])).scale

    key = Key()
    handle, step = pack({"d": {key: 1}, "w": jnp.ones(2), "v": jnp.ones(3)}), graftax.jit(f)
    step(handle), step(handle)
    assert key.scale == 4 and handle.unpack()["w"][0] == 12 and next(iter(handle.unpack()["d"])) is key


# ---- dtypes, places, shapes


def test_arrays_of_64_bits_stay_what_they_are_whatever_the_setting_says():
    with jax.enable_x64(True):
        state = {"f": [jnp.ones(3) / 3, jnp.ones(2)], "i": [jnp.arange(3) + 2**40, jnp.arange(2)], "x": jnp.ones(1)}
        contents = pack(state)
    for handle in (contents, pack(state)):
        assert same(handle.unpack(), state)
        graftax.jit(lambda s: s.update(new=jnp.ones(3, jnp.float32)))(handle)
        assert same(handle.unpack(), {**state, "new": jnp.ones(3, jnp.float32)})
        result = jax.jit(lambda h: pack(h.unpack()["f"]))(handle)
        assert same(result.unpack(), state["f"])


def test_a_buffer_of_another_shape_is_a_clear_error():
    stacked = jax.vmap(lambda i: pack([i * jnp.ones(2), i * jnp.ones(3)]))(jnp.arange(3.0))
    with pytest.raises(graftax.StructureError, match=r"is \(3, 5\), and not the 5 numbers.*jax.vmap"):
        stacked.unpack()
    with pytest.raises(graftax.StructureError, match=r"is \(\), and not"):
        jax.tree.map(jnp.sum, pack([jnp.ones(2), jnp.ones(3)])).unpack()


def test_equal_layouts_are_one_object_in_threads_too():
    start, layouts = threading.Barrier(4), []

    def run():
        for n in range(50):
            start.wait()
            layouts.append((n, pack({"n": n, "w": [jnp.ones(2)] * 3})._layout))
            start.wait()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len({id(layout) for _, layout in layouts}) == 50 and len(layouts) == 200


@pytest.mark.quick(0)  # an interpreter of its own, as in test_packed
def test_replicated_arrays_of_any_rank_share_a_buffer_however_their_sharding_is_spelled():
    python(
        textwrap.dedent(
            """
            import jax, jax.numpy as jnp, graftax
            from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

            for kind in (AxisType.Auto, AxisType.Explicit):
                mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
                state = [
                    jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P(None, None))),
                    jax.device_put(jnp.ones(3), NamedSharding(mesh, P(None))),
                    jax.device_put(jnp.ones((8, 2)), NamedSharding(mesh, P("x"))),
                    jax.device_put(jnp.ones(()), NamedSharding(mesh, P())),
                ]
                handle = graftax.pack(state)
                assert repr(handle) == "<graftax.pack of 4 arrays, 144 bytes: 3 in 1 buffers, 1 apart>", handle

                def f(s):
                    s[0] = s[0] + 1

                step = graftax.jit(f)
                step(handle), step(handle), step(handle)
                assert step.cache_info().traces == 1 and handle.unpack()[0][0, 0] == 4
                for x, y in zip(handle.unpack(), state):
                    assert x.sharding.is_equivalent_to(y.sharding, x.ndim), (x.sharding, y.sharding)
            """
        ),
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )
