# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""Measures one training step under several `jit`s: time, flatten and unflatten calls, agreement."""

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import jax
from rich.table import Table

from graftax._cli.demo.digits import Batch
from graftax._cli.demo.training import Step

BASELINE = "jax.jit by hand"
# Relative, of the loss. XLA orders sums differently in each program.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Contender:
    """A way to compile a step: `start` makes fresh state and returns the step, `(x, y) -> loss`.

    `reason` says in a few words why it is expected to fail.
    """

    name: str
    start: Callable[[], Step]
    reason: str = ""


@dataclass(frozen=True)
class Result:
    """What was measured; `failure` is set, and the rest empty, where the step did not run or was wrong."""

    name: str
    loss: float = math.nan
    seconds: float = math.nan
    flattens: int = 0
    unflattens: int = 0
    failure: str = ""


# The functions that open and rebuild one node of a model, by the file they are in: what the model's library
# or the wrapper gave to JAX, and for `nnx.jit`, which does without those, its own walk, one call a node.
NODE_FUNCTIONS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "<generated_": (frozenset({"flatten", "flatten_with_keys"}), frozenset({"unflatten"})),  # Equinox
    "flax/nnx/pytreelib": (
        frozenset({"_pytree__flatten", "_pytree__flatten_with_paths", "_flatten_pytree_state"}),
        frozenset({"_pytree__unflatten", "_unflatten_pytree_state"}),
    ),
    "flax/nnx/variablelib": (
        frozenset({"_variable_flatten", "_variable_flatten_with_keys"}),
        frozenset({"_variable_unflatten"}),
    ),
    "flax/nnx/graphlib": (frozenset({"_graph_flatten"}), frozenset({"_graph_unflatten"})),
    "flarejax/flr/_module": (frozenset({"tree_flatten"}), frozenset({"tree_unflatten"})),
    "graftax/_cli/demo/wrapper": (frozenset({"tree_flatten"}), frozenset({"tree_unflatten"})),
}


class TreeCalls:
    """Counts the calls of `NODE_FUNCTIONS` while entered."""

    def __init__(self) -> None:
        self.flattens = 0
        self.unflattens = 0

    def __enter__(self) -> "TreeCalls":
        self._previous = sys.getprofile()
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._previous)

    def _count(self, frame: FrameType, event: str, _arg: Any) -> None:  # unmeasured: in an event
        if event != "call" or "flatten" not in frame.f_code.co_name:
            return
        file, name = frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name
        for path, (flattens, unflattens) in NODE_FUNCTIONS.items():
            if path in file:
                self.flattens += name in flattens
                self.unflattens += name in unflattens


def compare(contenders: Sequence[Contender], batches: Sequence[Batch], rounds: int = 7) -> list[Result]:
    """Run every contender over the same batches from the same start, then time them in interleaved rounds."""
    results: dict[str, Result] = {}
    steps: dict[str, Step] = {}
    for contender in contenders:
        result, step = _try(contender, batches)
        results[contender.name] = result
        if step is not None:
            steps[contender.name] = step
    # A step that runs may still train nothing, where the model has become a constant of its program.
    expected = results[BASELINE].loss
    for contender in contenders:
        loss = results[contender.name].loss
        if contender.name in steps and not math.isclose(loss, expected, rel_tol=TOLERANCE):
            reason = contender.reason or f"expected {expected:.5f}"
            failure = f"wrong, {loss:.5f}: {reason}"
            results[contender.name] = Result(contender.name, failure=failure)
            del steps[contender.name]

    times: dict[str, list[float]] = {name: [] for name in steps}
    # Interleaved, so that whatever slows the machine down for a while slows all of them.
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(_seconds_per_step(step, batches))
    for name, step in steps.items():
        with TreeCalls() as calls:
            step(*batches[0])
        loss, seconds = results[name].loss, statistics.median(times[name])
        results[name] = Result(name, loss, seconds, calls.flattens, calls.unflattens)
    return list(results.values())


def _try(contender: Contender, batches: Sequence[Batch]) -> tuple[Result, Step | None]:
    name = contender.name
    try:
        step = contender.start()
        losses = [step(x, y) for x, y in batches]
        return Result(name, float(losses[-1])), step
    except Exception as error:
        reason = contender.reason or str(error).partition("\n")[0]
        return Result(name, failure=f"{type(error).__name__}: {reason}"), None


def _seconds_per_step(step: Step, batches: Sequence[Batch]) -> float:
    start = time.perf_counter()
    loss = None
    for x, y in batches:
        loss = step(x, y)
    jax.block_until_ready(loss)
    return (time.perf_counter() - start) / len(batches)


def table(title: str, results: Sequence[Result]) -> Table:
    """The results as a table; ratios are to `jax.jit` with the arrays split off by hand."""
    baseline = next(result.seconds for result in results if result.name == BASELINE)
    comparison = Table(title=title, title_justify="left", title_style="bold")
    comparison.add_column("", no_wrap=True)
    for column in ("time", "ratio", "flatten +\nunflatten"):
        comparison.add_column(column, justify="right")
    comparison.add_column("final loss")
    for result in results:
        if result.failure:
            comparison.add_row(result.name, "", "", "", result.failure, style="dim")
            continue
        comparison.add_row(
            result.name,
            f"{result.seconds * 1e6:.0f} us",
            f"{result.seconds / baseline:.2f}x",
            f"{result.flattens} + {result.unflattens}",
            f"{result.loss:.5f}",
            style="bold" if result.name.startswith("graftax") else None,
        )
    return comparison
