# SPDX-License-Identifier: Apache-2.0
"""The options of `jit` as one frozen record."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from graftax._graph.types.describe import static_classes
from graftax._jit.repeated_option import Selection

NumberPolicy = Literal["symbolic", "static"]


class FilterJitOptions(TypedDict, total=False):
    """The keyword arguments of `filter_jit`."""

    donate: str | int | Sequence[str | int] | None
    dynamic: str | int | Sequence[str | int] | None
    ignore: Any
    cache_size: int
    in_shardings: Any
    out_shardings: Any
    keep_unused: bool
    inline: Any
    compiler_options: dict[str, Any] | None
    warn_impure: bool
    numbers: NumberPolicy | Mapping[str, NumberPolicy]


class JitOptions(FilterJitOptions, total=False):
    """The keyword arguments of `jit`."""

    mutation: Literal["propagate", "error", "discard"]
    repeated: Any
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Iterable[str] | None
    check: bool
    progress: bool | Callable[[str, float], Any]
    background: bool
    branches_ahead: bool


class RecordOptions(TypedDict, total=False):
    """The keyword arguments of `record`."""

    last: int
    nonfinite: bool | str | Sequence[str]
    on: type[BaseException] | tuple[type[BaseException], ...]
    copy_every: int
    before: bool
    dir: str | os.PathLike[str]


MUTATION = ("propagate", "error", "discard")
NUMBERS = ("symbolic", "static")
DONATE = ("all", "all-except-first", "warn", "warn-except-first", "none", "auto")  # Equinox's words, and our "auto"

NOT_A_NUMBER_POLICY = (
    "numbers={numbers!r}: expected 'symbolic' or 'static', or a dict from patterns of key paths to these"
)

AUTO_BY_VALUE = (
    "donate='auto' donates the arrays that a call replaces in the caller's objects, and with mutation={mutation!r} (as "
    "in filter_jit) it replaces none. Name what may be donated (donate='all', names, positions, patterns), or use "
    "graftax.jit with mutation='propagate'."
)
AUTO_WITH_OTHERS = (
    "donate='auto' finds out by itself what can be donated: leave out donate_argnums and donate_argnames, or name all "
    "of it in donate=."
)
BACKGROUND_WITH = (
    "background=True evaluates a first call while its program is compiled, which cannot be done with {option}: {why}. "
    "Leave out one of the two."
)


_TIMING = {"background": False, "branches_ahead": False}  # options that say when programs are made, and not which


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of one `jit`. Hashable: two `jit(f)` with equal options share one table.

    What is not compared changes neither programs nor what an entry depends on, so tables are shared in spite of it.
    """

    mutation: str = "propagate"
    warn_lost: bool = False  # filter_jit: warn once about a change that is dropped
    captured: bool = True  # the function's closure and globals are part of the program
    as_jax: bool = False  # numbers of the caller, results and donated arrays become what `jax.jit` makes of them
    replaces: bool = False  # the function was written for another `jit`, where it changes captured objects once a trace
    check: bool = dataclasses.field(default=False, compare=False)  # run the plain function alongside
    progress: Any = dataclasses.field(default=False, compare=False)  # report the stages of a compilation
    warn_impure: bool = dataclasses.field(default=False, compare=False)  # warn about calls that cannot be repeated
    numbers: str = "static"  # "symbolic": Python numbers that change between calls do not compile
    number_patterns: tuple[tuple[str, str], ...] = ()  # (pattern of key paths, "symbolic" or "static" from the start)
    background: bool = False  # a first call does not wait for the compiler
    branches_ahead: bool = False  # programs for other outcomes of tests on numbers are made before they are needed
    cache_size: int = 512
    static: tuple[int | str, ...] = ()
    donate: tuple[int | str, ...] = ()
    donate_word: str = "none"
    dynamic: tuple[int | str, ...] = ()
    ignore: tuple[Any, ...] = ()  # patterns, types, filters, predicates
    in_shardings: Any = None
    out_shardings: Any = None
    keep_unused: bool = False
    inline: Any = False  # or one of `jax.Inline`
    compiler_options: tuple[tuple[str, Any], ...] = ()
    finite: tuple[str, ...] | None = None  # patterns of the results that a recorder checks; (): all; None: none
    repeated: bool | str | tuple[Any, ...] = "auto"  # classes, methods and functions; True; "auto"; (): none

    def __post_init__(self) -> None:
        if self.mutation not in MUTATION:
            raise ValueError(f"mutation={self.mutation!r}: expected one of {', '.join(map(repr, MUTATION))}")
        if self.donate_word == "auto" and self.mutation != "propagate":
            raise ValueError(AUTO_BY_VALUE.format(mutation=self.mutation))
        if self.donate_word == "auto" and self.donate:
            raise ValueError(AUTO_WITH_OTHERS)
        Selection(self.repeated)  # raises for what it cannot select
        if self.background and (self.donate or self.donate_word != "none"):
            why = "arrays would be deleted from the second call on, and not by the first"
            raise ValueError(BACKGROUND_WITH.format(option="donate", why=why))
        if self.background and (self.in_shardings is not None or self.out_shardings is not None):
            why = "only a compiled program places arrays as they say"
            raise ValueError(BACKGROUND_WITH.format(option="in_shardings or out_shardings", why=why))
        if self.cache_size < 1:
            raise ValueError(f"cache_size={self.cache_size}: expected at least 1")

    @property
    def donates(self) -> bool:
        """Does the user name arrays to donate? They are donated even if somebody else has them."""
        return bool(self.donate) or self.donate_word not in ("none", "auto")

    @property
    def donates_proven(self) -> bool:
        """Does a call donate the arrays that it replaces and that nobody else has?"""
        return self.donate_word == "auto" and not (self.check or self.shards)

    @property
    def warns_impure(self) -> bool:
        return self.warn_impure and not self.check  # `check` compares the effects of such calls

    @property
    def shards(self) -> bool:
        return self.in_shardings is not None or self.out_shardings is not None or bool(self.compiler_options)

    @property
    def by_value(self) -> bool:
        return self.mutation == "discard"

    def of_program(self) -> str:
        """The options that a program depends on, as a text that is the same in every process."""
        # These change no result, and the text of a function in `repeated` has its address.
        return str(dataclasses.replace(self, progress=False, warn_impure=True, repeated=(), **_TIMING))


