# SPDX-License-Identifier: Apache-2.0
"""Threads that share a recorder: each gets its own results, and what is kept are whole calls."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import graftax
from graftax._record.replay import RecordedCalls

THREADS = 8


class Model:
    def __init__(self) -> None:
        self.w, self.steps = jnp.ones(2), 0
        self.me = self


def advance(model: Model, batch: Any) -> Any:
    model.steps += 1
    model.w = model.w * 0.5 + batch["x"]
    return {"loss": jnp.log(model.w).sum(), "steps": model.steps}


def in_threads(work: Callable[[int], None]) -> None:
    """Runs `work` with the number of each thread, and raises what one has raised."""
    begin, failures = threading.Barrier(THREADS), list[BaseException]()

    def run(number: int) -> None:
        begin.wait()
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_all_calls_of_all_threads_are_kept_as_they_were(tmp_path: Path):
    calls = 5
    recorder = graftax.record(advance, last=THREADS * calls, nonfinite=False, dir=tmp_path)

    def work(number: int) -> None:
        model = Model()
        for i in range(calls):
            assert recorder(model, {"x": np.full(2, number, np.float32)})["steps"] == i + 1 == model.steps

    in_threads(work)
    recorder.save(tmp_path / "calls")
    recorded = RecordedCalls(tmp_path / "calls")
    given = [recorded.prepare(i).args for i in range(THREADS * calls)]
    seen = sorted((int(batch["x"][0]), model.steps) for model, batch in given)
    assert seen == [(number, i) for number in range(THREADS) for i in range(calls)]
    assert [recorded.run(i).differences for i in range(0, THREADS * calls, 7)] == [[]] * 6


def test_calls_are_forgotten_saved_and_flushed_while_others_run(tmp_path: Path):
    recorder = graftax.record(graftax.jit(advance, donate="model"), last=3, copy_every=4, on=(), dir=tmp_path)
    recorder(Model(), {"x": np.ones(2, np.float32)})

    def work(number: int) -> None:
        model, w = Model(), np.ones(2, np.float32)
        for i in range(30):
            x = np.full(2, number + 1, np.float32)
            loss = recorder(model, {"x": x})["loss"]
            w = w * np.float32(0.5) + x
            x[:] = -1  # the call has its own copy
            np.testing.assert_allclose(float(loss), np.log(w).sum(), rtol=1e-5)
            if number == 0 and i % 10 == 9:
                recorder.save(tmp_path / f"{i}")
            if number == 1:
                recorder.flush()

    in_threads(work)
    assert len(recorder._history.ring.calls) <= 3 + 1
    for file in recorder.files:
        recorded = RecordedCalls(file)
        assert [recorded.run(i).differences for i in range(len(recorded))] == [[]] * len(recorded)
    assert len(recorder.files) == 3


def test_one_file_is_written_for_all_threads_that_fail(tmp_path: Path):
    recorder = graftax.record(advance, dir=tmp_path)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        in_threads(lambda number: [recorder(Model(), {"x": jnp.float32(-5 * (number % 2))}) for _ in range(6)] and None)
        recorder.flush()
    assert len(recorder.files) == len([w for w in found if w.category is graftax.RecordedCallWarning]) == 1
    recorded = RecordedCalls(recorder.files[0])
    assert "result['loss']" in recorded.run(len(recorded) - 1).nonfinite
