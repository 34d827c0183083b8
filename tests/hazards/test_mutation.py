# SPDX-License-Identifier: Apache-2.0
"""Mutation where it hurts: under transformations, through captured state, in calls that fail."""

import gc
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
import oracle
from sizes import sized
from watchdog import isolated
from zoo import Box, f32, scalar


def has_tracer(*graphs):
    return any(isinstance(x, jax.core.Tracer) for x in oracle.reachable(list(graphs))[1])


# ── under transformations ──


def test_mutation_inside_grad():
    @graftax.jit
    def inner(box):
        box.w = box.w * 3
        box.log.append("seen")
        return box.w.sum()

    def loss(w, log):
        box = Box(w=w, log=log)
        inner(box)
        return (box.w * 2).sum()

    for _ in range(2):
        log = []
        assert jax.grad(loss)(f32(1), log).tolist() == [6.0]
        assert log == ["seen"]


def test_mutation_inside_vmap():
    @graftax.jit
    def inner(box):
        box.w = box.w + 1
        box.seen = box.w * 2

    def f(w):
        box = Box(w=w)
        inner(box)
        return box.seen

    for _ in range(2):
        assert jax.vmap(f)(jnp.arange(3.0)).tolist() == [2.0, 4.0, 6.0]


def test_mutation_inside_scan_and_checkpoint():
    @graftax.jit
    def inner(box):
        box.w = box.w * 2
        return box

    def body(carry, _):
        return jax.checkpoint(lambda c: inner(Box(w=c)).w)(carry), None

    assert float(jax.lax.scan(body, scalar(1.0), None, length=4)[0]) == 16.0


def test_mutation_of_a_graph_local_to_an_outer_jit():
    @graftax.jit
    def inner(g):
        g["w"] = g["w"] + 1
        g["new"] = [g["w"]]

    @jax.jit
    def outer(w):
        g = {"w": w}
        inner(g)
        inner(g)
        return g["w"] + g["new"][0]

    assert outer(f32(1)).tolist() == [6.0]
    assert outer(f32(2)).tolist() == [8.0]


def test_grad_inside_with_mutation_outside_of_it():
    @graftax.jit
    def step(model):
        grad = jax.grad(lambda w: (w**2).sum())(model.w)
        model.w = model.w - 0.25 * grad
        model.history.append(grad)

    model = Box(w=f32(4), history=[])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            step(model)
    assert model.w.tolist() == [0.5]
    assert [g.tolist() for g in model.history] == [[8.0], [4.0], [2.0]]


# ── captured state ──

GLOBAL_LOG: list = []


def test_mutation_through_a_closure_a_default_or_a_global_is_propagated_or_refused():
    closed: list = []

    def closure(x):
        closed.append(x)

    def default(x, log=[]):  # noqa: B006
        log.append(x)

    def through_global(x):
        GLOBAL_LOG.append(x)

    GLOBAL_LOG.clear()
    for f, log in ((closure, closed), (default, default.__defaults__[0]), (through_global, GLOBAL_LOG)):
        jitted = graftax.jit(f)
        for count in (1, 2):
            try:
                jitted(f32(count))
            except graftax.GraftaxError:
                assert not has_tracer(log)
                break
            assert not has_tracer(log)
            assert [x.tolist() for x in log] == [[float(i + 1)] for i in range(count)]
    GLOBAL_LOG.clear()


def test_a_captured_object_that_is_changed_is_propagated_or_refused():
    model = Box(w=f32(1), n=0)

    @graftax.jit
    def step(x):
        model.w = model.w + x
        model.n += 1
        return model.w

    for count in (1, 2, 3):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                out = step(f32(1))
        except graftax.GraftaxError:
            assert not has_tracer(model)
            break
        assert not has_tracer(model)
        assert (model.w.tolist(), model.n, out.tolist()) == ([1.0 + count], count, [1.0 + count])


# ── failures ──


def wreck(g, x):
    g["list"].append(x)
    g["list"][0] = x
    g["dict"].clear()
    g["box"].w = x
    g["box"].new = [x]
    g["free"].n = x
    g["free"].names.append(x)
    g["set"].add(9)
    g["bytes"].append(1)
    g["again"] = g["list"]
    del g["tuple"]


def sample():
    return {
        "list": [f32(1), 2],
        "dict": {"a": f32(1)},
        "box": Box(w=f32(2), inner={"k": [f32(3)]}),
        "free": Box(n=1, names=["a"]),
        "set": {1},
        "bytes": bytearray(b"a"),
        "tuple": ([1], f32(1)),
    }


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, MemoryError, RecursionError])
def test_an_exception_after_mutations_leaves_no_trace_of_them(kind):
    error = kind("no")

    @graftax.jit
    def f(g, x):
        wreck(g, x)
        raise error

    g, memo = sample(), {}
    copy = oracle.deep_copy(g, memo=memo)
    pairs = [pair for pair in memo.values() if oracle.is_mutable(pair[0])]
    for _ in range(2):
        with pytest.raises(kind) as caught:
            f(g, f32(5))
        assert caught.value is error
        assert oracle.difference(g, copy, pairs) is None
        assert not has_tracer(g)


def test_an_error_of_xla_after_mutations_leaves_no_trace_of_them():
    f = graftax.jit(wreck, compiler_options={"no_such_option": True})
    g = sample()
    with pytest.raises(Exception, match="no_such_option"):
        f(g, f32(5))
    assert oracle.difference(sample(), g) is None


