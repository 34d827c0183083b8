# SPDX-License-Identifier: Apache-2.0
"""The cache on disk: the next process runs what an earlier one compiled, and never what is not the same."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
import shipped_functions
from graftax._base.whole_file import alone_in
from graftax._jax import cache_of_jax

pytestmark = pytest.mark.usefixtures("cache_of_jax_is_off")

SUPPORT = Path(shipped_functions.__file__).parent

RUNNING = """
import json, sys, warnings
from graftax._jax.compilation import compile_stage, on_compile_stages
stages = []
def note(event, seconds, **about):
    if found := compile_stage(event, about):
        stages.append(found)
on_compile_stages(note)
import shipped_functions
name, start, change = sys.argv[1:]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import graftax
    exec(change, vars(shipped_functions))
    counts = range(9) if name == "counting" else [0] * 3
    results = [shipped_functions.result(name, int(start) + count) for count in counts]
f = getattr(shipped_functions, name)
mine = [stage for stage, of in stages if of == name]
info = f.cache_info()
print(json.dumps([results, mine, info.traces, info.disk, [str(w.message) for w in caught], str(graftax.explain(f))]))
"""


def in_a_fresh_process(name, folder, change="", start=3, **environment):
    environment |= {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path]), "GRAFTAX_CACHE": str(folder)}
    change = "import graftax._export.disk_cache as c; graftax.cache(c._current().folder, min_seconds=0)\n" + change
    command = [sys.executable, "-c", RUNNING, name, str(start), change]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, cwd=SUPPORT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def cache(tmp_path):
    """A cache that takes everything; what other tests compiled is forgotten."""
    for name in ("step", "counting", "wide"):
        getattr(shipped_functions, name).clear_cache()
    yield graftax.cache(tmp_path / "cache", min_seconds=0)
    graftax.cache(None)
    for name in ("step", "counting", "wide"):
        getattr(shipped_functions, name).clear_cache()


def files(cache, suffix=".program"):
    return sorted(cache.folder.rglob(f"*{suffix}"))


NAMES = ["step", "donating", "wide", "by_value", "filtered", "with_closure", "with_sentinels", "calling", "training"]


@pytest.mark.quick(0)  # interpreters; nothing else shows what code of another process reads
@pytest.mark.parametrize("name", NAMES)
def test_the_next_process_traces_and_compiles_nothing(tmp_path, name):
    expected, stages, traces, disk, warned, _ = in_a_fresh_process(name, tmp_path)
    assert (stages.count("compiled"), traces, disk, warned) == (1, 1, 0, [])
    results, stages, traces, disk, warned, explained = in_a_fresh_process(name, tmp_path)
    assert (results, stages, traces, disk, warned) == (expected, [], 0, 1, [])
    assert "loaded from the cache on disk" in explained


@pytest.mark.quick(0)
@pytest.mark.parametrize("start", [0, 57])
def test_a_counter_goes_on_in_another_process(tmp_path, start):
    first = in_a_fresh_process("counting", tmp_path, start=0)
    assert first[2] > 0 and first[3] == 0
    compiling = in_a_fresh_process("counting", tmp_path / "other", start=start)
    found = in_a_fresh_process("counting", tmp_path, start=start)
    assert found[0] == compiling[0]
    assert (found[1], found[2]) == ([], 0) and found[3] > 0


CHANGES = [
    ("import collections.abc\ncollections.abc.Sized.register(Model)", "class Sized has other classes registered"),
    ("LIMIT = 5", "global shipped_functions.LIMIT is different"),
    ("Model.scale = 3.0", "class attribute Model.scale is different"),
    ("def helper(x, k=2): return x * rate[0] * LIMIT * k", "helper"),
    ("def out(self, x): return x\nModel.out = out", "Model.out is different"),
    ("def helper(x): return x * 2\nstep.__wrapped__.__code__ = (lambda model, x, mode: helper(x)).__code__", "code"),
    ("import graftax._export.program_key as f; f.version_of = lambda p: '0'", "jax was"),
    ("import os; os.environ['XLA_FLAGS'] = '--xla_cpu_enable_fast_math=true'", "flags was"),
]


@pytest.mark.quick(0)
@pytest.mark.parametrize(("change", "why"), CHANGES, ids=[why for _, why in CHANGES])
def test_what_differs_compiles_and_explain_says_why(tmp_path, change, why):
    in_a_fresh_process("step", tmp_path)
    results, _, traces, disk, _, explained = in_a_fresh_process("step", tmp_path, change)
    expected, *_ = in_a_fresh_process("step", tmp_path / "other", change)
    assert results == expected
    assert traces == 1 and disk == 0
    assert f"not found: {why}" in explained or why in explained.partition("not found: ")[2]


FILTERED_CHANGES = [
    ("LIMIT = 5", "global shipped_functions.LIMIT is different"),
    ("rate[0] = 4.0", "rate has another content"),
    ("offsets = offsets + 1", "offsets has another content"),
    ("Model.scale = 3.0", "class attribute Model.scale is different"),
    ("def helper(x, k=2): return x * rate[0] * LIMIT * k", "global shipped_functions.helper is different"),
]


@pytest.mark.quick(0)
@pytest.mark.parametrize(("change", "why"), FILTERED_CHANGES, ids=[why for _, why in FILTERED_CHANGES])
def test_constants_of_filter_jit_are_compared_by_content(tmp_path, change, why):
    before, *_ = in_a_fresh_process("filtered", tmp_path)
    results, _, traces, disk, _, explained = in_a_fresh_process("filtered", tmp_path, change)
    expected, *_ = in_a_fresh_process("filtered", tmp_path / "other", change)
    assert results == expected != before
    assert (traces, disk) == (1, 0)
    assert f"not found: {why}" in explained


@pytest.mark.quick(0)
def test_what_jax_had_traced_before_is_compared(tmp_path):
    call = "jitted_by_jax(jnp.arange(3.0))"
    before, *_ = in_a_fresh_process("calling_jax", tmp_path, call)
    results, _, traces, disk, *_ = in_a_fresh_process("calling_jax", tmp_path, f"LIMIT = 5\n{call}")
    assert results != before and (traces, disk) == (1, 0)
    results, _, traces, disk, *_ = in_a_fresh_process("calling_jax", tmp_path, call)
    assert results == before and (traces, disk) == (0, 1)


def run(name, *arguments):
    f = getattr(shipped_functions, name)
    f(*(arguments or shipped_functions.arguments(name)))
    return f


def test_explain_and_cache_info_say_what_was_on_disk(cache):
    f = run("step")
    cache.flush()
    assert "cache on disk: not found: no program of this function; written" in str(graftax.explain(f))
    f.clear_cache()
    assert run("step").cache_info().disk == 1
    model, x, _ = shipped_functions.arguments("step")
    run("step", model, x, "test")
    cache.flush()
    run("step", model, jnp.ones(7), "test")
    cache.flush()
    first, second, third = graftax.explain(f).variants
    assert str(first.causes[0]) == "loaded from the cache on disk" and first.on_disk == ""
    assert (
        second.on_disk.startswith("not found: no program for arguments of this structure")
        and "; written" in second.on_disk
    )
    assert third.on_disk.startswith("not found: no program for arrays of these shapes") and "; written" in third.on_disk
    assert json.loads(graftax.explain(f).to_json())["variants"][2]["disk"] == third.on_disk
    assert f.cache_info().disk == 1 and f.cache_info().traces == 2


def test_shapes_of_one_structure_have_files_of_their_own(cache):
    expected = [shipped_functions.result("step", n) for n in (3, 4, 5)]
    f = shipped_functions.step
    cache.flush()
    assert len(files(cache)) == 3 and len(files(cache, ".reads")) == 1
    f.clear_cache()
    f.freeze()
    try:
        assert [shipped_functions.result("step", n) for n in (5, 3, 4)] == [expected[i] for i in (2, 0, 1)]
        assert [shipped_functions.result("step", n) for n in (3, 4, 5)] == expected  # from memory
    finally:
        f.unfreeze()
    assert (f.cache_info().traces, f.cache_info().disk) == (0, 3)


def test_a_shape_on_disk_joins_one_that_was_compiled_here(cache):
    expected = shipped_functions.result("step", 4)
    cache.flush()
    f = shipped_functions.step
    f.clear_cache()
    before = shipped_functions.result("step", 3)
    assert shipped_functions.result("step", 4) == expected and shipped_functions.result("step", 3) == before
    assert (f.cache_info().traces, f.cache_info().disk) == (1, 1)


def test_what_is_quick_to_compile_is_not_written(tmp_path):
    cache = graftax.cache(tmp_path / "cache", min_seconds=1000)
    try:
        f = graftax.jit(lambda x: x * 2)
        f(jnp.ones(3))
        cache.flush()
        assert files(cache) == []
        assert "not written: it took less than 1000 s" in str(graftax.explain(f))
    finally:
        graftax.cache(None)


def test_settings_of_jax_are_compared(cache):
    f = run("step")
    cache.flush()
    f.clear_cache()
    with jax.default_matmul_precision("highest"):
        run("step")
    assert (f.cache_info().traces, f.cache_info().disk) == (1, 0)
    assert "under these settings" in graftax.explain(f).variants[0].on_disk


def test_what_changes_after_a_hit_is_noticed(cache, monkeypatch):
    expected = shipped_functions.result("step")
    cache.flush()
    f = shipped_functions.step
    f.clear_cache()
    assert shipped_functions.result("step") == expected
    monkeypatch.setattr(shipped_functions, "LIMIT", 4)
    assert shipped_functions.result("step") != expected
    assert (f.cache_info().traces, f.cache_info().disk) == (1, 1)


def doubled_in_place(a, x):
    a *= 2
    return a + x


def test_an_array_that_changes_in_place_is_of_the_kind_that_it_was(cache):
    f = graftax.jit(doubled_in_place)
    f(jnp.ones(3), 1.0)
    cache.flush()
    f.clear_cache()
    for _ in range(2):  # a loss is told in each process
        with pytest.warns(graftax.LostChangeWarning):
            assert f(np.ones(3), 1.0).tolist() == [3, 3, 3]
        cache.flush()
        assert (f.cache_info().traces, f.cache_info().disk, len(files(cache))) == (1, 0, 1)
        assert "a warning was given while it was traced" in str(graftax.explain(f))
        f.clear_cache()
    assert f(jnp.ones(3), 1.0).tolist() == [3, 3, 3] and f.cache_info().disk == 1


def make_schedule(rate):
    return lambda step: rate * step


schedule = make_schedule(0.5)


def scheduled(x):
    return x * schedule(3)


def test_a_helper_that_is_made_again_goes_on_in_another_process(cache, monkeypatch):
    f = graftax.jit(lambda x: scheduled(x))

    def run(*rates):
        for rate in rates:
            monkeypatch.setattr(sys.modules[__name__], "schedule", make_schedule(rate))
            assert f(jnp.ones(2)).tolist() == scheduled(jnp.ones(2)).tolist()
        cache.flush()
        return f.cache_info().traces, f.cache_info().disk

    assert run(0.5, 0.25, 2.0) == (2, 0)
    f.clear_cache()
    assert run(0.75, 4.0, 8.0) == (0, 1)


def timed(x):
    return x + time.time() * 0


def with_environment(x):
    return x * float(os.environ["DISK_CACHE_FACTOR"])


def printing(x):
    print("traced")
    return x


@pytest.mark.parametrize("warn_impure", [True, False])
@pytest.mark.parametrize("function", [timed, with_environment, printing])
def test_what_each_process_has_to_do_again_is_not_written(cache, monkeypatch, function, warn_impure):
    for factor in ("2", "3"):
        monkeypatch.setenv("DISK_CACHE_FACTOR", factor)
        f = graftax.jit(function, warn_impure=warn_impure)
        f.clear_cache()
        with pytest.warns(graftax.ImpureCallWarning) if warn_impure else contextlib.nullcontext():
            result = f(jnp.ones(1))
        cache.flush()
        assert result.item() == (float(factor) if function is with_environment else 1)
        assert files(cache) == [] and "each process has to do again" in str(graftax.explain(f))


def test_what_cannot_be_found_by_name_is_not_written(cache):
    f = graftax.jit(lambda x, mark: x)
    f(jnp.ones(2), object())
    g = graftax.filter_jit(lambda x: x * 3, numbers="static")
    g(jnp.ones(2))
    h = graftax.jit(lambda x: jax.pure_callback(lambda y: y, x, x))
    h(jnp.ones(2))
    cache.flush()
    assert files(cache) == []
    assert "not written: <lambda> cannot be saved: mark is a object" in str(graftax.explain(f))
    assert "not written: <lambda> cannot be saved: what the function of filter_jit reads" in str(graftax.explain(g))
    assert "not written: its executable cannot be saved" in str(graftax.explain(h))


def test_equal_functions_share_what_was_on_disk(cache):
    make = lambda: graftax.jit(lambda x: x * 2 + 1)
    make()(jnp.ones(2))
    cache.flush()
    for f in (first := make(), second := make()):
        f.clear_cache()
    assert first(jnp.ones(2)).tolist() == second(jnp.ones(2)).tolist() == [3, 3]
    assert first.cache_info().traces == second.cache_info().traces == 0


def test_nothing_is_imported_to_look_for_a_program(cache, tmp_path, monkeypatch):
    (tmp_path / "imported_later.py").write_text("K = 2.0")
    monkeypatch.syspath_prepend(tmp_path)

    def helper():
        import imported_later

        return imported_later.K

    make = lambda: graftax.jit(lambda x: x * helper())
    try:
        f = make()
        f.clear_cache()
        assert f(jnp.ones(1)).item() == 2
        cache.flush()
        assert len(files(cache)) == 1
        f.clear_cache()
        del sys.modules["imported_later"]
        assert f(jnp.ones(1)).item() == 2 and "imported_later" in sys.modules
        assert graftax.explain(f).variants[0].on_disk.startswith("not found: module imported_later is not imported")
        f.clear_cache()
        assert f(jnp.ones(1)).item() == 2 and f.cache_info().disk == 1
    finally:
        sys.modules.pop("imported_later", None)


def test_results_of_a_loaded_program_are_of_the_type_of_others(cache):
    f = graftax.jit(lambda x: x * 5)
    plain = f(jnp.ones(3))
    cache.flush()
    f.clear_cache()
    found = f(jnp.ones(3))
    assert f.cache_info().disk == 1 and found.aval == plain.aval and found.committed == plain.committed


OF_JAX = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_ENABLE_COMPILATION_CACHE": "true",
}


@pytest.mark.quick(0)  # two interpreters and a compilation without any cache
@pytest.mark.parametrize("name", ["step", "donating", "wide", "counting"])
def test_what_jaxs_own_cache_gave_is_written_as_it_lies_there(tmp_path, name):
    of_jax = OF_JAX | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax")}
    expected, stages, *_ = in_a_fresh_process(name, tmp_path / "other", **of_jax)
    results, _, traces, disk, _, explained = in_a_fresh_process(name, tmp_path / "ours", **of_jax)
    assert (results, traces, disk) == (expected, stages.count("compiled"), 0) and "not written" not in explained
    for more in (of_jax, {"JAX_ENABLE_COMPILATION_CACHE": "false"}):
        results, stages, traces, disk, *_ = in_a_fresh_process(name, tmp_path / "ours", **more)
        assert (results, stages, traces) == (expected, [], 0) and disk > 0


def test_what_jaxs_own_cache_has_no_more_cannot_be_written():
    stage = jax.jit(lambda x: x * 2).lower(jnp.ones(3)).compile()
    with pytest.raises(graftax.errors.GraftaxError, match="which no longer has it"):
        cache_of_jax.serialize(stage)


def test_a_program_with_a_sort_is_written(cache):
    f = graftax.jit(lambda x, order: (jnp.argsort(x), x[jnp.argsort(order)]))
    arrays = jnp.arange(40.0).reshape(4, 10)[:, ::-1], jnp.array([2, 0, 3, 1])
    plain = [a.tolist() for a in f(*arrays)]
    cache.flush()
    f.clear_cache()
    assert [a.tolist() for a in f(*arrays)] == plain and [a.tolist() for a in f(*arrays)] == plain
    assert f.cache_info().traces == 0 and f.cache_info().disk == 1


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_program_that_was_equal_to_another_one_is_written(cache, name):
    f = graftax.jit(lambda x, name: (x * 7, name))
    for each in "ab":
        f(jnp.ones(3), each)
    cache.flush()
    f.clear_cache()
    assert f(jnp.ones(3), name)[1] == name
    assert f.cache_info().traces == 0 and f.cache_info().disk == 1


@pytest.mark.quick(0)
def test_a_counter_with_arrays_of_two_shapes_is_written_again(cache):
    def steps(sizes):
        trainer = shipped_functions.Trainer()
        return [shipped_functions.counting(trainer, jnp.ones(n)).tolist() for n in sizes]

    f = shipped_functions.counting
    plain = steps([3] * 5 + [1] * 5)
    for sizes in ([3] * 5, [3] * 5 + [1] * 5, [3] * 5 + [1] * 5):
        f.clear_cache()
        assert steps(sizes) == plain[: len(sizes)]
        cache.flush()
    assert f.cache_info().traces == 0 and f.cache_info().disk > 0


# ---- files


@pytest.mark.quick(0)
def test_what_was_used_longest_ago_is_removed(cache):
    for n in (3, 4, 5):
        shipped_functions.result("step", n)
        cache.flush()
    f = shipped_functions.step
    sizes = [path.stat().st_size for path in files(cache)]
    for age, path in enumerate(sorted(files(cache), key=lambda path: path.stat().st_mtime, reverse=True), 1):
        os.utime(path, (time.time() - 100 * age,) * 2)
    f.clear_cache()
    shipped_functions.result("step", 3)  # the oldest, which is the newest now
    smaller = graftax.cache(cache.folder, min_seconds=0, max_bytes=sum(sizes) + 8000)
    shipped_functions.result("step", 6)
    smaller.flush()
    assert sum(path.stat().st_size for path in files(cache)) <= smaller.max_bytes and len(files(cache)) == 3
    f.clear_cache()
    for n in (3, 5, 6):
        shipped_functions.result("step", n)
    assert (f.cache_info().traces, f.cache_info().disk) == (0, 3)
    shipped_functions.result("step", 4)
    assert f.cache_info().traces == 1


def test_a_program_that_is_larger_than_the_cache_is_not_written(cache):
    small = graftax.cache(cache.folder, min_seconds=0, max_bytes=100)
    f = run("step")
    small.flush()
    assert "bytes are more than max_bytes=100" in graftax.explain(f).variants[0].on_disk
    assert files(cache) == []


DAMAGES = {
    "half": lambda content: content[: len(content) // 2],
    "a changed byte": lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
    "nothing": lambda content: b"",
    "something else": lambda content: b"graftax programs 1\n" + content,
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("suffix", [".program", ".reads"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_a_miss_with_a_warning(cache, damage, suffix):
    expected = shipped_functions.result("step")
    cache.flush()
    (path,) = files(cache, suffix)
    path.write_bytes(damage(path.read_bytes()))
    shipped_functions.step.clear_cache()
    with pytest.warns(graftax.RecompileWarning, match="cannot be read and is removed"):
        assert shipped_functions.result("step") == expected
    cache.flush()
    assert shipped_functions.step.cache_info().traces == 1
    shipped_functions.step.clear_cache()
    assert shipped_functions.result("step") == expected  # it was written again
    assert (shipped_functions.step.cache_info().traces, shipped_functions.step.cache_info().disk) == (0, 1)


@pytest.mark.parametrize("what", ["folder", "program", "reads"])
def test_what_others_may_write_is_refused(cache, what):
    expected = shipped_functions.result("step")
    cache.flush()
    shipped_functions.step.clear_cache()
    if what == "folder":
        cache.folder.chmod(0o770)
        with pytest.raises(graftax.GraftaxError, match=f"chmod 700 {cache.folder}"):
            graftax.cache(cache.folder)
        cache.folder.chmod(0o755)
        graftax.cache(cache.folder)
    else:
        files(cache, f".{what}")[0].chmod(0o666)
        with pytest.warns(graftax.RecompileWarning, match="others may write"):
            assert shipped_functions.result("step") == expected
        assert shipped_functions.step.cache_info().traces == 1


def test_a_folder_of_somebody_else_is_refused(cache, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(graftax.GraftaxError, match="belongs to another user"):
        graftax.cache(cache.folder)


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(graftax.RecompileWarning, match="there is no cache on disk"):
        assert graftax.cache(tmp_path / "file" / "cache") is None
    f = graftax.jit(lambda x: x - 7)
    assert f(jnp.ones(1)).item() == -6 and graftax.explain(f).variants[0].on_disk == ""
    with pytest.raises(ValueError, match="max_bytes=0"):
        graftax.cache(tmp_path / "cache", max_bytes=0)


def test_a_full_disk_is_one_warning_and_what_is_there_is_used(cache, monkeypatch):
    shipped_functions.result("step", 3)
    cache.flush()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    shipped_functions.step.clear_cache()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in (3, 4, 5):
            shipped_functions.result("step", n)
            cache.flush()
    assert [str(warning.message) for warning in caught if "cannot be written" in str(warning.message)] == [
        f"the cache on disk in {cache.folder} cannot be written ([Errno 28] No space left on device), so programs that "
        "are compiled from now on are not kept there. Those that are there are used."
    ]
    info = shipped_functions.step.cache_info()
    assert (info.traces, info.disk, len(files(cache)), list(cache.folder.rglob("*.tmp"))) == (2, 1, 1, [])
    for variant in graftax.explain(shipped_functions.step).variants[1:]:
        assert "; not written: " in variant.on_disk


KILLED = """
import os, signal
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
os.replace = die
"""


@pytest.mark.quick(0)
def test_a_writer_that_is_killed_leaves_nothing_half(cache):
    with pytest.raises(AssertionError):
        in_a_fresh_process("step", cache.folder, KILLED)
    (left,) = cache.folder.rglob("*.tmp")
    assert files(cache) == files(cache, ".reads") == []
    os.utime(left, (time.time() - 7200,) * 2)
    expected, _, traces, *_ = in_a_fresh_process("step", cache.folder)
    assert traces == 1 and not left.exists()
    results, _, traces, disk, *_ = in_a_fresh_process("step", cache.folder)
    assert (results, traces, disk) == (expected, 0, 1)


@pytest.mark.quick(0)
def test_several_processes_write_at_once(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        done = list(threads.map(lambda _: in_a_fresh_process("step", tmp_path), range(3)))
    assert all(results == done[0][0] and warned == [] for results, *_, warned, _ in done)
    assert len(list(tmp_path.rglob("*.program"))) == len(list(tmp_path.rglob("*.reads"))) == 1
    assert list(tmp_path.rglob("*.tmp")) == []
    results, _, traces, disk, *_ = in_a_fresh_process("step", tmp_path)
    assert (results, traces, disk) == (done[0][0], 0, 1)


@pytest.mark.quick(0)
def test_a_process_that_holds_the_lock_and_was_stopped_is_not_waited_for(tmp_path):
    change = "import graftax._export.disk_writer as w\nw._SECONDS_FOR_OTHERS = 0.1"
    with alone_in(str(tmp_path)):
        in_a_fresh_process("step", tmp_path, change)
    assert len(list(tmp_path.rglob("*.program"))) == 1


def shifted(x, *, by=1.0):
    return x + by


def test_keyword_defaults_of_what_is_found_are_watched(cache, monkeypatch):
    f = graftax.jit(lambda x: shifted(x) * 2)
    assert f(jnp.ones(2)).tolist() == [4, 4]
    cache.flush()
    f.clear_cache()
    assert f(jnp.ones(2)).tolist() == [4, 4] and f.cache_info().disk == 1
    monkeypatch.setitem(shifted.__kwdefaults__, "by", 2.0)
    assert f(jnp.ones(2)).tolist() == [6, 6]


def test_what_code_does_is_read_from_its_instructions_once_for_all_processes(monkeypatch):
    def add(x):
        return x + 1

    def subtract(x):
        return x - 1

    digest = importlib.import_module("graftax._export.structure_digest")  # the package has a function of this name
    with digest.collecting_digests() as digests:
        expected = digest.code_digest(add.__code__)
    digest._content_and_meaning.cache_clear()  # another process
    monkeypatch.setattr(digest, "_saved_digests", {})
    digest.know_digests(digests)
    monkeypatch.setattr(digest, "meaning_of", lambda code: pytest.fail("it was disassembled"))
    assert digest.code_digest(add.__code__) == expected
    monkeypatch.undo()
    monkeypatch.setattr(digest, "_saved_digests", digests)
    assert digest.code_digest(subtract.__code__) != expected
    moved = add.__code__.replace(co_firstlineno=7)
    assert moved != add.__code__ and digest.code_digest(moved) == expected
