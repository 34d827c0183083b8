# SPDX-License-Identifier: Apache-2.0
"""Refuses a subinterpreter before JAX is imported there, because that would crash the process."""

from __future__ import annotations

import importlib

NOT_MAIN = (
    "graftax works only in the main interpreter of a process: JAX and the core of graftax have one state for the "
    "whole process. Use threads or separate processes."
)


def require_main() -> None:
    """Checks that this is the main interpreter.

    Raises:
        ImportError: in a subinterpreter.
    """
    for name in ("_interpreters", "_xxsubinterpreters"):  # Python 3.13 and later, and those before
        try:
            interpreters = importlib.import_module(name)
        except ImportError:
            continue
        if interpreters.get_current() != interpreters.get_main():
            raise ImportError(NOT_MAIN)
        return


require_main()
