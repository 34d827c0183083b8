# SPDX-License-Identifier: Apache-2.0
"""graftax's `jit` in place of `jax.jit`, `equinox.filter_jit` and `flax.nnx.jit`, without a change to the program.

`python -m graftax run script.py` does this for a script, and `pytest -p graftax.replace` for a suite of tests.
JAX's own uses of `jit` stay what they are. A function that graftax refuses is compiled by what it was written for, and
one line on the standard error says so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.export

import graftax
from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._jit.api import jit_in_place_of_jax, jit_in_place_of_nnx
from graftax._jit.jax_results import as_jax_returns

_LIBRARIES = ("equinox", "flax.nnx")  # patched once they are imported
# Whose modules ask for `jax.jit` while they run. What users call of these libraries has a name of its own.
_KEEP_THEIR_OWN = ("jax", "jaxlib", "graftax", *_LIBRARIES)
_OF_NNX_ALONE = ("graph", "graph_updates")  # options of nnx.jit that say how it splits graphs

# What stood at the names.
_patched: list[tuple[types.ModuleType, str, Any]] = []
# Of replaced functions: were they refused? Numbers, since a list of the functions would keep them alive.
_counts = {True: 0, False: 0}
_printed: set[str] = set()  # lines


class StandsForCompiled:
    """What a program gets in place of a compiled function: it is a method where that is one, and has its attributes."""

    _compiled: Any

    if TYPE_CHECKING:

        def __call__(self, /, *args: Any, **kwargs: Any) -> Any: ...

    def as_written(self) -> Any:
        """The function as the program would have compiled it."""
        return self._compiled

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        # As for `jax.jit`, `inspect.signature` need not follow `__wrapped__`.
        if name == "__signature__" and "__wrapped__" in vars(self):
            with contextlib.suppress(TypeError, ValueError):
                return inspect.signature(self.__wrapped__)
        # A copy asks for attributes before it has any: `_compiled` would be looked for in itself.
        if name.startswith("__") or name == "_compiled":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self._compiled, name)


class Replacement(StandsForCompiled):
    """A function compiled by graftax, or by its original `jit` once graftax has refused it.

    A call that graftax refuses has changed nothing, so the original can make it anew. Mistakes in the options are
    errors of the original.
    """

    def __init__(self, function: Any, request: Request) -> None:
        functools.update_wrapper(self, function)
        self._name, self._original, self.refusal = request.name, request.original, ""
        # Options that the original refuses are an error of the program, as they would be without graftax.
        request.original(function)
        _counts[False] += 1
        try:
            self._compiled = request.replaced(function)
        except (GraftaxError, TypeError) as error:
            self._fall_back(error)

    def _fall_back(self, error: Exception) -> None:
        """Uses the original `jit` from now on."""
        _counts[False] -= 1
        _counts[True] += 1
        self.refusal = _first_line(error)
        self._tell(self.refusal)
        self._compiled = self._original(self.__wrapped__)

    def _tell(self, reason: str) -> None:
        code = getattr(self.__wrapped__, "__code__", None)
        place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        name = getattr(self.__wrapped__, "__name__", repr(self.__wrapped__))
        line = f"graftax: {name}{place} stays with {self._name}: {reason}"
        # A local function may be made again, and a trace may begin anew: the line is the same.
        if line not in _printed:
            _printed.add(line)
            print(line, file=sys.stderr)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            result = self._compiled(*args, **kwargs)
        except Exception as error:
            if not self._may_fall_back(error, args, kwargs):
                raise
            return self._make_anew("__call__", error, args, kwargs)
        # `jax.jit` returns arrays for numbers and NumPy arrays. Within the trace of another function this one runs as a
        # part of it, and its numbers stay what they are.
        return as_jax_returns(result) if self._name == "jax.jit" and not self.refusal and _core.is_watched() else result

    def _stage(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return getattr(self._compiled, method)(*args, **kwargs)
        except Exception as error:
            if not self._may_fall_back(error, args, kwargs):
                raise
            return self._make_anew(method, error, args, kwargs)

    def _may_fall_back(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        # XLA and `jax_debug_nans` raise these once the program runs, so graftax has compiled it.
        if self.refusal or isinstance(error, (jax.errors.JaxRuntimeError, FloatingPointError)):
            return False
        # Within another trace a Python number stays one. What needs an array may raise anything.
        # And what is a constant to `jax.jit`, such as a capture, may be traced by graftax.
        return isinstance(error, (GraftaxError, jax.errors.JAXTypeError)) or _have_numbers((args, kwargs))

    def _make_anew(self, method: str, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The trace of another function works on a copy of this object, so falling back would be forgotten with it.
        if _core.is_watched():
            result = getattr(self.as_written(), method)(*args, **kwargs)
            self._tell(_first_line(error))
            return result
        if isinstance(error, GraftaxError):
            self._fall_back(error)
            return getattr(self._compiled, method)(*args, **kwargs)
        # The error may be the function's own: then the original raises it, too, and nothing falls back.
        result = getattr(self.as_written(), method)(*args, **kwargs)
        self._fall_back(error)
        return result

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._stage("lower", args, kwargs)

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._stage("trace", args, kwargs)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._stage("eval_shape", args, kwargs)

    def as_written(self) -> Any:
        return self._original(self.__wrapped__)

    def __repr__(self) -> str:
        return f"<{self._name if self.refusal else 'graftax.jit'} of {self.__wrapped__!r}>"


class PjitFunction(Replacement):
    """The same for `jax.jit`, by the name that programs look for in the class or the text of what it returns."""

    def __repr__(self) -> str:
        return repr(self.as_written()) if "__wrapped__" in vars(self) else "<PjitFunction>"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _have_numbers(arguments: Any) -> bool:
    # What has keys that cannot be sorted, or a flatten that raises, `jax.jit` would not take either.
    try:
        leaves = jax.tree.leaves(arguments)
    except Exception:
        return False
    return any(isinstance(leaf, (int, float, complex, jax.ShapeDtypeStruct)) for leaf in leaves)


class Request(NamedTuple):
    """What a program asks for when it calls one of the names."""

    name: str  # as the program spells it: `jax.jit`
    original: Callable[[Any], Any]  # compiles a function as the program would have it
    replaced: Callable[[Any], Any]  # and by graftax
    options: dict[str, Any]


Wrap = Callable[[Any, Request], Any]


def install() -> None:
    """Replaces the names, in libraries that are imported later as soon as they are. Once is enough."""
    patch_names(_replacement)


def _replacement(function: Any, request: Request) -> Replacement:
    return (PjitFunction if request.name == "jax.jit" else Replacement)(function, request)


def patch_names(wrap: Wrap) -> None:
    """Makes `jit` and its likes return `wrap(function, request)`, in each library as soon as it is imported."""
    if _patched:
        return
    _patch(jax, wrap)
    _patch_export()
    for library in _LIBRARIES:
        if library in sys.modules:
            _patch(sys.modules[library], wrap)
    sys.meta_path.insert(0, _PatchOnImport(wrap))


def restore_names() -> None:
    """Gives all names their own meaning again."""
    while _patched:
        module, name, original = _patched.pop()
        setattr(module, name, original)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _PatchOnImport)]


def summary() -> str:
    """How many functions graftax has compiled, and how many stay with what they were written for."""
    return f"graftax: {_counts[False]} functions compiled by graftax, {_counts[True]} by their own jit"


def pytest_load_initial_conftests() -> None:
    """Called by pytest before it imports what the tests consist of."""
    install()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Called by pytest at the end."""
    terminalreporter.write_line(summary())


