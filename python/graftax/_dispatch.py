# SPDX-License-Identifier: Apache-2.0
"""Tier A: one `jax.jit` object per structure, over a flat function of arrays. Public JAX only."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey, GetAttrKey, SequenceKey, keystr

from . import _core
from ._compat import equations
from ._difference import place_name
from ._errors import (
    ATTRIBUTE_SET,
    CHANGED_BEHIND,
    DONATED_AND_KEPT,
    GLOBAL_ASSIGNED,
    MUTATION_FORBIDDEN,
    NO_SHARDING,
    NOWHERE,
    OF_A_TRACE,
    SHARDING_TOO_DEEP,
    ConcurrentChangeError,
    GraftaxError,
    MutationError,
    StructureError,
    rename_leaves,
)
from ._hosts import warn_of_copies
from ._options import Options, split_patterns
from ._signature import GlobalAssigned, Signature
from .packed import is_array_of_handle, is_donated
from .patterns import Covering, Pattern, nearest, of_arguments, tester

_NUMBERING = threading.Lock()
_RUNNING = threading.local()
_MANY = 32  # leaves
_NUMBERS = (bool, int, float, complex)

Layout = tuple[Any, ...]
Flat = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]


def encode(number: int) -> tuple[Any, ...]:
    """An Outcome's number as an array-free pytree of tuples and None; `_core.decode` reads it."""
    return tuple(() if bit == "1" else None for bit in reversed(f"{number:b}")) if number else ()


class Plan:
    """Everything a trace needs besides the live objects of a call. Holds nothing of the user's but options."""

    def __init__(
        self,
        name: str,
        place: types.FunctionType,
        signature: Signature,
        options: Options,
        on_trace: Callable[[list[str]], None],
    ) -> None:
        self.name = name
        self.place = place
        self.signature = signature
        self.options = options
        self.on_trace = on_trace
        self.donate, patterns = split_patterns(options.donate)
        self.donate_patterns = [of_arguments(text, name, "donate=") for text in patterns]
        self.dynamic, patterns = split_patterns(options.dynamic)
        self.dynamic_patterns = [of_arguments(text, name, "dynamic=") for text in patterns]

    def record(
        self, roots: tuple[Any, ...], layout: Layout, shapes: bool = False
    ) -> tuple[list[Any], _core.GraphDef, tuple[str, ...]]:
        """(leaves, GraphDef, one name a root) of the roots of a call."""
        names = self.signature.root_names(layout)
        flags = self.signature.root_flags(layout, self.options.static, self.dynamic)
        aliases, dynamic = self.donates(roots, layout), self.dynamic_in(roots, names, flags, shapes)
        leaves, graphdef = _core.record(roots, names, flags, layout, aliases, shapes, dynamic)
        return leaves, graphdef, names

    def tracing(self, roots: tuple[Any, ...], layout: Layout, shapes: bool) -> _core.Trace:
        names = self.signature.root_names(layout)
        flags = self.signature.root_flags(layout, self.options.static, self.dynamic)
        aliases, dynamic = self.donates(roots, layout), self.dynamic_in(roots, names, flags, shapes)
        return _core.Trace(roots, names, flags, aliases, shapes, dynamic)

    def dynamic_in(
        self, roots: tuple[Any, ...], names: tuple[str, ...], flags: Sequence[int], shapes: bool
    ) -> Callable[[tuple[Any, ...]], bool] | None:
        """By key path, which Python numbers in these roots are traced."""
        return dynamic_in(self.dynamic_patterns, roots, names, flags, shapes)

    def handles(self, roots: tuple[Any, ...], layout: Layout) -> list[bool]:
        """One flag a root: is it packed state, whose memory a call may use?"""
        arguments = self.signature.arguments(layout) if self.options.mutation == "propagate" else 0
        return [i < arguments and is_donated(root) for i, root in enumerate(roots)]

    def donates(self, roots: tuple[Any, ...], layout: Layout) -> bool:
        return self.options.donates or any(self.handles(roots, layout))


