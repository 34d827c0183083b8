# SPDX-License-Identifier: Apache-2.0
"""The work of each operation on a chain grows as the chain does: counted, not timed."""

import copy
import gc
import pickle
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

import graftax
from sizes import sized
from zoo import Box

LINKS = sized(1_000, 300)
MOST_CALLS = 5.3  # for four times the links: an exponent of 1.2; the square would be 16
MOST_BYTES = 8  # a table is up to twice as large as what is in it


def functions(n: int) -> Any:
    def link(inner: Any) -> Any:
        return lambda: inner

    chain = link(None)
    for _ in range(n):
        chain = link(chain)
    return chain


def nested(wrap: Callable[[Any], Any]) -> Callable[[int], Any]:
    def chain(n: int) -> Any:
        value: Any = 1
        for _ in range(n):
            value = wrap(value)
        return value

    return chain


CHAINS = {
    "functions": functions,
    "dicts": nested(lambda value: {"a": value}),
    "lists": nested(lambda value: [value]),
    "tuples": nested(lambda value: (value, [])),
    "objects": nested(lambda value: Box(a=value)),
}
PREPARE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "to_dict": (lambda chain: chain, graftax.to_dict),
    "from_dict": (graftax.to_dict, graftax.from_dict),
    "flatten": (lambda chain: chain, graftax.flatten),
    "copy": (lambda chain: chain, graftax.copy),
    "hash": (graftax.flatten, lambda flat: hash(flat[1])),
    "unflatten": (graftax.flatten, lambda flat: graftax.unflatten(flat[1], flat[0])),
    "repr": (graftax.flatten, lambda flat: repr(flat[1])),
    "at": (lambda chain: chain, lambda chain: graftax.at(chain)["**"].paths),
    "hash of paths": (lambda chain: list(graftax.to_dict(chain)), lambda paths: [hash(p) for p in paths]),
    "pickle": (lambda chain: graftax.flatten(chain)[1], lambda g: pickle.loads(pickle.dumps(g))),
    "pickle of paths": (lambda chain: list(graftax.to_dict(chain)), lambda p: pickle.loads(pickle.dumps(p))),
    "deepcopy of paths": (lambda chain: list(graftax.to_dict(chain)), copy.deepcopy),
}
TWO: dict[str, Callable[[Any, Any], Any]] = {"equal": graftax.equal, "diff": graftax.diff}


def work(run: Callable[[], Any]) -> tuple[int, int]:
    """Calls of Python and C functions, and the most bytes that are held at a time."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    gc.collect()
    before = sys.getprofile()
    tracemalloc.start()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return calls, most


def assert_linear(run: Callable[[int], Callable[[], Any]]) -> None:
    run(10)()  # what is learned about types
    calls, held = work(run(LINKS))
    # The lesser of two: a table of the interpreter's own may happen to grow in one of them.
    more_calls, more_held = map(min, zip(*(work(run(4 * LINKS)) for _ in range(2)), strict=True))
    assert more_calls <= MOST_CALLS * calls + 100, (calls, more_calls)
    assert more_held <= MOST_BYTES * held + 10_000, (held, more_held)


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("operation", PREPARE)
def test_work_grows_as_the_chain(operation: str, chain: str):
    if chain == "functions" and operation == "pickle":
        pytest.skip("functions made in a function have no name that a pickle could write")
    prepare, apply = PREPARE[operation]

    def run(n: int) -> Callable[[], Any]:
        inputs = prepare(CHAINS[chain](n))
        return lambda: apply(inputs)

    assert_linear(run)


@pytest.mark.quick(0)
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("operation", TWO)
def test_work_on_two_chains_grows_as_they_do(operation: str, chain: str):
    def run(n: int) -> Callable[[], Any]:
        one, other = CHAINS[chain](n), CHAINS[chain](n)
        return lambda: TWO[operation](one, other)

    assert_linear(run)


@pytest.mark.quick(0)
def test_paths_of_a_hundred_thousand_levels():
    n = sized(100_000, 10_000)
    flat = graftax.to_dict(CHAINS["dicts"](n))
    deepest = next(reversed(flat))
    assert len(deepest) == n and flat[deepest] == 1
    restored = pickle.loads(pickle.dumps(flat))
    assert len(restored) == len(flat) and next(reversed(restored)) == deepest
    back = graftax.from_dict(restored)
    for _ in range(n):
        (back,) = back.values()
    assert back == 1
