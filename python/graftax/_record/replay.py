# SPDX-License-Identifier: Apache-2.0
"""Runs recorded calls again, in any process that finds their functions."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._base.missing import MISSING
from graftax._base.progress_bar import ByteBar
from graftax._capture.constant_values import content, fill
from graftax._capture.namespaces import with_parts
from graftax._capture.origin import Origin
from graftax._export.holder_names import value_at
from graftax._export.structure_digest import code_digest
from graftax._graph.pickling import graphdef_from_state
from graftax._io import LoadError, peek
from graftax._io.load import load_stored
from graftax._io.placement import StoredArray
from graftax._io.reader import Source
from graftax._jax.arrays import is_deleted
from graftax._jit.jitted import Jitted
from graftax._record.call_file import FORMAT, array_bytes, environment, leaf_digests, results_data, unique_names
from graftax._record.cells import Cell, known_cells, load_cells
from graftax._record.code_pickle import CodeName, find_code, loads, main_file, source_of
from graftax._record.nonfinite import NonfiniteReport, nonfinite
from graftax._record.origin_marks import are_finite
from graftax._record.recorder import Paused
from graftax._record.script_module import load_script
from graftax._record.snapshot import Random, error_text, graph_after, kept_leaf, random_state, set_random_state

NOT_A_RECORDING = "{path} has no recorded calls: graftax.record writes such files when a call goes wrong"
LATER = "{path} was written by a later version of graftax ({version}), and this one is {own}: update graftax"
DAMAGED = "{path} is damaged: {what} are not what was written"
NOT_FOUND = "{name} cannot be run again: {error}"
CHANGED = "{name} has changed since the call was recorded: line {line} was {old!r}, is {new!r}"
CHANGED_SOMEHOW = "{name} has changed since the call was recorded"
DIFFERENT = "{name} was {recorded}, is {here}"
SET = "{name} is {here!r} in its module; it is set to {recorded!r}, as it was recorded"

PYTHON = ".".join(map(str, sys.version_info[:2]))
LARGE = 1 << 20  # bytes of an array whose pages are given back once it is copied

_MISSING_TEXT = "nothing"


class ReplayResult:
    """What a call did when it ran again.

    Attributes:
        differences: from what was recorded; empty where all is equal, bit for bit.
        nonfinite: the key paths of results that are not finite.
        raised: the class and a line of what it raised.
    """

    def __init__(self, differences: list[str], nonfinite: list[str], raised: str) -> None:
        self.differences, self.nonfinite, self.raised = differences, nonfinite, raised

    def __str__(self) -> str:
        parts = ["differs from what was recorded" if self.differences else "equal to what was recorded, bit for bit"]
        parts += [f"raises {self.raised}"] if self.raised else []
        parts += [f"not finite: {', '.join(self.nonfinite)}"] if self.nonfinite else []
        return "\n  ".join(["; ".join(parts), *self.differences])


class Replayed(Jitted[..., Any]):
    """The recorded function. Each trace begins with the random states that the recorded one began with."""

    state_before_trace: Random | None = None

    def _begin_trace(self) -> None:
        if self.state_before_trace is not None:
            set_random_state(self.state_before_trace)


class Prepared:
    """A recorded call whose inputs are where the function finds them.

    Attributes:
        jitted, plain: the function, bound to its object.
        args, kwargs: of the call.
        current: gives the roots as they are now.
        undo: gives the names that the code reads their own values again.
    """

    def __init__(
        self,
        jitted: Replayed,
        plain: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        current: Callable[[], tuple[Any, ...]],
        undo: contextlib.ExitStack,
    ) -> None:
        self.jitted, self.plain, self.args, self.kwargs = jitted, plain, args, kwargs
        self.current, self.undo = current, undo
        self.random_in_call: Random | None = None  # the states for the call, if its trace has other ones

    def trace_as_recorded(self) -> None:
        """Makes the constants of a hit, whose trace drew its random numbers in an earlier call."""
        if self.random_in_call is not None:
            self.jitted.trace(*self.args, **self.kwargs)
            set_random_state(self.random_in_call)

    def close(self) -> None:
        """Gives the names that the function reads the values that they had before."""
        self.undo.close()


class RecordedCalls:
    """An opened file.

    Attributes:
        header: what can be read without running any code.
        notes: differences from the process that recorded, for people.

    Raises:
        GraftaxError: if the file is damaged, of another kind, or its function cannot be found.
        OSError: if it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.header = _header(self.path)
        self._undo = contextlib.ExitStack()
        # The settings first: arrays and the script depend on them.
        self.notes = list(_prepare(self.header, self._undo))
        self._source = Source(self.path)
        content = load_stored(self._source)
        # Nothing is unpickled before the digest is right.
        if hashlib.sha256(content["structures"]).hexdigest() != self.header["digest"]:
            raise LoadError(DAMAGED.format(path=self.path, what="the structures"))
        self._leaves: list[list[Any]] = [list(leaves.values()) for leaves in content["calls"]]
        self._check_arrays()
        self._data = self._load_structures(content["structures"])
        self.notes += _changed_functions(self.header)
        self.notes += _set_constants(self._data["constants"], self._undo)

    def _check_arrays(self) -> None:
        """Reads all arrays once, and leaves them in the file."""
        calls = [[leaf.host if isinstance(leaf, StoredArray) else leaf for leaf in leaves] for leaves in self._leaves]
        bar = ByteBar(f"reading {os.path.basename(self.path)}", array_bytes(itertools.chain(*calls)))

        def read(count: int) -> None:
            self._source.release()
            bar.add(count)

        digest_of: dict[int, str] = {}
        for call, leaves in zip(self.header["calls"], calls, strict=True):
            if leaf_digests(leaves, digest_of, read) != call["inputs"]:
                raise LoadError(DAMAGED.format(path=self.path, what="the arrays"))

    def _load_structures(self, structures: bytes) -> dict[str, Any]:
        name, changed = self.header["name"], list[CodeName]()
        try:
            with Paused():
                if (script := self.header["script"]) is not None:
                    _load_main(script, name)
                return loads(structures, changed)
        except GraftaxError:
            raise
        # A script may end itself, with `sys.exit`.
        except (Exception, SystemExit) as error:
            raise GraftaxError(NOT_FOUND.format(name=name, error=f"{type(error).__name__}: {error}")) from error

    def __len__(self) -> int:
        return len(self._leaves)

    def close(self) -> None:
        """Gives the settings and the constants of this process their own values again."""
        self._undo.close()

    def prepare(self, number: int, plain: bool = False, checked: bool = False) -> Prepared:
        """Rebuilds the inputs of a call, and puts what the function captures into its place.

        Args:
            plain: the plain function will run, which draws its random numbers in the call.
            checked: the program has the check of its results that the recorded one had.
        """
        call = self._data["calls"][number]
        try:
            leaves = list(self._placed(number, dict(call["shardings"])))
            roots = _core.unflatten_roots(graphdef_from_state(call["graphdef"]), leaves)
        # A class may have changed, and there may be fewer devices.
        except Exception as error:
            error_line = f"its arguments cannot be rebuilt: {error_text(error)}"
            raise GraftaxError(NOT_FOUND.format(name=self.header["name"], error=error_line)) from error
        # The roots are the arguments, and behind them the captures: cells, globals, and the other origins.
        count = len(roots) - len(call["cells"]) - len(call["globals"]) - len(call["origins"])
        arguments, captures = roots[:count], iter(roots[count:])
        cells = dict(zip(call["cells"], itertools.islice(captures, len(call["cells"])), strict=True))
        function = _with_cells(self._data["function"], cells)
        scope = function.__globals__
        places = [Origin(scope, name) for name in call["globals"]]
        places += [None if origin is None else Origin(*origin) for origin in call["origins"]]
        captured = list(zip(places, captures, strict=True))
        # Everything but the cells goes where the code looks for it, until the call is over.
        undo = contextlib.ExitStack()
        for origin, value in captured:
            _install(origin, value, undo)
        # Of the arguments, the function brings the first along: its object, or those of a partial.
        prefix, passed = arguments[: self._data["prefix"]], list(arguments[self._data["prefix"] :])
        options = self._data["options"]
        options = options if checked else dataclasses.replace(options, finite=None)
        jitted, function = _callables(self._data["way"], function, prefix, options)
        positional = jitted._plan.signature.positional + sum(call["layout"][:1]) - len(prefix)  # pyright: ignore[reportPrivateUsage]
        keywords = call["names"][len(prefix) + positional : count]
        kwargs = dict(zip(keywords, passed[positional:], strict=True))

        def current() -> tuple[Any, ...]:
            values = (_current_value(origin, value) for origin, value in captured)
            return (*arguments, *cells.values(), *values)

        prepared = Prepared(jitted, function, passed[:positional], kwargs, current, undo)
        _restore_random(prepared, call["draws"], plain)
        return prepared

    def _placed(self, number: int, shardings: dict[int, Any]) -> Iterator[Any]:
        """Copies of the leaves, which the call may change or delete; those that were put on devices are there again."""
        for i, leaf in enumerate(self._leaves[number]):
            copy = kept_leaf(leaf.value() if isinstance(leaf, StoredArray) else leaf, True)
            placed = jax.device_put(copy, shardings[i]) if i in shardings else copy
            # The copy has to be made before the pages of the file that it reads may be given back.
            if isinstance(leaf, StoredArray) and leaf.host.nbytes >= LARGE:
                jax.block_until_ready(copy)
                self._source.release()
            yield placed

    def run(self, number: int, plain: bool = False) -> ReplayResult:
        """Runs a call again, and compares what it does with what was recorded."""
        with contextlib.closing(self.prepare(number, plain, checked=True)) as prepared:
            return self._compare(prepared, number, plain)

    def _compare(self, prepared: Prepared, number: int, plain: bool) -> ReplayResult:
        recorded, call = self.header["calls"][number], self._data["calls"][number]
        plan = prepared.jitted._plan  # pyright: ignore[reportPrivateUsage]
        try:
            prepared.trace_as_recorded()
            result = (prepared.plain if plain else prepared.jitted)(*prepared.args, **prepared.kwargs)
            leaves, graphdef, names = graph_after(plan, call["names"], prepared.current(), result)
            # What the computation or a callback raises belongs to the call as well.
            jax.block_until_ready([leaf for leaf in leaves if isinstance(leaf, jax.Array) and not leaf.is_deleted()])
            jax.effects_barrier()
        except Exception as error:
            raised = error_text(error)
            return ReplayResult(_difference("the exception", recorded["raised"] or "none", raised), [], raised)
        differences = _difference("the exception", recorded["raised"] or "none", "none")
        if recorded["results"] is not None:
            differences += _result_differences(recorded["results"], results_data(graphdef, names, leaves), plain)
        named = zip(unique_names(graphdef, names), leaves, strict=True)
        nonfinite_names = [name for name, leaf in named if not is_deleted(leaf) and not are_finite(leaf)]
        return ReplayResult(differences, nonfinite_names, "")

    def where(self, number: int = -1) -> NonfiniteReport:
        """Which operation of a call made its first nan or infinity."""
        with contextlib.closing(self.prepare(range(len(self))[number])) as prepared:
            return nonfinite(prepared.jitted, *prepared.args, **prepared.kwargs)


