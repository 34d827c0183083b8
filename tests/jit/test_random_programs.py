# SPDX-License-Identifier: Apache-2.0
"""Random programs on random graphs: through ``jit`` as in plain Python, cold, warm and with other shapes."""

import gc
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings

import graftax
import oracle
import strategies
from strategies import Program, Recipe

GRAPHS, PROGRAMS = strategies.graphs(), strategies.programs()


@pytest.fixture(autouse=True)
def few_objects_to_collect() -> Any:
    """Only what the test itself makes is looked at by a collection."""
    gc.freeze()
    yield
    gc.unfreeze()


def run(f: Any, roots: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice on statics and on lost changes is tested elsewhere
            return f(*roots), None
    except Exception as error:
        return None, error


def settle(recipe: Recipe, program: Program) -> bool:
    """Whether there are weak references, after those to garbage have died."""
    found = "reference" in repr((recipe, program))
    if found:
        gc.collect()
    return found


def same_failure(want: BaseException | None, got: BaseException | None) -> None:
    if (want is None) != (got is None):
        raise AssertionError(f"plain Python: {want!r}, through jit: {got!r}") from got or want
    assert type(want) is type(got) and str(want) == str(got)


def places_of_arrays(seen: Any) -> list[int]:
    """Of each array of JAX, in walk order, which of them it is."""
    first: dict[int, int] = {}
    arrays = [x for x in oracle.reachable(seen)[1] if isinstance(x, jax.Array)]
    return [first.setdefault(id(x), i) for i, x in enumerate(arrays)]


def as_in_plain_python(program: Program, jitted: Any, recipe: Recipe, *variant: Any) -> bool:
    """Whether the program returned; everything that the caller can see afterwards is compared."""
    plain_roots, plain_nodes = recipe.build(*variant)
    roots, nodes = recipe.build(*variant)
    plain_result, plain_error = run(lambda *roots: program(roots), plain_roots)
    result, error = run(jitted, roots)
    same_failure(plain_error, error)
    if plain_error is not None:  # a failed call leaves the caller's graph as it was
        plain_roots, plain_nodes = recipe.build(*variant)
    settle(recipe, program)
    seen_in_python, seen = (plain_result, plain_roots, plain_nodes), (result, roots, nodes)
    assert oracle.difference(seen_in_python, seen, zip(plain_nodes, nodes, strict=True)) is None
    assert places_of_arrays(seen) == places_of_arrays(seen_in_python)  # one array in two places stays one
    return plain_error is None


@given(GRAPHS, PROGRAMS)
def test_jit_does_what_plain_python_does_cold_and_warm(recipe: Recipe, program: Program):
    jitted = graftax.jit(lambda *roots: program(roots))
    if as_in_plain_python(program, jitted, recipe):
        traces = jitted.cache_info().traces
        as_in_plain_python(program, jitted, recipe, 1)
        assert jitted.cache_info().traces == traces


@pytest.mark.quick(0)
@given(GRAPHS, PROGRAMS)
def test_jit_does_what_plain_python_does_with_other_shapes(recipe: Recipe, program: Program):
    jitted = graftax.jit(lambda *roots: program(roots))
    as_in_plain_python(program, jitted, recipe)
    as_in_plain_python(program, jitted, recipe, 1, (3,))
    as_in_plain_python(program, jitted, recipe, 2)


# Without weak references: what the first call lets go of dies between two plain ones only.
@pytest.mark.quick(0)
@settings(max_examples=settings.default.max_examples // 3)
@given(GRAPHS.map(strategies.held), PROGRAMS.map(strategies.held))
def test_jit_twice_on_the_same_graph_is_the_program_twice(recipe: Recipe, program: Program):
    jitted = graftax.jit(lambda *roots: program(roots))
    plain_roots, plain_nodes = recipe.build()
    roots, nodes = recipe.build()
    for _ in range(2):
        plain_result, plain_error = run(lambda *roots: program(roots), plain_roots)
        result, error = run(jitted, roots)
        same_failure(plain_error, error)
        if plain_error is not None:
            return
        seen_in_python, seen = (plain_result, plain_roots, plain_nodes), (result, roots, nodes)
        assert oracle.difference(seen_in_python, seen, zip(plain_nodes, nodes, strict=True)) is None


@pytest.mark.quick(0)
@settings(max_examples=settings.default.max_examples // 3)
@given(GRAPHS, PROGRAMS)
def test_by_value_gives_the_result_and_leaves_the_arguments(recipe: Recipe, program: Program):
    def f(nodes: list[Any], *roots: Any) -> Any:
        result = program(roots)
        return (result, nodes, roots) if references else result  # by value, only the result keeps a referent alive

    plain_roots, plain_nodes = recipe.build()
    references = settle(recipe, program)
    plain_result, plain_error = run(f, (plain_nodes, *plain_roots))
    filtered = graftax.filter_jit(f)
    for jitted in (filtered, graftax.jit(f, mutation="discard")):
        roots, nodes = recipe.build()
        before_roots, before_nodes = recipe.build()
        result, error = run(jitted, (nodes, *roots))
        same_failure(plain_error, error)
        settle(recipe, program)
        pairs = zip(before_nodes, nodes, strict=True)
        assert oracle.difference((before_roots, before_nodes), (roots, nodes), pairs) is None
        expected = plain_result
        if jitted is filtered:  # what is of NumPy comes back as arrays of JAX, as in Equinox
            expected, result = (oracle.deep_copy(x, leaf=jnp.asarray) for x in (plain_result, result))
        assert oracle.difference(expected, result) is None


@pytest.mark.quick(0)
@settings(max_examples=settings.default.max_examples // 3)
@given(GRAPHS, PROGRAMS)
def test_mutation_error_raises_just_where_something_changes(recipe: Recipe, program: Program):
    plain_roots, plain_nodes = recipe.build()
    before_roots, before_nodes = recipe.build()
    roots, nodes = recipe.build()
    plain_result, plain_error = run(lambda *roots: program(roots), plain_roots)
    jitted = graftax.jit(lambda *roots: program(roots), mutation="error")
    result, error = run(jitted, roots)
    settle(recipe, program)
    before = (before_roots, before_nodes)
    assert oracle.difference(before, (roots, nodes), zip(before_nodes, nodes, strict=True)) is None
    if plain_error is not None:
        same_failure(plain_error, error)
    elif not oracle.same_graph(before, (plain_roots, plain_nodes), zip(before_nodes, plain_nodes, strict=True)):
        assert isinstance(error, graftax.GraftaxError)
    elif error is None:
        assert oracle.difference(plain_result, result) is None
    else:  # an array was replaced by an equal one
        assert isinstance(error, graftax.GraftaxError)
