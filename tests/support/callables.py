# SPDX-License-Identifier: Apache-2.0
"""Functions, partials, methods and the like for random graphs, and what a random program does to them."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import oracle


class Text(str):
    """Text with room for attributes."""


class Number(int):
    """A number with room for attributes."""


# ── functions: each has the cells ``first`` and ``second``, takes any arguments, and calls nothing that calls back ──


def reader(first: Any = None, second: Any = None) -> Callable[..., Any]:
    def read(value: Any = None, *rest: Any, k: Any = None) -> Any:
        return [first, second, value, rest, k]

    return read


def writer(first: Any = None, second: Any = None) -> Callable[..., Any]:
    def write(value: Any = None, *rest: Any, k: Any = None) -> Any:
        nonlocal first, second
        first, second = second, value
        return first

    return write


def maker(first: Any = None, second: Any = None) -> Callable[..., Any]:
    def make(value: Any = None, *rest: Any, k: Any = None) -> Any:
        def made(new: Any = value, *others: Any, k: Any = k) -> Any:
            nonlocal second
            second = new
            return first, value, made

        made.a = value
        return made

    return make


def forwarder(first: Any = None, second: Any = None) -> Callable[..., Any]:
    def forward(value: Any = None, *rest: Any, k: Any = None) -> Any:
        if isinstance(first, types.FunctionType) and first.__name__ != "forward":
            return first(second, value, k=k)
        return second

    return forward


def counter(first: Any = None, second: Any = None) -> Callable[..., Any]:
    def count(value: Any = None, *rest: Any, k: Any = None) -> Any:
        if not isinstance(count, types.FunctionType):  # its cell holds something else by now
            return first
        count.calls = getattr(count, "calls", 0) + 1
        return first if count.calls < 3 else (second, count.calls)

    return count


def eraser(first: Any = None, second: Any = None) -> Callable[..., Any]:
    def erase(value: Any = None, *rest: Any, k: Any = None) -> Any:
        nonlocal first, second
        first = (second, value)
        del second
        return first, rest

    return erase


FUNCTIONS = {f.__name__: f for f in (reader, writer, maker, forwarder, counter, eraser)}
SHARING = "sharing "  # before the name of a function that takes the cells of the function made before it


def with_cells(function: Callable[..., Any], cells: dict[str, types.CellType]) -> Callable[..., Any]:
    """The function with those of ``cells`` that it has a place for."""
    own = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = tuple(cells.get(name, cell) for name, cell in own)
    new = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, closure)
    new.__qualname__, new.__defaults__ = function.__qualname__, function.__defaults__
    new.__kwdefaults__ = function.__kwdefaults__
    for name, cell in zip(new.__code__.co_freevars, closure, strict=True):
        if name == new.__name__:
            cell.cell_contents = new  # it knows itself
    return new


def function_shell(kind: str, before: list[Any]) -> Callable[..., Any]:
    new = FUNCTIONS[kind.removeprefix(SHARING)]()
    earlier = [f for f in before if isinstance(f, types.FunctionType)]
    if not kind.startswith(SHARING) or not earlier:
        return new
    cells = dict(zip(earlier[-1].__code__.co_freevars, earlier[-1].__closure__ or (), strict=True))
    return with_cells(new, {name: cells[name] for name in ("first", "second") if name in cells})


def partial_shell(before: list[Any]) -> functools.partial[Any]:
    earlier = [f for f in before if isinstance(f, types.FunctionType)]
    return functools.partial(earlier[-1] if earlier else reader())


def fill_function(function: types.FunctionType, values: list[Any]) -> None:
    """Cells, a default, a keyword default and an attribute, as far as the values go."""
    for cell in function.__closure__ or ():
        if values and cell.cell_contents is None:
            cell.cell_contents = values[0]
            values = values[1:]
    if values:
        function.__defaults__ = (values[0],)
    if len(values) > 1:
        function.__kwdefaults__ = {"k": values[1]}
    if len(values) > 2:
        function.a = values[2]  # type: ignore[attr-defined]


def fill_partial(partial: functools.partial[Any], values: list[Any]) -> None:
    state = (partial.func, tuple(values[:1]), {"k": values[1]} if len(values) > 1 else {}, {})
    partial.__setstate__(state)
    if len(values) > 2:
        partial.a = values[2]


# ── immutable holders ──


def method(*values: Any) -> Any:
    function = next((v for v in values if isinstance(v, types.FunctionType)), None)
    return types.MethodType(function or reader(values[0]), values[-1] if values[-1] is not None else ())


def proxy(*values: Any) -> types.MappingProxyType[Any, Any]:
    return types.MappingProxyType(values[0] if isinstance(values[0], dict) else {"k": values[0]})


def reference(value: Any) -> Any:
    """A weak reference where the value can have one, else the value."""
    try:
        return weakref.ref(value) if oracle.is_mutable(value) else value
    except TypeError:
        return value


# ── steps ──


def call(x: Any, value: Any, i: int, state: Any) -> None:
    state.held.append(x(value))


def call_empty(x: Any, value: Any, i: int, state: Any) -> None:
    state.held.append(x())


def call_with_keyword(x: Any, value: Any, i: int, state: Any) -> None:
    state.held.append(x(k=value))


def set_defaults(x: Any, value: Any, i: int, state: Any) -> None:
    x.__defaults__ = (value,) if i % 3 else None


def set_keyword_defaults(x: Any, value: Any, i: int, state: Any) -> None:
    x.__kwdefaults__ = {"k": value} if i % 3 else None


def update_keyword_defaults(x: Any, value: Any, i: int, state: Any) -> None:
    if x.__kwdefaults__ is not None:
        x.__kwdefaults__["k"] = value


def set_state(x: Any, value: Any, i: int, state: Any) -> None:
    x.__setstate__((x.func, (value,) if i % 2 else (), {"k": value} if i % 3 else x.keywords, x.__dict__))


def set_content(x: Any, value: Any, i: int, state: Any) -> None:
    x.cell_contents = value


def del_content(x: Any, value: Any, i: int, state: Any) -> None:
    if oracle.cell_content(x) is not oracle.EMPTY:
        state.held.append(x.cell_contents)
    del x.cell_contents


def share_cells(x: Any, value: Any, i: int, state: Any) -> None:
    """A new function over the cells of this one."""
    new = sorted(FUNCTIONS)[i % len(FUNCTIONS)]
    state.held.append(function_shell(SHARING + new, [x]))


FUNCTION_STEPS: list[Any] = [call, call_empty, call_with_keyword, set_defaults, set_keyword_defaults]
FUNCTION_STEPS += [update_keyword_defaults, share_cells, call]
PARTIAL_STEPS: list[Any] = [call, call_empty, call_with_keyword, set_state]
CELL_STEPS: list[Any] = [set_content, set_content, del_content]
