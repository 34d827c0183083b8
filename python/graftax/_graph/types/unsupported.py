# SPDX-License-Identifier: Apache-2.0
"""Unsupported values: those whose state a compiled program can neither see nor replay, and what to pass instead."""

from __future__ import annotations

import contextvars
import ctypes
import decimal
import io
import operator
import queue
import random
import re
import struct
import types

import numpy as np

_HIDDEN_STATE = "it hides state that a compiled program cannot replay. "
_SHARED = "it shows memory that others may change. "
_KEY = _HIDDEN_STATE + "Use jax.random with an explicit key."
_STREAM = _HIDDEN_STATE + "Read the data first and pass that."
ITERATOR = _HIDDEN_STATE + "Turn it into a list first."
# The bases of all ctypes values and of all its functions, which have no public names.
_CData: type = ctypes.Structure.__base__  # type: ignore[assignment]
_CFuncPtr: type = ctypes.CFUNCTYPE(None).__base__  # type: ignore[assignment]

_REFUSED: tuple[tuple[tuple[type, ...], str], ...] = (
    ((random.Random,), _KEY),
    ((np.random.Generator, np.random.RandomState, np.random.BitGenerator, np.random.SeedSequence), _KEY),
    ((io.IOBase,), _STREAM),
    ((types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType), ITERATOR),
    ((memoryview,), _SHARED + "Pass bytes(...) or numpy.asarray(...) of it."),
    ((np.matrix,), "inside a compiled program its operators would be those of an array. Use numpy.asarray."),
    ((np.ma.MaskedArray,), "jax.numpy ignores the mask. Pass the data and the mask as two arrays."),
    ((contextvars.Context,), _HIDDEN_STATE + "Pass the values that are set in it."),
    ((decimal.Context,), _HIDDEN_STATE + "Pass its settings, such as prec."),
    ((queue.Queue, queue.SimpleQueue), _HIDDEN_STATE + "Pass a list or a collections.deque."),
)
_C_DATA = _SHARED + "Pass its value, or numpy.ctypeslib.as_array(...) of it."
IN_C = (
    "it is implemented in C, so graftax cannot see when its state changes. Pass what the function needs "
    "from it. If it never changes, say so once with graftax.register_static(type(...))."
)
_TABLE = "a compiled program cannot follow what is done to a table. Pass its columns as arrays: t['x'].to_numpy()."

# (package, class name) of classes that are not imported here.
_REFUSED_BY_NAME = {
    ("pandas", "NDFrame"): _TABLE,
    ("pandas", "Index"): _TABLE,
    ("pandas", "ExtensionArray"): _TABLE,
    ("polars", "DataFrame"): _TABLE,
    ("polars", "LazyFrame"): _TABLE,
    ("polars", "Series"): _TABLE,
    ("multiprocessing", "_ConnectionBase"): _STREAM,
}


# Extension types without `==` whose instances have no state that changes, or are functions or locks.
_STATELESS = (
    re.Match,
    struct.Struct,
    operator.itemgetter,
    operator.attrgetter,
    operator.methodcaller,
    types.TracebackType,
    _CFuncPtr,
)
_STATELESS_NAMES = {
    ("builtins", "PyCapsule"),
    ("builtins", "fortran"),  # a function that f2py made
    ("typing", "TypeAliasType"),
    ("_multiprocessing", "SemLock"),
}
_STATELESS_PACKAGES = ("graftax", "jax", "jaxlib", "nanobind")  # nanobind's own types are functions


def why_refused(obj: object) -> str:
    """Why a value is refused by its type; empty where it is not."""
    if isinstance(obj, _CData):
        return "" if isinstance(obj, _CFuncPtr) else _C_DATA
    reasons_by_name = (_REFUSED_BY_NAME.get((_package(base), base.__name__), "") for base in type(obj).__mro__)
    reasons = (reason for classes, reason in _REFUSED if isinstance(obj, classes))
    return next(reasons, "") or next(filter(None, reasons_by_name), "")


def hides_state(obj: object, solid: type) -> bool:
    """May an object that is neither a node nor compared by value keep state in C?

    Functions, descriptors, types known to be stateless, and objects without memory of their own do not.
    """
    size = solid.__basicsize__ - object.__basicsize__ or solid.__itemsize__ or solid.__dictoffset__
    stateless = isinstance(obj, _STATELESS) or (solid.__module__, solid.__name__) in _STATELESS_NAMES
    stateless = stateless or _package(solid) in _STATELESS_PACKAGES
    is_function = callable(obj) and any("__name__" in vars(base) for base in solid.__mro__)
    return bool(size) and not (stateless or is_function or hasattr(solid, "__get__"))


def _package(cls: type) -> str:
    return str(cls.__module__).partition(".")[0]
