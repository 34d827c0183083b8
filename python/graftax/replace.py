# SPDX-License-Identifier: Apache-2.0
"""graftax's `jit` in place of `jax.jit`, `equinox.filter_jit` and `flax.nnx.jit`, without a change to the program.

`python -m graftax run script.py` does this for a script, and `pytest -p graftax.replace` for a suite of tests.
JAX's own uses of `jit` stay what they are. A function that graftax refuses is compiled by what it was written for, and
one line on the standard error says so.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax

import graftax
from graftax._base.errors import GraftaxError

_LIBRARIES = ("equinox", "flax.nnx")  # patched once they are imported
_KEEP_THEIR_OWN = ("jax", "jaxlib", "graftax")  # whose modules ask for `jax.jit` while they run
_OF_NNX_ALONE = ("graph", "graph_updates")  # options of nnx.jit that say how it splits graphs

_counts = {True: 0, False: 0}  # of replaced functions: were they refused?


class Replacement:
    """A function compiled by graftax, or by its original `jit` once graftax has refused it.

    A call that graftax refuses has changed nothing, so the original can make it anew.
    """

    def __init__(
        self, function: Any, name: str, original: Callable[[Any], Any], replaced: Callable[[Any], Any]
    ) -> None:
        functools.update_wrapper(self, function)
        self._name, self._original, self.refusal = name, original, ""
        _counts[False] += 1
        try:
            self._compiled = replaced(function)
        except (GraftaxError, TypeError) as error:
            self._fall_back(error)

    def _fall_back(self, error: Exception) -> None:
        _counts[False] -= 1
        _counts[True] += 1
        self.refusal = str(error).partition("\n")[0]
        code = getattr(self.__wrapped__, "__code__", None)
        place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        name = getattr(self.__wrapped__, "__name__", repr(self.__wrapped__))
        print(f"graftax: {name}{place} stays with {self._name}: {self.refusal}", file=sys.stderr)
        self._compiled = self._original(self.__wrapped__)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._compiled(*args, **kwargs)
        except GraftaxError as error:
            if self.refusal:  # of a function inside of it
                raise
            self._fall_back(error)
        return self._compiled(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_compiled":  # a copy asks before it has its attributes
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self._compiled, name)

    def __repr__(self) -> str:
        return f"<{self._name if self.refusal else 'graftax.jit'} of {self.__wrapped__!r}>"


def install() -> None:
    """Replaces the names, in libraries that are imported later as soon as they are. Once is enough."""
    if hasattr(jax.jit, "__graftax_original__"):
        return
    jax.jit = _replace("jax.jit", jax.jit, graftax.jit)
    for library in _LIBRARIES:
        if library in sys.modules:
            _patch(sys.modules[library])
    sys.meta_path.insert(0, _PatchOnImport())


def summary() -> str:
    """How many functions graftax has compiled, and how many stay with what they were written for."""
    return f"graftax: {_counts[False]} functions compiled by graftax, {_counts[True]} by their own jit"


def pytest_load_initial_conftests() -> None:
    """Called by pytest before it imports what the tests consist of."""
    install()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Called by pytest at the end."""
    terminalreporter.write_line(summary())


def _replace(name: str, original: Any, replacement: Callable[..., Any], drop: Sequence[str] = (), **more: Any) -> Any:
    """A `jit` that is called as `original` is."""

    @functools.wraps(original)
    def jit(function: Any = None, /, *args: Any, **options: Any) -> Any:
        if function is None and "fun" in options:
            function = options.pop("fun")
        if function is None:
            return functools.partial(jit, *args, **options)
        if str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0] in _KEEP_THEIR_OWN:
            return original(function, *args, **options)
        kept = {key: value for key, value in options.items() if value is not None and key not in drop} | more
        return Replacement(
            function, name, lambda f: original(f, *args, **options), lambda f: replacement(f, *args, **kept)
        )

    jit.__graftax_original__ = original  # type: ignore[attr-defined]
    return jit


def _patch(module: types.ModuleType) -> None:
    if module.__name__ == "equinox":
        module.filter_jit = _replace("equinox.filter_jit", module.filter_jit, graftax.filter_jit)  # type: ignore[attr-defined]
    else:
        module.jit = _replace("flax.nnx.jit", module.jit, graftax.jit, _OF_NNX_ALONE)  # type: ignore[attr-defined]


class _PatchOnImport(importlib.abc.MetaPathFinder):
    """Finds the libraries as the finders behind it do, and patches them when they have been imported."""

    def __init__(self) -> None:
        self._finding = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in _LIBRARIES or self._finding:
            return None
        self._finding = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                run(module)
                _patch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
