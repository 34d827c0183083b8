# SPDX-License-Identifier: Apache-2.0
"""Loops and branches outside of any trace: compiled once for each structure, as `graftax.jit` does it."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import types
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, cast

import jax

from .. import _core
from .._compat import calls_host, equations, outside_of_traces
from .._errors import GraftaxError
from .._fields import register_static
from .._jitted import Jitted
from .._options import Options
from .._signature import Signature, call_opaque, call_partial, refuse_generators, resolve
from .._table import FunctionTable
from .._trace import Flat, definition_of, encode, run_trace
from ._reads import Reads

Run = Callable[[list[Callable[..., Any]], list[Any], list[Any]], Any]

_OPTIONS = Options(cache_size=32)  # so many structures is one function kept compiled for
_FUNCTIONS = 128  # of so many functions
_CALLS = threading.local()


def once(title: str, functions: Sequence[Any], operands: Sequence[Any], rest: Sequence[Any], run: Run) -> Any:
    """`run(functions, operands, rest)`, compiled where that makes no difference but in time.

    It depends on what `graftax.jit` of it would depend on: the operands, `rest`, and what the functions capture. Inside
    of a trace it runs as it is. So it does where it cannot be compiled, or raises: an error is that of a plain run.

    Args:
        title: of the transform. It tells one `run` from another, which must depend on its arguments alone.
        functions: any callables that are called with the operands.
        operands: of the functions.
        rest: what else `run` is given.
    """
    if outside_of_traces() and not jax.config.jax_disable_jit and not _core.running_traces():
        call = _Call.of(title, functions, operands, rest, run)
        if call is not None:
            try:
                return call()
            except Exception:
                if call.told:  # a host function, which must not be told twice
                    raise
    return run(list(functions), list(operands), list(rest))


# ---- what is called


class _Part(NamedTuple):
    """One function, and what it captures."""

    function: Any
    plain: Any  # the Python function that runs
    prefix: int  # how many of its roots a bound method or a partial brings along
    signature: Signature
    layout: tuple[Any, ...]
    roots: tuple[Any, ...]
    places: tuple[int, ...]  # for each of its roots the number of the operand that it is, or -1

    @staticmethod
    def of(function: Any, count: int) -> _Part | None:
        """None for what is no function of so many operands."""
        if not callable(function):
            return None
        plain, prefix, _ = resolve(function)
        refuse_generators(plain)
        signature = Signature.of(plain, len(prefix), True)
        marks = tuple(_Operand() for _ in range(count))
        bound = signature.binding.bind(marks, {}, prefix)
        if bound is None:
            return None
        numbers = {id(mark): i for i, mark in enumerate(marks)}
        places = tuple(numbers.get(id(root), -1) for root in bound[0])
        return _Part(function, plain, len(prefix), signature, bound[1], bound[0], places)

    @property
    def captured(self) -> list[Any]:
        return [root for root, place in zip(self.roots, self.places, strict=True) if place < 0]

    @property
    def key(self) -> tuple[Any, ...]:
        """What it is besides what it captures."""
        options = _token(self.function._options) if isinstance(self.function, Jitted) else None
        kind = "method" if isinstance(self.function, types.MethodType) else ""
        return (_token(self.plain.__code__), kind, options, self.places, self.layout, self.signature.globals)

    def flags(self) -> list[int]:
        flags = self.signature.root_flags(self.layout, ())
        return [flag for flag, place in zip(flags, self.places, strict=True) if place < 0]

    def rebuilt(self, captured: Sequence[Any]) -> Any:
        """The function with other values in place of what it captures."""
        values = iter(captured)
        given = [next(values) if place < 0 else root for root, place in zip(self.roots, self.places, strict=True)]
        plain, first = self.plain, given[: self.prefix]
        if plain is call_opaque:
            inner = first[0]
        elif plain is call_partial:
            inner = functools.partial(first[0], *first[1], **first[2])
        else:
            inner = self._with_parts(given)
            inner = types.MethodType(inner, first[0]) if first else inner
        return type(self.function)(inner, self.function._options) if isinstance(self.function, Jitted) else inner

    def _with_parts(self, given: list[Any]) -> types.FunctionType:
        plain, signature = self.plain, self.signature
        names = [*signature.names[: signature.positional], *[""] * sum(self.layout[:1])]
        names += [*signature.names[signature.positional :], *self.layout[1:]]
        at = len(names)
        own = {name: value for name, value, place in zip(names, given, self.places, strict=False) if place < 0}
        cells, values = given[at : at + len(signature.cells)], given[at + len(signature.cells) :]
        changed = (
            {
                name: value
                for name, value, old in zip(signature.globals, values, self.roots[-len(values) :], strict=True)
                if value is not old
            }
            if values
            else {}
        )
        scope = {**plain.__globals__, **changed} if changed else plain.__globals__
        out = types.FunctionType(
            plain.__code__, scope, plain.__name__, None, tuple(cells) if cells else plain.__closure__
        )
        with_default = signature.names[: signature.positional][signature.positional - len(plain.__defaults__ or ()) :]
        defaults = zip(with_default, plain.__defaults__ or (), strict=True)
        out.__defaults__ = tuple(own.get(name, old) for name, old in defaults) or None
        if plain.__kwdefaults__:
            out.__kwdefaults__ = {name: own.get(name, old) for name, old in plain.__kwdefaults__.items()}
        out.__qualname__, out.__module__, out.__doc__ = plain.__qualname__, plain.__module__, plain.__doc__
        return out


class _Operand:
    """Stands for an operand while a function is bound."""


class _Call:
    """One call. A trace that it leads to finds it in its thread: what is compiled holds nothing of the caller's."""

    def __init__(self, parts: list[_Part], operands: Sequence[Any], rest: Sequence[Any], title: str, run: Run) -> None:
        self.parts, self.run, self.title = parts, run, title
        self.counts = len(operands), len(rest)
        key = (title, *(part.key for part in parts))
        self.roots = (key, *operands, *rest, *(root for part in parts for root in part.captured))
        self.told = False  # was a host function called?

    @staticmethod
    def of(
        title: str, functions: Sequence[Any], operands: Sequence[Any], rest: Sequence[Any], run: Run
    ) -> _Call | None:
        try:
            parts = [_Part.of(function, len(operands)) for function in functions]
        except TypeError:
            return None
        found = [part for part in parts if part is not None]
        return _Call(found, operands, rest, title, run) if len(found) == len(parts) else None

    def __call__(self) -> Any:
        with _current(self):
            compiled = _compiled_for(_token(self.parts[0].plain.__code__))
            if not compiled.reads.unchanged():
                compiled.forget()
            return compiled(*self.roots)

    def record(self, layout: tuple[Any, ...], opened: _core.Opened | None = None) -> _core.Recording:
        return _core.Recording(self.roots, self.names, self.flags, layout, opened=opened)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.title}[{i}]" for i in range(len(self.roots)))

    @property
    def flags(self) -> list[int]:
        own = 1 + sum(self.counts)
        return [0] * own + [flag for part in self.parts for flag in part.flags()]

    def body(self, values: list[Any]) -> Any:
        """What is traced, on the rebuilt roots."""
        operands, rest = self.counts
        after = 1 + operands + rest
        functions: list[Any] = []
        for part in self.parts:
            count = len(part.captured)
            functions.append(part.rebuilt(values[after : after + count]))
            after += count
        return self.run(functions, values[1 : 1 + operands], values[1 + operands : 1 + operands + rest])


