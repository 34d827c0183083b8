# SPDX-License-Identifier: Apache-2.0
"""`python -m graftax doctor`: versions, settings, a self-test, and what to put into a bug report."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

import graftax
from graftax import _core
from graftax._capture.unknown_interpreter import unknown_interpreter
from graftax._jax import fast_dispatch
from graftax._jax.frame_filter import filtering_mode
from graftax._jax.missing_names import lacking
from graftax._jit import multihost_comparison

REPORT = (
    "To report a bug, send this output, the shortest program that still fails, and what it prints with "
    "GRAFTAX_TRACEBACK=full and JAX_TRACEBACK_FILTERING=off. jit(..., check=True) tells whether a call differs from "
    "plain Python, and graftax.show(f, *args) what a call does with its arguments."
)

NEIGHBOURS = ("equinox", "flax", "optax", "flarejax", "scikit-learn", "rich", "hypothesis")
_NEEDED = re.compile(r"^(jax|numpy)\s*(?:\(?>=\s*([\d.]+)\)?)?$")
# Settings of JAX that slow calls down or change what they do, with their effects.
_SETTINGS = {
    "jax_disable_jit": "nothing is compiled: graftax.jit calls the plain function",
    "jax_debug_nans": "every call is checked for nan, and none goes direct",
    "jax_debug_infs": "every call is checked for inf, and none goes direct",
    "jax_check_tracer_leaks": "every trace is searched for leaks, and no call goes direct",
    "jax_log_compiles": "every compilation is logged",
    "jax_no_tracing": "tracing is an error: a first call fails",
    "jax_transfer_guard": "transfers are watched: NumPy arguments may be refused",
    "jax_enable_x64": "numbers have 64 bits",
}


class Finding(NamedTuple):
    """Something unusual, or, if `wrong`, something that does not work."""

    wrong: bool
    text: str


def doctor() -> int:
    """Prints the report. The exit status is 1 if something does not work."""
    findings = list(_findings())
    _section("Versions", _versions())
    _section("Where", _locations())
    _section("In force", _in_force())
    results = [(name, *_run_test(test)) for name, test in SELF_TEST.items()]
    _section("Self-test", [("ok" if not error else "FAILED", name) for name, error, _ in results])
    print("\nFindings")
    for finding in findings:
        print(f"  {'WRONG' if finding.wrong else 'note'}: {finding.text}")
    for name, error, trace_text in results:
        if error:
            print(f"  WRONG: the self-test `{name}` failed: {error}\n{trace_text}")
    failed = any(error for _, error, _ in results)
    if not findings and not failed:
        print("  nothing unusual.")
    print(f"\n{REPORT}")
    return int(failed or any(finding.wrong for finding in findings))


def _section(title: str, rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    print(title if title == "Versions" else f"\n{title}")
    for name, value in rows:
        print(f"  {name:{width}}  {value}")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _versions() -> list[tuple[str, str]]:
    python = f"{platform.python_version()} ({platform.python_implementation()}, {platform.platform()})"
    versions = [("python", python), ("graftax", graftax.__version__)]
    return versions + [(name, _version(name)) for name in ("jax", "jaxlib", "numpy", *NEIGHBOURS)]


def _locations() -> list[tuple[str, str]]:
    locations = [("package", str(Path(__file__).parents[1])), ("extension", str(_core.__file__))]
    # JAX raises where it finds no device, or not the one that was asked for.
    for name, describe in (("devices", _devices), ("processes", _processes)):
        try:
            locations.append((name, describe()))
        except RuntimeError as error:
            locations.append((name, f"none: {error}"))
    return locations


def _devices() -> str:
    kinds: dict[str, list[str]] = {}
    for device in cast("list[Any]", jax.devices()):  # pyright: ignore[reportUnknownMemberType]
        kinds.setdefault(f"{device.device_kind} ({device.platform})", []).append(str(device.id))
    return "; ".join(
        f"{len(ids)} {device_kind}: {', '.join(ids[:8])}{' …' * (len(ids) > 8)}" for device_kind, ids in kinds.items()
    )


def _processes() -> str:
    return f"{jax.process_count()}, this one is {jax.process_index()}"


def _in_force() -> list[tuple[str, str]]:
    settings = [f"{name}={value}" for name, value in _unusual_settings()]
    variables = [
        f"{name}={os.environ[name]}"
        for prefixes in (("GRAFTAX_", "XLA_FLAGS"), ("JAX_",))
        for name in sorted(os.environ)
        if name.startswith(prefixes)
    ]
    features_off = [f"{feature}: JAX has no {name}" for feature, name in lacking.items()]
    shown_frames = "all frames" if os.environ.get("GRAFTAX_TRACEBACK") == "full" else "the user's frames"
    return [
        ("direct calls", fast_dispatch.status()),
        ("off", "; ".join(features_off) or "nothing else"),
        ("reads of helpers", _core.frames_unknown() or "seen"),
        ("comparing hosts", multihost_comparison.status()),
        ("tracebacks", f"{shown_frames}; JAX: {filtering_mode()}"),
        ("settings of JAX", ", ".join(settings) or "as usual"),
        ("environment", ", ".join(variables) or "nothing of graftax's or JAX's"),
        ("watched by", ", ".join(_observers()) or "no tracer, profiler or debugger"),
    ]


def _unusual_settings() -> Iterator[tuple[str, Any]]:
    for name in _SETTINGS:
        value = getattr(jax.config, name, None)
        if value not in (None, False, "allow"):
            yield name, value


def _observers() -> list[str]:
    """Tracers, profilers and debuggers, which slow a trace down and may keep objects alive."""
    observers: list[str] = []
    if sys.gettrace() is not None:
        observers.append(f"sys.settrace ({type(sys.gettrace()).__name__})")
    if sys.getprofile() is not None:
        observers.append("sys.setprofile")
    # Python 3.12 and later.
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is not None:
        observers += [f"sys.monitoring ({tool})" for tool in map(monitoring.get_tool, range(6)) if tool]
    return observers


# ---- what is unusual, or wrong


def _findings() -> Iterator[Finding]:
    yield from _of_versions()
    for name, value in _unusual_settings():
        yield Finding(name == "jax_no_tracing", f"{name}={value}: {_SETTINGS[name]}.")
    status = fast_dispatch.status()
    if status != "on":
        yield Finding(False, f"direct calls are {status}. All works, and calls cost what they cost with jax.jit.")
    if unknown_interpreter():
        yield Finding(True, unknown_interpreter())
    # Only builds of Python from 3.13 on can be without the lock, and have this function.
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        yield Finding(True, "this Python runs without its global lock, which the core relies on: use the usual build.")
    for observer in _observers():
        yield Finding(False, f"{observer} is on: traces are slower, and objects may live longer.")
    # Whoever changes the checkout would see nothing of it.
    if "site-packages" in str(Path(__file__)) and Path("python/graftax/__init__.py").is_file():
        yield Finding(False, f"this is a checkout of graftax, and the one that runs is {Path(__file__).parents[1]}.")


def _of_versions() -> Iterator[Finding]:
    jax_version, jaxlib_version = _version("jax"), _version("jaxlib")
    if _numbers(jaxlib_version)[:2] < _numbers(jax_version)[:2]:
        yield Finding(
            True, f"jaxlib {jaxlib_version} is older than jax {jax_version}: pip install --upgrade jax jaxlib."
        )
    try:
        needed = importlib.metadata.requires("graftax") or []
        installed = importlib.metadata.version("graftax")
    except importlib.metadata.PackageNotFoundError:
        yield Finding(False, "graftax is imported from a folder and is not installed.")
        return
    if installed != graftax.__version__:
        yield Finding(False, f"the installed graftax is {installed}, and the imported one is {graftax.__version__}.")
    for match in filter(None, map(_NEEDED.match, needed)):
        name, minimum = match[1], match[2]
        if minimum and _numbers(_version(name)) < _numbers(minimum):
            yield Finding(True, f"{name} {_version(name)} is older than {minimum}, which graftax needs: update it.")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


# ---- does it work?


class _Model:
    def __init__(self) -> None:
        self.w, self.steps = jnp.arange(3.0), 0
        self.tied = self.layers = [self]


def _changes_come_back() -> None:
    @graftax.jit
    def step(model: _Model, x: Any) -> _Model:
        model.w, model.steps = model.w + x, model.steps + 1
        return model

    model = _Model()
    for _ in range(3):
        _expect(step(model, 1.0) is model)
    _expect(model.steps == 3 and model.w.tolist() == [3.0, 4.0, 5.0])
    _expect(model.tied is model.layers and model.layers[0] is model)


def _known_calls_agree() -> None:
    def body(tree: dict[str, Any], x: Any) -> dict[str, Any]:
        return {name: leaf * x for name, leaf in tree.items()}

    tree: dict[str, Any] = {f"leaf {i}": jnp.full(4, float(i)) for i in range(40)}
    jitted, plain = graftax.jit(body), jax.jit(body)
    for x in (2.0, 3.0, 4.0):
        actual, expected = jitted(tree, jnp.asarray(x)), plain(tree, jnp.asarray(x))
        _expect(all((actual[k] == expected[k]).all() for k in tree))


def _gradients() -> None:
    model: dict[str, Any] = {"w": jnp.arange(3.0), "name": "net"}

    def loss(model: dict[str, Any]) -> Any:
        return (model["w"] ** 2).sum()

    value, gradient = graftax.jit(graftax.value_and_grad(loss))(model)
    _expect(float(value) == 5.0 and gradient["w"].tolist() == [0.0, 2.0, 4.0] and gradient["name"] is None)


def _loops() -> None:
    log: dict[str, Any] = {"sum": jnp.zeros(())}

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        log["sum"] = log["sum"] + x
        return carry * 2, x + 1

    carry, ys = graftax.scan(step, jnp.ones(()), jnp.arange(4.0))
    _expect(float(carry) == 16.0 and ys.tolist() == [1.0, 2.0, 3.0, 4.0] and float(log["sum"]) == 6.0)


def _donation() -> None:
    @graftax.jit(donate="all")
    def step(state: dict[str, Any]) -> dict[str, Any]:
        return {"w": state["w"] + 1}

    state: dict[str, Any] = {"w": jnp.zeros(8)}
    for _ in range(3):
        state = step(state)
    _expect(state["w"].tolist() == [3.0] * 8)


def _errors_are_told() -> None:
    @graftax.jit
    def first(data: Any) -> Any:
        return next(data["data"])

    try:
        first({"data": iter([1])})
    except graftax.UnsupportedValueError as error:
        _expect(error.args[0].startswith("data"))
    else:
        raise AssertionError("an iterator was taken")


SELF_TEST: dict[str, Callable[[], None]] = {
    "an object changed in place, shared and in a cycle": _changes_come_back,
    "calls again give what jax.jit gives": _known_calls_agree,
    "gradients of an object": _gradients,
    "a loop that changes what it captures": _loops,
    "donated state": _donation,
    "a refused value is named": _errors_are_told,
}


def _expect(holds: bool) -> None:
    """An assertion that `python -O` keeps."""
    if not holds:
        raise AssertionError("another result than expected")


def _run_test(test: Callable[[], None]) -> tuple[str, str]:
    """(error, traceback), both empty if the test passes."""
    try:
        # With `jax_disable_jit`, graftax.jit calls the plain function, and nothing would be tested.
        with jax.disable_jit(False):
            test()
    except Exception as error:
        return f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    return "", ""
