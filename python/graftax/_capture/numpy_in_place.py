# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays that traced code changes in place: `a += x`, `a.sort()`.

A tracer cannot be changed, so `a += x` gives a new array, and every other name of the old one would keep the old
values. While a function is traced, the tracers of NumPy arrays therefore have classes of their own. These know which
arrays NumPy would have made (`a * 2`), which are views (`a[1:]`), and which stand for arrays that plain Python has
changed: such a tracer raises an error if it is used again. Nobody knows what holds the caller's array outside, so there
is a warning of that.

If one of the operands is a `jax.Array`, `a += x` makes a new array in plain Python, too. So a program in which an
argument was changed in place depends on which of its arguments are NumPy's (`Entry.numpy_leaves`).
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from jax.core import Tracer

from graftax import _core
from graftax._base.code_line import code_line
from graftax._base.errors import LostChangeWarning, MutationError
from graftax._base.given_warnings import note_warning
from graftax._capture.code_owner import is_never_asked
from graftax._graph.structure import place_name
from graftax._graph.types.describe import is_symbol
from graftax._jax.inner_frames import add_class_of_tracers
from graftax._jax.tracers import copy_of_tracer

CHANGED = (
    "{name}: `a {op} x` in {place} changes the NumPy array {path} in plain Python. Compiled code makes a "
    "new array: other references to the old one do not see the change. Write `a = a {plain} x`, which "
    "means the same in both; or make it a jax.Array before the call."
)
USED_AGAIN = (
    "`a {op} x` in {place} changes a NumPy array in place, and another name of it, or a view, is used afterwards. "
    "Compiled code makes a new array, so that name would have the old values. Write `a = a {plain} x`, and give the "
    "new array to whatever should see it."
)
HELD = (
    "{name}: `a {op} x` in {place} changes a NumPy array in place, and {path} holds that array, too. Compiled code "
    "makes a new array, so {path} would keep the old values. Write `a = a {plain} x`, and put the new one into {path}."
)
SHARED = (
    "{name}: `a {op} x` in {place} changes the NumPy array {path} in place, and {other} shares its memory. Compiled "
    "code makes a new array, so {other} would keep the old values. Write `a = a {plain} x`, and give both the new one."
)
VIEW = (
    "`a {op} x` in {place} changes a view of a NumPy array in place, and with it the array. Compiled code makes a new "
    "array. Write `a = a {plain} x` for the view alone, or a = jnp.asarray(a).at[...].set(...) for the array."
)
METHOD = (
    "{method}() in {place} changes a NumPy array in place, which compiled code cannot do. Write {remedy}, and give the "
    "new array to whatever should see it."
)
_OPERATORS = {
    **{"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"},
    **{"matmul": "@", "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>"},
}
_COPYING = (
    *(f"__{side}{name}__" for name in _OPERATORS for side in ("", "r")),
    *("__neg__", "__pos__", "__abs__", "__invert__", "__lt__", "__le__", "__eq__", "__ne__", "__gt__", "__ge__"),
    *("all", "any", "argmax", "argmin", "argsort", "astype", "clip", "conj", "copy", "cumprod", "cumsum", "dot"),
    *("flatten", "max", "mean", "min", "prod", "repeat", "round", "std", "sum", "take", "trace", "var"),
)
_VIEWING = ("ravel", "reshape", "squeeze", "swapaxes", "transpose", "view", "diagonal")
_VIEWING_ATTRIBUTES = ("T", "mT")
_IN_PLACE = {
    "sort": "a = jnp.sort(a)",
    "fill": "a = jnp.full_like(a, value)",
    "partition": "a = jnp.partition(a, k)",
    "put": "a = jnp.put(a, indices, values, inplace=False)",
    "resize": "a = jnp.resize(a, shape)",
}
_BASIC_INDICES = (int, slice, type(None), type(...), np.integer)  # with these, NumPy gives a view

# Mixins: a tracer gets a class of one of these and of its own class.


class _NumpyValue:
    """A tracer for a value that NumPy would have computed."""

    __slots__ = ()


class _NumpyArray(_NumpyValue):
    """A tracer for a NumPy array, with an identity and memory of its own."""

    __slots__ = ()


class _ArgumentOfJax:
    """A tracer for an argument that is no NumPy array: changing it in place makes a new array in plain Python."""

    __slots__ = ()


class _Replaced(_NumpyArray):
    """A tracer for an array as it was before it was changed in place. It must not be used."""

    __slots__ = ()


_STOOD_IN = _NumpyValue, _ArgumentOfJax