@contextlib.contextmanager
def _current(call: _Call) -> Generator[None]:
    before = getattr(_CALLS, "now", None)
    _CALLS.now = call
    try:
        yield
    finally:
        _CALLS.now = before


# ---- what is compiled


@register_static
class _Token:
    """Stands for an object in keys, which hold it weakly: it lives as long as the object."""

    def __init__(self, of: Any) -> None:
        number = id(of)
        self._of = weakref.ref(of, lambda _: _TOKENS.pop(number, None))


_TOKENS: dict[int, _Token] = {}
_COMPILED: collections.OrderedDict[_Token, _Compiled] = collections.OrderedDict()  # the one used last at the end
_LOCK = threading.Lock()


def _token(of: Any) -> _Token:
    found = _TOKENS.get(id(of))
    return _TOKENS.setdefault(id(of), _Token(of)) if found is None else found


def _compiled_for(first: _Token) -> _Compiled:
    """That of the calls whose first function has this code.

    A jaxpr remembers where its equations come from, and so keeps the code alive: the number of these is bounded.
    """
    with _LOCK:
        found = _COMPILED.get(first)
        if found is None:
            found = _COMPILED[first] = _Compiled()
            while len(_COMPILED) > _FUNCTIONS:
                _COMPILED.popitem(last=False)
        _COMPILED.move_to_end(first)
        return found


