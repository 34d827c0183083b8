# SPDX-License-Identifier: Apache-2.0
"""What installed packages keep in their modules and classes: modes, configurations, registries and counts."""

import gc
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import graftax

SOURCE = """
COUNT = 0
MODE = "train"
STATE = {"mode": "train", "n": 0}

class Config:
    def __init__(self, **values): self.__dict__["values"] = dict(values)
    def __getattr__(self, name):
        if name in self.__dict__["values"]: return self.__dict__["values"][name]
        raise AttributeError(name)
    def __setattr__(self, name, value): self.values[name] = value

class Settings:
    def __init__(self): self.rate, self.on = 2.0, False

class Base:
    rate = 1.0
    table = {"k": 1.0}
    def go(self, x): return x * self.rate * self.table["k"]
    def scale(self): return 1.0

class Registry:
    def __init__(self): self.functions = {}
    def get(self, name): return self.functions[name]

class Inner:
    flag = False
    def __init__(self): self.scales, self.names = [2.0], {"a"}

class Outer:
    def __init__(self): self.inner, self.sub = Inner(), {"deep": {"rate": 1.0}}

CONFIG, SETTINGS, REGISTRY, MEMO, OUTER = Config(rate=2.0), Settings(), Registry(), {}, Outer()
HOOKS, LAST, OPTIONS = [], None, {}

def inner_scale():
    inner = OUTER.inner
    return inner.scales[0] * (3 if inner.flag else 1) * len(inner.names) * OUTER.sub["deep"]["rate"]
def hooked(x):
    for hook in HOOKS: x = hook(x)
    return x * OPTIONS.get("factor", 1.0)
def keep(x):
    global LAST
    LAST = x
    HOOKS.append(x)
def memoized(function):
    memo = {}
    def cached(*args):
        cached.calls += 1
        if args not in memo: memo[args] = function(*args)
        return memo[args]
    cached.calls, cached.memo = 0, memo
    return cached

def set_mode(mode):
    global MODE
    MODE = mode
def mode(): return MODE
def set_state(mode): STATE["mode"] = mode
def state(): return STATE["mode"]
def count():
    global COUNT
    COUNT += 1
    return COUNT
_next = 0
def next_id():
    global _next
    _next += 1
    return _next
COLLECTIONS = 0
def on_collection(phase, info):
    global COLLECTIONS
    COLLECTIONS += 1
def count_in_state():
    STATE["n"] += 1
    return STATE["n"]
class Order:
    def __init__(self): self.places = {}
    def build(self, objects): self.places = {id(obj): i for i, obj in enumerate(objects)}
    def place(self, obj): return self.places[id(obj)]
ORDER = Order()
def rate(): return SETTINGS.rate if SETTINGS.on else 1.0
def call(name, x): return REGISTRY.get(name)(x)
def remember(n):
    if n not in MEMO: MEMO[n] = n * 2.0
    return MEMO[n]
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module in a folder of installed packages."""
    folder = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    module = types.ModuleType("graftax_test_package")
    module.__file__ = str(folder / "graftax_test_package.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(SOURCE, module.__file__, "exec"), vars(module))
    yield module


ONE = jnp.ones(())


def test_a_mode_that_is_switched_is_noticed(package: Any):
    def scaled(x: Any) -> Any:
        return x * (2 if package.mode() == "eval" else 1) * (3 if package.state() == "eval" else 1)

    step = graftax.jit(scaled)
    assert [float(step(ONE)) for _ in range(2)] == [1, 1]
    package.set_mode("eval")
    assert float(step(ONE)) == 2
    package.set_state("eval")
    assert float(step(ONE)) == 6
    package.set_mode("train")
    assert float(step(ONE)) == 3 and step.cache_info().misses == 4


def test_configurations_are_read_as_they_are(package: Any):
    step = graftax.jit(lambda x: x * package.CONFIG.rate * package.rate())
    assert float(step(ONE)) == 2
    package.CONFIG.rate = 3.0
    assert float(step(ONE)) == 3
    package.SETTINGS.on = True
    assert float(step(ONE)) == 6
    package.SETTINGS.rate = 5.0
    assert float(step(ONE)) == 15


def test_numbers_and_tables_of_classes_are_noticed(package: Any):
    class Mine(package.Base):
        pass

    step, inherited = graftax.jit(lambda x: package.Base().go(x)), graftax.jit(lambda x, o: o.go(x))
    assert float(step(ONE)) == float(inherited(ONE, Mine())) == 1
    package.Base.rate = 5.0
    assert float(step(ONE)) == float(inherited(ONE, Mine())) == 5
    package.Base.table["k"] = 3.0
    assert float(step(ONE)) == float(inherited(ONE, Mine())) == 15


def test_methods_and_tables_that_are_replaced_are_noticed(package: Any):
    step, method = graftax.jit(lambda x: package.Base().go(x) * package.Base().scale()), graftax.jit(package.Base.go)
    assert float(step(ONE)) == 1 and float(method(package.Base(), ONE)) == 1
    package.Base.scale = lambda base: 4.0
    assert float(step(ONE)) == 4
    package.Base.table = {"k": 3.0}
    assert float(step(ONE)) == 12 and float(method(package.Base(), ONE)) == 3
    package.Base.go = lambda base, x: x
    assert float(step(ONE)) == 4


def test_a_registry_gives_the_function_that_it_has_now(package: Any):
    step = graftax.jit(lambda x: package.call("scale", x))
    package.REGISTRY.functions["scale"] = lambda x: x * 2
    assert float(step(ONE)) == 2
    package.REGISTRY.functions["scale"] = lambda x: x * 3
    assert float(step(ONE)) == 3
    package.REGISTRY.functions["another"] = abs
    assert float(step(ONE)) == 3 and step.cache_info().misses == 2


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda p: p.count(), "COUNT from 0 to 1"),
        (lambda p: p.count_in_state(), "STATE['n'] from 0 to 1"),
        (lambda p: p.set_state("eval"), "STATE['mode'] from 'train' to 'eval'"),
        (lambda p: p.set_mode("eval"), "MODE from 'train' to 'eval'"),
    ],
)
def test_what_a_trace_changes_is_told_once(package: Any, change: Any, what: str):
    def counted(x: Any) -> Any:
        change(package)
        return x

    step = graftax.jit(counted)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(ONE)
    (message,) = [str(w.message) for w in caught if w.category is graftax.ImpureCallWarning]
    assert f"code of graftax_test_package that changed graftax_test_package.{what} while it was traced" in message


