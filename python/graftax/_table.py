# SPDX-License-Identifier: Apache-2.0
"""What is compiled for one function: bounded, shared by every `jit` of it with equal options, gone when it goes."""

from __future__ import annotations

import types
import weakref
from typing import Any, NamedTuple

from . import _core
from ._advice import Advice
from ._options import Options

_TABLES = "__graftax_tables__"


class CacheInfo(NamedTuple):
    """What a function's table has seen: calls that found an entry, calls that made one, and traces."""

    hits: int
    misses: int
    maxsize: int
    currsize: int
    traces: int


class FunctionTable(_core.Table):
    """The entries of one function under one set of options: bounded, the least recently used goes first."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.maxsize = options.cache_size
        self.entries: dict[tuple[_core.GraphDef, Any], _core.Entry] = {}
        self.advice = Advice()
        self.misses = self.found = self.traces = 0

    def store(self, key: tuple[_core.GraphDef, Any], entry: _core.Entry) -> _core.Entry:
        for dead in [k for k in self.entries if not k[0]._alive()]:
            self.drop(dead)
        while len(self.entries) >= self.maxsize:
            self.drop(min(self.entries, key=lambda k: self.entries[k].used))
        return self.entries.setdefault(key, entry)

    def drop(self, key: tuple[_core.GraphDef, Any]) -> None:
        entry = self.entries.pop(key, None)
        if entry is not None:
            self._forget(entry)

    def clear(self) -> None:
        self.entries.clear()
        self._forget_all()
        self.advice = Advice()  # it remembers the last structure
        self.misses = self.found = self.traces = 0


class _Tables:
    """What hangs on a function. `owner` tells it from one that `functools.update_wrapper` copied."""

    def __init__(self, owner: types.FunctionType) -> None:
        self.owner = weakref.ref(owner)
        self.tables: dict[Options, FunctionTable] = {}

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (types.NoneType, ())


def table_of(function: types.FunctionType, may_hang: bool, options: Options) -> FunctionTable:
    if not may_hang:
        return FunctionTable(options)
    tables = function.__dict__.get(_TABLES)
    if not isinstance(tables, _Tables) or tables.owner() is not function:
        tables = function.__dict__[_TABLES] = _Tables(function)
    try:
        return tables.tables.setdefault(options, FunctionTable(options))
    except TypeError:  # an option that does not hash
        return FunctionTable(options)


def without_table(attributes: dict[str, Any]) -> None:
    """Takes a table away that `functools.update_wrapper` copied from a function to its wrapper."""
    attributes.pop(_TABLES, None)
