# SPDX-License-Identifier: Apache-2.0
"""May code of the user's own do what running it a second time would do again, although nobody hears it?

It is taken to do so wherever it names more than its own code, Python's functions of values, and libraries for JAX: an
`atexit.register`, a setting of NumPy's, a metrics logger. What the code of the user's own does to objects is undone.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable

import jax

from graftax._base.missing import MISSING
from graftax._capture.bytecode import Names, is_users_scope

_OF_VALUES = (
    *("__future__", "_abc", "_bisect", "_collections", "_functools", "_heapq", "_operator", "_struct", "_weakref"),
    *("abc", "array", "base64", "bisect", "builtins", "cmath", "collections", "contextlib", "copy", "dataclasses"),
    *("enum", "fractions", "functools", "hashlib", "heapq", "inspect", "itertools", "json", "keyword", "math"),
    *("numbers", "operator", "re", "reprlib", "statistics", "string", "struct", "textwrap", "types", "typing"),
    *("unicodedata", "weakref", "zlib"),
)
_LIBRARIES = ("beartype", "einops", "graftax", "jax", "jaxlib", "jaxtyping", "ml_dtypes", "numpy", "scipy", "typeguard")
_RUN_TEXTS = frozenset({"exec", "eval", "compile", "__import__", "breakpoint"})
_SETTINGS_OF_JAX = frozenset({"config", "monitoring", "profiler", "distributed", "clear_caches"})


def may_have_effects(names: Names, value_of: Callable[[tuple[str, ...]], object]) -> bool:
    """Of code with these names.

    Args:
        value_of: what a chain of names leads to, or the first object on its way that is no module; or MISSING.
    """
    if any(_is_of_others(module) for module in names.imports.values()):
        return True
    for chain in names.chains:
        first = value_of(chain[:1])
        if first is MISSING:  # a variable of a call that the trace itself runs
            continue
        if chain[0] in _RUN_TEXTS or _belongs_to_others(first):
            return True
        if isinstance(first, types.ModuleType) and _sets(first.__name__, chain[1:]):
            return True
    return False


def hold_others(types_of_values: Iterable[type]) -> bool:
    """Are there instances of classes among these whose methods may do so?"""
    return any(map(_belongs_to_others, types_of_values))


def _belongs_to_others(value: object) -> bool:
    if isinstance(value, types.ModuleType):
        return _is_of_others(value.__name__)
    named = value if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) else type(value)
    module = getattr(named, "__module__", None)
    return isinstance(module, str) and _is_of_others(module)


def _sets(module: str, attributes: tuple[str, ...]) -> bool:
    if module.partition(".")[0] == "numpy":
        return any(name == "random" or name.startswith("set") for name in attributes)
    return module == "jax" and not _SETTINGS_OF_JAX.isdisjoint(attributes)


def _is_of_others(module: str) -> bool:
    package = module.partition(".")[0]
    if package in _OF_VALUES or package in _LIBRARIES:
        return False
    if package in sys.stdlib_module_names:
        return True
    loaded = sys.modules.get(module)
    return loaded is None or not (is_users_scope(vars(loaded)) or _uses_jax(package))


@functools.cache
def _uses_jax(package: str) -> bool:
    """Is it a library for JAX? Its functions are made to be traced."""
    modules = [loaded for name, loaded in list(sys.modules.items()) if f"{name}.".startswith(f"{package}.")]
    return any(getattr(loaded, "__dict__", {}).get("jax") is jax for loaded in modules)
