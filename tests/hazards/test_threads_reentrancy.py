# SPDX-License-Identifier: Apache-2.0
"""Exceptions thousands of times over, user code that calls back, threads, interrupts, forks, interpreters."""

import contextlib
import gc
import itertools
import os
import signal
import sys
import threading
import time
import warnings
import weakref

import jax
import jax.numpy as jnp
import pytest

import graftax
import oracle
from sizes import sized
from watchdog import isolated, python
from zoo import Box, f32, scalar

pytestmark = pytest.mark.quick(1)  # most start a process or threads, and do so often


def together(count, work):
    """Runs ``work(0) ... work(count - 1)`` in threads that start at once; raises what any of them raised."""
    barrier, errors = threading.Barrier(count), []

    def run(number):
        try:
            barrier.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


class Hook:
    """Registered with JAX; its flatten and unflatten run what the test says."""

    opening = closing = staticmethod(lambda: None)

    def __init__(self, w):
        self.w = w


def open_hook(hook):
    Hook.opening()
    return (hook.w,), None


def close_hook(aux, children):
    Hook.closing()
    new = object.__new__(Hook)
    (new.w,) = children
    return new


jax.tree_util.register_pytree_node(Hook, open_hook, close_hook)


@contextlib.contextmanager
def hooked(**hooks):
    for name, hook in hooks.items():
        setattr(Hook, name, staticmethod(hook))
    try:
        yield
    finally:
        Hook.opening = Hook.closing = staticmethod(lambda: None)


def nested(x, depth=20):
    for _ in range(depth):
        x = {"x": [x]}
    return x


def usable_depth():
    """How deep a plain recursion gets."""

    def down(n):
        return n if n == 0 else down(n - 1)

    limit = sys.getrecursionlimit()
    down(limit // 2)
    return limit


# ── exceptions, ten thousand times ──


@pytest.mark.quick(0)
@pytest.mark.parametrize("where", ["opening", "closing", "function", "refused", "deep_write"])
@isolated(seconds=400)
def test_ten_thousand_failing_calls_change_nothing(where):
    class Mine(Exception):
        pass

    error = Mine("mine")

    def fail():
        raise error

    calls = itertools.count()

    @graftax.jit
    def f(x, tail):
        if where == "refused":
            next(tail[0])
        next_free = x
        while isinstance(next_free, dict):
            next_free = next_free["x"][0]
        next_free.w = next_free.w + 1
        tail.append(next_free.w)
        if where == "function":
            fail()
        if where == "deep_write":
            tail.append(iter([]))

    graph, tail = nested(Hook(f32(1))), []
    if where == "refused":
        tail.append(iter([1]))
    expected = Mine if where in ("opening", "closing", "function") else graftax.UnsupportedValueError
    before, blocks = usable_depth(), []
    with hooked(**({where: fail} if where in ("opening", "closing") else {})):
        turns = (
            sized(10_000, 1_000) if where in ("opening", "refused") else sized(1_000, 100)
        )  # these reach JAX's tracing
        for turn in range(turns):
            try:
                f(graph, tail)
            except expected as caught:
                assert caught is error or expected is not Mine
                caught.__traceback__ = None
                if hasattr(caught, "__notes__"):
                    del caught.__notes__
            else:
                raise AssertionError("nothing was raised")
            next(calls)
            if turn in (turns // 2, turns - 1):
                gc.collect()
                blocks.append(len(gc.get_objects()))
    assert next(calls) == turns and usable_depth() == before
    assert abs(blocks[1] - blocks[0]) < 200, blocks
    assert len(tail) == (where == "refused")
    tail.clear()
    tree = jax.jit(lambda tree: tree)(nested(f32(1), depth=50))
    assert oracle.same_graph(tree, nested(f32(1), depth=50))
    if where in ("opening", "closing"):
        f(graph, tail)
        assert tail[0].tolist() == [2.0]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError, GeneratorExit])
@pytest.mark.parametrize("where", ["opening", "closing"])
def test_any_exception_of_a_flatten_or_unflatten_propagates_and_the_next_call_is_fine(kind, where):
    f = graftax.jit(lambda x: x["h"].w + 1)
    error = kind("mine")

    def fail():
        raise error

    for warm in (False, True):
        if warm:
            assert f({"h": Hook(f32(1))}).tolist() == [2.0]
            if where == "closing":
                f.clear_cache()
        with hooked(**{where: fail}), pytest.raises(kind) as caught:
            f({"h": Hook(f32(1))})
        assert caught.value is error
        assert f({"h": Hook(f32(1))}).tolist() == [2.0]


