# SPDX-License-Identifier: Apache-2.0
"""What code names, as its instructions show: globals, attributes, imports, and how it uses them."""

from __future__ import annotations

import contextlib
import dis
import importlib.util
import sys
import types
import typing
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from graftax._graph.types.describe import LAZY_IMPORT

_WRITES = frozenset(("STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_GLOBAL"))


def is_asked_any_time(code: types.CodeType) -> bool:
    """Does graftax call this code at times of its own choosing? Then what it reads is a binding, never a root.

    A `__hash__` that counts its calls writes another value each time that graftax looks up a key.
    """
    # Most of them write nothing: then what they read may be a root, as in any other method.
    if code.co_name == "__hash__":
        return any(instruction.opname in _WRITES for instruction in instructions_of(code))
    return code.co_name == "__annotate__"


_NAMES: weakref.WeakKeyDictionary[types.CodeType, Names] = weakref.WeakKeyDictionary()
_ALL: weakref.WeakKeyDictionary[types.CodeType, tuple[tuple[str, ...], tuple[str, ...]]] = weakref.WeakKeyDictionary()
_NAMESPACES = ("DEREF", "CLASSDEREF", "GLOBAL", "NAME")
LOADS = frozenset(f"LOAD_{namespace}" for namespace in _NAMESPACES)
CHANGES = frozenset(f"{verb}_{namespace}" for verb in ("STORE", "DELETE") for namespace in _NAMESPACES)
# From Python 3.12 on, what a class body or an annotation reads from the scope around it.
_FROM_CLASS_BODY = ("LOAD_FROM_DICT_OR_DEREF", "LOAD_FROM_DICT_OR_GLOBALS")
_BY_TEXT = frozenset(
    ("getattr", "hasattr", "setattr", "delattr", "vars", "attrgetter", "methodcaller", "__getattribute__")
)
_OF_ALL_NAMES = frozenset(("dir", "getmembers", "attrgetter", "methodcaller", "format", "format_map", "getattr_static"))
_LONGEST_KEY = 40  # characters of a text that may be a key of a library's table of settings
# These do nothing, or belong to the instruction beside them.
_NO_OPERATION = frozenset(("PRECALL", "EXTENDED_ARG", "NOP", "RESUME", "COPY_FREE_VARS"))
_ASKS_BY_TEXT = frozenset(("getattr", "hasattr"))
_SETS_BY_TEXT = frozenset(("setattr", "delattr"))
_SETTERS = frozenset(("__setattr__", "__delattr__"))  # methods that do the same


def names_of(code: types.CodeType) -> Names:
    """What this code names. Each code object is read once."""
    names = _NAMES.get(code)
    if names is None:
        names = _NAMES[code] = Names(code)
    return names


_MOST_READ = 16
_READ: dict[int, tuple[weakref.ref[types.CodeType], tuple[dis.Instruction, ...]]] = {}  # by id, the newest last


