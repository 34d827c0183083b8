# SPDX-License-Identifier: Apache-2.0
"""`jit` and `filter_jit`: turn the user's arguments into an `Options` record and a `Jitted`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Unpack, cast, overload

from graftax._jax.tracebacks import boundary
from graftax._jit.compare_with_plain import Checked
from graftax._jit.jitted import Jitted
from graftax._jit.jitted_pytree import JittedPytree
from graftax._jit.options import (
    FilterJitOptions,
    JitOptions,
    NumberPolicy,
    Options,
    RecordOptions,
    donation,
    names_and_numbers,
    number_options,
    one_or_more,
    several,
)
from graftax._jit.pytree_callable import is_pytree
from graftax._sharding.frozen_specs import freeze

if TYPE_CHECKING:
    from graftax._record.recorder import Recorder

NO_RECORD_OPTIONS = "record={record!r}: expected True, or a dict of the options of graftax.record: record={{'last': 5}}"

P = ParamSpec("P")
R = TypeVar("R")


def _wrap(function: Any, options: Options) -> Any:
    # In a class body, `@jit` above `@classmethod`: the method is jitted, and stays a class method.
    if isinstance(function, (classmethod, staticmethod)):
        return type(function)(_wrap(function.__func__, options))
    if not options.captured and is_pytree(function):
        return JittedPytree(function, options)
    return (Checked if options.check else Jitted)(function, options)


def _recorded(wrap: Callable[[Any], Any], record: Literal[True] | RecordOptions) -> Callable[[Any], Any]:
    from graftax._record.recorder import record as with_recorder  # circular: it imports this module

    if record is not True and not isinstance(record, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(NO_RECORD_OPTIONS.format(record=record))
    keep = with_recorder(**({} if record is True else record))
    return lambda function: keep(wrap(function))


@overload
def jit(
    function: Callable[P, R], /, *, record: Literal[False] = False, **options: Unpack[JitOptions]
) -> Jitted[P, R]: ...
@overload
def jit(
    *, record: Literal[False] = False, **options: Unpack[JitOptions]
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...
@overload
def jit(
    function: Callable[P, R], /, *, record: Literal[True] | RecordOptions, **options: Unpack[JitOptions]
) -> Recorder[P, R]: ...
@overload
def jit(
    *, record: Literal[True] | RecordOptions, **options: Unpack[JitOptions]
) -> Callable[[Callable[P, R]], Recorder[P, R]]: ...
@boundary
def jit(
    function: Callable[..., Any] | None = None,
    /,
    *,
    mutation: Literal["propagate", "error", "discard"] = "propagate",
    cache_size: int = 512,
    donate: str | int | Sequence[str | int] | None = None,
    dynamic: str | int | Sequence[str | int] | None = None,
    ignore: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    keep_unused: bool = False,
    inline: Any = False,
    compiler_options: dict[str, Any] | None = None,
    check: bool = False,
    progress: bool | Callable[[str, float], Any] = False,
    background: bool = False,
    branches_ahead: bool = False,
    warn_impure: bool = True,
    numbers: NumberPolicy | Mapping[str, NumberPolicy] = "symbolic",
    repeated: Any = "auto",
    record: bool | RecordOptions = False,
) -> Jitted[..., Any] | Callable[[Callable[..., Any]], Jitted[..., Any]]:
    """Compiles a function of ordinary Python objects with XLA.

    Arrays are traced, wherever they are in the arguments, in the closure or in the globals that the function names. All
    other values are static and are compared on every call. Shared objects stay shared, and cycles stay cycles. Whatever
    the function changes is changed in the caller's own objects.

    Args:
        function: any callable. Without it, `jit` returns a decorator.
        mutation: "propagate" applies changes to the caller's objects, "error" forbids them, "discard" drops them.
        cache_size: how many structures are kept compiled. The least recently used is dropped first.
        static_argnums, static_argnames: arguments that must not hold arrays. Other values are static anyway.
        donate: the arguments whose arrays may be reused for outputs: "all", "all-except-first" or "none"; or names,
            positions or patterns of key paths (`"state.opt"`, `"**.moments"`). With "warn" or "warn-except-first" JAX
            warns about buffers that it could not reuse. "auto" donates each array that the call overwrites and that
            nothing else refers to.
        donate_argnums, donate_argnames: the same, in JAX's spelling.
        dynamic: names, positions or patterns of key paths of Python numbers to trace: the function sees arrays.
            `graftax.Dynamic` does the same for one value.
        ignore: what the function does not read: patterns of key paths (`"**.history"`), types, filters, predicates of
            values. It is neither compared nor traversed, so it may be an iterator, a file or a logger. The function
            may move it and assign it again. Looking inside raises an `IgnoredValueError`. None is never ignored.
        in_shardings, out_shardings: one sharding for all leaves, or one for each part, given as a container or an
            object of the same class with an entry for each part; as a dict of patterns of key paths and types
            (`{"model.**.kernel": sharding, "**": None}`), of which the first that covers a path decides; as
            `nnx.StateSharding`; or as `graftax.Rules`. None leaves a part to JAX. An array that is written into an
            object keeps the sharding of the one it replaces, unless `out_shardings={"model": ..., "return": ...}` says
            otherwise; `"return"` is the result.
        keep_unused, inline, compiler_options: as in `jax.jit`.
        check: runs the plain function alongside each call, on copies. A `CheckError` names the first difference in
            result, arguments, exception, print or warnings. For debugging, in one thread.
        progress: with True, a call that compiles reports on standard error what it has done and how long each part
            took: recorded, traced, lowered, compiled, reused (an equal program was compiled before), or failed. A
            function is called instead, as `progress(part, seconds)`.
        background: with True, a first call does not wait for the compiler. The function is traced as always, once. A
            thread compiles, while the call evaluates the trace operation by operation, as JAX does without `jit`, and
            so do later calls until the program is ready. Their results may differ from the program's in the last
            digits. Programs with effects or functions on the host, and arrays on several devices, are compiled as
            usual. If the compiler raises an error, the next call raises it. Cannot be combined with
            `donate` or shardings.
        branches_ahead: with True, a call that compiles also makes the programs for other outcomes of the tests on its
            symbolic numbers (see `numbers`): for `if step < warmup`, the program of the calls after the warm-up. It
            traces them before it returns, and a thread compiles them. At most eight are made. A trace that raises, or
            would do more than to compute values (`print`, say), is left to the call that comes to it. On Python 3.11
            nothing is made ahead.
        warn_impure: gives an `ImpureCallWarning` if your code makes a call that a compiled function cannot repeat:
            `time`, `random`, `numpy.random`, `print`, `open`, `logging` and the like. It names the line and says what
            to write instead. With `check=True` there is no warning: the check compares the effects of such calls.
        numbers: "symbolic" or "static". A Python `int` or `float` is static at first. With "symbolic", its second value
            costs one more compilation, and there are none after that: Python computes with it on each call, and it is
            an input of the program when combined with an array. Each outcome of a test, and each value used as a
            shape, gets its own program. With "static", each new value compiles again. A dict gives one of the two for
            patterns of key paths (`{"model.steps": "symbolic", "**.width": "static"}`), from the first call on, so that
            a number that is known to change costs no second compilation. All others are treated as with "symbolic".
        repeated: which calls that repeat, such as those of the blocks of a deep model, are traced and lowered once for
            all objects of one structure with arguments of the same shapes. "auto": methods of classes with four or more
            objects, and other functions from their fourth call on, if a call before does nothing that a program cannot
            repeat, and is large enough to pay. Operations of the calls that share a program then have no key path of
            their own in profiles. Or classes, methods or functions (`repeated=Block`); True for all methods of classes
            with several objects; None for no call.
        record: keeps what the last calls were given, and writes a file when one goes wrong. True, or a dict of the
            options of `graftax.record`: `{"last": 5, "dir": "runs"}`.

    Returns:
        the compiled function, a `Jitted`: it is called like `function`. With `record`, a `Recorder`.

    Raises:
        UnsupportedValueError: if the function uses a value with hidden state, such as an iterator; names its path.
        MutationError: for a change that the options forbid.

    Example:
        >>> @graftax.jit
        ... def step(params, note):
        ...     params["w"] = params["w"] * 2
        ...     return {"note": note, "sum": params["w"].sum()}
        >>> params = {"w": jnp.ones(2)}
        >>> step(params, "first")
        {'note': 'first', 'sum': Array(4., dtype=float32)}
        >>> params["w"]  # changed in place
        Array([2., 2.], dtype=float32)
    """
    options = Options(
        mutation=mutation,
        check=check,
        progress=progress,
        background=background,
        branches_ahead=branches_ahead,
        warn_impure=warn_impure,
        repeated=repeated if repeated is True or repeated == "auto" else several(repeated),
        cache_size=cache_size,
        **number_options(numbers),
        static=names_and_numbers(static_argnums, static_argnames),
        dynamic=one_or_more(dynamic),
        ignore=several(ignore),
        **donation(donate, donate_argnums, donate_argnames),
        in_shardings=freeze(in_shardings),
        out_shardings=freeze(out_shardings),
        keep_unused=keep_unused,
        inline=inline,
        compiler_options=tuple(sorted((compiler_options or {}).items())),
    )
    wrap = functools.partial(_wrap, options=options)
    decorate = _recorded(wrap, record) if record is not False else wrap
    return decorate if function is None else decorate(function)


def jit_in_place_of_jax(function: Any, /, **options: Unpack[JitOptions]) -> Any:
    """`jit` for what was written for `jax.jit`.

    Numbers that a caller gives are traced, results are new arrays in new trees, and donated arrays are deleted.
    A change of captured Python values is refused.
    """
    return _replacing(function, options, as_jax=True)


def jit_in_place_of_nnx(function: Any, /, **options: Unpack[JitOptions]) -> Any:
    """`jit` for what was written for `nnx.jit`: a change of captured Python values is refused."""
    return _replacing(function, options, as_jax=False)


def _replacing(function: object, options: JitOptions, as_jax: bool) -> Any:
    # `jit` checks the options and makes the record of them, which has two more fields here.
    decorator = cast("functools.partial[Any]", jit(**options))
    return _wrap(function, dataclasses.replace(decorator.keywords["options"], replaces=True, as_jax=as_jax))


@overload
def filter_jit(function: Callable[P, R], /, **options: Unpack[FilterJitOptions]) -> Jitted[P, R]: ...
@overload
def filter_jit(**options: Unpack[FilterJitOptions]) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...
@boundary
def filter_jit(
    function: Callable[..., Any] | None = None,
    /,
    *,
    donate: str | int | Sequence[str | int] | None = "none",
    dynamic: str | int | Sequence[str | int] | None = None,
    ignore: Any = None,
    cache_size: int = 512,
    in_shardings: Any = None,
    out_shardings: Any = None,
    keep_unused: bool = False,
    inline: Any = False,
    compiler_options: dict[str, Any] | None = None,
    warn_impure: bool = True,
    numbers: NumberPolicy | Mapping[str, NumberPolicy] = "symbolic",
) -> Jitted[..., Any] | Callable[[Callable[..., Any]], Jitted[..., Any]]:
    """`jit` by value: the caller's objects are never touched, and closures and globals are as in `jax.jit`.

    A drop-in for `equinox.filter_jit` and `flarejax.filter_jit`. A change to an argument that is not part of the result
    is dropped, with one `LostChangeWarning` that names its path.

    Args:
        function: any callable. Without it, `filter_jit` returns a decorator.
        donate, dynamic, ignore, cache_size, in_shardings, out_shardings: as in `jit`.
        keep_unused, inline, compiler_options, warn_impure, numbers: as in `jit`.

    Returns:
        the compiled function. It is a pytree with the leaves of `function`, as in Equinox.

    Raises:
        UnsupportedValueError: if the function uses a value with hidden state, such as an iterator; names its path.

    Example:
        >>> @graftax.filter_jit
        ... def step(params, note):
        ...     return {**params, "w": params["w"] * 2, "note": note}
        >>> step({"w": jnp.ones(2)}, "first")
        {'w': Array([2., 2.], dtype=float32), 'note': 'first'}
    """
    options = Options(
        mutation="discard",
        warn_lost=True,
        captured=False,
        **number_options(numbers),
        warn_impure=warn_impure,
        cache_size=cache_size,
        dynamic=one_or_more(dynamic),
        ignore=several(ignore),
        in_shardings=freeze(in_shardings),
        out_shardings=freeze(out_shardings),
        keep_unused=keep_unused,
        inline=inline,
        compiler_options=tuple(sorted((compiler_options or {}).items())),
        **donation(donate, None, None),
    )
    if function is None:
        return functools.partial(_wrap, options=options)
    return _wrap(function, options)
