# SPDX-License-Identifier: Apache-2.0
"""Derivatives by object graphs: `grad`, `value_and_grad`, Jacobians, `jvp`, `vjp`, `linearize`."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from .. import _core
from .._errors import (
    NO_REVERSE,
    NOT_PRIMALS,
    NOT_SCALAR,
    NOT_WITH_AUX,
    NOTHING_TO_DIFFERENTIATE,
    TANGENT_COUNT,
    WRT_AND_ARGNUMS,
    WRT_TWICE,
    WRT_TYPE,
    WRT_UNUSED,
)
from .._options import is_path
from ..patterns import Covering, nearest, of_arguments
from ._program import Program, name_of, wraps
from ._tangents import Shape, fitting, is_inexact, is_key, is_nothing

Wrt = int | str | Sequence[int | str] | Callable[[Any], bool] | None
Make = Callable[..., Program]  # Program, or by_value: what the caller's objects see of a call


class Chosen(NamedTuple):
    """What is differentiated: leaves of a program, and the operands whose graphs the derivative is given as.

    Nothing of the caller's objects is in it: a derivative asked for later does not keep them alive.
    """

    graphdef: _core.GraphDef
    of_one: bool  # the program has one root
    leaves: tuple[int, ...]
    roots: tuple[int, ...]
    single: bool  # one graph, not a tuple of them

    def graphs(self, values: Sequence[Any]) -> Any:
        """Graphs like the operands, with these values in place of the chosen leaves and None in place of others.

        What is a leaf for JAX and holds no array (a string, a function, a config) is None too, so that the gradient of
        a pytree has the structure that Optax expects; registered nodes, static fields and aux data stay.
        """
        leaves: list[Any] = [None] * self.graphdef.num_leaves
        for i, value in zip(self.leaves, values, strict=True):
            leaves[i] = value
        built = _core.unflatten(self.graphdef, leaves, True)
        built = (built,) if self.of_one else built
        graphs = [built[root] for root in self.roots]
        return graphs[0] if self.single else tuple(graphs)


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    *,
    wrt: Wrt = None,
) -> Callable[..., Any]:
    """The gradient of a function of any objects; as `value_and_grad`, without the value.

    Returns:
        a function of the same arguments that returns the gradient, or (gradient, aux) with `has_aux`.
    """
    both = with_gradient(Program, fun, "grad", argnums, has_aux, wrt, grad_options(holomorphic, allow_int, reduce_axes))

    @wraps(fun, "grad")
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradient


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    *,
    wrt: Wrt = None,
) -> Callable[..., Any]:
    """A function's value together with its gradient by the arrays in its arguments.

    The gradient is a graph like the argument, with the same sharing: each inexact array is replaced by its gradient
    (same shape and dtype), every other array by None. A mutable node that is reached twice is one node there too, and
    its arrays get one gradient for all their uses; an array in two places of immutable nodes gets one for each place.
    What the function changes comes back to the caller, as in plain Python.

    Args:
        fun: returns a scalar of a floating (with `holomorphic`, complex) dtype, or (scalar, aux) with `has_aux`.
        argnums: which positional arguments: one gives one gradient graph, several a tuple of them.
        has_aux: the function returns a pair, and the second part, any objects, is returned with the value.
        holomorphic, allow_int, reduce_axes: as in `jax.value_and_grad`.
        wrt: instead of `argnums`: names or positions of arguments; patterns of key paths (`"model.head"`, `"**.bias"`):
            the gradient is that of the arguments in which they match; or a predicate of arrays, which selects in
            what `argnums` names.

    Returns:
        a function of the same arguments that returns (value, gradient), or ((value, aux), gradient).

    Raises:
        TypeError: where the value is no scalar, or there is nothing to differentiate.

    Example:
        >>> graftax.grad(lambda model, x: (model["w"] @ x).sum())({"w": jnp.ones(2), "name": "net"}, jnp.ones(2))
        {'w': Array([1., 1.], dtype=float32), 'name': None}
    """
    return with_gradient(
        Program, fun, "value_and_grad", argnums, has_aux, wrt, grad_options(holomorphic, allow_int, reduce_axes)
    )


def grad_options(holomorphic: bool, allow_int: bool, reduce_axes: Sequence[Any]) -> dict[str, Any]:
    """The options of `jax.value_and_grad` that are passed on."""
    options: dict[str, Any] = {"holomorphic": holomorphic, "allow_int": allow_int}
    return {**options, "reduce_axes": reduce_axes} if reduce_axes else options


def with_gradient(
    make: Make,
    fun: Callable[..., Any],
    title: str,
    argnums: int | Sequence[int],
    has_aux: bool,
    wrt: Wrt,
    options: dict[str, Any],
) -> Callable[..., Any]:
    """`value_and_grad` with the programs that `make` makes."""

    @wraps(fun, title)
    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        allow_int = options.get("allow_int", False)
        by = chosen_by(name_of(fun, title), argnums, wrt)[0]
        program = program_by(make, fun, title, args, kwargs, by, allow_int)
        chosen = choose(program, argnums, wrt, allow_int, make is not Program)

        def flat(by: tuple[Any, ...]) -> tuple[Any, list[Any]]:
            value: list[Any] = []

            def body(functions: list[Callable[..., Any]], operands: list[Any]) -> Any:
                result = functions[0](*operands)
                if has_aux:  # a pair may be a list
                    result = split_aux(result, program.name)
                value.append(as_scalar(result[0] if has_aux else result, program.name))
                return result

            _, out = program.trace(replaced(program, chosen.leaves, by), body)
            return value[0], out

        run = jax.value_and_grad(named(flat, program), has_aux=True, **options)
        with _in_reverse():
            (_, out), gradients = run(tuple(program.leaves[i] for i in chosen.leaves))
        grads = chosen.graphs(gradients)
        return program.finish(out, untouched=program.untouched), grads

    return value_and_gradient


@contextlib.contextmanager
def _in_reverse() -> Generator[None]:
    try:
        yield
    except ValueError as error:
        if "Reverse-mode differentiation does not work for lax.while_loop" in str(error):
            error.add_note(NO_REVERSE)
        raise


# ---- what is differentiated


def program_by(
    make: Make,
    fun: Callable[..., Any],
    title: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    by: Sequence[int | str],
    allow_int: bool = False,
) -> Program:
    """The program of a call. A Python number that is itself differentiated is an array in it, as in JAX."""
    name = name_of(fun, title)
    program = make(name, [fun], args, kwargs)
    if make is not Program:
        return program
    types = (float, complex, int, bool) if allow_int else (float, complex)
    given = [*args, *kwargs.values()]
    at = [i for i in {program.operand(w) for w in by if not is_path(w)} if type(given[i]) in types]
    if not at:
        return program
    for i in at:
        given[i] = jnp.asarray(given[i])
    count = len(args)
    return make(name, [fun], given[:count], dict(zip(kwargs, given[count:], strict=True)))


def chosen_by(name: str, argnums: Any, wrt: Wrt) -> tuple[list[int | str], bool]:
    """(positions, names and patterns that say what is differentiated; is it one of them, not a sequence)."""
    option = "argnums" if wrt is None or callable(wrt) else "wrt"
    given: Any = argnums if option == "argnums" else wrt
    single = isinstance(given, str) or not isinstance(given, Iterable)
    wanted: list[int | str] = []
    for one in cast("Iterable[Any]", [given] if single else given):
        try:
            wanted.append(one if isinstance(one, str) and option == "wrt" else operator.index(cast("Any", one)))
        except TypeError:
            raise TypeError(WRT_TYPE.format(name=name, option=option, given=one)) from None
    return wanted, single


def choose(
    program: Program, argnums: int | Sequence[int], wrt: Wrt, allow_int: bool = False, allow_none: bool = False
) -> Chosen:
    """Which leaves are differentiated, and by which operands' graphs."""
    predicate = wrt if callable(wrt) else None
    wanted, single = chosen_by(program.name, argnums, wrt)
    if wrt is not None and not callable(wrt) and argnums != 0:
        raise ValueError(WRT_AND_ARGNUMS.format(name=program.name, argnums=argnums, wrt=wrt))
    patterns = [w for w in wanted if isinstance(w, str) and is_path(w)]
    roots = [program.operand(w) for w in wanted if w not in patterns]
    if len(set(roots)) != len(roots):
        raise ValueError(WRT_TWICE.format(name=program.name, wrt=wanted))
    below = program.below(roots)
    usable = [i for i, leaf in enumerate(program.leaves) if is_inexact(leaf) or (allow_int and not is_key(leaf))]
    covered = _covered(program, patterns, set(usable)) if patterns else {}
    leaves: list[int] = []
    for i in usable:
        if not (i in below or i in covered) or (predicate is not None and not predicate(program.leaves[i])):
            continue
        leaves.append(i)
    matched = {root for i in leaves for root in covered.get(i, ())}
    roots += sorted(matched.difference(roots))
    if not leaves and not allow_none:
        where = ", ".join([*(program.names[root] for root in roots), *patterns]) or "no argument"
        raise TypeError(NOTHING_TO_DIFFERENTIATE.format(name=program.name, where=where))
    return Chosen(program.graphdef, len(program.roots) == 1, tuple(leaves), tuple(roots), single and len(roots) == 1)


