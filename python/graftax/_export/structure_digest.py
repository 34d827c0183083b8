# SPDX-License-Identifier: Apache-2.0
"""Digests of structures that are the same in every process: functions by their code, classes and modules by name."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import functools
import hashlib
import io
import marshal
import os
import pickle
import sys
import types
from collections.abc import Generator, Mapping
from typing import Any, ClassVar, cast

from jax import tree_util

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._base.handles import HandleLayout
from graftax._base.key_path import entry_text
from graftax._base.missing import MISSING
from graftax._capture.code_owner import is_users_scope
from graftax._graph.pickling import ByName, name_for_pickle
from graftax._graph.structure import Structure, place_name
from graftax._jit.same_function import meaning_of

NO_NAME = (
    "{name} cannot be saved: {path} is {value}, which is compared by identity, and has no name by which "
    "another process could find it. Define it at the top of a module."
)
PACKED = (
    "{name} cannot be saved: {path} is packed, and the layout of graftax.pack belongs to this process. Pass the "
    "object itself (`unpack()`) to a function that is to be saved."
)

_MAX_DEPTH = 8  # within functions
_NO_REFERENCES = 0  # the version of marshal that does not depend on what else refers to a constant
_MOST_SAVED = 20_000
_saved_digests: dict[bytes, str] = {}  # by the digest of code, lines included: the digest of what it does
_collecting: contextvars.ContextVar[tuple[dict[bytes, str], ...]] = contextvars.ContextVar("collecting", default=())
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))


class PackedError(GraftaxError):
    """The structure holds a packed object. Other structures of the same function may still be saved."""


class Nameless(Exception):
    """A value without a name by which another process could find it."""


def digest(graphdef: _core.GraphDef, names: tuple[str, ...], name: str) -> str:
    """The digest of a structure. Its functions may be dead: their code is kept.

    Raises:
        GraftaxError: if it holds a value that has no name in another process.
    """
    hasher = hashlib.sha256(repr(names).encode())
    # An entry holds its objects weakly, and its digest has to be the same as that of a call.
    structure = Structure(_core.weaken(graphdef))
    names_of = sentinels(structure)
    for row in structure.rows:
        try:
            parts = (token(row.type) if row.type is not None else "", token(row.value))
        except (Nameless, ReferenceError, pickle.PicklingError, TypeError, AttributeError):
            if isinstance(row.value, HandleLayout):
                path = place_name(structure.root_path(structure.rows[row.parent]), names)
                raise PackedError(PACKED.format(name=name, path=path)) from None
            path = place_name(structure.root_path(row), names)
            raise GraftaxError(NO_NAME.format(name=name, path=path, value=f"a {_type_name(row)}")) from None
        position = (row.root, row.parent, entry_text(row.key_entry), row.target, row.leaf, row.is_number, row.op.name)
        hasher.update(repr((position, parts, names_of.get(row.number))).encode())
    return hasher.hexdigest()


def sentinels(structure: Structure) -> dict[int, tuple[str, str] | None]:
    """The rows of sentinels (instances without fields, compared by identity), each with its name in a library, if any.

    A sentinel without a name is known by its position, so another process may have another object there. A sentinel
    that the user's code names is a root, so it is in the structure as well.
    """
    instances: dict[int, Any] = {}
    for row in structure.rows:
        try:
            instance = row.own
        # A name keeps its object alive, so one that is gone had none.
        except ReferenceError:
            instance = object()
        if instance is not None:
            instances[row.number] = instance
    names = names_of_instances({type(instance) for instance in instances.values()}) if instances else {}
    return {number: names[id(instance)][0] if id(instance) in names else None for number, instance in instances.items()}


def names_of_instances(classes: set[type]) -> dict[int, tuple[tuple[str, str], Any]]:
    """The instances of these classes that have a name in a library, by id: ((module, name), instance)."""
    named_instances: dict[int, tuple[tuple[str, str], Any]] = {}
    # The types of a module's values first: of thousands of modules, few have such an instance.
    for name, module in list(sys.modules.items()):
        scope: dict[str, Any] = getattr(module, "__dict__", {})
        if not classes.isdisjoint(map(type, scope.values())) and not is_users_scope(scope):
            named_instances.update({id(v): ((name, key), v) for key, v in list(scope.items()) if type(v) in classes})
    for cls in classes:
        attributes = [(key, value) for key, value in list(vars(cls).items()) if type(value) is cls]
        named_instances.update({id(v): ((cls.__module__, f"{cls.__qualname__}.{key}"), v) for key, v in attributes})
    return named_instances


def _type_name(row: Any) -> str:
    try:
        return type(row.value).__qualname__
    except ReferenceError:
        return "value that is gone"


def token(value: object) -> str:
    """A text that identifies a value in every process. Raises Nameless if there is none."""
    if value is MISSING:
        return "nothing"
    if isinstance(value, enum.Enum):
        return f"enum {token(type(value))}.{value.name} {_enum_value(value)}"
    if type(value) in _CONSTANTS:
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, types.FunctionType):
        return f"{token(value.__code__)}{_constants_of(value, 0)}"
    if isinstance(value, types.CodeType):
        return f"code {_import_path(value.co_filename)} {value.co_qualname} {code_digest(value)}"
    if isinstance(value, (staticmethod, classmethod)):
        return f"{type(value).__name__} {token(value.__func__)}"
    if isinstance(value, property):
        return " ".join(["property", *map(token, (value.fget, value.fset, value.fdel))])
    if isinstance(value, (tuple, list, frozenset)):
        tokens = [token(item) for item in cast("Any", value)]
        return f"{type(value).__name__} {sorted(tokens) if isinstance(value, frozenset) else tokens}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}"
    if isinstance(value, tree_util.PyTreeDef):
        return f"treedef {value}"
    name = name_for_pickle(value)
    if isinstance(name, ByName):
        return "name {}.{}".format(*name.args)
    # Compared by identity: equal bytes of a pickle would not make it the same value.
    if type(value).__eq__ is object.__eq__ and not isinstance(value, types.BuiltinFunctionType):
        raise Nameless
    return f"{token(type(value))} {hashlib.sha256(_InOrder.dumps(value)).hexdigest()}"


# Python's own pickler: the one in C writes sets by itself, whatever a class that is derived from it says.
class _InOrder(pickle._Pickler):  # pyright: ignore[reportPrivateUsage]
    """Pickles for a digest: the items of a set, whose order is another one in each process, are sorted."""

    dispatch: ClassVar[dict[type, Any]] = dict(cast("Any", pickle._Pickler).dispatch)  # pyright: ignore[reportPrivateUsage]

    @classmethod
    def dumps(cls, value: object) -> bytes:
        with io.BytesIO() as file:
            cls(file, protocol=4).dump(value)
            return file.getvalue()

    def save_items(self, items: set[object] | frozenset[object]) -> None:
        cast("Any", self).save((type(items), sorted(map(self.dumps, items))))

    dispatch[set] = dispatch[frozenset] = save_items


def _constants_of(function: types.FunctionType, depth: int) -> str:
    """The constants in a function's defaults and closure, and those of the functions in them."""
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            values.append(cell.cell_contents)
    tokens: list[str] = []
    for value in values:
        if isinstance(value, types.FunctionType) and depth < _MAX_DEPTH:
            tokens.append(f"{token(value.__code__)}{_constants_of(value, depth + 1)}")
        elif type(value) in _CONSTANTS:
            tokens.append(token(value))
    return f" of {tokens}" if tokens else ""


