# SPDX-License-Identifier: Apache-2.0
"""The limits graftax has to keep, each measured beside what it is compared with."""

import gc
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import jax
import jax.extend

from benchmarks.beside import BESIDE
from benchmarks.layers import CompiledLayers, FirstCall
from benchmarks.rows import ROWS
from benchmarks.timed import Timed
from benchmarks.verdicts import OnRound, Verdict


class Budget(Protocol):
    """Anything with a title and a limit that can be measured in some number of rounds.

    `run` may take more rounds than `rounds` says where the first figure decides nothing.
    """

    @property
    def title(self) -> str: ...

    @property
    def limit(self) -> float: ...

    def rounds(self, rounds: int) -> int:
        """How often a measurement calls `on_round`."""
        ...

    def run(self, subjects: dict[str, ModuleType], rounds: int, on_round: OnRound) -> Verdict: ...


@dataclass(frozen=True)
class NodeCalls:
    """User flatten and unflatten calls in one steady call, over those that `jax.jit` makes."""

    title: str
    limit: float

    def rounds(self, rounds: int) -> int:
        return 1

    def run(self, subjects: dict[str, ModuleType], rounds: int, on_round: OnRound) -> Verdict:
        if "graftax_jit" not in subjects:
            return Verdict(self.title, self.limit, None, False, "absent: graftax_jit")
        ours, theirs = _node_calls(subjects["graftax_jit"].jit), _node_calls(jax.jit)
        on_round()
        worst = max(a / max(b, 1) for a, b in zip(ours, theirs, strict=True))
        detail = f"flatten {ours[0]}, unflatten {ours[1]}; jax.jit: flatten {theirs[0]}, unflatten {theirs[1]}"
        return Verdict(self.title, self.limit, worst, worst <= self.limit, detail)


