# SPDX-License-Identifier: Apache-2.0
"""`graftax.record`: a call does what it does without it, and a file is written when one goes wrong."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import sys
import tempfile
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import graftax
import oracle
import strategies
from graftax._record.replay import RecordedCalls
from strategies import Program, Recipe

GRAPHS, PROGRAMS = strategies.graphs(), strategies.programs()


class Model:
    def __init__(self) -> None:
        self.w, self.steps = jnp.ones(2), 0
        self.me = self


def log_step(model: Model, x: Any) -> Any:
    model.steps += 1
    model.w = jnp.log(model.w * x)
    return {"loss": model.w.sum(), "steps": model.steps}


@pytest.fixture(autouse=True)
def few_objects_to_collect() -> Iterator[None]:
    """Only what the test itself makes is looked at by a collection."""
    gc.freeze()
    yield
    gc.unfreeze()


def warned(call: Any, *args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call(*args)
    return [str(w.message) for w in found if w.category is graftax.RecordedCallWarning]


def outcome_of(f: Any, roots: tuple[Any, ...]) -> tuple[Any, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return f(*roots), None
    except Exception as error:
        return None, (type(error), str(error))


# ---- random programs


@pytest.mark.quick(0)
@settings(max_examples=settings.default.max_examples // 3)
@given(GRAPHS.map(strategies.held), PROGRAMS.map(strategies.held))
def test_a_recorded_program_does_what_it_does_without(recipe: Recipe, program: Program):
    jitted = graftax.jit(lambda *roots: program(roots))
    recorder = graftax.record(graftax.jit(lambda *roots: program(roots)), nonfinite=False, on=())
    roots, nodes = recipe.build()
    recorded_roots, recorded_nodes = recipe.build()
    for _ in range(2):
        result, error = outcome_of(jitted, roots)
        recorded_result, recorded_error = outcome_of(recorder, recorded_roots)
        assert error == recorded_error
        seen, recorded = (result, roots, nodes), (recorded_result, recorded_roots, recorded_nodes)
        assert oracle.difference(seen, recorded, zip(nodes, recorded_nodes, strict=True)) is None
    assert recorder.cache_info().traces == jitted.cache_info().traces


@pytest.mark.quick(0)
@settings(max_examples=settings.default.max_examples // 3)
@given(GRAPHS.map(strategies.held), PROGRAMS.map(strategies.held))
def test_a_recorded_program_runs_again_as_it_ran(recipe: Recipe, program: Program):
    recorder = graftax.record(lambda *roots: program(roots), nonfinite=False, on=())
    roots, _ = recipe.build()
    for _ in range(2):
        outcome_of(recorder, roots)
    with tempfile.TemporaryDirectory() as folder:
        recorder.save(f"{folder}/calls.record")
        recorded = RecordedCalls(f"{folder}/calls.record")
        for number in range(2):
            assert recorded.run(number).differences == []


# ---- what is kept


def test_a_call_is_kept_as_it_was_before_it_ran(tmp_path: Path):
    model, batch = Model(), np.ones(2, np.float32)
    recorder = graftax.record(log_step, nonfinite=False, dir=tmp_path)
    recorder(model, batch)
    model.steps, batch[:] = 7, -1.0
    recorder.save(tmp_path / "call")
    (call,) = (prepared := RecordedCalls(tmp_path / "call").prepare(0)).args[:1]
    assert call.steps == 0 and call.w.tolist() == [1, 1] and call.me is call
    assert prepared.args[1].tolist() == [1, 1] and type(prepared.args[1]) is np.ndarray


def test_arrays_are_kept_without_a_copy_and_donated_ones_with(tmp_path: Path):
    def scaled(a: Any, b: Any) -> Any:
        return a * 2, b * 2

    recorder = graftax.record(graftax.jit(scaled, donate="b"), dir=tmp_path)
    a, b = jnp.ones(4), jnp.full(4, 3.0)
    recorder(a, b)
    (call,) = recorder._history.ring.calls
    assert call.leaves[0] is a and b.is_deleted() and call.leaves[1].tolist() == [3, 3, 3, 3]


def test_a_hit_runs_no_python_code_of_the_recorder(tmp_path: Path):
    def count(model: Model, x: Any) -> Any:
        model.steps += 1
        model.w = model.w * x
        return model.w.sum()

    recorder = graftax.record(count, dir=tmp_path)
    model, called = Model(), list[str]()
    for _ in range(40):
        recorder(model, jnp.ones(2))
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        for _ in range(4):
            recorder(model, jnp.ones(2))
    finally:
        sys.setprofile(None)
    assert not [file for file in called if "_record" in file]
    assert len(recorder._history.ring.calls) == 3 and model.steps == 44


def test_donated_arrays_are_copied_now_and_then_and_computed_again_between(tmp_path: Path):
    def advance(w: Any, n: Any, x: Any) -> Any:
        return w * 0.5 + x, n + 1

    recorder = graftax.record(graftax.jit(advance, donate=("w", "n")), copy_every=4, nonfinite=False, dir=tmp_path)
    state, expected = (jnp.ones(4), jnp.int32(0)), np.ones(4, np.float32)
    for i in range(11):
        given, before = state, expected
        state = recorder(*state, jnp.float32(i))
        expected = before * np.float32(0.5) + np.float32(i)
        assert given[0].is_deleted()
    links = [call.before is not None for call in recorder._history.ring.calls]
    assert links == [False, True, True]  # the ninth call was copied
    recorder.save(tmp_path / "calls")
    recorded = RecordedCalls(tmp_path / "calls")
    assert [recorded.run(i).differences for i in range(3)] == [[], [], []]
    last = recorded.prepare(2).args
    assert last[0].tolist() == before.tolist() and int(last[1]) == 10
    recorder(jnp.zeros(4), jnp.int32(7), jnp.float32(1))  # of no call
    assert recorder._history.ring.calls[-1].before is None


def test_static_objects_that_end_with_their_call_are_kept(tmp_path: Path):
    recorder = graftax.record(apply, nonfinite=False, dir=tmp_path)
    for _ in range(4):
        assert recorder(functools.partial(apply, double), jnp.ones(2)).tolist() == [2, 2]
        assert recorder(lambda x: x + 1, jnp.zeros(2)).tolist() == [1, 1]
    recorder.save(tmp_path / "calls")
    assert [RecordedCalls(tmp_path / "calls").run(i).differences for i in range(3)] == [[], [], []]


def apply(function: Any, x: Any) -> Any:
    return function(x)


def double(x: Any) -> Any:
    return x * 2


def test_only_the_last_calls_are_kept(tmp_path: Path):
    recorder = graftax.record(lambda x: x + 1, last=2, dir=tmp_path)
    first = jnp.zeros(())
    alive = weakref.ref(first)
    recorder(first)
    del first
    for i in range(2):
        assert alive() is not None
        recorder(jnp.float32(i))
    assert alive() is None
    recorder.save(tmp_path / "calls")
    assert len(RecordedCalls(tmp_path / "calls")) == 2
    assert recorder.files == [str(tmp_path / "calls")]


def test_a_call_that_finds_more_to_read_is_kept_with_it(tmp_path: Path):
    recorder = graftax.record(count_up, nonfinite=False, dir=tmp_path)
    before = dict(COUNTED)
    recorder(jnp.ones(()))
    recorder.save(tmp_path / "call")
    recorded = RecordedCalls(tmp_path / "call")
    assert recorded.run(0).differences == []
    recorded.prepare(0)
    assert COUNTED == before and COUNTED["n"] == 0


COUNTED = {"n": 0, "sum": jnp.zeros(())}


def count_up(x: Any) -> Any:
    return add(x) * 2


def add(x: Any) -> Any:
    """Only this helper names what is changed: it is found in the trace."""
    COUNTED["n"] += 1
    COUNTED["sum"] = COUNTED["sum"] + x
    return COUNTED["sum"]


# ---- when a file is written


def test_a_result_that_is_not_finite_writes_one_file(tmp_path: Path):
    recorder = graftax.record(log_step, dir=tmp_path)
    model = Model()
    assert warned(recorder, model, jnp.ones(2)) == [] and warned(recorder.flush) == []
    assert warned(recorder, model, -jnp.ones(2)) == []  # not read yet
    (text,) = warned(recorder, model, -jnp.ones(2))
    assert "log_step: a result is not finite" in text and recorder.files[0] in text
    assert warned(recorder, model, -jnp.ones(2)) == [] and warned(recorder.flush) == []
    outcomes = [RecordedCalls(recorder.files[0]).run(i).nonfinite for i in range(2)]
    assert outcomes == [[], ["result['loss']", "model.w"]]


@pytest.mark.parametrize(("checked", "expected"), [("result.loss", 1), (["result[1]"], 0), ("**.w", 1), (False, 0)])
def test_a_filter_chooses_the_results(tmp_path: Path, checked: Any, expected: int):
    def masked(model: Model, x: Any) -> Any:
        model.w = jnp.log(x)
        return {"loss": x.sum() / 0}, jnp.where(x > 0, x, 0.0)

    recorder = graftax.record(masked, nonfinite=checked, dir=tmp_path)
    if checked == "result.loss":
        recorder = graftax.record(masked, nonfinite="result[0][loss]", dir=tmp_path)
    recorder(Model(), -jnp.ones(2))
    assert len(warned(recorder.flush)) == expected


def test_with_shardings_and_many_leaves_the_results_are_looked_at(tmp_path: Path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    for options in ({"out_shardings": sharding}, {"in_shardings": sharding}, {"donate": "xs"}, {"keep_unused": True}):
        recorder = graftax.record(graftax.jit(lambda xs: [jnp.log(x) for x in xs], **options), dir=tmp_path)
        for value in (1.0, 1.0, -1.0):
            recorder([jnp.full(2, value) for _ in range(40)])
        assert len(warned(recorder.flush)) == 1, options


@pytest.mark.parametrize("make", [jnp.array, np.array, lambda x: jax.new_ref(jnp.array(x))])
def test_what_an_input_has_is_no_result(tmp_path: Path, make: Any):
    def masked(mask: Any, x: Any) -> Any:
        return mask, jnp.where(mask[...] == 0, x, 0.0)

    recorder = graftax.record(masked, dir=tmp_path)
    recorder(make([0.0, -np.inf]), jnp.ones(2))
    assert warned(recorder.flush) == []


def test_what_is_written_into_a_ref_is_a_result(tmp_path: Path):
    def divide(ref: Any, x: Any) -> None:
        ref[...] = ref[...] / x

    recorder = graftax.record(divide, dir=tmp_path)
    ref = jax.new_ref(jnp.array([1.0, jnp.inf]))
    recorder(ref, jnp.float32(2))
    assert warned(recorder.flush) == []
    recorder(ref, jnp.float32(0))
    (text,) = warned(recorder.flush)
    assert "is not finite" in text and RecordedCalls(recorder.files[0]).run(1).differences == []


def raising(x: Any, when: str) -> Any:
    if when == "trace":
        raise KeyError("no such layer")
    if when == "callback":
        return jax.pure_callback(fail, jax.ShapeDtypeStruct((2,), "float32"), x)
    return x


def fail(x: Any) -> Any:
    raise RuntimeError("the host says no")


@pytest.mark.parametrize("when", ["trace", "callback"])
def test_an_exception_is_raised_as_without_and_writes_a_file(tmp_path: Path, when: str):
    recorder = graftax.record(raising, dir=tmp_path)
    jax.block_until_ready(recorder(jnp.ones(2), "never"))
    errors: list[Any] = []
    for f in (graftax.jit(raising), recorder):
        with warnings.catch_warnings(), pytest.raises((KeyError, jax.errors.JaxRuntimeError)) as raised:
            warnings.simplefilter("ignore")
            jax.block_until_ready(f(jnp.ones(2), when))
            recorder.flush()
        errors.append((type(raised.value), str(raised.value).splitlines()[-1]))
    warned(recorder.flush)
    assert errors[0] == errors[1]
    (file,) = recorder.files
    last = RecordedCalls(file).run(1)
    assert last.differences == [] and ("no such layer" if when == "trace" else "the host says no") in last.raised


def test_on_chooses_the_exceptions(tmp_path: Path):
    for on, expected in ((ValueError, 0), (LookupError, 1), ((), 0), ((ValueError, KeyError), 1)):
        recorder = graftax.record(raising, on=on, dir=tmp_path)
        with warnings.catch_warnings(), pytest.raises(KeyError):
            warnings.simplefilter("ignore")
            recorder(jnp.ones(2), "trace")
        assert len(recorder.files) == expected


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path):
    (tmp_path / "folder").write_text("a file")
    recorder = graftax.record(jnp.log, dir=tmp_path / "folder")
    recorder(-jnp.ones(2))
    (text,) = warned(recorder.flush)
    assert "could not be written" in text and recorder.files == []


def test_a_recorder_that_is_dropped_has_read_its_last_call(tmp_path: Path):
    recorder = graftax.record(lambda x: jnp.log(x), dir=tmp_path)
    recorder(-jnp.ones(2))
    history = recorder._history
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        del recorder
        gc.collect()
    assert len(found) == 1 and len(history.files) == 1


# ---- the wrapper


class Net:
    def __init__(self, w: Any) -> None:
        self.w = w

    @graftax.record(nonfinite=False)
    def grow(self, x: Any) -> Any:
        self.w = self.w * x
        return self.w

    @graftax.jit(donate="x")
    def jitted(self, x: Any) -> Any:
        return self.w * x

    def __call__(self, x: Any) -> Any:
        return self.w - x


def test_methods_partials_and_objects(tmp_path: Path):
    net = Net(jnp.full(2, 3.0))
    partial = functools.partial(lambda net, x, *, k: net(x) * k, net, k=2.0)
    calls = [net.grow, graftax.record(net.jitted), graftax.record(net.__call__), graftax.record(net)]
    calls += [graftax.record(partial), graftax.record(graftax.filter_jit(net)), graftax.record(graftax.jit(net.jitted))]
    expected = [6.0, 12.0, 4.0, 4.0, 8.0, 4.0, 12.0]
    for i, (f, value) in enumerate(zip(calls, expected, strict=True)):
        assert f(jnp.full(2, 2.0)).tolist() == [value, value]
        f.save(tmp_path / f"{i}")
        outcome = RecordedCalls(tmp_path / f"{i}").run(0)
        assert outcome.differences == [], (i, outcome)


def test_under_a_transform_and_disable_jit_nothing_is_kept(tmp_path: Path):
    recorder = graftax.record(lambda x: jnp.log(x).sum(), dir=tmp_path)
    assert jax.grad(recorder)(jnp.ones(2)).tolist() == [1, 1]
    assert graftax.jit(lambda x: recorder(x))(jnp.ones(2)) == 0
    with jax.disable_jit():
        recorder(jnp.ones(2))
    with pytest.raises(ValueError, match="no call"):
        recorder.save(tmp_path / "none")


def test_a_recorder_is_a_jitted_function(tmp_path: Path):
    def step(model: Model, x: Any) -> Any:
        return log_step(model, x)

    jitted = graftax.jit(step)
    recorder = graftax.record(jitted, dir=tmp_path)
    assert isinstance(recorder, graftax.Recorder) and isinstance(recorder, graftax.Jitted)
    jitted(Model(), jnp.ones(2))
    recorder(Model(), jnp.ones(2))
    assert recorder.cache_info().traces == 1 and jitted.cache_info().traces == 1  # of a program with the check
    graftax.record(jitted, nonfinite=False)(Model(), jnp.ones(2))
    assert jitted.cache_info().traces == 1  # without it they share their programs
    assert copy.copy(recorder) is recorder and "graftax.record of" in repr(recorder)
    copied = pickle.loads(pickle.dumps(graftax.record(log_step, last=7, dir=tmp_path)))
    assert copied._history.policy.last == 7
    assert graftax.nonfinite(recorder, Model(), -jnp.ones(2)).cause.operation == "log"


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="last=0"):
        graftax.record(log_step, last=0)
    with pytest.raises(TypeError, match="on="):
        graftax.record(log_step, on="ValueError")
    with pytest.raises(ValueError, match="check=True"):
        graftax.record(graftax.jit(log_step, check=True))
    with pytest.raises(ValueError, match="nonfinite="):
        graftax.record(log_step, nonfinite="")


def test_arrays_that_a_recorder_holds_are_not_donated_by_themselves(tmp_path: Path):
    def decay(state: Any) -> None:
        state["w"] = state["w"] * 0.5

    recorder = graftax.record(graftax.jit(decay, donate="auto"), dir=tmp_path)
    state = {"w": jnp.ones((200, 200))}
    for _ in range(4):
        recorder(state)
    recorder.save(tmp_path / "calls")
    recorded = RecordedCalls(tmp_path / "calls")
    assert [recorded.run(i).differences for i in range(3)] == [[], [], []]
    assert [float(recorded.prepare(i).args[0]["w"][0, 0]) for i in range(3)] == [0.5, 0.25, 0.125]


# ---- calls within calls


def test_calls_in_a_trace_leave_those_that_are_kept(tmp_path: Path):
    f = graftax.record(lambda x: x * 2, last=2, dir=tmp_path)
    for i in range(2):
        f(jnp.float32(i))
    assert jax.jit(lambda x: f(x) + f(x))(jnp.ones(2)).tolist() == [4.0, 4.0]
    f.save(tmp_path / "call.record")
    assert len(RecordedCalls(tmp_path / "call.record")) == 2


@graftax.record(last=1)
def power(x: Any, n: int) -> Any:
    return x if n == 1 else x * power(x, n - 1)


def test_a_function_that_calls_itself(tmp_path: Path):
    assert power(jnp.float32(2), 5) == 32
    power.save(tmp_path / "call.record")
    assert RecordedCalls(tmp_path / "call.record").run(0).differences == []


# ---- errors


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"last": 0}, "last=0: expected at least 1, the number of calls to keep"),
        ({"copy_every": 0}, "copy_every=0: expected at least 1, a number of calls"),
        ({"on": 3}, "on=3: expected an exception class"),
        ({"nonfinite": 3}, "nonfinite=3: expected True, False, or patterns of key paths"),
        ({"nonfinite": []}, r"nonfinite=\[\]: expected True"),
    ],
    ids=str,
)
def test_what_is_no_option_is_named(options: dict[str, Any], error: str):
    with pytest.raises((TypeError, ValueError), match=error):
        graftax.record(abs, **options)