def _covered(program: Program, patterns: Sequence[str], usable: set[int]) -> dict[int, set[int]]:
    """The leaves that patterns cover, and for each the operands in which they do.

    Raises:
        ValueError: where a pattern chooses nothing: a name that is spelt wrong would be left out without a word.
    """
    covering = Covering(program.graphdef, program.names)
    found: dict[int, set[int]] = {}
    for text in patterns:
        pattern = of_arguments(text, program.name, "wrt=")
        missed = True
        for root in range(program.operands):
            for at in covering.of(pattern, (root,)).leaves:
                leaf = covering.leaf(at)
                found.setdefault(leaf, set()).add(root)
                missed = missed and leaf not in usable
        if missed:
            places = (place for i, place in enumerate(program.places) if i in usable)
            there = nearest(text, (p.name for p in places if p.root < program.operands)) or "no array"
            raise ValueError(WRT_UNUSED.format(name=program.name, pattern=text, paths=there))
    return found


def split_aux(result: Any, name: str) -> tuple[Any, Any]:
    """The two parts of what a function with `has_aux` returned."""
    if not isinstance(result, (tuple, list)) or len(cast("Sequence[Any]", result)) != 2:
        raise TypeError(NOT_WITH_AUX.format(name=name, found=type(result).__qualname__))
    value, aux = cast("Sequence[Any]", result)
    return value, aux


