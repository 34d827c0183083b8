# SPDX-License-Identifier: Apache-2.0
"""One call, in the order it runs: bind -> flatten -> dispatch -> run -> unflatten -> write back.

The hit path is C++ (`core/call.cpp`): it binds, replays a recent GraphDef, runs the entry's executable and applies its
Outcome. What is left for Python is a structure not met before, and everything that is asked for by name.
"""

from __future__ import annotations

import functools
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeVar, Unpack, overload

import jax
import jax.core

from . import _core
from ._aot import Lowered
from ._dispatch import Plan, build_entry, flat_function, leaf_names, leaf_options, place_of
from ._errors import CHANGE_LOST, DELETED, GraftaxError, LostChangeWarning
from ._options import FilterJitOptions, JitOptions, Options, donation, freeze, names_and_numbers
from ._recompiles import Recompiles
from ._signature import Signature, refuse_generators, resolve

P = ParamSpec("P")
R = TypeVar("R")
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
        self.recompiles = Recompiles()
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


def _table_of(function: types.FunctionType, may_hang: bool, options: Options) -> FunctionTable:
    if not may_hang:
        return FunctionTable(options)
    tables = function.__dict__.get(_TABLES)
    if not isinstance(tables, _Tables) or tables.owner() is not function:
        tables = function.__dict__[_TABLES] = _Tables(function)
    try:
        return tables.tables.setdefault(options, FunctionTable(options))
    except TypeError:  # an option that does not hash
        return FunctionTable(options)


class Jitted(_core.Caller, Generic[P, R]):
    """A function compiled by graftax: what `graftax.jit` returns."""

    _plan: Plan
    __wrapped__: Callable[..., Any]
    __self__: Any  # of a bound method

    def __init__(self, function: Callable[P, R], options: Options) -> None:
        plain, prefix, may_hang = resolve(function)
        refuse_generators(plain)
        name = getattr(function, "__name__", type(function).__name__)
        signature = Signature.of(plain, len(prefix), options.captured)
        signature.check(options.static, "static_argnums/static_argnames", name)
        signature.check(options.donate, "donate_argnums/donate_argnames", name)
        table = _table_of(plain, may_hang, options)
        self._configure(plain, prefix, table, signature.binding)
        self._options = options
        table_ref = weakref.ref(table)
        on_trace = functools.partial(_on_trace, name, options, table_ref)
        self._plan = Plan(name, place_of(plain), signature, options, on_trace)
        functools.update_wrapper(self, function)
        self.__dict__.pop(_TABLES, None)

    if TYPE_CHECKING:  # C++ answers the call

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    # ---- a structure not met before

    def _entry(self, roots: tuple[Any, ...], layout: tuple[Any, ...], context: Any) -> _core.Entry:
        signature, options, table = self._plan.signature, self._options, self._table
        names = signature.root_names(layout)
        leaves, graphdef = _core.record(roots, names, signature.flags(layout, options.static), layout)
        key = (graphdef, context)
        entry = table.entries.get(key)
        if entry is not None:
            table.found += 1
            return entry
        table.misses += 1
        table.recompiles.note(self._plan.name, graphdef, names)
        entry = build_entry(self._plan, self, roots, layout, graphdef, leaves, context)
        return table.store((_core.weaken(graphdef), context), entry)

    def _explain(self, error: BaseException, roots: tuple[Any, ...], layout: tuple[Any, ...]) -> BaseException:
        """Names the key path where a failed call's error speaks of a flat leaf, or of a deleted array."""
        if isinstance(error, (RuntimeError, ValueError)) and "delete" in str(error):
            names = self._plan.signature.root_names(layout)
            leaves, graphdef = _core.record(roots, names, [False] * len(names), layout)
            for leaf, path in zip(leaves, leaf_names(graphdef, names), strict=True):
                if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
                    error.args = (DELETED.format(path=path, name=self._plan.name, error=error),)
                    break
        return error

    # ---- asked for by name

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
        bound = self._bind(*args, **kwargs)
        if bound is None:
            self._function(*self._prefix, *args, **kwargs)  # raises the function's own TypeError
            raise GraftaxError(f"the arguments of {self._plan.name} could not be bound")
        roots, layout = bound
        names = self._plan.signature.root_names(layout)
        flags = self._plan.signature.flags(layout, self._options.static)
        leaves, graphdef = _core.record(roots, names, flags, layout)
        return roots, layout, leaves, graphdef

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """Lowers the function for these arguments without running it."""
        return Lowered(self, *self._staged("lower", args, kwargs))

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Traces the function for these arguments: JAX's `Traced`, over the flat leaves."""
        return self._staged("trace", args, kwargs)[0]

    def _staged(self, stage: str, args: Any, kwargs: Any) -> tuple[Any, _core.GraphDef, list[_core.Outcome], Any]:
        roots, layout, leaves, graphdef = self._prepare(args, kwargs)
        entry = build_entry(self._plan, self, roots, layout, graphdef, leaves, None)
        staged = _core.run_active(self, roots, entry.outcomes, getattr(entry.compiled, stage), *leaves)
        return staged, graphdef, entry.outcomes, layout

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The result with `jax.ShapeDtypeStruct` in place of every array. Changes nothing."""
        roots, layout, leaves, graphdef = self._prepare(args, kwargs)
        outcomes: list[_core.Outcome] = []
        donated, _ = leaf_options(self._plan, layout, graphdef)
        flat = flat_function(self._plan, layout, donated, outcomes, by_value=True)
        shapes, _, code = _core.run_active(self, roots, outcomes, jax.eval_shape, flat, *leaves)
        walked = _core.walk(graphdef, roots)
        if walked is None:
            raise GraftaxError("the arguments changed during eval_shape")
        known = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        return outcomes[_core.decode(code)].apply(shapes, known, walked[1])

    def clear_cache(self) -> None:
        """Drops every compiled entry of the function under these options."""
        self._table.clear()

    def cache_info(self) -> CacheInfo:
        """Hits, misses, bound and size of the function's table, and how often it was traced."""
        t = self._table
        return CacheInfo(t.hits + t.found, t.misses, t.maxsize, len(t.entries), t.traces)

    # ---- as a method, a pickle, a copy

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        bound = type(self).__new__(type(self))
        bound._configure(self._function, (*self._prefix, instance), self._table, self._binding)
        bound.__dict__.update(self.__dict__)
        bound.__self__ = instance
        return bound

    def __repr__(self) -> str:
        return f"<graftax.jit of {self.__wrapped__!r}>"

    def __reduce__(self) -> Any:
        module, name = getattr(self, "__module__", None), getattr(self, "__qualname__", "")
        found: Any = sys.modules.get(module or "")
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is self:
            return name
        return (Jitted, (self.__wrapped__, self._options))

    def __copy__(self) -> Jitted[P, R]:
        return self

    def __deepcopy__(self, memo: Any) -> Jitted[P, R]:
        return self


