# SPDX-License-Identifier: Apache-2.0
"""Which frames JAX leaves out of tracebacks, and of what it says of a program's lines."""

from __future__ import annotations

import functools

from jax._src import source_info_util as _source_info_util
from jax._src import traceback_util as _traceback_util

from graftax._jax.missing_names import lacking

_MISSING = [name for name in ("include_filename", "_filtering_mode") if not hasattr(_traceback_util, name)]
if _MISSING:
    lacking["hiding frames"] = f"{_traceback_util.__name__}.{_MISSING[0]}"


def hide_frames(folder: str) -> None:
    """JAX treats code below `folder` as its own: in tracebacks, and where a program says which line made it."""
    # Each has a list of its own. The second one is of the lines that profiles and the texts of programs name.
    for module in (_traceback_util, _source_info_util):
        if hasattr(module, "register_exclusion"):
            module.register_exclusion(folder)
        else:
            lacking["hiding frames"] = f"{module.__name__}.register_exclusion"


@functools.lru_cache(maxsize=4096)
def is_hidden_file(filename: str) -> bool:
    """Does JAX leave frames of this file out of tracebacks?"""
    # JAX resolves the name and compares it with each folder that it leaves out, which takes long, and the frames of a
    # traceback are of few files.
    return not _MISSING and not _traceback_util.include_filename(filename)


def filtering_mode() -> str:
    """How JAX hides frames: `off`, `tracebackhide`, `remove_frames` or `quiet_remove_frames`."""
    return "off" if _MISSING else _traceback_util._filtering_mode()