def test_a_call_after_a_failed_one_is_fine():
    @graftax.jit
    def f(g, x, fail):
        wreck(g, x)
        if fail:
            raise ValueError("no")

    g, plain = sample(), sample()
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            f(g, f32(5), True)
    f(g, f32(5), False)
    wreck(plain, f32(5))
    assert oracle.difference(plain, g) is None


def test_nothing_is_donated_by_a_failed_trace():
    @graftax.jit(donate_argnums=0)
    def f(g, x):
        g["w"] = g["w"] + x
        raise ValueError("no")

    g = {"w": jnp.ones(64)}
    with pytest.raises(ValueError, match="no"):
        f(g, jnp.ones(64))
    assert not g["w"].is_deleted() and g["w"].tolist() == [1.0] * 64


@pytest.mark.quick(0)
@isolated()
def test_three_hundred_raising_calls_keep_nothing_alive():
    import weakref

    @graftax.jit
    def f(box, x):
        box.w = x
        raise ValueError("no")

    boxes = []
    for i in range(sized(300, 50)):
        box = Box(w=f32(1), n=i)
        with pytest.raises(ValueError, match="no"):
            f(box, f32(1))
        boxes.append(weakref.ref(box))
        del box
    gc.collect()
    assert [ref for ref in boxes if ref() is not None] == []


# ── tracers left behind ──


def test_no_tracer_is_left_in_arguments_or_results():
    @graftax.jit
    def f(g, x):
        wreck(g, x)
        return {"x": [x], "again": (x, Box(x=x))}

    for _ in range(2):
        g = sample()
        out = f(g, f32(1))
        assert not has_tracer(g, out)


def test_a_tracer_of_an_inner_transformation_that_escapes_is_an_error():
    @graftax.jit
    def f(box):
        def loss(w):
            box.leak = w * 2
            return (w**2).sum()

        jax.grad(loss)(box.w)

    box = Box(w=f32(1))
    with pytest.raises((graftax.GraftaxError, jax.errors.UnexpectedTracerError)):
        f(box)
    assert oracle.same_graph(box, Box(w=f32(1)))


def test_an_attribute_that_is_set_by_a_computed_name_is_set_by_each_call():
    class Holder:
        kept = None

        def use(self):
            return self.kept

    @graftax.jit
    def f(x):
        setattr(Holder, "_tpek"[:0:-1], x)
        return x

    for value in (1.0, 2.0):
        f(f32(1) * value)
        np.testing.assert_array_equal(Holder.kept, f32(1) * value)


# ── results that are fresh ──


def test_fresh_sets_lists_and_objects_are_fresh_in_every_call():
    f = graftax.jit(lambda x: ({1}, [x], Box(n=1), bytearray(b"a"), {"k": {2}}))
    results = [f(f32(1)) for _ in range(3)]
    for column in zip(*results, strict=True):
        assert len({id(x) for x in column}) == 3
    assert len({id(result[4]["k"]) for result in results}) == 3


def test_a_new_node_written_into_an_argument_is_fresh_in_every_call():
    f = graftax.jit(lambda g, x: g.append([x, {1}]))
    first, second = [], []
    f(first, f32(1))
    f(second, f32(1))
    assert first[0] is not second[0] and first[0][1] is not second[0][1]


def test_a_static_object_that_is_returned_is_the_callers():
    f = graftax.jit(lambda config, x: (x, config, [config.inner]))
    for _ in range(3):
        config = Box(inner=[1])
        out = f(config, f32(1))
        assert out[1] is config and out[2][0] is config.inner


def test_write_backs_run_no_user_code():
    class Guarded:
        def __init__(self, w):
            self.__dict__["w"] = w

        def __setattr__(self, name, value):
            if not isinstance(value, jax.core.Tracer):
                raise AssertionError("the user's __setattr__ ran outside of the function")
            self.__dict__[name] = value

        def use(self):
            return self.w

    class Strict(list):
        def append(self, item):
            if not isinstance(item, jax.core.Tracer):
                raise AssertionError("the user's append ran outside of the function")
            list.append(self, item)

        __setitem__ = extend = insert = clear = pop = __delitem__ = __iadd__ = None

    @graftax.jit
    def f(guarded, strict):
        guarded.w = guarded.w + 1
        strict.append(guarded.w)

    for _ in range(2):
        guarded, strict = Guarded(f32(1)), Strict()
        f(guarded, strict)
        assert guarded.use().tolist() == [2.0] and strict[0].tolist() == [2.0]


@isolated()
def test_a_finaliser_that_runs_during_the_write_back_sees_a_finished_graph():
    seen = []
    g = {}

    class Final:
        def __init__(self):
            self.name = "final"

        def use(self):
            return self.name

        def __del__(self):
            seen.append((len(g["list"]), sorted(g)))
            g["list"].append("from __del__")

    g.update(list=[Final(), f32(1)], w=f32(2))

    @graftax.jit
    def f(g):
        g["list"][:] = [g["w"] * 2]
        g["new"] = g["list"][0]

    f(g)
    gc.collect()
    assert seen[:1] == [(1, ["list", "new", "w"])]
    assert g["list"][0].tolist() == [4.0]


@isolated()
def test_a_function_that_calls_itself_on_the_same_graph():
    log = []

    @graftax.jit
    def f(g, n):
        g["w"] = g["w"] + 1
        g["n"].append(n)
        if n:
            f(g, n - 1)
        return g["w"]

    for _ in range(2):
        g = {"w": f32(0), "n": []}
        log.append(f(g, 3).tolist())
        assert g["w"].tolist() == [4.0] and g["n"] == [3, 2, 1, 0]
    assert log == [[4.0], [4.0]]
