# SPDX-License-Identifier: Apache-2.0
"""Which of a call's numbers are symbolic, and the call as it is recorded with them."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._capture.retrace_signals import NewReads
from graftax._capture.unheard_effects import hold_others
from graftax._graph.structure import Op, place_name
from graftax._jax.symbolic_numbers import lacks_symbols
from graftax._jit.cache import FunctionTable
from graftax._jit.call_plan import Layout, Plan, RecordedCall
from graftax._jit.changed_numbers import changed_numbers
from graftax._jit.number_policy import SymbolicNumbers


def with_symbols(
    call: RecordedCall, table: FunctionTable, function: types.FunctionType, opened: _core.Opened, shapes: bool
) -> RecordedCall:
    """The call with symbolic numbers, if it differs from others only in Python numbers; else as it is."""
    plan, roots = call.plan, call.roots
    if not _takes_symbols(plan, table) or table.has_entry_for(call.recording, call.context):
        return call
    if table.numbers.expects and table.loaded_for(call.recording, call.context, plan.name) is not None:
        return call
    origins, reads = plan.signature.origins, table.reads
    changing_globals = reads.names.changing if reads is not None else {}
    cached = reads.cached.objects if reads is not None else None
    fixed = {i for i, origin in enumerate(origins, len(roots) - len(origins)) if origin.holder is cached}
    changing = {
        i: changing_globals[origin.key]
        for i, origin in enumerate(origins, len(roots) - len(origins))
        if origin.key in changing_globals
    }
    said = plan.number_rules, _counting(plan, function)
    # A recording may refuse some of them, such as a number that is a key too: then it is asked for the others.
    while (numbers := table.numbers.symbolic(call.recording, call.context, changing, fixed, *said)) is not None:
        try:
            recording = plan.record(roots, call.layout, shapes, opened, numbers.places.keys())
        except GraftaxError:
            numbers.refuse()
            continue
        if numbers.found_in(recording):
            return dataclasses.replace(call, recording=recording, numbers=numbers)
    return call


def begin_anew_for_counters(
    call: tuple[Plan, Layout, _core.Recording],
    caller: Any,
    outcomes: list[_core.Outcome],
    numbers: SymbolicNumbers | None,
    outcome: _core.Outcome,
    outputs: Sequence[object],
) -> None:
    """After the first trace of a structure, which did nothing that must not be done twice.

    Args:
        outcomes: of the entry.
        numbers: those of the trace that were symbolic.
        outcome, outputs: what the trace came to.

    Raises:
        NewReads: the trace has changed numbers that were not, so that the next call would have to be traced again.
    """
    plan, layout, recording = call
    table, function = caller._table, _counting(plan, caller._function)
    key = next((key for key, entry in list(table.entries.items()) if entry.outcomes is outcomes), None)
    if function is None or key is None or not _takes_symbols(plan, table) or not recording.graphdef.numbers():
        return
    rows = recording.graphdef.rows()
    if hold_others({row.type or type(row.value) for row in rows if row.op in (Op.node, Op.static)}):
        return
    places, results = changed_numbers(recording, outcome, outputs, plan.signature.arguments(layout))
    changed = {place_name(place, recording.names) for place in places}
    if numbers is not None:
        begins = numbers.family.has_run(changed, results)
    else:
        family = table.numbers.family_of(recording, key[1], plan.number_rules, function)
        begins = family.has_run(changed, results)
    if begins:
        table.sharing.forget(table.entries.get(key))
        raise NewReads


def would_be_symbolic(
    plan: Plan, table: FunctionTable, function: types.FunctionType, recording: _core.Recording
) -> SymbolicNumbers | None:
    """The numbers that would be symbolic in a call with this recording."""
    if not _takes_symbols(plan, table):
        return None
    return table.numbers.would_be_symbolic(recording, plan.number_rules, _counting(plan, function))


def _takes_symbols(plan: Plan, table: FunctionTable) -> bool:
    reads = table.reads
    symbolic = plan.options.numbers == "symbolic" and reads is not None and reads.builtins.tells_types
    return symbolic and not lacks_symbols()


def _counting(plan: Plan, function: types.FunctionType) -> types.FunctionType | None:
    """The function, if its counters are symbolic from the first call on.

    They are not where the user has named parts that repeat: a call that is given a symbol is traced by itself.
    """
    return None if plan.options.repeated not in ((), "auto") else function
