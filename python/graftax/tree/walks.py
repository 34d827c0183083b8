# SPDX-License-Identifier: Apache-2.0
"""The walks of the core, as functions that tell their parameters: `inspect.signature` finds none on nanobind's."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from graftax import _core

F = TypeVar("F", bound=Callable[..., Any])


def with_signature(function: F) -> F:
    """The same function, with the attributes of a Python function of this package."""
    text: str = function.__nb_signature__[0][0]  # type: ignore[attr-defined]
    attributes = {
        "__name__": function.__name__,
        "__qualname__": function.__name__,
        "__module__": __package__,
        "__doc__": function.__doc__,
        "__signature__": _signature(text),
    }
    return _core.with_attributes(function, attributes)


def _signature(text: str) -> inspect.Signature:
    definition = ast.parse(f"{text}: ...").body[0]
    assert isinstance(definition, ast.FunctionDef)
    given, kinds = definition.args, inspect.Parameter
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults

    def parameter(arg: ast.arg, kind: Any, default: ast.expr | None = None) -> inspect.Parameter:
        value = kinds.empty if default is None else ast.literal_eval(default)
        return kinds(arg.arg, kind, default=value, annotation=_annotation(arg.annotation))

    parameters = [
        parameter(arg, kinds.POSITIONAL_ONLY if i < len(given.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD, default)
        for i, (arg, default) in enumerate(zip(positional, defaults, strict=True))
    ]
    parameters += [parameter(arg, kinds.VAR_POSITIONAL) for arg in (given.vararg,) if arg is not None]
    keywords = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    parameters += [parameter(arg, kinds.KEYWORD_ONLY, default) for arg, default in keywords]
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
