# SPDX-License-Identifier: Apache-2.0
"""The classes of what graftax returns, for annotations. Each is an attribute of `graftax` as well."""

from __future__ import annotations

# ruff: noqa: F401
# pyright: reportUnusedImport=false
# The names in the annotations of these classes are here as well: `typing.get_type_hints` looks them up in this module.
from typing import Any

import jax

from graftax._core import GraphDef
from graftax._explain import CallExplanation, Explanation, RecompileLog, Variant
from graftax._explain.cause_texts import Cause
from graftax._export.disk_cache import DiskCache
from graftax._export.export import Exported
from graftax._graph.pack import LiveStatics, Packed, PackLayout
from graftax._graph.path import Path, Ref
from graftax._jit.cache import CacheInfo
from graftax._jit.jitted import Jitted
from graftax._jit.stages import Compiled, Lowered, Traced
from graftax._memory.report import ArrayMemory, MemoryReport
from graftax._record.minimize import Minimized
from graftax._record.nonfinite import NonfiniteReport
from graftax._record.recorder import Recorder
from graftax._training.optimizer import Optimizer

__all__ = [
    "ArrayMemory",
    "CacheInfo",
    "CallExplanation",
    "Compiled",
    "DiskCache",
    "Explanation",
    "Exported",
    "GraphDef",
    "Jitted",
    "Lowered",
    "MemoryReport",
    "Minimized",
    "NonfiniteReport",
    "Optimizer",
    "Packed",
    "Path",
    "RecompileLog",
    "Recorder",
    "Ref",
    "Traced",
]
