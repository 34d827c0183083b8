# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for Python numbers in a trace: they compute on the host, and become inputs where they meet arrays."""

from __future__ import annotations

import dis
import enum
import functools
import gc
import math
import numbers
import operator
import os
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from graftax._capture.code_owner import is_users
from graftax._capture.numbers import ufuncs
from graftax._capture.numbers.host_program import HostProgram, as_jax, fits, is_long, item
from graftax._capture.numbers.left_symbols import put_in_place
from graftax._capture.traces_ahead import give_up, is_ahead
from graftax._graph.types.describe import Symbolic, register_symbol
from graftax._jax.arrays import weak_scalar
from graftax._jax.symbolic_numbers import (
    makes_seed,
    makes_source_info,
    only_checks_dtype,
    reads_exponent,
    register_symbols,
    tries_static_slice,
    wanted_dtype,
)
from graftax._jax.tracebacks import call_site

# The methods of `int` that do its arithmetic and comparisons.
_OF_INT = tuple(
    name
    for name, method in vars(int).items()
    if isinstance(method, types.WrapperDescriptorType) and name not in ("__repr__", "__hash__", "__getattribute__")
)
_BINARY_OP = dis.opmap["BINARY_OP"]
_ALIKE = frozenset({"shape", "ndim", "size", "itemsize", "nbytes"})  # equal for all NumPy scalars of a type
OF_INTEGERS = frozenset({"comb", "factorial", "gcd", "isqrt", "lcm", "perm"})  # of `math`
_OF_SCALARS: dict[Any, Any] = {np.shape: (), np.ndim: 0, np.size: 1}  # the same for every number


