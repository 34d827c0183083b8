# SPDX-License-Identifier: Apache-2.0
"""Whatever fails, and wherever: no crash, no pending exception, nothing half written, and the next call works."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import failing
import graftax
import oracle
from failing import OF_CPP, OF_THE_CORE, OPERATIONS, Act, Key, Operation, Registered, Stop, model
from graftax import _core
from sizes import sized
from watchdog import isolated, python

# What a caller may be told. A SystemError is the interpreter's own word for a broken extension.
ORDINARY = (TypeError, ValueError, LookupError, RuntimeError, AttributeError, graftax.GraftaxError)
IDLE = 60  # so many successes in a row: the operation has no more points


def points(name: str, most: int) -> Iterator[int]:
    """All points in a whole run; in a quick one the first, which each operation has, and a few drawn by the name."""
    if sized(1, 0):
        return iter(range(1, most))
    return iter(sorted({1, *random.Random(name).sample(range(2, min(most, 100)), 9)}))


def check(operation: Operation, args: tuple[Any, ...], before: tuple[Any, ...], failed: bool) -> None:
    Act.left = 0
    for number, (arg, own) in enumerate(zip(args, before, strict=True)):
        if number not in operation.writes or failed:
            if isinstance(arg, (_core.GraphDef, _core.PyTreeDef)):
                assert own == arg
                continue
            difference = oracle.difference(own, arg)
            assert difference is None, difference
    assert sys.exc_info()[1] is None


def works(operation: Operation) -> None:
    Act.left = 0
    operation.run(*operation.make())


def tried(
    name: str, operation: Operation, most: int, attempt: Callable[[int, Operation, tuple[Any, ...]], bool]
) -> int:
    """`attempt(k, operation, args)` answers whether the operation failed. Returns how often it did."""
    works(operation)
    failures, idle = 0, 0
    for k in points(name, most):
        Act.left = 0
        args, before = operation.make(), operation.make()
        failed = attempt(k, operation, args)
        check(operation, args, before, failed)
        failures, idle = failures + failed, 0 if failed else idle + 1
        if idle >= IDLE:
            break
    works(operation)
    return failures


@pytest.mark.quick(0)
@pytest.mark.parametrize("name", OF_THE_CORE)
@isolated()
def test_failed_allocations(name: str) -> None:
    testcapi = pytest.importorskip("_testcapi")

    def attempt(k: int, operation: Operation, args: tuple[Any, ...]) -> bool:
        run = operation.run
        testcapi.set_nomemory(k, k + 1)
        try:
            run(*args)
        except MemoryError:
            return True
        finally:
            testcapi.remove_mem_hooks()
        return False

    assert tried(name, OF_THE_CORE[name], 4000, attempt) > 0


def fail_new() -> None:
    """In a process with failing_new.cpp."""
    failing_index = ctypes.c_long.in_dll(ctypes.CDLL(None), "failing_new_at")
    for name, operation in OF_CPP.items():

        def attempt(k: int, operation: Operation, args: tuple[Any, ...]) -> bool:
            run = operation.run
            failing_index.value = k
            try:
                run(*args)
            except MemoryError:
                return True
            finally:
                failing_index.value = 0
            return False

        assert tried(name, operation, 4000, attempt) > 0, name


@pytest.mark.quick(0)
@pytest.mark.skipif("san.so" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer allocates itself")
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("c++"), reason="no compiler, or no LD_PRELOAD")
def test_failed_allocations_of_cpp(tmp_path: pathlib.Path) -> None:
    source, library = pathlib.Path(failing.__file__).with_name("failing_new.cpp"), tmp_path / "failing_new.so"
    subprocess.run(["c++", "-O1", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True)
    here = str(pathlib.Path(__file__).parent)
    program = f"import sys; sys.path.append({here!r}); import test_failure_points; test_failure_points.fail_new()"
    python(program, LD_PRELOAD=str(library), seconds=600)


def stop() -> None:
    raise Stop


def fail() -> None:
    raise ValueError("the user's own")


@pytest.mark.quick(0)
@pytest.mark.parametrize("kind", ["Stop", "ValueError"])
@pytest.mark.parametrize("name", OPERATIONS)
@isolated()
def test_user_code_that_raises(name: str, kind: str) -> None:
    error = {"Stop": Stop, "ValueError": ValueError}[kind]

    def attempt(k: int, operation: Operation, args: tuple[Any, ...]) -> bool:
        Act.at(k, stop if error is Stop else fail)
        try:
            operation.run(*args)
        except error:
            return True
        finally:
            reached = Act.left <= 0
        assert not reached or error is ValueError, "the error was swallowed"
        return False

    tried(name, OPERATIONS[name], 400, attempt)


@pytest.mark.quick(1)
@pytest.mark.parametrize("nonsense", [3, (), "text", 1.5, [[]]], ids=repr)
@pytest.mark.parametrize("name", OPERATIONS)
@isolated()
def test_user_code_that_returns_nonsense(name: str, nonsense: object) -> None:
    operation = OPERATIONS[name]
    for k in points(name, 200):
        Act.left = 0
        args = operation.make()
        Act.at(k, lambda: nonsense)
        with contextlib.suppress(*ORDINARY):
            operation.run(*args)
        if Act.left > 0:
            break
    works(operation)


def mutations(root: Any) -> dict[str, Callable[[], None]]:
    held = [root]
    return {
        "clears what is walked": lambda: root.__dict__.clear(),
        "grows what is walked": lambda: root.shared.append(root),
        "shrinks what is walked": lambda: root.shared.clear(),
        "changes a dict": lambda: root.__dict__.update(new=1, w=None),
        "changes a set": lambda: root.tags.add(99),
        "walks again": lambda: graftax.flatten(root) and None,
        "copies": lambda: graftax.copy(root) and None,
        "drops the last reference": held.clear,
        "registers a class": lambda: graftax.register(
            type("Fresh", (), {}), flatten=lambda f: ((), None), unflatten=lambda _, c: None
        ),
        "writes into it": lambda: graftax.update(root, graftax.partition(root, float)[1]) and None,
    }


@pytest.mark.quick(0)
@pytest.mark.parametrize("mutation", mutations(model()))
@pytest.mark.parametrize("name", ["flatten", "copy", "partition", "equal", "to_dict", "map_leaves", "update", "find"])
@isolated()
def test_user_code_that_changes_what_is_walked(name: str, mutation: str) -> None:
    operation = OPERATIONS[name]
    for k in points(name + mutation, 200):
        Act.left = 0
        args = operation.make()
        acts = mutations(args[0])[mutation]

        def once(acts: Callable[[], None] = acts) -> None:
            Act.left = -(10**9)  # what it calls itself does not act
            acts()

        Act.at(k, once)
        with contextlib.suppress(*ORDINARY):
            operation.run(*args)
        if Act.left > 0:
            break
        del args
    works(operation)


def test_the_points_are_there():
    """A count that is never met would let every test above pass."""
    for name, least in {"flatten": 1, "copy": 3, "tree.map": 4, "equal": 2, "partition": 10}.items():
        Act.at(10**6, stop)
        args = OPERATIONS[name].make()
        before = Act.left
        OPERATIONS[name].run(*args)
        assert before - Act.left >= least, name
    assert hash(Key(1)) == hash(1) and Registered(1).children == [1]
