# SPDX-License-Identifier: Apache-2.0
"""Attributes of what is always the caller's own object: members of enums, threads and handlers of user classes."""

from __future__ import annotations

import enum
import logging
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import pytest

import graftax
from zoo import f32

x = f32(1)


class Mode(enum.Enum):
    FAST = {"scale": 2.0}  # noqa: RUF012
    SLOW = {"scale": 1.0}  # noqa: RUF012

    def __init__(self, value: dict[str, float]) -> None:
        self.uses = 0


class Plain(enum.Enum):
    A = "a"
    B = ("b", 1)


@pytest.mark.parametrize("find", [lambda mode: mode, lambda mode: Mode.FAST, lambda mode: Mode[mode.name]])
def test_state_of_a_member_of_an_enum_is_read_and_brought_back(find: Any) -> None:
    def f(mode: Mode, x: Any) -> Any:
        member = find(mode)
        member.uses += 1
        return x * member.value["scale"], member is Mode.FAST

    f = graftax.jit(f)
    Mode.FAST.uses, Mode.FAST.value["scale"] = 0, 2.0
    assert [f(Mode.FAST, x) for _ in range(3)] == [(2, True)] * 3 and Mode.FAST.uses == 3
    Mode.FAST.value["scale"] = 5.0
    assert f(Mode.FAST, x) == (5, True) and Mode.FAST.uses == 4


def test_a_member_without_state_counts_by_identity() -> None:
    f = graftax.jit(lambda mode, x: x * (2 if mode is Plain.A else 3))
    assert [f(mode, x) for mode in (Plain.A, Plain.B, Plain.A)] == [2, 3, 2] and f.cache_info().traces == 2


class Worker(threading.Thread):
    def __init__(self) -> None:
        super().__init__()
        self.rate, self.n, self.held = 2.0, 0, {}


class Handler(logging.StreamHandler):  # pyright: ignore[reportMissingTypeArgument]
    def __init__(self) -> None:
        super().__init__()
        self.rate, self.n, self.held = 2.0, 0, {}


class Process(multiprocessing.Process):
    def __init__(self) -> None:
        super().__init__()
        self.rate, self.n, self.held = 2.0, 0, {}


class Pool(ThreadPoolExecutor):
    def __init__(self) -> None:
        super().__init__(1)
        self.rate, self.n, self.held = 2.0, 0, {}


@pytest.mark.quick(4)
@pytest.mark.parametrize("cls", [Worker, Handler, Process, Pool])
def test_attributes_that_a_class_of_the_users_adds_are_read_and_brought_back(cls: Any) -> None:
    def f(o: Any, x: Any) -> Any:
        o.n += 1
        return x * o.rate

    run, o = graftax.jit(f), cls()
    assert [run(o, x) for _ in range(3)] == [2, 2, 2] and o.n == 3
    o.rate = 3.0
    assert run(o, x) == 3 and o.n == 4


def test_arrays_there_are_an_error_that_names_the_class() -> None:
    worker = Worker()
    worker.held["w"] = jnp.ones(2)
    with pytest.raises(graftax.UnsupportedValueError, match=r"worker.*arrays among its attributes"):
        graftax.jit(lambda worker, x: x * worker.held["w"])(worker, x)


class Stopping(threading.Thread):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    @graftax.jit
    def step(self, x: Any) -> Any:
        self.n += 1
        return x * self.n


def test_a_method_of_a_thread_counts() -> None:
    thread = Stopping()
    assert [thread.step(x) for _ in range(3)] == [1, 2, 3] and thread.n == 3
