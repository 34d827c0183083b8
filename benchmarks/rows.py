# SPDX-License-Identifier: Apache-2.0
"""The calls that programs are made of, on small and on large objects, beside `jax.jit` on the flat list of the arrays.

Each is measured with the executable alone in the same rounds. What a row has above that is the walk, the checks and the
objects that are made; what is below it, nobody can win.
"""

from benchmarks.timed import Timed

# What is measured, the case, at most.
_CALLS = (
    ("reduce", "list 1", 0.95),
    ("reduce", "list 10", 0.95),
    ("reduce", "dict 1", 0.95),
    ("reduce", "dict 10", 0.95),
    ("reduce", "eqx.Module 1", 0.95),
    ("reduce", "eqx.Module 10", 0.95),
    ("reduce", "object 1", 0.95),
    ("reduce", "object 10", 0.95),
    ("reduce", "tied 2", 1.00),
    ("reduce", "nnx.Module 100", 0.80),
    ("update", "list 1", 1.00),
    ("update", "list 10", 1.00),
    ("update", "dict 1", 1.00),
    ("update", "dict 10", 1.00),
    ("update", "eqx.Module 1", 1.00),
    ("update", "eqx.Module 10", 1.00),
    ("update", "object 1", 1.00),
    ("update", "object 10", 1.00),
    ("update", "tied 2", 1.00),
    ("update", "nnx.Module 100", 0.95),
    ("update", "gpt nnx", 1.00),
    ("update", "dict 1000", 0.85),
    ("update", "eqx.Module 1000", 0.88),
    ("chain", "dict 1000", 0.88),
    ("chain", "eqx.Module 1000", 0.88),
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
