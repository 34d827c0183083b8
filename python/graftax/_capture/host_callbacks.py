# SPDX-License-Identifier: Apache-2.0
"""Host functions of JAX's callbacks: what they capture may be a copy that a running trace has made."""

from __future__ import annotations

import functools
import gc
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.extend.core

from graftax import _core
from graftax._base.errors import GraftaxError, LostChangeWarning
from graftax._capture.bytecode import instructions_of
from graftax._capture.constant_values import content
from graftax._capture.namespaces import Rebuilt
from graftax._capture.signature import global_names, resolve
from graftax._jax.equations import user_callback
from graftax._jax.inner_frames import inner_frames
from graftax._jax.tracebacks import caller_level
from graftax._jax.traces import equations

COPY_CHANGED = (
    "{name}: its host function {host} seems to change {paths}, which is a copy made for the trace, because {name} "
    "uses that object too: the change would be lost. Use the object in the host function only, and define that "
    "function outside of {name}. (graftax.io_callback, unlike JAX's callbacks, raises an error if a copy is changed.)"
)

READ_TOO = (
    "{name}: its host function {host} seems to change {paths}, which {name} uses, too. {name} sees what is there when "
    "it is called, not what the host function leaves there during the call. Use the object in the host function only, "
    "or return the value from {name} and change the object outside."
)

_Traces = Sequence[tuple[Sequence[object], Sequence[object]]]  # of each running trace: the caller's roots, the rebuilt

# Instructions and methods by which code changes an object.
_STORES = frozenset({"STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE", "STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL"})
_METHODS = frozenset(
    name
    for cls in (list, dict, set, bytearray)
    for name in ("append", "extend", "insert", "pop", "popitem", "remove", "clear", "sort", "reverse", "update", "add")
    if hasattr(cls, name)
) | {"discard", "setdefault", "appendleft", "popleft", "extendleft", "rotate", "__setitem__", "__setattr__"}
_OWN = __name__.partition(".")[0] + "."


def calls_host(since: int) -> bool:
    """Do `equations()[since:]` call a function on the host that is not JAX's own, as that of `jax.debug.print` is?"""
    hosts = host_functions(since, pure=True)
    return any(not (getattr(host, "__module__", None) or "").startswith("jax.") for host in hosts)


def host_functions(since: int, pure: bool = False) -> list[Any]:
    """The functions with side effects that `equations()[since:]` call on the host; with `pure`, the others too."""
    noted = equations()[since:]
    if not pure:  # JAX may hold those without effects weakly; 0.8 has the others behind a function
        noted = [each for each in noted if type(each) is not weakref.ref and getattr(each, "effects", True)]
    hosts = (equation.params.get("callback") for equation in _equations(noted, pure))
    return [user_callback(host) for host in hosts if host is not None]


def _equations(noted: list[Any], pure: bool) -> Iterator[Any]:
    """These equations, and those of the jaxprs within them; without `pure`, those with effects."""
    # Equations that functions of JAX's own have made call nobody else's code.
    todo, visited = _core.outside(noted, inner_frames()) if noted else [], set[Any]()
    while todo:
        equation = todo.pop()
        if not (pure or equation.effects):
            continue
        yield equation
        if "callback" in equation.params:
            continue
        for value in equation.params.values():
            for part in value if isinstance(value, list | tuple) else (value,):  # branches are several
                jaxpr: Any = getattr(part, "jaxpr", part)  # of a closed one; JAX 0.12 has no other
                if isinstance(jaxpr, jax.extend.core.Jaxpr) and jaxpr not in visited:
                    visited.add(jaxpr)
                    todo += jaxpr.eqns


def rule_codes(since: int) -> set[types.CodeType]:
    """The code of the derivative rules that `equations()[since:]` hold. JAX may run them after the trace."""
    codes_of_rules, visited = set[types.CodeType](), set[int]()
    # JAX wraps a rule in functions, partials and objects of its own, so all that its parameters hold is gone over.
    todo = [
        value
        for equation in _equations(list(equations()[since:]), True)
        if "bwd" in equation.params or "jvp_jaxpr_fun" in equation.params
        for value in equation.params.values()
        if not isinstance(getattr(value, "jaxpr", value), jax.extend.core.Jaxpr)
    ]
    while todo:
        value = todo.pop()
        if id(value) in visited or isinstance(value, type | types.ModuleType):
            continue
        visited.add(id(value))
        if isinstance(value, types.FunctionType):
            codes_of_rules.add(value.__code__)
            todo += [value.__closure__, value.__defaults__]
        else:
            todo += gc.get_referents(value)
    return codes_of_rules


def copied(callback: Callable[..., object], traces: _Traces) -> tuple[tuple[Any, ...], tuple[str, ...]] | None:
    """(values, their names) that a host function captures and that lead to objects which a running trace has rebuilt.

    The trace ends before the host function runs: what that changes in rebuilt objects would be lost.
    """
    copies: set[int] = set()
    for roots, values in traces:
        # What a trace passes through is the caller's own object, and among both.
        copies |= _nodes(tuple(values)) - _nodes(tuple(roots))
    captured = _captured_of(callback, copies)
    return (tuple(value for _, value in captured), tuple(name for name, _ in captured)) if captured else None


