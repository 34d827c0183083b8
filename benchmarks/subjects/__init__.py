# SPDX-License-Identifier: Apache-2.0
"""The competitors: one module each, all with the names of `Subject`.

A subject whose library is missing is absent.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from benchmarks.inputs import Form

ORDER = (
    "jax_flat",
    "jax_tree",
    "graftax_jit",
    "graftax_pack",
    "graftax_filter_jit",
    "equinox_filter_jit",
    "nnx_jit",
    "nnx_jit_tree",
    "nnx_cached_partial",
    "nnx_split",
    "brainstate_jit",
    "flarejax_filter_jit",
    "wrapper",
    "jarp_jit",
)


class Subject(Protocol):
    """What every module here defines. `WITHOUT`, where there is one, names measures that mean nothing here;
    `value_and_grad`, where there is one, is differentiation that takes what `jit` takes.
    """

    NAME: str
    DISTRIBUTION: str

    @staticmethod
    def accepts(form: Form) -> bool:
        """Whether objects of this form can be given to `jit` as they are."""
        ...

    @staticmethod
    def taken_as(form: Form) -> Form:
        """The form it takes the same arrays in: its own argument, except for the flat list."""
        ...

    @staticmethod
    def jit(f: Callable[[Any], Any]) -> Callable[[Any], Any]: ...

    @staticmethod
    def in_place(form: Form, change: Callable[[Any], None]) -> Callable[[Any], None]:
        """The compiled `change`, after which the caller's object holds the new arrays."""
        ...

    @staticmethod
    def flatten(obj: Any) -> tuple[list[Any], Any]: ...

    @staticmethod
    def unflatten(structure: Any, leaves: list[Any]) -> Any: ...

    @staticmethod
    def replay(structure: Any, obj: Any) -> list[Any]:
        """The leaves of an object whose structure is known: a plain flatten where that is all there is."""
        ...


@dataclass(frozen=True)
class Absent:
    """A subject whose library is not installed."""

    name: str
    reason: str


def load(names: tuple[str, ...] = ORDER) -> tuple[dict[str, ModuleType], list[Absent]]:
    """The subjects that can be imported, in order, and those that cannot."""
    present: dict[str, ModuleType] = {}
    absent: list[Absent] = []
    for name in names:
        try:
            present[name] = importlib.import_module(f"benchmarks.subjects.{name}")
        except ImportError as e:
            absent.append(Absent(name, str(e)))
    return present, absent


def by_hand(jit: Callable[[Any], Any], form: Form, change: Callable[[Any], None]) -> Callable[[Any], None]:
    """Write-back as users of by-value libraries spell it: return the changed object, assign its arrays."""

    def changed(obj: Any) -> Any:
        change(obj)
        return obj

    step = jit(changed)
    assign = form.assign
    if assign is None:
        raise TypeError(f"{form.name} cannot be changed in place")

    def call(obj: Any) -> None:
        assign(obj, form.arrays(step(obj)))

    return call
