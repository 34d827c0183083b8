# SPDX-License-Identifier: Apache-2.0
"""What the code under a trace reads is part of the program: names of modules and classes, and the state
of functions. Each program runs plainly and jitted, again on a hit, and after a change."""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import graftax
from users_modules import ONE, Wrap, both, module, plain

# ---- names of modules

HELPER = """
SCALE, W, CONFIG, LOG = 2.0, jnp.ones(2), {"power": 1}, []
def deep(x): return x * SCALE + W ** CONFIG["power"]
def helper(x):
    LOG.append(len(LOG))
    return deep(x)
def f(x): return helper(x)
"""


def _set_number(m: Any) -> None:
    m.SCALE = 5.0


def _set_array(m: Any) -> None:
    m.W = m.W * 3


def _change_dict(m: Any) -> None:
    m.CONFIG["power"] += 1


def _set_other_type(m: Any) -> None:
    m.SCALE = jnp.full(2, 7.0)


def _set_function(m: Any) -> None:
    m.deep = lambda x: x - 1


def _set_code(m: Any) -> None:
    m.deep.__code__ = (lambda x: x - 2).__code__


def _set_class(m: Any) -> None:
    m.CONFIG = {"power": 3, "more": "text"}


@pytest.mark.parametrize(
    "change", [_set_number, _set_array, _change_dict, _set_other_type, _set_function, _set_code, _set_class]
)
def test_a_name_of_a_helper_that_changes_is_used(change: Callable[[Any], None]) -> None:
    def program(wrap: Wrap) -> Any:
        m = module(HELPER)
        f = wrap(m.f)
        out = [f(ONE), f(ONE)]
        change(m)
        return [*out, f(ONE), f(ONE), list(m.LOG)]

    both(program)


@pytest.mark.parametrize(
    "body", ["def inner(): return x * W * N\n    return inner()", "def inner(y): return y * W * N\n    return inner(x)"]
)
def test_what_a_function_inside_of_a_helper_names_is_used(body: str) -> None:
    def program(wrap: Wrap) -> Any:
        m = module(f"W, N, x = jnp.ones(2), 1, 0\ndef helper(x):\n    {body}\ndef f(x): return helper(x)")
        f = wrap(m.f)
        out = [f(ONE), f(ONE)]
        m.N = 2
        out += [f(ONE), f(ONE)]
        m.W = m.W * 3
        return [*out, f(ONE), f(ONE)]

    both(program)


def test_a_binding_that_comes_back_is_a_hit() -> None:
    m = module("SCALE = 2.0\ndef helper(x): return x * SCALE\ndef f(x): return helper(x)")
    f = graftax.jit(m.f)
    for value in (2.0, 3.0, 2.0, 3.0, 2.0):
        m.SCALE = value
        assert f(ONE).tolist() == m.f(ONE).tolist()
    assert f.cache_info().traces == 2


def test_arrays_behind_names_are_inputs() -> None:
    m = module("W = jnp.ones(2)\ndef helper(x): return x * W\ndef f(x): return helper(x)")
    f = graftax.jit(m.f)
    for _ in range(5):
        assert f(ONE).tolist() == m.W.tolist()
        m.W = m.W + 1
    assert f.cache_info().traces == 1


def test_what_a_helper_does_to_its_globals_comes_back() -> None:
    def program(wrap: Wrap) -> Any:
        m = module(
            "STATE = {'w': jnp.ones(2), 'n': [0]}\n"
            "def helper(x):\n    STATE['w'] = STATE['w'] + x\n    STATE['n'].append(len(STATE['n']))\n"
            "def f(x):\n    helper(x)\n    return STATE['w'].sum()"
        )
        f = wrap(m.f)
        return [f(ONE), f(ONE), m.STATE]

    both(program)


def test_attributes_of_a_users_module_are_read_as_its_globals_are() -> None:
    def program(wrap: Wrap) -> Any:
        config = module("scale, w = 2.0, jnp.ones(2)\ndef g(x): return x * w")
        m = module("def f(x): return config.g(x) * config.scale + config.w", config=config)
        f = wrap(m.f)
        out = [f(ONE), f(ONE)]
        config.scale, config.w = 3.0, config.w + 1
        out.append(f(ONE))
        config.g = lambda x: x
        return [*out, f(ONE)]

    both(program)


def test_a_module_imported_inside_is_read(monkeypatch: pytest.MonkeyPatch) -> None:

    config = module("w = jnp.ones(2)")
    monkeypatch.setitem(sys.modules, "graftax_test_config", config)  # type: ignore[arg-type]
    m = module("def f(x):\n    import graftax_test_config\n    return x * graftax_test_config.w")
    f = graftax.jit(m.f)
    assert f(ONE).tolist() == [1, 1]
    config.w = config.w * 4
    assert f(ONE).tolist() == [4, 4]