class _Change:
    """An array that was changed in place, and where."""

    def __init__(self, array: object, operator: str, frame: types.FrameType) -> None:
        self.array, self.operator, self.code, self.line = array, operator, frame.f_code, frame.f_lineno
        self.module = frame.f_globals.get("__name__")

    def text(self, message: str, **parts: str) -> str:
        place = f"{self.code.co_filename}:{self.line}"
        return message.format(op=f"{self.operator}=", plain=self.operator, place=place, **parts)


class NumpyWatch:
    """What one trace knows of its NumPy arrays."""

    def __init__(self, name: str, paths: Callable[[], list[str]]) -> None:
        self.name, self.paths = name, paths
        self.arguments: list[tuple[Any, Any]] = []  # (the caller's leaf, its tracer), all of them
        self.views: list[tuple[Any, Any]] = []  # (a view, the array)
        self.changes: list[_Change] = []
        self.has_changes = False  # of NumPy's arrays, or of arguments that could be some

    def add(self, originals: Sequence[object], leaves: Sequence[object]) -> None:
        """Adds leaves of the caller and their tracers, which get classes of their own."""
        pairs = list(zip(originals, leaves, strict=True))
        stand_ins: dict[tuple[type, type], type] = {}  # leaves are many, and of few classes
        for original, leaf in pairs:
            classes = type(original), type(leaf)
            stand_in = stand_ins.get(classes)
            if stand_in is None:
                _stand_in_for(original, leaf)
                stand_ins[classes] = type(leaf)
            elif stand_in is not classes[1]:
                leaf.__class__ = stand_in  # type: ignore[assignment]
        self.arguments += pairs

    def base(self, array: object) -> Any:
        """The array of which this is a view; None if it is not one."""
        return next((base for view, base in self.views if view is array), None)

    def note_view(self, view: object, array: object) -> None:
        """Notes a view of an array, or of what that is a view of."""
        base = self.base(array)
        self.views.append((view, array if base is None else base))

    def replace(self, change: _Change) -> None:
        """Notes that an array was changed. From now on it must not be used, and none of its views.

        Raises:
            MutationError: it is a view itself, or shares its memory with another argument.
        """
        if self.base(change.array) is not None:
            raise MutationError(change.text(VIEW))
        self._refuse_shared(change)
        self.changes.append(change)
        for array in (change.array, *(view for view, base in self.views if base is change.array)):
            _become(array, _Replaced)

    def _refuse_shared(self, change: _Change) -> None:
        """Raises MutationError if another argument is the same array, or shares its memory."""
        i = self._argument(change.array)
        if i is None or not isinstance(original := self.arguments[i][0], np.ndarray):
            return
        for j, (argument, _) in enumerate(self.arguments):
            if j != i and isinstance(argument, np.ndarray) and np.may_share_memory(original, argument):
                paths = self.paths()
                raise MutationError(change.text(SHARED, name=self.name, path=paths[i], other=paths[j]))

    def _argument(self, array: object) -> int | None:
        """Which of the arguments this is."""
        return next((i for i, (_, leaf) in enumerate(self.arguments) if leaf is array), None)

    def end(self, values: Sequence[object], names: tuple[str, ...], result: object) -> None:
        """Raises MutationError for what still holds a changed array at the end, and warns of changed arguments.

        Args:
            values: the rebuilt roots.
            names: of the roots.
            result: of the function.
        """
        if not self.changes:
            return
        # Recording reads the `aval` of each array, which a changed one refuses.
        self.forget()
        # A changed array that is a root itself is the caller's, of which there is a warning.
        held = [*(None if isinstance(value, _NumpyArray) else value for value in values), result]
        names = *names[: len(values)], *(f"<root {i}>" for i in range(len(names), len(values))), "the result"
        leaves, graphdef = _core.record(tuple(held), names)
        # A view of a changed array has other values in plain Python, too.
        replaced = {id(change.array): change for change in self.changes}
        for view, base in self.views:
            if id(base) in replaced:
                replaced[id(view)] = replaced[id(base)]
        for leaf, place in zip(leaves, graphdef.leaf_places(), strict=True):
            if id(leaf) in replaced:
                path = place_name(place, names)
                raise MutationError(replaced[id(leaf)].text(HELD, name=self.name, path=path))
        for change in self.changes:
            i = self._argument(change.array)
            if i is not None:
                text = change.text(CHANGED, name=self.name, path=self.paths()[i])
                note_warning()
                warnings.warn_explicit(text, LostChangeWarning, change.code.co_filename, change.line, change.module)

    def forget(self) -> None:
        """Makes changed arrays usable again: JAX looks at the arguments of a trace once more when it ends."""
        for change in self.changes:
            for array in (change.array, *(view for view, base in self.views if base is change.array)):
                _become(array, _NumpyArray)


