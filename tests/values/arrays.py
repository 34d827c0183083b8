# SPDX-License-Identifier: Apache-2.0
"""Arrays, and what JAX itself puts beside them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from values.record import IMMUTABLE, ITSELF, NO_ARRAYS, VALUE, Kind, constant
from values.statics import copied

import graftax


def typed(dtype_and_shape):
    """A read that also gives the type: arrays count by type, not by value."""
    return dtype_and_shape, str(dtype_and_shape.dtype), dtype_and_shape.shape


def of_dtype(w, n):
    return jnp.asarray(w).astype(n)


def of_shape(w, n):
    return jnp.broadcast_to(w, n)


def weak(w, n):
    """Weakly typed where n is True, as a Python number becomes."""
    return jnp.asarray(w) if n else jnp.asarray(np.float32(w))


def read_weak(v):
    return v, v.weak_type, v * jnp.ones(2, jnp.bfloat16)


def key(w, n):
    return jax.random.key(w, impl=n)


def numpy_of(w, n):
    return np.array([w, w + 1]).astype(n)


def assign_all(v, w, n):
    v[...] = w


def bcoo(w, n):
    return sparse.BCOO((w, jnp.asarray([[0], [1]])), shape=(n,))


def change_bcoo(v, w, n):
    v.data, v.shape = w, (n,)


def mesh(w, n):
    return Mesh(np.array(jax.devices()[:1]), (n,))


def on_mesh(v):
    return v, v.axis_names, jax.device_put(jnp.ones(2), NamedSharding(v, PartitionSpec(*v.axis_names)))


array = {"identity": VALUE, "without": {"in place": IMMUTABLE}}
fixed = {"traced": NO_ARRAYS, "in place": IMMUTABLE}
DTYPES = ("float32", "int8", "bool", "complex64", "bfloat16", "uint32")
texts = {"without": {"traced": NO_ARRAYS}, "identity": VALUE}


def refs():
    """`jax.Ref`, where this JAX has it."""
    new_ref = getattr(jax, "new_ref", None)
    if new_ref is None:
        return []

    def make(w, n):
        return new_ref(jnp.broadcast_to(w, n))

    def beside(w, n):
        ref = make(w, n)
        return {"first": ref, "again": [ref]}

    def assign(v, w, n):
        v[...] = jnp.broadcast_to(w, v.shape)

    def changes_beside(v, w, n):
        v["first"][...] = jnp.broadcast_to(w, v["first"].shape)

    shapes = {"statics": ((2,), (3, 2))}
    return [
        Kind("`jax.Ref`", make, lambda v: (v[...],), assign, identity=ITSELF, is_leaf=True, **shapes),
        Kind(
            "one `jax.Ref` in two places",
            beside,
            lambda v: (v["first"][...], v["again"][0][...], v["first"] is v["again"][0]),
            changes_beside,
            is_leaf=True,
            **shapes,
        ),
        Kind(
            "`jax.Ref` in an object, beside a static",
            lambda w, n: [make(w, (2,)), n],
            lambda v: (v[0][...], v[1]),
            lambda v, w, n: (assign(v[0], w, None), v.__setitem__(1, n))[1],
            is_leaf=True,
        ),
    ]


KINDS = [
    Kind(
        "`jax.Array`, several dtypes",
        of_dtype,
        typed,
        statics=DTYPES,
        **array,
        note="The type is part of the key, the value is not.",
    ),
    Kind("`jax.Array`, several shapes", of_shape, typed, statics=((2,), (3, 2), (0, 2)), **array),
    Kind(
        "scalar and weakly typed `jax.Array`", weak, read_weak, statics=(True, False), samples=(1.0, 2.0, 3.0), **array
    ),
    Kind(
        "typed PRNG key",
        key,
        lambda v: (v, jax.random.key_data(v), jax.random.bits(v)),
        statics=("threefry2x32", "rbg"),
        samples=(0, 1, 2),
        **array,
    ),
    Kind(
        "NumPy array",
        numpy_of,
        lambda v: (v,),
        assign_all,
        statics=DTYPES,
        samples=(0, 2, 4),
        identity=ITSELF,
        inside=False,
        is_leaf=True,
        note="A JAX array inside; if it is not changed, the caller gets the NumPy array back.",
    ),
    Kind(
        "NumPy array, not contiguous",
        lambda w, n: np.arange(12).reshape(3, 4)[:, ::2].T * (w + 1),
        lambda v: (v,),
        assign_all,
        statics=(1,),
        samples=(0, 2, 4),
        identity=ITSELF,
        inside=False,
        is_leaf=True,
    ),
    Kind(
        "NumPy scalar", lambda w, n: np.dtype(n).type(w), lambda v: (v,), statics=DTYPES[:3], samples=(0, 1, 1), **array
    ),
    Kind(
        "NumPy array of text",
        lambda w, n: np.array([n, "x"]),
        lambda v: (v,),
        lambda v, w, n: v.__setitem__(0, n),
        statics=("a", "b"),
        **texts,
        note="Static, by value; a change in place is kept.",
    ),
    Kind(
        "NumPy array of bytes",
        lambda w, n: np.array([n, b"x"]),
        lambda v: (v,),
        lambda v, w, n: v.__setitem__(0, n),
        statics=(b"a", b"b"),
        **texts,
    ),
    Kind(
        "NumPy array of dates",
        lambda w, n: np.array([n, 2], "datetime64[D]"),
        lambda v: (v,),
        lambda v, w, n: v.__setitem__(0, np.datetime64(n, "D")),
        statics=(1, 3),
        **texts,
    ),
    Kind(
        "NumPy date", lambda w, n: np.datetime64(n, "D"), lambda v: (v,), statics=(1, 2), identity=VALUE, without=fixed
    ),
    *refs(),
    Kind("sparse `BCOO`", bcoo, lambda v: (v.data, v.indices, v.shape, v.todense()), change_bcoo, statics=(2, 3)),
    Kind(
        "`graftax.Static` of a NumPy array",
        lambda w, n: graftax.Static(np.array(n)),
        lambda v: (v.value.tolist(),),
        lambda v, w, n: v.value.__setitem__(..., n),
        statics=((1.0, 2.0), (1.0, 3.0), (0.0, 1.0), (-0.0, 1.0)),
        inside=False,
        without={"traced": "static"},
        identity=VALUE,
        note="The array is part of the key, by value.",
    ),
    Kind(
        "`jax.ShapeDtypeStruct`",
        lambda w, n: {"w": jax.ShapeDtypeStruct(w.shape, n), "x": [w]},
        lambda v: (v["w"], v["x"][0]),
        statics=("float32", "int8"),
        abstract=True,
        is_leaf=True,
        without={"traced": "abstract", "in place": IMMUTABLE, "write-back": "nothing runs"},
        note="Stands for an array in `eval_shape`, `lower` and `trace`.",
    ),
    copied("`numpy.dtype`", np.dtype("float32"), np.dtype("int8"), np.dtype([("a", "i4")]), np.dtype(">f4")),
    constant("`jnp.float32`, `np.float32` and other scalar types", jnp.float32, jnp.int8, np.float32, identity=ITSELF),
    Kind("`Mesh`", mesh, lambda v: (v, v.axis_names), statics=("x", "y"), identity=VALUE, without=fixed),
    Kind(
        "`NamedSharding`",
        lambda w, n: NamedSharding(mesh(w, n), PartitionSpec(n)),
        lambda v: (v, v.spec, jax.lax.with_sharding_constraint(jnp.ones(2), v)),
        statics=("x", "y"),
        identity=VALUE,
        without=fixed,
    ),
    constant("`PartitionSpec`", PartitionSpec("x"), PartitionSpec("x", None), PartitionSpec()),
    constant("device", jax.devices()[0], None, identity=ITSELF),
]
