# SPDX-License-Identifier: Apache-2.0
"""Pickles in which a function without a name, such as a lambda or a closure, is found by its code in its module."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import io
import os
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from graftax._base.errors import GraftaxError, UnpicklableError
from graftax._base.missing import MISSING
from graftax._export.holder_names import Holder, holder_of, resolve
from graftax._export.structure_digest import code_digest
from graftax._graph.pickling import Sentinels, name_for_pickle
from graftax._record.cells import codes_of_cells, is_cell

NO_SOURCE = (
    "{name} was defined in {file}, which another process cannot read. Define it in a module, a script or a notebook, "
    "and not by exec()"
)
GONE = "{module} has no function {name} any more"

# Types that are not found by their own names. Reversed: of two names of a type (FunctionType, LambdaType) the first
# one stays.
_NAMES_OF_TYPES = {getattr(types, name): name for name in reversed(types.__all__) if name.endswith("Type")}


class CodeName(NamedTuple):
    """Where the code of a function is found: the module, the name in it, and the line if there are several."""

    module: str
    name: str
    line: int
    digest: str


class _Parts(NamedTuple):
    """What a function or a cell holds, pickled after whatever refers to it, since cycles lead through it."""

    defaults: Any
    kwdefaults: Any
    attributes: dict[str, Any]


class Template:
    """A function to be written without what it holds, which a structure has. It is read as a function."""

    def __init__(self, function: types.FunctionType) -> None:
        self.function = function


class CodePickler(pickle.Pickler):
    """Writes a value, and then what the functions and cells in it hold."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 5)
        self._numbers: dict[int, int] = {}
        self._objects: list[types.FunctionType | types.CellType] = []
        self._sentinels = Sentinels()
        self._names: dict[int, Holder | None] = {}

    def persistent_id(self, obj: Any) -> tuple[object, ...] | None:
        if isinstance(obj, types.CellType):
            return "cell", self._number(obj)
        if isinstance(obj, types.FunctionType):
            holder = self._holder(obj)
            if holder is not None:
                return "name", holder
            # Cells go by number. What is in them follows in `finish`, since cycles lead through them.
            cells = tuple(self._number(cell) for cell in obj.__closure__ or ())
            return "function", self._number(obj), code_name(obj), obj.__name__, cells
        if isinstance(obj, Template):
            function = obj.function
            holder = self._holder(function)
            return ("name", holder) if holder else ("template", code_name(function), function.__name__)
        if type(obj) is dict and isinstance(obj.get("__name__"), str):
            module = sys.modules.get(obj["__name__"])
            if module is not None and vars(module) is obj:
                return "globals", obj["__name__"]
        return None

    def reducer_override(self, obj: Any) -> Any:
        # MISSING is compared by identity, so a copy of it would be another value.
        if obj is MISSING:
            return _missing, ()
        if isinstance(obj, type):
            name = _NAMES_OF_TYPES.get(obj)
            return NotImplemented if name is None else (getattr, (types, name))
        replacement = name_for_pickle(obj, self._sentinels)
        return NotImplemented if replacement is obj else replacement.__reduce__()

    def _holder(self, function: types.FunctionType) -> Holder | None:
        if id(function) not in self._names:
            holder = holder_of(function, {}, [function.__module__ or ""])
            # Of cells only definitions run again, and no other statement that gives a function another name.
            if holder is not None and is_cell(function.__code__.co_filename):
                holder = holder if holder[1].split(".@")[0] == function.__qualname__ else None
            self._names[id(function)] = holder
        return self._names[id(function)]

    def _number(self, obj: types.FunctionType | types.CellType) -> int:
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self._objects)
            self._objects.append(obj)
        return self._numbers[id(obj)]

    def finish(self) -> None:
        """Writes what the functions and cells hold that were met, and those met in them."""
        written = 0
        # Each dump may number further functions and cells, which are written after it.
        while written < len(self._objects):
            obj = self._objects[written]
            written += 1
            if isinstance(obj, types.FunctionType):
                self.dump(("parts", _Parts(obj.__defaults__, obj.__kwdefaults__, dict(vars(obj)))))
            else:
                self.dump(_content(obj))
        self.dump(("end", None))


def dumps(value: object) -> bytes:
    """The bytes of a value.

    Raises:
        UnpicklableError: for a value that no other process can find or make.
    """
    file = io.BytesIO()
    pickler = CodePickler(file)
    try:
        pickler.dump(value)
        pickler.finish()
    # Such an error names the function already. Others are those of pickle, or of a user's `__reduce__`.
    except GraftaxError:
        raise
    except Exception as error:
        raise UnpicklableError(str(error)) from error
    return file.getvalue()


