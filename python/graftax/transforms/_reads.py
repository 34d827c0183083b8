# SPDX-License-Identifier: Apache-2.0
"""What the user's code reads by name while it is traced, and whether it is still the same."""

from __future__ import annotations

import contextlib
import functools
import sys
import sysconfig
import types
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .. import _core

_LIBRARIES = (
    *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
    "<frozen",
)
_ABSENT = object()

Place = tuple[Any, str]  # a module's dict, a class or a cell, and the name in it


def _value_at(place: Place) -> Any:
    namespace, name = place
    if isinstance(namespace, types.CellType):
        return getattr(namespace, name, _ABSENT) if namespace != types.CellType() else _ABSENT
    return (vars(namespace) if isinstance(namespace, type) else namespace).get(name, _ABSENT)


class Reads:
    """What helpers, methods and jitted functions that ran in traces have found under names.

    What a function itself names is part of the graph of a call; this is what the functions that it calls name: globals,
    attributes of classes and of modules. Installed libraries are taken to stay as they are. What changed in the trace
    itself, a counter of traces say, is left out.
    """

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._are_as_they_were: Callable[[], bool] = lambda: True

    def unchanged(self) -> bool:
        return self._are_as_they_were()

    @contextlib.contextmanager
    def noted(self, own: Iterable[types.CodeType]) -> Generator[None]:
        """While a trace runs. The functions of these codes name what is part of the graph."""
        if sys.getprofile() is not None:  # somebody else is asking
            yield
            return
        seen, own = _Seen(), set(own)

        def note(frame: types.FrameType, event: str, arg: Any) -> None:
            if event == "call" and _is_users(frame.f_code.co_filename):
                seen.frame(frame, frame.f_code in own)

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)
        self._places += [place for place, same in seen.found.values() if same()]
        values = [_value_at(place) for place in self._places]
        self._are_as_they_were = _compared(values, lambda: [_value_at(place) for place in self._places])


class _Seen:
    """What one trace reads."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, str], tuple[Place, Callable[[], bool]]] = {}
        self._codes: set[tuple[int, int]] = set()

    def frame(self, frame: types.FrameType, is_own: bool) -> None:
        code, known = frame.f_code, frame.f_globals
        arguments = frame.f_locals
        self._namespaces(code, arguments.values())
        if (id(code), id(known)) in self._codes:
            return
        self._codes.add((id(code), id(known)))
        self._globals(code, known, is_own)

    def _globals(self, code: types.CodeType, known: dict[str, Any], is_own: bool) -> None:
        names = [name for name in code.co_names if name in known]
        if not is_own:
            for name in names:
                self._read((known, name))
        self._namespaces(code, [known[name] for name in names])

    def _namespaces(self, code: types.CodeType, values: Iterable[Any]) -> None:
        """What the code may read of these modules, classes and instances, and what these functions have compiled in."""
        for value in list(values):
            if isinstance(value, _core.Caller):
                self._compiled(value)
            elif isinstance(value, types.ModuleType):
                if _is_users_module(value.__name__):
                    self._named(code, vars(value), vars(value))
            else:
                for cls in (value if isinstance(value, type) else type(value)).__mro__:
                    if _is_users_module(cls.__module__):
                        self._named(code, cls, vars(cls))
                own: Any = getattr(value, "__dict__", None)
                for name in code.co_names if type(own) is dict else ():
                    if isinstance(own.get(name), _core.Caller):
                        self._compiled(own[name])

    def _named(self, code: types.CodeType, namespace: Any, known: Any) -> None:
        for name in code.co_names:
            if name in known:
                self._read((namespace, name))
                if isinstance(known[name], _core.Caller):
                    self._compiled(known[name])

    def _compiled(self, jitted: _core.Caller) -> None:
        """A jitted function may run without its code: what it captures is in what it has compiled."""
        function = jitted._function
        code = getattr(function, "__code__", None)
        if code is None or (id(code), id(function)) in self._codes:
            return
        self._codes.add((id(code), id(function)))
        for cell in function.__closure__ or ():
            self._read((cell, "cell_contents"))
        self._globals(code, function.__globals__, False)

    def _read(self, place: Place) -> None:
        key = (id(place[0]), place[1])
        if key not in self.found:
            self.found[key] = place, _compared([_value_at(place)], lambda: [_value_at(place)])


def _compared(values: list[Any], now: Callable[[], list[Any]]) -> Callable[[], bool]:
    """Tells whether `now()` still gives the same: containers and objects with equal content, the same arrays."""
    try:
        leaves, graphdef = _core.record(tuple(values), None, [0] * len(values), None)
    except Exception:  # something that cannot be part of a graph: all by identity
        return lambda: all(one is other for one, other in zip(values, now(), strict=True))
    kept = [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]

    def same() -> bool:
        walked = _core.walk(graphdef, tuple(now()))
        return walked is not None and all(
            one is other or (isinstance(one, np.ndarray) and np.array_equal(one, other))
            for one, other in zip(kept, walked[0], strict=True)
        )

    return same


@functools.lru_cache(maxsize=4096)
def _is_users(file: str) -> bool:
    return not file.startswith(_LIBRARIES) and "site-packages" not in file


def _is_users_module(name: str) -> bool:
    module = sys.modules.get(name)
    return name != "builtins" and _is_users(getattr(module, "__file__", None) or "")
