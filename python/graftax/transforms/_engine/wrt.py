# SPDX-License-Identifier: Apache-2.0
"""What is differentiated: leaves, by operand, name, pattern, filter or predicate."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax.numpy as jnp

from graftax import _core, interop
from graftax._graph.filters import Recorded, filter_of
from graftax._graph.patterns import Covering, nearest, of_arguments
from graftax._jit.options import is_path
from graftax.transforms._engine.lift import Make, name_of
from graftax.transforms._engine.opaque_leaves import leaves_in_functions
from graftax.transforms._engine.program import Program
from graftax.transforms._engine.tangents import is_inexact, is_key

WRT_TYPE = (
    "{name}: {option}={given!r} says of no argument that it is differentiated. Give argnums= positions of arguments, "
    "wrt= positions, names, patterns of key paths, types, or a predicate of arrays."
)
WRT_TWICE = "{name}: wrt={wrt!r} names an argument twice."
NOTHING_TO_DIFFERENTIATE = (
    "{name}: there is no array of a floating dtype to differentiate in {where}. Integers have no derivative (pass 3.0 "
    "for 3, or allow_int=True for zeros of no dtype), and Python numbers inside of an argument are static: make them "
    "arrays (jnp.asarray), or name another argument with argnums= or wrt=."
)
WRT_UNUSED = (
    "{name}: the pattern {pattern!r} of wrt= covers no floating array of the arguments. There is: {paths}. .w is an "
    "attribute, [w] a key."
)
WRT_AND_ARGNUMS = (
    "{name}: argnums={argnums!r} and wrt={wrt!r} both say what to differentiate. Give one of them; wrt= takes "
    "positions, too."
)


OfArrays = type[Any] | tuple[type[Any], ...] | Callable[[Any], object] | None  # which arrays, not which argument
Wrt = Any  # int | str | type | a library's filter | ... | several of these | a predicate of arrays | None


class Chosen(NamedTuple):
    """What is differentiated: leaves of a program, and the operands whose graphs the derivative is given as.

    Nothing of the caller's objects is in it: a derivative asked for later does not keep them alive.
    """

    graphdef: _core.GraphDef
    leaves: tuple[int, ...]
    roots: tuple[int, ...]
    single: bool  # one graph, not a tuple of them

    def graphs(self, values: Sequence[Any]) -> Any:
        """Graphs like the operands, with these values in place of the chosen leaves and None in place of others.

        What is a leaf for JAX and holds no array (a string, a function, a config) is None too, so that the gradient of
        a pytree has the structure that Optax expects; registered nodes, static fields and aux data stay.
        """
        leaves: list[Any] = [None] * self.graphdef.num_leaves
        for i, value in zip(self.leaves, values, strict=True):
            leaves[i] = value
        built = _core.unflatten_roots(self.graphdef, leaves, True)
        graphs = [built[root] for root in self.roots]
        return graphs[0] if self.single else tuple(graphs)


def program_by(
    make: Make,
    fun: Callable[..., Any],
    title: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    by: Sequence[int | str],
    allow_int: bool = False,
) -> Program:
    """The program of a call. A Python number that is itself differentiated is an array in it, as in JAX."""
    name = name_of(fun, title)
    program = make(name, [fun], args, kwargs)
    if make is not Program:
        return program
    types = (float, complex, int, bool) if allow_int else (float, complex)
    given = [*args, *kwargs.values()]
    at = [i for i in {program.operand(w) for w in by if not is_path(w)} if type(given[i]) in types]
    if not at:
        return program
    for i in at:
        given[i] = jnp.asarray(given[i])
    count = len(args)
    return make(name, [fun], given[:count], dict(zip(kwargs, given[count:], strict=True)))


def chosen_by(name: str, argnums: Any, wrt: Wrt) -> tuple[list[int | str], bool]:
    """(positions, names and patterns that say what is differentiated; is it one of them, not a sequence)."""
    option = "argnums" if wrt is None or callable(wrt) or filter_of(wrt) is not None else "wrt"
    given: Any = argnums if option == "argnums" else wrt
    single = isinstance(given, str) or not isinstance(given, Iterable)
    wanted: list[int | str] = []
    for one in cast("Iterable[Any]", [given] if single else given):
        library = interop.differentiated(one)
        if library is not None:
            wanted.append(library[0])
            continue
        try:
            wanted.append(one if isinstance(one, str) and option == "wrt" else operator.index(cast("Any", one)))
        except TypeError:
            raise TypeError(WRT_TYPE.format(name=name, option=option, given=one)) from None
    return wanted, single


def choose(
    program: Program, argnums: int | Sequence[int], wrt: Wrt, allow_int: bool = False, filtered: bool = False
) -> Chosen:
    """Which leaves are differentiated, and by which operands' graphs.

    `filtered`: as Equinox's transforms choose, which may be nothing, and nothing that functions capture.
    """
    kept = filter_of(wrt, of_path=True)
    predicate = wrt if callable(wrt) and kept is None else None
    wanted, single = chosen_by(program.name, argnums, wrt)
    if wrt is not None and kept is None and predicate is None and argnums != 0:
        raise ValueError(WRT_AND_ARGNUMS.format(name=program.name, argnums=argnums, wrt=wrt))
    patterns = [w for w in wanted if isinstance(w, str) and is_path(w)]
    roots = [program.operand(w) for w in wanted if w not in patterns]
    if len(set(roots)) != len(roots):
        raise ValueError(WRT_TWICE.format(name=program.name, wrt=wanted))
    below = program.below(roots)
    usable = [i for i, leaf in enumerate(program.leaves) if is_inexact(leaf) or (allow_int and not is_key(leaf))]
    covered = _covered(program, patterns, set(usable)) if patterns else {}
    leaves: list[int] = []
    if filtered:
        below = below - leaves_in_functions(program.graphdef)
    if kept is not None:
        below = below & Recorded(program.graphdef, program.leaves).chosen(kept)
    if wrt is None:
        below = _below_filtered(program, argnums, below)
    for i in usable:
        if not (i in below or i in covered) or (predicate is not None and not predicate(program.leaves[i])):
            continue
        leaves.append(i)
    matched = {root for i in leaves for root in covered.get(i, ())}
    roots += sorted(matched.difference(roots))
    if not leaves and not filtered:
        where = ", ".join([*(program.names[root] for root in roots), *patterns]) or "no argument"
        raise TypeError(NOTHING_TO_DIFFERENTIATE.format(name=program.name, where=where))
    return Chosen(program.graphdef, tuple(leaves), tuple(roots), single and len(roots) == 1)


def _below_filtered(program: Program, argnums: Any, below: set[int]) -> set[int]:
    """Of the leaves of the arguments those that the library's own words for an argument leave."""
    each = [argnums] if not isinstance(argnums, Iterable) else cast("Iterable[Any]", argnums)
    found = [(one, interop.differentiated(one)) for one in each]
    if not any(library for _, library in found):
        return below
    seen, leaves = Recorded(program.graphdef, program.leaves), set[int]()
    for one, library in found:
        part = program.below([program.operand(one if library is None else library[0])])
        kept = None if library is None else filter_of(library[1])
        leaves |= part if kept is None else part & seen.chosen(kept)
    return leaves


def _covered(program: Program, patterns: Sequence[str], usable: set[int]) -> dict[int, set[int]]:
    """The leaves that patterns cover, and for each the operands in which they do.

    Raises:
        ValueError: where a pattern chooses nothing: a name that is spelt wrong would be left out without a word.
    """
    covering = Covering(program.graphdef, program.names)
    found: dict[int, set[int]] = {}
    for text in patterns:
        pattern = of_arguments(text, program.name, "wrt=")
        missed = True
        for root in range(program.operands):
            for at in covering.of(pattern, (root,)).leaves:
                leaf = covering.leaf(at)
                found.setdefault(leaf, set()).add(root)
                missed = missed and leaf not in usable
        if missed:
            places = (place for i, place in enumerate(program.places) if i in usable)
            there = nearest(text, (p.name for p in places if p.root < program.operands)) or "no array"
            raise ValueError(WRT_UNUSED.format(name=program.name, pattern=text, paths=there))
    return found