def _replace(
    name: str, original: Any, replacement: Callable[..., Any], wrap: Wrap, drop: Sequence[str] = ()
) -> Callable[..., Any]:
    """A `jit` that is called as `original` is."""

    @functools.wraps(original)
    def jit(function: Any = None, /, *args: Any, **options: Any) -> Any:
        # The function may be passed by name: `jax.jit(fun=f)`.
        if function is None and "fun" in options:
            function = options.pop("fun")
        if function is None:
            return functools.partial(jit, *args, **options)
        # Called by a library for itself: only what the program compiles is replaced.
        caller = f"{sys._getframe(1).f_globals.get('__name__')}."
        if any(caller.startswith(f"{module}.") for module in _KEEP_THEIR_OWN):
            return original(function, *args, **options)
        # None stands for the default of an option; what says only how nnx splits graphs has no meaning here.
        supported = {key: value for key, value in options.items() if value is not None and key not in drop}
        as_written = functools.partial(_decorate, original, args, options)
        by_graftax = functools.partial(_decorate, replacement, args, supported)
        return wrap(function, Request(name, as_written, by_graftax, options))

    return jit


def _decorate(jit: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], function: Any) -> Any:
    return jit(function, *args, **options)


def _patch(module: types.ModuleType, wrap: Wrap) -> None:
    if module is jax:
        name, replacement, drop = "jit", jit_in_place_of_jax, ()
    elif module.__name__ == "equinox":
        name, replacement, drop = "filter_jit", graftax.filter_jit, ()
    else:
        name, replacement, drop = "jit", jit_in_place_of_nnx, _OF_NNX_ALONE
    original = getattr(module, name)
    _patched.append((module, name, original))
    setattr(module, name, _replace(f"{module.__name__}.{name}", original, replacement, wrap, drop))


def _patch_export() -> None:
    """Makes `jax.export.export` take what stands for a function: it accepts nothing but what `jax.jit` returned."""
    original = jax.export.export

    @functools.wraps(original)
    def export(function: Any, /, *args: Any, **options: Any) -> Any:
        return original(
            function.as_written() if isinstance(function, StandsForCompiled) else function, *args, **options
        )

    _patched.append((jax.export, "export", original))
    jax.export.export = export


class _PatchOnImport(importlib.abc.MetaPathFinder):
    """Finds the libraries as the finders behind it do, and patches them when they have been imported."""

    def __init__(self, wrap: Wrap) -> None:
        self._wrap, self._finding = wrap, False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in _LIBRARIES or self._finding:
            return None
        # `importlib.util.find_spec` asks all finders, this one as well.
        self._finding = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            # The names are there once the code of the module has run.
            def exec_module(module: types.ModuleType) -> None:
                run(module)
                _patch(module, self._wrap)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
