# SPDX-License-Identifier: Apache-2.0
"""Code, as the read set sees it: whose it is, what it names, and which values behind names can change by themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import enum
import functools
import importlib.util
import site
import sys
import sysconfig
import types
import typing
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from graftax import _core
from graftax._base.class_lookup import in_mro
from graftax._base.missing import MISSING
from graftax._graph.types.describe import LAZY_IMPORT

# ---- whose code is it?

HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
NEVER = ("jax", "jaxlib", "numpy", "graftax", "ml_dtypes", "scipy", "opt_einsum")


@functools.cache
def _folders_of(*packages: str) -> tuple[str, ...]:
    """Wherever they are imported from, such as a checkout. A folder without `__init__` is the user's own."""
    specs = [importlib.util.find_spec(package) for package in packages]
    return tuple(f"{path}/" for spec in specs if spec and spec.origin for path in spec.submodule_search_locations or ())


def _library_folders() -> tuple[str, ...]:
    paths = [sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages(), *_folders_of(*NEVER)]
    paths += [path for path in sys.path if path.rstrip("/").endswith("-packages")]  # of another environment
    return tuple(sorted({path.rstrip("/") + "/" for path in paths}))


_LIBRARIES = _library_folders()


@functools.cache
def is_users(filename: str) -> bool:
    """Is this file the user's own, rather than the standard library's or an installed package's?"""
    return not filename.startswith(("<frozen", *_LIBRARIES))


@functools.cache
def is_never_asked(filename: str) -> bool:
    """Code of JAX and the standard library: what it reads is not the user's to change."""
    if not filename.startswith(("<frozen", *_LIBRARIES)):
        return False
    installed = any("-packages/" in folder and filename.startswith(folder) for folder in _LIBRARIES)
    return not installed or is_in_package(filename, *NEVER)


def is_in_package(filename: str, *names: str) -> bool:
    """Is this a file of one of these packages?"""
    return filename.startswith(_folders_of(*names))


def is_users_scope(scope: dict[str, Any]) -> bool:
    filename = scope.get("__file__")
    if not isinstance(filename, str):
        return scope.get("__name__") not in sys.builtin_module_names
    return is_users(filename)


MODULE_OF: Any = vars(type)["__module__"]  # of a class, whatever a metaclass answers


def is_open_scope(scope: dict[str, Any]) -> bool:
    """May code of the user's set names in this module? Not in one of JAX's or of the standard library."""
    filename = scope.get("__file__")
    if not isinstance(filename, str):
        return scope.get("__name__") not in sys.builtin_module_names
    return not is_never_asked(filename)


def is_never_asked_code(code: types.CodeType, scope: dict[str, Any], first: object = None) -> bool:
    """`is_never_asked` of code that runs in these globals: `dataclasses` makes methods of JAX's classes from texts, and
    `namedtuple` their `__new__`, with globals of its own: there `first`, the class, tells whose it is."""
    if code.co_filename != "<string>":
        return is_never_asked(code.co_filename)
    if is_of_named_tuple(code) and isinstance(first, type):
        scope = getattr(sys.modules.get(MODULE_OF.__get__(first)), "__dict__", {})
    return not is_open_scope(scope)


def is_users_code(code: types.CodeType, scope: dict[str, Any]) -> bool:
    """Code that has no file of its own (made from a text) is whose its globals are."""
    filename = code.co_filename
    if filename.startswith("<"):
        written = filename.startswith(("<string>", "<stdin>", "<ipython", "<doctest"))  # else a library made it
        of_module = "__name__" in scope and not filename.startswith("<@")
        return (written or of_module) and is_users_scope(scope)
    return is_users(filename)


def is_generated(code: types.CodeType, function: object) -> bool:
    """A method that `dataclasses` wrote, unless it holds defaults or factories that can change by themselves."""
    if code.co_filename != "<string>" or not code.co_qualname.startswith("__create_fn__"):
        return False
    return not isinstance(function, types.FunctionType) or not has_state(function)


def is_of_named_tuple(code: types.CodeType) -> bool:
    """Is it the `__new__` that `namedtuple` wrote? It calls that of tuples, and nothing else."""
    return code.co_filename == "<string>" and code.co_names == ("_tuple_new",)


