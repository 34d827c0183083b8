# SPDX-License-Identifier: Apache-2.0
"""Why a function compiles: the history of its programs, with explanations, a log, and warnings."""

from graftax._explain.array_signature import ArraySignature as ArraySignature
from graftax._explain.array_signature import array_signatures as array_signatures
from graftax._explain.explanation import CallExplanation as CallExplanation
from graftax._explain.explanation import Explanation as Explanation
from graftax._explain.frozen import RecompileError as RecompileError
from graftax._explain.history import History as History
from graftax._explain.log import RecompileLog as RecompileLog
from graftax._explain.log import log_recompiles as log_recompiles
from graftax._explain.variant import Variant as Variant
from graftax._explain.variant import settings_texts as settings_texts
