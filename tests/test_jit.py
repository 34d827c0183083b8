# SPDX-License-Identifier: Apache-2.0
"""``graftax.jit``: arrays traced, the rest static, one trace for every spelling of a call."""

import functools
import gc
import inspect
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
import oracle
import zoo
from zoo import Box, Data, f32, scalar


def traces(jitted):
    return jitted.cache_info().traces


# ── what is traced ──


def test_arrays_are_traced_and_the_rest_is_static():
    @graftax.jit
    def f(x, n, name, flags):
        assert isinstance(x, jax.core.Tracer)
        assert (type(n), type(name), flags) == (int, str, {"deep": (True, None)})
        return x * n

    assert f(f32(2), 3, "x", {"deep": (True, None)}).tolist() == [6.0]
    assert f(f32(5), 3, "x", {"deep": (True, None)}).tolist() == [15.0]
    assert traces(f) == 1
    assert f(f32(2), 4, "x", {"deep": (True, None)}).tolist() == [8.0]
    assert traces(f) == 2


def test_python_control_flow_on_statics():
    @graftax.jit
    def f(config, x):
        for layer in config["layers"]:
            x = x + layer if config["add"] else x * layer
        return x

    assert f({"layers": [1, 2], "add": True}, f32(1)).tolist() == [4.0]
    assert f({"layers": [1, 2], "add": False}, f32(1)).tolist() == [2.0]


def test_numpy_arrays_and_scalars_are_traced():
    @graftax.jit
    def f(x, y):
        assert isinstance(x, jax.core.Tracer) and isinstance(y, jax.core.Tracer)
        return x + y

    assert f(np.ones(2, np.float32), np.float32(1)).tolist() == [2.0, 2.0]
    assert f(np.zeros(2, np.float32), np.float32(5)).tolist() == [5.0, 5.0]
    assert traces(f) == 1


def test_typed_keys_are_traced():
    f = graftax.jit(lambda key: jax.random.normal(key, (2,)))
    for seed in range(3):
        key = jax.random.key(seed)
        assert np.array_equal(f(key), jax.random.normal(key, (2,)))
    assert traces(f) == 1


def test_arrays_inside_unregistered_objects_are_traced():
    f = graftax.jit(lambda box: box.w * box.n)
    assert f(Box(w=f32(2), n=3)).tolist() == [6.0]
    assert f(Box(w=f32(4), n=3)).tolist() == [12.0]
    assert traces(f) == 1
    assert f(Box(w=f32(4), n=2)).tolist() == [8.0]
    assert traces(f) == 2


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_every_kind_goes_in_and_out(build):
    graph = build()
    f = graftax.jit(lambda x: x)
    for _ in range(2):
        assert oracle.difference(build(), f(graph)) is None
        assert oracle.difference(build(), graph) is None
    assert traces(f) == 1


# ── outputs ──


def test_outputs_mix_arrays_and_statics():
    @graftax.jit
    def f(x):
        return {"y": x + 1, "name": "out", "shape": x.shape, "n": 3, "none": None, "flag": True}

    for value in (1.0, 2.0):
        y = f(scalar(value))
        assert float(y.pop("y")) == value + 1
        assert y == {"name": "out", "shape": (), "n": 3, "none": None, "flag": True}
        assert type(y["flag"]) is bool and type(y["n"]) is int


def test_static_only_outputs():
    f = graftax.jit(lambda x: "text")
    assert f(f32(1)) == "text"
    assert f(f32(2)) == "text"
    assert graftax.jit(lambda: None)() is None


def test_static_outputs_follow_the_shape_that_ran():
    f = graftax.jit(lambda x: (x.shape, x.ndim, [x.sum(), "even" if x.size % 2 == 0 else "odd"]))
    for shape in [(2,), (3,), (2,), (3, 2), (3,), (2,)]:
        got = f(jnp.ones(shape))
        assert got[:2] == (shape, len(shape))
        assert got[2][1] == ("odd" if int(np.prod(shape)) % 2 else "even")
    assert traces(f) == 3