class SymbolTrace:
    """The symbolic numbers of one trace.

    Args:
        program: of the entry that is traced.
        values: the numbers of this call.
        vectors: by type, the tracer of its inputs.
        arrays: by type, the array that this call passes for that tracer when it runs. The trace fills it.
        reads: a ReadSet, which may give code that asks for a value a function that does not.
        assumed: which of the values no call has. A trace that asks for one ends: its program would serve that value
            alone, and the value may be the length of a large array, or of a loop.
    """

    def __init__(
        self,
        program: HostProgram,
        values: Sequence[int | float],
        vectors: dict[type, Any],
        arrays: dict[type, np.ndarray[Any, Any]] | None,
        reads: Any,
        assumed: frozenset[int],
    ) -> None:
        self.program, self._assumed = program, assumed
        self.is_open = True
        Symbolic.running += 1
        self._refused: set[int] = set()  # nodes that code has met which takes no symbol
        self.lacks: set[type] = set()  # types for which the executable has too few inputs
        self._vectors, self._arrays, self._reads = vectors, arrays, reads
        # Calls compute with the settings that are there when they begin, whatever the code sets meanwhile.
        self._errors, self._is_wide = np.geterr(), jax.config.jax_enable_x64  # when the trace began
        self._pinned: set[int] = set()  # nodes whose value was asked for
        self._alive: list[weakref.ref[Symbol]] = []
        self.roots = [self.symbol(i, value) for i, value in enumerate(values)]

    def symbol(self, node: int, value: object) -> Any:
        """A symbol for a node; the number itself if its value is fixed, or if the trace has ended."""
        if node in self._pinned or not self.is_open:
            return value
        symbol = _class_for(value)(self, node, value)
        # Weakly: what nothing holds when the trace ends needs no number in its place.
        self._alive.append(weakref.ref(symbol))
        return symbol

    def value(self, symbol: Symbol) -> Any:
        """The value of a symbol: from now on the entry serves calls with this value alone."""
        if self.is_open and symbol._node not in self._pinned:
            if self._assumed and not self._assumed.isdisjoint(self.program.numbers_in([symbol._node])):
                give_up()
            self._pinned.add(symbol._node)
            file, line = call_site()
            self.program.guard(symbol._node, "value", symbol._number, f"{os.path.basename(file)}:{line}")
        return symbol._number

    def value_for(self, symbol: Symbol, frame: types.FrameType) -> Any:
        """The value of a symbol for a function in C that this frame calls.

        Raises:
            NewReads: the code is to find a function that takes symbols, in the next trace.
        """
        if not self.is_pinned(symbol):
            self._reads.builtins.look_at_call(frame.f_code, frame.f_globals)
        return self.value(symbol)

    def look_at_sum(self, frame: types.FrameType) -> None:
        """Notes code that adds by `sum`, which adds floats more exactly than `+`: it is to find one for symbols."""
        # An instruction of the frame that is no `+` has called C code, which adds.
        code = frame.f_code
        in_c = self.is_open and "sum" in code.co_names and code.co_code[frame.f_lasti] != _BINARY_OP
        if in_c:
            self._reads.builtins.look_at_call(code, frame.f_globals)

    def refuse(self, symbol: Symbol) -> None:
        """Notes that code which takes no symbols has met one."""
        self._refused.add(symbol._node)

    def is_pinned(self, symbol: Symbol) -> bool:
        """Is it a plain number from here on?"""
        return not self.is_open or symbol._node in self._pinned

    def node(self, operand: Any) -> int:
        """The node of a symbol, or of a constant."""
        return operand._node if is_symbol(operand) else self.program.constant(operand)

    def array(self, symbol: Symbol) -> Any:
        """What an array meets: an input of the program, with the weak type of a Python number, or a scalar's dtype."""
        value: Any = symbol._number
        is_scalar = isinstance(value, np.generic)
        kind = int if isinstance(value, int | np.integer) else float
        # The same error as JAX's for an int. Of a NumPy scalar it would keep some of the bits, or make a float.
        if kind is int and not fits(int(value)):
            raise OverflowError(f"Python int {value} too large to convert to {_widest()}")
        # The code has changed JAX's setting: the inputs have the bits with which the call began.
        if self._is_wide is not jax.config.jax_enable_x64:
            return jax.numpy.asarray(self.value(symbol))
        if self.is_pinned(symbol):
            return jax.numpy.asarray(value)
        index = self.program.input(symbol._node, kind)
        # With too few inputs the trace goes on, with any of them, so that the next one knows how many it needs.
        if index >= len(self._vectors[kind]):
            self.lacks.add(kind)
            index = 0
        elif self._arrays is not None:
            self._arrays[kind][index] = value if kind is int else as_jax(float(value))
        if is_scalar:
            dtype: Any = jax.dtypes.canonicalize_dtype(value.dtype)
            return jax.lax.convert_element_type(jax.lax.index_in_dim(self._vectors[kind], index, keepdims=False), dtype)
        return weak_scalar(self._vectors[kind], index)

    def has_its_errors(self) -> bool:
        """Would a call compute with the settings of NumPy that the code has now (`np.errstate`)?"""
        return np.geterr() == self._errors

    def close(self) -> set[int]:
        """Ends a trace that becomes a program. What still holds a symbol gets its value, which is a guard.

        Returns:
            The numbers of the call for which something still holds a symbol.
        """
        if self._is_any_alive():
            gc.collect()  # symbols may be held by objects in cycles alone
        nodes = self._put_in_place() if self._is_any_alive() else []
        nodes_held = [node for ref, node in nodes if ref() is not None]
        self._alive = []
        self.end()
        return self.program.numbers_in(nodes_held)

    def end(self) -> None:
        """Ends a trace that begins anew, or has ended. Symbols that it has left somewhere become plain numbers."""
        if not self.is_open:
            return
        self.is_open = False
        Symbolic.running -= 1
        if self._is_any_alive():
            self._put_in_place()
        self._vectors, self._arrays, self._alive = {}, None, []

    def _is_any_alive(self) -> bool:
        return any(ref() is not None for ref in self._alive)

    def _put_in_place(self) -> list[tuple[weakref.ref[Symbol], int]]:
        """Replaces symbols by their numbers, wherever they are held. Returns the symbols, with their nodes."""
        symbols = [symbol for ref in self._alive if (symbol := ref()) is not None]
        nodes = [(weakref.ref(symbol), symbol._node) for symbol in symbols]
        put_in_place(symbols, list(map(self.value, symbols)))
        return nodes

    @property
    def refused(self) -> set[int]:
        """The numbers of the call that have met code which takes no symbols."""
        return self.program.numbers_in(self._refused)


def _widest() -> str:
    return "int64" if jax.config.jax_enable_x64 else "int32"


def is_symbol(value: object) -> bool:
    return type(value) in _SYMBOLS


def _operand(value: Any) -> Any:
    """What Python's arithmetic sees: a number, or a symbol that is not pinned. NotImplemented for anything else."""
    if is_symbol(value):
        return value._number if value._of_trace.is_pinned(value) else value
    is_plain = type(value) in (int, float, bool, ufuncs.Points) or ufuncs.is_scalar(value)
    if is_plain:
        return value
    return int(value) if _computes_as_int(type(value)) else NotImplemented


@functools.cache
def _computes_as_int(cls: type) -> bool:
    """Is it an `IntEnum` that computes as `int` does?"""
    return issubclass(cls, enum.IntEnum) and all(getattr(cls, name) is getattr(int, name) for name in _OF_INT)


