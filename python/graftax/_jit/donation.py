# SPDX-License-Identifier: Apache-2.0
"""Donation: which leaves of a call JAX may use for its results."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

from graftax import _core
from graftax._base.errors import StructureError
from graftax._base.handles import is_donated_place
from graftax._graph.structure import Structure, place_name
from graftax._jax.compat import DONATION_UNUSED
from graftax._jax.tracebacks import boundary
from graftax._jit.call_plan import Layout, Plan, covered_places

DONATED_AND_KEPT = (
    "{name} is asked to donate {donated}, but {kept} is the same array and is kept. Donate both (it is then passed "
    "once), pass a copy (jnp.copy) for one of them, or donate neither."
)


def donated_leaves(plan: Plan, roots: tuple[Any, ...], layout: Layout, graphdef: _core.GraphDef) -> list[bool]:
    """One flag a leaf. An array in two places is one leaf: both places have to be donated, or neither."""
    whole, handles = donated_roots(plan, layout), plan.handles(roots, layout)
    names = plan.signature.root_names(layout)
    structure = Structure(graphdef)
    found = structure.leaves
    covered = covered_places(plan, graphdef, names, "donate=") if plan.donate_patterns else [False] * len(found)
    donated: dict[int, tuple[bool, str]] = {}
    for row, is_covered in zip(found, covered, strict=True):
        place = root, below = structure.place(row)
        name = place_name(place, names)
        flag = is_covered or whole[root] or (handles[root] and is_donated_place(roots[root], below))
        if donated.setdefault(row.leaf, (flag, name))[0] != flag:
            first, second = donated[row.leaf][1], name
            gone, kept = (second, first) if flag else (first, second)
            raise StructureError(DONATED_AND_KEPT.format(name=plan.name, donated=gone, kept=kept))
    return [donated[i][0] for i in range(len(donated))]


def donated_roots(plan: Plan, layout: Layout) -> list[bool]:
    """One flag a root: are its arrays donated?"""
    signature, options = plan.signature, plan.options
    flags = signature.flags(layout, plan.donate)
    if options.donate_word != "none":
        first = options.donate_word.endswith("except-first")
        arguments = signature.arguments(layout)
        flags = [i < arguments and not (first and i == 0) for i in range(len(flags))]
    return flags


class DonationWarnings:
    """Silences JAX's warning of donated buffers that it could not reuse, from a trace until its call has returned.

    Only a trace leads to a compilation, so a call that needs none pays nothing.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def around(self, flat: Callable[..., Any]) -> Callable[..., Any]:
        """`flat`, with the filter set up once it is traced."""

        @functools.wraps(flat)
        def traced(*leaves: Any) -> Any:
            stack = contextlib.ExitStack()
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=DONATION_UNUSED)
            self._local.__dict__.setdefault("stacks", []).append(stack)
            return flat(*leaves)

        traced.__wrapped__ = flat.__wrapped__  # type: ignore[attr-defined]
        return traced

    def run(self, compiled: Any) -> Any:
        """`compiled`, with the filter taken down at the end."""

        run: Any = self._within(compiled)
        run.lower, run.trace = self._within(compiled.lower), self._within(compiled.trace)
        return run

    def _within(self, function: Any) -> Any:
        @boundary
        @functools.wraps(function)
        def run(*leaves: Any) -> Any:
            stacks: list[contextlib.ExitStack] = self._local.__dict__.setdefault("stacks", [])
            depth = len(stacks)
            try:
                return function(*leaves)
            finally:
                while len(stacks) > depth:
                    stacks.pop().close()

        return run
