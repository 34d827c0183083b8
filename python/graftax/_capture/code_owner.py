# SPDX-License-Identifier: Apache-2.0
"""Whose code is it: the user's, an installed package's, or that of JAX and the standard library?"""

from __future__ import annotations

import functools
import importlib.util
import site
import sys
import sysconfig
import types
from typing import Any

HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE, which every class has that a class statement makes
# Packages that count as JAX itself, wherever they are installed: nothing that their code reads is the user's to change.
NEVER = ("jax", "jaxlib", "numpy", "graftax", "ml_dtypes", "scipy", "opt_einsum")


@functools.cache
def _folders_of(*packages: str) -> tuple[str, ...]:
    """The folders from which packages are imported, such as those of a checkout."""
    # A package without `__init__` has no origin. It may be a folder of the user's that happens to have this name.
    specs = [importlib.util.find_spec(package) for package in packages]
    return tuple(f"{path}/" for spec in specs if spec and spec.origin for path in spec.submodule_search_locations or ())


def _library_folders() -> tuple[str, ...]:
    paths = [sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages(), *_folders_of(*NEVER)]
    # The packages of another environment: a virtual environment may see those of the system.
    paths += [path for path in sys.path if path.rstrip("/").endswith("-packages")]
    return tuple(sorted({path.rstrip("/") + "/" for path in paths}))


# Found once, at import: each frame of a trace asks whose code it is.
_LIBRARIES = _library_folders()


@functools.cache
def is_users(filename: str) -> bool:
    """Is this file the user's own, rather than the standard library's or an installed package's?"""
    # Parts of the standard library are frozen into the interpreter: "<frozen importlib._bootstrap>", "<frozen os>".
    return not filename.startswith(("<frozen", *_LIBRARIES))


@functools.cache
def is_never_asked(filename: str) -> bool:
    """Code of JAX and the standard library: what it reads is not the user's to change."""
    if not filename.startswith(("<frozen", *_LIBRARIES)):
        return False
    # Packages may lie below the folder of the standard library, so that both prefixes match.
    installed = any("-packages/" in folder and filename.startswith(folder) for folder in _LIBRARIES)
    return not installed or is_in_package(filename, *NEVER)


def is_in_package(filename: str, *names: str) -> bool:
    """Is this a file of one of these packages?"""
    return filename.startswith(_folders_of(*names))


def is_users_scope(scope: dict[str, Any]) -> bool:
    """Are these the globals of a module of the user's?"""
    filename = scope.get("__file__")
    if not isinstance(filename, str):  # a notebook's, those of `exec`, or of a module that is written in C
        return scope.get("__name__") not in sys.builtin_module_names
    return is_users(filename)


# The interpreter's own getter of `cls.__module__`: a metaclass may answer something else.
MODULE_OF: Any = vars(type)["__module__"]


def is_open_scope(scope: dict[str, Any]) -> bool:
    """May code of the user's set names in this module? Not in one of JAX or the standard library."""
    filename = scope.get("__file__")
    if not isinstance(filename, str):
        return scope.get("__name__") not in sys.builtin_module_names
    return not is_never_asked(filename)


def is_never_asked_code(code: types.CodeType, scope: dict[str, Any], first: object) -> bool:
    """`is_never_asked` of code that runs in these globals. `first` is its first argument."""
    if code.co_filename != "<string>":
        return is_never_asked(code.co_filename)
    # `dataclasses` makes methods from texts, with the globals of the class's module. The `__new__` that `namedtuple`
    # makes has globals of its own; the class that it is called with tells whose it is.
    if is_of_named_tuple(code) and isinstance(first, type):
        scope = getattr(sys.modules.get(MODULE_OF.__get__(first)), "__dict__", {})
    return not is_open_scope(scope)


def is_users_code(code: types.CodeType, scope: dict[str, Any]) -> bool:
    """Code that has no file of its own (made from a text) is whose its globals are."""
    filename = code.co_filename
    if filename.startswith("<"):
        is_typed_in = filename.startswith(("<string>", "<stdin>", "<ipython", "<doctest"))
        # Else a library has generated it, such as beartype the wrapper "<@beartype(f) at 0x...>" for the user's `f`.
        runs_in_module = is_of_module(scope) and not filename.startswith("<@")
        return (is_typed_in or runs_in_module) and is_users_scope(scope)
    return is_users(filename)


def is_of_named_tuple(code: types.CodeType) -> bool:
    """Is it the `__new__` that `namedtuple` wrote? It calls that of tuples, and nothing else."""
    return code.co_filename == "<string>" and code.co_names == ("_tuple_new",)


def is_users_class(cls: type) -> bool:
    """Did a class statement in code of the user's make this class?"""
    if not cls.__flags__ & HEAP_TYPE:
        return False
    module = sys.modules.get(getattr(cls, "__module__", ""))
    # A class that `exec` has made may belong to no module.
    return module is None or is_users_scope(vars(module))


def is_of_module(scope: dict[str, Any]) -> bool:
    """Is this the dict of a module? Globals of `exec` may be gone as soon as no function has them any more."""
    return "__name__" in scope