def _load_main(script: dict[str, Any], name: str) -> None:
    """Loads the script or the cells as the main module, unless it is this process that has recorded them."""
    if script["file"] is None:
        cells_here = set(known_cells()) if main_file() is None else set[Cell]()
        if not cells_here.issuperset(Cell(*cell) for cell in script["cells"]):
            load_cells(script["cells"])
    elif script["file"] != main_file():
        load_script(script, name)


def _header(path: str) -> dict[str, Any]:
    text = peek(path).metadata.get("recorded")
    if text is None:
        raise GraftaxError(NOT_A_RECORDING.format(path=path))
    try:
        header = json.loads(text)
        number = header["format"]
    except (ValueError, KeyError, TypeError):
        raise LoadError(DAMAGED.format(path=path, what="its metadata")) from None
    if number > FORMAT:
        installed = environment()["versions"]["graftax"]
        raise GraftaxError(LATER.format(path=path, version=header["versions"]["graftax"], own=installed))
    return header


# ---- the process around the call


def _prepare(header: dict[str, Any], undo: contextlib.ExitStack) -> Iterator[str]:
    """Makes this process like the one that recorded, as far as that is possible; yields what differs."""
    for folder in header["folders"]:
        if folder not in sys.path and os.path.isdir(folder):
            sys.path.append(folder)
    # JAX reads the flags when it first looks for devices. Those that the user gives to the replay count more.
    if header["flags"] and "XLA_FLAGS" not in os.environ:
        os.environ["XLA_FLAGS"] = header["flags"]
    if jax.config.jax_enable_x64 != header["x64"]:
        _change_setting("jax_enable_x64", str(header["x64"]), undo)
    # What cannot be changed any more is a note.
    current = environment()
    for name, recorded in header["settings"].items():
        if current["settings"].get(name, recorded) != recorded and not _change_setting(name, recorded, undo):
            yield DIFFERENT.format(name=name, recorded=recorded, here=current["settings"][name])
    for name, recorded in header["versions"].items():
        if current["versions"][name] != recorded:
            yield DIFFERENT.format(name=name, recorded=recorded, here=current["versions"][name])
    for name, text in (("devices", "the number or kind of devices"), ("flags", "XLA_FLAGS")):
        if current[name] != header[name]:
            recorded, here = header[name] or _MISSING_TEXT, current[name] or _MISSING_TEXT
            yield DIFFERENT.format(name=text, recorded=recorded, here=here)