def test_static_outputs_follow_the_dtype_that_ran():
    f = graftax.jit(lambda x: str(x.dtype))
    for dtype in ("float32", "int32", "float32", "int32"):
        assert f(jnp.ones(2, dtype)) == dtype


def test_static_outputs_follow_the_weak_type_that_ran():
    f = graftax.jit(lambda x: x.weak_type)
    weak, strong = jnp.asarray(1.0) * 1, scalar(1.0)
    assert [f(x) for x in (weak, strong, weak, strong)] == [x.weak_type for x in (weak, strong, weak, strong)]


def test_mutations_follow_the_shape_that_ran():
    @graftax.jit
    def f(log, x):
        log.append(x.shape)

    log = []
    for shape in [(2,), (3,), (2,)]:
        f(log, jnp.ones(shape))
    assert log == [(2,), (3,), (2,)]


def test_a_fresh_container_is_made_for_every_call():
    f = graftax.jit(lambda x: [x, {1, 2}, Box(n=1), {"a": []}])
    first, second = f(f32(1)), f(f32(1))
    assert first is not second
    for left, right in zip(first[1:], second[1:], strict=True):
        assert left is not right
    first[1].add(3)
    first[2].n = 5
    first[3]["a"].append(1)
    third = f(f32(1))
    assert third[1] == {1, 2} and third[2].n == 1 and third[3] == {"a": []}


def test_output_sharing_and_cycles_are_kept():
    @graftax.jit
    def f(x):
        box = Box(w=x)
        box.me = box
        both = [box, (box,)]
        both.append(both)
        return both

    def plain(x):
        return f.__wrapped__(x)

    for _ in range(2):
        assert oracle.difference(plain(f32(1)), f(f32(1))) is None


def test_an_untouched_array_comes_back_as_itself():
    x, y = f32(1), np.ones(2, np.float32)
    f = graftax.jit(lambda x, y, z: {"x": x, "y": [y], "z": z + 1})
    for _ in range(2):
        out = f(x, y, f32(1))
        assert out["x"] is x
        assert out["y"][0] is y


# ── spellings ──


def test_positional_keyword_and_default_spellings_share_one_trace():
    @graftax.jit
    def f(x, y=2, *, z=3):
        return x * y + z

    calls = [f(f32(1)), f(x=f32(1)), f(f32(1), 2), f(f32(1), y=2), f(f32(1), z=3), f(z=3, y=2, x=f32(1))]
    assert [call.tolist() for call in calls] == [[5.0]] * 6
    assert traces(f) == 1
    assert f(f32(1), 4).tolist() == [7.0]
    assert f(y=4, x=f32(1)).tolist() == [7.0]
    assert traces(f) == 2


def test_var_positional_and_var_keyword():
    @graftax.jit
    def f(*args, **kwargs):
        assert list(kwargs) == ["b", "a"]
        return sum(args) + kwargs["a"] * kwargs["b"]

    assert f(f32(1), f32(2), b=f32(3), a=f32(4)).tolist() == [15.0]
    assert f(f32(1), b=f32(3), a=f32(4)).tolist() == [13.0]


def test_keyword_order_is_seen_by_the_function():
    f = graftax.jit(lambda **kwargs: list(kwargs))
    assert f(b=f32(1), a=f32(2)) == ["b", "a"]
    assert f(a=f32(1), b=f32(2)) == ["a", "b"]
    assert f(b=f32(1), a=f32(2)) == ["b", "a"]


def test_keywords_may_have_any_name():
    @graftax.jit
    def f(x, **kwargs):
        return x + sum(kwargs.values())

    names = ["self", "fun", "f", "args", "kwargs", "static", "mutation", "func", "cls", "key", "jitted"]
    for name in names:
        assert f(f32(1), **{name: f32(2)}).tolist() == [3.0]

    g = graftax.jit(lambda self, fun, args, kwargs, static: self + fun + args + kwargs + static)
    assert g(**dict.fromkeys(["static", "kwargs", "args", "fun", "self"], f32(1))).tolist() == [5.0]


