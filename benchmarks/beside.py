# SPDX-License-Identifier: Apache-2.0
"""Calls that are no case of a measure: under JAX's own transforms, with many globals, one of many structures, a miss.

Each is a pair of calls, made in one go: what graftax is measured by, and graftax.
"""

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks.memory import MEMORY
from benchmarks.rounds import interleave, median, ratios, seconds
from benchmarks.verdicts import OnRound, Verdict

Pair = tuple[Callable[[], Any], Callable[[], Any]]

_LONGEST_ROUNDS = 15  # of what traces in each round


@dataclass(frozen=True)
class Beside:
    """The time of the second of two calls over that of the first. `once`: each round has one call of each."""

    title: str
    limit: float
    pair: Callable[[], Pair]
    once: bool = False

    def rounds(self, rounds: int) -> int:
        return min(rounds, _LONGEST_ROUNDS) if self.once else rounds

    def run(self, subjects: dict[str, ModuleType], rounds: int, on_round: OnRound) -> Verdict:
        if "graftax_jit" not in subjects:
            return Verdict(self.title, self.limit, None, False, "absent: graftax_jit")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is compiled anew: it is what is measured
            theirs, ours = self.pair()
            for _ in range(3 if self.once else 40):  # a small call asks for its executable after 32
                theirs()
                ours()
            taken = interleave({"theirs": theirs, "ours": ours}, self.rounds(rounds), once=self.once, on_round=on_round)
        found = ratios(taken["ours"], taken["theirs"])
        low, high = found[len(found) // 4], found[-1 - len(found) // 4]
        detail = (
            f"{median(taken['ours']) * 1e6:,.1f} us against {median(taken['theirs']) * 1e6:,.1f} us; "
            f"quartiles {low:.2f} to {high:.2f}"
        )
        if low <= self.limit <= high:
            detail += "; within noise"
        return Verdict(self.title, self.limit, median(found), median(found) <= self.limit, detail)


class _Reached(BaseException):
    """Ends a call where it would have called JAX."""


@dataclass(frozen=True)
class Miss:
    """The time until JAX is called with a structure that was not met before, over that of flattening the object."""

    title: str
    limit: float

    def rounds(self, rounds: int) -> int:
        return rounds

    def run(self, subjects: dict[str, ModuleType], rounds: int, on_round: OnRound) -> Verdict:
        if "graftax_jit" not in subjects:
            return Verdict(self.title, self.limit, None, False, "absent: graftax_jit")
        obj = {f"x{i:04}": jnp.full(4, float(i)) for i in range(1000)}
        step = subjects["graftax_jit"].jit(lambda obj, name: obj["x0000"] + len(name))
        step(obj, "")
        ours: list[float] = []
        theirs: list[float] = []
        for number in range(rounds + 3):
            theirs.append(seconds(lambda: jax.tree.flatten(obj), 10))
            ours.append(self._until_jax(lambda name=f"n{number}": step(obj, name)))
            on_round()
        found = ratios(ours[3:], theirs[3:])
        detail = f"{median(ours) * 1e6:,.1f} us against {median(theirs) * 1e6:,.1f} us"
        return Verdict(self.title, self.limit, median(found), median(found) <= self.limit, detail)

    def _until_jax(self, call: Callable[[], Any]) -> float:
        ends: list[float] = []

        def compiled(*_: Any) -> Any:
            ends.append(time.perf_counter())
            raise _Reached

        staged = SimpleNamespace(trace=compiled)  # it is traced, and compared with what is compiled already
        with mock.patch("graftax._jit.build_entry.own_jit", lambda *_, **__: staged), contextlib.suppress(_Reached):
            begin = time.perf_counter()
            call()
        return ends[0] - begin


def _arrays(count: int) -> list[Any]:
    return [jnp.full(4, float(i)) for i in range(count)]


def _squares(leaves: Any) -> Any:
    return sum((leaf * leaf).sum() for leaf in leaves)


def _paired(arrays: list[Any]) -> Any:
    return {"layers": [{"w": w, "b": b} for w, b in zip(arrays[::2], arrays[1::2], strict=True)]}


def _leaves(model: Any) -> list[Any]:
    return [leaf for layer in model["layers"] for leaf in layer.values()]


def _inner(jit: Callable[..., Any], build: Callable[[list[Any]], Any], read: Callable[[Any], Any]) -> Callable[[], Any]:
    obj, scope, numbers = build(_arrays(100)), {"squares": _squares, "read": read}, itertools.count()

    def traced() -> Any:
        # Code that was not met before: graftax traces equal functions once.
        inner = jit(eval(f"lambda obj: squares(read(obj)) + {next(numbers)}.0", scope))
        return jax.jit(lambda obj: inner(obj) + 1).trace(obj)

    return traced


def _under_jit() -> Pair:
    import graftax

    return _inner(jax.jit, list, list), _inner(graftax.jit, _paired, _leaves)


def _eager_gradient() -> Pair:
    import graftax

    arrays = _arrays(100)
    model, flat = _paired(arrays), jax.grad(_squares)
    ours = graftax.grad(lambda model: _squares(_leaves(model)))
    return lambda: jax.block_until_ready(flat(arrays)), lambda: ours(model)


def _bound_method() -> Pair:
    import equinox as eqx

    import graftax

    class Layers(eqx.Module):
        arrays: list[Any]

        def first(self, x: Any) -> Any:
            return self.arrays[0] * x

    arrays, x = _arrays(10), jnp.ones(4)
    theirs, ours = jax.jit(lambda arrays, x: arrays[0] * x), graftax.filter_jit(Layers(arrays).first)
    return lambda: theirs(arrays, x), lambda: ours(x)


def _globals() -> Pair:
    import graftax

    scope: dict[str, Any] = {f"n{i}": i for i in range(25)}
    for i in range(25):
        exec(f"def h{i}(x): return x + {i}", scope)
    sums = "".join(f" + n{i}" for i in range(25))
    exec("def f(x):\n" + "".join(f"    x = h{i}(x)\n" for i in range(25)) + f"    return x{sums}", scope)
    theirs, ours, x = jax.jit(scope["f"]), graftax.jit(scope["f"]), jnp.ones(4)
    return lambda: theirs(x), lambda: ours(x)


def _one_of_many() -> Pair:
    import graftax

    step, x = graftax.jit(lambda obj: obj["x"] + 1), jnp.ones(4)
    objects = [{"x": x, "name": str(i)} for i in range(100)]
    for obj in objects * 40:
        step(obj)
    turn = itertools.cycle(objects)
    return lambda: step(objects[-1]), lambda: step(next(turn))


def _mlx() -> Pair:
    """Neither waits for the result: MLX computes it when it is read, JAX in other threads."""
    import mlx.core as mx

    import graftax

    class Model:
        layers: list[Any]

    mx.set_default_device(mx.cpu)
    state, model = [mx.ones(4) for _ in range(50)], Model()
    model.layers = _arrays(50)
    theirs = mx.compile(lambda x: sum(a.sum() for a in state) + x, inputs=state)
    ours = graftax.jit(lambda model, x: sum(a.sum() for a in model.layers) + x)
    given, x = mx.ones(4), jnp.ones(4)
    return lambda: theirs(given), lambda: ours(model, x)


# MLX has wheels for few systems, and is no requirement: its row is there where it is installed.
_BESIDE_MLX = (Beside("call, an object of 50 arrays, vs MLX's compiled call with captured state", 1.25, _mlx),)

BESIDE = (
    Beside("graftax.jit inside jax.jit, 100 leaves, traced anew, vs jax.jit inside it", 1.45, _under_jit, once=True),
    Beside("graftax.grad outside of jit, 100 leaves, vs jax.grad of the flat list", 1.25, _eager_gradient, once=True),
    Beside("call, filter_jit of a bound method, vs jax.jit on the flat list", 1.05, _bound_method),
    Beside("call, a function that names 50 globals, vs jax.jit of it", 1.10, _globals),
    Beside("call, one of 100 structures in turn, vs the last one", 2.00, _one_of_many),
    Miss("a miss until JAX is called, dict of 1000, vs jax.tree.flatten", 3.00),
    *MEMORY,
    *(_BESIDE_MLX if find_spec("mlx") else ()),
)