@pytest.mark.quick(0)
@isolated()
def test_a_long_walk_can_be_interrupted():
    graph = [[i] for i in range(sized(2_000_000, 500_000))]

    def stop(number, frame):
        raise KeyboardInterrupt

    # In the time of this process, whatever else the machine does. What a handler raises in a callback of the collector
    # is lost. A handler that runs when the walk has ended raises as well: then all of its time has passed.
    signal.signal(signal.SIGVTALRM, stop)
    gc.disable()
    f = graftax.jit(len)
    begin = time.process_time()
    graftax.flatten(graph)
    whole = time.process_time() - begin
    for call in (graftax.flatten, f):
        begin = time.process_time()
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_VIRTUAL, whole / 50)
            call(graph)
        assert time.process_time() - begin < whole / 2
    gc.enable()
    assert f([1]) == 1


# ── user code that calls back ──


@pytest.mark.parametrize("where", ["opening", "closing"])
@isolated()
def test_a_flatten_or_unflatten_that_calls_the_jitted_function(where):
    f = graftax.jit(lambda x, w: (x, w + 1))
    depth = [0]

    def again():
        if depth[0] < 2:
            depth[0] += 1
            f({"h": Hook(f32(1)), "depth": depth[0]}, f32(1))
            f([1, 2], f32(1))
            depth[0] -= 1

    with hooked(**{where: again}):
        for _ in range(4):
            x = {"h": Hook(f32(1)), "n": 1}
            out = f(x, f32(1))
            assert out[0] is x and out[1].tolist() == [2.0]


@pytest.mark.parametrize("how", ["del", "callback", "collector"])
@isolated()
def test_finalisers_that_run_during_a_call_may_call_the_jitted_function(how):
    f = graftax.jit(lambda g: g.update(w=g["w"] + 1, old=None) or g["w"])
    calls = []

    def call_again(*_):
        if len(calls) < 50:
            calls.append(f({"w": f32(len(calls))}).shape)

    class Final:
        def __init__(self):
            self.name = "final"

        def use(self):
            return self.name

    class FinalDel(Final):
        def __del__(self):
            call_again()

    references = []
    if how == "collector":
        gc.set_threshold(1)
        gc.callbacks.append(lambda phase, info: call_again() if phase == "stop" else None)
    for turn in range(20):
        old = FinalDel() if how == "del" else Final()
        if how == "callback":
            references.append(weakref.ref(old, call_again))
        g = {"w": f32(turn), "old": old}
        del old
        assert f(g).tolist() == [turn + 1.0]
        assert g["old"] is None
    gc.callbacks.clear()
    assert calls and set(calls) == {(1,)}


@pytest.mark.quick(0)
@isolated()
def test_everything_the_collector_shows_during_a_walk_is_whole():
    """A list, tuple or dict that is still being filled must not be seen from outside: reading it would crash."""
    seen = [0]

    def read_all():
        for x in gc.get_objects():
            if type(x) in (list, tuple):
                for item in x:
                    type(item)
            elif type(x) is dict:
                for item in list(x.values()):
                    type(item)
            seen[0] += 1

    class Key:
        def __hash__(self):
            if armed[0]:
                read_all()
            return 7

        def __eq__(self, other):
            return self is other

    armed = [False]
    graph = {"a": [Hook(f32(1)), (Hook(f32(2)), [1, 2])], Key(): [f32(3)], "set": {Key()}}
    f = graftax.jit(lambda g: [g["a"][0].w + 1, (Hook(g["a"][1][0].w), {"x": Hook(f32(1))})])
    with hooked(opening=read_all, closing=read_all):
        armed[0] = True
        for _ in range(2):
            f(graph)
        leaves, graphdef = graftax.flatten(graph)
        graftax.unflatten(graphdef, leaves)
        graftax.to_dict({"a": graph["a"]})
        armed[0] = False
    assert seen[0] > 1000


@isolated()
def test_keys_that_change_their_dict_when_they_are_compared():
    class Key:
        armed, holder = False, None

        def __init__(self, name):
            self.name = name

        def meddle(self):
            if Key.armed and Key.holder is not None:
                Key.armed = False
                Key.holder.popitem()
                Key.holder[f"new{len(Key.holder)}"] = f32(9)

        def __hash__(self):
            self.meddle()
            return 7

        def __eq__(self, other):
            self.meddle()
            return type(other) is Key and self.name == other.name

        __lt__ = __eq__

    def build():
        return {Key("a"): f32(1), Key("b"): [f32(2)], "c": f32(3), "d": f32(4)}

    f = graftax.jit(lambda g: len(g))
    for turn in range(10):
        holder = build()
        if turn % 2:
            f(holder)
        Key.holder, Key.armed = holder, True
        try:
            assert f(holder) == 4
        except RuntimeError as error:
            assert "chang" in str(error)
        Key.armed = False
    assert f(build()) == 4


