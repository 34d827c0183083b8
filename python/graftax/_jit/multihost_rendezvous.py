# SPDX-License-Identifier: Apache-2.0
"""How hosts compare: through the key-value store of the coordinator, one put and one get a host while they agree."""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import jax

from graftax._base.errors import StructureError, some
from graftax._jax import fast_dispatch
from graftax._jax.tracebacks import caller_level

DIFFER = (
    "{what}: the hosts differ. {difference}\nEvery host has to call the same functions in the "
    "same order, with the same structures. Broadcast what differs (jax.experimental.multihost_utils), or make it alike."
)
AT_PLACE = "{place} is {mine} on host 0, and {its} on host {host}."
OTHER_PLACES = "Host 0 has {place} ({mine}), where host {host} has {other} ({its})."
SHORTER = "Host {host} has {its} places, and host 0 {mine}."
OTHER_PROGRAM = (
    "The structures are equal, and the programs are not. In line {line} host 0 has\n  {mine}\nand host {host}\n  {its}"
)
UNTOLD = "Host 0 and host {host} differ in {parts}."
VALUES = "{place} has other values on host {host} than on host {first}."
LATE = "{what}: {hosts} not come to comparison {number} after {seconds:.0f} s. This host (host {here}) waits."
AWAY = (
    "{what}: {hosts} not come to comparison {number} within {seconds:.0f} s. Every host has to make the same calls: "
    "one that has failed, has met this structure before, or leaves the call out does not come. GRAFTAX_CHECK_HOSTS=300 "
    "waits for 300 s, GRAFTAX_CHECK_HOSTS=0 compares nothing."
)
LEFT = "{what}: this host came to comparison {number} when {hosts} waited no longer, and had an error."

_WARN, _FAIL = 10.0, 60.0  # seconds
_DETAIL = 3_000_000  # bytes of a description: the store takes 4 MB in one message
_PREFIX = "graftax/agree"

Line = tuple[str, str]  # a place, and what is there


class _State:
    """How many comparisons this process has made, and why there are none. One for the process."""

    def __init__(self) -> None:
        self.number = 0
        self.lock = threading.RLock()
        self.reason: str | None = None


_state = _State()


def _limit() -> float:
    """How long a host waits for others; 0 where nothing is compared."""
    given = os.environ.get("GRAFTAX_CHECK_HOSTS", "")
    try:
        return float(given) if given else _FAIL
    except ValueError:
        return _FAIL


def store() -> fast_dispatch.Coordinator | None:
    """The coordinator's key-value store; None with one process, or where this JAX has none that is known."""
    if _state.reason is not None:
        return None
    try:
        found = fast_dispatch.coordinator()
    except Exception as error:
        _state.reason = f"this JAX ({jax.__version__}) lacks what it reads: {type(error).__name__}: {error}"
        return None
    return found if found is not None and found.processes > 1 else None


def compares() -> bool:
    """Do several processes run, and do they compare what they run?"""
    return _limit() > 0 and store() is not None


def status() -> str:
    """`on`, or `off` and why."""
    if _limit() <= 0:
        return "off: GRAFTAX_CHECK_HOSTS=0"
    return "on" if store() is not None else f"off: {_state.reason or 'there is one process'}"


def packed(lines: list[Line], program: str) -> bytes:
    """A description: as much of it as the store takes."""
    for content in ([lines, program.splitlines()], [lines, []], [lines[:10_000], []]):
        data = zlib.compress(json.dumps(content).encode())
        if len(data) <= _DETAIL:
            return data
    return zlib.compress(b"[[], []]")


