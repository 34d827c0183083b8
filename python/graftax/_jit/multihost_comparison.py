# SPDX-License-Identifier: Apache-2.0
"""Hosts compare digests through the coordinator's key-value store: one put and one get a host if all is equal."""

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
from graftax._jax import processes
from graftax._jax.tracebacks import caller_level

HOSTS_DIFFER = (
    "{what}: the hosts differ. {difference}\nEvery host has to call the same functions in the "
    "same order, with the same structures. Broadcast what differs (jax.experimental.multihost_utils), or make it equal."
)
DIFFERENT_ENTRY = "{place} is {first} on host 0, and {other} on host {host}."
DIFFERENT_PATH = "Host 0 has {place} ({first}), where host {host} has {other_place} ({other})."
DIFFERENT_LENGTH = "Host {host} has {other} entries, and host 0 has {first}."
DIFFERENT_PROGRAM = (
    "The structures are equal, but the programs are not. In line {line} host 0 has\n  {first}\nand host {host}\n"
    "  {other}"
)
UNKNOWN_DIFFERENCE = "Host 0 and host {host} differ in {parts}."
DIFFERENT_VALUES = "{place} has other values on host {host} than on host {first}."
HOST_LATE = "{what}: {hosts} not reached comparison {number} after {seconds:.0f} s. This host (host {host}) waits."
HOST_MISSING = (
    "{what}: {hosts} not reached comparison {number} within {seconds:.0f} s. Every host has to make the same calls: a "
    "host that has failed, has run this structure before, or skips the call does not get there. "
    "GRAFTAX_CHECK_HOSTS=300 waits for 300 s, GRAFTAX_CHECK_HOSTS=0 turns the comparison off."
)
HOST_GAVE_UP = "{what}: this host reached comparison {number} after {hosts} had timed out with an error."

_WARN, _FAIL = 10.0, 60.0  # seconds
_DETAIL = 3_000_000  # bytes of a description: the store takes 4 MB in one message
_PREFIX = "graftax/agree"

Line = tuple[str, str]  # (key path, what is there)


class _State:
    """The number of comparisons in this process, and the reason if comparing is impossible."""

    def __init__(self) -> None:
        self.number = 0
        self.lock = threading.RLock()
        self.reason: str | None = None


_state = _State()


def _timeout() -> float:
    """How many seconds a host waits for the others; 0 turns comparisons off."""
    setting = os.environ.get("GRAFTAX_CHECK_HOSTS", "")
    try:
        return float(setting) if setting else _FAIL
    except ValueError:
        return _FAIL


def coordinator() -> processes.Coordinator | None:
    """The coordinator's key-value store; None with one process, or if this version of JAX hides it."""
    if _state.reason is not None:
        return None
    try:
        store = processes.coordinator()
    except Exception as error:
        _state.reason = f"this JAX ({jax.__version__}) lacks what it reads: {type(error).__name__}: {error}"
        return None
    return store if store is not None and store.processes > 1 else None


def compares_hosts() -> bool:
    """Are there several processes, and is the comparison turned on?"""
    return coordinator() is not None and _timeout() > 0


def status() -> str:
    """`on`, or `off` with the reason."""
    if _timeout() <= 0:
        return "off: GRAFTAX_CHECK_HOSTS=0"
    return "on" if coordinator() is not None else f"off: {_state.reason or 'there is one process'}"


def pack_description(lines: list[Line], program: str) -> bytes:
    """A compressed description, shortened to the size that one message of the store can have."""
    # What explains most is kept longest: the structure says where to look, and the program only that it differs.
    for content in ([lines, program.splitlines()], [lines, []], [lines[:10_000], []]):
        data = zlib.compress(json.dumps(content).encode())
        if len(data) <= _DETAIL:
            return data
    return zlib.compress(b"[[], []]")


