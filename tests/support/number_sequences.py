# SPDX-License-Identifier: Apache-2.0
"""Sequences of numbers near every boundary through one operation each, plainly and jitted, call by call.

`python tests/support/number_sequences.py 0 5000` tries the seeds from 0 to 4999 and prints what differs. A seed draws
an operation, what it is applied to, where its result goes, and five to eight values for the numbers.
"""

from __future__ import annotations

import importlib
import math
import random
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import graftax
from records import record

# fmt: off
WIDTHS = 7, 8, 15, 16, 24, 31, 32, 53, 63, 64
INTEGERS = [0, 1, 2, 3, 5, 10, 100, *(2**w + d for w in WIDTHS for d in (-1, 0, 1))]
FLOATS = [0.0, 0.5, 1.0, 2.0, 2.5, 0.1, 0.9999999999, 1.5, 2049.0, 16777217.9, 65504.0, 65520.0, 1e-46, 1e-60, 5e-324,
          *(float(2**w) for w in WIDTHS), math.inf, math.nan, 1e300, sys.float_info.max, sys.float_info.min,
          *(float(getattr(jnp.finfo(dtype), limit)) for dtype in (jnp.bfloat16, jnp.float32, jnp.float8_e5m2)
            for limit in ("max", "tiny", "smallest_subnormal"))]
VALUES: dict[str, list[Any]] = {
    "int": INTEGERS + [-value for value in INTEGERS], "float": FLOATS + [-value for value in FLOATS],
    "small": [*range(-3, 12), 127, 128, 255, 256, -128, -129], "bool": [True, False]}
OTHERS = "m", "2", "-3", "0.5", "0", "True", "2**40", "np.float32(1.5)", "np.int8(3)", "np.float64(0.1)", "x", "1j"
OPERANDS = (*"nnnnnnnn", "n + 1", "-n", "n * 0.5", "abs(n)", "float(n)", "int(n)", "np.float32(n)", "np.float64(n)",
            "np.int64(n)", "np.float16(n)", "n // 2", "n % 7", "h.n", "n + m", "round(n)", "np.int32(n)", "np.sqrt(n)")
PLACES = "return {e}", "h.out = {e}\nreturn x", "out = [{e}]\nreturn out, x * m", "return ({e}), x + n"
SMALL = "(a if -99 < a < 300 else 7)"  # of what takes as much memory or time as its number says
DTYPES = "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32", "complex64"
SIGNS = "+", "-", "*", "/", "//", "%", "&", "|", "^", "<", "<=", "==", "!=", "in (1, 2.5,) or"
# fmt: on


def _operations() -> Iterator[str]:
    """Expressions of `a`, an operand, `b`, another one, `s`, a small one, and `x`, an array."""
    for text in Path(__file__).with_name("number_operations.txt").read_text(encoding="utf-8").splitlines():
        for name in DTYPES if "DTYPE" in text else SIGNS:
            yield text.replace("DTYPE", name).replace("SIGN", name)


OPERATIONS = sorted(set(_operations()))
MODULES = sys.stdlib_module_names & {*re.findall(r"\b([a-z]+)\.", " ".join(OPERATIONS))}
X = jnp.array([1.0, 2.0])


class Sequence(NamedTuple):
    source: str
    values: list[tuple[Any, Any]]  # n and m of each call


def operation_of(seed: int) -> str:
    return OPERATIONS[seed * 7919 % len(OPERATIONS)]  # as many seeds as there are operations have each of them once


def make(seed: int) -> Sequence:
    rng, operation = random.Random(seed), operation_of(seed)
    lines = ["n, m = h.n, h.m", f"a = {rng.choice(OPERANDS)}", f"b = {rng.choice(OTHERS)}"]
    lines += [f"s = {SMALL}"] * (re.search(r"\bs\b", operation) is not None)
    lines += rng.choice(PLACES).format(e=operation).split("\n")
    kinds = rng.choice((["int"], ["float"], ["small"], ["int", "small"], ["int", "float"], [*VALUES]))
    values = [tuple(rng.choice(VALUES[rng.choice(kinds)]) for _ in "nm") for _ in range(rng.randint(5, 8))]
    return Sequence("def f(h, x):\n" + "\n".join(f"    {line}" for line in lines), values)


def _seen(value: Any) -> Any:
    """Types, the digits of numbers and arrays, what is in containers."""
    if isinstance(value, jax.Array):
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        return jax.typeof(value), value.weak_type, repr(np.asarray(jax.random.key_data(value) if is_key else value))
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = [_seen(item) for item in value]
        return type(value), sorted(parts, key=repr) if isinstance(value, (set, frozenset)) else parts
    if isinstance(value, dict):
        return type(value), [(_seen(key), _seen(item)) for key, item in value.items()]
    return type(value).__name__, repr(value)


def _is_told(error: Exception) -> bool:
    """Does it say that JAX cannot compute this while it traces, or with a NumPy scalar that it does not know?"""
    of_jax = jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError, graftax.GraftaxError
    return isinstance(error, of_jax) or "valid JAX type" in str(error)


def observe(sequence: Sequence, wrap: Callable[[Any], Any]) -> Iterator[Any]:
    """The outcome of each call: its result and what it left in the holder, or the class of its error."""
    module, holder = types.ModuleType("users"), types.SimpleNamespace(out=None)
    vars(module).update({name: importlib.import_module(name) for name in MODULES}, jax=jax, jnp=jnp, np=np)
    exec(compile(sequence.source, "users.py", "exec", dont_inherit=True), vars(module))
    call = wrap(vars(module)["f"])
    for holder.n, holder.m in sequence.values:
        try:
            yield _seen(call(holder, X)), _seen(holder.out)
        except Exception as error:
            yield error if _is_told(error) else type(error)


def compare(sequence: Sequence) -> tuple[int, str]:
    """How many calls agreed, and what the first other one gave. An error that tells what cannot be ends a sequence."""
    found = observe(sequence, lambda f: graftax.jit(f, warn_impure=False))
    for count, (wanted, given) in enumerate(zip(observe(sequence, lambda f: f), found, strict=True)):
        if isinstance(given, Exception):
            return count, f"refused: {str(given).splitlines()[0]}"
        if wanted != given:
            one = sequence._replace(values=sequence.values[count : count + 1])
            (static,) = observe(one, lambda f: graftax.jit(f, warn_impure=False, numbers="static"))
            told = "as traced " if static == given else ""  # by JAX, which is no matter of numbers that change
            return count, f"{told}at {sequence.values[: count + 1]}\n  plain {wanted}\n  jit   {given}"
    return len(sequence.values), ""


def main(first: int, last: int) -> None:
    compared, findings = 0, list[str]()
    warnings.simplefilter("ignore")
    for seed in range(first, last):
        count, text = compare(make(seed))
        compared += count
        if text.startswith("at "):
            findings.append(f"{seed}: {operation_of(seed)}")
        if text:
            print(seed, make(seed).source.splitlines()[2:], text, flush=True)
        if seed % 100 == 99:
            jax.clear_caches()
    tried = f"{last - first:,} sequences of {len(OPERATIONS)} operations, {compared:,} comparisons"
    print(tried, f"{len(findings)} differ", sep=", ")
    record("numbers", f"tests/support/number_sequences.py {first} {last}", tried, findings)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
