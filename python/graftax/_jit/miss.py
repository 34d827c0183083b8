# SPDX-License-Identifier: Apache-2.0
"""A miss: no recent entry fits a call. It runs one of the table, of an equal function, a loaded or a new one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from graftax import _core
from graftax._base.errors import UnsupportedValueError
from graftax._capture.cache_layout import Cache
from graftax._capture.retrace_signals import NewReads
from graftax._explain import compile_events, frozen
from graftax._jit import program_store
from graftax._jit.call_plan import Plan, RecordedCall
from graftax._jit.compile_progress import report_stages
from graftax._jit.slow_input_warnings import note_comparison
from graftax._jit.trace_growth import is_kept
from graftax.interop import refuse_around

if TYPE_CHECKING:
    from graftax._jit.jitted import Jitted


def entry_of_miss(
    jitted: Jitted[..., Any],
    roots: tuple[object, ...],
    layout: tuple[object, ...],
    context: object,
    opened: _core.Opened,
    binding: _core.Binding,
) -> tuple[_core.Entry, _core.Recording]:
    """The entry and the recording for a call that no recent entry fits. The arguments are the core's.

    Raises:
        NewReads: the roots are out of date, so the core binds them again and retries.
    """
    table, plan = jitted._table, jitted._plan
    begin = time.perf_counter()
    if plan.signature.binding is not binding:
        raise NewReads  # another thread has read the signature again since these roots were bound
    refuse_around(plan.name)
    # Programs of other processes: with these the table has a new entry or new roots, so the core looks again.
    if table.loaded is not None and table.loaded.make_entry(roots, layout, context):
        raise NewReads
    store = program_store.current()
    if store is not None and store.adopt(jitted):
        raise NewReads
    # The one recording of this call: building the entry and the trace reuse it.
    try:
        recording = plan.record(roots, layout, opened=opened)
    except UnsupportedValueError:
        # A file or an iterator is no problem if only host functions use it: then it is not a root.
        if table.reads is not None and table.reads.hide_inner(jitted._function.__code__):
            raise NewReads from None
        raise
    restart_if_reads_changed(jitted, recording, plan)
    call = jitted._with_symbols(RecordedCall(plan, roots, layout, recording, context), opened)
    entry = find_or_build_entry(jitted, call)
    if jitted._options.progress and not entry.outcomes:  # otherwise it was compiled earlier
        report_stages(plan.name, jitted._options.progress, time.perf_counter() - begin)
    return entry, call.recording


def find_or_build_entry(jitted: Jitted[..., Any], call: RecordedCall) -> _core.Entry:
    """The cache entry that a call runs. Builds and stores one if there is none."""
    table, name, recording = jitted._table, call.plan.name, call.recording
    context, numbers = call.context, call.numbers
    # An entry of this table: one that was not among the few that the core has tried.
    try:
        entry, key = table.find(recording, context)
    except Exception as error:  # raised by the `__eq__` of a static value
        note_comparison(error, recording.graphdef, recording.names)
        raise
    # An entry of loaded programs cannot compile: replace it by one that can.
    if entry is not None and table.loaded is not None and table.loaded.runs_only(entry):
        table.drop(key)
        entry = None
    if entry is not None:
        table.slow_hits += table.begins_call()
        table.ahead.use(jitted, entry)
        return entry
    # An entry of an equal function.
    entry = table.share(recording, context, name)
    if entry is not None:
        return entry
    # A new one, which runs a loaded program where there is one. A frozen function may take only that.
    table.misses += table.begins_call()
    loaded = table.loaded_for(recording, context, name, numbers)
    if table.frozen and loaded is None:
        frozen.refuse(table, name, recording)
    compile_events.listen()
    jitted._advise(call)
    entry = jitted._build(call)
    if loaded is not None and table.loaded is not None:
        entry = table.loaded.entry(entry, context, call.arguments, loaded, numbers)
    # Keep the entry's own GraphDef, which holds identity statics weakly, and not that of the recording.
    key = (entry.graphdef, *key[1:])
    if numbers is not None:
        numbers.stored(table, key)
    entry = table.store(key, entry)
    leaves = recording.leaves if numbers is None else numbers.inputs_for(recording.leaves)
    if loaded is not None and entry.compiled.has_program(leaves):
        compile_events.record_ready(table, entry, name, recording, loaded.source)
    return entry


def restart_if_reads_changed(jitted: Jitted[..., Any], recording: _core.Recording, plan: Plan) -> None:
    """Raises NewReads if the function's code or what it reads has changed since its signature was read."""
    # Code that makes classes for each call would let the read set grow without end.
    if jitted._table.reads is not None and jitted._table.reads.is_large:
        jitted._table.clear()
    reads, signature = jitted._table.reads, plan.signature
    if reads is None:
        return
    grown = reads.see_receivers(jitted._function)  # before note_itself, which would make them roots
    reads.note_root_functions(recording.functions)
    code = jitted._function.__code__
    reads.note_itself(jitted._function)
    grown |= reads.refresh() | reads.see_named(recording.named)
    if not is_kept(jitted._table):  # what it has put into caches is no root of this call
        grown |= reads.see_root_caches(recording.instances((Cache,)))
    if grown or not signature.has_roots_of(reads) or signature.code is not code:
        raise NewReads
