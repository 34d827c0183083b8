# SPDX-License-Identifier: Apache-2.0
"""What `graftax.memory` returns: bytes of a program as a whole, and of each array by its path."""

from __future__ import annotations

import dataclasses
import html
from typing import Any

from graftax._base.errors import some
from graftax._base.size_text import short_bytes

_LARGEST = 10


@dataclasses.dataclass(frozen=True)
class ArrayMemory:
    """One array that a program takes or makes.

    Attributes:
        path: the key path, such as `model.layers[3].w`; of a result it begins with `result`.
        kind: "argument", "captured", "result", or "change" for what is written back into an argument.
        shape, dtype: of the whole array.
        bytes: on one device.
        paths: all places of the array, `path` first: a shared array is listed once.
        is_donated: its memory may be used for a result.
        is_written_back: the call replaces it by a new array.
        is_unused: the program does not read it, so it is not among the bytes of the program.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: Any
    bytes: int
    paths: tuple[str, ...]
    is_donated: bool = False
    is_written_back: bool = False
    is_unused: bool = False

    @property
    def type(self) -> str:
        """Dtype and shape, as `graftax.show` writes them."""
        return f"{self.dtype}{list(self.shape)}"

    @property
    def role(self) -> str:
        """Its kind, and what else is true of it, in words."""
        words = {"donated": self.is_donated, "written back": self.is_written_back, "unused": self.is_unused}
        parts = [self.kind, *(word for word, is_true in words.items() if is_true)]
        if len(self.paths) > 1:
            parts.append(f"also {some(self.paths[1:], 1)}")
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryReport:
    """What `graftax.memory` returns. `print` it, or let a notebook show it. All numbers are bytes on one device.

    Attributes:
        name: of the function.
        devices: how many devices the program runs on.
        argument_bytes: the arrays that the program reads, each shared one once.
        result_bytes: the arrays that it returns or writes back, with XLA's own table of them.
        reused_bytes: the part of `result_bytes` that lies in donated arguments.
        temporary_bytes: what else is needed at the peak.
        code_bytes: the program itself, if the backend reports it.
        host_bytes: arrays whose memory kind is one of the host; not part of the other numbers.
        arguments, results: an `ArrayMemory` for each array.
        analysis: XLA's own numbers, as `jax.stages.Compiled.memory_analysis` returns them.
    """

    name: str
    devices: int
    argument_bytes: int
    result_bytes: int
    reused_bytes: int
    temporary_bytes: int
    code_bytes: int
    host_bytes: int
    arguments: tuple[ArrayMemory, ...]
    results: tuple[ArrayMemory, ...]
    analysis: Any

    @property
    def total_bytes(self) -> int:
        """What one device holds at the peak of a call: everything above, reused memory once."""
        # Results that lie in donated arguments are in both numbers.
        arrays = self.argument_bytes + self.result_bytes - self.reused_bytes
        return arrays + self.temporary_bytes + self.code_bytes

    def largest(self, count: int = _LARGEST) -> list[ArrayMemory]:
        """The largest arrays among arguments and results.

        Args:
            count: how many.
        """
        return sorted((*self.arguments, *self.results), key=lambda array: -array.bytes)[:count]

    def text(self, largest: int = _LARGEST) -> str:
        """The bytes of each kind, and a table of the largest arrays.

        Args:
            largest: the number of arrays.
        """
        rows = [(array.path, array.type, short_bytes(array.bytes), array.role) for array in self.largest(largest)]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        lines = [
            self._headline(),
            *(f"  {word:<12}{short_bytes(count):>8}{note}" for word, count, note in self._kinds()),
        ]
        if rows:
            shown, total = len(rows), len(self.arguments) + len(self.results)
            lines.append("arrays:" if shown == total else f"the largest {shown} of {total} arrays:")
        for path, kind, size, role in rows:
            lines.append(f"  {path:<{widths[0]}}  {kind:<{widths[1]}}  {size:>{widths[2]}}  {role}")
        return "\n".join(lines)

    def table(self) -> list[dict[str, Any]]:
        """A row for each array: path, kind, type, shape, dtype, bytes, and the rest."""
        return [{**vars(array), "type": array.type} for array in (*self.arguments, *self.results)]

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<graftax.memory of {self._headline()}>"

    def _headline(self) -> str:
        devices = f" on each of {self.devices} devices" if self.devices > 1 else ""
        return f"{self.name}: {short_bytes(self.total_bytes)}{devices}"

    def _kinds(self) -> list[tuple[str, int, str]]:
        """(word, bytes, note) of each part of the whole."""
        reused = f", {short_bytes(self.reused_bytes)} of it in donated arguments" if self.reused_bytes else ""
        kinds = [("arguments", self.argument_bytes, ""), ("results", self.result_bytes, reused)]
        kinds += [("temporaries", self.temporary_bytes, ""), ("code", self.code_bytes, "")]
        return [*kinds, *([("on the host", self.host_bytes, "")] if self.host_bytes else [])]

    def _repr_html_(self) -> str:
        kinds = "".join(
            f"<tr><th>{word}</th><td>{short_bytes(count)}{note}</td></tr>" for word, count, note in self._kinds()
        )
        head = "".join(f"<th>{column}</th>" for column in ("path", "type", "bytes", "role"))
        body = ""
        for array in self.largest():
            cells = (array.path, array.type, short_bytes(array.bytes), array.role)
            body += f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
        return f"<p>{html.escape(self._headline())}</p><table>{kinds}</table><table><tr>{head}</tr>{body}</table>"
