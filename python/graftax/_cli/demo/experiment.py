# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""Which flatten and unflatten calls one steady call makes, under each `jit`."""

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import flarejax
import jax
import jax.numpy as jnp
from jax.core import Tracer
from rich.console import Console
from rich.table import Table

from graftax._cli.demo.wrapper import Hidden, wrapper_jit

T = TypeVar("T")
_events: list[str] = []


def _recorded(method: Callable[..., T]) -> Callable[..., T]:
    @functools.wraps(method)
    def call(owner: Any, *args: Any) -> T:
        cls = owner if isinstance(owner, type) else type(owner)
        _events.append(f"{cls.__name__}.{method.__name__}")
        return method(owner, *args)

    return call


@jax.tree_util.register_pytree_node_class
class Input:
    """A node with one array and a label that is either None or, the hard case, a string."""

    def __init__(self, data: Any, label: str | None) -> None:
        self.data = data
        self.label = label

    @_recorded
    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return (self.data, self.label), None

    @classmethod
    @_recorded
    def tree_unflatten(cls, aux: None, children: Any) -> "Input":
        node = object.__new__(cls)
        node.data, node.label = children
        return node


@jax.tree_util.register_pytree_node_class
class Output(Input):
    """What the function returns."""


@jax.tree_util.register_pytree_node_class
class Wrapper(Hidden):
    """The wrapper's own node, recorded as well: it too is opened and rebuilt in Python."""

    @_recorded
    def tree_flatten(self) -> tuple[list[Any], Any]:
        return super().tree_flatten()

    @classmethod
    @_recorded
    def tree_unflatten(cls, aux: Any, arrays: Any) -> Hidden:
        return super().tree_unflatten(aux, arrays)


def double(x: Input) -> Output:
    return Output(x.data * 2, x.label)


def jits() -> dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """The ways to compile that are compared, by name."""
    import graftax

    return {
        "jax.jit": jax.jit,
        "equinox.filter_jit": eqx.filter_jit,
        "flarejax.filter_jit": flarejax.filter_jit,
        "wrapper": functools.partial(wrapper_jit, node=Wrapper),
        "graftax.jit": graftax.jit,
        "graftax.filter_jit": graftax.filter_jit,
    }


def steady_calls(*, static: bool = False) -> dict[str, list[str] | str]:
    """What the third call of each compiled function runs, in order, or why it does not run.

    With `static` the input node holds a string beside its array.
    """
    return {name: _steady_call(jit, static) for name, jit in jits().items()}


def _steady_call(jit: Callable[[Callable[..., Any]], Callable[..., Any]], static: bool) -> list[str] | str:
    x = Input(jnp.arange(3.0), "static data" if static else None)
    try:
        compiled = jit(double)
        for _ in range(3):
            _events.clear()
            y = compiled(x)
            events = _events.copy()
    except Exception as error:
        # Addresses of objects differ from run to run.
        sentence = re.sub(r" at 0x\w+", "", str(error)).partition(". ")[0]
        return f"{type(error).__name__}: {sentence}"
    # A wrapper that keeps what the trace has returned gives the tracers of it back.
    if isinstance(y.data, Tracer):
        return "returns a tracer"
    if y.label != x.label or not (y.data == x.data * 2).all():
        return "returns a wrong value"
    return events


def show(console: Console | None = None) -> int:
    """Print the experiment: arrays alone on the left, with a string on the right.

    The exit status is 1 where graftax fails or makes more calls than `jax.jit` does on arrays.
    """
    console = console or Console()
    table = Table(title="The third call of double(Input) -> Output", title_justify="left", show_lines=True)
    table.add_column("", no_wrap=True)
    table.add_column("arrays only")
    table.add_column("an array and a string")
    plain, mixed = steady_calls(), steady_calls(static=True)
    for name in plain:
        style = "bold" if name.startswith("graftax") else None
        table.add_row(name, _cell(plain[name]), _cell(mixed[name]), style=style)
    console.print(table)
    ours = [calls[name] for calls in (plain, mixed) for name in calls if name.startswith("graftax")]
    return int(any(isinstance(calls, str) or len(calls) > len(plain["jax.jit"]) for calls in ours))


def _cell(calls: list[str] | str) -> str:
    if isinstance(calls, str):
        return f"[dim]{calls}"
    return "\n".join([*calls, f"[dim]{len(calls)} calls"])
