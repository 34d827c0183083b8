# SPDX-License-Identifier: Apache-2.0
"""A compiled function as bytes: traced here, called in another process on object graphs of the same structure."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import io
import itertools
import pickle
import types
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, cast

import jax
import jax.export
import jax.numpy as jnp

from graftax import _core
from graftax._base.errors import GraftaxError, MutationError, StructureError, UnpicklableError, rename_leaves
from graftax._base.handles import HandleLayout
from graftax._base.key_path import keystr
from graftax._capture.signature import Signature
from graftax._graph.patterns import argument_pattern
from graftax._graph.structure import Op, Structure, place_name
from graftax._graph.structure_diff import differences_text, short_text
from graftax._jax.arrays import as_weak, is_dimension
from graftax._jax.compilation import own_jit
from graftax._jax.error_texts import is_of_exported_callback
from graftax._jax.tracebacks import boundary
from graftax._jit.build_entry import build_entry
from graftax._jit.call_plan import Plan, number_test
from graftax._jit.jitted import Jitted
from graftax._jit.leaf_guards import LeafGuards
from graftax._jit.leaf_names import leaf_names
from graftax._jit.options import Options, split_patterns
from graftax._jit.stages import copy_numpy_leaves, match_structure, refuse_unguarded

CAPTURED_CHANGED = (
    "{name} changes {path}, which it captures. An exported function has only its arguments: pass the object as one "
    "(for a bound method, export the function of the class and pass the instance)."
)
CAPTURED_RETURNED = (
    "the result of {name}, or what it leaves in an argument, holds {path}, which it captures. An exported function has "
    "only its arguments: pass the object as one, or return a copy."
)
CAPTURED_SHARED = (
    "{name} is given {one}, which it also captures as {other}: one object now, and two for every call of the exported "
    "function. Pass a copy, or let the function use its argument."
)
PACKED_SHAPE = (
    "{name} is exported for {path}, a jax.ShapeDtypeStruct inside of packed state, which holds arrays. Pack arrays "
    "of these shapes (jnp.zeros), whose sizes are fixed then; for symbolic shapes pass the object itself, not a handle."
)
SYMBOLIC = (
    "{name}: a symbolic dimension is a part of the result, or of what is left in an argument, at {path}. "
    "Only an array can differ from shape to shape: make it an array (jnp.asarray(x.shape[0])), or let the"
    " caller compute it."
)
NO_CALLBACKS = (
    "{name} calls a function on the host, which an exported program cannot hold. Remove callbacks, "
    "jax.debug.print and progress= from it, or compile it where it runs."
)
NOT_SAVED = (
    "{name} cannot be saved: {what}: {error}. Functions and classes are saved by name: define them at the "
    "top of a module."
)
BY_IDENTITY = "it is compared by identity, and a loaded copy would be another object"
NOT_EXPORTED = "these are not the bytes of an exported function, or they were damaged: {error}"

P = ParamSpec("P")
R = TypeVar("R")

_MAGIC = b"graftax.Exported 3\n"
# In place of a number: a captured leaf that nobody needs, and one that the program returns.
_MISSING, _RETURNED = -1, -2


class _Parts(NamedTuple):
    """What an exported function consists of, besides JAX's program."""

    name: str
    signature: inspect.Signature
    graphdef: _core.GraphDef  # of the arguments
    layout: tuple[Any, ...]
    outcome: _core.Outcome
    leaves: tuple[int, ...]  # for each leaf of the trace its number among those of the arguments
    nodes: tuple[int, ...]  # the same for nodes
    record_options: tuple[list[int], Sequence[str]]  # a flag for each root, and the patterns of `dynamic=`
    weak: tuple[bool, ...]  # which outputs have weak types, since JAX's serialized form drops them
    guards: LeafGuards