@dataclass(frozen=True)
class FlattenCalls:
    """User flatten calls in one call that does not have one of the structures used last."""

    title: str
    limit: float
    known: bool  # is its structure one that is compiled already?

    def rounds(self, rounds: int) -> int:
        return 1

    def run(self, subjects: dict[str, ModuleType], rounds: int, on_round: OnRound) -> Verdict:
        if "graftax_jit" not in subjects:
            return Verdict(self.title, self.limit, None, False, "absent: graftax_jit")
        counts, Counted = _counted_node()
        step = subjects["graftax_jit"].jit(lambda node, _: node.data + 1)
        node = Counted(jax.numpy.zeros(3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the changing number: it is what is asked for
            for number in range(12):
                step(node, number)
            counts.update(flatten=0, unflatten=0)
            step(node, 0 if self.known else 12)
        on_round()
        found = counts["flatten"]
        return Verdict(self.title, self.limit, found, found <= self.limit, f"flatten {found}")


def _counted_node() -> tuple[dict[str, int], type]:
    """A registered class, and how often it was flattened and unflattened."""
    counts = {"flatten": 0, "unflatten": 0}

    class Counted:
        def __init__(self, data: Any) -> None:
            self.data = data

    def flatten(node: Counted) -> tuple[tuple[Any], None]:
        counts["flatten"] += 1
        return (node.data,), None

    def unflatten(_: None, children: Any) -> Counted:
        counts["unflatten"] += 1
        return Counted(*children)

    jax.tree_util.register_pytree_node(Counted, flatten, unflatten)
    return counts, Counted


def _node_calls(jit: Callable[[Any], Any]) -> tuple[int, int]:
    counts, Counted = _counted_node()

    def replaced(node: Any) -> Any:
        return Counted(node.data + 1)

    step = jit(replaced)
    node = Counted(jax.numpy.zeros(3))
    step(node)
    step(node)
    counts.update(flatten=0, unflatten=0)
    step(node)
    return counts["flatten"], counts["unflatten"]


@dataclass(frozen=True)
class StaticChurn:
    """Live executables under ever new static values, over the bound; none may outlive the function."""

    title: str
    limit: float
    values: int = 10_000
    bound: int = 512
    # Memory after the last tenth over memory at half time: the table is full by then and must not grow.
    memory_limit: float = 1.05
    kept: int = 16  # the newest executables, for a function with equal code that may be made soon

    _STEPS = 10

    def rounds(self, rounds: int) -> int:
        return self._STEPS

    def run(self, subjects: dict[str, ModuleType], rounds: int, on_round: OnRound) -> Verdict:
        if "graftax_jit" not in subjects:
            return Verdict(self.title, self.limit, None, False, "absent: graftax_jit")

        def scaled(x: Any, factor: str) -> Any:  # a text: a number that changes would be symbolic
            return x * int(factor)

        step = subjects["graftax_jit"].jit(scaled)
        x = jax.numpy.ones(3)
        float(x[0])  # the indexing below compiles programs of its own
        before = _live_executables()
        # A quick look has few rounds: fewer values then, still more than the bound.
        size = min(self.values, 100 * rounds) // self._STEPS
        peak, equal, resident = 0, True, []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it rightly warns about a static value that always changes
            for part in range(self._STEPS):
                for value in range(part * size, (part + 1) * size):
                    out = step(x, str(value))
                equal = equal and float(out[0]) == value
                peak = max(peak, _live_executables() - before)
                resident.append(_resident_bytes())
                on_round()
        del step, scaled
        left = _live_executables() - before
        growth = resident[-1] / resident[len(resident) // 2] if resident[-1] else 1.0
        # While the table still fills, memory grows by right.
        steady = growth <= self.memory_limit or size * self._STEPS < 4 * self.bound
        held = equal and peak <= self.limit * self.bound and left <= self.kept and steady
        detail = (
            f"{size * self._STEPS:,} values: at most {peak} live executables of {self.bound}, {left} left "
            f"after the function, memory {growth:.2f}x over the second half, "
            f"results {'equal' if equal else 'DIFFER'}"
        )
        return Verdict(self.title, self.limit, peak / self.bound, held, detail)


class _Trainer:
    def __init__(self) -> None:
        self.weights = [jax.numpy.ones((4, 4)) for _ in range(3)]
        self.step, self.base = 0, 0.1


def _with_constant(trainer: Any, x: Any) -> Any:
    trainer.weights = [w - 0.1 * x for w in trainer.weights]
    return trainer.weights[0].sum()


def _with_counter(trainer: Any, x: Any) -> Any:
    trainer.step += 1
    return _with_constant(trainer, x)


def _with_rate(trainer: Any, x: Any) -> Any:
    trainer.step += 1
    rate = trainer.base * 0.99**trainer.step
    if trainer.step % 100 == 0:
        rate = trainer.base
    trainer.weights = [w - rate * x for w in trainer.weights]
    return trainer.weights[0].sum()


@dataclass(frozen=True)
class ChangingNumbers:
    """The time of a call with Python numbers that change, over that of the same call without them."""

    title: str
    limit: float
    function: Callable[[Any, Any], Any]

    _CALLS = 90  # fewer than a hundred: no other variant

    def rounds(self, rounds: int) -> int:
        return rounds

    def run(self, subjects: dict[str, ModuleType], rounds: int, on_round: OnRound) -> Verdict:
        if "graftax_jit" not in subjects:
            return Verdict(self.title, self.limit, None, False, "absent: graftax_jit")
        jit, x = subjects["graftax_jit"].jit, jax.numpy.ones((4, 4))
        pair = [(jit(f), _Trainer()) for f in (_with_constant, self.function)]
        for _ in range(2):
            for f, trainer in pair:
                self._seconds(f, trainer, x)
        ratios: list[float] = []
        for turn in range(rounds):
            order = pair if turn % 2 else pair[::-1]
            taken = {f: self._seconds(f, trainer, x) for f, trainer in order}
            ratios.append(taken[pair[1][0]] / taken[pair[0][0]])
            on_round()
        traces = pair[1][0].cache_info().traces
        ratio = statistics.median(ratios)
        detail = f"median of {rounds} rounds, the least {min(ratios):.3f}; compiled {traces} times"
        return Verdict(self.title, self.limit, ratio, ratio <= self.limit and traces <= 3, detail)

    def _seconds(self, f: Callable[[Any, Any], Any], trainer: _Trainer, x: Any) -> float:
        trainer.step = 0
        begin = time.perf_counter()
        for _ in range(self._CALLS):
            f(trainer, x)
        jax.block_until_ready(trainer.weights)
        return time.perf_counter() - begin


def _live_executables() -> int:
    gc.collect()
    return len(jax.extend.backend.get_backend().live_executables())


def _resident_bytes() -> int:
    """Resident memory on Linux, 0 elsewhere."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) if statm.exists() else 0


BUDGETS: tuple[Budget, ...] = (
    Timed("replay, dict of 1000, vs jax.tree.flatten", 0.12, "replay", "dict 1000", "jax_tree"),
    Timed("replay, eqx.Module of 1000, vs jax.tree.flatten", 0.08, "replay", "eqx.Module 1000", "jax_tree"),
    Timed("flatten, dict of 1000 met before, vs jax.tree.flatten", 0.12, "flatten", "dict 1000", "jax_tree"),
    Timed(
        "flatten, eqx.Module of 1000 met before, vs jax.tree.flatten", 0.10, "flatten", "eqx.Module 1000", "jax_tree"
    ),
    Timed("flatten, dict of 10 met before, vs jax.tree.flatten", 0.50, "flatten", "dict 10", "jax_tree"),
    Timed("flatten, eqx.Module of 10 met before, vs jax.tree.flatten", 0.30, "flatten", "eqx.Module 10", "jax_tree"),
    Timed("partition, eqx.Module of 1000, vs equinox", 0.50, "partition", "eqx.Module 1000", "equinox_filter_jit"),
    Timed("combine, eqx.Module of 1000, vs equinox", 0.50, "combine", "eqx.Module 1000", "equinox_filter_jit"),
    Timed("copy, eqx.Module of 1000, vs jax.tree.map", 0.50, "copy", "eqx.Module 1000", "equinox_filter_jit"),
    Timed("equal, eqx.Module of 1000, vs equinox", 0.50, "equal", "eqx.Module 1000", "equinox_filter_jit"),
    Timed("call, list of 1000, reduce, vs jax.jit on the flat list", 0.60, "reduce", "list 1000", "jax_flat"),
    Timed("call, dict of 1000, reduce, vs jax.jit on it", 0.48, "reduce", "dict 1000", "jax_tree"),
    Timed("call, eqx.Module of 1000, reduce, vs jax.jit on it", 0.33, "reduce", "eqx.Module 1000", "jax_tree"),
    Timed(
        "call, list of 1000, all updated, vs jax.jit on the flat list",
        1.00,
        "update",
        "list 1000",
        "jax_flat",
    ),
    Timed(
        "call, eqx.Module of 1000, all updated, vs jax.jit on it",
        0.65,
        "update",
        "eqx.Module 1000",
        "jax_tree",
    ),
    Timed("call, one array, vs jax.jit", 1.10, "update", "one array", "jax_tree"),
    Timed(
        "call, eqx.Module of 100, reduce, vs equinox.filter_jit",
        0.25,
        "reduce",
        "eqx.Module 100",
        "equinox_filter_jit",
    ),
    Timed("call, nnx.Module of 100, reduce, vs nnx.jit", 0.02, "reduce", "nnx.Module 100", "nnx_jit"),
    Timed(
        "call, flarejax.Module of 100, reduce, vs flarejax.filter_jit",
        0.03,
        "reduce",
        "flarejax.Module 100",
        "flarejax_filter_jit",
    ),
    Timed("first call, dict of 100, vs jax.jit on it", 1.05, "first", "dict 100", "jax_tree"),
    # A trace alone, which the compiler follows: the rows of first calls hold all of it. Who hears each function
    # has the interpreter call it through C, and that is most of what is above 1.
    Timed(
        "loss and gradient of 100, traced under jit, plain objects, vs JAX on the flat list",
        1.25,
        "gradient_trace",
        "object 100",
        "jax_flat",
    ),
    Timed("loss and gradient, list of 100, vs JAX on the flat list", 1.00, "gradient", "list 100", "jax_flat"),
    # 0.67 of the instructions, and the executable has nine tenths of them: there is no less to be had.
    Timed("loss and gradient, eqx.Module of 100, vs JAX on it", 0.75, "gradient", "eqx.Module 100", "jax_tree"),
    Timed(
        "update of optax.adam, plain objects of 100, vs Optax on the flat list",
        1.05,
        "optimizer",
        "object 100",
        "jax_flat",
    ),
    Timed(
        "update of optax.adam, plain objects of 1000, vs Optax on the flat list",
        1.05,
        "optimizer",
        "object 1000",
        "jax_flat",
    ),
    FirstCall("first call, 24 layers in a list, a step of training, vs jax.jit on the arrays", 1.02),
    CompiledLayers("compilation, 24 layers in a list, a step of training, vs the loop unrolled", 0.25),
    ChangingNumbers("call, a counter that is written back, vs the same without", 1.15, _with_counter),
    ChangingNumbers("call, a learning rate that changes, vs a constant one", 1.20, _with_rate),
    NodeCalls("user flatten and unflatten calls, registered node, vs jax.jit", 1.00),
    FlattenCalls("user flatten calls, registered node, structure not met before", 3, known=False),
    FlattenCalls("user flatten calls, registered node, known structure outside the last eight", 1, known=True),
    StaticChurn("live executables under 10,000 static values, vs the bound", 1.00),
    *ROWS,
    *BESIDE,
)
