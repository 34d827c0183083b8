# SPDX-License-Identifier: Apache-2.0
"""Tier A: one `jax.jit` object per structure, over a flat function of arrays. Public JAX only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import SequenceKey

from graftax import _core
from graftax._graph.path import Path
from graftax._graph.patterns import root_entries
from graftax._jit.call_plan import Layout, Plan, covered_places, refuse_vain_patterns
from graftax._jit.donation import DonationWarnings, donated_leaves
from graftax._jit.leaf_names import LeafNames
from graftax._jit.multihost_check import Agreeing
from graftax._jit.multihost_rendezvous import compares
from graftax._jit.number_policy import SymbolicNumbers
from graftax._jit.output_shardings import Placing, spread
from graftax._jit.trace import Flat, definition_of, flat_function
from graftax._sharding.leaf_shardings import Shardings

_MANY = 32  # leaves


def build_entry(
    plan: Plan,
    caller: _core.Caller,
    roots: tuple[Any, ...],
    layout: Layout,
    recording: _core.Recording,
    context: Any,
    staged: bool = False,
    numbers: SymbolicNumbers | None = None,
) -> _core.Entry:
    """Makes the jit object for one structure. Nothing is traced yet.

    With many leaves the flat function takes one tuple of them, where no option speaks of single leaves: JAX traces a
    tuple of a thousand twice as fast as a thousand arguments. A `staged` entry is lowered or traced, not called.
    """
    options, graphdef, leaves = plan.options, recording.graphdef, recording.leaves
    outcomes: list[_core.Outcome] = []
    donated, jit_options = leaf_options(plan, roots, layout, graphdef, leaves)
    flat = flat_function(plan, layout, donated, outcomes, options.by_value, staged, numbers)
    tupled = not staged and len(leaves) >= _MANY and not donated and options.in_shardings is None
    unasked = any(plan.handles(roots, layout)) and options.donate_word not in ("warn", "warn-except-first")
    donation_warnings = (
        DonationWarnings() if (unasked or options.donate_word in ("all", "all-except-first")) and not staged else None
    )
    if donation_warnings is not None:
        flat = donation_warnings.around(flat)
    given: Any = taking_tuple(flat) if tupled else flat
    if numbers is not None and "in_shardings" in jit_options:
        of_leaves = enumerate(jit_options["in_shardings"])
        given_ones = [None if leaf in numbers.leaves else sharding for leaf, sharding in of_leaves]
        jit_options["in_shardings"] = (*given_ones, None, None)  # of what the host computes
    weak = _core.weaken(graphdef)
    given.__signature__ = LeafNames(weak, recording.names, tupled)
    placed = options.in_shardings is not None or spread(recording)
    if options.out_shardings is None and (options.by_value or not placed):
        compiled: Any = jax.jit(given, **jit_options)
    else:
        compiled = Placing(plan, layout, graphdef, given, jit_options, outcomes, tupled)
    if donation_warnings is not None:
        compiled = donation_warnings.run(compiled)
    if not staged and compares():
        compiled = Agreeing(compiled, plan, layout, outcomes, numbers, tupled)
    entry = _core.Entry(weak, context, compiled, outcomes, plan.signature.arguments(layout), tupled)
    if numbers is not None:
        program = numbers.begin()
        entry.use_numbers(list(zip(numbers.leaves, program.kinds, strict=True)), program)
        entry.evaluate = program.compiled(0)
    return entry


def taking_tuple(flat: Callable[..., Flat]) -> Callable[[tuple[Any, ...]], Flat]:
    """The flat function over one tuple of leaves."""

    def tupled(leaves: tuple[Any, ...]) -> Flat:
        return flat(*leaves)

    tupled.__name__ = tupled.__qualname__ = flat.__name__
    tupled.__wrapped__ = definition_of(flat.__wrapped__, tupled=True)  # type: ignore[attr-defined]
    return tupled


def leaf_options(
    plan: Plan, roots: tuple[Any, ...], layout: Layout, graphdef: _core.GraphDef, leaves: Sequence[Any]
) -> tuple[list[bool], dict[str, Any]]:
    """jit's options, spelled for the flat leaves: (which leaves are donated, keyword arguments of `jax.jit`)."""
    options, out = plan.options, dict[str, Any]()
    donated: list[bool] = []
    if plan.dynamic_patterns:
        covered_places(plan, graphdef, plan.signature.root_names(layout), "dynamic=")
    refuse_vain_patterns(plan, graphdef, plan.signature.root_names(layout))
    donates = plan.donates(roots, layout)
    if donates or options.in_shardings is not None:
        where = graphdef.leaf_places()
        if donates:
            donated = donated_leaves(plan, roots, layout, graphdef)
            out["donate_argnums"] = tuple(i for i, d in enumerate(donated) if d)
        if options.in_shardings is not None:
            numbers = argument_numbers(plan, layout, [root for root, _ in where])
            names = plan.signature.root_names(layout)
            of_argument = {i: root for root, i in enumerate(argument_numbers(plan, layout, list(range(len(roots)))))}
            read = Shardings(
                plan.name,
                "in_shardings",
                options.in_shardings,
                "the arguments",
                part=lambda path: Path(path[1:]).get(roots[of_argument[path[0].idx]]),
                by_argument=True,
            )
            out["in_shardings"] = tuple(
                None if i is None else read.of_leaf((SequenceKey(i), *path), (*root_entries(names[root]), *path))
                for i, (root, path) in zip(numbers, where, strict=True)
            )
            given = {i: names[root] for i, root in of_argument.items() if i is not None}
            read.check_arguments([given[i] for i in sorted(given)])
            read.check()
    if options.keep_unused:
        out["keep_unused"] = True
    if options.inline:
        out["inline"] = True
    if options.compiler_options:
        out["compiler_options"] = dict(options.compiler_options)
    return donated, out


def argument_numbers(plan: Plan, layout: Layout, roots: list[int]) -> list[int | None]:
    """Which element of `in_shardings` is for each of these roots: as in JAX, static arguments do not count; none is for
    what the function captures, and for `self` of a bound method."""
    skip, arguments = plan.signature.skip, plan.signature.arguments(layout)
    static = plan.signature.flags(layout, plan.options.static)
    return [None if root < skip or root >= arguments else sum(not s for s in static[skip:root]) for root in roots]
