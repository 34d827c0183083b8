# SPDX-License-Identifier: Apache-2.0
"""Programs on disk: a fresh process runs them without a trace or a compilation; anything that differs is a miss."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import graftax
import shipped_functions
from graftax._export.structure_digest import code_digest, token

pytestmark = pytest.mark.usefixtures("cache_of_jax_is_off")

SUPPORT = Path(shipped_functions.__file__).parent
FUNCTIONS = ["step", "donating", "wide", "by_value", "with_closure", "with_sentinels"]

LOADING = """
import json, sys, warnings
from graftax._jax.compilation import compile_stage, on_compile_stages
stages = []
def note(event, seconds, **about):
    if found := compile_stage(event, about):
        stages.append(found)
on_compile_stages(note)
import shipped_functions
name, path, change = sys.argv[1:]
f = getattr(shipped_functions, name)
shipped_functions.arguments(name)
exec(change, vars(shipped_functions))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    loaded = f.load_compiled(path)
stages.clear()
results = [shipped_functions.result(name) for _ in range(3)]
mine = [s for s in stages if s[1] == name]
info = f.cache_info()
more = shipped_functions.result(name, 4)
import graftax
print(json.dumps([loaded, results, mine, info.traces, more, [str(w.message) for w in caught], str(graftax.explain(f))]))
"""


def in_a_fresh_process(name, path, change=""):
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    command = [sys.executable, "-c", LOADING, name, str(path), change]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=SUPPORT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def saved(tmp_path, request):
    name = getattr(request, "param", "step")
    f = getattr(shipped_functions, name)
    f.clear_cache()
    expected = shipped_functions.result(name)
    path = tmp_path / "programs"
    assert f.save_compiled(path) == 1
    yield name, path, expected
    f.clear_cache()


def test_loading_tells_how_far_it_is(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    double, path, told = graftax.jit(lambda x: x * 2), tmp_path / "programs", []
    double.warm([(jax.ShapeDtypeStruct((n,), "float32"),) for n in (1, 2)])
    assert double.save_compiled(path) == 2
    double.clear_cache()
    assert double.load_compiled(path, progress=lambda done, of, seconds: told.append((done, of, seconds > 0))) == 2
    assert told == [(1, 2, True), (2, 2, True)]
    double.clear_cache()
    monkeypatch.setattr(sys, "stderr", Terminal())
    double.load_compiled(path)
    assert "1/2 programs" in sys.stderr.getvalue() and sys.stderr.getvalue().endswith(" s\n")


@pytest.mark.quick(0)  # an interpreter each; nothing else shows what code of another process reads
@pytest.mark.parametrize("saved", FUNCTIONS, indirect=True)
def test_a_fresh_process_traces_and_compiles_nothing(saved):
    name, path, expected = saved
    loaded, results, stages, traces, more, warned, explained = in_a_fresh_process(name, path)
    assert loaded == 1 and warned == []
    assert results == [expected] * 3
    assert stages == [] and traces == 0
    assert more == shipped_functions.result(name, 4)  # another shape compiles
    assert "loaded from a file" in explained and "shape (3,), is shape (4,)" in explained


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("LIMIT = 5", "global shipped_functions.LIMIT is different"),
        ("Model.scale = 3.0", "class attribute Model.scale is different"),
        ("def helper(x): return x * rate[0] * LIMIT * 2", "helper"),
        ("def out(self, x): return x\nModel.out = out", "Model.out is different"),
        (
            "import graftax._export.program_key as f; f.version_of = lambda p: '0'",
            "jax was",
        ),
    ],
)
def test_what_differs_is_a_miss_that_is_told(saved, change, why):
    name, path, _expected = saved
    loaded, _results, stages, traces, *_, warned, _ = in_a_fresh_process(name, path, change)
    assert loaded == 0 and traces == 1 and [stage for stage, _ in stages].count("compiled") == 1
    assert why in warned[0] and "are not used" in warned[0]


@pytest.mark.quick(0)
def test_state_in_a_global_is_compared_on_each_call(saved):
    name, path, expected = saved
    loaded, results, _stages, traces, *_ = in_a_fresh_process(name, path, "rate[0] = 5.0")
    assert loaded == 1 and traces == 1 and results[0] != expected


def test_a_structure_of_its_own_compiles_beside_those_that_were_loaded(saved):
    _, path, _ = saved
    f = shipped_functions.step
    f.clear_cache()
    assert f.load_compiled(path) == 1
    f.freeze()
    try:
        model, x, mode = shipped_functions.arguments("step")
        assert f(model, x, mode)["model"] is model and model.calls == 1
        with pytest.raises(graftax.RecompileError, match="mode was 'train', is 'test'"):
            f(model, x, "test")
        with pytest.raises(graftax.RecompileError, match="x was shape"):
            f(model, jnp.ones((2, 3)), mode)
    finally:
        f.unfreeze()
    assert f(model, x, "test")["mode"] == "test"
    assert f.cache_info().traces == 1


def test_a_setting_of_jax_is_a_miss(saved):
    _, path, _ = saved
    f = shipped_functions.step
    f.clear_cache()
    f.load_compiled(path)
    with jax.default_matmul_precision("highest"):
        f(*shipped_functions.arguments("step"))
    assert f.cache_info().traces == 1


def test_what_changes_after_loading_is_noticed(saved, monkeypatch):
    _, path, _ = saved
    f = shipped_functions.step
    f.clear_cache()
    f.load_compiled(path)
    before = f(*shipped_functions.arguments("step"))["y"]
    assert f.cache_info().traces == 0
    monkeypatch.setattr(shipped_functions, "LIMIT", 4)
    assert f(*shipped_functions.arguments("step"))["y"].tolist() == (before * 2).tolist()


class Tied:
    def __init__(self, is_tied):
        self.a, b = jnp.ones(2), jnp.ones(2)
        self.b = self.a if is_tied else b


def train(model, opt):
    opt.update(model, graftax.grad(lambda model: (model.a * model.b).sum())(model))


@pytest.mark.parametrize("where", ["a file", "a cache on disk"])
@pytest.mark.parametrize("was_tied", [True, False])
def test_a_program_for_tied_arrays_is_not_run_for_others(tmp_path, where, was_tied):
    def call(is_tied):
        model, opt = Tied(is_tied), graftax.optimizer(optax.sgd(0.1), Tied(was_tied))
        step(model, opt)
        assert (model.a is model.b) == is_tied and (model.a < 1).all()

    step, cache = graftax.jit(train), graftax.cache(tmp_path / "cache", min_seconds=0)
    try:
        if where == "a file":
            graftax.cache(None)
        call(was_tied)
        cache.flush()
        if where == "a file":
            step.save_compiled(tmp_path / "programs")
        step.clear_cache()
        if where == "a file":
            assert step.load_compiled(tmp_path / "programs") == 1
        call(was_tied)
        assert step.cache_info().traces == 0
        for _ in range(2):
            with pytest.raises(graftax.StructureError, match="were one array" if was_tied else "were several"):
                call(not was_tied)
    finally:
        graftax.cache(None)


def test_what_is_no_file_of_programs_is_refused(tmp_path, saved):
    path = tmp_path / "other"
    path.write_bytes(pickle.dumps(1))
    with pytest.raises(graftax.GraftaxError, match="holds no programs"):
        shipped_functions.step.load_compiled(path)
    whole = saved[1].read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.warns(graftax.RecompileWarning, match="cannot be read"):
        assert shipped_functions.step.load_compiled(path) == 0
    with pytest.warns(graftax.RecompileWarning, match="name was step, is wide"):
        assert shipped_functions.wide.load_compiled(saved[1]) == 0


@pytest.mark.quick(0)
def test_a_sentinel_goes_by_the_name_that_leads_to_it(tmp_path):
    f, x, path = shipped_functions.with_sentinels, jnp.arange(3.0), tmp_path / "programs"
    options = {"scale": shipped_functions.UNSET, "mode": shipped_functions.Modes.AUTO}
    f.clear_cache()
    f(options, x)
    assert f.save_compiled(path) == 1
    f.clear_cache()
    assert f.load_compiled(path) == 1
    other = options | {"scale": shipped_functions.OTHER}  # is told from the one in the file
    assert f(other, x).tolist() == [0, 3, 6] and f.cache_info().traces == 1
    assert f(options, x).tolist() == [0, 2, 4] and f.cache_info().traces == 1
    graphdef = graftax.flatten(options)[1]
    assert pickle.loads(pickle.dumps(graphdef)) == graphdef != graftax.flatten(other)[1]
    f(options | {"scale": object()}, x)
    with pytest.raises(graftax.GraftaxError, match=r"options\['scale'\] is a object, which is compared by identity"):
        f.save_compiled(path)
    f.clear_cache()


def test_there_has_to_be_something_to_save(tmp_path):
    f = graftax.jit(lambda x: x)
    with pytest.raises(graftax.GraftaxError, match="nothing was compiled"):
        f.save_compiled(tmp_path / "programs")
    f = graftax.filter_jit(lambda x: x)
    f(jnp.ones(2))
    with pytest.raises(graftax.GraftaxError, match="mutation='discard'"):
        f.save_compiled(tmp_path / "programs")
    f, mark = graftax.jit(lambda x, mark: x), object()
    f(jnp.ones(2), mark)
    with pytest.raises(graftax.GraftaxError, match="mark is a object, which is compared by identity"):
        f.save_compiled(tmp_path / "programs")
    assert list(tmp_path.iterdir()) == []


def test_code_is_told_by_what_it_does():
    def one(x):
        return [x, lambda: 1]

    def other(x):
        return [x, lambda: 2]

    assert code_digest(one.__code__) != code_digest(other.__code__)
    assert code_digest(one.__code__) == code_digest(one.__code__.replace(co_firstlineno=99))


CACHED = """
import collections, sys
import jax, jax.monitoring
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **about: counts.update([event.rsplit("/", 1)[-1]]))
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
import shipped_functions
for name in ("step", "donating", "wide", "with_closure"):
    shipped_functions.result(name)
