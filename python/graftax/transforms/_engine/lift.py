# SPDX-License-Identifier: Apache-2.0
"""Helpers that lift a JAX transform to functions of any objects. Every transform uses them."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from graftax import _core
from graftax._jax.tracebacks import boundary
from graftax._jit.cache import record_transform_of, remove_copied_table
from graftax.transforms._engine.program import Program

F = TypeVar("F", bound=Callable[..., Any])
W = TypeVar("W")

Make = Callable[..., Program]  # `Program`, which writes changes back, or `by_value`, which drops them
MISSING: Any = None  # no function was passed: the transform is used as a decorator with options

# Makes the programs of `filter_*`: the caller's objects are never changed; closures and globals are constants.
by_value = functools.partial(Program, mutation="discard", captured=False)


def call_first(functions: Sequence[Callable[..., object]], operands: Sequence[object]) -> Any:
    """Calls the only function of a program with its operands."""
    return functions[0](*operands)


def run(
    name: str, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, Any], mutation: str
) -> Any:
    """Calls a function as part of the running trace, and treats its changes as `mutation` says."""
    program = Program(name, [function], args, kwargs, mutation=mutation)
    _, outputs = program.trace(program.leaves, call_first)
    return program.finish(outputs)


def wraps(fun: object, title: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`functools.wraps` for the function that a transform returns."""
    if not callable(fun):
        raise TypeError(f"graftax.{title} expects a callable, got {type(fun).__qualname__}: {fun!r}")
    # The attributes of a callable object are its state, so they are not copied.
    is_function = isinstance(fun, types.FunctionType)
    around = functools.wraps(fun, updated=("__dict__",) if is_function else ())

    def wrap(wrapper: Callable[..., object]) -> Callable[..., Any]:
        wrapper = around(boundary(wrapper))
        # `functools.wraps` has copied the attributes of the function, and with them its compile cache.
        remove_copied_table(wrapper.__dict__)
        return wrapper

    return wrap


_NAMES = ("__name__", "__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__")


class _Arrays:
    def __repr__(self) -> str:
        return "0 for arrays"


ARRAYS: Any = _Arrays()  # the default axis: 0 for arrays, None for everything else


# For each function the wrappers that transforms returned for it, by options, while somebody references them. A wrapper
# refers to its function, so it is kept weakly, too: otherwise neither would ever be freed.
_WRAPPERS: weakref.WeakKeyDictionary[Any, dict[Any, weakref.ref[Any]]] = weakref.WeakKeyDictionary()


def memoize_wrapper(wrapper: W, fun: object, *options: object) -> W:
    """Returns the existing wrapper of `fun` for equal options, if it is still alive, and else the new one."""
    # JAX and Equinox's own `filter_jit` cache compilations by the identity of the function: a new wrapper for every
    # call would compile every time. Only plain options can be compared, and kept without keeping the user's objects
    # alive.
    if not isinstance(wrapper, types.FunctionType) or not _is_plain(options):
        return wrapper
    if isinstance(fun, types.FunctionType):
        # With their types, because True, 1 and 1.0 are equal.
        wrappers, key = _WRAPPERS.setdefault(fun, {}), tuple((type(option), option) for option in options)
        reference = wrappers.get(key)
        existing = None if reference is None else reference()
        if existing is not None and _looks_like(existing, wrapper):
            return existing
        wrappers[key] = weakref.ref(wrapper)
    record_transform_of(wrapper, fun, *options)
    return wrapper


def _looks_like(candidate: types.FunctionType, wrapper: types.FunctionType) -> bool:
    """Whether two wrappers have identical attributes. They differ if somebody has set attributes of one of them."""
    candidate_attributes, wrapper_attributes = (
        {**vars(f), **{name: getattr(f, name) for name in _NAMES}} for f in (candidate, wrapper)
    )
    # The compile cache is no attribute of the user's.
    remove_copied_table(candidate_attributes)
    return candidate_attributes.keys() == wrapper_attributes.keys() and all(
        candidate_attributes[name] is wrapper_attributes[name] for name in candidate_attributes
    )


def _is_plain(option: object) -> bool:
    """Whether an option is a plain value, so that a cache can hold it without keeping other objects alive."""
    if type(option) is tuple:
        return all(map(_is_plain, cast("tuple[Any, ...]", option)))
    return option is None or option is ARRAYS or type(option) in (bool, int, str)


def decorator(transform: F) -> F:
    """Makes a transform return a decorator if it is called without a function, as in `@graftax.vmap(in_axes=1)`."""

    @functools.wraps(transform)
    def transform_or_decorator(*args: object, **kwargs: object) -> Any:
        if args or "fun" in kwargs:
            return transform(*args, **kwargs)
        return functools.partial(transform_or_decorator, **kwargs)

    return cast("F", transform_or_decorator)


def name_of(fun: object, title: str) -> str:
    """The name of a transformed function in messages, such as "vmap of f"."""
    return f"{title} of {getattr(fun, '__name__', type(fun).__name__)}"


def named(flat: Callable[..., object], program: Program) -> Callable[..., Any]:
    """Gives the flat function the user's function name and source location, which JAX's messages show."""
    flat.__wrapped__ = program.definition  # type: ignore[attr-defined]
    flat.__name__ = flat.__qualname__ = flat.__wrapped__.__name__  # type: ignore[attr-defined]
    return flat


def flat_function(program: Program, arrays: bool = False) -> Callable[..., tuple[Any, ...]]:
    """The flat function of a program with one function: from its leaves to the output leaves of the Outcome.

    With `arrays`, NumPy arrays that the function creates are outputs, and not constants.
    """

    def flat(*leaves: object) -> tuple[Any, ...]:
        _, outputs = program.trace(leaves, call_first, arrays=arrays)
        return tuple(outputs)

    return named(flat, program)


class Output(NamedTuple):
    """A function's result, split into arrays, which JAX's transform sees, and a structure, which it does not."""

    leaves: list[Any]
    graphdef: _core.GraphDef

    def rebuilt(self, leaves: Sequence[object]) -> Any:
        return _core.unflatten(self.graphdef, list(leaves))

    def with_numbers(self, expected: _core.GraphDef) -> Output:
        """The same value, in which Python numbers at the paths of the arrays of `expected` are leaves."""
        is_array = set(expected.leaf_places()).__contains__
        leaves, graphdef = _core.record((self.rebuilt(self.leaves),), ("value",), dynamic=is_array)
        # Flattened once more around arrays, the value has the structure that it would have with arrays there.
        arrays = [np.zeros(()) for _ in leaves]
        leaf_of = {id(array): leaf for array, leaf in zip(arrays, leaves, strict=True)}
        flat_arrays, graphdef = _core.flatten(_core.unflatten(graphdef, arrays))
        return Output([leaf_of[id(array)] for array in flat_arrays], graphdef)


def traced_output(
    program: Program, leaves: Sequence[object], value: Callable[[Any], Any] = lambda result: result, **options: Any
) -> tuple[Output, _core.Outcome, list[Any]]:
    """Traces a program with one function: (its result, flattened by value; the Outcome; its output leaves).

    `value` picks the part of the result that is flattened.
    """
    results: list[Output] = []

    def body(functions: list[Callable[..., Any]], operands: list[Any]) -> Any:
        result = functions[0](*operands)
        results.append(Output(*_core.flatten(value(result))))
        return result

    outcome, outputs = program.trace(leaves, body, **options)
    return results[0], outcome, outputs
