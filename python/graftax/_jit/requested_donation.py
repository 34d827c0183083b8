# SPDX-License-Identifier: Apache-2.0
"""Donation that the user asks for: the arguments whose buffers JAX may reuse for the results."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from graftax import _core
from graftax._base.errors import StructureError
from graftax._base.handles import is_donated_place
from graftax._capture.signature import Signature
from graftax._graph.structure import Structure, place_name
from graftax._jax.error_texts import DONATION_UNUSED
from graftax._jax.tracebacks import boundary
from graftax._jit.call_plan import Layout, Plan, covered_leaves

DONATED_AND_KEPT = (
    "{name} is asked to donate {donated}, but {kept} is the same array and is kept. Donate both (it is then "
    "passed once), pass a copy (jnp.copy) for one of them, or donate neither."
)

STATIC_AND_DONATED = (
    "{name}: the argument {argument!r} is static and donated. A static argument is a constant of the program, which "
    "has no buffer to give away. Leave it out of one of the two."
)


def refuse_static_donation(
    name: str, signature: Signature, static: Sequence[int | str], donated: Sequence[int | str]
) -> None:
    """Raises a ValueError where an argument is named as static and as donated."""

    def parameters(arguments: Sequence[int | str]) -> set[int | str]:
        """The index of each argument among the parameters, or its name if it is an extra keyword argument."""
        index_of = {name: i for i, name in enumerate(signature.names)}
        count, skip = signature.positional, signature.skip
        return {index_of.get(a, a) if isinstance(a, str) else a + (count if a < 0 else skip) for a in arguments}

    for common in parameters(static) & parameters(donated):
        argument = signature.names[common] if isinstance(common, int) and common < len(signature.names) else common
        raise ValueError(STATIC_AND_DONATED.format(name=name, argument=argument))


def donated_leaves(plan: Plan, roots: tuple[object, ...], layout: Layout, graphdef: _core.GraphDef) -> list[bool]:
    """One flag for each leaf: is it donated?

    Raises:
        StructureError: if an array is donated under one of its paths and not under another.
    """
    root_flags, handles = _donated_roots(plan, layout), plan.handles(roots, layout)
    names = plan.signature.root_names(layout)
    structure = Structure(graphdef)
    leaf_rows = structure.leaves
    covered = covered_leaves(plan, graphdef, names, "donate=") if plan.donate_patterns else [False] * len(leaf_rows)
    donated: dict[int, tuple[bool, str]] = {}
    for row, is_covered in zip(leaf_rows, covered, strict=True):
        path = root, subpath = structure.root_path(row)
        name = place_name(path, names)
        flag = is_covered or root_flags[root] or (handles[root] and is_donated_place(roots[root], subpath))
        # An array at two paths is one leaf, with a row for each: it cannot be given away and kept.
        if donated.setdefault(row.leaf, (flag, name))[0] != flag:
            first_name, second_name = donated[row.leaf][1], name
            donated_name, kept_name = (second_name, first_name) if flag else (first_name, second_name)
            raise StructureError(DONATED_AND_KEPT.format(name=plan.name, donated=donated_name, kept=kept_name))
    return [donated[i][0] for i in range(len(donated))]


def _donated_roots(plan: Plan, layout: Layout) -> list[bool]:
    """One flag for each root: are all of its arrays donated?"""
    signature, options = plan.signature, plan.options
    flags = signature.flags(layout, plan.donate)
    if options.donate_word != "none":
        keeps_first = options.donate_word.endswith("except-first")
        arguments = signature.arguments(layout)
        flags = [i < arguments and not (keeps_first and i == 0) for i in range(len(flags))]
    return flags


class DonationWarnings:
    """Silences JAX's warning about donated buffers without a use, from a trace until its call has returned."""

    # JAX warns when it compiles, which it does only after a trace. So the filter is installed in the trace, and calls
    # of compiled code do not pay for it.

    def __init__(self) -> None:
        self._local = threading.local()  # .stacks: the filters of the traces in this thread whose calls still run

    def around(self, flat: Callable[..., object]) -> Callable[..., Any]:
        """`flat`, which installs the filter when it is traced."""

        @functools.wraps(flat)
        def traced(*leaves: object) -> Any:
            stack = contextlib.ExitStack()
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=DONATION_UNUSED)
            self._local.__dict__.setdefault("stacks", []).append(stack)
            return flat(*leaves)

        # `functools.wraps` has put `flat` there, and JAX shows the file and line of what is there.
        traced.__wrapped__ = flat.__wrapped__  # type: ignore[attr-defined]
        return traced

    def run(self, compiled: Any) -> Any:
        """`compiled`, which removes the filter when it returns."""

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
                # JAX may have traced more than once in this call, each time with a filter of its own.
                while len(stacks) > depth:
                    stacks.pop().close()

        return run
