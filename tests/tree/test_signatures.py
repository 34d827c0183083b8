# SPDX-License-Identifier: Apache-2.0
"""Every public function tells its parameters."""

from __future__ import annotations

import copy
import inspect
import pickle
import weakref
from typing import Any

import jax
import pytest

import graftax
from graftax import _core

pytestmark = pytest.mark.quick(100)  # a case takes milliseconds

FUNCTIONS = {
    f"{module.__name__}.{name}": value
    for module in (graftax, graftax.tree)
    for name, value in vars(module).items()
    if not name.startswith("_") and inspect.isroutine(value)
}
IN_JAX = sorted(name for name in vars(graftax.tree) if hasattr(jax.tree, name) and not name.startswith("_"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_its_signature_names_parameters(name: str):
    assert list(inspect.signature(FUNCTIONS[name]).parameters) != ["args", "kwargs"]


@pytest.mark.parametrize("name", IN_JAX)
def test_its_parameters_are_those_of_jax(name: str):
    ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (graftax.tree, jax.tree))
    assert [name for name in ours if name in theirs] == list(theirs)  # an older JAX has fewer


@pytest.mark.parametrize("function", [graftax.tree.flatten, graftax.tree.map], ids=["flatten", "map"])
def test_a_function_of_the_core_is_pickled_and_copied_by_name(function: Any):
    assert pickle.loads(pickle.dumps(function)) is function
    assert copy.deepcopy(function) is function
    assert repr(function) == f"<function {function.__name__}>"


def test_a_function_of_the_core_is_a_method_in_a_class_as_any_function():
    class Node(dict[str, int]):
        leaves = graftax.tree.leaves

    assert Node.leaves is graftax.tree.leaves
    assert Node(a=1).leaves() == [Node(a=1)]


def test_a_function_of_the_core_has_whatever_name_it_is_given():
    function = _core.with_attributes(_core.flatten, {"__qualname__": "first"})
    gone, received = weakref.ref(function), []
    weakref.finalize(function, received.append, "gone")
    assert repr(function) == "<function first>" and function.__get__(None, type(None)) is function
    function.__qualname__ = 3
    assert repr(function) == "<function 3>"
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(function)
    del function.__qualname__
    for act in (repr, pickle.dumps):
        with pytest.raises(AttributeError, match="__qualname__"):
            act(function)
    assert function([1])[0] == []
    del function
    assert gone() is None and received == ["gone"]
