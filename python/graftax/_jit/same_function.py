# SPDX-License-Identifier: Apache-2.0
"""Functions that mean the same share their programs: a lambda in a loop, or a cell that is run again, compiles once.

Each function has its own table, with its own counts. What tables of equal functions have in common is a `Sharing`: what
their code reads, which of their numbers change, and their entries. `docs/internals/same-function.md` has the rules.
"""

from __future__ import annotations

import collections
import copyreg
import dis
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from graftax import _core
from graftax._capture.bytecode import nested_codes
from graftax._capture.code_owner import is_of_module
from graftax._capture.constant_values import has_defaults, is_empty
from graftax._capture.function_attributes import attribute_names
from graftax._capture.read_set import ReadSet
from graftax._jit.multihost_comparison import compares_hosts
from graftax._jit.number_policy import Numbers
from graftax._jit.options import Options

if TYPE_CHECKING:
    from graftax._jit.cache import FunctionTable

_MOST_IDLE_SHARINGS = 64
_MOST_IDLE_ENTRIES = 16  # of one sharing
_MOST_LEVELS = 4  # of containers and functions in a closure
_MOST_SEARCHED = 20_000  # objects that are searched; with more, it counts as holding objects of the user's
_HAS_DOCSTRING = 0x4000000  # a flag of code objects from Python 3.13 on
_CONSTANT = set(dis.hasconst)

# Code with these names may see its own text, its lines or its docstring.
_SEES_ITSELF = {
    *("__code__", "__doc__", "__annotations__", "__wrapped__", "__name__", "__qualname__", "__signature__"),
    *("_getframe", "currentframe", "f_back", "f_code", "f_lineno", "tb_lineno", "co_firstlineno", "__traceback__"),
    *("stack", "extract_stack", "format_exc", "print_exc", "warn", "signature", "getdoc", "getsource"),
    *("getsourcelines", "getsourcefile", "get_annotations", "get_type_hints"),
}
# Of these libraries nothing is the user's, whatever their objects are.
_LIBRARIES = {"graftax", "jax", "jaxlib", "numpy", *sys.stdlib_module_names}
_PROCESS_WIDE = type(jax.tree_util.default_registry)  # every `jax.jit` object refers to it
_ATOMS = (type(None), bool, int, float, complex, str, bytes, types.CodeType, types.BuiltinFunctionType, _PROCESS_WIDE)
_CONTAINERS = (tuple, list, dict, set, frozenset, types.CellType)


# ---- what makes two functions equal

_MEANINGS: weakref.WeakKeyDictionary[types.CodeType, dict[str, tuple[object, ...]]] = weakref.WeakKeyDictionary()


def meaning_of(code: types.CodeType) -> tuple[object, ...]:
    """What code does: equal for code that differs only in its file, its lines and its docstring."""
    # Code of two files may be equal, and one of them may look at its file.
    by_file = _MEANINGS.setdefault(code, {})
    meaning = by_file.get(code.co_filename)
    if meaning is None:
        meaning = by_file[code.co_filename] = _read_meaning(code)
    return meaning


def _read_meaning(code: types.CodeType) -> tuple[object, ...]:
    # Code that may look at its file, its lines or its docstring has them in its meaning.
    sees_itself = any(not _SEES_ITSELF.isdisjoint(nested.co_names) for nested in nested_codes(code))
    constants, flags = code.co_consts, code.co_flags
    location = (code.co_filename, code.co_firstlineno, tuple(code.co_positions()), constants) if sees_itself else ()
    return (
        tuple((i.opcode, _meaning_of_argument(i)) for i in dis.get_instructions(code)),
        code.co_name,
        code.co_qualname,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, flags & ~_HAS_DOCSTRING),
        (code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars),
        code.co_exceptiontable,
        location,
    )


