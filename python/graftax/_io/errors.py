# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with files."""

from __future__ import annotations

from collections.abc import Iterable

from graftax._base.errors import GraftaxError

_SHOWN = 40  # differences that a message lists


class LoadError(GraftaxError, ValueError):
    """A file that cannot be loaded: damaged, or not of the structure that is wanted. `differences` has a line each."""

    def __init__(self, message: str, differences: Iterable[str] = ()) -> None:
        self.differences = tuple(differences)
        shown = [f"\n  {line}" for line in self.differences[:_SHOWN]]
        more = len(self.differences) - len(shown)
        super().__init__(message + "".join(shown) + (f"\n  and {more} more" if more else ""))

    def __reduce__(self) -> tuple[object, ...]:
        return _made, (str(self), self.differences)


def _made(text: str, differences: tuple[str, ...]) -> LoadError:
    error = LoadError(text)
    error.differences = differences
    return error


class Malformed(ValueError):
    """What a file says has no meaning; `load` and `peek` name the file."""


def damaged(path: str, what: str) -> LoadError:
    """The error for a file that is not what a file of this kind is."""
    return LoadError(f"{path} is no safetensors file, or it is damaged: {what}")
