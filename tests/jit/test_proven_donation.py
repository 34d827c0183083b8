# SPDX-License-Identifier: Apache-2.0
"""`donate="auto"`: what a call replaces and nobody else has is donated; what anybody can reach is kept."""

import collections
import random
import sys
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftax
from array_holders import HOLDERS
from graftax._jax import fast_dispatch
from held_arrays import STEPS, Programs
from sizes import sized

SIZE = 1 << 15  # elements: twice as much as is looked at

pytestmark = pytest.mark.skipif(
    not fast_dispatch.counts_buffer_users(), reason="donate='auto' needs direct calls and the users of a buffer"
)


def large(value=0.0):
    return jnp.full(SIZE, float(value)) + 0


def step(state):
    for name in list(state):
        state[name] = state[name] * 2 + 1


def pointers(state):
    return {name: value.unsafe_buffer_pointer() for name, value in state.items()}


def test_what_a_call_replaces_is_updated_in_its_own_memory():
    f, state = graftax.jit(step, donate="auto"), {"a": large(1), "b": large(2)}
    before = pointers(state)
    for _ in range(4):
        f(state)
        assert pointers(state) == before
    assert state["a"][0] == 31 and state["b"][0] == 47
    assert f.cache_info().traces == 1


@pytest.mark.quick(25)
@pytest.mark.parametrize("name", HOLDERS)
def test_what_somebody_holds_is_as_without_jit(name):
    f, state = graftax.jit(step, donate="auto"), {"a": large(1), "b": large(2)}
    f(state)
    read = HOLDERS[name](state["b"])
    f(state)
    assert np.asarray(read())[:3].tolist() == [5] * 3
    assert state["a"][0] == 7 and state["b"][0] == 11


def test_what_is_let_go_of_is_donated_again():
    f, state = graftax.jit(step, donate="auto"), {"a": large(1), "b": large(2)}
    for name in (None, "b", None):
        held = state.get(name)
        f(state)
    assert held is None
    before = pointers(state)
    f(state)
    assert pointers(state) == before


def test_programs_with_and_without_donation_are_one_for_explain():
    @graftax.jit(donate="auto")
    def f(state):
        step(state)

    state, history = {"a": large(1), "b": large(2)}, []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(16):
            history.append(state["a"] if i % 5 else None)
            f(state)
    explanation = graftax.explain(f)
    assert explanation.count == 1 and explanation.variants[0].seconds["compiled"] > 0
    assert str(explanation).endswith(str(f.donation()))


def test_programs_of_earlier_shapes_with_and_without_donation_are_one_for_explain():
    f = graftax.jit(lambda state: step(state), donate="auto")
    states = [{"a": large(1)}, {"a": jnp.ones(2 * SIZE)}]
    for i in range(8):
        for state in states:
            held = state["a"] if i > 4 else None
            f(state)
    assert held.shape == (2 * SIZE,) and graftax.explain(f).count == 2


def test_what_is_always_held_does_not_keep_the_rest():
    f, state = graftax.jit(step, donate="auto"), {"a": large(1), "b": large(2), "c": large(3)}
    history = []
    for _ in range(8):
        history.append(state["c"])
        before = pointers(state)
        f(state)
    after = pointers(state)
    assert before["a"] == after["a"] and before["b"] == after["b"]
    assert [c[0] for c in history] == [3 * 2**i + 2**i - 1 for i in range(8)]


def test_a_first_call_keeps_what_is_held():
    f, state = graftax.jit(step, donate="auto"), {"a": large(1), "b": large(2)}
    first = state["b"]
    f(state)
    assert first[0] == 2 and state["b"][0] == 5
    second = dict(state)
    f(state)
    assert [second["a"][0], second["b"][0]] == [3, 5]


def test_a_weak_reference_does_not_hold():
    f, state = graftax.jit(step, donate="auto"), {"a": large(1)}
    f(state)
    callbacks, before = [], pointers(state)
    reference = weakref.ref(state["a"], lambda ref: callbacks.append(ref()))
    f(state)
    assert reference() is None and callbacks == [None] and pointers(state) == before


