# SPDX-License-Identifier: Apache-2.0
"""`f.donation()`: what the last call with `donate="auto"` donated, what it kept, and who holds that."""

from __future__ import annotations

import dataclasses
import gc
import sys
import types
import warnings
from typing import Any

from graftax._base.code_line import code_line
from graftax._base.errors import MissedDonationWarning
from graftax._base.size_text import count_text, short_bytes
from graftax._jax.fast_dispatch import counts_buffer_users
from graftax._jax.tracebacks import caller_level
from graftax._jit.cache import FunctionTable
from graftax._jit.leaf_names import leaf_names

NOT_AUTO = "{name} is not jitted with donate='auto'"
NO_CALL = (
    "{name}: no call has looked for arrays to donate. Only direct calls do, of functions that replace "
    "arrays of more than one element in the objects of their arguments, where all arrays are on the same devices."
)
NO_COUNTS = (
    "{name}: nothing is donated automatically here. Direct calls are off, or graftax does not know where "
    "this version of JAX counts the users of a buffer. Name what is to be donated: donate='state'."
)
VIEW = "a view of its memory (np.asarray, memoryview, dlpack), or another array of it (jax.device_put)"
CONTAINER = "a holder of the object that contains it, which the call replaces"
NOT_NOTED = "a reference to it (only those to the 32 largest arrays are noted)"
UNKNOWN = "an object that Python's garbage collector does not see"
KEPT = (
    "{name} keeps {size} that it could donate, because something else refers to it. The device needs that"
    " memory twice while the call runs.\n"
    "{rows}"
)

_ROWS = 20
_MAX_HOLDERS = 4
_NOBODY, _BUFFER, _CONTAINER = 0, 2, 3  # who holds an array: `Holder` in core/call/proven_donation.h

warnings.filterwarnings("ignore", category=MissedDonationWarning, append=True)  # off, unless a filter turns it on


@dataclasses.dataclass(frozen=True)
class ReplacedArray:
    """An array that a call replaces: its path, its bytes, and who else holds it."""

    path: str
    bytes: int
    holders: tuple[str, ...] = ()

    def __str__(self) -> str:
        holders = f", held by {'; '.join(self.holders)}" if self.holders else ""
        return f"{self.path}: {short_bytes(self.bytes)}{holders}"


@dataclasses.dataclass(frozen=True)
class DonationReport:
    """What became of the arrays that a call replaces. `calls_donated` and `calls_kept` count the calls so far."""

    name: str
    donated: tuple[ReplacedArray, ...] = ()
    kept: tuple[ReplacedArray, ...] = ()
    calls_donated: int = 0
    calls_kept: int = 0
    reason: str = ""  # why there is nothing to report

    @property
    def donated_bytes(self) -> int:
        return sum(array.bytes for array in self.donated)

    @property
    def kept_bytes(self) -> int:
        return sum(array.bytes for array in self.kept)

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        lines = [
            f"{self.name}: the last call donated {count_text(len(self.donated), 'array')} of "
            f"{short_bytes(self.donated_bytes)} and kept {len(self.kept)} of {short_bytes(self.kept_bytes)}"
        ]
        return "\n".join([*lines, *rows_of(self.kept, "kept "), *rows_of(self.donated, "donated ")])

    __repr__ = __str__


def rows_of(arrays: tuple[ReplacedArray, ...], prefix: str = "") -> list[str]:
    ordered = sorted(arrays, key=lambda array: -array.bytes)
    more = [f"  and {len(arrays) - _ROWS} more"] if len(arrays) > _ROWS else []
    return [*(f"  {prefix}{array}" for array in ordered[:_ROWS]), *more]


