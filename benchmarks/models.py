# SPDX-License-Identifier: Apache-2.0
"""Parameters of real models: an MLP with its Adam state, and a small GPT in three spellings, with AdamW.

The GPT has the leaves of GPT-2 small, twelve blocks and all, at a twelfth of its width: a call stays short, and
what is measured is the call.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.inputs import Arrays, Form

# Leaves on the host and what puts them together; made once, when a case asks for it.
Template = tuple[list[np.ndarray[Any, Any]], Any]

_MLP_WIDTH, _MLP_DEPTH = 16, 8
_BLOCKS, _WIDTH, _VOCABULARY, _CONTEXT = 12, 64, 512, 128


def _whole(tree: Any) -> Template:
    """The tree with small whole numbers in place of its values, so that sums are exact."""
    leaves, treedef = jax.tree.flatten(tree)
    return [np.full(np.shape(x), i % 3, np.asarray(x).dtype) for i, x in enumerate(leaves)], treedef


def _from_treedef(template: Callable[[], Template]) -> Callable[[Arrays], Any]:
    return lambda arrays: jax.tree.unflatten(template()[1], arrays)


# ---- an Optax state: parameters of an MLP and their Adam state ----


@functools.cache
def mlp_and_adam() -> Template:
    import optax

    layer = {"b": np.zeros(_MLP_WIDTH, np.float32), "w": np.zeros((_MLP_WIDTH, _MLP_WIDTH), np.float32)}
    params = {f"layer{i}": dict(layer) for i in range(_MLP_DEPTH)}
    return _whole((params, optax.adam(1e-3).init(params)))


ADAM = Form(
    "MLP and Adam state",
    build=_from_treedef(mlp_and_adam),
    arrays=jax.tree.leaves,
    probe=lambda o: o[0]["layer0"]["b"],
    library="optax",
)

# ---- a small GPT as dicts, and with its AdamW state ----


def _gpt_params() -> dict[str, Any]:
    def zeros(*shape: int) -> Any:
        return np.zeros(shape, np.float32)

    def norm() -> dict[str, Any]:
        return {"bias": zeros(_WIDTH), "scale": zeros(_WIDTH)}

    def linear(inputs: int, outputs: int) -> dict[str, Any]:
        return {"bias": zeros(outputs), "kernel": zeros(inputs, outputs)}

    def block() -> dict[str, Any]:
        return {
            "attention": {"out": linear(_WIDTH, _WIDTH), "qkv": linear(_WIDTH, 3 * _WIDTH)},
            "mlp": {"down": linear(4 * _WIDTH, _WIDTH), "up": linear(_WIDTH, 4 * _WIDTH)},
            "norm1": norm(),
            "norm2": norm(),
        }

    return {
        "blocks": [block() for _ in range(_BLOCKS)],
        "norm": norm(),
        "positions": zeros(_CONTEXT, _WIDTH),
        "tokens": zeros(_VOCABULARY, _WIDTH),
    }


@functools.cache
def gpt() -> Template:
    return _whole(_gpt_params())


@functools.cache
def gpt_and_adamw() -> Template:
    import optax

    params = _gpt_params()
    return _whole((params, optax.adamw(1e-3).init(params)))


def _assign_tree(obj: dict[str, Any], new: Arrays) -> None:
    """Every dict and list of the tree keeps its place and gets the new arrays, in JAX's order."""
    rest = iter(new)

    def fill(node: Any) -> None:
        for key in sorted(node) if isinstance(node, dict) else range(len(node)):
            if isinstance(node[key], dict | list):
                fill(node[key])
            else:
                node[key] = next(rest)

    fill(obj)


GPT = Form(
    "GPT, dicts",
    build=_from_treedef(gpt),
    arrays=jax.tree.leaves,
    probe=lambda o: o["norm"]["bias"],
    assign=_assign_tree,
)
GPT_ADAMW = Form(
    "GPT and AdamW state",
    build=_from_treedef(gpt_and_adamw),
    arrays=jax.tree.leaves,
    probe=lambda o: o[0]["norm"]["bias"],
    library="optax",
)

