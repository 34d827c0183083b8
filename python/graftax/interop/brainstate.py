# SPDX-License-Identifier: Apache-2.0
"""brainstate: modules and States, read as fields.

brainstate marks each State with the JAX trace, the depth of its own transforms and the line that it was made in, and
refuses tracers for a State of another trace. These marks are not part of the key: States rebuilt for a trace get
those of that trace, and the caller's keep theirs.
"""

from __future__ import annotations

import threading

from brainstate import ParamState, State
from brainstate._state import TRACE_CONTEXT, source_info_util
from brainstate._state_hook_manager import HookManager
from brainstate.graph import Node
from brainstate.util import filter as filters
from brainstate.util._tracers import StateJaxTracer

from graftax._base.type_record import Description
from graftax.interop import UNSPOKEN, LibraryFilter

_VALUE = "_value"  # the field of a State that holds its value
UNSPOKEN.add(_VALUE)


def _transform_depth() -> int:
    return TRACE_CONTEXT.get_trace_stack_level()


# As the constructor of a State sets them: what is made for a rebuilt State is what a new one would have at that place.
_MARKS = {
    "_trace_state": StateJaxTracer,
    "_level": _transform_depth,
    "_source_info": source_info_util.current,
    "_been_writen": bool,  # a note of a running transform of brainstate
}

_FILTERS = (
    filters.WithTag,
    filters.PathContains,
    filters.OfType,
    filters.Any,
    filters.All,
    filters.Not,
    filters.Everything,
    filters.Nothing,
)


def describe(cls: type) -> Description | None:
    """How the core treats a class of brainstate or a subclass. None for other classes."""
    if issubclass(cls, State):
        return Description("node", frozen=False, context_fields=_MARKS)
    # A lock can be neither compared nor copied, and guards only the hooks of its own State.
    if issubclass(cls, HookManager):
        return Description("node", frozen=False, context_fields={"_lock": threading.RLock})
    if issubclass(cls, Node):
        return Description("node", frozen=False)
    return None


def is_module(obj: object) -> bool | None:
    return isinstance(obj, Node) or None


def value_field(obj: object) -> str | None:
    return _VALUE if isinstance(obj, State) else None


def is_trained(holder: object) -> bool | None:
    """Only what a ParamState holds: an array in an attribute of a module is a constant to brainstate."""
    if isinstance(holder, Node):
        return False
    return isinstance(holder, ParamState) if isinstance(holder, State) else None


def library_filter(spec: object) -> LibraryFilter | None:
    """A filter of brainstate, which tests States."""
    return LibraryFilter(State, spec) if isinstance(spec, _FILTERS) else None