class HostComparison:
    """One comparison. All hosts make the same comparisons in the same order, so a counter identifies each.

    Host 0 collects what the others publish, judges, and publishes its verdict, for which they wait. Messages name the
    `subject` of the comparison.
    """

    def __init__(self, store: processes.Coordinator, subject: str) -> None:
        self._coordinator, self._subject = store, subject
        with _state.lock:
            _state.number += 1
            self._number = _state.number
        self._begun = time.monotonic()

    def compare_digests(self, parts: dict[str, str], describe: Callable[[], bytes]) -> None:
        """Compares digests between all hosts.

        Args:
            parts: the name and the digest of each part.
            describe: makes the description that explains a difference.

        Raises:
            StructureError: on every host, if two hosts differ.
        """
        # Host 0 compares the bytes, so parts have to be in the same order on all hosts.
        own_parts = json.dumps(parts).encode()

        def judge(parts_of_hosts: list[bytes]) -> dict[str, Any]:
            different = [host for host, other_parts in enumerate(parts_of_hosts) if other_parts != own_parts]
            if different:
                self._publish("description", describe())
            return {"different": different[0]} if different else {}

        with _state.lock:
            verdict = self._verdict(own_parts, judge)
            text = self._difference(verdict["different"], describe) if verdict else ""
        if text:
            raise StructureError(HOSTS_DIFFER.format(what=self._subject, difference=text))

    def compare_copies(self, copies: dict[str, str]) -> None:
        """Compares digests of array shards, each with those of the other hosts that hold the same shard."""

        def judge(copies_of_hosts: list[bytes]) -> dict[str, Any]:
            text = self._unequal_copy([json.loads(zlib.decompress(copies)) for copies in copies_of_hosts])
            return {"text": text} if text else {}

        with _state.lock:
            verdict = self._verdict(zlib.compress(json.dumps(copies).encode()), judge)
        if verdict:
            raise StructureError(HOSTS_DIFFER.format(what=self._subject, difference=verdict["text"]))

    def _verdict(self, message: bytes, judge: Callable[[list[bytes]], dict[str, Any]]) -> dict[str, Any]:
        """Sends `message` to host 0, where `judge` compares. Returns its verdict: empty if everything is equal."""
        hosts = range(1, self._coordinator.processes)
        if self._coordinator.process:
            self._publish(f"from/{self._coordinator.process}", message)
            try:
                verdict: dict[str, Any] = json.loads(self._wait_for("verdict", [0]))
            except StructureError:  # tell host 0: if it came later, it would run alone and hang in a collective
                self._publish(f"left/{self._coordinator.process}", b"")
                raise
        else:
            try:
                verdict = judge([message, *(self._wait_for(f"from/{host}", list(hosts)) for host in hosts)])
            except Exception as error:  # published, so that the others do not wait for the full time as well
                self._publish("verdict", json.dumps({"away": str(error)}).encode())
                raise
            hosts_gone = [f"host {name}" for name in self._names("left/")]
            if hosts_gone:
                verdict = {"away": HOST_GAVE_UP.format(what=self._subject, number=self._number, hosts=some(hosts_gone))}
            self._publish("verdict", json.dumps(verdict).encode())
        if "away" in verdict:
            raise StructureError(verdict["away"])
        return verdict

    @staticmethod
    def _unequal_copy(copies_of_hosts: list[dict[str, str]]) -> str:
        """Which copy of a shard has other values than the first one; empty if none has."""
        first_copies: dict[str, tuple[int, str]] = {}
        for host, copies in enumerate(copies_of_hosts):
            for path, digest in copies.items():
                first_host, first_digest = first_copies.setdefault(path, (host, digest))
                if first_digest != digest:
                    return DIFFERENT_VALUES.format(place=path, host=host, first=first_host)
        return ""

    def _difference(self, host: int, describe: Callable[[], bytes]) -> str:
        """The text of the difference. The host that differs from host 0 finds it and publishes it for all."""
        if self._coordinator.process == host:
            host0 = json.loads(zlib.decompress(self._wait_for("description", [0])))
            own = json.loads(zlib.decompress(describe()))
            self._publish("difference", _first_difference(host, host0, own).encode())
        return self._wait_for("difference", [host]).decode()

    def _key(self, name: str) -> str:
        return f"{_PREFIX}/{self._number}/{name}"

    def _names(self, folder: str) -> list[str]:
        return [name.rpartition("/")[2] for name in self._coordinator.list_names(self._key(folder))]

    def _publish(self, key: str, value: bytes) -> None:
        # With the verdict, all hosts are here: the entries of the last comparison are no longer read.
        if key == "verdict" and self._number > 1:
            self._coordinator.delete(f"{_PREFIX}/{self._number - 1}/")
        self._coordinator.put(self._key(key), value)

    def _wait_for(self, key: str, hosts: list[int]) -> bytes:
        """Waits for a value that one of `hosts` publishes. The timeout error names the missing hosts."""
        key, limit = self._key(key), _timeout() or _FAIL
        for seconds in (_WARN, limit):  # a warning while others may still come, then the error
            value = self._coordinator.get(key, self._begun + min(seconds, limit) - time.monotonic())
            if value is not None:
                return value
            details: dict[str, object] = {"what": self._subject, "number": self._number, "hosts": self._missing(hosts)}
            if seconds == _WARN and limit > _WARN:
                text = HOST_LATE.format(**details, seconds=_WARN, host=self._coordinator.process)
                warnings.warn(text, RuntimeWarning, caller_level())
        raise StructureError(HOST_MISSING.format(**details, seconds=limit))

    def _missing(self, hosts: list[int]) -> str:
        """A phrase that names the missing hosts. Host 0 answers last, so it may itself be waiting for another host."""
        arrived = set(self._names("from/"))
        missing = [host for host in range(1, self._coordinator.processes) if str(host) not in arrived]
        blamed = [host for host in missing if host != self._coordinator.process] or hosts
        return f"{some([f'host {host}' for host in blamed])} {'has' if len(blamed) == 1 else 'have'}"


def _first_difference(host: int, host0_lines: list[Any], own_lines: list[Any]) -> str:
    for (path, first), (other_path, other) in zip(host0_lines[0], own_lines[0], strict=False):
        if path != other_path:
            return DIFFERENT_PATH.format(place=path, first=first, host=host, other_place=other_path, other=other)
        if first != other:
            return DIFFERENT_ENTRY.format(place=path, first=first, other=other, host=host)
    if len(host0_lines[0]) != len(own_lines[0]):
        return DIFFERENT_LENGTH.format(host=host, other=len(own_lines[0]), first=len(host0_lines[0]))
    for line, (first, other) in enumerate(zip(host0_lines[1], own_lines[1], strict=False), 1):
        if first != other:
            return DIFFERENT_PROGRAM.format(line=line, first=first.strip(), other=other.strip(), host=host)
    return UNKNOWN_DIFFERENCE.format(
        host=host, parts="the lowered program" if own_lines[1] else "the structure or the lowered program"
    )
