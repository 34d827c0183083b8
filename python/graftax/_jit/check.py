# SPDX-License-Identifier: Apache-2.0
"""`jit(f, check=True)`: runs plain `f` beside every compiled call and reports the first difference."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from graftax import _core
from graftax._base.errors import CheckError, GraftaxError
from graftax._capture.namespaces import Rebuilt
from graftax._graph.object_diff import equal_numbers, numbers_of
from graftax._graph.structure_diff import Difference, differences
from graftax._jax.compat import ref_types
from graftax._jax.tracebacks import boundary
from graftax._jit.call_plan import dynamic_in
from graftax._jit.jitted import Jitted
from graftax._jit.leaf_names import leaf_names

CHECK_FAILED = (
    "{name} does something else when it is compiled:\n{difference}\n(expected is what the plain function did). What is "
    "read from time, environ, Python's random numbers or a file is read once, when the function is traced; print and "
    "warn run then only."
)

P = ParamSpec("P")
R = TypeVar("R")

# How far apart two runs of one computation may be, relative to the largest number; by bits of the mantissa.
_TOLERANCE = {52: 1e-9, 23: 1e-4, 10: 2e-2, 7: 5e-2}
_NUMBER = re.compile(r"True|False|\(?[-+\d.einfaj]+\)?")
_COARSE = 0.3  # dtypes of eight bits and less


class _Run(NamedTuple):
    result: Any
    error: BaseException | None
    printed: str
    warned: list[warnings.WarningMessage]


class Checked(Jitted[P, R]):
    """A jitted function that is compared with the plain one on every call."""

    @boundary
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        compiled: Callable[..., Any] = super().__call__
        if jax.config.jax_disable_jit:
            return compiled(*args, **kwargs)
        plain, copies, roots, layout = self._anew(lambda: self._plainly(args, kwargs))
        if plain is None:
            return compiled(*args, **kwargs)  # part of another trace: there are no numbers to compare
        fast = _run(lambda: compiled(*args, **kwargs))
        self._plan.signature.look_again(roots)  # the compiled call has made cells of its own
        self._compare(plain, fast, copies, roots, layout)
        sys.stdout.write(plain.printed)
        for w in fast.warned:
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno, source=w.source)
        if fast.error is not None:
            raise fast.error
        return fast.result

    def _plainly(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Run | None, tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """(the run of the plain function, the copies that it was given, the roots, their layout).

        What it reads is found as in a trace, so that helpers run on copies too.
        """
        roots, layout = self._bound(args, kwargs)
        plan = self._plan
        recording = plan.record(roots, layout)
        self._look_at(recording, plan)
        leaves, graphdef = recording.leaves, recording.graphdef
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            return None, (), roots, layout
        copies = _core.unflatten_roots(graphdef, [_copied(x) for x in leaves])
        graph, signature = Rebuilt(), self._plan.signature
        graph.functions.update(map(id, self._plan.record(copies, layout).functions))
        propagates, name = self._options.mutation == "propagate", self._plan.name
        given = self._function, roots, list(copies), layout, name, propagates, self._table.reads, graph
        handed_over = _core.Trace(recording)  # what is no copy, such as a function without arrays
        try:
            handed_over.rebuild(leaves)
            plain = _run(lambda: signature.call(*given))
        finally:
            handed_over.restore()
            handed_over.close()
        return plain, copies, roots, layout

    def _compare(
        self, plain: _Run, fast: _Run, copies: tuple[Any, ...], roots: tuple[Any, ...], layout: tuple[Any, ...]
    ) -> None:
        if isinstance(fast.error, GraftaxError) and type(plain.error) is not type(fast.error):
            return  # its message says why the call cannot be compiled
        if type(plain.error) is not type(fast.error):
            self._fail(f"  the exception: expected {_said(plain.error)}, given {_said(fast.error)}", fast.error)
        if plain.error is None:
            self._compare_graphs((plain.result, *copies), (fast.result, *roots), layout)
        if plain.printed != fast.printed:
            self._fail(f"  print: expected {plain.printed!r}, given {fast.printed!r}")
        warned = [(w.category, str(w.message)) for w in fast.warned]
        for w in plain.warned:
            if (w.category, str(w.message)) not in warned:
                self._fail(f"  warnings: expected {w.category.__name__}({str(w.message)!r}), given none")

    def _compare_graphs(self, expected: tuple[Any, ...], given: tuple[Any, ...], layout: tuple[Any, ...]) -> None:
        plan, count = self._plan, 1 if self._options.by_value else len(expected)
        names = ("result", *plan.signature.root_names(layout))[:count]
        flags = [0, *plan.signature.root_flags(layout, (), plan.dynamic)][:count]

        def flat(roots: tuple[Any, ...]) -> tuple[list[Any], _core.GraphDef]:
            ignored = plan.ignoring.test(names)
            dynamic = dynamic_in(plan.dynamic_patterns, roots[:count], names, flags, False, ignored=ignored)
            return _core.record(roots[:count], names, flags, dynamic=dynamic, ignored=ignored)

        (one, first), (other, second) = flat(expected), flat(given)
        if first != second:
            # A traced number is an array in the plain run; one that nobody touched comes back as the caller's number.
            traced, numbers = ("an array", "a traced number"), bool(self._options.dynamic)
            found = [
                d
                for d in differences(first, second, names)
                if d[1:3] != traced and not (numbers and _is_forwarded(d)) and d.one != "Ignored"  # of `ignore=`
            ]
            if found:
                self._fail(f"  {found[0].line()}")
        arrays: dict[str, list[Any]] = {}
        for path, b in zip(leaf_names(second, names), other, strict=True):
            arrays.setdefault(path, []).append(b)
        for path, a in zip(leaf_names(first, names), one, strict=True):
            there = arrays.get(path)  # a number that is a leaf in one of the two only
            found = _array_difference(a, there.pop(0)) if there else None
            if found is not None:
                self._fail(f"  {path}: expected {found[0]}, given {found[1]}")

    def _fail(self, difference: str, cause: BaseException | None = None) -> None:
        raise CheckError(CHECK_FAILED.format(name=self._plan.name, difference=difference)) from cause


def _is_forwarded(difference: Difference[str]) -> bool:
    return difference.one == "an array" and bool(_NUMBER.fullmatch(difference.other))


def _said(error: BaseException | None) -> str:
    return "none" if error is None else f"{type(error).__name__}: {error}"


def _run(call: Callable[[], Any]) -> _Run:
    """Runs it with what it prints and warns held back."""
    printed = io.StringIO()
    result, failure = None, None
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(printed):
        try:
            result = call()
        except Exception as error:
            failure = error
        jax.effects_barrier()  # jax.debug.print
    return _Run(result, failure, printed.getvalue(), warned or [])


def _copied(leaf: Any) -> Any:
    """An array that neither a donation nor an assignment to the caller's reaches."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.copy()
    if isinstance(leaf, ref_types):
        return jax.new_ref(leaf[...])
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else jnp.asarray(leaf)  # a number that is traced


