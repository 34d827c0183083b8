# SPDX-License-Identifier: Apache-2.0
"""How time and memory of each public operation grow: exponents for large graphs, each case in a process of its own.

Python's cyclic collector is off: what it looks at grows with the objects, in any program that makes many. And
each call is the first with its structure: a small one that came before is kept and replayed, a large one is not, so two
sizes would be compared on both sides of that bound.

Run it as `make scale`. It fails where an exponent is above a bound, and where an operation fails, hangs or crashes.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import math
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import graftax
from graftax import _core
from records import record

SECONDS = 300  # for one operation on one graph
SHORT = 0.003  # seconds below which a time says nothing


class Node:
    def __init__(self, below: Any) -> None:
        self.below = below


def leaves(n: int) -> Any:
    return [np.zeros(()) for _ in range(n)]


def levels(n: int) -> Any:
    value: Any = np.zeros(())
    for _ in range(n):
        value = {"a": value}
    return value


def objects(n: int) -> Any:
    value: Any = np.zeros(())
    for _ in range(n):
        value = Node(value)
    return value


def shared(n: int) -> Any:
    one = [np.zeros(())]
    return [one] * n


def ring(n: int) -> Any:
    nodes: list[list[Any]] = [[] for _ in range(n)]
    for one, other in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
        one.append(other)
    return nodes[0]


def keys(n: int) -> Any:
    return {f"key{i}": np.zeros(()) for i in range(n)}


def statics(n: int) -> Any:
    return [("name", i) for i in range(n)]


def text(n: int) -> Any:
    return {"text": os.urandom(n)}


def reload(path: str, obj: Any) -> Any:
    graftax.save(path, obj)
    return graftax.load(path, classes=[Node])


GRAPHS: dict[str, tuple[Callable[[int], Any], int]] = {
    "leaves": (leaves, 1_000_000),
    "levels": (levels, 100_000),
    "objects": (objects, 100_000),
    "shared": (shared, 100_000),
    "ring": (ring, 100_000),
    "keys": (keys, 100_000),
    "statics": (statics, 100_000),
    "bytes": (text, 100_000_000),
}
# Where a file's header would have more than the 100 MB that safetensors has room for: some 130 bytes an array, and text
# for all that is no array.
LARGEST = {("leaves", "save and load"): 500_000, ("bytes", "save and load"): 50_000_000}
# What an operation is given, and what is measured.
OPERATIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "flatten": (lambda x: x, graftax.flatten),
    "unflatten": (graftax.flatten, lambda f: graftax.unflatten(f[1], f[0])),
    "hash": (lambda x: graftax.flatten(x)[1], hash),
    "==": (lambda x: (graftax.flatten(x)[1], graftax.flatten(graftax.copy(x))[1]), lambda p: p[0] == p[1]),
    "repr": (lambda x: graftax.flatten(x)[1], repr),
    "pickle": (lambda x: graftax.flatten(x)[1], lambda g: pickle.loads(pickle.dumps(g))),
    "copy": (lambda x: x, graftax.copy),
    "equal": (lambda x: (x, graftax.copy(x)), lambda p: graftax.equal(*p)),
    "diff": (lambda x: (x, graftax.copy(x)), lambda p: graftax.diff(*p)),
    "to_dict": (lambda x: x, graftax.to_dict),
    "from_dict": (graftax.to_dict, graftax.from_dict),
    "partition": (lambda x: x, lambda x: graftax.partition(x, np.ndarray)),
    "combine": (lambda x: graftax.partition(x, np.ndarray), lambda p: graftax.combine(*p)),
    "find": (lambda x: x, lambda x: graftax.find(x, np.ndarray)),
    "at": (lambda x: x, lambda x: graftax.at(x)["**"].paths),
    "shared": (lambda x: x, graftax.shared),
    "count": (lambda x: x, graftax.count),
    "save and load": (
        lambda x: x,
        functools.partial(reload, os.path.join(tempfile.gettempdir(), f"scale{os.getpid()}")),
    ),
}


def forget(counts: Iterator[int]) -> None:
    """Has the core keep structures of small graphs in place of those that came before."""
    for number in itertools.islice(counts, 8):
        for value in ([number], {"number": number}, Node(number)):
            graftax.flatten(value)
            graftax.flatten(value)
    if any(len(repr(g)) > 1_000 for g in _core.kept_structures()):
        raise RuntimeError("structures that came before are still kept")


class Measure(NamedTuple):
    seconds: float
    bytes: int  # by which the most memory that the process had grew
    error: str


def measured(graph: Callable[[int], Any], n: int, operation: str, repeats: int) -> Measure:
    """Time and memory of one operation, in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        answer: tuple[float, int, str]
        try:
            signal.alarm(SECONDS)
            gc.disable()
            prepare, apply = OPERATIONS[operation]
            given, counts = prepare(graph(n)), itertools.count()
            before, times = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, list[float]()
            for _ in range(repeats):
                forget(counts)
                start = time.process_time()
                result = apply(given)
                times.append(time.process_time() - start)
                held = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
                del result
                if sum(times) > 5:
                    break
            answer = (min(times), held, "")
        except BaseException as error:
            answer = (0.0, 0, f"{type(error).__name__}: {error}"[:200])
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(child, 0)
    if not content:
        return Measure(0.0, 0, f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "ended")
    return Measure(*json.loads(content))