def _roots(*roots: Any) -> None:
    """A call by its roots: `_Call.body` is what runs."""
    del roots


_BINDING = Signature.of(_roots, 0, False).binding


class _Compiled(_core.Caller):
    """What is compiled for the calls whose first function has one code."""

    def __init__(self) -> None:
        self._configure(_roots, (), FunctionTable(_OPTIONS), _BINDING)
        self.reads = Reads()

    def forget(self) -> None:
        cast("FunctionTable", self._table).clear()
        self.reads = Reads()

    def _entry(
        self, roots: tuple[Any, ...], layout: tuple[Any, ...], context: Any, opened: _core.Opened
    ) -> tuple[_core.Entry, _core.Recording]:
        table: Any = self._table
        recording = _CALLS.now.record(layout, opened)
        graphdef = recording.graphdef
        entry = table.entries.get((graphdef, context))
        if entry is not None:
            table.found += 1
            return entry, recording
        table.misses += 1
        outcomes: list[_core.Outcome] = []
        flat = _flat_function(definition_of(_CALLS.now.parts[0].plain), layout, weakref.ref(table), outcomes)
        # Not the jit object itself, which would be run directly after some calls: a loop takes longer than that saves.
        compiled = functools.partial(jax.jit(flat))
        entry = _core.Entry(graphdef, context, compiled, outcomes, len(roots), False)
        return table.store((_core.weaken(graphdef), context), entry), recording

    def _reads(self, entry: _core.Entry) -> None:
        """What its code reads is compared before each call, by `Reads`."""

    def _explain(self, error: BaseException, roots: tuple[Any, ...], layout: tuple[Any, ...]) -> BaseException:
        return error


def _flat_function(
    place: Any, layout: tuple[Any, ...], table: Callable[[], Any], outcomes: list[_core.Outcome]
) -> Callable[..., Flat]:
    """The function that JAX sees: arrays to (result leaves, write-back leaves, number of the Outcome)."""

    def flat(*leaves: Any) -> Flat:
        call, alive, active = _CALLS.now, table(), _core.active_call(outcomes)
        if active is None or alive is None:
            raise GraftaxError("a loop was traced outside of a call")
        recording = active[2] or call.record(layout)
        since = len(equations())
        given = (call.title, recording, call.roots, leaves, call.body, "propagate")
        with active[0].reads.noted(part.plain.__code__ for part in call.parts):
            outcome, out, _, _ = run_trace(*given, by_value=False, forward=True, arrays=True)
        alive.traces += 1
        if calls_host(since):  # with objects of this call: the next one calls its own
            call.told = True
            for key, entry in list(alive.entries.items()):
                if entry.outcomes is outcomes:
                    alive.drop(key)
        with _LOCK:  # two threads may trace one entry at once
            number = len(outcomes)
            outcomes.append(outcome)
        count = outcome.result_leaves
        return tuple(out[:count]), tuple(out[count:]), encode(number)

    flat.__name__ = flat.__qualname__ = place.__name__
    flat.__wrapped__ = place  # type: ignore[attr-defined]
    return flat
