# SPDX-License-Identifier: Apache-2.0
"""Errors of JAX in traced code say more: the key paths of the operands, and what to write instead."""

from __future__ import annotations

import inspect
import itertools
import re
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax.core

from graftax._base.errors import GraftaxError, some
from graftax._jax.error_texts import (
    is_concretization_error,
    is_format_of_tracer,
    is_item_assignment,
    is_of_explicit_axes,
    is_traced_shape,
    refused_class,
)
from graftax._jax.tracebacks import FULL, HIDDEN_FOLDERS

OPERANDS = "Of its operands, {operands}."
NOT_OPENED_BY_TRANSFORM = (
    "JAX's own transforms do not accept objects of type {cls}, and graftax's do: "
    "call graftax.{name} instead of {theirs}."
)
NOT_OPENED_BY_FUNCTION = (
    "JAX's functions do not accept objects of type {cls}: pass an array, or write graftax.map_leaves(function, obj), "
    "which calls the function for each array in an object."
)
NOT_OPENED_BY_TREE_MAP = (
    "To jax.tree.map, an object of type {cls} is a single leaf. Write graftax.map_leaves(function, obj, *others), "
    "which calls the function for each array in the object."
)
SHAPE_OF_TRACED_VALUE = (
    "The shape of an array has to be known when the function is traced, and this one depends on a traced value: "
    "compute it from Python numbers or from the shapes of other arrays."
)
TEXT_OF_TRACED_VALUE = (
    "A traced value cannot be formatted, because it is not computed yet: print it with "
    "jax.debug.print('{x:.3f}', x=x), or return it and format it after the call."
)
WRITTEN_IN_PLACE = (
    "Inside the call NumPy arrays are JAX arrays, too. Assign the new array to the attribute, item or global that "
    "holds it, as in `model.w = model.w.at[i].set(x)`: the caller's object has it after the call. If the array is "
    "itself an argument, return the new one."
)
OF_EXPLICIT_AXES = (
    "The mesh has Explicit axes, so JAX does not choose the sharding of this result itself. Make the mesh with "
    "jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names)), which is what graftax.fsdp "
    "expects, or give the operation an out_sharding= where it takes one."
)
# By the name of the class alone: subclasses have remedies of their own.
REMEDIES = {
    "TracerBoolConversionError": (
        "To branch on a traced value, call graftax.cond(condition, if_true, if_false, *operands); to choose between "
        "elements, jnp.where(condition, a, b)."
    ),
    "TracerArrayConversionError": (
        "NumPy cannot compute with a traced array: call the function of jax.numpy instead, or run the NumPy code with "
        "graftax.pure_callback."
    ),
    "TracerIntegerConversionError": (
        "A traced value is not a Python integer: loop with graftax.fori_loop or graftax.scan, index with a jax.Array "
        "in place of a list, or pass a Python int."
    ),
    "NonConcreteBooleanIndexError": (
        "The shape of the result would depend on the values of the mask: keep the shape with jnp.where(mask, x, "
        "other), or give it a fixed size with jnp.nonzero(mask, size=n, fill_value=i)."
    ),
    "ConcretizationTypeError": (
        "A traced value is not a Python number yet: compute with the array itself and read it after the call, print "
        "it with jax.debug.print, or pass a Python number in its place."
    ),
}

_ARGUMENTS = re.compile(r"(?<=depends on the values of the arguments )(.+?)(?=\.(\n|$))")
_MAX_ARGUMENTS = 10  # how many arguments an error lists
_BOUNDARY = "reraise_with_filtered_traceback"  # JAX's own wrapper of public functions
_OWN_TRANSFORMS = frozenset(
    ["associative_scan", "checkpoint", "cond", "eval_shape", "fori_loop", "grad", "hessian", "jacfwd", "jacrev", "jit"]
    + ["jvp", "linearize", "make_jaxpr", "map", "scan", "shard_map", "switch", "value_and_grad", "vjp", "vmap"]
    + ["while_loop"]
)
_MAX_OPERANDS = 4  # how many operands an error names
_WRITING_METHODS = {"byteswap", "fill", "itemset", "partition", "put", "resize", "setfield"}  # of numpy.ndarray alone


