# SPDX-License-Identifier: Apache-2.0
"""Calls that a compiled function cannot repeat are named, once for each place, by the trace that sees them."""

import asyncio
import atexit
import builtins
import datetime
import decimal
import io
import logging
import os
import pathlib
import random
import secrets
import sys
import threading
import time
import types
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime as moment
from multiprocessing.pool import ThreadPool
from time import perf_counter as clock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from zoo import f32

log = logging.getLogger("graftax.test_impure")
log.setLevel(logging.CRITICAL + 1)
x = f32(1)
stoppable = types.SimpleNamespace(stop=threading.Event())


def told(run, *args):
    """The ImpureCallWarnings of a call, as (file, line, text)."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run(*args)
    return [(w.filename, w.lineno, str(w.message)) for w in found if issubclass(w.category, graftax.ImpureCallWarning)]


def console(x):
    sys.stdout.write("")


def thread(x):
    threading.Thread(target=len, args=((),)).start()


def pool(x):
    with ThreadPoolExecutor(1) as workers:
        list(workers.map(abs, [1]))


def other_pool(x):
    with ThreadPool(1) as workers:
        workers.map(abs, [1])


def in_a_loop(x):
    loop = asyncio.new_event_loop()
    loop.run_until_complete(loop.run_in_executor(None, abs, 1))
    loop.close()


def to_a_thread(x):
    asyncio.run(asyncio.to_thread(abs, 1))


def quiet_print(x):
    print("x", file=io.StringIO())


def environment(x):
    os.environ["GRAFTAX_X"] = "1"


def opened(x):
    open(os.devnull).close()


def warned(x):
    warnings.warn("careful", UserWarning, stacklevel=1)


def own_method(self):
    self.log.info("x")


KINDS = [
    (lambda x: time.time(), "calls time.time()", "pass it as an argument"),
    (lambda x: time.perf_counter_ns(), "calls time.perf_counter_ns()", "io_callback"),
    (lambda x: clock(), "calls time.perf_counter()", "block_until_ready"),
    (lambda x: time.localtime(), "calls time.localtime()", "as an argument"),
    (lambda x: random.random(), "calls random.random()", "jax.random key"),
    (lambda x: random.uniform(0, 1), "calls random.uniform()", "jax.random key"),
    (lambda x: np.random.normal(size=2), "calls numpy.random.normal()", "jax.random key"),
    (lambda x: np.random.seed(3), "calls numpy.random.seed()", "jax.random key"),
    (lambda x: np.random.default_rng().normal(), "calls numpy.random.default_rng()", "jax.random key"),
    (lambda x: datetime.datetime.now().year, "calls datetime.now()", "as an argument"),
    (lambda x: moment.today().year, "calls datetime.today()", "as an argument"),
    (lambda x: uuid.uuid4().hex, "calls uuid.uuid4()", "as an argument"),
    (lambda x: secrets.token_hex(), "calls secrets.token_hex()", "as an argument"),
    (lambda x: os.environ.get("HOME"), "uses os.environ", "as an argument"),
    (lambda x: os.getcwd(), "calls os.getcwd()", "as an argument"),
    (lambda x: sys.getrecursionlimit(), "calls sys.getrecursionlimit()", "as an argument"),
    (lambda x: os.environ["PATH"], "uses os.environ", "as an argument"),
    (lambda x: "PATH" in os.environ, "uses os.environ", "as an argument"),
    (lambda x: os.getenv("HOME"), "uses os.environ", "as an argument"),
    (environment, "uses os.environ", "as an argument"),
    (quiet_print, "calls print()", "jax.debug.print"),
    (opened, "calls open()", "as an argument"),
    (lambda x: input(), "calls input()", "as an argument"),
    (warned, "calls warnings.warn()", "jax.debug.callback"),
    (lambda x: logging.debug("x"), "calls logging.debug()", "io_callback"),
    (lambda x: log.info("x"), "calls Logger.info()", "io_callback"),
    (lambda x: log.setLevel(logging.CRITICAL + 1), "calls Logger.setLevel()", "io_callback"),
    (lambda x: pathlib.Path(os.devnull).read_text(), "calls Path.read_text()", "as an argument"),
    (lambda x: os.path.exists(os.devnull), "calls os.path.exists()", "as an argument"),
    (lambda x: os.listdir("/"), "calls os.listdir()", "as an argument"),
    (lambda x: os.umask(os.umask(0o22)), "calls os.umask()", "outside of the function"),
    (lambda x: sys.setswitchinterval(0.005), "calls sys.setswitchinterval()", "outside of the function"),
    (lambda x: np.set_printoptions(), "calls numpy.set_printoptions()", "outside of the function"),
    (lambda x: atexit.unregister(thread), "calls atexit.unregister()", "outside of the function"),
    (lambda x: len(sys.argv), "uses sys.argv", "as an argument"),
    (lambda x: "json" in sys.modules, "uses sys.modules", "by its name"),
    (lambda x: len(globals()), "calls globals()", "in a dict"),
    (lambda x: len(vars(types)), "calls vars()", "in a dict"),
    (lambda x: decimal.getcontext().prec, "calls decimal.getcontext()", "as an argument"),
    (console, "calls sys.stdout.write()", "jax.debug.print"),
    (thread, "calls Thread.start()", "call the function directly"),
    (pool, "calls ThreadPoolExecutor.map()", "call the function directly"),
    (other_pool, "calls Pool.map()", "call the function directly"),
    (in_a_loop, "calls BaseEventLoop.run_in_executor()", "call the function directly"),
    (to_a_thread, "calls asyncio.to_thread()", "call the function directly"),
    (lambda x: threading.current_thread().name, "calls threading.current_thread()", "as an argument"),
    (lambda x: threading.get_ident(), "calls threading.get_ident()", "as an argument"),
    (lambda x: stoppable.stop.is_set(), "calls Event.is_set()", "as an argument"),
]
if sys.version_info < (3, 12):  # where methods of C code and stand-ins are not heard of
    KINDS = [kind for kind in KINDS if kind[0] is not console and "vars()" not in kind[1]]


@pytest.mark.quick(10)
@pytest.mark.quick(30)  # a case takes milliseconds
@pytest.mark.parametrize(("f", "call", "way"), KINDS, ids=[call.split()[1] for _, call, _ in KINDS])
def test_each_kind_is_named_with_its_place_and_a_way_out(f, call, way, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n"))
    monkeypatch.setenv("GRAFTAX_X", "0")
    run = graftax.jit(types.FunctionType(f.__code__, f.__globals__))
    [(filename, line, text)] = told(run, x)
    assert filename == __file__ and f.__code__.co_firstlineno <= line <= f.__code__.co_firstlineno + 2
    assert call in text and way in text and f"{__file__}:{line}" in text and "warn_impure=False" in text
    assert told(run, x) == []


QUIET = [
    lambda x, rng: np.random.default_rng(3).normal(),
    lambda x, rng: random.Random(3).random(),
    lambda x, rng: (datetime.datetime(2020, 1, 1).year, datetime.timedelta(1).days),
    lambda x, rng: time.gmtime(0).tm_year,
    lambda x, rng: (sys.version_info, vars(types.SimpleNamespace(a=1)), "a".replace("a", "b")),
    lambda x, rng: jax.debug.print("{}", x),
    lambda x, rng: jax.random.normal(rng) + jnp.log(x),
    lambda x, rng: jax.debug.callback(lambda v: quiet_print(v), x),
    lambda x, rng: graftax.io_callback(lambda v: quiet_print(v), None, x),
    lambda x, rng: x if x is rng else time.time() if rng is None else x,  # never called
    lambda x, rng: [time.time, print, np.random.normal] and x,  # nor here
]


@pytest.mark.parametrize("f", QUIET, ids=range(len(QUIET)))
def test_nothing_is_told_of_what_can_be_replayed(f):
    assert told(graftax.jit(lambda x, rng: (f(x, rng), None)[1]), x, jax.random.key(0)) == []
    jax.effects_barrier()


def test_one_warning_for_a_place_and_a_function_and_another_place_when_it_is_met():
    def f(x, n):
        if n == 1:
            return time.time() + time.time()
        return time.time(), time.monotonic()

    run = graftax.jit(f)
    first = f.__code__.co_firstlineno
    assert [line for _, line, _ in told(run, x, 1)] == [first + 2]
    assert told(run, x, 1) == []
    assert [line for _, line, _ in told(run, x, 2)] == [first + 3, first + 3]
    assert told(run, jnp.ones((3, 3)), 2) == []


def test_what_is_met_after_all_else_was_told_is_told_too():
    def late(x):
        quiet_print(x)
        return random.random()

    def f(x):
        now = time.time()
        return now, late(x), graftax.jit(helper, mutation="discard")(x), late(x), os.getenv("HOME")

    assert len(told(graftax.jit(f), x)) == 5


def test_with_the_standard_filter_a_place_is_told_of_once_in_the_process():
    def make():
        return graftax.jit(lambda x: time.time())

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        make()(x), make()(x)
    assert len(found) == 1


def test_as_an_error_it_is_raised_in_each_call_and_as_ignored_not_told():
    run = graftax.jit(lambda x: time.time())
    for _ in range(2):
        with warnings.catch_warnings(), pytest.raises(graftax.ImpureCallWarning, match=r"time\.time"):
            warnings.simplefilter("error", graftax.ImpureCallWarning)
            run(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graftax.ImpureCallWarning)
        run(x)


@pytest.mark.parametrize("options", [{"warn_impure": False}, {"check": True, "mutation": "discard"}], ids=str)
def test_it_can_be_turned_off(options):
    assert told(graftax.jit(quiet_print, **options), x) == []


def test_a_transform_outside_of_jit_does_not_tell():
    def body(n, x):
        quiet_print(x)
        return x

    assert told(lambda: graftax.fori_loop(0, 2, body, x)) == []
    assert told(lambda: graftax.grad(lambda x: (quiet_print(x), x.sum())[1])(x)) == []
    assert told(lambda: graftax.eval_shape(quiet_print, x)) == []
    assert len(told(graftax.jit(lambda x: graftax.fori_loop(0, 2, body, x)), x)) == 1


class Model:
    def __init__(self):
        self.w, self.log = f32(1), None

    def stamped(self):
        return time.time()

    def logged(self):
        logger = self.named_logger
        logger.info("x")

    @property
    def noisy(self):
        return self.w * random.random()

    named_logger = log


def helper(x):
    def inner():
        return [random.random() for _ in range(2)]

    return inner()


def test_methods_helpers_nested_functions_and_local_imports_are_looked_at():
    def imports(x):
        import time as t
        from math import floor
        from random import random as draw

        floor(1.5)

        return t.time(), draw()

    model = Model()
    assert "time.time" in told(graftax.jit(Model.stamped), model)[0][2]
    assert "random.random" in told(graftax.jit(lambda m: m.noisy), model)[0][2]
    assert "Logger.info" in told(graftax.jit(Model.logged), model)[0][2]
    assert ["random.random" in text for *_, text in told(graftax.jit(helper), x)] == [True]
    assert len(told(graftax.jit(imports), x)) == 2
    stamp = time.time
    assert len(told(graftax.jit(lambda x: stamp()), x)) == 1
    assert len(told(graftax.jit(lambda x: graftax.jit(helper)(x)), x)) == 1


def test_a_variable_of_the_trace_itself_is_followed():
    def f(x):
        import time

        def inner():
            return time.time()

        return inner()

    assert len(told(graftax.jit(f), x)) == 1


def test_a_helper_of_a_module_of_the_users_is_named_and_one_of_a_library_is_not(tmp_path, monkeypatch):
    module = types.ModuleType("users")
    path = str(tmp_path / "users.py")
    exec(compile("import time\ndef now():\n    return time.time()\n", path, "exec"), module.__dict__)
    module.__file__ = path
    [(filename, line, _)] = told(graftax.jit(lambda x: module.now()), x)
    assert (filename, line) == (path, 3)
    assert told(graftax.jit(lambda x: uuid.uuid3(uuid.NAMESPACE_DNS, "a").hex), x) == []


def test_names_of_the_users_own_are_not_confused_with_those_of_python():
    scope = {"print": len, "__name__": "mine", "__builtins__": builtins}
    exec("def f(x):\n    return print([x])\n", scope)
    assert told(graftax.jit(scope["f"]), x) == []

    class random:
        @staticmethod
        def random():
            return 4

    assert told(graftax.jit(lambda x: random.random()), x) == []


def test_threads_are_told_of_their_own_traces_only():
    inside, go = threading.Event(), threading.Event()
    results = []

    def f(x):
        inside.set()
        go.wait(60)
        return shared(x)

    def shared(x):
        return time.time()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        thread = threading.Thread(target=lambda: results.append(graftax.jit(f)(x)))
        thread.start()
        assert inside.wait(60)
        shared(x), quiet_print(x)
        assert not [w for w in seen if "Event" not in str(w.message)]
        go.set()
        thread.join()
    assert len(results) == 1 and [w for w in seen if "Event" not in str(w.message)] == seen[-1:]


def test_what_was_used_is_given_back():
    tracer = sys.gettrace()

    def f(x):
        quiet_print(x)
        raise KeyError

    with pytest.raises(KeyError):
        told(graftax.jit(f), x)
    assert sys.gettrace() is tracer
    if sys.version_info >= (3, 12):
        assert all(sys.monitoring.get_tool(i) != "graftax" for i in range(6))


def test_where_others_look_at_the_calls_nothing_is_told_and_they_are_left_alone():
    run = graftax.jit(lambda x: time.time())
    if sys.version_info >= (3, 12):
        free = [i for i in (3, 4) if sys.monitoring.get_tool(i) is None]
        for i in free:
            sys.monitoring.use_tool_id(i, "somebody")
        try:
            assert told(run, x) == []
        finally:
            for i in free:
                sys.monitoring.free_tool_id(i)
    else:
        before, tracer = sys.gettrace(), lambda *args: None
        sys.settrace(tracer)
        try:
            assert told(run, x) == []
            assert sys.gettrace() is tracer
        finally:
            sys.settrace(before)


def test_a_function_by_value_names_them_too():
    def helper(x):
        return x * time.time()

    with pytest.warns(graftax.ImpureCallWarning, match=r"calls time\.time"):
        graftax.filter_jit(lambda x: helper(x))(jnp.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graftax.filter_jit(lambda x: helper(x), warn_impure=False)(jnp.ones(2))


def test_the_code_itself_does_not_see_the_warning():
    def records(x):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            time.time()
        return x * len(seen)

    def catches(x):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                time.perf_counter()
            except Warning:
                return x - 1
        return x

    for f in records, catches:
        with pytest.warns(graftax.ImpureCallWarning, match=f"{f.__name__} calls"):
            assert graftax.jit(f)(jnp.ones(())) == f(jnp.ones(()))


def test_a_warning_that_is_an_error_is_one_at_each_call_and_hides_no_other():
    def f(x, fails):
        time.time()
        return x / [] if fails else x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(graftax.ImpureCallWarning):
                graftax.jit(f)(jnp.ones(()), False)
            with pytest.raises(TypeError, match="list"):
                graftax.jit(f)(jnp.ones(()), True)