def _change_setting(name: str, text: str, undo: contextlib.ExitStack) -> bool:
    """Gives a setting of JAX the value with this text. False if that is not possible."""
    match = re.fullmatch(r"<\w+\.\w+: (.*)>", text)  # of an enum
    try:
        value = getattr(jax.config, name)
        jax.config.update(name, ast.literal_eval(match[1] if match else text))
        undo.callback(jax.config.update, name, value)
    # The text may be no literal, and this JAX may lack the setting or let nobody change it.
    except Exception:
        return False
    return True


def _changed_functions(header: dict[str, Any]) -> Iterator[str]:
    is_same_python = header["versions"]["python"].startswith(f"{PYTHON}.")
    for recorded in header["functions"]:
        name = CodeName(recorded["module"], recorded["name"], int(recorded["line"]), recorded["digest"])
        try:
            code = find_code(name)
        except (ImportError, LookupError, OSError, SyntaxError, ValueError) as error:
            yield f"{recorded['name']} is not there any more: {error}"
            continue
        if code_digest(code) == recorded["digest"]:
            continue
        source = source_of(code)
        # Each Python has byte code of its own.
        if is_same_python or not source or source != recorded["source"]:
            yield _change_text(recorded, code, source)


def _change_text(recorded: dict[str, str], code: types.CodeType, source: str) -> str:
    lines = itertools.zip_longest(recorded["source"].splitlines(), source.splitlines(), fillvalue="")
    for line, (old, new) in enumerate(lines, code.co_firstlineno):
        if old != new and recorded["source"] and source:
            return CHANGED.format(name=recorded["name"], line=line, old=old.strip(), new=new.strip())
    return CHANGED_SOMEHOW.format(name=recorded["name"])


