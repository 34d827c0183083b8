# SPDX-License-Identifier: Apache-2.0
"""Random programs of what Python code reads and changes around a function: run plainly and jitted, step by step.

A program is put together of parts: a class with a name that its bases have, an enum with state, a cache, a table of
`singledispatch`. Each has expressions that the function reads, statements that it runs, and changes that happen between
its calls. `python tests/support/random_programs.py 100 200` tries the seeds from 100 to 199 and prints what differs.
"""

from __future__ import annotations

import random
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import graftax
from random_parts import PARTS

WRAPPERS = [
    "{read}",
    "(lambda: {read})()",
    "[{read} for _ in range(1)][0]",
    "$$_guard(lambda: {read})",
    "$$_final(lambda: {read})",
    "$$_quiet(lambda: {read})",
]
HEAD = """
import contextlib
def _guard(read):
    try: return read()
    except Exception as error: return type(error).__name__
def _final(read):
    try: result = read()
    except: result = 'failed'
    finally: return result
def _quiet(read):
    result = 'quiet'
    with contextlib.suppress(Exception): result = read()
    return result
"""


class Program(NamedTuple):
    source: str
    steps: list[str]  # an empty text is a call, another one a change
    numbers: list[int]  # what is given as n, one for each call
    state: list[str]


def _filled(rng: random.Random, text: str, prefix: str) -> str:
    for name, value in (
        ("{v}", lambda: str(float(rng.randrange(2, 90)))),
        ("{i}", lambda: str(rng.randrange(2, 9))),
        ("{b}", lambda: str(rng.random() < 0.5)),
    ):
        while name in text:
            text = text.replace(name, value(), 1)
    return text.replace("$$", "").replace("$", prefix)


def make(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    names = rng.sample(sorted(PARTS), rng.choice((1, 1, 2, 3)))
    source, body, reads, changes, state = [HEAD], list[str](), list[str](), list[str](), list[str]()
    for number, name in enumerate(names):
        part, prefix = PARTS[name], f"p{number}"
        source.append(textwrap.dedent(part.setup).replace("$", prefix))
        body += [
            _filled(rng, e, prefix) for e in rng.sample(part.effects, min(len(part.effects), rng.choice((0, 0, 1, 2))))
        ]
        for read in rng.sample(part.reads, rng.choice((1, 1, 2, 3))):
            reads.append(_filled(rng, rng.choice(WRAPPERS).replace("{read}", read), prefix))
        changes += [_filled(rng, change, prefix) for change in rng.sample(part.changes, min(len(part.changes), 4))]
        state += [text.replace("$", prefix) for text in part.state]
    lines = [f"r{i} = {read}" for i, read in enumerate(reads)] + body
    rng.shuffle(lines)
    shuffled = [*lines, f"return x * n, [{', '.join(f'r{i}' for i in range(len(reads)))}]"]
    if rng.random() < 0.3:  # in a helper
        source.append("def inner(x, n):\n" + textwrap.indent("\n".join(shuffled), "    "))
        shuffled = ["return inner(x, n)"]
    source.append("def f(x, n):\n" + textwrap.indent("\n".join(shuffled), "    "))
    rng.shuffle(changes)
    steps = ["", ""]
    for change in changes[: rng.choice((1, 2, 3))]:
        steps += [change, ""]
    count, changing = steps.count(""), rng.random() < 0.4
    numbers = [rng.randrange(1, 9) if changing else 3 for _ in range(count)]
    return Program("\n".join(source), [*steps, ""], [*numbers, 4], state)


def plain_values(value: Any) -> Any:
    """Arrays as lists, and numbers with their types."""
    if isinstance(value, jax.core.Tracer):
        return "TRACER"
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return np.asarray(value).tolist()
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain_values(item) for key, item in value.items()}
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def _outcome(run: Callable[[], Any]) -> Any:
    try:
        return plain_values(run())
    except graftax.GraftaxError:
        raise
    except Exception as error:
        return type(error).__name__


def observe(program: Program, wrap: Callable[[Any], Any]) -> Iterator[Any]:
    """What each call gives, and what is there after it."""
    module = types.ModuleType("users")
    vars(module).update(jnp=jnp, jax=jax, np=np)
    sys.modules["users"] = module
    exec(compile(program.source, "users.py", "exec", dont_inherit=True), vars(module))
    call, numbers, x = wrap(vars(module)["f"]), iter(program.numbers), jnp.ones(1)
    for step in program.steps:
        if step:
            yield _outcome(lambda step=step: exec(step, vars(module)))
            continue
        number = next(numbers)
        result = _outcome(lambda number=number: call(x, number))
        yield result, [_outcome(lambda text=text: eval(text, vars(module))) for text in program.state]


class Found(NamedTuple):
    compared: int
    difference: str | None  # without a warning
    refused: str | None


def compare(program: Program) -> Found:
    """Runs a program plainly and jitted until they differ, or it is refused."""
    expected = list(observe(program, lambda f: f))
    count = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for count, given in enumerate(observe(program, graftax.jit)):
                if is_error(expected[count]) and is_error(given):  # a call that raises has changed nothing
                    return Found(count, None, None)
                if given != expected[count] and not _told(caught):
                    text = f"step {count} {program.steps[count]!r}\n  plain {expected[count]}\n  jit   {given}"
                    return Found(count, text, None)
        except graftax.GraftaxError as error:
            return Found(count, None, str(error))
    return Found(count + 1, None, None)


def is_error(given: Any) -> bool:
    """Did a call raise?"""
    return isinstance(given, tuple) and isinstance(given[0], str)


def _told(caught: list[Any]) -> bool:
    """Was the user told that something is done once?"""
    return any(issubclass(warning.category, graftax.ImpureCallWarning) for warning in caught)


def main(first: int, last: int) -> None:
    compared = refused = faults = 0
    for seed in range(first, last):
        found = compare(make(seed))
        compared += found.compared
        if found.refused is not None:
            refused += 1
            print(seed, "refused", found.refused.splitlines()[0][:160], flush=True)
        if found.difference is not None:
            faults += 1
            print(seed, "DIFFERS", found.difference, flush=True)
        if seed % 100 == 99:
            jax.clear_caches()
    print(f"{last - first} programs, {compared} comparisons, {refused} refused, {faults} differ")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
