# SPDX-License-Identifier: Apache-2.0
"""JAX calls leaves by their key paths: in compiled programs, in its log of cache misses, in errors."""

from __future__ import annotations

import collections
import functools
import gc
import logging
import re

import jax
import jax.numpy as jnp
import pytest

import graftax
from graftax import _core
from graftax._graph.structure import place_name
from graftax._jit.leaf_names import LeafNames


class Model:
    def __init__(self, extra=0):
        self.enc = {"w": jnp.ones((2, 2))}
        self.rest = [jnp.ones((2, 2)) for _ in range(extra)]


def apply(model, x):
    return model.enc["w"] @ x + sum(r.sum() for r in model.rest)


EXTRA = pytest.mark.parametrize("extra", [0, 40], ids=["few leaves", "many leaves"])


@EXTRA
@pytest.mark.parametrize("donate", [None, "model"])
def test_a_compiled_program_names_its_parameters(extra, donate):
    f = graftax.jit(lambda model, x: apply(model, x), donate=donate, keep_unused=True)
    text = f.lower(Model(extra), jnp.ones((2, 2))).compile().as_text()
    named = re.findall(r"parameter\(\d+\).*?metadata=\{op_name=\"([^\"]+)", text)
    assert {"model.enc['w']", "x"} <= {name.replace("\\", "") for name in named}


@EXTRA
def test_the_log_of_cache_misses_names_them(extra, caplog):
    f = graftax.jit(lambda model, x: apply(model, x))
    f(Model(extra), jnp.ones((2, 2)))
    with jax.explain_cache_misses(True), caplog.at_level(logging.WARNING, "jax"):
        f(Model(extra), jnp.ones((2, 3)))
    assert re.search(r"\bx\b.*f32\[2,3\]|f32\[2,3\].*\bx\b|x.*float32\[2,3\]", caplog.text.replace("\n", " "))
    assert "leaves[" not in caplog.text


@EXTRA
def test_an_error_names_the_leaf(extra):
    f = graftax.jit(lambda model, x: bool(model.enc["w"].sum() > 0))
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"argument model\.enc\['w'\]"):
        f(Model(extra), jnp.ones(2))


def test_the_jaxpr_names_them():
    traced = graftax.jit(lambda model, x: apply(model, x)).trace(Model(), jnp.ones((2, 2)))
    assert traced.jaxpr.jaxpr.debug_info.arg_names == ("model.enc['w']", "x")


def test_an_array_in_two_places_is_two_leaves():
    x = jnp.ones(2)
    assert graftax.jit(lambda a, b: a + b["x"])(x, {"x": x}).tolist() == [2, 2]
    assert graftax.jit(lambda a: a[0] + a[1], donate="all")([x, x]).tolist() == [2, 2]


class Layer:
    def __init__(self):
        self.w = jnp.ones((2, 2))

    def __call__(self, x):
        return self.half(jnp.sin(x @ self.w))

    def half(self, x):
        return x / 2


class Encoder:
    def __init__(self):
        self.layers = [Layer(), Layer()]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return jnp.cos(x)


def scopes(f, *args):
    return {*re.findall(r'"jit\([^/]*\)/([^"]*)"', graftax.jit(f).lower(*args).as_text(debug_info=True))}


def test_methods_run_in_a_scope_of_the_path_of_their_object():
    names = scopes(lambda model, x: jnp.tan(model(x)), Encoder(), jnp.ones((2, 2)))
    assert {"model/model.layers[0]/sin", "model/model.layers[1]/sin", "model/model.layers[1]/div"} <= names
    assert {"model/cos", "tan"} <= names


def test_a_method_that_raises_leaves_its_scope():
    class Fails(Layer):
        def __call__(self, x):
            raise KeyError

    def f(a, b, x):
        try:
            a(x)
        except KeyError:
            return jnp.tan(b(x))

    assert {"b/sin", "tan"} <= scopes(f, Fails(), Layer(), jnp.ones((2, 2)))