def test_positional_only_parameters():
    @graftax.jit
    def f(x, y=2, /, **kwargs):
        return x * y + kwargs["x"]

    assert f(f32(3), x=f32(1)).tolist() == [7.0]
    assert f(f32(3), 3, x=f32(1)).tolist() == [10.0]


def one(x):
    return x


def two(x, y):
    return x


def only(x, /):
    return x


def keyword(*, x):
    return x


WRONG = [
    (one, (), {}),
    (one, (1, 2), {}),
    (one, (1,), {"x": 1}),
    (one, (1,), {"z": 1}),
    (two, (1,), {}),
    (only, (), {"x": 1}),
    (keyword, (1,), {}),
    (keyword, (), {}),
]


@pytest.mark.parametrize("case", WRONG, ids=range(len(WRONG)))
def test_a_wrong_call_raises_the_functions_own_type_error(case):
    f, args, kwargs = case
    jitted = graftax.jit(f)
    with pytest.raises(TypeError) as plain:
        f(*args, **kwargs)
    with pytest.raises(TypeError) as caught:
        jitted(*args, **kwargs)
    assert str(caught.value) == str(plain.value)


# ── callables ──


class Model:
    scale = 2

    def __init__(self, w):
        self.w = w
        self.calls = 0

    @graftax.jit
    def step(self, x):
        self.calls += 1
        self.w = self.w + x
        return self.w

    def double(self, x):
        return self.w * x * 2

    @graftax.jit
    @staticmethod
    def inner_static(x):
        return x + 1

    @staticmethod
    @graftax.jit
    def outer_static(x):
        return x + 2

    @classmethod
    @graftax.jit
    def outer_class(cls, x):
        return x * cls.scale

    def __call__(self, x):
        return self.w * x


class Wider(Model):
    scale = 3


def test_a_method():
    model = Model(f32(1))
    assert model.step(f32(2)).tolist() == [3.0]
    assert model.step(x=f32(2)).tolist() == [5.0]
    assert Model.step(model, f32(1)).tolist() == [6.0]
    assert model.w.tolist() == [6.0]
    assert model.calls == 3


def test_methods_of_two_instances_share_a_trace():
    jitted = Model.__dict__["step"]
    jitted.clear_cache()
    Model(f32(1)).step(f32(1))
    Model(f32(2)).step(f32(1))
    assert traces(jitted) == 1


def test_static_methods_in_both_orders():
    model = Model(f32(1))
    assert model.outer_static(f32(1)).tolist() == Model.outer_static(f32(1)).tolist() == [3.0]
    assert model.inner_static(f32(1)).tolist() == Model.inner_static(f32(1)).tolist() == [2.0]


def test_a_classmethod_sees_its_class():
    assert Model.outer_class(f32(1)).tolist() == [2.0]
    assert Wider.outer_class(f32(1)).tolist() == [3.0]
    assert Wider(f32(1)).outer_class(f32(1)).tolist() == [3.0]


def test_jit_of_a_classmethod_works_or_is_a_clear_error_at_decoration():
    try:

        class Odd:
            @graftax.jit
            @classmethod
            def f(cls, x):
                return x * 2
    except (graftax.GraftaxError, TypeError):
        return
    assert Odd.f(f32(1)).tolist() == [2.0]


def test_a_bound_method_sees_and_changes_its_object():
    model = Model(f32(3))
    double = graftax.jit(model.double)
    assert double(f32(1)).tolist() == [6.0]
    model.w = f32(5)
    assert double(f32(1)).tolist() == [10.0]
    assert traces(double) == 1

    step = graftax.jit(Model.step.__wrapped__.__get__(model))
    step(f32(1))
    assert model.w.tolist() == [6.0] and model.calls == 1


def test_a_callable_object_sees_its_state():
    model = Model(f32(3))
    call = graftax.jit(model)
    assert call(f32(2)).tolist() == [6.0]
    model.w = f32(4)
    assert call(f32(2)).tolist() == [8.0]
    assert traces(call) == 1


