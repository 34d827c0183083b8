# SPDX-License-Identifier: Apache-2.0
"""How JAX is told of symbolic numbers, and which of its frames ask one for its value."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import core as _jax_core
from jax._src import dtypes as _dtypes

from graftax._jax.missing_names import lacking

_FOLDER = str(Path(jax.__file__).parent)


def register_symbols(classes: dict[type, type], scalars: tuple[type, ...], array: Callable[[Any], jax.Array]) -> None:
    """Registers classes of symbolic numbers with JAX, as Python numbers (`classes`) or NumPy scalars (`scalars`).

    `array(symbol)` gives the array of one. `jax.export` registers symbolic dimensions so; there is no public way.
    """
    needed = ("canonicalize_value_handlers", "python_scalar_types", "python_scalar_types_to_dtypes")
    names_needed = [
        (_jax_core, "pytype_aval_mappings"),
        *((_dtypes, n) for n in (*needed, "register_weak_scalar_type")),
    ]
    if missing := [f"{module.__name__}.{name}" for module, name in names_needed if not hasattr(module, name)]:
        lacking["symbolic numbers"] = ", ".join(missing)
        return
    for cls, number_type in classes.items():
        _jax_core.pytype_aval_mappings[cls] = functools.partial(_aval_of_number, number_type)
        _dtypes.canonicalize_value_handlers[cls] = array
        _dtypes.python_scalar_types.add(cls)
        _dtypes.python_scalar_types_to_dtypes[cls] = _dtypes.python_scalar_types_to_dtypes[number_type]
        _dtypes.register_weak_scalar_type(cls)
    for cls in scalars:
        _jax_core.pytype_aval_mappings[cls] = lambda symbol: jax.typeof(symbol.dtype.type())
        _dtypes.canonicalize_value_handlers[cls] = array


def lacks_symbols() -> bool:
    """Does this JAX lack a private name that `register_symbols` needs?"""
    return "symbolic numbers" in lacking


def _aval_of_number(number_type: type, symbol: Any) -> Any:
    return _jax_core.pytype_aval_mappings[number_type](number_type())


def reads_exponent(frame: types.FrameType) -> bool:
    """Does this frame of JAX read the value of an exponent? Each integer exponent is another program."""
    return frame.f_code.co_name in ("power", "_operator_pow") and _is_of_jax(frame)


def only_checks_dtype(frame: types.FrameType | None) -> bool:
    """Does this frame of JAX convert a Python number only to check whether it fits a dtype?"""
    for name in ("coerce_to_array", "array"):
        if frame is None or frame.f_code.co_name != name or not _is_of_jax(frame):
            return False
        frame = frame.f_back
    return True


def wanted_dtype(frame: types.FrameType) -> tuple[Any, bool, bool] | None:
    """Where this frame of JAX makes an array of a number: the dtype, whether an int has to fit it, and whether an
    integer of NumPy does, as in a list, of which NumPy makes the array."""
    in_list = frame.f_code.co_name == "<listcomp>" and frame.f_back is not None
    frame = frame.f_back if in_list and frame.f_back is not None else frame
    name = {"_convert_element_type": "new_dtype", "array": "dtype"}.get(frame.f_code.co_name)
    dtype: Any = frame.f_locals.get(name) if name is not None and _is_of_jax(frame) else None
    if not isinstance(dtype, np.dtype):
        return None
    return dtype, name == "dtype", name == "dtype" and isinstance(frame.f_locals.get("object"), list | tuple)


def makes_seed(frame: types.FrameType) -> bool:
    """Does this frame of JAX make the seed of a PRNG key?"""
    return frame.f_code.co_name == "random_seed" and _is_of_jax(frame)


def tries_static_slice(frame: types.FrameType) -> bool:
    """Does this frame of JAX read an index only to see whether it is static? It also supports indices that are not."""
    of_slice = frame.f_back is not None and frame.f_back.f_code.co_name == "to_static_slice"
    return of_slice and frame.f_code.co_name == "validate_static_indices" and _is_of_jax(frame)


def makes_source_info(frame: types.FrameType | None) -> bool:
    """Does JAX ask for a text below which this frame runs, only to see whether it is that of a builtin function?"""
    while frame is not None:
        if frame.f_code.co_name == "fun_sourceinfo" and _is_of_jax(frame):
            return True
        frame = frame.f_back
    return False


def _is_of_jax(frame: types.FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_FOLDER)
