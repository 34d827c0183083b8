# SPDX-License-Identifier: Apache-2.0
"""The errors and warnings that graftax raises. Each is an attribute of `graftax` as well."""

from __future__ import annotations

from graftax._base.errors import (
    CapturedArrayWarning,
    CheckError,
    ConcurrentChangeError,
    GraftaxError,
    IgnoredValueError,
    ImpureCallWarning,
    LostChangeWarning,
    MissedDonationWarning,
    MutationError,
    RecompileWarning,
    RecordedCallWarning,
    SharedGradientWarning,
    StructureError,
    UnknownInterpreterWarning,
    UnpicklableError,
    UnsupportedValueError,
    UntiedWarning,
)
from graftax._capture.leaked_tracers import LeakedTracerError
from graftax._explain import RecompileError
from graftax._io import LoadError

__all__ = [
    "CapturedArrayWarning",
    "CheckError",
    "ConcurrentChangeError",
    "GraftaxError",
    "IgnoredValueError",
    "ImpureCallWarning",
    "LeakedTracerError",
    "LoadError",
    "LostChangeWarning",
    "MissedDonationWarning",
    "MutationError",
    "RecompileError",
    "RecompileWarning",
    "RecordedCallWarning",
    "SharedGradientWarning",
    "StructureError",
    "UnknownInterpreterWarning",
    "UnpicklableError",
    "UnsupportedValueError",
    "UntiedWarning",
]
