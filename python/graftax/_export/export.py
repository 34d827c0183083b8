# SPDX-License-Identifier: Apache-2.0
"""A compiled function as bytes: traced here, called in another process on object graphs of the same structure."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import io
import pickle
import types
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast

import jax
import jax.export
import jax.numpy as jnp

from graftax import _core
from graftax._base.errors import GraftaxError, MutationError, StructureError, UnpicklableError, rename_leaves
from graftax._base.handles import HandleLayout
from graftax._base.key_path import keystr
from graftax._capture.signature import Signature
from graftax._graph.patterns import of_arguments
from graftax._graph.structure import Op, Structure, place_name
from graftax._graph.structure_diff import differences_text, short_text
from graftax._jax.compat import as_weak, is_dimension, is_of_exported_callback
from graftax._jax.tracebacks import boundary
from graftax._jit.build_entry import build_entry
from graftax._jit.call_plan import Plan, number_test
from graftax._jit.jitted import Jitted
from graftax._jit.leaf_names import leaf_names
from graftax._jit.options import Options, split_patterns
from graftax._jit.stages import copy_numpy_leaves, match_structure

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
    "{name}: a symbolic dimension is a part of the result, or of what is left in an argument, at {path}. Only an "
    "array can differ from shape to shape: make it an array (jnp.asarray(x.shape[0])), or let the caller find it."
)
NO_CALLBACKS = (
    "{name} calls a function on the host, which an exported program cannot hold. Take callbacks, jax.debug.print and "
    "progress= out of it, or compile it where it runs."
)
NOT_SAVED = (
    "{name} cannot be saved: {what}: {error}. Functions and classes are saved by name: define them at the "
    "top of a module."
)
BY_IDENTITY = "it counts by identity, and a copy that is loaded would be another object"
NOT_EXPORTED = "these are not the bytes of an exported function, or they were damaged: {error}"

P = ParamSpec("P")
R = TypeVar("R")

_MAGIC = b"graftax.Exported 2\n"
_MISSING, _RETURNED = -1, -2  # a captured leaf that nobody needs, and one that the program returns


# Name, signature, graph and layout of the arguments, what becomes of them; then for each leaf and each node of the
# trace, which one of the arguments it is; how the arguments are recorded: a flag a root, patterns of `dynamic=`; and
# which outputs have weak types, which JAX's bytes do not say.
_Parts = tuple[
    str,
    inspect.Signature,
    _core.GraphDef,
    tuple[Any, ...],
    _core.Outcome,
    tuple[int, ...],
    tuple[int, ...],
    tuple[list[int], Sequence[str]],
    tuple[bool, ...],
]


class Exported(Generic[P, R]):
    """An exported function: called like the function it was made from, on arguments of the same structure and statics.

    `exported` is JAX's own `Exported`, over the flat leaves.
    """

    exported: jax.export.Exported
    name: str

    def __init__(self, parts: _Parts, exported: jax.export.Exported) -> None:
        (
            self.name,
            self._signature,
            self._graphdef,
            self._layout,
            self._outcome,
            self._leaves,
            self._nodes,
            self._how,
            self._weak,
        ) = parts
        self._parts, self.exported = parts, exported
        self._binds = Signature.of_parameters(self._signature)

    @boundary
    def call(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the exported program, and does to the arguments what the function did.

        Raises:
            StructureError: where the arguments differ from those it was exported for, naming the places.
            ValueError: where an array has another shape or dtype, naming its path.
        """
        roots, layout = _bound(self._signature, self._binds, args, kwargs)
        names = self._binds.root_names(layout)
        again = "Export it again for these"
        leaves, nodes = match_structure(
            self.name, self._graphdef, self._layout, names, roots, layout, self._record, "exported", again
        )
        try:
            result, written, captured = self.exported.call(*copy_numpy_leaves(leaves))
        except (TypeError, ValueError) as error:
            rename_leaves(error, leaf_names(self._graphdef, names), flat="args")
            raise
        rest = iter(captured)
        inputs = [leaves[i] if i >= 0 else next(rest) if i == _RETURNED else None for i in self._leaves]
        at = [nodes[i] if i >= 0 else None for i in self._nodes]
        out = [*result, *written]
        out = [as_weak(x) if weak else x for x, weak in zip(out, self._weak or [False] * len(out), strict=True)]
        return cast(R, self._outcome.apply(out, inputs, at))

    __call__ = call

    def _record(self, roots: tuple[Any, ...], layout: tuple[Any, ...]) -> _core.Recording:
        flags, texts = self._how
        names = self._binds.root_names(layout)
        patterns = [of_arguments(text, self.name, "dynamic=") for text in texts]
        dynamic = number_test(patterns, roots, names, flags, True)
        return _core.Recording(roots, names, flags, layout, False, True, dynamic)

    def serialize(self, vjp_order: int = 0) -> bytearray:
        """The exported function as bytes. Classes and functions in it are named, as in every pickle.

        Args:
            vjp_order: how often the loaded function can be differentiated, as in `jax.export`.

        Raises:
            UnpicklableError: for a value that cannot be saved, at its path.
        """
        program = self.exported.serialize(vjp_order=vjp_order)
        for parameter in self._signature.parameters.values():
            if parameter.default is not parameter.empty:
                self._pickled(f"the default of {parameter.name}", parameter.default)
        data = self._pickled("what its arguments and its result are made of", self._parts)
        _check_identities(self.name, self._parts, pickle.loads(data))
        content = pickle.dumps((data, bytes(program)))
        return bytearray(_MAGIC + hashlib.sha256(content).digest() + content)

    def _pickled(self, what: str, value: Any) -> bytes:
        try:
            return pickle.dumps(value)
        except Exception as error:
            raise UnpicklableError(NOT_SAVED.format(name=self.name, what=what, error=error)) from error

    @classmethod
    def deserialize(cls, blob: bytes | bytearray | memoryview) -> Exported[..., Any]:
        """Loads what `serialize` made. As with every pickle: load only what you trust.

        Raises:
            StructureError: when these are not the bytes of an exported function, or were damaged.
        """
        stream = io.BytesIO(blob)
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise StructureError(NOT_EXPORTED.format(error="they begin otherwise"))
        digest, content = stream.read(hashlib.sha256().digest_size), stream.read()
        if hashlib.sha256(content).digest() != digest:  # a changed bit of a constant would be read as another constant
            raise StructureError(NOT_EXPORTED.format(error="their digest is another one"))
        try:
            data, program = pickle.loads(content)
            parts = pickle.loads(data)
            return cls(parts, jax.export.deserialize(bytearray(program)))
        except Exception as error:
            raise StructureError(NOT_EXPORTED.format(error=f"{type(error).__name__}: {error}")) from error

    def __reduce__(self) -> Any:
        return (Exported.deserialize, (bytes(self.serialize()),))

    def __repr__(self) -> str:
        return f"<graftax Exported {self.name}{self._signature}>"


