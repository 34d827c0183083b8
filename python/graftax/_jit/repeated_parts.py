# SPDX-License-Identifier: Apache-2.0
"""Parts of a trace that repeat: a call of a method on an object like an earlier one takes the jaxpr of that call.

The first call of a part is traced by itself, on copies of its arguments, as a transform does it. A later one takes its
program if its arguments, and what the part reads besides, have the structure and the types that they had then. If a
part does more than a program can repeat, the trace of the whole function begins anew without sharing it.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._capture.bytecode import names_of
from graftax._capture.code_by_identity import IdentitySet
from graftax._capture.code_owner import HEAP_TYPE
from graftax._capture.namespaces import Rebuilt, Views
from graftax._capture.numbers.symbols import ScalarSymbol, Symbol
from graftax._capture.retrace_signals import NewReads
from graftax._graph.array_aliases import Source, merge_aliases, recording_aliases
from graftax._jax.arrays import ref_types
from graftax._jax.compilation import own_jit
from graftax._jax.equations import count_equations
from graftax._jax.nested_jit import tracing_part
from graftax._jax.part_programs import jit_of_calls, runs_foreign_code
from graftax._jax.traces import current_trace, equations, is_of_trace, trace_context
from graftax._jit.cache import FunctionTable
from graftax._jit.lost_sharing import has_alias_pairs
from graftax._jit.repeated_option import Selection

_MOST_MISSES = 4  # of a function none of whose calls has taken the program of another one
_MOST_OBSERVED = 64  # calls in one trace: each costs a comparison of what the trace reads
# With "auto", a part has to pay: each call of a program costs about as much as this many equations.
_FEWEST_EQUATIONS, _FEWEST_CALLS = 30, 4
# Calls of a function before it is asked about, if nothing says beforehand that it is called often.
_CALLS_BEFORE = 2
_VARARGS, _VARKEYWORDS = 0x04, 0x08  # flags of code
_NEVER = 0x20 | 0x80 | 0x200  # generators and coroutines


class _Outside(NamedTuple):
    """What is outside of a part, and may be read by it, at one moment: under these origins, and in its closure."""

    function: Callable[..., Any] | None
    graphdef: _core.GraphDef
    leaves: list[Any]
    nodes: list[Any]
    keys: set[tuple[int, str | None]]

    def is_same(self, other: _Outside) -> bool:
        """Is everything as it was? Arrays and objects are compared by identity."""
        pairs = zip((*self.leaves, *self.nodes), (*other.leaves, *other.nodes), strict=False)
        is_alike = self.keys == other.keys and self.graphdef == other.graphdef
        return is_alike and len(self.nodes) == len(other.nodes) and all(a is b for a, b in pairs)


class _Refused(Exception):
    """A part cannot be shared."""


class _Observation(NamedTuple):
    """The state of a trace before a call that was traced as it is. The second call of the part compares it."""

    outside: _Outside
    impure_calls: int | None  # how many the trace had made; None if nobody listens to them
    size: int  # in equations


class _Part:
    """The program of one call, which later calls take.

    Attributes:
        calls: how many have taken it, the first one included.
        size: how many equations its program has.
    """

    def __init__(self, function: types.FunctionType, name: str, arguments: tuple[object, ...]) -> None:
        self.function, self.name, self.calls, self.size = function, name, 1, 0
        names = function.__code__.co_varnames[: len(arguments)]
        self.recording = _core.Recording(arguments, names, [0] * len(names))
        self.graphdef, self.context = self.recording.graphdef, trace_context()
        self.types = [jax.typeof(leaf) for leaf in self.recording.leaves]
        self.rebuilt: list[int] = []  # the tracked nodes of which the trace has copies
        self.reached: list[Any] = []  # the nodes that its result and its arguments lead to after the call
        self.codes: list[types.CodeType] = []  # of all frames that ran in it
        self.outer: dict[int, Any] = {}  # outputs that are arrays of the trace around it
        self.sources: list[Source | None] = []  # what outputs were computed from, by operations that keep aliases
        self.outcome: _core.Outcome | None = None
        self.outside: _Outside | None = None
        self.observed: _Observation | None = None  # before the first call, where that was traced as it is
        self.unshared_calls = 0  # after the first one, while it has no program
        self.program: Any = None

    def can_be_shared(self) -> bool:
        """Are the arguments traced arrays and static values, with at least one array?"""
        leaves = self.recording.leaves
        has_symbols = bool(self.recording.instances((ScalarSymbol, Symbol)))
        return bool(leaves) and not has_symbols and all(isinstance(leaf, Tracer) for leaf in leaves)

    def takes(self, leaves: Sequence[object]) -> bool:
        """Can its program take these arrays?"""
        return self.context == trace_context() and self.types == [jax.typeof(leaf) for leaf in leaves]

    def run(self, run_trace: Callable[..., object], arguments: tuple[object, ...], leaves: Sequence[object]) -> Any:
        """Traces the call, and returns its jaxpr."""
        pending = [arguments]  # empty once the call was traced

        def call(values: list[Any]) -> Any:
            copied = _core.walk(self.graphdef, tuple(values))
            original = _core.walk(self.graphdef, arguments)
            if copied is None or original is None:
                raise _Refused
            self.rebuilt = [i for i, (a, b) in enumerate(zip(copied[1], original[1], strict=True)) if a is not b]
            result = _call(self.function, values)
            self.reached = _core.Recording((result, *values), ("",) * (1 + len(values)), ()).nodes
            return result

        def flat(*traced: object) -> tuple[Any, ...]:
            if not pending:  # JAX asks for another trace than that of the first call
                raise _Refused
            roots = pending.pop()
            with tracing_part(), recording_aliases(leaves, traced) as aliases:
                run_arguments = self.name, self.recording, roots, traced, call, "propagate"
                options = {"by_value": False, "forward": True}
                self.outcome, outputs, _, _ = _core.run_active(
                    None, roots, [], None, lambda: run_trace(*run_arguments, **options)
                )
                self.sources = aliases.sources(outputs)
            if any(isinstance(output, ref_types) for output in outputs):
                raise _Refused
            # An array that the part has from the trace around it, such as a global, is not an output of its jaxpr.
            trace = current_trace()
            self.outer = {
                i: output
                for i, output in enumerate(outputs)
                if isinstance(output, Tracer) and not is_of_trace(output, trace)
            }
            return tuple(output for i, output in enumerate(outputs) if i not in self.outer)

        flat.__name__ = flat.__qualname__ = self.name
        jaxpr = own_jit(flat).trace(*leaves).jaxpr
        self.program = jit_of_calls(flat, jaxpr)
        return jaxpr

    def apply(self, leaves: list[Any], nodes: list[Any]) -> Any:
        """Runs the program for these arrays, and does to these objects what the first call has done to its own."""
        computed = iter(self.program(*leaves))
        outcome = self.outcome
        assert outcome is not None
        values = [self.outer[i] if i in self.outer else next(computed) for i in range(outcome.num_leaves)]
        # Results of one operation are one array if its inputs are, which differs from call to call.
        if any(self.sources):
            rows = [
                (source.operation, tuple(leaves[i] for i in source.inputs), values[k])
                for k, source in enumerate(self.sources)
                if source
            ]
            merged = iter(merge_aliases(rows))
            values = [next(merged) if source else value for source, value in zip(self.sources, values, strict=True)]
        return outcome.apply(values, leaves, nodes)


def _call(function: types.FunctionType, values: list[Any]) -> Any:
    """Calls a function with the values of all of its parameters, in their order."""
    code = function.__code__
    positional, end = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    keywords = dict(zip(code.co_varnames[positional:end], values[positional:end], strict=True))
    collected = list(values[end:])  # the values of *args and **kwargs
    extra = collected.pop(0) if code.co_flags & _VARARGS else ()
    named = collected.pop(0) if code.co_flags & _VARKEYWORDS else {}
    return _core.call_unanswered(function, *values[:positional], *extra, **keywords, **named)


class RepeatedParts:
    """The parts of one running trace.

    Args:
        repeated: the option.
        table: of the traced function.
        graph: of the trace. It calls `begin` when the trace runs.
        recording: returns the recording of the roots, which may become more.
        run_trace: traces a call.
    """

    def __init__(
        self,
        repeated: object,
        table: FunctionTable,
        graph: Rebuilt,
        recording: Callable[[], _core.Recording],
        run_trace: Callable[..., object],
    ) -> None:
        assert table.reads is not None
        self._selection, self._table, self._reads = Selection(repeated), table, table.reads
        self._graph, self._recording, self._run_trace = graph, recording, run_trace
        self._instances = dict[type, int]()  # the classes with several objects, and how many
        self._named = set[int]()  # the ids of code that is asked about from its first call on
        self._skipped = IdentitySet[types.CodeType]()  # code that is not worth it, or not clean, in this trace
        self._unfit = Counter[int]()  # calls with arguments that no program takes, by the id of a function in `_parts`
        self._observed = 0  # the number of observed calls
        self._size_of_parts = 0  # the equations of all parts that were called
        self._parts: dict[int, list[_Part]] = {}  # by the id of the function, which they hold
        self._running: list[list[_Outside]] = []  # for each part that is being traced, innermost last: what was before
        graph.answer_calls = self.begin
        if graph.take_in is not None:
            graph.take_in = functools.partial(self._take_in, graph.take_in)

    def begin(self) -> None:
        """From now on calls are answered."""
        self._count_instances()
        # One function applied to both of two shared arrays is found by its equations, which parts would hide.
        answers_all = self._selection.is_auto and not has_alias_pairs(self._recording())
        selection, after = self._selection, _CALLS_BEFORE if answers_all else -1
        codes = selection.codes(self._instances.keys())
        self._named = set(map(id, codes))
        _core.answer_calls(self.answer, codes, selection.is_all, after)

    def _count_instances(self) -> None:
        counts, _ = self._recording().graphdef._types()  # pyright: ignore[reportPrivateUsage]
        fewest = _FEWEST_CALLS if self._selection.is_auto else 2
        self._instances = {c: count for c, count in counts.items() if count >= fewest and c.__flags__ & HEAP_TYPE}

    def end(self) -> list[str]:
        """Lets go of all parts. Returns texts that say what was shared, and what was not and why."""
        shared = [(part.name, part.calls) for parts in self._parts.values() for part in parts if part.calls > 1]
        self._parts.clear()
        unshared = self._table.unrepeated_reasons.items()
        return [
            *(f"{name}: traced once for {calls} calls" for name, calls in shared),
            *(f"{name}: traced at each call, because {reason}" for name, reason in unshared),
        ]

    def answer(self, function: types.FunctionType, arguments: tuple[object, ...]) -> Any:
        """Answers a call in place of its frame, which the core asks about before it runs.

        Returns:
            (what the call returns,). NotImplemented if this call is traced as it is, None if all of its code are.
        """
        code, selection = function.__code__, self._selection
        if code in self._table.unrepeated or code in self._skipped or code.co_flags & _NEVER:
            return None
        if not selection.selects(function, arguments, self._instances.keys()):
            return NotImplemented if selection.is_all or id(code) in self._named else None
        if function.__closure__ and _core.made_in_trace(function):  # it may have captured anything of this trace
            return NotImplemented
        parts = self._parts.setdefault(id(function), [])
        match = self._find(parts, arguments)
        if match is None and len(parts) >= _MOST_MISSES and all(part.calls == 1 for part in parts):
            self._skipped.add(function.__code__)
            return None
        if match is None:
            try:
                part = _Part(function, selection.name(function, arguments), arguments)
            except Exception:  # also of a registered class whose object is not complete yet
                return NotImplemented
            # A walk knows only types that were recorded, and this may be the first tracer of its kind: once more.
            match = self._find(parts, arguments)
            if match is None:
                return self._observe(part, parts) if selection.is_auto else self._trace(part, arguments, parts)
        part, leaves, nodes = match
        # Its first call was observed.
        if part.program is None:
            part.unshared_calls += 1
            if part.unshared_calls < self._calls_to_wait_for(arguments):
                return NotImplemented
            return self._trace(part, arguments, parts) if self._pays(part) else NotImplemented
        part.calls += 1
        self._note_codes(part)
        return (self._apply(part, leaves, nodes),)

    def _observe(self, part: _Part, parts: list[_Part]) -> Any:
        """The first call is traced as it is, so that a part which cannot be shared costs and changes nothing."""
        if self._running:  # within a part, which is traced once anyway
            return NotImplemented
        if self._observed >= _MOST_OBSERVED:
            return None
        if not part.can_be_shared():
            self._unfit[id(part.function)] += 1
            if self._unfit[id(part.function)] < _MOST_MISSES:
                return NotImplemented
            self._skipped.add(part.function.__code__)
            return None
        self._observed += 1
        outside = self._outside(self._keys_apart_from(part.recording.nodes), part.function)
        if outside is not None:
            heard = self._reads.impure.count_heard()
            part.observed = _Observation(outside, heard, self._size)
            parts.append(part)
        return NotImplemented

    def _calls_to_wait_for(self, arguments: tuple[object, ...]) -> int:
        """The number of calls after which the next one is traced by itself.

        It costs about as much as two calls, and XLA fuses nothing across it. So for two or three equal layers among
        many others, as in a ResNet, nothing would be gained.
        """
        obj = arguments[0] if arguments else None
        if type(obj) not in self._instances:
            return 1
        like = _core.Recording((obj,), ("",), ())
        shapes = list(map(np.shape, like.leaves))
        equal = 0
        for other in self._recording().objects_of(type(obj)):
            walked = _core.walk(like.graphdef, (other,))
            equal += walked is not None and list(map(np.shape, walked[0])) == shapes
        return 1 if equal >= _FEWEST_CALLS else _FEWEST_CALLS - 1

    def _pays(self, part: _Part) -> bool:
        """Did the first call of a part show that it is large enough to share, and that it has no other effects?"""
        observed = part.observed
        if observed is None or self._running:
            return False
        is_large = self._size - observed.size >= _FEWEST_EQUATIONS
        is_clean = self._is_unchanged(observed.outside)
        heard = self._reads.impure.count_heard()
        if is_large and is_clean and heard is not None and heard == observed.impure_calls:
            return True
        self._skipped.add(part.function.__code__)
        return False

    def _find(self, parts: list[_Part], arguments: tuple[object, ...]) -> tuple[_Part, list[Any], list[Any]] | None:
        """(the part whose program a call may take, its leaves, its tracked nodes)."""
        for part in parts:
            walked = _core.walk(part.graphdef, arguments)
            if walked is not None and part.takes(walked[0]) and self._may_take(part, walked[1]):
                return part, *walked
        return None

    def _may_take(self, part: _Part, nodes: list[Any]) -> bool:
        """Is what the part reads besides its arguments as it was, and separate from these arguments?"""
        if part.outside is None:
            return True
        outside = self._outside(part.outside.keys, part.function)
        return outside is not None and part.outside.is_same(outside) and not _overlap(part.rebuilt, nodes, outside)

    def _trace(self, part: _Part, arguments: tuple[object, ...], parts: list[_Part]) -> Any:
        """Traces the call by itself, and answers it with the program that later calls take, too."""
        if not part.can_be_shared():
            return NotImplemented
        if part.observed is not None:  # its arrays are those of the first call
            parts.remove(part)
            part = _Part(part.function, part.name, arguments)
        leaves, before = part.recording.leaves, self._outside(None, part.function)
        if before is None:
            return NotImplemented
        # The state before, to see what the part changes besides its arguments and which code runs in it.
        around, heard = _core.note_codes(part.codes), self._reads.impure.count_heard()
        self._running.append([before])
        try:
            jaxpr = part.run(self._run_trace, arguments, leaves)
            walked = _core.walk(part.graphdef, arguments)
            if walked is None:
                raise _Refused("it changes its arguments other than through the copies that it is given")
            part.size = count_equations(jaxpr)
            if self._selection.is_auto and part.size < _FEWEST_EQUATIONS:
                raise _Refused("it is small")
            if reason := self._reason_against(part, jaxpr, walked[1]):
                raise _Refused(reason)
        except Exception as error:  # also of the user's own code: without the part it is raised where they expect it
            reason = str(error) if isinstance(error, _Refused) else f"it raises {type(error).__name__} by itself"
            # With "auto" the user has not asked for it: unless the attempt has changed something, the trace goes on.
            if self._selection.is_auto and self._left_nothing(part, arguments, before, heard):
                self._table.unrepeated_reasons[part.name] = reason
                self._table.unrepeated.add(part.function.__code__)
                return NotImplemented
            raise self._refuse(part, reason) from None
        finally:
            self._running.pop()
            _core.note_codes(around)
        self._note_codes(part, around)
        parts.append(part)
        return (self._apply(part, *walked),)

    def _left_nothing(self, part: _Part, arguments: tuple[object, ...], before: _Outside, heard: int | None) -> bool:
        """Has the trace of a part that is refused changed nothing? Then the call may be traced as it is."""
        is_same = self._is_unchanged(before) and _core.walk(part.graphdef, arguments) is not None
        return is_same and self._reads.impure.count_heard() == heard

    @property
    def _views(self) -> Views:
        assert self._graph.views is not None  # the trace runs
        return self._graph.views

    @property
    def _size(self) -> int:
        """How many equations the running trace has, those of the parts included."""
        return len(equations()) + self._size_of_parts

    def _apply(self, part: _Part, leaves: list[Any], nodes: list[Any]) -> Any:
        self._size_of_parts += part.size
        try:
            return part.apply(leaves, nodes)
        except _Refused:
            raise self._refuse(part, "JAX traces it more than once") from None

    def _refuse(self, part: _Part, reason: str) -> NewReads:
        """The exception with which the trace of the whole function begins anew. It will not share this part."""
        self._table.unrepeated.add(part.function.__code__)
        self._table.unrepeated_reasons[part.name] = reason
        return self._reads.signals.give()

    def _take_in(self, take_in: Callable[[], bool]) -> bool:
        """The trace takes in more roots, of which the parts that run know nothing yet."""
        count = len(self._views.origins)
        if not take_in():
            return False
        if self._selection.is_auto:  # there may be more classes with several objects now
            self.begin()
        if not self._running:
            return True
        # What they hold now counts as their state before each part that runs.
        outside = self._outside({origin.key for origin in self._views.origins[count:]}, None)
        for befores in self._running:
            befores += [outside] if outside is not None else []
        return True

    def _note_codes(self, part: _Part, noted: list[Any] | None = None) -> None:
        """Adds the code of a part to that of the part around it (`noted`, or that which runs now)."""
        # What this one reads, the other one reads as well. The core returns the present list only when it gets another.
        if noted is None:
            noted = _core.note_codes(None)
            _core.note_codes(noted)
        if noted is not None:
            noted += part.codes

    def _reason_against(self, part: _Part, jaxpr: object, nodes: list[Any]) -> str:
        """Why a later call may not take this program; empty where it may."""
        if not all(map(self._is_unchanged, self._running[-1])):
            return "it changes what is not among its arguments"
        if self._reads.impure.were_made_by(part.codes):
            return "it makes calls that a program cannot repeat"
        if runs_foreign_code(jaxpr):
            return "it calls a function on the host, or has a derivative rule of its own"
        part.outside = self._outside(self._keys_read_by(part.codes), part.function)
        if part.outside is None or _overlap(part.rebuilt, nodes, part.outside):
            return "what it reads by name leads to its arguments"
        handed_over = {id(node) for i, node in enumerate(nodes) if i not in set(part.rebuilt)}
        around = {id(node) for before in self._running[-1] for node in before.nodes} - handed_over
        if any(id(node) in around for node in part.reached):
            return "it returns or keeps an object that is not among its arguments"
        # A later call can check only what it finds under a name.
        named_arrays = {id(leaf) for leaf in part.outside.leaves}
        constants = [*getattr(jaxpr, "consts", ()), *part.outer.values()]
        if any(id(c) not in named_arrays for c in constants if isinstance(c, Tracer)):
            return "it reads an array that it is not given, and that has no name"
        return ""

    def _keys_read_by(self, codes: Sequence[types.CodeType]) -> set[tuple[int, str | None]]:
        """The keys of the origins that such code may read: all but globals that it does not name."""
        names = {name for code in codes for name in (*code.co_names, *names_of(code).texts)}
        computes = any(names_of(code).computes for code in codes)
        origins = self._views.origins
        return {o.key for o in origins if computes or not isinstance(o.holder, dict) or o.name in names}

    def _keys_apart_from(self, nodes: Sequence[object]) -> set[tuple[int, str | None]]:
        """The keys of the origins that do not lead to these objects, which a call may change."""
        ids, apart = set(map(id, nodes)), set[tuple[int, str | None]]()
        for origin, value in self._views.values_now():
            with contextlib.suppress(GraftaxError):
                if ids.isdisjoint(map(id, _core.Recording((value,), (origin.text(),), ()).nodes)):
                    apart.add(origin.key)
        return apart

    def _is_unchanged(self, before: _Outside) -> bool:
        after = self._outside(before.keys, before.function)
        return after is not None and before.is_same(after)

    def _outside(
        self, keys: Collection[tuple[int, str | None]] | None, function: Callable[..., Any] | None
    ) -> _Outside | None:
        """What a function, and the origins with these keys, hold now. None if that cannot be compared.

        Without `keys` all origins.
        """
        origins = self._views.values_now(keys)
        values, names = (function, *(value for _, value in origins)), ("", *(origin.text() for origin, _ in origins))
        try:
            recording = _core.Recording(values, names, ())
        except GraftaxError:
            return None
        origin_keys = {origin.key for origin, _ in origins}
        return _Outside(function, recording.graphdef, recording.leaves, recording.nodes, origin_keys)


def _overlap(rebuilt: Sequence[int], nodes: Sequence[object], outside: _Outside) -> bool:
    """Does what a part reads besides its arguments lead to an object of which it has a copy? They would be two then."""
    ids = {id(node) for node in outside.nodes}
    return any(id(nodes[i]) in ids for i in rebuilt)
