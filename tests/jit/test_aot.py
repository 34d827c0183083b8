# SPDX-License-Identifier: Apache-2.0
"""Ahead of time: what `lower`, `trace` and `compile` give runs as the call does, and names how arguments differ."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftax
import zoo
from zoo import Box, f32, i32


def compiled(f, *args, **kwargs):
    return graftax.jit(f).lower(*args, **kwargs).compile()


def identity(x):
    return x


@pytest.fixture
def scale():
    def scale(config, x, *more, unit="m", **named):
        return config["w"] * x * len(more), unit, named

    return scale


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_a_compiled_function_gives_what_the_call_gives(build):
    x = build()
    run = compiled(lambda x: (x, [x]), x)
    y = build() if graftax.flatten(build())[1] == graftax.flatten(x)[1] else x  # a sentinel is another one each time
    expected, given = graftax.jit(lambda x: (x, [x]))(y), run(y)
    assert graftax.flatten(given)[1] == graftax.flatten(expected)[1]
    for a, b in zip(graftax.flatten(given)[0], graftax.flatten(expected)[0], strict=True):
        assert a is b or jnp.array_equal(a, b)


def step(state, x):
    state.w = state.w + x
    state.log.append(state.w * 2)
    state.log[0]["steps"] = 1
    return state, state.log[0]


def state_of_step():
    log = [{"steps": 0}]
    return Box(w=f32(1), log=log, same=log)


@pytest.mark.parametrize("way", [lambda f, *a: f.lower(*a), lambda f, *a: f.trace(*a).lower()], ids=["lower", "trace"])
def test_what_a_compiled_function_changes_comes_back(way):
    run = way(graftax.jit(step), state_of_step(), f32(2)).compile()
    for _ in range(2):
        state = state_of_step()
        log = state.log
        result, first = run(state, f32(2))
        assert result is state and first is log[0] and state.same is log is state.log
        assert state.w.tolist() == [3.0] and log[1].tolist() == [6.0] and log[0] == {"steps": 1}


@pytest.mark.parametrize("stage", ["trace", "lower"])
def test_staging_does_not_touch_the_arguments(stage):
    state = state_of_step()
    w = state.w
    getattr(graftax.jit(step), stage)(state, f32(2))
    assert state.w is w and state.log == [{"steps": 0}]


def shared(x=None):
    x = x or [f32(1)]
    return [x, x]


class Custom:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        raise AssertionError("not asked")

    def __hash__(self):
        raise AssertionError("not asked")

    def __repr__(self):
        raise AssertionError("not asked")


DIFFERENT = {
    "a static": ({"rate": 0.5}, {"rate": 0.25}, r"x\['rate'\]: expected 0.5, given 0.25"),
    "the type of a static": ([1], [True], r"x\[0\]: expected 1 \(int\), given True \(bool\)"),
    "a string": ("a", "b", "x: expected 'a', given 'b'"),
    "an array for a number": ([2], [f32(1)], r"x\[0\]: expected 2, given an array"),
    "a number for an array": ([f32(1)], [2], r"x\[0\]: expected an array, given 2"),
    "another class": (Box(a=[f32(1)]), Box(a=(f32(1),)), r"x.a: expected list, given tuple"),
    "a missing key": ({"a": 1, "b": f32(1)}, {"a": 1}, r"x\['b'\]: expected an array, given nothing"),
    "an extra key": ({"a": 1}, {"a": 1, "b": [2]}, r"x\['b'\]: expected nothing, given list"),
    "the type of a key": ({1: f32(1)}, {True: f32(1)}, r"x\[1\]: expected an array, given nothing"),
    "another order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}, r"x: expected the order 'a', 'b', given the order 'b', 'a'"),
    "a missing attribute": (Box(a=f32(1), b=1), Box(a=f32(1)), r"x.b: expected 1, given nothing"),
    "an extra attribute": (Box(a=f32(1)), Box(a=f32(1), b=1), r"x.b: expected nothing, given 1"),
    "a longer list": ([f32(1)], [f32(1), f32(2)], r"x\[1\]: expected nothing, given an array"),
    "sharing lost": (shared(), [[f32(1)], [f32(1)]], r"x\[0\] and x\[1\]: expected one object, given two objects"),
    "sharing gained": ([[f32(1)], [f32(1)]], shared(), r"x\[0\] and x\[1\]: expected two objects, given one object"),
    "a set": ({1, 2}, {1, 3}, "x: expected a set with 2, given a set with 3"),
    "a function": (len, print, "x: expected <built-in function len>, given <built-in function print>"),
    "a bytearray": (bytearray(b"a"), bytearray(b"b"), "x: expected b'a', given b'b'"),
    "an object that answers nothing": ([Custom(1)], [Custom(2)], r"x\[0\].value: expected 1, given 2"),
    "below a key that is an object": ({(1, "a"): [1]}, {(1, "a"): [2]}, r"x\[\(1, 'a'\)\]\[0\]: expected 1, given 2"),
    "an equal subtree spelled once": (
        [("a", "b")] * 2,
        [("a", "b"), ("a", "c")],
        r"x\[1\]\[1\]: expected 'b', given 'c'",
    ),
    "a cycle": (zoo.cyclic_list(), [1, f32(2), []], "x"),
}


@pytest.mark.parametrize(("traced", "given", "text"), DIFFERENT.values(), ids=DIFFERENT)
def test_other_arguments_are_refused_and_the_place_is_named(traced, given, text):
    run = compiled(identity, traced)
    with pytest.raises(graftax.StructureError, match=text) as caught:
        run(given)
    assert "identity was compiled for other arguments" in str(caught.value)
    run(traced)


def test_another_number_is_refused_with_what_takes_any_number():
    run = compiled(identity, {"rate": 1.0, "on": True})
    with pytest.raises(graftax.StructureError) as caught:
        run({"rate": 2.0, "on": False})
    assert str(caught.value).splitlines()[-1] == (
        """Write dynamic="x['rate']" for a program that takes any number, lower it again for these, or call the """
        "jitted function, which compiles for any arguments."
    )
    dynamic = graftax.jit(identity, dynamic="x['rate']").lower({"rate": 1.0}).compile()
    assert dynamic({"rate": 2.0})["rate"] == 2


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_of_any_graph_exactly_the_place_that_differs_is_named(build):
    x = build()
    with pytest.raises(graftax.StructureError) as caught:
        compiled(identity, [x, 0])([x, 1])
    assert str(caught.value).splitlines()[1:-1] == ["  x[1]: expected 0, given 1"]


def test_another_sentinel_is_refused():
    with pytest.raises(graftax.StructureError, match=r"sentinel|object object"):
        compiled(identity, [object()])([object()])


@pytest.mark.parametrize("depth", [1_000, 50_000])
@pytest.mark.quick(0)
def test_deep_graphs_are_refused_too(depth):
    def chain(end):
        for _ in range(depth):
            end = [end]
        return end

    with pytest.raises(graftax.StructureError, match=r"expected 1, given 2|too deep"):
        compiled(lambda x: None, chain(1))(chain(2))


def test_at_most_a_few_differences_are_named():
    with pytest.raises(graftax.StructureError, match="and more") as caught:
        compiled(identity, list(range(100)))(list(range(1, 101)))
    assert len(str(caught.value)) < 600


def test_a_captured_value_that_changed_is_named():
    box = {"rate": 1}
    run = compiled(lambda x: x * box["rate"], f32(1))
    box["rate"] = 2
    with pytest.raises(graftax.StructureError, match=r"closure box\['rate'\]: expected 1, given 2"):
        run(f32(1))


def test_a_replaced_default_is_seen():
    def f(x, n=1):
        return x * n

    jitted = graftax.jit(f)
    run = jitted.lower(f32(1)).compile()
    f.__defaults__ = (5,)
    assert jitted.lower(f32(1)).compile()(f32(1)).tolist() == [5.0]
    with pytest.raises(graftax.StructureError, match="n: expected 1, given 5"):
        run(f32(1))


def test_the_layout_of_the_arguments_is_checked(scale):
    config, x = {"w": f32(1)}, f32(2)
    run = compiled(scale, config, x, 1, a=2)
    assert run(config, x, 1, a=2)[2] == {"a": 2}
    with pytest.raises(graftax.StructureError, match="extra positional arguments: expected 1, given 2"):
        run(config, x, 1, 1, a=2)
    with pytest.raises(graftax.StructureError, match="extra keyword arguments: expected 'a', given 'b'"):
        run(config, x, 1, b=2)


def test_every_spelling_of_a_call_works(scale):
    config, x = {"w": f32(1)}, f32(2)
    run = compiled(scale, config, x)
    for args, kwargs in [((config, x), {}), ((config,), {"x": x}), ((), {"x": x, "config": config, "unit": "m"})]:
        assert run(*args, **kwargs)[1] == "m"


def test_arguments_that_do_not_fit_raise_the_functions_own_error():
    run = compiled(identity, f32(1))
    with pytest.raises(TypeError, match="identity"):
        run()
    with pytest.raises(TypeError, match="y"):
        run(f32(1), y=1)


@pytest.mark.parametrize("given", [f32(1, 2), i32(1), jnp.float32(3)], ids=["shape", "dtype", "rank"])
def test_an_array_of_another_kind_is_named_by_its_path(given):
    def f(unused, x):
        return x["layers"][1].w * 2

    x = {"layers": [f32(0), Box(w=f32(1))]}
    run = compiled(f, f32(9), x)
    x["layers"][1].w = given
    with pytest.raises(TypeError, match=r"x\['layers'\]\[1\].w") as caught:
        run(f32(9), x)
    assert "leaves[" not in str(caught.value)


def test_a_deleted_array_is_named():
    run = compiled(lambda model: model["w"] + 1, {"w": f32(1)})
    x = f32(1)
    x.delete()
    with pytest.raises(RuntimeError, match=r"model\['w'\] holds an array that was deleted"):
        run({"w": x})


def test_donation_is_part_of_what_is_compiled():
    run = graftax.jit(lambda params: {"w": params["w"] + 1}, donate="all").lower({"w": f32(1)}).compile()
    x = {"w": f32(1)}
    w = x["w"]
    assert run(x)["w"].tolist() == [2.0]
    assert w.is_deleted()


def test_the_pattern_of_donated_arrays_is_part_of_what_is_compiled():
    jitted = graftax.jit(lambda a, b: (a + b, b), donate="all")
    x = f32(1)
    with pytest.raises(graftax.StructureError, match="a and b: expected two arrays, given one array"):
        jitted.lower(f32(1), f32(2)).compile()(x, x)
    assert x.tolist() == [1.0]
    run = jitted.lower(x, x).compile()
    with pytest.raises(graftax.StructureError, match="a and b: expected one array, given two arrays"):
        run(f32(1), f32(2))
    assert run(x, x)[0].tolist() == [2.0]


def test_shapes_stand_for_arrays():
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    jitted = graftax.jit(lambda m, x: m["w"] * x)
    for lowered in (jitted.lower({"w": shape}, shape), jitted.trace({"w": shape}, shape).lower()):
        assert lowered.compile()({"w": f32(1, 2)}, f32(3, 4)).tolist() == [3.0, 8.0]


def test_traced_numbers_are_arguments():
    run = graftax.jit(lambda x, n: x * n, dynamic="n").lower(f32(1), 2).compile()
    assert run(f32(1), 3).tolist() == [3.0]
    with pytest.raises(graftax.StructureError, match="n: expected a traced number, given 'a'"):
        run(f32(1), "a")


def test_numpy_arguments_may_be_overwritten_after_the_call():
    run = compiled(lambda x: x * 2, np.ones((64, 64), np.float32))
    results = []
    for i in range(20):
        x = np.full((64, 64), i, np.float32)
        results.append(run(x))
        x[:] = -1
    assert [r[0, 0] for r in results] == [2 * i for i in range(20)]


def test_an_untouched_numpy_argument_comes_back_as_itself():
    x = np.ones(2, np.float32)
    assert compiled(identity, x)(x) is x


def test_what_jax_says_of_its_stages_is_reachable():
    traced = graftax.jit(lambda m, x: {"y": m["w"] * x}).trace({"w": f32(1, 2)}, 3)
    lowered = traced.lower()
    run = lowered.compile()
    assert isinstance(traced.jaxpr, type(jax.make_jaxpr(identity)(1.0)))
    assert "stablehlo.multiply" in lowered.as_text()
    assert [x.shape for x in jax.tree.leaves(lowered.out_info)] == [(2,)]
    assert lowered.in_tree.num_leaves == run.in_tree.num_leaves == 1
    assert isinstance(lowered.cost_analysis(), dict)
    assert run.memory_analysis() is not None
    assert run.as_text() and run.cost_analysis() is not None
    assert {"as_text", "compile", "cost_analysis"} <= set(dir(lowered))
    with pytest.raises(AttributeError, match="no_such"):
        _ = lowered.no_such
    assert "<lambda>" in repr(lowered)


def test_options_of_jaxs_stages_are_passed_on():
    lowered = graftax.jit(lambda x: x * 2).trace(f32(1)).lower(lowering_platforms=("tpu",))
    assert "multiply" in lowered.as_text()
    run = graftax.jit(lambda x: x * 2).lower(f32(1)).compile(compiler_options={"xla_embed_ir_in_executable": True})
    assert run(f32(2)).tolist() == [4.0]


def test_a_method_is_compiled_with_its_object():
    class Model:
        def __init__(self):
            self.w = f32(1)

        @graftax.jit
        def step(self, x):
            self.w = self.w + x
            return self.w

    model, other = Model(), Model()
    run = model.step.lower(f32(2)).compile()
    assert run(f32(2)).tolist() == [3.0]
    assert model.w.tolist() == [3.0] and other.w.tolist() == [1.0]
    assert Model.step.lower(other, f32(2)).compile()(other, f32(5)).tolist() == [6.0]
    assert other.w.tolist() == [6.0]


def test_two_shapes_lowered_apart_keep_their_own_static_results():
    jitted = graftax.jit(lambda x: (x, x.shape))
    of_one, of_two = (jitted.lower(f32(*range(n))).compile() for n in (1, 2))
    assert of_one(f32(5))[1] == (1,) and of_two(f32(5, 6))[1] == (2,)


@pytest.mark.parametrize("stage", ["trace", "lower", "compile"])
@pytest.mark.parametrize("use", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_a_stage_cannot_be_pickled_or_copied_and_says_what_can(stage, use):
    jitted = graftax.jit(identity)
    stages = {"trace": jitted.trace(f32(1)), "lower": jitted.lower(f32(1)), "compile": compiled(identity, f32(1))}
    with pytest.raises(pickle.PicklingError, match=r"cannot be pickled or copied.*graftax\.export"):
        use(stages[stage])


def test_a_compiled_function_takes_no_tracers():
    run = compiled(lambda x: x * 2, f32(1))
    with pytest.raises(TypeError, match="Tracer"):
        jax.jit(lambda x: run(x))(f32(1))


def test_a_failed_call_changes_nothing():
    run = compiled(step, state_of_step(), f32(1))
    state = state_of_step()
    with pytest.raises(TypeError):
        run(state, f32(1, 2, 3))
    assert state.w.tolist() == [1.0] and state.log == [{"steps": 0}]


def test_differences_below_functions_that_share_a_variable_are_named():
    def pair(n, rate):
        def up(x):
            return x * n * rate

        def down(x):
            return x / n

        return up, [down, up]

    compiled = graftax.jit(lambda fs, x: fs[0](x)).lower(pair(2, 3), jnp.ones(2)).compile()
    assert compiled(pair(2, 3), jnp.ones(2))[0] == 6
    with pytest.raises(graftax.StructureError, match=r"expected 2, given 4") as caught:
        compiled(pair(4, 3), jnp.ones(2))
    assert "fs[0]" in str(caught.value) and "'n'" in str(caught.value)
    with pytest.raises(graftax.StructureError, match="two objects"):
        compiled((pair(2, 3)[0], pair(2, 3)[1]), jnp.ones(2))


def test_eval_shape_and_the_call_share_one_trace():
    class Model:
        def __init__(self):
            self.w, self.log = [jnp.ones((2, 2))] * 40, {"n": 0}

    @graftax.jit
    def step(model, y):
        model.w = [w @ y for w in model.w]
        model.last = y
        return model, model.log, {"y": y}

    model = Model()
    w = model.w
    shapes = step.eval_shape(model, jnp.ones((2, 3)))
    assert shapes[0].w[39].shape == (2, 3) and shapes[0] is not model and shapes[0].last is shapes[2]["y"]
    assert model.w is w and not hasattr(model, "last")
    assert step(model, jnp.ones((2, 3)))[0] is model and model.w[0].shape == (2, 3)
    assert step.cache_info().traces == 1


def test_eval_shape_leaves_alone_what_is_handed_over_as_itself():
    class Counter:
        n = 0

    @graftax.jit
    def f(counter, y):
        counter.n += 1
        return y * 2

    counter = Counter()
    for _ in range(2):
        assert f.eval_shape(counter, jnp.ones(3)).shape == (3,) and counter.n == 0
    f(counter, jnp.ones(3))
    assert counter.n == 1


def attribute_of(stage: Any, name: str) -> Any:
    return jax.tree.map(repr, getattr(stage, name), is_leaf=lambda x: x is None)


def test_stages_tell_of_arguments_and_result_in_their_structures_as_jaxs_do():
    def f(p: Any, x: Any, *, k: Any) -> Any:
        return {"a": p["w"] * x, "b": (k + 1, p["w"].sum())}

    def stages(jit: Any) -> list[Any]:
        traced = jit(f).trace({"w": f32(1, 2)}, f32(3, 4), k=f32(1)[0])
        return [traced, traced.lower(), traced.lower().compile()]

    for ours, theirs in zip(stages(graftax.jit), stages(jax.jit), strict=True):
        for name in ("args_info", "in_avals", "in_tree", "out_info", "out_avals", "out_tree"):
            assert hasattr(ours, name) == hasattr(theirs, name)
            if hasattr(theirs, name):
                assert attribute_of(ours, name) == attribute_of(theirs, name), name
    for name in ("input_shardings", "output_shardings", "input_formats", "output_formats"):
        assert attribute_of(ours, name) == attribute_of(theirs, name), name


def test_out_info_has_the_objects_of_the_result_and_changes_nothing():
    class Model:
        def __init__(self) -> None:
            self.w, self.seen, self.name = f32(1, 2), [], "m"

        @graftax.jit
        def step(self, x: Any) -> Any:
            self.w = self.w * x
            self.seen.append(self.w)
            return {"model": self, "sum": self.w.sum(), "x": x}

    model = Model()
    lowered = model.step.lower(f32(2)[0])
    for stage in (lowered, lowered.compile()):
        info = stage.out_info
        assert (info["sum"].shape, info["x"].shape, info["model"].w.shape) == ((), (), (2,))
        assert [array.shape for array in info["model"].seen] == [(2,)] and info["model"].name == "m"
        assert jax.tree.map(lambda array: array.shape, stage.args_info) == (((),), {})
    assert model.seen == [] and model.w.tolist() == [1, 2]


class Scaled:
    def __init__(self):
        self.w = jnp.ones(2)

    @graftax.jit(static_argnums=(0, 1))
    def by(self, n, x):
        return self.w * x * n


def test_a_compiled_function_is_called_without_its_static_arguments_as_in_jax():
    def f(x, mode, y=2.0):
        return x * y if mode == "up" else -x * y

    x = jnp.arange(1.0, 3.0)
    for options, args, kwargs, given, named in (
        ({"static_argnums": 1}, (x, "up"), {}, (x,), {}),
        ({"static_argnums": 1}, (x, "up", 3 * x), {}, (x, 3 * x), {}),
        ({"static_argnames": "mode"}, (x,), {"mode": "up", "y": x}, (x,), {"y": x}),
    ):
        by_jax, by_graftax = (jit(f, **options).lower(*args, **kwargs).compile() for jit in (jax.jit, graftax.jit))
        assert by_graftax(*given, **named).tolist() == by_jax(*given, **named).tolist() == f(*args, **kwargs).tolist()
        assert by_graftax(*args, **kwargs).tolist() == f(*args, **kwargs).tolist()
    compiled = graftax.jit(f, static_argnums=1).lower(x, "up").compile()
    with pytest.raises(graftax.errors.StructureError, match="expected 'up', given 'down'"):
        compiled(x, "down")
    with pytest.raises(TypeError, match="missing"):
        compiled()
    scaled = Scaled()
    assert scaled.by.lower(2, x).compile()(x).tolist() == Scaled.by.lower(scaled, 2, x).compile()(x).tolist() == [2, 4]


def test_stages_name_the_arguments_as_they_were_given_without_static_ones():
    def f(x, mode, y=2.0, *, z=1.0, **more):
        return x * y * z

    x, names = jnp.ones(2), ("args_info", "in_avals", "in_tree")
    for static, args, kwargs in (
        ({}, (x,), {"mode": x, "z": x, "w": x}),
        ({"static_argnums": 1}, (x, 3, x), {}),
        ({"static_argnames": "mode"}, (), {"x": x, "mode": 3, "z": x}),
        ({"donate_argnums": 0}, (), {"x": x, "mode": x + 1}),
    ):
        by_jax, by_graftax = (jit(f, **static).lower(*args, **kwargs) for jit in (jax.jit, graftax.jit))
        for name in names:
            assert getattr(by_jax, name) == getattr(by_graftax, name), name


def halve(x):
    x *= 0.5
    return x.sum()


STAGES = {
    "compiled": lambda f, *args: graftax.jit(f).lower(*args).compile(),
    "exported": lambda f, *args: graftax.export(f)(*args),
    "deserialized": lambda f, *args: graftax.Exported.deserialize(graftax.export(f)(*args).serialize()),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_refuses_arrays_that_need_another_program(stage):
    run = STAGES[stage](halve, jnp.ones(2))
    assert run(jnp.ones(2)) == 1
    with pytest.raises(graftax.StructureError, match="x: expected no NumPy array, given a NumPy array"):
        run(np.ones(2, np.float32))
    if stage == "deserialized":
        return  # an optimizer has functions without a name
    for is_tied, text in ((True, "expected one array, given several"), (False, "expected several arrays, given one")):
        one = jnp.ones(2)
        tied, untied = {"a": one, "b": one}, {"a": one, "b": jnp.ones(2)}
        right, wrong = (tied, untied) if is_tied else (untied, tied)
        opt = graftax.optimizer(optax.sgd(0.1), right)

        def train(model, opt):
            opt.update(model, graftax.grad(lambda model: (model["a"] * model["b"]).sum())(model))

        run = STAGES[stage](train, graftax.copy(right), graftax.copy(opt))
        with pytest.raises(graftax.StructureError, match=rf"model\['a'\] and model\['b'\]: {text}"):
            run(graftax.copy(wrong), graftax.copy(opt))
        run(right, opt)
        assert (right["a"] is right["b"]) == is_tied and (right["b"] < 1).all()
