# SPDX-License-Identifier: Apache-2.0
"""Random sessions of a user beside plain Python: what is built, shared, changed, compiled, saved and broken on the way.

Two worlds hold the same objects. Each step is taken in both, in one of them through `graftax.jit`; after it the worlds
are equal, object for object. The jitted functions live on from session to session, with all that they have compiled.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from hypothesis import settings, strategies
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import graftax
import oracle
from records import record

STEPS = 30  # of a session, at most

# All arithmetic is exact: sums and halves of small numbers.
RATE = 0.5
CONFIG: dict[str, Any] = {"scale": 2.0, "names": ["a"]}


def helper(o: Any) -> Any:
    return o.w.sum() + RATE


class Part:
    """What a session is made of."""

    gain = 1.0

    def __init__(self, w: Any, n: int) -> None:
        self.w, self.n, self.name, self.next = w, n, "part", None
        self.log: list[Any] = []

    def total(self) -> Any:
        return self.w.sum() * self.gain


# ---- what is called


def bump(o: Any) -> Any:
    o.n += 1
    o.w = o.w * 0.5 + RATE
    return o.n


def total(o: Any) -> Any:
    return o.total(), o.n * 2


def look_on(o: Any) -> Any:
    return None if o.next is None else o.w.sum() + o.next.n


def attach(o: Any) -> Any:
    o.next = Part(o.w + 1, 0)
    return o.next


def let_go(o: Any) -> None:
    o.next = None


def to_itself(o: Any) -> Any:
    o.next = o
    return o


def swap(o: Any) -> None:
    if o.next is not None:
        o.w, o.next.w = o.next.w, o.w


def walk(o: Any) -> Any:
    seen: list[Any] = []
    while o is not None and all(o is not other for other in seen):
        seen.append(o)
        o = o.next
    seen[0].w = seen[0].w * 0.5 + sum((part.w[0] for part in seen), 0.0) * 0.125
    return len(seen)


def note(o: Any) -> Any:
    o.log.append((o.n, o.w[0]))
    del o.log[:-3]
    return len(o.log)


def rename(o: Any) -> Any:
    o.name = f"part{o.n % 3}"
    return o.name


def through_helper(o: Any) -> Any:
    return helper(o) * CONFIG["scale"], len(CONFIG["names"])


def looped(o: Any) -> Any:
    def step(c: Any, x: Any) -> Any:
        o.w = o.w * 0.5 + x
        return c + x, o.w[0]

    return graftax.scan(step, jnp.zeros(()), o.w)


def new_attribute(o: Any) -> None:
    o.extra = {"w": o.w, "of": o}


def lost_attribute(o: Any) -> None:
    vars(o).pop("extra", None)


def branch(o: Any) -> Any:
    if o.n % 2:
        o.w = o.w + 1
    return graftax.cond(o.w[0] > 0, lambda: o.w * 0.5, lambda: o.w)


CALLS = [
    bump, total, look_on, attach, let_go, to_itself, swap, walk, note, rename, through_helper, looped, new_attribute,
    lost_attribute, branch,
]  # fmt: skip


def tie(o: Any, p: Any) -> Any:
    p.next = o
    return p


def move(o: Any, p: Any) -> Any:
    o.log, p.log = p.log, o.log
    return o is p


def same_array(o: Any, p: Any) -> None:
    p.w = o.w


def added(o: Any, p: Any) -> Any:
    p.w = o.w * 0.5 + p.w * 0.5
    return [o, p, o]


CALLS_OF_TWO = [tie, move, same_array, added]


def late_error(o: Any) -> None:
    o.n += 1
    o.w = o.w + 1
    o.log.append(o)
    raise ValueError(f"too late for {o.name}")


def no_attribute(o: Any) -> Any:
    o.w = o.w * 2
    return o.missing


def interrupted(o: Any) -> None:
    o.next = Part(o.w, 7)
    raise KeyboardInterrupt


FAILING = [late_error, no_attribute, interrupted]


def loss(o: Any) -> Any:
    return (o.w * o.w).sum() * 0.25


def descend(o: Any) -> Any:
    gradient = graftax.grad(loss)(o)
    o.w = o.w - gradient.w
    return gradient.n


def train(o: Any, optimizer: Any) -> None:
    optimizer.update(o, graftax.grad(loss)(o))


JITTED: dict[Callable[..., Any], Any] = {f: graftax.jit(f) for f in (*CALLS, *CALLS_OF_TWO, *FAILING, descend, train)}


def saved(o: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        graftax.save(Path(folder) / "o.safetensors", o)
        return graftax.load(Path(folder) / "o.safetensors", classes=[Part])


COPIES: list[Callable[[Any], Any]] = [copy.deepcopy, graftax.copy, saved, lambda o: pickle.loads(pickle.dumps(o))]
CLEARINGS: list[Callable[[], Any]] = [
    jax.clear_caches,
    gc.collect,
    lambda: [f.clear_cache() for f in JITTED.values()],
]
PRECISIONS = [None, "highest"]

# ---- what is replaced under the compiled functions


def other_helper(o: Any) -> Any:
    return o.w[0] + o.n


def other_total(self: Any) -> Any:
    return self.w.sum() - self.n


def set_rate(value: float) -> None:
    globals()["RATE"] = value


def set_scale(value: float) -> None:
    CONFIG["scale"] = value


def add_name(value: float) -> None:
    CONFIG["names"] = [*CONFIG["names"], "b"][-3:]


def set_gain(value: float) -> None:
    Part.gain = value


def set_helper(value: float) -> None:
    globals()["helper"] = other_helper if value > 1 else ORIGINAL["helper"]


def set_method(value: float) -> None:
    Part.total = other_total if value > 1 else ORIGINAL["total"]


REPLACED = [set_rate, set_scale, add_name, set_gain, set_helper, set_method]
ORIGINAL: dict[str, Any] = {"helper": helper, "total": Part.total}

VALUES = strategies.sampled_from([0.5, 1.0, 2.0, 4.0])
INDEX = strategies.integers(0, 7)


def outcome(f: Callable[..., Any], *given: Any) -> Any:
    """What a call returns, or the type and text of what it raises."""
    try:
        return "returned", f(*given)
    except (ValueError, AttributeError, KeyboardInterrupt) as error:
        return "raised", type(error).__name__, str(error)


class Session(RuleBasedStateMachine):
    """The steps of a session; `plain` and `jitted` are the two worlds."""

    def __init__(self) -> None:
        super().__init__()
        self.plain: dict[str, list[Any]] = {"parts": [], "trained": [], "results": []}
        self.jitted: dict[str, list[Any]] = {"parts": [], "trained": [], "results": []}
        self.optimizers: dict[int, Any] = {}  # by the world
        self.precision: str | None = None

    def teardown(self) -> None:
        set_rate(0.5), set_gain(1.0), set_helper(0), set_method(0)
        CONFIG.update(scale=2.0, names=["a"])

    def both(self, step: Callable[[dict[str, list[Any]], Callable[[Any], Any]], Any]) -> None:
        """Takes a step in the two worlds; it is given one, and what makes of a function the one to call."""
        with jax.default_matmul_precision(self.precision) if self.precision else contextlib.nullcontext():
            for world, through in ((self.plain, lambda f: f), (self.jitted, JITTED.__getitem__)):
                world["results"] = [step(world, through)]

    def part(self, world: dict[str, list[Any]], i: int) -> Any:
        return world["parts"][i % len(world["parts"])]

    @initialize()
    def first(self) -> None:
        self.new(1.0, 2)

    @rule(value=VALUES, size=strategies.integers(1, 3))
    def new(self, value: float, size: int) -> None:
        if len(self.plain["parts"]) < 5:
            self.both(lambda world, _: world["parts"].append(Part(jnp.full(size, value), size)))

    @rule(i=INDEX)
    def forget(self, i: int) -> None:
        if len(self.plain["parts"]) > 1:
            self.both(lambda world, _: world["parts"].pop(i % len(world["parts"])) and None)

    @rule(i=INDEX, j=INDEX)
    def link(self, i: int, j: int) -> None:
        self.both(lambda world, _: setattr(self.part(world, i), "next", self.part(world, j)))

    @rule(i=INDEX, value=VALUES)
    def change(self, i: int, value: float) -> None:
        def step(world: Any, _: Any) -> None:
            part = self.part(world, i)
            part.w, part.n, part.name = jnp.full(2, value), int(value * 2), f"by hand {value}"

        self.both(step)

    @rule(f=strategies.sampled_from(CALLS), i=INDEX, times=strategies.integers(1, 3))
    def call(self, f: Any, i: int, times: int) -> None:
        self.both(lambda world, through: [through(f)(self.part(world, i)) for _ in range(times)])

    @rule(f=strategies.sampled_from(CALLS_OF_TWO), i=INDEX, j=INDEX)
    def call_with_two(self, f: Any, i: int, j: int) -> None:
        first = self.part(self.plain, i).w.shape, self.part(self.plain, j).w.shape
        if f is not added or first[0] == first[1]:
            self.both(lambda world, through: through(f)(self.part(world, i), self.part(world, j)))

    @rule(i=INDEX)
    def descend(self, i: int) -> None:
        self.both(lambda world, through: through(descend)(self.part(world, i)))

    @rule(i=INDEX, momentum=strategies.sampled_from([None, 0.5]))
    def make_optimizer(self, i: int, momentum: float | None) -> None:
        def step(world: Any, _: Any) -> None:
            part = self.part(world, i)
            world["trained"] = [part]
            self.optimizers[id(world)] = graftax.optimizer(optax.sgd(0.5, momentum), part, wrt="w")

        self.both(step)

    @precondition(lambda self: self.plain["trained"])
    @rule()
    def train(self) -> None:
        """Where the weights have the shape that the optimizer was made for."""
        state = [leaf for leaf in graftax.flatten(self.optimizers[id(self.plain)])[0] if leaf.ndim]
        if all(leaf.shape == self.plain["trained"][0].w.shape for leaf in state):
            self.both(lambda world, through: through(train)(*world["trained"], self.optimizers[id(world)]))

    @rule(i=INDEX, make=strategies.sampled_from(COPIES))
    def copied(self, i: int, make: Any) -> None:
        def step(world: Any, _: Any) -> None:
            i_ = i % len(world["parts"])
            world["parts"][i_] = make(world["parts"][i_])

        self.both(step)

    @rule(clear=strategies.sampled_from(CLEARINGS))
    def clear(self, clear: Any) -> None:
        clear()

    @rule(precision=strategies.sampled_from(PRECISIONS))
    def set_context(self, precision: str | None) -> None:
        self.precision = precision

    @rule(replace=strategies.sampled_from(REPLACED), values=strategies.lists(VALUES, min_size=1, max_size=3), i=INDEX)
    def replace(self, replace: Any, values: list[float], i: int) -> None:
        """Calls what reads it before and after."""
        for value in (None, *values):
            if value is not None:
                replace(value)
            for f in (through_helper, total, bump):
                self.call(f, i, 1)
                self.the_worlds_are_equal()

    @rule(f=strategies.sampled_from(FAILING), i=INDEX)
    def fail(self, f: Any, i: int) -> None:
        """A call that raises changes nothing, where plain Python has changed a part."""
        plain = outcome(f, oracle.deep_copy(self.part(self.plain, i)))
        assert outcome(JITTED[f], self.part(self.jitted, i)) == plain

    @rule(f=strategies.sampled_from([bump, total, walk, note]), times=strategies.integers(1, 3))
    def in_threads(self, f: Any, times: int) -> None:
        """Each thread has a part of its own."""
        copies = [oracle.deep_copy(part) for part in self.jitted["parts"]]
        done: list[Any] = [None] * len(copies)

        def run(k: int) -> None:
            done[k] = [JITTED[f](copies[k]) for _ in range(times)]

        threads = [threading.Thread(target=run, args=(k,)) for k in range(len(copies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        alone = [oracle.deep_copy(part) for part in self.plain["parts"]]
        wanted = [[f(part) for _ in range(times)] for part in alone]
        assert oracle.difference([wanted, alone], [done, copies]) is None

    @invariant()
    def the_worlds_are_equal(self) -> None:
        states = [graftax.flatten(optimizer)[0] for optimizer in self.optimizers.values()]
        assert oracle.difference(self.plain, self.jitted) is None
        assert len(states) < 2 or oracle.difference(*states) is None


def main(sessions: int) -> None:
    """So many sessions, others each time."""
    findings: list[str] = []
    try:
        chosen = settings(
            max_examples=sessions, stateful_step_count=STEPS, deadline=None, database=None, derandomize=False
        )
        run_state_machine_as_test(Session, settings=chosen)
    except Exception as error:  # what hypothesis has made small, as a program
        traceback.print_exc()
        findings = [f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"]
    record("sessions", "make sessions", f"{sessions} sessions of up to {STEPS} steps", findings)
    sys.exit(bool(findings))


if __name__ == "__main__":
    main(int(sys.argv[1]))
