# SPDX-License-Identifier: Apache-2.0
"""An Outcome, what a compiled call does with its arrays, survives pickle; a damaged one is an error and no crash."""

import pickle
from collections import OrderedDict, defaultdict, deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
import oracle
import zoo
from graftax import _core
from watchdog import isolated
from zoo import Box, Data, Level, Point, Registered, Slotted, f32


def outcome_of(f, x):
    """(the Outcome of f(x), the input leaves, the input nodes)."""
    jitted = graftax.jit(f)
    staging = jitted.trace(x)._staging
    roots, _ = jitted._bind_arguments((x,), {})
    return staging.entry.outcomes[0], *_core.walk(staging.graphdef, roots)


def applied(outcome, leaves, nodes):
    out = [jnp.asarray(float(i)) for i in range(outcome.num_leaves)]
    return outcome.apply(out, leaves, nodes)


def grow(x):
    x["list"].append(x["list"][0] * 2)
    x["list"][1].n = 5
    x["set"].add(7)
    x["bytes"] += b"!"
    x["deque"].appendleft(Level.ONE)
    x["dict"]["new"] = (x["list"][0], "s", x)
    x["registered"].a = x["registered"].a + 1
    x["registered"].extra = 3
    x["slots"].a = [x["slots"].a]
    del x["gone"]
    return Point(x, {"made": np.arange(3), "again": x["list"], "data": Data(x["list"][0] + 1)})


def arguments():
    return {
        "list": [f32(1), Box(n=1)],
        "set": {1, "a"},
        "bytes": bytearray(b"a"),
        "deque": deque([1.0, f32(2)], 4),
        "dict": OrderedDict(a=defaultdict(list)),
        "registered": Registered(f32(1), f32(2), "name"),
        "slots": Slotted(a=f32(3)),
        "gone": None,
    }


def test_a_pickled_outcome_does_the_same():
    x, y = arguments(), arguments()
    outcome, leaves, nodes = outcome_of(grow, x)
    again = pickle.loads(pickle.dumps(outcome))
    assert repr(again) == repr(outcome)
    assert (again.result_leaves, again.num_leaves, again.num_writes) == (
        outcome.result_leaves,
        outcome.num_leaves,
        outcome.num_writes,
    )
    expected = applied(outcome, leaves, nodes)
    result = applied(again, *outcome_of(grow, y)[1:])
    assert result[0] is y and expected[0] is x
    assert graftax.flatten((result, y))[1] == graftax.flatten((expected, x))[1]
    assert y["bytes"] == b"a!" and y["registered"].extra == 3 and y["deque"].maxlen == 4


@pytest.mark.parametrize(
    "build", [b for n, b in zoo.ZOO if "statics" not in n], ids=[n for n in zoo.NAMES if "statics" not in n]
)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_the_outcome_of_any_graph_survives_pickle(build, protocol):
    x = build()
    outcome, leaves, nodes = outcome_of(lambda x: (x, [build()]), x)
    again = pickle.loads(pickle.dumps(outcome, protocol))
    assert graftax.flatten(applied(again, leaves, nodes))[1] == graftax.flatten(applied(outcome, leaves, nodes))[1]


def test_a_static_that_cannot_be_pickled_is_named():
    outcome, *_ = outcome_of(lambda x: {"hook": [lambda: 0, x]}, f32(1))
    with pytest.raises(graftax.UnpicklableError, match=r"\['hook'\]\[0\]"):
        pickle.dumps(outcome)


def test_an_outcome_refuses_nodes_of_other_types():
    outcome, leaves, nodes = outcome_of(lambda x: x.append(1), [f32(1)])
    with pytest.raises(ValueError, match="another type than dict"):
        applied(outcome, leaves, [{} for _ in nodes])
    outcome, leaves, nodes = outcome_of(lambda x: setattr(x, "a", x.a + 1), Registered(f32(1), f32(2), "n"))
    with pytest.raises(ValueError, match="another type than list"):
        applied(outcome, leaves, [[] for _ in nodes])


def places(state, path=()):
    """Every place of a nested tuple."""
    yield path
    if isinstance(state, tuple):
        for i, part in enumerate(state):
            yield from places(part, (*path, i))


def replaced(state, path, value):
    if not path:
        return value
    return (*state[: path[0]], replaced(state[path[0]], path[1:], value), *state[path[0] + 1 :])


WRONG = (0, 1, 2, 3, 4, 5, 6, 9, 11, 2**32 - 2, 2**32 - 1, 2**32, -1, None, (), "a", [], int, dict, 1.5)