def dynamic_in(
    patterns: Sequence[Pattern], roots: tuple[Any, ...], names: tuple[str, ...], flags: Sequence[int], shapes: bool
) -> Callable[[tuple[Any, ...]], bool] | None:
    """By key path, which Python numbers in these roots patterns cover.

    A recording asks for the first path of a number. One in an object that is reached again may be meant by another.
    """
    test = tester(patterns, names)
    if test is None:
        return None
    graphdef = _core.record(roots, names, flags, None, False, shapes, test)[1]
    if not graphdef._shares:  # pyright: ignore[reportPrivateUsage]
        return test
    covering, rows = Covering(graphdef, names), graphdef.instructions()
    covered = {pc for pattern in patterns for pc in covering.of(pattern).statics if type(rows[pc][3]) in _NUMBERS}
    again = {place_name(rows[pc][0], names) for pc in covered}
    return (lambda path: test(path) or place_name(path, names) in again) if again else test


def flat_function(
    plan: Plan,
    layout: Layout,
    donated: Sequence[bool],
    outcomes: list[_core.Outcome],
    by_value: bool,
    shapes: bool = False,
) -> Callable[..., Flat]:
    """The function that JAX sees: arrays to (result leaves, write-back leaves, number of the Outcome).

    With `shapes` nothing will run, and the roots may hold `jax.ShapeDtypeStruct` in place of arrays.
    """

    def flat(*leaves: Any) -> Flat:
        active = _core.active_call(outcomes)
        if active is None:
            raise GraftaxError(f"{plan.name} was traced outside of a call")
        caller, roots = active
        outcome, out = trace(plan, caller, roots, layout, leaves, donated, by_value, shapes)
        with _NUMBERING:  # two threads may trace one entry at once
            number = len(outcomes)
            outcomes.append(outcome)
        n = outcome.result_leaves
        return tuple(out[:n]), tuple(out[n:]), encode(number)

    flat.__name__ = flat.__qualname__ = plan.name
    flat.__wrapped__ = plan.place  # type: ignore[attr-defined]
    return flat


def place_of(function: types.FunctionType, packed: bool = False) -> types.FunctionType:
    """A function of leaves that does nothing, with `function`'s name and place in its source: what JAX's messages name.

    It holds nothing of the user's but those three facts. As for JAX, a wrapper's are those of the function in it.
    """

    def nothing(*leaves: Any) -> None:
        del leaves

    def nothing_packed(leaves: Any) -> None:
        del leaves

    with contextlib.suppress(ValueError):  # a circle
        inner = inspect.unwrap(function)
        function = inner if isinstance(inner, types.FunctionType) else function
    code = function.__code__
    where = (nothing_packed if packed else nothing).__code__.replace(
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
        co_name=code.co_name,
        co_qualname=code.co_qualname,
    )
    return types.FunctionType(where, {}, code.co_name)


def trace(
    plan: Plan,
    caller: _core.Caller,
    roots: tuple[Any, ...],
    layout: Layout,
    leaves: Sequence[Any],
    donated: Sequence[bool],
    by_value: bool,
    shapes: bool,
) -> tuple[_core.Outcome, list[Any]]:
    """Runs the caller's function on the graph rebuilt around `leaves`. Returns the Outcome and its output leaves."""
    signature, options = plan.signature, plan.options
    attributes = dict(vars(caller))
    uses_up = options.mutation == "propagate"

    def call(values: list[Any]) -> Any:
        result = signature.call(caller._function, roots, values, layout, plan.name, uses_up)
        if options.captured and keep_attributes(caller, attributes):
            raise MutationError(ATTRIBUTE_SET.format(name=plan.name))
        return result

    # A forwarded input would keep its own sharding, whatever the options say.
    forward = options.in_shardings is None and options.out_shardings is None
    tracing = plan.tracing(roots, layout, shapes)
    outcome, out, changed, lost = run_trace(
        plan.name, tracing, roots, leaves, call, options.mutation, by_value=by_value, forward=forward, donated=donated
    )
    plan.on_trace(changed if lost else [])
    return outcome, out


