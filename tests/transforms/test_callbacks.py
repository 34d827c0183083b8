# SPDX-License-Identifier: Apache-2.0
"""Host functions are given the graph of their arguments, and give back the one that was announced."""

from __future__ import annotations

import dataclasses
import functools
import operator
import queue
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
import zoo
from graftax import io_callback, pure_callback

JITS = pytest.mark.parametrize("jit", [lambda f: f, graftax.jit, jax.jit], ids=["plain", "jit", "jax"])
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def shapes(obj):
    leaves, graphdef = graftax.flatten(obj)
    return graftax.unflatten(graphdef, [jax.ShapeDtypeStruct(x.shape, jnp.result_type(x)) for x in leaves])


@pytest.mark.parametrize("jit", [lambda f: f, graftax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_a_graph_goes_to_the_host_and_back(build, jit):
    obj = build()
    leaves, graphdef = graftax.flatten(obj)
    if any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in leaves):
        return
    structures = []

    def host(argument):
        structures.append(graftax.flatten(argument)[1])
        return argument

    leaves_back, structure = graftax.flatten(jit(lambda obj: io_callback(host, shapes(obj), obj))(obj))
    jax.effects_barrier()
    assert structures[0] == structure == graphdef
    for x, y in zip(leaves_back, leaves, strict=True):
        np.testing.assert_array_equal(x, y)


class Batch:
    def __init__(self, x):
        self.x, self.size, self.parts = x, 3, [x]
        self.owner = self


def double(batch, *, times):
    assert batch.owner is batch
    assert batch.parts[0].shape == (2,)
    return {"out": np.asarray(batch.x) * times * batch.size, "by": times}


@JITS
def test_objects_and_keywords_reach_the_host(jit):
    def f(x):
        shapes = {"out": jax.ShapeDtypeStruct((2,), jnp.float32), "by": 2}
        return pure_callback(double, shapes, Batch(x), times=2)["out"]

    np.testing.assert_array_equal(jit(f)(jnp.ones(2)), [6, 6])


def test_a_callback_can_be_mapped():
    def f(x):
        shape = {"y": jax.ShapeDtypeStruct((), jnp.float32)}
        return pure_callback(lambda d: {"y": np.sin(d["x"])}, shape, {"x": x}, vmap_method="expand_dims")["y"]

    x = jnp.arange(3.0)
    np.testing.assert_allclose(jax.jit(jax.vmap(f))(x), jnp.sin(x), rtol=1e-6)


@JITS
@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"y": np.ones(2, np.float32), "n": 1}, r"float32\[2\] at result\['y'\].*float32\[\]"),
        ({"y": np.int32(1), "n": 1}, r"int32\[\] at result\['y'\]"),
        ({"y": np.float32(1), "n": 2}, r"result\['n'\]: expected 1, given 2"),
        ({"y": np.float32(1)}, r"result\['n'\]: expected 1, given nothing"),
        ([np.float32(1)], "result: expected dict, given list"),
        ({"y": "text", "n": 1}, r"result\['y'\]"),
    ],
)
def test_another_result_is_an_error_with_its_path(jit, result, message):
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(jit(lambda x: pure_callback(lambda x: result, {"y": SCALAR, "n": 1}, x)["y"])(1.0))


