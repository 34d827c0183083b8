# SPDX-License-Identifier: Apache-2.0
"""`optimizer`: any transformation of Optax for any objects. Optax itself is imported by nobody but the user."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar, cast

import jax.numpy as jnp
import numpy as np

from graftax import interop
from graftax._base.errors import StructureError, UntiedWarning, some, type_name
from graftax._base.handles import is_handle, run_inside
from graftax._base.missing import MISSING
from graftax._graph.array_aliases import caller_values
from graftax._graph.edit import FUNCTIONS, selection
from graftax._graph.filters import as_filter
from graftax._graph.path import Graph, Path
from graftax._graph.patterns import nearest
from graftax._graph.types.register import register_static
from graftax._jax.arrays import as_weak
from graftax._jax.tracebacks import caller_level
from graftax._jax.traces import is_trace
from graftax._training.array_maps import array_numbers, is_inexact
from graftax._training.labels import use_for_labels
from graftax._training.match_gradients import gradients_in, require_shapes
from graftax._training.optax_repr import transformation_text
from graftax._training.parameter_places import require_same_ties, with_kept_parts

NO_TRANSFORMATION = (
    "graftax.optimizer(tx, model): the first argument has to be a transformation of Optax, an object with init and "
    "update, and is {actual}.{hint}"
)
NO_PARAMETERS = (
    "graftax.optimizer: there is no array of a floating dtype to train in {where}. Python numbers are static: make "
    "them arrays (jnp.asarray). The model has {arrays}."
)
NO_SUCH_PARAMETER = (
    "Optimizer: this {cls} has no array at {path}, where the model that the optimizer was made for has "
    "one. {near}opt.refresh(model) takes the parameters of a changed model."
)
OTHER_NAMES = "Optimizer: the names of the parameters do not fit: {differ}. opt.parameters(model) has them all."
TIED_OUTSIDE = (
    "graftax.optimizer is called inside a traced function, where {first} and {second} count as two parameters, "
    "although they are one array outside. They will be trained separately. Create the optimizer before the call and "
    "pass it, or tie objects: one object in both places is one parameter anywhere."
)
SAY_WRT = (
    "Optimizer.refresh: say what is trained, refresh(model, wrt=...). The optimizer does not know it any more: it was "
    "made with a tree of bools, which belongs to one structure, or was pickled."
)
REFRESH_SHAPES = (
    "If an array of the model was replaced by one of another shape after the optimizer was made, opt.refresh(model) "
    "begins its state anew."
)
NO_FORM = (
    "graftax.optimizer: params= has to turn the dict of parameters into an object with `fast` and `slow`,"
    " as optax.LookaheadParams.init_synced does, and returned {actual}."
)

T = TypeVar("T")


class Transformation(Protocol):
    """What Optax calls a GradientTransformation."""

    @property
    def init(self) -> Callable[..., Any]: ...
    @property
    def update(self) -> Callable[..., Any]: ...


def optimizer(
    tx: Transformation, model: Any, wrt: Any = None, *, params: Callable[..., Any] | None = None
) -> Optimizer:
    """An optimizer for the floating arrays in any objects, with a transformation of Optax.

    The transformation sees the parameters as one dict from key path to array. A layer that is reached twice is in it
    once, and an array in several places is one parameter, which stays tied. Masks and labels select by key path;
    `graftax.labels` makes them from patterns and types.

    Args:
        tx: `optax.adam(1e-3)`, `optax.chain(...)`, or any object with `init` and `update`.
        model: any object. The optimizer does not keep it.
        wrt: the arrays to train: one or several patterns of key paths, a type, a predicate, or a tree of bools, as in
            `graftax.partition`. By default all floating arrays, so name the parameters if there are statistics among
            them. In Flax NNX the default is all `nnx.Param`.
        params: for transformations with more than one set of parameters, such as
            `optax.LookaheadParams.init_synced`. The slow parameters are in `opt.slow`.

    Returns:
        an `Optimizer`: a plain object, which is passed to jitted functions along with the model.

    Raises:
        StructureError: if `wrt` matches nothing.
        TypeError: if `tx` is not a transformation, or if there is nothing to train.

    Example:
        >>> import optax
        >>> layer = {"w": jnp.ones(2), "name": "tied"}
        >>> model = {"first": layer, "second": layer}
        >>> opt = graftax.optimizer(optax.sgd(0.5), model)
        >>> @graftax.jit
        ... def step(model, opt):
        ...     loss = lambda model: (model["first"]["w"] * model["second"]["w"]).sum()
        ...     value, grads = graftax.value_and_grad(loss)(model)
        ...     opt.update(model, grads)
        ...     return value
        >>> step(model, opt), model["second"] is layer, layer["w"]
        (Array(2., dtype=float32), True, Array([0., 0.], dtype=float32))
    """
    return Optimizer(tx, model, wrt, params)


class Optimizer:
    """The result of `graftax.optimizer`: a transformation, its state, and the names of the parameters.

    Attributes:
        tx: the transformation.
        state: the state as Optax has it, with parameters by name. It may be pickled and assigned.
        slow: the slow parameters of Lookahead, by name; None for other transformations.

    Example:
        >>> import optax
        >>> model = {"w": jnp.ones(2), "name": "net"}
        >>> opt = graftax.optimizer(optax.sgd(0.5), model)
        >>> opt.update(model, {"w": jnp.ones(2), "name": None})
        {'w': Array([0.5, 0.5], dtype=float32), 'name': 'net'}
    """

    def __init__(self, tx: Any, model: Any, wrt: Any = None, params: Callable[..., Any] | None = None) -> None:
        # A class has `init` and `update` as well, if it is that of a transformation which was not called.
        if isinstance(tx, type) or not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
            raise TypeError(NO_TRANSFORMATION.format(actual=_type_text(tx), hint=_hint(tx, model)))
        graph = _open_graph(model)
        self.tx, self.slow, self._form = tx, None, None
        self._names = names = _names_of(graph, wrt)
        values = names.values(graph)
        if params is not None:
            formed = params(values)
            if not (hasattr(formed, "fast") and hasattr(formed, "slow")):
                raise TypeError(NO_FORM.format(actual=_type_text(formed)))
            self._form, self.slow = type(formed), dict(formed.slow)
            values = formed
        # In containers of its own, since each update writes to them, and `tx` may use one in several places.
        with use_for_labels(graph, names.numbers(graph)):
            self.state: Any = _own_containers(tx.init(values))

    def update(self, model: T, grads: Any, **extra: Any) -> T:
        """One step: updates the parameters of the model and the state of the optimizer.

        Args:
            model: the object that the optimizer was made for, or one with arrays at the same key paths.
            grads: the result of `graftax.grad` or `jax.grad` for the model, without None for a parameter. Or a dict by
                the names of `parameters(model)`, or a list in their order.
            **extra: arguments for transformations that take more, such as `value=`. For a line search `grad=` is a
                gradient in any of these forms, and `value_fn=` a function of the model.

        Returns:
            the model itself, changed in place, or a new one if nothing mutable holds its parameters (tuples, Equinox
            modules). `model = opt.update(model, grads)` is right for both.

        Raises:
            StructureError: if gradients and parameters do not fit, or if the model has other parameters than the
                optimizer was made for, such as one that was tied and no longer is; names the paths. Nothing has been
                changed then.
        """
        if is_handle(model):
            run_inside("Optimizer.update", model, lambda opened: self.update(opened, grads, **extra))
            return model
        # What the transformation gets: gradients and parameters by name, each shared array once.
        graph, names = Graph(model), self._names
        numbers = names.numbers(graph)
        params = names.values(graph)
        # Made inside a trace, the optimizer could not see ties, and has warned of that.
        if not names.is_apart:
            require_same_ties(graph, names.paths, numbers)
        gradients = gradients_in(graph, numbers, grads, names.trained(graph))
        extra = self._accepted(graph, numbers, extra)
        formed = params if self._form is None else self._form(fast=params, slow=self.slow)
        shapes = {name: value.shape for name, value in params.items()}
        try:
            with use_for_labels(graph, numbers):
                updates, state = self.tx.update(gradients, self.state, formed, **extra)
        # Optax does not say which parameter it is about. Few transformations take a row of gradients for each example.
        except (TypeError, ValueError) as error:
            require_shapes(gradients, shapes)
            error.add_note(REFRESH_SHAPES)
            raise
        slow, updates = (None, updates) if self._form is None else (updates.slow, updates.fast)
        if any(np.shape(updates[name]) != shape for name, shape in shapes.items()):
            require_shapes(gradients, shapes)
            require_shapes(updates, shapes, "update of", " " + REFRESH_SHAPES)
        # Nothing was changed so far: whatever does not fit has raised by now.
        if slow is not None:
            self.slow = {name: _add_update(value, slow[name]) for name, value in (self.slow or {}).items()}
        new_values = {name: _add_update(value, updates[name]) for name, value in params.items()}
        changed = graph.write_or_rebuild(_by_row(numbers, new_values))
        self.state = _updated_state(self.state, state)
        return changed

    def refresh(self, model: Any, wrt: Any = MISSING) -> None:
        """Takes the parameters of a model whose structure has changed: a layer was added, removed, tied or untied.

        The state of a parameter that keeps its name and shape is kept, and so is what belongs to none, such as the
        number of steps. The state of the others begins anew.

        Args:
            model: the model as it is now.
            wrt: what is trained from now on. By default as when the optimizer was made.

        Raises:
            StructureError: if `wrt` matches nothing.
            TypeError: if there is nothing to train, or if `wrt` has to be given again: a tree of bools belongs to one
                structure, and an optimizer that was pickled has no predicates and types.

        Example:
            >>> import optax
            >>> model = {"layers": [{"w": jnp.ones(2)}]}
            >>> opt = graftax.optimizer(optax.sgd(0.5), model)
            >>> model["layers"].append({"w": jnp.ones(2)})
            >>> opt.refresh(model)
            >>> list(opt.parameters(model))
            ['[layers][0][w]', '[layers][1][w]']
        """
        if is_handle(model):
            run_inside("Optimizer.refresh", model, lambda opened: self.refresh(opened, wrt))
            return
        wrt = self._names.wrt if wrt is MISSING else wrt
        if wrt is MISSING:
            raise TypeError(SAY_WRT)
        graph = Graph(model)
        names = _names_of(graph, wrt)
        values: Any = names.values(graph)
        if self._form is not None:
            slow = with_kept_parts(self.slow, values)
            values = self._form(fast=values, slow=slow)
            self.slow = slow
        with use_for_labels(graph, names.numbers(graph)):
            state = _own_containers(self.tx.init(values))
        self.state, self._names = with_kept_parts(self.state, state), names

    def parameters(self, model: Any) -> dict[str, Any]:
        """The parameters of a model by name, each once, as the transformation gets them.

        Args:
            model: the model, or an object of the same structure, such as its gradients.

        Returns:
            a dict from the key path of each trained array to the array.
        """
        return self._names.values(_open_graph(model))

    def assign(self, model: T, parameters: Mapping[str, Any]) -> T:
        """Writes parameters into a model, such as the averages of a transformation (`opt.slow`).

        Args:
            model: as for `update`.
            parameters: arrays by the names of `parameters(model)`.

        Returns:
            the model itself, or a new one if nothing mutable holds its parameters.

        Raises:
            StructureError: if names or shapes do not fit.
        """
        if is_handle(model):
            run_inside("Optimizer.assign", model, lambda opened: self.assign(opened, parameters))
            return model
        graph = Graph(model)
        numbers = self._names.numbers(graph)
        _same_names(numbers, parameters)
        shapes = {name: graph.rows[rows[0]].value.shape for name, rows in numbers.items()}
        require_shapes(parameters, shapes, "parameter")
        return graph.write_or_rebuild(_by_row(numbers, parameters))

    def _accepted(self, graph: Graph, numbers: dict[str, list[int]], extra: dict[str, Any]) -> dict[str, Any]:
        """The extra arguments that the transformation takes: one without any is given none, as in Optax."""
        if not extra:
            return extra
        parameters = inspect.signature(self.tx.update).parameters.values()
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            names = {parameter.name for parameter in parameters}
            extra = {name: value for name, value in extra.items() if name in names}
        if extra.get("grad") is not None:
            extra = {**extra, "grad": gradients_in(graph, numbers, extra["grad"], self._names.trained(graph))}
        function = extra.get("value_fn")
        if function is None:
            return extra

        # Optax passes on those extra arguments that the signature of `value_fn` names, which `wraps` keeps.
        @functools.wraps(function)
        def value_of_parameters(params: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            return function(graph.core.build(_by_row(numbers, params), all=True), *args, **kwargs)

        return {**extra, "value_fn": value_of_parameters}

    def __repr__(self) -> str:
        names = self._names
        tied = [
            f"{name} = {' = '.join(map(_name, paths[1:]))}" for name, paths in names.paths.items() if len(paths) > 1
        ]
        ties = f"; tied: {some(tied, 3)}" if tied else ""
        count = len(names.paths)
        shown = some(list(names.paths), 4)
        return f"Optimizer({transformation_text(self.tx)}; {count} parameter{'s'[: count != 1]}: {shown}{ties})"


@register_static
class Names:
    """The names of the parameters, and the key paths of each. One static value, compared as a whole.

    Args:
        paths: by name; an array that occurs several times has several.
        frozen: the paths of the other floating arrays.
        wrt: the argument of `graftax.optimizer`. It decides only what is an error. MISSING if it says nothing of models
            of another structure.
        is_apart: they were found in a trace, with one array outside as several parameters.
    """

    def __init__(
        self,
        paths: dict[str, tuple[Path, ...]],
        frozen: frozenset[Path] = frozenset(),
        wrt: Any = MISSING,
        is_apart: bool = False,
    ) -> None:
        self.paths, self.frozen, self.wrt, self.is_apart = paths, frozen, wrt, is_apart
        # Each call of a jitted step compares the names: those of many parameters are hashed once.
        self._hash = hash(tuple(paths.items()))

    def numbers(self, graph: Graph) -> dict[str, list[int]]:
        """The rows of each parameter in a graph, by name.

        Raises:
            StructureError: if a path does not lead to an array.
        """
        return {name: [self._number(graph, path) for path in paths] for name, paths in self.paths.items()}

    def values(self, graph: Graph) -> dict[str, Any]:
        """The parameters of a graph, by name, as JAX arrays."""
        return {name: jnp.asarray(graph.rows[numbers[0]].value) for name, numbers in self.numbers(graph).items()}

    def trained(self, graph: Graph) -> list[int]:
        """The arrays of a graph that this optimizer should train."""
        if self.wrt is not MISSING:
            return _trained(graph, self.wrt)
        return [number for number in _inexact_arrays(graph) if graph.path(number) not in self.frozen]

    def _number(self, graph: Graph, path: Path) -> int:
        try:
            number = graph.number(path)
        except StructureError:
            number = 0 if path else -1
        row = graph.rows[number]
        if number < 0 or not is_inexact(row.value):
            nearest_names = nearest(
                _name(path), (_name(graph.path(array_number)) for array_number in array_numbers(graph))
            )
            hint = f"It has {nearest_names}. " if nearest_names else "It has no arrays. "
            raise StructureError(
                NO_SUCH_PARAMETER.format(cls=type_name(graph.rows[0].value), path=repr(path), near=hint)
            )
        return number

    # Nothing in it changes, and a copy of MISSING would be another object.
    def __deepcopy__(self, memo: object) -> Names:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        # Made anew, since the hash of a text differs by process. A predicate or a type is left out, since it may not be
        # picklable, and so is MISSING, which a pickle would copy.
        options: dict[str, Any] = {"frozen": self.frozen, "is_apart": self.is_apart}
        if self.wrt is None or type(self.wrt) is str:
            options["wrt"] = self.wrt
        return (functools.partial(Names, self.paths, **options), ())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Names) and self._hash == other._hash and self.paths == other.paths

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"<{some(list(self.paths))}>"


def _open_graph(model: Any) -> Graph:
    return run_inside("graftax.optimizer", model, Graph) if is_handle(model) else Graph(model)


def _holders(graph: Graph, number: int) -> Iterator[Any]:
    """What the array is in, the innermost first."""
    while (number := graph.rows[number].parent) >= 0:
        yield graph.rows[number].value


def _inexact_arrays(graph: Graph) -> list[int]:
    # A trace that a library keeps in an object of the user's holds arrays of JAX's own.
    numbers = [number for number in array_numbers(graph) if is_inexact(graph.rows[number].value)]
    return [number for number in numbers if not any(map(is_trace, _holders(graph, number)))]


def _trained(graph: Graph, wrt: Any) -> list[int]:
    numbers = _inexact_arrays(graph)
    # A library may say what is trained: of NNX's Variables, only those that are Params.
    if wrt is None:
        return [number for number in numbers if interop.is_trained(_holders(graph, number))]
    return sorted(selection(graph, wrt, numbers))


def _names_of(graph: Graph, wrt: Any) -> Names:
    numbers = _trained(graph, wrt)
    paths_of: dict[int, list[Path]] = {}
    for number in numbers:
        paths_of.setdefault(id(graph.rows[number].value), []).append(graph.path(number))
    if not paths_of:
        selection_text = "this model" if wrt is None else f"what wrt={wrt!r} means"
        arrays = nearest("", (_name(graph.path(number)) for number in array_numbers(graph)))
        raise TypeError(NO_PARAMETERS.format(where=selection_text, arrays=arrays or "no array at all"))
    # One name for all places of an array, except in a trace, where each place has a tracer.
    is_apart = _warn_of_ties(graph, [graph.number(paths[0]) for paths in paths_of.values()])
    names: dict[str, tuple[Path, ...]] = {}
    for paths in paths_of.values():
        name = _name(paths[0])
        # Keys of a dict may print alike.
        while name in names:
            name += "'"
        names[name] = tuple(paths)
    frozen = frozenset(graph.path(number) for number in set(_inexact_arrays(graph)).difference(numbers))
    # In the order in which JAX has the entries of a dict, and so the leaves of the state.
    sorted_names = dict(sorted(names.items()))
    return Names(sorted_names, frozen, wrt if wrt is None or _is_rule(wrt) else MISSING, is_apart)


def _is_rule(wrt: Any) -> bool:
    """Does it say of any structure what is trained? A tree of bools belongs to one."""
    rules = list(cast("list[Any]", wrt)) if isinstance(wrt, (list, tuple)) else [wrt]
    return as_filter(wrt, allow_path_functions=True) is not None or all(
        isinstance(rule, (str, Path, *FUNCTIONS)) for rule in rules
    )


def _warn_of_ties(graph: Graph, numbers: list[int]) -> bool:
    """Warns of tied arrays in a trace, which has two tracers for an array that occurs twice. Are there any?"""
    first_row: dict[int, int] = {}
    tied: list[tuple[int, int]] = []
    for number, value in zip(numbers, caller_values([graph.rows[number].value for number in numbers]), strict=True):
        if first_row.setdefault(id(value), number) != number:
            tied.append((first_row[id(value)], number))
    # Scalars are often shared by accident.
    telling = next((pair for pair in tied if graph.rows[pair[0]].value.ndim > 0), None)
    if telling is not None:
        first_path, second_path = (repr(graph.path(number)) for number in telling)
        warnings.warn(TIED_OUTSIDE.format(first=first_path, second=second_path), UntiedWarning, caller_level())
    return bool(tied)


def _name(path: Path) -> str:
    """A path as a name: without the dot in front."""
    return str(path).removeprefix(".")


def _same_names(numbers: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    missing, unknown = [n for n in numbers if n not in parameters], [n for n in parameters if n not in numbers]
    if missing or unknown:
        texts = [f"there is no {some(missing)}"] * bool(missing) + [f"{some(unknown)} is none of them"] * bool(unknown)
        raise StructureError(OTHER_NAMES.format(differ=", and ".join(texts)))


def _by_row(numbers: Mapping[str, list[int]], values: Mapping[str, Any]) -> dict[int, Any]:
    return {number: values[name] for name, rows in numbers.items() for number in rows}


def _add_update(value: Any, update: Any) -> Any:
    # As `optax.apply_updates` does: an update of another dtype must not change that of the parameter.
    return _as_weak_as(value, jnp.asarray(value + update).astype(value.dtype))


def _as_weak_as(old_array: Any, new_array: Any) -> Any:
    """The new array with the weak type of the old one, such as `jnp.asarray(0.5)`. Losing it would recompile."""
    # What has no weak type, such as a NumPy array, is left as it is.
    is_weak = getattr(old_array, "weak_type", False) and getattr(new_array, "weak_type", True) is False
    return as_weak(new_array) if is_weak and old_array.dtype == new_array.dtype else new_array


def _type_text(value: object) -> str:
    return f"the class {value.__qualname__}" if isinstance(value, type) else f"of type {type_name(value)}"


def _hint(tx: object, model: object) -> str:
    if hasattr(model, "init") and hasattr(model, "update"):
        return " Did you swap the two arguments?"
    return f" Call it: {tx.__name__}(...)." if callable(tx) and hasattr(tx, "__name__") else ""


def _own_containers(state: Any) -> Any:
    """The state in new containers, so that none is shared."""
    if _is_tuple(state):
        return _tuple(state, map(_own_containers, state))
    if type(state) is dict:
        return {key: _own_containers(value) for key, value in cast("dict[Any, Any]", state).items()}
    return list(map(_own_containers, cast("list[Any]", state))) if type(state) is list else state


def _updated_state(old_state: Any, new_state: Any) -> Any:
    """The new state, in the containers of the old one where the structure is the same."""
    # The containers keep their identity, so that a step may run in a branch or a loop. Everything is read before the
    # first write, since the new state may refer to containers of the old one.
    writes: list[tuple[Any, list[tuple[Any, Any]]]] = []
    reused: set[int] = set()

    def keep_containers(old_part: Any, new_part: Any) -> Any:
        new_part = _as_weak_as(old_part, new_part)
        if type(old_part) is not type(new_part):
            return _own_containers(new_part)
        if _is_tuple(new_part) and len(old_part) == len(new_part):
            return _tuple(new_part, map(keep_containers, old_part, new_part))
        is_dict = type(new_part) is dict
        fits = (is_dict and old_part.keys() == new_part.keys()) or (
            type(new_part) is list and len(old_part) == len(new_part)
        )
        # A container that is in the state twice is kept for its first place, since the new parts may differ.
        if not fits or id(old_part) in reused:
            return _own_containers(new_part)
        reused.add(id(old_part))
        keys: Iterable[Any] = list(old_part) if is_dict else range(len(new_part))
        writes.append((old_part, [(key, keep_containers(old_part[key], new_part[key])) for key in keys]))
        return old_part

    state = keep_containers(old_state, new_state)
    for container, items in writes:
        for key, value in items:
            container[key] = value
    return state


def _is_tuple(value: object) -> bool:
    return type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields"))


def _tuple(template: Any, parts: Iterable[Any]) -> Any:
    return tuple(parts) if type(template) is tuple else type(template)(*parts)