def run_trace(
    name: str,
    tracing: _core.Trace,
    roots: tuple[Any, ...],
    leaves: Sequence[Any],
    call: Callable[[list[Any]], Any],
    mutation: str,
    *,
    by_value: bool,
    forward: bool,
    donated: Sequence[bool] = (),
    arrays: bool = False,
) -> tuple[_core.Outcome, list[Any], list[str], bool]:
    """Runs `call` on the roots rebuilt around `leaves`, whatever happens leaves the caller's objects as they were.

    With `arrays`, NumPy arrays that `call` makes are output leaves, and not constants.

    Returns:
        (the Outcome, its output leaves, the paths of changes, whether these are lost with it).
    """
    try:
        values = tracing.rebuild(leaves)
        running: list[Any] = _RUNNING.__dict__.setdefault("traces", [])
        running.append((roots, values))
        since = len(equations())
        try:
            outcome, out, changed, lost = tracing.finish(call(values), by_value, forward, donated, arrays)
            warn_of_copies(name, running, since)
        except (jax.errors.JAXTypeError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, jax.errors.JAXTypeError) or OF_A_TRACE in str(error):
                rename_leaves(error, tracing.leaf_paths())
            raise
        except GlobalAssigned as error:
            assigned = ", ".join(error.args[0])
            raise MutationError(GLOBAL_ASSIGNED.format(name=name, names=assigned)) from None
        finally:
            running.pop()
            tracing.restore()
        if mutation == "error" and changed:
            raise MutationError(MUTATION_FORBIDDEN.format(name=name, paths=", ".join(changed)))
        if not tracing.verify(roots):
            raise ConcurrentChangeError(
                CHANGED_BEHIND.format(name=name, path="one of its arguments or captured objects")
            )
        return outcome, out, changed, lost
    finally:
        tracing.close()


def running_traces() -> list[tuple[Sequence[Any], Sequence[Any]]]:
    """(the caller's roots, the rebuilt ones) of each trace that this thread is in."""
    return list(_RUNNING.__dict__.get("traces", ()))


def keep_attributes(caller: _core.Caller, attributes: dict[str, Any]) -> bool:
    """Puts the attributes of a jitted function back to what they were. True where the function has changed them."""
    now = vars(caller)
    if now.keys() == attributes.keys() and all(now[k] is v for k, v in attributes.items()):
        return False
    now.clear()
    now.update(attributes)
    return True


def leaf_names(graphdef: _core.GraphDef, root_names: tuple[str, ...]) -> list[str]:
    """One name a leaf: `params['w']`, `model.layers[0].bias`."""
    return [place_name(path, root_names) for path in graphdef.leaf_paths()]


def build_entry(
    plan: Plan,
    caller: _core.Caller,
    roots: tuple[Any, ...],
    layout: Layout,
    graphdef: _core.GraphDef,
    leaves: list[Any],
    context: Any,
    staged: bool = False,
) -> _core.Entry:
    """Makes the jit object for one structure. Nothing is traced yet, unless out_shardings has a structure.

    With many leaves the flat function takes one tuple of them, where no option speaks of single leaves: JAX traces a
    thousand arguments half as fast as a tuple of a thousand. A `staged` entry is lowered or traced, not called.
    """
    options = plan.options
    outcomes: list[_core.Outcome] = []
    donated, jit_options = leaf_options(plan, roots, layout, graphdef)
    flat = flat_function(plan, layout, donated, outcomes, options.by_value, staged)
    if options.out_shardings is not None:
        spec = options.out_shardings
        if is_prefix(spec):
            probed: list[_core.Outcome] = []
            probe = flat_function(plan, layout, donated, probed, options.by_value, staged)
            _core.run_active(caller, roots, probed, jax.eval_shape, probe, *leaves)
            outcome = probed[-1]
            paths = outcome.leaf_paths()[: outcome.result_leaves]
            spec = tuple(spec_at(spec, p[1:] if p and isinstance(p[0], int) else p, "the result") for p in paths)
        jit_options["out_shardings"] = (spec, None, None)
    in_tuple = not staged and len(leaves) >= _MANY and not donated and options.in_shardings is None
    unasked = any(plan.handles(roots, layout)) and options.donate_word not in ("warn", "warn-except-first")
    quiet = Quiet() if (unasked or options.donate_word in ("all", "all-except-first")) and not staged else None
    if quiet is not None:
        flat = quiet.around(flat)
    compiled: Any = jax.jit(taking_tuple(flat) if in_tuple else flat, **jit_options)
    if quiet is not None:
        compiled = quiet.run(compiled)
    return _core.Entry(graphdef, context, compiled, outcomes, plan.signature.arguments(layout), in_tuple)