def clarify(error: BaseException, leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> None:
    """Adds notes to an error of a JAX function: the key paths of operands, and what to write instead.

    `leaves` are the tracers of the trace, and `names` gives their key paths.
    """
    if FULL or isinstance(error, GraftaxError) or getattr(error, "_has_notes", False):
        return
    # Such an error names the arguments itself, which may be hundreds; any other says nothing of its operands.
    is_concretization = is_concretization_error(error)
    if is_concretization:
        _shorten_arguments(error, names)
    operands = "" if is_concretization else _operands_text(error, leaves, names)
    notes = [note for note in (operands, _remedy(error, leaves)) if note]
    for note in notes:
        error.add_note(note)
    if notes:
        error._has_notes = True  # type: ignore[attr-defined]  # nested transforms: the inner one adds the notes


def _shorten_arguments(error: BaseException, names: Callable[[], Sequence[str]]) -> None:
    match = _ARGUMENTS.search(str(error))
    if match is None or any(", " in path for path in names()):  # such a path cannot be told from two
        return
    # JAX joins the paths as an English list.
    paths = match[0].replace(", and ", ", ").split(", ")
    if len(paths) > _MAX_ARGUMENTS:
        text = error.args[0]
        error.args = (text[: match.start()] + some(paths, _MAX_ARGUMENTS) + text[match.end() :], *error.args[1:])


def _remedy(error: BaseException, leaves: Sequence[Any]) -> str:
    refused = refused_class(error)
    if refused is not None:
        return _unopened_text(error, refused.rpartition(".")[2])
    if is_format_of_tracer(error):
        return TEXT_OF_TRACED_VALUE
    if is_traced_shape(error):
        return SHAPE_OF_TRACED_VALUE
    mapped = _mapped_leaf(error)
    if mapped is not None:
        return NOT_OPENED_BY_TREE_MAP.format(cls=type(mapped).__qualname__)
    is_of_tracer = isinstance(error, AttributeError) and isinstance(error.obj, jax.core.Tracer)
    if is_item_assignment(error) or (is_of_tracer and getattr(error, "name", None) in _WRITING_METHODS):
        return WRITTEN_IN_PLACE
    if is_of_explicit_axes(error, leaves):
        return OF_EXPLICIT_AXES
    return REMEDIES.get(type(error).__name__, "") if type(error).__module__.partition(".")[0] == "jax" else ""


def _unopened_text(error: BaseException, cls: str) -> str:
    names = (frame.f_code.co_qualname for frame in _frames_of_jax(error) if frame.f_code.co_name != _BOUNDARY)
    name = next(names, "").partition(".")[0]  # of vmap.<locals>.vmap_f, for instance
    # The function that `jax.jit` returns is a local one of `_cpp_pjit`.
    name = "jit" if name == "_cpp_pjit" else name
    if name not in _OWN_TRANSFORMS:
        return NOT_OPENED_BY_FUNCTION.format(cls=cls)
    module = "jax" if hasattr(jax, name) else "jax.lax"
    return NOT_OPENED_BY_TRANSFORM.format(cls=cls, name=name, theirs=f"{module}.{name}")


def _mapped_leaf(error: BaseException) -> object | None:
    """The object for which `jax.tree.map` called a function once, as for a leaf, and the function cannot use."""
    if not isinstance(error, (TypeError, AttributeError)):
        return None
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    # `tree_map` has the first tree under this name, and a function of the user raises below it.
    trees = [f.f_locals.get("tree") for f in frames if f.f_code is jax.tree_util.tree_map.__code__]
    tree = trees[-1] if trees else None
    is_leaf = tree is not None and hasattr(tree, "__dict__") and jax.tree_util.all_leaves([tree])
    return tree if is_leaf and not isinstance(tree, jax.core.Tracer) else None


def _frames_of_jax(error: BaseException) -> list[types.FrameType]:
    """JAX's frames at the end of a traceback: of the function that the user's code called, and of all below it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    hidden = itertools.takewhile(lambda f: f.f_code.co_filename.startswith(HIDDEN_FOLDERS), reversed(frames))
    return [*hidden][::-1]


def _operands_text(error: BaseException, leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> str:
    number = {id(leaf): i for i, leaf in enumerate(leaves)}
    numbers = list(dict.fromkeys(number[id(x)] for x in _operands(error) if id(x) in number))[:_MAX_OPERANDS]
    if not numbers:
        return ""
    paths = names()
    texts = [f"{paths[i]} is {leaves[i].dtype}{list(leaves[i].shape)}" for i in numbers]
    return OPERANDS.format(operands=" and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]])))


def _operands(error: BaseException) -> Iterator[Any]:
    """The arguments of the JAX function that the user's code called and that raised, and items of its containers."""
    called = next(iter(_frames_of_jax(error)), None)
    if called is None:
        return
    code, values = called.f_code, called.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    # The variables of a code object begin with its parameters: positional ones, then those by keyword, then * and **.
    for name in code.co_varnames[:count]:
        value = values.get(name)
        items: Any = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        for item in (value, *cast("Sequence[Any]", items)):
            yield item
            if isinstance(item, (list, tuple)):
                yield from cast("Sequence[Any]", item)