def test_a_partial():
    f = graftax.jit(functools.partial(lambda w, x, n: w * x + n, f32(2), n=1))
    assert f(f32(3)).tolist() == [7.0]
    assert f(f32(4)).tolist() == [9.0]
    assert traces(f) == 1


def test_a_builtin():
    assert graftax.jit(max)([1, 3, 2]) == 3


def test_jit_of_jit():
    f = graftax.jit(graftax.jit(lambda x, log: log.append(x)))
    log = []
    f(f32(1), log)
    f(f32(2), log)
    assert [x.tolist() for x in log] == [[1.0], [2.0]]


def test_options_before_the_function():
    @graftax.jit(mutation="discard", cache_size=3)
    def f(x):
        return x + 1

    assert f(f32(1)).tolist() == [2.0]
    assert f.cache_info().maxsize == 3

    @functools.partial(graftax.jit, mutation="discard")
    def g(x):
        return x + 1

    assert g(f32(1)).tolist() == [2.0]


def test_the_wrapper_looks_like_the_function():
    def f(x: int, /, y=2, *, z) -> str:
        """Words."""

    jitted = graftax.jit(f)
    assert jitted.__wrapped__ is f
    assert (jitted.__name__, jitted.__doc__, jitted.__module__) == ("f", "Words.", __name__)
    assert jitted.__qualname__ == f.__qualname__
    assert inspect.signature(jitted) == inspect.signature(f)


def test_what_is_not_callable_is_refused_at_decoration():
    with pytest.raises(TypeError):
        graftax.jit(3)


def test_unknown_options_are_refused_at_decoration():
    with pytest.raises((TypeError, ValueError), match="sometimes"):
        graftax.jit(one, mutation="sometimes")
    with pytest.raises(TypeError, match="no_such_option"):
        graftax.jit(one, no_such_option=1)


@pytest.mark.parametrize("size", [0, -1])
def test_a_cache_size_without_room_is_refused(size):
    with pytest.raises(ValueError, match="cache_size"):
        graftax.jit(one, cache_size=size)


# ── under JAX's transformations ──


def test_under_grad():
    f = graftax.jit(lambda params, x: (params["w"] * x).sum() * params["n"])
    grad = jax.grad(lambda w, x: f({"w": w, "n": 3}, x))
    assert grad(f32(2), f32(5)).tolist() == [15.0]
    assert grad(f32(3), f32(5)).tolist() == [15.0]


def test_under_vmap():
    f = graftax.jit(lambda box: box.w * 2)
    assert jax.vmap(lambda w: f(Box(w=w)))(jnp.arange(3.0)).tolist() == [0.0, 2.0, 4.0]


def test_inside_jax_jit():
    f = graftax.jit(lambda box: box.w * 2)
    outer = jax.jit(lambda w: f(Box(w=w)) + 1)
    assert outer(f32(1)).tolist() == [3.0]
    assert outer(f32(2)).tolist() == [5.0]


def test_inside_graftax_jit():
    @graftax.jit
    def inner(log, x):
        log.append(x)
        return x * 2

    @graftax.jit
    def outer(log, x):
        return inner(log, inner(log, x))

    log = []
    assert outer(log, f32(1)).tolist() == [4.0]
    assert outer(log, f32(2)).tolist() == [8.0]
    assert [x.tolist() for x in log] == [[1.0], [2.0], [2.0], [4.0]]


def test_inside_scan_and_checkpoint():
    f = graftax.jit(lambda box: box.w * 2)

    def body(carry, x):
        y = jax.checkpoint(lambda c: f(Box(w=c)) + x)(carry)
        return y, y

    total, _ = jax.lax.scan(body, scalar(1.0), jnp.ones(3))
    assert float(total) == 15.0


def test_recursion():
    @graftax.jit
    def f(x, n):
        return x if n == 0 else f(x * 2, n - 1)

    assert f(f32(1), 3).tolist() == [8.0]
    assert f(f32(2), 3).tolist() == [16.0]