def _enum_value(member: enum.Enum) -> str:
    """The token of a member's value. Empty for a value without one: the name of the member has to do."""
    try:
        return token(member._value_)
    except (Nameless, pickle.PicklingError, TypeError, AttributeError):
        return ""


def code_digest(code: types.CodeType) -> str:
    """The digest of what code does: the same in every process, whatever its lines and its docstring are."""
    content, meaning = _content_and_meaning(code)
    for digests in _collecting.get():
        digests[content] = meaning
    return meaning


@functools.lru_cache(maxsize=4096)
def _content_and_meaning(code: types.CodeType) -> tuple[bytes, str]:
    """The digests of all that code consists of, lines included, and of what it does."""
    try:
        content = hashlib.sha256(marshal.dumps(code, _NO_REFERENCES)).digest()
    # From Python 3.14 on a constant may be a slice, which marshal does not write in this version of its format.
    except ValueError:
        content = b""
    meaning = _saved_digests.get(content) if content else None
    return content, meaning or hashlib.sha256(_stable_text(meaning_of(code)).encode()).hexdigest()


@contextlib.contextmanager
def collecting_digests() -> Generator[dict[bytes, str]]:
    """The digests of all code that is asked for inside the block, for `know_digests` in another process."""
    digests: dict[bytes, str] = {}
    token = _collecting.set((*_collecting.get(), digests))
    try:
        yield digests
    finally:
        _collecting.reset(token)
        digests.pop(b"", None)


def know_digests(digests: Mapping[bytes, str]) -> None:
    """Takes over what another process found, since disassembling code takes longer than anything else here."""
    if len(_saved_digests) < _MOST_SAVED:
        _saved_digests.update(digests)


def _stable_text(meaning: object) -> str:
    """The text of a meaning or an item of it. A frozenset is sorted, since its order differs by process."""
    if isinstance(meaning, types.CodeType):
        return _stable_text(meaning_of(meaning))
    if isinstance(meaning, (tuple, frozenset)):
        texts = [_stable_text(item) for item in cast("tuple[object, ...]", meaning)]
        is_set = isinstance(meaning, frozenset) or (bool(meaning) and meaning[0] is frozenset)
        return f"({', '.join(sorted(texts) if is_set else texts)})"
    return repr(meaning)


def _import_path(filename: str) -> str:
    """The path of a file below its folder in `sys.path`, which is the same on machines with other folders."""
    folders = [folder for folder in sys.path if folder and filename.startswith(folder + os.sep)]
    return filename[max(map(len, folders), default=-1) + 1 :]
