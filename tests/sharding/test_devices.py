# SPDX-License-Identifier: Apache-2.0
"""Structures that hold meshes, shardings, devices and jitted functions: their fingerprint, pickle and export."""

import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import graftax
from graftax._graph.pickling import _device


def mesh(name="data"):
    return Mesh(np.array(jax.devices()[:1]), (name,))


@jax.jit
def doubled(x):
    return x * 2


VALUES = {
    "mesh": mesh,
    "abstract mesh": lambda: mesh().abstract_mesh,
    "named": lambda: NamedSharding(mesh(), PartitionSpec("data")),
    "single": lambda: SingleDeviceSharding(jax.devices()[0]),
    "device": lambda: jax.devices()[0],
    "jitted": lambda: doubled,
    "of jax": lambda: jnp.sin,
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_fingerprint_pickle_and_export(value):
    graph = {"w": jnp.ones(2), "of": value()}
    structure = graftax.flatten(graph)[1]
    assert structure.fingerprint() == graftax.flatten({"w": jnp.zeros(2), "of": value()})[1].fingerprint()
    assert structure.fingerprint() != graftax.flatten({"w": jnp.zeros(2), "of": mesh("other")})[1].fingerprint()
    assert pickle.loads(pickle.dumps(structure)) == structure
    exported = graftax.export(lambda g: g["w"] * 2)(graph).serialize()
    assert graftax.Exported.deserialize(exported).call(graph).tolist() == [2, 2]


@pytest.mark.quick(0)
def test_another_process():
    """The fingerprint is that of another process, and a pickle is the same structure there."""
    structure = graftax.flatten([NamedSharding(mesh(), PartitionSpec("data")), jax.devices()[0]])[1]
    code = (
        "import pickle, sys, graftax; s = pickle.load(sys.stdin.buffer); "
        "print(s.fingerprint()); print(pickle.loads(pickle.dumps(s)) == s)"
    )
    child = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(structure), capture_output=True, check=True)
    assert child.stdout.decode().split() == [structure.fingerprint(), "True"]


def test_a_device_that_is_not_there():
    with pytest.raises(pickle.UnpicklingError, match="device 99 of platform cpu"):
        _device("cpu", 99)
