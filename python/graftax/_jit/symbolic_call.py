# SPDX-License-Identifier: Apache-2.0
"""Which of a call's numbers are symbolic, and the call as it is recorded with them."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any, cast

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._capture.retrace_signals import NewReads
from graftax._capture.unheard_effects import holds_opaque_objects
from graftax._graph.structure import place_name
from graftax._jax.symbolic_numbers import lacks_symbols
from graftax._jit.cache import FunctionTable
from graftax._jit.call_plan import Plan, RecordedCall, TracedCall
from graftax._jit.changed_numbers import changed_numbers
from graftax._jit.number_policy import SymbolicNumbers


def with_symbols(
    call: RecordedCall, table: FunctionTable, function: types.FunctionType, opened: _core.Opened, shapes: bool
) -> RecordedCall:
    """The call with symbolic numbers, if it differs from earlier ones only in Python numbers. Otherwise as it is."""
    plan, roots = call.plan, call.roots
    if not _takes_symbols(plan, table) or table.has_entry_for(call.recording, call.context):
        return call
    # Another process may have compiled a program for just these numbers.
    if table.numbers.expects and table.loaded_for(call.recording, call.context, plan.name) is not None:
        return call
    # Roots that are known to change, and those that stay the caller's own in a trace: what caches have given out.
    origins = list(enumerate(plan.signature.origins, len(roots) - len(plan.signature.origins)))
    assert table.reads is not None
    known_to_change, cached = table.reads.names.changing, table.reads.cached.objects
    fixed = {i for i, origin in origins if origin.holder is cached}
    changing = {i: known_to_change[origin.key] for i, origin in origins if origin.key in known_to_change}
    rules, counting = plan.number_rules, _counting(plan, function)
    # A number may turn out not to be one that can be a leaf, such as one that is a key, too. Then try without it.
    hints = changing, fixed, rules, counting
    while (numbers := table.numbers.symbolic(call.recording, call.context, *hints)) is not None:
        try:
            recording = plan.record(roots, call.layout, shapes, opened, numbers.places.keys())
        except GraftaxError:
            numbers.refuse()
            continue
        if numbers.found_in(recording):
            return dataclasses.replace(call, recording=recording, numbers=numbers)
    return call


def check_of_counters(
    call: TracedCall, outcomes: list[_core.Outcome], numbers: SymbolicNumbers | None
) -> Callable[[TracedCall, _core.Outcome, list[Any]], None] | None:
    """A function to call after the first trace of a structure, if all that it did may be done twice.

    It raises NewReads if the trace has changed numbers that were not symbolic, since the next call would trace again.
    None if the trace must not begin anew for that.
    """
    plan, recording, table = call.plan, call.recording, cast("Any", call.caller)._table
    function, key = _counting(plan, cast("Any", call.caller)._function), table.key_of(outcomes)
    if function is None or key is None or not recording.graphdef.numbers() or not _takes_symbols(plan, table):
        return None
    is_new = numbers.family.is_new if numbers is not None else table.numbers.is_new(recording, key[1])
    if not is_new:
        return None

    def check(call: TracedCall, outcome: _core.Outcome, outputs: list[Any]) -> None:
        # Asked once more: the trace may have found code that takes no symbols.
        recording = call.recording
        if not _takes_symbols(call.plan, table) or holds_opaque_objects(recording.graphdef.rows()):
            return
        places, results = changed_numbers(call, outcome, outputs)
        changed = {place_name(place, recording.names) for place in places}
        # The trace may have taken in more roots, so the family is that of the call as it is now.
        if numbers is not None:
            family = numbers.family
        else:
            family = table.numbers.family_of(recording, key[1], call.plan.number_rules, function)
        if family.has_run(changed, results):
            table.sharing.forget(table.entries.get(key))  # it has these numbers as statics
            raise NewReads

    return check


def would_be_symbolic(
    plan: Plan, table: FunctionTable, function: types.FunctionType, recording: _core.Recording
) -> SymbolicNumbers | None:
    """The numbers that would be symbolic in a call with this recording."""
    if not _takes_symbols(plan, table):
        return None
    return table.numbers.would_be_symbolic(recording, plan.number_rules, _counting(plan, function))


def _takes_symbols(plan: Plan, table: FunctionTable) -> bool:
    """May numbers be symbolic, by the options, the function's code and this JAX?"""
    reads = table.reads
    symbolic = plan.options.numbers == "symbolic" and reads is not None and reads.builtins.tells_types
    return symbolic and not lacks_symbols()


def _counting(plan: Plan, function: types.FunctionType) -> types.FunctionType | None:
    """The function, if its counters are symbolic from the first call on; otherwise None."""
    # They are not where the user has named parts that repeat: a call that is given a symbol is traced by itself.
    return None if plan.options.repeated not in ((), "auto") else function