# ---- the same GPT of Equinox modules ----


@functools.cache
def gpt_equinox() -> Template:
    import equinox as eqx

    # The classes are local: Equinox may be missing, and its modules know their fields by annotation.
    class Block(eqx.Module):
        norm1: Any
        qkv: Any
        out: Any
        norm2: Any
        up: Any
        down: Any

        def __init__(self, key: Any) -> None:
            keys = jax.random.split(key, 4)
            self.norm1, self.norm2 = eqx.nn.LayerNorm(_WIDTH), eqx.nn.LayerNorm(_WIDTH)
            self.qkv = eqx.nn.Linear(_WIDTH, 3 * _WIDTH, key=keys[0])
            self.out = eqx.nn.Linear(_WIDTH, _WIDTH, key=keys[1])
            self.up = eqx.nn.Linear(_WIDTH, 4 * _WIDTH, key=keys[2])
            self.down = eqx.nn.Linear(4 * _WIDTH, _WIDTH, key=keys[3])

    class Gpt(eqx.Module):
        tokens: Any
        positions: Any
        blocks: list[Any]
        norm: Any

        def __init__(self, key: Any) -> None:
            first, second, *keys = jax.random.split(key, 2 + _BLOCKS)
            self.tokens = eqx.nn.Embedding(_VOCABULARY, _WIDTH, key=first)
            self.positions = eqx.nn.Embedding(_CONTEXT, _WIDTH, key=second)
            self.blocks = [Block(k) for k in keys]
            self.norm = eqx.nn.LayerNorm(_WIDTH)

    return _whole(Gpt(jax.random.key(0)))


GPT_EQUINOX = Form(
    "GPT, eqx.nn",
    build=_from_treedef(gpt_equinox),
    arrays=jax.tree.leaves,
    probe=lambda o: o.norm.bias,
    library="equinox",
)

# ---- the same GPT of NNX modules ----


@functools.cache
def _nnx_template() -> tuple[Template, Any]:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.norm1, self.norm2 = nnx.LayerNorm(_WIDTH, rngs=rngs), nnx.LayerNorm(_WIDTH, rngs=rngs)
            self.qkv = nnx.Linear(_WIDTH, 3 * _WIDTH, rngs=rngs)
            self.out = nnx.Linear(_WIDTH, _WIDTH, rngs=rngs)
            self.up = nnx.Linear(_WIDTH, 4 * _WIDTH, rngs=rngs)
            self.down = nnx.Linear(4 * _WIDTH, _WIDTH, rngs=rngs)

    class Gpt(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.tokens = nnx.Embed(_VOCABULARY, _WIDTH, rngs=rngs)
            self.positions = nnx.Embed(_CONTEXT, _WIDTH, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(_BLOCKS)])
            self.norm = nnx.LayerNorm(_WIDTH, rngs=rngs)

    graphdef, state = nnx.split(Gpt(nnx.Rngs(0)))
    return _whole(state), graphdef


def gpt_nnx() -> Template:
    return _nnx_template()[0]


def _nnx_state(new: Arrays) -> Any:
    return jax.tree.unflatten(gpt_nnx()[1], new)


def _build_nnx(arrays: Arrays) -> Any:
    from flax import nnx

    return nnx.merge(_nnx_template()[1], _nnx_state(arrays))


def _nnx_arrays(obj: Any) -> list[Any]:
    from flax import nnx

    return jax.tree.leaves(nnx.state(obj))


def _assign_nnx(obj: Any, new: Arrays) -> None:
    from flax import nnx

    nnx.update(obj, _nnx_state(new))


GPT_NNX = Form(
    "GPT, nnx",
    build=_build_nnx,
    arrays=_nnx_arrays,
    probe=lambda o: o.norm.bias.get_value(),
    assign=_assign_nnx,
    library="flax",
)
