# SPDX-License-Identifier: Apache-2.0
"""The executable alone, with its results put into new objects by Python code that was written for this one graph.

The code is plain assignments: no loop, no question, nothing is read of the argument. What it costs above the
executable is the making of the objects and, once they are dropped, the freeing: no call that returns new objects can
be much below it.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.inputs import LIST, Arrays, Form
from benchmarks.subjects import executable

NAME = "executable, objects by hand"
DISTRIBUTION = "jax"
_NEVER_ANEW = "builtins", "numpy", "jax"  # the modules of classes whose instances are not made anew


class _Leaves(list[Any]):
    """The flat list that the executable takes, with the form of what a step returns."""

    form: Form
    put: Callable[[Arrays], Any]


def accepts(form: Form) -> bool:
    return True


def taken_as(form: Form) -> Form:
    def build(arrays: Arrays) -> Any:
        leaves = _Leaves(arrays)
        leaves.form, leaves.put = form, _Code(arrays).function(form.build(arrays))
        return leaves

    def arrays(value: Any) -> list[Any]:
        return list(value) if isinstance(value, list) else form.arrays(value)

    return Form(form.name, lambda a: LIST.build(a) if _is_traced(a) else build(a), arrays, form.probe)


def _is_traced(arrays: Arrays) -> bool:
    import jax

    return isinstance(arrays[0], jax.core.Tracer)


def jit(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    call, first = executable.jit(f), None

    def step(given: Any) -> Any:
        nonlocal first
        if first is None:
            first = given
        return first.put(call(given if isinstance(given, _Leaves) else first.form.arrays(given)))

    return step


@dataclass
class _Code:
    """Python code that makes an object like a given one around new arrays."""

    arrays: Arrays

    def __post_init__(self) -> None:
        self._index = {id(array): i for i, array in enumerate(self.arrays)}
        self._lines: list[str] = []
        self._made: dict[int, str] = {}
        self._scope: dict[str, Any] = {"new": object.__new__, "put": object.__setattr__}
        self._names: Iterator[str] = (f"v{i}" for i in itertools.count())

    def function(self, template: object) -> Callable[[Arrays], Any]:
        root = self._value(template)
        lines = "\n    ".join([*self._lines, f"return {root}"])
        exec(f"def build(a):\n    {lines}\n", self._scope)
        return self._scope["build"]

    def _value(self, value: Any) -> str:
        """The name of a value like this one, after the lines that make it."""
        if id(value) in self._index:
            return f"a[{self._index[id(value)]}]"
        if id(value) not in self._made:
            self._made[id(value)] = self._make(value)
        return self._made[id(value)]

    def _make(self, value: Any) -> str:
        name, kind = next(self._names), type(value)
        if kind in (list, tuple):
            inner = "".join(f"{self._value(item)}, " for item in value)
            self._lines.append(f"{name} = [{inner}]" if kind is list else f"{name} = ({inner})")
        elif kind is dict:
            pairs = ", ".join(f"{self._value(key)}: {self._value(item)}" for key, item in value.items())
            self._lines.append(f"{name} = {{{pairs}}}")
        elif isinstance(value, type) or kind.__module__.startswith(_NEVER_ANEW) or "TraceState" in kind.__name__:
            self._scope[name] = value
        else:
            self._scope[f"c{name}"] = kind
            self._lines.append(f"{name} = new(c{name})")
            plain = kind.__setattr__ is object.__setattr__
            for part, item in _parts(value).items():
                held = self._value(item)
                self._lines.append(f"{name}.{part} = {held}" if plain else f"put({name}, {part!r}, {held})")
        return name


def _parts(value: object) -> dict[str, Any]:
    """What an object holds in its slots and in its dict."""
    slots = [slot for cls in type(value).__mro__ for slot in getattr(cls, "__slots__", ())]
    held = {slot: getattr(value, slot) for slot in slots if not slot.startswith("__") and hasattr(value, slot)}
    return held | getattr(value, "__dict__", {})
