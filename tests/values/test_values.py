# SPDX-License-Identifier: Apache-2.0
"""Five laws, and every kind of value under each. The results are docs/values.md.

What is right is what the plain function does with a value made afresh.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from values.kinds import KINDS, LAWS, REFUSED
from values.record import ITSELF, NODE, Kind, exact, fresh, is_array, reader

import graftax


def under(law: str) -> Any:
    """The kinds that a law speaks of."""
    return pytest.mark.parametrize("kind", [kind for kind in KINDS if law not in kind.without], ids=str)


def traces(jitted: Any) -> int:
    return jitted.cache_info().traces


def same(kind: Kind, a: Any, b: Any) -> bool:
    return type(a) is type(b) and exact(tuple(kind.read(a)), tuple(kind.read(b)))


def graph_of(v: Any) -> list[Any]:
    return [v, {"again": v}, (v,)]


@under("traced")
def test_an_array_in_it_is_an_input(kind: Kind) -> None:
    f, n = reader(kind), kind.statics[0]
    jitted = graftax.jit(f)
    for w in kind.samples:
        assert exact(jitted(kind.make(w, n)), f(kind.make(w, n)))
        assert traces(jitted) == 1


@under("key")
def test_it_counts_by_its_exact_value(kind: Kind) -> None:
    f, w = reader(kind), kind.samples[0]
    jitted = graftax.jit(f, numbers="static")
    if kind.abstract:
        for n in kind.statics:
            assert exact(jitted.eval_shape(kind.make(w, n)), jax.eval_shape(f, kind.make(w, n)))
            arrays = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), kind.make(w, n))
            assert jitted.lower(kind.make(w, n)).as_text() == jitted.lower(arrays).as_text()
        return
    for count, n in enumerate(kind.statics, 1):
        for _ in range(2):  # an equal value made afresh is a hit
            assert exact(jitted(kind.make(w, fresh(n))), f(kind.make(w, n))), n
            assert traces(jitted) == count, n
    for n in kind.statics:
        assert exact(jitted(kind.make(w, fresh(n))), f(kind.make(w, n))), n
    assert traces(jitted) == len(kind.statics)


@under("in place")
def test_a_change_in_place_is_seen(kind: Kind) -> None:
    f = reader(kind)
    jitted = graftax.jit(f)
    w, other = kind.samples[:2]
    n, m = kind.statics[0], kind.statics[-1]
    v, plain = kind.make(w, n), kind.make(w, n)
    captured = graftax.jit(lambda: f(v))
    assert exact(jitted(v), f(plain))
    assert exact(captured(), f(plain))
    for new in ((other, n), (other, m), (w, n)):
        kind.change(v, *new)
        kind.change(plain, *new)
        for _ in range(2):
            assert exact(jitted(v), f(plain)), new
            assert exact(captured(), f(plain)), f"captured: {new}"


@under("write-back")
def test_what_the_function_did_to_it_comes_back(kind: Kind) -> None:
    read, change = kind.read, kind.change if kind.inside else None
    w, other = kind.samples[:2]
    n, m = kind.statics[0], kind.statics[-1]

    def f(v: Any, w: Any, again: list[Any]) -> tuple[Any, Any, bool]:
        before = tuple(read(v))
        if change is not None:
            change(v, jnp.flip(w), m)
        return v, before, again[0] is v

    x = other if is_array(other) else None
    plain = kind.make(w, n)
    again = [plain] if kind.identity == NODE else [None]
    returned, before, is_shared = f(plain, x, again)
    jitted = graftax.jit(f)
    for _ in ("cold", "warm"):
        v = kind.make(w, n)
        out, seen, still_shared = jitted(v, x, [v] if is_shared else [None])
        assert same(kind, v, plain)
        assert same(kind, out, returned)
        assert exact(seen, before)
        assert still_shared is is_shared
        if kind.identity in (NODE, ITSELF):
            assert out is v
    assert traces(jitted) == 1


@under("round trip")
def test_it_survives_flatten_and_unflatten(kind: Kind) -> None:
    w, other = kind.samples[:2]
    n, m = kind.statics[0], kind.statics[-1]
    v = kind.make(w, n)
    leaves, graphdef = graftax.flatten(graph_of(v))
    out = graftax.unflatten(graphdef, leaves)
    assert same(kind, out[0], v)
    assert same(kind, out[2][0], v)
    if kind.identity == ITSELF:
        assert out[0] is out[1]["again"] is out[2][0] is v
    if kind.identity == NODE:
        assert out[0] is out[1]["again"] is out[2][0] is not v

    another = kind.make(other, n)
    leaves, same_structure = graftax.flatten(graph_of(another))
    assert same_structure == graphdef
    assert same(kind, graftax.unflatten(graphdef, leaves)[0], another)
    if n is not m and "key" not in kind.without and not is_array(v):
        assert kind.is_leaf or graftax.flatten(graph_of(kind.make(w, m)))[1] != graphdef
    if kind.change is not None and not kind.is_leaf and kind.identity != ITSELF:
        kind.change(v, other, m)
        assert same(kind, out[0], kind.make(w, n)), "the copy shares something with the value"


@pytest.mark.parametrize(("name", "make"), REFUSED, ids=[name for name, _ in REFUSED])
def test_what_is_refused_is_refused_with_its_place(name: str, make: Any) -> None:
    value = make()
    for take in (graftax.jit(lambda v: isinstance(v["deep"][1], int)), graftax.flatten):
        with pytest.raises(TypeError) as caught:
            take({"deep": [1, value]})
        error = caught.value
        assert "['deep'][1]" in "\n".join([str(error), *getattr(error, "__notes__", ())])


def test_every_law_has_its_test() -> None:
    assert set(LAWS.values()) <= set(globals())


def test_every_exception_is_of_a_law() -> None:
    assert not [kind.name for kind in KINDS if set(kind.without) - set(LAWS)]
    assert not [kind.name for kind in KINDS if kind.change is None and "in place" not in kind.without]


def test_every_kind_has_a_name_of_its_own() -> None:
    names = [(kind.group, kind.name) for kind in KINDS]
    assert len(set(names)) == len(names)


def test_the_comparison_tells_what_equality_confuses() -> None:
    assert exact((1, float("nan")), (1, float("nan")))
    for a, b in [(1, True), (1, 1.0), (0.0, -0.0), ((1,), (True,)), ({1}, {True}), ([0.0], [-0.0])]:
        assert not exact(a, b)
    assert not exact(jnp.float32(1), jnp.asarray(1.0))
