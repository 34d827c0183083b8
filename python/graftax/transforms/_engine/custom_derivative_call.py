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
from graftax._graph.structure import path_text, place_name
from graftax._graph.structure_diff import differences_text, like_but_for_jaxprs
from graftax._jax.compat import is_of_differentiated_callback, is_of_symbolic_zeros
from graftax.transforms._engine.dce import without_dead_code
from graftax.transforms._engine.lift import Output, call_first, named
from graftax.transforms._engine.opaque_leaves import leaves_in_functions, leaves_in_values
from graftax.transforms._engine.program import Program
from graftax.transforms._engine.tangents import OTHER_SHAPE, TangentType, is_inexact, is_nothing, matched

OF_CAPTURED = (
    "{name} is differentiated by {path}, which its rule says nothing about: a rule has the derivative by the arguments "
    "alone{besides}. Pass it as an argument, or stop its gradient (jax.lax.stop_gradient)."
)
RULE_CHANGES = (
    "the rule of {name} changed {paths}. JAX runs a rule whenever it asks for a derivative, possibly later than the "
    "call or not at all: return the new value, or let the function itself do the change, which is what comes back."
)
RULE_RETURNS = (
    "{name}: its rule has to return the value that the function returns, and returned another:\n{differences}\n"
    "(expected is what the function returns.)"
)
WRITTEN_BY_HOST = (
    "{name} changes {paths}, and computes what it writes there with a host function of what is differentiated. Its "
    "rule speaks of the result alone: return the value, or give the host function jax.lax.stop_gradient(...) of its "
    "arguments."
)
RETURNS_ARGUMENT = (
    "{name} returns an object of the caller's, whose array at {path} would then keep the derivative that it has, and "
    "not get that of the rule. Return a new object: jax.tree.map(lambda x: x, ...) copies a tree."
)


TangentRule = Callable[[list[Any], tuple[Any, ...]], tuple[Any, Any]]


Forward = Callable[[list[Any], list[bool]], tuple[Any, Any]]


class Saved(NamedTuple):
    """What a backward rule is given from the forward one."""

    operands: list[Any]  # graphs like the operands, around the leaves that were kept
    residuals: Any
    perturbed: Sequence[bool]  # for each leaf of the program
    updates: tuple[Any, ...] = ()  # graphs like the operands, with the cotangents of what the function writes


class TangentParts(NamedTuple):
    """A tangent in parts, to be added up."""

    parts: list[Any]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Structure:
    """What travels with residuals besides arrays."""

    graphdef: _core.GraphDef
    perturbed: tuple[bool, ...]


class TangentSpace(NamedTuple):
    """Graphs of tangents or cotangents: like some graphs, with values for their floating arrays."""

    graphdef: _core.GraphDef  # Python numbers are leaves in it
    zeros: tuple[Any, ...]  # what stands in it where nothing is differentiated
    numbers: tuple[int, ...]  # for each wanted leaf, its number in the graph
    leaves: tuple[int, ...]  # for each wanted leaf, its number among those of the program
    shapes: tuple[TangentType, ...]

    @staticmethod
    def of(
        graphs: Sequence[Any],
        names: Sequence[str],
        leaf_of: Callable[[Any], tuple[int, Any]],
        apart: Collection[int] = (),
    ) -> TangentSpace:
        """`leaf_of` gives the number of a leaf of the graphs, and an array like it. Those `apart` have no tangent."""
        found, graphdef = _core.record(tuple(graphs), tuple(names), [_core.RootFlag.dynamic] * len(graphs))
        zeros: list[Any] = []
        wanted: list[tuple[int, int, TangentType]] = []
        for at, (leaf, place) in enumerate(zip(found, graphdef.leaf_places(), strict=True)):
            zeros.append(leaf.__class__(0) if type(leaf) in (float, complex, FloatSymbol) else None)
            if type(leaf) in NUMBERS:
                continue
            number, array = leaf_of(leaf)
            if is_inexact(array) and number not in apart:
                wanted.append((at, number, TangentType.of(array, *place, place_name(place, tuple(names)))))
        at, numbers, shapes = zip(*wanted, strict=True) if wanted else ((), (), ())
        return TangentSpace(graphdef, tuple(zeros), at, numbers, shapes)

    def graphs(self, values: Sequence[Any], statics: bool = True) -> tuple[Any, ...]:
        """One value for each wanted leaf. Without `statics`, None stands for Python numbers, and not a zero."""
        leaves = list(self.zeros) if statics else [None] * len(self.zeros)
        for at, value in zip(self.numbers, values, strict=True):
            leaves[at] = value
        return _core.unflatten_roots(self.graphdef, leaves, True)


