# SPDX-License-Identifier: Apache-2.0
"""Transforms without objects: loops of Python, JAX's gradient by a list of arrays; and small nets to try them on."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def slots_of(root: Any) -> list[tuple[Any, Any]]:
    """(dict or list, key) of each array below an object, once for an object that is reached twice."""
    found: list[tuple[Any, Any]] = []
    seen: set[int] = set()

    def walk(x: Any) -> None:
        if id(x) in seen or isinstance(x, (type, str, jax.Array)) or not (hasattr(x, "__dict__") or type(x) is list):
            return
        seen.add(id(x))
        items = list(enumerate(x)) if isinstance(x, list) else list(vars(x).items())
        for name, value in items:
            if isinstance(value, jax.Array):
                found.append((x if isinstance(x, list) else vars(x), name))
            else:
                walk(value)

    walk(root)
    return found


def twin_of(root: Any) -> Any:
    """A copy that shares no object, with the same arrays."""
    kept = [holder[name] for holder, name in slots_of(root)]
    return copy.deepcopy(root, {id(x): x for x in kept})


def floating(root: Any) -> list[tuple[Any, Any]]:
    return [(h, k) for h, k in slots_of(root) if jnp.issubdtype(h[k].dtype, jnp.floating)]


class Plain:
    """Loops and branches of Python; a gradient is JAX's by the list of an object's arrays."""

    @staticmethod
    def jit(f: Any) -> Any:
        return f

    @staticmethod
    def cond(pred: Any, one: Any, other: Any, *operands: Any) -> Any:
        return (one if pred else other)(*operands)

    @staticmethod
    def switch(index: Any, branches: Any, *operands: Any) -> Any:
        return branches[int(index)](*operands)

    @staticmethod
    def scan(f: Any, carry: Any, xs: Any = None, length: int | None = None) -> Any:
        ys = []
        for i in range(len(xs) if length is None else length):
            carry, y = f(carry, None if xs is None else xs[i])
            ys.append(y)
        return carry, None if ys[0] is None else jnp.stack(ys)

    @staticmethod
    def while_loop(test: Any, step: Any, value: Any, *, max_steps: int | None = None) -> Any:
        del max_steps
        while test(value):
            value = step(value)
        return value

    @staticmethod
    def value_and_grad(f: Any) -> Any:
        def both(root: Any, *args: Any) -> Any:
            def flat(values: list[Any]) -> Any:
                twin, *rest = twin_of([root, *args])
                for (holder, name), value in zip(floating(twin), values, strict=True):
                    holder[name] = value
                return f(twin, *rest)

            gradient = twin_of(root)
            grads = jax.grad(flat)([holder[name] for holder, name in floating(root)])
            for (holder, name), value in zip(floating(gradient), grads, strict=True):
                holder[name] = value
            return f(root, *args), gradient  # what f changes, it changes here

        return both

    @staticmethod
    def grad(f: Any) -> Any:
        return lambda *args: Plain.value_and_grad(f)(*args)[1]


def close(one: Any, other: Any, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def same_arrays(one: Any, other: Any) -> None:
    ours, theirs = slots_of(one), slots_of(other)
    assert [name for _, name in ours] == [name for _, name in theirs]
    for (here, name), (there, _) in zip(ours, theirs, strict=True):
        assert (here[name].shape, here[name].dtype) == (there[name].shape, there[name].dtype), name
        close(here[name], there[name])


def normal(seed: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


class Linear:
    def __init__(self, seed: int, inputs: int, outputs: int) -> None:
        self.w = normal(seed, inputs, outputs) / inputs**0.5
        self.b = jnp.zeros(outputs)

    def __call__(self, x: Any) -> Any:
        return x @ self.w + self.b


class Net:
    def __init__(self, seed: int, *sizes: int) -> None:
        self.layers = [Linear(seed + i, a, b) for i, (a, b) in enumerate(itertools.pairwise(sizes))]
        self.activation = jnp.tanh

    def __call__(self, x: Any) -> Any:
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


def descend(model: Any, gradient: Any, rate: float) -> None:
    for (holder, name), (other, _) in zip(floating(model), floating(gradient), strict=True):
        holder[name] = holder[name] - rate * other[name]