def taking_tuple(flat: Callable[..., Flat]) -> Callable[[tuple[Any, ...]], Flat]:
    """The flat function over one tuple of leaves."""

    def packed(leaves: tuple[Any, ...]) -> Flat:
        return flat(*leaves)

    packed.__name__ = packed.__qualname__ = flat.__name__
    packed.__wrapped__ = place_of(flat.__wrapped__, packed=True)  # type: ignore[attr-defined]
    return packed


class Quiet:
    """Silences JAX's warning of donated buffers that it could not reuse, from a trace until its call has returned.

    Only a trace leads to a compilation, so a call that needs none pays nothing.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def around(self, flat: Callable[..., Flat]) -> Callable[..., Flat]:
        """`flat`, with the filter set up once it is traced."""

        @functools.wraps(flat)
        def traced(*leaves: Any) -> Flat:
            stack = contextlib.ExitStack()
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            self._local.__dict__.setdefault("stacks", []).append(stack)
            return flat(*leaves)

        traced.__wrapped__ = flat.__wrapped__  # type: ignore[attr-defined]
        return traced

    def run(self, compiled: Any) -> Any:
        """`compiled`, with the filter taken down at the end."""

        @functools.wraps(compiled)
        def run(*leaves: Any) -> Any:
            stacks: list[contextlib.ExitStack] = self._local.__dict__.setdefault("stacks", [])
            depth = len(stacks)
            try:
                return compiled(*leaves)
            finally:
                while len(stacks) > depth:
                    stacks.pop().close()

        for name in ("lower", "trace", "_cache_size"):
            setattr(run, name, getattr(compiled, name))
        return run


def leaf_options(
    plan: Plan, roots: tuple[Any, ...], layout: Layout, graphdef: _core.GraphDef
) -> tuple[list[bool], dict[str, Any]]:
    """jit's options, spelled for the flat leaves: (which leaves are donated, keyword arguments of `jax.jit`)."""
    options, out = plan.options, dict[str, Any]()
    donated: list[bool] = []
    if plan.dynamic_patterns:
        covered_places(plan, graphdef, plan.signature.root_names(layout), "dynamic=")
    donates = plan.donates(roots, layout)
    if donates or options.in_shardings is not None:
        one_root = len(plan.signature.root_names(layout)) == 1
        where = [(0, p) if one_root else (p[0], p[1:]) for p in graphdef.leaf_paths()]
        if donates:
            donated = donated_leaves(plan, roots, layout, graphdef)
            out["donate_argnums"] = tuple(i for i, d in enumerate(donated) if d)
        if options.in_shardings is not None:
            places = sharding_places(plan, layout, [root for root, _ in where])
            out["in_shardings"] = tuple(
                None if place is None else spec_at(options.in_shardings, (SequenceKey(place), *path), "the arguments")
                for place, (_, path) in zip(places, where, strict=True)
            )
    if options.keep_unused:
        out["keep_unused"] = True
    if options.inline:
        out["inline"] = True
    if options.compiler_options:
        out["compiler_options"] = dict(options.compiler_options)
    return donated, out