@boundary
def export(
    function: Callable[P, R], *, platforms: Sequence[str] | None = None, disabled_checks: Sequence[Any] = ()
) -> Callable[P, Exported[P, R]]:
    """Exports a function, jitted or not, for arguments like the given ones: `graftax.export(f)(*args, **kwargs)`.

    What the function captures becomes part of the program, with the values of now: its closure, the globals it names,
    the object of a bound method. The function must not change these, nor return one of them.

    Args:
        function: any callable; the options of a jitted one are kept.
        platforms, disabled_checks: as in `jax.export.export`.

    Raises:
        MutationError: where the function changes something that it captures.
        StructureError: where what it returns holds a symbolic dimension, or an object that it captures.
        NotImplementedError: JAX's, where it calls a function on the host.

    Example:
        >>> exported = graftax.export(lambda config, x: x * config["rate"])({"rate": 2}, jnp.ones(3))
        >>> again = graftax.Exported.deserialize(exported.serialize())
        >>> again({"rate": 2}, jnp.ones(3))
        Array([2., 2., 2.], dtype=float32)
    """
    jitted = function if isinstance(function, Jitted) else Jitted(function, Options(warn_impure=True))

    @boundary
    def exporter(*args: P.args, **kwargs: P.kwargs) -> Exported[P, R]:
        own = cast("Jitted[P, R]", jitted)
        return own._retry_with_new_roots(lambda: _export(own, args, kwargs, platforms, tuple(disabled_checks)))

    return exporter


