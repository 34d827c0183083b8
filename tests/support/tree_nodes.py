# SPDX-License-Identifier: Apache-2.0
"""Nodes whose functions run what a test says."""

import dataclasses
from collections import namedtuple

import equinox as eqx
import jax

Pair = namedtuple("Pair", ["left", "right"])


def node(flatten=None, unflatten=None, bases=()):
    """A new registered class: flatten(children) is run first, unflatten(data, children) last."""

    class Node(*bases):
        def __init__(self, *children, data=None):
            self.children, self.data = children, data

    def opened(n):
        if flatten:
            flatten(n)
        return n.children, n.data

    jax.tree_util.register_pytree_node(Node, opened, unflatten or (lambda data, c: Node(*c, data=data)))
    return Node


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    x: object
    n: object = dataclasses.field(default=0, metadata={"static": True})


class Module(eqx.Module):
    x: object
    n: object = eqx.field(static=True, default=0)


def module(x):
    """A module whose making walks no tree."""
    made = object.__new__(Module)
    object.__setattr__(made, "x", x)
    object.__setattr__(made, "n", 0)
    return made


class Key:
    """Compares as its number does, and runs something first."""

    def __init__(self, number, run=lambda: None):
        self.number, self.run = number, run

    def __hash__(self):
        self.run()
        return self.number

    def __eq__(self, other):
        self.run()
        return isinstance(other, Key) and self.number == other.number

    def __lt__(self, other):
        self.run()
        return self.number < other.number
