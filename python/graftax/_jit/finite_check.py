# SPDX-License-Identifier: Apache-2.0
"""The test of `graftax.record` within the program itself: one more output, are the floating results finite?"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from graftax import _core
from graftax._graph.patterns import coverage_test
from graftax._graph.structure import RootPath
from graftax._jax.arrays import ref_types
from graftax._jit.call_plan import Plan
from graftax._jit.output_shardings import may_use_mesh


@functools.lru_cache(maxsize=64)
def is_floating_dtype(dtype: Any) -> bool:
    return dtype is not None and not jnp.issubdtype(dtype, jax.dtypes.extended) and jnp.issubdtype(dtype, jnp.inexact)


class FiniteCheck:
    """The check of one trace.

    Args:
        plan: of the function, with the patterns of the results that are checked; without any, all are.
        recording: of the call that is traced.
        leaves: its tracers.
    """

    def __init__(self, plan: Plan, recording: _core.Recording, leaves: Sequence[Any]) -> None:
        self._plan, self._recording, self._leaves = plan, recording, leaves
        given = list(zip(recording.leaves, leaves, strict=False))  # the host's vectors of numbers may follow
        self._refs = [i for i, (leaf, _) in enumerate(given) if isinstance(leaf, ref_types)]
        self._is_spread = may_use_mesh(recording)  # arrays of one shape may lie on the devices in different ways
        # What stands in a Ref, as it is before the function runs.
        self._contents = [leaves[i][...] if is_floating_dtype(leaves[i].dtype) else None for i in self._refs]

    def result(self, outcome: _core.Outcome, outputs: Sequence[object]) -> tuple[Any, ...]:
        """(a scalar,) that tells whether all is finite; empty where nothing is checked."""
        checked = [*self._new_outputs(outcome, outputs), *self._written_refs()]
        if not checked:
            return ()
        # A reduction of each array would be a kernel each, which takes longer than the arithmetic on a small one.
        groups: dict[Any, list[Any]] = {}
        for i, x in enumerate(checked):
            groups.setdefault(i if self._is_spread else x.shape, []).append(jnp.isfinite(x))
        both = functools.partial(functools.reduce, jnp.logical_and)
        return (both([both(group).all() for group in groups.values()]),)

    def _is_covered(self, place: RootPath) -> bool:
        names = ("result", *self._recording.names)
        test = coverage_test(self._plan.finite_patterns, names)
        return test is None or test(place)

    def _new_outputs(self, outcome: _core.Outcome, outputs: Sequence[object]) -> Iterator[Any]:
        """The floating outputs. An array that was an input is none, and neither is what an input has in its place."""
        inputs, written = set(map(id, self._leaves)), outcome.inputs()[2]
        numbers = {leaf for leaf, _ in outcome.numbers}
        places = [place for i, place in enumerate(outcome.leaf_places()) if i not in numbers]
        for (write, path), output in zip(places, outputs, strict=True):
            if id(output) in inputs or not is_floating_dtype(getattr(output, "dtype", None)):
                continue
            if write == 0:
                place = (0, path)
            elif write > len(written):  # what a node holds in another order only
                continue
            else:
                root, node_path = self._recording.graphdef._node_place(written[write - 1])  # pyright: ignore[reportPrivateUsage]
                place = (root + 1, (*node_path, *path))
            if self._is_covered(place):
                yield output

    def _written_refs(self) -> Iterator[Any]:
        """What stands in the Refs now; 0 for what was not finite before."""
        places = self._recording.graphdef.leaf_places()
        for i, before in zip(self._refs, self._contents, strict=True):
            root, path = places[i]
            if before is not None and self._is_covered((root + 1, path)):
                yield jnp.where(jnp.isfinite(before), self._leaves[i][...], 0)
