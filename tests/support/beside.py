# SPDX-License-Identifier: Apache-2.0
"""Run one program on JAX's tree functions and on `graftax.tree`, and compare what comes out, to the last bit."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import graftax.tree

PUBLIC = {name for module in (jax.tree, jax.tree_util) for name in vars(module) if not name.startswith("_")}
JAX = types.SimpleNamespace(**{k: v for m in (jax.tree_util, jax.tree) for k, v in vars(m).items() if k in PUBLIC})
for _name in ("flatten_one_level", "flatten_one_level_with_keys", "is_tree_node", "broadcast_prefix"):
    # Public in later versions; JAX 0.8 has no is_tree_node at all.
    vars(JAX).setdefault(_name, getattr(jax._src.tree_util, _name, None) or getattr(graftax.tree, _name))
OURS = graftax.tree

Program = Callable[[Any], Any]
TREEDEFS = (jax.tree_util.PyTreeDef, graftax.tree.PyTreeDef)


@dataclasses.dataclass
class Outcome:
    """What a program gave: a value, or an exception."""

    value: Any = None
    error: Exception | None = None


def run(program: Program, trees: Any) -> Outcome:
    try:
        return Outcome(program(trees))
    except Exception as error:
        return Outcome(error=error)


def both(program: Program, expected: Any = None) -> Any:
    """Asserts that the program gives the same on both, and what is expected; the result on ours."""
    theirs, ours = run(program, JAX), run(program, OURS)
    if theirs.error is not None:
        assert ours.error is not None, f"JAX raises {theirs.error!r}, and graftax gives {ours.value!r}"
        assert type(ours.error) is type(theirs.error), f"JAX raises {theirs.error!r}, and graftax {ours.error!r}"
        if expected is not None:
            assert type(ours.error) is expected
        return ours.error
    if ours.error is not None:
        raise AssertionError(f"JAX gives {theirs.value!r}, and graftax raises") from ours.error
    same(theirs.value, ours.value)
    if expected is not None:
        same(expected, ours.value)
    return ours.value


def same(a: Any, b: Any, path: str = "") -> None:
    """Asserts that two values are equal in types, order, attributes; treedefs of both kinds by what they say."""
    if isinstance(a, TREEDEFS):
        assert isinstance(b, TREEDEFS), f"{path}: {a!r} and {b!r}"
        assert repr(a) == repr(b), f"{path}: {a!r} and {b!r}"
        assert (a.num_leaves, a.num_nodes) == (b.num_leaves, b.num_nodes), path
        assert graftax.tree.to_jax(b) == graftax.tree.to_jax(a), path
        assert graftax.tree.from_jax(a) == graftax.tree.from_jax(b), path
        return
    assert type(a) is type(b), f"{path}: {a!r} and {b!r}"
    if a is b:
        return
    if isinstance(a, jax.Array | np.ndarray):
        assert a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f"), path
        return
    if isinstance(a, dict):
        assert list(map(repr, a)) == list(map(repr, b)), f"{path}: keys {list(a)} and {list(b)}"
        for i, (x, y) in enumerate(zip(a.values(), b.values(), strict=True)):
            same(x, y, f"{path}.values[{i}]")
        assert getattr(a, "default_factory", None) is getattr(b, "default_factory", None), path
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), f"{path}: {a!r} and {b!r}"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{path}[{i}]")
    elif type(a).__eq__ is object.__eq__ or dataclasses.is_dataclass(a):
        assert hasattr(a, "__dict__") or hasattr(a, "__slots__"), f"{path}: {a!r} and {b!r}"
    else:
        with contextlib.suppress(ValueError, TypeError):  # equality that gives an array says nothing
            assert a == b or a != a, f"{path}: {a!r} and {b!r}"
            return
    attributes_a, attributes_b = attributes(a), attributes(b)
    assert list(attributes_a) == list(attributes_b), f"{path}: {attributes_a} and {attributes_b}"
    for name, x in attributes_a.items():
        same(x, attributes_b[name], f"{path}.{name}")


def attributes(obj: Any) -> dict[str, Any]:
    found = dict(getattr(obj, "__dict__", {}))
    for cls in type(obj).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(obj, name):
                found[name] = getattr(obj, name)
    return found


def laws(make: Callable[[], Any]) -> None:
    """Everything that can be asked about one tree, on both. `make` gives a new tree each time, of the same leaves."""
    tree = make()
    is_none = lambda v: v is None
    both(lambda t: t.tree_flatten(tree))
    both(lambda t: t.tree_leaves(tree))
    both(lambda t: t.tree_structure(tree))
    both(lambda t: t.tree_flatten(tree, is_none))
    both(lambda t: t.tree_flatten_with_path(tree))
    both(lambda t: t.tree_flatten_with_path(tree, is_leaf=is_none))
    both(lambda t: t.tree_unflatten(*t.tree_flatten(tree)[::-1]))
    both(lambda t: t.tree_structure(tree).unflatten(range(t.tree_structure(tree).num_leaves)))
    both(lambda t: t.tree_map(lambda v: [v], tree))
    both(lambda t: t.tree_map(lambda v, w: (v, w), tree, make()))
    both(lambda t: t.tree_map_with_path(lambda p, v, w: (p, t.keystr(p), v, w), tree, make()))
    both(lambda t: t.tree_structure(tree) == t.tree_structure(make()))
    if graftax.tree.structure(tree) == graftax.tree.structure(make()):
        both(lambda t: hash(t.tree_structure(tree)) == hash(t.tree_structure(make())), True)
    both(lambda t: t.treedef_children(t.tree_structure(tree)))
    both(lambda t: t.treedef_is_leaf(t.tree_structure(tree)))
    both(lambda t: t.tree_structure(tree).node_data())
    both(lambda t: t.tree_structure(tree).compose(t.tree_structure((0, [0]))))
    both(lambda t: t.tree_structure([0, None]).compose(t.tree_structure(tree)))
    both(lambda t: t.all_leaves([tree]))
    both(lambda t: t.tree_broadcast(7, tree))
    both(lambda t: t.tree_broadcast(tree, tree))
    both(lambda t: t.tree_structure(tree).flatten_up_to(make()))
    both(lambda t: t.tree_structure(tree).walk(lambda c, d: ("node", c, d), lambda v: ("leaf", v), t.tree_leaves(tree)))
    both(lambda t: t.flatten_one_level(tree)[1])
    both(lambda t: list(t.flatten_one_level(tree)[0]))
    both(lambda t: list(t.flatten_one_level_with_keys(tree)[0]))
    both(lambda t: t.is_tree_node(type(tree)))
    treedef, theirs = graftax.tree.structure(tree), jax.tree.structure(tree)
    assert graftax.tree.from_jax(theirs) == treedef and graftax.tree.to_jax(treedef) == theirs
    assert hash(graftax.tree.from_jax(theirs)) == hash(treedef)
    assert graftax.tree.to_jax(graftax.tree.from_jax(theirs)) == theirs
    same(jax.tree.leaves(tree), theirs.flatten_up_to(tree) if treedef.num_nodes != 1 else jax.tree.leaves(tree))
    root = treedef.node_data()
    remade = graftax.tree.PyTreeDef.from_node_data_and_children(graftax.tree.default_registry, root, treedef.children())
    assert remade == treedef and repr(remade) == repr(treedef) and hash(remade) == hash(treedef)