def _set_constants(constants: Sequence[tuple[Any, str, Any]], undo: contextlib.ExitStack) -> Iterator[str]:
    """Sets the numbers and texts that the code reads to what they were."""
    for holder, name, value in constants:
        current = value_at(holder, name)
        # By their texts, since a nan is not equal to itself.
        if repr(current) != repr(value):
            origin = Origin(holder, name)
            yield SET.format(name=origin.text(), here=_MISSING_TEXT if current is MISSING else current, recorded=value)
            undo.callback(origin.put, current)
            origin.put(value)


# ---- the inputs of a call


def _with_cells(function: types.FunctionType, cells: dict[str, types.CellType]) -> types.FunctionType:
    """The function with rebuilt variables of enclosing calls."""
    if not cells:
        return function
    names = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = tuple(cells.get(name, cell) for name, cell in names)
    # A twin: the module's own function keeps its cells.
    twin = with_parts(function, function.__globals__, closure)
    vars(twin).update({name: value for name, value in vars(function).items() if name != "__wrapped__"})
    return twin


def _install(origin: Origin | None, value: Any, undo: contextlib.ExitStack) -> None:
    """Gives a name that the code reads the recorded value, and a function its state."""
    if origin is None:
        return
    if origin.name is not None:
        undo.callback(origin.put, origin.value())
        # Some classes refuse to be changed, such as those of C code.
        with contextlib.suppress(TypeError, AttributeError):
            origin.put(content(value) if origin.assigned else value)
        return
    function: Any = origin.holder
    if function is value or not isinstance(value, types.FunctionType):
        return
    undo.callback(_set_state, function, *_state_of(function))
    _set_state(function, *_state_of(value))