def test_two_functions_that_count_leave_each_other_alone(package: Any):
    first = graftax.jit(lambda x: x + 0 * package.count_in_state(), warn_impure=False)
    second = graftax.jit(lambda x: x - 0 * package.count_in_state(), warn_impure=False)
    for _ in range(4):
        first(ONE), second(ONE)
    assert first.cache_info().traces == second.cache_info().traces == 1


def test_the_ids_that_a_package_gives_are_its_own(package: Any):
    step = graftax.jit(lambda x: (package.next_id(), x)[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(ONE)
    assert package._next == 1


class Weight:
    def __init__(self, value: float) -> None:
        self.value = jnp.float32(value)


@pytest.mark.parametrize("is_built_inside", [False, True])
@pytest.mark.parametrize("is_passed", [False, True])
def test_a_package_finds_objects_by_ids_that_it_has_kept(package: Any, is_built_inside: bool, is_passed: bool):
    """As the optimizers of Keras do."""
    weights, order = [Weight(1.0), Weight(2.0)], package.Order() if is_passed else package.ORDER

    def step(weights: list[Weight], order: Any) -> Any:
        order = order or package.ORDER
        if not order.places:
            order.build(weights)
        for weight in weights:
            weight.value = weight.value + order.place(weight)
        return [order.place(weight) for weight in reversed(weights)]

    step = graftax.jit(step, warn_impure=False)
    if not is_built_inside:
        order.build(weights)
    for _ in range(4):
        assert step(weights, order if is_passed else None) == [1, 0]
    assert order.places == {id(weight): i for i, weight in enumerate(weights)}
    assert [weight.value.item() for weight in weights] == [1.0, 6.0]
    assert step.cache_info().traces <= 2
    with pytest.raises(KeyError):
        step([Weight(1.0), Weight(2.0)], order if is_passed else None)


def test_what_the_collector_calls_is_nobodys(package: Any):
    callback = package.on_collection
    gc.callbacks.append(callback)
    try:
        step = graftax.jit(lambda x: (gc.collect(), x)[1])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(ONE)
    finally:
        gc.callbacks.remove(callback)
    assert package.COLLECTIONS > 0


def test_a_cache_that_a_package_fills_is_its_own(package: Any):
    step = graftax.jit(lambda x: x * package.remember(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [float(step(ONE)) for _ in range(3)] == [6, 6, 6]
    assert step.cache_info().traces == 1


def test_a_table_or_an_object_that_is_replaced_is_known_inside(package: Any):
    step = graftax.jit(lambda x: x * (2 if package.state() == "eval" else 1) * package.CONFIG.rate)
    assert float(step(ONE)) == 2
    package.STATE, package.CONFIG = {"mode": "eval", "n": 0}, package.Config(rate=3.0)
    assert float(step(ONE)) == 6
    package.STATE["mode"] = "train"
    assert float(step(ONE)) == 3
    package.CONFIG.rate = 5.0
    assert float(step(ONE)) == 5


def test_a_class_and_its_table_that_are_replaced_are_known_inside(package: Any):
    step = graftax.jit(lambda x: package.Base().go(x))
    assert float(step(ONE)) == 1
    package.Base.table = {"k": 2.0}
    assert float(step(ONE)) == 2
    package.Base.table["k"] = 3.0
    assert float(step(ONE)) == 3
    package.Base = type("Other", (package.Base,), {"rate": 7.0, "__module__": package.__name__})
    assert float(step(ONE)) == 21
    package.Base.rate = 2.0
    assert float(step(ONE)) == 6


def _replace_inner(package: Any) -> None:
    package.OUTER.inner = package.Inner()
    package.OUTER.inner.scales.append(1.0)
    package.OUTER.inner.scales[0] = 11.0


@pytest.mark.quick(8)
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda p: setattr(p.OUTER.inner, "flag", True), 6),
        (lambda p: setattr(p.Inner, "flag", True), 6),
        (lambda p: p.OUTER.inner.scales.__setitem__(0, 5.0), 5),
        (lambda p: p.OUTER.inner.scales.insert(0, 7.0), 7),
        (lambda p: p.OUTER.inner.names.add("b"), 4),
        (lambda p: p.OUTER.sub["deep"].update(rate=3.0), 6),
        (lambda p: p.OUTER.sub.update(deep={"rate": 4.0}), 8),
        (_replace_inner, 11),
    ],
)
def test_what_is_further_inside_is_noticed(package: Any, change: Any, expected: float):
    by_function, by_name = graftax.jit(lambda x: x * package.inner_scale()), graftax.jit(
        lambda x: x * package.OUTER.inner.scales[0] * (3 if package.OUTER.inner.flag else 1)
        * len(package.OUTER.inner.names) * package.OUTER.sub["deep"]["rate"]
    )  # fmt: skip
    assert float(by_function(ONE)) == float(by_name(ONE)) == 2
    change(package)
    assert float(by_function(ONE)) == float(by_name(ONE)) == expected
    package.OUTER.inner.scales[0] *= 10
    assert float(by_function(ONE)) == float(by_name(ONE)) == 10 * expected
    assert by_function.cache_info().misses == by_name.cache_info().misses == 3


def test_a_list_of_hooks_and_an_option_that_was_not_there_are_noticed(package: Any):
    step = graftax.jit(lambda x: package.hooked(x))
    assert float(step(ONE)) == 1
    package.HOOKS.append(lambda x: x * 2)
    assert float(step(ONE)) == 2
    package.OPTIONS["factor"] = 3.0
    assert float(step(ONE)) == 6
    package.HOOKS.clear()
    assert float(step(ONE)) == 3
    assert float(step(ONE)) == 3 and step.cache_info().misses == 4


def test_a_list_that_a_trace_changes_is_told(package: Any):
    step = graftax.jit(lambda x: (package.HOOKS.append(len), x)[1])
    with pytest.warns(graftax.ImpureCallWarning, match="changed graftax_test_package.HOOKS from 0 items to 1 items"):
        step(ONE)
    step(ONE)
    assert len(package.HOOKS) == 1 and step.cache_info().traces == 1


@pytest.mark.filterwarnings("ignore::graftax.ImpureCallWarning")
def test_no_array_of_a_trace_stays_in_a_package(package: Any):
    package.HOOKS.append("before")
    step = graftax.jit(lambda x: (package.keep(x * 2), package.STATE.update(seen=[x]), x)[2])
    step(ONE)
    assert package.HOOKS == ["before"] and package.LAST == 2 and "seen" not in package.STATE


@pytest.fixture
def scope(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The globals of a module of the user's."""
    module = types.ModuleType("graftax_test_user")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return vars(module)


def test_the_memo_of_a_decorator_keeps_no_array_of_a_trace(package: Any, scope: dict[str, Any]):
    scope["jnp"] = jnp
    exec("def make(package): return [package.memoized(lambda n: jnp.arange(n) * 1.0) for _ in range(2)]", scope)
    scope["first"], scope["second"] = scope["make"](package)
    exec("def scaled(x): return x * first(2) * second(2)", scope)
    first, second = scope["first"], scope["second"]
    step = graftax.jit(scope["scaled"])
    with pytest.warns(graftax.ImpureCallWarning) as caught:
        assert [step(jnp.ones(2)).tolist() for _ in range(2)] == [[0, 1], [0, 1]]
    assert first.memo == second.memo == {}
    messages = [str(w.message) for w in caught]
    assert any("stored an array in" in m and "cached.memo" in m for m in messages)
    assert any("cached.calls from 0 to 1" in m for m in messages)
    assert first(2).tolist() == [0, 1] and list(first.memo) == [(2,)]


def test_a_memo_in_a_root_is_written_back(package: Any):
    tables = [package.memoized(lambda n: jnp.arange(n) * 1.0) for _ in range(2)]
    step = graftax.jit(lambda x: x * tables[0](2) * tables[1](2))
    assert [step(jnp.ones(2)).tolist() for _ in range(2)] == [[0, 1], [0, 1]]
    assert [[value.tolist() for value in table.memo.values()] for table in tables] == [[[0, 1]], [[0, 1]]]


def test_a_memo_of_a_decorator_that_is_changed_is_noticed(package: Any, scope: dict[str, Any]):
    scope["double"] = package.memoized(lambda key: 2.0)
    exec("def scaled(x): return x * double('a')", scope)
    step, double = graftax.jit(scope["scaled"], warn_impure=False), scope["double"]
    double("a"), double("b")
    assert float(step(ONE)) == 2
    double.memo["a",] = 5.0
    assert float(step(ONE)) == 5


def test_another_function_of_code_that_was_heard_often_is_noticed(package: Any, scope: dict[str, Any]):
    scope["first"], scope["second"] = (package.memoized(lambda key: 2.0) for _ in range(2))
    exec("def scaled(x): return x * first('a') * first('a') * first('a') * second('a')", scope)
    step, second = graftax.jit(scope["scaled"], warn_impure=False), scope["second"]
    scope["first"]("a"), second("a")
    assert float(step(ONE)) == 16
    second.memo["a",] = 5.0
    assert float(step(ONE)) == 40
