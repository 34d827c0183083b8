# SPDX-License-Identifier: Apache-2.0
"""Tracebacks show the user's frames: as many lines as JAX's for the same fault, and one for the operands."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
import types

import equinox as eqx
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import graftax

X = jnp.ones(3)
GRAFTAX = types.SimpleNamespace(**vars(graftax), lax=graftax)


def fault(x):
    return (x + jnp.ones((4, 4, 4, 4))[0, 0, 0] + jnp.ones(5)).sum()


def in_jit(lib):
    lib.jit(fault)(X)


def grad_in_jit(lib):
    lib.jit(lambda x: lib.grad(fault)(x))(X)


def scan_in_jit(lib):
    lib.jit(lambda x: lib.lax.scan(lambda c, a: (c, fault(a)), x.sum(), x))(X)


def cond_in_jit(lib):
    lib.jit(lambda x: lib.lax.cond(x.sum() > 0, fault, fault, x))(X)


def while_loop_in_jit(lib):
    lib.jit(lambda x: lib.lax.while_loop(lambda c: c.sum() < 3, fault, x))(X)


def vmap_in_jit(lib):
    lib.jit(lambda x: lib.vmap(fault)(x))(X)


def checkpoint_in_jit(lib):
    lib.jit(lambda x: lib.checkpoint(fault)(x))(X)


def nested(lib):
    def step(carry, x):
        return carry, lib.jit(lib.vmap(fault))(jnp.ones((2, 3)))

    lib.jit(lambda x: lib.grad(lambda x: lib.lax.scan(step, x.sum(), x)[0])(x))(X)


def method(lib):
    class Model:
        def loss(self, x):
            return fault(x)

        step = lib.jit(loss, static_argnums=0 if lib is jax else None)

    Model().step(X)


def grad_alone(lib):
    lib.grad(fault)(X)


def vmap_alone(lib):
    lib.vmap(fault)(X)


def scan_alone(lib):
    lib.lax.scan(lambda c, a: (c, fault(a)), 0.0, X)


def jvp_alone(lib):
    lib.jvp(fault, (X,), (X,))


def vjp_alone(lib):
    lib.vjp(fault, X)


def jacobian_in_jit(lib):
    lib.jit(lambda x: lib.hessian(fault)(x))(X)


def vmap_in_scan_in_grad_in_jit(lib):
    def step(carry, a):
        return carry + lib.vmap(lambda b: fault(a * b * X))(X).sum(), None

    lib.jit(lambda x: lib.grad(lambda x: lib.lax.scan(step, 0.0, x)[0])(x))(X)


def switch_in_jit(lib):
    lib.jit(lambda x: lib.lax.switch(1, [lambda x: x.sum(), fault], x))(X)


def condition_of_a_while_loop(lib):
    lib.lax.while_loop(lambda c: fault(X) < c, lambda c: c + 1, 0.0)


def associative_scan_alone(lib):
    lib.lax.associative_scan(lambda a, b: a + fault(b), X)


def of_custom_jvp(lib, f, rule):
    rules = lib.custom_jvp(f)
    rules.defjvp(lambda primals, tangents: (primals[0].sum(), rule(tangents[0])))
    return rules


def of_custom_vjp(lib, fwd, bwd):
    rules = lib.custom_vjp(lambda x: x.sum())
    rules.defvjp(lambda x: (fwd(x), x), lambda x, cotangent: (bwd(x) * cotangent,))
    return rules


def function_of_custom_jvp(lib):
    lib.jit(of_custom_jvp(lib, fault, jnp.sum))(X)


def rule_of_custom_jvp(lib):
    lib.jit(lib.grad(of_custom_jvp(lib, jnp.sum, fault)))(X)


def fwd_of_custom_vjp(lib):
    lib.jit(lib.grad(of_custom_vjp(lib, fault, jnp.ones_like)))(X)


def bwd_of_custom_vjp(lib):
    lib.jit(lib.grad(of_custom_vjp(lib, jnp.sum, fault)))(X)


def shard_map_in_jit(lib):
    spec = jax.sharding.PartitionSpec
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("data",), axis_types=auto, devices=jax.devices()[:1])
    lib.jit(lib.shard_map(fault, mesh=mesh, in_specs=spec("data"), out_specs=spec()))(X)


def lowered(lib):
    lib.jit(fault).lower(X)


FAULTS = [
    in_jit,
    grad_in_jit,
    scan_in_jit,
    cond_in_jit,
    while_loop_in_jit,
    vmap_in_jit,
    checkpoint_in_jit,
    nested,
    method,
    grad_alone,
    vmap_alone,
    scan_alone,
    jvp_alone,
    vjp_alone,
    jacobian_in_jit,
    vmap_in_scan_in_grad_in_jit,
    switch_in_jit,
    condition_of_a_while_loop,
    associative_scan_alone,
    function_of_custom_jvp,
    rule_of_custom_jvp,
    fwd_of_custom_vjp,
    bwd_of_custom_vjp,
    shard_map_in_jit,
    lowered,
]


def raised(call, *args):
    try:
        call(*args)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def printed(error):
    return "".join(traceback.format_exception(error)).splitlines()


def of_graftax(error):
    """The frames of graftax's own code in an error and in those that it was raised from."""
    here = os.path.dirname(graftax.__file__)
    frames = []
    while error is not None:
        frames += [f for f, _ in traceback.walk_tb(error.__traceback__) if f.f_code.co_filename.startswith(here)]
        error = error.__cause__ or error.__context__
    return frames


