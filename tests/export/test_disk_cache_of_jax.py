# SPDX-License-Identifier: Apache-2.0
"""The cache on disk turns JAX's own on beside it, for what is compiled outside of jitted functions."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

import graftax
from graftax._jax import fast_dispatch

FOLDER, SECONDS = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
events: list[str] = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))


@pytest.fixture(autouse=True)
def nothing_is_chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where no setting says anything of JAX's cache."""
    before = {name: getattr(jax.config, name) for name in (FOLDER, SECONDS)}
    monkeypatch.delenv(FOLDER.upper(), raising=False)
    monkeypatch.delenv(SECONDS.upper(), raising=False)
    choose({FOLDER: None, SECONDS: 1.0})
    yield
    graftax.cache(None)
    choose(before)


def choose(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def of_jax(folder: Path) -> list[Path]:
    return list((folder / "jax").glob("*-cache"))


def operation() -> Any:
    return jax.jit(lambda x: jnp.sin(x) * 3 + 1)


def test_what_is_compiled_outside_is_found_again(tmp_path: Path):
    expected = operation()(jnp.ones(5)).tolist()  # JAX's cache knows by now that there is none
    graftax.cache(tmp_path)
    assert operation()(jnp.ones(5)).tolist() == expected and of_jax(tmp_path)
    events.clear()
    assert operation()(jnp.ones(5)).tolist() == expected and "cache_hits" in events
    graftax.cache(None)
    events.clear()
    assert operation()(jnp.ones(5)).tolist() == expected and "cache_hits" not in events
    assert (jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs) == (None, 1)


@pytest.mark.quick(2)
@pytest.mark.parametrize("chosen", ["not wanted", "another folder", "turned off", "not for all"])
def test_what_the_user_has_said_of_it_stands(tmp_path: Path, chosen: str):
    if chosen == "another folder":
        choose({FOLDER: str(tmp_path / "own"), SECONDS: 0.0})
    elif chosen == "not for all":
        choose({SECONDS: 60.0})
    jax.config.update("jax_enable_compilation_cache", chosen != "turned off")
    graftax.cache(tmp_path, jax_cache=chosen != "not wanted")
    operation()(jnp.ones(6))
    jax.config.update("jax_enable_compilation_cache", True)
    assert not of_jax(tmp_path)
    assert chosen != "another folder" or list((tmp_path / "own").glob("*-cache"))


@pytest.mark.parametrize("options", [{}, {"donate": "state"}, {"donate": "auto"}, {"background": True}], ids=str)
def test_a_program_that_jaxs_cache_gave_is_written(tmp_path: Path, options: dict[str, Any]):
    if options == {"donate": "auto"} and not fast_dispatch.counts_buffer_users():
        pytest.skip("donate='auto' needs direct calls and the users of a buffer")

    def step(state: dict[str, Any], x: float) -> None:
        state["w"] = jnp.cos(state["w"]) * 2 + x

    def run(folder: str) -> tuple[list[float], int, int]:
        cache = graftax.cache(tmp_path / folder, min_seconds=0, jax_cache=False)
        f, state = graftax.jit(step, **options), {"w": jnp.full(1 << 15, 0.5) + 0}
        f.clear_cache()
        for _ in range(3):
            f(state, 1.0)
            while f.cache_info().compiling:
                time.sleep(0.01)
        assert cache is not None
        cache.flush()
        return state["w"][:2].tolist(), f.cache_info().traces, f.cache_info().disk

    choose({FOLDER: str(tmp_path / "jax"), SECONDS: 0.0})
    expected, *_ = run("first")
    events.clear()
    assert run("second") == (expected, 1, 0) and "cache_hits" in events
    choose({FOLDER: None})
    assert run("second") == (expected, 0, 1)


PROGRAM = """
import jax
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))
import jax.numpy as jnp, graftax
w = jnp.cos(jnp.arange(7.0)).sum()
f = graftax.jit(lambda x: x * w)
print(f(w), events.count("cache_hits"), events.count("cache_misses"))
"""


@pytest.mark.quick(0)  # two interpreters; the first test shows what they share
def test_the_environment_turns_it_on_for_the_whole_run(tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"GRAFTAX_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM]
    first, second = (subprocess.check_output(command, env=environment, text=True).split() for _ in range(2))
    assert first[0] == second[0]
    assert int(second[1]) > 2 and second[2] == "0" and int(first[2]) >= int(second[1]) - 1


def test_a_folder_of_others_is_refused(tmp_path: Path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax").chmod(0o777)
    with pytest.raises(graftax.errors.GraftaxError, match="others may write"):
        graftax.cache(tmp_path)
    assert jax.config.jax_compilation_cache_dir is None
