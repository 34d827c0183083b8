# SPDX-License-Identifier: Apache-2.0
"""The rows of the tables for those who come from Equinox, Flax NNX and brainstate: both spellings give the same."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import graftax

DOCS = Path(__file__).parents[2] / "docs"
X = jnp.asarray([[0.5, -1.0], [1.0, 2.0], [0.1, 0.3]])


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.norm = nnx.Linear(2, 2, rngs=rngs), nnx.BatchNorm(2, rngs=rngs)
        self.lora = nnx.LoRA(2, 1, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.norm(self.linear(x) + self.lora(x))


def models() -> Any:
    return nnx.vmap(lambda key: Net(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))


def mixed() -> Any:
    made = models()
    made.norm.mean, made.norm.var = nnx.BatchStat(jnp.zeros(2)), nnx.BatchStat(jnp.ones(2))
    return made


NNX = {"nnx": nnx, "model": lambda: Net(nnx.Rngs(0)), "models": models, "mixed": mixed, "x": X}
NNX |= {"mesh": jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,)), "P": PartitionSpec}
NNX |= {"everywhere": NamedSharding(NNX["mesh"], PartitionSpec()), "keys": jax.random.split(jax.random.key(0), 3)}
NNX["make"] = lambda key: Net(nnx.Rngs(key))
NNX["loss"] = lambda m, x: (m(x) ** 2).mean()
EQUINOX = {"eqx": eqx, "model": eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0)), "x": X[0], "xs": X, "p": X[0]}
EQUINOX |= {"loss": lambda m, x: (m(x) ** 2).sum(), "f": lambda x: jnp.sin(x) * 2}
SCOPES: dict[str, dict[str, Any]] = {"nnx": NNX, "equinox": EQUINOX}


def of_brainstate() -> dict[str, Any]:
    class Net(bst.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with bst.random.seed_context(0):
                self.hidden, self.out = bst.nn.Linear(2, 4), bst.nn.Linear(4, 2)

        def __call__(self, x: Any) -> Any:
            return self.out(jnp.tanh(self.hidden(x)))

    def cell() -> Any:
        with bst.random.seed_context(0):
            made = bst.nn.GRUCell(2, 3)
        made.init_state(3)
        return made

    return {"bst": bst, "net": Net, "cell": cell, "x": X, "xs": jnp.stack([X, X * 2]), "loss": NNX["loss"]}


with contextlib.suppress(ImportError):
    import brainstate as bst

    SCOPES["brainstate"] = of_brainstate()


def rows(page: str) -> list[list[str]]:
    """The code of each cell of the tables of a page."""
    lines = (DOCS / f"coming-from-{page}.md").read_text(encoding="utf-8").splitlines()
    cells = [re.findall(r"`([^`]+)`", line) for line in lines if line.startswith("| `")]
    return [cell[:2] for cell in cells]


def arrays(value: Any) -> list[Any]:
    leaves = jax.tree.leaves(value)
    return [np.asarray(x) for x in leaves if eqx.is_array_like(x)]


@pytest.mark.parametrize(("page", "row"), [(page, row) for page in SCOPES for row in rows(page)], ids=str)
def test_both_spellings_give_the_same(page: str, row: list[str]):
    scope = {**SCOPES[page], "graftax": graftax, "jax": jax, "jnp": jnp, "np": np}
    theirs = eval(row[0], scope)
    ours = eval(row[1], scope) if len(row) > 1 else graftax.filter_jit(lambda: eval(row[0], scope))()
    one, other = arrays(theirs), arrays(ours)
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_every_public_name_of_equinox_is_on_the_page():
    text = (DOCS / "coming-from-equinox.md").read_text(encoding="utf-8")
    missing = [
        name for name in dir(eqx) if name[0] != "_" and name != "importlib" and not re.search(rf"\b{name}\b", text)
    ]
    assert not missing