def test_a_patched_function_of_a_library_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    f = graftax.jit(lambda x: eqx.tree_at(lambda t: t[0], [x], x * 2)[0])
    assert f(ONE).tolist() == [2, 2]
    monkeypatch.setattr(eqx, "tree_at", lambda where, tree, new: [new + 1])
    assert f(ONE).tolist() == [3, 3]


def test_a_name_that_appears_later_is_seen() -> None:
    def program(wrap: Wrap) -> Any:
        m = module("def f(x):\n    try:\n        return x * LATER\n    except NameError:\n        return x")
        f = wrap(m.f)
        out = [f(ONE)]
        m.LATER = 3.0
        return [*out, f(ONE)]

    both(program)


# ---- classes


def make_class() -> Any:
    class Layer:
        scale = 2.0
        table: ClassVar = {"k": 1.0}
        frozen: ClassVar[list[Any]] = []

        def __init__(self, w: Any) -> None:
            self.w = w

        def __call__(self, x: Any) -> Any:
            return self.inner(x) * self.scale * type(self).table["k"]

        def inner(self, x: Any) -> Any:
            return x * self.w

        def update(self, g: Any) -> None:
            if not any(self is layer for layer in Layer.frozen):
                self.w = self.w - g

    return Layer


def _class_number(cls: Any) -> None:
    cls.scale = 5.0


def _class_dict(cls: Any) -> None:
    cls.table["k"] = 9.0


def _class_method(cls: Any) -> None:
    cls.inner = lambda self, x: x + self.w


def _class_call(cls: Any) -> None:
    cls.__call__ = lambda self, x: x * 0


def _class_base(cls: Any) -> None:
    cls.scale = jnp.full(2, 3.0)


@pytest.mark.parametrize("change", [_class_number, _class_dict, _class_method, _class_call, _class_base])
def test_an_attribute_of_a_class_that_changes_is_used(change: Callable[[Any], None]) -> None:
    def program(wrap: Wrap) -> Any:
        cls = make_class()
        layer = cls(jnp.full(2, 3.0))
        f = wrap(lambda layer, x: layer(x))
        out = [f(layer, ONE), f(layer, ONE)]
        change(cls)
        return [*out, f(layer, ONE), f(layer, ONE)]

    both(program)


def test_a_registry_on_a_class_holds_the_arguments_themselves() -> None:
    def program(wrap: Wrap) -> Any:
        cls = make_class()
        a, b = cls(ONE), cls(ONE)
        cls.frozen.append(a)
        f = wrap(lambda layers, g: [layer.update(g) for layer in layers] and None)
        f([a, b], ONE)
        f([a, b], ONE)
        cls.frozen.append(b)
        f([a, b], ONE)
        return [a.w, b.w]

    both(program)


def test_an_argument_is_what_a_class_attribute_and_a_helper_hold() -> None:
    def program(wrap: Wrap) -> Any:
        cls = make_class()
        cls.IDENTITY = cls(jnp.full(2, 3.0))
        m = module(
            "def same(layer): return layer is IDENT, layer is cls.IDENTITY\n"
            "def f(layer, x): return x * sum(same(layer))",
            IDENT=cls.IDENTITY,
            cls=cls,
        )
        f = wrap(m.f)
        return [f(cls.IDENTITY, ONE), f(cls(ONE), ONE), f(cls.IDENTITY, ONE)]

    both(program)


# ---- functions with state


def counter() -> tuple[Any, Any]:
    total = jnp.zeros(2)

    def add(x: Any) -> Any:
        nonlocal total
        total = total + x
        return total

    return add, lambda: total


def test_state_in_the_closure_of_a_global_function() -> None:
    def program(wrap: Wrap) -> Any:
        add, read = counter()
        f = wrap(module("def f(x): return add(x)", add=add).f)
        return [f(ONE), f(ONE), f(ONE), read()]

    both(program)


def test_a_mutable_default_and_an_attribute_of_a_global_function() -> None:
    def program(wrap: Wrap) -> Any:
        m = module(
            "def h(x, acc=[]):\n    acc.append(1)\n    return x * len(acc)\n"
            "def k(x): return x * k.scale\nk.scale = 2.0\n"
            "def f(x): return h(x) + k(x)"
        )
        f = wrap(m.f)
        out = [f(ONE), f(ONE)]
        m.k.scale = 7.0
        return [*out, f(ONE), m.h.__defaults__]

    both(program)


