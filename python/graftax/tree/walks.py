# SPDX-License-Identifier: Apache-2.0
"""The tree functions of the core with Python signatures, because `inspect.signature` cannot read nanobind's."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from graftax import _core

F = TypeVar("F", bound=Callable[..., Any])


def with_signature(function: F) -> F:
    """The function of the core, with the name, module, docstring and signature of a Python function."""
    # nanobind keeps the signature as text, as in the stub. None of these functions has overloads.
    text: str = function.__nb_signature__[0][0]  # type: ignore[attr-defined]
    attributes = {
        "__name__": function.__name__,
        "__qualname__": function.__name__,
        "__module__": __package__,
        "__doc__": function.__doc__,
        "__signature__": _signature(text),
    }
    # Functions of nanobind take no attributes. A wrapper in Python would cost far more than the 5 ns of this one.
    return _core.with_attributes(function, attributes)


def _signature(text: str) -> inspect.Signature:
    definition = ast.parse(f"{text}: ...").body[0]
    assert isinstance(definition, ast.FunctionDef)
    arguments, parameter_type = definition.args, inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    # As in Python's grammar, defaults belong to the last positional parameters.
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults

    def parameter(arg: ast.arg, parameter_kind: Any, default: ast.expr | None = None) -> inspect.Parameter:
        value = parameter_type.empty if default is None else ast.literal_eval(default)
        return parameter_type(arg.arg, parameter_kind, default=value, annotation=_annotation(arg.annotation))

    parameters = [
        parameter(
            arg,
            parameter_type.POSITIONAL_ONLY if i < len(arguments.posonlyargs) else parameter_type.POSITIONAL_OR_KEYWORD,
            default,
        )
        for i, (arg, default) in enumerate(zip(positional, defaults, strict=True))
    ]
    parameters += [parameter(arg, parameter_type.VAR_POSITIONAL) for arg in (arguments.vararg,) if arg is not None]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parameters += [parameter(arg, parameter_type.KEYWORD_ONLY, default) for arg, default in keywords]
    return inspect.Signature(parameters, return_annotation=_annotation(definition.returns))


def _annotation(node: ast.expr | None) -> Any:
    return inspect.Signature.empty if node is None else ast.unparse(node)


tree_flatten = with_signature(_core.tree_flatten)
tree_flatten_with_path = with_signature(_core.tree_flatten_with_path)
tree_leaves = with_signature(_core.tree_leaves)
tree_map = with_signature(_core.tree_map)
tree_map_with_path = with_signature(_core.tree_map_with_path)
tree_structure = with_signature(_core.tree_structure)
tree_unflatten = with_signature(_core.tree_unflatten)
