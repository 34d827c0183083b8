# SPDX-License-Identifier: Apache-2.0
"""What equal structures share in every process: functions count by their code, classes and modules by name."""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import os
import pickle
import sys
import types
from typing import Any, cast

from jax import tree_util

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._base.handles import HandleLayout
from graftax._base.key_path import entry_text
from graftax._base.missing import MISSING
from graftax._capture.bytecode import is_users_scope
from graftax._graph.pickling import ByName, named
from graftax._graph.structure import Structure, place_name

NO_NAME = (
    "{name} cannot be saved: {path} is {value}, which counts by identity, and another process has no name for it. "
    "Define it at the top of a module."
)
PACKED = (
    "{name} cannot be saved: {path} is packed, and the layout of graftax.pack belongs to this process. Give the "
    "function the object itself (`unpack()`) where it is to be saved."
)

_MOST_FUNCTIONS = 8  # within functions
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))


class PackedError(GraftaxError):
    """A structure with a packed object: the same function may have others, which can be saved."""


class Nameless(Exception):
    """A value that no other process finds."""


def digest(graphdef: _core.GraphDef, names: tuple[str, ...], name: str) -> str:
    """Of a structure, whose functions may be gone, but not their code.

    Raises:
        GraftaxError: where it holds what has no name in another process.
    """
    found = hashlib.sha256(repr(names).encode())
    structure = Structure(graphdef)
    places = sentinels(structure)
    for row in structure.rows:
        try:
            parts = (token(row.type) if row.type is not None else "", token(row.value))
        except (Nameless, ReferenceError, pickle.PicklingError, TypeError, AttributeError):
            if isinstance(row.value, HandleLayout):
                path = place_name(structure.place(structure.rows[row.parent]), names)
                raise PackedError(PACKED.format(name=name, path=path)) from None
            path = place_name(structure.place(row), names)
            raise GraftaxError(NO_NAME.format(name=name, path=path, value=f"a {_type_name(row)}")) from None
        place = (row.root, row.parent, entry_text(row.key_entry), row.target, row.leaf, row.is_number, row.op.name)
        found.update(repr((place, parts, places.get(row.number))).encode())
    return found.hexdigest()


def sentinels(structure: Structure) -> dict[int, tuple[str, str] | None]:
    """The rows of instances without fields, which count by identity: by what name a library's code finds them, if any.

    One without such a name is told from others by where it stands, so that another process may have another one there.
    What the user's code names is a root: it stands in the structure too.
    """
    found: dict[int, Any] = {}
    for row in structure.rows:
        try:
            own = row.own
        except ReferenceError:  # it is gone: what has a name stays
            own = object()
        if own is not None:
            found[row.number] = own
    places = names_of_instances({type(own) for own in found.values()}) if found else {}
    return {number: places[id(own)][0] if id(own) in places else None for number, own in found.items()}


def names_of_instances(classes: set[type]) -> dict[int, tuple[tuple[str, str], Any]]:
    """The instances of these classes that a name of a library leads to, by id: module and name, and the instance."""
    found: dict[int, tuple[tuple[str, str], Any]] = {}
    for name, module in list(sys.modules.items()):
        scope: dict[str, Any] = getattr(module, "__dict__", {})
        if not classes.isdisjoint(map(type, scope.values())) and not is_users_scope(scope):
            found.update({id(v): ((name, key), v) for key, v in list(scope.items()) if type(v) in classes})
    for cls in classes:
        own = [(key, value) for key, value in list(vars(cls).items()) if type(value) is cls]
        found.update({id(v): ((cls.__module__, f"{cls.__qualname__}.{key}"), v) for key, v in own})
    return found


def _type_name(row: Any) -> str:
    try:
        return type(row.value).__qualname__
    except ReferenceError:
        return "value that is gone"


def token(value: Any) -> str:
    """What tells a value from another one in every process. Raises Nameless where nothing does."""
    if value is MISSING:
        return "nothing"
    if isinstance(value, enum.Enum):
        return f"enum {token(type(value))}.{value.name} {_enum_value(value)}"
    if type(value) in _CONSTANTS:
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, types.FunctionType):
        return f"{token(value.__code__)}{_constants_of(value, 0)}"
    if isinstance(value, types.CodeType):
        return f"code {_place(value.co_filename)} {value.co_qualname} {code_digest(value)}"
    if isinstance(value, (staticmethod, classmethod)):
        return f"{type(value).__name__} {token(value.__func__)}"
    if isinstance(value, property):
        return " ".join(["property", *map(token, (value.fget, value.fset, value.fdel))])
    if isinstance(value, (tuple, list, frozenset)):
        parts = [token(part) for part in cast("Any", value)]
        return f"{type(value).__name__} {sorted(parts) if isinstance(value, frozenset) else parts}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}"
    if isinstance(value, tree_util.PyTreeDef):
        return f"treedef {value}"
    found = named(value)
    if isinstance(found, ByName):
        return "name {}.{}".format(*found.place)
    if type(value).__eq__ is object.__eq__ and not isinstance(value, types.BuiltinFunctionType):
        raise Nameless
    return f"{token(type(value))} {hashlib.sha256(pickle.dumps(value, protocol=4)).hexdigest()}"


def _constants_of(function: types.FunctionType, depth: int) -> str:
    """The constants that a function holds, and the functions with theirs. One that is rebuilt has none here."""
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            held.append(cell.cell_contents)
    found: list[str] = []
    for value in held:
        if isinstance(value, types.FunctionType) and depth < _MOST_FUNCTIONS:
            found.append(f"{token(value.__code__)}{_constants_of(value, depth + 1)}")
        elif type(value) in _CONSTANTS:
            found.append(token(value))
    return f" of {found}" if found else ""


def _enum_value(member: enum.Enum) -> str:
    """What a member stands for; of an object that counts by identity the name of the member is all there is."""
    try:
        return token(member._value_)
    except (Nameless, pickle.PicklingError, TypeError, AttributeError):
        return ""


@functools.lru_cache(maxsize=4096)
def code_digest(code: types.CodeType) -> str:
    """A text that code of the same instructions, constants and names shares in every process."""
    parts = (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags, code.co_argcount)
    consts = [_constant(const) for const in code.co_consts]
    return hashlib.sha256(repr((parts, consts)).encode()).hexdigest()


def _constant(const: Any) -> str:
    return code_digest(const) if isinstance(const, types.CodeType) else token(const)


def _place(filename: str) -> str:
    """Where a file is in what can be imported: the same on a machine that has it elsewhere."""
    folders = [folder for folder in sys.path if folder and filename.startswith(folder + os.sep)]
    return filename[max(map(len, folders), default=-1) + 1 :]
