# SPDX-License-Identifier: Apache-2.0
"""Jaxprs as parts of a graph: their constants are arrays, and the rest is one object for all that are alike."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core
import numpy as np

from graftax._jax.compat import is_jaxpr, with_constants, without_constants

# Of a Jaxpr with constants, the same without: one for all that are alike.
_BARE: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
# The one that was opened last: with the same constants it is the one that is put together.
_OPENED: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
_KNOWN: dict[Any, list[weakref.ref[Any]]] = {}


def open_jaxpr(jaxpr: Any) -> tuple[tuple[Any, ...], Any]:
    """(its constants, the Jaxpr without them); without any, it is itself."""
    constants = tuple(jaxpr.consts)
    if not constants:
        return (), jaxpr
    bare = _BARE.get(jaxpr)
    if bare is None:
        bare = _BARE[jaxpr] = one_of_alike(without_constants(jaxpr))
    _OPENED[bare] = weakref.ref(jaxpr)
    return constants, bare


def closed_jaxpr(cls: Any, bare: Any, constants: Iterable[Any]) -> Any:
    """A Jaxpr of this class with these constants: `open_jaxpr` undone."""
    values = tuple(constants)
    opened = _OPENED.get(bare)
    last = None if opened is None else opened()
    if last is not None and len(last.consts) == len(values) and all(map(operator.is_, last.consts, values)):
        return last
    made = with_constants(cls, bare, values)
    _BARE[made] = bare
    return made


class JaxprTreeDef(NamedTuple):
    """Stands in for a treedef: its unflatten puts constants back into a Jaxpr."""

    cls: type
    bare: Any

    def unflatten(self, constants: Iterable[Any]) -> Any:
        return closed_jaxpr(self.cls, self.bare, constants)


def run_jaxpr(bare: Any, constants: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """What it computes of these arrays."""
    cls = jax.extend.core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
    return jax.extend.core.jaxpr_as_fun(with_constants(cls, bare, tuple(constants)))(*args)


def one_of_alike(jaxpr: Any) -> Any:
    """The Jaxpr that was seen first of all that do the same, each of which another trace made."""
    key = tuple(equation.primitive.name for equation in jaxpr.eqns), tuple(str(v.aval) for v in jaxpr.invars)
    known = _KNOWN.setdefault(key, [])
    known[:] = [ref for ref in known if ref() is not None]
    for ref in known:
        found = ref()
        if found is not None and are_alike(found, jaxpr):
            return found
    known.append(weakref.ref(jaxpr, lambda ref: _forget(key, ref)))
    return jaxpr


def _forget(key: Any, ref: weakref.ref[Any]) -> None:
    known = _KNOWN.get(key)
    if known is not None and ref in known:
        known.remove(ref)
        if not known:
            _KNOWN.pop(key, None)


def are_alike(one: Any, other: Any) -> bool:
    """Do they have the same equations, up to the names of variables? False where that cannot be seen."""
    if one is other:
        return True
    names: dict[int, int] = {}  # a variable of the first -> that of the second

    def bound(a: Any, b: Any) -> bool:
        return a.aval == b.aval and names.setdefault(id(a), id(b)) == id(b)

    def read(a: Any, b: Any) -> bool:
        if isinstance(a, jax.extend.core.Literal) or isinstance(b, jax.extend.core.Literal):
            return type(a) is type(b) and a.aval == b.aval and _same(a.val, b.val)
        return names.get(id(a)) == id(b)

    def each(test: Any, a: Sequence[Any], b: Sequence[Any]) -> bool:
        return len(a) == len(b) and all(map(test, a, b))

    if one.effects or other.effects or not each(bound, one.invars, other.invars):
        return False
    if not each(bound, one.constvars, other.constvars) or len(one.eqns) != len(other.eqns):
        return False
    for a, b in zip(one.eqns, other.eqns, strict=True):
        same = a.primitive is b.primitive and each(read, a.invars, b.invars) and _same(a.params, b.params)
        if not same or a.ctx != b.ctx or not each(bound, a.outvars, b.outvars):
            return False
    return each(read, one.outvars, other.outvars)


def _same(one: Any, other: Any) -> bool:
    """Are two parameters of an equation the same?"""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if is_jaxpr(one):
        consts = [getattr(jaxpr, "consts", ()) for jaxpr in (one, other)]
        inner = [getattr(jaxpr, "jaxpr", jaxpr) for jaxpr in (one, other)]
        return _all_same(*consts) and are_alike(*inner)
    if isinstance(one, tuple | list):
        return _all_same(one, other)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)  # pyright: ignore
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    try:
        return (one == other) is True
    except Exception:  # of somebody's class
        return False


def _all_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(_same, one, other))