def donated_leaves(plan: Plan, roots: tuple[Any, ...], layout: Layout, graphdef: _core.GraphDef) -> list[bool]:
    """One flag a leaf. An array in two places is one leaf: it is donated where both are, an error where one is."""
    whole, handles = donated_roots(plan, layout), plan.handles(roots, layout)
    names = plan.signature.root_names(layout)
    places: list[tuple[int, tuple[Any, ...]]] = graphdef._leaf_places()  # pyright: ignore[reportPrivateUsage]
    covered = covered_places(plan, graphdef, names, "donate=") if plan.donate_patterns else [False] * len(places)
    donated: dict[int, tuple[bool, str]] = {}
    for (leaf, path), is_covered in zip(places, covered, strict=True):
        name = place_name(path, names)
        root, below = (0, path) if len(names) == 1 else (path[0], path[1:])
        flag = is_covered or whole[root] or (handles[root] and is_array_of_handle(below))
        if donated.setdefault(leaf, (flag, name))[0] != flag:
            first, second = donated[leaf][1], name
            gone, kept = (second, first) if flag else (first, second)
            raise StructureError(DONATED_AND_KEPT.format(name=plan.name, donated=gone, kept=kept))
    return [donated[i][0] for i in range(len(donated))]


def covered_places(plan: Plan, graphdef: _core.GraphDef, names: tuple[str, ...], option: str) -> list[bool]:
    """One flag a place of a leaf: do the patterns of `donate=` or `dynamic=` cover it?

    Raises:
        StructureError: where a pattern means nothing that is there. Spelt wrong, it would have no effect.
    """
    patterns = plan.donate_patterns if option == "donate=" else plan.dynamic_patterns
    covering = Covering(graphdef, names)
    covered: set[int] = set()
    for pattern in patterns:
        cover = covering.of(pattern)
        if not cover.anything:
            rows = graphdef.instructions()
            if option == "donate=":
                there, what = [path for path, op, *_ in rows if op == "leaf"], "no array"
            else:
                there = [path for path, op, _, value in rows if op == "static" and type(value) in _NUMBERS]
                what = "no static number"
            paths = nearest(pattern.text, (place_name(path, names) for path in there)) or what
            raise StructureError(NOWHERE.format(name=plan.name, option=option, pattern=pattern.text, paths=paths))
        covered |= cover.leaves
    return [pc in covered for pc in covering.leaves]


def donated_roots(plan: Plan, layout: Layout) -> list[bool]:
    """One flag a root: are its arrays donated?"""
    signature, options = plan.signature, plan.options
    flags = signature.flags(layout, plan.donate)
    if options.donate_word != "none":
        first = options.donate_word.endswith("except-first")
        arguments = signature.arguments(layout)
        flags = [i < arguments and not (first and i == 0) for i in range(len(flags))]
    return flags


def sharding_places(plan: Plan, layout: Layout, roots: list[int]) -> list[int | None]:
    """Where in `in_shardings` each of these roots stands: as in JAX, static arguments do not count; what the function
    captures, and `self` of a bound method, have no place."""
    skip, arguments = plan.signature.skip, plan.signature.arguments(layout)
    static = plan.signature.flags(layout, plan.options.static)
    return [None if root < skip or root >= arguments else sum(not s for s in static[skip:root]) for root in roots]


def is_prefix(spec: Any) -> bool:
    """Does this sharding argument have a structure, rather than being one for all leaves?"""
    return isinstance(spec, (tuple, list, dict)) and not isinstance(spec, PartitionSpec)


def spec_at(spec: Any, path: Sequence[Any], of: str) -> Any:
    """The entry of a prefix tree that covers the leaf at `path`."""
    whole = spec
    for i, key in enumerate(path):
        if not is_prefix(spec):
            return spec
        try:
            if isinstance(key, SequenceKey):
                spec = spec[key.idx]
            elif isinstance(key, DictKey):
                spec = spec[key.key]
            elif isinstance(key, GetAttrKey):
                spec = getattr(spec, key.name) if not isinstance(spec, dict) else spec[key.name]
            else:
                spec = spec[key.key]
        except (IndexError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(NO_SHARDING.format(spec=whole, of=of, path=keystr(tuple(path[: i + 1])))) from error
    if is_prefix(spec):
        raise ValueError(SHARDING_TOO_DEEP.format(spec=spec, of=of, path=keystr(tuple(path))))
    return spec
