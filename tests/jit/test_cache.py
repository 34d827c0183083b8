# SPDX-License-Identifier: Apache-2.0
"""The table of a function: counted, bounded, shared, and gone with the function."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from graftax._jit.jitted import Jitted
from zoo import Box, Data, f32


def traces(jitted):
    return jitted.cache_info().traces


def test_cache_info_counts():
    f = graftax.jit(lambda x, n: x * n)
    assert f.cache_info()._asdict() == dict(
        hits=0, misses=0, maxsize=512, currsize=0, traces=0, shared=0, disk=0, compiling=0
    )
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


def test_programs_are_counted_under_the_name_that_jax_has_for_it():
    f = graftax.jit(lambda x: x + 1)
    sizes = [f._cache_size()]
    for x in (f32(1), f32(2), jnp.ones(3), jnp.ones(3, int)):
        f(x)
        sizes.append(f._cache_size())
    f.clear_cache()
    assert [*sizes, f._cache_size()] == [0, 1, 1, 2, 3, 0]


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
    f = graftax.jit(lambda x, n: x * n, cache_size=2, numbers="static")
    for n in range(5):
        assert f(f32(1), n).tolist() == [float(n)]
        assert f.cache_info().currsize <= 2
    assert f(f32(1), 0).tolist() == [0.0]
    assert traces(f) == 6


def test_the_least_recently_used_entry_goes_first():
    f = graftax.jit(lambda x, n: x * n, cache_size=2, numbers="static")
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


def counted_recordings(monkeypatch):
    """How often a call had to record what it was given, because no walk knew it."""
    recorded = []
    entry = Jitted._entry

    def counted(self, *args):
        recorded.append(self)
        return entry(self, *args)

    monkeypatch.setattr(Jitted, "_entry", counted)
    return recorded


@pytest.mark.filterwarnings("ignore::graftax.RecompileWarning")
@pytest.mark.quick(0)
def test_one_of_many_structures_in_turn_is_found_without_a_recording(monkeypatch):
    f = graftax.jit(lambda o: o["x"] * len(o["kind"]) + len(o["layers"]))
    inputs = [{"x": f32(i), "kind": "k" * i, "layers": [0] * (i % 3)} for i in range(40)]
    for _ in range(3):
        for o in inputs:
            f(o)
    recorded = counted_recordings(monkeypatch)
    for o in inputs + inputs[::-7]:
        assert f(o).item() == o["x"].item() * len(o["kind"]) + len(o["layers"])
    assert not recorded and traces(f) == 40


@pytest.mark.filterwarnings("ignore::graftax.RecompileWarning")
@pytest.mark.quick(0)
def test_structures_that_differ_in_two_statics_are_found_too(monkeypatch):
    f = graftax.jit(lambda a, x, b: x + int(a) * 10 + int(b))
    pairs = [(a, b) for a in "01234" for b in "01234"]
    for _ in range(6):
        for a, b in pairs:
            f(a, f32(1), b)
    recorded = counted_recordings(monkeypatch)
    for a, b in pairs:
        assert f(a, f32(1), b).item() == 1 + int(a) * 10 + int(b)
    assert not recorded and traces(f) == 25


@pytest.mark.quick(0)
@pytest.mark.filterwarnings("ignore::graftax.RecompileWarning")
def test_a_structure_that_was_forgotten_is_not_found_by_its_hint():
    f = graftax.jit(lambda x, n: x + len(n), cache_size=4)
    for _ in range(3):
        for n in range(12):
            assert f(f32(1), "n" * n).item() == 1 + n
    assert f.cache_info().currsize == 4 and traces(f) == 36
    f.clear_cache()
    assert f(f32(1), "nn").item() == 3 and traces(f) == 1
