# SPDX-License-Identifier: Apache-2.0
"""What stays in memory: a structure, and what is kept for one that was compiled."""

import ctypes
import gc
import itertools
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.verdicts import OnRound, Verdict


@dataclass(frozen=True)
class Held:
    """Bytes of Python's allocators that one object holds, in thousands. What C++ allocates by itself is not in it."""

    title: str
    limit: float
    made: Callable[[], Any]

    def rounds(self, rounds: int) -> int:
        return 1

    def run(self, subjects: dict[str, ModuleType], rounds: int, on_round: OnRound) -> Verdict:
        if "graftax_jit" not in subjects:
            return Verdict(self.title, self.limit, None, False, "absent: graftax_jit")
        self.made()  # what is loaded and cached with the first one is there by now
        gc.collect()
        tracemalloc.start()
        try:
            made = self.made()
            gc.collect()
            held = tracemalloc.get_traced_memory()[0]
            del made
            gc.collect()
            held -= tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        on_round()
        return Verdict(self.title, self.limit, held / 1000, held / 1000 <= self.limit, f"{held:,} bytes")


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of the GNU C library."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _in_use() -> int:
    """Bytes that C++ and Python have taken and not given back; tracemalloc runs. What both count is counted twice.

    Raises:
        AttributeError: where the C library does not tell.
    """
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _MallocInfo
    gc.collect()
    found = library.mallinfo2()
    return found.uordblks + found.hblkhd + tracemalloc.get_traced_memory()[0]


@dataclass(frozen=True)
class Entries:
    """Bytes that stay for one more structure that was compiled, less those of `jax.jit`, in thousands."""

    title: str
    limit: float
    entries: int = 12

    def rounds(self, rounds: int) -> int:
        return 1

    def run(self, subjects: dict[str, ModuleType], rounds: int, on_round: OnRound) -> Verdict:
        if "graftax_jit" not in subjects:
            return Verdict(self.title, self.limit, None, False, "absent: graftax_jit")
        import graftax

        def step(obj: Any, name: str) -> Any:
            return obj["x0000"] + len(name)

        try:
            ours, theirs = (self._one(f) for f in (graftax.jit(step), jax.jit(step, static_argnums=1)))
        except AttributeError as error:
            return Verdict(self.title, self.limit, None, False, f"not measured here: {error}")
        on_round()
        held = (ours - theirs) / 1000
        return Verdict(self.title, self.limit, held, held <= self.limit, f"{ours:,.0f} bytes against {theirs:,.0f}")

    def _one(self, step: Callable[[Any, str], Any]) -> float:
        obj = {f"x{i:04}": jnp.full(4, float(i)) for i in range(1000)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is compiled anew: it is what is measured
            tracemalloc.start()
            try:
                for name in "abab":  # what the first structures leave stays
                    step(obj, name)
                before = _in_use()
                for number in range(self.entries):
                    step(obj, f"n{number}")
                return (_in_use() - before) / self.entries
            finally:
                tracemalloc.stop()


_numbers = itertools.count()


def _graphdef() -> Any:
    """One with names of its own: a structure that was met before is one that is held already."""
    import graftax

    number = next(_numbers)
    return graftax.flatten({f"{number}y{i:04}": jnp.ones(4) for i in range(1000)})[1]


MEMORY = (
    Held("a GraphDef of 1000 leaves, in thousands of bytes", 60, _graphdef),
    Entries("an entry of 1000 leaves, beside that of jax.jit, in thousands of bytes", 100),
)