def test_what_the_function_leaves_alone_moves_or_returns_is_kept():
    @graftax.jit(donate="auto")
    def f(state, other):
        other["old"] = state["a"]
        state["a"] = state["a"] + 1
        state["b"], kept = state["b"] + 1, state["b"]
        return kept, state["c"].sum()

    state, other = {"a": large(1), "b": large(2), "c": large(3)}, {"old": large(9)}
    for i in range(4):
        kept, _ = f(state, other)
        assert kept[0] == 2 + i and other["old"][0] == 1 + i and state["c"][0] == 3
        assert state["a"][0] == 2 + i and state["b"][0] == 3 + i


def test_an_array_in_two_places_is_kept():
    f, w = graftax.jit(step, donate="auto"), large(1)
    state, other = {"a": w}, {"a": w}
    del w
    f(state)
    assert other["a"][0] == 1 and state["a"][0] == 3

    @graftax.jit(donate="auto")
    def both(one, two):
        step(one), step(two)

    state = {"a": other["a"]}
    both(state, other)
    assert state["a"][0] == other["a"][0] == 3


def test_captured_arrays_and_arguments_that_are_variables_are_kept():
    w = large(1)
    captured = graftax.jit(lambda x: x + w, donate="auto")
    x = large(2)
    for _ in range(3):
        assert captured(x)[0] == 3
    assert captured(large(4))[0] == 5 and w[0] == 1 and x[0] == 2
    assert "no call has looked" in str(captured.donation())


passes = pytest.mark.skipif(
    sys.version_info[:2] not in ((3, 12), (3, 13)), reason="this Python does not show that a call owns its arguments"
)


@passes
@pytest.mark.quick(9)
@pytest.mark.parametrize(
    "pack",
    [lambda x: x, lambda x: {"w": x}, lambda x: [(x,)], SimpleNamespace],
    ids=["array", "dict", "list", "object"],
)
def test_arguments_that_only_the_call_has_are_donated(pack):
    f = graftax.jit(lambda part: jax.tree.map(lambda x: x * 2, graftax.flatten(part)[0]), donate="auto")
    pack = (lambda x: SimpleNamespace(w=x)) if pack is SimpleNamespace else pack
    for _ in range(3):
        assert f(pack(large(1)))[0][0] == 2 and f(part=pack(large(2)))[0][0] == 4
    assert [array.path.startswith("part") for array in f.donation().donated] == [True]
    assert f.donation().calls_donated == 6
    held = large(3)
    part = pack(large(4))
    for _ in range(2):
        assert f(pack(held))[0][0] == 6 and f(part)[0][0] == 8
    assert held[0] == 3 and graftax.flatten(part)[0][0][0] == 4
    assert f.donation().calls_donated == 6


@passes
def test_an_argument_is_donated_where_a_result_can_take_its_memory():
    f = graftax.jit(lambda x, y, z: (x + z.sum(), y.sum()), donate="auto")
    for _ in range(3):
        f(large(1), large(2), jnp.ones((8, 8)))
    assert len(f.donation().donated) == 1 and not f.donation().kept

    @graftax.jit(donate="auto")
    def g(state, x):
        state["w"] = state["w"] + x

    state = {"w": large(1)}
    for _ in range(3):
        g(state, large(1))
    assert [array.path for array in g.donation().donated] == ["state['w']"]


@passes
def test_an_argument_that_is_returned_or_stored_is_kept():
    @graftax.jit(donate="auto")
    def f(state, x, y):
        state["x"] = x
        return y, x + 1, y + 1

    state = {"x": None}
    f(state, large(0), large(0))
    for i in range(3):
        kept, x, y = f(state, large(i), large(10 + i))
        assert [kept[0], x[0], y[0], state["x"][0]] == [10 + i, 1 + i, 11 + i, i]


def test_objects_lists_and_slots_hold_arrays_that_are_donated():
    class Layer:
        __slots__ = ("w",)

        def __init__(self, w):
            self.w = w

    @graftax.jit(donate="auto")
    def f(model):
        model.w = model.w + 1
        model.many[0] = model.many[0] + 1
        model.layer.w = model.layer.w + 1

    model = SimpleNamespace(w=large(0), many=[large(1)], layer=Layer(large(2)))

    def places():
        return [x.unsafe_buffer_pointer() for x in (model.w, model.many[0], model.layer.w)]

    before = places()
    for _ in range(3):
        f(model)
    assert places() == before
    assert [model.w[0], model.many[0][0], model.layer.w[0]] == [3, 4, 5]