class _Thread(threading.local):
    """The traces that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.watches: tuple[NumpyWatch, ...] = ()


_THREAD = _Thread()


@contextmanager
def watching_numpy(
    name: str, paths: Callable[[], list[str]], originals: Sequence[object], leaves: Sequence[object]
) -> Generator[NumpyWatch]:
    """While entered, a trace runs that has these tracers in place of the caller's leaves.

    Args:
        name: of the function.
        paths: gives the path of each leaf.
        originals, leaves: the caller's leaves, and the tracers.
    """
    watch, outer = NumpyWatch(name, paths), _THREAD.watches
    watch.add(originals, leaves)
    _THREAD.watches = (*outer, watch)
    try:
        yield watch
    finally:
        _THREAD.watches = outer
        watch.forget()


# ---- the classes of the tracers


@functools.cache
def _class_of(mixin: type, tracer_class: type) -> type:
    """The class of a mixin and a class of tracers, with the methods of what it stands for."""
    names: dict[str, Any] = {
        "__slots__": (),
        # Messages of JAX, and code that asks, name the class of the tracer.
        "__module__": tracer_class.__module__,
        "__qualname__": tracer_class.__qualname__,
    }
    if mixin is _Replaced:
        names["aval"] = property(_refuse_use)
    elif mixin is _ArgumentOfJax:
        # The next call may have a NumPy array here, which plain Python would change: the program must not fit it.
        names |= {f"__i{name}__": _noting_change for name in _OPERATORS}
        names |= {name: _noting(getattr(tracer_class, name)) for name in _IN_PLACE if hasattr(tracer_class, name)}
    else:
        names |= {name: _computing(getattr(tracer_class, name), False) for name in _COPYING}
    if mixin is _NumpyArray:
        views = {name: _computing(getattr(tracer_class, name), True) for name in _VIEWING}
        attributes = {name: _viewing_attribute(getattr(tracer_class, name)) for name in _VIEWING_ATTRIBUTES}
        names |= views | attributes
        names["__getitem__"] = _indexing(tracer_class.__getitem__)
        names["__iter__"] = _iterating(tracer_class.__iter__)
        names |= {name: _refusing(tracer_class, name, remedy) for name, remedy in _IN_PLACE.items()}
        names |= {f"__i{name}__": _in_place(name, operator) for name, operator in _OPERATORS.items()}
    return type(tracer_class.__name__, (mixin, tracer_class), names)


def _stand_in_for(original: object, leaf: object) -> None:
    """Gives the tracer of a caller's leaf the class for what that leaf is."""
    if isinstance(leaf, Tracer):
        if isinstance(original, (np.ndarray, _NumpyArray)):
            _become(leaf, _NumpyArray)
        elif isinstance(original, (np.generic, _NumpyValue)):
            _become(leaf, _NumpyValue)
        elif not isinstance(leaf, _STOOD_IN):
            _become(leaf, _ArgumentOfJax)


def _become(tracer: object, mixin: type) -> None:
    """Gives a tracer the class of its own class and a mixin, in place of another mixin that it has."""
    tracer_class = type(tracer)
    if issubclass(tracer_class, _STOOD_IN):
        tracer_class = tracer_class.__bases__[1]
    stand_in = _class_of(mixin, tracer_class)
    tracer.__class__ = stand_in
    # The core has to know the class as one of leaves before it compares an object with its record.
    if stand_in not in _known_to_core:
        _core.flatten(tracer)
        add_class_of_tracers(stand_in)
        _known_to_core.add(stand_in)


_known_to_core: set[type] = set()


def _is_asked_by_user(frame: types.FrameType) -> bool:
    """Does code of the user's call, and not JAX, which computes with JAX's arrays whatever it gets?"""
    return bool(_THREAD.watches) and not is_never_asked(frame.f_code.co_filename)


def _is_numpys(value: object) -> bool:
    """Does an operation of a NumPy array with this value give a NumPy array?"""
    return isinstance(value, (bool, int, float, complex, np.ndarray, np.generic, _NumpyValue)) or is_symbol(value)


def _note_result(result: object, array: object, is_view: bool) -> Any:
    """Gives the result of an operation on a NumPy array the class of one of NumPy's."""
    # NumPy makes another array of `a.astype(a.dtype)`, where JAX gives the same one.
    if result is array and not is_view:
        return copy_of_tracer(result)
    if isinstance(result, Tracer) and not isinstance(result, _NumpyValue):
        _become(result, _NumpyArray if result.ndim or is_view else _NumpyValue)
        if is_view:
            _THREAD.watches[-1].note_view(result, array)
    return result


# Each of the following gives a method for these classes. If JAX calls it, it is the method of the tracer.