def _state_of(function: types.FunctionType) -> tuple[Any, ...]:
    cells = map(content, function.__closure__ or ())
    return function.__defaults__, function.__kwdefaults__, dict(vars(function)), list(cells)


def _set_state(
    function: types.FunctionType, defaults: Any, kwdefaults: Any, attributes: dict[str, Any], contents: list[Any]
) -> None:
    function.__defaults__, function.__kwdefaults__ = defaults, kwdefaults
    vars(function).update(attributes)
    for cell, value in zip(function.__closure__ or (), contents, strict=True):
        fill(cell, value)


def _restore_random(prepared: Prepared, draws: dict[str, Any], plain: bool) -> None:
    """Puts the random generators where they were before the call, or before the trace whose numbers it repeats."""
    if not draws:
        return
    prepared.undo.callback(set_random_state, random_state())
    set_random_state(draws.get("trace") or draws["call"])
    prepared.jitted.state_before_trace = draws.get("trace")
    # A hit: callbacks draw from the states of the call, and the constants were drawn from those of the trace.
    if "trace" in draws and draws["trace"] is not draws["call"] and not plain:
        prepared.random_in_call = draws["call"]


def _current_value(origin: Origin | None, value: Any) -> Any:
    """The value of a captured root after a call, in the form in which the root was recorded."""
    if origin is None:
        return value
    return types.CellType(origin.value()) if origin.assigned else origin.value()


def _callables(
    form: str, function: types.FunctionType, prefix: Sequence[Any], options: Any
) -> tuple[Replayed, Callable[..., Any]]:
    """(the jitted function, the plain one), bound to what they bring along."""
    plain: Any = function
    if form in ("bound", "method"):
        plain = types.MethodType(function, prefix[0])
    elif form == "object":
        plain = prefix[0]
    elif form == "partial":
        plain = functools.partial(prefix[0], *prefix[1], **prefix[2])
    if form == "bound":
        return cast(Replayed, Replayed(function, options).__get__(prefix[0])), plain
    return Replayed(plain, options), plain


# ---- the results


def _difference(name: str, recorded: str, current: str) -> list[str]:
    return [] if recorded == current else [f"{name}: recorded {recorded}, now {current}"]


def _result_differences(recorded: dict[str, Any], current: dict[str, Any], plain: bool) -> list[str]:
    differences: list[str] = []
    for name in dict.fromkeys((*recorded["leaves"], *current["leaves"])):
        old, new = recorded["leaves"].get(name, _MISSING_TEXT), current["leaves"].get(name, _MISSING_TEXT)
        # A text is empty where a later call had deleted the array.
        if old:
            differences += _difference(name, old, new)
    # Plain Python may return one equal tuple for two.
    if not (differences or plain) and recorded["structure"] != current["structure"]:
        differences.append("the structure or a static value of a result, or of what the call changes, is different")
    return differences
