# SPDX-License-Identifier: Apache-2.0
"""Chooses the leaves to differentiate, by operand, name, pattern, filter or predicate."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax.numpy as jnp

from graftax import _core, interop
from graftax._graph.filters import RecordedView, as_filter
from graftax._graph.patterns import CoverFinder, argument_pattern, nearest
from graftax._jit.options import is_path
from graftax.transforms._engine.gradient_uses import warn_of_other_uses
from graftax.transforms._engine.lift import Make, name_of
from graftax.transforms._engine.opaque_leaves import leaves_in_functions
from graftax.transforms._engine.program import Program, replaced
from graftax.transforms._engine.tangents import is_inexact, is_key

WRT_TYPE = (
    "{name}: {option}={actual!r} does not say which arguments are differentiated. Give argnums= positions of "
    "arguments, wrt= positions, names, patterns of key paths, types, or a predicate of arrays."
)
WRT_TWICE = "{name}: wrt={wrt!r} names an argument twice."
NOTHING_TO_DIFFERENTIATE = (
    "{name}: there is no array of a floating dtype to differentiate in {where}. Integers have no derivative (pass 3.0 "
    "for 3, or allow_int=True for zeros of dtype float0), and Python numbers inside an argument are static: make them "
    "arrays (jnp.asarray), or name another argument with argnums= or wrt=."
)
WRT_UNUSED = (
    "{name}: the pattern {pattern!r} of wrt= covers no floating array of the arguments. Available: {paths}. .w is "
    "an attribute, [w] a key."
)
WRT_AND_ARGNUMS = (
    "{name}: argnums={argnums!r} and wrt={wrt!r} both say what to differentiate. Give one of them; wrt= takes "
    "positions, too."
)


OfArrays = type[Any] | tuple[type[Any], ...] | Callable[[Any], object] | None  # selects arrays, not arguments
Wrt = Any  # int | str | type | a library's filter | ... | several of these | a predicate of arrays | None


class Chosen(NamedTuple):
    """The differentiated leaves of a program, and the operands that the derivative is structured like."""

    # None of the caller's objects, so that a pending derivative does not keep them alive.
    graphdef: _core.GraphDef
    leaves: tuple[int, ...]
    roots: tuple[int, ...]
    single: bool  # one graph, not a tuple of them

    def graphs(self, values: Sequence[object]) -> Any:
        """Graphs like the operands, with these values in place of the chosen leaves, and None in place of others."""
        # A leaf that is not an array (a string, a function, a config) is None as well, so that the gradient of a pytree
        # has the structure that Optax expects. Registered nodes, static fields and aux data are kept.
        leaves = replaced([None] * self.graphdef.num_leaves, self.leaves, values)
        built = _core.unflatten_roots(self.graphdef, leaves, True)
        graphs = [built[root] for root in self.roots]
        return graphs[0] if self.single else tuple(graphs)


def differentiated_program(
    make: Make,
    fun: Callable[..., object],
    title: str,
    args: Sequence[object],
    kwargs: dict[str, Any],
    argnums: int | Sequence[int],
    wrt: Wrt = None,
    allow_int: bool = False,
) -> tuple[Program, Chosen]:
    """The program of a call, and the leaves of it that are differentiated.

    By value, as in Equinox, Python numbers are static, nothing that functions capture is differentiated, and it is not
    an error to differentiate no leaf.
    """
    selectors, single = _parse_wrt(name_of(fun, title), argnums, wrt)
    program = make(name_of(fun, title), [fun], args, kwargs)
    if make is Program:
        program = _with_numbers_as_arrays(program, fun, args, kwargs, selectors, allow_int)
    return program, _choose_leaves(program, selectors, single, argnums, wrt, allow_int, make is not Program)


def _with_numbers_as_arrays(
    program: Program,
    fun: Callable[..., object],
    args: Sequence[object],
    kwargs: dict[str, Any],
    selectors: Sequence[int | str],
    allow_int: bool,
) -> Program:
    """The program with arrays in place of differentiated arguments that are Python numbers, as in JAX."""
    types = (float, complex, int, bool) if allow_int else (float, complex)
    arguments = [*args, *kwargs.values()]
    number_operands = [
        i for i in {program.operand(w) for w in selectors if not is_path(w)} if type(arguments[i]) in types
    ]
    if not number_operands:
        return program
    # A program records its operands when it is made: one around arrays is another program.
    for i in number_operands:
        arguments[i] = jnp.asarray(arguments[i])
    count = len(args)
    return Program(program.name, [fun], arguments[:count], dict(zip(kwargs, arguments[count:], strict=True)))


def _parse_wrt(name: str, argnums: object, wrt: Wrt) -> tuple[list[int | str], bool]:
    """Reads `argnums` and `wrt`: (positions, names and patterns; whether a single one was passed)."""
    option = "argnums" if wrt is None or callable(wrt) or as_filter(wrt) is not None else "wrt"
    selection: Any = argnums if option == "argnums" else wrt
    single = isinstance(selection, str) or not isinstance(selection, Iterable)
    selectors: list[int | str] = []
    for selector in cast("Iterable[Any]", [selection] if single else selection):
        # A library's selector, such as `nnx.DiffState`, is an argument with a filter: `_filter_by_library` applies it.
        library = interop.differentiated(selector)
        if library is not None:
            selectors.append(library[0])
            continue
        try:
            selectors.append(
                selector if isinstance(selector, str) and option == "wrt" else operator.index(cast("Any", selector))
            )
        except TypeError:
            raise TypeError(WRT_TYPE.format(name=name, option=option, actual=selector)) from None
    return selectors, single


def _choose_leaves(
    program: Program,
    selectors: list[int | str],
    single: bool,
    argnums: int | Sequence[int],
    wrt: Wrt,
    allow_int: bool,
    like_equinox: bool,
) -> Chosen:
    """Chooses the leaves to differentiate, and the operands that the derivative is structured like.

    Warns if the function can use these leaves through something else, which counts in the derivative as well.
    """
    # Filters and predicates select within the arguments of `argnums`; any other `wrt` takes the place of `argnums`.
    leaf_filter = as_filter(wrt, allow_path_functions=True)
    predicate = wrt if callable(wrt) and leaf_filter is None else None
    if wrt is not None and leaf_filter is None and predicate is None and argnums != 0:
        raise ValueError(WRT_AND_ARGNUMS.format(name=program.name, argnums=argnums, wrt=wrt))
    patterns = [w for w in selectors if isinstance(w, str) and is_path(w)]
    roots = [program.operand(w) for w in selectors if w not in patterns]
    # A number and a name may mean the same argument.
    if len(set(roots)) != len(roots):
        raise ValueError(WRT_TWICE.format(name=program.name, wrt=selectors))
    candidates = program.leaves_below(roots)
    # Patterns choose leaves of all arguments; positions, names and filters narrow the candidates below their arguments.
    usable = [i for i, leaf in enumerate(program.leaves) if is_inexact(leaf) or (allow_int and not is_key(leaf))]
    covered = _covered(program, patterns, set(usable)) if patterns else {}
    if like_equinox:
        candidates = candidates - leaves_in_functions(program.graphdef)
    if leaf_filter is not None:
        candidates = candidates & RecordedView(program.graphdef, program.leaves).selected_leaves(leaf_filter)
    if wrt is None:
        candidates = _filter_by_library(program, argnums, candidates)
    leaves = [i for i in usable if i in candidates or i in covered]
    if predicate is not None:
        leaves = [i for i in leaves if predicate(program.leaves[i])]
    # The derivative is also structured like each argument in which a pattern has matched.
    matched = {root for i in leaves for root in covered.get(i, ())}
    roots += sorted(matched.difference(roots))
    if not leaves and not like_equinox:
        searched = ", ".join([*(program.names[root] for root in roots), *patterns]) or "no argument"
        raise TypeError(NOTHING_TO_DIFFERENTIATE.format(name=program.name, where=searched))
    if not like_equinox:
        warn_of_other_uses(program, set(leaves), roots)
    return Chosen(program.graphdef, tuple(leaves), tuple(roots), single and len(roots) == 1)


def _filter_by_library(program: Program, argnums: Any, candidates: set[int]) -> set[int]:
    """Narrows the candidates where `argnums` is a library's own selector, such as `nnx.DiffState`."""
    entries = [argnums] if not isinstance(argnums, Iterable) else cast("Iterable[Any]", argnums)
    adapted = [(entry, interop.differentiated(entry)) for entry in entries]
    if not any(library for _, library in adapted):
        return candidates
    recorded, leaves = RecordedView(program.graphdef, program.leaves), set[int]()
    for entry, library in adapted:
        part = program.leaves_below([program.operand(entry if library is None else library[0])])
        leaf_filter = None if library is None else as_filter(library[1])
        leaves |= part if leaf_filter is None else part & recorded.selected_leaves(leaf_filter)
    return leaves


def _covered(program: Program, patterns: Sequence[str], usable: set[int]) -> dict[int, set[int]]:
    """Maps each leaf that a pattern covers to the operands in which it does.

    Raises:
        ValueError: if a pattern chooses nothing: a misspelled name must not be ignored silently.
    """
    finder = CoverFinder(program.graphdef, program.names)
    operands_of: dict[int, set[int]] = {}
    for text in patterns:
        pattern = argument_pattern(text, program.name, "wrt=")
        missed = True
        for root in range(program.operands):
            # One operand after the other, since a shared leaf counts for each in which the pattern covers it.
            for index in finder.cover(pattern, (root,)).leaves:
                leaf = finder.leaf(index)
                operands_of.setdefault(leaf, set()).add(root)
                missed = missed and leaf not in usable
        if missed:
            usable_paths = (key_path for i, key_path in enumerate(program.key_paths) if i in usable)
            close_paths = nearest(text, (p.name for p in usable_paths if p.root < program.operands)) or "no array"
            raise ValueError(WRT_UNUSED.format(name=program.name, pattern=text, paths=close_paths))
    return operands_of
