# SPDX-License-Identifier: Apache-2.0
"""What a run consists of: everything, a sample of it (``--quick``), a part of it (``--share``); Hypothesis profiles.

``--quick`` is what ``make test`` runs: of a test with many parameters a few cases, drawn by the names of the test and
of its cases; of a random test a few examples; of a test marked ``quick(n)`` n cases, and of one marked ``quick("id")``
the case of that name; what is deep, wide or repeated in the second of the two sizes that ``sizes.sized`` is given.
``make test-all`` runs everything.
"""

import gc
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, settings
from jax._src import compilation_cache as compilation_cache_of_jax
from jax.experimental.compilation_cache import compilation_cache

from graftax._jax import fast_dispatch
from graftax._jit.same_function import forget_idle
from sizes import QUICK

# What a test compiles runs a few times on a few numbers: to optimize it takes longer. With XLA_FLAGS= it is optimized.
# The older emitter, which newer versions do not have any more, takes less than half the time to compile.
OLDER_EMITTER = " --xla_cpu_use_fusion_emitters=false" if jax.__version_info__ < (0, 11) else ""
UNOPTIMIZED = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ.setdefault("XLA_FLAGS", UNOPTIMIZED + OLDER_EMITTER)

# Half of the time of a sample is XLA's: what one worker has compiled is not compiled again, nor is it on another Python
# with the same JAX. JAX compresses the files by Zstandard where Python has it, from 3.14 on, and then cannot read the
# others, which its key does not tell: here it is told that there is none. A process that a test starts is not told, so
# it has files of its own there.
COMPILED = Path(__file__).parents[1] / "build" / "compiled"
CACHE_OF_JAX = {
    "jax_compilation_cache_dir": str(COMPILED / "zlib"),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}
CACHE_OF_PROCESSES = CACHE_OF_JAX | {
    "jax_compilation_cache_dir": str(COMPILED / ("zstd" if sys.version_info >= (3, 14) else "zlib"))
}

SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile(
    "suite",
    max_examples=200,
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=SLOW_IS_FINE,
)
settings.register_profile("quick", settings.get_profile("suite"), max_examples=8)
settings.register_profile("nightly", settings.get_profile("suite"), max_examples=10_000, derandomize=False)
settings.load_profile("suite")

# The second call of any structure runs its executable directly where that is possible, however few its leaves are.
fast_dispatch.start_from(1)
collect_ignore = ["jit/test_direct.py"] if os.environ.get("GRAFTAX_DIRECT_DISPATCH") == "0" else []

FILE = pytest.StashKey[Path]()  # of the test that ran last

# The cases that `--quick` runs of one test, at most.
CASES = 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="a sample of the tests: what `make test` runs")
    parser.addoption("--share", metavar="K/N", default="1/1", help="the K-th of N parts of the tests, by their names")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"quick(cases): how many a quick run draws if not {CASES}, or the name of one")
    if config.getoption("--quick") and config.getoption("--hypothesis-profile") is None:
        settings.load_profile("quick")
    if config.getoption("--quick"):
        os.environ[QUICK] = "1"
        compilation_cache_of_jax.zstd = None
        for name, value in CACHE_OF_PROCESSES.items():
            if os.environ.setdefault(name.upper(), str(value)) == str(value):  # not what the user has chosen
                jax.config.update(name, CACHE_OF_JAX[name])


@pytest.fixture(scope="module")
def cache_of_jax_is_off() -> Iterator[None]:
    """For tests that save executables: XLA gives no copy of one that comes from JAX's cache on disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX asks once whether there is a cache
        yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def pytest_report_header(config: pytest.Config) -> str | None:
    return "quick: a sample of the tests; `make test-all` runs them all" if config.getoption("--quick") else None


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Drops cases before they become items: thousands of items take as long to make as hundreds to run."""
    yield
    if metafunc.config.getoption("--quick"):
        marker = metafunc.definition.get_closest_marker("quick")
        which = marker.args[0] if marker else CASES
        if isinstance(which, str):
            metafunc._calls[:] = [case for case in metafunc._calls if case.id == which]
        else:
            metafunc._calls[:] = sample(metafunc.definition.nodeid, metafunc._calls, which)


def sample(name: str, cases: list, most: int) -> list:
    """Some of the cases, in their order: those first that show most values not seen yet, of all parameters."""

    def shown(case) -> set:
        return {*enumerate(case._idlist), *((k, v) for k, v in case.params.items() if isinstance(v, str | int))}

    values = [shown(case) for case in cases]
    by_chance = sorted(range(len(cases)), key=lambda i: zlib.crc32(f"{name}{cases[i]._idlist}".encode()))
    seen: set = set()
    chosen: list[int] = []
    for new in range(max(map(len, values), default=0), 0, -1):
        for i in by_chance:
            if len(chosen) < most and len(values[i] - seen) >= new:
                chosen.append(i)
                seen |= values[i]
    return [cases[i] for i in sorted(chosen)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What is there before the first test of a file stays there: its collections of garbage need not look at it.

    No test finds the programs of another one.
    """
    forget_idle()
    if item.config.stash.get(FILE, None) != item.path:
        item.config.stash[FILE] = item.path
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = map(int, config.getoption("--share").split("/"))
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--share {part}/{parts}: expected K/N with 1 <= K <= N")

    def runs(item: pytest.Item) -> bool:
        marker = item.get_closest_marker("quick")
        if config.getoption("--quick") and marker and not marker.args[0]:
            return False
        return zlib.crc32(item.nodeid.encode()) % parts == part - 1

    others = [item for item in items if not runs(item)]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if runs(item)]
