# SPDX-License-Identifier: Apache-2.0
"""Hypothesis profiles: ``suite`` for every run, ``nightly`` by ``--hypothesis-profile=nightly``."""

import os

from hypothesis import HealthCheck, settings

from graftax import _direct

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