def _meaning_of_argument(instruction: dis.Instruction) -> object:
    """The argument of an instruction; for a constant its value, since a docstring shifts the numbers of constants."""
    return _meaning_of_constant(instruction.argval) if instruction.opcode in _CONSTANT else instruction.arg


def _meaning_of_constant(constant: object) -> object:
    if isinstance(constant, types.CodeType):
        return meaning_of(constant)
    if isinstance(constant, tuple | frozenset):
        return type(constant), *map(_meaning_of_constant, constant)
    # 1, 1.0 and True are equal, and so are 0.0 and -0.0; a nan is not equal to itself.
    return type(constant), repr(constant) if type(constant) in (float, complex) else constant


def _key_of(function: object, options: Options) -> tuple[object, ...] | None:
    """A key that is equal for functions that share programs; None for a function that shares none."""
    if not isinstance(function, types.FunctionType) or not options.captured or compares_hosts():
        return None
    if not is_of_module(function.__globals__) or attribute_names(function) or has_defaults(function):
        return None
    if not _has_plain_closure(function, function.__globals__):
        return None
    names = function.__name__, function.__qualname__, function.__module__
    key = meaning_of(function.__code__), id(function.__globals__), names, options, options.check
    try:
        hash(key)
    except TypeError:  # an unhashable option
        return None
    return key


def _has_plain_closure(function: types.FunctionType, scope: dict[str, object], depth: int = 0) -> bool:
    """Is all that a closure holds data, or code of the same module?"""
    # A read set knows code by its text: it does not look again at equal code of another module, with other globals.
    return function.__globals__ is scope and all(
        not is_empty(cell) and _is_plain(cell.cell_contents, scope, depth) for cell in function.__closure__ or ()
    )


def _is_plain(value: Any, scope: dict[str, object], depth: int) -> bool:
    if isinstance(value, (types.NoneType, bool, int, float, complex, str, bytes)) or _is_array(value):
        return True
    if depth > _MOST_LEVELS:
        return False
    if isinstance(value, types.FunctionType):
        return not attribute_names(value) and _has_plain_closure(value, scope, depth + 1)
    if type(value) in (list, tuple, dict):
        items = [*value, *value.values()] if type(value) is dict else value
        return all(_is_plain(item, scope, depth + 1) for item in list(items))
    return False


# ---- what equal functions have in common


class Sharing:
    """What the tables of equal functions have in common. The tables own it."""

    # A weak collection cannot be gone over while another thread adds to it, so both are done under the lock.

    def __init__(self, make_read_set: Callable[[], ReadSet | None]) -> None:
        self.reads = make_read_set()
        self.numbers = Numbers()
        self._tables: weakref.WeakSet[FunctionTable] = weakref.WeakSet()
        self._entries: weakref.WeakValueDictionary[tuple[object, ...], _core.Entry] = weakref.WeakValueDictionary()
        self.impersonal: weakref.WeakSet[_core.Entry] = weakref.WeakSet()  # they hold no more than the read set does

    @property
    def is_shareable(self) -> bool:
        """May several functions share?"""
        # The contents of variables that only host functions read are compared for one function alone.
        return self.reads is not None and not self.reads.names.hidden

    def join(self, table: FunctionTable) -> tuple[list[FunctionTable], list[_core.Entry]]:
        """Adds a table. Returns the tables that were there before, and entries that the new one may run."""
        with _LOCK:
            earlier_tables = list(self._tables)
            self._tables.add(table)
            return earlier_tables, list(self.impersonal)

    def part_from(self, table: FunctionTable) -> None:
        """Removes a table."""
        with _LOCK:
            self._tables.discard(table)

    @property
    def has_several(self) -> bool:
        """Do several tables share?"""
        return len(self._tables) > 1

    def add(self, key: tuple[object, ...], entry: _core.Entry) -> None:
        """Adds an entry, which any function of the sharing may run."""
        with _LOCK:
            for number in range(_MOST_IDLE_ENTRIES):
                if self._entries.setdefault((*key[:2], number), entry) is entry:
                    return

    def entry_for(self, recording: _core.Recording, context: object) -> _core.Entry | None:
        """An entry of another function of the sharing that serves this recording."""
        if not self.is_shareable:
            return None
        for number in range(_MOST_IDLE_ENTRIES):
            entry = self._entries.get((recording.graphdef, context, number))
            if entry is not None and entry.serves(recording):
                return entry
        return None

    def entries(self) -> list[_core.Entry]:
        """The entries of all its functions."""
        with _LOCK:
            return [entry for reference in self._entries.valuerefs() if (entry := reference()) is not None]

    def discard(self, entry: _core.Entry) -> None:
        """No other function takes over this entry from now on: a table has dropped it."""
        with _LOCK:
            for key in [key for key, stored in self._entries.items() if stored is entry]:
                self._entries.pop(key, None)
            self.impersonal.discard(entry)
            idle = _IDLE.get(self)
            if idle is not None:
                idle[0][:] = [kept for kept in idle[0] if kept is not entry]

    def forget(self, entry: _core.Entry | None) -> None:
        """Drops an entry from every table that runs it."""
        with _LOCK:
            tables = list(self._tables)
        for table in tables:
            for key in [key for key, stored in list(table.entries.items()) if stored is entry]:
                table.drop(key)


