# SPDX-License-Identifier: Apache-2.0
"""What graftax knows of other libraries: loaded with them, and what their types need of the engine."""

import copy
import pickle
import subprocess
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import graftax

T = typing.TypeVar("T")


def loaded(code):
    report = "print(*sorted(m for m in sys.modules if m.startswith('graftax.interop.')))"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys, graftax, jax.numpy as jnp\n{code}\n{report}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.split()


@pytest.mark.quick(0)  # each starts an interpreter
@pytest.mark.parametrize("library", ["none", "equinox", "nnx", "flarejax"])
def test_an_adapter_is_loaded_once_its_library_is(library):
    if library == "flarejax":
        pytest.importorskip("flarejax")
    given = {"none": "", "nnx": "from flax import nnx"}.get(library, f"import {library}")
    found = loaded(f"{given}\ngraftax.flatten(type('C', (), {{}})())")
    names = {"none": [], "nnx": ["linen", "nnx", "train_state"]}.get(library, [library])  # flax imports all of its own
    assert found == [f"graftax.interop.{name}" for name in names]


@pytest.mark.quick(0)
def test_a_library_without_the_names_an_adapter_needs_is_what_jax_makes_of_it():
    code = (
        "import types; sys.modules['equinox'] = types.ModuleType('equinox')\n"
        "assert graftax.flatten({'a': jnp.ones(1)})[0][0] == 1\n"
        "assert graftax.flatten(type('C', (), {})())[0] == []"
    )
    assert loaded(code) == []


class Box(typing.Generic[T]):
    def __init__(self, value: T):
        self.value = value


def test_a_class_that_derives_from_generic_is_opened_like_any_other():
    @graftax.jit
    def f(box):
        box.value = box.value * 2
        return box.value

    box = Box(jnp.ones(2))
    assert f(box).tolist() == [2, 2]
    assert f(box).tolist() == [4, 4]
    assert box.value.tolist() == [4, 4]
    assert f.cache_info().traces == 1


def test_a_class_registered_as_static_is_compared_by_what_it_holds():
    @jax.tree_util.register_static
    class Config:
        def __init__(self, scale):
            self.scale = scale

        def __eq__(self, other):
            return self.scale == other.scale

        def __hash__(self):
            return hash(self.scale)

    f = graftax.jit(lambda config, x: x * config.scale)
    assert f(Config(1), jnp.ones(())) == 1
    assert f(Config(2), jnp.ones(())) == 2
    assert f(Config(2), jnp.ones(())) == 2
    assert f.cache_info().traces == 2
    assert graftax.flatten(Config(1))[1] != graftax.flatten(Config(True))[1]


def test_treedefs_are_compared_by_value():
    f = graftax.jit(lambda treedef, *xs: treedef.unflatten(xs))
    for _ in range(2):
        treedef = jax.tree.structure({"a": 1, "b": (2, None)})
        assert f(treedef, 1, jnp.ones(())) == {"a": 1, "b": (1.0, None)}
    assert f.cache_info().traces == 1
    assert f(jax.tree.structure([1, 2]), 1, jnp.ones(())) == [1, 1.0]
    first, second = (graftax.flatten(jax.tree.structure(x))[1] for x in ({1: 0}, {True: 0}))
    assert first != second


def test_a_graphdef_does_not_depend_on_the_trace_it_was_made_in():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    seen = []

    @jax.jit
    def inside(x):
        inner = nnx.merge(*nnx.split(model))
        inner.bias = nnx.Param(x)
        seen.append(graftax.flatten(inner)[1])
        return x

    inside(jnp.ones(2))
    outside = graftax.flatten(model)[1]
    assert seen[0] == outside
    assert hash(seen[0]) == hash(outside)
    assert "TraceState()" in repr(outside)


def test_a_graphdef_with_context_pickles_and_has_a_fingerprint():
    model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    leaves, graphdef = graftax.flatten(model)
    again = pickle.loads(pickle.dumps(graphdef))
    assert again == graphdef
    assert again.fingerprint() == graphdef.fingerprint()
    made = graftax.unflatten(again, leaves)
    made.layers[0].bias[...] = made.layers[0].bias[...] + 1
    assert graftax.flatten(copy.deepcopy(model))[1] == graphdef


def test_the_flat_form_of_a_module_builds_one_that_may_be_changed():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    made = graftax.from_dict(graftax.to_dict(model))
    np.testing.assert_array_equal(made.kernel[...], model.kernel[...])
    made.bias[...] = jnp.ones(2)
    made.name = "mine"
    assert not model.bias[...].any()
