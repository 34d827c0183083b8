# SPDX-License-Identifier: Apache-2.0
"""Random object graphs and random programs over them, as plain data that prints and shrinks.

A ``Recipe`` builds equal graphs as often as it is asked to, with other array values or shapes where wanted.
A ``Program`` is a list of small steps; each picks its target among the nodes that are reachable when it runs,
so that every program runs on every graph, and does the same to equal graphs.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import itertools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import callables
import oracle
from callables import Number, Text
from zoo import Affine, Both, Box, Color, Data, Frozen, Point, Registered, Slotted, SlottedData, Stack

STATICS = (
    0,
    1,
    True,
    1.0,
    0.0,
    -0.0,
    float("nan"),
    None,
    "s",
    b"b",
    ...,
    Color.RED,
    (1, ("x", None)),
    int,
    frozenset({1, "x"}),
)
KEYS = ("k", "a", 0, 1, True, None, (1, "x"), Color.BLUE)
NAMES = ("a", "b", "c")
SHAPES = ((), (2,))
DTYPES = (np.float32, np.int32)

# ── graphs ──

MUTABLE = ("list", "dict", "box", "slotted", "both", "data", "slotted_data", "registered", "deque") + (
    *("ordered", "default", "stack", "set", "bytearray", "array.array", "text", "number"),
)
CALLABLE = (*callables.FUNCTIONS, *(callables.SHARING + name for name in callables.FUNCTIONS), "partial", "partial")
SHELLS: dict[str, Callable[[], Any]] = {
    "list": list,
    "dict": dict,
    "box": Box,
    "slotted": Slotted,
    "both": Both,
    "data": lambda: object.__new__(Data),
    "slotted_data": lambda: object.__new__(SlottedData),
    "registered": lambda: Registered(None, None),
    "deque": lambda: deque(maxlen=4),
    "ordered": OrderedDict,
    "default": lambda: defaultdict(list),
    "stack": Stack,
    "set": set,
    "bytearray": lambda: bytearray(b"x"),
    "array.array": lambda: array.array("b", [1]),
    "text": lambda: Text("t"),
    "number": lambda: Number(7),
}


def shell(kind: str, before: list[Any]) -> Any:
    """An empty mutable node; some are made with what the nodes before it have."""
    if kind == "partial":
        return callables.partial_shell(before)
    return SHELLS[kind]() if kind in SHELLS else callables.function_shell(kind, before)


def affine(weight: Any, bias: Any) -> Affine:
    """As ``Affine(weight, bias)``, whose check of its arguments by JAX would not survive a cycle."""
    new = object.__new__(Affine)
    for name, value in (("weight", weight), ("bias", bias), ("name", "affine")):
        object.__setattr__(new, name, value)
    return new


SPINES: dict[str, Callable[..., Any]] = {
    "tuple": lambda *values: values,
    "point": lambda *values: Point(values[0], values[-1]),
    "frozen": lambda *values: Frozen(values[0], values[-1]),
    "affine": lambda *values: affine(values[0], values[-1]),
    "method": callables.method,
    "proxy": callables.proxy,
}

indices = st.integers(0, 7)
arrays = st.tuples(st.just("array"), st.integers(0, 1), st.integers(0, 1), st.integers(-3, 3), st.booleans())
statics = st.tuples(st.just("static"), st.integers(0, len(STATICS) - 1))
nodes = st.tuples(st.just("node"), indices)
references = st.tuples(st.just("reference"), indices)
atoms = st.one_of(nodes, arrays, nodes, arrays, statics, references)
contents = st.recursive(
    atoms,
    lambda inner: st.tuples(st.sampled_from(sorted(SPINES)), st.lists(inner, min_size=1, max_size=2)),
    max_leaves=3,
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Mutable nodes (kind, contents) that may contain one another, and the roots handed to the program."""

    nodes: list[tuple[str, list[Any]]]
    roots: list[Any]

    def build(self, shift: int = 0, shape: tuple[int, ...] = ()) -> tuple[tuple[Any, ...], list[Any]]:
        """(roots, mutable nodes); ``shift`` is added to every array, ``shape`` put before its own."""
        shells: list[Any] = []
        for kind, _ in self.nodes:
            shells.append(shell(kind, shells))

        def make(content: Any) -> Any:
            match content:
                case ("node", i):
                    return shells[i % len(shells)] if shells else None
                case ("reference", i):
                    return callables.reference(shells[i % len(shells)])
                case ("static", i):
                    return STATICS[i]
                case ("array", size, dtype, value, is_numpy):
                    filled = np.full(shape + SHAPES[size], value + shift, DTYPES[dtype])
                    return filled if is_numpy else jnp.asarray(filled)
                case (spine, inner):
                    return SPINES[spine](*map(make, inner))
            raise AssertionError(content)

        for node, (_, inner) in zip(shells, self.nodes, strict=True):
            fill(node, list(map(make, inner)))
        return tuple(map(make, self.roots)), shells