def read(program):
    return [(row.op, row.key_entry, row.type, row.target, row.track, row.leaf, row.value) for row in program.rows()]


def damage(load, state, use):
    good = 0
    for path in places(state):
        for value in WRONG:
            try:
                loaded = load(replaced(state, path, value))
            except (ValueError, graftax.GraftaxError):
                continue
            good += 1
            try:
                use(loaded)
            except Exception:  # whatever it says, it must not crash
                continue
    return good


@pytest.mark.quick(0)
@isolated(300)
def test_a_damaged_outcome_never_crashes():
    def small(x):
        x[0].n = x[1]["a"] * 2
        x[2].a = 1
        x[3].add(2)
        return (x, x[1]["a"], [np.ones(1)], "s", (1, 2), (1, 2))

    def nodes():
        return [Box(n=1), {"a": f32(1)}, Registered(f32(1), 1, "n"), {1}]

    outcome, leaves, nodes_met = outcome_of(small, nodes())
    outcome.ties = [(1, 0)]

    def use(loaded):
        repr(loaded), loaded.leaf_places(), read(loaded), loaded._state()
        applied(loaded, leaves, nodes_met)

    assert damage(_core.Outcome._from_state, outcome._state(), use) > 1


@pytest.mark.quick(0)
@isolated(300)
def test_a_damaged_graphdef_never_crashes():
    graph = [{"a": (1, "b")}, {2}, Box(f=len), deque([1], 2), bytearray(b"a"), Registered(1, 2, "n"), zoo.cyclic_list()]
    leaves, graphdef = graftax.flatten([*graph, grow, Box(a=Box().__init__)])

    def use(loaded):
        repr(loaded), read(loaded), hash(loaded), loaded == graphdef
        graftax.unflatten(loaded, leaves)
        _core.walk(loaded, (graph,))

    assert damage(_core.GraphDef._from_state, graphdef._state(), use) > 1


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_a_graphdef_equals_what_its_state_makes(build):
    graphdef = graftax.flatten(build())[1]
    again = _core.GraphDef._from_state(graphdef._state())
    assert again == graphdef
    assert hash(again) == hash(graphdef)


def test_a_sentinel_does_not_survive_pickle_as_itself():
    mark = object()
    graphdef = graftax.flatten([mark])[1]
    assert graphdef == graftax.flatten([mark])[1]
    assert pickle.loads(pickle.dumps(graphdef)) != graphdef


def test_ties_are_part_of_an_outcome():
    outcome, leaves, nodes_met = outcome_of(lambda x: [x[0] * 2, {"again": x[0] * 3}], [f32(1)])
    outcome.ties = [(1, 0)]
    for variant in (outcome, pickle.loads(pickle.dumps(outcome))):
        first, second = variant.apply([f32(2), f32(3)], leaves, nodes_met)
        assert variant.ties == [(1, 0)] and second["again"] is first
    with pytest.raises(ValueError, match="ties"):
        _core.Outcome._from_state((*outcome._state()[:5], [(0, 1)], []))


def written():
    def change(x):
        x[0].n = x[1]["a"] * 2
        x[1]["new"] = 1
        x[2].a, x[2].b = 1, x[2].b
        del x[3].gone
        return x[1]["a"], x[0]

    nodes = [Box(n=1), {"a": f32(1)}, Registered(f32(1), 1, "n"), Box(gone=1, kept=2)]
    return outcome_of(change, nodes)[0]._state()


WRITES = 2


@pytest.mark.quick(15)
@pytest.mark.quick(50)  # a case takes milliseconds
@pytest.mark.parametrize(
    ("at", "value"),
    [
        *(((i,), value) for i in range(8) for value in ("no number", 2**33, -1)),
        *(((i,), 2**32 - 1) for i in (0, 1)),
        ((1,), 0),
        ((5,), (10**6,)),
        ((5,), (1, 0)),
        *(((i,), value) for i in (6, 7) for value in (["a"], ([],))),
        ((), ()),
        ((), 3),
    ],
    ids=repr,
)
def test_a_damaged_write_is_refused(at, value):
    state = written()
    for number, write in enumerate(state[WRITES]):
        if at and at[0] in (2, 3, 4) and value == -1:
            continue
        damaged = replaced(write, at, value)
        writes = (*state[WRITES][:number], damaged, *state[WRITES][number + 1 :])
        with pytest.raises(ValueError, match="malformed state"):
            _core.Outcome._from_state((*state[:WRITES], writes, *state[WRITES + 1 :]))


