# SPDX-License-Identifier: Apache-2.0
"""The callable that `jit` returns. A call: bind -> flatten -> find the entry -> run -> unflatten -> write back.

A cache hit runs in C++ alone (`core/call/call.cpp`): it binds, replays a recent GraphDef, runs the executable and
applies its Outcome. Python handles a miss, `jax.disable_jit`, errors, and the methods that users call by name.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import operator
import os
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

import jax

from graftax import _core
from graftax._base.errors import CHANGE_LOST, GraftaxError, LostChangeWarning
from graftax._base.given_warnings import note_warning
from graftax._base.handles import is_handle
from graftax._capture.retrace_signals import MOST_RESTARTS, NewReads
from graftax._capture.signature import Signature, global_names, is_called_by_its_class, refuse_generators, resolve
from graftax._capture.unknown_interpreter import warn_of_unknown_interpreter
from graftax._explain import compile_events
from graftax._jax.tracebacks import boundary, caller_level, hide
from graftax._jit import program_store
from graftax._jit.branches_ahead import trace_branches
from graftax._jit.build_entry import build_entry
from graftax._jit.cache import CacheInfo, FunctionTable, remove_copied_table, table_of
from graftax._jit.call_errors import explained_error
from graftax._jit.call_plan import Plan, RecordedCall
from graftax._jit.donation_report import DonationReport, report_of, warn_of_kept
from graftax._jit.flat_function import definition_of
from graftax._jit.miss import entry_of_miss, find_or_build_entry, restart_if_reads_changed
from graftax._jit.options import DONATE, Options, split_patterns
from graftax._jit.pytree_callable import is_pytree
from graftax._jit.requested_donation import refuse_static_donation
from graftax._jit.restarts import refuse_restart
from graftax._jit.result_shapes import result_shapes
from graftax._jit.same_function import keep
from graftax._jit.slow_input_warnings import warn_of_slow_inputs
from graftax._jit.stages import Lowered, Staging, Traced
from graftax._jit.symbolic_call import with_symbols
from graftax._jit.warm import warm

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
T = TypeVar("T")


class Jitted(_core.Caller, Generic[P, R]):
    """The result of `graftax.jit`: a function that is compiled when it is called.

    Called as the function itself. As an attribute of a class it becomes a method.

    Example:
        >>> f = graftax.jit(lambda x, mode: x * 2 if mode == "train" else x)
        >>> f(jnp.ones(2), "train"), f(jnp.ones(2), "test"), f(jnp.zeros(2), "test")
        (Array([2., 2.], dtype=float32), Array([1., 1.], dtype=float32), Array([0., 0.], dtype=float32))
        >>> f.cache_info().traces, f.eval_shape(jnp.ones((3, 4)), "train")
        (2, ShapeDtypeStruct(shape=(3, 4), dtype=float32))
    """

    __wrapped__: Callable[P, R]
    __self__: Any  # of a bound method
    _method_of: Jitted[Any, R]  # of a bound method: the Jitted on the class

    def __init__(self, function: Callable[P, R], options: Options) -> None:
        warn_of_unknown_interpreter()
        name = getattr(function, "__name__", None)
        if not isinstance(name, str):
            name = type(function).__name__
        self._resolve(function, name, options)
        # Only a function's attributes are its wrapper's too; those of a callable object are its own state.
        is_function = isinstance(function, types.FunctionType)
        functools.update_wrapper(self, function, updated=("__dict__",) if is_function else ())
        remove_copied_table(self.__dict__)
        # Unpickling returns this object (`_from_pickle`). A partial or a bound method shares its table with others.
        table = self._table
        if not self._prefix and (table.original is None or table.original() is None):
            table.original = weakref.ref(self)

    def _resolve(self, function: object, name: str, options: Options) -> None:
        """Finds the function to run, its table and its signature. Checks the options against the signature."""
        plain, prefix, can_hold_table = resolve(function)
        refuse_generators(plain)
        table = table_of(function, plain, can_hold_table, options)
        signature = self._signature(plain, len(prefix), options, table)
        signature.check(options.static, "static_arg", name)
        for option in ("donate", "dynamic"):
            chosen, patterns = split_patterns(getattr(options, option))
            signature.check(chosen, option, name, f" Words are {', '.join(DONATE)}." if option == "donate" else "")
            signature.check_patterns(patterns, option, name)
        refuse_static_donation(name, signature, options.static, split_patterns(options.donate)[0])
        is_method = is_called_by_its_class(function)
        self._set_up(name, plain, prefix, table, options, definition_of(plain), signature, is_method)

    def _set_up(
        self,
        name: str,
        plain: types.FunctionType,
        prefix: tuple[object, ...],
        table: FunctionTable,
        options: Options,
        definition: types.FunctionType,
        signature: Signature,
        is_method: bool = False,
    ) -> None:
        self._configure(plain, prefix, table, signature.binding, is_method)
        self._options = options
        on_trace = functools.partial(_on_trace, name, options)
        self._plan = Plan(name, definition, signature, options, on_trace)

    @staticmethod
    def _signature(plain: types.FunctionType, skip: int, options: Options, table: FunctionTable) -> Signature:
        table.check_sharing()  # first, since it may give the table another read set
        reads = table.reads
        if reads is None:
            return Signature.of(plain, skip, options.captured, table.origins)
        if options.captured:  # the globals that the function itself names are roots of their own, and not origins
            reads.names.set_own_globals(plain.__globals__, *global_names(plain))
        hidden, assigned = frozenset(reads.names.hidden), frozenset(reads.names.assigned_own)
        signature = Signature.of(plain, skip, options.captured, table.origins, hidden, assigned)
        # With an older generation the core binds again, since entries for these roots have been dropped meanwhile.
        signature.binding.generation = table.generation
        return dataclasses.replace(signature, numpy_is_constant=table.numpy_is_constant)

    @boundary
    def _rebind(self) -> None:
        """Reads the function's signature again: its code or defaults were replaced, or there are new roots."""
        self._read_signature()
        # For new roots the function is traced again, which must not do twice what may be done only once.
        refuse_restart()

    def _read_signature(self) -> None:
        if self._is_bound and self._method_of._options is self._options:
            self._method_of._rebind()  # the next attribute access binds the method of the class
        plan, plain = self._plan, self._function
        if self._table.reads is not None:
            self._table.reads.run_before()  # what the last trace wants done in plain Python, such as imports
        if self._method is not None and resolve(self.__wrapped__)[0] is not plain:
            self._resolve(self.__wrapped__, plan.name, self._options)  # the `__call__` of its class was replaced
            return
        if plan.signature.code is not plain.__code__:
            self._table.replace_code()
        signature = self._signature(plain, plan.signature.skip, self._options, self._table)
        self._plan = plan.with_signature(signature)
        self._configure(plain, self._prefix, self._table, signature.binding, self._method is not None)

    if TYPE_CHECKING:  # C++ answers the call

        def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    # ---- the arguments of a call

    def _bind_arguments(
        self, args: tuple[object, ...], kwargs: dict[str, object], plan: Plan | None = None
    ) -> tuple[tuple[object, ...], tuple[object, ...]]:
        """(roots, layout) of these arguments, with the current roots or those of a `plan`.

        Raises the function's own TypeError if it does not take these arguments.
        """
        if not plan and self._has_changed():
            self._rebind()
        binding = plan.signature.binding if plan else self._binding
        if plan and not binding.was_read_from(self._function):
            origins = plan.signature.origins
            hidden, assigned = plan.signature.hidden, plan.signature.assigned
            signature_options = plan.signature.skip, plan.options.captured, origins, hidden, assigned
            binding = Signature.of(self._function, *signature_options).binding
        bound = binding.bind(args, kwargs, self._prefix)
        if bound is None:
            # Python itself says best what is wrong with the arguments. The body does not run.
            self._function(*self._prefix, *args, **kwargs)
            raise GraftaxError(f"the arguments of {self._plan.name} could not be bound")
        return bound

    def _retry_with_new_roots(self, run: Callable[[], T]) -> T:
        """Calls `run`, and retries with more roots each time that a trace finds another global or capture."""
        for _ in range(MOST_RESTARTS):
            try:
                return run()
            except NewReads:
                self._rebind()
        return run()

    def _record_arguments(self, args: tuple[object, ...], kwargs: dict[str, object]) -> RecordedCall:
        roots, layout = self._bind_arguments(args, kwargs)
        plan = self._plan
        if plan.signature.binding is not self._binding:
            raise NewReads  # another thread is about to read the signature again
        recording = plan.record(roots, layout, shapes=True)
        restart_if_reads_changed(self, recording, plan)
        return RecordedCall(plan, roots, layout, recording, _core.settings_now()[0])

    def _record_call(self, args: tuple[object, ...], kwargs: dict[str, object]) -> RecordedCall:
        """Records the arguments of a call without making it."""
        return self._retry_with_new_roots(lambda: self._record_arguments(args, kwargs))

    # ---- a miss

    def _begin_trace(self) -> None:
        """Called before each trace. A recorder notes the random states here, and a replay restores them."""

    _entry = boundary(entry_of_miss)  # the core calls it
    _find_or_build_entry = find_or_build_entry

    # Loops outside of traces have functions of their own for these two.

    def _advise(self, call: RecordedCall) -> None:
        warn_of_slow_inputs(self._table, call)

    def _build(self, call: RecordedCall) -> _core.Entry:
        return build_entry(call, earlier=self._table.earlier_entries())

    def _with_symbols(self, call: RecordedCall, opened: _core.Opened, shapes: bool = False) -> RecordedCall:
        return with_symbols(call, self._table, self._function, opened, shapes)

    def _reads(self, entry: _core.Entry) -> _core.Reads | None:
        """The reads that an entry which was just traced depends on. The core calls this after a trace."""
        table = self._table
        table.note_traced(entry)
        table.outgrown = []  # this trace has been compared with them
        compile_events.finish_trace(table)
        if entry.host is None:
            table.numbers.settle()
        else:  # the host's part of the program has grown with the trace
            entry.evaluate = entry.host.compiled(len(entry.outcomes))
        # The values of now: with these the program was traced.
        reads = table.reads and table.reads.reads()
        if reads is not None:
            keep(table.sharing, entry, reads)
        if (store := program_store.current()) is not None:
            store.keep(self, entry)
        return reads

    @boundary
    def _plain(self, *args: object, **kwargs: object) -> Any:
        """Calls the plain function under `jax.disable_jit` or inside another trace, with objects instead of handles."""
        if self._method is not None and self._has_changed():
            self._rebind()
        # In the trace of another call the function reads what that trace shows, and its mode decides about changes.
        if self._options.mutation != "propagate" and _core.is_watched():
            bound = functools.partial(self._function, *self._prefix) if self._prefix else self._function
            from graftax.transforms._engine.lift import run  # circular: it imports this class

            return run(self._plan.name, bound, args, kwargs, self._options.mutation)
        if not any(map(is_handle, (*args, *kwargs.values()))):
            return self._function(*self._prefix, *args, **kwargs)
        roots, layout = self._bind_arguments(args, kwargs)
        plan, uses_up = self._plan, self._options.mutation == "propagate"
        return plan.signature.call(self._function, roots, list(roots), layout, plan.name, uses_up)

    def _explain(
        self,
        error: BaseException,
        roots: tuple[object, ...],
        layout: tuple[object, ...],
        traced: _core.Entry | None = None,
    ) -> BaseException:
        """The exception to raise for a failed call. The core calls this."""
        explained = explained_error(error, self._plan, roots, layout, traced)
        hide(explained)
        return explained

    def _warn_of_kept(self) -> None:
        """Warns that a call has kept much that it could have donated. The core calls this once for an executable."""
        warn_of_kept(self.donation())

    def _trace_branches(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """A call with symbolic numbers has traced the function, and ended. The core calls this."""
        if self._options.branches_ahead:
            trace_branches(self, args, kwargs)

    # ---- ahead of time

    @boundary
    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered[P, R]:
        """Lowers the function for these arguments, without running it, as `jax.jit(f).lower` does.

        Args:
            *args, **kwargs: the arguments of a call. `jax.ShapeDtypeStruct` may stand in place of arrays.

        Returns:
            a `Lowered`: `lower(...).compile()` is a function for arguments of the same structure.

        Raises:
            UnsupportedValueError: if the function uses a value with hidden state, such as an iterator; names its path.
        """
        return Lowered(*self._retry_with_new_roots(lambda: self._staged("lower", args, kwargs)))

    @boundary
    def warm(
        self,
        calls: Iterable[tuple[object, ...] | dict[str, Any]],
        *,
        threads: int = 8,
        progress: Callable[[int, int, float], object] | None = None,
    ) -> None:
        """Compiles programs beforehand, so that these calls neither trace nor compile. Nothing runs or changes.

        Args:
            calls: for each program the arguments of a call: a tuple of positional or a dict of keyword arguments.
                `jax.ShapeDtypeStruct` may stand in place of arrays.
            threads: the number of threads that compile. Traces run one after the other, in the calling thread.
            progress: called as `progress(done, total, seconds)` after each program. By default a terminal shows a line.

        >>> f = graftax.jit(lambda x, mode: x * 2)
        >>> shapes = [jax.ShapeDtypeStruct((n,), "float32") for n in (8, 16)]
        >>> f.warm([(x, mode) for x in shapes for mode in ("train", "test")])
        >>> f.cache_info().traces
        4
        """
        warm(self._lower_as_called, self._plan.name, calls, threads, progress)

    @boundary
    def _lower_as_called(self, *args: object, **kwargs: object) -> Lowered[P, R]:
        """`lower` with the symbolic numbers that a call would have."""
        return Lowered(*self._retry_with_new_roots(lambda: self._staged("lower", args, kwargs, as_called=True)))

    @boundary
    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced[P, R]:
        """Traces the function for these arguments, without running it, as `jax.jit(f).trace` does.

        Args:
            *args, **kwargs: the arguments of a call. `jax.ShapeDtypeStruct` may stand in place of arrays.

        Returns:
            a `Traced`, whose `jaxpr` takes and returns flat leaves.

        Raises:
            UnsupportedValueError: if the function uses a value with hidden state, such as an iterator; names its path.
        """
        return Traced(*self._retry_with_new_roots(lambda: self._staged("trace", args, kwargs)))

    def _staged(
        self, stage: str, args: tuple[object, ...], kwargs: dict[str, object], as_called: bool = False
    ) -> tuple[Staging, Any]:
        call = self._record_arguments(args, kwargs)
        if as_called:
            call = self._with_symbols(call, _core.Opened(), shapes=True)
        plan, recording, entry = call.plan, call.recording, self._find_or_build_entry(call)
        staged = self._run_stage(call, entry, getattr(entry.compiled, stage))
        count, spelling = len(self._prefix), (len(args), tuple(kwargs))
        static = plan.static_arguments(args, kwargs, count, call.layout)
        staging = Staging(self, plan, recording.graphdef, call.layout, recording.names, entry, count, spelling, static)
        return staging, staged

    def _run_stage(self, call: RecordedCall, entry: _core.Entry, run: Callable[..., object]) -> Any:
        leaves = call.recording.leaves
        if call.numbers is not None:
            call.numbers.resume(entry.host)  # another call may have made the entry
            leaves = call.numbers.inputs_for(leaves)
        flat_arguments = (tuple(leaves),) if entry.tupled else leaves
        staged = _core.run_active(self, call.roots, entry.outcomes, call.recording, run, *flat_arguments)
        # After a call that has traced the core asks for the reads itself; here it made none.
        if entry.untold:
            entry.tell(self._reads(entry))
        return staged

    @boundary
    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The result with `jax.ShapeDtypeStruct` in place of arrays. Nothing runs or changes.

        Args:
            *args, **kwargs: the arguments of a call. `jax.ShapeDtypeStruct` may stand in place of arrays.

        Raises:
            UnsupportedValueError: if the function uses a value with hidden state, such as an iterator; names its path.
        """
        return self._retry_with_new_roots(lambda: result_shapes(self, self._record_arguments(args, kwargs)))

    # ---- public methods

    def clear_cache(self) -> None:
        """Drops all compiled programs of the function under these options."""
        self._table.clear()

    def freeze(self) -> None:
        """Forbids compilation: a call that would compile raises `RecompileError` with the cause."""
        self._table.frozen = True

    def save_compiled(self, path: str | os.PathLike[str]) -> int:
        """Writes the compiled programs to a file, from which another process runs them without tracing or compiling.

        Args:
            path: the file.

        Returns:
            the number of programs.

        Raises:
            GraftaxError: if there is none, or if the code reads something that another process cannot find by name.
        """
        from graftax._export import save  # circular: it imports this class

        return save(self, path)

    def load_compiled(
        self, path: str | os.PathLike[str], *, progress: Callable[[int, int, float], object] | None = None
    ) -> int:
        """Loads programs that `save_compiled` wrote, before the first call.

        They are used if everything is the same as when they were saved: the function and what its code reads, the
        structures, JAX and its settings, Python, and the devices. Other calls compile as usual.

        A file contains pickles and machine code, so load only files that you trust.

        Args:
            path: the file.
            progress: called after each program, as in `warm`. By default a terminal shows a line.

        Returns:
            the number of programs; 0, with a warning that says why, if the file does not fit.

        Raises:
            GraftaxError: if the file has no programs of graftax.
        """
        from graftax._export import load

        return load(self, path, progress)

    def unfreeze(self) -> None:
        """Allows compilation again after `freeze`."""
        self._table.frozen = False

    def cache_info(self) -> CacheInfo:
        """The number of hits and misses, the maximal and the current number of structures, and the number of traces."""
        t = self._table
        entries = list(t.entries.values())  # other threads add and drop meanwhile
        compiling = sum(getattr(entry.compiled, "compiling", 0) for entry in entries) + t.ahead.compiling
        hits = t.hits + t.slow_hits
        return CacheInfo(hits, t.misses, t.maxsize, len(t.entries), t.traces, t.shared, t.disk, compiling)

    def _cache_size(self) -> int:
        """The number of programs. `jax.jit` has it under this name, and many tests count compilations by it."""
        return sum(len(entry.outcomes) for entry in self._table.entries.values())

    def donation(self) -> DonationReport:
        """What the last call donated with `donate="auto"`, what it kept, and what still refers to it.

        Returns:
            a report that prints as text: `donated` and `kept` have the arrays that a call replaces.

        Example:
            >>> @graftax.jit(donate="auto")
            ... def step(state):
            ...     state["w"] = 0.9 * state["w"]
            >>> state = {"w": jnp.ones((256, 256))}
            >>> step(state)
            >>> step.donation().donated[0].path
            "state['w']"
        """
        return report_of(self._plan.name, self._options.donates_proven, self._table)

    # ---- as a method, a pickle, a copy

    # Type checkers resolve classmethods and staticmethods through these overloads too: the type of the first parameter
    # tells them apart.
    @overload
    def __get__(self: Jitted[Concatenate[type[T], Q], R], instance: T | None, owner: type[T]) -> Jitted[Q, R]: ...
    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Jitted[P, R]: ...
    @overload
    def __get__(self: Jitted[Concatenate[T, Q], R], instance: T, owner: type | None = None) -> Jitted[Q, R]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Jitted[P, R]: ...
    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None or self._prefix or not isinstance(self.__wrapped__, types.FunctionType):
            return self  # as plain Python: only functions become methods, and those once
        is_pytree_method = type(self) is Jitted and not self._options.captured and is_pytree(instance)
        bound_class: Any = PytreeMethod if is_pytree_method else type(self)
        bound = bound_class.__new__(bound_class)
        self._bind(bound, instance)
        return bound

    def _bind(self, bound: Jitted[..., R], instance: object) -> None:
        """Sets up `bound` as this method, bound to `instance`."""
        bound._configure(self._function, (*self._prefix, instance), self._table, self._binding)
        bound.__dict__.update(self.__dict__)
        bound.__self__, bound._method_of = instance, self

    @property
    def _unchecked(self) -> Jitted[P, R]:
        """The same function without the check of a recorder, which is one more output of its program."""
        return self._with_options(finite=None)

    def _with_options(self, **options: Any) -> Jitted[P, R]:
        """The same function with other options, and without a recorder."""
        changed = dataclasses.replace(self._options, **options)
        if changed == self._options and type(self).trace is Jitted.trace:
            return self
        jitted = Jitted(self.__wrapped__, changed)
        return jitted.__get__(self.__self__) if self._is_bound else jitted

    # The core opens a jitted function that has arguments already, as graphs do with bound methods: what it is bound to
    # is rebuilt for a trace that calls it.

    @property
    def _bound_to(self) -> object:
        return self.__self__ if self._is_bound else self.__wrapped__

    @classmethod
    def _rebound(cls, bound_by: Jitted[Any, R] | Options, bound_to: Any) -> Jitted[..., R]:
        return bound_by.__get__(bound_to) if isinstance(bound_by, Jitted) else cls(bound_to, bound_by)

    @property
    def _is_bound(self) -> bool:
        return bool(self._prefix) and isinstance(self.__wrapped__, types.FunctionType)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name == "__signature__" and "__wrapped__" in vars(self):  # also for those who do not follow __wrapped__
                function = self.__wrapped__
                # Without self, as for any bound method.
                with contextlib.suppress(TypeError, ValueError):
                    return inspect.signature(function.__get__(self.__self__) if self._is_bound else function)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    @property
    def _identity(self) -> tuple[object, ...]:
        # A trace makes one anew wherever a jitted function is held that is bound to an object: these are the same.
        if not self._prefix:
            return (self,)
        if self._is_bound:
            return self.__self__, self._method_of
        wrapped: Any = self.__wrapped__
        if isinstance(wrapped, types.MethodType):
            return wrapped.__self__, wrapped.__func__, self._options
        parts = wrapped._identity if isinstance(wrapped, Jitted) else (wrapped,)
        return *parts, self._options

    def __eq__(self, other: object) -> bool:
        """Bound methods are equal if they are the same method of the same object, as in Python."""
        if self is other or type(self) is not type(other):
            return self is other
        mine, others = self._identity, cast(Jitted[..., Any], other)._identity
        return len(mine) == len(others) and all(map(operator.is_, mine, others))

    def __hash__(self) -> int:
        return hash(tuple(map(id, self._identity))) if self._prefix else object.__hash__(self)

    def __repr__(self) -> str:
        if not self._is_bound:
            return f"<graftax.jit of {self.__wrapped__!r}>"
        # The object's own repr may copy its arrays from a device.
        return f"<bound graftax.jit of {self.__wrapped__!r}, of {object.__repr__(self.__self__)}>"

    def __reduce__(self) -> Any:
        if self._is_bound:
            return (_bind_to, (self._method_of, self.__self__))
        module, name = getattr(self, "__module__", None), getattr(self, "__qualname__", "")
        # A name suffices for a function that its module has under that name, as it does for a plain one.
        target: Any = sys.modules.get(module or "")
        for attribute in name.split("."):
            target = getattr(target, attribute, None)
        if target is self:
            return name
        return (_from_pickle, (type(self), self.__wrapped__, self._options))

    def __copy__(self) -> Jitted[P, R]:  # as plain Python: functions are not copied
        return self

    def __deepcopy__(self, memo: Any) -> Jitted[P, R]:
        if not self._prefix:
            return self
        # What it is bound to is an object like any other: a method's `self`, the parts of a partial, a callable.
        if self._is_bound:
            return self._method_of.__get__(copy.deepcopy(self.__self__, memo))
        return type(self)(copy.deepcopy(self.__wrapped__, memo), self._options)


@jax.tree_util.register_pytree_with_keys_class
class PytreeMethod(Jitted[P, R]):
    """A method compiled by `filter_jit` of an object that is a pytree: its leaves are those of the object."""

    def tree_flatten(self) -> tuple[tuple[object], Jitted[Any, R]]:
        return (self.__self__,), self._method_of

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, object]], Jitted[Any, R]]:
        return ((jax.tree_util.GetAttrKey("__self__"), self.__self__),), self._method_of

    @classmethod
    def tree_unflatten(cls, method: Jitted[Any, R], parts: tuple[object]) -> Self:
        bound = cls.__new__(cls)
        method._bind(bound, *parts)
        return bound


class _Annotations:
    """The wrapped function's annotations. From Python 3.14 on `functools.update_wrapper` no longer copies them."""

    def __init__(self, annotations: dict[str, object]) -> None:
        self._annotations = annotations

    def __get__(self, jitted: Any, owner: type | None = None) -> dict[str, object]:
        return self._annotations if jitted is None else jitted.__wrapped__.__annotations__


Jitted.__annotations__ = cast(Any, _Annotations(Jitted.__annotations__))


def _from_pickle(cls: type[Jitted[P, R]], function: Callable[P, R], options: Options) -> Jitted[P, R]:
    """Unpickles to the live jitted function, as a plain function does, so that a graph equals its own pickle."""
    loaded = cls(function, options)
    original: Jitted[P, R] | None = loaded._table.original and loaded._table.original()
    if original is None or loaded._prefix or type(original) is not cls:
        return loaded
    return original if vars(original._options) == vars(options) else loaded


def _bind_to(jitted: Jitted[P, R], instance: object) -> Jitted[Any, R]:
    """Unpickles a bound method."""
    return jitted.__get__(instance)


def _on_trace(name: str, options: Options, table: FunctionTable, lost: list[str]) -> None:
    table.traces += 1
    if lost and options.warn_lost:
        note_warning()  # the cache on disk takes no program whose trace has warned
        warnings.warn(CHANGE_LOST.format(name=name, paths=", ".join(lost)), LostChangeWarning, caller_level())
