# SPDX-License-Identifier: Apache-2.0
"""What the tests of failure points do to objects: public operations, and user code that acts at its k-th call."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import graftax
from graftax import _core


class Stop(BaseException):
    """No Exception: nothing may take it for a mismatch."""


class Act:
    """What user code does at its k-th call, counted over all of it."""

    left: ClassVar[int] = 0
    does: ClassVar[Callable[[], Any]] = lambda: None
    answer: ClassVar[Any] = None  # in place of what the code returns

    @classmethod
    def at(cls, k: int, does: Callable[[], Any]) -> None:
        cls.left, cls.does, cls.answer = k, does, None

    @classmethod
    def now(cls, answer: Any) -> Any:
        cls.left -= 1
        if cls.left == 0:
            other = cls.does()
            return answer if other is None else other
        return answer


class Key:
    """A dict key by value."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __hash__(self) -> int:
        return Act.now(hash(self.value))

    def __eq__(self, other: object) -> bool:
        return Act.now(isinstance(other, Key) and self.value == other.value)

    def __repr__(self) -> str:
        return f"Key({self.value})"


class Registered:
    """A class whose flatten and unflatten are the user's."""

    def __init__(self, *children: Any) -> None:
        self.children = list(children)


def _made(_: Any, children: Any) -> Registered:
    return Act.now(Registered(*children))


graftax.register(Registered, flatten=lambda r: Act.now((tuple(r.children), ("aux", 1))), unflatten=_made)


class Plain:
    pass


class Frozen(graftax.Module):
    w: Any
    rate: float = graftax.field(static=True)


X = jnp.arange(3.0)
KEY = Key(1)  # one in all models: what compares them takes keys by identity


def model() -> Any:
    """Every family of kinds, shared and cyclic, with user code in it."""
    out = bare()
    out.registered = Registered(X, [X + 2], out.shared)
    out.kinds = [np.float32, int, jax.nn.relu, 3.5, None, "x" * 40]
    return out


def bare() -> Any:
    """What is walked without a call of Python."""
    out = Plain()
    out.w = X
    out.shared = [X + 1, {"a": X, KEY: [1, "text"], 2: (X, None)}]
    out.again = out.shared
    out.me = out
    out.tags = {1, "two", (3, 4)}
    out.frozen = Frozen(X + 3, 0.5)
    out.table = np.arange(4.0)
    out.bytes = bytearray(b"abc")
    out.values = [3.5, None, "x" * 40]
    return out


class Operation(NamedTuple):
    """`make` gives the arguments of `run`; those whose numbers are in `writes` may differ after it."""

    make: Callable[[], tuple[Any, ...]]
    run: Callable[..., Any]
    writes: tuple[int, ...] = ()


def _tree() -> Any:
    return {"a": [X, (X, None)], "b": Registered(X, X), "c": Frozen(X, 0.5)}


def _flat() -> tuple[Any, ...]:
    leaves, graphdef = graftax.flatten(model())
    return graphdef, leaves


def _halves() -> tuple[Any, ...]:
    return graftax.partition(model(), jax.Array)


def _twice(leaf: Any) -> Any:
    return Act.now(leaf)


def _is_array(leaf: Any) -> bool:
    return Act.now(isinstance(leaf, jax.Array))