def fill(shell: Any, values: list[Any]) -> None:
    match shell:
        case list() | deque():
            shell.extend(values)
        case dict():
            shell.update((KEYS[i % len(KEYS)], value) for i, value in enumerate(values))
        case set():
            shell.update(range(len(values)))
        case bytearray() | array.array():
            shell.extend(range(len(values)))
        case types.FunctionType():
            callables.fill_function(shell, values)
        case functools.partial():
            callables.fill_partial(shell, values)
        case _:
            for name, value in zip(names_of(shell), values, strict=False):
                setattr(shell, name, value)


def names_of(x: Any) -> list[str]:
    """The attributes that a program sets: all that the object has room for, and what its flatten covers."""
    if isinstance(x, Registered):
        return ["a", "b"]
    return [name for name in NAMES if hasattr(x, "__dict__") or hasattr(type(x), name)]


def graphs(max_nodes: int = 5) -> st.SearchStrategy[Recipe]:
    node = st.tuples(
        st.one_of(st.sampled_from(MUTABLE), st.sampled_from(CALLABLE)), st.lists(contents, min_size=1, max_size=3)
    )
    return st.builds(Recipe, st.lists(node, min_size=1, max_size=max_nodes), st.lists(contents, min_size=1, max_size=3))


# ── values that a program makes ──


@dataclasses.dataclass
class State:
    """What a running program can reach: its arguments and what it took out of them."""

    roots: tuple[Any, ...]
    held: list[Any]

    def node(self, i: int) -> Any:
        nodes, _ = oracle.reachable([self.roots, self.held])
        nodes = nodes[1:]  # the list that was made just now
        nodes = [node for node in nodes if node is not self.held]
        return nodes[i % len(nodes)] if nodes else None

    def array(self, i: int) -> Any:
        _, found = oracle.reachable([self.roots, self.held])
        return found[i % len(found)] if found else jnp.ones((2,), jnp.float32)

    def value(self, spec: Any) -> Any:
        match spec:
            case ("node", i):
                return self.node(i)
            case ("reference", i):
                self.held.append(node := self.node(i))  # under jit nothing dies before the end
                return callables.reference(node)
            case ("array", i):
                return self.array(i)
            case ("static", i):
                return STATICS[i]
            case ("scale", i):
                x = self.array(i)
                return jnp.multiply(x, jnp.asarray(2, x.dtype))
            case ("add", i, j):
                x, y = self.array(i), self.array(j)
                return jnp.add(x, jnp.sum(y).astype(x.dtype))
            case ("constant", i):
                return jnp.full(SHAPES[i % 2], i, jnp.float32)
            case (kind, inner) if kind in SPINES:
                return SPINES[kind](*map(self.value, inner))
            case (kind, inner):
                fill(new := shell(kind, []), list(map(self.value, inner)))
                return new
        raise AssertionError(spec)


FRESH = ("list", "dict", "box", "slotted", "data", "registered", "deque", "ordered", "set", "text")
FRESH += (*callables.FUNCTIONS, "partial")
plain_values = st.one_of(
    st.tuples(st.just("node"), indices),
    st.tuples(st.just("reference"), indices),
    st.tuples(st.just("array"), indices),
    st.tuples(st.just("scale"), indices),
    st.tuples(st.just("add"), indices, indices),
    st.tuples(st.just("constant"), st.integers(0, 3)),
    st.tuples(st.just("static"), st.integers(0, len(STATICS) - 1)),
)
values = st.recursive(
    plain_values,
    lambda inner: st.tuples(st.sampled_from(FRESH + tuple(sorted(SPINES))), st.lists(inner, min_size=1, max_size=2)),
    max_leaves=3,
)


# ── steps ──

Step = Callable[[Any, Any, int, State], None]


def put_item(x: Any, value: Any, i: int, state: State) -> None:
    if len(x):
        x[i % len(x)] = value


def take_item(x: Any, value: Any, i: int, state: State) -> None:
    if len(x):
        state.held.append(x[i % len(x)])
        del x[i % len(x)]


def pop_last(x: Any, value: Any, i: int, state: State) -> None:
    if len(x):
        state.held.append(x.pop())


def swap(x: Any, value: Any, i: int, state: State) -> None:
    if len(x) > 1:
        j = i % len(x)
        x[j], x[j - 1] = x[j - 1], x[j]


def add_in_place(x: Any, value: Any, i: int, state: State) -> None:
    for j, item in enumerate(x):
        if oracle.is_array(item):
            x[j] = jnp.add(item, jnp.asarray(1, item.dtype))
        elif type(item) is int:
            x[j] += 1


def pop_key(x: Any, value: Any, i: int, state: State) -> None:
    if len(x):
        state.held.append(x.pop(list(x)[i % len(x)]))


def to_the_end(x: Any, value: Any, i: int, state: State) -> None:
    if len(x):
        key = list(x)[i % len(x)]
        x[key] = x.pop(key)


