# SPDX-License-Identifier: Apache-2.0
"""`donate="auto"`: what a call may donate, and the programs that do. The core decides at each call whether one runs.

See docs/internals/decisions/0011-donation-that-is-proven.md.
"""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.extend.core

from graftax import _core
from graftax._base.errors import some
from graftax._explain import ArraySignature, array_signatures
from graftax._jax.arrays import array_class, is_deleted, is_in_default_memory
from graftax._jax.compilation import own_jit
from graftax._jax.fast_dispatch import capture_donating, counts_buffer_users, counts_buffer_users_on_meshes
from graftax._jax.settings import settings_of_traces
from graftax._jit.leaf_names import named_leaves

GONE = (
    "{name} failed when the device had already taken the arrays that donate='auto' gave it. They are deleted, and "
    "nothing was written in their places: {paths}. Load them again, for example from the last checkpoint."
)


class Donating(NamedTuple):
    """A program that donates."""

    signatures: tuple[ArraySignature, ...]
    settings: dict[str, object]
    donated: tuple[int, ...]  # leaves
    number: int  # of the Outcome
    stage: jax.stages.Compiled


class LoadedPrograms(Protocol):
    """The programs of an entry that another process has compiled."""

    def program_of(
        self, leaves: Sequence[Any], donated: tuple[int, ...] | None
    ) -> tuple[jax.stages.Compiled, int] | None:
        """(stage, number of its Outcome) of the program for such leaves that donates these; with None, of any one."""
        ...


class Donor:
    """Makes the programs of one entry that donate. The core calls it, through `Entry.donor`."""

    loaded: LoadedPrograms | None = None

    def __init__(
        self,
        name: str,
        compiled: jax.stages.Wrapped,
        tupled: bool,
        jit_options: dict[str, Any],
        out_shardings: Callable[..., Sequence[jax.sharding.Sharding | None] | None],
    ) -> None:
        self._name, self._compiled, self._tupled, self._jit_options = name, compiled, tupled, jit_options
        self._out_shardings = out_shardings
        self.programs: list[Donating] = []

    def candidates(
        self, entry: _core.Entry, leaves: tuple[Any, ...]
    ) -> tuple[_core.Outcome, list[tuple[int, tuple[int, int]]]] | None:
        """The Outcome of a call, and the leaves that it replaces and may donate: their bytes, and on how many devices.

        Traces if there is no trace yet. None if it is not known who else uses a buffer.
        """
        if not (counts_buffer_users() and _are_together(leaves)):
            return None
        number, result_types = self._results(leaves)
        outcome = entry.outcomes[number]
        replaced = [(i, is_passed) for i, is_passed in _core.replaced_leaves(entry, outcome) if _can_donate(leaves[i])]
        # An array in whose place another one is written is donated in any case. One that goes with its argument is
        # donated only if a result of its shape and dtype is left, which can take its memory.
        free = collections.Counter(result_types)
        free.subtract(_type_of(leaves[i]) for i, is_passed in replaced if not is_passed)
        donated: list[int] = []
        for i, is_passed in replaced:
            if not is_passed or free[_type_of(leaves[i])] > 0:
                donated.append(i)
                free[_type_of(leaves[i])] -= is_passed
        return outcome, [(i, (leaves[i].nbytes, len(leaves[i].sharding.device_set))) for i in donated]

    def _results(self, leaves: tuple[Any, ...]) -> tuple[int, list[tuple[object, object]]]:
        """(number of the Outcome, types of the results) of a call."""
        # A program of another process knows its results, so nothing is traced for them.
        if self.loaded is not None and (program := self.loaded.program_of(leaves, None)) is not None:
            stage, number = program
            return number, list(map(_type_of, jax.tree.leaves(stage.out_info)))
        traced = self._trace(leaves)
        return _number(traced), list(map(_type_of, traced.jaxpr.out_avals))

    def program(self, leaves: tuple[Any, ...], donated: list[int], inputs: int) -> tuple[Any, ...] | None:
        """The program with these leaves donated, as `fast_dispatch.capture` returns it; None if there is none."""
        if self.loaded is not None and (program := self.loaded.program_of(leaves, tuple(donated))) is not None:
            stage, number = program
            return capture_donating(stage, leaves, number, inputs)
        # The program is made from the Jaxpr that the entry's calls use, so the function does not run again. It is a
        # second one, since XLA fixes at compilation what is donated, and what is held differs from call to call.
        traced = self._trace(leaves)
        run = jax.extend.core.jaxpr_as_fun(traced.jaxpr)

        def flat(*leaves: object) -> Any:
            return run(*leaves)

        # Profiles and the events of JAX name the program so.
        flat.__name__ = flat.__qualname__ = self._name
        try:
            with warnings.catch_warnings():
                # XLA need not find a use for each of them, and the user has not named any.
                warnings.simplefilter("ignore")
                donating = own_jit(flat, donate_argnums=tuple(donated), **self._options_for(leaves)).trace(*leaves)
                if _types(donating.jaxpr) != _types(traced.jaxpr):
                    return None  # the call would get results of other types
                stage = donating.lower().compile()
            number, settings = _number(traced), settings_of_traces()
            self.programs.append(Donating(array_signatures(leaves), settings, tuple(donated), number, stage))
            return capture_donating(stage, leaves, number, inputs)
        except Exception:  # a call that cannot be compiled with donation runs without
            return None

    def _options_for(self, leaves: tuple[object, ...]) -> dict[str, Any]:
        # As `OutputPlacement` has chosen for the program that does not donate: both have to place arrays alike.
        shardings = self._out_shardings(*self._arguments(leaves))
        return self._jit_options if shardings is None else self._jit_options | {"out_shardings": list(shardings)}

    def _trace(self, leaves: tuple[object, ...]) -> jax.stages.Traced:
        """The trace of the entry for such leaves: the one that its calls use."""
        return self._compiled.trace(*self._arguments(leaves))

    def _arguments(self, leaves: tuple[object, ...]) -> tuple[object, ...]:
        return (leaves,) if self._tupled else leaves


def _number(traced: jax.stages.Traced) -> int:
    return _core.decode(traced.out_info[2])


def _type_of(array: Any) -> tuple[object, object]:
    return array.shape, array.dtype


def _types(jaxpr: Any) -> list[str]:
    return [str(aval) for aval in jaxpr.out_avals]


def _are_together(leaves: Sequence[Any]) -> bool:
    """Are all arrays on the same devices?"""
    # Otherwise the call goes through `jax.jit`. Only direct calls donate: Python code would run between the count of
    # who holds an array and the launch of the program.
    places = [leaf.sharding.device_set for leaf in leaves if hasattr(leaf, "sharding")]
    return all(place == places[0] for place in places)


def _can_donate(leaf: Any) -> bool:
    # One number is a loss or a count, which callers keep; a program that does without it is not worth compiling.
    if type(leaf) is not array_class() or leaf.size <= 1:
        return False
    sharding = leaf.sharding
    if type(sharding) not in (jax.sharding.SingleDeviceSharding, jax.sharding.NamedSharding):
        return False
    if len(sharding.device_set) > 1 and not counts_buffer_users_on_meshes():
        return False
    return is_in_default_memory(sharding)


def note_gone(error: BaseException, name: str, recording: _core.Recording) -> None:
    """Adds to the error of a call with `donate="auto"` which arrays the device has taken before it failed."""
    gone = [path for leaf, path in named_leaves(recording) if is_deleted(leaf)]
    if gone:
        error.add_note(GONE.format(name=name, paths=some(gone)))
