# SPDX-License-Identifier: Apache-2.0
"""The calls that programs are made of, on small and on large objects, beside `jax.jit` on the flat list of the arrays.

Each is measured with the executable alone in the same rounds, and what returns objects also with Python code that
makes just these: what is below the two, nobody can win. A limit is what holds on a quiet machine, so that a change
which costs something is seen.
"""

from benchmarks.timed import Timed

# What is measured, the case, at most.
_CALLS = (
    ("reduce", "list 1", 1.10),
    ("reduce", "list 10", 0.95),
    ("reduce", "dict 1", 1.10),
    ("reduce", "dict 10", 0.95),
    ("reduce", "eqx.Module 1", 1.15),
    ("reduce", "eqx.Module 10", 0.95),
    ("reduce", "object 1", 1.15),
    ("reduce", "object 10", 0.95),
    ("reduce", "tied 2", 1.10),
    ("reduce", "nnx.Module 100", 0.95),
    ("update", "list 1", 1.10),
    ("update", "list 10", 1.00),
    ("update", "dict 1", 1.10),
    ("update", "dict 10", 1.00),
    ("update", "eqx.Module 1", 1.40),
    ("update", "eqx.Module 10", 1.15),
    ("update", "object 1", 1.25),
    ("update", "object 10", 1.10),
    ("update", "tied 2", 1.25),
    ("update", "nnx.Module 100", 1.90),
    ("update", "gpt nnx", 1.60),
    ("update", "dict 1000", 0.90),
    ("update", "eqx.Module 1000", 0.95),
    ("chain", "dict 1000", 0.90),
    ("chain", "eqx.Module 1000", 1.00),
)
_WHAT = {"reduce": "reduce", "update": "all updated", "chain": "all updated, fed back"}

ROWS = (
    *(
        Timed(
            f"call, {name}, {_WHAT[measure]}, vs jax.jit on the flat list",
            limit,
            measure,
            name,
            "jax_flat",
            beside_floor=True,
        )
        for measure, name, limit in _CALLS
    ),
    Timed(
        "call, nnx.Module of 100, changed in place, vs split, jax.jit and merge",
        0.25,
        "write_back",
        "nnx.Module 100",
        "nnx_split",
    ),
    Timed("update, dict of 1000, vs jax.tree.map", 0.50, "merge", "dict 1000", "equinox_filter_jit"),
    Timed(
        "to_dict, eqx.Module of 1000, vs jax.tree.flatten_with_path",
        0.50,
        "to_dict",
        "eqx.Module 1000",
        "equinox_filter_jit",
    ),
)
