# SPDX-License-Identifier: Apache-2.0
"""What runs in each of several processes: `python hosts.py NUMBER COUNT PORT [SCENARIO..]`. Prints what each gives."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import graftax
from graftax._jit import multihost_comparison

P = PartitionSpec
SCENARIOS: dict[str, Callable[..., Any]] = {}


def scenario(function: Callable[..., Any]) -> Callable[..., Any]:
    SCENARIOS[function.__name__] = function
    return function


class Hosts:
    """This process, and a mesh over all."""

    def __init__(self, number: int, count: int) -> None:
        self.number, self.count = number, count
        self.mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))
        self.rows = NamedSharding(self.mesh, P("d"))

    def spread(self, array: Any, spec: Any = None) -> Any:
        rows = self.rows if spec is None else NamedSharding(self.mesh, spec)
        whole = np.asarray(array, np.float32)
        return jax.make_array_from_callback(whole.shape, rows, lambda part: whole[part])

    def state(self, **more: Any) -> dict[str, Any]:
        return {"w": self.spread(np.arange(8.0)), **more}


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except graftax.StructureError as error:
        return str(error)
    return "nothing raised"


def scale() -> Any:
    """A function that has not been met."""

    def scale(state: Any) -> Any:
        state["w"] = state["w"] * state.get("n", 1)
        return state["w"].sum()

    return scale


@scenario
def the_same_on_all(hosts: Hosts) -> Any:
    step, state = graftax.jit(scale()), hosts.state(n=2)
    before = multihost_comparison._state.number
    sums = [float(step(state)) for _ in range(3)]
    return (
        sums,
        multihost_comparison._state.number - before,
        str(state["w"].sharding.spec),
        multihost_comparison.status(),
    )


@scenario
def a_number_that_differs(hosts: Hosts) -> Any:
    return refused(lambda: graftax.jit(scale())(hosts.state(n=2 + hosts.number)))


@scenario
def a_dict_in_another_order(hosts: Hosts) -> Any:
    named = {"a": 1, "b": 2} if hosts.number == 0 else {"b": 2, "a": 1}
    return refused(lambda: graftax.jit(scale())(hosts.state(names=named)))


@scenario
def another_function(hosts: Hosts) -> Any:
    def double(state: Any) -> Any:
        return state["w"] * 2

    return refused(lambda: graftax.jit(double if hosts.number == 0 else scale())(hosts.state()))


@scenario
def the_same_name_and_other_code(hosts: Hosts) -> Any:
    one, other = (lambda s: s["w"] * 2), (lambda s: s["w"] * 3)
    return refused(lambda: graftax.jit(one if hosts.number == 0 else other)(hosts.state()))


@scenario
def another_shape(hosts: Hosts) -> Any:
    extra = np.ones(3 + hosts.number, np.float32)
    return refused(lambda: graftax.jit(lambda s, x: s["w"].sum() + x.sum())(hosts.state(), extra))


@scenario
def another_sharding(hosts: Hosts) -> Any:
    w = hosts.spread(np.arange(8.0), P("d") if hosts.number == 0 else P())
    return refused(lambda: graftax.jit(lambda w: w * 2)(w))


@scenario
def a_counter_and_a_host_function(hosts: Hosts) -> Any:
    seen: list[int] = []

    @graftax.jit
    def step(state: Any) -> Any:
        state["n"] += 1
        jax.debug.callback(lambda: seen.append(1))
        return (state["w"] * state["n"]).sum()

    state = hosts.state(n=0)
    return [float(step(state)) for _ in range(4)]


@scenario
def programs_of_one_host_are_not_compared(hosts: Hosts) -> Any:
    before = multihost_comparison._state.number
    if hosts.number:
        graftax.jit(lambda x: x * 2)(jnp.ones(3))
    return multihost_comparison._state.number - before


@scenario
def turned_off(hosts: Hosts) -> Any:
    before = multihost_comparison._state.number
    os.environ["GRAFTAX_CHECK_HOSTS"] = "0"
    try:
        graftax.jit(lambda s: s["w"] * 5)(hosts.state())
        return multihost_comparison._state.number - before, multihost_comparison.status()
    finally:
        del os.environ["GRAFTAX_CHECK_HOSTS"]


@scenario
def a_host_that_stays_away(hosts: Hosts) -> Any:
    float(graftax.jit(scale())(hosts.state()))  # so that all begin together
    os.environ["GRAFTAX_CHECK_HOSTS"], multihost_comparison._WARN = "5", 1.0
    begun = time.monotonic()
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            last = hosts.number == hosts.count - 1
            text = "away" if last else refused(lambda: graftax.jit(lambda s: s["w"] * 7)(hosts.state()))
        late = [str(w.message) for w in warned if issubclass(w.category, RuntimeWarning)]
        return text, late, time.monotonic() - begun < 30
    finally:
        del os.environ["GRAFTAX_CHECK_HOSTS"]
        multihost_comparison._WARN = 10.0
        if hosts.number == hosts.count - 1:
            multihost_comparison._state.number += 1  # the comparison that it has not come to


@scenario
def host_0_comes_too_late(hosts: Hosts) -> Any:
    float(graftax.jit(scale())(hosts.state()))  # so that all begin together
    os.environ["GRAFTAX_CHECK_HOSTS"] = "2"
    try:
        if hosts.number == 0:
            time.sleep(4)
        return refused(lambda: graftax.jit(lambda s: s["w"] * 13)(hosts.state()))
    finally:
        del os.environ["GRAFTAX_CHECK_HOSTS"]


@scenario
def rules_place_arrays_on_all_hosts(hosts: Hosts) -> Any:
    class Model:
        def __init__(self) -> None:
            self.w, self.b = jnp.arange(16.0).reshape(8, 2), jnp.zeros(2)

    rules = graftax.Rules([("w", P("d")), ("b", None)], mesh=hosts.mesh)
    made = graftax.jit(Model, out_shardings=rules)()
    placed = graftax.shard(Model(), None, rules)
    numpy = graftax.shard(
        {"w": np.arange(16.0).reshape(8, 2), "b": np.ones(2)}, hosts.mesh, [("[w]", P("d")), ("**", None)]
    )
    rows = 8 // hosts.count
    mine = np.full((rows, 2), hosts.number, np.float32)
    local = graftax.shard({"x": mine}, hosts.mesh, [("**", P("d"))], local=True)["x"]
    key = graftax.shard({"key": jax.random.key(0)}, hosts.mesh, [("**", None)])["key"]
    same = graftax.equal(made, placed)
    return str(made.w.sharding.spec), same, numpy["w"].shape, local.shape, float(local.sum()), key.is_fully_addressable


@scenario
def equal_and_diff_of_arrays_that_span_hosts(hosts: Hosts) -> Any:
    one, other = hosts.state(), {"w": hosts.spread([0, 1, 2, 3, 4, 5, 6, 9])}
    return graftax.equal(one, hosts.state()), [str(d) for d in graftax.diff(one, other)]


@scenario
def the_plain_function_beside(hosts: Hosts) -> Any:
    state = hosts.state(n=3)
    return float(graftax.jit(scale(), check=True)(state)), str(state["w"].sharding.spec)


@scenario
def check_hosts_of_the_same(hosts: Hosts) -> Any:
    graftax.check_hosts(hosts.state(n=2, name="x", local=jnp.ones(3), key=jax.random.key(1), big=np.ones(100)))
    graftax.check_hosts({"w": hosts.spread(np.ones(8), P())})
    return "fine"


@scenario
def check_hosts_of_others(hosts: Hosts) -> Any:
    number = hosts.number
    return [
        refused(lambda: graftax.check_hosts({"lr": 0.1 * (number + 1)})),
        refused(lambda: graftax.check_hosts({"seed": np.array([number])})),
        refused(lambda: graftax.check_hosts({"big": np.full(100, number)})),
        refused(lambda: graftax.check_hosts({"big": np.full(100, number)}, values=False)),
        refused(lambda: graftax.check_hosts([1] * (number + 1))),
    ]


@scenario
def check_hosts_of_parts_that_all_hold(hosts: Hosts) -> Any:
    here = jax.local_device_count()
    if here < 2:
        return "with two devices on each"
    mesh = jax.make_mesh((hosts.count, here), ("hosts", "here"), axis_types=(AxisType.Auto,) * 2)
    placed = NamedSharding(mesh, P("here"))

    def array(more: int) -> Any:
        numbers = np.arange(8, dtype=np.uint32).reshape(4, 2)
        numbers[3] += more
        return jax.make_array_from_callback((4, 2), placed, lambda part: numbers[part])

    last = hosts.number == hosts.count - 1
    graftax.check_hosts({"w": array(0), "keys": jax.random.wrap_key_data(array(0))})
    return [
        refused(lambda: graftax.check_hosts({"w": array(last)})),
        refused(lambda: graftax.check_hosts({"keys": jax.random.wrap_key_data(array(last))})),
        refused(lambda: graftax.check_hosts({"w": array(last)}, values=False)),
    ]


@scenario
def a_program_that_was_loaded_is_compared(hosts: Hosts) -> Any:
    def loaded(on_all: bool) -> Any:
        function = graftax.jit(scale())
        return function.load_compiled(path) if hosts.number == 0 or on_all else 0, function

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "programs")
        first = graftax.jit(scale())
        first(hosts.state(n=2))
        first.save_compiled(path)
        before = multihost_comparison._state.number
        count, on_all = loaded(True)
        totals = [float(on_all(hosts.state(n=2))) for _ in range(2)]
        _, on_one = loaded(False)
        totals.append(float(on_one(hosts.state(n=2))))
        comparisons = multihost_comparison._state.number - before
        traces = on_all.cache_info().traces
        text = refused(lambda: loaded(False)[1](hosts.state(n=2 + (hosts.number > 0))))
    return count, traces, totals, comparisons, text


@scenario
def nothing_is_lowered_or_traced_twice(hosts: Hosts) -> Any:
    import logging

    found: list[str] = []

    class Note(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Note()
    logging.getLogger("jax").addHandler(handler)
    step, state = graftax.jit(lambda s: s["w"] * 11), hosts.state()
    with jax.log_compiles(), contextlib.redirect_stderr(None):
        step(state)
        step(state)
    logging.getLogger("jax").removeHandler(handler)
    own = [text for text in found if "<lambda>" in text]
    return [sum(word in text for text in own) for word in ("MLIR module conversion", "XLA compilation")]


def main(number: int, count: int, port: str, *chosen: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
    hosts = Hosts(number, count)
    for name, run in SCENARIOS.items():
        if chosen and name not in chosen:
            continue
        try:
            out = run(hosts)
        except Exception as error:
            out = f"{type(error).__name__}: {error}"
        print("RESULT " + json.dumps([name, out]), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
