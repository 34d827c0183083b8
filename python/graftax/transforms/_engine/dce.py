# SPDX-License-Identifier: Apache-2.0
"""Dead code elimination: a function of arrays without what its outputs do not depend on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Literal


def without_dead_code(function: Callable[..., Sequence[Any]], leaves: Sequence[Any]) -> Callable[..., Sequence[Any]]:
    """The function, traced at these leaves, to be run with others of their types.

    Host functions and prints whose results no output needs do not run in it, so they do not stand in the way of its
    derivative. A function whose code asks for values cannot be traced, and comes back as it is.
    """
    try:
        closed: Any = jax.make_jaxpr(function)(*leaves)
    except jax.errors.ConcretizationTypeError:
        return function
    return lambda *values: _run(closed.jaxpr, closed.consts, values, [True] * len(closed.jaxpr.outvars))


def _run(jaxpr: Any, consts: Sequence[Any], values: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    """The outputs of a jaxpr, None for those that are not wanted."""
    live = {v for v, w in zip(jaxpr.outvars, wanted, strict=True) if w and not isinstance(v, Literal)}
    steps: list[Any] = []
    for eqn in reversed(jaxpr.eqns):
        writes = any(hasattr(effect, "input_index") for effect in eqn.effects)  # into a jax.Ref
        if writes or not live.isdisjoint(eqn.outvars):
            steps.append(eqn)
            live.update(v for v in eqn.invars if not isinstance(v, Literal))
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else known.get(v)

    for eqn in reversed(steps):
        given = [read(v) for v in eqn.invars]
        inner = eqn.params.get("jaxpr") if eqn.primitive.name in ("jit", "pjit") else None
        if inner is not None and _calls_host(inner.jaxpr):
            out = _run(inner.jaxpr, inner.consts, given, [v in live for v in eqn.outvars])
        else:
            names = [v for v in eqn.invars if not isinstance(v, Literal)]
            unique = dict.fromkeys(names)
            one = jaxpr.replace(constvars=[], invars=[*unique], outvars=eqn.outvars, eqns=[eqn], effects=set())
            out = eval_jaxpr(one, (), *(known[v] for v in unique))
        known.update(zip(eqn.outvars, out, strict=True))
    return [read(v) if w else None for v, w in zip(jaxpr.outvars, wanted, strict=True)]


def _calls_host(jaxpr: Any) -> bool:
    """Is there a host function in it, itself or in a jitted function?"""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.endswith("callback"):
            return True
        if eqn.primitive.name in ("jit", "pjit") and _calls_host(eqn.params["jaxpr"].jaxpr):
            return True
    return False