@pytest.mark.quick(4)
@pytest.mark.parametrize("version", [0, 6, "1", None])
def test_an_outcome_of_an_unknown_version_is_refused(version):
    state = written()
    with pytest.raises(ValueError, match="unknown version"):
        _core.Outcome._from_state((version, *state[1:]))
    for other in ((), state[:-1], (*state, 1), list(state), None):
        with pytest.raises(ValueError, match="unknown version"):
            _core.Outcome._from_state(other)


@pytest.mark.quick(50)
@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        (2, 3, "fields"),
        (2, (), "counts"),
        (3, 10**6, "counts"),
        (3, "x", "fields"),
        (4, 3, "refs"),
        (4, [(99, 0)], "refs"),
        (4, [(0, 1)], "refs"),
        (5, [(99, 0)], "ties"),
        (5, 3, "ties"),
        (6, 3, "ties"),
        (6, [[]], "ties"),
        (6, [[(99, [0])]], "ties"),
        (6, [[(0, [])]], "ties"),
    ],
    ids=repr,
)
def test_a_damaged_field_of_an_outcome_is_named(field, value, what):
    state = written()
    with pytest.raises(ValueError, match=what):
        _core.Outcome._from_state((*state[:field], value, *state[field + 1 :]))


def test_an_outcome_is_given_as_many_leaves_and_nodes_as_it_needs():
    outcome, leaves, nodes = outcome_of(lambda x: (x, x.append(x[0] + 1)), [f32(1)])
    out = [f32(2)] * outcome.num_leaves
    for wrong in ((out[:-1], leaves, nodes), ([*out, 1], leaves, nodes), (out, leaves, [])):
        with pytest.raises(ValueError, match="wrong number"):
            outcome.apply(*wrong)
    outcome.apply(out, leaves, nodes)


class Room:
    """Registered, with slots alone."""

    __slots__ = ("a", "b")

    def __init__(self, a):
        self.a = a


graftax.register(Room, flatten=lambda r: ((r.a,), None), unflatten=lambda _, parts: Room(*parts))


def test_an_outcome_refuses_functions_and_objects_without_room_for_what_it_writes():
    def counter(n):
        def f(step=1):
            return n

        return f

    def change(f):
        f.__defaults__ = (f.__defaults__[0] + 1,)

    outcome, leaves, nodes = outcome_of(change, counter(1))
    assert outcome.num_writes == 1
    with pytest.raises(ValueError, match="another type than function"):
        applied(outcome, leaves, [(lambda: 0) if callable(node) else node for node in nodes])

    outcome, leaves, nodes = outcome_of(lambda x: setattr(x, "extra", 1), Registered(f32(1), 1, "n"))
    with pytest.raises(ValueError, match="another type than Room"):
        applied(outcome, leaves, [Room(f32(1)) for _ in nodes])


def test_an_outcome_shows_what_it_holds():
    outcome, *_ = outcome_of(lambda x: x.append(x[0] + 1), [f32(1)])
    outcome.numbers, outcome.refs = [(0, 1)], [(0, 0)]
    outcome.alike = [[(0, [0]), (1, [0])]]
    assert (outcome.numbers, outcome.refs, outcome.alike) == ([(0, 1)], [(0, 0)], [[(0, [0]), (1, [0])]])
    assert outcome.num_writes == 1


class View:
    """Its unflatten reads what it is given."""

    def __init__(self, items):
        self.items, self.w, self.n = items, items["w"], len(items)


jax.tree_util.register_pytree_node(View, lambda v: ((v.items,), None), lambda _, children: View(*children))


@pytest.mark.parametrize("wrap", [lambda v, d: v, lambda v, d: {"v": [v], "again": v}, lambda v, d: View({"w": v})])
def test_an_unflatten_of_the_result_reads_what_the_call_has_written(wrap):
    def step(items, holder):
        items["w"] = items["w"] + 1
        items["more"] = items["w"] * 2
        holder.view = View(items)
        return wrap(View(items), items)

    f = graftax.jit(step)
    for _ in range(3):
        plain, jitted = {"w": jnp.ones(2)}, {"w": jnp.ones(2)}
        holders = Box(view=None), Box(view=None)
        wanted, result = step(plain, holders[0]), f(jitted, holders[1])
        assert oracle.difference([wanted, plain, holders[0]], [result, jitted, holders[1]]) is None
        assert (holders[1].view.n, holders[1].view.w.tolist()) == (2, [2, 2]) and holders[1].view.items is jitted
        view = result if isinstance(result, View) else result["v"][0]
        view = view.w if isinstance(view.w, View) else view
        assert (view.n, view.w.tolist(), view.items is jitted) == (2, [2, 2], True)
