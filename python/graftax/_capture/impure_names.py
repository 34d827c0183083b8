# SPDX-License-Identifier: Apache-2.0
"""Does code name functions that a compiled function cannot repeat, and where does its bytecode call them?"""

from __future__ import annotations

import builtins
import itertools
import os
import sys
import types
from typing import Any, NamedTuple

from graftax._base.missing import MISSING
from graftax._capture.bytecode import Names, instructions_of, pushes_null
from graftax._capture.impure_functions import (
    NOW,
    Call,
    Table,
    call_of,
    is_console,
    is_date,
    is_impure_module,
    known_functions,
    read_of,
)

HAS_MONITORING = sys.version_info >= (3, 12)
ANYWHERE = -1
Offsets = dict[int, "Call | None"]  # where code calls such functions, and which; at ANYWHERE, at an unknown place


class LookupScope(NamedTuple):
    """Where the names of one code object are looked up."""

    code: types.CodeType
    scope: dict[str, Any]
    cells: dict[str, Any]
    names: Names  # that the code has

    def value(self, chain: tuple[str, ...]) -> Any:
        """What a chain of names leads to, or the first object on its way that is not a module; else MISSING."""
        name, *attributes = chain
        if name in self.names.imports:
            value = sys.modules.get(self.names.imports[name], MISSING)
        elif name in self.cells:
            value = self.cells[name]
        elif name in self.code.co_freevars:
            return MISSING
        else:
            value = self.scope.get(name, vars(builtins).get(name, MISSING))
        for attribute in attributes:
            if isinstance(value, types.ModuleType):
                value = vars(value).get(attribute, MISSING)
            else:  # the class methods `now` and `today` are functions to look for; other attributes might run code
                return getattr(value, attribute) if is_date(value) and attribute in NOW else value
        return value


def _tells_itself(value: object) -> bool:
    """Is it the environment, a logger or the console? Their methods tell that they run, whatever calls them."""
    logging = sys.modules.get("logging")
    loggers = (logging.Logger, logging.LoggerAdapter) if logging is not None else ()
    return value is os.getenv or is_console(value) or issubclass(type(value), (type(os.environ), *loggers))


def _is_impure(value: object, table: Table) -> bool:
    """Is it a function that cannot be replayed, or an object that leads to some?"""
    if type(value) is types.ModuleType:
        return is_impure_module(value)
    return _tells_itself(value) or (type(value) in table.types and call_of(value) is not None)


def names_impure(scope: LookupScope) -> bool:
    """Does code name such a function, or a method that may be one?"""
    table = known_functions()
    for chain in scope.names.chains:
        value = scope.value(chain)
        if value is MISSING:  # a variable of an enclosing call that the trace itself runs
            if chain[0] in scope.code.co_freevars and chain[-1] in table.names:
                return True
        elif _is_impure(value, table):
            return True
    return _asks_for_a_method(scope, table)


def _asks_for_a_method(scope: LookupScope, table: Table) -> bool:
    """Does code name such a method, of an object that is known only when it runs (`self.logger`), or may have it?"""
    # The class is not known before the call, so the name of the method decides.
    method_names = scope.names.attributes & table.method_names
    if not method_names:
        return False
    chains = [chain for chain in scope.names.chains if not method_names.isdisjoint(chain[1:])]
    unknown = method_names.difference(*(chain[1:] for chain in chains))
    return bool(unknown) or any(_may_lead_to_a_method(scope.value(chain), table) for chain in chains)


def _may_lead_to_a_method(value: object, table: Table) -> bool:
    """May an object, or what it holds, have such a method?"""
    if isinstance(value, type):
        return issubclass(value, table.classes)
    # These have methods of the same names: `clear` of a dict, say, beside that of `threading.Event`.
    return type(value) not in (types.ModuleType, str, bytes, list, tuple, dict, set)


class ModuleRead(NamedTuple):
    """An attribute of a module that code reads, and cannot read again."""

    call: Call
    line: int
    module: str  # of the code


def module_reads(scope: LookupScope) -> list[ModuleRead]:
    """The attributes of modules that this code reads, and that are impure to read."""
    reads: list[ModuleRead] = []
    for first_name, name in dict.fromkeys((chain[0], chain[1]) for chain in scope.names.chains if len(chain) >= 2):
        read = read_of(scope.value((first_name,)), name)
        if read is not None:
            named = (instruction.positions for instruction in instructions_of(scope.code) if instruction.argval == name)
            lines = (positions.lineno for positions in named if positions is not None)
            line = next(filter(None, lines), scope.code.co_firstlineno)
            reads.append(ModuleRead(read, line, str(scope.scope.get("__name__"))))
    return reads


def calls_in(scope: LookupScope) -> Offsets:
    """Where this code can call such a function, as far as that is known before it runs."""
    if HAS_MONITORING:  # the interpreter reports each call, wherever it is
        return {ANYWHERE: None}
    offsets: Offsets = dict(_offsets_of_calls(scope))
    tells_itself = any(_tells_itself(scope.value(chain)) for chain in scope.names.chains)
    # Such a method tells itself that it runs, if the code that calls it is listened to. Where it does so is not known.
    if tells_itself or _asks_for_a_method(scope, known_functions()):
        offsets[ANYWHERE] = None
    return offsets


def _offsets_of_calls(scope: LookupScope) -> dict[int, Call]:  # unmeasured: of Python 3.11 alone
    """The offsets, in code of Python 3.11, at which such a function is loaded in order to be called."""
    calls: dict[int, Call] = {}
    chain: tuple[str, ...] = ()  # of names that led to the value on top of the stack
    is_called = has_null = False  # a null is pushed before what is called, or by the lowest bit of LOAD_GLOBAL
    module, imported = "", ()
    variables: dict[str, tuple[str, ...]] = {}  # local variables with imported names, as chains
    for instruction, following in itertools.pairwise(instructions_of(scope.code)):
        op, name = instruction.opname, instruction.argval
        if op in ("LOAD_ATTR", "LOAD_METHOD"):
            chain = (*chain, name) if chain else ()
        elif op in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_FAST", "LOAD_CLASSDEREF"):
            is_called = has_null or pushes_null(instruction)
            local = (name,) if name in scope.names.imports else ()
            chain = variables.get(name, local) if op == "LOAD_FAST" else (name,)
        else:
            if op == "IMPORT_NAME":
                module = name
            elif op == "IMPORT_FROM":
                imported = (f"from {module}", name)
            elif op == "STORE_FAST" and imported:
                variables[name], imported = imported, ()
            chain = ()
        has_null = op == "PUSH_NULL"
        call = call_of(scope.value(chain)) if chain and (is_called or op == "LOAD_METHOD") else None
        # `PRECALL` has the number of arguments: `default_rng(0)` gives the same numbers in each call.
        if call is not None and (not call.unseeded or (following.opname == "PRECALL" and not following.arg)):
            calls[instruction.offset] = call
    return calls
