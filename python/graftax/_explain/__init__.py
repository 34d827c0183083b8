# SPDX-License-Identifier: Apache-2.0
"""Why a function compiles: what was compiled and how it differs from what was there, told, logged, and warned of."""

from ._explanation import CallExplanation as CallExplanation
from ._explanation import Explanation as Explanation
from ._explanation import explain as explain
from ._frozen import RecompileError as RecompileError
from ._frozen import assert_max_traces as assert_max_traces
from ._history import History as History
from ._log import RecompileLog as RecompileLog
from ._log import log_recompiles as log_recompiles
from ._look import Look as Look
from ._look import looks as looks
from ._variant import Variant as Variant
from ._variant import settings_texts as settings_texts