OPERATIONS: dict[str, Operation] = {
    "flatten": Operation(lambda: (model(),), graftax.flatten),
    "unflatten": Operation(_flat, graftax.unflatten),
    "copy": Operation(lambda: (model(),), graftax.copy),
    "update": Operation(lambda: (model(), model()), graftax.update, (0,)),
    "partition": Operation(lambda: (model(),), lambda obj: graftax.partition(obj, _is_array)),
    "combine": Operation(_halves, graftax.combine),
    "equal": Operation(lambda: (model(), model()), graftax.equal),
    "diff": Operation(lambda: (model(), [X]), graftax.diff),
    "to_dict": Operation(lambda: (model(),), graftax.to_dict),
    "from_dict": Operation(lambda: (model(),), lambda obj: graftax.from_dict(graftax.to_dict(obj))),
    "at": Operation(lambda: (model(),), lambda obj: graftax.at(obj)["shared[0]"].set(X * 2)),
    "map_leaves": Operation(lambda: (model(),), lambda obj: graftax.map_leaves(_twice, obj)),
    "tree.flatten": Operation(lambda: (_tree(),), graftax.tree.flatten),
    "tree.map": Operation(lambda: (_tree(), _tree()), lambda a, b: graftax.tree.map(lambda x, y: _twice(x), a, b)),
    "tree.unflatten": Operation(lambda: graftax.tree.flatten(_tree())[::-1], graftax.tree.unflatten),
    "pickle": Operation(
        lambda: (graftax.flatten([X, {"a": 1}, (2.5, "t")])[1],), lambda g: pickle.loads(pickle.dumps(g))
    ),
    "hash": Operation(lambda: (graftax.flatten(model())[1],), hash),
    "find": Operation(lambda: (model(),), lambda obj: graftax.find(obj, _is_array)),
}


def _bare_flat() -> tuple[Any, ...]:
    leaves, graphdef = graftax.flatten(bare())
    return graphdef, leaves


# Those for which allocations fail. The rest is left out: where a method is bound, or JAX's own metaclass is asked,
# nanobind writes into memory that it did not get.
OF_THE_CORE: dict[str, Operation] = {
    "flatten": Operation(lambda: (bare(),), graftax.flatten),
    "unflatten": Operation(_bare_flat, graftax.unflatten),
    "copy": Operation(lambda: (bare(),), graftax.copy),
    "hash": Operation(lambda: graftax.flatten(bare())[1:], hash),
    "repr": Operation(lambda: graftax.flatten(bare())[1:], repr),
    "walk": Operation(lambda: (graftax.flatten(bare())[1], (bare(),)), _core.walk),
    "record": Operation(lambda: ((bare(), [X]),), _core.record),
    "tree.flatten": OPERATIONS["tree.flatten"],
    "tree.map": OPERATIONS["tree.map"],
    "tree.unflatten": OPERATIONS["tree.unflatten"],
    "tree.flatten_with_path": Operation(lambda: (_tree(),), graftax.tree.flatten_with_path),
}


def _changed(m: Any, x: Any) -> Any:
    m.w = m.w + x
    m.shared.append(x)
    m.tags.add(99)
    m.bytes.append(1)
    del m.again
    return {"made": [m.w], "again": m.shared}


_compiled = graftax.jit(_changed)


def _outcome() -> Any:
    for _ in range(3):
        _compiled(bare(), X)
    [entry] = _compiled._table.entries.values()  # type: ignore[attr-defined]
    return entry.outcomes[0]


def _applied() -> tuple[Any, ...]:
    outcome, m = _outcome(), bare()
    roots, _ = _compiled._bind_arguments((m, X), {})  # type: ignore[attr-defined]
    found = _core.walk(_core.record(roots)[1], roots)
    assert found is not None
    return outcome, [X] * outcome.num_leaves, *found


# Those for which allocations of C++ fail: a trace among them.
OF_CPP: dict[str, Operation] = {
    **{name: OF_THE_CORE[name] for name in OF_THE_CORE if name != "hash"},
    **{
        name: OPERATIONS[name] for name in ("update", "partition", "combine", "diff", "from_dict", "map_leaves", "find")
    },
    "call": Operation(lambda: (_outcome() and bare(), X), _compiled, (0,)),
    "apply": Operation(_applied, _core.Outcome.apply, (0, 2, 3)),
    "trace": Operation(lambda: (bare(), X), lambda m, x: graftax.jit(_changed)(m, x), (0,)),
    "outcome_state": Operation(lambda: (_outcome()._state(),), lambda s: _core.Outcome._from_state(s)),
    "state": Operation(lambda: graftax.flatten(bare())[1:], lambda g: _core.GraphDef._from_state(g._state())),
}
