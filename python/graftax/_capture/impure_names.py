# SPDX-License-Identifier: Apache-2.0
"""Does code name what a compiled function cannot repeat, and where does it call that, as far as its bytecode tells?"""

from __future__ import annotations

import builtins
import dis
import itertools
import os
import sys
import types
from typing import Any, NamedTuple

from graftax._base.missing import MISSING
from graftax._capture.bytecode import Names
from graftax._capture.impure_functions import (
    NOW,
    Call,
    Table,
    call_of,
    is_console,
    is_date,
    is_impure_module,
    known,
    read_of,
)

HAS_MONITORING = sys.version_info >= (3, 12)
ANYWHERE = -1
Offsets = dict[int, "Call | None"]


class LookupScope(NamedTuple):
    """Where the names of one code object are looked up."""

    code: types.CodeType
    scope: dict[str, Any]
    cells: dict[str, Any]
    imports: dict[str, str]

    def value(self, chain: tuple[str, ...]) -> Any:
        """What a chain of names leads to, or the first object on its way that is no module; MISSING without one."""
        name, *attributes = chain
        if name in self.imports:
            value = sys.modules.get(self.imports[name], MISSING)
        elif name in self.cells:
            value = self.cells[name]
        elif name in self.code.co_freevars:
            return MISSING
        else:
            value = self.scope.get(name, vars(builtins).get(name, MISSING))
        for attribute in attributes:
            if isinstance(value, types.ModuleType):
                value = vars(value).get(attribute, MISSING)
            else:
                return getattr(value, attribute) if is_date(value) and attribute in NOW else value
        return value


def _tells_itself(value: object) -> bool:
    """The environment or a logger: their methods run as Python's own code, whatever they are called through."""
    logging = sys.modules.get("logging")
    loggers = (logging.Logger, logging.LoggerAdapter) if logging is not None else ()
    return value is os.getenv or is_console(value) or issubclass(type(value), (type(os.environ), *loggers))


def _is_impure(value: object, table: Table) -> bool:
    """Is it what cannot be replayed, or leads to it?"""
    if type(value) is types.ModuleType:
        return is_impure_module(value)
    return _tells_itself(value) or (type(value) in table.types and call_of(value) is not None)


def names_impure(scope: LookupScope, names: Names) -> bool:
    table = known()
    for chain in names.chains:
        value = scope.value(chain)
        if value is MISSING:  # a variable of an enclosing call that the trace itself runs
            if chain[0] in scope.code.co_freevars and chain[-1] in table.names:
                return True
        elif _is_impure(value, table):
            return True
    return _asks_for_a_method(scope, names, table)


def _asks_for_a_method(scope: LookupScope, names: Names, table: Table) -> bool:
    """Does it name such a method, of what is known only when it runs (`self.logger`, say), or of what has one?"""
    method_names = names.attributes & table.method_names
    if not method_names:
        return False
    chains = [chain for chain in names.chains if not method_names.isdisjoint(chain[1:])]
    unknown = method_names.difference(*(chain[1:] for chain in chains))
    return bool(unknown) or any(_may_lead_to_a_method(scope.value(chain), table) for chain in chains)


def _may_lead_to_a_method(value: object, table: Table) -> bool:
    """May the first object in a chain of names that is no module, or what it holds, have such a method?"""
    if isinstance(value, type):
        return issubclass(value, table.classes)
    return type(value) not in (types.ModuleType, str, bytes, list, tuple, dict, set)


class ModuleRead(NamedTuple):
    """An attribute of a module that code reads, and cannot read again."""

    call: Call
    line: int
    module: str  # of the code


def module_reads(scope: LookupScope, names: Names) -> list[ModuleRead]:
    reads: list[ModuleRead] = []
    for first_name, name in dict.fromkeys((chain[0], chain[1]) for chain in names.chains if len(chain) >= 2):
        read = read_of(scope.value((first_name,)), name)
        if read is not None:
            named = (
                instruction.positions for instruction in dis.get_instructions(scope.code) if instruction.argval == name
            )
            lines = (positions.lineno for positions in named if positions is not None)
            line = next(filter(None, lines), scope.code.co_firstlineno)
            reads.append(ModuleRead(read, line, str(scope.scope.get("__name__"))))
    return reads


def calls_in(where: LookupScope, names: Names) -> Offsets:
    """Where this code can call such a function, as far as that is known before: at an offset, or at `ANYWHERE`."""
    if HAS_MONITORING:
        return {ANYWHERE: None}
    found: Offsets = dict(_offsets_of_calls(where))
    if _asks_for_a_method(where, names, known()) or any(_tells_itself(where.value(chain)) for chain in names.chains):
        found[ANYWHERE] = None
    return found


def _offsets_of_calls(where: LookupScope) -> dict[int, Call]:  # unmeasured: of Python 3.11 alone
    """Where, in code of Python 3.11, a call of such a function begins: its name is loaded in order to be called."""
    found: dict[int, Call] = {}
    chain: tuple[str, ...] = ()
    called = pushed = False
    module, imported = "", ()
    variables: dict[str, tuple[str, ...]] = {}
    all_of_it = [at for at in dis.get_instructions(where.code) if at.opname != "CACHE"]
    for at, following in itertools.pairwise(all_of_it):
        op = at.opname
        if op in ("LOAD_ATTR", "LOAD_METHOD"):
            chain = (*chain, at.argval) if chain else ()
        elif op in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_FAST", "LOAD_CLASSDEREF"):
            called = pushed or (op == "LOAD_GLOBAL" and bool((at.arg or 0) & 1))
            local = (at.argval,) if at.argval in where.imports else ()
            chain = variables.get(at.argval, local) if op == "LOAD_FAST" else (at.argval,)
        else:
            if op == "IMPORT_NAME":
                module = at.argval
            elif op == "IMPORT_FROM":
                imported = (f"from {module}", at.argval)
            elif op == "STORE_FAST" and imported:
                variables[at.argval], imported = imported, ()
            chain = ()
        pushed = op == "PUSH_NULL"
        call = call_of(where.value(chain)) if chain and (called or op == "LOAD_METHOD") else None
        if call is not None and (not call.unseeded or (following.opname == "PRECALL" and not following.arg)):
            found[at.offset] = call
    return found
