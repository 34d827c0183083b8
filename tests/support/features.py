# SPDX-License-Identifier: Apache-2.0
"""The table of features in the README: each row a program, run with each library.

A cell says with what objects the program gives what plain Python gives: those of any class, those of the library's own
classes alone, or none.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import brainstate as bst
import equinox as eqx
import flarejax
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import graftax

KEY = jax.random.key(0)
README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"(<!-- features: run by tests/project/test_features.py -->\n)(.*?)(<!-- end -->)", re.DOTALL)
YES, OWN, NO = "✓", "*own*", "✗"

_numbers = itertools.count()

Make = Callable[..., Any]  # fields by name -> an object with these attributes


@dataclasses.dataclass(frozen=True)
class Library:
    """One column: what compiles a function, and how its users write a model and a step of training."""

    name: str
    jit: Callable[..., Any]
    own: Make | None  # objects of its own classes
    sgd: Callable[[Any, Callable[[Any], jax.Array]], Any]  # (model, loss) -> the model after a step of rate 0.1
    linear: Callable[[], Any] | None = None  # a layer of its own
    save: Callable[[str, Any], Any] | None = None
    load: Callable[[str, Any], Any] | None = None  # given an object like it
    parameter: Callable[[jax.Array], Any] = lambda x: x  # an array as its objects hold it


def plain(**fields: Any) -> Any:
    class Plain:
        def __init__(self) -> None:
            vars(self).update(fields)

    return Plain()


def registered(**fields: Any) -> Any:
    obj = plain(**fields)
    cls, opened = type(obj), []

    def flatten(obj: Any) -> Any:
        opened.append(obj)
        if len(opened) > 100:  # JAX itself goes on to the end of the stack, and does not give all of it back
            raise RecursionError("a cycle is opened without end")
        return tuple(vars(obj).values()), tuple(vars(obj))

    def unflatten(names: Any, values: Any) -> Any:
        new = object.__new__(cls)
        vars(new).update(zip(names, values, strict=True))
        return new

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    return obj


def of_equinox(**fields: Any) -> Any:
    declared = {"__annotations__": dict.fromkeys(fields, Any)}
    return types.new_class("Own", (eqx.Module,), {}, lambda body: body.update(declared))(**fields)


def of_flarejax(**fields: Any) -> Any:
    @flarejax.saveable(f"own {next(_numbers)}")
    class Own(flarejax.Module):
        def __init__(self) -> None:
            for name, value in fields.items():
                setattr(self, name, value)

    return Own()


def of_nnx(**fields: Any) -> Any:
    class Own(nnx.Module):
        def __init__(self) -> None:
            for name, value in fields.items():
                setattr(self, name, nnx.List(value) if isinstance(value, list) else value)

    return Own()


def of_brainstate(**fields: Any) -> Any:
    """Arrays are in States, which properties read and set."""
    arrays = {name: value for name, value in fields.items() if isinstance(value, jax.Array)}

    def reached(name: str) -> property:
        def store(obj: Any, value: Any) -> None:
            vars(obj)["_" + name].value = value

        return property(lambda obj: vars(obj)["_" + name].value, store)

    cls: Any = type("Own", (bst.graph.Node,), {name: reached(name) for name in arrays})
    obj = cls()
    for name, value in fields.items():
        setattr(obj, *(("_" + name, bst.ParamState(value)) if name in arrays else (name, value)))
    return obj


def jit_of_brainstate(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Its modules are captured, or declared static: its States are found while they are read."""

    def call(*args: Any) -> Any:
        nodes = tuple(i for i, arg in enumerate(args) if isinstance(arg, bst.graph.Node))
        if nodes not in compiled:
            compiled[nodes] = bst.transform.jit(function, **({"static_argnums": nodes} if nodes else {}), **options)
        return compiled[nodes](*args)

    compiled: dict[tuple[int, ...], Any] = {}
    return call


def by_brainstate(model: Any, loss: Any) -> Any:
    states = bst.graph.states(model, bst.ParamState)
    for path, gradient in bst.transform.grad(lambda: loss(model), states)().items():
        states[path].value = states[path].value - 0.1 * gradient
    return model


def by_tree(grad: Callable[..., Any]) -> Any:
    def sgd(model: Any, loss: Any) -> Any:
        return jax.tree.map(lambda p, g: p if g is None else p - 0.1 * g, model, grad(loss)(model))

    return sgd


def by_nnx(model: Any, loss: Any) -> Any:
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    optimizer.update(model, nnx.grad(loss)(model))
    return model


def by_graftax(model: Any, loss: Any) -> Any:
    opt = graftax.optimizer(optax.sgd(0.1), model)
    opt.update(model, graftax.grad(loss)(model))
    return model


LIBRARIES = [
    Library("graftax", graftax.jit, None, by_graftax, save=graftax.save, load=graftax.load),
    Library("`jax.jit`", jax.jit, registered, by_tree(jax.grad)),
    Library(
        "Equinox",
        eqx.filter_jit,
        of_equinox,
        by_tree(eqx.filter_grad),
        lambda: eqx.nn.Linear(3, 2, key=KEY),
        eqx.tree_serialise_leaves,
        eqx.tree_deserialise_leaves,
    ),
    Library("Flax NNX", nnx.jit, of_nnx, by_nnx, lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0)), parameter=nnx.Param),
    Library("brainstate", jit_of_brainstate, of_brainstate, by_brainstate, lambda: bst.nn.Linear(3, 2)),
    Library(
        "FlareJax",
        flarejax.filter_jit,
        of_flarejax,
        by_tree(jax.grad),
        lambda: flarejax.net.Linear(KEY, 2),
        lambda path, obj: flarejax.save(obj, path),
        lambda path, like: flarejax.load(path),
    ),
]