def _plain(value: Any) -> Any:
    """The number behind a symbol, without a guard."""
    return value._number if is_symbol(value) else value


def operation(name: str, f: Callable[..., object], *values: object) -> Any:
    """An operation of numbers, one of them a symbol. NotImplemented where there is something else among them."""
    operands = [_operand(value) for value in values]
    if any(operand is NotImplemented for operand in operands):
        if all(isinstance(value, numbers.Number) for value in values):  # a Decimal, a member of an IntFlag
            return f(*map(_value_of, values))
        return NotImplemented
    symbols = [operand for operand in operands if is_symbol(operand)]
    plain = [_plain(operand) for operand in operands]
    if not symbols:
        return f(*plain)
    trace = symbols[0]._of_trace
    if is_ahead() and is_long(name, plain):
        give_up()
    try:
        value = f(*plain)
    except Exception:
        for symbol in symbols:  # for other values it may not raise
            trace.value(symbol)
        raise
    # A result of another type, or with other settings of NumPy than those of the call, cannot be a node.
    is_plain = type(value) in (int, float, bool)
    if not is_plain and not (ufuncs.is_scalar(value) and trace.has_its_errors()):
        return f(*map(_value_of, operands))
    # A truth decides what code does next, so it is a guard. A number is a symbol, if its type cannot be another one.
    node = trace.program.operation(name, *map(trace.node, operands))
    if type(value) is bool or type(value) is np.bool_:
        trace.program.guard(node, "is", value)
        return value
    if name == "**":  # an integer or not, by the sign of the exponent
        trace.program.guard(trace.program.operation("type", node), "is", type(value))
    elif not is_plain:
        trace.program.scalars.add(node)
        if ufuncs.type_may_change(plain, value):
            trace.program.guard(trace.program.operation("type", node), "is", type(value))
    return trace.symbol(node, value)


def _binary(name: str, reflected: bool = False) -> Callable[[Any, Any], Any]:
    f, _ = ufuncs.OPERATORS[name]

    def method(self: object, operand: object) -> Any:
        return operation(name, f, operand, self) if reflected else operation(name, f, self, operand)

    return method


def _unary(name: str, f: Callable[[Any], object]) -> Callable[[Any], Any]:
    def method(self: object) -> Any:
        return operation(name, f, self)

    return method


