# SPDX-License-Identifier: Apache-2.0
"""Errors of JAX that have no class of their own: they are recognised by their text, which may change in any version."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.interpreters import ad as _ad
from jax.sharding import AxisType

# Raised for values that a custom_vjp captures.
ClosedOver: type[Exception] = getattr(_ad, "CustomVJPException", Exception)


def _is_not_equinox_error(record: logging.LogRecord) -> bool:
    """A log filter that drops Equinox's runtime errors, because the call raises them anyway."""
    raised: Any = record.exc_info[1] if record.exc_info else None
    return type(raised).__name__ != "_EquinoxRuntimeError"


def silence_callback_logging() -> None:
    logging.getLogger("jax._src.callback").addFilter(_is_not_equinox_error)


DONATION_UNUSED = "Some donated buffers were not usable"  # how the warning begins


def is_concretization_error(error: BaseException) -> bool:
    """Is it a concretization error, or another error of tracing? Its message names flat arguments."""
    if isinstance(error, IndexError) and "Slice entries must be static integers" in str(error):  # JAX before 0.11
        return True
    return isinstance(error, jax.errors.JAXTypeError) or "The error occurred while tracing the function" in str(error)


def asks_for_a_value(error: BaseException) -> bool:
    """Was it raised because a tracer has no value: where one was to be an index, a parameter, a key, or a text?"""
    if not isinstance(error, TypeError | ValueError | IndexError):  # the text may be made by the user's code
        return False
    if is_concretization_error(error) or isinstance(error, jax.errors.NonConcreteBooleanIndexError):
        return True
    return isinstance(error, TypeError) and re.search(r"\b[A-Za-z]*Tracer\b", str(error)) is not None


def is_placement_error(error: BaseException) -> bool:
    """Is it an error about the devices or the sharding of a flat argument?"""
    return isinstance(error, ValueError) and bool(re.search(r"(key path|Got argument) leaves\[", str(error)))


def is_mismatched_leaf(error: BaseException, leaf: Any) -> bool:
    """Can this leaf be the argument that a sharding error is about?"""
    ending = f"arg sharding: {getattr(leaf, 'sharding', None)} for arg type: {jax.typeof(leaf).str_short()}"
    return str(error).endswith(ending)


def refused_class(error: BaseException) -> str | None:
    """The class of the object in an error of a JAX transform that does not accept it; None for other errors."""
    if not isinstance(error, TypeError):
        return None
    text = str(error)
    if "is not a valid JAX type" not in text and "as an abstract array" not in text:
        return None
    match = re.search(r"of type '?<class '([\w.<>]+)'>", text)
    return match[1] if match else None


def is_of_explicit_axes(error: BaseException, leaves: Sequence[Any]) -> bool:
    """Is it an error about a sharding that JAX does not infer, because an axis of the mesh is Explicit?"""
    name = type(error).__name__
    if name == "ShardingTypeError":
        return True
    if name != "DuplicateSpecError" and "should be replicated" not in str(error):  # of the xs of a scan or map
        return False
    meshes = [getattr(getattr(jax.typeof(leaf), "sharding", None), "mesh", None) for leaf in leaves]
    return any(AxisType.Explicit in (getattr(mesh, "axis_types", None) or ()) for mesh in meshes)


def _has_text(text: str, *kinds: type[BaseException]) -> Callable[[BaseException], bool]:
    return lambda error: isinstance(error, kinds or BaseException) and text in str(error)


is_format_of_tracer = _has_text("Tracer.__format__", TypeError)

is_item_assignment = _has_text("in-place item assignment", TypeError)

is_traced_shape = _has_text("Shapes must be 1D sequences of concrete values", TypeError)

is_deleted_array_error = _has_text("delete", RuntimeError, ValueError)

is_out_of_memory = _has_text("ut of memory", RuntimeError)  # of a device; its code differs between backends

is_of_a_timeout = _has_text("DEADLINE_EXCEEDED")

is_of_refused_arguments = _has_text("INVALID_ARGUMENT")  # by an executable, so that nothing has run

is_of_reverse_loop = _has_text("Reverse-mode differentiation does not work for lax.while_loop")

is_of_differentiated_callback = _has_text("callbacks do not support JVP")

is_of_exported_callback = _has_text("callback")

# The symbolic zeros of a derivative rule in a `shard_map` that is not compiled.
is_of_symbolic_zeros = _has_text("symbolic_zeros support with shard_map")

# A spec of `shard_map`, and the sharding of its argument.
is_of_specs = _has_text("does not match the specs of the input")

# An argument does not have the sharding in `in_shardings`: the message has the sharding and the type.
is_sharding_mismatch = _has_text("does not match the sharding on the respective arg", ValueError)

is_output_error = _has_text("key path result[", ValueError)


def name_argument_of_specs(error: ValueError, path: str) -> None:
    error.args = (str(error).replace("for arg:", f"for {path}:"),)