class Exported(Generic[P, R]):
    """An exported function. It is called like the original one, on arguments with the same structure and static values.

    `exported` is JAX's own `jax.export.Exported`, over the flat leaves.
    """

    exported: jax.export.Exported
    name: str

    def __init__(self, parts: _Parts, exported: jax.export.Exported) -> None:
        self.name, self._parts, self.exported = parts.name, parts, exported
        self._binds = Signature.of_parameters(parts.signature)

    @boundary
    def call(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the exported program, and applies the function's changes to the arguments.

        Raises:
            StructureError: if the arguments differ from those it was exported for, naming the paths.
            ValueError: if an array has another shape or dtype; names its path.
        """
        parts = self._parts
        roots, layout = _bound(parts.signature, self._binds, args, kwargs)
        names = self._binds.root_names(layout)
        remedy = "Export it again for these"
        leaves, nodes = match_structure(
            self.name, parts.graphdef, parts.layout, names, roots, layout, self._record, "exported", remedy
        )
        refuse_unguarded(self.name, parts.guards, leaves, parts.graphdef, names, "exported", remedy)
        try:
            result, written, captured = self.exported.call(*copy_numpy_leaves(leaves))
        except (TypeError, ValueError) as error:
            rename_leaves(error, leaf_names(parts.graphdef, names), flat="args")
            raise
        # The Outcome counts leaves and nodes of the trace. The program returns those captured leaves that it needs.
        captured_leaves = iter(captured)
        inputs = [leaves[i] if i >= 0 else next(captured_leaves) if i == _RETURNED else None for i in parts.leaves]
        result_nodes = [nodes[i] if i >= 0 else None for i in parts.nodes]
        outputs = [as_weak(x) if weak else x for x, weak in zip((*result, *written), parts.weak, strict=True)]
        return cast(R, parts.outcome.apply(outputs, inputs, result_nodes))

    __call__ = call

    def _record(self, roots: tuple[Any, ...], layout: tuple[Any, ...]) -> _core.Recording:
        flags, texts = self._parts.record_options
        names = self._binds.root_names(layout)
        patterns = [argument_pattern(text, self.name, "dynamic=") for text in texts]
        dynamic = number_test(patterns, roots, names, flags, True)
        return _core.Recording(roots, names, flags, layout, False, True, dynamic)

    def serialize(self, vjp_order: int = 0) -> bytearray:
        """The exported function as bytes. Classes and functions in it are named, as in every pickle.

        Args:
            vjp_order: how often the loaded function can be differentiated, as in `jax.export`.

        Raises:
            UnpicklableError: for a value that cannot be saved; names its path.
        """
        program = self.exported.serialize(vjp_order=vjp_order)
        # The defaults are pickled with the rest as well; alone first, so that an error names the parameter.
        for parameter in self._parts.signature.parameters.values():
            if parameter.default is not parameter.empty:
                self._pickled(f"the default of {parameter.name}", parameter.default)
        # As a plain tuple, so that the bytes do not depend on the name of this class.
        data = self._pickled("what its arguments and its result are made of", tuple(self._parts))
        _check_identities(self._parts, _Parts(*pickle.loads(data)))
        content = pickle.dumps((data, bytes(program)))
        return bytearray(_MAGIC + hashlib.sha256(content).digest() + content)

    def _pickled(self, noun: str, value: Any) -> bytes:
        try:
            return pickle.dumps(value)
        except Exception as error:
            raise UnpicklableError(NOT_SAVED.format(name=self.name, what=noun, error=error)) from error

    @classmethod
    def deserialize(cls, blob: bytes | bytearray | memoryview) -> Exported[..., Any]:
        """Loads an exported function from bytes. They contain pickles, so load only bytes that you trust.

        Args:
            blob: the result of `serialize`.

        Raises:
            StructureError: if these are not the bytes of an exported function, or if they are damaged.
        """
        stream = io.BytesIO(blob)
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise StructureError(NOT_EXPORTED.format(error="they begin otherwise"))
        digest, content = stream.read(hashlib.sha256().digest_size), stream.read()
        # Neither pickle nor JAX notices a changed bit of a constant.
        if hashlib.sha256(content).digest() != digest:
            raise StructureError(NOT_EXPORTED.format(error="their digest is different"))
        try:
            data, program = pickle.loads(content)
            return cls(_Parts(*pickle.loads(data)), jax.export.deserialize(bytearray(program)))
        except Exception as error:
            raise StructureError(NOT_EXPORTED.format(error=f"{type(error).__name__}: {error}")) from error

    def __reduce__(self) -> Any:
        return (Exported.deserialize, (bytes(self.serialize()),))

    def __repr__(self) -> str:
        return f"<graftax Exported {self.name}{self._parts.signature}>"


@boundary
def export(
    function: Callable[P, R], *, platforms: Sequence[str] | None = None, disabled_checks: Sequence[Any] = ()
) -> Callable[P, Exported[P, R]]:
    """Exports a function, jitted or not, for arguments like the given ones: `graftax.export(f)(*args, **kwargs)`.

    What the function captures becomes part of the program, with its current values: the closure, the globals that it
    names, the object of a bound method. The function must neither change nor return these.

    Args:
        function: any callable; the options of a jitted one are kept.
        platforms, disabled_checks: as in `jax.export.export`.

    Returns:
        a function of example arguments, which returns the `Exported` function.

    Raises:
        MutationError: if the function changes something that it captures.
        StructureError: if its result contains a symbolic dimension outside of arrays, or an object that it captures.
        NotImplementedError: JAX's, if the function calls a function on the host.

    Example:
        >>> exported = graftax.export(lambda config, x: x * config["rate"])({"rate": 2}, jnp.ones(3))
        >>> again = graftax.Exported.deserialize(exported.serialize())
        >>> again({"rate": 2}, jnp.ones(3))
        Array([2., 2., 2.], dtype=float32)
    """
    jitted = function if isinstance(function, Jitted) else Jitted(function, Options(warn_impure=True))

    @boundary
    def exporter(*args: P.args, **kwargs: P.kwargs) -> Exported[P, R]:
        typed_jitted = cast("Jitted[P, R]", jitted)
        return typed_jitted._retry_with_new_roots(
            lambda: _export(typed_jitted, args, kwargs, platforms, tuple(disabled_checks))
        )

    return exporter


def _export(jitted: Jitted[P, R], args: Any, kwargs: Any, platforms: Any, disabled_checks: Any) -> Exported[P, R]:
    # Nothing is donated: the arrays of whoever calls the exported function stay theirs.
    options = dataclasses.replace(jitted._options, donate=(), donate_word="none")
    # Recorded twice: with the captures, which become constants, and the arguments alone, as a loaded function has them.
    call = jitted._record_arguments(args, kwargs)
    roots, layout, recording = call.roots, call.layout, call.recording
    plan = Plan(jitted._plan.name, jitted._plan.definition, jitted._plan.signature, options, jitted._plan.on_trace)
    graphdef, names = recording.graphdef, recording.names
    skip, arguments = len(jitted._prefix), plan.signature.arguments(layout)
    signature = _signature_of(jitted._function, skip)
    binds = Signature.of_parameters(signature)
    own_roots, own_layout = _bound(signature, binds, args, kwargs)
    own_names = binds.root_names(own_layout)
    _refuse_sharing(plan.name, graphdef, names, range(skip, arguments))
    _refuse_packed_shapes(plan.name, graphdef, names)
    flags = plan.signature.root_flags(layout, options.static, plan.dynamic)[skip:arguments]
    record_options = (flags, split_patterns(options.dynamic)[1])
    dynamic = number_test(plan.dynamic_patterns, own_roots, own_names, flags, True)
    own_leaves, own_graphdef = _core.record(own_roots, own_names, flags, own_layout, shapes=True, dynamic=dynamic)
    argument_leaf = _leaf_numbers(graphdef, range(skip, arguments))

    entry = build_entry(dataclasses.replace(call, plan=plan), staged=True)
    traces: list[tuple[_core.Outcome, list[int]]] = []
    flat = _flat_function(entry, argument_leaf, copy_numpy_leaves(recording.leaves), traces)
    # JAX names the program after the function.
    flat.__name__ = flat.__qualname__ = plan.name
    program = jax.export.export(own_jit(flat), platforms=platforms, disabled_checks=disabled_checks)
    try:
        exported = _core.run_active(jitted, roots, entry.outcomes, recording, program, *own_leaves)
    # JAX calls the inputs of the flat function args[0] and so on: the user knows them by their paths.
    except ValueError as error:
        rename_leaves(error, leaf_names(own_graphdef, own_names), flat="args")
        raise
    except NotImplementedError as error:
        if is_of_exported_callback(error):
            error.add_note(NO_CALLBACKS.format(name=plan.name))
        raise
    jitted._table.note_traced(entry)
    guards = LeafGuards.of(entry).among(argument_leaf)
    outcome, returned = traces[-1]
    for i in returned:
        argument_leaf[i] = _RETURNED
    # What an Outcome says of leaves and nodes of the trace is read with the numbers among those of the arguments.
    argument_node = _node_numbers(graphdef, roots, own_graphdef, own_roots)
    _refuse_captured(plan.name, graphdef, names, outcome, argument_node)
    _refuse_dimensions(plan.name, outcome)
    weak = tuple(bool(getattr(aval, "weak_type", False)) for aval in exported.out_avals[: outcome.num_leaves])
    leaves, nodes = tuple(argument_leaf), tuple(argument_node)
    parts = _Parts(plan.name, signature, own_graphdef, own_layout, outcome, leaves, nodes, record_options, weak, guards)
    return Exported(parts, exported)


def _flat_function(
    entry: _core.Entry,
    argument_leaf: Sequence[int],
    constants: Sequence[Any],
    traces: list[tuple[_core.Outcome, list[int]]],
) -> types.FunctionType:
    """What is exported: a function of the arguments' leaves, in which those of captures are constants.

    Args:
        traces: gets the Outcome of each trace, and the captured leaves that it returns.
    """

    def flat(*arrays: Any) -> Any:
        values = [
            arrays[leaf] if leaf >= 0 else constant for leaf, constant in zip(argument_leaf, constants, strict=True)
        ]
        result, written, code = entry.compiled(*values)
        outcome = entry.outcomes[_core.decode(code)]
        # Captured leaves that the Outcome needs are results of the program, since the other process lacks them.
        returned = sorted({i for i in outcome.inputs()[1] if argument_leaf[i] < 0})
        traces.append((outcome, returned))
        return result, written, tuple(jnp.asarray(values[i]) for i in returned)

    return flat


def _signature_of(function: types.FunctionType, skip: int) -> inspect.Signature:
    """The parameters of a function after the first `skip`, with their defaults and without annotations."""
    code, parameter = function.__code__, inspect.Parameter
    count, names = code.co_argcount, list(code.co_varnames)
    defaults = dict(zip(reversed(names[:count]), reversed(function.__defaults__ or ()), strict=False))
    defaults.update(function.__kwdefaults__ or {})
    kinds = [parameter.POSITIONAL_ONLY] * code.co_posonlyargcount
    kinds += [parameter.POSITIONAL_OR_KEYWORD] * (count - code.co_posonlyargcount)
    named = list(zip(names, kinds, strict=False))[skip:]
    star_names = names[count + code.co_kwonlyargcount :]
    if code.co_flags & inspect.CO_VARARGS:
        named.append((star_names.pop(0), parameter.VAR_POSITIONAL))
    named += [(name, parameter.KEYWORD_ONLY) for name in names[count : count + code.co_kwonlyargcount]]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        named.append((star_names.pop(0), parameter.VAR_KEYWORD))
    return inspect.Signature(
        [parameter(name, parameter_kind, default=defaults.get(name, parameter.empty)) for name, parameter_kind in named]
    )


def _bound(
    signature: inspect.Signature, binds: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(roots, layout) of these arguments. Raises TypeError where the signature does not take them."""
    bound = binds.binding.bind(args, kwargs)
    if bound is None:
        # The standard library's `bind` raises a TypeError that says what is wrong.
        signature.bind(*args, **kwargs)
        raise GraftaxError(f"the arguments {signature} could not be bound")
    return bound


def _leaf_numbers(graphdef: _core.GraphDef, arguments: range) -> list[int]:
    """For each leaf its number among the leaves of the arguments, or `_MISSING` for a captured one."""
    count = itertools.count()
    return [next(count) if root in arguments else _MISSING for root, _ in graphdef.leaf_places()]


def _node_numbers(
    graphdef: _core.GraphDef, roots: tuple[Any, ...], own_graphdef: _core.GraphDef, own_roots: tuple[Any, ...]
) -> list[int]:
    """For each tracked node its number among the nodes of the arguments, or `_MISSING` for a captured one."""
    all_walk, own_walk = _core.walk(graphdef, roots), _core.walk(own_graphdef, own_roots)
    if all_walk is None or own_walk is None:
        raise GraftaxError("the arguments changed while they were exported")
    number = {id(node): i for i, node in enumerate(own_walk[1])}
    return [number.get(id(node), _MISSING) for node in all_walk[1]]


def _refuse_sharing(name: str, graphdef: _core.GraphDef, names: tuple[str, ...], arguments: range) -> None:
    """Refuses an object that is both an argument and captured: it would be two objects in every later call."""
    structure = Structure(graphdef)
    for row in structure.rows:
        target = structure.target(row)
        if row.op is Op.ref and (row.root in arguments) != (target.root in arguments):
            pair = sorted((row, target), key=lambda r: r.root not in arguments)
            argument, captured = (place_name(structure.root_path(r), names) for r in pair)
            raise StructureError(CAPTURED_SHARED.format(name=name, one=argument, other=captured))


def _refuse_packed_shapes(name: str, graphdef: _core.GraphDef, names: tuple[str, ...]) -> None:
    """Refuses a `jax.ShapeDtypeStruct` inside of packed state, which holds real arrays only."""
    structure = Structure(graphdef)
    for row, layout in structure.statics():
        if not isinstance(layout, HandleLayout):
            continue
        packed = Structure(layout.graphdef)
        for packed_row, value in packed.statics():
            if isinstance(value, jax.ShapeDtypeStruct):
                path = place_name(structure.root_path(row), names).removesuffix("._layout")
                path += keystr(packed.root_path(packed_row)[1])
                raise StructureError(PACKED_SHAPE.format(name=name, path=path))


def _refuse_dimensions(name: str, outcome: _core.Outcome) -> None:
    """Refuses a symbolic dimension in the result outside of arrays: only arrays may differ from call to call."""
    structure = Structure(outcome)
    for row in structure.rows:
        if row.type is not None and is_dimension(row.type):
            raise StructureError(SYMBOLIC.format(name=name, path=keystr(structure.root_path(row)[1])))


def _refuse_captured(
    name: str, graphdef: _core.GraphDef, names: tuple[str, ...], outcome: _core.Outcome, argument_node: list[int]
) -> None:
    """Refuses captured objects that are changed or returned: later calls, in another process, do not have them."""
    returned, _, written = outcome.inputs()
    # Changes first: an object that is changed and returned is refused for the change.
    refused = [(index, MutationError, CAPTURED_CHANGED) for index in written]
    refused += [(index, StructureError, CAPTURED_RETURNED) for index in returned]
    for index, error, text in refused:
        if argument_node[index] < 0:
            structure = Structure(graphdef)
            path = place_name(structure.root_path(structure.tracked[index]), names)
            raise error(text.format(name=name, path=path))


def _check_identities(parts: _Parts, loaded: _Parts) -> None:
    """Checks that loading finds the same objects for values compared by identity: a copy would never match."""
    if parts.graphdef != loaded.graphdef:
        names = Signature.of_parameters(parts.signature).root_names(parts.layout)
        differences = differences_text(parts.graphdef, loaded.graphdef, names)
        raise UnpicklableError(NOT_SAVED.format(name=parts.name, what=f"\n{differences}\n", error=BY_IDENTITY))
    for own_value, loaded_value in zip(parts.outcome.identities(), loaded.outcome.identities(), strict=True):
        if own_value is not loaded_value:
            structure = Structure(parts.outcome)
            paths = [keystr(structure.root_path(row)[1]) for row, value in structure.statics() if value is own_value]
            what = f"{short_text(own_value)}, result{paths[0] if paths else ' as a key'}"
            raise UnpicklableError(NOT_SAVED.format(name=parts.name, what=what, error=BY_IDENTITY))
