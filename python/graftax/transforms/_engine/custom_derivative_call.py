# SPDX-License-Identifier: Apache-2.0
"""One call of a function with a derivative rule: JAX sees flat leaves, the rules see graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from graftax import _core
from graftax._base.errors import MutationError, StructureError
from graftax._capture.numbers.symbols import NUMBERS, FloatSymbol
from graftax._graph.structure import path_text, place_name, written_path
from graftax._graph.structure_diff import differ_only_in_jaxprs, differences_text
from graftax._jax.compilation import own_jit
from graftax._jax.error_texts import is_of_differentiated_callback, is_of_symbolic_zeros
from graftax.transforms._engine.dce import without_dead_code
from graftax.transforms._engine.lift import Output, call_first, named, traced_output
from graftax.transforms._engine.opaque_leaves import leaves_in_functions, leaves_in_values
from graftax.transforms._engine.program import Program, replaced
from graftax.transforms._engine.tangents import (
    OTHER_SHAPE,
    TangentType,
    array_text,
    is_float0,
    is_inexact,
    match_tangents,
)

OF_CAPTURED = (
    "{name} is differentiated with respect to {path}, which its rule does not cover: a rule gives the "
    "derivative with respect to the arguments only{besides}. Pass it as an argument, or stop its gradient"
    " (jax.lax.stop_gradient)."
)
RULE_CHANGES = (
    "the rule of {name} changed {paths}. JAX runs a rule when it needs a derivative, possibly later than "
    "the call or not at all: return the new value, or make the change in the function itself."
)
RULE_RETURNS = (
    "{name}: its rule has to return the value that the function returns, and returned another:\n{differences}\n"
    "(expected is what the function returns.)"
)
WRITTEN_BY_HOST = (
    "{name} changes {paths}, and computes what it writes there with a host function of what is differentiated. Its "
    "rule covers only the result: return the value, or give the host function jax.lax.stop_gradient(...) of its "
    "arguments."
)
RETURNS_ARGUMENT = (
    "{name} returns an object of the caller's, whose array at {path} would then keep the derivative that it has, and "
    "not get that of the rule. Return a new object: jax.tree.map(lambda x: x, ...) copies a tree."
)


TangentRule = Callable[[list[Any], tuple[Any, ...]], tuple[Any, Any]]
Forward = Callable[[list[Any], list[bool]], tuple[Any, Any]]


class Saved(NamedTuple):
    """What the forward rule saves for the backward rule."""

    operands: list[Any]  # graphs like the operands, built around the saved leaves
    residuals: Any
    perturbed: Sequence[bool]  # for each leaf of the program
    updates: tuple[Any, ...]  # graphs like the operands, with the cotangents of what the function writes


class TangentParts(NamedTuple):
    """A tangent as a list of parts, whose sum it is."""

    parts: list[Any]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Structure:
    """The static part of the residuals."""

    graphdef: _core.GraphDef
    perturbed: tuple[bool, ...]


class TangentSpace(NamedTuple):
    """The structure of tangents or cotangents of some graphs: the same graphs, with a value per floating array."""

    graphdef: _core.GraphDef  # Python numbers are leaves in it
    zeros: tuple[Any, ...]  # for each leaf of the graph, its value if it is not differentiated
    numbers: tuple[int, ...]  # for each differentiated leaf, its index in the graph
    leaves: tuple[int, ...]  # for each differentiated leaf, its index in the program
    shapes: tuple[TangentType, ...]

    @staticmethod
    def from_graphs(
        build: Callable[[list[Any]], Sequence[object]],
        names: Sequence[str],
        leaves: Sequence[object],
        excluded: Collection[int] = (),
    ) -> TangentSpace:
        """The tangent space of primal graphs: those that `build` makes around leaves.

        Args:
            leaves: arrays of the types of the leaves, or the leaves themselves.
            excluded: indices of leaves that have no tangent.
        """
        # Placeholders tell which of these leaves each leaf of the graphs is.
        placeholders = [np.zeros(()) for _ in leaves]
        number_of = {id(placeholder): i for i, placeholder in enumerate(placeholders)}
        graphs = build(placeholders)
        record_leaves, graphdef = _core.record(tuple(graphs), tuple(names), [_core.RootFlag.dynamic] * len(graphs))
        zeros: list[Any] = []
        differentiated: list[tuple[int, int, TangentType]] = []
        for index, (leaf, key_path) in enumerate(zip(record_leaves, graphdef.leaf_places(), strict=True)):
            # Python numbers are leaves here, so that a static 3.0 has the tangent 0.0.
            zeros.append(leaf.__class__(0) if type(leaf) in (float, complex, FloatSymbol) else None)
            if type(leaf) in NUMBERS:
                continue
            number = number_of[id(leaf)]
            if is_inexact(leaves[number]) and number not in excluded:
                tangent_type = TangentType.from_leaf(leaves[number], *key_path, place_name(key_path, tuple(names)))
                differentiated.append((index, number, tangent_type))
        indices, numbers, shapes = zip(*differentiated, strict=True) if differentiated else ((), (), ())
        return TangentSpace(graphdef, tuple(zeros), indices, numbers, shapes)

    def graphs(self, values: Sequence[Any], statics: bool = True) -> tuple[Any, ...]:
        """The graphs, built around one value per differentiated leaf.

        A static Python number has the tangent zero, or None without `statics`.
        """
        leaves = replaced(self.zeros if statics else [None] * len(self.zeros), self.numbers, values)
        return _core.unflatten_roots(self.graphdef, leaves, True)


class TracedValue:
    """The traced value of a function: its structure, and the types of its arrays.

    `changed` are the key paths that the trace changed, `forwarded` has the operand leaf that a written array is.
    """

    def __init__(
        self,
        output: Output,
        outcome: _core.Outcome,
        changed: list[str],
        forwarded: list[int | None],
        name: str,
        filtered: bool,
    ) -> None:
        self.graphdef, self.outcome, self.changed, self.forwarded = output.graphdef, outcome, changed, forwarded
        paths = output.graphdef.leaf_paths()
        pairs = zip(output.leaves, paths, strict=True)
        # Of the tracers only the types are kept, since JAX may run the rules when their trace has ended.
        self.types = [TangentType.from_leaf(x, 0, path, f"value{path_text(path)}") for x, path in pairs]
        self.dtypes = [jnp.result_type(x) for x in output.leaves]
        number_of = {path: i for i, path in enumerate(paths)}
        result = [path for _, path in outcome.leaf_places()[: outcome.result_leaves]]
        # Arrays without an output leaf are in a returned object of the caller's. Such an object keeps its own arrays,
        # which cannot carry the derivative of the rule.
        missing = set(paths).difference(result)
        excluded = leaves_in_functions(output.graphdef) if filtered else set[int]()
        for i, (path, leaf) in enumerate(zip(paths, output.leaves, strict=True)):
            if path in missing and i not in excluded and is_inexact(leaf):
                raise StructureError(RETURNS_ARGUMENT.format(name=name, path=f"value{path_text(path)}"))
        self.order = [number_of[path] for path in result]  # for each result leaf of the Outcome, its index in the value
        self.tangents = TangentSpace.from_graphs(lambda x: [output.rebuilt(x)], ("value",), output.leaves, excluded)

    @property
    def writes(self) -> bool:
        return self.outcome.num_leaves > self.outcome.result_leaves


class CustomCall:
    """One call of a function that has a derivative rule.

    JAX may run the rules after the call has ended. For them the call keeps the structure of its operands, but not the
    caller's objects.

    Args:
        nondiff: indices of the operands that are not differentiated.
        error_type: the exception to raise if one of them is differentiated nevertheless.
        filtered: as in Equinox, the tangent of a function, of what it captures and of a static Python number is None.
    """

    def __init__(
        self, program: Program, nondiff: set[int], error_type: type[Exception] = TypeError, filtered: bool = False
    ) -> None:
        self.name, self._error_type, self._filtered = program.name, error_type, filtered
        # This one has the caller's objects, until the call has ended.
        self._live_program: Program | None = program
        self._private_program, self._nondiff = program.private(), nondiff
        self._value: TracedValue | None = None
        excluded = leaves_in_values(program.graphdef) if filtered else ()

        def differentiated(graphs: Sequence[Any]) -> list[Any]:
            return [graph for i, graph in enumerate(graphs[: program.operands]) if i not in nondiff]

        self._inputs = TangentSpace.from_graphs(
            lambda x: differentiated(program.rebuilt(x)), differentiated(program.names), program.leaves, excluded
        )

    def split(self, operands: Sequence[object]) -> tuple[list[Any], list[Any]]:
        """(the operands that are not differentiated, the others)."""
        nondiff = [x for i, x in enumerate(operands) if i in self._nondiff]
        return nondiff, [x for i, x in enumerate(operands) if i not in self._nondiff]

    def nondiff_leaves(self) -> list[int]:
        return sorted(self._private_program.leaves_below(sorted(self._nondiff)))

    def perturbed_tree(self, operand: object, flags: Sequence[bool]) -> Any:
        """A tree like the first operand that holds for each leaf whether it is differentiated."""
        graph = self._inputs.graphs([flags[i] for i in self._inputs.leaves])[0]

        def is_perturbed(leaf: object, flag: object) -> bool:
            return flag is True

        return jax.tree.map(is_perturbed, operand, graph)

    # ---- the function

    def _flat(self, *leaves: object) -> tuple[Any, ...]:
        program = self._live_program or self._private_program
        arrays = [_as_array(leaf) for leaf in leaves]
        output, outcome, outputs = traced_output(program, arrays, arrays=True)
        number = {id(leaf): i for i, leaf in enumerate(arrays)}
        forwarded = [number.get(id(leaf)) for leaf in outputs[outcome.result_leaves :]]
        self._value = TracedValue(output, outcome, program.changed, forwarded, self.name, self._filtered)
        return tuple(outputs)

    def _named_flat(self) -> Callable[..., Any]:
        """`_flat` under the user's name, which a bound method cannot take."""

        def flat(*leaves: object) -> tuple[Any, ...]:
            return self._flat(*leaves)

        return named(flat, self._private_program)

    def _ensure_traced(self, leaves: Sequence[object]) -> TracedValue:
        """The traced value of the function. JAX may run a rule without having run the function; it is traced then."""
        if self._value is None:
            try:
                jax.eval_shape(self._named_flat(), *leaves)
            # Code that needs concrete values has them here if the rule runs outside of `jit`.
            except jax.errors.ConcretizationTypeError:
                self._flat(*leaves)
        assert self._value is not None
        return self._value

    def _trace_writes(self, *leaves: object) -> tuple[Any, ...]:
        """What the function writes into the caller's objects."""
        outcome, outputs = self._private_program.trace(leaves, call_first, arrays=True)
        return tuple(outputs[outcome.result_leaves :])

    def _run(self, flat: Callable[..., Any]) -> Any:
        program = self._live_program
        assert program is not None
        try:
            try:
                outputs = flat(*program.leaves)
            except NotImplementedError as error:
                if not is_of_symbolic_zeros(error):
                    raise
                # JAX's eager shard_map has no symbolic zeros, but a compiled one does.
                outputs = own_jit(flat)(*program.leaves)
            assert self._value is not None
            return program.finish(outputs, self._value.outcome)
        # JAX keeps `flat` for later derivatives, and must not keep the caller's objects alive.
        finally:
            self._live_program = None

    # ---- the rules

    def _trace_rule(
        self, leaves: Sequence[object], rule: Callable[[list[Any]], tuple[object, object]]
    ) -> tuple[list[Any], Any]:
        """Runs a rule on the private copy of the operands: (leaves of the value, the second part of its result).

        Raises:
            MutationError: if the rule changes something that the function does not change as well.
            StructureError: if the rule's value is not like the function's value.
        """
        traced, results = self._value, list[tuple[Output, Any]]()
        assert traced is not None

        def body(functions: list[Callable[..., Any]], operands: list[Any]) -> Any:
            value, auxiliary = rule(operands)
            results.append((Output(*_core.flatten(value)), auxiliary))
            return value

        self._private_program.trace(leaves, body, mutation="propagate", arrays=True)
        changed = [path for path in self._private_program.changed if path not in traced.changed]
        if changed:
            raise MutationError(RULE_CHANGES.format(name=self.name, paths=", ".join(changed)))
        value, auxiliary = results[0]
        # Where the function returns an array, a rule may return a number, as in JAX.
        if value.graphdef != traced.graphdef:
            value = value.with_numbers(traced.graphdef)
        # A jaxpr within the value, as `filter_closure_convert` makes one, is another one in each trace.
        if not differ_only_in_jaxprs(traced.graphdef, value.graphdef):
            text = differences_text(traced.graphdef, value.graphdef, ("value",))
            raise StructureError(RULE_RETURNS.format(name=self.name, differences=text))
        for leaf, expected_type, dtype in zip(value.leaves, traced.types, traced.dtypes, strict=True):
            if np.shape(leaf) != expected_type.shape or jnp.result_type(leaf) != dtype:
                expected = array_text(expected_type.shape, dtype)
                actual = array_text(np.shape(leaf), jnp.result_type(leaf))
                text = OTHER_SHAPE.format(
                    name=self.name, what="value of the rule", path=expected_type.name, expected=expected, actual=actual
                )
                raise StructureError(text)
        return [value.leaves[i] for i in traced.order], auxiliary

    def _require_covered(self, differentiated: Iterable[bool], leaves: Sequence[object]) -> None:
        """Raises if a leaf is differentiated that the rule has no argument for: its derivative would be lost."""
        covered = set(self._inputs.leaves)
        # An integer has no derivative that could be lost.
        for i, (is_differentiated, leaf) in enumerate(zip(differentiated, leaves, strict=True)):
            if is_differentiated and i not in covered and is_inexact(leaf):
                exception = ", without those of nondiff_argnums" if self._nondiff else ""
                path = self._private_program.key_paths[i].name
                raise self._error_type(OF_CAPTURED.format(name=self.name, path=path, besides=exception))

    def with_tangents(self, rule: TangentRule, symbolic: bool) -> Any:
        """The call under `jax.custom_jvp`. `rule` takes operands and tangents, and returns (value, tangent)."""

        def flat_rule(primals: tuple[object, ...], tangents: tuple[object, ...]) -> tuple[Any, ...]:
            # What is differentiated has a tangent other than JAX's symbolic zero.
            leaves = [_rule_argument(primal) for primal in primals]
            self._require_covered([not isinstance(t, SymbolicZero) for t in tangents], leaves)
            traced = self._ensure_traced(leaves)
            leaf_tangents = [_materialize_zeros(tangents[i], leaves[i], symbolic) for i in self._inputs.leaves]
            tangent_graphs = self._inputs.graphs(leaf_tangents, not self._filtered)
            outputs, rate = self._trace_rule(leaves, lambda operands: rule(operands, tangent_graphs))
            types = [traced.types[i] for i in traced.order]
            # The rule's tangent is a graph like the value; JAX wants one tangent per output leaf, in their order. None
            # takes the place of all parts if no argument has a rule: the tangent is zero.
            parts = rate.parts if isinstance(rate, TangentParts) else [rate]
            rates = [
                match_tangents(self.name, "tangent", types, (part,), keep_numbers=True) for part in parts or [None]
            ]
            total = tuple(map(_sum, zip(*rates, strict=True)))
            # The rule is for the result only: what the function writes has the derivative of its own code.
            if traced.writes:
                diff_leaves = [
                    i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero) and is_inexact(leaves[i])
                ]
                writes, diff_values = self._writes_of(leaves, diff_leaves)
                written, written_tangents = jax.jvp(writes, diff_values, tuple(tangents[i] for i in diff_leaves))
                return (*outputs, *written), (*total, *written_tangents)
            return tuple(outputs), total

        # Symbolic zeros tell what is not differentiated, whether or not the user's rule wants them.
        custom = jax.custom_jvp(self._named_flat())
        custom.defjvp(flat_rule, symbolic_zeros=True)
        return self._run(custom)

    def with_cotangents(
        self,
        forward: Forward,
        backward: Callable[[Saved, Any], tuple[object, ...]],
        keep: Sequence[int],
        symbolic: bool,
        symbolic_primals: bool,
        updates: bool = False,
    ) -> Any:
        """The call under `jax.custom_vjp`.

        Args:
            forward: takes the operands, and for each leaf whether it is differentiated. Returns (value, residuals).
            backward: takes what `forward` saved and the cotangent of the value. Returns cotangents of the operands.
            keep: indices of the leaves that are saved, so that `backward` can be given the operands.
            symbolic, symbolic_primals: pass JAX's symbolic zeros to `backward`, and CustomVJPPrimals to `forward`.
            updates: `backward` also takes the cotangents of what the function writes, and is their rule, too.
        """

        def flat_forward(*primals: CustomVJPPrimal) -> tuple[Any, Any]:
            leaves, perturbed = [_as_array(p.value) for p in primals], [bool(p.perturbed) for p in primals]
            self._require_covered(perturbed, leaves)
            traced = self._ensure_traced(leaves)
            arguments = primals if symbolic_primals else leaves
            outputs, residuals = self._trace_rule(arguments, lambda operands: forward(operands, perturbed))
            arrays, graphdef = _core.flatten(residuals)
            # The backward pass differentiates the writes as well, unless the user's rule does.
            written, pull = (), None
            if traced.writes and updates:
                written = self._trace_writes(*leaves)
            elif traced.writes:
                writes, diff_values = self._writes_of(leaves, [i for i in self._inputs.leaves if perturbed[i]])
                written, pull = jax.vjp(writes, *diff_values)
            structure = _Structure(graphdef, tuple(perturbed))
            return (*outputs, *written), (tuple(arrays), tuple(leaves[i] for i in keep), pull, structure)

        def flat_backward(residuals: Any, cotangents: tuple[object, ...]) -> tuple[Any, ...]:
            arrays, saved_leaves, pull, structure = residuals
            traced = self._value
            assert traced is not None
            written_cotangents = cotangents[len(traced.order) :]
            saved = Saved(
                self._operands(keep, saved_leaves),
                _core.unflatten(structure.graphdef, list(arrays)),
                structure.perturbed,
                self._updates(traced, written_cotangents) if updates else (),
            )
            rule_cotangents = backward(saved, self._value_cotangent(traced, cotangents, symbolic))
            totals = match_tangents(self.name, "cotangent", self._inputs.shapes, rule_cotangents, self._inputs.graphdef)
            # The rule is for the result only: what the function writes is pulled back through its own code.
            if pull is not None:
                of_writes = iter(pull(tuple(_materialize_zeros(_array(c), c, False) for c in written_cotangents)))
                parts = zip(totals, self._inputs.leaves, strict=True)
                totals = tuple(_sum((t, next(of_writes))) if structure.perturbed[i] else t for t, i in parts)
            return tuple(replaced([None] * self._private_program.graphdef.num_leaves, self._inputs.leaves, totals))

        custom = jax.custom_vjp(self._named_flat())
        custom.defvjp(flat_forward, flat_backward, symbolic_zeros=True)
        return self._run(custom)

    def _value_cotangent(self, traced: TracedValue, cotangents: Sequence[object], symbolic: bool) -> Any:
        """The cotangent of the value as a graph like it. JAX has one for each output leaf, in their order."""
        result_index = {number: i for i, number in enumerate(traced.order)}
        value_cotangents = [
            _materialize_zeros(_array(cotangents[result_index[i]]), traced.types[i], symbolic)
            for i in traced.tangents.leaves
        ]
        return traced.tangents.graphs(value_cotangents, not self._filtered)[0]

    def _updates(self, traced: TracedValue, cotangents: Sequence[object]) -> tuple[Any, ...]:
        """Graphs like the differentiated operands, with a cotangent for each written array, and None elsewhere."""
        outcome, graphdef = traced.outcome, self._private_program.graphdef
        values: dict[Any, Any] = {}
        nodes, written = outcome.inputs()[2], outcome.leaf_places()[outcome.result_leaves :]
        initial_leaf = {key_path: number for number, key_path in enumerate(graphdef.leaf_places())}
        for place, cotangent, leaf in zip(written, cotangents, traced.forwarded, strict=True):
            key_path = written_path(graphdef, nodes, place)
            # An array that is written back to its own path is not an update.
            if leaf is None or initial_leaf.get(key_path) != leaf:
                values[key_path] = _materialize_zeros(_array(cotangent), cotangent, False)
        diff = [i for i in range(self._private_program.operands) if i not in self._nondiff]
        leaves = [values.get((diff[root], path)) for root, path in self._inputs.graphdef.leaf_places()]
        return _core.unflatten_roots(self._inputs.graphdef, leaves, True)

    def _writes_of(
        self, leaves: Sequence[object], diff_leaves: Sequence[int]
    ) -> tuple[Callable[..., tuple[Any, ...]], tuple[Any, ...]]:
        """The writes of the function, as a function of its differentiated leaves: (the function, the leaves).

        Host callbacks that the writes do not depend on do not run in it: the rule decides whether to call them.
        """
        run = without_dead_code(self._trace_writes, leaves)

        def writes(*values: object) -> tuple[Any, ...]:
            try:
                return tuple(run(*replaced(leaves, diff_leaves, values)))
            except ValueError as error:
                traced = self._value
                if traced is None or not is_of_differentiated_callback(error):
                    raise
                paths = ", ".join(traced.changed)
                raise ValueError(WRITTEN_BY_HOST.format(name=self.name, paths=paths)) from error

        return writes, tuple(leaves[i] for i in diff_leaves)

    def _operands(self, keep: Sequence[int], saved_leaves: Sequence[object]) -> list[Any]:
        """Graphs like the operands, built around the saved leaves."""
        program = self._private_program
        leaves = replaced([None] * program.graphdef.num_leaves, keep, saved_leaves)
        return list(_core.unflatten_roots(program.graphdef, leaves)[: program.operands])


