# SPDX-License-Identifier: Apache-2.0
"""Flax NNX: modules, variables, and what is made of them, read as fields.

NNX marks each object with the JAX trace that it was made in, and refuses to change one from within another trace. That
mark is no part of the key; objects rebuilt for a trace get the trace's, and the caller's keep theirs.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax.nnx.graphlib import GraphState
from flax.nnx.pytreelib import Pytree, PytreeState
from flax.nnx.statelib import FlatState, State
from flax.nnx.tracers import TraceState
from flax.nnx.variablelib import Variable
from flax.typing import HashableMapping

from .._errors import UnsupportedValueError
from ..registry import Description

_FIELDS = (Pytree, PytreeState, Variable, State, FlatState, GraphState)


def describe(cls: type) -> Description | None:
    """How the core is to treat a class of NNX, or one derived from it. None for other classes."""
    if issubclass(cls, TraceState):
        return Description("context", reduce=cls)
    if issubclass(cls, _FIELDS):
        return Description("node", frozen=False)
    if issubclass(cls, HashableMapping):  # a private dict that nothing changes
        return Description("reduce", reduce=_items)
    return None


def _items(mapping: HashableMapping[Any, Any]) -> tuple[Any, ...]:
    items = tuple(mapping.items())
    if any(isinstance(value, (jax.Array, np.ndarray)) for _, value in items):
        raise UnsupportedValueError("this mapping counts by its value, but holds an array. Keep it in an attribute.")
    return items
