# SPDX-License-Identifier: Apache-2.0
"""The test of `graftax.record` within the program itself: one more output, are the floating results finite?"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from graftax import _core
from graftax._base.errors import RecordedCallWarning
from graftax._graph.patterns import coverage_test
from graftax._graph.structure import RootPath, place_name, written_path
from graftax._jax.arrays import ref_types
from graftax._jax.tracebacks import caller_level
from graftax._jit.call_plan import Plan
from graftax._jit.leaf_names import output_places
from graftax._jit.output_shardings import may_use_mesh

COVERS_NOTHING = (
    "{name} is recorded with nonfinite={patterns}, which covers no floating result, so nothing is checked. Name some "
    "of {paths}, or leave nonfinite= out to check them all."
)
_MOST_PATHS = 8  # that the message lists


@functools.lru_cache(maxsize=64)
def is_floating_dtype(dtype: Any) -> bool:
    return dtype is not None and not jnp.issubdtype(dtype, jax.dtypes.extended) and jnp.issubdtype(dtype, jnp.inexact)


class FiniteCheck:
    """The check of one trace, with these tracers as leaves. Without patterns in the plan, all results are checked."""

    def __init__(self, plan: Plan, recording: _core.Recording, leaves: Sequence[Any]) -> None:
        self._plan, self._recording, self._leaves = plan, recording, leaves
        self._refs = [i for i, leaf in enumerate(recording.leaves) if isinstance(leaf, ref_types)]
        self._is_spread = may_use_mesh(recording)  # arrays of one shape may lie on the devices in different ways
        # The contents of the Refs before the function runs.
        self._contents = [leaves[i][...] if is_floating_dtype(leaves[i].dtype) else None for i in self._refs]

    def result(self, outcome: _core.Outcome, outputs: Sequence[Any]) -> tuple[jax.Array, ...]:
        """(a scalar,) that tells whether all results are finite; empty if none is checked."""
        floating = [*self._new_outputs(outcome, outputs), *self._written_refs()]
        checked = [value for place, value in floating if self._is_covered(place)]
        if not checked:
            if floating:
                self._warn_of_unchecked([place for place, _ in floating])
            return ()
        # A reduction of each array would be a kernel each, which takes longer than the arithmetic on a small one.
        groups: dict[object, list[jax.Array]] = {}
        for i, x in enumerate(checked):
            # Arrays of one shape can be combined element by element. On a mesh that would move those that lie
            # otherwise.
            groups.setdefault(i if self._is_spread else x.shape, []).append(jnp.isfinite(x))
        conjunction = functools.partial(functools.reduce, jnp.logical_and)
        return (conjunction([conjunction(group).all() for group in groups.values()]),)

    def _warn_of_unchecked(self, places: list[RootPath]) -> None:
        """The patterns cover none of the results at these places."""
        patterns = ", ".join(map(repr, self._plan.options.finite or ()))
        paths = ", ".join([place_name(place, self._names) for place in places[:_MOST_PATHS]])
        more = f" and {len(places) - _MOST_PATHS} more" if len(places) > _MOST_PATHS else ""
        message = COVERS_NOTHING.format(name=self._plan.name, patterns=patterns, paths=paths + more)
        warnings.warn(message, RecordedCallWarning, caller_level())

    @property
    def _names(self) -> tuple[str, ...]:
        return "result", *self._recording.names

    def _is_covered(self, place: RootPath) -> bool:
        test = coverage_test(self._plan.finite_patterns, self._names)
        return test is None or test(place)

    def _new_outputs(self, outcome: _core.Outcome, outputs: Sequence[Any]) -> Iterator[tuple[RootPath, jax.Array]]:
        """The floating outputs that were computed, with their places. Root 0 is the result; the call's roots follow."""
        inputs, written = set(map(id, self._leaves)), outcome.inputs()[2]
        for (write, path), output in zip(output_places(outcome), outputs, strict=True):
            if id(output) in inputs or not is_floating_dtype(getattr(output, "dtype", None)):
                continue
            if write == 0:
                place = (0, path)
            elif write > len(written):  # the contents of a node of which only the order has changed
                continue
            else:
                root, path = written_path(self._recording.graphdef, written, (write, path))
                place = (root + 1, path)
            yield place, output

    def _written_refs(self) -> Iterator[tuple[RootPath, jax.Array]]:
        """The contents of the Refs now, with 0 for each number that was not finite before."""
        places = self._recording.graphdef.leaf_places()
        for i, old_content in zip(self._refs, self._contents, strict=True):
            root, path = places[i]
            if old_content is not None:
                yield (root + 1, path), jnp.where(jnp.isfinite(old_content), self._leaves[i][...], 0)