@pytest.fixture
def filtering():
    """Sets JAX's setting for one test."""
    before = jax.config.jax_traceback_filtering
    yield lambda mode: jax.config.update("jax_traceback_filtering", mode)
    jax.config.update("jax_traceback_filtering", before)


@pytest.mark.parametrize("of", FAULTS, ids=lambda of: of.__name__)
def test_a_traceback_has_at_most_one_line_more_than_jaxs(of, filtering):
    filtering("quiet_remove_frames")
    ours, jaxs = raised(of, GRAFTAX), raised(of, jax)
    assert len(printed(ours)) <= len(printed(jaxs)) + 1
    assert not of_graftax(ours)
    assert str(ours) == str(jaxs)


@pytest.mark.parametrize("kind", ["pure_callback", "io_callback"])
def test_the_log_of_a_failed_host_function_is_as_long_as_jaxs(kind, caplog, filtering):
    filtering("quiet_remove_frames")
    jaxs = types.SimpleNamespace(jit=jax.jit, pure_callback=jax.pure_callback, io_callback=jax.experimental.io_callback)

    def host(x):
        raise ValueError("this host function fails")

    def lines(lib):
        caplog.clear()
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        error = raised(lib.jit(lambda x: getattr(lib, kind)(host, shape, x)), jnp.float32(1))
        logged = [record for record in caplog.records if record.exc_info]
        assert logged
        frames = [f for record in logged for f, _ in traceback.walk_tb(record.exc_info[2])]
        texts = [traceback.format_exception(record.exc_info[1]) for record in logged]
        assert not [f for f in frames if f.f_code.co_filename.startswith(os.path.dirname(graftax.__file__))]
        return len("".join(map("".join, texts)).splitlines()), len(printed(error))

    (ours, raised_by_ours), (theirs, raised_by_jax) = lines(graftax), lines(jaxs)
    assert ours == theirs
    assert raised_by_ours <= raised_by_jax + 1


def test_errors_of_graftax_show_the_users_frames_alone():
    def refused():
        graftax.jit(lambda data: next(data["data"]))({"data": iter([1])})

    def wrong_option():
        graftax.jit(lambda x: x, donate="nobody")

    def not_scalar():
        graftax.grad(lambda x: x)(X)

    def lowered():
        graftax.jit(lambda x: x).lower(X).compile()(jnp.ones(4))

    def exported():
        graftax.export(lambda x: x)(X)(jnp.ones(4))

    def forbidden():
        graftax.jit(lambda d: d.clear(), mutation="error")({"x": X})

    def missing_path_text():
        graftax.at({"a": 1})["b"].set(2)

    def others():
        graftax.combine({"a": 1}, [1])

    for call in (refused, wrong_option, not_scalar, lowered, exported, forbidden, missing_path_text, others):
        error = raised(call)
        assert not of_graftax(error), call.__name__


def test_what_a_transform_gave_back_hides_its_frames_too():
    _, pull = graftax.vjp(lambda x: x.sum(), X)
    assert not of_graftax(raised(pull, jnp.ones(7)))

    @graftax.custom_jvp
    def rule(x):
        return fault(x)

    rule.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    assert not of_graftax(raised(rule, X))


@pytest.mark.parametrize("mode", ["off", "tracebackhide"])
def test_the_setting_of_jax_decides_how_frames_are_hidden(mode, filtering):
    filtering(mode)
    error = raised(grad_alone, GRAFTAX)
    frames = of_graftax(error)
    assert frames
    assert mode == "off" or all(f.f_locals["__tracebackhide__"] for f in frames)


