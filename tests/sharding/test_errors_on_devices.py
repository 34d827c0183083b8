# SPDX-License-Identifier: Apache-2.0
"""Errors of calls on several devices show the user's frames and names alone, and say what to write instead."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import graftax
from devices import run_again

P = PartitionSpec
COUNT = 4
IS_SEVERAL = jax.device_count() >= COUNT
in_several_processes = pytest.mark.skipif(not IS_SEVERAL, reason="runs in the processes that the first test starts")
pytestmark = pytest.mark.quick(50)  # all: they take milliseconds
OF_JAX = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}


@pytest.mark.quick(0)
@pytest.mark.skipif(IS_SEVERAL, reason="has them")
@pytest.mark.parametrize("direct", ["0", "1"])
def test_all_of_this_on_four_devices(direct: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GRAFTAX_DIRECT_DISPATCH", direct)
    run_again(__file__, COUNT)


class Model:
    def __init__(self) -> None:
        self.w = jnp.ones((8, 8))

    def loss(self, x: Any) -> Any:
        return (x @ self.w).sum()


def fault(x: Any) -> Any:
    return (x + jnp.ones(5)).sum()


def mesh_of(kind: str) -> Any:
    return jax.make_mesh((COUNT,), ("data",), axis_types=(OF_JAX[kind],), devices=jax.devices()[:COUNT])


def rows_of(mesh: Any) -> Any:
    return jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("data")))


def in_a_traced_function(mesh: Any) -> None:
    graftax.jit(fault)(rows_of(mesh))


def under_the_mesh(mesh: Any) -> None:
    with jax.set_mesh(mesh):
        graftax.jit(fault)(rows_of(mesh))


def in_a_placed_model(mesh: Any) -> None:
    model = graftax.shard(Model(), mesh, [("**", graftax.fsdp("data", min_size=1))])
    graftax.jit(lambda model, x: graftax.grad(lambda model: fault(model.w))(model))(model, rows_of(mesh))


def in_a_shard_map(mesh: Any) -> None:
    graftax.shard_map(fault, mesh=mesh, in_specs=P("data"), out_specs=P())(rows_of(mesh))


def in_a_jitted_shard_map(mesh: Any) -> None:
    graftax.jit(graftax.shard_map(fault, mesh=mesh, in_specs=P("data"), out_specs=P()))(rows_of(mesh))


def of_rules_without_a_match(mesh: Any) -> None:
    graftax.shard(Model(), mesh, [("bias", None)])


def of_a_size_that_does_not_divide(mesh: Any) -> None:
    graftax.shard({"w": jnp.ones(7)}, mesh, [("**", P("data"))])


def of_out_shardings(mesh: Any) -> None:
    graftax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P(None, None, "data")))(rows_of(mesh))


def of_in_shardings(mesh: Any) -> None:
    graftax.jit(lambda x: x, in_shardings=NamedSharding(mesh, P(None, "data")))(rows_of(mesh))


def of_a_constraint(mesh: Any) -> None:
    spec = NamedSharding(mesh, P("data", None, None))
    graftax.jit(lambda x: graftax.filter_shard({"x": x}, spec))(rows_of(mesh))


def of_other_devices(mesh: Any) -> None:
    graftax.jit(lambda x, y: x + y)(rows_of(mesh), jax.device_put(jnp.ones((8, 8)), jax.devices()[1]))


def of_other_devices_later(mesh: Any) -> None:
    added, x = graftax.jit(lambda x, y: x + y), rows_of(mesh)
    for _ in range(3):
        added(x, x)
    added(x, rows_of(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))))


def of_a_deleted_array(mesh: Any) -> None:
    loss, model = graftax.jit(lambda model: model.w.sum()), Model()
    model.w = rows_of(mesh)
    for _ in range(3):
        loss(model)
    model.w.delete()
    loss(model)


def of_a_nan(mesh: Any) -> None:
    log, x = graftax.jit(lambda x: jnp.log(x) * 2), rows_of(mesh)
    with jax.debug_nans(True):
        log(x)
        log(-x)


def of_a_later_shape(mesh: Any) -> None:
    f = graftax.jit(lambda x: x if x.shape == (8, 8) else fault(x))
    for _ in range(3):
        f(rows_of(mesh))
    f(jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("data"))))


def of_a_saved_program(mesh: Any) -> None:
    graftax.export(lambda x: x)(rows_of(mesh))(jnp.ones((4, 8)))


FAULTS = [
    in_a_traced_function,
    under_the_mesh,
    in_a_placed_model,
    in_a_shard_map,
    in_a_jitted_shard_map,
    of_rules_without_a_match,
    of_a_size_that_does_not_divide,
    of_out_shardings,
    of_in_shardings,
    of_a_constraint,
    of_other_devices,
    of_other_devices_later,
    of_a_deleted_array,
    of_a_nan,
    of_a_later_shape,
    of_a_saved_program,
]


def raised(call: Any, *args: Any) -> Exception:
    try:
        call(*args)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@in_several_processes
@pytest.mark.parametrize("kind", OF_JAX)
@pytest.mark.parametrize("call", FAULTS, ids=lambda call: call.__name__)
def test_a_traceback_shows_nothing_of_graftax(call: Any, kind: str):
    error = raised(call, mesh_of(kind))
    package_folder = os.path.dirname(graftax.__file__)
    frames = [frame for link in chain(error) for frame, _ in traceback.walk_tb(link.__traceback__)]
    assert not [frame for frame in frames if frame.f_code.co_filename.startswith(package_folder)]
    assert any(frame.f_code is call.__code__ for frame in frames)
    text = "".join(traceback.format_exception(error))
    assert "flat_function" not in text and "leaves[" not in text and package_folder not in text


def indexed(model: Any, x: Any) -> Any:
    return model.w[jnp.argmax(x, axis=1)].sum()


def multiplied(model: Any, x: Any) -> Any:
    return (model.w.T @ x).sum()


def scanned(model: Any, x: Any) -> Any:
    return graftax.scan(lambda x, w: (x + w, None), x[0], model.w)[0].sum()


@in_several_processes
@pytest.mark.parametrize("loss", [indexed, multiplied, scanned])
@pytest.mark.parametrize("jit", [graftax.jit, lambda f: f], ids=["jitted", "plain"])
def test_explicit_axes_under_fsdp_name_axis_types(loss: Any, jit: Any):
    def step(model: Any, opt: Any, x: Any) -> None:
        opt.update(model, graftax.grad(loss)(model, x))

    def trained() -> None:
        mesh = mesh_of("Explicit")
        model = graftax.shard(Model(), mesh, [("**", graftax.fsdp("data", min_size=1))])
        jit(step)(model, graftax.optimizer(optax.adam(1e-3), model), rows_of(mesh))

    notes = "".join(raised(trained).__notes__)
    assert notes.count("axis_types=(jax.sharding.AxisType.Auto,) * len(names)") == 1


@in_several_processes
def test_a_spec_of_the_users_own_that_repeats_an_axis_is_no_matter_of_axis_types():
    spec = NamedSharding(mesh_of("Auto"), P("data"))
    wrong = graftax.jit(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(spec.mesh, P("data", "data"))))
    assert "axis_types=(jax" not in "".join(getattr(raised(wrong, rows_of(spec.mesh)), "__notes__", ()))
