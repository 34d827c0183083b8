# SPDX-License-Identifier: Apache-2.0
"""`jit(f, check=True)`: runs plain `f` alongside every compiled call and reports the first difference."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from graftax import _core
from graftax._base.errors import CheckError, GraftaxError
from graftax._capture.namespaces import Rebuilt
from graftax._explain.array_signature import type_text
from graftax._graph.object_diff import equal_numbers, numbers_of
from graftax._graph.structure_diff import Difference, differences
from graftax._jax.arrays import ref_types
from graftax._jax.tracebacks import boundary
from graftax._jax.tracers import has_tracer
from graftax._jit.call_plan import number_test
from graftax._jit.jitted import Jitted
from graftax._jit.leaf_names import leaf_names
from graftax._jit.miss import restart_if_reads_changed

CHECK_FAILED = (
    "{name} behaves differently when it is compiled:\n{difference}\n(expected is what the plain function did). The "
    "clock, os.environ, Python's random numbers and files are read once, when the function is traced; print and warn "
    "run only then, too."
)

P = ParamSpec("P")
R = TypeVar("R")

# Tolerance between two runs of one computation, relative to the largest number, by bits of the mantissa.
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
        # The plain function first: after the compiled call the caller's objects have changed.
        plain, copies, roots, layout = self._retry_with_new_roots(lambda: self._run_plain(args, kwargs))
        if plain is None:
            return compiled(*args, **kwargs)  # inside another trace there are no values to compare
        actual = _run(lambda: compiled(*args, **kwargs))
        self._plan.signature.look_again(roots)  # the compiled call has made new cells
        self._compare(plain, actual, copies, roots, layout)
        # What the caller sees: the text of the plain run, and the rest of the compiled one.
        sys.stdout.write(plain.printed)
        for warning in actual.warned:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno, source=warning.source
            )
        if actual.error is not None:
            raise actual.error
        return actual.result

    def _run_plain(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[_Run | None, tuple[object, ...], tuple[object, ...], tuple[object, ...]]:
        """(the run of the plain function, the copies it ran on, the roots, their layout).

        Its reads are collected as in a trace, so that helper functions run on copies as well. The run is None inside
        another trace.
        """
        roots, layout = self._bind_arguments(args, kwargs)
        plan = self._plan
        recording = plan.record(roots, layout)
        restart_if_reads_changed(self, recording, plan)
        leaves, graphdef = recording.leaves, recording.graphdef
        if has_tracer(leaves):
            return None, (), roots, layout
        # The plain function changes what it is given, and the compiled call has to find the objects as they were.
        copies = _core.unflatten_roots(graphdef, [_copy_leaf(x) for x in leaves])
        # The run looks like a trace to the code: helpers see the copies, under the names of the caller's objects.
        graph, signature = Rebuilt(), self._plan.signature
        graph.functions.update(map(id, self._plan.record(copies, layout).functions))
        propagates, name = self._options.mutation == "propagate", self._plan.name
        call_arguments = self._function, roots, list(copies), layout, name, propagates, self._table.reads, graph
        handed_over = _core.Trace(recording)  # nodes that are shared, not copied, such as functions without arrays
        try:
            handed_over.rebuild(leaves)
            plain = _run(lambda: signature.call(*call_arguments))
        finally:
            handed_over.restore()
            handed_over.close()
        return plain, copies, roots, layout

    def _compare(
        self,
        plain: _Run,
        actual: _Run,
        copies: tuple[object, ...],
        roots: tuple[object, ...],
        layout: tuple[object, ...],
    ) -> None:
        if isinstance(actual.error, GraftaxError) and type(plain.error) is not type(actual.error):
            return  # its own message says why the call cannot be compiled
        if type(plain.error) is not type(actual.error):
            self._fail(
                f"  the exception: expected {_error_text(plain.error)}, given {_error_text(actual.error)}", actual.error
            )
        if plain.error is None:
            self._compare_graphs((plain.result, *copies), (actual.result, *roots), layout)
        if plain.printed != actual.printed:
            self._fail(f"  print: expected {plain.printed!r}, given {actual.printed!r}")
        warned = [(warning.category, str(warning.message)) for warning in actual.warned]
        for warning in plain.warned:
            if (warning.category, str(warning.message)) not in warned:
                self._fail(f"  warnings: expected {warning.category.__name__}({str(warning.message)!r}), given none")

    def _compare_graphs(
        self, expected: tuple[object, ...], actual: tuple[object, ...], layout: tuple[object, ...]
    ) -> None:
        # By value the caller's objects stay as they are, and only the results are compared.
        plan, count = self._plan, 1 if self._options.by_value else len(expected)
        names = ("result", *plan.signature.root_names(layout))[:count]
        flags = [0, *plan.signature.root_flags(layout, (), plan.dynamic)][:count]

        def flat(roots: tuple[object, ...]) -> tuple[list[Any], _core.GraphDef]:
            ignored = plan.ignoring.test(names) or plan.ignoring.is_stand_in
            dynamic = number_test(plan.dynamic_patterns, roots[:count], names, flags, False, ignored=ignored)
            return _core.record(roots[:count], names, flags, dynamic=dynamic, ignored=ignored, stand_ins=True)

        (expected_leaves, expected_graphdef), (actual_leaves, actual_graphdef) = flat(expected), flat(actual)
        if expected_graphdef != actual_graphdef:
            # A traced number is an array in the plain run, but is returned as the caller's number if it was not used.
            traced, numbers = ("an array", "a traced number"), bool(self._options.dynamic)
            difference = [
                d
                for d in differences(expected_graphdef, actual_graphdef, names)
                if d[1:3] != traced and not (numbers and _is_forwarded(d)) and d.one != "Ignored"  # of `ignore=`
            ]
            if difference:
                self._fail(f"  {difference[0].line()}")
        # By path, and in order where an array has several: a path may be a leaf in only one of the two.
        arrays: dict[str, list[Any]] = {}
        for path, leaf in zip(leaf_names(actual_graphdef, names), actual_leaves, strict=True):
            arrays.setdefault(path, []).append(leaf)
        for path, expected_leaf in zip(leaf_names(expected_graphdef, names), expected_leaves, strict=True):
            candidates = arrays.get(path)
            difference = _array_difference(expected_leaf, candidates.pop(0)) if candidates else None
            if difference is not None:
                self._fail(f"  {path}: expected {difference[0]}, given {difference[1]}")

    def _fail(self, difference: str, cause: BaseException | None = None) -> None:
        raise CheckError(CHECK_FAILED.format(name=self._plan.name, difference=difference)) from cause


def _is_forwarded(difference: Difference[str]) -> bool:
    return difference.one == "an array" and bool(_NUMBER.fullmatch(difference.other))


def _error_text(error: BaseException | None) -> str:
    return "none" if error is None else f"{type(error).__name__}: {error}"


def _run(call: Callable[[], object]) -> _Run:
    """Calls it, and captures its result or exception, its printed text and its warnings."""
    printed = io.StringIO()
    result, failure = None, None
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(printed):
        try:
            result = call()
        except Exception as error:
            failure = error
        jax.effects_barrier()  # jax.debug.print
    return _Run(result, failure, printed.getvalue(), warned or [])


def _copy_leaf(leaf: Any) -> Any:
    """A copy that neither donation nor an assignment to the caller's array can affect."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.copy()
    if isinstance(leaf, ref_types):
        return jax.new_ref(leaf[...])
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else jnp.asarray(leaf)  # a traced number


