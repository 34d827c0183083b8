# SPDX-License-Identifier: Apache-2.0
"""Entries of programs that were loaded, made before a call asks for them: the first call is a hit."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import jax

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._capture.retrace_signals import NewReads
from graftax._explain import ArraySignature, Variant
from graftax._export.digest import digest, names_of_instances
from graftax._export.programs import Program, Token, fitting, shipped_entry
from graftax._export.structure_data import bound
from graftax._graph.structure import Structure
from graftax._jit.cache import FunctionTable
from graftax._jit.multihost_rendezvous import compares_hosts
from graftax._jit.number_policy import SymbolicNumbers

TAKEN_BACK = "arrays came that the programs of the file are not for"


class AtOnce:
    """Stands for the `jax.jit` object of such an entry. Where no program fits, the call begins anew without it."""

    def __init__(self, programs: Sequence[Program], tupled: bool, table: Any, key: Any) -> None:
        self._programs, self._tupled = programs, tupled
        self._table, self._key = weakref.ref(table), key

    def __call__(self, *given: Any) -> Any:
        stage = self.stage_for(given[0] if self._tupled else given)
        if stage is None:
            table = self._table()
            if table is not None:
                table.drop(self._key, TAKEN_BACK)
            raise NewReads
        return stage(*given)

    def stage_for(self, leaves: Sequence[Any]) -> Any:
        program = fitting(self._programs, leaves)
        return None if program is None else program.stage


@dataclasses.dataclass
class Unbound:
    """An entry that was loaded, whose placeholders are not known until the first call."""

    graphdef: _core.GraphDef
    context: Any
    saved: Any
    variants: list[Variant]
    named: dict[int, Any]  # objects of the placeholders' classes that are none


class ProgramsOfFiles:
    """What the files of `load_compiled` hold for one function: the `LoadedPrograms` of its table.

    Args:
        table: the function's, which holds this object.
        reads: the bindings that the programs depend on.
    """

    def __init__(self, table: FunctionTable, reads: _core.Reads) -> None:
        self._table = weakref.ref(table)
        self.reads = reads
        self._saved: dict[tuple[str, Any], list[Any]] = {}  # by digest and context
        self._unbound: list[Unbound] = []

    def add(self, caller: Any, fingerprint: str, context: Any, saved: Any) -> None:
        """Takes one structure of a file, and makes its entry where all of it, down to the code, is found here."""
        self._saved.setdefault((fingerprint, context), []).append(saved)
        name, table, structure = caller._plan.name, caller._table, saved.structure
        if structure is None or compares_hosts():
            return
        try:
            graphdef = structure.graphdef()
            known = digest(graphdef, structure.names, name) == fingerprint
            variants = [_variant(caller, graphdef, saved, program) for program in saved.programs]
        except Exception:  # the first call finds it by its fingerprint, or compiles
            return
        if known:
            rows = Structure(graphdef).rows
            named = names_of_instances({type(rows[number].own) for number in structure.unnamed})
            loaded = Unbound(graphdef, context, saved, variants, named)
            if structure.unnamed:
                self._unbound.append(loaded)
            else:
                self._place(table, loaded)

    def make_entry(self, roots: tuple[Any, ...], layout: tuple[Any, ...], context: Any) -> bool:
        """Makes the entry of what was loaded for such a call, with its placeholders. False: there is none.

        Each is bound once: the models of later calls find its program by its fingerprint.
        """
        table = self._table()
        if table is None:
            return False
        for i, loaded in enumerate(self._unbound):
            if loaded.context != context or (loaded.graphdef._layout or ()) != layout or not self.reads.holds():
                continue
            graphdef = bound(loaded.graphdef, loaded.saved.structure.unnamed, loaded.named, roots)
            if graphdef is not None:
                del self._unbound[i]
                weak = _core.weaken(graphdef)
                variants = [dataclasses.replace(variant, graphdef=weak) for variant in loaded.variants]
                self._place(table, dataclasses.replace(loaded, graphdef=graphdef, variants=variants))
                return True
        return False

    def find(
        self, recording: _core.Recording, context: Any, name: str, numbers: SymbolicNumbers | None = None
    ) -> Any | None:
        if not self._saved or not self.reads.holds():
            return None
        try:
            those = self._saved.get((digest(recording.graphdef, recording.names, name), context), [])
        except GraftaxError:  # it holds what has no name in another process
            return None
        if numbers is None:
            return next((one for one in those if one.host is None), None)
        values = [recording.leaves[leaf] for leaf in numbers.leaves]
        return next((o for o in those if o.host and o.host.leaves == numbers.leaves and o.host.serves(values)), None)

    def entry(
        self, entry: _core.Entry, context: Any, arguments: int, found: Any, numbers: SymbolicNumbers | None
    ) -> _core.Entry:
        return shipped_entry(entry, context, arguments, found, numbers)

    def runs_only(self, entry: _core.Entry) -> bool:
        return isinstance(entry.compiled, AtOnce)

    def forget_unbound(self) -> None:
        self._unbound = []

    def _place(self, table: Any, loaded: Unbound) -> None:
        graphdef, context, saved = loaded.graphdef, loaded.context, loaded.saved
        structure = saved.structure
        weak = _core.weaken(graphdef)
        key: tuple[Any, ...] = (weak, context)
        while key in table.entries:
            key = (*key[:2], key[2] + 1 if len(key) > 2 else 1)
        compiled = AtOnce(saved.programs, structure.tupled, table, key)
        outcomes = list(saved.outcomes)
        entry = _core.Entry(weak, context, compiled, outcomes, structure.arguments, structure.tupled)
        if saved.host is not None:
            entry.use_numbers(list(zip(saved.host.leaves, saved.host.kinds, strict=True)), saved.host)
            entry.evaluate = saved.host.compiled(len(outcomes))
        entry.tell(self.reads)
        table._promote(table.store(key, entry))
        for variant in loaded.variants:
            variant.set_entry(entry)
            table.history.loaded(variant)


def _variant(caller: Any, graphdef: _core.GraphDef, saved: Any, program: Program) -> Variant:
    """What an explanation says of it."""
    looks = list(map(_look, program.looks))
    numbers: dict[int, Any] = {}
    if saved.host is not None:
        numbers = {leaf: kind() for leaf, kind in zip(saved.host.leaves, saved.host.kinds, strict=True)}
        looks = looks[:-2]
    found = Variant.from_call(caller._plan.name, graphdef, saved.structure.names, (), caller._table.reads)
    return dataclasses.replace(found, signatures=tuple(looks), numbers=numbers)


def _look(token: Token) -> ArraySignature:
    shape, dtype, weak, place = token
    if place == "anywhere":
        return ArraySignature(shape, _dtype(dtype), weak, None, False)
    if place[0] != "on":
        raise ValueError(place)
    device = next(device for device in jax.devices() if device.id == place[1])
    return ArraySignature(
        shape, _dtype(dtype), weak, jax.sharding.SingleDeviceSharding(device, memory_kind=place[2]), True
    )


def _dtype(text: str) -> Any:
    with contextlib.suppress(TypeError):
        return jax.numpy.dtype(text)
    keys = jax.eval_shape(jax.random.key, 0).dtype
    if str(keys) != text:
        raise ValueError(text)
    return keys