def report_of(name: str, is_auto: bool, table: FunctionTable) -> DonationReport:
    if not is_auto:
        return DonationReport(name, reason=NOT_AUTO.format(name=name))
    # The entry of the last call that could donate: its executables count what they have donated.
    entries = sorted(list(table.entries.values()), key=lambda entry: -entry.used)
    donations = next(((entry, *entry.donations()[0]) for entry in entries if entry.donations()), None)
    if donations is None:
        text = NO_CALL if counts_buffer_users() else NO_COUNTS
        return DonationReport(name, reason=text.format(name=name))
    entry, calls_donated, calls_kept, has_donated, candidates = donations
    variant = table.history.latest_variant(entry)
    paths = leaf_names(entry.graphdef, variant.names if variant is not None else ())
    donated: list[ReplacedArray] = []
    kept: list[ReplacedArray] = []
    for leaf, size, is_donated, holder, reference in candidates:
        if is_donated and has_donated:
            donated.append(ReplacedArray(paths[leaf], size))
        else:
            kept.append(ReplacedArray(paths[leaf], size, _holders(holder, reference)))
    return DonationReport(name, tuple(donated), tuple(kept), calls_donated, calls_kept)


def warn_of_kept(report: DonationReport) -> None:
    arrays = tuple(array for array in report.kept if array.holders)
    size = short_bytes(sum(array.bytes for array in arrays))
    text = KEPT.format(name=report.name, size=size, rows="\n".join(rows_of(arrays)))
    warnings.warn(text, MissedDonationWarning, caller_level())


def _holders(holder: int, reference: Any) -> tuple[str, ...]:
    """Who held an array in the last call; empty where nobody did."""
    if holder == _NOBODY:
        return ()
    if holder == _BUFFER:
        return (VIEW,)
    if holder == _CONTAINER:
        return (CONTAINER,)
    if reference is None:
        return (NOT_NOTED,)
    array = reference()
    return ("an object that is gone by now",) if array is None else holders_of(array)


def holders_of(array: object) -> tuple[str, ...]:
    """The names of what refers to an array, as far as Python can tell."""
    # A frame that runs is not among the referrers, since the collector does not track it.
    names: list[str] = []
    for frame in sys._current_frames().values():
        outer: types.FrameType | None = frame
        while outer is not None:
            names += _in_frame(outer, array)
            outer = outer.f_back
    for referrer in gc.get_referrers(array):
        if isinstance(referrer, types.FrameType):  # of a traceback or a generator
            names += _in_frame(referrer, array)
        else:
            names.append(_in_object(referrer, array))
    return tuple(dict.fromkeys(names))[:_MAX_HOLDERS] or (UNKNOWN,)


def _in_frame(frame: types.FrameType, array: object) -> list[str]:
    code = frame.f_code
    # The functions of this report have the array as well. The locals of a module are its dict, which is among the
    # referrers itself.
    if code.co_filename == holders_of.__code__.co_filename or code.co_name == "<module>":
        return []
    line = code_line(code.co_filename, frame.f_lineno)
    return [f"{name} of {code.co_qualname} ({line})" for name, value in frame.f_locals.items() if value is array]


def _in_object(referrer: object, array: object) -> str:
    if isinstance(referrer, dict):
        key = next((key for key, value in list(referrer.items()) if value is array), None)
        if "__name__" in referrer and "__builtins__" in referrer:
            return f"the global {key} of {referrer['__name__']}"
        # It may be the attributes of an object, which would say more to the reader than a dict.
        owner = next((o for o in gc.get_referrers(referrer) if getattr(o, "__dict__", None) is referrer), None)
        return f"a dict under {key!r}" if owner is None else f".{key} of {_an_instance(owner)}"
    if isinstance(referrer, list | tuple):
        index = next((i for i, value in enumerate(referrer) if value is array), 0)
        return f"a {type(referrer).__name__} of {len(referrer)} at [{index}]"
    if isinstance(referrer, types.GeneratorType | types.CoroutineType):
        code = referrer.gi_code if isinstance(referrer, types.GeneratorType) else referrer.cr_code
        return f"{code.co_qualname}, which is suspended ({code_line(code.co_filename, code.co_firstlineno)})"
    if type(referrer).__name__ in ("managedbuffer", "memoryview"):
        return VIEW
    if isinstance(referrer, types.CellType):
        return "a variable that a closure captures"
    names = [name for name, value in getattr(referrer, "__dict__", {}).items() if value is array]
    return f".{names[0]} of {_an_instance(referrer)}" if names else _an_instance(referrer)


def _an_instance(value: object) -> str:
    is_class = isinstance(value, type)
    return f"the class {value.__qualname__}" if is_class else f"an instance of {type(value).__qualname__}"