class Line(NamedTuple):
    graph: str
    operation: str
    sizes: list[int]
    seconds: list[float]
    bytes: list[int]
    exponent: float  # of the time between the last two sizes; nan where it is too short
    memory: float
    error: str

    def row(self) -> str:
        times = " ".join(f"{t:9.4f}" for t in self.seconds)
        tail = self.error or f"{self.exponent:6.2f} {self.memory:6.2f} {self.bytes[-1] / 2**20:9.0f} MB"
        return f"{self.graph:9}{self.operation:15}{self.sizes[-1]:>12,} {times} {tail}"


def exponent(small: float, large: float, ratio: float, least: float) -> float:
    return math.log(large / small) / math.log(ratio) if small >= least and large > 0 else math.nan  # 0: it failed


def lines(names: list[str], operations: list[str], part: int, repeats: int) -> Iterator[Line]:
    for name in names:
        graph, whole = GRAPHS[name]
        for operation in operations:
            most = LARGEST.get((name, operation), whole) // part
            sizes = [most // 16, most // 4, most]
            done = [measured(graph, n, operation, repeats) for n in sizes]
            seconds, grown = [m.seconds for m in done], [m.bytes for m in done]
            error = next((m.error for m in done if m.error), "")
            yield Line(
                name,
                operation,
                sizes,
                seconds,
                grown,
                exponent(seconds[1], seconds[2], 4, SHORT),
                exponent(grown[1], grown[2], 4, 8 * 2**20),
                error,
            )


def plot(found: list[Line], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(line.graph for line in found))
    _, axes = pyplot.subplots(1, len(names), figsize=(4 * len(names), 4), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for line in found:
            if line.graph == name and not line.error:
                axis.loglog(line.sizes, [max(t, 1e-6) for t in line.seconds], marker=".", label=line.operation)
        axis.set(title=name, xlabel="n", ylabel="seconds")
        axis.legend(fontsize=5)
    pyplot.tight_layout()
    pyplot.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("graphs", nargs="*", default=list(GRAPHS), help=", ".join(GRAPHS))
    parser.add_argument("--operations", nargs="*", default=list(OPERATIONS))
    parser.add_argument("--part", type=int, default=1, help="sizes are divided by this")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bound", type=float, default=1.25, help="the largest exponent that passes")
    parser.add_argument("--plot", type=Path, help="an SVG; needs matplotlib")
    given = parser.parse_args()
    found: list[Line] = []
    failed: list[Line] = []
    print(f"{'graph':9}{'operation':15}{'n':>12} {'seconds at n/16, n/4, n':>29}   time memory")
    for line in lines(given.graphs, given.operations, given.part, given.repeats):
        found.append(line)
        print(line.row(), flush=True)
        if line.error or line.exponent > given.bound or line.memory > given.bound:
            failed.append(line)
    sizes = ", ".join(f"{name} {GRAPHS[name][1] // given.part:,}" for name in given.graphs)
    above = [f"{x.graph}, {x.operation}: {x.error or f'{x.exponent:.2f}, memory {x.memory:.2f}'}" for x in failed]
    record("scale", "make scale", f"{len(found)} operations on graphs ({sizes}); bound {given.bound}", above)
    if given.plot:
        plot(found, given.plot)
    print(f"{len(found)} cases, {len(failed)} above {given.bound} or failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