def _array_difference(expected: Any, actual: Any) -> tuple[str, str] | None:
    """(expected, actual) as texts where two arrays differ; None where they agree."""
    expected, actual = (jnp.asarray(x) if isinstance(x, (bool, int, float, complex)) else x for x in (expected, actual))
    if isinstance(expected, ref_types) and isinstance(actual, ref_types):
        expected, actual = expected[...], actual[...]
    both_jax = isinstance(expected, jax.Array) and isinstance(actual, jax.Array)
    # NumPy arrays have no weak type, and one run may return one where the other returns a JAX array.
    expected_type, actual_type = type_text(expected, with_weak=both_jax), type_text(actual, with_weak=both_jax)
    if expected_type != actual_type:
        return expected_type, actual_type
    wanted, computed = numbers_of(expected), numbers_of(actual)
    # XLA fuses operations, so the last bits of floating numbers may differ.
    tolerance, largest = 0.0, 0.0
    if wanted.dtype.kind in "fc":
        wide = np.complex128 if wanted.dtype.kind == "c" else np.float64
        tolerance = _TOLERANCE.get(jnp.finfo(actual.dtype).nmant, _COARSE)
        wanted, computed = wanted.astype(wide), computed.astype(wide)
        largest = float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0))
    wrong = ~np.asarray(equal_numbers(computed, wanted, tolerance, tolerance * largest))
    if not wrong.any():
        return None
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    position = f" at {list(index)}, and {int(wrong.sum())} of {wrong.size} numbers differ" if index else ""
    return str(wanted[index]), f"{computed[index]}{position}"