def _as_array(primal: object) -> Any:
    """A primal as a `jax.Array`: JAX passes Python numbers and NumPy arrays on unconverted."""
    return primal if isinstance(primal, jax.Array) else jnp.asarray(primal)


def _rule_argument(primal: object) -> Any:
    """A primal as the rule sees it. Outside of a trace, numbers stay numbers, so that a rule may use their values."""
    if type(primal) in NUMBERS or isinstance(primal, np.generic):
        return primal
    return primal.copy() if type(primal) is np.ndarray else _as_array(primal)


def _array(cotangent: object) -> Any:
    return jnp.asarray(cotangent) if isinstance(cotangent, (float, complex, np.generic)) else cotangent


def _materialize_zeros(tangent: object, like: object, symbolic: bool) -> Any:
    """The tangent; with `symbolic` False, an array of zeros in place of JAX's symbolic zeros."""
    if symbolic or not isinstance(tangent, SymbolicZero):
        return tangent
    if isinstance(like, SymbolicZero):
        aval: Any = like.aval
        return TangentType(0, (), "", aval.shape, aval.dtype).zeros()
    return (like if isinstance(like, TangentType) else TangentType.from_leaf(like, 0, (), "")).zeros()


def _sum(parts: Sequence[Any]) -> Any:
    # float0 has no addition, and needs none: it is the tangent of an integer.
    return parts[0] if len(parts) == 1 or is_float0(parts[0]) else sum(parts[1:], parts[0])