print(counts["cache_hits"], counts["cache_misses"])
"""


@pytest.mark.quick(0)
def test_jaxs_own_cache_on_disk_is_hit_by_every_program(tmp_path):
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path]),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
    }
    command = [sys.executable, "-c", CACHED, str(tmp_path)]
    done = [subprocess.run(command, env=env, capture_output=True, text=True, check=True) for _ in range(2)]
    (hits, misses), (again, missed) = (map(int, run.stdout.split()) for run in done)
    assert hits == 0 and misses >= 4
    assert (again, missed) == (misses, 0)


NUMBERS = """
import json, sys, warnings
import shipped_functions
warnings.simplefilter("error")
f = shipped_functions.counting
loaded = f.load_compiled(sys.argv[1])
f.freeze()
trainer, x, sums = shipped_functions.Trainer(int(sys.argv[2])), shipped_functions.jnp.arange(3.0), []
for _ in range(9):
    sums.append(float(f(trainer, x)))
print(json.dumps([loaded, sums, trainer.step, trainer.marks, f.cache_info().traces]))
"""


@pytest.mark.quick(0)
@pytest.mark.parametrize("start", [0, 57])
def test_symbolic_numbers_go_on_in_another_process(tmp_path, start):
    f, path = shipped_functions.counting, tmp_path / "programs"
    f.clear_cache()
    trainer, x = shipped_functions.Trainer(), jnp.arange(3.0)
    for _ in range(9):
        f(trainer, x)
    count = f.save_compiled(path)
    assert count >= 2  # both answers of the guard
    again, sums = shipped_functions.Trainer(start), []
    for _ in range(9):
        sums.append(float(f(again, x)))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    command = [sys.executable, "-c", NUMBERS, str(path), str(start)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=SUPPORT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [count, sums, again.step, again.marks, 0]
    f.clear_cache()


AT_ONCE = """
import json, sys
import shipped_functions
f = shipped_functions.calling
x = shipped_functions.jnp.arange(3.0)
loaded = f.load_compiled(sys.argv[1])
first = f(shipped_functions.WithFunctions(), x).tolist()
info = f.cache_info()
f(shipped_functions.WithFunctions(), x)
other = f(shipped_functions.WithFunctions(3.0), x).tolist()
longer = f(shipped_functions.WithFunctions(), shipped_functions.jnp.arange(1.0)).tolist()
print(json.dumps([loaded, first, info.hits, info.misses, other, longer, f.cache_info().traces]))
"""


@pytest.mark.quick(0)
def test_the_first_call_of_what_was_loaded_is_a_hit(tmp_path):
    f, path, x = shipped_functions.calling, tmp_path / "programs", jnp.arange(3.0)
    f.clear_cache()
    expected = f(shipped_functions.WithFunctions(), x).tolist()
    assert f.save_compiled(path) == 1
    other = f(shipped_functions.WithFunctions(3.0), x).tolist()
    longer = f(shipped_functions.WithFunctions(), jnp.arange(1.0)).tolist()
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    command = [sys.executable, "-c", AT_ONCE, str(path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=SUPPORT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1, expected, 1, 0, other, longer, 2]
    f.clear_cache()


def test_placeholders_are_those_of_the_first_call_that_fits(tmp_path):
    f, path, x = shipped_functions.with_placeholders, tmp_path / "programs", jnp.ones(2)
    apart = lambda: {"a": shipped_functions.Placeholder(), "b": shipped_functions.Placeholder()}
    f.clear_cache()
    f(saved := apart(), x)
    f.save_compiled(path)
    f.clear_cache()
    assert f.load_compiled(path) == 1
    one = shipped_functions.Placeholder()
    assert f({"a": one, "b": one}, x).tolist() == [2, 2]  # shared: another program
    assert f.cache_info().traces == 1
    fresh = apart()
    assert f(fresh, x).tolist() == f(fresh, x).tolist() == [3, 3]
    assert (f.cache_info().misses, f.cache_info().hits) == (1, 2)  # bound at once: a hit
    assert f(apart(), x).tolist() == f(saved, x).tolist() == [3, 3]  # later ones by the fingerprint
    assert f.cache_info().traces == 1
    f.clear_cache()


@pytest.mark.quick(0)
def test_a_sentinel_that_a_library_names_is_no_placeholder(tmp_path):
    f, path, x = shipped_functions.with_a_librarys_sentinel, tmp_path / "programs", jnp.ones(2)
    # Python 3.15 has a type for all sentinels, and one is saved by its name.
    other = dataclasses.KW_ONLY if sys.version_info >= (3, 15) else type(dataclasses.MISSING)()
    for first, then in [(dataclasses.MISSING, other), (other, dataclasses.MISSING)]:
        f.clear_cache()
        expected = f(x, first).tolist()
        f.save_compiled(path)
        f.clear_cache()
        assert f.load_compiled(path) == 1
        assert f(x, then).tolist() != expected
        assert f(x, first).tolist() == expected
        assert f.cache_info().traces == 1
    f.clear_cache()


class Weights:
    def __init__(self):
        self.w, self.b = jnp.ones(3), jnp.zeros(2)


@graftax.jit
def scaled(model, x):
    return model.w * x


def test_a_structure_with_a_packed_object_is_left_out_with_a_warning(tmp_path):
    scaled.clear_cache()
    packed = graftax.pack(Weights())
    scaled(packed, jnp.ones(()))
    with pytest.raises(graftax.GraftaxError, match="model is packed, and the layout"):
        scaled.save_compiled(tmp_path / "programs")
    scaled(Weights(), jnp.ones(()))
    with pytest.warns(
        graftax.RecompileWarning, match="leaves out 1 of the structures: scaled cannot .* model is packed"
    ):
        assert scaled.save_compiled(tmp_path / "programs") == 1
    scaled.clear_cache()
    assert scaled.load_compiled(tmp_path / "programs") == 1
    scaled(Weights(), jnp.ones(()))
    assert scaled.cache_info().traces == 0


def test_several_that_save_under_one_name_leave_one_whole_file(tmp_path):
    f = graftax.jit(lambda x: x + 1)
    f(jnp.ones(2))
    path = tmp_path / "f.programs"
    f.save_compiled(path)
    path.chmod(0o600)
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        assert list(threads.map(lambda _: f.save_compiled(path), range(12))) == [1] * 12
    assert list(tmp_path.iterdir()) == [path] and path.stat().st_mode & 0o777 == 0o600
    assert f.load_compiled(path) == 1


@dataclasses.dataclass(frozen=True)
class Chosen:
    names: frozenset


def test_the_digest_of_a_value_does_not_depend_on_the_order_of_its_sets():
    one, other = Chosen(frozenset([(0,), 8, 16])), Chosen(frozenset([16, 8, (0,)]))
    few, many = Chosen(frozenset([8, 0])), Chosen(frozenset([0, 8]))  # of one slot: the first one comes first
    assert list(few.names) != list(many.names) and token(few) == token(many)
    assert token(one) == token(other) != token(few)
