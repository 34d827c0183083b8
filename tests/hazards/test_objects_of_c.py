# SPDX-License-Identifier: Apache-2.0
"""Objects of C code below registered classes, as the `mujoco.MjModel` in the system of brax."""

import dataclasses
import hashlib
import sys
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import graftax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class System:
    mass: Any
    model: Any = dataclasses.field(metadata={"static": True})


class Body(eqx.Module):
    mass: Any
    model: Any = eqx.field(static=True)


class Pair:
    """Registered with functions: the model is in its aux data."""

    def __init__(self, mass: Any, model: Any) -> None:
        self.mass, self.model = mass, model


jax.tree_util.register_pytree_node(
    Pair, lambda pair: ((pair.mass,), ("name", pair.model)), lambda aux, children: Pair(children[0], aux[1])
)


def model(content: bytes = b"") -> Any:
    return hashlib.sha256(content)


@pytest.mark.quick(3)
@pytest.mark.parametrize("cls", [System, Body, Pair])
def test_one_that_nothing_changes_counts_by_identity(cls: Any):
    f = graftax.jit(lambda system, x: (system, system.mass * x))
    first, second = model(), model()
    for held in (first, first, second):
        system, y = f(cls(jnp.ones(()), held), 2.0)
        assert system.model is held and y == 2
    assert f.cache_info().traces == 2


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the interpreter reports no calls")
def test_handing_it_to_c_code_is_told_of_once():
    def step(system: Any, x: Any) -> Any:
        system.model.update(b"a step")
        return system.mass * x

    f, system = graftax.jit(step), System(jnp.ones(()), model())
    with pytest.warns(graftax.ImpureCallWarning, match=r"update\(\).*compared by identity"):
        f(system, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(system, 1.0)
        f(system, jnp.ones(3))
        graftax.jit(step, warn_impure=False)(System(jnp.ones(()), model()), 1.0)


def test_what_only_looks_at_it_is_not_told_of():
    def step(system: Any, x: Any) -> Any:
        return x * len(repr(system.model)) * isinstance(system.model, int) + system.model.digest_size

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert graftax.jit(step)(System(jnp.ones(()), model()), 1.0) == 32


@pytest.mark.parametrize("find", [lambda x: x, lambda x: x[0], lambda x: x["model"]], ids=["alone", "list", "dict"])
def test_elsewhere_it_is_refused_where_it_is_used(find: Any, request: Any):
    holder = {"alone": model(), "list": [model()], "dict": {"model": model()}}[request.node.callspec.id]
    assert graftax.jit(lambda x, y: y)(holder, 1.0) == 1.0
    with pytest.raises(graftax.UnsupportedValueError, match="implemented in C"):
        graftax.jit(lambda x, y: y * find(x).digest_size)(holder, 1.0)


def test_a_new_one_in_the_result_is_refused():
    with pytest.raises(graftax.UnsupportedValueError, match="implemented in C"):
        graftax.jit(lambda x: System(x, model()))(jnp.ones(()))
