# SPDX-License-Identifier: Apache-2.0
"""One `jax.jit` object per structure, over a flat function of arrays. Public JAX only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jax.tree_util import SequenceKey

from graftax import _core
from graftax._graph.path import Path
from graftax._graph.patterns import root_entries
from graftax._jax.compilation import own_jit
from graftax._jit import program_store
from graftax._jit.auto_donation import Donor
from graftax._jit.background import Background
from graftax._jit.call_plan import Layout, Plan, RecordedCall, covered_leaves, refuse_unmatched_patterns
from graftax._jit.equal_programs import reusing
from graftax._jit.flat_function import Flat, definition_of, flat_function
from graftax._jit.leaf_names import LeafNames
from graftax._jit.multihost_check import CrossHostCheck
from graftax._jit.multihost_comparison import compares_hosts
from graftax._jit.output_shardings import OutputPlacement, may_use_mesh
from graftax._jit.requested_donation import DonationWarnings, donated_leaves
from graftax._sharding.leaf_shardings import Shardings

_MANY = 32  # leaves


def build_entry(call: RecordedCall, staged: bool = False, earlier: Iterable[_core.Entry] = ()) -> _core.Entry:
    """Makes the cache entry of one structure, with its `jax.jit` object. Nothing is traced yet.

    Args:
        call: the one that needs the entry.
        staged: the entry will be lowered or traced and never called.
        earlier: entries whose programs it runs where it comes to the same.
    """
    layout, recording, numbers = call.layout, call.recording, call.numbers
    plan = call.plan.without_objects(call.roots, layout)
    options, graphdef, leaves = plan.options, recording.graphdef, recording.leaves
    outcomes: list[_core.Outcome] = []
    donated, jit_options = leaf_options(call)
    flat = flat_function(plan, layout, donated, outcomes, options.by_value, staged, numbers)
    # JAX traces one tuple of a thousand leaves twice as fast as a thousand arguments. Options for single leaves
    # (donation, shardings) need separate arguments.
    tupled = not staged and len(leaves) >= _MANY and not donated and options.in_shardings is None
    # Who donates everything, or a handle, does not claim that each single buffer can be reused: no warning for those.
    donates_handles = any(call.handles) and options.donate_word not in ("warn", "warn-except-first")
    donation_warnings = (
        DonationWarnings()
        if (donates_handles or options.donate_word in ("all", "all-except-first")) and not staged
        else None
    )
    if donation_warnings is not None:
        flat = donation_warnings.around(flat)
    flat_program: Any = taking_tuple(flat) if tupled else flat
    if numbers is not None and "in_shardings" in jit_options:
        indexed = enumerate(jit_options["in_shardings"])
        leaf_shardings = [None if leaf in numbers.leaves else sharding for leaf, sharding in indexed]
        jit_options["in_shardings"] = (*leaf_shardings, None, None)  # the last two are computed by the host
    # The entry lives in a table on the function: strong references to identity statics would keep them alive.
    weak = _core.weaken(graphdef)
    flat_program.__signature__ = LeafNames(weak, recording.names, tupled)
    in_background = options.background and not (staged or donation_warnings is not None or compares_hosts())
    placed = options.in_shardings is not None or may_use_mesh(recording)
    if options.out_shardings is None and (options.by_value or not placed):
        compiled: Any = own_jit(flat_program, **jit_options)
        out_shardings: Any = _xla_chooses
        compiled = Background(plan.name, compiled, tupled) if in_background else compiled
        if not (staged or options.donates_proven or donation_warnings is not None or compares_hosts()):
            compiled = reusing(plan.name, compiled, earlier, weak, tupled)
    else:
        symbols = numbers.leaves if numbers is not None else ()
        compiled = OutputPlacement(plan, layout, graphdef, flat_program, jit_options, outcomes, tupled, symbols)
        out_shardings = compiled.out_shardings
        compiled = Background(plan.name, compiled, tupled) if in_background else compiled
    if donation_warnings is not None:
        compiled = donation_warnings.run(compiled)
    donor = None
    asks_for_shardings = options.in_shardings is not None or options.out_shardings is not None
    if options.donates_proven and not (call.donates or asks_for_shardings or staged or compares_hosts()):
        donor = Donor(plan.name, compiled, tupled, jit_options, out_shardings)
    if not staged and compares_hosts():
        compiled = CrossHostCheck(compiled, plan, layout, outcomes, numbers, tupled)
    if not staged and (store := program_store.current()) is not None:
        compiled = store.extensible(compiled, tupled)
    entry = _core.Entry(weak, call.context, compiled, outcomes, call.arguments, tupled)
    entry.donated = [leaf for leaf, is_donated in enumerate(donated) if is_donated]
    if donor is not None:
        entry.donor = donor
    if numbers is not None:
        program = numbers.begin()
        entry.use_numbers(list(zip(numbers.leaves, program.kinds, strict=True)), program)
        entry.evaluate = program.compiled(0)
    return entry


def _xla_chooses(*_: object) -> None:
    """The `out_shardings` of a program without any."""


def taking_tuple(flat: Callable[..., Flat]) -> Callable[[tuple[Any, ...]], Flat]:
    """The flat function, taking one tuple of leaves instead of separate arguments."""

    def tupled(leaves: tuple[object, ...]) -> Flat:
        return flat(*leaves)

    tupled.__name__ = tupled.__qualname__ = flat.__name__
    tupled.__wrapped__ = definition_of(flat.__wrapped__, tupled=True)  # type: ignore[attr-defined]
    return tupled


def leaf_options(call: RecordedCall) -> tuple[list[bool], dict[str, Any]]:
    """The options resolved for the flat leaves: (one donation flag a leaf, keyword arguments of `jax.jit`)."""
    plan, roots, layout, graphdef = call.plan, call.roots, call.layout, call.recording.graphdef
    options, jit_options = plan.options, dict[str, Any]()
    donated: list[bool] = []
    if plan.dynamic_patterns:
        covered_leaves(plan, graphdef, plan.signature.root_names(layout), "dynamic=")
    refuse_unmatched_patterns(plan, graphdef, plan.signature.root_names(layout))
    donates = call.donates
    if donates or options.in_shardings is not None:
        paths = graphdef.leaf_places()
        if donates:
            donated = donated_leaves(plan, roots, layout, graphdef)
            jit_options["donate_argnums"] = tuple(i for i, is_donated in enumerate(donated) if is_donated)
        if options.in_shardings is not None:
            argument_indices = argument_numbers(plan, layout, [root for root, _ in paths])
            names = plan.signature.root_names(layout)
            root_of_argument = {
                i: root for root, i in enumerate(argument_numbers(plan, layout, list(range(len(roots)))))
            }
            shardings = Shardings(
                plan.name,
                "in_shardings",
                options.in_shardings,
                "the arguments",
                part=lambda path: Path(path[1:]).get(roots[root_of_argument[path[0].idx]]),
                by_argument=True,
            )
            jit_options["in_shardings"] = tuple(
                None if i is None else shardings.of_leaf((SequenceKey(i), *path), (*root_entries(names[root]), *path))
                for i, (root, path) in zip(argument_indices, paths, strict=True)
            )
            argument_names = {i: names[root] for i, root in root_of_argument.items() if i is not None}
            shardings.check_arguments([argument_names[i] for i in sorted(argument_names)])
            shardings.check()
    if options.keep_unused:
        jit_options["keep_unused"] = True
    if options.inline:
        jit_options["inline"] = options.inline
    if options.compiler_options:
        jit_options["compiler_options"] = dict(options.compiler_options)
    return donated, jit_options


def argument_numbers(plan: Plan, layout: Layout, roots: list[int]) -> list[int | None]:
    """For each root, its index in `in_shardings`, where static arguments do not count (as in JAX).

    None for what the function captures and for the `self` of a bound method: `in_shardings` has no entry for them.
    """
    skip, arguments = plan.signature.skip, plan.signature.arguments(layout)
    static = plan.signature.flags(layout, plan.options.static)
    return [None if root < skip or root >= arguments else sum(not s for s in static[skip:root]) for root in roots]
