# SPDX-License-Identifier: Apache-2.0
"""What a function does not read: `ignore=` says it, or it cannot be part of a program.

It is not compared, and a trace has a stand-in in its place, which raises where it is used.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from graftax._base.errors import IgnoredValueError, UnsupportedValueError
from graftax._base.missing import MISSING
from graftax._graph.filters import Filter, filter_of
from graftax._graph.patterns import Pattern, of_arguments, tester
from graftax._graph.structure import Place, plain_key

USED = (
    "{path} is ignored by ignore=, so the function may keep it, move it and assign it anew, but not look at it. Leave "
    "it out of ignore=, or read it outside of the function and pass what is needed of it."
)
REFUSED_USED = (
    "{path}: {why} {place} asks it for something. A compiled function may hold it, move it and return it; do the rest "
    "outside, and pass what comes out of it. ignore={pattern!r} is for what no code of the function asks."
)
NO_SPEC = (
    "{name}: ignore={spec!r} says of nothing that it is ignored. Give patterns of key paths ('**.history'), types, or "
    "a predicate of values."
)

Test = Callable[[Place, Any], bool]

_UNARY = (
    "abs aiter anext await bool bytes ceil complex copy del enter aenter exit aexit float floor hash index int "
    "invert iter len length_hint neg next pos repr reversed round str trunc jax_array array fspath reduce dir"
)
_BINARY = "add and divmod floordiv lshift matmul mod mul or pow rshift sub truediv xor"
_COMPARED = "call contains delitem eq format ge getitem gt le lt missing ne reduce_ex setitem"


class Ignored:
    """Stands in a trace for a value that the trace does not look at.

    Args:
        path: of the value.
        why: it is refused; None where `ignore=` names it.
    """

    __slots__ = ("_path", "_why")

    def __init__(self, path: str | None = None, why: str | None = None) -> None:
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_why", why)


class _Uses(threading.local):
    """The errors that stand-ins have raised in the trace that runs in this thread; None where none runs."""

    def __init__(self) -> None:
        self.errors: list[Exception] | None = None


_USES = _Uses()


@contextmanager
def refusing_uses() -> Generator[None]:
    """While entered, a trace runs.

    Raises:
        IgnoredValueError, UnsupportedValueError: at its end, where code has used a stand-in and caught the error.
    """
    around, _USES.errors = _USES.errors, []
    try:
        yield
        if _USES.errors:
            raise _USES.errors[0]
    finally:
        _USES.errors = around


def _used(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    del args, kwargs
    path = object.__getattribute__(self, "_path") or "this value"
    why, frame = object.__getattribute__(self, "_why"), sys._getframe(1)
    error: Exception = IgnoredValueError(USED.format(path=path))
    if why is not None:
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        error = UnsupportedValueError(REFUSED_USED.format(path=path, why=why, place=place, pattern=path.split(" ")[-1]))
    if _USES.errors is not None:
        _USES.errors.append(error)
    raise error


def _refuse_use() -> None:
    names = [*_UNARY.split(), *_COMPARED.split(), "getattribute", "setattr", "delattr"]
    names += [prefix + name for name in _BINARY.split() for prefix in ("", "r", "i")]
    for name in names:
        if name != "del":
            setattr(Ignored, f"__{name}__", _used)


_refuse_use()


class Ignoring:
    """What `ignore=` means.

    Args:
        specs: patterns, types, filters and predicates, as they were given.
        name: of the function, for messages.
    """

    def __init__(self, specs: Sequence[Any], name: str) -> None:
        self.patterns: list[Pattern] = []
        self._filters: list[Filter] = []
        self._predicates: list[Callable[[Any], Any]] = []
        for spec in specs:
            if isinstance(spec, str):
                self.patterns.append(of_arguments(spec, name, "ignore="))
                continue
            found = None if spec is ... else filter_of(spec)
            if found is not None:
                self._filters.append(found)
            elif callable(spec):
                self._predicates.append(spec)
            else:
                raise TypeError(NO_SPEC.format(name=name, spec=spec))

    @staticmethod
    def is_stand_in(place: Place, value: Any) -> bool:
        """Has a trace put it there? As a test of its own."""
        return type(value) is Ignored

    def test(self, names: Sequence[str]) -> Test | None:
        """Is the value at a place of roots with these names ignored?"""
        if not (self.patterns or self._filters or self._predicates):
            return None
        covers = covering(self.patterns, names)

        def is_ignored(place: Place, value: Any) -> bool:
            if value is MISSING:
                return False
            if type(value) is Ignored or (covers is not None and covers(place)):
                return True
            return any(_means(wanted, place, value) for wanted in self._filters) or any(
                bool(predicate(value)) for predicate in self._predicates
            )

        return is_ignored


def covering(patterns: Sequence[Pattern], names: Sequence[str]) -> Callable[[Place], bool] | None:
    """Does one of the patterns cover a place? A captured variable goes by its own name, too."""
    full, short = tester(patterns, names), tester(patterns, [re.split(r"[ .]", name)[-1] for name in names])
    return None if full is None or short is None else lambda place: full(place) or short(place)


def _means(wanted: Filter, place: Place, value: Any) -> bool:
    if wanted.types and isinstance(value, wanted.types):
        return True
    path = tuple(plain_key(entry) for entry in place[1]) if wanted.asked else ()
    return any(isinstance(value, library.value_types) and library.accepts(path, value) for library in wanted.asked)