# A jitted function that is bound to an object has its options as a part of its structure.
static_classes.add(Options)


def names_and_numbers(numbers: int | Iterable[int] | None, names: str | Iterable[str] | None) -> tuple[int | str, ...]:
    """JAX's `*_argnums` and `*_argnames` merged into one tuple."""
    arguments: list[int | str] = []
    if numbers is not None:
        arguments += [numbers] if isinstance(numbers, int) else list(numbers)
    if names is not None:
        arguments += [names] if isinstance(names, str) else list(names)
    return tuple(arguments)


def one_or_more(chosen: Any) -> tuple[Any, ...]:
    """The value of an option that takes one name or position, or several, as a tuple."""
    if chosen is None:
        return ()
    return (chosen,) if isinstance(chosen, (int, str)) else tuple(chosen)


def several(chosen: Any) -> tuple[Any, ...]:
    """The value of an option that takes one specification, or a tuple or a list of them, as a tuple."""
    if chosen is None:
        return ()
    return tuple(chosen) if type(chosen) in (tuple, list) else (chosen,)


def number_options(numbers: object) -> dict[str, Any]:
    """`numbers=` (a word, or a word for each pattern of key paths) as fields of `Options`."""
    by_pattern = isinstance(numbers, Mapping)
    patterns: tuple[tuple[Any, Any], ...] = tuple(numbers.items()) if by_pattern else ()
    word = "symbolic" if by_pattern else numbers
    if word not in NUMBERS or not all(isinstance(p, str) and policy in NUMBERS for p, policy in patterns):
        raise ValueError(NOT_A_NUMBER_POLICY.format(numbers=numbers))
    return {"numbers": word, "number_patterns": patterns}


def donation(
    donate: str | int | Sequence[str | int] | None,
    numbers: int | Iterable[int] | None,
    names: str | Iterable[str] | None,
) -> dict[str, Any]:
    """`donate=` (a word, names or positions) together with JAX's spellings, as fields of `Options`."""
    chosen = names_and_numbers(numbers, names)
    if donate is None:
        return {"donate": chosen}
    if isinstance(donate, str) and donate in DONATE:
        return {"donate": chosen, "donate_word": donate}
    return {"donate": (*chosen, *one_or_more(donate))}


def is_path(argument: int | str) -> bool:
    """Is it a pattern of key paths (`state.opt`, `**.bias`) and not a position or a name?"""
    return isinstance(argument, str) and not argument.isidentifier()


def split_patterns(chosen: Sequence[int | str]) -> tuple[tuple[int | str, ...], tuple[str, ...]]:
    """(positions and names of arguments, patterns of key paths)."""
    patterns = tuple(c for c in chosen if isinstance(c, str) and is_path(c))
    return tuple(c for c in chosen if c not in patterns), patterns
