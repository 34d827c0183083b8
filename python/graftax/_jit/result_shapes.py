# SPDX-License-Identifier: Apache-2.0
"""`Jitted.eval_shape`: the result of a call with shapes in place of arrays. Nothing runs or changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._jit.build_entry import leaf_options
from graftax._jit.call_plan import RecordedCall
from graftax._jit.flat_function import flat_function
from graftax._jit.trace import context_of

if TYPE_CHECKING:
    from graftax._jit.jitted import Jitted


def result_shapes(jitted: Jitted[..., Any], call: RecordedCall) -> Any:
    """The result, with `jax.ShapeDtypeStruct` in place of arrays."""
    from_entry = _from_entry(jitted, call)
    return from_entry[0] if from_entry else _from_separate_trace(jitted, call)


def _from_entry(jitted: Jitted[..., Any], call: RecordedCall) -> tuple[Any] | None:
    """(the result,) from the trace that a call uses, applied to a copy of the graph; None if that cannot be done."""
    # A frozen function must not be traced for its calls.
    if jitted._table.frozen:
        return None
    entry, recording = jitted._find_or_build_entry(call), call.recording
    run = getattr(entry.compiled, "eval_shape", None)
    if run is None:
        return None
    result, written, code = jitted._run_stage(call, entry, run)
    outcome = entry.outcomes[_core.decode(code)]
    avals = _avals(recording)
    _core.record(tuple(avals))  # a walk can handle only types that a recording has seen
    # The Outcome writes to a copy of the arguments. If an object that it writes is not copied, there has to be a trace
    # that drops the changes.
    rebuilt, walked = _core.Trace(recording), _core.walk(recording.graphdef, call.roots)
    copied = context_of(recording)(lambda: _core.walk(recording.graphdef, tuple(rebuilt.rebuild(avals))))
    rebuilt.close()
    if walked is None or copied is None or any(walked[1][i] is copied[1][i] for i in outcome.inputs()[2]):
        return None
    return (outcome.apply([*result, *written], avals, copied[1]),)


def _from_separate_trace(jitted: Jitted[..., Any], call: RecordedCall) -> Any:
    """The result by a trace that writes nothing back, and that no call uses."""
    outcomes: list[_core.Outcome] = []
    flat = flat_function(call.plan, call.layout, leaf_options(call)[0], outcomes, by_value=True, shapes=True)
    leaves = call.recording.leaves
    shapes, _, code = _core.run_active(jitted, call.roots, outcomes, call.recording, jax.eval_shape, flat, *leaves)
    walked = _core.walk(call.recording.graphdef, call.roots)
    if walked is None:
        raise GraftaxError("the arguments changed during eval_shape")
    return outcomes[_core.decode(code)].apply(shapes, _avals(call.recording), walked[1])


def _avals(recording: _core.Recording) -> list[jax.ShapeDtypeStruct]:
    return [jax.eval_shape(jax.numpy.asarray, leaf) for leaf in recording.leaves]