def _array_difference(expected: Any, given: Any) -> tuple[str, str] | None:
    """How two arrays differ, as texts; None where they agree."""
    expected, given = (jnp.asarray(x) if isinstance(x, (bool, int, float, complex)) else x for x in (expected, given))
    if isinstance(expected, ref_types) and isinstance(given, ref_types):
        expected, given = expected[...], given[...]
    both_jax = isinstance(expected, jax.Array) and isinstance(given, jax.Array)
    one, other = _kind(expected, weak=both_jax), _kind(given, weak=both_jax)
    if one != other:
        return one, other
    a, b = numbers_of(expected), numbers_of(given)
    tolerance, largest = 0.0, 0.0
    if a.dtype.kind in "fc":
        wide = np.complex128 if a.dtype.kind == "c" else np.float64
        tolerance = _TOLERANCE.get(jnp.finfo(given.dtype).nmant, _COARSE)
        a, b = a.astype(wide), b.astype(wide)
        largest = float(np.abs(a[np.isfinite(a)]).max(initial=0.0))
    wrong = ~np.asarray(equal_numbers(b, a, tolerance, tolerance * largest))
    if not wrong.any():
        return None
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    where = f" at {list(at)}, and {int(wrong.sum())} of {wrong.size} numbers differ" if at else ""
    return str(a[at]), f"{b[at]}{where}"


def _kind(x: Any, weak: bool) -> str:
    """Shape, dtype and weak type; of a NumPy array the dtype that JAX makes of it."""
    dtype = jax.dtypes.canonicalize_dtype(x.dtype) if isinstance(x, (np.ndarray, np.generic)) else x.dtype
    return f"{dtype}{list(x.shape)}{', weakly typed' if weak and getattr(x, 'weak_type', False) else ''}"