# ── recursion ──


def test_a_jitted_function_may_call_itself():
    def plain(x, n, log):
        log.append(n)
        return x if n == 0 else plain(x * 2, n - 1, log) + 1

    @graftax.jit
    def f(x, n, log):
        log.append(n)
        return x if n == 0 else f(x * 2, n - 1, log) + 1

    for _ in range(2):
        log, expected = [], []
        assert f(scalar(1.0), 5, log).tolist() == plain(scalar(1.0), 5, expected).tolist() == 37.0
        assert log == expected


@isolated()
@pytest.mark.quick(0)
def test_an_endless_recursion_is_a_recursion_error_and_then_all_is_well():
    @graftax.jit
    def f(x, log):
        log.append(1)
        return f(x + 1, log)

    before = usable_depth()
    for _ in range(3):
        log = []
        with pytest.raises(RecursionError):
            f(f32(1), log)
        assert log == [] and usable_depth() == before
    assert graftax.jit(lambda x: x + 1)(f32(1)).tolist() == [2.0]


# ── threads ──


def mixed(g, n):
    g["log"].append(n)
    g["box"].w = g["box"].w * n + (g["list"][0] if g["list"] else 0)
    return {"n": n, "w": g["box"].w, "box": g["box"], "length": len(g["list"])}


def mixture(i):
    return {"log": [], "box": Box(w=f32(*range(1 + i % 2)), k=i % 3), "list": [f32(1)] * (i % 2)}


@pytest.mark.parametrize("kind", ["by value", "static", "symbolic"])
@isolated()
@pytest.mark.quick(0)
def test_eight_threads_mixed_structures_and_first_calls_at_once(kind):
    by_value = kind == "by value"
    for _ in range(sized(5, 2)):
        function = lambda g, n: mixed(g, n)
        f = graftax.filter_jit(function) if by_value else graftax.jit(function, numbers=kind)

        def work(number):
            for turn in range(24):
                i = number + turn
                g, expected = mixture(i), mixture(i)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # by value, the change of the log is lost
                    out, want = f(g, i % 4), mixed(expected, i % 4)
                assert oracle.difference(want["w"], out["w"]) is None
                assert (out["n"], out["length"]) == (want["n"], want["length"])
                assert oracle.difference(mixture(i) if by_value else expected, g) is None
                assert by_value or out["box"] is g["box"]

        together(8, work)
        if kind == "static":  # otherwise it depends on which thread comes first
            assert f.cache_info().currsize == len({(i % 4, i % 3, i % 2) for i in range(31)})


@isolated()
def test_threads_that_meet_one_key_at_once_trace_it_once():
    for _ in range(sized(20, 6)):
        count = itertools.count()

        class Counting:
            def use(self):
                next(count)

        counting = Counting()

        def step(x, key):
            time.sleep(0)
            return x + 1

        step.note = "with an attribute it shares nothing with that of the round before"
        f = graftax.jit(step, warn_impure=False)
        together(8, lambda number: f(f32(number), "same"))
        counting.use()
        assert f.cache_info()[1:5] == (f.cache_info().misses, 512, 1, f.cache_info().traces)
        assert f.cache_info().traces == 1


