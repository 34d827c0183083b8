# SPDX-License-Identifier: Apache-2.0
"""`ignore=`: what a function does not read is not compared, not walked, and cannot be read by mistake."""

import logging
import threading
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax

BAG = SimpleNamespace(w=jnp.ones(2), history=[])


def read_by_a_helper(x):
    return x + BAG.w


def bag(**more):
    return SimpleNamespace(w=jnp.ones(2), history=[], **more)


def test_what_is_ignored_may_change_and_is_refused_nothing():
    b = bag(data=iter(range(9)), log=logging.getLogger("x"))
    data, history = b.data, b.history

    @graftax.jit(ignore=["**.history", "b.data"])
    def step(b, x):
        b.w = b.w + x
        return b.w.sum()

    for i in range(4):
        b.history.append(step(b, 1.0))
        assert next(b.data) == i
    assert step.cache_info().traces == 1 and step.cache_info().hits == 3
    assert b.data is data and b.history is history and b.w.tolist() == [5, 5]
    with pytest.raises(graftax.UnsupportedValueError, match=r"b\.data.*test_ignore.py:.*ignore='b.data'"):
        graftax.jit(lambda b: next(b.data), ignore="**.history")(b)


class Loader:
    def __init__(self):
        self.rng, self.rows, self.lock = np.random.default_rng(0), iter(range(9)), threading.Lock()


class Trainer:
    def __init__(self):
        self.w, self.loader, self.last, self.n = jnp.ones(2), Loader(), None, 0
        self.rng = self.loader.rng

    @graftax.jit
    def step(self, x):
        self.w, self.n, self.last = self.w + x, self.n + 1, self.rng
        return self.rng is self.loader.rng, self.rng is None, self.w.sum()


def test_a_value_that_is_refused_may_be_there_as_long_as_nobody_asks_it():
    trainer = Trainer()
    loader, rng, rows = trainer.loader, trainer.rng, trainer.loader.rows
    for n in range(1, 5):
        assert trainer.step(1.0) == (True, False, 2 + 2 * n)
        assert trainer.loader is loader and trainer.rng is trainer.last is rng and loader.rows is rows
    trainer.loader.rng = trainer.rng = trainer.last = np.random.default_rng(1)
    before = Trainer.step.cache_info().traces
    assert trainer.step(1.0)[2] == 12 and Trainer.step.cache_info().traces == before


def test_a_use_whose_error_the_function_catches_is_an_error_all_the_same():
    def f(trainer, x):
        try:
            return x * next(trainer.loader.rows)
        except TypeError:
            return x

    with pytest.raises(graftax.UnsupportedValueError, match=r"trainer\.loader\.rows"):
        graftax.jit(f)(Trainer(), jnp.ones(1))
    with pytest.raises(graftax.IgnoredValueError, match=r"^t is ignored"):
        graftax.jit(lambda t, x: f(SimpleNamespace(loader=t), x), ignore="t")(Loader(), jnp.ones(1))


def test_check_leaves_what_is_refused_alone():
    loader, w = Loader(), jnp.ones(2)
    assert graftax.jit(lambda loader, w: w * 2, check=True)(loader, w).tolist() == [2, 2]


USES = {
    "attribute": lambda v: v.x,
    "method": lambda v: v.append(1),
    "assignment": lambda v: setattr(v, "x", 1),
    "length": len,
    "truth": bool,
    "hash": hash,
    "key": lambda v: {v: 1},
    "text": str,
    "format": lambda v: f"{v}",
    "equality": lambda v: v == [],
    "sum": lambda v: [1] + v,
    "item": lambda v: v[0],
    "unpacking": lambda v: [*v],
    "call": lambda v: v(),
    "class": lambda v: isinstance(v, list),
    "hasattr": lambda v: hasattr(v, "append"),
    "array": jnp.asarray,
    "tree": lambda v: jax.tree.map(lambda a: a * 2, v),
}


@pytest.mark.parametrize("use", USES)
def test_a_look_at_it_raises_with_its_path(use):
    f = graftax.jit(lambda b: USES[use](b.history), ignore="**.history")
    with pytest.raises(graftax.IgnoredValueError, match=r"b\.history is ignored"):
        f(bag())


def test_it_may_be_kept_moved_returned_and_replaced():
    @graftax.jit(ignore="**.history")
    def move(b):
        b.old, b.history = b.history, [b.w]
        return b.old, {"again": b.old}

    for _ in range(2):
        b = bag()
        before = b.history
        first, second = move(b)
        assert first is before and second["again"] is before and b.old is before
        assert b.history[0].tolist() == [1, 1]
    assert move.cache_info().traces == 1


def test_in_containers_it_is_given_back_where_it_was_put():
    d = {"p": (jnp.ones(2), iter([1])), "q": [iter([2]), 5]}
    pair, listed = d["p"][1], d["q"][0]

    @graftax.jit(ignore=["d[p][1]", "d[q][0]"])
    def f(d):
        d["p"] = (d["p"][0] * 2, d["p"][1])
        d["q"].reverse()
        return d["p"]

    assert f(d)[1] is pair and d["p"][1] is pair and d["q"] == [5, listed]


