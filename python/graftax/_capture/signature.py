# SPDX-License-Identifier: Apache-2.0
"""From a callable to the function that runs, and from its signature to the roots of a call."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from graftax import _core
from graftax._base.handles import with_handles
from graftax._base.missing import MISSING
from graftax._capture.bytecode import globals_in, resolve_lazy_imports
from graftax._capture.constant_values import content, fill
from graftax._capture.namespaces import Rebuilt, Views, with_parts
from graftax._capture.origin import Origin
from graftax._capture.read_set import ReadSet
from graftax._graph.patterns import argument_pattern

GENERATOR = (
    "{name} is a {what}: its body runs after the call has returned, where nothing can be traced. Compile a plain "
    "function and call it from the {what}."
)
NO_SUCH_NAME = "{option}={which!r}: {name} has no argument {which!r}; it takes {names}.{hint}"
IS_VAR_POSITIONAL = "{option}={which!r}: *{which} of {name} is any number of arguments. Write their positions instead."
NO_SUCH_POSITION = "{option}={which}: {name} has no positional argument {which}; it takes {count}."
NOT_FOR = (
    "{option}={which!r}: {name} has no argument {root!r}, with which this pattern of key paths begins. It takes "
    "{names}."
)


def call_partial(
    function: Callable[..., object],
    bound: tuple[object, ...],
    keywords: dict[str, Any],
    /,
    *args: object,
    **kwargs: object,
) -> Any:
    """Runs a `functools.partial`, whose parts are arguments like any other."""
    return function(*bound, *args, **{**keywords, **kwargs})


def call_opaque(function: Callable[..., object], /, *args: object, **kwargs: object) -> Any:
    """Runs a callable that has no Python code of its own."""
    return function(*args, **kwargs)


def resolve(function: object) -> tuple[types.FunctionType, tuple[Any, ...], bool]:
    """Finds the Python function behind a callable.

    Returns:
        (function, arguments that come first, whether the table of entries may belong to the function).
    """
    if isinstance(function, types.FunctionType):
        return function, (), True
    if isinstance(function, _core.Caller):  # jit of a jitted function: one trace, not two
        if function._method is not None:
            return resolve(cast("Any", function).__wrapped__)
        # All partials run `call_partial`, so none of them may have the table of that function.
        return function._function, function._prefix, not function._prefix or function._function is not call_partial
    if isinstance(function, types.MethodType) and isinstance(function.__func__, types.FunctionType):
        return function.__func__, (function.__self__,), True
    if type(function) is functools.partial:
        return call_partial, (function.func, function.args, function.keywords), False  # type: ignore[return-value]
    method = getattr(type(function), "__call__", None)  # noqa: B004  (the function itself is wanted)
    # A static `__call__` has no object that could be an argument, and that of a class gets the class.
    takes_self = not isinstance(inspect.getattr_static(type(function), "__call__", None), (staticmethod, classmethod))
    if isinstance(method, types.FunctionType) and takes_self and not isinstance(function, type):
        return method, (function,), True
    if not callable(function):
        raise TypeError(f"graftax.jit expects a callable, got {type(function).__qualname__}: {function!r}")
    return call_opaque, (function,), False  # type: ignore[return-value]


def is_called_by_its_class(function: object) -> bool:
    """Does it run the `__call__` of an object's class? The class may get another one."""
    if isinstance(function, _core.Caller):
        return function._method is not None
    return not isinstance(
        function, (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, type)
    )


def refuse_generators(function: types.FunctionType) -> None:
    """Raises TypeError for a function whose body does not run when it is called."""
    for test, description in (
        (inspect.isasyncgenfunction, "async generator"),
        (inspect.iscoroutinefunction, "coroutine function"),
        (inspect.isgeneratorfunction, "generator function"),
    ):
        if test(function):
            raise TypeError(GENERATOR.format(name=function.__qualname__, what=description))


