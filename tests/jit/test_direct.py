# SPDX-License-Identifier: Apache-2.0
"""A call that runs its executable directly gives what `jax.jit` gives; where anything differs, `jax.jit` is asked."""

import gc
import pathlib
import queue
import subprocess
import sys
import textwrap
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from graftax._jax import fast_dispatch
from sizes import sized
from watchdog import python


def run(code, **environment):
    python(textwrap.dedent(code), **environment)


def entries(f):
    return list(f._table.entries.values())


def directs(f):
    """How many executables of the function's one structure are run directly; None where none can be."""
    [entry] = entries(f)
    return entry.direct


def warm(f, *args):
    for _ in range(3):
        out = f(*args)
    return out


def double(tree):
    return {name: x * 2 for name, x in tree.items()}


def tree(**more):
    return {"a": jnp.arange(3.0), "b": jnp.ones((2, 3)), "c": jnp.asarray(2), "d": jnp.zeros((), bool)} | more


@pytest.mark.quick(0)
def test_the_self_test_of_a_process_is_not_among_the_compilations_that_jax_logs():
    run("""
        import jax, jax.numpy as jnp, graftax, logging
        said = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("jax").addHandler(handler)
        x = jnp.ones(2)
        step = graftax.jit(lambda x: x * 2)
        with jax.log_compiles():
            x = step(step(x))
        assert len([text for text in said if text.startswith("Finished XLA compilation")]) == 1, said
    """)


def test_the_second_call_of_a_structure_goes_direct():
    f = graftax.jit(double)
    f(tree())
    assert directs(f) == 0
    f(tree())
    assert directs(f) == 1
    f(tree())
    assert directs(f) == 1 and f.cache_info().traces == 1


def test_results_are_those_of_jax_jit_in_every_attribute():
    values = tree(weak=jnp.asarray(1.0) + 0, key=jax.random.key(0), keys=jax.random.split(jax.random.key(1), (2, 2)))
    values["weak"] = jax.jit(lambda: 1.0)()

    def program(v):
        return {n: (jax.random.fold_in(x, 1) if n == "key" else x[0] if n == "keys" else x + x) for n, x in v.items()}

    f, expected = graftax.jit(program), jax.jit(program)(values)
    results = warm(f, values)
    assert directs(f) == 1
    for name, a in expected.items():
        b = results[name]
        assert type(a) is type(b) and a.aval == b.aval and a.sharding == b.sharding and a.committed == b.committed
        assert getattr(a, "weak_type", None) == getattr(b, "weak_type", None)
        a, b = (jax.random.key_data(x) if name.startswith("key") else x for x in (a, b))
        assert np.array_equal(a, b)


OTHER = {
    "shape": lambda x: jnp.ones((4,)),
    "dtype": lambda x: jnp.asarray([1, 2, 3]),
    "dtype of the same width": lambda x: jnp.asarray([1, 2, 3], "uint32"),
    "weak type": lambda x: jax.jit(lambda: jnp.broadcast_to(1.0, (3,)))(),
    "committed": lambda x: jax.device_put(x, jax.devices()[0]),
    "numpy": lambda x: np.arange(3, dtype="float32"),
    "key": lambda x: jax.random.key(2),
}


@pytest.mark.parametrize("other", OTHER)
def test_a_leaf_of_another_kind_is_never_given_to_the_known_executable(other):
    def program(t):
        x = t["a"]
        return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else (x + 1, jnp.sin(x)), t["b"] * 2

    f = graftax.jit(program)
    values = tree()
    warm(f, values)
    changed = values | {"a": OTHER[other](values["a"])}
    for _ in range(4):
        results, expected = f(changed), jax.jit(program)(changed)
        for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
            assert a.aval == b.aval and a.committed == b.committed
            if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                assert np.array_equal(a, b)
        assert np.array_equal(f(values)[0][0], values["a"] + 1)


def test_an_array_at_the_address_of_one_that_is_gone_is_looked_at():
    f = graftax.jit(lambda a, b: a["x"] * 2 + b)
    b = jnp.zeros(())
    for i in range(200):
        x = jnp.full((), i, "int32") if i % 3 else jnp.full((), i, "float32")
        out = f({"x": x}, b)
        assert out == 2 * i and out.dtype == (jnp.result_type(x, b))
        del x, out