class Meeting:
    """One comparison: all hosts make their comparisons in the same order, and number them alike."""

    def __init__(self, there: fast_dispatch.Coordinator, what: str) -> None:
        self._there, self._what = there, what
        with _state.lock:
            _state.number += 1
            self._number = _state.number
        self._begun = time.monotonic()

    def agree(self, parts: dict[str, str], describe: Callable[[], bytes]) -> None:
        """Compares digests.

        Args:
            parts: what is compared, and its digest.
            describe: gives the description, where hosts differ.

        Raises:
            StructureError: on every host, where two differ.
        """
        mine = json.dumps(parts).encode()

        def judge(all_of_them: list[bytes]) -> dict[str, Any]:
            odd = [host for host, its in enumerate(all_of_them) if its != mine]
            if odd:
                self._put("description", describe())
            return {"odd": odd[0]} if odd else {}

        with _state.lock:
            verdict = self._verdict(mine, judge)
            text = self._difference(verdict["odd"], describe) if verdict else ""
        if text:
            raise StructureError(DIFFER.format(what=self._what, difference=text))

    def compare(self, copies: dict[str, str]) -> None:
        """Compares the digests of parts, each with those of other hosts that have it."""

        def judge(all_of_them: list[bytes]) -> dict[str, Any]:
            text = self._first_copy([json.loads(zlib.decompress(its)) for its in all_of_them])
            return {"text": text} if text else {}

        with _state.lock:
            verdict = self._verdict(zlib.compress(json.dumps(copies).encode()), judge)
        if verdict:
            raise StructureError(DIFFER.format(what=self._what, difference=verdict["text"]))

    def _verdict(self, mine: bytes, judge: Callable[[list[bytes]], dict[str, Any]]) -> dict[str, Any]:
        """What host 0 says of what all have put; empty where nothing is wrong."""
        hosts = range(1, self._there.processes)
        if self._there.process:
            self._put(f"from/{self._there.process}", mine)
            try:
                verdict: dict[str, Any] = json.loads(self._get("verdict", [0]))
            except StructureError:  # host 0 would run alone, and wait in a collective, where it comes after this
                self._put(f"left/{self._there.process}", b"")
                raise
        else:
            try:
                verdict = judge([mine, *(self._get(f"from/{host}", list(hosts)) for host in hosts)])
            except Exception as error:  # the others need not wait as long once more
                self._put("verdict", json.dumps({"away": str(error)}).encode())
                raise
            left = [f"host {name.rpartition('/')[2]}" for name in self._there.below(self._key("left/"))]
            if left:
                verdict = {"away": LEFT.format(what=self._what, number=self._number, hosts=some(left))}
            self._put("verdict", json.dumps(verdict).encode())
        if "away" in verdict:
            raise StructureError(verdict["away"])
        return verdict

    @staticmethod
    def _first_copy(copies: list[dict[str, str]]) -> str:
        first: dict[str, tuple[int, str]] = {}
        for host, its in enumerate(copies):
            for place, digest in its.items():
                known = first.setdefault(place, (host, digest))
                if known[1] != digest:
                    return VALUES.format(place=place, host=host, first=known[0])
        return ""

    def _difference(self, host: int, describe: Callable[[], bytes]) -> str:
        """What this host differs in from host 0, found by that host, told to all."""
        if self._there.process == host:
            theirs = json.loads(zlib.decompress(self._get("description", [0])))
            own = json.loads(zlib.decompress(describe()))
            self._put("difference", _first_difference(host, theirs, own).encode())
        return self._get("difference", [host]).decode()

    def _key(self, name: str) -> str:
        return f"{_PREFIX}/{self._number}/{name}"

    def _put(self, key: str, value: bytes) -> None:
        if key == "verdict" and self._number > 1:  # all have come to this one: nobody reads the last one any more
            self._there.delete(f"{_PREFIX}/{self._number - 1}/")
        self._there.put(f"{_PREFIX}/{self._number}/{key}", value)

    def _get(self, key: str, hosts: list[int]) -> bytes:
        """What one of some hosts puts there. They are named where they do not come."""
        key, limit = f"{_PREFIX}/{self._number}/{key}", _limit() or _FAIL
        for seconds in (_WARN, limit):
            found = self._there.get(key, self._begun + min(seconds, limit) - time.monotonic())
            if found is not None:
                return found
            about: dict[str, Any] = {"what": self._what, "number": self._number, "hosts": self._missing(hosts)}
            if seconds == _WARN and limit > _WARN:
                text = LATE.format(**about, seconds=_WARN, here=self._there.process)
                warnings.warn(text, RuntimeWarning, caller_level())
        raise StructureError(AWAY.format(**about, seconds=limit))

    def _missing(self, hosts: list[int]) -> str:
        """The hosts that have not come, in words: host 0 is the last to speak, so it may wait for another one."""
        come = {name.rpartition("/")[2] for name in self._there.below(f"{_PREFIX}/{self._number}/from/")}
        others = [host for host in range(1, self._there.processes) if str(host) not in come]
        away = [host for host in others if host != self._there.process] or hosts
        return f"{some([f'host {host}' for host in away])} {'has' if len(away) == 1 else 'have'}"


def _first_difference(host: int, theirs: list[Any], own: list[Any]) -> str:
    for (place, mine), (other, its) in zip(theirs[0], own[0], strict=False):
        if place != other:
            return OTHER_PLACES.format(place=place, mine=mine, host=host, other=other, its=its)
        if mine != its:
            return AT_PLACE.format(place=place, mine=mine, its=its, host=host)
    if len(theirs[0]) != len(own[0]):
        return SHORTER.format(host=host, its=len(own[0]), mine=len(theirs[0]))
    for line, (mine, its) in enumerate(zip(theirs[1], own[1], strict=False), 1):
        if mine != its:
            return OTHER_PROGRAM.format(line=line, mine=mine.strip(), its=its.strip(), host=host)
    return UNTOLD.format(host=host, parts="the lowered program" if own[1] else "the structure or the lowered program")