def global_names(function: types.FunctionType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the globals that the function's code, with code nested in it, names; those of them that it assigns)"""
    loaded, stored = globals_in(function.__code__)
    scope = function.__globals__
    resolve_lazy_imports(scope, loaded)
    # Builtins are no globals, unless the module has a name of its own in place of one.
    names = [n for n in loaded if n in scope or not hasattr(builtins, n)]
    return tuple(dict.fromkeys([*names, *stored])), stored


def _defaults_of(function: types.FunctionType) -> tuple[Any, ...]:
    """The defaults of its positional and its keyword-only parameters; MISSING where there is none."""
    code, defaults, keywords = function.__code__, function.__defaults__ or (), function.__kwdefaults__ or {}
    keyword_only = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
    without_default = [MISSING] * (code.co_argcount - len(defaults))
    return (*without_default, *defaults, *(keywords.get(name, MISSING) for name in keyword_only))


@dataclasses.dataclass(frozen=True)
class Signature:
    """How the arguments of one function become roots, and how rebuilt roots become a call again."""

    names: tuple[str, ...]  # positional parameters, then keyword-only ones
    positional: int
    var_positional: str | None
    var_keyword: str | None
    cells: tuple[str, ...]
    globals: tuple[str, ...]
    stored: tuple[str, ...]
    origins: tuple[Origin, ...]  # what code reads that the function calls, and names that code assigns
    assigned: frozenset[str]  # globals of the function that are among the origins
    hidden: frozenset[str]  # variables and globals that are not roots: only host functions read them
    code: types.CodeType | None  # the function's code when this was read
    skip: int  # arguments that a bound callable brings along: not counted by static_argnums and the like
    binding: _core.Binding
    defaults: tuple[Any, ...] = ()  # beside `names`; MISSING where there is none
    # Are NumPy arrays constants that it captures, or has as defaults or in the object that it is bound to? So it is
    # where its code asks for their values.
    numpy_is_constant: bool = False

    @staticmethod
    def of(
        function: types.FunctionType,
        skip: int,
        captured: bool,
        origins: Sequence[Origin] = (),
        hidden: frozenset[str] = frozenset(),
        assigned: frozenset[str] = frozenset(),
    ) -> Signature:
        """The signature of a function with code.

        Args:
            skip: how many arguments a bound callable brings along.
            captured: whether variables and globals of the function are roots.
            assigned: globals of the function that are among `origins`.
        """
        # The parameters, as they lie in `co_varnames`: positional, keyword-only, *args, **kwargs.
        code = function.__code__
        variables, count = code.co_varnames, code.co_argcount
        index = count + code.co_kwonlyargcount
        names, defaults = variables[:index], _defaults_of(function)
        var_positional = variables[index] if code.co_flags & inspect.CO_VARARGS else None
        index += var_positional is not None
        var_keyword = variables[index] if code.co_flags & inspect.CO_VARKEYWORDS else None
        # What the function captures. An assigned global has its root among the origins.
        closure = zip(code.co_freevars, function.__closure__ or (), strict=False) if captured else ()
        cells = {name: cell for name, cell in closure if name not in hidden}
        loaded, stored = global_names(function) if captured else ((), ())
        loaded = tuple(name for name in loaded if name not in hidden and name not in assigned)
        stored = tuple(name for name in stored if name not in hidden and name not in assigned)
        binding = _core.Binding(
            names=names,
            defaults=defaults,
            missing=MISSING,
            given=function.__defaults__,
            positional=count,
            positional_only=code.co_posonlyargcount,
            var_positional=var_positional is not None,
            var_keyword=var_keyword is not None,
            cells=tuple(cells.values()),
            globals=function.__globals__ if loaded else None,
            global_names=loaded,
            origins=tuple(origins),
            code=code,
        )
        return Signature(
            names,
            count,
            var_positional,
            var_keyword,
            tuple(cells),
            loaded,
            stored,
            tuple(origins),
            assigned,
            hidden,
            code,
            skip,
            binding,
            defaults,
        )

    @staticmethod
    def nothing() -> Signature:
        """The signature of a function without parameters."""
        return Signature.of_parameters(inspect.Signature())

    def has_roots_of(self, reads: ReadSet) -> bool:
        """Does it have the roots that are known by now?"""
        origins = [origin.what for origin in reads.names.origins]
        return origins == [origin.what for origin in self.origins] and self.hidden == frozenset(reads.names.hidden)

    @staticmethod
    def of_parameters(signature: inspect.Signature) -> Signature:
        """The signature of a function of which only the parameters are known."""
        parameters, kinds = signature.parameters, inspect.Parameter
        last_of_kind = {p.kind: name for name, p in parameters.items()}
        plain = [p for p in parameters.values() if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
        names = tuple(p.name for p in plain)
        positional = sum(p.kind is not kinds.KEYWORD_ONLY for p in plain)
        var_positional, var_keyword = last_of_kind.get(kinds.VAR_POSITIONAL), last_of_kind.get(kinds.VAR_KEYWORD)
        binding = _core.Binding(
            names=names,
            defaults=tuple(MISSING if p.default is p.empty else p.default for p in plain),
            missing=MISSING,
            given=None,
            positional=positional,
            positional_only=sum(p.kind is kinds.POSITIONAL_ONLY for p in plain),
            var_positional=var_positional is not None,
            var_keyword=var_keyword is not None,
            cells=(),
            globals=None,
            global_names=(),
        )
        return Signature(
            names, positional, var_positional, var_keyword, (), (), (), (), frozenset(), frozenset(), None, 0, binding
        )

    # A layout is what `Binding` gives for a call beside its roots: how many arguments are in *args, and then the names
    # of those in **kwargs. It is empty where there are none.

    def root_names(self, layout: tuple[Any, ...]) -> tuple[str, ...]:
        """The name of each root, for messages: `x`, `args[0]`, `scale`, `closure n`, `global W`."""
        extra = layout[0] if layout else 0
        return (
            *self.names[: self.positional],
            *(f"{self.var_positional}[{i}]" for i in range(extra)),
            *self.names[self.positional :],
            *layout[1:],
            *(f"closure {n}" for n in self.cells),
            *(f"global {n}" for n in self.globals),
            *(origin.text() for origin in self.origins),
        )

    def arguments(self, layout: tuple[Any, ...]) -> int:
        """How many roots are arguments; what the function captures comes after them."""
        return len(self.names) + sum(layout[:1]) + len(layout[1:])

    def defaults_among(self, roots: tuple[Any, ...], layout: tuple[Any, ...]) -> frozenset[int]:
        """The numbers of the roots that are defaults of their parameters, or the very same objects."""
        extra = layout[0] if layout else 0
        places = (i if i < self.positional else i + extra for i in range(len(self.defaults)))
        defaults = zip(places, self.defaults, strict=True)
        return frozenset(i for i, default in defaults if default is not MISSING and roots[i] is default)

    def root_index(self, layout: tuple[Any, ...], argument: int | str) -> int | None:
        """The number of the root for an argument's name or position; None where this call has no such argument.

        Positions are those of `static_argnums`: negative ones count from the end, and `self` is not counted.
        """
        names = self.root_names(layout)
        if isinstance(argument, str):
            return names.index(argument) if argument in names else None
        extra = layout[0] if layout else 0
        total = self.positional + extra
        index = argument + self.skip if argument >= 0 else argument + total
        return index if 0 <= index < total else None

    def flags(self, layout: tuple[object, ...], chosen: Sequence[int | str]) -> list[bool]:
        """One flag a root: is it one of the arguments with these names or positions?"""
        indices = {self.root_index(layout, argument) for argument in chosen}
        count = self.arguments(layout) + len(self.cells) + len(self.globals) + len(self.origins)
        return [i in indices for i in range(count)]

    def root_flags(
        self,
        layout: tuple[object, ...],
        static: Sequence[int | str],
        dynamic: Sequence[int | str] = (),
        defaults: Iterable[int] = (),
    ) -> list[int]:
        """One sum of `_core.RootFlag` a root. `defaults` are the numbers of the roots that are defaults."""
        pairs = zip(self.flags(layout, static), self.flags(layout, dynamic), strict=True)
        flags = [s * _core.RootFlag.static + d * _core.RootFlag.dynamic for s, d in pairs]
        for i in range(self.arguments(layout), len(flags)):
            flags[i] |= _core.RootFlag.captured
        # Those among the arguments differ from call to call, so they are no constants.
        if self.numpy_is_constant:
            for i in (*range(self.skip), *defaults, *range(self.arguments(layout), len(flags))):
                flags[i] |= _core.RootFlag.constant
        end = len(flags) - len(self.origins)
        for i in range(end - len(self.globals), end):
            flags[i] |= _core.RootFlag.global_
        return flags

    def check(self, chosen: Sequence[int | str], option: str, name: str, hint: str = "") -> None:
        """Raises ValueError for the name or position of an argument that the function does not take."""
        # Messages have to name the option that the caller wrote.
        is_spelled_as_in_jax = option == "static_arg"  # one option of ours for two of JAX's
        for argument in chosen:
            if is_spelled_as_in_jax:
                option = f"static_arg{'names' if isinstance(argument, str) else 'nums'}"
            parts = {"option": option, "which": argument, "name": name}
            if isinstance(argument, str):
                if argument == self.var_positional:
                    raise ValueError(IS_VAR_POSITIONAL.format(**parts))
                if argument not in self.names and self.var_keyword is None:
                    names = ", ".join(self.names[self.skip :]) or "none"
                    raise ValueError(NO_SUCH_NAME.format(**parts, names=names, hint=hint))
            elif self.var_positional is None and not -self.positional <= argument < self.positional - self.skip:
                raise ValueError(NO_SUCH_POSITION.format(**parts, count=self.positional - self.skip))

    def check_patterns(self, patterns: Sequence[str], option: str, name: str) -> None:
        """Raises ValueError for a text that is no pattern of key paths, or that begins with the name of no argument."""
        argument_names = {*self.names, self.var_positional}
        for text in patterns:
            root = argument_pattern(text, name, f"{option}=").root
            named = root is not None and not root.startswith(("closure ", "global "))
            if named and root not in argument_names and self.var_keyword is None:
                names = ", ".join(self.names) or "none"
                raise ValueError(NOT_FOR.format(option=option, which=text, name=name, root=root, names=names))

    def call(
        self,
        function: types.FunctionType,
        roots: tuple[Any, ...],
        values: list[Any],
        layout: tuple[Any, ...],
        name: str,
        uses_up: bool,
        reads: ReadSet | None = None,
        graph: Rebuilt | None = None,
    ) -> Any:
        """Calls `function` with rebuilt roots: its arguments, closure and globals are the rebuilt ones.

        Args:
            roots: the caller's.
            values: the rebuilt roots, beside them.
            uses_up: whether a result may take the place of an argument that is a handle. The function gets the object
                inside of a handle.
            reads: makes what the function calls see rebuilt globals, class attributes and functions, too.
            graph: is told of rebuilt objects, and asked about them.
        """
        # The roots lie in this order: arguments, variables, the function's own globals, origins.
        positional = self.positional + (layout[0] if layout else 0)
        named = (*self.names[self.positional :], *layout[1:])
        first_cell = positional + len(named)
        first_captured = first_cell + len(self.cells)
        cells = values[first_cell:first_captured]
        own_globals = [Origin(function.__globals__, name) for name in self.globals]
        captured = list(
            zip([*own_globals, *self.origins], values[first_captured:], roots[first_captured:], strict=True)
        )
        views = Views(reads, captured, graph)
        if graph is not None:
            graph.views = views
            for i, (rebuilt_cell, original) in enumerate(zip(cells, roots[first_cell:first_captured], strict=True)):
                if rebuilt_cell is not original:
                    graph.cells[id(rebuilt_cell)] = first_cell + i, original
            views.tell(captured, first_captured)
        is_changed = any(value is not original and not origin.assigned for origin, value, original in captured)
        twin = self._twin(function, cells, views, is_changed)
        scope = twin.__globals__  # as its frames see them: outside of a trace, it gets its module's own afterwards

        def run(arguments: list[Any]) -> Any:
            keywords = dict(zip(named, arguments[positional:], strict=True))
            return views.run(functools.partial(twin, *arguments[:positional], **keywords))

        result = with_handles(run, values[:first_cell], name, uses_up)
        # Without a read set, nothing gives the module what the function assigns in its copy.
        rebuilt_globals = dict(zip(self.globals, values[first_captured:], strict=False))
        lost = [n for n in self.stored if scope.get(n, MISSING) is not rebuilt_globals[n]]
        if lost:
            raise GlobalAssigned(lost)
        return result

    def _twin(
        self, function: types.FunctionType, cells: list[Any], views: Views, is_changed: bool
    ) -> types.FunctionType:
        """The function with rebuilt globals and variables: it runs as that also where nothing watches its frames."""
        own_scope = function.__globals__
        # What the function assigns goes into a copy: a trace that fails must leave the module as it was.
        scope = views.scope(own_scope) if is_changed or self.stored else views.seen(own_scope)
        if not self.cells and scope is own_scope:
            return function
        rebuilt = dict(zip(self.cells, cells, strict=True))
        closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        # If its own code calls it, it is a root, and the rebuilt function has rebuilt defaults.
        base = next((copy for original, copy in views.functions if original is function), function)
        twin = with_parts(base, scope, tuple(rebuilt.get(name, cell) for name, cell in closure) or None)
        views.functions.insert(0, (function, twin))  # before the rebuilt one, whose defaults may be replaced
        return twin

    def held(self, roots: tuple[Any, ...]) -> list[tuple[Origin, types.CellType, Any]]:
        """(name that the code assigns, its cell among the roots of a call, what that holds), before the call."""
        cells = zip(self.origins, roots[len(roots) - len(self.origins) :], strict=True)
        return [(origin, cell, content(cell)) for origin, cell in cells if origin.assigned]

    def look_again(self, roots: tuple[object, ...]) -> None:
        """Puts what the assigned names hold now into their cells."""
        for origin, cell, _ in self.held(roots):
            fill(cell, origin.value())


def give_back(held_cells: list[tuple[Origin, types.CellType, Any]]) -> None:
    """Gives assigned names what a call has put into their cells."""
    for origin, cell, content_before in held_cells:
        if content(cell) is not content_before:
            origin.put(content(cell))


class GlobalAssigned(Exception):
    """The traced function assigned globals; args[0] lists them."""
