# SPDX-License-Identifier: Apache-2.0
"""Random programs with `donate="auto"` in which arrays are held in random ways: none that can be reached is deleted.

python tests/support/held_arrays.py 100000 [seed]

`GRAFTAX_HELD_SIZE` is the number of elements; `GRAFTAX_HELD_PLACE=sharded`, or `replicated`, puts them on all devices.
"""

from __future__ import annotations

import collections
import functools
import os
import random
import sys
import time
import types
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import graftax
from array_holders import HOLDERS, WORKERS, buffers, last_buffer, with_the_buffers_of

SIZE = int(os.environ.get("GRAFTAX_HELD_SIZE", 1 << 14))  # elements, float32
SLOW = {"pullback", "jit", "graftax_jit", "thread"}  # compile or start something: drawn seldom


def replaces_all(state: Any) -> None:
    for name in ("a", "b"):
        state[name] = state[name] * 0.5 + 1
    state["layers"][0].w = state["layers"][0].w + state["a"].sum() * 0
    state["layers"][1].w = state["layers"][1].w + 2


def replaces_some(state: Any) -> None:
    state["a"] = state["a"] + state["b"]
    state["layers"][1].w = state["layers"][1].w * 0.25


def swaps(state: Any) -> None:
    state["a"], state["b"] = state["b"], state["a"]
    state["layers"][0].w = state["layers"][0].w + 1


def keeps_the_last(state: Any) -> None:
    state["last"] = state["a"]
    state["a"] = state["a"] * 0.5 + 1
    state["layers"][0].w = state["layers"][0].w - 1


def returns_one(state: Any) -> Any:
    old = state["b"]
    state["b"] = old * 0.5
    state["a"] = state["a"] + 1
    return old


def makes_a_new_list(state: Any) -> None:
    state["layers"] = [SimpleNamespace(w=layer.w + 1) for layer in state["layers"]]
    state["a"] = state["a"] * 0.5


def ties(state: Any) -> None:
    state["a"] = state["layers"][0].w
    state["b"] = state["b"] + state["a"]


def makes_new_containers(state: Any) -> None:
    moments = state["moments"]
    state["moments"] = (moments[0] + 1, {"m": moments[1]["m"] * 0.5})
    state["layers"][0] = SimpleNamespace(w=state["layers"][0].w + 1)


def moves_a_container(state: Any) -> None:
    state["layers"][0] = state["layers"][1]
    state["layers"][1] = SimpleNamespace(w=state["a"] + 1)
    state["moments"] = (state["moments"][0], {"m": state["a"]})


def puts_one_in_two_places(state: Any) -> None:
    new = state["a"] * 0.5 + 1
    state["a"] = state["layers"][1].w = new


def returns_the_new_one(state: Any) -> Any:
    state["a"] = state["a"] * 0.5 + 1
    state["b"] = state["b"] + 1
    return state["a"]


def computes_nothing(state: Any) -> None:
    state["a"] = state["a"].reshape(state["a"].shape)
    state["b"] = state["b"] * 1
    state["last"] = state["last"] + 1


STEPS = [replaces_all, replaces_some, swaps, keeps_the_last, returns_one, makes_a_new_list, ties]
STEPS += [makes_new_containers, moves_a_container, puts_one_in_two_places, returns_the_new_one, computes_nothing]


def takes_an_array(array: Any) -> Any:
    return array * 0.5 + 1


def takes_containers(array: Any) -> Any:
    return [{"w": array[0]["w"] + 1}]


def returns_its_argument(array: Any) -> Any:
    return [array, array + 1]


# What is called with an array that a caller may have: how it is passed, and where the array of the result is.
FUNCTIONS = {
    takes_an_array: (lambda array: array, lambda result: result),
    takes_containers: (lambda array: [{"w": array}], lambda result: result[0]["w"]),
    returns_its_argument: (lambda array: array, lambda result: result[0]),
}


# Ways to call a function with what `make` makes: the result, and what has the argument still.
def with_a_variable(f: Any, make: Any) -> Any:
    argument = make()
    return f(argument), argument