class Layer:
    def __init__(self, w):
        self.w = w


Moments = collections.namedtuple("Moments", "count mu")

CONTAINERS = {
    "dict": lambda w: {"w": w},
    "list": lambda w: [0, w],
    "tuple": lambda w: ("note", w),
    "named tuple": lambda w: Moments(0, {"w": w}),
    "ordered dict": lambda w: collections.OrderedDict(w=w),
    "object": lambda w: Layer(w),
    "deep": lambda w: (Layer([{"w": (w,)}]),),
}


@pytest.mark.quick(99)
@pytest.mark.parametrize("name", CONTAINERS)
def test_what_is_replaced_with_its_container_is_donated_unless_somebody_has_it(name):
    make, read = CONTAINERS[name], lambda part: graftax.flatten(part)[0][0]

    @graftax.jit(donate="auto")
    def f(state):
        state["part"] = make(read(state["part"]) * 2)

    state = {"part": make(large(1))}
    f(state)
    before = read(state["part"]).unsafe_buffer_pointer()
    f(state)
    assert read(state["part"]).unsafe_buffer_pointer() == before
    held = state["part"]
    f(state), f(state)
    assert read(held)[0] == 4 and read(state["part"])[0] == 16
    assert f.cache_info().traces == 1


def test_parts_of_a_replaced_container_that_somebody_has_are_kept():
    @graftax.jit(donate="auto")
    def f(state):
        state["layers"] = [Layer(layer.w + 1) for layer in state["layers"]]

    state = {"layers": [Layer(large(1)), Layer(large(2)), Layer(large(3))]}
    f(state)
    layer, attributes, method = state["layers"][0], vars(state["layers"][1]), state["layers"][2].__repr__
    f(state), f(state)
    assert [layer.w[0], attributes["w"][0], method.__self__.w[0]] == [2, 3, 4]
    assert [layer.w[0] for layer in state["layers"]] == [4, 5, 6]


def test_a_container_that_the_result_holds_or_that_moves_is_kept():
    @graftax.jit(donate="auto")
    def f(state):
        old = state["part"]
        state["moved"], state["part"] = state["next"], {"w": old["w"] + 1}
        state["next"] = {"w": state["next"]["w"] + 1}
        return old

    state = {"part": {"w": large(1)}, "next": {"w": large(5)}, "moved": {"w": large(0)}}
    olds = [f(state) for _ in range(3)]
    assert [old["w"][0] for old in olds] == [1, 2, 3]
    assert [state[name]["w"][0] for name in ("part", "next", "moved")] == [4, 8, 7]


def test_the_state_of_optax_in_a_dict_is_donated():
    transformation = optax.adam(1e-3)

    @graftax.jit(donate="auto")
    def f(state, x):
        gradients = jax.grad(lambda w: ((x * w["w"]) ** 2).sum())(state["params"])
        updates, state["opt"] = transformation.update(gradients, state["opt"])
        state["params"] = optax.apply_updates(state["params"], updates)

    params = {"w": large(1)}
    state = {"params": params, "opt": transformation.init(params)}
    del params
    for _ in range(3):
        f(state, jnp.ones(SIZE))
    assert {array.path.split("[")[1] for array in f.donation().donated} == {"'params']", "'opt']"}
    assert len(f.donation().donated) == 3


@pytest.mark.quick(0)
def test_a_checkpoint_that_is_being_written_has_the_old_arrays(tmp_path):
    f, state = graftax.jit(step, donate="auto"), {"a": large(1)}
    with graftax.Checkpoints(tmp_path, every=1, keep=None) as checkpoints:
        for i in range(4):
            checkpoints.save(i, state)
            f(state)
        checkpoints.wait()
        for i, value in ((1, 3), (2, 7), (3, 15)):
            checkpoints.restore(restored := {"a": large(0)}, i)
            assert restored["a"][0] == value


def test_threads_that_run_one_program_each_keep_what_they_hold():
    f = graftax.jit(step, donate="auto")

    def work(seed):
        draw, state, value, held = random.Random(seed), {"a": large(0), "b": large(0)}, 0, []
        ways = [lambda x: x, np.asarray, lambda x: jax.device_put(x, jax.devices()[0])]
        for _ in range(sized(400, 30)):
            if draw.random() < 0.5:
                held.append((draw.choice(ways)(state[draw.choice("ab")]), value))
            held = held[-2:]
            f(state)
            value = (2 * value + 1) % 1024
            for name in "ab":
                state[name] = state[name] % 1024
            assert all((np.asarray(array)[:2] == expected).all() for array, expected in held)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert f.donation().calls_donated > 0