def instructions_of(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    """What `dis` reads in code, which takes long. Code is asked several questions in a row, so the last are kept."""
    # By id, since equal code of two modules would share an entry. The reference tells whether the id was reused.
    entry = _READ.get(id(code))
    if entry is not None and entry[0]() is code:
        return entry[1]
    instructions = tuple(dis.get_instructions(code))
    key = id(code)
    _READ[key] = weakref.ref(code, lambda _: _READ.pop(key, None)), instructions
    for oldest in list(_READ)[:-_MOST_READ]:
        _READ.pop(oldest, None)
    return instructions


def operations_of(code: types.CodeType) -> list[dis.Instruction]:
    """Its instructions, without those that do nothing, or only belong to the next one."""
    return [instruction for instruction in instructions_of(code) if instruction.opname not in _NO_OPERATION]


def pushes_null(instruction: dis.Instruction) -> bool:
    """Is it the load of a global that pushes a null as well, for a call? The lowest bit of its argument says so."""
    return instruction.opname == "LOAD_GLOBAL" and bool((instruction.arg or 0) & 1)


def loads_method(instruction: dis.Instruction) -> bool:
    """Is it the load of an attribute for a call? From Python 3.12 on, the lowest bit says so; before, LOAD_METHOD."""
    is_marked = sys.version_info >= (3, 12) and instruction.opname == "LOAD_ATTR" and bool((instruction.arg or 0) & 1)
    return is_marked or instruction.opname == "LOAD_METHOD"


class Names:
    """What one code object names. The code of functions defined inside of it has names of its own."""

    def __init__(self, code: types.CodeType) -> None:
        self.chains: dict[tuple[str, ...], None] = {}  # (global, free variable or imported module, attribute, ...)
        self.imports: dict[str, str] = {}  # local variable -> module, with the dots of a relative import; "from m" -> m
        self.imported: dict[tuple[str, str], None] = {}  # (such a module, the name that is imported from it, or "")
        self.loaded: dict[str, None] = {}  # globals
        self.stored: dict[str, None] = {}  # globals that it assigns or deletes
        self.variables: set[str] = set()  # globals and variables of an enclosing call, read, assigned or deleted
        self.assigned: set[str] = set()  # variables of an enclosing call that it assigns
        self.attributes: set[str] = set()
        self.stored_attributes: set[str] = set()
        self.read_attributes: set[str] = set()
        self.texts: set[str] = set()  # attributes that it may name by a text, as `getattr` does
        self._chain: tuple[str, ...] = ()  # that led to the value on top of the stack; empty where no name did
        self._module = ""  # that `import m` has pushed, until a variable takes it
        self._from_module = ""  # the `m` of the last `from m import x`
        self._constants: tuple[Any, Any] = (None, None)  # the last two: level and names of an import
        instructions = instructions_of(code)
        for instruction in instructions:
            if instruction.opname != "COPY":  # a copy on top of the stack is what the chain led to
                self._read(instruction.opname, instruction.argval)
        # Does it match classes, by the names in their `__match_args__`? Does it ask of which classes an object is?
        self.matches = any(instruction.opname == "MATCH_CLASS" for instruction in instructions)
        self.asks_classes = self.matches or not self.loaded.keys().isdisjoint(("isinstance", "issubclass"))
        self._take_texts(code)
        # Attributes that it may ask `super()` for, and its short texts: keys, perhaps.
        self.of_super = frozenset(self.attributes) if "super" in self.loaded else frozenset[str]()
        self.literals = {text for text in texts_in(code.co_consts) if len(text) <= _LONGEST_KEY}
        # Does it ask for attributes by names that it computes, or for all names? Does it set some by such names?
        asks_for_all = not _OF_ALL_NAMES.isdisjoint({*self.loaded, *self.attributes})
        self.computes = asks_for_all or _computes_names(code, _ASKS_BY_TEXT)
        self.sets = not _SETTERS.isdisjoint(self.attributes) or _computes_names(code, _SETS_BY_TEXT)
        # A name alone is dropped where an attribute of it is read: following the longer chain notes it as well.
        for first in {chain[0] for chain in self.chains if len(chain) > 1}:
            self.chains.pop((first,), None)

    def _take_texts(self, code: types.CodeType) -> None:
        """Code with `getattr` or the like may name each attribute whose name is one of its texts."""
        # `match` names the keywords of a class pattern in a constant, too.
        if self.matches or not _BY_TEXT.isdisjoint({*self.loaded, *self.attributes}):
            self.texts = {text for text in texts_in(code.co_consts) if text.isidentifier()}
            self.attributes |= self.texts
            by_text = {*self.loaded, *self.attributes} & _BY_TEXT
            self.stored_attributes |= self.texts if by_text & _SETS_BY_TEXT else set()
            self.read_attributes |= self.texts if by_text - _SETS_BY_TEXT or self.matches else set()

    def _read(self, op: str, name: Any) -> None:
        """Reads one instruction. Whatever is not an attribute ends the chain of the value on top of the stack."""
        if op in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"):
            self._attribute(name, op in ("STORE_ATTR", "DELETE_ATTR"))
            return
        chain: tuple[str, ...] = ()
        # From Python 3.12 on, `super().name` is one instruction.
        if op.startswith("LOAD_SUPER"):
            self.attributes.add(name)
            self.read_attributes.add(name)
        elif op in LOADS:
            chain = (name,)
            self.chains[chain] = None
            self.variables.add(name)
            if op in ("LOAD_GLOBAL", "LOAD_NAME"):
                self.loaded[name] = None
        elif op in CHANGES or op in _FROM_CLASS_BODY:
            self.variables.add(name)
            if op.endswith("_GLOBAL"):
                self.stored[name] = None
            elif op == "STORE_DEREF":
                self.assigned.add(name)
        elif "LOAD_FAST" in op:  # from Python 3.13 on one instruction may load or store two variables
            names = name if isinstance(name, tuple) else (name,)
            if op.startswith("STORE_FAST"):
                self._imported(names[0])
            chain = (names[-1],) if names[-1] in self.imports else ()
        elif op == "IMPORT_NAME":
            level, names = self._constants
            name = "." * (level if isinstance(level, int) else 0) + name
            self._module, self._from_module = ("", name) if names else (name, "")
            self.imported[name, ""] = None
        elif op == "IMPORT_FROM" and self._from_module:  # else it is the `b` of `import a.b as c`
            # The chain begins with "from m", which is no name that code can have, and leads through `imports` to `m`.
            self.imports.setdefault(f"from {self._from_module}", self._from_module)
            self.imported[self._from_module, name] = None
            self.chains[f"from {self._from_module}", name] = None
        # From Python 3.14 on, small integers have an instruction of their own.
        elif op in ("LOAD_CONST", "LOAD_SMALL_INT"):
            self._constants = self._constants[1], name
        elif op == "STORE_FAST":
            self._imported(name)
        self._chain = chain

    def _attribute(self, name: str, is_stored: bool) -> None:
        self.attributes.add(name)
        (self.stored_attributes if is_stored else self.read_attributes).add(name)
        self._chain = (*self._chain, name) if self._chain else ()
        if self._chain:
            self.chains[self._chain] = None
        if is_stored:
            self._chain = ()

    def _imported(self, variable: str) -> None:
        """A variable takes what was imported: `import a.b` binds `a`, `import a.b as c` the module itself."""
        if self._module:
            is_submodule = self._module.startswith(f"{variable}.")
            self.imports[variable] = self._module.partition(".")[0] if is_submodule else self._module
            self._module = ""


def texts_in(values: Iterable[object]) -> Iterator[str]:
    """The texts among constants, and in tuples and frozen sets of these."""
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, tuple | frozenset):
            yield from texts_in(tuple(value))