def with_a_partial(f: Any, make: Any) -> Any:
    call = functools.partial(f, make())
    return call(), call.args[0]


def with_an_inner_partial(f: Any, make: Any) -> Any:
    call = functools.partial(functools.partial(functools.partial(f), make()))
    return call(), call.args[0]


def with_a_method(f: Any, make: Any) -> Any:
    call = types.MethodType(f, make())
    return call(), call.__self__


def with_a_method_of_a_partial(f: Any, make: Any) -> Any:
    call = types.MethodType(functools.partial(f), make())
    return call(), call.__self__


def with_starred_arguments(f: Any, make: Any) -> Any:
    arguments = (make(),)
    return f(*arguments), arguments[0]


def with_starred_keywords(f: Any, make: Any) -> Any:
    arguments = {"array": make()}
    return f(**arguments), arguments["array"]


def with_a_map(f: Any, make: Any) -> Any:
    arguments = [make()]
    return next(map(f, arguments)), arguments[0]


def with_a_reduction(f: Any, make: Any) -> Any:
    arguments = [make()]
    return functools.reduce(lambda _, array: f(array), arguments, None), arguments[0]


def with_the_key_of_a_sort(f: Any, make: Any) -> Any:
    arguments, results = [make()], []
    sorted(arguments, key=lambda array: (results.append(f(array)), 0)[1])
    return results[0], arguments[0]


def with_a_walrus(f: Any, make: Any) -> Any:
    return f(argument := make()), argument


def with_a_dict_that_is_read(f: Any, make: Any) -> Any:
    arguments = {"array": make()}
    return f(arguments["array"]), arguments["array"]


def with_a_worker(f: Any, make: Any) -> Any:
    argument = make()
    return WORKERS.submit(f, argument).result(), argument


CALLS = {name[5:]: value for name, value in list(globals().items()) if name.startswith("with_a")}
CALLS |= {name[5:]: value for name, value in list(globals().items()) if name.startswith("with_star")}
TEMPORARIES = ["a_temporary", "a_keyword", "what_is_taken_out"]
CALLS |= {
    "the_key_of_a_sort": with_the_key_of_a_sort,
    "a_temporary": lambda f, make: (f(make()), None),
    "a_keyword": lambda f, make: (f(array=make()), None),
    "what_is_taken_out": lambda f, make: (f([make()].pop()), None),
}

# What is held besides arrays: an object of the state, and how an array is read from it.
PARTS = {
    "layers": (lambda state: state["layers"], lambda layers: layers[0].w),
    "layer": (lambda state: state["layers"][1], lambda layer: layer.w),
    "attributes": (lambda state: vars(state["layers"][0]), lambda attributes: attributes["w"]),
    "moments": (lambda state: state["moments"], lambda moments: moments[0]),
    "mapping": (lambda state: state["moments"][1], lambda mapping: mapping["m"]),
    "values": (lambda state: state["moments"][1].values(), lambda values: next(iter(values))),
    "items": (lambda state: iter(state["layers"]), lambda layers: next(layers).w),
}


def _place() -> Any:
    kind = os.environ.get("GRAFTAX_HELD_PLACE")
    if kind is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    spec = {"sharded": jax.sharding.PartitionSpec("i"), "replicated": jax.sharding.PartitionSpec()}[kind]
    return jax.sharding.NamedSharding(mesh, spec)


PLACE = _place()  # arrays that are not put there would be of other types, for which all is compiled again


# Other arrays of the same values, which replace an array of the state: of memory that NumPy or another array has,
# too. With what still has it.
def through_dlpack(array: Any) -> tuple[Any, Any]:
    memory = np.zeros(4 * SIZE + 64, np.uint8)
    begin = -memory.ctypes.data % 64  # where XLA takes it as it is
    source = memory[begin : begin + 4 * SIZE].view(np.float32)
    source[:] = array
    return jax.device_put(jnp.from_dlpack(source, copy=False), PLACE), source


def through_numpy(array: Any) -> tuple[Any, Any]:
    source = np.array(array)
    return jax.device_put(source, PLACE, may_alias=True), source