def test_an_array_that_is_replaced_and_never_read_does_not_prevent_donation():
    @graftax.jit(donate="auto")
    def f(state):
        state["unread"] = jnp.ones(SIZE)
        state["w"] = state["w"] + 1
        state.pop("gone", None)

    state = {"unread": large(1), "w": large(2), "gone": large(3)}
    for _ in range(3):
        f(state)
    before = state["w"].unsafe_buffer_pointer()
    f(state)
    assert before in pointers(state).values() and "gone" not in state  # XLA chooses for which of two results
    assert [array.path for array in f.donation().donated] == ["state['w']"]


def test_the_users_of_a_buffer_are_found_again_whatever_else_is_alive():
    others = [jnp.full(size, 1.0) + 1 for size in (3, 1000, 70_000) for _ in range(20)]
    assert all(fast_dispatch.counts_buffer_users.__wrapped__() for _ in range(3)) and others


def test_loops_within_a_call_leave_its_arrays_to_it():
    @graftax.jit(donate="auto")
    def f(state):
        def body(state, i):
            state["w"] = state["w"] + i
            return state, None

        graftax.scan(body, state, jnp.arange(3.0))
        state["v"] = jax.lax.fori_loop(0, 3, lambda _, v: v + 1, state["v"])

    state = {"w": jnp.ones(SIZE), "v": large(2)}
    for _ in range(2):
        f(state)
    held = state["v"]
    f(state), f(state)
    assert held[0] == 8 and state["w"][0] == 13 and state["v"][0] == 14
    assert (f.donation().calls_donated, f.donation().calls_kept) == (3, 1)


def test_a_call_with_an_array_that_is_deleted_takes_none_of_the_others():
    f, state = graftax.jit(step, donate="auto"), {"a": large(1), "b": large(2)}
    f(state), f(state)
    state["b"].delete()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"state\['b'\] holds an array that was deleted"):
            f(state)
        assert state["a"][0] == 7
    state["b"] = large(2)
    f(state)
    assert state["a"][0] == 15 and state["b"][0] == 5


def test_without_auto_no_call_has_a_donor():
    for f in (graftax.jit(lambda state: step(state)), graftax.jit(lambda state: step(state), donate="state")):
        f(state := {"a": large(1)}), f(state), f(state)
        assert [(entry.donor, entry.donations()) for entry in f._table.entries.values()] == [(None, [])]


def test_arrays_of_one_element_are_left_alone():
    @graftax.jit(donate="auto")
    def f(state):
        state["a"] = state["a"] + 1

    for shape in ((), (1,)):
        state = {"a": jnp.ones(shape)}
        before = [state["a"]]
        holder = before[0]
        f(state)
        assert not holder.is_deleted() and "no call has looked" in str(f.donation())


def test_small_arrays_are_donated_and_a_loss_beside_them_is_kept():
    @graftax.jit(donate="auto")
    def f(state):
        state["loss"] = state["w"].sum()
        state["w"] = state["w"] * 0.5

    state, losses = {"w": jnp.ones(4), "loss": jnp.zeros(())}, []
    for _ in range(8):
        f(state)
        losses.append(state["loss"])
    report = f.donation()
    assert [array.path for array in report.donated] == ["state['w']"] and report.calls_kept == 0
    assert [float(loss) for loss in losses] == [4 * 0.5**i for i in range(8)]


def test_a_number_that_changes_does_not_prevent_donation():
    @graftax.jit(donate="auto")
    def f(state, rate):
        state["w"] = state["w"] * rate

    state, before = {"w": large(1)}, []
    for i in range(12):
        before.append(state["w"].unsafe_buffer_pointer())
        f(state, 1.0 + i)
    assert before[-1] == state["w"].unsafe_buffer_pointer()
    assert state["w"][0] == np.prod(np.arange(1.0, 13.0), dtype=np.float32)