class _CodeUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, changed: list[CodeName]) -> None:
        super().__init__(file)
        self._changed = changed
        self._objects: dict[int, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        kind, key, *details = pid
        if kind == "name":
            return resolve(key)
        if kind == "globals":
            return vars(importlib.import_module(key))
        if kind == "cell":
            return self._cell(key)
        if kind == "template":
            return self._function(key, details[0], None)
        if key not in self._objects:
            name, short_name, cells = details
            self._objects[key] = self._function(name, short_name, [self._cell(cell) for cell in cells])
        return self._objects[key]

    def _function(self, name: CodeName, short_name: str, cells: list[types.CellType] | None) -> types.FunctionType:
        code = find_code(name)
        if code_digest(code) != name.digest:
            self._changed.append(name)
        # A template has empty cells: what is in them comes with the structure.
        closure = tuple(types.CellType() for _ in code.co_freevars) if cells is None else tuple(cells)
        function = types.FunctionType(code, vars(importlib.import_module(name.module)), short_name, None, closure)
        function.__qualname__, function.__module__ = name.name, name.module
        return function

    def _cell(self, number: int) -> types.CellType:
        return self._objects.setdefault(number, types.CellType())

    def finish(self) -> None:
        number = 0
        while (content := self.load())[0] != "end":
            kind, value = content
            if kind == "parts":
                function: types.FunctionType = self._objects[number]
                function.__defaults__, function.__kwdefaults__ = value.defaults, value.kwdefaults
                vars(function).update(value.attributes)
            elif kind == "content":
                self._cell(number).cell_contents = value
            number += 1


def loads(content: bytes, changed: list[CodeName]) -> Any:
    """The value of these bytes. Functions whose code is another one now are added to `changed`."""
    unpickler = _CodeUnpickler(io.BytesIO(content), changed)
    value = unpickler.load()
    unpickler.finish()
    return value


def _content(cell: types.CellType) -> tuple[str, object]:
    try:
        return "content", cell.cell_contents
    except ValueError:
        return "empty", None


def _missing() -> object:
    return MISSING


# ---- code


def code_name(function: types.FunctionType) -> CodeName:
    """The name of a function's code.

    Raises:
        UnpicklableError: if its source is in no file.
    """
    code = function.__code__
    name = CodeName(function.__module__, code.co_qualname, code.co_firstlineno, code_digest(code))
    try:
        find_code(name)
    except (ImportError, OSError, SyntaxError, LookupError, ValueError):
        raise UnpicklableError(NO_SOURCE.format(name=name.name, file=code.co_filename)) from None
    return name


def find_code(name: CodeName) -> types.CodeType:
    """The code of this name; if there are several, that with the same contents, or else on the next line."""
    in_cells = name.module == "__main__" and main_file() is None
    modules = codes_of_cells() if in_cells else [module_code(name.module)]
    candidates = [code for module in modules for code in _codes_in(module) if code.co_qualname == name.name]
    if not candidates:
        raise LookupError(GONE.format(module=name.module, name=name.name))
    return min(candidates, key=lambda code: (code_digest(code) != name.digest, abs(code.co_firstlineno - name.line)))


@functools.lru_cache(maxsize=64)
def module_code(module: str) -> types.CodeType:
    """The code of a module, of the script that runs for `__main__`."""
    # Code that a program has compiled itself may belong to no module.
    if not module:
        raise ImportError("the code is of no module")
    spec = None if module == "__main__" else importlib.util.find_spec(module)
    if hasattr(spec and spec.loader, "get_code"):
        code: types.CodeType | None = cast("Any", spec).loader.get_code(module)
    else:  # a script, or a module that another kind of loader has read
        file = main_file() if spec is None else spec.origin
        # Without `dont_inherit` this file's own `from __future__` would apply to the user's code, too.
        code = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True) if file else None
    if code is None:
        raise ImportError(f"{module} has no Python code")
    return code


_main_files: dict[int, str] = {}  # by the id of the main module


def main_file() -> str | None:
    """The file of the script that runs. When a script has ended, Python forgets it, but recorders still write."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if file is not None:
        _main_files[id(main)] = os.path.abspath(file)
    return _main_files.get(id(main)) if main is not None else None


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes_in(constant)


def source_of(function: types.FunctionType | types.CodeType) -> str:
    """The source text of a function; empty where there is none."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""