_WRITES = frozenset(("STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_GLOBAL"))


def is_asked_any_time(code: types.CodeType) -> bool:
    """Is it code that graftax calls at moments of its own? What it reads counts as a binding.

    So it is with a `__hash__` that keeps count: what it writes is another value each time that graftax looks up a key.
    """
    if code.co_name == "__hash__":
        return any(instruction.opname in _WRITES for instruction in instructions_of(code))
    return code.co_name == "__annotate__"


def is_users_class(cls: type) -> bool:
    if not cls.__flags__ & HEAP_TYPE:  # not made by a class statement
        return False
    module = sys.modules.get(getattr(cls, "__module__", ""))
    return module is None or is_users_scope(vars(module))


# ---- what code names


class Names(NamedTuple):
    """What one code object names; nothing of the code of functions inside of it."""

    chains: tuple[tuple[str, ...], ...]  # (global or free variable or imported module, attribute, attribute, ...)
    imports: dict[str, str]  # local variable -> module, with the dots of a relative import
    imported: tuple[tuple[str, str], ...]  # (such a module, what is taken from it, or nothing)
    loaded: tuple[str, ...]  # globals
    stored: tuple[str, ...]  # globals that it assigns or deletes
    variables: frozenset[str]  # globals and variables of an enclosing call, read, assigned or deleted
    assigned: frozenset[str]  # variables of an enclosing call that it assigns
    attributes: frozenset[str]
    stored_attributes: frozenset[str]
    read_attributes: frozenset[str]
    of_super: frozenset[str]  # attributes that it may ask `super()` for
    texts: frozenset[str]  # attributes that it may name by a text, as `getattr` does
    literals: frozenset[str]  # its short texts: keys, perhaps
    computes: bool  # does it ask for attributes by names that it computes, or for all names?
    sets: bool  # does it set attributes by names that it computes?
    matches: bool  # does it match classes, by the names in their `__match_args__`?
    asks_classes: bool  # does it ask of which classes an object is?


_NAMES: weakref.WeakKeyDictionary[types.CodeType, Names] = weakref.WeakKeyDictionary()
_ALL: weakref.WeakKeyDictionary[types.CodeType, tuple[tuple[str, ...], tuple[str, ...]]] = weakref.WeakKeyDictionary()
_WHERE = ("DEREF", "CLASSDEREF", "GLOBAL", "NAME")
_LOADS = frozenset(f"LOAD_{where}" for where in _WHERE)
_CHANGES = frozenset(f"{what}_{where}" for what in ("STORE", "DELETE") for where in _WHERE)
_FROM_CLASS_BODY = ("LOAD_FROM_DICT_OR_DEREF", "LOAD_FROM_DICT_OR_GLOBALS")
_BY_TEXT = frozenset(
    ("getattr", "hasattr", "setattr", "delattr", "vars", "attrgetter", "methodcaller", "__getattribute__")
)
_OF_ALL_NAMES = frozenset(("dir", "getmembers", "attrgetter", "methodcaller", "format", "format_map", "getattr_static"))
_LONGEST_KEY = 40
_NO_PART = frozenset(("PRECALL", "EXTENDED_ARG", "NOP", "RESUME"))
_ASKS_BY_TEXT = frozenset(("getattr", "hasattr"))
_SETS_BY_TEXT = frozenset(("setattr", "delattr"))
_SETTERS = frozenset(("__setattr__", "__delattr__"))  # methods that do the same


def names_of(code: types.CodeType) -> Names:
    names = _NAMES.get(code)
    if names is None:
        names = _NAMES[code] = _Scan(code).names()
    return names


_MOST_READ = 16
_READ: dict[int, tuple[weakref.ref[types.CodeType], tuple[dis.Instruction, ...]]] = {}  # by id, the newest last


