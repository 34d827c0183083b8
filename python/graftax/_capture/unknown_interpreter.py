# SPDX-License-Identifier: Apache-2.0
"""The warning for an interpreter whose frames are unknown, so that code under a trace is not seen."""

from __future__ import annotations

import platform
import warnings

from graftax import _core
from graftax._base.errors import UnknownInterpreterWarning
from graftax._jax.tracebacks import caller_level

NOT_SEEN = (
    "changes of what helper functions and methods read (globals, attributes of classes and modules, defaults), "
    "arguments that such code also reaches from outside, changed numbers given to float(), int() or math, and calls "
    "that cannot be repeated"
)
UNKNOWN = (
    "graftax does not know the frames of {python} ({reason}). Compiled functions depend on their arguments, their "
    "closure and the globals that they name themselves, as with jax.jit. Not seen: {not_seen}. Use a Python that this "
    "version of graftax supports (3.11 to 3.15), or a newer graftax; graftax.jit(f, check=True) compares each call "
    "with plain Python."
)

_warned = False


def unknown_interpreter() -> str:
    """The text of the warning; empty where the frames are known."""
    reason = _core.frames_unknown()
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return UNKNOWN.format(python=python, reason=reason, not_seen=NOT_SEEN) if reason else ""


def warn_of_unknown_interpreter() -> None:
    """Warns once in a process."""
    global _warned
    if _warned:
        return
    _warned = True
    message = unknown_interpreter()
    if message:
        warnings.warn(message, UnknownInterpreterWarning, caller_level())