ORIGINS = {
    "dlpack": through_dlpack,
    "numpy": through_numpy,
    "view": lambda array: (jax.device_put(np.asarray(array), PLACE), None),
    "device_put": lambda array: (jax.device_put(array, PLACE), array),
    "assembled": lambda array: (
        jax.make_array_from_single_device_arrays(array.shape, array.sharding, buffers(array)),
        array.addressable_data(0),
    ),
    "buffers": lambda array: (jax.device_put(with_the_buffers_of(array), PLACE), last_buffer(array)),
    "shards": lambda array: (
        jax.make_array_from_single_device_arrays(
            array.shape, array.sharding, [shard.data for shard in array.addressable_shards]
        ),
        None,
    ),
    "copy": lambda array: (jnp.copy(array), array),
}


_VALUES = np.float32([0, 1, 9, 2, 3, 4, 5])
PLACES = ["a", "b", "last", "layers[0].w", "layers[1].w", "moments[0]", "moments[1].m"]
NAMES = list(HOLDERS)


@functools.partial(jax.jit, out_shardings=PLACE)
def _filled() -> list[Any]:
    return [jnp.full(SIZE, value) for value in _VALUES]


def new_state(values: Any) -> Any:
    a, b, last, w0, w1, m0, m1 = values
    layers = [SimpleNamespace(w=w0), SimpleNamespace(w=w1)]
    return {"a": a, "b": b, "last": last, "layers": layers, "moments": (m0, {"m": m1})}


def places(state: Any) -> dict[str, Any]:
    named = {name: state[name] for name in ("a", "b", "last")}
    named |= {"moments[0]": state["moments"][0], "moments[1].m": state["moments"][1]["m"]}
    return named | {f"layers[{i}].w": layer.w for i, layer in enumerate(state["layers"])}


def place(state: Any, name: str, array: Any) -> None:
    if name.startswith("layers"):
        state["layers"][int(name[len("layers[")])].w = array
    else:
        state[name] = array


class Held(NamedTuple):
    name: str
    read: Callable[[], Any]
    expected: Callable[[], Any]