def instructions_of(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    """What `dis` reads in code, which takes long. Code is asked several questions in a row, so the last are kept."""
    known = _READ.get(id(code))
    if known is not None and known[0]() is code:
        return known[1]
    instructions = tuple(dis.get_instructions(code))
    number = id(code)
    _READ[number] = weakref.ref(code, lambda _: _READ.pop(number, None)), instructions
    for oldest in list(_READ)[:-_MOST_READ]:
        _READ.pop(oldest, None)
    return instructions


class _Scan:
    """Reads the instructions of one code object, once."""

    def __init__(self, code: types.CodeType) -> None:
        self.code = code
        self.chains: dict[tuple[str, ...], None] = {}
        self.imports: dict[str, str] = {}
        self.imported: dict[tuple[str, str], None] = {}
        self.loaded: dict[str, None] = {}
        self.stored: dict[str, None] = {}
        self.variables: set[str] = set()
        self.assigned: set[str] = set()
        self.attributes: set[str] = set()
        self.stored_attributes: set[str] = set()
        self.read_attributes: set[str] = set()
        self._chain: tuple[str, ...] = ()
        self._module = ""  # that was imported last, or
        self._from = ""  # of which names were
        self._constants: tuple[Any, Any] = (None, None)  # that were loaded last

    def names(self) -> Names:
        instructions = instructions_of(self.code)
        for instruction in instructions:
            if instruction.opname != "COPY":  # a copy is what was named last
                self._read(instruction.opname, instruction.argval)
        texts: set[str] = set()
        matches = any(instruction.opname == "MATCH_CLASS" for instruction in instructions)
        if matches or not _BY_TEXT.isdisjoint({*self.loaded, *self.attributes}):
            texts = {text for text in texts_in(self.code.co_consts) if text.isidentifier()}
            self.attributes |= texts
            by_text = {*self.loaded, *self.attributes} & _BY_TEXT
            self.stored_attributes |= texts if by_text & _SETS_BY_TEXT else set()
            self.read_attributes |= texts if by_text - _SETS_BY_TEXT or matches else set()
        chains = self.chains
        longest = [c for c in chains if len(c) > 1 or not any(d[: len(c)] == c for d in chains if len(d) > len(c))]
        return Names(
            tuple(longest),
            self.imports,
            tuple(self.imported),
            tuple(self.loaded),
            tuple(self.stored),
            frozenset(self.variables),
            frozenset(self.assigned),
            frozenset(self.attributes),
            frozenset(self.stored_attributes),
            frozenset(self.read_attributes),
            frozenset(self.attributes if "super" in self.loaded else ()),
            frozenset(texts),
            frozenset(text for text in texts_in(self.code.co_consts) if len(text) <= _LONGEST_KEY),
            not _OF_ALL_NAMES.isdisjoint({*self.loaded, *self.attributes})
            or self._computes_names(instructions, _ASKS_BY_TEXT),
            not _SETTERS.isdisjoint(self.attributes) or self._computes_names(instructions, _SETS_BY_TEXT),
            matches,
            matches or not self.loaded.keys().isdisjoint(("isinstance", "issubclass")),
        )

    def _computes_names(self, instructions: tuple[dis.Instruction, ...], functions: frozenset[str]) -> bool:
        if functions.isdisjoint(self.loaded):  # most code: nothing to look for
            return False
        parts = [instruction for instruction in instructions if instruction.opname not in _NO_PART]
        return _computes_names(parts, functions)

    def _read(self, op: str, name: Any) -> None:
        if op in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"):
            self._attribute(name, op in ("STORE_ATTR", "DELETE_ATTR"))
            return
        chain: tuple[str, ...] = ()
        if op.startswith("LOAD_SUPER"):
            self.attributes.add(name)
            self.read_attributes.add(name)
        elif op in _LOADS:
            chain = (name,)
            self.chains[chain] = None
            self.variables.add(name)
            if op in ("LOAD_GLOBAL", "LOAD_NAME"):
                self.loaded[name] = None
        elif op in _CHANGES or op in _FROM_CLASS_BODY:
            self.variables.add(name)
            if op.endswith("_GLOBAL"):
                self.stored[name] = None
            elif op == "STORE_DEREF":
                self.assigned.add(name)
        elif "LOAD_FAST" in op:  # one instruction may load or store two
            names = name if isinstance(name, tuple) else (name,)
            if op.startswith("STORE_FAST"):
                self._imported(names[0])
            chain = (names[-1],) if names[-1] in self.imports else ()
        elif op == "IMPORT_NAME":
            level, names = self._constants
            name = "." * (level if isinstance(level, int) else 0) + name
            self._module, self._from = ("", name) if names else (name, "")
            self.imported[name, ""] = None
        elif op == "IMPORT_FROM" and self._from:  # else it is the `b` of `import a.b as c`
            self.imports.setdefault(f"from {self._from}", self._from)
            self.imported[self._from, name] = None
            self.chains[f"from {self._from}", name] = None
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
        if self._module:
            is_submodule = self._module.startswith(f"{variable}.")
            self.imports[variable] = self._module.partition(".")[0] if is_submodule else self._module
            self._module = ""


def texts_in(values: Iterable[object]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, tuple | frozenset):
            yield from texts_in(tuple(value))


def _computes_names(instructions: list[dis.Instruction], functions: frozenset[str]) -> bool:
    """Is there a call such as `getattr(x, name)`, of one of these functions, whose name is no text in the code?"""
    for i, instruction in enumerate(instructions):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval in functions:
            depth = 0  # values on the stack since: the first is the object, the second the name
            for part in instructions[i + 1 :]:
                if part.opname == "PUSH_NULL":
                    continue
                depth_before, depth = (
                    depth,
                    depth + dis.stack_effect(part.opcode, part.arg if part.arg is not None else None),
                )
                if (
                    part.opname in ("LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW")
                    and depth >= 2 > depth_before
                ):
                    return True
                if depth_before == 1 and depth == 2 and part.opname != "LOAD_CONST":
                    return True
                if depth_before >= 2 >= depth:  # the call, or the name is a part of what is computed
                    if not (part.opname.startswith("CALL") and part.arg in (2, 3)):
                        return True
                    break
                if depth < 0 or "JUMP" in part.opname:
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
        parts = [names_of(part) for part in nested_codes(code)]
        loaded = dict.fromkeys(name for part in parts for name in part.loaded)
        stored = dict.fromkeys(name for part in parts for name in part.stored)
        names = _ALL[code] = tuple(loaded), tuple(stored)
    return names


def _operations_of(code: types.CodeType) -> list[dis.Instruction]:
    skipped = ("PRECALL", "EXTENDED_ARG")
    return [instruction for instruction in instructions_of(code) if instruction.opname not in skipped]


def passed_on(code: types.CodeType, scope: Mapping[str, Any] = types.MappingProxyType({})) -> set[str]:
    """The globals that code does more with than to call them, to give them to `isinstance` or `issubclass`, or to name
    them to `typing.cast`.

    Args:
        scope: the code's globals, where it is to be known what `cast` is.
    """
    instructions = _operations_of(code)
    loaded = [
        (i, instruction)
        for i, instruction in enumerate(instructions)
        if instruction.opname == "LOAD_GLOBAL" and not (instruction.arg or 0) & 1
    ]
    return {
        instruction.argval
        for i, instruction in loaded
        if not _is_class_asked_for(instructions, i) and not _is_cast_to(instructions, i, scope)
    }


def attributes_passed_on(code: types.CodeType, module: str) -> set[str]:
    """The attributes of this global that code does more with than to call them; the module's name where that is the
    module itself."""
    instructions = _operations_of(code)
    names = [instruction.opname for instruction in instructions]
    attributes: set[str] = set()
    for i, instruction in enumerate(instructions):
        if instruction.argval != module or instruction.opname != "LOAD_GLOBAL":
            continue
        following = instructions[i + 1]
        is_call = "PUSH_NULL" in (*names[max(i - 1, 0) : i], names[i + 2]) or (instruction.arg or 0) & 1
        if following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(module)
        elif following.opname == "LOAD_ATTR" and not is_call:
            is_method = sys.version_info >= (3, 12) and (following.arg or 0) & 1
            attributes |= set() if is_method else {following.argval}
    return attributes


def _is_class_asked_for(instructions: list[dis.Instruction], i: int) -> bool:
    """Is this load of a global in the second argument of `isinstance(x, (a, b))`?"""
    for instruction in instructions[i + 1 :]:
        if instruction.opname.startswith("CALL"):
            break
        if instruction.opname not in ("LOAD_GLOBAL", "LOAD_ATTR", "BUILD_TUPLE"):
            return False
    for instruction in reversed(instructions[:i]):
        if instruction.opname == "LOAD_GLOBAL" and (instruction.arg or 0) & 1:
            return instruction.argval in ("isinstance", "issubclass")
        if not instruction.opname.startswith(("LOAD_", "BINARY_SUBSCR")):
            return False
    return False


def _is_cast_to(instructions: list[dis.Instruction], i: int, scope: Mapping[str, Any]) -> bool:
    """Is this load of a global the first argument of `typing.cast(a, b)`, which looks at neither?"""
    before = [instruction for instruction in instructions[max(i - 3, 0) : i] if instruction.opname != "PUSH_NULL"]
    match [(instruction.opname, instruction.argval) for instruction in before]:
        case [*_, ("LOAD_GLOBAL", module), ("LOAD_ATTR" | "LOAD_METHOD", "cast")]:
            return scope.get(module) is typing
        case [*_, ("LOAD_GLOBAL", name)]:
            return scope.get(name) is typing.cast
        case _:
            return False


def absolute_name(module: str, scope: dict[str, Any]) -> str:
    """The name of a module that code of these globals imports; as it is where they are of no package."""
    package = scope.get("__package__") or ""
    with contextlib.suppress(ImportError):
        return importlib.util.resolve_name(module, package)
    return module


def resolve_lazy_imports(scope: dict[str, Any], names: Iterable[str]) -> None:
    """Imports what `lazy import` has left under these names: it is what code that reads them finds there.

    One that cannot be imported stays: the code that reads it raises the error.
    """
    if LAZY_IMPORT is None:
        return
    for name in names:
        value: Any = scope.get(name)
        if type(value) is LAZY_IMPORT:
            with contextlib.suppress(Exception):
                scope[name] = value.resolve()


_PLAIN = (bool, int, float, complex, str, bytes, type(None), types.EllipsisType, types.NotImplementedType, range, slice)
_PLAIN_TYPES = frozenset(_PLAIN)
_DESCRIPTORS = property, staticmethod, classmethod, functools.cached_property
_BOUND = (
    types.ModuleType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.CodeType,
    np.dtype,
    np.ufunc,
    *_DESCRIPTORS,
    type,
    *([LAZY_IMPORT] if LAZY_IMPORT is not None else []),
)


def is_constant(value: Any) -> bool:
    """Can this value not change by itself? Then its binding is watched, and it is no root."""
    cls = type(value)
    if isinstance(value, enum.Enum):
        return _core.is_opaque(value)
    if cls in _PLAIN or isinstance(value, _BOUND) or value is MISSING:
        return not (isinstance(value, _DESCRIPTORS) and is_users_class(cls))  # else it has attributes of its own
    if cls in (tuple, frozenset):
        items = tuple(value)
        return _core.holds_only(items, _PLAIN_TYPES) or all(map(is_constant, items))
    if cls is types.MethodType:
        return is_constant(value.__self__)
    if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
        owner = value.__self__
        return owner is None or _is_name_of_module(value, owner) or is_constant(owner)
    if cls is types.FunctionType or isinstance(value, _core.Caller):
        return True  # what it holds is met when it runs
    return _core.is_opaque(value) or _is_sentinel(value) or _is_frozen(value)


def _is_name_of_module(method: Any, owner: object) -> bool:
    """Is this a function of a library, which happens to be a method of an object of its own? (`random.random`)"""
    module = sys.modules.get(type(owner).__module__)
    return module is not None and getattr(module, method.__name__, None) is method


def can_be_equal(value: object) -> bool:
    """Is this a constant that is compared by what it holds, so that another one may be the same?"""
    return isinstance(value, tuple | frozenset) or _is_frozen(value)


def _is_frozen(value: Any) -> bool:
    """A frozen dataclass of constants: a config."""
    cls: Any = type(value)
    parameters = vars(cls).get("__dataclass_params__")
    if parameters is None or not parameters.frozen or not hasattr(value, "__dict__"):
        return False
    names = {field.name for field in dataclasses.fields(value)}
    return names == vars(value).keys() and all(map(is_constant, vars(value).values()))


def _is_sentinel(value: object) -> bool:
    """An instance of a library's class that holds nothing."""
    cls = type(value)
    holds = cls.__basicsize__ > object.__basicsize__ + 16 or cls.__itemsize__ or getattr(value, "__dict__", None)
    hidden = _core.kind_info(cls)[0] == "refused"
    return not holds and not hidden and not is_users_class(cls) and bool(cls.__flags__ & HEAP_TYPE)


def has_state(function: types.FunctionType) -> bool:
    """Does a function hold what can change by itself, or change its variables of an enclosing call?"""
    contents = [cell.cell_contents for cell in function.__closure__ or () if not is_empty(cell)]
    return (
        has_defaults(function)
        or not all(map(is_constant, contents))
        or bool(contents and not names_of(function.__code__).assigned.isdisjoint(function.__code__.co_freevars))
    )


def has_defaults(function: types.FunctionType) -> bool:
    """Has it defaults that can change by themselves?"""
    return not all(map(is_constant, (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())))


def is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def content(cell: types.CellType) -> Any:
    return MISSING if is_empty(cell) else cell.cell_contents


def fill(cell: types.CellType, value: object) -> None:
    """Puts a value into a cell; MISSING empties it."""
    if value is not MISSING:
        cell.cell_contents = value
    elif not is_empty(cell):
        del cell.cell_contents


def cells_of(function: object) -> dict[str, Any]:
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return {}
    pairs = zip(function.__code__.co_freevars, function.__closure__, strict=False)
    return {name: cell.cell_contents for name, cell in pairs if not is_empty(cell)}


_OF_PYTHON = frozenset(
    ["__doc__", "__module__", "__qualname__", "__dict__", "__weakref__", "__annotations__", "__annotate__"]
    + ["__annotate_func__", "__annotations_cache__", "__static_attributes__", "__firstlineno__", "__orig_bases__"]
    + ["__abstractmethods__", "__parameters__", "__type_params__", "__slotnames__", "__signature__", "__hash__"]
)
OF_NAMES = "__dict__"  # as a binding of a class: which names it has
OF_KEYS = "*"  # as a binding of a dict: which keys it has
OWN_NAMES = frozenset(("__name__", "__qualname__", "__doc__", "__module__", "__annotations__"))  # of classes, functions
PARTS = frozenset(("__defaults__", "__kwdefaults__", "__closure__"))  # of a function alone, which may change


def in_class(cls: type, name: str) -> tuple[type | None, Any]:
    if name == OF_NAMES:
        return None, tuple(sorted(own for own in _core.class_names(cls) if not own.startswith("__")))
    for base in cls.__mro__:
        value = _core.class_attribute(base, name)
        if value is not MISSING:
            return base, value
    return None, MISSING


def overridden(cls: type, names: set[str]) -> set[str]:
    """Those of the names that a base of Python's or a library's has, too: its methods ask for them.

    Private ones are notes of the base's own, as `_abc_impl` is.
    """
    bases = [base for base in cls.__mro__[:-1] if not is_users_class(base)]
    return {name for name in names.intersection(*[set[str]().union(*map(vars, bases))]) if not name.startswith("_")}


def is_looked_up(cls: type, name: str, value: object) -> bool:
    """Is it a method, or what Python itself looks up in a class of the user's? A table there counts where code asks."""
    if isinstance(value, (types.FunctionType, property, staticmethod, classmethod)) and is_constant(value):
        return True
    is_special = name.startswith("__") and name.endswith("__") and name not in _OF_PYTHON
    return is_special and is_users_class(cls) and (is_constant(value) or callable(value) or is_bound_by(value))


def is_protocol(cls: type) -> bool:
    return bool(in_mro(cls, "_is_protocol"))


def is_bound_by(value: object) -> bool:
    """Is this a descriptor of the interpreter's or a library's, of which the binding counts?"""
    return in_mro(type(value), "__get__") is not None and not is_users_class(type(value))


def is_of_module(scope: dict[str, Any]) -> bool:
    """Is this the dict of a module? Another one goes with its functions."""
    return "__name__" in scope