@pytest.mark.parametrize(
    "call",
    [
        lambda: graftax.jit(lambda data: next(data["data"]))({"data": iter([1])}),
        lambda: graftax.jit(lambda data: data)({"data": np.array([object()])}),
        lambda: graftax.jit(lambda d: d.clear(), mutation="error")({"x": X}),
        lambda: graftax.jit(lambda x: x, donate="nobody"),
        lambda: graftax.at({"a": 1})["b"].set(2),
        lambda: graftax.grad(lambda x: x)(X),
    ],
)
def test_the_last_frame_of_graftaxs_own_error_is_the_users(call, filtering):
    filtering("tracebackhide")  # that of IPython, which shows the last frame even if it is hidden
    *_, (last, _) = traceback.walk_tb(raised(call).__traceback__)
    assert last.f_code.co_filename == __file__


@pytest.mark.quick(0)  # each starts an interpreter
@pytest.mark.parametrize("full", [False, True])
def test_an_environment_variable_brings_the_frames_back(full):
    program = "import graftax, jax.numpy as jnp\ngraftax.jit(lambda x: x + jnp.ones(2))(jnp.ones(3))"
    environment = {**os.environ, "GRAFTAX_TRACEBACK": "full" if full else ""}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert run.returncode == 1
    assert (os.path.dirname(graftax.__file__) in run.stderr) == full


class Layer:
    def __init__(self):
        self.w, self.b = jnp.ones((3, 4)), jnp.ones(4)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda layer, x: layer.w @ x, "layer.w is float32[3, 4] and x is float32[5]"),
        (lambda layer, x: jnp.concatenate([layer.w, x]), "layer.w is float32[3, 4] and x is float32[5]"),
        (lambda layer, x: jnp.einsum("ij,jk", layer.w, x * 2), "layer.w is float32[3, 4]"),
        (
            lambda layer, x: graftax.grad(lambda m: (x @ m.w).sum())(layer),
            "closure x is float32[5] and m.w is float32[3, 4]",
        ),
        (lambda layer, x: x.reshape(9), "x is float32[5]"),
    ],
)
def test_an_error_of_shapes_names_the_key_paths_of_its_operands(wrong, told):
    error = raised(graftax.jit(wrong), Layer(), jnp.ones(5))
    assert f"Of its operands, {told}." in error.__notes__


def test_operands_that_are_no_leaves_are_not_named():
    def wrong(layer, x):
        return (layer.w * 2) @ (x + 1)

    error = raised(graftax.jit(wrong), Layer(), jnp.ones(5))
    assert "operands" not in "".join(error.__notes__)


def test_an_error_of_the_users_own_gets_no_line():
    def wrong(x):
        raise ValueError("no")

    assert "operands" not in "".join(getattr(raised(graftax.jit(wrong), X), "__notes__", ()))


class Plain:
    def __init__(self):
        self.w = jnp.ones(3)


OF_JAX = {
    "grad": lambda model: jax.grad(lambda m: m.w.sum())(model),
    "vmap": lambda model: jax.vmap(lambda m: m.w)(model),
    "scan": lambda model: jax.lax.scan(lambda m, x: (m, None), model, jnp.ones(3)),
    "checkpoint": lambda model: jax.checkpoint(lambda m: m.w)(model),
    "jit": lambda model: jax.jit(lambda m: m.w)(model),
    "grad in grad": lambda model: graftax.grad(lambda x: jax.grad(lambda m: m.w.sum() * x)(model))(1.0),
    "jacfwd in hessian": lambda model: jax.hessian(lambda m: m.w.sum())(model),
}


@pytest.mark.parametrize("name", OF_JAX)
def test_a_transform_of_jax_that_refuses_an_object_says_whose_to_call(name):
    error = raised(graftax.jit(OF_JAX[name]), Plain())
    name = name.partition(" ")[0]
    theirs = "jax.lax.scan" if name == "scan" else f"jax.{name}"
    text = f"graftax's do: call graftax.{name} instead of {theirs}."
    assert sum(text in note for note in error.__notes__) == 1


def test_a_function_of_jax_that_is_given_an_object_says_to_pass_its_arrays():
    error = raised(graftax.jit(lambda model: jnp.sum(model)), Plain())
    text = "JAX's functions do not accept objects of type Plain: pass an array"
    assert sum(text in note for note in error.__notes__) == 1


class Fields(eqx.Module):
    w: jax.Array
    name: str


class Node(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(3))


def test_a_transform_of_jax_that_refuses_a_field_says_whose_to_call():
    error = raised(graftax.jit(OF_JAX["grad"]), Fields(jnp.ones(3), "net"))
    text = "do not accept objects of type str, and graftax's do: call graftax.grad instead of jax.grad."
    assert sum(text in note for note in error.__notes__) == 1


