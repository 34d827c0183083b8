# SPDX-License-Identifier: Apache-2.0
"""Flax NNX: modules, variables, and what is made of them, read as fields.

NNX marks each object with the JAX trace that it was made in, and refuses to change one from within another trace. That
mark is no part of the key; objects rebuilt for a trace get the trace's, and the caller's keep theirs.

NNX sorts the attributes of a module, and its own transforms leave them sorted. So their order is no part of the key
either: a compiled function sees them sorted.
"""

from __future__ import annotations

import inspect
import operator

from flax.nnx.graphlib import GraphState
from flax.nnx.pytreelib import Pytree, PytreeState
from flax.nnx.statelib import FlatState, State
from flax.nnx.tracers import TraceState
from flax.nnx.variablelib import HijaxVariable, Variable
from flax.typing import HashableMapping

from .._description import Description

# Flax before 0.12.8 has a type alias where it has a class now.
_BY_FIELDS = tuple(filter(inspect.isclass, (PytreeState, Variable, State, FlatState, GraphState)))


def describe(cls: type) -> Description | None:
    """How the core is to treat a class of NNX, or one derived from it. None for other classes."""
    if issubclass(cls, TraceState):
        return Description("context", reduce=cls)
    if issubclass(cls, HijaxVariable):  # JAX traces it as one value
        return Description("array")
    if issubclass(cls, Pytree):
        return Description("node", frozen=False, by_name=True)
    if issubclass(cls, _BY_FIELDS):
        return Description("node", frozen=False)
    if issubclass(cls, HashableMapping):  # a private dict that nothing changes
        return Description("reduce", reduce=operator.attrgetter("_mapping"))
    return None