def _computing(method: Callable[..., object], is_view: bool) -> Callable[..., Any]:
    """A method whose result is an array of its own, or a view."""

    @functools.wraps(method)
    def computing(self: object, *args: object, **kwargs: object) -> Any:
        result = method(self, *args, **kwargs)
        # An operator with a `jax.Array` gives a `jax.Array`.
        is_operator = method.__name__.startswith("__")
        is_noted = _is_asked_by_user(sys._getframe(1)) and (not is_operator or all(map(_is_numpys, args)))
        return _note_result(result, self, is_view) if is_noted else result

    return computing


def _indexing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def indexing(self: object, index: object) -> Any:
        result = method(self, index)
        # With basic indices NumPy gives a view, with others a copy, and for one element a scalar.
        if not _is_asked_by_user(sys._getframe(1)):
            return result
        parts = index if isinstance(index, tuple) else (index,)
        is_basic = all(isinstance(part, _BASIC_INDICES) and not isinstance(part, bool) for part in parts)
        return _note_result(result, self, is_basic and result.ndim > 0)

    return indexing


def _iterating(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def iterating(self: object) -> Any:
        rows = method(self)
        if not _is_asked_by_user(sys._getframe(1)):
            return rows
        return (_note_result(row, self, row.ndim > 0) for row in rows)

    return iterating


def _viewing_attribute(attribute: Any) -> property:
    def view(self: Any) -> Any:
        result = attribute.__get__(self, type(self))
        return _note_result(result, self, True) if _is_asked_by_user(sys._getframe(1)) else result

    return property(view)


def _refusing(tracer_class: type, name: str, remedy: str) -> Any:
    def refusing(self: object, *args: object, **kwargs: object) -> Any:
        frame = sys._getframe(1)
        if not _is_asked_by_user(frame):
            return getattr(tracer_class, name)(self, *args, **kwargs)
        place = code_line(frame.f_code.co_filename, frame.f_lineno)
        raise MutationError(METHOD.format(method=name, place=place, remedy=remedy))

    refusing.__name__ = name
    return refusing


def _in_place(name: str, operator: str) -> Callable[[Any, Any], Any]:
    """An operator such as `__iadd__`, with NumPy's rules and error messages for shapes and dtypes."""
    plain_name = f"__{name}__"

    def in_place(self: Any, operand: object) -> Any:
        frame = sys._getframe(1)
        if not _is_asked_by_user(frame):
            return NotImplemented
        _THREAD.watches[-1].has_changes = True
        if not _is_numpys(operand):
            return NotImplemented
        result = getattr(self, plain_name)(operand)
        if result is NotImplemented:
            return result
        if result.shape != self.shape:
            text = "non-broadcastable output operand with shape {} doesn't match the broadcast shape {}"
            raise ValueError(text.format(self.shape, result.shape))
        # JAX would promote the dtype, where NumPy writes into the array that there is.
        if not np.can_cast(result.dtype, self.dtype, "same_kind"):
            text = "Cannot cast ufunc {!r} output from {!r} to {!r} with casting rule 'same_kind'"
            raise TypeError(text.format(name, result.dtype, self.dtype))
        result = result.astype(self.dtype)  # an array that NumPy changes keeps its dtype
        _THREAD.watches[-1].replace(_Change(self, operator, frame))
        return _note_result(result, self, False)

    in_place.__name__ = f"__i{name}__"
    return in_place


def _noting_change(array: object, operand: object) -> Any:
    """An operator such as `__iadd__` of an argument that is not NumPy's: Python computes `a = a + x` then."""
    if _is_asked_by_user(sys._getframe(1)):
        _THREAD.watches[-1].has_changes = True
    return NotImplemented


def _noting(method: Callable[..., object]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noting(self: object, *args: object, **kwargs: object) -> Any:
        if _is_asked_by_user(sys._getframe(1)):
            _THREAD.watches[-1].has_changes = True
        return method(self, *args, **kwargs)

    return noting


def _refuse_use(array: object) -> Any:
    """The `aval` of a changed array: whatever uses a tracer reads that first.

    Raises:
        MutationError: a trace that runs has changed it.
    """
    # The trace around this one may have changed it.
    for watch in reversed(_THREAD.watches):
        for change in watch.changes:
            if change.array is array or watch.base(array) is change.array:
                raise MutationError(change.text(USED_AGAIN))
    return type(array).__bases__[1].aval.__get__(array)


# ---- arrays that are constants of a program


@contextmanager
def read_only(arrays: Iterable[np.ndarray]) -> Generator[None]:
    """While entered, writing to one of these arrays raises NumPy's own error, in the line that writes."""
    # The body runs once, in the trace: no later call would repeat the change.
    writable = [array for array in {id(array): array for array in arrays}.values() if array.flags.writeable]
    for array in writable:
        array.flags.writeable = False
    try:
        yield
    finally:
        for array in writable:
            array.flags.writeable = True
