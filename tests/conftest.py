# SPDX-License-Identifier: Apache-2.0
"""Hypothesis profiles: ``suite`` for every run, ``nightly`` by ``--hypothesis-profile=nightly``; part of a run."""

import os
import zlib

import pytest
from hypothesis import HealthCheck, settings

from graftax import _direct

# What a test compiles runs a few times on a few numbers: to optimize it takes longer. With XLA_FLAGS= it is optimized.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

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
settings.register_profile("nightly", settings.get_profile("suite"), max_examples=10_000, derandomize=False)
settings.load_profile("suite")

# The second call of any structure runs its executable directly where that is possible, however few its leaves are.
_direct.start_from(1)
collect_ignore = ["test_direct.py"] if os.environ.get("GRAFTAX_DIRECT_DISPATCH") == "0" else []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="K/N", default="1/1", help="the K-th of N parts of the tests, by their names")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = map(int, config.getoption("--share").split("/"))
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--share {part}/{parts}: expected K/N with 1 <= K <= N")
    others = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts != part - 1]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part - 1]