class Symbol:
    """A number of the caller's while a function is traced. For `isinstance` it is an `int` or a `float`.

    With numbers it computes on the host. Where it meets an array, it is an input of the program. Code that asks for its
    value gets it, which makes a guard of the entry.
    """

    __slots__ = ("__weakref__", "_node", "_number", "_of_trace")
    __array_priority__ = -1000  # arrays come first

    def __init__(self, trace: SymbolTrace, node: int, value: Any) -> None:
        self._of_trace, self._node, self._number = trace, node, value

    # ---- arithmetic on the host. `sys._getframe(1)` in a method is the frame that computes, or that calls C code

    __sub__, __rsub__ = _binary("-"), _binary("-", True)
    __mul__, __rmul__ = _binary("*"), _binary("*", True)
    __truediv__, __rtruediv__ = _binary("/"), _binary("/", True)
    __floordiv__, __rfloordiv__ = _binary("//"), _binary("//", True)
    __mod__, __rmod__ = _binary("%"), _binary("%", True)
    __lshift__, __rlshift__ = _binary("<<"), _binary("<<", True)
    __rshift__, __rrshift__ = _binary(">>"), _binary(">>", True)
    __and__, __rand__ = _binary("&"), _binary("&", True)
    __or__, __ror__ = _binary("|"), _binary("|", True)
    __xor__, __rxor__ = _binary("^"), _binary("^", True)
    __lt__, __le__, __gt__, __ge__ = _binary("<"), _binary("<="), _binary(">"), _binary(">=")
    __eq__, __ne__ = _binary("=="), _binary("!=")
    __neg__, __pos__ = _unary("neg", operator.neg), _unary("pos", operator.pos)
    __invert__, __abs__ = _unary("invert", operator.invert), _unary("abs", operator.abs)
    __floor__, __ceil__, __trunc__ = (_unary(f"math.{f.__name__}", f) for f in (math.floor, math.ceil, math.trunc))

    def __add__(self, operand: object) -> Any:
        self._of_trace.look_at_sum(sys._getframe(1))
        return operation("+", operator.add, self, operand)

    def __radd__(self, operand: object) -> Any:
        self._of_trace.look_at_sum(sys._getframe(1))
        return operation("+", operator.add, operand, self)

    def __pow__(self, exponent: object, modulus: object = None) -> Any:
        if modulus is not None:
            return operation("pow", pow, self, exponent, modulus)
        return operation("**", operator.pow, self, exponent)

    def __rpow__(self, base: object, modulus: object = None) -> Any:
        if modulus is not None:
            return operation("pow", pow, base, self, modulus)
        if _operand(base) is not NotImplemented:
            return operation("**", operator.pow, base, self)
        return base ** self._guarded_value()  # an array: JAX makes another program for each exponent

    def __divmod__(self, divisor: object) -> Any:
        # Two operations, since a node of the host's program has one value.
        quotient, remainder = self // divisor, self % divisor
        return NotImplemented if quotient is NotImplemented else (quotient, remainder)

    def __rdivmod__(self, dividend: object) -> Any:
        return dividend // self, dividend % self

    def __round__(self, digits: object = None) -> Any:
        if digits is None:
            return operation("round", round, self)
        return operation("round", round, self, digits)

    def __bool__(self) -> bool:
        return not operation("not", operator.not_, self)

    # ---- what asks for the value

    def _guarded_value(self) -> Any:
        """The value, which makes a guard of the entry."""
        return self._of_trace.value(self)

    pinned = _guarded_value  # what the core calls it

    def refuse(self) -> None:
        """Code that takes no symbols has met this one. The call begins anew, with a plain number.

        Raises:
            TypeError: so that this code does not go on.
        """
        self._of_trace.refuse(self)
        raise TypeError("a number that may be another one in the next call")

    def __hash__(self) -> int:
        # `random.seed` takes the bits of an int. Of what is no subclass of int, it would take the hash.
        if type(self._number) is int and sys._getframe(1).f_globals.get("__name__") == "random":
            raise TypeError("a seed is its bits where it is an int, and its hash where it only says so")
        return hash(self._guarded_value())

    def __int__(self) -> int:
        return int(self._of_trace.value_for(self, sys._getframe(1)))

    def __float__(self) -> float:
        return float(self._of_trace.value_for(self, sys._getframe(1)))

    def __str__(self) -> str:
        return str(self._shown())

    def __repr__(self) -> str:
        return repr(self._shown())

    def __format__(self, spec: str) -> str:
        return format(self._shown(), spec)

    def _shown(self) -> Any:
        """The value for a text. JAX makes texts of callable objects, such as modules, that it does not use."""
        return self._number if makes_source_info(sys._getframe(2)) else self._guarded_value()

    def __reduce__(self) -> Any:
        value = self._guarded_value()
        # A pickle is read in another process, or after the trace: it gets the number.
        return (type(value), (value,))

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: object) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        is_whole = isinstance(self._number, int | np.integer)
        # JAX asks for this what stands for a number in its own traces.
        if name == "dimension_as_value" and is_whole and not is_users(sys._getframe(1).f_code.co_filename):
            return functools.partial(_as_array, self)
        # Asking for an attribute that no number has tells nothing of the value, so it makes no guard.
        if not hasattr(type(self._number), name):
            raise AttributeError(
                f"{type(self._number).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )
        return getattr(self._guarded_value(), name)

    # ---- with arrays

    def __jax_array__(self) -> Any:
        is_whole, frame = isinstance(self._number, int | np.integer), sys._getframe(1)
        if is_whole and reads_exponent(frame):
            return self._guarded_value()
        dtype_request = wanted_dtype(frame)
        return self._of_trace.array(self) if dtype_request is None else _of_dtype(self, *dtype_request)

    def __array__(self, dtype: Any = None, copy: object = None) -> np.ndarray[Any, Any]:
        # JAX checks whether a dtype can hold the number: that is a guard of its range, not of its value.
        if dtype is not None and only_checks_dtype(sys._getframe(1)):
            if np.issubdtype(dtype, np.integer):
                _is_within(math.trunc(self), dtype)
            return np.asarray(self._number, dtype)
        return np.asarray(self._of_trace.value_for(self, sys._getframe(1)), dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        name = ufuncs.name_of_ufunc(ufunc, method, options, sys._getframe(1))
        if name is not None:
            f, _ = ufuncs.OPERATORS.get(name, (ufunc, ufunc))
            result = operation(name, f, *inputs)
            if result is not NotImplemented:
                return result
        return getattr(ufunc, method)(*map(_value_of, inputs), **{k: _value_of(v) for k, v in options.items()})

    def __array_function__(self, f: Any, types: object, args: Any, kwargs: Any) -> Any:
        if f in _OF_SCALARS and len(args) == 1 and args[0] is self and not kwargs:
            return _OF_SCALARS[f]
        if (name := ufuncs.name_of_function(f, kwargs)) is not None:
            result = operation(name, f, *map(ufuncs.as_points, args))
            if result is not NotImplemented:
                return result
        return f(*jax.tree.map(_value_of, args), **jax.tree.map(_value_of, kwargs))


def _is_within(integer: Any, dtype: object) -> bool:
    """Can this dtype hold the integer? Each comparison is a guard."""
    limits = jax.numpy.iinfo(dtype)
    return int(limits.min) <= integer <= int(limits.max)


def _of_dtype(symbol: Any, dtype: Any, int_has_to_fit: bool, scalar_has_to_fit: bool) -> Any:
    """What JAX gets in place of a symbol to make an array of this dtype."""
    # The host converts, where JAX would round twice: the inputs have 32 bits, a float on the host has 64.
    value, trace = symbol._number, symbol._of_trace
    is_float = isinstance(value, float | np.floating)
    # A comparison has a guard of its outcome, not of the value.
    if dtype.kind == "b":
        return symbol != 0
    if jax.numpy.issubdtype(dtype, np.integer):
        if not is_float and not (scalar_has_to_fit if isinstance(value, np.generic) else int_has_to_fit):
            return trace.array(symbol)
        if is_float and not math.isfinite(value):
            return trace.value(symbol)
        integer: Any = operation("int", int, symbol)
        return trace.array(integer) if _is_within(integer, dtype) and fits(_plain(integer)) else trace.value(symbol)
    if not is_float or dtype.itemsize >= 4 or dtype == jax.numpy.bfloat16:  # which JAX makes of 32 bits itself
        return trace.array(symbol)
    return trace.array(operation("np.float16", np.float16, symbol)) if dtype == np.float16 else trace.value(symbol)


def _value_of(value: Any) -> Any:
    """The value of a symbol, which makes a guard; anything else as it is."""
    return value._of_trace.value(value) if is_symbol(value) else value


class IntSymbol(Symbol):
    """A symbolic `int`."""

    __slots__ = ()

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return IntSymbol if makes_seed(sys._getframe(1)) else int

    def __index__(self) -> int:
        frame = sys._getframe(1)
        # JAX tries a static slice first. After this error it makes a dynamic one, for which the index is an input.
        if not self._of_trace.is_pinned(self) and tries_static_slice(frame):
            raise TypeError("an index that may be another one in the next call")
        # Functions such as `math.comb` ask for the index, too: in the next trace, the code finds one for symbols.
        if OF_INTEGERS.isdisjoint(frame.f_code.co_names):
            return self._guarded_value()
        return self._of_trace.value_for(self, frame)


class FloatSymbol(Symbol):
    """A symbolic `float`."""

    __slots__ = ()

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return float


class ScalarSymbol(Symbol):
    """A symbolic NumPy scalar: what NumPy has made of a symbolic number."""

    __slots__ = ()

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self._number)

    @property
    def dtype(self) -> Any:
        return self._number.dtype

    def item(self, *index: object) -> Any:
        return self._guarded_value().item(*index) if index else operation("item", item, self)

    def astype(self, dtype: Any, **options: object) -> Any:
        cls = np.dtype(dtype).type
        if options or not issubclass(cls, np.floating):
            return self._guarded_value().astype(dtype, **options)
        return operation(f"np.{cls.__name__}", cls, self)

    def __getattr__(self, name: str) -> Any:
        if name in _ALIKE:
            return getattr(self._number, name)
        if name in ("__array_interface__", "__array_struct__"):  # NumPy asks for these before it asks `__array__`
            raise AttributeError(name)
        return super().__getattr__(name)


register_symbol(ScalarSymbol, "scalar symbol")
register_symbol(Symbol, "symbol")


class IntScalarSymbol(ScalarSymbol):
    """A symbolic NumPy integer."""

    __slots__ = ()

    def __index__(self) -> int:
        return int(self._guarded_value())


IntSymbol.__name__, FloatSymbol.__name__ = "int", "float"  # messages of Python name the class of an operand

_SYMBOLS = frozenset({IntSymbol, FloatSymbol, ScalarSymbol, IntScalarSymbol})
NUMBERS = (bool, int, float, complex, IntSymbol, FloatSymbol)  # types of what is a number, in a trace too


def _as_array(symbol: Symbol) -> Any:
    return symbol._of_trace.array(symbol)


def _class_for(value: object) -> type[Symbol]:
    if isinstance(value, np.generic):
        return IntScalarSymbol if isinstance(value, np.integer) else ScalarSymbol
    return IntSymbol if type(value) is int else FloatSymbol


register_symbols({IntSymbol: int, FloatSymbol: float}, (ScalarSymbol, IntScalarSymbol), _as_array)