def _export(jitted: Jitted[P, R], args: Any, kwargs: Any, platforms: Any, disabled_checks: Any) -> Exported[P, R]:
    options = dataclasses.replace(jitted._options, donate=(), donate_word="none")  # a caller's arrays are the caller's
    call = jitted._record_arguments(args, kwargs)
    roots, layout, recording = call.roots, call.layout, call.recording
    plan = Plan(jitted._plan.name, jitted._plan.definition, jitted._plan.signature, options, jitted._plan.on_trace)
    graphdef, names = recording.graphdef, recording.names
    skip, arguments = len(jitted._prefix), plan.signature.arguments(layout)
    signature = _signature_of(jitted._function, skip)
    binds = Signature.of_parameters(signature)
    given, given_layout = _bound(signature, binds, args, kwargs)
    given_names = binds.root_names(given_layout)
    _refuse_sharing(plan.name, graphdef, names, range(skip, arguments))
    _refuse_packed_shapes(plan.name, graphdef, names)
    flags = plan.signature.root_flags(layout, options.static, plan.dynamic)[skip:arguments]
    how = (flags, split_patterns(options.dynamic)[1])
    dynamic = number_test(plan.dynamic_patterns, given, given_names, flags, True)
    own_leaves, own_graphdef = _core.record(given, given_names, flags, given_layout, shapes=True, dynamic=dynamic)
    leaf_at = _leaf_numbers(graphdef, range(skip, arguments))

    entry = build_entry(dataclasses.replace(call, plan=plan), staged=True)
    constants = copy_numpy_leaves(recording.leaves)
    found: list[tuple[_core.Outcome, list[int]]] = []

    def flat(*arrays: Any) -> Any:
        values = [arrays[at] if at >= 0 else constant for at, constant in zip(leaf_at, constants, strict=True)]
        result, written, code = entry.compiled(*values)
        outcome = entry.outcomes[_core.decode(code)]
        returned = sorted({i for i in outcome.inputs()[1] if leaf_at[i] < 0})
        found.append((outcome, returned))
        return result, written, tuple(jnp.asarray(values[i]) for i in returned)

    flat.__name__ = flat.__qualname__ = plan.name
    program = jax.export.export(jax.jit(flat), platforms=platforms, disabled_checks=disabled_checks)
    try:
        exported = _core.run_active(jitted, roots, entry.outcomes, recording, program, *own_leaves)
    except ValueError as error:  # of shapes that do not fit
        rename_leaves(error, leaf_names(own_graphdef, given_names), flat="args")
        raise
    except NotImplementedError as error:
        if is_of_exported_callback(error):
            error.add_note(NO_CALLBACKS.format(name=plan.name))
        raise
    outcome, returned = found[-1]
    for i in returned:
        leaf_at[i] = _RETURNED
    node_at = _node_numbers(graphdef, roots, own_graphdef, given)
    _refuse_captured(plan.name, graphdef, names, outcome, node_at)
    _refuse_dimensions(plan.name, outcome)
    weak = tuple(bool(getattr(aval, "weak_type", False)) for aval in exported.out_avals[: outcome.num_leaves])
    parts = (plan.name, signature, own_graphdef, given_layout, outcome, tuple(leaf_at), tuple(node_at), how, weak)
    return Exported(parts, exported)


def _signature_of(function: types.FunctionType, skip: int) -> inspect.Signature:
    """The parameters of a function after the first `skip`, with their defaults and without annotations."""
    code, parameter = function.__code__, inspect.Parameter
    count, names = code.co_argcount, list(code.co_varnames)
    defaults = dict(zip(reversed(names[:count]), reversed(function.__defaults__ or ()), strict=False))
    defaults.update(function.__kwdefaults__ or {})
    kinds = [parameter.POSITIONAL_ONLY] * code.co_posonlyargcount
    kinds += [parameter.POSITIONAL_OR_KEYWORD] * (count - code.co_posonlyargcount)
    named = list(zip(names, kinds, strict=False))[skip:]
    rest = names[count + code.co_kwonlyargcount :]
    if code.co_flags & inspect.CO_VARARGS:
        named.append((rest.pop(0), parameter.VAR_POSITIONAL))
    named += [(name, parameter.KEYWORD_ONLY) for name in names[count : count + code.co_kwonlyargcount]]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        named.append((rest.pop(0), parameter.VAR_KEYWORD))
    return inspect.Signature(
        [parameter(name, kind, default=defaults.get(name, parameter.empty)) for name, kind in named]
    )