@pytest.mark.quick(0)
@pytest.mark.parametrize(("shapes", "kept"), [(4, 4), (12, 12), (20, 0)])
def test_shapes_in_turn_go_direct_until_there_are_more_than_it_keeps(shapes, kept):
    f = graftax.jit(lambda t: t["a"].sum() + t["b"].sum())
    for _ in range(80 // shapes):
        for n in range(1, shapes + 1):
            assert f({"a": jnp.ones(n), "b": jnp.ones((n, 2))}) == 3 * n
    assert f.cache_info().traces == shapes and directs(f) == kept


@pytest.mark.quick(0)
def test_a_structure_with_many_shapes_is_looked_at_again_after_a_pause():
    f = graftax.jit(lambda x: x * 2)
    many = [jnp.ones(n) for n in range(1, 21)]
    for x in 8 * many:
        assert np.array_equal(f(x), x * 2)
    assert directs(f) == 0
    for _ in range(1200):
        f(many[3])
    assert directs(f) == 1 and np.array_equal(f(many[3]), many[3] * 2)


@pytest.mark.quick(0)
def test_few_leaves_wait_until_the_executable_is_worth_asking_for():
    run(
        """
        import jax.numpy as jnp, graftax
        f, g = graftax.jit(lambda x: x + 1), graftax.jit(lambda t: [x + 1 for x in t])
        for n in range(30):
            assert f(jnp.ones(3))[0] == 2 and g([jnp.ones(3)] * 4)[3][0] == 2
        direct = lambda f: [e.direct for e in f._table.entries.values()]
        assert direct(f) == [0] and direct(g) == [1]
        for n in range(10):
            assert f(jnp.ones(3))[0] == 2
        assert direct(f) == [1]
        """
    )


HOST = {
    "float32": np.linspace(0, 1, 6, dtype="float32").reshape(2, 3),
    "float64": np.linspace(0, 1, 6).reshape(2, 3),
    "int64": np.arange(6).reshape(2, 3),
    "bool": np.array([[True, False], [False, True]]),
    "bfloat16": np.ones((2, 2), jnp.bfloat16),
    "transposed": np.arange(6.0, dtype="float32").reshape(3, 2).T,
    "every other": np.arange(12.0, dtype="float32").reshape(4, 3)[::2],
    "empty": np.zeros((0, 3), "float32"),
    "no dimension": np.array(2.5),
    "scalar": np.float32(3),
    "scalar of 64 bits": np.float64(3),
    "integer scalar": np.int8(3),
    "bool scalar": np.bool_(True),
    "complex scalar": np.complex128(1 + 2j),
}


def with_x64(on):
    return jax.enable_x64(on) if callable(getattr(jax, "enable_x64", None)) else jax.experimental.enable_x64(on)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("name", HOST)
def test_a_numpy_leaf_is_what_jax_jit_makes_of_it(name, x64):
    def program(t):
        return t["x"], t["x"] + 1, t["x"] * t["c"], t["x"].sum()

    f, values = graftax.jit(lambda t: program(t)[1:]), tree(x=HOST[name])
    with with_x64(x64):
        expected = jax.jit(program)(values)[1:]
        results = warm(f, values)
    assert directs(f) == 1
    for a, b in zip(expected, results, strict=True):
        assert a.aval == b.aval and a.sharding == b.sharding and a.committed == b.committed and np.array_equal(a, b)


@pytest.mark.quick(0)
def test_a_numpy_leaf_of_another_shape_or_dtype_or_class_is_another_program():
    f = graftax.jit(lambda t: (t["x"] * 2, t["b"] + 1))
    others = [
        np.ones(3, "float32"),
        np.ones(3, "int32"),
        np.ones(4, "float32"),
        np.float32(1),
        np.int32(1),
        jnp.ones(3),
    ]
    for _ in range(4):
        for x in others:
            result, expected = f(tree(x=x))[0], jax.jit(lambda x: x * 2)(x)
            assert result.aval == expected.aval and np.array_equal(result, expected)
    assert directs(f) == len(others)


def test_a_numpy_leaf_may_be_written_to_as_soon_as_the_call_returns():
    f = graftax.jit(lambda t: (jnp.sin(t["x"]).sum(), t["x"] + t["a"][0]))
    for size in (1, 64, 50_000, 1_000_000):
        x = np.zeros(size, "float32")
        for i in range(8):
            x[:] = i
            total, moved = f(tree(x=x))
            x[:] = -1
            assert np.all(np.asarray(moved) == i) and np.isclose(total, np.sin(np.float32(i)) * size, rtol=1e-3)
    assert directs(f) == 4


def test_a_numpy_leaf_that_is_returned_is_the_callers_own():
    f, x = graftax.jit(lambda t: (t["x"], t["a"] + 1)), np.arange(3.0)
    for _ in range(4):
        assert f(tree(x=x))[0] is x
    assert directs(f) == 1


@pytest.mark.quick(0)  # an interpreter of its own, as the test of several devices
def test_a_numpy_leaf_goes_to_the_device_of_the_others():
    run(
        """
        import jax, jax.numpy as jnp, numpy as np, graftax
        from graftax._jax import fast_dispatch
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        fast_dispatch.start_from(1)
        f, x = graftax.jit(lambda w, x: w * x), np.arange(4.0)
        def check(w):
            for _ in range(4):
                found, expected = f(w, x), jax.jit(lambda w, x: w * x)(w, x)
                assert found.sharding == expected.sharding and found.committed == expected.committed
                assert np.array_equal(found, expected)
        check(jnp.ones(4))
        check(jax.device_put(jnp.ones(4), jax.devices()[3]))
        with jax.default_device(jax.devices()[2]):
            check(jnp.ones(4))
        [entry] = f._table.entries.values()
        assert entry.direct == 3, entry.direct
        check(jax.device_put(jnp.ones(4), NamedSharding(Mesh(np.array(jax.devices()), "x"), P())))
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )


def test_the_transfer_guard_holds_for_numpy_leaves():
    f, x = graftax.jit(lambda t: t["x"] + t["a"]), np.ones(3, "float32")
    values = tree(x=x)
    warm(f, values)
    assert directs(f) == 1
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match="Disallowed host-to-device"):
        f(values)
    assert np.array_equal(f(values), values["a"] + 1)


def test_a_numpy_leaf_that_is_donated_is_the_callers_still():
    f = graftax.jit(lambda t: {n: v + 1 for n, v in t.items()}, donate_argnums=0)
    x = np.zeros(3, "float32")
    for i in range(5):
        x[:] = i
        out = f({"x": x, "a": jnp.ones(3)})
        assert np.all(np.asarray(out["x"]) == i + 1) and np.all(x == i)
    assert directs(f) == 1


def test_a_deleted_input_is_named_by_its_path():
    f = graftax.jit(double)
    values = tree()
    warm(f, values)
    values["b"].delete()
    with pytest.raises((RuntimeError, ValueError), match=r"tree\['b'\].*delete"):
        f(values)
    assert np.array_equal(f(tree())["a"], tree()["a"] * 2)


def test_donated_leaves_are_gone_and_kept_state_goes_on():
    def step(state, x):
        for name in state:
            state[name] = state[name] + x

    f = graftax.jit(step, donate_argnums=0)
    state, x = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2))}, jnp.ones(())
    for i in range(1, 6):
        before = list(state.values())
        f(state, x)
        assert all(v.is_deleted() for v in before)
        assert all(np.all(np.asarray(v) == i) for v in state.values())
    assert directs(f) == 1 and not x.is_deleted()
    with pytest.raises((RuntimeError, ValueError), match=r"state\['a'\].*delete"):
        f({"a": before[0], "b": jnp.zeros((2, 2))}, x)
    f(state, x)
    assert np.all(np.asarray(state["a"]) == 6)


def test_changes_come_back_and_forwarded_leaves_are_the_callers_own():
    class Model:
        def __init__(self):
            self.w, self.b, self.name = jnp.zeros(3), jnp.ones(2), "m"

    def step(model, x):
        model.w = model.w + x
        return model, model.b

    f, model = graftax.jit(step), Model()
    b = model.b
    for i in range(1, 5):
        same, out = f(model, jnp.ones(3))
        assert same is model and out is b and model.b is b and np.all(np.asarray(model.w) == i)
    assert directs(f) == 1


def test_what_is_not_read_is_not_handed_over_and_what_is_unchanged_is_no_result():
    f, values = graftax.jit(lambda t: (t["a"] + 1, t["b"], t)), tree()
    sums, b, same = warm(f, values)
    [entry] = entries(f)
    _, handlers, kept, *_ = fast_dispatch.capture(entry.compiled, tuple(values.values()), tupled=False)
    assert kept == (0,) and len(handlers) == 1 and entry.direct == 1
    assert b is values["b"] and same is values and np.array_equal(sums, values["a"] + 1)
    unread = values | {"d": jnp.zeros((), "int8")}  # another dtype of what is not read is another program all the same
    assert f(unread)[2]["d"] is unread["d"] and f.cache_info().traces == 2


@pytest.mark.quick(0)
def test_an_array_free_config_is_a_static_tuple_or_is_looked_at_again():
    config = {"sizes": tuple((i, str(i)) for i in range(1000)), "rate": [1]}
    f = graftax.jit(lambda t, c: t["a"] * c["rate"][0] + len(c["sizes"]))
    for _ in range(4):
        assert f(tree(), config)[0] == 1000
    config["rate"][0] = 2
    assert f(tree(), config)[1] == 1002 and f.cache_info().traces == 2
    config["sizes"] = config["sizes"][1:]
    assert f(tree(), config)[1] == 1001 and f.cache_info().traces == 3


def test_programs_with_callbacks_or_refs_stay_with_jax_jit():
    printed = queue.SimpleQueue()

    def program(t):
        jax.debug.callback(lambda v: printed.put(int(v)), t["a"][0])
        return t["a"] + 1

    f = graftax.jit(program)
    for i in range(4):
        f({"a": jnp.full(3, i), "b": jnp.ones(2)})
    jax.effects_barrier()
    assert sorted(printed.get(timeout=10) for _ in range(4)) == [0, 1, 2, 3] and directs(f) is None


@pytest.mark.quick(0)
def test_clear_caches_lets_go_of_the_executables():
    f = graftax.jit(double)
    warm(f, tree())
    assert directs(f) == 1
    jax.clear_caches()
    assert np.array_equal(f(tree())["a"], tree()["a"] * 2)
    assert directs(f) == 0 and f.cache_info().traces == 2
    warm(f, tree())
    assert directs(f) == 1


def test_inside_a_trace_of_jax_the_call_is_part_of_that_trace():
    f, constants = graftax.jit(double), tree()
    warm(f, constants)
    assert directs(f) == 1
    jaxpr = jax.make_jaxpr(lambda y: f(constants)["a"] + y)(1.0)
    assert "mul" in str(jaxpr)  # the product is computed when the outer program runs
    assert np.array_equal(jax.vmap(lambda y: f(constants)["a"] * y)(jnp.arange(2.0))[1], constants["a"] * 2)
    assert jax.grad(lambda y: (f(constants)["a"] * y).sum())(1.0) == constants["a"].sum() * 2


def test_debug_nans_is_asked_on_every_call():
    f = graftax.jit(lambda t: t["a"] / t["b"])
    values = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    assert np.isnan(warm(f, values)).all()
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        f(values)
    assert np.isnan(f(values)).all()


@pytest.mark.parametrize(
    "setting", ["enable_x64", "matmul_precision", "default_device", "log_compiles", "transfer_guard"]
)
def test_a_setting_that_changes_between_calls_is_followed(setting, caplog):
    f = graftax.jit(lambda t: (t["a"] @ t["a"], jnp.arange(3) * 1.5))
    values = {"a": jnp.ones((4, 4)), "b": jnp.ones(2)}
    contexts = {
        "enable_x64": lambda: jax.enable_x64(True),
        "matmul_precision": lambda: jax.default_matmul_precision("highest"),
        "default_device": lambda: jax.default_device(jax.devices()[0]),
        "log_compiles": lambda: jax.log_compiles(True),
        "transfer_guard": lambda: jax.transfer_guard("disallow"),
    }
    plain = warm(f, values)
    if setting == "enable_x64" and not callable(getattr(jax, "enable_x64", None)):
        contexts["enable_x64"] = lambda: jax.experimental.enable_x64(True)
    with contexts[setting]():
        inside = warm(f, values)
    assert inside[1].dtype == ("float64" if setting == "enable_x64" else "float32")
    assert np.array_equal(inside[0], plain[0])
    again = f(values)
    assert again[1].dtype == "float32"


def test_eight_threads_share_one_structure():
    f = graftax.jit(lambda t: {n: x + 1 for n, x in t.items()})
    wrong = []

    def work(k):
        for i in range(50):
            out = f({"a": jnp.full(3, k * 100 + i), "b": jnp.full((2, 2), k)})
            if int(out["a"][0]) != k * 100 + i + 1 or int(out["b"][0, 0]) != k + 1:
                wrong.append((k, i))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == [] and directs(f) == 1


def test_neither_leaves_nor_the_function_are_kept_alive():
    def make():
        offset = 1
        return graftax.jit(lambda t: t["a"] + offset)

    f = make()
    values = tree()
    warm(f, values)
    assert directs(f) == 1
    leaf, function = weakref.ref(values["b"]), weakref.ref(f.__wrapped__)
    del values
    assert leaf() is None
    del f
    gc.collect()
    assert function() is None


@pytest.mark.quick(0)
def test_it_is_right_over_several_devices():
    run(
        """
        import jax, jax.numpy as jnp, numpy as np, graftax
        from graftax._jax import fast_dispatch
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        fast_dispatch.start_from(1)
        assert fast_dispatch.status() == "on" and len(jax.devices()) == 8
        mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
        put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
        f = graftax.jit(lambda t: {n: v * 2 for n, v in t.items()})
        def values(*spec):
            return {"a": put(jnp.arange(16.0).reshape(8, 2), *spec), "b": put(jnp.ones(8), "x")}
        for spec in ((("x"), "y"), ("x",), (None, "y"), (), ("x", "y")):
            for _ in range(3):
                t = values(*spec)
                found, expected = f(t), jax.jit(lambda t: {n: v * 2 for n, v in t.items()})(t)
                for n in t:
                    assert found[n].sharding == expected[n].sharding and np.array_equal(found[n], expected[n])
        [entry] = f._table.entries.values()
        assert entry.direct and entry.direct > 1, entry.direct
        other = jax.device_put({"a": jnp.ones((8, 2)), "b": jnp.ones(8)}, jax.devices()[3])
        for _ in range(3):
            assert f(other)["a"].devices() == {jax.devices()[3]}
        mixed = {"a": jax.device_put(jnp.ones(3), jax.devices()[1]), "b": jax.device_put(jnp.ones(3), jax.devices()[2])}
        for _ in range(3):
            try:
                f(mixed)
            except ValueError as error:
                assert "incompatible devices" in str(error), error
            else:
                raise AssertionError("arrays on two devices were taken")
        keys = jax.random.split(jax.random.key(0), 8)
        g = graftax.jit(lambda k: jax.random.key_data(k["k"]) + 1)
        for _ in range(3):
            k = {"k": jax.device_put(keys, NamedSharding(mesh, P("x")))}
            assert np.array_equal(g(k), jax.random.key_data(keys) + 1)
        assert [entry.direct for entry in g._table.entries.values()] == [1]
        loose = {"a": jnp.ones((8, 2)), "b": jnp.ones(8)}
        with jax.default_device(jax.devices()[5]):
            for _ in range(3):
                there = {"a": jnp.ones((8, 2)), "b": jnp.ones(8)}
                assert f(there)["a"].devices() == {jax.devices()[5]} and not f(there)["a"].committed
        assert f(loose)["a"].devices() == {jax.devices()[0]}
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )


def test_a_layout_of_its_own_is_seen():
    from jax.experimental.layout import Format, Layout

    f = graftax.jit(lambda t: (t["a"] * 2, t["b"] + 1))
    a = jnp.arange(6.0).reshape(2, 3)
    values = {"a": a, "b": jnp.ones(2)}
    warm(f, values)
    turned = jax.device_put(a, Format(Layout((1, 0)), a.sharding))
    for _ in range(3):
        assert np.array_equal(f({"a": turned, "b": jnp.ones(2)})[0], a * 2)
        assert np.array_equal(f(values)[0], a * 2)


@pytest.mark.quick(0)
def test_results_that_come_back_as_leaves_are_told_from_others():
    from jax.experimental.layout import Format, Layout

    f = graftax.jit(
        lambda t: {"a": t["b"] * 2, "b": t["a"].T + 1}
    )  # a result of one leaf's shape comes back as the other
    a, b = jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 3))
    g = graftax.jit(lambda t: {"a": t["a"] + t["b"], "b": t["b"] * 2})
    turned = jax.device_put(a, Format(Layout((1, 0)), a.sharding))
    state, expected = {"a": a, "b": b}, {"a": np.asarray(a), "b": np.asarray(b)}
    for i in range(40):
        if i % 7 == 3:
            state["a"] = state["a"] + 0  # not a result of the call before
        if i % 11 == 5:
            state["b"] = jax.device_put(state["b"], turned.format)
        if i % 13 == 6:
            state["a"] = jnp.asarray(np.asarray(state["a"]), "float32")
        if i % 17 == 9:
            state = {"a": state["b"], "b": state["a"]}
            expected = {"a": expected["b"], "b": expected["a"]}
        state = g(state)
        expected = {"a": expected["a"] + expected["b"], "b": expected["b"] * 2}
        assert all(np.allclose(state[n], expected[n]) for n in state)
    state = {"a": jnp.ones((2, 3)), "b": jnp.ones((3, 2))}
    for _ in range(8):  # shapes change places: the known result is never taken for the other leaf
        previous, state = state, f(state)
        assert state["a"].shape == previous["b"].shape and np.array_equal(state["b"], previous["a"].T + 1)
    old = weakref.ref(state["a"])
    del state, previous
    assert old() is None