CHANGES = {
    "list": (lambda: [f32(1), *[[i] for i in range(300)]], lambda x: (x.append([0]), x.pop(1))),
    "shrink": (
        lambda: [f32(1), *[[i] for i in range(300)]],
        lambda x: (x.extend([[1]] * 300), x.__delitem__(slice(1, 301))),
    ),
    "dict": (lambda: {"w": f32(1), **{f"k{i}": [i] for i in range(300)}}, lambda x: (x.update(new=[1]), x.pop("new"))),
    "set": (lambda: [f32(1), set(range(300))], lambda x: (x[1].add(-1), x[1].discard(-1))),
    "bytes": (
        lambda: [f32(1), bytearray(b"a" * 300)],
        lambda x: (x[1].extend(b"b" * 300), x[1].__delitem__(slice(300))),
    ),
    "object": (
        lambda: [f32(1), Box(**{f"a{i}": [i] for i in range(300)})],
        lambda x: (setattr(x[1], "new", []), delattr(x[1], "new")),
    ),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("hook", [False, True], ids=["plain", "user_code"])
@isolated()
def test_a_container_that_another_thread_changes_is_seen_whole_or_refused(kind, hook):
    make, change = CHANGES[kind]
    shared, stop, refused = make(), threading.Event(), []

    def meddle():
        while not stop.is_set():
            change(shared)

    f = graftax.jit(lambda x, hooks: len(x), mutation="discard", cache_size=4)
    thread = threading.Thread(target=meddle)
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        with warnings.catch_warnings(), hooked(opening=lambda: time.sleep(0)):
            warnings.simplefilter("ignore")
            hooks = [Hook(f32(1)) for _ in range(20)] if hook else []
            for _ in range(40):
                try:
                    assert f([shared, hooks, shared], [hooks, shared]) == 3
                    graftax.flatten([hooks, shared])
                except RuntimeError as error:
                    assert "chang" in str(error), error
                    refused.append(error)
    finally:
        stop.set()
        thread.join()
    assert f(make(), []) >= 2


@isolated()
@pytest.mark.quick(0)
def test_two_threads_that_change_one_object_write_whole_results():
    """Updates may be lost, as in plain Python, and any number of them: a call that read 0 and had to wait writes 1 over
    all that the other thread did. What is there is always what one call wrote."""

    @graftax.jit
    def bump(box):
        box.a, box.b, box.log["c"] = box.a + 1, box.b + 1, box.a + 1

    box, stop, seen = Box(a=jnp.int32(0), b=jnp.int32(0), log={"c": jnp.int32(0)}), threading.Event(), []

    def watch():
        while not stop.is_set():
            seen.append(tuple(vars(box).values())[:2])  # one step for the interpreter lock

    sys.setswitchinterval(1e-5)
    watcher = threading.Thread(target=watch)
    watcher.start()
    together(2, lambda number: [bump(box) for _ in range(200)])
    stop.set()
    watcher.join()
    assert 2 <= int(box.a) == int(box.b) == int(box.log["c"]) <= 400
    assert all(int(a) == int(b) for a, b in seen[:: max(1, len(seen) // 500)])
    before = int(box.a)
    bump(box)
    assert (int(box.a), int(box.b), int(box.log["c"])) == (before + 1,) * 3


# ── processes and interpreters ──


@isolated()
def test_a_forked_child_can_walk_and_compare():
    f = graftax.jit(lambda g, x: g["w"] + x)
    f({"w": f32(1)}, f32(1))
    graphdef = graftax.flatten({"w": [f32(1)], "n": 1})[1]
    child = os.fork()
    if child == 0:
        try:
            again = graftax.flatten({"w": [1.0], "n": 1})[1]
            same = graftax.flatten({"w": [graftax.unflatten(graphdef, [0])["w"]], "n": 1})[1]
            os._exit(0 if again != graphdef and same != graphdef and f.cache_info().traces == 1 else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert f({"w": f32(1)}, f32(1)).tolist() == [2.0]


# Before 3.12 a subinterpreter that has printed into a pipe and is left to the end of the process writes it out then.
# The main thread releases the lock for that, does not get it back, and ends alone; with JAX's threads the process
# stays.
INTERPRETER = """
import sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
import graftax._core as core
child = interpreters.create()
code = f'''
import importlib.util, sys
spec = importlib.util.spec_from_file_location("graftax._core", {core.__file__!r})
try:
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
except ImportError as error:
    print("refused:", error)
else:
    print("imported:", module.kind_info(list)[0])
'''
run = getattr(interpreters, "exec", None) or interpreters.run_string
failed = run(child, code)
print("failed" if failed else "ran", flush=True)
interpreters.destroy(child)
import graftax, jax.numpy as jnp
assert graftax.jit(lambda x: x + 1)(jnp.ones(2)).tolist() == [2.0, 2.0]
print("main works")
"""


WHOLE_PACKAGE = """
import sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
import graftax, jax.numpy as jnp
child = interpreters.create()
code = f"import sys; sys.path = {sys.path!r}" + '''
try:
    import graftax
except ImportError as error:
    print("refused:", error, flush=True)
'''
run = getattr(interpreters, "exec", None) or interpreters.run_string
run(child, code)
interpreters.destroy(child)
assert graftax.jit(lambda x: x + 1)(jnp.ones(2)).tolist() == [2.0, 2.0]
print("main works")
"""


@pytest.mark.quick(0)
def test_a_subinterpreter_is_refused_before_jax_is_imported_there():
    out = python(WHOLE_PACKAGE)
    assert "refused: graftax works only in the main interpreter of a process" in out and out.endswith("main works\n")


@pytest.mark.quick(0)
def test_a_subinterpreter_can_use_the_core_or_is_refused():
    out = python(INTERPRETER)
    assert "ran" in out and out.endswith("main works\n"), out
    assert "refused: " in out or "imported: list" in out