def test_jax_tree_map_of_an_object_that_is_a_leaf_to_it_names_map_leaves():
    def descend(model, gradients):
        return jax.tree.map(lambda w, g: w - g, model, gradients)

    error = raised(graftax.jit(descend), Plain(), Plain())
    text = "To jax.tree.map, an object of type Plain is a single leaf. Write graftax.map_leaves(function, obj, *others)"
    assert sum(text in note for note in error.__notes__) == 1
    unrelated = raised(graftax.jit(lambda tree: jax.tree.map(lambda w: w + "a", tree)), {"w": X})
    assert "map_leaves" not in "".join(getattr(unrelated, "__notes__", ()))


@pytest.mark.quick(9)
@pytest.mark.parametrize("make", [Plain, lambda: Fields(jnp.ones(3), "net"), Node], ids=["plain", "equinox", "nnx"])
@pytest.mark.parametrize("remedy", ["graftax.cond(", "jnp.where(mask", "from the shapes of other arrays"])
def test_the_model_does_not_matter_for_what_an_error_says_to_write(make, remedy):
    def wrong(model):
        w = jnp.asarray(model.w) * 2
        if "cond" in remedy:
            return w if w.sum() > 0 else -w
        return w[w > 0] if "where" in remedy else jnp.zeros(w.sum().astype(int))

    error = raised(graftax.jit(wrong), make())
    assert sum(remedy in note for note in error.__notes__) == 1


def branches(x):
    return x if x.sum() > 0 else -x


def writes(x):
    x[0] = 1.0


def fills(x):
    x.fill(0.0)


REMEDIES = {
    "if": (branches, X, "To branch on a traced value, call graftax.cond(condition, if_true, if_false, *operands)"),
    "float": (lambda x: float(x.sum()), X, "compute with the array itself and read it after the call"),
    "numpy": (np.asarray, X, "call the function of jax.numpy instead"),
    "range": (lambda x: [i for i in range(x)], jnp.array(3), "loop with graftax.fori_loop"),
    "format": (lambda x: f"{x.sum():.3f}", X, "print it with jax.debug.print"),
    "item": (writes, np.ones(3), "`model.w = model.w.at[i].set(x)`"),
    "method": (fills, np.ones(3), "Write a = jnp.full_like(a, value)"),
}


@pytest.mark.parametrize(("wrong", "argument", "remedy"), REMEDIES.values(), ids=REMEDIES)
def test_an_error_of_a_traced_value_says_once_what_to_write_instead(wrong, argument, remedy):
    for function in (wrong, lambda x: graftax.jit(wrong)(x)):
        error = raised(graftax.jit(lambda x, f=function: f(x)), argument)
        assert sum(remedy in text for text in (str(error), *error.__notes__)) == 1


def test_an_attribute_that_numpy_lacks_as_well_gets_no_remedy():
    assert "NumPy" not in "".join(getattr(raised(graftax.jit(lambda x: x.fil(0)), X), "__notes__", ()))


def test_an_error_of_a_traced_value_lists_ten_arguments_of_many():
    model = [jnp.ones(()) for _ in range(40)]
    text = str(raised(graftax.jit(lambda model: bool(sum(model))), model))
    assert "the arguments model[0], model[1]" in text and "model[9] and 30 more." in text and "model[10]" not in text


def test_ten_arguments_are_all_listed_and_so_are_keys_with_commas():
    ten = [jnp.ones(()) for _ in range(10)]
    assert "more" not in str(raised(graftax.jit(lambda model: bool(sum(model))), ten))
    keys = {f"{i}, x": jnp.ones(()) for i in range(12)}
    assert "11, x" in str(raised(graftax.jit(lambda model: bool(sum(model.values()))), keys))


def test_a_mesh_of_explicit_axes_whose_shardings_do_not_fit_names_axis_types():
    kinds = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((1,), ("data",), axis_types=kinds, devices=jax.devices()[:1])
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
    x, w = jax.device_put(jnp.ones((4, 4)), split), jax.device_put(jnp.ones((4, 4)), split)
    error = raised(graftax.jit(lambda x, w: x.T @ w), x, w)
    assert "axis_types=(jax.sharding.AxisType.Auto,)" in "".join(error.__notes__)


@pytest.mark.parametrize("placed", [False, True])
def test_a_call_whose_outputs_are_placed_shows_the_users_frames_alone(placed):
    def f(x):
        raise ValueError("mine")

    options = {"out_shardings": jax.sharding.SingleDeviceSharding(jax.devices()[0])} if placed else {}
    jitted = graftax.jit(lambda d, x: d.update(x=f(x)), **options)
    for _ in range(2):
        assert not of_graftax(raised(jitted, {}, X))