@pytest.mark.quick(0)  # an interpreter of its own; the tests on Python 3.11 run without direct calls
def test_the_environment_turns_it_off():
    run(
        """
        import jax.numpy as jnp, graftax
        from graftax._jax import fast_dispatch
        fast_dispatch.start_from(1)
        f = graftax.jit(lambda t: t["a"] + t["b"])
        for _ in range(4):
            assert f({"a": jnp.ones(()), "b": jnp.ones(())}) == 2
        assert [e.direct for e in f._table.entries.values()] == [0]
        assert fast_dispatch.status() == "off: GRAFTAX_DIRECT_DISPATCH=0"
        """,
        GRAFTAX_DIRECT_DISPATCH="0",
    )


@pytest.mark.quick(0)
def test_a_jax_that_gives_something_else_turns_it_off():
    run(
        """
        import jax.numpy as jnp, graftax
        from graftax._jax import fast_dispatch
        captured = fast_dispatch._capture_executable
        fast_dispatch._capture_executable = lambda *a, **k: (lambda c: (*c[:3], c[3] + 1, c[4]))(captured(*a, **k))
        f = graftax.jit(lambda t: {n: x + 1 for n, x in t.items()})
        for _ in range(4):
            assert f({n: jnp.ones(()) for n in "abcdef"})["a"] == 2
        assert fast_dispatch.status().startswith("off: the self-test failed on JAX"), fast_dispatch.status()
        assert [e.direct for e in f._table.entries.values()] == [None]
        """
    )


@pytest.mark.quick(0)
def test_a_jax_that_lacks_a_private_name_costs_only_what_depends_on_it():
    program = [sys.executable, str(pathlib.Path(__file__).parents[1] / "support" / "private_names.py")]
    told = ["trace_ctx", "register_weak_scalar_type", "ArrayImpl", "trace_state_clean", "config.config", "global_state"]
    few = sized([], [*told, "config.trace_context"])
    done = subprocess.run([*program, *few], text=True, capture_output=True, timeout=600)
    assert done.returncode == 0 and "names missing in turn" in done.stdout, done.stdout


def test_threads_that_ask_for_one_executable_at_the_same_time_run_it_as_it_is(capfd):
    barrier = threading.Barrier(4)

    def steps(f):
        a, b = jnp.zeros(5), jnp.zeros(6)
        for _ in range(6):
            barrier.wait()
            a, b = f(a, b)
        results.append((float(a[0]), float(b[0])))

    for _ in range(sized(20, 5)):
        results = []
        shared = graftax.jit(lambda a, b: (a + 1, b + 1))
        threads = [threading.Thread(target=steps, args=[shared]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [(6.0, 6.0)] * 4
    assert "supplied" not in capfd.readouterr().err  # what XLA logs of a call with another number of arguments
