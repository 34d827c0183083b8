# SPDX-License-Identifier: Apache-2.0
"""What was compiled for one structure, as another process loads it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from graftax import _core
from graftax._capture.numbers.host_program import HostProgram
from graftax._explain import ArraySignature, Variant, array_signatures
from graftax._export.programs import Program, Shipped, signature_token
from graftax._export.structure_data import Structured
from graftax._graph.structure import place_name
from graftax._jax import cache_of_jax, fast_dispatch
from graftax._jit.leaf_guards import LeafGuards
from graftax._jit.multihost_check import digest, program_text

OTHER_SETTINGS = (
    "it was compiled under other settings of JAX, or for arrays that are placed differently. Call it under these "
    "settings"
)
READS_UNKNOWN = (
    "{name} cannot be saved: what the function of filter_jit reads outside of its arguments is fixed when it is "
    "traced, as in JAX, and not known. graftax.jit(f, mutation='discard') works by value, and can be."
)


@dataclasses.dataclass
class Saved:
    """What was compiled for one structure: its Outcomes, and an executable for each signature of the leaves."""

    outcomes: list[_core.Outcome]
    programs: list[Program]
    host: HostProgram | None = None  # of its symbolic numbers
    number_paths: frozenset[str] = frozenset()  # the key paths of the symbolic numbers
    structure: Structured | None = None
    numbers: list[list[tuple[int, int]]] = dataclasses.field(default_factory=list[list[tuple[int, int]]])  # of Outcomes
    guards: LeafGuards = dataclasses.field(default_factory=LeafGuards)
    source: str = "loaded"  # a kind of cause: where it was loaded from

    def __getstate__(self) -> dict[str, Any]:
        # Whoever reads a file knows what kind of file it is.
        return {name: value for name, value in vars(self).items() if name != "source"}

    def restore_numbers(self) -> None:
        """Gives the Outcomes the numbers that their pickles lack."""
        for outcome, numbers in zip(self.outcomes, self.numbers, strict=True):
            outcome.numbers = numbers


def saved_entry(entry: _core.Entry, programs: list[Program], graphdef: _core.GraphDef, names: tuple[str, ...]) -> Saved:
    """An entry with these programs of it, without its structure."""
    host: HostProgram | None = entry.host
    places = graphdef.leaf_places()
    paths = frozenset(place_name(places[leaf], names) for leaf in (host.leaves if host is not None else ()))
    outcomes = list(entry.outcomes)
    numbers = [outcome.numbers for outcome in outcomes]
    return Saved(outcomes, programs, host, paths, None, numbers, LeafGuards.of(entry))


def compiled_programs(
    entry: _core.Entry, variants: Iterable[Variant], settings: dict[str, str]
) -> tuple[list[Program], list[Variant]]:
    """The programs of an entry that were compiled under these settings, with their variants."""
    programs: list[Program] = []
    variants_of_programs: list[Variant] = []
    for variant in variants:
        if variant.entry() is not entry or not variant.has_program:
            continue
        signatures = _executable_signatures(entry.host, variant.signatures)
        tokens = tuple(map(signature_token, signatures))
        if None in tokens or not variant.was_compiled_under(settings):
            continue
        # An equal program was compiled before: its executable serves both.
        stage = entry.compiled.reused_stage(signatures) if variant.is_reused else None
        if variant.is_reused and stage is None:
            continue
        lowered = _lowered(entry, signatures)
        stage = stage or lowered.compile()
        was_retrieved = cache_of_jax.may_be_loaded(stage) if variant.is_reused else variant.was_retrieved
        devices, text_digest = fast_dispatch.devices_of(stage), digest(program_text(lowered).encode())
        program = Program(tokens, settings, devices, text_digest, stage, was_retrieved=was_retrieved)
        if isinstance(entry.compiled, Shipped) and not was_retrieved:
            program.parts = entry.compiled.parts_of(stage)
        programs.append(program)
        variants_of_programs.append(variant)
    return programs, variants_of_programs


def _executable_signatures(
    host: HostProgram | None, recorded: tuple[ArraySignature, ...]
) -> tuple[ArraySignature, ...]:
    """The signatures of an executable's inputs: symbolic numbers are replaced by vectors that the host computes."""
    if host is None:
        return recorded
    # The executable ignores the leaves that were numbers, and each call passes an int32 there.
    no_leaf, *vectors = array_signatures([np.int32(0), *host.vectors((), ())])
    return (*(no_leaf if leaf in host.leaves else signature for leaf, signature in enumerate(recorded)), *vectors)


def _lowered(entry: _core.Entry, signatures: tuple[ArraySignature, ...]) -> Any:
    """The lowered program for these signatures, from JAX's caches: nothing is traced or compiled again."""
    specs = [
        jax.ShapeDtypeStruct(
            signature.shape,
            signature.dtype,
            weak_type=signature.weak,
            sharding=signature.sharding if signature.committed else None,
        )
        for signature in signatures
    ]
    with warnings.catch_warnings():
        # JAX warns of donated arrays that it cannot use. It did so when the program was first compiled.
        warnings.simplefilter("ignore")
        return entry.compiled.lower(tuple(specs)) if entry.tupled else entry.compiled.lower(*specs)