def test_disable_jit_runs_the_function_itself():
    log = []
    f = graftax.jit(lambda x, log: log.append(isinstance(x, jax.core.Tracer)))
    with jax.disable_jit():
        f(f32(1), log)
    assert log == [False]


# ── the cache ──


def test_cache_info_counts():
    f = graftax.jit(lambda x, n: x * n)
    assert f.cache_info()._asdict() == dict(hits=0, misses=0, maxsize=512, currsize=0, traces=0)
    f(f32(1), 1)
    f(f32(2), 1)
    f(f32(3), 2)
    info = f.cache_info()
    assert (info.hits, info.misses, info.currsize, info.traces) == (1, 2, 2, 2)


def test_clear_cache_forgets():
    f = graftax.jit(lambda x: x + 1)
    f(f32(1))
    f.clear_cache()
    assert f.cache_info().currsize == 0
    assert f(f32(1)).tolist() == [2.0]
    assert f.cache_info().currsize == 1


def test_two_wrappers_of_one_function_share_the_cache():
    def f(x):
        return x + 1

    first, second = graftax.jit(f), graftax.jit(f)
    first(f32(1))
    second(f32(2))
    assert traces(first) == traces(second) == 1
    for _ in range(3):
        graftax.jit(f)(f32(3))
    assert traces(first) == 1


def test_wrappers_with_other_options_do_not_share():
    def f(log, x):
        log.append(x)

    propagating, discarding = graftax.jit(f), graftax.jit(f, mutation="discard")
    log = []
    propagating(log, f32(1))
    discarding(log, f32(1))
    propagating([], f32(1))
    assert len(log) == 1


def test_the_cache_is_bounded():
    f = graftax.jit(lambda x, n: x * n, cache_size=2)
    for n in range(5):
        assert f(f32(1), n).tolist() == [float(n)]
        assert f.cache_info().currsize <= 2
    assert f(f32(1), 0).tolist() == [0.0]
    assert traces(f) == 6


def test_the_least_recently_used_entry_goes_first():
    f = graftax.jit(lambda x, n: x * n, cache_size=2)
    for n in (1, 2, 1, 3, 1):
        f(f32(1), n)
    assert traces(f) == 3


def test_the_cache_dies_with_the_function():
    class Config:
        def __init__(self, n):
            self.n = n

        def get(self):
            return self.n

    def make():
        w, config = f32(1), Config(3)

        def f(x, c):
            return [x * w * config.n * c.n, Config(1)]

        jitted = graftax.jit(f)
        argument = Config(2)
        jitted(f32(2), argument)
        jitted(f32(3), argument)
        return [weakref.ref(x) for x in (f, jitted, w, config, argument)]

    gone = make()
    gc.collect()
    assert [ref() for ref in gone] == [None] * 5


def test_arguments_are_not_kept_alive():
    f = graftax.jit(lambda box: box.w * 2)
    box = Box(w=f32(1), data=Data(1))
    f(box)
    f(box)
    gone = [weakref.ref(box), weakref.ref(box.data), weakref.ref(box.w)]
    del box
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_the_same_call_under_another_x64_setting_is_another_trace():
    f = graftax.jit(lambda x: x + np.float64(1))
    before = f(f32(1))
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        inside = f(jnp.ones(1, jnp.float64))
    after = f(f32(1))
    assert [x.dtype for x in (before, inside, after)] == [np.float32, np.float64, np.float32]


# ── jax.jit's own options ──


def test_static_argnums_and_argnames():
    @functools.partial(graftax.jit, static_argnums=(1,), static_argnames=("mode",))
    def f(x, n, *, mode="a"):
        assert type(n) is int
        return x * n if mode == "a" else x

    assert f(f32(2), 3).tolist() == [6.0]
    assert f(f32(2), n=3).tolist() == [6.0]
    assert f(f32(2), 3, mode="b").tolist() == [2.0]


