# SPDX-License-Identifier: Apache-2.0
"""What one compiled function computes on the host from the numbers of a call, in Python's own arithmetic."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

_PREFIXES = {"neg": "-", "pos": "+", "invert": "~", "not": "not "}
_COMPARISONS = ("<", "<=", "==", "!=", ">", ">=")
# With a constant, these have another result for each number: who asks for the result asks for the number itself.
_ONE_TO_ONE = ("+", "-", "*", "/", "neg", "pos")
_MOST = 3.4028235677973366e38  # halfway from the largest float of 32 bits to 2**128: from here on, JAX has infinity
_CAPACITY = 16  # inputs of one type; a trace that needs more begins anew with more
_SKIPPED = object()  # the value of an operation that is not computed
# Operations whose results may have far more digits than their operands.
_GROWING = frozenset(("*", "**", "<<", "pow", "math.comb", "math.factorial", "math.perm"))
_MOST_BITS = 1 << 12  # of a result that is computed for numbers which no call has
_LONGEST = 60  # characters of an operation in an explanation


def _spelled(name: str, operands: Sequence[str]) -> str:
    """An operation as Python code: of an operator, or of a function of that name."""
    if name in _PREFIXES:
        return _PREFIXES[name] + operands[0]
    return f"{name}({', '.join(operands)})" if name[0].isalpha() else f" {name} ".join(operands)


def total(*numbers: float) -> float:
    """Adds numbers as `sum` does: from Python 3.12 on, more exactly than `+`."""
    return sum(numbers[1:], numbers[0])


def as_jax(value: float) -> float:
    """The number that JAX makes an input of. With the settings of now it may be infinite, without NumPy's warning."""
    too_large = not -_MOST < value < _MOST and not jax.config.jax_enable_x64
    return math.copysign(math.inf, value) if too_large and value == value else value


def item(scalar: Any) -> Any:
    """The Python number that a NumPy scalar is."""
    return scalar.item()


def is_long(name: str, operands: Sequence[Any]) -> bool:
    """May the result of an operation of these numbers have more digits than fit anywhere, and take for ever?"""
    # `pow` with three operands stays below the last one.
    if name not in _GROWING or not all(isinstance(operand, int) for operand in operands) or len(operands) > 2:
        return False
    # An upper bound of the bits: those of `a**n` are n times those of a, and n! is below n**n.
    first, last = operands[0], abs(operands[-1])
    bits = {"*": first.bit_length() + last.bit_length(), "<<": first.bit_length() + last}
    return bits.get(name, first.bit_length() * last) > _MOST_BITS


def refuse_long(name: str, *operands: object) -> None:
    if is_long(name, operands):
        raise OverflowError(f"the result of {name} is too long")


_KNOWN = {"__name__": __name__, "math": math, "np": np, "total": total, "item": item}


def _keep(error: BaseException) -> None:
    """A saved program was compiled in another process: nothing begins anew without symbols."""