def turn_round(x: Any, value: Any, i: int, state: State) -> None:
    items = list(x.items())
    x.clear()
    x.update(reversed(items))


def miss(x: Any, value: Any, i: int, state: State) -> None:
    if isinstance(x, defaultdict):
        x[f"missed {i}"].append(value)


def set_name(x: Any, value: Any, i: int, state: State) -> None:
    names = names_of(x)
    setattr(x, names[i % len(names)], value)


def delete_name(x: Any, value: Any, i: int, state: State) -> None:
    names = [name for name, _ in oracle.fields(x)]
    if isinstance(x, Registered):
        names = []  # its own flatten needs all of them
    if names:
        state.held.append(getattr(x, names[i % len(names)]))
        delattr(x, names[i % len(names)])


def step_up(x: Any, value: Any, i: int, state: State) -> None:
    for name, item in oracle.fields(x):
        if oracle.is_array(item):
            setattr(x, name, jnp.add(item, jnp.asarray(1, item.dtype)))
        elif type(item) is int:
            setattr(x, name, item + 1)


SEQUENCE: list[Step] = [
    lambda x, value, i, state: x.append(value),
    lambda x, value, i, state: x.clear(),
    lambda x, value, i, state: x.reverse(),
    lambda x, value, i, state: x.extend([value, value]),
    *(put_item, take_item, pop_last, swap, add_in_place),
]
STEPS: dict[type | tuple[type, ...], list[Step]] = {
    types.FunctionType: [*callables.FUNCTION_STEPS, set_name, delete_name],
    functools.partial: [*callables.PARTIAL_STEPS, set_name, delete_name],
    types.CellType: callables.CELL_STEPS,
    list: [
        *SEQUENCE,
        lambda x, value, i, state: x.insert(i % (len(x) + 1), value),
        lambda x, value, i, state: x.__setitem__(slice(i % 3, i % 3 + 1), [value, value]),
    ],
    deque: [
        *SEQUENCE,
        lambda x, value, i, state: x.appendleft(value),
        lambda x, value, i, state: x.rotate(i),
    ],
    dict: [
        lambda x, value, i, state: x.__setitem__(KEYS[i], value),
        lambda x, value, i, state: x.update({KEYS[i]: value, "k": 1}),
        lambda x, value, i, state: x.setdefault(KEYS[i], value),
        lambda x, value, i, state: x.clear(),
        *(pop_key, to_the_end, turn_round, miss),
    ],
    set: [lambda x, value, i, state: x.add(i), lambda x, value, i, state: x.clear()],
    bytearray: [lambda x, value, i, state: x.append(i), lambda x, value, i, state: x.clear()],
    array.array: [lambda x, value, i, state: x.append(i), lambda x, value, i, state: x.__delitem__(slice(0, 1))],
    object: [set_name, set_name, delete_name, step_up],
}


def fail_by_index(*_: Any) -> None:
    [].pop()


def fail_by_frozen(*_: Any) -> None:
    Frozen(1).a = 2  # type: ignore[misc]


def fail_by_value(x: Any, value: Any, i: int, state: State) -> None:
    raise ValueError("the program says no", i)


FAILURES = (fail_by_index, fail_by_frozen, fail_by_value)


@dataclasses.dataclass(frozen=True)
class Program:
    """Steps (node, choice, index, value), then the result; ``failure`` is None or (at which step, how)."""

    steps: list[tuple[int, int, int, Any]]
    result: list[Any]
    failure: tuple[int, int] | None

    def __call__(self, roots: tuple[Any, ...]) -> Any:
        state = State(roots, [])
        for at, (node, choice, i, spec) in enumerate(self.steps):
            if self.failure is not None and self.failure[0] == at:
                FAILURES[self.failure[1]](None, None, i, state)
            target = state.node(node)
            if target is None:
                continue
            kind = next(kind for kind in STEPS if isinstance(target, kind))
            table = STEPS[kind]
            table[choice % len(table)](target, state.value(spec), i, state)
        results = tuple(map(state.value, self.result))
        return results[0] if len(results) == 1 else results


def held(spec: Any) -> Any:
    """The same recipe or program, with the node itself in place of every weak reference to one."""
    if isinstance(spec, (Recipe, Program)):
        return type(spec)(**{f.name: held(getattr(spec, f.name)) for f in dataclasses.fields(spec)})
    if isinstance(spec, (tuple, list)):
        return type(spec)(map(held, spec))
    return "node" if spec == "reference" else spec


def programs(max_steps: int = 10) -> st.SearchStrategy[Program]:
    step = st.tuples(indices, st.integers(0, 10), indices, values)
    failure = st.sampled_from([*[None] * 36, *itertools.product(range(3), range(3))])
    return st.builds(
        Program, st.lists(step, min_size=3, max_size=max_steps), st.lists(values, min_size=1, max_size=2), failure
    )
