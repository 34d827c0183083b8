# SPDX-License-Identifier: Apache-2.0
"""How deep, how wide, how often: what a test builds or repeats in a whole run, and in a quick one."""

import os

# Set by conftest.py; the processes that tests start inherit it.
QUICK = "GRAFTAX_QUICK_TESTS"


def sized(whole: int, quick: int) -> int:
    """The first number in a whole run, the second one with `--quick`."""
    return quick if os.environ.get(QUICK) else whole