class HostProgram:
    """The arithmetic over the symbolic numbers of one entry, as nodes that all its traces share.

    Nodes are known by their index. The first ones are the numbers of the call. Equal operations on equal nodes are one
    node.

    Args:
        kinds: `int` or `float`, of each symbolic number.
        capacity: how many inputs of each type the executable has at least.
    """

    def __init__(self, kinds: tuple[type, ...], capacity: dict[type, int] | None = None) -> None:
        self.kinds = kinds
        self.capacity = {kind: max(_CAPACITY, (capacity or {}).get(kind, 0)) for kind in (int, float)}
        self.guards: dict[tuple[int, str], Any] = {}  # (node, what is compared) -> what it was
        self.asked: dict[int, str] = {}  # node -> the line that asks for its value
        self.leaves: list[int] = []  # which leaves of a call the numbers are
        self.inputs: dict[type, dict[int, int]] = {int: {}, float: {}}  # node -> which input it is
        self.outputs: dict[int, int] = {}  # node -> which output it is
        self.scalars: set[int] = set()  # nodes that are NumPy scalars
        # ("number", index), ("constant", type, key, value) or (name of an operation, nodes of its operands...)
        self._nodes: list[tuple[Any, ...]] = [("number", i) for i in range(len(kinds))]
        self._numbers: dict[tuple[Any, ...], int] = {}  # of nodes; a constant goes by its type and key
        self.lock = threading.RLock()  # held by a call that may trace: it alone writes
        self.give_up: Callable[[BaseException], None] = _keep  # raises where the call begins anew without symbols

    def __getstate__(self) -> dict[str, Any]:
        # Saved programs hold the attributes by their names: renaming one makes older files unreadable.
        return {name: value for name, value in vars(self).items() if name not in ("lock", "give_up")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.RLock(), give_up=_keep)

    def serves(self, numbers: Sequence[int | float]) -> bool:
        """Do its guards hold for the numbers of a call?"""
        if tuple(map(type, numbers)) != self.kinds:
            return False
        try:
            return self.compiled(0)(*numbers) is not None
        except Exception:  # its arithmetic raises for these
            return False

    # ---- written while a function is traced

    def constant(self, value: object) -> int:
        """The node of a constant."""
        # Equal constants are one node, but only where code cannot tell them apart.
        key: object = value
        if isinstance(value, np.generic):
            key = value.tobytes()
        elif isinstance(value, float | tuple):  # -0.0 is not 0.0
            key = repr(value)
        return self._node("constant", type(value), key, value)

    def operation(self, name: str, *operands: int) -> int:
        """The node of an operation, which is an operator or a function that `_KNOWN` leads to."""
        return self._node(name, *operands)

    def _node(self, *node: object) -> int:
        key = node[:3] if node[0] == "constant" else node
        index = self._numbers.setdefault(key, len(self._nodes))
        if index == len(self._nodes):
            self._nodes.append(node)
        return index

    def guard(self, node: int, aspect: str, expected: object, line: str = "") -> None:
        """From now on the entry serves only calls in which this node is as `expected`.

        Args:
            aspect: "value", or "is" for a bool or a type.
            line: where the code asks for it.
        """
        self.asked.setdefault(node, line)
        self.guards.setdefault((node, aspect), expected)

    def input(self, node: int, kind: type) -> int:
        return self.inputs[kind].setdefault(node, len(self.inputs[kind]))

    def output(self, node: int) -> int:
        return self.outputs.setdefault(node, len(self.outputs))

    # ---- read afterwards

    def pinned(self) -> set[int]:
        """The numbers of the call whose value is fixed by a guard: its own, or that of a one-to-one operation on it."""
        pinned: set[int] = set()
        for node, aspect in self.guards:
            if aspect == "value":
                current: int = node
                while self._nodes[current][0] in _ONE_TO_ONE:
                    free = [n for n in self._nodes[current][1:] if self._nodes[n][0] != "constant"]
                    if len(free) != 1:
                        break
                    current = free[0]
                if self._nodes[current][0] == "number":
                    pinned.add(current)
        return pinned

    def numbers_in(self, nodes: Iterable[int]) -> set[int]:
        """The numbers of the call from which these nodes are computed."""
        visited: set[int] = set()
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if node not in visited:
                visited.add(node)
                waiting += self._nodes[node][1:] if self._nodes[node][0] not in ("number", "constant") else ()
        return {node for node in visited if self._nodes[node][0] == "number"}

    def compiled(self, outcomes: int) -> Callable[..., Any]:
        """A function from the numbers of a call to (integer inputs, floating inputs, outcomes, output, ...).

        It returns None if a guard fails. `outcomes` says how many traces it knows of.
        """
        with self.lock:
            return _Source(self).function(outcomes)

    def decisions(self) -> Callable[..., tuple[bool, ...]]:
        """A function from the numbers of a call to how each comparison and test of the code comes out."""
        with self.lock:
            return _Source(self).decisions()

    def vectors(self, ints: tuple[int, ...], floats: tuple[float, ...]) -> tuple[Any, Any]:
        """Inputs as arrays of this call's own: the executable may read them after it has returned."""
        vectors = np.zeros(self.capacity[int], np.int64), np.zeros(self.capacity[float], np.float64)
        for vector, values in zip(vectors, (ints, floats), strict=True):
            vector[: len(values)] = values
        return vectors

    def broken(self, numbers: Sequence[int | float], names: Sequence[str]) -> list[tuple[str, str, str, str]]:
        """(what is compared, as it was, as it is, the line that asks for its value) of each guard that does not hold.

        Args:
            names: of the numbers, for the text.
        """
        # Node by node, in the order of the code, up to where it goes another way.
        texts, values, broken = self._texts(names), list[Any](), list[tuple[str, str, str, str]]()
        guards, stops = self.guards_by_node(), False
        for node in range(len(self._nodes)):
            value = self._value(node, values, numbers, stops)
            values.append(value)
            for _, expected in guards.get(node, ()) if value is not _SKIPPED else ():
                if type(value) is not type(expected) or repr(value) != repr(expected):
                    broken.append((texts[node], repr(expected), repr(value), self.asked.get(node, "")))
            stops = stops or bool(broken) or isinstance(value, Exception)
        # JAX cannot take every number as an input.
        for kind, nodes in self.inputs.items():
            for node in nodes:
                value = values[node]
                if isinstance(value, Exception) or (kind is int and value is not _SKIPPED and not fits(value)):
                    requirement = "an int that JAX can take" if kind is int else "a float"
                    broken.append((texts[node], requirement, repr(value), ""))
        return broken

    def guards_by_node(self) -> dict[int, list[tuple[str, Any]]]:
        guards: dict[int, list[tuple[str, Any]]] = {}
        for (node, aspect), expected in self.guards.items():
            guards.setdefault(node, []).append((aspect, expected))
        return guards

    def _value(self, node: int, values: Sequence[Any], numbers: Sequence[int | float], stops: bool) -> Any:
        """The value of a node, from those of the nodes before it; the error where its arithmetic raises one.

        After the first error, or the first guard that does not hold, nothing more is computed (`stops`): the code goes
        another way for these numbers, and `2**n` may take for ever.
        """
        name, *operands = self._nodes[node]
        if name in ("number", "constant"):
            return numbers[operands[0]] if name == "number" else operands[-1]
        if error := next((values[operand] for operand in operands if isinstance(values[operand], Exception)), None):
            return error
        return _SKIPPED if stops else _computed(name, [values[operand] for operand in operands])

    def _texts(self, names: Sequence[str]) -> list[str]:
        """Each node as Python code, cut to a length: with shared nodes, the whole text may be exponentially long."""
        spellings: list[str] = []
        for name, *operands in self._nodes:
            if name == "number":
                number: int = operands[0]
                spellings.append(names[number])
            elif name == "constant":
                spellings.append(repr(operands[-1]))
            else:
                texts = [spellings[operand] for operand in operands]
                if len(operands) == 2 and not name[0].isalpha() and name not in _COMPARISONS:
                    texts = [f"({text})" if " " in text else text for text in texts]
                text = _spelled(name, texts)
                spellings.append(text if len(text) <= _LONGEST else f"...{text[3 - _LONGEST :]}")
        return spellings

    def constants(self) -> list[Any]:
        return [node[-1] for node in self._nodes if node[0] == "constant"]


