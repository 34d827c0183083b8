# SPDX-License-Identifier: Apache-2.0
"""Jaxprs as nodes of a graph: their constants are leaves, and equal equations are one object."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core
import numpy as np
from jax.extend.core import JaxprEqn

from graftax._jax.arrays import typed_array_types
from graftax._jax.equations import is_jaxpr, with_constants, without_constants

# From a Jaxpr with constants to the canonical one without.
_BARE: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
# From there to the Jaxpr that was opened last: rebuilding with the same constants returns it.
_OPENED: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
_CANONICAL: dict[Any, list[weakref.ref[Any]]] = {}

# Equations with rules for their derivatives, and the parameters that are such rules.
_WITH_RULES = {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
_RULES = {"jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd", "out_trees"}
_OF_NUMPY: Any = (np.ndarray, np.generic, *typed_array_types)


def open_jaxpr(jaxpr: Any) -> tuple[tuple[Any, ...], Any]:
    """(its constants, the Jaxpr without them); without any, it is itself."""
    constants = tuple(jaxpr.consts)
    if not constants:
        return (), jaxpr
    bare = _BARE.get(jaxpr)
    if bare is None:
        bare = _BARE[jaxpr] = canonical_jaxpr(without_constants(jaxpr))
    _OPENED[bare] = weakref.ref(jaxpr)
    return constants, bare


def closed_jaxpr(cls: Any, bare: Any, constants: Iterable[Any]) -> Any:
    """A Jaxpr of this class with these constants: the inverse of `open_jaxpr`."""
    values = tuple(constants)
    opened = _OPENED.get(bare)
    previous = None if opened is None else opened()
    if previous is not None and len(previous.consts) == len(values) and all(map(operator.is_, previous.consts, values)):
        return previous
    jaxpr = with_constants(cls, bare, values)
    _BARE[jaxpr] = bare
    return jaxpr


class JaxprTreeDef(NamedTuple):
    """Stands in for a treedef: its unflatten puts constants back into a Jaxpr."""

    cls: type
    bare: Any

    def unflatten(self, constants: Iterable[Any]) -> Any:
        return closed_jaxpr(self.cls, self.bare, constants)


def run_jaxpr(bare: Any, constants: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates it on these arrays."""
    cls = jax.extend.core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
    return jax.extend.core.jaxpr_as_fun(with_constants(cls, bare, tuple(constants)))(*args)


def canonical_jaxpr(jaxpr: Any) -> Any:
    """The first Jaxpr with the same equations: each trace makes a new one, which would be a difference."""
    # Jaxprs of another key cannot be equal, so few are compared equation by equation.
    key = tuple(equation.primitive.name for equation in jaxpr.eqns), tuple(str(v.aval) for v in jaxpr.invars)
    candidates = _CANONICAL.setdefault(key, [])
    candidates[:] = [ref for ref in candidates if ref() is not None]
    for ref in candidates:
        candidate = ref()
        if candidate is not None and are_equal_jaxprs(candidate, jaxpr):
            return candidate
    candidates.append(weakref.ref(jaxpr, lambda ref: _forget(key, ref)))
    return jaxpr


def _forget(key: Any, ref: weakref.ref[Any]) -> None:
    candidates = _CANONICAL.get(key)
    if candidates is not None and ref in candidates:
        candidates.remove(ref)
        if not candidates:
            _CANONICAL.pop(key, None)


def are_equal_jaxprs(first: Any, second: Any, for_running: bool = False) -> bool:
    """Do they have the same equations, up to the names of variables? False if that is uncertain.

    Args:
        for_running: they will be compiled and run, and not be transformed: rules of derivatives make no difference.
    """
    if first is second:
        return True
    names: dict[int, int] = {}  # id of a variable of `first` -> id of that of `second`

    def bound(a: Any, b: Any) -> bool:
        return a.aval == b.aval and names.setdefault(id(a), id(b)) == id(b)

    def read(a: Any, b: Any) -> bool:
        if isinstance(a, jax.extend.core.Literal) or isinstance(b, jax.extend.core.Literal):
            return type(a) is type(b) and a.aval == b.aval and _equal_params(a.val, b.val, for_running)
        return names.get(id(a)) == id(b)

    def all_pairs(test: Callable[[Any, Any], bool], a: Sequence[Any], b: Sequence[Any]) -> bool:
        return len(a) == len(b) and all(map(test, a, b))

    def params(equation: JaxprEqn) -> dict[str, Any]:
        if not (for_running and equation.primitive.name in _WITH_RULES):
            return equation.params
        return {name: value for name, value in equation.params.items() if name not in _RULES}

    # Variables correspond as they are bound: inputs, constants, and then the outputs of each equation.
    if first.effects or second.effects or not all_pairs(bound, first.invars, second.invars):
        return False
    if not all_pairs(bound, first.constvars, second.constvars) or len(first.eqns) != len(second.eqns):
        return False
    for a, b in zip(first.eqns, second.eqns, strict=True):
        if a.primitive is not b.primitive or a.ctx != b.ctx or not all_pairs(read, a.invars, b.invars):
            return False
        if not _equal_params(params(a), params(b), for_running) or not all_pairs(bound, a.outvars, b.outvars):
            return False
    return all_pairs(read, first.outvars, second.outvars)


def run_the_same(first: object, second: object) -> bool:
    """Do two closed Jaxprs run alike, with the constants that they have now? False if that is uncertain."""
    return _equal_params(first, second, True)


def _equal_params(first: object, second: Any, for_running: bool = False) -> bool:
    """Are two parameters of an equation equal?"""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if is_jaxpr(first):
        inner = [getattr(jaxpr, "jaxpr", jaxpr) for jaxpr in (first, second)]
        same_consts = _all_equal(getattr(first, "consts", ()), getattr(second, "consts", ()), for_running)
        return same_consts and are_equal_jaxprs(inner[0], inner[1], for_running)
    if isinstance(first, tuple | list):
        return _all_equal(first, second, for_running)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(first, dict):
        same_keys = first.keys() == second.keys()  # pyright: ignore[reportUnknownMemberType]
        return same_keys and all(_equal_params(first[key], second[key], for_running) for key in first)  # pyright: ignore
    if isinstance(first, _OF_NUMPY):
        a, b = np.asarray(first), np.asarray(second)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(first, float | complex):  # a nan is equal to itself here, and 0.0 not to -0.0
        return repr(first) == repr(second)
    try:
        return (first == second) is True
    except Exception:  # raised by the `__eq__` of a user's class
        return False


def _all_equal(first: Sequence[object], second: Sequence[object], for_running: bool = False) -> bool:
    return len(first) == len(second) and all(
        _equal_params(a, b, for_running) for a, b in zip(first, second, strict=True)
    )
