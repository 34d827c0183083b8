# SPDX-License-Identifier: Apache-2.0
"""Code that catches what it is told with: the engine's own exceptions, those of C code that is given a symbol, and
JAX's word that a tracer has no value."""

from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import math
import operator
import random
import statistics
import struct
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import graftax
from programs import Program, beside

INTEGERS, FLOATS = (1, 4, 9, 16, 25), (1.5, 4.25, 9.0, 16.5, 4.25)


def bare(ask: Any, n: Any) -> Any:
    try:
        return ask(n)
    except:  # noqa: E722
        return -1.0


def at_last(ask: Any, n: Any) -> Any:
    out = -1.0
    try:
        out = ask(n)
    finally:
        return out  # noqa: B012


class Quiet:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> bool:
        return True


def in_a_context(ask: Any, n: Any) -> Any:
    out = -1.0
    with Quiet():
        out = ask(n)
    return out


def suppressed(ask: Any, n: Any) -> Any:
    out = -1.0
    with contextlib.suppress(BaseException):
        out = ask(n)
    return out


def tried_again(ask: Any, n: Any) -> Any:
    for i in range(3):
        try:
            return ask(n) * (i + 1)
        except BaseException:
            continue
    return -1.0


def as_another(ask: Any, n: Any) -> Any:
    try:
        try:
            return ask(n)
        except BaseException as error:
            raise LookupError from error
    except LookupError:
        return -1.0


def in_a_thread(ask: Any, n: Any) -> Any:
    out = []
    thread = threading.Thread(target=lambda: out.append(bare(ask, n)))
    thread.start()
    thread.join()
    return out[0]


def in_a_pool(ask: Any, n: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ask, n)
    return -1.0 if future.exception() else future.result()


def from_a_generator(ask: Any, n: Any) -> Any:
    def steps() -> Any:
        try:
            out = ask(n)
        except BaseException:
            out = -1.0
        yield out

    values = steps()
    out = next(values)
    values.close()
    return out


CATCHING = [
    *(bare, at_last, in_a_context, suppressed, tried_again, as_another, in_a_thread, in_a_pool, from_a_generator),
]
ASKING = {
    "float": lambda n: float(n),
    "int": lambda n: int(n),
    "sqrt": lambda n: math.sqrt(n),
    "sum": lambda n: sum([n, 0.5]),
    "Decimal": lambda n: float(decimal.Decimal(n)),
    "timedelta": lambda n: datetime.timedelta(minutes=n).total_seconds(),
    "deque": lambda n: float(len(collections.deque(range(50), maxlen=int(n)))),
    "struct": lambda n: struct.unpack("d", struct.pack("d", n))[0],
    "mean": lambda n: float(statistics.mean([n, n])),
    "Random": lambda n: random.Random(int(n)).random(),
}


@pytest.mark.quick(5)
@pytest.mark.parametrize("values", [INTEGERS, FLOATS], ids=["integers", "floats"])
@pytest.mark.parametrize("ask", ASKING)
@pytest.mark.parametrize("catch", CATCHING)
def test_what_is_asked_of_a_number_is_right_although_code_catches_everything(catch: Any, ask: str, values: Any):
    asking = ASKING[ask]
    f = graftax.jit(lambda n, x: x * catch(asking, n), warn_impure=False)
    for n in values:
        assert f(n, jnp.ones(2)).tolist() == jnp.full(2, catch(asking, n)).tolist(), n


@pytest.mark.parametrize("ask", [getattr, object.__getattribute__, lambda x, name: operator.attrgetter(name)(x)])
def test_an_attribute_that_another_object_lacks_keeps_numbers_symbolic(ask: Any):
    def f(x: Any, n: Any) -> Any:
        with contextlib.suppress(AttributeError):
            ask(x, "no_such_attribute")
        with contextlib.suppress(AttributeError):
            ask(math, "no_such_attribute")
        return x * n

    jitted = graftax.jit(f)
    for n in INTEGERS:
        assert jitted(jnp.ones(2), n).tolist() == [n, n]
    assert jitted.cache_info().traces == 2


def test_an_error_that_was_caught_before_it_met_a_number_keeps_it_symbolic():
    known: dict[str, int] = {}

    def f(n, x):
        try:
            scale = known["scale"]
        except KeyError:
            scale = 2
        if n > 100:
            try:
                raise ValueError(n)
            except ValueError as error:
                scale = error.args[0]
        return x * n * scale

    jitted = graftax.jit(f)
    for n in (1, 2, 3, 4, 5, 101, 102, 103):
        assert jitted(n, jnp.ones(2)).tolist() == f(n, jnp.ones(2)).tolist()
    assert jitted.cache_info().traces == 3


READS = {
    "a container": "K = {'k': 2.0}\ndef h(): return K['k']\n",
    "a counter": "K = {'k': 2.0}\ndef h():\n    K['k'] = K['k'] + 1\n    return K['k']\n",
    "an array": "A = jnp.ones(2)\nK = {'k': 0}\ndef h(): return A\n",
    "state": "K = {'k': 2.0}\ndef make():\n    s = [2.0]\n    def h():\n        s[0] += K['k']\n        return s[0]\n"
    "    return h\nh = make()\n",
}
CAUGHT = {
    "bare": "    try: v = h()\n    except: v = -1.0\n    return x * v",
    "finally": "    v = -1.0\n    try: v = h()\n    finally: return x * v",
    "another": "    try: v = h()\n    except BaseException as e: raise ValueError('not it') from e\n    return x * v",
    "suppress": "    v = -1.0\n    with contextlib.suppress(BaseException): v = h()\n    return x * v",
    "a loop": "    for i in range(4):\n        try: return x * h() + i\n        except: continue",
}


@pytest.mark.parametrize("caught", CAUGHT)
@pytest.mark.parametrize("read", READS)
def test_what_a_helper_reads_is_known_although_code_catches_everything(read: str, caught: str):
    source = "import contextlib\n" + READS[read] + "def f(x):\n" + CAUGHT[caught]
    beside(Program(source, lambda m: m.K.update(k=7.0), ("K",)))


def told(f: Any, *args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        f(*args)
    return [str(one.message) for one in found if one.category is graftax.ImpureCallWarning]


def test_code_that_catches_what_a_tracer_raises_is_named():
    def decides(x):
        try:
            return x if x.sum() > 0 else -x
        except TypeError:
            return x * 100

    def converts(d, x):
        with contextlib.suppress(Exception):
            d["mean"] = float(x.mean())
        return x

    (first,) = told(graftax.jit(decides), jnp.ones(2))
    assert "catches TracerBoolConversionError at " in first and "test_signals.py" in first
    (second,) = told(graftax.jit(converts), {}, jnp.ones(2))
    assert "catches ConcretizationTypeError" in second
    assert not told(graftax.jit(decides, warn_impure=False), jnp.ones(2))


def test_code_that_knows_of_traces_is_not_named():
    def f(x):
        try:
            return x if x.sum() > 0 else -x
        except jax.errors.TracerBoolConversionError:
            return jnp.where(x.sum() > 0, x, -x)

    assert not told(graftax.jit(f), jnp.ones(2))


def test_an_error_of_a_tracer_that_leaves_the_function_is_no_warning():
    def f(x):
        return x if x.sum() > 0 else -x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(jax.errors.TracerBoolConversionError):
            graftax.jit(f)(jnp.ones(2))