def test_a_python_number_is_an_array_of_its_type():
    assert pure_callback(lambda: [2.5, "a"], [SCALAR, "a"])[0] == 2.5
    with pytest.raises(Exception, match="int32"):
        pure_callback(lambda: [2, "a"], [SCALAR, "a"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Vector:
    """Checks what it is rebuilt around."""

    x: Any
    n: Any

    def __post_init__(self):
        if self.x.ndim != 1:
            raise ValueError("x has to be a vector")


@JITS
def test_a_class_that_checks_its_arrays_is_not_rebuilt_around_others(jit):
    announced = Vector(jax.ShapeDtypeStruct((2,), jnp.float32), SCALAR)
    result = jit(lambda: pure_callback(lambda: Vector(np.ones(2, np.float32), 1.0), announced))()
    assert (result.x.tolist(), result.n.item()) == ([1, 1], 1)
    with pytest.raises(Exception, match="expected tuple, given list"):
        pure_callback(lambda: [Vector(np.ones(2, np.float32), np.float32(1))], (announced,))


def replace(d):
    d["x"] = d["x"] + 1
    return 1.0


def count(d):
    d["n"] += 1
    return 1.0


@JITS
@pytest.mark.parametrize(
    ("host", "path"), [(replace, r"\['x'\]: another array"), (count, r"\['n'\]: expected 0, given 1")]
)
@pytest.mark.parametrize("call", [pure_callback, io_callback])
def test_a_host_function_that_changes_its_arguments_is_an_error(jit, host, path, call):
    with pytest.raises(Exception, match=rf"changed its arguments[\s\S]*args\[0\]{path}"):
        jax.block_until_ready(jit(lambda x: call(host, SCALAR, {"x": x, "n": 0}))(jnp.ones(())))
        jax.effects_barrier()


def test_the_host_sees_the_arguments_as_they_were_at_the_call():
    @graftax.jit
    def f(state, x):
        out = pure_callback(lambda s: np.float32(s["n"]), SCALAR, state)
        state["n"] += 1
        return out + x

    state = {"n": 1}
    assert [float(f(state, 0.0)) for _ in range(3)] == [1, 2, 3]


LOG: list[object] = []


def note(record):
    LOG.append(record)


@JITS
def test_an_io_callback_reaches_its_own_objects(jit):
    LOG.clear()
    f = jit(lambda x: io_callback(note, None, {"loss": x, "name": "a"}, ordered=True))
    f(jnp.ones(()))
    f(jnp.zeros(()))
    jax.effects_barrier()
    assert [(float(r["loss"]), r["name"]) for r in LOG] == [(1, "a"), (0, "a")]


def _jax_io(host, x):
    jax.experimental.io_callback(host, None, x)


CALLS = {
    "graftax.io_callback": lambda host, x: io_callback(host, None, x),
    "jax.io_callback": _jax_io,
    "jax.debug.callback": lambda host, x: jax.debug.callback(host, x),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_host_function_has_the_callers_own_variables(call):
    log, calls = [], 0

    @graftax.jit
    def f(x):
        def host(v):
            nonlocal calls
            calls += 1
            log.append(float(v))

        call(host, x)
        return x + 1

    first = log
    for n in range(5):
        assert float(f(jnp.float32(n))) == n + 1
    jax.effects_barrier()
    assert log == [0, 1, 2, 3, 4] and calls == 5
    assert f.cache_info().traces == 1  # a list that grows is no new structure: the compiled code does not read it
    log = []  # another object under the name
    f(jnp.float32(7))
    jax.effects_barrier()
    assert log == [7] and len(first) == 5


@pytest.mark.parametrize("call", [pure_callback, jax.pure_callback], ids=["graftax", "jax"])
def test_a_host_function_reads_a_numpy_table_as_it_is_now(call):
    table = np.arange(4, dtype=np.float32)
    f = graftax.jit(lambda i: call(lambda v: table[np.asarray(v)], SCALAR, i))
    assert float(f(jnp.asarray(2))) == 2
    table[2] = 9
    assert float(f(jnp.asarray(2))) == 9
    table = table + 1
    assert float(f(jnp.asarray(2))) == 10
    assert f.cache_info().traces == 1


def test_a_change_of_the_callers_dict_by_the_host_is_there_however_it_is_spelled():
    state = {"last": 0.0}

    def f(x):
        jax.debug.callback(lambda v: operator.setitem(state, "last", float(v)), x)
        return x

    graftax.jit(f)(jnp.float32(3))
    jax.effects_barrier()
    assert state == {"last": 3.0}


def test_what_the_compiled_code_reads_too_stays_its_own():
    table = np.ones(3, np.float32)

    @graftax.jit
    def g(x):
        return x * table[0] + pure_callback(lambda v: np.float32(v), SCALAR, x)

    assert float(g(jnp.float32(1))) == 2
    table[0] = 5
    assert float(g(jnp.float32(1))) == 6


def test_what_the_compiled_function_itself_reads_cannot_be_changed_by_the_host():
    log = []

    @graftax.jit
    def f(x):
        io_callback(lambda x: log.append(x), None, x)
        return x + len(log)

    with pytest.raises(Exception, match=r"changed what it captures[\s\S]*log\[0\]"):
        f(jnp.ones(()))
        jax.effects_barrier()
    with pytest.raises(Exception, match="is bound to"):
        graftax.jit(lambda x: (io_callback(log.append, None, x), len(log)))(jnp.ones(()))
        jax.effects_barrier()
    # Nothing is lost where no copy was made.
    for jit in (jax.jit, graftax.jit):
        jit(lambda x: io_callback(log.append, None, x))(jnp.ones(()))
        jax.effects_barrier()
    assert len(log) == 2


def test_a_host_function_may_read_what_the_compiled_function_captures():
    table = {"scale": 3.0}

    @graftax.jit
    def f(x):
        return pure_callback(lambda x: np.float32(x * table["scale"]), SCALAR, x)

    assert f(jnp.ones(())) == 3


FILES = []


class Writer:
    """Array-free, and holds what cannot be walked."""

    def __init__(self, file):
        self.lines = (line for line in ())
        self.file = file

    def write(self, x):
        self.file.write(f"{float(x)};")


def write_line(x):
    FILES[0].write(x)


def step_with_a_file(x, state):
    state["n"] += 1
    io_callback(write_line, None, x, ordered=True)
    return x


def test_a_host_function_may_hold_what_no_compiled_function_can(tmp_path):
    state = {"n": 0}
    with open(tmp_path / "log", "w") as file:
        FILES[:] = [Writer(file)]
        step = graftax.jit(step_with_a_file)
        for x in range(2):
            step(jnp.asarray(float(x)), state)
        jax.effects_barrier()
    assert state["n"] == 2
    assert (tmp_path / "log").read_text() == "0.0;1.0;"


def test_an_error_of_the_host_function_is_shown():
    def fail(d):
        raise KeyError("missing")

    with pytest.raises(Exception, match="missing"):
        jax.block_until_ready(graftax.jit(lambda x: pure_callback(fail, SCALAR, {"x": x}))(1.0))


# ---- JAX's own callbacks


def warnings_of(run: Callable[[], Any]) -> list[str]:
    """The warnings of a run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
        jax.effects_barrier()
    return [str(w.message) for w in caught if w.category is graftax.LostChangeWarning]


def by_debug(host: Callable[..., Any], x: Any) -> None:
    jax.debug.callback(host, x)


def by_io(host: Callable[..., Any], x: Any) -> None:
    jax.experimental.io_callback(host, None, x)


def by_ordered_io(host: Callable[..., Any], x: Any) -> None:
    jax.experimental.io_callback(host, None, x, ordered=True)


class Recorder:
    def __init__(self) -> None:
        self.w, self.inputs, self.count = jnp.ones(()), [], 0

    def note(self, x: Any) -> None:
        self.keep(x)

    def keep(self, x: Any) -> None:
        self.count += 1

    def show(self, x: Any) -> None:
        print(self.count, self.inputs)


def hosts_that_write() -> dict[str, Callable[[Any], tuple[Callable[..., Any], str]]]:
    """From an object of the compiled function to a host function that changes it, and what messages call it."""

    def assigning(r: Any) -> Any:
        def host(x: Any) -> None:
            r.count = 1

        return host

    def storing(r: Any) -> Any:
        return lambda x: r.inputs.__setitem__(slice(None), [1])

    def deleting(r: Any) -> Any:
        def host(x: Any) -> None:
            del r.inputs[:]

        return host

    def inner(r: Any) -> Any:
        def add() -> None:
            r.inputs.append(1)

        return lambda x: add()

    return {
        "assigning": lambda r: (assigning(r), "closure r"),
        "storing": lambda r: (storing(r), "closure r"),
        "deleting": lambda r: (deleting(r), "closure r"),
        "inner": lambda r: (inner(r), "closure add"),
        "method": lambda r: (r.note, "what note is bound to"),
        "builtin method": lambda r: (r.inputs.append, "what append is bound to"),
        "partial": lambda r: (functools.partial(lambda r, x: r.inputs.append(x), r), "what it is bound to"),
    }


@pytest.mark.parametrize("call", [by_debug, by_io, by_ordered_io])
@pytest.mark.parametrize("kind", list(hosts_that_write()))
def test_a_change_that_a_callback_of_jax_would_lose_earns_a_warning(kind: str, call: Any):
    recorder = Recorder()

    def program(recorder: Any, x: Any) -> Any:
        host, _ = hosts_that_write()[kind](recorder)
        call(host, x)
        return x

    [message] = warnings_of(lambda: graftax.jit(program)(recorder, 1.0))
    for word in ("program: its host function", hosts_that_write()[kind](recorder)[1], "graftax.io_callback"):
        assert word in message, message
    assert (recorder.inputs, recorder.count) == ([], 0)


@pytest.mark.parametrize(
    "around",
    [
        lambda f: f,
        lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
        lambda f: lambda x: graftax.scan(lambda c, _: (f(c), None), x, length=2)[0],
        lambda f: lambda x: jax.lax.cond(x > 0, f, lambda x: x, x),
        lambda f: lambda x: graftax.cond(x > 0, f, lambda x: x, x),
        lambda f: lambda x: graftax.vmap(f)(jnp.stack([x, x])).sum(),
        lambda f: lambda x: jax.jit(f)(x),
        lambda f: lambda x: graftax.checkpoint(f)(x),
        lambda f: lambda x: graftax.value_and_grad(f)(x)[0],
    ],
)
def test_the_warning_comes_from_inside_of_other_transforms(around: Any):
    recorder = Recorder()

    def noting(x: Any) -> Any:
        jax.debug.callback(lambda x: recorder.inputs.append(1), x)
        return x * recorder.w

    [message] = set(warnings_of(lambda: graftax.jit(around(noting))(jnp.ones(()))))
    jax.effects_barrier()
    assert recorder.inputs == ([] if "is a copy made for the trace" in message else [1])


def test_a_host_function_that_reads_or_has_its_own_objects_earns_no_warning(capsys: pytest.CaptureFixture[str]):
    recorder, log = Recorder(), []

    def append(x: Any) -> None:
        log.append(float(x))

    @graftax.jit
    def program(x: Any) -> Any:
        jax.debug.callback(lambda x: print(recorder.count, [y + 1 for y in recorder.inputs]), x)
        jax.debug.callback(recorder.show, x)
        jax.debug.callback(append, x)
        jax.debug.print("{}", x)
        return x * recorder.w

    assert not warnings_of(lambda: program(jnp.ones(())))
    assert log == [1.0]
    assert capsys.readouterr().out.count("0 []") == 2


def test_a_host_function_alone_may_hold_what_is_refused_elsewhere():
    values = queue.SimpleQueue()

    @graftax.jit
    def program(x):
        jax.debug.callback(lambda v: values.put(float(v)), x)
        return x + 1

    for n in range(3):
        program(jnp.float32(n))
    jax.effects_barrier()
    assert sorted(values.get(timeout=10) for _ in range(3)) == [0, 1, 2]

    @graftax.jit
    def reads(x):
        def size():
            return values.qsize()

        return x + size()

    for _ in range(2):
        with pytest.raises(graftax.UnsupportedValueError, match="values"):
            reads(jnp.float32(1))


SHARED = [2.0]


def scaled(x):
    return x * SHARED[0]


@pytest.mark.parametrize("met", ["at once", "later"])
def test_what_a_helper_reads_too_is_an_input_beside_a_host_function_that_reads_it(met):
    SHARED[:] = [2.0]

    @graftax.jit
    def f(x, helped):
        jax.debug.callback(lambda v: SHARED[0], x)
        return scaled(x) if helped else x

    if met == "later":
        assert f(jnp.float32(1), False) == 1
    for rate in (2.0, 5.0, 2.0):
        SHARED[0] = rate
        assert f(jnp.float32(1), True) == rate


def test_a_host_function_that_is_also_run_in_a_trace_reads_an_input():
    rate = [2.0]

    @graftax.jit
    def f(x, here):
        def host(v):
            return np.float32(v * rate[0]) if isinstance(v, np.ndarray) else v * rate[0]

        return host(x) if here else pure_callback(lambda v: np.float32(v), SCALAR, x) + 0 * len(str(host))

    for number in (2.0, 5.0):
        rate[0] = number
        assert f(jnp.float32(1), True) == number
