# SPDX-License-Identifier: Apache-2.0
"""A reason why a call was compiled, with the remedy for each kind of reason."""

from __future__ import annotations

import re
from typing import NamedTuple

from graftax._graph.structure_diff import Difference, short_text

_ADDRESS = re.compile(r" at 0(x[0-9a-fA-F]*|(?=\.\.\.))")  # an address, whole or truncated


class Cause(NamedTuple):
    """One difference between a call that was compiled and the programs compiled before.

    Kinds: those of `REMEDIES`, and `first`, where nothing was compiled before.
    """

    kind: str
    path: str  # of an argument or capture; or a setting, or a name that the code reads
    before: str = ""
    now: str = ""
    where: str = ""  # the line that needs the value

    def __str__(self) -> str:
        if self.kind in TEXTS:
            return TEXTS[self.kind].format(path=self.path, before=self.before, now=self.now)
        if self.kind == "symbol":
            values = f"was {self.before}, is" if self.before != self.now else "is still"
            return f"{self.path} {values} {self.now}: from now on, one program takes any value"
        if self.kind == "sharing" and " and " in self.path:
            return f"{self.path} were {self.before}, are now {self.now}"
        noun = {"shape": "shape ", "dtype": "dtype ", "sharding": "sharding "}.get(self.kind, "")
        line = f" ({self.where} needs its value)" if self.where else ""
        return f"{self.path} was {noun}{self.before}, is {noun}{self.now}{line}"

    @property
    def recurrence_key(self) -> tuple[str, str]:
        """Equal for causes that count as one recurring cause."""
        # Without indices: a list that grows would have another cause for each of its elements.
        return self.kind, re.sub(r"\[\d+\]", "[*]", self.path)

    @property
    def remedy(self) -> str:
        """What to do about it; empty if there is nothing to do."""
        return REMEDIES.get(self.kind, "").format(path=self.path, where=self.where)


TEXTS = {
    "first": "the first call",
    "evicted": "it was compiled before, and dropped since: {path}",
    "cleared": "it was compiled before, and {path}",
    "donation": "the program from the cache on disk donates an array that was held here",
    "loaded": "loaded from a file",
    "disk": "loaded from the cache on disk",
    "shared": "shared with an equal function",
    "unknown": "{path}",
}

REMEDIES = {
    # ---- static values
    "number": (
        "The code needs its value (for a shape, an index or a string), or numbers='static' says so: to compile once, "
        "trace it with jit(..., dynamic={path!r}), pass graftax.Dynamic(value), or make it a jax.Array."
    ),
    "packed number": (
        "Python numbers are static, in packed state too: to compile once, pack a jax.Array or graftax.Dynamic(value) "
        "there."
    ),
    "bool": (
        "A bool decides branches, so each of its two values is a program. For one program make it a jax.Array and "
        "choose with jnp.where or graftax.cond."
    ),
    "text": (
        "A string cannot be traced, so each one is a program: pass one of a few fixed strings, and keep names, labels "
        "and messages that change out of the arguments."
    ),
    "value": (
        "It is compared by its value: create it once and leave it as it is, or pass the part that changes as a "
        "jax.Array."
    ),
    "identity": (
        "It is compared by identity, so each new object is a change: create it once, outside of the loop, and pass "
        "the same one. (Objects with fields or an __eq__ of their own are compared by those.)"
    ),
    "code": (
        "It is a different function: create it once, or pass what differs as an argument. (Functions from one def "
        "with equal variables are the same.)"
    ),
    "number type": "1, 1.0 and True are three values: give it one type from the start.",
    "type": "Give it one type from the start: an array that is filled later instead of None, 1.0 instead of 1.",
    "class": "Each run of a class statement creates a new class: define it once, outside of the loop.",
    "array": "Give it one type from the start: a jax.Array before the first call, jnp.asarray(value).",
    # ---- structure
    "added": (
        "A list, dict or object that grows is a new structure each time: keep counters, logs and caches out of the "
        "arguments, exclude them with ignore= if the function does not read them, or make them jax.Arrays of a fixed "
        "shape."
    ),
    "removed": (
        "A list, dict or object that shrinks is a new structure each time: keep it out of the arguments, or make it a "
        "jax.Array of a fixed shape with a mask."
    ),
    "content": "It is part of the structure: keep it as it is between calls.",
    "order": "The order is part of the structure, because the function can see it: always fill it in the same order.",
    "sharing": (
        "Which objects are shared is part of the structure: pass the same objects in the same places each time, or a "
        "copy (graftax.copy) if they are to be separate."
    ),
    "set order": (
        "Equal sets may iterate in a different order, now or after f changes them: pass a sorted list or tuple."
    ),
    "packed": "Pack it once, outside of the loop, and keep its structure.",
    # ---- arrays
    "shape": (
        "Each shape is a program: pad to a few fixed sizes (the next power of two, say) with a mask, and drop or pad "
        "the last batch."
    ),
    "dtype": "Convert it once, where it is made: jnp.asarray(x, dtype) or x.astype(dtype).",
    "weak type": (
        "An array made from a bare Python number is weakly typed, and what is computed from it often is not: give it "
        "a dtype where it is created, as in jnp.asarray(0.0, jnp.float32)."
    ),
    "sharding": (
        "Place it once, the way the function returns it: jax.device_put(x, sharding), or in_shardings= and "
        "out_shardings=."
    ),
    "committed": (
        "jax.device_put(x, device) commits an array to its device, jnp.asarray(x) does not: commit all of them, "
        "or none."
    ),
    # ---- the surroundings of the call
    "setting": "Set it once, before the first call, or around every call in the same way.",
    "read": (
        "The traced code reads it, so it is part of the program: set it before the first call, or pass it as an "
        "argument."
    ),
    "id": "The function uses the id() of this object: number your objects yourself, or pass the same object.",
    "asked": (
        "The line {where} needs its value to build the program: for a shape, a range, a string, an exponent, a NumPy "
        "function. Python's arithmetic, math and jax.numpy work without the value; otherwise, pass it as a jax.Array."
    ),
    "guard": (
        "Its value decides what is computed: decide in the function with jnp.where or graftax.cond, or have the "
        "programs of both made at once by jit(f, branches_ahead=True)."
    ),
    "evicted": "The calls use more structures than the cache keeps: raise cache_size=, or use fewer.",
    "donation": "The next process compiles this program, too: let go of the array before the call.",
    "cleared": "Clear caches outside of the loop.",
}


def plain_text(value: object) -> str:
    """The short text of a value, without addresses."""
    return without_addresses(short_text(value))


def without_addresses(text: str) -> str:
    return _ADDRESS.sub("", text)


def cause_from_difference(difference: Difference[str]) -> Cause:
    """The cause that a difference between two structures is."""
    kind = difference.kind
    before, after = without_addresses(difference.one), without_addresses(difference.other)
    # An array where there was another value is a cause of its own, with another remedy than a value of another type.
    if kind in ("type", "added", "removed") and "an array" in (before, after) and "nothing" not in (before, after):
        kind = "array"
    # They differ in what a short text leaves out: in their address, or past its end.
    if before == after:
        after = f"another {after}"
    return Cause(kind, difference.path, before, after)
