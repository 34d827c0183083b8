# SPDX-License-Identifier: Apache-2.0
"""Looking at an object graph through its flat form, and editing it: `python examples/flat_form.py`."""

import jax.numpy as jnp

import graftax


def main():
    embedding = {"table": jnp.ones((2, 2))}
    model = {"encoder": [embedding], "decoder": [embedding], "name": "tied"}

    flat = graftax.to_dict(model)
    for path, value in flat.items():
        print(f"{path!s:30} {value!r}".replace("\n", " "))
    references = [str(path) for path, value in flat.items() if isinstance(value, graftax.Ref)]
    assert references == ["[decoder][0]"]

    # Edit by path; what is shared stays shared.
    for path in flat:
        if str(path) == "[encoder][0][table]":
            flat[path] = jnp.zeros((2, 2))
    edited = graftax.from_dict(flat)
    assert edited["encoder"][0] is edited["decoder"][0]
    assert edited["decoder"][0]["table"].sum() == 0
    assert embedding["table"].sum() == 4, "the graph that was described is not touched"


if __name__ == "__main__":
    main()