def _on_trace(name: str, options: Options, table: Callable[[], FunctionTable | None], lost: list[str]) -> None:
    alive = table()
    if alive is not None:
        alive.traces += 1
    if lost and options.warn_lost:
        warnings.warn(CHANGE_LOST.format(name=name, paths=", ".join(lost)), LostChangeWarning, stacklevel=2)


def _wrap(function: Any, options: Options) -> Any:
    if isinstance(function, (classmethod, staticmethod)):
        return type(function)(_wrap(function.__func__, options))
    return Jitted(function, options)


@overload
def jit(function: Callable[P, R], /, **options: Unpack[JitOptions]) -> Jitted[P, R]: ...
@overload
def jit(**options: Unpack[JitOptions]) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...
def jit(
    function: Any = None,
    /,
    *,
    mutation: str = "propagate",
    cache_size: int = 512,
    donate: Any = None,
    static_argnums: Any = None,
    static_argnames: Any = None,
    donate_argnums: Any = None,
    donate_argnames: Any = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Compiles a function of any Python objects with XLA.

    Arrays anywhere in the arguments, in the closure and in the globals that the function names are traced; everything
    else is static, and compared exactly on every call. Shared and cyclic references stay what they are. What the
    function does to its arguments is done to the caller's own objects.

    Args:
        function: any callable. Without it, `jit` returns a decorator.
        mutation: "propagate" brings changes back, "error" forbids them, "discard" drops them.
        cache_size: how many structures are kept compiled; the least recently used goes first.
        static_argnums, static_argnames: arguments that must hold no array (whatever is no array is static anyway).
        donate: "all", "all-except-first", "warn", "warn-except-first" or "none", or names and positions of arguments
            whose arrays may be reused for outputs. The words with "warn" let JAX warn of what it could not reuse.
        donate_argnums, donate_argnames: the same, in JAX's spelling.
        in_shardings, out_shardings: one sharding for all leaves, or a prefix tree of shardings.
        keep_unused, inline, compiler_options: as in `jax.jit`.

    Raises:
        UnsupportedValueError: for a value with hidden state, at its path.
        MutationError: for a change that the options forbid.

    Example:
        >>> counts = {"calls": 0}
        >>> @graftax.jit
        ... def step(params, note, counts):
        ...     params["w"] = params["w"] * 2
        ...     return {"note": note, "sum": params["w"].sum()}
    """
    options = Options(
        mutation=mutation,
        cache_size=cache_size,
        static=names_and_numbers(static_argnums, static_argnames),
        **donation(donate, donate_argnums, donate_argnames),
        in_shardings=freeze(in_shardings),
        out_shardings=freeze(out_shardings),
        keep_unused=keep_unused,
        inline=inline,
        compiler_options=tuple(sorted((compiler_options or {}).items())),
    )
    if function is None:
        return functools.partial(_wrap, options=options)
    return _wrap(function, options)


@overload
def filter_jit(function: Callable[P, R], /, **options: Unpack[FilterJitOptions]) -> Jitted[P, R]: ...
@overload
def filter_jit(**options: Unpack[FilterJitOptions]) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...
def filter_jit(
    function: Any = None,
    /,
    *,
    donate: Any = "none",
    cache_size: int = 512,
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """`jit` by value: the caller's objects are never touched, and closures and globals are as in `jax.jit`.

    A drop-in for `equinox.filter_jit` and `flarejax.filter_jit`. A change to an argument that the result does not show
    is dropped with one `LostChangeWarning` that names its path.

    Args:
        function: any callable. Without it, `filter_jit` returns a decorator.
        donate, cache_size, keep_unused, inline, compiler_options: as in `jit`.
    """
    options = Options(
        mutation="discard",
        warn_lost=True,
        captured=False,
        cache_size=cache_size,
        keep_unused=keep_unused,
        inline=inline,
        compiler_options=tuple(sorted((compiler_options or {}).items())),
        **donation(donate, None, None),
    )
    if function is None:
        return functools.partial(_wrap, options=options)
    return _wrap(function, options)
