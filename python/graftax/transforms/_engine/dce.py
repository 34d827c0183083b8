# SPDX-License-Identifier: Apache-2.0
"""Dead code elimination: removes from a function of arrays whatever its outputs do not depend on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Literal


def without_dead_code(
    function: Callable[..., Sequence[object]], leaves: Sequence[object]
) -> Callable[..., Sequence[Any]]:
    """The function as a jaxpr, traced at these leaves, without the equations that no output needs."""
    # Host callbacks and prints whose results are unused cannot be differentiated, so they must not be in it.
    try:
        closed: Any = jax.make_jaxpr(function)(*leaves)
    # A function that needs concrete values cannot be traced.
    except jax.errors.ConcretizationTypeError:
        return function
    return lambda *values: _run(closed.jaxpr, closed.consts, values, [True] * len(closed.jaxpr.outvars))


def _run(jaxpr: Any, consts: Sequence[Any], values: Sequence[Any], needed: Sequence[bool]) -> list[Any]:
    """Evaluates a jaxpr: its outputs, with None for those that are not needed."""
    # Backwards: an equation is live if it writes into a jax.Ref, or if an output or a live equation reads its results.
    live = {v for v, w in zip(jaxpr.outvars, needed, strict=True) if w and not isinstance(v, Literal)}
    live_eqns: list[Any] = []
    for eqn in reversed(jaxpr.eqns):
        # An effect on a jax.Ref has the index of that input; other effects are those of host callbacks.
        writes = any(hasattr(effect, "input_index") for effect in eqn.effects)
        if writes or not live.isdisjoint(eqn.outvars):
            live_eqns.append(eqn)
            live.update(v for v in eqn.invars if not isinstance(v, Literal))
    environment = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))

    def read(v: object) -> Any:
        return v.val if isinstance(v, Literal) else environment[v]

    for eqn in reversed(live_eqns):
        operands = [read(v) for v in eqn.invars]
        inner = eqn.params.get("jaxpr") if eqn.primitive.name in ("jit", "pjit") else None
        # A jitted function is one equation: only its inner jaxpr shows which of its host callbacks are needed.
        if inner is not None and _calls_host(inner.jaxpr):
            outputs = _run(inner.jaxpr, inner.consts, operands, [v in live for v in eqn.outvars])
        else:
            # An equation may read one variable twice, and a jaxpr has each input once.
            unique = dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal))
            single_eqn = jaxpr.replace(constvars=[], invars=[*unique], outvars=eqn.outvars, eqns=[eqn], effects=set())
            outputs = eval_jaxpr(single_eqn, (), *(environment[v] for v in unique))
        environment.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) if w else None for v, w in zip(jaxpr.outvars, needed, strict=True)]


def _calls_host(jaxpr: Any) -> bool:
    """Whether the jaxpr, or a jitted function that it calls, has a host callback."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.endswith("callback"):
            return True
        if eqn.primitive.name in ("jit", "pjit") and _calls_host(eqn.params["jaxpr"].jaxpr):
            return True
    return False
