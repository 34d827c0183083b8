# SPDX-License-Identifier: Apache-2.0
"""The cells of a notebook or an interactive session: their definitions are the script of recorded calls."""

from __future__ import annotations

import ast
import contextlib
import linecache
import re
import sys
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

# The names that IPython, its kernel and Python's own prompt give to what is typed.
_CELL = re.compile(r"<(ipython|python)-input-\d|[/\\]ipykernel_\d+[/\\]")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


class Cell(NamedTuple):
    """What was typed, and the name that its code has as its file."""

    file: str
    text: str


def is_cell(file: str) -> bool:
    return _CELL.search(file) is not None


def known_cells() -> list[Cell]:
    """The cells of this session, in the order in which they first ran."""
    # An entry of another length is a loader that `linecache` has not called, so it has no text.
    entries = [(file, entry) for file, entry in list(linecache.cache.items()) if is_cell(file) and len(entry) == 4]
    return [Cell(file, "".join(entry[2])) for file, entry in entries]


def codes_of_cells() -> list[types.CodeType]:
    codes: list[types.CodeType] = []
    for file, text in known_cells():
        # A cell with a mistake in its syntax has a text, and has never run.
        with contextlib.suppress(SyntaxError, ValueError):
            codes.append(compile(text, file, "exec", dont_inherit=True))
    return codes


def load_cells(cells: Sequence[Sequence[str]]) -> None:
    """Makes a main module of what these cells import and define. Nothing else in them runs.

    A statement that fails is left out, since it may need what another one would have computed. What is missing then is
    named where it is looked for.
    """
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    for file, text in cells:
        # `known_cells` finds the text there when a function is looked up by its code, and so do tracebacks.
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        for statement in ast.parse(text, file).body:
            if not _is_definition(statement):
                continue
            with contextlib.suppress(Exception):
                code = compile(ast.Module([statement], []), file, "exec", dont_inherit=True)
                exec(code, vars(module))


def _is_definition(statement: ast.stmt) -> bool:
    """Does it only import, define, or name what is there? An assignment that calls something may take hours."""
    if isinstance(statement, _DEFINITIONS):
        return True
    value: Any = statement.value if isinstance(statement, (ast.Assign, ast.AnnAssign)) else None
    if value is None or isinstance(value, ast.Lambda):
        return value is not None
    return not any(isinstance(part, (ast.Call, ast.Await, ast.NamedExpr)) for part in ast.walk(value))
