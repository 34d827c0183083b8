# SPDX-License-Identifier: Apache-2.0
"""`GraphDef.fingerprint`: the same in every process, another one for another structure."""

import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import graftax
from sizes import sized
from watchdog import python

CHILD = """
import collections, fractions, jax.numpy as jnp, graftax, zoo
shared = [jnp.ones(2)]
graph = {"a": shared, "b": (shared, "text", 1, 1.0, None), "s": {"x", "y", "z", ("k", 1)}, "f": len,
         "o": zoo.Box(q=collections.deque([1], maxlen=2), r=fractions.Fraction(1, 3)), "d": {("t", 2): b"b"}}
print(graftax.flatten(graph)[1].fingerprint())
"""


@pytest.mark.quick(0)
def test_it_is_the_same_in_every_process():
    prints = {python(CHILD, PYTHONHASHSEED=seed).strip() for seed in ("1", "2", "3")[: sized(3, 2)]}
    assert len(prints) == 1
    assert len(prints.pop()) == 64


@pytest.mark.parametrize("other", [{"a": 1}, {"a": True}, {"a": 1.0}, {"b": 1}, {"a": [1]}, {"a": jnp.ones(1)}, [1]])
def test_another_structure_has_another_one(other):
    mine = graftax.flatten({"a": 2})[1].fingerprint()
    assert graftax.flatten(other)[1].fingerprint() != mine


def test_sharing_counts():
    x, y = [jnp.ones(1)], [jnp.ones(1)]
    assert graftax.flatten([x, x])[1].fingerprint() != graftax.flatten([x, y])[1].fingerprint()


def test_a_jitted_function_counts_by_its_name():
    relu, gelu = ({"f": f, "w": jnp.ones(1)} for f in (jax.nn.relu, jax.nn.gelu))
    prints = [graftax.flatten(x)[1].fingerprint() for x in (relu, dict(relu), gelu)]
    assert prints[0] == prints[1] != prints[2]


def _slow(x):
    return x + 1


_fast = jax.jit(_slow)


@pytest.mark.quick(0)
@pytest.mark.parametrize("static", [_fast, jnp.add, jnp.sin, jax.jit(jnp.sin)], ids=["beside", "ufunc", "sin", "anew"])
def test_a_jitted_function_that_goes_by_another_name_has_one(static):
    one, other = ({"f": f, "w": jnp.ones(1)} for f in (static, jax.nn.relu))
    assert graftax.flatten(one)[1].fingerprint() != graftax.flatten(other)[1].fingerprint()


def test_a_jitted_function_of_a_module_has_a_pickle():
    graphdef = graftax.flatten({"f": _fast, "w": jnp.ones(1)})[1]
    assert pickle.loads(pickle.dumps(graphdef)) == graphdef


def _slow(x):
    return x + 1


@pytest.mark.parametrize("jit", [graftax.jit, graftax.filter_jit])
def test_a_graph_with_a_jitted_function_that_has_no_name_equals_its_pickle(jit):
    fast = jit(_slow)
    graphdef = graftax.flatten({"f": fast, "w": jnp.ones(1)})[1]
    assert pickle.loads(pickle.dumps(graphdef)) == graphdef
    assert pickle.loads(pickle.dumps(fast)) is fast
    checked = graftax.jit(_slow, check=True)
    assert type(pickle.loads(pickle.dumps(checked))) is type(checked)


@eqx.filter_jit
def _filtered(x):
    return jnp.tanh(x)


@eqx.filter_vmap
def _mapped(x):
    return jnp.tanh(x)


@eqx.filter_custom_vjp
def _ruled(x):
    return jnp.tanh(x)


_checkpointed = eqx.filter_checkpoint(_filtered)


@pytest.mark.parametrize("wrapped", [_filtered, _mapped, _ruled, _checkpointed], ids=lambda f: type(f).__name__)
def test_a_function_of_equinox_goes_by_its_name(wrapped):
    graphdef = graftax.flatten({"f": wrapped, "w": jnp.ones(1)})[1]
    restored = pickle.loads(pickle.dumps(graphdef))
    assert restored == graphdef and restored.fingerprint() == graphdef.fingerprint()
    assert type(graftax.unflatten(restored, [jnp.ones(1)])["f"]) is type(wrapped)


def test_a_graph_with_a_function_of_equinox_is_exported():
    exported = graftax.export(lambda model, x: model["f"](x * model["w"]))(
        {"f": _filtered, "w": jnp.ones(1)}, jnp.ones(1)
    )
    restored = graftax.Exported.deserialize(exported.serialize())
    assert restored({"f": _filtered, "w": jnp.ones(1)}, jnp.ones(1)) == jnp.tanh(1.0)


@pytest.mark.quick(0)
def test_a_mesh_without_devices_has_the_same_in_every_process():
    mesh = jax.make_mesh((1,), ("d",)).abstract_mesh
    child = "import jax, graftax; print(graftax.flatten([jax.make_mesh((1,), ('d',)).abstract_mesh])[1].fingerprint())"
    assert python(child).strip() == graftax.flatten([mesh])[1].fingerprint()


def test_what_has_neither_name_nor_pickle_is_named_by_its_path():
    graph = {"model": {"client": jax.devices()[0].client}, "w": jnp.ones(1)}
    with pytest.raises(graftax.UnpicklableError, match=r"at \['model'\]\['client'\], which has no name and no pickle"):
        graftax.flatten(graph)[1].fingerprint()