def _computed(name: str, operands: Sequence[object]) -> Any:
    names = [f"n{i}" for i in range(len(operands))]
    try:
        # An explanation computes single nodes, with the same text that the compiled program has.
        return eval(_spelled(name, names), dict(_KNOWN), dict(zip(names, operands, strict=True)))
    except (ArithmeticError, ValueError) as error:
        return error


class _Source:
    """Compiles a HostProgram to Python functions. In their text, node i is `n{i}`."""

    def __init__(self, program: HostProgram) -> None:
        self._program, self._nodes = program, program._nodes  # pyright: ignore[reportPrivateUsage]
        self._scope: dict[str, Any] = {**_KNOWN, "sign": math.copysign, "is_wide": _is_wide, "as_jax": as_jax}
        self._lines: list[str] = []

    def function(self, outcomes: int) -> Callable[..., Any]:
        """As `HostProgram.compiled`."""
        guards = self._program.guards_by_node()
        for index, node in enumerate(self._nodes):  # all: what nobody needs may raise, in plain Python too
            self._compute(index, node)
            for aspect, expected in guards.get(index, ()):
                self._guard(index, aspect, expected)
        results = [self._inputs(int), self._inputs(float), str(outcomes)]
        results += [f"n{node}" for node in self._program.outputs]
        return self._compiled(results)

    def decisions(self) -> Callable[..., tuple[bool, ...]]:
        """As `HostProgram.decisions`. It is called with numbers that no call has, so it refuses long results."""
        self._scope["refuse_long"] = refuse_long
        for index, (name, *operands) in enumerate(self._nodes):
            if name in _GROWING:
                self._lines.append(f"refuse_long({name!r}, {', '.join(f'n{operand}' for operand in operands)})")
            self._compute(index, (name, *operands))
        guards = self._program.guards.items()
        return self._compiled([f"n{node}" for (node, _), expected in guards if type(expected) is bool])

    def _compiled(self, results: Sequence[str]) -> Callable[..., Any]:
        names = ", ".join(f"n{i}" for i in range(len(self._program.kinds)))
        # One Python function, since it runs on each call of the entry.
        text = f"def compute({names}):\n  " + "\n  ".join(
            [*self._lines, f"return ({''.join(map('{},'.format, results))})"]
        )
        exec(text, self._scope)
        return self._scope["compute"]

    def _compute(self, index: int, node: tuple[Any, ...]) -> None:
        if node[0] == "constant":
            self._scope[f"n{index}"] = node[-1]
        elif node[0] != "number":
            self._lines.append(f"n{index} = " + _spelled(node[0], [f"n{operand}" for operand in node[1:]]))

    def _guard(self, index: int, aspect: str, expected: object) -> None:
        name, constant = f"n{index}", f"g{index}_{aspect}"
        self._scope[constant] = expected
        differs = f"{name} is not {constant}"
        # A nan equals no number, and 0.0 equals -0.0, from which code may compute something else.
        if aspect == "value":
            differs = f"{name} != {constant}"
            if expected != expected:
                differs = f"{name} == {name}"
            elif isinstance(expected, float | np.floating) and not expected:
                differs += f" or sign(1.0, {name}) != {math.copysign(1.0, expected)}"
        self._lines.append(f"if {differs}: return None")

    def _inputs(self, kind: type) -> str:
        """The values of the inputs of a type, in order, as JAX can take them."""
        values: list[str] = []
        for node in list(self._program.inputs[kind])[: self._program.capacity[kind]]:
            value = f"n{node}"
            if node in self._program.scalars:
                self._lines.append(f"i{node} = {kind.__name__}({value})")
                value = f"i{node}"
            # An int that JAX cannot take is not for this entry; a float may have to become infinite.
            if kind is int:
                self._lines.append(f"if not {-(1 << 31)} <= {value} < {1 << 31} and not is_wide({value}): return None")
            else:
                value = f"{value} if {-_MOST} < {value} < {_MOST} else as_jax({value})"
            values.append(value + ",")
        return f"({' '.join(values)})"


def _is_wide(value: int) -> bool:
    """Does JAX have 64 bits now, and does this integer fit into them?"""
    return jax.config.jax_enable_x64 and -(1 << 63) <= value < 1 << 63


def fits(value: int) -> bool:
    """Can JAX take this integer, with the settings of now?"""
    return -(1 << 31) <= value < 1 << 31 or _is_wide(value)
