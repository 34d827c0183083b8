# SPDX-License-Identifier: Apache-2.0
"""If a trace comes to a program that is compiled already, the call runs that one: XLA has nothing to do.

That happens if a class or a helper is defined again, or if a static value or a branch changes what Python does but not
what is computed. The function is traced and lowered, and compared with what earlier entries were compiled from.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from graftax import _core
from graftax._explain import ArraySignature, array_signatures, compile_events
from graftax._jax.compilation import same_executable, unheard_stages, with_results
from graftax._jax.part_programs import runs_foreign_code
from graftax._jax.settings import settings_of_traces
from graftax._jax.tracebacks import boundary
from graftax._jax.tracers import has_tracer
from graftax._jit.compile_progress import report_reused
from graftax._jit.multihost_check import program_text

_MOST_COMPARED = 16  # earlier entries


class _Reused(NamedTuple):
    """An executable of an earlier entry, with the leaves and settings of JAX that it is for."""

    signatures: tuple[ArraySignature, ...]
    settings: dict[str, object]
    stage: Any


class Reusing:
    """The `jax.jit` object of an entry, which runs an executable of `earlier` entries if its trace is equal to theirs.

    They are held weakly, the likeliest first.
    """

    def __init__(self, name: str, compiled: jax.stages.Wrapped, earlier: Iterable[_core.Entry], tupled: bool) -> None:
        self._name, self._compiled, self._tupled = name, compiled, tupled
        self._earlier = [weakref.ref(entry) for entry in earlier]
        self._reused: list[_Reused] = []
        self._is_first = True

    def __getattr__(self, name: str) -> Any:
        if name in ("_compiled", "_reused"):  # in a copy, before __init__: this would call itself without end
            raise AttributeError(name)
        return getattr(self._compiled, name)

    @boundary
    def __call__(self, *arguments: Any) -> Any:
        # Only the first call looks among earlier entries. Under these flags `jax.jit` runs a program twice, to find the
        # nan.
        if not (self._is_first or self._reused) or jax.config.jax_debug_nans or jax.config.jax_debug_infs:
            return self._compiled(*arguments)
        leaves = arguments[0] if self._tupled else arguments
        if has_tracer(leaves):
            return self._compiled(*arguments)
        stage = self.stage_for(leaves)
        if stage is None:
            stage = self._find(arguments, leaves)
            self._is_first = False
        return self._compiled(*arguments) if stage is None else stage(*arguments)

    def stage_for(self, leaves: Sequence[object]) -> Any:
        """The executable of an earlier entry for leaves like these, or None."""
        return self.reused_stage(array_signatures(leaves)) if self._reused else None

    def reused_stage(self, signatures: tuple[ArraySignature, ...]) -> Any:
        """The executable of an earlier entry for leaves of these signatures under the present settings, or None."""
        settings = settings_of_traces()
        return next((r.stage for r in self._reused if r.signatures == signatures and r.settings == settings), None)

    def _find(self, arguments: tuple[object, ...], leaves: Sequence[object]) -> Any:
        """The executable of an earlier entry whose program for such arguments is that of this entry, or None."""
        traced = self._compiled.trace(*arguments)  # the call uses this trace, too
        if runs_foreign_code(traced.jaxpr):
            return None
        for reference in self._earlier:
            entry = reference()
            if entry is None:
                continue
            try:
                # JAX has the trace of its calls. For other arguments there is none, and the flat function of the entry
                # raises, since it is not called.
                with unheard_stages():
                    earlier_traced = entry.compiled.trace(*arguments)
                if not same_executable(traced, earlier_traced):
                    continue
                lowered, earlier_lowered = self._compiled.lower(*arguments), earlier_traced.lower()
                # Constants may have been changed in place since. The text has them as they were.
                if program_text(lowered) != program_text(earlier_lowered):
                    continue
                # The executable is another entry's, the tree of the results is of this trace: it has its Outcome's
                # number.
                stage = entry.compiled.stage_for(leaves) if isinstance(entry.compiled, Reusing) else None
                stage = with_results(stage or earlier_lowered.compile(), jax.tree.structure(traced.out_info))
            except Exception:  # what cannot be compared is compiled
                continue
            self._reused.append(_Reused(array_signatures(leaves), settings_of_traces(), stage))
            compile_events.note_reused()
            report_reused(self._name)
            return stage
        return None


def reusing(
    name: str, compiled: jax.stages.Wrapped, earlier: Iterable[_core.Entry], graphdef: _core.GraphDef, tupled: bool
) -> Any:
    """The `jax.jit` object of a new entry, which looks at the newest of the earlier entries with as many leaves."""
    traced = {id(entry): entry for entry in earlier if entry.outcomes and entry.tupled is tupled}
    candidates = [entry for entry in traced.values() if entry.graphdef.num_leaves == graphdef.num_leaves]
    newest = sorted(candidates, key=lambda entry: entry.used, reverse=True)[:_MOST_COMPARED]
    return Reusing(name, compiled, newest, tupled) if newest else compiled
