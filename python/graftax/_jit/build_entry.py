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

_MANY = 32  # leaves: from here on they travel as one tuple


def build_entry(call: RecordedCall, staged: bool = False, earlier: Iterable[_core.Entry] = ()) -> _core.Entry:
    """Makes the cache entry of one structure, with its `jax.jit` object. Nothing is traced yet.

    Args:
        staged: the entry will be lowered or traced and never called.
        earlier: entries whose executable this one runs, where its program turns out to be the same.
    """
    layout, recording, numbers = call.layout, call.recording, call.numbers
    plan = call.plan.without_objects(call.roots, layout)
    options, leaves = plan.options, recording.leaves
    outcomes: list[_core.Outcome] = []
    donated, jit_options = leaf_options(call)
    donation_warnings = None if staged else _donation_warnings(call)
    # JAX traces one tuple of a thousand leaves twice as fast as a thousand arguments. Options for single leaves
    # (donation, shardings) need separate arguments.
    flat = flat_function(plan, layout, donated, outcomes, options.by_value, staged, numbers)
    tupled = not staged and len(leaves) >= _MANY and not donated and options.in_shardings is None
    if donation_warnings is not None:
        flat = donation_warnings.around(flat)
    flat_program: Any = taking_tuple(flat) if tupled else flat
    # The entry lives in a table on the function: strong references to identity statics would keep them alive.
    weak = _core.weaken(recording.graphdef)
    flat_program.__signature__ = LeafNames(weak, recording.names, tupled)
    # Its `jax.jit` object, or what picks one for the shardings of each call.
    is_placed = options.in_shardings is not None or may_use_mesh(recording)
    places_outputs = options.out_shardings is not None or (is_placed and not options.by_value)
    if places_outputs:
        symbols = numbers.leaves if numbers is not None else ()
        graphdef = recording.graphdef
        compiled: Any = OutputPlacement(plan, layout, graphdef, flat_program, jit_options, outcomes, tupled, symbols)
    else:
        compiled = own_jit(flat_program, **jit_options)
    donor = None
    if not staged:
        out_shardings = compiled.out_shardings if places_outputs else _xla_chooses
        # Wrappers with its interface, for what a call does besides running it.
        compares = compares_hosts()
        # All hosts have to run the same programs, and each would go over from the equations at another call.
        if options.background and donation_warnings is None and not compares:
            compiled = Background(plan.name, compiled, tupled)
        if not (places_outputs or options.donates_proven or compares) and donation_warnings is None:
            compiled = reusing(plan.name, compiled, earlier, weak, tupled)
        if donation_warnings is not None:
            compiled = donation_warnings.run(compiled)
        if options.donates_proven and not (call.donates or compares):
            donor = Donor(plan.name, compiled, tupled, jit_options, out_shardings)
        if compares:
            compiled = CrossHostCheck(compiled, plan, layout, outcomes, numbers, tupled)
        # The outermost one: it runs loaded programs in place of all that is inside, but asks a `CrossHostCheck` there.
        if (store := program_store.current()) is not None:
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


def _donation_warnings(call: RecordedCall) -> DonationWarnings | None:
    """What silences JAX about buffers that it could not reuse; None if there is nothing to silence."""
    # Who donates everything, or a handle, does not claim that each single buffer can be reused.
    word = call.plan.options.donate_word
    donates_handles = any(call.handles) and word not in ("warn", "warn-except-first")
    return DonationWarnings() if donates_handles or word in ("all", "all-except-first") else None


def _xla_chooses(*_: object) -> None:
    """The `out_shardings` of a program without any."""


def taking_tuple(flat: Callable[..., Flat]) -> Callable[[tuple[object, ...]], Flat]:
    """The flat function, taking one tuple of leaves instead of separate arguments."""

    def tupled(leaves: tuple[object, ...]) -> Flat:
        return flat(*leaves)

    tupled.__name__ = tupled.__qualname__ = flat.__name__
    tupled.__wrapped__ = definition_of(flat.__wrapped__, tupled=True)  # type: ignore[attr-defined]
    return tupled


def leaf_options(call: RecordedCall) -> tuple[list[bool], dict[str, Any]]:
    """The options resolved for the flat leaves: (one donation flag for each leaf, keyword arguments of `jax.jit`)."""
    plan, graphdef = call.plan, call.recording.graphdef
    options, jit_options = plan.options, dict[str, Any]()
    donated: list[bool] = []
    names = plan.signature.root_names(call.layout)
    if plan.dynamic_patterns:
        covered_leaves(plan, graphdef, names, "dynamic=")  # raises for a pattern that matches nothing
    refuse_unmatched_patterns(plan, graphdef, names)
    if call.donates:
        donated = donated_leaves(plan, call.roots, call.layout, graphdef)
        jit_options["donate_argnums"] = tuple(i for i, is_donated in enumerate(donated) if is_donated)
    if options.in_shardings is not None:
        jit_options["in_shardings"] = _in_shardings(call, names)
    if options.keep_unused:
        jit_options["keep_unused"] = True
    if options.inline:
        jit_options["inline"] = options.inline
    if options.compiler_options:
        jit_options["compiler_options"] = dict(options.compiler_options)
    return donated, jit_options


def _in_shardings(call: RecordedCall, names: tuple[str, ...]) -> tuple[Any, ...]:
    """`in_shardings` for each flat leaf. `names` are those of the roots."""
    plan, layout, roots = call.plan, call.layout, call.roots
    paths = call.recording.graphdef.leaf_places()
    # `in_shardings` counts arguments as JAX does, without static ones; paths count roots.
    argument_indices = argument_numbers(plan, layout, [root for root, _ in paths])  # None for other roots
    root_of_argument = {i: root for root, i in enumerate(argument_numbers(plan, layout, list(range(len(roots)))))}
    shardings = Shardings(
        plan.name,
        "in_shardings",
        plan.options.in_shardings,
        "the arguments",
        part=lambda path: Path(path[1:]).get(roots[root_of_argument[path[0].idx]]),
        by_argument=True,
    )
    of_leaves = tuple(
        None if i is None else shardings.of_leaf((SequenceKey(i), *path), (*root_entries(names[root]), *path))
        for i, (root, path) in zip(argument_indices, paths, strict=True)
    )
    argument_names = {i: names[root] for i, root in root_of_argument.items() if i is not None}
    shardings.check_arguments([argument_names[i] for i in sorted(argument_names)])
    shardings.check()
    if call.numbers is None:
        return of_leaves
    # The host computes with symbolic numbers: its results are two vectors, which follow the leaves.
    symbols = call.numbers.leaves
    return *(None if leaf in symbols else sharding for leaf, sharding in enumerate(of_leaves)), None, None


def argument_numbers(plan: Plan, layout: Layout, roots: list[int]) -> list[int | None]:
    """For each root, its index in `in_shardings`, where static arguments do not count (as in JAX); None without one."""
    # `in_shardings` has no entry for what the function captures, nor for the `self` of a bound method.
    skip, arguments = plan.signature.skip, plan.signature.arguments(layout)
    static = plan.signature.flags(layout, plan.options.static)
    return [None if root < skip or root >= arguments else sum(not s for s in static[skip:root]) for root in roots]