def as_scalar(value: Any, name: str) -> Any:
    shape = getattr(value, "shape", () if isinstance(value, (int, float, complex)) else None)
    if shape != ():
        found = f"an array of shape {shape}" if shape is not None else type(value).__qualname__
        raise TypeError(NOT_SCALAR.format(name=name, found=found))
    return value


# ---- leaves in, graphs out


def replaced(program: Program, at: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """The program's leaves, with others in these places."""
    leaves = list(program.leaves)
    for i, value in zip(at, values, strict=True):
        leaves[i] = value
    return leaves


def named(flat: Callable[..., Any], program: Program) -> Callable[..., Any]:
    """The flat function under the user's name and place, which JAX's messages show."""
    flat.__wrapped__ = program.place_of  # type: ignore[attr-defined]
    flat.__name__ = flat.__qualname__ = flat.__wrapped__.__name__  # type: ignore[attr-defined]
    return flat


class Output(NamedTuple):
    """What a function returned, as arrays that a transform sees and a structure that it does not."""

    leaves: list[Any]
    graphdef: _core.GraphDef

    def rebuilt(self, leaves: Sequence[Any]) -> Any:
        return _core.unflatten(self.graphdef, list(leaves))


def traced_output(program: Program, leaves: Sequence[Any], has_aux: bool) -> tuple[Output, list[Any]]:
    """(what the program's function returned, flat and by value; the output leaves of the Outcome)."""
    found: list[Output] = []

    def body(functions: list[Callable[..., Any]], operands: list[Any]) -> Any:
        result = functions[0](*operands)
        if has_aux:
            result = split_aux(result, program.name)
        found.append(Output(*_core.flatten(result[0] if has_aux else result)))
        return result

    _, out = program.trace(leaves, body)
    return found[0], out


# ---- Jacobians


def jacfwd(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: Wrt = None,
) -> Callable[..., Any]:
    """The Jacobian in forward mode: a graph like the result, with a graph like the argument in place of each array.

    The arguments are those of `value_and_grad`. An array of the innermost graph has the shape of the result's array
    followed by that of the argument's.

    Returns:
        a function of the same arguments that returns the Jacobian, or (Jacobian, aux) with `has_aux`.
    """
    return jacobian_by(Program, jax.jacfwd, "jacfwd", fun, argnums, has_aux, wrt, {"holomorphic": holomorphic})


def jacrev(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    wrt: Wrt = None,
) -> Callable[..., Any]:
    """The Jacobian in reverse mode; otherwise as `jacfwd`."""
    options = {"holomorphic": holomorphic, "allow_int": allow_int}
    return jacobian_by(Program, jax.jacrev, "jacrev", fun, argnums, has_aux, wrt, options)


def hessian(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: Wrt = None,
) -> Callable[..., Any]:
    """The Hessian: as `jacfwd`, with a graph like the argument in place of each array of its inner graphs."""
    return jacobian_by(Program, jax.hessian, "hessian", fun, argnums, has_aux, wrt, {"holomorphic": holomorphic}, 2)


def jacobian_by(
    make: Make,
    transform: Callable[..., Any],
    title: str,
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    wrt: Wrt,
    options: dict[str, Any],
    order: int = 1,
) -> Callable[..., Any]:
    """`jacfwd` and the like with the programs that `make` makes."""

    @wraps(fun, title)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        allow_int = options.get("allow_int", False)
        by = chosen_by(name_of(fun, title), argnums, wrt)[0]
        program = program_by(make, fun, title, args, kwargs, by, allow_int)
        chosen = choose(program, argnums, wrt, allow_int, make is not Program)
        output: list[Output] = []

        def flat(by: tuple[Any, ...]) -> tuple[Any, list[Any]]:
            found, out = traced_output(program, replaced(program, chosen.leaves, by), has_aux)
            output.append(found)
            return tuple(found.leaves), out

        run = transform(named(flat, program), has_aux=True, **options)
        with _in_reverse():
            by_output, out = run(tuple(program.leaves[i] for i in chosen.leaves))

        def nested(values: Any, depth: int) -> Any:
            inner = [nested(v, depth - 1) for v in values] if depth > 1 else values
            return chosen.graphs(inner)

        whole = output[-1].rebuilt([nested(row, order) for row in by_output])
        result = program.finish(out, untouched=program.untouched)
        return (whole, result[1]) if has_aux else whole

    return jacobian


# ---- products


def jvp(
    fun: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False
) -> tuple[Any, ...]:
    """The value of a function of any objects, and its directional derivative.

    Args:
        fun: the function; what it changes comes back to the caller.
        primals: its positional arguments.
        tangents: one graph like each of them, with a tangent (same shape and dtype) for each inexact array; None, or
            a static, in its place is a tangent of zero.
        has_aux: the function returns a pair, of which the first part is differentiated.

    Returns:
        (value, tangent of the value), and with `has_aux` the second part. The tangent is a graph like the value, with
        None for arrays that are not inexact.

    Raises:
        StructureError: where the tangents do not fit, naming the path.
    """
    for option, value in (("primals", primals), ("tangents", tangents)):
        several = isinstance(value, (tuple, list))
        if not several or len(value) != len(primals):
            given = f"a {type(value).__name__}" + (f" of {len(value)}" if several else "")
            raise TypeError(NOT_PRIMALS.format(name=name_of(fun, "jvp"), option=option, given=given))
    one = Flat(Program, fun, "jvp", primals, has_aux)
    given = one.tangents(tangents)
    _, rates, out = jax.jvp(one.flat, (one.primals,), (given,), has_aux=True)
    return one.results(one.rate(rates), out)


def linearize(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """The value of a function of any objects, and its derivative there as a function of tangents.

    Returns:
        (value, rate), and with `has_aux` the second part. `rate(*tangents)` takes and gives what `jvp` takes and gives,
        without running the function again.
    """
    one = Flat(Program, fun, "linearize", primals, has_aux)
    _, push, out = jax.linearize(one.flat, one.primals, has_aux=True)
    later = one.later()

    def rate(*tangents: Any) -> Any:
        return later.rate(push(later.tangents(tangents)))

    return one.results(rate, out)


def vjp(
    fun: Callable[..., Any], *primals: Any, has_aux: bool = False, reduce_axes: Sequence[Any] = ()
) -> tuple[Any, ...]:
    """The value of a function of any objects, and the function that pulls cotangents back.

    Args:
        fun: the function; what it changes comes back to the caller.
        primals: its positional arguments.
        has_aux: the function returns a pair, of which the first part is differentiated.
        reduce_axes: as in `jax.vjp`.

    Returns:
        (value, pull back), and with `has_aux` the second part. `pull back` takes a graph like the value, with a
        cotangent for each array (None is zero), and returns a tuple of graphs like the primals, as `value_and_grad`
        gives them.
    """
    return pulled_back(Program, fun, primals, has_aux, {"reduce_axes": reduce_axes} if reduce_axes else {})


def pulled_back(
    make: Make, fun: Callable[..., Any], primals: Sequence[Any], has_aux: bool, options: dict[str, Any]
) -> tuple[Any, ...]:
    """`vjp` with the programs that `make` makes."""
    one = Flat(make, fun, "vjp", primals, has_aux)
    _, pull, out = jax.vjp(one.flat, one.primals, has_aux=True, **options)
    later = one.later()

    def pull_back(cotangent: Any) -> tuple[Any, ...]:
        given = later.cotangents(cotangent)
        with _in_reverse():
            (gradients,) = pull(given)
        return later.chosen.graphs(gradients)

    return one.results(pull_back, out)


def _counted(name: str, tangents: Sequence[Any], count: int) -> tuple[Any, ...]:
    """The tangents, one for each primal."""
    if len(tangents) != count:
        raise TypeError(TANGENT_COUNT.format(name=name, count=count, given=len(tangents)))
    return tuple(tangents)


class _Later(NamedTuple):
    """What a derivative that is asked for later needs. Holds nothing of the caller's objects."""

    name: str
    chosen: Chosen
    inputs: tuple[Shape, ...]
    output: _core.GraphDef
    outputs: tuple[Shape, ...]

    def tangents(self, given: Sequence[Any]) -> tuple[Any, ...]:
        return fitting(self.name, "tangent", self.inputs, _counted(self.name, given, len(self.chosen.roots)))

    def cotangents(self, given: Any) -> tuple[Any, ...]:
        return fitting(self.name, "cotangent", self.outputs, (given,))

    def rate(self, rates: Sequence[Any]) -> Any:
        return _core.unflatten(self.output, [None if is_nothing(x) else x for x in rates])


class Flat:
    """A function, differentiated by the inexact arrays of all its positional arguments."""

    def __init__(self, make: Make, fun: Callable[..., Any], title: str, primals: Sequence[Any], has_aux: bool) -> None:
        numbers = range(len(primals))
        self._program = program_by(make, fun, title, primals, {}, numbers)
        self._chosen = choose(self._program, numbers, None, False, make is not Program)
        self._has_aux = has_aux
        self.primals = tuple(self._program.leaves[i] for i in self._chosen.leaves)
        places = self._program.places
        self._inputs = tuple(Shape.of(self._program.leaves[i], *places[i]) for i in self._chosen.leaves)
        self._output: Output | None = None

        def flat(by: tuple[Any, ...]) -> tuple[Any, list[Any]]:
            leaves = replaced(self._program, self._chosen.leaves, by)
            self._output, out = traced_output(self._program, leaves, has_aux)
            return tuple(self._output.leaves), out

        self.flat = named(flat, self._program)

    def tangents(self, given: Sequence[Any]) -> tuple[Any, ...]:
        name = self._program.name
        return fitting(name, "tangent", self._inputs, _counted(name, given, len(self._chosen.roots)))

    def rate(self, rates: Sequence[Any]) -> Any:
        return self.later().rate(rates)

    def later(self) -> _Later:
        assert self._output is not None
        paths = self._output.graphdef.leaf_paths()
        shapes = tuple(
            Shape.of(leaf, 0, path, f"value{keystr(path)}")
            for leaf, path in zip(self._output.leaves, paths, strict=True)
        )
        return _Later(self._program.name, self._chosen, self._inputs, self._output.graphdef, shapes)

    def results(self, second: Any, out: Sequence[Any]) -> tuple[Any, ...]:
        result = self._program.finish(out, untouched=self._program.untouched)
        return (result[0], second, result[1]) if self._has_aux else (result, second)