def _computes_names(code: types.CodeType, functions: frozenset[str]) -> bool:
    """Is there a call such as `getattr(x, name)`, of one of these functions, whose name is no text in the code?

    Each load of such a function is followed to its call. Whatever else happens to it counts as a computed name.
    """
    if functions.isdisjoint(code.co_names):  # most code: nothing to look for
        return False
    instructions = operations_of(code)
    two_variables = ("LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW")
    for i, instruction in enumerate(instructions):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval in functions:
            depth = 0  # values on the stack since: the first is the object, the second the name
            for step in instructions[i + 1 :]:
                if step.opname == "PUSH_NULL":
                    continue
                depth_before, depth = depth, depth + dis.stack_effect(step.opcode, step.arg)
                if step.opname in two_variables and depth >= 2 > depth_before:  # the second of them is the name
                    return True
                if depth_before == 1 and depth == 2 and step.opname != "LOAD_CONST":  # something else is the name
                    return True
                if depth_before >= 2 >= depth:  # the call, or the name is a part of what is computed
                    if not (step.opname.startswith("CALL") and step.arg in (2, 3)):
                        return True
                    break
                if depth < 0 or "JUMP" in step.opname:  # the function itself is stored or returned, or is in a branch
                    return True
    return False


def nested_codes(code: types.CodeType) -> list[types.CodeType]:
    """The code, and that of the functions inside of it."""
    codes = [code]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            codes += nested_codes(constant)
    return codes


