# SPDX-License-Identifier: Apache-2.0
"""Values that a function does not use: those of `ignore=`, and those that cannot be part of a program.

They are not compared, and a trace has placeholders for them, which raise where they are used.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from graftax._base.code_line import code_line
from graftax._base.errors import IgnoredValueError, UnsupportedValueError
from graftax._base.missing import MISSING
from graftax._graph.filters import Filter, as_filter
from graftax._graph.patterns import Pattern, argument_pattern, coverage_test
from graftax._graph.structure import RootPath, plain_key

USED = (
    "{path} is ignored by ignore=, so the function may keep it, move it and assign it again, but not look"
    " inside. Leave it out of ignore=, or read it outside of the function and pass what is needed from "
    "it."
)
REFUSED_USED = (
    "{path}: {why} It is used at {place}. A compiled function may hold it, move it and return it; do everything else "
    "outside, and pass the result. (ignore={pattern!r} is for a value that no code of the function uses.)"
)
NO_SPEC = (
    "{name}: ignore={spec!r} cannot select values. Give patterns of key paths ('**.history'), types, or a predicate of "
    "values."
)

IgnoreTest = Callable[[RootPath, Any], bool]

_UNARY = (
    "abs aiter anext await bool bytes ceil complex copy enter aenter exit aexit float floor hash index int "
    "invert iter len length_hint neg next pos repr reversed round str trunc jax_array array fspath reduce dir"
)
_BINARY = "add and divmod floordiv lshift matmul mod mul or pow rshift sub truediv xor"
_COMPARED = "call contains delitem eq format ge getitem gt le lt missing ne reduce_ex setitem"


class Ignored:
    """The placeholder of an ignored value in a trace. Every use but passing it on raises.

    Args:
        path: the path of the value, for errors.
        why: the reason why it is refused; None if `ignore=` names it.
    """

    __slots__ = ("_path", "_why")

    def __init__(self, path: str | None = None, why: str | None = None) -> None:
        # The class's own `__setattr__` raises.
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_why", why)


class _Uses(threading.local):
    """The errors that placeholders have raised in the trace that runs in this thread; None where none runs."""

    errors: list[Exception] | None = None


_USES = _Uses()


@contextmanager
def refusing_uses() -> Generator[None]:
    """A context in which a trace runs.

    Raises:
        IgnoredValueError, UnsupportedValueError: at its end, where code has used a placeholder and caught the error.
    """
    outer_errors, _USES.errors = _USES.errors, []
    try:
        yield
        if _USES.errors:
            raise _USES.errors[0]
    finally:
        _USES.errors = outer_errors


def _used(self: object, *args: object, **kwargs: object) -> NoReturn:
    del args, kwargs
    path = object.__getattribute__(self, "_path") or "this value"
    why, frame = object.__getattribute__(self, "_why"), sys._getframe(1)  # the code that uses the placeholder
    error: Exception = IgnoredValueError(USED.format(path=path))
    if why is not None:
        place = code_line(frame.f_code.co_filename, frame.f_lineno)
        error = UnsupportedValueError(REFUSED_USED.format(path=path, why=why, place=place, pattern=path.split(" ")[-1]))
    # Code may catch the error and go on without the value: `refusing_uses` raises it again at the end of the trace.
    if _USES.errors is not None:
        _USES.errors.append(error)
    raise error


def _refuse_use() -> None:
    names = [*_UNARY.split(), *_COMPARED.split(), "getattribute", "setattr", "delattr"]
    names += [prefix + name for name in _BINARY.split() for prefix in ("", "r", "i")]
    # `__del__` is not among them: placeholders have to be collected silently.
    for name in names:
        setattr(Ignored, f"__{name}__", _used)


_refuse_use()


class IgnoreOption:
    """The parsed option `ignore=`.

    Args:
        specs: patterns, types, filters and predicates.
        name: the name of the function, for messages.
    """

    def __init__(self, specs: Sequence[Any], name: str) -> None:
        self.patterns: list[Pattern] = []
        self._filters: list[Filter] = []
        self._predicates: list[Callable[[Any], Any]] = []
        for spec in specs:
            if isinstance(spec, str):
                self.patterns.append(argument_pattern(spec, name, "ignore="))
                continue
            ignore_filter = None if spec is ... else as_filter(spec)
            if ignore_filter is not None:
                self._filters.append(ignore_filter)
            elif callable(spec):
                self._predicates.append(spec)
            else:
                raise TypeError(NO_SPEC.format(name=name, spec=spec))

    @staticmethod
    def is_stand_in(root_path: RootPath, value: object) -> bool:
        """Is the value a placeholder of a trace? An `IgnoreTest` by itself."""
        return type(value) is Ignored

    def test(self, names: Sequence[str]) -> IgnoreTest | None:
        """A function that tells whether the value at a root path is ignored, for roots with these names."""
        if not (self.patterns or self._filters or self._predicates):
            return None
        covers = argument_coverage_test(self.patterns, names)

        def is_ignored(root_path: RootPath, value: object) -> bool:
            # An argument that is not there cannot be ignored.
            if value is MISSING:
                return False
            if type(value) is Ignored or (covers is not None and covers(root_path)):
                return True
            return any(_filter_matches(ignore_filter, root_path, value) for ignore_filter in self._filters) or any(
                bool(predicate(value)) for predicate in self._predicates
            )

        return is_ignored


def argument_coverage_test(patterns: Sequence[Pattern], names: Sequence[str]) -> Callable[[RootPath], bool] | None:
    """As `coverage_test`, but a pattern may name a captured variable `closure n` or `module.n` as `n` too."""
    full = coverage_test(patterns, names)
    # Users know a captured variable by its own name, without `closure` or the module.
    short = coverage_test(patterns, [re.split(r"[ .]", name)[-1] for name in names])
    return None if full is None or short is None else lambda root_path: full(root_path) or short(root_path)


def _filter_matches(ignore_filter: Filter, root_path: RootPath, value: object) -> bool:
    if ignore_filter.types and isinstance(value, ignore_filter.types):
        return True
    # The path is computed only for filters that take it.
    path = tuple(plain_key(entry) for entry in root_path[1]) if ignore_filter.library_filters else ()
    return any(
        isinstance(value, library.value_types) and library.accepts(path, value)
        for library in ignore_filter.library_filters
    )