def test_two_functions_of_one_code_have_a_state_each() -> None:
    def program(wrap: Wrap) -> Any:
        (one, read_one), (other, read_other) = counter(), counter()
        f = wrap(module("def f(x): return one(x) + 2 * other(x * 3)", one=one, other=other).f)
        return [f(ONE), f(ONE), read_one(), read_other()]

    both(program)


def timed(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


WRAPPERS = {
    "partial": functools.partial,
    "decorator": timed,
    "two decorators": lambda f: timed(timed(f)),
    "jax.grad": jax.grad,
    "graftax.grad": graftax.grad,
    "graftax.value_and_grad": graftax.value_and_grad,
    "graftax.checkpoint": graftax.checkpoint,
    "jax.checkpoint": jax.checkpoint,
    "jax.vmap": lambda f: jax.vmap(lambda x: f(x[None])),
    "graftax.jit": graftax.jit,
    "cache": lambda f: functools.lru_cache(maxsize=0)(f),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_globals_of_a_wrapped_function_are_read(name: str) -> None:
    def program(wrap: Wrap) -> Any:
        # JAX keeps what it traced of a function under checkpoint: one that reads arrays has to be another one then.
        weight = 1.0 if "checkpoint" in name else jnp.ones(())
        m = module("LAM = 1.0\ndef loss(x): return (LAM * W * x ** 2).sum()", W=weight)
        f = wrap(WRAPPERS[name](m.loss))
        out = [f(ONE), f(ONE)]
        m.LAM, m.W = 3.0, m.W * 2
        return [*out, f(ONE)]

    both(program)


# ---- jitted functions that call jitted functions


@pytest.mark.parametrize(
    "inner", [graftax.jit, lambda f: graftax.jit(graftax.jit(f)), timed], ids=["jit", "twice", "plain"]
)
def test_what_an_inner_jitted_function_captures_joins_the_outer_call(inner: Wrap) -> None:
    def program(wrap: Wrap) -> Any:
        scale, state = [2.0], {"w": jnp.ones(2)}

        def body(x: Any) -> Any:
            state["w"] = state["w"] + x
            return state["w"] * scale[0]

        called = body if wrap is plain else inner(body)
        outer = wrap(lambda x: called(x) + called(x))
        out = [outer(ONE), outer(ONE)]
        scale[0] = 5.0
        state["w"] = state["w"] * 0
        return [*out, outer(ONE), state]

    both(program)


def test_a_jitted_function_as_an_argument_is_the_function_in_it() -> None:
    def program(wrap: Wrap) -> Any:
        scale = [2.0]
        inner = wrap(lambda x: x * scale[0])
        outer = wrap(lambda h, x: h(x))
        out = [outer(inner, ONE)]
        scale[0] = 5.0
        return [*out, outer(inner, ONE)]

    both(program)


def test_methods_that_are_jitted_call_each_other() -> None:
    def program(wrap: Wrap) -> Any:
        class Trainer:
            rate = 0.5

            def __init__(self) -> None:
                self.w, self.steps = jnp.ones(2), [0]

            @wrap
            def gradient(self, x: Any) -> Any:
                self.steps[0] += 1
                return self.w * x * Trainer.rate

            @wrap
            def step(self, x: Any) -> Any:
                self.w = self.w - self.gradient(x)
                return self.w

        t = Trainer()
        out = [t.step(ONE), t.step(ONE)]
        Trainer.rate = 0.25
        return [*out, t.step(ONE), t.steps]

    both(program)


# ---- what stays outside


def test_other_threads_never_meet_tracers() -> None:
    m = module(
        "class M: pass\nMODEL = M(); MODEL.w = jnp.ones(2)\nM.shared = MODEL\n"
        "def helper(x): return MODEL.w * x + M.shared.w\n"
        "def f(n, x):\n    for _ in range(n): x = jnp.sin(helper(x))\n    return x"
    )
    stop, met = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            for value in (m.MODEL.w, m.M.shared.w):
                if isinstance(value, jax.core.Tracer):
                    met.append(value)

    reader = threading.Thread(target=read)
    reader.start()
    f = graftax.jit(m.f)
    for n in range(1, 6):
        f(n, ONE)
    stop.set()
    reader.join()
    assert met == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_everything_as_it_was(error: type[BaseException]) -> None:
    m = module(
        "class M: pass\nMODEL = M(); MODEL.w = jnp.ones(2); M.table = [jnp.ones(2)]; KEPT = M.table[0]\n"
        "def helper(x):\n    MODEL.w = MODEL.w + x\n    M.table[0] = x\n    raise error\n"
        "def f(x): helper(x)",
        error=error,
    )
    kept = m.MODEL.w
    with pytest.raises(error):
        graftax.jit(m.f)(ONE)
    assert m.MODEL.w is kept and m.M.table == [m.KEPT] and type(vars(m.M)["table"]) is list


def test_a_function_that_only_calls_libraries_has_no_more_roots() -> None:
    f = graftax.jit(lambda x: jnp.linalg.norm(jax.nn.softmax(x)))
    f(ONE)
    assert f._table.reads is not None and f._table.reads.names.origins == []  # type: ignore[attr-defined]
    assert f.cache_info().traces == 1


def test_lower_trace_and_eval_shape_read_as_calls_do() -> None:
    m = module("W = jnp.ones(2)\ndef helper(x): return x * W\ndef f(x): return helper(x)")
    f = graftax.jit(m.f)
    compiled = f.lower(ONE).compile()
    m.W = m.W * 3
    assert compiled(ONE).tolist() == [3, 3]
    assert f.eval_shape(ONE).shape == (2,)
    assert len(f.trace(ONE).jaxpr.in_avals) == 2


def test_a_variable_that_two_functions_share_is_seen_when_one_changes_it() -> None:
    def program(wrap: Wrap) -> Any:
        m = module(
            """
            def make():
                mode, scale = abs, 1.0
                def get(x): return mode(x) * scale
                def set_to(new, factor):
                    nonlocal mode, scale
                    mode, scale = new, factor
                return get, set_to
            get, set_to = make()
            def f(x): return get(x)
            """
        )
        f, out = wrap(m.f), []
        for mode, factor in [(abs, 1.0), (jnp.sin, 1.0), (jnp.sin, 2.0), (abs, 1.0)]:
            m.set_to(mode, factor)
            out += [f(ONE), f(ONE)]
        return out

    both(program)


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float
    name: str = "a"


def test_a_frozen_config_made_anew_does_not_compile_again() -> None:
    source = """
        CONFIG = Config(1.0)
        def helper(x): return x * CONFIG.rate
        def f(x): return helper(x)
        """
    m = module(source, Config=Config)
    f = graftax.jit(m.f)
    for rate in [1.0] * 20 + [2.0] * 20 + [1.0] * 20:
        m.CONFIG = m.Config(rate)
        assert f(ONE).tolist() == (ONE * rate).tolist()
    assert f.cache_info().traces <= 4


@pytest.mark.parametrize("mutation", ["propagate", "error", "discard"])
def test_what_a_jitted_function_of_any_mode_reads_is_part_of_the_call_around_it(mutation: str) -> None:
    m = module("W, N = jnp.ones(2), 2.0\ndef helper(x): return x * W * N")
    inner = graftax.jit(m.helper, mutation=mutation)  # type: ignore[call-overload]
    f = graftax.jit(lambda x: inner(x) + 1)
    for weight, number in [(1, 2.0), (3, 2.0), (3, 5.0)]:
        m.W, m.N = jnp.full(2, float(weight)), number
        for _ in range(2):
            assert f(ONE).tolist() == [weight * number + 1] * 2


def test_a_mode_that_forbids_changes_does_so_in_the_trace_of_another_call() -> None:
    def change(log: list[int], x: Any) -> Any:
        log.append(1)
        return x + len(log)

    log: list[int] = []
    forbids, drops = graftax.jit(change, mutation="error"), graftax.jit(change, mutation="discard")
    with pytest.raises(graftax.MutationError, match="forbids"):
        graftax.jit(lambda log, x: forbids(log, x))(log, ONE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graftax.LostChangeWarning)
        assert graftax.jit(lambda log, x: drops(log, x))(log, ONE).tolist() == [2, 2]
    assert log == []


def test_globals_that_the_trace_itself_makes_are_not_read() -> None:
    m = module(
        """
        def evaluated(x): return eval("lambda: obj['x'] * factors[0]", {"obj": {"x": x}, "factors": [2.0]})()
        def helper(x): return eval("obj['x'] + 1", {"obj": {"x": x}}) + evaluated(x)
        def f(x): return helper(x)
        """
    )
    f = graftax.jit(m.f)
    for n in range(3):
        assert f(ONE * n).tolist() == [n * 3 + 1] * 2
    assert f.cache_info().traces == 1


def test_an_entry_whose_computation_failed_depends_on_what_it_read() -> None:
    def program(wrap: Wrap) -> Any:
        m = module(
            """
            import numpy as np
            N, FAILS = 2.0, [True]
            def told(v):
                if FAILS[0]: raise ValueError("told")
                return np.float32(v)
            def helper(x): return x * N
            def f(x): return jax.pure_callback(told, jax.ShapeDtypeStruct((), jnp.float32), helper(x))
            """
        )
        f, x = wrap(m.f), jnp.float32(1)
        with pytest.raises(Exception, match="told"):
            jax.block_until_ready(f(x))
        m.FAILS[0], m.N = False, 5.0
        return [f(x), f(x)]

    both(program)
