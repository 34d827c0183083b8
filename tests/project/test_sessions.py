# SPDX-License-Identifier: Apache-2.0
"""Random sessions of a user: `jit` does what plain Python does, whatever came before."""

import pytest
from hypothesis import settings

from sessions import STEPS, Session

WANTED = settings.default.max_examples  # type: ignore[union-attr]

EXAMPLES = {8: 2, 200: 60, 10_000: 300}.get(WANTED, WANTED)  # `make sessions` has a thousand

Session.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=STEPS)
TestSession = pytest.mark.filterwarnings("ignore::graftax.RecompileWarning")(Session.TestCase)
TestSession = pytest.mark.quick(0)(TestSession)