# ---- the rows: a program, which is right or raises; `make` makes objects

Row = Callable[[Library, Make], bool]
ROWS: dict[str, Row] = {}
ONES = jnp.ones(2)
_traces: list[None] = []


def row(name: str) -> Callable[[Row], Row]:
    return lambda program: ROWS.setdefault(name, program)


def traced(array: Any) -> bool:
    """Is it an input of the program, and no constant?"""
    return isinstance(array[...] if isinstance(array, nnx.Variable) else array, jax.core.Tracer)


def trace() -> None:
    """Counts a trace. The name is computed: a jitted function is not to see what changes here."""
    globals()["_traces"].append(None)


@row("accepts objects and traces the arrays in them")
def takes_objects(lib: Library, make: Make) -> bool:
    return lib.jit(lambda m: jnp.asarray(traced(m.w)))(make(w=lib.parameter(ONES)))


@row("accepts a dict of arrays and strings")
def takes_settings(lib: Library, make: Make) -> bool:
    return (
        lib.jit(lambda d: d["x"] * 2 if d["mode"] == "double" else d["x"])({"mode": "double", "x": ONES}) == 2
    ).all()


@row("keeps a layer used twice as one layer")
def keeps_sharing(lib: Library, make: Make) -> bool:
    part = make(w=lib.parameter(ONES))
    return lib.jit(lambda m: jnp.asarray(m.first is m.second and traced(m.first.w)))(make(first=part, second=part))


@row("trains it as one layer")
def trains_shared(lib: Library, make: Make) -> bool:
    part = make(w=lib.parameter(jnp.ones(())))
    model = lib.sgd(make(first=part, second=part), lambda m: m.first.w * 3 + m.second.w * 2)
    return model.first is model.second and bool(jnp.isclose(model.first.w + 0, 0.5))


@row("allows a child to point back to its parent")
def takes_a_cycle(lib: Library, make: Make) -> bool:
    child = make(w=lib.parameter(ONES))
    child.parent = make(child=child)
    return lib.jit(lambda m: jnp.asarray(m.parent.child is m and traced(m.w)))(child)


@row("keeps changes to attributes")
def brings_changes_back(lib: Library, make: Make) -> bool:
    model = make(steps=jnp.zeros(()))

    def step(model: Any) -> None:
        model.steps = model.steps + 1

    run = lib.jit(step)
    run(model), run(model)
    return model.steps == 2


@row("keeps items appended to a list")
def brings_items_back(lib: Library, make: Make) -> bool:
    model = make(log=[lib.parameter(ONES)])
    lib.jit(lambda model: model.log.append(lib.parameter(model.log[0] * 2)))(model)
    return len(model.log) == 2 and (model.log[1] + 0 == 2).all()


@row("returns the very object it was given")
def returns_the_callers(lib: Library, make: Make) -> bool:
    def same(model: Any) -> Any:
        assert traced(model.w)
        return model

    model = make(w=lib.parameter(ONES))
    return lib.jit(same)(model) is model


@row("notices when a captured array is replaced")
def sees_captured(lib: Library, make: Make) -> bool:
    box = [jnp.ones(())]
    read = lib.jit(lambda x: x * box[0])
    first = read(jnp.ones(()))
    box[0] = jnp.asarray(5.0)
    return first == 1 and read(jnp.ones(())) == 5


@row("compiles `if step % 10 == 0` once per outcome, not once per step")
def follows_a_counter(lib: Library, make: Make) -> bool:
    def step(x: jax.Array, n: int) -> jax.Array:
        trace()
        return x + n if n % 10 == 0 else x - n

    _traces.clear()
    run = lib.jit(step)
    return all(run(jnp.ones(()), n) == (1 + n if n % 10 == 0 else 1 - n) for n in range(31)) and len(_traces) <= 4


@row("accepts functions; recreating an equal lambda does not recompile")
def takes_functions(lib: Library, make: Make) -> bool:
    def apply(function: Any, x: jax.Array) -> jax.Array:
        trace()
        return function(x)

    _traces.clear()
    run = lib.jit(apply)
    return all((run(lambda x: x * 2, ONES) == 2).all() for _ in range(4)) and len(_traces) == 1


@row("accepts the options of `jax.jit`, such as `donate_argnames`")
def takes_options(lib: Library, make: Make) -> bool:
    given = {"w": jnp.ones(7)}
    got = lib.jit(lambda state: {"w": state["w"] + 1}, donate_argnames="state")(given)
    return (got["w"] == 2).all()


@row("saves objects to a file and loads them, without another package")
def saves(lib: Library, make: Make) -> bool:
    if lib.save is None or lib.load is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.npz"
        lib.save(path, make(w=ONES * 3, name="net"))
        loaded = lib.load(path, make(w=ONES, name="net"))
        return bool((loaded.w == 3).all()) and loaded.name == "net"


@row("includes layers such as `Linear`")
def has_layers(lib: Library, make: Make) -> bool:
    return lib.linear is not None and (lib.linear()(jnp.ones(3)).shape == (2,))


# ---- the table


def holds(program: Row, lib: Library, make: Make) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return bool(program(lib, make))
        except Exception:
            return False


def cell(program: Row, lib: Library) -> str:
    if holds(program, lib, plain):
        return YES
    return OWN if lib.own and holds(program, lib, lib.own) else NO


def table() -> str:
    """The table as it is in the README, from runs of all programs."""
    lines = [["", *(lib.name for lib in LIBRARIES)], ["---", *[":-:"] * len(LIBRARIES)]]
    lines += [[name, *(cell(program, lib) for lib in LIBRARIES)] for name, program in ROWS.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
