# SPDX-License-Identifier: Apache-2.0
"""What a type checker knows of modules, surgery on graphs, and trees. Read by pyright, never run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, assert_type

import jax

import graftax
from graftax import tree

T = TypeVar("T")


class Linear(graftax.Module):
    weight: jax.Array
    bias: jax.Array | None = None
    name: str = graftax.field(static=True, default="linear")
    tags: list[str] = dataclasses.field(default_factory=list)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight


class Wide(Linear, static=["width"], kw_only=True):
    width: int


class Own(graftax.Module):
    def __init__(self, size: int) -> None:
        self.inner = Linear(jax.numpy.ones(size))


class Of(graftax.Module, Generic[T]):
    value: T


def modules(w: jax.Array) -> None:
    assert_type(Linear(w, None, "n", ["a"]), Linear)
    assert_type(Linear(weight=w, name="n").name, str)
    assert_type(Wide(w, width=3).width, int)
    assert_type(Own(3).inner(w), jax.Array)
    assert_type(Of(w).value, jax.Array)
    assert_type(graftax.jit(lambda m: m)(Linear(w)), Any)


def wrong_modules(w: jax.Array) -> None:
    Linear()  # expect: Argument missing for parameter "weight"
    Linear(w, name=3)  # expect: cannot be assigned to parameter "name"
    Linear(w, size=3)  # expect: No parameter named "size"
    Wide(w, None, "n", [], 3)  # expect: Expected 4 positional arguments
    Own("3")  # expect: cannot be assigned to parameter "size"
    print(Linear(w) < Linear(w))  # expect: Operator "<" not supported


@graftax.register
@dataclasses.dataclass
class Data:
    x: jax.Array


@graftax.register(static=["name"])
class Layer:
    def __init__(self, weight: jax.Array, name: str) -> None:
        self.weight, self.name = weight, name


@graftax.register_static
class Config:
    rate: float = 0.1


class Pair:
    def __init__(self, first: jax.Array, second: jax.Array) -> None:
        self.first, self.second = first, second


def registered(w: jax.Array) -> None:
    assert_type(Data(w).x, jax.Array)
    assert_type(Layer(w, "n").name, str)
    assert_type(Config().rate, float)
    made = graftax.register(
        Pair,
        flatten=lambda p: ((p.first, p.second), None),
        unflatten=lambda _, children: Pair(*children),
        names=["first", "second"],
    )
    assert_type(made(w, w), Pair)


def flattened(pair: Pair) -> tuple[tuple[jax.Array, jax.Array], str]:
    return (pair.first, pair.second), "aux"


def unflattened(aux: Any, children: Sequence[Any]) -> Pair:
    first, second = children
    return Pair(first, second)


def recipes(w: jax.Array, layer: Linear) -> None:
    """Flatten, change the leaves, and put together again: of a registered class, a Module, and a graph."""
    assert_type(graftax.register(Pair, flatten=flattened, unflatten=unflattened), type[Pair])
    leaves, treedef = jax.tree.flatten(layer)
    halved: Linear = jax.tree.unflatten(treedef, [leaf / 2 for leaf in leaves])
    assert_type(halved.weight, jax.Array)
    arrays, graphdef = graftax.flatten(layer)
    assert_type(arrays, list[Any])
    doubled: Linear = graftax.unflatten(graphdef, [array * 2 for array in arrays])
    assert_type(doubled, Linear)
    assert_type(graftax.map_leaves(lambda x: x * 2, layer), Linear)


def streams(key: jax.Array) -> None:
    made = graftax.Streams(0, "params", noise=key)
    assert_type(made("params"), jax.Array)
    assert_type(made.fork("noise"), graftax.Streams)
    assert_type(made.split((2, 3)), graftax.Streams)
    made.split("noise")  # expect: cannot be assigned to parameter "count"


def wrong_registrations(w: jax.Array) -> None:
    Data("x")  # expect: cannot be assigned to parameter "x"
    Layer(w)  # expect: Argument missing for parameter "name"
    graftax.register(Pair, statics=["first"])  # expect: No overloads for "register"
    graftax.register(Pair, flatten=lambda p: 3)  # expect: No overloads for "register"


def surgery(model: Linear, w: jax.Array) -> None:
    params, rest = graftax.partition(model, jax.Array)
    assert_type(params, Linear)
    assert_type(rest, Linear)
    assert_type(graftax.combine(params, rest), Linear)
    assert_type(graftax.copy(model, arrays=True), Linear)
    assert_type(graftax.update(model, params), Linear)
    assert_type(graftax.at(model)["weight"].set(w), Linear)
    assert_type(graftax.at(model)[lambda m: m.weight].apply(lambda x: x * 2), Linear)
    assert_type(graftax.at(model)[lambda m: (m.weight, m.bias)].paths, list[graftax.Path])
    assert_type(graftax.at(model)[graftax.Path.parse("weight"), "bias"].get(), Any)
    graftax.at(model)["weight"].update(w)
    assert_type(graftax.at(model)[jax.Array].apply(lambda x: x * 2), Linear)
    assert_type(graftax.map_leaves(lambda x, y: x + y, model, params), Linear)
    assert_type(graftax.ema(model, params, 0.9), Linear)
    assert_type(graftax.cast(model, "bfloat16").weight, jax.Array)
    assert_type(graftax.count(model).parameters, int)
    assert_type(graftax.equal(model, rest, rtol=1e-3), bool)
    for difference in graftax.diff(model, rest, limit=3):
        assert_type(difference.path, graftax.Path)
        assert_type(difference.one, str)


def looking(model: list[Linear]) -> None:
    for path, layer in graftax.find(model, Linear):
        assert_type(path, graftax.Path)
        assert_type(layer, Linear)
    assert_type(graftax.find(model, Linear)[0].value.name, str)
    assert_type(graftax.find(model, "**.weight")[0].value, Any)
    assert_type(graftax.find(model, (int, str))[0].value, int | str)  # not mypy
    assert_type(graftax.find(model, lambda part: part is None)[0].path, graftax.Path)
    for value, paths in graftax.shared(model):
        assert_type(value, Any)
        assert_type(paths, list[graftax.Path])
    path = graftax.Path.parse("[0].weight")
    assert_type(path + path, graftax.Path)
    assert_type(path.get(model), Any)
    assert_type(path.matches("**"), bool)
    assert_type(graftax.to_dict(model), dict[graftax.Path, Any])


def wrong_surgery(model: Linear, w: jax.Array) -> None:
    graftax.at(model)[3]  # expect: cannot be assigned to parameter "where"
    graftax.at(model)["weight"].apply(3)  # expect: cannot be assigned to parameter "function"
    graftax.equal(model, model, tol=1)  # expect: No parameter named "tol"
    graftax.find(model)  # expect: No overloads for "find"
    graftax.copy(model, w)  # expect: Expected 1 positional argument
    graftax.Path.parse(3)  # expect: cannot be assigned to parameter "text"


def trees(params: dict[str, jax.Array], f: Callable[[Any], Any], treedef: tree.PyTreeDef) -> None:
    leaves, structure = tree.flatten(params)
    assert_type(leaves, list[Any])
    assert_type(structure, tree.PyTreeDef)
    assert_type(tree.unflatten(structure, leaves), Any)
    assert_type(tree.leaves(params, is_leaf=lambda x: x is None), list[Any])
    assert_type(tree.structure(params), tree.PyTreeDef)
    assert_type(tree.map(f, params), Any)
    assert_type(tree.map(lambda x, y: x + y, params, params, is_leaf=lambda x: x is None), Any)
    assert_type(tree.map_with_path(lambda path, x: tree.keystr(path), params), Any)
    assert_type(tree.leaves_with_path(params), list[tuple[tuple[Any, ...], Any]])
    assert_type(tree.flatten_with_path(params)[1], tree.PyTreeDef)
    assert_type(tree.all(params), bool)
    assert_type(tree.reduce(lambda total, x: total + int(x), params, 0), int)
    assert_type(tree.broadcast(0, params), Any)
    assert_type(tree.transpose(treedef, None, params), Any)
    assert_type(tree.from_jax(jax.tree.structure(params)), tree.PyTreeDef)
    assert_type(treedef.num_leaves, int)
    assert_type(treedef.children(), list[tree.PyTreeDef])
    assert_type(treedef.flatten_up_to(params), list[Any])
    assert_type(hash(treedef), int)


def wrong_trees(params: dict[str, jax.Array], treedef: tree.PyTreeDef) -> None:
    tree.map(params)  # expect: Argument missing for parameter "tree"
    tree.map(3, params)  # expect: cannot be assigned to parameter "f"
    tree.leaves(params, leaf=None)  # expect: No parameter named "leaf"
    tree.flatten()  # expect: Argument missing for parameter "tree"
    treedef.num_leaves = 3  # expect: "num_leaves"
    tree.tree_flaten(params)  # expect: "tree_flaten" is not a known attribute