def warn_of_changes(name: str, traces: _Traces, since: int, roots: set[tuple[int, str | None]]) -> None:
    """Warns of host functions that seem to change what the traced function uses, or a copy of it.

    Their code decides, as nothing sees what they change. Those of `graftax.io_callback` are checked when they run.

    Args:
        name: of the traced function.
        traces: those that are running; the last one is that of the function.
        since: how many equations there were before that trace.
        roots: the keys of the globals that are its roots.
    """
    for host in host_functions(since):
        if (getattr(host, "__module__", None) or "").startswith(_OWN) or not _writes(host):
            continue
        captured_copies = copied(host, traces)
        if captured_copies is not None:
            message, paths = COPY_CHANGED, captured_copies[1]
        else:  # it captures the caller's own objects, of which the function has copies
            originals = _nodes(tuple(traces[-1][0])) - _nodes(tuple(traces[-1][1]))
            names = [captured for captured, _ in _captured_of(host, originals)]
            message, paths = READ_TOO, (*names, *_assigned_among(host, roots))
        if paths:
            called = getattr(host, "__qualname__", type(host).__qualname__)
            text = message.format(name=name, host=called, paths=", ".join(dict.fromkeys(paths)))
            warnings.warn(text, LostChangeWarning, caller_level())


def give_own(since: int, graph: Rebuilt, written: set[int]) -> None:
    """Host functions run after the trace: what they capture becomes the caller's own again.

    Args:
        since: how many equations there were before the trace.
        graph: knows the rebuilt variables and globals of the traced function, and the caller's.
        written: the roots that the function changes. What these hold when the host function runs is not known.
    """
    for host, is_checked in _functions(since):
        if is_checked and _writes(host):  # that is an error when it runs
            continue
        # Variables and globals go back one by one, except those that lead to a root which the function changes.
        pairs = [(cell, graph.cells.get(id(cell))) for cell in host.__closure__ or ()]
        closure = tuple(
            original[1] if original is not None and original[0] not in written else cell for cell, original in pairs
        )
        scope = graph.scopes.get(id(host.__globals__))
        has_scope = scope is not None and not any(scope[1].get(name) in written for name in global_names(host)[0])
        if has_scope or any(
            cell is not original_cell for cell, original_cell in zip(closure, host.__closure__ or (), strict=True)
        ):
            _core.give_parts(host, scope[0] if scope is not None and has_scope else host.__globals__, closure or None)


def codes(since: int) -> set[types.CodeType]:
    """The code of the functions that `equations()[since:]` call on the host."""
    return {host.__code__ for host, _ in _functions(since)}


def _functions(since: int) -> Iterator[tuple[types.FunctionType, bool]]:
    """(function on the host, whether it belongs to a callback of graftax, which checks what it changes)"""
    for callback in host_functions(since, pure=True):
        # A callback of graftax is a method of an object that has the host function.
        host = getattr(getattr(callback, "__self__", None), "host_function", callback)
        is_checked = host is not callback
        while isinstance(host, functools.partial):
            host = host.func
        if isinstance(host, types.FunctionType):
            yield host, is_checked


def _captured_of(callback: Callable[..., Any], nodes: set[int]) -> list[tuple[str, Any]]:
    """(name, value) of what a host function captures that leads to one of these nodes."""
    return [(name, value) for name, value in _captured(callback) if _nodes((value,)) & nodes] if nodes else []


def _assigned_among(host: object, roots: set[tuple[int, str | None]]) -> list[str]:
    """The globals among `roots` that a host function, or what it calls, assigns."""
    scope = id(resolve(host)[0].__globals__)
    assigned = [
        instruction.argval
        for code in _codes(host)
        for instruction in instructions_of(code)
        if instruction.opname == "STORE_GLOBAL"
    ]
    return [f"global {name}" for name in assigned if (scope, name) in roots]


def _captured(callback: Callable[..., object]) -> list[tuple[str, Any]]:
    """(name, value) of all that a host function captures: what it is bound to, its variables, its globals."""
    plain, prefix, _ = resolve(callback)
    # `losses.append` is a method in C: for `resolve` it is a callable without code, and not bound to the list.
    bound = (callback.__self__,) if isinstance(callback, types.BuiltinMethodType) else prefix
    captured = [(f"what {getattr(callback, '__name__', 'it')} is bound to", value) for value in bound]
    cells = zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True)
    captured += [(f"closure {name}", cell) for name, cell in cells]
    scope = plain.__globals__
    return captured + [(f"global {name}", scope[name]) for name in global_names(plain)[0] if name in scope]


def _nodes(roots: tuple[object, ...]) -> set[int]:
    """The identities of the mutable nodes that are reached from `roots`."""
    try:
        walked = _core.walk(_core.record(roots)[1], roots)
    except GraftaxError:  # a file, a lock, a generator: nothing that a trace rebuilds
        return set()
    return set() if walked is None else set(map(id, walked[1]))


def _writes(host: object) -> bool:
    """Does the code of a host function look as if it changes an object?"""
    if isinstance(host, types.BuiltinFunctionType):
        return host.__name__ in _METHODS
    return any(
        instruction.opname in _STORES
        or (instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and instruction.argval in _METHODS)
        or (instruction.opname == "STORE_DEREF" and instruction.argval in code.co_freevars)
        for code in _codes(host)
        for instruction in instructions_of(code)
    )


def _codes(host: object) -> Iterator[types.CodeType]:
    """The code of a function, of those that it captures, and of methods of its instance that it names."""
    todo, visited = [host], set[int]()
    while todo:
        function = todo.pop()
        if isinstance(function, types.CodeType):
            yield function
            todo += [constant for constant in function.co_consts if isinstance(constant, types.CodeType)]
        elif callable(function) and id(function) not in visited:
            visited.add(id(function))
            plain, prefix, _ = resolve(function)
            # The object of a bound method, or the instance whose `__call__` runs: which of its methods run, names say.
            for value in prefix:
                todo += [value] if callable(value) else []
                todo += [x for n in plain.__code__.co_names if callable(x := vars(type(value)).get(n))]
            captured = [value for _, value in _captured(function)]
            values = [content(value) if isinstance(value, types.CellType) else value for value in captured]
            todo += [value for value in values if isinstance(value, types.FunctionType)]
            todo.append(plain.__code__)