def test_by_type_and_by_predicate():
    f = graftax.jit(lambda d, x: x + d["a"], ignore=(logging.Logger, lambda v: hasattr(v, "__next__")))
    for name in "ab":
        assert f({"a": 1.0, "log": logging.getLogger(name), "it": iter([name])}, 1.0) == 2
    assert f.cache_info().traces == 1


def test_by_type_in_modules_and_registered_classes():
    class Model(eqx.Module):
        w: jax.Array
        log: list = eqx.field(static=True)

    @graftax.jit(ignore=list)
    def f(m):
        return m, m.w * 2

    m = Model(jnp.ones(2), [1])
    out, _ = f(m)
    m.log.append(2)
    assert f(m)[0].log is m.log and out.log is m.log and f.cache_info().traces == 1


def test_none_is_seen():
    f = graftax.jit(lambda b: b.w if b.history is None else b.w * 2, ignore="**.history")
    b = bag()
    b.history = None
    assert f(b).tolist() == [1, 1]
    for b.history in ([], [3]):
        assert f(b).tolist() == [2, 2]
    assert f.cache_info().traces == 2


def test_what_is_captured_is_ignored_too():
    history, model = [], bag()

    @graftax.jit(ignore=["history", "model.history", "BAG.history"])
    def f(x):
        return read_by_a_helper(x) + model.w, history

    for _ in range(3):
        y, same = f(jnp.ones(2))
        assert same is history and y.tolist() == [3, 3]
        history.append(y)
        model.history.append(1)
        BAG.history.append(jnp.ones(3))
    assert f.cache_info().traces == 1


def test_objects_without_arrays_do_not_show_it():
    f = graftax.jit(lambda c, x: x * len(c.history), ignore="**.history")
    with pytest.raises(graftax.IgnoredValueError, match=r"c\.history"):
        f(SimpleNamespace(n=1, history=[1]), 1.0)


def test_transforms_inside_leave_it_alone():
    b = bag()
    b.history = iter([1])

    @graftax.jit(ignore="**.history")
    def f(b):
        def body(total, _):
            b.w = b.w + 1
            return total, b.w

        grads = graftax.grad(lambda b: (b.w**2).sum())(b)
        graftax.scan(body, 0.0, None, length=3)
        return grads.w, graftax.checkpoint(lambda b: b.w)(b), graftax.cond(True, lambda b: b.w, lambda b: -b.w, b)

    assert [v.tolist() for v in f(b)] == [[2, 2], [4, 4], [4, 4]] and next(b.history) == 1


OPTIONS = [{"check": True}, {"donate": "all"}, {"mutation": "error"}, {"mutation": "discard"}]


@pytest.mark.parametrize("options", OPTIONS)
def test_with_other_options(options):
    f = graftax.jit(lambda b, x: (b.w * x, b.history), ignore="**.history", **options)
    b = bag()
    for k in range(3):
        y, same = f(bag(), 2.0) if "donate" in options else f(b, 2.0)
        assert y.tolist() == [2, 2] and ("donate" in options or same is b.history)
        b.history.append(k)
    assert f.cache_info().traces == 1


def test_by_value_and_ahead_of_time():
    b = bag()
    f = graftax.filter_jit(lambda b: SimpleNamespace(w=b.w * 2, history=b.history), ignore="**.history")
    assert f(b).history is b.history
    g = graftax.jit(lambda b: b.w * 2, ignore="**.history")
    run = g.lower(b).compile()
    b.history.append(1)
    assert run(b).tolist() == [2, 2] and g.eval_shape(b).shape == (2,)


def test_numbers_beside_it_are_symbolic():
    @graftax.jit(ignore="**.history")
    def f(b):
        b.step += 1
        return b.w * b.step

    b = bag(step=0)
    for _ in range(6):
        b.history.append(f(b))
    assert b.step == 6 and f.cache_info().traces == 1


def test_a_pattern_of_an_argument_that_means_nothing_is_an_error():
    with pytest.raises(graftax.StructureError, match=r"'b\.histroy' of ignore= matches nothing"):
        graftax.jit(lambda b: b.w, ignore="b.histroy")(bag())
    with pytest.raises(TypeError, match="ignore=5"):
        graftax.jit(lambda b: b.w, ignore=5)


@pytest.mark.parametrize("other", [True, 3, "text", jnp.ones(()), (), iter(())], ids=lambda v: type(v).__name__)
def test_a_value_of_another_type_in_the_place_of_a_refused_one_is_another_program(other: Any):
    @graftax.jit
    def f(x: Any, source: Any) -> Any:
        return x if source is True else x * 2

    assert f(jnp.ones(()), iter([1])) == f(jnp.ones(()), iter([2])) == 2
    assert f(jnp.ones(()), other) == (1 if other is True else 2)


def test_which_refused_values_are_one_object_is_part_of_the_program():
    a, b = iter([1]), iter([2])
    f = graftax.jit(lambda first, second, x: x if first is second else x * 2)
    assert [f(*pair, 1.0) for pair in ((a, b), (a, a), (b, a), (b, b))] == [2.0, 1.0, 2.0, 1.0]


def test_arrays_can_be_passed_where_a_refused_value_raised():
    step, batches = graftax.jit(lambda x: x.sum()), iter([jnp.ones(3), jnp.zeros(3)])
    with pytest.raises(graftax.UnsupportedValueError, match="list"):
        step(batches)
    assert [step(batch) for batch in batches] == [3, 0]