@pytest.mark.parametrize("when", ["__enter__", "__exit__"])
def test_an_interrupt_in_a_scope_is_not_lost(monkeypatch, when):
    class Interrupted:
        def __enter__(self):
            if when == "__enter__":
                raise KeyboardInterrupt

        def __exit__(self, *error):
            if when == "__exit__":
                raise KeyboardInterrupt

    f = graftax.jit(lambda layer, x: layer(x))
    with monkeypatch.context() as patched:
        patched.setattr("jax._src.source_info_util.extend_name_stack", lambda name: Interrupted())
        with pytest.raises(KeyboardInterrupt):
            f(Layer(), jnp.ones((2, 2)))
    assert f(Layer(), jnp.ones((2, 2))).shape == (2, 2)


def test_methods_have_their_scopes_in_a_gradient_too():
    def f(model, x):
        return graftax.grad(lambda model, x: model(x).sum())(model, x)

    names = scopes(f, Encoder(), jnp.ones((2, 2)))
    assert "jvp(model)/model.layers[1]/cos" in names


def test_nothing_but_the_names_differs():
    class Unnamed(Layer):
        def __call__(me, x):
            return jnp.sin(x @ me.w) / 2

    def f(a, x):
        return a(x)

    named, plain = (graftax.jit(f).lower(a, jnp.ones((2, 2))) for a in (Layer(), Unnamed()))
    assert named.as_text() == plain.as_text()
    assert "a/sin" in named.as_text(debug_info=True)
    assert "a/sin" not in plain.as_text(debug_info=True)


class Half:
    __slots__ = ("a", "rest")

    def __init__(self, a, rest):
        self.a, self.rest = a, rest


def kinds():
    x = jnp.ones(2)
    key = "a key of more than sixty letters, which a message would have cut off somewhere"
    shared = [x + 1]
    return {
        "dict": {key: x, 3: {None: x + 1}, ("k", 1): x + 2},
        "shared": [shared, (shared, Half(x, {"w": x + 2}))],
        "partial": functools.partial(lambda a, b: a, x, b=[x + 1]),
        "partial of JAX": jax.tree_util.Partial(jnp.add, x),
        "order": collections.OrderedDict(b=x, a=collections.deque([x + 1])),
        "named": collections.namedtuple("Pair", "left right")(x, [x]),
        "function": lambda y: y + x,
        "module": Encoder(),
    }


@pytest.mark.parametrize("kind", kinds())
def test_a_name_is_the_text_of_its_place(kind):
    recording = _core.Recording((kinds()[kind], jnp.ones(1)), ("obj", "x"), [0, 0], None, False, False, None, None)
    graphdef, names = recording.graphdef, recording.names
    leaf_names = graphdef._leaf_names(names)
    assert leaf_names == [place_name(place, names) for place in graphdef.leaf_places()]
    assert leaf_names[-1] == "x" and len(leaf_names) == len(recording.leaves) > 1
    assert _core.weaken(graphdef)._leaf_names(names) == leaf_names
    with pytest.raises(ValueError, match="name"):
        graphdef._leaf_names(("obj",))


def test_names_are_made_when_they_are_asked_for_and_hold_no_class():
    recording = _core.Recording((Half(jnp.ones(2), [1]),), ("half",), [0], None, False, False, None, None)
    graphdef = recording.graphdef
    names = LeafNames(graphdef, recording.names, False)
    assert Half in gc.get_referents(graphdef) and graphdef not in gc.get_referents(names)
    assert names.bind(1).arguments == {"half.a": 1} and names.bind(2).arguments == {"half.a": 2}
    del recording, graphdef
    assert names.bind(1).arguments == {"leaves": (1,)}


def test_what_knows_a_structure_shares_it():
    f = graftax.jit(lambda model: model["x"] + 1)
    f({"x": jnp.ones(2)})
    (key, entry), *_ = f._table.entries.items()
    assert key[0] is entry.graphdef is f._table.history.variants[0].graphdef