class Value:
    """What a function returned when it was traced: structure, and types of arrays."""

    forwarded: list[int | None]  # for each array that is written, which leaf of the operands it is

    def __init__(self, output: Output, outcome: _core.Outcome, changed: list[str], name: str, filtered: bool) -> None:
        self.graphdef, self.outcome, self.changed = output.graphdef, outcome, changed
        paths = output.graphdef.leaf_paths()
        pairs = zip(output.leaves, paths, strict=True)
        self.types = [TangentType.of(x, 0, path, f"value{path_text(path)}") for x, path in pairs]
        self.dtypes = [jnp.result_type(x) for x in output.leaves]
        number_of = {path: i for i, path in enumerate(paths)}
        result = [path for _, path in outcome.leaf_places()[: outcome.result_leaves]]
        missing = set(paths).difference(result)
        apart = leaves_in_functions(output.graphdef) if filtered else set[int]()
        for i, (path, leaf) in enumerate(zip(paths, output.leaves, strict=True)):
            if path in missing and i not in apart and is_inexact(leaf):
                raise StructureError(RETURNS_ARGUMENT.format(name=name, path=f"value{path_text(path)}"))
        self.order = [number_of[path] for path in result]  # for each result leaf, its number among those of the value
        placeholders = [np.zeros(()) for _ in output.leaves]
        numbers = {id(placeholder): i for i, placeholder in enumerate(placeholders)}

        def leaf_of(placeholder: Any) -> tuple[int, Any]:
            return numbers[id(placeholder)], output.leaves[numbers[id(placeholder)]]

        self.tangents = TangentSpace.of([output.rebuilt(placeholders)], ("value",), leaf_of, apart)

    def with_numbers(self, given: Output) -> Output:
        """What a rule returned, with the Python numbers that stand in the place of arrays as leaves."""
        places = set(self.graphdef.leaf_places())
        leaves, graphdef = _core.record((given.rebuilt(given.leaves),), ("value",), dynamic=places.__contains__)
        arrays = [np.zeros(()) for _ in leaves]
        of = {id(array): leaf for array, leaf in zip(arrays, leaves, strict=True)}
        standing, graphdef = _core.flatten(_core.unflatten(graphdef, arrays))
        return Output([of[id(array)] for array in standing], graphdef)

    @property
    def writes(self) -> bool:
        return self.outcome.num_leaves > self.outcome.result_leaves


