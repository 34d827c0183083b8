# SPDX-License-Identifier: Apache-2.0
"""What code of a trace with symbols finds under the names of Python's own functions of numbers.

`float(x)`, `int(x)` and `math.cos(x)` ask a number for its value, in C; `type(x)` looks at its class. During a trace
with symbols, the globals of code that calls them on a symbol lead to these, which keep it a symbol.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Set
from typing import Any

import numpy as np

from graftax._capture.numbers.host_program import total
from graftax._capture.numbers.symbols import OF_INTEGERS, is_symbol, operation

_FUNCTIONS = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "copysign", "cos", "cosh", "degrees"),
    *("erf", "erfc", "exp", "exp2", "expm1", "fabs", "floor", "fmod", "gamma", "hypot", "isfinite", "isinf", "isnan"),
    *("ldexp", "lgamma", "log", "log10", "log1p", "log2", "pow", "radians", "remainder", "sin", "sinh", "sqrt", "tan"),
    *("nextafter", "tanh", "trunc", "ulp", *OF_INTEGERS),
)


def _on_symbols(name: str, f: Callable[..., object]) -> Callable[..., Any]:
    """The function `f` for symbols, too. `name` is what a HostProgram calls it."""

    def function(*args: object, **kwargs: object) -> Any:
        if kwargs or not any(map(is_symbol, args)):
            return f(*args, **kwargs)
        # An array or an object of the user's beside a symbol: the function itself decides, and asks for the value.
        result = operation(name, f, *args)
        return f(*args) if result is NotImplemented else result

    function.__name__ = function.__qualname__ = f.__name__
    function.__doc__ = f.__doc__
    return function


class _ClassStandIn:
    """Stands for a builtin class, which answers all that it is asked except a call."""

    def __init__(self, cls: object, call: Callable[..., object]) -> None:
        self.__dict__.update({"_cls": cls, "_call": call})

    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        return self._call(*args, **kwargs)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._cls)

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self._cls)

    # `class Rate(float)` makes a subclass of the class itself.
    def __mro_entries__(self, bases: object) -> tuple[Any, ...]:
        return (self._cls,)

    def __getattr__(self, name: str) -> Any:
        if name == "dtype" and self._cls is not type:  # NumPy reads it, where a class is given as a dtype
            return np.dtype(self._cls)
        return getattr(self._cls, name)

    def __getitem__(self, item: object) -> Any:
        return self._cls[item]

    # For annotations that are evaluated under the trace, such as `int | None`.
    def __or__(self, operand: object) -> Any:
        return self._cls | operand

    def __ror__(self, operand: object) -> Any:
        return operand | self._cls

    # Code compares classes (`kind == int`), and has them as keys of dicts.
    def __eq__(self, value: object) -> bool:
        return value is self or value is self._cls

    def __hash__(self) -> int:
        return hash(self._cls)

    def __repr__(self) -> str:
        return repr(self._cls)


class _ModuleStandIn(types.ModuleType):
    """A module for symbols, with these names in it. What it does not have comes from the module itself."""

    def __init__(self, module: types.ModuleType, names: dict[str, Any]) -> None:
        super().__init__(module.__name__, module.__doc__)
        vars(self).update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _class_of(*args: object, **kwargs: object) -> Any:
    """`type`, for which the class of a symbol is that of its number."""
    return args[0].__class__ if len(args) == 1 and is_symbol(args[0]) and not kwargs else type(*args, **kwargs)


def power(base: Any, exp: Any, mod: Any = None) -> Any:
    """`pow`, which with three operands asks only the first one for its method, and a symbol may be another."""
    if mod is None or not any(map(is_symbol, (base, exp, mod))):
        return pow(base, exp, mod)
    result = operation("pow", pow, base, exp, mod)
    return pow(base, exp, mod) if result is NotImplemented else result


def _sum(iterable: Iterable[Any], /, start: Any = 0) -> Any:
    """`sum`, which asks symbols for their values in C."""
    items = [start, *iterable]
    if not any(map(is_symbol, items)):
        return sum(items[1:], start)
    # As `sum` does it: numbers up to the first item that is none are added exactly, the others by `+`.
    is_number = [is_symbol(item) or type(item) in (int, float, bool) for item in items]
    count = is_number.index(False) if False in is_number else len(items)
    result = operation("total", total, *items[:count]) if count else items[0]
    for item in items[max(count, 1) :]:
        result = result + item
    return result


_IN_MATH = {name: _on_symbols(f"math.{name}", getattr(math, name)) for name in _FUNCTIONS if hasattr(math, name)}
TYPE = _ClassStandIn(type, _class_of)
_BUILTINS: dict[str, Any] = {cls.__name__: _ClassStandIn(cls, _on_symbols(cls.__name__, cls)) for cls in (float, int)}
_BUILTINS["sum"] = _sum
_BITS = {"float": (16, 32, 64), "int": (8, 16, 32, 64), "uint": (8, 16, 32, 64)}
SCALAR_TYPES = frozenset(f"{kind}{width}" for kind, widths in _BITS.items() for width in widths)
_SCALARS: dict[str, Any] = {
    name: _ClassStandIn(getattr(np, name), _on_symbols(f"np.{name}", getattr(np, name))) for name in SCALAR_TYPES
}
OF_NUMBERS: dict[int, Any] = {id(getattr(math, name)): f for name, f in _IN_MATH.items()}
OF_NUMBERS[id(math)] = _ModuleStandIn(math, _IN_MATH)


def stand_ins(scope: dict[str, Any], builtins: Set[str], passed: Set[str]) -> dict[str, Any]:
    """What replaces `math`, its functions, `numpy` and these of the builtins `float`, `int` and `sum` in globals.

    Args:
        passed: what code passes on instead of calling it: globals, and attributes of `numpy`. These are not replaced.
    """
    replacements = {name: OF_NUMBERS[id(value)] for name, value in scope.items() if id(value) in OF_NUMBERS}
    replacements.update({name: _BUILTINS[name] for name in builtins & _BUILTINS.keys() - passed if name not in scope})
    # Where code passes on the module itself, or all of its classes of scalars, it sees NumPy's own.
    of_numpy = [name for name, value in scope.items() if value is np]
    if of_numpy and passed.isdisjoint(of_numpy) and not passed >= SCALAR_TYPES:
        scalar_types = {name: stand_in for name, stand_in in _SCALARS.items() if name not in passed}
        replacements.update(dict.fromkeys(of_numpy, _ModuleStandIn(np, scalar_types)))
    return replacements