def _bound(
    signature: inspect.Signature, binds: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(roots, layout) of these arguments. Raises TypeError where the signature does not take them."""
    bound = binds.binding.bind(args, kwargs)
    if bound is None:
        signature.bind(*args, **kwargs)  # says what is wrong
        raise GraftaxError(f"the arguments {signature} could not be bound")
    return bound


def _leaf_numbers(graphdef: _core.GraphDef, arguments: range) -> list[int]:
    """For each leaf: which leaf of the arguments it is, or `_MISSING` for one that is captured."""
    out: list[int] = []
    count = 0
    for root, _ in graphdef.leaf_places():
        inside = root in arguments
        out.append(count if inside else _MISSING)
        count += inside
    return out


def _node_numbers(
    graphdef: _core.GraphDef, roots: tuple[Any, ...], own: _core.GraphDef, given: tuple[Any, ...]
) -> list[int]:
    """The same for the nodes that have an identity."""
    whole, part = _core.walk(graphdef, roots), _core.walk(own, given)
    if whole is None or part is None:
        raise GraftaxError("the arguments changed while they were exported")
    number = {id(node): i for i, node in enumerate(part[1])}
    return [number.get(id(node), _MISSING) for node in whole[1]]


def _refuse_sharing(name: str, graphdef: _core.GraphDef, names: tuple[str, ...], arguments: range) -> None:
    """An object that is both an argument and captured would be one object here, and two for every later call."""
    structure = Structure(graphdef)
    for row in structure.rows:
        first = structure.target(row)
        if row.op is Op.ref and (row.root in arguments) != (first.root in arguments):
            found = sorted((row, first), key=lambda r: r.root not in arguments)
            one, other = (place_name(structure.place(r), names) for r in found)
            raise StructureError(CAPTURED_SHARED.format(name=name, one=one, other=other))


def _refuse_packed_shapes(name: str, graphdef: _core.GraphDef, names: tuple[str, ...]) -> None:
    """A shape stands for an array, but a handle packs arrays only."""
    structure = Structure(graphdef)
    for row, layout in structure.statics():
        inside = Structure(layout.graphdef) if isinstance(layout, HandleLayout) else None
        for below, value in inside.statics() if inside else ():
            if inside and isinstance(value, jax.ShapeDtypeStruct):
                place = place_name(structure.place(row), names).removesuffix("._layout")
                raise StructureError(PACKED_SHAPE.format(name=name, path=place + keystr(inside.place(below)[1])))


def _refuse_dimensions(name: str, outcome: _core.Outcome) -> None:
    """A symbolic dimension has a value where the program runs; what is no array is the same for every call."""
    structure = Structure(outcome)
    for row in structure.rows:
        if row.type is not None and is_dimension(row.type):
            raise StructureError(SYMBOLIC.format(name=name, path=keystr(structure.place(row)[1])))


def _refuse_captured(
    name: str, graphdef: _core.GraphDef, names: tuple[str, ...], outcome: _core.Outcome, node_at: list[int]
) -> None:
    """What is captured is not there for later calls: it can neither be changed nor given back."""
    held, _, written = outcome.inputs()
    for indices, error, text in (
        (written, MutationError, CAPTURED_CHANGED),
        (held, StructureError, CAPTURED_RETURNED),
    ):
        for index in indices:
            if node_at[index] < 0:
                structure = Structure(graphdef)
                path = place_name(structure.place(structure.tracked[index]), names)
                raise error(text.format(name=name, path=path))


def _check_identities(name: str, parts: _Parts, again: _Parts) -> None:
    """What counts by identity must be found again under its name: a copy of it would match nothing."""
    if parts[2] != again[2]:
        where = differences_text(parts[2], again[2], Signature.of_parameters(parts[1]).root_names(parts[3]))
        raise UnpicklableError(NOT_SAVED.format(name=name, what=f"\n{where}\n", error=BY_IDENTITY))
    for one, other in zip(parts[4].identities(), again[4].identities(), strict=True):
        if one is not other:
            structure = Structure(parts[4])
            found = [keystr(structure.place(row)[1]) for row, value in structure.statics() if value is one]
            place = found[0] if found else " as a key"
            raise UnpicklableError(
                NOT_SAVED.format(name=name, what=f"{short_text(one)}, result{place}", error=BY_IDENTITY)
            )