_LOCK = threading.RLock()
_SHARINGS: weakref.WeakValueDictionary[tuple[object, ...], Sharing] = weakref.WeakValueDictionary()
# The entries that outlive their functions, least recently traced first, and what they hold of the user's modules.
_IDLE: collections.OrderedDict[Sharing, tuple[list[_core.Entry], _Held]] = collections.OrderedDict()


def sharing_of(function: Any, options: Options, make_read_set: Callable[[], ReadSet | None]) -> Sharing:
    """The sharing of a function under these options: that of an equal one, if there is one."""
    key = _key_of(function, options)
    if key is None:
        return Sharing(make_read_set)
    with _LOCK:
        sharing = _SHARINGS.get(key)
        if sharing is None or not sharing.is_shareable:
            sharing = _SHARINGS[key] = Sharing(make_read_set)
        elif sharing.reads is not None:
            sharing.reads.note_closure(function)
        return sharing


def entries_before_edit(function: object, options: Options) -> list[_core.Entry]:
    """The entries of functions with the same name and other code: an edit need not change every program."""
    key = _key_of(function, options)
    if key is None:
        return []
    with _LOCK:
        # All of the key but the meaning of the code is equal.
        sharings = [sharing for other, sharing in _SHARINGS.items() if other[1:] == key[1:] and other != key]
        entries = {id(entry): entry for sharing in sharings for entry in sharing.impersonal}
    return sorted(entries.values(), key=lambda entry: entry.used, reverse=True)[:_MOST_IDLE_ENTRIES]


def leave(sharing: Sharing) -> None:
    """No function joins this sharing from now on."""
    with _LOCK:
        for key in [key for key, joined in _SHARINGS.items() if joined is sharing]:
            del _SHARINGS[key]
        _IDLE.pop(sharing, None)


def keep(sharing: Sharing, entry: _core.Entry, reads: object) -> None:
    """Keeps an entry that was just traced for equal functions to come, if it holds no object of the user's."""
    # A function or a class that a module has under its own name may be held, for as long as the module has it.
    with _LOCK:
        if not any(joined is sharing for joined in _SHARINGS.values()):
            return
        modules: list[object] = list(sys.modules.values())  # code may put anything there
        scopes = {id(vars(module)) for module in modules if isinstance(module, types.ModuleType)}
        # Let go of what holds a module, a function or a class that has been replaced since.
        for idle in [idle for idle, (_, held) in _IDLE.items() if not held.is_there(scopes)]:
            del _IDLE[idle]
        before = _IDLE.pop(sharing, None)
        # Tables that join later may run the entry if it holds nothing but what the read set, which they have, holds
        # too.
        held = _Held()
        if not held.add([entry], scopes, besides=_core.Reads):
            sharing.impersonal.discard(entry)
            return
        sharing.impersonal.add(entry)
        # It outlives its function only if all that is kept with it holds no object of the user's.
        entries = [*(kept for kept in (before[0] if before else []) if kept is not entry), entry]
        if held.add((sharing.reads, sharing.numbers, reads, entries := entries[-_MOST_IDLE_ENTRIES:]), scopes):
            held.end_search()
            _IDLE[sharing] = entries, held
        while len(_IDLE) > _MOST_IDLE_SHARINGS:
            _IDLE.popitem(last=False)