def globals_in(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The globals that the code, and code nested in it, loads and assigns."""
    names = _ALL.get(code)
    if names is None:
        names_of_each = [names_of(nested) for nested in nested_codes(code)]
        loaded = dict.fromkeys(name for nested in names_of_each for name in nested.loaded)
        stored = dict.fromkeys(name for nested in names_of_each for name in nested.stored)
        names = _ALL[code] = tuple(loaded), tuple(stored)
    return names


def passed_on(code: types.CodeType, scope: Mapping[str, Any] = types.MappingProxyType({})) -> set[str]:
    """The globals that code stores, returns or passes on.

    Calling a global is not passing it on; neither is naming it as a class to `isinstance`, `issubclass` or
    `typing.cast`.

    Args:
        scope: the code's globals, which tell whether a `cast` is that of `typing`.
    """
    instructions = operations_of(code)
    return {
        instruction.argval
        for i, instruction in enumerate(instructions)
        if instruction.opname == "LOAD_GLOBAL"
        and not (
            pushes_null(instruction) or _is_class_asked_for(instructions, i) or _is_cast_to(instructions, i, scope)
        )
    }


def attributes_passed_on(code: types.CodeType, module: str) -> set[str]:
    """The attributes of a module that code stores, returns or passes on instead of calling them.

    Args:
        module: the name of the global. It is among the results where code does so with the module itself.
    """
    instructions = operations_of(code)
    names = [instruction.opname for instruction in instructions]
    attributes: set[str] = set()
    for i, instruction in enumerate(instructions):
        if instruction.argval != module or instruction.opname != "LOAD_GLOBAL":
            continue
        following = instructions[i + 1]
        # Up to Python 3.12 the null of a call is pushed before the module, from 3.13 on behind the attribute.
        is_call = "PUSH_NULL" in (*names[max(i - 1, 0) : i], *names[i + 2 : i + 3]) or pushes_null(instruction)
        if following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(module)
        elif not is_call and not loads_method(following):
            attributes.add(following.argval)
    return attributes


def _is_class_asked_for(instructions: list[dis.Instruction], i: int) -> bool:
    """Is this load of a global in the second argument of `isinstance(x, (a, b))`?"""
    # Forward only loads and the tuple of them, up to the call; backward only loads, up to the function that is called.
    for instruction in instructions[i + 1 :]:
        if instruction.opname.startswith("CALL"):
            break
        if instruction.opname not in ("LOAD_GLOBAL", "LOAD_ATTR", "BUILD_TUPLE"):
            return False
    for instruction in reversed(instructions[:i]):
        if pushes_null(instruction):
            return instruction.argval in ("isinstance", "issubclass")
        if not instruction.opname.startswith(("LOAD_", "BINARY_SUBSCR")):
            return False
    return False


def _is_cast_to(instructions: list[dis.Instruction], i: int, scope: Mapping[str, Any]) -> bool:
    """Is this load of a global the first argument of `typing.cast(a, b)`, which looks at neither?"""
    loads = [instruction for instruction in instructions[max(i - 3, 0) : i] if instruction.opname != "PUSH_NULL"]
    match [(instruction.opname, instruction.argval) for instruction in loads]:
        case [*_, ("LOAD_GLOBAL", module), ("LOAD_ATTR" | "LOAD_METHOD", "cast")]:
            return scope.get(module) is typing
        case [*_, ("LOAD_GLOBAL", name)]:
            return scope.get(name) is typing.cast
        case _:
            return False


def absolute_name(module: str, scope: dict[str, Any]) -> str:
    """The name of a module that code of these globals imports. It stays as it is where they belong to no package."""
    package = scope.get("__package__") or ""
    with contextlib.suppress(ImportError):
        return importlib.util.resolve_name(module, package)
    return module


def resolve_lazy_imports(scope: dict[str, Any], names: Iterable[str]) -> None:
    """Imports what `lazy import` has left under these names, as code that reads them would.

    A module that cannot be imported stays lazy: the code that reads the name raises the error.
    """
    if LAZY_IMPORT is None:
        return
    for name in names:
        value: Any = scope.get(name)
        if type(value) is LAZY_IMPORT:
            with contextlib.suppress(Exception):
                scope[name] = value.resolve()
