# SPDX-License-Identifier: Apache-2.0
"""Trees: `graftax.tree` beside `jax.tree` and optree, on the same objects, from 10 to 100,000 leaves."""

import dataclasses
import importlib.util
import random
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import jax

import graftax.tree
from benchmarks.rounds import interleave, median, ratios
from benchmarks.table import Row

SIZES = (10, 100, 1_000, 10_000, 100_000)
SUBJECTS = {"jax_tree": "jax.tree", "optree": "optree", "graftax_tree": "graftax.tree"}
_MOST_ROUNDS = {10_000: 9, 100_000: 5}
_NAMESPACE = "graftax-benchmarks"

Point = namedtuple("Point", [f"f{i}" for i in range(10)])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    a: Any
    b: Any
    c: Any
    d: Any
    e: Any


class Registered:
    def __init__(self, *items: Any) -> None:
        self.items = items


jax.tree_util.register_pytree_node(Registered, lambda r: (r.items, None), lambda _, items: Registered(*items))


def _chunks(leaves: list[Any], make: Callable[..., Any], size: int) -> list[Any]:
    return [make(*leaves[i : i + size]) for i in range(0, len(leaves), size)]


def _shuffled(leaves: list[Any]) -> dict[str, Any]:
    names = [f"x{i:05}" for i in range(len(leaves))]
    random.Random(0).shuffle(names)
    return dict(zip(names, leaves, strict=True))


def _layers(leaves: list[Any]) -> list[Any]:
    return _chunks(leaves, lambda *xs: dict(zip(("w", "b", "scale", "shift", "mean"), xs, strict=False)), 5)


FORMS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "dict": lambda xs: dict(zip((f"x{i:05}" for i in range(len(xs))), xs, strict=True)),
    "dict, keys not in order": _shuffled,
    "dicts of 5": _layers,
    "namedtuples of 10": lambda xs: _chunks(xs, Point, 10),
    "dataclasses of 5": lambda xs: _chunks(xs, Record, 5),
    "registered nodes of 5": lambda xs: _chunks(xs, Registered, 5),
}

if importlib.util.find_spec("equinox") is not None:
    import equinox as eqx

    class Layer(eqx.Module):
        a: Any
        b: Any
        c: Any
        d: Any
        e: Any
        size: int = eqx.field(static=True, default=3)

    FORMS["eqx.Modules of 5"] = lambda xs: _chunks(xs, Layer, 5)


def _same(x: Any) -> Any:
    return x


def _first(x: Any, _: Any) -> Any:
    return x


def _operations(t: Any, obj: Any, **options: Any) -> dict[str, Callable[[], Any]]:
    leaves, treedef = t.tree_flatten(obj, **options)
    again = t.tree_structure(obj, **options)
    return {
        "flatten": lambda: t.tree_flatten(obj, **options),
        "leaves": lambda: t.tree_leaves(obj, **options),
        "unflatten": lambda: t.tree_unflatten(treedef, leaves),
        "map": lambda: t.tree_map(_same, obj, **options),
        "map, two trees": lambda: t.tree_map(_first, obj, obj, **options),
        "flatten_with_path": lambda: t.tree_flatten_with_path(obj, **options),
        "==": lambda: treedef == again,
        "hash": lambda: hash(treedef),
    }


OPERATIONS = ("flatten", "leaves", "unflatten", "map", "map, two trees", "flatten_with_path", "==", "hash")


def _optree() -> Any:
    """The module with the classes above registered, or None where it is not installed."""
    if importlib.util.find_spec("optree") is None:
        return None
    import optree

    if not getattr(_optree, "done", False):
        names = ("a", "b", "c", "d", "e")
        read = [(Registered, lambda r: (r.items, None, None), lambda _, xs: Registered(*xs))]
        read.append((Record, lambda r: ([getattr(r, n) for n in names], None, names), lambda _, xs: Record(*xs)))
        if "eqx.Modules of 5" in FORMS:
            read.append((Layer, lambda m: ([getattr(m, n) for n in names], m.size, names), lambda s, xs: Layer(*xs, s)))
        for cls, flatten, unflatten in read:
            optree.register_pytree_node(cls, flatten, unflatten, namespace=_NAMESPACE)
        _optree.done = True
    return optree


def _calls(form: str, size: int, operation: str) -> tuple[dict[str, Callable[[], Any]], bool]:
    """One call for each subject, and whether graftax gives what JAX gives."""
    obj = FORMS[form]([float(i) for i in range(size)])
    calls = {"jax_tree": _operations(jax.tree_util, obj)[operation]}
    optree = _optree()
    if optree is not None:
        calls["optree"] = _operations(optree, obj, namespace=_NAMESPACE)[operation]
    calls["graftax_tree"] = _operations(graftax.tree, obj)[operation]
    ours, theirs = graftax.tree.flatten(obj), jax.tree.flatten(obj)
    equal = all(a is b for a, b in zip(ours[0], theirs[0], strict=True)) and repr(ours[1]) == repr(theirs[1])
    rebuilt = graftax.tree.unflatten(*reversed(ours))
    return calls, equal and jax.tree.structure(rebuilt) == theirs[1]


def plan(largest: int = SIZES[-1]) -> list[tuple[str, int, str]]:
    """(form, leaves, operation), small sizes first."""
    return [(form, n, operation) for n in SIZES if n <= largest for form in FORMS for operation in OPERATIONS]


def rounds_for(size: int, rounds: int) -> int:
    return min(rounds, _MOST_ROUNDS.get(size, rounds))


def measure(form: str, size: int, operation: str, rounds: int, on_round: Callable[[], None]) -> list[Row]:
    """All subjects on one operation, interleaved; ratios are to `jax.tree`."""
    calls, equal = _calls(form, size, operation)
    samples = interleave(calls, rounds_for(size, rounds), on_round=on_round)
    rows: list[Row] = []
    for name, taken in samples.items():
        per_round = ratios(taken, samples["jax_tree"])
        quarter = len(per_round) // 4
        rows.append(
            Row(
                f"{form}, {size}",
                operation,
                name,
                leaves=size,
                seconds=median(taken),
                ratio=median(per_round),
                quartiles=(per_round[quarter], per_round[-1 - quarter]),
                fastest=min(taken) / min(samples["jax_tree"]),
                equal=equal,
            )
        )
    return rows