def forget_idle() -> None:
    """Forgets the programs of functions that are gone."""
    with _LOCK:
        _IDLE.clear()


# ---- does an object hold others of the user's?


def _found_under(module: object, name: object) -> Any:
    """What a module has under a qualified name; None if there is nothing."""
    value: Any = sys.modules.get(module) if isinstance(module, str) else None
    for attribute in name.split(".") if isinstance(name, str) else ():
        value = None if value is None else vars(value).get(attribute) if hasattr(value, "__dict__") else None
        value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    return value


def _is_of_library(value: object) -> bool:
    module = getattr(value, "__module__", None)
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES


def _is_ours(function: types.FunctionType) -> bool:
    return _is_of_library(function) or not function.__globals__  # one that `definition_of` has made


class _Held:
    """What is held of the user's: modules, and functions and classes that modules have under their own names."""

    def __init__(self) -> None:
        self._scopes: set[int] = set()  # ids of the dicts of modules
        self._named: list[tuple[str, str, weakref.ref[object]]] = []
        self._visited: dict[int, object] = {}

    def is_there(self, scopes: set[int]) -> bool:
        """Do the modules with these dicts still have what is held?"""
        return self._scopes <= scopes and all(
            (value := ref()) is not None and _found_under(module, name) is value for module, name, ref in self._named
        )

    def add(self, roots: Iterable[object], scopes: set[int], besides: type = types.NoneType) -> bool:
        """Adds what these objects hold, in modules with these dicts. False if they hold anything else of the user's."""
        visited, todo = self._visited, list(roots)
        while todo:  # some hundred objects for each function that is compiled
            value = todo.pop()
            kind = type(value)
            if kind in _ATOMS or id(value) in visited or isinstance(value, (*_ATOMS, besides)):
                continue
            if kind is types.ModuleType or isinstance(value, types.ModuleType):
                value = vars(value)
                if id(value) in visited:
                    continue
            elif value is sys.modules or value is copyreg.dispatch_table:  # the process has them for ever
                continue
            visited[id(value)] = value
            if len(visited) > _MOST_SEARCHED:
                return False
            if id(value) in scopes:
                self._scopes.add(id(value))
            elif kind in _CONTAINERS:
                todo += gc.get_referents(value)
            elif isinstance(value, type) and _is_of_library(value):
                continue
            elif isinstance(value, type) or (isinstance(value, types.FunctionType) and not _is_ours(value)):
                if _found_under(value.__module__, value.__qualname__) is not value:
                    return False
                self._named.append((value.__module__, value.__qualname__, weakref.ref(value)))
            elif _is_array(value) or not _is_of_library(kind):
                return False
            else:
                todo += _referents_of(value)
        return True

    def end_search(self) -> None:
        self._visited = {}  # it would keep all of these alive


def _is_array(value: object) -> bool:
    return hasattr(type(value), "__array__") and hasattr(value, "dtype")


def _referents_of(value: object) -> Iterator[object]:
    if isinstance(value, types.FunctionType):  # of a library, whose globals hold nothing of the user's
        yield from (value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__)
    elif not isinstance(value, weakref.ref):
        yield from gc.get_referents(value)