class CustomCall:
    """One call. The rules may run after it: for them it keeps the structure of its operands, not the objects.

    Args:
        program: the function and its operands.
        nondiff: the operands by which nothing is differentiated.
        refused: the error where one of these is differentiated all the same.
        filtered: as in Equinox, functions and what they capture have the tangent None, and so have Python numbers that
            are static, not a zero.
    """

    def __init__(
        self, program: Program, nondiff: set[int], refused: type[Exception] = TypeError, filtered: bool = False
    ) -> None:
        self.name, self._refused, self._filtered = program.name, refused, filtered
        self._live: Program | None = program
        self._later, self._nondiff = program.private(), nondiff
        self._value: Value | None = None
        placeholders = [np.zeros(()) for _ in program.leaves]
        numbers = {id(placeholder): i for i, placeholder in enumerate(placeholders)}
        built = _core.unflatten_roots(program.graphdef, placeholders)

        def leaf_of(placeholder: Any) -> tuple[int, Any]:
            return numbers[id(placeholder)], program.leaves[numbers[id(placeholder)]]

        diff = [i for i in range(program.operands) if i not in nondiff]
        apart = leaves_in_values(program.graphdef) if filtered else ()
        self._inputs = TangentSpace.of([built[i] for i in diff], [program.names[i] for i in diff], leaf_of, apart)

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The operands by which nothing is differentiated, and the others."""
        nondiff = [x for i, x in enumerate(operands) if i in self._nondiff]
        return nondiff, [x for i, x in enumerate(operands) if i not in self._nondiff]

    def nondiff_leaves(self) -> list[int]:
        return sorted(self._later.below(sorted(self._nondiff)))

    def perturbed_tree(self, operand: Any, flags: Sequence[bool]) -> Any:
        """A tree like the first operand: is this leaf differentiated?"""
        graph = self._inputs.graphs([flags[i] for i in self._inputs.leaves])[0]

        def is_perturbed(leaf: Any, flag: Any) -> bool:
            return flag is True

        return jax.tree.map(is_perturbed, operand, graph)

    # ---- the function

    def _flat(self, *leaves: Any) -> tuple[Any, ...]:
        program = self._live or self._later
        found: list[Output] = []

        def body(functions: list[Callable[..., Any]], operands: list[Any]) -> Any:
            result = functions[0](*operands)
            found.append(Output(*_core.flatten(result)))
            return result

        given = [_as_array(leaf) for leaf in leaves]
        outcome, out = program.trace(given, body, arrays=True)
        number = {id(leaf): i for i, leaf in enumerate(given)}
        self._value = Value(found[0], outcome, program.changed, self.name, self._filtered)
        self._value.forwarded = [number.get(id(leaf)) for leaf in out[outcome.result_leaves :]]
        return tuple(out)

    def _known(self, leaves: Sequence[Any]) -> Value:
        """What the function returns, where JAX runs a rule in its place too."""
        if self._value is None:

            def flat(*abstract: Any) -> tuple[Any, ...]:
                return self._flat(*abstract)

            try:
                jax.eval_shape(flat, *leaves)
            except jax.errors.ConcretizationTypeError:  # its code asks for values
                self._flat(*leaves)
        assert self._value is not None
        return self._value

    def _writes(self, *leaves: Any) -> tuple[Any, ...]:
        """What the function writes into the caller's objects."""
        outcome, out = self._later.trace(leaves, call_first, arrays=True)
        return tuple(out[outcome.result_leaves :])

    def _run(self, flat: Callable[..., Any]) -> Any:
        program = self._live
        assert program is not None
        try:
            try:
                out = flat(*program.leaves)
            except NotImplementedError as error:
                if not is_of_symbolic_zeros(error):
                    raise
                out = jax.jit(flat)(
                    *program.leaves
                )  # in a shard_map that is not compiled; JAX can do it in a compiled one
            assert self._value is not None
            return program.finish(out, self._value.outcome)
        finally:
            self._live = None

    # ---- the rules

    def _of_rule(self, leaves: Sequence[Any], rule: Callable[[list[Any]], tuple[Any, Any]]) -> tuple[list[Any], Any]:
        """(result leaves of the value that a rule returned, the other thing that it returned)."""
        known, found = self._value, list[tuple[Output, Any]]()
        assert known is not None

        def body(functions: list[Callable[..., Any]], operands: list[Any]) -> Any:
            value, other = rule(operands)
            found.append((Output(*_core.flatten(value)), other))
            return value

        self._later.trace(leaves, body, mutation="propagate", arrays=True)
        changed = [path for path in self._later.changed if path not in known.changed]
        if changed:
            raise MutationError(RULE_CHANGES.format(name=self.name, paths=", ".join(changed)))
        value, other = found[0]
        if value.graphdef != known.graphdef:
            value = known.with_numbers(value)
        if not like_but_for_jaxprs(known.graphdef, value.graphdef):
            text = differences_text(known.graphdef, value.graphdef, ("value",))
            raise StructureError(RULE_RETURNS.format(name=self.name, differences=text))
        for leaf, wanted, dtype in zip(value.leaves, known.types, known.dtypes, strict=True):
            if np.shape(leaf) != wanted.shape or jnp.result_type(leaf) != dtype:
                expected, given = f"{dtype}{list(wanted.shape)}", f"{jnp.result_type(leaf)}{list(np.shape(leaf))}"
                text = OTHER_SHAPE.format(
                    name=self.name, what="value of the rule", path=wanted.name, expected=expected, given=given
                )
                raise StructureError(text)
        return [value.leaves[i] for i in known.order], other

    def _refuse(self, moved: Iterable[bool], leaves: Sequence[Any]) -> None:
        """Raises where something is differentiated that the rule has no argument for."""
        spoken = set(self._inputs.leaves)
        for i, (moves, leaf) in enumerate(zip(moved, leaves, strict=True)):
            if moves and i not in spoken and is_inexact(leaf):
                besides = ", without those of nondiff_argnums" if self._nondiff else ""
                path = self._later.places[i].name
                raise self._refused(OF_CAPTURED.format(name=self.name, path=path, besides=besides))

    def with_tangents(self, rule: TangentRule, symbolic: bool) -> Any:
        """The call under `jax.custom_jvp`. `rule` takes operands and tangents, and returns (value, tangent)."""

        def flat(*leaves: Any) -> tuple[Any, ...]:
            return self._flat(*leaves)

        def flat_rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, ...]:
            leaves = [_as_given(primal) for primal in primals]
            self._refuse([not isinstance(t, SymbolicZero) for t in tangents], leaves)
            known = self._known(leaves)
            moves = [_or_zeros(tangents[i], leaves[i], symbolic) for i in self._inputs.leaves]
            given = self._inputs.graphs(moves, not self._filtered)
            out, rate = self._of_rule(leaves, lambda operands: rule(operands, given))
            wanted = [known.types[i] for i in known.order]
            parts = rate.parts if isinstance(rate, TangentParts) else [rate]
            rates = [matched(self.name, "tangent", wanted, (part,), numbers=True) for part in parts or [None]]
            total = tuple(map(_sum, zip(*rates, strict=True)))
            if known.writes:
                by = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero) and is_inexact(leaves[i])]
                writes, at = self._writes_by(leaves, by)
                written, moves = jax.jvp(writes, at, tuple(tangents[i] for i in by))
                return (*out, *written), (*total, *moves)
            return tuple(out), total

        custom = jax.custom_jvp(named(flat, self._later))
        custom.defjvp(flat_rule, symbolic_zeros=True)
        return self._run(custom)

    def with_cotangents(
        self,
        forward: Forward,
        backward: Callable[[Saved, Any], tuple[Any, ...]],
        keep: Sequence[int],
        symbolic: bool,
        symbolic_primals: bool,
        updates: bool = False,
    ) -> Any:
        """The call under `jax.custom_vjp`.

        Args:
            forward: takes operands, and for each leaf whether it is differentiated. Returns (value, residuals).
            backward: takes what was kept and the cotangent of the value. Returns cotangents of the operands.
            keep: the leaves around which `backward` gets the operands again.
            symbolic, symbolic_primals: `backward` is given JAX's symbolic zeros, `forward` its CustomVJPPrimal.
            updates: `backward` is given the cotangents of what the function writes too, and speaks of all of it.
        """

        def flat(*leaves: Any) -> tuple[Any, ...]:
            return self._flat(*leaves)

        def flat_forward(*primals: CustomVJPPrimal) -> tuple[Any, Any]:
            leaves, perturbed = [_as_array(p.value) for p in primals], [bool(p.perturbed) for p in primals]
            self._refuse(perturbed, leaves)
            known = self._known(leaves)
            given = primals if symbolic_primals else leaves
            out, residuals = self._of_rule(given, lambda operands: forward(operands, perturbed))
            arrays, graphdef = _core.flatten(residuals)
            written, pull = (), None
            if known.writes and updates:
                written = self._writes(*leaves)
            elif known.writes:
                writes, at = self._writes_by(leaves, [i for i in self._inputs.leaves if perturbed[i]])
                written, pull = jax.vjp(writes, *at)
            structure = _Structure(graphdef, tuple(perturbed))
            return (*out, *written), (tuple(arrays), tuple(leaves[i] for i in keep), pull, structure)

        def flat_backward(residuals: Any, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
            arrays, kept, pull, structure = residuals
            known, count = self._value, self._later.graphdef.num_leaves
            assert known is not None
            at = {number: i for i, number in enumerate(known.order)}
            of_value = [_or_zeros(_array(cotangents[at[i]]), known.types[i], symbolic) for i in known.tangents.leaves]
            given = Saved(
                self._operands(keep, kept), _core.unflatten(structure.graphdef, list(arrays)), structure.perturbed
            )
            if updates:
                given = given._replace(updates=self._updates(known, cotangents[len(known.order) :]))
            returned = backward(given, known.tangents.graphs(of_value, not self._filtered)[0])
            totals = matched(self.name, "cotangent", self._inputs.shapes, returned, self._inputs.graphdef)
            if pull is not None:
                moved = iter(pull(tuple(_or_zeros(_array(c), c, False) for c in cotangents[len(known.order) :])))
                parts = zip(totals, self._inputs.leaves, strict=True)
                totals = tuple(_sum((t, next(moved))) if structure.perturbed[i] else t for t, i in parts)
            out: list[Any] = [None] * count
            for i, total in zip(self._inputs.leaves, totals, strict=True):
                out[i] = total
            return tuple(out)

        custom = jax.custom_vjp(named(flat, self._later))
        custom.defvjp(flat_forward, flat_backward, symbolic_zeros=True)
        return self._run(custom)

    def _updates(self, known: Value, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        """Graphs like the operands that are differentiated, with a cotangent where an array is written, else None."""
        outcome, graphdef = known.outcome, self._later.graphdef
        values: dict[Any, Any] = {}
        nodes, written = outcome.inputs()[2], outcome.leaf_places()[outcome.result_leaves :]
        before = {place: number for number, place in enumerate(graphdef.leaf_places())}
        for (write, path), cotangent, leaf in zip(written, cotangents, known.forwarded, strict=True):
            root, above = graphdef._node_place(nodes[write - 1])  # pyright: ignore[reportPrivateUsage]
            place = root, (*above, *path)
            if leaf is None or before.get(place) != leaf:
                values[place] = _or_zeros(_array(cotangent), cotangent, False)
        diff = [i for i in range(self._later.operands) if i not in self._nondiff]
        leaves = [values.get((diff[root], path)) for root, path in self._inputs.graphdef.leaf_places()]
        return _core.unflatten_roots(self._inputs.graphdef, leaves, True)

    def _writes_by(
        self, leaves: Sequence[Any], by: Sequence[int]
    ) -> tuple[Callable[..., tuple[Any, ...]], tuple[Any, ...]]:
        """(what the function writes, as a function of the leaves that are differentiated; these leaves).

        What it would tell a host function is left out: the rule tells it, or not.
        """
        run = without_dead_code(self._writes, leaves)

        def writes(*values: Any) -> tuple[Any, ...]:
            given = list(leaves)
            for i, value in zip(by, values, strict=True):
                given[i] = value
            try:
                return tuple(run(*given))
            except ValueError as error:
                known = self._value
                if known is None or not is_of_differentiated_callback(error):
                    raise
                paths = ", ".join(known.changed)
                raise ValueError(WRITTEN_BY_HOST.format(name=self.name, paths=paths)) from error

        return writes, tuple(leaves[i] for i in by)

    def _operands(self, keep: Sequence[int], kept: Sequence[Any]) -> list[Any]:
        """Graphs like the operands, around the leaves that were kept."""
        leaves: list[Any] = [None] * self._later.graphdef.num_leaves
        for i, value in zip(keep, kept, strict=True):
            leaves[i] = value
        return list(_core.unflatten_roots(self._later.graphdef, leaves)[: self._later.operands])


def _as_array(primal: Any) -> Any:
    """An array of JAX's: it gives numbers and NumPy arrays as types of its own."""
    return primal if isinstance(primal, jax.Array) else jnp.asarray(primal)


def _as_given(primal: Any) -> Any:
    """What the rule sees. Outside of a trace JAX hands over what its caller wrote: a rule may ask for its value."""
    if type(primal) in NUMBERS or isinstance(primal, np.generic):
        return primal
    return primal.copy() if type(primal) is np.ndarray else _as_array(primal)


def _array(cotangent: Any) -> Any:
    return jnp.asarray(cotangent) if isinstance(cotangent, (float, complex, np.generic)) else cotangent


def _or_zeros(tangent: Any, like: Any, symbolic: bool) -> Any:
    """A tangent, unless the rule wants JAX's symbolic zeros not as a symbol."""
    if symbolic or not isinstance(tangent, SymbolicZero):
        return tangent
    if isinstance(like, SymbolicZero):
        aval: Any = like.aval
        return TangentType(0, (), "", aval.shape, aval.dtype).zeros()
    return (like if isinstance(like, TangentType) else TangentType.of(like, 0, (), "")).zeros()


def _sum(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 or is_nothing(parts[0]) else sum(parts[1:], parts[0])