def test_a_static_argument_with_arrays_below_is_a_clear_error():
    f = graftax.jit(lambda x, table: x, static_argnums=1)
    with pytest.raises(graftax.GraftaxError, match="table"):
        f(f32(1), {"deep": [f32(1)]})


@pytest.mark.parametrize(
    "options", [dict(donate_argnums=0), dict(donate_argnames="state"), dict(donate_argnums=(0,))], ids=str
)
def test_donation(options):
    f = graftax.jit(lambda state, x: {"w": state["w"] + x}, **options)
    for _ in range(2):
        w, x = jnp.ones(64), jnp.ones(64)
        out = f({"w": w}, x)
        assert out["w"].tolist() == [2.0] * 64
        assert w.is_deleted() and not x.is_deleted()


def test_donation_does_not_touch_what_is_not_donated_after_a_failed_trace():
    def fail(w):
        raise ValueError("no")

    w = jnp.ones(4)
    with pytest.raises(ValueError, match="no"):
        graftax.jit(fail, donate_argnums=0)(w)
    assert not w.is_deleted()


def test_shardings_of_a_leaf_and_of_a_prefix():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    f = graftax.jit(lambda x: {"y": x["w"] + 1, "n": 3}, in_shardings=device, out_shardings=device)
    for _ in range(2):
        out = f({"w": f32(1), "n": 2})
        assert out["y"].tolist() == [2.0] and out["n"] == 3
        assert out["y"].sharding == device
    g = graftax.jit(
        lambda x, y: (x["w"], {"y": y + 1}),
        in_shardings=(device, None),
        out_shardings=(device, {"y": device}),
    )
    for _ in range(2):
        assert g({"w": f32(1)}, f32(1))[1]["y"].tolist() == [2.0]


@pytest.mark.parametrize(
    "options",
    [
        dict(keep_unused=True),
        dict(inline=True),
        dict(compiler_options={"xla_cpu_enable_fast_math": False}),
    ],
    ids=str,
)
def test_options_pass_through(options):
    f = graftax.jit(lambda x, unused: x["w"] + 1, **options)
    for _ in range(2):
        assert f({"w": f32(1)}, f32(2)).tolist() == [2.0]


def test_a_bad_compiler_option_is_xlas_error():
    f = graftax.jit(lambda x: x + 1, compiler_options={"no_such_option": True})
    with pytest.raises(Exception, match="no_such_option"):
        f(f32(1))


def test_unused_arguments_are_dropped_unless_kept():
    def f(x, unused):
        return x + 1

    def parameters(jitted):
        return jitted.lower(f32(1), f32(1, 2)).as_text().split("@main(")[1].split(")")[0].count("%arg")

    assert parameters(graftax.jit(f, keep_unused=True)) > parameters(graftax.jit(f))


def test_lower_compile_trace_and_eval_shape():
    f = graftax.jit(lambda state, n: {"y": state["w"] * n, "n": n})
    state = {"w": f32(1, 2)}
    lowered = f.lower(state, 3)
    assert "multiply" in lowered.as_text()
    assert lowered.compile() is not None
    assert f.trace(state, 3).jaxpr is not None
    out = f.eval_shape(state, 3)
    assert (out["y"].shape, out["y"].dtype, out["n"]) == ((2,), jnp.float32, 3)
    assert isinstance(out["y"], jax.ShapeDtypeStruct)


@pytest.mark.parametrize("way", ["lower", "trace", "eval_shape"])
def test_looking_at_a_function_changes_nothing(way):
    def f(state, config):
        state["w"] = state["w"] + 1
        state["new"] = [state["w"]]
        config.n += 1
        return state

    def build():
        return {"w": f32(1)}, Box(n=1)

    args = build()
    getattr(graftax.jit(f), way)(*args)
    assert oracle.difference(build(), args) is None


def test_the_jaxpr_carries_the_functions_name():
    def my_training_step(x):
        return x + 1

    assert "my_training_step" in graftax.jit(my_training_step).lower(f32(1)).as_text()
