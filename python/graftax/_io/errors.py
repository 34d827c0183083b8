# SPDX-License-Identifier: Apache-2.0
"""Errors of files."""

from __future__ import annotations

from collections.abc import Iterable

from graftax._base.errors import GraftaxError

_MAX_LINES = 40  # differences in a message


class LoadError(GraftaxError, ValueError):
    """A file cannot be loaded: it is damaged, or differs from `like`. `differences` has a line for each difference."""

    def __init__(self, message: str, differences: Iterable[str] = ()) -> None:
        self.differences = tuple(differences)
        lines = [f"\n  {line}" for line in self.differences[:_MAX_LINES]]
        remaining = len(self.differences) - len(lines)
        super().__init__(message + "".join(lines) + (f"\n  and {remaining} more" if remaining else ""))

    def __reduce__(self) -> tuple[object, ...]:
        return _restore_error, (str(self), self.differences)


def _restore_error(text: str, differences: tuple[str, ...]) -> LoadError:
    error = LoadError(text)
    error.differences = differences
    return error


class Malformed(ValueError):
    """The content of a file is invalid. `load` and `peek` turn this into a `LoadError` that names the file."""


def damaged(path: str, problem: str) -> LoadError:
    """The error for a file that is damaged or of another kind."""
    return LoadError(f"{path} is not a safetensors file, or it is damaged: {problem}")
