# SPDX-License-Identifier: Apache-2.0
"""The exception of a failed call: where JAX names flat leaves, the caller gets key paths."""

from __future__ import annotations

import jax

from graftax import _core
from graftax._base.errors import rename_leaves
from graftax._capture.leaked_tracers import ended_among, is_unexpected
from graftax._jax.arrays import is_deleted
from graftax._jax.error_texts import (
    is_deleted_array_error,
    is_mismatched_leaf,
    is_out_of_memory,
    is_placement_error,
    is_sharding_mismatch,
)
from graftax._jit.auto_donation import note_gone
from graftax._jit.call_plan import Plan
from graftax._jit.leaf_names import named_leaves
from graftax._jit.out_of_memory import note_largest
from graftax.interop import own_error

DELETED = (
    "{path} holds an array that was deleted, so {name} cannot run ({error}). Most likely it was donated to an earlier "
    "call: use what that call returned or wrote back, or do not donate it."
)


def explained_error(
    error: BaseException, plan: Plan, roots: tuple[object, ...], layout: tuple[object, ...], traced: _core.Entry | None
) -> BaseException:
    """The exception to raise for a failed call, with key paths where JAX names flat leaves or a deleted array."""
    # A library's own error, such as that of equinox.error_if, which JAX has wrapped.
    library_error = own_error(error)
    if library_error is not None:
        library_error.__suppress_context__ = True
        return library_error
    # An error from before the program ran may be due to the symbols: `give_up` raises, and the call begins anew.
    has_run = isinstance(error, jax.errors.JaxRuntimeError | FloatingPointError)
    if traced is not None and traced.host is not None and isinstance(error, Exception) and not has_run:
        traced.host.give_up(error)
    # JAX says that a tracer of an ended transform was used, but not where it came from: an argument may hold it.
    if is_unexpected(error):
        return ended_among(plan.name, roots, plan.signature.root_names(layout)) or error
    # The arguments are recorded once more, in the cases that need it: a call that succeeds needs no names of leaves.
    if is_deleted_array_error(error):
        for leaf, path in named_leaves(plan.record(roots, layout)):
            if is_deleted(leaf):
                error.args = (DELETED.format(path=path, name=plan.name, error=error),)
                break
    elif is_out_of_memory(error):
        note_largest(error, plan.name, plan.record(roots, layout))
    elif plan.options.donates_proven:
        note_gone(error, plan.name, plan.record(roots, layout))
    elif is_placement_error(error):
        rename_leaves(error, [path for _, path in named_leaves(plan.record(roots, layout))])
    elif is_sharding_mismatch(error):
        leaves = named_leaves(plan.record(roots, layout))
        if paths := [path for leaf, path in leaves if is_mismatched_leaf(error, leaf)]:
            error.args = (f"{error} (of {plan.name} that is {' or '.join(paths)})",)
    return error
