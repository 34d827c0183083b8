# SPDX-License-Identifier: Apache-2.0
"""`jit(..., background=True)`: calls do not wait for XLA, and are what they would be if they did."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from compilations import compilations
from graftax._base.errors import MutationError


class Gate:
    """Holds each compilation in the background until `open()`."""

    def __init__(self, monkeypatch) -> None:
        self._may_go, self.error, self.begun = threading.Event(), None, 0
        compile_now = jax.stages.Lowered.compile

        def compile_later(lowered, *args, **kwargs):
            if threading.current_thread().name.startswith("graftax compiles"):
                self.begun += 1
                assert self._may_go.wait(120)
                if self.error is not None:
                    raise self.error
            return compile_now(lowered, *args, **kwargs)

        monkeypatch.setattr(jax.stages.Lowered, "compile", compile_later)

    def open(self, *functions, error=None) -> None:
        self.error = error
        self._may_go.set()
        for function in functions:
            for entry in list(function._table.entries.values()):
                entry.compiled.wait_until_compiled()
            assert function.cache_info().compiling == 0


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


class Model:
    def __init__(self):
        self.w, self.steps, self.log = jnp.arange(4.0), 0, []


@pytest.fixture
def train():
    def train(model, x, scale=2.0):
        model.steps += 1
        model.w = model.w + jax.nn.relu(x) * scale
        model.log.append(model.w.sum())
        return {"loss": jnp.tanh(model.w).mean(), "same": model.w, "steps": model.steps, "x": x}, model

    train.shares = False  # its programs with those of other tests
    return train


def state_of(model):
    return model.w.tolist(), model.steps, [float(x) for x in model.log]


def test_calls_before_and_after_the_program_are_those_of_plain_python(gate, train):
    step = graftax.jit(train, background=True)
    model, plain = Model(), Model()
    with compilations("train") as compiled:
        for i in range(6):
            x = jnp.full(4, i - 1.0)
            (result, same), (expected, _) = step(model, x), train(plain, x)
            assert same is model and result["same"] is model.w
            assert result["steps"] == expected["steps"] == i + 1
            np.testing.assert_allclose(result["loss"], expected["loss"], rtol=1e-6)
            assert state_of(model) == state_of(plain)
            model.log.clear(), plain.log.clear()
            if i == 2:
                assert step.cache_info().compiling == gate.begun == 1
                gate.open(step)
    assert compiled == ["train"]
    assert step.cache_info().traces == 1


def test_the_body_runs_once_however_many_calls_come_before_the_program(gate):
    step = graftax.jit(lambda x: jnp.sin(x) + jax.jit(jnp.cos)(x), background=True)
    for i in range(40):
        assert step(jnp.float32(i)) == pytest.approx(np.sin(i) + np.cos(i), abs=1e-5)
    assert step.cache_info().traces == 1 and step.cache_info().compiling == 1
    gate.open(step)
    for i in range(40):
        assert step(jnp.float32(i)) == pytest.approx(np.sin(i) + np.cos(i), abs=1e-5)
    assert step.cache_info()[:2] == (79, 1) and step.cache_info().traces == 1
    assert gate.begun == 1


def test_printing_at_trace_time_happens_once(gate, capsys):
    @graftax.jit(background=True, warn_impure=False)
    def step(x):
        print("traced")
        return x * 2

    for _ in range(3):
        step(jnp.ones(3))
    gate.open(step)
    step(jnp.ones(3))
    assert capsys.readouterr().out == "traced\n"


@pytest.mark.parametrize("committed", [True, False])
def test_results_have_the_types_and_places_that_the_program_gives(gate, committed):
    def everything(x, key, host, n):
        a, b = jax.random.split(key)
        c = x + 0
        shared = x * 1.5
        return [x, c, shared, shared.T, 3, jnp.float32(1), jnp.asarray(2), a, b, host, host + 1, n * x, jnp.arange(3)]

    arguments = jnp.ones((2, 3)), jax.random.key(0), np.arange(4), 3
    if committed:
        arguments = jax.device_put(arguments[:2], jax.devices()[0]) + arguments[2:]
    early, late = graftax.jit(everything, background=True), graftax.jit(everything)
    early_results, expected = early(*arguments), late(*arguments)
    assert early.cache_info().compiling == 1
    for result, other in zip(early_results, expected, strict=True):
        assert type(result) is type(other)
        if isinstance(result, jax.Array):
            assert result.aval == other.aval and getattr(result, "weak_type", None) == getattr(other, "weak_type", None)
            assert result.committed == other.committed and result.sharding == other.sharding
            data = [
                jax.random.key_data(k) if jnp.issubdtype(k.dtype, jax.dtypes.prng_key) else k for k in (result, other)
            ]
            np.testing.assert_array_equal(*data)
    gate.open(early)
    early(*early_results[:1], *arguments[1:])
    assert early.cache_info().traces == 1


def test_what_an_early_call_returns_is_no_other_array(gate):
    step = graftax.jit(lambda x, y: (x + 0 * y, jax.jit(lambda z: z)(x)), background=True)
    x = jnp.ones(5)
    first, second = step(x, x)
    jax.jit(lambda z: z, donate_argnums=0)(second)
    assert x.tolist() == [1] * 5 and first.tolist() == [1] * 5


def test_an_exception_of_the_body_is_its_own(gate, train):
    @graftax.jit(background=True)
    def step(model, fails):
        model.w = model.w + 1
        if fails:
            raise KeyError("no")
        return model.w

    model = Model()
    for _ in range(2):
        with pytest.raises(KeyError, match="no"):
            step(model, True)
        assert model.w.tolist() == [0, 1, 2, 3] and gate.begun == 0
    step(model, False)
    assert model.w.tolist() == [1, 2, 3, 4]
    with pytest.raises(MutationError):
        graftax.jit(train, background=True, mutation="error")(Model(), jnp.ones(4))


def test_the_next_call_raises_what_the_compiler_has_raised_and_the_one_after_compiles_again(gate, train):
    step, model = graftax.jit(train, background=True), Model()
    step(model, jnp.ones(4))
    model.log.clear()
    before = state_of(model)
    gate.open(step, error=RuntimeError("the compiler gave up"))
    with pytest.raises(RuntimeError, match="the compiler gave up"):
        step(model, jnp.ones(4))
    assert state_of(model) == before
    gate.open(step)
    step(model, jnp.ones(4))
    gate.open(step)
    assert model.steps == 2 and gate.begun == 2
    assert step.cache_info().traces == 1


def test_threads_that_call_while_it_compiles_share_the_program(gate, train):
    step = graftax.jit(train, background=True)
    models = [Model() for _ in range(8)]
    step(models[0], jnp.ones(4))  # several first calls at once may each make an entry
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda model: step(model, jnp.ones(4)), models[1:]))
        assert gate.begun == 1
        gate.open(step)
        for model in models:
            model.log.clear()
        list(pool.map(lambda model: step(model, jnp.ones(4)), models))
    plain = Model()
    for _ in range(2):
        plain.log.clear()
        train(plain, jnp.ones(4))
    assert all(state_of(model) == state_of(plain) for model in models)
    assert gate.begun == 1


@pytest.mark.quick(0)
def test_loops_branches_derivatives_and_numbers_that_change(gate):
    def f(x, n):
        def body(carry, row):
            return carry + row * n, jax.lax.cond(row.sum() > 1, jnp.sin, jnp.cos, row)

        total, rows = jax.lax.scan(body, jnp.zeros(3), x)
        total = jax.lax.while_loop(lambda t: t.sum() < 100, lambda t: t * 2 + 1, total)
        return jax.grad(lambda t: (jax.checkpoint(jnp.tanh)(t) * jax.nn.silu(t)).sum())(total), rows

    step, x = graftax.jit(f, background=True), jnp.arange(6.0).reshape(2, 3)
    for n in (2, 3, 4, 5):
        for result, other in zip(step(x, n), f(x, n), strict=True):
            np.testing.assert_allclose(result, other, rtol=1e-5)
    assert step.cache_info().traces <= 2
    gate.open(step)
    np.testing.assert_allclose(step(x, 6)[1], f(x, 6)[1], rtol=1e-5)
    assert step.cache_info().traces <= 2


def test_programs_that_call_the_host_and_outer_traces_do_not_wait(gate):
    printed = []

    @graftax.jit(background=True)
    def step(x):
        jax.debug.callback(lambda y: printed.append(float(y)), x)
        return x * 2

    for i in range(3):
        step(jnp.float32(i))
    jax.effects_barrier()
    assert sorted(printed) == [0, 1, 2] and step.cache_info().compiling == gate.begun == 0
    inner = graftax.jit(lambda x: x**2, background=True)
    assert jax.grad(inner)(3.0) == 6 and gate.begun == 0
    assert graftax.jit(lambda x: inner(x) + 1)(3.0) == 10 and gate.begun == 0
    with jax.disable_jit():
        assert inner(jnp.float32(3)) == 9
    assert gate.begun == 0


@pytest.mark.parametrize(
    "options", [{"donate": "auto"}, {"donate": "x"}, {"donate_argnums": 0}, {"out_shardings": jax.devices()[0]}]
)
def test_what_an_early_call_cannot_do_is_refused(options):
    with pytest.raises(ValueError, match="background=True evaluates a first call"):
        graftax.jit(lambda x: x, background=True, **options)


def test_explain_progress_and_warm_say_what_is_compiled_where(gate, train):
    stages = []
    step = graftax.jit(train, background=True, progress=lambda part, seconds: stages.append(part))
    step(Model(), jnp.ones(4))
    assert "compiling in the background" in str(graftax.explain(step))
    assert stages == ["recorded", "traced", "lowered"]
    assert graftax.explain(step, Model(), jnp.ones(4)).hit
    gate.open(step)
    assert "compiling in the background" not in str(graftax.explain(step))
    assert "compiled in" in str(graftax.explain(step)) and stages[3:] == ["compiled"]
    warmed = graftax.jit(train, background=True)
    warmed.warm([(Model(), jnp.ones(4))])
    assert warmed.cache_info().compiling == 0 and warmed.cache_info().traces == 1
    warmed.freeze()
    warmed(Model(), jnp.ones(4))
    assert warmed.cache_info().traces == 1


@pytest.mark.quick(0)
def test_it_goes_with_check_repeated_a_recorder_and_saved_programs(gate, train, tmp_path):
    models = [Model(), Model()]
    step = graftax.jit(lambda models, x: [train(m, x)[0]["loss"] for m in models], background=True, check=True)
    step(models, jnp.ones(4))
    repeated = graftax.jit(lambda models, x: [train(m, x)[0]["loss"] for m in models], background=True, repeated=train)
    repeated(models, jnp.ones(4))
    recorder = graftax.record(graftax.jit(train, background=True), last=2, dir=tmp_path)
    recorder(models[0], jnp.ones(4)), recorder(models[0], jnp.ones(4))
    assert [m.steps for m in models] == [4, 2]
    saved = graftax.jit(train, background=True)
    saved(Model(), jnp.ones(4))
    assert saved.cache_info().compiling == 1
    threading.Timer(0.1, gate.open).start()
    assert saved.save_compiled(tmp_path / "train.graftax") == 1


def test_the_cache_on_disk_has_a_program_once_a_call_has_run_it(gate, train, tmp_path):
    cache = graftax.cache(tmp_path, min_seconds=0)
    assert cache is not None
    try:
        step = graftax.jit(train, background=True)
        step(Model(), jnp.ones(4))
        gate.open(step)
        step(Model(), jnp.ones(4))
        cache.flush()
        assert "written" in graftax.explain(step).variants[0].on_disk
        step.clear_cache()
        step(Model(), jnp.ones(4))
        assert step.cache_info().disk == 1 and gate.begun == 1
    finally:
        graftax.cache(None)


PROGRAM = """
import jax, jax.numpy as jnp, graftax

@graftax.jit(background=True)
def f(x):
    for i in range(60):
        x = jnp.sin(x) + jnp.roll(x, i).reshape(8, -1).T.reshape(-1)
    return x

print(f(jnp.ones(64)).shape, f.cache_info().compiling)
"""


@pytest.mark.quick(0)
@pytest.mark.parametrize("direct", ["0", "1"])
def test_a_process_ends_while_it_compiles(direct):
    environment = {**os.environ, "GRAFTAX_DIRECT_DISPATCH": direct, "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False, timeout=300
    )
    assert ended.returncode == 0 and ended.stdout.startswith("(64,)") and not ended.stderr