class Program:
    """A random sequence of calls, of holders and of new arrays, beside the same one on plain numbers."""

    def __init__(self, seed: int, counts: collections.Counter[str]) -> None:
        self._draw, self._counts = random.Random(seed), counts
        self._state, self._plain = new_state(_filled()), new_state(_VALUES)
        self._held: list[Held] = []
        self.log: list[str] = [f"program {seed}"]

    def run(self, steps: Sequence[tuple[Any, Any]], functions: Sequence[tuple[Any, Any]]) -> None:
        draw = self._draw
        for _ in range(draw.randint(2, 7)):
            for _ in range(draw.choice([0, 0, 1, 1, 2])):
                self._hold_array()
            if draw.random() < 0.3:
                self._hold_part()
            if draw.random() < 0.3:
                self._replace_array()
            if self._held and draw.random() < 0.3:
                self._held.pop(draw.randrange(len(self._held)))
            self._call(*draw.choice(steps), functions)
        for name, value in places(self._state).items():
            self._check(name, value, places(self._plain)[name])
        for held in self._held:
            self._check(held.name, held.read(), held.expected())

    def _hold(self, name: str, read: Callable[[], Any], expected: Callable[[], Any]) -> None:
        self.log.append(name)
        self._held.append(Held(name, read, expected))

    def _hold_array(self) -> None:
        name, holder = self._draw.choice(PLACES), self._draw.choice(NAMES)
        if holder in SLOW and self._draw.random() > 0.02:
            return
        number = places(self._plain)[name]
        self._hold(f"{name} in {holder}", HOLDERS[holder](places(self._state)[name]), lambda: number)
        self._counts["held"] += 1

    def _hold_part(self) -> None:
        name = self._draw.choice(list(PARTS))
        take, read = PARTS[name]
        of_state, of_plain = take(self._state), take(self._plain)
        self._hold(f"part {name}", lambda: read(of_state), lambda: read(of_plain))

    def _replace_array(self) -> None:
        name, origin = self._draw.choice(PLACES[:5]), self._draw.choice(list(ORIGINS))
        array, source = ORIGINS[origin](places(self._state)[name])
        number = places(self._plain)[name]
        place(self._state, name, array)
        place(self._plain, name, number + 0)
        if source is not None:
            self._hold(f"{name} from {origin}", lambda: source, lambda: number)

    def _pass_array(self, function: tuple[Any, Any]) -> None:
        """Calls a function with an array that is made for it, and which something may hold besides."""
        jitted, plain = function
        pack, unpack = FUNCTIONS[plain]
        draw = self._draw
        name, origin, call = draw.choice(PLACES), draw.choice([*ORIGINS]), draw.choice([*CALLS, *TEMPORARIES * 4])
        holder = draw.choice(NAMES) if draw.random() < 0.5 else None
        number = places(self._plain)[name]
        held: list[Any] = []

        def make() -> Any:
            array, source = ORIGINS[origin](places(self._state)[name])
            if source is not None and draw.random() < 0.5:
                held.append(lambda: source)
            if holder is not None and holder not in SLOW:
                held.append(HOLDERS[holder](array))
            return pack(array)

        self.log.append(f"{plain.__name__} of {name} from {origin}, held in {holder}, by {call}")
        result, argument = CALLS[call](jitted, make)
        self._counts["calls"] += 1
        expected = unpack(plain(pack(number)))
        self._hold("result", lambda: unpack(result), lambda: expected)
        for read in held:
            self._hold("source or holder", read, lambda: number)
        if argument is not None:
            self._hold("argument", lambda: jax.tree.leaves(argument)[0], lambda: number)

    def _call(self, jitted: Any, plain: Any, functions: Sequence[tuple[Any, Any]]) -> None:
        self.log.append(plain.__name__)
        result, expected = jitted(self._state), plain(self._plain)
        self._counts["calls"] += 1
        if self._draw.random() < 0.5:
            self._pass_array(self._draw.choice(functions))
        if result is not None and self._draw.random() < 0.5:
            self._hold("its result", lambda: result, lambda: expected)

    def _check(self, name: str, value: Any, expected: Any) -> None:
        try:
            numbers = np.asarray(value)[[0, -1]].tolist()
        except RuntimeError as error:
            raise AssertionError(f"{name}: {error}\n{self.log}") from error
        if any(abs(number - expected) > 1e-4 for number in numbers):
            raise AssertionError(f"{name}: {numbers}, not {expected}\n{self.log}")


class Programs:
    """Runs programs of the last so many steps, compiled once, and counts what they did."""

    def __init__(self, count: int = len(STEPS)) -> None:
        self._steps = [(graftax.jit(step, donate="auto"), step) for step in STEPS[-count:]]
        self._functions = [(graftax.jit(function, donate="auto"), function) for function in FUNCTIONS]
        for jitted, function in self._functions:  # who passes a variable in the first call donates no argument
            jitted(FUNCTIONS[function][0](_filled()[0]))
        self.counts: collections.Counter[str] = collections.Counter()

    def run(self, seed: int) -> None:
        Program(seed, self.counts).run(self._steps, self._functions)
        self.counts["programs"] += 1

    def calls_donated(self) -> int:
        return self._calls_donated(self._steps) + self.arguments_donated()

    def arguments_donated(self) -> int:
        return self._calls_donated(self._functions)

    @staticmethod
    def _calls_donated(functions: Sequence[tuple[Any, Any]]) -> int:
        entries = [entry for jitted, _ in functions for entry in jitted._table.entries.values()]
        return sum(donation[0] for entry in entries for donation in entry.donations())

    def __str__(self) -> str:
        counts = self.counts
        return (
            f"{counts['programs']} programs, {counts['calls']} calls, of which {self.calls_donated()} donated "
            f"({self.arguments_donated()} arguments), {counts['held']} holders"
        )


def main() -> None:
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    programs, begin = Programs(), time.perf_counter()
    for seed in range(first, first + count):
        programs.run(seed)
        if (seed + 1 - first) % 1000 == 0:
            print(f"{programs}, {time.perf_counter() - begin:.0f} s", flush=True)
    print("nothing was found")


if __name__ == "__main__":
    main()
