# SPDX-License-Identifier: Apache-2.0
"""Trees: `graftax.tree` beside `jax.tree` and optree, on the same objects, from 10 to 100,000 leaves."""

import dataclasses
import importlib.util
import random
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import jax

import graftax
import graftax.tree
from benchmarks.rounds import interleave, median, ratios
from benchmarks.table import Row

SIZES = (10, 100, 1_000, 10_000, 100_000)
SUBJECTS = {"jax_tree": "jax.tree", "optree": "optree", "graftax_tree": "graftax.tree"}
_MOST_ROUNDS = {10_000: 9, 100_000: 5}
_NAMESPACE = "graftax-benchmarks"

_ENTRIES = tuple(jax.tree_util.GetAttrKey(name) for name in "abcde")

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


@jax.tree_util.register_pytree_with_keys_class
class Named(Registered):
    """Gives the key path entries of its children itself."""

    def tree_flatten(self) -> Any:
        return self.items, None

    def tree_flatten_with_keys(self) -> Any:
        return zip(_ENTRIES, self.items), None  # noqa: B905

    @classmethod
    def tree_unflatten(cls, _: None, items: Any) -> "Named":
        return cls(*items)


class Module(graftax.Module):
    a: Any
    b: Any
    c: Any
    d: Any
    e: Any
    size: int = graftax.field(static=True, default=3)


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
    "registered, with names, of 5": lambda xs: _chunks(xs, Named, 5),
    "graftax.Modules of 5": lambda xs: _chunks(xs, Module, 5),
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


# What is timed, as source: around a small tree, the call of a lambda and its lookups would be a good part of the time.
OPERATIONS = {
    "flatten": "tree_flatten(obj{options})",
    "leaves": "tree_leaves(obj{options})",
    "unflatten": "tree_unflatten(treedef, leaves)",
    "map": "tree_map(same, obj{options})",
    "map, two trees": "tree_map(first, obj, obj{options})",
    "flatten_with_path": "tree_flatten_with_path(obj{options})",
    "==": "treedef == again",
    "hash": "hash(treedef)",
}


def _times(size: int) -> int:
    """How often one call of what is timed does its operation."""
    return max(1, 1_000 // size)


def _operation(t: Any, obj: Any, operation: str, times: int, **options: Any) -> Callable[[], None]:
    """Does it `times` times with the functions of the module `t`."""
    leaves, treedef = t.tree_flatten(obj, **options)
    again = t.tree_structure(obj, **options)
    names = ("tree_flatten", "tree_leaves", "tree_unflatten", "tree_map", "tree_flatten_with_path")
    known: dict[str, Any] = {name: getattr(t, name) for name in names}
    known |= dict(obj=obj, leaves=leaves, treedef=treedef, again=again, same=_same, first=_first, turns=(None,) * times)
    statement = OPERATIONS[operation].format(options="".join(f", {k}={v!r}" for k, v in options.items()))
    exec(f"def run({', '.join(f'{name}={name}' for name in known)}):\n for _ in turns: {statement}", known)
    return known["run"]


def _optree() -> Any:
    """The module with the classes above registered, or None where it is not installed."""
    if importlib.util.find_spec("optree") is None:
        return None
    import optree

    if not getattr(_optree, "done", False):
        names = ("a", "b", "c", "d", "e")
        read = [(Registered, lambda r: (r.items, None, None), lambda _, xs: Registered(*xs))]
        read.append((Named, lambda r: (r.items, None, names), lambda _, xs: Named(*xs)))
        read.append((Record, lambda r: ([getattr(r, n) for n in names], None, names), lambda _, xs: Record(*xs)))
        read.append((Module, lambda m: ([getattr(m, n) for n in names], m.size, names), lambda s, xs: Module(*xs, s)))
        if "eqx.Modules of 5" in FORMS:
            read.append((Layer, lambda m: ([getattr(m, n) for n in names], m.size, names), lambda s, xs: Layer(*xs, s)))
        for cls, flatten, unflatten in read:
            optree.register_pytree_node(cls, flatten, unflatten, namespace=_NAMESPACE)
        _optree.done = True
    return optree


def _calls(form: str, size: int, operation: str) -> tuple[dict[str, Callable[[], Any]], bool]:
    """For each subject what does the operation `_times(size)` times; and whether graftax gives what JAX gives."""
    obj = FORMS[form]([float(i) for i in range(size)])
    times = _times(size)
    calls = {"jax_tree": _operation(jax.tree_util, obj, operation, times)}
    optree = _optree()
    if optree is not None:
        calls["optree"] = _operation(optree, obj, operation, times, namespace=_NAMESPACE)
    calls["graftax_tree"] = _operation(graftax.tree, obj, operation, times)
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
                seconds=median(taken) / _times(size),
                ratio=median(per_round),
                quartiles=(per_round[quarter], per_round[-1 - quarter]),
                fastest=min(taken) / min(samples["jax_tree"]),
                equal=equal,
            )
        )
    return rows
