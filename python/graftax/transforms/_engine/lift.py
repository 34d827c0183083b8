# SPDX-License-Identifier: Apache-2.0
"""From a transform of JAX to one for functions of any objects: what the files of the transforms share."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from graftax import _core
from graftax._jax.tracebacks import boundary
from graftax._jit.cache import record_transform_of, remove_copied_table
from graftax._jit.jitted import Jitted
from graftax.transforms._engine.program import Program

Make = Callable[..., Program]  # Program, or by_value: what the caller's objects see of a call


# What makes the programs of `filter_*`: the caller's objects are never touched, closures and globals are as in JAX.
by_value = functools.partial(Program, mutation="discard", captured=False)


def call_first(functions: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
    """The body of a transform that calls its one function."""
    return functions[0](*operands)


def run(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mutation: str) -> Any:
    """Calls a function of any objects as a part of the running trace: its changes are treated as `mutation` says."""
    program = Program(name, [function], args, kwargs, mutation=mutation)
    _, out = program.trace(program.leaves, call_first)
    return program.finish(out)


Jitted._as_program = staticmethod(run)  # pyright: ignore[reportPrivateUsage]


def wraps(fun: Any, title: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`functools.wraps` for what a transform returns.

    The attributes of a callable object are its state, and not copied.
    """
    if not callable(fun):
        raise TypeError(f"graftax.{title} expects a callable, got {type(fun).__qualname__}: {fun!r}")
    is_function = isinstance(fun, types.FunctionType)
    around = functools.wraps(fun, updated=("__dict__",) if is_function else ())

    def wrap(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        wrapper = around(boundary(wrapper))
        remove_copied_table(wrapper.__dict__)
        return wrapper

    return wrap


W = TypeVar("W")


_NAMES = ("__name__", "__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__")


class _Arrays:
    def __repr__(self) -> str:
        return "0 for arrays"


ARRAYS: Any = _Arrays()  # an axis that was not given: what is no array has none


# Of functions, what was made of them by which options, as long as somebody has it.
_MADE: weakref.WeakKeyDictionary[Any, dict[Any, weakref.ref[Any]]] = weakref.WeakKeyDictionary()


def made(wrapper: W, fun: Any, *by: Any) -> W:
    """What a transform by value returns: made again of the same function with these options, it does the same.

    It is the same one where that is still there: JAX, and Equinox's own `filter_jit`, compile a function once.
    """
    if not isinstance(wrapper, types.FunctionType) or not _is_plain(by):
        return wrapper
    if isinstance(fun, types.FunctionType):
        known, key = _MADE.setdefault(fun, {}), tuple((type(option), option) for option in by)
        there = known.get(key, _nothing)()
        if there is not None and _looks_like(there, wrapper):
            return there
        known[key] = weakref.ref(wrapper)
    record_transform_of(wrapper, fun, *by)
    return wrapper


def _nothing() -> None:
    pass


def _looks_like(one: types.FunctionType, other: types.FunctionType) -> bool:
    """Has nobody set attributes of one of them, or of the function that they are made of since?"""
    of_one, of_other = ({**vars(f), **{name: getattr(f, name) for name in _NAMES}} for f in (one, other))
    remove_copied_table(of_one)  # notes of ours
    return of_one.keys() == of_other.keys() and all(of_one[name] is of_other[name] for name in of_one)


def _is_plain(option: Any) -> bool:
    """Is this a value that nothing has to be kept alive for?"""
    if type(option) is tuple:
        return all(map(_is_plain, cast("tuple[Any, ...]", option)))
    return option is None or option is ARRAYS or type(option) in (bool, int, str)


F = TypeVar("F", bound=Callable[..., Any])

LATER: Any = None  # the function of a transform that is written as a decorator with options


def decorator(transform: F) -> F:
    """Without a function, the transform is a decorator: `@graftax.vmap(in_axes=1)`."""

    @functools.wraps(transform)
    def given(*args: Any, **kwargs: Any) -> Any:
        if args or "fun" in kwargs:
            return transform(*args, **kwargs)
        return functools.partial(given, **kwargs)

    return cast("F", given)


def name_of(fun: Any, title: str) -> str:
    """What messages call a function under a transform."""
    return f"{title} of {getattr(fun, '__name__', type(fun).__name__)}"


def named(flat: Callable[..., Any], program: Program) -> Callable[..., Any]:
    """The flat function under the user's name and place, which JAX's messages show."""
    flat.__wrapped__ = program.definition  # type: ignore[attr-defined]
    flat.__name__ = flat.__qualname__ = flat.__wrapped__.__name__  # type: ignore[attr-defined]
    return flat


def flat_of(program: Program, arrays: bool = False) -> Callable[..., tuple[Any, ...]]:
    """The flat function of a program's one function: arrays to the output leaves of the Outcome.

    With `arrays`, NumPy arrays that the function makes are outputs too.
    """

    def flat(*leaves: Any) -> tuple[Any, ...]:
        _, out = program.trace(leaves, call_first, arrays=arrays)
        return tuple(out)

    return named(flat, program)


class Output(NamedTuple):
    """What a function returned, as arrays that a transform sees and a structure that it does not."""

    leaves: list[Any]
    graphdef: _core.GraphDef

    def rebuilt(self, leaves: Sequence[Any]) -> Any:
        return _core.unflatten(self.graphdef, list(leaves))
