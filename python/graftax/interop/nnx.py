# SPDX-License-Identifier: Apache-2.0
"""Flax NNX: modules, variables, and what is made of them, read as fields.

NNX marks each object with the JAX trace that it was made in, and refuses to change one from within another trace. That
mark is no part of the key; objects rebuilt for a trace get the trace's, and the caller's keep theirs.
"""

from __future__ import annotations

from flax.nnx import graphlib
from flax.nnx.pytreelib import Pytree, PytreeState
from flax.nnx.statelib import FlatState, State
from flax.nnx.tracers import TraceState
from flax.nnx.variablelib import Variable

from ..registry import Description

_FIELDS = (Pytree, PytreeState, Variable, State, FlatState, graphlib.GraphState)


def describe(cls: type) -> Description | None:
    """How the core is to treat a class of NNX, or one derived from it. None for other classes."""
    if issubclass(cls, TraceState):
        return Description("context", reduce=cls)
    if issubclass(cls, _FIELDS):
        return Description("node", frozen=False)
    return None