def test_an_error_in_the_trace_leaves_everything_as_it_was():
    @graftax.jit(donate="auto")
    def f(state, fail):
        state["w"] = state["w"] + 1
        if fail:
            raise ValueError("no")

    state = {"w": large(1)}
    f(state, False)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            f(state, True)
        assert state["w"][0] == 2
    f(state, False)
    assert state["w"][0] == 3


def test_an_error_after_the_launch_names_what_is_gone():
    state = {"a": large(1), "b": jnp.ones(2)}

    @jax.tree_util.register_pytree_node_class
    class Broken:
        fails = False

        def tree_flatten(self):
            return (), None

        @classmethod
        def tree_unflatten(cls, _, children):
            if cls.fails:
                raise OSError("broken")
            return cls()

    @graftax.jit(donate="auto")
    def g(state):
        state["a"] = state["a"] + 1
        return Broken()

    g(state)
    Broken.fails = True
    with pytest.raises(OSError, match="broken") as caught:
        g(state)
    assert any("state['a']" in note and "deleted" in note for note in caught.value.__notes__)
    assert state["a"].is_deleted() and not state["b"].is_deleted()


def test_the_report_names_what_was_donated_and_who_holds_the_rest():
    @graftax.jit(donate="auto")
    def f(state):
        step(state)

    state = {"a": large(1), "b": large(2)}
    f(state)
    report = f.donation()
    assert {array.path: array.bytes for array in report.donated} == {"state['a']": 4 * SIZE, "state['b']": 4 * SIZE}
    assert not report.kept and (report.calls_donated, report.calls_kept) == (1, 0)
    best = SimpleNamespace(weights=state["b"])
    f(state)
    report = f.donation()
    kept = {array.path: array.holders for array in report.kept}
    assert kept["state['b']"] == (".weights of an instance of SimpleNamespace",) and kept["state['a']"] == ()
    assert "kept state['b']: 131 kB, held by .weights of an instance of SimpleNamespace" in str(report)
    view = np.asarray(state["a"])
    f(state)
    assert "np.asarray" in str(f.donation()) and view[0] == best.weights[0] + 2


@pytest.mark.quick(0)
def test_the_holders_of_the_largest_arrays_are_noted():
    f = graftax.jit(step, donate="auto")
    state = {str(i): jnp.ones(SIZE + (1 << 12) * (i % 50)) for i in range(100)}
    f(state)
    held = dict(state)
    f(state)
    report = f.donation()
    named = {array.path for array in report.kept if array.holders[0].startswith("a dict under")}
    assert named == {f"state['{i}']" for i in range(100) if i % 50 >= 34}
    assert all(array.holders for array in report.kept) and report.kept_bytes == sum(x.nbytes for x in held.values())


def test_a_function_without_auto_says_so():
    assert "not jitted with donate='auto'" in str(graftax.jit(step).donation())


def test_auto_by_value_or_with_names_is_refused():
    with pytest.raises(ValueError, match="donate='auto' donates the arrays that a call replaces"):
        graftax.filter_jit(step, donate="auto")
    with pytest.raises(ValueError, match="leave out donate_argnums"):
        graftax.jit(step, donate="auto", donate_argnums=0)


def test_a_warning_that_is_off_by_default_names_what_doubles_the_memory():
    f, state = graftax.jit(step, donate="auto"), {"a": jnp.zeros(26_000_000)}
    held = state["a"]
    with warnings.catch_warnings(record=True) as caught:
        f(state)
    assert not caught
    g = graftax.jit(lambda state: step(state), donate="auto")
    for _ in range(3):
        held = state["a"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", graftax.MissedDonationWarning)
            g(state)
        if caught:
            break
    assert len(caught) == 1 and "104 MB" in str(caught[0].message) and "state['a']" in str(caught[0].message)
    assert held.shape == state["a"].shape


def test_check_and_shardings_donate_nothing():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for options in ({"check": True}, {"out_shardings": device}):
        f, state = graftax.jit(step, donate="auto", **options), {"a": large(1)}
        before = state["a"]
        f(state), f(state)
        assert not before.is_deleted() and state["a"][0] == 7


def test_random_programs_never_lose_an_array_that_can_be_reached():
    programs = Programs(sized(len(STEPS), 3))
    for seed in range(sized(2000, 25)):
        programs.run(seed)
    assert programs.calls_donated() > programs.counts["calls"] / 4
